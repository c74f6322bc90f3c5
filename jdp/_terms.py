"""What a loss function returns, as terms that add up over microbatches and replicas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ._check import is_array
from ._layout import Tree
from ._mean import Mean
from ._outputs import Marked


class Form(NamedTuple):
    """How one value goes on: the mean over rows, a total over a count, or one entry per row along `axis`."""

    kind: Literal["mean", "ratio", "rows"]
    dtype: Any
    axis: int | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("sums", "rows"), meta_fields=("treedef", "forms"))
@dataclasses.dataclass(frozen=True)
class Terms:
    """A loss function's `(loss, aux)`: what is added up, what is put one after the other, and how it is one tree."""

    sums: list[Any]
    rows: list[Any]
    treedef: Any
    forms: tuple[Form, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(form.axis for form in self.forms if form.axis is not None)

    def marked(self, weight: float) -> tuple[Tree, list[Marked]]:
        """The tree, each leaf with its reduction, and the counts; `weight` is that of all rows together."""
        sums, rows, leaves, counts = iter(self.sums), iter(self.rows), [], []
        for form in self.forms:
            if form.kind == "rows":
                leaves.append(Marked(next(rows), form.axis))
            elif form.kind == "mean":
                leaves.append(Marked(next(sums), None, "sum", over=weight, dtype=form.dtype))
            else:
                total, count = next(sums), next(sums)
                counts.append(Marked(count, None, "sum"))
                leaves.append(Marked(total, None, "sum", over=count, dtype=form.dtype))
        return jax.tree.unflatten(self.treedef, leaves), counts


def _is_number(x: Any) -> bool:
    return is_array(x) or isinstance(x, float | int)


def is_mean(x: Any) -> bool:
    return isinstance(x, Mean)


def loss_value(loss: Any, rows: int | None, verb: str) -> Any:
    """The number to differentiate: a scalar, the mean of a vector, or the total of a `Mean`.

    Raises:
        TypeError: it is none of the three.
    """
    what = type(loss).__name__
    if is_mean(loss):
        what = f"a jdp.Mean of a {type(loss.total).__name__} and a {type(loss.count).__name__}"
        if _is_number(loss.total) and _is_number(loss.count):
            total, count = jnp.asarray(loss.total), jnp.asarray(loss.count)
            if not total.ndim and not count.ndim and jnp.issubdtype(total.dtype, jnp.floating):
                return total
            what = f"a jdp.Mean of {total.dtype}{list(total.shape)} and {count.dtype}{list(count.shape)}"
    elif is_array(loss) or isinstance(loss, float):
        loss = jnp.asarray(loss)
        if jnp.issubdtype(loss.dtype, jnp.floating):
            if not loss.ndim:
                return loss
            if loss.ndim == 1 and rows in (None, loss.shape[0]):
                return loss.mean()
        what = f"{loss.dtype}{list(loss.shape)} for {rows} rows"
    raise TypeError(
        f"jdp.{verb}: the loss is {what}; it is a real scalar (the mean over the rows), a vector with one entry per "
        f"row, or jdp.Mean(total, count) of two scalars. Return one of these three."
    )


def terms(loss: Any, aux: Tree, rows: int | None, weight: float, more: Callable[[int], Tree], verb: str) -> Terms:
    """The terms of one microbatch of so many rows (None: nothing is cut), which weighs `weight`.

    `more` gives the shapes of `aux` for a microbatch of more rows, for the axis that counts them.

    Raises:
        TypeError: a value that is none of the three forms, with its path.
    """
    number = loss_value(loss, rows, verb)
    loss = loss if is_mean(loss) else number
    leaves, treedef = jax.tree.flatten((loss, aux), is_leaf=is_mean)
    axes = [None] + _row_axes(leaves[1:], rows, more)
    sums: list[Any] = []
    stacked: list[Any] = []
    forms: list[Form] = []
    for i, (x, axis) in enumerate(zip(leaves, axes, strict=True)):
        if is_mean(x) and _is_number(x.total) and _is_number(x.count):
            total, count = jnp.asarray(x.total), jax.lax.stop_gradient(jnp.asarray(x.count))
            sums += [_wide(total), _wide(count)]
            forms.append(Form("ratio", total.dtype if jnp.issubdtype(total.dtype, jnp.inexact) else None))
            continue
        if isinstance(x, float):
            x = jnp.asarray(x)
        if axis is not None:
            stacked.append(x)
            forms.append(Form("rows", x.dtype, axis))
        elif is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact):
            sums.append(_wide(x) if weight == 1 else _wide(x) * weight)
            forms.append(Form("mean", x.dtype))
        else:
            path = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path((loss, aux), is_leaf=is_mean)[i][0][1:])
            what = f"{x.dtype}{list(x.shape)}" if is_array(x) else f"a {type(x).__name__}"
            raise TypeError(
                f"jdp.{verb}: {path or 'aux'} is {what}; beside the loss stand floats (the mean over the rows), arrays "
                f"with an entry per row (which are gathered) and jdp.Mean(total, count), which is right for a sum or "
                f"a number of hits. Return one of these three."
            )
    return Terms(sums, stacked, treedef, tuple(forms))


def _row_axes(leaves: list[Any], rows: int | None, more: Callable[[int], Tree]) -> list[int | None]:
    """For each leaf the axis that has an entry per row."""
    like = [
        not is_mean(x)
        and is_array(x)
        and rows is not None
        and rows in x.shape  # an array as long may have another meaning
        for x in leaves
    ]
    if not any(like):
        return [None] * len(leaves)
    others: list[Any] = [None] * len(leaves)
    for extra in (1, rows or 0):  # one more; or twice as many, for a model of pairs or groups of rows
        try:
            others = jax.tree.leaves(more(extra), is_leaf=is_mean)
            break
        except Exception:  # a model for this number of rows alone
            continue

    def axis(x: Any, other: Any) -> int | None:
        if other is None:
            return x.shape.index(rows)
        return next((i for i, (a, b) in enumerate(zip(x.shape, other.shape, strict=True)) if a != b), None)

    return [axis(x, other) if candidate else None for x, other, candidate in zip(leaves, others, like, strict=True)]


def _wide(x: Any) -> Any:
    """Sums of 16-bit floats are made in 32 bits."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x
