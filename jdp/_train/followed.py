"""Finds how a function's results depend on the rows of its batch: their shapes, and what a scalar is computed from."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from .._core.layout import Tree, is_key
from .._jax import row_traces
from .._jax.jaxprs import reached
from .._jax.row_primitives import ELEMENTWISE
from .._jax.row_values import GROUPS, PAIRS, Fault
from .terms import is_number

Said = TypeVar("Said")
ON_BATCH = "criterion=, which is called once with the outputs of all rows"
_WHAT = {
    "sum": "a sum over the rows that is not divided by their number",
    "part": "a sum over fewer or more entries than rows, and each replica would leave out or add some of its own",
    "ratio": "divided by a sum over the rows, and each replica has that sum for its own rows only",
    "nonlinear": "not linear in sums over the rows",
    "number": "made of rows and a number computed from all rows, and a replica sees only its own rows",
    "loop": "made in a loop that ends when all rows are done, and a replica sees only its own rows",
    "row": "made with one particular row, which is a different row on each replica",
    "count": "made of the number of rows, or of their positions, and a replica has only its own rows",
    "order": "in another order than the rows of the batch, and a replica can order only its own rows",
    "step": "made of every second row (or every third), and a replica's number of rows is no multiple of that",
    "added": "a sum over the replicas already, and would count once for each replica",
    "pairs": "made of rows that are combined with other rows, and a replica sees only its own rows",
}
IN_TRAINING = f"pass the loss as {ON_BATCH}, and such metrics from there"
IN_EVALUATION = "return an entry for each row, and compute it from those of all rows, which come back as one array"
_FIRST = {
    "row": "If all rows are equal, pass that array once and whole (in_axes=None); else ",
    "number": "If the parameters are not in that number, pass it in the batch as a 0-d array; if it is the model's, "
    "compute it in a module; else ",
    "loop": "Let each row stop by itself, with jnp.where(done, old, new) in the loop's body, or ",
    "sum": "Return jdp.Sum(total), or divide by x.shape[0], or ",
    "part": "Multiply by a mask that comes with the batch, and return jdp.Mean(total, mask.sum()), or ",
    "count": "Pass the number of all rows with the batch, as a 0-d array, or their positions (np.arange(len(x))), or ",
    "added": "Leave the collective out, or ",
    "ratio": "Return jdp.Mean(total, count), whose totals and counts are added up before the division, or ",
}
_COLUMN = "If shapes (n,) and (n, 1) met there, give both arrays one of them (x[:, 0]); else "


class Followed:
    """Finds how each array in the tree `run(*operands)` depends on the rows of the operands.

    `cut` has the axis of the rows for each leaf of the operands, or None; `rows` is None if nothing is cut, and `total`
    is the number of rows of the whole batch. `refuses` is False for results that were accepted before, or are jdp's
    own: then no `refuse_` method raises an error. `way` is what an error advises instead.

    The function is traced once with a symbolic number of rows, and `traces` keeps that trace for all sizes of chunk.
    If the function needs the number itself (`int(len(x))`), its shapes are compared for a few other numbers of rows,
    and two traces with fixed numbers show how values depend on the rows; so they do for a value that the symbolic trace
    cannot follow.
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
        refuses: bool = True,
        way: str = IN_TRAINING,
    ) -> None:
        self.rows, self._total, self._way = rows, total, way
        self.leaves = [jnp.shape(x) if is_number(x) else () for x in jax.tree.leaves(tree)]
        self._run, self._operands, self._cut, self._refuses = run, operands, cut, refuses
        self._traces = traces

    def _trace_for(self, prime: int = 0, times: int = 1) -> row_traces.Traced | None:
        """Returns the trace for any number of rows, or for `prime * times` rows; None if that cannot be traced."""
        number = prime * times
        if number not in self._traces:
            found = row_traces.trace(self._run, self._operands, self._cut, prime, times)
            if found is not None and found.holds_tracers:
                self._traces = {**self._traces}  # a later call must not see tracers of the program around this one
            self._traces[number] = found
        return self._traces[number]

    @property
    def _traced(self) -> row_traces.Traced | None:
        """The trace for any number of rows; None if there is none, or if its results have other ranks than these."""
        found = self._trace_for() if self.rows is not None else None
        ranks = [*map(len, self.leaves)]
        return found if found is not None and [x.ndim for x in found.jaxpr.out_avals] == ranks else None

    @functools.cached_property
    def _by_sizes(self) -> tuple[list[int | str | None], str]:
        """The axis of each leaf, found from its shapes for other numbers of rows: see `axes_by_sizes`."""
        return axes_by_sizes(self.leaves, self.rows or 0, self._total, self._shapes_for)

    def _shapes_for(self, number: int) -> Tree:
        """Returns the shapes of the results for another number of rows."""
        leaves, treedef = jax.tree.flatten(self._operands)
        shapes = []
        for x, axis in zip(leaves, self._cut, strict=True):
            shape = tuple(size + (number - (self.rows or 0)) * (i == axis) for i, size in enumerate(jnp.shape(x)))
            shapes.append(jax.ShapeDtypeStruct(shape, jnp.result_type(x)))
        return jax.eval_shape(self._run, *treedef.unflatten(shapes))

    @property
    def is_known(self) -> bool:
        """Whether some result has a shape, and the function could be traced with other numbers of rows."""
        if self.rows is None or not any(self.leaves):
            return False
        return self._traced is not None or bool(self._by_sizes[0])

    def axis(self, index: int) -> int | str | None:
        """Returns the leaf's one axis that is proportional to the rows; None if none depends on them; else why not."""
        if self.rows is None or not self.leaves[index]:
            return None  # saves a trace: most losses are terms and scalars
        if self._traced is not None:
            return self._traced.axis(index)
        axes, problem = self._by_sizes
        if axes:
            return axes[index]
        if not any(size and size % self.rows == 0 for size in self.leaves[index]):
            return None  # no axis can consist of rows
        return f"loss_fn fails for other numbers of rows ({problem}), so that nothing tells what its axes are"

    def depends(self, index: int) -> bool:
        """Returns True for a leaf whose values depend on those of the rows."""
        if self.rows is None:
            return False
        if self._traced is not None:
            return self._traced.depends(index)
        jaxpr = jax.make_jaxpr(self._run)(*self._operands)
        return reached(jaxpr, [axis is not None for axis in self._cut])[index]

    def draws(self, index: int) -> bool:
        """Returns True for a leaf that is made of random numbers, because each replica draws its own."""
        keys = [hasattr(x, "dtype") and is_key(x) for x in jax.tree.leaves(self._operands)]
        if not any(keys):
            return False
        jaxpr = jax.make_jaxpr(self._run)(*self._operands) if self._traced is None else self._traced.jaxpr
        return reached(jaxpr, keys)[index]

    @functools.cached_property
    def _numbered(self) -> list[row_traces.Traced]:
        """The traces for two fixed numbers of rows: one that is read together with the other, or both if they differ.

        There are none if the function does not take these numbers.
        """
        for times in (PAIRS, GROUPS):
            found: list[row_traces.Traced] = []
            for prime in row_traces.PRIMES:
                traced = self._trace_for(prime, times)
                if traced is None or len(traced.jaxpr.out_avals) != len(self.leaves):
                    break
                found.append(traced)
            else:
                pair = found[-1].paired_with(found[0])
                return found if pair is found[-1] else [pair]
        return []

    def _agreed(self, at: Sequence[int], say: Callable[[row_traces.Traced], list[Said]]) -> list[Said]:
        """Returns what `say` finds in the trace for any number of rows.

        If that trace cannot follow these results, asks the traces for fixed numbers; then a fault counts only if all
        of them have it.
        """
        if self.rows is None or not self._refuses:
            return []
        if self._traced is not None and all(map(self._traced.is_followed, at)):
            return say(self._traced)
        said = [say(traced) for traced in self._numbered or filter(None, [self._traced])]
        return [functools.reduce(lambda x, y: x and y, each) for each in zip(*said, strict=True)]

    def grows(self, index: int) -> bool:
        """Returns True for a leaf that depends on the number of rows, but not on their values."""
        return any(self._agreed([index], lambda traced: [traced.grows(index)]))

    def refuse_joined(self, index: int, name: str) -> None:
        """Raises a `TypeError` for an array with the rows of several arrays: a gather would put them out of order."""
        if any(self._agreed([index], lambda traced: [traced.is_joined(index)])):
            raise TypeError(
                f"{name} has the rows of several arrays, one after the other; the outputs of the replicas are joined "
                f"along the axis of the rows, which would change the order of the rows. Return a tuple of the arrays, "
                f"and concatenate them when they have all rows."
            )

    def _faults(self, kind: row_traces.TermKind, at: Sequence[int], name: str) -> list[Fault | None]:
        """Returns, for each leaf, why it is not of this kind, or None.

        In training it also raises a `TypeError` if a backward pass of the user's own combines several rows.
        """
        self._refuse_broadcast_row(name)

        def say(traced: row_traces.Traced) -> list[Fault | None]:
            step, fault = traced.step
            cut = fault if (self.rows or 0) % step else None
            return [traced.backward, *(found or cut for found in traced.faults(kind, at))]

        found = self._agreed(at, say)
        if found and self._way is IN_TRAINING:
            _refuse_backward(found[0], name)
        return found[1:]

    def _refuse_broadcast_row(self, name: str) -> None:
        """Raises a `TypeError` if a chunk of one row may have been broadcast to the rows of an array that is not cut.

        With more rows in a chunk the shapes would not fit together.
        """
        if not self._refuses or self.rows != 1 or self._total < 2 or self._traced is not None or self._numbered:
            return
        consts = jax.make_jaxpr(self._run)(*self._operands).consts
        params, batch, _ = self._operands
        whole = [
            x
            for x, axis in zip(jax.tree.leaves(batch), self._cut[len(jax.tree.leaves(params)) :], strict=False)
            if axis is None
        ]
        _, problem = _first_accepted((self._total + 1,), self._shapes_for, self.leaves)
        if "broadcast" in problem and any(jnp.shape(x)[:1] == (self._total,) for x in (*consts, *whole)):
            raise TypeError(
                f"{name} is made of 1 row, and the function fails for other numbers of rows ({problem}); an array of "
                f"all {self._total} rows, which is not cut, would be combined with each row. Pass that array with the "
                f"batch, so that it is cut like the rows."
            )

    def refuse_backward(self, name: str) -> None:
        """Raises a `TypeError` if the function has a backward pass of the user's own that combines several rows."""
        for found in self._agreed([], lambda traced: [traced.backward]):
            _refuse_backward(found, name)

    def refuse_no_mean(self, index: int, name: str) -> None:
        """Raises a `TypeError` for a scalar that is not a mean over the rows; accepts one that cannot be followed."""
        for found in filter(None, self._faults("mean", [index], name)):
            way = _sentence((_COLUMN if _is_of_a_column(found) else _FIRST.get(found.kind, "")) + self._way)
            raise TypeError(
                f"{name} is a scalar, and it is {_what(found)}; a scalar counts as the mean over the rows of the "
                f"chunk. {way} (if the mean of the chunks' values is meant: jdp.Mean(x * n, n))."
            )

    def refuse_moved(self, index: int, name: str) -> None:
        """Raises a `TypeError` for an output whose rows are in another order, or that depends on their positions."""
        for found in self._faults("rows", [index], name):
            if found is not None and found.kind in ("count", "order", "row"):
                raise TypeError(
                    f"{name} has an entry for each row, and is {_what(found)}; the criterion gets the outputs of all "
                    f"rows, in the order of the batch. Do that in the criterion."
                )

    def refuse_pairs(self, index: int, name: str, is_averaged: bool = False) -> None:
        """Raises a `TypeError` for entries per row that also depend on other rows; a loss's entries are averaged."""
        for found in filter(None, self._faults("vector" if is_averaged else "rows", [index], name)):
            raise TypeError(
                f"{name} has an entry for each row, and is {_what(found)}; each entry must be made of its own row "
                f"alone. {_sentence(self._way)}."
            )

    def refuse_no_sums(self, at: Sequence[int], name: str) -> None:
        """Raises a `TypeError` for a term whose total or count is not a sum over the rows."""
        kind: row_traces.TermKind = "sum" if len(at) == 1 else "count"
        for part, found in zip(("total", "count"), self._faults(kind, at, name), strict=False):
            if found is None:
                continue
            what = _what(found) if found.kind != "sum" else "no sum over the rows: it does not grow with their number"
            way = "Return a mean over the rows, and what does not depend on them, without a marker"
            if kind == "count":
                way = "Return jdp.Mean(total, count) of plain sums over the rows (count + 1e-6 where it may be 0)"
            way = "Leave the collective out" if found.kind == "added" else way
            raise TypeError(
                f"{name} is a jdp.{'Mean' if kind == 'count' else 'Sum'} whose {part} is {what}; totals and counts are "
                f"added up over replicas and microbatches. {way}, or {self._way}."
            )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _refuse_backward(found: Fault | None, name: str) -> None:
    if found is not None:
        raise TypeError(
            f"{name} has a backward pass of the user's own (jax.custom_vjp) in it, which is {_what(found)}; each row's "
            f"gradient must be made of that row alone. Call that function in a criterion=, on the outputs of all rows; "
            f"if it changes a parameter's gradient, let the optimizer do that (optax.clip)."
        )


def _is_of_a_column(found: Fault) -> bool:
    """Returns True if the rows are combined elementwise, in n x n entries, as if (n,) and (n, 1) met by mistake."""
    if found.kind != "pairs" or found.operation not in ELEMENTWISE:
        return False
    shape = found.at[0].outvars[0].aval.shape
    return len(shape) == 2 and shape[0] == shape[1]


def _what(found: Fault) -> str:
    where = " at ".join(filter(None, (found.operation, found.line)))
    return f"{_WHAT[found.kind]}{where and f' ({where})'}"


Shapes = dict[int, list[tuple[int, ...]]]
"""By number of rows, the shapes of all leaves."""


def axes_by_sizes(
    leaves: list[tuple[int, ...]], rows: int, total: int, run: Callable[[int], Tree]
) -> tuple[list[int | str | None], str]:
    """Finds the axis of each leaf, as `Followed.axis` returns it, by the shapes of `run(number)` for other numbers.

    If the function accepts no other number of rows, returns an empty list, and a text that says why.
    """
    # Try more rows first, because a model may need a minimum. Twice as many still form pairs or groups of rows.
    seen, problem = _first_accepted((rows * 2, rows + 1), run, leaves)
    if not seen:
        return [], problem
    # An axis that does not change may be padded to a size that holds twice as many rows. It seldom holds all rows of
    # the batch, or `_MANY`.
    many, _ = _first_accepted((-(-max(total, _MANY) // rows) * rows,), run, leaves)
    seen |= many
    fewer: Shapes = {}
    if any(shape and not _changing(shape, i, seen) for i, shape in enumerate(leaves)):
        # An axis may follow the rows up to a limit (`x[:10]`), which may be `rows` or less. Zero rows are below every
        # limit, but not every model accepts zero rows.
        fewer, _ = _first_accepted((0, 1), run, leaves)
    return [_axis_by_sizes(shape, i, rows, seen, fewer) for i, shape in enumerate(leaves)], ""


def _first_accepted(
    numbers: Sequence[int], run: Callable[[int], Tree], leaves: list[tuple[int, ...]]
) -> tuple[Shapes, str]:
    """Returns the shapes for the first of these numbers of rows that the function accepts; if none, the error."""
    problem = ""
    for rows in numbers:
        try:
            with warnings.catch_warnings(action="ignore"):  # the user's own, for example about zero rows
                found = [jnp.shape(x) for x in jax.tree.leaves(run(rows))]
        except Exception as error:  # the model may accept only one number of rows
            text = (str(error).splitlines() or [""])[0][:200]
            problem = f"{type(error).__name__}{f': {text}' if text else ''}"
            continue
        if [*map(len, found)] == [*map(len, leaves)]:
            return {rows: found}, ""
        problem = "another tree or rank"
    return {}, problem


def _changing(shape: tuple[int, ...], index: int, seen: Shapes) -> set[int]:
    """Returns the axes of a leaf whose size differs for some number of rows."""
    return {i for shapes in seen.values() for i in range(len(shape)) if shape[i] != shapes[index][i]}


def _axis_by_sizes(shape: tuple[int, ...], index: int, rows: int, seen: Shapes, fewer: Shapes) -> int | str | None:
    changing = _changing(shape, index, seen)
    # A shape that changes is not compared with `fewer`: pairs (n // 2) follow the rows, although one row has none.
    is_limited = not changing and bool(_changing(shape, index, fewer))
    for others, shapes in (fewer if is_limited else seen).items():
        other = shapes[index]
        if is_limited or len(changing) > 1 or any(shape[i] * others != other[i] * rows for i in changing):
            return f"{list(other)} for {others} rows, which is not in proportion along one axis"
    return changing.pop() if changing else None


_MANY = 129  # rows: more than arrays are usually padded to
