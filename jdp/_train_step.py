"""train_step: one program that computes gradients, reduces each once, and updates the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
from jax.core import Tracer

from ._config import Config
from ._devices import replicated
from ._dispatch import dispatch_step
from ._gradients import Gradients, Loss, gradients
from ._layout import Layout, Tree, Whole
from ._nnx import with_updates
from ._parallel_apply import on_replicas
from ._replicate import broadcast
from ._scatter_gather import trim
from ._scattered import Scattered
from ._shard_optimizer import OptimizerBytes, cut_axis, cut_shardings, optimizer_bytes
from ._train_loss import VERB, variables_loss
from ._train_state import TrainState, first_difference
from ._update import all_finite, keep_if, opt_shapes, update, whole
from ._value_and_grad import check_differentiable, check_rows


class StepOptions(NamedTuple):
    """The arguments of `train_step`, checked."""

    accumulate_steps: int
    shard_optimizer: bool
    reduce_dtype: Any
    donate: bool
    skip_nonfinite: bool
    sync_batch_norm: bool

    @property
    def reserved(self) -> tuple[str, ...]:
        """The metrics that the step gives itself."""
        return ("loss", "skipped") if self.skip_nonfinite else ("loss",)


class Program:
    """The step as a pure function `(state, batch) -> (state, metrics)`, compiled once per layout and shapes."""

    def __init__(self, config: Config, loss: Loss, tx: Any, options: StepOptions, label: str, view: Any = None) -> None:
        self.config, self.tx, self.options, self.label = config, tx, options, label
        # What the optimizer sees of the parameters, and back; NNX wraps them.
        self.view: Callable[[Tree], Tree] = view or (lambda params: params)
        n = config.mesh.size
        scatter = (lambda x: cut_axis(x, n)) if options.shard_optimizer and n > 1 else None
        self.run = on_replicas(gradients(loss, options.accumulate_steps, options.reduce_dtype, scatter), label)
        self.compiled: dict[Any, Any] = {}

    def shardings(self, state: TrainState) -> TrainState:
        """Where each part of a state lies: a prefix of its tree."""
        everywhere = replicated(self.config.mesh)
        opt_state: Tree = everywhere
        if self.options.shard_optimizer:
            opt_state = cut_shardings(state.opt_state, self.config.mesh)
        key = None if state.key is None else everywhere
        return TrainState(step=everywhere, params=everywhere, opt_state=opt_state, state=everywhere, key=key)

    def placed(self, state: TrainState) -> TrainState:
        """The state, where it belongs; what is there already stays the same array."""
        prefix = self.shardings(state)
        where = jax.tree.map(lambda to, part: jax.tree.map(lambda _: to, part), prefix, state)
        return jax.tree.map(lambda x, to: x if getattr(x, "sharding", None) == to else jax.device_put(x, to), state, where)

    def of(self, state: TrainState, batch: Scattered) -> Any:
        """The compiled function of `(state, arrays of the batch)`."""
        found = self.compiled.get(batch._layout)
        if found is None:
            layout = batch._layout

            def train_step(state: TrainState, arrays: tuple[Any, ...]) -> tuple[TrainState, dict[str, Any]]:
                return self.step(state, Scattered(arrays, layout))

            train_step.__name__ = f"train_step_{self.label}"
            found = self.compiled[layout] = jax.jit(
                train_step,
                donate_argnums=(0,) if self.options.donate else (),
                in_shardings=(None, layout.shardings),
                out_shardings=(self.shardings(state), None),
            )
        return found

    def step(self, state: TrainState, batch: Scattered) -> tuple[TrainState, dict[str, Any]]:
        """The equation: new parameters of the old ones and of the gradient of the mean over the whole batch."""
        found = self.gradients(state, batch)
        loss, metrics = found.out
        mesh = self.config.mesh
        grads, params = self.view(found.grads), self.view(state.params)
        shard = self.options.shard_optimizer
        before, after, opt_state = update(self.tx, grads, state.opt_state, params, loss, mesh, shard)
        new_state, count = found.state, state.step + 1
        metrics = {"loss": loss, **metrics}
        if self.options.skip_nonfinite:
            finite = all_finite(grads)
            choose = keep_if(finite)
            after, opt_state = choose(after, before), choose(opt_state, state.opt_state)
            new_state, count = choose(new_state, state.state), choose(count, state.step)
            metrics["skipped"] = ~finite
        if shard:
            after = whole(after, mesh)
        params = jax.tree.unflatten(jax.tree.structure(state.params), jax.tree.leaves(after))
        return state.replace(step=count, params=params, opt_state=opt_state, state=new_state), metrics

    def gradients(self, state: TrainState, batch: Scattered) -> Gradients:
        layout = batch._layout
        outputs = self.run((state.params, state.state), one_argument(batch), step_key(state, layout))
        found: Gradients = outputs._layout.fill(trim(outputs))
        return found._replace(state=merged(state.state, found.state))


def one_argument(batch: Scattered) -> Scattered:
    """The batch as the one positional argument that it is, whatever its tree."""
    layout = batch._layout
    treedef = jax.tree_util.treedef_tuple([layout.treedef])
    return Scattered(batch._arrays, Layout(treedef, layout.leaves, layout.sizes, layout.mesh, layout.dim))


def step_key(state: TrainState, layout: Layout) -> Scattered | None:
    """The key of this step, as a keyword argument; each replica and microbatch folds it further."""
    if state.key is None:
        return None
    key = jax.random.fold_in(state.key, state.step)
    treedef = jax.tree.structure({"key": 0})
    return Scattered((key,), Layout(treedef, (Whole(),), layout.sizes, layout.mesh, layout.dim))


def merged(before: Tree, found: Tree) -> Tree:
    """The state with what the step has changed of it: all collections, or of NNX what is another now."""
    if isinstance(before, Mapping):
        return found
    held, graph, rest = before
    return held, graph, with_updates(rest, found)


class TrainStep:
    """A training step for variables: `state = step.init(variables)`, `state, metrics = step(state, batch)`.

    Made by `jdp.DataParallel.train_step`, where its arguments are explained.
    """

    def __init__(self, dp: Any, loss_fn: Callable[..., Any], tx: Any, options: StepOptions) -> None:
        self._dp, self._tx, self._options = dp, tx, options
        config: Config = dp._config
        label = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        sync_over = config.axis_name if options.sync_batch_norm else None
        loss = variables_loss(loss_fn, options.reserved, config.reduce_state, sync_over)
        self._program = Program(config, loss, tx, options, label)
        self._shapes: TrainState | None = None  # of the states that it takes
        self._last: Any = lambda: None  # a weak reference to the state it gave last

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
        if not isinstance(variables, Mapping) or "params" not in variables:
            what = sorted(variables) if isinstance(variables, Mapping) else f"a {type(variables).__name__}"
            raise ValueError(
                f"jdp.{VERB}: variables are {what}; gradients are taken of variables['params']. Pass {{'params': params}}, "
                f"or what dp.init returns."
            )
        variables = flax.core.unfreeze(dict(variables))
        check_differentiable(VERB, variables["params"])
        key = checked_key(key)
        mesh = self._program.config.mesh
        variables, key = broadcast((variables, key), mesh, VERB)
        opt_shapes(self._tx, variables["params"])

        def make(variables: dict[str, Tree], key: Any) -> TrainState:
            params, *rest = jax.tree.map(jnp.copy, (variables.pop("params"), variables, key))
            return TrainState(jnp.zeros((), jnp.int32), params, self._tx.init(params), *rest)

        shapes = jax.eval_shape(make, dict(variables), key)
        state = jax.jit(make, out_shardings=self._program.shardings(shapes))(variables, key)
        self._shapes, self._last = shapes, weakref.ref(state)
        return state

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step: `(state after, metrics)`; with `donate` the state that went in is gone then."""
        state, scattered = self._ready(state, batch)
        program = self._program.of(state, scattered)
        state, metrics = dispatch_step(program, self._program.config.mesh, state, scattered._arrays)
        self._last = weakref.ref(state)
        return state, metrics

    def lower(self, state: TrainState, batch: Tree) -> Any:
        """The lowered program of a step, as `jax.jit(...).lower`: `.compile().as_text()` shows its collectives."""
        state, scattered = self._ready(state, batch)
        return self._program.of(state, scattered).lower(state, scattered._arrays)

    def optimizer_bytes(self, state: TrainState) -> OptimizerBytes:
        """Bytes of the optimizer's state on each device: `cut` of leaves that are cut over the devices, `whole` of others."""
        return optimizer_bytes(state.opt_state)

    def _ready(self, state: TrainState, batch: Tree) -> tuple[TrainState, Scattered]:
        config = self._program.config
        config.refuse_other_mesh()
        if state is not self._last():  # what it gave itself is as it should be
            state = self._checked(state)
        scattered = self._dp._scatter_batch(batch, VERB)
        check_rows(VERB, scattered)
        return state, scattered

    def _checked(self, state: TrainState) -> TrainState:
        """A state that is not the last one: usable, of this model and optimizer, and in its place."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"jdp.{VERB}: state is a {type(state).__name__}; a step takes a jdp.TrainState. Pass step.init(variables), "
                f"or the state that the last step returned."
            )
        refuse_deleted(state)
        shapes = shapes_of(state)
        if self._shapes is None:
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
        self._shapes = expected
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            return state
        return self._program.placed(state)


def shapes_of(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), getattr(x, "dtype", None) or jnp.result_type(x)), tree)


def checked_key(key: Any) -> Any:
    """A typed key, of one that may be of the old style."""
    if key is None:
        return None
    if isinstance(key, jax.Array) and key.shape == (2,) and key.dtype == jnp.uint32:
        return jax.random.wrap_key_data(key)
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
        what = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else f"a {type(key).__name__}"
        raise TypeError(f"jdp.{VERB}: key is {what}; it is one typed PRNG key. Pass jax.random.key(seed).")
    return key


def refuse_deleted(state: Tree, root: str = "state") -> None:
    """A `RuntimeError` for arrays that an earlier step has freed."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise RuntimeError(
                f"jdp.{VERB}: {root}{jax.tree_util.keystr(path)} was donated to an earlier step, which has freed it; a state "
                f"is good for one step. Pass on the state that the last step returned (to keep one, "
                f"jax.tree.map(jnp.copy, state)), or make the step with donate=False."
            )
