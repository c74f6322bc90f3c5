"""The lines of a plan: a step compiled for a number of devices, what it needs, and how long it should take."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TextIO

from ..._core.devices import Device
from ..._page import scaled
from ..explain.calls import step_call
from ..explain.estimate import Network, wire_bytes
from ..explain.explain import CompiledCall, compiled_call
from ..tables import say
from ..topology.chips import Chip
from ..topology.quiet import quiet
from .script import WAYS, Step

_TOO_MUCH = "RESOURCE_EXHAUSTED"  # the error of TPU's compiler; that for GPUs compiles even what no GPU can hold


@dataclasses.dataclass
class Line:
    """A step on a number of devices; bytes are those of one device. `None` means unknown."""

    where: str
    devices: int
    hosts: int
    rows: int  # on each device
    way: str = WAYS[0]  # which part of the state is cut over the devices
    is_own: bool = False  # whether the script itself uses this way
    reason: str = ""  # why it does not compile, or does not fit
    compiles: bool = True
    fits: bool | None = None
    peak_bytes: int | None = None
    temp_bytes: int | None = None  # the part of the peak that is neither argument nor result
    most: Most | None = None
    wire_bytes: float | None = None  # what each device sends in a step
    exposed_seconds: float | None = None  # waits for collectives; estimated, as are the two below
    seconds: float | None = None
    efficiency: float | None = None  # seconds of one device alone with as many rows, over `seconds`
    in_flight: float | None = None
    compile_seconds: float | None = None
    measured: dict[int, float] = dataclasses.field(default_factory=dict)  # rows: bytes; compiled, or of another line

    def most_of(self, other: Line, memory: int) -> Most | None:
        """Returns the most rows of another line if this line determines them without compiling more; else None.

        If both lines need the same bytes for the same rows, their totals differ only by the bytes of their states. So
        the most rows of this line hold for the other too, if they still fit there and the next larger ones do not.
        """
        if self.most is None or not self.is_like(other):
            return None
        shift = other.state_bytes - self.state_bytes
        fits = not self.most.rows or self.measured[self.most.rows] + shift <= memory
        too_many = self.most.too_many
        ends = too_many is None or not self.measured[too_many] + shift <= memory
        found = self.most._replace(compilations=len(other.measured), as_on=self.devices)
        return found if fits and ends else None

    def is_like(self, other: Line) -> bool:
        """Returns True if both lines need the same bytes without the state, to 0.1 %, at the most rows they share."""
        both = sorted(self.measured.keys() & other.measured.keys())
        mine, others = ([one.measured[rows] - one.state_bytes for rows in both] for one in (self, other))
        found = [(x, y) for x, y in zip(mine, others, strict=True) if math.isfinite(x) and math.isfinite(y)]
        return bool(found) and abs(found[-1][0] - found[-1][1]) <= _ALIKE * found[-1][0]

    @property
    def state_bytes(self) -> float:
        """The peak without temporaries, at the first rows; not a number if that does not compile."""
        return math.nan if self.peak_bytes is None or self.temp_bytes is None else self.peak_bytes - self.temp_bytes

    def slope(self) -> float | None:
        """Returns the bytes for each further row, between the two largest measurements; None if there are fewer."""
        known = [(x, y) for x, y in sorted(self.measured.items()) if math.isfinite(y)][-2:]
        return (known[1][1] - known[0][1]) / (known[1][0] - known[0][0]) if len(known) == 2 else None


_ALIKE = 0.001


class Compiler:
    """Compiles a step for machines of one chip, and prints to `out` when a compilation begins and ends.

    Threads may share it. Python traces one step at a time; the compilers run in parallel.
    """

    def __init__(self, step: Step, chip: Chip, out: TextIO, kernels: str) -> None:
        self.step, self.chip = step, chip
        self._out, self._kernels = out, kernels
        self._tracing, self._telling = threading.Lock(), threading.Lock()
        self._under_way: list[tuple[str, float]] = []  # (what, when it began)

    def compile(self, devices: Sequence[Device], rows: int, way: str) -> CompiledCall | str:
        """Returns the compiled step, or the compiler's reason for refusing it, in one line."""
        what = f"{len(devices):,} x {self.chip.name}, {way}, {rows:,} rows"
        begin, said = time.perf_counter(), "interrupted"
        self._begin(what, begin)
        try:
            mesh = self.step.mesh_of(devices)
            with self._tracing:
                call = step_call(*self.step.on(mesh, rows, way))
            # Kernels that two programs share are compiled once. Each thread has its own file.
            kernels = os.path.join(self._kernels, threading.current_thread().name)
            compiled = compiled_call(call, self._tracing, kernels)
            said = scaled(compiled.peak_bytes, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))
            return compiled
        except Exception as error:
            reason = " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())
            said = "more than it has memory for" if _TOO_MUCH in reason else "does not compile"
            return reason
        finally:
            self._end(what, begin, f"{said}, in {time.perf_counter() - begin:.1f} s")

    def _begin(self, what: str, begin: float) -> None:
        with self._telling:
            self._under_way.append((what, begin))
            if not self._out.isatty():
                print(f"jdp plan: {what}: compiling", file=self._out, flush=True)
            self._say()

    def _end(self, what: str, begin: float, said: str) -> None:
        with self._telling:
            self._under_way.remove((what, begin))
            say("plan", "", self._out)
            print(f"jdp plan: {what}: {said}", file=self._out, flush=True)
            self._say()

    def tell(self) -> None:
        """Prints what is still compiling, and for how long."""
        with self._telling:
            told = [f"{what} ({time.perf_counter() - begin:.0f} s)" for what, begin in self._under_way]
            if told and not self._out.isatty():
                print(f"jdp plan: still compiling {'; '.join(told)}", file=self._out, flush=True)
            self._say()

    def _say(self) -> None:
        now = time.perf_counter()
        told = "; ".join(f"({now - begin:.0f} s) {what}" for what, begin in self._under_way)
        say("plan", f"compiling {told}" if told else "", self._out)


def lines(
    step: Step, chip: Chip, machines: Sequence[tuple[str, tuple[Device, ...]]], rows: int, search: bool
) -> Iterator[Line]:
    """Yields a line for each way to keep the state, on each of the machines but the first, which is one device."""
    alone, *asked = machines
    wanted = [(m, way) for m in asked for way in (WAYS if len(m[1]) > 1 and step.inside == 1 else (step.way,))]
    # First all lines of the first machine, so that a user who interrupts has those. Then what takes longest: the way
    # that is least like one device, and the largest machine, which is least like the first.
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i][0] != asked[0], -WAYS.index(wanted[i][1]), -i))
    others: dict[int, Future[Line]] = {}
    kept = tempfile.TemporaryDirectory(prefix="jdp-plan-", ignore_cleanup_errors=True)
    with quiet() as out, kept as kernels, _threads(1 + len(wanted)) as threads:
        compiler = Compiler(step, chip, out, kernels)

        def like(i: int) -> Line | None:
            """Returns a line whose most rows were compiled: the same way on fewer hosts, or the way that differs least.

            Waiting for it cannot block forever, because it was begun earlier.
            """
            (where, way), before = wanted[i], order[: order.index(i)]
            same = [j for j in sorted(before, reverse=True) if j < i and wanted[j][1] == way]
            beside = [j for j in before if wanted[j] == (where, WAYS[1]) and way == WAYS[0]]
            found = (others[j].result() for j in same + beside)
            return next((one for one in found if one.most is not None and one.most.rows in one.measured), None)

        def one(i: int) -> Line:
            (where, devices), way = wanted[i]
            return line(compiler, where, devices, rows, way, search, lambda: like(i))

        first = threads.submit(line, compiler, *alone, rows, step.way)
        for i in order:
            others[i] = threads.submit(one, i)
        for _, future in sorted(others.items()):
            while not wait([future], timeout=EVERY).done:
                compiler.tell()
            found, seconds = future.result(), first.result().seconds
            if seconds is not None and found.seconds is not None:
                found.efficiency = seconds / (found.seconds * step.inside)
            yield found


EVERY = 5.0  # seconds between messages
THREADS = 4  # more would need much memory if programs are large


@contextlib.contextmanager
def _threads(tasks: int) -> Iterator[ThreadPoolExecutor]:
    """Makes threads for so many tasks, at most `THREADS` and one per core; begins no more after its block.

    It does not wait for those that are under way: the compilers ignore signals, and a user has interrupted the plan.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = ThreadPoolExecutor(min(tasks, cores, THREADS))
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def line(
    compiler: Compiler,
    where: str,
    devices: Sequence[Device],
    rows: int,
    way: str,
    search: bool = False,
    like: Callable[[], Line | None] = lambda: None,
) -> Line:
    """Makes one line. `like` waits for and returns a similar line whose most rows were compiled, if there is one."""
    step, network = compiler.step, Network.of(devices)
    found = Line(where, len(devices), len({d.process_index for d in devices}), rows, way, way == step.way)
    compiled, fixed = compiler.compile(devices, rows, way), 0
    if isinstance(compiled, str):
        found.compiles, found.reason = False, compiled
        if _TOO_MUCH not in compiled:
            return found
        found.fits, found.measured[rows] = False, math.inf
    else:
        report = compiled.report()
        found.seconds, found.exposed_seconds = report.seconds, report.exposed_seconds
        found.peak_bytes, found.temp_bytes, found.fits = report.peak_bytes, report.temp_bytes, report.fits
        found.wire_bytes = sum(wire_bytes(c.kind, c.bytes, c.group) * (c.runs or 1) for c in report.collectives)
        found.in_flight, found.compile_seconds = report.in_flight, report.compile_seconds
        found.measured[rows] = report.peak_bytes
        fixed = report.parameter_bytes + report.optimizer_bytes + report.state_bytes
    if search and step.is_cut:

        def needs(rows: int) -> float:
            if rows not in found.measured:
                compiled = compiler.compile(devices, rows, way)
                refused = math.inf if isinstance(compiled, str) and _TOO_MUCH in compiled else math.nan
                found.measured[rows] = refused if isinstance(compiled, str) else compiled.peak_bytes
            return found.measured[rows]

        memory, other, begin = network.chip.available_bytes, like(), [rows]
        if other is not None:
            if other.way != way and other.most is not None and other.most.rows > 0:
                begin.append(other.most.rows)
                needs(other.most.rows)
            found.most = other.most_of(found, memory)
        if found.most is None:
            slope = other.slope() if other is not None and other.is_like(found) else None
            found.most = most(needs, memory, begin, slope, fixed)
        elif other is not None and found.most.too_many is not None:
            shift = found.state_bytes - other.state_bytes
            found.measured.setdefault(found.most.too_many, other.measured[found.most.too_many] + shift)
    return found


COMPILATIONS = 4
TOLERANCE = 0.01
_NONE = 2**31  # rows; no axis of an array is longer


class Most(NamedTuple):
    """The most rows: `rows` fit, `too_many` do not, or are unknown (`None`). With 0 rows, not even one fits."""

    rows: int
    too_many: int | None
    compilations: int
    refused: bool = False  # whether the compiler refuses `too_many` for another reason than memory
    as_on: int | None = None  # the number of devices of the line that both were taken from, if not this one

    @property
    def is_exact(self) -> bool:
        return self.too_many == self.rows + 1


def most(
    needs: Callable[[int], float], memory: int, begin: Sequence[int], slope: float | None = None, fixed: float = 0.0
) -> Most:
    """Finds the largest rows with `needs(rows) <= memory`: to 1 % in four compilations, if memory grows linearly.

    The line through the known points says where the memory ends; just below it is compiled next, then just above.
    If memory does not grow linearly, the two ends of the result are farther apart.

    Args:
        needs: bytes by rows, more or less rising; infinite if the compiler finds it too much, and not a number
            if it refuses for another reason, which says nothing of the memory.
        memory: bytes available.
        begin: rows to compile first.
        slope: bytes for each further row in a similar program.
        fixed: a lower bound of the bytes needed without any row.
    """
    known = {rows: needs(rows) for rows in begin}
    while True:
        low, high = _ends(known, memory)
        if len(known) == COMPILATIONS or high - low <= max(1, TOLERANCE * low):
            return Most(low, None if high == _NONE else high, len(known), math.isnan(known.get(high, 0.0)))
        rows = _next(known, low, high, memory, slope, fixed)
        known[rows] = needs(rows)


def _ends(known: Mapping[int, float], memory: int) -> tuple[int, int]:
    """Returns the most rows that are known to fit, and the fewest above them that are known not to."""
    low = max((x for x, y in known.items() if y <= memory), default=0)
    return low, min((x for x, y in known.items() if x > low and not y <= memory), default=_NONE)


def _next(known: Mapping[int, float], low: int, high: int, memory: int, slope: float | None, fixed: float) -> int:
    """Returns the rows to compile next, between `low` and `high`."""
    *_, last = known
    simple = 2 ** int(math.log2(last))  # the shape that a compiler most likely accepts
    if math.isnan(known[last]) and low < simple and simple not in known:
        return simple
    meets = min(_meets(known, low, high, memory, slope, fixed), float(_NONE))
    if not low <= meets < high:
        meets = (low + high) / 2 if high < _NONE else max(meets, 2 * low)
    margin = max(1, int(TOLERANCE * low))
    if low and meets - low <= margin:  # no more should fit: check that
        wanted = max(_round(low + margin, low), int(meets) + 1)
    else:  # the last one has to fit, because otherwise little is known
        wanted = _round(int(meets * (1 - (len(known) == COMPILATIONS - 1) * TOLERANCE / 2)), low)
    return min(max(wanted, low + 1), high - 1)


def _meets(known: Mapping[int, float], low: int, high: int, memory: int, slope: float | None, fixed: float) -> float:
    """Estimates the rows where the memory ends, by the line through the two points nearest to there."""
    finite = [x for x in sorted(known) if math.isfinite(known[x])]
    below, above = [x for x in finite if x <= low], [x for x in finite if x >= high]
    ends = [*below[-2:], *above[:1]][-2:] if below else above[:2]
    if not ends:
        return min(known) / 8
    x, y = ends[-1], known[ends[-1]]
    if len(ends) == 2:
        slope = (y - known[ends[0]]) / (x - ends[0])
        return x + (memory - y) / slope if slope > 0 else 8.0 * x
    if slope is None:  # `each` is an upper bound, so what fits by it fits
        each = max(y - fixed, 1.0) / x
        return x + (memory - y) / each if y <= memory else max(1.0, (memory - fixed) / each / 2)
    return x + (memory - y) / slope


def _round(rows: int, low: int) -> int:
    """Rounds down to a number that batches have and compilers can cut into tiles, if that is above `low`."""
    unit = 2 ** int(math.log2(max(1, rows * TOLERANCE / 2)))  # within half of the tolerance
    rounded = rows // unit * unit
    return rounded if rounded > low else rows
