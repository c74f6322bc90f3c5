"""A program that ends without `close` keeps its last save, or says that it is lost; and what does not end goes on."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.path import atomicity

import jdp
from jdp._checkpoint import checkpointer, write
from jdp._checkpoint.directory import LOCK
from jdp._processes.coordination import AbsentError
from jdp._processes.watch import watch

ROOT = pathlib.Path(jdp.__file__).parent.parent
PATIENCE = 120  # seconds for a program

# Its save is slow, so that the program comes to its end before.
BEGIN = """
    import atexit, os, signal, sys, threading, time
    import jdp
    jdp.virtual_cpu_devices(1)
    import numpy as np
    from orbax.checkpoint._src.path import atomicity
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what `nohup` starts
    real, state, directory = atomicity.AtomicRenameTemporaryPath.finalize, {"w": np.ones(30, np.float32)}, sys.argv[1]

    def after(seconds=1.0, error=None):
        async def finalize(*args, **kwargs):
            time.sleep(seconds)
            if error:
                raise error
            return await real(*args, **kwargs)
        atomicity.AtomicRenameTemporaryPath.finalize = finalize

    atexit.register(print, "first of all", flush=True)
    checkpointer = jdp.Checkpointer(directory)
    atexit.register(print, "at exit", flush=True)
"""


def begun(directory, script):
    command = [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(script), str(directory)]
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, cwd=ROOT)


def program(directory, script):
    """Its exit status, and what it said on stdout and stderr."""
    with begun(directory, script) as process:
        try:
            out, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return process.returncode, out, error


ENDS = {
    "last line": ("", 0, ""),
    "exception": ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT, "KeyboardInterrupt"),
    "Ctrl-C at the end": ("threading._register_atexit(os.kill, os.getpid(), signal.SIGINT)", 0, "KeyboardInterrupt"),
    "dropped": ("del checkpointer", 0, ""),
}
SLOW = [pytest.mark.full]
# On those the error says to close the Checkpointer: see `Writer.loss`.
starts_threads = pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info < (3, 12, 3), reason="Python 3.12.0 to 3.12.2 start no thread while a program ends"
)


@starts_threads
@pytest.mark.parametrize("end", [pytest.param(end, marks=[] if end == "Ctrl-C" else SLOW) for end in ENDS])
def test_the_last_save_is_waited_for(tmp_path, end):
    line, status, said = ENDS[end]
    code, out, error = program(tmp_path, f"after(); checkpointer.save(1, state)\n{line}")
    assert (code, out) == (status, "at exit\nfirst of all\n"), error
    assert os.listdir(tmp_path) == ["1"]
    assert said in error and "jdp." not in error and bool(error) == bool(said)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"w": np.zeros(30, np.float32)})[0]["w"].tolist() == [1] * 30


@pytest.mark.full
@pytest.mark.parametrize("end", ["", pytest.param("del checkpointer; time.sleep(4)", marks=SLOW)], ids=["end", "drop"])
def test_the_loss_of_the_last_save_is_said(tmp_path, end):
    """All that the program wants done at exit is done, too."""
    code, out, error = program(tmp_path, f"after(1, OSError('gone')); checkpointer.save(1, state)\n{end}")
    assert (code, out) == (1, "at exit\nfirst of all\n"), error
    said = f"jdp.Checkpointer: step 1 was not saved in {tmp_path}: gone; there is no checkpoint yet. "
    assert error.count(said) == 1 and error.splitlines()[-1].startswith(said)
    assert end or error.count("\n") == 1  # of one that is dropped Orbax says something, too


def test_a_save_that_needs_what_python_does_no_more_is_told_to_come_earlier(tmp_path):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        error = RuntimeError("can't create new thread at interpreter shutdown")
        assert checkpointer._writer.loss(error).endswith(
            "Close the Checkpointer before the program ends, or use it in a with statement."
        )


@pytest.mark.full
def test_a_failure_that_the_program_has_heard_of_is_its_own(tmp_path):
    script = """
    after(0, OSError("gone"))
    checkpointer.save(1, state)
    try:
        checkpointer.wait()
    except RuntimeError as e:
        print("heard")
    """
    assert program(tmp_path, script) == (0, "heard\nat exit\nfirst of all\n", "")


IMPATIENT = {
    "at the end of the program": """
    checkpointer.save(1, state)
    wait = checkpointer._writer.wait
    checkpointer._writer.wait = lambda: (print("waits", flush=True), wait())
    """,
    "at the end of the block, for the second time": """
    with checkpointer:
        checkpointer.save(1, state)
        wait = checkpointer._writer.wait
        checkpointer._writer.wait = lambda *seconds: (print("waits", flush=True), wait(*seconds))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    """,
}


@pytest.mark.full
@pytest.mark.parametrize("when", IMPATIENT)
def test_who_does_not_want_to_wait_for_the_last_save_is_told_what_is_lost(tmp_path, when):
    """By Ctrl-C while the program waits for a save that takes a minute."""
    with begun(tmp_path, "    after(60)\n" + IMPATIENT[when]) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 1 and out == "at exit\nfirst of all\n"
    assert f"step 1 was not saved in {tmp_path}: KeyboardInterrupt came before it was complete; there is no" in error


@pytest.fixture
def slow(monkeypatch):
    """An event that a save waits for before it is complete."""
    real, goes_on = atomicity.AtomicRenameTemporaryPath.finalize, threading.Event()

    async def finalize(*args, **kwargs):
        goes_on.wait(PATIENCE)
        return await real(*args, **kwargs)

    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", finalize)
    yield goes_on
    goes_on.set()


def in_a_job(monkeypatch):
    """The end of a block asks how many processes there are; nothing else does from here on."""
    monkeypatch.setattr(checkpointer, "jax", types.SimpleNamespace(process_count=lambda: 2))


@pytest.mark.full
def test_another_process_that_is_stopped_is_named_by_those_that_wait_for_the_save(tmp_path, slow, monkeypatch):
    """They would wait until JAX ends the process after a minute, without a word about the save."""
    others = types.SimpleNamespace(
        silent=lambda processes, least=None: [p for p in processes if p and least is None],
        why_silent=lambda silent: "has given no sign of life for 10 s",
        is_enough=lambda waited, silent: True,
    )
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": np.ones(3)})
        with monkeypatch.context() as patch:
            patch.setattr(write, "watch", others)
            patch.setattr(write, "ended", set)
            patch.setattr("jax.process_count", lambda: 2)
            with pytest.raises(AbsentError, match=r"step 1 was not saved .*: process 1 has given no .* Start the job"):
                checkpointer.wait()
            patch.setattr(write, "ended", lambda: {1})  # in good order: nobody has to be waited for
            with pytest.raises(RuntimeError, match="the job ended first"):
                checkpointer._writer.wait(1.0)
            patch.setattr(write, "ended", set)
            others.is_enough = lambda waited, silent: False  # not known to be stopped, and not silent for long
            with pytest.raises(RuntimeError, match="the job ended first"):
                checkpointer._writer.wait(1.0)
        slow.set()
    assert os.listdir(tmp_path) == ["1"]


@pytest.mark.parametrize("kind", [AbsentError, ValueError])
def test_the_block_of_a_job_that_ends_with_an_error(tmp_path, monkeypatch, slow, kind):
    """After its own error the save is finished, and the process is not late; after that of another, nothing is."""
    busy = []
    with pytest.raises(kind) as error:
        with jdp.Checkpointer(tmp_path) as kept:
            kept.save(1, {"w": np.ones(30, np.float32)})
            writer = kept._writer
            thread, in_time = writer._thread, writer.wait

            def wait(seconds):
                busy.append((seconds, watch._compiles(time.monotonic())))
                if kind is ValueError:
                    slow.set()
                in_time(seconds)

            monkeypatch.setattr(writer, "wait", wait)
            in_a_job(monkeypatch)
            raise kind("gone")
    expected = [] if kind is ValueError else [f"jdp.Checkpointer: step 1 was not saved in {tmp_path}: the job ended"]
    assert [
        note[: len(text)] for note, text in zip(getattr(error.value, "__notes__", []), expected, strict=True)
    ] == expected
    assert busy == [(60.0 if kind is ValueError else 0.0, True)] and not watch._compiles(time.monotonic())
    slow.set()
    thread.join()
    assert (tmp_path / "1").is_dir()  # although nobody has waited for it


def test_data_is_that_of_the_call():
    """A loop goes on and changes its lists; in a job they are written later."""
    data = {"losses": [1.5], "at": {"row": 3}}
    _, kept, _ = checkpointer.agree(lambda: None, 1, {"w": np.ones(3)}, data)
    data["losses"].append(2.5)
    data["at"]["row"] = 4
    assert kept == {"losses": [1.5], "at": {"row": 3}}


@starts_threads
@pytest.mark.full
def test_a_child_that_is_forked_leaves_the_saves_of_its_parent_alone(tmp_path):
    """It does not wait for them, and says nothing of them; its parent does."""
    script = """
    after(4, OSError("gone"))
    checkpointer.save(1, state)
    child = os.fork()
    if not child:
        del checkpointer
        threading._shutdown()  # as a process of multiprocessing ends; JAX would crash in what comes after
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    code, out, error = program(tmp_path, script)
    assert (code, out) == (1, "0\nat exit\nfirst of all\n"), error
    assert error.count(f"jdp.Checkpointer: step 1 was not saved in {tmp_path}: gone; ") == 1


# Ctrl-C inside of `save`.


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_save_that_was_interrupted_can_be_made_again(tmp_path, monkeypatch, moment):
    """Whether Orbax had not begun with it, or goes on with it."""
    save, state = ocp.AsyncCheckpointer.save, {"w": np.ones(3)}

    def interrupted(*args, **kwargs):
        if moment == "after":
            save(*args, **kwargs)
        raise KeyboardInterrupt

    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, data=1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ocp.AsyncCheckpointer, "save", interrupted)
            checkpointer.save(2, state, data=2)
        assert checkpointer.save(2, state, data=2) == (moment == "before")
        checkpointer.wait()
        assert checkpointer.latest_step == 2
        assert not checkpointer.save(2, state)
        assert checkpointer.save(3, state)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"]
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state, step=2)[1] == 2


def test_a_save_that_was_interrupted_and_is_complete_is_the_newest(tmp_path, monkeypatch):
    save = threading.Thread.start

    def interrupted(thread):
        save(thread)
        if thread.name == "jdp-saves":
            raise KeyboardInterrupt

    with jdp.Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupted)
            checkpointer.save(2, np.ones(3))
        with pytest.raises(ValueError, match="step 1 comes after step 2"):
            checkpointer.save(1, np.ones(3))
    assert os.listdir(tmp_path) == ["2"]


def test_what_an_interrupted_save_left_writing_is_waited_for(tmp_path, monkeypatch):
    """Ctrl-C in the start of a thread of Orbax's: it wrote to the files of the save that was made again."""
    start, save, found, goes_on = threading.Thread.start, ocp.AsyncCheckpointer.save, [], threading.Event()

    def of_orbax():
        return [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]

    def interrupted(thread):
        if type(thread).__module__.startswith("orbax."):
            run = thread.run
            thread.run = lambda: (goes_on.wait(PATIENCE), run())
        start(thread)
        if thread in of_orbax():
            raise KeyboardInterrupt

    def looks(*args, **kwargs):
        found.append(of_orbax())
        return save(*args, **kwargs)

    with jdp.Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupted)
            checkpointer.save(2, {"w": np.ones(3)})
        assert of_orbax()
        threading.Timer(0.5, goes_on.set).start()
        monkeypatch.setattr(ocp.AsyncCheckpointer, "save", looks)
        assert checkpointer.save(2, {"w": np.ones(3)})
    assert found == [[]] and os.listdir(tmp_path) == ["2"]


# One that is dropped after a save has failed.


@pytest.mark.parametrize("name, waits", [("create", True), ("finalize", True), ("finalize", False)])
def test_a_dropped_one_gives_the_lock_back_after_a_failed_save(tmp_path, monkeypatch, name, waits):
    """At once, and not when Python collects what leads in a circle."""

    def fails(*args, **kwargs):
        raise OSError("gone")

    told = []
    monkeypatch.setattr("jdp._checkpoint.write.tell_loss", told.append)
    checkpointer = jdp.Checkpointer(tmp_path)
    checkpointer.save(1, np.ones(3))
    checkpointer.wait()
    gc.collect()
    gc.disable()
    try:
        monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, name, fails)
        if waits:
            with pytest.raises(RuntimeError, match="step 2 was not saved in .*: gone; step 1 is the newest"):
                checkpointer.save(2, np.ones(3))
                checkpointer.wait()
        else:
            checkpointer.save(2, np.ones(3))
            checkpointer._writer._thread.join()
        assert (tmp_path / LOCK).exists()
        del checkpointer
        assert not (tmp_path / LOCK).exists()
    finally:
        gc.enable()
    assert [text.split(";")[0] for text in told] == (
        [] if waits else [f"jdp.Checkpointer: step 2 was not saved in {tmp_path}: gone"]
    )


SIGTERM = """
import os, signal, sys, threading, time
from jdp._checkpoint.preemption import Preemption
first, second = Preemption(), Preemption()

def elsewhere(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

"""
AFTER_A_SIGTERM = {
    "acted on by the first": ("os.kill(os.getpid(), 15); first.act(); second.close(); first.close()", 0),
    "acted on by the second": ("os.kill(os.getpid(), 15); second.act(); first.close(); second.close()", 0),
    "not acted on": ("os.kill(os.getpid(), 15); first.close(); second.close()", -signal.SIGTERM),
    "closed in another thread": ("elsewhere(first.close); elsewhere(second.close); os.kill(os.getpid(), 15)", -15),
    "closed in another thread, one": ("elsewhere(second.close); os.kill(os.getpid(), 15); first.act()", 0),
    "told, and closed in another thread": (
        "os.kill(os.getpid(), 15); elsewhere(first.close); elsewhere(second.close); time.sleep(1)",
        -signal.SIGTERM,
    ),
    "not acted on, closed in turn": ("os.kill(os.getpid(), 15); second.close(); first.close()", -signal.SIGTERM),
}
IN_A_CHILD = """
reads, writes = os.pipe()
child = os.fork()
if not child:
    os.write(writes, b"x")  # Python drops signals that come before a child has begun
    time.sleep(60)
    os._exit(0)
os.read(reads, 1)
os.kill(child, signal.SIGTERM)
end, found = time.monotonic() + 20, 0
while not found and time.monotonic() < end:
    time.sleep(0.05)
    found, status = os.waitpid(child, os.WNOHANG)
os.kill(child, signal.SIGKILL) if not found else None
assert found and os.WTERMSIG(status) == signal.SIGTERM and not first.reached()
"""


@pytest.mark.one_case
@pytest.mark.parametrize("case", AFTER_A_SIGTERM)
def test_a_sigterm_ends_the_process_unless_one_of_two_has_saved_because_of_it(case):
    code, status = AFTER_A_SIGTERM[case]
    assert ended(SIGTERM + code) == status


@pytest.mark.full
def test_a_child_of_fork_ends_by_a_sigterm():
    """As it would without a Checkpointer: `multiprocessing` ends its processes so, and waits for them."""
    assert ended(SIGTERM + IN_A_CHILD) == 0


def ended(code):
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environ, timeout=60).returncode


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_save_that_fails_as_the_block_ends_is_said(tmp_path, monkeypatch, kind):
    """Python prints the notes of an error, but not those of a SystemExit."""
    told = []
    monkeypatch.setattr("jdp._checkpoint.checkpointer.tell_loss", told.append)

    def fails(self, seconds=None):
        raise RuntimeError("step 3 was not saved")

    with pytest.raises(kind) as error:
        with jdp.Checkpointer(tmp_path):
            monkeypatch.setattr(write.Writer, "wait", fails)
            raise kind(0)
    notes = getattr(error.value, "__notes__", [])
    assert (told, notes) == ((["step 3 was not saved"], []) if kind is SystemExit else ([], ["step 3 was not saved"]))


def test_the_loss_is_said_though_the_directory_cannot_be_read(tmp_path, monkeypatch):
    def gone(self):
        raise OSError(116, "Stale file handle")

    with jdp.Checkpointer(tmp_path) as checkpointer:
        writer = checkpointer._writer
        with monkeypatch.context() as patch:
            patch.setattr(type(writer._steps), "latest", gone)
            text = writer.loss(OSError(5, "Input/output error"))
    assert "was not saved" in text and "the directory cannot be read ([Errno 116] Stale file handle)" in text


@pytest.mark.full
def test_a_sigterm_ends_in_good_order_though_nobody_reads_the_output(tmp_path):
    """As in `python train.py | tee log`, where the signal goes to both."""
    code = f"""
import os, signal, jdp, numpy as np
c = jdp.Checkpointer({str(tmp_path)!r})
reads, writes = os.pipe()
os.dup2(writes, 1)
os.close(writes), os.close(reads)
os.kill(os.getpid(), signal.SIGTERM)
c.save(7, {{"w": np.ones(2)}})
os._exit(9)
"""
    assert ended(code) in (0, 120)  # 120: Python could not write what it had kept of stdout
    assert (tmp_path / "7").exists()


def test_one_that_was_made_before_the_processes_became_a_job_is_refused(tmp_path, monkeypatch):
    """They would not save at one step when the job has to end."""
    with jdp.Checkpointer(tmp_path / "early") as checkpoints, monkeypatch.context() as patch:
        patch.setattr("jax.process_count", lambda: 2)
        with pytest.raises(RuntimeError, match=r"it was made before .* Make it after jdp\.distributed\.initialize\(\)"):
            checkpoints.save(1, {"w": np.ones(2)})


def test_a_save_that_fails_at_its_beginning_is_counted(tmp_path, monkeypatch):
    """Processes that go on after it number their next saves alike, and wait at one barrier."""
    with jdp.Checkpointer(tmp_path / "run") as checkpoints:
        before = next(write._saves)
        with monkeypatch.context() as patch:
            patch.setattr(write, "manifest", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpoints.save(1, {"w": np.ones(2)})
        assert next(write._saves) == before + 2


def test_two_threads_may_wait_for_one_save(tmp_path, monkeypatch):
    """The main thread in `wait`, and the one that ends a process of a job which has failed."""
    waits, told = threading.Barrier(3), []
    monkeypatch.setattr(write.Writer, "_delete_old", lambda writer: (waits.wait(20), time.sleep(0.2)))

    def wait(checkpoints):
        waits.wait(20)
        try:
            checkpoints.wait()
        except Exception as error:
            told.append(error)

    with jdp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.ones(2)})
        threads = [threading.Thread(target=wait, args=(checkpoints,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert told == []


def test_a_wait_that_was_interrupted_can_be_made_again(tmp_path, slow):
    """Python takes a thread for ended, though it runs, if Ctrl-C comes while another joins it."""
    with jdp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.ones(2)})
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
        threading.Timer(0.2, slow.set).start()
        checkpoints.wait()
        assert checkpoints.latest_step == 1


def test_the_step_after_a_save_that_failed_at_the_end_of_the_job_is_saved(tmp_path, monkeypatch):
    """JAX's preemption service answers True for one step."""
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    answers = iter([True, False])
    reached = "jax.experimental.multihost_utils.reached_preemption_sync_point"
    monkeypatch.setattr(reached, lambda number: next(answers))
    checkpoints = jdp.Checkpointer(tmp_path, every=100)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(write.Writer, "prepare", lambda writer: (_ for _ in ()).throw(OSError("no space")))
        checkpoints.save(1, {"w": np.ones(2)})
    with pytest.raises(SystemExit):
        checkpoints.save(2, {"w": np.ones(2)})
    assert checkpoints.latest_step == 2


@pytest.mark.parametrize("error", [MemoryError(), OSError("no space")], ids=repr)
def test_all_hear_of_a_process_that_cannot_save_though_its_error_has_no_text(monkeypatch, error):
    def prepare():
        raise error

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(checkpointer, "tell_all", lambda text, seconds: [text, text])
    with pytest.raises(RuntimeError, match=rf"process 0: {str(error) or 'MemoryError'}; process 1: "):
        checkpointer.agree(prepare, 1, {"w": np.ones(2)}, None)
