"""`TrainStep`, the training step for variables, and `Step`, the base class of `TrainStep` and `NNXTrainStep`."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
from flax import nnx
from jax.core import Tracer

from .._core.calls import known_batch, remember_batch
from .._core.fingerprint import check_made_alike, check_replicas
from .._core.layout import Tree
from .._core.programs import Layouts, are_freed, capturing
from .._core.replica_mesh import outside_of_mesh
from .._core.replicate import broadcast, sharded
from .._core.scattered import Scattered, placed
from .._core.shards import cut_axis_of
from .._jax.private import trace_state_clean
from .._model.config import Wrapper, scatter_batch
from .._model.nnx import own_values
from .check import LossCheck, checked
from .computation import Flat, with_objects
from .gradients import Loss
from .loss import check_signature, variables_loss
from .nonfinite import Nonfinite
from .program import LastResults, Program, remember_step, run_known_step
from .state import (
    VERB,
    TrainState,
    check_optimizer,
    checked_key,
    checked_optimizer,
    first_difference,
    first_shapes,
    first_state,
    first_values,
    interrupted,
    no_rows,
    no_state,
    opt_shapes,
    refuse_no_arrays,
    shapes_of,
    thawed,
    too_many,
    was_donated,
    with_dtypes_of,
)
from .state_shardings import Bytes, bytes_of
from .step_options import StepOptions, check_shards, resolved
from .value_and_grad import check_differentiable, refuse_overwritten

Ready = tuple[TrainState, Scattered, Flat, list[Any]]
"""The operands of a step: the state, the batch, the state flattened, and the NNX objects of the batch."""

Last = TypeVar("Last")
"""The type of what a step keeps of its last call: the state, or for NNX the metrics."""

NO_STEP: Any = ()  # in place of the count of steps, in a state that is made to ask for shardings alone


class Step(Generic[Last]):
    """The part of a training step that does not depend on the kind of model."""

    def __init__(
        self,
        dp: Wrapper[object],
        loss_fn: Callable[..., Any],
        loss_of: Callable[[bool], Loss],
        tx: Any,
        view: Callable[[Tree], Tree],
        options: StepOptions,
        in_axes: Tree,
    ) -> None:
        self._dp, self._loss_fn, self._batches = dp, loss_fn, Layouts()
        self._in_axes, self._layouts = in_axes, dp._config.layouts_of(in_axes)
        label = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._options = options  # as the caller gave them
        self._program = Program(dp._config, loss_of, tx, view, resolved(options, dp._config), label)
        self._results = LastResults(options.donate)

    @property
    def last(self) -> Last | None:
        """The state that `init` or the last step returned (NNX: the metrics), to go on with after Ctrl-C, or None.

        An interrupt may come after the old state was freed and before the caller has the new one: this is the new one.
        For NNX, the model and its optimizer are both as the step with these metrics left them. The step object keeps
        it until the next step returns.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> state, metrics = step(state, np.full(5, 2, np.float32))
            >>> step.last is state
            True
        """
        return self._results.last

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self._dp.devices[:8]))
        return f"{type(self).__name__}({self._program.label}, devices=({devices}))"

    if not TYPE_CHECKING:  # with __getattr__, a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            has = sorted(x for x in {*dir(type(self)), *vars(self)} if not x.startswith("_"))
            near = difflib.get_close_matches(name, has, 1)
            way = f"Use step.{near[0]}" if near else "Use one of these"
            if name == "init":
                way = "An NNX step begins with the state of dp.module: call step(batch)"
            text = f"jdp.{VERB}: a {type(self).__name__} has no attribute {name!r}; it has {', '.join(has)}. {way}."
            raise AttributeError(text, name=name, obj=self)

    def _scattered(self, batch: Tree) -> tuple[Scattered, list[Any]]:
        """Returns the batch, cut, and the NNX objects in it."""
        known = known_batch(self._batches, batch)
        if known is not None:
            return known, []
        config = self._program.config
        config.refuse_other_mesh()
        scattered, objects = scatter_batch(config, batch, VERB, self._in_axes, self._layouts)
        if scattered._layout.is_cut and not any(scattered._layout.sizes):
            raise no_rows(VERB)
        if not objects:
            remember_batch(self._batches, batch, scattered)
        return scattered, list(objects.values())


class TrainStep(Step[TrainState]):
    """A training step for variables: `state = step.init(variables)`, `state, metrics = step(state, batch)`.

    Made by `step = dp.train_step(loss_fn, tx)`, where its arguments are explained.

    Example:
        >>> import jdp, numpy as np, optax
        >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
        >>> step: jdp.TrainStep = dp.train_step(lambda v, x: ((v["params"] - x) ** 2).mean(), optax.sgd(0.5))
        >>> state, metrics = step(step.init({"params": np.float32(1)}), np.array([2.0, 4.0], np.float32))
        >>> float(metrics["loss"]), float(state.params)
        (5.0, 3.0)
    """

    def __init__(
        self,
        dp: Wrapper[object],
        loss_fn: Callable[..., Any],
        tx: Any,
        options: StepOptions,
        in_axes: Tree,
        criterion: Callable[..., Any] | None,
    ) -> None:
        tx, config = checked_optimizer(tx), dp._config
        rules = options.reserved, config.reduce_state, config.axis_name
        loss = functools.partial(variables_loss, loss_fn, *rules, criterion)
        super().__init__(dp, loss_fn, loss, tx, lambda params: params, options, in_axes)
        self._shapes: TrainState | None = None  # of the states that the step takes; None before the first one
        self._inner_shardings = self._program.inner_shardings  # where the parameters of the last state lie
        self._first = first_values(tx)

    @outside_of_mesh
    def init(self, variables: Mapping[str, Tree], key: jax.Array | None = None) -> TrainState:
        """Returns the state to begin with: `state = step.init(variables)`, which copies them and never frees them.

        Args:
            variables: a dict with `"params"`, of which gradients are taken, and other collections
                (`"batch_stats"`), as `dp.init` returns it.
            key: a typed PRNG key, `jax.random.key(seed)`: `loss_fn` is called with a third argument then, a key
                that differs in every step, microbatch and replica.

        Raises:
            ValueError: no `"params"` in the variables.
            TypeError: parameters without a gradient, or a `key` that is no PRNG key.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> int(state.step), float(state.params)
            (0, 1.0)
        """
        self._program.config.refuse_described()
        if not isinstance(variables, Mapping) or "params" not in variables:
            what = sorted(variables) if isinstance(variables, Mapping) else f"a {type(variables).__name__}"
            raise ValueError(
                f"jdp.{VERB}: variables are {what}; gradients are taken of variables['params']. Pass what dp.init "
                f"returns, or {{'params': params}}."
            )
        variables = thawed(variables)
        check_differentiable(VERB, variables["params"])
        refuse_overwritten(VERB, variables)
        program = self._matching(variables["params"], "variables['params']")
        key = checked_key(key)
        self._check_signature(key is not None)
        mesh, given, rest = program.config.mesh, (variables, key), dict(variables, **{"(key)": key})
        if program.options.shard_params:
            params = sharded(rest.pop("params"), mesh, VERB, "['params']")
            rest = {"params": params, **broadcast(rest, mesh, VERB, "variables")}
        else:
            rest = broadcast(rest, mesh, VERB, "variables")
        key, variables = rest.pop("(key)"), rest
        traced = not trace_state_clean()  # in jax.eval_shape, say: there are no values yet
        if mesh.size > 1 and not traced:  # JAX does not notice if the copies differ, as between processes
            found: Tree = (variables, key)
            if not mesh.spans_processes:  # leaves that were just copied from one place are the same everywhere
                found = jax.tree.map(lambda x, y: y if x is y else None, given, found)
            check_replicas(found, mesh, VERB)
        program.note_shardings(variables["params"], {k: x for k, x in variables.items() if k != "params"})
        shapes, jaxpr = first_shapes(self._first, variables, key)
        check_optimizer(program.tx, variables["params"], shapes.opt_state)
        if self._shapes is not None and first_difference(shapes, self._shapes) is not None:
            program.forget()  # ZeRO cuts other shapes along other axes
        state = first_state(self._first, variables, key, jaxpr, shapes, program.shardings(shapes))
        self._program, self._shapes = program, shapes
        if not traced:
            check_made_alike({"opt_state": state.opt_state}, mesh, VERB)
            self._results.keep(state, jax.tree.leaves(state))
            self._inner_shardings = program.inner_shardings
        return state

    def __call__(self, state: TrainState, batch: Tree, *more: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one step, `state, metrics = step(state, batch)`; with `donate` it frees the state that went in.

        Arrays that no step made (in a state that was restored, or made by hand) are copied first, and not freed.

        Raises:
            KeyboardInterrupt: Ctrl-C; the state is then all from before the step, or all from after it (`step.last`).

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> state, metrics = step(state, np.full(5, 2, np.float32))
            >>> float(metrics["loss"]), round(float(state.params), 3)
            (16.0, 2.6)
        """
        last = self._results.last
        try:
            if more:
                raise too_many(more, "step(state, (x, y))")
            found = None
            if state is last and self._program.known:
                found = run_known_step(self._program, state, batch, self._results, self._keep)
            return found or self._train_step(state, batch)
        except KeyboardInterrupt as error:
            error.add_note(interrupted(state, self._results.last is not last))
            raise

    @outside_of_mesh
    def _train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        """Takes a step that is not a known one (see `program.py`)."""
        before, scattered, flat, nodes = self._ready(state, batch, donates=True)
        found = self._program(before, scattered, flat, functools.partial(self._keep, nodes=nodes))
        if not nodes:
            remember_step(self._program, flat[1], batch, scattered, found[1]["loss"])
        return found

    @outside_of_mesh
    def check(self, state: TrainState, batch: Tree) -> LossCheck:
        """Compares the loss with that of one device and the whole batch, `assert step.check(state, batch)`: slow.

        Loss, metrics, updates and gradient are compared; BatchNorm is synchronised in both. Nothing is changed. It
        finds faults that no trace of the loss can show, as in `(((x - x.mean(0)) / x.std(0)) ** 4).mean()`.

        Returns:
            A `jdp.LossCheck`, true if all agree up to rounding; `str()` of it names what differs.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> bool(step.check(state, np.full(5, 2, np.float32)))
            True
        """
        with self._program_of(state, batch) as (program, state, scattered):
            return checked(program, state, placed(scattered))

    @outside_of_mesh
    def lower(self, state: TrainState, batch: Tree) -> jax.stages.Lowered:
        """Returns the lowered program of a step, `step.lower(state, batch)`; `.compile().as_text()` is its HLO.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> "jit_train_step" in step.lower(state, np.ones(5, np.float32)).as_text()
            True
        """
        with self._program_of(state, batch) as (program, state, scattered):
            return program.lower(state, scattered)

    def optimizer_bytes(self, state: TrainState) -> Bytes:
        """Returns the bytes of optimizer state on each device, `step.optimizer_bytes(state)`.

        `cut` are those of leaves that are cut over the devices, `whole` those of the others.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.adam(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> step.optimizer_bytes(state)  # Adam: a count, and two numbers for each parameter
            Bytes(cut=0, whole=12)
        """
        return bytes_of(state.opt_state, self._program.shardings(state).opt_state)

    def parameter_bytes(self, state: TrainState) -> Bytes:
        """Returns the bytes of the parameters on each device, `step.parameter_bytes(state)`.

        `cut` are those of leaves that are cut over the devices, `whole` those of the others.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> step.parameter_bytes(state)
            Bytes(cut=0, whole=4)
        """
        return bytes_of(state.params, self._program.shardings(state).params)

    @outside_of_mesh
    def find_nonfinite(self, state: TrainState, batch: Tree) -> list[Nonfinite]:
        """Returns the replicas and rows whose gradient is not finite, `step.find_nonfinite(state, batch)`: slow.

        Each entry has `.replica`, `.device`, `.rows` (their indices in the batch; all rows of the replica, if the
        gradient of each row alone is finite) and `.paths` (of the parameters). The state is not changed.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> found = step.find_nonfinite(state, np.array([1, np.nan, 2], np.float32))
            >>> [(one.replica, one.rows) for one in found]
            [(0, (1,))]
        """
        with self._program_of(state, batch) as (program, state, scattered):
            return program.find_nonfinite(state, scattered)

    def _ready(self, state: TrainState, batch: Tree, donates: bool = False) -> Ready:
        """Returns the operands of a step. If it donates the state, arrays that no step made are copied first."""
        if not isinstance(state, TrainState):  # first, because a caller may have passed (batch, state)
            raise no_state(state)
        scattered, nodes = self._scattered(batch)
        if nodes:
            scattered = with_objects(scattered, *nnx.split(nodes), VERB)
        owned = self._results.owned(donates)
        if state is not self._results.last:
            state = self._checked(state, owned)
            return state, scattered, jax.tree.flatten(state), nodes
        # The state that the step returned last needs no check, unless parts of it were donated or replaced since.
        leaves, treedef = jax.tree.flatten(state)
        if are_freed(leaves):
            raise was_donated(state)
        is_new = not self._results.has(leaves)
        if is_new:
            refuse_no_arrays(state)
            check_differentiable(VERB, state.params, "state.params")
        if is_new or self._program.inner_shardings is not self._inner_shardings:  # of another state
            self._program.note_shardings(state.params, state.state)
        if is_new:
            state = self._program.placed(with_dtypes_of(self._shapes, state), owned)
            leaves, treedef = jax.tree.flatten(state)
        return state, scattered, (leaves, treedef), nodes

    @contextlib.contextmanager
    def _program_of(self, state: TrainState, batch: Tree) -> Iterator[tuple[Program, TrainState, Scattered]]:
        """Yields the program of a step on this state, and its operands. Then the step gets its own program back."""
        own = self._program
        try:
            state, scattered, _, _ = self._ready(state, batch)
            yield self._program, state, scattered
        finally:
            self._program = own

    def _matching(self, params: Tree, name: str, before: bool = False) -> Program:
        """Returns the program for cut parameters if these are cut, or were `before`, or if the caller said so.

        Traced parameters do not show where they lie; for them the program stays as it was.

        Raises:
            ValueError: these are cut, and the caller has passed `shard_params=False`.
        """
        config = self._program.config
        grouped = bool(config.mesh.inner_axes)  # `note_shardings` refuses what is cut over the replicas there
        are_cut = not grouped and any(cut_axis_of(x, config.mesh) is not None for x in jax.tree.leaves(params))
        if are_cut and self._options.shard_params is False:
            raise ValueError(
                f"jdp.{VERB}: shard_params is False, and {name} are cut over the devices; parameters that are cut stay "
                f"cut in training. Leave shard_params out, or pass jdp.replicate(jax.device_get(params))."
            )
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
            before = before or bool(self._program.options.shard_params)
        options = resolved(self._options, config, are_cut or before)
        check_shards(options, params, name)
        return self._program if options == self._program.options else self._program.like(**options._asdict())

    def _check_signature(self, key: bool) -> None:
        criterion = self._program.loss.criterion
        check_signature(self._loss_fn, "variables", key, "loss_fn" if criterion is None else "forward")

    def _checked(self, state: TrainState, owned: Callable[[Any, Any], Any]) -> TrainState:
        """Returns a state that is not the last one, checked to be of this model, with `owned` arrays in place."""
        if are_freed(jax.tree.leaves(state)):
            raise was_donated(state)
        refuse_no_arrays(state)
        program = self._matching(state.params, "state.params", bool(self._program.options.shard_params))
        if getattr(state.key, "dtype", None) == "uint32":  # a key of the old style, which replicas would not fold
            state = state.replace(key=checked_key(state.key))
        shapes, expected = shapes_of(state), self._shapes
        if expected is None:
            self._check_signature(state.key is not None)
            check_differentiable(VERB, state.params, "state.params")
            refuse_overwritten(VERB, state.state)
            expected = shapes.replace(opt_state=opt_shapes(self._program.tx, shapes.params))
        state = with_dtypes_of(expected, state)
        difference = first_difference(shapes_of(state), expected)
        if difference is not None:
            raise ValueError(
                f"jdp.{VERB}: state{difference}; a step takes the states of one model and optimizer. Pass a state that "
                f"step.init made, or one restored into its shape."
            )
        self._program = program
        if not capturing():  # a state that is only explained does not decide which ones the step takes
            self._shapes = expected
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            return state
        self._program.note_shardings(state.params, state.state)
        return self._program.placed(state, owned)

    def _keep(
        self, state: TrainState, leaves: list[Any], metrics: dict[str, Any], updates: Tree, nodes: Sequence[Any] = ()
    ) -> tuple[TrainState, dict[str, Any]]:
        if nodes:
            nnx.update(nodes, own_values(updates))
        if not isinstance(metrics["loss"], Tracer):  # a tracer must not outlive its trace
            self._results.keep(state, leaves)
            self._inner_shardings = self._program.inner_shardings
        return state, metrics
