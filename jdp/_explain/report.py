"""What `explain` tells: plain numbers of a compiled program, and where each of them comes from."""

from __future__ import annotations

import dataclasses
import functools
import io
from typing import Any

from .collectives import Collective


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
    compilations: int
    """Programs that were compiled for this function before, by calls."""
    compile_seconds: float
    hlo: str = dataclasses.field(repr=False)
    """The optimized program."""
    _call: Any = dataclasses.field(repr=False)

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
    def one_device(self) -> Work | None:
        """The work of the primary device alone with the whole batch; compiled at first use, None where that fails."""
        from .explain import work_alone

        return self.work if self.devices == 1 else work_alone(self._call)

    def __repr__(self) -> str:
        where = f"{self.devices} x {self.device_kind}"
        return f"Report({self.label!r}, {where}, flops={self.flops:.3g}, peak_bytes={self.peak_bytes})"

    def __str__(self) -> str:
        from .report_print import text

        out = io.StringIO()
        text(self, out)
        return out.getvalue().rstrip()
