"""The members of a job that processes may leave and come back to, and the orders of devices that can be used yet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any


class Members:
    """What each process knows of it. Where nobody may leave, the generation is 0 for ever.

    Gloo keeps its connections for each order of devices, broken ones too, and cannot make them anew. So where somebody
    has come back, only an order that was not used before leads to it.
    """

    def __init__(self) -> None:
        self.generation = 0  # how often somebody has left or come back
        self.meetings = 0  # of this generation
        self.there: tuple[int, ...] = ()  # the processes, once that is known to have changed
        self.lives: dict[int, int] = {}  # of the processes that are there, by JAX's numbers
        self.life = 0  # of this one
        self.waits = False  # this process was started again, alone, and the others have not let it in yet
        self.joined: tuple[int, ...] = ()  # who has come back, and has not the others' state yet
        self.used: set[tuple[int, ...]] = set()  # orders of devices, by their ids

    def to_tell(self) -> dict[str, Any]:
        """What one that comes back has to know."""
        lives = {str(p): self.lives[p] for p in self.there}
        return {"generation": self.generation, "joined": self.joined, "lives": lives, "used": sorted(self.used)}

    def hear(self, told: dict[str, Any]) -> None:
        """What this process has been told, which comes back."""
        self.generation, self.joined = told["generation"], tuple(told["joined"])
        self.lives = {int(p): life for p, life in told["lives"].items()}
        self.there, self.waits = tuple(sorted(self.lives)), False
        self.used |= {*map(tuple, told["used"])}

    def uses(self, devices: Sequence[Any]) -> None:
        """A program runs over these, in this order, or in that of the gather before a batch."""
        self.used |= {*_orders(devices)}

    def fresh(self, devices: Sequence[Any]) -> tuple[Any, ...] | None:
        """These devices in an order that is not used, those of a process beside each other; None if all are."""
        each: dict[int, list[Any]] = {}
        for device in devices:
            each.setdefault(device.process_index, []).append(device)
        if len(each) == 1 or devices[0].platform != "cpu":
            return tuple(devices)
        return next((order for order in _ways(list(each.values())) if not self.used & {*_orders(order)}), None)

    def have_place_for(self, devices: Sequence[Any]) -> bool:
        """Whether there is an order for these, and for the rest where one more process but the first dies."""
        gone = {d.process_index for d in devices} - {0}
        rests = [[d for d in devices if d.process_index != p] for p in gone]
        return all(self.fresh(some) is not None for some in (devices, *rests))


def _orders(devices: Sequence[Any]) -> list[tuple[int, ...]]:
    ids = tuple(d.id for d in devices)
    return [ids, ids[-1:] + ids[:-1]]


def _ways(each: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """All orders of the processes, and the devices of each process turned in all ways."""
    for processes in itertools.permutations(each):
        turned = [[own[k:] + own[:k] for k in range(len(own))] for own in processes]
        for own in itertools.product(*turned):
            yield tuple(itertools.chain.from_iterable(own))


members = Members()
