"""Meshes of replicas of several devices, and a column- and row-parallel MLP that runs on them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {
    "2x2": ((2, 2), ("data", "model"), AUTO),
    "4x2": ((4, 2), ("data", "model"), AUTO),
    "2x4": ((2, 4), ("data", "model"), AUTO),
    "model first": ((2, 4), ("model", "data"), AUTO),
    "one replica": ((1, 4), ("data", "model"), AUTO),
    "one device each": ((4, 1), ("data", "model"), AUTO),
    "explicit": ((2, 2), ("data", "model"), EXPLICIT),
    "three axes": ((2, 2, 2), ("data", "model", "more"), AUTO),
}
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "wide": RANDOM.normal(size=(6, 16)).astype(np.float32),
    "narrow": RANDOM.normal(size=(16, 4)).astype(np.float32),
    "bias": RANDOM.normal(size=4).astype(np.float32),
}
SPECS = {"wide": P(None, "model"), "narrow": P("model", None), "bias": P()}


def mesh_of(name, first=0):
    """The mesh with this name; of one that does not need all devices, from device `first` on."""
    sizes, names, kind = MESHES[name]
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(kind,) * len(names))


def rows(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32)


def placed(mesh, specs=SPECS, weights=WEIGHTS):
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in weights.items()}


def mlp(w, x):
    """The constraint names the replicas' axis too, as under `jax.jit`."""
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w["wide"]), P("data", "model"))
    return hidden @ w["narrow"] + w["bias"]


def bare(w, x):
    return jnp.tanh(x @ w["wide"]) @ w["narrow"] + w["bias"]


def lies_as(tree, specs=SPECS):
    """Asserts that each array is cut as its spec says: no device has the whole of one."""
    for name, x in tree.items():
        shape = NamedSharding(x.sharding.mesh, specs[name]).shard_shape(x.shape)
        assert {s.data.shape for s in x.addressable_shards} == {shape}, (name, x.sharding)


class Annotated(nn.Module):
    """An MLP whose kernels say over which axes they are cut, by names of axes or by logical names."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        boxed = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        wide, narrow = (("embed", "mlp"), ("mlp", "embed")) if self.logical else ((None, "model"), ("model", None))
        h = nn.tanh(nn.Dense(16, kernel_init=boxed(nn.initializers.lecun_normal(), wide))(x))
        if self.logical:
            h = nn.with_logical_constraint(h, ("batch", "mlp"))
        else:
            h = jax.lax.with_sharding_constraint(h, P("data", "model"))
        return nn.Dense(4, kernel_init=boxed(nn.initializers.lecun_normal(), narrow))(h)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.tanh(nn.Dense(16)(x))
        return nn.Dense(4)(h)


RULES = (("batch", "data"), ("mlp", "model"), ("embed", None))


class AnnotatedNNX(nnx.Module):
    def __init__(self, rngs, annotated=True):
        init = nnx.initializers.lecun_normal()

        def boxed(spec):
            return nnx.with_partitioning(init, spec) if annotated else init

        self.annotated = annotated
        self.wide = nnx.Linear(6, 16, rngs=rngs, kernel_init=boxed((None, "model")))
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.narrow = nnx.Linear(16, 4, rngs=rngs, kernel_init=boxed(("model", None)))

    def __call__(self, x):
        h = self.wide(x)
        if self.annotated:
            h = jax.lax.with_sharding_constraint(h, P("data", "model"))
        return self.narrow(nnx.tanh(self.norm(h)))
