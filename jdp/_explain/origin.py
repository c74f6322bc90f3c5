"""Which arrays a collective really carries: XLA flattens and concatenates them first, and cuts them apart afterwards.

On the way it may lose what the user called them. So each array is followed through the instructions that only move it,
up to what computed it and down to what uses it, into fusions and out of them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

from .hlo import Computation, Instruction, Module

_MOVES = ("bitcast", "reshape", "copy", "convert", "transpose", "copy-start", "copy-done", "optimization-barrier")
_DONE = ("get-tuple-element", "all-reduce-done", "all-gather-done", "reduce-scatter-done", "async-done")


@dataclasses.dataclass(frozen=True)
class Place:
    """A computation, and for the inside of a fusion the fusion and where that stands."""

    computation: Computation
    fusion: Instruction | None = None
    outer: Place | None = None

    def inside(self, fusion: Instruction, module: Module) -> Place:
        return Place(module.computations[fusion.called[0][1]], fusion, self)

    def producer(self, name: str) -> tuple[Place, Instruction]:
        """The instruction of that name; for a fusion's parameter, what is passed to it."""
        instruction = self.computation.by_name[name]
        if instruction.opcode == "parameter" and self.outer is not None and self.fusion is not None:
            return self.outer.producer(self.fusion.operands[int(instruction.literal)])
        return self, instruction


@dataclasses.dataclass
class Part:
    """One array that a collective carries: its shape as the user's program has it, and names of where it comes from."""

    shape: tuple[int, ...]
    op_names: list[str]


def parts(module: Module, place: Place, operands: Iterable[str], done: Instruction) -> list[Part]:
    """The arrays that a collective takes as `operands` at `place`, and gives out in `done`."""
    below = _below(module, place, done)
    found = []
    for index, name in enumerate(operands):
        above = list(_above(module, place, name, []))
        start = 0
        for part in above:
            size = math.prod(part.shape)
            user = below.get((index, start, start + size)) if len(above) > 1 else below.get((index, 0, 0))
            if user is not None:
                part.op_names += user.op_names
                if len(above) > 1 and len(user.shape) > 1 and math.prod(user.shape) == size:
                    part.shape = user.shape
            start += size
        found += above
    return found


def _above(module: Module, place: Place, name: str, op_names: list[str]) -> Iterator[Part]:
    """The arrays that an operand was put together from, in their order in it."""
    place, instruction = place.producer(name)
    shape = _shape(instruction)
    op_names = list(op_names)
    while True:
        if len(shape) == 1 and _flattened(_shape(instruction), shape[0]):
            shape = _shape(instruction)
        if instruction.opcode in _MOVES:
            _note(op_names, instruction)
            place, instruction = place.producer(instruction.operands[0])
        elif instruction.opcode == "concatenate" and len(shape) == 1:
            for operand in instruction.operands:
                yield from _above(module, place, operand, op_names)
            return
        elif instruction.opcode == "fusion" and _rearranges(module, instruction):
            _note(op_names, instruction)
            inside = place.inside(instruction, module)
            place, instruction = inside.producer(inside.computation.root.name)
        else:
            yield Part(shape, op_names)
            return


def _rearranges(module: Module, fusion: Instruction) -> bool:
    """Whether it ends in a concatenation or a move, so that what it takes or computes before is the array."""
    return bool(fusion.called) and module.computations[fusion.called[0][1]].root.opcode in (*_MOVES, "concatenate")


def _below(module: Module, place: Place, done: Instruction) -> dict[tuple[int, int, int], Part]:
    """What the users call each part of the result: by the index in the tuple, and from where to where it is cut."""
    found: dict[tuple[int, int, int], Part] = {}
    seen: set[tuple[int, str, int, int, int]] = set()
    queue = [(place, done, (0, 0, 0))]
    while queue:
        here, instruction, key = queue.pop()
        if (mark := (id(here.computation), instruction.name, *key)) in seen:
            continue
        seen.add(mark)
        for where, user in _users(module, here, instruction):
            at = key
            if user.opcode == "get-tuple-element":
                at = (user.integers("index")[0], 0, 0)
            elif user.opcode == "slice" and (cut := _cut(user)):
                at = (key[0], key[1] + cut[0], key[1] + cut[1])
            elif user.opcode not in (*_MOVES, *_DONE):
                continue
            part = found.setdefault(at, Part((), []))
            _note(part.op_names, user)
            if user.opcode in ("bitcast", "reshape") and len(part.shape) < 2:
                part.shape = _shape(user)
            queue.append((where, user, at))
    return found


def _users(module: Module, place: Place, instruction: Instruction) -> Iterator[tuple[Place, Instruction]]:
    """The instructions that take a result, inside the fusions it goes into and outside the one it ends."""
    users = place.computation.users.get(instruction.name, [])
    if place.fusion is not None and place.outer is not None and instruction.root:
        yield from _users(module, place.outer, place.fusion)
    for user in users:
        if user.opcode == "fusion" and user.called:
            inside = place.inside(user, module)
            for number, operand in enumerate(user.operands):
                if operand == instruction.name and number in inside.computation.parameters:
                    yield from _users(module, inside, inside.computation.parameters[number])
        elif user.opcode == "tuple" and user.root and place.fusion is not None and place.outer is not None:
            numbers = [n for n, operand in enumerate(user.operands) if operand == instruction.name]
            for taker in place.outer.computation.users.get(place.fusion.name, []):
                if taker.opcode == "get-tuple-element" and taker.integers("index")[0] in numbers:
                    yield from _users(module, place.outer, taker)
        else:
            yield place, user


def _cut(user: Instruction) -> tuple[int, int] | None:
    """From where to where a slice of a vector goes."""
    limits = re.findall(r"\d+", user.attribute("slice") or "")
    return (int(limits[0]), int(limits[1])) if len(_shape(user)) == 1 and len(limits) == 2 else None


def _note(op_names: list[str], instruction: Instruction) -> None:
    if instruction.op_name and instruction.op_name not in op_names:
        op_names.append(instruction.op_name)


def _shape(instruction: Instruction) -> tuple[int, ...]:
    return instruction.shapes[0][1] if instruction.shapes else ()


def _flattened(shape: tuple[int, ...], size: int) -> bool:
    """Whether a vector of that size can be an array of that shape; (1, n) is no shape that a vector comes from."""
    return math.prod(shape) == size and sum(length > 1 for length in shape) > 1
