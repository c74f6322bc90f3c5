"""Faults put into jobs of four processes: what is killed, raises, sleeps, leaves or differs ends the job, or is named.

Seconds are counted from the fault, by the time that the processes note themselves. JDP_FAULTS_TABLE=FILE collects a
row for each fault: what it was, how the job was started, seconds, what the processes printed. JDP_FAULTS_STOPS=50 stops
a process inside of a step so often.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import faults_worker as worker
import jax
import numpy as np
import optax
import pytest
from laws import free_port

from jdp._launch.protocol import FOR_ANOTHER, WAITED

pytestmark = [
    pytest.mark.timeout(900),  # on a slow machine, beside two others
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for what is left behind"),
]

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
N = 4
RAISED, STUCK = 12, 30  # seconds until all have ended
START = 240  # seconds in which four processes come to a step, or a short job to its end, on a busy machine
EITHER = pytest.mark.parametrize("how", ["launch", "plain"])
# What the libraries say on their own account, or by the way.
NOISE = re.compile(r"\[Gloo\]|^[WEF]\d{4} |^\*\*\* |^ +@ |^For simplicity|^-+$|^The stack trace|^$")
NEWS = re.compile(r"jdp: (?!\d+ processes)|[\w.]+(Error|Exception|Interrupt|Exit)\b|F\d{4} |Fatal Python error")


class Job:
    """Four processes of one case, under `jdp launch` or each on its own; or a script; what they print, and note."""

    def __init__(self, folder, case, rank, how, options, absent, port, environ, script):
        self.folder, self.how, self.mark = folder, how, environ["JDP_FAULTS_MARK"]
        self.logs, self.processes, self.watchers, self.ends = {}, {}, {}, {}
        self.began = time.monotonic()
        usual = [] if script else ["-n", str(N), "--devices-per-process", "2"]
        script = script or [str(HERE / "faults_worker.py"), str(folder), case, str(rank)]
        if how == "launch":
            self._start("launcher", ["-m", "jdp", "launch", *usual, *options, *script], environ)
            return
        port = port or free_port()
        for r in range(N):
            if r != absent:
                self._start(r, script, environ | plain(r, port))

    def _start(self, name, arguments, environ):
        self.logs[name] = self.folder / f"{name}.log"
        with self.logs[name].open("a") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments], env=environ, stdout=log, stderr=log, cwd=ROOT, process_group=0
            )
        self.watchers[name] = threading.Thread(target=self._watch, args=(name,), daemon=True)
        self.watchers[name].start()

    def _watch(self, name):
        self.processes[name].wait()
        self.ends[name] = time.monotonic()

    def notes(self, what=None, **where):
        """What the processes have noted, in the order of time."""
        found = []
        for path in self.folder.glob("notes-*"):
            lines = path.read_text().split("\n")[:-1]  # the last may be half written
            found += [json.loads(line) for line in lines]
        wanted = where if what is None else {"what": what, **where}
        found = [note for note in found if wanted.items() <= note.items()]
        return sorted(found, key=lambda note: note["time"])

    def wait(self, what, seconds=START, count=1, **where):
        """The first of so many notes, once they are there."""
        end = time.monotonic() + seconds
        while len(found := self.notes(what, **where)) < count:
            running = [p for p in self.processes.values() if p.poll() is None]
            assert running and time.monotonic() < end, f"{what!r} was not noted {count} times: {self}"
            time.sleep(0.02)
        return found[0]

    def ended(self, bound, since=None, besides=()):
        """Seconds from the fault until nothing of the job runs any more: no process, and no child of one."""
        since = self.wait("fault")["time"] if since is None else since
        for name in set(self.processes) - set(besides):
            self.watchers[name].join(max(0.01, since + bound - time.monotonic()))
        running = [name for name in self.processes if name not in self.ends]
        assert running == list(besides), f"{bound} s after the fault runs {running}: {self}"
        seconds = max(self.ends.values()) - since
        spared = {self.processes[name].pid for name in besides}
        while (left := marked(self.mark) - spared) and time.monotonic() < since + bound:
            time.sleep(0.02)  # what the launcher has killed takes a moment
        assert not left, f"{left} are left: {self}"
        assert seconds < bound, f"it took {seconds:.1f} s: {self}"
        return seconds

    def code(self, name="launcher"):
        return self.processes[name].returncode

    def printed(self, rank):
        """The lines of a process."""
        if self.how == "plain":
            return self.logs[rank].read_text(errors="replace").splitlines()
        head = f"[{rank}] "
        lines, _ = self._split()
        return [line.removeprefix(head) for line in lines if line.startswith(head)]

    def said(self):
        """What the launcher said itself, and the last words that it repeats at the end."""
        lines, report = self._split()
        return "\n".join([line for line in lines if line.startswith("jdp launch: ")] + report)

    def report(self):
        """The launcher's last words: who failed first, and how."""
        return "\n".join(self._split()[1])

    def _split(self):
        lines = self.logs["launcher"].read_text(errors="replace").splitlines()
        ends = ", before any other", ", for it waited in vain"
        at = next((i for i, line in enumerate(lines) if any(end in line for end in ends)), len(lines))
        return lines[:at], lines[at:]

    def news(self, rank):
        """The first line of a process that tells of the fault."""
        lines = self.printed(rank)
        own_end = re.search(r"absl::Status: (.*(?:\n.*){3})", "\n".join(lines))
        if own_end:  # JAX's way to end a process; it names the culprit in one of the lines after
            return "JAX: " + re.sub(r"This usually.*further\.|\s+", " ", own_end[1])
        found = [line for line in lines if NEWS.match(line) and not NOISE.match(line)]
        found = found or [line for line in lines if NEWS.match(line)]
        return found[0] if found else "nothing"

    def __str__(self):
        text = []
        for name, log in self.logs.items():
            lines = [
                line for line in log.read_text(errors="replace").splitlines() if not re.search(r"\[Gloo\]| +@ ", line)
            ]
            text += [f"----- {name}: {self.processes[name].poll()}", *lines[-40:]]
        return "\n".join(["", *text, "----- notes", *[str(note)[:200] for note in self.notes()[-12:]]])


def plain(rank, port):
    """The environment of a process that no launcher starts."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JDP_NUM_PROCESSES": str(N),
        "JDP_PROCESS_ID": str(rank),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "NPROC": "8",
        "PYTHONUNBUFFERED": "1",
    }


def marked(mark):
    """The processes that have a mark in their environment: those that were started with it, and their children."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"JDP_FAULTS_MARK={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
    return found


@pytest.fixture
def start(tmp_path):
    """`start(case, ...)`: a job, of which nothing outlives the test."""
    jobs = []

    def start(case=None, rank=2, how="launch", options=(), absent=None, port=None, folder=tmp_path, script=None):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "JDP_FAULTS_MARK": str(uuid.uuid4())}
        for name in ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "JDP_ATTEMPT"):
            environ.pop(name, None)  # conftest's, for 8 devices
        folder.mkdir(exist_ok=True)
        jobs.append(Job(folder, case, rank, how, options, absent, port, environ, script))
        return jobs[-1]

    yield start
    while left := set().union(*[marked(job.mark) for job in jobs]):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for watcher in (w for job in jobs for w in job.watchers.values()):
        watcher.join()


@pytest.fixture
def row(request):
    """`row(fault, job, seconds, lost)`: a line of the table."""

    def row(fault, job, seconds, lost="nothing", said=None):
        print(f"{fault}, {job.how}: {seconds:.1f} s")
        path = os.environ.get("JDP_FAULTS_TABLE")
        if not path:
            return
        texts = {}
        if said is None:
            for rank in range(N):
                if job.how == "launch" or rank in job.processes:
                    texts.setdefault(short(job.news(rank)), []).append(rank)
            words = [f"{','.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
            if job.how == "launch" and job.report():
                words.append(f"launcher, last: {short(job.report().splitlines()[0].removeprefix('jdp launch: '))}")
        else:
            words = [said]
        with open(path, "a") as table:
            table.write(f"| {fault} | {job.how} | {' · '.join(words)} | {seconds:.1f} | {lost} |\n")

    return row


def short(text, length=170):
    text = text.replace("|", "/")
    return text if len(text) <= length else text[: length - 3] + "..."


def names(text, rank):
    """Whether a text names a process: in jdp's words, or in those of JAX's coordination service."""
    text = re.sub(r"^\[\d+\] ", "", text, flags=re.MULTILINE)  # the launcher's prefix
    if rank == 0 and "the leader task was preempted/died" in text:
        return True  # all hear of a failure through process 0, and of its own by its silence alone
    jdp = rf"(process|processes [\d, ]*|rank) ?{rank}\b"
    return bool(re.search(rf"{jdp}|(heartbeats\)|timed out task names):\n{rank}$", text, re.MULTILINE))


def assert_named(job, rank):
    """The launcher's last report names the culprit; without a launcher every process that lived does."""
    if job.how == "launch":
        assert names(job.report(), rank), str(job)
        return
    for other in set(job.processes) - {rank}:
        assert names("\n".join(job.printed(other)), rank), f"process {other} does not name {rank}: {job}"


def assert_codes(job, code, rank=2):
    """The launcher gives the culprit's code; without one the culprit has it, and no other ends as if all were well."""
    if job.how == "launch":
        assert job.code() == code, str(job)
        return
    codes = {r: job.code(r) for r in job.processes}
    assert codes[rank] in (code, 128 - code) and 0 not in codes.values(), f"{codes}: {job}"


# ---- killed, raising, asleep, absent, of other shapes: with and without the launcher


@pytest.mark.each_value
@EITHER
@pytest.mark.parametrize("rank", [0, 2])
def test_killed_in_the_middle_of_a_step(start, row, rank, how):
    job = start("killed", rank, how)
    assert job.wait("fault")["in_the_step"]
    seconds = job.ended(RAISED)
    assert_codes(job, 128 + signal.SIGKILL, rank)
    assert_named(job, rank)
    if how == "launch":
        assert job.report().startswith(f"jdp launch: rank {rank} was ended by SIGKILL after "), str(job)
    row(f"kill -9 of rank {rank} in a step", job, seconds)


@pytest.mark.each_value
@EITHER
@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_an_exception(start, row, when, how):
    job = start(f"raises_{when}", how=how)
    seconds = job.ended(RAISED)
    assert_codes(job, 1)
    assert_named(job, 2)
    assert sum(line.startswith("ValueError: row 17 is no good") for line in job.printed(2)) == 1, str(job)
    if how == "launch":  # the culprit's own traceback comes last
        assert job.report().startswith("jdp launch: rank 2 failed with exit code 1 after "), str(job)
        assert "[2] Traceback (most recent call last):" in job.report(), str(job)
        assert "[2] ValueError: row 17 is no good" in job.report(), str(job)
    else:
        for other in (0, 1, 3):
            said = "jdp: process 2 has failed (ValueError: row 17 is no good"
            assert any(said in line for line in job.printed(other)), str(job)
    row(f"ValueError on rank 2 {when} a step", job, seconds)


@pytest.fixture
def both(start, tmp_path):
    """`both(case)`: a job under the launcher and one without, at once, for they sleep most of the time."""
    return lambda case, **options: [
        start(case, how=how, folder=tmp_path / how, **options) for how in ("launch", "plain")
    ]


def test_asleep(both, row):
    """Its heartbeats go on: only the others, who wait for it, can know."""
    for job in both("asleep"):
        seconds = job.ended(STUCK)
        assert_named(job, 2)
        assert 0 not in [p.returncode for p in job.processes.values()]
        row("rank 2 sleeps forever (time.sleep)", job, seconds)


def test_stopped(both, row):
    """Without a launcher nobody can end a process that is stopped; once it goes on, it ends, and makes no step."""
    lost = {"launch": "nothing", "plain": "nothing (the stopped one ends once it is continued)"}
    for job in both("stopped"):
        seconds = job.ended(STUCK, besides=[2] if job.how == "plain" else [])
        assert_named(job, 2)
        if job.how == "plain":
            began = time.monotonic()
            job.processes[2].send_signal(signal.SIGCONT)
            job.ended(RAISED, since=began)
            assert not [note for note in job.notes("step", rank=2) if note["time"] > began], str(job)
        assert 0 not in [p.returncode for p in job.processes.values()]
        row("rank 2 stopped (SIGSTOP)", job, seconds, lost[job.how])


ONE = ["-n", "2", "--devices-per-process", "1"]  # where a program computes in the thread that dispatches it
TWO = ["-n", "2", "--devices-per-process", "2"]
OF_TWO = pytest.mark.parametrize("options", [ONE, TWO], ids=["one_device", "two_devices"])


@OF_TWO
@pytest.mark.parametrize(
    ("case", "limit", "words"),
    [
        ("asleep", STUCK, r"process 1 did not come to (it|this call)"),
        ("asleep_before_its_save", 90, r"jdp.Checkpointer: process 0 has waited .* process 1 did not come to it"),
        ("asleep_in_a_callback", 40, r"process 1 has been for \d+ s in a Python function that the program calls"),
    ],
    ids=["asleep", "save", "callback"],
)
def test_asleep_beside_one_other(start, row, case, limit, words, options):
    job = start(case, 1, options=options)
    seconds = job.ended(limit)
    assert job.code() == WAITED
    said = "\n".join(job.printed(0))
    assert re.search(words, said), said
    assert_named(job, 1)
    row(f"rank 1 of 2, {options[-1]} device(s) each: {case}", job, seconds)


@OF_TWO
def test_process_0_is_stopped(start, row, options):
    job = start("stopped", 0, options=options)
    seconds = job.ended(STUCK)
    assert job.code() == WAITED and "process 0 does not answer: it is stopped." in job.report(), str(job)
    row(f"rank 0 of 2, {options[-1]} device(s) each: stopped", job, seconds)


@OF_TWO
def test_one_call_more(start, row, options):
    """Who waits says for whom, and where to look."""
    job = start("one_call_more", 1, options=options)
    seconds = job.ended(RAISED)
    assert re.search("process 0 has ended its program", job.report()), str(job)
    assert "if jax.process_index() == 0" in job.report() and "rank 1" in job.report(), str(job)
    row(f"rank 1 of 2, {options[-1]} device(s) each: one call more", job, seconds)


@OF_TWO
def test_a_loop_of_prefetch_that_one_process_leaves(start, row, options):
    """It begins the next loop where the other takes a step: nobody is behind, and both would wait forever."""
    job = start("a_loop_left", 1, options=options)
    seconds = job.ended(STUCK)
    said = "\n".join([*job.printed(0), *job.printed(1)])
    words = r"is at another call in its place, jdp\.(prefetch|train_step)|did not come to this call"
    assert job.code() in (WAITED, 1) and re.search(words, said), str(job)
    row(f"rank 1 of 2, {options[-1]} device(s) each: a loop of prefetch left, and the next one begun", job, seconds)


def test_the_process_whose_loader_fails_is_left_out(start, row):
    """The other, which hears of the error in the place of a batch, has not failed itself."""
    job = start("loader_fails", 0, options=[*ONE, "--max-restarts", "3", "--min-processes", "1"])
    seconds = job.ended(START)
    said = job.said()
    assert job.code() == 0, str(job)
    assert said.count("rank 0 failed with exit code 1 after") == 2 and "rank 1 " not in said, str(job)
    assert "for the second time running, and is left out; 1 of 2 go on" in said, str(job)
    row("OSError in the loader of rank 0 of 2, at each start (--min-processes 1)", job, seconds)


@OF_TWO
def test_one_save_more(start, row, options):
    """A process that saves alone, after the others have ended, says whom it waits for."""
    job = start("one_save_more", 1, options=options)
    seconds = job.ended(RAISED)
    assert re.search(r"jdp.Checkpointer: .*process 0 has ended its program", job.report()), str(job)
    row(f"rank 1 of 2, {options[-1]} device(s) each: one save more", job, seconds)


@OF_TWO
def test_os_exit(start, row, options):
    """With code 0, which the launcher takes for a good end: the others say who has left them."""
    job = start("os_exit", 1, options=options)
    seconds = job.ended(RAISED)
    assert job.code() == WAITED and "process 1 ended without a word" in job.report(), str(job)
    assert "Traceback" not in job.report(), str(job)
    row(f"rank 1 of 2, {options[-1]} device(s) each: os._exit(0)", job, seconds)


def test_asleep_between_a_batch_and_its_step(both, row):
    """The others wait inside of a program that has been dispatched: no call of theirs is left to raise in."""
    for job in both("asleep_ahead"):
        seconds = job.ended(STUCK)
        assert_named(job, 2)
        codes = [job.code()] if job.how == "launch" else [job.code(r) for r in (0, 1, 3)]
        assert WAITED in codes and {*codes} <= {WAITED, FOR_ANOTHER}, str(job)
        said = "\n".join(line for r in (0, 1, 3) for line in job.printed(r))
        waited = r"jdp.train_step\S*: process \d has waited 2\d s for it, and process 2 did not come to it"
        assert re.search(waited, said), said
        row("rank 2 sleeps forever, between a batch and its step", job, seconds)


@pytest.mark.parametrize("attempt", range(int(os.environ.get("JDP_FAULTS_STOPS", 1))))
def test_stopped_inside_of_a_step(start, row, attempt):
    """XLA waits there for half an hour, and NCCL forever."""
    job = start("stopped_in", rank=attempt % N, how="launch")
    seconds = job.ended(STUCK)
    assert_named(job, attempt % N)
    assert job.code() == WAITED and "waited in vain" in job.report(), str(job)
    assert "before any other" not in job.report(), str(job)
    row(f"rank {attempt % N} stopped (SIGSTOP) inside of a step", job, seconds)


@pytest.mark.parametrize("rank", [0, 2])
def test_stopped_while_it_compiles(start, row, rank):
    """The others wait for a compilation as long as it takes, and not for a process that is stopped in it."""
    job = start("stopped_compiling", rank=rank, how="launch")
    seconds = job.ended(STUCK)
    assert_named(job, rank)
    assert job.code() == WAITED, str(job)
    row(f"rank {rank} stopped (SIGSTOP) while it compiles a step", job, seconds)


def test_a_process_that_compiles_is_not_late(start):
    job = start("compiles", how="launch")
    job.processes["launcher"].wait(timeout=300)
    ended_well(job)
    assert [note["seconds"] >= 15 for note in job.notes("compiled", rank=2)] == [True, True], str(job)


def test_never_starts(both, row):
    """`initialize(start_timeout=10)`, and one does not come: under the launcher it hangs before `initialize`."""
    for job in both("absent", absent=2):
        job.wait("begin", count=N if job.how == "launch" else N - 1)
        since = max(note["time"] for note in job.notes("begin"))
        seconds = job.ended(STUCK, since)
        assert_named(job, 2)
        assert 0 not in [p.returncode for p in job.processes.values()]
        row("rank 2 never starts (start_timeout=10)", job, seconds)


@EITHER
def test_other_shapes(start, row, how):
    job = start("shapes", how=how)
    seconds = job.ended(RAISED)
    assert_named(job, 2)
    expected = "['x']: processes 0, 1, 3 have float32[*, 4]; process 2 has float32[*, 5]"
    said = [job.report()] if how == "launch" else ["\n".join(job.printed(r)) for r in range(N)]
    for text in said:
        assert "jdp.train_step: the processes' batches differ: " in text and expected in text, str(job)
    assert 0 not in [p.returncode for p in job.processes.values()]
    row("another batch shape on rank 2", job, seconds)


# ---- under the launcher only: what differs, who leaves, what is late


def caught(job, name, culprit=2):
    """What each process raised in a call that they survived, and the seconds it took; all have to raise."""
    found, seconds = {}, 0.0
    for rank in range(N):
        found[rank] = job.wait(name, rank=rank)
        seconds = max(seconds, found[rank]["time"] - job.wait(f"{name} begins", rank=rank)["time"])
    texts = {rank: note["text"] for rank, note in found.items()}
    assert seconds < RAISED, f"{name}: {seconds:.1f} s"
    for rank, text in texts.items():
        assert names(text, culprit), f"{name}: process {rank} does not name {culprit}: {text}"
    return texts, seconds


def said(texts):
    """Who said what, for the table."""
    by_text = {}
    for rank, text in texts.items():
        by_text.setdefault(short(text, 230), []).append(rank)
    return " · ".join(f"{','.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())


def well(job, *after):
    """The processes go on together after what they survived, and end as they should."""
    for name in after:
        job.wait(name, count=N)
        assert len({json.dumps([n["loss"], n["params"]]) for n in job.notes(name)}) == 1, str(job)
    ended_well(job)


def ended_well(job):
    assert job.processes["launcher"].wait(timeout=START) == 0, str(job)
    assert not job.report() and not marked(job.mark), str(job)


def test_other_programs(start, row):
    """Each is an error on every process, in the same call; all could go on."""
    job = start("programs")
    different = "the processes are about to run different things, which differ in the"
    for name, what, expected in (
        ("rate", "another learning rate", rf"train_step.mse: {different} program: .*process 2 has .*2\.0+e-01"),
        ("verb", "another verb", "processes 0, 1, 3 have train_step; process 2 has value_and_grad"),
        (
            "size",
            "another model size",
            r"\['params'\]\['bias'\]: processes 0, 1, 3 have .*\[8\]; process 2 has .*\[9\]",
        ),
        ("optimizer", "another optimizer", r"\['opt_state'\].*: processes 0, 1, 3 have .*; process 2 has nothing"),
        (
            "loop",
            "a plain loop ends early, then evaluates,",
            "0, 1, 3 have train_step; process 2 has DataParallel.*prefetch",
        ),
    ):
        texts, seconds = caught(job, name)
        for text in texts.values():
            assert text.startswith("DesyncError: jdp.") and re.search(expected, text), text
        row(f"{what} on rank 2", job, seconds, said=said(texts))
    well(job, "after rate", "after verb", "after loop")


def test_other_parameters(start, row):
    job = start("parameters")
    for name, beginning, leaf in (
        ("init", "jdp.init: of 2 replicated leaves 1 differ: ", r"\['params'\]\['kernel'\]"),
        ("step.init", "jdp.train_step: of 2 replicated leaves 1 differ: ", r"\['params'\]\['b'\]"),
        ("nnx", "jdp.check_replicas: ", "kernel"),
        ("ulp", "jdp.train_step: ", r"\['w'\]"),
    ):
        texts, seconds = caught(job, name)
        device = r"CpuDevice\(id=4097\)"  # the second of process 2, and for one ulp that alone
        own = (
            rf"on process 2, {device} is not"
            if name == "ulp"
            else rf"on process 2, CpuDevice\(id=4096\), {device} is not"
        )
        for text in texts.values():
            assert text.startswith(f"ValueError: {beginning}"), text
            assert re.search(rf"{leaf}[^,]* {own} what it is on {7 if name == 'ulp' else 6} of 8 devices", text), text
        what = {"init": "own seed, dp.init", "step.init": "another bias, step.init", "nnx": "own seed, NNX"}
        row(f"{what.get(name, 'one ulp at step 7, check_replicas=5')} (rank 2)", job, seconds, said=said(texts))
    # Begun after step 10, and read some steps later, but on all processes in the same one.
    assert {max(note["k"] for note in job.notes("drift", rank=rank)) for rank in range(N)} == {14}
    well(job, "after ulp")


def test_uneven_numbers_of_batches(start, row):
    """Three, five, none and two batches: all go on to the end, and it is as with one process that has all rows."""
    job = start("uneven")
    job.wait("end", count=N)
    tx, params, losses = optax.sgd(0.1), worker.variables()["params"], []
    state = tx.init(params)
    for k in range(max(worker.COUNTS)):
        own = [worker.batch_of(r, k, rows=3 + r) for r in range(N) if k < worker.COUNTS[r]]
        batch = {name: np.concatenate([b[name] for b in own]) for name in ("x", "y")}
        loss, grads = jax.value_and_grad(lambda p, b=batch: worker.mse({"params": p}, b))(params)
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    for note in job.notes("end"):
        np.testing.assert_allclose(note["losses"], losses, rtol=1e-5)
        for found, expected in zip(note["params"], jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert len({json.dumps(note["params"]) for note in job.notes("end")}) == 1
    ended_well(job)
    row("3, 5, 0 and 2 batches, dp.prefetch", job, 0.0, said="nothing; losses and parameters are those of one process")


def test_leaves_the_loop_early(start, row):
    """A plain loop, one process has fewer batches and ends: the others say so, and what to use."""
    job = start("leaves")
    seconds = job.ended(RAISED)
    assert job.code() == 1
    assert_named(job, 2)
    for rank in (0, 1, 3):
        text = "\n".join(job.printed(rank))
        assert "jdp.train_step: process 2 has ended its program" in text and "dp.prefetch" in text, str(job)
    row("rank 2 leaves a plain loop early", job, seconds)


@pytest.mark.parametrize("case", ["exits", "exits_by_the_builtin"])
def test_sys_exit_on_one_rank(start, row, case):
    job = start(case)
    seconds = job.ended(RAISED)
    row(f"{'exit' if 'builtin' in case else 'sys.exit'}(3) on rank 2", job, seconds)
    assert_named(job, 2)
    assert job.code() == 3, str(job)


@pytest.mark.parametrize("case", ["killed", "raises", "stopped"])
def test_after_the_others_have_ended(start, row, case):
    """They wait for the last, and see what happens to it; JAX alone would wait for a minute, and abort them."""
    job = start(f"{case}_at_the_end", how="plain")
    stopped = case == "stopped"
    seconds = job.ended(STUCK, besides=[2]) if stopped else job.ended(RAISED)
    assert {job.code(r) for r in (0, 1, 3)} <= {FOR_ANOTHER, WAITED}, str(job)
    assert_named(job, 2)
    row(f"rank 2, after the others have ended: {case}", job, seconds)


def test_work_after_the_others_have_ended(start, row):
    job = start("works_at_the_end")
    job.wait("end", count=N)
    ended_well(job)
    assert not any(job.news(rank) != "nothing" for rank in range(N)), str(job)
    row("rank 2 works for 20 s after the others have ended", job, 20.0, said="nothing")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_leaves_its_loop_with_code_0(start, row, rank):
    """The other says so, and the job ends; process 0, which the others need for that, waits for them."""
    job = start("exits_with_0", rank, options=ONE)
    seconds = job.ended(RAISED)
    assert job.code() in (1, WAITED) and f"process {rank} has ended its program" in job.report(), str(job)
    row(f"sys.exit(0) on rank {rank} of 2 in a loop of prefetch", job, seconds)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_ends_before_its_first_call(start, row, rank):
    """The other waits for the devices of both inside of JAX, which would do so for minutes."""
    job = start("exits_before_the_first_call", rank, options=ONE)
    seconds = job.ended(STUCK)
    assert job.code() == WAITED, str(job)
    words = f"for the devices of all processes, and process {rank} has ended its program without asking for them"
    assert words in job.report(), str(job)
    row(f"sys.exit(0) on rank {rank} of 2 before its first call", job, seconds)


def test_late_is_no_fault(start, row):
    """A process that is 15 s late, and then compiles for longer than the time-out."""
    job = start("late")
    job.wait("step", rank=0, k=6, seconds=START + 60)
    times = {note["k"]: note["time"] for note in job.notes("step", rank=0)}
    assert times[3] - times[2] > 14 and times[5] - times[4] > 21
    ended_well(job)
    assert not any(job.news(rank) != "nothing" for rank in range(N)), str(job)
    row("rank 2 is 15 s late", job, times[3] - times[2], said="nothing, the job goes on")
    row("rank 2 compiles for 22 s", job, times[5] - times[4], said="nothing, the job goes on")


def test_what_a_job_survives(start, row):
    """A second thread, and a row of NaN on one process."""
    job = start("alive")
    job.wait("end", count=N)
    thread = job.wait("thread", rank=2)
    assert thread["text"].startswith("RuntimeError: jdp.train_step: called from thread 'second'"), thread
    seconds = thread["time"] - job.wait("thread begins")["time"]
    assert seconds < 1
    row("a second thread of rank 2 calls a step", job, seconds, said=said({2: thread["text"]}))
    for note in job.notes("nan"):
        # Row 2 of process 2, which its second replica has: the sixth of all.
        assert note["skipped"] and note["same"], note
        assert note["found"] == [[5, 2, [2], ["['b']", "['w']"]]], note
    assert len(job.notes("nan")) == N
    took = max(n["time"] for n in job.notes("nan")) - thread["time"]
    row(
        "a NaN in a row of rank 2",
        job,
        took,
        "the step",
        said="all: skipped; find_nonfinite: replica 5, process 2, row 2",
    )
    ends = job.notes("end")
    assert len({note["loss"] for note in ends}) == 1 and np.isfinite(ends[0]["loss"])
    assert [(note["skipped"], note["step"]) for note in ends] == [(False, 2)] * N
    ended_well(job)


# ---- signals


def save_and_end(job, sender, row, fault):
    """All processes stop after the same step, save, and end well, within the time; the step and the state."""
    since = sender()
    seconds = job.ended(RAISED + 4 * max(note["saved"] for note in job.notes("from")), since)
    assert job.code() == 0, str(job)
    last = [job.notes("step", rank=rank)[-1] for rank in range(N)]
    assert len({json.dumps([note["k"], note["state"]]) for note in last}) == 1, str(job)
    k = last[0]["k"]
    assert max(map(int, os.listdir(job.folder / "run"))) == k
    text = f"jdp: SIGTERM: saved step {k} in {job.folder / 'run'}; ending"
    assert [sum(text in line for line in job.printed(rank)) for rank in range(N)] == [1, 0, 0, 0], str(job)
    row(fault, job, seconds, said=f"0: {short(text.replace(str(job.folder), ''))}; all: exit 0 after the same step")
    return last[0]


def test_sigterm_saves_and_the_run_goes_on(start, row, tmp_path):
    job = start("preempted", options=["--preemption-grace", "240"])

    def to_a_rank():
        job.wait("step", rank=0, k=5)
        os.kill(job.wait("begin", rank=2)["pid"], signal.SIGTERM)
        return time.monotonic()

    last = save_and_end(job, to_a_rank, row, "SIGTERM to rank 2, with a Checkpointer")
    for notes in tmp_path.glob("notes-*"):
        notes.unlink()
    again = start("preempted", options=["--preemption-grace", "240"])

    def to_the_launcher():
        again.wait("step", rank=0, k=last["k"] + 5)
        again.processes["launcher"].send_signal(signal.SIGTERM)
        return time.monotonic()

    end = save_and_end(again, to_the_launcher, row, "SIGTERM to the launcher, with a Checkpointer")
    for note in again.notes("from"):
        assert (note["k"], note["state"]) == (last["k"], last["state"])
    assert end["k"] > last["k"] + 4
    assert [note["k"] for note in again.notes("step", rank=3)] == list(range(last["k"] + 1, end["k"] + 1))


def test_ctrl_c_at_the_launcher(start, row):
    job = start("run")
    job.wait("step", rank=0, k=5)
    began = time.monotonic()
    job.processes["launcher"].send_signal(signal.SIGINT)
    seconds = job.ended(RAISED, since=began)
    assert job.code() == 130, str(job)
    assert "jdp launch: SIGINT is handed on to the processes" in job.said(), str(job)
    assert not any("Traceback" in line for rank in range(N) for line in job.printed(rank)), str(job)
    row("Ctrl-C at the launcher", job, seconds)


def test_sigterm_to_a_job_that_does_not_heed_it(start, row):
    """Without a Checkpointer JAX swallows it; the launcher waits, and kills."""
    job = start("run", options=["--preemption-grace", "2"])
    job.wait("step", rank=0, k=5)
    began = time.monotonic()
    job.processes["launcher"].send_signal(signal.SIGTERM)
    seconds = job.ended(RAISED, since=began)
    assert job.code() == 143 and "ranks 0, 1, 2, 3 did not end in time; killed" in job.said(), str(job)
    assert seconds > 2
    row(
        "SIGTERM to the launcher, no rank heeds it (--preemption-grace 2)",
        job,
        seconds,
        said=job.said().splitlines()[-1],
    )


def test_a_failure_beside_a_rank_that_ignores_sigterm(start, row):
    """Before `initialize`, when nobody but the launcher can end it."""
    job = start("deaf")
    job.wait("deaf")
    seconds = job.ended(RAISED)
    assert job.code() == 1, str(job)
    assert job.report().startswith("jdp launch: rank 2 failed with exit code 1"), str(job)
    assert "[2] ValueError: row 17 is no good" in job.report()
    row("rank 2 raises, rank 1 ignores SIGTERM and sleeps", job, seconds)


def test_the_launcher_is_killed(start, row):
    job = start("run")
    job.wait("step", count=N, k=5)
    began = time.monotonic()
    job.processes["launcher"].kill()
    seconds = job.ended(3, since=began)
    row("kill -9 of the launcher", job, seconds, said="nothing; no process is left")


# ---- the port


def test_the_port_is_taken(start, row):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job = start("port_taken", how="plain", port=port)
        job.wait("begin", count=N)
        since = max(note["time"] for note in job.notes("begin"))
        seconds = job.ended(2 * STUCK, since)  # JAX aborts the others after their own time-out, each with a dump
    assert 0 not in [p.returncode for p in job.processes.values()]
    text = "\n".join(job.printed(0))
    assert re.search(rf"(?i)jdp\.\S*initialize.*{port}.*in use", text), str(job)
    row("the port is taken", job, seconds)


def test_the_launcher_takes_another_port(start, row):
    job = start("port_taken", options=["--max-restarts", "1"])
    job.wait("end", count=N, attempt=1)
    seconds = job.wait("end", attempt=1)["time"] - job.wait("fault")["time"]
    assert seconds < STUCK
    ended_well(job)
    assert len(re.findall(r"jdp launch: rank \d .*; all 4 processes start again \(restart 1 of 1\)", job.said())) == 1
    row("the port is taken in the first attempt (--max-restarts 1)", job, seconds)


# ---- restart is exact


def begun(job, attempt):
    """When the first process of the attempt was started, and the seconds from there to rank 0's first step."""
    started = min(note["time"] - note["alive"] for note in job.notes("from", attempt=attempt))
    return started, job.notes("step", rank=0, attempt=attempt)[0]["time"] - started


@pytest.mark.parametrize(("case", "count"), [("restart", 2), ("restart_nnx", 1)])
def test_restart_is_exact(start, row, tmp_path, case, count):
    """Random ranks are killed at random steps: every loss, and the parameters, are those of the run without."""
    rng = random.Random(case)
    bounds = np.linspace(5, worker.TOTAL - 2, count + 1).astype(int)
    kills = [[rng.randrange(N), rng.randrange(a, b)] for a, b in zip(bounds, bounds[1:], strict=False)]
    runs = {}
    for name, plan in (("undisturbed", []), ("killed", kills)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "kills.json").write_text(json.dumps(plan))
        runs[name] = job = start(case, folder=folder, options=["--max-restarts", "3"])
        job.wait("end", count=N, seconds=START * (1 + len(plan)))
        ended_well(job)
    good, bad = runs["undisturbed"], runs["killed"]
    states = {json.dumps(note["state"]) for job in runs.values() for note in job.notes("end")}
    assert len(states) == 1, str(bad)  # parameters, moments and keys, of all processes
    expected = {note["k"]: note["loss"] for note in good.notes("step", rank=0)}
    assert list(expected) == list(range(worker.TOTAL)) and len(set(expected.values())) == worker.TOTAL
    found = bad.notes("step", rank=0)
    assert {note["k"] for note in found} == set(expected)
    for note in found:  # those that were computed again, too
        assert note["loss"] == expected[note["k"]], note
    for attempt, (rank, k) in enumerate(kills):
        fault = bad.wait("fault", attempt=attempt)
        assert (fault["rank"], fault["k"]) == (rank, k)
        first = bad.notes("step", rank=0, attempt=attempt + 1)[0]
        # It went on from a checkpoint, not from the beginning, and did what was lost again.
        assert 0 < first["k"] <= k and first["k"] % 3 == 0, first
        # How long a start takes is for the machine's load to say; how soon it begins is for the launcher.
        started, start_up = begun(bad, attempt + 1)
        seconds, slowest = first["time"] - fault["time"], max(begun(job, 0)[1] for job in runs.values())
        assert 0 < started - fault["time"] < 15, f"{seconds:.1f} s, of which {start_up:.1f} are the start"
        assert seconds < 15 + 2 * slowest, f"{seconds:.1f} s; a start of a run from its beginning took {slowest:.1f}"
        print(f"killed {rank} at {k}: next good step after {seconds:.1f} s; a start takes {start_up:.1f} s")
        lost = f"steps {first['k']} to {k} are made again, to the last bit"
        said = bad.said().splitlines()[1 + attempt]
        row(f"kill -9 of rank {rank} at step {k}, {case}", bad, seconds, lost, said=said)


# ---- every row once


def undisturbed():
    """The rows of each batch, and the parameters in the end, of one device by plain numpy and optax."""
    rows, tx, v = worker.Rows(), optax.sgd(0.1), worker.variables()
    orders = [np.random.default_rng([rows.seed, epoch]).permutation(rows.count) for epoch in range(rows.epochs)]
    batches = [order[k : k + rows.size].tolist() for order in orders for k in range(0, rows.count, rows.size)]
    params, state = v["params"], tx.init(v["params"])
    for batch in batches:
        if rows.bad not in batch:
            x = rows.x[batch]
            data = {"x": x, "y": np.sin(x.sum(-1, keepdims=True))}
            grads = jax.grad(lambda p, data=data: worker.mse({"params": p}, data))(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return batches, params


GPT = ROOT / "examples" / "char_gpt.py"
SMALL = "--steps 80 --batch-size 16 --width 32 --layers 1 --context 32 --save-every 4".split()
BITS = ("--replicas", "8", "--deterministic")


def lose_the_last(job, checkpoints, each):
    """For every so many steps of the run the last process dies, in each attempt until the launcher has left it out."""
    end = time.monotonic() + 4 * START
    while job.processes["launcher"].poll() is None and time.monotonic() < end:
        lost = job.said().count("is left out")
        newest = max((int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal()), default=0)
        for pid in marked(job.mark) if newest >= each * (lost + 1) else ():
            with contextlib.suppress(OSError):
                lines = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
                of = dict(line.split("=", 1) for line in lines if line.startswith("JDP_"))
                if 0 < int(of.get("JDP_PROCESS_ID", 0)) == int(of["JDP_NUM_PROCESSES"]) - 1:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def losses_of(checkpoints):
    """The loss of each step, as the example keeps them beside its last state."""
    return json.loads((checkpoints / "80/jdp/metadata").read_text())["content"]["data"]["losses"]


def attempts_of(job):
    """Of each attempt that came so far: how many processes it had, and after which step it began."""
    found, count = [(4, 0)], 4
    for line in job.printed(0):
        if said := re.match(r"devices .* in (\d) process", line):
            count = int(said[1])
        if said := re.match(r"going on  after step (\d+)", line):
            found.append((count, int(said[1])))
    return found


def draw_losses(want, found, attempts, path):
    """The curve of the undisturbed run, that of the job on it, and where a process was lost."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "jdp"
    figure, axes = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
    axes.plot(range(1, 81), want, color="#b9c4d4", linewidth=5, label="one process, undisturbed")
    labels, red = {4: "4 processes", 2: "2 of the 4", 1: "1 of the 4"}, "#c1121f"
    for (count, begin), (_, end) in zip(attempts, [*attempts[1:], (1, 80)], strict=True):
        color, steps = {4: "#1b6ca8", 2: "#2a9d8f", 1: "#e07a1f"}[count], range(max(1, begin), end + 1)
        axes.plot(steps, [found[k - 1] for k in steps], color=color, label=labels.pop(count, None))
    for at in {begin for _, begin in attempts[1:]}:
        axes.axvline(at, color=red, linestyle=":", linewidth=1)
        where = dict(xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right", fontsize=8, color=red)
        axes.annotate("a process dies", (at, 0.97), **where)
    axes.set(xlabel="step", ylabel="bits per character")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def test_a_job_that_loses_processes_ends_with_the_bits_of_one(start, row, tmp_path):
    """Each 20 steps the last of the processes dies for good: two of four go on, two with the spare one, then one."""
    whole, lossy = tmp_path / "whole", tmp_path / "lossy"
    script = [str(GPT), *SMALL, *BITS, "--picture", str(tmp_path / "curve.png"), "--checkpoints"]
    alone = start(folder=tmp_path / "alone", options=["-n", "1"], script=[*script, str(whole)])
    assert alone.processes["launcher"].wait(timeout=START) == 0, str(alone)
    options = ["-n", "4", "--min-processes", "1", "--replicas", "8", "--max-restarts", "9"]
    job = start(folder=tmp_path / "job", options=options, script=[*script, str(lossy)])
    lose_the_last(job, lossy, each=20)
    assert job.code() == 0, str(job)
    assert job.said().count("is left out") == 3, str(job)
    (want,), (found,) = ([x for x in j.printed(0) if x.startswith("parameters SHA-256 ")] for j in (alone, job))
    assert found == want
    losses, attempts = losses_of(whole), attempts_of(job)
    assert losses_of(lossy) == losses and len(losses) == 80 and losses[-1] < 0.7 * losses[0]
    assert {count for count, _ in attempts} == {4, 2, 1} and attempts[-1][1] >= 60
    if path := os.environ.get("JDP_FAULTS_PICTURE"):
        draw_losses(losses, losses_of(lossy), attempts, path)
    said = "the bits of one process from the start"
    row("the last process dies for good each 20 steps: 4 -> 2 -> 2 -> 1", job, 0.0, said=said)


def test_every_row_once_with_other_numbers_of_processes(start, row, tmp_path):
    """1, 4, 2 and 3 processes, each killed in the middle of an epoch: as if there had been one run."""
    batches, params = undisturbed()
    runs = [(1, [0, 5]), (4, [2, 10]), (2, [1, 17]), (3, None)]  # how many, and who is killed after which batch
    folder = tmp_path / "job"
    for number, (count, kill) in enumerate(runs):
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps({"run": number, "kill": kill}))
        job = start("every_row", folder=folder, options=["-n", str(count)])
        if kill:
            job.wait("fault", run=number)
            job.ended(STUCK, since=job.wait("fault", run=number)["time"])
        else:
            job.wait("end", count=count)
            assert job.processes["launcher"].wait(timeout=START) == 0, str(job)
    began = [job.wait("from", run=number)["taken"] for number in range(len(runs))]
    assert began[0] == 0 and all(0 < at < kill[1] for at, (_, kill) in zip(began[1:], runs, strict=False))
    trained = []
    for number, (count, _) in enumerate(runs):
        until = [*began, len(batches)][number + 1]  # what came after the last checkpoint is cut
        for taken in range(began[number] + 1, until + 1):
            notes = sorted(job.notes("rows", run=number, taken=taken), key=lambda note: note["rank"])
            assert [note["rank"] for note in notes] == list(range(count))
            trained.append(sum((note["rows"] for note in notes), []))
            assert {note["skipped"] for note in notes} == {worker.Rows.bad in trained[-1]}
    assert trained == batches
    for end in job.notes("end"):
        assert end["taken"] == len(batches) == 21 and end["step"] == 18
        for found, expected in zip(end["params"], jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5)
    lost = f"batches {began[1] + 1} to 5, {began[2] + 1} to 10 and {began[3] + 1} to 17 are trained on again"
    row("kill -9 in mid-epoch, 1 -> 4 -> 2 -> 3 processes", job, 0.0, lost, said="no row twice, none left out")
