"""initialize: `jax.distributed.initialize` with defaults under which a fault ends the job instead of hanging it."""

from __future__ import annotations

import math
import numbers
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import jax

from .._jax.private import absent_are_named, found_by_cluster, gloo_goes_by
from .._launch.protocol import is_taken
from .compilation_cache import use_compilation_cache
from .coordination import coordinator, own_process, process_count, say
from .hooks import install
from .launchers import Alone, incomplete, launched, number, ray_worker, several
from .places import limits


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
    """Makes this process one of a job of many. It is `jax.distributed.initialize`, and no fault hangs the others.

    Call it first, before anything asks JAX for devices. It needs no arguments where one of these has started the
    processes; the first that is found counts:

    * `jdp launch`.
    * what sets `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (Kubeflow Trainer and others).
    * torchrun, and what sets its variables. The processes meet at `MASTER_ADDR` and the port after `MASTER_PORT`, at
      which torchrun itself listens.
    * Open MPI, MPICH, Intel MPI, MVAPICH, horovodrun. On several machines each needs `JAX_COORDINATOR_ADDRESS` as
      well, but for Open MPI 4 and in Slurm; or mpi4py, and `cluster_detection_method="mpi4py"`.
    * SkyPilot, with one process on each node.
    * Slurm, Kubernetes, a TPU pod; the detection is JAX's own.

    A worker of Ray Train is one of its group, whatever else is set. `JAX_COORDINATOR_ADDRESS` says where the processes
    meet, also if the launcher says something else. If a machine has several processes, each uses the GPU of its local
    rank, unless `JAX_LOCAL_DEVICE_IDS` says otherwise, or `CUDA_VISIBLE_DEVICES` has fewer GPUs than processes.

    If there is no sign of other processes it does nothing, so that the same script runs alone. If there is one
    (`WORLD_SIZE`, `PMI_SIZE`, ...), and the rest is unknown, it is an error: a job of several processes never falls
    apart into several jobs of one. If JAX's own `initialize` has run already (Ray Train calls it for GPUs), the job
    stays as it is. It gets what is promised here, with the times that JAX was told then. Call this in the thread that
    trains.

    What JAX leaves waiting for minutes, or forever, ends within seconds:

    * an exception: the process prints it, tells the others, and ends (JAX would wait for the others at exit). They
      print which process has failed, and end. The same holds in a thread, if this was called there.
    * a dead process: the others of its machine name it within seconds. On other machines a collective breaks, or they
      wait `timeout`.
    * a stuck or stopped process, or a network that is cut: the others wait `timeout` for it. At a call of jdp they
      raise a `jdp.distributed.DesyncError` that names it. If they wait for a program that was dispatched, each says
      which process has not come to it, or gives no sign of life, and ends with exit code 76. No time-out of NCCL or
      Gloo is needed. A process that compiles a program is not late.
    * a second thread, whose calls would mix with the first's into wrong sums, gets a `RuntimeError`.

    Args:
        coordinator_address: `"host:port"` of process 0. Default: what the launcher or the cluster says.
        num_processes: the number of processes. Default: as above.
        process_id: the number of this process, from 0. Default: as above.
        timeout: seconds that a process waits for the others, at a call of jdp or for a program that was dispatched.
            Longer, where one of them does long work alone between two steps (evaluates, or writes); None: forever.
        start_timeout: seconds that it waits for the others to start and to ask for their devices, at the first call of
            each kind, and at each save and restore of a `jdp.Checkpointer`. Where one does not start, JAX names it in
            the log, and ends the process with SIGABRT.
        heartbeat_timeout: seconds without a heartbeat after which a process is dead to JAX, which ends the others
            with SIGABRT. Pass more than twice `timeout`, so that the messages above come first.
        shutdown_timeout: seconds that a process which has ended waits for the others to end. Then it names those that
            have not, and the job ends.
        thread_guard: whether JAX refuses calls over several processes from any other thread than this one.
        quiet: whether process 0 does not print what was found.
        compilation_cache: a folder, yours alone (mode 700, made if absent), where the programs that JAX compiles are
            kept, at most about 4 GiB: a restarted job reads them. Processes, jobs and machines may share it.
            Default: the one that `jdp launch` names, else none. "none" is none. A setting of JAX's own
            (`JAX_COMPILATION_CACHE_DIR`) goes before.
        **options: further arguments of `jax.distributed.initialize` (`local_device_ids`, ...).

    Raises:
        RuntimeError: JAX has started already; or process 0 finds the port taken.
        ValueError: there are several processes, and not all of the three first arguments are known; or JAX's own
            `initialize` has been told others; or a time is no number of seconds.

    Example:
        >>> import jdp
        >>> jdp.distributed.initialize()  # a job of one: nothing to do
        >>> import jax
        >>> jax.process_count()
        1

    Source: `initialize` in jax/_src/distributed.py; the time-outs' measure is torchrun's promise that any failure
    ends all workers.
    """
    _check_times(timeout, start_timeout, heartbeat_timeout, shutdown_timeout)
    use_compilation_cache(compilation_cache)
    job = None
    if jax.distributed.is_initialized():
        _refuse_other_job(num_processes, process_id)
        if process_count() == 1:
            return
    else:
        job = _job(coordinator_address, num_processes, process_id, int(start_timeout), options)
        if job is None:
            Alone.meant = True
            return
    if job is not None:
        _start(job, int(start_timeout), int(heartbeat_timeout), int(shutdown_timeout))
    again = limits.are_set  # a library may call it as well, with no arguments
    if not (again and (timeout, start_timeout) == _DEFAULTS):
        limits.step, limits.start = math.inf if timeout is None else float(timeout), float(start_timeout)
        if job is not None or not again:  # JAX's own initialize has been told another, or none
            limits.shutdown = shutdown_timeout if job is not None else max(limits.shutdown, shutdown_timeout)
        limits.are_set = True
    if interface := _interface_to(job["coordinator_address"] if job else coordinator()):
        gloo_goes_by(interface)
    install()
    if thread_guard and (job is not None or not again):
        # For the rest of the program. jax.config.update would not do: the guard holds for the thread that enters it.
        jax.thread_guard(True).__enter__()
    if job is not None and own_process() == 0 and not quiet:
        say(_found(job["coordinator_address"]))


def _check_times(timeout: Any, start: Any, heartbeat: Any, shutdown: Any) -> None:
    """Raises a `ValueError` for what is no number of seconds; JAX counts in whole ones."""
    for name, seconds, least in (
        ("timeout", math.inf if timeout is None else timeout, 0.1),
        ("start_timeout", start, 1),
        ("heartbeat_timeout", heartbeat, 1),
        ("shutdown_timeout", shutdown, 1),  # with 0 JAX aborts all at the end, however well they are
    ):
        most = math.inf if name == "timeout" else 10**8
        if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not least <= float(seconds) <= most:
            raise ValueError(
                f"jdp.distributed.initialize: {name} is {seconds!r}; it is a number of seconds, {least} or more"
                f"{'' if name == 'timeout' else f', and at most {most:,}'}. Pass one"
                f"{', or None to wait forever' if name == 'timeout' else ''}."
            )


def _start(job: dict[str, Any], start_timeout: int, heartbeat_timeout: int, shutdown_timeout: int) -> None:
    if job["process_id"] == 0:
        bind = job.get("coordinator_bind_address") or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        _refuse_taken_port(_port("coordinator_bind_address", bind or job["coordinator_address"]))
    with absent_are_named(start_timeout):
        jax.distributed.initialize(
            **job,
            initialization_timeout=start_timeout + _LATER,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=shutdown_timeout,
        )


def _job(address: str | None, count: int | None, here: int | None, timeout: int, options: Any) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`, as given, or as the launcher or the cluster says.

    Returns None for a job of one process.
    """
    if count == 1:
        return None
    address, more = address or os.environ.get("JAX_COORDINATOR_ADDRESS"), {}
    ids, method = options.get("local_device_ids"), options.get("cluster_detection_method")
    if None in (address, count, here) and method in (None, "deactivate"):
        said = ray_worker() or launched()
        address, more = address or said.address, said.options
        count, here = said.processes if count is None else count, said.here if here is None else here
        if here is None and None not in (address, count):
            here = number("JAX_PROCESS_ID")  # the rest was passed as arguments
    others = several()
    # The shell of an allocation of Slurm is a step of one task, and JAX would count those of the allocation.
    in_shell = number("SLURM_STEP_NUM_TASKS") == 1 and not others
    if count == 1 or (in_shell and (address, count, here) == (None, None, None)):
        return None
    if None in (address, count, here) and method != "deactivate":
        # JAX's own detection, before JAX's initialize, which raises where there is no cluster, and in a job of one
        # where JAX has started.
        try:
            address, count, here = found_by_cluster(address, count, here, ids, method, timeout)
        except RuntimeError as error:
            if not others:
                raise
            raise ValueError(incomplete(address, count, here)) from error
    if not others and (count == 1 or (address, count, here) == (None, None, None)):
        return None
    if count == 1 or None in (address, count, here):
        raise ValueError(incomplete(address, count, here))
    _port("coordinator_address", address)
    return {"coordinator_address": address, "num_processes": count, "process_id": here} | more | options


def _port(name: str, address: Any) -> int:
    """Returns the port of `"host:port"`; raises a `ValueError` if it is none."""
    found = re.fullmatch(r"(?:\[[^]]+\]|[^:]+):(\d+)", str(address))
    if found is None or not 0 < int(found[1]) < 2**16:
        raise ValueError(
            f"jdp.distributed.initialize: {name} is {address!r}; it is a host and a port from 1 to 65535. Pass it as "
            f"10.0.0.1:29500, or as [fd00::5]:29500."
        )
    return int(found[1])


def _refuse_other_job(count: int | None, here: int | None) -> None:
    """Raises a `ValueError` if JAX's own `initialize` has run with other arguments."""
    processes, own = process_count(), own_process()
    if count not in (None, processes) or here not in (None, own):
        raise ValueError(
            f"jdp.distributed.initialize: called for process {here} of {count}, and JAX is initialized already as "
            f"process {own} of {processes}; a process belongs to one job. Leave out the arguments, or call this "
            f"instead of jax.distributed.initialize."
        )


_DEFAULTS = (20, 60)  # of `timeout` and `start_timeout`
_LATER = 3  # seconds between the coordination service giving up and the processes that wait for its answer


def _refuse_taken_port(port: int) -> None:
    """Raises a `RuntimeError` if the port is in use. JAX only says "Failed to start RPC server", or crashes."""
    if is_taken(port):
        raise RuntimeError(
            f"jdp.distributed.initialize: process 0 cannot listen on port {port}, which is in use; the processes meet "
            f"at a port that is free. End what has it (an earlier job?), or give all processes another "
            f"coordinator_address (JAX_COORDINATOR_ADDRESS)."
        )


def _interface_to(coordinator: str) -> str | None:
    """Returns the network interface that leads to `"host:port"`; None if the hostname serves, or all is on one machine.

    Gloo listens at the address that the hostname resolves to, and on Debian that is 127.0.1.1, where only processes of
    the same machine can reach it.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    if not host or host == "localhost" or host.startswith("127.") or not _is_loopback(socket.gethostname()):
        return None
    try:
        address = socket.inet_aton(socket.gethostbyname(host))
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:  # no such host, or not Linux
        return None
    target = int.from_bytes(address, sys.byteorder)
    # Interface, destination and mask. For process 0 the host may be its own name, again 127.0.1.1: the default route.
    fits = [(int(r[7], 16).bit_count(), r[0]) for r in routes if target & int(r[7], 16) == int(r[1], 16)]
    return max(fits)[1] if fits else None


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:  # it does not resolve at all, and Gloo would fail
        return True


def _found(address: str | None) -> str:
    # Not the devices: to ask for them starts JAX's backend, which waits for that of every other process.
    count, attempt = process_count(), int(os.environ.get("JDP_ATTEMPT", 0))
    where = f", coordinator {address}" if address else ""
    return f"jdp: {count} process{'es' * (count > 1)}{where}{f', restart {attempt}' if attempt else ''}"
