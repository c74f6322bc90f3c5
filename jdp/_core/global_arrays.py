"""Builds arrays that span several processes from the parts on each process's devices, and takes these out again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jax.private import is_described
from .layout import Layout, is_key
from .replica_mesh import ReplicaMesh, outside_of_mesh


def assemble(values: Sequence[Any], layout: Layout) -> list[Any]:
    """Returns the layout's global arrays, made of this process's (padded) rows and its copies of replicated arrays."""
    own = layout.here
    # An array that is global already came out of an earlier scatter, or is replicated.
    arrays = [
        put(x, to) if isinstance(x, jax.Array) and not x.is_fully_addressable else x
        for x, to in zip(values, layout.shardings, strict=True)
    ]
    here = [i for i, x in enumerate(arrays) if not isinstance(x, jax.Array) or x.is_fully_addressable]
    local = jax.device_put([arrays[i] for i in here], [own.shardings[i] for i in here])
    for i, x in zip(here, local, strict=True):
        arrays[i] = _of_shards(x, _global_shape(x, layout, i), layout.shardings[i])
    return arrays


def global_shapes(values: Sequence[Any], layout: Layout) -> list[Any]:
    """Returns what `assemble` would make, as `jax.ShapeDtypeStruct`s."""
    return [jax.ShapeDtypeStruct(_global_shape(x, layout, i), x.dtype) for i, x in enumerate(values)]


def _global_shape(x: Any, layout: Layout, i: int) -> tuple[int, ...]:
    return _shape_over(layout.mesh, x.shape, layout.arrays[i].axis, layout.here.mesh)


def own_part(x: Any, axis: int | None, mesh: ReplicaMesh) -> Any:
    """Returns this process's part of a global array that is cut along `axis`; a replicated array (None) as it is."""
    if axis is None:
        return x
    own = mesh.own
    return _of_shards(x, _shape_over(own, x.shape, axis, mesh), own.along(axis))


def _shape_over(mesh: ReplicaMesh, shape: Sequence[int], axis: int | None, before: ReplicaMesh) -> tuple[int, ...]:
    """Converts an array's shape over the mesh `before` to that over `mesh`; the rows on each device stay the same."""
    return tuple(size // before.size * mesh.size if i == axis else size for i, size in enumerate(shape))


def put(x: Any, sharding: NamedSharding) -> Any:
    """Puts a value like `jax.device_put`, also over several processes; each passes the whole value, and all the same.

    JAX's own function would send the whole value between the processes to compare it. `check_replicas` sends a hash,
    once.
    """
    mesh: Any = sharding.mesh
    if is_described(mesh.devices.flat[0]):  # no value can lie on such a device, and explain needs none there
        return x
    x = own_copies(x, NamedSharding(mesh, PartitionSpec()))
    if sharding.is_fully_addressable or isinstance(x, Tracer):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding == sharding:
            return x
        return jax.jit(_identity, out_shardings=sharding)(x)
    if getattr(x, "dtype", None) is not None and is_key(x):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if sharding.is_fully_replicated:
        return _of_shards(jax.device_put(x, NamedSharding(_own_devices(mesh), PartitionSpec())), np.shape(x), sharding)
    host = np.asarray(x, jnp.result_type(x))
    found = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    return weakly_typed(found, sharding) if getattr(x, "weak_type", False) else found


def own_copies(x: Any, sharding: NamedSharding) -> Any:
    """Returns an array that is replicated over several processes as an array of this one alone; anything else as it is.

    If the devices of `sharding` are among those that hold the array, the result is on them. If they are other devices
    of the same processes, it is one copy on the first of this process's devices.
    """
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.is_fully_replicated:
        return x
    if x.is_fully_addressable:
        return x
    here, had, mesh = sharding.device_set, x.sharding.device_set, cast(Mesh, sharding.mesh)
    if sharding.is_fully_addressable and here <= had:
        return _of_shards(x, x.shape, sharding)
    if here != had and _processes(here) <= _processes(had):
        return jax.device_put(x.addressable_data(0), _own_devices(mesh).devices.flat[0])
    return x


def own_memory(x: Any, mesh: ReplicaMesh) -> Any:
    """Returns a copy of a numpy array whose memory JAX would go on using, as on CPUs; anything else as it is."""
    return x.copy() if isinstance(x, np.ndarray) and mesh.devices[0].platform == "cpu" else x


def sharing(arrays: Sequence[Any], others: Sequence[Any]) -> set[int]:
    """Returns the ids of those arrays that share memory with one of the others, or are one of them.

    `jax.device_put` returns another object for the same memory, if only the sharding is another one.
    """
    others = [x for x in others if _has_memory(x)]
    shapes = {x.shape for x in others}
    alike = [x for x in arrays if getattr(x, "shape", None) in shapes and _has_memory(x)] if shapes else []
    shapes = {x.shape for x in alike}
    taken = {part for x in others if x.shape in shapes for part in _memory(x)}
    return {id(x) for x in alike if not taken.isdisjoint(_memory(x))}


def _has_memory(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _memory(x: Any) -> list[Any]:
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in x.addressable_shards]


def _own_devices(mesh: Mesh) -> Mesh:
    """Returns a mesh, of one axis, of this process's devices among those of the mesh."""
    return Mesh(np.array([d for d in mesh.devices.flat if d.process_index == jax.process_index()]), ("own",))


def _processes(devices: set[Any]) -> set[int]:
    return {d.process_index for d in devices}


def refuse_traced(arrays: Sequence[Any], mesh: ReplicaMesh, verb: str) -> None:
    """Raises a `ValueError` if a transformation traces a process's own outputs: it would miss the others' rows."""
    if mesh.spans_processes and any(isinstance(x, Tracer) for x in arrays):
        raise ValueError(
            f"jdp.{verb}: traced (by jax.grad, jax.jit or the like), and a process's outputs are those of its own rows "
            f"alone; a gradient through them would miss the rows of the other processes. Take it with "
            f"dp.value_and_grad or dp.train_step, which see all."
        )


def _identity(x: Any) -> Any:
    return x


def _of_shards(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Returns the array of that shape and sharding whose parts on this process's devices are those of `x`."""
    if is_key(x):
        data = jax.random.key_data(x)
        trailing = data.shape[x.ndim :]
        return jax.random.wrap_key_data(_of_shards(data, (*shape, *trailing), sharding), impl=jax.random.key_impl(x))
    mesh: Any = sharding.mesh
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if x.size:
        by_device = {s.device: s.data for s in x.addressable_shards}
        shards = [by_device[d] for d in own]
    else:  # JAX does not keep the shape of an empty array's parts
        shards = [jax.device_put(np.zeros(sharding.shard_shape(shape), x.dtype), d) for d in own]
    found = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return weakly_typed(found, sharding) if getattr(x, "weak_type", False) else found


@outside_of_mesh
def weakly_typed(x: Any, sharding: Any) -> Any:
    """Returns the array as a weakly typed one, like `jnp.full(3, 0.5)`: it takes the dtype of what it is added to."""
    return jax.jit(_weakly_typed, out_shardings=sharding)(x)


def _weakly_typed(x: Any) -> Any:
    like = jnp.full(x.shape, x.dtype.type(0).item())  # weakly typed, because it is made of a Python number
    return like.at[...].set(x) if like.dtype == x.dtype else x  # no Python number makes a bfloat16, for example
