"""What is done for saves at the end of the program: they are waited for, and where one is lost, that is said."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 what it does at exit has to be registered before `_finish`
import functools
import os
import sys
import threading
import weakref
from typing import NoReturn, Protocol


class Save(Protocol):
    """Who may have a save that is running."""

    process: int

    def wait(self) -> None:
        """Waits for it; raises what says that it has failed."""
        ...

    def loss(self, error: BaseException) -> str:
        """What says that it was ended by this error."""
        ...


_open: weakref.WeakSet[Save] = weakref.WeakSet()


def wait_at_exit(save: Save) -> None:
    """Has the program wait for what is running there when it ends: by its last line, an exception or Ctrl-C."""
    _register()
    _open.add(save)


def tell_loss(text: str) -> None:
    """Says on stderr what was lost, of which nobody else will hear; the program's exit status will not be 0."""
    print(text, file=sys.stderr, flush=True)
    atexit.register(_fail, os.getpid())


@functools.cache  # once; a child that is forked has the hook, too
def _register() -> None:
    # `atexit` comes too late: Orbax's threads hand work to those of concurrent.futures, which take none any more by
    # then. They end by a hook of this kind, and of these the one that was registered last is called first.
    threading._register_atexit(_finish)  # pyright: ignore[reportAttributeAccessIssue]: private, and in CPython since 3.9
    atexit.register(_finish, late=True)  # where Ctrl-C has ended a hook that comes first, and all of them with it


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
        except BaseException as e:  # Ctrl-C, by who does not want to wait
            _open.clear()
            tell_loss(save.loss(e))
            raise
    if late and lost:  # what is registered now is not called any more
        _end()


def _fail(process: int) -> None:
    """Ends with status 1, after all else that is done at exit: this is called first, for it was registered last."""
    if process != os.getpid():
        return
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    _end()


def _end() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
