"""What a process's batch is, without its rows: to compare with the others', and to make one that has none."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._processes.agree import CONTAINERS, Outline
from .._processes.coordination import DesyncError
from .inputs import name_of
from .layout import Cut, Layout, Leaf, Static, Tree, Whole


def outline_of(leaves: Sequence[Any], specs: Sequence[Leaf], treedef: Any, root: str | tuple[str, ...]) -> Outline:
    """The containers, and for each leaf its path, dtype and shape with `*` for its rows (of a Python value: itself)."""
    containers, paths = _containers(treedef, root)
    return (containers, *[(path, _of(x, spec)) for path, x, spec in zip(paths, leaves, specs, strict=True)])


def _of(x: Any, spec: Leaf) -> str:
    if isinstance(spec, Static):
        name = type(spec.value).__name__
        return f"{name} {spec.value!r}" if isinstance(spec.value, bool | int | float | str) else name
    shape = ["*" if axis == spec.axis else str(size) for axis, size in enumerate(x.shape)]
    return f"{x.dtype}[{', '.join(shape)}]{' (whole)' if isinstance(spec, Whole) else ''}"


@functools.lru_cache(maxsize=64)
def _containers(treedef: Any, root: str | tuple[str, ...]) -> tuple[tuple[str, str], tuple[str, ...]]:
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths = tuple(name_of(tree, i, root) for i in range(treedef.num_leaves))
    return (CONTAINERS, json.dumps(skeleton(tree))), paths


def skeleton(tree: Tree) -> Any:
    """The containers of a tree, as JSON has them; the name of the type for one that it has not."""
    if tree is None:
        return None
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: skeleton(value) for key, value in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [skeleton(x) for x in tree]}
    return "leaf" if jax.tree_util.all_leaves([tree]) else type(tree).__name__


def without_rows(outline: Outline, verb: str) -> Tree:
    """A batch of no rows with this outline."""
    (_, containers), *leaves = outline
    shapes = iter(what for _, what in leaves)

    def build(part: Any) -> Tree:
        if part == "leaf":
            return _empty(next(shapes), verb)
        if part is None:
            return None
        if isinstance(part, str):
            raise DesyncError(
                f"jdp.{verb}: process {jax.process_index()} never had a batch, and those of the others are of type "
                f"{part}; it cannot make an empty one of that type. Yield one batch of no rows there, or use dicts."
            )
        ((kind, children),) = part.items()
        if kind == "dict":
            return {key: build(children[key]) for key in sorted(children)}
        return (list if kind == "list" else tuple)(map(build, children))

    return build(json.loads(containers))


def _empty(what: str, verb: str) -> Any:
    """An array of no rows (or of zeros, where it has none); or the Python value."""
    kind, _, value = what.partition(" ")
    if kind in ("bool", "int", "float", "str"):
        return float(value) if kind == "float" else ast.literal_eval(value)  # literal_eval knows no nan
    dtype, bracket, rest = what.partition("[")
    if not bracket:
        raise DesyncError(
            f"jdp.{verb}: process {jax.process_index()} never had a batch, and those of the others hold a {kind}; it "
            f"cannot make one. Yield one batch of no rows there."
        )
    shape = tuple(0 if size == "*" else int(size) for size in rest.partition("]")[0].split(", ") if size)
    if dtype.startswith("key<"):
        key = jax.random.key(0, impl=dtype[len("key<") : -1])
        return jax.random.split(key, shape) if shape else key
    return np.zeros(shape, jnp.dtype(dtype))


def layout_of_all(own: Layout, mesh: Mesh, sizes: tuple[int, ...]) -> Layout:
    """The layout over all processes, of this one's and of the rows of each replica."""
    leaves = tuple(Cut(leaf.axis, sizes) if isinstance(leaf, Cut) else leaf for leaf in own.leaves)
    return Layout(own.treedef, leaves, sizes, mesh, own.dim)
