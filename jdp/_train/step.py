"""train_step: one program that computes gradients, reduces each once, and updates the parameters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from .._core.compiled import is_plain
from .._core.devices import spans_processes
from .._core.fingerprint import check_replicas
from .._core.gather import join
from .._core.layout import Tree
from .._core.programs import Recent, capturing
from .._core.replicate import broadcast
from .._core.scattered import Scattered, is_scattered
from .._model.batch import BatchAxes, taken
from .._model.config import Config
from .._model.nnx import own_values
from .arguments import with_nodes
from .gradients import Loss
from .loss import VERB, check_signature, variables_loss
from .nonfinite import Nonfinite
from .program import Flat, Program, StepOptions
from .recall_step import KnownStep, known_by, known_step, recall_step
from .state import (
    Given,
    OptimizerBytes,
    TrainState,
    first_difference,
    interrupted,
    no_attribute,
    opt_shapes,
    optimizer_bytes,
    refuse_deleted,
    refuse_more,
)
from .value_and_grad import check_differentiable, check_rows


class TrainStep:
    """A training step for variables: `state = step.init(variables)`, `state, metrics = step(state, batch)`.

    Made by `jdp.DataParallel.train_step`, where its arguments are explained.
    """

    def __init__(
        self, dp: Any, loss_fn: Callable[..., Any], tx: Any, options: StepOptions, axes: BatchAxes | None
    ) -> None:
        self._dp, self._tx, self._options, self._axes, self._loss_fn = dp, tx, options, axes, loss_fn
        config: Config = dp._config
        label = getattr(loss_fn, "__name__", type(loss_fn).__name__)

        def loss(sync: bool) -> Loss:
            return variables_loss(loss_fn, options.reserved, config.reduce_state, config.axis_name, sync)

        self._program = Program(config, loss, tx, options, label)
        self._shapes: TrainState | None = None  # of the states that it takes
        self._given = Given(options.donate)
        self._known: Recent[object, KnownStep] = Recent()  # by the batch's layout

    def init(self, variables: Mapping[str, Tree], key: jax.Array | None = None) -> TrainState:
        """The state to begin with: a copy of the variables (the caller's own are never donated).

        Args:
            variables: a dict with `"params"`, of which gradients are taken, and other collections
                (`"batch_stats"`), as `dp.init` returns it.
            key: a typed PRNG key, `jax.random.key(seed)`: `loss_fn` is called with a third argument then, a key
                that differs in every step, microbatch and replica.

        Raises:
            ValueError: no `"params"` in the variables.
            TypeError: parameters without a gradient, or a key that is none.
        """
        self._program.config.refuse_described()
        if not isinstance(variables, Mapping) or "params" not in variables:
            what = sorted(variables) if isinstance(variables, Mapping) else f"a {type(variables).__name__}"
            raise ValueError(
                f"jdp.{VERB}: variables are {what}; gradients are taken of variables['params']. Pass what dp.init "
                f"returns, or {{'params': params}}."
            )
        variables = flax.core.unfreeze(dict(variables))
        check_differentiable(VERB, variables["params"])
        key = checked_key(key)
        check_signature(self._loss_fn, "variables", key is not None)
        mesh = self._program.config.mesh
        variables, key = broadcast((variables, key), mesh, VERB)
        if mesh.size > 1:  # each process has made its own, and what is replicated already may differ unseen
            check_replicas((variables, key), mesh, VERB)
        opt_shapes(self._tx, variables["params"])

        def make(variables: dict[str, Tree], key: Any) -> TrainState:
            params, *rest = jax.tree.map(jnp.copy, (variables.pop("params"), variables, key))
            return TrainState(jnp.zeros((), jnp.int32), params, self._tx.init(params), *rest)

        shapes = jax.eval_shape(make, dict(variables), key)
        if self._shapes is not None and first_difference(shapes, self._shapes) is not None:
            self._program.compiled.clear()  # those of other shapes, which ZeRO cuts along other axes
            self._known.clear()
        state = jax.jit(make, out_shardings=self._program.shardings(shapes))(variables, key)
        self._shapes = shapes
        self._given.keep(state, jax.tree.leaves(state))
        return state

    @property
    def last(self) -> TrainState | None:
        """The state that the step gave last, to go on with after Ctrl-C; None before the first.

        An interrupt may come when the old state is freed and the new one has no name yet: this is the new one, whole.
        It lives until the next step gives another, or as long as the step object does.
        """
        return self._given.last

    def __repr__(self) -> str:
        return f"TrainStep({self._program.label}, devices=({', '.join(map(str, self._dp.devices[:8]))}))"

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __call__(self, state: TrainState, batch: Tree, *more: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step: `(state after, metrics)`; with `donate` the state that went in is gone then.

        Arrays that no step made (in a state that was restored, or made by hand) are copied, and stay.

        Raises:
            KeyboardInterrupt: Ctrl-C; the state is either all before the step, or all after it and `step.last`.
        """
        last = self._given.last
        try:
            refuse_more(more, "step(state, (x, y))")
            if self._known and state is last:
                key, arrays = known_by(batch)
                known = self._known.used(key)
                if known is None and type(batch) is not Scattered:  # of other containers, or with rows to be padded
                    self._program.config.refuse_other_mesh()
                    batch = self._dp._scatter_batch(batch, VERB, self._axes)
                    key, arrays = known_by(batch)
                    known = self._known.used(key)
                if known is not None and (found := recall_step(known, self._given, arrays, self._keep)) is not None:
                    return found
            return self._all(state, batch)
        except KeyboardInterrupt as error:
            error.add_note(interrupted(state, self._given.last is not last))
            raise

    def _all(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """A step of which nothing is known."""
        before, scattered, flat, nodes = self._ready(state, batch, self._given.own())
        keep = functools.partial(self._keep, nodes=nodes) if nodes else self._keep
        state, metrics = self._program(before, scattered, flat, keep)
        if self._options.check_replicas:
            self._program.checked(state)
        if spans_processes(self._program.config.mesh):
            return state, own_metrics(metrics)
        if is_plain() and not self._options.check_replicas and not nodes:
            known = known_step(self._program, state, scattered, flat)
            self._known[scattered._layout.token] = known
            key, arrays = known_by(batch)
            same = len(arrays) == len(scattered._arrays) and all(map(operator.is_, arrays, scattered._arrays))
            if key is not None and same:
                self._known[key] = known  # nothing of such a batch had to be moved
        return state, metrics

    def _keep(
        self, state: TrainState, leaves: list[Any], metrics: dict[str, Any], nodes: Sequence[Any] = ()
    ) -> tuple[TrainState, dict[str, Any]]:
        if nodes:
            own, updates = state.state
            nnx.update(nodes, own_values(updates))
            state = state.replace(state=own)
            leaves = jax.tree.leaves(state)
        if not isinstance(metrics["loss"], Tracer):  # which must not outlive its trace
            self._given.keep(state, leaves)
        return state, metrics

    def lower(self, state: TrainState, batch: Tree) -> Any:
        """The lowered program of a step, as `jax.jit(...).lower`: `.compile().as_text()` shows its collectives."""
        state, scattered, _, _ = self._ready(state, batch)
        return self._program.of(state, scattered).lower(state, scattered._arrays)

    def optimizer_bytes(self, state: TrainState) -> OptimizerBytes:
        """Bytes of the optimizer's state on each device: `cut` of leaves that are cut over them, `whole` of others."""
        return optimizer_bytes(state.opt_state)

    def find_nonfinite(self, state: TrainState, batch: Tree) -> list[Nonfinite]:
        """The replicas whose gradient is not finite, and the rows that make it so: for debugging, slow.

        Each entry has `.replica`, `.device`, `.rows` (their numbers in the batch; all of the replica's, where none
        does it alone) and `.paths` (of the parameters). The state is not changed.
        """
        state, scattered, _, _ = self._ready(state, batch)
        return self._program.find_nonfinite(state, scattered)

    def _ready(
        self, state: TrainState, batch: Tree, own: Callable[[Any], Any] = lambda x: x
    ) -> tuple[TrainState, Scattered, Flat, list[Any]]:
        """The state of `own` arrays, the batch, the state's leaves, and the NNX objects of the batch."""
        self._program.config.refuse_other_mesh()
        scattered, nodes = taken(self._dp._scatter_batch(batch, VERB, self._axes))
        check_rows(VERB, scattered)
        if nodes:
            scattered = with_nodes(scattered, *nnx.split(nodes), VERB)
        # What it gave itself is as it should be, unless some of it has been donated or replaced since.
        if state is None or state is not self._given.last:
            state = self._checked(state, own)
            return state, scattered, jax.tree.flatten(state), nodes
        leaves, treedef = jax.tree.flatten(state)
        refuse_deleted(state, leaves)
        if not self._given.has(leaves):
            leaves = list(map(own, leaves))
            state = treedef.unflatten(leaves)
        return state, scattered, (leaves, treedef), nodes

    def _checked(self, state: TrainState, own: Callable[[Any], Any]) -> TrainState:
        """A state that is not the last one: usable, of this model and optimizer, of `own` arrays in their places."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"jdp.{VERB}: state is a {type(state).__name__}; a step takes a jdp.TrainState. Pass step.init's, "
                f"or the state that the last step returned."
            )
        refuse_deleted(state, jax.tree.leaves(state))
        shapes = shapes_of(state)
        if self._shapes is None:
            check_signature(self._loss_fn, "variables", state.key is not None)
            check_differentiable(VERB, state.params, "state.params")
            expected = shapes.replace(opt_state=opt_shapes(self._tx, shapes.params))
        else:
            expected = self._shapes
        difference = first_difference(shapes, expected)
        if difference is not None:
            raise ValueError(
                f"jdp.{VERB}: state{difference}; a step takes the states of one model and optimizer. Pass a state that "
                f"step.init made, or one restored into its shape."
            )
        if not capturing():  # what is only explained need not be what is trained
            self._shapes = expected
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            return state
        return self._program.placed(state, own)


def own_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics; of those with an entry per row, over several processes, this one's own rows."""
    return jax.tree.map(lambda x: join(x, "sharded") if is_scattered(x) else x, metrics, is_leaf=is_scattered)


def shapes_of(tree: Tree) -> Tree:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), getattr(x, "dtype", None) or jnp.result_type(x)), tree
    )


def checked_key(key: Any) -> Any:
    """A typed key, of one that may be of the old style."""
    if key is None:
        return None
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == jax.random.PRNGKey(0).shape:
        return jax.random.wrap_key_data(key)
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
        what = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else f"a {type(key).__name__}"
        raise TypeError(f"jdp.{VERB}: key is {what}; it is one typed PRNG key. Pass jax.random.key(seed).")
    return key
