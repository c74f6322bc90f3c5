"""Keeps what the compilers of absent machines log out of the terminal.

This file uses only the standard library, because it also runs as a script.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

# Lines about absent drivers and hosts, which the loggers of XLA and libtpu write before they can be switched off.
_LOGGED = re.compile(
    rb"[IWE]\d{4} |WARNING: (All log messages|Logging) before |Failed to find host bounds"
    rb"|=== Source Location Trace|\S+/\S+\.cc:\d+\s*$"
)


@contextlib.contextmanager
def quiet() -> Iterator[TextIO]:
    """Drops the compilers' log lines from stderr during its block; other lines still appear.

    Yields a stream to the original stderr, whose `isatty` tells whether that is a terminal.
    """
    sys.stderr.flush()
    try:
        before = os.dup(2)  # C++ writes to the descriptor, not to sys.stderr
    except OSError:  # there is no stderr
        yield sys.stderr
        return
    # The filter is a separate process: if a compiler aborts this one, the filter still prints its last lines.
    # It has a separate session, so that a Ctrl-C in the terminal does not end it.
    command = [sys.executable, "-I", "-S", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as filter_:
        assert filter_.stdin is not None
        os.dup2(filter_.stdin.fileno(), 2)
        filter_.stdin.close()
        try:
            with _stream(before) as out:
                yield out
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)


def _stream(before: int) -> contextlib.AbstractContextManager[TextIO]:
    """Opens a stream to the descriptor `before`; returns sys.stderr if that writes elsewhere, as in a notebook."""
    try:
        if sys.stderr.fileno() == 2:
            return open(os.dup(before), "w", encoding=sys.stderr.encoding, errors=sys.stderr.errors)
    except OSError:
        pass
    return contextlib.nullcontext(sys.stderr)


if __name__ == "__main__":
    for line in sys.stdin.buffer:
        if not _LOGGED.match(line):
            os.write(2, line)
