"""How many rows a trace has: a symbol `b`, or a number; which axes have rows, and what an equation does along them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.export

from .jaxprs import parameter
from .row_values import OtherTrace, RowValue, constant, prime_power

_SYMBOL: Any = jax.export.symbolic_shape("b")[0]  # one for all, so that JAX's caches of traced functions are hit


@dataclasses.dataclass(frozen=True)
class RowCount:
    """The number of rows of a trace: a symbol `b`, or a multiple of a prime, whose multiples are recognised."""

    prime: int = 0  # 0: a symbol
    other: OtherTrace | None = dataclasses.field(default=None, compare=False)  # that for another number, side by side

    @property
    def size(self) -> Any:
        """The number itself. An even one, because a function may take the rows in pairs."""
        return 2 * self.prime if self.prime else _SYMBOL

    def power(self, size: Any) -> int | None:
        """Returns p if a size is the number of rows ** p, times a whole number; None if it is not."""
        if self.prime:
            return prime_power(size, self.prime)
        power = 0
        while not isinstance(size, int):
            part = size // _SYMBOL
            if part * _SYMBOL != size:
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
        if self.other is None or (there := self.other.of(v)) is None:
            return constant(v.val, self.prime)
        return self.other.constant(v.val, there.val)

    def parts(self, v: Any) -> list[int]:
        """Returns the axes whose size follows the number of rows, and is no multiple of it: b - 1 in `e[1:]`."""
        shape, found = v.aval.shape, self.axes(v)
        if not self.prime:
            return [i for i in found if self.power(shape[i]) is None and not is_divided(shape[i])]
        if self.other is None or (there := self.other.of(v)) is None:
            return []
        return [i for i in found if self.other.power(shape[i] or 0.5, there.aval.shape[i] or 0.5) is None]

    def summed(self, eqn: Any, name: str, out: Any) -> int:
        """Returns over how many axes of the rows an equation sums."""
        if name == "reduce_sum":
            return len({*parameter(eqn, "axes")} & {*self.axes(eqn.invars[0])})
        if name == "dot_general":
            (contracted, _), _ = parameter(eqn, "dimension_numbers")
            return len({*contracted} & {*self.axes(eqn.invars[0])})
        if name in ("conv_general_dilated", "scatter_add"):
            return int(any(map(self.axes, eqn.invars)) and not self.axes(out))
        return 0

    def slides_over_rows(self, eqn: Any, name: str) -> bool:
        """Returns True if the window of a convolution, or of a pooling, holds several rows at a time."""
        if name.startswith("reduce_window"):
            return any(parameter(eqn, "window_dimensions")[i] != 1 for i in self.axes(eqn.invars[0]))
        if name != "conv_general_dilated":
            return False
        dims, (inputs, window) = parameter(eqn, "dimension_numbers"), eqn.invars
        places = zip(dims.lhs_spec[2:], dims.rhs_spec[2:], strict=True)
        return any(i in self.axes(inputs) and window.aval.shape[j] != 1 for i, j in places)

    def rows_come_last(self, before: Sequence[Any], after: Sequence[Any]) -> bool:
        """Returns True if a reshape joins the axis of the rows with one before it: `(2, b)` becomes `(2 * b,)`."""
        places = [[i for i, size in enumerate(shape) if self.power(size) != 0] for shape in (before, after)]
        if [len(found) for found in places] != [1, 1]:
            return False
        (i,), (j,) = places
        return math.prod(before[:i]) != math.prod(after[:j])

    def pads(self, eqn: Any, name: str, values: Sequence[RowValue]) -> bool:
        """Returns True if an equation writes zeros after all rows, or before them, as up to a multiple of some size."""
        if name != "pad" or values[1].number != 0 or self.parts(eqn.invars[0]):
            return False
        return all(low >= 0 and high >= 0 for low, high, _ in parameter(eqn, "padding_config"))

    def sums_part(self, eqn: Any, name: str) -> bool:
        """Returns True if an equation sums over an axis that is longer or shorter than the rows: `e[1:].sum()`."""
        if name == "dot_general":
            (over, _), _ = parameter(eqn, "dimension_numbers")
        elif name == "reduce_sum":
            over = parameter(eqn, "axes")
        else:
            return False
        return not {*over}.isdisjoint(self.parts(eqn.invars[0]))


def is_divided(size: Any) -> bool:
    """Returns True for a size that is a part of the number of rows, as where rows are taken in pairs."""
    return any(part in str(size) for part in ("floordiv", "mod"))
