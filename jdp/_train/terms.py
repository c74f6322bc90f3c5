"""What a loss function returns, as terms that add up over microbatches and replicas."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core.inputs import is_array
from .._core.layout import Tree
from .._core.outputs import Marked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean that is `total / count` over the whole batch: sums of both over all replicas, divided once.

    For a loss or a metric whose weight is not the number of rows: the loss per token of sentences
    that differ in length. Replicas and microbatches each give their own total and count. The count
    is a constant to the gradient.

    Args:
        total: the sum, 0-d for a loss; a metric may have a shape, which does not follow the rows.
        count: what it is a sum of: a number of tokens or a sum of weights, of the total's shape or 0-d.
            Both may be floats, integers or bools.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> def loss_fn(w, x, mask):
        ...     return jdp.Mean(jnp.sum(w * x * mask), jnp.sum(mask))
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> x, mask = np.array([[1.0, 2.0], [6.0, 8.0]]), np.array([[1, 1], [1, 0]])
        >>> float(dp.value_and_grad(loss_fn)(2.0, x, mask)[0])
        6.0

    Source: "Fixing gradient accumulation", as `num_items_in_batch` in transformers/trainer.py: a mean of means is
    no mean.
    """

    total: ArrayLike
    count: ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A metric that is a sum over the whole batch: added up over all replicas, microbatches and processes.

    For what is neither a mean over rows nor an entry per row: a confusion matrix, a histogram, a number of hits.

    Args:
        total: the sum over the rows that the function was given. Any shape that does not follow the rows. Floats
            keep their dtype; integers and bools are added as 32 bits at least, as `jnp.sum` adds them.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> def loss_fn(w, x):
        ...     return jnp.mean(w * x), {"positive": jdp.Sum(jnp.sum(x > 0))}
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> (_, metrics), _ = dp.value_and_grad(loss_fn, has_aux=True)(2.0, np.array([-1.0, 3.0, 5.0]))
        >>> int(metrics["positive"])
        2

    Source: `dist_reduce_fx="sum"` of torchmetrics.
    """

    total: ArrayLike


class Form(NamedTuple):
    """How one value goes on: the mean over rows, a total over a count, a sum, or entries per row along `axis`."""

    kind: Literal["mean", "ratio", "sum", "rows"]
    dtype: Any
    axis: int | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Forms:
    """How what a loss function returned, `(loss, aux)`, is made of what is added up and of entries per row."""

    treedef: Any
    each: tuple[Form, ...]
    is_ratio: bool  # whether the loss is a `Mean`

    @property
    def axes(self) -> list[int]:
        return [form.axis for form in self.each if form.axis is not None]

    def marked(self, sums: Sequence[Any], rows: Sequence[Any], weight: float) -> tuple[Tree, list[Marked]]:
        """The tree, each leaf with its reduction, and the counts; `weight` is that of all rows together."""
        added, stacked, leaves, counts = iter(sums), iter(rows), [], []
        for form in self.each:
            if form.kind == "rows":
                leaves.append(Marked(next(stacked), form.axis))
                continue
            over: Any = weight if form.kind == "mean" else None
            total = next(added)
            if form.kind == "ratio":
                over = next(added)
                counts.append(Marked(over, None, "sum"))
            leaves.append(Marked(total, None, "sum", over=over, dtype=form.dtype))
        return jax.tree.unflatten(self.treedef, leaves), counts


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or is_array(x)


def _is_number(x: Any) -> bool:
    return _is_array(x) or isinstance(x, float | int)


def is_mean(x: Any) -> bool:
    return isinstance(x, Mean)


def loss_value(loss: Any, rows: int | None, verb: str) -> Any:
    """The number to differentiate: a scalar, the mean of a vector, or the total of a `Mean`; else a `TypeError`."""
    what = type(loss).__name__
    if is_mean(loss):
        what = f"a jdp.Mean of a {type(loss.total).__name__} and a {type(loss.count).__name__}"
        if _is_number(loss.total) and _is_number(loss.count):
            total, count = jnp.asarray(loss.total), jnp.asarray(loss.count)
            if not total.ndim and not count.ndim and jnp.issubdtype(total.dtype, jnp.floating):
                return total
            what = f"a jdp.Mean of {total.dtype}{list(total.shape)} and {count.dtype}{list(count.shape)}"
    elif _is_array(loss) or isinstance(loss, float):
        loss = jnp.asarray(loss)
        if jnp.issubdtype(loss.dtype, jnp.floating):
            if not loss.ndim:
                return loss
            if loss.ndim == 1 and rows in (None, loss.shape[0]):
                return loss.mean()
        what = f"{loss.dtype}{list(loss.shape)} for {rows} rows"
    column = ": loss[:, 0] is the vector" if _is_array(loss) and jnp.shape(loss) == (rows, 1) else ""
    pair = ", or pass has_aux=True for (loss, aux)" if verb == "value_and_grad" and isinstance(loss, tuple) else ""
    raise TypeError(
        f"jdp.{verb}: the loss is {what}; it is a real scalar (the mean over the rows), a vector with one entry per "
        f"row, or jdp.Mean(total, count) of two scalars. Return one of these three{column or pair}."
    )


def terms(
    loss: Any, aux: Tree, rows: int | None, total: int, weight: float, more: Callable[[int], Tree], verb: str
) -> tuple[Forms, list[Any], list[Any]]:
    """The terms of one microbatch of so many rows (None: nothing is cut) of `total`, which weighs `weight`.

    They are their forms, what is added up, and what has entries per row. `more` gives the shapes of `(loss, aux)` for
    so many rows more: what follows the rows is told by that, never by sizes that happen to be equal. Where it cannot be
    told, a `TypeError` names the path.
    """
    number = loss_value(loss, rows, verb)
    followed = Followed((loss, aux), rows, total, more)
    if not is_mean(loss) and jnp.ndim(loss) and followed.seen and followed.axis(0) != 0:
        raise TypeError(
            f"jdp.{verb}: the loss is {_described(loss)} for {rows} rows and for other numbers of them; a vector has "
            f"one entry per row. Return its mean, a scalar."
        )
    paths, treedef = jax.tree_util.tree_flatten_with_path((loss if is_mean(loss) else number, aux), is_leaf=is_marker)
    found: list[tuple[Form, list[Any]]] = []
    at = 0  # the number of a leaf among all arrays: a marker has several
    for path, x in paths:
        name = f"jdp.{verb}: {'metrics' if verb == 'train_step' else 'aux'}{jax.tree_util.keystr(path[1:])}"
        if is_marker(x) and all(map(_is_number, vars(x).values())):
            found.append(_marked(x, name, followed, at))
        else:
            found.append(_unmarked(x, name, followed, at, weight))
        at += len(jax.tree.leaves(x))
    sums = [x for form, values in found for x in values if form.kind != "rows"]
    stacked = [x for form, values in found for x in values if form.kind == "rows"]
    return Forms(treedef, tuple(form for form, _ in found), is_mean(loss)), sums, stacked


def _marked(x: Any, name: str, followed: Followed, at: int) -> tuple[Form, list[Any]]:
    """The form and the summands of a `Mean` or a `Sum`, whose first array is the one with number `at`."""
    for i in range(at, at + len(vars(x))) if followed.seen else ():
        if (axis := followed.axis(i)) is not None:
            where = f"along axis {axis}" if isinstance(axis, int) else "in its shape"
            raise TypeError(
                f"{name} is a jdp.{type(x).__name__} of {list(followed.leaves[i])} for {followed.rows} rows, with rows "
                f"{where}; replicas add up arrays of one shape. Sum over the rows in it first, or return the array "
                f"itself, which is gathered."
            )
    total = jnp.asarray(x.total)
    dtype = total.dtype if jnp.issubdtype(total.dtype, jnp.inexact) else None
    if not is_mean(x):
        return Form("sum", dtype), [_wide(total)]
    return Form("ratio", dtype), [_wide(total), _wide(jax.lax.stop_gradient(jnp.asarray(x.count)))]


def _unmarked(x: Any, name: str, followed: Followed, at: int, weight: float) -> tuple[Form, list[Any]]:
    """The form and the value of what is no marker: entries per row, or a mean over the rows."""
    if isinstance(x, float):
        x = jnp.asarray(x)
    axis = followed.axis(at) if _is_array(x) and x.ndim else None
    if isinstance(axis, str):
        raise TypeError(
            f"{name} is {_described(x)} for {followed.rows} rows, and {axis}; an array beside the loss has rows along "
            f"one axis (it is gathered) or along none (it is a mean over the rows). Return jdp.Mean(total, count) for "
            f"a mean, jdp.Sum(total) for a sum, or an array with rows along one axis."
        )
    if axis is not None:
        return Form("rows", x.dtype, axis), [x]
    if _is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact):
        return Form("mean", x.dtype), [_wide(x) if weight == 1 else _wide(x) * weight]
    raise TypeError(
        f"{name} is {_described(x)}; beside the loss stand floats (the mean over the rows), arrays with entries per "
        f"row (which are gathered), jdp.Mean(total, count) and jdp.Sum(total), which is right for a number of hits. "
        f"Return one of these."
    )


Shapes = list[tuple[int, list[tuple[int, ...]]]]
"""Numbers of rows, each with the shapes of all leaves."""


class Followed:
    """How the shapes of a tree of arrays follow the number of rows: seen by tracing with other numbers of them."""

    def __init__(self, tree: Tree, rows: int | None, total: int, more: Callable[[int], Tree]) -> None:
        self.rows, self._more = rows, more
        self.leaves = [jnp.shape(x) if _is_array(x) else () for x in jax.tree.leaves(tree)]
        self.seen: Shapes = []  # for more rows
        self._fewer: Shapes = []
        self._problem = ""  # why none was seen
        if rows is None or not any(self.leaves):
            return
        # Twice as many, which a model of pairs or groups of rows takes; one more, for a model with a least number.
        if not self._see(rows * 2, self.seen) and not self._see(rows + 1, self.seen):
            return
        # What follows may end at a limit, and what does not may be padded: to a size that holds twice as many rows as
        # well, but seldom all rows of the batch or `_MANY`.
        self._see(-(-max(total, _MANY) // rows) * rows, self.seen)
        if any(x and not self._apart(i) for i, x in enumerate(self.leaves)):
            # The limit may be `rows` or less. Without rows there is nothing to end; but not each model can do without.
            if not self._see(0, self._fewer):
                self._see(1, self._fewer)

    def _see(self, rows: int, seen: Shapes) -> bool:
        """Adds the shapes for so many rows to `seen`; whether the function takes as many."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of the user's own about no rows, say
                found = [jnp.shape(x) for x in jax.tree.leaves(self._more(rows - (self.rows or 0)))]
        except Exception as error:  # a model for one number of rows alone
            text = (str(error).splitlines() or [""])[0][:200]
            self._problem = f"{type(error).__name__}{f': {text}' if text else ''}"
            return False
        if [*map(len, found)] != [*map(len, self.leaves)]:
            self._problem = "another tree or rank"
            return False
        seen.append((rows, found))
        return True

    def _apart(self, index: int, seen: Shapes | None = None) -> set[int]:
        """The axes of a leaf that are of another size for some number of rows that was seen (None: of more rows)."""
        shape, seen = self.leaves[index], self.seen if seen is None else seen
        return {i for _, shapes in seen for i in range(len(shape)) if shape[i] != shapes[index][i]}

    def axis(self, index: int) -> int | str | None:
        """The one axis of a leaf that follows the rows in proportion; None where none does; else what it does."""
        shape, rows = self.leaves[index], self.rows
        if rows is None or not shape:
            return None
        if not self.seen:
            if not any(size and size % rows == 0 for size in shape):
                return None  # no axis can be made of rows
            return f"loss_fn fails for other numbers of rows ({self._problem}), so that nothing tells what its axes are"
        apart = self._apart(index)
        ended = set() if apart else self._apart(index, self._fewer)  # a pair of rows is none for one row, and follows
        for others, shapes in self._fewer if ended else self.seen:
            other = shapes[index]
            if ended or len(apart) > 1 or any(shape[i] * others != other[i] * rows for i in apart):
                return f"{list(other)} for {others} rows, which is not in proportion along one axis"
        return apart.pop() if apart else None


_MANY = 129  # rows: more than arrays are usually padded to


def is_marker(x: Any) -> bool:
    return isinstance(x, Mean | Sum)


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if _is_array(x) else f"a {type(x).__name__}"


def _wide(x: Any) -> Any:
    """Sums of 16-bit floats are made in 32 bits, and those of bools and small integers, as by `jnp.sum`."""
    dtype = x.dtype
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return x.astype(jnp.float32)
    if dtype.itemsize < 4 and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)):
        return x.astype(jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)
    return x
