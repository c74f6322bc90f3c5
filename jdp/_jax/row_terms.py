"""Tells from a jaxpr what its values are made of: sums over the rows, functions of such sums, pairs of rows.

A mean over the rows is a sum of one summand for each row, made of that row alone, divided by a multiple of the number
of rows, `b`. `Reader` goes through the equations once. It computes no numbers, but a `RowValue` for each value:

* its kind: CONST does not depend on the rows, ROWS has entries for each row, SUMMED is made of sums over the rows,
  SHARED came through a collective as a mean, UNKNOWN cannot be followed;
* its degree, the power of `b` that it grows with: 1 of a sum over the rows and of `b` itself, 0 of their quotient;
* its fault: the equation after which it is no longer a linear function of sums over the rows, if there is one;
* its role: what rows become when they meet such a value again, as in a BatchNorm (`row_numbers.py`).

A scalar of kind SUMMED, of degree 0 and without a fault is a mean. Each rule is one method of `Reader`:

    linear             a sum of sums over the rows is such a sum; summands of different degrees make no mean
    product            a constant times a sum is a sum, a sum times a sum is not; degrees are added
    quotient           anything divided by a sum over the rows is a ratio, and no sum
    indexed            linear in the array that is indexed, and not in the indices
    nonlinear          a root, a logarithm or a maximum of a sum is no sum; of rows it is rows
    cumulated          each entry is made of other rows, too: pairs of rows, as after a sort
    chosen             one of the cases
    BODIES             a cond is one of its branches; a loop is read again until nothing new is known of its carry
    number_of_rows     a constant that grows as `b` does
    variance           a jnp.var over the rows is no mean, but rows may be divided by its root
    made, of_all_rows  all rules end here: they take the largest kind, and the fault that remains

What the trace cannot follow is accepted, because a false alarm would refuse a correct loss. So no table of
`row_primitives.py` has to be complete. A primitive that is in none of them makes constants of constants, and rows of
rows that do not grow with `b`; any other result of it is UNKNOWN, and so is everything that is made of an UNKNOWN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from . import row_numbers, row_pairs, row_picks
from . import row_primitives as primitives
from .callers import is_made_in, is_made_in_module
from .jaxprs import CALLS, axes, inside, opened, parameter
from .row_backward import backward_of, mixes_cotangents
from .row_loops import BODIES
from .row_values import (
    CONST,
    UNKNOWN,
    Fault,
    Kind,
    Role,
    RowCount,
    RowValue,
    collected,
    constant,
    cuts_off,
    either,
    is_divided,
    is_padded,
)


def lasting(values: Sequence[RowValue]) -> Fault | None:
    return next((v.fault for v in values if v.fault is not None and v.fault.lasts), None)


def sum_degree(values: Sequence[RowValue], small: float = 1e-4) -> int | None:
    """Returns the degree of a sum; constants up to `small`, as an epsilon in a divisor, do not count."""
    degrees = {v.degree for v in values if v.number is None or abs(v.number) > small}
    return (degrees or {0}).pop() if len(degrees) < 2 else None


def product_degree(*degrees: int | None) -> int | None:
    known = [d for d in degrees if d is not None]
    return sum(known) if len(known) == len(degrees) else None


class Reader:
    """Reads jaxprs, the outer one and those inside of it."""

    def __init__(self, rows: RowCount) -> None:
        self.rows = rows
        self.around: list[Any] = []  # the equations that it is in, the outermost first
        self.loops = 0  # how many loops over the rows it is in
        self.backward: dict[int, Any] = {}  # by its id, a custom_vjp_call and its backward pass, None if not traceable
        self.mixed: list[tuple[Any, ...]] = []  # the backward passes that combine several rows, each as `at` returns it
        self.steps: list[tuple[int, tuple[Any, ...]]] = []  # of slices such as `v[::2]`: the step, and where
        self.windows: dict[tuple[Any, int], set[int]] = {}  # where slices of few rows begin, by shape and length

    def at(self) -> tuple[Any, ...]:
        """Returns the equation that is read, then those around it: the places to blame."""
        return tuple(self.around[::-1])

    def of_rows(self, v: Any) -> bool:
        """Returns True if a variable has an axis of the rows; in a loop over the rows every variable counts."""
        return self.loops > 0 or bool(self.rows.axes(v))

    def read(self, jaxpr: Any, inputs: Sequence[RowValue]) -> list[RowValue]:
        """Returns what is known of a jaxpr's outputs, from what is known of its inputs."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), opened(jaxpr)
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for v, x in zip(getattr(jaxpr, "constvars", ()), consts, strict=False):
            known[v] = row_pairs.constant_of(self.rows, v, x) if self.rows.other else constant(x, self.rows.prime)

        def value(v: Any) -> RowValue:
            return self.rows.literal(v) if hasattr(v, "val") else known.get(v, CONST)

        for eqn in jaxpr.eqns:
            self.around.append(eqn)
            operands = [value(v) for v in eqn.invars]
            made = self.equation(eqn, operands)
            for v, x in zip(eqn.outvars, made, strict=True):
                is_number = x.kind == Kind.SUMMED and all(size == 1 for size in getattr(v.aval, "shape", ()))
                known[v] = x._replace(is_number=True) if is_number else x
            self.around.pop()
        return [value(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: list[RowValue]) -> list[RowValue]:
        """Returns what an equation makes, by the rule for its primitive."""
        name, outs = eqn.primitive.name.replace("-", "_"), eqn.outvars
        names_axes = "axes" in eqn.params or "axis_name" in eqn.params
        # A collective over a named axis. Numbered axes are those of an array; `vmap` numbers them by numpy's integers.
        if names_axes and not all(hasattr(axis, "__index__") for axis in axes(eqn)):
            each = values if len(values) == len(outs) else [functools.reduce(either, values, CONST)] * len(outs)
            return [collected(eqn, v, self.at()) for v in each]
        if name == "custom_vjp_call":
            _, backward = self.backward.setdefault(id(eqn), (eqn, backward_of(eqn)))
            are_numbers = all(v.number is not None for v in values)
            if backward is not None and not are_numbers:
                if mixes_cotangents(eqn, backward, values, self.read, self.of_rows):
                    self.mixed.append(self.at())
        if name in CALLS:
            return self.named(eqn, values, self.read(next(inside(eqn)), values))
        if name in BODIES:
            return BODIES[name](self, eqn, values)
        if name == "select_n":
            made = self.chosen(eqn, values[0], values[1:], outs[0])
            if any(v.share for v in values):
                made = row_pairs.moved(self.rows, eqn, name, values, made, self.around)
            return [self.of_pairs(eqn, name, values, made)]
        if name == "sort":  # moves all operands into the order of the first
            values = [row_pairs.sorted_along(self.rows, eqn, i, v, self.at()) for i, v in enumerate(values)]
            return [self.made(eqn, values, v.degree, out, False) for v, out in zip(values, outs, strict=True)]
        if name in primitives.EACH:
            return [self.made(eqn, [v], v.degree, out, True) for v, out in zip(values, outs, strict=True)]
        return [self.one(eqn, name, values, out) for out in outs]

    def one(self, eqn: Any, name: str, values: list[RowValue], out: Any) -> RowValue:
        """Returns an output of an equation without a jaxpr inside."""
        padded = any(v.padded for v in values) and is_padded(name, values)
        made = self.by_its_rule(eqn, name, values, out, padded)
        is_written = name.startswith("scatter") and row_numbers.writes_one_row(eqn, values, self.rows)
        if is_written and not is_made_in_module(self.around):
            made = made._replace(fault=lasting(values) or Fault("row", self.at(), True))
        moves = made.joined if name == "reshape" else name in primitives.MOVES or name in primitives.SCATTERS
        if moves or any(v.share for v in values):
            made = row_pairs.moved(self.rows, eqn, name, values, made, self.around)
        padded = (padded or name == "pad" and self.rows.pads(eqn, values)) and made.kind != Kind.SUMMED
        return self.of_pairs(eqn, name, values, made)._replace(padded=padded)

    def of_pairs(self, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue) -> RowValue:
        """Returns a result, `made`, with its `entries`, if it or an operand may have one for each pair of rows."""
        is_pair = made.fault is not None and made.fault.kind == "pairs"
        is_pair = is_pair or name == "iota" or any(v.entries is not None for v in values)
        return row_pairs.of_pairs(self.rows, eqn, name, values, made) if is_pair else made

    def by_its_rule(self, eqn: Any, name: str, values: list[RowValue], out: Any, padded: bool) -> RowValue:
        """Returns an output of an equation without a jaxpr inside, by the table that names its primitive."""
        if name in ("dim_as_value", "iota"):
            return self.number_of_rows(eqn, name, out)
        if name in primitives.DRAWS and self.rows.axes(out):
            return RowValue(Kind.ROWS, drawn=True)  # another number for each row, as if it had come with the batch
        summed = self.rows.summed(eqn, name, out) if name in primitives.MAY_SUM else 0
        if summed and name == "reduce_sum" and values[0].entries == "diagonal":
            summed -= 1  # all but one entry for each row are zero
        if name in primitives.ADDS_UP and not padded and self.rows.sums_part(eqn, name):
            values = [v._replace(fault=v.fault or Fault("part", self.at(), True)) for v in values]
        if name in primitives.CUMULATIVE and parameter(eqn, "axis") in self.rows.axes(out):
            if values[0].kind == Kind.CONST:
                return RowValue(Kind.CONST, None, at=self.at())  # places among the rows
            values = [v._replace(given=False) for v in self.cumulated(values, out)]
        if name == "slice" and self.rows.takes_some(eqn):
            if is_made_in(eqn, "associative_scan"):
                values = self.cumulated(values, out)
            elif not is_made_in_module(self.around):
                self.steps.append((self.rows.step(eqn), self.at()))
        if name in primitives.WINDOWS and self.rows.slides_over_rows(eqn, name):
            values = [v._replace(fault=lasting(values) or Fault("pairs", self.at(), True)) for v in values]
        may_be_cut = name == "convert_element_type" and values[0].kind > Kind.SHARED
        if may_be_cut and values[0].degree != 1 and cuts_off(eqn, out):  # degree 1: it may be a count of ones
            return self.nonlinear(eqn, "floor", values, out)
        if name == "div" and values[0].kind == Kind.SUMMED and jnp.issubdtype(out.aval.dtype, jnp.integer):
            return self.nonlinear(eqn, "floor", values, out)
        if name in primitives.LINEAR:
            return self.linear(eqn, name, values, summed, out)
        if name in primitives.PRODUCTS:
            return self.product(eqn, name, values, summed, out)
        if name in primitives.INDEXED:
            return self.indexed(eqn, name, values, summed, out)
        return self.nonlinear(eqn, name, values, out)

    def linear(self, eqn: Any, name: str, values: list[RowValue], summed: int, out: Any) -> RowValue:
        """Returns the result of a linear equation. Each axis of the rows that it sums over adds 1 to the degree.

        If summands have different degrees, the sum is not one over the rows: `m.sum() + 1` has the 1 once for all rows.
        """
        if name in primitives.ADDS and {v.kind for v in values} == {Kind.SUMMED, Kind.UNKNOWN}:
            known = [v for v in values if v.kind == Kind.SUMMED and (v.fault is not None or v.degree not in (0, None))]
            values = known or values  # whatever the unknown summand is, it does not remove a fault of the known one
        degree, degrees = sum_degree(values), {v.degree for v in values}
        if degree is None and any(v.kind == Kind.ROWS and (v.degree or 0) < 0 for v in values):  # divided by `b` before
            values = [v._replace(fault=v.fault or Fault("count", self.at(), True)) for v in values]
        if degree is None and None not in degrees and all(v.kind <= Kind.SUMMED for v in values):
            if name in ("concatenate", "stack") and all(v.kind == Kind.CONST for v in values):
                return UNKNOWN  # a shape, as in jnp.prod(jnp.array(x.shape))
            degree = max(d for d in degrees if d is not None)  # m.sum() + 1 grows as m.sum() does
            values = [values[0]._replace(fault=values[0].fault or Fault("sum", self.at())), *values[1:]]
        made = self.made(eqn, values, product_degree(degree, summed), out, True, summed)
        return made._replace(root=None, guards=False) if name in primitives.SUMS else made

    def indexed(self, eqn: Any, name: str, values: list[RowValue], summed: int, out: Any) -> RowValue:
        """Returns the result of a gather, a scatter or the like: linear in the arrays, but not in indices."""
        at = primitives.INDEXED[name]
        first, *added = [values[i] for i in at]
        linear = all(v.kind != Kind.SUMMED for i, v in enumerate(values) if i not in at)
        degree = sum_degree([first, *(v._replace(degree=product_degree(v.degree, summed)) for v in added)])
        if first.kind == Kind.CONST and any(v.kind == Kind.CONST and v.degree is None for v in values):
            degree = None  # picked by position
        return self.made(eqn, values, degree, out, linear, summed)

    def nonlinear(self, eqn: Any, name: str, values: list[RowValue], out: Any) -> RowValue:
        """Returns the result of a primitive that is not linear, or not known: rows stay rows, a sum gets a fault."""
        if name == "integer_pow" and eqn.params["y"] == 1 or name == "pow" and values[1].number == 1:
            return values[0]  # the root of a loss with any power p, at p = 1
        degree = self.degree(eqn, name, values, out)
        is_square = name in primitives.POWERS and eqn.params.get("y", 2) == 2
        if is_square and values[0].root is not None:
            return values[0].root  # jnp.linalg.norm(x) ** 2
        if name == "top_k" and values[0].kind == Kind.ROWS and values[0].fault is None and eqn.invars[0].aval.ndim == 1:
            values = [values[0]._replace(fault=Fault("nonlinear", self.at(), True))]  # the largest of all rows
        made = self.made(eqn, values, degree, out, False)
        if name not in primitives.NONLINEAR and made.kind > Kind.SHARED and (made.kind != Kind.ROWS or degree is None):
            return UNKNOWN
        return made._replace(guards=_guards(eqn, name, values), root=values[0] if name == "sqrt" else None)

    def cumulated(self, values: list[RowValue], out: Any) -> list[RowValue]:
        """Returns the operand of a cumulative sum along the rows, with a fault unless its results are integers."""
        if values[0].kind != Kind.ROWS or not jnp.issubdtype(out.aval.dtype, jnp.inexact):
            return values  # of integers it is a position, as among an expert's rows
        return [values[0]._replace(fault=lasting(values) or Fault("pairs", self.at(), True))]

    def named(self, eqn: Any, values: list[RowValue], found: list[RowValue]) -> list[RowValue]:
        """Returns the outputs of a call, `found` in its body; `jnp.diagonal` and `jnp.var` are recognised by name."""
        name = eqn.params.get("name")
        if name == "diagonal" and (value := row_pairs.diagonal(eqn, values[0])) is not None:
            return [value]
        return [self.variance(v) for v in found] if name == "_var" else found

    def variance(self, value: RowValue) -> RowValue:
        """Returns a variance, with a fault (not a lasting one, because of BatchNorm) if it is one over the rows."""
        is_of_rows = value.kind == Kind.SUMMED and (value.fault is None or value.role == "deviation")
        return value._replace(fault=Fault("nonlinear", self.at())) if is_of_rows else value

    def degree(self, eqn: Any, name: str, values: list[RowValue], out: Any) -> int | None:
        """Returns the degree of a nonlinear equation's result; without a rule, 0 if no operand grows with `b`."""
        values = [values[0], values[2]] if name in primitives.SCATTERS else values  # without the indices
        degrees = {v.degree for v in values}
        if name in primitives.OF_BOOLS or name == "sign":
            return None if None in degrees and self.of_rows(out) else 0
        if name in primitives.BOUNDED:
            if name not in primitives.COMPARES or not self.of_rows(out):
                return 0
            # If one side grows with b and the other does not, as in `arange(b) < 10`, the share of True depends on b.
            # A constant does not count if the other side has rows (an expert's rows, and its capacity); a 0 counts
            # only if the other side has positions.
            of_rows = any(v.kind == Kind.ROWS for v in values)
            of_places = any(v.kind == Kind.CONST and v.degree is None for v in values)
            sides = [v for v in values if (v.number != 0 or of_places) and not (of_rows and v.kind == Kind.CONST)]
            is_by_place = any(v.kind == Kind.ROWS and v.degree is None for v in values)  # `x * arange(b) > 0`
            return 0 if len({v.degree for v in sides}) < 2 and not is_by_place else None
        if name in primitives.KEEP_DEGREE:
            return sum_degree(values, 1)
        if name in primitives.POWERS and None not in degrees:
            return values[0].degree * eqn.params.get("y", 2)
        if name in ("sqrt", "rsqrt") and not (values[0].degree or 0) % 2 and None not in degrees:
            return (values[0].degree or 0) // (-2 if name == "rsqrt" else 2)
        return 0 if degrees <= {0} else None

    def number_of_rows(self, eqn: Any, name: str, out: Any) -> RowValue:
        """Returns what is known of a size (a constant with its degree) or an `iota` (positions, if it counts rows)."""
        if name == "dim_as_value":
            size, at = parameter(eqn, "dim"), self.at()
            if is_divided(size):
                return UNKNOWN
            if self.rows.power(size) is None and self.rows.power(size + 1) == 1:  # the divisor of an unbiased variance
                return RowValue(Kind.CONST, 1, fault=Fault("sum", at), at=at)
            return RowValue(Kind.CONST, self.rows.power(size), at=at)
        counts_rows = parameter(eqn, "dimension") in self.rows.axes(out)
        return RowValue(Kind.CONST, None, at=self.at()) if counts_rows else CONST

    def product(self, eqn: Any, name: str, values: list[RowValue], summed: int, out: Any) -> RowValue:
        """Returns a product or a quotient: linear unless both sides are sums; degrees are added, or subtracted."""
        if lasting(values) is not None:  # whatever number it is divided by, known or not
            values = [v if v.kind != Kind.UNKNOWN or v.number is None else RowValue(Kind.CONST, None) for v in values]
        if {v.kind for v in values} == {Kind.SUMMED, Kind.UNKNOWN}:
            # Picked rows times a number of all rows: the product of two sums, and no mean.
            values = [RowValue(Kind.SUMMED) if v.picked is not None else v for v in values]
        a, b = values
        if name == "mul" and 0 in (a.number, b.number) and not self.rows.axes(out):
            return RowValue(Kind.CONST, number=0.0)  # 0 * x, as a loss has it for parameters that it does not use
        linear = (a.kind, b.kind) != (Kind.SUMMED, Kind.SUMMED)
        degree = product_degree(a.degree, b.degree, summed)
        if name == "div":
            degree = None if a.degree is None or b.degree is None else a.degree - b.degree
            a, b = row_numbers.quotient(a, b, degree, self.at()) if b.kind == Kind.SUMMED else (a, b)
        if Kind.ROWS in (a.kind, b.kind):  # the fault of a constant (b - 1) remains when rows are multiplied by it
            faults = [v.fault and v.fault._replace(lasts=v.fault.lasts or v.kind == Kind.CONST) for v in (a, b)]
            a, b = a._replace(fault=faults[0]), b._replace(fault=faults[1])
        if summed and self.rows.axes(out) and Kind.ROWS in (a.kind, b.kind) and lasting(values) is None:
            if not row_pairs.is_matrix_of_places(self.rows, eqn.invars, values):
                return UNKNOWN  # a permutation, for example
            a = a._replace(fault=Fault("pairs", self.at(), True))
        counts = [v.kind for v in values if v.degree == 1 and v.fault is None and v.kind in (Kind.CONST, Kind.SUMMED)]
        made = self.made(eqn, [a, b], degree, out, linear, summed)
        return made._replace(meant=min(counts) if name == "mul" and counts else None)

    def made(
        self, eqn: Any, values: list[RowValue], degree: int | None, out: Any, linear: bool, summed: int = 0
    ) -> RowValue:
        """Returns the result of an equation: of the largest kind of its operands, with the fault that remains.

        `linear` says that the result is linear in the operands that are sums, `summed` how many axes of the rows the
        equation sums over. A result of sums that is not linear has a fault. If rows meet such a result, their role and
        their fault are those of `row_numbers.py`. A result with two axes of the rows has a value for each pair of rows.
        """
        kind = max((v.kind for v in values), default=Kind.CONST)
        if kind == Kind.UNKNOWN:
            return row_picks.of_picked(eqn, values, linear, degree, self.rows, self.at())
        rows = self.rows.axes(out) if kind == Kind.ROWS else []
        joined = self.is_joined(eqn, values, rows, out)
        moves = eqn.primitive.name in primitives.MOVES or any(v.place for v in values)
        pairs = len(rows) > 1 or moves and kind == Kind.ROWS and row_pairs.meets_elsewhere(self, values, linear)
        of_all = kind == Kind.ROWS and not rows and any(map(self.rows.axes, eqn.invars))  # no axis of the rows is left
        place = self.place(eqn, values, rows, out) if moves or kind == Kind.CONST else 0
        is_picked = of_all and eqn.primitive.name in primitives.PICKS  # one row
        role, pending = (None, None) if is_picked else self.met(eqn, values, linear)
        if len(values) == 1 and linear and not (summed or pairs or of_all):
            return values[0]._replace(joined=joined, place=place, role=role, pending=pending)
        at = next((v.at for v in values if v.degree == degree and v.at), None) or (self.at() if degree != 0 else ())
        any_fault = next((v.fault for v in values if v.fault is not None), None)
        lasts = lasting(values)
        if kind <= Kind.SHARED:
            number = 0.0 if linear and all(v.number == 0 for v in values) else None
            return RowValue(kind, degree, number, any_fault, at, place=place)
        if kind == Kind.SUMMED:
            fault = self.fault_of_sums(eqn, lasts or any_fault, degree, linear)
            return RowValue(kind, degree, None, fault, at, role=role)
        fault = lasts or (Fault("pairs", self.at(), True) if pairs else None)
        if fault is None and any_fault is not None:
            fault = row_numbers.meets_one_row(eqn, values, rows)
        if role is None and pending is not None:
            fault, pending = fault or pending, None
        made = RowValue(kind, degree, None, fault, at, joined=joined, place=place, role=role, pending=pending)
        if of_all:
            if pending is not None and (fault := made.if_added_up) is not None:
                fault = fault._replace(lasts=made.lasting is not None)
            value = RowValue(Kind.SUMMED, degree, None, fault, at, joined=values[0].joined, place=values[0].place)
            value = value._replace(role=self.role_of_sum(made))
            return self.of_all_rows(eqn, values, value, summed, out)
        made = made._replace(drawn=all(v.drawn for v in values if v.kind == Kind.ROWS))
        if eqn.primitive.name in primitives.KEEP_GIVEN:  # and no constant is a position
            made = made._replace(given=all(v.given or v.kind == Kind.CONST and v.degree is not None for v in values))
        return made

    def met(self, eqn: Any, values: Sequence[RowValue], linear: bool) -> row_numbers.Met:
        """Returns the role and the pending fault of a result that numbers of all rows are in; see `row_numbers.py`."""
        has_role, kinds = any(v.role is not None for v in values), {v.kind for v in values}
        if Kind.ROWS in kinds and (has_role or Kind.SUMMED in kinds):
            return row_numbers.of_rows(values, linear, self.around)
        may_be_root = Kind.SUMMED in kinds and eqn.primitive.name in primitives.ROOTS
        return row_numbers.of_numbers(eqn, values) if has_role or may_be_root else None, None

    def role_of_sum(self, value: RowValue) -> Role | None:
        """Returns the role of a sum over these rows: that of squares of centred rows is a variance."""
        stacks = [getattr(getattr(eqn, "source_info", None), "name_stack", "") for eqn in self.around]
        is_backward = any("transpose(jvp(" in str(stack) for stack in stacks)  # made by a gradient
        return "gradient" if is_backward else "deviation" if value.role == "spread" else None

    def fault_of_sums(self, eqn: Any, fault: Fault | None, degree: int | None, linear: bool) -> Fault | None:
        """Returns the fault of a result that is made of sums over the rows; `fault` is an operand's, if any has one."""
        if linear:
            return fault
        # A root of a variance may be a BatchNorm's; a logarithm is not, unless in a module.
        lasts = degree is None or eqn.primitive.name in ("log", "log1p") and not is_made_in_module(self.around)
        return Fault("nonlinear", self.at(), lasts) if fault is None else fault._replace(lasts=fault.lasts or lasts)

    def place(self, eqn: Any, values: list[RowValue], rows: list[int], out: Any) -> Any:
        """Returns the `RowValue.place` of a result: which row each entry is made of, or the order of positions."""
        if any(v.kind > Kind.SHARED for v in values):
            return row_pairs.place_of(self.rows, self.around, values, rows, out) if rows or self.loops else 0
        are_places = any(v.degree is None or v.place for v in values)
        return row_pairs.order_of_places(eqn.primitive.name, values) if are_places else 0

    def of_all_rows(self, eqn: Any, values: list[RowValue], value: RowValue, summed: int, out: Any) -> RowValue:
        """Returns a result of rows that has no axis of the rows: a sum over them, a maximum, one picked row."""
        picks = eqn.primitive.name in ("dynamic_slice", "gather")
        if self.loops and picks and not row_pairs.picks_one(self.rows, eqn, values):
            place, fault = row_pairs.of_round(self.rows, eqn, values), lasting([value])
            return values[0]._replace(fault=fault, place=place)
        if eqn.primitive.name == "reshape":  # to a number of rows that is written in the function
            return UNKNOWN
        is_alone = self.rows.prime and not self.rows.other and lasting([value]) is None
        if is_alone and eqn.primitive.name in primitives.PICKS:  # by a loop of Python, whose equations count the rows
            if row_picks.windows_overlap(eqn, values, self.rows, self.windows) and not is_made_in_module(self.around):
                return value._replace(fault=Fault("pairs", self.at(), True))
            return UNKNOWN._replace(picked=row_picks.picked_row(eqn, out, self.rows, value))
        if summed or value.fault is not None:
            return value
        return value._replace(fault=Fault("nonlinear", self.at()), role="as found")

    def is_joined(self, eqn: Any, values: list[RowValue], rows: list[int], out: Any) -> bool:
        """Returns True if a result has the rows of several arrays one after the other, by this equation or before."""
        name = eqn.primitive.name
        if name == "reshape" and self.rows.moves_rows(eqn.invars[0].aval.shape, out.aval.shape):
            return True
        if name == "concatenate" and len(eqn.invars) > 1 and parameter(eqn, "dimension") in rows:
            return True
        if name == "tile" and any(parameter(eqn, "reps")[i] > 1 for i in rows):
            return True
        return name not in primitives.PICKS and any(v.joined for v in values)

    def chosen(self, eqn: Any, which: RowValue, cases: Sequence[RowValue], out: Any) -> RowValue:
        """Returns a choice among cases: it has their degree, and is no mean if a sum over the rows decides."""
        if which.guards:  # it replaces entries that are not finite
            which = which._replace(fault=None, role=None, pending=None) if which.kind == Kind.ROWS else CONST
        degree = None if which.degree is None and which.kind in (Kind.CONST, Kind.ROWS) else sum_degree(cases)
        return self.made(eqn, [*cases, which], degree, out, True)


def _guards(eqn: Any, name: str, values: list[RowValue]) -> bool:
    """Returns True if a result says only whether something is finite: `isfinite(x)`, `x != x`, `x == inf`."""
    if name in primitives.COMPARES:
        return eqn.invars[0] is eqn.invars[1] or abs(values[1].number or 0) > 1e30
    return name == "is_finite" or name in primitives.OF_BOOLS and all(v.guards for v in values)
