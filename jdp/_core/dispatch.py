"""Dispatches a program, and on CPU never lets so many be in flight that they could deadlock."""

from __future__ import annotations

import collections
import functools
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # without Python wrappers, at a tenth of the price
from _signal import signal as set_handler  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from .scattered import Scattered, concrete

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


def dispatch_step(
    program: Callable[..., Any], mesh: Mesh, args: tuple[Any, ...], keep: Callable[..., tuple[S, dict[str, Any]]]
) -> tuple[S, dict[str, Any]]:
    """`dispatch` of a training step, held by its loss: the state that it gives is donated to the next."""
    found = run_and_keep(program, args, keep)
    if may_deadlock(mesh):
        _wait_for_earlier(found[1]["loss"])
    return found


def run_and_keep(program: Callable[..., Any], args: tuple[Any, ...], keep: Callable[..., T]) -> T:
    """`keep(program(*args))`; no Ctrl-C comes between what the program frees and what `keep` stores.

    Python runs the handler of a signal between any two of its instructions, those inside of JAX as well. In here the
    first SIGINT waits until the result is kept. A second one does not wait.
    """
    handler = getsignal(signal.SIGINT)
    # Only the main thread gets signals, and a handler of C's is not Python's to call.
    if threading.get_ident() != threading.main_thread().ident or not callable(handler) or handler is _hold_back:
        return keep(program(*args))
    _interrupted[:] = [handler]
    set_handler(signal.SIGINT, _hold_back)
    try:
        return keep(program(*args))
    finally:
        set_handler(signal.SIGINT, handler)
        if len(_interrupted) > 1:
            _deliver()


_interrupted: list[Any] = []
"""The handler that is put aside, and an entry for each SIGINT that waits for it."""


def _hold_back(number: int, frame: FrameType | None) -> None:
    _interrupted.append(frame)
    if len(_interrupted) > 2:
        _deliver()


def _deliver() -> None:
    while len(_interrupted) > 1:
        _interrupted[0](signal.SIGINT, _interrupted.pop())


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
