"""`step(state, batch)` is one step of a plain optax loop on one device, by the mean over the whole batch."""

import functools
import math
import sys
from collections import OrderedDict

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training import train_state
from jax import lax
from laws import INPUTS, TARGETS, close_to_rounding, variables_of

import jdp

RANDOM = np.random.RandomState(0)
DATA = {
    "x": RANDOM.randn(40, 3),
    "y": RANDOM.randn(40, 2),
    # Sentences of very different length, some of none: a mean of means shows.
    "mask": (np.arange(7) < np.resize([7, 1, 0, 2, 6, 0, 0, 3], 40)[:, None]).astype(np.float64),
}
PARAMS = {"in": {"w": RANDOM.randn(3, 4) / 2, "b": RANDOM.randn(4) / 2}, "out": [RANDOM.randn(4, 2) / 2]}
SGD, ADAM = optax.sgd(0.2, momentum=0.9), optax.adam(0.1)


def single(tree):
    return jax.tree.map(np.float32, tree)


def batch(size, cast=single, start=0):
    return cast({name: rows[start : start + size] for name, rows in DATA.items()})


def model(params, x):
    return jnp.tanh(x @ params["in"]["w"] + params["in"]["b"]) @ params["out"][0]


def scalar(variables, batch):
    return jnp.mean((model(variables["params"], batch["x"]) - batch["y"]) ** 2)


def vector(variables, batch):
    return jnp.sum((model(variables["params"], batch["x"]) - batch["y"]) ** 2, axis=1)


def tokens(variables, batch):
    """The error of token t of a sentence, which is t + 1 times that of the first."""
    error = vector(variables, batch)[:, None] * jnp.arange(1, 8, dtype=batch["x"].dtype)
    return jdp.Mean(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"]))


FORMS = (scalar, vector, tokens)


@functools.cache
def wrapper(n):
    return jdp.DataParallel(model, devices=range(n))


@functools.cache
def step_of(n, loss=scalar, tx=SGD, **options):
    """One step for all tests with the same arguments, so that its programs are compiled once."""
    return wrapper(n).train_step(loss, tx, **options)


def number(loss):
    """A loss of the whole batch as one number, which `jax.grad` takes."""
    return loss.total / loss.count if isinstance(loss, jdp.Mean) else jnp.mean(loss)


@functools.cache
def plain_step(loss, tx):
    """The reference: one device, the whole batch."""

    def step(params, opt_state, *rest):
        value, grads = jax.value_and_grad(lambda p: number(loss({"params": p}, *rest)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step)


def plain_loop(loss, tx, params, batches, keys=None):
    """Losses, parameters and the optimizer's state of that loop over batches."""
    opt_state, losses = tx.init(params), []
    for i, data in enumerate(batches):
        rest = (data,) if keys is None else (data, keys[i])
        params, opt_state, value = plain_step(loss, tx)(params, opt_state, *rest)
        losses.append(value)
    return losses, params, opt_state


def train(step, state, batches):
    """The losses and the last state."""
    losses = []
    for data in batches:
        state, metrics = step(state, data)
        losses.append(metrics["loss"])
    return losses, state


close = functools.partial(close_to_rounding, single=4e-6)


def chunks(n, tree):
    """torch.chunk: ceil(B / n) rows each, as long as there are any. A replica cuts its chunk into microbatches so."""
    rows = len(jax.tree.leaves(tree)[0])
    size = math.ceil(rows / n)
    return [jax.tree.map(lambda a, i=i: a[i : i + size], tree) for i in range(0, rows, size)]


def rows_of(data):
    return len(jax.tree.leaves(data)[0])


def kept(tree):
    """A copy on the host, which no donation reaches."""
    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if is_key(x) else x), tree)


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def deleted(tree):
    """Of each array of a tree, whether it is freed."""
    return [x.is_deleted() for x in jax.tree.leaves(tree)]


@pytest.fixture
def float64():
    """For this test alone: the context is part of the key of each of JAX's caches."""
    with jax.enable_x64(True):
        yield


# --- the equation ---

# batches of different sizes, one after the other: even, uneven, and fewer rows than devices; then the first size again
CASES = [
    (1, 3, tokens, SGD, (5, 8)),
    (2, 8, scalar, SGD, (7, 8)),
    (3, 1, vector, ADAM, (9, 2)),
    (3, 8, tokens, ADAM, (10, 2)),
    (8, 1, tokens, ADAM, (24, 5)),
    (8, 2, scalar, ADAM, (21, 24, 5)),
]


@pytest.mark.one_case("3-8-tokens-tx3-sizes3")
@pytest.mark.parametrize("n, accumulate, loss, tx, sizes", CASES)
def test_several_steps_of_any_size_are_those_of_one_device(float64, n, accumulate, loss, tx, sizes):
    step = step_of(n, loss, tx, accumulate_steps=accumulate)
    batches = [batch(size, cast=lambda tree: tree, start=2 * i) for i, size in enumerate((*sizes, sizes[0]))]
    losses, state = train(step, step.init({"params": PARAMS}), batches)
    want_losses, params, opt_state = plain_loop(loss, tx, PARAMS, batches)
    close((losses, state.params, state.opt_state), (want_losses, params, opt_state))
    assert state.step.dtype == np.int32 and int(state.step) == len(batches)
    assert {frozenset(x.devices()) for x in jax.tree.leaves(state)} == {frozenset(jax.devices()[:n])}


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"shard_params": True, "accumulate_steps": 2}], ids=str)
def test_containers_keep_their_order_and_frozen_ones_are_plain(options):
    """A model may go through its layers in the order of an `OrderedDict`, which is not the alphabet's."""

    def loss_fn(variables, x):
        for w in variables["params"].values():
            x = jnp.sin(x @ w)
        seen = {name: variables["seen"][name] + 1 for name in "az"}  # a plain dict, as Flax's `apply` returns
        return ((x - 1) ** 2).mean(), {}, {"seen": seen, "frozen": flax.core.freeze(variables["frozen"])}

    x, w = single((DATA["x"][:7], RANDOM.randn(2, 3, 3)))
    params, seen = OrderedDict(z=w[0], a=w[1]), OrderedDict(z=np.float32(0), a=np.float32(1))
    variables = {"params": params, "seen": seen, "frozen": flax.core.freeze({"a": {"b": np.float32(1)}})}
    loss, grads = jax.value_and_grad(lambda p: loss_fn({**variables, "params": p}, x)[0])(params)
    step = jdp.DataParallel(model, devices=range(2)).train_step(loss_fn, optax.sgd(0.1), **options)
    state, metrics = step(step.init(variables), x)
    close_to_rounding(metrics["loss"], loss)
    close_to_rounding(state.params, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads))
    assert [*state.state["seen"]] == ["z", "a"] and state.state["seen"]["a"] == state.state["seen"]["z"] + 1
    assert type(state.state["frozen"]["a"]) is dict


@pytest.mark.full
def test_float32_is_exact_to_rounding():
    step, batches = step_of(8, tokens, accumulate_steps=2), [batch(size) for size in (16, 13)]
    losses, state = train(step, step.init({"params": single(PARAMS)}), batches)
    want_losses, params, opt_state = plain_loop(tokens, SGD, single(PARAMS), batches)
    close((losses, state.params, state.opt_state), (want_losses, params, opt_state))


@pytest.mark.full
def test_the_optimizer_is_told_the_loss_of_the_whole_batch():
    """As `value`, which optax.contrib.reduce_on_plateau and line searches want."""

    def update(grads, state, params=None, *, value, **_):
        return grads, jnp.asarray(value)

    tx = optax.chain(
        optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update), optax.scale(np.float32(-0.1))
    )
    step = step_of(3, tokens, tx)
    state, metrics = step(step.init({"params": single(PARAMS)}), batch(10))
    assert float(state.opt_state[0]) == float(metrics["loss"]) > 0
    np.testing.assert_allclose(metrics["loss"], number(tokens({"params": single(PARAMS)}, batch(10))), rtol=1e-6)


# --- metrics ---


def measured(variables, batch):
    """Every form of a metric; the vectors and matrices have as many classes as a microbatch may have rows."""
    error, out = vector(variables, batch), model(variables["params"], batch["x"])
    return error, {
        "mean": jnp.mean(out),
        "per class": jdp.Mean(jnp.sum(out, axis=0), out.shape[0]),
        "rows": {"error": error, "out": out, "id": batch["id"], "right": out[:, 0] > 0},
        "hits": jdp.Mean(jnp.sum(out[:, 0] > 0), error.shape[0]),
        "per token": jdp.Mean(jnp.sum(error[:, None] * batch["mask"]), jnp.sum(batch["mask"])),
    }


@pytest.mark.one_case
@pytest.mark.parametrize("n, size, accumulate", [(1, 5, 1), (2, 4, 1), (3, 10, 2), (8, 21, 2), (8, 5, 1)])
def test_metrics_are_means_or_rows_in_input_order(float64, n, size, accumulate):
    data = {**batch(size, cast=lambda tree: tree), "id": np.arange(size) * 7}
    step = step_of(n, measured, SGD, accumulate_steps=accumulate)
    state, metrics = step(step.init({"params": PARAMS}), data)
    error, want = jax.jit(measured)({"params": PARAMS}, data)
    want = jax.tree.map(
        lambda x: x.total / x.count if isinstance(x, jdp.Mean) else x, want, is_leaf=lambda x: isinstance(x, jdp.Mean)
    )
    close(metrics, {"loss": jnp.mean(error), **want})
    np.testing.assert_array_equal(metrics["rows"]["id"], data["id"])


def test_metrics_may_be_none_or_empty():
    state = step_of(2).init({"params": single(PARAMS)})
    for more in (None, {}):
        step = wrapper(2).train_step(lambda v, b, more=more: (scalar(v, b), more), SGD, donate=False)
        assert list(step(state, batch(4))[1]) == ["loss"]


# --- Linen, NNX and jax.pmap ---


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.tanh(nn.Dense(8)(x)))


class NNXMLP(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


LINEN = MLP()
LINEN_PARAMS = variables_of(LINEN, np.ones((1, 3), np.float32))["params"]


def linen_loss(variables, batch):
    return jnp.mean((LINEN.apply(variables, batch["x"]) - batch["y"]) ** 2)


def nnx_loss(net, batch):
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)


def nnx_loop(loss, net, tx, batches):
    """The reference of NNX: the bare model, its optimizer, the whole batch."""
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def one(net, optimizer, data):
        value, grads = nnx.value_and_grad(lambda net: number(loss(net, data)))(net)
        optimizer.update(net, grads)
        return value

    return [one(net, optimizer, data) for data in batches], optimizer


@pytest.mark.one_case
@pytest.mark.parametrize("n, sizes, accumulate", [(1, (7, 4), 2), (8, (24, 13), 1)])
def test_linen_steps_are_those_of_the_bare_model(n, sizes, accumulate):
    dp = jdp.DataParallel(LINEN, devices=range(n))
    # The wrapper is the model inside of a replica, and what dp.init returns is what step.init takes.
    step = dp.train_step(lambda v, b: jnp.mean((dp.apply(v, b["x"]) - b["y"]) ** 2), SGD, accumulate_steps=accumulate)
    of_key = jax.random.key(0), np.ones((1, 3), np.float32)
    state = step.init(dp.init(*of_key))
    batches = [batch(size) for size in sizes]
    losses, state = train(step, state, batches)
    want_losses, params, _ = plain_loop(linen_loss, SGD, LINEN.init(*of_key)["params"], batches)
    close((losses, state.params), (want_losses, params))


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize(
    "made_of, n, sizes, accumulate",
    [("transformation", 8, (24, 13), 1), ("wrapper", 3, (2, 10), 2), ("module", 1, (7, 4), 2)],
)
def test_nnx_steps_are_those_of_the_bare_model(made_of, n, sizes, accumulate):
    dp, net, batches = jdp.DataParallel(NNXMLP(nnx.Rngs(0)), devices=range(n)), NNXMLP(nnx.Rngs(0)), []
    module, kernel = dp.module, dp.module.first.kernel
    tx = {
        "transformation": lambda: SGD,
        "wrapper": lambda: nnx.Optimizer(dp, SGD, wrt=nnx.Param),
        "module": lambda: nnx.Optimizer(dp.module, SGD, wrt=nnx.Param),
    }[made_of]()
    step = dp.train_step(nnx_loss, tx, accumulate_steps=accumulate)
    batches = [batch(size) for size in sizes]
    losses = [step(data)["loss"] for data in batches]
    want_losses, optimizer = nnx_loop(nnx_loss, net, SGD, batches)
    close((losses, nnx.state(dp.module)), (want_losses, nnx.state(net)))
    assert dp.module is module and module.first.kernel is kernel  # in place
    assert made_of == "transformation" or step.optimizer is tx
    assert int(step.optimizer.step[...]) == int(optimizer.step[...]) == len(batches)
    found, want = (jax.tree.leaves(nnx.as_pure(o.opt_state)) for o in (step.optimizer, optimizer))
    close(found, want)


@pytest.mark.full
def test_linen_is_flax_recipe_for_pmap(devices):
    """`lax.pmean` of the gradients inside of `jax.pmap`, with flax's own TrainState."""
    n, batches = 8, [batch(24), batch(24, start=8), batch(24, start=16)]

    @functools.partial(jax.pmap, axis_name="batch", devices=devices[:n])
    def train_step(state, data):
        value, grads = jax.value_and_grad(lambda p: linen_loss({"params": p}, data))(state.params)
        return state.apply_gradients(grads=lax.pmean(grads, "batch")), lax.pmean(value, "batch")

    theirs, want = train_state.TrainState.create(apply_fn=LINEN.apply, params=LINEN_PARAMS, tx=ADAM), []
    theirs = stacked(theirs, n)
    for data in batches:
        theirs, value = train_step(theirs, jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), data))
        want.append(np.asarray(value)[0])
    step = jdp.DataParallel(LINEN, devices=range(n)).train_step(linen_loss, ADAM)
    losses, state = train(step, step.init({"params": LINEN_PARAMS}), batches)
    close((losses, state.params), (want, jax.tree.map(lambda a: np.asarray(a)[0], theirs.params)))


def stacked(tree, n):
    """As jax.pmap wants it: a copy for each device, along a new first axis."""
    return jax.tree.map(lambda x: np.stack([x] * n), tree)


@pytest.mark.full
def test_nnx_is_flax_recipe_for_pmap(devices):
    """The same, with the model and the optimizer split into a graph and its state."""
    n, batches = 2, [batch(24), batch(24, start=8)]
    net = NNXMLP(nnx.Rngs(0))
    graph, theirs = nnx.split((net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)))

    @functools.partial(jax.pmap, axis_name="batch", devices=devices[:n])
    def train_step(state, data):
        net, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(nnx_loss)(net, data)
        optimizer.update(net, lax.pmean(grads, "batch"))
        return nnx.state((net, optimizer)), lax.pmean(value, "batch")

    theirs, want = stacked(theirs, n), []
    for data in batches:
        theirs, value = train_step(theirs, jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), data))
        want.append(np.asarray(value)[0])
    dp = jdp.DataParallel(NNXMLP(nnx.Rngs(0)), devices=range(n))
    step = dp.train_step(nnx_loss, ADAM)
    losses = [step(data)["loss"] for data in batches]
    close(losses, want)
    close(*(jax.tree.leaves(t) for t in (nnx.state(dp.module), jax.tree.map(lambda a: np.asarray(a)[0], theirs)[0])))


# --- updated collections ---


class Normed(nn.Module):
    """BatchNorm of its chunk's own statistics, and a count of the calls."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False)(x)  # a bias before BatchNorm has gradient 0
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, use_fast_variance=False)(x)
        calls = self.variable("calls", "n", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        return nn.Dense(2)(nn.tanh(x))


NORMED = Normed()
VARIABLES = variables_of(NORMED, np.ones((2, 3), np.float32))


def normed_loss(variables, batch):
    out, updates = NORMED.apply(variables, batch["x"], mutable=["batch_stats", "calls"])
    return jnp.mean((out - batch["y"]) ** 2), {}, updates


@jax.jit
def normed_grads(params, state, data):
    def loss(params):
        value, _, updates = normed_loss({"params": params, **state}, data)
        return value, updates

    (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, grads, updates


@functools.cache
def plain_update(tx):
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(update)


def weighted(trees, weights):
    return jax.tree.map(lambda *leaves: sum(w * np.asarray(a) for w, a in zip(weights, leaves, strict=True)), *trees)


def normed_loop(tx, batches, n, accumulate, reduce_state):
    """Chunks one after the other on one device, and of each chunk its microbatches; a state goes through a chunk."""
    params, state = VARIABLES["params"], {name: VARIABLES[name] for name in ("batch_stats", "calls")}
    opt_state, losses = tx.init(params), []
    for data in batches:
        found, weights, after, shares = [], [], [], []
        for chunk in chunks(n, data):
            new = state
            for part in chunks(accumulate, chunk):
                *terms, new = normed_grads(params, new, part)
                found.append(terms)
                weights.append(rows_of(part) / rows_of(data))
            after.append(new)
            shares.append(rows_of(chunk) / rows_of(data))
        value, grads = weighted(found, weights)
        params, opt_state = plain_update(tx)(grads, opt_state, params)
        state = after[0]
        if reduce_state == "mean":  # a count is no float: the primary's
            state = {**state, "batch_stats": weighted([new["batch_stats"] for new in after], shares)}
        losses.append(value)
    return losses, params, state


@pytest.mark.full
@pytest.mark.parametrize(
    "n, sizes, accumulate, reduce_state",
    [(1, (8, 8), 1, "primary"), (2, (8, 7), 1, "mean"), (3, (10, 10), 2, "primary"), (8, (24, 13), 2, "mean")],
)
def test_batch_norm_is_the_replicas_own_and_goes_through_its_microbatches(n, sizes, accumulate, reduce_state):
    """As torch's DataParallel does it; n = 1 is the recipe for one device."""
    dp = jdp.DataParallel(NORMED, devices=range(n), reduce_state=reduce_state)
    step = dp.train_step(normed_loss, SGD, accumulate_steps=accumulate)
    batches = [batch(size, start=3 * i) for i, size in enumerate((*sizes, sizes[0]))]
    losses, state = train(step, step.init(flax.core.freeze(VARIABLES)), batches)
    want_losses, params, collections = normed_loop(SGD, batches, n, accumulate, reduce_state)
    close((losses, state.params, state.state), (want_losses, params, collections))
    assert int(state.state["calls"]["n"]) == 3 * accumulate


@pytest.mark.full
def test_the_reference_can_tell_whose_statistics_are_kept():
    """The primary's, the mean and those of the whole batch, with one microbatch or two, are four different ones."""
    runs = [(8, 1, "primary"), (8, 1, "mean"), (1, 1, "primary"), (8, 2, "primary")]
    found = [normed_loop(SGD, [batch(24)], *run)[2]["batch_stats"]["BatchNorm_0"]["var"] for run in runs]
    for i, a in enumerate(found):
        assert all(np.abs(a - b).max() > 1e-3 for b in found[:i])


def test_a_collection_that_is_not_updated_stays_as_it_is():
    def loss(variables, batch):
        _, _, updates = normed_loss(variables, batch)
        return scalar({"params": variables["params"]["net"]}, batch), {}, {"calls": updates["calls"]}

    variables = {**VARIABLES, "params": {**VARIABLES["params"], "net": single(PARAMS)}}
    step = wrapper(2).train_step(loss, SGD)
    state, _ = step(step.init(variables), batch(8))
    assert int(state.state["calls"]["n"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.state["batch_stats"], VARIABLES["batch_stats"])


class NNXNormed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, use_fast_variance=False, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.norm(self.first(x))))


@pytest.mark.full
@pytest.mark.parametrize("n, size, accumulate, reduce_state", [(2, 8, 2, "primary"), (3, 10, 1, "mean")])
def test_nnx_batch_norm_likewise(n, size, accumulate, reduce_state):
    dp = jdp.DataParallel(NNXNormed(nnx.Rngs(0)), devices=range(n), reduce_state=reduce_state)
    step = dp.train_step(nnx_loss, SGD, accumulate_steps=accumulate)
    batches = [batch(size), batch(size, start=3)]
    losses = [step(data)["loss"] for data in batches]

    net = NNXNormed(nnx.Rngs(0))
    optimizer, want = nnx.Optimizer(net, SGD, wrt=nnx.Param), []
    one = nnx.jit(nnx.value_and_grad(nnx_loss))
    for data in batches:
        found, weights, after, shares = [], [], [], []
        for chunk in chunks(n, data):
            replica = nnx.clone(net)
            for part in chunks(accumulate, chunk):
                found.append(one(replica, part))
                weights.append(rows_of(part) / size)
            after.append(nnx.state(replica, nnx.BatchStat))
            shares.append(rows_of(chunk) / size)
        value, grads = weighted(found, weights)
        optimizer.update(net, grads)
        nnx.update(net, after[0] if reduce_state == "primary" else weighted(after, shares))
        want.append(value)
    close((losses, nnx.state(dp.module)), (want, nnx.state(net)))


# --- keys ---


def drawn(variables, batch, key):
    """What each row's replica and microbatch is given: its key, and what a dropout of it keeps."""
    rows = len(batch["x"])
    keep = jax.random.bernoulli(key, 0.5, (rows, 3))
    out = model(variables["params"], jnp.where(keep, 2 * batch["x"], 0))
    seen = {"key": jnp.broadcast_to(jax.random.key_data(key), (rows, 2)), "mask": keep}
    return jnp.mean((out - batch["y"]) ** 2), seen


def keys_of(metrics):
    return [tuple(row) for row in np.asarray(metrics["key"]).tolist()]


@pytest.mark.full
@pytest.mark.parametrize("n, sizes, accumulate", [(1, (6, 5), 1), (3, (12, 10), 2), (8, (13,), 1)])
def test_each_replica_microbatch_and_step_draws_from_a_key_of_its_own(n, sizes, accumulate):
    step = step_of(n, drawn, accumulate_steps=accumulate)
    state, seen, expected = step.init({"params": single(PARAMS)}, jax.random.key(7)), [], 0
    for size in (*sizes, *sizes, sizes[0]):
        state, metrics = step(state, batch(size))
        keys, masks, at = keys_of(metrics), np.asarray(metrics["mask"]), 0
        for chunk in chunks(n, batch(size)):
            for part in chunks(accumulate, chunk):
                rows = rows_of(part)
                assert len(set(keys[at : at + rows])) == 1  # one key for all of a microbatch
                seen.append(keys[at])
                mask = jax.random.bernoulli(jax.random.wrap_key_data(np.uint32(keys[at])), 0.5, (rows, 3))
                np.testing.assert_array_equal(masks[at : at + rows], mask)
                at += rows
                expected += 1
        assert at == len(keys) == size
    assert len(set(seen)) == len(seen) == expected > 4
    # The state's own key makes keys, and is used for nothing else.
    assert tuple(np.asarray(jax.random.key_data(state.key)).tolist()) not in seen


@pytest.mark.full
def test_masks_repeat_with_the_key_of_the_state_and_differ_with_another():
    """A state carries all the randomness there is: a run goes on from a copy of it as it did."""
    step, data = step_of(3, drawn, accumulate_steps=2), batch(12)

    def run(seed):
        state, masks = step.init({"params": single(PARAMS)}, seed), []
        for _ in range(3):
            state, metrics = step(state, data)
            masks.append(np.asarray(metrics["mask"]))
        return masks, kept(state.params)

    masks, params = run(jax.random.key(7))
    again, params_again = run(jax.random.PRNGKey(7))  # an old key is the same
    np.testing.assert_array_equal(masks, again)
    jax.tree.map(np.testing.assert_array_equal, params, params_again)
    other, _ = run(jax.random.key(8))
    for i, a in enumerate(masks):
        assert all((a != b).any() for b in [*other, *masks[:i]])

    state, _ = step(step.init({"params": single(PARAMS)}, jax.random.key(7)), data)
    restored = state.replace(key=jax.random.wrap_key_data(jax.random.key_data(state.key)))
    restored = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), restored)
    np.testing.assert_array_equal(step(restored, data)[1]["mask"], masks[1])


def test_an_old_key_in_a_state_made_by_hand_differs_between_replicas():
    """The replicas fold typed keys; of an old one, each would draw the same."""

    def masks(key):
        params = single(PARAMS)
        return step_of(3, drawn)(jdp.TrainState(jnp.int32(0), params, SGD.init(params), {}, key), batch(12))[1]["mask"]

    typed, old = masks(jax.random.key(7)), masks(jax.random.PRNGKey(7))
    np.testing.assert_array_equal(old, typed)
    assert (old[:4] != old[4:8]).any()


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(nn.tanh(nn.Dense(8)(x))))


def dropping_loss(variables, batch, key):
    return jnp.mean((Dropping().apply(variables, batch["x"], rngs={"dropout": key}) - batch["y"]) ** 2)


@pytest.mark.full
def test_one_device_is_the_bare_model_with_the_key_of_the_step():
    key, batches = jax.random.key(3), [batch(6)] * 3
    params = Dropping().init({"params": key, "dropout": key}, batches[0]["x"])["params"]
    step = jdp.DataParallel(Dropping(), devices=[0]).train_step(dropping_loss, SGD)
    losses, state = train(step, step.init({"params": params}, key), batches)
    keys = [jax.random.fold_in(key, i) for i in range(3)]
    want_losses, params, _ = plain_loop(dropping_loss, SGD, params, batches, keys)
    close((losses, state.params), (want_losses, params))
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(key))


class NNXDropping(nnx.Module):
    def __init__(self, rngs):
        self.first, self.rngs = nnx.Linear(3, 2, rngs=rngs), rngs

    def __call__(self, x):
        key = self.rngs.dropout()
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return self.first(jnp.where(keep, 2 * x, 0)), jnp.broadcast_to(jax.random.key_data(key), (len(x), 2))


def nnx_drawn(net, batch):
    out, key = net(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), {"key": key}


@pytest.mark.full
def by_path(leaf):
    """What a label or a mask says for each parameter, by its path, as in optax's own examples."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: leaf(jax.tree_util.keystr(path)), params)


# The state of these holds, in place of a parameter's array, nothing at all, or several arrays.
NNX_OPTIMIZERS = {
    "masked": lambda: optax.masked(optax.adam(0.01), by_path(lambda path: "bias" in path)),
    "multi_transform": lambda: optax.multi_transform(
        {"some": optax.adam(0.01), "none": optax.set_to_zero()}, by_path(lambda p: "some" if "kernel" in p else "none")
    ),
    "sm3": lambda: optax.sm3(0.1),
    "muon": lambda: optax.contrib.muon(0.01),
}


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"shard_params": True}, {"shard_optimizer": True}], ids=str)
@pytest.mark.parametrize("name", NNX_OPTIMIZERS)
def test_nnx_takes_optimizers_that_hold_no_array_for_each_parameter(name, options):
    loss = lambda model, x: ((model(x) - 1) ** 2).mean()  # noqa: E731
    model, bare = (nnx.Linear(4, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    optimizer = nnx.Optimizer(bare, NNX_OPTIMIZERS[name](), wrt=nnx.Param)
    step = jdp.DataParallel(model, devices=range(2)).train_step(loss, NNX_OPTIMIZERS[name](), **options)
    for rows in 8, 7:
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        optimizer.update(bare, nnx.grad(loss)(bare, x))
        step(x)
    for found, wanted in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, bare)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_nnx_rngs_differ_between_replicas_microbatches_and_steps():
    def run(n, accumulate):
        dp = jdp.DataParallel(NNXDropping(nnx.Rngs(0, dropout=5)), devices=range(n))
        stream = kept(nnx.state(dp.module.rngs.dropout, nnx.RngKey))
        step, keys = dp.train_step(nnx_drawn, SGD, accumulate_steps=accumulate), []
        for _ in range(3):
            keys.append(keys_of(step(batch(12))))
        # The count has gone on; the stream's key is what it was, whatever the replicas have made of it.
        assert int(dp.module.rngs.dropout.count[...]) == 3 * accumulate
        jax.tree.map(np.testing.assert_array_equal, kept(nnx.state(dp.module.rngs.dropout, nnx.RngKey)), stream)
        return keys, dp.module

    keys, _ = run(3, 2)
    for step in keys:
        assert all(len(set(step[at : at + 2])) == 1 for at in range(0, 12, 2))
    assert len({key for step in keys for key in step}) == 3 * 3 * 2

    keys, module = run(1, 1)
    net = NNXDropping(nnx.Rngs(0, dropout=5))
    nnx_loop(lambda net, data: nnx_drawn(net, data)[0], net, SGD, [batch(12)] * 3)
    close(nnx.state(module, nnx.Param), nnx.state(net, nnx.Param))
    rngs = nnx.Rngs(0, dropout=5)
    assert [step[0] for step in keys] == [tuple(jax.random.key_data(rngs.dropout()).tolist()) for _ in range(3)]


# --- donation ---


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 8])
def test_a_donated_state_is_freed_and_its_memory_is_the_new_ones(n):
    step, data = step_of(n, drawn, ADAM), jax.tree.map(jnp.asarray, batch(8))
    before = step.init({"params": single(PARAMS)}, jax.random.key(0))
    compiled = step.lower(before, data).compile()
    assert not any(deleted(before))  # to look at a step is not to run it
    held = sum(x.nbytes for x in jax.tree.leaves((before.params, before.opt_state)))
    assert compiled.memory_analysis().alias_size_in_bytes >= held > 0
    after, _ = step(before, data)
    assert all(deleted(before)) and not any(deleted((after, data)))


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("where", ["numpy", "one device", "replicated"])
def test_the_callers_variables_are_never_donated(devices, where, n):
    variables = {"params": single(PARAMS), "calls": np.int32(3)}
    variables["params"]["out"][0] = variables["params"]["in"]["w"] = np.ones((3, 4), np.float32)  # one array, twice
    place = {
        "numpy": lambda tree: tree,
        "one device": lambda tree: jax.device_put(tree, devices[0]),
        "replicated": lambda tree: jdp.replicate(tree, devices[:n]),
    }[where]
    variables = place(variables)
    if where != "numpy":
        variables["params"]["out"][0] = variables["params"]["in"]["w"]
    key = place(jax.random.key(0))
    leaves = [x for x in jax.tree.leaves((variables, key)) if isinstance(x, jax.Array)]
    was = kept(variables)
    for _ in range(2):  # and so they are good for another run
        step = step_of(n, tied)
        state = step.init(variables, key)
        for _ in range(2):
            state, _ = step(state, batch(8))
        assert int(state.state["calls"]) == 5
    assert not any(deleted(leaves))
    jax.tree.map(np.testing.assert_array_equal, kept(variables), was)


def tied(variables, batch, key):
    params = variables["params"]
    out = jnp.tanh(batch["x"] @ params["in"]["w"]) @ params["out"][0].T
    return jnp.mean((out - batch["x"]) ** 2), {}, {"calls": variables["calls"] + 1}


def test_a_donated_state_is_refused_and_says_what_to_do(refused):
    step = step_of(2)
    before = step.init({"params": single(PARAMS)})
    after, _ = step(before, batch(8))
    snapshot = kept(after)
    for call in (step, step.lower):
        with refused(RuntimeError, "train_step", r"state\..* was donated to an earlier step.*donate=False"):
            call(before, batch(8))
    # a part of it is as bad
    with refused(RuntimeError, "train_step", r"state\.params\['in'\]\['b'\] was donated"):
        step(after.replace(params=before.params), batch(8))
    jax.tree.map(np.testing.assert_array_equal, kept(after), snapshot)
    assert int(step(after, batch(8))[0].step) == 2


def test_a_step_does_not_take_back_a_state_that_another_step_has_donated(refused):
    """Even one that it gave last. On one device, for on two XLA does not refuse it but ends the process."""
    first, second = step_of(1), step_of(1, vector)
    state, _ = first(first.init({"params": single(PARAMS)}), batch(8))
    second(state, batch(8))
    with refused(RuntimeError, "train_step", r"state\..* was donated to an earlier step"):
        first(state, batch(8))


def test_a_copy_of_a_state_survives_it(same):
    """What the message advises."""
    step = step_of(2)
    state = step.init({"params": single(PARAMS)})
    copy = jax.tree.map(jnp.copy, state)
    after, metrics = step(state, batch(8))
    assert not any(deleted(copy))
    again, metrics_again = step(copy, batch(8))
    same((again, metrics_again), (after, metrics))


def test_without_donation_a_state_can_be_used_again(same):
    step = step_of(2, donate=False)
    state = step.init({"params": single(PARAMS)})
    snapshot = kept(state)
    first, second = step(state, batch(8)), step(state, batch(8))
    assert not any(deleted((state, first, second)))
    jax.tree.map(np.testing.assert_array_equal, kept(state), snapshot)
    same(first, second)
    same(first, step_of(2)(step_of(2).init({"params": single(PARAMS)}), batch(8)))


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 2])
def test_nnx_donates_its_own_arrays_alone(n):
    net = NNXMLP(nnx.Rngs(0))
    callers = [x[...] for x in jax.tree.leaves(nnx.state(net), is_leaf=lambda x: isinstance(x, nnx.Variable))]
    dp = jdp.DataParallel(net, devices=range(n))
    optimizer = nnx.Optimizer(dp, SGD, wrt=nnx.Param)
    callers += jax.tree.leaves((nnx.as_pure(nnx.state(dp)), nnx.as_pure(nnx.state(optimizer))))
    step = dp.train_step(nnx_loss, optimizer)
    callers += jax.tree.leaves((nnx.as_pure(nnx.state(dp.module)), nnx.as_pure(optimizer.opt_state)))
    step(batch(8))  # which copies: all that the model held before is somebody's
    own = jax.tree.leaves((nnx.as_pure(nnx.state(dp.module)), nnx.as_pure(optimizer.opt_state)))
    assert len(own) == 8
    step(batch(8))
    assert not any(deleted(callers)) and all(deleted(own))
    assert not any(deleted((nnx.as_pure(nnx.state(dp.module)), nnx.as_pure(nnx.state(optimizer)))))


@pytest.mark.full
def test_nnx_without_donation_frees_nothing():
    dp = jdp.DataParallel(NNXMLP(nnx.Rngs(0)), devices=range(2))
    step = dp.train_step(nnx_loss, SGD, donate=False)
    before = jax.tree.leaves((nnx.as_pure(nnx.state(dp.module)), nnx.as_pure(step.optimizer.opt_state)))
    step(batch(8))
    assert not any(deleted(before))
    assert all((a != b).any() for a, b in zip(before[:4], jax.tree.leaves(nnx.state(dp.module)), strict=True))


# --- a call that fails ---


def picky(variables, batch):
    """Fails as the batch says."""
    if "raise" in batch:
        raise KeyError("nowhere")
    return scalar(variables, batch), {"loss": 1.0} if "name" in batch else {}


BAD = {
    "a loss that raises": lambda: {**batch(8), "raise": np.zeros(8)},
    "a metric of the step's name": lambda: {**batch(8), "name": np.zeros(8)},
    "rows that do not agree": lambda: {**batch(8), "y": batch(7)["y"]},
    "no rows": lambda: batch(0),
    "other features": lambda: {**batch(8), "x": np.zeros((8, 5), np.float32)},
    "no x": lambda: {"y": batch(8)["y"]},
}


def test_a_call_that_fails_leaves_the_state_as_it_was(same):
    step = step_of(2, picky)
    state = step.init({"params": single(PARAMS)})
    for _ in range(2):  # init's state, and one that the step gave
        snapshot = kept(state)
        for bad in BAD.values():
            for _ in range(2):
                with pytest.raises((KeyError, TypeError, ValueError)):
                    step(state, bad())
            assert not any(deleted(state))
        jax.tree.map(np.testing.assert_array_equal, kept(state), snapshot)
        state, _ = step(state, batch(8))
    want = step_of(2)
    losses, expected = train(want, want.init({"params": single(PARAMS)}), [batch(8)] * 2)
    same(state, expected)


def test_an_nnx_call_that_fails_leaves_the_model_as_it_was():
    def loss(net, batch):
        net.seen[...] += 1  # in place, before it fails
        if "raise" in batch:
            raise KeyError("nowhere")
        return nnx_loss(net, batch), {"loss": 1.0} if "name" in batch else {}

    net = NNXMLP(nnx.Rngs(0))
    net.seen = nnx.Variable(jnp.zeros(()))
    dp = jdp.DataParallel(net, devices=range(2))
    step = dp.train_step(loss, SGD)
    for i in range(2):
        before = nnx.as_pure(nnx.state((dp.module, step.optimizer)))
        snapshot = kept(before)
        for bad in BAD.values():
            with pytest.raises((KeyError, TypeError, ValueError)):
                step(bad())
            after = nnx.as_pure(nnx.state((dp.module, step.optimizer)))
            assert not any(deleted(after))  # nor is one a tracer
            jax.tree.map(np.testing.assert_array_equal, kept(after), snapshot)
        step(batch(8))
        assert int(step.optimizer.step[...]) == net.seen[...] == i + 1


def test_an_error_of_the_loss_keeps_its_type_and_says_where():
    step = step_of(2, picky)
    with pytest.raises(KeyError, match="nowhere") as info:
        step(step.init({"params": single(PARAMS)}), BAD["a loss that raises"]())
    assert any("Caught KeyError in replica 0" in note for note in info.value.__notes__)


# --- steps that are skipped ---


def spoiled(size, row):
    data = batch(size)
    data["x"][row, 1] = np.nan
    return data


@pytest.mark.one_case
@pytest.mark.parametrize("n, size, row, accumulate", [(1, 8, 3, 1), (8, 16, 15, 1), (3, 10, 9, 2)])
def test_a_step_that_is_not_finite_leaves_all_as_it_was(same, n, size, row, accumulate):
    """To the last bit: the parameters, the optimizer's state, the collections and the count."""
    dp = jdp.DataParallel(NORMED, devices=range(n))
    step = dp.train_step(normed_loss, ADAM, skip_nonfinite=True, accumulate_steps=accumulate)
    state, metrics = step(step.init(VARIABLES, None), batch(size))
    assert metrics["skipped"].dtype == bool and metrics["skipped"].shape == () and not metrics["skipped"]
    snapshot = kept(state)
    for _ in range(2):
        state, metrics = step(state, spoiled(size, row))
        assert metrics["skipped"] and np.isnan(metrics["loss"])
        same(state, snapshot)
    state, metrics = step(state, batch(size, start=5))
    assert not metrics["skipped"]

    losses, expected = train(step, step.init(VARIABLES), [batch(size), batch(size, start=5)])  # as if it had never been
    same((state, metrics["loss"]), (expected, losses[-1]))
    assert int(state.step) == 2


def test_a_gradient_that_is_not_finite_is_skipped_whatever_the_loss_is():
    """The root of zero is zero, and its slope infinite."""

    def loss(variables, batch):
        return jnp.mean(jnp.sqrt(variables["params"] * batch))

    step = wrapper(2).train_step(loss, optax.sgd(0.1), skip_nonfinite=True)
    state, metrics = step(step.init({"params": np.float32(4)}), np.float32([1, 1, 1, 0]))
    assert metrics["skipped"] and float(metrics["loss"]) == 1.5 and float(state.params) == 4
    state, metrics = step(state, np.float32([1, 1, 1, 1]))
    assert not metrics["skipped"] and float(state.params) == 4 - np.float32(0.1) / 4


def test_without_the_option_the_parameters_become_nan():
    step = step_of(8)
    state, metrics = step(step.init({"params": single(PARAMS)}), spoiled(16, 15))
    assert np.isnan(metrics["loss"]) and list(metrics) == ["loss"]
    assert all(np.isnan(x).all() for x in jax.tree.leaves(kept(state.params)))


@pytest.mark.full
def test_nnx_skips_a_step_that_is_not_finite(same):
    dp = jdp.DataParallel(NNXNormed(nnx.Rngs(0)), devices=range(2))
    step = dp.train_step(nnx_loss, ADAM, skip_nonfinite=True)
    step(batch(8))
    whole = lambda: nnx.as_pure(nnx.state((dp.module, step.optimizer)))  # noqa: E731
    snapshot = kept(whole())
    assert step(spoiled(8, 5))["skipped"]
    same(whole(), snapshot)
    assert not step(batch(8))["skipped"] and int(step.optimizer.step[...]) == 2
    assert np.isfinite(step(batch(8))["loss"])


# --- compiled once ---


@pytest.mark.one_case
@pytest.mark.parametrize("shard", [False, True])
def test_compiled_once_for_each_shape_of_the_batch(compilations, shard):
    """The state of init, the step's own and one from the host: one program for all."""
    step = jdp.DataParallel(model, devices=range(2)).train_step(scalar, ADAM, shard_optimizer=shard)
    state = step.init({"params": single(PARAMS)})
    expected = {8: 1, 7: 1}
    compilations()
    for size in (8, 8, 7, 8, 7):
        state, metrics = step(state, batch(size))
        jax.block_until_ready((state, metrics))
        assert compilations() == expected.pop(size, 0), size
    jax.block_until_ready(step(jax.tree.map(np.asarray, state), batch(8)))
    assert compilations() == 0
    jax.block_until_ready(step(step.init({"params": single(PARAMS)}), batch(7)))
    assert compilations() == 0  # what init compiled is known, too


def test_nnx_is_compiled_once(compilations):
    dp = jdp.DataParallel(NNXMLP(nnx.Rngs(0)), devices=range(2))
    step = dp.train_step(nnx_loss, SGD)
    jax.block_until_ready(step(batch(8)))
    compilations()
    for _ in range(2):
        jax.block_until_ready(step(batch(8)))
    nnx.update(dp.module, jax.tree.map(np.asarray, nnx.state(dp.module)))  # as restored
    jax.block_until_ready(step(batch(8)))
    assert compilations() == 0


# --- in a program of one's own ---


@pytest.mark.full
def test_inside_of_jit_and_of_a_scan_over_batches():
    step = step_of(3)
    batches = [batch(10, start=i) for i in range(3)]
    losses, expected = train(step, step.init({"params": single(PARAMS)}), batches)
    state = step.init({"params": single(PARAMS)})

    @jax.jit
    def epoch(state, batches):
        return lax.scan(step, state, batches)

    after, metrics = epoch(state, jax.tree.map(lambda *rows: np.stack(rows), *batches))
    close((list(metrics["loss"]), after), (losses, expected))
    assert not any(deleted(state))  # what is not donated to the program outside is the caller's

    once = jax.jit(lambda state, data: step(state, data), donate_argnums=0)
    for data in batches:
        state, metrics = once(state, data)
    close((metrics["loss"], state), (losses[-1], expected))


def test_the_shapes_of_a_first_state_are_seen_without_making_it():
    """As `jax.eval_shape` asks for them, to restore a checkpoint into; it leaves nothing of its trace behind."""
    step, variables = wrapper(3).train_step(scalar, SGD), {"params": single(PARAMS)}
    shapes = jax.eval_shape(step.init, variables)
    assert step.last is None
    state = step.init(variables)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    jax.jit(step.init)(variables)
    assert step.last is state and int(step(state, batch(10))[0].step) == 1


@pytest.mark.full
def test_replicas_are_not_compared_inside_of_jit(refused):
    step = step_of(3, check_replicas=100)
    state = step.init({"params": single(PARAMS)})
    with refused(ValueError, "train_step", r"check_replicas is 100, and .* inside of jax.jit.*check_replicas=0"):
        jax.jit(step)(state, batch(10))
    net = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=range(3))
    inside = net.train_step(lambda model, x: model(x).mean(), optax.sgd(0.1), check_replicas=1)
    with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate"):  # an NNX step runs in no jit at all
        jax.jit(inside)(np.ones((6, 3), np.float32))
    assert int(step(state, batch(10))[0].step) == 1 and inside(np.ones((6, 3), np.float32))["loss"].shape == ()


# --- mixed precision ---


@pytest.mark.full
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_stay_in_32_bits_where_the_model_computes_in_16(accumulate):
    def loss(variables, batch):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), (variables, batch))
        value = scalar(*half)
        assert value.dtype == jnp.bfloat16
        return value

    step = step_of(2, loss, SGD, accumulate_steps=accumulate)
    batches = [batch(16), batch(16, start=16)]
    losses, state = train(step, step.init({"params": single(PARAMS)}), batches)
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state))} == {jnp.dtype(np.float32)}
    _, params, _ = plain_loop(loss, SGD, single(PARAMS), batches)
    exact = plain_loop(scalar, SGD, single(PARAMS), batches)[1]
    for got, want, in_32_bits, first in zip(
        *map(jax.tree.leaves, (state.params, params, exact, single(PARAMS))), strict=True
    ):
        moved = np.abs(want - first).max()
        # Rounded to 8 bits at a few places each, of numbers of the order of one; the parameters themselves are not.
        assert np.abs(got - want).max() < 2**-5 * moved
        assert 0 < np.abs(got - in_32_bits).max() < 2**-4 * moved


# --- steps of one's own, with value_and_grad ---


@pytest.mark.full
def test_flax_train_state_takes_the_gradients():
    """`apply_gradients` in a step that the user has compiled, as in flax's examples."""
    dp = jdp.DataParallel(LINEN, devices=range(3))
    state = train_state.TrainState.create(apply_fn=dp.apply, params=LINEN_PARAMS, tx=SGD)

    @jax.jit
    def train_step(state, data):
        def loss_fn(params, data):
            return jnp.mean((state.apply_fn({"params": params}, data["x"]) - data["y"]) ** 2)

        value, grads = dp.value_and_grad(loss_fn)(state.params, data)
        return state.apply_gradients(grads=grads), value

    batches, losses = [batch(10), batch(10, start=3)], []
    for data in batches:
        state, value = train_step(state, data)
        losses.append(value)
    want_losses, params, opt_state = plain_loop(linen_loss, SGD, LINEN_PARAMS, batches)
    close((losses, state.params, state.opt_state), (want_losses, params, opt_state))
    assert int(state.step) == 2


@pytest.mark.full
def test_nnx_jit_with_an_nnx_optimizer_of_the_wrapper():
    dp, net, batches = jdp.DataParallel(NNXMLP(nnx.Rngs(0)), devices=range(3)), NNXMLP(nnx.Rngs(0)), [batch(10)] * 2
    optimizer = nnx.Optimizer(dp, ADAM, wrt=nnx.Param)

    @nnx.jit
    def train_step(dp, optimizer, data):
        value, grads = dp.value_and_grad(nnx_loss)(dp, data)
        optimizer.update(dp, grads)
        return value

    losses = [train_step(dp, optimizer, data) for data in batches]
    want_losses, _ = nnx_loop(nnx_loss, net, ADAM, batches)
    close((losses, nnx.state(dp.module)), (want_losses, nnx.state(net)))


# --- errors ---


def still_right(step=None, state=None):
    """What was refused has changed nothing: the state trains on."""
    step = step or step_of(2)
    state = state or step.init({"params": single(PARAMS)})
    losses, after = train(step, state, [batch(8)])
    want_losses, params, _ = plain_loop(scalar, SGD, single(PARAMS), [batch(8)])
    close((losses, after.params), (want_losses, params))


def returns(out):
    """A loss function that returns `out(error of each row)`."""
    return lambda variables, batch: out(vector(variables, batch))


THREE = r"a real scalar .*, a vector with one entry per row, or jdp\.Mean\(total, count\)"
RETURNED = {
    "a matrix": (TypeError, lambda e: e[:, None], r"the loss is float32\[4, 1\] for 4 rows; it is " + THREE),
    "a loss that is too long": (TypeError, lambda e: jnp.append(e, e), r"the loss is float32\[8\] for 4 rows"),
    "an integer": (TypeError, lambda e: jnp.sum(e > 0), r"the loss is int32\[\] for 4 rows; it is " + THREE),
    "complex": (TypeError, lambda e: jnp.sum(e) * 1j, r"the loss is complex64\[\] for 4 rows; it is " + THREE),
    "None": (TypeError, lambda e: None, "the loss is NoneType; it is " + THREE),
    "a dict": (TypeError, lambda e: {"loss": jnp.mean(e)}, "the loss is dict; it is " + THREE),
    "a Mean of vectors": (TypeError, lambda e: jdp.Mean(e, 4), r"the loss is a jdp\.Mean of float32\[4\]"),
    "nothing": (TypeError, lambda e: (), "loss_fn returns a tuple of 0; it returns loss or "),
    "four": (TypeError, lambda e: (e, {}, {}, {}), "loss_fn returns a tuple of 4; it returns loss or "),
    "updates as metrics": (TypeError, lambda e: (e, {"stats": {"mean": e}}), r"\['stats'\] .*Return loss, {}, updates"),
    "metrics that are one array": (TypeError, lambda e: (e, e), "the metrics are an array alone; each has a name"),
    "metrics that are a list": (TypeError, lambda e: (e, [e]), "the metrics are a list; each has a name"),
    "a metric called loss": (ValueError, lambda e: (e, {"loss": e}), "a metric is called 'loss'"),
    "an integer metric": (TypeError, lambda e: (e, {"hits": jnp.sum(e > 0)}), r"\['hits'\] is int32\[\]; .*jdp\.Mean"),
    "a metric by class": (
        TypeError,
        lambda e: (e, {"classes": jnp.full(3, e.mean())}),
        r"\['classes'\] is float32\[3\]; .*jdp\.Mean",
    ),
    "a metric that is a sum": (
        TypeError,
        lambda e: (e, {"sum": jnp.sum(e)}),
        r"\['sum'\] is a scalar, and it is a sum over the rows that is not divided by their number .*jdp\.Sum",
    ),
    "a sum": (TypeError, jnp.sum, r"the loss is a scalar, and it is a sum over the rows that is not divided by .*Sum"),
    "a metric that is a name": (TypeError, lambda e: (e, {"of": "me"}), r"\['of'\] is a str; "),
    "updates that are one array": (TypeError, lambda e: (e, {}, e), "the updates are a .*; they are collections"),
    "an unknown collection": (
        ValueError,
        lambda e: (e, {}, {"batch_stats": {}}),
        r"the updates have a collection 'batch_stats', which is not in the state; the state has \['stats'\]",
    ),
    "parameters": (
        ValueError,
        lambda e: (e, {}, {"params": single(PARAMS)}),
        "the updates have a collection 'params', which holds the parameters",
    ),
    "a collection of another tree": (
        ValueError,
        lambda e: (e, {}, {"stats": {"mean": jnp.zeros(2), "var": jnp.zeros(2)}}),
        r"updates\['stats'\]\['var'\] is not expected; the state keeps its tree",
    ),
    "a collection that lacks a part": (
        ValueError,
        lambda e: (e, {}, {"stats": {}}),
        r"updates\['stats'\]\['mean'\] is missing; the state keeps its tree",
    ),
}


LOOPED = (
    *("a matrix", "an integer", "a Mean of vectors", "four", "a sum", "a metric by class", "a metric called loss"),
    "a collection of another tree",
)


@pytest.mark.parametrize("what, accumulate", [*((what, 1) for what in RETURNED), *((what, 3) for what in LOOPED)])
def test_what_a_loss_function_may_not_return(refused, what, accumulate):
    kind, out, match = RETURNED[what]
    step = wrapper(2).train_step(returns(out), SGD, accumulate_steps=accumulate)
    state = step.init({"params": single(PARAMS), "stats": {"mean": np.zeros(2, np.float32)}})
    if accumulate > 1:
        match = match.replace("for 4 rows", "for 2 rows").replace(r"\[4", r"\[2").replace(r"\[8", r"\[4")
    with refused(kind, "train_step", match):
        step(state, batch(8))
    assert not any(deleted(state))


def test_an_update_of_another_shape(refused):
    """What the message advises must not be state_axes, which a training step refuses."""
    step = wrapper(2).train_step(lambda v, b: (scalar(v, b), {}, {"stats": {"mean": jnp.zeros(3)}}), SGD)
    state = step.init({"params": single(PARAMS), "stats": {"mean": np.zeros(2, np.float32)}})
    with refused(ValueError, "train_step", r"stats.*\['mean'\](?!.*state_axes)"):
        step(state, batch(8))
    assert not any(deleted(state))


def test_skipped_is_a_name_of_the_step_where_it_gives_one(refused):
    loss = returns(lambda e: (e, {"skipped": e}))
    state = step_of(2).init({"params": single(PARAMS)})
    with refused(ValueError, "train_step", "a metric is called 'skipped'"):
        wrapper(2).train_step(loss, SGD, skip_nonfinite=True)(state, batch(8))
    assert wrapper(2).train_step(loss, SGD)(state, batch(8))[1]["skipped"].shape == (8,)


@pytest.mark.parametrize(
    "out, match",
    [
        (lambda e: (e, {}, {}), r"loss_fn returns a tuple of 3; it returns loss or \(loss, metrics\)\. "),
        (lambda e: e[:, None], "the loss is " + r"float32\[4, 1\] for 4 rows; it is " + THREE),
        (lambda e: (e, {"loss": e}), "a metric is called 'loss'"),
        (lambda e: (e, e), "the metrics are an array alone; each has a name"),
    ],
)
def test_what_an_nnx_loss_function_may_not_return(refused, out, match):
    dp = jdp.DataParallel(NNXMLP(nnx.Rngs(0)), devices=range(2))
    step = dp.train_step(lambda net, data: out(jnp.sum((net(data["x"]) - data["y"]) ** 2, axis=1)), SGD)
    with refused((TypeError, ValueError), "train_step", match):
        step(batch(8))
    assert not any(deleted(nnx.as_pure(nnx.state(dp.module))))


@pytest.mark.parametrize("leaf", [np.int32(1), np.ones(2, bool)])
def test_parameters_without_a_gradient_are_named(refused, leaf):
    params = {**single(PARAMS), "more": [leaf]}
    with refused(TypeError, "train_step", r"params.*\['more'\]\[0\] is of dtype (int32|bool)"):
        step_of(2).init({"params": params})
    made = jdp.TrainState(np.int32(0), params, SGD.init(single(PARAMS)), {})
    with refused(TypeError, "train_step", r"state\.params\['more'\]\[0\] is of dtype (int32|bool)"):
        wrapper(2).train_step(scalar, SGD)(made, batch(8))
    still_right()


@pytest.mark.parametrize(
    "variables, match",
    [
        ({"batch_stats": {}}, r"variables are \['batch_stats'\]; gradients are taken of variables\['params'\]"),
        ({}, r"variables are \[\]; "),
        (PARAMS, r"variables are \['in', 'out'\]; "),
        (np.ones(3, np.float32), "variables are a ndarray; "),
        (None, "variables are a NoneType; "),
    ],
)
def test_variables_without_parameters(refused, variables, match):
    with refused(ValueError, "train_step", match):
        step_of(2).init(variables)
    still_right()


@pytest.mark.parametrize(
    "key, match",
    [
        (0, "key is a int; it is one typed PRNG key"),
        (np.uint32([0, 1]), r"key is uint32\[2\]; "),
        (jnp.zeros(2), r"key is float32\[2\]; "),
        (lambda: jax.random.split(jax.random.key(0)), r"key is key<fry>\[2\]; "),
        ({"dropout": 0}, "key is a dict; "),
    ],
)
def test_a_key_that_is_none(refused, key, match):
    with refused(TypeError, "train_step", match):
        step_of(2, drawn).init({"params": single(PARAMS)}, key() if callable(key) else key)
    still_right()


def test_a_loss_function_that_wants_a_key_and_a_state_without(refused):
    state = step_of(2).init({"params": single(PARAMS)})
    with refused(TypeError, "train_step", "drawn takes a third argument, and there is no key"):
        step_of(2, drawn)(state, batch(8))
    assert not any(deleted(state))


OPTIONS = {
    "steps 0": (ValueError, "accumulate_steps is 0", dict(accumulate_steps=0)),
    "steps -1": (ValueError, "accumulate_steps is -1", dict(accumulate_steps=-1)),
    "steps True": (ValueError, "accumulate_steps is True", dict(accumulate_steps=True)),
    "steps 1.5": (ValueError, "accumulate_steps is 1.5", dict(accumulate_steps=1.5)),
    "an integer dtype": (TypeError, "reduce_dtype is .*int8", dict(reduce_dtype=jnp.int8)),
    "no dtype": (TypeError, "reduce_dtype is 'half a byte'", dict(reduce_dtype="half a byte")),
    "no function": (TypeError, "loss_fn is a float; it is called", dict(loss_fn=3.0)),
    "no optimizer": (TypeError, "tx is a float; it is an optax transformation", dict(tx=0.1)),
    "a schedule": (TypeError, "tx is a function; it is an optax", dict(tx=optax.linear_schedule(1.0, 0.0, 10))),
    "the function that makes one": (TypeError, "tx is a function; it is an optax", dict(tx=optax.adam)),
    "a pair": (TypeError, "tx is a tuple; it is an optax", dict(tx=(SGD.init, SGD.update))),
}


@pytest.mark.parametrize("kind_of_module", ["function", "nnx"])
@pytest.mark.parametrize("what", OPTIONS)
def test_options_that_do_not_fit(refused, what, kind_of_module):
    kind, match, options = OPTIONS[what]
    dp = wrapper(2)
    if kind_of_module == "nnx":
        dp = jdp.DataParallel(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), devices=[0])
    with refused(kind, "train_step", match):
        dp.train_step(**{"loss_fn": scalar, "tx": SGD, **options})


def test_state_with_a_batch_axis_has_no_place_in_a_training_run(refused):
    dp = jdp.DataParallel(LINEN, devices=range(2), state_axes={"cache": 0})
    with refused(ValueError, "train_step", r"state_axes=\{'cache': 0\}"):
        dp.train_step(scalar, SGD)


def wide(params):
    return {**params, "in": {**params["in"], "w": np.ones((3, 5), np.float32)}}


STATES = {
    "another shape": (
        lambda: step_of(2).init({"params": wide(single(PARAMS))}),
        r"state\.params\['in'\]\['w'\] is float32\[3, 5\], float32\[3, 4\] is expected",
    ),
    "another dtype": (
        lambda: step_of(2).init({"params": jax.tree.map(lambda w: w.astype(np.float16), PARAMS)}),
        r"state\.params\['in'\]\['b'\] is float16\[4\], float32\[4\] is expected",
    ),
    "a parameter more": (
        lambda: step_of(2).init({"params": {**single(PARAMS), "more": np.float32(1)}}),
        r"state\.params\['more'\] is not expected",
    ),
    "a parameter less": (
        lambda: step_of(2).init({"params": {"in": single(PARAMS["in"])}}),
        r"state\.params\['out'\]\[0\] is missing",
    ),
    "another optimizer": (
        lambda: wrapper(2).train_step(scalar, ADAM).init({"params": single(PARAMS)}),
        r"state\.opt_state\[0\]\.trace\['in'\]\['b'\] is missing",
    ),
    "another collection": (
        lambda: step_of(2).init({"params": single(PARAMS), "stats": np.float32(1)}),
        r"state\.state\['stats'\] is not expected",
    ),
    "a key": (
        lambda: step_of(2, drawn).init({"params": single(PARAMS)}, jax.random.key(0)),
        r"state\.key is not expected",
    ),
    "stacked for jax.pmap": (
        lambda: stacked(kept(step_of(2).init({"params": single(PARAMS)})), 2),
        r"state\.step is int32\[2\], int32\[\] is expected",
    ),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_of_another_model_or_optimizer(refused, what):
    """The first path that differs is named; the other state is not touched, and the step's own goes on."""
    make, match = STATES[what]
    other = make()
    step = wrapper(2).train_step(scalar, SGD)
    state = step.init({"params": single(PARAMS)})
    with refused(ValueError, "train_step", match):
        step(other, batch(8))
    assert not any(deleted(jax.tree.map(jnp.asarray, other)))
    still_right(step, state)


def test_a_state_of_another_optimizer_is_refused_by_a_step_without_init(refused):
    """As after a restart, where the state comes from a checkpoint."""
    state = wrapper(2).train_step(scalar, ADAM).init({"params": single(PARAMS)})
    with refused(ValueError, "train_step", r"state\.opt_state\[0\]\.trace\['in'\]\['b'\] is missing"):
        wrapper(2).train_step(scalar, SGD)(state, batch(8))
    good = step_of(2).init({"params": single(PARAMS)})
    still_right(wrapper(2).train_step(scalar, SGD), good)


def test_init_compiles_once_for_each_shapes(compilations):
    step = step_of(2)
    first = step.init({"params": single(PARAMS)})
    compilations()
    again = step.init({"params": jax.tree.map(lambda x: 2 * x, single(PARAMS))})
    assert compilations() == 0
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(2 * a, b), first.params, again.params)
    doubled = step.init({"params": jax.tree.map(lambda x: np.concatenate([x, x], -1), single(PARAMS))})
    assert compilations() > 0
    assert jax.tree.map(np.shape, doubled.opt_state[0].trace) == jax.tree.map(np.shape, doubled.params)
    still_right(step, step.init({"params": single(PARAMS)}))


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "a 16-bit moment": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "copies": optax.contrib.schedule_free_adamw(1e-3),
    "factors": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "a number of Python's": optax.GradientTransformation(
        lambda params: (jnp.asarray(0.5), jax.tree.map(lambda x: jnp.full_like(x, 0.1), params)),
        lambda grads, state, params=None: (grads, state),
    ),
    "nothing": optax.sgd(0.1),
    "random": optax.add_noise(0.1, 0.9, 3),
}


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_state_before_the_first_step(monkeypatch, name, n, shard):
    """It is `tx.init(params)`, if it is sent to the devices as if it is filled there, and on the same devices."""
    tx, params = OPTIMIZERS[name], jax.tree.map(lambda x: x.astype(np.float32), single(PARAMS))
    step = wrapper(n).train_step(scalar, tx, shard_optimizer=shard)
    sent = step.init({"params": params})
    monkeypatch.setattr(sys.modules["jdp._train.state"], "MOST_SENT", -1)
    filled = wrapper(n).train_step(scalar, tx, shard_optimizer=shard).init({"params": params})
    expected = tx.init(jax.tree.map(jnp.asarray, params))

    def same_bits(a, b):
        np.testing.assert_array_equal(*(jax.random.key_data(x) if is_key(x) else x for x in (a, b)))

    for found in sent, filled:
        assert jax.tree.structure(found.opt_state) == jax.tree.structure(expected)
        jax.tree.map(same_bits, found.opt_state, expected)
    types = [[(x.aval, x.sharding) for x in jax.tree.leaves((s.step, s.opt_state))] for s in (sent, filled)]
    assert types[0] == types[1] and not int(sent.step)
    after = [step_of(n, tx=tx, shard_optimizer=shard)(state, batch(8))[0] for state in (sent, filled)]
    jax.tree.map(same_bits, *after)


def test_zeros_are_sent_without_a_program(compilations):
    step = wrapper(1).train_step(scalar, optax.adam(1e-3))
    compilations()
    step.init({"params": single(PARAMS)})
    assert compilations() == 0


@pytest.mark.parametrize("state", [{"params": PARAMS}, PARAMS, None, (PARAMS, None), "flax"])
def test_a_state_that_is_none(refused, state):
    if state == "flax":
        state = train_state.TrainState.create(apply_fn=None, params=single(PARAMS), tx=SGD)
    name = "flax.training.train_state.TrainState" if hasattr(state, "opt_state") else type(state).__name__
    with refused(TypeError, "train_step", rf"state is a {name}; a step takes a jdp\.TrainState"):
        step_of(2)(state, batch(8))
    still_right()


def test_no_rows(refused):
    step = step_of(2)
    state = step.init({"params": single(PARAMS)})
    for call in (step, jax.jit(step), step.lower):
        with refused(ValueError, "train_step", "the batch has 0 rows"):
            call(state, batch(0))
    still_right(step, state)


def test_rows_that_do_not_agree(refused):
    step = step_of(2)
    state = step.init({"params": single(PARAMS)})
    with refused(ValueError, "train_step", "8.* 7|7.* 8"):
        step(state, {**batch(8), "y": batch(7)["y"]})
    still_right(step, state)


def transformation(update):
    return optax.GradientTransformation(lambda params: (jnp.zeros(()), params), update)


TRANSFORMATIONS = {
    "updates of another tree": (
        lambda grads, state, params: (jax.tree.leaves(grads), state),
        r"the optimizer's updates differ from what went in: \['in'\]\['b'\] is missing; a transformation keeps",
    ),
    "updates of another shape": (
        lambda grads, state, params: (jax.tree.map(lambda g: g[None], grads), state),
        r"the optimizer's updates differ .*\['in'\]\['b'\] is float32\[1, \d+\], float32\[\d+\] is expected",
    ),
    "a state of another tree": (
        lambda grads, state, params: (grads, state[:1]),
        r"the optimizer's opt_state differ.* \[1\]\['in'\]\['b'\] is missing",
    ),
    "a state of another shape": (
        lambda grads, state, params: (grads, (jnp.zeros(1), state[1])),
        r"the optimizer's opt_state differ.* \[0\] is float32\[1\], float32\[\] is expected",
    ),
    "a collective": (
        lambda grads, state, params: (lax.pmean(grads, "data"), state),
        "the optimizer runs a collective .*data.*Leave the collective out",
    ),
}


@pytest.mark.parametrize("what", TRANSFORMATIONS)
def test_an_optimizer_that_breaks_the_rules(refused, what):
    update, match = TRANSFORMATIONS[what]
    step = wrapper(2).train_step(scalar, transformation(update))
    state = step.init({"params": single(PARAMS)})
    with refused(ValueError, "train_step", match):
        step(state, batch(8))
    assert not any(deleted(state))


def test_a_parameter_whose_shape_changes_between_steps():
    """Without an error, the momentum of the old shape would broadcast the parameter to that shape again."""
    momentum, x = optax.sgd(0.1, momentum=0.9), np.ones((3, 2), np.float32)
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    in_place = jdp.DataParallel(model, devices=[0]).train_step(lambda m, x: (m(x) ** 2).mean(), momentum)
    dp = jdp.DataParallel(lambda w, x: x @ w["w"], devices=[0])
    step = dp.train_step(lambda v, x: (dp(v["params"], x) ** 2).mean(), momentum)
    state = step.init({"params": {"w": np.ones((2, 2), np.float32)}})
    state.params["w"] = jnp.ones((2, 1))
    model.kernel.set_value(jnp.ones((2, 1)))
    for call in (lambda: step(state, x), lambda: in_place(x)):
        with pytest.raises(ValueError, match=r"trace.* is float32\[2, 2\], float32\[2, 1\] is expected; the model has"):
            call()
    model.kernel.set_value(jnp.ones((2, 2), int))
    with pytest.raises(TypeError, match=r"jdp.train_step: model\['kernel'\] is of dtype int32, which has no gradient"):
        in_place(x)


def test_optax_monitor_has_another_state_after_the_first_step():
    """The way that the error names keeps the same measurement."""
    dp, x = jdp.DataParallel(lambda w, x: x * w, devices=[0]), np.ones(3, np.float32)
    steps = [
        dp.train_step(lambda v, x: dp(v["params"], x), optax.chain(optax.sgd(0.1), measure))
        for measure in (optax.monitor({"norm": optax.tree.norm}), optax.snapshot("norm", optax.tree.norm))
    ]
    monitored, state = (step.init({"params": np.float32(1)}) for step in steps)
    with pytest.raises(ValueError, match=r"measurements\['norm'\] is not expected.* use optax.snapshot\)"):
        steps[0](monitored, x)
    state, _ = steps[1](state, x)
    np.testing.assert_allclose(optax.tree.get(state.opt_state, "norm"), 0.1, rtol=1e-6)


def test_an_optimizer_whose_state_is_no_tree_of_arrays():
    tx = optax.GradientTransformation(lambda params: {"name": len}, lambda grads, state, params: (grads, state))
    with pytest.raises(TypeError, match=r"\['name'\]"):
        wrapper(2).train_step(scalar, tx).init({"params": single(PARAMS)})


@pytest.mark.full
def test_an_nnx_optimizer_of_another_model(refused):
    dp, other = jdp.DataParallel(NNXMLP(nnx.Rngs(0)), devices=range(2)), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    before = kept(nnx.as_pure(nnx.state(dp.module)))
    match = r"the optimizer's opt_state.* (missing|expected)"
    for wrong in (other, jdp.DataParallel(other, devices=range(2))):
        with refused(ValueError, "train_step", match):
            dp.train_step(nnx_loss, nnx.Optimizer(wrong, ADAM, wrt=nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, kept(nnx.as_pure(nnx.state(dp.module))), before)
    assert np.isfinite(dp.train_step(nnx_loss, ADAM)(batch(8))["loss"])


def test_nnx_parameters_without_a_gradient(refused):
    net = NNXMLP(nnx.Rngs(0))
    net.calls = nnx.Param(jnp.int32(0))
    with refused(TypeError, "train_step", r"calls.* is of dtype int32"):
        jdp.DataParallel(net, devices=range(2)).train_step(nnx_loss, optax.sgd(0.1))


def test_what_is_no_array_in_a_state_is_named(refused):
    """In another state than the last one, and in the last one, which was changed in place."""
    step = wrapper(2).train_step(scalar, optax.adam(0.1))
    state, _ = step(step.init({"params": single(PARAMS)}), batch(8))
    other = state.replace(opt_state=("text", *state.opt_state[1:]))
    with refused(TypeError, "train_step", r"state\.opt_state\[0\] is a str; a state has only arrays"):
        step(other, batch(8))
    name = next(iter(state.opt_state[0].mu))
    state.opt_state[0].mu[name] = "text"
    with refused(TypeError, "train_step", rf"state\.opt_state\[0\]\.mu\['{name}'\] is a str; a state has only arrays"):
        step(state, batch(8))


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)


@pytest.mark.full
@pytest.mark.parametrize("through", ["dp", "model"])
def test_params_in_boxes_of_another_mesh(through):
    model = Partitioned()
    dp = jdp.DataParallel(model, devices=[0, 1])
    variables = dp.init(jax.random.key(0), INPUTS)
    apply = dp.apply if through == "dp" else model.apply

    def loss_fn(variables, batch):
        return ((apply(variables, batch[0]) - batch[1]) ** 2).mean()

    step = dp.train_step(loss_fn, optax.sgd(0.1))
    state, metrics = step(step.init(variables), (INPUTS, TARGETS))
    plain = nn.unbox(variables)
    loss, grads = jax.value_and_grad(lambda v: ((model.apply(v, INPUTS) - TARGETS) ** 2).mean())(plain)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, plain["params"], grads["params"])
    assert isinstance(state.params["Dense_0"]["kernel"], nn.Partitioned)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), nn.unbox(state.params), want)
    if through == "dp":
        _, got = dp.value_and_grad(lambda v, x, y: ((apply(v, x) - y) ** 2).mean())(variables, INPUTS, TARGETS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), nn.unbox(got), grads)


def test_updates_of_one_number_and_a_batch_that_is_one_array(refused):
    dp = jdp.DataParallel(lambda v, x: x, devices=[0, 1])
    step = dp.train_step(lambda v, x: (x.mean(), {}, {"s": {"n": 1.0}}), optax.sgd(0.1))
    state, _ = step(step.init({"params": {}, "s": {"n": np.zeros((), np.float32)}}), INPUTS)
    assert float(state.state["s"]["n"]) == 1.0
    assert step.find_nonfinite(state, INPUTS) == []


# --- complex parameters ---


def spectral_loss(params, x):
    return jnp.mean(jnp.abs(jnp.fft.ifft(x @ params["w"]) + params["b"]) ** 4)


@pytest.mark.full
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_steps": 2}, {"shard_optimizer": True}, {"skip_nonfinite": True}, {"deterministic": True}],
    ids=str,
)
def test_complex_parameters_are_trained(options, rows):
    rng, tx = np.random.default_rng(0), optax.adam(0.01)
    params = {"w": (rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4))).astype(np.complex64), "b": np.float32(1)}
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    dp = jdp.DataParallel(lambda p, x: x, range(4), replicas=4 if "deterministic" in options else None)
    step = dp.train_step(lambda v, x: spectral_loss(v["params"], x), tx, **options)
    state, want, opt_state = step.init({"params": params}), params, tx.init(params)
    for _ in range(3):
        state, _ = step(state, x)
        updates, opt_state = tx.update(jax.grad(spectral_loss)(want, x), opt_state, want)
        want = optax.apply_updates(want, updates)
    got = jax.tree.map(np.asarray, (state.params, state.opt_state))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, (want, opt_state))


@pytest.mark.full
def test_complex_gradients_travel_whole():
    """With a reduce_dtype for the real ones: a cast to it would drop the imaginary part."""
    params, x = {"w": np.full((3, 4), 1 + 2j, np.complex64), "b": np.float32(1)}, np.ones((8, 3), np.float32)
    step = jdp.DataParallel(lambda p, x: x, range(4)).train_step(
        lambda v, x: spectral_loss(v["params"], x), optax.sgd(1.0), reduce_dtype=jnp.bfloat16
    )
    state, _ = step(step.init({"params": params}), x)
    np.testing.assert_allclose(params["w"] - state.params["w"], jax.grad(spectral_loss)(params, x)["w"], rtol=1e-5)


def test_complex_parameters_are_not_cut(refused):
    variables = {"params": {"w": np.ones((8, 4), np.complex64)}}
    step = jdp.DataParallel(lambda p, x: x, range(4)).train_step(lambda v, x: jnp.sum(x), SGD, shard_params=True)
    with refused(TypeError, "train_step", r"params'\]\['w'\] is of dtype complex64; .*shard_optimizer=True"):
        step.init(variables)


@pytest.mark.one_case("10-{'accumulate_steps': 2}")
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"reduce_dtype": jnp.float32}], ids=str)
@pytest.mark.parametrize("rows", [8, 10, 3])
def test_the_gradients_of_a_mean_are_added_up_and_no_more(options, rows):
    """A replica differentiates its share of the mean, so a parameter costs no division or product, as by hand."""

    def operations(count):
        params = [np.full((8, 4), i, np.float32) for i in range(count)]

        def loss(variables, x):
            return (sum(x @ w for w in variables["params"]) ** 2).mean()

        step = jdp.DataParallel(lambda v, x: x, devices=range(4)).train_step(loss, optax.identity(), **options)
        text = step.lower(step.init({"params": params}), np.ones((rows, 8), np.float32)).as_text()
        return [text.count(f"stablehlo.{name} ") for name in ("divide", "multiply", "dot_general")]

    (divisions, products, dots), more = operations(1), operations(5)
    assert more[:2] == [divisions, products] and more[2] > dots > 0


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"shard_params": True}], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_hyperparameter_that_is_set_is_of_the_state_s_own_dtype(options, in_place):
    """`hyperparams["learning_rate"] = 1`, in the state itself or in a copy, is what optax takes on one device."""
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    step = step_of(4, vector, tx, **options)
    variables = {"params": single(PARAMS)}
    state, params, opt_state = step.init(variables), variables["params"], tx.init(variables["params"])
    for rate in (0.5, 1, np.float64(0.25), np.float32(0.1), None):
        grads = jax.grad(lambda p: vector({"params": p}, batch(10)).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, _ = step(state, batch(10))
        close_to_rounding(state.params, params)
        assert state.opt_state.hyperparams["learning_rate"].dtype == jnp.float32
        if rate is not None:
            if not in_place:
                state = jax.tree.map(lambda x: x, state)
            opt_state.hyperparams["learning_rate"] = state.opt_state.hyperparams["learning_rate"] = rate
            assert step.optimizer_bytes(state).whole >= 4
    assert step.check(state, batch(10))


@pytest.mark.parametrize(
    "place, number, found",
    [("count", 0.5, "float32"), ("count", True, "bool"), ("key", 0, "int32"), ("scale", 1e6, "float32")],
)
def test_a_number_that_the_state_cannot_hold_is_refused(place, number, found):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = step_of(2, lambda variables, batch, key: scalar(variables, batch), tx)
    state = step.init({"params": single(PARAMS), "stats": {"scale": np.float16(1)}}, jax.random.key(0))
    changed = {
        "count": {"opt_state": state.opt_state._replace(count=number)},
        "key": {"key": number},
        "scale": {"state": {"stats": {"scale": number}}},
    }
    with pytest.raises(ValueError, match=rf"{place}.* is {found}\[\], .* is expected"):
        step(state.replace(**changed[place]), batch(4))


def test_an_optimizer_may_return_python_numbers():
    """Under `jax.jit` optax takes them. The state keeps its dtypes, and refuses a number that these do not hold."""
    start = {"rate": jnp.float32(0), "on": jnp.bool_(False), "count": jnp.int32(0)}

    def step_that_returns(count):
        after = {"rate": 0.5, "on": True, "count": count}
        return step_of(2, tx=optax.GradientTransformation(lambda _: start, lambda grads, *_: (grads, after)))

    step = step_that_returns(2)
    state, _ = step(step.init({"params": single(PARAMS)}), batch(4))
    assert jax.tree.map(lambda x: x.dtype, state.opt_state) == jax.tree.map(lambda x: x.dtype, start)
    assert jax.tree.map(lambda x: x.item(), state.opt_state) == {"rate": 0.5, "on": True, "count": 2}
    step = step_that_returns(0.5)
    with pytest.raises(ValueError, match=r"opt_state differ .*\['count'\] is float\[\], int32\[\] is expected"):
        step(step.init({"params": single(PARAMS)}), batch(4))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["MultiSteps", "transformation", "nnx"])
def test_multi_steps_pass_the_loss_on(kind):
    """`optax.MultiSteps` takes `value` and passes it on, and has no type that says so."""
    tx, params, x = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), np.ones(3, np.float32), X
    tx = optax.MultiSteps(tx, 2)
    want, opt_state = params, tx.init(params)
    for _ in range(6):
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(want)
        updates, opt_state = tx.update(grads, opt_state, want, value=value)
        want = optax.apply_updates(want, updates)
    tx = tx.gradient_transformation() if kind == "transformation" else tx
    if kind == "nnx":
        dp = jdp.DataParallel(Weights(params), range(2))
        step = dp.train_step(lambda m, x: jnp.mean((x @ m.w[...]) ** 2), nnx.Optimizer(dp, tx, wrt=nnx.Param))
        for _ in range(6):
            step(x)
        found = dp.module.w[...]
    else:
        step = step_of(2, lambda v, x: jnp.mean((x @ v["params"]) ** 2), tx)
        state = step.init({"params": params})
        for _ in range(6):
            state, _ = step(state, x)
        found = state.params
    close_to_rounding(found, want)


X = np.float32(DATA["x"][:10])


class Weights(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(jnp.asarray(w))


def test_a_value_in_the_place_of_an_optimizers_variable_is_refused(refused):
    dp = jdp.DataParallel(Weights(np.ones(3, np.float32)), range(2))
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = dp.train_step(lambda m, x: jnp.mean(x @ m.w[...]), nnx.Optimizer(dp, tx, wrt=nnx.Param))
    hyperparams = step.optimizer.opt_state.hyperparams
    hyperparams["learning_rate"] = 0.5
    with refused(TypeError, "train_step", r"opt_state.hyperparams\['learning_rate'\] is a float"):
        step(X)
    hyperparams["learning_rate"] = nnx.OptState(0.25)
    step(X)
    close_to_rounding(dp.module.w[...], 1 - 0.25 * X.mean(0))
    hyperparams["learning_rate"][...] = 0.5
    step(X)
    close_to_rounding(dp.module.w[...], 1 - 0.75 * X.mean(0))


def test_an_nnx_optimizer_with_an_update_of_its_own_is_refused(refused):
    """A step applies the transformation: what such an update does beside it, an average say, would be left out."""

    class Doubled(nnx.Optimizer):
        def update(self, model, grads, **kwargs):
            super().update(model, jax.tree.map(lambda g: 2 * g, grads), **kwargs)

    class Named(nnx.Optimizer):
        """Has all that nnx.Optimizer has."""

    class Wrapped(nnx.Optimizer):
        @functools.wraps(nnx.Optimizer.update)
        def update(self, model, grads, **kwargs):
            super().update(model, jax.tree.map(lambda g: 2 * g, grads), **kwargs)

    dp = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), range(2))
    for kind in (Doubled, Wrapped):
        with refused(TypeError, "train_step", f"tx is a {kind.__name__}, an nnx.Optimizer with an update of its own"):
            dp.train_step(lambda model, x: model(x).mean(), kind(dp.module, SGD, wrt=nnx.Param))
    for kind in (Named, nnx.ModelAndOptimizer):
        dp.train_step(lambda model, x: model(x).mean(), kind(dp.module, SGD, wrt=nnx.Param))


def test_another_transformation_in_the_nnx_optimizer_is_refused(refused):
    """The programs hold that of the beginning, and would go on with it."""
    dp = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), range(2))
    step = dp.train_step(lambda model, x: model(x).mean(), optax.sgd(0.1))
    step.optimizer.tx = optax.sgd(0.0)
    with refused(ValueError, "train_step", "step.optimizer.tx is not the transformation that the step was made with"):
        step(np.ones((4, 3), np.float32))
    before = np.asarray(dp.module.kernel[...])
    dp.train_step(lambda model, x: model(x).mean(), step.optimizer)(np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(dp.module.kernel[...], before)
