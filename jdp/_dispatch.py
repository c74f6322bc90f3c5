"""Dispatches a program, and on CPU never lets so many be in flight that they could deadlock."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from ._scattered import Scattered, concrete

T = TypeVar("T")
S = TypeVar("S")

# XLA's CPU client deadlocks (and aborts the process after a minute) once about 32 programs with
# collectives are in flight over several virtual devices; 12 keep two cores busy just as well. One
# small output of each is held until then. All wrappers share the devices, so they share the queue.
STEPS_IN_FLIGHT = 12
WAITED_FOR_AT_ONCE = 4  # what one wait costs is mostly to come to it: the code is in no cache any more
_running: collections.deque[jax.Array] = collections.deque()


def dispatch(program: Callable[..., T], mesh: Mesh, *args: Any) -> T:
    """`program(*args)`; on several CPU devices, where too many are in flight, the oldest are waited for."""
    out = program(*args)
    if may_deadlock(mesh) and (arrays := out._arrays if type(out) is Scattered else jax.tree.leaves(out)):
        _wait_for_earlier(arrays[0] if len(arrays) == 1 else min(arrays, key=_size))
    return out


def dispatch_step(program: Callable[..., tuple[S, dict[str, Any]]], mesh: Mesh, *args: Any) -> tuple[S, dict[str, Any]]:
    """`dispatch` of a training step, held by its loss: the state that it gives is donated to the next."""
    state, metrics = program(*args)
    if may_deadlock(mesh):
        _wait_for_earlier(metrics["loss"])
    return state, metrics


@functools.cache
def may_deadlock(mesh: Mesh) -> bool:
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def _wait_for_earlier(output: Any) -> None:
    """Keeps one output of a call that was just dispatched, and waits for the oldest of too many."""
    value = concrete(output)
    if value is not None:
        hold(value)


def hold(array: Any) -> None:
    """The same, of what is no tracer."""
    _running.append(array)
    if len(_running) >= STEPS_IN_FLIGHT:
        _wait(STEPS_IN_FLIGHT - WAITED_FOR_AT_ONCE)


def wait_for_all() -> None:
    """Waits until nothing that was dispatched is running any more."""
    _wait(0)


def _wait(most: int) -> None:
    """Waits for the oldest, until there are no more than that."""
    while len(_running) > most:
        try:
            oldest = _running.popleft()
        except IndexError:  # another thread has taken the last one
            return
        if not oldest.is_deleted():  # the user may have donated it
            oldest.block_until_ready()


def _size(x: Any) -> int:
    return x.size
