"""Floating-point operations of an instruction, as XLA counts them: a multiplication and an addition are two."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from .hlo import Computation, Instruction
from .shape import Shape
from .work import target

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
