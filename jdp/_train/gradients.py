"""The gradient of a loss on every replica: microbatches one after the other, then one sum over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from .._core.layout import Cut, Tree, Whole, is_key
from .._core.outputs import Marked
from .._core.parallel_apply import CallOf
from .._core.scattered import Signature
from .._jax.jaxprs import SAME, VARYING, canonical, source_line, varying
from .._model.nnx import Held
from .._model.sync_batch_norm import apart, weighted
from .state import first_difference
from .terms import Terms, loss_value, terms


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
    """What a replica runs: `((diff, held), *args)` to `Gradients`, in `steps` microbatches.

    Each gradient is summed over the replicas once, at the end, in the dtype `wire`; `scatter` gives for a
    leaf the axis that its sum is cut along.
    """

    def call_of(signature: Signature, replica: int) -> Callable[..., Gradients]:
        def call(*operands: Any) -> Gradients:
            values = signature.of_replica(operands, replica)
            (diff, before), _, _ = signature.fill(values)
            (sums, stacked, after), seen, weight = local(loss, steps, signature, replica, values, diff, before)
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
    loss: Loss, steps: int, signature: Signature, replica: int, values: Sequence[Any], diff: Tree, before: Tree
) -> tuple[Added, Terms, float]:
    """What a replica adds before anything is reduced, the terms' forms, and the weight of all replicas together."""
    layout = signature.layout
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


class Loss(NamedTuple):
    """A user's loss function, of whatever kind its model is.

    `compute(diff, held, args, kwargs)` is `(loss, aux, held)`. The gradient is taken of the tree `diff`,
    whole on every replica, and of the cut arguments at the positions `rows`. `enter` makes what is held a
    replica's own, `leave(after, before)` says how it is one again.
    """

    compute: Callable[[Tree, Held, Sequence[Any], dict[str, Any]], tuple[Any, Tree, Held]]
    verb: str
    rows: tuple[int, ...] = ()
    enter: Callable[[Held], Held] = lambda held: held
    leave: Callable[[Held, Held], Tree] = lambda after, before: ()
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
    if not loss.rows:
        return ()
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


class Added(NamedTuple):
    """What a microbatch adds: sums, arrays with its rows along `axes`, and the state it leaves to the next."""

    sums: Tree
    rows: list[Any]
    state: Tree


One = Callable[[Any, Any, int, Tree], Added]
"""A microbatch, of its number, its first row, its number of rows and the state that the last one left."""


def accumulate(one: One, axes: Callable[[], tuple[int, ...]], state: Tree, rows: int, size: int, cpu: bool) -> Added:
    """All microbatches of `size` rows, and last one of the rest, one after the other; `axes()` once one was traced."""
    whole, rest = divmod(rows, size)
    if whole + bool(rest) <= 1:
        return one(0, 0, rows, state)
    done = _scan(one, axes, state, whole, size, cpu)
    if not rest:
        return done
    last = one(whole, whole * size, rest, done.state)
    sums = jax.tree.map(jnp.add, done.sums, last.sums)
    stacked = [jnp.concatenate(x, axis) for *x, axis in zip(done.rows, last.rows, axes(), strict=True)]
    return Added(sums, stacked, last.state)


def _scan(one: One, axes: Callable[[], tuple[int, ...]], state: Tree, n: int, size: int, cpu: bool) -> Added:
    # Traced by hand: for the shapes of the sums, and to see what of the state stays as it is.
    step = jax.make_jaxpr(lambda k, state: one(k, k * size, size, state), return_shape=True)
    jaxpr, shapes = step(jnp.int32(0), state)
    if jax.tree.structure(shapes.state) != jax.tree.structure(state):
        raise ValueError(
            f"jdp.accumulate_steps: the state{first_difference(shapes.state, state)} after a microbatch; microbatches "
            f"hand one tree on. Make the variable when the model is made, or pass accumulate_steps=1."
        )
    run = jax.extend.core.jaxpr_as_fun(canonical(jaxpr) if cpu else jaxpr)
    treedef = jax.tree.structure(shapes)

    def body(carry: tuple[Tree, Tree], k: Any) -> tuple[tuple[Tree, Tree], list[Any]]:
        sums, state = carry
        added = jax.tree.unflatten(treedef, run(k, *jax.tree.leaves(state)))
        # In the dtype of the sums, which is wider than that of 16-bit gradients.
        return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, added.sums), added.state), added.rows

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, _at_least(x.dtype))), shapes.sums)
    (sums, after), stacked = jax.lax.scan(body, (zeros, state), jnp.arange(n, dtype=jnp.int32))
    before, invars = jax.tree.leaves(state), jaxpr.jaxpr.invars[1:]
    kept = jaxpr.jaxpr.outvars[treedef.num_leaves - len(before) :]
    after = [
        old if out is var else new
        for old, new, var, out in zip(before, jax.tree.leaves(after), invars, kept, strict=True)
    ]
    stacked = [_one_after_the_other(x, axis) for x, axis in zip(stacked, axes(), strict=True)]
    return Added(sums, stacked, jax.tree.unflatten(jax.tree.structure(state), after))


def _at_least(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


def _one_after_the_other(x: Any, axis: int) -> Any:
    """`(microbatches, ..., rows, ...)` as `(..., microbatches * rows, ...)`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
