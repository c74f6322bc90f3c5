"""What an optimized program computes and moves: floating-point operations and bytes, by instruction and in all."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from .hlo import CONTROL, FREE, KINDS, Computation, Instruction, Module, Shape, nbytes, target

_SLICES = ("dynamic-slice", "slice", "gather")
_NOTHING_READ = frozenset([*FREE, *KINDS])


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations and bytes; `products` are the operations of matrix products and convolutions, by operand dtype."""

    flops: float = 0.0
    bytes: float = 0.0
    products: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        products = dict(self.products)
        for dtype, flops in other.products.items():
            products[dtype] = products.get(dtype, 0.0) + flops
        return Cost(self.flops + other.flops, self.bytes + other.bytes, products)

    def times(self, n: int) -> Cost:
        return Cost(self.flops * n, self.bytes * n, {dtype: flops * n for dtype, flops in self.products.items()})


def totals(module: Module) -> Cost:
    """The work of one run of the program on one device, without its collectives.

    A loop's is counted as often as it runs (once, where that is not known), and of branches the one that computes most.
    """
    return _run(module, module.entry)


def cost(module: Module, computation: Computation, instruction: Instruction) -> Cost:
    """The work of an instruction, with all that it calls."""
    inside = [module.computations[name] for _, name in instruction.called] if instruction.opcode in CONTROL else []
    if instruction.opcode == "while":
        return _sum(_run(module, called) for called in inside).times(trips(module, computation, instruction) or 1)
    if instruction.opcode == "conditional":
        return max((_run(module, called) for called in inside), key=lambda c: (c.flops, c.bytes), default=Cost())
    if instruction.opcode in ("call", "async-start"):
        return _sum(_run(module, called) for called in inside)
    flops, products = _computed(module, computation, instruction)
    return Cost(flops, _moved(module, computation, instruction), products)


def _run(module: Module, computation: Computation) -> Cost:
    return _sum(cost(module, computation, instruction) for instruction in computation)


def _sum(costs: Iterable[Cost]) -> Cost:
    total, size, products = 0.0, 0.0, {}
    for one in costs:
        total, size = total + one.flops, size + one.bytes
        for dtype, flops in one.products.items():
            products[dtype] = products.get(dtype, 0.0) + flops
    return Cost(total, size, products)


def _computed(module: Module, computation: Computation, instruction: Instruction) -> tuple[float, dict[str, float]]:
    """Operations of an instruction, or of all in a fusion; and those of products."""
    if instruction.opcode == "fusion":
        total, products = 0.0, {}
        for _, name in instruction.called:
            for one in module.computations[name]:
                flops, parts = _computed(module, module.computations[name], one)
                total += flops
                for dtype, part in parts.items():
                    products[dtype] = products.get(dtype, 0.0) + part
        return total, products
    if (product := product_flops(computation, instruction)) is not None:
        dtype, flops = product
        return float(flops), {dtype: float(flops)}
    return float(arithmetic_flops(computation, instruction)), {}


def _moved(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes that it reads from the device's memory and writes there."""
    opcode = instruction.opcode
    if opcode in FREE or opcode in KINDS or opcode.endswith(("-done", "-update")):
        return 0.0
    if opcode.endswith("-start"):  # TPU brings an array near before it is used; the collectives are counted elsewhere
        return float(_far(instruction)) if opcode in ("copy-start", "slice-start") else 0.0
    if opcode == "fusion":
        inside = module.computations[instruction.called[0][1]]
        read = sum(_read(inside, n, computation.by_name[name]) for n, name in enumerate(instruction.operands))
        return float(read + _written(inside, instruction))
    if opcode in _SLICES:
        return 2.0 * _far(instruction)
    if opcode == "dynamic-update-slice":
        return 2.0 * _far(computation.by_name[instruction.operands[1]])
    written = _far(instruction)
    if opcode == "custom-call" and target(instruction).startswith(("__cublas", "__cudnn")):
        written = nbytes(instruction.shapes[0])  # what follows is room to work in
    return float(written + sum(_far(computation.by_name[name]) for name in instruction.operands))


def _read(inside: Computation, number: int, operand: Instruction) -> int:
    """Bytes that a fusion reads of an operand: of one that it only cuts, what it cuts out."""
    parameter = inside.parameters.get(number)
    far = _far(operand)
    users = inside.users.get(parameter.name, []) if parameter is not None and far else []
    read = 0
    for user in users:
        first = bool(user.operands) and user.operands[0] == parameter.name  # type: ignore[union-attr]
        if user.opcode in _SLICES and first:
            read += sum(map(nbytes, user.shapes))
        elif user.opcode not in _NOTHING_READ and not (user.opcode == "dynamic-update-slice" and first):
            return far
        elif user.opcode == "bitcast":
            return far
    return min(read, far)


def _written(inside: Computation, fusion: Instruction) -> int:
    """Bytes that a fusion writes: where it updates a part of an array, that part."""
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
    """Bytes of a result that lie in the device's memory, not on the chip itself."""
    return sum(nbytes(shape) for shape, near in zip(instruction.shapes, instruction.near, strict=True) if not near)


_ARITHMETIC = frozenset(
    "abs add and atan2 cbrt ceil clamp compare cosine divide erf exponential exponential-minus-one floor is-finite "
    "log log-plus-one logistic maximum minimum multiply negate not or popcnt power remainder round-nearest-afz "
    "round-nearest-even rsqrt select sign sine sqrt subtract tan tanh xor".split()
)
_WINDOW = re.compile(r"(\w+)=(\S+)")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["?([\d",]*)"?\]')
_STATED = re.compile(r'"flops":"?(\d+)')


def product_flops(computation: Computation, instruction: Instruction) -> tuple[str, int] | None:
    """(dtype of the operands, operations) of a matrix product or a convolution; None for anything else."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return None
    shapes = [computation.by_name[name].shapes[0] for name in instruction.operands if computation.by_name[name].shapes]
    if not shapes or not instruction.shapes:
        return None
    left, result = shapes[0], instruction.shapes[0]
    if instruction.opcode == "dot":
        return left[0], _dot(left, result, instruction.integers("lhs_contracting_dims"))
    if instruction.opcode == "convolution":
        return left[0], _convolution(instruction, left, shapes[1], result)
    called = target(instruction)
    if called.startswith("__cublas$"):
        contracted = _CONTRACTED.search(instruction.attributes)
        return left[0], _dot(
            left, result, tuple(map(int, re.findall(r"\d+", contracted.group(1) if contracted else "")))
        )
    if called.startswith("__cudnn$conv") and len(shapes) > 1:
        return left[0], _convolution(instruction, *_roles(called, left, shapes[1], result))
    stated = _STATED.search(instruction.attributes)  # what the author of a kernel says of it
    return (left[0], int(stated.group(1))) if stated else None


def arithmetic_flops(computation: Computation, instruction: Instruction) -> int:
    """One for each element of what is computed element by element, and for each element that is added up."""
    if instruction.opcode in _ARITHMETIC:
        dtype, dims = instruction.shapes[0]
        return math.prod(dims)
    if instruction.opcode == "reduce":
        taken, given = (math.prod(i.shapes[0][1]) for i in (computation.by_name[instruction.operands[0]], instruction))
        return max(0, taken - given)
    if instruction.opcode == "reduce-window":
        size = dict(_WINDOW.findall((instruction.attribute("window") or "").strip("{}"))).get("size", "1")
        return math.prod(instruction.shapes[0][1]) * (math.prod(map(int, size.split("x"))) - 1)
    return 0


def _dot(left: Shape, result: Shape, contracted: Sequence[int]) -> int:
    return 2 * math.prod(result[1]) * math.prod(left[1][axis] for axis in contracted)


def _roles(called: str, left: Shape, right: Shape, result: Shape) -> tuple[Shape, Shape, Shape]:
    """Input, kernel and output of the convolution whose gradient cuDNN computes."""
    if "BackwardInput" in called:
        return result, right, left
    if "BackwardFilter" in called:
        return left, result, right
    return left, right, result


def _convolution(instruction: Instruction, image: Shape, kernel: Shape, output: Shape) -> int:
    """Only products that do not fall into the padding: TPU writes products of matrices as such convolutions."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if labels is None:
        return 0
    inputs, kernels, outputs = (
        dict(zip(text, dims, strict=True))
        for text, (_, dims) in zip(labels.groups(), (image, kernel, output), strict=True)
    )
    window = dict(_WINDOW.findall((instruction.attribute("window") or "").strip("{}")))
    spatial = sorted(key for key in outputs if key.isdigit())

    def numbers(name: str, default: str) -> list[list[int]]:
        text = window.get(name)
        return [[int(n) for n in part.split("_")] for part in (text.split("x") if text else [default] * len(spatial))]

    stride, pad, spread, gaps = (
        numbers(*named) for named in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))
    )
    inside = [
        _inside(inputs[key], kernels[key], outputs[key], stride[n][0], pad[n][0], spread[n][0], gaps[n][0])
        for n, key in enumerate(spatial)
    ]
    groups = int(instruction.attribute("batch_group_count") or 1)
    return 2 * inputs["b"] // groups * kernels["i"] * outputs["f"] * math.prod(inside)


@functools.lru_cache(maxsize=4096)
def _inside(image: int, kernel: int, output: int, stride: int, pad: int, spread: int, gap: int) -> int:
    """How many pairs of a place in the kernel and one in the output meet an element of the image, along one axis."""
    at = np.arange(output)[:, None] * stride - pad + np.arange(kernel) * gap
    return int(((at % spread == 0) & (at >= 0) & (at < image * spread)).sum())


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
