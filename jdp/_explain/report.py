"""What `explain` tells: plain numbers of a compiled program, and where each of them comes from."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Sequence

from .._tables import Block, Table, Text, Title, scaled, show_blocks
from .collectives import Collective
from .estimate import Network, Schedule, schedule_of
from .hlo import parse


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device computes in a call."""

    flops: float
    """Floating-point operations."""
    bytes: float
    """Bytes that are read and written."""
    source: str
    """`"compiled"`: the compiler's own count; `"estimated"`: counted by jdp in the optimized program."""


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """A compiled call, read: `print(report)` is a table, and the attributes are for assertions. See `jdp.explain`."""

    label: str
    """What was compiled."""
    platform: str
    device_kind: str
    devices: int
    processes: int
    rows: tuple[int, ...]
    """Rows of the batch on each replica that has any."""
    work: Work
    """What the busiest device computes; `flops` and `bytes` are its numbers."""
    parameter_bytes: int
    """Bytes on each device, as are all below: of parameters, the optimizer's state, other state, and the batch."""
    gradient_bytes: int
    """Of a step's gradients, as the optimizer gets them, or as those of microbatches are added; temporaries, too."""
    optimizer_bytes: int
    state_bytes: int
    batch_bytes: int
    temp_bytes: int
    """Of what lives within the call only."""
    output_bytes: int
    """Of results that do not take the place of a donated argument."""
    peak_bytes: int
    """Of arguments, results and temporaries together."""
    memory_bytes: int | None
    """That programs can have of the device's memory; None where nothing tells."""
    collectives: tuple[Collective, ...]
    """Each with `.kind`, `.dtype`, `.bytes`, `.runs`, `.in_loop`, `.parameters`, `.in_flight`."""
    unscattered: tuple[str, ...]
    """Arrays with as many rows as the batch that every replica gets whole."""
    unused_donations: tuple[str, ...]
    """Donated arrays whose memory no result could take."""
    compilations: int | None
    """Programs that were compiled for this function before, by calls; None where this version of JAX does not say."""
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
        """Whether the peak is no more than the device's memory; None where that is not known."""
        return None if self.memory_bytes is None else self.peak_bytes <= self.memory_bytes

    @property
    def collective_bytes(self) -> int:
        """Payload that each device gives to collectives in a call."""
        return sum(c.bytes * (c.runs or 1) for c in self.collectives)

    @property
    def in_flight(self) -> float | None:
        """The share of these bytes that is on its way while the device computes; None where nothing tells."""
        if self.platform == "cpu" or not self.collective_bytes:
            return None
        return sum(c.bytes * (c.runs or 1) for c in self.collectives if c.in_flight) / self.collective_bytes

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The program, followed in the order of its schedule, instruction by instruction: see `seconds`."""
        return schedule_of(parse(self.hlo), self._network)

    @property
    def seconds(self) -> float | None:
        """The estimated time of a call, as by `jdp plan`; None for devices of which no figures are published (CPUs).

        Their `schedule` counts bytes that are read, written and sent in the place of seconds.
        """
        return None if self._network is None else self.schedule.seconds

    @property
    def exposed_seconds(self) -> float | None:
        """Of these, those in which a device computes nothing, because it waits for a collective."""
        return None if self._network is None else self.schedule.exposed_seconds

    @functools.cached_property
    def one_device(self) -> Work | None:
        """The work of the primary device alone with the whole batch; compiled at first use, None where that fails."""
        return self.work if self.devices == 1 else self._alone()

    def __repr__(self) -> str:
        where = f"{self.devices} x {self.device_kind}"
        return f"Report({self.label!r}, {where}, flops={self.flops:.3g}, peak_bytes={self.peak_bytes})"

    def __str__(self) -> str:
        """The table, 80 columns wide."""
        out = io.StringIO()
        show_blocks(_blocks(self), out)
        return out.getvalue().rstrip()


def _blocks(r: Report) -> Iterator[Block]:
    over = f"{r.devices} x {r.device_kind}" + (f", {r.processes} processes" if r.processes > 1 else "")
    yield Title(f"{r.label} on {over}; {sum(r.rows)} rows, at most {max(r.rows)} on a device")
    yield Table(("each device", "amount", "of one device", "from"), tuple(_amounts(r)))
    yield Title("collectives, in the order of the program")
    if r.collectives:
        rows = tuple(map(_collective, r.collectives[:_MANY]))
        yield Table(("kind", "of", "amount", "runs", "in flight", "carries"), rows)
        if len(r.collectives) > _MANY:
            yield Text(f"and {len(r.collectives) - _MANY} more (report.collectives)")
    else:
        yield Text("none: the devices do not wait for each other")
    notes = list(_notes(r))
    if notes:
        yield Title("to look at")
        yield from (Text(note) for note in notes)


_MANY = 24  # collectives


def _amounts(r: Report) -> Iterator[tuple[str, str, str, str]]:
    alone = r.one_device  # with all rows
    operations = scaled(r.flops, ((1e12, "Tflop"), (1e9, "Gflop"), (1e6, "Mflop"), (1e3, "kflop"), (1, "flop")))
    yield "flops", operations, _share(r.flops, alone and alone.flops), r.work.source
    yield "bytes read and written", _bytes(r.bytes), _share(r.bytes, alone and alone.bytes), r.work.source
    for name, size in (
        ("parameters", r.parameter_bytes),
        ("optimizer's state", r.optimizer_bytes),
        ("other state", r.state_bytes),
        ("batch", r.batch_bytes),
    ):
        if size:
            yield name, _bytes(size), "", "shapes"
    yield "temporaries", _bytes(r.temp_bytes), "", "compiled"
    if r.gradient_bytes:
        yield "  gradients", _bytes(r.gradient_bytes), "", "shapes"
    yield "peak of memory", _bytes(r.peak_bytes), "", "compiled"
    yield "given to collectives", _bytes(r.collective_bytes), "", "compiled"
    if r.in_flight is not None and r.collective_bytes:
        yield "  in flight while it computes", f"{r.in_flight:.1%}", "", "compiled"
    if r.compilations is not None:
        yield "programs compiled by calls", f"{r.compilations}", "", "counted"
    yield "time to compile this", f"{r.compile_seconds:.1f} s", "", "measured"


def _share(amount: float, alone: float | None) -> str:
    return f"{amount / alone:.3f}" if alone else "too large"


def _collective(c: Collective) -> tuple[str, str, str, str, str, str]:
    where = f"loop, {c.runs or '?'}" if c.in_loop else "once"
    flight = "yes" if c.in_flight else "no" if c.asynchronous else "waits"
    return c.kind, c.dtype, _bytes(c.bytes), where, flight, _few(c.parameters)


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
            f"it does not fit: a device has {_bytes(r.memory_bytes or 0)} for programs. Pass fewer rows, or make the "
            f"step with accumulate_steps, shard_optimizer=True or shard_params=True."
        )
    for name in r.unscattered:
        yield (
            f"{name} has as many rows as the batch, and every replica gets all of it. Pass it as an argument that is "
            f"cut (in_axes)."
        )
    for name in r.unused_donations:
        yield f"donated, and no result takes its memory: {name}. Return what replaces it with that shape and dtype."
    if any(c.in_loop and not c.named for c in r.collectives):  # shard_params gathers in loops, and means to
        yield "a collective runs in a loop: its bytes travel as many times. Reduce once after the loop, if you can."


def _bytes(x: float) -> str:
    return scaled(x, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))
