"""A run that is made again: it reads checkpoints up to some step, and writes none."""

from __future__ import annotations

import contextlib
import contextvars
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


_replay: contextvars.ContextVar[Replay | None] = contextvars.ContextVar("jdp_replay", default=None)


@contextlib.contextmanager
def replaying(replay: Replay) -> Iterator[None]:
    """Every Checkpointer that is made in here reads only, and tells `replay`."""
    token = _replay.set(replay)
    try:
        yield
    finally:
        _replay.reset(token)


def current() -> Replay | None:
    return _replay.get()
