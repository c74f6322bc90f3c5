"""`Scattered`: a pytree whose arrays are cut into one chunk per replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
from jax.sharding import Mesh, NamedSharding

from ._devices import cut_along, replicated

Tree = Any
"""Any pytree of arrays."""


class Cut(NamedTuple):
    """A leaf that is cut along `axis`: replica i has `sizes[i]` rows, padded to the largest."""

    axis: int
    sizes: tuple[int, ...]

    @property
    def padded(self) -> int:
        # One row at least: the gradient of a shard_map over a zero-row operand does not compile.
        return max(1, *self.sizes)


class Stack(NamedTuple):
    """A leaf that is 0-d on each replica: one entry per device."""


class Whole(NamedTuple):
    """A leaf that is whole on every replica."""


class Static:
    """A leaf that is no array (a bool, a string, a function): part of the program, not of its data."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def _key(self) -> tuple:
        # 1 == 1.0 == True and 0.0 == -0.0, but a model may tell them apart.
        value = self.value
        return type(value), repr(value) if isinstance(value, float | complex) else value

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Static):
            return self is other
        try:
            return hash(self._key()) == hash(other._key()) and self._key() == other._key()
        except TypeError:
            # An unhashable object (a set) may change between calls: it equals nothing, and is traced anew.
            return False

    def __hash__(self) -> int:
        try:
            return hash(self._key())
        except TypeError:
            return id(self)


Leaf = Cut | Stack | Whole | Static


class Layout:
    """All of a `Scattered` but its arrays: hashable, compared by value, the same object where it can be."""

    __slots__ = ("treedef", "leaves", "sizes", "mesh", "dim", "_hash", "__dict__")

    def __init__(
        self, treedef: Any, leaves: tuple[Leaf, ...], sizes: tuple[int, ...], mesh: Mesh, dim: int
    ) -> None:
        self.treedef, self.leaves, self.sizes, self.mesh, self.dim = treedef, leaves, sizes, mesh, dim
        self._hash = hash((treedef, leaves, sizes, mesh, dim))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return (self.treedef, self.leaves, self.sizes, self.mesh, self.dim) == (
            other.treedef,
            other.leaves,
            other.sizes,
            other.mesh,
            other.dim,
        )

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.mesh.devices.flat)

    @functools.cached_property
    def is_cut(self) -> bool:
        return any(isinstance(leaf, Cut | Stack) for leaf in self.leaves)

    @functools.cached_property
    def used(self) -> tuple[int, ...]:
        """The replicas that hold rows; with nothing cut, the primary alone."""
        return tuple(i for i, size in enumerate(self.sizes) if size) if self.is_cut else (0,)

    def fill(self, values: Sequence[Any]) -> Tree:
        """The tree with `values` for its arrays, in order."""
        arrays = iter(values)
        return jax.tree.unflatten(
            self.treedef, [leaf.value if isinstance(leaf, Static) else next(arrays) for leaf in self.leaves]
        )

    @functools.cached_property
    def arrays(self) -> tuple[Cut | Stack | Whole, ...]:
        """The leaves that are arrays."""
        return tuple(leaf for leaf in self.leaves if not isinstance(leaf, Static))

    @functools.cached_property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """Where each array lies."""
        return tuple(
            cut_along(self.mesh, leaf.axis)
            if isinstance(leaf, Cut)
            else cut_along(self.mesh, 0)
            if isinstance(leaf, Stack)
            else replicated(self.mesh)
            for leaf in self.arrays
        )

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether the arrays hold no padding, so that gathering them is nothing to do."""
        n = len(self.devices)
        return all(
            isinstance(leaf, Whole)
            or (isinstance(leaf, Stack) and len(self.used) == n)
            or (isinstance(leaf, Cut) and leaf.sizes == (leaf.padded,) * n)
            for leaf in self.arrays
        )

    @functools.cached_property
    def parts(self) -> tuple[Layout, ...]:
        """The layouts of the tree's children."""
        found, start = [], 0
        for child in self.treedef.children():
            stop = start + child.num_leaves
            found.append(Layout(child, self.leaves[start:stop], self.sizes, self.mesh, self.dim))
            start = stop
        return tuple(found)


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
    def devices(self) -> tuple[jax.Device, ...]:
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
        i = range(len(self))[index]
        layout = self._layout
        return layout.fill(
            [_chunk(x, leaf, i, layout) for x, leaf in zip(placed(self)._arrays, layout.arrays, strict=True)]
        )

    def __repr__(self) -> str:
        devices = ", ".join(str(d) for d in self.devices)
        return f"Scattered(sizes={self.sizes}, devices=({devices}), tree={self._layout.fill(self._arrays)})"


def parts(s: Scattered) -> tuple[Scattered, ...]:
    """One `Scattered` for each child of the tree: `parts(scatter((a, b)))` is `scatter(a), scatter(b)`."""
    found, start = [], 0
    for layout in s._layout.parts:
        stop = start + len(layout.arrays)
        found.append(Scattered(s._arrays[start:stop], layout))
        start = stop
    return tuple(found)


def placed(s: Scattered) -> Scattered:
    """`s` with its arrays on the devices they belong to; tracers under `jit` stay as they are."""
    shardings = s._layout.shardings
    arrays, away = list(s._arrays), []
    for i, x in enumerate(arrays):
        value = concrete(x)
        if value is None or getattr(value, "sharding", None) == shardings[i]:
            continue
        if value is x:
            away.append(i)
        else:
            arrays[i] = reshard(jax.device_put(x, replicated(s._layout.mesh)), shardings[i])
    if len(away) == 1:  # a list would be one more tree for device_put to flatten
        arrays[away[0]] = jax.device_put(arrays[away[0]], shardings[away[0]])
    elif away:
        moved = jax.device_put([arrays[i] for i in away], [shardings[i] for i in away])
        for i, x in zip(away, moved, strict=True):
            arrays[i] = x
    return Scattered(arrays, s._layout)


@functools.partial(jax.jit, static_argnums=1)
def reshard(x: Any, sharding: NamedSharding) -> Any:
    """`x` on the same devices with another sharding.

    For tracers, beside a device_put whose own sharding names no axis: device_put fails where jacobians
    map it, or its transpose, over one axis more.
    """
    return jax.lax.with_sharding_constraint(x, sharding)


def is_scattered(x: Any) -> bool:
    return isinstance(x, Scattered)


def concrete(x: Any) -> Any:
    """The array that `x` is, or that a tracer of an eager transformation wraps; None under `jit` or `vmap`."""
    return x.to_concrete_value() if isinstance(x, jax.core.Tracer) else x


def _chunk(x: Any, leaf: Cut | Stack | Whole, i: int, layout: Layout) -> Any:
    """Replica i's value of one leaf."""
    if not isinstance(x, jax.core.Tracer):
        device = layout.devices[i]
        local = next((s.data for s in x.addressable_shards if s.device == device), None)
        if local is not None:
            return own(local, leaf, i)
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
