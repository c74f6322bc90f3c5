"""The training step for an NNX module: the model and its optimizer are updated in place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import flax.errors
import jax
from flax import nnx
from jax.core import Tracer

from .._core.fingerprint import check_made_alike
from .._core.layout import Tree
from .._core.programs import are_freed, capturing
from .._core.replica_mesh import outside_of_mesh
from .._core.scattered import placed
from .._core.summary import page_of
from .._jax.private import trace_state_clean
from .._model.config import Wrapper, training
from .._model.nnx import own_values, take_nodes
from .._page import Page, in_notebook
from .check import LossCheck, checked
from .computation import of_model, with_objects
from .loss import (
    FORMS,
    Replicated,
    Roles,
    assign_roles,
    check_signature,
    loss_of,
    of_criterion,
    results_of,
    rows_explained,
)
from .nonfinite import Nonfinite
from .state import VERB, TrainState, checked_optimizer, interrupted, too_many, view_of, was_donated
from .state_shardings import Bytes, bytes_of
from .step import NO_STEP, Ready, Step
from .step_options import StepOptions, check_shards
from .value_and_grad import check_differentiable, hashable


class NNXTrainStep(Step[dict[str, jax.Array]]):
    """A training step for an NNX module: `metrics = step(batch)`; the model and `step.optimizer` are updated in place.

    Made by `step = dp.train_step(loss_fn, tx)`, where its arguments are explained.

    Example:
        >>> import jdp, numpy as np, optax
        >>> from flax import nnx
        >>> dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=[0])
        >>> step: jdp.NNXTrainStep = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
        >>> first, second = (float(step(np.ones((4, 3), np.float32))["loss"]) for _ in range(2))
        >>> second < first
        True
    """

    @outside_of_mesh
    def __init__(
        self,
        dp: Wrapper[object],
        loss_fn: Callable[..., Any],
        tx: Any,
        options: StepOptions,
        in_axes: Tree,
        criterion: Callable[..., Any] | None,
    ) -> None:
        check_signature(loss_fn, "model", role="loss_fn" if criterion is None else "forward")
        if not isinstance(tx, nnx.Optimizer):
            # Its state takes over the annotations of the parameters, which name the axes of a mesh.
            mesh = dp._config.mesh
            around = jax.set_mesh(mesh.jax_mesh) if mesh.inner_axes and trace_state_clean() else nullcontext()
            with around, nnx.use_eager_sharding(False):
                tx = nnx.Optimizer(dp.module, checked_optimizer(tx), wrt=nnx.Param)
        self.optimizer: nnx.Optimizer[Any] = tx
        params = nnx.state(dp.module, tx.wrt)
        check_differentiable(VERB, params, "model")
        check_shards(options, params, "model")
        view = view_of(tx, params)

        def of_model_alone(diff: Tree) -> Tree:
            _, state = diff
            return view(state[0])

        def two(model: Any, batch: Tree) -> Any:
            with rows_explained(batch), training(dp._config):
                out = loss_fn(model, batch)
            if criterion is not None:
                return out
            loss, metrics, _ = results_of(out, options.reserved, FORMS[:2])
            return loss, metrics

        config, wrt = dp._config, hashable(tx.wrt)
        roles = Roles(((0, (0,), wrt),), has_aux=True, whole=(0,), arity=2)
        run_criterion = None
        if criterion is not None:
            run_criterion = lambda outputs, batch: of_criterion(criterion, outputs, (batch,), options.reserved)  # noqa: E731
        loss = functools.partial(loss_of, two, roles, VERB, config.axis_name, config.reduce_state, run_criterion)
        super().__init__(dp, loss_fn, loss, tx.tx, of_model_alone, options, in_axes)
        self._program.note_shardings(*self._replicated([]))
        state = self._program.placed(TrainState(tx.step[...], (), nnx.as_pure(tx.opt_state), ()))
        check_made_alike({"step": state.step, "opt_state": state.opt_state}, config.mesh, VERB)
        self._put_optimizer(state)

    @outside_of_mesh
    def __call__(self, batch: Tree, *more: Any) -> dict[str, jax.Array]:
        """Takes one step, `metrics = step(batch)`; with `donate` it frees the arrays that the model held before.

        Arrays that no step made (those before the model's first step, and those that the user has put into it) are
        copied first, and not freed.

        Raises:
            KeyboardInterrupt: Ctrl-C; the model and the optimizer are either all before the step or all after it.

        Example:
            >>> import jdp, numpy as np, optax
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=[0])
            >>> step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
            >>> metrics = step(np.zeros((4, 3), np.float32))
            >>> float(metrics["loss"]), int(step.optimizer.step[...])
            (0.0, 1)
        """
        last = self._results.last
        try:
            if isinstance(batch, TrainState) or more and isinstance(batch, nnx.Module | nnx.State | nnx.Optimizer):
                name = "jdp.TrainState" if isinstance(batch, TrainState) else type(batch).__name__
                raise TypeError(
                    f"jdp.{VERB}: the batch is a {name}; an NNX step takes the batch alone, because the model and the "
                    f"optimizer hold the state. Pass step(batch)."
                )
            if more:
                raise too_many(more, "step((x, y))")
            if not (trace_state_clean() or capturing()):  # if Flax refuses to write, before the step frees the model
                held = self._dp.module, self.optimizer
                nnx.update(held, nnx.state(held))
            state, scattered, flat, nodes = self._ready(batch, donates=True)
            return self._program(state, scattered, flat, functools.partial(self._keep, nodes))[1]
        except flax.errors.TraceContextError as error:
            if not trace_state_clean():
                error.add_note(
                    f"jdp.{VERB}: the step was called inside of jax.jit or another transformation; it updates the "
                    f"model in place, and is a compiled program itself. Call it outside."
                )
            raise
        except KeyboardInterrupt as error:
            held = nnx.as_pure((nnx.state(self._dp.module), nnx.state(self.optimizer)))
            error.add_note(interrupted(held, self._results.last is not last, "model", "dp.module"))
            raise

    @in_notebook
    def _repr_html_(self) -> Page:
        """Returns the state that it trains: that of the model, and the optimizer's."""
        params, others = nnx.split_state(nnx.state(self._dp.module), self.optimizer.wrt, ...)
        trees = {"parameters": params, "other state": others, "optimizer's state": self.optimizer.opt_state}
        title = f"{type(self).__name__} of {self._program.label}"
        facts = [("model", type(self._dp.module).__name__), ("devices", len(self._dp.devices))]
        return page_of(title, facts, {name: nnx.as_pure(tree) for name, tree in trees.items()})

    @outside_of_mesh
    def check(self, batch: Tree) -> LossCheck:
        """Compares the loss with that of one device and the whole batch, `assert step.check(batch)`: slow.

        It is `TrainStep.check` for an NNX module; neither the model nor the optimizer is changed.

        Example:
            >>> import jdp, numpy as np, optax
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=[0])
            >>> step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
            >>> bool(step.check(np.ones((4, 3), np.float32)))
            True
        """
        state, scattered, _, _ = self._ready(batch)
        return checked(self._program, state, placed(scattered))

    @outside_of_mesh
    def lower(self, batch: Tree) -> jax.stages.Lowered:
        """Returns the lowered program of a step, `step.lower(batch)`; `.compile().as_text()` is its HLO.

        Example:
            >>> import jdp, numpy as np, optax
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=[0])
            >>> step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
            >>> "jit_train_step" in step.lower(np.ones((4, 3), np.float32)).as_text()
            True
        """
        state, scattered, _, _ = self._ready(batch)
        return self._program.lower(state, scattered)

    def optimizer_bytes(self) -> Bytes:
        """Returns the bytes of optimizer state on each device, `step.optimizer_bytes()`.

        `cut` are those of leaves that are cut over the devices, `whole` those of the others.

        Example:
            >>> import jdp, numpy as np, optax
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=[0])
            >>> step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.adam(0.1))
            >>> step.optimizer_bytes()  # Adam: a count, and two numbers for each of 4 parameters
            Bytes(cut=0, whole=36)
        """
        opt_state = nnx.as_pure(self.optimizer.opt_state)
        return bytes_of(opt_state, self._program.shardings(TrainState(NO_STEP, (), opt_state, ())).opt_state)

    def parameter_bytes(self) -> Bytes:
        """Returns the bytes of the parameters on each device, `step.parameter_bytes()`.

        `cut` are those of leaves that are cut over the devices, `whole` those of the others.

        Example:
            >>> import jdp, numpy as np, optax
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=[0])
            >>> step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
            >>> step.parameter_bytes()
            Bytes(cut=0, whole=16)
        """
        params = nnx.as_pure(nnx.state(self._dp.module, self.optimizer.wrt))
        return bytes_of(params, self._program.shardings(TrainState(NO_STEP, params, (), ())).params)

    @outside_of_mesh
    def find_nonfinite(self, batch: Tree) -> list[Nonfinite]:
        """Returns the replicas and rows whose gradient is not finite, `step.find_nonfinite(batch)`: slow.

        It is `TrainStep.find_nonfinite` for an NNX module; the model is not changed.

        Example:
            >>> import jdp, numpy as np, optax
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=[0])
            >>> step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
            >>> [found.rows for found in step.find_nonfinite(np.array([[1, 1, 1], [1, np.nan, 1]], np.float32))]
            [(1,)]
        """
        state, scattered, _, _ = self._ready(batch)
        return self._program.find_nonfinite(state, scattered)

    def _ready(self, batch: Tree, donates: bool = False) -> Ready:
        if self.optimizer.tx is not self._program.tx:
            raise ValueError(
                f"jdp.{VERB}: step.optimizer.tx is not the transformation that the step was made with; a step goes on "
                f"with that one. Make a new step, dp.train_step(loss_fn, step.optimizer)."
            )
        scattered, nodes = self._scattered(batch)
        params, held = self._replicated(nodes)
        if nodes:  # their state is not donated, so it is kept out of the step's own state
            mine, given = of_model(held.variables)
            scattered, held = with_objects(scattered, None, given, VERB), held._replace(variables=mine)
        variables, structure = _variables_of(self.optimizer)
        opt_state = structure.unflatten([variable.get_raw_value() for variable in variables])  # as nnx.as_pure, faster
        state = TrainState(self.optimizer.step[...], params, opt_state, held)
        leaves, treedef = jax.tree.flatten(state)
        if are_freed(leaves):
            raise was_donated(state, "model")
        if not self._results.has(leaves):
            check_differentiable(VERB, nnx.as_pure(params[1][0]), "model")
            self._program.note_shardings(params, held)
            state = self._program.placed(state, self._results.owned(donates))
            leaves = jax.tree.leaves(state)
        return state, scattered, (leaves, treedef), nodes

    def _replicated(self, nodes: list[Any]) -> Replicated:
        """Splits the model together with the NNX objects in the batch, because they may share variables with it."""
        args, taken = take_nodes((self._dp.module, nodes))
        _, replicas = assign_roles(args, taken, [(0, hashable(self.optimizer.wrt))], True, [None, 0], VERB)
        return replicas

    def _keep(
        self, nodes: Sequence[Any], state: TrainState, leaves: list[Any], metrics: dict[str, Any], updates: Tree
    ) -> tuple[TrainState, dict[str, Any]]:
        if nodes:
            nnx.update([self._dp.module, *nodes], own_values(updates))
        _, params = state.params
        nnx.update([self._dp.module], nnx.merge_state(params, state.state.variables))
        self._put_optimizer(state)
        if not isinstance(metrics["loss"], Tracer):  # a tracer must not outlive its trace
            self._results.keep(metrics, leaves)
        return state, metrics

    def _put_optimizer(self, state: TrainState) -> None:
        values = iter(jax.tree.leaves(state.opt_state))
        for variable in _variables_of(self.optimizer)[0]:
            before = variable.get_raw_value()  # one array, or a tree: optax.masked leaves an empty one
            if isinstance(before, jax.Array):
                variable.set_raw_value(next(values))  # `set_value` copies the value, looks for hooks, and takes longer
            else:
                treedef = jax.tree.structure(before)
                variable.set_value(treedef.unflatten(itertools.islice(values, treedef.num_leaves)))
        self.optimizer.step.set_value(state.step)


def _variables_of(optimizer: nnx.Optimizer[Any]) -> tuple[list[nnx.Variable[Any]], Any]:
    """Returns the variables of an optimizer's state, and the structure of the tree that they are in.

    Raises a `TypeError` for a value in the place of a variable, because a step writes into the variables.
    """
    found, structure = jax.tree.flatten(optimizer.opt_state, is_leaf=_is_variable)
    if not all(map(_is_variable, found)):
        leaves = jax.tree_util.tree_leaves_with_path(optimizer.opt_state, is_leaf=_is_variable)
        path, x = next((jax.tree_util.keystr(path), x) for path, x in leaves if not _is_variable(x))
        raise TypeError(
            f"jdp.{VERB}: step.optimizer.opt_state{path} is a {type(x).__name__}; a step reads and writes variables. "
            f"Write into the variable: opt_state{path}[...] = value. If it is gone, assign nnx.OptState(value)."
        )
    return found, structure


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
