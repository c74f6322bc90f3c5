"""Waits for running saves when the program ends, and reports on stderr a save that is lost."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 its exit hook has to be registered before `_finish`
import functools
import os
import threading
import time
import weakref
from typing import NoReturn, Protocol

from .._processes.coordination import flush, say
from .._processes.last_words import before_failing


class Save(Protocol):
    """An object that may have a running save, such as a `Writer`."""

    process: int

    def wait(self) -> None:
        """Waits for the save; raises an error if it has failed."""
        ...

    def loss(self, error: BaseException) -> str:
        """Returns the message that this error has ended the save."""
        ...


_MOMENT = 0.2  # seconds, at least, to see that a save has ended
_FOR_THE_TEXT = 2.0  # seconds
_open: weakref.WeakSet[Save] = weakref.WeakSet()


def wait_at_exit(save: Save) -> None:
    """Makes the program wait for this save when it ends, by its last line, an exception or Ctrl-C."""
    _register()
    _open.add(save)


def tell_loss(text: str) -> None:
    """Prints on stderr what was lost, because no caller is left to raise to; the exit status will not be 0."""
    atexit.register(_fail, os.getpid())
    say(text)


@functools.cache  # once; a forked child inherits the hook
def _register() -> None:
    # `atexit` comes too late: Orbax's threads hand work to those of concurrent.futures, which accept none by then.
    # Those threads end by a hook of this kind, and the hook that was registered last is called first.
    before_failing(_finish_within)
    threading._register_atexit(_finish)  # pyright: ignore[reportAttributeAccessIssue]: private, and in CPython since 3.9
    atexit.register(_finish, late=True)  # in case Ctrl-C in an earlier hook has skipped the rest


def _finish(late: bool = False) -> None:
    lost = False
    for save in [*_open]:
        if save.process != os.getpid():
            continue
        try:
            save.wait()
        except Exception as e:  # noqa: BLE001 a program ends here, whatever it is
            lost = True
            tell_loss(str(e))
        except BaseException as e:  # Ctrl-C: the user does not want to wait
            _open.clear()
            tell_loss(save.loss(e))
            raise
    if late and lost:  # functions that are registered now are not called
        _end()


def _finish_within(seconds: float) -> None:
    """Waits so long for the saves of a process of a job that has failed, and says which of them are lost."""
    over = time.monotonic() + seconds
    for save in [*_open]:
        if save.process != os.getpid():
            continue
        lost: list[str] = []
        late, stopped = threading.Event(), threading.Event()

        def wait(save: Save = save, lost: list[str] = lost, done: threading.Event = stopped) -> None:
            try:
                save.wait()
            except Exception as e:  # noqa: BLE001 whatever it is, the process ends
                lost.append(str(e))
            done.set()

        def tell(save: Save = save, done: threading.Event = late) -> None:
            say(save.loss(TimeoutError("the job ended before it was complete")))
            done.set()

        threading.Thread(target=wait, daemon=True).start()
        if not stopped.wait(max(_MOMENT, over - time.monotonic())):
            threading.Thread(target=tell, daemon=True).start()  # it lists the directory, which may take for ever, too
            late.wait(_FOR_THE_TEXT)
        for text in lost:
            say(text)


def _fail(process: int) -> None:
    """Runs all other exit functions, then ends with status 1: it is registered last, so `atexit` calls it first."""
    if process != os.getpid():
        return
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    _end()


def _end() -> NoReturn:
    flush()
    os._exit(1)
