"""Reads branches and loops; tells which numbers that a loop over the rows carries are sums over the rows at its end.

Such a loop carries numbers from row to row. `total + f(row)` becomes a sum over the rows, as `jnp.sum` computes it;
`jnp.maximum(largest, f(row))` and `0.9 * average + f(row)` do not. `sums_at_end` goes through the body, and finds for
each value how it depends on each carried number: linearly with a factor, not linearly, or not known how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from . import row_primitives as primitives
from .callers import is_made_in_module
from .jaxprs import CALLS, inside, is_literal, opened, parameter, parts_of_scan, reached
from .row_pairs import ORDERED, TURNED
from .row_values import ROUND, UNKNOWN, Fault, Kind, RowValue, cuts_off, either

Parts = dict[int | str, float | None]
"""What a value in a loop depends on. The keys are the indices of carried numbers; ROW is the row of the round, and
PLACE the number of the round. The value is the factor if the dependence is linear, nan if it is not, and None if it
cannot be followed.
"""

Axes = Callable[[Any], list[int]]
"""Tells the axes of a variable that have rows."""
ROW, PLACE = "row", "place"
_MOVES = primitives.LINEAR - primitives.ADDS - {"concatenate", "stack", "pad", "neg"}


def read_scan(reader: Any, eqn: Any, values: list[RowValue]) -> list[RowValue]:
    """Returns what is known of the outputs of a scan, which may iterate over the rows."""
    by_rows, body = reader.rows.counts_rounds(eqn), parameter(eqn, "jaxpr")
    consts, carry, xs = parts_of_scan(eqn, values)
    places = {x.place for x in xs if x.kind == Kind.ROWS}
    if by_rows:
        inner = f"{ROUND} of {reader.loops}" if reader.loops else ROUND  # a row of the loop around it is another row
        rounds = {place: f"{ROUND} {place}" if place else inner for place in places}
        xs = [x._replace(place=rounds[x.place]) if x.kind == Kind.ROWS else x for x in xs]
    place = next(iter(places), 0) if len(places) < 2 else None
    reader.loops += by_rows
    after, ys = _rounds(reader, body, consts, carry, xs, by_rows)
    reader.loops -= by_rows
    if by_rows:
        pairs = RowValue(Kind.ROWS, fault=Fault("pairs", reader.at(), True))
        numbers = [pairs if _meets_others(y, consts, xs) else UNKNOWN for y in ys]
        picks = {f"{ROUND} {order}": order for order in (TURNED, ORDERED)}  # rows picked by the number of the round
        ys = [
            x if y.kind == Kind.SUMMED else y._replace(place=picks.get(y.place, place))
            for x, y in zip(numbers, ys, strict=True)
        ]
        back = looks_back(body, [*consts, *carry, *xs], range(len(consts), len(consts) + len(carry)), reader.rows.axes)
        ys = [pairs if of_rows_before else y for y, of_rows_before in zip(ys, back, strict=True)]
        after = _at_end(reader, body, consts, carry, after, xs)
    return [*after, *ys]


def _meets_others(made: RowValue, consts: Sequence[RowValue], xs: Sequence[RowValue]) -> bool:
    """Returns True if a round combines its own row with other rows; `made` is a number that it makes of all rows.

    Two cases are accepted: a round that gets the number of its row, and not the row itself, may pick that row out of
    all rows; and a round may add up rows, as it does under a mask.
    """
    gets_its_row = any(x.kind == Kind.ROWS for x in xs) and not any(x.kind == Kind.SUMMED for x in consts)
    return made.lasting is not None or gets_its_row and (made.fault is not None or made.degree == 0)


def _rounds(
    reader: Any, body: Any, consts: list[RowValue], carry: list[RowValue], xs: list[RowValue], by_rows: bool
) -> tuple[list[RowValue], list[RowValue]]:
    """Returns a loop's carry and other outputs; `by_rows` says that the number of rounds depends on the rows."""
    mixed = len(reader.mixed)
    while True:  # until what is known of the carry stays the same; each pass knows less
        del reader.mixed[mixed:]  # found by an earlier pass, which still took the carry for a constant
        outputs = reader.read(body, [*consts, *carry, *xs])
        after = [either(a, b) for a, b in zip(carry, outputs, strict=False)]
        if by_rows:
            numbers = [a.kind == Kind.CONST and not _agree(a, b) for a, b in zip(after, carry, strict=True)]
            if any(numbers):  # a counter, for example, is 0 only in the first round: read the body again without that
                carry = [repeated(a) if x else b for a, b, x in zip(after, carry, numbers, strict=True)]
                continue
            after = [a if _agree(a, b) else repeated(a) for a, b in zip(after, carry, strict=True)]
        if all(map(_agree, after, carry)):
            return after, outputs[len(carry) :]
        carry = after


def repeated(value: RowValue) -> RowValue:
    """Returns what is known of a value that a loop computes again for each row; a fault that lasts remains."""
    is_lost = value.kind > Kind.SHARED and value.lasting is None
    return UNKNOWN if is_lost else value._replace(degree=None, number=None)


def _at_end(
    reader: Any,
    body: Any,
    consts: list[RowValue],
    begun: list[RowValue],
    carry: list[RowValue],
    xs: list[RowValue],
) -> list[RowValue]:
    """Returns what is known of the carry at the end of a loop over the rows: which parts are sums over the rows.

    `begun` is the carry at the start of the loop.
    """
    factors = sums_at_end(body, consts, carry, xs, reader.rows.axes)
    zero = RowValue(Kind.CONST, number=0.0)
    count = zero._replace(place=ROUND)  # the number of the round, or of the rows so far
    starts = [count if v.kind == Kind.CONST and v.degree is None else zero for v in carry]
    started = [start if factor == 1 else v for v, start, factor in zip(carry, starts, factors, strict=True)]
    reader.loops, mixed = reader.loops + 1, len(reader.mixed)
    added = reader.read(body, [*consts, *started, *xs])
    reader.loops -= 1
    del reader.mixed[mixed:]
    after = []
    shapes = [v.aval.shape for v in opened(body).invars[len(consts) :]]
    for value, part, factor, first, shape in zip(carry, added, factors, begun, shapes, strict=False):
        if factor == 1 and part.kind == Kind.CONST and part.number == 0:
            pass  # nothing is added: it is what it was at the start
        elif factor == 1 and (part.kind == Kind.ROWS or part.kind == Kind.CONST and part.degree is not None):
            kind, degree = Kind.SUMMED if part.kind == Kind.ROWS else Kind.CONST, part.degree
            degree, at = (None, part.at) if degree is None else (degree + 1, reader.at())
            fault = part.if_added_up
            if fault is None and kind == Kind.SUMMED and _adds_its_start(first, shape, degree):
                fault = Fault("sum", reader.at())
            value = RowValue(kind, degree, fault=fault, at=at, role=reader.role_of_sum(part))
        elif factor == 1 and part.kind == Kind.SUMMED and _meets_others(part, consts, xs):
            value = RowValue(Kind.SUMMED, fault=part.lasting or Fault("pairs", reader.at(), True))
        elif factor is not None and factor != 1:
            value = RowValue(Kind.SUMMED, fault=Fault("nonlinear", reader.at()))
        after.append(value)
    return after


def _adds_its_start(begun: RowValue, shape: tuple[Any, ...], degree: int | None) -> bool:
    """Returns True if a sum over the rows begins at a number that is not 0: each replica would add it once.

    Arrays are not looked at: they may be full of zeros. A very small number avoids a division by 0, and counts as 0.
    """
    is_zero = begun.number is not None and abs(begun.number) <= 1e-4
    return begun.kind == Kind.CONST and shape == () and not is_zero and degree not in (None, begun.degree)


def read_while(reader: Any, eqn: Any, values: list[RowValue]) -> list[RowValue]:
    """Returns what is known of the carry of a `while`, whose number of rounds may depend on the rows."""
    first = parameter(eqn, "cond_nconsts")
    last = first + parameter(eqn, "body_nconsts")
    cond, consts, carry = values[:first], values[first:last], values[last:]
    body, cond_jaxpr = parameter(eqn, "body_jaxpr"), parameter(eqn, "cond_jaxpr")
    found, _ = _rounds(reader, body, consts, carry, [], False)
    (goes_on,) = reader.read(cond_jaxpr, [*cond, *found])
    grows = [v.kind == Kind.CONST and v.degree != 0 for v in [*cond, *carry]]
    by_rows = reader.rows.is_read_in(cond_jaxpr) or reached(cond_jaxpr, grows)[0]
    if not (goes_on.kind > Kind.SHARED or any(grows) or by_rows):
        return found
    after, _ = _rounds(reader, body, consts, carry, [], True)
    after = [a if x.lasting is None else repeated(x) for a, x in zip(after, found, strict=True)]
    if goes_on.kind == Kind.SUMMED and _is_tolerance(cond_jaxpr, [*cond, *found]):
        for i, (x, stops) in enumerate(zip(found, _stop_by_row(body), strict=True)):
            if x.kind == Kind.ROWS and not stops and not is_made_in_module(reader.around):
                after[i] = RowValue(Kind.ROWS, fault=x.lasting or Fault("loop", reader.at(), True))
    return _at_end(reader, body, consts, carry, after, []) if by_rows and goes_on.kind <= Kind.SHARED else after


def _is_tolerance(cond_jaxpr: Any, values: Sequence[RowValue]) -> bool:
    """Returns True if values of rows end a loop, other than integers such as the length of the longest row."""
    are_integers = [jnp.issubdtype(v.aval.dtype, jnp.integer) for v in opened(cond_jaxpr).invars]
    pairs = zip(values, are_integers, strict=True)
    return bool(reached(cond_jaxpr, [v.kind > Kind.SHARED and not is_integer for v, is_integer in pairs])[0])


def _stop_by_row(body: Any) -> list[bool]:
    """Returns for each output of a loop's body whether its rows stop one by one, each at its own tolerance.

    They do if the output is a choice, as under `jax.vmap`, or depends on a carry of booleans, such as `done`.
    """
    by_flags = reached(body, [v.aval.dtype == bool and v.aval.ndim > 0 for v in opened(body).invars])
    body = opened(body)
    made_by = {v: eqn.params.get("name", eqn.primitive.name) for eqn in body.eqns for v in eqn.outvars}
    are_chosen = [not is_literal(v) and made_by.get(v) in ("select_n", "_where") for v in body.outvars]
    return [chosen or by_flag for chosen, by_flag in zip(are_chosen, by_flags, strict=True)]


def _agree(a: RowValue, b: RowValue) -> bool:
    known = [
        (v.kind, v.degree, v.number, v.place, v.fault and v.fault.lasts, v.role, v.pending is None) for v in (a, b)
    ]
    return known[0] == known[1]


def sums_at_end(
    body: Any, consts: Sequence[RowValue], carry: Sequence[RowValue], xs: Sequence[RowValue], axes: Axes
) -> list[float | None]:
    """Returns for each part of the carry of a loop over the rows whether it is a sum over the rounds at the end.

    1.0 stands for a sum, nan for anything else, and None for what cannot be followed: an array with an axis of the
    rows, for example, may hold all of them. The body is read twice: for the parts that may be sums of rows, and for
    those that may count the rounds.
    """
    invars, of_rows = opened(body).invars[len(consts) :], (Kind.SUMMED, Kind.ROWS)
    made_of: list[Parts] = [{ROW: None} if v.kind in of_rows else {PLACE: None} for v in (*consts, *carry, *xs)]
    made_of[: len(consts)] = [{} if v.kind <= Kind.SHARED else p for v, p in zip(consts, made_of, strict=False)]
    sums = [
        v.kind > Kind.SHARED and jnp.issubdtype(w.aval.dtype, jnp.inexact) and not axes(w)
        for v, w in zip(carry, invars, strict=False)
    ]
    counts = [v.kind == Kind.CONST and v.degree is None for v in carry]
    found: list[float | None] = [None] * len(carry)
    for chosen in (sums, counts):
        parts = [*made_of]
        parts[len(consts) : len(consts) + len(carry)] = [
            {i: 1.0} if is_chosen else made_of[len(consts) + i] for i, is_chosen in enumerate(chosen)
        ]
        factors = _verdicts(_parts_made(body, parts), len(carry))
        found = [x if is_chosen else y for x, y, is_chosen in zip(factors, found, chosen, strict=True)]
    return [None if factor != 1 and is_count else factor for factor, is_count in zip(found, counts, strict=True)]


def _verdicts(found: Sequence[Parts], count: int) -> list[float | None]:
    """Returns for each carried value whether a round only adds to it, and adds nothing of other carried values."""

    def own(i: int) -> float | None:
        if [*found[i]] == [ROW]:
            return math.nan  # at the end it is made of the last row alone
        factor = found[i].get(i)
        return factor if factor in (None, 1.0) else None if factor == 0 else math.nan

    def verdict(i: int) -> float | None:
        others = [j for j, factor in found[i].items() if isinstance(j, int) and j != i and factor != 0]
        factors = [own(i), *(found[i][j] for j in others)]
        if any(map(_is_nan, factors)):
            return math.nan
        # A sum of running sums counts a row several times. What depends on an unknown number is unknown, too.
        is_lost = None in [*factors, *map(own, others)]
        return None if is_lost else math.nan if others else 1.0

    return [verdict(i) for i in range(count)]


def _parts_made(jaxpr: Any, inputs: Sequence[Parts]) -> list[Parts]:
    """Returns the `Parts` of a jaxpr's outputs, given those of its inputs."""
    jaxpr = opened(jaxpr)
    known: dict[Any, Parts] = dict(zip(jaxpr.invars, inputs, strict=True))

    def parts(v: Any) -> Parts:
        return {} if is_literal(v) else known.get(v, {})

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _made(eqn, [parts(v) for v in eqn.invars]), strict=True))
    return [parts(v) for v in jaxpr.outvars]


def _made(eqn: Any, operands: list[Parts]) -> list[Parts]:
    """Returns the `Parts` of an equation's results."""
    name, count = eqn.primitive.name.replace("-", "_"), len(eqn.outvars)
    if name in CALLS:
        return _parts_made(next(inside(eqn)), operands)
    if name == "cond":
        which, *operands = operands
        branches = [_parts_made(branch, operands) for branch in inside(eqn)]
        return [_chosen(which, cases) for cases in zip(*branches, strict=True)]
    if name == "select_n":
        return [_chosen(operands[0], operands[1:])]
    if name in primitives.EACH:
        return operands
    if name in primitives.ADDS:
        a, b = operands
        return [_added(a, _scaled(b, -1) if name == "sub" else b)]
    if name == "neg":
        return [_scaled(operands[0], -1)]
    if name == "convert_element_type" and cuts_off(eqn, eqn.outvars[0]):
        return [_mixed(operands, math.nan)]
    if name in _MOVES or name in ("scatter_add", "scatter_sub", "dynamic_slice", "gather"):
        return [_added(operands[0], _mixed(operands[1:], None))] * count  # what is added at indices is not followed
    if name in ("mul", "div"):
        return [_multiplied(eqn, name, *operands)]
    if name == "is_finite":
        return [{}]
    known = name in primitives.NONLINEAR or name in primitives.PRODUCTS
    return [_mixed(operands, math.nan if known else None)] * count


def _is_nan(factor: float | None) -> bool:
    return factor is not None and math.isnan(factor)


def _mixed(operands: Sequence[Parts], factor: float | None) -> Parts:
    """Returns the parts of all operands together, each with the same factor."""
    return {key: factor for parts in operands for key in parts}


def _scaled(parts: Parts, by: float) -> Parts:
    return {key: factor if factor is None else factor * by for key, factor in parts.items()}


def _added(a: Parts, b: Parts) -> Parts:
    found = {**a, **b}
    for key in a.keys() & b.keys():
        one, other = a[key], b[key]
        if one is None or other is None:
            found[key] = math.nan if _is_nan(one) or _is_nan(other) else None
        else:
            found[key] = one + other
    return found


def _chosen(which: Parts, cases: Sequence[Parts]) -> Parts:
    """Returns the parts of a choice among cases; if a carried number decides, the choice is not linear in it."""
    found: Parts = {}
    by_row = ROW in which and PLACE not in which  # a row may end the sum: jnp.where(done, 0, total + x)
    for key in {key for parts in cases for key in parts}:
        factors = {parts.get(key, 0.0) for parts in cases}
        is_lost = any(map(_is_nan, factors)) or by_row and isinstance(key, int) and None not in factors
        found[key] = factors.pop() if len(factors) == 1 else math.nan if is_lost else None
    return {**_mixed([which], None), **found, **{k: math.nan for k in which if isinstance(k, int)}}


def _multiplied(eqn: Any, name: str, a: Parts, b: Parts) -> Parts:
    """Returns the parts of a product or a quotient; a literal number only scales the factors."""
    for v, other in ((eqn.invars[1], a), (eqn.invars[0], b)):
        if is_literal(v) and (name == "mul" or other is a) and not getattr(v.aval, "shape", ()):
            if jnp.issubdtype(v.aval.dtype, jnp.complexfloating):
                return _mixed([other], None)
            by = float(v.val) if name == "mul" else 1 / float(v.val or math.nan)
            return _scaled(other, by)
    # A running mean multiplies by the number of the round, which is not followed (None). A row, a carried number or an
    # unknown constant is not one factor for all rounds (nan).
    by_place = any(PLACE in parts and ROW not in parts for parts in ((b,) if name == "div" else (a, b)))
    return _mixed([a, b], None if by_place else math.nan)


def looks_back(body: Any, values: Sequence[RowValue], carry: range, axes: Axes) -> list[bool]:
    """Returns for each output of a scan over the rows, except its carry, whether it depends on earlier rows.

    It does if rows reach it through the carry: a recurrent network's state, a discounted sum of rewards. A carried
    array with an axis of the rows does not count, because each round may take its own row from it. Integers do not
    count, because they are positions.
    """

    def made_of(inputs: Sequence[bool]) -> list[bool]:
        return reached(body, inputs, lambda aval: jnp.issubdtype(aval.dtype, jnp.inexact))

    holds_one = {i for i in carry if not axes(opened(body).invars[i])}
    marks = [v.kind == Kind.ROWS and i not in carry for i, v in enumerate(values)]
    while True:
        after = made_of(marks)
        before, marks = marks, [mark or i in holds_one and after[i - carry.start] for i, mark in enumerate(marks)]
        if marks == before:
            return made_of([mark and i in holds_one for i, mark in enumerate(marks)])[len(carry) :]


def read_cond(reader: Any, eqn: Any, values: list[RowValue]) -> list[RowValue]:
    """Returns what is known of the outputs of a cond: each is chosen among those of all branches."""
    branches = [reader.read(branch, values[1:]) for branch in parameter(eqn, "branches")]
    return [reader.chosen(eqn, values[0], v, out) for *v, out in zip(*branches, eqn.outvars, strict=True)]


BODIES = {"scan": read_scan, "while": read_while, "cond": read_cond}
"""Returns what is known of the outputs of an equation with bodies: `BODIES[name](reader, eqn, values)`."""
