"""The most rows that fit, in few compilations: memory is nearly a line in the rows, and its ends are looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

COMPILATIONS = 14
TOLERANCE = 0.01


_NONE = 2**31  # rows; no axis of an array is longer


class Most(NamedTuple):
    """`rows` were compiled and fit, `too_many` do not. 0 rows: not even one does."""

    rows: int
    too_many: int
    compilations: int
    refused: bool = False
    """Whether the compiler refuses `too_many` for another reason than memory."""

    @property
    def is_exact(self) -> bool:
        return self.too_many == self.rows + 1


def most(needs: Callable[[int], float], memory: int, rows: int, guess: Most | None = None) -> Most:
    """The largest rows with `needs(rows) <= memory`, to 1 %, if the compiler lets it.

    Args:
        needs: bytes by rows, more or less rising; infinite where the compiler finds it too much, and not a number
            where it refuses for another reason, which says nothing of the memory.
        memory: bytes that there are.
        rows: where to begin.
        guess: what was found for a like program, to be tried first.
    """
    known: dict[int, float] = {}
    low, high = 0, _NONE
    tries = [rows] if guess is None else [rows, max(1, guess.rows), guess.too_many]
    while high - low > max(1, TOLERANCE * low) and len(known) < COMPILATIONS:
        x = next((t for t in tries if low < t < high and t not in known), None)
        x = _round(_next(known, low, high, memory), low) if x is None else x
        if x not in known:
            known[x] = needs(x)
        simple = 2 ** int(math.log2(x))  # the shape that a compiler takes if any
        if math.isnan(known[x]) and simple > low and simple not in known:
            tries.append(simple)
        else:
            low, high = (x, high) if known[x] <= memory else (low, x)
    return Most(low, high, len(known), high in known and math.isnan(known[high]))


def _unit(rows: int) -> int:
    """A power of two, within half of the tolerance."""
    return 2 ** max(0, int(math.log2(rows * TOLERANCE / 2))) if rows * TOLERANCE >= 2 else 1


def _round(rows: int, low: int) -> int:
    """A round number, as batches are, and of a shape that compilers cut into tiles; above `low`."""
    rounded = rows // _unit(rows) * _unit(rows)
    return rounded if rounded > low else rows


def _next(known: Mapping[int, float], low: int, high: int, memory: int) -> int:
    """What to try between the two: where the line through two measured points meets the memory, or just beside it."""
    finite = [x for x in sorted(known) if math.isfinite(known[x])]
    below, above = [x for x in finite if x <= low], [x for x in finite if x >= high]
    ends = [*below[-2:], *above[:1]][-2:] if below else above[:2]
    # Without a line by halves; and now and then, for memory that is none would keep it off for long.
    halves = 8 * max(low, 1) if high == _NONE else math.isqrt(low * high) if low else high // 8
    refused = math.isnan(known.get(high, 0.0))  # and where that begins has nothing to do with memory
    if refused or len(ends) < 2 or known[ends[1]] <= known[ends[0]] or (len(known) % 3 == 0 and high < _NONE):
        return min(max(halves, low + 1), high - 1)
    (x0, y0), (x1, y1) = ((x, known[x]) for x in ends)
    meets = int(x0 + (memory - y0) * (x1 - x0) / (y1 - y0))
    # Where it is at one of the two already, a little beside that one, so that nothing much is left between.
    margin = max(1, int(TOLERANCE * low))
    wanted = low + margin if meets - low <= margin // 4 else high - margin if high - meets <= margin // 4 else meets
    return min(max(wanted, low + 1), high - 1, 64 * max(low, 1))
