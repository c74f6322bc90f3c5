"""Runs a user's script as Python does, while a command watches it."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence


def run_script(
    script: str, args: Sequence[str], call: Callable[[Callable[[], None]], object] = lambda run: run()
) -> tuple[str, Exception | None]:
    """Runs the script as `__main__`, and returns how it ended, in words, and the exception that it raised.

    `call` calls the function that it gets, which runs the script. Neither `Exception` nor `SystemExit` is raised here.
    """
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv, sys.path[0:0] = [script, *args], [os.path.dirname(os.path.abspath(script))]

    def run() -> None:
        runpy.run_path(script, run_name="__main__")

    try:
        call(run)
    except SystemExit as end:
        return f"ended with code {end.code or 0}", None
    except Exception as error:
        return f"raised {type(error).__name__} ({(str(error).strip().splitlines() or [''])[0]})", error
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
    return "ended", None


def print_error(error: BaseException, script: str) -> None:
    """Prints the script's own part of the traceback."""
    at, name = error.__traceback__, os.path.abspath(script)
    while at is not None and os.path.abspath(at.tb_frame.f_code.co_filename) != name:
        at = at.tb_next
    traceback.print_exception(type(error), error, at, chain=False)
