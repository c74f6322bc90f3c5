"""`Scattered`: a pytree whose arrays are cut into one chunk per replica."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from .devices import Device, are_described, own_mesh, own_replicas, replicated, spans_processes
from .layout import Cut, Layout, Leaf, Stack, Tree, Whole, is_key, outline


@jax.tree_util.register_pytree_node_class
class Scattered(Sequence[Tree]):
    """A pytree scattered over devices: `s[i]` is replica i's tree, on its device.

    An immutable sequence with one entry per chunk (`len(s)`, `s.sizes` rows, `s.devices`) and a
    registered pytree, so that it passes through `jax.jit`, `jax.grad` and `jax.tree.map`. What
    `jax.tree.map` sees are the arrays of all replicas at once, each chunk padded to the largest;
    what the padding holds is not defined. Made by `jdp.scatter` and `jdp.parallel_apply`.

    Example:
        >>> import jdp, numpy as np
        >>> s = jdp.scatter({"x": np.arange(6.0)}, devices=[0])
        >>> len(s), s.sizes, s[0]["x"].shape
        (1, (6,), (6,))
    """

    __slots__ = ("_arrays", "_layout")
    _arrays: tuple[Any, ...]
    _layout: Layout

    def __init__(self, arrays: Sequence[Any], layout: Layout) -> None:
        object.__setattr__(self, "_arrays", tuple(arrays))
        object.__setattr__(self, "_layout", layout)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"jdp.Scattered: cannot set {name!r}; it is immutable. Scatter the new tree.")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __copy__(self) -> Scattered:
        return self

    def __deepcopy__(self, memo: Any) -> Scattered:
        return self

    def tree_flatten(self) -> tuple[tuple[Any, ...], Layout]:
        return self._arrays, self._layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, arrays: Sequence[Any]) -> Scattered:
        return cls(arrays, layout)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The true number of rows of each chunk; `(1,)` where nothing is cut."""
        return self._layout.sizes

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each chunk; the first is the primary device."""
        return self._layout.devices[: len(self.sizes)]

    def __len__(self) -> int:
        return len(self._layout.sizes)

    @overload
    def __getitem__(self, index: int) -> Tree: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tree]: ...
    def __getitem__(self, index: int | slice) -> Tree:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        try:
            i = range(len(self))[index]
        except (TypeError, IndexError) as error:
            raise type(error)(
                f"jdp.Scattered: {index!r} is no index of a replica, or the index out of range; replicas are 0 to "
                f"{len(self) - 1}. Pass the replica first, then what is in its tree: s[0][{index!r}]."
            ) from None
        layout = self._layout
        return layout.fill(
            [_chunk(x, leaf, i, layout) for x, leaf in zip(placed(self)._arrays, layout.arrays, strict=True)]
        )

    def __repr__(self) -> str:
        several = len(self) > 8
        sizes = (
            f"{len(self)} chunks of {min(self.sizes)} to {max(self.sizes)} rows" if several else f"sizes={self.sizes}"
        )
        devices = f"{len(self.devices)} devices" if several else ", ".join(str(d) for d in self.devices)
        # Not the values, which hold padding.
        arrays = [outline("padded", x).split(": ", 1)[-1][:-2] for x in self._arrays[:8]]
        more = f" and {len(self._arrays) - 8} more" if len(self._arrays) > 8 else ""
        return f"Scattered({sizes}, devices=({devices}), padded arrays: {', '.join(arrays) or 'none'}{more})"


def parts(s: Scattered) -> tuple[Scattered, ...]:
    """One `Scattered` for each child of the tree: `parts(scatter((a, b)))` is `scatter(a), scatter(b)`."""
    found, start = [], 0
    for layout in s._layout.parts:
        stop = start + len(layout.arrays)
        found.append(Scattered(s._arrays[start:stop], layout))
        start = stop
    return tuple(found)


def leaf_by_leaf(s: Scattered) -> Tree:
    """The tree of `s` itself, with a `Scattered` for each of its arrays: `gather(leaf_by_leaf(s)) == gather(s)`."""
    return s._layout.fill([Scattered((x,), one) for x, one in zip(s._arrays, s._layout.each, strict=True)])


def placed(s: Scattered) -> Scattered:
    """`s` with its arrays on the devices they belong to; tracers under `jit` stay as they are."""
    shardings, mesh = s._layout.shardings, s._layout.mesh
    arrays, away = list(s._arrays), []
    for i, x in enumerate(arrays):
        value = concrete(x)
        if value is None or (found := getattr(value, "sharding", None)) == shardings[i]:
            continue
        if mesh.size == 1 and getattr(found, "mesh", None) == mesh:
            continue  # what a program gives on one device JAX calls replicated, and it is where it belongs
        if value is x and isinstance(x, jax.Array) and not x.is_fully_addressable:
            arrays[i] = reshard(x, shardings[i])
        elif value is x:
            away.append(i)
        else:
            arrays[i] = reshard(jax.device_put(x, replicated(mesh)), shardings[i])
    if all(map(operator.is_, arrays, s._arrays)) and not away:
        return s
    for i, x in zip(away, put_all([arrays[i] for i in away], [shardings[i] for i in away]), strict=True):
        arrays[i] = x
    return Scattered(arrays, s._layout)


def on_mesh(s: Scattered, mesh: Mesh) -> Scattered:
    """`s` as it is, or with the mesh's name for its axis where it was scattered over the same devices."""
    layout = s._layout
    if layout.mesh == mesh or layout.devices != tuple(mesh.devices.flat):
        return s
    return placed(Scattered(s._arrays, Layout(layout.treedef, layout.leaves, layout.sizes, mesh, layout.dim)))


def put_all(arrays: Sequence[Any], where: Sequence[Any]) -> list[Any]:
    """`device_put` of several arrays, in one call where that works."""
    # One array: a list would be one more tree to flatten. Tracers: with one device_put for all outputs, the eager
    # gradient of a model with a scan fails on a cotangent of another output's shape (jax 0.10.2; not 0.12).
    if len(arrays) < 2 or any(isinstance(x, Tracer) for x in arrays):
        return [jax.device_put(x, to) for x, to in zip(arrays, where, strict=True)]
    return jax.device_put(list(arrays), list(where))


@functools.partial(jax.jit, static_argnums=1)
def reshard(x: Any, sharding: NamedSharding) -> Any:
    """`x` on the same devices with another sharding.

    For tracers, beside a device_put whose own sharding names no axis: device_put fails where jacobians
    map it, or its transpose, over one axis more.
    """
    return jax.lax.with_sharding_constraint(x, sharding)


def is_scattered(x: Any) -> bool:
    return isinstance(x, Scattered)


def holds_scattered(tree: Tree) -> bool:
    """Whether there is a `Scattered` in the tree."""
    return any(map(is_scattered, jax.tree.leaves(tree, is_leaf=is_scattered)))


def map_scattered(fn: Callable[[Scattered], Any], tree: Tree) -> Tree:
    """The tree with `fn` of each `Scattered` in it; what holds none stays as it is, an NNX object too."""

    def stop(x: Any) -> bool:
        return is_scattered(x) or not holds_scattered(x)

    return jax.tree.map(lambda x: fn(x) if is_scattered(x) else x, tree, is_leaf=stop)


def concrete(x: Any) -> Any:
    """The array that `x` is, or that a tracer of an eager transformation wraps; None under `jit` or `vmap`."""
    return x.to_concrete_value() if isinstance(x, Tracer) else x


def _chunk(x: Any, leaf: Cut | Stack | Whole, i: int, layout: Layout) -> Any:
    """Replica i's value of one leaf."""
    if not isinstance(x, Tracer):
        device = layout.devices[i]
        local = next((s.data for s in x.addressable_shards if s.device == device), None)
        if local is not None:
            return own(local, leaf, i)
        if spans_processes(layout.mesh):
            raise ValueError(  # no IndexError, which would end an iteration in silence
                f"jdp.Scattered: replica {i} is on process {layout.devices[i].process_index}, this is process "
                f"{jax.process_index()}; each sees its own. Pass one of {list(own_replicas(layout.mesh))}."
            )
    if isinstance(leaf, Cut):
        start = i * leaf.padded
        return jax.lax.slice_in_dim(x, start, start + leaf.sizes[i], axis=leaf.axis)
    return x[i] if isinstance(leaf, Stack) else x


def own(local: Any, leaf: Leaf, i: int) -> Any:
    """A replica's value, out of what lies on its device: without the padding."""
    if isinstance(leaf, Stack):
        return local[0]
    if isinstance(leaf, Cut) and leaf.sizes[i] != leaf.padded:
        return jax.lax.slice_in_dim(local, 0, leaf.sizes[i], axis=leaf.axis)
    return local


def assemble(values: Sequence[Any], layout: Layout) -> list[Any]:
    """The layout's global arrays, out of this process's rows (padded) and its copies of what is whole."""
    own = layout.own
    # What is global already came out of an earlier scatter, or is whole on all processes.
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
    """What `assemble` would make, as `jax.ShapeDtypeStruct`s."""
    return [jax.ShapeDtypeStruct(_global_shape(x, layout, i), x.dtype) for i, x in enumerate(values)]


def _global_shape(x: Any, layout: Layout, i: int) -> tuple[int, ...]:
    leaf, shape = layout.arrays[i], list(x.shape)
    if not isinstance(leaf, Whole):
        axis = leaf.axis if isinstance(leaf, Cut) else 0
        shape[axis] = shape[axis] // layout.own.mesh.size * layout.mesh.size
    return tuple(shape)


def own_part(arrays: Sequence[Any], layout: Layout) -> list[Any]:
    """This process's part of the layout's global arrays: what is cut over its own devices, what is whole as it is."""
    n, own = layout.mesh.size, layout.own
    parts = []
    for x, leaf, sharding in zip(arrays, own.arrays, own.shardings, strict=True):
        if isinstance(leaf, Whole):
            parts.append(x)
            continue
        shape = list(x.shape)
        axis = leaf.axis if isinstance(leaf, Cut) else 0
        shape[axis] = shape[axis] // n * own.mesh.size
        parts.append(_of_shards(x, tuple(shape), sharding))
    return parts


def put(x: Any, sharding: NamedSharding) -> Any:
    """`jax.device_put`, also where the sharding spans processes; each passes the whole value then, and all the same.

    JAX's own compares the values between the processes first, and so sends them all: `check_replicas` sends a
    hash, once.
    """
    mesh: Any = sharding.mesh
    if are_described(mesh):  # nothing can be put there, and explain needs nothing there
        return x
    if not spans_processes(mesh) or isinstance(x, Tracer):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding == sharding:
            return x
        return jax.jit(_same, out_shardings=sharding)(x)
    if getattr(x, "dtype", None) is not None and is_key(x):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if sharding.is_fully_replicated:
        return _of_shards(jax.device_put(x, replicated(own_mesh(mesh))), np.shape(x), sharding)
    host = np.asarray(x, jnp.result_type(x))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def own_copies(x: Any, sharding: NamedSharding) -> Any:
    """An array that is whole on all processes, as one of these devices of this process; anything else as it is."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.is_fully_addressable or not x.is_fully_replicated:
        return x
    here = sharding.is_fully_addressable and sharding.device_set <= x.sharding.device_set
    return _of_shards(x, x.shape, sharding) if here else x


def refuse_traced(arrays: Sequence[Any], verb: str) -> None:
    """A `ValueError` for outputs of one process under a transformation, which sees no other process's."""
    if any(isinstance(x, Tracer) for x in arrays):
        raise ValueError(
            f"jdp.{verb}: traced (by jax.grad, jax.jit or the like), and a process's outputs are those of its own rows "
            f"alone; a gradient through them would miss the rows of the other processes. Take it with "
            f"dp.value_and_grad or dp.train_step, which see all."
        )


def _same(x: Any) -> Any:
    return x


def _of_shards(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """The array of that shape and sharding whose parts on this process's devices are those of `x`."""
    if is_key(x):
        data = jax.random.key_data(x)
        trailing = data.shape[x.ndim :]
        return jax.random.wrap_key_data(_of_shards(data, (*shape, *trailing), sharding), impl=jax.random.key_impl(x))
    mesh: Any = sharding.mesh
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if x.size:
        by_device = {s.device: s.data for s in x.addressable_shards}
        shards = [by_device[d] for d in own]
    else:  # of an array without elements JAX keeps no shape of the parts
        shards = [jax.device_put(np.zeros(sharding.shard_shape(shape), x.dtype), d) for d in own]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
