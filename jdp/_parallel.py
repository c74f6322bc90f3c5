"""parallel: a step that was written for `jax.pmap`, as it is: `dp.parallel(f)(state, batch) == pmap(f)`, unstacked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx

from . import _nnx
from ._check import is_key
from ._compiled import Compiled
from ._config import Config
from ._devices import make_mesh
from ._dispatch import dispatch
from ._kept import kept
from ._layout import Tree, Whole
from ._operands import Signature
from ._outputs import Marked, Reduce
from ._parallel_apply import CallOf, on_replicas
from ._processes import own_mesh
from ._replicate import broadcast
from ._scatter_gather import join
from ._scattered import parts
from ._split import split
from ._varying import SAME, VARYING, varying

VERB = "parallel"


class Axes(NamedTuple):
    """Which arguments are whole, and which results: as in `jax.vmap`, None for those."""

    inputs: Any
    outputs: Any


def parallel(config: Config, step_fn: Callable[..., Any], axis_name: str | None, axes: Axes) -> Callable[..., Any]:
    """The function that `DataParallel.parallel` returns."""
    if not callable(step_fn):
        raise TypeError(f"jdp.{VERB}: step_fn is a {type(step_fn).__name__}; it is called. Pass a function.")
    axis_name = axis_name or config.axis_name
    mesh = config.mesh if axis_name == config.axis_name else make_mesh(config.devices, axis_name)
    label = getattr(step_fn, "__name__", type(step_fn).__name__)
    reduce_state, dim = config.reduce_state, config.dim

    def make(step_fn: Callable[..., Any]) -> Callable[..., Any]:
        return Compiled(on_replicas(_call_of(step_fn, axes, reduce_state, dim), label))

    program = kept(step_fn, (VERB, weakref.ref(config), axis_name, repr(axes)), make)

    def step(*args: Any, **kwargs: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return step_fn(*args, **kwargs)
        config.refuse_other_mesh()
        (args, kwargs), nodes = _nnx.take_nodes((args, kwargs))
        whole, cut_axes = _divide(axes.inputs, len(args), dim, bool(nodes))
        state = tuple(args[p] for p in whole)
        inputs = tuple(x for p, x in enumerate(args) if p not in whole)
        graph, rest = nnx.split(nodes) if nodes else (None, None)
        both, stacked = (inputs, kwargs), _per_replica((inputs, kwargs), own_mesh(mesh).size, dim)
        roots, where = ("args", "kwargs"), (cut_axes, dim)
        scattered = split(both, mesh, dim, verb=VERB, root=roots, axes=where, place=False, stacked=stacked)
        replicas = broadcast((_Static(whole), state, graph, rest), mesh, VERB)
        outputs = dispatch(program, mesh, replicas, *parts(scattered))
        out, updates = join(outputs, "sharded")
        if nodes:
            nnx.update(nodes, updates)
        return out

    step.__name__ = label
    return step


@jax.tree_util.register_static
class _Static(tuple):
    """A tuple of ints that is part of the program."""


def _divide(in_axes: Any, count: int, dim: int, has_nodes: bool) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The positions of the arguments that are whole, and an axis for each of the others."""
    if not count:
        raise TypeError(
            f"jdp.{VERB}: no arguments; the first is whole on every replica. Pass the state, then the batch."
        )
    if in_axes is None:  # with NNX objects, which are whole, there is no state to be the first argument
        given = [dim if has_nodes else None] + [dim] * (count - 1)
    else:
        given = list(in_axes) if isinstance(in_axes, tuple | list) else [in_axes] * count
    if len(given) != count:
        raise ValueError(
            f"jdp.{VERB}: in_axes has {len(given)} entries for {count} arguments; as in jax.vmap each has one. Pass "
            f"in_axes of that length, None for what is whole."
        )
    whole = tuple(p for p, axis in enumerate(given) if axis is None)
    return whole, tuple(axis for axis in given if axis is not None)


def _per_replica(arguments: Tree, n: int, dim: int) -> Callable[[Any], bool]:
    """Whether an array is one PRNG key for each replica, as `jax.random.split(key, n)` makes them for pmap."""
    leaves = [x for x in jax.tree.leaves(arguments) if getattr(x, "ndim", 0)]

    def legacy(x: Any) -> bool:
        return not is_key(x) and x.shape == (n, 2) and x.dtype == jnp.uint32

    rows = {
        x.shape[dim] for x in leaves if -x.ndim <= dim < x.ndim and not (is_key(x) and x.shape == (n,) or legacy(x))
    }
    # Of the old style they look like n rows of data; where the batch has another number of rows, they are none.
    return lambda x: bool(x.ndim) and (is_key(x) and x.shape == (n,) or legacy(x) and bool(rows) and n not in rows)


def _call_of(step_fn: Callable[..., Any], axes: Axes, reduce_state: Reduce, dim: int) -> CallOf:
    def call_of(signature: Signature, replica: int) -> Callable[..., Tree]:
        def call(*operands: Any) -> Tree:
            values = signature.own(operands, replica)

            def run(*values: Any) -> tuple[Any, Tree]:
                (whole, state, graph, rest), args, kwargs = signature.fill(values)
                given, cut = dict(zip(whole, state, strict=True)), iter(args)
                call: Tree = ([given[p] if p in given else next(cut) for p in range(len(args) + len(whole))], kwargs)
                if graph is None:
                    return step_fn(*call[0], **kwargs), None
                nodes = nnx.merge(graph, _nnx.fold_state(_nnx.copies(rest), signature.axis_name))
                args, kwargs = _nnx.put_nodes(call, nodes)
                return step_fn(*args, **kwargs), nnx.state(nodes)

            # Traced by hand, to see which of the results differ between replicas.
            jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*values)
            arrays = jax.extend.core.jaxpr_as_fun(jaxpr)(*values)
            inputs = [
                SAME if isinstance(leaf, Whole) and not (i >= signature.weights and is_key(x)) else VARYING
                for i, (x, leaf) in enumerate(zip(values, signature.leaves, strict=True))
            ]
            found = [v.varying for v in varying(jaxpr, inputs, signature.axis_name)]
            treedef = jax.tree.structure(shapes)
            out, after = jax.tree.unflatten(treedef, arrays)
            out_varies, after_varies = jax.tree.unflatten(treedef, found)
            (_, state, _, rest), _, _ = signature.fill(values)
            marks = _mark_results(out, out_varies, axes, state, rest is not None, reduce_state, dim)
            return marks, () if rest is None else _mark_nodes(after, after_varies, rest, reduce_state)

        return call

    return call_of


def _mark_results(
    out: Any, varies: Any, axes: Axes, state: tuple[Any, ...], has_nodes: bool, reduce: Reduce, dim: int
) -> Tree:
    """Each result with its rule: replicated (axis None), or cut along its axis."""
    several = type(out) in (tuple, list)
    results, differ = (list(out), list(varies)) if several else ([out], [varies])
    given: list[Any] = [dim if has_nodes else None] + [dim] * (len(results) - 1)
    if axes.outputs is not None:
        given = list(axes.outputs) if isinstance(axes.outputs, tuple | list) else [axes.outputs] * len(results)
    if len(given) != len(results):
        raise ValueError(
            f"jdp.{VERB}: out_axes has {len(given)} entries for {len(results)} results; each has one. Pass out_axes of "
            f"that length, None for what is replicated."
        )
    trees = [jax.tree.structure(x) for x in state]

    def whole(x: Any, differs: bool, is_state: bool) -> Marked:
        if not differs:
            return Marked(x, None, "same")
        # What differs is not dropped, unless it is state: there one value is kept, by the rule of reduce_state.
        return Marked(x, None, reduce) if is_state or axes.outputs is not None else Marked(x, dim)

    marked = []
    for result, differs, axis in zip(results, differ, given, strict=True):
        if axis is None:
            is_state = jax.tree.structure(result) in trees
            marked.append(jax.tree.map(lambda x, d, s=is_state: whole(x, d, s), result, differs))
        else:
            marked.append(jax.tree.map(lambda x, a=axis: Marked(x, a), result))
    return type(out)(marked) if several else marked[0]


def _mark_nodes(after: Tree, varies: Tree, before: Tree, reduce: Reduce) -> Tree:
    """The NNX state that has changed; what is the same on all replicas needs no reduction."""
    differs = dict(nnx.to_flat_state(varies))
    marks = _nnx.mark_updates(after, [(path, v, None) for path, v in nnx.to_flat_state(before)], reduce)

    def settle(path: Any, variable: Any) -> Any:
        flags = jax.tree.leaves(differs[path])
        marked, treedef = jax.tree.flatten(variable)
        return jax.tree.unflatten(
            treedef, [m if d else Marked(m.value, None, "same") for m, d in zip(marked, flags, strict=True)]
        )

    return nnx.from_flat_state([(path, settle(path, v)) for path, v in nnx.to_flat_state(marks)])
