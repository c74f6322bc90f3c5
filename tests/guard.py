"""A run of the tests that ends, however it ends, leaves no process behind.

Tests start processes that start others, in sessions of their own. Whoever stops pytest (Ctrl-C, kill, kill -9, a
time-out) stops none of them. So pytest starts this file as a process first, and puts a mark into its own environment,
which all that it starts inherit, the workers of `pytest -n` among them. When pytest is gone, this process kills what
bears the mark. It finds the mark in /proc: on Linux only.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

MARK = "JDP_TESTS_RUN"


def pytest_sessionstart() -> None:
    """A worker of `pytest -n` has the mark already: the first process watches for all."""
    if sys.platform == "linux" and MARK not in os.environ:
        mark = str(uuid.uuid4())
        # in a session of its own, which Ctrl-C does not reach
        command = [sys.executable, "-S", __file__, str(os.getpid()), mark]
        watcher = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        watcher.returncode = 0  # nobody waits for it, and Python need not warn of that
        os.environ[MARK] = mark


def bearers(mark: str, name: str = MARK) -> list[int]:
    """The processes that were started with this mark in their environment."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{name}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it ended, or is another user's
            continue
    return found


def watch(parent: int, mark: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    while alive := bearers(mark):  # again, until nothing that one of them started meanwhile is left
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
