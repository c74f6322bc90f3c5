"""train_step: one program that computes gradients, reduces each once, and updates the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypedDict, Unpack, overload

import optax
from flax import nnx
from jax.typing import DTypeLike

from .._core.layout import Tree
from .._model.config import Wrapper
from .loss import checked_criterion
from .nnx_step import NNXTrainStep
from .state import VERB
from .step import TrainStep
from .step_options import StepOptions
from .value_and_grad import check_steps, wire_type


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
def train_step(  # pyright: ignore[reportOverlappingOverload]: a wrapper of an unknown module gets the second type
    dp: Wrapper[nnx.Module],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation | nnx.Optimizer[Any],
    **options: Unpack[StepArguments],
) -> NNXTrainStep: ...
@overload
def train_step(
    dp: Wrapper[object], loss_fn: Callable[..., Any], tx: optax.GradientTransformation, **options: Unpack[StepArguments]
) -> TrainStep: ...
def train_step(
    dp: Wrapper[object],
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
            entry per row, `jdp.Mean(total, count)`, `jdp.Sum(total)`, or a sum of such terms with factors. A
            metric may have the same forms, but one whose shape follows the rows comes back gathered. A
            scalar that is no mean over the rows is refused. `updates` are new collections, as `{"batch_stats": ...}`.
        criterion: a loss of all rows, torch's `criterion(model(x), y)`. `loss_fn` is the forward pass then, and returns
            outputs (a tree of arrays that follow the rows), or `(outputs, updates)`. `criterion(outputs, batch)` is
            called once, with the outputs of all rows of all devices and processes, and returns the loss, a real 0-d
            array, or `(loss, metrics)`, which come back as they are. With `accumulate_steps`, more `replicas=`
            than devices, `shard_params` or uneven `sync_batch_norm` each microbatch runs forward twice.
        in_axes: as in `jax.vmap`, a tree prefix of the batch: an int, None (replicated: a teacher's
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
            microbatch: fewer bytes are sent, but all parameters are in memory at the same time.
        reduce_dtype: the dtype that gradients are sent in; `jnp.bfloat16` halves the bytes of float32.
        donate: frees the state that goes in as the new one is made, so that it cannot be used again (NNX: the
            arrays that the model held, in a snapshot of `nnx.state` too; `jax.tree.map(jnp.copy, ...)` keeps one).
        skip_nonfinite: if the gradient is not finite, leaves everything as it was, also the step's number and so its
            key; `metrics["skipped"]` says so, and `step.find_nonfinite(state, batch)` names the replicas and rows.
        sync_batch_norm: BatchNorm sees the statistics of the whole batch, weighted by rows.
        deterministic: with `jdp.DataParallel(..., replicas=R)`, R a power of two, state, loss and metrics are the same
            to the last bit on any number of devices and processes that divides R, after any number of steps, if the
            platform, the kind of device, jaxlib and XLA's flags are the same (on GPUs with
            `--xla_gpu_deterministic_ops=true`). `docs/replicas.md` says how that is done, and what it costs.
        check_replicas: compares the replicas of the state bit for bit after every `check_replicas` steps, as
            `dp.check_replicas` does; a difference raises an error a few steps later. 0 is never.

    Returns:
        The step. `step.lower(state, batch)` lowers its program, as `lower` of `jax.jit` does.

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
            f"jdp.{VERB}: shard_params is False, and True in the wrapper; parameters that are cut stay cut in "
            f"training. Leave it out of one of the two."
        )
    options = StepOptions(
        accumulate_steps=check_steps(VERB, accumulate_steps),
        shard_optimizer=shard_optimizer,
        reduce_dtype=wire_type(VERB, reduce_dtype),
        donate=bool(donate),
        skip_nonfinite=bool(skip_nonfinite),
        sync_batch_norm=bool(sync_batch_norm),
        check_replicas=check_steps(VERB, check_replicas, "check_replicas", 0),
        shard_params=dp._config.shard_params or shard_params,
        gather_once=bool(gather_once),
        deterministic=bool(deterministic),
    )
    if not callable(loss_fn):
        way = "dp.train_step(loss_fn, tx), the loss first" if callable(tx) else "a function"
        raise TypeError(f"jdp.{VERB}: loss_fn is a {type(loss_fn).__name__}; it is called. Pass {way}.")
    dp._config.refuse_state_axes(VERB)
    kind = NNXTrainStep if dp._config.kind == "nnx" else TrainStep
    return kind(dp, loss_fn, tx, options, copy.deepcopy(in_axes), checked_criterion(criterion, VERB))
