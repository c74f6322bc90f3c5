"""reduce_add sums over replicas: `reduce_add(s) == s[0] + s[1] + ...`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._devices import DeviceLike, replicated, resolve_output
from ._gather_list import device_of, transpose_list
from ._scattered import Cut, Scattered, Stack, Tree, concrete, placed


def reduce_add(outputs: Scattered | Sequence[Tree], destination: DeviceLike | None = None) -> Tree:
    """Sums a tree over the replicas: `reduce_add(s) == s[0] + s[1] + ...`.

    Args:
        outputs: a `jdp.Scattered` with equal chunks, or a list with one tree of arrays per device.
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
    if isinstance(outputs, Scattered):
        return _of_scattered(outputs, target, everywhere)
    return _of_list(outputs, target, everywhere)


def _of_scattered(s: Scattered, target: Any, everywhere: bool) -> Tree:
    s = placed(s)
    layout = s._layout
    for x, leaf in zip(s._arrays, layout.arrays, strict=True):
        if isinstance(leaf, Cut):
            shapes = [[*x.shape[: leaf.axis], size, *x.shape[leaf.axis + 1 :]] for size in leaf.sizes]
            other = next((shape for shape in shapes if shape != shapes[0]), None)
            if other is not None:
                raise ValueError(_differ("size", shapes[0], other))
    if any(concrete(x) is None for x in s._arrays):
        return layout.fill(_sum(s))
    sums = _sum_everywhere(s)
    if not everywhere and sums:
        whole = layout.devices[0] if target is None else target
        sums = jax.device_put(
            [x if isinstance(x, jax.core.Tracer) else x.addressable_data(0) for x in sums], whole
        )
    return layout.fill(sums)


def _sum(s: Scattered) -> list[Any]:
    layout = s._layout
    out = []
    for x, leaf in zip(s._arrays, layout.arrays, strict=True):
        count = len(layout.used)
        if isinstance(leaf, Cut):
            x = x.reshape(*x.shape[: leaf.axis], -1, leaf.padded, *x.shape[leaf.axis + 1 :])
            x = jax.lax.slice_in_dim(x, 0, leaf.sizes[0], axis=leaf.axis + 1)
            x = jnp.moveaxis(x, leaf.axis, 0)[jnp.array(layout.used, int)]
            x = x.sum(0, dtype=x.dtype)
        elif isinstance(leaf, Stack):
            x = x[jnp.array(layout.used, int)].sum(0, dtype=x.dtype)
        else:
            x = jnp.where(count > 0, x * jnp.asarray(count, x.dtype), jnp.zeros_like(x))
        out.append(x)
    return out


@jax.jit
def _sum_everywhere(s: Scattered) -> list[Any]:
    return [jax.lax.with_sharding_constraint(x, replicated(s._layout.mesh)) for x in _sum(s)]


def _of_list(outputs: Sequence[Tree], target: Any, everywhere: bool) -> Tree:
    columns, treedef = transpose_list(outputs, "reduce_add")
    sums = []
    for column in columns:
        for x in column[1:]:
            if x.shape != column[0].shape:
                raise ValueError(_differ("size", list(column[0].shape), list(x.shape)))
            if x.dtype != column[0].dtype:
                raise ValueError(_differ("dtype", column[0].dtype, x.dtype))
        home = device_of(column[0]) if target is None else target
        moved = column if home is None else [jax.device_put(x, home) for x in column]
        total = functools.reduce(operator.add, moved)
        if everywhere:
            devices = tuple(dict.fromkeys(d for x in column if (d := device_of(x)) is not None))
            if devices:
                from ._devices import make_mesh

                total = jax.device_put(total, replicated(make_mesh(devices)))
        sums.append(total)
    return jax.tree.unflatten(treedef, sums)


def _differ(what: str, a: Any, b: Any) -> str:
    return (
        f"jdp.reduce_add: All inputs of ReduceAdd must have the same {what}, but got {a} and {b}. Reduce trees whose "
        f"shapes do not depend on the chunk (gradients, sums over rows), or use jdp.gather."
    )
