"""initialize: `jax.distributed.initialize` with defaults under which a fault ends the job instead of hanging it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import jax

from ._coordination import own_process, process_count
from ._exchange import limits
from ._last_words import install


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 20,
    start_timeout: float = 60,
    heartbeat_timeout: int = 8,
    shutdown_timeout: int = 60,
    thread_guard: bool = True,
    quiet: bool = False,
    **options: Any,
) -> None:
    """Makes this process one of a job of many: `jax.distributed.initialize`, by which no fault hangs the others.

    Call it first, before anything asks JAX for devices. Under `jdp launch`, Slurm, Open MPI, Kubernetes and on TPU
    pods it needs no arguments; the detection is JAX's own. Where nothing says that there are other processes it does
    nothing, so that the same script runs alone.

    What JAX leaves waiting for minutes, or for ever, ends within seconds:

    * an exception: the process prints it, tells the others, and ends (JAX would wait in its exit for the others);
      they print whose it was, and end.
    * a dead process: its heartbeats stop, and the others end after `heartbeat_timeout`; mostly sooner, for a
      collective breaks.
    * a stuck process: the others wait `timeout` at their next call of jdp and raise a `jdp.distributed.DesyncError`
      that names it; inside of a collective on CPU they wait as long (on GPUs NCCL's own time-out holds).
    * a second thread, whose calls would mix with the first's into wrong sums, gets a `RuntimeError`.

    Args:
        coordinator_address: `"host:port"` of process 0. Default: what the launcher or the cluster says.
        num_processes: how many there are; likewise.
        process_id: which this one is, from 0; likewise.
        timeout: seconds that a process waits for the others at a call of jdp, or in a collective on CPU. Longer,
            where one of them does long work alone between two steps (evaluates, or writes).
        start_timeout: seconds that it waits for the others to start, and at the first call of each kind. Where one
            does not start, JAX names it in the log, and ends the process with SIGABRT.
        heartbeat_timeout: seconds without a heartbeat after which a process is dead.
        shutdown_timeout: seconds that a process which has ended waits for the others to end.
        thread_guard: whether JAX refuses calls over several processes from any other thread than this one.
        quiet: whether process 0 does not print what was found.
        **options: further arguments of `jax.distributed.initialize` (`local_device_ids`, ...).

    Raises:
        RuntimeError: JAX has started already; or process 0 finds the port taken.
        ValueError: some of the three first arguments are given, and the others are not known.

    Example:
        >>> import jdp
        >>> jdp.distributed.initialize()  # a job of one: nothing to do
        >>> import jax
        >>> jax.process_count()
        1

    Source: `initialize` in jax/_src/distributed.py; the time-outs' measure is torchrun's promise that any failure
    ends all workers.
    """
    if num_processes is None and process_id is None and "JDP_NUM_PROCESSES" in os.environ:
        num_processes, process_id = int(os.environ["JDP_NUM_PROCESSES"]), int(os.environ["JDP_PROCESS_ID"])
        # In a step of Slurm JAX would give this process the one device that Slurm means for each task.
        options = {"cluster_detection_method": "deactivate", **options}
    job = _job(coordinator_address, num_processes, process_id, int(start_timeout), options)
    if job is None:
        return
    limits.step, limits.start = float(timeout), float(start_timeout)
    _limit_collectives(timeout)
    if job["process_id"] == 0:
        bind = options.get("coordinator_bind_address") or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        _refuse_taken_port(bind or job["coordinator_address"])
    with _absent_are_named(int(start_timeout)):
        jax.distributed.initialize(
            **job,
            initialization_timeout=int(start_timeout) + _LATER,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=shutdown_timeout,
            **options,
        )
    install()
    if thread_guard:
        # For the rest of the program. jax.config.update would not do: the guard holds for the thread that enters it.
        jax.thread_guard(True).__enter__()
    if own_process() == 0 and not quiet:
        print(_found(job["coordinator_address"]), file=sys.stderr, flush=True)


def _job(address: str | None, count: int | None, here: int | None, timeout: int, options: Any) -> dict[str, Any] | None:
    """The first three arguments, as given, or as the launcher or the cluster says; None for a job of one process."""
    from jax._src import clusters

    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    ids, method = options.get("local_device_ids"), options.get("cluster_detection_method")
    if None in (address, count, here) and method != "deactivate":
        # JAX's own detection, before JAX's initialize, which raises where there is no cluster, and in a job of one
        # where JAX has started.
        find = clusters.ClusterEnv.auto_detect_unset_distributed_params
        address, count, here, _ = find(address, count, here, ids, method, timeout)
    if count == 1 or (address, count, here) == (None, None, None):
        return None
    return {"coordinator_address": address, "num_processes": count, "process_id": here}


_LATER = 3  # seconds by which the coordination service gives up before those who wait for its answer


@contextlib.contextmanager
def _absent_are_named(seconds: int) -> Iterator[None]:
    """The coordination service, which knows who has come, tells those that have; JAX would let it wait for an hour."""
    from jax._src.lib import _jax as module  # pyright: ignore[reportPrivateImportUsage]

    name = "get_distributed_runtime_service"
    before = getattr(module, name)
    # No argument of jax.distributed.initialize leads there.
    setattr(module, name, functools.partial(before, cluster_register_timeout=seconds))
    try:
        yield
    finally:
        setattr(module, name, before)


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
                    f"another coordinator_address."
                ) from error
            # else there is no IPv6 here, or JAX says what is wrong


def _limit_collectives(timeout: float) -> None:
    """Adds XLA's limit for collectives between CPUs, unless the user has set one; its own is half an hour."""
    flag = "--xla_cpu_collective_timeout_seconds"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={max(1, round(timeout))}".strip()


def _found(address: str | None) -> str:
    # Not the devices: to ask for them starts JAX's backend, which waits for that of every other process.
    count, attempt = process_count(), int(os.environ.get("JDP_ATTEMPT", 0))
    where = f", coordinator {address}" if address else ""
    return f"jdp: {count} process{'es' * (count > 1)}{where}{f', restart {attempt}' if attempt else ''}"
