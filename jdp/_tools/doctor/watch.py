"""The parent's side of the doctor's tests: it asks, waits for as long as the deadline says, and kills."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

_TELLING = re.compile(r"^F\d{4} |error|fatal|failed|unknown flag|cannot|not found", re.IGNORECASE)


def command(reply: int, seconds: int) -> list[str]:
    """Returns how to start the process of the tests: the same Python with the same modules in reach."""
    # The alarm is the kernel's: an import that never ends does not outlive the deadline, even if we are killed.
    code = f"import signal, sys; signal.alarm({seconds}); sys.path[:] = {sys.path!r}; "
    return [sys.executable, "-c", code + f"from jdp._tools.doctor.worker import serve; serve({reply})"]


class Worker:
    """A process that answers requests, each within a deadline, and is dead after the first that it did not answer."""

    def __init__(self, environ: Mapping[str, str], seconds: float) -> None:
        self._replies, reply = os.pipe()
        self._printed = tempfile.TemporaryFile()
        self._unread = b""
        self.alive = True
        self._process = subprocess.Popen(
            command(reply, _alarm(seconds)),
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[reply],
            start_new_session=True,  # a group of its own: what it starts is killed with it
            env=dict(environ),
        )
        os.close(reply)

    def ask(self, request: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Returns the answer; or that it hangs (no line in `seconds`) or died, and then the process is gone.

        The request `None` waits for the process to be ready.
        """
        deadline = time.monotonic() + seconds
        try:
            if request is not None:
                assert self._process.stdin
                line = json.dumps(request | {"alarm": _alarm(seconds)}) + "\n"
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            answer = self._line(deadline)
        except BrokenPipeError:
            answer = b""
        if answer:
            return json.loads(answer)
        hangs = answer is None
        text = f"no answer within {seconds:g} s" if hangs else self._died()
        self.close()
        return {"failure": "hang" if hangs else "died", "text": text, "printed": self.printed}

    def _line(self, deadline: float) -> bytes | None:
        """Returns the next line; `None` where the deadline passed, `b""` where the process ended first."""
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            more = os.read(self._replies, 1 << 16)
            if not more:
                return b""
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe and lives on"
        if code >= 0:
            return f"the process ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process was ended by signal {-code}"

    def close(self) -> None:
        """Kills the process and all that it started; nothing is left."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A driver can hold a process in the kernel, where not even SIGKILL reaches it: go on without.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - 20_000))
        self.printed = telling(self._printed.read().decode(errors="replace"))
        self._printed.close()
        os.close(self._replies)
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def telling(text: str, lines: int = 3) -> str:
    """Returns the last lines that speak of an error, or else the last lines.

    Example:
        >>> telling("loading\\nerror: no such device\\n  @ 0x7f01\\n  @ 0x7f02\\n  @ 0x7f03")
        'error: no such device'
    """
    every = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return "\n".join(([line for line in every if _TELLING.search(line)] or every)[-lines:])


def _alarm(seconds: float) -> int:
    return math.ceil(seconds) + 2
