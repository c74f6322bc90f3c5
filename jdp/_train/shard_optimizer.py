"""ZeRO-1: the optimizer's state cut over the replicas, one part of the update on each."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from .._core.devices import cut_along, replicated
from .._core.layout import Tree


class OptimizerBytes(NamedTuple):
    """Bytes of the optimizer's state on each device: of leaves that are cut over the devices, and of whole ones."""

    cut: int
    whole: int


def cut_axis(x: Any, n: int) -> int | None:
    """The first axis that n devices divide; None where the array stays whole."""
    if n == 1:
        return None
    return next((axis for axis, size in enumerate(x.shape) if size and size % n == 0), None)


def cut_shardings(tree: Tree, mesh: Mesh) -> Tree:
    """Where each array of a tree lies when all that can be cut is cut."""

    def where(x: Any) -> NamedSharding:
        axis = cut_axis(x, mesh.size)
        return replicated(mesh) if axis is None else cut_along(mesh, axis)

    return jax.tree.map(where, tree)


def optimizer_bytes(opt_state: Tree) -> OptimizerBytes:
    """What the state really takes, by the arrays' own shardings."""
    cut = whole = 0
    for x in jax.tree.leaves(opt_state):
        size = x.dtype.itemsize
        for rows in x.sharding.shard_shape(x.shape):
            size *= rows
        if x.sharding.is_fully_replicated:
            whole += size
        else:
            cut += size
    return OptimizerBytes(cut, whole)
