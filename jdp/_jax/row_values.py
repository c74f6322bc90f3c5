"""What is known of a value of a jaxpr: how it is made of the rows, and with which power of their number it grows.

The number of rows is a symbol `b`, or a multiple of a prime, whose multiples are recognised. Two traces side by side
tell more: what differs between them depends on the number of rows, and their quotient tells the power.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .jaxprs import _opened, inside

Blame = Literal["sum", "ratio", "nonlinear", "pairs", "count"]


class Kind(enum.IntEnum):
    """What a value is to the rows. The kind of a result is the largest of its operands, if no rule says otherwise."""

    CONST = 0  # does not depend on the rows
    SHARED = 1  # a mean over the rows that came through a collective: as CONST, but it depends on them
    SUMMED = 2  # made of sums over the rows
    ROWS = 3  # has entries of its own for each row
    UNKNOWN = 4  # cannot be followed


class Fault(NamedTuple):
    """What makes a value no linear function of sums over the rows."""

    kind: Blame
    at: tuple[Any, ...]  # the equation to blame, then those around it
    lasts: bool = False  # also in what it makes together with rows


class RowValue(NamedTuple):
    """What is known of a value."""

    kind: Kind
    degree: int | None = 0  # the power of b; None where it is another function of b
    number: float | None = None  # the value itself, of a constant that is the same everywhere
    fault: Fault | None = None
    at: tuple[Any, ...] = ()  # the equation that made the degree, then those around it
    guards: bool = False  # tells whether something is finite, and nothing else
    root: RowValue | None = None  # whose square root it is
    drawn: bool = False  # made of numbers that were drawn in the function, one or more for each row
    joined: bool = False  # has the rows of several arrays one after the other, along their axis
    meant: bool = False  # was multiplied by a number of rows, or by another sum over them: a mean of means is meant


CONST, UNKNOWN = RowValue(Kind.CONST), RowValue(Kind.UNKNOWN)


class OtherTrace:
    """The jaxpr of the same function for another number of rows, `2 * prime`: the variables and literals of both."""

    def __init__(self, one: Any, other: Any, prime: int) -> None:
        """Raises a `ValueError` where the two have different equations."""
        self.prime = prime
        self._there = {id(v): w for v, w in _pairs_of(one, other)}

    def of(self, v: Any) -> Any:
        """Returns the variable or literal in the place of this one; None if it is not known."""
        return self._there.get(id(v))


def _pairs_of(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    one, other = _opened(one), _opened(other)
    for name in ("invars", "constvars", "outvars"):
        yield from zip(getattr(one, name, ()), getattr(other, name, ()), strict=True)
    for e, f in zip(one.eqns, other.eqns, strict=True):
        if e.primitive is not f.primitive:
            raise ValueError(f"{e.primitive} is {f.primitive} for another number of rows")
        yield from zip(e.invars, f.invars, strict=True)
        yield from zip(e.outvars, f.outvars, strict=True)
        for inner in zip(inside(e), inside(f), strict=True):
            yield from _pairs_of(*inner)
