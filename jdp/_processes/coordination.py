"""JAX's coordination service: the keys and values that process 0 keeps for all."""

from __future__ import annotations

from typing import Any

import jax

from .._jax.private import job


class DesyncError(RuntimeError):
    """The processes of a job do not do the same: a call, a shape, a program or a value differs, or one is absent."""

    __module__ = "jdp.distributed"


def client() -> Any:
    """The client of JAX's coordination service; None where JAX runs as one process."""
    return job().client


def own_process() -> int:
    """`jax.process_index()`, without starting JAX's backend, which would wait for that of every other process."""
    return job().process_id


def process_count() -> int:
    """`jax.process_count()`, likewise."""
    return job().num_processes


def coordinator_host() -> str:
    """Where process 0 is, as the others were told."""
    return job().coordinator_address.rsplit(":", 1)[0].strip("[]")


def get(key: str, seconds: float) -> str | None:
    """The value of a key, once it is there; None when the time is over."""
    return _value("DEADLINE_EXCEEDED", client().blocking_key_value_get, key, max(1, int(seconds * 1000)))


def now(key: str) -> str | None:
    """The value of a key, or None."""
    return _value("NOT_FOUND", client().key_value_try_get, key)


def _value(absent: str, read: Any, *args: Any) -> str | None:
    try:
        return read(*args)
    except jax.errors.JaxRuntimeError as error:
        if absent in str(error):
            return None
        raise DesyncError(
            f"jdp: process 0, through which the processes tell each other, has ended ({str(error).splitlines()[0]}). "
            f"Its own output says why."
        ) from error


def left_key(process: int) -> str:
    """What a process sets that ends its program in good order."""
    return f"jdp/left/{process}"


def has_left(process: int) -> bool:
    """Whether a process has ended its program in good order."""
    return now(left_key(process)) is not None
