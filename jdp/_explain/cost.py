"""What an optimized program computes and moves: floating-point operations and bytes, by instruction and in all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from .flops import arithmetic_flops, product_flops
from .hlo import Computation, Instruction, Module
from .shape import nbytes
from .trips import trips
from .work import CONTROL, FREE, KINDS, target

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
