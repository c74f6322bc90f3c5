"""Recovery, an experiment: where a process dies, the others learn at one place in their programs who is left.

JAX lets the others live (`jax_enable_recoverability`) and says who does (`live_devices`, at which all meet). What they
meet at here is the end of each training step, and any exchange that has failed: so all are told at the same batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.experimental.multihost_utils import ProcessFailureError, live_devices

from .coordination import ended, own_process
from .exchange import Exchange
from .watch import limits, named, watch

T = TypeVar("T")


class ProcessLost(RuntimeError):
    """A process has died, and the others can go on without it: an experiment, `initialize(recover=True)`.

    Raised at the same batch in all that are left: by a training step, which has then changed nothing, or by the loop
    over `dp.batches`. The wrapper, made again over `devices`, takes the state that this process has, and the same
    batch again.

    Attributes:
        devices: the devices of the processes that are left.

    Example:
        >>> import jax, jdp
        >>> lost = jdp.distributed.ProcessLost("process 2 has died", jax.devices()[:3])
        >>> len(lost.devices), len(lost.devices_for(8))
        (3, 2)
    """

    __module__ = "jdp.distributed"

    def __init__(self, text: str, devices: Sequence[Any]) -> None:
        super().__init__(text)
        self.devices: tuple[Any, ...] = tuple(devices)

    def devices_for(self, replicas: int) -> tuple[Any, ...]:
        """The most of the devices that divide so many replicas, for `jdp.DataParallel(..., replicas=replicas)`.

        They are taken from all processes alike. A process of which none is taken ends here, with exit code 0.
        """
        each: dict[int, list[Any]] = {}
        for device in self.devices:
            each.setdefault(device.process_index, []).append(device)
        turns = [(k, process) for process, own in each.items() for k in range(len(own))]
        most = next(n for n in range(len(turns), 0, -1) if replicas % n == 0)
        taken = sorted(turns, key=lambda turn: (turn[0], turn[1]))[:most]
        if own_process() not in {process for _, process in taken}:
            said = f"{most} devices have the {replicas} replicas, and none of them is its own; it ends"
            print(f"jdp: process {own_process()} is not needed: {said}", file=sys.stderr)
            sys.exit(0)
        return tuple(each[process][k] for process, k in sorted((process, k) for k, process in taken))


def set_up(timeout: float) -> int:
    """Before JAX starts: nobody dies with another. Gives the seconds for which one waits for a sum, or a heartbeat."""
    seconds = max(1, int(timeout))
    jax.config.update("jax_enable_recoverability", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={seconds}".strip()
    limits.recovers, limits.step = True, max(timeout, _PATIENCE)
    return seconds


_LAST = 60.0  # seconds
_PATIENCE = 12.0  # seconds for which jdp's own watch waits at least: JAX is to find out first who has died
_FLAG = "--xla_cpu_collective_timeout_seconds"


def in_all(exchange: Exchange, program: Callable[..., T]) -> Callable[..., T]:
    """The program as it is; with recovery it ends when it has run in all processes, or has changed nothing in any."""
    if not limits.recovers:
        return program

    def run(*args: Any) -> T:
        try:
            out = jax.block_until_ready(program(*args))
        except Exception as error:
            raise_if_lost(exchange, program.__name__, error)
            raise
        _meet(exchange, program.__name__)
        return out

    return run


def raise_if_lost(exchange: Exchange, what: str, error: Exception) -> None:
    """Raises `ProcessLost` where an error comes from the death of a process."""
    if limits.recovers and not isinstance(error, ProcessLost):
        _meet(exchange, what, error)


class _Meeting:
    """What the watch sees of it: like an output of a program."""

    nbytes, is_over = 0, False

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.is_over


def _meet(exchange: Exchange, what: str, error: Exception | None = None) -> None:
    """Waits for all that live; raises `ProcessLost` where one of the exchange's processes does not."""
    devices = [d for d in jax.devices() if d.process_index in exchange.processes]
    meeting: Any = _Meeting()
    exchange.come_to(f"{what} (who is left)")
    exchange.dispatched(meeting)
    gone: set[int] = set()
    try:
        with live_devices(devices) as before:  # those of the last meeting
            gone = {*exchange.processes} - {d.process_index for d in before}
    except ProcessFailureError as failure:
        gone |= {d.process_index for d in failure.failed_devices} & {*exchange.processes}
    finally:
        meeting.is_over = True
    if gone:
        watch.forget(gone)
        left = [d for d in devices if d.process_index not in gone]
        who = f"{named(sorted(gone))} {'have' if len(gone) > 1 else 'has'} died"
        raise ProcessLost(
            f"jdp.{what}: {who}; {named(sorted({d.process_index for d in left}))} can go on with the same batch. Catch "
            f"jdp.distributed.ProcessLost, and make the wrapper again over its devices.", left
        ) from error


def stay() -> None:
    """Has process 0 leave last: JAX aborts who leaves after it."""
    if not limits.recovers or own_process() != 0:
        return
    end = time.monotonic() + _LAST
    while (here := watch.running() - ended()) and time.monotonic() < end:
        time.sleep(0.1)
    if not here:
        with contextlib.suppress(ProcessFailureError), live_devices(jax.devices()):
            pass
