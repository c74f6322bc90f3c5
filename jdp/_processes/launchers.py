"""A launcher tells the processes that it starts how many they are, which each is, and where they meet."""

from __future__ import annotations

import importlib
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Said(NamedTuple):
    """Where the processes meet, how many they are, which this is, and further arguments of JAX's `initialize`."""

    address: str | None
    processes: int | None
    here: int | None
    options: dict[str, Any]


class Launcher(NamedTuple):
    """The environment variables of one launcher, and how the address follows from them."""

    size: str
    rank: str
    local_rank: str = ""
    local_size: str = ""
    meet: tuple[str, ...] = ()
    address: Callable[[Launcher], str | None] = lambda launcher: None

    def speaks(self) -> bool:
        """Returns True if it has started this process: its variables are set. For jdp's and JAX's the size suffices."""
        if self in OWN:
            return self.size in os.environ
        return (number(self.size) or 1) > 1 and number(self.rank) is not None and all(map(os.environ.get, self.meet))


def _of_torchrun(launcher: Launcher) -> str | None:
    port = number("MASTER_PORT")  # torchrun itself listens there
    return None if port is None else _at(os.environ["MASTER_ADDR"], port + 1)


def _of_skypilot(launcher: Launcher) -> str | None:
    hosts = os.environ["SKYPILOT_NODE_IPS"].split()
    return _at(hosts[0], number("JAX_COORDINATOR_PORT") or 8476) if hosts else None


def _on_one_machine(launcher: Launcher) -> str | None:
    """Returns an address of this machine if all processes are here: the same for each, and not that of another job."""
    if number(launcher.local_size) != number(launcher.size):
        return None
    return _at("127.0.0.1", number("JAX_COORDINATOR_PORT") or 16_384 + _launcher_pid(launcher.size) % 16_384)


def _mpi(size: str, rank: str, local_rank: str, local_size: str) -> Launcher:
    """Makes a launcher of MPI, which does not say where to meet. JAX detects that for Open MPI 4 and in Slurm."""
    return Launcher(size, rank, local_rank, local_size, (), _on_one_machine)


# In order of precedence: if one launcher is started by another, as torchrun by SkyPilot, the inner one is first.
OWN = Launcher("JDP_NUM_PROCESSES", "JDP_PROCESS_ID"), Launcher("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LAUNCHERS = (
    *OWN,
    Launcher("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT"), _of_torchrun),
    _mpi(*(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),  # Open MPI
    _mpi("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    _mpi(*(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),  # MVAPICH
    _mpi("HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    Launcher("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "", "", ("SKYPILOT_NODE_IPS",), _of_skypilot),
)
SLURM = Launcher("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")  # JAX detects where its processes meet
# Not SLURM_NTASKS, which an allocation sets, too, and one process may run there.
SIZES = tuple(launcher.size for launcher in (*LAUNCHERS, SLURM))
# They say that a launcher has numbered the processes (PMIx, an indexed Job of Kubernetes), and not how many there are.
NUMBERED = ("PMIX_RANK", "JOB_COMPLETION_INDEX", "JAX_PROCESS_ID")
# What else finds the rest.
_BY_MPI = 'with mpi4py installed, pass cluster_detection_method="mpi4py"'
_HELPS = {launcher.size: _BY_MPI for launcher in LAUNCHERS if launcher.address is _on_one_machine} | {
    "PMIX_RANK": _BY_MPI, "JOB_COMPLETION_INDEX": 'pip install "jax[k8s]", which JAX needs to ask Kubernetes'
}  # fmt: skip


def number(name: str) -> int | None:
    """Returns the number in an environment variable; None if there is none."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def several() -> list[str]:
    """Returns the variables that say that there are other processes."""
    numbered = NUMBERED if not any(map(number, SIZES)) else ()
    return [name for name in SIZES if (number(name) or 1) > 1] + [name for name in numbered if os.environ.get(name)]


class Alone:
    """Whether `initialize` was called here, and this process is a job of its own."""

    meant = False


def astray() -> str | None:
    """Returns the variables that say that this is one of several processes, if `initialize` was not called; else None.

    Only the variables of jdp's launcher and of JAX count. Other launchers, such as `srun` and `mpirun`, may start
    programs that work independently.
    """
    if Alone.meant or jax.distributed.is_initialized():
        return None
    said = next((one for one in OWN if (number(one.size) or 1) > 1), None)
    return None if said is None else f"{said.rank}={os.environ.get(said.rank)}, {said.size}={os.environ[said.size]}"


def incomplete(address: str | None, count: int | None, here: int | None) -> str:
    """Returns an error text: why there are several processes, and what is missing to make one job of them."""
    said = several()
    here = number("JAX_PROCESS_ID") if here is None and None in (address, count) else here
    spoke = [launcher for launcher in (*LAUNCHERS, SLURM) if launcher.size in said]
    names = ["JAX_COORDINATOR_ADDRESS", *said, *(name for one in spoke for name in (one.rank, *one.meet))]
    found = [f"{name}={os.environ[name]}" for name in dict.fromkeys(names) if name in os.environ]
    if address is None and not all(one.meet for one in spoke):
        names.append(names[0])
    unset = [name for name in names[1:] if name not in os.environ]
    three = {"coordinator_address": address, "num_processes": None if count == 1 else count, "process_id": here}
    missing = [name for name, value in three.items() if value is None]
    why = f" ({', '.join(dict.fromkeys(unset))} not set)" if unset else ""
    helps = "".join(f"; or {way}" for way in dict.fromkeys(_HELPS[name] for name in said if name in _HELPS))
    call = f'"host:port", {three["num_processes"] or "n"}, i'
    return (
        f"jdp.distributed.initialize: this is one of several processes by {', '.join(found) or 'the arguments'}, and "
        f"{', '.join(missing)} cannot be found{why}; the processes become one job when each knows where all meet, how "
        f"many they are, and which one it is. Pass jdp.distributed.initialize({call}), with the host of process 0 and "
        f"with i from 0, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID{helps}; or pass "
        f"num_processes=1 to run alone."
    )


def launched() -> Said:
    """Returns what the launcher of this process says; nothing if it is unknown, or if JAX should detect it."""
    launcher = next((launcher for launcher in LAUNCHERS if launcher.speaks()), SLURM)
    if launcher.local_rank and number(launcher.local_rank) is None and number(SLURM.size) is not None:
        launcher = SLURM  # `srun --mpi=pmi2` sets MPI's size and rank as well, but not the local rank
    options: dict[str, Any] = {}
    if _has_own_devices(launcher):
        options["cluster_detection_method"] = "deactivate"  # else JAX would count them by the local rank
    elif not os.environ.get("JAX_LOCAL_DEVICE_IDS") and launcher is not SLURM:
        if launcher.local_rank and os.environ.get(launcher.local_size) != "1":
            options["local_device_ids"] = number(launcher.local_rank)
    if launcher is SLURM:
        return Said(None, None, None, options)
    address = launcher.address(launcher)
    if address is not None or launcher in OWN or number(launcher.local_rank) is not None:
        # In a step of Slurm or of Open MPI JAX would give this process one device, whatever is said here.
        options["cluster_detection_method"] = "deactivate"
    return Said(address, number(launcher.size), number(launcher.rank), options)


def _has_own_devices(launcher: Launcher) -> bool:
    """Returns True if this process sees fewer GPUs than there are processes here: they are divided already."""
    visible, rank = os.environ.get("CUDA_VISIBLE_DEVICES"), number(launcher.local_rank)
    if visible is None or rank is None:
        return False
    local_size = _tasks_of_slurm() if launcher is SLURM else number(launcher.local_size)
    return len(visible.split(",")) < (local_size or rank + 1)


def _tasks_of_slurm() -> int | None:
    """Returns the number of tasks of this step on this node, of a text such as "4(x2),3" for all nodes."""
    counts: list[int] = []
    for text in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if (found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text)) is None:
            return number("SLURM_NTASKS_PER_NODE")
        counts += [int(found[1])] * int(found[2] or 1)
    node = number("SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _launcher_pid(name: str) -> int:
    """Returns the process that started those of this machine: the nearest ancestor without the variable.

    Scripts may stand between the two, and MPICH's mpiexec puts each process into a session of its own.
    """
    process = Path("/proc/self")
    try:
        while True:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            process = process.with_name(str(parent))
            if f"\0{name}=".encode() not in b"\0" + (process / "environ").read_bytes():
                return parent
    except OSError:  # another user's process; or there is no /proc here
        return os.getppid()


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ray_train() -> Any:
    """Returns the module ray.train if this process is one of its workers; else None."""
    train = sys.modules.get("ray.train")
    try:
        return train if train is not None and train.get_context() is not None else None
    except (RuntimeError, DeprecationWarning):  # Ray's words for: this is none
        return None


def ray_worker() -> Said | None:
    """Returns what Ray Train says if this process is one of its workers; else None.

    It comes before all others, because the launcher of Ray itself (Slurm) has set variables, too. For workers on CPUs
    Ray starts no job of JAX. The first worker chooses where they meet, and Ray tells the others.
    """
    train = ray_train()
    if train is None:
        return None
    context, address = train.get_context(), None
    count, here = context.get_world_size(), context.get_world_rank()
    if count > 1:
        if here == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                address = _at(importlib.import_module("ray.util").get_node_ip_address(), probe.getsockname()[1])
        address = importlib.import_module("ray.train.collective").broadcast_from_rank_zero(address)
    return Said(address, count, here, {})


def ray_has_given_notice() -> bool:
    """Returns True if Ray has told this worker that a node of its group will be taken away.

    `ray.train.get_preemption_info` is not used, because all workers wait for each other in it, without a time-out. That
    is slow at every step, and a worker that hangs would never be named.
    """
    module = sys.modules.get("ray.train.v2._internal.execution.context")
    context = getattr(module, "_train_context", None)
    return getattr(getattr(context, "preemption_context", None), "preemption_info", None) is not None
