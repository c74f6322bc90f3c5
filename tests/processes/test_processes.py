"""Data parallelism over processes: two processes with two CPU devices each, against one device and the whole batch."""

import collections
import contextlib
import math
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import close, free_port

import jdp
from jdp._launch.options import parse
from jdp._processes import exchange, initialize

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PROCESSES, LOCAL = 2, 2
ROWS = (9, 5)
PARTS = (slice(0, 9), slice(9, 14))
CHUNKS = (5, 4, 3, 2)  # torch's rule, in each process
MLP = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)])
RNG = np.random.default_rng(0)
X = RNG.normal(size=(14, 5)).astype(np.float32)
Y = RNG.normal(size=(14, 3)).astype(np.float32)
BATCH = {"x": X, "y": Y}
# What tells a process of others; the tests may run under one of those that set it.
LAUNCHERS = """
JAX_COORDINATOR_ADDRESS JDP_NUM_PROCESSES JDP_PROCESS_ID JAX_NUM_PROCESSES JAX_PROCESS_ID JAX_LOCAL_DEVICE_IDS
WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE
HOROVOD_SIZE SLURM_JOB_ID SLURM_NTASKS SLURM_STEP_NUM_TASKS SLURM_PROCID SLURM_LOCALID SLURM_STEP_NODELIST PMIX_RANK
SKYPILOT_NUM_NODES JOB_COMPLETION_INDEX JAX_COORDINATOR_PORT OMPI_MCA_orte_hnp_uri CUDA_VISIBLE_DEVICES
""".split()


def by_jdp(process, port):
    """What `jdp launch` sets."""
    address = f"127.0.0.1:{port}"
    return {
        "JAX_COORDINATOR_ADDRESS": address, "JDP_NUM_PROCESSES": str(PROCESSES), "JDP_PROCESS_ID": str(process)
    }  # fmt: skip


def start(log, command, **said):
    """A process with two CPU devices, and what it prints in a file."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(LOCAL), "NPROC": "8", "PYTHONPATH": str(ROOT)}
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, *command], env=environ | said, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent
        )


def results(folder, *cases, said=by_jdp, head=(), meanwhile=lambda workers: None):
    """What each process found, by the name of the case; `meanwhile` is called while they run.

    `said(process, port)` is what a launcher tells a process; None where `head` is one that starts them all.
    """
    script, port = [*head, str(HERE / "processes_worker.py"), str(folder), *cases], free_port()
    each = [{}] if said is None else [said(process, port) for process in range(PROCESSES)]
    workers = [start(folder / f"{process}.log", script, **environ) for process, environ in enumerate(each)]
    try:
        meanwhile(workers)
        codes = [worker.wait(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    logs = "\n".join((folder / f"{p}.log").read_text()[-8000:] for p in range(len(workers)))
    assert codes == [0] * len(workers), logs
    return [pickle.loads((folder / f"{p}.pickle").read_bytes()) for p in range(PROCESSES)]


def case_of(test):
    """The case that a test is named after."""
    return test.originalname.removeprefix("test_")


@pytest.fixture(scope="module")
def job(tmp_path_factory, request):
    """One job for all the tests of this file that run, with their cases alone."""
    tests = (test for test in request.session.items if test.path == request.path and "found" in test.fixturenames)
    return results(tmp_path_factory.mktemp("processes"), *(f"case_{case_of(test)}" for test in tests))


@pytest.fixture
def found(job, request):
    """What each process found in the case of this test."""
    name = case_of(request.node)
    for result in job:
        if isinstance(result[name], Exception):
            raise result[name]
    return [result[name] for result in job]


def variables():
    return MLP.init(jax.random.key(0), X[:1])


def mse(v, batch):
    return jnp.mean((MLP.apply(v, batch["x"]) - batch["y"]) ** 2)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_apply(found):
    expected = MLP.apply(variables(), X)
    for process, result in enumerate(found):
        mine = expected[PARTS[process]]
        close(result["out"], mine)
        assert result["local"] and result["params_replicated"]
        assert result["host_params"] == {True}
        for out in result["outs"].values():
            close(out, mine)
        first, second = result["own"]
        # -1 and "cpu" are the host's CPU, which here is the first device; five rows do not divide over two devices.
        assert result["devices"] == {
            "0": [first], "1": [second], "-1": [first], "cpu": [first], "sharded": [first, second],
        }  # fmt: skip


@pytest.mark.full
def test_other_output_device(found):
    assert found == [True, True]


@pytest.mark.full
def test_no_rows_here(found):
    close(found[0], MLP.apply(variables(), X[:6]))
    assert found[1].shape == (0, 3)


@pytest.mark.full
def test_nothing_cut(found):
    """Each process runs once, with its own arguments, and has its own output."""
    for process, result in enumerate(found):
        np.testing.assert_array_equal(result["scaled"], [3 * (process + 1)])
        np.testing.assert_array_equal(result["vector"], [3 * (process + 1), 3])


@pytest.mark.full
def test_nothing_cut_gradient(found):
    """2 * 1 and 2 * 2, and their slopes."""
    for loss, grad in found:
        assert (float(loss), float(grad)) == (3.0, 1.5)


@pytest.mark.full
def test_committed_parameters(found):
    for process, result in enumerate(found):
        close(result["out"], MLP.apply(variables(), X[PARTS[process]]))
        assert result["home"]
        assert "RuntimeError" in result["second"] and f"CpuDevice(id={2048 * process})" in result["second"]


@pytest.mark.full
def test_whole_argument(found):
    for process, out in enumerate(found):
        close(out, X[PARTS[process]] * 2 + np.arange(5.0, dtype=np.float32))


@pytest.mark.full
def test_functional(found):
    for process, out in enumerate(found):
        close(out, MLP.apply(variables(), X)[PARTS[process]])


@pytest.mark.full
def test_global_arrays(found):
    for result in found:
        close(result["out"], MLP.apply(variables(), result["local"]))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.BatchNorm(use_running_average=not train, epsilon=1e-2)(nn.Dense(4, use_bias=False)(x))


def chunks_of(x):
    return np.split(x, np.cumsum(CHUNKS)[:-1])


@pytest.mark.full
def test_batch_norm(found):
    model = Normed()
    v = model.init(jax.random.key(0), X[:2])
    runs = [model.apply(v, chunk, mutable=["batch_stats"]) for chunk in chunks_of(X)]
    out = np.concatenate([y for y, _ in runs])
    weighted = jax.tree.map(lambda *s: sum(a * n for a, n in zip(s, CHUNKS, strict=True)) / 14, *[s for _, s in runs])
    for process, result in enumerate(found):
        for reduce_state, state in (("primary", runs[0][1]), ("mean", weighted)):
            close(result[reduce_state]["out"], out[PARTS[process]])
            close(result[reduce_state]["state"], state)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, epsilon=1e-2)(nn.Dense(4, use_bias=False)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


@pytest.mark.full
def test_replicas(found):
    """Eight replicas on four devices of two processes, against eight devices of one process."""
    dp = jdp.DataParallel(Noisy(), range(8))
    v = dp.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def loss(v, batch, key):
        out, state = Noisy().apply(v, batch["x"], rngs={"dropout": key}, mutable=["batch_stats"])
        error = jnp.sum((out - batch["y"]) ** 2, -1)
        return jnp.mean(error), {"each": error}, state

    def part(rows, process):
        first = sum(jdp.chunk_sizes(rows, 8)[:4])
        return slice(0, first) if process == 0 else slice(first, rows)

    for options in ({}, {"sync_batch_norm": True}, {"accumulate_steps": 2, "shard_optimizer": True}):
        step = dp.train_step(loss, optax.sgd(0.1, momentum=0.9), **options)
        state = step.init(v, key=jax.random.key(2))
        for t, rows in enumerate((8, 14, 3)):
            state, metrics = step(state, {"x": X[:rows], "y": Y[:rows]})
            for process, result in enumerate(found):
                mine = result["steps"][str(options)]
                close(mine["metrics"][t]["loss"], metrics["loss"], rtol=1e-4)
                close(mine["metrics"][t]["each"], metrics["each"][part(rows, process)], rtol=1e-4)
                assert mine["sizes"][t] == (*jdp.chunk_sizes(rows, 8), *[0] * 8)[:8]
        for result in found:
            mine = result["steps"][str(options)]
            close((mine["params"], mine["stats"]), (state.params, state.state), rtol=1e-4, atol=1e-5)
    out, stats = dp.apply(v, X[:10], rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])
    for process, result in enumerate(found):
        close(result["out"], (out[part(10, process)], stats))
        for i, chunk in result["chunks"].items():
            np.testing.assert_array_equal(chunk, X[2 * i : 2 * i + 2])
        assert [*result["chunks"]] == [*range(4 * process, 4 * process + 4)]
        assert [sizes for sizes, _ in result["taken"]] == [(2, 2, 2, 2, 2, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 0)]
        for (_, rows), want in zip(result["taken"], ((X[:8], X[10:]), (X[8:10], X[:0]))[process], strict=True):
            np.testing.assert_array_equal(rows, want)
        assert "processes 0, 1 pass 7, 7 of 14 rows; with replicas=8" in result["wrong"]
        assert f"Pass 8, 6 rows, here {(8, 6)[process]}." in result["wrong"]
        assert "each sees its own" in result["elsewhere"]


@pytest.mark.full
def test_dropout(found):
    """Every replica draws a mask of its own, those of other processes too."""
    masks = [mask for out in found for mask in np.split(out > 0, LOCAL)]
    assert len({mask.tobytes() for mask in masks}) == PROCESSES * LOCAL
    primary = nn.Dropout(0.5, deterministic=False).apply(
        {}, np.ones((2, 64), np.float32), rngs={"dropout": jax.random.key(1)}
    )
    np.testing.assert_array_equal(masks[0], primary > 0)


def test_gradient_of_a_scalar(found):
    whole = jax.value_and_grad(mse)(variables(), BATCH)
    for result in found:
        close(result, whole)


@pytest.mark.full
def test_value_and_grad(found):
    v = variables()
    whole = jax.value_and_grad(mse)(v, BATCH)
    mask = Y[:, 0] > 0

    def ratio(v):
        error = jnp.sum((MLP.apply(v, X) - Y) ** 2, -1)
        return jnp.sum(error * mask) / jnp.sum(mask)

    by_row = jax.grad(lambda x: jnp.mean((MLP.apply(v, x) - Y) ** 2))(X)
    for process, result in enumerate(found):
        close(result["accumulated"], whole)
        (loss, aux), grads = result["vector"]
        close((loss, grads), whole)
        np.testing.assert_array_equal(aux["rows"], X[PARTS[process], 0])
        close(result["ratio"], jax.value_and_grad(ratio)(v))
        close(result["rows"], (whole[0], by_row[PARTS[process]]))
        close(result["grad"], whole[1])


def train(tx, steps, batch_of=lambda k: BATCH, loss=mse, params=None):
    """One device, the whole batch, optax."""
    params = variables() if params is None else params
    state, losses = tx.init(params), []
    for k in range(steps):
        value, grads = jax.value_and_grad(loss)(params, batch_of(k))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params["params"]


@pytest.mark.full
def test_explain(found):
    leaves = jax.tree.leaves(variables())
    for process, result in enumerate(found):
        mine = CHUNKS[:2] if process == 0 else CHUNKS[2:]
        assert result["exchanged"] == 0  # one process may ask alone
        assert result["drawn"] == [True] * 4 * (process == 0)
        assert result["rows"] == [(*mine, *mine)] * 2  # as if all had as many rows as this one
        assert result["processes"] == PROCESSES and result["alone"]
        assert result["bytes"] == [4 * sum(x.size for x in leaves) + 4, 0]
        assert result["carried"] == sorted(f"layers_{i}.{name}" for i in (0, 2) for name in ("kernel", "bias"))
        assert "4 x cpu, 2 processes" in result["text"]


def test_train(found):
    losses, params = train(optax.adam(1e-2), 4)
    for result in found:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        close(result["params"], params, rtol=1e-4, atol=1e-5)
        assert result["step"] == 4
    equal(found[0], found[1])  # to the last bit


@pytest.mark.full
def test_train_options(found):
    losses, params = train(optax.adam(1e-2), 4)
    for result in found:
        for name in ("accumulated", "checked", "sharded"):
            np.testing.assert_allclose(result[name]["losses"], losses, rtol=1e-5)
            close(result[name]["params"], params, rtol=1e-4, atol=1e-5)
            assert result[name]["step"] == 4
        np.testing.assert_allclose(result["bfloat16"], losses, rtol=1e-2)
        # Of each moment 5 x 8, 8, 8 x 3 divide by four devices; the bias of 3 does not.
        assert result["cut"] == 2 * 3
        assert result["bytes"] == (2 * 4 * (40 + 8 + 24) // 4, 2 * 4 * 3 + 4)
    equal(found[0], found[1])  # to the last bit


def of_all_pairs(v, batch):
    """What a criterion of pairs of rows computes in the worker, on one device."""
    outputs = MLP.apply(v, batch["x"])
    error = jnp.mean((outputs - batch["y"]) ** 2, -1)
    return jnp.sqrt(jnp.mean(jax.nn.logsumexp(outputs @ outputs.T, -1) ** 2)) + error.max(), {"rows": error}


def test_criterion(found):
    """A loss of pairs of rows sees those of all processes."""
    for result in found:
        close(result, jax.value_and_grad(of_all_pairs, has_aux=True)(variables(), BATCH))


@pytest.mark.full
def test_sum_of_terms(found):
    """Each term has the count of all processes."""

    def terms(v):
        error, positive = jnp.mean((MLP.apply(v, X) - Y) ** 2, -1), Y[:, 0] > 0
        return jnp.sum(error * positive) / jnp.sum(positive) + 0.5 * error.sum() - error.mean()

    for result in found:
        close(result, jax.value_and_grad(terms)(variables()))


@pytest.mark.full
def test_criterion_options(found):
    whole = jax.value_and_grad(of_all_pairs, has_aux=True)(variables(), BATCH)
    losses, params = train(optax.adam(1e-2), 4, loss=lambda v, batch: of_all_pairs(v, batch)[0])
    for result in found:
        close(result["accumulated"], whole)
        np.testing.assert_allclose(result["trained"]["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(result["sharded"], losses, rtol=1e-5)
        close(result["trained"]["params"], params, rtol=1e-4, atol=1e-5)
        assert result["check"] and not result["wrong"]


@pytest.mark.full
def test_shard_params(found):
    losses, params = train(optax.adam(1e-2), 4)
    for process, result in enumerate(found):
        for name in ("plain", "accumulated", "checked"):
            np.testing.assert_allclose(result[name]["losses"], losses, rtol=1e-5)
            close(result[name]["params"], params, rtol=1e-4, atol=1e-5)
        whole, cut = 4 * 3, 4 * (40 + 8 + 24) // 4  # bytes; the bias of 3 is not cut
        assert result["bytes"] == ((cut, whole), (2 * cut, 2 * whole + 4))
        close(result["again"][0], result["checked"]["params"], rtol=0, atol=0)
        close(result["whole"][0], result["checked"]["params"], rtol=0, atol=0)
        assert all(result["again"][1]) and result["whole"][1] == {True}
        loss, grads, alike = result["gradient"]
        expected = jax.value_and_grad(mse)(variables(), BATCH)
        close((loss, grads), expected, rtol=1e-5, atol=1e-6)
        assert all(alike)
        close(result["apply"], MLP.apply(variables(), X[PARTS[process]]))
        np.testing.assert_allclose(result["even"][1], result["even"][0], rtol=1e-6)
    equal(found[0]["plain"], found[1]["plain"])  # to the last bit


@pytest.mark.full
def test_other_shards(found):
    """Processes that would cut up different parameters are told so, all of them in the same words."""
    for said, made in found:
        assert "['params']['layers_0']['kernel']" in said["values"] and "(2 more" not in said["values"]
        assert "rngs" in said["key"]
        assert "DesyncError" in said["seed"] and "DesyncError" not in said["model"]
        assert all(said[name].startswith("ValueError: jdp.") for name in ("values", "key", "model", "shapes"))
        assert said["not at all"] == "nothing"  # each may show its own rows to the model
        close(made, MLP.init(jax.random.key(3), X[:1])["params"])
    assert found[0][0] == found[1][0]


@pytest.mark.full
def test_train_rows(found):
    error = (MLP.apply(variables(), X) - Y) ** 2
    for process, metrics in enumerate(found):
        np.testing.assert_allclose(metrics["loss"], error.mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["rows"], error.sum(-1)[PARTS[process]], rtol=1e-5)
        np.testing.assert_allclose(metrics["hits"], (error > 1).mean(), rtol=1e-6)
        assert int(metrics["number of hits"]) == (error > 1).sum()


@pytest.mark.full
def test_train_key(found):
    masks = [mask for kept in found for mask in np.split(kept, LOCAL)]
    assert masks[0].shape == (2, 64)
    assert len({mask.tobytes() for mask in masks}) == PROCESSES * LOCAL


@pytest.mark.full
def test_nonfinite(found):
    row = {"x": np.full((1, 5), np.nan, np.float32), "y": Y[10:11]}
    bad = sum(not np.isfinite(g).all() for g in jax.tree.leaves(jax.grad(mse)(variables(), row)))
    assert bad >= 3
    for result in found:
        assert result["skipped"] and result["step"] == 0
        close(result["params"], variables()["params"], 0, 0)
        # The row that has a NaN is the second of process 1, whose first replica is the third of all.
        assert result["bad"] == [(2, 1, (1,), bad)]


@pytest.mark.full
def test_sync_batch_norm(found):
    """Uneven chunks in several processes: the statistics of the whole batch."""
    model = Normed()
    v = model.init(jax.random.key(0), X[:2])
    params, stats, tx = v["params"], v["batch_stats"], optax.adam(1e-2)
    state, losses = tx.init(params), []

    def loss(params, stats):
        out, updates = model.apply({"params": params, "batch_stats": stats}, X, mutable=["batch_stats"])
        return jnp.mean((out - X[:, :4]) ** 2), updates["batch_stats"]

    for _ in range(3):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats)
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    for result in found:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-4)
        close(result["state"]["batch_stats"], stats, rtol=1e-4, atol=1e-5)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@pytest.mark.full
def test_nnx(found):
    """The numbers of the same module on one device."""
    equal(found[0]["params"], found[1]["params"])
    model = Net(nnx.Rngs(0))
    close(np.concatenate([result["before"] for result in found]), model(X))
    optimizer, losses = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), []
    for _ in range(3):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
        optimizer.update(model, grads)
        losses.append(float(value))
    np.testing.assert_allclose(found[0]["losses"], losses, rtol=1e-5)
    for result in found:  # this process's own
        rows, last = map(np.asarray, result["rows"])
        assert rows.shape == (len(result["before"]),) and np.array_equal(rows, last)
    close(np.concatenate([result["after"] for result in found]), model(X), rtol=1e-4, atol=1e-4)
    close(found[0]["params"], nnx.to_pure_dict(nnx.state(model, nnx.Param)), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_prefetch(found):
    """Process 0 has no batches, process 1 two, of three rows: what counts is what there is."""
    batches = [{"x": X[k : k + 3], "y": Y[k : k + 3]} for k in range(2)]
    losses, params = train(optax.sgd(0.1), 2, batches.__getitem__)
    for process, result in enumerate(found):
        for size in ("size 0", "size 2"):
            np.testing.assert_allclose(result[size]["losses"], losses, rtol=1e-5)
            close(result[size]["params"], params)
            assert result[size]["sizes"] == [(0, 0, 2, 1)] * 2
        outputs = [np.asarray(MLP.apply(variables(), b["x"])) for b in batches]
        close(result["outputs"], outputs if process else [x[:0] for x in outputs])
        assert result["names"] == ["fold [1]"]


def test_evaluate(found):
    """Means and sums are those of all rows, in all processes; entries are those of a process's own rows."""

    def expected(batches):
        x, y = (np.concatenate([b[k] for b in batches]) for k in "xy")
        out = np.asarray(MLP.apply(variables(), x))
        return {"mse": ((out - y) ** 2).mean(), "hits": (out > 0).mean(), "sum": (out > 0).sum(0), "y": out}

    batches = [{"x": X[k : k + 3], "y": Y[k : k + 3]} for k in range(2)]
    some, everything = expected(batches), expected([{"x": X, "y": Y}])
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    for process, result in enumerate(found):
        own = some["y"] if process else some["y"][:0]
        close(result["some"], {**some, "y": own}, rtol=1e-5, atol=1e-6)
        close({**result["all"], "y": 0}, {**everything, "y": 0}, rtol=1e-5, atol=1e-6)
        assert "jdp.evaluate: the batches have no rows" in result["nothing"]
        np.testing.assert_allclose(result["nnx"]["mean"], np.asarray(model(X)).mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result["nnx"]["y"], model(X[PARTS[process]]), rtol=1e-5, atol=1e-6)
    # Batches of 6, 6 and 2 rows over four replicas, two in each process: chunks of 2, 2, 2, 0 and of 1, 1, 0, 0.
    own = [[0, 1, 2, 3, 6, 7, 8, 9, 12, 13], [4, 5, 10, 11]]
    for mine, result in zip(own, found, strict=True):
        np.testing.assert_allclose(result["all"]["y"], everything["y"][mine], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_objects_in_the_batch(found):
    """Each replica draws with its own key, on its own rows; the objects' state is one over all processes."""
    equal(found[0], found[1])
    parts = [
        [(0, slice(0, 2)), (1, slice(2, 4)), (2, slice(0, 3)), (3, slice(3, 6))],
        [(2, slice(1, 4)), (3, slice(4, 7))],
    ]
    rngs = [nnx.Rngs(dropout=3) for _ in range(4)]
    for i, r in enumerate(rngs[1:], 1):
        r.dropout.key.set_value(jax.random.fold_in(r.dropout.key[...], i))
    params, losses, mean = variables()["params"], [], np.zeros(5, np.float32)
    for number, chunks in enumerate(parts):
        rows = sum(len(X[part]) for _, part in chunks)

        def loss(params, chunks=chunks, rows=rows, number=number):
            total = 0.0
            for i, part in chunks:
                x, y = X[part], Y[part]
                x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
                key = jax.random.fold_in(rngs[i].dropout.key[...], number)
                x = x * jax.random.bernoulli(key, 0.5, x.shape) * np.arange(5, dtype=np.float32)
                total += jnp.mean((MLP.apply({"params": params}, x) - y) ** 2) * len(y) / rows
            return total

        value, grads = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(float(value))
        mean = sum((0.99 * mean + 0.01 * X[part].mean(0)) * len(X[part]) / rows for _, part in chunks)
    np.testing.assert_allclose(found[0]["losses"], losses, rtol=1e-4)
    close(found[0]["params"], params, rtol=1e-3, atol=1e-4)
    close(found[0]["mean"], mean, rtol=1e-4)
    own = nnx.Rngs(dropout=3)
    own.dropout.count.set_value(jnp.uint32(2))
    assert found[0]["count"] == 2
    equal(found[0]["drawn"], jax.random.normal(own.dropout()))


@pytest.mark.full
def test_prefetch_own_type(found):
    ones = np.ones((2, 3), np.float32)
    equal(found[0], [ones, *[ones[:0]] * 2])
    equal(found[1], [ones * (2 * k + 1) for k in range(3)])


@pytest.mark.full
def test_other_mesh(found):
    for result in found:
        assert result == [[7], [4, 3]] * 3


def test_numbers(found):
    for result in found:
        assert result == [jnp.bfloat16] * 6


@pytest.mark.full
def test_mixed(found):
    w = np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32)
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((X @ w) ** 2))(w)
    for process, result in enumerate(found):
        for name, one in result.items():
            (value, aux), grads = one["value"]
            close((value, grads), (loss, grad), rtol=1e-4)
            np.testing.assert_array_equal(aux["rows"], X[PARTS[process], 0])
            close(one["both"], (X[PARTS[process]] @ w, np.float32(15)), rtol=1e-4)
            assert one["home"] == ({0, 1} if "replicated" in name else {process}), name


@pytest.mark.full
def test_two_iterators(found):
    for process, result in enumerate(found):
        for k, batch in enumerate(result["rare"]):
            np.testing.assert_allclose(batch, X[PARTS[process]] + k, rtol=1e-6)
        np.testing.assert_allclose(result["often"], X[PARTS[process]] + 200, rtol=1e-6)


@pytest.mark.full
def test_scattered_whole(found):
    for process, result in enumerate(found):
        np.testing.assert_array_equal(result["alone"], [2 * (process + 1)])
        close(result["beside"], X[PARTS[process]] * 4)
    # Process 0 has one turn and process 1 two; who has run out has no output.
    equal(found[0]["turns"], [np.float32([7]), np.zeros(0, np.float32)])
    equal(found[1]["turns"], [np.float32([8]), np.float32([8])])


@pytest.mark.full
def test_iterator_fails(found):
    assert found[1]["text"] == "OSError: the disk is gone"
    text = "DesyncError: jdp.prefetch: process 1 has no batch, but an error (OSError: the disk is gone)"
    assert text in found[0]["text"]
    assert [result["seen"] for result in found] == [[9], [5]]
    assert "TypeError" in found[0]["call"]
    assert "DesyncError: jdp.DataParallel: process 0 has no batch, but an error (TypeError" in found[1]["call"]


@pytest.mark.full
def test_checkpoint_data(found):
    for process, result in enumerate(found):
        np.testing.assert_array_equal(result["w"], np.arange(3))
        assert result["data"] == {"position": 100 * process, "losses": [0.5] * 2000}
        assert "ValueError" in result["differs"] and "['n'] is not the same in all processes" in result["differs"]
        assert result["latest"] == 1
        assert "ValueError" in result["lacks"] and "['n'] is not the same in all processes" in result["lacks"]
        more = "['more']: process 0 has nothing; process 1 has float32[3]; a checkpoint holds one state. Pass"
        assert "ValueError: jdp.Checkpointer: the processes save states of diff" in result["more"], result["more"]
        assert more in result["more"]
        steps = "ValueError: jdp.Checkpointer: the processes save different steps: process 0 has 2; process 1 has 3; "
        assert result["steps"].startswith(steps), result["steps"]
        back = (
            "ValueError: jdp.Checkpointer: the processes restore different steps: process 0 has 1; process 1 has None; "
        )
        assert result["back"].startswith(back), result["back"]
        assert "RuntimeError: jdp.Checkpointer: process 1 does not see what process 0 writes in" in result["apart"]
        assert "(No such file or directory)" in result["apart"]
        assert result["left"] == ([".jdp-lock"] if process else [])
    assert "RuntimeError" in found[0]["one"] and "process 1: " in found[0]["one"]
    assert "TypeError" in found[1]["one"] and "JSON" in found[1]["one"]


@pytest.mark.full
def test_two_checkpointers(found):
    for result in found:
        assert result["latest"] == [20, 20]
        for w in result["w"]:
            np.testing.assert_array_equal(w, np.arange(100000))


@pytest.mark.full
def test_closed_in_one_process(found):
    text = (
        "ValueError: jdp.Checkpointer: the processes save with different Checkpointers: one has been closed in some of"
    )
    for result in found:
        assert result["refused"].startswith(text), result["refused"]
        assert result["latest"] == 2


@pytest.mark.full
def test_empty_arrays(found):
    for result in found:
        np.testing.assert_array_equal(result["w"], np.ones(2))
        assert result["shape"] == (4, 0) and result["is cut"]


@pytest.mark.full
def test_global_parameters_here(found):
    for out in found:
        close(out, MLP.apply(variables(), X))


@pytest.mark.full
def test_verbs(found):
    for process, result in enumerate(found):
        assert result["sizes"] == CHUNKS
        own = chunks_of(X)[2 * process : 2 * process + 2]
        equal(result["own"], own)
        assert f"is on process {1 - process}, this is process {process}" in result["refused"]
        np.testing.assert_array_equal(result["gathered"], X[PARTS[process]])
        np.testing.assert_array_equal(result["doubled"], X[PARTS[process]] * 2)
        np.testing.assert_array_equal(result["added"], np.full((2, 2), 2 * 1.0 + 2 * 2.0))
        np.testing.assert_array_equal(result["added_everywhere"], result["added"])
        assert result["chunks"] == (9, 0, 5, 0)


@pytest.mark.full
def test_parallel(found):
    """A step for pmap, of which every process has its own rows and its own losses."""
    rows = [X[:4], X[:4] + 1]
    w, grads, losses = np.ones((5, 3), np.float32), [], []
    for x in (chunk for part in rows for chunk in np.split(part, 2)):
        y = Y[:2] if len(losses) % 2 == 0 else Y[2:4]
        loss, grad = jax.value_and_grad(lambda w, x=x, y=y: jnp.mean((x @ w - y) ** 2))(w)
        losses.append(float(loss))
        grads.append(grad)
    for process, result in enumerate(found):
        close(result["w"], w - 0.1 * sum(grads) / 4)
        np.testing.assert_allclose(result["losses"], losses[2 * process : 2 * process + 2], rtol=1e-5)
        np.testing.assert_array_equal(result["stacked"], result["losses"])
        np.testing.assert_array_equal(*result["twice"])
        assert result["freed"]


@pytest.mark.full
def test_check_replicas(found):
    """One ulp on the last device of the other process is found by both, and named."""
    for result in found:
        for verb, text in result.items():
            where = "['w']" if verb == "check" else "['params']['w']"
            assert text.startswith("ValueError: jdp."), text
            assert where in text and "process 1" in text and "['b']" not in text
            assert "CpuDevice(id=2049)" in text
    assert found[0] == found[1]


@pytest.mark.full
def test_other_parameters(found):
    for result in found:
        assert "jdp.init: " in result["init"] and "['kernel']" in result["init"]
        assert "jdp.check_replicas: " in result["nnx"] and "kernel" in result["nnx"]
        assert "process 1" in result["init"] or "process 0" in result["init"]
        for door in ("optimizer", "optimizer of nnx"):
            assert "['opt_state'].hyperparams['learning_rate'] on process 1" in result[door], result[door]


def test_refused(found):
    for process, result in enumerate(found):
        for name in ("jit", "grad"):
            assert result[name].startswith("ValueError: jdp.") and "dp.value_and_grad" in result[name], result[name]
        assert "inside of jax.jit" in result["closure"]
        assert f"is on process {1 - process}" in result["list"]
        assert result["no_features"] == "nothing was raised"
        assert result["reduce_add"].startswith("ValueError: jdp."), result["reduce_add"]
        assert f"process {process} has none among them" in result["devices"]
        assert f"process {process} has none among them" in result["scatter"]
        assert "runs a collective" in result["uneven_collectives"] and "(5, 4, 3, 2)" in result["uneven_collectives"]
        assert "the batch has 0 rows" in result["rows"]
        differ = "DesyncError: jdp.scatter: the processes' batches differ: inputs['x']: "
        one, other = "process 0 has float32[*, 4]", "process 1 has float32[*, 5]"
        assert result["features"].startswith(differ) and f"{one}; {other}" in result["features"], result["features"]
        one, other = "process 0 has int32[*, 5]", "process 1 has float32[*, 5]"
        assert result["dtypes"].startswith(differ) and f"{one}; {other}" in result["dtypes"], result["dtypes"]


@pytest.mark.full
def test_thread(found):
    for result in found:
        assert "RuntimeError: jdp.DataParallel: called from thread 'another'" in result["jdp"]
        assert "thread guard" in result["jax"]
        assert result["local"] == "nothing was raised" and result["after"]


@pytest.mark.full
def test_local_devices(found):
    v = variables()
    close(found[0]["out"], MLP.apply(v, X))
    close(found[0]["grad"], jax.grad(lambda v: MLP.apply(v, X).sum())(v), rtol=1e-4)
    assert found[1] is None


def listening(worker):
    """The ports at which a process listens, on every address."""
    inodes = set()
    with contextlib.suppress(OSError):  # it has ended, or has just closed one
        for path in pathlib.Path(f"/proc/{worker.pid}/fd").iterdir():
            inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for row in pathlib.Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def framed(message):
    return len(message).to_bytes(4, "big") + message


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_job_that_strangers_attack_trains_as_if_alone(tmp_path):
    """Words that break parsers, bytes that trickle, silence, ends. They find no port of jdp's own."""
    kept, attacked = [], collections.Counter()

    def knock(port, words):
        with contextlib.suppress(OSError):  # closed to us: the better
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            attacked[port] += 1
            kept[-1].sendall(words)

    def attack(workers):
        while all(worker.poll() is None for worker in workers):
            for port in listening(workers[0]):
                for words in ('["\u00e9", 1]'.encode(), b"[" * 999, b'["name", 1]', os.urandom(68)):
                    knock(port, framed(words))
                for words in (b"GET / HTTP/1.1\r\n\r\n", framed(b"x" * 900)[:5], os.urandom(68), *[b""] * 5):
                    knock(port, words)
            while len(kept) > 200:
                kept.pop(0).close()
            for trickling in kept:
                with contextlib.suppress(OSError):
                    trickling.sendall(b"x")
            time.sleep(0.5)

    try:
        found = results(tmp_path, "slow_training", meanwhile=attack)
    finally:
        for stranger in kept:
            stranger.close()
    batches = [{name: rows + np.float32(0.1 * k) for name, rows in BATCH.items()} for k in range(16)]
    losses, params = train(optax.sgd(0.1), 16, batches.__getitem__)
    for result in found:
        if isinstance(result["slow_training"], Exception):
            raise result["slow_training"]
        np.testing.assert_allclose(result["slow_training"]["losses"], losses, rtol=1e-5)
        close(result["slow_training"]["params"], params, rtol=1e-4, atol=1e-5)
    assert len(attacked) == 1 and min(attacked.values()) > 50  # that of JAX's coordination service


def check_rows(found):
    """That the processes were one job, by the mean over the rows of both."""
    error = (MLP.apply(variables(), X) - Y) ** 2
    for process, result in enumerate(found):
        metrics = result["train_rows"]
        if isinstance(metrics, Exception):
            raise metrics
        np.testing.assert_allclose(metrics["loss"], error.mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["rows"], error.sum(-1)[PARTS[process]], rtol=1e-5)


@pytest.mark.full
def test_torchrun(tmp_path):
    """The real one, which listens at MASTER_PORT itself."""
    pytest.importorskip("torch")
    head = ["-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}", "--master-addr=127.0.0.1"]
    check_rows(results(tmp_path, "case_train_rows", said=None, head=[*head, f"--master-port={free_port()}"]))


def by_jax(process, port):
    """What Kubeflow Trainer sets."""
    address = f"127.0.0.1:{port}"
    return {
        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(PROCESSES), "JAX_PROCESS_ID": str(process)
    }  # fmt: skip


def by_torchrun(process, port):
    return {
        "WORLD_SIZE": str(PROCESSES), "RANK": str(process), "LOCAL_RANK": str(process), "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1),
    }  # fmt: skip


def by_open_mpi(process, port):
    """What Open MPI 5 sets. The port follows from who has started the processes."""
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in
            {"SIZE": PROCESSES, "RANK": process, "LOCAL_SIZE": PROCESSES, "LOCAL_RANK": process}.items()}  # fmt: skip


def by_mpich(process, port):
    return {
        "PMI_SIZE": str(PROCESSES), "PMI_RANK": str(process), "MPI_LOCALNRANKS": str(PROCESSES),
        "MPI_LOCALRANKID": str(process),
    }  # fmt: skip


def by_skypilot(process, port):
    return {
        "SKYPILOT_NUM_NODES": str(PROCESSES), "SKYPILOT_NODE_RANK": str(process), "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "JAX_COORDINATOR_PORT": str(port),
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("said", [by_jax, by_torchrun, by_open_mpi, by_mpich, by_skypilot])
def test_variables_of_other_launchers(tmp_path, said):
    check_rows(results(tmp_path, "case_train_rows", said=said))


BY_JAX_ITSELF = """
import os, runpy, sys, jax
jax.distributed.initialize(os.environ.pop("ADDRESS"), 2, int(os.environ["PROCESS"]))
sys.argv.pop(0)
"""


def by_hand(process, port):
    return {"ADDRESS": f"127.0.0.1:{port}", "PROCESS": str(process)}


@pytest.mark.full
def test_jax_is_initialized_already(tmp_path):
    """As under Ray Train, which calls jax.distributed.initialize itself: jdp's initialize finds the job."""
    head = ["-c", BY_JAX_ITSELF + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    check_rows(results(tmp_path, "case_train_rows", said=by_hand, head=head))


FAILS = """
import jdp, numpy as np
for _ in range(2): jdp.distributed.initialize(timeout=60)
for wrong in ({"num_processes": 3}, {"process_id": 1 - jax.process_index()}):
    try: jdp.distributed.initialize(**wrong)
    except ValueError as error: print(error)
if jax.process_index() == 1: raise KeyError("here")
jdp.DataParallel(lambda w, x: w * x)(2.0, np.ones(4))
"""


@pytest.mark.full
def test_a_failure_ends_the_others_where_jax_is_initialized_already(tmp_path):
    port, logs = free_port(), [tmp_path / f"{process}.log" for process in range(2)]
    workers = [start(logs[p], ["-c", BY_JAX_ITSELF + FAILS, "x"], **by_hand(p, port)) for p in range(2)]
    try:
        codes = [worker.wait(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    said = [log.read_text() for log in logs]
    assert codes == [75, 1], said
    assert "jdp: process 1 has failed (KeyError: 'here'); process 0 ends" in said[0]
    for process, text in enumerate(said):
        for asked in ("None of 3", f"{1 - process} of None"):
            assert (
                f"jdp.distributed.initialize: called for process {asked}, and JAX is initialized already as process "
                f"{process} of 2; a process belongs to one job. Leave out" in text
            )


IN_A_THREAD = """
import sys, threading
import jdp, numpy as np

def loop():
    jdp.distributed.initialize(timeout=60, quiet=True)
    import jax
    other = threading.Thread(target=lambda: {}["another thread"])
    other.start()
    other.join()
    dp = jdp.DataParallel(lambda w, x: w * x)
    dp(2.0, np.ones(4))
    if jax.process_index() == 1: FAILS
    dp(2.0, np.ones(4))

thread = threading.Thread(target=loop, name="loop")
thread.start()
thread.join()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "fails, code, says, tells",
    [
        ("raise KeyError('here')", 1, "KeyError: 'here'", "KeyError: 'here'"),
        ("sys.exit(3)", 3, "", "SystemExit: 3"),
        ("sys.exit('why')", 1, "why", "SystemExit: 1"),
    ],
    ids=["exception", "exit", "exit-text"],
)
def test_a_loop_that_fails_in_a_thread_ends_the_process(tmp_path, fails, code, says, tells):
    """Python would end it with code 0. Another thread that fails ends nothing."""
    port, logs = free_port(), [tmp_path / f"{process}.log" for process in range(2)]
    workers = [start(logs[p], ["-c", IN_A_THREAD.replace("FAILS", fails)], **by_jdp(p, port)) for p in range(2)]
    try:
        codes = [worker.wait(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    said = [log.read_text() for log in logs]
    assert codes == [75, code], said
    assert says in said[1] and all("KeyError: 'another thread'" in text for text in said)
    assert f"jdp: process 1 has failed ({tells}); process 0 ends" in said[0]


LEAVES = """
import jdp, numpy as np
jdp.distributed.initialize(timeout=45, quiet=True)
import jax, jax.numpy as jnp
from jdp._core import programs
if jax.process_index() == 1:
    class Failed:
        def is_deleted(self): return False
        def block_until_ready(self): raise RuntimeError("a program has failed on the device")
    programs._wait_for_earlier(jdp.gather, Failed())
else:
    jdp.DataParallel(lambda w, x: w * x)(2.0, np.ones(4))
"""


@pytest.mark.full
def test_who_ends_with_a_program_that_failed_on_the_device_has_ended(tmp_path):
    """Nobody waits for it until the time is over."""
    port, logs = free_port(), [tmp_path / f"{process}.log" for process in range(2)]
    workers = [start(logs[p], ["-c", LEAVES], **by_jdp(p, port)) for p in range(2)]
    begin = time.monotonic()
    try:
        codes = [worker.wait(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    said = [log.read_text() for log in logs]
    assert "RuntimeError: a program has failed on the device" in said[1]
    assert codes[0] == 1 and "process 1 has ended its program, and process 0 waits there" in said[0], said[0]
    assert time.monotonic() - begin < 40


@pytest.fixture
def nothing_said(monkeypatch):
    """An environment that tells of no other process."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    limits = exchange.limits
    monkeypatch.setattr(limits, "step", limits.step)
    monkeypatch.setattr(limits, "start", limits.start)
    return monkeypatch


TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h",
            "MASTER_PORT": "29500"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
         "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}  # fmt: skip
JAX_SAID = {"JAX_COORDINATOR_ADDRESS": "c:2", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in
            {"SIZE": "4", "RANK": "3", "LOCAL_SIZE": "4", "LOCAL_RANK": "3"}.items()}  # fmt: skip
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "8"}  # fmt: skip
PORT = {"JAX_COORDINATOR_PORT": "7"}
NOT_SET = r"this is one of several processes by {}, and {} cannot be found \({} not set\); the processes become one job"


@pytest.mark.parametrize(
    "environ, arguments, match",
    [
        ({"WORLD_SIZE": "4", "RANK": "1"}, (), NOT_SET.format(
            "WORLD_SIZE=4, RANK=1", "coordinator_address, num_processes, process_id", "MASTER_ADDR, MASTER_PORT")),
        ({"WORLD_SIZE": "4"}, ("h:1",), NOT_SET.format(
            "WORLD_SIZE=4", "num_processes, process_id", "RANK, MASTER_ADDR, MASTER_PORT")),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "x"}, (), "coordinator_address cannot"),
        ({"JAX_NUM_PROCESSES": "4"}, (), NOT_SET.format(
            "JAX_NUM_PROCESSES=4", "coordinator_address, process_id", "JAX_PROCESS_ID, JAX_COORDINATOR_ADDRESS")),
        ({"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}, (), NOT_SET.format(
            "JAX_NUM_PROCESSES=4, JAX_PROCESS_ID=1", "coordinator_address", "JAX_COORDINATOR_ADDRESS")),
        ({"JDP_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "h:1"}, (), NOT_SET.format(
            "JAX_COORDINATOR_ADDRESS=h:1, JDP_NUM_PROCESSES=4", "process_id", "JDP_PROCESS_ID")),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, (), "by JAX_COORDINATOR_ADDRESS=h:1, and num_processes, process_id"),
        ({"JAX_PROCESS_ID": "0"}, (), "by JAX_PROCESS_ID=0, and coordinator_address, num_processes cannot"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_PROCESS_ID": "1"}, (), "by JAX_COORDINATOR_ADDRESS=h:1, JAX_PROCESS"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": " "}, (), "SKYPILOT_NODE_IPS= , and coordinator_address cannot"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, (), "by OMPI_COMM_WORLD_SIZE=2, and coordinator_address, num_processes, proc"),
        # two machines, of which neither Open MPI 5 nor MPICH says which is the first
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (), NOT_SET.format(
            "OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_RANK=3", "coordinator_address", "JAX_COORDINATOR_ADDRESS")
         + '.* set JAX_COORDINATOR_ADDRESS.*mpi4py installed, pass cluster_detection_method="mpi4py"'),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, (), NOT_SET.format(
            "PMI_SIZE=4, PMI_RANK=3", "coordinator_address", "JAX_COORDINATOR_ADDRESS")),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, (), "by PMI_SIZE=4, PMI_RANK=3, and coordinator_address cannot be found"),
        ({"PMIX_RANK": "0"}, (), "by PMIX_RANK=0, and coordinator_address, num_processes, process_id cannot"),
        ({"JOB_COMPLETION_INDEX": "0"}, (), r'JOB_COMPLETION_INDEX=0, and .*; or pip install "jax\[k8s\]", which'),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, (), r"SKYPILOT_NODE_RANK=1.*\(SKYPILOT_NODE_IPS not"),
        ({"PMI_SIZE": "2", "WORLD_SIZE": "1"}, (), "by PMI_SIZE=2, and"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, (), "by MV2_COMM_WORLD_SIZE=2, and"),
        ({"HOROVOD_SIZE": "2"}, (), "by HOROVOD_SIZE=2, and"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, (), "by SLURM_STEP_NUM_TASKS=2, and"),
        # mpirun of MPICH, in a step of Slurm for one task
        ({"PMI_SIZE": "2", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
          "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}, (),
         r'by PMI_SIZE=2, and num_processes cannot be found \(PMI_RANK not set\); .*initialize\("host:port", n, i\)'),
        ({}, ("h:1", 2), r'by the arguments, and process_id cannot.*initialize\("host:port", 2, i\)'),
        ({}, (None, None, 0), r'by the arguments, and coord.*initialize\("host:port", n, i\).* num_processes=1'),
    ],
)  # fmt: skip
def test_several_processes_are_one_job_or_an_error(nothing_said, refused, environ, arguments, match):
    for name, value in environ.items():
        nothing_said.setenv(name, value)
    nothing_said.setattr(jax.distributed, "initialize", None)
    with refused(ValueError, "distributed.initialize", match):
        jdp.distributed.initialize(*arguments)
    jdp.distributed.initialize(num_processes=1)  # the way out that it names


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # one process, in an allocation for more
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"},  # likewise, in the shell that salloc opens
        {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"JAX_PROCESS_ID": ""},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "HOROVOD_SIZE": "", "WORLD_SIZE": "many"},
        {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "h"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},  # srun --mpi=pmix, for one
    ],
)  # fmt: skip
def test_one_process_needs_no_job(nothing_said, environ):
    for name, value in environ.items():
        nothing_said.setenv(name, value)
    nothing_said.setattr(jax.distributed, "initialize", None)
    jdp.distributed.initialize()


class Asked(Exception):
    pass


@pytest.mark.parametrize(
    "environ, arguments, expected",
    [
        (TORCHRUN, {}, ("h:29501", 4, 3, 1)),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, {}, ("[fe80::1]:29501", 4, 3, 1)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, {}, ("h:29501", 4, 3, None)),  # all devices of the machine
        (TORCHRUN | {"JAX_COORDINATOR_ADDRESS": "c:2"}, {}, ("c:2", 4, 3, 1)),
        (TORCHRUN | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, {}, ("h:29501", 4, 3, None)),  # JAX reads it
        (TORCHRUN, {"local_device_ids": [0, 5]}, ("h:29501", 4, 3, [0, 5])),
        (TORCHRUN, {"coordinator_address": "mine:3"}, ("mine:3", 4, 3, 1)),
        (TORCHRUN | SLURM, {}, ("h:29501", 4, 3, 1)),  # torchrun started by Slurm
        (JAX_SAID | TORCHRUN, {}, ("c:2", 3, 2, None)),
        (JAX_SAID, {"num_processes": 5, "process_id": 4}, ("c:2", 5, 4, None)),
        ({"JAX_PROCESS_ID": "1"}, {"coordinator_address": "h:1", "num_processes": 4}, ("h:1", 4, 1, None)),
        (SLURM, {}, ("n1:61447", 2, 1, None)),  # JAX's own detection
        (SLURM | {"WORLD_SIZE": "2"}, {}, ("n1:61447", 2, 1, None)),
        (OPEN_MPI | PORT, {}, ("127.0.0.1:7", 4, 3, 3)),
        (MPICH | PORT, {}, ("127.0.0.1:7", 4, 3, 3)),
        (
            MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "JAX_COORDINATOR_ADDRESS": "c:2"},
            {},
            ("c:2", 4, 3, None),
        ),
        (
            OPEN_MPI
            | {
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.0.0.1:34911",
            },
            {},
            ("10.96.0.1:62624", 4, 3, 1),
        ),  # Open MPI 4
        (MPICH | {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"} | SLURM, {}, ("n1:61447", 4, 3, 1)),
        (SKYPILOT, {}, ("10.0.0.1:8476", 2, 1, None)),  # all devices of the machine
        (TORCHRUN | SKYPILOT, {}, ("h:29501", 4, 3, 1)),
        # somebody has divided the GPUs already: each process sees its own
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "5"}, {}, ("h:29501", 4, 3, None)),
        (OPEN_MPI | PORT | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, {}, ("127.0.0.1:7", 4, 3, None)),
        (OPEN_MPI | PORT | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {}, ("127.0.0.1:7", 4, 3, 3)),
    ],
)
def test_what_jax_is_told(nothing_said, environ, arguments, expected):
    for name, value in environ.items():
        nothing_said.setenv(name, value)

    def initialize(coordinator_address, num_processes, process_id, *, local_device_ids=None, **options):
        raise Asked(coordinator_address, num_processes, process_id, local_device_ids)

    nothing_said.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(Asked) as asked:
        jdp.distributed.initialize(**arguments)
    assert asked.value.args == expected


TASKS = {"SLURM_STEP_TASKS_PER_NODE": "2,4(x2)", "SLURM_NODEID": "2"}  # of this step on each node


@pytest.mark.parametrize(
    "environ, method",
    [
        (SLURM, None),
        (SLURM | {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (SLURM | {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0"}, "deactivate"),  # by --gpus-per-task
        (SLURM | {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, None),
        (SLURM | {"SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0,1"} | TASKS, "deactivate"),
        (SLURM | {"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "0,1"} | TASKS, "deactivate"),
        (SLURM | {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0", "PMI_SIZE": "4", "PMI_RANK": "1"}, "deactivate"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "9.0;tcp://h:3"}, "deactivate"),
        (SLURM | {"PMI_SIZE": "2", "PMI_RANK": "1"}, None),  # srun --mpi=pmi2: Slurm counts the GPUs
    ],
)  # fmt: skip
def test_jax_does_not_count_gpus_that_are_divided_otherwise(nothing_said, environ, method):
    """JAX would take the one of the local rank, which may not be there, or be one of many."""
    asked = []
    nothing_said.setattr(jax.distributed, "initialize", lambda **told: asked.append(told) or sys.exit())
    for name, value in environ.items():
        nothing_said.setenv(name, value)
    with pytest.raises(SystemExit):
        jdp.distributed.initialize()
    assert (asked[0].get("cluster_detection_method"), asked[0].get("local_device_ids")) == (method, None)


def test_initialize_is_nothing_for_one_process(nothing_said):
    before = sys.excepthook, os.environ.get("XLA_FLAGS")
    jdp.distributed.initialize()  # JAX has started already, which its own initialize refuses
    jdp.distributed.initialize("127.0.0.1:1", 1, 0)
    assert (sys.excepthook, os.environ.get("XLA_FLAGS")) == before
    assert jax.process_count() == 1


@pytest.mark.parametrize("address", ["host", "host:", "fd00::5", "host:port", ":29500", "host:0", "host:65536"])
def test_where_to_meet_is_a_host_and_a_port(nothing_said, address):
    with pytest.raises(ValueError, match=r"jdp\.distributed\.initialize: coordinator_address is '.*'; it is a host"):
        jdp.distributed.initialize(address, 2, 0)


def test_where_process_0_listens_is_a_host_and_a_port(nothing_said, refused):
    nothing_said.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0")
    with refused(ValueError, "distributed.initialize", "coordinator_bind_address is '0.0.0.0'; it is a host"):
        jdp.distributed.initialize("127.0.0.1:1", 2, 0)


@pytest.mark.parametrize("seconds", [-1, 0, math.nan, "20", True, None, 10**9, math.inf])
@pytest.mark.parametrize("name", ["timeout", "start_timeout", "heartbeat_timeout", "shutdown_timeout"])
def test_a_time_is_a_number_of_seconds(nothing_said, refused, name, seconds):
    """Also in a job of one, so that a script says so where it is written."""
    if name == "timeout" and seconds in (None, 10**9, math.inf):
        return jdp.distributed.initialize(num_processes=1, timeout=seconds)
    with refused(ValueError, "distributed.initialize", f"{name} is .*{seconds}.*; it is a number of seconds"):
        jdp.distributed.initialize(num_processes=1, **{name: seconds})


@pytest.mark.parametrize("option", ["--grace", "--preemption-grace"])
def test_a_grace_is_a_number_of_seconds_that_python_can_wait(capsys, option):
    with pytest.raises(SystemExit):
        parse(["-n", "2", option, "1e10", __file__])
    assert f"{option} is 10000000000.0; it is a number of seconds. Pass 0 to 1e8." in capsys.readouterr().err
    assert parse(["-n", "2", option, "1e8", __file__]).processes == 2


def test_initialize_after_jax_has_started_is_an_error():
    with pytest.raises(RuntimeError, match="must be called before any JAX calls"):
        jdp.distributed.initialize("127.0.0.1:1", num_processes=2, process_id=0)


class RayWorker:
    """What Ray Train tells one of its workers, and what it tells the others for it."""

    def __init__(self, count, here, told=None):
        self.get_world_size, self.get_world_rank, self.told = lambda: count, lambda: here, told

    def get_context(self):
        return self

    def get_node_ip_address(self):
        return "10.0.0.9"

    def broadcast_from_rank_zero(self, address):
        return address or self.told


@pytest.mark.parametrize(
    "worker, match", [(RayWorker(2, 0), r"10.0.0.9:\d+"), (RayWorker(2, 1, "10.0.0.8:5"), "10.0.0.8:5")]
)
def test_a_worker_of_ray(nothing_said, worker, match):
    """One of its group, though Slurm has started Ray itself."""
    for name in ("ray.train", "ray.train.collective", "ray.util"):
        nothing_said.setitem(sys.modules, name, worker)
    for name, value in SLURM.items():
        nothing_said.setenv(name, value)
    asked = []
    nothing_said.setattr(jax.distributed, "initialize", lambda **told: asked.append(told) or sys.exit())
    with pytest.raises(SystemExit):
        jdp.distributed.initialize()
    said = asked[0]
    assert (said["num_processes"], said["process_id"]) == (2, worker.get_world_rank())
    assert re.fullmatch(match, said["coordinator_address"])


def test_one_worker_of_ray_and_no_worker_of_it(nothing_said):
    nothing_said.setattr(jax.distributed, "initialize", None)
    nothing_said.setitem(sys.modules, "ray.train", RayWorker(1, 0))
    nothing_said.setenv("SLURM_STEP_NUM_TASKS", "2")  # as who has started Ray has left it
    jdp.distributed.initialize()
    nothing_said.delenv("SLURM_STEP_NUM_TASKS")

    def driver():
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")

    nothing_said.setattr(sys.modules["ray.train"], "get_context", driver)
    jdp.distributed.initialize()


@pytest.mark.parametrize(
    "own, coordinator, interface",
    [
        ("127.0.1.1", "10.0.0.1:5", "eth1"),
        ("127.0.1.1", "192.168.9.9:5", "eth0"),
        ("127.0.1.1", "debian:5", "eth0"),  # process 0, by its own name: the default route
        ("absent", "10.0.0.1:5", "eth1"),  # the hostname does not resolve
        ("10.0.0.7", "10.0.0.1:5", None),
        ("127.0.1.1", "127.0.0.1:5", None),
        ("127.0.1.1", "localhost:5", None),
        ("127.0.1.1", "absent:5", None),
        ("127.0.1.1", "", None),
    ],
)
def test_gloo_takes_the_interface_that_leads_to_the_others(monkeypatch, tmp_path, own, coordinator, interface):
    """Where the hostname is that of Debian. Destination and mask as the kernel prints them, in the machine's order."""
    known = {"debian": own}

    def resolve(name):
        name = known.get(name, name)
        if name == "absent":
            raise OSError("Name or service not known")
        return name

    number = lambda text: f"{int.from_bytes(socket.inet_aton(text), sys.byteorder):08X}"  # noqa: E731
    rows = [("eth0", "0.0.0.0", "0.0.0.0"), ("eth1", "10.0.0.0", "255.255.255.0"), ("eth0", "10.0.0.0", "255.0.0.0")]
    lines = [f"{name} {number(to)} 0 0 0 0 0 {number(mask)} 0" for name, to, mask in rows]
    (tmp_path / "route").write_text("\n".join(["Iface Destination ... Mask", *lines]))
    monkeypatch.setattr(initialize, "Path", lambda path: tmp_path / "route" if path == "/proc/net/route" else None)
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert initialize._interface_to(coordinator) == interface
