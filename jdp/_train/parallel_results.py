"""What a step for `jax.pmap` returns: each result with its rule; state that one replica's rows trained is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.inputs import STACKED, axes_of
from .._core.layout import Tree, is_key
from .._core.outputs import Marked, Reduce
from .._jax.jaxprs import Value, added, is_exchanged, varying
from .._model import nnx as _nnx

VERB = "parallel"


class Kept(NamedTuple):
    """A leaf of state: how the caller reaches it, and its numbers among the operands and among the results."""

    name: str
    old: int
    new: int


class State(NamedTuple):
    """An argument that is whole, or an entry of one that is a tuple: what may come back as a result."""

    name: str
    numbers: Tree  # of its operands
    shapes: list[Any]

    def is_like(self, result: Tree) -> bool:
        """Whether a result has its tree and its shapes."""
        return jax.tree.structure(result) == jax.tree.structure(self.numbers) and self.shapes == [
            jnp.shape(x) for x in jax.tree.leaves(result)
        ]


def states_of(whole: dict[int, Tree], values: Sequence[Any]) -> list[State]:
    """The whole arguments, given as numbers of operands, and the entries of tuples among them."""
    found = [(f"args[{p}]", tree) for p, tree in sorted(whole.items())]
    found += [(f"{name}[{i}]", x) for name, t in found if type(t) in (tuple, list) for i, x in enumerate(t)]
    return [State(name, tree, [jnp.shape(values[i]) for i in jax.tree.leaves(tree)]) for name, tree in found]


def mark_results(
    out: Any, numbers: Any, found: Sequence[Value], states: list[State], out_axes: Any, default: Any, reduce: Reduce
) -> tuple[Tree, list[Kept]]:
    """Each result with its rule: replicated (axis None), or cut along its axis; and the leaves of state among them.

    `numbers` is `out` with the number of each leaf, by which it is found in `found`; `default` are the axes of the
    first result and of the others.
    """
    several = type(out) in (tuple, list)
    if several and out_axes is None and default[0] is None and any(s.is_like(out) for s in states):
        several = False  # a state that is a tuple, alone
    results, counted = (list(out), list(numbers)) if several else ([out], [numbers])
    axes = _axes_of_results(out_axes, len(results), default)
    kept: list[Kept] = []
    marked, unused = [], list(states)
    for k, (result, number, axis) in enumerate(zip(results, counted, axes, strict=True)):
        same = next((s for s in unused if s.is_like(result)), None)
        if same is not None and axis is None:
            unused = [s for s in unused if not s.name.startswith(same.name) and not same.name.startswith(s.name)]
            kept += _leaves(same, number)
        elif same is not None and out_axes is None and same.name != "args[0]" and _is_tree(same):
            fits = tuple(None if i == k else a for i, a in enumerate(axes))
            raise ValueError(
                f"jdp.{VERB}: output[{k}] has the tree and the shapes of {same.name}, which is whole; of {len(axes)} "
                f"results the first alone is whole by itself, the others are gathered. Pass out_axes={fits} to "
                f"dp.parallel for a state, or an int in the place of its None for what is gathered."
            )
        # What differs is not dropped, unless it is state: there one value is kept, by the rule of reduce_state.
        gathered = default[1] if same is None and out_axes is None else None
        each = axes_of(axis, result, VERB, "out_axes")
        leaves, treedef = jax.tree.flatten(result)
        marks = [
            _mark(x, a, found[i].varying, gathered, reduce)
            for x, i, a in zip(leaves, jax.tree.leaves(number), each, strict=True)
        ]
        marked.append(jax.tree.unflatten(treedef, marks))
    return type(out)(marked) if several else marked[0], kept


def _axes_of_results(out_axes: Any, count: int, default: Any) -> list[Any]:
    if out_axes is None:
        return [default[0], *[default[1]] * (count - 1)]
    return each(out_axes, count, "out_axes", "results")


def each(axes: Any, count: int, name: str, what: str) -> list[Any]:
    """An entry for each argument, or each result; "stacked" in it is an axis."""
    given = list(axes) if isinstance(axes, tuple | list) else [axes] * count
    if len(given) != count:
        raise ValueError(
            f"jdp.{VERB}: {name} has {len(given)} entries for {count} {what}; as in jax.vmap each has one. Pass "
            f"{name} of that length, None for what is whole."
        )
    return jax.tree.map(lambda a: STACKED if isinstance(a, str) and a == "stacked" else a, given)


def _is_tree(state: State) -> bool:
    return jax.tree.structure(state.numbers).num_leaves > 0 and not jax.tree_util.all_leaves([state.numbers])


def _mark(x: Any, axis: Any, differs: bool, gathered: Any, reduce: Reduce) -> Marked:
    if axis is STACKED:
        return Marked(jnp.expand_dims(x, 0), 0)
    if axis is not None:
        return Marked(x, axis)
    if not differs:
        return Marked(x, None, "same")
    return Marked(x, None, reduce) if gathered is None else Marked(x, gathered)


def _leaves(state: State, numbers: Tree) -> list[Kept]:
    paths = jax.tree_util.tree_leaves_with_path(state.numbers)
    return [
        Kept(state.name + jax.tree_util.keystr(path), old, new)
        for (path, old), new in zip(paths, jax.tree.leaves(numbers), strict=True)
    ]


def mark_nodes(after: Tree, numbers: Tree, found: Sequence[Value], before: Tree, reduce: Reduce) -> Tree:
    """The NNX state that has changed; what is the same on all replicas needs no reduction."""
    counted = dict(nnx.to_flat_state(numbers))
    marks = _nnx.mark_updates(after, [(path, v, None) for path, v in nnx.to_flat_state(before)], reduce)

    def settle(path: Any, variable: Any) -> Any:
        marked, treedef = jax.tree.flatten(variable)
        each = zip(marked, jax.tree.leaves(counted[path]), strict=True)
        return jax.tree.unflatten(treedef, [m if found[i].varying else Marked(m.value, None, "same") for m, i in each])

    return nnx.from_flat_state([(path, settle(path, v)) for path, v in nnx.to_flat_state(marks)])


def kept_nodes(before: Tree, after: Tree, names: Mapping[Any, str]) -> list[Kept]:
    """The leaves of the NNX objects' state, but for what a call sows and for the keys that are folded.

    `before` and `after` hold the numbers of operands and results; `names` are the arguments that the objects stood in.
    """
    was, kept = dict(nnx.to_flat_state(before)), []
    for path, variable in nnx.to_flat_state(after):
        if path in was and not isinstance(variable, nnx.Intermediate | nnx.RngKey):
            name = ".".join([names.get(path[0], "kwargs"), *map(str, path[1:])])
            pairs = zip(jax.tree.leaves(was[path]), jax.tree.leaves(variable), strict=False)
            kept += [Kept(name, old, new) for old, new in pairs]
    return kept


def refuse_one_replicas_rows(
    jaxpr: Any, found: Sequence[Value], kept: Sequence[Kept], axis_name: str, n: int, reduce: Reduce
) -> None:
    """A `ValueError` for state that differs between replicas because each has made it of its own rows.

    That is right for statistics, as a BatchNorm's in training: one replica's are kept, as torch does, or the mean.
    """
    outs, ins = jaxpr.jaxpr.outvars, jaxpr.jaxpr.invars
    changed = [k for k in kept if outs[k.new] is not ins[k.old]]
    apart = [k for k in changed if found[k.new].varying and found[k.new].reduced is None and not _is_key(outs[k.new])]
    # The mean of what every replica makes of its rows is right for statistics, and wrong for all that is trained on
    # them by anything but SGD. A metric of such statistics does not make them trained.
    results = {k.new for k in kept} if reduce == "mean" else set(range(len(outs)))
    own = {id(outs[k.new]) for k in apart}  # by identity, for what is returned twice
    if trained := _trained(apart, found, [i for i in results if id(outs[i]) not in own]):
        raise ValueError(
            f"jdp.{VERB}: {trained[0].name} differs between {n} replicas after the step, and other results are "
            f"computed from it; what is trained is the same on all replicas, or it learns from one's rows alone. Pass "
            f"the gradients through jax.lax.pmean(grads, {axis_name!r}) before the update (state of each replica's own "
            f'is an argument that is "stacked" in in_axes and out_axes).'
        )
    if reduce == "mean":
        apart = [k for k in apart if not jnp.issubdtype(outs[k.new].aval.dtype, jnp.inexact)]
    if sums := _sums(jaxpr, apart, axis_name):
        raise ValueError(
            f"jdp.{VERB}: {sums[0].name} differs between {n} replicas after the step, which adds to it; such a sum "
            f"would be that of one replica's rows alone. Pass what is added through jax.lax.psum(x, {axis_name!r})."
        )
    if apart and not any(is_exchanged(found[k.new]) for k in changed):
        raise ValueError(
            f"jdp.{VERB}: {apart[0].name} differs between {n} replicas after the step, and nothing in the state has "
            f"come through a collective over {axis_name!r}; what is trained is the same on all replicas, or it learns "
            f"from one's rows alone. Pass the gradients through jax.lax.pmean(grads, {axis_name!r}) before the update "
            f"(statistics: reduce_state='mean' of jdp.DataParallel; a result that is no state: an int in out_axes)."
        )


def _trained(apart: Sequence[Kept], found: Sequence[Value], others: Sequence[int]) -> list[Kept]:
    """Those of the leaves on which one of the other results depends, or which depend on each other.

    Statistics may go into others, as an average into one without its bias; nothing comes back from there.
    """

    def goes_into(k: Kept, result: int) -> bool:
        return bool(found[result].sources >> k.old & 1)

    trained = [
        k
        for k in apart
        if any(goes_into(k, i) for i in others)
        or any(goes_into(k, other.new) and goes_into(other, k.new) for other in apart if other is not k)
    ]
    while more := [k for k in apart if k not in trained and any(goes_into(k, t.new) for t in trained)]:
        trained += more
    return [k for k in apart if k in trained]


def _sums(jaxpr: Any, apart: Sequence[Kept], axis_name: str) -> list[Kept]:
    """Those of the leaves that are what they were and something that does not depend on it: a count, a total."""
    found = []
    for k in apart:
        to_it = added(jaxpr, k.old, k.new)
        if to_it is not None:
            marked = [Value(False, None, int(i == k.old)) for i in range(len(jaxpr.in_avals))]
            if not any(v.sources for v in varying(jaxpr, marked, axis_name, to_it)):
                found.append(k)
    return found


def _is_key(var: Any) -> bool:
    """Whether it holds PRNG keys, which may differ: typed ones, or (of the old style) two words each."""
    return is_key(var.aval) or var.aval.dtype == jnp.uint32 and var.aval.shape[-1:] == (2,)
