"""prefetch scatters the next batches while the current one is worked on."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator

from ._layout import Tree
from ._scattered import Scattered


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
