"""Compiled programs are kept: what comes back is what was put there, whatever happens; a restart compiles nothing."""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from jdp._processes import compilation_cache
from jdp._processes.compilation_cache import Programs, use_compilation_cache

ROOT = pathlib.Path(__file__).parents[2]
DATA = random.Random(0).randbytes(5000)


@pytest.fixture
def programs(tmp_path):
    """`programs(**options)`: a folder's programs, as one more process sees them."""
    opened = []

    def programs(**options):
        opened.append(compilation_cache._opened(str(tmp_path / "kept")))
        return Programs(opened[-1], str(tmp_path / "kept"), **options)

    yield programs
    for folder in opened:
        os.close(folder)


def files(tmp_path):
    return list((tmp_path / "kept").iterdir())


def test_what_is_put_is_what_one_gets(programs, tmp_path):
    one, another = programs(), programs()
    one.put("key", DATA)
    assert one.get("key") == another.get("key") == DATA and one.get("other") is None
    another.put("key", b"new")
    assert one.get("key") == b"new"
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600 and (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["flipped", "cut", "longer", "empty"])
def test_what_is_damaged_is_as_if_never_put(programs, tmp_path, kind):
    one, rng = programs(), random.Random(1)
    for _ in range(30):
        one.put("key", DATA)
        (file,) = files(tmp_path)
        data = bytearray(file.read_bytes())
        if kind == "flipped":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes({"cut": data[: rng.randrange(len(data))], "longer": data + b"x", "empty": b""}.get(kind, data))
        assert one.get("key") is None and files(tmp_path) == []  # so that it is compiled and put there anew


def test_a_program_under_another_s_name_is_not_run(programs, tmp_path):
    one = programs()
    one.put("key", DATA)
    (file,) = files(tmp_path)
    one.put("other", b"another program")
    (other,) = {*files(tmp_path)} - {file}
    file.write_bytes(other.read_bytes())
    assert one.get("key") is None and one.get("other") == b"another program" and files(tmp_path) == [other]


def test_of_many_who_put_and_get_at_once_none_sees_half_of_one(programs, tmp_path):
    versions = {bytes([i]) * 300_000 for i in range(4)}
    seen, failed = set(), []

    def work(data):
        own = programs()
        try:
            for _ in range(40):
                own.put("key", data)
                seen.add(own.get("key"))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(data,)) for data in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and seen <= versions and len(files(tmp_path)) == 1


def test_the_folder_does_not_grow_beyond_its_limit_and_what_is_used_stays(programs, tmp_path):
    one = programs(limit=32_000)
    (tmp_path / "kept" / "mine.txt").write_bytes(bytes(40_000))  # somebody's own, which does not count
    one.put("used", DATA)
    for i in range(40):
        for age, file in enumerate(sorted(files(tmp_path), key=lambda f: -f.stat().st_mtime_ns)):
            os.utime(file, (1e9 - age, 1e9 - age))  # long ago, in the same order
        assert one.get("used") == DATA
        one.put(str(i), DATA)
        sizes = {file.name: file.stat().st_size for file in files(tmp_path)}
        assert sizes.pop("mine.txt") == 40_000 and sum(sizes.values()) <= 32_000
    assert len(sizes) == 6 and one.get("39") == DATA and one.get("30") is None


def test_a_disk_that_is_full_is_said_once_and_ends_nothing(programs, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    one = programs()
    one.put("before", DATA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        one.put("key", DATA)
        one.put("key", DATA)
    assert one.get("before") == DATA and one.get("key") is None and len(files(tmp_path)) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"jdp: compiled programs cannot be kept in .*/kept: .*No space left on device; .*", said)
    one.put("key", DATA)
    assert one.get("key") == DATA


def test_hits_of_a_file_system_that_is_read_only(programs, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    one = programs()
    one.put("key", DATA)
    monkeypatch.setattr(os, "utime", read_only)
    assert one.get("key") == DATA


@pytest.fixture
def untold(monkeypatch):
    """JAX has been told of no cache; what `use_compilation_cache` tells it is undone."""
    for name in [*os.environ]:
        if "COMPILATION_CACHE" in name or "PERSISTENT_CACHE" in name:
            monkeypatch.delenv(name)
    ours = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs")
    defaults = {name: jax.config.values[name] for name in (*ours, "jax_persistent_cache_enable_xla_caches")}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    told = []
    monkeypatch.setattr(compilation_cache, "keep_programs", lambda programs, folder: not told.append(folder))
    yield told
    for name, value in defaults.items():
        jax.config.update(name, value)


def settings():
    names = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_enable_xla_caches")
    return [jax.config.values[name] for name in names]


def test_the_folder_is_the_argument_or_what_the_launcher_names(untold, tmp_path, monkeypatch):
    use_compilation_cache(None)
    use_compilation_cache("none")
    assert untold == [] and settings()[0] == 1.0
    monkeypatch.setenv("JDP_COMPILATION_CACHE", str(tmp_path / "launched"))
    use_compilation_cache("none")
    assert untold == []
    use_compilation_cache(None)
    use_compilation_cache(tmp_path / "new" / "kept")
    monkeypatch.setenv("HOME", str(tmp_path))
    use_compilation_cache("~/mine")
    assert untold == [str(tmp_path / name) for name in ("launched", "new/kept", "mine")]
    assert settings() == [0.0, "none"]


@pytest.mark.parametrize(
    "setting",
    [{"jax_compilation_cache_dir": "/own"}, {"jax_enable_compilation_cache": False}],
)
def test_a_setting_of_the_user_s_own_wins(untold, tmp_path, setting):
    for name, value in setting.items():
        jax.config.update(name, value)
    use_compilation_cache(tmp_path / "kept")
    assert untold == [] and not (tmp_path / "kept").exists() and settings()[0] == 1.0


def test_a_least_time_of_the_user_s_own_wins(untold, tmp_path, monkeypatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "xla_gpu_per_fusion_autotune_cache_dir")
    use_compilation_cache(tmp_path / "kept")
    assert len(untold) == 1 and settings() == [7.0, "xla_gpu_per_fusion_autotune_cache_dir"]


def of_mode(path, mode):
    path.mkdir()
    path.chmod(mode)


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda path: of_mode(path, 0o755), r"it belongs to user \d+ with mode 755; .* Run chmod 700"),
        (lambda path: of_mode(path, 0o770), "mode 770"),
        (lambda path: (of_mode(path.with_name("to"), 0o700), path.symlink_to("to")), "a link, .* Pass .*/to"),
        (lambda path: path.write_text(""), "Not a directory"),
    ],
)
def test_a_folder_that_is_not_the_user_s_alone_is_not_used(untold, tmp_path, capsys, make, why):
    make(tmp_path / "kept")
    use_compilation_cache(tmp_path / "kept")
    assert untold == []
    assert re.fullmatch(rf"jdp: compiled programs cannot be kept in .*/kept: .*({why}).*; this run goes on without\n",
                        capsys.readouterr().err)  # fmt: skip


def test_cloud_storage_is_no_folder(untold, capsys):
    use_compilation_cache("gs://bucket/kept")
    assert untold == [] and "for cloud storage set JAX_COMPILATION_CACHE_DIR" in capsys.readouterr().err
    assert not pathlib.Path("gs:").exists()


def test_a_folder_of_another_user_is_not_used(untold, tmp_path, capsys, monkeypatch):
    of_mode(tmp_path / "kept", 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "kept").stat().st_uid + 1)
    use_compilation_cache(tmp_path / "kept")
    assert untold == [] and re.search(r"belongs to user (\d+) with mode 700; .*\(user \d+\)", capsys.readouterr().err)
    monkeypatch.setenv("JDP_LOCAL_PROCESS_ID", "1")
    use_compilation_cache(tmp_path / "kept")
    assert capsys.readouterr().err == ""  # the first process of a machine has said it


def test_what_is_renamed_later_is_not_looked_at(programs, tmp_path):
    one = programs()
    one.put("key", DATA)
    (tmp_path / "kept").rename(tmp_path / "away")
    (tmp_path / "kept").mkdir()
    one.put("other", DATA)
    assert one.get("key") == DATA and files(tmp_path) == []


# Jobs


HEAD = """
import collections, json, os, signal, sys
gpus = os.environ.pop("JAX_LOCAL_DEVICE_IDS", "")
rank, attempt = int(os.environ["JDP_PROCESS_ID"]), int(os.environ["JDP_ATTEMPT"])
if gpus == "1" and attempt:
    sys.exit(7)  # its device is gone
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np, optax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
import jdp
jdp.distributed.initialize()
p, n = jax.process_index(), jax.process_count()
def batch(k):
    x = np.random.default_rng(k).normal(size=(12, 3)).astype(np.float32)
    return {"x": x[p::n], "y": x.sum(1)[p::n]}
def loss(v, batch):
    return ((batch["x"] @ v["params"] - batch["y"]) ** 2).mean()
step = jdp.DataParallel(lambda v, x: x @ v["params"]).train_step(loss, optax.sgd(0.1))
state = step.init({"params": np.zeros(3, np.float32)})
"""


def run(tmp_path, body, *options, **environ):
    """The launcher's exit code, what each process said, as `[(rank, of JSON)]`, and its stderr."""
    (tmp_path / "script.py").write_text(HEAD + body)
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "NPROC")}
    env |= {"PYTHONPATH": str(ROOT), "NPROC": "4"} | environ
    command = [sys.executable, "-m", "jdp", "launch", *options, "script.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    said = [(int(line[1]), json.loads(line[4:])) for line in done.stdout.splitlines() if line[4:5] == "{"]
    return done.returncode, said, done.stderr


@pytest.mark.faults
def test_a_restarted_job_compiles_nothing(tmp_path, monkeypatch):
    """Four processes write the same folder at once; after a `kill -9` each finds all that it had compiled."""
    body = """
for k in range(3): state, metrics = step(state, batch(k))
print(json.dumps({"attempt": attempt, **events}), flush=True)
if attempt == 0 and rank == 2: os.kill(os.getpid(), signal.SIGKILL)
float(metrics["loss"])
"""
    for name in ("COMPILATION_CACHE_DIR", "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):  # conftest's
        monkeypatch.delenv(f"JAX_{name}")
    options = ("-n", "4", "--max-restarts", "1", "--compilation-cache", "kept", "--devices-per-process", "1")
    code, said, err = run(tmp_path, body, *options)
    assert code == 0, err
    restarted = {rank: found for rank, found in said if found["attempt"] == 1}
    assert sorted(restarted) == [0, 1, 2, 3], err
    for found in restarted.values():
        assert found["cache_hits"] == found["compile_requests_use_cache"] > 3 and "cache_misses" not in found
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


@pytest.mark.faults
def test_a_job_goes_on_without_the_process_whose_device_is_gone(tmp_path):
    """Three processes, then two: the losses are those of one process, from the last checkpoint on."""
    body = """
with jdp.Checkpointer("run", every=2) as checkpointer:
    state, data = checkpointer.restore(state)
    for k in range(int(state.step), 10):
        state, metrics = step(state, batch(k))
        print(json.dumps({"processes": n, "gpus": gpus, "k": k, "loss": float(metrics["loss"]), "data": data}))
        checkpointer.save(k + 1, state, data={"place": gpus, "next": k + 1})
        if gpus == "1" and k == 5: sys.exit(7)
"""
    options = ("-n", "3", "--max-restarts", "3", "--min-processes", "2")
    code, said, err = run(tmp_path, body, *options, CUDA_VISIBLE_DEVICES="0,1,2")
    assert code == 0, err
    assert "rank 1 failed with exit code 7" in err and "and is left out; 2 of 3 go on (restart 2 of 3)" in err
    alone = [found for rank, found in said if found["processes"] == 2]
    first = alone[0]["k"]
    assert 2 <= first <= 6 and first % 2 == 0  # a checkpoint's step
    assert {(rank, found["gpus"]) for rank, found in said if found["processes"] == 2} == {(0, "0"), (1, "2")}
    assert [place["next"] for place in alone[0]["data"]] == [first] * 3  # of each of the three
    w, want = np.zeros(3), []
    for k in range(10):
        x = np.random.default_rng(k).normal(size=(12, 3)).astype(np.float32)
        wrong = x @ w - x.sum(1)
        want.append((wrong**2).mean())
        w = w - 0.1 * 2 * (wrong[:, None] * x).mean(0)
    for found in (found for _, found in said):
        np.testing.assert_allclose(found["loss"], want[found["k"]], rtol=1e-4)
    assert {found["k"] for found in alone} == {*range(first, 10)}
