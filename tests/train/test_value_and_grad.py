"""`dp.value_and_grad(f)(params, *batch) == jax.value_and_grad(f)(params, *batch)`, of one device and all rows."""

import functools
import gc
import re
import weakref
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hlo import BYTES, COLLECTIVE, computations, in_loops, size_in_bytes
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from laws import INPUTS
from laws import close_to_rounding as close

import jdp

SIZES, STEPS, DEVICES = (1, 2, 5, 8, 16, 21, 24), (1, 2, 3, 8), (1, 2, 3, 8)

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(40, 3)
Y = RANDOM.randn(40, 2)
# Sentences of very different length, some of none: a mean of means, and a division by a replica's own count, show.
MASK = (np.arange(7) < np.resize([7, 1, 0, 2, 5, 0, 0, 3], 40)[:, None]).astype(np.float64)
PARAMS = {"in": {"w": RANDOM.randn(3, 4) / 2, "b": RANDOM.randn(4) / 2}, "out": [RANDOM.randn(4, 2) / 2]}


def single(tree):
    return jax.tree.map(np.float32, tree)


def batch(size, cast=single):
    return tuple(cast(rows[:size]) for rows in (X, Y, MASK))


def model(params, x):
    return jnp.tanh(x @ params["in"]["w"] + params["in"]["b"]) @ params["out"][0]


def scalar(params, x, y, mask):
    return jnp.mean((model(params, x) - y) ** 2)


def vector(params, x, y, mask):
    return jnp.sum((model(params, x) - y) ** 2, axis=1)


def tokens(params, x, y, mask):
    """The error of token t of a sentence, which is t + 1 times that of the first."""
    error = vector(params, x, y, mask)[:, None] * jnp.arange(1, 8, dtype=x.dtype)
    return jdp.Mean(jnp.sum(error * mask), jnp.sum(mask))


FORMS = (scalar, vector, tokens)


@functools.cache
def wrapper(n):
    """One wrapper for all tests of n devices, so that its programs are compiled once."""
    return jdp.DataParallel(model, devices=range(n))


def number(loss):
    """The loss of the whole batch as one number, which `jax.grad` takes."""

    def number(*args, **kwargs):
        out = loss(*args, **kwargs)
        return out.total / out.count if isinstance(out, jdp.Mean) else jnp.mean(out)

    return number


@functools.cache
def whole(loss, argnums=0):
    """The reference: one device, the whole batch."""
    return jax.jit(jax.value_and_grad(number(loss), argnums))


def chunks(n, *arrays):
    size = -(-len(arrays[0]) // n)
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, len(arrays[0]), size)]


def devices_of(tree):
    return {frozenset(leaf.devices()) for leaf in jax.tree.leaves(tree)}


@pytest.fixture
def float64():
    """For this test alone: the context is part of the key of each of JAX's caches."""
    with jax.enable_x64(True):
        yield


# --- the equation ---

# Every pair of a form, a size, a number of devices and a number of steps is in one of these.
CASES = [
    (FORMS[(i + 2 * j) % 3], SIZES[i], DEVICES[j], STEPS[(i + j) % 4]) for i in range(len(SIZES)) for j in range(4)
]
# tokens on the primary and one more only; microbatches of unequal sizes on replicas with unequal chunks
ODD = [(tokens, 3, 8, 2), (vector, 37, 5, 6), (scalar, 33, 4, 7)]


@pytest.mark.one_case("vector-37-5-6", "tokens-21-8-1")
@pytest.mark.parametrize("loss, size, n, steps", CASES + ODD)
def test_the_mean_over_any_batch_is_exact(float64, loss, size, n, steps):
    x, y, mask = batch(size, np.float64)
    got = wrapper(n).value_and_grad(loss, accumulate_steps=steps)(PARAMS, x, y, mask)
    assert got[0].dtype == np.float64
    close(got, whole(loss)(PARAMS, x, y, mask))


def test_the_cases_hold_every_pair():
    values = FORMS, SIZES, DEVICES, STEPS
    for a in range(4):
        for b in range(a):
            assert len({(case[a], case[b]) for case in CASES}) == len(values[a]) * len(values[b])


@pytest.mark.one_case("scalar-21-3-2")
@pytest.mark.parametrize("loss, size, n, steps", [(scalar, 21, 3, 2), (vector, 24, 8, 1), (tokens, 5, 8, 3)])
def test_float32_is_exact_to_rounding(loss, size, n, steps):
    args = single(PARAMS), *batch(size)
    close(wrapper(n).value_and_grad(loss, accumulate_steps=steps)(*args), whole(loss)(*args))


@pytest.mark.full
def test_a_mean_of_means_would_be_seen():
    """The reference can tell: the mean of the means of 3 and 2 rows is another number."""
    for loss in FORMS:
        means = [float(whole(loss)(PARAMS, *chunk)[0]) for chunk in chunks(2, *batch(5))]
        assert abs(np.mean(means) - float(whole(loss)(PARAMS, *batch(5))[0])) > 1e-3


@pytest.mark.full
def test_grad_is_the_gradient_of_value_and_grad(same):
    args = single(PARAMS), *batch(21)
    dp = wrapper(3)
    same(dp.grad(scalar)(*args), dp.value_and_grad(scalar)(*args)[1])

    def with_aux(*args):
        return scalar(*args), {"vector": vector(*args)}

    (value, aux), grads = dp.value_and_grad(with_aux, has_aux=True)(*args)
    same(dp.grad(with_aux, has_aux=True)(*args), (grads, aux))
    close(dp.grad(tokens, argnums=(0, 1))(*args), whole(tokens, (0, 1))(*args)[1])


@pytest.mark.full
def test_keywords_scalars_and_objects_of_the_batch():
    """Keywords are cut like the rest; what has no rows goes whole to every replica."""

    def loss(params, x, temperature, *, y, kind):
        error = (model(params, x) - y) / temperature
        return jnp.mean(jnp.abs(error) if kind == "l1" else error**2)

    params, (x, y, _) = single(PARAMS), batch(10)
    one = jax.jit(jax.value_and_grad(loss), static_argnames="kind")
    for temperature, kind in ((2.0, "l1"), (np.float32(3), "l2")):
        want = one(params, x, temperature, y=y, kind=kind)
        close(wrapper(3).value_and_grad(loss)(params, x, temperature, y=y, kind=kind), want)


def test_nothing_to_cut():
    """Then the loss runs once, on the primary device."""

    def loss(w, strength=0.5):
        return strength * jnp.sum(w**2)

    w = np.float32([1, -2, 4])
    for args in ((w, np.float32(0.5)), (w,)):
        value, grad = wrapper(3).value_and_grad(loss, accumulate_steps=2)(*args)
        assert float(value) == 10.5
        np.testing.assert_array_equal(grad, w)


def test_a_batch_that_is_a_tree_and_axes_of_ones_own():
    def loss(params, data, shift):
        return jnp.mean((model(params, data["x"].T) - data["y"] + shift) ** 2)

    params, (x, y, _), shift = single(PARAMS), batch(10), np.float32([1, -1])
    args = params, {"x": np.ascontiguousarray(x.T), "y": y}, shift
    # the shift has as many entries as no argument has rows: it is whole
    got = wrapper(3).value_and_grad(loss, in_axes=({"x": 1, "y": 0}, None))(*args)
    close(got, whole(loss)(*args))


def test_another_dim_is_cut():
    """The wrapper's dim is that of the batch; a loss and its aux have their rows along any axis of their own."""
    dp = jdp.DataParallel(model, devices=range(3), dim=-1)

    def loss(params, x):
        return jnp.sum(model(params, x.T) ** 2, axis=1), {"rows": 2 * x, "out": model(params, x.T)}

    def mean(params, x):
        value, aux = loss(params, x)
        return value.mean(), aux

    params, x = single(PARAMS), np.ascontiguousarray(batch(10)[0].T)
    got = dp.value_and_grad(loss, has_aux=True)(params, x)
    close(got, jax.jit(jax.value_and_grad(mean, has_aux=True))(params, x))


def test_every_float_dtype_is_kept():
    """16-bit losses and gradients are added in 32 bits, over 512 microbatches too, and come back as they were."""
    for dtype in (jnp.bfloat16, jnp.float16):
        w, x = np.asarray(1, dtype), np.ones(512, dtype)
        value, grad = wrapper(1).value_and_grad(lambda w, x: w * x, accumulate_steps=512)(w, x)
        # Added up in the 8 bits of bfloat16, ones stop growing at 256, and there are 512.
        assert value.dtype == grad.dtype == dtype and float(value) == float(grad) == 1


@pytest.mark.parametrize("n, steps", [(1, 1), (8, 1), (1, 16)])
def test_float16_gradients_of_any_mean_in_range_are_in_range(n, steps):
    """64 rows of 20000: their mean is a float16, a sum of four of them is not."""
    x = np.full(64, 20000, np.float16)
    value, grad = wrapper(n).value_and_grad(lambda w, x: w * x, accumulate_steps=steps)(np.float16(1), x)
    np.testing.assert_allclose(np.float64([value, grad]), 20000, rtol=2**-9)


def test_float8_gradients_are_added_in_32_bits():
    """JAX promotes no float8 by itself; of 5 rows, the last microbatch has one."""
    w, x = jnp.ones(3, jnp.float8_e4m3fn), np.arange(5, dtype=np.float32)
    loss = lambda w, x: jnp.mean(w.astype(np.float32).sum() * x)  # noqa: E731
    value, grad = wrapper(1).value_and_grad(loss, accumulate_steps=3)(w, x)
    assert float(value) == 6 and grad.dtype == w.dtype and np.float32(grad).tolist() == [2, 2, 2]


def test_numpys_float64_is_jaxs_float():
    """As a metric, and as the dtype to send: JAX would warn that it has none."""
    loss = lambda w, x: (jnp.mean(w * x), np.array(0.5))  # noqa: E731
    value, grad = wrapper(2).value_and_grad(loss, has_aux=True, reduce_dtype=np.float64)(1.0, np.float32([1, 2, 3]))
    assert (*map(float, value), float(grad)) == (2, 0.5, 2)


def test_a_float16_gradient_of_a_total_does_not_overflow():
    """The gradient of a `jdp.Mean` is divided by the count before it is added up, as on one device."""
    x = np.full(64, 20000, np.float16)
    mean = lambda w, x: jdp.Mean(jnp.sum(w * x, dtype=np.float32), x.size)  # noqa: E731
    value, grad = wrapper(2).value_and_grad(mean)(np.float16(1), x)
    np.testing.assert_allclose(np.float64([value, grad]), 20000, rtol=2**-9)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_gradients_where_replicas_have_other_numbers_of_microbatches(dtype):
    """5 rows over 4 are chunks of 2, 2 and 1: the last is one microbatch, whose gradient was added to no other."""
    x = np.arange(5).astype(dtype)
    value, grad = wrapper(4).value_and_grad(lambda w, x: w * x, accumulate_steps=2)(np.asarray(1, dtype), x)
    assert grad.dtype == dtype and float(value) == float(grad) == 2


# --- where results live ---


@pytest.mark.full
@pytest.mark.parametrize("where", ["host", "uncommitted", "primary", "replicated"])
def test_results_come_back_where_the_parameters_live(devices, where):
    params, n = single(PARAMS), 3
    place = {
        "host": lambda tree: tree,
        "uncommitted": lambda tree: jax.tree.map(jnp.asarray, tree),
        "primary": lambda tree: jax.device_put(tree, devices[0]),
        "replicated": lambda tree: jdp.replicate(tree, range(n)),
    }[where]
    home = frozenset(devices[:n]) if where == "replicated" else frozenset(devices[:1])

    def loss(params, x, y, mask):
        return tokens(params, x, y, mask), (vector(params, x, y, mask), jdp.Sum(jnp.sum(mask)))

    for size in (12, 10):  # even and not
        (value, aux), grads = wrapper(n).value_and_grad(loss, has_aux=True)(place(params), *batch(size))
        close((value, grads), whole(tokens)(params, *batch(size)))
        close(aux[0], jax.jit(vector)(params, *batch(size)))
        assert float(aux[1]) == MASK[:size].sum()
        assert devices_of((value, aux, grads)) == {home}


def test_a_batch_on_one_device_or_over_all_is_one_on_the_host(devices):
    params, n = single(PARAMS), 4
    dp = wrapper(n)
    over_all = NamedSharding(Mesh(devices[:n], "i"), PartitionSpec("i"))
    for put in (jnp.asarray, lambda a: jax.device_put(a, devices[5]), lambda a: jax.device_put(a, over_all)):
        args = batch(12)
        close(dp.value_and_grad(scalar)(params, *map(put, args)), whole(scalar)(params, *args))


# --- argnums ---


@pytest.mark.one_case
@pytest.mark.parametrize(
    "loss, argnums, size, n",
    [(scalar, 1, 5, 8), (vector, (2,), 9, 3), (tokens, (0, 1), 5, 8), (scalar, (-3, 0, 2), 12, 3)],
)
def test_argnums_name_what_is_differentiated(loss, argnums, size, n):
    """A cut argument's gradient has its rows, in order, without padding; 5 rows leave 3 of 8 replicas without."""
    args = single(PARAMS), *batch(size)
    close(wrapper(n).value_and_grad(loss, argnums)(*args), whole(loss, argnums)(*args))


class Metrics(NamedTuple):
    loss: Any
    nothing: Any
    rest: Any


@pytest.mark.one_case
@pytest.mark.parametrize("argnums, steps", [(2, 1), ((2, 0), 3)])
def test_argnums_of_several_whole_arguments(argnums, steps):
    """Two trees of parameters, of any containers; the second is not cut, for in_axes says so."""

    def loss(first, x, second, y):
        return jnp.sum((jnp.tanh(x @ first) @ second.loss["w"] - y) ** 2, axis=1)

    first, (x, y, _) = single(PARAMS["in"]["w"]), batch(10)
    second = Metrics(loss={"w": single(PARAMS["out"][0])}, nothing=None, rest=[np.zeros((0, 2), np.float32)])
    vg = wrapper(3).value_and_grad(loss, argnums, in_axes=(0, None, 0), accumulate_steps=steps)
    close(vg(first, x, second, y), whole(loss, argnums)(first, x, second, y))


def test_microbatches_of_another_axis():
    """What is cut along its columns has microbatches of columns."""

    def loss(w, columns, y):
        return jnp.mean((w @ columns - y) ** 2)

    w, columns, y = np.ones(3, np.float32), np.arange(24, dtype=np.float32).reshape(3, 8), np.ones(8, np.float32)
    vg = wrapper(2).value_and_grad(loss, in_axes=(1, 0), accumulate_steps=2)
    close(vg(w, columns, y), jax.value_and_grad(loss)(w, columns, y))


def test_the_count_of_a_mean_is_differentiated():
    """Where it depends on the parameters, as a sum of weights may."""

    def loss(w, x):
        return jdp.Mean(jnp.sum(w * x), jnp.sum(w * w * x))

    x = np.arange(1, 6, dtype=np.float32)
    for n, steps in ((1, 1), (2, 2), (8, 1)):
        found = wrapper(n).value_and_grad(loss, accumulate_steps=steps)(np.float32(2), x)
        np.testing.assert_allclose(found, (0.5, -0.25), rtol=1e-6)  # with a count that is a constant: 0.25
    again = jax.grad(lambda w: wrapper(2).value_and_grad(loss)(w, x)[0])(np.float32(2))
    np.testing.assert_allclose(again, -0.25, rtol=1e-6)


# --- aux ---


CLASSES = 10


def measured(params, x, y, mask, by_length=False):
    """All the forms that aux may have, where chunks and microbatches may have as many rows as there are classes.

    `by_length`: with a number of rows that is a number, so that no trace with a symbolic one can follow.
    """
    rows = len(x) if by_length else x.shape[0]
    out = jnp.tanh(x @ params["in"]["w"])
    scores = out @ jnp.arange(4 * CLASSES, dtype=x.dtype).reshape(4, CLASSES) / 40
    error = jnp.sum((model(params, x) - y) ** 2, axis=1)
    metrics = Metrics(
        loss=jnp.mean(error),
        nothing=None,
        rest={
            "per example": error,
            "scores": scores,  # (rows, classes)
            "turned": scores.T,  # (classes, rows)
            "cube": scores[:, None] * jnp.ones((CLASSES, 1), x.dtype),  # (rows, classes, classes)
            "guess": jnp.argmax(scores, axis=1),
            "right": scores[:, 0] > 0,
            "per class": jdp.Mean(jnp.sum(scores, axis=0), rows),  # (classes,)
            "covariance": jdp.Mean(scores.T @ scores, rows),  # (classes, classes)
            "per token": [jdp.Mean(jnp.sum(mask * error[:, None]), jnp.sum(mask))],
            "per step": jdp.Mean(jnp.sum(mask, axis=0), rows),
            "hits": jdp.Mean(jnp.sum(jnp.argmax(scores, axis=1) == 3), rows),
        },
    )
    return jnp.mean(error), metrics


def measured_whole(*args):
    loss, metrics = measured(*args)
    is_mean = lambda x: isinstance(x, jdp.Mean)  # noqa: E731
    return loss, jax.tree.map(lambda x: x.total / x.count if is_mean(x) else x, metrics, is_leaf=is_mean)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "n, size, steps, by_length",
    # microbatches of 10 rows; of 10 or 9; replicas without rows
    [(1, 40, 4, True), (2, 37, 2, False), (2, 37, 2, True), (8, 5, 3, False)],
)
def test_aux_is_averaged_or_gathered(float64, n, size, steps, by_length):
    """Arrays with an entry per row come back in input order; 10 values of 10 classes are not those of 10 rows."""
    args = PARAMS, *batch(size, np.float64)
    loss = functools.partial(measured, by_length=by_length)
    got = wrapper(n).value_and_grad(loss, has_aux=True, accumulate_steps=steps)(*args)
    want = jax.jit(jax.value_and_grad(measured_whole, has_aux=True))(*args)
    close(got, want)


def test_aux_that_is_nothing_or_one_array():
    args = single(PARAMS), *batch(10)
    (_, got), _ = wrapper(3).value_and_grad(lambda *a: (scalar(*a), (None, ())), has_aux=True)(*args)
    assert got == (None, ())
    (_, got), _ = wrapper(3).value_and_grad(lambda *a: (scalar(*a), a[1]), has_aux=True)(*args)
    np.testing.assert_array_equal(got, args[1])


# --- rows that are not there ---


@pytest.mark.one_case
@pytest.mark.parametrize(
    "form, size, n, steps",
    [("scalar", 1, 8, 1), ("vector", 5, 8, 1), ("tokens", 9, 8, 2), ("scalar", 10, 3, 3), ("tokens", 5, 8, 1)],
)
def test_padding_and_replicas_without_rows_are_never_seen(form, size, n, steps):
    """On zeros each of these is infinite or no number, and so is its gradient."""

    def error(w, x):
        return jnp.log(w * x) + x / jnp.sqrt(w * x) + w / x

    def loss(w, x):
        each = error(w, x)
        out = {"scalar": each.mean(), "vector": each, "tokens": jdp.Mean(each.sum(), x.sum())}[form]
        return out, {"each": each, "log": jnp.log(x).mean(), "ratio": jdp.Mean(jnp.sum(1 / x), jnp.sum(1 / x**2))}

    def of_all(w, x):
        each = error(w, x)
        value = each.sum() / x.sum() if form == "tokens" else each.mean()
        return value, {"each": each, "log": jnp.log(x).mean(), "ratio": jnp.sum(1 / x) / jnp.sum(1 / x**2)}

    args = np.float32(1.5), np.arange(1, size + 1, dtype=np.float32)
    argnums = (0, 1) if steps == 1 else 0  # the count of a Mean is differentiated, and here it is made of rows
    got = wrapper(n).value_and_grad(loss, argnums, has_aux=True, accumulate_steps=steps)(*args)
    close(got, jax.jit(jax.value_and_grad(of_all, argnums, has_aux=True))(*args))


# --- Flax Linen ---


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(8)(x)))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, use_fast_variance=False)(x)
        return nn.Dense(3)(nn.relu(x).mean((1, 2)))


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))


LABELS = np.resize([0, 2, 1, 1], 40)


def variables_of(net, *args, **rngs):
    """Random variables of the right shapes: what `net.init` draws would take longer to compile than the test."""
    shapes = jax.eval_shape(net.init, {"params": jax.random.key(0), **rngs}, *args)
    return jax.tree.map(lambda x: np.random.RandomState(1).randn(*x.shape).astype(x.dtype) / 2, shapes)


def test_linen_mlp():
    """In a replica the wrapper is the model."""
    net, size = MLP(), 21
    dp = jdp.DataParallel(net, devices=range(3))
    x, labels = batch(size)[0], LABELS[:size]
    params = variables_of(net, x)

    def loss(apply, params, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), labels)

    want = whole(functools.partial(loss, net.apply))(params, x, labels)
    close(dp.value_and_grad(functools.partial(loss, dp.apply), accumulate_steps=2)(params, x, labels), want)


@pytest.mark.full
def test_linen_cnn_with_batch_norm_through_aux():
    """Each replica norms its own chunk; the statistics, 4 features for a chunk of 4 rows, are the mean over rows."""
    net, n, size = CNN(), 2, 7
    images = RANDOM.randn(8, 4, 4, 2).astype(np.float32)[:size]
    variables = variables_of(net, images)

    def loss(params, stats, images, labels):
        logits, new = net.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (new["batch_stats"], logits)

    def with_means(*args):
        value, (stats, logits) = loss(*args)
        n = logits.shape[0]
        return value, (jax.tree.map(lambda x: jdp.Mean(x * n, n), stats), logits)

    args = variables["params"], variables["batch_stats"]
    dp = jdp.DataParallel(net, devices=range(n))
    (value, (stats, logits)), grads = dp.value_and_grad(with_means, has_aux=True, in_axes=(None, 0, 0))(
        *args, images, LABELS[:size]
    )
    parts = chunks(n, images, LABELS[:size])
    one = jax.jit(jax.value_and_grad(loss, has_aux=True))
    found = [one(*args, *part) for part in parts]
    weights = [len(part[0]) / size for part in parts]

    def mean(*leaves):
        return sum(w * leaf for w, leaf in zip(weights, leaves, strict=True))

    want_value, want_stats, want_grads = jax.tree.map(mean, *((v, s, g) for (v, (s, _)), g in found))
    close((value, stats, grads), (want_value, want_stats, want_grads))
    close(logits, np.concatenate([out for (_, (_, out)), _ in found]))
    assert np.abs(found[0][0][1][0]["BatchNorm_0"]["mean"] - stats["BatchNorm_0"]["mean"]).max() > 1e-4


def dropping(params, x, key):
    return jnp.mean(Dropping().apply(params, x, rngs={"dropout": key}) ** 2)


@pytest.mark.full
def test_linen_dropout_with_a_key_in_the_batch():
    """One device draws what the bare model draws; of several each draws its own, the primary that of the key."""
    key, (x, _, _) = jax.random.key(1), batch(9)
    params = variables_of(Dropping(), x, dropout=key)
    one = jax.jit(jax.value_and_grad(dropping))
    close(wrapper(1).value_and_grad(dropping)(params, x, key), one(params, x, key))
    keys = [key] + [jax.random.fold_in(key, i) for i in (1, 2)]
    found = [one(params, *part, k) for part, k in zip(chunks(3, x), keys, strict=True)]
    want = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0, dtype=np.float32), *found)
    close(wrapper(3).value_and_grad(dropping)(params, x, key), want)


@pytest.mark.full
def test_every_microbatch_of_every_replica_draws_its_own_numbers():
    def loss(w, x, key):
        return jnp.mean(w * x), jax.random.bits(key, x.shape)

    x, key = np.ones(24, np.float32), jax.random.key(0)
    for n, steps, size in ((3, 4, 2), (1, 5, 5)):  # 24 rows over 5 are 4 of 5 and one of 4
        (_, drawn), _ = wrapper(n).value_and_grad(loss, has_aux=True, accumulate_steps=steps)(np.float32(1), x, key)
        assert drawn.shape == (24,) and len(set(np.asarray(drawn).tolist())) == 24
        np.testing.assert_array_equal(drawn[:size], jax.random.bits(key, (size,)))  # the first is that of the key


@pytest.mark.full
def test_an_array_of_keys_is_cut():
    def loss(w, x, keys):
        return w * x * jax.vmap(jax.random.normal)(keys)

    args = np.float32(2), np.arange(10, dtype=np.float32), jax.random.split(jax.random.key(0), 10)
    close(wrapper(3).value_and_grad(loss, accumulate_steps=2)(*args), whole(loss)(*args))


# --- Flax NNX ---


class Counted(nnx.Variable):
    pass


class Net(nnx.Module):
    """BatchNorm, and a count of the calls."""

    def __init__(self, rngs, norm=True):
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=rngs)  # a bias before BatchNorm has gradient 0
        self.norm = nnx.BatchNorm(4, momentum=0.5, use_fast_variance=False, rngs=rngs) if norm else None
        self.last = nnx.Linear(4, 2, rngs=rngs)
        self.calls = Counted(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.first(x)
        return self.last(nnx.tanh(x if self.norm is None else self.norm(x)))


def nnx_loss(net, x, y):
    return jnp.mean((net(x) - y) ** 2)


nnx_whole = nnx.jit(nnx.value_and_grad(nnx_loss))


def nnx_wrapper(n, **kw):
    return jdp.DataParallel(Net(nnx.Rngs(0), **kw), devices=range(n))


def test_nnx_equals_nnx_value_and_grad():
    """Of a bare module too, and of the wrapper, where the module is `module`."""
    x, y, _ = batch(10)
    net = Net(nnx.Rngs(0), norm=False)
    dp, bare, want = nnx_wrapper(3, norm=False), Net(nnx.Rngs(0), norm=False), nnx_whole(net, x, y)
    value, grads = dp.value_and_grad(nnx_loss, accumulate_steps=2)(dp, x, y)
    assert isinstance(grads, nnx.State)
    close((value, grads["module"]), want)
    close(dp.value_and_grad(nnx_loss, accumulate_steps=2)(bare, x, y), want)
    close(dp.grad(nnx_loss, accumulate_steps=2)(bare, x, y), want[1])


@pytest.mark.full
@pytest.mark.parametrize("n, size", [(1, 5), (8, 9)])
def test_nnx_state_is_updated_in_place(n, size):
    """The primary's, as torch does: its statistics, and one call for one batch."""
    x, y, _ = batch(size)
    dp, net = nnx_wrapper(n), Net(nnx.Rngs(0))
    module, stats = dp.module, dp.module.norm
    value, grads = dp.value_and_grad(nnx_loss)(dp, x, y)
    found = [nnx_whole(net, *chunks(n, x, y)[0])]
    assert dp.module is module and module.norm is stats and int(module.calls[...]) == 1
    close(nnx.state(dp.module, (nnx.BatchStat, Counted)), nnx.state(net, (nnx.BatchStat, Counted)))
    assert devices_of(nnx.state(dp.module)) == {frozenset(jax.devices()[:n])}
    for part in chunks(n, x, y)[1:]:
        found.append(nnx_whole(Net(nnx.Rngs(0)), *part))
    weights = [len(part[0]) / size for part in chunks(n, x, y)]
    want = jax.tree.map(lambda *leaves: sum(w * g for w, g in zip(weights, leaves, strict=True)), *found)
    close((value, grads["module"]), want)


@pytest.mark.full
def test_nnx_state_goes_from_microbatch_to_microbatch():
    """Four calls and four updates of the statistics, as a loop over the microbatches makes them: of 3, 3, 3 and 2."""
    x, y, _ = batch(11)
    dp, net = nnx_wrapper(1), Net(nnx.Rngs(0))
    value, grads = dp.value_and_grad(nnx_loss, accumulate_steps=4)(dp, x, y)
    found = [nnx_whole(net, *part) for part in chunks(4, x, y)]
    assert int(dp.module.calls[...]) == 4
    close(nnx.state(dp.module, nnx.BatchStat), nnx.state(net, nnx.BatchStat))
    weights = [len(part[0]) / 11 for part in chunks(4, x, y)]
    want = jax.tree.map(lambda *leaves: sum(w * g for w, g in zip(weights, leaves, strict=True)), *found)
    close((value, grads["module"]), want)


class Dropper(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1))

    def __call__(self, x):
        return self.dropout(x) * self.scale[...]


@pytest.mark.full
def test_nnx_dropout_draws_anew_in_every_replica_and_microbatch():
    """One device draws what the bare module draws; the count of draws goes on in place, the key stays."""

    def loss(net, x):
        y = net(x)
        return y.mean(), y

    x, net, one = np.ones((32, 32), np.float32), Dropper(nnx.Rngs(0)), jdp.DataParallel(Dropper(nnx.Rngs(0)), [0])
    want = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(net, x)
    close(one.value_and_grad(loss, has_aux=True)(one.module, x), want)
    dp = jdp.DataParallel(Dropper(nnx.Rngs(0)), range(2))
    (_, y), _ = dp.value_and_grad(loss, has_aux=True, accumulate_steps=4)(dp.module, x)
    masks = {np.asarray(part).tobytes() for part in np.split(np.asarray(y), 8)}
    assert len(masks) == 8 and abs(np.mean(y) - 1) < 0.2
    assert [int(count) for count in jax.tree.leaves(nnx.state(dp.module, nnx.RngCount))] == [4]
    keys = [nnx.state(module, nnx.RngKey) for module in (dp.module, net)]
    np.testing.assert_array_equal(*[jax.random.key_data(jax.tree.leaves(key)[0]) for key in keys])


def test_nnx_diff_state_chooses_the_variables():
    x, y, _ = batch(10)
    wrt = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("kernel")))
    want = nnx.jit(nnx.value_and_grad(nnx_loss, argnums=wrt))(Net(nnx.Rngs(0), norm=False), x, y)
    assert len(jax.tree.leaves(want[1])) == 2
    dp = nnx_wrapper(3, norm=False)
    close(dp.value_and_grad(nnx_loss, argnums=wrt)(Net(nnx.Rngs(0), norm=False), x, y), want)


@pytest.mark.full
def test_nnx_optimizer_takes_the_wrappers_gradients():
    """Three steps, uneven, are three steps of the bare model, for the wrapper as for its parameters."""
    x, y, _ = batch(10)
    dp, net = nnx_wrapper(3, norm=False), Net(nnx.Rngs(0), norm=False)
    tx = optax.adam(0.1)
    ours, theirs = nnx.Optimizer(dp, tx, wrt=nnx.Param), nnx.Optimizer(net, tx, wrt=nnx.Param)
    start = nnx.clone(net)
    for _ in range(3):
        value, grads = dp.value_and_grad(nnx_loss)(dp, x, y)
        ours.update(dp, grads)
        want, want_grads = nnx_whole(net, x, y)
        theirs.update(net, want_grads)
        close(value, want)
    close(nnx.state(dp.module), nnx.state(net))
    assert np.abs(start.last.kernel[...] - net.last.kernel[...]).max() > 0.1


@pytest.mark.full
def test_nnx_with_aux_and_two_modules():
    """The second is not differentiated, but its state is updated all the same."""
    x, y, _ = batch(10)

    def loss(net, x, y, teacher):
        return jnp.mean((net(x) - y - teacher(x)) ** 2), {"out": net(x)}

    def modules():
        return Net(nnx.Rngs(0), norm=False), Net(nnx.Rngs(1), norm=False)

    (net, teacher), (bare, bare_teacher) = modules(), modules()
    dp = nnx_wrapper(2, norm=False)
    got = dp.value_and_grad(loss, has_aux=True)(net, x, y, teacher)
    close(got, nnx.jit(nnx.value_and_grad(loss, has_aux=True))(bare, x, y, bare_teacher))
    assert int(net.calls[...]) == 2 and int(teacher.calls[...]) == 1
    got = dp.value_and_grad(loss, argnums=(0, 3), has_aux=True)(net, x, y, teacher)
    close(got, nnx.jit(nnx.value_and_grad(loss, argnums=(0, 3), has_aux=True))(bare, x, y, bare_teacher))


def test_nnx_in_nnx_jit():
    x, y, _ = batch(10)
    dp, net = nnx_wrapper(3, norm=False), Net(nnx.Rngs(0), norm=False)
    value, grads = nnx.jit(lambda dp, x, y: dp.value_and_grad(nnx_loss)(dp, x, y))(dp, x, y)
    want, want_grads = nnx_whole(net, x, y)
    close((value, grads["module"]), (want, want_grads))
    assert int(dp.module.calls[...]) == 1


# --- inside transformations ---


def test_in_jit():
    """Uneven, in microbatches, of parameters that are replicated."""
    params = jdp.replicate(single(PARAMS), range(3))
    step = jax.jit(wrapper(3).value_and_grad(tokens, accumulate_steps=2))
    close(step(params, *batch(10)), whole(tokens)(params, *batch(10)))


def penalty(grad, params, *rows):
    """Of the gradient, so that its own gradient is a second derivative."""
    return sum(jnp.sum(g**2) for g in jax.tree.leaves(grad(params, *rows)))


@pytest.mark.full
@pytest.mark.parametrize("jit", [False, True])
def test_the_gradient_of_a_gradient(float64, jit):
    """Twice differentiable, in the parameters and in the rows."""
    wrap = jax.jit if jit else lambda f: f
    args, steps = (PARAMS, *batch(10 if jit else 12, np.float64)), 2 if jit else 1
    ours = functools.partial(penalty, wrapper(3).grad(scalar, accumulate_steps=steps))
    theirs = functools.partial(penalty, jax.grad(scalar))
    close(wrap(jax.value_and_grad(ours, (0, 1)))(*args), jax.jit(jax.value_and_grad(theirs, (0, 1)))(*args))


@pytest.mark.full
def test_a_hessian_times_a_vector(float64):
    """Forward through the gradient, uneven."""

    def product(grad):
        ones = jax.tree.map(np.ones_like, PARAMS)
        return jax.jit(lambda p: jax.jvp(lambda p: grad(p, *batch(10, np.float64)), (p,), (ones,)))(PARAMS)

    close(product(wrapper(3).grad(scalar)), product(jax.grad(scalar)))


@pytest.mark.full
def test_in_vmap():
    """Over several sets of parameters, as an ensemble has them."""
    params = jax.tree.map(lambda w: np.float32([w, -2 * w]), PARAMS)
    got = jax.vmap(lambda p: wrapper(3).value_and_grad(scalar, accumulate_steps=2)(p, *batch(10)))(params)
    for i in range(2):
        one = jax.tree.map(lambda w, i=i: w[i], params)
        close(jax.tree.map(lambda w, i=i: w[i], got), whole(scalar)(one, *batch(10)))


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("size, steps", [(6, 1), (5, 2)])
def test_in_a_scan_over_steps(size, steps):
    data = [rows.reshape(4, size, -1) for rows in batch(4 * size)]

    def train(value_and_grad):
        def step(params, rows):
            value, grads = value_and_grad(params, *rows)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

        return jax.jit(lambda params: lax.scan(step, params, tuple(data)))(single(PARAMS))

    got = train(wrapper(3).value_and_grad(scalar, accumulate_steps=steps))
    assert got[1].shape == (4,)
    close(got, train(jax.value_and_grad(scalar)))


@pytest.mark.one_case("shard_map-tokens")
@pytest.mark.parametrize("around, form", [("shard_map", tokens), ("pmap", vector), ("parallel_apply", scalar)])
def test_inside_another_replica_it_runs_directly(devices, same, around, form):
    """What is there is the batch; it is `jax.value_and_grad` to the last bit, and nothing is cut again."""
    args = batch(12)

    def loss(params, x, y, mask):
        return form(params, x, y, mask), {"mean": jdp.Mean(jnp.sum(mask), len(x)), "rows": x}

    def plain(params, x, y, mask):
        return number(form)(params, x, y, mask), {"mean": jnp.sum(mask) / len(x), "rows": x}

    def run(value_and_grad):
        def body(params, *rows):
            (value, aux), grads = value_and_grad(params, *rows)
            return lax.all_gather((value, grads, aux["mean"]), "data"), aux["rows"]

        if around == "parallel_apply":
            return jdp.parallel_apply(body, single(PARAMS), jdp.scatter(args, range(4)))[3]
        if around == "pmap":
            cut = [a.reshape(4, 3, -1) for a in args]
            return jax.pmap(body, "data", in_axes=(None, 0, 0, 0), devices=devices[:4])(single(PARAMS), *cut)
        specs = PartitionSpec(), *[PartitionSpec("data")] * 3
        mesh = Mesh(devices[:4], "data")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
        return jax.jit(mapped)(single(PARAMS), *args)

    got = run(wrapper(8).value_and_grad(loss, has_aux=True, accumulate_steps=2))
    same(got, run(jax.value_and_grad(plain, has_aux=True)))


@pytest.mark.full
def test_inside_another_replica_nnx_runs_directly(devices):
    """The module is the replica's own; its state is updated there, and the caller sees nothing of it."""
    x, y, _ = batch(12)

    def body(value_and_grad):
        def run(state, x, y):
            net = nnx.merge(nnx.graphdef(Net(nnx.Rngs(0))), state)
            value, grads = value_and_grad(net, x, y)
            return lax.pmean((value, grads), "i"), net.calls[...]

        mesh, rows = Mesh(devices[:4], "i"), PartitionSpec("i")
        specs = dict(in_specs=(PartitionSpec(), rows, rows), out_specs=PartitionSpec(), check_vma=False)
        return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(nnx.state(Net(nnx.Rngs(0))), x, y)

    got, calls = body(nnx_wrapper(2).value_and_grad(nnx_loss))
    close(got, body(nnx.value_and_grad(nnx_loss))[0])
    assert int(calls) == 1


@pytest.mark.full
def test_the_sum_of_pmaps_gradients(devices, same):
    """On even batches it is `lax.psum` of the gradients of each device's share, to the last bit.

    On 2, 4 and 8 devices that is `lax.pmean` of `jax.value_and_grad`, because a share is rounded on other numbers only.
    """
    args = batch(24)

    def mean(share, params, *rows):
        return lax.pmean(jax.value_and_grad(scalar)(params, *rows), "i")

    def shares(share, params, *rows):
        loss, pull = jax.vjp(lambda params: scalar(params, *rows), params)
        return lax.pmean(loss, "i"), lax.psum(pull(share)[0], "i")

    for n in (2, 3, 4, 6, 8):
        cut = [a.reshape(n, 24 // n, -1) for a in args]
        got = wrapper(n).value_and_grad(scalar)(single(PARAMS), *args)
        for fn, compare in ((shares, same), (mean, same if n in (2, 4, 8) else close)):
            mapped = jax.pmap(fn, "i", in_axes=(None, None, 0, 0, 0), out_axes=None, devices=devices[:n])
            compare(got, mapped(np.float32(1 / n), single(PARAMS), *cut))


# --- what the program does ---


def collectives(hlo):
    """The bytes of all collectives, and the names of the computations in loops that have one."""
    found = computations(hlo)
    looped = in_loops(found)
    assert looped, "the microbatches are no loop"
    places = [(name, match) for name, lines in found.items() for line in lines if (match := COLLECTIVE.search(line))]
    return sum(size_in_bytes(match[1]) for _, match in places), [name for name, _ in places if name in looped]


def wide():
    """Parameters, and their bytes: so many that a few scalars do not count."""
    params = {"in": {"w": np.ones((3, 64)), "b": np.ones(64)}, "out": [np.ones((64, 2))]}
    params = single(params)
    return params, sum(w.nbytes for w in jax.tree.leaves(params))


@pytest.mark.one_case
@pytest.mark.parametrize("loss, size", [(scalar, 64), (tokens, 64), (scalar, 61)])
def test_one_reduction_per_gradient_whatever_the_steps(loss, size):
    """No collective in a loop, and the gradients' bytes once, with the loss and its count."""
    params, weight = wide()
    rows = [np.resize(a, (size, a.shape[1])) for a in batch(8)]
    step = jax.jit(wrapper(8).value_and_grad(loss, accumulate_steps=4))
    sent, looped = collectives(step.lower(params, *rows).compile().as_text())
    assert not looped and weight < sent <= weight + 16


def test_a_reduction_in_a_loop_would_be_seen(devices):
    """The check finds the collectives that a loop over the whole gradient makes, and their bytes."""
    params, weight = wide()

    def body(params, *rows):
        def step(sums, part):
            grads = lax.psum(jax.grad(scalar)(params, *part), "i")
            # It depends on the turn, or XLA would take it out of the loop.
            return jax.tree.map(lambda a, b: jnp.sin(a + b), sums, grads), None

        return lax.scan(step, jax.tree.map(jnp.zeros_like, params), rows)[0]

    rows = [np.resize(a, (4, 8, a.shape[1])) for a in batch(8)]
    specs = PartitionSpec(), *[PartitionSpec(None, "i")] * 3
    mesh = Mesh(devices, "i")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    sent, looped = collectives(jax.jit(mapped).lower(params, *rows).compile().as_text())
    assert looped and sent == weight


def test_gradients_travel_in_the_dtype_that_is_asked_for():
    """bfloat16 halves the bytes of float32; the loss stays in float32."""
    params, weight = wide()
    rows = [np.resize(a, (64, a.shape[1])) for a in batch(8)]
    step = jax.jit(wrapper(8).value_and_grad(scalar, accumulate_steps=4, reduce_dtype=jnp.bfloat16))
    lowered = step.lower(params, *rows)
    # In StableHLO, for XLA's CPU compiler has no all-reduce of bfloat16 and makes one of float32 out of it.
    types = re.findall(r"stablehlo\.all_reduce.*?\}\) : \((.*?)\) ->", lowered.as_text(), re.DOTALL)
    arrays = re.findall(r"tensor<((?:\d+x)*)(\w+)>", " ".join(types))
    sent = [(kind, BYTES[kind] * int(np.prod([int(d) for d in dims.split("x") if d]))) for dims, kind in arrays]
    assert sum(size for kind, size in sent if kind == "bf16") == weight / 2
    assert sum(size for kind, size in sent if kind != "bf16") == 4
    assert not collectives(lowered.compile().as_text())[1]


@pytest.mark.one_case
@pytest.mark.parametrize("loss", [scalar, tokens])
def test_what_travels_in_bfloat16_is_near_and_comes_back_in_its_own_dtype(loss):
    args = single(PARAMS), *batch(21)
    value, grads = wrapper(8).value_and_grad(loss, reduce_dtype=jnp.bfloat16)(*args)
    want, want_grads = whole(loss)(*args)
    close(value, want)
    off = 0
    for got, grad in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert got.dtype == np.float32
        # Each summand is rounded to 8 bits, and so may be each of the sums.
        np.testing.assert_allclose(got, grad, rtol=0, atol=2**-7 * np.abs(grad).max())
        off = max(off, np.abs(got - grad).max())
    assert off > 1e-5  # it did travel in bfloat16


@pytest.mark.full
def test_microbatches_take_the_memory_of_one():
    """Eight of them keep an eighth of the activations of a deep model; the gradients are small here."""
    params = [np.ones((32, 32), np.float32)] * 8
    x = np.ones((4096, 32), np.float32)

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def memory(steps):
        step = jax.jit(wrapper(2).value_and_grad(loss, accumulate_steps=steps))
        return step.lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert memory(1) > 8 * x.nbytes / 2  # a replica's activations
    assert memory(8) < memory(1) / 4


# --- compiled once ---


def test_compiled_once_for_the_same_loss_and_shapes(compilations):
    """A wrapper of the loss made anew, in every step, costs nothing; a size seen before neither."""
    dp, params = jdp.DataParallel(model, devices=range(3)), jdp.replicate(single(PARAMS), range(3))

    def loss(params, x, y, mask):
        return tokens(params, x, y, mask)

    def step(size, **kw):
        before = [a + 1 for a in batch(size)]  # other values
        jax.block_until_ready(dp.value_and_grad(loss, **kw)(params, *before))

    compilations()
    step(12)
    assert compilations() == 1
    step(12)
    assert compilations() == 0
    vg = dp.value_and_grad(loss)
    vg(params, *batch(12))
    vg(params, *batch(12))
    dp.grad(loss)(params, *batch(12))
    assert compilations() == 0
    step(12, accumulate_steps=2)
    step(10)
    assert compilations() > 0
    for size, kw in ((12, {"accumulate_steps": 2}), (10, {}), (12, {}), (10, {})):
        step(size, **kw)
    assert compilations() == 0


def test_traced_once(traced):
    """And once more with a symbolic number of rows, which tells that the scalar is a mean."""
    dp, loss = wrapper(2), traced(lambda params, x, y, mask: scalar(params, x, y, mask))
    for place in (lambda a: a, jnp.asarray):
        for _ in range(2):
            dp.value_and_grad(loss)(single(PARAMS), *map(place, batch(8)))
    assert [*map(str, loss.shapes)] == ["(4, 3)", "(b, 3)"]


def test_a_loss_and_a_wrapper_that_are_dropped_are_freed():
    dp = jdp.DataParallel(model, devices=range(2))

    def loss(params, x, y, mask):
        return scalar(params, x, y, mask)

    dp.value_and_grad(loss)(single(PARAMS), *batch(4))
    refs = weakref.ref(loss), weakref.ref(dp), weakref.ref(dp._config)
    del loss, dp
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


# --- errors ---

GOOD = single(PARAMS), *batch(10)


def returns(value):
    """A loss function that returns `value(error, rows)`, whatever it is."""
    return lambda params, x, y, mask: value(vector(params, x, y, mask), len(x))


THREE = r"real scalar .*vector with one entry per row, or jdp\.Mean\(total, count\)"
LOSSES = {
    "a matrix": (lambda e, n: jnp.stack([e, e], 1), r"float32\[5, 2\] for 5 rows; it is a " + THREE),
    "one column": (lambda e, n: e[:, None], r"float32\[5, 1\] for 5 rows; it is a " + THREE),
    "too long": (lambda e, n: jnp.append(e, e[0]), r"float32\[6\] for 5 rows; it is a " + THREE),
    "an integer": (lambda e, n: jnp.sum(e > 0), r"int32\[\] for 5 rows; it is a " + THREE),
    "a Python integer": (lambda e, n: 1, "the loss is int; it is a " + THREE),
    "bools": (lambda e, n: e > 0, r"bool\[5\] for 5 rows; it is a " + THREE),
    "complex": (lambda e, n: e.sum() * 1j, r"complex64\[\] for 5 rows; it is a " + THREE),
    "a string": (lambda e, n: "loss", "the loss is str; it is a " + THREE),
    "None": (lambda e, n: None, "the loss is NoneType; it is a " + THREE),
    "a pair": (lambda e, n: (e.mean(), e), "the loss is tuple; it is a " + THREE + ".*, or pass has_aux=True"),
    "a vector of totals": (lambda e, n: jdp.Mean(e, n), r"jdp\.Mean of float32\[5\] and int32\[\]; it is a " + THREE),
    "counts": (lambda e, n: jdp.Mean(e.sum(), e), r"jdp\.Mean of float32\[\] and float32\[5\]; it is a " + THREE),
    "hits": (lambda e, n: jdp.Mean(jnp.sum(e > 0), n), r"jdp\.Mean of int32\[\] and int32\[\]; it is a " + THREE),
}


NO_MEANS = {
    "text": (lambda e, n: jdp.Mean("a", n), THREE),
    "count of text": (lambda e, n: jdp.Mean(e.sum(), "n"), THREE),
    "count of None": (lambda e, n: jdp.Mean(e.sum(), None), THREE),
}


def still_right():
    """A call that was refused leaves everything as it was."""
    close(wrapper(2).value_and_grad(scalar)(*GOOD), whole(scalar)(*GOOD))


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_of_none_of_the_three_forms(refused, what):
    value, match = LOSSES[what]
    with refused(TypeError, "value_and_grad", match):
        wrapper(2).value_and_grad(returns(value))(*GOOD)
    still_right()


@pytest.mark.parametrize("what", NO_MEANS)
def test_a_mean_of_what_is_no_number(refused, what):
    """As a loss and as a metric."""
    value, match = NO_MEANS[what]
    with refused(TypeError, "value_and_grad", match):
        wrapper(2).value_and_grad(returns(value))(*GOOD)
    with refused(TypeError, "value_and_grad", r"\['metric'\].*jdp\.Mean"):
        metric = returns(lambda e, n: (e.mean(), {"metric": value(e, n)}))
        wrapper(2).value_and_grad(metric, has_aux=True)(*GOOD)
    still_right()


@pytest.mark.parametrize("inside", [False, True])
def test_a_bad_loss_in_jit_and_in_a_loop_of_microbatches(refused, inside):
    vg = wrapper(2).value_and_grad(returns(lambda e, n: "loss"), accumulate_steps=3)
    with refused(TypeError, "value_and_grad", THREE):
        (jax.jit(vg) if inside else vg)(*GOOD)
    still_right()


@pytest.mark.parametrize(
    "aux, match",
    [
        ({"hits": jnp.int32(3)}, r"\['hits'\] is int32\[\]; with the loss come .* jdp\.Mean"),
        ({"name": ["text"]}, r"\['name'\]\[0\] is a str; with the loss come"),
        (3, "aux is a int; with the loss come"),
        ({"per class": jnp.arange(7)}, r"\['per class'\] is int32\[7\]; with the loss come"),
    ],
)
def test_aux_of_none_of_the_forms(refused, aux, match):
    with refused(TypeError, "value_and_grad", match):
        wrapper(2).value_and_grad(lambda *args: (scalar(*args), aux), has_aux=True)(*GOOD)
    still_right()


@pytest.mark.parametrize(
    "out, match",
    [
        (lambda e: e, "returns a .*; it must be a pair then"),
        (lambda e: (e.mean(), 1.0, 2.0), "returns a tuple of 3; it must be a pair then"),
        (lambda e: {"loss": e}, "returns a dict; it must be a pair then"),
    ],
)
def test_has_aux_without_a_pair(refused, out, match):
    with refused(TypeError, "value_and_grad", "has_aux is True, and the function " + match):
        wrapper(2).value_and_grad(returns(lambda e, n: out(e)), has_aux=True)(*GOOD)
    still_right()


@pytest.mark.parametrize("leaf", [np.int32(1), 1, np.ones(2, bool)])
def test_parameters_without_a_gradient(refused, leaf):
    params = {**GOOD[0], "steps": {"n": leaf}}
    with refused(TypeError, "value_and_grad", r"\['steps'\]\['n'\] is of dtype (int32|bool)"):
        wrapper(2).value_and_grad(scalar)(params, *GOOD[1:])
    with refused(TypeError, "value_and_grad", r"args\[1\] is of dtype int64"):
        wrapper(2).value_and_grad(scalar, argnums=1)(GOOD[0], np.ones((10, 3), np.int64), *GOOD[2:])
    still_right()


@pytest.mark.full
def test_nnx_parameters_without_a_gradient(refused):
    dp = nnx_wrapper(2, norm=False)
    x, y, _ = batch(4)
    with refused(TypeError, "value_and_grad", r"calls.* is of dtype int32"):
        dp.value_and_grad(nnx_loss, argnums=nnx.DiffState(0, (nnx.Param, Counted)))(dp, x, y)
    assert int(dp.module.calls[...]) == 0
    with refused(TypeError, "value_and_grad", THREE):
        dp.value_and_grad(lambda net, x, y: net(x))(dp, x, y)
    assert int(dp.module.calls[...]) == 0  # nor is a tracer left in it
    close(dp.value_and_grad(nnx_loss)(dp, x, y)[0], nnx_loss(Net(nnx.Rngs(0), norm=False), x, y))
    assert int(dp.module.calls[...]) == 1


def test_no_rows(refused):
    """In jit, too."""
    for wrap in (lambda f: f, jax.jit):
        with refused(ValueError, "value_and_grad", "the batch has 0 rows"):
            wrap(wrapper(2).value_and_grad(scalar))(GOOD[0], *batch(0))
    still_right()


CALLS = {
    "steps 0": (ValueError, "accumulate_steps is 0", lambda dp: dp.value_and_grad(scalar, accumulate_steps=0)),
    "steps -1": (ValueError, "accumulate_steps is -1", lambda dp: dp.grad(scalar, accumulate_steps=-1)),
    "steps True": (ValueError, "accumulate_steps is True", lambda dp: dp.value_and_grad(scalar, accumulate_steps=True)),
    "steps 1.5": (ValueError, "accumulate_steps is 1.5", lambda dp: dp.value_and_grad(scalar, accumulate_steps=1.5)),
    "steps of rows": (
        ValueError,
        "argnums names an argument that is cut, and accumulate_steps is 2",
        lambda dp: dp.value_and_grad(scalar, (0, 1), accumulate_steps=2),
    ),
    "int dtype": (TypeError, "reduce_dtype is .*int8", lambda dp: dp.value_and_grad(scalar, reduce_dtype=jnp.int8)),
    "no dtype": (TypeError, "reduce_dtype is 'half a byte'", lambda dp: dp.grad(scalar, reduce_dtype="half a byte")),
    "argnums 4": (ValueError, "argnums has 4 for 4 arguments", lambda dp: dp.value_and_grad(scalar, 4)),
    "argnums -5": (ValueError, "argnums has -5 for 4 arguments", lambda dp: dp.grad(scalar, (0, -5))),
    "argnums name": (TypeError, "argnums is 'params'", lambda dp: dp.value_and_grad(scalar, "params")),
    "argnums True": (TypeError, "argnums is True", lambda dp: dp.value_and_grad(scalar, True)),
    "argnums none": (TypeError, r"argnums is \(\)", lambda dp: dp.value_and_grad(scalar, ())),
    "short in_axes": (ValueError, "in_axes has 2 entries for 3", lambda dp: dp.value_and_grad(scalar, in_axes=(0, 0))),
    "long in_axes": (ValueError, "in_axes has 4 entries for 3", lambda dp: dp.grad(scalar, in_axes=[0] * 4)),
    "no axis": (IndexError, "Dimension out of range", lambda dp: dp.grad(scalar, in_axes=(0, 0, 2))),
    "no function": (TypeError, "loss_fn is a float", lambda dp: dp.value_and_grad(3.0)),
}


@pytest.mark.parametrize("what", CALLS)
def test_options_and_arguments_that_do_not_fit(refused, what):
    kind, match, make = CALLS[what]
    with refused(kind, "value_and_grad", match):
        make(wrapper(2))(*GOOD)
    still_right()


def test_arguments_that_do_not_fit(refused):
    vg = wrapper(2).value_and_grad(scalar)
    with refused(TypeError, "value_and_grad", "no arguments"):
        vg()
    with refused(ValueError, "value_and_grad", "10.* 9|9.* 10"):
        vg(*GOOD[:3], GOOD[3][:9])
    still_right()


def test_parameters_on_another_device(devices):
    """In torch's words, with the path that the caller knows."""
    match = r"^jdp\.value_and_grad: (args\[0\])?\['in'\]\['b'\]: module must have .* found one of them on device: .*5"
    with pytest.raises(RuntimeError, match=match):
        wrapper(2).value_and_grad(scalar)(jax.device_put(GOOD[0], devices[5]), *GOOD[1:])
    still_right()


def test_parameters_that_are_no_numbers(refused):
    with refused(TypeError, "value_and_grad", r"\['name'\]"):
        wrapper(2).value_and_grad(scalar)({**GOOD[0], "name": "text"}, *GOOD[1:])
    still_right()


def test_an_error_of_the_loss_keeps_its_type_and_says_where():
    def loss(params, x, y, mask):
        return params["nowhere"]

    for steps in (1, 2):
        with pytest.raises(KeyError, match="nowhere") as info:
            wrapper(2).value_and_grad(loss, accumulate_steps=steps)(*GOOD)
        assert any("Caught KeyError in replica 0" in note for note in info.value.__notes__)
    still_right()


def test_a_loss_that_is_reduced_already(refused):
    """As a step for jax.pmap does it: the mean of means of as many rows is the mean; all else would be added twice."""

    def reduced(*args):
        return lax.pmean(scalar(*args), "data")

    close(wrapper(2).value_and_grad(reduced)(*GOOD), whole(scalar)(*GOOD))
    match = r"the loss is reduced over 'data' already \(psum at test_value_and_grad\.py:\d+\).*criterion="
    with refused(ValueError, "value_and_grad", match):
        wrapper(2).value_and_grad(reduced, accumulate_steps=2)(*GOOD)
    with refused(ValueError, "value_and_grad", match):
        wrapper(2).value_and_grad(lambda *args: lax.psum(jnp.sum(vector(*args)), "data"))(*GOOD)
    match = r"the loss is .* a sum over the replicas already.*\(psum at test_value_and_grad\.py:\d+\).*criterion="
    for again in (
        lambda *args: jdp.Sum(lax.psum(jnp.sum(vector(*args)), "data")),
        lambda *args: jdp.Mean(lax.psum(jnp.sum(vector(*args)), "data"), lax.psum(5, "data")),
        lambda *args: lax.psum(scalar(*args), "data"),
        lambda *args: jax.jit(lambda x: lax.psum(x, "data"))(scalar(*args)),
    ):
        with refused(TypeError, "value_and_grad", match):
            wrapper(2).value_and_grad(again)(*GOOD)
    still_right()


def test_collectives_of_the_loss_and_uneven_rows(refused):
    """A loss may talk to the other replicas on an even batch; else it would wait forever."""

    def loss(params, x, y, mask):
        return scalar(params, x - lax.pmean(x.mean(0), "data"), y, mask)

    def centred(params, x, y, mask):
        return scalar(params, x - x.mean(0), y, mask)

    close(wrapper(2).value_and_grad(loss)(*GOOD), whole(centred)(*GOOD))
    with refused(
        ValueError,
        "value_and_grad",
        r"(pmean|psum).*chunks are \(5, 4\).* or leave the collectives out.* is criterion=",
    ):
        wrapper(2).value_and_grad(loss)(GOOD[0], *batch(9))
    still_right()


@pytest.mark.one_case("all pairs")
@pytest.mark.parametrize("which", ["all pairs", "balance of experts"])
def test_losses_that_gather_by_themselves(refused, which):
    """As a step of DDP does: right on even chunks; on uneven ones the error names `criterion=`."""

    def pairs(z, y):  # a contrastive loss of all rows
        return optax.softmax_cross_entropy_with_integer_labels(z @ jnp.tanh(z).T, jnp.arange(len(z))).mean()

    def gathered_pairs(z, y):
        return pairs(lax.all_gather(z, "data", tiled=True), y)

    def balanced(z, y, mean=lambda x: x):
        shares = jax.nn.softmax(z)
        used = (shares == shares.max(1, keepdims=True)).astype(z.dtype)
        return ((z - y) ** 2).mean() + 4 * (mean(used.mean(0)) * mean(shares.mean(0))).sum()

    def balanced_over_replicas(z, y):
        return balanced(z, y, lambda x: lax.pmean(x, "data"))

    one, own = {"all pairs": (pairs, gathered_pairs)}.get(which, (balanced, balanced_over_replicas))

    def of(loss):
        return lambda params, x, y, mask: loss(model(params, x), y)

    close(wrapper(2).value_and_grad(of(own))(*GOOD), whole(of(one))(*GOOD))
    with refused(ValueError, "value_and_grad", "criterion="):
        wrapper(2).value_and_grad(of(own))(GOOD[0], *batch(9))
    with refused(TypeError, "value_and_grad", "criterion="):
        wrapper(2).value_and_grad(of(one))(*GOOD)
    still_right()


@pytest.mark.parametrize("rows", [2, 10])
def test_boxes_with_the_number_of_their_image(rows):
    """Boxes of all images that go whole to each replica, or that are cut because they are as many as the images."""
    boxes = np.linspace(0, 1, 2 * rows, dtype=np.float32).reshape(rows, 2)
    boxes[:, 0] = np.arange(rows) * 3 % 10

    def loss(params, batch):
        x, boxes = batch
        return ((model(params, x)[boxes[:, 0].astype(int), 0] - boxes[:, 1]) ** 2).mean()

    for options in [{"in_axes": ((0, None),)}] + [{}] * (rows == 10):
        with pytest.raises(TypeError, match=r"^jdp\.value_and_grad: the loss .*\(gather at .*criterion="):
            wrapper(2).value_and_grad(loss, **options)(GOOD[0], (GOOD[1], boxes))


def test_a_variable_in_two_arguments_is_refused():
    a, b = nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nnx.Linear(6, 4, rngs=nnx.Rngs(1))
    b.kernel = a.kernel
    dp = jdp.DataParallel(a, devices=[0, 1])
    with pytest.raises(ValueError, match=r"kernel is in args\[1\] and in another argument; a variable has one grad"):
        dp.value_and_grad(lambda a, b, x: (a(x) + b(x)).mean(), argnums=1, in_axes=(None, 0))(a, b, INPUTS)


# --- complex parameters, as of a layer that learns in Fourier space ---

SPECTRAL = {
    "w": (np.linspace(-1, 1, 12).reshape(3, 4) + 1j * np.linspace(1, -2, 12).reshape(3, 4)).astype(np.complex64),
    "b": np.linspace(0, 1, 4, dtype=np.float32),
}


def spectral(params, x):
    return jnp.abs(jnp.fft.ifft(x @ params["w"])) ** 2 + params["b"]


WAYS = {
    "scalar": (lambda p, x: jnp.mean(spectral(p, x) ** 2), {}),
    "vector": (lambda p, x: jnp.mean(spectral(p, x) ** 2, axis=1), {}),
    "marker": (lambda p, x: jdp.Mean(jnp.sum(spectral(p, x) ** 2), 4 * len(x)), {}),
    "criterion": (spectral, {"criterion": lambda out, x: jnp.mean(out**2)}),
    "complex outputs": (
        lambda p, x: (jnp.fft.ifft(x @ p["w"]), jnp.broadcast_to(p["b"], (len(x), 4))),
        {"criterion": lambda out, x: jnp.mean((jnp.abs(out[0]) ** 2 + out[1]) ** 2)},
    ),
}


@pytest.mark.each_pair
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [8, 10, 3])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_complex_parameters(way, steps, rows):
    """By JAX's convention, in which a gradient is the conjugate of torch's."""
    loss_fn, options = WAYS[way]
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    found = jdp.DataParallel(spectral, range(4)).value_and_grad(loss_fn, accumulate_steps=steps, **options)(SPECTRAL, x)
    want = jax.value_and_grad(WAYS["scalar"][0])(SPECTRAL, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, want)


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("n", [1, 4])
def test_rows_that_come_by_keyword_alone_weigh_a_sum_of_terms(n, steps):
    x = np.arange(1, 10, dtype=np.float32)

    def loss(w, mean, total, *, x):
        e = w * x
        return mean(e.sum(), x.size) + total(e.sum()) + e.mean()

    got = jdp.DataParallel(lambda w, x: w * x, range(n)).value_and_grad(
        lambda w, *, x: loss(w, jdp.Mean, jdp.Sum, x=x), accumulate_steps=steps
    )(2.0, x=x)
    want = jax.value_and_grad(lambda w: loss(w, jnp.divide, lambda t: t, x=x))(2.0)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_one_number_for_each_uneven_replica_is_weighed_by_its_rows():
    """10 rows are 3, 3, 3 and 1 of 4 replicas, whose means are the batch here."""
    mean = jdp.parallel_apply(lambda w, x: x.mean(), 1.0, jdp.scatter((np.arange(10, dtype=np.float32),), range(4)))
    dp = jdp.DataParallel(lambda w, h: w * h, range(4))
    loss, grad = dp.value_and_grad(lambda w, h: w * h)(np.float32(2), mean)
    np.testing.assert_allclose((loss, grad), (9, 4.5), rtol=1e-6)


def test_an_nnx_object_and_an_array_in_one_differentiated_argument_are_refused(refused):
    dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), range(2))
    x = np.ones((4, 3), np.float32)
    match = r"args\[0\]\[1\] is float32\[\] next to an NNX object; .*name it in argnums"
    with refused(TypeError, "value_and_grad", match):
        dp.grad(lambda pair, x: jnp.mean((pair[0](x) * pair[1]) ** 2))((dp.module, jnp.float32(3)), x)


def test_a_criterion_that_cannot_be_hashed_is_known_by_identity():
    class Shifted:
        __hash__ = None

        def __init__(self, by):
            self.by = by

        def __eq__(self, other):
            return True

        def __call__(self, o, x):
            return jnp.mean(o) + self.by

    dp, x = jdp.DataParallel(lambda w, x: w * x, range(4)), np.ones(8, np.float32)
    for by in (1.0, 2.0):
        assert float(dp.value_and_grad(lambda w, x: w * x, criterion=Shifted(by))(np.float32(2), x)[0]) == 2 + by


@pytest.mark.full
@pytest.mark.parametrize("s", [2.0, -2.0])
@pytest.mark.parametrize("n", [1, 4])
def test_the_gradient_of_a_python_number(n, s):
    dp, x = jdp.DataParallel(lambda w, x: w * x, range(n)), np.arange(1, 9, dtype=np.float32)

    def loss(w, x, s):
        return (w * x * s["by"]).mean()

    for criterion, run in ((None, loss), (lambda o, x, s: jnp.mean(o), lambda w, x, s: w * x * s["by"])):
        got = dp.grad(run, argnums=(0, 2), criterion=criterion)(3.0, x, {"by": s})
        want = jax.grad(loss, argnums=(0, 2))(3.0, x, {"by": s})
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.full
def test_a_count_may_be_the_total_of_another_mean():
    """With a loss of several terms, too, where one array stands for both."""
    x, valid = np.arange(10, dtype=np.float32), np.array([1, 0, 1, 1, 0, 1, 1, 1, 0, 1], np.float32)

    def loss(w, x, valid, mean):
        e, rows = w * x, valid.sum()
        terms = mean(e.sum(), x.size) + 0.5 * mean((e * e).sum(), (x + 1).sum())
        return terms, {"of": mean((e * valid).sum(), rows), "valid": mean(rows, x.shape[0])}

    for n in (1, 4):
        dp = jdp.DataParallel(lambda w, x: w * x, range(n))
        got = dp.value_and_grad(lambda w, x, v: loss(w, x, v, jdp.Mean), has_aux=True)(2.0, x, valid)
        want = jax.value_and_grad(lambda w: loss(w, x, valid, jnp.divide), has_aux=True)(2.0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_a_constant_on_a_device_in_a_loss_that_asks_for_its_number_of_rows():
    """The loss is judged while jdp's own program is traced, where such an array cannot be taken apart."""
    strides, x = jnp.array([8, 16, 32]), np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)

    def loss(w, x):
        return ((x.reshape(len(x), -1) * w / strides) ** 2).mean()

    found = jdp.DataParallel(loss, range(4)).value_and_grad(loss)(np.float32(2), x)
    for a, b in zip(found, jax.value_and_grad(loss)(np.float32(2), x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_counts_that_are_cast_from_zeros_are_a_sum():
    x = np.linspace(-1, 1, 10, dtype=np.float32)

    def loss(w, x):
        counts = jnp.zeros(2).astype(jnp.int32).at[(x > 0).astype(int)].add(1)
        return (w * x).mean(), {"counts": jdp.Sum(counts)}

    (_, metrics), _ = jdp.DataParallel(loss, range(4)).value_and_grad(loss, has_aux=True)(np.float32(2), x)
    assert metrics["counts"].tolist() == [5, 5]


@jax.custom_vjp
def clipped_back(x):
    """The identity, whose backward pass clips the gradient, as in JAX's tutorial."""
    return x


clipped_back.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.02, 0.02),))


class OfRows(nn.Module):
    norm: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2)(x)
        return clipped_back(nn.BatchNorm(use_running_average=False)(x) if self.norm else x)


@pytest.mark.one_case
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("form", ["scalar", "vector", "sum", "mean", "terms", "synchronised"])
def test_a_backward_pass_that_is_not_linear_sees_the_gradient_of_all_rows(form, rows, steps):
    """Equal to one device, where the gradient of each row is that of the mean over all of them."""
    if form == "synchronised" and (steps > 1 or rows % 4):
        pytest.skip("a microbatch has statistics of its own")
    model = OfRows(form == "synchronised")
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    variables = model.init(jax.random.key(0), x)

    def loss(v, x):
        values = (model.apply(v, x, mutable=["batch_stats"])[0] ** 2).mean(1)
        mean = jdp.Mean(values.sum(), (x > 0.2).sum())
        forms = {"vector": values, "sum": jdp.Sum(values.sum() / 8), "mean": mean, "terms": mean + 0.5 * values.mean()}
        return forms.get(form, values.mean())

    def of_one(params):
        found = loss({**variables, "params": params}, x)
        if form == "terms":
            return found.terms[0].total / found.terms[0].count + 0.5 * found.terms[1]
        return found.total / (found.count if form == "mean" else 1) if form in ("mean", "sum") else found.mean()

    expected = jax.grad(of_one)(variables["params"])
    step = jdp.DataParallel(model, range(4)).train_step(
        loss, optax.sgd(1.0), accumulate_steps=steps, sync_batch_norm=form == "synchronised"
    )
    state, _ = step(step.init(variables), x)
    for before, after, grad in zip(*map(jax.tree.leaves, (variables["params"], state.params, expected)), strict=True):
        np.testing.assert_allclose(before - jax.device_get(after), grad, rtol=1e-4, atol=1e-6)


def with_backward(fn, backward):
    """A function with a backward pass of its own, `backward(x, g)`."""
    found = jax.custom_vjp(fn)
    found.defvjp(lambda x: (fn(x), x), lambda x, g: (backward(x, g),))
    return found


def normed(x):
    return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5)


def normed_back(x, g):
    h, scale = normed(x), jax.lax.rsqrt(x.var(0) + 1e-5)
    return scale * (g - g.mean(0) - h * (g * h).mean(0))


OF_SEVERAL_ROWS = {
    "by its norm": lambda x, g: g / jnp.linalg.norm(g),
    "by a mean": lambda x, g: g * jnp.abs(x).mean(),
    "centred": lambda x, g: g - g.mean(0),
    "asks for its rows": lambda x, g: len(x) * g / jnp.abs(g).max(),
    "softmax": lambda x, g: jax.nn.softmax(x @ x.T) @ g,
}
OF_EACH_ROW = {
    "clipped": (lambda x: x, lambda x, g: jnp.clip(g, -0.02, 0.02)),
    "by the norm of each": (lambda x: x, lambda x, g: g / (jnp.linalg.norm(g, axis=1, keepdims=True) + 1)),
    "reversed": (lambda x: x, lambda x, g: -g),
    "BatchNorm": (normed, normed_back),
}
W3 = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
X3 = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
LOSSES_OF_ROWS = {
    "scalar": lambda e: e.mean(),
    "vector": lambda e: e,
    "sum": lambda e: jdp.Sum(e.sum()),
    "mean": lambda e: jdp.Mean(e.sum(), (e > 1).sum()),
    "terms": lambda e: jdp.Mean(e.sum(), (e > 1).sum()) + e.mean(),
}


@pytest.mark.one_case("by its norm-scalar", "centred-mean", "asks for its rows-vector")
@pytest.mark.parametrize("form", LOSSES_OF_ROWS)
@pytest.mark.parametrize("what", OF_SEVERAL_ROWS)
def test_a_backward_pass_of_several_rows_is_refused(what, form):
    own = with_backward(lambda x: x, OF_SEVERAL_ROWS[what])

    def loss(w, x):
        return LOSSES_OF_ROWS[form]((own(x @ w) ** 2).sum(1))

    line = loss.__code__.co_firstlineno + 1
    for n in (1, 4):
        dp = jdp.DataParallel(lambda w, x: x @ w, range(n))
        with pytest.raises(
            TypeError, match=rf"the loss has a backward pass.*test_value_and_grad\.py:{line}.*criterion="
        ):
            dp.value_and_grad(loss)(W3, X3)


@pytest.mark.full
def test_a_backward_pass_of_several_rows_is_that_of_one_device_in_a_criterion():
    own = with_backward(lambda x: x, OF_SEVERAL_ROWS["by its norm"])

    def criterion(out, x):
        return (own(out) ** 2).mean()

    found = jdp.DataParallel(lambda w, x: x @ w, range(4)).value_and_grad(lambda w, x: x @ w, criterion=criterion)(
        W3, X3
    )
    close(found, jax.value_and_grad(lambda w: criterion(X3 @ w, X3))(W3))


@pytest.mark.one_case("BatchNorm-scalar")
@pytest.mark.parametrize("form", LOSSES_OF_ROWS)
@pytest.mark.parametrize("what", OF_EACH_ROW)
def test_a_backward_pass_of_each_row_is_accepted(what, form):
    own = with_backward(*OF_EACH_ROW[what])
    dp = jdp.DataParallel(lambda w, x: x @ w, range(4))
    dp.value_and_grad(lambda w, x: LOSSES_OF_ROWS[form]((own(x @ w) ** 2).sum(1)))(W3, X3)


def of_a_scan(w, x):
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(clipped_back(h) + x @ w), None), jnp.zeros((len(x), 2)), None, length=3)
    return h


def of_a_loop(w, x):
    h = jnp.zeros((len(x), 2))
    for _ in range(3):
        h = jnp.tanh(clipped_back(h) + x @ w)
    return h


def of_a_learned_state(w, x):
    return jnp.tanh(clipped_back(jnp.broadcast_to(w[0], (len(x), 2))) + x @ w)


@pytest.mark.full
@pytest.mark.parametrize("of_rows", [of_a_scan, of_a_loop, of_a_learned_state])
def test_a_state_that_is_none_of_the_rows_yet_has_a_cotangent_for_each(of_rows):
    dp = jdp.DataParallel(of_rows, range(4))
    found = dp.value_and_grad(lambda w, x: (of_rows(w, x) ** 2).mean())(W3, X3)
    close(found, jax.value_and_grad(lambda w: (of_rows(w, X3) ** 2).mean())(W3))


def test_a_forward_pass_with_a_backward_pass_of_several_rows_is_refused():
    """A criterion does not help where the replicas run it."""
    own = with_backward(lambda x: x, OF_SEVERAL_ROWS["by its norm"])
    dp = jdp.DataParallel(lambda w, x: x @ w, range(4))
    grad = dp.value_and_grad(lambda w, x: own(x @ w), criterion=lambda out, x: (out**2).mean())
    with pytest.raises(TypeError, match="the forward pass has a backward pass of the user's own.*in a criterion="):
        grad(W3, X3)


def moments(x):
    return x.mean(0), x.var(0)


def moments_back(x, g):
    return (g[0] + 2 * (x - x.mean(0)) * g[1]) / len(x)


@pytest.mark.full
def test_statistics_with_a_backward_pass_of_their_own_are_those_of_a_batch_norm():
    own = with_backward(moments, moments_back)

    def loss(w, x):
        mean, var = own(x @ w)
        return jnp.tanh((x @ w - mean) * jax.lax.rsqrt(var + 1e-3)).mean()

    close(jdp.DataParallel(loss, range(1)).value_and_grad(loss)(W3, X3), jax.value_and_grad(loss)(W3, X3))


@pytest.mark.one_case
@pytest.mark.parametrize("guard", [lambda s: jnp.where(s > 9, 1.0, s), lambda s: jnp.clip(s, 0, 10)])
def test_a_normalization_by_a_guarded_root_is_one(guard):
    def loss(w, x):
        h = x @ w
        return ((h - h.mean(0)) * guard(jax.lax.rsqrt(h.var(0) + 1e-3)) * x[:, :1]).mean()

    close(jdp.DataParallel(loss, range(1)).value_and_grad(loss)(W3, X3), jax.value_and_grad(loss)(W3, X3))


@pytest.mark.full
def test_complex_numbers_in_a_loop_over_the_rows():
    def loss(w, x):
        return jax.lax.map(lambda row: jnp.abs(jnp.exp(1j * (row @ w)).sum()), x).mean()

    close(jdp.DataParallel(loss, range(4)).value_and_grad(loss)(W3, X3), jax.value_and_grad(loss)(W3, X3))
