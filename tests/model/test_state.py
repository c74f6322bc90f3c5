"""State: which update is kept, collections with a batch axis, intermediates; all against one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from laws import NUMBERS, close

import jdp

ROWS = np.random.RandomState(0).randn(16, 3).astype(np.float32)


class Stats(nn.Module):
    """A float buffer and an integer one, updated from the chunk."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("stats", "mean", jnp.zeros, (3,))
        steps = self.variable("stats", "steps", jnp.zeros, (), jnp.int32)
        if not self.is_initializing():
            mean.value = x.mean(0)
            steps.value = steps.value + len(x)
        return x - mean.value


class Norm(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train=True):
        return nn.BatchNorm(use_running_average=not train, momentum=0.5, axis_name=self.axis_name)(x)


def stats_of(n, reduce_state, size):
    dp = jdp.DataParallel(Stats(), devices=range(n), reduce_state=reduce_state)
    variables = dp.init(jax.random.key(0), ROWS[:size])
    return dp.apply(variables, ROWS[:size], mutable=["stats"])


# --- reduce_state ---


@pytest.mark.one_case
@pytest.mark.parametrize("n, size, first", [(1, 10, 10), (4, 10, 3), (4, 8, 2), (8, 1, 1)])
def test_primary_keeps_the_first_chunks_update(n, size, first):
    """Rows 137a and 137c: as torch."""
    y, state = stats_of(n, "primary", size)
    np.testing.assert_allclose(state["stats"]["mean"], ROWS[:first].mean(0), rtol=1e-6)
    assert state["stats"]["steps"] == first and state["stats"]["steps"].dtype == jnp.int32
    np.testing.assert_allclose(y[:first], ROWS[:first] - ROWS[:first].mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("n, size, first", [(1, 10, 10), (4, 10, 3), (4, 8, 2), (4, 5, 2)])
def test_mean_is_weighted_by_rows_and_integers_are_the_primarys(n, size, first):
    """The mean of chunk means, weighted by rows, is the mean of the batch."""
    _, state = stats_of(n, "mean", size)
    np.testing.assert_allclose(state["stats"]["mean"], ROWS[:size].mean(0), rtol=1e-5, atol=1e-6)
    assert state["stats"]["steps"] == first and state["stats"]["steps"].dtype == jnp.int32


def test_mean_keeps_dtypes():
    def check(dtype):
        class Half(nn.Module):
            @nn.compact
            def __call__(self, x):
                m = self.variable("stats", "m", jnp.zeros, (), dtype)
                m.value = (x.sum() > 0).astype(dtype) if dtype is bool else x.sum().astype(dtype)
                return x

        dp = jdp.DataParallel(Half(), devices=range(2), reduce_state="mean")
        _, state = dp.apply({"stats": {"m": np.zeros((), dtype)}}, np.arange(3, dtype=np.float32), mutable=["stats"])
        return state["stats"]["m"]

    half = check(jnp.bfloat16)  # sums 1 and 2 of 2 and 1 rows
    assert half.dtype == jnp.bfloat16 and float(half) == pytest.approx(4 / 3, rel=1e-2)
    assert check(bool).dtype == bool and bool(check(bool)) is True


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("replicas", [4, 8, "one by one"])
def test_the_mean_of_equal_halves_is_their_value(dtype, replicas):
    """Neither a sum that overflows nor a weight of few digits may change what is the same on all replicas."""
    value = jnp.asarray([3.14159, 100, 20000], dtype)

    def loss_fn(v, x):
        seen = {"seen": {"v": value + 0 * x.sum().astype(dtype)}}
        return jnp.mean(x * v["params"]), {}, seen

    options = {"replicas": replicas} if isinstance(replicas, int) else {}
    dp = jdp.DataParallel(lambda v, x: x, devices=range(4), reduce_state="mean", **options)
    step = dp.train_step(loss_fn, optax.sgd(0.1), deterministic=not options)
    for rows in (8, 10, 7):
        state = step.init({"params": np.float32(1), "seen": {"v": value * 0}})
        found = step(state, np.ones(rows, np.float32))[0].state["seen"]["v"]
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(value, np.float32))


@pytest.mark.one_case
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
def test_state_lives_where_the_parameters_do(devices, reduce_state):
    dp = jdp.DataParallel(Norm(), devices=[2, 3, 4], reduce_state=reduce_state)
    variables = dp.init(jax.random.key(0), ROWS)
    _, state = dp.apply(variables, ROWS[:7], mutable=["batch_stats"])
    for leaf in jax.tree.leaves(state):
        assert leaf.is_fully_replicated and leaf.devices() == set(devices[2:5])
        shards = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert all(np.array_equal(shards[0], s) for s in shards)  # fact 4: replicated arrays may differ
    host = jax.tree.map(np.asarray, variables)
    for params in (host, jax.device_put(host, devices[2])):
        _, state = dp.apply(params, ROWS[:7], mutable=["batch_stats"])
        assert {d for leaf in jax.tree.leaves(state) for d in leaf.devices()} == {devices[2]}
    _, again = dp.apply({**variables, **state}, ROWS[:7], mutable=["batch_stats"])  # and goes back in
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_state_ignores_the_output_device(devices):
    dp = jdp.DataParallel(Norm(), devices=[0, 1], output_device="cpu:5")
    variables = dp.init(jax.random.key(0), ROWS)
    y, state = dp.apply(variables, ROWS, mutable=["batch_stats"])
    assert y.devices() == {devices[5]}
    assert all(leaf.devices() == set(devices[:2]) for leaf in jax.tree.leaves(state))


def test_eval_mode_equals_the_bare_model_and_changes_nothing():
    """Row 137f."""
    dp = jdp.DataParallel(Norm(), devices=range(3))
    variables = dp.init(jax.random.key(0), ROWS)
    _, state = dp.apply(variables, ROWS[:10], mutable=["batch_stats"])
    variables = {**variables, **state}
    y, after = dp.apply(variables, ROWS[:10], train=False, mutable=["batch_stats"])
    close(y, Norm().apply(jax.tree.map(np.asarray, variables), ROWS[:10], train=False))
    jax.tree.map(np.testing.assert_array_equal, after["batch_stats"], variables["batch_stats"])


def test_one_device_equals_the_bare_model():
    dp = jdp.DataParallel(Norm(), devices=[0])
    variables = Norm().init(jax.random.key(0), ROWS)
    got = dp.apply(variables, ROWS, mutable=["batch_stats"])
    close(got, Norm().apply(variables, ROWS, mutable=["batch_stats"]), rtol=1e-6)


@pytest.mark.full
def test_running_statistics_over_several_steps():
    """Threaded through a loop: the primary's chunks alone, one after the other."""
    dp = jdp.DataParallel(Norm(), devices=range(4))
    got = dp.init(jax.random.key(0), ROWS)
    want = jax.tree.map(np.asarray, got)
    for size, first in ((10, 3), (8, 2), (5, 2), (0, None)):
        _, state = dp.apply(got, ROWS[:size], mutable=["batch_stats"])
        got = {**got, **state}
        if first:
            want = {**want, **Norm().apply(want, ROWS[:first], mutable=["batch_stats"])[1]}
    close(got, want)


# --- synchronised statistics ---


@pytest.mark.one_case
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
def test_batch_norm_with_axis_name_has_the_statistics_of_the_full_batch(reduce_state):
    """Row 137e: real synchronisation, outputs, state and gradients."""
    dp = jdp.DataParallel(Norm("data"), devices=range(4), reduce_state=reduce_state)
    bare = Norm()
    variables = dp.init(jax.random.key(0), ROWS[:8])
    host = jax.tree.map(np.asarray, variables)
    close(dp.apply(variables, ROWS[:8], mutable=["batch_stats"]), bare.apply(host, ROWS[:8], mutable=["batch_stats"]))

    def loss(apply, params, variables):
        y, _ = apply({**variables, "params": params}, ROWS[:8], mutable=["batch_stats"])
        return jnp.sum(jnp.sin(y * ROWS[8:16]))

    got = jax.grad(lambda p: loss(dp.apply, p, variables))(variables["params"])
    close(got, jax.grad(lambda p: loss(bare.apply, p, host))(host["params"]))


def test_batch_norm_with_axis_name_refuses_uneven_chunks():
    dp = jdp.DataParallel(Norm("data"), devices=range(4))
    variables = dp.init(jax.random.key(0), ROWS[:8])
    for size in (10, 9, 5, 1):
        with pytest.raises(ValueError, match="(?si)(?=.*drop)(?=.*pad)(?=.*sync_batch_norm)"):
            dp.apply(variables, ROWS[:size], mutable=["batch_stats"])
    y, _ = dp.apply(variables, ROWS[:8], mutable=["batch_stats"])
    assert y.shape == (8, 3)
    # running statistics need no collective, so any batch will do
    assert dp.apply(variables, ROWS[:10], train=False).shape == (10, 3)


# --- spectral norm ---


def test_spectral_norm():
    """Row 98: its vectors depend on the weights alone, so any replica's are right."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.SpectralNorm(nn.Dense(4))(x, update_stats=True)

    net = Net()
    variables = net.init(jax.random.key(0), ROWS)
    for reduce_state in ("primary", "mean"):
        dp = jdp.DataParallel(net, devices=range(3), reduce_state=reduce_state)
        got = dp.apply(variables, ROWS[:10], mutable=["batch_stats"])
        close(got, net.apply(variables, ROWS[:10], mutable=["batch_stats"]))


# --- collections with a batch axis ---


@pytest.mark.full
def test_decode_cache():
    """Attention decodes token by token; each row's cache stays with its row."""

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=4, decode=True)(x)

    net = Decoder()
    x = np.random.RandomState(1).randn(5, 3, 4).astype(np.float32)
    start = net.init(jax.random.key(0), x)
    assert start["cache"]["MultiHeadDotProductAttention_0"]["cached_key"].shape[0] == 5
    dp = jdp.DataParallel(net, devices=range(3), state_axes={"cache": 0})
    init = dp.init(jax.random.key(0), x)
    close(init, start)  # the whole batch's cache, as the unwrapped model's
    for begin in (init, start):
        got, want = begin, start
        for t in range(3):
            token = x[:, t : t + 1]
            y, new = dp.apply(got, token, mutable=["cache"])
            y_want, new_want = net.apply(want, token, mutable=["cache"])
            close((y, new), (y_want, new_want))
            got, want = {**got, **new}, {**want, **new_want}


class Counter(nn.Module):
    """A carry per row, and a counter of steps that has no rows."""

    @nn.compact
    def __call__(self, x):
        carry = self.variable("carry", "h", jnp.zeros, x.shape)
        count = self.variable("carry", "count", jnp.zeros, (), jnp.int32)
        if not self.is_initializing():
            carry.value = jnp.tanh(carry.value + x)
            count.value = count.value + 1
        return carry.value * 2


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("size", [2, 5, 6])
def test_rnn_carry_is_cut_and_gathered_like_the_batch(n, size):
    dp = jdp.DataParallel(Counter(), devices=range(n), state_axes={"carry": 0})
    got = dp.init(jax.random.key(0), ROWS[:size])
    h = np.zeros((size, 3))
    for step in range(1, 4):
        y, got = dp.apply(got, ROWS[:size] * step, mutable=["carry"])
        h = np.tanh(h + ROWS[:size] * step)
        np.testing.assert_allclose(got["carry"]["h"], h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(y, 2 * h, rtol=1e-5, atol=1e-6)
        assert got["carry"]["count"] == step


@pytest.mark.full
def test_the_axis_of_state_may_be_an_integer_of_numpy():
    dp = jdp.DataParallel(Counter(), devices=range(2), state_axes={"carry": np.int64(0)})
    _, got = dp.apply(dp.init(jax.random.key(0), ROWS[:4]), ROWS[:4], mutable=["carry"])
    np.testing.assert_allclose(got["carry"]["h"], np.tanh(ROWS[:4]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [5, 6])
def test_state_with_a_batch_axis_that_nobody_has_named(size):
    dp = jdp.DataParallel(Counter(), devices=range(2))
    variables = {"carry": {"h": np.zeros((size, 3), np.float32), "count": np.int32(0)}}
    with pytest.raises((TypeError, ValueError), match="shape") as raised:
        dp.apply(variables, ROWS[:size], mutable=["carry"])
    (note,) = [x for x in raised.value.__notes__ if x.startswith("jdp.DataParallel")]
    assert f"carry['h'], which is ({size}, 3)" in note and "state_axes={'carry': 0}" in note


def test_carry_with_its_batch_in_another_axis_and_beside_batch_norm():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = self.variable("carry", "h", jnp.zeros, (2, len(x), 3))
            h.value = h.value + x
            return nn.BatchNorm(use_running_average=False, momentum=0.5)(x) + h.value[0]

    dp = jdp.DataParallel(Net(), devices=range(3), state_axes={"carry": 1})
    x = ROWS[:5]
    h = np.stack([x, 2 * x])
    stats = {"BatchNorm_0": {"mean": np.zeros(3, np.float32), "var": np.ones(3, np.float32)}}
    params = {"BatchNorm_0": {"scale": np.ones(3, np.float32), "bias": np.zeros(3, np.float32)}}
    variables = {"params": params, "batch_stats": stats, "carry": {"h": h}}
    y, new = dp.apply(variables, x, mutable=["carry", "batch_stats"])
    np.testing.assert_allclose(new["carry"]["h"], h + x, rtol=1e-6)
    parts = [Net().apply({**variables, "carry": {"h": h[:, s]}}, x[s], mutable=True) for s in CHUNKS]
    close(y, np.concatenate([p[0] for p in parts]))
    close(new["batch_stats"], parts[0][1]["batch_stats"])
    # read but not listed in mutable: still cut, and not returned
    frozen = jdp.DataParallel(Reader(), devices=range(3), state_axes={"carry": 1})
    np.testing.assert_allclose(frozen.apply({"carry": {"h": h}}, x), x + h[1], rtol=1e-6)


CHUNKS = (slice(0, 2), slice(2, 4), slice(4, 5))


class Reader(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.get_variable("carry", "h")[1]


@pytest.mark.full
def test_gradients_flow_through_a_cut_collection():
    dp = jdp.DataParallel(Counter(), devices=range(3), state_axes={"carry": 0})
    x = ROWS[:5]

    def loss(h, apply):
        y, state = apply({"carry": {"h": h, "count": np.int32(0)}}, x, mutable=["carry"])
        return jnp.sum(y**2) + jnp.sum(state["carry"]["h"])

    h = 0.1 * ROWS[5:10]
    close(jax.grad(loss)(h, dp.apply), jax.grad(loss)(h, Counter().apply))


@pytest.mark.parametrize("n", [1, 3])
def test_a_collection_whose_update_has_another_shape_is_named(n):
    class Growing(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = self.variable("cache", "grown", jnp.zeros, (len(x), 1))
            h.value = jnp.concatenate([h.value, h.value], 1)
            return x

    dp = jdp.DataParallel(Growing(), devices=range(n), state_axes={"cache": 0})
    with pytest.raises(ValueError, match="(?s)cache.*grown"):
        dp.apply({"cache": {"grown": np.zeros((5, 1), np.float32)}}, ROWS[:5], mutable=["cache"])


def test_a_cache_that_disagrees_with_the_batch_is_named():
    dp = jdp.DataParallel(Counter(), devices=range(3), state_axes={"carry": 0})
    variables = dp.init(jax.random.key(0), ROWS[:5])
    with pytest.raises(ValueError, match="(?s)(?=.*carry)(?=.*5)(?=.*6)"):
        dp.apply(variables, ROWS[:6], mutable=["carry"])


def test_a_cache_that_is_cut_otherwise_than_the_batch_is_named_and_can_be_cut_so(refused):
    dp = jdp.DataParallel(Counter(), devices=range(3), state_axes={"carry": 0})
    carry = {"h": 0.1 * ROWS[5:10], "count": np.int32(0)}
    batch = jdp.scatter(ROWS[:5], dp.devices, chunk_sizes=(1, 3, 1))
    with refused(ValueError, "DataParallel", match=r"carry is cut into .*\(2, 2, 1\).*chunk_sizes=\(1, 3, 1\)"):
        dp.apply({"carry": carry}, batch, mutable=["carry"])
    cut = {"h": jdp.scatter(carry["h"], dp.devices, chunk_sizes=(1, 3, 1)), "count": carry["count"]}
    close(
        dp.apply({"carry": cut}, batch, mutable=["carry"]),
        Counter().apply({"carry": carry}, ROWS[:5], mutable=["carry"]),
    )


# --- intermediates ---


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "double", 2 * x)
        self.sow("intermediates", "mean", x.mean())
        self.sow("intermediates", "double", 3 * x)
        return nn.Dense(2, name="dense")(x)


@pytest.mark.one_case
@pytest.mark.parametrize("n, size", [(1, 5), (3, 6), (3, 5), (8, 5)])
def test_sown_intermediates_are_gathered(n, size):
    net, x = Sowing(), ROWS[:size]
    dp = jdp.DataParallel(net, devices=range(n))
    variables = {"params": net.init(jax.random.key(0), x)["params"]}
    y, state = dp.apply(variables, x, mutable=["intermediates"])
    sown = state["intermediates"]
    assert type(sown["double"]) is tuple and len(sown["double"]) == 2
    np.testing.assert_array_equal(sown["double"][0], 2 * x)
    np.testing.assert_array_equal(sown["double"][1], 3 * x)
    step = -(-size // n)
    means = [x[i : i + step].mean() for i in range(0, size, step)]
    np.testing.assert_allclose(sown["mean"][0], means, rtol=1e-5)
    np.testing.assert_allclose(y, net.apply(variables, x), rtol=1e-5, atol=1e-6)


def test_capture_intermediates_by_method_output():
    net = Sowing()
    kw = dict(capture_intermediates=True, mutable=["intermediates"])
    dp = jdp.DataParallel(lambda v, x: net.apply(v, x, **kw)[1], [0, 1])
    variables = {"params": net.init(jax.random.key(0), ROWS)["params"]}
    state = dp(variables, ROWS[:5])
    close(state["intermediates"]["dense"]["__call__"][0], net.apply(variables, ROWS[:5]))


@pytest.mark.full
def test_state_and_intermediates_together_with_keys():
    """Everything at once: params, batch statistics, dropout keys, sown rows."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
            self.sow("intermediates", "normed", x)
            return nn.Dropout(0.5, deterministic=False)(x)

    net, key = Net(), jax.random.key(3)
    dp = jdp.DataParallel(net, devices=range(3))
    variables = net.init({"params": key, "dropout": key}, ROWS[:2])
    variables = {k: variables[k] for k in ("params", "batch_stats")}
    rngs = {"dropout": key}
    y, state = dp.apply(variables, ROWS[:5], mutable=["intermediates", "batch_stats"], rngs=rngs)
    first, want = net.apply(variables, ROWS[:2], mutable=["intermediates", "batch_stats"], rngs=rngs)
    close(y[:2], first)
    close(state["batch_stats"], want["batch_stats"])
    close(state["intermediates"]["normed"][0][:2], want["intermediates"]["normed"][0])
    assert state["intermediates"]["normed"][0].shape == (5, 3)


def test_collectives_in_the_state_alone_are_seen():
    """A psum that only the state update needs is a collective too: no hang, but an error."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            total = self.variable("stats", "total", jnp.zeros, ())
            total.value = lax.psum(x.sum(), "data") if not self.is_initializing() else total.value
            return x

    dp = jdp.DataParallel(Net(), devices=range(4))
    variables = {"stats": {"total": np.float32(0)}}
    _, state = dp.apply(variables, ROWS[:8], mutable=["stats"])
    np.testing.assert_allclose(state["stats"]["total"], ROWS[:8].sum(), rtol=1e-5)
    with pytest.raises(ValueError, match="(?si)(?=.*drop)(?=.*pad)"):
        dp.apply(variables, ROWS[:7], mutable=["stats"])


# --- what the call itself makes ---


class Penalised(nn.Module):
    """A term of the loss is sown, as a router's penalty is."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (3,))
        self.sow("losses", "penalty", jnp.mean((x * w) ** 4))
        self.sow("losses", "penalty", jnp.mean(w**2))
        return x @ w


def penalised(apply, x):
    def loss(params):
        y, state = apply({"params": params}, x, mutable=["losses"])
        return jnp.mean(y) + sum(jax.tree.leaves(state["losses"]))

    return loss


@pytest.mark.full
@pytest.mark.parametrize("n, size", [(1, 7), (2, 8), (3, 7), (8, 1)])
def test_sown_losses_are_the_mean_over_rows(n, size):
    net, x = Penalised(), ROWS[:size]
    dp = jdp.DataParallel(net, devices=range(n), reduce_state="mean")
    params = dp.init(jax.random.key(0), x)["params"]
    got, want = penalised(dp.apply, x), penalised(net.apply, x)
    close(jax.jit(jax.value_and_grad(got))(params), jax.jit(jax.value_and_grad(want))(params))
    close(jax.hessian(got)(params), jax.jit(jax.hessian(want))(params))


def test_sown_losses_are_refused_where_they_would_be_the_first_chunks(refused):
    net = Penalised()
    dp = jdp.DataParallel(net, devices=range(4))
    params = dp.init(jax.random.key(0), ROWS)["params"]
    with refused(ValueError, "DataParallel", match=r"losses\['penalty'\]\[0\].*float32\[\].*reduce_state=\"mean\""):
        penalised(dp.apply, ROWS[:8])(params)
    with refused(ValueError, "DataParallel", match='reduce_state="mean"'):
        jax.jit(jax.grad(penalised(dp.apply, ROWS[:7])))(params)
    # One replica has all the rows: it is the bare model.
    one = jdp.DataParallel(net, devices=[0])
    bare = jax.device_get(params)
    for wrapper, x in ((dp, ROWS[:1]), (one, ROWS)):
        close(penalised(wrapper.apply, x)(bare), penalised(net.apply, x)(bare))


class Making(nn.Module):
    """A cache that the first call makes: an array with a row for each of the batch's, and a position."""

    @nn.compact
    def __call__(self, x):
        rows = self.variable("cache", "rows", lambda: 2 * x)
        self.variable("cache", "index", lambda: jnp.asarray(7))
        return x + rows.value


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
def test_arrays_that_the_call_makes_need_an_axis(refused, reduce_state, n):
    dp = jdp.DataParallel(Making(), devices=range(n), reduce_state=reduce_state, state_axes={"cache": 0})
    y, state = dp.apply({}, ROWS[:7], mutable=["cache"])
    close((y, state["cache"]["rows"]), (3 * ROWS[:7], 2 * ROWS[:7]))
    assert state["cache"]["index"] == 7
    dp = jdp.DataParallel(Making(), devices=range(n), reduce_state=reduce_state)
    if n == 1:
        assert dp.apply({}, ROWS[:7], mutable=["cache"])[1]["cache"]["rows"].shape == (7, 3)
        return
    # 8 rows on 8 devices: the chunk has as many as any other array might.
    for size in (7, 8):
        with refused(ValueError, "DataParallel", match=r"cache\['rows'\].*state_axes=\{'cache': 0\}.*intermediates"):
            dp.apply({}, ROWS[:size], mutable=["cache"])


def test_sown_values_passed_back_in_are_appended_to():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x)
            return x

    dp = jdp.DataParallel(Sows(), range(4))
    _, state = dp.apply({}, NUMBERS, mutable=["intermediates"])
    _, state = dp.apply(state, NUMBERS, mutable=["intermediates"])
    first, second = state["intermediates"]["h"]
    np.testing.assert_array_equal(first, NUMBERS)
    np.testing.assert_array_equal(second, NUMBERS)


@pytest.mark.full
def test_the_mean_of_state_is_exact_in_float64():
    with jax.enable_x64(True):
        x = np.random.RandomState(1).randn(10, 3)
        dp = jdp.DataParallel(nn.BatchNorm(use_running_average=False, momentum=0.0), range(4), reduce_state="mean")
        _, state = dp.apply(dp.init(jax.random.key(0), x), x, mutable=["batch_stats"])
        np.testing.assert_allclose(state["batch_stats"]["mean"], x.mean(0), rtol=1e-13)
