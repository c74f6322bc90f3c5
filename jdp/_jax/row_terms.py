"""Tells from a jaxpr what its values are made of: of sums over the rows, of functions of such sums, of pairs of rows.

Each value gets a kind (`Kind`) and a degree, the power of the number of rows `b` that it grows with: a sum over the
rows has degree 1, the number of rows too, their quotient 0. A mean over the rows is linear in sums over them and has
degree 0. What the trace cannot follow is accepted as well: a wrong alarm would stop a loss that is right.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from .jaxprs import _CALLS, _opened, _parameter, axes, inside, parts_of_scan
from .row_values import CONST, UNKNOWN, Fault, Kind, OtherTrace, RowValue


@functools.cache
def _symbol() -> Any:
    return jax.export.symbolic_shape("b")[0]  # one for all, so that JAX's caches of traced functions are hit


@dataclasses.dataclass(frozen=True)
class RowCount:
    """The number of rows of a trace: a symbol `b`, or a multiple of a prime, whose multiples are recognised."""

    prime: int = 0  # 0: a symbol
    other: OtherTrace | None = dataclasses.field(default=None, compare=False)  # that for another number, side by side

    @property
    def size(self) -> Any:
        """The number itself. An even one, because a function may take the rows in pairs."""
        return 2 * self.prime if self.prime else _symbol()

    def power(self, size: Any) -> int | None:
        """Returns p if a size is the number of rows ** p, times a whole number; None if it is not."""
        power = 0
        if self.prime:
            while size and size % self.prime == 0:
                size, power = size // self.prime, power + 1
            return power
        while not isinstance(size, int):
            part = size // _symbol()
            if part * _symbol() != size:
                return None
            size, power = part, power + 1
        return power

    def axes(self, v: Any) -> list[int]:
        """Returns the axes of a variable whose size depends on the number of rows."""
        if self.other is not None and (there := self.other.of(v)) is not None:
            sizes = zip(getattr(v.aval, "shape", ()), getattr(there.aval, "shape", ()), strict=True)
            return [i for i, (one, two) in enumerate(sizes) if one != two]
        return [i for i, size in enumerate(getattr(v.aval, "shape", ())) if self.power(size) != 0]

    def literal(self, v: Any) -> RowValue:
        """Returns what is known of a constant that is written in a jaxpr."""
        there = self.other.of(v) if self.other is not None else None
        return self.constant(v.val) if there is None else self.of_two(v.val, there.val)

    def of_two(self, x: Any, y: Any) -> RowValue:
        """Returns what is known of a constant that is x in this trace, and y in the other."""
        try:
            one, two = abs(float(x)), abs(float(y))
        except (TypeError, ValueError):
            return CONST
        if one == two or not (one and two and math.isfinite(one) and math.isfinite(two)):
            return RowValue(Kind.CONST, 0 if one == two else None, one)
        power = self.power_of_two(one, two)
        if power is None and self.power_of_two(one + 1, two + 1) == 1:  # the divisor of an unbiased variance
            return RowValue(Kind.CONST, 1, fault=Fault("sum", ()))
        return RowValue(Kind.CONST, power, one)

    def power_of_two(self, one: float, two: float) -> int | None:
        """Returns p if a number is in proportion to the number of rows ** p in both traces; None if it is not."""
        power = math.log(one / two) / math.log(self.prime / self.other.prime) if self.other is not None else 0.0
        return round(power) if abs(power - round(power)) < _NEAR else None

    def parts(self, v: Any) -> list[int]:
        """Returns the axes whose size follows the number of rows, and is no multiple of it: b - 1 in `e[1:]`."""
        shape, found = v.aval.shape, self.axes(v)
        if not self.prime:
            return [i for i in found if self.power(shape[i]) is None and not _is_divided(shape[i])]
        there = self.other.of(v) if self.other is not None else None
        if there is None:
            return []
        return [i for i in found if self.power_of_two(shape[i] or 0.5, there.aval.shape[i] or 0.5) is None]

    def constant(self, x: Any) -> RowValue:
        """Returns what is known of a constant of the trace, which may be made of the number of rows."""
        if isinstance(x, jax.Array) and not (self.prime and not x.ndim):  # a number on a device is not fetched
            return CONST
        if jnp.ndim(x):
            made = self.prime and jnp.issubdtype(x.dtype, jnp.inexact) and any(map(self.power, x.shape))
            return UNKNOWN if made else CONST  # weights of the rows, which the function made by their number
        try:
            number = abs(float(x))
        except (TypeError, ValueError):
            return CONST
        power = 0
        if self.prime and number and math.isfinite(number):
            inverse, dtype = 1 / number, jnp.result_type(x)
            near = float(jnp.finfo(dtype).eps) * inverse if jnp.issubdtype(dtype, jnp.floating) else 0.0
            if number == int(number):
                power = self.power(int(number)) or 0
                if not power and self.power(int(number) + 1) == 1:  # the divisor of an unbiased variance
                    return RowValue(Kind.CONST, 1, fault=Fault("sum", ()))
            elif inverse > 1 and abs(inverse - round(inverse)) <= near:
                power = -(self.power(round(inverse)) or 0)
        return RowValue(Kind.CONST, power, number)


def _is_divided(size: Any) -> bool:
    """Returns True for a size that is a part of the number of rows, as where rows are taken in pairs."""
    return any(part in str(size) for part in ("floordiv", "mod"))


_NEAR = 1e-4  # of a power, where numbers are rounded to 32 bits


def _names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Linear in each operand, and in all of them together.
_LINEAR = _names_in(
    "add add_any sub neg concatenate stack pad convert_element_type broadcast_in_dim reshape transpose squeeze "
    "expand_dims rev copy copy_p reduce_precision real imag conj complex slice split cumsum reduce_window_sum "
    "reduce_sum name stop_gradient sharding_constraint mesh_cast pvary pcast reshard optimization_barrier device_put"
)
_SUMS = _names_in("reduce_sum cumsum reduce_window_sum")
_EACH = _names_in("optimization_barrier device_put pvary pcast sort")  # of several operands each one for itself
_PRODUCTS = _names_in("mul div dot_general conv_general_dilated")
# Linear in the operands at these places, and not in the others, which are indices.
_INDEXED = {
    "gather": [0],
    "dynamic_slice": [0],
    "dynamic_update_slice": [0, 1],
    "scatter": [0, 2],
    "scatter_add": [0, 2],
    "select_and_scatter_add": [0],
    "select_and_gather_add": [0],
}
_CUMULATIVE = _names_in("cumsum cumprod cummax cummin cumlogsumexp")
_PICKS = _names_in("slice dynamic_slice gather split")
_OF_BOOLS = _names_in("not and or xor reduce_and reduce_or")
_BOUNDED = _OF_BOOLS | _names_in("eq ne lt le gt ge is_finite sign argmax argmin")
_KEEP_DEGREE = _names_in(
    "abs max min clamp reduce_max reduce_min reduce_window_max reduce_window_min cummax cummin top_k"
)
_COMPARES = _names_in("eq ne lt le gt ge")
_DRAWS = _names_in("random_bits random_split random_gamma rng_bit_generator rng_uniform threefry2x32")
_POWERS = _names_in("integer_pow square")
_NONLINEAR = (
    _BOUNDED
    | _KEEP_DEGREE
    | _POWERS
    | _names_in(
        "exp exp2 log log1p expm1 sqrt rsqrt cbrt pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh "
        "atanh logistic erf erfc erf_inv lgamma digamma floor ceil round rem nextafter reduce_prod cumprod "
        "cumlogsumexp cholesky eigh svd lu qr triangular_solve scatter_mul scatter_max scatter_min"
    )
)
_SMALL = 1e-4  # a constant that is added to a divisor, so that it is not 0


def _degree(values: Sequence[RowValue], small: float = _SMALL) -> int | None:
    """Returns the degree of a sum; a small constant does not count."""
    degrees = {v.degree for v in values if v.number is None or v.number > small}
    return (degrees or {0}).pop() if len(degrees) < 2 else None


def _add_degrees(*degrees: int | None) -> int | None:
    known = [d for d in degrees if d is not None]
    return sum(known) if len(known) == len(degrees) else None


def _lasting(values: Sequence[RowValue]) -> Fault | None:
    return next((v.fault for v in values if v.fault is not None and v.fault.lasts), None)


def _either(a: RowValue, b: RowValue) -> RowValue:
    """Returns what is known of a value that is one of the two."""
    if Kind.UNKNOWN in (a.kind, b.kind):
        return UNKNOWN
    fault = _lasting([a, b]) or a.fault or b.fault
    return RowValue(
        max(a.kind, b.kind), _degree([a, b]), a.number if a.number == b.number else None, fault, a.at or b.at
    )


def _is_as(a: RowValue, b: RowValue) -> bool:
    known = [(v.kind, v.degree, v.number, v.fault and v.fault.lasts) for v in (a, b)]
    return known[0] == known[1]


class Reader:
    """Reads jaxprs, the outer one and those inside of it."""

    def __init__(self, rows: RowCount) -> None:
        self.rows = rows
        self.around: list[Any] = []  # the equations that it is in, the outermost first

    def at(self) -> tuple[Any, ...]:
        return tuple(self.around[::-1])

    def read(self, jaxpr: Any, inputs: Sequence[RowValue]) -> list[RowValue]:
        """Returns what is known of a jaxpr's outputs, from what is known of its inputs."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), _opened(jaxpr)
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update(zip(getattr(jaxpr, "constvars", ()), map(self.rows.constant, consts), strict=False))

        def value(v: Any) -> RowValue:
            return self.rows.literal(v) if hasattr(v, "val") else known.get(v, CONST)

        for eqn in jaxpr.eqns:
            self.around.append(eqn)
            known.update(zip(eqn.outvars, self.equation(eqn, [value(v) for v in eqn.invars]), strict=True))
            self.around.pop()
        return [value(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: list[RowValue]) -> list[RowValue]:
        name, outs = eqn.primitive.name.replace("-", "_"), eqn.outvars
        is_collective = "axes" in eqn.params or "axis_name" in eqn.params
        if is_collective and not all(hasattr(axis, "__index__") for axis in axes(eqn)):  # numpy's integers from vmap
            joined = functools.reduce(_either, values, CONST)
            return [_collected(v) for v in (values if len(values) == len(outs) else [joined] * len(outs))]
        if name in _CALLS:
            found = self.read(next(inside(eqn)), values)
            return [self.variance(v) for v in found] if eqn.params.get("name") == "_var" else found
        if name in ("cond", "scan", "while"):
            return {"cond": self.cond, "scan": self.scan, "while": self.loop}[name](eqn, values)
        if name == "select_n":
            return [self.chosen(eqn, values[0], values[1:], outs[0])]
        if name == "sort":
            values = [self.sorted(eqn, i, v) for i, v in enumerate(values)]
        if name in _EACH:
            linear = name != "sort"  # which moves all by the first
            each = [([v] if linear else values, v.degree, out) for v, out in zip(values, outs, strict=True)]
            return [self.made(eqn, of, degree, out, linear) for of, degree, out in each]
        return [self.one(eqn, name, values, out) for out in outs]

    def sorted(self, eqn: Any, i: int, value: RowValue) -> RowValue:
        """Returns what is known of an operand that is sorted."""
        if value.drawn:
            return UNKNOWN  # a drawn order: in each row it picks as many entries as in any other
        along_rows = _parameter(eqn, "dimension") in self.rows.axes(eqn.invars[i])
        is_key = not i and jnp.issubdtype(eqn.invars[i].aval.dtype, jnp.floating)  # the others, and ids, only move
        if value.kind == Kind.ROWS and along_rows and is_key:
            return value._replace(fault=_lasting([value]) or Fault("pairs", self.at(), True))
        return value

    def variance(self, value: RowValue) -> RowValue:
        """Returns what is known of a variance: over the rows it is no mean, unless it meets rows as in a BatchNorm."""
        is_of_rows = value.kind == Kind.SUMMED and value.fault is None
        return value._replace(fault=Fault("nonlinear", self.at())) if is_of_rows else value

    def one(self, eqn: Any, name: str, values: list[RowValue], out: Any) -> RowValue:
        """Returns an output of an equation without a jaxpr inside."""
        if name in ("dim_as_value", "iota"):
            return self.number_of_rows(eqn, name, out)
        if name in _DRAWS and self.rows.axes(out):
            return RowValue(Kind.ROWS, drawn=True)  # another number for each row, as if it had come with the batch
        summed = self.summed(eqn, name, out)
        if self.sums_part(eqn, name):
            values = [v._replace(fault=v.fault or Fault("sum", self.at(), True)) for v in values]
        if name in _CUMULATIVE and values[0].kind == Kind.ROWS and _parameter(eqn, "axis") in self.rows.axes(out):
            if jnp.issubdtype(out.aval.dtype, jnp.floating):  # of integers it is a place, as among an expert's rows
                values = [values[0]._replace(fault=_lasting(values) or Fault("pairs", self.at(), True))]
        elif name in _CUMULATIVE and values[0].kind == Kind.CONST and _parameter(eqn, "axis") in self.rows.axes(out):
            return RowValue(Kind.CONST, None, at=self.at())  # places among the rows
        if name in _LINEAR:
            degree, degrees = _degree(values), {v.degree for v in values}
            if degree is None and None not in degrees and all(v.kind <= Kind.SUMMED for v in values):
                degree = max(d for d in degrees if d is not None)  # m.sum() + 1 grows as m.sum() does
                values = [values[0]._replace(fault=values[0].fault or Fault("sum", self.at())), *values[1:]]
            made = self.made(eqn, values, _add_degrees(degree, summed), out, True, summed)
            return made._replace(root=None, guards=False) if name in _SUMS else made
        if name in _PRODUCTS:
            return self.product(eqn, name, values, summed, out)
        if name in _INDEXED:
            first, *added = [values[i] for i in _INDEXED[name]]
            if name == "scatter_add" and summed and values[1].kind == Kind.ROWS:
                added = [v._replace(kind=max(v.kind, Kind.ROWS)) for v in added]  # rows choose where 1 is added
            linear = all(v.kind != Kind.SUMMED for i, v in enumerate(values) if i not in _INDEXED[name])
            degree = _degree([first, *(v._replace(degree=_add_degrees(v.degree, summed)) for v in added)])
            return self.made(eqn, values, degree, out, linear, summed)
        degree = self.degree(eqn, name, values, out)
        if name in _POWERS and values[0].root is not None and eqn.params.get("y", 2) == 2:
            return values[0].root  # jnp.linalg.norm(x) ** 2
        if name == "top_k" and values[0].kind == Kind.ROWS and values[0].fault is None and eqn.invars[0].aval.ndim == 1:
            values = [values[0]._replace(fault=Fault("nonlinear", self.at(), True))]  # the largest of all rows
        made = self.made(eqn, values, degree, out, False)
        if name not in _NONLINEAR and made.kind > Kind.SHARED and (made.kind != Kind.ROWS or degree is None):
            return UNKNOWN
        return made._replace(guards=_guards(eqn, name, values), root=values[0] if name == "sqrt" else None)

    def degree(self, eqn: Any, name: str, values: list[RowValue], out: Any) -> int | None:
        """Returns the degree of what a nonlinear equation makes."""
        degrees = {v.degree for v in values}
        if name in _BOUNDED:
            # If one side grows with the number of rows (a place, a sum) and the other does not, so does the answer.
            # Rows may be compared with a number of them, as an expert's rows with its capacity.
            of_rows = any(v.kind == Kind.ROWS for v in values)
            sides = [v for v in values if v.number != 0 and not (of_rows and v.kind == Kind.CONST)]
            return 0 if name not in _COMPARES or not self.rows.axes(out) or len({v.degree for v in sides}) < 2 else None
        if name in _KEEP_DEGREE:
            return _degree(values, 1)
        if name in _POWERS and None not in degrees:
            return values[0].degree * eqn.params.get("y", 2)
        if name in ("sqrt", "rsqrt") and not (values[0].degree or 0) % 2 and None not in degrees:
            return (values[0].degree or 0) // (-2 if name == "rsqrt" else 2)
        return 0 if degrees <= {0} else None

    def number_of_rows(self, eqn: Any, name: str, out: Any) -> RowValue:
        """Returns what an equation makes of the number of rows."""
        if name == "dim_as_value":
            size, at = _parameter(eqn, "dim"), self.at()
            if _is_divided(size):
                return UNKNOWN
            if self.rows.power(size) is None and self.rows.power(size + 1) == 1:  # the divisor of an unbiased variance
                return RowValue(Kind.CONST, 1, fault=Fault("sum", at), at=at)
            return RowValue(Kind.CONST, self.rows.power(size), at=at)
        counts_rows = _parameter(eqn, "dimension") in self.rows.axes(out)
        return RowValue(Kind.CONST, None, at=self.at()) if counts_rows else CONST

    def product(self, eqn: Any, name: str, values: list[RowValue], summed: int, out: Any) -> RowValue:
        a, b = values
        if name == "mul" and 0 in (a.number, b.number) and not self.rows.axes(out):
            return RowValue(Kind.CONST, number=0.0)  # 0 * x, as a loss has it for parameters that it does not use
        linear = (a.kind, b.kind) != (Kind.SUMMED, Kind.SUMMED)
        degree = _add_degrees(a.degree, b.degree, summed)
        if name == "div":
            degree = None if a.degree is None or b.degree is None else a.degree - b.degree
            # Rows that are divided by a mean over the rows, as in a BatchNorm, are rows; by a sum they are parts of a
            # ratio.
            meets = a.kind == Kind.ROWS and b.degree == 0
            if b.kind == Kind.SUMMED and not meets and _lasting(values) is None:
                before = [v.fault for v in values if v.fault is not None and v.fault.kind == "ratio"]
                lasts = a.kind == Kind.ROWS or 0 not in (b.degree, degree)
                ratio = [*before, Fault("ratio", self.at())][0]._replace(lasts=lasts)
                a, b = a._replace(fault=ratio), b._replace(fault=ratio)
        if Kind.ROWS in (a.kind, b.kind):
            lasting = [v.fault and v.fault._replace(lasts=v.fault.lasts or v.kind == Kind.CONST) for v in (a, b)]
            a, b = a._replace(fault=lasting[0]), b._replace(fault=lasting[1])
        if summed and self.rows.axes(out) and Kind.ROWS in (a.kind, b.kind) and _lasting(values) is None:
            return UNKNOWN  # a constant matrix of rows times rows, as a permutation is
        counts = [v.degree == 1 and v.fault is None and v.kind in (Kind.CONST, Kind.SUMMED) for v in values]
        return self.made(eqn, [a, b], degree, out, linear, summed)._replace(meant=name == "mul" and any(counts))

    def made(
        self, eqn: Any, values: list[RowValue], degree: int | None, out: Any, linear: bool, summed: int = 0
    ) -> RowValue:
        """Returns what an equation makes of values. `linear`: in all that is summed; `summed`: over so many axes."""
        kind, rows = max((v.kind for v in values), default=Kind.CONST), self.rows.axes(out)
        if kind == Kind.UNKNOWN:
            return UNKNOWN
        name = eqn.primitive.name
        joins = name == "concatenate" and len(eqn.invars) > 1 and _parameter(eqn, "dimension") in rows
        joins = joins or name == "tile" and any(_parameter(eqn, "reps")[i] > 1 for i in rows)
        if name == "reshape":
            joined = self.rows_come_last(eqn.invars[0].aval.shape, out.aval.shape)
        else:
            joined = joins or name not in _PICKS and any(v.joined for v in values)
        pairs = kind == Kind.ROWS and len(rows) > 1
        whole = kind == Kind.ROWS and not rows and any(map(self.rows.axes, eqn.invars))  # no axis of the rows is left
        if len(values) == 1 and linear and not (summed or pairs or whole):
            return values[0]._replace(joined=joined)
        at = next((v.at for v in values if v.degree == degree and v.at), None) or (self.at() if degree != 0 else ())
        if kind <= Kind.SHARED:
            fault = next((v.fault for v in values if v.fault is not None), None)
            return RowValue(kind, degree, 0.0 if linear and all(v.number == 0 for v in values) else None, fault, at)
        fault = _lasting(values)
        if kind == Kind.SUMMED:
            fault = fault or next((v.fault for v in values if v.fault is not None), None)
            if not linear:
                fault = fault or Fault("nonlinear", self.at())
                fault = fault._replace(lasts=fault.lasts or degree is None)  # as a logarithm of a sum, not of a mean
            return RowValue(kind, degree, None, fault, at)
        # Rows meet what was made of all of them, as in a BatchNorm: that is no offence.
        fault = fault or (Fault("pairs", self.at(), True) if pairs else None)
        if whole:
            # To a number of rows that is written in the function; or one of the rows that a loop of Python takes.
            if name == "reshape" or self.rows.prime and name in _PICKS:
                return UNKNOWN
            fault = fault or (None if summed else Fault("nonlinear", self.at()))
        drawn = all(v.drawn for v in values if v.kind == Kind.ROWS)
        if whole:
            return RowValue(Kind.SUMMED, degree, None, fault, at)
        return RowValue(kind, degree, None, fault, at, drawn=drawn, joined=joined)

    def summed(self, eqn: Any, name: str, out: Any) -> int:
        """Returns over how many axes of the rows an equation sums."""
        if name == "reduce_sum":
            return len({*_parameter(eqn, "axes")} & {*self.rows.axes(eqn.invars[0])})
        if name == "dot_general":
            (contracted, _), _ = _parameter(eqn, "dimension_numbers")
            return len({*contracted} & {*self.rows.axes(eqn.invars[0])})
        if name in ("conv_general_dilated", "scatter_add"):
            return int(any(map(self.rows.axes, eqn.invars)) and not self.rows.axes(out))
        return 0

    def rows_come_last(self, before: Sequence[Any], after: Sequence[Any]) -> bool:
        """Returns True if a reshape joins the axis of the rows with one before it: `(2, b)` becomes `(2 * b,)`."""
        places = [[i for i, size in enumerate(shape) if self.rows.power(size) != 0] for shape in (before, after)]
        if [len(found) for found in places] != [1, 1]:
            return False
        (i,), (j,) = places
        return math.prod(before[:i]) != math.prod(after[:j])

    def sums_part(self, eqn: Any, name: str) -> bool:
        """Returns True if an equation sums over an axis that is longer or shorter than the rows: `e[1:].sum()`."""
        parts = self.rows.parts(eqn.invars[0]) if name == "reduce_sum" else []
        return bool(parts) and not {*_parameter(eqn, "axes")}.isdisjoint(parts)

    def chosen(self, eqn: Any, which: RowValue, cases: Sequence[RowValue], out: Any) -> RowValue:
        """Returns one of the cases."""
        if which.guards:  # a number in place of what is not finite
            which = which._replace(fault=None) if which.kind == Kind.ROWS else CONST
        degree = None if which.degree is None and which.kind in (Kind.CONST, Kind.ROWS) else _degree(cases)
        return self.made(eqn, [*cases, which], degree, out, True)

    def cond(self, eqn: Any, values: list[RowValue]) -> list[RowValue]:
        branches = [self.read(branch, values[1:]) for branch in _parameter(eqn, "branches")]
        return [self.chosen(eqn, values[0], v, out) for *v, out in zip(*branches, eqn.outvars, strict=True)]

    def scan(self, eqn: Any, values: list[RowValue]) -> list[RowValue]:
        by_rows = self.rows.power(_parameter(eqn, "length")) != 0
        consts, carry, xs = parts_of_scan(eqn, values)
        after, ys = self.rounds(_parameter(eqn, "jaxpr"), consts, carry, xs, by_rows)
        # What an iteration over the rows seems to make of all rows, it may make of the one at its index.
        return [*after, *(UNKNOWN if by_rows and y.kind == Kind.SUMMED else y for y in ys)]

    def rounds(
        self, body: Any, consts: list[RowValue], carry: list[RowValue], xs: list[RowValue], by_rows: bool
    ) -> tuple[list[RowValue], list[RowValue]]:
        """Returns the carry of a loop and the other outputs; `by_rows`: the number of rounds depends on the rows."""
        while True:  # each round less is known of the carry, or it is the last
            outputs = self.read(body, [*consts, *carry, *xs])
            after = [_either(a, b) for a, b in zip(carry, outputs, strict=False)]
            if by_rows:
                after = [a if _is_as(a, b) else _repeated(a) for a, b in zip(after, carry, strict=True)]
            if all(map(_is_as, after, carry)):
                return after, outputs[len(carry) :]
            carry = after

    def loop(self, eqn: Any, values: list[RowValue]) -> list[RowValue]:
        first = _parameter(eqn, "cond_nconsts")
        last = first + _parameter(eqn, "body_nconsts")
        cond, consts, carry = values[:first], values[first:last], values[last:]
        body = _parameter(eqn, "body_jaxpr")
        after, _ = self.rounds(body, consts, carry, [], False)
        (goes_on,) = self.read(_parameter(eqn, "cond_jaxpr"), [*cond, *after])
        if goes_on.kind > Kind.SHARED or any(v.kind == Kind.CONST and v.degree != 0 for v in [*cond, *carry]):
            after, _ = self.rounds(body, consts, carry, [], True)
        return after


def _repeated(value: RowValue) -> RowValue:
    """Returns what is known of a value that was made again for each row."""
    return UNKNOWN if value.kind > Kind.SHARED else value._replace(degree=None, number=None)


def _collected(value: RowValue) -> RowValue:
    """Returns what a collective makes of a value."""
    if value.kind in (Kind.SUMMED, Kind.SHARED) and value.degree == 0:
        return RowValue(Kind.SHARED)
    return value if value.kind == Kind.CONST else UNKNOWN


def _guards(eqn: Any, name: str, values: list[RowValue]) -> bool:
    """Returns True if a result tells that something is finite: `isfinite(x)`, `x != x`, `x == inf`, or made of such."""
    if name in _COMPARES:
        return eqn.invars[0] is eqn.invars[1] or (values[1].number or 0) > 1e30
    return name == "is_finite" or name in _OF_BOOLS and all(v.guards for v in values)
