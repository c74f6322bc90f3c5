"""The laws of jdp over random models, trees, dtypes, axes, batch sizes and device counts.

1. A call is the bare call: `dp(f)(w, x) == f(w, x)`; `gather` undoes `scatter`; `reduce_add` sums.
2. Gradients, losses, metrics, updated parameters and state are those of one device, or of a loop over the chunks.
3. A known call gives what a first call gives.
4. A refused call changes nothing, and the next right call is right.

The models compute with small whole numbers, which float32 holds exactly in any order of summation. So the results of
law 1 are compared bit for bit, with numpy. The reference of law 2 is one program on one device for each model: it
takes 33 rows and the weight of each, nought for rows that are not in the batch.

Each of these breaks, made by hand, one at a time, fails a law here:

* `layout.unpad` keeps one row of a chunk's padding: `law_1_any_tree`;
* `scattered.fold_key` leaves the key as it is: `law_1_each_replica_draws_from_its_own_key`;
* `gradients.microbatches`: a short chunk weighs as much as a long one: `law_2_value_and_grad`;
* `outputs._summed`: gradients are not summed over the replicas: `law_2_value_and_grad`;
* `outputs._summed`: a `Mean` is divided by one replica's count times the replicas: `law_2_value_and_grad`;
* `outputs._one_for_all`: the mean of the replicas' state is not weighted by rows, or the primary's state is the last
  replica's: `law_2_batch_norm_is_a_loop_over_the_chunks`;
* `uneven.run_body`: all replicas take the first size's branch: `law_2_value_and_grad`;
* `gradients._scan_microbatches`: each microbatch begins at row 0, or is put in reverse order: `law_2_value_and_grad`;
  it does not hand its state on: `law_2_state_goes_through_the_microbatches`;
* `gradients.rows_of`: microbatches share a key; `computation.step_key`: steps do:
  `law_2_a_key_for_each_step_microbatch_and_replica`;
* `followed.Followed.axis`: an axis as long as the rows is one of rows: `law_2_what_follows_the_rows`;
* `scatter.prepare`: the layouts are kept without the tree; `layout.Static`: 1 equals True:
  `law_3_equal_arrays_in_other_trees_and_beside_other_values`;
* `calls.Calls.run_known` does not look where a known call's parameters are: `law_3_calls`;
* `scatter._kinds_of_leaves`: in_axes None is cut: `law_1_axes`;
* `nnx.with_nodes`: a replica works on the model's own variables: `law_4_calls`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from laws import examples

import jdp

COUNTS = [1, 2, 3, 4, 8]
MOST = 33  # rows
KINDS = ["function", "linen", "nnx"]
# (devices, rows) where programs are costly: even, uneven, short last chunk, idle replicas, fewer rows than devices
PLACES = [(1, 5), (2, 7), (3, 8), (3, 1), (4, 5), (4, 9), (4, 10), (8, 24), (8, 33)]


def whole_numbers(shape, seed, dtype=np.float32):
    return np.random.default_rng(jax.tree.leaves(seed)).integers(-2, 3, shape).astype(dtype)


def chunks(x, n, dim=0):
    """numpy's own cut, at the sizes that torch.chunk has."""
    size = x.shape[dim]
    share = max(-(-size // n), 1)
    return np.split(x, range(share, size, share), axis=dim)


def move(x, source, destination):
    return (np if isinstance(x, np.ndarray) else jnp).moveaxis(x, source, destination)


def close(got, want, tolerance=4e-6):
    """Equal up to float32's rounding: means are summed in another order and divided at another place."""
    got, want = jax.tree.map(np.asarray, (got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert g.shape == w.shape, (where, g.shape, w.shape)
        largest = np.max(np.abs(w), initial=0.0) if w.dtype != bool else 0
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * max(float(largest), 1e-3), err_msg=where)


def bits(thing):
    """All that can be seen of a tree or of an NNX object: structure, and each array's bits."""
    leaves, structure = jax.tree.flatten(nnx.split(thing))

    def seen(leaf):
        if not hasattr(leaf, "dtype"):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        return str(leaf.dtype), leaf.shape, leaf.tobytes()

    return structure, [seen(leaf) for leaf in leaves]


# ---------------------------------------------------------------------------------------------------- random trees


class Pair(NamedTuple):
    a: Any
    b: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class Record:
    x: Any
    y: Any
    name: str


DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"]
KEYS = np.random.default_rng(0).integers(0, 2**32, (MOST, 2), np.uint32)
WHOLE = [None, 3, True, -2.0, "mean", np.float32(2), np.array(2, np.int8)]  # no batch axis


@st.composite
def arrays(draw, size, dim):
    shape = [draw(st.integers(1, 2)) for _ in range(draw(st.integers(max(dim + 1, -dim), 3)))]
    shape[dim] = size
    return whole_numbers(shape, draw(st.integers(0, 9)), draw(st.sampled_from([jnp.dtype(d) for d in DTYPES])))


@st.composite
def batches(draw, dims=(0, 1, -1, -2)):
    """A random tree with at least one array to cut, its number of rows and the axis they are on."""
    size, dim = draw(st.integers(0, MOST)), draw(st.sampled_from(dims))
    leaves = st.one_of(arrays(size, dim), st.sampled_from(WHOLE))
    if dim == 0:
        leaves |= st.builds(jax.random.wrap_key_data, st.just(KEYS[:size]))
    trees = st.recursive(
        leaves,
        lambda below: st.one_of(
            st.tuples(below, below),
            st.lists(below, max_size=2),
            st.dictionaries(st.sampled_from("abc"), below, max_size=2),
            st.builds(Pair, below, below),
            st.builds(Record, below, below, st.sampled_from(["r", "s"])),
        ),
        max_leaves=4,
    )
    return (draw(arrays(size, dim)), draw(trees)), size, dim


def of_each_row(w, tree):
    """A model of any tree; row by row, and the same in numpy."""
    first = tree[0]
    nought = (first != first).astype(np.int32)

    def one(leaf):
        if isinstance(leaf, str):
            return nought + len(leaf)
        if not hasattr(leaf, "dtype"):
            return nought + int(leaf)  # int() needs the number itself
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(leaf)
        if leaf.ndim == 0:
            return nought + leaf.astype(np.int32)
        if leaf.dtype == bool:
            return ~leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf * 2 + 1
        return leaf * w["scale"].astype(leaf.dtype) + w["shift"][1].astype(leaf.dtype)

    return {"tree": jax.tree.map(one, tree), "first": first}


SCALES = {"scale": np.float32(2), "shift": (None, np.float32(-1))}


@functools.cache
def tree_wrapper(n, dim):
    return jdp.DataParallel(of_each_row, range(n), dim=dim)


# ------------------------------------------------------------------------------------------------------- model zoo


def weights(seed):
    draw = lambda i, *shape: whole_numbers(shape, [seed, i])  # noqa: E731
    return {
        "first": {"kernel": draw(0, 3, 4), "bias": draw(1, 4)},
        "second": {"kernel": draw(2, 4, 2), "bias": draw(3, 2)},
    }


def outputs(x, h, y):
    """Leaves of several ranks and dtypes, all of whole numbers."""
    label = Pair(y.argmax(-1).astype(np.int32), Record(y[:, 0] > y[:, 1], None, "more"))
    return {"y": y, "wide": h[:, :, None] * x[:, None, :], "label": label, "half": [x.astype(jnp.bfloat16)]}


def net(w, x, scale=1):
    h = x @ w["first"]["kernel"] + w["first"]["bias"]
    y = (h * h) @ w["second"]["kernel"] + w["second"]["bias"]
    return outputs(x, h, y * scale)


def function(variables, x, scale=1):
    return net(variables["params"], x, scale)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, scale=1):
        h = nn.Dense(4, name="first")(x)
        return outputs(x, h, nn.Dense(2, name="second")(h * h) * scale)


class Nnx(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(4, 2, rngs=nnx.Rngs(1))
        self.factor = 1  # no array: part of the program

    def __call__(self, x, scale=1):
        h = self.first(x)
        return outputs(x, h, self.second(h * h) * (scale * self.factor))


def load(model, w):
    """Gives an NNX model these weights."""
    for name in ("first", "second"):
        for leaf in ("kernel", "bias"):
            getattr(getattr(model, name), leaf)[...] = jnp.asarray(w[name][leaf])


MODELS = {"function": lambda: function, "linen": Linen, "nnx": Nnx}


@functools.cache
def wrapper(kind, n, output=None):
    return jdp.DataParallel(MODELS[kind](), range(n), output)


def call(kind, dp, w, x, **kwargs):
    if kind == "nnx":
        load(dp.module, w)
        return dp(x, **kwargs)
    return dp({"params": w}, x, **kwargs)


def partly(w, devices):
    first, *rest = jax.tree.leaves(w)
    return jax.tree.unflatten(jax.tree.structure(w), [jdp.replicate(first, devices), *rest])


PUT = {  # where parameters may live, and the devices on which results then are
    "host": (lambda w, devices: w, lambda devices: devices[:1]),
    "primary": (lambda w, devices: jax.device_put(w, devices[0]), lambda devices: devices[:1]),
    "replicated": (lambda w, devices: jdp.replicate(w, devices), lambda devices: devices),
    "partly": (partly, lambda devices: devices[:1]),  # the first is replicated, the others are on the host
}
FORMS = {  # what a batch may come as
    "numpy": lambda dp, x: x,
    "jax": lambda dp, x: jax.tree.map(jnp.asarray, x),
    "committed": lambda dp, x: jax.device_put(x, dp.devices[-1]),
    "scattered": lambda dp, x: jdp.scatter(x, dp.devices),
    "prefetched": lambda dp, x: next(iter(dp.prefetch([x]))),
}

counts, sizes, seeds = st.sampled_from(COUNTS), st.integers(0, MOST), st.integers(0, 99)
kinds, puts, forms = st.sampled_from(KINDS), st.sampled_from(sorted(PUT)), st.sampled_from(sorted(FORMS))
places = st.sampled_from(PLACES)


def where(tree):
    return {frozenset(leaf.devices()) for leaf in jax.tree.leaves(tree)}


# --------------------------------------------------------------------------------- law 1: a call is the bare call


@examples(40)
@given(batches(), counts, st.sampled_from(["wrapper", "keyword", "scattered", "function", "tuple"]))
def test_law_1_any_tree(same, batch, n, door):
    tree, size, dim = batch
    dp, devices = tree_wrapper(n, dim), jax.devices()[:n]
    if door == "wrapper":
        got = dp(SCALES, tree)
    elif door == "keyword":
        got = dp.apply(SCALES, tree=tree)
    elif door == "scattered":
        shares = np.diff([0, *sorted(np.random.default_rng(size).integers(0, size + 1, n - 1)), size])  # of any sizes
        got = dp(SCALES, jdp.scatter(tree, devices, dim, chunk_sizes=shares))
    elif door == "function":
        got = jdp.data_parallel(of_each_row, SCALES, (tree,), devices, dim=dim)
    else:
        got = jdp.data_parallel(of_each_row, SCALES, None, devices, dim=dim, kwargs={"tree": tree})
    same(got, of_each_row(SCALES, tree))


@examples(60)
@given(batches(), counts)
def test_law_1_gather_undoes_scatter(same, batch, n):
    tree, size, dim = batch
    scattered = jdp.scatter(tree, range(n), dim)
    parts = chunks(tree[0], n, dim) if size else [tree[0]] * n
    assert scattered.sizes == tuple(part.shape[dim] for part in parts)
    for part, chunk in zip(parts, scattered, strict=True):
        same(chunk[0], part)
    same(jdp.gather(scattered, dim=dim), tree)


OUTPUTS = [None, None, None, None, "cpu", "sharded", 1]


@examples(40)
@given(kinds, counts, sizes, seeds, puts, st.sampled_from(OUTPUTS))
def test_law_1_models(same, kind, n, size, seed, put, output):
    if output == 1 and n == 1:
        output = None
    dp = wrapper(kind, n, output)
    x, w = whole_numbers((size, 3), seed), weights(seed % 3)
    got = call(kind, dp, w if kind == "nnx" else PUT[put][0](w, dp.devices), x)
    same(got, net(w, x))
    if output == "sharded":
        even = n if size and size % n == 0 else None
        for leaf in jax.tree.leaves(got):
            assert leaf.devices() == set(dp.devices)
            assert leaf.is_fully_replicated == (n == 1 or even is None)
    elif output is not None:
        assert where(got) == {frozenset([jax.devices()[output if output == 1 else 0]])}
    elif kind != "nnx":
        assert where(got) == {frozenset(PUT[put][1](list(dp.devices)))}


@functools.cache
def axes_wrapper(n, x_axis, y_axis, out_axis):
    def model(w, x, y):
        rows = move(x, x_axis, 0) * w
        rows = rows + (y if y_axis is None else move(y, y_axis, 0))
        return {"rows": move(rows, 0, out_axis), "whole": w * 2}

    axes = {"rows": out_axis, "whole": None}
    return model, jdp.DataParallel(model, range(n), in_axes=(x_axis, y_axis), out_axes=axes)


@examples(15)
@given(counts, sizes, seeds, st.integers(-3, 2), st.sampled_from([None, None, 0, 1, 2, -1]), st.integers(-3, 2))
def test_law_1_axes(same, n, size, seed, x_axis, y_axis, out_axis):
    model, dp = axes_wrapper(n, x_axis, y_axis, out_axis)
    x = np.moveaxis(whole_numbers((size, 2, 3), seed), 0, x_axis)
    y = whole_numbers((2, 3), seed) if y_axis is None else np.moveaxis(whole_numbers((size, 2, 3), [seed]), 0, y_axis)
    w = np.float32(3)
    same(dp(w, x, y), model(w, x, y))


def sums(w, x):
    return {"each": w * x.sum(0), "all": [x.sum().astype(np.int32), None]}


@examples(10)
@given(counts, st.integers(1, MOST), seeds, st.sampled_from([None, "all", "cpu", 2]))
def test_law_1_reduce_add(same, n, size, seed, destination):
    x, devices = whole_numbers((size, 3), seed), jax.devices()[:n]
    scattered = jdp.parallel_apply(sums, np.float32(2), jdp.scatter((x,), devices))
    whole = jdp.reduce_add(scattered, destination)
    same(whole, sums(np.float32(2), x))
    on = {None: devices[:1], "all": devices, "cpu": jax.devices()[:1], 2: jax.devices()[2:3]}[destination]
    assert where(whole) == {frozenset(on)}
    parts = [sums(np.float32(2), part) for part in chunks(x, n)]
    same(jdp.reduce_add(parts), sums(np.float32(2), x))


def draws(w, x, key):
    return {"drawn": jax.random.bits(key, x.shape), "x": x * w}


class Draws(nnx.Module):
    def __init__(self):
        self.w, self.rngs = nnx.Param(jnp.float32(2)), nnx.Rngs(noise=7)

    def __call__(self, x):
        return {"drawn": jax.random.bits(self.rngs.noise(), x.shape), "x": x * self.w[...]}


@functools.cache
def drawing_wrapper(kind, n):
    return jdp.DataParallel(draws if kind == "function" else Draws(), range(n))


@examples(12)
@given(st.sampled_from(["function", "nnx"]), places, seeds)
def test_law_1_each_replica_draws_from_its_own_key(same, kind, place, seed):
    n, size = place
    dp, x = drawing_wrapper(kind, n), whole_numbers((size, 1), seed)
    if kind == "nnx":
        stream = dp.module.rngs.noise
        key, count = stream.key[...], int(stream.count[...])
        got = dp(x)
        assert int(stream.count[...]) == count + 1  # as the bare model's
        same(stream.key[...], key)
    else:
        key = jax.random.key(seed)
        got = dp(np.float32(2), x, key)
    want = []
    for i, part in enumerate(chunks(x, n)):
        mine = jax.random.fold_in(key, i) if i else key  # the primary draws as one device does
        if kind == "nnx":
            mine = jax.random.fold_in(mine, count)
        want.append(jax.random.bits(mine, part.shape))
    same(got, {"drawn": np.concatenate(want), "x": x * 2})


# --------------------------------------------------------------- law 2: gradients, losses, metrics of one device

LOSSES = ["scalar", "vector", "Mean"]


def batch_of(size, seed):
    weight = np.random.default_rng(seed).integers(0, 4, size).astype(np.float32)  # of each row; a chunk's may be nought
    weight[size // 2] += 1
    return {"x": whole_numbers((size, 3), seed), "y": whole_numbers((size, 2), [seed]), "weight": weight}


def table(prediction, batch):
    """How often which label (2) was predicted for which sign of the target (3)."""
    target = (batch["y"][:, :1] == np.array([-1, 0, 1])).astype(np.int32)
    return (prediction > 0).astype(np.int32).T @ target


def measured_by_numpy(prediction, batch):
    rows, weight = ((prediction - batch["y"]) ** 2).sum(-1), batch["weight"]
    return {
        "rows": rows,
        "predictions": [prediction, (prediction > 0, None)],
        "flat": prediction.reshape(-1),
        "mean": rows.mean(),
        "means": prediction.mean(0),  # as long as some chunks have rows, by chance
        "weighted": (prediction * weight[:, None]).sum(0) / weight.sum(),
        "table": table(prediction, batch),
    }


def loss_of(form, prediction, batch):
    """The loss in one of its three forms, and what is measured beside it."""
    rows, weight = ((prediction - batch["y"]) ** 2).sum(-1), batch["weight"]
    if weight.ndim > 1:
        return weight, {}  # of no form
    loss = {"scalar": rows.mean, "vector": lambda: rows, "Mean": lambda: jdp.Mean((rows * weight).sum(), weight.sum())}
    measured = measured_by_numpy(prediction, batch)
    measured["weighted"] = jdp.Mean((prediction * weight[:, None]).sum(0), weight.sum())
    measured["means"] = jdp.Mean(prediction.sum(0), prediction.shape[0])
    measured["table"] = jdp.Sum(table(prediction, batch))
    return loss[form](), measured


@jax.jit
def one_device(w, x, y, weight):
    """One device's loss, gradients of `w` and `x`, and predictions; the weights of the rows sum to one."""

    def loss(w, x):
        prediction = net(w, x)["y"]
        return (((prediction - y) ** 2).sum(-1) * weight).sum(), prediction

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x)


def reference(w, batch, form="scalar", weight=None):
    """The loss, its gradients and the predictions of the whole batch on one device."""
    size = len(batch["x"])
    if weight is None:
        weight = batch["weight"] / batch["weight"].sum() if form == "Mean" else np.ones(size) / size
    pad = lambda x: np.concatenate([x, np.zeros((MOST - size, *x.shape[1:]), x.dtype)]).astype(np.float32)  # noqa: E731
    (loss, prediction), (grad, grad_x) = one_device(w, pad(batch["x"]), pad(batch["y"]), pad(weight))
    if form == "vector":
        loss = ((prediction[:size] - batch["y"]) ** 2).sum(-1).mean()
    return loss, grad, grad_x[:size], np.asarray(prediction)[:size]


@functools.cache
def gradient(kind, form, n, accumulate_steps=1):
    dp = wrapper(kind, n)

    def loss_fn(params, batch):
        model = params if kind == "nnx" else functools.partial(dp, params)
        return loss_of(form, model(batch["x"])["y"], batch)

    return dp, dp.value_and_grad(loss_fn, has_aux=True, accumulate_steps=accumulate_steps)


def parameters(kind, dp, w, put):
    """What a loss takes first."""
    if kind != "nnx":
        return PUT[put][0]({"params": w}, dp.devices)
    load(dp.module, w)
    return dp.module


def pure(kind, tree):
    """The weights of a tree as it comes back."""
    return nnx.to_pure_dict(tree) if kind == "nnx" else tree["params"]


# (model, loss, devices, rows, accumulate_steps): a program each; what goes in is drawn
GRADIENTS = [
    ("function", "scalar", 4, 10, 1),
    ("function", "vector", 3, 8, 2),
    ("function", "Mean", 8, 33, 3),
    ("function", "scalar", 4, 5, 3),
    ("linen", "scalar", 8, 24, 2),
    ("linen", "vector", 4, 9, 1),
    ("linen", "Mean", 2, 7, 2),
    ("linen", "scalar", 3, 1, 1),
    ("nnx", "scalar", 3, 8, 3),
    ("nnx", "vector", 1, 5, 2),
    ("nnx", "Mean", 4, 10, 1),
    ("nnx", "vector", 8, 33, 1),
]


@examples(36)
@given(st.sampled_from(GRADIENTS), seeds, st.sampled_from(["host", "host", "primary", "replicated"]), forms)
def test_law_2_value_and_grad(case, seed, put, given_as):
    kind, form, n, size, accumulate_steps = case
    dp, fn = gradient(kind, form, n, accumulate_steps)
    w, batch = weights(seed % 3), batch_of(size, seed)
    (loss, aux), grad = fn(parameters(kind, dp, w, put), FORMS[given_as](dp, batch))
    want, want_grad, _, prediction = reference(w, batch, form)
    close(loss, want)
    close(pure(kind, grad), want_grad)
    close(aux, measured_by_numpy(prediction, batch))
    if kind != "nnx":
        assert where((loss, aux, grad)) == {frozenset(PUT[put][1](list(dp.devices)))}


@examples(6)
@given(st.sampled_from(["scalar", "Mean"]), st.sampled_from([(1, 3, 3, 3), (4, 0, 1, 0)]), seeds)
def test_law_2_chunks_of_any_sizes(form, shares, seed):
    dp, fn = gradient("function", form, 4)
    w, batch = weights(seed % 3), batch_of(sum(shares), seed)
    (loss, aux), grad = fn({"params": w}, jdp.scatter(batch, dp.devices, chunk_sizes=shares))
    want, want_grad, _, prediction = reference(w, batch, form)
    close((loss, pure("function", grad)), (want, want_grad))
    close(aux, measured_by_numpy(prediction, batch))


@functools.cache
def shapes_wrapper(n, k, shape, accumulate_steps):
    def aux(x):
        mean = x.mean() + jnp.arange(np.prod(shape, dtype=int), dtype=x.dtype).reshape(shape)
        flat = jnp.broadcast_to(x.reshape(-1, 1), (x.size, k))
        n = x.shape[0]
        return {"flat": flat.reshape(-1), "rows": flat, "mean": jdp.Mean(mean * n, n), "sum": jdp.Sum(mean * n)}

    dp = jdp.DataParallel(lambda w, x: w * x, range(n))
    return dp.value_and_grad(lambda w, x: ((w * x).mean(), aux(x)), has_aux=True, accumulate_steps=accumulate_steps)


@examples(12)
@given(places, seeds, st.integers(1, 3), st.booleans(), st.integers(0, 2), st.sampled_from([1, 1, 2]))
def test_law_2_what_follows_the_rows(place, seed, k, columns, by_chance, accumulate_steps):
    n, size = place
    x = whole_numbers((size, 2) if columns else (size,), seed)
    share = -(-size // n)  # a mean and a sum are as long as a chunk, or k times that
    shape = [(), (share,), (k * share, 2)][by_chance]
    (loss, aux), grad = shapes_wrapper(n, k, shape, accumulate_steps)(2.0, x)
    flat = np.repeat(x.reshape(-1, 1), k, 1)
    mean = x.mean() + np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    close(aux, {"flat": flat.reshape(-1), "rows": flat, "mean": mean, "sum": mean * size})
    close((loss, grad), (2 * x.mean(), x.mean()))


@functools.cache
def both_gradients(n):
    dp = wrapper("function", n)
    return dp.grad(lambda w, x, y: (((dp(w, x)["y"] - y) ** 2).sum(-1)).mean(), argnums=(0, 1))


@examples(5)
@given(places, seeds)
def test_law_2_the_gradient_of_what_is_cut(place, seed):
    w, batch = weights(seed % 3), batch_of(place[1], seed)
    got, got_x = both_gradients(place[0])({"params": w}, batch["x"], batch["y"])
    close((got["params"], got_x), reference(w, batch)[1:3])


@examples(8)
@given(kinds, places, seeds, st.sampled_from(["host", "primary", "replicated"]), st.booleans())
def test_law_2_the_gradient_through_a_call(kind, place, seed, put, jit):
    n, size = place
    dp, w, batch = wrapper(kind, n), weights(seed % 3), batch_of(size, seed)
    prediction = (lambda p, x: p(x)["y"]) if kind == "nnx" else (lambda p, x: dp(p, x)["y"])
    loss_fn = lambda p, x: (((prediction(p, x) - batch["y"]) ** 2).sum(-1)).mean()  # noqa: E731
    grad = nnx.grad(loss_fn) if kind == "nnx" else jax.grad(loss_fn)
    if jit:  # JAX refuses what is committed to one device beside what is not
        put, grad = "replicated", (nnx.jit if kind == "nnx" else jax.jit)(grad)
    if kind == "nnx":
        load(dp.module, w)
        got = nnx.to_pure_dict(grad(dp, batch["x"]))["module"]
    else:
        got = grad(parameters(kind, dp, w, put), batch["x"])
        assert jit or where(got) == {frozenset(PUT[put][1](list(dp.devices)))}
        got = pure(kind, got)
    close(got, reference(w, batch)[1])


OPTIMIZERS = {
    "momentum": optax.sgd(2.0**-14, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01, eps=0.01)),  # the norm of the whole
}


@functools.cache
def one_device_update(optimizer):
    @jax.jit
    def update(grad, state, w):
        updates, state = OPTIMIZERS[optimizer].update(grad, state, w)
        return optax.apply_updates(w, updates), state

    return update


@functools.cache
def trained(kind, form, optimizer, n, accumulate_steps=1, shard=False):
    """A step with a wrapper of its own, and the state of an NNX model and its optimizer before the first step."""
    dp = jdp.DataParallel(MODELS[kind](), range(n))

    def loss_fn(params, batch):
        model = params if kind == "nnx" else functools.partial(dp, params)
        return loss_of(form, model(batch["x"])["y"], batch)

    step = dp.train_step(loss_fn, OPTIMIZERS[optimizer], accumulate_steps=accumulate_steps, shard_optimizer=shard)
    return dp, step


def begin(kind, dp, step, w, mine=None):
    """The state before the first step. An NNX optimizer, which the steps of other examples moved, starts anew."""
    if kind != "nnx":
        return step.init({"params": w} if mine is None else mine)
    load(dp.module, w)
    nnx.update(step.optimizer, jax.tree.map(jnp.zeros_like, nnx.state(step.optimizer)))
    return None


class OneDevice:
    """Plain optax: what a step should give."""

    def __init__(self, form, optimizer, w):
        self.form, self.optimizer, self.w = form, optimizer, w
        self.opt_state = OPTIMIZERS[optimizer].init(w)

    def step(self, batch, weight=None):
        loss, grad, _, prediction = reference(self.w, batch, self.form, weight)
        self.w, self.opt_state = one_device_update(self.optimizer)(grad, self.opt_state, self.w)
        return {"loss": loss, **measured_by_numpy(prediction, batch)}


def take(kind, dp, step, state, one, batch, passed):
    """One step, compared with one device's."""
    if kind == "nnx":
        metrics = step(passed)
        got = nnx.to_pure_dict(nnx.state(dp.module, nnx.Param))
    else:
        state, metrics = step(state, passed)
        got = state.params
    # the parameters of the steps before differ in their last bits, and the loss is steep in them
    close(metrics, one.step(batch), 2e-5)
    close(got, one.w, 2e-5)
    return state


# (model, loss, optimizer, devices, rows, accumulate_steps, shard_optimizer)
STEPS = [
    ("function", "scalar", "momentum", 4, 10, 2, False),
    ("function", "Mean", "clipped", 3, 8, 1, True),
    ("linen", "vector", "clipped", 8, 33, 3, True),
    ("linen", "scalar", "momentum", 3, 1, 1, False),
    ("linen", "Mean", "momentum", 2, 7, 3, False),
    ("nnx", "scalar", "clipped", 4, 5, 2, True),
    ("nnx", "vector", "momentum", 1, 5, 3, False),
    ("nnx", "Mean", "clipped", 8, 24, 1, False),
]


@examples(16)
@given(st.sampled_from(STEPS), seeds, puts, st.sampled_from(["numpy", "scattered", "prefetched"]))
def test_law_2_train_step(case, seed, put, given_as):
    kind, form, optimizer, n, size, *options = case
    dp, step = trained(kind, form, optimizer, n, *options)
    w = weights(seed % 3)
    mine = PUT[put][0]({"params": w}, dp.devices)  # which a step never donates
    state, one = begin(kind, dp, step, w, mine), OneDevice(form, optimizer, w)
    if kind == "nnx":
        mine = {"params": nnx.to_pure_dict(nnx.state(dp.module, nnx.Param))}
    for i in range(3):
        batch = batch_of(size, [seed, i])
        passed = FORMS[given_as](dp, batch)
        before = bits(passed)
        state = take(kind, dp, step, state, one, batch, passed)
        assert bits(passed) == before
    assert bits(mine) == bits({"params": w})
    assert state is None or int(state.step) == 3


class Noisy(Nnx):
    def __init__(self):
        super().__init__()
        self.rngs = nnx.Rngs(noise=0)


@functools.cache
def noisy(kind, n, accumulate_steps):
    dp = jdp.DataParallel(Noisy() if kind == "nnx" else function, range(n))

    def loss_fn(params, batch, key=None):
        key = params.rngs.noise() if kind == "nnx" else key
        model = params if kind == "nnx" else functools.partial(dp, params)
        rows = ((model(batch["x"])["y"] - batch["y"]) ** 2).sum(-1)
        noise = jax.random.uniform(key, rows.shape)
        return (rows * noise).mean(), {"noise": noise, "key": jnp.broadcast_to(jax.random.bits(key), rows.shape)}

    return dp, dp.train_step(loss_fn, OPTIMIZERS["momentum"], accumulate_steps=accumulate_steps)


@examples(6)
@given(st.sampled_from(["function", "nnx"]), st.sampled_from([(4, 10, 2, 7), (8, 24, 1, 8)]), seeds)
def test_law_2_a_key_for_each_step_microbatch_and_replica(kind, case, seed):
    n, size, accumulate_steps, keys = case
    dp, step = noisy(kind, n, accumulate_steps)
    w = weights(seed % 3)
    if kind == "nnx":
        state = begin(kind, dp, step, w)
    else:
        state = step.init({"params": w}, jax.random.key(seed))
    one, seen = OneDevice("scalar", "momentum", w), []
    for i in range(3):
        batch = batch_of(size, [seed, i])
        if kind == "nnx":
            metrics = step(batch)
            got = nnx.to_pure_dict(nnx.state(dp.module, nnx.Param))
        else:
            state, metrics = step(state, batch)
            got = state.params
        seen.extend(np.asarray(metrics["key"]))
        close(metrics["loss"], one.step(batch, np.asarray(metrics["noise"]) / size)["loss"], 2e-5)
        close(got, one.w, 2e-5)
    assert len(set(seen)) == 3 * keys


# ------------------------------------------------------------------- law 2: state is that of a loop over the chunks


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.5, name="norm")(x)


class NnxNorm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


def norm_by_numpy(affine, stats, x):
    """BatchNorm of one chunk: its output, and the running statistics after it."""
    mean, var = x.mean(0), x.var(0)
    y = (x - mean) / np.sqrt(var + 1e-5) * affine["scale"] + affine["bias"]
    return y, {"mean": stats["mean"] / 2 + mean / 2, "var": stats["var"] / 2 + var / 2}


def of_replicas(reduce_state, stats, rows):
    """What is kept of the replicas' statistics."""
    if reduce_state == "primary":
        return stats[0]
    return jax.tree.map(lambda *s: np.average(s, 0, rows), *stats)


def norm_variables(seed):
    affine = {"scale": whole_numbers(3, [seed, 1]), "bias": whole_numbers(3, [seed, 2])}
    return affine, {"mean": whole_numbers(3, [seed, 3]), "var": whole_numbers(3, [seed, 4]) + 3}


@functools.cache
def norm_wrapper(kind, n, reduce_state):
    return jdp.DataParallel(Norm() if kind == "linen" else NnxNorm(), range(n), reduce_state=reduce_state)


@examples(14)
@given(st.sampled_from(["linen", "nnx"]), st.sampled_from(["primary", "mean"]), places, seeds, puts)
def test_law_2_batch_norm_is_a_loop_over_the_chunks(kind, reduce_state, place, seed, put):
    n, size = place
    dp, x, (affine, stats) = norm_wrapper(kind, n, reduce_state), whole_numbers((size, 3), seed), norm_variables(seed)
    parts = chunks(x, n)
    each = [norm_by_numpy(affine, stats, part) for part in parts]
    want = of_replicas(reduce_state, [after for _, after in each], [len(part) for part in parts])
    if kind == "linen":
        variables = {"params": {"norm": affine}, "batch_stats": {"norm": stats}}
        y, updated = dp.apply(PUT[put][0](variables, dp.devices), x, mutable=["batch_stats"])
        got = updated["batch_stats"]["norm"]
        assert where((y, updated)) == {frozenset(PUT[put][1](list(dp.devices)))}
    else:
        norm = dp.module.norm
        for name, value in {**affine, **stats}.items():
            getattr(norm, name)[...] = jnp.asarray(value)
        y = dp(x)
        got = {"mean": norm.mean[...], "var": norm.var[...]}
    close(y, np.concatenate([y for y, _ in each]), 1e-5)  # the variance is a difference of squares
    close(got, want, 1e-5)


@functools.cache
def norm_step(kind, reduce_state, sync_batch_norm):
    dp = jdp.DataParallel(Norm() if kind == "linen" else NnxNorm(), range(3), reduce_state=reduce_state)

    def loss_fn(params, x):
        if kind == "nnx":
            return (params(x) ** 4).mean()
        y, updates = dp.apply(params, x, mutable=["batch_stats"])
        return (y**4).mean(), {}, updates

    accumulate_steps = 1 if sync_batch_norm else 2
    options = {"accumulate_steps": accumulate_steps, "sync_batch_norm": sync_batch_norm}
    return dp, dp.train_step(loss_fn, optax.sgd(0.0), **options)


@examples(6)
@given(st.sampled_from([("linen", "mean", False), ("nnx", "primary", False), ("linen", "primary", True)]), seeds)
def test_law_2_state_goes_through_the_microbatches(case, seed):
    kind, reduce_state, sync = case
    dp, step = norm_step(*case)
    x, (affine, stats) = whole_numbers((10, 3), seed), norm_variables(seed)
    losses, after = [], []
    parts = [x] if sync else chunks(x, 3)  # 4, 4 and 2 rows: two microbatches of half of them
    for part in parts:
        mine = stats
        for half in [part] if sync else np.split(part, 2):
            y, mine = norm_by_numpy(affine, mine, half)
            losses.extend((y**4).mean(1))
        after.append(mine)
    want = of_replicas(reduce_state, after, [len(part) for part in parts])
    if kind == "linen":
        state = step.init({"params": {"norm": affine}, "batch_stats": {"norm": stats}})
        state, metrics = step(state, x)
        got = state.state["batch_stats"]["norm"]
    else:
        for name, value in {**affine, **stats}.items():
            getattr(dp.module.norm, name)[...] = jnp.asarray(value)
        metrics = step(x)
        got = {"mean": dp.module.norm.mean[...], "var": dp.module.norm.var[...]}
    close(got, want, 1e-5)
    close(metrics, {"loss": np.mean(losses)}, 2e-5)


# ------------------------------------------------------------------- law 3: a known call gives what a first one gives

calls = st.tuples(st.sampled_from([8, 5]), seeds, puts, forms, st.sampled_from([None, None, None, 2]))


@examples(15)
@given(kinds, st.lists(calls, min_size=4, max_size=10), st.sampled_from([None, None, 1]))
def test_law_3_calls(same, kind, calls, output):
    dp = wrapper(kind, 4, output)
    for size, seed, put, given_as, scale in [(8, 0, "replicated", "numpy", None)] * 2 + calls:
        x, w = whole_numbers((size, 3), seed), weights(seed % 3)
        placed = w if kind == "nnx" else PUT[put][0](w, dp.devices)
        got = call(kind, dp, placed, FORMS[given_as](dp, x), **({"scale": scale} if scale else {}))
        same(got, net(w, x, scale or 1))
        on = PUT[put][1](list(dp.devices)) if output is None else jax.devices()[output : output + 1]
        assert (kind == "nnx" and output is None) or where(got) == {frozenset(on)}


def told_apart(w, tree, value):
    """What differs between trees of equal arrays, and between values that Python calls equal."""
    kind = [bool, int, float, str].index(type(value)) * 2 + (type(value) is float and str(value)[0] == "-")
    return jax.tree.map(lambda x: x * w + kind, tree)


@functools.cache
def apart_wrapper(n):
    return jdp.DataParallel(told_apart, range(n))


CONTAINERS = [
    lambda a, b: (a, b),
    lambda a, b: [a, b],
    lambda a, b: {"a": a, "b": b},
    lambda a, b: {"a": a, "c": b},
    lambda a, b: Pair(a, b),
    lambda a, b: Record(a, b, "r"),
    lambda a, b: Record(a, b, "s"),
    lambda a, b: (a, None, b),
]
VALUES = [1, True, 1.0, 0, False, 0.0, -0.0, "1"]


@examples(8)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.sampled_from(["numpy", "jax"])), min_size=6, max_size=12)
)
def test_law_3_equal_arrays_in_other_trees_and_beside_other_values(same, calls):
    dp, w = apart_wrapper(2), jdp.replicate(np.float32(2), range(2))
    a, b = whole_numbers((6, 2), 0), whole_numbers((6, 2), 1)
    for i, vary, given_as in calls:
        make, value = (CONTAINERS[i], 1) if vary else (CONTAINERS[0], VALUES[i])
        tree = make(a, b)
        same(dp(w, FORMS[given_as](dp, tree), value), told_apart(np.float32(2), tree, value))


changes = st.one_of(
    st.tuples(st.just("weights"), st.integers(0, 2)),
    st.tuples(st.just("factor"), st.integers(1, 2)),
    st.tuples(st.just("layer"), st.integers(0, 2)),
    st.tuples(st.just("update"), st.integers(0, 2)),
)


@examples(10)
@given(st.lists(st.tuples(changes, seeds), min_size=3, max_size=8))
def test_law_3_a_changed_model(same, changed):
    dp = wrapper("nnx", 3)
    w, model = weights(0), dp.module
    load(model, w)
    model.factor = 1
    for (what, value), seed in changed:
        if what == "weights":
            w = weights(value)
            load(model, w)
        elif what == "factor":
            model.factor = value
        elif what == "layer":
            w = {**w, "second": weights(value)["second"]}
            model.second = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
            load(model, w)
        else:
            w = weights(value)
            nnx.update(dp, nnx.State({"module": nnx.State(w)}))
        x = whole_numbers((8, 3), seed)
        same(dp(x), net(w, x, model.factor))
    model.factor = 1


moves = st.tuples(st.sampled_from([8, 6]), seeds, forms, st.sampled_from(["on", "on", "replaced"]))


@examples(6)
@given(st.sampled_from(["function", "nnx"]), st.lists(moves, min_size=3, max_size=6), puts)
def test_law_3_steps(kind, moves, put):
    dp, step = trained(kind, "Mean", "momentum", 3)
    w = weights(0)
    state, one = begin(kind, dp, step, w), OneDevice("Mean", "momentum", w)
    for size, seed, given_as, go in [(6, 0, "numpy", "on"), (8, 1, "numpy", "on"), *moves]:
        if go == "replaced":  # the user gives it other parameters
            one.w = weights(seed % 3)
            if kind == "nnx":
                load(dp.module, one.w)
            else:
                state = state.replace(params=PUT[put][0](one.w, dp.devices))
        batch = batch_of(size, seed)
        state = take(kind, dp, step, state, one, batch, FORMS[given_as](dp, batch))


# ------------------------------------------------------------------------------ law 4: a refused call changes nothing


class Careful(nnx.Module):
    """Counts its calls, draws, and only then refuses what has two columns."""

    def __init__(self):
        self.w, self.calls, self.rngs = nnx.Param(jnp.float32(2)), nnx.BatchStat(jnp.int32(0)), nnx.Rngs(noise=3)

    def __call__(self, x, scale=1):
        self.calls[...] += 1
        self.rngs.noise()
        if x.shape[-1] == 2:
            raise KeyError("two columns")
        return {"y": x * self.w[...] * scale, "calls": self.calls[...] + jnp.zeros(len(x), jnp.int32)}


def careful(variables, x, scale=1):
    if x.shape[-1] == 2:
        raise KeyError("two columns")
    return function(variables, x, scale)


@functools.cache
def careful_wrapper(kind):
    return jdp.DataParallel(Careful() if kind == "nnx" else careful, range(4))


class Unknown(dict):
    """A subclass that JAX does not know."""


REFUSED = {  # what is passed after the parameters, and what it raises
    "rows that disagree": (ValueError, lambda x: (x, x[:-1])),
    "a model that raises": (KeyError, lambda x: (x[:, :2],)),
    "an array of objects": (TypeError, lambda x: (np.asarray(x).astype(object),)),
    "a container that JAX does not know": (TypeError, lambda x: (Unknown(x=x),)),
    "an argument too many": (TypeError, lambda x: (x, x, x)),
    "no argument": (TypeError, lambda x: ()),
}


@examples(12)
@given(
    st.sampled_from(["function", "nnx"]),
    st.lists(st.sampled_from(sorted(REFUSED)), min_size=1, max_size=3),
    seeds,
    puts,
    st.sampled_from([8, 5]),
)
def test_law_4_calls(same, kind, refusals, seed, put, size):
    dp, w = careful_wrapper(kind), weights(seed % 3)
    x = jnp.asarray(whole_numbers((size, 3), seed))
    held = dp if kind == "nnx" else PUT[put][0]({"params": w}, dp.devices)
    bound = dp if kind == "nnx" else functools.partial(dp, held)
    for refusal in refusals:
        error, arguments = REFUSED[refusal]
        before = bits(held), bits(x)
        with pytest.raises(error):
            bound(*arguments(x))
        assert (bits(held), bits(x)) == before
    if kind == "nnx":
        count = int(dp.module.calls[...]) + 1
        same(bound(x), {"y": 2 * np.asarray(x), "calls": np.full(size, count, np.int32)})
        assert int(dp.module.calls[...]) == count
    else:
        same(bound(x), net(w, np.asarray(x)))


def test_law_4_doors(same):
    """What is refused before the model is asked."""
    w, x, devices = {"params": weights(0)}, jnp.asarray(whole_numbers((8, 3), 0)), jax.devices()
    elsewhere = jax.device_put(w, devices[5])
    before = bits((w, elsewhere, x))
    with pytest.raises(RuntimeError):
        wrapper("function", 4)(elsewhere, x)
    with pytest.raises(IndexError):
        jdp.data_parallel(function, w, x, devices[:4], dim=2)
    with pytest.raises(IndexError):
        jdp.scatter((x, x[0]), devices[:4], 1)
    with pytest.raises(ValueError):
        jdp.scatter(x, devices[:4], chunk_sizes=(1, 2, 3, 4))
    with pytest.raises(RuntimeError):
        jdp.replicate(elsewhere, devices[:4])
    assert bits((w, elsewhere, x)) == before
    same(wrapper("function", 4)(w, x), net(weights(0), np.asarray(x)))


BAD_BATCHES = {
    "rows that disagree": (ValueError, lambda b: {**b, "y": b["y"][:-1]}),
    "no rows": (ValueError, lambda b: jax.tree.map(lambda x: x[:0], b)),
    "a model that raises": (TypeError, lambda b: {**b, "x": b["x"][:, :2]}),
    "a missing key": (KeyError, lambda b: {"x": b["x"]}),
    "an array of objects": (TypeError, lambda b: {**b, "x": np.asarray(b["x"]).astype(object)}),
    "a loss of no form": (TypeError, lambda b: {**b, "weight": jnp.stack([b["weight"]] * 2, 1)}),
}


@examples(10)
@given(
    st.sampled_from(["function", "nnx"]),
    st.lists(st.sampled_from(sorted(BAD_BATCHES)), min_size=1, max_size=3),
    seeds,
    st.booleans(),
)
def test_law_4_gradients_and_steps(kind, refusals, seed, train):
    dp, run = trained(kind, "Mean", "momentum", 3) if train else gradient(kind, "Mean", 3)
    w, right = weights(seed % 3), batch_of(8, seed)
    batch = jax.tree.map(jnp.asarray, right)
    if train:
        held, one = begin(kind, dp, run, w), OneDevice("Mean", "momentum", w)
        gone, held = held, take(kind, dp, run, held, one, right, batch)  # so that it is a state that a step made
    else:
        held = parameters(kind, dp, w, "replicated")
    whole = ((dp, run.optimizer) if train else (dp,)) if kind == "nnx" else held
    for refusal in refusals:
        error, spoil = BAD_BATCHES[refusal]
        before = bits(whole), bits(batch)
        with pytest.raises(error):
            run(*(() if train and kind == "nnx" else (held,)), spoil(batch))
        assert (bits(whole), bits(batch)) == before
    if train and kind != "nnx":
        before = bits(held)
        with pytest.raises(RuntimeError, match="was donated to an earlier step"):
            run(gone, batch)
        assert bits(held) == before
    if train:
        take(kind, dp, run, held, one, right, batch)
    else:
        (loss, _), grad = run(held, batch)
        want, want_grad, *_ = reference(w, right, "Mean")
        close(loss, want)
        close(pure(kind, grad), want_grad)
