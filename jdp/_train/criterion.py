"""A loss of all rows: the replicas run forward, the loss is computed once, and the replicas run backward.

`loss == criterion(gather(forward), batch)` and `gradient == sum_i vjp_i(d loss / d outputs_i)`, which is torch's gather
and ReduceAdd. There are two ways:

* In one pass: JAX differentiates the replicas' program, and keeps what the backward pass needs from the forward pass.
* In two passes: all microbatches run forward, then each runs again with its part of the cotangents. Two passes are
  also needed if replicas share a device (they run one after the other, in the memory of one), if parameters are cut
  over the replicas, or for gradients of cut arguments; `Passes.can_be_one` has all conditions.

A sum of terms with several denominators is computed in the same two ways. Its outputs are the sums that it is made
of. They are added over the replicas before they are divided.

Source: `gather` and `Gather.backward` in torch/nn/parallel; the two passes are Gao et al., "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup" (2021), known as GradCache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._core.layout import LEAF, Cut, Layout, Leaf, Stack, Tree, Whole, pad
from .._core.outputs import Marked
from .._core.parallel_apply import CallOf, GatherTime, on_replicas
from .._core.scattered import Scattered, Signature, holds_scattered, is_scattered, leaf_by_leaf, trim, untyped
from .._jax.jaxprs import replayed
from .._jax.rewrites import with_pairs_cut
from .._model.sync_batch_norm import apart, by_rows
from .forms import Forms, SeveralTerms
from .gradients import (
    Gradients,
    Loss,
    ReplicaResults,
    as_before,
    forms_of,
    gradients,
    has_cotangent,
    microbatches,
    run_loss,
    sent_as,
    weight_of_all,
)
from .terms import Term, finished

Run = Callable[[Tree, Scattered, Scattered | None], Scattered]
"""A function of `(replicas, inputs, kwargs)`, from which a program is compiled."""


Forward = tuple[Tree, Tree, Tree, list[Any], Forms]
"""The results of a forward pass: outputs, aux, state, counts and forms.

The outputs are the input of the criterion; without one, the sums that the loss is made of.
"""


def forward(loss: Loss, steps: int) -> CallOf:
    """Returns a replica's function without gradients: it maps `((diff, held), *args)` to `Forward`, in microbatches."""

    def call_of(signature: Signature, replica: int) -> Callable[..., Forward]:
        def call(*operands: Any) -> Forward:
            values = signature.values_of_replica(operands, replica)
            (diff, before), _, _ = signature.fill(values)

            def one(_: Any, part: list[Any], state: Tree, size: int, weight: float) -> ReplicaResults:
                def value(*operands: Any) -> tuple[Forms, list[Any], list[Any], Tree]:
                    out, aux, after, _ = run_loss(loss, signature, operands[0], {}, *operands[1:])
                    return *forms_of(loss, signature, (out, aux), operands, size, weight), after

                if loss.sync:
                    function = jax.jit(apart(value))
                    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(diff, part, state)
                    value = by_rows(function, jaxpr, shapes, signature, replica)
                forms, sums, rows, after = value(diff, part, state)
                return ReplicaResults((sums, (), {}), rows, as_before(after, state), forms)

            added = microbatches(one, steps, signature, replica, values, before)
            forms, sums, left = added.forms, added.sums[0], loss.leave(added.state, before)
            found, counts = forms.marked(sums, added.rows, weight_of_all(signature.layout, steps))
            if loss.criterion:
                return found, (), left, counts, forms
            _, aux = found
            return [Marked(x, None, "sum") for x in sums[: forms.each[0].summands]], aux, left, counts, forms

        return call

    return call_of


def gradients_on_replicas(
    loss: Loss,
    steps: int,
    wire: Any,
    scatter: Callable[[Any], int | None] | None,
    label: str,
    gather: GatherTime = "in the call",
    verb: str = "train_step",
) -> Run:
    """Returns a function that computes the `Gradients` of a loss.

    `gradients` explains the first four arguments, `on_replicas` the others.
    """
    directly = on_replicas(gradients(loss, steps, wire, scatter), label, gather, verb)
    made: list[Passes] = []  # at the first call that needs them

    def run(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        if loss.criterion is None:
            try:
                return _settled(directly(replicas, inputs, kwargs))
            except SeveralTerms:
                pass
        if not made:
            made.append(Passes(loss, steps, wire, scatter, label, gather, verb))
        passes = made[0]
        if passes.can_be_one(replicas, inputs):
            return passes.in_one(replicas, inputs, kwargs)
        return passes.in_two(replicas, inputs, kwargs)

    run.__name__ = run.__qualname__ = label
    return run


def as_second_pass(call_of: CallOf, loss: Loss, steps: int, label: str) -> Run:
    """Returns a function that runs the first pass and the loss, and then `call_of` on the batch and the cotangents."""
    passes, run = Passes(loss, steps, label=label, verb=loss.verb), on_replicas(call_of, label)

    def with_cotangents(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        more, _, _ = passes.cotangents(replicas, inputs, kwargs)
        return run(replicas, more, kwargs)

    with_cotangents.__name__ = with_cotangents.__qualname__ = label
    return with_cotangents


def with_last(inputs: Scattered, arrays: Sequence[Any], leaves: Sequence[Leaf]) -> Scattered:
    """Returns the arguments with a list of arrays appended as the last one."""
    layout, last = inputs._layout, jax.tree.structure([0] * len(arrays))
    treedef = jax.tree_util.treedef_tuple([*layout.treedef.children(), last])
    return Scattered((*inputs._arrays, *arrays), layout.of(treedef, (*layout.leaves, *leaves)))


class Passes:
    """The programs of a loss of all rows, which runs in one pass or in two: the module says when."""

    def __init__(
        self,
        loss: Loss,
        steps: int,
        wire: Any = None,
        scatter: Callable[[Any], int | None] | None = None,
        label: str = "loss",
        gather: GatherTime = "at once",
        verb: str = "train_step",
    ) -> None:
        self.loss, self.steps = loss, steps
        # Only a program of gradients takes shards ("in the call"); the forward pass gets gathered parameters.
        self.forward = on_replicas(forward(loss, steps), label, "at once" if gather == "at once" else "as used", verb)
        self.backward = on_replicas(
            gradients(loss._replace(is_backward=True), steps, wire, scatter), label, gather, verb
        )
        self.reduce = on_replicas(_reduce(wire, scatter), label, gather, verb)

    def can_be_one(self, replicas: Tree, inputs: Scattered) -> bool:
        """Returns True if one pass is enough: JAX may keep what the forward pass computed for the backward pass."""
        layout, (diff, _) = inputs._layout, replicas
        is_uneven = len({*layout.rows}) > 1
        plain = self.steps == 1 and layout.per_device == 1 and layout.is_cut and not self.loss.rows
        return plain and not (self.loss.sync and is_uneven) and not holds_scattered(diff)

    def in_one(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        """Differentiates the forward pass and the loss in one program, and returns the `Gradients`."""
        (diff, held), layout = replicas, inputs._layout
        mesh, stack = layout.mesh, layout.of(LEAF, [Stack()])
        params, treedef = jax.tree.flatten(diff)
        # One copy of the parameters for each replica, so that each gets its own gradients. These are then reduced like
        # those of any other loss.
        copies = [jnp.broadcast_to(x, (mesh.size, *jnp.shape(x))) for x in params]
        copies = [x if mesh.size == 1 else mesh.cut(x, 0) for x in copies]

        def run(copies: list[Any]) -> tuple[list[Any], Forward]:
            each = treedef.unflatten([Scattered((x,), stack) for x in copies])
            outputs, *others = leaf_by_leaf(self.forward((each, held), inputs, kwargs))
            outputs = jax.tree.map(_array_of_all_rows, outputs, is_leaf=is_scattered)
            return [x for x in jax.tree.leaves(outputs) if has_cotangent(x)], (outputs, *others)

        _, pull, (outputs, aux, state, counts, forms) = jax.vjp(run, copies, has_aux=True)
        (loss, metrics), cotangents, (direct, _) = self.differentiated(forms, outputs, replicas, inputs, kwargs)
        (grads,) = pull(cotangents)
        whole = Layout(treedef, (Stack(),) * len(params), (1,) * mesh.size, mesh, layout.dim, 1)
        arguments = _one_scattered((leaf_by_leaf(Scattered(grads, whole)),), layout)
        reduced = leaf_by_leaf(self.reduce((), arguments, None))
        grads = _plus(reduced, direct)
        aux = metrics if self.loss.criterion else aux
        out = _whole(loss, layout), _replicated_tree(aux, layout)
        return _settled(_one_scattered(Gradients(out, grads, {}, state, counts), layout))

    def in_two(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        """Runs forward and computes the loss, runs again with its cotangents, and returns the `Gradients`."""
        more, (loss, metrics), (direct, of_rows) = self.cotangents(replicas, inputs, kwargs)
        layout, second = inputs._layout, leaf_by_leaf(self.backward(replicas, more, kwargs))
        if self.loss.criterion:
            second = second._replace(out=(_whole(loss, layout), _replicated_tree(metrics, layout)))
        row_grads = {i: _plus(second.row_grads[i], x) for i, x in of_rows.items()} if of_rows else second.row_grads
        second = second._replace(grads=_plus(second.grads, direct), row_grads=row_grads)
        return _settled(_one_scattered(second, layout))

    def cotangents(
        self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None
    ) -> tuple[Scattered, tuple[Any, Tree], tuple[Tree, dict[int, Tree]]]:
        """Runs the first of two passes and the loss, and returns the inputs of the second pass.

        These are the batch and, as the last argument, the cotangents of the outputs. Also returns `(loss, metrics)`,
        and the gradients of the loss that bypass the outputs.
        """
        cut, *_, forms = leaf_by_leaf(self.forward(replicas, inputs, kwargs))
        outputs = jax.tree.map(_array_of_all_rows, cut, is_leaf=is_scattered)
        out, cotangents, direct = self.differentiated(forms, outputs, replicas, inputs, kwargs)
        each = jax.tree.leaves(cut, is_leaf=is_scattered)
        leaves = [s._layout.arrays[0] for s in each if has_cotangent(s._arrays[0])]
        arrays = [padded(ct, leaf, inputs._layout) for ct, leaf in zip(cotangents, leaves, strict=True)]
        return with_last(inputs, arrays, leaves), out, direct

    def differentiated(
        self, forms: Forms, outputs: Tree, replicas: Tree, inputs: Scattered, kwargs: Scattered | None
    ) -> tuple[tuple[Any, Tree], list[Any], tuple[Tree, dict[int, Tree]]]:
        """Returns `(loss, metrics)`, the cotangents of the outputs, and the gradients that bypass the outputs."""
        values, treedef = jax.tree.flatten(outputs)
        inputs = _untyped_inputs(inputs)
        (diff, held), with_rows = replicas, kwargs if kwargs is not None and kwargs._layout.is_cut else inputs
        args, layout, loss = inputs._layout.fill(trim(inputs)), inputs._layout, self.loss
        inexact = [x for x in values if has_cotangent(x)]
        direct = (diff, {i: args[i] for i in loss.rows}) if loss.is_direct else ((), {})

        def value(inexact: list[Any], direct: tuple[Tree, dict[int, Tree]]) -> tuple[Any, Tree]:
            rest = iter(inexact)
            leaves = [next(rest) if has_cotangent(x) else x for x in values]
            if loss.criterion is None:
                return forms.each[0].value(iter(leaves), weight_of_all(with_rows._layout, self.steps)), ()
            leaves = [x[0] if form.kind == "first" else x for x, form in zip(leaves, forms.each, strict=True)]
            params, rows = direct if loss.is_direct else (diff, {})
            return loss.criterion(treedef.unflatten(leaves), params, held, [rows.get(i, x) for i, x in enumerate(args)])

        with jax.named_scope("criterion"):
            run = value if loss.criterion is None else _shared_out(value, inexact, direct, layout)
            number, pull, metrics = jax.vjp(run, inexact, direct, has_aux=True)
            cotangents, (of_diff, of_rows) = pull(jnp.ones_like(number))
        each, as_cut = leaf_by_leaf(inputs), lambda x, s: padded(x, s._layout.arrays[0], layout)
        of_rows = {i: jax.tree.map(as_cut, of_rows[i], each[i]) for i in of_rows}
        return (number, metrics), cotangents, (of_diff, of_rows)


def _shared_out(criterion: Callable[..., Any], outputs: list[Any], direct: Tree, layout: Layout) -> Callable[..., Any]:
    """Returns `criterion(outputs, direct)`; each device computes a part of its arrays of all pairs of rows."""
    rows, mesh = sum(layout.rows), layout.mesh
    if mesh.size == 1 or mesh.inner_axes or not rows or rows % mesh.size:
        return criterion
    jaxpr, shapes = jax.make_jaxpr(criterion, return_shape=True)(outputs, direct)
    have_rows = [i < len(outputs) for i in range(len(jaxpr.in_avals))]
    cut = with_pairs_cut(jaxpr, have_rows, rows, lambda x, axis: _constrained(x, axis, layout))
    return replayed(cut, shapes)


def _untyped_inputs(inputs: Scattered) -> Scattered:
    """Returns the arguments without Explicit axes in their types, which a program around the call may have set."""

    def without_axes(x: Any, leaf: Leaf) -> Any:
        if not isinstance(x, Tracer) or not jax.typeof(x).sharding.mesh.explicit_axes:
            return x
        return untyped(x, inputs._layout.mesh.along(leaf.axis if isinstance(leaf, Cut) else None))

    pairs = zip(inputs._arrays, inputs._layout.arrays, strict=True)
    return Scattered([without_axes(x, leaf) for x, leaf in pairs], inputs._layout)


def _reduce(wire: Any, scatter: Callable[[Any], int | None] | None) -> CallOf:
    """Returns the function that a replica runs on its gradients: it marks each for the sum over the replicas."""

    def call_of(signature: Signature, replica: int) -> Callable[..., Tree]:
        def call(*operands: Any) -> Tree:
            _, (grads,), _ = signature.fill(signature.values_of_replica(operands, replica))

            def mark(x: Any) -> Marked:
                sent, axis = sent_as(wire, x.dtype), scatter and scatter(x)
                return Marked(x, None, "sum", wire=sent, dtype=x.dtype, scatter=axis)

            return jax.tree.map(mark, grads)

        return call

    return call_of


def _array_of_all_rows(s: Scattered) -> Any:
    """Returns the one array of `s` with all rows in the order of the batch, without padding."""
    return trim(s)[0]


def _constrained(x: Any, axis: int | None, layout: Layout) -> Any:
    return x if layout.mesh.size == 1 else jax.lax.with_sharding_constraint(x, layout.mesh.along(axis))


def padded(x: Any, leaf: Any, layout: Layout) -> Any:
    """Returns an array of all rows, padded and cut as the replicas hold it; arrays without rows are unchanged."""
    if not isinstance(leaf, Cut):
        return x
    if not layout.is_even:  # what made it must not be partitioned over rows that do not divide: see `trim`
        x = _constrained(x, None, layout)
    return _constrained(pad(x, leaf, len(layout.devices)), leaf.axis, layout)


def _plus(found: Tree, direct: Tree) -> Tree:
    """Returns a tree of scattered arrays with `direct` added to them."""
    if not jax.tree.leaves(direct):
        return found

    def plus(s: Scattered, x: Any) -> Scattered:
        return Scattered((s._arrays[0] + (x._arrays[0] if is_scattered(x) else x),), s._layout)

    return jax.tree.map(plus, found, direct, is_leaf=is_scattered)


def _whole(x: Any, layout: Layout) -> Scattered:
    return Scattered((_constrained(jnp.asarray(x), None, layout),), layout.of(LEAF, [Whole()]))


def _replicated_tree(tree: Tree, layout: Layout) -> Tree:
    """Returns the tree with its plain arrays replicated; scattered arrays stay as they are."""
    return jax.tree.map(lambda x: x if is_scattered(x) else _whole(x, layout), tree, is_leaf=is_scattered)


def _one_scattered(tree: Tree, layout: Layout) -> Scattered:
    """Returns a tree of scattered arrays as one `Scattered`."""
    parts, treedef = jax.tree.flatten(tree, is_leaf=is_scattered)
    layouts = [part._layout for part in parts]
    like = layouts[0] if layouts and all(x.sizes == layouts[0].sizes for x in layouts) else layout
    leaves = [leaf for x in layouts for leaf in x.leaves]
    return Scattered([x for part in parts for x in part._arrays], like.of(treedef, leaves))


def _settled(s: Scattered) -> Scattered:
    """Returns `s` with each sum of terms replaced by its value."""

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Term | Scattered)

    tree, layout = leaf_by_leaf(s), s._layout
    if not any(isinstance(x, Term) for x in jax.tree.leaves(tree, is_leaf=is_leaf)):
        return s

    def settle(x: Any) -> Any:
        if not isinstance(x, Term):
            return x
        return _whole(finished(jax.tree.map(lambda part: part._arrays[0], x, is_leaf=is_scattered)), layout)

    return _one_scattered(jax.tree.map(settle, tree, is_leaf=is_leaf), layout)
