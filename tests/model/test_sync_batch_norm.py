"""sync_batch_norm: BatchNorm over the whole batch, exact on uneven chunks too, without a change to the model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import INPUTS, TARGETS, close

import jdp

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(17, 5, 5, 3)), rng.normal(size=(17, 4))


class Net(nn.Module):
    """Two BatchNorms behind each other, so that the statistics of the second are made of those of the first."""

    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        for features in (6, 5):
            x = nn.Conv(features, (3, 3), param_dtype=x.dtype)(x)
            norm = nn.BatchNorm(
                use_running_average=False, axis_name=self.axis, param_dtype=x.dtype, force_float32_reductions=False
            )
            x = nn.relu(norm(x))
        return nn.Dense(4, param_dtype=x.dtype)(x.mean((1, 2)))


def loss_of(net, form="scalar"):
    def loss_fn(variables, batch):
        x, y = batch
        out, updates = net.apply(variables, x, mutable=["batch_stats"])
        each = ((out - y) ** 2).sum(-1)
        loss = {"scalar": each.mean(), "vector": each, "mean": jdp.Mean(2 * each.sum(), 2 * len(each))}
        return loss[form], {"out": out}, updates

    return loss_fn


def init(x):
    return jax.jit(Net().init)(jax.random.key(0), x)  # operation by operation takes ten times as long


def on_one_device(variables, rows, lr=0.1):
    """The whole batch at once, with nothing of jdp."""
    loss_fn = loss_of(Net())

    @jax.jit
    def step(variables, x, y):
        def loss(params):
            value, metrics, updates = loss_fn({**variables, "params": params}, (x, y))
            return value, (metrics["out"], updates)

        (value, (out, updates)), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - lr * g, variables["params"], grads)
        return {"params": params, **updates}, value, out

    return step(variables, X[:rows], Y[:rows])


@pytest.mark.full
@pytest.mark.parametrize("count, sizes, axis", [(1, (17,), None), (3, (17, 4), "data"), (8, (16, 5), None)])
def test_params_and_statistics_are_those_of_the_whole_batch(count, sizes, axis):
    with jax.enable_x64(True):
        dp = jdp.DataParallel(Net(axis), devices=list(range(count)))
        step = dp.train_step(loss_of(Net(axis)), optax.sgd(0.1), sync_batch_norm=True)
        want = init(X)
        state = step.init(want)
        for rows in sizes:
            state, metrics = step(state, (X[:rows], Y[:rows]))
            want, loss, out = on_one_device(want, rows)
            close((metrics["loss"], metrics["out"]), (loss, out), 1e-12, 1e-12)
        close({"params": state.params, **state.state}, want, 1e-12, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("form", ["vector", "mean"])
def test_every_form_of_loss_on_uneven_chunks(form):
    with jax.enable_x64(True):
        dp = jdp.DataParallel(Net(), devices=[0, 1, 2])
        step = dp.train_step(loss_of(Net(), form), optax.sgd(0.1), sync_batch_norm=True)
        variables = init(X)
        state, metrics = step(step.init(variables), (X, Y))
        want, loss, _ = on_one_device(variables, len(X))
        close((state.params, metrics["loss"]), (want["params"], loss), 1e-12, 1e-12)


@pytest.mark.full
def test_without_it_statistics_are_those_of_each_replica():
    """What makes the tests above tests: the default is another number."""
    with jax.enable_x64(True):
        dp = jdp.DataParallel(Net(), devices=[0, 1])
        step = dp.train_step(loss_of(Net()), optax.sgd(0.1))
        variables = init(X)
        state, _ = step(step.init(variables), (X, Y))
        want, _, _ = on_one_device(variables, len(X))
        mean = state.state["batch_stats"]["BatchNorm_0"]["mean"]
        assert abs(mean - want["batch_stats"]["BatchNorm_0"]["mean"]).max() > 1e-4


@pytest.mark.full
def test_even_batches_take_no_switch_and_one_collective_for_each_batch_norm():
    dp = jdp.DataParallel(Net(), devices=[0, 1])
    step = dp.train_step(loss_of(Net()), optax.sgd(0.1), sync_batch_norm=True)
    x, y = X.astype(np.float32), Y.astype(np.float32)
    state = step.init(init(x))
    text = step.lower(state, (x[:16], y[:16])).as_text()
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
    assert "stablehlo.case" in step.lower(state, (x, y)).as_text()


@pytest.mark.full
def test_accumulation_synchronises_each_microbatch():
    """Microbatch k of every replica together is one BatchNorm batch: compared with a loop on one device."""
    with jax.enable_x64(True):
        dp = jdp.DataParallel(Net(), devices=[0, 1])
        step = dp.train_step(loss_of(Net()), optax.sgd(0.1), sync_batch_norm=True, accumulate_steps=2)
        variables = init(X)
        state, metrics = step(step.init(variables), (X[:16], Y[:16]))
        loss_fn, stats, total = loss_of(Net()), variables["batch_stats"], 0.0
        grads = jax.tree.map(jnp.zeros_like, variables["params"])
        for k in range(2):
            rows = np.r_[4 * k : 4 * k + 4, 8 + 4 * k : 12 + 4 * k]

            def loss(params, stats, rows=rows):
                value, _, updates = loss_fn({"params": params, "batch_stats": stats}, (X[rows], Y[rows]))
                return value, updates["batch_stats"]

            (value, stats), more = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], stats)
            total, grads = total + value / 2, jax.tree.map(lambda a, b: a + b / 2, grads, more)
        close(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads), 1e-12, 1e-12)
        close((state.state["batch_stats"], metrics["loss"]), (stats, total), 1e-12, 1e-12)


@pytest.mark.full
@pytest.mark.budget(8)  # a convolution, in float64
def test_uneven_microbatches_are_refused():
    dp = jdp.DataParallel(Net(), devices=[0, 1])
    step = dp.train_step(loss_of(Net()), optax.sgd(0.1), sync_batch_norm=True, accumulate_steps=2)
    x, y = X.astype(np.float32), Y.astype(np.float32)
    state = step.init(init(x))
    with pytest.raises(ValueError, match=r"BatchNorm runs in a scan, the chunks are \(9, 8\).*accumulate_steps=1"):
        step(state, (x, y))
    step(state, (x[:16], y[:16]))  # the state is as good as before


@pytest.mark.full
def test_other_collectives_are_refused_on_uneven_chunks_all_the_same():
    dp = jdp.DataParallel(Net(), devices=[0, 1])

    def loss_fn(variables, batch):
        loss, metrics, updates = loss_of(Net())(variables, batch)
        return loss, {"mean": jax.lax.pmean(jax.lax.stop_gradient(loss), "data")}, updates

    step = dp.train_step(loss_fn, optax.sgd(0.1), sync_batch_norm=True)
    x, y = X.astype(np.float32), Y.astype(np.float32)
    state = step.init(init(x))
    with pytest.raises(ValueError, match=r"^jdp\.train_step: .*runs a collective.* is criterion=") as error:
        step(state, (x, y))
    assert "parallel_apply" not in str(error.value)  # the user has not called it


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense, self.out = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(16, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])

    def __call__(self, x):
        return self.norms[1](self.out(nnx.relu(self.norms[0](self.dense(x)))))


@pytest.mark.full
@pytest.mark.parametrize("rows", [16, 17, 5])
def test_nnx(rows):
    x, y = rng.normal(size=(rows, 6)).astype(np.float32), rng.normal(size=(rows, 4)).astype(np.float32)

    def loss_fn(model, x, y):
        return ((model(x) - y) ** 2).mean()

    alone, dp = Model(), jdp.DataParallel(Model())
    want = nnx.jit(nnx.value_and_grad(loss_fn))(alone, x, y)
    got = dp.value_and_grad(loss_fn, sync_batch_norm=True)(dp.module, x, y)
    close(nnx.as_pure(got), nnx.as_pure(want), 2e-5, 2e-5)
    close(nnx.as_pure(nnx.state(dp.module)), nnx.as_pure(nnx.state(alone)), 1e-6, 1e-6)
    assert dp.module.norms[0].axis_name is None  # the user's own module is as it was

    stepped = jdp.DataParallel(Model())
    stepped.train_step(lambda m, b: loss_fn(m, *b), optax.sgd(0.0), sync_batch_norm=True)((x, y))
    close(nnx.as_pure(nnx.state(stepped.module)), nnx.as_pure(nnx.state(alone)), 1e-6, 1e-6)


def test_the_model_is_as_it_was_after_an_error():
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)(x)
            raise KeyError("mine")

    def loss_fn(params, x):
        return Failing().apply(params, x, mutable=["batch_stats"])[0].mean()

    dp = jdp.DataParallel(Failing(), devices=[0, 1])
    with pytest.raises(KeyError, match="mine"):
        dp.value_and_grad(loss_fn, sync_batch_norm=True)({"params": {}}, np.ones((4, 3), np.float32))
    norm = nn.BatchNorm(use_running_average=False)
    norm.init_with_output(jax.random.key(0), np.ones((4, 3), np.float32))  # no axis is left behind


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))


@pytest.mark.full
@pytest.mark.parametrize("order, rows", [((False, True), 8), ((True, False), 5)])
def test_a_jitted_block_is_not_taken_for_its_synchronised_self(order, rows):
    """nn.jit keeps its trace over calls, and cannot see that an interceptor is part of it."""
    model = nn.jit(Jitted)()
    variables = Jitted().init(jax.random.key(0), INPUTS)
    dp = jdp.DataParallel(model, devices=[0, 1])

    def loss_fn(params, x, y):
        out, _ = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return ((out - y) ** 2).mean()

    def whole(rows):
        return float(loss_fn(variables["params"], INPUTS[rows], TARGETS[rows]))

    sizes = jdp.chunk_sizes(rows, 2)
    chunks = np.split(np.arange(rows), np.cumsum(sizes)[:-1])
    want = {True: whole(np.arange(rows)), False: sum(s * whole(c) for s, c in zip(sizes, chunks, strict=True)) / rows}
    assert abs(want[True] - want[False]) > 1e-3
    for sync in order:
        loss, _ = dp.value_and_grad(loss_fn, sync_batch_norm=sync)(variables["params"], INPUTS[:rows], TARGETS[:rows])
        np.testing.assert_allclose(loss, want[sync], rtol=1e-5)


def test_a_mask_is_refused():
    """Flax takes the mean of the replicas' masked means: 7.5 here for 10, and nan where a chunk is masked whole."""

    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return nn.BatchNorm(use_running_average=False)(x, mask=mask)

    x, mask = np.array([[0], [2], [10], [20]], np.float32), np.array([[1], [0], [1], [1]], bool)
    dp = jdp.DataParallel(Masked(), devices=range(2))
    variables = dp.init(jax.random.key(0), x, mask)

    def loss_fn(v, batch):
        y, _ = dp(v, *batch, mutable=["batch_stats"])
        return (y**2).mean()

    step = dp.train_step(loss_fn, optax.sgd(0.1), sync_batch_norm=True)
    with pytest.raises(ValueError, match=r"BatchNorm BatchNorm_0 has a mask, and is synchronised"):
        step(step.init(variables), (x, mask))


class MaskedNNX(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

    def __call__(self, x, mask=None):
        return self.norm(x, mask=mask)


@pytest.mark.parametrize("rows", [4, 3])
def test_a_mask_of_nnx_is_refused(rows):
    x, mask = np.array([[0], [2], [10], [20]], np.float32)[:rows], np.array([[1], [0], [1], [1]], bool)[:rows]
    model = MaskedNNX()
    step = jdp.DataParallel(model, devices=range(2)).train_step(
        lambda model, batch: (model(*batch) ** 2).mean(), optax.sgd(0.1), sync_batch_norm=True
    )
    with pytest.raises(ValueError, match=r"BatchNorm norm has a mask, and is synchronised"):
        step((x, mask))
    step((x,))  # without a mask it is as before
    assert type(model.norm) is nnx.BatchNorm
    np.testing.assert_allclose(model.norm.mean[...], 0.01 * x.mean(0), rtol=1e-4)
