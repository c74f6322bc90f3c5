"""JAX's coordination service: the keys and values that process 0 keeps for all."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Any, TextIO

import jax

from .._jax.private import job


class DesyncError(RuntimeError):
    """The processes of a job do not do the same: a call, a shape, a program or a value differs, or one is absent."""

    __module__ = "jdp.distributed"


class AbsentError(DesyncError):
    """A process has waited in vain for another, and has not failed itself: to users a `DesyncError`."""

    __module__ = "jdp.distributed"


class FailedError(AbsentError):
    """Another process has an error in the place of a call, and is about to end with it: to users a `DesyncError`."""

    __module__ = "jdp.distributed"


for _kind in (AbsentError, FailedError):
    _kind.__name__ = _kind.__qualname__ = DesyncError.__name__


def text_of(error: BaseException | None) -> str:
    """Returns an error's text; none if that cannot be made."""
    try:
        return str(error)
    except Exception:  # of an error of the user's own
        return ""


def client() -> Any:
    """Returns the client of JAX's coordination service; None if JAX runs as one process."""
    return job().client


_OF_THE_PARENT: list[Any] = []


def forget_in_child() -> None:
    """Takes a child of `os.fork` out of the job, because JAX would report at its end that the parent has left."""
    state = job()
    for name in ("client", "service", "preemption_sync_manager"):
        _OF_THE_PARENT.append(getattr(state, name, None))  # kept alive: its destructor reports to the others, too
        setattr(state, name, None)
    with contextlib.suppress(ValueError):  # of a thread other than the main one
        # JAX's handler, which is not Python's, only notes a SIGTERM for the preemption service that has just gone.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def own_process() -> int:
    """Returns `jax.process_index()` without starting JAX's backend, which would wait for all other processes."""
    return job().process_id


def process_count() -> int:
    """Returns `jax.process_count()` without starting JAX's backend."""
    return job().num_processes


def coordinator() -> str:
    """Returns the `"host:port"` of the coordination service; empty if this version of JAX does not tell."""
    return job().coordinator_address or ""


def get(key: str, seconds: float) -> str | None:
    """Waits for the value of a key, and returns it; None after so many seconds."""
    return _value("DEADLINE_EXCEEDED", "blocking_key_value_get", key, max(1, int(seconds * 1000)))


def now(key: str) -> str | None:
    """Returns the value of a key now; None if there is none."""
    return _value("NOT_FOUND", "key_value_try_get", key)


def under(folder: str) -> list[tuple[str, str]]:
    """Returns the keys that begin with `folder`, and their values."""
    return _value("NOT_FOUND", "key_value_dir_get", folder) or []


def put(key: str, text: str) -> None:
    """Sets the value of a key, whether it has one or not."""
    _value(None, "key_value_set", key, text, True)


def delete(key: str) -> None:
    _value("NOT_FOUND", "key_value_delete", key)


def _value(absent: str | None, call: str, *args: Any) -> Any:
    """Returns the result of a call of the service; None if its error has `absent` in it."""
    service = client()
    if service is None:
        raise DesyncError(
            "jdp: the devices are those of several processes, and JAX's coordination service, through which the "
            "processes tell each other, does not run here: it was shut down, or never started. Call "
            "jdp.distributed.initialize() first, and jax.distributed.shutdown() last."
        )
    try:
        return getattr(service, call)(*args)
    except jax.errors.JaxRuntimeError as error:
        if absent is not None and absent in str(error):
            return None
        raise DesyncError(
            f"jdp: process 0, through which the processes tell each other, has ended, or is "
            f"out of reach ({str(error).splitlines()[0]}). Its own output says why, or look at the network."
        ) from error


_LEFT = "jdp/left/"


def left_key(process: int) -> str:
    """Returns the key that a process sets when it ends its program in good order."""
    return f"{_LEFT}{process}"


ALL_LEFT = "jdp/all left"
"""The key that process 0 sets when all have ended their programs in good order."""


def ended() -> set[int]:
    """Returns the processes that have ended their programs in good order."""
    return {int(key.removeprefix(_LEFT)) for key, _ in under(_LEFT)}


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints the text, on stderr by default, which may be closed, or on a full disk: no process must fail at that."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr if stream is None else stream, flush=True)


def flush() -> None:
    """Writes what was printed, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
