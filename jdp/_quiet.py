"""Keeps what the compilers of absent machines log out of the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Lines of XLA's and libtpu's loggers, written before they can be told not to: of drivers and hosts that are absent.
_LOGGED = re.compile(
    rb"[IWE]\d{4} |WARNING: (All log messages|Logging) before |Failed to find host bounds"
    rb"|=== Source Location Trace|\S+/\S+\.cc:\d+\s*$"
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops such lines; what else is written to stderr meanwhile comes out at the end."""
    sys.stderr.flush()
    try:
        before = os.dup(2)  # of C++, which does not ask sys.stderr
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            written.seek(0)
            for line in written:
                if not _LOGGED.match(line):
                    os.write(2, line)
