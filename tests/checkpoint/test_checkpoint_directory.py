"""A directory of checkpoints has one writer and many readers; what is in it is not trusted, and never thrown away."""

import contextlib
import errno
import fcntl
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
import types
import warnings

import jax
import numpy as np
import pytest

import jdp
import jdp._checkpoint.directory as directory_of
from jdp._checkpoint.directory import LOCK, Quiet
from jdp._checkpoint.read import tell_all
from jdp._processes.places import limits

STATE = {"w": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float32)}


def at(step):
    return {k: v + step for k, v in STATE.items()}


def saved(directory, *steps, keep=100):
    with jdp.Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, at(int(step)), data=int(step))


def restored(directory, step=None):
    """The step that a reader gets, whose values are checked; no warning may come with it."""
    with jdp.Checkpointer(directory) as checkpointer:
        got, data = checkpointer.restore(STATE, step=step)
    if data is not None:
        for k, v in at(data).items():
            np.testing.assert_array_equal(got[k], v)
    return data


def harm(path):
    """One bit of the array data, at every place where there may be some."""
    for file in (p for p in (path / "state").rglob("d/*") if p.is_file()):
        raw = bytearray(file.read_bytes())
        for i in range(0, len(raw), 16):
            raw[i] ^= 1
        file.write_bytes(raw)


def look(directory):
    """All entries, with what a change would change."""
    entries = [directory, *sorted(directory.rglob("*"))]
    return [(str(p), (s := p.lstat()).st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_mode, s.st_ino) for p in entries]


# The number of a step.


@pytest.mark.parametrize("step", [-5, np.int64(-1)], ids=str)
def test_a_negative_step_is_refused(tmp_path, refused, step):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        for method in (lambda: checkpointer.save(step, STATE), lambda: checkpointer.restore(STATE, step=step)):
            with refused(ValueError, "Checkpointer", match=f"step is {step}; the numbers of steps are 0 or more"):
                method()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [True, 2.0, np.bool_(True), np.float32(1), "3", jax.numpy.float32(1)], ids=repr)
def test_a_step_that_is_no_integer_is_refused(tmp_path, refused, step):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        for method in (lambda: checkpointer.save(step, STATE), lambda: checkpointer.restore(STATE, step=step)):
            with refused(TypeError, "Checkpointer", match="step is .*; a checkpoint is called by the number"):
                method()
        assert not list(tmp_path.iterdir())


def test_every_kind_of_integer_is_a_step(tmp_path):
    saved(tmp_path, 0, np.int8(3), jax.numpy.int32(5), 10**20)
    assert restored(tmp_path) == 10**20 and [restored(tmp_path, s) for s in (0, np.uint16(3), 5)] == [0, 3, 5]


def test_a_step_under_another_name_is_damaged(tmp_path):
    saved(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "3")
    shutil.copytree(tmp_path / "2", tmp_path / "3")
    with pytest.warns(
        UserWarning, match=r"step 3 is damaged \(.*it is of step 2, which somebody has called 3.*step 2 is"
    ):
        assert restored(tmp_path) == 2
    with jdp.Checkpointer(tmp_path) as checkpointer, pytest.raises(RuntimeError, match="it is of step 2"):
        checkpointer.restore(STATE, step=3)


def test_what_is_not_called_by_a_number_is_no_step(tmp_path):
    saved(tmp_path, 1)
    for name in ("007", "best_9", "+5", "²", "٣", "-5", "9.set-aside"):
        shutil.copytree(tmp_path / "1", tmp_path / name)
    (tmp_path / "8").write_text("a file")
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step == 1
    assert restored(tmp_path) == 1


# What `keep` deletes.


@pytest.mark.parametrize("keep", [2, 3])
def test_keep_leaves_the_newest_intact_one(tmp_path, keep):
    """Every checkpoint after the first comes to harm as soon as it is complete."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with jdp.Checkpointer(tmp_path, keep=keep) as checkpointer:
            for step in range(1, 8):
                checkpointer.save(step, at(step), data=step)
                checkpointer.wait()
                if step > 1:
                    harm(tmp_path / str(step))
    assert len(caught) == 7 - keep
    for warning in caught:
        assert re.search(r"step \d is damaged \(.+\).*; step 1 is kept, which is intact\. Look", str(warning.message))
    assert sorted(os.listdir(tmp_path)) == ["1", *map(str, range(8 - keep, 8))]  # and what is damaged goes
    with pytest.warns(UserWarning, match="step 7 is damaged"):
        assert restored(tmp_path) == 1


def harmed_in_writing(checkpointer, path):
    """The save of this checkpoint comes to harm before anybody reads it."""
    real = checkpointer._writer._orbax.wait_until_finished

    def then_harm():
        real()
        if path.is_dir():
            harm(path)

    checkpointer._writer._orbax.wait_until_finished = then_harm


def test_keep_of_one_leaves_the_one_before_if_the_new_one_cannot_be_read(tmp_path):
    with jdp.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, at(1), data=1)
        checkpointer.wait()
        harmed_in_writing(checkpointer, tmp_path / "2")
        checkpointer.save(2, at(2), data=2)
        with pytest.warns(UserWarning, match=r"step 2 is damaged .*; step 1 is kept, which is intact"):
            checkpointer.wait()
        assert {"1", "2"} < {*os.listdir(tmp_path)}
        checkpointer.save(3, at(3), data=3)
    assert os.listdir(tmp_path) == ["3"] and restored(tmp_path) == 3


def test_where_nothing_is_intact_nothing_is_deleted(tmp_path):
    saved(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        harm(tmp_path / str(step))
    with jdp.Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.warns(UserWarning, match="step 3 is damaged .*step 2 is .*step 1 is .*; nothing is deleted"):
            checkpointer.save(4, at(4), data=4)
            checkpointer.wait()
        assert {"1", "2", "3", "4"} < {*os.listdir(tmp_path)}
        checkpointer.save(5, at(5), data=5)  # now there is one
    assert sorted(os.listdir(tmp_path)) == ["4", "5"] and restored(tmp_path) == 5


def test_what_cannot_be_deleted_is_told_and_the_save_is_good(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def fails(path):
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(jdp._checkpoint.write, "delete", fails)
    with jdp.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.restore(STATE)
        checkpointer.save(2, at(2), data=2)
        with pytest.warns(UserWarning, match="older than the newest 1 could not be deleted: .*no; it takes room there"):
            checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["1", "2"] and restored(tmp_path) == 2


def test_arrays_of_all_kinds_are_read_back_right(tmp_path, devices):
    """Else every checkpoint would seem to be damaged, and none be deleted."""
    import ml_dtypes

    state = {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(3), 4),
        "cut": jax.device_put(
            np.arange(16.0, dtype=np.float32),
            jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "d"), jax.sharding.PartitionSpec("d")),
        ),
        "half": np.ones(3, ml_dtypes.bfloat16),
        "wide": np.arange(3) + 2**40,
        "complex": np.ones(2, np.complex128),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 2)),
        "a/b.c['d'] é": [1, 2.5, True, 1j],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jdp.Checkpointer(tmp_path / "one", keep=1) as checkpointer:
            for step in range(3):
                checkpointer.save(step, state)
        with jdp.Checkpointer(tmp_path / "two", keep=1) as checkpointer:
            for step in range(3):
                checkpointer.save(step, {"nothing": np.zeros((0, 2))})
    assert os.listdir(tmp_path / "one") == os.listdir(tmp_path / "two") == ["2"]


def test_an_old_intact_one_is_found_behind_many_that_are_damaged(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    for step in range(2, 60):  # of step 1, each of them
        shutil.copytree(tmp_path / "1", tmp_path / str(step))
    told = []  # and how long it waits for a process that does not come
    monkeypatch.setattr(jdp._checkpoint.steps, "tell_all", lambda *args: told.append(args) or [args[0]])
    with pytest.warns(UserWarning, match=r"step 59 is damaged .*, and so are 18 more; step 1 is restored") as caught:
        assert restored(tmp_path) == 1
    assert len(caught) == 1 and max(len(text) for text, *_ in told) < 1000
    assert all(args[1:] == (limits.start,) for args in told)


@pytest.mark.parametrize("call", ["save", "restore"])
def test_all_hear_of_a_directory_that_process_0_cannot_list(tmp_path, monkeypatch, call):
    """As where a file system of a network fails: the others would wait for process 0, which may catch the error."""
    told, checkpoints = [], jdp.Checkpointer(tmp_path)

    def fails(directory):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"\[Errno 5\] Input/output error"):
        patch.setattr(jdp._checkpoint.steps, "tell_all", lambda *args: told.append(args[0]) or [args[0]])
        patch.setattr(jdp._checkpoint.steps, "steps_in", fails)
        checkpoints.save(1, at(1)) if call == "save" else checkpoints.restore(at(1))
    assert "[Errno 5] Input/output error" in told[0]
    assert checkpoints.save(1, at(1))
    checkpoints.close()


# One writer.


def test_a_save_after_close_takes_the_lock_again(tmp_path):
    checkpointer = jdp.Checkpointer(tmp_path)
    for step in (1, 2):
        assert checkpointer.save(step, at(step), data=step)
        assert (tmp_path / ".jdp-lock").exists()
        checkpointer.close()
        assert not (tmp_path / ".jdp-lock").exists()
        assert restored(tmp_path) == step


def test_a_save_after_close_is_refused_if_another_writer_has_saved_a_newer_step_since(tmp_path, refused):
    with jdp.Checkpointer(tmp_path) as first:
        assert first.restore(STATE)[1] is None
        first.save(1, at(1), data=1)
        first.close()
        saved(tmp_path / "other", 4)
        (tmp_path / "other" / "4").rename(tmp_path / "4")
        for step in (3, 4):
            with refused(ValueError, "Checkpointer", match=rf"step {step} cannot be .* holds step 4 .* Call restore"):
                first.save(step, at(step))
        assert first.restore(STATE)[1] == 4 and first.save(5, at(5), data=5)
    assert restored(tmp_path) == 5


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path, refused):
    first, second = jdp.Checkpointer(tmp_path), jdp.Checkpointer(tmp_path)
    assert first.restore(STATE)[1] is None and second.restore(STATE)[1] is None  # both may look
    first.save(1, at(1), data=1)
    match = rf"{tmp_path} is being written by process {os.getpid()} on {socket.gethostname()}; .*one writer"
    with refused(RuntimeError, "Checkpointer", match=match):
        second.save(2, at(2))
    first.wait()
    assert second.restore(STATE)[1] == 1 and second.latest_step == 1
    first.close()
    assert second.save(2, at(2), data=2)
    second.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_refused_writer_changes_nothing(tmp_path):
    with jdp.Checkpointer(tmp_path) as first:
        first.save(1, at(1))
        first.wait()
        (tmp_path / "2.orbax-checkpoint-tmp").mkdir()  # what the first may be at
        before = [entry for entry in look(tmp_path)[1:]]
        with jdp.Checkpointer(tmp_path, keep=1) as second, pytest.raises(RuntimeError, match="is being written by"):
            second.save(7, at(7))
        assert look(tmp_path)[1:] == before


@pytest.mark.full
@pytest.mark.parametrize("end", ["close", "with", "drop", "sigterm", "failed save"])
def test_the_lock_is_given_back(tmp_path, end):
    run = tmp_path / "run"
    first = jdp.Checkpointer(run)
    first.save(1, at(1))
    assert (run / LOCK).is_file()
    if end == "close":
        first.close()
    elif end == "with":
        with first:
            pass
    elif end == "drop":
        first.wait()
        del first
        gc.collect()
    elif end == "sigterm":
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            first.save(2, at(2))
    else:
        first.wait()
        shutil.rmtree(run)
        run.write_text("no directory")
        with contextlib.suppress(RuntimeError):
            first.save(2, at(2))
        with contextlib.suppress(RuntimeError):
            first.close()
        run.unlink()
    assert not (run / LOCK).exists()
    with jdp.Checkpointer(run) as second:
        second.restore(STATE)
        assert second.save(9, at(9))


@pytest.mark.full
def test_a_dropped_one_keeps_the_lock_until_its_save_is_complete(tmp_path, monkeypatch):
    going = threading.Event()
    first = jdp.Checkpointer(tmp_path)
    first.save(1, at(1))
    first.wait()
    monkeypatch.setattr("jdp._checkpoint.write.Writer._delete_old", lambda writer: going.wait(20))
    first.save(2, at(2), data=2)
    del first
    gc.collect()
    with jdp.Checkpointer(tmp_path) as second:
        second.restore(STATE)
        with pytest.raises(RuntimeError, match="is being written by"):
            second.save(3, at(3))
        going.set()
        end = time.monotonic() + 20
        while (tmp_path / LOCK).exists() and time.monotonic() < end:
            gc.collect()
            time.sleep(0.02)
        assert second.restore(STATE)[1] == 2
        assert second.save(3, at(3))


def test_one_whose_close_was_interrupted_keeps_the_lock_until_its_save_is_complete(tmp_path, monkeypatch):
    going = threading.Event()
    with jdp.Checkpointer(tmp_path) as first, jdp.Checkpointer(tmp_path) as second:
        second.restore(STATE)
        monkeypatch.setattr("jdp._checkpoint.write.Writer._delete_old", lambda writer: going.wait(20))
        first.save(1, at(1), data=1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("jdp._checkpoint.write.Writer._join", lambda *args: signal.raise_signal(signal.SIGINT))
            first.close()
        with pytest.raises(RuntimeError, match="is being written by .* close its Checkpointer"):
            second.save(2, at(2))
        going.set()
        first.close()  # as the error says
        assert second.restore(STATE)[1] == 1 and second.save(2, at(2), data=2)


def test_a_lock_file_that_was_deleted_is_made_again(tmp_path, refused):
    with jdp.Checkpointer(tmp_path) as first, jdp.Checkpointer(tmp_path) as second:
        first.save(1, at(1))
        (tmp_path / LOCK).unlink()
        first.save(2, at(2))
        with refused(RuntimeError, "Checkpointer", match="is being written by"):
            second.save(3, at(3))
        first.wait()
        shutil.rmtree(tmp_path)
        assert first.save(3, at(3), data=3)
    assert os.listdir(tmp_path) == ["3"]


def test_a_child_that_is_forked_has_no_lock(tmp_path):
    """One that outlives its parent would hold it; and its copy of the Checkpointer must not give it back."""
    first = jdp.Checkpointer(tmp_path)
    first.save(1, at(1))
    first.wait()
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's and Python's: threads are not forked
        child = os.fork()
    if not child:
        first._writer._lock.release()
        os.write(tell, b"-" if first._writer._lock._handle is None else b"+")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"-" and (tmp_path / LOCK).is_file()
        with jdp.Checkpointer(tmp_path) as second, pytest.raises(RuntimeError, match="is being written by"):
            second.save(2, at(2))
        os.close(first._writer._lock._handle)  # as at a kill -9 of the parent: nothing is given back
        first._writer._lock._handle = None
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        with jdp.Checkpointer(tmp_path) as second:
            second.restore(STATE)
            assert second.save(2, at(2))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, number):
    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match=f"{tmp_path} is on a file system without locks") as caught:
            checkpointer.save(1, at(1))
        assert len(caught) == 1 and caught[0].filename == __file__
        checkpointer.save(2, at(2), data=2)  # once is enough
    assert restored(tmp_path) == 2 and sorted(os.listdir(tmp_path)) == ["1", "2"]


KILLED = """
    import os, sys
    import jdp
    jdp.virtual_cpu_devices(1)
    import numpy as np
    checkpointer = jdp.Checkpointer(sys.argv[1])
    checkpointer.restore({"w": np.ones(3)})
    checkpointer.save(1, {"w": np.ones(3)})
    checkpointer.wait()
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.full
def test_a_writer_in_another_process_is_named_and_a_killed_one_is_no_more(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    root = os.path.dirname(os.path.dirname(jdp.__file__))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=root) as p:
        try:
            pid = int(p.stdout.readline())
            with jdp.Checkpointer(tmp_path) as checkpointer:
                checkpointer.restore({"w": np.zeros(3)})
                with pytest.raises(RuntimeError, match=f"is being written by process {pid} on {socket.gethostname()};"):
                    checkpointer.save(2, {"w": np.ones(3)})
        finally:
            p.kill()
    assert (tmp_path / LOCK).exists()  # it had no time to delete it
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"w": np.zeros(3)})
        assert checkpointer.save(2, {"w": np.ones(3)})
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


# Any number of readers.


def test_a_reader_changes_nothing(tmp_path):
    saved(tmp_path, 1, 2)
    harm(tmp_path / "2")
    (tmp_path / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)  # another job is at it
    before = look(tmp_path)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match="step 2 is damaged"):
            assert checkpointer.restore(STATE)[1] == 1
        assert checkpointer.latest_step == 1
    assert look(tmp_path) == before


def test_a_reader_writes_nowhere(tmp_path, monkeypatch):
    """Not in the directory, and not if the operating system would let it."""
    saved(tmp_path, 1)
    os_open = os.open

    def read_only(path, flags, *args, **kwargs):
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or str(tmp_path) not in str(path), path
        return os_open(path, flags, *args, **kwargs)

    def fails(path, *args, **kwargs):
        assert str(tmp_path) not in str(path), path
        raise AssertionError(path)

    monkeypatch.setattr(os, "open", read_only)
    for name in ("mkdir", "unlink", "rename", "rmdir", "replace"):
        monkeypatch.setattr(os, name, fails)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(STATE)[1] == 1


def test_a_reader_makes_no_directory(tmp_path):
    with jdp.Checkpointer(tmp_path / "none") as checkpointer:
        assert checkpointer.restore(STATE)[0] is STATE and checkpointer.latest_step is None
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_that_its_writer_deletes_is_no_damage(tmp_path, monkeypatch):
    """A reader takes the newest then, which is one that came meanwhile."""
    saved(tmp_path, 1, 2)
    read = jdp._checkpoint.steps.read

    def read_late(path, leaves):
        if path.name == "2":
            saved_later(tmp_path)
        return read(path, leaves)

    def saved_later(directory):
        monkeypatch.setattr(jdp._checkpoint.steps, "read", read)
        with jdp.Checkpointer(directory, keep=1) as writer:
            writer.restore(STATE)
            writer.save(3, at(3), data=3)

    monkeypatch.setattr(jdp._checkpoint.steps, "read", read_late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(tmp_path) == 3


# What is not ours.


def test_what_is_only_called_alike_is_not_deleted(tmp_path):
    names = [
        "mine.orbax-checkpoint-tmp",
        "5.orbax-checkpoint-tmp.bak",
        "x7.orbax-checkpoint-tmp",
        "07.orbax-checkpoint-tmp",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "work").write_text("mine")
    (tmp_path / "9.orbax-checkpoint-tmp").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "work").write_text("mine")
    (tmp_path / "8.orbax-checkpoint-tmp").symlink_to(tmp_path / "elsewhere")
    for name in ("6.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp-1700000000"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "link").symlink_to(tmp_path / "elsewhere")
    saved(tmp_path, 1)
    left = {*names, "9.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp", "elsewhere", "1"}
    assert {*os.listdir(tmp_path)} == left
    assert all((tmp_path / name / "work").read_text() == "mine" for name in [*names, "elsewhere"])


@pytest.mark.parametrize("what", ["link", "hard link", "FIFO", "directory"])
def test_a_lock_that_is_no_file_of_the_directory_is_refused(tmp_path, refused, what):
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("precious")
    if what == "link":
        (run / LOCK).symlink_to(victim)
    elif what == "hard link":
        os.link(victim, run / LOCK)
    elif what == "FIFO":
        os.mkfifo(run / LOCK)
    else:
        (run / LOCK).mkdir()
    with jdp.Checkpointer(run) as checkpointer:
        with refused(OSError, "Checkpointer", match="run cannot be written: .*(it is a|is a file elsewhere)"):
            checkpointer.save(1, at(1))
    assert victim.read_text() == "precious"


def test_the_probe_follows_no_link(tmp_path):
    """Its name was known before: the number of the process."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / f".jdp-{os.getpid()}-0").symlink_to(victim)
    saved(run, 1)
    assert victim.read_text() == "precious" and restored(run) == 1


def sign(content):
    sha = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": sha})


def content_of(path):
    return json.loads((path / "jdp" / "metadata").read_text())["content"]


WRONG = {
    "no JSON": "{",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "content is a list": sign([]),
    "content is null": sign(None),
    "no digest": '{"content": {}}',
    "deep": "[" * 100_000,
    "deep content": '{"content": ' + "[" * 900 + "]" * 900 + ', "sha256": "0"}',
    "huge number": '{"content": ' + "9" * 5000 + ', "sha256": "0"}',
}
MISSING = ["format", "step", "versions", "leaves", "fingerprints", "data"]
TYPES = {
    "format": [None, "1", True, 0.5, []],
    "step": [None, "2", True, 2.5, [2]],
    "versions": [None, [], 3],
    "leaves": [None, [], {"['w']": None}, {"['w']": ["float32"]}, {"['w']": ["float32", [None]]}, {"['w']": [6, [6]]}],
    "fingerprints": [None, [], {"['w']": 3}, {}, {"['w']": None, "['b']": []}],
    "apart": [True, 1],
    "numbers": [None, "['w']", ["['nothing']"]],
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_manifest_that_is_none_is_damage(tmp_path, text):
    saved(tmp_path, 1, 2)
    (tmp_path / "2" / "jdp" / "metadata").write_text(text)
    with pytest.warns(UserWarning, match=r"step 2 is damaged \(jdp/metadata: .*; step 1 is restored"):
        assert restored(tmp_path) == 1


@pytest.mark.one_case
@pytest.mark.parametrize(
    "key, value",
    [*((key, ...) for key in MISSING), *((key, value) for key, values in TYPES.items() for value in values)],
    ids=str,
)
def test_a_manifest_with_a_right_digest_and_wrong_entries_is_damage(tmp_path, key, value):
    saved(tmp_path, 1, 2)
    content = content_of(tmp_path / "2")
    content |= {} if value is ... else {key: value}
    if value is ...:
        del content[key]
    (tmp_path / "2" / "jdp" / "metadata").write_text(sign(content))
    with pytest.warns(UserWarning, match=r"step 2 is damaged \(.+\); step 1 is restored"):
        assert restored(tmp_path) == 1
    with jdp.Checkpointer(tmp_path, keep=1) as checkpointer:  # nor does it end the writer
        checkpointer.restore(STATE, step=1)
        checkpointer.save(3, at(3), data=3)
    assert restored(tmp_path) == 3


def outside(path, victim):
    """The directory as a link to a copy of it elsewhere, which is whole."""
    shutil.move(path, victim)
    path.symlink_to(victim)


def special(make):
    def harm(path, victim):
        path.unlink()
        make(path)

    return harm


def bound(path):
    s = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        s.bind(path.name)
    finally:
        os.chdir(here)
        s.close()


HOSTILE = {
    "step is a link": ("", outside, "it is a link"),
    "item is a link": ("jdp", outside, "jdp: it is a link"),
    "arrays are a link": ("state", outside, "state: it is a link"),
    "manifest is a link": ("jdp/metadata", outside, "metadata: it is a link"),
    "manifest is a FIFO": ("jdp/metadata", special(os.mkfifo), "metadata: it is a FIFO"),
    "manifest is a socket": ("jdp/metadata", special(bound), "metadata: it is a socket"),
    "manifest is a directory": ("jdp/metadata", special(os.mkdir), "metadata: .*it is a directory"),
    "metadata is a FIFO": ("_CHECKPOINT_METADATA", special(os.mkfifo), "_CHECKPOINT_METADATA: it is a FIFO"),
    "array file is a FIFO": ("state/manifest.ocdbt", special(os.mkfifo), "manifest.ocdbt: it is a FIFO"),
    "array file is a link": ("state/manifest.ocdbt", outside, "manifest.ocdbt: it is a link"),
    "array tree is a link": ("state/d", outside, "state/d: it is a link"),
    "a further link": ("state/further", lambda path, victim: path.symlink_to("/etc/passwd"), "further: it is a link"),
    "a large manifest": ("jdp/metadata", lambda path, victim: os.truncate(path, 300 << 20), "it has 300 MiB, and at"),
    "large arrays": ("state/d/more", lambda path, victim: (path.touch(), os.truncate(path, 1 << 40)), "far more than"),
    "a large tree": ("state/_METADATA", lambda path, victim: os.truncate(path, 300 << 20), "it has 300 MiB, and at"),
}


@pytest.mark.full
@pytest.mark.one_case("step is a link", "manifest is a FIFO", "a large tree")
@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
def test_nothing_but_files_of_the_directory_is_read(tmp_path, case):
    name, attack, match = case
    run, victim = tmp_path / "run", tmp_path / "victim"
    saved(run, 1, 2)
    attack(run / "2" / name, victim)
    files = [victim, *victim.rglob("*")] if victim.is_dir() else [victim] if victim.exists() else []
    before = [(p, p.stat().st_mtime_ns, p.stat().st_atime_ns, p.stat().st_size) for p in files if p.is_file()]
    tracemalloc.start()
    began = time.monotonic()
    with pytest.warns(UserWarning, match=rf"step 2 is damaged \(.*{match}.*; step 1 is restored"):
        assert restored(run) == 1
    assert time.monotonic() - began < 10 and tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    with jdp.Checkpointer(run) as checkpointer, pytest.raises(RuntimeError, match=rf"step 2 is damaged \(.*{match}"):
        checkpointer.restore(STATE, step=2)
    with jdp.Checkpointer(run, keep=1) as checkpointer:  # the writer neither follows it nor deletes what it leads to
        checkpointer.restore(STATE, step=1)
        checkpointer.save(3, at(3), data=3)
    assert [(p, p.stat().st_mtime_ns, p.stat().st_atime_ns, p.stat().st_size) for p, *_ in before] == before
    assert restored(run) == 3


def test_a_large_file_that_is_not_read_is_no_damage(tmp_path):
    """Orbax's file of the shardings: 1,024 devices and 2,300 leaves make 34 MiB of it."""
    saved(tmp_path, 1)
    with open(tmp_path / "1" / "state" / "_sharding", "w") as file:
        file.truncate(100 << 20)
    assert restored(tmp_path) == 1


def test_no_room_is_no_damage(tmp_path, monkeypatch, refused):
    """Neither on a device nor on the host, when it is restored and when the writer looks whether it is intact."""
    saved(tmp_path, 1, 2)
    read_arrays, full = jdp._checkpoint.read._pieces, MemoryError("of the host")

    def no_room(*args):
        raise full

    monkeypatch.setattr(jdp._checkpoint.read, "_pieces", no_room)
    for error in (full, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        full = error
        with jdp.Checkpointer(tmp_path) as reader, refused(MemoryError, "Checkpointer", match="NumPy arrays"):
            reader.restore(STATE)
        with pytest.raises(type(error)):
            jdp._checkpoint.read.intact(tmp_path / "2")
    monkeypatch.setattr(jdp._checkpoint.read, "_pieces", read_arrays)
    with monkeypatch.context() as patched, jdp.Checkpointer(tmp_path) as reader:
        patched.setattr(jdp._checkpoint.read, "fingerprints", no_room)  # of what has been read
        with refused(MemoryError, "Checkpointer", match="NumPy arrays"):
            reader.restore(STATE)
    assert restored(tmp_path) == 2 and sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.mark.parametrize("stale", [OSError(errno.ESTALE, "Stale file handle"), ValueError("[os_error_code='5']")])
def test_an_error_that_passes_is_no_damage(tmp_path, monkeypatch, stale):
    """As of NFS; in the words of Python, and of tensorstore."""
    saved(tmp_path, 1, 2)
    read_manifest, errors = jdp._checkpoint.read._read_manifest, [stale]

    def once(path):
        with jdp._checkpoint.read._named("metadata"):
            if errors:
                raise errors.pop()
        return read_manifest(path)

    monkeypatch.setattr(jdp._checkpoint.read, "_PAUSE", 0.0)
    monkeypatch.setattr(jdp._checkpoint.read, "_read_manifest", once)
    assert restored(tmp_path) == 2
    errors.append(stale)
    assert jdp._checkpoint.read.intact(tmp_path / "2") == ""
    errors.extend([stale, stale])
    assert jdp._checkpoint.read.intact(tmp_path / "2").startswith("metadata: ")


def test_a_writer_that_did_not_restore_deletes_links_and_not_what_they_lead_to(tmp_path):
    run, victim = tmp_path / "run", tmp_path / "victim"
    saved(run, 2)
    outside(run / "2", victim)
    before = look(victim)
    with jdp.Checkpointer(run, keep=1) as checkpointer:
        checkpointer.save(3, at(3), data=3)
    assert look(victim) == before and os.listdir(run) == ["3"]


def test_a_device_is_not_opened(tmp_path):
    saved(tmp_path, 1, 2)
    file = tmp_path / "2" / "jdp" / "metadata"
    file.unlink()
    try:
        os.mknod(file, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: it never ends
    except PermissionError:
        pytest.skip("only root makes devices")
    with pytest.warns(UserWarning, match=r"step 2 is damaged \(jdp/metadata: it is a device"):
        assert restored(tmp_path) == 1


def test_an_array_that_claims_another_size_is_not_read(tmp_path):
    """With right digests: 40 GB of zeros that no file has to hold."""
    import tensorstore

    saved(tmp_path, 1, 2)
    where = {"driver": "file", "path": f"{tmp_path}/2/state/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": where}).result()
    about = json.loads(store.read("['w']/.zarray").result().value)
    store.write("['w']/.zarray", json.dumps(about | {"shape": [10**10], "fill_value": 0.0}).encode()).result()
    with pytest.warns(UserWarning, match=r"step 2 is damaged \(\['w'\]: \[10000000000\] are stored, and not \[6\]\)"):
        assert restored(tmp_path) == 1


def test_the_directory_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    saved(tmp_path / "link", 1)
    with jdp.Checkpointer(tmp_path / "link") as checkpointer:
        assert os.fspath(checkpointer.directory) == str(tmp_path / "real")
    assert restored(tmp_path / "link") == restored(tmp_path / "real") == 1


@pytest.mark.full
def test_data_that_could_not_be_read_back_is_not_saved(tmp_path, refused):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with refused(ValueError, "Checkpointer", match="as JSON; they are read back if they are at most 32 MiB"):
            checkpointer.save(1, STATE, data="x" * (33 << 20))
        assert checkpointer.save(1, STATE, data="x" * (30 << 20))
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert len(checkpointer.restore(STATE)[1]) == 30 << 20


# What is put back.


@pytest.mark.parametrize("first", [0, 1])
def test_hooks_and_handlers_come_back_whichever_closes_first(tmp_path, first):
    before = sys.unraisablehook, signal.getsignal(signal.SIGTERM)
    both = [jdp.Checkpointer(tmp_path), jdp.Checkpointer(tmp_path)]
    both[first].close()
    assert sys.unraisablehook is not before[0] and signal.getsignal(signal.SIGTERM) is not before[1]
    both[1 - first].close()
    assert sys.unraisablehook is before[0] and signal.getsignal(signal.SIGTERM) is before[1]


def test_the_hook_comes_back_after_a_failed_save(monkeypatch):
    monkeypatch.setattr(directory_of, "_LATE", 0.2)
    before = sys.unraisablehook  # an earlier test's may still be there, and go meanwhile
    quiet = Quiet()
    quiet.abandoned = True
    own = sys.unraisablehook
    quiet.close()
    assert sys.unraisablehook is own is not before  # what was abandoned may report yet
    end = time.monotonic() + 60
    while sys.unraisablehook is own and time.monotonic() < end:
        time.sleep(0.01)
    assert sys.unraisablehook is not own


def test_a_run_that_a_failed_save_ends_puts_everything_back(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_of, "_LATE", 0.2)

    def patched():
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        filters = logging.getLogger("absl").filters
        return [sys.unraisablehook, sys.excepthook, sys.exit, threading.excepthook, *handlers, *filters]

    def until(holds):
        end = time.monotonic() + 60
        while not holds() and time.monotonic() < end:
            time.sleep(0.01)
        return holds()

    # The hooks of an earlier test's failed save stay for some seconds.
    assert until(lambda: not any(isinstance(getattr(x, "__self__", x), Quiet) for x in patched()))
    before = patched()
    with pytest.raises(RuntimeError, match="step 2 was not saved"), jdp.Checkpointer(tmp_path / "run") as checkpointer:
        assert patched() != before
        checkpointer.save(1, np.ones(2))
        checkpointer.wait()
        shutil.move(tmp_path / "run", tmp_path / "away")
        (tmp_path / "run").write_text("no directory any more")
        checkpointer.save(2, np.ones(2))
    assert until(lambda: patched() == before)


@pytest.mark.parametrize(
    "name, what",
    {
        "a\\b": "has a backslash",
        "..\\b/run": "has a backslash",
        "link": "has a backslash",
        "runs/gs://bucket": "has '://' in the middle",
        "gs://bucket/a\\b": "has a backslash",
        "gs://bucket/s3://run": "has '://' in the middle",
        "disk://run": "is in a storage that jdp has no access to",
        "a\udcff": "has a character that is none in UTF-8",
        "b\ud800": "has a character that is none in UTF-8",
        "a\0b": "has a null character",
    }.items(),
    ids=ascii,
)
def test_a_path_that_not_all_who_write_there_take_for_the_same_is_refused(tmp_path, monkeypatch, refused, name, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c\\d").mkdir()
    (tmp_path / "link").symlink_to("c\\d")
    before = look(tmp_path)
    with refused(ValueError, "Checkpointer", match=what):
        jdp.Checkpointer(name)
    assert look(tmp_path) == before


def test_paths_of_cloud_storage_are_left_as_they_are(monkeypatch):
    """No links, no locks and no files of the operating system are there."""
    assert not directory_of.is_local("gs://bucket/run") and directory_of.is_local("/tmp/run")
    lock = directory_of.Lock("gs://bucket/run")
    made = []
    monkeypatch.setattr(directory_of, "make_writable", made.append)
    monkeypatch.setattr(os, "open", lambda *args: pytest.fail(f"opened {args}"))
    lock.acquire()
    lock.release()
    assert made == ["gs://bucket/run"]


def test_the_name_of_a_file_that_is_none_in_utf_8_can_be_told_to_all(monkeypatch):
    """As in: it is a link, and only files of the checkpoint are read."""
    exchange = types.SimpleNamespace(come_to=lambda verb: None, dispatching=contextlib.nullcontext)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jdp._checkpoint.read.exchange_of", lambda processes: exchange)
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", lambda x: np.stack([x, x]))
    assert tell_all(os.fsdecode(b"a\xff: it is a link")) == ["a?: it is a link"] * 2


@pytest.mark.parametrize("error", ["UNKNOWN: Gloo AllGather failed: Connection closed by peer", "a bug"])
def test_a_broken_connection_is_told_also_if_jax_raises_it_as_a_value_error(monkeypatch, error):
    """As on a single CPU device. `restore` raises a ValueError for a checkpoint of another model."""

    def gather(x):
        raise ValueError(error)

    exchange = types.SimpleNamespace(come_to=lambda verb: None, dispatching=contextlib.nullcontext)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jdp._checkpoint.read.exchange_of", lambda processes: exchange)
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)
    kind, text = (ValueError, "a bug") if error == "a bug" else (RuntimeError, "another process of the job has ended")
    with pytest.raises(kind, match=text):
        tell_all("")
