"""reduce_add sums over replicas: `reduce_add(s) == s[0] + s[1] + ...`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .devices import DeviceLike, resolve_output
from .gather import device_of, transpose_list
from .global_arrays import refuse_traced
from .inputs import flatten_batch, paths_of
from .layout import Cut, Static, Tree, Whole, is_key
from .programs import dispatch, made_once, refuse_freed
from .replica_mesh import make_mesh, outside_of_mesh
from .scattered import Scattered, concrete, holds_scattered, map_scattered, placed, put_all


@outside_of_mesh
def reduce_add(outputs: Scattered | Tree, destination: DeviceLike | None = None) -> Tree:
    """Sums a tree over the replicas: `reduce_add(s) == s[0] + s[1] + ...`.

    Args:
        outputs: a `jdp.Scattered` with equal chunks; a tree that holds some, as `dp.prefetch` yields; or a list with
            one tree of arrays per device.
        destination: where the sum goes: a device, `"cpu"` or -1, or `"all"`: replicated over the
            devices of `outputs`. `None` is the primary device.

    Returns:
        One tree, of the shape and dtype of a single replica's.

    Raises:
        ValueError: sizes or dtypes differ over replicas, or the list is empty.
        TypeError: a leaf of a list is no array, with its path.

    Example:
        >>> import jdp, numpy as np
        >>> jdp.reduce_add([np.ones(2), np.ones(2)]).tolist()
        [2.0, 2.0]

    Source: `ReduceAdd` in torch/csrc/api/include/torch/nn/parallel/data_parallel.h; `reduce_add` in
    torch/nn/parallel/comm.py.
    """
    everywhere = isinstance(destination, str) and destination == "all"
    target = None if everywhere else resolve_output("reduce_add", destination)
    if target == "sharded":
        raise ValueError("jdp.reduce_add: destination 'sharded' has no rows to cut; pass a device, 'cpu' or 'all'.")
    flatten_batch(outputs, "reduce_add", "outputs")  # refuses what cannot be flattened
    if holds_scattered(outputs):
        return map_scattered(lambda s: _reduce_scattered(s, target, everywhere), outputs)
    return _of_list(outputs, target, everywhere)


def _reduce_scattered(s: Scattered, target: Any, everywhere: bool) -> Tree:
    s = placed(s)
    layout = s._layout
    for i, leaf in enumerate(layout.leaves):
        if isinstance(leaf, Static):
            raise TypeError(f"jdp.reduce_add: {_path_of(s, i)} is no array; only arrays are summed. Leave it out.")
    refuse_freed(s._arrays, "reduce_add", lambda i: _path_of(s, i))
    for i, (x, leaf) in enumerate(zip(s._arrays, layout.arrays, strict=True)):
        _refuse_key(x, functools.partial(_path_of, s, i))
        if isinstance(leaf, Cut):
            shapes = [[*x.shape[: leaf.axis], leaf.sizes[j], *x.shape[leaf.axis + 1 :]] for j in layout.used]
            other = next((shape for shape in shapes if shape != shapes[0]), None)
            if other is not None:
                raise ValueError(_differ(_path_of(s, i), "size", shapes[0], other))
    refuse_traced(s._arrays, layout.mesh, "reduce_add")
    if any(concrete(x) is None for x in s._arrays):
        return layout.fill(_sums_of_leaves(s))
    make = lambda _: layout.mesh.same_program(_sum_everywhere, ("outputs",))  # noqa: E731
    sums = dispatch(made_once(_sum_everywhere, layout.mesh, make), layout.mesh, s)
    if not everywhere and sums:
        home = layout.mesh.own.devices[0] if target is None else target
        sums = put_all([x if isinstance(x, Tracer) else x.addressable_data(0) for x in sums], home)
    return layout.fill(sums)


def _path_of(s: Scattered, i: int) -> str:
    return paths_of(s._layout.fill(s._arrays), "outputs")[i]


def _refuse_key(x: Any, path: Callable[[], str]) -> None:
    """Raises a `TypeError` for a PRNG key. `path` goes through the whole tree, so it is called for an error only."""
    if is_key(x):
        raise TypeError(f"jdp.reduce_add: {path()} is a PRNG key; keys have no sum. Leave it out, or use jdp.gather.")


def _sums_of_leaves(s: Scattered) -> list[Any]:
    layout = s._layout
    used = np.array(layout.used, int)
    out = []
    for x, leaf in zip(s._arrays, layout.arrays, strict=True):
        if isinstance(leaf, Cut):
            x = x.reshape(*x.shape[: leaf.axis], -1, leaf.padded, *x.shape[leaf.axis + 1 :])
            rows = leaf.sizes[used[0]] if len(used) else 0
            x = jnp.moveaxis(jax.lax.slice_in_dim(x, 0, rows, axis=leaf.axis + 1), leaf.axis, 0)
        elif isinstance(leaf, Whole):
            x = jnp.broadcast_to(x, (len(layout.devices), *x.shape))
        out.append(x[used].sum(0, dtype=x.dtype))
    return out


@jax.jit
def _sum_everywhere(s: Scattered) -> list[Any]:
    return [jax.lax.with_sharding_constraint(x, s._layout.mesh.replicated) for x in _sums_of_leaves(s)]


def _of_list(outputs: Sequence[Tree], target: Any, everywhere: bool) -> Tree:
    columns, treedef = transpose_list(outputs, "reduce_add")
    sums = []
    for k, column in enumerate(columns):
        path = lambda k=k: paths_of(outputs[0], "outputs")[k]  # noqa: E731
        _refuse_key(column[0], path)
        for x in column[1:]:
            if x.shape != column[0].shape:
                raise ValueError(_differ(path(), "size", list(column[0].shape), list(x.shape)))
            if x.dtype != column[0].dtype:
                raise ValueError(_differ(path(), "dtype", column[0].dtype, x.dtype))
        home = device_of(column) if target is None else target
        moved = column if home is None else [jax.device_put(x, home) for x in column]
        total = jnp.asarray(functools.reduce(operator.add, moved))
        if everywhere:
            devices = tuple(dict.fromkeys(d for x in column if (d := device_of([x])) is not None))
            if devices:
                total = jax.device_put(total, make_mesh(devices).replicated)
        sums.append(total)
    return jax.tree.unflatten(treedef, sums)


def _differ(path: str, what: str, a: Any, b: Any) -> str:
    return (
        f"jdp.reduce_add: {path}: All inputs of ReduceAdd must have the same {what}, but got {a} and {b}. Return the "
        f"same {what} on every replica (a gradient, a sum over rows), or use jdp.gather."
    )
