"""Models that were written for a mesh: in a replica, which is one device, their annotations do nothing."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from laws import close

import jdp

ROWS = np.random.default_rng(0).normal(size=(10, 8)).astype(np.float32)
RULES = (("batch", "data"), ("embed", "model"))


def mesh_of(axis_type=AxisType.Auto, names=("data", "model")):
    return jax.make_mesh((2, 2), names, axis_types=(axis_type,) * 2, devices=jax.devices()[:4])


class Plain(nn.Module):
    """What all of them compute."""

    def constrained(self, x):
        return x

    def kernel(self):
        return nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        return self.constrained(nn.Dense(4, kernel_init=self.kernel())(x))


class Logical(Plain):
    def constrained(self, x):
        return nn.with_logical_constraint(x, ("batch", "embed"))

    def kernel(self):
        return nn.with_logical_partitioning(nn.initializers.lecun_normal(), (None, "embed"))


class Boxes(Plain):
    def kernel(self):
        return nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))


class BoxesOfMesh(Plain):
    def kernel(self):
        return nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"), mesh=mesh_of())


class Spec(Plain):
    def constrained(self, x):
        return jax.lax.with_sharding_constraint(x, P("data", "model"))


class InAScan(Plain):
    def constrained(self, x):
        step = lambda x, _: (jax.lax.with_sharding_constraint(x + 0, P(None, "other")), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), x, None, length=2)[0]


class OfMesh(Plain):
    def constrained(self, x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(), P(None, "model")))


MODELS = [Logical(), Boxes(), BoxesOfMesh(), Spec(), InAScan(), OfMesh()]
CONTEXTS = {
    "none": lambda: jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())),
    "other": lambda: jax.set_mesh(mesh_of()),
    "explicit": lambda: jax.set_mesh(mesh_of(AxisType.Explicit)),
}


@pytest.fixture(autouse=True)
def rules():
    with nn.logical_axis_rules(RULES):
        yield


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("around", CONTEXTS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.each_value
def test_a_model_with_annotations_is_the_one_without(model, around):
    plain = Plain()
    variables = jax.device_get(plain.init(jax.random.key(0), ROWS))
    dp, bare = jdp.DataParallel(model, range(4)), jdp.DataParallel(plain, range(4))

    def losses(model):
        return lambda v, x: (model.apply(v, x) ** 2).mean(1)

    with CONTEXTS[around]():
        boxed = jax.device_get(dp.init(jax.random.key(0), ROWS))
        found = [boxed]
        for rows in (8, 10):
            found.append(dp.apply(boxed, ROWS[:rows]))
            found.append(dp.value_and_grad(losses(model))(boxed, ROWS[:rows]))
            found.append(dp.value_and_grad(model.apply, criterion=root)(boxed, ROWS[:rows]))
        step = dp.train_step(lambda v, x: losses(model)(v, x).mean(), optax.adam(0.1))
        found.append(step(step.init(boxed), ROWS)[0].params)
    expected = [variables]
    for rows in (8, 10):
        expected.append(plain_of(variables, rows))
        expected.append(bare.value_and_grad(losses(plain))(variables, ROWS[:rows]))
        expected.append(bare.value_and_grad(plain.apply, criterion=root)(variables, ROWS[:rows]))
    step = bare.train_step(lambda v, x: losses(plain)(v, x).mean(), optax.adam(0.1))
    expected.append(step(step.init(variables), ROWS)[0].params)
    close(nn.unbox(jax.device_get(found)), jax.device_get(expected))


def root(outputs, batch):
    return jnp.sqrt((outputs**2).mean())


def plain_of(variables, rows):
    """The bare model, outside of any mesh."""
    x, kernel = ROWS[:rows], variables["params"]["Dense_0"]
    return x @ kernel["kernel"] + kernel["bias"]


@pytest.mark.parametrize("around", CONTEXTS)
def test_gradients_through_the_wrapper_inside_of_a_mesh(around):
    model, dp = Spec(), jdp.DataParallel(Spec(), range(4))
    variables = jax.device_get(dp.init(jax.random.key(0), ROWS))
    loss = lambda v: (dp.apply(v, ROWS) ** 2).mean()  # noqa: E731
    expected = jax.device_get(jax.value_and_grad(loss)(variables))
    assert type(model).__name__ == "Spec"
    with CONTEXTS[around]():
        if around == "explicit":
            with pytest.raises(ValueError, match="jdp.DataParallel: traced inside jax.set_mesh of .* are Explicit"):
                jax.jit(jax.value_and_grad(loss))(variables)
            return
        close(jax.device_get(jax.jit(jax.value_and_grad(loss))(variables)), expected)
        if around == "other":
            with pytest.raises(ValueError, match="jdp.apply: called inside jax.set_mesh .* Put jax.jit around"):
                jax.value_and_grad(loss)(variables)


def test_outside_of_a_replica_jax_is_as_it_was():
    """Also in another thread while a replica is traced, and after the model has failed."""
    before, seen = jax.lax.with_sharding_constraint, []

    def ask():
        try:
            jax.lax.with_sharding_constraint(jnp.ones(4), P("model"))
        except RuntimeError as error:
            seen.append(error)

    def model(w, x):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert jax.lax.with_sharding_constraint(x, P("model")) is x
        if w.ndim:
            raise KeyError("failed")
        return x * w

    dp = jdp.DataParallel(model, range(4))
    np.testing.assert_array_equal(dp.apply(np.float32(2), ROWS), 2 * ROWS)
    assert seen and jax.lax.with_sharding_constraint is before
    with pytest.raises(KeyError, match="failed"):
        dp.apply(np.ones(1, np.float32), ROWS)
    assert jax.lax.with_sharding_constraint is before


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("rows", [8, 10])
def test_a_shard_map_of_the_models_own_is_refused(n, rows):
    mesh = mesh_of()

    def model(w, x):
        return jax.shard_map(lambda y: y * w, mesh=mesh, in_specs=P(None, "model"), out_specs=P(None, "model"))(x)

    dp = jdp.DataParallel(model, range(n))
    with pytest.raises(ValueError, match=r"the model calls shard_map \(.*test_annotations.py:\d+\); it runs on one"):
        dp.apply(np.float32(2), ROWS[:rows])
    with pytest.raises(ValueError) as caught:
        dp.value_and_grad(lambda w, x: model(w, x).mean(1))(np.float32(2), ROWS[:rows])
    assert "shard_map" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("rows", [8, 7])
def test_a_shard_map_that_does_not_fit_a_chunk_is_told_of_too(rows):
    """JAX refuses it before there is a program to look at."""
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4])
    double = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    with pytest.raises(ValueError, match="not evenly divisible") as caught:
        jdp.DataParallel(lambda w, x: w * double(x), range(4)).apply(np.float32(1), ROWS[:rows])
    assert "Call the function without shard_map, on the chunk." in "\n".join(caught.value.__notes__)


class Annotated(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.linear = nnx.Linear(8, 4, kernel_init=kernel, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.full
def test_nnx_metadata():
    with nnx.use_eager_sharding(False):
        model = Annotated(nnx.Rngs(0))
    plain = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    expected = np.asarray(plain(ROWS))
    dp = jdp.DataParallel(model, range(4))
    close(jax.device_get(dp(ROWS)), expected)
    step = dp.train_step(lambda m, x: (m(x) ** 2).mean(), nnx.Optimizer(dp, optax.adam(1e-2), wrt=nnx.Param))
    np.testing.assert_allclose(step(ROWS)["loss"], (expected**2).mean(), rtol=1e-5)
    with jax.set_mesh(mesh_of()):
        cut = Annotated(nnx.Rngs(0))
    with pytest.raises(RuntimeError, match=r"cut into pieces .* under nnx.use_eager_sharding\(False\)"):
        jdp.DataParallel(cut, range(4))
