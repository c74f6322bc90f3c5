"""split is scatter with an axis for each leaf: it makes the layout, pads, and places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .._processes.agree import alike, begin, fail, finish
from .devices import spans_processes
from .layout import Cut, Layout, Static, Tree, pad
from .programs import SIZES, Recent, capturing
from .scatter import Prepared, Ready, prepare
from .scattered import Scattered, assemble, global_shapes, placed


def split(
    inputs: Tree,
    mesh: Mesh,
    dim: int,
    *,
    verb: str,
    root: str | tuple[str, ...],
    axes: Tree = None,
    sizes: Sequence[int] | None = None,
    layouts: Recent[Any, Layout] | None = None,
    place: bool = True,
    stacked: Callable[[Any], bool] | None = None,
) -> Scattered:
    """`scatter`, with one axis (or None) for each leaf in `axes`; what is `Scattered` already stays so.

    `layouts` keeps the layouts of a wrapper, whose mesh, dim and axes do not change: a batch of known
    shapes is not looked at again. Without `place`, numpy arrays stay on the host, for the program's call
    to move. `stacked` tells which arrays hold one entry for each replica.
    """
    options: Any = {"root": root, "axes": axes, "sizes": sizes, "layouts": layouts, "stacked": stacked}
    try:
        batch = prepare(inputs, mesh, dim, verb=verb, **options)
    except Exception as error:
        if spans_processes(mesh):
            fail(mesh, verb, error)
        raise
    if isinstance(batch, Prepared):
        chunks = batch.sizes
        if batch.described is not None:
            chunks = alike(mesh, chunks) if capturing() else finish(begin(mesh, verb, chunks, batch.described)).rows
        return filled(batch, chunks, layouts, place)
    leaves, layout = batch
    return _fill(leaves, layout, place)


def filled(batch: Prepared, chunks: tuple[int, ...], layouts: Recent[Any, Layout] | None, place: bool) -> Scattered:
    """The batch as a `Scattered`, with the rows of every replica."""
    specs = tuple(Cut(s, chunks) if isinstance(s, int) else s for s in batch.specs)
    layout = Layout(batch.treedef, specs, chunks, batch.mesh, batch.dim)
    if layouts is not None and batch.key is not None:
        # With several processes the rows of the others are no part of the key; one object for each all the same.
        key = batch.key if batch.described is None else (chunks, batch.key)
        layout = layouts.setdefault(key, layout)
    return _fill(batch.leaves, layout, place)


def _fill(leaves: Sequence[Any], layout: Layout, place: bool) -> Scattered:
    """The leaves, padded, as a `Scattered`; on the devices, but for numpy arrays where not `place`."""
    several = spans_processes(layout.mesh)
    own = layout.own if several else layout
    n, even = len(own.devices), own.is_even
    arrays = []
    for x, leaf in zip(leaves, own.leaves, strict=True):
        if type(x) is Ready:
            arrays.append(x.array)
        elif type(leaf) is not Static:
            arrays.append(x if even or type(leaf) is not Cut else _pad(x, leaf, n))
    if several:
        return Scattered(global_shapes(arrays, layout) if capturing() else assemble(arrays, layout), layout)
    s = Scattered(arrays, layout)
    # In a job of several processes a program takes numpy arrays for what is whole on all of them, and no others.
    return s if not place and jax.process_count() == 1 and all(type(x) is np.ndarray for x in arrays) else placed(s)


def _pad(x: Any, leaf: Cut, n: int) -> Any:
    return pad(x, leaf, n) if isinstance(x, np.ndarray) else _padding(leaf, n)(x)


@functools.lru_cache(SIZES)
def _padding(leaf: Cut, n: int) -> Any:
    return jax.jit(lambda x: pad(x, leaf, n))
