"""The gradient of a loss on every replica: microbatches one after the other, then one sum over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from ._accumulate import Added, accumulate
from ._check import is_key
from ._layout import Cut, Tree, Whole
from ._operands import Signature
from ._outputs import Marked
from ._parallel_apply import CallOf
from ._sync_batch_norm import weighted
from ._terms import Terms, loss_value, terms
from ._varying import SAME, VARYING, source_line, varying


class Loss(NamedTuple):
    """A user's loss function, of whatever kind its model is.

    `compute(diff, state, args, kwargs)` is `(loss, aux, state)`. The gradient is taken of the tree `diff`,
    whole on every replica, and of the cut arguments at the positions `rows`. `enter` makes the state a
    replica's own, `leave(after, before)` says how it is one again.
    """

    compute: Callable[[Tree, Tree, Sequence[Any], dict[str, Any]], tuple[Any, Tree, Tree]]
    verb: str
    rows: tuple[int, ...] = ()
    enter: Callable[[Tree], Tree] = lambda state: state
    leave: Callable[[Tree, Tree], Tree] = lambda after, before: ()
    sync: bool = False  # whether its BatchNorms are synchronised


class Gradients(NamedTuple):
    """What comes out of the program."""

    out: tuple[Any, Tree]  # (loss, aux)
    grads: Tree
    row_grads: tuple[Tree, ...]
    state: Tree
    counts: list[Any]


def gradients(loss: Loss, steps: int = 1, wire: Any = None, scatter: Callable[[Any], int | None] | None = None) -> CallOf:
    """What a replica runs: `((diff, state), *args)` to `Gradients`, in `steps` microbatches.

    Each gradient is summed over the replicas once, at the end, in the dtype `wire`; `scatter` gives for a
    leaf the axis that its sum is cut along.
    """

    def call_of(signature: Signature, replica: int) -> Callable[..., Gradients]:
        layout = signature.layout
        rows = layout.sizes[replica] if layout.is_cut else 1
        # A microbatch of the longest chunk weighs 1, for there nothing is to be multiplied then.
        unit = -(-max(layout.sizes) // steps) if layout.is_cut else 1

        def call(*operands: Any) -> Gradients:
            values = signature.own(operands, replica)
            (diff, before), _, _ = signature.fill(values)
            found: list[Terms] = []

            def one(number: Any, start: Any, size: int, state: Tree) -> Added:
                part = _microbatch(values, signature, rows, number, start, size)
                added, seen = _one(loss, signature, replica, part, diff, state, size, size / unit)
                found.append(seen)
                return added

            def axes() -> tuple[int, ...]:
                return found[0].axes

            cpu = layout.devices[0].platform == "cpu"
            sums, stacked, after = accumulate(one, axes, loss.enter(before), rows, -(-rows // steps), cpu)
            weight = sum(layout.sizes) / unit if layout.is_cut else 1.0
            seen = Terms(sums[0], stacked, found[0].treedef, found[0].forms)
            out, counts = seen.marked(float(weight))
            over = counts[0].value if seen.forms[0].kind == "ratio" else float(weight)

            def mark(grad: Any, param: Any) -> Marked:
                axis = None if scatter is None else scatter(param)
                return Marked(grad.astype(param.dtype), None, "sum", over=over, wire=wire, scatter=axis)

            grads = jax.tree.map(mark, sums[1], diff)
            row_grads = _mark_rows(sums[2], signature, loss, over)
            return Gradients(out, grads, row_grads, loss.leave(after, before), counts)

        return call

    return call_of


def _microbatch(
    values: Sequence[Any], signature: Signature, rows: int, number: Any, start: Any, size: int
) -> list[Any]:
    """The operands of one microbatch: its rows, and keys of its own."""
    if rows == size:
        return list(values)
    part = []
    for i, (x, leaf) in enumerate(zip(values, signature.leaves, strict=True)):
        if isinstance(leaf, Cut):
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=leaf.axis)
        elif isinstance(leaf, Whole) and i >= signature.weights and is_key(x) and not x.ndim:
            # The replicas fold in 1 to n - 1: no microbatch of the primary draws what a replica draws.
            x = jnp.where(number == 0, x, jax.random.fold_in(x, signature.layout.mesh.size + number))
        part.append(x)
    return part


def _one(
    loss: Loss, signature: Signature, replica: int, part: list[Any], diff: Tree, state: Tree, size: int, weight: float
) -> tuple[Added, Terms]:
    """The terms, the gradients and the state of one microbatch."""
    rows = size if signature.layout.is_cut else None

    def run(diff: Tree, chosen: tuple[Tree, ...], part: list[Any], state: Tree) -> tuple[Any, Tree, Tree]:
        _, args, kwargs = signature.fill(part)
        args = list(args)
        for position, value in zip(loss.rows, chosen, strict=True):
            args[position] = value
        return loss.compute(diff, state, args, kwargs)

    def shapes_of_more() -> Tree:
        def aux(part: list[Any]) -> Tree:
            return run(diff, _chosen(loss, signature, part), part, state)[1]

        return jax.eval_shape(aux, _one_more(part, signature))

    # A gradient is weighted when it is there, for the numbers of the loss may be narrow (bfloat16). But where replicas
    # share statistics, a gradient is made of the losses of them all, and each of these has its own weight.
    seed, factor = (weight, 1) if loss.sync else (1, weight)

    # Jitted, so that it is traced once: to be looked at, and to be differentiated.
    @jax.jit
    def value(diff: Tree, chosen: tuple[Tree, ...], part: list[Any], state: Tree) -> tuple[Any, tuple[Terms, Tree]]:
        out, aux, after = run(diff, chosen, part, state)
        seen = terms(out, aux, rows, weight, shapes_of_more, loss.verb)
        number = loss_value(out, rows, loss.verb)
        return number * jnp.asarray(seed if seen.forms[0].kind != "ratio" else 1, number.dtype), (seen, after)

    operands = (diff, _chosen(loss, signature, part), part, state)
    jaxpr, shapes = jax.make_jaxpr(value, return_shape=True)(*operands)
    _refuse_reduced(jaxpr, len(jax.tree.leaves(diff)), len(jax.tree.leaves(operands)), signature.axis_name, loss.verb)
    function = value
    chunks = signature.layout.rows
    if loss.sync and len({*chunks}) > 1:
        replay = jax.extend.core.jaxpr_as_fun(weighted(jaxpr, len(chunks) * chunks[replica] / sum(chunks)))

        def function(*operands: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(shapes), replay(*jax.tree.leaves(operands)))

    (grads, row_grads), (seen, after) = jax.grad(function, argnums=(0, 1), has_aux=True)(*operands)
    if factor != 1 and seen.forms[0].kind != "ratio":
        grads, row_grads = jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), (grads, row_grads))
    return Added((seen.sums, grads, row_grads), seen.rows, _as_before(after, state)), seen


def _chosen(loss: Loss, signature: Signature, part: list[Any]) -> tuple[Tree, ...]:
    """The cut arguments that are differentiated."""
    _, args, _ = signature.fill(part)
    return tuple(args[i] for i in loss.rows)


def _refuse_reduced(jaxpr: Any, whole: int, count: int, axis_name: str, verb: str) -> None:
    """A `ValueError` where the loss function has reduced the loss over the replicas itself."""
    inputs = [SAME] * whole + [VARYING] * (count - whole)
    found = varying(jaxpr, inputs, axis_name)[0]
    if not found.varying and found.reduced is not None:
        line = source_line(found.reduced)
        raise ValueError(
            f"jdp.{verb}: the loss is reduced over {axis_name!r} already ({found.reduced.primitive.name}"
            f"{f' at {line}' if line else ''}), so that it is the same on all replicas; jdp takes the mean over them itself. "
            f"Return the loss of the chunk, without a collective."
        )


def _one_more(part: Sequence[Any], signature: Signature) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a microbatch with one row more."""
    shapes = []
    for x, leaf in zip(part, signature.leaves, strict=True):
        shape = list(x.shape)
        if isinstance(leaf, Cut):
            shape[leaf.axis] += 1
        shapes.append(jax.ShapeDtypeStruct(shape, x.dtype))
    return shapes


def _as_before(after: Tree, before: Tree) -> Tree:
    """The state in the dtypes it came in: a step that changed them would compile once more."""
    if jax.tree.structure(after) != jax.tree.structure(before):
        return after
    return jax.tree.map(lambda new, old: new if new is old else jnp.asarray(new).astype(old.dtype), after, before)


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
