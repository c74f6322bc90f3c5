"""The degree of a value: with which power of the number of rows, `b`, it grows.

The degree of `b` itself is 1, and so is that of a sum over the rows; their quotient has degree 0. It is None for
another function of `b`, as `b + 1`, and for positions among the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import row_primitives as primitives
from .jaxprs import parameter
from .row_values import CONST, UNKNOWN, Fault, Kind, RowCount, RowValue, is_divided


def sum_degree(values: Sequence[RowValue], small: float = 1e-4) -> int | None:
    """Returns the degree of a sum; a small constant, added to a divisor so that it is not 0, does not count."""
    degrees = {v.degree for v in values if v.number is None or v.number > small}
    return (degrees or {0}).pop() if len(degrees) < 2 else None


def product_degree(*degrees: int | None) -> int | None:
    known = [d for d in degrees if d is not None]
    return sum(known) if len(known) == len(degrees) else None


def degree_of_nonlinear(rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], out: Any) -> int | None:
    """Returns the degree of a nonlinear equation's result; without a rule, 0 if no operand grows with `b`."""
    values = [values[0], values[2]] if name in primitives.SCATTERS else values  # without the indices
    degrees = {v.degree for v in values}
    if name in primitives.BOUNDED:
        if name not in primitives.COMPARES or not rows.axes(out):
            return 0
        # If one side grows with b and the other does not, as in `arange(b) < 10`, the share of True depends on b.
        # A constant does not count if the other side has rows (an expert's rows, and its capacity); a 0 counts
        # only if the other side has positions.
        of_rows = any(v.kind == Kind.ROWS for v in values)
        of_places = any(v.kind == Kind.CONST and v.degree is None for v in values)
        sides = [v for v in values if (v.number != 0 or of_places) and not (of_rows and v.kind == Kind.CONST)]
        return 0 if len({v.degree for v in sides}) < 2 else None
    if name in primitives.KEEP_DEGREE:
        return sum_degree(values, 1)
    if name in primitives.POWERS and None not in degrees:
        return values[0].degree * eqn.params.get("y", 2)
    if name in ("sqrt", "rsqrt") and not (values[0].degree or 0) % 2 and None not in degrees:
        return (values[0].degree or 0) // (-2 if name == "rsqrt" else 2)
    return 0 if degrees <= {0} else None


def number_of_rows(rows: RowCount, eqn: Any, name: str, out: Any, at: tuple[Any, ...]) -> RowValue:
    """Returns the number of rows, which is a constant with the degree of a size, or positions among the rows."""
    if name == "dim_as_value":
        size = parameter(eqn, "dim")
        if is_divided(size):
            return UNKNOWN
        if rows.power(size) is None and rows.power(size + 1) == 1:  # the divisor of an unbiased variance
            return RowValue(Kind.CONST, 1, fault=Fault("sum", at), at=at)
        return RowValue(Kind.CONST, rows.power(size), at=at)
    counts_rows = parameter(eqn, "dimension") in rows.axes(out)
    return RowValue(Kind.CONST, None, at=at) if counts_rows else CONST
