"""The lines of a plan: a step compiled for so many devices, what it needs, and how long it should take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from .._core.devices import Device, make_mesh
from .._explain.estimate import Network, wire_bytes
from .._explain.explain import explain
from .._explain.report import Report
from .._topology.quiet import quiet
from .script import WAYS, Step

_TOO_MUCH = "RESOURCE_EXHAUSTED"  # what TPUs' compiler says; that for GPUs compiles what no GPU has memory for


@dataclasses.dataclass
class Line:
    """A step on so many devices; bytes are those of one device. What is `None` the line does not know."""

    where: str
    devices: int
    hosts: int
    rows: int  # on each device
    way: str = WAYS[0]  # what of the state is cut over the devices
    is_own: bool = False  # whether the script has it so
    reason: str = ""  # why it does not compile, or does not fit
    compiles: bool = True
    fits: bool | None = None
    peak_bytes: int | None = None
    most: Most | None = None
    wire_bytes: float | None = None  # that each device sends in a step
    exposed_seconds: float | None = None  # with no computation beside; estimated, as are the two below
    seconds: float | None = None
    efficiency: float | None = None  # of `seconds`, what one such device alone takes for as many rows
    in_flight: float | None = None
    compile_seconds: float | None = None

    def most_of(self, peak: float | None, memory: int) -> Most | None:
        """What another way may have with that peak at as many rows, if each further row takes as much there as here."""
        if peak is None or self.peak_bytes is None or self.most is None or self.most.rows <= self.rows:
            return None
        each = (memory - self.peak_bytes) / (self.most.rows - self.rows)
        rows = max(1.0, self.rows + (memory - peak) / each) if each > 0 else 1.0
        return Most(int(rows * (1 - TOLERANCE / 3)), int(rows * (1 + TOLERANCE / 3)) + 1, 0)


def line(
    step: Step,
    where: str,
    devices: Sequence[Device],
    rows: int,
    way: str,
    alone: float | None = None,
    guess: Line | None = None,
    search: bool = False,
) -> Line:
    """One line: `alone` seconds on one device, `guess` another line, to search from."""
    mesh, network = make_mesh(tuple(devices), step.program.config.axis_name), Network.of(devices)
    found = Line(where, len(devices), len({d.process_index for d in devices}), rows, way, way == step.way)
    compiled = _attempt(step, mesh, rows, way)
    if isinstance(compiled, str):
        found.compiles, found.reason = False, compiled
        if _TOO_MUCH not in compiled:
            return found
        found.fits = False
    else:
        found.seconds, found.exposed_seconds = compiled.seconds, compiled.exposed_seconds
        found.peak_bytes, found.fits = compiled.peak_bytes, compiled.fits
        found.wire_bytes = sum(wire_bytes(c.kind, c.bytes, c.group) * (c.runs or 1) for c in compiled.collectives)
        found.efficiency = alone / compiled.schedule.seconds if alone else None
        found.in_flight, found.compile_seconds = compiled.in_flight, compiled.compile_seconds
    if search and step.is_cut:

        def needs(rows: int) -> float:
            if rows == found.rows:
                return math.inf if found.peak_bytes is None else found.peak_bytes
            compiled = _attempt(step, mesh, rows, way)
            if isinstance(compiled, str):
                return math.inf if _TOO_MUCH in compiled else math.nan
            return compiled.peak_bytes

        memory = network.chip.available_bytes
        near = guess and (guess.most if guess.way == way else guess.most_of(found.peak_bytes, memory))
        found.most = most(needs, memory, rows, near)
    return found


def _attempt(step: Step, mesh: Mesh, rows: int, way: str) -> Report | str:
    """The step, compiled; or the compiler's reason, in a line."""
    program, state, batch = step.on(mesh, rows, way)
    try:
        with quiet():
            return explain(program.lower, state, batch)
    except Exception as error:
        return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())


COMPILATIONS = 14
TOLERANCE = 0.01
_NONE = 2**31  # rows; no axis of an array is longer


class Most(NamedTuple):
    """`rows` were compiled and fit, `too_many` do not. 0 rows: not even one does."""

    rows: int
    too_many: int
    compilations: int
    refused: bool = False  # whether the compiler refuses `too_many` for another reason than memory

    @property
    def is_exact(self) -> bool:
        return self.too_many == self.rows + 1


def most(needs: Callable[[int], float], memory: int, rows: int, guess: Most | None = None) -> Most:
    """The largest rows with `needs(rows) <= memory`, to 1 %, if the compiler lets it.

    Args:
        needs: bytes by rows, more or less rising; infinite where the compiler finds it too much, and not a number
            where it refuses for another reason, which says nothing of the memory.
        memory: bytes that there are.
        rows: where to begin.
        guess: what was found for a like program, to be tried first.
    """
    known: dict[int, float] = {}
    low, high = 0, _NONE
    tries = [rows] if guess is None else [rows, max(1, guess.rows), guess.too_many]
    while high - low > max(1, TOLERANCE * low) and len(known) < COMPILATIONS:
        x = next((t for t in tries if low < t < high and t not in known), None)
        x = _round(_next(known, low, high, memory), low) if x is None else x
        if x not in known:
            known[x] = needs(x)
        simple = 2 ** int(math.log2(x))  # the shape that a compiler takes if any
        if math.isnan(known[x]) and simple > low and simple not in known:
            tries.append(simple)
        else:
            low, high = (x, high) if known[x] <= memory else (low, x)
    return Most(low, high, len(known), high in known and math.isnan(known[high]))


def _round(rows: int, low: int) -> int:
    """A round number, as batches are, and of a shape that compilers cut into tiles; above `low`."""
    unit = 2 ** int(math.log2(max(1, rows * TOLERANCE / 2)))  # within half of the tolerance
    rounded = rows // unit * unit
    return rounded if rounded > low else rows


def _next(known: Mapping[int, float], low: int, high: int, memory: int) -> int:
    """What to try between the two: where the line through two measured points meets the memory, or just beside it."""
    finite = [x for x in sorted(known) if math.isfinite(known[x])]
    below, above = [x for x in finite if x <= low], [x for x in finite if x >= high]
    ends = [*below[-2:], *above[:1]][-2:] if below else above[:2]
    # Without a line by halves; and now and then, for memory that is none would keep it off for long.
    halves = 8 * max(low, 1) if high == _NONE else math.isqrt(low * high) if low else high // 8
    refused = math.isnan(known.get(high, 0.0))  # and where that begins has nothing to do with memory
    if refused or len(ends) < 2 or known[ends[1]] <= known[ends[0]] or (len(known) % 3 == 0 and high < _NONE):
        return min(max(halves, low + 1), high - 1)
    (x0, y0), (x1, y1) = ((x, known[x]) for x in ends)
    meets = int(x0 + (memory - y0) * (x1 - x0) / (y1 - y0))
    # Where it is at one of the two already, a little beside that one, so that nothing much is left between.
    margin = max(1, int(TOLERANCE * low))
    wanted = low + margin if meets - low <= margin // 4 else high - margin if high - meets <= margin // 4 else meets
    return min(max(wanted, low + 1), high - 1, 64 * max(low, 1))
