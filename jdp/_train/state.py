"""`TrainState`, all that a training run carries from one step to the next, and the optimizer's update of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import core, nnx, struct
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._core.inputs import is_legacy_key, is_unbound_axis
from .._core.layout import Tree
from .._core.replica_mesh import ReplicaMesh
from .._core.summary import page_of, summary, summary_of_leaf
from .._jax.jaxprs import filled_with
from .._jax.private import trace_state_clean
from .._page import Page, in_notebook
from .state_shardings import AxisRule, cut_shardings

VERB = "train_step"


class TrainState(struct.PyTreeNode):
    """The state that a step takes and returns: a plain pytree, whose shapes do not depend on the number of devices.

    `state = step.init(variables)` makes it. Orbax saves it, and restores it onto any number of devices.
    `state.replace(...)` returns the state with other parts.

    Attributes:
        step: the number of updates so far, a 0-d int32.
        params: `variables["params"]`, replicated; cut over the replicas with `shard_params=True`.
        opt_state: the optimizer's state, replicated; cut over the replicas with `shard_optimizer=True`.
        state: the other collections of the variables (`batch_stats`), by name.
        key: the typed PRNG key that the steps' keys are derived from, or None.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np, optax
        >>> dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=[0])
        >>> step = dp.train_step(lambda v, x: jnp.mean(dp(v, x)), optax.sgd(0.5))
        >>> state = step.init({"params": np.ones(2, np.float32)})
        >>> state, metrics = step(state, np.ones((3, 2), np.float32))
        >>> int(state.step), state.params.tolist(), float(metrics["loss"])
        (1, [0.5, 0.5], 2.0)

    Source: `TrainState` in flax/training/train_state.py.
    """

    step: jax.Array
    params: Tree
    opt_state: Tree
    state: Tree
    key: jax.Array | None = None

    def __repr__(self) -> str:
        return summary("TrainState", self)

    @in_notebook
    def _repr_html_(self) -> Page:
        parts = {"params": self.params, "opt_state": self.opt_state, "state": self.state}
        key = "none" if self.key is None else summary_of_leaf(self.key)
        return page_of("TrainState", [("step", summary_of_leaf(self.step)), ("key", key)], parts)


def first_values(tx: Any) -> Callable[[Tree], tuple[Any, Tree]]:
    """Returns a function of the parameters: the count of steps and the optimizer's state before the first step."""

    def first_values(params: Tree) -> tuple[Any, Tree]:
        return jnp.zeros((), jnp.int32), tx.init(params)

    return first_values


def first_shapes(
    first: Callable[[Tree], tuple[Any, Tree]], variables: Mapping[str, Tree], key: Any
) -> tuple[TrainState, Any]:
    """Returns the shapes of the state before the first step, and the jaxpr of `first`, which `first_values` returns."""
    others = dict(variables)
    params = others.pop("params")
    jaxpr, (count, opt_state) = jax.make_jaxpr(first, return_shape=True)(params)
    return shapes_of(TrainState(count, params, opt_state, others, key)), jaxpr


MOST_SENT = 2**24
"""The most bytes of an optimizer's zeros that are sent to the devices; filling more by a program is worth compiling."""


def first_state(
    first: Callable[[Tree], tuple[Any, Tree]],
    variables: Mapping[str, Tree],
    key: Any,
    jaxpr: Any,
    shapes: TrainState,
    to: TrainState,
) -> TrainState:
    """Returns the state before the first step, with the shardings `to`; variables and key are copied.

    `shapes` and the jaxpr of `first` are what `first_shapes` returns.
    """
    others, where = dict(variables), (to.params, to.state, to.key)
    given, at = (others.pop("params"), others, key), cast(NamedSharding, to.step)
    numbers = None
    if at.is_fully_addressable and trace_state_clean():
        params, others, key = jax.device_put(given, where, may_alias=False)  # no program has to be compiled
        numbers = filled_with(jaxpr)  # None if an array is not filled with one number
    else:  # device_put copies no array of several processes
        params, others, key = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=where)(given)
    leaves, treedef = jax.tree.flatten((shapes.step, shapes.opt_state))
    if numbers is None or sum(x.size * x.dtype.itemsize for x in leaves) > MOST_SENT:
        count, opt_state = jax.jit(first, out_shardings=(to.step, to.opt_state))(params)
    else:
        values = [np.full(x.shape, number, x.dtype) for x, number in zip(leaves, numbers, strict=True)]
        count, opt_state = jax.device_put(treedef.unflatten(values), (to.step, to.opt_state), may_alias=False)
    return TrainState(count, params, opt_state, others, key)


def thawed(variables: Mapping[str, Tree]) -> dict[str, Tree]:
    """Returns variables with plain dicts in place of Flax's frozen ones; other containers stay: `OrderedDict`, say."""

    def is_frozen(x: Any) -> bool:
        return isinstance(x, core.FrozenDict)

    return jax.tree.map(lambda x: x.unfreeze() if is_frozen(x) else x, dict(variables), is_leaf=is_frozen)


def in_containers_of(reference: Tree, tree: Tree) -> Tree:
    """Returns `tree` in the containers of `reference`, if both have the same paths: Flax returns plain dicts."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(reference)]
    return jax.tree.structure(reference).unflatten(map(leaves.get, paths)) if leaves.keys() == {*paths} else tree


def checked_key(key: Any) -> Any:
    """Returns the key as a typed key; it may be given in the old style."""
    if key is None:
        return None
    if isinstance(key, jax.Array) and is_legacy_key(key):
        return jax.random.wrap_key_data(key)
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
        what = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else f"a {type(key).__name__}"
        raise TypeError(f"jdp.{VERB}: key is {what}; it is one typed PRNG key. Pass jax.random.key(seed).")
    return key


def first_difference(found: Tree, expected: Tree, dtypes: bool = True) -> str | None:
    """Returns the first path where two trees of arrays differ in structure, shape or dtype, and how; else None."""
    a, b = ({jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(t)} for t in (found, expected))
    for path in [*b, *(p for p in a if p not in b)]:
        if path not in a or path not in b:
            return f"{path} is {'missing' if path not in a else 'not expected'}"
        if jnp.shape(a[path]) != jnp.shape(b[path]) or dtypes and getattr(a[path], "dtype", None) != b[path].dtype:
            return f"{path} is {_short_type(a[path])}, {_short_type(b[path])} is expected"
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return f"the tree is {jax.tree.structure(found)}, {jax.tree.structure(expected)} is expected"
    return None


def _short_type(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}"


def no_state(found: Any) -> TypeError:
    """Returns the error for a step's first argument that is no `TrainState` of jdp's."""
    kind = type(found)
    name = f"{kind.__module__}.TrainState" if kind.__name__ == "TrainState" else kind.__name__
    return TypeError(
        f"jdp.{VERB}: state is a {name}; a step takes a jdp.TrainState. Call step(state, batch) with step.init's "
        f"state, or with the one that the last step returned."
    )


def was_donated(state: Tree, root: str = "state") -> RuntimeError:
    """Returns the error for a state of which an earlier step has freed an array."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    path = next(path for path, x in leaves if issubclass(type(x), jax.Array) and x.is_deleted())
    return RuntimeError(
        f"jdp.train_step: {root}{jax.tree_util.keystr(path)} was donated to an earlier step, which has freed it; a "
        f"state is good for one step. Pass on the state that the last step returned (to keep one, "
        f"jax.tree.map(jnp.copy, state)), or make the step with donate=False."
    )


def refuse_no_arrays(state: Tree) -> None:
    """Raises a `TypeError` for an object in a state that no device can hold."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int | jax.ShapeDtypeStruct):
            raise TypeError(
                f"jdp.train_step: state{jax.tree_util.keystr(path)} is a {type(x).__name__}; a state has only arrays. "
                f"Pass a state that step.init made, or one restored into its shape."
            )


def too_many(more: Sequence[Any], spelling: str) -> TypeError:
    """Returns the error for a batch in several arguments."""
    return TypeError(
        f"jdp.train_step: a step is called with {1 + len(more)} arguments for the batch; a batch is one tree of "
        f"arrays. Pass {spelling}, which loss_fn gets as its second argument."
    )


def interrupted(state: Tree, done: bool, what: str = "state", last: str = "step.last") -> str:
    """Returns the note for a `KeyboardInterrupt`, which says with which state training can go on."""
    if done:
        return f"jdp.train_step: interrupted when a step was done; {last} is the {what} after it. Go on with {last}."
    if any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted() for x in jax.tree.leaves(state)):
        return (
            f"jdp.train_step: interrupted twice, and the second time in the middle of a step; the {what} before it is "
            f"freed, that after it is lost. Go on with a checkpoint."
        )
    return f"jdp.train_step: interrupted before a step began; the {what} is as it was. Go on with the same {what}."


def checked_optimizer(tx: Any) -> optax.GradientTransformation:
    """Returns an optax transformation; makes one from an object that has its functions, such as `optax.MultiSteps`."""
    if isinstance(tx, type) or not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise TypeError(
            f"jdp.{VERB}: tx is a {type(tx).__name__}; it is an optax transformation (for NNX an nnx.Optimizer, too). "
            f"Pass optax.adam(1e-3) or the like."
        )
    return tx if isinstance(tx, optax.GradientTransformation) else optax.GradientTransformation(tx.init, tx.update)


_UPDATES = (nnx.Optimizer.update, nnx.ModelAndOptimizer.update)


def refuse_own_update(optimizer: nnx.Optimizer[Any]) -> None:
    """Raises a `TypeError` if the optimizer has another `update` than flax's, because a step would not call it."""
    if "update" in vars(optimizer) or type(optimizer).update not in _UPDATES:
        raise TypeError(
            f"jdp.{VERB}: tx is a {type(optimizer).__name__}, an nnx.Optimizer with an update of its own; a step "
            f"applies optimizer.tx, and does not call update. Write what update does as a transformation of optax, "
            f"or do it after the step; or take the gradients with dp.value_and_grad and call optimizer.update."
        )


def opt_shapes(tx: Any, params: Tree) -> Tree:
    """Returns the shapes of the optimizer's state; raises a `TypeError` if `tx` needs more than a step passes."""
    shapes = jax.eval_shape(tx.init, params)
    check_optimizer(tx, params, shapes)
    return shapes


def check_optimizer(tx: Any, params: Tree, opt_state: Tree) -> None:
    """Raises a `TypeError` if `tx` needs more than a step passes, or if its state holds more than arrays."""
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        if not hasattr(x, "dtype"):
            raise TypeError(
                f"jdp.{VERB}: opt_state{jax.tree_util.keystr(path)} is a {type(x).__name__}; an optimizer's state "
                f"is a tree of arrays. Leave it out of the transformation's state."
            )
    # One parameter tells which arguments tx needs. The update of all of them takes long to trace.
    one = jax.tree.leaves(params)[:1]
    try:
        state = jax.eval_shape(tx.init, one)
    except Exception:  # it needs their names, as a mask does
        one, state = params, opt_state
    try:
        jax.eval_shape(functools.partial(_updates, tx), one, state, one, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:  # other errors are raised when the step is traced
        if str(error).startswith("jdp."):
            raise


def view_of(optimizer: nnx.Optimizer, params: Tree) -> Callable[[Tree], Tree]:
    """Returns a function from params to the tree that the optimizer was made for: the model's, or its wrapper's."""
    refuse_own_update(optimizer)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"jdp.{VERB}: the model has no variables of {optimizer.wrt}; those are what the optimizer updates. Make it "
            f"with another wrt, such as nnx.Optimizer(dp, tx, wrt=nnx.Param)."
        )
    views = (nnx.as_pure, _of_wrapper)
    found = shapes_of(nnx.as_pure(optimizer.opt_state))
    differences = [first_difference(found, opt_shapes(optimizer.tx, view(params))) for view in views]
    if None not in differences:
        raise ValueError(
            f"jdp.{VERB}: the optimizer's opt_state{differences[0]}; it belongs to another model. Make the optimizer "
            f"from this one: nnx.Optimizer(dp, tx, wrt=nnx.Param)."
        )
    return views[differences.index(None)]


def _of_wrapper(state: Tree) -> Tree:
    """Returns a model's state as part of its wrapper's."""
    return nnx.as_pure(nnx.from_flat_state([(("module", *path), v) for path, v in nnx.to_flat_state(state)]))


def update(
    tx: Any, grads: Tree, opt_state: Tree, params: Tree, loss: Any, mesh: ReplicaMesh, axis: AxisRule | None
) -> tuple[Tree, Tree, Tree]:
    """Returns `(params before, params after, opt_state after)`, all cut over the replicas if `axis` is given.

    It runs outside of the replicas' program. There the compiler knows the whole arrays, and partitions correctly the
    norms, factored moments and whatever else a transformation computes from them. A transformation that ran on
    each replica's part would compute something else.
    """
    constrain = jax.lax.with_sharding_constraint
    if axis:
        params = constrain(params, cut_shardings(params, mesh, axis))
    try:
        with jax.named_scope("optimizer"):
            updates, after = _updates(tx, grads, opt_state, params, loss)
        after = with_dtypes_of(opt_state, after)
    except NameError as error:
        if not is_unbound_axis(error):
            raise
        raise ValueError(
            f"jdp.{VERB}: the optimizer runs a collective ({error}); the update runs once, on gradients that are "
            f"reduced already, and not on each replica. Leave the collective out of the transformation."
        ) from error
    is_alike = jax.tree.structure(updates) == jax.tree.structure(params)
    new = optax.apply_updates(params, updates) if is_alike else updates  # has the shapes and dtypes of params
    for what, found, expected in (("updates", new, params), ("opt_state", after, opt_state)):
        difference = first_difference(found, expected)
        if difference is not None:
            error = ValueError(
                f"jdp.{VERB}: the optimizer's {what} differ from what went in: {difference}; a transformation keeps "
                f"the tree. Correct its update function (in place of optax.monitor, use optax.snapshot)."
            )
            _refuse_other_parameters(tx, opt_state, params, error)
            raise error
    if axis:
        after, new = constrain((after, new), cut_shardings((after, new), mesh, axis))
    return params, new, after


def _updates(tx: Any, grads: Tree, opt_state: Tree, params: Tree, loss: Any) -> tuple[Tree, Tree]:
    """Returns the updates that the transformation makes, and its new state; `value` is passed if it takes that.

    Only a call shows it, and not the type: `optax.chain` takes any argument, and `optax.MultiSteps` passes all on.
    """
    if _clips_each_row(opt_state):
        raise TypeError(
            f"jdp.{VERB}: tx has optax.contrib.differentially_private_aggregate in it (so has dpsgd), which clips the "
            f"gradient of each row; a step has that of all rows. Make a wrapper that returns jax.vmap(jax.grad(f)) of "
            f"its rows, and give what it returns to tx.update (docs/training.md, DP-SGD)."
        )
    try:
        try:
            return tx.update(grads, opt_state, params, value=loss)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
        return tx.update(grads, opt_state, params)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, AttributeError) and error.name == "fast":  # optax.lookahead
            raise TypeError(
                f"jdp.{VERB}: tx takes two trees of parameters, optax.LookaheadParams(fast, slow); a step has one. "
                f"Take the gradients with dp.value_and_grad, and update both in a function of your own."
            ) from error
        _refuse_functions(error)
        _refuse_other_parameters(tx, opt_state, params, error)
        raise


def _refuse_functions(error: Exception) -> None:
    """Raises a `TypeError` if the update failed because it takes functions that a step cannot pass."""
    text = str(error)
    names = [name for name in ("value_fn", "grad_fn", "obj_fn", "grad") if re.search(rf"\b{name}\b", text)]
    if not names or "required keyword-only argument" not in text and "must be provided" not in text:
        return
    without = {
        "value_fn": " (optax.lbfgs(0.1, linesearch=None))",
        "grad_fn": " (optax.contrib.sam has opaque_mode=False)",
    }
    raise TypeError(
        f"jdp.{VERB}: tx needs {' and '.join(names)} as well as the gradient ({text}); a step passes it the gradients, "
        f"the parameters and value=loss, and no function that computes others. Choose one "
        f"without{without.get(names[0], '')}, or take the gradients with dp.value_and_grad."
    ) from error


def _refuse_other_parameters(tx: Any, opt_state: Tree, params: Tree, error: Exception) -> None:
    """Raises a `ValueError` if the update failed because the optimizer's state belongs to other parameters."""
    try:
        expected = jax.eval_shape(tx.init, params)
    except Exception:
        return
    difference = first_difference(shapes_of(opt_state), expected)
    if difference is not None:
        raise ValueError(
            f"jdp.{VERB}: the optimizer's opt_state{difference}; the model has other parameters than when the "
            f"optimizer was made. Make a new optimizer and a new step after a change of the model."
        ) from error


def _clips_each_row(opt_state: Tree) -> bool:
    """Returns True if an optimizer's state holds DP-SGD's. Its type is not imported: optax.contrib takes a while."""

    def is_one(x: Any) -> bool:
        return type(x).__name__ == "DifferentiallyPrivateAggregateState"

    return any(map(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)))


def shapes_of(tree: Tree) -> Tree:
    """Returns the shape of each leaf, and the dtype that it has on a device: numpy's float64 may be float32 there."""

    def of(x: Any) -> jax.ShapeDtypeStruct:
        dtype = getattr(x, "dtype", None) or jnp.result_type(x)
        if isinstance(x, np.ndarray | np.generic):
            dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype)

    return jax.tree.map(of, tree)


def with_dtypes_of(expected: Tree, tree: Tree) -> Tree:
    """Returns the tree with its Python numbers as arrays of the expected dtypes.

    A user may set `state.opt_state.hyperparams["learning_rate"] = 1`, for example. A float is rounded, as in JAX.
    A number that the dtype cannot hold stays as it is: a float for an int, a value that is too large, or an int that
    would be rounded.
    """
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        return tree

    def of(x: Any, to: jax.ShapeDtypeStruct) -> Any:
        kind = {bool: np.bool_, int: np.number, float: np.inexact}.get(type(x))
        if kind is None or not jnp.issubdtype(to.dtype, kind):
            return x
        try:
            with np.errstate(all="ignore"):
                number = np.asarray(x).astype(to.dtype)
        except OverflowError:
            return x
        is_held = number == x if isinstance(x, int) else np.isfinite(number) == np.isfinite(x)
        return number if is_held else x

    return jax.tree.map(of, tree, expected)


def no_rows(verb: str) -> ValueError:
    """Returns the error for a batch without rows."""
    return ValueError(
        f"jdp.{verb}: the batch has 0 rows; a mean over no rows is not a number. Skip it, or pass 1 row or more."
    )


def inexact_arrays_of(state: Tree) -> Tree:
    """Returns the inexact arrays of the state that the loss updates, by path: no counts, no keys."""
    tree = state if isinstance(state, Mapping) else nnx.as_pure(state.variables)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)}
