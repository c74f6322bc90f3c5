"""Jobs that somebody else's launcher starts: what they print and note, how they end; and nothing is left of them."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import guard
import numpy as np
import pytest
from launchers_worker import batch_of

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 4
LONG = 400  # steps of a job that is ended before
BOUND = 120  # seconds to start and to train, on a busy machine
WORKER = [sys.executable, str(HERE / "launchers_worker.py")]
# A run that ends with the same bits on any number of processes.
GPT = [sys.executable, str(ROOT / "examples" / "char_gpt.py"), "--steps", "60", "--save-every", "4"]
GPT += "--batch-size 16 --width 32 --layers 1 --context 32 --replicas 8 --deterministic --checkpoints run".split()
MARK = "JDP_LAUNCHED"
KEPT = re.compile(rf"PATH|HOME|LANG|TMPDIR|{guard.MARK}|JAX_(COMPILATION|PERSISTENT|DISABLE)_.*|XLA_FLAGS")


def environment(mark, **more):
    """Nothing of the launcher that has perhaps started these tests; and the mark by which all is found again."""
    return {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)} | {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "NPROC": "8", "PYTHONPATH": str(ROOT), MARK: mark,
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **more
    }  # fmt: skip


class Job:
    """What a launcher has started, what it prints, and what its processes note."""

    def __init__(self, folder, mark):
        self.folder, self.mark, self.process = folder, mark, None

    def start(self, *command, **environ):
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], env=environment(self.mark, **environ), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, cwd=self.folder, start_new_session=True
            )  # fmt: skip
        return self

    def notes(self, began=None):
        """What each process has noted; of those alone that began at this step."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("rank-*.json")]
        return sorted((note for note in found if began in (None, note["began"])), key=lambda note: note["rank"])

    def until(self, reached, what, seconds=BOUND):
        end = time.monotonic() + seconds
        while not (found := reached()):
            assert time.monotonic() < end, f"not {what} within {seconds} s: {self}"
            time.sleep(0.1)
        return found

    def trains(self):
        """Waits until both processes have made two steps."""
        noted = lambda: [note for note in self.notes() if len(note["losses"]) >= 2]  # noqa: E731
        self.until(lambda: len(noted()) == 2 or self.process.poll() is not None, "training")
        assert self.process.poll() is None, f"it ended: {self}"
        return self.notes()

    def ends(self, seconds=BOUND):
        """The launcher's exit code, when nothing that it has started runs any more."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it ran for {seconds} s: {self}")
        self.until(lambda: not guard.bearers(self.mark, MARK), "ended", 20)
        return code

    def killed(self, rank):
        """Kills the process in whose environment this is (`SLURM_PROCID=1`), when `GPT` has come to step 20."""
        steps = lambda: [path.name for path in self.folder.glob("run/*") if path.name.isdecimal()]  # noqa: E731
        self.until(lambda: max(map(int, steps()), default=0) >= 20, "at step 20", 2 * BOUND)
        for pid in guard.bearers(self.mark, MARK):
            with contextlib.suppress(OSError):
                if rank in pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0"):
                    os.kill(pid, signal.SIGKILL)

    def log(self):
        return (self.folder / "log").read_text()

    def __str__(self):
        return f"{self.notes()}\n{self.log()[-6000:]}"

    def stop(self):
        """Nothing is left, whatever happened."""
        while alive := guard.bearers(self.mark, MARK):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if self.process is not None:
            self.process.wait(10)


def losses(steps, processes=2):
    """Those of numpy, on the rows of all processes at once."""
    w, found = np.full((4, 1), 0.1), []
    for k in range(steps):
        parts = [batch_of(process, k) for process in range(processes)]
        x, y = (np.concatenate([part[name] for part in parts]) for name in "xy")
        found.append(np.mean((x @ w - y) ** 2))
        w -= 0.1 * 2 / len(x) * x.T @ (x @ w - y)
    return found


def check_one_job(job, code=0, steps=STEPS, began=None):
    assert code == 0, job
    found = job.notes(began)
    assert [(note["rank"], note["n"]) for note in found] == [(0, 2), (1, 2)], job
    assert found[0]["losses"] == found[1]["losses"]
    np.testing.assert_allclose(found[0]["losses"], losses(steps)[found[0]["began"] :], rtol=1e-4)


def check_went_on(job, alone):
    """`GPT` has begun on two processes, has gone on with one, and has the bits of one that nobody disturbed."""
    counts = re.findall(r"^devices .* in (\d) process", job.log(), re.M)
    assert counts == ["2", "1"] and re.search(r"^going on  after step \d\d of 60", job.log(), re.M), job
    sums = [re.findall(r"^parameters SHA-256 (\w+)$", one.log(), re.M) for one in (job, alone)]
    assert len(sums[1]) == 1 and sums[0] == sums[1], job


def check_saved(job):
    """After a SIGTERM all have ended at the same step, which is returned, and have saved it."""
    steps = {len(note["losses"]) for note in job.notes()}
    assert len(steps) == 1 and f"jdp: SIGTERM: saved step {max(steps)} in " in job.log(), job
    return steps.pop()


def said(*command):
    """What a command prints; nothing where it is not there."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment("probe"))
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout + run.stderr
