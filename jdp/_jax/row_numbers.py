"""Decides what becomes of rows that meet numbers made of all rows: a BatchNorm, a part of a mean, or no mean at all.

A function is no mean over the rows if a number of all rows meets rows again: `(v * f(v.mean())).mean()` is a product of
two sums. So this is refused, unless it is exactly right, or may be the model's:

* means may be added to rows, or subtracted, as long as all that follows is linear: `(v - v.mean()).mean()`;
* one number may be added to all rows if a softmax follows, or another function that takes it away again. The
  exponentials of such rows may be multiplied, and are then divided by each other: `e / e.sum(1)`;
* a BatchNorm subtracts means and divides by a deviation, for each feature. A function of such rows may be a model's. If
  one number divides all rows, or if the rows are only centred, a layer (a product with parameters) has to follow:
  otherwise they are a loss, as that of a policy gradient whose advantages are normalized;
* what stands in the call of a module is the model's, and so is a step of a gradient.

`RowValue.role` tells what the rows are after that, and `RowValue.pending` is the fault if something else follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import row_primitives as primitives
from .callers import is_made_in_module
from .jaxprs import parameter
from .row_values import CONST, Fault, Kind, Role, RowCount, RowValue, furthest

Met = tuple[Role | None, Fault | None]
"""The role of a result and its pending fault. A fault without a role remains, whatever follows."""


def meets_one_row(eqn: Any, values: Sequence[RowValue], rows: Sequence[int]) -> Fault | None:
    """Returns the fault of rows combined with one particular row, as in `relu(v - v[0])`: each device has another one.

    `rows` are the axes of the rows. Two uses of the particular row have no fault: to concatenate it with the others
    along these axes, as `jnp.roll` does, and to replace some of them by it, as under a mask.
    """
    name = eqn.primitive.name
    if name in primitives.PLACES or name == "concatenate" and parameter(eqn, "dimension") in rows:
        return None
    met = values[-1:] if name == "select_n" else values  # the last one decides; the cases are not combined
    return next((Fault("row", v.fault.at, True) for v in met if v.fault is not None and is_picked(v)), None)


def writes_one_row(eqn: Any, values: Sequence[RowValue], rows: RowCount) -> bool:
    """Returns True if a scatter writes into particular rows, or adds to them, as `x.at[0].set(0)` does.

    Then the axis of the rows is indexed, and the indices do not have one for each row.
    """
    array, places, written = (v.kind for v in values)
    if (array, places) != (Kind.ROWS, Kind.CONST) or written == Kind.ROWS or rows.axes(eqn.invars[1]):
        return False
    indexed = parameter(eqn, "dimension_numbers").scatter_dims_to_operand_dims
    return not {*rows.axes(eqn.invars[0])}.isdisjoint(indexed)


def is_picked(value: RowValue) -> bool:
    """Returns True for one row that was picked out of all."""
    at = value.fault.at if value.kind == Kind.SUMMED and value.fault is not None else ()
    return bool(at) and at[0].primitive.name in primitives.PICKS


def quotient(a: RowValue, b: RowValue, degree: int | None, at: tuple[Any, ...]) -> tuple[RowValue, RowValue]:
    """Returns both sides of a division by a sum over the rows, with a fault unless it is a normalization.

    Rows divided by a mean over the rows, as in a BatchNorm, are rows; divided by a sum, they are parts of a ratio.
    """
    meets = a.kind == Kind.ROWS and b.degree == 0
    if meets or a.lasting is not None or b.lasting is not None:
        return a, b
    before = [v.fault for v in (a, b) if v.fault is not None and v.fault.kind == "ratio"]
    lasts = a.kind == Kind.ROWS or 0 not in (b.degree, degree)
    ratio = [*before, Fault("ratio", at)][0]._replace(lasts=lasts)
    return a._replace(fault=ratio), b._replace(fault=ratio)


def of_numbers(eqn: Any, values: Sequence[RowValue]) -> Role | None:
    """Returns the role of a number that is made of numbers of all rows.

    A root is a deviation, which rows may be divided by. So is a deviation that is scaled or limited, or that an epsilon
    is added to. What is made of a gradient counts as a gradient, too, but the norm of one does not.
    """
    name = eqn.primitive.name
    made_of = values[:-1] if name == "select_n" else values  # not of what decides
    numbers = [v for v in made_of if v.kind == Kind.SUMMED]
    role = numbers[0].role if numbers else None
    if any(v.role == "gradient" for v in numbers):
        is_norm = eqn.outvars[0].aval.size == 1 and any(v.aval.size != 1 for v in eqn.invars)
        return None if is_norm else "gradient"
    if name in primitives.ROOTS:
        inverts = name == "rsqrt" or name == "pow" and getattr(eqn.invars[1], "val", 0) < 0
        return "inverse" if inverts != (role == "inverse") else "deviation"
    if name == "div" and values[0] is not numbers[0] or name == "integer_pow" and parameter(eqn, "y") < 0:
        return _INVERSE.get(role) if len(numbers) == 1 else None
    keeps = name in _KEEP_DEVIATION or name == "div" and len(numbers) == 1
    if role == "as found":
        keeps = name in _KEEP_NUMBER
    return role if keeps and all(v.role == role for v in numbers) else None


_INVERSE: dict[Role | None, Role] = {"deviation": "inverse", "inverse": "deviation"}
_KEEP_DEVIATION = primitives.LINEAR | primitives.POWERS | {"mul", "max", "min", "clamp", "select_n"}
_KEEP_NUMBER = frozenset(
    ["broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy", "name"]
    + ["stop_gradient", "sharding_constraint", "select_n"]  # JAX replaces a largest number that is not finite
)


def of_rows(values: Sequence[RowValue], linear: bool, around: Sequence[Any]) -> Met:
    """Returns the role and the pending fault of rows that an equation makes of these values.

    `linear` tells whether the result is linear in the values. `around` has the equations that the equation is in, the
    outermost first, and then the equation.
    """
    eqn, at = around[-1], (*around[::-1],)
    name = eqn.primitive.name.replace("-", "_")
    numbers = [v for v in values if v.kind == Kind.SUMMED and v.role != "gradient" and not is_picked(v)]
    are_free = all(v.pending is None for v in values)
    if not numbers and are_free or is_made_in_module(around):
        stay_normed = linear and are_free and name not in primitives.LAYERS and _are_normed(values)
        return "normed" if stay_normed else "met", None
    role, pending = _without_numbers(eqn, [CONST if v.kind == Kind.SUMMED else v for v in values], linear, at)
    if not numbers or role is None:
        return role, pending
    number, is_first, refused = numbers[0], values[0].kind == Kind.ROWS, (None, Fault("number", at, True))
    if len(numbers) > 1:
        return refused
    if linear and name in _PUTS and not (name.startswith("scatter") and values[1].kind == Kind.ROWS):
        return _with_summand(name, (role, pending), number, name == "sub" and is_first, at)
    divides = name == "div" and is_first and number.role == "deviation" or name == "mul" and number.role == "inverse"
    if divides and role not in ("scaled", "spread"):
        return ("by number", Fault("number", at, True)) if number.is_number else ("normed", None)
    is_scale = name == "mul" and role in ("normed", "by number") and not number.is_number  # as in a BatchNorm
    return (role, pending) if is_scale else refused


_PUTS = primitives.ADDS | {"concatenate", "stack", "dynamic_update_slice", "scatter", "scatter_add", "scatter_sub"}


def _are_normed(values: Sequence[RowValue]) -> bool:
    return all(v.role == "normed" for v in values if v.kind == Kind.ROWS)


def _with_summand(name: str, met: Met, number: RowValue, is_subtracted: bool, at: tuple[Any, ...]) -> Met:
    """Returns what `of_rows` does, if a number is added to rows or put next to them; `met` is what they were before.

    A mean centres rows. So does the mean of the rows that a mask keeps, but then the mean of these rows is a ratio.
    """
    (role, pending), fault = met, number.fault
    shifts = number.is_number and name in primitives.ADDS
    if role in ("normed", "by number") and not number.is_number or role == "spread" and fault is None:
        return met  # the shift of a BatchNorm; a variance plus a mean
    if role in ("scaled", "spread") or not (fault is None or fault.kind == "ratio" or shifts):
        return None, (fault or Fault("number", at))._replace(lasts=True)
    is_found = shifts and number.role == "as found"
    if role == "shifted" and is_found and not is_subtracted and _are_of_one(fault, pending):
        return "met", None  # it was subtracted before, as the largest is in a logsumexp
    if pending is None or not pending.lasts:
        pending = Fault("number", at) if fault is None else fault._replace(lasts=True)
    if shifts and role != "centred":
        is_noted = fault is not None and is_found and is_subtracted and role != "shifted"
        return "shifted", pending._replace(at=fault.at if fault is not None and is_noted else at)
    return "centred", pending._replace(at=at)


def _are_of_one(a: Fault | None, b: Fault | None) -> bool:
    """Returns True for two faults of the same equation, in the same call."""
    return a is not None and b is not None and [*map(id, a.at)] == [*map(id, b.at)]


def _without_numbers(eqn: Any, values: Sequence[RowValue], linear: bool, at: tuple[Any, ...]) -> Met:
    """Returns what `of_rows` does, if rows that have met numbers before now meet only constants and rows."""
    name = eqn.primitive.name.replace("-", "_")
    met = furthest(values)
    if met is None or met.pending is None:
        return "normed" if _are_normed(values) else "met", None
    role, pending = met.role, met.pending
    waits, others = [v for v in values if v.pending is not None], [v for v in values if v.pending is None]
    if name == "select_n":
        which, linear = values[-1], values[-1].pending is None
        others = [v for v in others[:-1] if linear and not which.guards and not _is_left_out(v, role)]
    is_one = all(v.role == role and _are_of_one(v.pending, pending) for v in waits)
    if is_one and not others and role in _TAKES_AWAY:
        if name == _TAKES_AWAY[role] or name in _FINDS:
            return "met", None
        if name in _KEEP_ALL:
            return role, pending
    if role == "scaled":
        keeps = _stay_scaled(name, values, others, linear, is_one)
        return ("shifted", pending) if name == "log" else (role if keeps else None, pending._replace(lasts=True))
    if role == "layered" or name in primitives.LAYERS and role != "spread" and len(others) == 1:
        linear = linear and not (name == "div" and values[1].pending is not None)
        return _layered(name, others, linear, role == "layered" and pending.lasts, pending)
    shifted = _shifted(eqn, name, values, pending, at) if role == "shifted" and len(waits) == 1 else None
    return shifted or _centred(name, values, others, linear, role, pending)


def _layered(name: str, others: Sequence[RowValue], linear: bool, lasts: bool, pending: Fault) -> Met:
    """Returns what `of_rows` does, if rows are in a layer or after it: a nonlinear function of them is the model's.

    So is `h + f(h)`, and `h * f(h)`. If rows that met no number multiply them, a nonlinear function has to follow: the
    advantages of a policy gradient are normalized, and may be discounted by a matrix before they weight the rows.
    """
    rows = [v for v in others if v.kind == Kind.ROWS and not v.drawn]
    multiplies = name in primitives.PRODUCTS
    if not linear or multiplies and not others or any(v.role is not None for v in rows):
        return "met", None
    return "layered", pending._replace(lasts=lasts or multiplies and bool(rows))


_TAKES_AWAY: dict[Role | None, str] = {"shifted": "sub", "scaled": "div"}
_FINDS = primitives.COMPARES | {"argmax", "argmin", "is_finite"}
_KEEP_ALL = frozenset(["max", "min", "reduce_max", "reduce_min", "concatenate", "stack", "select_n"])
_SMALL, _LARGE = 1e-4, 1e4  # an epsilon in a divisor; what a mask subtracts to leave something out of a softmax


def _is_left_out(case: RowValue, role: Role | None) -> bool:
    """Returns True for a constant that a mask writes where a softmax shall leave something out."""
    return role == "scaled" and case.number == 0 or role == "shifted" and abs(case.number or 0) > _LARGE


def _stay_scaled(name: str, values: Sequence[RowValue], others: Sequence[RowValue], linear: bool, is_one: bool) -> bool:
    """Returns True if the number that multiplies the exponentials of shifted rows also multiplies the result."""
    if name in _PUTS:
        return linear and is_one and all(v.number is not None and abs(v.number) <= _SMALL for v in others)
    if name in primitives.PRODUCTS:
        return linear and bool(others) and not (name == "div" and values[1].pending is not None)
    return name in ("abs", "sign") or linear and is_one


def _shifted(eqn: Any, name: str, values: Sequence[RowValue], pending: Fault, at: tuple[Any, ...]) -> Met | None:
    """Returns what `of_rows` does, if one number was added to all rows; None if it is one number no longer."""
    is_first = values[0].pending is not None
    if name == "exp":
        return "scaled", pending
    is_masked = name == "max" and any(abs(v.number or 0) > _LARGE for v in values)
    if is_masked or name in _KEEP_SHIFT and is_first or name in primitives.ADDS and (is_first or name != "sub"):
        return "shifted", pending
    is_whole = name == "mul" or name == "div" and is_first
    if name in ("neg", "sub") or is_whole and any(v.aval.size == 1 for v in eqn.invars):
        return "shifted", pending._replace(at=at)  # another number
    return None


_NO_MOVES = primitives.ADDS | primitives.SUMS | {"concatenate", "stack", "pad", "neg"}
_KEEP_SHIFT = (primitives.LINEAR | primitives.PICKS) - _NO_MOVES


def _centred(
    name: str, values: Sequence[RowValue], others: Sequence[RowValue], linear: bool, role: Role | None, pending: Fault
) -> Met:
    """Returns what `of_rows` does, if means were added to rows. The mean of the squares of these is a variance."""
    by_rows = name in primitives.PRODUCTS and not any(v.kind <= Kind.SHARED or v.drawn for v in others)
    divides = name == "div" and values[1].pending is not None
    if linear and not by_rows and not divides:
        return "centred" if role == "shifted" else role, pending
    if divides or role == "by number" or role == "spread" and not linear:
        return None, Fault("number", pending.at, True)
    return "spread", pending._replace(kind="number")
