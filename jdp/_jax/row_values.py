"""How a value of a jaxpr depends on the rows: how it is made of them, and with which power of their number it grows.

`RowCount` tells which axes have rows, and what an equation does along them. The number of rows is a symbol `b`, or a
multiple of a prime, whose multiples are recognised. Two traces side by side tell more: what differs between them
depends on the number of rows, and their quotient tells the power.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from . import row_primitives as primitives
from .callers import source_line
from .jaxprs import equations, first, inside, is_literal, opened, parameter

Blame = Literal[
    "sum", "part", "ratio", "nonlinear", "pairs", "count", "row", "step", "number", "loop", "order", "added"
]
Entries = Literal["row", "column", "diagonal", "pairs"]
"""What each entry of a matrix of pairs of rows is: the number of its row or column, zero off the diagonal, or made of
its two rows and nothing else."""

RoleOfRows = Literal["met", "normed", "by number", "shifted", "scaled", "centred", "spread", "layered"]
Role = RoleOfRows | Literal["as found", "deviation", "inverse", "gradient"]
"""What rows have become that met a number of all rows, or what such a number is.

Rows that have only "met" it are accepted, whatever follows. Others are "normed", divided by a deviation for each
feature, or "by number", divided by one for all features; "shifted" by one number that was added to them; "scaled" by
one number, as exponentials of shifted rows are; "centred" by means; "spread", as squares of centred rows are; "layered"
if a layer has followed, so that a nonlinear function of them is the model's.

A number is "as found", such as the largest of all rows, a "deviation", which may divide rows, its "inverse", or made of
the "gradient" of parameters.
"""


class Kind(enum.IntEnum):
    """How a value depends on the rows. A result is of the largest kind of its operands, if no rule says otherwise."""

    CONST = 0  # does not depend on the rows
    SHARED = 1  # a mean over the rows that a collective has averaged or added up: as CONST, but it depends on them
    SUMMED = 2  # made of sums over the rows
    ROWS = 3  # has entries of its own for each row
    UNKNOWN = 4  # cannot be followed


class Fault(NamedTuple):
    """Why a value is not a linear function of sums over the rows, or not of the kind that is expected."""

    kind: Blame
    at: tuple[Any, ...]  # the equation to blame, then those around it
    lasts: bool = False  # whether it remains when the value is combined with rows

    @property
    def line(self) -> str:
        """The user's line to blame, as "file.py:12", or ""."""
        return next(filter(None, map(source_line, self.at)), "")

    @property
    def operation(self) -> str:
        """The name of the operation to blame, or ""."""
        if not self.at:
            return ""
        name = self.at[0].primitive.name
        if name in ("jit", "pjit"):  # of a function of JAX's own, as `_std`
            name = str(self.at[0].params.get("name", name)).lstrip("_")
        return {"dim_as_value": "shape", "dot_general": "dot"}.get(name, name.removeprefix("reduce_"))


class Share(NamedTuple):
    """What is known of a value that is made of a share of the rows, such as the first half of them."""

    treated: tuple[frozenset[int], ...]  # hashes of what was done to the first share, and of what was done to others
    fault: Fault  # where it was taken


class RowValue(NamedTuple):
    """How a value depends on the rows."""

    kind: Kind
    degree: int | None = 0  # the power of b that it is in proportion to; None: another function of b, or a position
    number: float | None = None  # the value itself, of a constant that is the same everywhere
    fault: Fault | None = None
    at: tuple[Any, ...] = ()  # the equation that made the degree, then those around it
    guards: bool = False  # says whether something is finite, and nothing else
    root: RowValue | None = None  # the value that it is the square root of
    drawn: bool = False  # made of random numbers that were drawn in the function, one or more for each row
    given: bool = False  # made of the row alone, as it came with the batch, and not of its position
    share: Share | None = None
    joined: bool = False  # has the rows of several arrays one after the other, along their axis
    place: Any = 0  # which row each entry is made of, 0 for the one at its own position; see `row_pairs.py`
    is_number: bool = False  # one number, made of all rows
    role: Role | None = None  # what rows have become that met a number of all rows, or what such a number is
    pending: Fault | None = None  # of rows that met such a number: a fault, unless what follows suits their role
    padded: bool = False  # has zeros before or after its rows, which add nothing to a sum
    picked: frozenset[int] | None = None  # made of these rows, picked one by one; empty if it is not known which
    entries: Entries | None = None  # of a matrix with an entry for each pair of rows
    added: Fault | None = None  # of a sum over the replicas: the fault of adding up those of all replicas
    meant: Kind | None = None  # multiplied by a count of this kind (`mean * n`): a mean of means is meant

    @property
    def lasting(self) -> Fault | None:
        """The fault, if it lasts."""
        return self.fault if self.fault is not None and self.fault.lasts else None

    @property
    def of_share(self) -> Fault | None:
        """The fault of a value that is made of a share of the rows, if the others are not treated in the same way."""
        return self.share.fault if self.share is not None and self.share.treated[0] != self.share.treated[1] else None

    @property
    def if_added_up(self) -> Fault | None:
        """The fault of a sum over these rows."""
        is_exact = self.role in ("shifted", "centred", "layered")
        is_fault = self.pending is not None and (self.pending.lasts or not is_exact)
        return self.lasting or (self.pending if is_fault else None)


ROUND = "round"
"""The place of the row that a round of a loop over the rows takes."""
CONST, UNKNOWN = RowValue(Kind.CONST), RowValue(Kind.UNKNOWN)


def prime_power(size: int, prime: int) -> int:
    """Returns how often the prime divides a size."""
    power = 0
    while size and size % prime == 0:
        size, power = size // prime, power + 1
    return power


def constant(x: Any, prime: int) -> RowValue:
    """Returns what is known of a constant; a multiple of the prime counts as made of the number of rows (0: none)."""
    if isinstance(x, jax.Array) and x.ndim:  # only single numbers are fetched from a device
        return CONST
    if jnp.ndim(x):
        if prime and jnp.ndim(x) == 1 and x.size < 9 and jnp.issubdtype(x.dtype, jnp.integer):
            return UNKNOWN if any(prime_power(int(size), prime) for size in x) else CONST  # a shape
        made = prime and jnp.issubdtype(x.dtype, jnp.inexact) and any(prime_power(size, prime) for size in x.shape)
        if not made:
            return CONST
        # The function made it by the number of rows: one number in all entries, or weights of the rows.
        return UNKNOWN if (number := uniform(x)) is None else constant(number, prime)
    try:
        number = float(x)
    except (TypeError, ValueError, RuntimeError):  # a tracer or a key; a transfer guard; an array that was deleted
        return CONST
    power, size = 0, abs(number)
    if prime and number and math.isfinite(number):
        inverse, dtype = 1 / size, jnp.result_type(x)
        near = float(jnp.finfo(dtype).eps) * inverse if jnp.issubdtype(dtype, jnp.floating) else 0.0
        if size == int(size):
            power = prime_power(int(size), prime)
            if not power and prime_power(int(size) + 1, prime) == 1:  # the divisor of an unbiased variance
                return RowValue(Kind.CONST, 1, fault=Fault("sum", ()))
        elif inverse > 1 and abs(inverse - round(inverse)) <= near:
            power = -prime_power(round(inverse), prime)
    return RowValue(Kind.CONST, power, number)


def uniform(x: Any) -> Any:
    """Returns the number that all entries of an array are; None if they differ."""
    if not x.size:
        return None
    number = x.flat[0]
    return number if ((x == number) | (x != x) if number != number else x == number).all() else None


def collected(eqn: Any, value: RowValue, at: tuple[Any, ...]) -> RowValue:
    """Returns what is known of a value after a collective."""
    if value.kind == Kind.CONST:
        return value
    is_mean = value.kind in (Kind.SUMMED, Kind.SHARED) and value.degree == 0
    added = Fault("added", at) if eqn.primitive.name.startswith("psum") else None
    return (RowValue(Kind.SHARED) if is_mean else UNKNOWN)._replace(added=added)


_ORDER: tuple[Role | None, ...] = ("layered", "shifted", "centred", "by number", "spread", "scaled")


def furthest(values: Sequence[RowValue]) -> RowValue | None:
    """Returns the value with a pending fault whose role allows least to follow; None if no fault is pending."""
    waits = [v for v in values if v.pending is not None]
    return max(waits, key=lambda v: (_ORDER.index(v.role), v.pending is not None and v.pending.lasts), default=None)


def either(a: RowValue, b: RowValue) -> RowValue:
    """Returns what is known of a value that is one of the two."""
    if Kind.UNKNOWN in (a.kind, b.kind):
        return UNKNOWN
    degrees = {v.degree for v in (a, b) if v.number != 0} or {0}
    places = {v.place for v in (a, b) if v.kind == Kind.ROWS} or {0}
    met = furthest([a, b]) or (a if a.role is not None else b)
    return RowValue(
        max(a.kind, b.kind),
        degrees.pop() if len(degrees) == 1 else None,
        a.number if a.number == b.number else None,
        a.lasting or b.lasting or a.fault or b.fault,
        a.at or b.at,
        share=a.share or b.share,
        joined=a.joined or b.joined,
        place=places.pop() if len(places) == 1 else None,
        role=met.role,
        pending=met.pending,
    )


def cuts_off(eqn: Any, out: Any) -> bool:
    """Returns True if a conversion makes integers (or booleans) of floats."""
    dtypes = eqn.invars[0].aval.dtype, out.aval.dtype
    return jnp.issubdtype(dtypes[0], jnp.inexact) and not jnp.issubdtype(dtypes[1], jnp.inexact)


def is_padded(name: str, values: Sequence[RowValue]) -> bool:
    """Returns True if an equation of this name keeps the zeros around its padded operands."""
    padded = [v.padded for v in values]
    if name in ("mul", "and", "dot_general"):
        return any(padded)
    if name == "div":
        return padded[0]
    return name in primitives.KEEP_ZERO and all(padded)


_NEAR = 1e-4  # how far a power may be from a whole number, because numbers are rounded to 32 bits


def _pairs_of(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what stands at the same place in two jaxprs: constants, variables, literals and equations."""
    yield from zip(getattr(one, "consts", ()), getattr(other, "consts", ()), strict=True)
    one, other = opened(one), opened(other)
    for name in ("invars", "constvars", "outvars"):
        yield from zip(getattr(one, name, ()), getattr(other, name, ()), strict=True)
    for e, f in zip(one.eqns, other.eqns, strict=True):
        if e.primitive is not f.primitive:
            raise ValueError(f"{e.primitive} is {f.primitive} for another number of rows")
        yield e, f
        yield from zip(e.invars, f.invars, strict=True)
        yield from zip(e.outvars, f.outvars, strict=True)
        for inner in zip(inside(e), inside(f), strict=True):
            yield from _pairs_of(*inner)


PAIRS, GROUPS = 2, 48
"""What a prime is multiplied by: a function may take the rows in pairs, or in groups of 3, 4, 6, 8, 12 or 16."""

_SYMBOL: Any = jax.export.symbolic_shape("b")[0]  # one for all, so that JAX's caches of traced functions are hit


@dataclasses.dataclass(frozen=True)
class RowCount:
    """The number of rows of a trace: a symbol `b`, or a multiple of a prime, whose multiples are recognised.

    A trace may be read together with another one, for the same multiple of another prime.
    """

    prime: int = 0  # 0: a symbol
    times: int = PAIRS
    other: int = dataclasses.field(default=0, compare=False)  # the prime of the other trace; 0: there is none
    # For each variable, literal, constant or equation of this jaxpr, by its id: its counterpart in the other one.
    there: Mapping[int, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def paired(self, one: Any, other: Any, prime: int) -> RowCount:
        """Returns this number, and what in `other` matches what in `one`; raises a `ValueError` if equations differ."""
        return dataclasses.replace(self, other=prime, there={id(v): w for v, w in _pairs_of(one, other)})

    @property
    def size(self) -> Any:
        """The number of rows: the symbol, or a multiple of the prime."""
        return self.times * self.prime if self.prime else _SYMBOL

    def power(self, size: Any) -> int | None:
        """Returns the power of `b`, or of the prime, that divides a size; None if it is made of `b` otherwise."""
        if self.prime:
            return prime_power(size, self.prime)
        if size is _SYMBOL:  # as most are; arithmetic with symbols takes long
            return 1
        power = 0
        while not isinstance(size, int):
            part = size // _SYMBOL
            if part * _SYMBOL != size:
                return None
            size, power = part, power + 1
        return power

    def remainder(self, size: Any) -> Any:
        """Returns a size without the multiples of the number of rows in it: -1 of `b - 1`."""
        if self.prime:
            return size % self.size
        if not isinstance(size, int) and self.power(size):
            return 0
        return next((x for x in (size, size - self.size, size - 2 * self.size) if isinstance(x, int)), size)

    def axes(self, v: Any) -> list[int]:
        """Returns the axes of a variable whose size depends on the number of rows."""
        if (there := self.there.get(id(v))) is not None:
            sizes = zip(getattr(v.aval, "shape", ()), getattr(there.aval, "shape", ()), strict=True)
            return [i for i, (one, two) in enumerate(sizes) if one != two]
        return [i for i, size in enumerate(getattr(v.aval, "shape", ())) if self.power(size) != 0]

    def literal(self, v: Any) -> RowValue:
        """Returns what is known of a constant that is written in a jaxpr."""
        there = self.there.get(id(v))
        return constant(v.val, self.prime) if there is None else self.number(v.val, there.val)

    def counts_rounds(self, eqn: Any) -> bool:
        """Returns True if the number of rounds of a scan depends on the number of rows."""
        length = parameter(eqn, "length")
        if (there := self.there.get(id(eqn))) is not None:
            return bool(length != parameter(there, "length"))
        return self.power(length) != 0

    def is_read_in(self, jaxpr: Any) -> bool:
        """Returns True if a jaxpr has the number of rows as a literal, or computes it: `i < len(x)`."""
        literals = [v for eqn in equations(jaxpr) for v in eqn.invars if is_literal(v) and not v.aval.shape]
        return first(jaxpr, "dim_as_value") is not None or any(self.literal(v).degree != 0 for v in literals)

    def partial_axes(self, v: Any) -> list[int]:
        """Returns the axes whose size depends on the number of rows, but is no multiple of it: b - 1 in `e[1:]`."""
        shape, found = v.aval.shape, self.axes(v)
        if not self.prime:
            return [i for i in found if self.power(shape[i]) is None and not is_divided(shape[i])]
        if (there := self.there.get(id(v))) is None:
            return []
        return [i for i in found if self._exponent(shape[i] or 0.5, there.aval.shape[i] or 0.5) is None]

    def summed(self, eqn: Any, name: str, out: Any) -> int:
        """Returns over how many axes of the rows an equation sums."""
        if name == "reduce_sum":
            return len({*parameter(eqn, "axes")} & {*self.axes(eqn.invars[0])})
        if name == "dot_general":
            (contracted, _), _ = parameter(eqn, "dimension_numbers")
            return len({*contracted} & {*self.axes(eqn.invars[0])})
        if name in ("conv_general_dilated", "scatter_add", "scatter_sub"):
            return int(any(map(self.axes, eqn.invars)) and not self.axes(out))
        return 0

    def slides_over_rows(self, eqn: Any, name: str) -> bool:
        """Returns True if the window of a convolution, of a pooling or of an FFT holds several rows at a time.

        The decomposition of a matrix combines its rows, too, unless there is a matrix for each row.
        """
        if name in primitives.DECOMPOSITIONS:
            return any(i >= eqn.invars[0].aval.ndim - 2 for i in self.axes(eqn.invars[0]))
        if name.startswith("reduce_window"):
            return any(parameter(eqn, "window_dimensions")[i] != 1 for i in self.axes(eqn.invars[0]))
        if name == "fft":  # along the last axes
            first_axis = eqn.invars[0].aval.ndim - len(parameter(eqn, "fft_lengths"))
            return any(i >= first_axis for i in self.axes(eqn.invars[0]))
        dims, (inputs, window) = parameter(eqn, "dimension_numbers"), eqn.invars
        places = zip(dims.lhs_spec[2:], dims.rhs_spec[2:], strict=True)
        return any(i in self.axes(inputs) and window.aval.shape[j] != 1 for i, j in places)

    def takes_some(self, eqn: Any) -> bool:
        """Returns True if a slice takes some of the rows."""
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return any(before[i] != after[i] for i in self.axes(eqn.invars[0]))

    def takes_share(self, eqn: Any, name: str) -> bool:
        """Returns True if an equation takes a share of neighbouring rows, as `v[: len(v) // 2]` does."""
        if name not in ("slice", "split", "dynamic_slice", "gather") or name == "slice" and self.step(eqn) != 1:
            return False
        before, along = eqn.invars[0].aval.shape, self.axes(eqn.invars[0])
        if name == "split":
            taken = parameter(eqn, "sizes") if parameter(eqn, "axis") in along else ()
        else:
            after = eqn.outvars[0].aval.shape if name == "slice" else parameter(eqn, "slice_sizes")
            taken = [after[i] for i in along if before[i] != after[i]]
        return any(self.is_share(size) for size in taken)

    def is_share(self, size: Any) -> bool:
        """Returns True for the size of a share of the rows, such as `b // 2`, and for multiples of it."""
        if self.prime:
            return size % self.size != 0 and prime_power(int(size), self.prime) > 0
        return "floordiv" in str(size)

    def step(self, eqn: Any) -> int:
        """Returns the step of a slice in rows: 2 for `v[::2]`, if the axis has one entry for each row."""
        strides, shape = parameter(eqn, "strides") or (), eqn.invars[0].aval.shape
        along = [i for i in self.axes(eqn.invars[0]) if strides and self.power(shape[i]) == 1]
        return math.lcm(*(strides[i] // math.gcd(strides[i], int(shape[i] // self.size)) for i in along))

    def moves_rows(self, before: Sequence[Any], after: Sequence[Any]) -> bool:
        """Returns True if a reshape changes how many entries precede the axis of the rows: `(2, b)` to `(2 * b,)`."""
        places = [[i for i, size in enumerate(shape) if self.power(size) != 0] for shape in (before, after)]
        if [len(found) for found in places] != [1, 1]:
            return False
        (i,), (j,) = places
        return math.prod(before[:i]) != math.prod(after[:j])

    def pads(self, eqn: Any, values: Sequence[RowValue]) -> bool:
        """Returns True if a `pad` only adds zeros, before or after all rows: up to a multiple of 8, for example."""
        if values[1].number != 0 or self.partial_axes(eqn.invars[0]):
            return False
        return all(low >= 0 and high >= 0 for low, high, _ in parameter(eqn, "padding_config"))

    def sums_part(self, eqn: Any, name: str) -> bool:
        """Returns True if an equation sums over an axis that is no multiple of the rows: `e[1:].sum()`."""
        over = parameter(eqn, "axes") if name == "reduce_sum" else parameter(eqn, "dimension_numbers")[0][0]
        return not {*over}.isdisjoint(self.partial_axes(eqn.invars[0]))

    def number(self, x: Any, y: Any) -> RowValue:
        """Returns what is known of a number that is x in this trace, and y in the other."""
        try:
            one, two = abs(float(x)), abs(float(y))
        except (TypeError, ValueError):
            return CONST
        if one == two or not (one and two and math.isfinite(one) and math.isfinite(two)):
            return RowValue(Kind.CONST, 0 if one == two else None, float(x))
        power = self._exponent(one, two)
        if power is None and self._exponent(one + 1, two + 1) == 1:  # the divisor of an unbiased variance
            return RowValue(Kind.CONST, 1, fault=Fault("sum", ()))
        is_root = any(self._exponent(one**k, two**k) is not None for k in (2, 3, 4))
        if power is None and not is_root and not self._is_linear(one, two):
            # Another function of the number of rows; or a number that Python draws, or counts up.
            return RowValue(Kind.UNKNOWN, None, float(x))
        return RowValue(Kind.CONST, power, float(x))

    def _is_linear(self, one: float, two: float) -> bool:
        """Returns True if a number, or its inverse, may be `k * b + c` with whole k and c, or `b * (b - 1) / 2`.

        In the two traces these differ by a multiple of what the primes differ by.
        """
        step = self.prime - self.other
        for a, b in ((one, two), (1 / one, 1 / two)):
            if max(abs(a - round(a)), abs(b - round(b))) < _NEAR * max(a, b) and (round(a) - round(b)) % step == 0:
                return True
        return False

    def _exponent(self, one: float, two: float) -> int | None:
        """Returns p if a number is in proportion to the number of rows ** p in both traces; None if it is not."""
        power = math.log(one / two) / math.log(self.prime / self.other)
        return round(power) if abs(power - round(power)) < _NEAR else None


def is_divided(size: Any) -> bool:
    """Returns True for a size that is a quotient or remainder of the number of rows: `b // 2`, of rows in pairs."""
    return any(part in str(size) for part in ("floordiv", "mod"))
