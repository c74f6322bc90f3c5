"""Where a process is, what it waits for and how long, and what this machine says of a process that it runs."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

DEAD = ("", "Z", "X")  # states of Linux: no such process, or only its exit code is left


HINT = (
    "Call it in all processes, also what stands under `if jax.process_index() == 0`; for work that takes one process "
    "longer, jdp.distributed.initialize(timeout=...)."
)


class Limits:
    """Seconds to wait for the other processes; `jdp.distributed.initialize` sets all but `compile`."""

    def __init__(self, step: float = 20.0, start: float = 60.0, compile: float = 1800.0) -> None:
        self.step, self.start, self.compile = step, start, compile
        self.shutdown = 300.0  # JAX's default
        self.are_set = False  # by `initialize`


limits = Limits()


class Place(NamedTuple):
    """Where a process is, as it writes it for the others."""

    beat: int  # how often it has written
    machine: str
    pid: int
    doing: str  # the last call or program that it came to
    idle: float  # seconds since
    compiles: bool
    positions: dict[str, int]  # the number of calls and programs in each group; all come to them in one order
    called_back: float = 0.0  # seconds since the running program called back into Python
    calls: Mapping[str, Sequence[str]] = MappingProxyType({})  # the last few calls and programs in each group
    asked: bool = False  # whether it has asked JAX for devices


NOWHERE = Place(0, "", 0, "", 0.0, False, {})


class Pending(NamedTuple):
    """A program that is being dispatched, or was."""

    group: str
    processes: tuple[int, ...]
    position: int
    what: str
    since: float
    output: Callable[[], Any]  # returns one of its outputs; None if no reference to it is left
    seconds: float | None = None  # how long the others may take to come to it; None: limits.step

    def is_done(self) -> bool:
        x = self.output()
        try:
            return x is None or x.is_deleted() or x.is_ready()
        except RuntimeError:  # the main thread has donated it since it was asked
            return True


def named(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


def have_ended(processes: Sequence[int]) -> str:
    return f"{named(processes)} {'have ended their programs' if len(processes) > 1 else 'has ended its program'}"


def have_not_asked(processes: Sequence[int]) -> str:
    return (
        f"{named(processes)} {'have' if len(processes) > 1 else 'has'} not asked for them; all processes do, by "
        f"jax.devices() or jdp.DataParallel. If one needs longer, pass "
        f"jdp.distributed.initialize(start_timeout=...) in all."
    )


def machine() -> str:
    """Returns what tells machines apart: their names, the boots of Linux, the namespaces of networks and processes.

    Machines that were cloned may have one name, and the namespaces of one image the same numbers.
    """
    found = []
    with contextlib.suppress(OSError):  # not Linux
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        found += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    return " ".join([platform.node(), *found])


def state_of(pid: int) -> str:
    """Returns Linux's letter for the state of a process of this machine; "" if it is gone, "?" if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else "?"
    except OSError:
        return "?"
