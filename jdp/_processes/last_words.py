"""A process that fails writes so, and ends at once; a process that reads it ends as well."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import jax

from .._launch.protocol import FOR_ANOTHER, WAITED
from .coordination import AbsentError, DesyncError, client, forget_in_child, left_key, now, own_process, process_count
from .exchange import Exchange
from .watch import watch

_FAILED = "jdp/failed"
_CONNECTIONS = ("Gloo", "NCCL")  # an error with one of these names says that a connection is broken
_ending = threading.Event()  # set when this process is about to end, and has said why
_GRACE = 1.0  # seconds that a process has to fail by itself, and say more, before it ends because of another


@functools.cache  # once
def install() -> None:
    """Hooks into the end of this process, of whatever kind."""
    before, own = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != own:  # a child of os.fork, whose end does not concern the job
            before(kind, error, trace)
            _Exit.code, _Exit.process = 130 if issubclass(kind, KeyboardInterrupt) else 1, os.getpid()
            return
        _let_the_listener_speak(str(error))
        # JAX waits for the others at exit, and they may be waiting for this process.
        interrupted = issubclass(kind, KeyboardInterrupt)
        if interrupted:
            say("\n".join([f"jdp: process {own_process()} was interrupted", *getattr(error, "__notes__", ())]))
        else:
            before(kind, error, trace)
        _tell(f"{kind.__name__}: {error}" if str(error) else kind.__name__)
        _end(130 if interrupted else WAITED if issubclass(kind, AbsentError) else 1)

    sys.excepthook = hook
    _note_exits()
    if threading.current_thread() is not threading.main_thread():
        _end_with(threading.current_thread(), hook)
    leaving = threading.Event()
    listener = threading.Thread(target=_listen, args=(leaving,), name="jdp-listens", daemon=True)
    listener.start()
    threading.Thread(target=_time, args=(leaving,), name="jdp-watches", daemon=True).start()
    jax.monitoring.register_event_duration_secs_listener(watch.compile_event)
    os.register_at_fork(after_in_child=forget_in_child)
    atexit.register(_leave, own, leaving, listener)


def _end_with(loop: threading.Thread, hook: Callable[..., None]) -> None:
    """Makes the process end when this thread fails. Python alone would go on, and end with code 0.

    Other threads fail as they do without jdp. An engine that catches what its thread raises (Ray) reports it itself.
    """
    before, own = threading.excepthook, os.getpid()

    def in_thread(failed: threading.ExceptHookArgs) -> None:
        error = failed.exc_value
        if failed.thread is not loop or error is None or os.getpid() != own:
            before(failed)
        elif not isinstance(error, SystemExit):
            hook(failed.exc_type, error, failed.exc_traceback)
        elif error.code:
            if not isinstance(error.code, int):
                say(str(error.code))
            code = error.code if isinstance(error.code, int) else 1
            _tell(f"SystemExit: {code}")
            _end(code)

    threading.excepthook = in_thread


_before_leaving: list[Callable[[], None]] = []


def before_leaving(wait: Callable[[], None]) -> None:
    """Registers `wait`, called at the end of the program before this process writes that it has left."""
    _before_leaving.append(wait)


class _Exit:
    """The last call of `sys.exit`: its code, the number of calls over the processes before it, and its process."""

    code, calls, process = 0, -1, 0


def _note_exits() -> None:
    """Notes the code of `sys.exit`: Python shows it neither to an excepthook nor at exit, and JAX would wait there.

    The code of `exit` and `quit`, which `site` adds, is noted as well. `raise SystemExit(3)` calls no function that
    could note it.
    """

    def noted(exit_: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(exit_)
        def call(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                _Exit.code = status if isinstance(status, int) else int(status is not None)
                _Exit.calls, _Exit.process = Exchange.calls, os.getpid()
            exit_(status)

        return call

    for where, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(where, name):
            setattr(where, name, noted(getattr(where, name)))


def _tell(what: str) -> None:
    """Writes a failure, unless there is one already: the first counts."""
    try:
        client().key_value_set(_FAILED, json.dumps([own_process(), what[:2000]]))
    except Exception:  # another process was first, or the coordination service is gone, which all notice
        pass


def _let_the_listener_speak(error: str) -> None:
    """Waits up to three seconds with an error that the end of another process may have caused.

    In that time the listener may learn which process that was. It then says so and ends this process, so that the name
    is the last line of the output.
    """
    over = time.monotonic() + 3 * _GRACE
    while _ending.is_set() or (time.monotonic() < over and any(name in error for name in _CONNECTIONS)):
        time.sleep(_GRACE / 10)


def say(text: str) -> None:
    """Prints the text on stderr, which may be closed, or on a full disk: a process that ends must not fail at that."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)


def flush() -> None:
    """Writes what was printed, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end(code: int) -> None:
    _ending.set()
    try:
        flush()
        if own_process() == 0:  # the others read of a failure through this process, and abort if it ends first
            time.sleep(_GRACE + 2 * _pause())
    finally:
        os._exit(code)


def _leave(own: int, leaving: threading.Event, listener: threading.Thread) -> None:
    """Ends the program in good order: a process that waits for this one in a later call can stop waiting."""
    if os.getpid() != own:
        if _Exit.process == os.getpid():
            flush()
            os._exit(_Exit.code)  # JAX needs its threads to end, and a child of os.fork has none of them
        return
    if _Exit.code and _Exit.calls == Exchange.calls:  # otherwise it was caught, and the program went on
        _tell(f"SystemExit: {_Exit.code}")
        _end(_Exit.code)
    try:
        for wait in _before_leaving:
            wait()
    finally:  # a program that has failed on a device raises here; Python prints the error, and the others go on
        leaving.set()
        listener.join()  # a thread inside of JAX's client would abort the interpreter at its end
        with contextlib.suppress(Exception):
            watch.end()
        with contextlib.suppress(Exception):
            client().key_value_set(left_key(own_process()), "")


def _time(leaving: threading.Event) -> None:
    """Ends this process if it waits too long and the coordination service does not answer."""
    while not leaving.wait(0.5):
        why = watch.is_cut_off()
        if why is not None:
            say(why)
            _end(WAITED)


def _short(what: str) -> str:
    line = what.splitlines()[0]
    return line if len(line) <= 120 else line[:117] + "..."


def _pause() -> float:
    """Returns the seconds between two looks; one process answers the looks of all."""
    return max(0.5, process_count() / 500)


def _listen(leaving: threading.Event) -> None:
    """Looks for a failure of another process, and ends this one as well; also if it waits too long for the others."""
    with contextlib.suppress(DesyncError):
        watch.look()  # the others know at once where this process is: it may die before it looks again
    while not leaving.wait(_pause()):
        if client() is None:
            return  # jax.distributed.shutdown, which the program has called
        try:
            word, why = now(_FAILED), watch.look()
        except DesyncError:
            continue  # the coordination service is gone, and JAX ends this process; or it is out of reach
        if word is not None:
            break
        if why is not None:
            say(why)
            _tell(why)
            _end(WAITED)
    else:
        return
    process, what = json.loads(word)
    if process == own_process():
        return
    time.sleep(_GRACE)
    say(f"jdp: process {process} has failed ({_short(what)}); process {own_process()} ends")
    _end(FOR_ANOTHER)
