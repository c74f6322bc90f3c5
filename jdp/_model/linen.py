"""Applies a Flax Linen module: collections in, outputs and updated collections out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import flax.errors
import jax
from flax import linen
from flax.core.scope import in_filter
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._core.fingerprint import compare_processes
from .._core.global_arrays import put
from .._core.inputs import axes_of, is_array, is_unbound_axis, no_further
from .._core.layout import Tree, is_key
from .._core.outputs import Marked, Reduce
from .._core.parallel_apply import mapped, replica_context
from .._core.replica_mesh import ReplicaMesh
from .._core.scattered import concrete
from .._core.shards import axis_for_parameter, refuse_too_large

_NO_COLLECTIONS = (
    flax.errors.ScopeCollectionNotFound,
    flax.errors.ApplyScopeInvalidVariablesTypeError,
    flax.errors.ScopeParamNotFoundError,
)


def mark_outputs(out: Tree, out_axes: Tree) -> Tree:
    """Returns the outputs, each marked with its axis of `out_axes`; unchanged if `out_axes` is None."""
    if out_axes is None:
        return out
    leaves, treedef = jax.tree.flatten(out, is_leaf=no_further)
    axes = axes_of(out_axes, out, what="out_axes")
    return jax.tree.unflatten(treedef, [Marked(x, axis) for x, axis in zip(leaves, axes, strict=True)])


def linen_function(
    apply_fn: Callable[..., Any], out_axes: Tree, reduce_state: Reduce, state_axes: Mapping[str, int]
) -> Callable[..., Tree]:
    """Returns `module.apply` with a rule for every output and every updated leaf."""

    def apply(variables: Mapping[str, Tree], /, *args: Any, **kwargs: Any) -> Tree:
        try:
            out = apply_fn(unboxed(variables, kwargs.get("mutable", False)), *args, **kwargs)
        except _NO_COLLECTIONS as error:
            error.add_note(
                "Variables come from dp.init(key, *args): pass its result to dp.apply. Those of a training step's "
                "state are {'params': state.params, **state.state}."
            )
            raise
        except (TypeError, ValueError) as error:
            explain_batch_axis(error, args, _leaves_of_state(variables, state_axes))
            raise
        if not is_stateful(kwargs):
            return mark_outputs(out, out_axes)
        out, state = out
        marked = {}
        for name, collection in state.items():
            before = variables.get(name, {})
            if name == "intermediates":
                marked[name] = mark_sown(collection, before)
            else:
                marked[name] = mark_state(collection, before, name, reduce_state, state_axes.get(name))
        return mark_outputs(out, out_axes), marked

    return apply


def explain_batch_axis(error: Exception, args: Any, state: Iterable[tuple[str, str, Any]]) -> None:
    """Adds a note to an error of shapes in a model that gets state of more rows than its batch has.

    `state` has the name of each leaf, the key of `state_axes` that means it, and the leaf.
    """
    rows = next((x.shape[0] for x in jax.tree.leaves(args) if is_array(x) and x.ndim), 0)
    is_of_shapes = "shape" in str(error) or "broadcast" in str(error)
    for name, key, x in state:
        if is_of_shapes and is_array(x) and x.ndim > 1 and x.shape[0] > rows > 0:
            error.add_note(
                f"jdp.DataParallel: each replica has {rows} rows of the batch, and all of the state {name}, which is "
                f"{x.shape}. If its first axis is that of the batch, say so: state_axes={{{key}: 0}}."
            )
            return


def _leaves_of_state(variables: Mapping[str, Tree], state_axes: Mapping[str, int]) -> Iterator[tuple[str, str, Any]]:
    """Yields each leaf of the replicated state, with its name and the key of its collection."""
    for name, collection in variables.items():
        if name not in {"params", *state_axes}:
            for path, x in jax.tree_util.tree_leaves_with_path(collection):
                yield f"{name}{jax.tree_util.keystr(path)}", repr(name), x


def unboxed(variables: Mapping[str, Tree], mutable: Any) -> Mapping[str, Tree]:
    """Returns the variables without boxes (`nn.with_partitioning`), except in collections that the call may update."""
    return {name: x if in_filter(mutable, name) else unbox(x) for name, x in variables.items()}


def unbox(tree: Tree) -> Tree:
    """Returns the tree with the values of its boxes."""
    return jax.tree.map(lambda x: x.value if _is_box(x) else x, tree, is_leaf=_is_box)


def is_stateful(kwargs: Mapping[str, Any]) -> bool:
    """Returns True if `module.apply` returns updated collections with the output."""
    return kwargs.get("mutable", False) is not False or bool(kwargs.get("capture_intermediates", False))


def mark_sown(after: Tree, before: Tree) -> Tree:
    """Marks sown values: those of earlier calls are replicated, and those of this call are gathered like outputs."""
    kept = {id(x) for x in jax.tree.leaves(before)}
    return jax.tree.map(lambda x: Marked(x, None, old=x) if id(x) in kept else x, after)


def mark_state(after: Tree, before: Tree, name: str, reduce: Reduce, axis: int | None, key: str | None = None) -> Tree:
    """Returns the updated state, each leaf cut along `axis` or reduced over the replicas.

    State that the call creates is not an update of anything. If it is a mean over rows, its mean over the replicas is
    right; for other arrays no rule is known, and several replicas with rows are an error (`_alone`).
    """
    key = f"{key or repr(name)}: 0"  # how state_axes would name it
    was = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(before)}

    def mark(path: Any, x: Any) -> Marked:
        at = jax.tree_util.keystr(path)
        old = was.get(at)
        if old is not None and jax.numpy.shape(x) != jax.numpy.shape(old):
            raise ValueError(
                f"jdp.DataParallel: state {name}{at} was {jax.numpy.shape(old)} and its update is "
                f"{jax.numpy.shape(x)}; an update keeps its shape. Name the batch axis of state that has one: "
                f"state_axes={{{key}}}."
            )
        if axis is not None and jax.numpy.ndim(x):
            return Marked(x, axis)
        alone = _alone(f"{name}{at}", key, x, reduce) if old is None and is_array(x) else None
        return Marked(x, None, reduce, old, alone=alone)

    return jax.tree_util.tree_map_with_path(mark, after)


def _alone(path: str, key: str, x: Any, reduce: Reduce) -> str | None:
    """Returns the error for state that a call creates, if one replica's value cannot stand for all; otherwise None."""
    if not x.ndim and (reduce == "mean" or not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)):
        return None
    made = f"jdp.DataParallel: state {path} is made by the call, as {x.dtype}{list(x.shape)} on each replica; "
    gathered = 'sow it as an nnx.Intermediate (Linen: into "intermediates"), to have those of all replicas'
    if x.ndim:
        return (
            f"{made}it has no earlier value, and no axis of rows along which the replicas' values could be joined. "
            f"Name its batch axis, state_axes={{{key}}}, or {gathered}."
        )
    return (
        f'{made}with reduce_state="primary" its value and its gradient would be those of the first chunk alone. '
        f'Construct DataParallel with reduce_state="mean" where it is a mean over rows, or {gathered}.'
    )


def module_of(apply_fn: Any) -> linen.Module | None:
    """Returns the Linen module that `apply_fn` is, or whose `apply` it is."""
    if getattr(apply_fn, "__func__", None) is linen.Module.apply:
        apply_fn = apply_fn.__self__
    return apply_fn if isinstance(apply_fn, linen.Module) else None


def call_options(variables: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the keyword arguments of a call in one form, and whether the call returns updated collections."""
    if hasattr(variables, "opt_state"):  # of jdp, or of Flax
        raise TypeError(
            f"jdp.DataParallel: variables is a {type(variables).__name__}, the state of a training step; a Linen "
            f"module is applied to a dict of collections. Pass {{'params': state.params, **state.state}} (of a "
            f"jdp.TrainState)."
        )
    if not isinstance(variables, Mapping):
        if (model := _model_around()) is not None:
            raise TypeError(
                f"jdp.DataParallel: a wrapper of a Linen module is a part of the Linen model {type(model).__name__}; "
                f"it holds no parameters, and the model has none for it. Wrap the whole model: "
                f"jdp.DataParallel({type(model).__name__}(...))."
            )
        raise TypeError(
            f"jdp.DataParallel: variables is a {type(variables).__name__}; a Linen module is applied to a dict of "
            f"collections. Call variables = dp.init(key, x) first, then dp.apply(variables, x)."
        )
    if not kwargs:
        return kwargs, False
    kwargs = dict(kwargs)  # in one form, so that calls that mean the same run the same program
    for name, default in (("rngs", None), ("mutable", False), ("method", None)):
        if name in kwargs and kwargs[name] is default:
            del kwargs[name]
    if "rngs" in kwargs:
        # Keys of the old style (jax.random.PRNGKey): in rngs there is no doubt what they are.
        rngs = kwargs["rngs"]
        kwargs["rngs"] = jax.tree.map(lambda k: jax.random.wrap_key_data(k) if _is_old_key(k) else k, rngs)
    if isinstance(kwargs.get("mutable"), set | frozenset | tuple):
        kwargs["mutable"] = sorted(kwargs["mutable"])
    return kwargs, is_stateful(kwargs)


def _model_around() -> linen.Module | None:
    """Returns the outermost of the bound Linen modules whose methods are running; None if there is none."""
    frame, found = inspect.currentframe(), None
    while frame is not None:
        one = frame.f_locals.get("self")
        found = one if isinstance(one, linen.Module) and one.scope is not None else found
        frame = frame.f_back
    return found


def init(
    module: Any, axis_name: str, mesh: ReplicaMesh, rngs: Tree, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tree:
    """Runs `module.init(...)` as inside of a replica, also for a module that runs collectives over the axis."""
    _check_key(rngs)
    # Constraints are left out, as they are on one device: the annotations say where the parameters go.
    around = jax.sharding.use_abstract_mesh(mesh.inside) if mesh.inner_axes else nullcontext()
    with replica_context(), around:
        if not mesh.inner_axes:  # otherwise `init` is part of a program of all replicas, which has the axis
            try:
                return module.init(rngs, *args, **kwargs)
            except NameError as error:
                if not is_unbound_axis(error):
                    raise
        # The axis of one replica, because the values do not depend on how many there are.
        return jax.vmap(lambda _: module.init(rngs, *args, **kwargs), axis_name=axis_name, out_axes=None)(
            jax.numpy.zeros(1)
        )


def init_as_program(
    module: Any, axis_name: str, mesh: ReplicaMesh, rngs: Tree, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tree:
    """Runs `init` as a program: each device makes its own parts of the parameters.

    They are cut over the replicas, or over the devices of each replica as their annotations say.
    """
    _check_key(rngs)
    leaves, treedef = jax.tree.flatten((rngs, args, dict(kwargs)))
    at = [i for i, x in enumerate(leaves) if is_array(x)]

    def alone(*arrays: Any) -> Tree:
        mine = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            mine[i] = x
        rngs, args, kwargs = treedef.unflatten(mine)
        return init(module, axis_name, mesh, rngs, args, kwargs)

    keys = len(jax.tree.leaves(rngs))  # keys may lie on another device; a batch stays where it is

    def placed(i: int) -> Any:
        return put(leaves[i], mesh.replicated) if i < keys and not isinstance(leaves[i], Tracer) else leaves[i]

    def in_replicas(*arrays: Any) -> Tree:
        return mapped(lambda *arrays: ((), alone(*arrays)), mesh, [PartitionSpec()] * len(arrays))(*arrays)[1]

    # A shard_map in the module keeps the mesh of its first call. Here the module runs under the mesh that later calls
    # have, so that it also fits these; all replicas make the same variables.
    make = in_replicas if mesh.inner_axes else alone
    arrays = [placed(i) for i in at]
    shapes = jax.eval_shape(make, *arrays)
    compare_processes(rngs, mesh, "init", "rngs")  # not the batch, of which each process may pass its own rows
    if mesh.inner_axes:
        return jax.jit(make, out_shardings=annotated_shardings(shapes, mesh))(*arrays)
    refuse_too_large(shapes, mesh, "init", "variables")
    params = jax.tree.map(lambda x: mesh.along(axis_for_parameter(x, mesh.size)), shapes.get("params", {}))
    where = {name: params if name == "params" else mesh.replicated for name in shapes}
    return jax.jit(make, out_shardings=where)(*arrays)


def annotated_shardings(variables: Tree, mesh: ReplicaMesh) -> Tree:
    """Returns the sharding of each variable inside of a replica, as the annotation in its box says."""

    def where(path: Any, x: Any) -> NamedSharding:
        if not _is_box(x):
            return mesh.replicated
        spec = x.get_partition_spec()
        if isinstance(x, linen.LogicallyPartitioned):
            spec = linen.spmd.logical_to_mesh(spec, x.rules or linen.get_logical_axis_rules())
        return sharding_within(mesh, spec, x.value.shape, f"variables{jax.tree_util.keystr(path)}")

    return jax.tree_util.tree_map_with_path(where, variables, is_leaf=_is_box)


def sharding_within(mesh: ReplicaMesh, spec: PartitionSpec, shape: Sequence[int], name: str) -> NamedSharding:
    """Returns the sharding over the devices of a replica that an annotation asks for.

    Raises:
        ValueError: an axis of the array does not divide by the devices that it would be cut over, or the annotation
            names an axis of the mesh twice.
    """
    inner = mesh.within(spec)
    cuts = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in inner]
    for axis, names in enumerate(cuts):
        others = {one for before in cuts[:axis] for one in before}
        if others & {*names}:
            raise ValueError(
                f"jdp.DataParallel: {name} has the annotation {spec}, which cuts two axes over the same devices; an "
                f"axis of the mesh cuts one axis of an array. Name each of them once."
            )
        n = math.prod(mesh.jax_mesh.shape[one] for one in names)
        if shape[axis] % n:
            raise ValueError(
                f"jdp.DataParallel: {name} has shape {tuple(shape)}, and its annotation {spec} cuts axis {axis} over "
                f"{n} devices; {shape[axis]} does not divide by {n}. Choose another size, or leave the axis out of the "
                f"annotation."
            )
    return NamedSharding(mesh.jax_mesh, inner)


def _is_box(x: Any) -> bool:
    return isinstance(x, linen.Partitioned)  # logically partitioned ones are of this class, too


def _is_old_key(x: Any) -> bool:
    """Returns True for a legacy key of any of JAX's generators: two words, or four."""
    return getattr(x, "ndim", 0) == 1 and x.dtype == "uint32"


def _check_key(rngs: Any) -> None:
    """Raises a `TypeError` if the batch was passed in place of the key: Flax's own error would print all of it."""
    for key in rngs.values() if isinstance(rngs, Mapping) else [rngs]:
        number = isinstance(key, bool | int | float)
        if number or hasattr(key, "__array__") and not (is_array(key) and (is_key(key) or _is_old_key(key))):
            what = f"number, {key}" if number else f"{key.dtype}{list(key.shape)}"
            raise TypeError(
                f"jdp.init: rngs is a {what}; the first argument of init is a PRNG key, or a dict of keys, and the "
                f"batch follows it. Call dp.init(jax.random.key(0), x)."
            )


def place(variables: Tree, mesh: ReplicaMesh) -> Tree:
    """Returns new variables, replicated, wherever `init` made them."""
    return jax.tree.map(lambda x: x if concrete(x) is None else put(x, mesh.replicated), variables)


def explain_stacked(error: Exception, params: Tree, n: int) -> None:
    """Raises a clearer error if a model failed because `jax.pmap` code has stacked its parameters, n copies of each."""
    if not isinstance(error, flax.errors.ScopeParamShapeError) or n < 2:
        return
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = [jax.numpy.shape(x) for _, x in leaves]
    if all(s[:1] == (n,) for s in shapes) and any(f"expected to generate shape {s[1:]}" in str(error) for s in shapes):
        raise ValueError(
            f"jdp.DataParallel: {jax.tree_util.keystr(leaves[0][0])} has shape {shapes[0]}, and every leaf has {n} "
            f"entries along its first axis, as many as there are devices: they look replicated for jax.pmap; jdp takes "
            f"plain parameters. Pass jax.tree.map(lambda x: x[0], params) (flax.jax_utils.unreplicate)."
        ) from error
