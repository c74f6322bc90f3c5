"""Tells which rows meet rows of other places, as in `v - jnp.roll(v, 1)`, and what is left of pairs of all rows.

A value knows of which rows its entries are: of those at their places (0), of those so many places further on, of those
at the same places from the end (TURNED), or of the row of a loop's round (ROUND); None if that is lost. Where two
values meet that differ in this, rows meet other rows.

A loop of Python picks row after row, by their numbers: `Picked` has those that a value is made of. One may meet itself,
and all of them may be added up, or stacked.

Which matrices of pairs of rows are left with each row alone: their diagonal, as in `jnp.diag(x @ z.T)`.

A matrix has an entry for each pair of rows. If each of its entries is made of these two rows and of nothing else, the
diagonal has an entry for each row, made of that row. `jnp.diagonal` is known by its name. `jnp.trace` and others have a
mask: where the number of the row is that of the column, an entry is kept, and all others are zero; then they sum over
the rows or over the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import row_primitives as primitives
from .callers import is_made_in, is_made_in_module
from .jaxprs import parameter
from .row_values import UNKNOWN, Entries, Fault, Kind, RowCount, RowValue

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


SEVERAL, TURNED = "several", "turned"


def place_of(rows: RowCount, around: Sequence[Any], values: Sequence[RowValue], along: Sequence[int]) -> Any:
    """Returns of which rows the entries of a result are, as `RowValue.place` has it; `along` are its axes of the rows.

    `around` has the equations that it is in, the outermost first, and then itself. What a module moves is its own.
    """
    eqn, places = around[-1], _places(values)
    before = SEVERAL if len(places) > 1 else next(iter(places), 0)
    after = _moved(rows, eqn, values, along, before)
    return before if after != before and (is_made_in(eqn, "associative_scan") or is_made_in_module(around)) else after


def _places(values: Sequence[RowValue]) -> set[Any]:
    return {v.place for v in values if v.kind == Kind.ROWS and not v.drawn and v.place is not None}


def _moved(rows: RowCount, eqn: Any, values: Sequence[RowValue], along: Sequence[int], place: Any) -> Any:
    """Returns of which rows the entries are after an equation, and `place` is where they were before."""
    name, by = eqn.primitive.name, 0
    if name == "rev" and {*parameter(eqn, "dimensions")} & {*along}:
        return 0 if place == TURNED else TURNED
    if name == "concatenate" and parameter(eqn, "dimension") in along:
        if values[0].kind == Kind.ROWS:
            return values[0].place
        by = -eqn.invars[0].aval.shape[parameter(eqn, "dimension")]
    elif name == "pad":
        by = -sum(parameter(eqn, "padding_config")[i][0] for i in along)
    elif name == "slice":
        strides = parameter(eqn, "strides") or [1] * eqn.invars[0].aval.ndim
        by = sum(parameter(eqn, "start_indices")[i] // strides[i] for i in along)
    elif name in ("gather", "dynamic_slice"):
        by = _start(rows, eqn, values)
    return place if isinstance(place, str) else by if by is None else rows.remainder(place + by)


def _start(rows: RowCount, eqn: Any, values: Sequence[RowValue]) -> int | None:
    """Returns where a window of the rows starts that is picked by a number, as `x[1:]` of a symbolic number of rows."""
    operand, sizes = eqn.invars[0], parameter(eqn, "slice_sizes")
    for i in rows.axes(operand):
        by = values[1] if eqn.primitive.name == "gather" else values[1 + i]
        if rows.power(sizes[i]) != 0 and sizes[i] != operand.aval.shape[i] and by.degree == 0:
            return by.number if by.number is None else int(by.number)
    return 0


def meets_elsewhere(eqn: Any, values: Sequence[RowValue], linear: bool) -> bool:
    """Returns True if an equation joins rows with those of other places, entry by entry, and more than adds them."""
    name, places = eqn.primitive.name, _places(values)
    if len(places) < 2 and SEVERAL not in places or name not in primitives.ELEMENTWISE | primitives.LAYERS:
        return False
    is_product = name in primitives.PRODUCTS and all(v.kind == Kind.ROWS for v in values)
    return not linear or is_product or name == "select_n"


Picked = frozenset[int]
"""The numbers of the rows that a value is made of, each picked by its number; empty where they are not known."""
STACKED, NUMBER = -1, -2
"""Two more of these numbers: the value has an axis of such rows, where each is alone; and a number of all rows."""


def picked_row(eqn: Any, out: Any, rows: RowCount, before: RowValue) -> Picked:
    """Returns the row that an equation picks by its number; none where it picks otherwise.

    Of an axis with several entries for each row, these come one after the other, or, in `concatenate([x, z])`, apart.
    """
    (axis, *others) = rows.axes(eqn.invars[0]) or [None]
    if axis is None or others or is_made_in(eqn, "associative_scan"):
        return frozenset()
    if eqn.primitive.name == "unstack":
        start = eqn.outvars.index(out)
        end = start + 1
    elif eqn.primitive.name == "slice":
        start, end = (parameter(eqn, name)[axis] for name in ("start_indices", "limit_indices"))
    else:
        return frozenset()
    each = eqn.invars[0].aval.shape[axis] // rows.size
    row = start if before.joined else start // max(each, 1)
    is_known = end == start + 1 and isinstance(before.place, int)
    return frozenset([(row + before.place) % rows.size] if is_known else [])


def of_picked(eqn: Any, values: Sequence[RowValue], linear: bool, count: RowCount, at: tuple[Any, ...]) -> RowValue:
    """Returns what is known of a value that is made of rows picked one by one.

    Where one of them meets all rows, or another one, in what is not their sum, it is made of pairs of rows. All of
    them, stacked in their order, are rows again.
    """
    name, picked = eqn.primitive.name, [v.picked for v in values if v.kind == Kind.UNKNOWN]
    rows, of_rows = count.axes(eqn.outvars[0]), any(v.kind == Kind.ROWS for v in values)
    lost = next((v.lasting for v in values if v.lasting is not None), None)
    if None in picked:
        return UNKNOWN
    if name == "stack" and picked == [{i} for i in range(count.size)]:
        return RowValue(Kind.ROWS)
    if lost is not None:
        return RowValue(Kind.ROWS if rows else Kind.SUMMED, None, fault=lost)
    if name == "concatenate" and rows and of_rows:  # as jnp.roll writes it
        return RowValue(Kind.ROWS, place=next(iter(picked[0] or ()), 0) if values[0].kind == Kind.UNKNOWN else 0)
    is_alone = all(one and STACKED not in one for one in picked)
    if is_alone and of_rows and name in primitives.ELEMENTWISE | primitives.LAYERS:
        return RowValue(Kind.ROWS, fault=Fault("row", at, True))
    together = _together(eqn, values, rows, count.axes(eqn.invars[0]))
    is_product = name in primitives.PRODUCTS and len(picked) > 1
    if len(together) > 1 and not rows and (is_product or not linear and name in primitives.NONLINEAR):
        return RowValue(Kind.SUMMED, None, fault=Fault("pairs", at, True))
    return UNKNOWN._replace(picked=together)


def _together(eqn: Any, values: Sequence[RowValue], rows: Sequence[int], rows_before: Sequence[int]) -> Picked:
    """Returns the rows that a result is made of; `rows` are its axes of rows, `rows_before` the first operand's."""
    name, picked = eqn.primitive.name, [v.picked for v in values if v.kind == Kind.UNKNOWN]
    places = name in primitives.PLACES or name in ("concatenate", "stack") or name == "select_n" and bool(rows)
    is_lost = bool(rows_before) if name in primitives.PICKS else places and not rows
    if is_lost or not all(picked):
        return frozenset()
    more = [STACKED] * places + [NUMBER] * any(v.kind == Kind.SUMMED for v in values)
    return Picked().union(*filter(None, picked), more)


def diagonal(eqn: Any, value: RowValue, rows: RowCount) -> RowValue | None:
    """Returns what is known of the result of `jnp.diagonal`, which has a name; None where it is not that of pairs."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    is_diagonal = value.entries == "pairs" and before[:1] * 2 == before and after == before[:1]
    return value._replace(fault=None, entries=None) if is_diagonal else None
