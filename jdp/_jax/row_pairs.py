"""The rules for rows that are combined with rows at other positions (`v - jnp.roll(v, 1)`), and for pairs of all rows.

`RowValue.place` says which row the entry at position i is made of. If two values with different places are combined,
rows are combined with other rows. An array of positions, such as `arange(b)`, has the place 0, TURNED or ORDERED.

    0, k           row i, row i + k
    TURNED         row i from the end; (TURNED, k) if it is shifted by k
    ORDERED        a row in an order that is computed from the positions
    SORTED         a row in the order of integers or booleans of the rows, as after a sort by class
    ROUND          the row that a round of a loop takes; "round turned", for example, if the loop begins at the end
    BLOCKS         the halves of the rows are side by side, as after `x.reshape(2, -1)`; "blocks from 1": one of them
    SEVERAL, None  rows at several places; not known

A matrix may have an entry for each pair of rows. If each entry is made of its two rows and of nothing else, the
diagonal has an entry for each row, made of that row alone, as in `jnp.diag(x @ z.T)`. `jnp.diagonal` is recognised by
its name. `jnp.trace` and others use a mask: an entry is kept if the number of its row is that of its column, and all
others are zero; then they sum over the rows or over the columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import row_primitives as primitives
from .callers import is_made_in, is_made_in_module
from .jaxprs import parameter
from .row_values import CONST, ROUND, UNKNOWN, Entries, Fault, Kind, RowCount, RowValue, Share, constant, uniform

_OF_PAIRS = primitives.ELEMENTWISE | {"broadcast_in_dim", "transpose", "dot_general", "reduce_sum"}
_KEEP = frozenset(["convert_element_type", "copy", "neg", "transpose"])  # keep zeros off the diagonal, and its entries


def of_pairs(rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue) -> RowValue:
    """Returns a result with its `RowValue.entries`, which it has if there is an entry for each pair of rows."""
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
    """Returns the operand of which a result has the diagonal, and zeros elsewhere; None if it is something else."""
    if name in _KEEP and values[0].entries == "diagonal":
        return values[0]
    if name == "mul" and "diagonal" in (values[0].entries, values[1].entries):
        return values[1] if values[0].entries == "diagonal" else values[0]
    if name == "select_n" and values[0].entries == "diagonal" and values[1].number == 0:
        return values[2]
    return None


def _entries(rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue) -> Entries | None:
    """Returns what the entries are of a result with two axes of the rows, if `_kept` returns None for it."""
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
    if made.kind != Kind.ROWS or made.place == SEVERAL or name not in _OF_PAIRS or sums_pairs:
        return None
    return "pairs" if all(v.entries == "pairs" or v.lasting is None for v in values) else None


SEVERAL, TURNED, ORDERED, SORTED, NEGATED, BLOCKS = "several", "turned", "ordered", "sorted", "negated", "blocks"


def place_of(rows: RowCount, around: Sequence[Any], values: Sequence[RowValue], along: Sequence[int], out: Any) -> Any:
    """Returns the `RowValue.place` of a result; `along` are the result's axes of the rows.

    `around` has the equations that its equation is in, the outermost first, and then the equation. If a module of a
    model moves rows, they count as unmoved.
    """
    eqn, places = around[-1], _places(values)
    is_moved = eqn.primitive.name == "gather" or eqn.primitive.name.replace("-", "_") in primitives.SCATTERS
    if is_moved and values[1].kind == Kind.ROWS and not {*rows.axes(eqn.invars[0])}.isdisjoint(_indexed(eqn)):
        return values[1].place if eqn.primitive.name == "gather" and values[0].place == 0 else 0  # 0: also if not known
    before = SEVERAL if len(places) > 1 else next(iter(places), 0)
    after = _moved(rows, eqn, values, along, before, out)
    return before if after != before and (is_made_in(eqn, "associative_scan") or is_made_in_module(around)) else after


def order_of_places(name: str, values: Sequence[RowValue]) -> Any:
    """Returns the order of an array of positions: 0 for `arange(b)`, TURNED if it counts from the end, else ORDERED.

    NEGATED are the positions times -1, to which JAX adds `b - 1` when it counts from the end.

    A choice between positions and other numbers counts as the positions: JAX makes one to resolve negative indices.
    """
    are_places = [v.degree is None or v.place != 0 for v in values]
    places = [v.place for v, is_place in zip(values, are_places, strict=True) if is_place]
    others = [v for v, is_place in zip(values, are_places, strict=True) if not is_place]
    if not places:
        return 0
    numbers = [v.number for v in others]
    if name in _KEEP_PLACES or name in _NEUTRAL and numbers == [_NEUTRAL[name]]:  # 0 + 1 * places
        return places[0]
    if name == "neg" or name == "mul" and numbers == [-1]:
        return NEGATED if places[0] in (0, ROUND) else ORDERED
    if name == "select_n":
        return next((place for place in places[: len(values) - 1] if place != ORDERED), ORDERED)
    if name == "gather" and are_places == [True, True]:  # positions of positions
        return {0: places[0], ROUND: places[0], TURNED: _from_the_end(places[0])}.get(places[1], ORDERED)
    from_last = name in primitives.ADDS and any(v.degree == 1 and v.fault is not None for v in others)  # b - 1
    if from_last and places == [NEGATED]:
        return TURNED
    return _from_the_end(places[0] if places[0] != ROUND else 0) if name == "rev" or from_last else ORDERED


_NEUTRAL = {"add": 0, "mul": 1}
_KEEP_PLACES = _KEEP - {"neg"} | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "concatenate", "stack"}


def _from_the_end(place: Any) -> Any:
    return {0: TURNED, TURNED: 0}.get(place, ORDERED)


def place_in_turn(order: list[int]) -> Any:
    """Returns the `RowValue.place` of rows that are stacked in this order of their numbers."""
    return 0 if order == sorted(order) else TURNED if order == sorted(order, reverse=True) else ORDERED


def constant_of(rows: RowCount, v: Any, x: Any) -> RowValue:
    """Returns what is known of a constant; an array with different numbers for the rows was made of positions.

    Only two traces side by side show that an axis of it follows the number of rows. If it has each position once, as
    `np.arange(b)` does, it has a place.
    """
    along = rows.axes(v)
    if not along or isinstance(x, jax.Array):
        return CONST if jnp.ndim(x) and jnp.issubdtype(x.dtype, jnp.inexact) else constant(x, rows.prime)
    if (number := uniform(x)) is not None:
        other = uniform(rows.there[id(x)]) if id(x) in rows.there else None
        return constant(number, rows.prime) if other is None else rows.number(number, other)
    is_real, by_row = x.dtype.kind != "c", [x.shape[i] == rows.size for i in along]
    if len(along) == 2 and is_real and all(by_row):  # a mask of pairs: np.eye(b), np.triu(np.ones((b, b)))
        is_diagonal = x.ndim == 2 and all(i == j for i, j in zip(*x.nonzero(), strict=True))
        return RowValue(Kind.CONST, 0 if is_diagonal else None, entries="diagonal" if is_diagonal else None)
    if len(along) > 1 or not all(by_row) and not _is_alike(x, along[0], rows.size):
        return UNKNOWN if jnp.issubdtype(x.dtype, jnp.inexact) else CONST  # numbers of tokens or nodes, for example
    if _is_alike(x, along[0], rows.size):
        return CONST
    order = x.ravel().tolist() if is_real and x.size == rows.size else []
    if sorted(order) != [*range(rows.size)]:
        return RowValue(Kind.CONST, None, fault=Fault("count", (), True))
    return RowValue(Kind.CONST, None, place=place_in_turn(order))


def _is_alike(x: Any, axis: int, rows: int) -> bool:
    """Returns True if a constant is the same for each row.

    The axis may have several entries for each row, side by side or one array after the other.
    """
    each, rest = divmod(x.shape[axis], rows)
    if rest:
        return False
    x = x.swapaxes(axis, 0)
    neighbours, apart = x.reshape(rows, each, -1), x.reshape(each, rows, -1)
    return bool((neighbours == neighbours[:1]).all() or (apart == apart[:, :1]).all())


def order_of_picks(rows: RowCount, eqn: Any, values: Sequence[RowValue]) -> Any:
    """Returns the order of the indices that pick rows (see `order_of_places`); 0 if they are not positions.

    An axis with several entries for each row is left out: `x[2 * arange(b)]` may be the first entry of each row.
    """
    if eqn.primitive.name not in ("gather", "dynamic_slice"):
        return 0
    shape = eqn.invars[0].aval.shape
    picked = [i for i in rows.axes(eqn.invars[0]) if shape[i] == rows.size]
    if eqn.primitive.name == "gather":
        picked = picked if {*picked} <= {*parameter(eqn, "dimension_numbers").start_index_map} else []
        picked = [0] * len(picked)  # all indices are in one array
    orders = [values[1 + i].place for i in picked if values[1 + i].kind == Kind.CONST]
    order = next((order for order in orders if order != ROUND), 0)
    return ORDERED if order == NEGATED else order  # the first row, and then the others from the end


def of_round(rows: RowCount, eqn: Any, values: Sequence[RowValue]) -> str:
    """Returns the place of a row that a round of a loop over the rows picks by the round's number."""
    order = order_of_picks(rows, eqn, values)
    return f"{ROUND} {order}" if order else ROUND


def picks_one(rows: RowCount, eqn: Any, values: Sequence[RowValue]) -> bool:
    """Returns True if each round of a loop picks the same row, by a number that is written in the function: `x[0]`."""
    along = rows.axes(eqn.invars[0])
    if not along or values[0].kind != Kind.ROWS or values[0].place != 0:
        return False
    index = values[1 + along[0] * (eqn.primitive.name == "dynamic_slice")]
    # JAX adds `b` to an index below 0, and chooses. A number of the round has a place, or no degree.
    return index.kind == Kind.CONST and index.place == 0 and (index.number is not None or index.degree == 1)


def _places(values: Sequence[RowValue]) -> set[Any]:
    return {v.place for v in values if v.kind == Kind.ROWS and not v.drawn and v.place is not None}


def _moved(rows: RowCount, eqn: Any, values: Sequence[RowValue], along: Sequence[int], place: Any, out: Any) -> Any:
    """Returns the place of an equation's result; `place` is that of its operands, `by` how far this one shifts it."""
    name, by = eqn.primitive.name, 0
    order = order_of_picks(rows, eqn, values)
    if order:
        return _from_the_end(place) if order == TURNED else ORDERED
    if name == "reshape":
        return _reshaped(rows, eqn, place)
    if isinstance(place, str) and place.startswith(BLOCKS):
        return _of_blocks(rows, eqn, place, out)
    if name == "rev" and {*parameter(eqn, "dimensions")} & {*along}:
        return _from_the_end(place)
    if name == "concatenate" and parameter(eqn, "dimension") in along:
        if values[0].kind == Kind.ROWS:
            return values[0].place
        by = -eqn.invars[0].aval.shape[parameter(eqn, "dimension")]
    elif name == "pad":
        by = -sum(parameter(eqn, "padding_config")[i][0] for i in along)
    elif name == "slice":
        strides = parameter(eqn, "strides") or [1] * eqn.invars[0].aval.ndim
        by = sum(parameter(eqn, "start_indices")[i] // strides[i] for i in along)
    elif name == "split" and parameter(eqn, "axis") in along:
        by = sum(parameter(eqn, "sizes")[: eqn.outvars.index(out)])
    elif name in ("gather", "dynamic_slice"):
        by = _start(rows, eqn, values)
    if by and (place == TURNED or isinstance(place, tuple)):
        by = rows.remainder(by + (place[1] if isinstance(place, tuple) else 0))
        return (TURNED, by) if by else TURNED
    return place if isinstance(place, str | tuple) else by if by is None else rows.remainder(place + by)


def _reshaped(rows: RowCount, eqn: Any, place: Any) -> Any:
    """Returns the place after a reshape, which may put blocks of rows side by side, or join them again."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes = [rows.axes(v) for v in (eqn.invars[0], eqn.outvars[0])]
    if not rows.prime or [len(found) for found in axes] != [1, 1]:
        return place
    (i,), (j,) = axes
    are_blocks = [size % rows.size != 0 for size in (before[i], after[j])]
    if are_blocks == [False, True] and math.prod(before[:i]) < math.prod(after[:j]):
        return BLOCKS if place == 0 else SEVERAL
    return 0 if are_blocks == [True, False] and place == BLOCKS else place


def _of_blocks(rows: RowCount, eqn: Any, place: str, out: Any) -> Any:
    """Returns the place of an equation's result, if blocks of rows are side by side in its operand."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    axis = next(iter(rows.axes(eqn.invars[0])), 0) - 1  # the axis of the blocks
    if axis < 0 or place != BLOCKS:
        return place
    if name == "slice" and parameter(eqn, "limit_indices")[axis] - parameter(eqn, "start_indices")[axis] != shape[axis]:
        return f"{BLOCKS} from {parameter(eqn, 'start_indices')[axis]}"
    if name in ("split", "unstack") and parameter(eqn, "axis") == axis:
        return f"{BLOCKS} from {eqn.outvars.index(out)}"
    if name == "reduce_sum" and axis in parameter(eqn, "axes"):
        return SEVERAL
    return None if name in ("gather", "dynamic_slice", "transpose", "dot_general") else place


def _start(rows: RowCount, eqn: Any, values: Sequence[RowValue]) -> int | None:
    """Returns the row where a slice begins that starts at an index, as JAX writes `x[1:]` of symbolic rows."""
    operand, sizes = eqn.invars[0], parameter(eqn, "slice_sizes")
    for i in rows.axes(operand):
        by = values[1] if eqn.primitive.name == "gather" else values[1 + i]
        if rows.power(sizes[i]) != 0 and sizes[i] != operand.aval.shape[i] and by.degree == 0:
            return by.number if by.number is None else int(by.number)
    return 0


_CHOOSE = frozenset(["reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "top_k", "sort"])
_CHOOSE |= {"reduce_window_max", "reduce_window_min"}  # all of these combine the entries of one operand


def meets_elsewhere(reader: Any, values: Sequence[RowValue], linear: bool) -> bool:
    """Returns True if an equation combines rows with those at other positions, entry by entry, other than by a sum.

    So does a gather or a scatter whose indices come from other rows, unless it indexes the rows: then it moves them.
    """
    eqn, places = reader.around[-1], _places(values)
    name = eqn.primitive.name
    if BLOCKS in places and name in _CHOOSE and "axes" in eqn.params:
        return next(iter(reader.rows.axes(eqn.invars[0])), 0) - 1 in parameter(eqn, "axes")  # that of the blocks
    if len(places) < 2 and SEVERAL not in places:
        return False
    if name == "gather" or name.replace("-", "_") in primitives.SCATTERS:
        return {*reader.rows.axes(eqn.invars[0])}.isdisjoint(_indexed(eqn)) and not is_made_in_module(reader.around)
    if name not in primitives.ELEMENTWISE | primitives.LAYERS | _CHOOSE:
        return False
    is_product = name in primitives.PRODUCTS and all(v.kind == Kind.ROWS for v in values)
    return not linear or is_product or name == "select_n"


def moved(
    rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue, around: Sequence[Any]
) -> RowValue:
    """Returns a result, `made`, with a fault if its equation may have moved entries to other rows, and with a share."""
    is_lost = _loses_rows(rows, eqn, name, values, made) or name == "reshape" and _misaligns(rows, eqn, values[0])
    if _indexes_rows(rows, eqn, name, values) or is_lost and not is_made_in_module(around):
        lasting = next(filter(None, (v.lasting for v in values)), None)
        made = made._replace(kind=Kind.ROWS, fault=lasting or Fault("pairs", (*around[::-1],), True))
    return _with_share(rows, eqn, name, values, made, around)


def _indexes_rows(rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue]) -> bool:
    """Returns True if rows are picked or written to by row numbers that came with the batch: `h[y]`, `h.at[y].add(1)`.

    They number the rows of the whole batch, and a replica has only its own rows.
    """
    if name not in ("gather", "dynamic_slice") and name not in primitives.SCATTERS:
        return False
    along, first = rows.axes(eqn.invars[0]), values[0].kind
    if name != "dynamic_slice":
        is_array = first == Kind.ROWS or first == Kind.CONST and name != "gather"
        return is_array and values[1].given and not {*along}.isdisjoint(_indexed(eqn))
    return first == Kind.ROWS and any(values[1 + i].given for i in along)


def _indexed(eqn: Any) -> Sequence[int]:
    """Returns the axes of the array that a gather or a scatter indexes."""
    numbers: Any = parameter(eqn, "dimension_numbers")
    is_gather = eqn.primitive.name == "gather"
    return numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims  # type: ignore[no-any-return]


def _misaligns(rows: RowCount, eqn: Any, value: RowValue) -> bool:
    """Returns True if a reshape gives rows the entries of others, as `h.T.reshape(h.shape)` does."""
    if value.kind != Kind.ROWS:
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    places = [
        [i for i, size in enumerate(shape) if size is rows.size or size == rows.size] for shape in (before, after)
    ]
    if [len(found) for found in places] != [1, 1]:
        return False
    return math.prod(before[: places[0][0]]) != math.prod(after[: places[1][0]])


def is_matrix_of_places(rows: RowCount, operands: Sequence[Any], values: Sequence[RowValue]) -> bool:
    """Returns True if one of two operands is a constant with an entry for each pair of rows, as `jnp.tri(len(v))` is.

    A product with it combines rows by their positions, unless it is diagonal.
    """
    pairs = zip(operands, values, strict=True)
    return any(v.kind == Kind.CONST and len(rows.axes(x)) == 2 and v.entries != "diagonal" for x, v in pairs)


def _loses_rows(rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue) -> bool:
    """Returns True if constants take the places of rows at an end, as in `jnp.diff(v, prepend=0)`.

    The result has an entry for each row again, but these are made of rows at other positions, and some rows are lost.
    `jnp.roll` loses none.
    """
    is_shifted = isinstance(made.place, tuple) or made.place not in (0, None) and hasattr(made.place, "__index__")
    if made.kind != Kind.ROWS or not is_shifted or rows.partial_axes(eqn.outvars[0]):
        return False
    if name in ("concatenate", "pad"):
        return any(v.kind == Kind.CONST for v in values) and any(map(rows.partial_axes, eqn.invars))
    return name in ("slice", "gather", "dynamic_slice") and bool(rows.partial_axes(eqn.invars[0]))


def _with_share(
    rows: RowCount, eqn: Any, name: str, values: Sequence[RowValue], made: RowValue, around: Sequence[Any]
) -> RowValue:
    """Returns a result with its `RowValue.share`: the first half of a replica's rows is not the first half of all rows.

    Shares that are added up make a sum over all rows, if the same was done to each. A mean over one is a fault.
    """
    if rows.takes_share(eqn, name) and not is_made_in_module(around):
        starts = parameter(eqn, "start_indices") if name == "slice" else [v.number for v in values[1:]] or [made.place]
        sides = frozenset([0]), frozenset[int]()
        treated = sides[::-1] if any(start != 0 for start in starts) else sides
        return made._replace(share=Share(treated, Fault("part", (*around[::-1],), True)))
    shares, rest = [v.share for v in values if v.share is not None], [v for v in values if v.share is None]
    if not shares:
        return made
    sides = [*zip(*(share.treated for share in shares), strict=True)]
    if name in _PUT_TOGETHER and all(v.number == 0 or v.kind == Kind.SUMMED for v in rest):
        treated = tuple(frozenset[int]().union(*side) for side in sides)
    else:
        how = name, *(v.number for v in rest)
        treated = tuple(frozenset([hash((*how, *side))] if any(side) else []) for side in sides)
    share = Share(treated, shares[0].fault)
    made = made._replace(share=share)
    if made.of_share is not None and name == "div" and _is_share(rows, values[1]):  # a mean over it
        kind = Kind.ROWS if rows.axes(eqn.outvars[0]) else Kind.SUMMED
        return RowValue(kind, fault=made.lasting or made.of_share)
    return made


_PUT_TOGETHER = ("add", "add_any", "concatenate", "stack")


def _is_share(rows: RowCount, value: RowValue) -> bool:
    """Returns True if a divisor is the size of a share of the rows."""
    if value.kind == Kind.UNKNOWN:
        return True
    return bool(rows.prime) and value.kind == Kind.CONST and bool(value.number) and rows.is_share(value.number)


def sorted_along(rows: RowCount, eqn: Any, i: int, value: RowValue, at: tuple[Any, ...]) -> RowValue:
    """Returns what is known of operand i after a sort: along the rows, each entry's place depends on all rows.

    The rows of a second sort, by the order that a first one found, count as rows at their own places again.
    """
    if value.drawn:
        return UNKNOWN  # a random order, which picks equally many entries of each row
    value = value._replace(given=False)
    along_rows = parameter(eqn, "dimension") in rows.axes(eqn.invars[i])
    is_key = not i and jnp.issubdtype(eqn.invars[i].aval.dtype, jnp.inexact)  # other operands, and ids, are only moved
    if value.kind == Kind.ROWS and along_rows and is_key:
        return value._replace(fault=value.lasting or Fault("pairs", at, True))
    if value.kind == Kind.ROWS and along_rows and not is_made_in_module(at[::-1]):
        return value._replace(place=SORTED if value.place in (0, TURNED) else 0)
    return value


def diagonal(eqn: Any, value: RowValue) -> RowValue | None:
    """Returns the result of `jnp.diagonal` if its operand has an entry for each pair of rows, otherwise None."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    is_diagonal = value.entries == "pairs" and before[:1] * 2 == before and after == before[:1]
    return value._replace(fault=None, entries=None) if is_diagonal else None
