"""The collectives of an optimized program: what they carry, how often they run, and what is computed meanwhile."""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from .cost import trips
from .hlo import CONTROL, KINDS, Computation, Instruction, Module, Shape, nbytes, target, work
from .origin import Place, parts

_SCOPE = re.compile(r"(?:^|[/(:])(?:reduce|gather)\.([^/:()]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that moves data between devices."""

    kind: str
    """`"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, ..."""
    dtype: str
    """As XLA names it, `"bf16"`; `"mixed"` where it carries several."""
    bytes: int
    """Payload per device and run: what an all-gather gives, and what any other takes."""
    arrays: tuple[Shape, ...]
    """(dtype, shape) of each array it carries, as it was before XLA flattened and concatenated them."""
    op_names: tuple[str, ...]
    """Where in the user's program they come from, as far as XLA still knows."""
    runs: int | None
    """How often it runs in a call; None where a loop's length is not known before."""
    in_loop: bool
    group: int
    """Devices that take part together."""
    asynchronous: bool
    overlapped: tuple[str, ...]
    """The instructions that compute something while it is under way."""
    name: str
    """Of the instruction that begins it."""
    done: str
    """Of the one that waits for it: the same, where it is synchronous."""
    computation: str
    """The one whose schedule has both."""
    parameters: tuple[str, ...] = ()
    """Paths of the parameters it carries, or their gradients: what `carried` found."""

    @property
    def in_flight(self) -> bool:
        """Whether something is computed while it is under way."""
        return bool(self.overlapped)


def collectives(module: Module) -> list[Collective]:
    """The collectives that run over more than one device, in the order of the program."""
    return list(_in(module, module.entry, 1, False))


def carried(collective: Collective, leaves: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[str, ...]:
    """The parameters (path: dtype, shape) that a collective carries; those that cannot be told apart are left out.

    A parameter is known by the scope that its reduction is traced in, `jax.named_scope("reduce.<path>")` or
    `"gather.<path>"`, or else by its shape, where no other parameter has as many elements: XLA transposes and
    reshapes arrays before it sends them.
    """
    named = (path for op_name in collective.op_names for path in _SCOPE.findall(op_name))
    alike: dict[int, list[str]] = {}
    for path, (_, shape) in leaves.items():
        alike.setdefault(math.prod(shape), []).append(path)
    found = [path for path in named if path in leaves]
    for _, shape in collective.arrays:
        path, *others = alike.get(math.prod(shape), [""])
        if path and not others and _sides(shape) == _sides(leaves[path][1]) != []:  # any loss is a single number
            found.append(path)
    return tuple(dict.fromkeys(found))


def _sides(shape: tuple[int, ...]) -> list[int]:
    """The lengths of an array's sides, in whatever order."""
    return sorted(length for length in shape if length != 1)


def of_computation(
    module: Module, computation: Computation, runs: int | None = 1, in_loop: bool = False
) -> list[Collective]:
    """Those of one computation, without those of what it calls."""
    here = [(one, group) for one in begun(module, computation) if (group := group_size(module, one.inner)) > 1]
    places, names = work(module, computation) if here else ([], [])
    found = []
    for one, group in here:
        first, last = (computation.order[i.name] for i in (one.start, one.done))
        overlapped = names[bisect.bisect_right(places, first) : bisect.bisect_left(places, last)]
        found.append(_describe(module, one, runs, in_loop, group, tuple(overlapped)))
    return found


def _in(module: Module, computation: Computation, runs: int | None, in_loop: bool) -> Iterator[Collective]:
    """Those of a computation and of what it calls, in the order of its schedule."""
    here: dict[str, list[Collective]] = {}
    for one in of_computation(module, computation, runs, in_loop):
        here.setdefault(one.name, []).append(one)
    for instruction in computation:
        yield from here.get(instruction.name, [])
        if instruction.name not in here and instruction.opcode in CONTROL:
            loop = instruction.opcode == "while"
            times = trips(module, computation, instruction) if loop else 1
            times = None if runs is None or times is None else runs * times
            for _, name in instruction.called:
                yield from _in(module, module.computations[name], times, in_loop or loop)


def _describe(
    module: Module, one: Begun, runs: int | None, in_loop: bool, group: int, overlapped: tuple[str, ...]
) -> Collective:
    payload = _payload(one)
    origins = parts(module, one.place, one.inner.operands[: len(payload)], one.done)
    names = [i.op_name for i in (one.start, one.inner, one.done)] + [n for part in origins for n in part.op_names]
    dtypes = {dtype for dtype, _ in payload}
    if one.kind == "all-gather" or not origins:  # what was gathered has another shape
        arrays = payload
    elif len(origins) == len(payload):
        arrays = [(dtype, part.shape) for (dtype, _), part in zip(payload, origins, strict=True)]
    else:
        arrays = [(payload[0][0], part.shape) for part in origins]
    return Collective(
        kind=one.kind,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        bytes=sum(map(nbytes, payload)),
        arrays=tuple(arrays),
        op_names=tuple(dict.fromkeys(filter(None, names))),
        runs=runs,
        in_loop=in_loop,
        group=group,
        asynchronous=one.done is not one.start,
        overlapped=overlapped,
        name=one.start.name,
        done=one.done.name,
        computation=one.place.computation.name if one.place.outer is None else one.place.outer.computation.name,
    )


def _payload(one: Begun) -> list[Shape]:
    """What is sent: the arrays that an all-gather gives, those that any other takes."""
    operands = [one.place.producer(name)[1] for name in one.inner.operands]
    taken = [operand.shapes[0] for operand in operands if operand.shapes]
    if one.kind == "ragged-all-to-all":
        return taken[:1]  # the others say which rows go where
    if one.kind != "all-gather":
        return taken
    given = one.done if one.place.fusion is None and one.done.opcode.endswith("done") else one.inner
    return list(given.shapes)[-len(taken) :]  # a start gives its operands too, before its results


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
