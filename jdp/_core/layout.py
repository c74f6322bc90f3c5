"""The layout of a scattered tree: which leaf is cut along which axis, and into how many rows each."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .devices import Device
from .replica_mesh import ReplicaMesh

Tree = Any
"""Any pytree of arrays."""


class Cut(NamedTuple):
    """A leaf that is cut along `axis`: replica i has `sizes[i]` rows, padded to the largest (or to `least`)."""

    axis: int
    sizes: tuple[int, ...]  # empty while scatter does not know the rows yet
    # No chunk is padded to fewer rows than this. It is 1, because the gradient of a shard_map over an operand without
    # rows does not compile, or more in the layout of one process, if a replica of another process has more rows.
    least: int = 1

    @property
    def padded(self) -> int:
        return max(self.least, *self.sizes)


class Stack(NamedTuple):
    """A leaf that is 0-d on each replica: one entry per replica."""

    axis: int = 0


class Whole(NamedTuple):
    """A replicated leaf."""

    axis: None = None


class Shard(NamedTuple):
    """A parameter that is cut along `axis` into equal parts, and gathered when it is used.

    `is_whole` says that the program has gathered it already.
    """

    axis: int
    is_whole: bool = False


@jax.tree_util.register_static
class Static:
    """A leaf that is no array (a bool, a string, a function): part of the program, not of its data."""

    __slots__ = ("value", "_key", "_hash")

    def __init__(self, value: Any):
        # 1 == 1.0 == True and 0.0 == -0.0, but a model may tell them apart.
        self.value = value
        self._key: Any = type(value), repr(value) if isinstance(value, float | complex) else value
        try:
            self._hash = hash(self._key)
        except (TypeError, ValueError):  # the second is a memoryview's
            # An unhashable object (a set) may change between calls: it equals nothing, and is traced again.
            self._key, self._hash = object(), id(self)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Static):
            return self is other
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


Leaf = Cut | Stack | Whole | Shard | Static
LEAF = jax.tree.structure(0)
"""The treedef of an array alone."""
_layouts: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()


class Layout:
    """A `Scattered` without its arrays. Equal layouts are one object, which JAX and dicts compare by identity."""

    treedef: Any
    leaves: tuple[Leaf, ...]
    sizes: tuple[int, ...]
    """The rows of each chunk; torch's rule may give fewer chunks than there are replicas."""
    mesh: ReplicaMesh
    dim: int
    per_device: int
    """The number of replicas on each device: replica i is on device i // per_device."""
    arrays: tuple[Cut | Stack | Whole | Shard, ...]
    """The leaves that are arrays."""
    shardings: tuple[NamedSharding, ...]
    """The sharding of each array."""
    operands: tuple[NamedSharding | None, ...]
    """The sharding that a program requires of each array; None if each device of a replica may have a part of it."""
    devices: tuple[Device, ...]
    """The device of each replica."""
    rows: tuple[int, ...]
    """The rows of each replica: `sizes`, then 0 for each replica without a chunk."""
    is_cut: bool
    is_even: bool
    """Whether no array holds padding."""
    holds_statics: bool
    """Whether some leaves are not arrays."""
    is_gathered: bool
    """Whether a program's arrays are the result itself: unpadded, with rows along axis 0 (`Outputs.reduce`)."""
    used: tuple[int, ...]
    """The replicas that have rows. If nothing is cut: the primary, or with several processes each one's first."""
    fill: Callable[[Sequence[Any]], Tree]
    """Returns the tree with these values in place of its arrays, in order."""

    def __new__(cls, *key: Any) -> Layout:
        """Makes or finds the layout of `(treedef, leaves, sizes, mesh, dim, per_device)`."""
        found = _layouts.get(key)
        if found is None:
            found = super().__new__(cls)
            found.treedef, found.leaves, found.sizes, found.mesh, found.dim, found.per_device = key
            found.arrays = tuple(leaf for leaf in found.leaves if not isinstance(leaf, Static))
            found.shardings = tuple(found.mesh.along(leaf.axis) for leaf in found.arrays)
            found.operands = found.shardings
            if found.mesh.inner_axes:
                found.operands = tuple(
                    None if leaf.axis is None else found.mesh.along(leaf.axis) for leaf in found.arrays
                )
            found.devices = tuple(d for d in found.mesh.devices for _ in range(found.per_device))
            n = len(found.devices)
            found.rows = (*found.sizes, *[0] * (n - len(found.sizes)))
            found.is_cut = any(isinstance(leaf, Cut | Stack) for leaf in found.arrays)
            # If nothing is cut, several processes give a size of 1 to the first replica of each that still has data.
            found.used = tuple(itertools.compress(itertools.count(), found.sizes))
            if not found.is_cut and jax.process_count() == 1:
                found.used = (0,)
            found.is_even = all(
                isinstance(leaf, Whole | Shard)
                or (isinstance(leaf, Stack) and len(found.used) == n)
                or (isinstance(leaf, Cut) and leaf.sizes == (leaf.padded,) * n)
                for leaf in found.arrays
            )
            found.is_gathered = found.is_even and not any(isinstance(leaf, Cut) and leaf.axis for leaf in found.arrays)
            # Without statics JAX makes the tree from its arrays, and no Python code runs.
            found.holds_statics = len(found.arrays) < len(found.leaves)
            found.fill = found._fill if found.holds_statics else found.treedef.unflatten
            found = _layouts.setdefault(key, found)
        return found

    def __reduce__(self) -> Any:
        return Layout, (self.treedef, self.leaves, self.sizes, self.mesh, self.dim, self.per_device)

    def __deepcopy__(self, memo: Any) -> Layout:
        return self

    def _fill(self, values: Sequence[Any]) -> Tree:
        arrays = iter(values)
        return jax.tree.unflatten(
            self.treedef, [leaf.value if isinstance(leaf, Static) else next(arrays) for leaf in self.leaves]
        )

    @functools.cached_property
    def each(self) -> tuple[Layout, ...]:
        """The layout of each array alone."""
        return tuple(self.of(LEAF, [leaf]) for leaf in self.arrays)

    @property
    def primary(self) -> tuple[int, int]:
        """The index of the device with the first replica that is used, and the replica's index on that device."""
        return divmod(self.used[0], self.per_device) if self.used else (0, 0)

    @property
    def by_device(self) -> tuple[int, ...]:
        """The rows on each device."""
        return tuple(np.reshape(self.rows, (-1, self.per_device)).sum(1).tolist())

    @property
    def own(self) -> tuple[int, ...]:
        """The replicas on this process's devices; all replicas if the devices are only described."""
        return tuple(i for i in range(len(self.devices)) if i // self.per_device in self.mesh.own_indices)

    @functools.cached_property
    def here(self) -> Layout:
        """The layout of this process's own chunks."""
        if self.mesh.exchange is None:
            return self
        mesh, own = self.mesh.own, self.own
        leaves = tuple(
            Cut(leaf.axis, tuple(leaf.sizes[i] for i in own), leaf.padded) if isinstance(leaf, Cut) else leaf
            for leaf in self.leaves
        )
        return Layout(self.treedef, leaves, tuple(self.rows[i] for i in own), mesh, self.dim, self.per_device)

    @functools.cached_property
    def children(self) -> tuple[Layout, ...]:
        """The layouts of the tree's children."""
        leaves = iter(self.leaves)
        return tuple(self.of(child, itertools.islice(leaves, child.num_leaves)) for child in self.treedef.children())

    def of(self, treedef: Any, leaves: Iterable[Leaf]) -> Layout:
        """Returns the layout of another tree that is cut into the same chunks."""
        return Layout(treedef, tuple(leaves), self.sizes, self.mesh, self.dim, self.per_device)


def as_int(x: Any) -> int | None:
    """Returns a Python, numpy or jax integer as an int; None for anything else, bools included."""
    try:
        return None if isinstance(x, bool | np.bool_) else operator.index(x)
    except TypeError:
        return None


def chunk_sizes(size: int, n: int) -> tuple[int, ...]:
    """Returns the chunk sizes of `torch.chunk(x, n)` for `size` rows: `ceil(size / n)` each, the last one smaller.

    `jdp.chunk_sizes(10, 4)` is 3, 3, 3, 1. There may be fewer than `n` chunks: 9 rows over 4 are 3, 3, 3. With
    0 rows there are `n` chunks of 0. (`jnp.array_split` has another rule: 3, 3, 2, 2.)

    Args:
        size: number of rows, 0 or more.
        n: number of replicas, 1 or more.

    Returns:
        A tuple of at most `n` ints whose sum is `size`.

    Raises:
        ValueError: `size` is negative, or `n` is not positive.
        TypeError: one of them is no int.

    Example:
        >>> import jdp
        >>> jdp.chunk_sizes(10, 4), jdp.chunk_sizes(9, 4), jdp.chunk_sizes(5, 4)
        ((3, 3, 3, 1), (3, 3, 3), (2, 2, 1))

    Source: `chunk` in aten/src/ATen/native/TensorShape.cpp; torch/nn/parallel/scatter_gather.py.
    """
    rows, count = as_int(size), as_int(n)
    if rows is None or count is None:
        raise TypeError(f"jdp.chunk_sizes: size {size!r} over n={n!r}; both are numbers of things. Pass ints.")
    size, n = rows, count
    if size < 0 or n < 1:
        raise ValueError(
            f"jdp.chunk_sizes: size {size} over n={n}; size is at least 0 and n at least 1. Pass such numbers."
        )
    if size == 0:
        return (0,) * n
    each = -(-size // n)
    return tuple(min(each, size - start) for start in range(0, size, each))


def given_sizes(sizes: Sequence[int], rows: int, n: int) -> tuple[int, ...]:
    """Returns the user's own `chunk_sizes`, checked against the rows and the devices."""
    try:
        found = tuple(map(as_int, sizes))
    except TypeError:  # nothing to iterate over
        found = (None,)
    if None in found:
        raise TypeError(
            f"jdp.scatter: chunk_sizes is {sizes!r}; it has the number of rows of each device. Pass a tuple of ints."
        )
    sizes = cast(tuple[int, ...], found)
    if len(sizes) != n:
        raise ValueError(
            f"jdp.scatter: Expected devices and chunk_sizes to be of same length, but got len(devices) = {n} and "
            f"len(chunk_sizes) = {len(sizes)}. Pass one size per device; 0 leaves a device idle."
        )
    if min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"jdp.scatter: chunk_sizes {sizes} sum to {sum(sizes)}, the inputs have {rows} rows; sizes are not "
            f"negative and sum to the rows. Pass sizes that do."
        )
    return sizes


def pad(x: Any, leaf: Cut, n: int) -> Any:
    """Returns `x` for `n` replicas, with every chunk padded to the largest."""
    pieces, start = [], 0
    for rows, blank in _padding_runs(leaf, n):
        pieces += [_row_slice(x, start, start + rows, leaf.axis), _blank(x, blank, leaf.axis)]
        start += rows
    return _concatenated(pieces, leaf.axis)


def unpad(x: Any, leaf: Cut, n: int) -> Any:
    """Returns the inverse of `pad`: the true rows of all chunks, in input order."""
    pieces, start = [], 0
    for rows, blank in _padding_runs(leaf, n):
        pieces.append(_row_slice(x, start, start + rows, leaf.axis))
        start += rows + blank
    return _concatenated(pieces, leaf.axis)


def _padding_runs(leaf: Cut, n: int) -> list[tuple[int, int]]:
    """Returns runs of (rows, rows of padding), which make the padded array; neighbours without padding are one run."""
    runs: list[tuple[int, int]] = []
    for size in (*leaf.sizes, *[0] * (n - len(leaf.sizes))):
        blank = leaf.padded - size
        if runs and (runs[-1][1] == 0 or size == 0):
            rows, padding = runs.pop()
            runs.append((rows + size, padding + blank))
        else:
            runs.append((size, blank))
    return runs


def _row_slice(x: Any, start: int, stop: int, axis: int) -> Any:
    if isinstance(x, np.ndarray):
        return x[(slice(None),) * axis + (slice(start, stop),)]
    return jax.lax.slice_in_dim(x, start, stop, axis=axis)


def _concatenated(pieces: list[Any], axis: int) -> Any:
    full = [x for x in pieces if x.shape[axis]] or pieces
    if len(full) == 1:
        return full[0]
    return (np if isinstance(full[0], np.ndarray) else jnp).concatenate(full, axis)


def _blank(x: Any, rows: int, axis: int) -> Any:
    shape = *x.shape[:axis], rows, *x.shape[axis + 1 :]
    # A weakly typed array stays so only if its padding is weakly typed, too.
    return np.zeros(shape, x.dtype) if isinstance(x, np.ndarray) else jax.lax.full_like(x, 0, shape=shape)


_KEY = jax.dtypes.prng_key


def is_key(x: Any) -> bool:
    """Returns True if `x` is a typed PRNG key, or an array of them."""
    return jnp.issubdtype(x.dtype, _KEY)
