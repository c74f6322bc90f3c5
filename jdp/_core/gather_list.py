"""Plain lists with one tree per device, in the manner of torch: `gather_list(list(s)) == gather(s)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .devices import Device, own_mesh
from .inputs import is_array, normal_axis
from .layout import Tree
from .scattered import Scattered, concrete, put_all
from .split import split


def transpose_list(outputs: Sequence[Tree], verb: str) -> tuple[list[list[Any]], Any]:
    """One list of arrays per leaf, in device order, and the treedef that all trees share."""
    if not isinstance(outputs, list | tuple) or not outputs:
        raise ValueError(
            f"jdp.{verb}: outputs is {'empty' if isinstance(outputs, list | tuple) else type(outputs).__name__}; "
            f"Expected at least one tree to {verb}. Pass a jdp.Scattered or a list with one tree per device."
        )
    flat = [jax.tree_util.tree_flatten_with_path(tree) for tree in outputs]
    paths, treedef = [path for path, _ in flat[0][0]], flat[0][1]
    for i, (leaves, other) in enumerate(flat):
        if other != treedef:
            raise ValueError(
                f"jdp.{verb}: outputs[0] is {treedef}, outputs[{i}] is {other}; all trees must agree (torch: All dicts "
                f"must have the same number of keys). Return the same keys and lengths on every device."
            )
        for path, x in leaves:
            if not is_array(x):
                raise TypeError(
                    f"jdp.{verb}: outputs[{i}]{jax.tree_util.keystr(path)} is a {type(x).__name__}; outputs are "
                    f"arrays. Pass jnp.asarray(x)."
                )
    return [[leaves[k][1] for leaves, _ in flat] for k in range(len(paths))], treedef


def device_of(x: Any) -> Device | None:
    """The device of a concrete jax array (the first of several); None for numpy arrays and under jit."""
    value = concrete(x)
    if not isinstance(value, jax.Array):
        return None
    return min(value.sharding.device_set, key=lambda d: d.id)


def gather_list(outputs: Sequence[Tree], device: Device | str | None, dim: int) -> Tree:
    """`jdp.gather` of a list of trees."""
    columns, treedef = transpose_list(outputs, "gather")
    out = []
    for k, column in enumerate(columns):
        first = column[0]
        if first.ndim == 0 and all(x.ndim == 0 for x in column):
            column, axis = [jnp.expand_dims(x, 0) for x in column], 0
        else:
            _same_rank(column, outputs, k)
            axis = normal_axis(dim, first.ndim, "gather", lambda k=k: _name(outputs, k))
        for i, x in enumerate(column):
            off = (*x.shape[:axis], *x.shape[axis + 1 :])
            if off != (*column[0].shape[:axis], *column[0].shape[axis + 1 :]):
                raise ValueError(
                    f"jdp.gather: {_name(outputs, k)} has shape {first.shape} on device 0 and {x.shape} on device {i}; "
                    f"shapes must agree off dim {dim}. Pass another dim, or outputs that agree."
                )
            if x.dtype != first.dtype:
                raise ValueError(
                    f"jdp.gather: {_name(outputs, k)} has dtype {first.dtype} on device 0 and {x.dtype} on device {i}; "
                    f"dtypes must agree. Cast them."
                )
        home = device_of(first) if device is None or device == "sharded" else device
        if home is not None:
            column = put_all(column, [home] * len(column))
        out.append(jnp.concatenate(column, axis=axis))
    whole = jax.tree.unflatten(treedef, out)
    return _spread(outputs, whole, dim) if device == "sharded" else whole


def _same_rank(column: list[Any], outputs: Sequence[Tree], k: int) -> None:
    for i, x in enumerate(column):
        if x.ndim != column[0].ndim:
            raise ValueError(
                f"jdp.gather: {_name(outputs, k)} has shape {column[0].shape} on device 0 and {x.shape} on device {i}; "
                f"all must have the same number of dimensions. Return outputs that agree."
            )


def scatter_list(trees: Sequence[Tree], mesh: Mesh, dim: int, root: str) -> Scattered:
    """A list with one tree per device, as a `scatter` of one's own may return it in torch, as a `Scattered`."""
    n = own_mesh(mesh).size
    if not isinstance(trees, list | tuple) or not 0 < len(trees) <= n:
        raise TypeError(
            f"jdp.DataParallel: {root} came out of scatter as a {type(trees).__name__}; there are {n} devices. "
            f"Return what jdp.scatter returns, or a list with one tree for each device used."
        )
    flat = [jax.tree.flatten(tree) for tree in trees]
    if any(treedef != flat[0][1] for _, treedef in flat):
        raise ValueError(
            f"jdp.DataParallel: {root} of the devices differ in their trees; all must agree. Return equal ones."
        )
    columns = list(zip(*[leaves for leaves, _ in flat], strict=True))
    cut = [is_array(column[0]) and column[0].ndim > 0 for column in columns]
    rows = {tuple(x.shape[dim] for x in column) for column, is_cut in zip(columns, cut, strict=True) if is_cut}
    if len(rows) > 1:
        raise ValueError(
            f"jdp.DataParallel: {root} have chunks {' and '.join(map(str, sorted(rows)))}; all arrays of a device have "
            f"the same rows. Return chunks that agree."
        )
    whole = [gather_list(list(c), None, dim) if is_cut else c[0] for c, is_cut in zip(columns, cut, strict=True)]
    sizes = (*rows.pop(), *[0] * (n - len(trees))) if rows else None
    tree = jax.tree.unflatten(flat[0][1], whole)
    return split(tree, mesh, dim, verb="DataParallel", root=root, sizes=sizes)


def _spread(outputs: Sequence[Tree], whole: Tree, dim: int) -> Tree:
    """`output_device="sharded"`: over the devices that the trees came from."""
    from .devices import make_mesh
    from .gather import join

    devices = tuple(dict.fromkeys(d for x in jax.tree.leaves(list(outputs)) if (d := device_of(x)) is not None))
    if not devices:
        return whole
    return join(split(whole, make_mesh(devices), dim, verb="gather", root="outputs"), "sharded")


def _name(outputs: Sequence[Tree], k: int) -> str:
    return "outputs" + jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(outputs[0])[k][0])
