"""What the doctor says of the machine without starting JAX: versions, settings, memory, and known traps."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ..._version import __version__

PACKAGES = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "rich", "libtpu"]
PACKAGES += [f"jax-cuda{v}-{part}" for v in (12, 13) for part in ("plugin", "pjrt")]
PACKAGES += ["nvidia-nccl-cu12", "nvidia-nccl-cu13", "jax-rocm7-plugin", "jax-rocm60-plugin"]
SETTINGS = re.compile(
    r"(JAX|XLA|TPU|NCCL|RCCL|TF_GPU)_.*|(PJRT_)?NPROC|(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|LD_LIBRARY_PATH"
    r"|(https?|grpc|all|no)_proxy",
    re.IGNORECASE,
)
OURS = ("TPU_SKIP_MDS_QUERY",)  # set by importing jax, not by the user
QUERY = ("index", "name", "driver_version", "compute_cap", "memory.total", "memory.used")


def facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the system, memory, versions, settings that matter, and what `nvidia-smi` says."""
    total, available = memory()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "executable": sys.executable,
        # those that this process may use
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": total,
        "memory_available_bytes": available,
        "versions": versions(),
        "settings": {
            # The password of a proxy is left out, because a report is made to be pasted into an issue.
            k: re.sub(r"//[^/@\s]*@", "//***@", v)
            for k, v in sorted(environ.items())
            if SETTINGS.fullmatch(k) and k not in OURS
        },
        "hostname": socket.gethostname(),
        "address": address(),
        **(found := nvidia_smi()),
        "nvlink": len(found["gpus"]) > 1 and nvlink(),
    }


def address() -> str | None:
    """Returns what the hostname stands for, as Gloo finds it; `None` if it is unknown."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return None


def memory() -> tuple[int | None, int | None]:
    """Returns the bytes of memory in total and those that a program can have now; `None` if they are unknown."""
    total = available = None
    with contextlib.suppress(ValueError, OSError, AttributeError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return total, available


def versions() -> dict[str, str]:
    """Returns the versions of jdp and of what it runs on, where present."""
    found = {"jdp": __version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def nvidia_smi(seconds: float = 10) -> dict[str, Any]:
    """Returns `{"gpus": [...]}` by `nvidia-smi`, whatever JAX can see; or `{"gpus": [], "gpus_error": ...}`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"gpus": []}
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        return {"gpus": [], "gpus_error": f"nvidia-smi does not start: {error}"}
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2)  # a driver that is stuck holds it in the kernel: do not wait for that
        return {"gpus": [], "gpus_error": f"nvidia-smi gave no answer within {seconds:g} s"}
    if process.returncode:
        return {"gpus": [], "gpus_error": f"nvidia-smi fails: {' '.join(printed.split())[:300]}"}
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines() if line.strip()]
    return {"gpus": [dict(zip(QUERY, row, strict=True)) for row in rows if len(row) == len(QUERY)]}


def nvlink(seconds: float = 10) -> bool:
    """Returns True if NVLink joins GPUs of this machine; `False` where `nvidia-smi` does not say so."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=seconds)
        return re.search(r"\bNV\d+\b", topology.stdout) is not None
    return False
