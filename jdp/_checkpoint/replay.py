"""A replay of a run: it reads checkpoints up to some step, and writes none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Replay(Protocol):
    """The code that replays a run, and is notified of what the run's Checkpointers do."""

    def last(self, directory: Any) -> int | None:
        """Returns the last step that may be restored from the directory; None if any may."""
        ...

    def restored(self, directory: Any, step: int) -> None:
        """Notes that this step has been restored."""
        ...

    def saved(self, directory: Any, step: int, leaves: Mapping[str, Any]) -> None:
        """Notes what would have been saved at this step; nothing is written."""
        ...


# Not a ContextVar: a Checkpointer that the script makes in a thread must not write either.
_replays: list[Replay] = []


@contextlib.contextmanager
def replaying(replay: Replay) -> Iterator[None]:
    """Makes every Checkpointer that is created in its block read-only; each notifies `replay`."""
    _replays.append(replay)
    try:
        yield
    finally:
        _replays.remove(replay)


def current() -> Replay | None:
    """Returns the replay that is running in this process, or None."""
    return _replays[-1] if _replays else None
