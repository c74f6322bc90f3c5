"""Uneven chunks are exact: any batch equals the plain loop over torch.chunk's chunks on one device."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

import jdp


class Net(nn.Module):
    """BatchNorm on its chunk's own statistics: an extra or a missing row anywhere shows in every output."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False)(x)  # a bias before BatchNorm has gradient 0
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, use_fast_variance=False)(x)
        return nn.Dense(2)(nn.tanh(x))


NET = Net()
VARIABLES = laws.variables_of(NET, np.ones((2, 3), np.float32))
ROWS = np.random.RandomState(0).randn(17, 3).astype(np.float32)
WRAPPERS = {}


def wrapper(n, reduce_state="primary"):
    """One wrapper for all tests of n devices, so that its programs are compiled once."""
    key = n, reduce_state
    if key not in WRAPPERS:
        WRAPPERS[key] = jdp.DataParallel(NET, devices=range(n), reduce_state=reduce_state)
    return WRAPPERS[key]


def torch_chunks(rows, n):
    """torch.chunk: ceil(B / n) rows each, as long as there are any."""
    size = max(1, math.ceil(len(rows) / n))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def loss_of(y):
    """Not a sum over rows, so that each row's gradient depends on all rows."""
    return jnp.sqrt(1 + jnp.sum(y**2))


@jax.jit
def chunk_forward(params, stats, chunk):
    y, new = NET.apply({"params": params, "batch_stats": stats}, chunk, mutable=["batch_stats"])
    return y, new["batch_stats"]


@jax.jit
def chunk_backward(params, stats, chunk, dy):
    return jax.vjp(lambda p, c: chunk_forward(p, stats, c)[0], params, chunk)[1](dy)


def plain_loop(variables, x, n, reduce_state="primary"):
    """The chunks one after the other on one device: loss, outputs, statistics, gradients."""
    params, stats = variables["params"], variables["batch_stats"]
    chunks = torch_chunks(x, n)
    if not chunks:
        return 1.0, np.zeros((0, 2), np.float32), stats, jax.tree.map(np.zeros_like, (params, x))
    outs, updates = zip(*(chunk_forward(params, stats, c) for c in chunks), strict=True)
    y = np.concatenate(outs)
    value = np.sqrt(1 + np.sum(y.astype(np.float64) ** 2))
    dys = torch_chunks((y / value).astype(np.float32), n)
    grads = [chunk_backward(params, stats, c, dy) for c, dy in zip(chunks, dys, strict=True)]
    dparams = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *(g[0] for g in grads))
    dx = np.concatenate([g[1] for g in grads])
    weights = np.array([len(c) for c in chunks]) / len(x)
    if reduce_state == "mean":
        new = jax.tree.map(lambda *leaves: np.tensordot(weights, np.stack(leaves), 1), *updates)
    else:
        new = updates[0]
    return value, y, new, (dparams, dx)


close = functools.partial(laws.close, rtol=2e-5, atol=2e-6)

# full, short, single and absent chunks for each number of devices
CASES = (
    [(8, size, "primary") for size in (0, 1, 8, 10, 17)]
    + [(3, size, "primary") for size in (2, 5, 14, 15)]
    + [(2, 1, "primary"), (1, 3, "primary")]
    + [(8, 10, "mean"), (3, 5, "mean"), (2, 0, "mean")]
)


@pytest.mark.one_case("8-17-primary")
@pytest.mark.parametrize("n, size, reduce_state", CASES)
def test_outputs_gradients_and_state_equal_the_plain_loop(n, size, reduce_state):
    dp = wrapper(n, reduce_state)
    variables = jdp.replicate(VARIABLES, range(n))
    x = ROWS[:size]

    def loss(params, x):
        y, state = dp.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return loss_of(y), (y, state["batch_stats"])

    (value, (y, stats)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables["params"], x)
    close((value, y, stats, grads), plain_loop(VARIABLES, x, n, reduce_state))


@pytest.mark.full
def test_the_oracle_can_tell_chunks_from_the_whole_batch():
    """BatchNorm over the whole batch, or over other chunks, is another result."""
    whole, chunked = plain_loop(VARIABLES, ROWS[:10], 1)[1], plain_loop(VARIABLES, ROWS[:10], 4)[1]
    assert np.abs(whole - chunked).max() > 0.01
    assert np.abs(plain_loop(VARIABLES, ROWS[:10], 3)[1] - chunked).max() > 0.01


@pytest.mark.one_case
@pytest.mark.parametrize("size", [0, 5, 10])
def test_parameters_on_the_primary_device_and_on_the_host_give_the_same(devices, size):
    dp = wrapper(8)
    x = ROWS[:size]
    _, want, stats, _ = plain_loop(VARIABLES, x, 8)
    for variables in (VARIABLES, jax.device_put(VARIABLES, devices[0])):
        y, new = dp.apply(variables, x, mutable=["batch_stats"])
        close((y, new["batch_stats"]), (want, stats))
        assert y.devices() == {devices[0]}
        assert {d for leaf in jax.tree.leaves(new) for d in leaf.devices()} == {devices[0]}


def test_zero_rows_leave_the_state_as_it_was_to_the_last_bit():
    for n in (1, 8):
        y, new = wrapper(n).apply(VARIABLES, ROWS[:0], mutable=["batch_stats"])
        assert y.shape == (0, 2) and y.dtype == np.float32
        jax.tree.map(np.testing.assert_array_equal, new["batch_stats"], VARIABLES["batch_stats"])


def test_each_replica_sees_its_true_number_of_rows_and_idle_ones_none():
    """Sums and counts over a chunk are those of its true rows."""

    def model(_, x):
        return {"count": jnp.float32(len(x)), "sum": x.sum(), "max": x.max(0), "mean": x.mean(0, keepdims=True)}

    dp = jdp.DataParallel(model, devices=range(4))
    x = -1 - np.arange(20, dtype=np.float32).reshape(10, 2)  # negative, so that padding with zeros would show in max
    y = dp(None, x)
    np.testing.assert_array_equal(y["count"], [3, 3, 3, 1])
    np.testing.assert_array_equal(y["sum"], [x[:3].sum(), x[3:6].sum(), x[6:9].sum(), x[9:].sum()])
    np.testing.assert_array_equal(y["max"], np.concatenate([x[i : i + 3].max(0) for i in (0, 3, 6, 9)]))
    np.testing.assert_allclose(y["mean"], [x[i : i + 3].mean(0) for i in (0, 3, 6, 9)], rtol=1e-6)
    np.testing.assert_array_equal(dp(None, x[:5])["count"], [2, 2, 1])
    np.testing.assert_array_equal(dp(None, x[:1])["count"], [1])


def test_outputs_whose_length_is_not_the_chunks_keep_order():
    """A replica may return more or fewer rows than it got: all of them come, replica after replica."""
    dp = jdp.DataParallel(lambda w, x: (jnp.repeat(x, 2, 0) * w, x[:1]), devices=range(4))
    x = np.arange(10, dtype=np.float32)
    doubled, firsts = dp(np.float32(3), x)
    np.testing.assert_array_equal(doubled, np.repeat(x, 2) * 3)
    np.testing.assert_array_equal(firsts, [0, 3, 6, 9])


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64"])
def test_every_dtype_survives(dtype):
    x = np.arange(-5, 5).reshape(10, 1).astype(jnp.dtype(dtype))
    y = IDENTITY(None, x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(y), x)


IDENTITY = jdp.DataParallel(lambda _, x: x, devices=range(4))


def test_uneven_along_another_dim():
    dp = jdp.DataParallel(lambda w, x: x * w + x.shape[1], devices=range(4), dim=-1)
    x = np.arange(30, dtype=np.float32).reshape(3, 10)
    sizes = np.array([3, 3, 3, 3, 3, 3, 3, 3, 3, 1], np.float32)
    np.testing.assert_array_equal(dp(np.float32(2), x), 2 * x + sizes)


def test_gradient_for_a_parameter_that_only_some_replicas_use():
    """Row 136d: zeros from the others; and for one that none uses zeros too (136c)."""

    def model(p, x):
        return x * (p["a"] if len(x) == 3 else p["b"])

    dp = jdp.DataParallel(model, devices=range(4))
    params = {"a": np.float32(2), "b": np.float32(3), "none": np.ones(2, np.float32)}
    x = np.arange(1, 11, dtype=np.float32)
    grads = jax.grad(lambda p: dp(p, x).sum())(params)
    assert float(grads["a"]) == x[:9].sum() and float(grads["b"]) == x[9]
    np.testing.assert_array_equal(grads["none"], [0, 0])


def test_nonfinite_rows_stay_where_they_are():
    """A NaN row spoils its own replica's gradient only if the loss looks at it; padding makes none."""
    dp = jdp.DataParallel(lambda w, x: jnp.log(x) * w, devices=range(4))
    x = np.arange(1, 11, dtype=np.float32)  # log of a zero padding row would be -inf, its gradient NaN
    value, (dw, dx) = jax.value_and_grad(lambda w, x: dp(w, x).sum(), (0, 1))(np.float32(2), x)
    np.testing.assert_allclose(value, 2 * np.log(x).sum(), rtol=1e-6)
    np.testing.assert_allclose(dw, np.log(x).sum(), rtol=1e-6)
    np.testing.assert_allclose(dx, 2 / x, rtol=1e-6)


def branches(fn, x, n=4, chunk_sizes=None):
    """How many branches the program has that runs `fn(None, x)`, and its derivative, on uneven chunks."""
    inputs = jdp.scatter((x,), range(n), chunk_sizes=chunk_sizes)

    def loss(w):
        return sum(
            jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(jdp.gather(jdp.parallel_apply(fn, w, inputs)))
        )

    return jax.jit(jax.grad(loss)).lower(jnp.float32(2)).as_text().count("stablehlo.case")


def test_a_function_of_each_row_alone_has_no_branches():
    """Of a conditional XLA keeps what the derivative needs of all branches, and fuses nothing across it."""
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    assert branches(lambda w, x: jnp.sin(x * w), x) == 0
    assert branches(lambda w, x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x * w, 0), x) == 0
    assert branches(lambda w, x: jnp.sin(x * w) - x.mean(0), x)
    assert branches(lambda w, x: jnp.sin(x * w) / len(x), x)
    assert branches(lambda w, x: jnp.sin(x * w)[::-1], x)
    assert branches(lambda w, x: jnp.sin(x * w), x[:5])  # the last replica has no rows
    assert branches(lambda w, x: jnp.sin(x * w), x, 2, (9, 1))  # 18 rows in place of 10


@pytest.mark.one_case
@pytest.mark.parametrize("sizes", [(3, 3, 3, 2), (4, 3, 4, 3), (2, 3, 3, 3)])
def test_what_replicas_are_filled_up_with_shows_nowhere(sizes):
    """In no output, no gradient by a parameter, none by a row: also where a row of zeros would give a NaN."""
    key, x = jax.random.key(1), np.random.default_rng(0).normal(size=(sum(sizes), 3)).astype(np.float32)

    def model(w, x):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(kept, x * w / jnp.linalg.norm(x, axis=1, keepdims=True), 0), jnp.concatenate([x, x * w], 1)

    def split(w, x):
        inputs = jdp.scatter((x,), range(4), chunk_sizes=sizes)
        return loss(jdp.gather(jdp.parallel_apply(model, w, inputs)))

    def loop(w, x):
        ends = np.cumsum(sizes)[:-1]
        return loss([jnp.concatenate(y) for y in zip(*[model(w, part) for part in jnp.split(x, ends)], strict=True)])

    def loss(y):
        return jnp.sqrt(1 + sum((z**2).sum() for z in y)) * y[0].sum()

    w = jnp.float32([1, 2, 3])
    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(w, x) for f in (split, loop))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_one_more_compilation_per_uneven_size_and_none_for_a_size_seen_before():
    calls = []

    def model(w, x):
        calls.append(len(x))
        return x * w

    dp = jdp.DataParallel(model, devices=range(4))
    w = jdp.replicate(np.float32(2), range(4))
    rows = np.arange(16, dtype=np.float32)
    traced = {}
    for size in (8, 16, 10, 8, 5, 10, 16, 5, 1, 1, 7, 10, 8, 0, 0, 7):
        before = len(calls)
        np.testing.assert_array_equal(dp(w, rows[:size]), 2 * rows[:size])
        new = calls[before:]
        assert size not in traced or not new, f"{size} rows were traced again: {new}"
        traced.setdefault(size, sorted(new))
    # one trace per distinct chunk size: the bodies of one program
    assert traced[8] == [2] and traced[16] == [4]
    assert traced[10] == [1, 3] and traced[5] == [1, 2] and traced[7] == [1, 2] and traced[1] == [1]


def test_shares_of_ones_own_through_scatter():
    """A subclass may give uneven devices uneven shares, none included."""

    class Weighted(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            share = (4, 0, 2, 1)
            return jdp.scatter(inputs, devices, self.dim, chunk_sizes=share), jdp.scatter(kwargs, devices)

    dp = Weighted(NET, devices=range(4))
    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    x = ROWS[:7]
    y, new = dp.apply(VARIABLES, x, mutable=["batch_stats"])
    want = [chunk_forward(params, stats, x[a:b]) for a, b in ((0, 4), (4, 6), (6, 7))]
    close(y, np.concatenate([w[0] for w in want]))
    close(new["batch_stats"], want[0][1])


@pytest.mark.parametrize("n", [1, 4])
def test_no_rows_what_is_not_made_of_rows_is_the_models(n):
    dp = jdp.DataParallel(lambda w, x: (x, w * 3), range(n), out_axes=(0, None))
    rows, three = dp(np.float32(2), laws.NUMBERS[:0])
    assert rows.shape == (0, 4) and float(three) == 6


def test_a_chunk_of_one_row_that_is_squeezed_names_the_way_out():
    dp = jdp.DataParallel(lambda w, x: (x @ w).squeeze(), devices=[0, 1])
    with pytest.raises(ValueError, match=r"float32\[2\] on replica 0 and float32\[\] on replica 1; .* squeeze\(-1\)"):
        dp(np.ones((3, 1), np.float32), ROWS[:3])
    dp = jdp.DataParallel(lambda w, x: (x @ w).squeeze(-1), devices=[0, 1])
    assert dp(np.ones((3, 1), np.float32), ROWS[:3]).shape == (3,)
