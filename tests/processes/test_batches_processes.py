"""Batches over processes: each reads its own rows of one order, whatever their number; and what fails on one."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import jdp

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
COUNT = 23
DEVICES = {1: 4, 2: 2, 3: 2, 4: 1}  # of each process, by their number


@pytest.fixture(scope="module", params=[*[pytest.param(n, marks=pytest.mark.full) for n in (1, 3, 4)], 2])
def job(request, tmp_path_factory):
    """How many processes there are, and what each of them found."""
    n, folder = request.param, tmp_path_factory.mktemp("batches")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES"):
        environ.pop(name, None)  # conftest's, for 8 devices
    launch = ["-m", "jdp", "launch", "-n", str(n), "--devices-per-process", str(DEVICES[n])]
    command = [sys.executable, *launch, str(HERE / "batches_worker.py"), str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return n, [json.loads((folder / f"{p}.json").read_text()) for p in range(n)]


def reference(size, seed=None, epochs=1, drop_last=False):
    orders = [np.arange(COUNT)] * epochs
    if seed is not None:
        orders = [np.random.default_rng([seed, epoch]).permutation(COUNT) for epoch in range(epochs)]
    batches = [order[k : k + size] for order in orders for k in range(0, COUNT, size)]
    return [batch.tolist() for batch in batches if len(batch) == size or not drop_last]


def chunks(batch, n):
    """The rows of each process, by torch's rule for the whole batch."""
    sizes = jdp.chunk_sizes(len(batch), n * DEVICES[n])
    parts = np.split(np.array(batch, int), np.cumsum(sizes))
    parts = [part.tolist() for part in parts[:-1]] + [[]] * (n * DEVICES[n] - len(sizes))
    return [sum(parts[p * DEVICES[n] : (p + 1) * DEVICES[n]], []) for p in range(n)]


CASES = {
    "columns": reference(11, 3, 3),
    "rows": reference(11, 3, 3),
    "named": reference(11, drop_last=True),
    "start": reference(11, 3, 3)[4:],
    "tiny": reference(2, 1),
    "one row of columns": reference(1)[COUNT - 2 :],
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_the_same_rows_on_any_number_of_processes(job, case):
    n, found = job
    expected, first = CASES[case], {"start": 4, "one row of columns": COUNT - 2}.get(case, 0)
    for p in range(n):
        assert [batch["rows"] for batch in found[p][case]] == [chunks(batch, n)[p] for batch in expected]
        assert [batch["taken"] for batch in found[p][case]] == list(range(first + 1, first + 1 + len(expected)))
        for batch, rows in zip(found[p][case], expected, strict=True):
            sizes = jdp.chunk_sizes(len(rows), n * DEVICES[n])
            assert tuple(batch["sizes"])[: len(sizes)] == sizes and sum(batch["sizes"]) == len(rows)


def test_each_process_reads_its_own_rows_alone(job):
    """Nor any other to learn what they are like."""
    n, found = job
    for p in range(n):
        assert sorted(found[p]["read"]) == sorted(i for batch in CASES["rows"] for i in chunks(batch, n)[p])
        assert found[p]["tiny read"] == [i for batch in CASES["tiny"] for i in chunks(batch, n)[p]]
    if n > 2:
        assert found[-1]["tiny read"] == [] and len(found[-1]["tiny"]) == 12


def test_other_arguments_on_one_process_are_an_error_on_all(job):
    n, found = job
    for p in range(n if n > 1 else 0):
        assert found[p]["seeds"].startswith("DesyncError: jdp.batches: the processes' batches differ: dp.batches: ")
        assert "process 0 has 23 rows, batch_size=4, seed=0" in found[p]["seeds"] and "seed=1" in found[p]["seeds"]
        assert "start=0" in found[p]["numbers"] and "start=1" in found[p]["numbers"]


def test_what_the_data_raises_on_one_process_ends_all_with_the_index(job):
    """The last row of the second batch, which the last process has."""
    n, found = job
    batch = CASES["rows"][1]
    (culprit,) = [p for p in range(n) if batch[-1] in chunks(batch, n)[p]]
    assert culprit == n - 1
    for p in range(n):
        text = found[p]["bad"]
        assert f"jdp.batches: data[{batch[-1]}] raised it." in text
        start = "OSError: the disk is gone" if p == culprit else f"DesyncError: jdp.batches: process {culprit} has no"
        assert text.startswith(start)
