"""The rules for rows that a loop of Python picks one after the other, by number (`for row in x`).

`Picked` has the numbers of the rows that a value is made of. A row may be combined with itself. All of them may be
added up, which makes a sum over the rows, or stacked, which makes rows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import row_primitives as primitives
from .callers import is_made_in
from .jaxprs import parameter
from .row_pairs import TURNED, place_in_turn
from .row_values import UNKNOWN, Fault, Kind, RowCount, RowValue

Picked = frozenset[int]
"""The numbers of the rows that a value is made of, each picked by its number; empty where they are not known."""
STACKED, NUMBER = -1, -2
"""Two marks among these numbers. STACKED: the value has an axis that keeps picked rows apart. NUMBER: it depends on a
number made of all rows."""


def picked_row(eqn: Any, out: Any, rows: RowCount, before: RowValue) -> Picked:
    """Returns the row that an equation picks by its number; none if it picks otherwise.

    If an axis has several entries for each row, these are neighbours, or (as in `concatenate([x, z])`) far apart.
    """
    (axis, *others) = rows.axes(eqn.invars[0]) or [None]
    if axis is None or others or is_made_in(eqn, "associative_scan"):
        return frozenset()
    if eqn.primitive.name in ("unstack", "split"):
        sizes = parameter(eqn, "sizes") if eqn.primitive.name == "split" else [1] * len(eqn.outvars)
        start = sum(sizes[: eqn.outvars.index(out)])
        end = start + sizes[eqn.outvars.index(out)]
    elif eqn.primitive.name == "slice":
        start, end = (parameter(eqn, name)[axis] for name in ("start_indices", "limit_indices"))
    else:
        return frozenset()
    each = eqn.invars[0].aval.shape[axis] // rows.size
    row = start if before.joined else start // max(each, 1)
    row, shift = (rows.size - 1 - row, 0) if before.place == TURNED else (row, before.place)
    return frozenset([(row + shift) % rows.size] if end == start + 1 and isinstance(shift, int) else [])


def windows_overlap(
    eqn: Any, values: Sequence[RowValue], rows: RowCount, windows: dict[tuple[Any, int], set[int]]
) -> bool:
    """Returns True for a slice in a loop over windows of rows that overlap: `x[i : i + 2]` for each i.

    No replica has a window with rows of two chunks. `windows` holds the starts of the earlier windows, by the shape of
    the array and their length. A few windows are accepted, because a function may pick particular rows.
    """
    axis = next(iter(rows.axes(eqn.invars[0])), 0)
    if eqn.primitive.name == "slice":
        start, end = (parameter(eqn, name)[axis] for name in ("start_indices", "limit_indices"))
    elif eqn.primitive.name == "dynamic_slice" and (number := values[1 + axis].number) is not None:
        start, end = int(number), int(number) + parameter(eqn, "slice_sizes")[axis]
    else:
        return False
    starts = windows.setdefault((eqn.invars[0].aval.shape, end - start), set())
    starts.add(start)
    overlaps = any(0 < abs(start - other) < end - start for other in starts)
    return overlaps and len(starts) > rows.size // (end - start)


def of_picked(
    eqn: Any, values: Sequence[RowValue], linear: bool, degree: int | None, count: RowCount, at: tuple[Any, ...]
) -> RowValue:
    """Returns what is known of a value that is made of rows picked one by one.

    If one of them is combined with all rows, or with another picked row, other than by a sum, the value is made of
    pairs of rows. All of them, stacked in their order, are rows again. All of them, added up, are a sum over the rows.
    """
    name, picked = eqn.primitive.name, [v.picked for v in values if v.kind == Kind.UNKNOWN]
    rows, of_rows = count.axes(eqn.outvars[0]), any(v.kind == Kind.ROWS for v in values)
    fault = next(filter(None, (v.lasting for v in values)), None)
    if None in picked:
        return UNKNOWN
    order = [row for one in picked for row in one or () if len(one or ()) == 1]
    if name == "stack" and len(picked) == len(order) and sorted(order) == [*range(count.size)]:
        return RowValue(Kind.ROWS, place=place_in_turn(order))
    if fault is not None:
        return RowValue(Kind.ROWS if rows else Kind.SUMMED, None, fault=fault)
    if name == "concatenate" and rows and of_rows:  # as jnp.roll writes it
        return RowValue(Kind.ROWS, place=next(iter(picked[0] or ()), 0) if values[0].kind == Kind.UNKNOWN else 0)
    is_alone = all(one and STACKED not in one for one in picked)
    if is_alone and of_rows and name in primitives.ELEMENTWISE | primitives.LAYERS:
        return RowValue(Kind.ROWS, fault=Fault("row", at, True))
    together = _together(eqn, values, rows, count.axes(eqn.invars[0]))
    is_product = name in primitives.PRODUCTS and len(picked) > 1
    is_one_row = not rows and STACKED not in together
    if len(together) > 1 and is_one_row and (is_product or not linear and name in primitives.NONLINEAR):
        return RowValue(Kind.SUMMED, None, fault=Fault("pairs", at, True))
    if len(picked) > 1 and degree is not None:
        is_plain = name in primitives.ADDS and is_alone and degree == 0
        are_whole = all(are_all(one, count) for one in picked)
        is_sum = is_plain and are_all(together, count) and not any(are_all(one, count) for one in picked)
        is_known = is_plain or name in ("concatenate", "stack") or name in primitives.ADDS and are_whole
        degree = degree + is_sum if is_known else None
    if STACKED in together and not rows and count.axes(eqn.invars[0]) == [] and name in primitives.MAY_SUM:
        degree = None  # of some picked rows
    return UNKNOWN._replace(picked=together, degree=degree, at=at if degree else ())


def are_all(picked: Picked | None, count: RowCount) -> bool:
    """Returns True if all rows were picked."""
    return bool(picked) and len(picked or ()) >= count.size and {*range(count.size)} <= {*picked}


def _together(eqn: Any, values: Sequence[RowValue], rows: Sequence[int], rows_before: Sequence[int]) -> Picked:
    """Returns the rows that a result is made of; `rows` are its axes of rows, `rows_before` the first operand's."""
    name, picked = eqn.primitive.name, [v.picked for v in values if v.kind == Kind.UNKNOWN]
    is_stack = name in ("concatenate", "stack")  # JAX concatenates many arrays in parts of 16
    places = name in primitives.PLACES or is_stack or name == "select_n" and bool(rows)
    is_lost = bool(rows_before) if name in primitives.PICKS else places and not rows and not is_stack
    if is_lost or not all(picked):
        return frozenset()
    more = [STACKED] * places + [NUMBER] * any(v.kind == Kind.SUMMED for v in values)
    return Picked().union(*filter(None, picked), more)
