"""gather puts chunks together: `gather(scatter(x)) == x`. It also takes a list with one tree for each device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .devices import Device, DeviceLike, resolve_output
from .global_arrays import own_part, refuse_traced
from .inputs import (
    ARRAYS,
    STACKED,
    checked_dim,
    classify,
    flatten_batch,
    is_array,
    is_sparse,
    normal_axis,
    paths_of,
    refuse_wrapped,
    way_out,
)
from .layout import Cut, Layout, Leaf, Shard, Static, Tree, Whole, is_key
from .programs import dispatch, refuse_freed
from .replica_mesh import ReplicaMesh, make_mesh, outside_of_mesh
from .scatter import Cutting, jitted_for, split
from .scattered import Scattered, concrete, holds_scattered, map_scattered, placed, put_all, reshard, trim, unpadded


@outside_of_mesh
def gather(outputs: Scattered | Tree, output_device: DeviceLike | None = None, dim: int = 0) -> Tree:
    """Concatenates the chunks of all replicas along `dim`, in input order: `gather(scatter(x)) == x`.

    Padding is left out. 0-d arrays become a vector with one entry for each replica that has rows,
    without a warning (torch warns). Replicated leaves come back as they are. Under `jax.jit` the
    values are the same, and stay on the replicas. With several processes, each gets the rows of its own
    devices.

    Args:
        outputs: a `jdp.Scattered`; a tree that holds some, as `dp.prefetch` yields (what else is in it stays as it
            is); or a list with one tree of arrays per device.
        output_device: the device of the result: a device, `"cpu"` or -1 (the host's CPU), or
            `"sharded"`: one array over the replicas, sharded along `dim` where its rows divide,
            else replicated. `None` is the primary device, torch's default.
        dim: the axis to concatenate along, negative allowed.

    Returns:
        One tree, with the rows of all chunks.

    Raises:
        ValueError: an empty list, or trees that differ other than in their size along `dim` (keys, shapes, dtypes).
        TypeError: a leaf of a list that is no array, with its path.
        IndexError: `dim` is out of range.

    Example:
        >>> import jdp, numpy as np
        >>> jdp.gather([np.zeros((3, 2)), np.zeros((1, 2))]).shape
        (4, 2)

    Source: `gather` in torch/nn/parallel/scatter_gather.py.
    """
    device = resolve_output("gather", output_device)
    dim = checked_dim("gather", dim)
    flatten_batch(outputs, "gather", "outputs")  # refuses what cannot be flattened
    if holds_scattered(outputs):
        return map_scattered(lambda s: _gather_scattered(s, device, dim), outputs)
    return gather_list(outputs, device, dim)


def _gather_scattered(s: Scattered, device: Device | str | None, dim: int) -> Tree:
    """Gathers along `dim`; an array that was cut along another axis is treated as a list with one array per replica."""
    layout = s._layout
    at = [k for k, leaf in enumerate(layout.leaves) if not isinstance(leaf, Static)]  # arrays among the leaves

    def name(i: int) -> str:
        return paths_of(layout.fill(s._arrays), "outputs")[at[i]]

    refuse_freed(s._arrays, "gather", name)
    in_place = [
        not isinstance(leaf, Cut) or leaf.axis == normal_axis(dim, x.ndim, "gather", functools.partial(name, i))
        for i, (x, leaf) in enumerate(zip(s._arrays, layout.arrays, strict=True))
    ]
    if all(in_place):
        return join(s, device)
    refuse_traced(s._arrays, layout.mesh, "gather")
    own = layout.own
    used = [i for i in layout.used if i in own] or own[:1]
    home = layout.devices[own[0]] if device is None else device
    if any(concrete(x) is None for x in s._arrays):
        home = None  # under jit all stays where it is
    parts = [Scattered((x,), one) for x, one in zip(s._arrays, layout.each, strict=True)]
    found = [
        join(part, device) if is_there else gather_list([part[i] for i in used], home, dim)
        for part, is_there in zip(parts, in_place, strict=True)
    ]
    return layout.fill(found)


def join(outputs: Scattered, device: Device | str | None) -> Tree:
    """Gathers each leaf along its own axis, onto `device`: None is the primary, "sharded" all replicas' devices."""
    outputs = placed(outputs)
    layout = outputs._layout
    if layout.mesh.spans_processes:
        refuse_traced(outputs._arrays, layout.mesh, "gather")
        pairs = zip(outputs._arrays, layout.arrays, strict=True)
        parts = [x if isinstance(leaf, Shard) else own_part(x, leaf.axis, layout.mesh) for x, leaf in pairs]
        return _join_own(parts, layout.here, device)
    if device == "sharded" and layout.is_even:
        return layout.fill(outputs._arrays)
    if any(concrete(x) is None for x in outputs._arrays):
        return layout.fill(trim(outputs))
    if device == "sharded":
        return layout.fill(dispatch(jitted_for(_of_arrays, layout, trim), layout.mesh, outputs._arrays))
    target: Any = layout.devices[0] if device is None else device
    arrays: Sequence[Any] = outputs._arrays
    if {*layout.mesh.all_devices} != {target}:  # otherwise they are there already
        arrays = [_one_copy(x, leaf, layout) for x, leaf in zip(arrays, layout.arrays, strict=True)]
        bring = _through_the_host if target.platform == _HOST else _from_device_to_device
        arrays = bring(arrays, target)
    return layout.fill(arrays if layout.is_even else jitted_for(_of_arrays, layout, unpadded)(arrays))


def _join_own(arrays: list[Any], own: Layout, device: Device | str | None) -> Tree:
    """Joins the chunks of this process. A replicated array stays as it is ("sharded"), or one copy of it is taken."""
    cut = [i for i, leaf in enumerate(own.arrays) if not isinstance(leaf, Whole | Shard)]
    if cut:
        layout = own.of(jax.tree.structure([0] * len(cut)), [own.arrays[i] for i in cut])
        for i, x in zip(cut, join(Scattered([arrays[i] for i in cut], layout), device), strict=True):
            arrays[i] = x
    if device != "sharded":
        target = own.devices[0] if device is None else device
        whole = [i for i, leaf in enumerate(own.arrays) if isinstance(leaf, Whole)]
        copies = put_all([arrays[i].addressable_data(0) for i in whole], target)
        for i, x in zip(whole, copies, strict=True):
            arrays[i] = x
    return own.fill(arrays)


def _one_copy(x: Any, leaf: Leaf, layout: Layout) -> Any:
    """Returns `x` in a form that device_put can bring to one device directly."""
    if isinstance(x, Tracer):
        return x if isinstance(leaf, Whole) else reshard(x, layout.mesh.replicated)
    if isinstance(leaf, Whole) and x.is_fully_replicated:
        return x.addressable_data(0)  # device_put would read it through the host, and from other processes not at all
    return x


_HOST = "cpu"  # the platform whose devices share the host's memory


def _through_the_host(arrays: Sequence[Any], device: Device) -> list[Any]:
    """Puts the arrays on a device of the host. The caller has asked for that, so no transfer guard may stop it."""
    with jax.transfer_guard_device_to_host("allow"):
        return put_all(arrays, device)


def _from_device_to_device(arrays: Sequence[Any], device: Device) -> list[Any]:
    """Puts the arrays on a device, as `put_all` does, without the host in between.

    `device_put` reads an array that is cut over several devices through the host, and waits there for the program that
    computes it. The parts on the devices are arrays themselves, and are sent directly.
    """
    if not arrays:
        return []
    parts, axes = zip(*[_parts_of(x) for x in arrays], strict=True)
    moved = iter(put_all([part for of_one in parts for part in of_one], device))
    return _joined_parts([[next(moved) for _ in of_one] for of_one in parts], axes)


def _parts_of(x: Any) -> tuple[list[Any], int | None]:
    """Returns the parts of an array on the devices, in order, and the axis along which it is cut; None if it is not."""
    if isinstance(x, Tracer) or x.is_fully_replicated:
        return [x], None
    found = {tuple(part.start or 0 for part in shard.index): shard.data for shard in x.addressable_shards}
    parts = [data for _, data in sorted(found.items())]  # one copy of each part
    axes = [axis for axis, size in enumerate(x.shape) if parts[0].shape[axis] != size]
    return (parts, axes[0]) if len(axes) == 1 else ([x], None)  # device_put joins what is cut along several axes


@functools.partial(jax.jit, static_argnums=1)
def _joined_parts(parts: list[list[Any]], axes: tuple[int | None, ...]) -> list[Any]:
    return [x[0] if axis is None else jnp.concatenate(x, axis) for x, axis in zip(parts, axes, strict=True)]


def _of_arrays(arrays: Sequence[Any], layout: Layout, what: Callable[[Scattered], Any]) -> Any:
    return what(Scattered(arrays, layout))


def gather_list(outputs: Sequence[Tree], device: Device | str | None, dim: int) -> Tree:
    """Gathers a list of trees, as `jdp.gather` does."""
    columns, treedef = transpose_list(outputs, "gather")
    name = lambda k: paths_of(outputs[0], "outputs")[k]  # noqa: E731
    out = []
    for k, column in enumerate(columns):
        first = column[0]
        for i, x in enumerate(column):
            if x.ndim != first.ndim:
                raise ValueError(
                    f"jdp.gather: {name(k)} has shape {first.shape} on device 0 and {x.shape} on device {i}; "
                    f"all must have the same number of dimensions. Return outputs that agree."
                )
        axis = normal_axis(dim, first.ndim, "gather", functools.partial(name, k)) if first.ndim else 0
        for i, x in enumerate(column):
            if (*x.shape[:axis], *x.shape[axis + 1 :]) != (*first.shape[:axis], *first.shape[axis + 1 :]):
                raise ValueError(
                    f"jdp.gather: {name(k)} has shape {first.shape} on device 0 and {x.shape} on device {i}; "
                    f"shapes may differ along dim {dim} only. Pass another dim, or outputs that agree."
                )
            if x.dtype != first.dtype:
                raise ValueError(
                    f"jdp.gather: {name(k)} has dtype {first.dtype} on device 0 and {x.dtype} on device {i}; "
                    f"dtypes must agree. Cast them."
                )
        home = device_of(column) if device is None or device == "sharded" else device
        if home is not None:
            column = put_all(column, home)
        if not first.ndim:
            column = [jnp.expand_dims(x, 0) for x in column]
        out.append(jnp.concatenate(column, axis=axis))
    whole = jax.tree.unflatten(treedef, out)
    return _spread(outputs, whole, dim) if device == "sharded" else whole


def transpose_list(outputs: Sequence[Tree], verb: str) -> tuple[list[list[Any]], Any]:
    """Returns one list of arrays per leaf, in device order, and the treedef that all trees share."""
    if isinstance(outputs, jax.Array) and verb == "gather":
        raise ValueError(
            "jdp.gather: outputs is an array, no list; Expected at least one tree to gather. What dp(...) returns is "
            "gathered already: use it as it is; or pass a list with one array per device."
        )
    if not isinstance(outputs, list | tuple) or not outputs:
        raise ValueError(
            f"jdp.{verb}: outputs is {'empty' if isinstance(outputs, list | tuple) else type(outputs).__name__}; "
            f"Expected at least one tree to {verb}. Pass a jdp.Scattered or a list with one tree per device."
        )
    flat = [jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse) for tree in outputs]
    treedef = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != treedef:
            raise ValueError(
                f"jdp.{verb}: outputs[0] is {treedef}, outputs[{i}] is {other}; all trees must agree (torch: All dicts "
                f"must have the same number of keys). Return the same keys and lengths on every device."
            )
    rows = [
        [_checked_output(x, verb, f"outputs[{i}]{jax.tree_util.keystr(path)}") for path, x in leaves]
        for i, (leaves, _) in enumerate(flat)
    ]
    return [*map(list, zip(*rows, strict=True))], treedef


def _checked_output(x: Any, verb: str, name: str) -> Any:
    """Returns an output in a form that JAX takes; raises an error for one that is no array, or that has been freed."""
    found, converted = classify(x, verb, lambda: name) if isinstance(x, ARRAYS) else (False, x)
    if not found:
        raise TypeError(f"jdp.{verb}: {name} is a {type(x).__name__}; outputs are arrays. Pass {way_out(x)}.")
    refuse_freed([x], verb, lambda _: name)
    refuse_wrapped(converted, verb, lambda: name)
    if isinstance(converted, jax.Array):
        return converted
    return converted.astype(jax.dtypes.canonicalize_dtype(converted.dtype), copy=False)


def device_of(arrays: Sequence[Any]) -> Device | None:
    """Returns the (first) device of the first concrete jax array; None if all are numpy's, and under jit."""
    values = (concrete(x) for x in arrays)
    found = next((x.sharding.device_set for x in values if isinstance(x, jax.Array)), ())
    return min(found, key=lambda d: d.id, default=None)


def scatter_list(trees: Sequence[Tree], mesh: ReplicaMesh, dim: int, root: str, replicas: int | None) -> Scattered:
    """Returns a `Scattered` made of a list with one tree per replica, which a subclass's `scatter` returns in torch."""
    how = Cutting(mesh, dim, "DataParallel", root, replicas=replicas)
    n = mesh.own.size * how.per_device
    if not isinstance(trees, list | tuple) or not 0 < len(trees) <= n:
        raise TypeError(
            f"jdp.DataParallel: {root} came out of scatter as a {type(trees).__name__}; there are "
            f"{mesh.own.size} devices{f' with {how.per_device} replicas each' * (how.per_device > 1)}. Return "
            f"what jdp.scatter returns, or a list with one tree for each replica used."
        )
    flat = [jax.tree.flatten(tree) for tree in trees]
    if any(treedef != flat[0][1] for _, treedef in flat):
        raise ValueError(
            f"jdp.DataParallel: {root} of the devices differ in their trees; all must agree. Return equal trees."
        )
    columns = list(zip(*[leaves for leaves, _ in flat], strict=True))
    cut = [is_array(column[0]) and column[0].ndim > 0 for column in columns]
    rows = {
        tuple(x.shape[normal_axis(dim, x.ndim, "DataParallel", lambda: f"an array of {root}")] for x in column)
        for column, is_cut in zip(columns, cut, strict=True)
        if is_cut
    }
    if len(rows) > 1:
        raise ValueError(
            f"jdp.DataParallel: {root} have chunks {' and '.join(map(str, sorted(rows)))}; all arrays of a device have "
            f"the same rows. Return chunks that agree."
        )
    leaves = [
        (gather_list(list(column), None, dim), dim)
        if is_cut
        else _common_or_stacked(column, mesh.own.devices[0], n, dim, root)
        for column, is_cut in zip(columns, cut, strict=True)
    ]
    whole, axes = zip(*leaves, strict=True) if leaves else ((), ())
    sizes = None  # nothing is cut: the model runs once
    if rows or any(axis is STACKED for axis in axes):
        sizes = (*(rows.pop() if rows else [1] * len(trees)), *[0] * (n - len(trees)))
    tree = jax.tree.unflatten(flat[0][1], whole)
    return split(tree, how._replace(sizes=sizes, axes=jax.tree.unflatten(flat[0][1], axes)))


def _common_or_stacked(column: Sequence[Any], home: Device, n: int, dim: int, root: str) -> tuple[Any, Any]:
    """Returns the value (common to all, or a stack if they differ) and the axis of a leaf without rows."""
    if all(map(functools.partial(_are_equal, column[0]), column)):
        return column[0], dim
    if not all(map(is_array, column)):
        raise ValueError(
            f"jdp.DataParallel: {root} of the devices have {column[0]!r:.40} and other Python values in one place; "
            f"those are part of the one program of all replicas. Return 0-d arrays (np.float32(x)), or equal ones."
        )
    traced = any(isinstance(x, Tracer) for x in column)
    values = list(column) if traced else put_all(list(column), home)
    return jnp.stack([*values, *values[-1:] * (n - len(values))]), STACKED


def _are_equal(x: Any, y: Any) -> bool:
    """Returns True if two values are known to be equal."""
    if x is y:
        return True
    if isinstance(x, Tracer) or isinstance(y, Tracer):
        return False
    if is_array(x) and is_array(y):
        x, y = (np.asarray(jax.random.key_data(z) if is_key(z) else z) for z in (x, y))
        return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
    return type(x) is type(y) and bool(x == y)


def _spread(outputs: Sequence[Tree], whole: Tree, dim: int) -> Tree:
    """Cuts a gathered tree over the devices that the trees came from, where rows divide: `output_device="sharded"`."""
    devices = tuple(dict.fromkeys(d for x in jax.tree.leaves(list(outputs)) if (d := device_of([x])) is not None))
    if not devices:
        return whole
    mesh = make_mesh(devices)

    def spread(x: Any) -> Any:
        axis = dim % x.ndim  # 0 for a vector of 0-d outputs, whatever dim is
        to = mesh.replicated if x.shape[axis] % mesh.size else mesh.along(axis)
        if not isinstance(x, Tracer):
            return jax.device_put(x, to)
        return x if concrete(x) is None else reshard(jax.device_put(x, mesh.replicated), to)

    return jax.tree.map(spread, whole)
