"""Where the schedule of a computation begins its collectives, and where it waits for them, in every backend's spelling.

* A synchronous one is an instruction, `all-reduce`; on TPU also a fusion that has one inside.
* GPU begins with `all-reduce-start` (or `async-start`, which calls a computation with the collective) and waits in
  `all-reduce-done`; where the two were not pulled apart, it says `"is_sync":true`.
* TPU begins with a fusion that ends in the custom call `AsyncCollectiveStart`, waits in one that ends in
  `AsyncCollectiveDone`, and the fusions that compute in between repeat the collective inside. A `chain_id` ties them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from .hlo import Computation, Instruction, Module
from .origin import Place
from .shape import nbytes
from .work import KINDS, target

_STARTS = {f"{kind}-start": kind for kind in KINDS}
_IOTA = re.compile(r"\[(\d+(?:,\d+)*)\]<=")  # groups as rows of a reshaped range: [2,4]<=[8]
_MESH = re.compile(r"mesh\[([^]]*)\][^{]*\{([^}]*)\}")  # groups along axes: mesh['a'=2,'b'=4] {'b'}


@dataclasses.dataclass(frozen=True)
class Begun:
    """A collective where it is begun: `start` and `done` stand in the schedule, and are one where the program waits."""

    kind: str
    start: Instruction
    done: Instruction
    inner: Instruction
    """The collective itself, and where its operands are to be looked up."""
    place: Place


def begun(module: Module, computation: Computation) -> Iterator[Begun]:
    """The collectives of a computation, not those of what it calls, in the order of its schedule."""
    here = Place(computation)
    waits, steps = _chains(module, computation)
    for one in computation:
        if one.opcode in KINDS:
            yield Begun(one.opcode, one, one, one, here)
        elif one.opcode in _STARTS:
            pulled_apart = '"is_sync":true' not in one.attributes
            yield Begun(_STARTS[one.opcode], one, _done(computation, one) if pulled_apart else one, one, here)
        elif one.name not in steps:
            for inner in _collectives(module, one):
                done = _done(computation, one) if one.opcode == "async-start" else waits.get(one.name, one)
                yield Begun(_kind(one, inner), one, done, inner, here.inside(one, module))


def _collectives(module: Module, one: Instruction) -> list[Instruction]:
    """The collectives that a fusion, or what is run asynchronously, has inside."""
    if one.opcode not in ("fusion", "async-start"):
        return []
    return [i for _, name in one.called for i in module.computations[name] if i.opcode in KINDS]


def _chains(module: Module, computation: Computation) -> tuple[dict[str, Instruction], set[str]]:
    """TPU's: what waits for each fusion that begins a collective, and the fusions that only carry it on."""
    waits: dict[str, Instruction] = {}
    steps: set[str] = set()
    running: dict[str | None, str] = {}
    for one in computation:
        if one.opcode != "fusion" or not (inner := _collectives(module, one)):
            continue
        inside = module.computations[one.called[0][1]]
        ends = {target(i) for i in inside if i.opcode == "custom-call"}
        chains = [i.attribute("frontend_attributes") for i in inner]
        if "AsyncCollectiveStart" in ends:
            running |= dict.fromkeys(chains, one.name)
            waits[one.name] = computation.root  # until its end is seen
        elif any(chain in running for chain in chains):
            steps.add(one.name)
        if "AsyncCollectiveDone" in ends:
            waits |= {running.pop(chain): one for chain in chains if chain in running}
    return waits, steps


def _done(computation: Computation, start: Instruction) -> Instruction:
    """What waits for it; the end of the computation, where that is not in it (a loop waits in its next iteration)."""
    for user in computation.users.get(start.name, []):
        if user.opcode.endswith("-done"):
            return user
        if user.opcode == "async-update":
            return _done(computation, user)
    return computation.root


def _kind(one: Instruction, inner: Instruction) -> str:
    """TPU scatters a sum by cutting it within the fusion that makes it."""
    if one.opcode == "fusion" and inner.opcode == "all-reduce" and "async" not in one.name:
        given, taken = (sum(map(nbytes, i.shapes)) for i in (one, inner))
        return "reduce-scatter" if given < taken else "all-reduce"
    return inner.opcode


def group_size(module: Module, collective: Instruction) -> int:
    """How many devices take part together."""
    if collective.opcode.startswith("collective-permute"):
        return _longest(re.findall(r"\{(\d+),(\d+)\}", collective.attribute("source_target_pairs") or ""))
    groups = collective.attribute("replica_groups") or ""
    if iota := _IOTA.match(groups):
        return int(iota.group(1).split(",")[-1])
    if mesh := _MESH.match(groups):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh.group(1)))
        parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    first = groups[: groups.find("}")].lstrip("{ ")
    return first.count(",") + 1 if first else module.devices


def _longest(pairs: list[tuple[str, str]]) -> int:
    """The most devices that pairs of source and target connect in one ring or chain."""
    follow = {source: at for source, at in pairs if source != at}
    begin = [*(follow.keys() - set(follow.values())), *follow]  # heads of chains, then rings
    longest, seen = 1, set()
    for device in begin:
        length = 0
        while device not in seen:
            seen.add(device)
            length += 1
            if device not in follow:
                break
            device = follow[device]
        longest = max(longest, length)
    return longest
