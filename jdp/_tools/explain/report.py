"""The report of `explain`: plain numbers of a compiled program, and where each of them comes from."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..._page import (
    Html,
    Page,
    bars,
    in_bytes,
    in_notebook,
    in_seconds,
    lane,
    legend,
    scaled,
    section,
    stack,
    table,
    tag,
    text,
)
from ..tables import Block, Table, Text, Title, show_blocks
from .collectives import Collective
from .estimate import Network, Schedule, Span, schedule_of
from .hlo import parse


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device computes in a call."""

    flops: float
    """Floating-point operations."""
    bytes: float
    """Bytes that are read and written."""
    source: str
    """`"compiled"`: the compiler's own count; `"estimated"`: counted by jdp. A loop of unknown length counts once."""


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What a compiled call does: `print(report)` is a table, the attributes are for assertions.

    Made by `report = jdp.explain(step, state, batch)`. `report.show()` opens it as a page, `report.save("step.html")`
    writes the page.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x @ w, devices=[0])
        >>> report: jdp.Report = jdp.explain(dp.apply, np.ones((3, 2), np.float32), np.ones((4, 3), np.float32))
        >>> report.devices, report.rows, report.parameter_bytes
        (1, (4,), 24)
    """

    label: str
    """What was compiled."""
    platform: str
    device_kind: str
    devices: int
    processes: int
    rows: tuple[int, ...]
    """Rows of the batch on each device (in a mesh, each replica) that has any."""
    work: Work
    """What the busiest device computes; `flops` and `bytes` are its numbers."""
    parameter_bytes: int
    """Bytes of the parameters on each device. All bytes below are also per device."""
    gradient_bytes: int
    """Bytes of a step's gradients, as the optimizer gets them or as microbatches are summed; part of temporaries."""
    optimizer_bytes: int
    state_bytes: int
    batch_bytes: int
    temp_bytes: int
    """Bytes of temporaries, which live only during the call."""
    output_bytes: int
    """Bytes of results that do not take the place of a donated argument."""
    peak_bytes: int
    """Bytes of arguments, results and temporaries together."""
    memory_bytes: int | None
    """Bytes of the device's memory that programs can use; None if unknown."""
    collectives: tuple[Collective, ...]
    """Each with `.kind`, `.dtype`, `.bytes`, `.runs`, `.in_loop`, `.parameters`, `.in_flight`."""
    unscattered: tuple[str, ...]
    """Replicated arrays with as many rows as the batch."""
    unused_donations: tuple[str, ...]
    """Donated arrays whose memory no result could take."""
    compilations: int | None
    """Programs that earlier calls of this function compiled; None if this version of JAX does not tell."""
    compile_seconds: float
    hlo: str = dataclasses.field(repr=False)
    """The optimized program."""
    _alone: Callable[[], Work | None] = dataclasses.field(repr=False)
    _network: Network | None = dataclasses.field(repr=False)

    @property
    def flops(self) -> float:
        """Floating-point operations of one device in a call."""
        return self.work.flops

    @property
    def bytes(self) -> float:
        """Bytes that one device reads and writes in a call."""
        return self.work.bytes

    @property
    def fits(self) -> bool | None:
        """True if the peak is no more than the device's memory; None if that is not known."""
        return None if self.memory_bytes is None else self.peak_bytes <= self.memory_bytes

    @property
    def collective_bytes(self) -> int:
        """Payload that each device gives to collectives in a call."""
        return sum(c.bytes * (c.runs or 1) for c in self.collectives)

    @property
    def in_flight(self) -> float | None:
        """The share of `collective_bytes` that is sent while the device computes; None on CPUs or if there are none."""
        if self.platform == "cpu" or not self.collective_bytes:
            return None
        return sum(c.bytes * (c.runs or 1) for c in self.collectives if c.in_flight) / self.collective_bytes

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The estimated timeline of the program, in the order of its schedule: see `seconds`."""
        return schedule_of(parse(self.hlo), self._network)

    @property
    def seconds(self) -> float | None:
        """The estimated time of a call, as by `jdp plan`; None for devices without published figures (CPUs).

        For these, `schedule` counts bytes that are read, written and sent instead of seconds.
        """
        return None if self._network is None else self.schedule.seconds

    @property
    def exposed_seconds(self) -> float | None:
        """The part of `seconds` during which a device computes nothing, because it waits for a collective."""
        return None if self._network is None else self.schedule.exposed_seconds

    @functools.cached_property
    def one_device(self) -> Work | None:
        """The work of the primary device alone with the whole batch; compiled at first use, None if that fails."""
        return self.work if self.devices == 1 else self._alone()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as a page, `report.save("step.html")`: one file, which asks no other host for anything.

        Raises:
            ValueError: the file's name does not end in .html.

        Example:
            >>> import jdp, numpy as np, pathlib, tempfile
            >>> dp = jdp.DataParallel(lambda w, x: x @ w, devices=[0])
            >>> report = jdp.explain(dp.apply, np.ones((3, 2), np.float32), np.ones((4, 3), np.float32))
            >>> path = pathlib.Path(tempfile.mkdtemp(), "call.html")
            >>> report.save(path)
            >>> path.read_text()[:15]
            '<!doctype html>'
        """
        page_of_report(self).save(path)

    def show(self) -> None:
        """Shows the page, `report.show()`: in a notebook or a browser; with no display, it prints its path.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x @ w, devices=[0])
            >>> report = jdp.explain(dp.apply, np.ones((3, 2), np.float32), np.ones((4, 3), np.float32))
            >>> report.show()  # doctest: +SKIP
        """
        page_of_report(self).show()

    @in_notebook
    def _repr_html_(self) -> Page:
        return page_of_report(self, waits=False)

    def __repr__(self) -> str:
        where = f"{self.devices} x {self.device_kind}"
        return f"Report({self.label!r}, {where}, flops={self.flops:.3g}, peak_bytes={self.peak_bytes})"

    def __str__(self) -> str:
        """Returns the table, 80 columns wide."""
        out = io.StringIO()
        show_blocks(_blocks(self), out)
        return out.getvalue().rstrip()


# The names of the columns of two tables, in the terminal and on the page.
_OF_AMOUNTS = ("each device", "amount", "of one device", "from")
_OF_COLLECTIVES = ("kind", "of", "amount", "runs", "in flight", "carries")


def _blocks(r: Report) -> Iterator[Block]:
    yield Title(_title(r))
    yield Table(_OF_AMOUNTS, tuple(_amounts(r)))
    yield Title("collectives, in the order of the program")
    if r.collectives:
        rows = tuple(map(_collective, r.collectives[:_MANY]))
        yield Table(_OF_COLLECTIVES, rows)
        if len(r.collectives) > _MANY:
            yield Text(f"and {len(r.collectives) - _MANY} more (report.collectives)")
    else:
        yield Text("none: the devices do not wait for each other")
    notes = list(_notes(r))
    if notes:
        yield Title("to look at")
        yield from (Text(note) for note in notes)


def _title(r: Report) -> str:
    over = f"{r.devices} x {r.device_kind}" + (f", {r.processes} processes" if r.processes > 1 else "")
    return f"{r.label} on {over}; {sum(r.rows)} rows, at most {max(r.rows)} on a device"


_MANY = 24  # collectives


def _amounts(r: Report, waits: bool = True) -> Iterator[tuple[str, str, str, str]]:
    """Yields what each device does and holds. Without `waits`, shares that need a compilation first are left out."""
    alone = r.one_device if waits or "one_device" in vars(r) else Work(0, 0, "")  # with all rows
    operations = scaled(r.flops, ((1e12, "Tflop"), (1e9, "Gflop"), (1e6, "Mflop"), (1e3, "kflop"), (1, "flop")))
    yield "flops", operations, _share(r.flops, alone and alone.flops), r.work.source
    yield "bytes read and written", in_bytes(r.bytes), _share(r.bytes, alone and alone.bytes), r.work.source
    for name, size in _arguments(r):
        if size:
            yield name, in_bytes(size), "", "shapes"
    yield "temporaries", in_bytes(r.temp_bytes), "", "compiled"
    if r.gradient_bytes:
        yield "  gradients", in_bytes(r.gradient_bytes), "", "shapes"
    yield "peak of memory", in_bytes(r.peak_bytes), "", "compiled"
    yield "given to collectives", in_bytes(r.collective_bytes), "", "compiled"
    if r.in_flight is not None and r.collective_bytes:
        yield "  in flight while it computes", f"{r.in_flight:.1%}", "", "compiled"
    if r.compilations is not None:
        yield "programs compiled by calls", f"{r.compilations}", "", "counted"
    yield "time to compile this", f"{r.compile_seconds:.1f} s", "", "measured"


def _arguments(r: Report) -> list[tuple[str, int]]:
    """Returns what a call is given, with the bytes of each part."""
    return [
        ("parameters", r.parameter_bytes),
        ("optimizer's state", r.optimizer_bytes),
        ("other state", r.state_bytes),
        ("batch", r.batch_bytes),
    ]


def _share(amount: float, alone: float | None) -> str:
    return f"{amount / alone:.3f}" if alone else "" if alone == 0 else "too large"


def _collective(c: Collective) -> tuple[str, str, str, str, str, str]:
    where = f"loop, {c.runs or '?'}" if c.in_loop else "once"
    flight = "yes" if c.in_flight else "no" if c.asynchronous else "waits"
    return c.kind, c.dtype, in_bytes(c.bytes), where, flight, _few(c.parameters)


def _few(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" + {len(names) - 1}" if len(names) > 1 else ""
    room = _WIDTH - len(more)
    return (names[0] if len(names[0]) <= room else f"…{names[0][1 - room :]}") + more


_WIDTH = 24  # of the names, so that the table fits 80 columns


def _notes(r: Report) -> Iterator[str]:
    if r.fits is False:
        yield (
            f"it does not fit: a device has {in_bytes(r.memory_bytes or 0)} for programs. Pass fewer rows, or make the "
            f"step with accumulate_steps, shard_optimizer=True or shard_params=True."
        )
    for name in r.unscattered:
        yield (
            f"{name} has as many rows as the batch, and every replica gets all of it. Pass it as an argument that is "
            f"cut (in_axes)."
        )
    for name in r.unused_donations:
        yield f"donated, and no result takes its memory: {name}. Return what replaces it with that shape and dtype."
    if any(c.in_loop and not c.named for c in r.collectives):  # shard_params gathers in loops on purpose
        yield "a collective runs in a loop: its bytes travel as many times. Reduce once after the loop, if you can."


def page_of_report(r: Report, waits: bool = True) -> Page:
    """Returns the report as a page; without `waits`, it lacks the numbers that need a compilation first."""
    notes = [text(note, "bad") for note in _notes(r)]
    amounts = table(_OF_AMOUNTS, _amounts(r, waits))
    body = [*notes, section("what happens when", *_timeline(r)), section("memory of a device", *_memory(r))]
    body += [section("collectives, in the order of the program", *_collectives(r)), section("amounts", amounts)]
    return Page(_title(r), body)


def _timeline(r: Report) -> Iterator[Html]:
    """Yields the timeline: what the device computes, what is sent at the same time, and where the device waits."""
    schedule, carried = r.schedule, {c.name: c for c in r.collectives}
    whole, words = schedule.seconds or 1.0, in_seconds if r.seconds is not None else in_bytes
    kinds = {"computes": [], "waits": [], "sends": []}
    for span in _joined(schedule.spans):
        what = carried[span.name] if span.lane == "sends" else None
        told = f"{what.kind} of {in_bytes(what.bytes)}: {', '.join(what.parameters)}" if what else span.lane
        kinds[span.lane].append((span.lane, span.start, span.end, f"{told}, {words(span.end - span.start)}"))
    computed, sent, exposed, total = map(
        words, (schedule.compute_seconds, schedule.collective_seconds, schedule.exposed_seconds, schedule.seconds)
    )
    share = f"{schedule.exposed_seconds / whole:.1%}"
    if r.seconds is None:
        yield text(f"The device reads and writes {computed}, and collectives carry {sent}.", "")
        yield text(f"While {exposed} travel, {share} of all bytes, it computes nothing (exposed).", "")
    else:
        yield text(f"{total}: the device computes for {computed}, collectives take {sent}.", "")
        yield text(f"For {exposed}, {share} of the time, it waits for one and computes nothing (exposed).", "")
    lanes = lane([*kinds["computes"], *kinds["waits"]], whole), lane(kinds["sends"], whole)
    yield tag("div", text("the device"), lanes[0], text("the links"), lanes[1], class_="lanes")
    yield legend({"computes": "computes", "waits": "waits: exposed", "sends": "a collective is under way"})
    if r.seconds is None:
        yield text(f"In bytes, and not in time: no figures are published of a {r.device_kind}.")
    else:
        yield text("Estimated, as jdp plan does: an ideal machine, by the published figures of its chips and links.")
    yield text("In the order of the compiled program. A loop is drawn as one long iteration.")


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans, with computations that follow without a pause joined into one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.lane, span.start)):
        if found and found[-1].lane == span.lane == "computes" and span.start <= found[-1].end * (1 + 1e-9):
            found[-1] = found[-1]._replace(end=span.end)
        else:
            found.append(span)
    return found


def _memory(r: Report) -> Iterator[Html]:
    """Yields the peak of memory and its parts."""
    kinds = [*_arguments(r), ("results", r.output_bytes), ("temporaries", r.temp_bytes)]
    rest = r.peak_bytes - sum(size for _, size in kinds)
    kinds = [(name, size) for name, size in [*kinds, ("other arguments", rest)] if size > 0]
    whole, limit = sum(size for _, size in kinds) or 1, r.memory_bytes
    of = ""
    if limit:
        share = f"{r.peak_bytes / limit:.1%}" if r.peak_bytes >= limit / 1000 else "under 0.1%"
        of = f", {share} of the {in_bytes(limit)} that a program can have"
    yield text(f"At its peak {in_bytes(r.peak_bytes)}{of}.", "")
    is_less = limit is not None and limit < whole
    yield stack(kinds, whole, limit if is_less else None)
    if is_less:
        yield text("The line in the bar is where the memory ends.", "bad")
    yield bars([(name, size, in_bytes(size)) for name, size in kinds])
    if r.gradient_bytes:
        yield text(f"The gradients, {in_bytes(r.gradient_bytes)}, are temporaries.")
    if rest < 0:
        yield text(f"The program does not use {in_bytes(-rest)} of these arguments.")


def _collectives(r: Report) -> Iterator[Html]:
    if not r.collectives:
        yield text("none: the devices do not wait for each other")
        return
    rows = []
    for c in r.collectives:
        *cells, few = _collective(c)
        names = tag("div", ", ".join(c.parameters), class_="names")
        rows.append((*cells, names if len(c.parameters) < 4 else tag("details", tag("summary", few), names)))
    yield table(_OF_COLLECTIVES, rows)
