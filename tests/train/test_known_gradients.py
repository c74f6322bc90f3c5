"""A gradient like one before goes straight to its program, and is what all steps would have given."""

import contextlib
import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
import jdp._train.value_and_grad as door
from jdp._core.programs import intercept

X = np.arange(32, dtype=np.float32).reshape(16, 2) / 8
Y = np.arange(16, dtype=np.float32) / 4


def host_params(dtype=np.float32):
    return {"a": np.arange(6, dtype=dtype).reshape(2, 3), "b": np.ones(3, dtype)}


def outputs(params, x, *_, scale=1.0):
    return jnp.sin(x @ params["a"] * scale).sum(-1) + params["b"].sum()


def loss_fn(params, x, y, scale=1.0):
    return (outputs(params, x, scale=scale) - y) ** 2


def with_aux(params, x, y):
    out = outputs(params, x)
    return jnp.mean((out - y) ** 2), {"rows": out, "whole": jdp.Sum(jnp.sum(out))}


def rms(out, x, y):
    return jnp.sqrt(jnp.mean((out - y) ** 2))


def rms_and_error(out, x, y):
    return rms(out, x, y), {"error": jnp.abs(out - y)}


@contextlib.contextmanager
def straight(monkeypatch):
    """In here no call may take all steps."""

    def refuse(*args, **kwargs):
        raise AssertionError("all steps were taken")

    with monkeypatch.context() as patch:
        patch.setattr(door, "_run_new", refuse)
        yield


def gradient(f, devices=None, **options):
    """The gradient function of a function of its own, that shares no program with another's."""
    dp = jdp.DataParallel(lambda params, x: x, devices=devices)
    return dp.value_and_grad(lambda *args, **kwargs: f(*args, **kwargs), **options), jdp.replicate(
        host_params(), dp.devices
    )


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding == y.sharding and x.dtype == y.dtype


WAYS = {
    "mean": (with_aux, {"has_aux": True}),
    "rows": (loss_fn, {}),
    "criterion": (outputs, {"criterion": rms}),
    "criterion and aux": (outputs, {"criterion": rms_and_error, "has_aux": True}),
    "of rows": (loss_fn, {"argnums": (0, 1)}),
    "of rows alone": (loss_fn, {"argnums": 1}),
    "microbatches": (loss_fn, {"accumulate_steps": 2}),
    "bfloat16": (loss_fn, {"reduce_dtype": jnp.bfloat16}),
    "whole": (loss_fn, {"in_axes": (0, 0)}),
}


@pytest.mark.each_pair
@pytest.mark.one_case
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [16, 13])
@pytest.mark.parametrize("devices", [8, 1])
@pytest.mark.parametrize("batch", ["host", "scattered"])
def test_a_known_gradient_is_that_of_the_first_call(monkeypatch, way, rows, devices, batch):
    f, options = WAYS[way]
    call, params = gradient(f, range(devices), **options)
    given = X[:rows], Y[:rows]
    if batch == "scattered":
        given = tuple(jdp.scatter(x, devices=range(devices)) for x in given)
    first = call(params, *given)
    expected = gradient(f, range(devices), **options)[0](params, *given)
    same(first, expected)
    if batch == "host" and rows % devices:  # it is padded in each call
        same(call(params, *given), first)
        return
    doubled = jax.tree.map(lambda x: x * 2, params)
    with straight(monkeypatch):
        same(call(params, *given), first)
        other = call(doubled, *given)
    same(other, gradient(f, range(devices), **options)[0](doubled, *given))


def test_whatever_decides_the_program_decides_what_is_known(monkeypatch):
    call, params = gradient(loss_fn)
    even, uneven = call(params, X, Y), call(params, X[:13], Y[:13])
    scaled = call(params, X, Y, scale=2)
    with straight(monkeypatch):
        same(call(params, X, Y), even)
        same(call(params, X, Y, scale=2), scaled)
        with pytest.raises(AssertionError, match="all steps"):
            call(params, X, Y, scale=3)
        with pytest.raises(AssertionError, match="all steps"):
            call(params, X[:13], Y[:13])  # padded on the host
    same(call(params, X[:13], Y[:13]), uneven)
    assert float(scaled[0]) != float(even[0])


def test_parameters_without_a_gradient_are_refused_in_the_same_words():
    call, params = gradient(loss_fn)
    for _ in range(2):
        call(params, X, Y)
    whole = jax.tree.map(lambda x: x.astype(jnp.int32), params)
    for _ in range(2):
        with pytest.raises(TypeError, match="jdp.value_and_grad: .* of dtype int32, which has no gradient"):
            call(whole, X, Y)


@pytest.mark.parametrize("place", ["host", "primary"])
def test_parameters_elsewhere_get_their_gradients_there(place):
    put = {"host": np.asarray, "primary": lambda x: jax.device_put(x, jax.devices()[0])}[place]
    call, params = gradient(loss_fn)
    placed = call(params, X, Y)
    elsewhere = params | {"b": put(np.asarray(params["b"]))}
    expected = gradient(loss_fn)[0](elsewhere, X, Y)
    for _ in range(2):
        same(call(elsewhere, X, Y), expected)
        same(call(params, X, Y), placed)


TRACES = {
    "jit": lambda call, b: jax.jit(lambda: call(b))(),
    "jit of parameters": lambda call, b: jax.jit(call)(b),
    "grad": lambda call, b: jax.grad(lambda b: call(b)[0])(b),
    "hessian": lambda call, b: jax.jacobian(lambda b: call(b)[1]["b"])(b),
    "vmap": lambda call, b: jax.vmap(call)(jnp.stack([b, b * 2])),
    "scan": lambda call, b: jax.lax.scan(lambda c, i: (c + call(b)[0], i), 0.0, np.arange(3))[0],
    "pmap": lambda call, b: jax.pmap(lambda i: call(b)[0] + i)(np.zeros(8, np.float32)),
    "disable_jit": lambda call, b: under_disable_jit(call, b),
}


def under_disable_jit(call, b):
    with jax.disable_jit():
        return call(b)


@pytest.mark.full
@pytest.mark.parametrize("trace", TRACES)
def test_a_known_gradient_in_a_trace(trace):
    found = []
    for calls in (0, 2):
        call, params = gradient(outputs, criterion=rms)
        for _ in range(calls):
            call(params, X, Y)
        found.append(TRACES[trace](lambda b, p=params, call=call: call(p | {"b": b}, X, Y), params["b"]))
    same(*found)


def test_an_nnx_model_is_updated_by_each_call():
    """Its state changes in place, so that no call of it is known; nor does one of plain arrays stand in for it."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    dp = jdp.DataParallel(model)
    call = dp.value_and_grad(lambda model, x: (model(x) ** 2).sum(-1))
    means = []
    for _ in range(3):
        call(dp.module, X)
        means.append(np.asarray(dp.module.layers[1].mean[...]))
    assert not np.array_equal(means[0], means[1]) and not np.array_equal(means[1], means[2])


def test_an_nnx_model_of_parameters_alone():
    dp = jdp.DataParallel(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    call = dp.value_and_grad(lambda model, x: (model(x) ** 2).sum(-1))
    first, *others = [call(dp.module, X) for _ in range(3)]
    for other in others:
        same(other, first)


@pytest.mark.full
def test_two_arguments_that_are_differentiated_and_replicated():
    call, params = gradient(lambda p, q, x: loss_fn(p, x, q["a"].sum()), argnums=(0, 1), in_axes=(None, 0))
    for scale in (1, 2, 3):
        other = jax.tree.map(lambda x, scale=scale: x * scale, params)
        expected = jax.value_and_grad(lambda p, q: loss_fn(p, X, q["a"].sum()).mean(), (0, 1))(params, other)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), call(params, other, X), expected)


def test_parameters_on_the_host_beside_a_mesh_of_several_axes():
    """There they are told by their shardings, which those on the host do not have."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    call, _ = gradient(loss_fn, mesh)
    first, *others = [call(host_params(), X, Y) for _ in range(3)]
    for other in others:
        same(other, first)


def test_gradients_of_rows_on_a_mesh_of_several_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for argnums in (1, (1, 0), (0, 1)):
        call, params = gradient(loss_fn, mesh, argnums=argnums)
        params = jax.device_put(host_params(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        first, *others = [call(params, X, Y) for _ in range(3)]
        for other in others:
            same(other, first)


def test_gradients_of_parameters_that_are_cut_are_not_those_of_replicated_ones():
    """They come back where the parameters are: cut, or replicated, whichever came first."""
    whole = {"a": np.arange(16, dtype=np.float32).reshape(2, 8) / 8, "b": np.ones(8, np.float32)}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    cut = {"a": spec(None, "data"), "b": spec("data")}
    cut = {k: jax.device_put(x, jax.sharding.NamedSharding(mesh, cut[k])) for k, x in whole.items()}
    for order in ((cut, jdp.replicate(whole)), (jdp.replicate(whole), cut)):
        call = gradient(loss_fn)[0]
        for params in order:
            _, grads = call(params, X, Y)
            _, fresh = gradient(loss_fn)[0](params, X, Y)
            same(grads, fresh)


def test_an_interceptor_sees_each_gradient():
    """`explain`, `plan` and a replay look at the programs that run, at those of known calls too."""
    call, params = gradient(loss_fn)
    for _ in range(2):
        call(params, X, Y)
    seen = []
    with intercept(lambda program, *operands: seen.append(program.__name__), shapes=False):
        call(params, X, Y)
    assert len(seen) == 1
    assert "all-reduce" in str(jdp.explain(call, params, X, Y))


@pytest.mark.full
def test_what_is_known_goes_with_the_loss_function():
    class Loss:
        def __call__(self, params, x, y):
            return loss_fn(params, x, y)

    loss, dp = Loss(), jdp.DataParallel(lambda params, x: x)
    alive = weakref.ref(loss)
    call, params = dp.value_and_grad(loss), jdp.replicate(host_params())
    for _ in range(2):
        call(params, X, Y)
    del call, loss
    gc.collect()
    assert alive() is None


def test_training_by_known_gradients_is_that_of_one_device(monkeypatch):
    model, tx = nn.Dense(1), optax.sgd(0.1)
    losses = {}
    for devices in (1, 8):
        dp = jdp.DataParallel(model, range(devices))
        variables = jdp.replicate(jax.device_get(model.init(jax.random.key(0), X)), range(devices))
        call = dp.value_and_grad(lambda v, x, y: model.apply(v, x)[:, 0], criterion=lambda out, x, y: rms(out, x, y))
        state, losses[devices] = jdp.replicate(tx.init(variables), range(devices)), []
        for i in range(5):
            with straight(monkeypatch) if i else contextlib.nullcontext():
                loss, grads = call(variables, X, Y)
            updates, state = tx.update(grads, state)
            variables = optax.apply_updates(variables, updates)
            losses[devices].append(float(loss))
    np.testing.assert_allclose(losses[8], losses[1], rtol=1e-5)
    assert losses[1][-1] < losses[1][0]
