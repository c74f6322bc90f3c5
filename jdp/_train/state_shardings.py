"""Where the arrays of a training state lie: over the replicas, inside of a replica, and their bytes on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._core.layout import Tree
from .._core.outputs import path_name
from .._core.replica_mesh import ReplicaMesh
from .._core.replicate import cut_over_replicas
from .._core.shards import cut_axis_of


def gather_whole(tree: Tree, mesh: ReplicaMesh) -> Tree:
    """Gathers the tree, so that it is replicated."""

    def gather(path: Any, x: Any) -> Any:
        with jax.named_scope(f"gather.{path_name(path)}"):
            return jax.lax.with_sharding_constraint(x, mesh.replicated)

    return jax.tree_util.tree_map_with_path(gather, tree)


InnerShardings = dict[tuple[str, ...], tuple[tuple[int, ...], NamedSharding]]
"""By path, the shape and the sharding of each array, if some are cut inside of the replicas; otherwise empty."""


def inner_shardings_of(params: Tree, mesh: ReplicaMesh, root: str) -> InnerShardings:
    """Returns the shardings of parameters inside of the replicas; an empty dict if none is cut there."""
    found: InnerShardings = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if cut_axis_of(x, mesh) is not None:
            raise ValueError(cut_over_replicas("train_step", root + jax.tree_util.keystr(path), x, mesh))
        where = mesh.renamed(getattr(x, "sharding", None))
        spec = mesh.within(where.spec) if mesh.holds(where) else PartitionSpec()
        found[tuple(map(str, path))] = jnp.shape(x), NamedSharding(mesh.jax_mesh, spec)
    return found if any(any(where.spec) for _, where in found.values()) else {}


def on_other_mesh(inner: InnerShardings, mesh: ReplicaMesh) -> InnerShardings:
    """Returns the same shardings on a mesh with the same axes inside of a replica."""
    return {path: (shape, NamedSharding(mesh.jax_mesh, where.spec)) for path, (shape, where) in inner.items()}


def like_params(tree: Tree, inner: InnerShardings, mesh: ReplicaMesh) -> Tree:
    """Returns the sharding of each array of a tree: that of the parameter whose path ends the array's own.

    An optimizer keeps its moments in trees of the parameters' form. An array of another shape (a factored moment), or
    of no parameter's path, is replicated.
    """

    def where(path: Any, x: Any) -> NamedSharding:
        names = tuple(map(str, path))
        for i in range(len(names) + 1):
            shape, found = inner.get(names[i:], (None, None))
            if found is not None and shape == jnp.shape(x):
                return found
        return mesh.replicated

    return jax.tree_util.tree_map_with_path(where, tree)


class Bytes(NamedTuple):
    """Bytes on each device: of leaves that are cut over the devices, and of replicated ones."""

    cut: int
    whole: int


def axis_for_optimizer(x: Any, n: int) -> int | None:
    """Returns the axis to cut optimizer state along: the first whose size n divides; None if it stays whole."""
    if n == 1:
        return None
    return next((axis for axis, size in enumerate(x.shape) if size and size % n == 0), None)


AxisRule = Callable[[Any, int], int | None]
"""Returns the axis to cut an array along over n devices; None if it stays whole."""


def cut_shardings(tree: Tree, mesh: ReplicaMesh, axis: AxisRule) -> Tree:
    """Returns the sharding of each array of a tree, if every array that can be cut is cut."""

    def where(x: Any) -> NamedSharding:
        return mesh.along(axis(x if hasattr(x, "shape") else jax.typeof(x), mesh.size))

    return jax.tree.map(where, tree)


def bytes_of(tree: Tree, to: Tree) -> Bytes:
    """Returns the bytes that a tree takes on a device; for a leaf that is on no device yet, `to` has its sharding."""
    cut = whole = 0
    targets = jax.tree.leaves(jax.tree.map(lambda where, part: jax.tree.map(lambda _: where, part), to, tree))
    for x, target in zip(jax.tree.leaves(tree), targets, strict=True):
        is_placed = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        where, aval = x.sharding if is_placed else target, jax.typeof(x)
        size = aval.dtype.itemsize * math.prod(where.shard_shape(aval.shape))
        if where.is_fully_replicated:
            whole += size
        else:
            cut += size
    return Bytes(cut, whole)
