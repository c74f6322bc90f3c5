"""Traces a function for any number of rows, and tells how the shapes and values of its results depend on the rows.

The trace is for a symbolic number of rows `b`. A function that needs the number itself, for `int(len(x))` or `b // 2`,
cannot be traced so. Then it is traced for two numbers of rows that are multiples of different primes: a size or a
constant that is a multiple of the prime counts as made from the number of rows. The two traces are read side by side.
If their equations differ, each is read alone, and only faults that both have count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.core import Tracer

from .jaxprs import equations, opened, reached
from .row_backward import backward_of, is_linear
from .row_picks import NUMBER, are_all
from .row_terms import Reader
from .row_values import PAIRS, UNKNOWN, Fault, Kind, RowCount, RowValue

PRIMES = (23, 31)
TermKind = Literal["mean", "sum", "count", "rows", "vector"]


def trace(
    fn: Callable[..., Any], operands: Any, cut: Sequence[int | None], prime: int = 0, times: int = PAIRS
) -> Traced | None:
    """Traces `fn(*operands)` with `b` rows, or `times * prime`; returns None if that fails.

    `cut` has the axis of the rows of each leaf of `operands`, or None.
    """
    rows = RowCount(prime, times=times)
    leaves, treedef = jax.tree.flatten(operands)
    try:
        with warnings.catch_warnings(action="ignore"):  # the user sees those of the real trace
            specs = [_spec(x, axis, rows) for x, axis in zip(leaves, cut, strict=True)]
            jaxpr = jax.make_jaxpr(fn)(*jax.tree.unflatten(treedef, specs))
    except Exception:  # the user's own function may raise anything
        return None
    return Traced(jaxpr, tuple(axis is not None for axis in cut), rows)


def _spec(x: Any, axis: int | None, rows: RowCount) -> Any:
    shape, dtype, more = of_any_rows(x, axis)
    return jax.ShapeDtypeStruct(tuple(rows.size if size is None else size for size in shape), dtype, **dict(more))


def of_any_rows(x: Any, axis: int | None) -> tuple[tuple[int | None, ...], Any, tuple[tuple[str, Any], ...]]:
    """Returns an operand's shape, with None for its rows, its dtype, and what else its type has."""
    aval = jax.typeof(x)
    shape = tuple(None if i == axis else size for i, size in enumerate(aval.shape))
    return shape, aval.dtype, tuple((name, y) for name in ("weak_type", "vma") if (y := getattr(aval, name, None)))


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function's jaxpr for a given number of rows; `inputs` says which of its flat inputs have rows."""

    jaxpr: Any
    inputs: tuple[bool, ...]
    rows: RowCount

    def paired_with(self, other: Traced) -> Traced:
        """Returns this trace together with that for another number of rows; alone, if their equations differ."""
        try:
            rows = self.rows.paired(self.jaxpr, other.jaxpr, other.rows.prime)
        except ValueError:  # the function does something else for that number
            return self
        return dataclasses.replace(self, rows=rows)

    @property
    def holds_tracers(self) -> bool:
        """Whether the function has closed over tracers of a program around it."""
        return any(isinstance(x, Tracer) for x in self.jaxpr.consts)

    def axis(self, i: int) -> int | str | None:
        """Returns the one axis of output i that is in proportion to b; None if no axis depends on b; else why not."""
        out = opened(self.jaxpr).outvars[i]
        found = self.rows.axes(out)
        if not found:
            return None
        if len(found) == 1 and self.rows.power(out.aval.shape[found[0]]) == 1:
            return found[0]
        shape = ", ".join(map(str, out.aval.shape)) + ("," if out.aval.ndim == 1 else "")
        return f"its shape is ({shape}) for b rows, which is not in proportion along one axis"

    def depends(self, i: int) -> bool:
        """Returns True if output i depends on the values of the inputs with rows."""
        return self._values[i].kind > Kind.CONST

    def is_joined(self, i: int) -> bool:
        """Returns True if output i has the rows of several arrays one after the other, along the axis of the rows.

        The replicas' outputs are joined along that axis, so those of all rows would come in another order.
        """
        shape = self.jaxpr.out_avals[i].shape
        return self._values[i].joined and any(self.rows.power(n) == 1 and n != self.rows.size for n in shape)

    def is_followed(self, i: int) -> bool:
        """Returns True if output i can be followed, and so can all backward passes of the function's own."""
        passes = self._read[1].backward.values()
        return self._values[i].kind != Kind.UNKNOWN and all(backward is not None for _, backward in passes)

    def grows(self, i: int) -> bool:
        """Returns True if output i depends on the number of rows, but not on their values."""
        return self._values[i].kind == Kind.CONST and self._values[i].degree != 0

    def faults(self, kind: TermKind, at: Sequence[int]) -> list[Fault | None]:
        """Returns for each output why it is not of this kind; None for one that is, or that cannot be followed.

        A "mean" is a scalar, the mean over the rows. A "sum" is added up over the replicas. A "count" is a total and a
        count (two outputs), which are added up and then divided. "rows" have an entry for each row. So has a "vector",
        but only its mean is taken.
        """
        values, found = [self._values[i] for i in at], []
        is_meant = kind == "count" and values[0].meant == values[-1].kind and values[0].degree in (1, None)
        is_unknown = any(v.kind == Kind.UNKNOWN and not self._is_of_each_row(v) for v in values)
        is_shared = any(v.kind == Kind.SHARED and not (v.share and v.of_share) for v in values)

        # A total and a count that are both sums over the replicas have the quotient of all rows.
        is_added = kind == "sum" or kind == "count" and not all(v.added for v in values)
        for i, value in enumerate(values):
            fault = value.fault or value.share and value.of_share
            is_accepted = is_shared or fault is None and is_unknown
            if kind in ("rows", "vector"):
                fault = value.fault if kind == "vector" and value.kind == Kind.SUMMED else value.if_added_up
                if fault is not None and fault.kind == "sum" and value.degree is None:
                    fault = fault._replace(kind="count")  # of positions, as jnp.linspace divides them by b - 1
                if fault is None and kind == "rows":
                    fault = value.pending  # right in a mean alone
                if fault is None and value.kind == Kind.SUMMED and kind == "rows":
                    fault = Fault("pairs", value.at)  # one number of all rows, in each of them
                if fault is None and value.degree != 0:
                    fault = Fault("count", value.at)
                if fault is None and kind == "rows" and value.kind == Kind.ROWS and value.place not in (0, None):
                    fault = Fault("order", value.at)
            elif fault is None and value.degree != (kind != "mean"):
                is_place = bool(value.at) and value.at[0].primitive.name == "iota"
                fault = Fault("count" if is_place else "sum", value.at)
            if value.added is not None and (is_added or kind == "mean" and value.kind == Kind.SHARED):
                found.append(value.added)
            elif fault is None or is_accepted or value.number == 0 or (is_meant and not i):
                found.append(None)
            else:
                found.append(fault)
        return [None] * len(found) if any(found) and self._are_written(at) else found

    def _is_of_each_row(self, value: RowValue) -> bool:
        """Returns True if a loop of Python has made a value of all rows, one by one, and its degree is known."""
        return (
            bool(self.rows.prime)
            and value.degree is not None
            and are_all(value.picked, self.rows)
            and NUMBER not in (value.picked or ())
        )

    def _are_written(self, at: Sequence[int]) -> bool:
        """Returns True if these outputs are constants, such as a 1 that each replica adds to count the replicas."""
        depend = reached(self.jaxpr, [True] * len(self.inputs))
        return not any(depend[i] or self.grows(i) for i in at)

    @property
    def backward(self) -> Fault | None:
        """The fault of the first backward pass of the function's own that combines several rows, or None."""
        mixed = self._read[1].mixed
        return Fault("pairs", mixed[0]) if mixed else None

    @property
    def step(self) -> tuple[int, Fault | None]:
        """The least common multiple of the steps of slices such as `v[::2]` (1 without any), and the first fault."""
        found = [(step, Fault("step", at)) for step, at in self._read[1].steps if step > 1]
        return math.lcm(*(step for step, _ in found)), next((fault for _, fault in found), None)

    @property
    def _values(self) -> list[RowValue]:
        return self._read[0]

    @functools.cached_property
    def _read(self) -> tuple[list[RowValue], Reader]:
        inputs = [RowValue(Kind.ROWS, given=True) if rows else RowValue(Kind.CONST) for rows in self.inputs]
        reader = Reader(self.rows)
        try:
            return reader.read(self.jaxpr, inputs), reader
        except NotImplementedError:  # this version of JAX has other equations than those known here
            return [UNKNOWN] * len(self.jaxpr.out_avals), reader


def is_backward_linear(jaxpr: Any) -> bool:
    """Returns False if a backward pass of the function's own (`jax.custom_vjp`) is not linear, as one that clips."""
    calls = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "custom_vjp_call"]
    passes = [(eqn, backward_of(eqn)) for eqn in calls]
    read = Reader(RowCount()).read
    return all(backward is None or is_linear(eqn, backward, read) for eqn, backward in passes)
