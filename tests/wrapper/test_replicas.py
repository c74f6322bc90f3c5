"""`replicas=R`: on any number of devices that divides it a wrapper gives what it gives on R devices."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import close

import jdp

RANDOM = np.random.RandomState(0)
ROWS = 33
X, Y = RANDOM.randn(ROWS, 6).astype(np.float32), RANDOM.randn(ROWS, 3).astype(np.float32)
KEY = jax.random.key(7)
SIZES = [1, 7, 16, 33]
SHAPES = [(8, 1), (8, 2), (8, 4), (8, 8), (4, 2), (4, 1), (2, 1), (1, 1)]  # replicas, devices
HARD = [pytest.param(8, 2, marks=pytest.mark.full), (4, 1)]


class Net(nn.Module):
    """A BatchNorm and a dropout, each of which tells replicas apart."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, momentum=0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


def two(module, replicas, n, **options):
    """The wrapper over n devices with so many replicas, and one over as many devices."""
    make = module if callable(module) and not isinstance(module, nn.Module) else lambda: module
    return (
        jdp.DataParallel(make(), range(n), replicas=replicas, **options),
        jdp.DataParallel(make(), range(replicas), **options),
    )


def function(kept):
    return lambda: kept


def affine(w, x, key):
    """Its second output tells which numbers a replica draws, and its third is one for each replica."""
    return {"y": x @ w, "mask": jax.random.bernoulli(key, 0.5, x.shape), "total": x.sum()}


@pytest.mark.one_case
@pytest.mark.parametrize(("replicas", "n"), SHAPES)
def test_a_function_gives_what_it_gives_on_as_many_devices(replicas, n):
    w = X[:6, :3]
    dp, wide = two(function(affine), replicas, n)
    for rows in [0, *SIZES]:
        close(dp(w, X[:rows], KEY), wide(w, X[:rows], KEY))


@pytest.mark.one_case
@pytest.mark.parametrize(("replicas", "n"), SHAPES)
def test_chunks_are_those_of_as_many_devices(replicas, n):
    dp, wide = two(function(affine), replicas, n)
    for rows in [0, *SIZES, 10]:
        s, want = (next(iter(d.prefetch([X[:rows]]))) for d in (dp, wide))
        assert s.sizes == want.sizes
        assert s.devices == tuple(jax.devices()[i * n // replicas] for i in range(len(want)))
        for mine, other, device in zip(s, want, s.devices, strict=True):
            np.testing.assert_array_equal(mine, other)
            assert mine.devices() == {device}
        assert jdp.gather(s).tolist() == X[:rows].tolist()
        if rows == 16:
            close(jdp.reduce_add(s), jdp.reduce_add(want))


@pytest.mark.full
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_linen(replicas, n, reduce_state):
    dp, wide = two(Net(), replicas, n, reduce_state=reduce_state)
    variables = Net().init({"params": KEY, "dropout": KEY}, X)
    for rows in SIZES:
        got, want = (d.apply(variables, X[:rows], rngs={"dropout": KEY}, mutable=["batch_stats"]) for d in (dp, wide))
        close(got, want)


@pytest.mark.full
@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_nnx(replicas, n):
    dp, wide = two(lambda: NNXNet(nnx.Rngs(0)), replicas, n)
    for rows in SIZES:
        close(dp(X[:rows]), wide(X[:rows]))
        close(
            nnx.to_pure_dict(nnx.state(dp.module, nnx.BatchStat)),
            nnx.to_pure_dict(nnx.state(wide.module, nnx.BatchStat)),
        )


@pytest.mark.full
@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_gradients_through_a_call(replicas, n):
    w = X[:6, :3]
    dp, wide = two(function(affine), replicas, n)

    def loss(w, x, d):
        out = d(w, x, KEY)
        return jnp.sum(jnp.sin(out["y"]) * out["mask"][:, :3]) + jnp.sum(out["total"] ** 2)

    for rows in (7, 16):
        got, want = (jax.grad(loss, argnums=(0, 1))(w, X[:rows], d) for d in (dp, wide))
        close(got, want, rtol=1e-4, atol=1e-5)


def linen_loss(variables, batch, key):
    x, y = batch
    out, updates = Net().apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
    error = (out - y) ** 2
    return (
        error.mean(),
        {
            "each": error.sum(1),
            "most": jdp.Sum((error > 1).sum()),
            "ratio": jdp.Mean(error.sum(), jnp.sum(x[:, 0] > 0) + 1e-6),
        },
        updates,
    )


OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_steps": 2},
    "optimizer cut": {"shard_optimizer": True},
    "parameters cut": {"shard_params": True},
    "narrow": {"reduce_dtype": jnp.bfloat16},
    "in step": {"sync_batch_norm": True},
    "skipping": {"skip_nonfinite": True},
}


@pytest.mark.one_case
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_train_step(replicas, n, options):
    dp, wide = two(Net(), replicas, n)
    variables = Net().init({"params": KEY, "dropout": KEY}, X)
    tx, narrow = optax.sgd(0.1, momentum=0.9), options == "narrow"
    states = []
    for d in (dp, wide):
        step, metrics = d.train_step(linen_loss, tx, **OPTIONS[options]), []
        state = step.init(variables, key=KEY)
        for rows in (16, 7):
            state, found = step(state, (X[:rows], Y[:rows]))
            metrics.append(found)
        states.append((jax.tree.map(np.asarray, state.replace(key=None)), metrics))
    close(*states, rtol=2e-2 if narrow else 1e-4, atol=2e-2 if narrow else 1e-5)


def nnx_loss(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"sync_batch_norm": True}, {"accumulate_steps": 2}], ids=str)
@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_train_step_of_nnx(replicas, n, options):
    found = []
    for d in two(lambda: NNXNet(nnx.Rngs(0)), replicas, n):
        step = d.train_step(nnx_loss, optax.sgd(0.1), **options)
        losses = [step((X[:rows], Y[:rows]))["loss"] for rows in (16, 7, 33)]
        found.append((losses, nnx.to_pure_dict(nnx.state(d.module, (nnx.Param, nnx.BatchStat)))))
    close(*found, rtol=1e-4, atol=1e-5)


def plain_loss(w, x, y):
    error = (x @ w - y) ** 2
    return error.mean(), {"each": error.sum(1)}


@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_value_and_grad(replicas, n):
    w = X[:6, :3]
    dp, wide = two(function(lambda w, x: x @ w), replicas, n)
    for rows in (16, 7):
        got, want = (
            d.value_and_grad(plain_loss, argnums=(0, 1), has_aux=True)(w, X[:rows], Y[:rows]) for d in (dp, wide)
        )
        close(got, want)


def meets(w, x):
    """Collectives of the model's own, and its place on the axis, in a loop too."""
    place = jax.lax.axis_index("data")
    total, _ = jax.lax.scan(lambda c, _: (c + jax.lax.pmean(x, "data").sum(), None), 0.0, None, length=2)
    return x * w + place, jax.lax.psum(x, "data") + jax.lax.pmax(x, "data") - jax.lax.pmin(x, "data") + total


def asks(w, x):
    return x * w + jax.lax.axis_index("data")


def asks_in_a_loop(w, x):
    return jax.lax.fori_loop(0, 2, lambda _, x: x * w + jax.lax.axis_index("data"), x)


@pytest.mark.one_case("4-1-meets")
@pytest.mark.parametrize("model", [meets, asks, asks_in_a_loop])
@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_a_model_sees_an_axis_with_as_many_members(replicas, n, model):
    dp, wide = two(function(model), replicas, n)
    close(dp(2.0, X[:16]), wide(2.0, X[:16]))
    close(
        jax.grad(lambda w: jax.tree.leaves(dp(w, X[:16]))[0].sum())(2.0),
        jax.grad(lambda w: jax.tree.leaves(wide(w, X[:16]))[0].sum())(2.0),
    )


def test_collectives_that_do_not_reach_within_a_device_are_refused(refused):
    dp = jdp.DataParallel(lambda w, x: jax.lax.all_gather(x * w, "data", tiled=True), range(2), replicas=4)
    with refused(ValueError, "parallel_apply", match="all_gather over 'data', and 2 devices have 2 replicas"):
        dp(2.0, X[:16])


@pytest.mark.parametrize("of_all", [lambda x: x * jax.lax.axis_index("data"), lambda x: jax.lax.psum(x, "data")])
def test_a_derivative_of_the_users_own_with_a_collective_is_refused_from_outside(refused, of_all):
    """What replaces its body would be differentiated as plain JAX does, and the gradient would be wrong."""
    own = jax.custom_vjp(of_all)
    own.defvjp(lambda x: (of_all(x), None), lambda _, g: (10 * g,))
    dp, wide = (jdp.DataParallel(lambda w, x: own(x * w), range(n), replicas=r) for n, r in [(1, 2), (2, None)])
    close(dp(2.0, X[:16]), wide(2.0, X[:16]))
    with refused(ValueError, "parallel_apply", match="a jax.custom_vjp of the model"):
        jax.grad(lambda w: dp(w, X[:16]).sum())(2.0)


def test_uneven_chunks_of_a_model_with_collectives_are_refused(refused):
    dp = jdp.DataParallel(meets, range(2), replicas=4)
    with refused(ValueError, "parallel_apply", match="multiple of 4"):
        dp(2.0, X[:7])


def pmap_step(w, x, y):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    return w - 0.1 * jax.lax.pmean(grad, "data"), loss


@pytest.mark.full
@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_a_step_for_pmap(replicas, n):
    w = X[:6, :3]
    dp, wide = two(function(lambda w, x: x), replicas, n)
    close(dp.parallel(pmap_step)(w, X[:16], Y[:16]), wide.parallel(pmap_step)(w, X[:16], Y[:16]))
    keys = jax.random.split(KEY, replicas)

    def draw(w, x, key):
        return w, jax.random.normal(key, x.shape)

    close(dp.parallel(draw)(w, X[:16], keys), wide.parallel(draw)(w, X[:16], keys))
    stacked = np.arange(replicas, dtype=np.float32)
    both = [
        d.parallel(lambda a, x: (a + x.sum(), x), in_axes=("stacked", 0), out_axes=("stacked", 0))(stacked, X[:16])
        for d in (dp, wide)
    ]
    close(*both)


@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_find_nonfinite_names_the_replica(replicas, n):
    dp, wide = two(function(lambda w, x: x @ w), replicas, n)
    x = X[:16].copy()
    x[[5, 13], 0] = np.nan
    found = []
    for d in (dp, wide):
        step = d.train_step(lambda v, x: jnp.mean(x @ v["params"]), optax.sgd(0.1))
        found.append(step.find_nonfinite(step.init({"params": X[:6, :3]}), x))
    mine, others = ([(one.replica, one.rows, one.paths) for one in each] for each in found)
    assert mine == others and [row for _, rows, _ in mine for row in rows] == [5, 13]
    assert [one.device.id for one in found[0]] == [one.replica * n // replicas for one in found[0]]


@pytest.mark.parametrize(("replicas", "n"), HARD)
def test_state_with_a_batch_axis(replicas, n):
    class Counter(nn.Module):
        @nn.compact
        def __call__(self, x):
            total = self.variable("cache", "total", jnp.zeros, x.shape)
            total.value += x
            return total.value

    found = []
    for d in two(Counter(), replicas, n, state_axes={"cache": 0}):
        out, state = d.apply({"cache": {"total": X[:7]}}, X[:7], mutable=["cache"])
        found.append((out, state))
    close(*found)


def test_a_wrapper_is_copied_with_its_replicas():
    dp = jdp.DataParallel(Net(), range(2), replicas=8)
    for other in (copy.deepcopy(dp), pickle.loads(pickle.dumps(dp))):
        assert next(iter(other.prefetch([X[:16]]))).sizes == (2,) * 8


@pytest.mark.full
def test_explain_shows_what_runs():
    dp = jdp.DataParallel(Net(), range(2), replicas=4)
    variables = dp.init({"params": KEY, "dropout": KEY}, X)
    report = jdp.explain(dp.apply, variables, X[:16], train=False)
    assert report.devices == 2
    step = dp.train_step(linen_loss, optax.sgd(0.1))
    report = jdp.explain(step, step.init(variables, key=KEY), (X[:16], Y[:16]))
    assert sum(c.runs or 1 for c in report.collectives if c.kind == "all-reduce") == len(report.collectives)


def test_a_replica_runs_in_the_memory_of_one():
    """The memory of the loop does not grow with the number of replicas of a device."""

    def model(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x.mean()

    w = np.zeros((256, 256), np.float32)
    peak = []
    for replicas in (1, 8):
        dp = jdp.DataParallel(model, [0], replicas=replicas)
        step = dp.train_step(lambda v, x: model(v["params"], x), optax.sgd(0.1))
        state = step.init({"params": w})
        batch = np.zeros((256 * replicas, 256), np.float32)
        memory = step.lower(state, batch).compile().memory_analysis()
        peak.append(memory.temp_size_in_bytes)
    assert peak[1] < 1.5 * peak[0]


def test_a_call_like_one_before_traces_nothing(traced):
    fn = traced(lambda w, x: x @ w)
    dp = jdp.DataParallel(fn, range(2), replicas=8)
    w = jdp.replicate(X[:6, :3], dp.devices)
    for _ in range(3):
        dp(w, X[:16])
    assert fn.shapes == [(2, 6)]


@pytest.mark.parametrize("replicas", [0, -8, 3, 6, 1])
def test_a_number_that_does_not_fit_is_refused(replicas, refused):
    with refused(ValueError, "DataParallel", match=f"replicas is {replicas} and there are 4 devices"):
        jdp.DataParallel(affine, range(4), replicas=replicas)


@pytest.mark.parametrize("replicas", [8.0, "8", True])
def test_what_is_no_number_is_refused(replicas, refused):
    with refused(TypeError, "DataParallel", match="the number of chunks"):
        jdp.DataParallel(affine, range(4), replicas=replicas)


def test_what_is_scattered_over_other_replicas_is_refused(refused):
    dp = jdp.DataParallel(affine, range(2), replicas=8)
    with refused(ValueError, "DataParallel", match="over 2 replicas on 2 devices, the call runs on 8"):
        dp(X[:6, :3], jdp.scatter(X[:16], devices=range(2)), KEY)


def test_a_scatter_of_ones_own_over_other_replicas_is_refused(refused):
    class Own(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return jdp.scatter(inputs, devices), jdp.scatter(kwargs, devices)

    dp = Own(lambda w, x: x * w, range(2), replicas=8)
    with refused(ValueError, "DataParallel", match="over 2 replicas on 2 devices, the call runs on 8"):
        dp(2.0, X[:16])


@pytest.mark.one_case("primary-2")
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
def test_a_scatter_of_ones_own_may_leave_the_first_replicas_idle(reduce_state, n):
    """The state that is kept is that of the first replica that has rows, or the mean over the rows."""

    class Own(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            (x,) = inputs
            return [(x[a:b],) for a, b in ((0, 0), (0, 0), (0, 0), (0, 3), (3, 5), (5, 6))], [kwargs] * 6

    variables = Net().init({"params": KEY, "dropout": KEY}, X)
    wide = Own(Net(), range(8), reduce_state=reduce_state)
    dp = Own(Net(), range(n), replicas=8, reduce_state=reduce_state)
    got, want = (d.apply(variables, X[:6], rngs={"dropout": KEY}, mutable=["batch_stats"]) for d in (dp, wide))
    close(got, want)
