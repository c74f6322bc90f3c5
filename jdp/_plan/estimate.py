"""An estimate of the time that an optimized program takes, by walking its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from .._explain.collectives import Collective, of_computation
from .._explain.cost import Cost, cost
from .._explain.hlo import Computation, Instruction, Module
from .._explain.trips import trips
from .._explain.work import CONTROL
from .._topology.chips import Chip


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Seconds, all estimated."""

    seconds: float
    """From begin to end."""
    compute_seconds: float
    collective_seconds: float
    exposed_seconds: float
    """In which nothing is computed, because a collective is waited for."""


def simulate(module: Module, chip: Chip, seconds_of_collective: Callable[[Collective], float]) -> Schedule:
    """The time of one run, if each device does what it can do at most.

    Instructions run one after the other, each as long as its matrix products or its bytes take, whichever is longer.
    Collectives run beside them, one after the other, from where they are begun; where the program waits for one,
    computing waits too. A loop takes its number of iterations times the first one; of branches the longest counts.
    """
    return _Walk(module, chip, seconds_of_collective).run()


@dataclasses.dataclass
class _Clock:
    now: float = 0.0
    link: float = 0.0
    """When the collectives begun so far will be through."""
    compute: float = 0.0
    collective: float = 0.0
    exposed: float = 0.0

    def wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def again(self, before: _Clock, n: int) -> None:
        """Adds what has passed since `before` n times more."""
        if self.link > before.link:
            self.link += n * (self.now - before.now)
        for name in ("now", "compute", "collective", "exposed"):
            here, there = getattr(self, name), getattr(before, name)
            setattr(self, name, here + n * (here - there))


class _Walk:
    def __init__(self, module: Module, chip: Chip, seconds_of_collective: Callable[[Collective], float]) -> None:
        self.module, self.chip, self.seconds_of_collective = module, chip, seconds_of_collective
        self.clock = _Clock()
        self.known: dict[str, list[Collective]] = {}

    def run(self) -> Schedule:
        self.computation(self.module.entry)
        clock = self.clock
        return Schedule(clock.now, clock.compute, clock.collective, clock.exposed)

    def computation(self, computation: Computation) -> None:
        begins, ends = {}, {}
        for one in self.collectives(computation):
            begins.setdefault(one.name, []).append(one)
        for instruction in computation:
            if instruction.name in ends:
                self.clock.wait(ends[instruction.name])
            if instruction.name in begins:
                for one in begins[instruction.name]:
                    ends[one.done] = max(self.begin(one), ends.get(one.done, 0.0))
                if instruction.name in ends:  # synchronous
                    self.clock.wait(ends[instruction.name])
            elif instruction.name not in ends or instruction.root:
                self.instruction(computation, instruction)

    def collectives(self, computation: Computation) -> Iterable[Collective]:
        if computation.name not in self.known:
            self.known[computation.name] = of_computation(self.module, computation)
        return self.known[computation.name]

    def begin(self, one: Collective) -> float:
        """When a collective that is begun now will be through."""
        clock, seconds = self.clock, self.seconds_of_collective(one)
        clock.link = max(clock.now, clock.link) + seconds
        clock.collective += seconds
        return clock.link

    def instruction(self, computation: Computation, instruction: Instruction) -> None:
        calls = instruction.called if instruction.opcode in CONTROL else ()
        inside = [self.module.computations[name] for _, name in calls]
        if instruction.opcode == "while":
            before = dataclasses.replace(self.clock)
            for called in inside:
                self.computation(called)
            self.clock.again(before, (trips(self.module, computation, instruction) or 1) - 1)
        elif instruction.opcode == "conditional":
            self.longest(inside)
        elif instruction.opcode in ("call", "async-start"):
            for called in inside:
                self.computation(called)
        else:
            seconds = self.seconds(cost(self.module, computation, instruction))
            self.clock.now += seconds
            self.clock.compute += seconds

    def longest(self, branches: list[Computation]) -> None:
        before, clocks = self.clock, []
        for branch in branches:
            self.clock = dataclasses.replace(before)
            self.computation(branch)
            clocks.append(self.clock)
        self.clock = max(clocks, key=lambda clock: clock.now, default=before)

    def seconds(self, work: Cost) -> float:
        products = sum(flops / self.chip.flops(dtype) for dtype, flops in work.products.items())
        return max(products, work.bytes / self.chip.bytes_per_second)
