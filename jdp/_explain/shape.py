"""The shapes that XLA prints, `(f32[8,128]{1,0:T(8,128)S(1)}, s32[])`: dtype, dimensions, and where the array lies."""

from __future__ import annotations

import math
import re

Shape = tuple[str, tuple[int, ...]]  # dtype and dimensions, as XLA names them: ("f32", (8, 128))

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<= ?]*)\](\{[^}]*\})?")
_NO_BITS = ("token", "opaque")


def shapes(text: str) -> tuple[Shape, ...]:
    """Its arrays; those of nested tuples one after the other. A dimension that varies (`<=8`) counts as its most."""
    return tuple((dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims, _ in _ARRAY.findall(text))


def near(text: str) -> tuple[bool, ...]:
    """Which of its arrays lie on the chip itself: the layout names another memory space than the device's, `S(1)`."""
    return tuple("S(" in layout for *_, layout in _ARRAY.findall(text))


def nbytes(shape: Shape) -> int:
    """Bytes of an array: types of less than a byte are packed, and what a layout pads is not counted."""
    dtype, dims = shape
    return (math.prod(dims) * _bits(dtype) + 7) // 8


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)  # f8e4m3fn has 8
    if digits is None:
        return 0 if dtype in _NO_BITS else 8  # pred
    return int(digits.group())
