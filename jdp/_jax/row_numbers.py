"""Tells what comes of rows that meet a number made of all rows: a normalization, or what is no mean.

A BatchNorm subtracts means from rows and divides by roots of variances, for each feature, and that is no offence. All
else that is linear after it is one: in `(v * f(v.mean())).mean()` the number of all rows stands before a sum over the
rows, so that it is a product of two sums.

What is not linear after it depends on the number. With numbers for each feature it is a layer of a model, and is
accepted. With one number of all rows it is a loss: of a relativistic GAN, `softplus(v - u.mean())`, or of a policy
gradient, whose advantages one number has normed, and other rows multiply. It is a model again if a layer is behind it
(a product with parameters), or if a module does it in its own call, which `Reader.read` asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import row_primitives as primitives
from .jaxprs import parameter
from .row_values import Fault, Kind, RowCount, RowValue


def added_to_rows(value: RowValue) -> RowValue:
    """Returns what is known of a summand of rows: one number that is no mean, as a root of one, is none among them.

    A BatchNorm adds numbers of its own for each feature.
    """
    if value.kind != Kind.SUMMED or not value.is_number or value.fault is None:
        return value
    return value._replace(if_linear=value.fault._replace(lasts=True))


def is_largest(value: RowValue) -> bool:
    """Returns True for the largest or the least of all rows."""
    at = value.fault.at if value.fault is not None else ()
    return bool(at) and at[0].primitive.name in ("reduce_max", "reduce_min")


def is_average(value: RowValue) -> bool:
    """Returns True for a mean of all rows, or a sum: one number, or one for each feature.

    Rows with it as a summand have a mean; as soon as other rows multiply them, there are two sums in a product.
    """
    return value.kind == Kind.SUMMED and value.fault is None


def is_threshold(value: RowValue) -> bool:
    """Returns True for one number of all rows that rows may be compared with; that with the largest finds its place."""
    return value.kind == Kind.SUMMED and value.is_number and not is_largest(value)


def meets_one_row(eqn: Any, values: Sequence[RowValue], rows: Sequence[int]) -> Fault | None:
    """Returns the fault of rows that meet a certain row, as in `relu(v - v[0])`: each device has a different one.

    `rows` are the axes of the rows. The certain row may be joined to the others along these axes, as by `jnp.roll`, and
    it may take the place of some, as under a mask.
    """
    name = eqn.primitive.name
    if name in primitives.PLACES or name == "concatenate" and parameter(eqn, "dimension") in rows:
        return None
    met = values[-1:] if name == "select_n" else values  # what chooses comes last, and what is chosen does not meet
    return next((Fault("row", v.fault.at, True) for v in met if v.fault is not None and is_picked(v)), None)


def writes_one_row(eqn: Any, values: Sequence[RowValue], rows: RowCount) -> bool:
    """Returns True if a scatter writes a constant into certain rows, or adds it to them, as `x.at[0].set(0)` does.

    The axis of the rows is indexed then, and not by an index for each row.
    """
    if [v.kind for v in values] != [Kind.ROWS, Kind.CONST, Kind.CONST] or rows.axes(eqn.invars[1]):
        return False
    indexed = parameter(eqn, "dimension_numbers").scatter_dims_to_operand_dims
    return not {*rows.axes(eqn.invars[0])}.isdisjoint(indexed)


def is_picked(value: RowValue) -> bool:
    """Returns True for one certain row."""
    at = value.fault.at if value.kind == Kind.SUMMED and value.fault is not None else ()
    return bool(at) and at[0].primitive.name in primitives.PICKS


def in_place_of_rows(cases: Sequence[RowValue], made: RowValue, at: tuple[Any, ...]) -> RowValue:
    """Returns what is known of a choice by rows: in `where(m, v, v.mean())` the mask says how often the mean counts.

    One certain row among the cases is no fault, because it may only fill places that a mask leaves out.
    """
    met = next((v for v in cases if v.kind == Kind.SUMMED and not is_picked(v)), None)
    if met is None or made.kind != Kind.ROWS:
        return made
    return made._replace(if_linear=made.if_linear or met.fault or Fault("nonlinear", at))


def still_linear(values: Sequence[RowValue]) -> tuple[Fault | None, Fault | None]:
    """Returns the faults `(if_linear, if_multiplied)` of one of several values that are added, or chosen from.

    They are gone where another of them met a number of all rows, too, and is not linear in it: `x + f(x)` is a layer of
    a model, as a softmax is.
    """
    if any(v.kind == Kind.ROWS and v.met_all and not (v.if_linear or v.if_multiplied) for v in values):
        return None, None
    if_linear = next((v.if_linear for v in values if v.if_linear is not None), None)
    return if_linear, next((v.if_multiplied for v in values if v.if_multiplied is not None), None)


def _behind_a_layer(value: RowValue) -> RowValue:
    """Returns what is known of rows when a layer has mixed their features: what is not linear after it is the model."""
    faults = {name: getattr(value, name) for name in ("if_linear", "if_multiplied")}
    return value._replace(**{name: fault and fault._replace(lasts=False) for name, fault in faults.items()})


def without_a_layer(eqn: Any, values: Sequence[RowValue], linear: bool, at: tuple[Any, ...]) -> Fault | None:
    """Returns the fault of rows that met one number of all rows, and then went through a function that is not linear.

    Without a layer behind it, that is part of a loss: `softplus(v - u.mean())`, `(v - normed(returns)) ** 2`. A square
    of rows that are only centred is taken for that of a variance.
    """
    name = eqn.primitive.name
    if name in primitives.LAYERS:
        return None
    kept = next((v.if_no_layer for v in values if v.if_no_layer is not None), None)
    if kept is not None or linear or name not in primitives.ELEMENTWISE or name in primitives.BOUNDED:
        return kept
    if {v.kind for v in values} == {Kind.ROWS, Kind.SUMMED} and any(v.is_number and is_average(v) for v in values):
        return Fault("number", at)
    faults = [v.if_multiplied if v.scaled or name not in primitives.POWERS else None for v in values]
    return next((fault._replace(lasts=False) for fault in faults if fault is not None and fault.lasts), None)


def product_with_rows(name: str, a: RowValue, b: RowValue, at: tuple[Any, ...]) -> Fault | None:
    """Returns the fault of a product or a quotient with rows, if all that follows is linear; None if there is none."""
    is_div, fault = name == "div", Fault("nonlinear", at)
    if (a.kind, b.kind) == (Kind.ROWS, Kind.ROWS):
        is_itself = at[0].invars[0] is at[0].invars[1]
        return _met_by(a, b, is_itself) or (None if is_div else _met_by(b, a, is_itself))
    if {a.kind, b.kind} != {Kind.ROWS, Kind.SUMMED}:
        return None
    rows, number = (a, b) if a.kind == Kind.ROWS else (b, a)
    if number.is_number and (is_div and rows is a or number.inverse):  # one number norms all rows
        # Weights of a masked BatchNorm are divided by their mean, and not centred before.
        return Fault("number", at, not is_average(number) or rows.if_multiplied is not None)
    if is_div and rows is a:  # by a root of a variance it is a normalization
        return None
    if name == "dot_general" and rows.met_all:
        return None  # rows are centred before they are whitened
    return None if number.inverse or rows.scaled else rows.if_linear or fault


def in_product(name: str, a: RowValue, b: RowValue, at: tuple[Any, ...]) -> tuple[RowValue, RowValue]:
    """Returns both sides of a product or a quotient, with the faults that wait in them from then on."""
    if name in primitives.LAYERS:
        a, b = _behind_a_layer(a), _behind_a_layer(b)
    if_linear, kinds = product_with_rows(name, a, b, at), (a.kind, b.kind)
    if if_linear is not None and if_linear.lasts and kinds == (Kind.ROWS, Kind.ROWS):
        a = a._replace(fault=a.lasting or b.lasting or if_linear)
    if Kind.CONST in kinds and not (name == "div" and b.kind == Kind.ROWS):
        return a, b
    if if_linear is None or not if_linear.lasts or Kind.SUMMED not in kinds:
        return a._replace(if_linear=if_linear, if_multiplied=None), b._replace(if_linear=if_linear, if_multiplied=None)
    by_root = None if is_largest(a) or is_largest(b) else if_linear  # by the largest, rows are scaled to be rounded
    one, other = a.if_multiplied or by_root, b.if_multiplied or by_root
    return a._replace(if_linear=if_linear, if_multiplied=one), b._replace(if_linear=if_linear, if_multiplied=other)


def _met_by(value: RowValue, other: RowValue, is_itself: bool) -> Fault | None:
    """Returns the fault that waits in rows which others multiply; `x * sigmoid(x)` is a function of x, and has none."""
    fault = value.if_linear or value.if_multiplied or value.if_no_layer and value.if_no_layer._replace(lasts=True)
    if fault is None or is_itself or fault.lasts and other.drawn:  # a square of a centred row; dropout
        return None
    if other.met_all:  # two centred rows make a covariance
        return fault._replace(lasts=False) if other.if_linear or other.if_multiplied else None
    return fault


def normalized(name: str, a: RowValue, b: RowValue, made: RowValue) -> RowValue:
    """Returns what is known of a product or a quotient, with whether it is one of a normalization.

    Rows are `scaled` by what they are divided by. A number is an `inverse` if it is divided by one of all rows which is
    no mean, as by a root of a variance.
    """
    if made.kind == Kind.ROWS:
        kinds = a.kind, b.kind
        by_b = kinds == (Kind.ROWS, Kind.SUMMED) and (name == "div" or b.inverse)
        by_a = kinds == (Kind.SUMMED, Kind.ROWS) and name == "mul" and a.inverse
        return made._replace(scaled=made.scaled or by_a or by_b)
    is_root = b.kind == Kind.SUMMED and b.fault is not None and not is_largest(b)
    by_root = a.inverse or a.kind != Kind.SUMMED and is_root
    return made._replace(inverse=by_root if name == "div" else a.inverse or b.inverse)
