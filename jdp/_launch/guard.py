"""Run as a script of its own: what makes the launcher's processes end when the launcher is killed.

    guard.py guard                      kills, once stdin ends, the process groups named on it
    guard.py worker PARENT COMMAND...   becomes COMMAND, which the kernel kills if PARENT dies

Both are needed. The kernel's own rule is immediate and holds even if the guard is killed too, but it
reaches the worker alone, and exists on Linux only; the guard also reaches the worker's children (data
loaders). Each is a fresh interpreter of some milliseconds that imports nothing big: the obvious ways,
`preexec_fn` or `os.fork` in the launcher, can deadlock there, as NumPy and JAX have started threads.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1


def guard(requests: BinaryIO) -> None:
    """Reads `+GROUP` and `-GROUP`, a line each; at the end kills the groups that are still on the list."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it goes when the launcher has gone, and not before
    groups: set[int] = set()
    for line in requests:
        if line.endswith(b"\n"):  # else the launcher was killed while it wrote
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)


def kill_group(group: int) -> None:
    """Sends SIGKILL to every process of the group, if there is one."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # no process is left; macOS says "not permitted" when they are zombies


def become_worker(parent: int, command: list[str]) -> None:
    """Replaces this process by `command`, tied to the life of `parent`."""
    if sys.platform == "linux":
        try:
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        except (ImportError, OSError, AttributeError):
            pass  # the guard is left
    if os.getppid() != parent:
        os._exit(1)  # the launcher died before the kernel was told, so this worker is not needed
    os.execv(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard(sys.stdin.buffer)
    else:
        become_worker(int(sys.argv[2]), sys.argv[3:])
