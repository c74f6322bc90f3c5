"""The gradient of a loss on every replica: microbatches one after the other, then one sum over the replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from .._core.layout import Cut, Shard, Tree, Whole, is_key
from .._core.outputs import Marked
from .._core.parallel_apply import CallOf
from .._core.scattered import Signature
from .._jax.jaxprs import SAME, VARYING, canonical, source_line, varying
from .._model.nnx import Held, enter
from .._model.sync_batch_norm import apart, weighted
from .shards import Shards, axes_of_shards
from .state import first_difference
from .terms import Forms, loss_value, terms


class Gradients(NamedTuple):
    """What comes out of the program."""

    out: tuple[Any, Tree]  # (loss, aux)
    grads: Tree
    row_grads: dict[int, Tree]
    state: Tree
    counts: list[Any]


class Loss(NamedTuple):
    """A user's loss function, of whatever kind its model is.

    `compute(diff, held, args, kwargs)` is `(loss, aux, held)`. The gradient is taken of the tree `diff`, whole on
    every replica, and of the cut arguments at the positions `rows`. `leave(after, before)` says how what is held,
    which each replica has made its own, is one again.
    """

    compute: Callable[[Tree, Held, Sequence[Any], dict[str, Any]], tuple[Any, Tree, Held]]
    verb: str
    leave: Callable[[Held, Held], Tree]
    rows: tuple[int, ...] = ()
    sync: bool = False  # whether its BatchNorms are synchronised
    look: Callable[[Any, Sequence[Any]], None] | None = None  # at its jaxpr, and the whole leaves of `diff`


class Added(NamedTuple):
    """What a microbatch adds, and the state it leaves to the next."""

    sums: tuple[list[Any], Tree, dict[int, Tree]]  # of the terms, the gradients, and those of cut arguments
    rows: list[Any]  # arrays with its rows along `forms.axes`
    state: Tree
    forms: Forms


def gradients(
    loss: Loss, steps: int = 1, wire: Any = None, scatter: Callable[[Any], int | None] | None = None
) -> CallOf:
    """What a replica runs: `((diff, held), *args)` to `Gradients`, in `steps` microbatches.

    Each gradient is summed over the replicas once, at the end, in the dtype `wire`; `scatter` gives for a
    leaf the axis that its sum is cut along. Parameters that are cut have gradients that are cut alike; where they come
    as shards, one microbatch's are summed as they are made, and those of several when they are added.
    """
    sent_as = functools.partial(_sent_as, wire)

    def call_of(signature: Signature, replica: int) -> Callable[..., Gradients]:
        def call(*operands: Any) -> Gradients:
            values = signature.of_replica(operands, replica)
            (diff, before), _, _ = signature.fill(values)
            is_cut = any(isinstance(leaf, Shard) for leaf in signature.leaves)
            cut = axes_of_shards(signature) if is_cut else jax.tree.map(lambda _: -1, diff)
            shards = Shards.of(signature, diff, cut, sent_as, steps > 1) if is_cut else None
            added, weight = local(loss, steps, signature, replica, values, diff, before, shards)
            found, grads, row_grads = added.sums
            out, counts = added.forms.marked(found, added.rows, weight)
            over = counts[0].value if added.forms.is_ratio else weight

            def mark(grad: Any, param: Any, cut_along: int) -> Marked:
                dtype, sent = param.dtype, sent_as(param.dtype)
                if shards and cut_along != -1 and not shards.apart:
                    total = shards.undivided(grad, added.forms.is_ratio)
                    return Marked(total, None, "summed", over=over, dtype=dtype, scatter=cut_along)
                # Microbatches, and the replicas of a device, are added in 32 bits; a replica may have only one.
                if sent and (steps > 1 or signature.layout.per_device > 1):
                    grad = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
                axis = cut_along if cut_along != -1 else scatter and scatter(param)
                return Marked(grad, None, "sum", over=over, wire=sent, dtype=dtype, scatter=axis)

            def mark_rows(grad: Any, axis: int) -> Marked:
                return Marked(grad, axis, over=over) if axis >= 0 else Marked(grad, None, "sum", over=over)

            if row_grads:
                _, axes, _ = signature.fill([leaf.axis if isinstance(leaf, Cut) else -1 for leaf in signature.leaves])
                row_grads = {i: jax.tree.map(mark_rows, tree, axes[i]) for i, tree in row_grads.items()}
            left = loss.leave(added.state, before)
            return Gradients(out, jax.tree.map(mark, grads, diff, cut), row_grads, left, counts)

        return call

    return call_of


def _sent_as(wire: Any, dtype: Any) -> Any:
    """The dtype in which gradients travel that are divided before: 16-bit sums may leave the range of their mean."""
    return wire or (dtype if dtype.itemsize < 4 else None)


def local(
    loss: Loss,
    steps: int,
    signature: Signature,
    replica: int,
    values: Sequence[Any],
    diff: Tree,
    before: Held,
    shards: Shards | None = None,
) -> tuple[Added, float]:
    """What a replica adds before anything is reduced, and the weight of all replicas together."""
    layout = signature.layout
    rows = layout.sizes[replica] if layout.is_cut else 1
    # A microbatch of the longest chunk weighs 1, for there nothing is to be multiplied then.
    unit = -(-max(layout.sizes) // steps) if layout.is_cut else 1

    def one(number: Any, start: Any, size: int, state: Tree) -> Added:
        part = rows_of(values, signature, rows, number, start, size)
        mine = shards and shards.at(number)
        return differentiate(loss, signature, replica, part, diff, state, size, size / unit, mine)

    state = enter(before, signature.axis_name)
    added = accumulate(one, state, rows, -(-rows // steps), layout.devices[0].platform == "cpu")
    # With nothing cut there is one run; of several processes one each, and the mean of those.
    return added, sum(layout.sizes) / unit if layout.is_cut else float(len(layout.used))


def rows_of(values: Sequence[Any], signature: Signature, rows: int, number: Any, start: Any, size: int) -> list[Any]:
    """The operands of one microbatch: its rows, and keys of its own."""
    if rows == size:
        return list(values)
    part = []
    for i, (x, leaf) in enumerate(zip(values, signature.leaves, strict=True)):
        if isinstance(leaf, Cut):
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=leaf.axis)
        elif isinstance(leaf, Whole) and i >= signature.first_input and is_key(x) and not x.ndim:
            # The replicas fold in 1 to n - 1: no microbatch of the primary draws what a replica draws.
            x = jnp.where(number == 0, x, jax.random.fold_in(x, len(signature.layout.devices) + number))
        part.append(x)
    return part


def differentiate(
    loss: Loss,
    signature: Signature,
    replica: int,
    part: list[Any],
    diff: Tree,
    state: Tree,
    size: int,
    weight: float,
    shards: Shards | None = None,
) -> Added:
    """The terms, the gradients and the state of one microbatch."""
    rows = size if signature.layout.is_cut else None
    chosen = {i: signature.fill(part)[1][i] for i in loss.rows}
    whole = shards.shapes() if shards else diff

    def run(diff: Tree, chosen: dict[int, Tree], part: list[Any], state: Tree) -> tuple[Any, Tree, Tree]:
        _, args, kwargs = signature.fill(part)
        return loss.compute(diff, state, [chosen.get(i, x) for i, x in enumerate(args)], kwargs)

    def shapes_of_more(rows: int) -> Tree:
        return jax.eval_shape(lambda diff, part: run(diff, {}, part, state)[:2], whole, _more(part, signature, rows))

    # A gradient is weighted when it is there, for the numbers of the loss may be narrow (bfloat16). But where replicas
    # share statistics, a gradient is made of the losses of them all, and each of these has its own weight.
    seed, factor = (weight, 1) if loss.sync else (1, weight)

    def value(
        diff: Tree, chosen: dict[int, Tree], part: list[Any], state: Tree
    ) -> tuple[Any, tuple[Forms, list[Any], list[Any], Tree]]:
        out, aux, after = run(diff, chosen, part, state)
        forms, sums, stacked = terms(out, aux, rows, sum(signature.layout.sizes), weight, shapes_of_more, loss.verb)
        number = loss_value(out, rows, loss.verb)
        return number * jnp.asarray(1 if forms.is_ratio else seed, number.dtype), (forms, sums, stacked, after)

    # Jitted, so that it is traced once: to be looked at, and to be differentiated.
    function = jax.jit(apart(value) if loss.sync else value)
    rest = (chosen, part, state)
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(whole, *rest)
    if loss.look:
        loss.look(jaxpr, jax.tree.leaves(whole))
    _refuse_reduced(jaxpr, len(jax.tree.leaves(diff)), signature.axis_name, loss.verb)
    chunks = signature.layout.rows
    if loss.sync and len({*chunks}) > 1:
        function = _replayed(weighted(jaxpr, len(chunks) * chunks[replica] / sum(chunks)), shapes)
    if shards:
        function, diff = shards.function(jaxpr, shapes, shapes[1][0].is_ratio), shards.taken()
    grads, (forms, sums, stacked, after) = jax.grad(function, argnums=(0, 1), has_aux=True)(diff, *rest)
    if factor != 1 and not forms.is_ratio:
        grads = jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), grads)
    return Added((sums, *grads), stacked, _as_before(after, state), forms)


def _replayed(jaxpr: Any, shapes: Tree) -> Callable[..., Any]:
    """The function that a jaxpr was traced from."""
    run = jax.extend.core.jaxpr_as_fun(jaxpr)
    return lambda *operands: jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(operands)))


def _refuse_reduced(jaxpr: Any, whole: int, axis_name: str, verb: str) -> None:
    """A `ValueError` where the loss function has reduced the loss over the replicas itself."""
    inputs = [SAME] * whole + [VARYING] * (len(jaxpr.in_avals) - whole)
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


One = Callable[[Any, Any, int, Tree], Added]
"""A microbatch, of its number, its first row, its number of rows and the state that the last one left."""


def accumulate(one: One, state: Tree, rows: int, size: int, cpu: bool) -> Added:
    """All microbatches of `size` rows, and last one of the rest, one after the other."""
    whole, rest = divmod(rows, size)
    if whole + bool(rest) <= 1:
        return one(0, 0, rows, state)
    done = _scan(one, state, whole, size, cpu)
    if not rest:
        return done
    last = one(whole, whole * size, rest, done.state)
    sums = jax.tree.map(jnp.add, done.sums, last.sums)
    stacked = [jnp.concatenate(x, axis) for *x, axis in zip(done.rows, last.rows, last.forms.axes, strict=True)]
    return last._replace(sums=sums, rows=stacked)


def _scan(one: One, state: Tree, n: int, size: int, cpu: bool) -> Added:
    # Traced by hand: for the shapes of the sums, and to see what of the state stays as it is.
    step = jax.make_jaxpr(lambda k, state: one(k, k * size, size, state), return_shape=True)
    jaxpr, shapes = step(jnp.int32(0), state)
    if jax.tree.structure(shapes.state) != jax.tree.structure(state):
        raise ValueError(
            f"jdp.accumulate_steps: the state{first_difference(shapes.state, state)} after a microbatch; microbatches "
            f"hand one tree on. Make the variable when the model is made, or pass accumulate_steps=1."
        )
    run = _replayed(canonical(jaxpr) if cpu else jaxpr, shapes)

    def body(carry: tuple[Tree, Tree], k: Any) -> tuple[tuple[Tree, Tree], list[Any]]:
        sums, state = carry
        added = run(k, state)
        # In the dtype of the sums, which is wider than that of 16-bit gradients.
        return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, added.sums), added.state), added.rows

    def zero(x: Any) -> Any:
        wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, wide))

    start = jax.tree.map(zero, shapes.sums), state
    (sums, after), stacked = jax.lax.scan(body, start, jnp.arange(n, dtype=jnp.int32))
    old, treedef = jax.tree.flatten(state)
    before, kept = jaxpr.jaxpr.invars[1:], jaxpr.jaxpr.outvars[len(jaxpr.out_avals) - len(old) :]
    same = [x is y for x, y in zip(before, kept, strict=True)]
    after = [x if s else y for x, y, s in zip(old, jax.tree.leaves(after), same, strict=True)]
    stacked = [
        jax.lax.collapse(jnp.moveaxis(x, 0, axis), axis, axis + 2)
        for x, axis in zip(stacked, shapes.forms.axes, strict=True)
    ]
    return Added(sums, stacked, treedef.unflatten(after), shapes.forms)
