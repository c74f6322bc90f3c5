"""`jdp launch`: one script as several processes of one JAX job, as torchrun does for torch."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from .options import Job, described, environments, gpus_to_divide, parse, refuse_taken_port
from .output import Printer, Reader, open_the_closed
from .protocol import WAITED
from .workers import Crew, Events, Guard, Worker


def main(argv: list[str]) -> int:
    """Runs the job that the command line asks for, and returns the code to exit with."""
    open_the_closed()
    job = parse(argv)
    try:
        refuse_taken_port(job, os.environ)
        gpus = gpus_to_divide(job, os.environ)
    except ValueError as error:
        print(f"jdp launch: error: {error}", file=sys.stderr)
        return 2
    events: Events = queue.SimpleQueue()
    printer = Printer(events.put)
    with _signals(events), contextlib.closing(Guard()) as guard:
        attempt, places, code = 0, Places(job), None
        while code is None:
            try:
                code = _attempt(job, attempt, gpus, places, guard, events, printer)
            except OSError as error:  # too many processes, or open files
                printer.say(f"error: the processes cannot be started: {error}")
                code = 1
            attempt += 1
        _wait(printer.has_written, events, _LAST if printer.hurries else math.inf)
        return code


@contextlib.contextmanager
def _signals(events: Events) -> Iterator[None]:
    """Signals become events: a handler that raises could leave a worker half started."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored: started by nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: events.put(number)) for number in numbers}
    child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no process leaves a status
    try:
        yield
    finally:
        for number, handler in [*before.items(), (signal.SIGCHLD, child)]:
            signal.signal(number, handler)


_AT_ONCE = 60.0  # a process that fails within so many seconds of its start cannot be started at all


class Places:
    """The processes of this machine that a job still has, each by the number that it had at first: its place."""

    def __init__(self, job: Job) -> None:
        self._job, self._whole = job, list(range(job.processes))
        self._suspect: int | None = None

    @property
    def left(self) -> list[int]:
        """Those that have a process: with `--replicas` as many as divide them."""
        return self._whole[: self._most(len(self._whole))]

    def blame(self, culprit: Worker) -> bool:
        """Returns True if the culprit's place is left out from now on: it failed at once, as in the attempt before."""
        place = self.left[culprit.rank % len(self.left)]  # the ranks of this machine follow each other
        by_itself = culprit.code != WAITED and not culprit.for_another()
        at_once = by_itself and culprit.ended - culprit.started < _AT_ONCE
        again, self._suspect = at_once and place == self._suspect, place if at_once else None
        if not again or self._most(len(self._whole) - 1) < (self._job.min_processes or self._job.processes):
            return False
        self._whole.remove(place)
        return True

    def _most(self, processes: int) -> int:
        """Returns the most processes, up to this number, whose devices together divide the replicas."""
        replicas, devices = self._job.replicas, self._job.cpu_devices or 1
        return next(n for n in range(processes, -1, -1) if replicas is None or n == 0 or replicas % (n * devices) == 0)


def _attempt(
    job: Job, attempt: int, gpus: int, places: Places, guard: Guard, events: Events, printer: Printer
) -> int | None:
    """Runs the workers once, until all have ended; the code to exit with, or `None` to start them again."""
    with Crew(guard, events) as crew:
        envs = environments(job, attempt, gpus, os.environ, places.left)
        if attempt == 0:
            printer.say(described(job, gpus, envs[0]))
        crew.start(job.command, envs)
        reader = Reader(crew.pipes(), printer)
        reader.start()
        asked = _supervise(crew, events, job, reader, printer)
        reader.has_ended(_TO_CLEAN)
        crew.kill()  # what they have left behind, which would keep the pipes open
        reader.finish()
        if found := _wait(reader.has_ended, events):
            printer.hurry()
            reader.has_ended(_LAST)
        asked = asked or found
    culprit = crew.culprit()
    if culprit is not None and asked is None and attempt < job.max_restarts:
        then = f"; all {len(places.left)} processes start again"
        if places.blame(culprit):
            then = f", for the second time running, and is left out; {len(places.left)} of {job.processes} go on"
        printer.say(f"{culprit.end()}{then} (restart {attempt + 1} of {job.max_restarts})")
        asked = _pause(job, attempt, events)
        return None if asked is None else 128 + asked
    # A user who presses Ctrl-C knows why the workers end; a script that does not handle SIGTERM ends by it.
    code = culprit.code if culprit is not None and culprit.code else 0
    if culprit is not None and (asked is None or (asked != signal.SIGINT and code != -signal.SIGTERM)):
        _report(culprit, crew.workers, reader.last_words(culprit.rank), printer)
    if asked is not None:
        clean = all(worker.code == 0 for worker in crew.workers)
        return 0 if clean and asked in (signal.SIGTERM, signal.SIGHUP) else 128 + asked
    return code if code >= 0 else 128 - code


def _supervise(crew: Crew, events: Events, job: Job, reader: Reader, printer: Printer) -> int | None:
    """Waits until every worker has ended; gives the signal that asked the launcher to end, if one did."""
    asked, deadline = None, math.inf
    while crew.running():
        try:
            event = events.get(timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            ranks = [str(worker.rank) for worker in crew.running()]
            crew.kill_workers()
            if asked is not None:
                printer.say(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} did not end in time; killed")
            deadline = math.inf
            continue
        if isinstance(event, Worker):
            if event.code and deadline == math.inf and crew.killed == math.inf:
                crew.signal(signal.SIGTERM)
                deadline = time.monotonic() + job.grace
        elif event == signal.SIGINT and asked is not None:
            crew.kill()
        else:
            crew.signal(signal.SIGINT if event == signal.SIGINT else signal.SIGTERM)
            printer.hurry()
            if asked is None:  # said after that, because saying it may block
                printer.say(_handing_on(event, job))
            asked, deadline = asked or event, min(deadline, time.monotonic() + job.preemption_grace)
    return asked


def _handing_on(number: int, job: Job) -> str:
    what = f"{signal.Signals(number).name} is handed on"
    if number == signal.SIGPIPE:
        what = "the output cannot be written any more; SIGTERM is sent"
    return f"{what} to the processes, which have {job.preemption_grace:g} s to save and end; Ctrl-C kills them at once"


# Seconds for what a process has left behind: a resource tracker of Python deletes the shared memory of one that failed.
_TO_CLEAN = 1.0
_LAST = 2.0  # seconds to write the last lines of a job that was asked to end, if somebody reads them


def _wait(is_done: Callable[[float], bool], events: Events, seconds: float = math.inf) -> int | None:
    """Waits until it is done, at most so long; gives the signal that asks the launcher to end, if one came."""
    until = time.monotonic() + seconds
    while not is_done(0.1) and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            event = events.get_nowait()
            if not isinstance(event, Worker) and event != signal.SIGPIPE:  # what is left goes to the other stream
                return event
    return None


def _pause(job: Job, attempt: int, events: Events) -> int | None:
    """Waits before a restart, longer each time; gives the signal that asks the launcher to end, if one came."""
    # With several nodes the other launchers may still be ending their workers, rank 0 among them: a new
    # worker must not join the old job.
    until = time.monotonic() + _pause_after(attempt) + (job.grace + 1 if job.nodes > 1 else 0)
    while True:
        try:
            event = events.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if not isinstance(event, Worker):
            return event


def _pause_after(attempt: int) -> float:
    """Returns the seconds to wait: what keeps failing at once (a full disk, a device in use) may need a while."""
    return min(5.0, 0.1 * 2.0 ** min(attempt, 10))


_LONG_BEFORE = 5.0  # seconds before the culprit


def _report(culprit: Worker, workers: Sequence[Worker], last_words: list[bytes], printer: Printer) -> None:
    since = culprit.ended - (0 if culprit.aborted else _LONG_BEFORE)
    left = [worker for worker in workers if worker.code == 0 and worker.ended < since]
    if left:  # the others may have waited for it in vain
        printer.say("; ".join(f"rank {worker.rank} ended with exit code 0 {worker.after()}" for worker in left))
    said = culprit.end() if culprit.code == WAITED or culprit.aborted else f"{culprit.end()}, before any other"
    # What JAX logs of the launcher's own SIGTERM to a process that was just failing says nothing of why.
    last_words = [line for line in last_words if b"preemption_notifier.cc" not in line]
    if last_words:
        printer.say(f"{said}. Its last lines on stderr:", last_words)
        return
    hint = ""
    if culprit.code == -signal.SIGKILL:
        hint = " The launcher did not send it: the kernel does when memory runs out, or a person did."
    printer.say(f"{said}. It wrote nothing to stderr.{hint}")
