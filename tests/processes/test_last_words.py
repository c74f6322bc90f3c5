"""What a process says to the others as it ends."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from jdp._processes import coordination, hooks, last_words
from jdp._processes.places import DEAD, state_of

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
    monkeypatch.setattr(hooks, "client", lambda: service)
    monkeypatch.setattr(hooks, "own_process", lambda: 3)
    listener.start()

    def fails():
        raise RuntimeError("a program has failed on the device")

    monkeypatch.setattr(hooks, "_before_leaving", [fails])
    try:
        with pytest.raises(RuntimeError, match="a program has failed on the device"):
            hooks._leave(os.getpid(), leaving, listener)
        assert service.values == {"jdp/left/3": ""}
        assert not listener.is_alive()
    finally:
        leaving.set()


@pytest.mark.parametrize("here", [0, 1])
def test_who_has_ended_listens_until_all_have(monkeypatch, here):
    """JAX waits as well, but then nothing looks: the failure of another would be seen by nobody."""
    service, leaving, waits = Service(), threading.Event(), []
    listener = threading.Thread(target=leaving.wait)
    other = {"jdp/left/0": "", hooks.ALL_LEFT: ""} if here else {"jdp/left/1": ""}

    def get(key, seconds):
        waits.append((key, listener.is_alive(), f"jdp/left/{here}" in service.values))
        if len(waits) > 2:
            service.values |= other
        return service.values.get(key)

    for name, value in {
        "client": lambda: service,
        "own_process": lambda: here,
        "ended": lambda: {p for p in (0, 1) if f"jdp/left/{p}" in service.values},
        "get": get,
        "put": service.key_value_set,
        "_before_leaving": [],
    }.items():
        monkeypatch.setattr(hooks, name, value)
    monkeypatch.setattr(hooks.watch, "tell", lambda: None)
    monkeypatch.setattr(hooks.watch, "processes", lambda: {0, 1})
    monkeypatch.setattr(hooks.watch, "_leaves", None)
    listener.start()
    hooks._leave(os.getpid(), leaving, listener)
    assert waits == [(hooks.ALL_LEFT if here else "jdp/left/1", True, True)] * 3
    assert hooks.ALL_LEFT in service.values and not listener.is_alive()


@pytest.mark.full
@pytest.mark.parametrize(
    "streams",
    ["sys.stdout = sys.stderr = None", "sys.stdout = sys.stderr = open('/dev/full', 'w'); sys.stdout.write('x' * 10)"],
    ids=["closed", "a full disk"],
)
def test_a_process_ends_though_nothing_can_be_printed(streams):
    """Else it would wait forever, with a thread that has failed."""
    code = f"import sys; from jdp._processes import last_words; {streams}; last_words.say('why'); last_words.end(76)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT}, timeout=60)
    assert done.returncode == 76


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), 3),
        (RuntimeError("INTERNAL: NCCL operation failed"), 3),
        (coordination.FailedError("process 0 has no batch, but an error"), 3),
        (ValueError("row 17 is no good"), 0),
    ],
)
def test_an_error_that_another_process_may_have_caused_waits_for_its_name(monkeypatch, error, seconds):
    """Meanwhile the listener ends this process, if it learns who has died: that name is what is read last."""
    began = last_words.time.monotonic()
    now = [began]
    monkeypatch.setattr(last_words.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(last_words.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    last_words.let_the_listener_speak(error)
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

def sleeps():
    ready.write(b"x")
    time.sleep(100)

def terminated():  # as a multiprocessing.Pool at the end of a program
    global ready
    reader, writer = os.pipe()
    ready = open(writer, "wb", 0)
    pids, fork = [], os.fork
    os.fork = lambda: (pids.append(fork()), pids[-1])[1]
    import threading
    threading.Thread(target=lambda: (os.read(reader, 1), os.kill(pids[0], 15)), daemon=True).start()
    return after(sleeps)

codes = [after(lambda: sys.exit(0)), after(lambda: sys.exit(3)), after(fails), terminated()]
time.sleep(3)  # in which all would hear of a failure
print("codes", codes, "sum", dp(2.0, x).sum())
"""


@pytest.mark.full
def test_the_end_of_a_child_is_not_that_of_its_process(tmp_path):
    """Of one that `os.fork` has made, as in a loader: with `sys.exit`, by an exception, or by a SIGTERM."""
    (tmp_path / "forks.py").write_text(FORKS)
    root = str(pathlib.Path(__file__).parents[2])
    left_out = ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
    environ = {name: value for name, value in os.environ.items() if name not in left_out} | {"PYTHONPATH": root}
    command = [sys.executable, "-m", "jdp", "launch", "-n", "2", "--devices-per-process", "1", "forks.py"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = [line for line in done.stdout.splitlines() if "codes" in line]
    assert sorted(said) == [f"[{rank}] codes [0, 3, 1, -15] sum 16.0" for rank in range(2)], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ValueError: the child's own") == 2 and "has failed" not in done.stderr


JOB = """
import json, os, sys, threading, time
import jax, numpy as np
import jdp
from jdp._processes import coordination, hooks, last_words, watch

values = {}

class Service:
    def key_value_set(self, key, value, overwrite=False): values[key] = value
    def key_value_dir_get(self, folder): return [(k, v) for k, v in values.items() if k.startswith(folder)]
    def key_value_try_get(self, key):
        if key not in values: raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return values[key]

service = Service()
for module in (coordination, hooks, last_words): module.client = lambda: service
for module in (hooks, last_words, watch): module.own_process, module.process_count = lambda: 1, lambda: 2
hooks.install()
"""


TELLS = """
end = hooks.end
hooks.end = lambda code: (print(values), end(code))
"""


def in_a_job(code, *args):
    """Runs it as process 1 of 2, whose coordination service is a dict; what is left of a process of that name."""
    environ = {**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", JOB + code, *map(str, args)]
    return subprocess.run(command, env=environ, timeout=100, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("error", ["ValueError('the own error')", "KeyboardInterrupt"])
def test_a_process_that_fails_finishes_its_save_first(tmp_path, error):
    done = in_a_job(
        f"""
c = jdp.Checkpointer(sys.argv[1])
c.save(100, {{"w": np.random.default_rng(0).integers(0, 255, 40_000_000).astype(np.uint8)}})
raise {error}
""",
        tmp_path,
    )
    assert done.returncode == (130 if "Keyboard" in error else 1), done.stderr
    assert [x.name for x in tmp_path.iterdir() if x.name[0].isdigit()] == ["100"], done.stderr
    assert "the own error" in done.stderr or "process 1 was interrupted" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("then", "said"),
    [
        (
            "c._writer._steps.latest = lambda: 90",
            "step 100 was not saved in {}: the job ended first; step 90 is the newest complete checkpoint. Start",
        ),
        ("", "step 100 is complete in {}; only the end of its save failed: the job ended first"),
    ],
    ids=["lost", "complete"],
)
def test_a_process_that_waited_in_vain_says_which_save_is_lost(tmp_path, then, said):
    done = in_a_job(
        f"""
import threading
c = jdp.Checkpointer(sys.argv[1])
c.save(100, {{"w": np.ones(3)}})
c._writer._thread.join()
{then}
c._writer._thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)  # the others do not answer
c._writer._thread.start()
raise coordination.AbsentError("process 0 did not come to it")
""",
        tmp_path,
    )
    assert done.returncode == 76
    assert said.format(tmp_path) in done.stderr, done.stderr


def test_an_error_whose_text_fails_ends_the_process_all_the_same():
    done = in_a_job(
        """
class Bad(Exception):
    def __str__(self): return self.args[7]

end = hooks.end
hooks.end = lambda code: (print(values), end(code))
raise Bad("x")
"""
    )
    assert done.returncode == 1 and "jdp/failed" in done.stdout and "Bad" in done.stdout + done.stderr


@pytest.mark.full
def test_the_error_that_a_process_was_ending_with_is_shown():
    """Its `finally` took longer than the others waited: they have failed because of it, and it ends for their sake."""
    done = in_a_job(
        """
words = "jdp.step: process 0 has waited 21 s for it, and process 1 did not come to it"
threading.Timer(0.5, lambda: values.update({"jdp/failed": json.dumps([0, words])})).start()
try:
    raise ValueError("the own error")
finally:
    time.sleep(30)
"""
    )
    assert done.returncode == 75
    *_, error, last = done.stderr.splitlines()
    assert error == "ValueError: the own error" and last.startswith("jdp: process 0 has failed")


EXITS = {
    "the last line": ("sys.exit(4)", 4),
    "in a function": ("def f():\n    try: sys.exit(4)\n    finally: pass\nf()", 4),
    "a text": ("sys.exit('why')", 1),
    "by another": ("try: sys.exit(3)\nexcept SystemExit: sys.exit(4)", 4),
    "raised again": ("try: sys.exit(4)\nexcept SystemExit as e:\n    kept = e\n    raise", 4),
    "of 0": ("sys.exit(0)", 0),
    "in asyncio": (  # in a cycle of references, which the garbage collector finds late
        "import asyncio, atexit, gc\natexit.register(lambda: gc.collect())\n"
        "async def main(): sys.exit(4)\nasyncio.run(main())",
        4,
    ),
    "in asyncio, collected by a thread": (
        "import asyncio, atexit, gc, threading\ncollector = threading.Thread(target=gc.collect)\n"
        "atexit.register(lambda: (collector.start(), collector.join()))\n"
        "async def main(): sys.exit(4)\nasyncio.run(main())",
        4,
    ),
    "in a loader": (  # after which the process makes a call that tells the others
        "from jdp._wrapper import prefetch\ndef finish():\n    hooks.Exchange.calls += 1; raise hooks.DesyncError\n"
        "try: sys.exit(4)\nexcept SystemExit as e: failed = e\n"
        "prefetch._of_all_processes(None, None, [], finish, failed, None, None)",
        4,
    ),
    "caught": ("try: sys.exit(4)\nexcept SystemExit: pass", 0),
    "caught in a function": ("def f():\n    try: sys.exit(4)\n    except SystemExit as e: return e.code\nf()", 0),
    "of argparse": ("import argparse\ntry: argparse.ArgumentParser().parse_args(['x'])\nexcept SystemExit: pass", 0),
}


@pytest.mark.full
@pytest.mark.parametrize(("code", "expected"), EXITS.values(), ids=EXITS)
def test_an_exit_that_is_caught_is_none(code, expected):
    done = in_a_job(f"{TELLS}\nhooks.limits.shutdown = 0\n{code}")
    assert done.returncode == expected, done.stderr
    assert ("jdp/failed" in done.stdout) == bool(expected)


LIBRARY = """
def hook(kind, error, trace): print("the library shows", error)
sys.excepthook = hook
"""


@pytest.mark.full
@pytest.mark.parametrize("error", ["ValueError('the own error')", "KeyboardInterrupt"])
def test_an_excepthook_of_a_library_does_not_hide_the_failure(error):
    """It was set after `initialize`, and does not call jdp's."""
    done = in_a_job(f"{TELLS}{LIBRARY}raise {error}")
    assert done.returncode == (130 if "Keyboard" in error else 1), done.stderr
    assert "the library shows" in done.stdout and "jdp/failed" in done.stdout


@pytest.mark.full
def test_an_excepthook_that_is_called_by_hand_ends_nothing():
    """As by a library that reports an error which it has handled; and as by a console."""
    done = in_a_job(
        """
import code
hooks.limits.shutdown = 0
try: 1 / 0
except ZeroDivisionError: sys.excepthook(*sys.exc_info())
code.InteractiveInterpreter().runcode("[][0]")
print("went on")
"""
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert "ZeroDivisionError" in done.stderr and "IndexError" in done.stderr


@pytest.mark.full
def test_an_error_from_before_the_job_ends_nothing():
    """As a program leaves it that runs several scripts in one process."""
    done = in_a_job(
        """
hooks.limits.shutdown = 0
hooks.install.cache_clear()
try: 1 / 0
except ZeroDivisionError as e: sys.last_value, sys.last_traceback = e, e.__traceback__
hooks.install()
print("went on")
"""
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


@pytest.mark.full
def test_the_daemons_of_a_process_that_fails_end_with_it():
    """As the workers of a loader."""
    done = in_a_job(
        """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
child.start()
print(child.pid, flush=True)
raise ValueError("why")
"""
    )
    assert done.returncode == 1
    until = time.monotonic() + 60
    while state_of(int(done.stdout)) not in DEAD and time.monotonic() < until:
        time.sleep(0.01)
    assert state_of(int(done.stdout)) in DEAD


class Full:
    """A stream on a disk that is full."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_the_listener_outlives_what_cannot_be_printed(monkeypatch):
    looks, leaving = [], threading.Event()

    def look():
        looks.append(1)
        if len(looks) == 4:
            leaving.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(last_words, "client", Service)
    monkeypatch.setattr(last_words, "now", lambda key: None)
    monkeypatch.setattr(last_words, "_pause", lambda: 0.01)
    monkeypatch.setattr(last_words.watch, "look", look)
    last_words.listen(leaving)
    assert len(looks) == 4
    monkeypatch.setattr(sys, "stderr", Full())
    last_words.watch._warn("process 7 is silent", [7])
