"""step.find_nonfinite names the replicas and the rows that made a gradient that is not finite."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(23, 6)).astype(np.float32), rng.normal(size=(23, 4)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="b")(nn.relu(nn.Dense(8, name="a")(x)))


def loss_fn(variables, batch):
    x, y = batch
    return jnp.mean((Net().apply(variables, x) - y) ** 2)


def made_bad(rows):
    x = X.copy()
    x[rows] = np.nan
    return x


def test_a_loss_that_is_the_same_on_all_replicas_is_looked_at_as_well():
    """A step accepts the mean of equal chunks' means; a row alone is no chunk of another size."""
    dp = jdp.DataParallel(lambda v, x: x @ v["params"], range(2))
    step = dp.train_step(lambda v, x: jax.lax.pmean(jnp.mean((x @ v["params"]) ** 2), "data"), optax.sgd(0.1))
    state = step.init({"params": np.ones(6, np.float32)})
    x = X[:8].copy()
    x[5] = np.nan
    state, _ = step(state, X[:8])
    assert [(found.replica, found.rows) for found in step.find_nonfinite(state, x)] == [(1, (5,))]


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("rows, replicas", [([7], [(2, (7,))]), ([0, 2, 22], [(0, (0, 2)), (7, (22,))]), ([], [])])
def test_replicas_and_rows_are_named(rows, replicas, steps, devices):
    dp = jdp.DataParallel(Net())
    step = dp.train_step(loss_fn, optax.adam(1e-2), skip_nonfinite=True, accumulate_steps=steps)
    state = step.init(dp.init(jax.random.key(0), X))
    found = step.find_nonfinite(state, (made_bad(rows), Y))
    assert [(f.replica, f.rows) for f in found] == replicas
    assert all(f.device == devices[f.replica] and "['a']['kernel']" in f.paths for f in found)
    state, metrics = step(state, (made_bad(rows), Y))  # the state was not used up
    assert bool(metrics["skipped"]) == bool(rows)


def test_where_no_row_does_it_alone_all_of_the_replica_are_named():
    """A sum that overflows only over several rows."""
    dp = jdp.DataParallel(lambda v, x: x, devices=[0, 1])
    step = dp.train_step(lambda v, x: jdp.Sum(jnp.sum(x * v["params"])), optax.sgd(0.1))
    x = np.ones(6, np.float32)
    x[3:] = 2e38
    (found,) = step.find_nonfinite(step.init({"params": np.float32(1)}), x)
    assert (found.replica, found.rows, found.paths) == (1, (3, 4, 5), ("",))


@pytest.mark.full
def test_nnx_and_synchronised_batch_norm():
    """A replica's NaN is everybody's through synchronised statistics; the one that has it is named."""

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.dense, self.norm = nnx.Linear(6, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.dense(x))

    dp = jdp.DataParallel(Model())
    step = dp.train_step(
        lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2),
        optax.adam(1e-2),
        skip_nonfinite=True,
        sync_batch_norm=True,
    )
    before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(dp.module)))
    (found,) = step.find_nonfinite((made_bad([12]), Y))
    assert (found.replica, found.rows) == (4, (12,)) and "['dense']['kernel']" in found.paths
    assert bool(step((made_bad([12]), Y))["skipped"])
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(nnx.state(dp.module)), before)
    assert not step((X, Y))["skipped"]


def log_of(variables, batch):
    return jnp.mean(jnp.log(batch @ variables["params"]))


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("way", ["step", "jit", "jax.grad", "value_and_grad", "parallel", "call"])
@pytest.mark.parametrize("devices", [[0], range(4), "mesh"])
def test_debug_nans_ends_any_call_with_an_error_that_says_so(devices, way, rows):
    """JAX's own search may end in another error: a recursion or, on a mesh of several axes, one of shard_map."""
    devices = jax.make_mesh((2, 2), ("data", "model")) if devices == "mesh" else devices
    x, w = np.full((rows, 3), np.nan, np.float32), np.ones(3, np.float32)
    dp = jdp.DataParallel(lambda w, x: jnp.log(x @ w), devices)
    call = {
        "call": lambda: dp(w, x),
        "jit": lambda: jax.jit(dp.apply)(w, x),
        "jax.grad": lambda: jax.grad(lambda w: dp(w, x).sum())(w),
        "value_and_grad": lambda: dp.value_and_grad(lambda w, x: jnp.log(x @ w).mean())(w, x),
        "parallel": lambda: dp.parallel(lambda w, x: jax.lax.pmean(jnp.log(x @ w).mean(), "data"))(w, x[:4]),
    }
    step = dp.train_step(log_of, optax.sgd(0.1))
    call["step"] = lambda: step(step.init({"params": w}), x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"^jdp\..* is not finite|^Invalid value \(nan"):
        call[way]()


@pytest.mark.each_pair
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"donate": False}, {"accumulate_steps": 2}, {"deterministic": True}])
def test_debug_nans_ends_a_step_and_names_the_way_on(options, calls, rows):
    """Cold and warm, as of a program of jit; the state that was donated would else be missed."""
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(4), replicas=4 if "deterministic" in options else None)
    step, x = dp.train_step(log_of, optax.sgd(0.1), **options), np.ones((rows, 3), np.float32)
    state = step.init({"params": np.ones(3, np.float32)})
    for _ in range(calls):
        state, _ = step(state, x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"step\.find_nonfinite\(state, batch\)"):
        step(state, -x)
    again = dp.train_step(log_of, optax.sgd(0.1), **options)
    _, metrics = again(again.init({"params": np.ones(3, np.float32)}), -x)
    assert np.isnan(metrics["loss"])  # without that setting it is a number


@pytest.mark.one_case
@pytest.mark.parametrize("way", ["step", "call", "value_and_grad"])
def test_a_warm_program_looks_for_nans_though_jax_has_forgotten_that_it_should(way):
    """In JAX 0.10 a gradient of `relu` hides the global setting from programs of that thread that were compiled."""
    dp, x, w = jdp.DataParallel(lambda w, x: jnp.log(x * w), range(4)), np.ones((7, 3), np.float32), np.ones(3)
    step = dp.train_step(log_of, optax.sgd(0.1), donate=False)
    state, grads = step.init({"params": w.astype(np.float32)}), dp.value_and_grad(lambda w, x: jnp.log(x * w).mean())
    call = {"step": lambda x: step(state, x), "call": lambda x: dp(w, x), "value_and_grad": lambda x: grads(w, x)}[way]
    for _ in range(3):
        call(x)
    jax.jit(jax.grad(lambda x: jax.nn.relu(x).sum()))(x)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError, match=r"step\.find_nonfinite|^Invalid value \(nan"):
            call(-x)
    finally:
        jax.config.update("jax_debug_nans", False)
