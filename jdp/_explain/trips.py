"""How often a `while` of an optimized program runs its body: XLA says so on CPU and GPU, and on TPU it can be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .hlo import Computation, Instruction, Module

_PASS_ON = ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done")


@dataclasses.dataclass(frozen=True)
class _Scalar:
    """An integer: a constant, or what an element of the loop's carry was when the iteration began, plus a constant."""

    constant: int
    element: int | None = None


def trips(module: Module, outer: Computation, loop: Instruction) -> int | None:
    """The number of iterations; None where neither XLA's annotation nor a counter with constant ends tells it."""
    if loop.known_trips is not None:
        return loop.known_trips
    called = dict(loop.called)
    if "body" not in called or "condition" not in called:
        return None
    condition, body = module.computations[called["condition"]], module.computations[called["body"]]
    end = _comparison(module, condition)
    carry = outer.by_name.get(loop.operands[0])
    if end is None or carry is None or carry.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    counter, bound = end

    def at_begin(element: int) -> _Scalar | None:
        return _scalar(module, outer, carry.operands[element])

    def after_one(element: int) -> _Scalar | None:
        return _scalar(module, body, body.root.operands[element])

    begin, after = at_begin(counter.element or 0), after_one(counter.element or 0)
    if bound.element is not None:  # a limit that is carried along, unchanged
        if after_one(bound.element) != _Scalar(0, bound.element):
            return None
        limit = at_begin(bound.element)
        bound = _Scalar(limit.constant + bound.constant) if limit and limit.element is None else None
    if begin is None or after is None or bound is None or begin.element is not None:
        return None
    if after.element != counter.element or after.constant <= 0:
        return None
    return max(0, -(-(bound.constant - begin.constant - counter.constant) // after.constant))


def _comparison(module: Module, condition: Computation) -> tuple[_Scalar, _Scalar] | None:
    """(counter, bound) of a condition `counter < bound`."""
    computation, root, bind = condition, condition.root, None
    if root.opcode == "fusion":
        bind = _binder(module, condition, root, None)
        computation = module.computations[root.called[0][1]]
        root = computation.root
    direction = root.attribute("direction")
    if root.opcode != "compare" or direction not in ("LT", "GT", "LE", "GE"):
        return None
    left, right = (_scalar(module, computation, name, bind) for name in root.operands)
    if direction[0] == "G":
        left, right = right, left
    if left is None or right is None or left.element is None:
        return None
    return left, dataclasses.replace(right, constant=right.constant + (direction[1] == "E"))


_Bind = Callable[[int], "_Scalar | None"] | None


def _binder(module: Module, outer: Computation, fusion: Instruction, bind: _Bind) -> _Bind:
    """What a fusion's parameter is, by its number."""
    return lambda number: _scalar(module, outer, fusion.operands[number], bind)


def _scalar(module: Module, computation: Computation, name: str, bind: _Bind = None) -> _Scalar | None:
    """What an integer is; None where it is no constant and no element of the carry plus a constant."""
    instruction = computation.by_name[name]
    opcode = instruction.opcode
    if opcode == "constant":
        return _Scalar(int(instruction.literal)) if instruction.literal.lstrip("-").isdigit() else None
    if opcode == "parameter":
        return bind(int(instruction.literal)) if bind else None
    if opcode == "get-tuple-element":
        if computation.by_name[instruction.operands[0]].opcode == "parameter":
            return _Scalar(0, instruction.integers("index")[0])
        return None
    if opcode in _PASS_ON:
        return _scalar(module, computation, instruction.operands[0], bind)
    if opcode == "fusion":
        inside = module.computations[instruction.called[0][1]]
        return _scalar(module, inside, inside.root.name, _binder(module, computation, instruction, bind))
    if opcode == "add":
        a, b = (_scalar(module, computation, operand, bind) for operand in instruction.operands)
        if a and b and (a.element is None or b.element is None):
            return _Scalar(a.constant + b.constant, b.element if a.element is None else a.element)
    return None
