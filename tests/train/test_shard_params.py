"""ZeRO-3 (`shard_params=True`): the numbers of the replicated step, and a part of what is trained on each device."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from laws import assert_cut, bytes_of, close, divides, examples

import jdp

RANDOM = np.random.RandomState(0)
ROWS = 32
X, Y = RANDOM.randn(ROWS, 8).astype(np.float32), RANDOM.randn(ROWS, 6).astype(np.float32)


def normal(*shape):
    """An array of parameters, of the order of one over the root of its rows."""
    return (RANDOM.randn(*shape) / np.sqrt(shape[-2] if len(shape) > 1 else 4)).astype(np.float32)


# Cut along the first axis, along the second, by 2 devices but not by 8, and not at all.
PARAMS = {
    "in": {"w": normal(8, 16), "b": normal(16)},
    "mid": normal(16, 16),
    "out": [normal(16, 6), normal(6)],
    "scale": np.float32(1.5),
}


def batch(size, start=0):
    return X[start : start + size], Y[start : start + size]


def model(params, x):
    h = jnp.tanh(jnp.tanh(x @ params["in"]["w"] + params["in"]["b"]) @ params["mid"])
    return (h @ params["out"][0] + params["out"][1]) * params["scale"]


def loss(variables, batch):
    x, y = batch
    return jnp.mean((model(variables["params"], x) - y) ** 2)


@functools.cache
def wrapper(n):
    return jdp.DataParallel(model, devices=range(n))


@functools.cache
def step_of(n, tx, loss_fn=loss, **options):
    """One step for all tests with the same arguments, so that its programs are compiled once."""
    return wrapper(n).train_step(loss_fn, tx, **options)


def plain_loop(tx, params, batches, loss_fn=loss):
    """The reference: one device, the whole batch, a bare optax loop."""

    @jax.jit
    def update(params, opt_state, data):
        grads = jax.grad(lambda params: loss_fn({"params": params}, data))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.jit(tx.init)(params)
    for data in batches:
        params, opt_state = update(params, opt_state, data)
    return params, opt_state


def train(step, state, batches):
    for data in batches:
        state, _ = step(state, data)
    return state


def axes(tree):
    """The axis along which each array is cut, None for one that is whole."""
    spec = lambda x: next((i for i, name in enumerate(x.sharding.spec) if name is not None), None)  # noqa: E731
    return jax.tree.map(spec, tree)


# --- the equation, and where the state lies ---

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)


def labels(params):
    return jax.tree.map_with_path(lambda path, _: "b" if "b" in jax.tree_util.keystr(path[-1:]) else "w", params)


TRANSFORMATIONS = {
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05)),
    "adam": optax.adam(0.05),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped each": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "muon": optax.contrib.muon(0.05),
    # Factored moments, of all matrices here: rows and columns of their own shapes.
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=2),
    "two of them": optax.multi_transform({"w": optax.adam(0.05), "b": optax.sgd(0.1, momentum=0.9)}, labels),
    "a schedule": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "several steps": optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(),
    "a mask": optax.chain(
        optax.masked(optax.scale_by_adam(), {"in": True, "mid": False, "out": [True, True], "scale": False}),
        optax.scale(-0.05),
    ),
    "lamb": optax.lamb(0.05),
}
# In turn 8 devices, and 2 with microbatches; and in turn an uneven batch, and an even and an uneven one.
CASES = [(name, *((8, 1), (2, 2))[i % 2], (16, 13)[i // 2 % 2 :]) for i, name in enumerate(TRANSFORMATIONS)]


@pytest.mark.full
@pytest.mark.parametrize("name, n, accumulate, sizes", CASES)
def test_every_optimizer_is_that_of_one_device(name, n, accumulate, sizes):
    """Norms, factored moments and layers of their own are those of the whole arrays, whatever is cut."""
    tx = TRANSFORMATIONS[name]
    step = step_of(n, tx, shard_params=True, accumulate_steps=accumulate)
    batches = [batch(sizes[i % len(sizes)], start=3 * i) for i in range(4)]
    first = step.init({"params": PARAMS})
    where = jax.tree.map(lambda x: x.sharding, first)
    assert_cut((first.params, first.opt_state), n)
    assert step.parameter_bytes(first) == bytes_of(PARAMS, n)
    state = train(step, first, batches)
    close((state.params, state.opt_state), plain_loop(tx, PARAMS, batches), 1e-5, 1e-5)
    assert jax.tree.map(lambda x: x.sharding, state) == where  # as init has cut it, so it stays
    assert_cut((state.params, state.opt_state), n)
    assert step.optimizer_bytes(state) == bytes_of(state.opt_state, n)
    assert step.parameter_bytes(state) == bytes_of(state.params, n)


@pytest.mark.one_case("8-1-False-13")
@pytest.mark.parametrize("size", [16, 13, 7, 1])
@pytest.mark.parametrize(
    "n, accumulate, once", [(8, 1, False), (8, 2, False), (3, 3, True), (2, 3, True), (1, 1, False)]
)
def test_every_batch_size_is_that_of_one_device(n, accumulate, once, size):
    """Twenty steps of Adam: of even chunks, uneven ones, and with devices that have no row."""
    tx = TRANSFORMATIONS["adam"]
    step = step_of(n, tx, shard_params=True, accumulate_steps=accumulate, gather_once=once)
    batches = [batch(size, start=i % 8) for i in range(20)]
    state = train(step, step.init({"params": PARAMS}), batches)
    close((state.params, state.opt_state), plain_loop(tx, PARAMS, batches), 1e-5, 1e-5)
    assert_cut((state.params, state.opt_state), n)
    held = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards[:1])
    whole = sum(x.nbytes for x in jax.tree.leaves(state) if not divides(x, n))
    assert held == sum(x.nbytes for x in jax.tree.leaves(state) if divides(x, n)) // n + whole


def test_the_optimizers_arrays_are_cut_as_their_parameters_are():
    tx = TRANSFORMATIONS["adam"]
    state = step_of(8, tx, shard_params=True).init({"params": PARAMS})
    cut = axes(state.params)
    assert axes(state.opt_state[0].mu) == axes(state.opt_state[0].nu) == cut
    assert axes(wrapper(8).train_step(loss, tx, shard_params=True).init({"params": PARAMS}).params) == cut


@pytest.mark.full
def test_another_model_is_cut_as_in_a_new_step():
    """What the scans of the first model iterate over says nothing of the second's, whose biases have other shapes."""

    def scanned(variables, x):
        return (jax.lax.scan(lambda h, b: (jnp.tanh(h + b), None), x, variables["params"])[0] ** 2).mean()

    dp, x = wrapper(2), np.ones((4, 4), np.float32)
    new = lambda: dp.train_step(scanned, optax.sgd(0.1), shard_params=True)  # noqa: E731

    def trained(step, layers):
        state = step.init({"params": np.ones((layers, 4), np.float32)})
        for _ in range(2):
            state, _ = step(state, x)
        return axes(state.params), step.lower(state, x).as_text()

    step = new()
    trained(step, 2)
    assert trained(step, 6) == trained(new(), 6)


def test_it_implies_a_cut_optimizer_and_refuses_a_whole_one():
    dp = wrapper(2)
    with pytest.raises(ValueError, match="shard_optimizer"):
        dp.train_step(loss, optax.adam(0.1), shard_params=True, shard_optimizer=False)
    state = dp.train_step(loss, optax.adam(0.1), shard_params=True, shard_optimizer=True).init({"params": PARAMS})
    assert_cut((state.params, state.opt_state), 2)
    state = dp.train_step(loss, optax.adam(0.1), shard_optimizer=False).init({"params": PARAMS})
    assert_cut((state.params, state.opt_state), 2, cut=False)


def test_gather_once_needs_shards(refused):
    with refused(ValueError, "train_step", match="gather_once is True and shard_params False"):
        jdp.DataParallel(nn.Dense(3)).train_step(lambda v, b: 0.0, optax.adam(0.1), gather_once=True)


@pytest.mark.full
def test_what_a_loss_prints_or_calls_does_not_keep_it_from_being_cut():
    """Once a replica; the backward pass may not call it again."""
    seen = []

    def loss(variables, x):
        y = x @ variables["params"]["w"]
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return jnp.mean((y @ variables["params"]["v"]) ** 2)

    params = {"w": np.ones((8, 16), np.float32), "v": np.ones((16, 8), np.float32)}
    results = []
    for sharded in (False, True):
        step = jdp.DataParallel(nn.Dense(3), devices=range(8)).train_step(loss, optax.sgd(0.01), shard_params=sharded)
        state, metrics = step(step.init({"params": params}), np.ones((8, 8), np.float32))
        jax.effects_barrier()
        results.append((float(metrics["loss"]), len(seen)))
        seen.clear()
    assert results[0] == results[1] and results[1][1] == 8


# --- models ---


def ran(shard, loss_fn, params, tx=TRANSFORMATIONS["momentum"], n=8, sizes=(16, 3), once=False, stays=True, **options):
    """Loss, metrics and the whole state after steps, with the parameters cut or replicated.

    `stays`: whether all that can be cut is, still after a step.
    """
    step = wrapper(n).train_step(loss_fn, tx, shard_params=shard, gather_once=shard and once, **options)
    state = step.init({"params": params})
    assert_cut(state.params, n, cut=shard)
    said = []
    for i, size in enumerate(sizes):
        state, metrics = step(state, batch(size, start=i))
        said.append(metrics)
    if stays:
        assert_cut((state.params, state.opt_state), n, cut=shard)
    return state.params, state.opt_state, said


def both(loss_fn, params, want=None, limit=1e-5, **options):
    """The step with its parameters cut beside the replicated one, which may have run already."""
    cut = ran(True, loss_fn, params, **options)
    close(cut, want or ran(False, loss_fn, params, **options), limit, limit)
    moved = jax.tree.map(lambda after, before: np.abs(np.asarray(after) - before).max(), cut[0], params)
    assert max(jax.tree.leaves(moved)) > 1e-4


def squares(out, batch):
    """Of what a model gives, against the targets."""
    return jnp.mean((out[..., :6] - batch[1]) ** 2)


def blocks(params, x, body=lambda h, w: (jnp.tanh(h @ w["w"] + w["b"]), None), **options):
    return jax.lax.scan(body, x, params, **options)[0]


BLOCKS = {"w": normal(3, 8, 8), "b": normal(3, 8)}
BOTH = {"layers": BLOCKS, "out": normal(8, 6)}


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (2 * g @ kept[1].T, 2 * kept[0].T @ g))


def tied(p, batch):
    ids = jnp.argmax(batch[0], -1)
    h = p["table"][ids]
    return squares(jnp.tanh(h @ p["w"]) @ p["table"].T, batch)


def in_bfloat16(p, batch):
    p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
    return squares(model(p, batch[0].astype(jnp.bfloat16)).astype(jnp.float32), batch)


def cast_some(p, batch):
    """One use in bfloat16, another in float32."""
    h = (batch[0].astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)
    return squares(jnp.tanh(h) @ p["w"], batch)


def checkpointed(p, batch):
    h = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]))(p["in"], batch[0])
    h = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=jax.checkpoint_policies.dots_saveable)(p["mid"], h)
    return squares(h @ p["out"][0] + p["out"][1], batch) * p["scale"]


def jitted(p, batch):
    h = jax.jit(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]))(p["in"], batch[0])
    return squares(jax.jit(jax.jit(lambda w, x: jnp.tanh(x @ w)))(p["mid"], h) @ p["out"][0], batch)


def nested(p, batch):
    """A scan of a scan: the outer runs over stacks of stacks."""
    inner = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    h, _ = jax.lax.scan(lambda h, ws: (blocks(ws["w"], h, inner) + ws["b"], None), batch[0], p["stack"])
    return squares(h @ p["out"], batch)


def checkpointed_scan(p, batch):
    body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w["w"] + w["b"]), None))
    return squares(blocks(p["layers"], batch[0], body) @ p["out"], batch)


def jitted_scan(p, batch):
    body = lambda h, w: (jax.jit(lambda h, w: jnp.tanh(h @ w["w"]) + w["b"])(h, w), None)  # noqa: E731
    return squares(jax.jit(blocks, static_argnames=("body", "reverse"))(p["layers"], batch[0], body) @ p["out"], batch)


def backwards(p, batch):
    return squares(blocks(p["layers"], batch[0], reverse=True, unroll=2) @ p["out"], batch)


def scan_that_gives(p, batch):
    """What a scan makes of each layer is used after it, and so is its parameter."""

    def body(h, w):
        h = jnp.tanh(h @ w["w"] + w["b"])
        return h, ((h**2).mean(), w["b"])

    h, (means, biases) = jax.lax.scan(body, batch[0], p["layers"])
    return squares(h @ p["out"], batch) + jnp.sum(means) + 0.1 * jnp.sum(biases**2)


def scanned_and_used(p, batch):
    """The same stack in a scan, and whole."""
    h = blocks(p["layers"], batch[0])
    return squares(jnp.tanh(h @ p["layers"]["w"].sum(0)) @ p["out"], batch)


def scanned_in_bfloat16(p, batch):
    """Cast before the scan, as mixed precision does it."""
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
    return squares((blocks(low["layers"], batch[0].astype(jnp.bfloat16)) @ low["out"]).astype(jnp.float32), batch)


def cast_in_the_scan(p, batch):
    body = lambda h, w: (jnp.tanh((h.astype(jnp.bfloat16) @ w["w"].astype(jnp.bfloat16)).astype(jnp.float32)), None)  # noqa: E731
    return squares(blocks(p["layers"], batch[0], body) @ p["out"], batch)


def recurrent(p, batch):
    """The weights are constants of the scan, which runs over time."""
    turn = lambda h, x: (jnp.tanh(h @ p["h"] + x[:, None] * p["x"]), None)  # noqa: E731
    h, _ = jax.lax.scan(turn, jnp.zeros((len(batch[0]), 16)), batch[0].T)
    return squares(h @ p["out"], batch)


def carried(p, batch):
    """Parameters go round a loop and are changed there, as in MAML."""
    inner = lambda w: jnp.mean((batch[0] @ w - 1) ** 2)  # noqa: E731
    w, _ = jax.lax.scan(lambda w, _: (w - 0.1 * jax.grad(inner)(w), None), p["w"], length=2)
    return squares(batch[0] @ w @ p["out"], batch)


def with_l2(p, batch):
    return squares(model(p, batch[0]), batch) + 0.01 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


def branches(p, batch):
    h = jax.lax.cond(p["scale"] > 1, lambda x: x @ p["in"]["w"], lambda x: x @ p["in"]["w"] + p["in"]["b"], batch[0])
    h = jax.lax.switch(1, [lambda h: h, lambda h: jnp.tanh(h @ p["mid"])], h)
    return squares(h @ p["out"][0], batch) * p["scale"]


def while_loop(p, batch):
    """The largest singular value by power iteration, as in spectral normalization."""

    def turn(state):
        i, v = state
        v = p["mid"].T @ (p["mid"] @ v)
        return i + 1, v / jnp.linalg.norm(v)

    _, v = jax.lax.while_loop(lambda state: state[0] < 4, turn, (0, jnp.ones(16)))
    h = batch[0] @ p["in"]["w"] @ (p["mid"] / jnp.linalg.norm(p["mid"] @ jax.lax.stop_gradient(v)))
    return squares(h @ p["out"][0], batch)


def own_gradient(p, batch):
    return squares(jax.nn.relu(doubled(batch[0], p["in"]["w"])) @ p["out"][0], batch)


def penalty(p, batch):
    """A gradient by the inputs inside of the loss."""
    slope = jax.grad(lambda x: model(p, x).sum())(batch[0])
    return squares(model(p, batch[0]), batch) + jnp.mean(slope**2)


def ensemble(p, batch):
    return squares(jax.vmap(lambda w: jnp.tanh(batch[0] @ w))(p["layers"]["w"]).mean(0) @ p["out"], batch)


def transposed(p, batch):
    """Of each of several kinds of view, and of a part."""
    h = jnp.tanh(batch[0] @ p["mid"].T[:8]) @ p["mid"].reshape(4, 64).T.reshape(16, 16)
    return squares(h[:, ::-1] @ jnp.swapaxes(p["out"][0].T, 0, 1), batch)


def views_in_a_scan(p, batch):
    turned = jnp.swapaxes(p["layers"]["w"], 1, 2)
    return squares(blocks({"w": turned, "b": p["layers"]["b"]}, batch[0]) @ p["out"], batch)


def rounded_in_a_scan(p, batch):
    """Cast back and forth before the scan: to integers, to bool, and through two narrow dtypes."""
    w = p["layers"]["w"]
    casts = w.astype(jnp.int8).astype(jnp.float32), w.astype(bool).astype(jnp.float32)
    low = w.astype(jnp.float16).astype(jnp.bfloat16).astype(jnp.float32)

    def body(h, w):
        whole, mask, low, b = w
        return jnp.tanh(0.1 * h @ whole + h @ (low * mask)) + b, None

    return squares(blocks((*casts, low, p["layers"]["b"]), batch[0], body) @ p["out"], batch)


def counted(p, batch):
    """A scan that carries numbers of weak types."""
    body = lambda c, w: ((jnp.tanh(c[0] @ w["w"]), c[1] + 1.0, c[2] + 1), None)  # noqa: E731
    (h, total, _), _ = jax.lax.scan(body, (batch[0], 0.0, 0), p["layers"])
    return squares(h @ p["out"] * total, batch)


def calls_of_loops(p, batch):
    """A scan in a branch, in a vmap, and a matrix of each turn of a fori_loop."""
    run = lambda h: blocks(p["layers"], h)  # noqa: E731
    h = jax.lax.cond(batch[0][0, 0] < 99, run, lambda h: h, batch[0])
    h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["layers"]["w"][i]), jax.vmap(run)(h))
    return squares(h @ p["out"], batch)


def untouched(p, batch):
    """Not every parameter is used, and one is a metric as it is."""
    return squares(batch[0] @ p["in"]["w"] @ p["out"][0], batch), {"scale": p["scale"], "norm": optax.tree.norm(p)}


def column_stacks(p, batch):
    """Stacked along the second axis, as by nn.scan(variable_axes={"params": 1})."""
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch[0], jnp.moveaxis(p["w"], 1, 0))
    return squares(h @ p["out"], batch)


def no_other_axis(p, batch):
    """A scan over 8 arrays, which 8 devices cannot cut along another axis."""
    h, _ = jax.lax.scan(lambda h, w: (h * w["a"] + jnp.pad(w["b"], (0, 5)), None), batch[0], p["w"])
    return squares(h @ p["out"], batch)


MODELS = {
    "tied": (tied, {"table": normal(8, 16), "w": normal(16, 16)}),
    "all in bfloat16": (in_bfloat16, PARAMS),
    "some in bfloat16": (cast_some, {"w": normal(8, 8)}),
    "checkpoint": (checkpointed, PARAMS),
    "jit": (jitted, PARAMS),
    "nested scans": (nested, {"stack": {"w": normal(3, 2, 8, 8), "b": normal(3, 8)}, "out": normal(8, 6)}),
    "scan of checkpoint": (checkpointed_scan, BOTH),
    "scan in jit": (jitted_scan, BOTH),
    "reverse scan": (backwards, BOTH),
    "outputs of a scan": (scan_that_gives, BOTH),
    "scanned and used": (scanned_and_used, BOTH),
    "scanned in bfloat16": (scanned_in_bfloat16, BOTH),
    "cast in the scan": (cast_in_the_scan, BOTH),
    "recurrent": (recurrent, {"h": normal(16, 16), "x": normal(16), "out": normal(16, 6)}),
    "carry": (carried, {"w": normal(8, 8), "out": normal(8, 6)}),
    "L2": (with_l2, PARAMS),
    "branches": (branches, PARAMS),
    "while": (while_loop, PARAMS),
    "custom_vjp": (own_gradient, PARAMS),
    "gradient penalty": (penalty, PARAMS),
    "vmap": (ensemble, BOTH),
    "views": (transposed, PARAMS),
    "views in a scan": (views_in_a_scan, BOTH),
    "casts before a scan": (
        rounded_in_a_scan,
        {"layers": {"w": 4 * BLOCKS["w"], "b": BLOCKS["b"]}, "out": BOTH["out"]},
    ),
    "weak types": (counted, BOTH),
    "calls of loops": (calls_of_loops, BOTH),
    "unused": (untouched, PARAMS),
    "scan along axis 1": (column_stacks, {"w": normal(8, 3, 8), "out": normal(8, 6)}),
    "the scanned axis alone divides": (no_other_axis, {"w": {"a": normal(8), "b": normal(8, 3)}, "out": normal(8, 6)}),
    "as many layers as devices": (column_stacks, {"w": normal(8, 8, 8), "out": normal(8, 6)}),
}


def in_pieces_of(monkeypatch, most):
    """So that a small model, too, has several pieces."""
    monkeypatch.setattr("jdp._train.shards.MOST_AT_ONCE", most)
    monkeypatch.setattr("jdp._core.shards.MOST_AT_ONCE", most)


@functools.cache
def replicated(name, accumulate):
    """What the replicated step makes of a model: it does not depend on how parameters are gathered."""
    loss_fn, params = MODELS[name]
    return ran(False, lambda v, batch: loss_fn(v["params"], batch), params, accumulate_steps=accumulate)


@pytest.mark.full
@pytest.mark.each_pair
@pytest.mark.one_case("500-False-1-scanned and used")
@pytest.mark.parametrize("name", [*MODELS][::-1])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("most", [1 << 25, 500])
def test_every_model_is_that_of_the_replicated_step(monkeypatch, name, accumulate, once, most):
    """Whatever a program does with its parameters, in one piece or in many: the same metrics, gradients and state."""
    in_pieces_of(monkeypatch, most)
    loss_fn, params = MODELS[name]
    # What is rounded to bfloat16 may be rounded the other way where a sum is taken in another order.
    limit = 1e-2 if "bfloat16" in name or name == "cast in the scan" else 1e-5
    ways = {"once": once, "stays": name != "the scanned axis alone divides", "accumulate_steps": accumulate}
    both(lambda v, batch: loss_fn(v["params"], batch), params, replicated(name, accumulate), limit, **ways)


@pytest.mark.full
def test_what_a_scan_runs_over_is_never_cut_along_that_axis():
    """Also where no other axis divides, or a scan runs over another axis than the first."""
    params = {"odd": normal(16, 5, 5), "turned": normal(16, 5, 24), "w": normal(5, 6)}

    def loss_fn(variables, batch):
        p = variables["params"]
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch[0][:, :5], p["odd"])
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w).mean(), None), h, jnp.moveaxis(p["turned"], 2, 0).mT)
        return squares(h @ p["w"], batch)

    found = []
    for shard in (False, True):
        step = wrapper(8).train_step(loss_fn, optax.adam(0.1), shard_params=shard)
        state = train(step, step.init({"params": params}), [batch(16), batch(7)])
        found.append((state.params, state.opt_state))
    close(*found, 1e-6, 1e-6)
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        assert axes(tree) == {"odd": None, "turned": 0, "w": None}
    assert step.parameter_bytes(state) == (16 * 5 * 24 * 4 // 8, (16 * 5 * 5 + 5 * 6) * 4)


@pytest.mark.full
def test_a_model_that_closes_over_its_own_parameters_trains_the_others():
    """They are constants of the program."""
    fixed = jnp.asarray(normal(16, 6))
    both(lambda v, batch: squares(jnp.tanh(batch[0] @ v["params"]["w"]) @ fixed, batch), {"w": normal(8, 16)})


# --- Linen: collections, keys, skipped steps, donation ---


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        return nn.tanh(nn.Dense(16)(h)), None


class Normed(nn.Module):
    """A scan over blocks, BatchNorm and dropout."""

    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(16, use_bias=False)(x))
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = blocks()(nn.Dropout(self.rate, deterministic=not train)(x), None)
        return nn.Dense(6)(x)


def normed_loss(variables, batch, key):
    x, y = batch
    out, updates = Normed().apply(variables, x, mutable=["batch_stats"], rngs={"dropout": key})
    return jnp.mean((out - y) ** 2), {"out": out}, updates


def sure_loss(variables, batch):
    out, updates = Normed(rate=0.0).apply(variables, batch[0], mutable=["batch_stats"])
    return jnp.mean((out - batch[1]) ** 2), {}, updates


@functools.cache
def variables():
    return jax.tree.map(np.asarray, jax.jit(lambda x: Normed().init(jax.random.key(0), x, train=False))(X))


# eps: behind a BatchNorm of two rows gradients are all but zero, and adam would make steps of their rounding.
STEADY = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05, eps=1e-2))


@pytest.mark.full
def test_a_step_that_is_skipped_changes_nothing():
    bad = jax.tree.map(np.copy, batch(16))
    bad[0][14, 1] = np.nan
    step = step_of(8, TRANSFORMATIONS["adam"], shard_params=True, skip_nonfinite=True)
    state = step.init({"params": PARAMS})
    before = jax.tree.map(np.array, state)
    (found,) = step.find_nonfinite(state, bad)
    assert (found.replica, found.rows) == (7, (14,)) and "['mid']" in found.paths
    after, metrics = step(state, bad)
    assert metrics["skipped"] and all(x.is_deleted() for x in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert_cut((after.params, after.opt_state), 8)


@pytest.mark.full
def test_a_metric_with_rows_comes_back_gathered():
    """Which axis is that of the rows is seen by tracing the loss with more of them, and with whole parameters."""
    loss_fn = lambda v, batch: (loss(v, batch), {"out": model(v["params"], batch[0])})  # noqa: E731
    step = wrapper(8).train_step(loss_fn, TRANSFORMATIONS["adam"], shard_params=True)
    for size in (16, 13):
        _, metrics = step(step.init({"params": PARAMS}), batch(size))
        close(metrics["out"], model(PARAMS, X[:size]), 1e-5, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "n, accumulate, sync, size",
    [
        # Each pair of two values of these, but one.
        *((2, 2, True, 16), (8, 1, False, 16), (8, 1, True, 13), (8, 1, True, 7), (8, 1, False, 7)),
        (2, 2, False, 13),  # synchronised statistics in a loop of unequal replicas are refused, as ever
    ],
)
def test_collections_keys_metrics_and_skipped_steps_are_those_of_the_replicated_step(n, accumulate, sync, size):
    """BatchNorm, synchronised and not, and dropout; a NaN leaves all as it was, and the same rows are named."""
    good, bad = batch(size), jax.tree.map(np.copy, batch(size))
    bad[0][size - 2, 1] = np.nan
    found = []
    for shard in (True, False):
        step = jdp.DataParallel(Normed(), devices=range(n)).train_step(
            normed_loss,
            STEADY,
            shard_params=shard,
            skip_nonfinite=True,
            sync_batch_norm=sync,
            accumulate_steps=accumulate,
        )
        state, metrics = step(step.init(variables(), jax.random.key(1)), good)
        assert not metrics["skipped"]
        before = jax.tree.map(np.array, state.replace(key=None))
        named = [(f.replica, f.rows, f.paths) for f in step.find_nonfinite(state, bad)]
        after, skipped = step(state, bad)
        assert skipped["skipped"] and all(x.is_deleted() for x in jax.tree.leaves(state))
        jax.tree.map(np.testing.assert_array_equal, after.replace(key=None), before)
        assert_cut((after.params, after.opt_state), n, cut=shard)
        assert_cut(after.state, n, cut=False)
        last, more = step(after, good)
        assert not more["skipped"] and int(last.step) == 2
        found.append((last.params, last.opt_state, last.state, metrics, more))
        if shard:
            assert named and named[0][1] == (size - 2,)
            first = named
    assert first == named
    close(*found, 1e-5, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("n, size", [(8, 16), (8, 13), (8, 7), (8, 1), (3, 16), (3, 13), (3, 7)])
def test_synchronised_batch_norm_is_that_of_one_device(n, size):
    """Twenty steps of Adam, and a scan over blocks.

    One row has a variance of 0, so that a mean over 3 devices, which rounds, is all that is seen: not compared.
    """
    step = jdp.DataParallel(Normed(), devices=range(n)).train_step(
        sure_loss, STEADY, shard_params=True, sync_batch_norm=True
    )
    state = step.init(variables())

    @jax.jit
    def one(params, opt_state, stats, batch):
        def loss_fn(params):
            loss, _, updates = sure_loss({"params": params, **stats}, batch)
            return loss, updates

        grads, stats = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt_state = STEADY.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats

    params, stats = variables()["params"], {"batch_stats": variables()["batch_stats"]}
    opt_state = STEADY.init(params)
    for i in range(20):
        state, _ = step(state, batch(size, start=i % 8))
        params, opt_state, stats = one(params, opt_state, stats, batch(size, start=i % 8))
    close((state.params, state.opt_state, state.state), (params, opt_state, stats), 1e-5, 1e-5)
    if n == 8:  # 3 divides the number of blocks, which a scan runs over
        assert_cut((state.params, state.opt_state), n)


@pytest.mark.full
def test_dropout_and_batch_norm_for_twenty_steps():
    """Each replica with its own statistics and its own draws, as in the replicated step.

    Four rows each: the BatchNorm of two rows is 1 and -1, and rounding decides which is which.
    """
    found = []
    for shard in (True, False):
        step = jdp.DataParallel(Normed(), devices=range(8)).train_step(normed_loss, STEADY, shard_params=shard)
        state = step.init(variables(), jax.random.key(1))
        found.append(train(step, state, [batch(32)] * 20).replace(key=None))
    close(*found, 1e-5, 1e-5)


def test_a_traced_init_leaves_the_parameters_cut():
    """Where shapes alone are asked for, nothing is known of where the parameters lie."""
    table = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    dp = jdp.DataParallel(lambda v, x: x @ v["params"], range(4))
    variables = {"params": jax.device_put(table, NamedSharding(dp.mesh, PartitionSpec("data")))}
    step = dp.train_step(lambda v, x: jnp.mean((x @ v["params"]) ** 2), optax.sgd(0.1))
    state = step.init(variables)
    before = state.params.sharding
    jax.eval_shape(step.init, variables)
    state, _ = step(state, np.ones((8, 8), np.float32))
    assert state.params.sharding == before and not before.is_fully_replicated


def test_init_makes_each_part_where_it_lives():
    module = nn.Dense(16)
    dp = jdp.DataParallel(module, devices=range(8))
    made = dp.init(jax.random.key(0), X, shard_params=True)
    assert_cut(made["params"], 8)
    # The same draws; whether a product of them is fused with another may move the last bit.
    close(made, module.init(jax.random.key(0), X), 1e-6, 1e-7)
    elsewhere = jax.device_put(jax.random.key(0), jax.devices()[3])
    close(made, dp.init(elsewhere, X, shard_params=True), 1e-6, 1e-7)
    step = dp.train_step(lambda v, batch: squares(module.apply(v, batch[0]), batch), STEADY, shard_params=True)
    state = step.init(made)
    assert jax.tree.map(lambda x: x.sharding, state.params) == jax.tree.map(lambda x: x.sharding, made["params"])
    step(state, batch(16))
    assert not any(x.is_deleted() for x in jax.tree.leaves(made))  # what the caller has made is never donated


@pytest.mark.full
def test_init_leaves_other_collections_whole():
    dp = jdp.DataParallel(Normed(), devices=range(8))
    made = dp.init(jax.random.key(0), X, train=False, shard_params=True)
    assert_cut(made["params"], 8)
    assert_cut(made["batch_stats"], 8, cut=False)
    close(made, dp.init(jax.random.key(0), X, train=False), 1e-6, 1e-7)


class Net2(nn.Module):
    """Other loops of Flax: stacked along the second axis, over time, and with what is gathered made again."""

    @nn.compact
    def __call__(self, x):
        columns = nn.scan(Block, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)
        again = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=8)
        h, _ = columns()(nn.Dense(16)(x), None)
        h, _ = again()(h, None)
        time = nn.RNN(nn.OptimizedLSTMCell(16))(h.reshape(len(x), 4, 4))
        h = nn.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.float32)(time, time)
        h = nn.LayerNorm()(h + nn.Embed(8, 16)(jnp.argmax(x, -1))[:, None])
        return nn.Dense(6)(nn.remat(nn.Dense)(16)(h).mean(1))


@functools.cache
def replicated_loops(accumulate):
    params = jax.tree.map(np.asarray, jax.jit(Net2().init)(jax.random.key(0), X))["params"]
    return params, ran(False, loops_loss, params, accumulate_steps=accumulate)


def loops_loss(variables, batch):
    return squares(Net2().apply(variables, batch[0]), batch)


@pytest.mark.full
@pytest.mark.parametrize("most", [1 << 25, 0])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loops_of_flax_are_those_of_the_replicated_step(monkeypatch, most, accumulate):
    params, want = replicated_loops(accumulate)
    in_pieces_of(monkeypatch, most)
    both(loops_loss, params, want, accumulate_steps=accumulate)


# --- calls and gradients of parameters that are cut ---


@functools.cache
def cut_params(n=8):
    return step_of(n, TRANSFORMATIONS["adam"], shard_params=True).init({"params": PARAMS}).params


@pytest.mark.one_case("7-3")
@pytest.mark.parametrize("size, n", [(16, 8), (13, 8), (1, 8), (8, 2), (7, 3)])
def test_calls_and_gradients_take_parameters_that_are_cut(size, n):
    dp, params = wrapper(n), cut_params(n)
    x, _ = data = batch(size)
    for out in (dp(params, x), dp.apply(params, x)):
        close(out, model(PARAMS, x), 1e-5, 1e-5)
        assert {shard.device for shard in out.addressable_shards} == {*jax.devices()[:n]}
    loss_fn = lambda params, *batch: loss({"params": params}, batch)  # noqa: E731
    for accumulate in (1, 2) if n > 3 else (2,):
        value, grads = dp.value_and_grad(loss_fn, accumulate_steps=accumulate)(params, *data)
        want, want_grads = jax.value_and_grad(loss_fn)(PARAMS, *data)
        close((value, grads), (want, want_grads), 1e-5, 1e-6)
        assert_cut(grads, n)
        assert axes(grads) == axes(params)


@pytest.mark.full
def test_linen_calls_take_variables_that_are_cut():
    dp = jdp.DataParallel(Normed(), devices=range(8))
    made = dp.init(jax.random.key(0), X, train=False, shard_params=True)
    for size in (16, 13, 1):
        close(dp.apply(made, X[:size], train=False), Normed().apply(variables(), X[:size], train=False))
    rngs = {"dropout": jax.random.key(3)}
    found = [dp.apply(v, X[:16], rngs=rngs, mutable=["batch_stats"]) for v in (made, jdp.replicate(variables()))]
    close(*found)


@pytest.mark.full
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("form", ["vector", "mean", "ratio"])
@pytest.mark.parametrize("size", [64, 61])
@pytest.mark.parametrize("one", [20000, 2e-4])
def test_16_bit_gradients_of_any_mean_in_range_are_in_range(one, size, form, dtype):
    """Rows of 20000: their mean is a float16, the sum of four of them is not. Of small ones no share may be lost."""
    x = np.full((size, 8), one, dtype)

    def each(w, x):
        return x @ w

    loss_fn = {
        "vector": each,
        "mean": lambda w, x: jnp.mean(each(w, x), dtype=np.float32),
        "ratio": lambda w, x: jdp.Mean(jnp.sum(each(w, x), dtype=np.float32), x.shape[0]),
    }[form]
    mesh = Mesh(jax.devices()[:8], "data")
    w = jax.device_put(np.zeros(8, dtype), NamedSharding(mesh, PartitionSpec("data")))
    grad = wrapper(8).grad(loss_fn)(w, x)
    assert grad.dtype == dtype
    assert_cut(grad, 8)
    np.testing.assert_allclose(np.float64(grad), np.float64(x[0]), rtol=2**-7)


def test_the_count_of_a_term_is_a_number_of_python():
    w, x = jax.device_put(PARAMS["mid"], NamedSharding(Mesh(jax.devices()[:2], "data"), PartitionSpec("data"))), X[:4]
    terms = lambda w, x: jdp.Mean(jnp.sum(x @ w[:8]), x.shape[0]) + jdp.Sum(jnp.sum(w[0]) * 0)  # noqa: E731
    value = wrapper(2).value_and_grad(terms)(w, x)[0]
    np.testing.assert_allclose(value, np.sum(x @ PARAMS["mid"][:8]) / 4, rtol=1e-5)


def test_a_refused_state_leaves_the_step_as_it_was():
    step = wrapper(2).train_step(lambda v, x: jnp.mean(v["params"]["w"] * x), optax.sgd(0.1))
    state = step.init({"params": {"w": np.ones(4, np.float32)}})
    cut = {"w": jax.device_put(np.ones(8), NamedSharding(Mesh(jax.devices()[:2], "data"), PartitionSpec("data")))}
    with pytest.raises(TypeError, match="key is a int"):
        step.init({"params": cut}, key=3)
    with pytest.raises(ValueError, match=r"float32\[8\], float32\[4\] is expected"):
        step(state.replace(params=cut), np.ones((2, 4), np.float32))
    assert_cut(step(state, np.ones((2, 4), np.float32))[0].params, 2, cut=False)


def test_replicate_makes_them_whole(same):
    whole = jdp.replicate(cut_params())
    assert_cut(whole, 8, cut=False)
    same(whole, jax.tree.map(np.asarray, PARAMS))


@pytest.mark.one_case
@pytest.mark.parametrize("place", ["fewer devices", "another order", "another axis name", "one other device"])
def test_arrays_cut_over_another_mesh_are_refused(place):
    mesh = {
        "fewer devices": Mesh(jax.devices()[:4], "data"),
        "another order": Mesh(jax.devices()[::-1], "data"),
        "another axis name": Mesh(np.reshape(jax.devices(), (4, 2)), ("a", "b")),
        "one other device": Mesh(jax.devices()[3:4], "data"),
    }[place]
    spec = PartitionSpec(None, mesh.axis_names[0])
    params = {**PARAMS, "mid": jax.device_put(PARAMS["mid"], NamedSharding(mesh, spec))}
    for call in (lambda: wrapper(8)(params, X[:8]), lambda: jdp.replicate(params)):
        with pytest.raises(RuntimeError, match="mid"):
            call()


# --- NNX ---


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 6, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.tanh(self.norm(self.first(x)))))


def nnx_loss(net, batch):
    return jnp.mean((net(batch[0]) - batch[1]) ** 2)


def params_of(net):
    return nnx.as_pure(nnx.state(net, nnx.Param))


@pytest.mark.full
@pytest.mark.parametrize("n, accumulate", [(8, 1), (2, 2)])
@pytest.mark.parametrize("sync", [False, True])
def test_nnx_models_are_cut_in_place(n, accumulate, sync):
    found = []
    for shard in (True, False):
        dp = jdp.DataParallel(Net(nnx.Rngs(0)), devices=range(n))
        step = dp.train_step(nnx_loss, STEADY, shard_params=shard, accumulate_steps=accumulate, sync_batch_norm=sync)
        for size in (16, 16 if sync else 13, 16):
            step(batch(size))
            trained = params_of(dp.module), nnx.as_pure(step.optimizer.opt_state)
            assert_cut(trained, n, cut=shard)
        assert step.parameter_bytes() == bytes_of(trained[0], n if shard else 1)
        assert step.optimizer_bytes() == bytes_of(trained[1], n if shard else 1)
        # By the running statistics: those of two rows make one bit a difference of 1e-3.
        dp.eval()
        found.append((*trained, nnx.as_pure(nnx.state(dp.module, nnx.BatchStat)), dp(X[:13])))
    close(*found, 1e-5, 1e-5)


@pytest.mark.full
def test_nnx_models_are_made_in_parts():
    """By a function, each part where it lives; with the numbers of the model as it is."""
    make = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))  # noqa: E731
    dp, want = jdp.DataParallel(make, devices=range(8), shard_params=True), make()
    assert_cut(params_of(dp.module), 8)
    close(params_of(dp.module), params_of(want), 1e-6, 1e-7)
    close(dp(X[:16]), want(X[:16]), 1e-5, 1e-5)
    step = dp.train_step(lambda net, batch: squares(net(batch[0]), batch), optax.adam(0.05), shard_params=True)
    step(batch(16))
    assert step.parameter_bytes() == bytes_of(params_of(dp.module), 8)
    assert_cut(params_of(dp.module), 8)
    tx = optax.adam(0.05)
    grads = jax.grad(lambda p: squares(X[:16] @ p["kernel"] + p["bias"], batch(16)))(params_of(want))
    updates, _ = tx.update(grads, tx.init(params_of(want)), params_of(want))
    close(params_of(dp.module), optax.apply_updates(params_of(want), updates), 1e-5, 1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "module", [3, lambda params, x: x, lambda: 3, nn.Dense(3)], ids=["number", "function", "of another", "Linen"]
)
def test_only_nnx_models_are_made_in_parts(module, refused):
    with refused(TypeError, "DataParallel", match="shard_params is True and module a"):
        jdp.DataParallel(module, shard_params=True)


@pytest.mark.full
def test_nnx_models_made_in_parts_are_called_and_differentiated():
    want = Net(nnx.Rngs(0))
    dp = jdp.DataParallel(lambda: Net(rngs=nnx.Rngs(0)), devices=range(8), shard_params=True)
    for net in (want, dp.module):
        net.eval()
    for size in (16, 13, 1):
        close(dp(X[:size]), want(X[:size]), 1e-5, 1e-5)
    for accumulate in (1, 2):
        value, grads = dp.value_and_grad(nnx_loss, accumulate_steps=accumulate)(dp.module, batch(16))
        want_value, want_grads = nnx.value_and_grad(nnx_loss)(want, batch(16))
        close((value, nnx.as_pure(grads)), (want_value, nnx.as_pure(want_grads)), 1e-5, 1e-5)
        assert_cut(nnx.as_pure(grads), 8)


# --- bad input, and states from elsewhere ---


def test_a_call_that_fails_leaves_the_cut_state_as_it_was():
    step = step_of(8, TRANSFORMATIONS["adam"], shard_params=True)
    state = step.init({"params": PARAMS})
    with pytest.raises(ValueError, match="the batch has 0 rows"):
        step(state, batch(0))
    after, _ = step(state, batch(16))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    with pytest.raises(RuntimeError, match="was donated"):
        step(state, batch(16))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))


@pytest.mark.full
def test_without_donation_the_old_state_goes_on():
    step = step_of(8, TRANSFORMATIONS["adam"], shard_params=True, donate=False, check_replicas=1)
    state = step.init({"params": PARAMS})
    first, again = step(state, batch(16))[0], step(state, batch(16))[0]
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.one_case
@pytest.mark.parametrize("place", ["replicated", "optimizer", "host", "one device", "fewer", "cut"])
@pytest.mark.parametrize("to", [{}, {"shard_optimizer": True}, {"shard_params": True}])
def test_a_state_that_lies_elsewhere_is_put_where_it_belongs(place, to):
    tx, batches = TRANSFORMATIONS["adam"], [batch(16), batch(13, start=4)]
    options = {"optimizer": {"shard_optimizer": True}, "cut": {"shard_params": True}, "fewer": {"shard_params": True}}
    before = step_of(2 if place == "fewer" else 8, tx, **options.get(place, {}))
    state = train(before, before.init({"params": PARAMS}), batches[:1])
    if place == "host":
        state = jax.tree.map(np.asarray, state)
    if place == "one device":
        state = jax.device_put(state, jax.devices()[3])
    step = step_of(8, tx, **to) if place != "cut" else wrapper(8).train_step(loss, tx, **to)  # which takes it on
    after, _ = step(state, batches[1])
    close((after.params, after.opt_state), plain_loop(tx, PARAMS, batches), 1e-5, 1e-5)
    assert_cut(after.params, 8, cut="shard_params" in to or place == "cut")
    assert_cut(after.opt_state, 8, cut=bool(to) or place == "cut")


@pytest.mark.full
def test_the_step_takes_it_from_the_variables(refused):
    """What is made in parts is trained in parts, though nobody said so again; and no is a contradiction."""
    dp, tx, cut = wrapper(8), TRANSFORMATIONS["adam"], {"params": jdp.replicate(PARAMS, range(8))}
    assert_cut(train(step := dp.train_step(loss, tx), step.init(cut), [batch(16)]).params, 8, cut=False)
    cut = {"params": step_of(8, tx, shard_params=True).init({"params": PARAMS}).params}
    state = train(step, step.init(cut), [batch(16), batch(13)])
    assert_cut((state.params, state.opt_state), 8)
    assert step.parameter_bytes(state) == bytes_of(PARAMS, 8)
    close((state.params, state.opt_state), plain_loop(tx, PARAMS, [batch(16), batch(13)]), 1e-5, 1e-5)
    assert_cut(train(step, jax.device_get(state), [batch(16)]).params, 8)  # it was so before
    assert_cut(train(step, step.init({"params": PARAMS}), [batch(16)]).params, 8, cut=False)  # another run
    no = dp.train_step(loss, tx, shard_params=False)
    for call in (lambda: no.init(cut), lambda: no(state, batch(16))):
        with refused(ValueError, "train_step", match="shard_params is False, and (variables|state).*cut over"):
            call()
    with refused(ValueError, "train_step", match="shard_params is True and shard_optimizer False"):
        dp.train_step(loss, tx, shard_optimizer=False).init(cut)


@pytest.mark.one_case("13")
@pytest.mark.parametrize("size", [16, 13])
def test_the_step_takes_it_from_the_wrapper(size, refused):
    found = []
    for options in ({"shard_params": True}, {}):
        dp = jdp.DataParallel(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), devices=range(4), **options)
        step = dp.train_step(lambda net, batch: (net(batch) ** 2).mean(), optax.adam(0.05))
        for _ in range(2):
            step(X[:size])
        trained = params_of(dp.module), nnx.as_pure(step.optimizer.opt_state)
        assert_cut(trained, 4, cut=bool(options))
        found.append(trained)
        if options:
            with refused(ValueError, "train_step", match="shard_params is False, and True in the wrapper"):
                dp.train_step(lambda net, batch: (net(batch) ** 2).mean(), optax.adam(0.05), shard_params=False)
    close(*found, 1e-5, 1e-5)


@pytest.mark.parametrize("bad", [np.arange(8), jax.random.key(0)], ids=["integers", "key"])
def test_parameters_without_a_gradient_are_refused_as_ever(bad):
    said = []
    for shard in (True, False):
        step = wrapper(8).train_step(lambda v, b: loss(v, b), optax.adam(0.1), shard_params=shard)
        with pytest.raises(TypeError) as info:
            step(step.init({"params": {**PARAMS, "bad": bad}}), batch(16))
        said.append(str(info.value))
    assert said[0] == said[1]


def test_integers_and_keys_in_other_collections_stay_whole():
    def loss_fn(variables, batch):
        found = loss(variables, batch)
        return found, {}, {"seen": {"rows": variables["seen"]["rows"] + 1, "key": variables["seen"]["key"]}}

    step = wrapper(8).train_step(loss_fn, optax.adam(0.1), shard_params=True)
    seen = {"rows": np.arange(16), "key": jax.random.key(0)}
    state, _ = step(step.init({"params": PARAMS, "seen": seen}), batch(16))
    assert_cut(state.params, 8)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state.state))
    np.testing.assert_array_equal(state.state["seen"]["rows"], np.arange(16) + 1)


# --- what the program does ---


class Program:
    """The instructions of an optimized program, those of loops by themselves."""

    KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    CALLED = re.compile(r"(?:body|condition|to_apply|calls|(?:true|false)_computation)=%?([\w.-]+)")

    def __init__(self, compiled):
        self.found, name = {}, None
        for line in compiled.as_text().splitlines():
            if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
                name = head[1]
                self.found[name] = []
            elif line == "}":
                name = None
            elif name:
                self.found[name].append(line)
        self.loops = [
            re.search(r"body=%?([\w.-]+)", line)[1]
            for lines in self.found.values()
            for line in lines
            if " while(" in line
        ]

    def under(self, name):
        """A computation, and all that it calls."""
        names, todo = [], [name]
        while todo:
            name = todo.pop()
            if name not in names:
                names.append(name)
                todo += [other for line in self.found[name] for other in self.CALLED.findall(line)]
        return names

    def collectives(self, names=None):
        """(kind, elements of the result) of each, of these computations or of all."""
        found = []
        for name in self.found if names is None else names:
            for line in self.found[name]:
                if match := re.search(rf"= (.*?) ({self.KINDS})(?:-start)?\(", line):
                    shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
                    found.append((match[2], sum(int(np.prod([int(d) for d in s.split(",") if d])) for s in shapes)))
        return found

    def in_loops(self):
        """The collectives of each loop, with those of the loops in it."""
        return [self.collectives(self.under(name)) for name in self.loops]


def program(step, state, data):
    return Program(step.lower(state, data).compile())


def counts(collectives, kind, more_than=1):
    """How many of a kind there are, but for those of a few numbers."""
    return sum(name == kind and size > more_than for name, size in collectives)


def stacked_loss(variables, batch):
    p = variables["params"]
    return squares(blocks(p["layers"], batch[0] @ p["in"]) @ p["out"], batch)


STACK = {"in": normal(8, 16), "layers": {"w": normal(12, 16, 16), "b": normal(12, 16)}, "out": normal(16, 6)}


@pytest.mark.full
@pytest.mark.one_case("1-False", "2-False")
@pytest.mark.parametrize("accumulate, once", [(2, True), (2, False), (1, False)])
def test_each_layer_is_gathered_in_the_loops_and_its_gradient_is_scattered(accumulate, once):
    """One gather in the forward pass and one in the backward pass of each microbatch, and one reduce-scatter a step."""
    step = step_of(
        8, TRANSFORMATIONS["adam"], stacked_loss, shard_params=True, accumulate_steps=accumulate, gather_once=once
    )
    found = program(step, step.init({"params": STACK}), batch(32))
    layer, stack = 16 * 16, 12 * 16 * 16
    everywhere = found.collectives()
    assert counts(everywhere, "all-reduce") == 0  # but for the loss
    assert counts(everywhere, "all-to-all") == counts(everywhere, "collective-permute") == 0
    gathers = [name.count(("all-gather", layer)) for name in found.in_loops()]
    scatters = [name.count(("reduce-scatter", layer // 8)) for name in found.in_loops()]
    if once:
        assert everywhere.count(("all-gather", stack)) == 1 and not sum(gathers)
        assert all(kind != "all-gather" for loop in found.in_loops() for kind, _ in loop)
    elif accumulate == 1:
        assert sorted(gathers)[-2:] == [1, 1] and sum(gathers) == 2
        assert sum(scatters) == 1 and everywhere.count(("reduce-scatter", stack // 8)) == 0
    else:  # the loop over microbatches has both of the loops over layers
        assert sorted(gathers)[-3:] == [1, 1, 2] and sum(gathers) == 4
        assert ("all-gather", stack) not in everywhere
    if accumulate > 1:  # the microbatches' gradients are added first
        assert not sum(scatters) and everywhere.count(("reduce-scatter", stack // 8)) == 1
    for size in (8 * 16, 16 * 6):
        assert everywhere.count(("reduce-scatter", size // 8)) == 1


def test_a_model_without_loops_is_gathered_and_scattered_once_in_each_pass(monkeypatch):
    """In the program as it is handed to the compiler: XLA for CPU joins the two gathers of what is small."""
    in_pieces_of(monkeypatch, 0)
    step = wrapper(8).train_step(loss, TRANSFORMATIONS["adam"], shard_params=True)
    lowered = step.lower(step.init({"params": PARAMS}), batch(16))
    text = lowered.as_text()
    cut = [x for x in jax.tree.leaves(PARAMS) if divides(x, 8)]
    assert len(re.findall(r"stablehlo\.reduce_scatter", text)) == len(cut)
    # A bias, which no gradient needs, is gathered once; and so is what the forward pass uses last.
    assert len(cut) < len(re.findall(r"stablehlo\.all_gather", text)) <= 2 * len(cut)
    everywhere = Program(lowered.compile()).collectives()
    assert counts(everywhere, "all-reduce", more_than=1 + 1 + 6) == 0  # the loss, and what no axis of can be cut
    assert sum(size for kind, size in everywhere if kind == "reduce-scatter") == sum(x.size for x in cut) // 8


@pytest.mark.full
@pytest.mark.parametrize("size", [32, 16])
def test_microbatches_gather_what_they_use(size):
    """In their loop: what is gathered before it, for all of them, lies whole on each device all the time."""
    step = step_of(8, TRANSFORMATIONS["adam"], shard_params=True, accumulate_steps=2)
    found = program(step, step.init({"params": PARAMS}), batch(size))
    inside = [entry for loop in found.in_loops() for entry in loop]
    everywhere = found.collectives()
    cut = sum(x.size for x in jax.tree.leaves(PARAMS) if divides(x, 8))
    gathered = sum(size for kind, size in inside if kind == "all-gather")
    assert gathered == sum(size for kind, size in everywhere if kind == "all-gather") >= cut
    assert counts(inside, "reduce-scatter", 0) == 0 < counts(everywhere, "reduce-scatter", 0)


@pytest.mark.one_case
@pytest.mark.parametrize("accumulate", [2, 1])
def test_gradients_travel_in_the_dtype_that_is_asked_for(accumulate):
    """bfloat16 halves the bytes; parameters and the loss stay in float32. XLA for CPU sends float32."""
    step = step_of(
        8, TRANSFORMATIONS["momentum"], shard_params=True, reduce_dtype=jnp.bfloat16, accumulate_steps=accumulate
    )
    text = step.lower(step.init({"params": PARAMS}), batch(16)).as_text()

    def sent(kind):
        """The dtypes of the operands."""
        found = " ".join(re.findall(rf"stablehlo\.{kind}\"?.*?\}}\) : \((.*?)\) ->", text, re.DOTALL))
        return [*re.findall(r"tensor<(?:\d+x)*(\w+)>", found)]

    cut = [x for x in jax.tree.leaves(PARAMS) if divides(x, 8)]
    assert sent("reduce_scatter") == ["bf16"] * len(cut)
    assert sent("all_reduce").count("f32") == 1
    assert "bf16" not in "".join(re.findall(r'"stablehlo.all_gather".*', text))


@pytest.mark.full
def test_what_travels_in_bfloat16_gives_nearly_the_same_parameters():
    tx, batches = TRANSFORMATIONS["momentum"], [batch(16), batch(13)]
    step = step_of(8, tx, shard_params=True, reduce_dtype=jnp.bfloat16)
    state = train(step, step.init({"params": PARAMS}), batches)
    want, _ = plain_loop(tx, PARAMS, batches)
    for got, exact, first in zip(*map(jax.tree.leaves, (state.params, want, PARAMS)), strict=True):
        assert got.dtype == np.float32
        # Each summand is rounded to 8 bits, and so may be each of the sums.
        assert 0 < np.abs(got - exact).max() < 2**-6 * np.abs(exact - first).max()


def memory(step, params, data):
    """Bytes of the arguments and of the temporaries, as XLA plans them for one device."""
    found = step.lower(step.init({"params": params}), data).compile().memory_analysis()
    return found.argument_size_in_bytes, found.temp_size_in_bytes


@pytest.mark.full
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_a_model_of_stacked_layers_takes_a_fraction_of_the_memory(around):
    """Its temporaries are two layers, and the gradients that lie on this device; under a checkpoint of all, too."""
    width = 128
    params = {"in": normal(8, width), "layers": {"w": normal(24, width, width)}, "out": normal(width, 6)}

    def loss_fn(variables, batch):
        p, body = variables["params"], lambda h, w: (jnp.tanh(h @ w["w"]), None)
        return squares(blocks(p["layers"], batch[0] @ p["in"], body) @ p["out"], batch)

    found = {}
    for option in ("replicated", "shard_optimizer", "shard_params"):
        options = {} if option == "replicated" else {option: True}
        step = wrapper(8).train_step(around(loss_fn), optax.adam(0.1), **options)
        found[option] = memory(step, params, batch(8))
    assert found["shard_params"][0] <= 0.126 * found["replicated"][0]
    assert found["shard_params"][1] <= 0.2 * found["replicated"][1]
    assert sum(found["shard_params"]) <= 0.25 * sum(found["replicated"])
    assert sum(found["shard_params"]) < sum(found["shard_optimizer"])


WIDTH = 256


def normed(h):
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


def attention(h, w):
    """A block of a Transformer, with four heads."""
    q, k, v = (x.reshape(*x.shape[:2], 4, -1) for x in jnp.split(normed(h) @ w["qkv"], 3, -1))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
    h = h + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ w["o"]
    return h + jax.nn.gelu(normed(h) @ w["up"]) @ w["down"], None


def transformer(variables, batch):
    p = variables["params"]
    h = p["table"][batch]
    if isinstance(p["layers"], dict):
        h, _ = jax.lax.scan(attention, h, p["layers"])
    else:
        for w in p["layers"]:
            h, _ = attention(h, w)
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["table"].T, batch).mean()


@pytest.mark.full
@pytest.mark.parametrize("scanned", [True, False])
def test_a_transformer_takes_a_fraction_of_the_memory(scanned):
    """Twelve blocks of width 256, or six unrolled, of whose pieces XLA for CPU keeps more than it need."""
    count = 12 if scanned else 6
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "o": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = {name: normal(count, *shape) for name, shape in shapes.items()}
    params = {"table": normal(256, WIDTH), "layers": layers}
    if not scanned:
        params["layers"] = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)]
    found = {}
    for option in ("replicated", "shard_params", *(["shard_optimizer"] if scanned else [])):
        options = {} if option == "replicated" else {option: True}
        step = wrapper(8).train_step(transformer, optax.adam(1e-3), **options)
        found[option] = memory(step, params, np.zeros((8, 8), np.int32))
    assert found["shard_params"][0] <= 0.126 * found["replicated"][0]
    assert sum(found["shard_params"]) <= (0.25 if scanned else 0.35) * sum(found["replicated"])
    if scanned:
        assert found["shard_params"][1] <= 0.2 * found["replicated"][1]
        assert sum(found["shard_params"]) < sum(found["shard_optimizer"])


def test_a_scan_is_never_over_the_axis_that_is_cut():
    """Stacks of as many layers as devices, of which the first batch tells; a stack of matrices even before it."""
    stacks = {"w": normal(8, 8, 8), "b": normal(8, 16), "few": normal(8, 3), "deep": normal(16, 3, 8)}

    def loss(variables, batch):
        layers = [variables["params"][name] for name in ("w", "b", "few")]
        return jax.lax.scan(lambda c, p: (c + sum(map(jnp.sum, p)), None), 0.0, layers)[0]

    step = wrapper(8).train_step(loss, optax.sgd(0.1), shard_params=True)
    state = step.init({"params": stacks})
    assert axes(state.params) == {"w": 1, "b": 0, "few": 0, "deep": 2}
    assert axes(step(state, batch(8))[0].params) == {"w": 1, "b": 1, "few": None, "deep": 2}


@pytest.mark.full
def test_inside_of_jit_and_of_a_scan_the_state_stays_cut():
    tx = TRANSFORMATIONS["clipped adamw"]
    step, batches = step_of(8, tx, shard_params=True), [batch(16, start=i) for i in range(3)]
    state = step.init({"params": PARAMS})
    data = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    scanned, _ = jax.jit(lambda state, data: jax.lax.scan(step, state, data))(state, data)
    close((scanned.params, scanned.opt_state), plain_loop(tx, PARAMS, batches))
    assert_cut((scanned.params, scanned.opt_state), 8)
    once, _ = jax.jit(lambda state, data: step(state, data))(state, batches[0])
    assert_cut((once.params, once.opt_state), 8)


# --- random trees ---


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 16])


@pytest.mark.full
@given(
    st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(1, 24),
    st.integers(1, 3),
    st.sampled_from([2, 3, 4, 8]),
    st.booleans(),
    st.integers(0, 1000),
)
@examples(20)
def test_random_trees_are_those_of_the_replicated_step(shapes, size, accumulate, n, once, seed):
    """Arrays with an axis that can be cut, without one, with no axis and with no entries."""
    random = np.random.RandomState(seed)
    params = {str(i): random.uniform(-1, 1, shape).astype(np.float32) for i, shape in enumerate([*shapes, (8,)])}

    def loss_fn(variables, batch):
        x = batch[0][:, 0]
        out = sum(jnp.sum(jnp.sin(p) * jnp.cos(p + i)) for i, p in enumerate(variables["params"].values()))
        return jnp.mean((jnp.tanh(out) * x - batch[1][:, 0]) ** 2)

    found = []
    for shard in (True, False):
        step = wrapper(n).train_step(
            loss_fn,
            TRANSFORMATIONS["momentum"],
            shard_params=shard,
            accumulate_steps=accumulate,
            gather_once=shard and once,
        )
        state = step.init({"params": params})
        assert_cut(state.params, n, cut=shard)
        found.append(train(step, state, [batch(size)] * 2))
        assert_cut((found[-1].params, found[-1].opt_state), n, cut=shard)
    close(*found, 1e-6, 1e-6)


@pytest.mark.full
def test_a_bias_that_a_scan_runs_over_moves_in_the_first_step_and_stays(compilations):
    """`dp.init` cuts along the first axis that divides; the first batch shows that a scan runs over this one."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, _):
            return nn.tanh(nn.Dense(8)(h)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()(x, None)[0]

    model = Stack()
    dp = jdp.DataParallel(model, range(4))
    variables = dp.init(jax.random.key(0), X, shard_params=True)
    (bias,) = [x for x in jax.tree.leaves(variables) if x.ndim == 2]
    assert bias.sharding.spec == PartitionSpec("data") and bias.shape == (4, 8)
    step = dp.train_step(lambda v, x: (model.apply(v, x) ** 2).mean(), optax.sgd(0.1))
    state, _ = step(step.init(variables), X)
    places = [x.sharding for x in jax.tree.leaves(state.params)]
    assert PartitionSpec(None, "data") in [place.spec for place in places]
    compilations()
    for _ in range(2):
        state, _ = step(state, X)
        assert [x.sharding for x in jax.tree.leaves(state.params)] == places
    assert compilations() == 0
    expected = jax.device_get(variables["params"])
    for _ in range(3):
        gradient = jax.grad(lambda p: (model.apply({"params": p}, X) ** 2).mean())(expected)
        expected = jax.tree.map(lambda w, g: w - 0.1 * g, expected, gradient)
    close(jax.device_get(state.params), jax.device_get(expected), rtol=1e-4)
