"""The results of a step for `jax.pmap`: each gets its rule; state trained on one replica's rows alone is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.inputs import STACKED, axes_of, entries, is_legacy_key
from .._core.layout import Tree, is_key
from .._core.outputs import Marked, Reduce
from .._jax.jaxprs import ReplicaValue, added, is_exchanged, varying
from .._jax.pieces import without_calls
from .._model.nnx import mark_updates

VERB = "parallel"


@dataclasses.dataclass(slots=True, eq=False)
class Numbered:
    """An operand or a result of a step, with its index among all of them; for `jax.tree` it is a leaf.

    A result that is a leaf of state also has its `name` among the caller's arguments, and the `old` operand, its value
    before the step.
    """

    value: Any
    number: int
    known: ReplicaValue
    name: str = ""
    old: Any = None


def numbered(values: Sequence[Any], known: Sequence[ReplicaValue]) -> list[Numbered]:
    return [Numbered(x, i, v) for i, (x, v) in enumerate(zip(values, known, strict=True))]


def states_of(whole: dict[int, Tree]) -> dict[str, Tree]:
    """Returns, by name, the trees that may come back as state: each replicated argument, then the entries of tuples and
    lists among these.
    """
    found = {f"args[{p}]": tree for p, tree in sorted(whole.items())}
    several = {name: tree for name, tree in found.items() if type(tree) in (tuple, list)}
    return found | {f"{name}[{i}]": x for name, tree in several.items() for i, x in enumerate(tree)}


def _is_like(state: Tree, result: Tree) -> bool:
    """Returns True if a result has the tree and the shapes of a state."""
    leaves, found = jax.tree.leaves(state), jax.tree.leaves(result)
    return jax.tree.structure(state) == jax.tree.structure(result) and all(
        jnp.shape(x.value) == jnp.shape(y.value) for x, y in zip(leaves, found, strict=True)
    )


def mark_results(
    out: Any, states: dict[str, Tree], out_axes: Any, default: tuple[int | None, int], reduce: Reduce
) -> tuple[Tree, list[Numbered]]:
    """Marks each result as replicated (axis None) or cut along its axis; also returns the leaves of state among them.

    `default` holds the axis of the first result and that of the others.
    """
    several = type(out) in (tuple, list)
    if several and out_axes is None and default[0] is None and any(_is_like(tree, out) for tree in states.values()):
        several = False  # one result: a state that is a tuple
    results = list(out) if several else [out]
    axes = [default[0], *[default[1]] * (len(results) - 1)]
    if out_axes is not None:
        axes = axes_of_each(out_axes, len(results), "out_axes", "results")
    kept: list[Numbered] = []
    marked, unused = [], states
    for k, (result, axis) in enumerate(zip(results, axes, strict=True)):
        same = next((name for name, tree in unused.items() if _is_like(tree, result)), None)
        leaves, treedef = jax.tree.flatten(result)
        if same is not None and axis is None:
            unused = {s: tree for s, tree in unused.items() if not s.startswith(same) and not same.startswith(s)}
            olds = zip(jax.tree_util.tree_leaves_with_path(states[same]), leaves, strict=True)
            for (path, old), new in olds:
                kept.append(dataclasses.replace(new, name=same + jax.tree_util.keystr(path), old=old))
        elif same is not None and out_axes is None and same != "args[0]" and 0 < len(leaves) < treedef.num_nodes:
            fits = tuple(None if i == k else a for i, a in enumerate(axes))
            raise ValueError(
                f"jdp.{VERB}: output[{k}] has the tree and the shapes of {same}, which is replicated; by default the "
                f"first of {len(axes)} results is replicated, and the others are gathered. If it is state, pass "
                f"out_axes={fits} to dp.parallel; if it is gathered, pass an int in place of its None."
            )
        # By default a result that differs is gathered, unless it is state: reduce_state says which value is kept.
        gathered = default[1] if same is None and out_axes is None else None
        where = axes_of(axis, result, VERB, "out_axes")
        marks = [_mark(x, a, gathered, reduce) for x, a in zip(leaves, where, strict=True)]
        marked.append(treedef.unflatten(marks))
    return type(out)(marked) if several else marked[0], kept


def axes_of_each(axes: Any, count: int, name: str, what: str) -> list[Any]:
    """Returns an entry for each argument, or each result, with `STACKED` in place of "stacked"."""
    given = entries(VERB, axes, count, name, what)
    return jax.tree.map(lambda a: STACKED if isinstance(a, str) and a == "stacked" else a, given)


def _mark(x: Numbered, axis: Any, gathered: int | None, reduce: Reduce) -> Marked:
    if axis is STACKED:
        return Marked(jnp.expand_dims(x.value, 0), 0)
    if not x.known.varying:
        return Marked(x.value, axis, "same")
    return Marked(x.value, gathered if axis is None else axis, reduce)


def mark_nodes(before: Tree, after: Tree, reduce: Reduce) -> Tree:
    """Marks the NNX state that has changed; leaves that are the same on all replicas need no reduction."""
    same = {id(x.value) for x in jax.tree.leaves(after) if not x.known.varying}
    before, after = (jax.tree.map(lambda x: x.value, tree) for tree in (before, after))
    updates = mark_updates(after, [before], reduce)

    def settle(x: Any) -> Any:  # values that were sown are not marked, and are gathered
        return Marked(x.value, None, "same") if isinstance(x, Marked) and id(x.value) in same else x

    return jax.tree.map(settle, updates)


def kept_nodes(before: Tree, after: Tree, names: Mapping[Any, str]) -> list[Numbered]:
    """Returns the leaves of NNX state, without sown values and keys; `names` gives each object's argument."""
    was: dict[Any, Any] = dict(nnx.to_flat_state(before))
    kept: list[Numbered] = []
    for path, variable in nnx.to_flat_state(after):
        if path in was and not isinstance(variable, nnx.Intermediate | nnx.RngKey):
            name = ".".join([names.get(path[0], "kwargs"), *map(str, path[1:])])
            pairs = zip(jax.tree.leaves(was[path]), jax.tree.leaves(variable), strict=False)
            kept += [dataclasses.replace(new, name=name, old=old) for old, new in pairs]
    return kept


def refuse_one_replicas_rows(
    jaxpr: Any, results: Sequence[Numbered], kept: Sequence[Numbered], axis_name: str, n: int, reduce: Reduce
) -> None:
    """Raises a `ValueError` for state that differs between replicas because each computed it from its own rows.

    Statistics may differ, such as a BatchNorm's in training: one replica's are kept, as in torch, or their mean.
    """
    changed = [k for k in kept if k.value is not k.old.value]
    apart = [k for k in changed if k.known.varying and k.known.reduced is None and not _is_key(k.value)]
    # The mean over the replicas is right for statistics. For trained state it is right with SGD, and wrong with other
    # optimizers, which is why other state must not depend on it. A metric may: it does not make statistics trained.
    others = kept if reduce == "mean" else results
    own = {id(k.value) for k in apart}  # by identity, because a value may be returned twice
    pmean = (
        f"trained state must be the same on all replicas, or it learns from one replica's rows alone. Pass the "
        f"gradients through jax.lax.pmean(grads, {axis_name!r}) before the update"
    )
    if trained := _trained(apart, [x for x in others if id(x.value) not in own]):
        raise ValueError(
            f"jdp.{VERB}: {trained[0].name} differs between {n} replicas after the step, and other results are "
            f'computed from it; {pmean} (state of each replica\'s own is an argument that is "stacked" in in_axes and '
            f"out_axes)."
        )
    if reduce == "mean":
        apart = [k for k in apart if not jnp.issubdtype(k.value.dtype, jnp.inexact)]
    jaxpr = without_calls(jaxpr) if apart else jaxpr
    if total := next((k for k in apart if _is_sum(jaxpr, k, axis_name)), None):
        raise ValueError(
            f"jdp.{VERB}: {total.name} differs between {n} replicas after the step, which adds to it; such a sum "
            f"would be that of one replica's rows alone. Pass what is added through jax.lax.psum(x, {axis_name!r}) "
            f"(a maximum through jax.lax.pmax)."
        )
    if apart and not any(is_exchanged(k.known) for k in changed):
        raise ValueError(
            f"jdp.{VERB}: {apart[0].name} differs between {n} replicas after the step, and nothing in the state has "
            f"come through a collective over {axis_name!r}; {pmean} (statistics: reduce_state='mean' of "
            f"jdp.DataParallel; a result that is no state: an int in out_axes)."
        )


def _trained(apart: Sequence[Numbered], others: Sequence[Numbered]) -> list[Numbered]:
    """Returns the leaves on which one of the other results depends, or which depend on each other.

    One statistic may be computed from another, as a bias-corrected average from the average, but not in a circle.
    """

    def goes_into(k: Numbered, result: Numbered) -> bool:
        return bool(result.known.sources >> k.old.number & 1)

    trained = [
        k
        for k in apart
        if any(goes_into(k, x) for x in others)
        or any(goes_into(k, other) and goes_into(other, k) for other in apart if other is not k)
    ]
    while more := [k for k in apart if k not in trained and any(goes_into(k, t) for t in trained)]:
        trained += more
    return [k for k in apart if k in trained]


def _is_sum(jaxpr: Any, k: Numbered, axis_name: str) -> bool:
    """Returns True if a leaf is a count or a total: its old value plus something that does not depend on that value."""
    addends = added(jaxpr, k.old.number, k.number)
    inputs = [ReplicaValue(varying=False, sources=int(i == k.old.number)) for i in range(len(jaxpr.in_avals))]
    return addends is not None and not any(v.sources for v in varying(jaxpr, inputs, axis_name, addends))


def _is_key(x: Any) -> bool:
    """Returns True if it holds PRNG keys, which may differ: typed keys, or legacy ones."""
    return is_key(x) or is_legacy_key(x, *x.shape[:-1])
