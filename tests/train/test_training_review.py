"""What a stranger's review of the training code found, and how it stands now."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))


@pytest.mark.parametrize("order", [(False, True), (True, False)])
@pytest.mark.parametrize("rows", [8, 5])
def test_a_jitted_block_is_not_taken_for_its_synchronised_self(order, rows):
    """nn.jit keeps its trace over calls, and cannot see that an interceptor is part of it."""
    model = nn.jit(Jitted)()
    variables = Jitted().init(jax.random.key(0), X)
    dp = jdp.DataParallel(model, devices=[0, 1])

    def loss_fn(params, x, y):
        out, _ = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return ((out - y) ** 2).mean()

    def whole(rows):
        return float(loss_fn(variables["params"], X[rows], Y[rows]))

    sizes = jdp.chunk_sizes(rows, 2)
    chunks = np.split(np.arange(rows), np.cumsum(sizes)[:-1])
    want = {True: whole(np.arange(rows)), False: sum(s * whole(c) for s, c in zip(sizes, chunks, strict=True)) / rows}
    assert abs(want[True] - want[False]) > 1e-3
    for sync in order:
        loss, _ = dp.value_and_grad(loss_fn, sync_batch_norm=sync)(variables["params"], X[:rows], Y[:rows])
        np.testing.assert_allclose(loss, want[sync], rtol=1e-5)


def test_a_state_of_which_a_part_was_donated_is_refused():
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=[0])  # on several JAX would crash
    step = dp.train_step(lambda v, x: jnp.mean(dp(v, x) ** 2), optax.sgd(0.1))
    state, _ = step(step.init({"params": {"w": np.ones((6, 2), np.float32)}}), X)
    jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)(state.params)
    with pytest.raises(RuntimeError, match=r"state\.params\['w'\] was donated"):
        step(state, X)


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)


@pytest.mark.parametrize("through", ["dp", "model"])
def test_params_in_boxes_of_another_mesh(through):
    model = Partitioned()
    dp = jdp.DataParallel(model, devices=[0, 1])
    variables = dp.init(jax.random.key(0), X)
    apply = dp.apply if through == "dp" else model.apply

    def loss_fn(variables, batch):
        return ((apply(variables, batch[0]) - batch[1]) ** 2).mean()

    step = dp.train_step(loss_fn, optax.sgd(0.1))
    state, metrics = step(step.init(variables), (X, Y))
    plain = nn.unbox(variables)
    loss, grads = jax.value_and_grad(lambda v: ((model.apply(v, X) - Y) ** 2).mean())(plain)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, plain["params"], grads["params"])
    assert isinstance(state.params["Dense_0"]["kernel"], nn.Partitioned)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), nn.unbox(state.params), want)
    if through == "dp":
        _, got = dp.value_and_grad(lambda v, x, y: ((apply(v, x) - y) ** 2).mean())(variables, X, Y)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), nn.unbox(got), grads)


class Growing(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.dense(x)
        self.seen = nnx.Variable(y.mean())
        return y


def squared(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


@pytest.mark.parametrize("option", [{"skip_nonfinite": True}, {"accumulate_steps": 2}])
def test_a_state_that_grows_is_refused_where_it_must_not(option):
    def step_of(**option):
        dp = jdp.DataParallel(Growing(), devices=[0, 1], reduce_state="mean")  # the first chunk's alone is refused
        return dp.train_step(squared, optax.sgd(0.1), **option)

    step = step_of(**option)
    with pytest.raises(ValueError, match=r"jdp\.\w+: the state.*seen.* is not expected.*Make the variable when"):
        step((X, Y))
    step_of()((X, Y))


@pytest.mark.parametrize("rows", [8, 16])
def test_a_model_of_pairs_of_rows_has_its_row_axis_found(rows):
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)

    def loss_fn(w, x):
        pairs = x.reshape(-1, 2, 2) * w
        return pairs.mean(), {"per_class": jnp.full(4, pairs.mean()), "rows": x[:, 0] * w}

    (_, metrics), _ = jdp.DataParallel(lambda w, x: x, devices=[0, 1]).value_and_grad(loss_fn, has_aux=True)(1.0, x)
    np.testing.assert_allclose(metrics["per_class"], np.full(4, x.mean()), rtol=1e-6)
    np.testing.assert_array_equal(metrics["rows"], x[:, 0])


def test_a_variable_in_two_arguments_is_refused():
    a, b = nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nnx.Linear(6, 4, rngs=nnx.Rngs(1))
    b.kernel = a.kernel
    dp = jdp.DataParallel(a, devices=[0, 1])
    with pytest.raises(ValueError, match=r"kernel stands in args\[1\] and in another; a variable has one gradient"):
        dp.value_and_grad(lambda a, b, x: (a(x) + b(x)).mean(), argnums=1, in_axes=(None, 0))(a, b, X)


def test_filters_may_be_lists_and_must_find_something(refused):
    model = Growing().dense
    dp = jdp.DataParallel(model, devices=[0, 1])
    step = dp.train_step(squared, nnx.Optimizer(model, optax.sgd(0.1), wrt=[nnx.Param, nnx.LoRAParam]))
    assert step((X, Y))["loss"] > 0
    loss, grads = dp.value_and_grad(lambda m, x: m(x).mean(), argnums=nnx.DiffState(0, [nnx.Param]))(model, X)
    assert set(grads) == {"kernel", "bias"}
    with refused(ValueError, "train_step", "the model has no variables of"):
        dp.train_step(squared, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam))


def test_a_second_init_of_other_shapes_is_cut_along_its_own_axes():
    dp = jdp.DataParallel(lambda v, x: x)
    tx = optax.adam(0.1)
    step = dp.train_step(lambda v, x: jnp.mean((x.mean() * v["params"] - 3) ** 2), tx, shard_optimizer=True)
    for shape, cut in ((16,), 16), ((5,), 0), ((3, 8), 24):
        state, _ = step(step.init({"params": np.ones(shape, np.float32)}), X)
        assert state.params.shape == shape and step.optimizer_bytes(state).cut == cut


def test_small_things(refused):
    dp = jdp.DataParallel(lambda v, x: x, devices=[0, 1])
    step = dp.train_step(lambda v, x: (x.mean(), {}, {"s": {"n": 1.0}}), optax.sgd(0.1))
    state, _ = step(step.init({"params": {}, "s": {"n": np.zeros((), np.float32)}}), X)
    assert float(state.state["s"]["n"]) == 1.0
    assert step.find_nonfinite(state, X) == []
