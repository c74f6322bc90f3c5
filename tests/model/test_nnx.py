"""NNX: `dp(x) == module(x)`, the wrapper a graph node, its state replicated and updated in place."""

import copy
import functools
import gc
import re
import warnings
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import NUMBERS

import jdp

ROWS = np.random.RandomState(0).randn(16, 3).astype(np.float32)
ONES = np.ones((10, 16), np.float32)


class Net(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=rngs)  # a bias before BatchNorm has gradient 0
        self.norm = nnx.BatchNorm(4, momentum=0.5, use_fast_variance=False, axis_name=axis_name, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.norm(self.first(x))))


class Dropper(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


def wrap(module, n, **kw):
    return jdp.DataParallel(module, devices=range(n), **kw)


def close(got, want, rtol=1e-5, atol=1e-6):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol)


def values(node):
    """The values of all state, keys included, as NumPy arrays."""
    leaves = jax.tree.leaves(nnx.state(node))
    return [np.asarray(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v) for v in leaves]


def chunks(x, n):
    size = max(1, -(-len(x) // n))
    return [x[i : i + size] for i in range(0, len(x), size)]


def params_of(node):
    """The parameters by their last two path names, whatever wraps the model."""
    return {tuple(map(str, path[-2:])): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(node, nnx.Param))}


# --- the equation ---


@pytest.mark.one_case("8-10")
@pytest.mark.parametrize("n, size", [(1, 5), (3, 0), (3, 6), (3, 5), (8, 10), (8, 1)])
def test_outputs_state_and_gradients_equal_the_plain_loop_over_chunks(n, size):
    dp, bare = wrap(Net(nnx.Rngs(0)), n), Net(nnx.Rngs(0))
    x = ROWS[:size]

    def loss(model):
        y = model(x)
        return jnp.sqrt(1 + jnp.sum(y**2)), y

    (value, y), grads = nnx.value_and_grad(loss, has_aux=True)(dp)

    state = nnx.state(bare, nnx.BatchStat)
    graphdef, params, rest = nnx.split(bare, nnx.Param, ...)

    @jax.jit
    def looped(params):
        outs = [nnx.merge(graphdef, params, rest, copy=True)(c) for c in chunks(x, n)]
        y = jnp.concatenate(outs) if outs else jnp.zeros((0, 2))
        return jnp.sqrt(1 + jnp.sum(y**2)), y

    (want_value, want_y), want_grads = jax.value_and_grad(looped, has_aux=True)(params)
    close((value, y), (want_value, want_y))
    close(grads, want_grads)
    if size:
        first = Net(nnx.Rngs(0))
        first(chunks(x, n)[0])
        state = nnx.state(first, nnx.BatchStat)
    close(nnx.state(dp.module, nnx.BatchStat), state)


def test_batch_statistics_are_updated_in_place_by_a_plain_call():
    """Row 137c: the primary's chunk alone, over several calls."""
    model = Net(nnx.Rngs(0))
    mean = model.norm.mean
    dp, first = wrap(model, 4), Net(nnx.Rngs(0))
    assert dp.module is model
    for size, rows in ((10, 3), (8, 2), (5, 2)):
        dp(ROWS[:size])
        first(ROWS[:rows])
    assert model.norm.mean is mean  # the same Variable, another value
    close(nnx.state(model, nnx.BatchStat), nnx.state(first, nnx.BatchStat))


def test_reduce_state_mean():
    dp = wrap(Net(nnx.Rngs(0)), 4, reduce_state="mean")
    dp(ROWS[:10])
    parts = []
    for chunk in chunks(ROWS[:10], 4):
        net = Net(nnx.Rngs(0))
        net(chunk)
        parts.append(nnx.state(net, nnx.BatchStat))
    want = jax.tree.map(lambda *leaves: np.average(np.stack(leaves), 0, weights=[3, 3, 3, 1]), *parts)
    close(nnx.state(dp.module, nnx.BatchStat), want)


def test_batch_norm_with_axis_name_is_synchronised_on_even_batches():
    dp, bare = wrap(Net(nnx.Rngs(0), "data"), 4), Net(nnx.Rngs(0))
    close(dp(ROWS[:8]), bare(ROWS[:8]))
    close(nnx.state(dp.module, nnx.BatchStat), nnx.state(bare, nnx.BatchStat))
    before = values(dp)
    with pytest.raises(ValueError, match="(?si)(?=.*drop)(?=.*pad)(?=.*sync_batch_norm)"):
        dp(ROWS[:7])
    jax.tree.map(np.testing.assert_array_equal, values(dp), before)


# --- where things are ---


def test_state_is_replicated_at_construction_and_stays_so(devices):
    model = Net(nnx.Rngs(0))
    kernel = np.asarray(model.first.kernel[...])
    dp = jdp.DataParallel(model, devices=[2, 3, 4])
    for _ in range(2):
        for leaf in jax.tree.leaves(nnx.state(model)):
            assert leaf.is_fully_replicated and leaf.devices() == set(devices[2:5])
            shards = [np.asarray(s.data) for s in leaf.addressable_shards]
            assert all(np.array_equal(shards[0], s) for s in shards)
        np.testing.assert_array_equal(model.first.kernel[...], kernel)
        y = dp(ROWS[:7])
        assert y.devices() == set(devices[2:5])


@pytest.mark.one_case
@pytest.mark.parametrize("where, at", [("cpu", 0), (-1, 0), (6, 6), ("cpu:2", 2)])
def test_output_device(devices, where, at):
    dp = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=[2, 3], output_device=where)
    assert dp(ROWS[:5]).devices() == {devices[at]}


def test_attributes(devices):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    dp = jdp.DataParallel(model, [1, 2], output_device=3)
    assert dp.module is model and tuple(dp.devices) == tuple(devices[1:3])
    assert dp.output_device == devices[3] and dp.dim == 0
    assert isinstance(dp, nnx.Module) and "Linear" in repr(dp)


# --- the graph ---


def test_split_merge_state_and_update():
    dp = wrap(Net(nnx.Rngs(0)), 3)
    assert params_of(dp).keys() == params_of(dp.module).keys() and len(params_of(dp)) == 5
    graphdef, params, rest = nnx.split(dp, nnx.Param, ...)
    merged = nnx.merge(graphdef, params, rest)
    assert isinstance(merged, jdp.DataParallel) and merged.module is not dp.module
    assert tuple(merged.devices) == tuple(dp.devices)
    close(merged(ROWS[:5]), dp(ROWS[:5]))
    doubled = jax.tree.map(lambda w: 2 * w, params)
    nnx.update(dp, doubled)
    bare = Net(nnx.Rngs(0))
    nnx.update(bare, jax.tree.map(lambda w: 2 * w, nnx.state(bare, nnx.Param)))
    close(dp(ROWS[:2]), _chunked(bare, ROWS[:2], 3))


def _chunked(bare, x, n):
    graphdef, state = nnx.split(bare)
    return np.concatenate([nnx.merge(graphdef, state, copy=True)(c) for c in chunks(x, n)])


def test_a_functional_call_over_split_state():
    """The NNX way to pure JAX: split, jax.jit, merge."""
    dp = wrap(Net(nnx.Rngs(0)), 3)
    graphdef, state = nnx.split(dp)

    @jax.jit
    def forward(state, x):
        model = nnx.merge(graphdef, state)
        y = model(x)
        return y, nnx.state(model)

    y, new = forward(state, ROWS[:5])
    close(y, dp(ROWS[:5]))
    close(new, nnx.state(dp))


def test_replicas_are_compared_at_construction_if_the_state_was_replicated_before(monkeypatch):
    """What comes from one device is the same everywhere, and to compare it would compile a program."""
    compared = []
    monkeypatch.setattr(jdp.DataParallel, "check_replicas", lambda self: compared.append(self.devices))
    dp = wrap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), 2)
    assert not compared
    wrap(dp.module, 2)
    assert len(compared) == 1


def test_state_of_the_model_loads_in_the_wrapped_one():
    """A checkpoint of the bare model and of `dp.module` are the same tree."""
    dp, bare = wrap(Net(nnx.Rngs(0)), 3), Net(nnx.Rngs(1))
    nnx.update(dp.module, nnx.state(bare))
    close(dp(ROWS[:5]), _chunked(bare, ROWS[:5], 3))
    assert jax.tree.structure(nnx.state(dp.module)) == jax.tree.structure(nnx.state(bare))


@pytest.mark.full
def test_optimizer_trains_the_wrapper_as_the_loop_over_chunks_would():
    dp, bare = wrap(Net(nnx.Rngs(0)), 3), Net(nnx.Rngs(0))
    x, labels = ROWS[:5], ROWS[5:10, :2]
    optimizer = nnx.Optimizer(dp, optax.sgd(0.5, momentum=0.5), wrt=nnx.Param)

    @nnx.jit
    def step(dp, optimizer, x, labels):
        def loss(dp):
            return jnp.mean((dp(x) - labels) ** 2)

        value, grads = nnx.value_and_grad(loss)(dp)
        optimizer.update(dp, grads)
        return value

    reference = nnx.Optimizer(bare, optax.sgd(0.5, momentum=0.5), wrt=nnx.Param)

    @nnx.jit
    def plain_step(bare, reference, x, labels):
        def loss(bare):
            parts = [bare(c) for c in chunks(x, 3)[1:]]  # their statistics are overwritten below
            nnx.update(bare, stats)
            first = bare(chunks(x, 3)[0])
            return jnp.mean((jnp.concatenate([first, *parts]) - labels) ** 2)

        stats = nnx.state(bare, nnx.BatchStat)
        value, grads = nnx.value_and_grad(loss)(bare)
        reference.update(bare, grads)
        return value

    losses = [(float(step(dp, optimizer, x, labels)), float(plain_step(bare, reference, x, labels))) for _ in range(5)]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-4)
    assert losses[-1][0] < losses[0][0]
    assert int(optimizer.step[...]) == 5
    got, want = params_of(dp), params_of(bare)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-4, err_msg=str(name))
    close(nnx.state(dp.module, nnx.BatchStat), nnx.state(bare, nnx.BatchStat), rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_optimizer_without_jit():
    dp = wrap(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 3)
    bare = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    for model in (dp, bare):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        for _ in range(2):
            grads = nnx.grad(lambda m: jnp.sum(m(ROWS[:5]) ** 2))(model)
            optimizer.update(model, grads)
    close(nnx.state(dp.module), nnx.state(bare))


@pytest.mark.full
def test_nnx_grad_with_respect_to_the_inputs_and_twice():
    dp, bare = wrap(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 3), nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def penalty(model, x):
        dx = jax.grad(lambda x: jnp.sum(jnp.sin(model(x))))(x)
        return jnp.sum(dx**2)

    for argnums in (0, 1):
        got = nnx.grad(penalty, argnums=argnums)(dp, ROWS[:5])
        close(got, nnx.grad(penalty, argnums=argnums)(bare, ROWS[:5]))


# --- train, eval, randomness ---


def test_train_and_eval_recurse_into_the_module():
    """Row 139g."""

    class Both(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    dp = wrap(Both(nnx.Rngs(0)), 3)
    dp(ROWS[:5])
    dp.eval()
    assert dp.module.dropout.deterministic is True and dp.module.norm.use_running_average is True
    before = values(dp)
    y = dp(ROWS[:5])
    mean, var = (np.asarray(v[...]) for v in (dp.module.norm.mean, dp.module.norm.var))
    np.testing.assert_allclose(y, (ROWS[:5] - mean) / np.sqrt(var + 1e-5), rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, values(dp), before)
    dp.train()
    assert dp.module.dropout.deterministic is False
    assert (np.asarray(dp(ROWS[:5])) == 0).any()


def rng_state(node):
    keys = [jax.random.key_data(v[...]) for _, v in nnx.to_flat_state(nnx.state(node, nnx.RngKey))]
    counts = [int(v[...]) for _, v in nnx.to_flat_state(nnx.state(node, nnx.RngCount))]
    return np.asarray(keys), counts


class Noise(nnx.Module):
    """Splits its key at each call, and keeps the rest."""

    def __init__(self):
        self.key = nnx.RngKey(jax.random.key(0), tag="noise")

    def __call__(self, x):
        key, rest = jax.random.split(self.key[...])
        self.key.set_value(rest)
        return x + jax.random.normal(key, x.shape)


@pytest.mark.parametrize("n", [1, 3])
def test_a_key_that_the_model_itself_changes_comes_back(n):
    dp, bare = wrap(Noise(), n), Noise()
    for _ in range(3):
        np.testing.assert_array_equal(dp(ROWS[: 2 * n])[:2], bare(ROWS[:2]))
    np.testing.assert_array_equal(rng_state(dp)[0], rng_state(bare)[0])


@pytest.mark.full
def test_replicas_draw_different_masks_and_counts_come_back_but_keys_do_not_change():
    dp, bare = wrap(Dropper(nnx.Rngs(0)), 4), Dropper(nnx.Rngs(0))
    keys, counts = rng_state(dp)
    first = np.asarray(dp(ONES))
    parts = [first[0:3], first[3:6], first[6:9]]
    assert not any(np.array_equal(parts[i], parts[j]) for i in range(3) for j in range(i))
    np.testing.assert_array_equal(parts[0], bare(ONES[:3]))  # the primary: what the bare model draws
    after, advanced = rng_state(dp)
    np.testing.assert_array_equal(after, keys)
    assert advanced == rng_state(bare)[1] != counts
    second = np.asarray(dp(ONES))
    np.testing.assert_array_equal(second[:3], bare(ONES[:3]))
    assert not np.array_equal(first, second)
    again = wrap(Dropper(nnx.Rngs(0)), 4)
    np.testing.assert_array_equal(again(ONES), first)  # reproducible
    np.testing.assert_array_equal(again(ONES), second)
    np.testing.assert_array_equal(rng_state(again)[0], keys)


def test_one_device_is_the_bare_model():
    dp, bare = wrap(Dropper(nnx.Rngs(3)), 1), Dropper(nnx.Rngs(3))
    for _ in range(3):
        np.testing.assert_array_equal(dp(ONES), bare(ONES))
    assert rng_state(dp)[1] == rng_state(bare)[1]


def test_zero_rows_change_nothing():
    """All replicas are idle: neither statistics nor counts move."""

    class Both(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    dp = wrap(Both(nnx.Rngs(0)), 3)
    before = values(dp)
    assert dp(ROWS[:0]).shape == (0, 3)
    jax.tree.map(np.testing.assert_array_equal, values(dp), before)


@pytest.mark.full
def test_rngs_passed_as_an_argument():
    """An `Rngs` among the arguments is folded like the model's own, and its count moves on."""

    class Given(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, key):
            return self.dropout(x, rngs=nnx.Rngs(dropout=key))

    dp = wrap(Given(), 4)
    y = np.asarray(dp(ONES, jax.random.key(1)))
    np.testing.assert_array_equal(y[:3], Given()(ONES[:3], jax.random.key(1)))
    assert not np.array_equal(y[:3], y[3:6])


# --- intermediates, caches, carries ---


@pytest.mark.one_case
@pytest.mark.parametrize("n, size", [(1, 5), (3, 6), (3, 5), (8, 5)])
def test_captured_intermediates_are_gathered(n, size):
    """`nnx.capture` sees through the wrapper: the rows of all replicas, in input order."""

    class Sowing(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "double", 2 * x)
            self.sow(nnx.Intermediate, "mean", x.mean())
            self.sow(nnx.Intermediate, "double", 3 * x)
            return x + 1

    dp, x = wrap(Sowing(), n), ROWS[:size]
    forward = nnx.capture(lambda model, x: model(x), nnx.Intermediate)
    for _ in range(2):
        y, captured = forward(dp, x)
        np.testing.assert_array_equal(y, x + 1)
        double, mean = (captured["module"][name].get_value() for name in ("double", "mean"))
        assert len(double) == 2 and len(mean) == 1
        np.testing.assert_array_equal(double[0], 2 * x)
        np.testing.assert_array_equal(double[1], 3 * x)
        np.testing.assert_allclose(mean[0], [c.mean() for c in chunks(x, n)], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*Using 'Module.sow:DeprecationWarning")
def test_sow_and_pop_without_capture():
    """Flax's older way: the values stay on the module until they are popped."""

    class Sowing(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "double", 2 * x)
            self.sow(nnx.Intermediate, "mean", x.mean())
            return x + 1

    dp = wrap(Sowing(), 3)
    for size in (6, 5, 6):
        np.testing.assert_array_equal(dp(ROWS[:size]), ROWS[:size] + 1)
        popped = nnx.pop(dp.module, nnx.Intermediate)
        (double,), (mean,) = popped["double"].get_value(), popped["mean"].get_value()
        np.testing.assert_array_equal(double, 2 * ROWS[:size])
        np.testing.assert_allclose(mean, [c.mean() for c in chunks(ROWS[:size], 3)], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*Using 'Module.sow:DeprecationWarning")
def test_sown_values_that_are_not_popped_are_appended_to():
    class Sowing(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "double", 2 * x)
            return x + 1

    dp = wrap(Sowing(), 3)
    for _ in range(2):
        dp(ROWS[:5])
    popped = nnx.pop(dp.module, nnx.Intermediate)["double"].get_value()
    assert len(popped) == 2
    np.testing.assert_array_equal(popped[0], 2 * ROWS[:5])
    np.testing.assert_array_equal(popped[1], 2 * ROWS[:5])


def test_decode_cache():
    def make(size):
        attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((size, 3, 4))
        return attention

    x = np.random.RandomState(1).randn(5, 3, 4).astype(np.float32)
    bare, dp = make(5), wrap(make(5), 3, state_axes={nnx.Cache: 0})
    forward = nnx.jit(lambda model, x: model(x))
    for t in range(3):
        close(dp(x[:, t : t + 1]), forward(bare, x[:, t : t + 1]))
    close(nnx.state(dp.module, nnx.Cache), nnx.state(bare, nnx.Cache))


def test_rnn_carry_of_ones_own_variable_type():
    class Carry(nnx.Variable):
        pass

    class Cell(nnx.Module):
        def __init__(self, size):
            self.h = Carry(jnp.zeros((size, 3)))
            self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.h[...] = jnp.tanh(self.h[...] + x)
            self.count[...] += 1
            return self.h[...]

    dp = wrap(Cell(5), 3, state_axes={Carry: 0})
    h = np.zeros((5, 3))
    for step in range(1, 4):
        h = np.tanh(h + step * ROWS[:5])
        np.testing.assert_allclose(dp(step * ROWS[:5]), h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dp.module.h[...], h, rtol=1e-5, atol=1e-6)
        assert dp.module.count[...] == step and dp.module.count[...].dtype == jnp.int32


def test_a_cache_whose_update_has_another_shape_is_named_and_nothing_changes():
    class Growing(nnx.Module):
        def __init__(self):
            self.grown = nnx.Cache(jnp.zeros((5, 1)))

        def __call__(self, x):
            self.grown.set_value(jnp.concatenate([self.grown[...]] * 2, 1))
            return x

    dp = wrap(Growing(), 3, state_axes={nnx.Cache: 0})
    with pytest.raises(ValueError, match="grown"):
        dp(ROWS[:5])
    assert dp.module.grown[...].shape == (5, 1)


@pytest.mark.full
def test_lstm_with_a_time_axis_first():
    def make():
        return nnx.RNN(nnx.LSTMCell(2, 4, rngs=nnx.Rngs(0)), time_major=True)

    x = np.random.RandomState(0).randn(3, 5, 2).astype(np.float32)
    dp, bare = wrap(make(), 3, in_axes=(1,), out_axes=1), make()
    close(dp(x), bare(x))
    got, want = (nnx.grad(lambda m: jnp.sum(m(x) ** 2))(m) for m in (dp, bare))
    close(got, want)


# --- real models ---


@pytest.mark.full
def test_cnn_with_batch_norm_and_dropout():
    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 3, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(3, momentum=0.5, use_fast_variance=False, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(12, 2, rngs=rngs)

        def __call__(self, x):
            x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
            return self.head(self.dropout(x.reshape(len(x), -1)))

    x = np.random.RandomState(1).randn(5, 4, 4, 1).astype(np.float32)
    dp, bare = wrap(CNN(nnx.Rngs(0)), 3), CNN(nnx.Rngs(0))
    close(dp(x)[:2], bare(x[:2]))
    close(nnx.state(dp.module, nnx.BatchStat), nnx.state(bare, nnx.BatchStat))
    dp.eval(), bare.eval()
    close(dp(x), bare(x))


class Out(NamedTuple):
    logits: Any
    loss: Any


def test_containers_zero_d_outputs_keywords_and_static_arguments():
    class Many(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, batch, mode, *, labels, scale=1.0):
            assert mode == "train"
            y = self.linear(batch["x"]) * scale
            return {"out": Out(y, jnp.mean((y - labels) ** 2)), "none": None, "list": [y]}

    dp, bare = wrap(Many(nnx.Rngs(0)), 3), Many(nnx.Rngs(0))
    labels = ROWS[5:10, :2]
    out = dp({"x": ROWS[:5]}, "train", labels=labels, scale=2.0)
    want = bare({"x": ROWS[:5]}, "train", labels=labels, scale=2.0)
    assert type(out["out"]) is Out and out["none"] is None and type(out["list"]) is list
    close(out["out"].logits, want["out"].logits)
    per_row = np.mean((want["out"].logits - labels) ** 2, 1)
    np.testing.assert_allclose(out["out"].loss, [c.mean() for c in chunks(per_row, 3)], rtol=1e-5)


@pytest.mark.full
def test_tied_weights_stay_tied():
    """Row 79: the shared Variable is one parameter, its gradient the sum of both uses."""

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, 4, rngs=rngs)
            self.head = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.again = self.head

        def __call__(self, tokens):
            return self.embed.attend(self.again(nnx.tanh(self.head(self.embed(tokens)))))

    tokens = np.arange(10).reshape(5, 2) % 7
    dp, bare = wrap(Tied(nnx.Rngs(0)), 3), Tied(nnx.Rngs(0))
    close(dp(tokens), bare(tokens))
    assert dp.module.head is dp.module.again
    assert len(jax.tree.leaves(nnx.state(dp, nnx.Param))) == len(jax.tree.leaves(nnx.state(bare, nnx.Param)))
    got, want = (nnx.grad(lambda m: jnp.sum(m(tokens) ** 2))(m) for m in (dp, bare))
    close(got, want)
    copied = copy.deepcopy(dp)
    assert copied.module.head is copied.module.again


@pytest.mark.full
def test_spectral_norm():
    def make():
        rngs = nnx.Rngs(0)
        return nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs)

    dp, bare = wrap(make(), 3), make()
    for _ in range(2):
        close(dp(ROWS[:5]), bare(ROWS[:5]))
    close(nnx.state(dp.module), nnx.state(bare))


def test_a_callable_module_without_any_state():
    class Double(nnx.Module):
        def __call__(self, x):
            return 2 * x

    np.testing.assert_array_equal(wrap(Double(), 3)(ROWS[:5]), 2 * ROWS[:5])


# --- compilation and memory ---


@pytest.mark.full
def test_the_model_is_called_once_per_shape_and_a_dropped_wrapper_is_freed():
    calls = []

    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            calls.append(len(x))
            return self.dropout(self.norm(x))

    dp = wrap(Counting(nnx.Rngs(0)), 4)
    for size in (8, 4, 8, 4, 8):
        for _ in range(2):
            dp(ROWS[:size])
    assert calls == [2, 1]
    dp.eval()
    for _ in range(3):
        dp(ROWS[:8])
    assert calls == [2, 1, 2]
    dp.train()
    dp(ROWS[:8])
    assert calls == [2, 1, 2]  # the program of before
    nnx.update(dp, jax.tree.map(lambda w: w + 1, nnx.state(dp, nnx.BatchStat)))
    dp(ROWS[:8])
    assert calls == [2, 1, 2]

    refs = weakref.ref(dp), weakref.ref(dp.module)
    del dp
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_nested_wrappers_run_once():
    sizes = []

    class Seen(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)

        def __call__(self, x):
            sizes.append(len(x))
            return self.norm(x)

    outer = wrap(wrap(Seen(nnx.Rngs(0)), 4), 4)
    close(outer(ROWS[:8]), np.concatenate([Seen(nnx.Rngs(0))(c) for c in chunks(ROWS[:8], 4)]))
    assert sizes[0] == 2 and len(sizes) == 5
    first = Seen(nnx.Rngs(0))
    first(ROWS[:2])
    close(nnx.state(outer, nnx.BatchStat), nnx.state(first, nnx.BatchStat))


def test_a_wrapped_submodule():
    """Row 139l: a wrapper inside a model that is not wrapped."""

    class Whole(nnx.Module):
        def __init__(self, rngs, n=None):
            body = nnx.Linear(3, 4, rngs=rngs)
            self.body = body if n is None else wrap(body, n)
            self.head = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(jax.device_put(self.body(x), jax.devices()[0]))

    close(Whole(nnx.Rngs(0), 3)(ROWS[:5]), Whole(nnx.Rngs(0))(ROWS[:5]))


def test_an_exception_of_the_model_says_where_it_came_from_and_changes_nothing():
    class Picky(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            y = self.dropout(self.norm(x))
            if len(x) == 1:
                raise KeyError("lonely")
            return y

    dp = wrap(Picky(nnx.Rngs(0)), 4)
    before = jax.tree.leaves(nnx.state(dp))
    with pytest.raises(KeyError, match="lonely") as info:
        dp(ROWS[:10])
    said = "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])
    assert "Caught KeyError in replica 3 on device" in said
    after = jax.tree.leaves(nnx.state(dp))
    assert len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True))
    assert dp(ROWS[:8]).shape == (8, 3)


def test_overridden_steps():
    class Spied(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            steps.append("scatter")
            return super().scatter(tuple(2 * x for x in inputs), kwargs, devices)

        def parallel_apply(self, replicas, inputs, kwargs):
            steps.append("parallel_apply")
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            steps.append("gather")
            return super().gather(outputs, output_device) + 1

    steps = []
    dp, bare = Spied(Net(nnx.Rngs(0)), devices=range(3)), wrap(Net(nnx.Rngs(0)), 3)
    close(dp(ROWS[:5]), bare(2 * ROWS[:5]) + 1)
    assert steps == ["scatter", "parallel_apply", "gather"]
    close(nnx.state(dp.module, nnx.BatchStat), nnx.state(bare.module, nnx.BatchStat))


@pytest.mark.full
def test_an_eager_loop_without_waiting_ends():
    dp = wrap(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), 8)
    y = None
    for _ in range(300):
        y = dp(ROWS[:10])
    assert np.isfinite(y).all() and y.shape == (10, 3)


# --- variables that the call makes ---


class Loss(nnx.Variable):
    pass


class Penalised(nnx.Module):
    """A term of the loss travels in a variable, as a KL term does."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        self.penalty = Loss(jnp.mean((self.w * x) ** 2))
        return self.w * x


def penalised(model, x):
    y = model(x)
    return jnp.mean(y) + sum(jax.tree.leaves(nnx.pop(model, Loss)))


@pytest.mark.each_value
@pytest.mark.one_case("3-7-jit")
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit])
@pytest.mark.parametrize("size", [1, 7, 8])
def test_a_loss_that_travels_in_a_variable_is_the_mean_over_rows(jit, n, size):
    x = np.arange(size, dtype=np.float32)
    dp, bare = wrap(Penalised(), n, reduce_state="mean"), Penalised()
    got, want = jit(nnx.value_and_grad(penalised))(dp, x), nnx.value_and_grad(penalised)(bare, x)
    close(got, want)
    if size == 8:
        close(got, [21.0, 38.5])


def test_a_loss_that_travels_in_a_variable_is_refused_where_it_would_be_the_first_chunks(refused):
    x = np.arange(8, dtype=np.float32)
    dp = wrap(Penalised(), 4)
    for call in (nnx.value_and_grad(penalised), nnx.jit(penalised), lambda model, x: model(x)):
        with refused(ValueError, "DataParallel", match=r"state penalty.*float32\[\].*reduce_state=\"mean\""):
            call(dp, x)
    assert not hasattr(dp.module, "penalty")
    close(nnx.value_and_grad(penalised)(dp, x[1:2]), nnx.value_and_grad(penalised)(Penalised(), x[1:2]))
    # Where the loss is made within the replica it is exact, and where nothing is left there is nothing to say.
    close(dp.value_and_grad(penalised)(dp.module, x), [21.0, 38.5])


class Keeping(nnx.Module):
    """Keeps an array that was not there before."""

    def __init__(self, kind, made=lambda x: x):
        self.kind, self.made = kind, made

    def __call__(self, x):
        self.kept = self.kind(self.made(x))
        return x


@pytest.mark.one_case
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
def test_arrays_that_the_call_makes_need_an_axis(refused, reduce_state):
    for made in (lambda x: x, lambda x: x.mean(0), lambda x: x.argmax(1)):
        dp = wrap(Keeping(Loss, made), 3, reduce_state=reduce_state)
        with refused(ValueError, "DataParallel", match=r"state kept.*PathContains\('kept'\): 0.*nnx.Intermediate"):
            dp(ROWS[:5])
    for options in ({"state_axes": {nnx.PathContains("kept"): 0}}, {"state_axes": {Loss: 0}}):
        dp = wrap(Keeping(Loss), 3, reduce_state=reduce_state, **options)
        dp(ROWS[:5])
        close(dp.module.kept[...], ROWS[:5])
    dp = wrap(Keeping(nnx.Intermediate), 3, reduce_state=reduce_state)
    dp(ROWS[:5])
    close(dp.module.kept[...], ROWS[:5])
    dp = wrap(Keeping(Loss, lambda x: jnp.asarray(len(x))), 3, reduce_state=reduce_state)
    dp(ROWS[:5])
    assert dp.module.kept[...] == 2  # an integer: the primary's


class Losing(nnx.Module):
    """Has two variables; a call makes `change` of them."""

    def __init__(self, change):
        self.change, self.a, self.b = change, nnx.Variable(jnp.ones(3)), nnx.Variable(jnp.zeros(3))

    def __call__(self, x):
        self.change(self)
        return x + (self.a[...] if hasattr(self, "a") else 0.0) + self.b[...]


def test_a_variable_that_a_call_removes_is_refused_and_one_that_moves_is_not(refused):
    for change in (lambda m: delattr(m, "a"), lambda m: setattr(m, "b", m.a)):
        dp = wrap(Losing(change), 2)
        with refused(ValueError, "DataParallel", match=r"removes variable Losing\.[ab], or.*Make the change before"):
            dp(ROWS[:4])
        close([dp.module.a[...], dp.module.b[...]], [np.ones(3), np.zeros(3)])
    dp, bare = (make(Losing(lambda m: vars(m).update(a=m.b, b=m.a))) for make in (lambda m: wrap(m, 2), lambda m: m))
    close([dp(ROWS[:4]), dp.module.a[...]], [bare(ROWS[:4]), bare.a[...]])


# --- state with a batch axis, by any filter ---


class Caching(nnx.Module):
    """Attention's cache in a plain variable, beside a parameter and a buffer of the same type that have no rows."""

    def __init__(self, rows, kind=nnx.Variable):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.k, self.v = kind(jnp.zeros((rows, 4, 3))), nnx.Variable(jnp.zeros((rows, 4, 3)))
        self.scale, self.index = nnx.Variable(jnp.full((3,), 2.0)), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        at = self.index[...]
        self.k[...] = self.k[...].at[:, at].set(self.linear(x))
        self.v[...] = self.v[...].at[:, at].set(x)
        self.index[...] = at + 1
        weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", x, self.k[...]))
        return jnp.einsum("bt,btd->bd", weights, self.v[...]) * self.scale[...]


class Key(nnx.Variable):
    pass


def _another_key():
    class Key(nnx.Variable):
        pass

    return Key


K, V = nnx.PathContains("k"), nnx.PathContains("v")


@pytest.mark.one_case("Variable-axes3")
@pytest.mark.parametrize(
    "kind, axes",
    [
        (nnx.Variable, {K: 0, V: 0}),
        (nnx.Variable, {nnx.Any(K, V): 0}),
        (nnx.Variable, {(K, V): 0}),
        (nnx.Variable, {lambda path, variable: path in [("k",), ("v",)]: 0}),
        (
            nnx.Variable,
            {nnx.All(nnx.OfType(nnx.Variable), nnx.Not(nnx.Any(nnx.Param, "tag", lambda p, v: v.ndim < 3))): 0},
        ),
        (Key, {Key: 0, V: 0}),
        (Key, {nnx.OfType(Key): 0, V: 0}),
        (Key, {Key: 0, _another_key(): 1, V: 0}),  # two of one name
        (Key, {V: 0, Key: 0, nnx.Any(K, V): 1}),  # the first that matches
        (nnx.Cache, {"cache": 0, V: 0}),
        (nnx.Cache, {("cache", V): 0}),
    ],
)
def test_a_cache_that_any_filter_names(kind, axes):
    for size in (5, 6):
        bare, dp = Caching(size, kind), wrap(Caching(size, kind), 3, state_axes=axes)
        for t in range(3):
            x = ROWS[t : t + size]
            close(dp(x), bare(x))
        close(nnx.state(dp.module), nnx.state(bare))


def test_everything_has_a_batch_axis():
    class Running(nnx.Module):
        def __init__(self):
            self.h = nnx.Variable(jnp.zeros((5, 3)))

        def __call__(self, x):
            self.h[...] += x
            return self.h[...]

    for key in (..., True):
        dp = wrap(Running(), 3, state_axes={key: 0})
        close(dp(ROWS[:5]), ROWS[:5])
        close(dp.module.h[...], ROWS[:5])


@pytest.mark.parametrize(
    "kind, key, match",
    [(TypeError, 3, "PathContains"), (ValueError, "no such type", r"nnx.PathContains\('no such type")],
)
def test_what_is_no_filter_is_refused_at_construction(refused, kind, key, match):
    with refused(kind, "DataParallel", match=match):
        wrap(Caching(5), 3, state_axes={key: 0})


def test_a_filter_that_names_too_much(refused):
    dp = wrap(Caching(5), 3, state_axes={nnx.Variable: 0})
    with refused(ValueError, "DataParallel", match="state.*let state_axes name what has a batch axis and no more"):
        dp(ROWS[:5])


@pytest.mark.full
def test_a_cache_that_state_axes_does_not_name():
    """Each replica gets its rows and the whole cache; Flax says that the shapes differ, and a note says why."""

    def decoder():
        attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((5, 3, 4))
        return attention

    x = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 1, 4)
    says = "has 2 rows of the batch, and all of the state "
    for model, rows, key in ((decoder(), x, r"nnx.Cache"), (Caching(5), ROWS[:5], r"nnx.PathContains\('k'\)")):
        with pytest.raises((TypeError, ValueError), match="shape|broadcast") as raised:
            wrap(model, 3)(rows)
        (note,) = [x for x in raised.value.__notes__ if x.startswith("jdp.DataParallel")]
        assert re.search(rf"{says}.*, which is \(5, .*state_axes={{{key}: 0}}", note)
    close(wrap(decoder(), 3, state_axes={nnx.Cache: 0})(x), decoder()(x))


# --- Flax's own tools ---


class Layered(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return self.norm(x)


@pytest.mark.full
@pytest.mark.parametrize("size", [5, 6])
def test_capture_of_a_model_with_a_list_of_layers(size):
    dp, bare = wrap(Layered(nnx.Rngs(0)), 3), Layered(nnx.Rngs(0))
    _, want = nnx.capture(bare, nnx.Intermediate)(ROWS[:size])
    before = nnx.graphdef(dp)
    for captured in (nnx.capture(dp, nnx.Intermediate), lambda x: nnx.capture(dp.__call__, nnx.Intermediate)(x)):
        y, got = captured(ROWS[:size])
        assert y.shape == (size, 3)
        close(got["module"], want)
    _, got = nnx.capture(lambda model, x: dp(x), nnx.Intermediate)(dp.module, ROWS[:size])
    close(got, want)
    assert nnx.graphdef(dp) == before
    with pytest.raises(TypeError):
        nnx.capture(dp, nnx.Intermediate)(ROWS[:size, :2])
    assert dp(ROWS[:size]).shape == (size, 3)
    close(nnx.capture(dp, nnx.Intermediate)(ROWS[:size])[1]["module"], want)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_tabulate_shows_the_model_and_leaves_no_trace():
    pytest.importorskip("rich")
    dp, bare = wrap(Layered(nnx.Rngs(0)), 3), Layered(nnx.Rngs(0))
    plain = {"console_kwargs": {"force_terminal": False, "width": 200}}
    table, want = nnx.tabulate(dp, ROWS[:6], **plain), nnx.tabulate(bare, ROWS[:6], **plain)
    assert "module/layers/1" in table and "DataParallel" in table
    totals = [next(line.strip() for line in text.splitlines() if "Total Parameters" in line) for text in (table, want)]
    assert totals[0] == totals[1]
    close(wrap(Layered(nnx.Rngs(0)), 3)(ROWS[:6]), dp(ROWS[:6]))


# --- where the state of arguments goes ---


@pytest.mark.full
@pytest.mark.parametrize("stateless", [False, True])
def test_rngs_can_be_passed_eagerly_and_under_jit_in_either_order(stateless):
    class Net(nnx.Module):
        def __init__(self):
            self.linear = (lambda x: x) if stateless else nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.dropout(self.linear(x), rngs=rngs)

    forward = nnx.jit(lambda dp, x, rngs: dp(x, rngs))
    found = []
    for eager in ((True, False, True), (False, True, False)):
        dp, rngs = wrap(Net(), 3), nnx.Rngs(dropout=1)
        found.append([np.asarray(dp(ROWS[:5], rngs) if e else forward(dp, ROWS[:5], rngs)) for e in eager])
        assert rngs.dropout.count[...] == 3
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(nnx.state(dp)))
        if not stateless:
            loss = dp.value_and_grad(lambda model, x, rngs: jnp.mean(model(x, rngs) ** 2))
            rngs = nnx.Rngs(dropout=1)
            _, grads = loss(dp.module, ROWS[:5], rngs)
            optimizer = nnx.Optimizer(dp.module, optax.sgd(0.1), wrt=nnx.Param)
            optimizer.update(dp.module, grads)
            forward(dp, ROWS[:5], rngs)
    close(*found)


@pytest.mark.full
def test_rngs_among_the_arguments_advance():
    dp = jdp.DataParallel(nnx.Dropout(0.5), range(4))
    rngs = nnx.Rngs(1)
    first, second = dp(NUMBERS, rngs=rngs), dp(NUMBERS, rngs=rngs)
    assert rngs.dropout.count[...] == 2
    assert (np.asarray(first) != np.asarray(second)).any()
    bare, key = nnx.Dropout(0.5), nnx.Rngs(1)
    np.testing.assert_array_equal(first[:3], bare(NUMBERS[:3], rngs=key))  # the primary draws as the bare model
    np.testing.assert_array_equal(second[:3], bare(NUMBERS[:3], rngs=key))


def test_a_variable_among_the_arguments_is_updated():
    class Counts(nnx.Module):
        def __call__(self, x, counter):
            counter[...] += 1
            return x

    counter = nnx.Variable(jnp.zeros((), jnp.int32))
    dp = jdp.DataParallel(Counts(), range(4))
    dp(NUMBERS, counter)
    dp(NUMBERS, counter)
    assert counter[...] == 2


class Written(nnx.Module):
    """Writes to its own weight, as WeightNorm does, or passes it on through what Flax transforms."""

    def __init__(self, how):
        self.how, self.w = how, nnx.Param(jnp.array([4.0, 2.0, 1.0]))

    def __call__(self, x):
        if self.how == "written":
            self.w[...] = self.w[...] / 2
        if self.how == "written where it is jitted":
            halve(self)
        transform = {"jit": nnx.jit, "remat": nnx.remat}.get(self.how, lambda f: f)
        return transform(lambda m, x: x @ m.w[...])(self, x)


@nnx.jit
def halve(m):
    m.w[...] = m.w[...] / 2


def writing_doors(how):
    dp, model = wrap(Written(how), 4), Written(how)
    tx = optax.sgd(0.1)
    return {
        "value_and_grad": lambda: dp.value_and_grad(lambda m, x: (m(x) ** 2).mean())(model, ROWS[:8]),
        "criterion": lambda: dp.grad(lambda m, x: m(x), criterion=lambda y, x: (y**2).sum())(model, ROWS[:8]),
        "train_step": lambda: dp.train_step(lambda m, x: (m(x) ** 2).mean(), tx)(ROWS[:8]),
        "microbatches": lambda: dp.train_step(lambda m, x: (m(x) ** 2).mean(), tx, accumulate_steps=2)(ROWS[:8]),
    }


@pytest.mark.parametrize("door", ["value_and_grad", "criterion", "train_step", "microbatches"])
@pytest.mark.parametrize("how", ["written", "written where it is jitted"])
def test_a_trained_variable_that_the_forward_pass_writes_is_refused(refused, how, door):
    """Flax's own loop keeps what was written, and a step would have dropped it."""
    verb = {"criterion": "value_and_grad", "microbatches": "train_step"}.get(door, door)
    with refused(ValueError, verb, r"w is trained, and the forward pass writes to it.*optimizer\.update\(dp, grads\)"):
        writing_doors(how)[door]()


@pytest.mark.one_case
@pytest.mark.parametrize("door", ["value_and_grad", "criterion", "train_step", "microbatches"])
@pytest.mark.parametrize("how", ["jit", "remat"])
def test_a_trained_variable_that_a_transformed_function_passes_on_is_not_written(how, door):
    """It comes back as another tracer of the same value."""
    found, wanted = writing_doors(how)[door](), writing_doors("plain")[door]()
    close(jax.tree.leaves(found), jax.tree.leaves(wanted))


@pytest.mark.full
def test_a_loop_that_the_message_advises_keeps_what_the_forward_pass_writes():
    """Equal to Flax's own loop on one device."""

    def trained(model, rows):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        for _ in range(2):
            loss, grads = nnx.value_and_grad(lambda m: (m(rows) ** 2).mean())(model)
            optimizer.update(model, grads)
        return loss

    dp, alone = wrap(Written("written"), 4), Written("written")
    close(trained(dp, ROWS[:5]), trained(alone, ROWS[:5]))
    close(dp.module.w[...], alone.w[...])


class Turned(nnx.Module):
    """Writes to its weight in training only, where it is jitted, or turns its axes."""

    def __init__(self, how):
        self.how, self.training, self.w = how, False, nnx.Param(jnp.arange(9.0).reshape(3, 3))

    def __call__(self, x):
        @nnx.jit
        def run(m, x):
            if m.how == "in training" and m.training:
                m.w[...] = m.w[...] / 2
            if m.how == "turned" and m.training:
                m.w[...] = m.w[...].T
            if m.how == "turned twice":
                m.w[...] = (m.w[...].T * 1.0).T if m.training else m.w[...].T.T
            return x @ m.w[...]

        return run(self, x)


@pytest.mark.parametrize("how", ["in training", "turned", "turned twice"])
def test_a_variable_that_is_written_in_training_alone_is_refused_after_an_evaluation(refused, how):
    """The same program is traced again, and has to be looked at again."""
    dp = wrap(Turned(how), 4)
    step = dp.train_step(lambda m, x: (m(x) ** 2).mean(), optax.sgd(1e-3))
    step(ROWS[:8])
    dp.module.training = True
    with refused(ValueError, "train_step", "w is trained, and the forward pass writes to it"):
        step(ROWS[:8])


class Stacked(nnx.Module):
    """Layers in a scan over rematerialised blocks, by itself or inside of a jit, along axis 0 or 1 of its weights."""

    def __init__(self, how):
        self.how, self.w = how, nnx.Param(jax.random.normal(jax.random.key(0), (3, 3, 3)))

    def __call__(self, x):
        if self.how == "inside of a jit":
            return jitted_layers(self, x)
        return layers(self, x, 1 if self.how == "axis 1" else 0)


def layers(m, x, axis=0):
    block = nnx.remat(lambda m, x: nnx.tanh(x @ m.w[...]))
    axes = nnx.StateAxes({nnx.Param: axis})
    return nnx.scan(block, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)(m, x)


@nnx.jit
def jitted_layers(m, x):
    return layers(m, x)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("how", ["plain", "inside of a jit", "axis 1"])
def test_a_scan_over_the_layers_writes_to_no_trained_variable(how):
    model = Stacked(how)
    found = wrap(model, 4).value_and_grad(lambda m, x: (m(x) ** 2).mean())(model, ROWS[:8])
    close(jax.tree.leaves(found), jax.tree.leaves(nnx.value_and_grad(lambda m: (m(ROWS[:8]) ** 2).mean())(model)))


def test_caches_and_arrays_that_a_call_sets_are_not_lost():
    class Caching(nnx.Module):
        def __init__(self):
            self.shift, self.act = np.zeros(3, np.float32), None

        @functools.cached_property
        def scale(self):
            return 0.5

        def __call__(self, x):
            self.shift = np.ones(3, np.float32)
            self.act = lambda y: y * 2
            return self.act(x) * self.scale

    model = Caching()
    model.act = lambda y: y * 2
    close(wrap(model, 4, reduce_state="mean")(ROWS[:5]), ROWS[:5])


class Ready(nnx.Module):
    """Remembers in a plain attribute that it was called, and in a variable how often it was called first."""

    def __init__(self):
        self.ready, self.rate, self.first = False, 0.5, nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.rate = 0.5  # as it was
        if not self.ready:
            self.ready = True
            self.first[...] += 1
        return x * self.rate


@pytest.mark.one_case("train_step")
@pytest.mark.parametrize("door", ["call", "argument", "train_step", "value_and_grad", "parallel", "evaluate"])
def test_a_plain_attribute_that_a_call_sets_is_said_to_be_lost(door):
    model = Ready()
    nested = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), model)
    dp = wrap(nested, 4)
    runs = {
        "call": lambda: dp(ROWS[:5]),
        "argument": lambda: wrap(lambda params, m, x: m(x), 4)(np.float32(1), nested, ROWS[:5]),
        "train_step": lambda: dp.train_step(lambda m, x: m(x).mean(), optax.sgd(0.1))(ROWS[:5]),
        "value_and_grad": lambda: dp.value_and_grad(lambda m, x: m(x).mean())(nested, ROWS[:5]),
        "parallel": lambda: dp.parallel(lambda m, x: m(x), out_axes=0)(nested, ROWS[:5]),
        "evaluate": lambda: dp.evaluate(lambda m, x: {"a": m(x).mean()}, [ROWS[:5]]),
    }
    with pytest.warns(
        UserWarning, match=r"Sequential\.layers\.1\.ready was changed from False to True in a call;.*lost"
    ):
        runs[door]()
    assert not model.ready
    model.ready = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs[door]()


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["average", "welford"])
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
def test_a_metric_that_each_replica_updates_is_refused(refused, kind, reduce_state):
    """It would have counted the first chunk's rows alone."""

    class Measured(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.seen = {"average": nnx.metrics.Average, "welford": nnx.metrics.Welford}[kind]()

        def __call__(self, x):
            y = self.linear(x)
            self.seen.update(values=y)
            return y

    tx = optax.sgd(0.1)
    match = r"state seen\.\w+ belongs to an nnx\.metrics\.Metric, .*Update it outside.*jdp\.Sum"
    for call in (
        lambda: wrap(Measured(), 4, reduce_state=reduce_state)(ROWS[:13]),
        lambda: wrap(Measured(), 4, reduce_state=reduce_state).train_step(lambda m, x: m(x).mean(), tx)(ROWS),
    ):
        with refused(ValueError, "DataParallel", match):
            call()
    # One replica has all rows; and beside the call a metric sees them, too.
    alone, model = wrap(Measured(), 1), Measured()
    alone(ROWS), model(ROWS)
    np.testing.assert_allclose(nnx.state(alone.module.seen)["count"][...], nnx.state(model.seen)["count"][...])
    outside = nnx.metrics.Average()
    outside.update(values=wrap(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 4)(ROWS[:13]))
    assert outside.count[...] == 26
