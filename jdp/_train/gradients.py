"""The gradient of a loss on every replica: microbatches one after the other, then one sum over the replicas.

The functions in the order of their calls: gradients, results_of_replica, microbatches, accumulate, differentiate, and
from there run_loss and forms_of.

If the loss is a mean over the rows, the gradient of a microbatch is weighted by its number of rows: see
`Forms.weights`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.layout import Cut, Layout, Shard, Static, Tree, Whole, is_key
from .._core.outputs import Marked
from .._core.parallel_apply import CallOf
from .._core.programs import Recent
from .._core.scattered import Signature
from .._jax.callers import source_line
from .._jax.convolutions import canonical
from .._jax.jaxprs import SAME, VARYING, are_means, equations, reached, replayed, varying
from .._jax.row_traces import Traced, is_backward_linear, of_any_rows
from .._model.nnx import Held, enter
from .._model.sync_batch_norm import apart, by_rows
from .followed import IN_EVALUATION, IN_TRAINING, ON_BATCH, Followed
from .forms import Forms, SeveralTerms, at_least_32_bits, forms_of_outputs, forms_of_results, loss_value
from .shards import ShardedParams, axes_of_shards
from .state import first_difference
from .terms import Sum, functions_of_terms_refused


class Gradients(NamedTuple):
    """What the program of a loss and its gradients returns."""

    out: tuple[Any, Tree]  # (loss, aux)
    grads: Tree
    row_grads: dict[int, Tree]
    state: Tree
    counts: list[Any]  # of `jdp.Mean`: no caller reads them, but a divisor (`Marked.over`) must itself be an output


Traces = Recent[Any, dict[int, Traced | None]]
"""The traces of a loss: by the types of its operands (see `_traces`), then by number of rows (0: any number)."""


class Loss(NamedTuple):
    """A user's loss function, for any kind of model.

    `compute(diff, held, args, kwargs)` returns `(loss, aux, held)`. The gradient is taken with respect to the tree
    `diff`, and to the cut arguments at the positions `rows`. `held` is the other state: each replica changes its own
    copy, and `leave(after, before)` marks how the copies become one again.

    With a `criterion`, `compute` returns outputs in place of the loss, and `criterion(outputs, diff, held, args)`
    returns `(loss, metrics)` for the outputs and the arguments of all rows. In the second of two passes (see
    `criterion.py`) the loss has `is_backward`, and gets the cotangents of what the first computed as its last argument.
    """

    compute: Callable[[Tree, Held, Sequence[Any], dict[str, Any]], tuple[Any, Tree, Held]]
    verb: str
    leave: Callable[[Held, Held], Tree]
    traces: Traces
    rows: tuple[int, ...] = ()
    sync: bool = False  # whether its BatchNorms are synchronised
    inspect: Callable[[Any, Sequence[Any]], None] | None = None  # gets its jaxpr, and the whole leaves of `diff`
    criterion: Callable[[Tree, Tree, Held, Sequence[Any]], tuple[Any, Tree]] | None = None
    is_direct: bool = False  # whether the criterion itself depends on what is differentiated
    is_backward: bool = False


class ReplicaResults(NamedTuple):
    """What a replica has computed: in one microbatch, or in several of them together."""

    sums: tuple[list[Any], Tree, dict[int, Tree]]  # of the terms, the gradients, and the gradients of cut arguments
    rows: list[Any]  # arrays with its rows along `forms.axes`
    state: Tree  # as the last microbatch left it
    forms: Forms


def gradients(
    loss: Loss, steps: int = 1, wire: Any = None, scatter: Callable[[Any], int | None] | None = None
) -> CallOf:
    """Returns a replica's function: it maps `((diff, held), *args)` to `Gradients`, in `steps` microbatches.

    Each gradient is summed over the replicas once, at the end, in the dtype `wire`; `scatter` returns, for a
    leaf, the axis that its sum is cut along. Gradients of cut parameters are cut in the same way. If the loss itself
    gathers these (`ShardedParams`), the gradients of a single microbatch are summed over the replicas as they are
    computed; those of several microbatches are added first.
    """
    sent = functools.partial(sent_as, wire)

    def call_of(signature: Signature, replica: int) -> Callable[..., Gradients]:
        def call(*operands: Any) -> Gradients:
            values = signature.values_of_replica(operands, replica)
            (diff, before), _, _ = signature.fill(values)
            is_cut = any(isinstance(leaf, Shard) for leaf in signature.leaves)
            cut = axes_of_shards(signature) if is_cut else jax.tree.map(lambda _: -1, diff)
            shards = ShardedParams.of(signature, diff, cut, sent, steps > 1, loss.is_backward) if is_cut else None
            added, weight = results_of_replica(loss, steps, signature, replica, values, diff, before, shards)
            sums, grads, row_grads = added.sums
            out, counts = added.forms.marked(sums, added.rows, weight)
            # In a second pass the cotangents are those of the finished loss. Nothing is left to divide, or to scale.
            over = 1.0 if loss.is_backward else added.forms.divisor(counts, weight, signature.layout)

            def mark(grad: Any, param: Any, cut_along: int) -> Marked:
                dtype, narrow = param.dtype, sent(param.dtype)
                if shards and cut_along != -1 and not shards.adds_first:
                    total = shards.undivided(grad, added.forms)
                    return Marked(total, None, "summed", over=over, dtype=dtype, scatter=cut_along)
                # Gradients of microbatches, and of replicas on one device, are added in 32 bits. Those of a replica
                # with a single microbatch (it has few rows) are still narrow here.
                if narrow and (steps > 1 or signature.layout.per_device > 1):
                    grad = at_least_32_bits(grad)
                axis = cut_along if cut_along != -1 else scatter and scatter(param)
                return Marked(grad, None, "sum", over=over, wire=narrow, dtype=dtype, scatter=axis)

            def mark_rows(grad: Any, axis: int) -> Marked:
                return Marked(grad, axis, over=over) if axis >= 0 else Marked(grad, None, "sum", over=over)

            if row_grads:
                _, axes, _ = signature.fill([leaf.axis if isinstance(leaf, Cut) else -1 for leaf in signature.leaves])
                row_grads = {i: jax.tree.map(mark_rows, tree, axes[i]) for i, tree in row_grads.items()}
            left = loss.leave(added.state, before)
            return Gradients(out, jax.tree.map(mark, grads, diff, cut), row_grads, left, counts)

        return call

    return call_of


def sent_as(wire: Any, dtype: Any) -> Any:
    """Returns the dtype that gradients are sent in; None is their own, of 32 bits or more.

    Gradients with such a dtype are divided before the sum over the replicas, which might overflow; others after it.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    return jax.dtypes.canonicalize_dtype(wire) if wire else dtype if dtype.itemsize < 4 else None


def results_of_replica(
    loss: Loss,
    steps: int,
    signature: Signature,
    replica: int,
    values: Sequence[Any],
    diff: Tree,
    before: Held,
    shards: ShardedParams | None = None,
) -> tuple[ReplicaResults, float]:
    """Returns a replica's results, not yet reduced over the replicas, and the weight of all replicas together."""

    def one(number: Any, part: list[Any], state: Tree, size: int, weight: float) -> ReplicaResults:
        mine = shards and shards.in_microbatch(number)
        return differentiate(loss, signature, replica, part, diff, state, size, weight, mine)

    weight_of_replicas = weight_of_all(signature.layout, steps)
    return microbatches(one, steps, signature, replica, values, before), weight_of_replicas


def weight_of_all(layout: Layout, steps: int) -> float:
    """Returns the weight of all replicas' microbatches together."""
    # If nothing is cut, the loss runs once, or once in each process, and the mean of these runs is taken.
    return sum(layout.sizes) / _unit(layout, steps) if layout.is_cut else float(len(layout.used))


def _unit(layout: Layout, steps: int) -> int:
    """Returns the rows of a microbatch of weight 1: a full one of the longest chunk, so that it needs no factor."""
    return -(-max(layout.sizes) // steps) if layout.is_cut else 1


def microbatches(
    one: Callable[[Any, list[Any], Tree, int, float], ReplicaResults],
    steps: int,
    signature: Signature,
    replica: int,
    values: Sequence[Any],
    before: Held,
) -> ReplicaResults:
    """Runs all microbatches of a replica, each by `one(number, operands, state, rows, weight)`; returns their sums."""
    layout = signature.layout
    rows, unit = layout.sizes[replica] if layout.is_cut else 1, _unit(layout, steps)

    def of_rows(number: Any, start: Any, size: int, state: Tree) -> ReplicaResults:
        part = rows_of(values, signature, rows, number, start, size)
        return one(number, part, state, size, size / unit)

    state = enter(before, signature.axis_name)
    return accumulate(of_rows, state, rows, -(-rows // steps), layout.devices[0].platform == "cpu")


def rows_of(values: Sequence[Any], signature: Signature, rows: int, number: Any, start: Any, size: int) -> list[Any]:
    """Returns the operands of one microbatch: its rows, and its own random keys."""
    if rows == size:
        return list(values)
    part = []
    for i, (x, leaf) in enumerate(zip(values, signature.leaves, strict=True)):
        if isinstance(leaf, Cut):
            times = x.shape[leaf.axis] // rows  # a cotangent may have several entries for each row
            x = jax.lax.dynamic_slice_in_dim(x, start * times, size * times, axis=leaf.axis)
        elif isinstance(leaf, Whole) and i >= signature.first_input and is_key(x) and not x.ndim:
            # The replicas fold in 1 to n - 1. With n + number, no microbatch of the primary draws what a replica draws.
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
    shards: ShardedParams | None = None,
    was_accepted: bool = False,
) -> ReplicaResults:
    """Runs and differentiates the loss of one microbatch; `was_accepted` says that an earlier trace has accepted it."""
    chosen = {i: signature.fill(part)[1][i] for i in loss.rows}
    whole = shards.shapes() if shards else diff  # for a trace, shapes are enough
    seed = weight if loss.sync else 1  # see `Forms.weights`
    traces = _traces(loss, signature, (whole, part, state))

    def value(diff: Tree, chosen: dict[int, Tree], part: list[Any], state: Tree) -> tuple[Any, Tree]:
        """Returns the number to differentiate, and the results of the microbatch."""
        out, aux, after, cotangents = run_loss(loss, signature, diff, chosen, part, state)
        if loss.is_backward and loss.criterion:
            out = Sum(_product(jax.tree.leaves(out), cotangents))
        forms, sums, stacked = forms_of(loss, signature, (out, aux), (whole, part, state), size, weight, traces)
        if loss.is_backward and not loss.criterion:
            number = _product(sums[: forms.each[0].summands], cotangents)
        elif forms.each[0].kind == "combination":
            raise SeveralTerms
        else:
            number = loss_value(out, size if signature.layout.is_cut else None, loss.verb)
        return number * jnp.asarray(seed if forms.is_mean else 1, number.dtype), (forms, sums, stacked, after)

    taken, rest = shards.differentiated() if shards else diff, (chosen, part, state)
    function, jaxpr = _to_differentiate(value, loss, (whole, *rest), signature, replica, shards)
    of_diff = lambda diff, chosen: function(diff, chosen, part, state)  # noqa: E731
    number, pull, (forms, sums, stacked, after) = jax.vjp(of_diff, taken, chosen, has_aux=True)
    after = as_before(after, state)
    if not loss.is_backward:
        traced = traces.get(0) if jaxpr is None and not loss.rows else None
        # The loss returns the total and the count of a `jdp.Mean` first; `value` returns one more number before them.
        jaxpr, count = (traced.jaxpr, 1) if traced else (jaxpr or jax.make_jaxpr(value)(whole, *rest), 2)
        _check_count(jaxpr, forms, len(jax.tree.leaves((whole, chosen))), count)
        if not was_accepted:
            _refuse_reduced(jaxpr, len(jax.tree.leaves(diff)), signature, loss.verb, size, forms)
    cotangent, factor = forms.weights(signature.layout, size, weight, seed)
    grads = pull(jnp.asarray(cotangent, number.dtype))
    if factor != 1:
        grads = jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), grads)
    return ReplicaResults(([*map(jnp.asarray, sums)], *grads), stacked, after, forms)


def _to_differentiate(
    value: Any, loss: Loss, operands: tuple[Any, ...], signature: Signature, replica: int, shards: ShardedParams | None
) -> tuple[Callable[..., Any], Any]:
    """Returns the function to differentiate, and the jaxpr that it was rewritten from: None if it is `value` itself."""
    if not (loss.sync or shards or loss.inspect):
        # JAX differentiates a jnp function once for all operands of the same shapes, but a jaxpr equation by equation.
        return value, None
    function = jax.jit(apart(value) if loss.sync else value)
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    if loss.inspect:
        loss.inspect(jaxpr, jax.tree.leaves(operands[0]))
    function = by_rows(function, jaxpr, shapes, signature, replica) if loss.sync else function
    return shards.function(jaxpr, shapes, shapes[1][0]) if shards else function, jaxpr


def run_loss(
    loss: Loss, signature: Signature, diff: Tree, chosen: dict[int, Tree], part: Sequence[Any], state: Tree
) -> tuple[Any, Tree, Tree, Any]:
    """Runs the loss function, with arguments from `chosen` (by position); returns `(loss, aux, state, cotangents)`."""
    _, args, kwargs = signature.fill(part)
    mine = [chosen.get(i, x) for i, x in enumerate(args)]
    cotangents = mine.pop() if loss.is_backward else None
    with functions_of_terms_refused(loss.verb):
        return *loss.compute(diff, state, mine, kwargs), cotangents


def forms_of(
    loss: Loss,
    signature: Signature,
    out: tuple[Any, Tree],
    operands: tuple[Tree, ...],
    size: int,
    weight: float,
    traces: dict[int, Traced | None] | None = None,
) -> tuple[Forms, list[Any], list[Any]]:
    """Returns the forms, the sums and the entries per row of what a microbatch with these operands returned."""
    rows = size if signature.layout.is_cut else None
    is_forward = loss.criterion is not None and not loss.is_backward

    def again(diff: Tree, part: list[Any], state: Tree) -> Tree:
        out, aux, _, _ = run_loss(loss, signature, diff, {}, part, state)
        return out if is_forward else (out, aux)

    total, refuses = sum(signature.layout.sizes), not loss.is_backward  # the forward pass has refused what is wrong
    way = IN_EVALUATION if loss.verb == "evaluate" else IN_TRAINING
    cut, traces = _axes_of(signature, *operands), _traces(loss, signature, operands) if traces is None else traces
    followed = Followed(out[0] if is_forward else out, rows, total, again, operands, cut, traces, refuses, way)
    if is_forward:
        return forms_of_outputs(out[0], rows or 1, followed, loss.verb)
    return forms_of_results(*out, rows, weight, followed, loss.verb)


def _axes_of(signature: Signature, diff: Tree, _: Tree, state: Tree) -> list[int | None]:
    """Returns the axis of the rows of each operand's arrays, or None."""
    of_part = [leaf.axis if isinstance(leaf, Cut) else None for leaf in signature.leaves]
    return [*[None] * len(jax.tree.leaves(diff)), *of_part, *[None] * len(jax.tree.leaves(state))]


def _traces(loss: Loss, signature: Signature, operands: tuple[Tree, ...]) -> dict[int, Traced | None]:
    """Returns the traces of a loss for any number of rows: one dict for chunks of all sizes, which `Followed` fills."""
    leaves, treedef = jax.tree.flatten(operands)
    types = [of_any_rows(x, axis) for x, axis in zip(leaves, _axes_of(signature, *operands), strict=True)]
    layout, x64 = signature.layout, jax.config.jax_enable_x64  # type: ignore[attr-defined]
    nodes = [
        (x.treedef, *[y if isinstance(y, Static) else 0 for y in x.leaves]) if x else None for x in signature.layouts
    ]
    of_call = signature.treedef, *nodes, layout.mesh, layout.per_device, layout.is_cut
    key = loss.is_backward, loss.criterion is None, x64, of_call, treedef, *types
    found = loss.traces.used(key)
    if found is None:
        found = loss.traces[key] = {}
    return found


def _product(values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """Returns the sum of the products of values with their cotangents; integers have no cotangents."""
    pairs = zip([x for x in map(jnp.asarray, values) if has_cotangent(x)], cotangents, strict=True)
    zero = jnp.zeros(())
    return sum((jnp.sum(x * ct).real.astype(zero.dtype) for x, ct in pairs), zero)


def has_cotangent(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _check_count(jaxpr: Any, forms: Forms, differentiated: int, at: int) -> None:
    """Raises `SeveralTerms` for a loss that is a `jdp.Mean`, if its gradient needs the count of all rows (result `at`).

    It does if the count is differentiated, or if a backward pass of the user's own is not linear, as one that clips;
    also if it is computed in float16 or less, where the gradient of a total that is not divided yet may overflow.
    """
    if forms.each[0].kind != "ratio":
        return
    inputs = [i < differentiated for i in range(len(jaxpr.in_avals))]
    depends = reached(jaxpr, inputs, lambda aval: jnp.issubdtype(aval.dtype, jnp.inexact))
    computed = (*jaxpr.in_avals[:differentiated], *(v.aval for eqn in equations(jaxpr) for v in eqn.outvars))
    may_overflow = any(jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).maxexp < 128 for x in computed)
    if depends[at] or may_overflow or not is_backward_linear(jaxpr):
        raise SeveralTerms


def _refuse_reduced(jaxpr: Any, count: int, signature: Signature, verb: str, size: int, forms: Forms) -> None:
    """Raises a `ValueError` if the loss function has summed the loss over the replicas itself.

    The first `count` inputs of its jaxpr are replicated parameters. A mean over the replicas is accepted if all
    replicas have the same number of rows, and one microbatch.
    """
    axis_name, n = signature.axis_name, len(signature.layout.devices)
    # The mean of the replicas' losses is taken. If each is that mean already, they are equal, and so is their mean.
    if forms.is_mean and {*signature.layout.rows} == {size} and are_means(jaxpr, axis_name, n):
        return
    inputs = [SAME] * count + [VARYING] * (len(jaxpr.in_avals) - count)
    found = varying(jaxpr, inputs, axis_name)[0]
    if not found.varying and found.reduced is not None:
        line = source_line(found.reduced)
        raise ValueError(
            f"jdp.{verb}: the loss is reduced over {axis_name!r} already ({found.reduced.primitive.name}"
            f"{f' at {line}' if line else ''}), so that it is the same on all replicas; jdp itself adds up the losses "
            f"of replicas and microbatches. Pass the loss as {ON_BATCH}, and leave the collective out."
        )


def as_before(after: Tree, before: Tree) -> Tree:
    """Returns the state in its original dtypes, because a step that changed them would compile again."""
    if jax.tree.structure(after) != jax.tree.structure(before):
        return after
    return jax.tree.map(lambda new, old: new if new is old else jnp.asarray(new).astype(old.dtype), after, before)


RunMicrobatch = Callable[[Any, Any, int, Tree], ReplicaResults]
"""Runs a microbatch, given its number, its first row, its number of rows and the state that the previous one left."""


def accumulate(one: RunMicrobatch, state: Tree, rows: int, size: int, cpu: bool) -> ReplicaResults:
    """Runs microbatches of `size` rows one after the other, the last with the rest, and returns their sums.

    On a CPU (`cpu`) the loop computes its convolutions in the layout that is fast there.
    """
    whole, rest = divmod(rows, size)
    if whole + bool(rest) <= 1:
        return one(0, 0, rows, state)
    done = _scan_microbatches(one, state, whole, size, cpu)
    if not rest:
        return done
    last = one(whole, whole * size, rest, done.state)
    sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), done.sums, last.sums)
    stacked = [jnp.concatenate(x, axis) for *x, axis in zip(done.rows, last.rows, last.forms.axes, strict=True)]
    return last._replace(sums=sums, rows=stacked)


def _scan_microbatches(one: RunMicrobatch, state: Tree, n: int, size: int, cpu: bool) -> ReplicaResults:
    """Runs n microbatches of equal size in a `scan`, which carries the sums and the state."""
    # Traced here to learn the shapes of the sums, and which parts of the state stay as they are.
    step = jax.make_jaxpr(lambda k, state: one(k, k * size, size, state), return_shape=True)
    jaxpr, shapes = step(jnp.int32(0), state)
    if jax.tree.structure(shapes.state) != jax.tree.structure(state):
        raise ValueError(
            f"jdp.accumulate_steps: the state{first_difference(shapes.state, state)} after a microbatch; each "
            f"microbatch must leave the tree as it was. Make the variable when the model is made, or pass "
            f"accumulate_steps=1."
        )
    run = replayed(canonical(jaxpr) if cpu else jaxpr, shapes)

    def body(carry: tuple[Tree, Tree], k: Any) -> tuple[tuple[Tree, Tree], list[Any]]:
        sums, state = carry
        added = run(k, state)
        # In the dtype of the sums, which is wider than that of 16-bit gradients.
        return (jax.tree.map(lambda a, b: a + jnp.asarray(b, a.dtype), sums, added.sums), added.state), added.rows

    start = jax.tree.map(lambda x: at_least_32_bits(jnp.zeros(x.shape, x.dtype)), shapes.sums), state
    (sums, after), stacked = jax.lax.scan(body, start, jnp.arange(n, dtype=jnp.int32))
    # State that no microbatch changes must stay the same array: by that, `returned` knows that replicas agree on it.
    old, treedef = jax.tree.flatten(state)
    before, left = jaxpr.jaxpr.invars[1:], jaxpr.jaxpr.outvars[len(jaxpr.out_avals) - len(old) :]
    same = [x is y for x, y in zip(before, left, strict=True)]
    after = [x if s else y for x, y, s in zip(old, jax.tree.leaves(after), same, strict=True)]
    stacked = [
        jax.lax.collapse(jnp.moveaxis(x, 0, axis), axis, axis + 2)
        for x, axis in zip(stacked, shapes.forms.axes, strict=True)
    ]
    return ReplicaResults(sums, stacked, treedef.unflatten(after), shapes.forms)
