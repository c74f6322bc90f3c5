"""A run of the tests that is stopped leaves no process behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import guard
import pytest

HERE = pathlib.Path(__file__).parent
TESTS = """
import os, pathlib, subprocess, sys, time

def start(folder):
    for session in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
    pathlib.Path(folder, f"{os.getpid()}.started").touch()
    time.sleep(600)

def test_one(): start(FOLDER)

def test_two(): start(FOLDER)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_process_behind(tmp_path, signum):
    (tmp_path / "test_it.py").write_text(TESTS.replace("FOLDER", repr(str(tmp_path))))
    (tmp_path / "pytest.ini").write_text("[pytest]")
    environ = {name: value for name, value in os.environ.items() if name != guard.MARK and "PYTEST" not in name}
    environ["PYTHONPATH"] = str(HERE.parent)
    # What runs in a shell's background ignores Ctrl-C, and all that it starts does.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "pytest"]
    command += ["-p", "guard", "-p", "no:hypothesispytest", "-n", "2", "test_it.py"]
    run = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, process_group=0)
    until = time.monotonic() + 180
    while len(started := list(tmp_path.glob("*.started"))) < 2:
        assert time.monotonic() < until and run.poll() is None
        time.sleep(0.05)
    worker = int(started[0].stem)
    (mark,) = (
        entry.partition("=")[2]
        for entry in pathlib.Path(f"/proc/{worker}/environ").read_text().split("\0")
        if entry.startswith(guard.MARK)
    )
    assert len(guard.bearers(mark)) == 6  # two workers, and two processes that each of them started
    # Python loses a Ctrl-C whose KeyboardInterrupt is raised in a weak reference's callback; people press it again.
    while run.poll() is None:
        assert time.monotonic() < until
        run.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(30)  # not sooner: a busy machine may still be about to end it
    while guard.bearers(mark):
        assert time.monotonic() < until
        time.sleep(0.05)
