"""prefetch scatters the next batches while the current one is worked on."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ._agree import Pending, begin, described_by_others, finish
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


class _Told(NamedTuple):
    """A batch that the other processes are being told of; None when this one has run out."""

    batch: Prepared | None
    pending: Pending


def prefetch_together(
    batches: Iterable[Tree], prepare: Callable[[Tree], Prepared], mesh: Mesh, layouts: dict[Any, Layout], size: int
) -> Iterator[Scattered]:
    """`prefetch` over several processes: goes on until all have run out, with no rows of those that have.

    The processes tell each other their rows one batch ahead of where they need them.
    """
    source = iter(batches)
    told: collections.deque[_Told] = collections.deque()
    ahead: collections.deque[Scattered] = collections.deque()
    last: Prepared | None = None
    failed: Exception | None = None
    over = False
    while not over and failed is None or ahead:
        while not over and failed is None and len(told) + len(ahead) <= size:
            try:
                batch = next((prepare(b) for b in source), None)
            except Exception as error:  # it comes after the batches before it
                failed = error
                break
            last = batch or last
            rows = (0,) * own_mesh(mesh).size if batch is None else batch.sizes
            told.append(_Told(batch, begin(mesh, "prefetch", rows, None if batch is None else batch.described)))
        # All but the newest, of which the others are just hearing.
        while told and not over and (len(told) > 1 or not ahead):
            batch, pending = told.popleft()
            agreed = finish(pending)
            if not agreed.digests:
                over = True
                break
            if batch is None:
                tree = without_rows(described_by_others(mesh, agreed), "prefetch") if last is None else _no_rows(last)
                batch = last = prepare(tree)
            ahead.append(filled(batch, agreed.rows, layouts, True))
        if ahead:
            yield ahead.popleft()
    if failed is not None:
        raise failed


def _no_rows(batch: Prepared) -> Tree:
    """The batch, without its rows."""
    leaves = [
        jax.lax.slice_in_dim(x, 0, 0, axis=spec) if isinstance(spec, int) else x
        for x, spec in zip(batch.leaves, batch.specs, strict=True)
    ]
    return jax.tree.unflatten(batch.treedef, [x.value if isinstance(x, Static) else x for x in leaves])
