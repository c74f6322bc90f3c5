"""JAX's coordination service: the keys and values that process 0 keeps for all."""

from __future__ import annotations

from typing import Any

import jax

from .._jax.private import job


class DesyncError(RuntimeError):
    """The processes of a job do not do the same: a call, a shape, a program or a value differs, or one is absent."""

    __module__ = "jdp.distributed"


class AbsentError(DesyncError):
    """A process has waited in vain for another, and has not failed itself: to users a `DesyncError`."""

    __module__ = "jdp.distributed"


AbsentError.__name__ = AbsentError.__qualname__ = DesyncError.__name__


def client() -> Any:
    """The client of JAX's coordination service; None where JAX runs as one process."""
    return job().client


_OF_THE_PARENT: list[Any] = []


def forget_in_child() -> None:
    """In a child by `os.fork`, which is none of the job: at its end JAX would tell all that its parent has left."""
    state = job()
    for name in ("client", "service", "preemption_sync_manager"):
        _OF_THE_PARENT.append(getattr(state, name, None))  # kept: its destructor speaks to the others, too
        setattr(state, name, None)


def own_process() -> int:
    """`jax.process_index()`, without starting JAX's backend, which would wait for that of every other process."""
    return job().process_id


def process_count() -> int:
    """`jax.process_count()`, likewise."""
    return job().num_processes


def coordinator() -> str:
    """`"host:port"` at which the processes meet; empty where this version of JAX does not say."""
    return job().coordinator_address or ""


def get(key: str, seconds: float) -> str | None:
    """The value of a key, once it is there; None when the time is over."""
    return _value("DEADLINE_EXCEEDED", client().blocking_key_value_get, key, max(1, int(seconds * 1000)))


def now(key: str) -> str | None:
    """The value of a key, or None."""
    return _value("NOT_FOUND", client().key_value_try_get, key)


def under(folder: str) -> list[tuple[str, str]]:
    """The keys that begin so, and their values."""
    return _value("NOT_FOUND", client().key_value_dir_get, folder) or []


def put(key: str, text: str) -> None:
    """Sets the value of a key, also where it has one."""
    _value(None, client().key_value_set, key, text, True)


def delete(key: str) -> None:
    _value("NOT_FOUND", client().key_value_delete, key)


def _value(absent: str | None, call: Any, *args: Any) -> Any:
    """What a call of the service gives; None where its error is that what was asked for is absent."""
    try:
        return call(*args)
    except jax.errors.JaxRuntimeError as error:
        if absent is not None and absent in str(error):
            return None
        raise DesyncError(
            f"jdp: process 0, through which the processes tell each other, has ended, or is "
            f"out of reach ({str(error).splitlines()[0]}). Its own output says why, or look at the network."
        ) from error


_LEFT = "jdp/left/"


def left_key(process: int) -> str:
    """What a process sets that ends its program in good order."""
    return f"{_LEFT}{process}"


def ended() -> set[int]:
    """The processes that have ended their programs in good order."""
    return {int(key.removeprefix(_LEFT)) for key, _ in under(_LEFT)}
