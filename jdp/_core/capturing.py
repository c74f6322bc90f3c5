"""Whether `explain` is looking for the program of a call: the call then ends where it would run it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_on: contextvars.ContextVar[bool] = contextvars.ContextVar("jdp_capturing", default=False)


def capturing() -> bool:
    return _on.get()


@contextlib.contextmanager
def on() -> Iterator[None]:
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)
