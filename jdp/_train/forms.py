"""Finds the form of each value that a loss function returns for its chunk, and what of it is added or gathered.

A form says how the value of the whole batch is made: of sums over all microbatches and replicas (a mean, a
`jdp.Mean`, a `jdp.Sum`, a combination of them), or of entries per row, which are gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.layout import Layout, Tree
from .._core.outputs import Marked, as_divisor
from .followed import Followed
from .terms import Combination, Mean, Sum, Term, described, is_number, is_term


class SeveralTerms(Exception):
    """A signal, not an error: the gradient needs the sums over all rows first.

    It is raised if the loss has several denominators, or one that is differentiated; also for one denominator in a
    program with float16, because a gradient that is not divided yet may overflow there.
    """


class Form(NamedTuple):
    """How one value of the whole batch is made.

    It is a "mean" over the rows, a "ratio" of a total and a count (a `jdp.Mean`), a "sum", or a "combination" of such
    `parts` (a factor before each term). Or it has an entry per row along `axis`: "rows", or "first" if every entry is
    the same value.
    """

    kind: Literal["mean", "ratio", "sum", "combination", "rows", "first"]
    dtype: Any
    axis: int | None = None
    parts: tuple[Form, ...] = ()

    @property
    def summands(self) -> int:
        """The number of sums that the value is made of; 1 for entries per row, too."""
        return sum(part.summands for part in self.parts) if self.parts else 1 + (self.kind == "ratio")

    def value(self, sums: Iterator[Any], weight: float) -> Any:
        """Returns the value, computed from its sums over all rows, which are taken from the iterator."""
        if self.kind == "combination":
            found = [part.value(sums, weight) for part in self.parts]
            first, *rest = (f * t for f, t in zip(found[::2], found[1::2], strict=True))
            return sum(rest, first)
        total = next(sums)
        if self.kind == "sum":
            return total
        return total / (as_divisor(next(sums), total) if self.kind == "ratio" else total.dtype.type(weight))

    def marked(self, sums: Iterator[Any], rows: Iterator[Any], weight: float, counts: list[Marked]) -> Any:
        """Returns the value, marked with its reduction; appends the count of a ratio to `counts`."""
        if self.kind == "combination":
            found = [part.marked(sums, rows, weight, counts) for part in self.parts]
            return Combination(tuple(found[::2]), tuple(map(Sum, found[1::2])))
        if self.axis is not None:
            return Marked(next(rows), self.axis)
        over: Any = weight if self.kind == "mean" else None
        total = next(sums)
        if self.kind == "ratio":
            over = next(sums)
            counts.append(Marked(over, None, "sum"))
        return Marked(total, None, "sum", over=over, dtype=self.dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Forms:
    """The tree of a function's results, `(loss, aux)` or outputs, and the form of each value in it."""

    treedef: Any
    each: tuple[Form, ...]

    @property
    def axes(self) -> list[int]:
        return [form.axis for form in self.each if form.axis is not None]

    @property
    def is_mean(self) -> bool:
        """Whether the loss (the first value) is the mean over rows, so that each replica is weighted by its rows."""
        return self.each[0].kind == "mean"

    def marked(self, sums: Sequence[Any], rows: Sequence[Any], weight: float) -> tuple[Tree, list[Marked]]:
        """Returns the tree, each leaf with its reduction, and the counts; `weight` is the weight of all rows."""
        added, stacked, counts = iter(sums), iter(rows), []
        leaves = [form.marked(added, stacked, weight, counts) for form in self.each]
        return jax.tree.unflatten(self.treedef, leaves), counts

    def has_shares(self, layout: Layout) -> bool:
        """Returns True if each microbatch differentiates its share of the mean over all rows.

        Its gradients are only added up then, and each row has the cotangent that it has on one device. A backward pass
        of the user's own (`jax.custom_vjp`) needs that, because it may not be linear. A 16-bit loss would round the
        shares: there each microbatch differentiates its own mean, `weights` weights it, and `divisor` divides the sum.
        """
        return self.is_mean and layout.is_cut and self.each[0].dtype.itemsize > 2

    def weights(self, layout: Layout, size: int, weight: float, seed: float) -> tuple[float, float]:
        """Returns the cotangent of a microbatch's loss and a factor for its gradient: both weight a mean by its rows.

        The loss has been multiplied by `seed`. If BatchNorms are synchronised, that is the microbatch's weight, because
        each replica's gradient depends on the losses of all replicas; otherwise it is 1.
        """
        if self.has_shares(layout):
            return size / sum(layout.sizes) / seed, 1.0
        return 1.0, weight / seed if self.is_mean else 1.0

    def divisor(self, counts: Sequence[Marked], weight: float, layout: Layout) -> Any:
        """Returns the divisor for the sum of the loss's gradients over all rows; None if the loss is no mean."""
        if self.has_shares(layout):
            return 1.0  # not None, because of `_divisor` in balanced_sum.py
        return counts[0].value if self.each[0].kind == "ratio" else weight if self.is_mean else None


def loss_value(loss: Any, rows: int | None, verb: str) -> Any:
    """Returns the number to differentiate: a scalar, the mean of a vector, the total of a term; or raises `TypeError`.

    A combination is only checked, term by term: its gradient needs two passes, and not this number.
    """
    if isinstance(loss, Combination):
        return [loss_value(x, rows, verb) for x in loss.terms][0]
    what = type(loss).__name__
    if isinstance(loss, Term):
        numbers = vars(loss)
        what = f"a jdp.{what} of {' and '.join(f'a {type(x).__name__}' for x in numbers.values())}"
        if all(map(is_number, numbers.values())):
            total, *count = map(jnp.asarray, numbers.values())
            if not any(x.ndim for x in (total, *count)) and jnp.issubdtype(total.dtype, jnp.floating):
                return total
            what = f"a jdp.{type(loss).__name__} of {' and '.join(map(described, (total, *count)))}"
    elif is_number(loss) and not isinstance(loss, int):
        loss = jnp.asarray(loss)
        if jnp.issubdtype(loss.dtype, jnp.floating):
            if not loss.ndim:
                return loss
            if loss.ndim == 1 and rows in (None, loss.shape[0]):
                return loss.mean()
        what = f"{loss.dtype}{list(loss.shape)} for {rows} rows"
    column = ": loss[:, 0] is the vector" if getattr(loss, "shape", ()) == (rows, 1) else ""
    pair = ", or pass has_aux=True for (loss, aux)" if verb == "value_and_grad" and isinstance(loss, tuple) else ""
    raise TypeError(
        f"jdp.{verb}: the loss is {what}; it is a real scalar (the mean over the rows), a vector with one entry per "
        f"row, or jdp.Mean(total, count), jdp.Sum(total) or a sum of such terms. Return one of these{column or pair}."
    )


def forms_of_results(
    loss: Any, aux: Tree, rows: int | None, weight: float, followed: Followed, verb: str
) -> tuple[Forms, list[Any], list[Any]]:
    """Returns the forms, the sums and the entries per row of one microbatch of this weight.

    `rows` is its number of rows (None: nothing is cut). Traces with other numbers of rows show which axes are rows; a
    size that happens to equal `rows` proves nothing. A `TypeError` names the path of a value that no trace explains.
    An evaluation has no loss: `loss` is None.
    """
    has_loss = verb != "evaluate"
    if has_loss:
        _check_loss(loss, rows, followed, verb)
    paths, treedef = jax.tree_util.tree_flatten_with_path((loss, aux), is_leaf=is_term)
    root = f"jdp.{verb}: {'aux' if verb == 'value_and_grad' else 'metrics'}"
    names = [root + jax.tree_util.keystr(path[1:]) for path, _ in paths]
    for name, (_, x) in zip(names[has_loss:], paths[has_loss:], strict=True):
        if not is_number(x) and not _is_term_of_numbers(x):  # first of all, because no trace returns such a value
            raise _no_form(x, name)
    found: list[tuple[Form, list[Any]]] = []
    at = 0  # the index of its first array among all arrays; a term has several
    for i, (name, (_, x)) in enumerate(zip(names, paths, strict=True)):
        if i or not has_loss:
            form_of = _form_of_term if is_term(x) else _form_of_value
            found.append(form_of(x, name, followed, at, weight))
        else:
            found.append(_form_of_loss(x, followed, at, weight, f"jdp.{verb}: the loss"))
        at += len(jax.tree.leaves(x))
    return _forms_of(treedef, found)


def _check_loss(loss: Any, rows: int | None, followed: Followed, verb: str) -> None:
    loss_value(loss, rows, verb)  # raises a TypeError for other kinds of losses
    if is_number(loss) and jnp.ndim(loss) and followed.is_known and followed.axis(0) != 0:
        raise TypeError(
            f"jdp.{verb}: the loss is {described(loss)} for {rows} rows and for other numbers of them; a vector has "
            f"one entry per row. Return its mean, a scalar."
        )


def forms_of_outputs(out: Tree, size: int, followed: Followed, verb: str) -> tuple[Forms, list[Any], list[Any]]:
    """Returns the forms of a forward pass's outputs on `size` rows, no sums, and the outputs as entries per row."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(out, is_leaf=is_term)
    names = [f"jdp.{verb}: outputs{jax.tree_util.keystr(path)}" for path, _ in paths]
    for name, (_, x) in zip(names, paths, strict=True):
        _refuse_no_output(x, name)  # first of all, because no trace returns such a value
    followed.refuse_backward(f"jdp.{verb}: the forward pass")
    found = []
    for i, (name, (_, value)) in enumerate(zip(names, paths, strict=True)):
        x = jnp.asarray(value)
        axis = followed.axis(i)
        if isinstance(axis, int) and x.shape[axis] % size == 0:
            if x.shape[axis] > size:
                followed.refuse_joined(i, name)
            followed.refuse_moved(i, name)
            found.append((Form("rows", x.dtype, axis), [x]))
        elif not x.ndim and followed.draws(i):
            raise TypeError(
                f"{name} is one number that is drawn from a random key, and each replica draws its own; the criterion "
                f"gets the outputs of all rows. Return it once for each row: jnp.full(len(x), t)."
            )
        elif followed.rows is None or axis is None and not x.ndim and not (followed.depends(i) or followed.grows(i)):
            found.append((Form("first", x.dtype, 0), [jnp.broadcast_to(x, (size, *x.shape))]))
        else:
            why = "it depends on them" if not x.ndim else "no axis of it has entries for each row"
            why = axis if isinstance(axis, str) else why
            raise TypeError(
                f"{name} is {described(x)} for {followed.rows} rows, and {why}; the outputs of all rows are put "
                f"together for the criterion, so an output has rows along one axis. Return an entry for each row, and "
                f"reduce it in the criterion."
            )
    return _forms_of(treedef, found)


def _refuse_no_output(x: Any, name: str) -> None:
    """Raises a `TypeError` for an output that is no array and no number."""
    if is_term(x):
        raise TypeError(
            f"{name} is a jdp.{type(x).__name__}; a forward pass returns plain arrays, because the criterion sees "
            f"all rows and needs no marker. Return the arrays that it is made of."
        )
    if not is_number(x):
        raise TypeError(
            f"{name} is {described(x)}; outputs are arrays, which are gathered for the criterion. Return arrays, "
            f"and let the criterion take the rest from the batch."
        )


def _is_term_of_numbers(x: Any) -> bool:
    return is_term(x) and (isinstance(x, Combination) or all(map(is_number, vars(x).values())))


def _forms_of(treedef: Any, found: list[tuple[Form, list[Any]]]) -> tuple[Forms, list[Any], list[Any]]:
    sums = [x for form, values in found for x in values if form.axis is None]
    stacked = [x for form, values in found for x in values if form.axis is not None]
    return Forms(treedef, tuple(form for form, _ in found)), sums, stacked


def _form_of_loss(x: Any, followed: Followed, at: int, weight: float, name: str) -> tuple[Form, list[Any]]:
    """Returns the form and the summands of a loss: as for a metric, except that a vector stands for its mean."""
    if is_term(x):
        return _form_of_term(x, name, followed, at, weight)
    x = jnp.asarray(x)
    if x.ndim:
        followed.refuse_pairs(at, name, is_averaged=True)
    else:
        followed.refuse_no_mean(at, name)
    return _form_of_mean(x.mean() if x.ndim else x, weight)


def _form_of_mean(x: Any, weight: float) -> tuple[Form, list[Any]]:
    return Form("mean", x.dtype), [at_least_32_bits(x) if weight == 1 else at_least_32_bits(x) * weight]


def _form_of_term(x: Any, name: str, followed: Followed, at: int, weight: float) -> tuple[Form, list[Any]]:
    """Returns the form and the summands of a term; `at` is the index of its first array."""
    if isinstance(x, Combination):
        return _form_of_combination(x, name, followed, at, weight)
    for i in range(at, at + len(vars(x))) if followed.is_known else ():
        if (axis := followed.axis(i)) is not None:
            where = f"along axis {axis}" if isinstance(axis, int) else "in its shape"
            raise TypeError(
                f"{name} is a jdp.{type(x).__name__} of {list(followed.leaves[i])} for {followed.rows} rows, with rows "
                f"{where}; replicas add up arrays of one shape. Sum over the rows in it first, or return the array "
                f"itself, which is gathered."
            )
    followed.refuse_no_sums(range(at, at + len(vars(x))), name)
    total = jnp.asarray(x.total)
    dtype = total.dtype if jnp.issubdtype(total.dtype, jnp.inexact) else None
    if not isinstance(x, Mean):
        return Form("sum", dtype), [at_least_32_bits(total)]
    return Form("ratio", dtype), [at_least_32_bits(total), at_least_32_bits(jnp.asarray(x.count))]


def _form_of_combination(
    x: Combination, name: str, followed: Followed, at: int, weight: float
) -> tuple[Form, list[Any]]:
    """Returns the form and the summands of a sum of terms; those of a factor come before those of its term."""
    forms: list[Form] = []
    values: list[Any] = []
    first = at + len(x.factors)
    for i, (factor, term) in enumerate(zip(x.factors, x.terms, strict=True)):
        if followed.depends(at + i) or followed.grows(at + i) or followed.draws(at + i):
            what = "the rows" if followed.depends(at + i) else "their number"
            what = "a random key" if followed.draws(at + i) else what
            raise TypeError(
                f"{name} has a factor that depends on {what}; factors of terms are the same on all replicas. Pass "
                f"the whole loss as criterion=, which is called once with the outputs of all rows."
            )
        if isinstance(term, jax.Array) and term.ndim == 1 and followed.axis(first) == 0:
            followed.refuse_pairs(first, name, is_averaged=True)
            of_term = _form_of_mean(jnp.mean(term), weight)
        elif is_term(term):
            of_term = _form_of_term(term, name, followed, first, weight)
        else:
            followed.refuse_no_mean(first, name)
            of_term = _form_of_value(term, name, followed, first, weight)
            if of_term[0].kind == "rows":
                raise TypeError(
                    f"{name} has {described(term)} among its terms ({followed.rows} rows); an array among terms is "
                    f"a vector with one entry per row, which stands for its mean. Take the mean over the other axes."
                )
        dtype, of_total = jnp.result_type(float, factor), of_term[0].dtype
        # A Python number takes the term's dtype, as in JAX, of 32 bits or more: without this, float64 under x64.
        # `of_total` is None for a sum of integers.
        if not hasattr(factor, "dtype") and of_total is not None and jnp.issubdtype(of_total, jnp.floating):
            dtype = jnp.float32 if of_total.itemsize < 4 else of_total
        of_factor = _form_of_mean(jnp.asarray(factor, dtype), weight)
        for form, summands in (of_factor, of_term):
            forms.append(form)
            values += summands
        first += len(jax.tree.leaves(term))
    return Form("combination", None, parts=tuple(forms)), values


def _form_of_value(x: Any, name: str, followed: Followed, at: int, weight: float) -> tuple[Form, list[Any]]:
    """Returns the form of a value that is no term (entries per row, or a mean over the rows), and its summand."""
    is_converted = is_number(x) and not isinstance(x, jax.Array | int)
    x = jnp.asarray(x) if is_converted else x  # numpy's float64 is often no dtype of JAX's
    axis = followed.axis(at) if is_number(x) and jnp.ndim(x) else None
    if isinstance(axis, str):
        raise TypeError(
            f"{name} is {described(x)} for {followed.rows} rows, and {axis}; an array that is returned with the loss "
            f"has rows along one axis (it is gathered), or is 0-d. Return jdp.Mean(total, count) for a mean, "
            f"jdp.Sum(total) for a sum, or an array with rows along one axis."
        )
    if axis is not None:
        followed.refuse_pairs(at, name)
        followed.refuse_joined(at, name)
        return Form("rows", x.dtype, axis), [x]
    if is_number(x) and not isinstance(x, int) and jnp.issubdtype(x.dtype, jnp.inexact) and not x.ndim:
        followed.refuse_no_mean(at, name)
        return _form_of_mean(x, weight)
    raise _no_form(x, name)


def _no_form(x: Any, name: str) -> TypeError:
    """Returns the error for a value from which the value of the whole batch cannot be made."""
    way, where = "Return one of these", "with the loss come"
    if name.startswith("jdp.evaluate"):
        where = "metrics are"
    if is_number(x) and jnp.ndim(x):  # its mean may be meant, as with BatchNorm's statistics
        way = "No axis of it follows the rows: return jdp.Sum(x), or jdp.Mean(x * n, n) of n rows for the mean"
    return TypeError(
        f"{name} is {described(x)}; {where} 0-d floats (the mean over the rows), arrays with entries per "
        f"row (which are gathered), jdp.Mean(total, count) and jdp.Sum(total), which is right for a number of hits. "
        f"{way}."
    )


def at_least_32_bits(x: Any) -> Any:
    """Converts floats, integers and bools of less than 32 bits to 32 bits, as `jnp.sum` does."""
    dtype = x.dtype
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return x.astype(jnp.float32)
    if dtype.itemsize < 4 and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)):
        return x.astype(jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)
    return x
