"""A process that fails writes so, and ends at once; a process that reads it ends as well."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from .._launch.protocol import FOR_ANOTHER, WAITED
from .coordination import DesyncError, FailedError, client, flush, now, own_process, process_count, say, text_of
from .watch import watch

_FAILED = "jdp/failed"
_CONNECTIONS = ("Gloo", "NCCL")  # an error with one of these names says that a connection is broken
_ending = threading.Event()  # set when this process is about to end, and has said why
_GRACE = 1.0  # seconds that a process has to fail by itself, and say more, before it ends because of another
FOR_A_SAVE = 60.0  # seconds that a process which has failed waits for what it has begun to write
AFTER_CTRL_C = 20.0  # the same after Ctrl-C: `jdp launch` kills after 30


def is_of_another(error: BaseException) -> bool:
    """Returns True if the end of another process may have caused an error."""
    return isinstance(error, DesyncError) or any(name in text_of(error) for name in _CONNECTIONS)


def show(before: Callable[..., Any], *error: Any) -> None:
    """Prints an error by the hook that was there before; by Python's own, if that hook fails."""
    try:
        before(*error)
    except Exception:
        with contextlib.suppress(Exception):
            sys.__excepthook__(*error)


_finishes = threading.Lock()  # taken by the thread that ends the process
_before_failing: list[Callable[[float], None]] = []


def before_failing(wait: Callable[[float], None]) -> None:
    """Registers `wait(seconds)`, called when this process has failed, before the others know and end as well."""
    _before_failing.append(wait)


def finish(seconds: float = 0.0) -> None:
    """Waits so many seconds for saves that are running, and says which are lost; only the first call does.

    In that time the others, which the saves need, do not take this process for late.
    """
    if not _finishes.acquire(blocking=False):
        return
    with watch.saving() if _before_failing and seconds else contextlib.nullcontext():
        for wait in _before_failing:
            with contextlib.suppress(Exception):
                wait(seconds)


def time_for_saves(error: BaseException) -> float:
    """Returns how many seconds a process which ends with this error waits for what it has begun to write."""
    return 0.0 if is_of_another(error) else AFTER_CTRL_C if isinstance(error, KeyboardInterrupt) else FOR_A_SAVE


def tell(what: str) -> None:
    """Writes a failure, unless there is one already: the first counts."""
    try:
        client().key_value_set(_FAILED, json.dumps([own_process(), what[:2000]]))
    except Exception:  # another process was first, or the coordination service is gone, which all notice
        pass


def let_the_listener_speak(error: BaseException) -> None:
    """Waits up to three seconds with an error that the failure or the end of another process may have caused.

    In that time the listener may learn which process that was. It then says so and ends this process, so that the name
    is the last line of the output.
    """
    over = time.monotonic() + 3 * _GRACE
    waits = isinstance(error, FailedError) or any(name in text_of(error) for name in _CONNECTIONS)
    while _ending.is_set() or (waits and time.monotonic() < over):
        time.sleep(_GRACE / 10)


def end(code: int) -> None:
    """Ends this process at once, because JAX would wait for the others."""
    _ending.set()
    try:
        flush()
        if own_process() == 0:  # the others read of a failure through this process, and abort if it ends first
            time.sleep(_GRACE + 2 * _pause())
        _end_daemons()
    finally:
        os._exit(code)


def _end_daemons() -> None:
    """Terminates the daemons of `multiprocessing` (workers of a loader), as Python does at its own end."""
    children: list[Any] = []
    with contextlib.suppress(Exception):
        children = sys.modules["multiprocessing"].active_children() if "multiprocessing" in sys.modules else []
    for child in children:
        with contextlib.suppress(Exception):  # one that cannot be ended does not keep the next
            if child.daemon:
                child.terminate()


def look_at_the_time(leaving: threading.Event) -> None:
    """Ends this process if it waits too long and the coordination service does not answer."""
    while not leaving.wait(0.5):
        why = None
        with contextlib.suppress(Exception):  # this thread must live as long as the program
            why = watch.is_cut_off()
        if why is not None:
            say(why)
            end(WAITED)


def _show_what_is_handled() -> None:
    """Prints the error that the main thread is about to end with, in a `finally` that takes long, say.

    An error of a connection is not the process's own: the end of another process has caused it.
    """
    error: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = error[1] if isinstance(error, tuple) else error  # Python 3.11 has what sys.exc_info has
    if isinstance(error, Exception) and not is_of_another(error):
        with contextlib.suppress(Exception):
            text = "".join(traceback.format_exception(error)).rstrip()
            say(f"jdp: process {own_process()} was at work on this error:" + "\n" + text)


def _short(what: str) -> str:
    line = what.splitlines()[0]
    return line if len(line) <= 120 else line[:117] + "..."


def _pause() -> float:
    """Returns the seconds between two looks; one process answers the looks of all."""
    return max(0.5, process_count() / 500)


def listen(leaving: threading.Event) -> None:
    """Looks for a failure of another process, and ends this one as well; also if it waits too long for the others."""
    while not leaving.wait(_pause()):
        if client() is None:
            return  # jax.distributed.shutdown, which the program has called
        try:
            word, why = now(_FAILED), watch.look()
        except Exception:  # the coordination service is gone, and JAX ends this process; or it is out of reach
            continue
        if word is not None:
            break
        if why is not None:
            _ending.set()
            _show_what_is_handled()
            finish()
            say(why)
            tell(why)
            end(WAITED)
    else:
        return
    process, what = json.loads(word)
    if process == own_process():
        return
    time.sleep(_GRACE)
    _ending.set()
    _show_what_is_handled()
    finish()
    say(f"jdp: process {process} has failed ({_short(what)}); process {own_process()} ends")
    end(FOR_ANOTHER)
