"""The training step of NNX: a model and an optimizer, updated in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from .._core.global_arrays import put
from .._core.layout import Tree, replicated
from .._core.scattered import Scattered
from .._model.config import BatchAxes, Config, scatter_batch, with_objects
from .._model.nnx import own_values
from .arguments import divide, loss_of
from .loss import FORMS, VERB, check_signature, results_of, rows_explained
from .nonfinite import Nonfinite
from .program import Program, StepOptions, of_model
from .state import (
    Given,
    OptimizerBytes,
    TrainState,
    check_rows,
    checked_optimizer,
    cut_shardings,
    first_difference,
    interrupted,
    no_attribute,
    opt_shapes,
    optimizer_bytes,
    refuse_deleted,
    refuse_more,
    shapes_of,
)
from .value_and_grad import check_differentiable, hashable


class NNXTrainStep:
    """A training step for an NNX module: `metrics = step(batch)`; the model and `step.optimizer` are updated in place.

    Made by `jdp.DataParallel.train_step`, where its arguments are explained.
    """

    def __init__(
        self, dp: Any, loss_fn: Callable[..., Any], tx: Any, options: StepOptions, axes: BatchAxes | None
    ) -> None:
        check_signature(loss_fn, "model")
        if not isinstance(tx, nnx.Optimizer):
            tx = nnx.Optimizer(dp.module, checked_optimizer(tx), wrt=nnx.Param)
        self.optimizer: nnx.Optimizer = tx
        self._dp, self._options, self._loss_fn, self._axes = dp, options, loss_fn, axes
        self._programs: dict[Any, Program] = {}
        params = nnx.state(dp.module, tx.wrt)
        check_differentiable(VERB, params, "model")
        if not jax.tree.leaves(params):
            raise ValueError(
                f"jdp.{VERB}: the model has no variables of {tx.wrt}; those are what the optimizer updates. Make it of "
                f"others: nnx.Optimizer(dp, tx, wrt=nnx.Param)."
            )
        # As the optimizer was made: of the model, or of the wrapper, in whose tree it is one level down.
        views = (nnx.as_pure, _of_wrapper)
        found = shapes_of(nnx.as_pure(tx.opt_state))
        differences = [first_difference(found, opt_shapes(tx.tx, view(params))) for view in views]
        if None not in differences:
            raise ValueError(
                f"jdp.{VERB}: the optimizer's opt_state{differences[0]}; it is of another model. Make it of this one: "
                f"nnx.Optimizer(dp, tx, wrt=nnx.Param)."
            )
        self._view = views[differences.index(None)]
        self._given = Given(options.donate)
        mesh = dp._config.mesh
        opt_state = nnx.as_pure(tx.opt_state)
        everywhere = replicated(mesh)
        where = cut_shardings(opt_state, mesh)
        if not options.shard_optimizer:
            where = jax.tree.map(lambda _: everywhere, opt_state)
        self._put_optimizer(jax.tree.map(put, opt_state, where), put(tx.step[...], everywhere))

    @property
    def last(self) -> dict[str, jax.Array] | None:
        """The metrics that the step gave last, or was about to give when it was interrupted; None before the first.

        After Ctrl-C the model and the optimizer are whole: both after the step that gave these.
        """
        return self._given.last

    def __repr__(self) -> str:
        label = getattr(self._loss_fn, "__name__", type(self._loss_fn).__name__)
        return f"NNXTrainStep({label}, devices=({', '.join(map(str, self._dp.devices[:8]))}))"

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __call__(self, batch: Tree, *more: Any) -> dict[str, jax.Array]:
        """One step: the metrics; with `donate` the arrays that the model held before are gone then.

        Arrays that no step made (those of the first step, and what was put into the model since) are copied, and stay.

        Raises:
            KeyboardInterrupt: Ctrl-C; the model and the optimizer are either all before the step or all after it.
        """
        last = self._given.last
        try:
            refuse_more(more, "step((x, y))")
            program, state, scattered, nodes = self._ready(batch, self._given.owned())
            keep = functools.partial(self._keep, nodes)
            return program(state, scattered, jax.tree.flatten(state), keep)[1]
        except KeyboardInterrupt as error:
            done = self._given.last is not last
            held = nnx.as_pure((nnx.state(self._dp.module), nnx.state(self.optimizer)))
            error.add_note(interrupted(held, done, "model", "dp.module"))
            raise

    def lower(self, batch: Tree) -> Any:
        """The lowered program of a step, as `jax.jit(...).lower`."""
        program, state, scattered, _ = self._ready(batch)
        return program.lower(state, scattered)

    def optimizer_bytes(self) -> OptimizerBytes:
        """Bytes of the optimizer's state on each device: `cut` of leaves that are cut over them, `whole` of others."""
        return optimizer_bytes(nnx.as_pure(self.optimizer.opt_state))

    def find_nonfinite(self, batch: Tree) -> list[Nonfinite]:
        """The replicas whose gradient is not finite, and the rows that make it so: for debugging, slow.

        Each entry has `.replica`, `.device`, `.rows` (their numbers in the batch; all of the replica's, where none
        does it alone) and `.paths` (of the parameters). The model is not changed.
        """
        program, state, scattered, _ = self._ready(batch)
        return program.find_nonfinite(state, scattered)

    def _ready(
        self, batch: Tree, owned: Callable[[Any], Any] = lambda x: x
    ) -> tuple[Program, TrainState, Scattered, list[Any]]:
        config: Config = self._dp._config
        config.refuse_other_mesh()
        scattered, objects = scatter_batch(self._dp._config, batch, VERB, self._axes)
        nodes = list(objects.values())
        check_rows(VERB, scattered)
        # The objects in the batch are divided with the model, for they may share variables with it.
        call = divide((self._dp.module, nodes), {}, ((0, hashable(self.optimizer.wrt)),), True, [None, 0], VERB)
        program = self._programs.get(call.division)
        if program is None:
            loss = functools.partial(loss_of, self._two, call.division, VERB, config.axis_name, config.reduce_state)
            label = getattr(self._loss_fn, "__name__", type(self._loss_fn).__name__)
            program = Program(config, loss, self.optimizer.tx, self._options, label, self._params)
            self._programs[call.division] = program
        params, held = call.replicas
        if nodes:  # whose state is not donated, and so no part of the step's own
            mine, given = of_model(held.variables)
            scattered, held = with_objects(scattered, None, given, VERB), held._replace(variables=mine)
        state = TrainState(self.optimizer.step[...], params, nnx.as_pure(self.optimizer.opt_state), held)
        leaves = jax.tree.leaves(state)
        refuse_deleted(state, leaves, "model")
        return program, state if self._given.has(leaves) else program.placed(state, owned), scattered, nodes

    def _two(self, model: Any, batch: Tree) -> tuple[Any, dict[str, Any]]:
        with rows_explained(batch):
            out = self._loss_fn(model, batch)
        loss, metrics, _ = results_of(out, self._options.reserved, FORMS[:2])
        return loss, metrics

    def _params(self, diff: Tree) -> Tree:
        """What the optimizer sees of the differentiated arguments: the one model's own state."""
        _, state = diff
        return self._view(state[0])

    def _keep(
        self, nodes: list[Any], state: TrainState, leaves: list[Any], metrics: dict[str, Any], updates: Tree
    ) -> tuple[TrainState, dict[str, Any]]:
        if nodes:
            nnx.update([self._dp.module, *nodes], own_values(updates))
        self._put(state)
        if not isinstance(metrics["loss"], Tracer):  # which must not outlive its trace
            self._given.keep(metrics, leaves)
        return state, metrics

    def _put(self, state: TrainState) -> None:
        _, params = state.params
        nnx.update([self._dp.module], nnx.merge_state(params, state.state.variables))
        self._put_optimizer(state.opt_state, state.step)

    def _put_optimizer(self, opt_state: Tree, step: Any) -> None:
        variables = jax.tree.leaves(self.optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for variable, value in zip(variables, jax.tree.leaves(opt_state), strict=True):
            variable.set_value(value)
        self.optimizer.step.set_value(step)


def _of_wrapper(state: Tree) -> Tree:
    """A model's state as part of its wrapper's."""
    return nnx.as_pure(nnx.from_flat_state([(("module", *path), v) for path, v in nnx.to_flat_state(state)]))
