"""Decides whether rows that are combined with a number of all rows are normalized, or make a loss that is no mean.

A BatchNorm subtracts means from rows and divides by roots of variances, for each feature; that is accepted. Otherwise,
if all that follows is linear, the result is no mean: in `(v * f(v.mean())).mean()` the number of all rows is a factor
of a sum over the rows, so that the whole is a product of two sums.

If something that follows is not linear, it depends on the number. Numbers for each feature belong to a layer of a
model, and are accepted; but rows that are only centred, and not divided by a deviation, make a loss. One number of all
rows belongs to a loss, and is refused: that of a relativistic GAN, `softplus(v - u.mean())`, or of a policy gradient
whose advantages are normalized by one number and multiplied by other rows. So do numbers, also those for each feature,
that rows are compared with or cut off by, that choose between rows, or that are looked up for each row by its class.
All this is accepted again if a layer (a product with parameters) follows, or if the code is in the call of a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import row_primitives as primitives
from .callers import is_made_in, is_made_in_module
from .jaxprs import parameter
from .row_values import Fault, Kind, RowCount, RowValue


def added_to_rows(value: RowValue) -> RowValue:
    """Returns a summand of rows. Numbers of all rows that are no means are a fault if all that follows is linear.

    A BatchNorm adds means, also of the rows that a mask keeps. Some picked rows may be written before the others.
    """
    if value.kind != Kind.SUMMED or value.fault is None:
        return value
    if not value.is_number and (value.fault.kind == "ratio" or is_picked(value)):
        return value
    return value._replace(if_linear=value.fault._replace(lasts=True))


def is_largest(value: RowValue) -> bool:
    """Returns True for the largest or the least of all rows."""
    return value.fault is not None and _is_of_largest(value.fault)


def _is_of_largest(fault: Fault) -> bool:
    return bool(fault.at) and fault.at[0].primitive.name in ("reduce_max", "reduce_min")


def is_average(value: RowValue) -> bool:
    """Returns True for a mean of all rows, or a sum: one number, or one for each feature.

    Rows that it is added to still have a mean. But if other rows multiply them, the result is a product of two sums.
    """
    return value.kind == Kind.SUMMED and value.fault is None


def is_threshold(value: RowValue) -> bool:
    """Returns True for one number of all rows, but not the largest: a comparison with that only finds its position."""
    return value.kind == Kind.SUMMED and value.is_number and not is_largest(value)


def meets_one_row(eqn: Any, values: Sequence[RowValue], rows: Sequence[int]) -> Fault | None:
    """Returns the fault of rows combined with one particular row, as in `relu(v - v[0])`: each device has another one.

    `rows` are the axes of the rows. The particular row may be concatenated with the others along these axes, as by
    `jnp.roll`, and it may replace some of them, as under a mask.
    """
    name = eqn.primitive.name
    if name in primitives.PLACES or name == "concatenate" and parameter(eqn, "dimension") in rows:
        return None
    met = values[-1:] if name == "select_n" else values  # the last one decides; the cases are not combined
    return next((Fault("row", v.fault.at, True) for v in met if v.fault is not None and is_picked(v)), None)


def writes_one_row(eqn: Any, values: Sequence[RowValue], rows: RowCount) -> bool:
    """Returns True if a scatter writes a constant into particular rows, or adds it to them, as `x.at[0].set(0)` does.

    Then the axis of the rows is indexed, and the indices do not have one for each row.
    """
    if [v.kind for v in values] != [Kind.ROWS, Kind.CONST, Kind.CONST] or rows.axes(eqn.invars[1]):
        return False
    indexed = parameter(eqn, "dimension_numbers").scatter_dims_to_operand_dims
    return not {*rows.axes(eqn.invars[0])}.isdisjoint(indexed)


def is_picked(value: RowValue) -> bool:
    """Returns True for one row that was picked out of all."""
    at = value.fault.at if value.kind == Kind.SUMMED and value.fault is not None else ()
    return bool(at) and at[0].primitive.name in primitives.PICKS


def chosen_for_rows(which: RowValue, cases: Sequence[RowValue], made: RowValue, at: tuple[Any, ...]) -> RowValue:
    """Returns a choice among cases, `made`, with the possible fault of rows that are chosen.

    In `where(m, v, v.mean())` the mask says how often the mean counts. In `where(m.any(), v, 0)` a number of all rows
    chooses. One picked row among the cases is no fault, because it may only fill positions that a mask leaves out.
    """
    if made.kind != Kind.ROWS:
        return made
    if which.kind == Kind.SUMMED and not is_picked(which):
        return made._replace(if_no_layer=made.if_no_layer or _of_a_loss(at))
    met = next((v for v in cases if v.kind == Kind.SUMMED and not is_picked(v)), None)
    if met is None or which.kind != Kind.ROWS:
        return made
    fault = made.if_linear or met.fault or Fault("nonlinear", at)
    return made._replace(if_linear=fault._replace(kind="number") if met.is_number else fault)


def picked_for_rows(value: RowValue, made: RowValue, at: tuple[Any, ...]) -> RowValue:
    """Returns `made`, which each row looks up in `value` by an index, with its faults.

    If `value` has numbers of all rows (a count of each class), rows are made of them. If it has rows, the index is such
    a number. A row of a matrix counts as part of a layer, because an embedding may be looked up after an inner gradient
    step.
    """
    if value.kind != Kind.SUMMED:
        return made._replace(if_no_layer=made.if_no_layer or _of_a_loss(at))
    found = made._replace(if_linear=value.fault or Fault("nonlinear", at))
    return found._replace(if_no_layer=_of_a_loss(at)) if at[0].invars[0].aval.ndim == 1 else found


def shifted_by_largest(value: RowValue, made: RowValue, at: tuple[Any, ...]) -> RowValue:
    """Returns the exponentials of rows; `exp(v - v.max())` is a fault unless it is divided by a sum of such values."""
    fault = value.if_linear if made.kind == Kind.ROWS else None
    if fault is None or not _is_of_largest(fault) or is_made_in_module(at[::-1]):
        return made
    return made._replace(if_linear=fault._replace(lasts=False))


def _of_a_loss(at: tuple[Any, ...]) -> Fault | None:
    """Returns the possible fault of rows that a number of all rows changes, if no layer follows; None in a module."""
    return None if is_made_in_module(at[::-1]) else Fault("number", at)


def still_linear(values: Sequence[RowValue]) -> tuple[Fault | None, Fault | None]:
    """Returns the possible faults `(if_linear, if_multiplied)` of a sum of values, or of a choice among them.

    There are none if one of the values depends on a number of all rows, and not linearly: `x + f(x)` is a layer of a
    model, as a softmax is.
    """
    if any(v.kind == Kind.ROWS and v.met_all and not (v.if_linear or v.if_multiplied) for v in values):
        return None, None
    if_linear = next((v.if_linear for v in values if v.if_linear is not None), None)
    return if_linear, next((v.if_multiplied for v in values if v.if_multiplied is not None), None)


def _behind_a_layer(value: RowValue) -> RowValue:
    """Returns rows whose features a layer has mixed: nonlinear functions after it are the model's, and no faults."""
    faults = {name: getattr(value, name) for name in ("if_linear", "if_multiplied")}
    return value._replace(
        **{name: fault and fault._replace(kind="nonlinear", lasts=False) for name, fault in faults.items()}
    )


def without_a_layer(eqn: Any, values: Sequence[RowValue], linear: bool, at: tuple[Any, ...]) -> Fault | None:
    """Returns the possible fault of rows combined with numbers of all rows, and passed through a nonlinear function.

    If no layer follows, that is part of a loss: `softplus(v - u.mean())`, `(v - normed(returns)) ** 2`, `v > v.max()`,
    `minimum(v, v.mean() + v.std())`. A square of rows that are only centred counts as part of a variance. Rows that are
    scaled by one number may be rounded, and `exp(v - v.max())` may be part of a softmax over the features. A softmax of
    rows that were centred for each feature belongs to a loss, as the centre of DINO does. So does any other function of
    such rows, and the logarithm of rows that were divided by the means of their features: `log(p / p.mean(0))`.
    """
    name = eqn.primitive.name
    if name in primitives.LAYERS:
        return None
    kept = next((v.if_no_layer for v in values if v.if_no_layer is not None), None)
    if kept is not None or linear:
        return kept
    meets = {v.kind for v in values} == {Kind.ROWS, Kind.SUMMED}
    if meets and name in primitives.COMPARES | primitives.KEEP_DEGREE:
        return _of_a_loss(at)
    if name not in primitives.DEPENDS_ON_SIZE:
        return None
    if meets and any(v.is_number for v in values):
        return Fault("number", at)
    is_square = name == "square" or name == "integer_pow" and parameter(eqn, "y") == 2
    faults = [v.if_multiplied if v.scaled or not is_square else None for v in values]
    faults = [fault for fault in faults if fault is not None and fault.lasts]
    met = [v.if_linear for v in values if v.if_linear is not None]
    of_softmax = name in primitives.OF_SOFTMAX
    faults += [x for x in met if (x.lasts or x.kind == "number") and not (of_softmax and _is_of_largest(x))]
    if not is_square:  # a BatchNorm would have scaled its rows before
        centred = [v.if_multiplied for v in values if v.if_multiplied is not None and not v.scaled]
        faults += [fault for fault in centred if fault.kind == "number"]
    if name in ("log", "log1p"):  # as in mutual information; a BatchNorm makes negative numbers, too
        faults += [x for x in met if not _is_of_largest(x)]
    return Fault("number", faults[0].at) if faults else None


def product_with_rows(name: str, a: RowValue, b: RowValue, at: tuple[Any, ...]) -> Fault | None:
    """Returns the possible fault of a product or a quotient with rows: one if all that follows is linear.

    `v.mean()` stands for one number of all rows, `v.mean(0)` for one number for each feature:

        rows * rows                   a fault if one side has met a number of all rows: see `_met_by`
        rows / v.std()                a fault of one number, which lasts: a loss normalizes its rows by it
        rows / v.mean()               the same, but it lasts only if the rows were centred before
        rows / v.std(0)               none, as in a BatchNorm; so is a product with an `inverse`, as `rsqrt(v.var(0))`
        rows / v.max(0)               "nonlinear", unless the rows were centred before
        rows / v.mean(0)              "nonlinear", unless the rows were centred before
        e / e.sum(1)                  none, where e is `exp(v - v.max())`: it is a softmax
        scaled rows * w(v.mean(0))    none: what follows in a BatchNorm is its scale
        centred rows @ v.mean(0)      none: rows are whitened
        rows * v.mean()               "number": in `(rows * m).mean()` each replica has another factor m
        rows * v.mean(0)              "nonlinear", for the same reason; a nonlinear function after it may be a layer's
    """
    is_div, fault = name == "div", Fault("nonlinear", at)
    if (a.kind, b.kind) == (Kind.ROWS, Kind.ROWS):
        if is_div and all(v.if_linear is not None and _is_of_largest(v.if_linear) for v in (a, b)):
            return None  # a softmax
        is_itself = at[0].invars[0] is at[0].invars[1]
        return _met_by(a, b, is_itself) or (None if is_div else _met_by(b, a, is_itself))
    if {a.kind, b.kind} != {Kind.ROWS, Kind.SUMMED}:
        return None
    rows, number = (a, b) if a.kind == Kind.ROWS else (b, a)
    if number.is_number and (is_div and rows is a or number.inverse):  # one number normalizes all rows
        # The weights of a masked BatchNorm are divided by their mean, too, but they are not centred before.
        return Fault("number", at, not is_average(number) or rows.if_multiplied is not None)
    if is_div and rows is a:  # by a root of a variance it is a normalization, as it is of centred rows by a mean
        is_scaled = (is_average(number) or is_largest(number)) and not rows.met_all and not is_made_in_module(at[::-1])
        return fault if is_scaled else rows.if_linear
    if name == "dot_general" and rows.met_all:
        return None  # rows are centred before they are whitened
    if number.is_number and not (rows.met_all and is_largest(number)):  # rows that were rounded are scaled back
        fault = Fault("number", at)
    return None if number.inverse or rows.scaled else rows.if_linear or fault


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


def in_product(name: str, a: RowValue, b: RowValue, at: tuple[Any, ...]) -> tuple[RowValue, RowValue]:
    """Returns both sides of a product or a quotient, with their possible faults from then on."""
    if name in primitives.LAYERS:
        a, b = _behind_a_layer(a), _behind_a_layer(b)
    if_linear, kinds = product_with_rows(name, a, b, at), (a.kind, b.kind)
    if name == "div" and b.kind == Kind.ROWS and b.if_no_layer is None and _has_number(b):
        b = b._replace(if_no_layer=_of_a_loss(at))  # the inverse of rows is not linear in them
    if if_linear is not None and if_linear.lasts and kinds == (Kind.ROWS, Kind.ROWS):
        a = a._replace(fault=a.lasting or b.lasting or if_linear)
    if Kind.CONST in kinds and not (name == "div" and b.kind == Kind.ROWS):
        return a, b
    if if_linear is None or not if_linear.lasts or Kind.SUMMED not in kinds:
        return a._replace(if_linear=if_linear, if_multiplied=None), b._replace(if_linear=if_linear, if_multiplied=None)
    by_root = None if is_largest(a) or is_largest(b) else if_linear  # rows are divided by the largest to be rounded
    one, other = a.if_multiplied or by_root, b.if_multiplied or by_root
    return a._replace(if_linear=if_linear, if_multiplied=one), b._replace(if_linear=if_linear, if_multiplied=other)


def _has_number(value: RowValue) -> bool:
    """Returns True for rows that were combined with one number of all rows; numbers for each feature do not count."""
    met, centred = value.if_linear, value.if_multiplied
    return centred is not None and centred.lasts or met is not None and (met.lasts or met.kind == "number")


def is_centred(value: RowValue) -> bool:
    """Returns True for rows minus means of all rows, or plus them, that were not divided by a standard deviation."""
    return value.if_multiplied is not None and value.if_multiplied.kind == "number" and not value.scaled


def makes_variance(eqn: Any, value: RowValue) -> bool:
    """Returns True if the mean of these rows' square is a variance; `jnp.var` itself is read as a whole."""
    return is_centred(value) and not is_made_in(eqn, "_var")


def _met_by(value: RowValue, other: RowValue, is_itself: bool) -> Fault | None:
    """Returns the possible fault of rows that other rows multiply; `x * sigmoid(x)` is a function of x and has none."""
    centred = value.if_multiplied
    if centred is not None and not centred.lasts:
        centred = centred._replace(kind="nonlinear")
    fault = value.if_linear or centred or value.if_no_layer and value.if_no_layer._replace(lasts=True)
    if is_itself and value.if_linear is None:  # a square
        return fault._replace(lasts=False) if fault is not None and is_centred(value) else None
    if fault is None or fault.lasts and other.drawn:  # drawn: dropout
        return None
    if other.met_all:  # two centred rows make a covariance
        return fault._replace(lasts=False) if other.if_linear or other.if_multiplied else None
    return fault


def normalized(name: str, a: RowValue, b: RowValue, made: RowValue) -> RowValue:
    """Returns a product or a quotient, with what makes it part of a normalization.

    Rows are `scaled` if they were divided by a number of all rows. A number is an `inverse` if it was divided by a
    number of all rows that is no mean, such as a root of a variance.
    """
    if made.kind == Kind.ROWS:
        kinds = a.kind, b.kind
        by_b = kinds == (Kind.ROWS, Kind.SUMMED) and (name == "div" or b.inverse)
        by_a = kinds == (Kind.SUMMED, Kind.ROWS) and name == "mul" and a.inverse
        return made._replace(scaled=made.scaled or by_a or by_b)
    is_root = b.kind == Kind.SUMMED and b.fault is not None and not is_largest(b)
    by_root = a.inverse or a.kind != Kind.SUMMED and is_root
    return made._replace(inverse=by_root if name == "div" else a.inverse or b.inverse)
