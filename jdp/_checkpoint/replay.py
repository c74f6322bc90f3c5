"""A run that is made again: it reads checkpoints up to some step, and writes none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Replay(Protocol):
    """Who makes a run again, and hears what its Checkpointers do."""

    def last(self, directory: Any) -> int | None:
        """The last step that may be restored from there; None where any may."""
        ...

    def restored(self, directory: Any, step: int) -> None:
        """This step has been restored."""
        ...

    def saved(self, directory: Any, step: int, leaves: Mapping[str, Any]) -> None:
        """This would have been saved; nothing is."""
        ...


# Not a ContextVar: a Checkpointer that the script makes in a thread must not write either.
_replays: list[Replay] = []


@contextlib.contextmanager
def replaying(replay: Replay) -> Iterator[None]:
    """Every Checkpointer that is made in here reads only, and tells `replay`."""
    _replays.append(replay)
    try:
        yield
    finally:
        _replays.remove(replay)


def current() -> Replay | None:
    """Who makes the run of this process again, if somebody does."""
    return _replays[-1] if _replays else None
