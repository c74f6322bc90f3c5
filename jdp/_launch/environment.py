"""The environment that the launcher gives to each process."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
from collections.abc import Mapping

from .options import Job

_CPU_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def environments(job: Job, attempt: int, gpus: int, base: Mapping[str, str]) -> list[dict[str, str]]:
    """One environment for each process of this node, in the order of their ranks; `base` is what they share."""
    shared = dict(base)
    shared["JAX_COORDINATOR_ADDRESS"] = job.coordinator or f"127.0.0.1:{_free_port()}"
    shared["JDP_NUM_PROCESSES"] = str(job.nodes * job.processes)
    shared["JDP_ATTEMPT"] = str(attempt)
    shared["PYTHONUNBUFFERED"] = "1"
    if job.cpu_devices is not None:
        _set_cpu_devices(shared, job.cpu_devices)
    share = 0 if "JAX_LOCAL_DEVICE_IDS" in base else gpus // job.processes
    every = []
    for local in range(job.processes):
        rank = (job.node or 0) * job.processes + local
        own = {"JDP_PROCESS_ID": str(rank), "JDP_LOCAL_PROCESS_ID": str(local)}
        if share:
            own["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(local * share, (local + 1) * share)))
        every.append(shared | own)
    return every


def _set_cpu_devices(env: dict[str, str], devices: int) -> None:
    env["JAX_PLATFORMS"] = "cpu"
    env["JAX_NUM_CPU_DEVICES"] = str(devices)
    if _CPU_DEVICES_FLAG in env.get("XLA_FLAGS", ""):  # the older way; JAX refuses two answers
        words = env["XLA_FLAGS"].split()
        env["XLA_FLAGS"] = " ".join(word for word in words if not word.startswith(_CPU_DEVICES_FLAG))
    # Two threads for each device, else a plain loop of steps with collectives deadlocks on few cores;
    # jdp.virtual_cpu_devices does the same within a process. PJRT_NPROC would win over NPROC.
    threads = env.pop("PJRT_NPROC", "") or env.get("NPROC", "")
    env["NPROC"] = str(max(2 * devices, int(threads) if threads.isdecimal() else 0))


def gpus_to_divide(job: Job, env: Mapping[str, str]) -> int:
    """The number of GPUs to divide among the processes of this node, evenly; 0 where there is nothing to divide."""
    platforms = env.get("JAX_PLATFORMS", "")
    gpu_wanted = not platforms or any(name in platforms for name in ("cuda", "gpu"))
    if job.processes == 1 or job.cpu_devices is not None or "JAX_LOCAL_DEVICE_IDS" in env or not gpu_wanted:
        return 0
    gpus = _count_gpus(env)
    if gpus % job.processes:
        raise ValueError(
            f"{gpus} GPUs and {job.processes} processes; each process gets the same number of GPUs. Pass a -n that "
            f"divides {gpus}, hide GPUs with CUDA_VISIBLE_DEVICES, set JAX_LOCAL_DEVICE_IDS yourself, or pass "
            "--devices-per-process to run on the CPU."
        )
    return gpus


def _count_gpus(env: Mapping[str, str]) -> int:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA stops at these
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, env=dict(env))
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _free_port() -> int:
    # None of those that the system gives to connections: one of these may have it before rank 0 listens there.
    for port in random.SystemRandom().sample(range(15_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("jdp launch: no port between 15000 and 32000 is free. Pass --coordinator HOST:PORT.")
