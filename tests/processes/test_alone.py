"""A process that was started as one of several is one of a job, or says so; never a job of its own in silence."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import jdp
from jdp._processes import initialize, launchers
from jdp._processes.places import Limits

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def fresh(monkeypatch):
    """A process to which nothing was said, and in which `initialize` was not called."""
    for name in ("JAX_COORDINATOR_ADDRESS", *launchers.SIZES, *launchers.NUMBERED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launchers.Alone, "meant", False)
    return monkeypatch


def times(w, x):
    return w * x


BY_JDP = {"JDP_NUM_PROCESSES": "2", "JDP_PROCESS_ID": "1"}
BY_JAX = {"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (BY_JDP, r"by JDP_PROCESS_ID=1, JDP_NUM_PROCESSES=2, and they are not one job; .*Call jdp\.distributed\.init"),
        (BY_JAX, r"by JAX_PROCESS_ID=0, JAX_NUM_PROCESSES=3, .* jdp\.distributed\.initialize\(num_processes=1\) to"),
    ],
)
def test_one_of_several_processes_does_not_work_alone_in_silence(fresh, refused, said, match):
    x = np.ones((4, 2), np.float32)
    for name, value in said.items():
        fresh.setenv(name, value)
    with refused(RuntimeError, "DataParallel", match):
        jdp.DataParallel(times)
    with refused(RuntimeError, "data_parallel", match):
        jdp.data_parallel(times, 2.0, x)
    jdp.gather(jdp.scatter(x))  # what a loader may do
    jdp.distributed.initialize(num_processes=1)  # the way out that it names
    assert jdp.DataParallel(times)(2.0, x).sum() == jdp.data_parallel(times, 2.0, x).sum() == 16


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"JDP_NUM_PROCESSES": "1", "JDP_PROCESS_ID": "0"},  # jdp launch -n 1
        {"JDP_NUM_PROCESSES": "", "JAX_NUM_PROCESSES": "many"},
        # Under these programs may be meant to work each for itself.
        {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0"},
    ],
)
def test_who_is_alone_for_all_that_is_known_works(fresh, said):
    for name, value in said.items():
        fresh.setenv(name, value)
    jdp.DataParallel(times)


def test_what_is_only_compiled_for_absent_machines_is_no_job(fresh):
    fresh.setenv("JDP_NUM_PROCESSES", "2")
    fresh.setattr("jdp._core.devices.is_described", lambda device: True)
    jdp.DataParallel(times)


def launch(*args):
    left_out = ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")  # conftest's, for 8 devices
    environ = {name: value for name, value in os.environ.items() if name not in left_out} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jdp", "launch", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)


@pytest.mark.full
def test_the_launchers_number_of_devices_counts_and_a_script_of_one_process_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""if True:
        import jdp, sys
        jdp.virtual_cpu_devices(4)
        import jax
        print(len(jax.devices()), "devices", flush=True)
        jdp.DataParallel(lambda w, x: w * x)
        print("works alone")
    """)
    done = launch("-n", "2", "--devices-per-process", "2", str(script))
    assert done.returncode == 1, done.stderr
    lines = {*done.stdout.splitlines()}  # the launcher ends the others when the first is refused
    assert lines and lines <= {"[0] 2 devices", "[1] 2 devices"}
    assert "RuntimeError: jdp.DataParallel: this is one of several processes by JDP_PROCESS_ID=" in done.stderr
    alone = launch("-n", "1", "--devices-per-process", "3", str(script))
    assert (alone.returncode, alone.stdout) == (0, "[0] 3 devices\n[0] works alone\n"), alone.stderr


@pytest.mark.full
def test_without_a_launcher_the_script_says_how_many_devices_there_are(tmp_path):
    """Also where somebody has set JAX's variable, or the launcher without a number of devices."""
    code = "import jdp; jdp.virtual_cpu_devices(3); import jax; print(len(jax.devices()))"
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", *launchers.SIZES)}
    for said in ({"JAX_NUM_CPU_DEVICES": "2"}, {"JDP_NUM_PROCESSES": "1"}):
        left = {name: value for name, value in environ.items() if name != "JAX_NUM_CPU_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=left | said, capture_output=True, text=True, timeout=120
        )
        assert done.stdout == "3\n", done.stderr


@pytest.mark.full
@pytest.mark.parametrize("example", ["mnist.py", "mnist_nnx.py", "resnet.py", "from_torch.py"])
def test_an_example_of_one_process_says_under_the_launcher_what_to_do(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = launch("-n", "2", "--devices-per-process", "2", str(ROOT / "examples" / example))
    assert done.returncode == 1
    assert "Call jdp.distributed.initialize() first in the program" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_job_of_one_by_jax_counts_as_meant(fresh):
    fresh.setenv("JDP_NUM_PROCESSES", "2")
    fresh.setattr(jax.distributed, "is_initialized", lambda: True)
    assert launchers.astray() is None


def test_a_call_that_is_refused_sets_no_times(fresh):
    fresh.setattr(initialize, "limits", limits := Limits())
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match="cannot listen on port"):
            jdp.distributed.initialize(address, 2, 0, timeout=5, compilation_cache="none")
    assert vars(limits) == vars(Limits())


def test_a_later_call_of_a_library_leaves_the_thread_guard_off(fresh):
    guards = []
    fresh.setattr(initialize, "limits", Limits())
    for name, value in {"install": lambda: None, "process_count": lambda: 2, "coordinator": lambda: ""}.items():
        fresh.setattr(initialize, name, value)
    fresh.setattr(jax.distributed, "is_initialized", lambda: True)
    fresh.setattr(jax, "thread_guard", lambda on: guards.append(on) or contextlib.nullcontext())
    jdp.distributed.initialize(thread_guard=False, compilation_cache="none")
    jdp.distributed.initialize(compilation_cache="none")
    assert guards == []
