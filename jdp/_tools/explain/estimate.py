"""An estimate of the time that an optimized program takes, by walking its schedule."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ..._core.devices import Device
from ..topology.chips import CHIPS, Chip, Protocol, chip_of
from .collectives import Collective, of_computation
from .cost import cost, trips
from .hlo import CONTROL, Computation, Instruction, Module

SOURCES = (
    'one ring or tree: Chan et al., "Collective communication: theory, practice, and experience" (2007); bytes by '
    'bus bandwidth: NCCL Tests, "Performance reported by NCCL tests"',
    'within and between hosts at once, and over a torus: Google DeepMind, "How to Scale Your Model" (2025), parts 3 '
    "and 12 (GPUs)",
)
_TIMES = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}  # how often the bytes go around the ring
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
_ONCE = ("collective-broadcast", "collective-permute")


def wire_bytes(kind: str, size: int, group: int) -> float:
    """Returns the bytes that each device of the group sends: the payload times NCCL's factor for the bus bandwidth.

    The payload is the result of an all-gather and the operand of any other collective, in bytes per device.
    """
    _check(kind)
    return size * float(group > 1) if kind in _ONCE else _TIMES.get(kind, 1) * size * (group - 1) / group


def _check(kind: str) -> None:
    if kind not in (*_TIMES, *_ALL_TO_ALL, *_ONCE):
        raise ValueError(f"jdp.plan: a collective is {kind!r}, which has no formula here. Report it, please.")


@dataclasses.dataclass(frozen=True)
class Network:
    """The links between devices of one chip: hosts of GPUs, or a torus of TPUs.

    `shape` is (hosts, GPUs of each) or the sides of the torus.
    """

    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Network:
        """Returns the network of described devices, or of real devices whose kind is known."""
        kind = devices[0].device_kind
        if (chip := chip_of(kind)) is None:
            known = ", ".join(chip.device_kind for chip in CHIPS.values())
            raise ValueError(f"jdp.plan: a device is a {kind!r}; its figures are not known here. Plan for {known}.")
        if chip.kind == "gpu":
            hosts = collections.Counter(d.process_index for d in devices)
            return cls(chip, (len(hosts), max(hosts.values())))
        places = [getattr(d, "coords", (0,)) for d in devices]
        return cls(chip, tuple(max(side) - min(side) + 1 for side in zip(*places, strict=True)))

    def seconds(self, kind: str, size: int, group: int) -> float:
        """Returns the seconds of one collective as if nothing else ran; `size` and `group` are as in `wire_bytes`."""
        _check(kind)
        if group <= 1:
            return 0.0
        way = self._torus if self.chip.kind == "tpu" else self._hosts
        return min(p.launch + way(kind, size / p.share, group, p) for p in self.chip.protocols)

    def _hosts(self, kind: str, size: float, group: int, protocol: Protocol) -> float:
        """Returns the seconds on GPUs: all levels of the network work at the same time, and the slowest decides."""
        chip, within = self.chip, min(group, self.shape[1])
        hosts = -(-group // within)
        hops = (within - 1) * protocol.hop + math.ceil(math.log2(hosts)) * protocol.network_hop
        if kind in _TIMES:
            # reduce-scatter within the host, then between hosts on each GPU's own part, then all-gather within
            local = (within - 1) / within * size / chip.link
            remote = (hosts - 1) / hosts * size / within / chip.network if hosts > 1 else 0.0
            return _TIMES[kind] * (max(local, remote) + hops)
        if kind in _ALL_TO_ALL:
            local = (within - 1) / group * size / chip.link
            remote = (group - within) / group * size / chip.network if hosts > 1 else 0.0
            return max(local, remote) + (protocol.network_hop if hosts > 1 else protocol.hop)
        return size / (chip.network if hosts > 1 else chip.link) + hops

    def _torus(self, kind: str, size: float, group: int, protocol: Protocol) -> float:
        """Returns the seconds on TPUs: all axes work at once; a ring uses two links of each device, a line one."""
        whole = group == math.prod(self.shape)
        # (length, links that its bytes leave by) of each axis
        axes = [(side, 1 + self._is_ring(side)) for side in self.shape if side > 1] if whole else [(group, 1)]
        hops = sum(side // 2 if links == 2 else side - 1 for side, links in axes) * protocol.hop
        if kind in _ALL_TO_ALL:  # half of each device's bytes cross the middle of the longest axis
            return size / 4 * max(side / links for side, links in axes) / self.chip.link + hops
        if kind == "collective-permute":
            return size / self.chip.link + hops
        bandwidth = self.chip.link * sum(links for _, links in axes)
        if kind in _TIMES:
            return _TIMES[kind] * ((group - 1) / group * size / bandwidth + hops)
        return size / bandwidth + hops

    def _is_ring(self, side: int) -> bool:
        """Returns True if an axis is a ring: on v4 and v5p if 4 divides all sides, else if it has the full length."""
        if len(self.chip.domain) == 3:
            return all(other % 4 == 0 for other in self.shape)
        return side == self.chip.domain[0]


class Span(NamedTuple):
    """A stretch of a schedule, from its beginning to its end."""

    lane: Literal["computes", "waits", "sends"]
    start: float
    end: float
    name: str
    """The name of the instruction; for "waits", the one that waits; for "sends", the one that begins the collective."""

    def stretched(self, start: float, times: int) -> Span:
        """Returns the span with its length and its distance from `start` multiplied by `times`."""
        return self._replace(start=start + times * (self.start - start), end=start + times * (self.end - start))


@dataclasses.dataclass
class Schedule:
    """Estimated seconds of a program up to a point in its schedule."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    collective_seconds: float = 0.0
    exposed_seconds: float = 0.0  # nothing is computed, because the program waits for a collective
    link: float = 0.0  # when the collectives begun so far will be complete
    spans: tuple[Span, ...] = ()
    """All spans: "computes" and "waits" fill the time, "sends" run in parallel. A loop is drawn as its first iteration,
    stretched to the whole length."""

    def again(self, before: Schedule, n: int) -> None:
        """Adds n times what has passed since `before`."""
        if self.link > before.link:
            self.link += n * (self.seconds - before.seconds)
        for name in ("seconds", "compute_seconds", "collective_seconds", "exposed_seconds"):
            here, there = getattr(self, name), getattr(before, name)
            setattr(self, name, here + n * (here - there))


def simulate(module: Module, chip: Chip, seconds_of_collective: Callable[[Collective], float]) -> Schedule:
    """Estimates the time of one run if each device works at its peak.

    Instructions run one after the other, each as long as its matrix products or its bytes take, whichever is longer.
    Collectives run in parallel to them, one after the other, from where they begin; where the program waits for one,
    computing waits too. A loop takes its number of iterations times the first one; of branches the longest counts.
    """
    walk = _Walk(module, chip, seconds_of_collective)
    clock = walk.run(module.entry, Schedule())
    return dataclasses.replace(clock, spans=tuple(walk.spans))


class _Walk:
    def __init__(self, module: Module, chip: Chip, seconds_of_collective: Callable[[Collective], float]) -> None:
        self.module, self.chip, self.seconds_of_collective = module, chip, seconds_of_collective
        self.spans: list[Span] = []

    def run(self, computation: Computation, clock: Schedule) -> Schedule:
        begins, ends = of_computation(self.module, computation), {}
        for instruction in computation:
            name = instruction.name
            if name in ends:
                self.wait(clock, ends[name], name)
            for one in begins.get(name, []):
                start, seconds = max(clock.seconds, clock.link), self.seconds_of_collective(one)
                clock.link = start + seconds
                clock.collective_seconds += seconds
                self.add("sends", start, clock.link, name)
                ends[one.done] = max(clock.link, ends.get(one.done, 0.0))
            if name in begins and name in ends:  # synchronous
                self.wait(clock, ends[name], name)
            elif name not in begins and (name not in ends or instruction.root):
                clock = self.step(computation, instruction, clock)
        return clock

    def step(self, computation: Computation, instruction: Instruction, clock: Schedule) -> Schedule:
        opcode, before, mark = instruction.opcode, dataclasses.replace(clock), len(self.spans)
        if opcode not in CONTROL:
            work = cost(self.module, computation, instruction)
            products = sum(flops / self.chip.flops(dtype) for dtype, flops in work.products.items())
            seconds = max(products, work.bytes / self.chip.bytes_per_second)
            clock.seconds += seconds
            clock.compute_seconds += seconds
            self.add("computes", before.seconds, clock.seconds, instruction.name)
            return clock
        inside = [self.module.computations[name] for _, name in instruction.called]
        if opcode == "conditional":
            ran = []
            for branch in inside:
                ran.append((self.run(branch, dataclasses.replace(before)), self.spans[mark:]))
                del self.spans[mark:]
            clock, spans = max(ran, key=lambda one: one[0].seconds, default=(clock, []))
            self.spans += spans
            return clock
        for called in inside:
            clock = self.run(called, clock)
        if opcode == "while":
            times = trips(self.module, computation, instruction) or 1
            clock.again(before, times - 1)
            self.spans[mark:] = [span.stretched(before.seconds, times) for span in self.spans[mark:]]
        return clock

    def wait(self, clock: Schedule, until: float, name: str) -> None:
        self.add("waits", clock.seconds, until, name)
        clock.exposed_seconds += max(0.0, until - clock.seconds)
        clock.seconds = max(clock.seconds, until)

    def add(self, lane: Literal["computes", "waits", "sends"], start: float, end: float, name: str) -> None:
        if end > start:
            self.spans.append(Span(lane, start, end, name))


BYTES = Chip("bytes", "", "", {"f32": math.inf}, 0, 1.0, 1.0, (1,), (), {})
"""Not a real chip: one byte read or written takes a second on it. It stands for devices without published figures."""


def schedule_of(module: Module, network: Network | None) -> Schedule:
    """Returns the schedule on this network; without one it counts bytes read, written and sent instead of seconds."""
    if network is None:
        return simulate(module, BYTES, lambda c: float(c.bytes))
    return simulate(module, network.chip, lambda c: network.seconds(c.kind, c.bytes, c.group))
