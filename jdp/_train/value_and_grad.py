"""value_and_grad: `dp.value_and_grad(f)(params, *batch) == jax.value_and_grad(f)(params, *batch)`."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .._core.calls import Calls
from .._core.gather import join
from .._core.inputs import entries
from .._core.layout import Tree, as_int
from .._core.parallel_apply import in_replica
from .._core.programs import ReplicaProgram, dispatch, made_once
from .._core.replica_mesh import outside_of_mesh
from .._core.replicate import broadcast, lives_replicated, placed_like
from .._core.scatter import Cutting, split
from .._core.scattered import Scattered, children, is_scattered
from .._core.unread import unread
from .._model.config import Config, Wrapper
from .._model.nnx import Held, stand_ins, take_nodes
from .criterion import gradients_on_replicas
from .forms import loss_value
from .gradients import Gradients
from .loss import (
    Replicated,
    Roles,
    assign_roles,
    call_criterion,
    checked_criterion,
    checked_scalar,
    gradient_trees,
    loss_of,
)
from .state import no_rows
from .terms import finished, is_term

VERB = "value_and_grad"
Argnums: TypeAlias = int | nnx.DiffState | Sequence[int | nnx.DiffState]
"""Positions of arguments, as in `jax.grad`; those of NNX objects may have a filter."""


def value_and_grad(
    dp: Wrapper[object],
    loss_fn: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    criterion: Callable[..., Any] | None = None,
    *,
    in_axes: Tree = None,
    accumulate_steps: int = 1,
    reduce_dtype: DTypeLike | None = None,
    sync_batch_norm: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns the function that gives the loss and its gradient: `jax.value_and_grad(loss_fn)` on the whole batch.

    `loss, grads = dp.value_and_grad(loss_fn)(params, *batch)`: the first argument is replicated, the others are cut
    along `dim`. Each replica runs `loss_fn` on its chunk; the results are one mean over all rows, exact for every batch
    size, and each gradient is summed over the replicas once. For NNX the arguments may be modules:
    `nnx.value_and_grad`, with their state updated in place.

    Args:
        loss_fn: returns `loss`, or with `has_aux` `(loss, aux)`. The loss is a scalar (the mean over the
            rows of its chunk), a vector with one entry per row, `jdp.Mean(total, count)`, `jdp.Sum(total)`, or a sum
            of such terms with factors. The leaves of `aux` follow the same rule, except that an array whose shape
            follows the rows (one entry per row, or as many for each, as in flattened logits) comes back gathered, in
            input order. A trace of `loss_fn` with a symbolic number of rows shows which it is, and whether a scalar is
            a mean. With a `criterion` it returns outputs: a tree of arrays that follow the rows, or are 0-d and do not
            depend on them.
        argnums: what is differentiated, as in `jax.value_and_grad`; NNX: `nnx.DiffState` too. The first argument is
            whole, and all others are cut: parameters among them need an `in_axes` of None. The gradient of an argument
            that is cut has its rows.
        has_aux: whether `loss_fn` returns a pair.
        criterion: `criterion(outputs, *batch)` returns the loss, a real 0-d array (with `has_aux` a pair). It is
            called once, with the outputs of all rows in the order of the batch and all positional arguments after the
            first: torch's `criterion(model(x), y)`. What else it returns comes back as it is.
            If it changes NNX objects of the batch, the changes are dropped.
        in_axes: as in `jax.vmap`, of the arguments after the first: an axis, or None (replicated)
            for each. Default: `dim` for all.
        accumulate_steps: cuts each chunk into that many microbatches, which run one after the other in
            the memory of one; fewer where a chunk has fewer rows.
        reduce_dtype: the dtype that gradients are sent in; `jnp.bfloat16` halves the bytes of float32.
        sync_batch_norm: BatchNorm sees the statistics of the whole batch, weighted by rows.

    Returns:
        A function like `jax.value_and_grad(loss_fn)`. Results come back where the first argument lives.

    Raises:
        TypeError: a loss of none of these forms; a scalar that is no mean over the rows; parameters without a
            gradient; a leaf of `aux` that may be a mean, a sum or an entry per row, without a marker that says which.
        ValueError: the batch has no rows.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> loss, grad = dp.value_and_grad(lambda w, x: jnp.mean((dp(w, x) - 1) ** 2))(2.0, np.ones(5))
        >>> float(loss), float(grad)
        (1.0, 2.0)

    Source: `value_and_grad` in jax/_src/api.py; the sum over replicas is `Broadcast.backward` in
    torch/nn/parallel/_functions.py.
    """
    if not callable(loss_fn):
        raise TypeError(f"jdp.{VERB}: loss_fn is a {type(loss_fn).__name__}; it is called. Pass a function.")
    known_criterion, made_for = checked_criterion(criterion, VERB), None
    if criterion is not None:
        # Known by identity, as loss_fn is: equal ones may compute different losses. It alone keeps the token alive.
        known_criterion, token = made_once(criterion, (VERB, "criterion"), lambda stand_in: (stand_in, lambda: None))
        made_for = weakref.ref(token)
    options = GradOptions(
        wanted=_argument_numbers(argnums),
        single=not isinstance(argnums, tuple | list),
        has_aux=bool(has_aux),
        accumulate_steps=check_steps(VERB, accumulate_steps),
        reduce_dtype=wire_type(VERB, reduce_dtype),
        sync_batch_norm=bool(sync_batch_norm),
        criterion=known_criterion,
        made_for=made_for,
    )
    config: Config = dp._config
    in_axes = copy.deepcopy(in_axes)  # the caller may change a list later
    calls = made_once(
        loss_fn, (VERB, "calls", weakref.ref(config), options.made_for, options, repr(in_axes)), lambda _: Calls()
    )

    @outside_of_mesh
    def call(*args: Any, **kwargs: Any) -> Any:
        known = _run_known(calls, config, args, kwargs)
        if known is not None:
            found, grads = known
        elif in_replica():
            return _in_replica(loss_fn, options, config.kind)(*args, **kwargs)
        else:
            found, grads = _run_new(calls, config, loss_fn, options, in_axes, args, kwargs)
        loss, aux = found.out
        return (loss, aux) if has_aux else loss, grads[0] if options.single else grads

    call.__dict__["criterion"] = criterion  # `made_once` refers to it weakly
    call.__name__ = f"{VERB}_of_{getattr(loss_fn, '__name__', type(loss_fn).__name__)}"
    return call


def _run_new(
    calls: Calls,
    config: Config,
    loss_fn: Callable[..., Any],
    options: GradOptions,
    in_axes: Tree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Gradients, tuple[Tree, ...]]:
    """Runs a call that is not a known one; returns all results, and the gradients by argument."""
    config.refuse_other_mesh()
    config.refuse_state_axes(VERB)
    (taken, keywords), nodes = take_nodes((args, kwargs))
    roles, ((plain, state), held), inputs = _scatter_by_roles(config, options, in_axes, taken, keywords, nodes)
    cut, keywords = children(inputs)
    home = _first_arrays(taken[0], state, held)
    plain, others = (broadcast(x, config.mesh, VERB, "args") if x else x for x in (plain, held.others))
    state, variables = (broadcast(x, config.mesh, VERB) if x else x for x in (state, held.variables))
    replicas = (plain, state), Held(others, held.graph, variables)
    program = _program_of(config, loss_fn, options, roles)
    run = lambda rows: dispatch(program, config.mesh, replicas, rows, keywords)  # noqa: E731
    outputs = unread(run, cut, calls.reads) if cut._layout.holds_statics else run(cut)
    if not nodes:
        calls.remember(lambda: program, None, (args[0], args[1:], kwargs), (replicas, cut, keywords), roles)
    found: Gradients = join(outputs, "sharded" if lives_replicated(home, config.mesh) else None)
    if config.mesh.inner_axes:
        found = found._replace(grads=placed_like(found.grads, (plain, state), config.mesh))
    if nodes:
        nnx.update(nodes, found.state)
    return found, gradient_trees(roles, found, taken)


def _first_arrays(first: Tree, state: Tree, held: Held) -> Tree:
    """Returns the first argument's arrays; results are placed where these are."""
    states = [x for x in (state, held.variables) if x is not None]
    return first, [x[i] for x in states for i in stand_ins(first) if i in x]


def _run_known(
    calls: Calls, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Gradients, tuple[Tree, ...]] | None:
    """Runs a call like one that ran before; returns None if there is none. Parameters and results are replicated."""
    try:
        known = calls.run_known(config.mesh, None, args[0], args[1:], kwargs) if args else None
    except TypeError:  # perhaps parameters of another dtype: the steps of a first call raise an error that says so
        return None
    if known is None:
        return None
    program, roles, out = known
    found: Gradients = out[-1] if program.layout(out).is_gathered else join(program.scattered(out), "sharded")
    if config.mesh.inner_axes:
        plain = {0: args[0]} if 0 in [position for position, _, _ in roles.wanted] else {}
        found = found._replace(grads=placed_like(found.grads, (plain, None), config.mesh))
    return found, gradient_trees(roles, found, args)


def grad(
    dp: Wrapper[object],
    loss_fn: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    criterion: Callable[..., Any] | None = None,
    *,
    in_axes: Tree = None,
    accumulate_steps: int = 1,
    reduce_dtype: DTypeLike | None = None,
    sync_batch_norm: bool = False,
) -> Callable[..., Any]:
    """Returns the function that gives the gradient alone: `grads = dp.grad(loss_fn)(params, *batch)`.

    It is `jax.grad` on the whole batch, as `value_and_grad` is `jax.value_and_grad`, with the same options.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> float(dp.grad(lambda w, x: jnp.mean(dp(w, x)))(2.0, np.arange(3.0)))
        1.0
    """
    both = value_and_grad(
        dp,
        loss_fn,
        argnums,
        has_aux,
        criterion,
        in_axes=in_axes,
        accumulate_steps=accumulate_steps,
        reduce_dtype=reduce_dtype,
        sync_batch_norm=sync_batch_norm,
    )

    @functools.wraps(both)
    def grad(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad


class GradOptions(NamedTuple):
    """The arguments of `value_and_grad`, checked."""

    wanted: tuple[tuple[int, Any], ...]  # positions, and filters of NNX variables
    single: bool  # whether there is one position, and not a tuple of them
    has_aux: bool
    accumulate_steps: int
    reduce_dtype: Any
    sync_batch_norm: bool
    criterion: Any
    made_for: weakref.ref[Any] | None  # a token that is freed with the criterion, and frees its programs


def _argument_numbers(argnums: Any) -> tuple[tuple[int, Any], ...]:
    given = [
        (a.argnum, a.filter) if isinstance(a, nnx.DiffState) else (a, nnx.Param)
        for a in (argnums if isinstance(argnums, tuple | list) else [argnums])
    ]
    if not given or None in [as_int(p) for p, _ in given]:
        raise TypeError(f"jdp.{VERB}: argnums is {argnums!r}; it is the position of an argument. Pass an int, or ints.")
    return tuple((operator.index(p), hashable(wrt)) for p, wrt in given)


def hashable(wrt: Any) -> Any:
    """Returns an NNX filter, with tuples for its lists."""
    return tuple(map(hashable, wrt)) if isinstance(wrt, tuple | list) else wrt


def _scatter_by_roles(
    config: Config,
    options: GradOptions,
    in_axes: Tree,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    nodes: list[Any],
) -> tuple[Roles, Replicated, Scattered]:
    """Assigns each argument its role; returns the roles, the replicated arguments, and the others, scattered."""
    if not args:
        raise TypeError(f"jdp.{VERB}: no arguments; the first is replicated. Pass the parameters.")
    count = len(args)
    axes = config.dim if in_axes is None else in_axes
    axes = [None, *entries(VERB, axes, count - 1, "in_axes", "arguments after the first")]
    for p, _ in options.wanted:
        if not -count <= p < count:
            raise ValueError(
                f"jdp.{VERB}: argnums has {p} for {count} arguments; it is the position of one. Pass 0 to {count - 1}."
            )
    wanted = [(p % count, wrt) for p, wrt in options.wanted]
    roles, replicas = assign_roles(args, nodes, wanted, options.has_aux, axes, VERB)
    (plain, state), _ = replicas
    rows, cut = roles.rows, roles.cut
    given = tuple(_numbers_as_arrays(args[p]) if p in rows else args[p] for p in cut)
    check_differentiable(VERB, {**plain, **{p: given[i] for p, i in rows.items()}}, "args")
    check_differentiable(VERB, state, "model")
    where = tuple(axes[p] for p in cut), config.dim
    roots = ("args", "kwargs")
    how = Cutting(config.mesh, config.dim, VERB, roots, axes=where, place=False, replicas=config.replicas)
    inputs = split((given, kwargs), how)
    if inputs._layout.is_cut and not any(inputs._layout.sizes):
        raise no_rows(VERB)
    if rows and options.accumulate_steps > 1:
        raise ValueError(
            f"jdp.{VERB}: argnums names an argument that is cut, and accumulate_steps is {options.accumulate_steps}; "
            f"each row has a gradient of its own, and microbatches have nothing to add. Pass accumulate_steps=1."
        )
    return roles, replicas, inputs


def _numbers_as_arrays(argument: Tree) -> Tree:
    """Returns a differentiated argument with its Python numbers as arrays; as numbers they would be constants."""
    array = lambda x: jnp.asarray(x) if type(x) in (float, complex) else x  # noqa: E731
    return jax.tree.map(array, argument, is_leaf=is_scattered)


def _program_of(config: Config, loss_fn: Callable[..., Any], options: GradOptions, roles: Roles) -> ReplicaProgram:
    """Returns the program for arguments with these roles. It must not keep the config alive."""

    def make(loss_fn: Callable[..., Any]) -> ReplicaProgram:
        sync, label = options.sync_batch_norm, getattr(loss_fn, "__name__", "loss")
        loss = loss_of(loss_fn, roles, VERB, config.axis_name, config.reduce_state, options.criterion, sync)
        steps, wire = options.accumulate_steps, options.reduce_dtype
        return ReplicaProgram(gradients_on_replicas(loss, steps, wire, None, label, verb=VERB))

    return made_once(loss_fn, (VERB, weakref.ref(config), options.made_for, options, roles), make)


def _in_replica(loss_fn: Callable[..., Any], options: GradOptions, kind: str) -> Callable[..., Any]:
    """Returns the gradient function for a call inside of a replica's program: JAX's own, of the rows that it gets."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        out = loss_fn(*args, **kwargs)
        if options.criterion is not None:
            out = call_criterion(VERB, options.criterion, out, *args[1:])
        loss, aux = out if options.has_aux else (out, None)
        number = checked_scalar(loss, VERB) if options.criterion is not None else loss_value(loss, None, VERB)
        value = finished(loss) if is_term(loss) else number
        return (value, finished(aux)) if options.has_aux else value

    transform = nnx.value_and_grad if kind == "nnx" else jax.value_and_grad
    argnums: Any = tuple(nnx.DiffState(p, wrt) if kind == "nnx" else p for p, wrt in options.wanted)
    return transform(plain, argnums=argnums[0] if options.single else argnums, has_aux=options.has_aux)


def check_steps(verb: str, steps: Any, name: str = "accumulate_steps", least: int = 1) -> int:
    found = as_int(steps)
    if found is None or found < least:
        what = "a chunk is cut into that many" if least else "it is a number of steps, 0 for never"
        raise ValueError(f"jdp.{verb}: {name} is {steps!r}; {what}. Pass an int from {least}.")
    return found


def wire_type(verb: str, dtype: Any) -> Any:
    """Returns the dtype that gradients are sent in; None is their own."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"jdp.{verb}: reduce_dtype is {dtype!r}; gradients are sent as floats. Pass jnp.bfloat16, or None for "
            f"their own dtype."
        )
    return found


def check_differentiable(verb: str, tree: Tree, root: str = "params") -> None:
    """Raises a `TypeError` if a leaf has no gradient."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        refuse_overwritten(verb, [getattr(key, "key", None) for key in path])
        number = hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)
        dtype = getattr(x, "dtype", None) or (jnp.result_type(x) if number else f"{type(x).__name__} (no array)")
        if not number or not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"jdp.{verb}: {root}{jax.tree_util.keystr(path)} is of dtype {dtype}, which has no gradient; "
                f"parameters are real or complex. Keep it out of what is differentiated (in the state, or as an "
                f"argument)."
            )


def refuse_overwritten(verb: str, names: Iterable[Any]) -> None:
    """Raises a `ValueError` for the collection of Flax's scales of fp8, because its "gradient" is its next value.

    Source: `OVERWRITE_WITH_GRADIENT` in flax/linen/fp8_ops.py and flax/training/train_state.py.
    """
    if "_overwrite_with_gradient" in names:
        raise ValueError(
            f"jdp.{verb}: the variables have the collection '_overwrite_with_gradient' (Flax's fp8 operations); what "
            f"jax.grad gives for it is its next value, a maximum over the rows, which replicas would average. Train "
            f"with a dot_general that keeps no such state (nn.Dense(..., dtype=jnp.bfloat16))."
        )
