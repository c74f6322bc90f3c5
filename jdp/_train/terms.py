"""What a loss on the chunk may return apart from plain arrays: `jdp.Mean`, `jdp.Sum`, sums of them with factors."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core.inputs import is_array
from .._core.layout import Tree

FACTORS = (
    "a sum of terms takes real factors that do not depend on the rows, because totals and counts of all replicas are "
    "added before anything else is done with them. Pass the whole loss as criterion=, which is called once with the "
    "outputs of all rows"
)


class Term:
    """A part of a loss that adds up over replicas and microbatches: terms are added, and multiplied by real numbers."""

    __array_ufunc__: ClassVar[None] = None  # numpy's scalars leave the arithmetic to the methods below

    def __add__(self, other: Any) -> Term:
        if type(other) in (int, float) and not other:  # sum([...]) begins with 0
            return self
        mine, others = _parts_of_term(self), _parts_of_term(other)
        return Combination((*mine.factors, *others.factors), (*mine.terms, *others.terms))

    def __radd__(self, other: Any) -> Term:
        return self + other

    def __neg__(self) -> Term:
        return self * -1

    def __sub__(self, other: Any) -> Term:
        return self + (other * -1 if isinstance(other, Term) else -other)

    def __rsub__(self, other: Any) -> Term:
        return -self + other

    def __mul__(self, factor: Any) -> Term:
        if not is_number(factor) or jnp.ndim(factor) or jnp.iscomplexobj(factor):
            what = f"a jdp.{type(factor).__name__}" if isinstance(factor, Term) else described(factor)
            raise TypeError(f"jdp.{type(self).__name__}: it is multiplied or divided by {what}; {FACTORS}.")
        mine, factor = _parts_of_term(self), _wide(factor)
        return Combination(tuple(f * factor for f in mine.factors), mine.terms)

    def __rmul__(self, factor: Any) -> Term:
        return self * factor

    def __truediv__(self, divisor: Any) -> Term:
        return self * (1 / _wide(divisor) if is_number(divisor) else divisor)

    if not TYPE_CHECKING:  # so that type checkers flag all of these uses

        def _refused(self, *_: Any) -> NoReturn:
            what = "it is compared, converted, or passed to a power, a quotient or another function"
            raise TypeError(f"jdp.{type(self).__name__}: {what}; {FACTORS}.")

        __pow__ = __rpow__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __abs__ = _refused
        __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = _refused


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean(Term):
    """A mean over the whole batch, `jdp.Mean(total, count)`: sums of both over all replicas, divided once.

    Use it for a loss or a metric whose weight is not the number of rows: the loss per token of sentences that differ in
    length. Replicas and microbatches give their own totals and counts. A count may depend on the parameters.

    Terms can be added, subtracted and multiplied by real numbers (Python's, or 0-d arrays that do not depend on the
    rows), with plain scalars and vectors of rows among them: `jdp.Mean(box, n_boxes) + 0.5 * class_losses`.

    Args:
        total: the sum, 0-d for a loss; a metric may have a shape, which does not follow the rows.
        count: what it is a sum of: a number of tokens or a sum of weights, of the total's shape or 0-d.
            Both may be floats, integers or bools; the total of a loss is a float.

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
class Sum(Term):
    """A sum over the whole batch, `jdp.Sum(total)`: added up over all replicas, microbatches and processes.

    Use it as a loss that torch would make with `reduction="sum"`, and as a metric that is neither a mean over rows nor
    an entry per row: a confusion matrix, a histogram, a number of hits. Terms can be added and multiplied by real
    numbers, as those of `jdp.Mean`.

    Args:
        total: the sum over the rows that the function was given: 0-d for a loss; a metric may have any shape that does
            not follow the rows. Floats keep their dtype; integers and bools are added as 32 bits at least, as
            `jnp.sum` adds them.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> def loss_fn(w, x):
        ...     return jnp.mean(w * x), {"positive": jdp.Sum(jnp.sum(x > 0))}
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> (_, metrics), _ = dp.value_and_grad(loss_fn, has_aux=True)(2.0, np.array([-1.0, 3.0, 5.0]))
        >>> int(metrics["positive"])
        2

    Source: `dist_reduce_fx="sum"` of torchmetrics; `reduction="sum"` of torch's losses.
    """

    total: ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Combination(Term):
    """A sum of terms, each with its factor; a plain scalar or vector among them stands for its mean over the rows."""

    factors: tuple[Any, ...]
    terms: tuple[Any, ...]


def _parts_of_term(x: Any) -> Combination:
    if isinstance(x, Combination):
        return x
    if not (is_term(x) or is_number(x)):
        raise TypeError(
            f"jdp.Mean: a {type(x).__name__} is added to it; terms are jdp.Mean, jdp.Sum, a scalar or a vector with "
            f"one entry per row. Add one of these."
        )
    return Combination((1.0,), (float(x) if isinstance(x, int) else x,))


def _wide(factor: Any) -> Any:
    """Returns a number in 32 bits, as totals are added: a product or a quotient of factors may not fit into 16."""
    return jnp.asarray(factor, jnp.float32) if hasattr(factor, "dtype") and factor.dtype.itemsize < 4 else factor


def is_term(x: Any) -> bool:
    return isinstance(x, Term)


def is_number(x: Any) -> bool:
    """Returns True for an array, jax's or numpy's, and for a Python number."""
    return isinstance(x, jax.Array | float | int) or is_array(x)


def described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if is_number(x) and hasattr(x, "dtype") else f"a {type(x).__name__}"


@contextlib.contextmanager
def functions_of_terms_refused(verb: str) -> Iterator[None]:
    """Raises an error with the way out if a term is passed to a function of jax or numpy, such as a root."""
    try:
        yield
    except TypeError as error:
        found = re.search(r"class 'jdp\.(?:_train\.terms\.)?(Mean|Sum|Combination)'|operand '(Mean|Sum)'", str(error))
        if found is None or str(error).startswith("jdp."):
            raise
        what = f"a function of a jdp.{found[1] or found[2]} is taken ({str(error).splitlines()[0]})"
        raise TypeError(f"jdp.{verb}: {what}; {FACTORS}.") from error


def finished(tree: Tree) -> Tree:
    """Returns the tree with each term replaced by its value; totals and counts must be those of all rows."""
    return jax.tree.map(_value, tree, is_leaf=is_term)


def _value(x: Any) -> Any:
    if isinstance(x, Mean):
        return x.total / x.count
    if isinstance(x, Sum):
        return x.total
    if not isinstance(x, Combination):
        return x
    values = [_value(t) if isinstance(t, Term) or not jnp.ndim(t) else t.mean() for t in x.terms]
    if any(value is None for value in values):  # a deterministic step fills in the entries per row alone
        return None
    first, *rest = (f * value for f, value in zip(x.factors, values, strict=True))
    return sum(rest, first)
