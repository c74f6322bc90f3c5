"""The collectives of an optimized program: what they carry, how often they run, and what is computed during them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .cost import trips
from .hlo import CONTROL, KINDS, PASS_ON, Computation, Instruction, Module, Shape, is_work, nbytes, target

_SCOPE = re.compile(r"(?:^|[/(:])(?:reduce|gather)\.([^/:()]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that moves data between devices."""

    kind: str
    """`"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, ..."""
    dtype: str
    """As XLA names it, `"bf16"`; `"mixed"` if it carries several dtypes."""
    bytes: int
    """Payload per device and run: the result of an all-gather, and the operands of any other collective."""
    arrays: tuple[Shape, ...]
    """(dtype, shape) of each array it carries, as it was before XLA flattened and concatenated them."""
    op_names: tuple[str, ...]
    """Where in the user's program they come from, as far as XLA has kept it."""
    runs: int | None
    """How often it runs in a call; None if the length of a loop is not known in advance."""
    in_loop: bool
    group: int
    """Devices that take part together."""
    asynchronous: bool
    overlapped: tuple[str, ...]
    """The instructions that compute something while it is under way."""
    name: str
    """The name of the instruction that begins it."""
    done: str
    """The name of the instruction that waits for it: the same if it is synchronous."""
    parameters: tuple[str, ...] = ()
    """Paths of the parameters whose values or gradients it carries, as `carried` found them."""

    @property
    def named(self) -> bool:
        """True if jdp made it: it gathers a parameter, or sums a gradient, under the parameter's name."""
        return any(map(_SCOPE.search, self.op_names))

    @property
    def in_flight(self) -> bool:
        """True if something is computed while it is under way."""
        return bool(self.overlapped)


def collectives(module: Module) -> list[Collective]:
    """Returns the collectives that run over more than one device, in the order of the program."""
    return list(_in(module, module.entry, 1, False))


def carried(collective: Collective, leaves: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[str, ...]:
    """Returns the paths of the parameters that a collective carries, as far as they can be told apart.

    `leaves` has the dtype and shape of each path. A parameter is recognized by the scope that its reduction is traced
    in, `jax.named_scope("reduce.<path>")` or `"gather.<path>"`, or else by its shape if no other parameter has as many
    elements: XLA transposes and reshapes arrays before it sends them.
    """
    found = {path for op_name in collective.op_names for path in _SCOPE.findall(op_name)}
    alike: dict[int, list[str]] = {}
    for path, (_, shape) in leaves.items():
        alike.setdefault(math.prod(shape), []).append(path)
    for _, shape in collective.arrays:
        paths = alike.get(math.prod(shape), [])
        if len(paths) == 1 and _sides(shape) == _sides(leaves[paths[0]][1]) != []:  # any loss is a single number
            found.add(paths[0])
    return tuple(path for path in leaves if path in found)


def _sides(shape: tuple[int, ...]) -> list[int]:
    """Returns the lengths of an array's sides that are not 1, sorted."""
    return sorted(length for length in shape if length != 1)


def of_computation(
    module: Module, computation: Computation, runs: int | None = 1, in_loop: bool = False
) -> dict[str, list[Collective]]:
    """Returns the collectives of one computation, not of those it calls, by the instruction that begins them."""
    here = [(one, group) for one in begun(module, computation) if (group := group_size(module, one.inner)) > 1]
    works = [is_work(module, computation, i) for i in computation] if here else []
    order = {instruction.name: n for n, instruction in enumerate(computation)}
    found: dict[str, list[Collective]] = {}
    for one, group in here:
        payload = _payload(one)
        arrays, names = _carries(module.dissolved(computation), one, payload)
        meanwhile = slice(order[one.start.name] + 1, order[one.done.name])
        dtypes = {dtype for dtype, _ in payload}
        found.setdefault(one.start.name, []).append(
            Collective(
                kind=one.kind,
                dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
                bytes=sum(map(nbytes, payload)),
                arrays=arrays,
                op_names=names,
                runs=runs,
                in_loop=in_loop,
                group=group,
                asynchronous=one.done is not one.start,
                overlapped=tuple(i.name for i in itertools.compress(computation[meanwhile], works[meanwhile])),
                name=one.start.name,
                done=one.done.name,
            )
        )
    return found


def _in(module: Module, computation: Computation, runs: int | None, in_loop: bool) -> Iterator[Collective]:
    """Yields the collectives of a computation and of those it calls, in the order of the schedule."""
    here = of_computation(module, computation, runs, in_loop)
    for instruction in computation:
        yield from here.get(instruction.name, [])
        if instruction.name not in here and instruction.opcode in CONTROL:
            loop = instruction.opcode == "while"
            times = trips(module, computation, instruction) if loop else 1
            times = None if runs is None or times is None else runs * times
            for _, name in instruction.called:
                yield from _in(module, module.computations[name], times, in_loop or loop)


def _payload(one: Begun) -> list[Shape]:
    """Returns the arrays that are sent: the results of an all-gather, the operands of any other collective."""
    operands = [one.inside.by_name[name] for name in one.inner.operands]
    taken = [operand.shapes[0] for operand in operands if operand.shapes]
    if one.kind == "ragged-all-to-all":
        return taken[:1]  # the other operands tell which rows go where
    if one.kind != "all-gather":
        return taken
    given = one.done if one.inner is one.start and one.done.opcode.endswith("done") else one.inner
    return list(given.shapes)[-len(taken) :]  # a start returns its operands before its results


_GIVES = ("get-tuple-element", "slice", "all-reduce-done", "all-gather-done", "reduce-scatter-done", "async-done")


def _carries(flat: Computation, one: Begun, payload: Sequence[Shape]) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Returns the arrays as they were before XLA flattened and concatenated them, and where they come from.

    It follows each array through the instructions that only move it, up to what computed it and down to what uses it,
    because XLA may lose the user's names on the way.
    """
    inner = flat.by_name[one.inner.name if one.inner is one.start else f"{one.start.name}/{one.inner.name}"]
    names = dict.fromkeys(i.op_name for i in (one.start, one.inner, one.done))
    queue, starts, cut = [inner], {inner.name: 0}, {}
    for mover in queue:  # the list grows in the loop
        for user in flat.users.get(mover.name, []):
            if user.opcode not in (*PASS_ON, *_GIVES) or user.name in starts:
                continue
            queue.append(user)
            names[user.op_name] = None
            starts[user.name] = starts[mover.name] + sum(user.integers("slice")[:1])
            if len(payload) == 1 and len(_shape(mover)) == 1 < len(_shape(user)):  # cut out of a vector
                cut[starts[user.name], math.prod(_shape(user))] = _shape(user)
    arrays, start = [], 0
    for (dtype, _), name in zip(payload, inner.operands, strict=False):
        for shape in _origins(flat, flat.by_name[name], names):
            size = math.prod(shape)
            arrays.append((dtype, cut.get((start, size), shape)))
            start += size
    # The result of a gather has another shape than its parts.
    return tuple(payload if one.kind == "all-gather" else arrays), tuple(filter(None, names))


def _origins(flat: Computation, one: Instruction, names: dict[str, None]) -> list[tuple[int, ...]]:
    """Returns the shapes of the arrays that an operand was put together from, in order; adds to the names."""
    shape = _shape(one)
    while True:
        here = _shape(one)
        if len(shape) == 1 and math.prod(here) == shape[0] and len(_sides(here)) > 1:  # XLA has flattened it
            shape = here
        above = [flat.by_name[name] for name in one.operands]
        if one.opcode in PASS_ON:
            names[one.op_name] = None
            one = above[0]
        elif one.opcode == "concatenate" and len(shape) == 1:
            return [origin for operand in above for origin in _origins(flat, operand, names)]
        else:
            return [shape]


def _shape(one: Instruction) -> tuple[int, ...]:
    return one.shapes[0][1] if one.shapes else ()


_IOTA = re.compile(r"\[(\d+(?:,\d+)*)\]<=")  # groups as rows of a reshaped range: [2,4]<=[8]
_MESH = re.compile(r"mesh\[([^]]*)\][^{]*\{([^}]*)\}")  # groups along axes: mesh['a'=2,'b'=4] {'b'}


class Begun(NamedTuple):
    """A collective where it begins: `start` and `done` are in the schedule, and are the same if the program waits."""

    kind: str
    start: Instruction
    done: Instruction
    inner: Instruction  # the collective itself
    inside: Computation  # the computation that holds `inner`


def begun(module: Module, computation: Computation) -> list[Begun]:
    """Returns the collectives of a computation, without the computations it calls, in the order of the schedule."""
    found: list[Begun] = []
    running: dict[str | None, Instruction] = {}  # TPU's fusions that begin one, by the attributes all of a chain share
    for one in computation:
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS:
            waits_here = kind == one.opcode or '"is_sync":true' in one.attributes
            found.append(Begun(kind, one, one if waits_here else _done(computation, one), one, computation))
        if one.opcode not in ("fusion", "async-start") or not one.called:
            continue
        inside, before = module.computations[one.called[0][1]], set(running)
        marks = {target(i) for i in inside if i.opcode == "custom-call"}
        for inner in (i for i in inside if i.opcode in KINDS):
            chain, done = inner.attribute("frontend_attributes"), one
            if "AsyncCollectiveStart" in marks:
                running[chain], done = one, computation.root  # until its end is found
            elif one.opcode == "async-start":
                done = _done(computation, one)
            elif chain in before:  # it only continues the chain
                done = None
            if done is not None:
                found.append(Begun(_kind(one, inner), one, done, inner, inside))
            if "AsyncCollectiveDone" in marks and chain in running:
                begin = running.pop(chain)
                found = [x._replace(done=one) if x.start is begin else x for x in found]
    return found


def _done(computation: Computation, start: Instruction) -> Instruction:
    """Returns the instruction that waits for `start`; the computation's root if a loop's next iteration waits."""
    for user in computation.users.get(start.name, []):
        if user.opcode.endswith("-done"):
            return user
        if user.opcode == "async-update":
            return _done(computation, user)
    return computation.root


def _kind(one: Instruction, inner: Instruction) -> str:
    """Returns the kind; a TPU fusion that sums and then cuts the sum is a reduce-scatter."""
    if one.opcode == "fusion" and inner.opcode == "all-reduce" and "async" not in one.name:
        given, taken = (sum(map(nbytes, i.shapes)) for i in (one, inner))
        return "reduce-scatter" if given < taken else "all-reduce"
    return inner.opcode


def group_size(module: Module, collective: Instruction) -> int:
    """Returns how many devices take part together."""
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
    """Returns the size of the largest group of devices that the pairs of source and target connect."""
    connected = {device: {device} for pair in pairs for device in pair}
    for source, other in pairs:
        small, large = sorted((connected[source], connected[other]), key=len)
        if small is not large:
            large |= small
            connected |= dict.fromkeys(small, large)
    return max(map(len, connected.values()), default=1)
