"""train_step: one program that computes gradients, reduces each once, and updates the parameters."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, overload

import flax.core
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike

from .._core.calls import Batches
from .._core.fingerprint import check_replicas
from .._core.layout import Tree
from .._core.outline import page_of
from .._core.programs import Recent, capturing
from .._core.replica_mesh import outside_of_mesh
from .._core.replicate import broadcast, sharded
from .._core.scattered import Scattered, placed
from .._core.shards import cut_axis_of
from .._jax.private import trace_state_clean
from .._model.config import BatchAxes, Config, NNXWrapper, OtherWrapper, Wrapper, scatter_batch, with_objects
from .._model.nnx import own_values
from .._page import Page, in_notebook
from .check import LossCheck, checked
from .gradients import Loss
from .loss import (
    FORMS,
    VERB,
    Division,
    Wanted,
    check_signature,
    checked_criterion,
    divide,
    loss_of,
    of_criterion,
    results_of,
    rows_explained,
    variables_loss,
)
from .nonfinite import Nonfinite
from .program import Leaves, Program, StepOptions, of_model
from .state import (
    Bytes,
    Given,
    TrainState,
    bytes_of,
    check_rows,
    checked_key,
    checked_optimizer,
    first_difference,
    first_state,
    interrupted,
    opt_shapes,
    refuse_deleted,
    shapes_of,
    too_many,
    view_of,
)
from .value_and_grad import check_differentiable, check_steps, hashable, refuse_overwritten, wire_type

Ready = tuple[TrainState, Scattered, Leaves, list[Any]]
"""What a step begins with: the state, the batch, the state's leaves, and the NNX objects of the batch."""

Kept = TypeVar("Kept")
"""What a step keeps of the last call: the state, or of NNX the metrics."""

_NO_STEP: Any = ()  # where only the shardings of a state's other parts are asked for


class StepArguments(TypedDict, total=False):
    """The keywords of `train_step`; both of its types take them."""

    criterion: Callable[..., Any] | None
    in_axes: Tree
    accumulate_steps: int
    shard_optimizer: bool | None
    shard_params: bool | None
    gather_once: bool
    reduce_dtype: DTypeLike | None
    donate: bool
    skip_nonfinite: bool
    sync_batch_norm: bool
    deterministic: bool
    check_replicas: int


@overload
def train_step(  # pyright: ignore[reportOverlappingOverload]: one of an unknown module is taken for one of variables
    dp: NNXWrapper,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation | nnx.Optimizer[Any],
    **options: Unpack[StepArguments],
) -> NNXTrainStep: ...
@overload
def train_step(
    dp: OtherWrapper, loss_fn: Callable[..., Any], tx: optax.GradientTransformation, **options: Unpack[StepArguments]
) -> TrainStep: ...
def train_step(
    dp: Wrapper,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation | nnx.Optimizer[Any],
    *,
    criterion: Callable[..., Any] | None = None,
    in_axes: Tree = None,
    accumulate_steps: int = 1,
    shard_optimizer: bool | None = None,
    shard_params: bool | None = None,
    gather_once: bool = False,
    reduce_dtype: DTypeLike | None = None,
    donate: bool = True,
    skip_nonfinite: bool = False,
    sync_batch_norm: bool = False,
    deterministic: bool = False,
    check_replicas: int = 0,
) -> TrainStep | NNXTrainStep:
    """Makes a training step, which is one program: the gradients of all replicas, their sum, the optimizer's update.

    Linen and functions: `step = dp.train_step(loss_fn, tx)`, `state = step.init(variables)`, then
    `state, metrics = step(state, batch)`. NNX: `metrics = step(batch)`; the model and `step.optimizer` are updated in
    place. `loss_fn(variables, batch)` (NNX: `loss_fn(model, batch)`) returns the mean over the rows that it is given.

    The numbers are those of one device and the whole batch, for every batch size. With several processes, the batch
    is the rows of all of them, and a metric with an entry per row comes back for the rows of each process.

    NNX objects in the batch (an `nnx.Rngs`, a teacher) are replicated, and their state is updated in place, as that of
    the model. They are not differentiated, and their arrays are not donated.

    Args:
        loss_fn: `loss_fn(variables, batch)`, with a third argument `key` if the state has one; NNX:
            `loss_fn(model, batch)`. Returns `loss`, `(loss, metrics)` or (not for NNX) `(loss, metrics,
            updates)`. The loss is a scalar (the mean over the rows of its chunk), a vector with one
            entry per row, `jdp.Mean(total, count)`, `jdp.Sum(total)`, or a sum of such terms with factors. The same
            holds for each metric; one whose shape follows the rows comes back gathered. A scalar that is no mean over
            the rows is refused. `updates` are new collections, as `{"batch_stats": ...}`.
        criterion: a loss of all rows, torch's `criterion(model(x), y)`. `loss_fn` is the forward pass then, and returns
            outputs (a tree of arrays that follow the rows), or `(outputs, updates)`. `criterion(outputs, batch)` is
            called once, with the outputs of all rows of all devices and processes, and returns the loss, a real 0-d
            array, or `(loss, metrics)`, which come back as they are. With `accumulate_steps`, `replicas=`,
            `shard_params` or uneven `sync_batch_norm` each microbatch runs forward twice.
        in_axes: as in `jax.vmap`, a tree prefix of the batch: an int, None (whole to every replica: a teacher's
            parameters, a table of class weights), or a tuple, list or dict of them. Default: that of the wrapper.
        tx: an optax transformation; for NNX an `nnx.Optimizer` too. It sees whole gradients, and gets `value=loss`.
        accumulate_steps: cuts each chunk into that many microbatches, which run one after the other in
            the memory of one; fewer where a chunk has fewer rows.
        shard_optimizer: cuts the optimizer's state over the replicas (ZeRO-1); `step.optimizer_bytes(state)`
            tells what could be cut. The new parameters are gathered at the end of the step, where little is left to
            compute; `shard_params` with `gather_once` gathers them while the next forward pass runs.
        shard_params: cuts the parameters, their gradients and the optimizer's state over the replicas (ZeRO-3, FSDP).
            None: as the wrapper says (NNX), or as the variables lie that `init` is given. Each parameter is gathered
            where the loss uses it, and again in the backward pass; a batch with uneven chunks gathers all of them at
            once. `step.parameter_bytes(state)` tells what could be cut.
        gather_once: with `shard_params` and `accumulate_steps`, gathers all parameters once a step, not in each
            microbatch: fewer bytes travel, and all parameters are whole at a time.
        reduce_dtype: the dtype of the gradients that travel; `jnp.bfloat16` halves the bytes of float32.
        donate: frees the state that goes in as the new one is made, so that it cannot be used again (NNX: the
            arrays that the model held, in a snapshot of `nnx.state` too; `jax.tree.map(jnp.copy, ...)` keeps one).
        skip_nonfinite: leaves all as it was where the gradient is not finite, the step's number and so its key
            too; `metrics["skipped"]` says so, and `step.find_nonfinite(state, batch)` names the replicas and rows.
        sync_batch_norm: BatchNorm sees the statistics of the whole batch, weighted by rows.
        deterministic: with `jdp.DataParallel(..., replicas=R)`, R a power of two, state, loss and metrics are the same
            to the last bit on any number of devices and processes that divides R, after any number of steps, if the
            platform, the kind of device, jaxlib and XLA's flags are the same (on GPUs with
            `--xla_gpu_deterministic_ops=true`). `docs/replicas.md` says how that is done, and what it costs.
        check_replicas: compares the replicas of the state bit for bit after every so many steps, as
            `check_replicas` does; what differs is an error a few steps later. 0 is never.

    Returns:
        The step. `step.lower(state, batch)` is that of `jax.jit`.

    Raises:
        TypeError: `tx` is no optimizer; a loss of none of these forms; parameters without a gradient.
        ValueError: the batch has no rows; a state of another model; `deterministic` with a number of replicas that is
            no power of two, with `shard_params`, with a collective of the loss's own other than `psum` and `pmean`, or
            where replicas meet in a branch or a `while` loop; `gather_once` without `shard_params`; `shard_params` with
            `shard_optimizer=False`, or against the wrapper or the variables; `shard_params`, `shard_optimizer` or
            `deterministic` where a replica is several devices of a mesh.
        RuntimeError: a state that was donated already.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np, optax
        >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
        >>> step = dp.train_step(lambda v, x: jnp.mean((dp(v, x) - 6) ** 2), optax.sgd(0.1))
        >>> state = step.init({"params": np.float32(1)})
        >>> for _ in range(20):
        ...     state, metrics = step(state, np.full(5, 2, np.float32))
        >>> round(float(state.params), 3)
        3.0

    Source: `train_step` in flax's examples/mnist/train.py; ZeRO-1 is Rajbhandari et al., "ZeRO" (2020), as `P_os`.
    """
    if dp._config.shard_params and shard_params is False:
        raise ValueError(
            f"jdp.{VERB}: shard_params is False, and True in the wrapper; what is made in parts is trained in parts. "
            f"Leave it out of one of the two."
        )
    options = StepOptions(
        check_steps("train_step", accumulate_steps),
        shard_optimizer,
        wire_type("train_step", reduce_dtype),
        bool(donate),
        bool(skip_nonfinite),
        bool(sync_batch_norm),
        check_steps("train_step", check_replicas, "check_replicas", 0),
        dp._config.shard_params or shard_params,
        bool(gather_once),
        bool(deterministic),
    )
    if not callable(loss_fn):
        way = "dp.train_step(loss_fn, tx), the loss first" if callable(tx) else "a function"
        raise TypeError(f"jdp.{VERB}: loss_fn is a {type(loss_fn).__name__}; it is called. Pass {way}.")
    state_axes = dp._config.state_axes
    if state_axes:
        raise ValueError(
            f"jdp.{VERB}: the wrapper has state_axes={state_axes}; such state belongs to one batch, that of a training "
            f"run to none. Pass it in the batch, and return it among the metrics, where arrays with an entry per row "
            f"are gathered."
        )
    axes = None if in_axes is None else BatchAxes(in_axes, Recent())
    kind = NNXTrainStep if dp._config.kind == "nnx" else TrainStep
    return kind(dp, loss_fn, tx, options, axes, checked_criterion(criterion, VERB))


def _resolved(options: StepOptions, config: Config, are_cut: bool = False) -> StepOptions:
    """Returns the options with what the caller left open: whether the parameters are cut, as the given ones are."""
    shard_params = are_cut if options.shard_params is None else bool(options.shard_params)
    if shard_params and options.shard_optimizer is False:
        raise ValueError(
            f"jdp.{VERB}: shard_params is True and shard_optimizer False; the optimizer's state is cut as the "
            f"parameters are. Leave shard_optimizer out, or shard_params."
        )
    if options.gather_once and not shard_params:
        raise ValueError(
            f"jdp.{VERB}: gather_once is True and shard_params False; parameters are whole then, and nothing is "
            f"gathered. Leave gather_once out, or pass shard_params=True."
        )
    shard_optimizer = bool(options.shard_optimizer or shard_params)
    options = options._replace(shard_params=shard_params, shard_optimizer=shard_optimizer)
    on = dict(shard_params=shard_params, shard_optimizer=shard_optimizer, deterministic=options.deterministic)
    config.refuse_grouped(VERB, **on)
    _check_deterministic(options, config.replicas or len(config.devices))
    return options


def _check_deterministic(options: StepOptions, replicas: int) -> None:
    if not options.deterministic:
        return
    if replicas & (replicas - 1):
        raise ValueError(
            f"jdp.{VERB}: deterministic is True and there are {replicas} replicas; their sums are one balanced tree, "
            f"of a power of two. Pass jdp.DataParallel(..., replicas=8)."
        )
    if options.shard_params:
        raise ValueError(
            f"jdp.{VERB}: deterministic and shard_params are True; gradients of parameters that are cut are summed by "
            f"a reduce-scatter, whose order depends on the number of devices. Pass shard_optimizer=True instead."
        )


def _check_shards(options: StepOptions, params: Tree, name: str) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params) if options.shard_params else ():
        if jnp.iscomplexobj(x):
            raise TypeError(
                f"jdp.{VERB}: shard_params is True, and {name}{jax.tree_util.keystr(path)} is of dtype {x.dtype}; "
                f"jax.checkpoint, by which gathered parameters are freed, takes no complex numbers. Pass "
                f"shard_optimizer=True instead."
            )


class _Step(Generic[Kept]):
    """What the steps of variables and of NNX share."""

    def __init__(
        self,
        dp: Wrapper,
        loss_fn: Callable[..., Any],
        loss_of: Callable[[bool], Loss],
        tx: Any,
        view: Callable[[Tree], Tree],
        options: StepOptions,
        axes: BatchAxes | None,
    ) -> None:
        self._dp, self._loss_fn, self._axes, self._batches = dp, loss_fn, axes, Batches()
        label = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._options = options  # as the caller gave them
        self._program = Program(dp._config, loss_of, tx, view, _resolved(options, dp._config), label)
        self._given = Given(options.donate)

    @property
    def last(self) -> Kept | None:
        """The state that the step gave last, to go on with after Ctrl-C; of NNX the metrics. None before the first.

        An interrupt may come when the old state is freed and the new one has no name yet: this is the new one, whole;
        an NNX model and its optimizer are both after the step that gave these metrics. It lives until the next step
        gives another, or as long as the step object does.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> state, metrics = step(state, np.full(5, 2, np.float32))
            >>> step.last is state
            True
        """
        return self._given.last

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self._dp.devices[:8]))
        return f"{type(self).__name__}({self._program.label}, devices=({devices}))"

    if not TYPE_CHECKING:  # to which every name would be known then

        def __getattr__(self, name: str) -> Any:
            has = sorted(x for x in {*dir(type(self)), *vars(self)} if not x.startswith("_"))
            near = difflib.get_close_matches(name, has, 1)
            way = f"Use step.{near[0]}" if near else "Use one of these"
            if name == "init":
                way = "An NNX step begins with the state of dp.module: call step(batch)"
            text = f"jdp.{VERB}: a {type(self).__name__} has no attribute {name!r}; it has {', '.join(has)}. {way}."
            raise AttributeError(text, name=name, obj=self)

    def _owned(self, donates: bool) -> Callable[[Any], Any]:
        """Returns a function that copies what a step must not donate; without `donates`, one that copies nothing."""
        return self._given.owned() if donates else lambda x: x

    def _scattered(self, batch: Tree) -> tuple[Scattered, list[Any]]:
        """Returns the batch, cut, and the NNX objects in it."""
        known = self._batches.again(batch)
        if known is not None:
            return known, []
        self._program.config.refuse_other_mesh()
        scattered, objects = scatter_batch(self._program.config, batch, VERB, self._axes)
        check_rows(VERB, scattered)
        if not objects:
            self._batches.remember(batch, scattered)
        return scattered, list(objects.values())


class TrainStep(_Step[TrainState]):
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
        dp: Wrapper,
        loss_fn: Callable[..., Any],
        tx: Any,
        options: StepOptions,
        axes: BatchAxes | None,
        criterion: Callable[..., Any] | None,
    ) -> None:
        tx, config = checked_optimizer(tx), dp._config
        rules = options.reserved, config.reduce_state, config.axis_name
        loss = functools.partial(variables_loss, loss_fn, *rules, criterion)
        super().__init__(dp, loss_fn, loss, tx, lambda params: params, options, axes)
        self._shapes: TrainState | None = None  # of the states that it takes
        self._places = self._program.places  # where the parameters of the last state lie
        self._first = first_state(tx)

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
            TypeError: parameters without a gradient, or a key that is none.

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
        variables = flax.core.unfreeze(dict(variables))
        check_differentiable(VERB, variables["params"])
        refuse_overwritten(VERB, variables)
        self._follow(variables["params"], "variables['params']")
        key = checked_key(key)
        check_signature(self._loss_fn, "variables", key is not None)
        mesh, given = self._program.config.mesh, (variables, key)
        if self._program.options.shard_params:
            params = sharded(variables["params"], mesh, VERB, "['params']")
            rest, key = broadcast(({k: x for k, x in variables.items() if k != "params"}, key), mesh, VERB)
            variables = {"params": params, **rest}
        else:
            variables, key = broadcast((variables, key), mesh, VERB)
        traced = not trace_state_clean()  # in jax.eval_shape, say: there are no values yet
        if mesh.size > 1 and not traced:  # each process has made its own, and what is replicated may differ unseen
            found: Tree = (variables, key)
            if not mesh.spans_processes:  # what came from one place is the same everywhere
                found = jax.tree.map(lambda x, y: y if x is y else None, given, found)
            check_replicas(found, mesh, VERB)
        opt_shapes(self._program.tx, variables["params"])
        self._program.see(variables["params"], {k: x for k, x in variables.items() if k != "params"})
        shapes = jax.eval_shape(self._first, variables, key)
        if self._shapes is not None and first_difference(shapes, self._shapes) is not None:
            self._program.compiled.clear()  # those of other shapes, which ZeRO cuts along other axes
        state = jax.jit(self._first, out_shardings=self._program.shardings(shapes))(variables, key)
        self._shapes = shapes
        if not traced:
            self._given.keep(state, jax.tree.leaves(state))
            self._places = self._program.places
        return state

    @outside_of_mesh
    def __call__(self, state: TrainState, batch: Tree, *more: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one step, `state, metrics = step(state, batch)`; with `donate` the state that went in is gone then.

        Arrays that no step made (in a state that was restored, or made by hand) are copied, and stay.

        Raises:
            KeyboardInterrupt: Ctrl-C; the state is either all before the step, or all after it and `step.last`.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> state, metrics = step(state, np.full(5, 2, np.float32))
            >>> float(metrics["loss"]), round(float(state.params), 3)
            (16.0, 2.6)
        """
        last = self._given.last
        try:
            if more:
                raise too_many(more, "step(state, (x, y))")
            before, scattered, flat, nodes = self._ready(state, batch, donates=True)
            return self._program(before, scattered, flat, functools.partial(self._keep, nodes))
        except KeyboardInterrupt as error:
            error.add_note(interrupted(state, self._given.last is not last))
            raise

    @outside_of_mesh
    def check(self, state: TrainState, batch: Tree) -> LossCheck:
        """Compares the loss with that of one device and the whole batch, `assert step.check(state, batch)`: slow.

        Loss, metrics, updates and gradient are compared; BatchNorm is synchronised in both. Nothing is changed. It
        finds what no trace of the loss can tell, as a variance over the rows.

        Returns:
            A `jdp.LossCheck`, true where all agree up to rounding; `str()` of it names what differs.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> bool(step.check(state, np.full(5, 2, np.float32)))
            True
        """
        state, scattered, _, _ = self._ready(state, batch)
        return checked(self._program, state, placed(scattered))

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
        state, scattered, _, _ = self._ready(state, batch)
        return self._program.lower(state, scattered)

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

        Each entry has `.replica`, `.device`, `.rows` (their numbers in the batch; all of the replica's, where none
        does it alone) and `.paths` (of the parameters). The state is not changed.

        Example:
            >>> import jdp, numpy as np, optax
            >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
            >>> step = dp.train_step(lambda v, x: ((dp(v, x) - 6) ** 2).mean(), optax.sgd(0.1))
            >>> state = step.init({"params": np.float32(1)})
            >>> found = step.find_nonfinite(state, np.array([1, np.nan, 2], np.float32))
            >>> [(one.replica, one.rows) for one in found]
            [(0, (1,))]
        """
        state, scattered, _, _ = self._ready(state, batch)
        return self._program.find_nonfinite(state, scattered)

    def _ready(self, state: TrainState, batch: Tree, donates: bool = False) -> Ready:
        """Returns what a step begins with; if it donates the state, copies of the arrays that no step made."""
        scattered, nodes = self._scattered(batch)
        if nodes:
            scattered = with_objects(scattered, *nnx.split(nodes), VERB)
        # What it gave itself is as it should be, unless some of it has been donated or replaced since.
        if state is None or state is not self._given.last:
            state = self._checked(state, self._owned(donates))
            return state, scattered, jax.tree.flatten(state), nodes
        leaves, treedef = jax.tree.flatten(state)
        refuse_deleted(state, leaves)
        if self._program.places is not self._places:  # another state, which lies in another way, was seen since
            self._program.see(state.params, state.state)
        if not self._given.has(leaves):
            leaves = list(map(self._owned(donates), leaves))
            state = treedef.unflatten(leaves)
        return state, scattered, (leaves, treedef), nodes

    def _follow(self, params: Tree, name: str, before: bool = False) -> None:
        """Switches to cut parameters if these are cut, or were `before`, and the caller left it open.

        Raises:
            ValueError: these are cut, and the caller has passed `shard_params=False`.
        """
        config = self._program.config
        grouped = bool(config.mesh.inner_axes)  # where a parameter that is cut over the replicas is refused by its path
        are_cut = not grouped and any(cut_axis_of(x, config.mesh) is not None for x in jax.tree.leaves(params))
        if are_cut and self._options.shard_params is False:
            raise ValueError(
                f"jdp.{VERB}: shard_params is False, and {name} are cut over the devices; what is made in parts is "
                f"trained in parts. Leave shard_params out, or pass jdp.replicate(jax.device_get(params))."
            )
        options = _resolved(self._options, config, are_cut or before)
        _check_shards(options, params, name)
        if options != self._program.options:
            self._program = self._program.like(**options._asdict())

    def _checked(self, state: TrainState, owned: Callable[[Any], Any]) -> TrainState:
        """Returns a state that is not the last one, checked to be of this model, with `owned` arrays in place."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"jdp.{VERB}: state is a {type(state).__name__}; a step takes a jdp.TrainState. Pass step.init's, "
                f"or the state that the last step returned."
            )
        refuse_deleted(state, jax.tree.leaves(state))
        self._follow(state.params, "state.params", bool(self._program.options.shard_params))
        shapes = shapes_of(state)
        if self._shapes is None:
            check_signature(self._loss_fn, "variables", state.key is not None)
            check_differentiable(VERB, state.params, "state.params")
            refuse_overwritten(VERB, state.state)
            expected = shapes.replace(opt_state=opt_shapes(self._program.tx, shapes.params))
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
        self._program.see(state.params, state.state)
        return self._program.placed(state, owned)

    def _keep(
        self, nodes: Sequence[Any], state: TrainState, leaves: list[Any], metrics: dict[str, Any], updates: Tree
    ) -> tuple[TrainState, dict[str, Any]]:
        if nodes:
            nnx.update(nodes, own_values(updates))
        if not isinstance(metrics["loss"], Tracer):  # which must not outlive its trace
            self._given.keep(state, leaves)
            self._places = self._program.places
        return state, metrics


class NNXTrainStep(_Step[dict[str, jax.Array]]):
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
        dp: Wrapper,
        loss_fn: Callable[..., Any],
        tx: Any,
        options: StepOptions,
        axes: BatchAxes | None,
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
        _check_shards(options, params, "model")
        view = view_of(tx, params)

        def of_model_alone(diff: Tree) -> Tree:
            _, state = diff
            return view(state[0])

        def two(model: Any, batch: Tree) -> Any:
            with rows_explained(batch):
                out = loss_fn(model, batch)
            if criterion is not None:
                return out
            loss, metrics, _ = results_of(out, options.reserved, FORMS[:2])
            return loss, metrics

        config, self._argnums = dp._config, ((0, hashable(tx.wrt)),)
        division = Division((Wanted(0, (0,), self._argnums[0][1]),), has_aux=True, whole=(0,), arity=2)
        judge = None
        if criterion is not None:
            judge = lambda outputs, batch: of_criterion(criterion, outputs, (batch,), options.reserved)  # noqa: E731
        loss = functools.partial(loss_of, two, division, VERB, config.axis_name, config.reduce_state, judge)
        super().__init__(dp, loss_fn, loss, tx.tx, of_model_alone, options, axes)
        self._program.see(*divide((dp.module, []), {}, self._argnums, True, [None, 0], VERB).replicas)
        self._put_optimizer(self._program.placed(TrainState(tx.step[...], (), nnx.as_pure(tx.opt_state), ())))

    @outside_of_mesh
    def __call__(self, batch: Tree, *more: Any) -> dict[str, jax.Array]:
        """Takes one step, `metrics = step(batch)`; with `donate` the arrays that the model held before are gone then.

        Arrays that no step made (those of the first step, and what was put into the model since) are copied, and stay.

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
        last = self._given.last
        try:
            if isinstance(batch, TrainState):
                raise TypeError(
                    f"jdp.{VERB}: the batch is a jdp.TrainState; an NNX step takes the batch alone, because the model "
                    f"and the optimizer hold the state. Pass step(batch)."
                )
            if more:
                raise too_many(more, "step((x, y))")
            state, scattered, flat, nodes = self._ready(batch, donates=True)
            return self._program(state, scattered, flat, functools.partial(self._keep, nodes))[1]
        except KeyboardInterrupt as error:
            held = nnx.as_pure((nnx.state(self._dp.module), nnx.state(self.optimizer)))
            error.add_note(interrupted(held, self._given.last is not last, "model", "dp.module"))
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
        return bytes_of(opt_state, self._program.shardings(TrainState(_NO_STEP, (), opt_state, ())).opt_state)

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
        return bytes_of(params, self._program.shardings(TrainState(_NO_STEP, params, (), ())).params)

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
        scattered, nodes = self._scattered(batch)
        # The objects in the batch are divided together with the model, because they may share variables with it.
        call = divide((self._dp.module, nodes), {}, self._argnums, True, [None, 0], VERB)
        params, held = call.replicas
        if nodes:  # whose state is not donated, and so no part of the step's own
            mine, given = of_model(held.variables)
            scattered, held = with_objects(scattered, None, given, VERB), held._replace(variables=mine)
        state = TrainState(self.optimizer.step[...], params, nnx.as_pure(self.optimizer.opt_state), held)
        leaves, treedef = jax.tree.flatten(state)
        refuse_deleted(state, leaves, "model")
        if not self._given.has(leaves):
            self._program.see(params, held)
            state = self._program.placed(state, self._owned(donates))
            leaves = jax.tree.leaves(state)
        return state, scattered, (leaves, treedef), nodes

    def _keep(
        self, nodes: Sequence[Any], state: TrainState, leaves: list[Any], metrics: dict[str, Any], updates: Tree
    ) -> tuple[TrainState, dict[str, Any]]:
        if nodes:
            nnx.update([self._dp.module, *nodes], own_values(updates))
        _, params = state.params
        nnx.update([self._dp.module], nnx.merge_state(params, state.state.variables))
        self._put_optimizer(state)
        if not isinstance(metrics["loss"], Tracer):  # which must not outlive its trace
            self._given.keep(metrics, leaves)
        return state, metrics

    def _put_optimizer(self, state: TrainState) -> None:
        variables = jax.tree.leaves(self.optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for variable, value in zip(variables, jax.tree.leaves(state.opt_state), strict=True):
            variable.set_value(value)
        self.optimizer.step.set_value(state.step)
