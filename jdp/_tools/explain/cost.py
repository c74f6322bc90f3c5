"""What an optimized program computes and moves: floating-point operations and bytes, by instruction and in all."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from .hlo import CONTROL, FREE, KINDS, PASS_ON, Computation, Instruction, Module, Shape, nbytes, target

_SLICES = ("dynamic-slice", "slice", "gather")
_NOTHING_READ = frozenset([*FREE, *KINDS]) - {"bitcast"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations and bytes; `products` are the operations of matrix products and convolutions, by operand dtype."""

    flops: float = 0.0
    bytes: float = 0.0
    products: Counter[str] = dataclasses.field(default_factory=Counter)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.products + other.products)

    def times(self, n: int) -> Cost:
        return Cost(self.flops * n, self.bytes * n, Counter({dtype: x * n for dtype, x in self.products.items()}))


def totals(module: Module, computation: Computation | None = None) -> Cost:
    """Returns the work of one run of the program, or of one computation in it, on one device, without collectives.

    A loop counts as often as it runs (once if that is not known). Only the branch that computes most counts.
    """
    computation = computation or module.entry
    return sum((cost(module, computation, instruction) for instruction in computation), Cost())


def cost(module: Module, computation: Computation, instruction: Instruction) -> Cost:
    """Returns the work of an instruction, with all that it calls."""
    if instruction.opcode not in CONTROL:
        computed = _computed(module, computation, instruction)
        return dataclasses.replace(computed, bytes=_moved(module, computation, instruction))
    inside = [totals(module, module.computations[name]) for _, name in instruction.called]
    if instruction.opcode == "conditional":
        return max(inside, key=lambda c: (c.flops, c.bytes), default=Cost())
    once = sum(inside, Cost())
    return once.times(trips(module, computation, instruction) or 1) if instruction.opcode == "while" else once


def _computed(module: Module, computation: Computation, instruction: Instruction) -> Cost:
    """Counts the operations of an instruction, or of all instructions in a fusion."""
    if instruction.opcode == "fusion":
        inside = [module.computations[name] for _, name in instruction.called]
        return sum((_computed(module, called, one) for called in inside for one in called), Cost())
    if (product := _product(computation, instruction)) is not None:
        dtype, flops = product
        return Cost(float(flops), products=Counter({dtype: flops}))
    return Cost(float(_arithmetic(computation, instruction)))


def _moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that an instruction reads from the device's memory and writes there."""
    opcode = instruction.opcode
    if opcode in FREE or opcode in KINDS or opcode.endswith(("-done", "-update")):
        return 0
    if opcode.endswith("-start"):  # TPU copies an array to the chip before its use; collectives are counted elsewhere
        return _far(instruction) if opcode in ("copy-start", "slice-start") else 0
    given, written = [_far(computation.by_name[name]) for name in instruction.operands], _far(instruction)
    if opcode == "fusion":
        inside = module.computations[instruction.called[0][1]]
        read = sum(_read(inside, i, given[int(i.literal)]) for i in inside if i.opcode == "parameter")
        return read + _written(inside, instruction)
    if opcode in _SLICES:
        return 2 * written
    if opcode == "dynamic-update-slice":
        return 2 * given[1]
    if opcode == "custom-call" and target(instruction).startswith(("__cublas", "__cudnn")):
        written = nbytes(instruction.shapes[0])  # the other results are work space
    return written + sum(given)


def _read(inside: Computation, parameter: Instruction, size: int) -> int:
    """Returns the bytes that a fusion reads of an operand; if it only slices the operand, the bytes of the slices."""
    read = 0
    for user in inside.users.get(parameter.name, []):
        first = user.operands[0] == parameter.name
        if user.opcode in _SLICES and first:
            read += sum(map(nbytes, user.shapes))
        elif user.opcode not in _NOTHING_READ and not (user.opcode == "dynamic-update-slice" and first):
            return size
    return min(read, size)


def _written(inside: Computation, fusion: Instruction) -> int:
    """Returns the bytes that a fusion writes; if it updates a part of an array, the bytes of that part."""
    root = inside.root
    results = [inside.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(fusion.shapes):
        return _far(fusion)
    written = 0
    for result, shape, near in zip(results, fusion.shapes, fusion.near, strict=True):
        if result.opcode == "dynamic-update-slice":
            written += sum(map(nbytes, inside.by_name[result.operands[1]].shapes))
        elif result.opcode not in ("parameter", *KINDS) and not near:
            written += nbytes(shape)
    return written


def _far(instruction: Instruction) -> int:
    """Returns the bytes of a result that are in the device's memory, not on the chip itself."""
    return sum(nbytes(shape) for shape, near in zip(instruction.shapes, instruction.near, strict=True) if not near)


_ARITHMETIC = frozenset(
    "abs add and atan2 cbrt ceil clamp compare cosine divide erf exponential exponential-minus-one floor is-finite "
    "log log-plus-one logistic maximum minimum multiply negate not or popcnt power remainder round-nearest-afz "
    "round-nearest-even rsqrt select sign sine sqrt subtract tan tanh xor".split()
)
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ensions":\[|s=\{)([\d",]*)')  # cuBLAS's form, and a dot's
_STATED = re.compile(r'"flops":"?(\d+)')


def _product(computation: Computation, instruction: Instruction) -> tuple[str, int] | None:
    """Returns (dtype of the operands, operations) of a matrix product or convolution; None for anything else."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return None
    taken = [computation.by_name[name].shapes[0] for name in instruction.operands if computation.by_name[name].shapes]
    if not taken or not instruction.shapes:
        return None
    called = target(instruction) or instruction.opcode
    left, right, result = taken[0], taken[-1] if len(taken) < 2 else taken[1], instruction.shapes[0]
    if called == "dot" or called.startswith("__cublas$"):
        contracted = _CONTRACTED.search(instruction.attributes)
        axes = map(int, re.findall(r"\d+", contracted.group(1) if contracted else ""))
        flops = 2 * math.prod(result[1]) * math.prod(left[1][axis] for axis in axes)
    elif called == "convolution" or called.startswith("__cudnn$conv"):
        image, kernel, output = left, right, result
        if "BackwardInput" in called:
            image, output = result, left
        elif "BackwardFilter" in called:
            kernel, output = result, right
        flops = _convolution(instruction, image, kernel, output)
    elif stated := _STATED.search(instruction.attributes):  # stated by the author of a kernel
        flops = int(stated.group(1))
    else:
        return None
    return left[0], flops


def _arithmetic(computation: Computation, instruction: Instruction) -> int:
    """Counts one operation for each element of an elementwise result, and for each element that a sum adds."""
    if instruction.opcode in _ARITHMETIC:
        return math.prod(instruction.shapes[0][1])
    if instruction.opcode == "reduce":
        taken, given = (math.prod(i.shapes[0][1]) for i in (computation.by_name[instruction.operands[0]], instruction))
        return max(0, taken - given)
    if instruction.opcode == "reduce-window":
        size = _window(instruction).get("size", "1")
        return math.prod(instruction.shapes[0][1]) * (math.prod(map(int, size.split("x"))) - 1)
    return 0


def _window(instruction: Instruction) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", (instruction.attribute("window") or "").strip("{}")))


def _convolution(instruction: Instruction, image: Shape, kernel: Shape, output: Shape) -> int:
    """Counts only products outside of the padding, because TPU writes matrix products as padded convolutions."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if labels is None:
        return 0
    inputs, kernels, outputs = (
        dict(zip(text, dims, strict=True))
        for text, (_, dims) in zip(labels.groups(), (image, kernel, output), strict=True)
    )
    window, inside = _window(instruction), []
    for n, key in enumerate(sorted(key for key in outputs if key.isdigit())):
        # a window's padding is "before_after"; only the part before counts
        stride, pad, spread, gap = (
            int(window[name].split("x")[n].split("_")[0]) if name in window else default
            for name, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        inside.append(_inside(inputs[key], kernels[key], outputs[key], stride, pad, spread, gap))
    groups = int(instruction.attribute("batch_group_count") or 1)
    return 2 * inputs["b"] // groups * kernels["i"] * outputs["f"] * math.prod(inside)


@functools.lru_cache(maxsize=4096)
def _inside(image: int, kernel: int, output: int, stride: int, pad: int, spread: int, gap: int) -> int:
    """Counts the pairs of a kernel and an output position that meet an element of the image, along one axis."""
    at = np.arange(output)[:, None] * stride - pad + np.arange(kernel) * gap
    return int(((at % spread == 0) & (at >= 0) & (at < image * spread)).sum())


class _Scalar(NamedTuple):
    """An integer: a constant, or an element of the loop's carry at the start of the iteration, plus a constant."""

    constant: int
    element: int | None = None


def trips(module: Module, outer: Computation, loop: Instruction) -> int | None:
    """Returns the number of iterations, from XLA's annotation or a counter with constant ends; else None."""
    if loop.known_trips is not None:
        return loop.known_trips
    called = {role: module.computations[name] for role, name in loop.called}
    condition, body, outside = (module.dissolved(c) for c in (called["condition"], called["body"], outer))
    compare, carry = condition.root, outside.by_name[outside.by_name[loop.name].operands[0]]
    if compare.attribute("direction") != "LT" or carry.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    counter, bound = (_scalar(condition, operand) for operand in compare.operands)
    if counter is None or bound is None:
        return None

    def first(x: _Scalar) -> int | None:
        """Returns the value in the first iteration."""
        if x.element is None:
            return x.constant
        begin = _scalar(outside, carry.operands[x.element])
        return None if begin is None or begin.element is not None else begin.constant + x.constant

    def added(x: _Scalar) -> int | None:
        """Returns what is added from one iteration to the next."""
        if x.element is None:
            return 0
        after = _scalar(body, body.root.operands[x.element])
        return after.constant if after is not None and after.element == x.element else None

    begin, end, by = first(counter), first(bound), added(counter)
    if begin is None or end is None or by is None or by <= 0 or added(bound) != 0:
        return None
    return max(0, -(-(end - begin) // by))


def _scalar(flat: Computation, name: str) -> _Scalar | None:
    """Resolves an integer; None if it is neither a constant nor an element of the carry plus a constant."""
    one = flat.by_name[name]
    if one.opcode == "constant" and one.literal.lstrip("-").isdigit():
        return _Scalar(int(one.literal))
    if one.opcode == "get-tuple-element" and flat.by_name[one.operands[0]].opcode == "parameter":
        return _Scalar(0, one.integers("index")[0])
    if one.opcode in PASS_ON:
        return _scalar(flat, one.operands[0])
    if one.opcode == "add":
        a, b = (_scalar(flat, operand) for operand in one.operands)
        if a and b and (a.element is None or b.element is None):
            return _Scalar(a.constant + b.constant, b.element if a.element is None else a.element)
    return None
