"""parallel: a step that was written for `jax.pmap`, as it is: `dp.parallel(f)(state, batch) == pmap(f)`, unstacked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh

from .._core.devices import make_mesh, own_mesh
from .._core.gather import join
from .._core.inputs import STACKED, axes_of, classify, no_further
from .._core.layout import Static, Tree, Whole, is_key
from .._core.outputs import Reduce
from .._core.parallel_apply import CallOf, on_replicas
from .._core.programs import Compiled, dispatch, kept, may_deadlock
from .._core.replicate import broadcast
from .._core.scatter import Cutting, split
from .._core.scattered import Signature, children
from .._jax.jaxprs import SAME, VARYING, Value, varying
from .._model import nnx as _nnx
from .._model.config import Config, Wrapper
from .parallel_results import each, kept_nodes, mark_nodes, mark_results, refuse_one_replicas_rows, states_of

VERB = "parallel"


def parallel(
    dp: Wrapper,
    step_fn: Callable[..., Any],
    *,
    axis_name: str | None = None,
    in_axes: Any = None,
    out_axes: Any = None,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """A step that was written for `jax.pmap`, as it is: `dp.parallel(f)(state, batch)`, with nothing stacked.

    The first argument and the first result are replicated (a train state, with plain shapes); the other
    arguments are cut along `dim`, the other results gathered, scalars to a vector with one entry per
    replica. One key per replica (`jax.random.split(key, n)`) is given out as pmap does (of several processes each
    passes one for each device of its own: fold in `jax.process_index()` first); a single key is folded with the
    replica's index. NNX objects among the arguments (a model, an `nnx.Optimizer`) are replicated and updated in
    place. What is `jdp.Scattered` already (`dp.prefetch`, `jdp.scatter(..., chunk_sizes=)`) stays as it is cut.

    The step's own `lax.pmean(..., axis_name)` makes replicas agree. State in which they still differ was made of
    each replica's own rows. If the loss, a metric or other state depends on it, it is trained, and the step is
    refused; so is one that adds to it (a count), and one in whose state nothing was reduced. What is left are
    statistics, as a BatchNorm's: the primary's are kept, as torch does, or with `reduce_state="mean"` the mean.
    "mean" takes a step that reduces nothing, too, where no other state depends on what differs: the mean of what
    SGD makes of each replica's gradient is what it makes of their mean, but that of Adam is not. (Keys may
    differ: the primary's is kept.)

    A program for pmap that holds arrays of shape (n, b, ...), one entry for each device, passes them without
    that axis, `x.reshape(-1, *x.shape[2:])`; or as they are, with "stacked" for their axis: a decoding cache
    with an index, the state of each device's environment, one padded graph for each device
    (`jax.tree.map(lambda *x: np.stack(x), *trees)`).

    Args:
        step_fn: `step_fn(state, *batch)`, with collectives of its own over `axis_name`.
        axis_name: the name it uses for the axis; None is the wrapper's.
        in_axes: an entry for each positional argument: an axis along which it is cut into chunks of rows, None for
            what is whole (state; a string or another object is part of the program), or "stacked" for pmap's own
            layout, one entry for each replica along the first axis, which the step does not see. An entry may be a
            tree of these, as in `jax.pmap`.
        out_axes: likewise for the results. None is one value: the primary's, where a result that is no state
            differs. "stacked" gives them as pmap does, and goes in again as such.
        static_broadcasted_argnums: positions of arguments that are part of the program, as in `jax.pmap`; the first
            of the others is the state.
        donate_argnums: positions of whole arguments whose arrays are freed, as in `jax.pmap`. Those that were not
            on every device yet are copied there, and stay. What is cut, and what NNX objects hold, is never freed.

    Raises:
        ValueError: chunks are uneven, and the step runs collectives; state is trained on one replica's rows;
            what is "stacked" has no entry for each replica.
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
    chosen = checked_options(in_axes, out_axes, static_broadcasted_argnums, donate_argnums)
    return written_for_pmap(dp._config, step_fn, axis_name, chosen)


class ParallelOptions(NamedTuple):
    """What `jax.pmap` is told of the arguments and the results."""

    in_axes: Any
    out_axes: Any
    static: tuple[int, ...]
    donated: tuple[int, ...]


def checked_options(
    in_axes: Any, out_axes: Any, static_broadcasted_argnums: Any, donate_argnums: Any
) -> ParallelOptions:
    return ParallelOptions(
        in_axes,
        out_axes,
        _positions("static_broadcasted_argnums", static_broadcasted_argnums),
        _positions("donate_argnums", donate_argnums),
    )


def _positions(name: str, given: Any) -> tuple[int, ...]:
    found = (given,) if isinstance(given, int) else tuple(given)
    if any(isinstance(p, bool) or not isinstance(p, int) or p < 0 for p in found):
        raise ValueError(
            f"jdp.{VERB}: {name} is {given!r}; it holds positions of arguments, from 0. Pass an int or a tuple of them."
        )
    return tuple(sorted({*found}))


def written_for_pmap(
    config: Config, step_fn: Callable[..., Any], axis_name: str | None, options: ParallelOptions
) -> Callable[..., Any]:
    """The function that `DataParallel.parallel` returns."""
    if not callable(step_fn):
        raise TypeError(f"jdp.{VERB}: step_fn is a {type(step_fn).__name__}; it is called. Pass a function.")
    axis_name = axis_name or config.axis_name
    mesh = config.mesh if axis_name == config.axis_name else make_mesh(config.devices, axis_name)
    label = getattr(step_fn, "__name__", type(step_fn).__name__)
    reduce_state, dim = config.reduce_state, config.dim

    def make(step_fn: Callable[..., Any]) -> Callable[..., Any]:
        run = on_replicas(_call_of(step_fn, options, reduce_state, dim), label)
        return Compiled(run, donates=bool(options.donated))

    program = kept(step_fn, (VERB, weakref.ref(config), axis_name, repr(options)), make)

    def step(*args: Any, **kwargs: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return step_fn(*args, **kwargs)
        config.refuse_other_mesh()
        (args, kwargs), nodes = _nnx.take_nodes((_hold_static(args, options.static), kwargs))
        axes = _axes_of_arguments(options, args, dim, bool(nodes))
        whole = tuple(p for p, axis in enumerate(axes) if axis is None)
        replicas = _replicas(args, whole, nodes, options.donated, mesh)
        cut = tuple(None if p in whole else x for p, x in enumerate(args))
        scattered = _cut(cut, kwargs, axes, mesh, dim, options)
        outputs = dispatch(program, mesh, replicas, *children(scattered))
        out, updates = join(outputs, "sharded")
        if nodes:
            nnx.update(nodes, updates)
        return out

    step.__name__ = label
    return step


@jax.tree_util.register_static
class _Static(tuple):
    """Values that are part of the program."""


class Replicas(NamedTuple):
    """What is whole on every replica: arguments by their positions, and NNX objects."""

    donated: tuple[Tree, ...]  # the arguments that the program may free
    held: tuple[Tree, ...]
    positions: _Static  # of the donated ones, then of the others
    graph: Any
    rest: Any


def _hold_static(args: tuple[Any, ...], static: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments, with those that are static as parts of the program."""
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
                f"jdp.{VERB}: args[{p}] is a {type(args[p]).__name__}, which has no hash, and in "
                f"static_broadcasted_argnums; what is static is part of the program. Pass what is hashable (a tuple "
                f"for a list), or leave {p} out there."
            ) from None
    return tuple(_Static((Static(x),)) if p in static else x for p, x in enumerate(args))


def _is_static(x: Any) -> bool:
    return isinstance(x, _Static)


def _axes_of_arguments(options: ParallelOptions, args: Sequence[Any], dim: int, has_nodes: bool) -> tuple[Any, ...]:
    """For each argument its axis, a tree of axes, or None for what is whole."""
    if not args:
        raise TypeError(
            f"jdp.{VERB}: no arguments; the first is whole on every replica. Pass the state, then the batch."
        )
    if options.in_axes is None:  # with NNX objects, which are whole, there is no state to be the first argument
        first = next((p for p in range(len(args)) if p not in options.static), 0)
        given = [None if p == first and not has_nodes else dim for p in range(len(args))]
    else:
        given = each(options.in_axes, len(args), "in_axes", "arguments")
    return tuple(None if p in options.static else axis for p, axis in enumerate(given))


def _replicas(
    args: Sequence[Any], whole: tuple[int, ...], nodes: Sequence[Any], donate: tuple[int, ...], mesh: Mesh
) -> Replicas:
    """What is whole, in its place on every device."""
    donated, held = tuple(p for p in whole if p in donate), tuple(p for p in whole if p not in donate)
    names = {p: f"args[{p}]" for p in whole}
    given = {p: _without_objects(args[p], names[p]) for p in whole}
    placed = {p: broadcast(tree, mesh, VERB, names[p]) for p, tree in given.items()}
    for p in donated:
        # What was moved may share its memory with what the caller has; what is in its place he has given away.
        placed[p] = jax.tree.map(lambda x, old: x if x is old else jnp.copy(x), placed[p], given[p])
        _refuse_deleted(placed[p], names[p], mesh)
    graph, rest = nnx.split(nodes) if nodes else (None, None)
    return Replicas(
        tuple(placed[p] for p in donated),
        tuple(placed[p] for p in held),
        _Static((*donated, *held)),
        graph,
        broadcast(rest, mesh, VERB, "NNX objects"),
    )


def _without_objects(tree: Tree, name: str) -> Tree:
    """The tree, with strings, functions and other objects as parts of the program."""

    def hold(path: Any, x: Any) -> Any:
        if hasattr(x, "dtype") or isinstance(x, bool | int | float | complex):
            return x
        is_array, x = classify(x, VERB, lambda: name + jax.tree_util.keystr(path))
        return x if is_array else _Static((Static(x),))

    if all(hasattr(x, "dtype") for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree_util.tree_map_with_path(hold, tree, is_leaf=no_further)


def _refuse_deleted(tree: Tree, name: str, mesh: Mesh) -> None:
    """A `RuntimeError` for what was donated already."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, Tracer) or not isinstance(x, jax.Array):  # in jit; in explain, which moves nothing
            continue
        if x.is_deleted():
            raise RuntimeError(
                f"jdp.{VERB}: {name}{jax.tree_util.keystr(path)} is of shape {x.shape} and was donated to an earlier "
                f"call; what is in donate_argnums cannot be used again. Pass what that call returned."
            )
        if may_deadlock(mesh):  # the queue of what is in flight may hold it, and would no longer know when it is there
            x.block_until_ready()


def _cut(args: Sequence[Any], kwargs: Tree, axes: Sequence[Any], mesh: Mesh, dim: int, options: ParallelOptions) -> Any:
    """The arguments that are cut, scattered; the others are None among them, so that each has its own position."""
    n = own_mesh(mesh).size
    for p, axis in enumerate(axes):
        if axis is not None and type(axis) is not int:
            _check_stacked(args[p], axis, n, f"args[{p}]")
    cut = [x for x, axis in zip(args, axes, strict=True) if type(axis) is int]
    stacked, where = _per_replica((cut, kwargs), n, dim), (axes, dim)
    try:
        how = Cutting(mesh, dim, VERB, ("args", "kwargs"), axes=where, place=False, stacked=stacked)
        return split((tuple(args), kwargs), how)
    except ValueError:
        if options.in_axes is None:
            _refuse_states(args, axes, dim, stacked)
        raise


def _refuse_states(args: Sequence[Any], axes: Sequence[Any], dim: int, stacked: Callable[[Any], bool]) -> None:
    """A `ValueError` with the in_axes that were meant, where arguments do not have the rows of the last, the batch."""

    def rows(x: Tree) -> set[int]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(x) if getattr(leaf, "ndim", 0) and not stacked(leaf)]
        return {shape[dim] if -len(shape) <= dim < len(shape) else -1 for shape in shapes}

    batch = next((rows(x) for x in reversed(args) if rows(x)), set())
    odd = [p for p, x in enumerate(args) if axes[p] is not None and rows(x) - batch]
    if odd and len(batch) == 1:
        meant = tuple(None if p in odd else axis for p, axis in enumerate(axes))
        raise ValueError(
            f"jdp.{VERB}: args[{odd[0]}] has arrays of {sorted(rows(args[odd[0]]))} rows and the batch has "
            f"{batch.pop()}; the first argument alone is whole by itself, all others are cut alike. Pass to "
            f"dp.parallel in_axes={meant} for a state, and None in out_axes where one is returned (for one entry for "
            f'each replica, as jax.pmap stacks them, "stacked" in the place of None); pass equal rows of what is data.'
        )


def _check_stacked(arg: Tree, axes: Tree, n: int, name: str) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(arg, is_leaf=no_further)
    for (path, x), axis in zip(leaves, axes_of(axes, arg, VERB), strict=True):
        if axis is STACKED and hasattr(x, "shape") and x.shape[:1] != (n,):
            raise ValueError(
                f"jdp.{VERB}: {name}{jax.tree_util.keystr(path)} has shape {x.shape} and is 'stacked' by in_axes; that "
                f"is one entry for each of {n} replicas, along the first axis. Pass an int for what is cut into "
                f"chunks, None for what is whole."
            )


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


def _call_of(step_fn: Callable[..., Any], options: ParallelOptions, reduce_state: Reduce, dim: int) -> CallOf:
    def call_of(signature: Signature, replica: int) -> Callable[..., Tree]:
        def call(*operands: Any) -> Tree:
            values = signature.of_replica(operands, replica)
            # Traced by hand, to see which of the results differ between replicas, and what they depend on.
            jaxpr, shapes = jax.make_jaxpr(_run_of(step_fn, signature), return_shape=True)(*values)
            arrays = [
                x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)  # a number that the step returns
                for x, aval in zip(jax.extend.core.jaxpr_as_fun(jaxpr)(*values), jaxpr.out_avals, strict=True)
            ]
            found = varying(jaxpr, _known(values, signature), signature.axis_name)
            treedef = jax.tree.structure(shapes)
            out, after = jax.tree.unflatten(treedef, arrays)
            numbers, after_numbers = jax.tree.unflatten(treedef, range(len(arrays)))
            replicas, args, _ = signature.fill(range(len(values)))
            whole, _, rest = _whole(replicas)
            default = (None if rest is None else dim, dim)
            states = states_of(whole, values)
            marked, kept = mark_results(out, numbers, found, states, options.out_axes, default, reduce_state)
            updates: Tree = ()
            if rest is not None:
                names = {i: f"args[{p}]" for p, x in enumerate(args) for i in _nnx.stand_ins(whole.get(p, x))}
                kept += kept_nodes(rest, after_numbers, names)
                before = _whole(signature.fill(values)[0])[2]
                updates = mark_nodes(after, after_numbers, found, before, reduce_state)
            if (n := len(signature.layout.used)) > 1:
                refuse_one_replicas_rows(jaxpr, found, kept, signature.axis_name, n, reduce_state)
            return marked, updates

        return call

    return call_of


def _run_of(step_fn: Callable[..., Any], signature: Signature) -> Callable[..., tuple[Any, Tree]]:
    """The step as a function of the operands: its results, and the state of the NNX objects after it."""

    def run(*values: Any) -> tuple[Any, Tree]:
        replicas, args, kwargs = signature.fill(values)
        whole, graph, rest = _whole(replicas)
        args = [_with_objects(whole[p]) if p in whole else x for p, x in enumerate(args)]
        if graph is None:
            return step_fn(*args, **kwargs), None
        nodes = nnx.merge(graph, _nnx.fold_state(_nnx.copies(rest), signature.axis_name))
        args, kwargs = _nnx.put_nodes((args, kwargs), nodes)
        return step_fn(*args, **kwargs), nnx.state(nodes)

    return run


def _whole(replicas: Any) -> tuple[dict[int, Tree], Any, Any]:
    """The whole arguments by their positions, and the graph and state of the NNX objects."""
    held = Replicas(*replicas)
    return dict(zip(held.positions, (*held.donated, *held.held), strict=True)), held.graph, held.rest


def _with_objects(tree: Tree) -> Tree:
    """The inverse of `_without_objects`."""
    return jax.tree.map(lambda x: x[0].value if _is_static(x) else x, tree, is_leaf=_is_static)


def _known(values: Sequence[Any], signature: Signature) -> list[Value]:
    """What is known of the operands: what is whole is the same on all replicas, but for keys, which are folded."""
    return [
        Value(False, None, 1 << i)
        if i < signature.weights
        else SAME
        if isinstance(leaf, Whole) and not is_key(x)
        else VARYING
        for i, (x, leaf) in enumerate(zip(values, signature.leaves, strict=True))
    ]
