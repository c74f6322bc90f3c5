"""Tells which matrices of pairs of rows are left with each row alone: their diagonal, as in `jnp.diag(x @ z.T)`.

A matrix has an entry for each pair of rows. If each of its entries is made of these two rows and of nothing else, the
diagonal has an entry for each row, made of that row. `jnp.diagonal` is known by its name. `jnp.trace` and others have a
mask: where the number of the row is that of the column, an entry is kept, and all others are zero; then they sum over
the rows or over the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import row_primitives as primitives
from .jaxprs import parameter
from .row_values import UNKNOWN, Entries, Kind, RowCount, RowValue

_OF_PAIRS = primitives.ELEMENTWISE | {"broadcast_in_dim", "transpose", "dot_general", "reduce_sum"}
_KEEP = frozenset(["convert_element_type", "copy", "neg", "transpose"])  # zeros, and what is on the diagonal


def of_pairs(rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue) -> RowValue:
    """Returns what is known of a result, by what is known of the entries of its operands for each pair of rows."""
    if name in primitives.PICKS and values[0].entries == "pairs" and made.kind == Kind.SUMMED:
        return UNKNOWN  # one pair of rows, which may be a row and itself
    if len(rows.axes(eqn.outvars[0])) != 2:
        return made._replace(entries=None)
    kept = _kept(name, values)
    if kept is not None:
        is_alone = kept.entries in ("pairs", "diagonal") or kept.lasting is None
        return made._replace(entries="diagonal", fault=None if is_alone else made.fault)
    return made._replace(entries=_entries(rows, eqn, name, values, made))


def _kept(name: str, values: Sequence[RowValue]) -> RowValue | None:
    """Returns the operand whose diagonal a result is, with zeros elsewhere; None if it is something else."""
    if name in _KEEP and values[0].entries == "diagonal":
        return values[0]
    if name == "mul" and "diagonal" in (values[0].entries, values[1].entries):
        return values[values[0].entries == "diagonal"]
    if name == "select_n" and values[0].entries == "diagonal" and values[1].number == 0:
        return values[2]
    return None


def _entries(rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue) -> Entries | None:
    """Returns what the entries of a result are, which has two axes of the rows, and is none that was masked."""
    places: set[Entries] = {v.entries for v in values if v.entries == "row" or v.entries == "column"}
    if name == "iota":
        first, second = rows.axes(eqn.outvars[0])
        along = parameter(eqn, "dimension")
        return "row" if along == first else "column" if along == second else None
    if name in primitives.ADDS and len(places) == 1 and any(v.number == 0 for v in values):
        return places.pop()
    if name == "eq" and len(places) == 2:
        return "diagonal"
    sums_pairs = name in ("dot_general", "reduce_sum") and rows.summed(eqn, name, eqn.outvars[0])
    if made.kind != Kind.ROWS or name not in _OF_PAIRS or sums_pairs:
        return None
    return "pairs" if all(v.entries == "pairs" or v.lasting is None for v in values) else None


def diagonal(eqn: Any, value: RowValue, rows: RowCount) -> RowValue | None:
    """Returns what is known of the result of `jnp.diagonal`, which has a name; None where it is not that of pairs."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    is_diagonal = value.entries == "pairs" and before[:1] * 2 == before and after == before[:1]
    return value._replace(fault=None, entries=None) if is_diagonal else None
