"""initialize: `jax.distributed.initialize` with defaults under which a fault ends the job instead of hanging it."""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
from typing import Any

import jax

from .._jax.private import absent_are_named, found_by_cluster
from .compilation_cache import use_compilation_cache
from .coordination import own_process, process_count
from .last_words import install
from .watch import limits


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float | None = 20,
    start_timeout: float = 60,
    heartbeat_timeout: int = 60,
    shutdown_timeout: int = 60,
    thread_guard: bool = True,
    quiet: bool = False,
    compilation_cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> None:
    """Makes this process one of a job of many: `jax.distributed.initialize`, by which no fault hangs the others.

    Call it first, before anything asks JAX for devices. It needs no arguments where one of these has started the
    processes; the first that is found counts:

    * `jdp launch`.
    * what sets `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (Kubeflow Trainer and others).
    * torchrun, and what sets its variables. The processes meet at `JAX_COORDINATOR_ADDRESS`, or else at `MASTER_ADDR`
      and the port after `MASTER_PORT`, at which torchrun itself listens. Of several processes on a machine each has
      the GPU of its `LOCAL_RANK`, as in torch's scripts; `JAX_LOCAL_DEVICE_IDS` says otherwise.
    * Slurm, Open MPI 4, Kubernetes, a TPU pod; the detection is JAX's own.

    Where nothing says that there are other processes it does nothing, so that the same script runs alone. Where
    something says that there are (`WORLD_SIZE`, `PMI_SIZE`, ...), and the rest is not known, it is an error: a job of
    several processes never falls apart into several of one. Where JAX's own `initialize` has run already (Ray Train
    calls it), the job stays as it is, and gets what is promised here but for the times that JAX was told then.

    What JAX leaves waiting for minutes, or for ever, ends within seconds:

    * an exception: the process prints it, tells the others, and ends (JAX would wait in its exit for the others);
      they print whose it was, and end.
    * a dead process: a collective breaks, and the others raise an error or end.
    * a stuck or stopped process, or a network that is cut: the others wait `timeout` for it. At a call of jdp they
      raise a `jdp.distributed.DesyncError` that names it; where they wait for a program that was dispatched, each says
      who has not come to it, or gives no sign of life, and ends with exit code 76. No time-out of NCCL or Gloo is
      needed. A process that compiles a program is not late.
    * a second thread, whose calls would mix with the first's into wrong sums, gets a `RuntimeError`.

    Args:
        coordinator_address: `"host:port"` of process 0. Default: what the launcher or the cluster says.
        num_processes: how many there are; likewise.
        process_id: which this one is, from 0; likewise.
        timeout: seconds that a process waits for the others, at a call of jdp or for a program that was dispatched.
            Longer, where one of them does long work alone between two steps (evaluates, or writes); None: for ever.
        start_timeout: seconds that it waits for the others to start, and at the first call of each kind. Where one
            does not start, JAX names it in the log, and ends the process with SIGABRT.
        heartbeat_timeout: seconds without a heartbeat after which a process is dead to JAX, which ends the others
            with SIGABRT. More than twice `timeout`, for the words above to come first.
        shutdown_timeout: seconds that a process which has ended waits for the others to end.
        thread_guard: whether JAX refuses calls over several processes from any other thread than this one.
        quiet: whether process 0 does not print what was found.
        compilation_cache: a folder, yours alone (mode 700, made if absent), where the programs that JAX compiles are
            kept, at most about 4 GiB: who starts again reads them. It may be shared by processes, jobs and machines.
            Default: the one that `jdp launch` names, else none. "none" is none. A setting of JAX's own
            (`JAX_COMPILATION_CACHE_DIR`) goes before.
        **options: further arguments of `jax.distributed.initialize` (`local_device_ids`, ...).

    Raises:
        RuntimeError: JAX has started already; or process 0 finds the port taken.
        ValueError: there are several processes, and not all of the three first arguments are known; or JAX's own
            `initialize` has been told others.

    Example:
        >>> import jdp
        >>> jdp.distributed.initialize()  # a job of one: nothing to do
        >>> import jax
        >>> jax.process_count()
        1

    Source: `initialize` in jax/_src/distributed.py; the time-outs' measure is torchrun's promise that any failure
    ends all workers.
    """
    use_compilation_cache(compilation_cache)
    job = None
    if jax.distributed.is_initialized():
        _refuse_other_job(num_processes, process_id)
        if process_count() == 1:
            return
    else:
        job = _job(coordinator_address, num_processes, process_id, int(start_timeout), options)
        if job is None:
            return
    limits.step = math.inf if timeout is None else float(timeout)
    limits.start = float(start_timeout)
    if job is not None:
        _start(job, int(start_timeout), heartbeat_timeout, shutdown_timeout)
    install()
    if thread_guard:
        # For the rest of the program. jax.config.update would not do: the guard holds for the thread that enters it.
        jax.thread_guard(True).__enter__()
    if job is not None and own_process() == 0 and not quiet:
        print(_found(job["coordinator_address"]), file=sys.stderr, flush=True)


def _start(job: dict[str, Any], start_timeout: int, heartbeat_timeout: int, shutdown_timeout: int) -> None:
    if job["process_id"] == 0:
        bind = job.get("coordinator_bind_address") or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        _refuse_taken_port(bind or job["coordinator_address"])
    with absent_are_named(start_timeout):
        jax.distributed.initialize(
            **job,
            initialization_timeout=start_timeout + _LATER,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=shutdown_timeout,
        )


# What says how many processes there are, and what a launcher that sets it sets as well.
_TORCHRUN = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_SIZES = {
    "JDP_NUM_PROCESSES": ("JDP_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"),  # jdp launch
    "JAX_NUM_PROCESSES": ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"),
    "WORLD_SIZE": _TORCHRUN,
    # JAX's detection knows some of these; where it does not, they say that there are others, and not where.
    "OMPI_COMM_WORLD_SIZE": (),  # Open MPI
    "PMI_SIZE": (),  # MPICH, Intel MPI
    "MV2_COMM_WORLD_SIZE": (),  # MVAPICH
    "HOROVOD_SIZE": (),
    "SLURM_STEP_NUM_TASKS": (),  # not SLURM_NTASKS, which an allocation sets, too, and one process may run there
}


def _job(address: str | None, count: int | None, here: int | None, timeout: int, options: Any) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be told, as given, or as the launcher or the cluster says.

    None for a job of one process.
    """
    address, launched = address or os.environ.get("JAX_COORDINATOR_ADDRESS"), {}
    if None in (address, count, here):
        address, count, here, launched = _launched(address, count, here)
    several = [name for name in _SIZES if (_number(name) or 1) > 1]
    # The shell of an allocation of Slurm is a step of one task, and JAX would count those of the allocation.
    in_shell = _number("SLURM_STEP_NUM_TASKS") == 1 and not several
    if count == 1 or (in_shell and (address, count, here) == (None, None, None)):
        return None
    ids, method = options.get("local_device_ids"), options.get("cluster_detection_method")
    if None in (address, count, here) and method != "deactivate":
        # JAX's own detection, before JAX's initialize, which raises where there is no cluster, and in a job of one
        # where JAX has started.
        address, count, here = found_by_cluster(address, count, here, ids, method, timeout)
    if not several and (count == 1 or (address, count, here) == (None, None, None)):
        return None
    if count == 1 or None in (address, count, here):
        raise ValueError(_incomplete(address, count, here, several))
    return {"coordinator_address": address, "num_processes": count, "process_id": here} | launched | options


def _launched(
    address: str | None, count: int | None, here: int | None
) -> tuple[str | None, int | None, int | None, dict[str, Any]]:
    """The three arguments, completed by what a launcher says that JAX does not know, and what else follows from it."""
    env = os.environ
    name = next((name for name in ("JDP_NUM_PROCESSES", "JAX_NUM_PROCESSES") if name in env), None)
    launched: dict[str, Any] = {}
    if name is None and (_number("WORLD_SIZE") or 1) > 1 and all(map(env.get, _TORCHRUN)):
        name, port = "WORLD_SIZE", _number("MASTER_PORT")
        if port is not None and address is None:
            host = env["MASTER_ADDR"]
            address = f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"
        if env.get("LOCAL_WORLD_SIZE") != "1" and "JAX_LOCAL_DEVICE_IDS" not in env:
            launched["local_device_ids"] = _number("LOCAL_RANK")
    if name is None:
        return address, count, here, {}
    # In a step of Slurm JAX would give this process the one device that Slurm means for each task.
    launched["cluster_detection_method"] = "deactivate"
    count = _number(name) if count is None else count
    return address, count, _number(_SIZES[name][0]) if here is None else here, launched


def _number(name: str) -> int | None:
    """The number in an environment variable, if there is one."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _incomplete(address: str | None, count: int | None, here: int | None, several: list[str]) -> str:
    """What says that there are several processes, and what is missing to make one job of them."""
    names = ["JAX_COORDINATOR_ADDRESS", *several, *(name for size in several for name in _SIZES[size])]
    said = [f"{name}={os.environ[name]}" for name in dict.fromkeys(names) if name in os.environ]
    unset = [name for name in dict.fromkeys(names[1:]) if name not in os.environ]
    three = {"coordinator_address": address, "num_processes": None if count == 1 else count, "process_id": here}
    missing = [name for name, value in three.items() if value is None]
    why = f" ({', '.join(unset)} not set)" if unset else ""
    call = f'"host:port", {three["num_processes"] or "n"}, i'
    return (
        f"jdp.distributed.initialize: this is one of several processes by {', '.join(said) or 'the arguments'}, and "
        f"{', '.join(missing)} cannot be found{why}; the processes become one job when each knows where all meet, how "
        f"many they are, and which one it is. Pass jdp.distributed.initialize({call}), with the host of process 0 and "
        f"with i from 0, or num_processes=1 to run alone."
    )


def _refuse_other_job(count: int | None, here: int | None) -> None:
    """JAX's own `initialize` has run; what is asked for now must be what it was told."""
    processes, own = process_count(), own_process()
    if count not in (None, processes) or here not in (None, own):
        raise ValueError(
            f"jdp.distributed.initialize: called for process {here} of {count}, and JAX is initialized already as "
            f"process {own} of {processes}; a process belongs to one job. Leave out the arguments, or call this "
            f"instead of jax.distributed.initialize."
        )


_LATER = 3  # seconds by which the coordination service gives up before those who wait for its answer


def _refuse_taken_port(bind: str) -> None:
    """JAX says "Failed to start RPC server" (0.10), or crashes (0.12)."""
    port = int(bind.rsplit(":", 1)[1])
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended are fine
                probe.bind((host, port))
            return
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RuntimeError(
                    f"jdp.distributed.initialize: process 0 cannot listen on port {port}, which is in use; the "
                    f"processes meet at a port that is free. End what has it (an earlier job?), or give all processes "
                    f"another coordinator_address (JAX_COORDINATOR_ADDRESS)."
                ) from error
            # else there is no IPv6 here, or JAX says what is wrong


def _found(address: str | None) -> str:
    # Not the devices: to ask for them starts JAX's backend, which waits for that of every other process.
    count, attempt = process_count(), int(os.environ.get("JDP_ATTEMPT", 0))
    where = f", coordinator {address}" if address else ""
    return f"jdp: {count} process{'es' * (count > 1)}{where}{f', restart {attempt}' if attempt else ''}"
