"""The optimizer's update, once for all replicas, in global view."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from .._core.devices import replicated
from .._core.inputs import is_unbound_axis
from .._core.layout import Tree
from .._core.outputs import path_name
from .shard_optimizer import cut_shardings
from .state import first_difference

VERB = "train_step"


def checked_optimizer(tx: Any) -> optax.GradientTransformation:
    """An optax transformation, or what has the two functions of one, as `optax.MultiSteps`."""
    if isinstance(tx, type) or not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise TypeError(
            f"jdp.{VERB}: tx is a {type(tx).__name__}; it is an optax transformation (for NNX an nnx.Optimizer, too). "
            f"Pass optax.adam(1e-3) or the like."
        )
    return tx if isinstance(tx, optax.GradientTransformation) else optax.GradientTransformation(tx.init, tx.update)


def opt_shapes(tx: Any, params: Tree) -> Tree:
    """The shapes of the optimizer's state.

    Raises:
        TypeError: a leaf of the state is no array; the transformation needs more than a step passes it.
    """
    shapes = jax.eval_shape(tx.init, params)
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        if not hasattr(x, "dtype"):
            raise TypeError(
                f"jdp.{VERB}: opt_state{jax.tree_util.keystr(path)} is a {type(x).__name__}; an optimizer's state "
                f"is a tree of arrays. Leave it out of the transformation's state."
            )
    try:
        jax.eval_shape(functools.partial(_updates, tx), params, shapes, params, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:  # what else is wrong with it is told when the step is traced
        if str(error).startswith("jdp."):
            raise
    return shapes


def update(
    tx: Any, grads: Tree, opt_state: Tree, params: Tree, loss: Any, mesh: Mesh, shard: bool
) -> tuple[Tree, Tree, Tree]:
    """`(params before, params after, opt_state after)`, all cut over the replicas with `shard`.

    Outside of the replicas' program: there the compiler knows the whole arrays, and cuts norms, factored moments
    and whatever else a transformation computes of them correctly. A transformation that ran on each
    replica's part would be another one.
    """
    constrain = jax.lax.with_sharding_constraint
    if shard:
        params = constrain(params, cut_shardings(params, mesh))
    try:
        with jax.named_scope("optimizer"):
            updates, after = _updates(tx, grads, opt_state, params, loss)
    except NameError as error:
        if not is_unbound_axis(error):
            raise
        raise ValueError(
            f"jdp.{VERB}: the optimizer runs a collective ({error}); the update is made once, of gradients that are "
            f"reduced already, and not on each replica. Leave the collective out of the transformation."
        ) from error
    for what, found, expected in (("updates", updates, params), ("opt_state", after, opt_state)):
        difference = first_difference(found, expected)
        if difference is not None and (
            what == "opt_state" or jax.tree.structure(found) != jax.tree.structure(expected)
        ):
            raise ValueError(
                f"jdp.{VERB}: the optimizer's {what} differ from what went in: {difference}; a transformation keeps "
                f"the tree. Mend its update function."
            )
    new = optax.apply_updates(params, updates)
    if shard:
        after, new = constrain((after, new), cut_shardings((after, new), mesh))
    return params, new, after


def _updates(tx: Any, grads: Tree, opt_state: Tree, params: Tree, loss: Any) -> tuple[Tree, Tree]:
    """What the transformation makes of the gradients; `value` goes to those that take it.

    Whether one does is not to be seen: `optax.chain` takes any argument, and passes it on to all that take more.
    """
    run = optax.with_extra_args_support(tx).update
    try:
        try:
            return run(grads, opt_state, params, value=loss)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
        return run(grads, opt_state, params)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, AttributeError) and error.name == "fast":  # optax.lookahead
            raise TypeError(
                f"jdp.{VERB}: tx takes two trees of parameters, optax.LookaheadParams(fast, slow); a step has one. "
                f"Take the gradients with dp.value_and_grad, and update both in a function of your own."
            ) from error
        text = str(error)
        names = [name for name in ("value_fn", "grad_fn", "obj_fn", "grad") if re.search(rf"\b{name}\b", text)]
        if names and ("required keyword-only argument" in text or "must be provided" in text):
            raise TypeError(
                f"jdp.{VERB}: tx needs {' and '.join(names)} beside the gradient ({text}); a step passes it the "
                f"gradients, the parameters and value=loss, and no function to take others with. Choose one without "
                f"(optax.lbfgs(0.1, linesearch=None)), or take the gradients with dp.value_and_grad."
            ) from error
        raise


def keep_if(finite: Any) -> Callable[[Tree, Tree], Tree]:
    """`choose(new, old)`: the new tree, or the old one where the gradient was not finite."""

    def choose(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: a if a is b else _where(finite, a, b), new, old)

    return choose


def _where(finite: Any, new: Any, old: Any) -> Any:
    return jax.lax.select(jnp.broadcast_to(finite, new.shape), new, old)


def all_finite(tree: Tree) -> Any:
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.asarray(True)


def whole(tree: Tree, mesh: Mesh) -> Tree:
    """The tree, gathered: whole on every device."""

    def gather(path: Any, x: Any) -> Any:
        with jax.named_scope(f"gather.{path_name(path)}"):
            return jax.lax.with_sharding_constraint(x, replicated(mesh))

    return jax.tree_util.tree_map_with_path(gather, tree)
