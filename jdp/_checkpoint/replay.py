"""A replay of a run: it reads checkpoints up to some step, and writes none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Replay(Protocol):
    """A replay of a run, which is notified by the run's Checkpointers."""

    def last(self, directory: Any) -> int | None:
        """Returns the last step that may be restored; None if any may."""
        ...

    def restored(self, directory: Any, step: int) -> None:
        """Notes that this step has been restored."""
        ...

    def saved(self, directory: Any, step: int, leaves: Mapping[str, Any]) -> None:
        """Notes that this step would have been saved."""
        ...


# Not a ContextVar: a Checkpointer that the script makes in a thread must not write either.
_replays: list[Replay] = []


@contextlib.contextmanager
def replaying(replay: Replay) -> Iterator[None]:
    """Makes Checkpointers created in its block read-only; they notify `replay`."""
    _replays.append(replay)
    try:
        yield
    finally:
        _replays.remove(replay)


def current() -> Replay | None:
    """Returns the replay that is running in this process, or None."""
    return _replays[-1] if _replays else None
