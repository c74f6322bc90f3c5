"""What a process's batch is, without its rows: to compare with the others', and to make one that has none."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from .._processes.agree import CONTAINERS, Outline
from .._processes.coordination import DesyncError
from .devices import own_replicas, processes_of
from .global_arrays import own_part
from .inputs import name_of
from .layout import Cut, Layout, Stack, Static, Tree, Whole, cut_along
from .programs import capturing


def outline_of(leaves: Sequence[Any], specs: Sequence[Any], treedef: Any, root: str | tuple[str, ...]) -> Outline:
    """The containers, and for each leaf its path, dtype and shape with `*` for its rows (of a Python value: itself)."""
    containers, paths = _containers(treedef, root)
    return (containers, *[(path, _of(x, spec)) for path, x, spec in zip(paths, leaves, specs, strict=True)])


def _of(x: Any, spec: Any) -> str:
    if isinstance(spec, Static):
        value = spec.value
        return (
            f"{type(value).__name__} {value!r}" if isinstance(value, bool | int | float | str) else type(value).__name__
        )
    rows = 0 if isinstance(spec, Stack) else spec
    shape = ["*" if axis == rows else str(size) for axis, size in enumerate(x.shape)]
    return f"{x.dtype}[{', '.join(shape)}]{' (whole)' if isinstance(spec, Whole) else ''}"


@functools.lru_cache(maxsize=64)
def _containers(treedef: Any, root: str | tuple[str, ...]) -> tuple[tuple[str, str], tuple[str, ...]]:
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths = tuple(name_of(tree, i, root) for i in range(treedef.num_leaves))
    return (CONTAINERS, json.dumps(skeleton(tree))), paths


def own_rows(
    leaves: Sequence[Any], specs: Sequence[Any], mesh: Mesh, verb: str, name: Callable[[int], str]
) -> list[Any]:
    """The leaves, with this process's own rows in place of a global array's.

    Raises:
        ValueError: a tracer; a global array that is not cut over the replicas.
    """
    found = []
    for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
        if isinstance(x, Tracer):
            if capturing():
                found.append(x)
                continue
            raise ValueError(
                f"jdp.{verb}: {name(i)} is traced (by jax.jit, jax.grad or the like), and each process passes its own "
                f"rows of it; JAX's transformations see one process's program, not the rows of the others. Call it "
                f"outside of them: dp.value_and_grad and dp.train_step give gradients over all processes."
            )
        if isinstance(spec, int) and isinstance(x, jax.Array) and not x.is_fully_addressable:
            if not x.sharding.is_equivalent_to(cut_along(mesh, spec), x.ndim):
                raise ValueError(
                    f"jdp.{verb}: {name(i)} is an array over several processes, {x.sharding}; what is not cut over the "
                    f"replicas along axis {spec} has no rows of this process's own. Pass those as a numpy array."
                )
            rows = x.shape[spec] // mesh.size
            sizes = (rows,) * mesh.size
            (x,) = own_part([x], Layout(jax.tree.structure(0), (Cut(spec, sizes),), sizes, mesh, 0))
        found.append(x)
    return found


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
    dtype, bracket, rest = what.partition("[")
    if bracket:
        shape = tuple(0 if size == "*" else int(size) for size in rest.partition("]")[0].split(", ") if size)
        if dtype.startswith("key<"):
            key = jax.random.key(0, impl=dtype[len("key<") : -1])
            return jax.random.split(key, shape) if shape else key
        return np.zeros(shape, jnp.dtype(dtype))
    kind, _, value = what.partition(" ")
    if kind not in ("bool", "int", "float", "str"):
        raise DesyncError(
            f"jdp.{verb}: process {jax.process_index()} never had a batch, and those of the others hold a {kind}; it "
            f"cannot make one. Yield one batch of no rows there."
        )
    return float(value) if kind == "float" else ast.literal_eval(value)  # literal_eval knows no nan


@functools.cache
def _replicas_of(mesh: Mesh, process: int) -> tuple[int, ...]:
    return tuple(i for i, d in enumerate(mesh.devices.flat) if d.process_index == process)


def alike(mesh: Mesh, sizes: Sequence[int]) -> tuple[int, ...]:
    """The rows of every replica if all processes have as many as this one."""
    rows = [0] * mesh.size
    for process in processes_of(mesh):
        for replica, size in zip(_replicas_of(mesh, process), sizes, strict=False):
            rows[replica] = size
    return tuple(rows)


def own_sizes(mesh: Mesh, sizes: Sequence[int]) -> tuple[int, ...]:
    """Of the rows of every replica those of this process's own."""
    return tuple(sizes[i] for i in own_replicas(mesh))


def rows_of_all(mesh: Mesh, rows: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The rows of every replica, of those that each process has told."""
    found = [0] * mesh.size
    for process, sizes in rows.items():
        for replica, size in zip(_replicas_of(mesh, process), sizes, strict=True):
            found[replica] = size
    return tuple(found)
