"""parallel runs a step written for `jax.pmap` unchanged: `dp.parallel(f)(state, batch) == pmap(f)`, unstacked."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from .._core.gather import join
from .._core.global_arrays import sharing
from .._core.inputs import STACKED, axes_of, classify, is_array, is_legacy_key, no_further, paths_of, way_out
from .._core.layout import Static, Tree, Whole, as_int, is_key
from .._core.outputs import Reduce
from .._core.parallel_apply import CallOf, in_replica, on_replicas
from .._core.programs import ReplicaProgram, dispatch, made_once
from .._core.replica_mesh import ReplicaMesh, make_mesh, outside_of_mesh
from .._core.replicate import broadcast
from .._core.scatter import Cutting, split
from .._core.scattered import Signature, children
from .._jax.jaxprs import ReplicaValue, varying
from .._model.config import Config, Wrapper
from .._model.nnx import Held, enter, lost_attributes, own_nodes, put_nodes, stand_ins, take_nodes
from .parallel_results import (
    VERB,
    axes_of_each,
    kept_nodes,
    mark_nodes,
    mark_results,
    numbered,
    refuse_one_replicas_rows,
    states_of,
)


def parallel(
    dp: Wrapper[object],
    step_fn: Callable[..., Any],
    *,
    axis_name: str | None = None,
    in_axes: Any = None,
    out_axes: Any = None,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Wraps a step that was written for `jax.pmap`, unchanged: `dp.parallel(f)(state, batch)`, with nothing stacked.

    The first argument and the first result are replicated (a train state, with plain shapes). The other
    arguments are cut along `dim`, and the other results are gathered; scalars become a vector with one entry per
    replica. One key per replica (`jax.random.split(key, n)`) is distributed as by pmap (each of several processes
    passes one key for each of its own replicas: fold in `jax.process_index()` first); a single key is folded with
    the replica's index, unless `in_axes` has None for it: then all replicas get the same key, as in pmap. NNX objects
    among the arguments (a model, an `nnx.Optimizer`) are replicated and updated in place. Arguments that are
    `jdp.Scattered` already (`dp.prefetch`, `jdp.scatter(..., chunk_sizes=)`) keep their chunks.

    The step's own `lax.pmean(..., axis_name)` makes replicas agree. State that still differs between replicas was
    computed from each replica's own rows. If the loss, a metric or other state depends on it, it is trained, and the
    step is refused. A step that adds to such state (a count) is refused too, and so is one that reduces none of its
    state. The rest is statistics, such as a BatchNorm's: the primary's are kept, as in torch, or their mean with
    `reduce_state="mean"`. "mean" also accepts a step that reduces nothing, if no other state depends on what
    differs: with SGD, the mean of the updates from each replica's gradient equals the update from their mean; with
    Adam it does not. (Keys may differ: the primary's is kept.)

    If your program for pmap holds arrays of shape (n, b, ...), one entry for each device, pass them without
    that axis, `x.reshape(-1, *x.shape[2:])`. Or pass them unchanged, with "stacked" as their axis: a decoding cache
    with an index, the state of each device's environment, one padded graph for each device
    (`jax.tree.map(lambda *x: np.stack(x), *trees)`).

    Args:
        step_fn: `step_fn(state, *batch)`, with its own collectives over `axis_name`.
        axis_name: the name it uses for the axis; None is the wrapper's.
        in_axes: an entry for each positional argument: an axis along which it is cut into chunks of rows, None for
            an argument that is replicated (state; a string or another object is part of the program), or "stacked"
            for pmap's own layout, one entry for each replica along the first axis, which the step does not see. An
            entry may be a tree of these, as in `jax.pmap`.
        out_axes: the same for the results. None is one value: if a result that is not state differs, the primary's, or
            the mean with `reduce_state="mean"`. "stacked" returns results as pmap does, ready for a "stacked" argument.
        static_broadcasted_argnums: positions of arguments that are part of the program, as in `jax.pmap`; the first
            of the others is the state.
        donate_argnums: positions of replicated arguments whose arrays are freed, as in `jax.pmap`. Arrays that are not
            on every device yet are copied there, and the originals stay; what `jdp.replicate` has put there may share
            memory with its original. Arrays that are cut, and those that NNX objects hold, are never freed.

    Raises:
        ValueError: chunks are uneven, and the step runs collectives; state is trained on one replica's rows;
            a "stacked" argument does not have one entry for each replica.
        RuntimeError: an argument was donated already.

    Example:
        >>> import jax, jax.numpy as jnp, jdp, numpy as np
        >>> def step(w, x):
        ...     grad = jax.lax.pmean(jax.grad(lambda w: jnp.mean(w * x))(w), "batch")
        ...     return w - grad, jnp.sum(x)
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> w, sums = dp.parallel(step, axis_name="batch")(1.0, np.arange(3.0))
        >>> float(w), sums.tolist()
        (0.0, [3.0])
        >>> w, sums = dp.parallel(step, axis_name="batch", in_axes=(None, "stacked"))(1.0, np.arange(3.0)[None])
        >>> float(w), sums.tolist()
        (0.0, [3.0])

    Source: `pmap` in jax/_src/pmap.py.
    """
    if not callable(step_fn):
        raise TypeError(f"jdp.{VERB}: step_fn is a {type(step_fn).__name__}; it is called. Pass a function.")
    static = _checked_positions("static_broadcasted_argnums", static_broadcasted_argnums)
    donated = _checked_positions("donate_argnums", donate_argnums)
    in_axes, out_axes = copy.deepcopy((in_axes, out_axes))  # the caller may change a list later
    config: Config = dp._config
    mesh = _mesh_over(config, axis_name or config.axis_name)
    label = getattr(step_fn, "__name__", type(step_fn).__name__)
    reduce_state, dim = config.reduce_state, config.dim  # copied, because a program must not keep the config alive

    def make(step_fn: Callable[..., Any]) -> Callable[..., Any]:
        run = on_replicas(_call_of(step_fn, out_axes, reduce_state, dim), label, verb=VERB)
        return ReplicaProgram(run, donates=bool(donated))

    options = repr((in_axes, out_axes, static, donated))
    program = made_once(step_fn, (VERB, weakref.ref(config), mesh.axis_name, options), make)
    alone = threading.RLock() if donated else nullcontext()  # another thread may pass, and free, the same arrays

    @outside_of_mesh
    def step(*args: Any, **kwargs: Any) -> Any:
        if in_replica():
            return step_fn(*args, **kwargs)
        config.refuse_other_mesh()
        (args, kwargs), nodes = _without_nodes((_hold_static(args, static), kwargs))
        axes = _axes_of_arguments(in_axes, static, args, dim, bool(nodes))
        whole = {p: x for p, x in enumerate(args) if axes[p] is None}
        # Replicated arguments are None among those that are cut, so that each keeps its position.
        cut = tuple(None if p in whole else x for p, x in enumerate(args))
        how = Cutting(mesh, dim, VERB, ("args", "kwargs"), place=False, replicas=config.replicas)
        with alone:
            scattered = _scattered_arguments(cut, kwargs, axes, how, by_default=in_axes is None)
            replicas = _replicas(whole, nodes, donated, mesh, scattered._arrays)
            out, updates = join(dispatch(program, mesh, replicas, *children(scattered)), "sharded")
        if nodes:
            nnx.update(nodes, updates)
        return out

    step.__name__ = label
    return step


def _mesh_over(config: Config, axis_name: str) -> ReplicaMesh:
    """Returns the mesh of the replicas, along an axis of this name."""
    if axis_name == config.axis_name:
        return config.mesh
    if config.mesh.inner_axes:
        raise ValueError(
            f"jdp.{VERB}: axis_name is {axis_name!r}, and {config.axis_name!r} counts the replicas of the mesh; the "
            f"collectives of a step name the axis of the mesh. Name it {config.axis_name!r} in the step as well, or "
            f"make the mesh with an axis of that name."
        )
    return make_mesh(config.devices, axis_name)


def _checked_positions(name: str, given: Any) -> tuple[int, ...]:
    one = as_int(given)
    found = [as_int(p) for p in given] if one is None and isinstance(given, Iterable) else [one]
    numbers = {p for p in found if p is not None and p >= 0}
    if not {*found} <= numbers:
        raise ValueError(
            f"jdp.{VERB}: {name} is {given!r}; it holds positions of arguments, from 0. Pass an int or a tuple of them."
        )
    return tuple(sorted(numbers))


Replicas = tuple[dict[int, Tree], Held]


def _hold_static(args: tuple[Any, ...], static: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the arguments, with the static ones as parts of the program."""
    if static and static[-1] >= len(args):
        raise ValueError(
            f"jdp.{VERB}: static_broadcasted_argnums is {static} for {len(args)} arguments; as in jax.pmap each of "
            f"them is passed, by position. Pass argument {static[-1]}."
        )
    for p in static:
        try:
            hash(args[p])
        except TypeError:
            raise ValueError(
                f"jdp.{VERB}: args[{p}] is a {type(args[p]).__name__}, which is not hashable, and {p} is in "
                f"static_broadcasted_argnums; static arguments are part of the program. Pass a hashable object (a "
                f"tuple for a list), or leave {p} out of static_broadcasted_argnums."
            ) from None
    return tuple(Static(x) if p in static else x for p, x in enumerate(args))


def _without_nodes(call: tuple[Any, ...]) -> tuple[Tree, list[Any]]:
    """Returns a call without its NNX objects, and these; the variables of an `nnx.State` count only next to others."""
    found = take_nodes(call, states=False)
    return take_nodes(call) if found[1] else found


def _axes_of_arguments(
    in_axes: Any, static: tuple[int, ...], args: Sequence[Any], dim: int, has_nodes: bool
) -> tuple[Any, ...]:
    """Returns for each argument its axis, a tree of axes, or None if it is replicated or static."""
    if not args:
        raise TypeError(f"jdp.{VERB}: no arguments; the first is replicated. Pass the state, then the batch.")
    if in_axes is None:  # NNX objects are replicated anyway: with them, the first argument is not the state
        first = next((p for p in range(len(args)) if p not in static), 0)
        given = [None if p == first and not has_nodes else dim for p in range(len(args))]
    else:
        given = axes_of_each(in_axes, len(args), "in_axes", "arguments")
    return tuple(None if p in static else axis for p, axis in enumerate(given))


def _replicas(
    whole: dict[int, Tree], nodes: Sequence[Any], donate: tuple[int, ...], mesh: ReplicaMesh, cut: Sequence[Any]
) -> Replicas:
    """Replicates the arguments that are not cut: returns those that are donated, and the rest with the NNX objects.

    `cut` are the arrays of the other arguments.
    """
    whole = _without_objects(whole)
    _refuse_deleted({p: x for p, x in whole.items() if p in donate}, mesh)
    placed = broadcast(whole, mesh, VERB, "args", comes_back=True)
    given, donated = ({p: x for p, x in tree.items() if p in donate} for tree in (whole, placed))
    # An array that was moved may share memory with the caller's, which stays. One that was in place is given away.
    donated = jax.tree.map(lambda x, old: x if x is old else jnp.copy(x), donated, given)
    held = {p: x for p, x in placed.items() if p not in donate}
    graph, state = nnx.split(nodes) if nodes else (None, None)
    return _donated_once(donated, Held(held, graph, broadcast(state, mesh, VERB, "NNX objects", comes_back=True)), cut)


def _donated_once(donated: dict[int, Tree], held: Held, arrays: Sequence[Any]) -> Replicas:
    """Copies donated arrays that are passed twice, because memory that is freed must not be another argument's, too."""
    seen = sharing(jax.tree.leaves(donated), [*arrays, *jax.tree.leaves((held.others, held.variables))])

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, donated), held


def _without_objects(whole: dict[int, Tree]) -> dict[int, Tree]:
    """Returns the arguments, with strings, functions and other objects as parts of the program."""
    leaves, treedef = jax.tree.flatten(whole)
    for i, x in enumerate(leaves):
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            classify(x, VERB, lambda i=i: paths_of(whole, "args", stop=None)[i])
            leaves[i] = Static(x)
    return treedef.unflatten(leaves)


def _with_objects(whole: dict[int, Tree]) -> dict[int, Tree]:
    """Restores the objects that `_without_objects` has wrapped."""

    def is_object(x: Any) -> bool:
        return isinstance(x, Static)

    return jax.tree.map(lambda x: x.value if is_object(x) else x, whole, is_leaf=is_object)


def _refuse_deleted(donated: dict[int, Tree], mesh: ReplicaMesh) -> None:
    """Raises a `RuntimeError` if an array was donated already."""
    for i, x in enumerate(jax.tree.leaves(donated)):
        if isinstance(x, Tracer) or not isinstance(x, jax.Array):  # inside of jit; or in explain, which moves nothing
            continue
        if x.is_deleted():
            raise RuntimeError(
                f"jdp.{VERB}: {paths_of(donated, 'args', stop=None)[i]} is of shape {x.shape} and was donated to an "
                f"earlier call; what is in donate_argnums cannot be used again. Pass what that call returned."
            )
        if mesh.may_deadlock:  # the queue of calls in flight may hold it, and cannot wait for an array that is freed
            x.block_until_ready()


def _scattered_arguments(
    args: tuple[Any, ...], kwargs: Tree, axes: Sequence[Any], how: Cutting, *, by_default: bool
) -> Any:
    """Scatters the arguments that are cut; `by_default` is True if the user has passed no in_axes."""
    n, dim = how.mesh.own.size * how.per_device, how.dim
    if any(axis is not None and type(axis) is not int for axis in axes):
        _check_stacked(args, axes, n)
    cut = [x for x, axis in zip(args, axes, strict=True) if type(axis) is int]
    stacked, where = _per_replica((cut, kwargs), n, dim), (axes, dim)
    try:
        return split((args, kwargs), how._replace(axes=where, stacked=stacked))
    except ValueError:
        if by_default:
            _refuse_states(args, axes, dim, stacked)
        raise


def _refuse_states(args: Sequence[Any], axes: Sequence[Any], dim: int, stacked: Callable[[Any], bool]) -> None:
    """Raises a `ValueError` with the intended in_axes if arguments have other rows than the last one, the batch."""

    def rows(x: Tree) -> set[int]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(x) if getattr(leaf, "ndim", 0) and not stacked(leaf)]
        return {shape[dim] if -len(shape) <= dim < len(shape) else -1 for shape in shapes}

    batch = next((rows(x) for x in reversed(args) if rows(x)), set())
    odd = [p for p, x in enumerate(args) if axes[p] is not None and rows(x) - batch]
    if odd and len(batch) == 1:
        meant = tuple(None if p in odd else axis for p, axis in enumerate(axes))
        raise ValueError(
            f"jdp.{VERB}: args[{odd[0]}] has arrays of {sorted(rows(args[odd[0]]))} rows and the batch has "
            f"{batch.pop()}; by default the first argument is replicated, and all others are cut in the same way. For "
            f"a state, pass in_axes={meant} to dp.parallel, and None in out_axes where the state is returned (or "
            f'"stacked" in place of None for one entry per replica, as in jax.pmap). For data, pass equal rows.'
        )


def _check_stacked(args: tuple[Any, ...], axes: Sequence[Any], n: int) -> None:
    leaves = jax.tree.leaves(args, is_leaf=no_further)
    for i, (x, axis) in enumerate(zip(leaves, axes_of(axes, args, VERB), strict=True)):
        if axis is STACKED and hasattr(x, "shape") and x.shape[:1] != (n,):
            raise ValueError(
                f"jdp.{VERB}: {paths_of(args, 'args')[i]} has shape {x.shape} and is 'stacked' by in_axes; that is one "
                f"entry for each of {n} replicas, along the first axis. Pass an int if it is cut into chunks of rows, "
                f"None if it is replicated."
            )


def _per_replica(arguments: Tree, n: int, dim: int) -> Callable[[Any], bool]:
    """Returns a predicate: an array is one PRNG key per replica, as `jax.random.split(key, n)` makes for pmap."""
    leaves = [x for x in jax.tree.leaves(arguments) if getattr(x, "ndim", 0)]

    def are_keys(x: Any) -> bool:
        return is_key(x) and x.shape == (n,)

    rows = {x.shape[dim] for x in leaves if -x.ndim <= dim < x.ndim and not (are_keys(x) or is_legacy_key(x, n))}
    # Legacy keys look like n rows of data. They count as keys if the batch has other numbers of rows.
    return lambda x: bool(x.ndim) and (are_keys(x) or is_legacy_key(x, n) and bool(rows) and n not in rows)


def _call_of(step_fn: Callable[..., Any], out_axes: Any, reduce_state: Reduce, dim: int) -> CallOf:
    def call_of(signature: Signature, replica: int) -> Callable[..., Tree]:
        def call(*operands: Any) -> Tree:
            values = signature.values_of_replica(operands, replica)
            # Traced here, to find which results differ between replicas, and what they depend on.
            jaxpr, shapes = jax.make_jaxpr(_run_of(step_fn, signature), return_shape=True)(*values)
            arrays = [
                x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)  # a number that the step returns
                for x, aval in zip(jax.extend.core.jaxpr_as_fun(jaxpr)(*values), jaxpr.out_avals, strict=True)
            ]
            # Replicated operands are the same on all replicas, except keys among the inputs, which are folded.
            known = [
                ReplicaValue(varying=False, sources=1 << i)
                if i < signature.first_input
                else ReplicaValue(not isinstance(leaf, Whole) or is_key(x))
                for i, (x, leaf) in enumerate(zip(values, signature.leaves, strict=True))
            ]
            results = numbered(arrays, varying(jaxpr, known, signature.axis_name))
            out, after = jax.tree.unflatten(jax.tree.structure(shapes), results)
            replicas, args, _ = signature.fill(numbered(values, known))
            donated, held = replicas
            whole: dict[int, Tree] = {**donated, **held.others}
            first = None if held.graph is None else dim  # with NNX objects the first result is no state
            marked, kept = mark_results(out, states_of(whole), out_axes, (first, dim), reduce_state)
            updates: Tree = ()
            if held.graph is not None:
                names = {i: f"args[{p}]" for p, x in enumerate(args) for i in stand_ins(whole.get(p, x))}
                kept += kept_nodes(held.variables, after, names)
                updates = mark_nodes(held.variables, after, reduce_state)
            if (n := len(signature.layout.used)) > 1:
                refuse_one_replicas_rows(jaxpr, results, kept, signature.axis_name, n, reduce_state)
            return marked, updates

        return call

    return call_of


def _run_of(step_fn: Callable[..., Any], signature: Signature) -> Callable[..., tuple[Any, Tree]]:
    """Returns the step as a function of the operands; it gives the results, and the NNX state after the step."""

    def run(*values: Any) -> tuple[Any, Tree]:
        replicas, args, kwargs = signature.fill(values)
        donated, held = replicas
        whole = _with_objects({**donated, **held.others})
        args = [whole.get(p, x) for p, x in enumerate(args)]
        if held.graph is None:
            return _only_arrays(step_fn(*args, **kwargs)), None
        nodes = own_nodes(held.graph, [enter(held, signature.axis_name).variables])
        args, kwargs = put_nodes((args, kwargs), nodes)
        with lost_attributes(nodes):
            out = step_fn(*args, **kwargs)
        return _only_arrays(out), nnx.state(nodes)

    return run


def _only_arrays(out: Any) -> Any:
    """Returns what a step returned; raises a `TypeError` for an object that no device can hold."""
    for path, x in jax.tree_util.tree_leaves_with_path(out):
        if not is_array(x) and not isinstance(x, bool | int | float | complex):
            raise TypeError(
                f"jdp.{VERB}: output{jax.tree_util.keystr(path)} is a {type(x).__name__}; the results of a step are "
                f"arrays and numbers, because they come from all replicas. Return {way_out(x)}, or leave it out."
            )
    return out
