"""The layout of a scattered tree: which leaf is cut along which axis, and into how many rows each."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from .devices import Device, cut_along, replicated
from .processes import own_mesh, own_replicas

Tree = Any
"""Any pytree of arrays."""


def outline(name: str, tree: Tree, most: int = 12) -> str:
    """The tree in a few lines, one for each leaf: its path, dtype, shape and place, and never a value."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    lines = [f"  {jax.tree_util.keystr(path) or 'leaf'}: {_leaf(x)}" for path, x in leaves[:most]]
    if len(leaves) > most:
        lines.append(f"  ... and {len(leaves) - most} more of {len(leaves)}")
    return "\n".join([f"{name}(", *lines, ")"]) if lines else f"{name}()"


def _leaf(x: Any) -> str:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        text = repr(x) if isinstance(x, bool | int | float | complex | str) else ""
        return type(x).__name__ + f" {text}" * (0 < len(text) < 40)
    return f"{x.dtype}[{', '.join(map(str, x.shape))}] {_place(x)}"


def _place(x: Any) -> str:
    """Where an array lies; of one that is freed nothing else can be asked."""
    if isinstance(x, Tracer):
        return "traced"
    if isinstance(x, jax.ShapeDtypeStruct):
        return "described"
    if not isinstance(x, jax.Array):
        return "on the host"
    if x.is_deleted():
        return "deleted"
    devices = sorted(x.sharding.device_set, key=lambda d: d.id)
    if len(devices) == 1:
        return f"on {devices[0]}"
    return f"{'whole on' if x.sharding.is_fully_replicated else 'cut over'} {len(devices)} devices"


class Cut(NamedTuple):
    """A leaf that is cut along `axis`: replica i has `sizes[i]` rows, padded to the largest (or to `least`)."""

    axis: int
    sizes: tuple[int, ...]
    # One row at least: the gradient of a shard_map over a zero-row operand does not compile. More, where these are
    # the replicas of one process and another's has more rows.
    least: int = 1

    @property
    def padded(self) -> int:
        return max(self.least, *self.sizes)


class Stack(NamedTuple):
    """A leaf that is 0-d on each replica: one entry per device."""

    kind: Literal["stack"] = "stack"  # two empty tuples would be equal


class Whole(NamedTuple):
    """A leaf that is whole on every replica."""

    kind: Literal["whole"] = "whole"


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
_LEAF = jax.tree.structure(0)
_tokens: weakref.WeakKeyDictionary[Layout, object] = weakref.WeakKeyDictionary()


class Layout:
    """All of a `Scattered` but its arrays: hashable, compared by value, the same object where it can be."""

    __slots__ = ("treedef", "leaves", "sizes", "mesh", "dim", "_hash", "token", "__dict__", "__weakref__")

    def __init__(self, treedef: Any, leaves: tuple[Leaf, ...], sizes: tuple[int, ...], mesh: Mesh, dim: int) -> None:
        self.treedef, self.leaves, self.sizes, self.mesh, self.dim = treedef, leaves, sizes, mesh, dim
        self._hash = hash((treedef, leaves, sizes, mesh, dim))
        # Of equal layouts the same: a dict finds it without a call back into Python.
        self.token: object = _tokens.setdefault(self, object())

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
    def devices(self) -> tuple[Device, ...]:
        return tuple(self.mesh.devices.flat)

    @functools.cached_property
    def is_cut(self) -> bool:
        return any(isinstance(leaf, Cut | Stack) for leaf in self.leaves)

    @functools.cached_property
    def used(self) -> tuple[int, ...]:
        """The replicas that hold rows; with nothing cut, the primary alone (of several processes, each one's first)."""
        # Of several processes each has its first there, but for those that have run out of data.
        if self.is_cut or jax.process_count() > 1:
            return tuple(i for i, size in enumerate(self.sizes) if size)
        return (0,)

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows on each device, idle ones included."""
        return (*self.sizes, *[0] * (len(self.devices) - len(self.sizes)))

    @functools.cached_property
    def fill(self) -> Callable[[Sequence[Any]], Tree]:
        """The tree with the values that it is called with for its arrays, in order."""
        # Without statics that is all, and no Python between.
        return self.treedef.unflatten if len(self.arrays) == len(self.leaves) else self._fill

    def _fill(self, values: Sequence[Any]) -> Tree:
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
    def each(self) -> tuple[Layout, ...]:
        """The layout of each array alone."""
        return tuple(Layout(_LEAF, (leaf,), self.sizes, self.mesh, self.dim) for leaf in self.arrays)

    @functools.cached_property
    def own(self) -> Layout:
        """The layout of this process's own chunks."""
        mesh, own = own_mesh(self.mesh), own_replicas(self.mesh)
        leaves = tuple(
            Cut(leaf.axis, tuple(leaf.sizes[i] for i in own), leaf.padded) if isinstance(leaf, Cut) else leaf
            for leaf in self.leaves
        )
        return Layout(self.treedef, leaves, tuple(self.rows[i] for i in own), mesh, self.dim)

    @functools.cached_property
    def parts(self) -> tuple[Layout, ...]:
        """The layouts of the tree's children."""
        found, start = [], 0
        for child in self.treedef.children():
            stop = start + child.num_leaves
            found.append(Layout(child, self.leaves[start:stop], self.sizes, self.mesh, self.dim))
            start = stop
        return tuple(found)
