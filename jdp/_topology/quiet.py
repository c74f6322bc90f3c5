"""Keeps what the compilers of absent machines log out of the terminal.

A file of its own, with the standard library alone: it runs as a script as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

# Lines of XLA's and libtpu's loggers, written before they can be told not to: of drivers and hosts that are absent.
_LOGGED = re.compile(
    rb"[IWE]\d{4} |WARNING: (All log messages|Logging) before |Failed to find host bounds"
    rb"|=== Source Location Trace|\S+/\S+\.cc:\d+\s*$"
)


@contextlib.contextmanager
def quiet() -> Iterator[TextIO]:
    """Drops such lines; what else is written to stderr meanwhile comes out, line by line.

    Gives a stream that goes where stderr did, and knows whether that is a terminal.
    """
    sys.stderr.flush()
    try:
        before = os.dup(2)  # of C++, which does not ask sys.stderr
    except OSError:  # there is no stderr
        yield sys.stderr
        return
    # A process of its own: a compiler that aborts takes this one with it, and its last words tell why.
    # In a session of its own, so that a Ctrl-C in the terminal spares it.
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
    """One of that descriptor; sys.stderr where that writes elsewhere, as in a notebook."""
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
