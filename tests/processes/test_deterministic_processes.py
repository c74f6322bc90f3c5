"""`deterministic=True` over processes: the bits of one."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
DEVICES = {1: 4, 2: 2, 4: 1}  # of each process, by their number


def job(n, folder, names=()):
    """What each of n processes found."""
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES"):
        environ.pop(name, None)  # conftest's, for 8 devices
    launch = ["-m", "jdp", "launch", "-n", str(n), "--devices-per-process", str(DEVICES[n])]
    command = [sys.executable, *launch, str(HERE / "deterministic_worker.py"), str(folder), *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return [json.loads((folder / f"{p}.json").read_text()) for p in range(n)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process found."""
    return job(1, tmp_path_factory.mktemp("one") / "1")[0]


@pytest.mark.full
@pytest.mark.timeout(900)  # each process compiles, on few cores; with that of the first job
@pytest.mark.parametrize(("n", "names"), [(2, ()), (4, ("mlp", "synced", "criterion"))], ids=["2", "4"])
def test_the_bits_are_those_of_one_process(n, names, one, tmp_path):
    """Four processes train all but the Transformer, which has no option, and takes them as long as the rest."""
    found = job(n, tmp_path / str(n), names)
    for name in names or one:
        want = one[name]
        assert {each[name]["state"] for each in found} == {want["state"]}, name
        assert {each[name].get("optimizer") for each in found} == {want.get("optimizer")}, name
        # Each process has the metrics of its own rows, 57 and 7 of them, in the order of the batch.
        assert sorted(len(each[name]["rows"]) for each in found)
        assert sum(len(each[name]["rows"]) for each in found) == len(want["rows"])
