"""Cuts a jaxpr into segments, at some equations: what each segment reads, and what it keeps for the later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .jaxprs import is_literal


class Segmented:
    """A closed jaxpr cut at some equations: `segments[j]` comes before `cuts[j]`, the last segment after all cuts."""

    def __init__(self, jaxpr: Any, segments: list[list[Any]], cuts: list[Any]) -> None:
        self.jaxpr, self.segments, self.cuts = jaxpr, segments, cuts
        self.reads: list[list[Any]] = self._reads()
        """The variables that each segment needs and does not make: for itself, and for the cut or the outputs after."""
        self.later: list[set[Any]] = [set()]
        """For each segment, the variables that later segments read."""
        for reads in self.reads[:0:-1]:
            self.later.insert(0, self.later[0].union(reads))

    def _reads(self) -> list[list[Any]]:
        found = []
        after = [*(eqn.invars for eqn in self.cuts), self.jaxpr.jaxpr.outvars]
        for eqns, last in zip(self.segments, after, strict=True):
            own = {v for eqn in eqns for v in eqn.outvars}
            needed = dict.fromkeys(v for v in [*(v for eqn in eqns for v in eqn.invars), *last] if not is_literal(v))
            found.append([v for v in needed if v not in own])
        return found

    def keeps(self, j: int) -> list[Any]:
        """Returns the variables that segment j makes and a later segment needs."""
        return [v for eqn in self.segments[j] for v in eqn.outvars if v in self.later[j]]


def segmented(jaxpr: Any, at: Callable[[Any], bool]) -> Segmented:
    """Returns a closed jaxpr, cut at the equations that `at` accepts."""
    segments: list[list[Any]] = [[]]
    cuts = []
    for eqn in jaxpr.jaxpr.eqns:
        if at(eqn):
            cuts.append(eqn)
            segments.append([])
        else:
            segments[-1].append(eqn)
    return Segmented(jaxpr, segments, cuts)


_CHEAP = {"add", "broadcast_in_dim", "convert_element_type", "copy", "div", "mul", "neg", "reshape", "squeeze", "sub"}


def recomputed(code: Segmented) -> Segmented:
    """Returns the same, but each segment computes cheap values that it reads again: x is kept, and 2 * x is not."""
    made_by = {v: eqn for eqns in code.segments for eqn in eqns for v in eqn.outvars}

    def is_cheap(eqn: Any) -> bool:
        if eqn.primitive.name not in _CHEAP:
            return False
        out = eqn.outvars[0].aval
        large = [v.aval for v in eqn.invars if not is_literal(v) and 8 * v.aval.size > out.size]
        return len(large) < 2 and all(x.size * x.dtype.itemsize <= out.size * out.dtype.itemsize for x in large)

    def again(j: int) -> list[Any]:
        own = {v for eqn in code.segments[j] for v in eqn.outvars}
        found: dict[Any, Any] = {}

        def add(v: Any) -> None:
            eqn = None if is_literal(v) or v in own or v in found else made_by.get(v)
            if eqn is not None and is_cheap(eqn):
                for u in eqn.invars:
                    add(u)
                found[v] = eqn

        for v in code.reads[j]:
            add(v)
        return [*found.values()]

    return Segmented(code.jaxpr, [[*again(j), *eqns] for j, eqns in enumerate(code.segments)], code.cuts)
