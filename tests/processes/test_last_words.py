"""What a process says to the others as it ends."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from jdp._processes import last_words

ROOT = str(pathlib.Path(__file__).parents[2])


class Service:
    """JAX's coordination service, of one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        self.values[key] = value


def test_who_fails_as_it_ends_has_left_all_the_same(monkeypatch):
    """Else the others would wait for it until their time is over."""
    service, leaving = Service(), threading.Event()
    listener = threading.Thread(target=leaving.wait)
    monkeypatch.setattr(last_words, "client", lambda: service)
    monkeypatch.setattr(last_words, "own_process", lambda: 3)
    listener.start()

    def fails():
        raise RuntimeError("a program has failed on the device")

    monkeypatch.setattr(last_words, "_before_leaving", [fails])
    try:
        with pytest.raises(RuntimeError, match="a program has failed on the device"):
            last_words._leave(os.getpid(), leaving, listener)
        assert service.values == {"jdp/left/3": ""}
        assert not listener.is_alive()
    finally:
        leaving.set()


@pytest.mark.parametrize(
    "streams",
    ["sys.stdout = sys.stderr = None", "sys.stdout = sys.stderr = open('/dev/full', 'w'); sys.stdout.write('x' * 10)"],
    ids=["closed", "a full disk"],
)
def test_a_process_ends_though_nothing_can_be_printed(streams):
    """Else it would wait for ever, with a thread that has failed."""
    code = f"import sys; from jdp._processes import last_words; {streams}; last_words.say('why'); last_words._end(76)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT}, timeout=60)
    assert done.returncode == 76


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", 3),
        ("INTERNAL: NCCL operation failed", 3),
        ("row 17 is no good", 0),
    ],
)
def test_an_error_that_another_process_may_have_caused_waits_for_its_name(monkeypatch, error, seconds):
    """Meanwhile the listener ends this process, if it learns who has died: that name is what is read last."""
    began = last_words.time.monotonic()
    now = [began]
    monkeypatch.setattr(last_words.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(last_words.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    last_words._let_the_listener_speak(error)
    assert seconds <= now[0] - began < seconds + 0.2


FORKS = """
import jdp, os, sys, time
jdp.distributed.initialize(quiet=True)
import numpy as np
dp, x = jdp.DataParallel(lambda w, x: w * x), np.ones((4, 2), np.float32)
dp(2.0, x)

def after(end):
    child = os.fork()
    if not child:
        end()
    begin = time.monotonic()
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < begin + 60:
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1]) if found[0] else "none: it hangs"

def fails():
    raise ValueError("the child's own")

codes = [after(lambda: sys.exit(0)), after(lambda: sys.exit(3)), after(fails)]
time.sleep(3)  # in which all would hear of a failure
print("codes", codes, "sum", dp(2.0, x).sum())
"""


def test_the_end_of_a_child_is_not_that_of_its_process(tmp_path):
    """Of one that `os.fork` has made, as in a loader: with `sys.exit`, or by an exception."""
    (tmp_path / "forks.py").write_text(FORKS)
    root = str(pathlib.Path(__file__).parents[2])
    left_out = ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
    environ = {name: value for name, value in os.environ.items() if name not in left_out} | {"PYTHONPATH": root}
    command = [sys.executable, "-m", "jdp", "launch", "-n", "2", "--devices-per-process", "1", "forks.py"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = [line for line in done.stdout.splitlines() if "codes" in line]
    assert sorted(said) == [f"[{rank}] codes [0, 3, 1] sum 16.0" for rank in range(2)], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ValueError: the child's own") == 2 and "has failed" not in done.stderr
