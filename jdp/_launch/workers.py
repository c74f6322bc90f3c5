"""The processes of one attempt: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from . import guard as _launch_guard
from .protocol import FOR_ANOTHER, WAITED


@dataclasses.dataclass
class Worker:
    """One process; `code` is as `subprocess` gives it (minus the signal), `None` while it runs."""

    rank: int
    process: subprocess.Popen[bytes]
    started: float
    ended: float = 0.0
    code: int | None = None
    aborted: bool = False  # by JAX, because process 0, through which the others hear of each other, had ended

    def for_another(self) -> bool:
        """Returns True if it has not failed by itself, but ended because another process had, or was told to end."""
        return self.aborted or self.code in (FOR_ANOTHER, -signal.SIGTERM)

    def end(self) -> str:
        how = f"failed with exit code {self.code}"
        if self.code == WAITED:
            how = "gave up, for it waited in vain for another,"
        if self.code is not None and self.code < 0:
            how = f"was ended by signal {-self.code}"
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-self.code).name}"
        if self.aborted:
            how += " (JAX aborts it, because rank 0 ended first)"
        return f"rank {self.rank} {how} {self.after()}"

    def after(self) -> str:
        return f"after {self.ended - self.started:.1f} s"


Events = queue.SimpleQueue[Worker | int]
"""A worker that has ended, or the number of a signal to the launcher. Only this kind of queue may be filled in a
signal handler, which can run while the same thread waits in `get`."""


class Guard:
    """The process that kills the workers' groups when this one is gone."""

    def __init__(self) -> None:
        # a session of its own, so that what kills the launcher's group spares it
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _launch_guard.__file__, "guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    def tell(self, line: bytes) -> None:
        """Writes `+GROUP` or `-GROUP`: a group that must be killed at the end, or must not any more."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it; the kernel still guards the workers
            self._process.stdin.write(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class Crew:
    """The workers of one attempt. As a context it leaves none of their processes behind."""

    def __init__(self, guard: Guard, events: Events) -> None:
        self.workers: list[Worker] = []
        self.killed = float("inf")
        self._watchers: list[threading.Thread] = []
        self._guard = guard
        self._events = events

    def start(self, command: Sequence[str], environments: Sequence[dict[str, str]]) -> None:
        head = [sys.executable, "-I", "-S", _launch_guard.__file__, "worker", str(os.getpid())]
        for env in environments:
            process = subprocess.Popen(
                [*head, *command],
                env=env,
                stdin=subprocess.DEVNULL,  # one terminal cannot answer several; a debugger there ends at once
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # so that a Ctrl-C in the terminal comes once, from the launcher
            )
            self._guard.tell(b"+%d\n" % process.pid)
            self.workers.append(Worker(int(env["JDP_PROCESS_ID"]), process, time.monotonic()))

        def note_end(i: int, code: int) -> None:
            worker = self.workers[i]
            worker.aborted = code == -signal.SIGABRT and any(w.rank == 0 and w.code == 0 for w in self.workers)
            worker.ended, worker.code = time.monotonic(), code
            self._events.put(worker)

        self._watchers = watch([worker.process for worker in self.workers], note_end)

    def pipes(self) -> list[tuple[IO[bytes], int, int]]:
        """Returns what the workers write: `(pipe, rank, file descriptor it was written to)`."""
        found = []
        for worker in self.workers:
            for fd, pipe in ((1, worker.process.stdout), (2, worker.process.stderr)):
                assert pipe is not None
                found.append((pipe, worker.rank, fd))
        return found

    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    def signal(self, number: int) -> None:
        """Sends a signal to the workers that run: not to their children, which a worker needs to save with."""
        for worker in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, number)

    def kill_workers(self) -> None:
        """Kills the workers, and not what they have started, which may have to clean up."""
        self.killed = min(self.killed, time.monotonic())
        self.signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kills the workers, and all that they have started."""
        self.killed = min(self.killed, time.monotonic())
        for worker in self.workers:
            _launch_guard.kill_group(worker.process.pid)

    def culprit(self) -> Worker | None:
        """Returns the worker whose failure brought the others down, or `None` if none failed by itself."""
        failed = [worker for worker in self.workers if worker.code and worker.ended < self.killed]

        # The kernel closes the connections of a killed process before it reports its end, which takes a while when
        # there is much memory to free: a neighbour can have failed and ended by then. Nothing else gives a SIGKILL.
        # And process 0 stays until all others have learnt that it has failed; they end before it does.
        def blame(worker: Worker) -> tuple[bool, bool, bool, float]:
            return worker.code != -signal.SIGKILL, worker.for_another(), worker.code == WAITED, worker.ended

        return min(failed, key=blame, default=None)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for watcher in self._watchers:
            watcher.join()
        for worker in self.workers:
            self._guard.tell(b"-%d\n" % worker.process.pid)  # first: once it is reaped, the number may be another's
            worker.process.wait()


def watch(processes: Sequence[subprocess.Popen[bytes]], ended: Callable[[int, int], None]) -> list[threading.Thread]:
    """Calls `ended(i, code)`, in a thread, when process i has ended, with the code that `subprocess` gives.

    The process stays a zombie, so that its number cannot be given to another: a signal to it or to its
    group never reaches a stranger. `wait` it after the threads have ended.
    """

    def note(i: int) -> None:
        ended(i, _code(processes[i]))

    # The kernel queues what it tells an epoll, and gives it out in that order however late we ask. Threads
    # that wait for a process each are woken in any order on a busy machine, tens of milliseconds apart.
    with contextlib.ExitStack() as opened:
        try:
            poll, files = opened.enter_context(select.epoll()), {}
            for i, process in enumerate(processes):
                files[file := os.pidfd_open(process.pid)] = i
                opened.callback(os.close, file)
                poll.register(file, select.EPOLLIN | select.EPOLLONESHOT)
        except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
            threads = [threading.Thread(target=note, args=(i,), daemon=True) for i in range(len(processes))]
        else:
            kept = opened.pop_all()

            def note_in_order() -> None:
                with kept:
                    for _ in files:
                        ((file, _),) = poll.poll(maxevents=1)
                        note(files[file])

            threads = [threading.Thread(target=note_in_order, daemon=True)]
    for thread in threads:
        thread.start()
    return threads


def _code(process: subprocess.Popen[bytes]) -> int:
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return process.wait()
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
