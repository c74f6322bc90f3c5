"""`Scattered`: a pytree whose arrays are cut into one chunk per replica."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._jax.private import concrete_value
from .._page import Page, bars, in_notebook, text
from .devices import Device, names_of
from .layout import Cut, Layout, Leaf, Shard, Stack, Tree, Whole, is_key, unpad
from .replica_mesh import ReplicaMesh
from .summary import page_of, summary_of_leaf


@jax.tree_util.register_pytree_node_class
class Scattered(Sequence[Tree]):
    """A pytree scattered over devices, `s = jdp.scatter(tree)`: `s[i]` is replica i's tree, on its device.

    An immutable sequence with one entry per chunk (`len(s)`, `s.sizes` rows, `s.devices`) and a
    registered pytree, so that it passes through `jax.jit`, `jax.grad` and `jax.tree.map`.
    `jax.tree.map` sees the arrays of all replicas at once, each chunk padded to the largest; the
    values in the padding are undefined. Made by `jdp.scatter` and `jdp.parallel_apply`.

    Example:
        >>> import jdp, numpy as np
        >>> s = jdp.scatter({"x": np.arange(6.0)}, devices=[0])
        >>> len(s), s.sizes, s[0]["x"].shape
        (1, (6,), (6,))
    """

    __slots__ = ("_arrays", "_layout")
    _arrays: tuple[Any, ...]
    _layout: Layout

    def __init__(self, arrays: Iterable[Any], layout: Layout) -> None:
        object.__setattr__(self, "_arrays", tuple(arrays))
        object.__setattr__(self, "_layout", layout)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"jdp.Scattered: cannot set {name!r}; it is immutable. Scatter the new tree.")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __copy__(self) -> Scattered:
        return self

    def __deepcopy__(self, memo: Any) -> Scattered:
        return self

    if not TYPE_CHECKING:  # so that type checkers flag all of these uses

        def _used_as_array(self, *asked: Any, **_: Any) -> Any:
            error = AttributeError if asked and asked[0] is np.result_type else TypeError  # JAX hides a TypeError there
            raise error(f"jdp.Scattered: it is used as an array; {_NO_ARRAY}")

        def __eq__(self, other: object) -> bool:
            if self is not other and isinstance(other, jax.Array | np.ndarray | np.generic | int | float | Scattered):
                self._used_as_array()  # Python would say False
            return self is other or NotImplemented

        __hash__ = object.__hash__
        __array__ = __jax_array__ = __float__ = __int__ = _used_as_array
        __array_ufunc__ = None  # so that numpy's operators call the methods below
        __array_function__ = _used_as_array  # np.array_equal would swallow the error of __array__, and say False
        __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _used_as_array
        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _used_as_array
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _used_as_array
        __rmatmul__ = _used_as_array

        def __getattr__(self, name: str) -> Any:
            way = _NO_ARRAY if name in _OF_ARRAYS else "it lies on devices, and has rows, sizes and devices."
            raise AttributeError(f"jdp.Scattered: it has no attribute {name!r}; {way}", name=name, obj=self)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Layout]:
        """Returns the arrays of all replicas, and their layout; `jax.tree` calls it."""
        return self._arrays, self._layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, arrays: Sequence[Any]) -> Scattered:
        """Makes a `Scattered` of what `tree_flatten` returned."""
        return cls(arrays, layout)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The true number of rows of each chunk; `(1,)` if there is nothing to cut."""
        return self._layout.sizes

    @property
    def rows(self) -> int:
        """The number of rows of the batch, all chunks together; `len` is the number of chunks."""
        return sum(self.sizes)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each chunk, the primary device first; a device with several replicas is there several times."""
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
                f"{len(self) - 1}. Index the replica first, and then its tree: s[0][{index!r}]."
            ) from None
        layout = self._layout
        return layout.fill(
            [_chunk(x, leaf, i, layout) for x, leaf in zip(placed(self)._arrays, layout.arrays, strict=True)]
        )

    def __repr__(self) -> str:
        sizes, devices = f"sizes={self.sizes}", names_of(self.devices)
        if len(self) > 8:
            sizes = f"{len(self)} chunks of {min(self.sizes)} to {max(self.sizes)} rows"
            devices = f"{len({*self.devices})} devices"
        arrays = map(summary_of_leaf, self._arrays[:8])
        more = f" and {len(self._arrays) - 8} more" if len(self._arrays) > 8 else ""
        return f"Scattered({sizes}, devices=({devices}), padded arrays: {', '.join(arrays) or 'none'}{more})"

    @in_notebook
    def _repr_html_(self) -> Page:
        """Returns the chunks, drawn: the rows of each replica, and its device."""
        sizes, is_cut = self.sizes, self._layout.is_cut
        page = page_of(
            f"Scattered: {sum(sizes)} rows in {len(sizes)} chunks" if is_cut else "Scattered: nothing is cut",
            [],
            {"arrays of all replicas, padded": self._layout.fill(self._arrays)},
        )
        chunks = [
            (f"replica {i} on {device}", size, f"{size} row{'s' * (size != 1)}")
            for i, (size, device) in enumerate(zip(sizes[:64], self.devices, strict=False))
        ]
        more = [text(f"and {len(sizes) - 64} replicas more")] * (len(sizes) > 64)
        return page._replace(body=[*([bars(chunks), *more] if is_cut else []), *page.body])


_OF_ARRAYS = {*"shape ndim dtype size T astype reshape ravel sum mean max min argmax argmin tolist item".split()}
_NO_ARRAY = (
    "it is a sequence, with one tree for each replica. Pass it to a call of jdp as it is, compute with the rows of the "
    "batch, np.asarray(jdp.gather(x)), or ask for their number, x.rows."
)


def children(s: Scattered) -> tuple[Scattered, ...]:
    """Returns one `Scattered` for each child of the tree: `children(scatter((a, b)))` is `scatter(a), scatter(b)`."""
    arrays = iter(s._arrays)
    return tuple(Scattered(itertools.islice(arrays, len(one.arrays)), one) for one in s._layout.children)


def leaf_by_leaf(s: Scattered) -> Tree:
    """Returns the tree of `s` with a `Scattered` for each array: `gather(leaf_by_leaf(s)) == gather(s)`."""
    return s._layout.fill([Scattered((x,), one) for x, one in zip(s._arrays, s._layout.each, strict=True)])


def placed(s: Scattered) -> Scattered:
    """Puts the arrays of `s` on the devices they belong to; tracers under `jit` stay as they are."""
    mesh, arrays, away = s._layout.mesh, list(s._arrays), []
    for i, (x, to) in enumerate(zip(s._arrays, s._layout.shardings, strict=True)):
        value = concrete(x) if isinstance(x, Tracer) else x
        if value is None:
            _refuse_typed(x, mesh)
            arrays[i] = untyped(x, to) if _axes_of_type(jax.typeof(x).sharding) else x
            continue
        if (found := getattr(value, "sharding", None)) == to:
            continue
        if to.is_fully_replicated and mesh.inner_axes and mesh.holds(found):
            continue  # cut inside of each replica, as the parameters are
        if mesh.size == 1 and found is not None and _is_there(found, to) and not _axes_of_type(found):
            continue  # on the one device already; JAX has several shardings that mean this
        if value is not x and not has_values():
            continue
        if value is not x:
            arrays[i] = reshard(jax.device_put(x, mesh.replicated), to)
        elif isinstance(x, jax.Array) and not x.is_fully_addressable:
            arrays[i] = reshard(x, to)
        else:
            away.append(i)
    if away:
        moved = put_all([in_host_memory(arrays[i]) for i in away], [s._layout.shardings[i] for i in away])
        for i, x in zip(away, moved, strict=True):
            arrays[i] = x
    return s if all(map(operator.is_, arrays, s._arrays)) else Scattered(arrays, s._layout)


def _is_there(found: Any, to: NamedSharding) -> bool:
    """Returns True if two shardings of one device mean the same place: a mesh of that device, or the device itself."""
    return found.device_set == to.device_set and found.memory_kind == to.memory_kind


def _axes_of_type(found: Any) -> set[str]:
    """Returns the Explicit axes over which an array is cut; they are part of its type."""
    if not isinstance(found, NamedSharding) or not found.mesh.explicit_axes:
        return set()
    parts = [part if isinstance(part, tuple) else (part,) for part in found.spec]
    return {axis for part in parts for axis in part if axis in found.mesh.explicit_axes}


def _refuse_typed(x: Any, mesh: ReplicaMesh) -> None:
    """Raises a `ValueError` for a tracer that a program around the call has typed by axes that jdp's mesh has not."""
    axes = _axes_of_type(jax.typeof(x).sharding) - {mesh.axis_name, *mesh.inner_axes}
    if axes:
        raise ValueError(
            f"jdp.DataParallel: traced (by jax.jit or the like) with a batch over the Explicit axis {axes.pop()!r}, "
            f"{jax.typeof(x)}; values are typed by this axis, and the replicas' mesh has {mesh.axis_name!r}. Pass it "
            f"to jax.jit uncut, or cut by NamedSharding(dp.mesh, P({mesh.axis_name!r})), whose axis is Auto."
        )


def untyped(x: Any, to: NamedSharding) -> Any:
    """Returns a traced array whose type has Explicit axes as a value of jdp's mesh, whose axes are Auto.

    The gradient with respect to the array gets the Explicit axes back, because JAX compares the two types.
    """
    typed = jax.typeof(x).sharding
    local = jax.shard_map(lambda x: x, mesh=to.mesh, in_specs=to.spec, out_specs=to.spec, check_vma=False)
    back = lambda _, cotangent: jax.sharding.reshard(cotangent, typed)  # noqa: E731
    try:
        return jax.custom_derivatives.linear_call(lambda _, x: local(x), back, (), x)
    except NotImplementedError:  # `linear_call` has no rule for jax.vmap; without a gradient x may keep its type
        return x


def in_host_memory(x: Any) -> Any:
    """Returns an array of a CPU device as numpy's, in the same memory; anything else as it is.

    To cut a jax array, `device_put` compiles a program of slices for each shape, which JAX never drops.
    """
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or is_key(x) or x.weak_type:
        return x
    (device, *more) = x.sharding.device_set
    as_it_is = more or device.platform != "cpu" or x.dtype != jax.dtypes.canonicalize_dtype(x.dtype)
    return x if as_it_is else jax.device_get(x)  # jax_transfer_guard would stop np.asarray


def on_mesh(s: Scattered, mesh: ReplicaMesh) -> Scattered:
    """Returns `s` on this mesh, if it was scattered over the same devices under another name of the axis."""
    layout = s._layout
    if layout.mesh == mesh or [*layout.mesh.devices] != [*mesh.devices]:
        return s
    named = Layout(layout.treedef, layout.leaves, layout.sizes, mesh, layout.dim, layout.per_device)
    return placed(Scattered(s._arrays, named))


def put_all(arrays: Sequence[Any], where: Any) -> list[Any]:
    """Puts several arrays onto devices, in one call if that works; `where` is a place for all, or a list of places."""
    # One array: a list would be one more tree to flatten. Tracers: with one device_put for all outputs, the eager
    # gradient of a model with a scan fails on a cotangent of another output's shape (jax 0.10.2; not 0.12).
    if len(arrays) < 2 or any(isinstance(x, Tracer) for x in arrays):
        places = where if isinstance(where, list) else [where] * len(arrays)
        return [jax.device_put(x, to) for x, to in zip(arrays, places, strict=True)]
    return jax.device_put(list(arrays), where)


@functools.partial(jax.jit, static_argnums=1)
def reshard(x: Tree, sharding: Any) -> Tree:
    """Returns an array, or a tuple of them, on the same devices with another sharding (a tuple: one for each).

    A tracer is put onto the devices with a sharding that names no axis, and then resharded here. A device_put to a
    sharding that names an axis fails if a jacobian maps it, or its transpose, over one more axis.
    """
    return jax.lax.with_sharding_constraint(x, sharding)


def is_scattered(x: Any) -> bool:
    return isinstance(x, Scattered)


def holds_scattered(tree: Tree) -> bool:
    """Returns True if there is a `Scattered` in the tree."""
    return any(map(is_scattered, jax.tree.leaves(tree, is_leaf=is_scattered)))


def map_scattered(fn: Callable[[Scattered], Any], tree: Tree) -> Tree:
    """Returns the tree with `fn` applied to each `Scattered` in it; anything else stays as it is, also NNX objects."""

    def stop(x: Any) -> bool:
        return is_scattered(x) or not holds_scattered(x)

    return jax.tree.map(lambda x: fn(x) if is_scattered(x) else x, tree, is_leaf=stop)


def concrete(x: Any) -> Any:
    """Returns the array that `x` is, or that a tracer of an eager transformation wraps; None under `jit` or `vmap`."""
    return concrete_value(x) if isinstance(x, Tracer) else x


def has_values() -> bool:
    """Returns False in the body of a scan, loop or branch, even outside of `jit`: not even constants have values there.

    JAX compiles such a body as a program of its own. An array that is put onto devices there commits that program, or
    the one of its gradient, to these devices, and JAX refuses operands that lie on others.
    """
    return not isinstance(jnp.zeros(()), Tracer)


def _chunk(x: Any, leaf: Cut | Stack | Whole | Shard, i: int, layout: Layout) -> Any:
    """Returns replica i's value of one leaf."""
    if not isinstance(x, Tracer):
        device = layout.devices[i]
        local = next((s.data for s in x.addressable_shards if s.device == device), None)
        if local is not None:
            return value_of_replica(part_of_replica(local, leaf, i % layout.per_device, layout.per_device), leaf, i)
        if i not in layout.own:
            raise ValueError(  # no IndexError, which would end an iteration in silence
                f"jdp.Scattered: replica {i} is on process {layout.devices[i].process_index}, this is process "
                f"{jax.process_index()}; each sees its own. Pass one of {list(layout.own)}."
            )
    if isinstance(leaf, Cut):
        x = jax.lax.slice_in_dim(x, i * leaf.padded, (i + 1) * leaf.padded, axis=leaf.axis)
    return value_of_replica(x[i : i + 1] if isinstance(leaf, Stack) else x, leaf, i)


def value_of_replica(local: Any, leaf: Leaf, i: int) -> Any:
    """Returns a replica's value without the padding, given the array on its device."""
    if isinstance(leaf, Stack):
        return local[0]
    if isinstance(leaf, Cut) and leaf.sizes[i] != local.shape[leaf.axis]:
        return jax.lax.slice_in_dim(local, 0, leaf.sizes[i], axis=leaf.axis)
    return local


def part_of_replica(local: Any, leaf: Leaf, turn: int, count: int) -> Any:
    """Returns one replica's part, with its padding, of the array on a device that has `count` replicas."""
    if count == 1 or not isinstance(leaf, Cut | Stack):
        return local
    size = local.shape[leaf.axis] // count
    return jax.lax.slice_in_dim(local, turn * size, (turn + 1) * size, axis=leaf.axis)


class Signature(NamedTuple):
    """A call without its arrays: how `(replicas, inputs, kwargs)` is made of a flat list of operands."""

    treedef: Any
    layouts: tuple[Layout | None, ...]  # of each scattered tree; None is one replicated array
    first_input: int  # the index of the first operand that is not one of the replicas'
    layout: Layout  # the chunks, which are the same for all inputs
    leaves: tuple[Cut | Stack | Whole | Shard, ...]  # what each operand is
    axis_name: str
    verb: str  # the public function's name, in errors

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(self.layout.mesh.along(leaf.axis).spec for leaf in self.leaves)

    @property
    def holds_shards(self) -> bool:
        """Whether there are parameters that are cut, and not gathered yet."""
        return any(isinstance(leaf, Shard) and not leaf.is_whole for leaf in self.leaves)

    def values_of_replica(self, operands: Sequence[Any], replica: int) -> list[Any]:
        """Returns a replica's values without the padding, given the arrays on its device."""
        return [value_of_replica(x, leaf, replica) for x, leaf in zip(operands, self.leaves, strict=True)]

    def fill(self, values: Sequence[Any]) -> tuple[Tree, Sequence[Any], dict[str, Any]]:
        """Returns `(replicas, args, kwargs)` with these values for the operands."""
        rest = iter(values)
        values = [one.fill([next(rest) for _ in one.arrays]) if one else next(rest) for one in self.layouts]
        replicas, args, kwargs = jax.tree.unflatten(self.treedef, values)
        return replicas, args if type(args) in (tuple, list) else (args,), kwargs or {}

    def fold_keys(self, operands: Sequence[Any], index: Any) -> tuple[Any, ...]:
        """Returns the operands, with each key among the inputs made the replica's own."""
        return tuple(
            fold_key(x, index) if i >= self.first_input and isinstance(leaf, Whole) else x
            for i, (x, leaf) in enumerate(zip(operands, self.leaves, strict=True))
        )


def flatten_call(replicas: Tree, inputs: Scattered, kwargs: Scattered | None, verb: str) -> tuple[list[Any], Signature]:
    """Returns the operands of a call, and its signature."""
    nodes, treedef = jax.tree.flatten((replicas, inputs, kwargs), is_leaf=is_scattered)
    operands = [x for node in nodes for x in (node._arrays if is_scattered(node) else (node,))]
    first_input = len(operands) - sum(len(x._arrays) for x in (inputs, kwargs) if x is not None)
    layouts = tuple(node._layout if is_scattered(node) else None for node in nodes)
    leaves = tuple(leaf for node in layouts for leaf in (node.arrays if node else (Whole(),)))
    layout = _common_layout([x for x in layouts if x])
    is_cut, is_alone = any(x and x.is_cut for x in layouts), not layout.mesh.spans_processes
    if is_alone and not is_cut and len(layout.sizes) > 1:
        # The caller has passed only the replicated leaves of a batch whose other leaves are cut: the model runs once.
        layout = Layout(layout.treedef, layout.leaves, (1,), layout.mesh, layout.dim, layout.per_device)
    return operands, Signature(treedef, layouts, first_input, layout, leaves, layout.mesh.axis_name, verb)


def fold_key(x: Any, index: Any) -> Any:
    """Returns a 0-d typed PRNG key, folded with the replica's index on every replica but the primary."""
    # The same key draws the same numbers on every replica. The primary's stays, and so does that
    # of one device alone: its numbers are those of the bare model.
    if not is_key(x) or x.ndim:
        return x
    return jnp.where(index == 0, x, jax.random.fold_in(x, index))


def _common_layout(layouts: Sequence[Layout]) -> Layout:
    """Returns the layout of the chunks, which must be the same in all layouts; else raises a `ValueError`."""
    first = next((x for x in layouts if x.is_cut), layouts[-1])  # the first ones may be parameters that are cut
    for other in layouts:
        if other.mesh != first.mesh or other.is_cut and (other.sizes, other.devices) != (first.sizes, first.devices):
            raise ValueError(
                f"jdp.parallel_apply: inputs have chunks {first.sizes} on {names_of(first.devices)}, others "
                f"{other.sizes} on {names_of(other.devices)}; all are cut in the same way. Scatter them together."
            )
    return first


def unpadded(s: Scattered, gathers: bool = False) -> list[Any]:
    """Returns the arrays without padding and without entries of idle replicas; `gathers` first replicates them."""
    layout, used, n = s._layout, s._layout.used, len(s._layout.devices)
    out = []
    for x, leaf in zip(s._arrays, layout.arrays, strict=True):
        x = layout.mesh.gathered(x, leaf.axis) if gathers and isinstance(leaf, Cut | Shard | Stack) else x
        if isinstance(leaf, Cut):
            x = unpad(x, leaf, n)
        elif isinstance(leaf, Stack) and len(used) < n:
            x = x[: len(used)] if used == tuple(range(len(used))) else x[np.array(used)]
        out.append(x)
    return out


def trim(s: Scattered) -> Sequence[Any]:
    """Returns, inside a program, the arrays without padding: cut over the replicas if their rows divide.

    They are gathered before padding is cut off, because XLA partitions a scatter or a sort after a slice of cut rows
    wrongly.
    """
    mesh, found = s._layout.mesh, []
    if s._layout.is_even or mesh.size == 1:
        return s._arrays if s._layout.is_even else unpadded(s)
    for x, leaf in zip(unpadded(s, gathers=True), s._layout.arrays, strict=True):
        divides = isinstance(leaf, Cut | Shard) and x.shape[leaf.axis] % mesh.size == 0
        found.append(mesh.cut(x, leaf.axis) if divides else x)
    return found
