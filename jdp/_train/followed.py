"""Finds how a function's results depend on the rows of its batch: their shapes, and what a scalar is computed from."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from .._core.layout import Tree
from .._jax import row_traces
from .._jax.jaxprs import reached
from .terms import is_number

Said = TypeVar("Said")
TermKind = Literal["mean", "sum", "count", "rows"]
ON_BATCH = "criterion=, which is called once with the outputs of all rows"
_WHAT = {
    "sum": "a sum over the rows that is not divided by their number",
    "ratio": "divided by a sum over the rows, which each replica has for its own rows alone",
    "nonlinear": "not linear in sums over the rows",
    "count": "made of the number of rows, or of their places, and a replica has its own rows alone",
    "pairs": "made of rows that meet other rows, and a replica sees its own rows alone",
}
IN_TRAINING = f"pass the loss as {ON_BATCH}, and such metrics from there"
IN_EVALUATION = "return an entry for each row, and compute it from those of all rows, which come back as one array"
_FIRST = {
    "sum": "Return jdp.Sum(total), or divide by x.shape[0], or ",
    "ratio": "Return jdp.Mean(total, count), whose totals and counts are added first, or ",
}


class Followed:
    """Finds how each array in the tree `run(*operands)` depends on the rows of the operands.

    `cut` has the axis of the rows for each leaf of the operands, or None; `rows` is None if nothing is cut, and `total`
    is the number of rows of the whole batch. Without `is_judged` nothing is refused, because the results are jdp's own.
    `way` is what an error advises instead.

    The function is traced once with a symbolic number of rows, and `traces` keeps that trace for all sizes of chunk.
    If the function needs the number itself (`int(len(x))`), its shapes are compared for a few other numbers of rows,
    and its values are judged by two traces with fixed numbers.
    """

    def __init__(
        self,
        tree: Tree,
        rows: int | None,
        total: int,
        run: Callable[..., Tree],
        operands: tuple[Tree, ...],
        cut: Sequence[int | None],
        traces: dict[int, row_traces.Traced | None],
        is_judged: bool = True,
        way: str = IN_TRAINING,
    ) -> None:
        self.rows, self._total, self._way = rows, total, way
        self.leaves = [jnp.shape(x) if is_number(x) else () for x in jax.tree.leaves(tree)]
        self._run, self._operands, self._cut, self._is_judged = run, operands, cut, is_judged
        self._traces = traces

    def _counted(self, prime: int = 0) -> row_traces.Traced | None:
        """Returns the trace for any number of rows, or for a multiple of a prime; None if there is none."""
        if prime not in self._traces:
            found = row_traces.trace(self._run, self._operands, self._cut, prime)
            if found is not None and found.holds_tracers:
                self._traces = {**self._traces}  # a later call must not see tracers of the program around this one
            self._traces[prime] = found
        return self._traces[prime]

    @functools.cached_property
    def _traced(self) -> row_traces.Traced | None:
        found = self._counted() if self.rows is not None else None
        return found if found is not None and [x.ndim for x in found.avals] == [*map(len, self.leaves)] else None

    @functools.cached_property
    def _sizes(self) -> Sizes:
        def more(rows: int) -> Tree:
            leaves, treedef = jax.tree.flatten(self._operands)
            shapes = []
            for x, axis in zip(leaves, self._cut, strict=True):
                shape = tuple(size + rows * (i == axis) for i, size in enumerate(jnp.shape(x)))
                shapes.append(jax.ShapeDtypeStruct(shape, jnp.result_type(x)))
            return jax.eval_shape(self._run, *treedef.unflatten(shapes))

        return Sizes(self.leaves, self.rows or 0, self._total, more)

    @property
    def is_known(self) -> bool:
        """Whether some result has a shape, and the function could be traced with other numbers of rows."""
        return self.rows is not None and any(self.leaves) and (self._traced is not None or bool(self._sizes.seen))

    def axis(self, index: int) -> int | str | None:
        """Returns the leaf's one axis that is proportional to the rows; None if none depends on them; else why not."""
        if self.rows is None or not self.leaves[index]:
            return None  # saves a trace: most losses are markers and scalars
        return self._sizes.axis(index) if self._traced is None else self._traced.axis(index)

    def depends(self, index: int) -> bool:
        """Returns True for a leaf whose values depend on those of the rows."""
        if self.rows is None:
            return False
        if self._traced is not None:
            return self._traced.depends(index)
        jaxpr = jax.make_jaxpr(self._run)(*self._operands)
        return reached(jaxpr, [axis is not None for axis in self._cut])[index]

    def _agreed(self, at: Sequence[int], say: Callable[[row_traces.Traced], list[Said]]) -> list[Said]:
        """Returns what `say` finds in the trace for any number of rows, or else in both traces for fixed numbers."""
        if self.rows is None or not self._is_judged:
            return []
        if self._traced is not None and all(map(self._traced.is_followed, at)):
            return say(self._traced)
        said: list[Said] = []
        before: row_traces.Traced | None = None
        for prime in row_traces.PRIMES:
            traced = self._counted(prime)
            if traced is None or len(traced.avals) != len(self.leaves):
                return []  # the function does not take that number
            for one in (traced, before and traced.beside(before)):
                each = say(one) if one is not None else said
                said = [x and y for x, y in zip(said or each, each, strict=True)]
            if not any(said):
                break  # most losses are right, and a second trace takes time
            before = traced
        return said

    def grows(self, index: int) -> bool:
        """Returns True for a leaf that depends on the number of rows, but not on their values."""
        return any(self._agreed([index], lambda traced: [traced.grows(index)]))

    def refuse_joined(self, index: int, name: str) -> None:
        """Raises a `TypeError` for an array with the rows of several ones: those of all replicas mix."""
        if any(self._agreed([index], lambda traced: [traced.is_joined(index)])):
            raise TypeError(
                f"{name} has the rows of several arrays, one after the other; the outputs of the replicas are joined "
                f"along the axis of the rows, so that those of all rows would come in another order. Return a tuple of "
                f"the arrays, and concatenate them where all rows are."
            )

    def _offences(self, kind: TermKind, at: Sequence[int]) -> list[row_traces.Offence | None]:
        """Returns, for each leaf, why it is not of this kind, or None."""
        return self._agreed(at, lambda traced: traced.offences(kind, at))

    def refuse_no_mean(self, index: int, name: str) -> None:
        """Raises a `TypeError` for a scalar that is not a mean over the rows; accepts one that cannot be followed."""
        for found in filter(None, self._offences("mean", [index])):
            way = _sentence(_FIRST.get(found.kind, "") + self._way)
            raise TypeError(
                f"{name} is a scalar, and it is {_what(found)}; a scalar is taken for the mean over the rows of the "
                f"chunk. {way} (jdp.Mean(x * n, n) says that the mean of the chunks' values is meant)."
            )

    def refuse_pairs(self, index: int, name: str) -> None:
        """Raises a `TypeError` for entries per row that also depend on other rows."""
        for found in filter(None, self._offences("rows", [index])):
            raise TypeError(
                f"{name} has an entry for each row, and is {_what(found)}; an entry is that of one device where it is "
                f"made of its own row. {_sentence(self._way)}."
            )

    def refuse_no_sums(self, at: Sequence[int], name: str) -> None:
        """Raises a `TypeError` for a term whose total or count is not a sum over the rows."""
        kind: TermKind = "sum" if len(at) == 1 else "count"
        for part, found in zip(("total", "count"), self._offences(kind, at), strict=False):
            if found is None:
                continue
            what = _what(found) if found.kind != "sum" else "no sum over the rows: it does not grow with their number"
            way = "Return a mean over the rows, and what does not depend on them, without a marker"
            if kind == "count":
                way = "Return jdp.Mean(total, count) of plain sums over the rows (count + 1e-6 where it may be 0)"
            raise TypeError(
                f"{name} is a jdp.{'Mean' if kind == 'count' else 'Sum'} whose {part} is {what}; totals and counts are "
                f"added up over replicas and microbatches. {way}, or {self._way}."
            )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _what(found: row_traces.Offence) -> str:
    where = " at ".join(filter(None, (found.what, found.line)))
    return f"{_WHAT[found.kind]}{where and f' ({where})'}"


Shapes = list[tuple[int, list[tuple[int, ...]]]]
"""Numbers of rows, each with the shapes of all leaves."""


class Sizes:
    """How shapes depend on the number of rows, found by tracing with other numbers of rows."""

    def __init__(self, leaves: list[tuple[int, ...]], rows: int, total: int, more: Callable[[int], Tree]) -> None:
        self.leaves, self.rows, self._more = leaves, rows, more
        self.seen: Shapes = []  # for more rows
        self._fewer: Shapes = []
        self._problem = ""  # why the last trace failed
        # Try more rows first, because a model may need a minimum. Twice as many still form pairs or groups of rows.
        if not self._see(rows * 2, self.seen) and not self._see(rows + 1, self.seen):
            return
        # An axis that does not change may be padded to a size that holds twice as many rows. It seldom holds all rows
        # of the batch, or `_MANY`.
        self._see(-(-max(total, _MANY) // rows) * rows, self.seen)
        if any(x and not self._apart(i) for i, x in enumerate(self.leaves)):
            # An axis may follow the rows up to a limit (`x[:10]`), which may be `rows` or less. Zero rows are below
            # every limit, but not every model accepts zero rows.
            if not self._see(0, self._fewer):
                self._see(1, self._fewer)

    def _see(self, rows: int, seen: Shapes) -> bool:
        """Adds the shapes for `rows` rows to `seen`; returns False if the function does not accept that number."""
        try:
            with warnings.catch_warnings(action="ignore"):  # the user's own, for example about zero rows
                found = [jnp.shape(x) for x in jax.tree.leaves(self._more(rows - self.rows))]
        except Exception as error:  # the model may accept only one number of rows
            text = (str(error).splitlines() or [""])[0][:200]
            self._problem = f"{type(error).__name__}{f': {text}' if text else ''}"
            return False
        if [*map(len, found)] != [*map(len, self.leaves)]:
            self._problem = "another tree or rank"
            return False
        seen.append((rows, found))
        return True

    def _apart(self, index: int, seen: Shapes | None = None) -> set[int]:
        """Returns the axes of a leaf whose size differs for some number of rows in `seen` (None: `self.seen`)."""
        shape, seen = self.leaves[index], self.seen if seen is None else seen
        return {i for _, shapes in seen for i in range(len(shape)) if shape[i] != shapes[index][i]}

    def axis(self, index: int) -> int | str | None:
        """Returns the leaf's one axis that is proportional to the rows; None if none depends on them; else why not."""
        shape, rows = self.leaves[index], self.rows
        if not self.seen:
            if not any(size and size % rows == 0 for size in shape):
                return None  # no axis can consist of rows
            return f"loss_fn fails for other numbers of rows ({self._problem}), so that nothing tells what its axes are"
        apart = self._apart(index)
        ended = set() if apart else self._apart(index, self._fewer)  # one row has no pairs, yet pairs follow the rows
        for others, shapes in self._fewer if ended else self.seen:
            other = shapes[index]
            if ended or len(apart) > 1 or any(shape[i] * others != other[i] * rows for i in apart):
                return f"{list(other)} for {others} rows, which is not in proportion along one axis"
        return apart.pop() if apart else None


_MANY = 129  # rows: more than arrays are usually padded to
