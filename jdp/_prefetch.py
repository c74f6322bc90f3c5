"""prefetch scatters the next batches while the current one is worked on."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from ._agree import Pending, begin, described_by_others, finish
from ._coordination import DesyncError
from ._describe import without_rows
from ._layout import Layout, Static, Tree
from ._prepare import Prepared
from ._processes import own_mesh
from ._scattered import Scattered
from ._split import filled


def prefetch(batches: Iterable[Tree], scatter: Callable[[Tree], Scattered], size: int) -> Iterator[Scattered]:
    """Yields `scatter(batch)` for each batch, in order, with `size` batches on the devices ahead."""
    # No thread: JAX's transfers are asynchronous already, so that a queue of started ones is all it
    # takes, and there is nothing to leak or to join when the consumer stops early.
    source = iter(batches)  # the caller's own, if it is an iterator: left open, to go on with
    ahead: collections.deque[Scattered] = collections.deque()
    failed: Exception | None = None
    while True:
        try:
            if failed is None:
                ahead.extend(scatter(b) for b in itertools.islice(source, size + 1 - len(ahead)))
        except Exception as error:  # it comes after the batches before it
            failed = error
        if not ahead:
            break
        yield ahead.popleft()
    if failed is not None:
        raise failed


def prefetch_together(
    batches: Iterable[Tree], prepare: Callable[[Tree], Prepared], mesh: Mesh, layouts: dict[Any, Layout], size: int
) -> Iterator[Scattered]:
    """`prefetch` over several processes: goes on until all have run out, with no rows of those that have."""
    agreed = _together(iter(batches), prepare, mesh, layouts, size > 0)
    return prefetch(agreed, lambda s: s, max(0, size - 1))


def _together(
    batches: Iterator[Tree], prepare: Callable[[Tree], Prepared], mesh: Mesh, layouts: dict[Any, Layout], early: bool
) -> Iterator[Scattered]:
    """Scatters the batches of all processes; `early`: which tell each other of one before they need the one before."""
    last: Prepared | None = None
    told: collections.deque[tuple[Prepared | None, Pending, Exception | None]] = collections.deque()
    failed: Exception | None = None
    while True:
        while len(told) <= early:  # also after a failure, for the others still do
            batch = None  # this process has run out
            try:
                batch = None if failed is not None else next(map(prepare, batches), None)
            except Exception as error:  # it comes after the batches before it, and in all processes then
                failed = error
            rows = (0,) * own_mesh(mesh).size if batch is None else batch.sizes
            pending = begin(mesh, "prefetch", rows, None if batch is None else batch.described, failed)
            told.append((batch, pending, failed))
        batch, pending, mine = told.popleft()
        try:
            agreed = finish(pending)
        except DesyncError:
            if mine is not None:
                raise mine from None
            raise
        if not agreed.digests:
            return
        if batch is None:
            batch = prepare(
                without_rows(described_by_others(mesh, agreed), "prefetch") if last is None else _no_rows(last)
            )
        last = batch
        yield filled(batch, agreed.rows, layouts, True)


def _no_rows(batch: Prepared) -> Tree:
    """The batch, without its rows."""
    leaves = [
        jax.lax.slice_in_dim(x, 0, 0, axis=spec) if isinstance(spec, int) else x
        for x, spec in zip(batch.leaves, batch.specs, strict=True)
    ]
    return jax.tree.unflatten(batch.treedef, [x.value if isinstance(x, Static) else x for x in leaves])
