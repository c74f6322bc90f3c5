"""The Flax Linen door: collections in, outputs and updated collections out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.errors
import jax
from flax import linen
from jax.sharding import Mesh

from ._check import axes_of, is_legacy_key
from ._devices import replicated
from ._layout import Tree
from ._outputs import Marked, Reduce
from ._scattered import concrete


def mark_outputs(out: Tree, out_axes: Tree) -> Tree:
    """The outputs, each with its axis of `out_axes`; as they are where that is None."""
    if out_axes is None:
        return out
    leaves, treedef = jax.tree.flatten(out)
    axes = axes_of(out_axes, out, what="out_axes")
    return jax.tree.unflatten(treedef, [Marked(x, axis) for x, axis in zip(leaves, axes, strict=True)])


def linen_function(
    module: Any, out_axes: Tree, reduce_state: Reduce, state_axes: Mapping[str, int]
) -> Callable[..., Tree]:
    """`module.apply` with a rule for every output and every updated leaf."""

    def apply(variables: Mapping[str, Tree], *args: Any, **kwargs: Any) -> Tree:
        try:
            out = module.apply(variables, *args, **kwargs)
        except flax.errors.ScopeCollectionNotFound as error:
            error.add_note("Variables come from dp.init(key, *args): pass its result to dp.apply.")
            raise
        if not is_stateful(kwargs):
            return mark_outputs(out, out_axes)
        out, state = out
        marked = {}
        for name, collection in state.items():
            if name == "intermediates":
                marked[name] = collection
            else:
                before = variables.get(name, {})
                marked[name] = mark_state(collection, before, name, reduce_state, state_axes.get(name))
        return mark_outputs(out, out_axes), marked

    return apply


def is_stateful(kwargs: Mapping[str, Any]) -> bool:
    """Whether `module.apply` returns updated collections beside the output."""
    return kwargs.get("mutable", False) is not False or bool(kwargs.get("capture_intermediates", False))


def mark_state(after: Tree, before: Tree, name: str, reduce: Reduce, axis: int | None) -> Tree:
    """The updated state, each leaf cut along `axis` or reduced over the replicas.

    Raises:
        ValueError: an update whose shape is not what went in.
    """
    was = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(before)}

    def mark(path: Any, x: Any) -> Marked:
        key = jax.tree_util.keystr(path)
        old = was.get(key)
        if old is not None and jax.numpy.shape(x) != jax.numpy.shape(old):
            raise ValueError(
                f"jdp.DataParallel: state {name}{key} was {jax.numpy.shape(old)} and its update is "
                f"{jax.numpy.shape(x)}; an update keeps its shape. Name the batch axis of state that has one: "
                f"state_axes={{{name!r}: 0}}."
            )
        return Marked(x, axis) if axis is not None and jax.numpy.ndim(x) else Marked(x, None, reduce, old)

    return jax.tree_util.tree_map_with_path(mark, after)


def module_of(apply_fn: Any) -> linen.Module | None:
    """The Linen module that `apply_fn` is, or whose `apply` it is."""
    if getattr(apply_fn, "__func__", None) is linen.Module.apply:
        apply_fn = apply_fn.__self__
    return apply_fn if isinstance(apply_fn, linen.Module) else None


def check_variables(variables: Any) -> None:
    """A `TypeError` where the variables are something else: the call that forgot `init`."""
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"jdp.DataParallel: variables is a {type(variables).__name__}; a Linen module is applied to a dict of "
            f"collections. Call variables = dp.init(key, x) first, then dp.apply(variables, x)."
        )


def normal_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`rngs` and `mutable` in one form each, so that calls that say the same run the same program."""
    kwargs = dict(kwargs)
    for name, default in (("rngs", None), ("mutable", False), ("method", None)):
        if name in kwargs and kwargs[name] is default:
            del kwargs[name]
    if "rngs" in kwargs:
        # Keys of the old style (jax.random.PRNGKey): in rngs there is no doubt what they are.
        kwargs["rngs"] = jax.tree.map(
            lambda k: jax.random.wrap_key_data(k) if hasattr(k, "dtype") and is_legacy_key(k) else k, kwargs["rngs"]
        )
    if isinstance(kwargs.get("mutable"), set | frozenset | tuple):
        kwargs["mutable"] = sorted(kwargs["mutable"])
    return kwargs


def init(module: Any, axis_name: str, rngs: Tree, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tree:
    """`module.init`, also for a module that runs collectives over the axis."""
    try:
        return module.init(rngs, *args, **kwargs)
    except NameError:  # JAX's unbound axis name: one replica's axis, on which the values do not depend
        bound = jax.vmap(lambda _: module.init(rngs, *args, **kwargs), axis_name=axis_name, out_axes=None)
        return bound(jax.numpy.zeros(1))


def place(variables: Tree, mesh: Mesh) -> Tree:
    """New variables, whole on every device, wherever `init` made them."""
    return jax.tree.map(lambda x: x if concrete(x) is None else jax.device_put(x, replicated(mesh)), variables)


def explain_stacked(error: Exception, params: Tree, n: int) -> None:
    """Says so where a model failed on parameters that `jax.pmap` code has stacked."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if "pmap" in str(error):
        return
    if n < 2 or not leaves or any(jax.numpy.ndim(x) == 0 or jax.numpy.shape(x)[0] != n for _, x in leaves):
        return
    path, x = leaves[0]
    text = (
        f"jdp.DataParallel: {jax.tree_util.keystr(path)} has shape {jax.numpy.shape(x)}, and every leaf has {n} "
        f"entries along its first axis, as many as there are devices: they look replicated for jax.pmap; jdp takes "
        f"plain parameters. Pass jax.tree.map(lambda x: x[0], params) (flax.jax_utils.unreplicate)."
    )
    if isinstance(error, flax.errors.ScopeParamShapeError):
        raise ValueError(text) from error
    error.add_note(text)
