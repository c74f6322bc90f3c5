"""The gradient of a loss on every replica: microbatches one after the other, then one sum over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._core.layout import Cut, Tree
from .._core.operands import Signature
from .._core.outputs import Marked
from .._core.parallel_apply import CallOf
from .accumulate import Added, accumulate
from .microbatch import Loss, differentiate, rows_of
from .terms import Terms


class Gradients(NamedTuple):
    """What comes out of the program."""

    out: tuple[Any, Tree]  # (loss, aux)
    grads: Tree
    row_grads: tuple[Tree, ...]
    state: Tree
    counts: list[Any]


def gradients(
    loss: Loss, steps: int = 1, wire: Any = None, scatter: Callable[[Any], int | None] | None = None
) -> CallOf:
    """What a replica runs: `((diff, state), *args)` to `Gradients`, in `steps` microbatches.

    Each gradient is summed over the replicas once, at the end, in the dtype `wire`; `scatter` gives for a
    leaf the axis that its sum is cut along.
    """

    def call_of(signature: Signature, replica: int) -> Callable[..., Gradients]:
        def call(*operands: Any) -> Gradients:
            (diff, before), _, _ = signature.fill(signature.own(operands, replica))
            (sums, stacked, after), seen, weight = local(loss, steps, signature, replica, operands)
            out, counts = Terms(sums[0], stacked, seen.treedef, seen.forms).marked(weight)
            over = counts[0].value if seen.forms[0].kind == "ratio" else weight

            def mark(grad: Any, param: Any) -> Marked:
                axis, dtype = None if scatter is None else scatter(param), param.dtype
                # 16-bit gradients are divided before they travel: their sum may leave the range of their mean.
                sent = wire or (dtype if dtype.itemsize < 4 else None)
                grad = grad if sent else grad.astype(dtype)
                return Marked(grad, None, "sum", over=over, wire=sent, dtype=dtype, scatter=axis)

            grads = jax.tree.map(mark, sums[1], diff)
            row_grads = _mark_rows(sums[2], signature, loss, over)
            return Gradients(out, grads, row_grads, loss.leave(after, before), counts)

        return call

    return call_of


def local(
    loss: Loss, steps: int, signature: Signature, replica: int, operands: Sequence[Any]
) -> tuple[Added, Terms, float]:
    """What a replica adds before anything is reduced, the terms' forms, and the weight of all replicas together."""
    layout = signature.layout
    values = signature.own(operands, replica)
    (diff, before), _, _ = signature.fill(values)
    rows = layout.sizes[replica] if layout.is_cut else 1
    # A microbatch of the longest chunk weighs 1, for there nothing is to be multiplied then.
    unit = -(-max(layout.sizes) // steps) if layout.is_cut else 1
    found: list[Terms] = []

    def one(number: Any, start: Any, size: int, state: Tree) -> Added:
        part = rows_of(values, signature, rows, number, start, size)
        added, seen = differentiate(loss, signature, replica, part, diff, state, size, size / unit)
        found.append(seen)
        return added

    def axes() -> tuple[int, ...]:
        return found[0].axes

    cpu = layout.devices[0].platform == "cpu"
    added = accumulate(one, axes, loss.enter(before), rows, -(-rows // steps), cpu)
    # With nothing cut there is one run; of several processes one each, and the mean of those.
    return added, found[0], sum(layout.sizes) / unit if layout.is_cut else float(len(layout.used))


def _mark_rows(row_grads: tuple[Tree, ...], signature: Signature, loss: Loss, over: Any) -> tuple[Tree, ...]:
    """The gradients of cut arguments, each along the axis its argument is cut along."""
    if not loss.rows:
        return ()
    axes = [leaf.axis if isinstance(leaf, Cut) else None for leaf in signature.leaves]
    _, args, _ = signature.fill(axes)
    marked = []
    for position, grads in zip(loss.rows, row_grads, strict=True):
        leaves, treedef = jax.tree.flatten(grads)
        where = jax.tree.leaves(args[position], is_leaf=lambda x: x is None)
        marks = [
            Marked(g, None, "sum", over=over) if axis is None else Marked(g, axis, over=over)
            for g, axis in zip(leaves, where, strict=True)
        ]
        marked.append(jax.tree.unflatten(treedef, marks))
    return tuple(marked)
