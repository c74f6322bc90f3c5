"""The lines of a plan: a step compiled for so many devices, what it needs, and how long it should take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh

from .._core.devices import Device, make_mesh
from .._explain import hlo as _hlo
from .._explain.explain import explain
from .._explain.report import Report
from .._topology.chips import Chip
from .._topology.quiet import quiet
from .estimate import simulate
from .links import Network, wire_bytes
from .script import Step
from .search import Most, most

_TOO_MUCH = "RESOURCE_EXHAUSTED"  # what TPUs' compiler says; that for GPUs compiles what no GPU has memory for


@dataclasses.dataclass(frozen=True)
class Line:
    """A step on so many devices; bytes are those of one device. What is `None` the line does not know."""

    where: str
    devices: int
    hosts: int
    rows: int
    """On each device."""
    reason: str = ""
    """Why it does not compile, or does not fit."""
    compiles: bool = True
    fits: bool | None = None
    peak_bytes: int | None = None
    most: Most | None = None
    wire_bytes: float | None = None
    """That each device sends in a step."""
    exposed_seconds: float | None = None
    """Of communication with no computation beside it; estimated, as are the two below."""
    seconds: float | None = None
    efficiency: float | None = None
    """Of `seconds`, what one such device alone takes for as many rows."""
    in_flight: float | None = None
    compile_seconds: float | None = None


def line(
    step: Step,
    where: str,
    devices: Sequence[Device],
    rows: int,
    alone: float | None,
    memory: int,
    guess: Most | None,
    search: bool,
) -> Line:
    """One line: `alone` seconds on one device, `memory` bytes that each has, `guess` the Most of another."""
    mesh = make_mesh(tuple(devices), step.program.config.axis_name)
    found = Line(where, len(devices), len({d.process_index for d in devices}), rows)
    compiled = attempt(step, mesh, rows)
    if isinstance(compiled, str):
        full = _TOO_MUCH in compiled
        found = dataclasses.replace(found, compiles=False, fits=False if full else None, reason=compiled)
        if not full:
            return found
    else:
        seconds, exposed = estimate(compiled, Network.of(devices))
        found = dataclasses.replace(
            found,
            peak_bytes=compiled.peak_bytes,
            fits=compiled.peak_bytes <= memory,
            wire_bytes=sum(wire_bytes(c.kind, c.bytes, c.group) * (c.runs or 1) for c in compiled.collectives),
            exposed_seconds=exposed,
            seconds=seconds,
            efficiency=None if alone is None else alone / seconds,
            in_flight=compiled.in_flight,
            compile_seconds=compiled.compile_seconds,
        )
    if search and step.is_cut:
        found = dataclasses.replace(found, most=most(_needs(step, mesh, found), memory, rows, guess))
    return found


def attempt(step: Step, mesh: Mesh, rows: int) -> Report | str:
    """The step, compiled; or the compiler's reason, in a line."""
    program, state, batch = step.on(mesh, rows)
    try:
        with quiet():
            return explain(program.of, state, batch)
    except Exception as error:
        return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())


def estimate(report: Report, network: Network) -> tuple[float, float]:
    """Seconds of a step, and those of them in which it waits for communication; estimated."""

    def seconds(collective: object) -> float:
        kind, size, group = (getattr(collective, name) for name in ("kind", "bytes", "group"))
        return network.seconds(kind, size, group)

    schedule = simulate(_hlo.parse(report.hlo), network.chip, seconds)
    return schedule.seconds, schedule.exposed_seconds


def available(chip: Chip, environ: Mapping[str, str]) -> int:
    """Bytes that JAX gives to a program on such a device."""
    share = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") if chip.kind == "gpu" else None
    return int(chip.memory_bytes * (float(share) if share else chip.memory_share))


def _needs(step: Step, mesh: Mesh, found: Line) -> Callable[[int], float]:
    """The peak of the step's memory by the rows on each device, as `most` asks for it."""

    def needs(rows: int) -> float:
        if rows == found.rows:
            return math.inf if found.peak_bytes is None else found.peak_bytes
        compiled = attempt(step, mesh, rows)
        if isinstance(compiled, str):
            return math.inf if _TOO_MUCH in compiled else math.nan
        return compiled.peak_bytes

    return needs
