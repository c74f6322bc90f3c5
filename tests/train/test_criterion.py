"""`dp.value_and_grad(forward, criterion=c)(w, *b)` is `jax.value_and_grad` of `c(forward(w, *b), *b)` on one device.

And what a loss on the chunk may be: a sum of terms, each with a denominator of its own.
"""

import dataclasses
import functools
import gc
import hashlib
import operator
import re
import types
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import close

import jdp
from jdp._core import programs

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(24, 3).astype(np.float32), RANDOM.randn(24, 2).astype(np.float32)
LABELS = np.resize([0, 1, 1, 0, 1], 24).astype(np.int32)
KEEP = np.resize([1, 0, 1, 0, 0, 0, 0, 0], 24).astype(np.float32)  # nothing is kept on a whole chunk
PARAMS = jax.tree.map(np.float32, {"w": RANDOM.randn(3, 4) / 2, "out": RANDOM.randn(4, 2) / 2, "s": 0.3})
SGD, ADAM = optax.sgd(0.2), optax.adam(0.1)


def model(params, x):
    return jnp.tanh(x @ params["w"]) @ params["out"]


def forward(params, x, *rest):
    return model(params, x)


def criterion(out, x, y):
    """A root, and all pairs of rows: no mean over rows in any way."""
    return jnp.sqrt(jnp.mean((out - y) ** 2)) + jnp.mean(jax.nn.logsumexp(out @ out.T, 1))


def of_batch(variables, batch):
    return model(variables["params"], batch["x"])


def criterion_of_batch(out, batch):
    return criterion(out, batch["x"], batch["y"])


def batch(rows, start=0):
    """Rows as the arguments of a gradient; and as the batch of a step."""
    return X[start : start + rows], Y[start : start + rows]


def rows_of(size, start=0):
    return dict(zip("xy", batch(size, start), strict=True))


@functools.cache
def wrapper(n):
    return jdp.DataParallel(model, devices=range(n))


@functools.cache
def whole(criterion=criterion, forward=forward, argnums=0, has_aux=False):
    """The reference: one device, the whole batch."""

    def loss(params, *batch):
        return criterion(forward(params, *batch), *batch)

    return jax.jit(jax.value_and_grad(loss, argnums, has_aux))


def chunks(n, array):
    size = -(-len(array) // n)
    return [array[i : i + size] for i in range(0, len(array), size)]


def plain_steps(tx, batches, params=PARAMS):
    """The losses and the parameters of a plain optax loop on one device."""

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: criterion(model(p, batch["x"]), batch["x"], batch["y"]))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for rows in batches:
        params, opt_state, value = step(params, opt_state, rows)
        losses.append(value)
    return losses, params


def steps_of(step, state, batches):
    losses = []
    for rows in batches:
        state, metrics = step(state, rows)
        losses.append(metrics["loss"])
    return losses, state


# --- the equation ---


@pytest.mark.one_case("3-13-2", "8-5-3")
@pytest.mark.parametrize(
    "n, size, steps",
    [(1, 6, 1), (1, 7, 3), (2, 7, 2), (3, 13, 2), (4, 10, 1), (4, 1, 1), (4, 24, 4), (8, 1, 2), (8, 5, 3), (8, 24, 1)],
)
def test_it_is_one_device_for_any_number_of_rows(n, size, steps):
    """Uneven and idle replicas, one row, and more microbatches than a chunk has rows."""
    vg = wrapper(n).value_and_grad(forward, criterion=criterion, accumulate_steps=steps)
    close(vg(PARAMS, *batch(size)), whole()(PARAMS, *batch(size)))


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=["one pass", "two passes"])
@pytest.mark.parametrize("n, size", [(2, 7), (4, 10)])
def test_entries_of_a_row_are_sorted(n, size, options):
    """Their gradient is a scatter. XLA ends the process where it partitions one over rows that do not divide."""

    def of_sorted(out, x, y):
        return (jnp.sort(out, axis=1)[:, -1] * y[:, 0]).mean() + jnp.median(out, axis=1).sum()

    vg = wrapper(n).value_and_grad(forward, criterion=of_sorted, **options)
    x, y = batch(size)
    expected = jax.value_and_grad(lambda params: of_sorted(model(params, x), x, y))(PARAMS)
    close(vg(PARAMS, x, y), expected)
    in_jit = jax.jit(jax.value_and_grad(lambda params: of_sorted(wrapper(n)(params, x), x, y)))
    close(in_jit(PARAMS), expected)


def test_grad_is_the_gradient_of_value_and_grad(same):
    dp, options = wrapper(3), {"criterion": criterion, "accumulate_steps": 2}
    same(dp.grad(forward, **options)(PARAMS, *batch(7)), dp.value_and_grad(forward, **options)(PARAMS, *batch(7))[1])


@pytest.mark.one_case("3-2-sizes1")
@pytest.mark.parametrize("n, accumulate, sizes", [(1, 1, (7, 7)), (3, 2, (10, 10, 7)), (8, 1, (24, 5)), (4, 3, (9, 1))])
def test_steps_are_those_of_optax(n, accumulate, sizes):
    step = wrapper(n).train_step(of_batch, ADAM, criterion=criterion_of_batch, accumulate_steps=accumulate)
    batches = [rows_of(size, i) for i, size in enumerate(sizes)]
    losses, state = steps_of(step, step.init({"params": PARAMS}), batches)
    close((losses, state.params), plain_steps(ADAM, batches), rtol=1e-4, atol=1e-5)
    assert int(state.step) == len(sizes)


def test_in_jit():
    params = jdp.replicate(PARAMS, range(3))
    vg = jax.jit(wrapper(3).value_and_grad(forward, criterion=criterion, accumulate_steps=2))
    close(vg(params, *batch(10)), whole()(PARAMS, *batch(10)))


@pytest.mark.full
def test_in_a_scan_over_steps():
    def train(value_and_grad):
        def step(params, _):
            loss, grads = value_and_grad(params, *batch(7))
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

        return jax.jit(lambda params: jax.lax.scan(step, params, None, length=3))(PARAMS)

    close(train(wrapper(3).value_and_grad(forward, criterion=criterion)), train(whole()))


@pytest.mark.full
def test_in_vmap():
    """Over two sets of parameters."""
    params = jax.tree.map(lambda w: np.stack([w, -2 * w]), PARAMS)
    vg = wrapper(3).value_and_grad(forward, criterion=criterion, accumulate_steps=2)
    got = jax.vmap(lambda params: vg(params, *batch(10)))(params)
    close(got, jax.vmap(lambda params: whole()(params, *batch(10)))(params))


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2])
def test_the_gradient_of_a_gradient(steps):
    def penalty(grad):
        return lambda params: sum(jnp.sum(g**2) for g in jax.tree.leaves(grad(params, *batch(10))))

    ours = penalty(wrapper(3).grad(forward, criterion=criterion, accumulate_steps=steps))
    theirs = penalty(lambda *args: whole()(*args)[1])
    close(jax.jit(jax.grad(ours))(PARAMS), jax.jit(jax.grad(theirs))(PARAMS), rtol=1e-4, atol=1e-5)


def test_inside_another_replica_it_runs_directly(devices):
    """What is there is the batch."""
    mesh, rows = jax.sharding.Mesh(devices[:4], "data"), jax.sharding.PartitionSpec("data")

    def run(value_and_grad):
        specs = {"in_specs": (jax.sharding.PartitionSpec(), rows, rows), "out_specs": rows, "check_vma": False}
        body = jax.shard_map(
            lambda *args: jax.tree.map(lambda leaf: leaf[None], value_and_grad(*args)), mesh=mesh, **specs
        )
        return jax.jit(body)(PARAMS, *batch(12))

    close(run(wrapper(8).value_and_grad(forward, criterion=criterion)), run(whole()))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_stay_16_bits(dtype):
    args = jax.tree.map(lambda a: np.asarray(a, dtype), (PARAMS, *batch(10)))
    got = wrapper(3).value_and_grad(forward, criterion=criterion, accumulate_steps=2)(*args)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    as_float32 = functools.partial(jax.tree.map, np.float32)
    close(as_float32(got), as_float32(whole()(PARAMS, *batch(10))), rtol=0.05, atol=0.01)


@pytest.mark.full
@pytest.mark.parametrize("shares", [(1, 0, 6, 3), (0, 0, 10, 0)])
def test_chunks_of_any_sizes(shares):
    x, y = (jdp.scatter(rows, range(4), chunk_sizes=shares) for rows in batch(10))
    close(wrapper(4).value_and_grad(forward, criterion=criterion)(PARAMS, x, y), whole()(PARAMS, *batch(10)))


def test_the_criterion_is_called_once_with_all_rows():
    """Whatever the replicas and the microbatches: with the arguments after the first, and no others."""
    seen = []

    def counting(out, x, y):
        seen.append((out.shape, x.shape, y.shape))
        return criterion(out, x, y)

    wrapper(4).value_and_grad(forward, criterion=counting, accumulate_steps=2)(PARAMS, *batch(10))
    assert set(seen) == {((10, 2), (10, 3), (10, 2))}


def test_keywords_are_the_forward_passes():
    def scaled(params, x, y, *, scale, rows):
        return model(params, x) * scale + rows

    def bare(params, x, y):
        return scaled(params, x, y, scale=2.0, rows=Y[:7])

    got = wrapper(3).value_and_grad(scaled, criterion=criterion)(PARAMS, *batch(7), scale=2.0, rows=Y[:7])
    close(got, whole(forward=bare)(PARAMS, *batch(7)))


def test_results_come_back_where_the_parameters_live(devices):
    for put, home in ((lambda w: w, devices[:1]), (lambda w: jdp.replicate(w, range(3)), devices[:3])):
        got = wrapper(3).value_and_grad(forward, criterion=criterion)(put(PARAMS), *batch(7))
        assert {frozenset(leaf.devices()) for leaf in jax.tree.leaves(got)} == {frozenset(home)}


def test_a_batch_that_was_prefetched_is_seen_whole():
    step = wrapper(4).train_step(of_batch, SGD, criterion=criterion_of_batch)
    (ahead,) = wrapper(4).prefetch([rows_of(10)])
    losses, state = steps_of(step, step.init({"params": PARAMS}), [ahead])
    close((losses, state.params), plain_steps(SGD, [rows_of(10)]))


# --- metrics ---


def measured(out, x, y, finished=False):
    error = jnp.sum((out - y) ** 2, 1)
    mean, total = (lambda t, c: t / c, lambda t: t) if finished else (jdp.Mean, jdp.Sum)
    metrics = {
        "rmse": jnp.sqrt(error.mean()),
        "rows": error,
        "pairs": out @ out.T,
        "weighted": mean(jnp.sum(error * x[:, 0] ** 2), jnp.sum(x[:, 0] ** 2)),
        "nested": [total(jnp.sum(error > 1)), mean(jnp.sum(out, 0), len(x))],
        "sum of terms": mean(jnp.sum(error), len(x)) + 0.5 * total(jnp.sum(out)),
        "guess": jnp.argmax(out, 1),
    }
    return criterion(out, x, y), metrics


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("n, size, steps", [(1, 6, 1), (3, 10, 2)])
def test_metrics_come_back_as_they_are_and_markers_are_finished(n, size, steps):
    vg = wrapper(n).value_and_grad(forward, has_aux=True, criterion=measured, accumulate_steps=steps)
    want = whole(functools.partial(measured, finished=True), has_aux=True)
    close(vg(PARAMS, *batch(size)), want(PARAMS, *batch(size)))


def test_metrics_of_a_step():
    step = wrapper(3).train_step(of_batch, SGD, criterion=lambda out, b: measured(out, b["x"], b["y"]))
    _, metrics = step(step.init({"params": PARAMS}), rows_of(10))
    loss, want = jax.jit(functools.partial(measured, finished=True))(model(PARAMS, X[:10]), *batch(10))
    close(metrics, {"loss": loss, **want})


# --- updates ---


class Normed(nn.Module):
    """BatchNorm of its chunk's own statistics, and a count of the calls."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, use_fast_variance=False)(x)
        calls = self.variable("calls", "n", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        return nn.Dense(2)(nn.tanh(x))


class NNXNormed(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, momentum=0.5, use_fast_variance=False, rngs=nnx.Rngs(1))
        self.last = nnx.Linear(4, 2, rngs=nnx.Rngs(2))
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.last(nnx.tanh(self.norm(self.first(x))))


NORMED = Normed()
_shapes = jax.eval_shape(NORMED.init, jax.random.key(0), X)
VARIABLES = jax.tree.map(lambda a: np.asarray(RANDOM.rand(*a.shape), np.float32), _shapes) | {
    "calls": {"n": np.int32(0)}
}
STATE = {name: VARIABLES[name] for name in ("batch_stats", "calls")}
GRAPH, *NNX_VALUES = nnx.split(NNXNormed(), nnx.Param, ...)


def applied(params, state, x):
    return NORMED.apply({"params": params, **state}, x, mutable=["batch_stats", "calls"])


def nnx_applied(params, state, x):
    net = nnx.merge(GRAPH, params, state, copy=True)
    return net(x), nnx.split(net, nnx.Param, ...)[2]


def normed_forward(variables, batch):
    return NORMED.apply(variables, batch["x"], mutable=["batch_stats", "calls"])


@functools.cache
def by_chunks(applied, n, steps):
    """The loss, its gradient and the state of each replica: chunks one after the other, a state through each chunk."""

    def loss(params, state, x, y):
        outs, after = [], []
        for chunk in chunks(n, x):
            mine = state
            for part in chunks(steps, chunk):
                out, mine = applied(params, mine, part)
                outs.append(out)
            after.append(mine)
        return criterion(jnp.concatenate(outs), x, y), after

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.one_case
@pytest.mark.parametrize(
    "n, size, steps, reduce_state", [(1, 6, 3, "primary"), (8, 5, 1, "mean"), (2, 8, 1, "primary"), (3, 10, 2, "mean")]
)
def test_updates_are_those_of_the_chunks_and_are_taken_once(n, size, steps, reduce_state):
    """BatchNorm is each replica's own, and its statistics go once through the microbatches."""
    dp = jdp.DataParallel(NORMED, devices=range(n), reduce_state=reduce_state)
    step = dp.train_step(normed_forward, SGD, criterion=criterion_of_batch, accumulate_steps=steps)
    state, metrics = step(step.init(VARIABLES), rows_of(size))
    (loss, after), grads = by_chunks(applied, n, steps)(VARIABLES["params"], STATE, *batch(size))
    shares = [len(chunk) for chunk in chunks(n, X[:size])]
    stats = [mine["batch_stats"] for mine in after]
    want = jax.tree.map(lambda *s: np.average(s, 0, shares).astype(np.float32), *stats)
    close(state.state["batch_stats"], want if reduce_state == "mean" else stats[0])
    close(metrics["loss"], loss)
    close(state.params, jax.tree.map(lambda w, g: w - 0.2 * g, VARIABLES["params"], grads))
    assert int(state.state["calls"]["n"]) == steps


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("n, size, steps", [(1, 6, 1), (8, 5, 1), (3, 10, 2)])
def test_nnx_state_is_that_of_the_primary_and_is_updated_once(n, size, steps):
    net = nnx.merge(GRAPH, *NNX_VALUES, copy=True)
    dp = jdp.DataParallel(net, devices=range(n))
    vg = dp.value_and_grad(lambda net, x, y: net(x), criterion=criterion, accumulate_steps=steps)
    loss, grads = vg(dp.module, *batch(size))
    (want, after), want_grads = by_chunks(nnx_applied, n, steps)(*NNX_VALUES, *batch(size))
    close((loss, grads), (want, want_grads))
    close(nnx.split(dp.module, nnx.Param, ...)[2], after[0])
    assert int(dp.module.calls[...]) == steps


def test_an_nnx_step():
    dp = jdp.DataParallel(nnx.merge(GRAPH, *NNX_VALUES, copy=True), devices=range(3))
    step = dp.train_step(lambda net, b: net(b["x"]), SGD, criterion=criterion_of_batch)
    metrics = step(rows_of(10))
    (want, after), grads = by_chunks(nnx_applied, 3, 1)(*NNX_VALUES, *batch(10))
    params, state = nnx.split(dp.module, nnx.Param, ...)[1:]
    close(metrics, {"loss": want})
    close((params, state), (jax.tree.map(lambda w, g: w - 0.2 * g, NNX_VALUES[0], grads), after[0]))


@pytest.mark.full
@pytest.mark.parametrize("size", [8, 10])
def test_synchronised_batch_norm_is_that_of_the_whole_batch(size):
    dp = jdp.DataParallel(NORMED, devices=range(4))
    step = dp.train_step(normed_forward, SGD, criterion=criterion_of_batch, sync_batch_norm=True)
    state, metrics = step(step.init(VARIABLES), rows_of(size))
    (loss, after), grads = by_chunks(applied, 1, 1)(VARIABLES["params"], STATE, *batch(size))
    close((metrics["loss"], state.state["batch_stats"]), (loss, after[0]["batch_stats"]))
    close(state.params, jax.tree.map(lambda w, g: w - 0.2 * g, VARIABLES["params"], grads))


def test_a_pair_is_outputs_where_its_second_is_no_state():
    def pair(variables, batch):
        out = of_batch(variables, batch)
        return out, {"twice": 2 * out}

    def of_pair(out, batch):
        assert sorted(out[1]) == ["twice"]
        return criterion_of_batch(out[1]["twice"] - out[0], batch)

    step = wrapper(3).train_step(pair, SGD, criterion=of_pair)
    losses, state = steps_of(step, step.init({"params": PARAMS}), [rows_of(7)])
    close((losses, state.params), plain_steps(SGD, [rows_of(7)]))


# --- keys ---


def dropped(w, x, key):
    """A dropout, and what it has drawn."""
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    seen = jnp.broadcast_to(jax.random.key_data(key), (len(x), 2))
    return {"out": jnp.where(keep, w * x, 0), "keep": keep, "key": seen}


def norm_of_dropped(out, *batch):
    return jnp.sqrt(jnp.sum(out["out"] ** 2) + jnp.sum(out["out"])), {"keep": out["keep"], "key": out["key"]}


def assert_one_mask(loss, grad, seen, x, parts):
    """The gradient is that of the mask which the criterion has seen; and each part has a key of its own."""
    root = lambda w: norm_of_dropped({"out": jnp.where(seen["keep"], w * x, 0), **seen})[0]  # noqa: E731
    close((loss, grad), jax.jit(jax.value_and_grad(root))(np.float32(3)))
    keys = [tuple(key) for key in np.asarray(seen["key"]).tolist()]
    assert len(set(keys)) == parts


@pytest.mark.one_case
@pytest.mark.parametrize("n, size, steps", [(1, 6, 1), (1, 8, 4), (8, 5, 1), (3, 12, 2)])
def test_masks_are_the_same_in_both_passes(n, size, steps):
    parts = sum(len(chunks(steps, chunk)) for chunk in chunks(n, X[:size]))
    vg = wrapper(n).value_and_grad(dropped, has_aux=True, criterion=norm_of_dropped, accumulate_steps=steps)
    (loss, seen), grad = vg(np.float32(3), X[:size], key=jax.random.key(5))
    assert_one_mask(loss, grad, seen, X[:size], parts)
    np.testing.assert_array_equal(seen["key"][0], jax.random.key_data(jax.random.key(5))) if n * steps == 1 else None


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("n, steps", [(1, 1), (3, 2)])
def test_masks_of_a_step(n, steps):
    step = wrapper(n).train_step(
        lambda v, x, key: dropped(v["params"], x, key),
        optax.sgd(1.0),
        criterion=norm_of_dropped,
        accumulate_steps=steps,
    )
    state, seen = step.init({"params": np.float32(3)}, jax.random.key(5)), []
    for _ in range(2):
        before = float(state.params)
        state, metrics = step(state, X[:12])
        grad = np.float32(before - float(state.params))
        if len(seen) == 0:
            assert_one_mask(metrics.pop("loss"), grad, metrics, X[:12], n * steps)
        seen.append(np.asarray(metrics["keep"]))
    assert (seen[0] != seen[1]).any()


class Dropper(nnx.Module):
    def __init__(self):
        self.rngs, self.w = nnx.Rngs(dropout=5), nnx.Param(jnp.float32(3))

    def __call__(self, x):
        return dropped(self.w[...], x, self.rngs.dropout())


@pytest.mark.full
def test_nnx_draws_once_for_each_microbatch():
    net = Dropper()
    vg = wrapper(3).value_and_grad(lambda net, x: net(x), has_aux=True, criterion=norm_of_dropped, accumulate_steps=2)
    (loss, seen), grad = vg(net, X[:12])
    assert_one_mask(loss, grad["w"][...], seen, X[:12], 6)
    assert int(net.rngs.dropout.count[...]) == 2


# --- what is in the batch ---


def weighted(out, batch):
    """torch's weight=, with what is no array beside it."""
    assert batch["kind"] == "weighted" and batch["nothing"] is None and batch["classes"].shape == (2,)
    w = batch["classes"][batch["labels"]]
    losses = optax.softmax_cross_entropy_with_integer_labels(out / batch["temperature"], batch["labels"])
    return jnp.sum(w * losses) / jnp.sum(w)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("n, steps", [(1, 1), (4, 2)])
def test_what_is_not_cut_reaches_the_criterion_as_it_was_passed(n, steps):
    """Class weights, strings, None and numbers; for a gradient and for a step."""
    classes = np.float32([1, 5])
    rows = {"x": X[:10], "labels": LABELS[:10], "classes": classes, "kind": "weighted", "nothing": None}
    rows["temperature"] = 2.0
    axes = {"x": 0, "labels": 0, "classes": None, "kind": None, "nothing": None, "temperature": None}
    want = jax.jit(jax.value_and_grad(lambda w: weighted(model(w, rows["x"]), rows)))(PARAMS)
    dp = wrapper(n)
    options = {"criterion": weighted, "accumulate_steps": steps}
    vg = dp.value_and_grad(lambda w, b: model(w, b["x"]), in_axes=(axes,), **options)
    close(vg(PARAMS, rows), want)
    step = dp.train_step(of_batch, optax.sgd(1.0), in_axes=axes, **options)
    state, metrics = step(step.init({"params": PARAMS}), rows)
    close((metrics["loss"], state.params), (want[0], jax.tree.map(np.subtract, PARAMS, want[1])))


@pytest.mark.full
def test_nnx_objects_in_the_batch():
    """A teacher is whole on each replica and in the criterion, and what it counts is written back once."""
    teacher = nnx.merge(GRAPH, *NNX_VALUES, copy=True)

    def student(params, x, y, teacher):
        return model(params, x) - teacher(x)

    def with_teacher(out, x, y, teacher):
        assert isinstance(teacher, NNXNormed)
        return criterion(out, x, y)

    got = wrapper(2).value_and_grad(student, criterion=with_teacher, accumulate_steps=2)(PARAMS, *batch(8), teacher)
    parts = np.split(X[:8], 4)  # a BatchNorm of each microbatch
    told = jax.jit(lambda: jnp.concatenate([nnx_applied(*NNX_VALUES, part)[0] for part in parts]))()
    close(got, whole(forward=lambda params, x, y: model(params, x) - told)(PARAMS, *batch(8)))
    assert int(teacher.calls[...]) == 2


# --- argnums ---


def around(out, x, y, table):
    """Depends on all the arguments itself."""
    return jnp.sqrt(jnp.mean((out - y) ** 2)) + jnp.max(x @ table["w"]) * jnp.sum(x**2) + jnp.sum(table["w"] ** 3)


def with_table(params, x, y, table):
    return model(params, x) + jnp.tanh(x @ table["w"])[:, :2] * y


@pytest.mark.one_case("(0, 1, 3)-8-5")
@pytest.mark.parametrize("n, size", [(1, 6), (3, 7), (8, 5)])
@pytest.mark.parametrize("argnums", [1, 2, 3, (0, 3), (0, 1, 3), (-1, 2)], ids=str)
def test_argnums_name_what_is_cut_and_what_is_whole(argnums, n, size):
    """The criterion's own dependence counts: y[i] is in the outputs and in the criterion."""
    args = PARAMS, *batch(size), {"w": PARAMS["w"] / 3}
    got = wrapper(n).value_and_grad(with_table, argnums, criterion=around, in_axes=(0, 0, None))(*args)
    close(got, whole(around, with_table, argnums)(*args), atol=1e-5)


@pytest.mark.full
def test_argnums_beside_parameters_that_are_cut():
    """The criterion depends on y[i] itself; the parameters, on which it does not depend, are cut over the devices."""
    dense = nn.Dense(2)
    variables = jdp.DataParallel(dense, range(2)).init(jax.random.key(0), X[:1], shard_params=True)

    def applied(variables, x, y):
        return dense.apply(variables, x)

    expected = whole(forward=applied, argnums=(0, 2))(jax.device_get(variables), *batch(8))
    close(wrapper(2).value_and_grad(applied, (0, 2), criterion=criterion)(variables, *batch(8)), expected)


@pytest.mark.full
def test_argnums_of_what_is_whole_with_microbatches():
    args = PARAMS, *batch(10), {"w": PARAMS["w"] / 3}
    options = {"criterion": around, "in_axes": (0, 0, None), "accumulate_steps": 2}
    close(wrapper(3).value_and_grad(with_table, (0, 3), **options)(*args), whole(around, with_table, (0, 3))(*args))


def test_an_argument_that_only_the_criterion_reads():
    args = PARAMS, *batch(7)
    close(wrapper(3).value_and_grad(forward, 2, criterion=criterion)(*args), whole(argnums=2)(*args))


# --- the options of a step ---

OPTIONS = {
    "accumulate_steps": {"accumulate_steps": 4},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_params": {"shard_params": True},
    "skip_nonfinite": {"skip_nonfinite": True},
    "check_replicas": {"check_replicas": 1},
    "donate": {"donate": False},
    "all": {"accumulate_steps": 2, "shard_optimizer": True, "skip_nonfinite": True, "check_replicas": 2},
}


@pytest.mark.full
@pytest.mark.one_case("shard_params")
@pytest.mark.parametrize("option", OPTIONS)
def test_with_options(option):
    batches = [rows_of(8), rows_of(7, 3)]
    step = wrapper(2).train_step(of_batch, ADAM, criterion=criterion_of_batch, **OPTIONS[option])
    losses, state = steps_of(step, step.init({"params": PARAMS}), batches)
    close((losses, jax.device_get(state.params)), plain_steps(ADAM, batches), rtol=1e-4, atol=1e-5)


def test_gradients_may_travel_in_bfloat16():
    """The loss and the outputs do not."""
    vg = wrapper(4).value_and_grad(forward, criterion=criterion, reduce_dtype=jnp.bfloat16)
    loss, grads = vg(PARAMS, *batch(10))
    want, want_grads = whole()(PARAMS, *batch(10))
    close(loss, want)
    for got, grad in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(got, grad, rtol=0, atol=2**-6 * np.abs(grad).max(initial=1e-3))


@pytest.mark.full
@pytest.mark.parametrize("option", ["shard_params", "shard_optimizer", "deterministic"])
@pytest.mark.parametrize("steps", [1, 2])
def test_small_gradients_travel_in_float16_as_they_are(option, steps):
    """They are those of the finished loss, so that to divide them by the rows would make them 0."""
    x, weight = np.full((4096, 4), 1e-3, np.float32), np.ones(4, np.float32)
    dp = jdp.DataParallel(lambda v, x: x * v["params"], range(4))
    options = {"criterion": lambda out, x: 0.2 * out.mean(), "reduce_dtype": jnp.float16, "accumulate_steps": steps}
    step = dp.train_step(dp.module, optax.sgd(1.0), **options, **{option: True})
    state, _ = step(step.init({"params": weight}), x)
    np.testing.assert_allclose(1 - np.asarray(state.params), 5e-5, rtol=2e-3)


def test_a_step_that_is_not_finite_is_skipped(same):
    step = wrapper(2).train_step(of_batch, SGD, criterion=criterion_of_batch, skip_nonfinite=True)
    state, metrics = step(step.init({"params": PARAMS}), {"x": X[:7] * np.nan, "y": Y[:7]})
    assert bool(metrics["skipped"]) and np.isnan(metrics["loss"])
    same(state.params, jax.tree.map(jnp.asarray, PARAMS))
    state, metrics = step(state, rows_of(7))
    close(([metrics["loss"]], state.params), plain_steps(SGD, [rows_of(7)]))


def digest(tree):
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()


@pytest.mark.full
@pytest.mark.parametrize("accumulate", [1, 2])
def test_deterministic_gives_the_same_bits_on_any_number_of_devices(accumulate):
    found = set()
    for n in (1, 2, 4):
        dp = jdp.DataParallel(model, devices=range(n), replicas=4)
        options = {"deterministic": True, "accumulate_steps": accumulate}
        step = dp.train_step(of_batch, ADAM, criterion=criterion_of_batch, **options)
        batches = [rows_of(13), rows_of(5, 2)]
        losses, state = steps_of(step, step.init({"params": PARAMS}), batches)
        close((losses, state.params), plain_steps(ADAM, batches), rtol=1e-4, atol=1e-5)
        found.add(digest((losses, state)))
    assert len(found) == 1


@pytest.mark.full
def test_more_replicas_than_devices():
    dp = jdp.DataParallel(model, devices=range(2), replicas=4)
    close(dp.value_and_grad(forward, criterion=criterion)(PARAMS, *batch(10)), whole()(PARAMS, *batch(10)))


@pytest.mark.full
def test_it_can_be_lowered_and_explained():
    step = wrapper(2).train_step(of_batch, SGD, criterion=criterion_of_batch)
    state = step.init({"params": PARAMS})
    assert step.lower(state, rows_of(8)).compile() is not None
    report = jdp.explain(step, state, rows_of(8))
    assert report.flops > 0 and "of_batch" in str(report)
    vg = wrapper(2).value_and_grad(forward, criterion=criterion)
    assert jdp.explain(vg, PARAMS, *batch(8)).collectives
    close((*steps_of(step, state, [rows_of(8)]),)[0], plain_steps(SGD, [rows_of(8)])[0])  # none of these has run it


def test_compiled_once_for_the_same_shapes(compilations):
    params = jdp.replicate(PARAMS, range(3))

    def run(size, start):
        vg = jdp_wrapper.value_and_grad(forward, criterion=own)
        jax.block_until_ready(vg(params, *batch(size, start)))

    jdp_wrapper, own = jdp.DataParallel(model, devices=range(3)), lambda *args: criterion(*args)
    run(12, 0)
    run(10, 0)
    compilations()
    run(12, 3)
    run(10, 5)
    assert compilations() == 0


# --- outputs ---


def of_tree(params, x, y):
    out = model(params, x)
    return {"out": out, "parts": [jnp.tanh(out), (out.T, out[:, 0])], "nothing": None}


def of_tokens(params, x, y):
    """Logits of three tokens of each row, flattened as torch's cross-entropy wants them."""
    return (jnp.tanh(x[:, :, None] * params["w"][:, 0]) @ params["w"]).reshape(-1, 4)


def of_numbers(params, x, y):
    out = model(params, x)
    return {"out": out, "guess": jnp.argmax(out, 1), "right": out[:, 0] > 0}


def of_penalty(params, x, y):
    """An L2 of the parameters, and a parameter: numbers that do not depend on the rows."""
    return {"out": model(params, x), "l2": jnp.sum(params["w"] ** 2), "s": params["s"]}


OUTPUTS = {
    "a tree": (
        of_tree,
        lambda out, x, y: criterion(out["parts"][0] + out["parts"][1][0].T, x, y) + out["parts"][1][1].max(),
    ),
    "tokens": (
        of_tokens,
        lambda out, x, y: jnp.sqrt(
            optax.softmax_cross_entropy_with_integer_labels(out, (np.arange(out.shape[0]) % 4)).mean()
        ),
    ),
    "whole numbers": (
        of_numbers,
        lambda out, x, y: (
            criterion(out["out"], x, y) + jnp.sum(out["out"][out["guess"][0]]) + jnp.sum(out["right"] * y[:, 0])
        ),
    ),
    "numbers without rows": (
        of_penalty,
        lambda out, x, y: jnp.exp(-out["s"]) * criterion(out["out"], x, y) + out["s"] + 0.1 * jnp.sqrt(out["l2"]),
    ),
}


@pytest.mark.one_case("a tree-3-10-2")
@pytest.mark.parametrize("n, size, steps", [(1, 6, 1), (8, 5, 1), (3, 10, 2)])
@pytest.mark.parametrize("what", OUTPUTS)
def test_outputs_are_gathered_in_the_order_of_the_batch(what, n, size, steps):
    forward, criterion = OUTPUTS[what]
    vg = wrapper(n).value_and_grad(forward, criterion=criterion, accumulate_steps=steps)
    close(vg(PARAMS, *batch(size)), whole(criterion, forward)(PARAMS, *batch(size)))


NO_OUTPUTS = {
    "a marker": (lambda out, p: {"out": out, "loss": jdp.Mean(out.sum(), len(out))}, r"jdp\.Mean"),
    "a sum": (lambda out, p: [out, jdp.Sum(out.sum())], r"jdp\.Sum"),
    "the mean of the chunk": (lambda out, p: (out, out.mean()), "rows"),
    "means of the chunk": (lambda out, p: {"out": out, "mean": out.mean(0)}, r"\['mean'\]"),
    "pairs": (lambda out, p: {"out": out, "pairs": out @ out.T}, r"\['pairs'\]"),
    "parameters": (lambda out, p: {"out": out, "w": p["w"]}, r"\['w'\]"),
    "half of the rows": (lambda out, p: out[: len(out) // 2], "rows"),
    "text": (lambda out, p: {"out": out, "name": "text"}, r"\['name'\]"),
    "text after rows": (lambda out, p: {"out": out, "text": "text"}, r"outputs\['text'\] is a str; outputs are arrays"),
}


@pytest.mark.parametrize("what", NO_OUTPUTS)
def test_outputs_that_do_not_follow_the_rows_are_refused(what, refused):
    outputs, match = NO_OUTPUTS[what]
    vg = wrapper(2).value_and_grad(lambda p, x, y: outputs(model(p, x), p), criterion=lambda out, x, y: jnp.sum(x))
    with refused((TypeError, ValueError), "value_and_grad", match):
        vg(PARAMS, *batch(8))


# --- errors ---

NO_LOSSES = {
    "a vector": lambda out, x, y: out[:, 0],
    "a Python float": lambda out, x, y: 1.0,
    "a whole number": lambda out, x, y: jnp.sum(out > 0),
    "a complex number": lambda out, x, y: jnp.sum(out) * 1j,
    "None": lambda out, x, y: None,
    "text": lambda out, x, y: "loss",
    "a pair": lambda out, x, y: (jnp.sum(out), {}),
    "a marker": lambda out, x, y: jdp.Mean(jnp.sum(out), len(out)),
    "the outputs": lambda out, x, y: {"out": out},
}


@pytest.mark.parametrize("what", NO_LOSSES)
def test_a_criterion_returns_one_number(what, refused):
    match = "criterion.*has_aux" if what == "a pair" else "criterion"
    with refused(TypeError, "value_and_grad", match):
        wrapper(2).value_and_grad(forward, criterion=NO_LOSSES[what])(PARAMS, *batch(5))


@pytest.mark.parametrize("out", [lambda o: o.sum(), lambda o: (o.sum(),), lambda o: [o.sum(), {}, {}]])
def test_has_aux_without_a_pair(out, refused):
    vg = wrapper(2).value_and_grad(forward, has_aux=True, criterion=lambda o, x, y: out(o))
    with refused(TypeError, "value_and_grad", "criterion.*pair"):
        vg(PARAMS, *batch(5))


NO_METRICS = {
    "one called loss": (lambda out: {"loss": out.sum()}, "loss"),
    "text": (lambda out: {"name": "text"}, r"\['name'\]"),
    "no dict": (lambda out: out.sum(), "dict"),
}


@pytest.mark.parametrize("what", NO_METRICS)
def test_metrics_that_a_step_does_not_take(what, refused):
    metrics, match = NO_METRICS[what]
    step = wrapper(2).train_step(of_batch, SGD, criterion=lambda out, b: (out.sum(), metrics(out)))
    with refused((TypeError, ValueError), "train_step", match):
        step(step.init({"params": PARAMS}), rows_of(5))


@pytest.mark.parametrize("steps", [1, 2])
def test_an_error_of_a_criterion_keeps_its_type_and_says_where(steps):
    def failing(out, x, y):
        raise KeyError("nowhere")

    with pytest.raises(KeyError, match="nowhere") as info:
        wrapper(2).value_and_grad(forward, criterion=failing, accumulate_steps=steps)(PARAMS, *batch(5))
    assert "in criterion" in " ".join([str(info.value), *getattr(info.value, "__notes__", [])])


def test_a_collective_in_a_criterion_has_nobody_to_meet():
    vg = wrapper(2).value_and_grad(forward, criterion=lambda out, x, y: jax.lax.pmean(out.mean(), "data"))
    with pytest.raises(NameError, match="data") as info:
        vg(PARAMS, *batch(5))
    assert "Leave the collective out: x.mean() is of all rows." in "".join(info.value.__notes__)


def test_an_error_of_the_forward_pass_keeps_its_type_and_says_where():
    with pytest.raises(KeyError, match="nowhere") as info:
        wrapper(2).value_and_grad(lambda p, x, y: p["nowhere"], criterion=criterion)(PARAMS, *batch(5))
    assert any("replica 0" in note for note in info.value.__notes__)


@pytest.mark.parametrize("criterion", [3.0, "mean", PARAMS])
def test_a_criterion_that_cannot_be_called(criterion, refused):
    with refused(TypeError, "value_and_grad", "criterion is a"):
        wrapper(2).value_and_grad(forward, criterion=criterion)(PARAMS, *batch(5))
    with refused(TypeError, "train_step", "criterion is a"):
        wrapper(2).train_step(of_batch, SGD, criterion=criterion)


class CrossEntropyLoss:
    def __call__(self, outputs, targets):
        raise AssertionError


CrossEntropyLoss.__module__ = "torch.nn.modules.loss"


def test_a_criterion_of_torch(refused):
    with refused(TypeError, "train_step", "criterion is torch's CrossEntropyLoss; .*optax"):
        wrapper(2).train_step(of_batch, SGD, criterion=CrossEntropyLoss())


def test_no_rows(refused):
    with refused(ValueError, "value_and_grad", "0 rows"):
        wrapper(2).value_and_grad(forward, criterion=criterion)(PARAMS, *batch(0))


def test_a_refused_call_changes_nothing(same):
    """Nor does an exception: an NNX model counts nothing, and the next call is right."""
    net = nnx.merge(GRAPH, *NNX_VALUES, copy=True)
    before = jax.tree.map(np.asarray, nnx.state(net))
    vg = wrapper(3).value_and_grad(lambda net, x, y: net(x), criterion=lambda out, x, y: out)
    with pytest.raises(TypeError):
        vg(net, *batch(10))
    same(nnx.state(net), before)


# --- all pairs of rows ---


def two_views(params, x, y):
    return model(params, x), model(params, x[:, ::-1])


def simclr(views, *batch):
    mine, others = (jnp.concatenate([z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in views]) for _ in range(2))
    rows = jnp.arange(len(views[0]))
    own = jnp.concatenate([rows, rows + len(rows)])
    scores = jnp.where(own[:, None] == jnp.arange(len(own)), -1e9, mine @ others.T)
    return optax.softmax_cross_entropy_with_integer_labels(scores, (own + len(rows)) % len(own)).mean()


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [24, 21, 8])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_two_views(n, rows):
    got = wrapper(n).value_and_grad(two_views, criterion=simclr)(PARAMS, *batch(rows))
    close(got, whole(simclr, two_views)(PARAMS, *batch(rows)), rtol=2e-5, atol=2e-6)


@pytest.mark.full
def test_two_views_are_gathered_and_not_exchanged():
    """XLA by itself sends parts of the joined rows from device to device, and then gathers them."""
    dp, at = wrapper(8), jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    ours = jax.jit(dp.value_and_grad(two_views, criterion=simclr)).lower(PARAMS, *batch(24))

    def by_hand(params, *batch):
        return jax.value_and_grad(lambda params: simclr(two_views(params, *batch)))(params)

    plain = jax.jit(by_hand, in_shardings=(None, at, at)).lower(PARAMS, *batch(24))
    texts = [lowered.compile().as_text() for lowered in (ours, plain)]
    sent = [len(re.findall(r" (?:all-to-all|collective-permute)(?:-start)?\(", text)) for text in texts]
    assert sent[0] <= sent[1] / 2, sent


@pytest.mark.full
@pytest.mark.parametrize("axes", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_under_jit_with_a_batch_that_lies_on_a_mesh(axes):
    """`jax.make_mesh` makes Explicit axes, which are part of the type of what jit traces."""
    at = jax.sharding.NamedSharding(jax.make_mesh((4,), ("data",), (axes,)), jax.P("data"))
    rows = jax.device_put(batch(24), at)
    got = jax.jit(wrapper(4).value_and_grad(forward, criterion=criterion))(PARAMS, *rows)
    close(got, whole()(PARAMS, *batch(24)), rtol=2e-5, atol=2e-6)


# --- torch ---


def torch_criteria(torch):
    """Of a name: torch's spelling and JAX's, both on what the model puts out for all rows, and on the batch."""
    f = torch.nn.functional
    classes = np.float32([1, 5])

    def contrastive(z, softmax, norm, eye):
        z = z / norm(z)
        scores = z @ z.T / 0.5 - 1e4 * eye
        return -softmax(scores)[np.arange(len(z)), np.arange(len(z)) ^ 1].mean()

    def torch_vae(out, x, y):
        code, noise = out.chunk(2, 1)
        kl = -0.5 * torch.sum(1 + noise - code**2 - noise.exp())
        return f.binary_cross_entropy_with_logits(out, y.sigmoid(), reduction="sum") + kl

    def vae(out, x, y):
        code, noise = jnp.split(out, 2, 1)
        kl = -0.5 * jnp.sum(1 + noise - code**2 - jnp.exp(noise))
        return jnp.sum(optax.sigmoid_binary_cross_entropy(out, jax.nn.sigmoid(y))) + kl

    def dice(p, target):
        return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)

    def weighted(out, x, y):
        w, losses = classes[(y[:, 0] > 0) * 1], optax.softmax_cross_entropy_with_integer_labels(out, (y[:, 0] > 0) * 1)
        return jnp.sum(w * losses) / jnp.sum(w)

    classes = jnp.asarray(classes)
    return {
        "weighted classes": (
            lambda out, x, y: torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))(out, (y[:, 0] > 0).long()),
            weighted,
        ),
        "RMSE": (
            lambda out, x, y: torch.sqrt(torch.nn.MSELoss()(out, y)),
            lambda out, x, y: jnp.sqrt(jnp.mean((out - y) ** 2)),
        ),
        "contrastive": (
            lambda out, x, y: contrastive(
                out, lambda s: s.log_softmax(1), lambda z: z.norm(dim=1, keepdim=True), torch.eye(len(out))
            ),
            lambda out, x, y: contrastive(
                out,
                jax.nn.log_softmax,
                lambda z: jnp.linalg.norm(z, axis=1, keepdims=True),
                jnp.eye(len(out)),
            ),
        ),
        "VAE": (torch_vae, vae),
        "Dice": (
            lambda out, x, y: dice(out.sigmoid(), (y > 0).float()),
            lambda out, x, y: dice(jax.nn.sigmoid(out), jnp.float32(y > 0)),
        ),
    }


@pytest.mark.parametrize("name", ["weighted classes", "RMSE", "contrastive", "VAE", "Dice"])
def test_a_criterion_of_torchs(name):
    """14 rows on 4 devices, and torch with all of them."""
    torch = pytest.importorskip("torch")
    theirs, ours = torch_criteria(torch)[name]
    weights = {key: torch.tensor(value, requires_grad=True) for key, value in PARAMS.items()}
    x, y = map(torch.tensor, batch(14))
    loss = theirs(torch.tanh(x @ weights["w"]) @ weights["out"], x, y)
    loss.backward()
    want = {key: np.zeros_like(PARAMS[key]) if w.grad is None else w.grad.numpy() for key, w in weights.items()}
    got = wrapper(4).value_and_grad(forward, criterion=ours)(PARAMS, *batch(14))
    close(got, (loss.detach().numpy(), want), rtol=2e-5, atol=2e-6)


# --- sums of terms, without a criterion ---

# e: an error of each row; k: the rows that count, none on some chunks; s: a parameter
SUMS = {
    "a detector": lambda o: (
        o.Mean((o.e * o.k).sum(), o.k.sum()) + 0.5 * o.Mean(o.e.sum(), len(o.e)) + o.Sum(o.e.sum()) / 3
    ),
    "subtracted": lambda o: o.Mean(o.e.sum(), o.k.sum()) - 2 * o.Mean((o.e**2).sum(), len(o.e)),
    "negated": lambda o: -o.Sum((o.e * o.k).sum()) + o.Mean(o.e.sum(), len(o.e)),
    "a list": lambda o: sum([o.Mean((i * o.e).sum(), (o.k + i).sum()) for i in range(3)]),
    "numpy's numbers": lambda o: np.float32(0.5) * o.Mean(o.e.sum(), o.k.sum()) + o.Sum(o.e.sum()) * np.float64(2),
    "arrays": lambda o: jnp.float32(0.5) * o.Mean(o.e.sum(), o.k.sum()) + o.Sum(o.e.sum()) / jnp.array(3.0),
    "numbers of 16 bits": lambda o: jnp.float16(300) * (jnp.float16(300) * o.Mean(o.e.sum(), len(o.e))) / np.int8(3),
    "rows": lambda o: o.Mean((o.e * o.k).sum(), o.k.sum()) + o.Rows(o.e**2),
    "rows first": lambda o: o.Rows(o.e) - o.Mean((o.e * o.k).sum(), o.k.sum()),
    "a mean": lambda o: o.e.mean() + o.Mean((o.e * o.k).sum(), o.k.sum()),
    "a number": lambda o: o.Mean((o.e * o.k).sum(), o.k.sum()) + 1.5,
    "one less": lambda o: 1 - o.Mean((o.e * o.k).sum(), o.k.sum()),
    "a factor that is learnt": lambda o: jnp.exp(-o.s) * o.Mean((o.e * o.k).sum(), o.k.sum()) + o.s,
    "several that are learnt": lambda o: (o.Sum(o.e.sum()) + o.Mean(o.e.sum(), o.k.sum())) * o.s / (1 + o.s**2),
    "one sum": lambda o: o.Sum((o.e * o.k).sum()),
    "nothing at all": lambda o: 0.0 * o.Sum(o.e.sum()) + o.e.mean(),
}
MARKERS = {"Mean": jdp.Mean, "Sum": jdp.Sum, "Rows": lambda rows: rows}
FINISHED = {"Mean": lambda total, count: total / count, "Sum": lambda total: total, "Rows": jnp.mean}


def summed(line, meaning):
    """A loss that is this sum, and a metric that is the same."""

    def loss(params, x, y, k):
        o = types.SimpleNamespace(e=jnp.sum((model(params, x) - y) ** 2, 1), k=k, s=params["s"], **meaning)
        return line(o), {"again": line(o)}

    return loss


@pytest.mark.one_case("a detector-3-10-2")
@pytest.mark.parametrize("n, size, steps", [(1, 6, 1), (1, 8, 4), (8, 5, 1), (3, 10, 2)])
@pytest.mark.parametrize("what", SUMS)
def test_a_sum_of_terms(what, n, size, steps):
    """As a loss and as a metric, each term with its own denominator."""
    args = PARAMS, *batch(size), KEEP[:size]
    got = wrapper(n).value_and_grad(summed(SUMS[what], MARKERS), has_aux=True, accumulate_steps=steps)(*args)
    close(got, jax.jit(jax.value_and_grad(summed(SUMS[what], FINISHED), has_aux=True))(*args), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2])
def test_a_sum_of_terms_in_steps(steps):
    """Of a function and of NNX."""
    line, rows, parts = SUMS["a detector"], {**rows_of(10), "k": KEEP[:10]}, operator.itemgetter("x", "y", "k")
    loss, _ = summed(line, FINISHED)(PARAMS, *parts(rows))
    step = wrapper(3).train_step(
        lambda v, b: summed(line, MARKERS)(v["params"], *parts(b)), SGD, accumulate_steps=steps
    )
    state, metrics = step(step.init({"params": PARAMS}), rows)
    grads = jax.jit(jax.grad(summed(line, FINISHED), has_aux=True))(PARAMS, *parts(rows))[0]
    params = jax.tree.map(lambda w, g: w - 0.2 * g, PARAMS, grads)
    close((metrics, state.params), ({"loss": loss, "again": loss}, params), atol=1e-5)

    class Net(nnx.Module):
        def __init__(self):
            for name, value in PARAMS.items():
                setattr(self, name, nnx.Param(jnp.asarray(value)))

    dp = jdp.DataParallel(Net(), devices=range(3))
    values = lambda net: {name: getattr(net, name)[...] for name in PARAMS}  # noqa: E731
    step = dp.train_step(lambda net, b: summed(line, MARKERS)(values(net), *parts(b)), SGD, accumulate_steps=steps)
    close((step(rows), values(dp.module)), ({"loss": loss, "again": loss}, params), atol=1e-5)


@pytest.mark.full
def test_a_count_that_is_learnt(refused):
    """Soft Dice: the gradient is the right one, or the loss is refused and the way out named."""

    def dice(meaning):
        return summed(lambda o: meaning["Mean"](2 * (o.e * o.k).sum(), (o.e + o.k).sum()), meaning)

    for n in (1, 3):
        args = PARAMS, *batch(10), KEEP[:10]
        try:
            got = wrapper(n).value_and_grad(dice(MARKERS), has_aux=True)(*args)
        except (TypeError, ValueError) as error:
            assert "criterion=" in str(error)
        else:
            close(got, jax.jit(jax.value_and_grad(dice(FINISHED), has_aux=True))(*args))


NO_SUMS = {
    "a product": lambda a, b, e: a * b,
    "a quotient": lambda a, b, e: a / b,
    "one over": lambda a, b, e: 1 / a,
    "a power": lambda a, b, e: a**2,
    "a power of a number": lambda a, b, e: 2**a,
    "an absolute value": lambda a, b, e: abs(a),
    "a root": lambda a, b, e: jnp.sqrt(a),
    "numpy's root": lambda a, b, e: np.sqrt(a),
    "a maximum": lambda a, b, e: jnp.maximum(a, 0.1),
    "a comparison": lambda a, b, e: jnp.where(a > 1, 1.0, 2.0),
    "a factor of rows": lambda a, b, e: e.sum() * a,
    "a mean as a factor": lambda a, b, e: a * e.mean(),
    "divided by rows": lambda a, b, e: a / e.sum(),
}


@pytest.mark.parametrize("n", [1, 2])
def test_an_array_of_rows_and_columns_is_no_term(n):
    """A vector stands for its mean; of a matrix nothing tells what is meant."""

    def metrics(params, x, y):
        e = (model(params, x) - y) ** 2
        return {"metric": jdp.Mean(e.sum(), e.size) + e}

    def loss(params, x, y):
        return jnp.mean((model(params, x) - y) ** 2), metrics(params, x, y)

    match = r"float32\[\d, \d\] among its terms \(\d rows\); an array among terms is a vector"
    with pytest.raises(TypeError, match=match):
        wrapper(n).value_and_grad(loss, has_aux=True)(PARAMS, *batch(6))
    with pytest.raises(TypeError, match=match):
        wrapper(n).evaluate(lambda params, b: metrics(params, *b), PARAMS, [batch(6)])


@pytest.mark.parametrize("what", NO_SUMS)
def test_what_is_no_sum_of_terms_is_refused(what):
    """As a loss and as a metric, with one device and with more."""

    def loss(params, x, y):
        e = jnp.sum((model(params, x) - y) ** 2, 1)
        return NO_SUMS[what](jdp.Mean(e.sum(), len(e)), jdp.Sum(e.sum()), e)

    def metric(params, x, y):
        return jnp.mean(model(params, x)), {"metric": loss(params, x, y)}

    for n in (1, 2):
        with pytest.raises(TypeError, match="criterion="):
            wrapper(n).value_and_grad(loss)(PARAMS, *batch(6))
        with pytest.raises(TypeError, match="criterion="):
            wrapper(n).value_and_grad(metric, has_aux=True)(PARAMS, *batch(6))


def of_two(w, x, z):
    return x @ w, z @ w


ROWS_OF_TWO = {
    "joined": (
        lambda w, x, z: jnp.concatenate(of_two(w, x, z)),
        lambda o: ((o[:8] - o[8:]) ** 2).mean(),
        r"outputs has the rows of several arrays, one after the other; .* Return a tuple of the arrays",
    ),
    "tiled": (
        lambda w, x, z: jnp.tile(x @ w, (2, 1)),
        lambda o: ((o[:8] - o[8:]) ** 2).mean(),
        r"outputs has the rows of several arrays",
    ),
    "joined, then flattened": (
        lambda w, x, z: (lambda h: h.reshape(h.shape[0], -1))(jnp.concatenate(of_two(w, x, z))[:, None]),
        lambda o: ((o[:8] - o[8:]) ** 2).mean(),
        r"outputs has the rows of several arrays",
    ),
    "stacked before the rows": (
        lambda w, x, z: jnp.stack(of_two(w, x, z)).reshape(-1, 1),
        lambda o: ((o[:8] - o[8:]) ** 2).mean(),
        r"outputs has the rows of several arrays",
    ),
    "joined, and more": (
        lambda w, x, z: {"o": 2 * jax.nn.relu(jnp.concatenate(of_two(w, x, z))) + 1},
        lambda o: o["o"].mean(),
        r"outputs\['o'\] has the rows of several arrays",
    ),
    "their number": (
        lambda w, x, z: (x @ w, jnp.float32(x.shape[0])),
        lambda o: (o[0] ** 2).sum() / o[1],
        r"outputs\[1\] is float32\[\] for",
    ),
    "a drawn count": (
        lambda w, x, z: (x @ w, jnp.where(jnp.isnan(x[:, 0]), 0.0, 1.0).sum()),
        lambda o: (o[0] ** 2).sum() / o[1],
        r"outputs\[1\] is float32\[\] for",
    ),
    "tuple": (of_two, lambda o: ((o[0] - o[1]) ** 2).mean(), None),
    "parted again": (
        lambda w, x, z: tuple(jnp.split(jnp.concatenate([x, z]) @ w, 2)),
        lambda o: ((o[0] - o[1]) ** 2).mean(),
        None,
    ),
    "side by side": (
        lambda w, x, z: jnp.concatenate(of_two(w, x, z), 1),
        lambda o: ((o[:, 0] - o[:, 1]) ** 2).mean(),
        None,
    ),
    "pairs of rows": (
        lambda w, x, z: jnp.stack(of_two(w, x, z), 1).reshape(-1, 1),
        lambda o: ((o[::2] - o[1::2]) ** 2).mean(),
        None,
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", ROWS_OF_TWO)
def test_outputs_of_two_batches(name):
    """The replicas' outputs are joined along the rows: what has the rows of x, then those of z, would be mixed."""
    forward, judge, text = ROWS_OF_TWO[name]
    rng = np.random.default_rng(0)
    w, x, z = (rng.normal(size=s).astype(np.float32) for s in ((3, 1), (8, 3), (8, 3)))
    found = jdp.DataParallel(forward, devices=range(4)).value_and_grad(forward, criterion=lambda o, *_: judge(o))
    if text is not None:
        with pytest.raises(TypeError, match=text):
            found(w, x, z)
        return
    one = jax.value_and_grad(lambda w: judge(forward(w, x, z)))(w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found(w, x, z), one)


MOVED = {
    "positions": (
        lambda w, x: {"z": x @ w, "i": jnp.arange(x.shape[0])},
        r"outputs\['i'\] .* made of the number of rows",
    ),
    "turned": (
        lambda w, x: 0.3 * (x @ w) + 0.7 * (x @ w)[::-1],
        "outputs .* in another order than the rows of the batch",
    ),
    "rolled": (lambda w, x: jnp.roll(x @ w, 1, 0), "outputs .* in another order"),
    # The same, where the function asks for the number itself.
    "by their number": (lambda w, x: (x @ w) / len(x), "outputs .* made of the number of rows"),
    "weights by position": (
        lambda w, x: (x @ w) * jnp.linspace(0, 1, len(x))[:, None],
        "outputs .* made of the number of rows",
    ),
    "turned, and their number": (lambda w, x: (x @ w)[::-1] + 0 * len(x), "outputs .* in another order"),
    "halves": (lambda w, x: jnp.roll(x @ w, len(x) // 2, 0), "outputs .* in another order"),
}


@pytest.mark.parametrize("name", MOVED)
def test_outputs_that_are_made_of_the_places_of_their_rows(name):
    forward, text = MOVED[name]
    found = jdp.DataParallel(forward, range(4)).value_and_grad(
        forward, criterion=lambda o, x: sum(jax.tree.leaves(o)).mean()
    )
    with pytest.raises(TypeError, match=text + ".* Do that in the criterion"):
        found(np.ones((3, 2), np.float32), np.ones((8, 3), np.float32))


@pytest.mark.parametrize("form", ["criterion", "factor"])
def test_a_number_that_each_replica_draws(form):
    """One noise level for all rows, or the weight of mixup: each replica has another."""
    dp, x = jdp.DataParallel(lambda v, x: x @ v["params"], range(4)), np.ones((8, 3), np.float32)

    def forward(v, x, key):
        t = jax.random.uniform(key)
        return {"out": dp(v, x) * t, "t": t}

    def loss(v, x, key):
        t = jax.random.uniform(key)
        return t * jdp.Mean((dp(v, x) ** 2).sum(), 2 * len(x)) + (1 - t) * jdp.Mean(dp(v, x).sum(), 2 * len(x))

    def for_each_row(v, x, key):
        t = jnp.full(len(x), jax.random.uniform(key))
        return {"out": dp(v, x) * t[:, None], "t": t}

    def judge(o, x):
        return ((o["out"] / o["t"][..., None] - 1) ** 2).mean()

    step = dp.train_step(forward, SGD, criterion=judge) if form == "criterion" else dp.train_step(loss, SGD)
    state = step.init({"params": np.ones((3, 2), np.float32)}, jax.random.key(0))
    text = (
        r"outputs\['t'\] is one number that is drawn"
        if form == "criterion"
        else "a factor that depends on a random key"
    )
    with pytest.raises(TypeError, match=text):
        step(state, x)
    step = dp.train_step(for_each_row, SGD, criterion=judge)
    _, metrics = step(step.init({"params": np.ones((3, 2), np.float32)}, jax.random.key(0)), x)
    np.testing.assert_allclose(metrics["loss"], 4, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Weighted:
    by: object = dataclasses.field(compare=False)
    name: str = "mine"

    def __call__(self, out, *rows):
        return self.by(out, *rows) if callable(self.by) else jnp.mean((out - 1) ** 2 * self.by)

    def method(self, out, *rows):
        return self(out, *rows)


CRITERIA = {
    "equal": Weighted,
    "of one method": lambda by: Weighted(by).method,
    "partial": lambda by: functools.partial(lambda by, out, *rows: jnp.mean((out - 1) ** 2 * by), by),
    "not hashable": dataclasses.make_dataclass("Array", ["by"], frozen=True, namespace={"__call__": Weighted.__call__}),
    "with slots": dataclasses.make_dataclass("Slots", ["by"], slots=True, namespace={"__call__": Weighted.__call__}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", CRITERIA)
def test_criteria_that_compare_equal_are_two(kind):
    dp, w, x = jdp.DataParallel(lambda w, x: x @ w, range(2)), np.ones((3, 2), np.float32), np.ones((4, 3), np.float32)
    kept = [CRITERIA[kind](jnp.array([1.0, by])) for by in (1, 3)]
    losses = [dp.value_and_grad(dp, criterion=own)(w, x)[0] for own in (*kept, *kept)]
    np.testing.assert_allclose(losses, [4, 8, 4, 8], rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("make", [lambda f: f, lambda f: Weighted(f), lambda f: Weighted(f).method])
def test_a_criterion_is_freed_with_its_programs(make):
    """A loop that makes one for each batch does not fill the memory."""
    gone, dp = [], jdp.DataParallel(lambda w, x: x @ w, range(2))

    def forward(w, x):
        return dp(w, x)

    for _ in range(3):
        own = np.ones(5)
        criterion = make(lambda o, x, own=own: (o**2).mean() + 0 * own.sum())
        gone.append(weakref.ref(own))
        dp.value_and_grad(forward, criterion=criterion)(np.ones((3, 2), np.float32), np.ones((4, 3), np.float32))
        del criterion, own
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 3
    last = make(lambda o, x: (o**2).mean())
    dp.value_and_grad(forward, criterion=last)(np.ones((3, 2), np.float32), np.ones((4, 3), np.float32))
    _, made = programs._made[id(forward)]
    assert len(made) == 2  # what belongs to those that are gone is dropped when the next one comes


NO_ENTRIES_OF_THEIR_OWN = {
    "by their number": lambda w, x: ((x @ w) ** 2).sum(1) / x.shape[0],
    "places": lambda w, x: ((x @ w) ** 2).sum(1) * jnp.arange(x.shape[0]),
}


@pytest.mark.parametrize("name", NO_ENTRIES_OF_THEIR_OWN)
def test_a_vector_that_is_made_of_the_number_of_rows(name):
    loss_fn = NO_ENTRIES_OF_THEIR_OWN[name]
    dp = jdp.DataParallel(lambda w, x: x @ w, devices=range(4))
    w, x = np.ones((3, 2), np.float32), np.ones((8, 3), np.float32)
    with pytest.raises(TypeError, match="has an entry for each row, and is made of the number of rows"):
        dp.value_and_grad(loss_fn)(w, x)
    with pytest.raises(TypeError, match="has an entry for each row, and is made of the number of rows"):
        dp.evaluate(lambda w, x: {"rows": loss_fn(w, x)}, w, [x])
