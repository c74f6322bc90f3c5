"""Hooks into the end of a process of a job: by the last line, an exception, `sys.exit`, Ctrl-C."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax

from .._launch.protocol import WAITED
from .coordination import (
    ALL_LEFT,
    AbsentError,
    DesyncError,
    client,
    ended,
    flush,
    forget_in_child,
    get,
    left_key,
    own_process,
    put,
    say,
    text_of,
)
from .exchange import Exchange
from .last_words import (
    FOR_A_SAVE,
    end,
    finish,
    let_the_listener_speak,
    listen,
    look_at_the_time,
    show,
    tell,
    time_for_saves,
)
from .places import limits
from .watch import watch


@functools.cache  # once
def install() -> None:
    """Hooks into the end of this process, of whatever kind."""
    before, own = sys.excepthook, os.getpid()
    _Earlier.error = getattr(sys, "last_value", None)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not _uncaught():  # this is a report of an error that was handled, by a library or a console
            before(kind, error, trace)
        elif os.getpid() != own:  # a child of os.fork, whose end does not concern the job
            before(kind, error, trace)
            _Exit.code, _Exit.process = 130 if issubclass(kind, KeyboardInterrupt) else 1, os.getpid()
        else:
            _fail(error, lambda: show(before, kind, error, trace))

    sys.excepthook = hook
    _note_exits()
    if threading.current_thread() is not threading.main_thread():
        _end_with(threading.current_thread(), before)
    with contextlib.suppress(Exception):
        watch.look()  # writes where this process is, so that the others know it from the first call on
    leaving = threading.Event()
    listener = threading.Thread(target=listen, args=(leaving,), name="jdp-listens", daemon=True)
    listener.start()
    threading.Thread(target=look_at_the_time, args=(leaving,), name="jdp-watches", daemon=True).start()
    jax.monitoring.register_scalar_listener(lambda event, value, **_: watch.compile_event(event, True))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: watch.compile_event(event, False)
    )
    os.register_at_fork(after_in_child=forget_in_child)
    atexit.register(_leave, own, leaving, listener)


def _fail(error: BaseException, show_it: Callable[[], None] = lambda: None) -> None:
    """Ends this process, which has failed with this error. `show_it` prints the error, unless that was done."""
    # JAX waits for the others at exit, and they may be waiting for this process: it ends here, whatever happens.
    kind, interrupted, text = type(error), isinstance(error, KeyboardInterrupt), text_of(error)
    try:
        let_the_listener_speak(error)
        if interrupted:
            say("\n".join([f"jdp: process {own_process()} was interrupted", *getattr(error, "__notes__", ())]))
        else:
            show_it()
        flush()
        finish(time_for_saves(error))
    finally:
        tell(f"{kind.__name__}: {text}" if text else kind.__name__)
        end(130 if interrupted else WAITED if isinstance(error, AbsentError) else 1)


def _uncaught() -> BaseException | None:
    """Returns the error that has ended the program; None if there is none.

    Python sets these names before it calls a hook, which may be one that a library has set later than jdp's. Consoles
    set the same names for errors that they have handled, whose frames have a caller.
    """
    trace, error = getattr(sys, "last_traceback", None), getattr(sys, "last_value", None)
    return error if trace is not None and trace.tb_frame.f_back is None and error is not _Earlier.error else None


class _Earlier:
    """What a console, or another program in this process, has left as the last error before `install`."""

    error: Any = None


def _end_with(loop: threading.Thread, show_by: Callable[..., Any]) -> None:
    """Makes the process end when this thread fails. Python alone would go on, and end with code 0.

    Other threads fail as they do without jdp. An engine that catches what its thread raises (Ray) reports it itself.
    """
    before, own = threading.excepthook, os.getpid()

    def in_thread(failed: threading.ExceptHookArgs) -> None:
        error = failed.exc_value
        if failed.thread is not loop or error is None or os.getpid() != own:
            before(failed)
        elif not isinstance(error, SystemExit):
            _fail(error, lambda: show(show_by, failed.exc_type, error, failed.exc_traceback))
        elif error.code:
            if not isinstance(error.code, int):
                say(str(error.code))
            code = error.code if isinstance(error.code, int) else 1
            finish(FOR_A_SAVE)
            tell(f"SystemExit: {code}")
            end(code)

    threading.excepthook = in_thread


_before_leaving: list[Callable[[], None]] = []


def before_leaving(wait: Callable[[], None]) -> None:
    """Registers `wait`, called at the end of the program before this process writes that it has left."""
    _before_leaving.append(wait)


class _Exit:
    """The last call of `sys.exit`: its code, the calls over the processes before it, its process and its exception."""

    code, calls, process, exception = 0, -1, 0, 0


class _Noted(SystemExit):
    """What `sys.exit` raises in the main thread. If code of Python lets go of it, it was caught."""

    __module__ = "builtins"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _Exit.exception = id(self)

    def __del__(self) -> None:
        # At the end of the program Python lets go of it outside of any frame, or in a function of atexit. The garbage
        # collector does so in any frame, of another thread too.
        with contextlib.suppress(Exception):
            if _Exit.exception == id(self) and _is_in_program(sys._getframe(1)):
                _Exit.code = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


def _is_in_program(frame: FrameType) -> bool:
    """Returns True if the outermost caller of a frame is the program: a script, or what `python -m` runs."""
    while frame.f_back is not None:
        frame = frame.f_back
    module = frame.f_globals.get("__name__")
    return module == "runpy" or module == "__main__" and frame.f_code.co_name == "<module>"


_Noted.__name__ = _Noted.__qualname__ = SystemExit.__name__


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
                try:
                    return exit_(status)
                except SystemExit as error:
                    if type(error) is not SystemExit:  # of a class of the library that has set this `exit`
                        raise
                    raise _Noted(*error.args) from None  # in no variable: the traceback would hold it
            return exit_(status)

        return call

    for where, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(where, name):
            setattr(where, name, noted(getattr(where, name)))


def _leave(own: int, leaving: threading.Event, listener: threading.Thread) -> None:
    """Ends the program in good order: a process that waits for this one in a later call can stop waiting."""
    if os.getpid() != own:
        if _Exit.process == os.getpid():
            flush()
            os._exit(_Exit.code)  # JAX needs its threads to end, and a child of os.fork has none of them
        return
    if (error := _uncaught()) is not None:
        _fail(error)
    if _Exit.code and _Exit.calls == Exchange.calls:  # otherwise it was caught, and the program went on
        tell(f"SystemExit: {_Exit.code}")
        end(_Exit.code)
    try:
        try:
            for wait in _before_leaving:
                wait()
        finally:  # a program that has failed on a device raises here; Python prints the error, and the others go on
            _tell_that_it_has_left()
        if limits.shutdown and client() is not None:  # else the program has called jax.distributed.shutdown
            _wait_for_the_others(listener)
    finally:
        leaving.set()
        listener.join()  # a thread inside of JAX's client would abort the interpreter at its end


def _tell_that_it_has_left() -> None:
    with contextlib.suppress(Exception):
        watch.tell()
    with contextlib.suppress(Exception):
        client().key_value_set(left_key(own_process()), "")


_SLICE = 1.0  # seconds of one wait; Ctrl-C comes through between two
_LATER = 60.0  # seconds that the listener has to end a process which has waited for too long


def _wait_for_the_others(listener: threading.Thread) -> None:
    """Waits until all processes have left. JAX waits for them as well, but then nothing looks for their failures.

    The listener lives until then. It ends this process if another fails, or is gone, or does not come to its end.
    """
    over = time.monotonic() + limits.shutdown + _LATER
    with watch.leaving():
        while listener.is_alive() and time.monotonic() < over:
            try:
                if _all_have_left():
                    return
            except DesyncError:  # process 0 is out of reach; the watch says so in time
                time.sleep(_SLICE)


def _all_have_left() -> bool:
    """Waits for a moment, and returns True when all have left. Process 0 asks for each, and the others ask it."""
    present = watch.processes()
    if own_process() != 0:
        return 0 not in present or get(ALL_LEFT, _SLICE) is not None
    if absent := present - ended():
        get(left_key(min(absent)), _SLICE)
        return False
    put(ALL_LEFT, "")
    return True
