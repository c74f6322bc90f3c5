"""Notes the ends of processes in the order in which they come: the first to fail is the one to blame."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

Process = subprocess.Popen[bytes]
Ended = Callable[[int, int], None]


def watch(processes: Sequence[Process], ended: Ended) -> list[threading.Thread]:
    """Calls `ended(i, code)`, in a thread, when process i has ended, with the code that `subprocess` gives.

    The process stays a zombie, so that its number cannot be given to another: a signal to it or to its
    group never reaches a stranger. `wait` it after the threads have ended.
    """
    poll = _poll(processes)
    if poll is not None:
        threads = [threading.Thread(target=_note_in_order, args=(*poll, processes, ended), daemon=True)]
    else:
        threads = [threading.Thread(target=_note, args=(i, p, ended), daemon=True) for i, p in enumerate(processes)]
    for thread in threads:
        thread.start()
    return threads


def _poll(processes: Sequence[Process]) -> tuple[Any, dict[int, int]] | None:
    """What tells of the ends, and the process of each of its files; `None` where there is no such thing."""
    # The kernel queues what it tells an epoll, and gives it out in that order however late we ask. Threads
    # that wait for a process each are woken in any order on a busy machine, tens of milliseconds apart.
    if sys.platform != "linux":
        return None
    poll, files = select.epoll(), {}
    try:
        for i, process in enumerate(processes):
            files[os.pidfd_open(process.pid)] = i
    except (AttributeError, OSError):  # a kernel before 5.3
        _close(poll, files)
        return None
    for file in files:
        poll.register(file, select.EPOLLIN | select.EPOLLONESHOT)
    return poll, files


def _close(poll: Any, files: dict[int, int]) -> None:
    poll.close()
    for file in files:
        os.close(file)


def _note_in_order(poll: Any, files: dict[int, int], processes: Sequence[Process], ended: Ended) -> None:
    left = len(files)
    while left:
        for file, _ in poll.poll():
            ended(files[file], _code(processes[files[file]]))
            left -= 1
    _close(poll, files)


def _note(i: int, process: Process, ended: Ended) -> None:
    ended(i, _code(process))


def _code(process: Process) -> int:
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return process.wait()
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
