"""What the wrapper does around calls: prefetch scatters batches ahead, check_replicas compares what is replicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core.inputs import ARRAYS, USUAL, no_further, refuse_loader
from .._core.layout import Layout, Tree
from .._core.programs import Recent
from .._core.scatter import flat, known_by, split
from .._core.scattered import Scattered, leaf_by_leaf, placed
from .config import Config
from .nnx import is_node, put_nodes, take_nodes


class BatchAxes(NamedTuple):
    """The `in_axes` of a door of its own, and the layouts of the batches that were cut by them."""

    in_axes: Tree
    layouts: Recent[Any, Layout]


class Taken(NamedTuple):
    """A batch in which there are NNX objects: scattered with stand-ins for them, and the objects by number."""

    rows: Scattered
    nodes: dict[int, Any]


def taken(batch: Scattered | Taken) -> tuple[Scattered, list[Any]]:
    """A batch, scattered, and the NNX objects in it."""
    return (batch.rows, list(batch.nodes.values())) if isinstance(batch, Taken) else (batch, [])


def leaf_by_leaf_of(config: Config, batch: Tree, own: BatchAxes | None) -> Tree:
    """A batch, with a `Scattered` for each of its arrays; one that is a `Scattered` stays it."""
    found = scatter_batch(config, batch, "prefetch", own)
    if isinstance(found, Taken):
        return put_nodes(leaf_by_leaf(placed(found.rows)), found.nodes)
    return placed(found) if type(batch) is Scattered else leaf_by_leaf(placed(found))


def scatter_batch(config: Config, batch: Tree, verb: str, own: BatchAxes | None = None) -> Scattered | Taken:
    """One batch, scattered: by the `in_axes` of a door of its `own`, else by the wrapper's."""
    if type(batch) is Taken or type(batch) is Scattered and batch._layout.mesh == config.mesh:
        return batch
    layouts = config.batch_layouts if own is None else own.layouts
    # A batch that was seen before: a step on a small model is no longer than all that follows.
    leaves, treedef = flat(batch, verb, "batch", stop_at_objects)
    seen = layouts.used((treedef, *map(known_by, leaves)))
    if seen is not None and (arrays := _at_hand(leaves, seen)) is not None:
        return Scattered(arrays, seen)
    if len(leaves) == 1 and leaves[0] is batch and not is_node(batch):
        refuse_loader(batch, verb)
    inputs, nodes = take_objects(config, batch) if any(map(is_node, leaves)) else (batch, {})
    axes = axes_of_batch(config, batch, own)
    rows = split(inputs, config.mesh, config.dim, verb=verb, root="batch", axes=axes, layouts=layouts, place=False)
    return Taken(rows, nodes) if nodes else rows


def take_objects(config: Config, batch: Tree) -> tuple[Tree, dict[int, Any]]:
    """The batch with stand-ins for its NNX objects, and these by number: in a step an NNX model is number 0."""
    first = int(config.kind == "nnx")
    inputs, nodes = take_nodes(batch, first)
    return inputs, dict(enumerate(nodes, first))


def axes_of_batch(config: Config, batch: Tree, own: BatchAxes | None) -> Tree:
    """An axis, or None, for each part of a batch: of a list and a tuple either stands for the other."""
    axes = config.in_axes if own is None else own.in_axes
    if type(axes) not in (tuple, list):
        return axes
    fits = isinstance(batch, tuple | list) and len(batch) == len(axes)
    if own is None and not fits:
        return axes[0]
    return type(batch)(axes) if type(batch) in (tuple, list) else axes


def stop_at_objects(x: Any) -> bool:
    """Where flattening a batch stops: as anywhere else, and at NNX objects."""
    return type(x) not in USUAL and (no_further(x) or is_node(x))


def _at_hand(leaves: Sequence[Any], layout: Layout) -> list[Any] | None:
    """The arrays of a batch of that layout, if nothing is to be done to them; None if something is."""
    arrays: list[Any] = []
    for x in leaves:
        if type(x) is Scattered:
            arrays += x._arrays
        elif isinstance(x, ARRAYS):  # numpy's, for the program's call to move; of several processes no program takes it
            if type(x) is not np.ndarray or not layout.is_even or jax.process_count() > 1:
                return None
            arrays.append(x)
    return arrays
