"""One process of the job that test_processes.py starts: runs the cases, and leaves what each gave in a file.

Usage: processes_worker.py FOLDER [CASE ...], under `jdp launch` or with its environment; without CASE all of them.
"""

import os
import pathlib
import pickle
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import jdp

jdp.distributed.initialize(timeout=60, quiet=True)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jdp._checkpoint import directory as directory_of

P, N = jax.process_index(), jax.process_count()
ROWS = {2: (9, 5), 3: (5, 0, 4), 4: (3, 6, 1, 4)}[N]  # of each process
START = sum(ROWS[:P])
MINE = slice(START, START + ROWS[P])


def data(features=5, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(ROWS), features)).astype(np.float32)
    return x, rng.normal(size=(sum(ROWS), 3)).astype(np.float32)


X, Y = data()
BATCH = {"x": X[MINE], "y": Y[MINE]}
MLP = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)])


def variables():
    return MLP.init(jax.random.key(0), X[:1])


def mse(v, batch):
    return jnp.mean((MLP.apply(v, batch["x"]) - batch["y"]) ** 2)


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(4, use_bias=False)(x)  # a bias before a BatchNorm gets noise for a gradient, and Adam enlarges it
        return nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name, epsilon=1e-2)(x)


def case_apply():
    dp = jdp.DataParallel(MLP)
    v = dp.init(jax.random.key(0), X[:1])
    out = dp.apply(v, X[MINE])
    host = jax.device_get(v)
    places = {name: jdp.DataParallel(MLP, output_device=name) for name in (0, 1, -1, "cpu", "sharded")}
    outs = {str(name): places[name].apply(host, X[MINE]) for name in places}
    return {
        "out": out,
        "local": all(d.process_index == P for d in out.sharding.device_set),
        "params_replicated": all(x.sharding.device_set == set(jax.devices()) for x in jax.tree.leaves(v)),
        "host_params": {d == jax.local_devices()[0] for d in dp.apply(host, X[MINE]).devices()},
        "outs": {name: np.asarray(x) for name, x in outs.items()},
        "devices": {name: sorted(d.id for d in x.devices()) for name, x in outs.items()},
        "own": sorted(d.id for d in jax.local_devices()),
    }


def case_other_output_device():
    """A device of another process stands for its counterpart here."""
    theirs = next(d for d in reversed(jax.devices()) if d.process_index != P)
    dp = jdp.DataParallel(MLP, output_device=theirs)
    return dp.apply(variables(), X[MINE]).devices() <= set(jax.local_devices())


def case_no_rows_here():
    rows = 6 if P == 0 else 0
    return jdp.DataParallel(MLP).apply(variables(), X[:rows])


def case_nothing_cut():
    dp = jdp.DataParallel(lambda w, k: {"scaled": w * k, "vector": jnp.stack([w * k, w])})
    return dp(np.float32(3), np.float32(P + 1))


def case_nothing_cut_gradient():
    """The mean over the processes, each of which runs once."""
    dp = jdp.DataParallel(lambda w, k: w * k)
    return dp.value_and_grad(lambda w, k: w * k)(np.float32(2), np.float32(P + 1))


def case_committed_parameters():
    """Each process takes them from the first device of its own."""
    dp = jdp.DataParallel(MLP)
    first, second = (jax.device_put(variables(), d) for d in jax.local_devices()[:2])
    out = dp.apply(first, X[MINE])
    refused = text_of(lambda: dp.apply(second, X))
    return {"out": out, "home": out.devices() == {jax.local_devices()[0]}, "second": refused}


def case_whole_argument():
    dp = jdp.DataParallel(lambda w, x, shift: x * w + shift, in_axes=(0, None))
    return dp(2.0, X[MINE], np.arange(5.0, dtype=np.float32))


def case_functional():
    return jdp.data_parallel(MLP.apply, variables(), X[MINE])


def case_global_arrays():
    """A batch that is a global array already, cut over all devices."""
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
    local = X[: 2 * jax.local_device_count()] + P
    x = jax.make_array_from_process_local_data(sharding, local)
    return {"out": jdp.DataParallel(MLP).apply(variables(), x), "local": local}


def case_batch_norm():
    found = {}
    for reduce_state in ("primary", "mean"):
        dp = jdp.DataParallel(Normed(), reduce_state=reduce_state)
        v = dp.init(jax.random.key(0), X[:2])
        out, state = dp.apply(v, X[MINE], mutable=["batch_stats"])
        found[reduce_state] = {"out": out, "state": state}
    return found


def case_dropout():
    dp = jdp.DataParallel(nn.Dropout(0.5, deterministic=False))
    return dp.apply({}, np.ones((4, 64), np.float32), rngs={"dropout": jax.random.key(1)})


def case_value_and_grad():
    dp = jdp.DataParallel(MLP)

    def vector(v, batch):
        return jnp.mean((MLP.apply(v, batch["x"]) - batch["y"]) ** 2, -1), {"rows": batch["x"][:, 0]}

    def ratio(v, batch):
        mask = batch["y"][:, 0] > 0
        error = jnp.sum((MLP.apply(v, batch["x"]) - batch["y"]) ** 2, -1)
        return jdp.Mean(jnp.sum(error * mask), jnp.sum(mask))

    v = variables()
    rows = dp.value_and_grad(lambda v, x, y: jnp.mean((MLP.apply(v, x) - y) ** 2), argnums=1)
    return {
        "accumulated": dp.value_and_grad(mse, accumulate_steps=2)(v, BATCH),
        "vector": dp.value_and_grad(vector, has_aux=True)(v, BATCH),
        "ratio": dp.value_and_grad(ratio)(v, BATCH),
        "rows": rows(v, BATCH["x"], BATCH["y"]),
        "grad": dp.grad(mse)(v, BATCH),
    }


def case_gradient_of_a_scalar():
    return jdp.DataParallel(MLP).value_and_grad(mse)(variables(), BATCH)


def train(dp, steps=4, loss=mse, batch=BATCH, start=None, **options):
    step = dp.train_step(loss, optax.adam(1e-2), **options)
    state, losses = step.init(start or variables()), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"losses": losses, "params": state.params, "step": int(state.step)}, step, state, metrics


def case_train():
    return train(jdp.DataParallel(MLP))[0]


def case_train_options():
    dp = jdp.DataParallel(MLP)
    found = {
        "accumulated": train(dp, accumulate_steps=2)[0],
        "checked": train(dp, check_replicas=2)[0],
        "bfloat16": train(dp, reduce_dtype=jnp.bfloat16)[0]["losses"],
    }
    result, step, state, _ = train(dp, shard_optimizer=True)
    moments = jax.tree.leaves(state.opt_state)
    found["sharded"] = result
    found["cut"] = sum(not x.is_fully_replicated for x in moments)
    found["bytes"] = tuple(step.optimizer_bytes(state))
    return found


def all_pairs(outputs, batch):
    """A loss of pairs of rows, with a metric of each row."""
    error = jnp.mean((outputs - batch["y"]) ** 2, -1)
    return jnp.sqrt(jnp.mean(jax.nn.logsumexp(outputs @ outputs.T, -1) ** 2)) + error.max(), {"rows": error}


def forward(v, batch):
    return MLP.apply(v, batch["x"])


def case_criterion():
    return jdp.DataParallel(MLP).value_and_grad(forward, criterion=all_pairs, has_aux=True)(variables(), BATCH)


def case_sum_of_terms():
    def terms(v, batch):
        error, positive = jnp.mean((forward(v, batch) - batch["y"]) ** 2, -1), batch["y"][:, 0] > 0
        return jdp.Mean(jnp.sum(error * positive), jnp.sum(positive)) + 0.5 * jdp.Sum(error.sum()) - error

    return jdp.DataParallel(MLP).value_and_grad(terms)(variables(), BATCH)


def case_criterion_options():
    dp, v = jdp.DataParallel(MLP), variables()
    step = dp.train_step(forward, optax.adam(1e-2), criterion=all_pairs)
    state, wrong = step.init(v), dp.train_step(spread, optax.sgd(1.0))
    return {
        "accumulated": dp.value_and_grad(forward, criterion=all_pairs, has_aux=True, accumulate_steps=2)(v, BATCH),
        "check": bool(step.check(state, BATCH)),
        "wrong": bool(wrong.check(wrong.init(v), BATCH)),
        "trained": train(dp, loss=forward, criterion=all_pairs)[0],
        "sharded": train(dp, loss=forward, criterion=all_pairs, shard_params=True)[0]["losses"],
    }


def spread(v, batch):
    """A loss that norms its rows, which no trace tells from BatchNorm."""
    outputs = MLP.apply(v, batch["x"])
    return jnp.mean(((outputs - outputs.mean(0)) / (1 + outputs.var(0))) ** 2)


def case_shard_params():
    """Parameters that are cut over the devices of both processes: no process has them all."""
    dp, found = jdp.DataParallel(MLP), {}
    ways = {"plain": {}, "accumulated": {"accumulate_steps": 2}, "checked": {"check_replicas": 2}}
    for name, options in ways.items():
        result, step, state, _ = train(dp, shard_params=True, **options)
        found[name] = result | {"params": jdp.replicate(result["params"])}
    found["bytes"] = tuple(step.parameter_bytes(state)), tuple(step.optimizer_bytes(state))
    with jdp.Checkpointer(pathlib.Path(sys.argv[1], "sharded")) as checkpointer:
        checkpointer.save(4, state)
        again, _ = checkpointer.restore(step.init(variables()))
        whole, _ = checkpointer.restore(dp.train_step(mse, optax.adam(1e-2)).init(variables()))
    found["again"] = jdp.replicate(again.params), [x.sharding == y.sharding for x, y in both(again, state)]
    found["whole"] = whole.params, {x.is_fully_replicated for x in jax.tree.leaves(whole)}
    v = {"params": step.init(variables()).params}
    loss, grads = dp.value_and_grad(mse)(v, BATCH)
    found["gradient"] = loss, jdp.replicate(grads), [x.sharding == y.sharding for x, y in both(grads, v)]
    found["apply"] = dp.apply(v, BATCH["x"])
    even = {name: x[:4] for name, x in BATCH.items()}
    found["even"] = [train(dp, batch=even, shard_params=sharded)[0]["losses"] for sharded in (False, True)]
    return found


def case_other_shards():
    """Values that are not the same in both processes, where each device would keep a part of either."""
    dp, said = jdp.DataParallel(MLP), {}
    mine = {"params": jax.tree.map(np.array, variables()["params"])}
    mine["params"]["layers_0"]["kernel"][0, 0] += P
    step = dp.train_step(mse, optax.adam(1e-2), shard_params=True)
    plain = {"w": np.full((4, 4), float(P), np.float32)}
    ways = {
        "values": lambda: step.init(mine),
        "key": lambda: dp.init(jax.random.key(P), X[:1], shard_params=True),
        "seed": lambda: jdp.DataParallel(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(P)), shard_params=True),
        "model": lambda: jdp.DataParallel(nnx.Linear(4, 4, rngs=nnx.Rngs(P)), shard_params=True),
        "shapes": lambda: step.init({"params": plain if P else {"w": plain["w"][:2]}}),
        "not at all": lambda: dp.init(jax.random.key(3), X[: 1 + P], shard_params=True),
    }
    for name, way in ways.items():
        try:
            way()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    made = dp.init(jax.random.key(3), X[:1], shard_params=True)
    return said, jdp.replicate(made["params"])


def both(a, b):
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


def case_train_rows():
    def loss(v, batch):
        error = (MLP.apply(v, batch["x"]) - batch["y"]) ** 2
        hits = jnp.sum(error > 1)
        metrics = {"rows": jnp.sum(error, -1), "hits": jdp.Mean(hits, error.size), "number of hits": jdp.Sum(hits)}
        return jnp.mean(error, -1), metrics

    return train(jdp.DataParallel(MLP), 1, loss)[3]


def case_train_key():
    """Dropout in training: one process has other masks than another, and all have the same state."""
    model = nn.Sequential([nn.Dense(64), nn.Dropout(0.5, deterministic=False)])
    dp = jdp.DataParallel(model)
    v = dp.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X[:1])

    def loss(v, x, key):
        out = model.apply(v, x, rngs={"dropout": key})
        return jnp.mean(out**2), {"kept": (out != 0).astype(jnp.float32)}

    step = dp.train_step(loss, optax.sgd(0.1))
    state, metrics = step(step.init(v, jax.random.key(5)), np.ones((2 * jax.local_device_count(), 5), np.float32))
    dp.check_replicas(state)
    return metrics["kept"]


def case_nonfinite():
    batch = {name: x.copy() for name, x in BATCH.items()}
    if P == N - 1:
        batch["x"][1] = np.nan
    dp = jdp.DataParallel(MLP)
    result, step, state, metrics = train(dp, 2, batch=batch, skip_nonfinite=True)
    bad = step.find_nonfinite(state, batch)
    names = [(b.replica, b.device.process_index, b.rows, len(b.paths)) for b in bad]
    return {"step": result["step"], "skipped": bool(metrics["skipped"]), "bad": names, "params": state.params}


def case_sync_batch_norm():
    model = Normed()
    dp = jdp.DataParallel(model)
    v = jax.device_get(dp.init(jax.random.key(0), X[:2]))

    def loss(v, batch):
        out, updates = model.apply(v, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["x"][:, :4]) ** 2), {}, updates

    result, _, state, _ = train(dp, 3, loss, start=v, sync_batch_norm=True)
    return {**result, "state": state.state}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def case_nnx():
    model = Net(nnx.Rngs(0))
    dp = jdp.DataParallel(model)
    before = dp(X[MINE])

    def loss(m, batch):
        error = (m(batch["x"]) - batch["y"]) ** 2
        return jnp.mean(error), {"rows": jnp.sum(error, 1)}

    step = dp.train_step(loss, optax.adam(1e-2))
    metrics = [step(BATCH) for _ in range(3)]
    losses, rows = [float(m["loss"]) for m in metrics], (metrics[-1]["rows"], step.last["rows"])
    loss, grads = dp.value_and_grad(lambda m, batch: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(dp.module, BATCH)
    dp.check_replicas()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    found = {"before": before, "losses": losses, "params": params, "loss": loss, "after": dp(X[MINE])}
    return found | {"rows": rows}


def batches(count):
    return [{"x": X[k : k + 2 + P], "y": Y[k : k + 2 + P]} for k in range(count)]


def case_prefetch():
    """Each process has another number of batches, of other sizes; process 0 has none."""
    dp = jdp.DataParallel(MLP)
    found = {}
    for size in (0, 2):
        step = dp.train_step(mse, optax.sgd(0.1))
        state, losses, sizes = step.init(variables()), [], []
        for batch in dp.prefetch(iter(batches(2 * P)), size):
            sizes.append(batch["x"].sizes)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        found[f"size {size}"] = {"losses": losses, "params": state.params, "sizes": sizes}
    outputs = [dp.apply(variables(), b) for b in dp.prefetch([b["x"] for b in batches(2 * P)])]
    names = [b["name"] for b in dp.prefetch([{"x": X[:4], "name": "fold [1]"}] * P)]
    return {**found, "outputs": outputs, "names": names}


def case_evaluate():
    """Each process has another number of batches, of other sizes; process 0 has none."""
    dp = jdp.DataParallel(MLP)

    def metrics(v, batch):
        y = MLP.apply(v, batch["x"])
        positive = y > 0
        hits = jdp.Mean(positive.sum(), positive.size)
        return {"mse": jnp.mean((y - batch["y"]) ** 2), "hits": hits, "sum": jdp.Sum(positive.sum(0)), "y": y}

    some = dp.evaluate(metrics, variables(), batches(2 * P))
    all_rows = dp.evaluate(metrics, variables(), dp.batches({"x": X, "y": Y}, 6))
    model = nnx.Sequential(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    held = jdp.DataParallel(model)
    of_nnx = held.evaluate(lambda model, x: {"mean": model(x).mean(), "y": model(x)}, [X[MINE]])
    try:
        dp.evaluate(metrics, variables(), [])
    except ValueError as error:
        nothing = str(error)
    return {"some": some, "all": all_rows, "nnx": of_nnx, "nothing": nothing}


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, epsilon=1e-2)(nn.Dense(4, use_bias=False)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


def case_replicas():
    """Twice as many replicas as devices: the rows of a process are those of its replicas."""
    count = 2 * jax.device_count()
    dp = jdp.DataParallel(Noisy(), replicas=count)
    v = dp.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def mine(rows):
        sizes = jdp.chunk_sizes(rows, count)
        start, stop = (sum(sizes[: q * count // N]) for q in (P, P + 1))
        return slice(start, stop)

    def loss(v, batch, key):
        out, state = Noisy().apply(v, batch["x"], rngs={"dropout": key}, mutable=["batch_stats"])
        error = jnp.sum((out - batch["y"]) ** 2, -1)
        return jnp.mean(error), {"each": error}, state

    found = {}
    for options in ({}, {"sync_batch_norm": True}, {"accumulate_steps": 2, "shard_optimizer": True}):
        step = dp.train_step(loss, optax.sgd(0.1, momentum=0.9), **options)
        state, metrics, sizes = step.init(v, key=jax.random.key(2)), [], []
        batches = [{"x": X[mine(rows)], "y": Y[mine(rows)]} for rows in (8, 14, 3)]
        for batch in dp.prefetch(batches):
            sizes.append(batch["x"].sizes)
            state, more = step(state, batch)
            metrics.append(more)
        found[str(options)] = {"metrics": metrics, "params": state.params, "stats": state.state, "sizes": sizes}
    taken = [(b.sizes, jdp.gather(b)) for b in dp.batches(X, 10)]
    own = next(iter(dp.prefetch([X[mine(14)]])))
    out = dp.apply(v, X[mine(10)], rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])
    wrong = text_of(lambda: dp.apply(v, X[:7], rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"]))
    return {
        "steps": found,
        "taken": taken,
        "out": out,
        "wrong": wrong,
        "chunks": {i: own[i] for i in range(len(own)) if own.devices[i].process_index == P},
        "elsewhere": text_of(lambda: own[count // N if P == 0 else 0]),
    }


def case_objects_in_the_batch():
    """NNX objects and a whole table in the batch of a step, around the parts of what prefetch yields."""

    def loss(v, batch):
        (x, y), table, rngs, norm = batch
        x = norm(x) * jax.random.bernoulli(rngs.dropout(), 0.5, x.shape) * table
        return jnp.mean((MLP.apply(v, x) - y) ** 2)

    table, rngs, norm = np.arange(5, dtype=np.float32), nnx.Rngs(dropout=3), nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    step = jdp.DataParallel(MLP, reduce_state="mean").train_step(loss, optax.sgd(0.1), in_axes=(0, None, None, None))
    state, losses = step.init(variables()), []
    dp = jdp.DataParallel(MLP)
    for x, y in dp.prefetch([(X[k : k + 4 + 2 * P], Y[k : k + 4 + 2 * P]) for k in range(1 + P)]):
        state, metrics = step(state, ((x, y), table, rngs, norm))
        losses.append(float(metrics["loss"]))
    found = {"losses": losses, "params": state.params, "count": int(rngs.dropout.count[...]), "mean": norm.mean[...]}
    return {**found, "drawn": jax.random.normal(rngs.dropout())}  # the objects are this process's own still


class Pair(NamedTuple):
    x: Any
    y: Any


def case_prefetch_own_type():
    """A process that has run out goes on with batches of the type that it had."""
    dp = jdp.DataParallel(lambda w, pair: pair.x * w + pair.y)
    ones = np.ones((2, 3), np.float32)
    return [dp(2.0, pair) for pair in dp.prefetch([Pair(ones * k, ones) for k in range(1 + 2 * P)])]


def case_other_mesh():
    """A context's mesh changes nothing for the batches that a process prefetches."""
    dp = jdp.DataParallel(lambda w, x: x * w)
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    meshes = [dp.mesh, *(jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(kind,)) for kind in kinds)]
    found = []
    for mesh in meshes:
        with jax.set_mesh(mesh):
            found.append([x.rows for x in dp.prefetch([np.arange(3.0 + P)])])
            found.append([x.rows for x in dp.batches(np.arange(7.0), 4)])
    return found


def case_numbers():
    """Python numbers, and arrays of them, take the type of what they meet, as in one process."""
    dp, x = jdp.DataParallel(lambda w, x, s=1: x * w["a"] * s), jnp.ones(3, jnp.bfloat16)
    calls = [({"a": 2.0}, x), ({"a": jnp.asarray(2.0)}, x), ({"a": jnp.ones((), jnp.bfloat16)}, x, jnp.asarray(2.0))]
    calls += [({"a": jnp.full(1, 2.0)}, x), ({"a": jnp.ones((), jnp.bfloat16)}, jnp.full(3, 2.0))]
    ahead = dp.prefetch([jnp.full(3, 2.0)] if P == 0 else [])  # the others make a batch of no rows
    return [dp.apply(*call).dtype for call in calls] + [dp.apply({"a": x[0]}, batch).dtype for batch in ahead]


def case_mixed():
    """Results that are whole beside such that are cut: uneven here, parameters everywhere; and one device a process."""
    w = np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32)

    def loss(w, x):
        return jnp.mean((x @ w) ** 2), {"rows": x[:, 0]}

    first = [next(d for d in jax.devices() if d.process_index == p) for p in range(N)]
    found = {}
    for name, devices in (("all", None), ("one each", first)):
        both = jdp.DataParallel(lambda w, x: (x @ w, w.sum()), devices, out_axes=(0, None))
        dp = jdp.DataParallel(lambda w, x: x @ w, devices)
        for where, params in (("replicated", jdp.replicate(w, devices)), ("host", w)):
            value = dp.value_and_grad(loss, has_aux=True)(params, X[MINE])
            home = {d.process_index for d in value[1].devices()}
            found[f"{name}, {where}"] = {"value": value, "both": both(params, X[MINE]), "home": home}
    return found


def case_two_iterators():
    """One is asked for a batch now and then, as an evaluation is, the other two hundred times between."""
    dp = jdp.DataParallel(MLP)
    rare, often = (dp.prefetch((X[MINE] + k for k in range(300)), 1) for _ in range(2))
    gathered = [jdp.gather(next(rare))]
    for _ in range(200):
        next(often)
    return {"rare": [*gathered, jdp.gather(next(rare))], "often": jdp.gather(next(often))}


def case_scattered_whole():
    """What is scattered, but whole, knows nothing of the rows."""
    dp = jdp.DataParallel(lambda w, x: x * w)
    dp3 = jdp.DataParallel(lambda w, x, k: x * w * k)
    turns = dp.prefetch([np.float32(7 + P)] * (1 + P))
    return {
        "alone": dp(2.0, jdp.scatter(np.float32(P + 1))),
        "beside": dp3(2.0, X[MINE], jdp.scatter(np.float32(2))),
        "turns": [dp(np.float32(1), batch) for batch in turns],
    }


def case_iterator_fails():
    """On one process only: it says why, and the others whose it was, all at the same batch."""
    dp, seen = jdp.DataParallel(lambda w, x: x * w), []

    def source():
        yield X[MINE]
        if P == 1:
            raise OSError("the disk is gone")
        yield from [X[MINE]] * 5

    def loop():
        for batch in dp.prefetch(source()):
            seen.append(dp(1.0, batch).shape[0])

    return {"text": text_of(loop), "seen": seen, "call": text_of(lambda: dp(1.0, X[MINE] if P else np.array(["a"])))}


def case_checkpoint_data():
    """The cursor is each process's own; arrays that a process holds for itself are equal in all, or refused."""
    state = {"w": jdp.replicate(np.arange(3.0, dtype=np.float32)), "n": 5}
    with jdp.Checkpointer(pathlib.Path(sys.argv[1], "own")) as checkpointer:
        checkpointer.save(1, state, data={"position": 100 * P, "losses": [0.5] * 2000})
        found, data = checkpointer.restore(state)
        differs = text_of(lambda: checkpointer.save(2, {**state, "n": P}))
        lacks = text_of(lambda: checkpointer.save(2, {"w": state["w"]} | ({"n": 5} if P else {})))
        more = text_of(lambda: checkpointer.save(2, state | ({"more": state["w"]} if P else {})))
        one = text_of(lambda: checkpointer.save(2, state, data=object() if P else None))
        steps = text_of(lambda: checkpointer.save(2 + P, state))
        back = text_of(lambda: checkpointer.restore(state, step=None if P else 1))
    directory_of._PATIENCE = 2.0
    other = pathlib.Path(sys.argv[1], f"not shared {P}")
    other.mkdir()
    if P:
        (other / ".jdp-lock").touch()  # a job that was killed has left it
    with jdp.Checkpointer(other) as alone:
        apart = text_of(lambda: alone.save(1, state))
    texts = {"differs": differs, "lacks": lacks, "more": more, "one": one, "steps": steps, "back": back, "apart": apart}
    return {"w": found["w"], "data": data, "latest": checkpointer.latest_step, "left": os.listdir(other)} | texts


def case_two_checkpointers():
    """Both save the same steps at once, and neither waits at the other's barriers."""
    state = {"w": jdp.replicate(np.arange(100000.0, dtype=np.float32))}
    folders = [pathlib.Path(sys.argv[1], name) for name in ("one", "other")]
    with jdp.Checkpointer(folders[0]) as one, jdp.Checkpointer(folders[1], every=2) as other:
        for step in range(1, 21):
            one.save(step, state)
            other.save(step, state)
        return {"w": [x.restore(state)[0]["w"] for x in (one, other)], "latest": [one.latest_step, other.latest_step]}


def case_closed_in_one_process():
    """The next save is refused, and not begun; when all have closed it, they go on."""
    state = {"w": jdp.replicate(np.arange(3.0, dtype=np.float32))}
    checkpointer = jdp.Checkpointer(pathlib.Path(sys.argv[1], "closed"))
    checkpointer.save(1, state)
    if P == 0:
        checkpointer.close()
    refused = text_of(lambda: checkpointer.save(2, state))
    checkpointer.close()
    checkpointer.save(2, state)
    checkpointer.close()
    return {"refused": refused, "latest": checkpointer.latest_step}


def case_empty_arrays():
    """An array without elements that is cut over the processes is not written, and comes back."""
    cut = NamedSharding(jdp.DataParallel(MLP).mesh, PartitionSpec("data"))
    empty = jax.make_array_from_callback((4, 0), cut, lambda index: np.zeros((1, 0), np.float32))
    with jdp.Checkpointer(pathlib.Path(sys.argv[1], "empty")) as checkpoints:
        checkpoints.save(1, {"w": jdp.replicate(np.ones(2)), "empty": empty})
        state, _ = checkpoints.restore({"w": jdp.replicate(np.zeros(2)), "empty": empty})
    return {"w": state["w"], "shape": state["empty"].shape, "is cut": state["empty"].sharding == cut}


def case_verbs():
    s = jdp.scatter({"x": X[MINE], "name": "a"})
    own = [i for i, d in enumerate(s.devices) if d.process_index == P]
    other = next(i for i in range(len(s)) if i not in own)
    doubled = jdp.parallel_apply(lambda w, tree: {"x": tree["x"] * w, "sum": tree["x"].sum(0)}, 2.0, s)
    try:
        s[other]
    except ValueError as error:
        refused = str(error)
    even = jdp.scatter(np.full((2 * jax.local_device_count(), 2), P + 1.0, np.float32))
    return {
        "sizes": s.sizes,
        "own": [s[i]["x"] for i in own],
        "refused": refused,
        "gathered": jdp.gather(s)["x"],
        "doubled": jdp.gather(doubled)["x"],
        "added": jdp.reduce_add(even),
        "added_everywhere": jdp.reduce_add(even, "all"),
        "chunks": jdp.scatter(X[MINE], chunk_sizes=(ROWS[P], *[0] * (jax.local_device_count() - 1))).sizes,
    }


def case_parallel():
    """A step written for pmap, with its own pmean."""

    def step(w, x, y):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * jax.lax.pmean(grad, "batch"), loss

    rows = 2 * jax.local_device_count()
    dp = jdp.DataParallel(lambda w, x: x @ w)
    w, losses = dp.parallel(step, axis_name="batch")(np.ones((5, 3), np.float32), X[:rows] + P, Y[:rows])
    # As pmap has it: the state donated, the rows with an axis for the devices of this process.
    per_device = dp.parallel(
        step, axis_name="batch", donate_argnums=0, in_axes=(None, "stacked", "stacked"), out_axes=(None, "stacked")
    )
    own = [a[:rows].reshape(-1, 2, *a.shape[1:]) for a in (X + P, Y)]
    same_w, same_losses = per_device(np.ones((5, 3), np.float32), *own)
    twice, _ = per_device(same_w, *own)
    return {
        "w": w,
        "losses": losses,
        "stacked": same_losses,
        "twice": (twice, dp.parallel(step, axis_name="batch")(w, X[:rows] + P, Y[:rows])[0]),
        "freed": same_w.is_deleted(),
    }


def one_ulp(value):
    """A replicated array that is another on the last device of all."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    last = jax.devices()[-1]
    copies = [
        jax.device_put(np.nextafter(value, np.float32(9)) if d == last else value, d) for d in jax.local_devices()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, NamedSharding(mesh, PartitionSpec()), copies)


def text_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def case_check_replicas():
    dp = jdp.DataParallel(MLP)
    good = jdp.replicate(variables())
    dp.check_replicas(good)
    bad = {"params": {"w": one_ulp(np.ones(4, np.float32)), "b": jdp.replicate(np.ones(3, np.float32))}}
    step = jdp.DataParallel(lambda v, x: x).train_step(lambda v, x: jnp.mean(x), optax.sgd(0.1))
    return {"check": text_of(lambda: dp.check_replicas(bad)), "init": text_of(lambda: step.init(bad))}


def case_explain():
    dp = jdp.DataParallel(MLP)
    step = dp.train_step(mse, optax.adam(1e-2))
    state = step.init(variables())
    s = jdp.scatter(BATCH)
    from jdp._processes.exchange import Exchange

    before = Exchange.calls
    reports = [jdp.explain(step, state, BATCH), jdp.explain(dp.apply, variables(), BATCH["x"])]
    drawn = [reports[0], state, dp, s] if P == 0 else []  # what the others do not draw
    return {
        "drawn": [x._repr_html_() is not None for x in drawn],
        "exchanged": Exchange.calls - before,
        "rows": [r.rows for r in reports],
        "processes": reports[0].processes,
        "bytes": [r.collective_bytes for r in reports],
        "carried": sorted(p for c in reports[0].collectives for p in c.parameters),
        "alone": reports[0].one_device is not None,
        "text": str(reports[0]),
    }


def case_other_parameters():
    """Each process draws its own, or sets another learning rate."""
    dp, of_this_process = jdp.DataParallel(MLP), optax.inject_hyperparams(optax.sgd)(0.1 * (1 + P))
    return {
        "init": text_of(lambda: dp.init(jax.random.key(P), X[:1])),
        "nnx": text_of(lambda: jdp.DataParallel(Net(nnx.Rngs(P)))),
        "optimizer": text_of(lambda: jdp.DataParallel(MLP).train_step(mse, of_this_process).init(variables())),
        "optimizer of nnx": text_of(lambda: jdp.DataParallel(Net(nnx.Rngs(0))).train_step(mse, of_this_process)),
    }


def case_refused():
    dp = jdp.DataParallel(MLP)
    v = jdp.replicate(variables())
    theirs = [d for d in jax.devices() if d.process_index != P][:1]
    return {
        "jit": text_of(lambda: jax.jit(dp.apply)(v, X[MINE])),
        "closure": text_of(lambda: jax.jit(lambda v: dp.apply(v, X[MINE]))(v)),
        "list": text_of(lambda: list(jdp.scatter(X[MINE]))),
        "no_features": text_of(lambda: jdp.DataParallel(lambda w, x: x * w)(1.0, np.zeros((4, 0), np.float32))),
        "grad": text_of(lambda: jax.grad(lambda v: dp.apply(v, X[MINE]).sum())(v)),
        "reduce_add": text_of(
            lambda: jax.grad(
                lambda w: jdp.reduce_add(
                    jdp.parallel_apply(lambda w, x: (x * w).sum(), w, jdp.scatter(np.ones((4, 2), np.float32)))
                )
            )(1.0)
        ),
        "devices": text_of(lambda: jdp.DataParallel(MLP, devices=theirs)),
        "scatter": text_of(lambda: jdp.scatter(X, devices=theirs)),
        "uneven_collectives": text_of(
            lambda: jdp.DataParallel(Normed(axis_name="data")).apply(
                Normed().init(jax.random.key(0), X[:2]), X[MINE], mutable=["batch_stats"]
            )
        ),
        "rows": text_of(lambda: dp.value_and_grad(mse)(v, {"x": X[:0], "y": Y[:0]})),
        "features": text_of(lambda: jdp.scatter({"x": X[MINE, : 4 + P]})),
        "dtypes": text_of(lambda: jdp.scatter({"x": X[MINE].astype(np.float32 if P else np.int32)})),
    }


def in_thread(call):
    texts = []
    thread = threading.Thread(target=lambda: texts.append(text_of(call)), name="another")
    thread.start()
    thread.join()
    return texts[0]


def case_thread():
    """From a second thread neither jdp nor JAX runs anything over several processes; alone it may compute."""
    dp = jdp.DataParallel(lambda w, x: x * w)
    total, x = jax.jit(jnp.sum), jdp.scatter(X[MINE])._arrays[0]
    before = float(total(x))
    return {
        "jdp": in_thread(lambda: dp(2.0, X[MINE])),
        "jax": in_thread(lambda: total(x)),
        "local": in_thread(lambda: jnp.ones(3).sum().block_until_ready()),
        "after": float(total(x)) == before and dp(2.0, X[MINE]).shape == X[MINE].shape,
    }


def case_local_devices():
    """The wrapper of this process's devices alone waits for nobody: here only process 0 calls it."""
    if P:
        return None
    dp = jdp.DataParallel(MLP, devices=jax.local_devices())
    v = dp.init(jax.random.key(0), X[:1])
    grad = jax.jit(jax.grad(lambda v: dp.apply(v, X).sum()))(v)
    return {"out": dp.apply(v, X), "grad": grad}


def case_global_parameters_here():
    """Parameters that are whole on all processes, in a wrapper of this process's devices."""
    everywhere = jdp.replicate(variables())
    return jdp.DataParallel(MLP, devices=jax.local_devices()).apply(everywhere, X)


def slow_training():
    """Steps with a pause between two, for somebody to disturb them."""
    dp = jdp.DataParallel(MLP)
    step = dp.train_step(mse, optax.sgd(0.1))
    state, losses = step.init(variables()), []
    for k in range(16):
        state, metrics = step(state, {name: rows + 0.1 * k for name, rows in BATCH.items()})
        losses.append(metrics["loss"])
        time.sleep(0.5)
    return {"losses": np.stack(losses), "params": state.params}


def host(x):
    return np.asarray(x) if isinstance(x, jax.Array) else x


def main():
    found = {}
    for name in sys.argv[2:] or [name for name in globals() if name.startswith("case_")]:
        print(name, flush=True)
        try:
            found[name.removeprefix("case_")] = jax.tree.map(host, globals()[name]())
        except Exception:
            found[name.removeprefix("case_")] = RuntimeError(traceback.format_exc())
    pathlib.Path(sys.argv[1], f"{P}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
