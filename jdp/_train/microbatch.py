"""One microbatch: a user's loss function on some rows, its gradient, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from .._core.inputs import is_key
from .._core.layout import Cut, Tree, Whole
from .._core.operands import Signature
from .._jax.jaxprs import SAME, VARYING, source_line, varying
from .._model.sync_batch_norm import apart, weighted
from .accumulate import Added
from .terms import Terms, loss_value, terms


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


def rows_of(values: Sequence[Any], signature: Signature, rows: int, number: Any, start: Any, size: int) -> list[Any]:
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


def differentiate(
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

    def shapes_of_more(rows: int) -> Tree:
        def returned(part: list[Any]) -> Tree:
            return run(diff, _chosen(loss, signature, part), part, state)[:2]

        return jax.eval_shape(returned, _more(part, signature, rows))

    # A gradient is weighted when it is there, for the numbers of the loss may be narrow (bfloat16). But where replicas
    # share statistics, a gradient is made of the losses of them all, and each of these has its own weight.
    seed, factor = (weight, 1) if loss.sync else (1, weight)

    # Jitted, so that it is traced once: to be looked at, and to be differentiated.
    @jax.jit
    @(apart if loss.sync else _as_it_is)
    def value(diff: Tree, chosen: tuple[Tree, ...], part: list[Any], state: Tree) -> tuple[Any, tuple[Terms, Tree]]:
        out, aux, after = run(diff, chosen, part, state)
        seen = terms(out, aux, rows, sum(signature.layout.sizes), weight, shapes_of_more, loss.verb)
        number = loss_value(out, rows, loss.verb)
        return number * jnp.asarray(seed if seen.forms[0].kind != "ratio" else 1, number.dtype), (seen, after)

    operands = (diff, _chosen(loss, signature, part), part, state)
    jaxpr, shapes = jax.make_jaxpr(value, return_shape=True)(*operands)
    _refuse_reduced(jaxpr, len(jax.tree.leaves(diff)), len(jax.tree.leaves(operands)), signature.axis_name, loss.verb)
    chunks = signature.layout.rows
    unequal = loss.sync and len({*chunks}) > 1
    function = _replayed(weighted(jaxpr, len(chunks) * chunks[replica] / sum(chunks)), shapes) if unequal else value
    (grads, row_grads), (seen, after) = jax.grad(function, argnums=(0, 1), has_aux=True)(*operands)
    if factor != 1 and seen.forms[0].kind != "ratio":
        grads, row_grads = jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), (grads, row_grads))
    return Added((seen.sums, grads, row_grads), seen.rows, _as_before(after, state)), seen


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _replayed(jaxpr: Any, shapes: Tree) -> Callable[..., Any]:
    """The function that a jaxpr was traced from."""
    run = jax.extend.core.jaxpr_as_fun(jaxpr)
    return lambda *operands: jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(operands)))


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
            f"{f' at {line}' if line else ''}), so that it is the same on all replicas; jdp takes the mean over them. "
            f"Return the loss of the chunk, without a collective."
        )


def _more(part: Sequence[Any], signature: Signature, rows: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a microbatch with so many rows more."""
    shapes = []
    for x, leaf in zip(part, signature.leaves, strict=True):
        shape = list(x.shape)
        if isinstance(leaf, Cut):
            shape[leaf.axis] += rows
        shapes.append(jax.ShapeDtypeStruct(shape, x.dtype))
    return shapes


def _as_before(after: Tree, before: Tree) -> Tree:
    """The state in the dtypes it came in: a step that changed them would compile once more."""
    if jax.tree.structure(after) != jax.tree.structure(before):
        return after
    return jax.tree.map(lambda new, old: new if new is old else jnp.asarray(new).astype(old.dtype), after, before)
