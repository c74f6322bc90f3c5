"""examples/multi_process.py: the same numbers on 1, 2 and 4 processes, and after a kill or a SIGTERM the same end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="finds a process by its environment in /proc"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "multi_process.py"
# 6 batches of 63 rows in an epoch: uneven over 2 processes and over 4.
SETTINGS = ("--train-rows", "378", "--batch-size", "63", "--epochs", "4", "--save-every", "4")
STEPS = 4 * 6


class Job:
    """The example, started as a person starts it, in a folder of its own; nothing of it outlives the `with`."""

    def __init__(self, folder, env, *launch, checkpoints=None):
        self.folder = folder
        folder.mkdir()
        args = [str(SCRIPT), *SETTINGS, *(() if checkpoints is None else ("--checkpoints", str(checkpoints)))]
        head = ["-m", "jdp", "launch", *launch] if launch else ["-W", "error"]
        self._out, self._err = (folder / "out").open("w"), (folder / "err").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *head, *args], stdout=self._out, stderr=self._err, env=env, cwd=folder
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()  # the launcher's workers end with it
        self.process.wait()
        self._out.close()
        self._err.close()

    def end(self):
        """The lines that it printed, once it has ended well; Gloo's own left out."""
        code = self.process.wait(timeout=200)
        assert code == 0, (self.folder / "err").read_text()[-3000:]
        return [line for line in (self.folder / "out").read_text().splitlines() if "[Gloo]" not in line]

    def errors(self):
        return (self.folder / "err").read_text()

    def worker(self, rank):
        """The number of the process of that rank."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    if f"JDP_PROCESS_ID={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        return pid
        raise AssertionError(f"there is no rank {rank}")


def wait_for_checkpoint(job, folder, after=0):
    """Waits until a checkpoint of a later step is complete."""
    deadline = time.monotonic() + 200
    while not any(path.name.isdecimal() and int(path.name) > after for path in folder.glob("*")):
        assert job.process.poll() is None and time.monotonic() < deadline, job.errors()[-3000:]
        time.sleep(0.005)


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """The environment of all jobs, who share what they have compiled, with little effort."""
    left_out = ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")  # conftest's, for 8 devices
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("jax")),
        "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, env):
    """`jobs(*launch)`: what the example prints when nothing disturbs it; each is run once."""
    done = {}

    def jobs(*launch):
        if launch not in done:
            with Job(tmp_path_factory.mktemp("job") / "job", env, *launch) as job:
                done[launch] = job.end()
            assert (job.folder / "multi_process.png").read_bytes().startswith(b"\x89PNG")
        return done[launch]

    return jobs


def without_steps(lines):
    """The lines, but for those that tell every few seconds where it is: how many there are depends on the machine."""
    return [line for line in lines if not re.search(r"step \d+/\d+", line)]


def numbers(lines):
    """The losses and accuracies (as digits that were right) after each epoch and at the end, and the SHA-256."""
    text = "\n".join(lines)
    epochs = re.findall(r"epoch \d/4  loss ([\d.]+)  test accuracy ([\d.]+)%", text)
    right, rows, loss = re.search(r": ([\d,]+) of ([\d,]+) digits right; loss ([\d.]+)", text).groups()
    assert rows == "2,000"
    losses = [*(float(loss) for loss, _ in epochs), float(loss)]
    rights = [*(20 * float(accuracy) for _, accuracy in epochs), float(right.replace(",", ""))]
    return np.array(losses), np.array(rights), re.search(r"SHA-256 ([0-9a-f]{64})", text).group(1)


def test_the_numbers_are_those_of_one_process_and_one_process_prints(jobs):
    alone = jobs()
    losses, rights, _ = numbers(alone)
    assert len(losses) == 5 and losses[3] < 0.5 * losses[0]  # it learns, in all of the 24 steps
    for processes in ("2", "4"):
        lines = jobs("-n", processes)
        # A sum in another order differs in its last bits, and each step of Adam hands that on.
        found, hits, _ = numbers(lines)
        np.testing.assert_allclose(found, losses, atol=2e-4, rtol=0)
        np.testing.assert_allclose(hits, rights, atol=1.01, rtol=0)  # a digit between two classes may fall to either
        assert len(without_steps(lines)) == len(without_steps(alone)), lines
        assert all(line.startswith("[0] ") for line in lines), lines


def test_neither_a_sigterm_nor_a_kill_changes_a_bit_of_the_end(jobs, env, tmp_path):
    folder = tmp_path / "checkpoints"
    with Job(tmp_path / "stopped", env, "-n", "2", checkpoints=folder) as job:
        wait_for_checkpoint(job, folder)
        job.process.send_signal(signal.SIGTERM)
        lines = job.end()  # with exit code 0
    saved = [int(m[1]) for line in lines if (m := re.match(r"\[0\] jdp: SIGTERM: saved step (\d+) in ", line))]
    assert len(saved) == 1 and 4 <= saved[0] < STEPS - 4, lines
    assert not (job.folder / "multi_process.png").exists()

    with Job(tmp_path / "killed", env, "-n", "2", "--max-restarts", "1", checkpoints=folder) as job:
        wait_for_checkpoint(job, folder, after=saved[0])
        os.kill(job.worker(1), signal.SIGKILL)
        lines = job.end()
    assert "rank 1 was ended by SIGKILL" in job.errors() and "(restart 1 of 1)" in job.errors()
    first, second = map(int, re.findall(rf"going on  after step (\d+) of {STEPS}, from {folder}", "\n".join(lines)))
    assert saved[0] == first < second < STEPS and second % 4 == 0
    undisturbed = jobs("-n", "2")
    assert numbers(lines)[2] == numbers(undisturbed)[2]
    assert lines[-3] == undisturbed[-3] and "digits right; loss" in lines[-3]
