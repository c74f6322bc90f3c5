"""The doors to training, as methods of the wrapper: value_and_grad, grad, train_step, parallel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .._core.layout import Tree
from .._model.config import Config
from . import parallel as _parallel
from . import value_and_grad as _value_and_grad
from .nnx_step import make_step
from .program import StepOptions


class Training:
    """What `jdp.DataParallel` does for training."""

    _config: Config

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        argnums: Any = 0,
        has_aux: bool = False,
        *,
        in_axes: Tree = None,
        accumulate_steps: int = 1,
        reduce_dtype: Any = None,
        sync_batch_norm: bool = False,
    ) -> Callable[..., Any]:
        """The loss and its gradient over all replicas: equal to `jax.value_and_grad(loss_fn)` on the whole batch.

        The function that comes back takes `(params, *batch)`: the first argument is whole on every replica,
        the others are cut along `dim`. Each replica runs `loss_fn` on its chunk; the results are one mean over
        all rows, exact for every batch size, and each gradient is summed over the replicas once. For NNX
        the arguments may be modules: `nnx.value_and_grad`, with their state updated in place.

        Args:
            loss_fn: returns `loss`, or with `has_aux` `(loss, aux)`. The loss is a scalar (the mean over the
                rows of its chunk), a vector with one entry per row, or `jdp.Mean(total, count)`. The leaves
                of `aux` likewise, or `jdp.Sum(total)`. An array whose shape follows the rows (one entry per row,
                or as many for each, as in flattened logits) comes back gathered, in input order; any other array
                of floats is a mean over the rows. Which it is, is seen by tracing `loss_fn` with more rows.
            argnums: what is differentiated, as in `jax.value_and_grad`; NNX: `nnx.DiffState` too. The
                gradient of an argument that is cut has its rows.
            has_aux: whether `loss_fn` returns a pair.
            in_axes: as in `jax.vmap`, for the arguments after the first: an axis, or None (whole to every
                replica) for each. Default: `dim` for all.
            accumulate_steps: cuts each chunk into that many microbatches, which run one after the other in
                the memory of one; fewer where a chunk has fewer rows.
            reduce_dtype: the dtype in which gradients travel; `jnp.bfloat16` halves the bytes of float32.
            sync_batch_norm: BatchNorm sees the statistics of the whole batch, weighted by rows.

        Returns:
            A function like `jax.value_and_grad(loss_fn)`. Results come back where the first argument lives.

        Raises:
            TypeError: a loss of none of the three forms; parameters without a gradient; a leaf of `aux` of which
                nothing tells whether it is a mean, a sum or an entry per row.
            ValueError: the batch has no rows.

        Example:
            >>> import jax.numpy as jnp, jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
            >>> loss, grad = dp.value_and_grad(lambda w, x: jnp.mean((dp(w, x) - 1) ** 2))(2.0, np.ones(5))
            >>> float(loss), float(grad)
            (1.0, 2.0)

        Source: `value_and_grad` in jax/_src/api.py; the sum over replicas is `Broadcast.backward` in
        torch/nn/parallel/_functions.py.
        """
        options = _value_and_grad.options(argnums, has_aux, accumulate_steps, reduce_dtype, sync_batch_norm)
        return _value_and_grad.value_and_grad(self._config, loss_fn, options, in_axes)

    def grad(
        self, loss_fn: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **options: Any
    ) -> Callable[..., Any]:
        """The gradient alone: `jax.grad` as `value_and_grad` is `jax.value_and_grad`, with the same options.

        Example:
            >>> import jax.numpy as jnp, jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
            >>> float(dp.grad(lambda w, x: jnp.mean(dp(w, x)))(2.0, np.arange(3.0)))
            1.0
        """
        value_and_grad = self.value_and_grad(loss_fn, argnums, has_aux, **options)

        @functools.wraps(value_and_grad)
        def grad(*args: Any, **kwargs: Any) -> Any:
            value, grads = value_and_grad(*args, **kwargs)
            return (grads, value[1]) if has_aux else grads

        return grad

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        tx: Any,
        *,
        in_axes: Tree = None,
        accumulate_steps: int = 1,
        shard_optimizer: bool = False,
        reduce_dtype: Any = None,
        donate: bool = True,
        skip_nonfinite: bool = False,
        sync_batch_norm: bool = False,
        check_replicas: int = 0,
    ) -> Any:
        """A training step over all replicas, as one program: gradients, one sum for each, the optimizer's update.

        For variables (Linen, functions) `state = step.init(variables, key=None)`, then `state, metrics =
        step(state, batch)`. For NNX `metrics = step(batch)`; the model and `step.optimizer` are updated in place.
        The numbers are those of one device and the whole batch, for every batch size; of several processes the
        batch is the rows of them all, and a metric with an entry per row comes back for each one's own.

        NNX objects in the batch (an `nnx.Rngs`, a teacher) go whole to every replica, and their state is updated in
        place, as that of the model; they are not differentiated, and their arrays not donated.

        Args:
            loss_fn: `loss_fn(variables, batch)`, with a third argument `key` if the state has one; NNX:
                `loss_fn(model, batch)`. Returns `loss`, `(loss, metrics)` or, for variables, `(loss,
                metrics, updates)`. The loss is a scalar (the mean over the rows of its chunk), a vector with one
                entry per row, or `jdp.Mean(total, count)`; each metric likewise, or `jdp.Sum(total)`, and one whose
                shape follows the rows comes back gathered. `updates` are new collections, as `{"batch_stats": ...}`.
            in_axes: as in `jax.vmap`, a tree prefix of the batch: an int, None (whole to every replica: a teacher's
                parameters, a table of class weights), or a tuple, list or dict of them. Default: that of the wrapper.
            tx: an optax transformation; for NNX an `nnx.Optimizer` too. It sees whole gradients, and gets `value=loss`.
            accumulate_steps: cuts each chunk into that many microbatches, which run one after the other in
                the memory of one; fewer where a chunk has fewer rows.
            shard_optimizer: cuts the optimizer's state over the replicas (ZeRO-1); `step.optimizer_bytes(state)`
                tells what could be cut.
            reduce_dtype: the dtype in which gradients travel; `jnp.bfloat16` halves the bytes of float32.
            donate: frees the state that goes in as the new one is made, so that it cannot be used again (NNX: the
                arrays that the model held, in a snapshot of `nnx.state` too; `jax.tree.map(jnp.copy, ...)` keeps one).
            skip_nonfinite: leaves all as it was where the gradient is not finite, the step's number and so its key
                too; `metrics["skipped"]` says so, and `step.find_nonfinite(state, batch)` names the replicas and rows.
            sync_batch_norm: BatchNorm sees the statistics of the whole batch, weighted by rows.
            check_replicas: compares the replicas of the state bit for bit after every so many steps, as
                `check_replicas` does; what differs is an error a few steps later. 0 is never.

        Returns:
            The step. `step.lower(state, batch)` is that of `jax.jit`.

        Raises:
            TypeError: `tx` is no optimizer; a loss of none of the three forms; parameters without a gradient.
            ValueError: the batch has no rows; a state of another model.
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
        options = StepOptions(
            _value_and_grad.check_steps("train_step", accumulate_steps),
            bool(shard_optimizer),
            _value_and_grad.wire_type("train_step", reduce_dtype),
            bool(donate),
            bool(skip_nonfinite),
            bool(sync_batch_norm),
            _value_and_grad.check_steps("train_step", check_replicas, "check_replicas", 0),
        )
        return make_step(self, loss_fn, tx, options, in_axes)

    def parallel(
        self,
        step_fn: Callable[..., Any],
        *,
        axis_name: str | None = None,
        in_axes: Any = None,
        out_axes: Any = None,
        static_broadcasted_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> Callable[..., Any]:
        """A step that was written for `jax.pmap`, as it is: `dp.parallel(f)(state, batch)`, with nothing stacked.

        The first argument and the first result are replicated (a train state, with plain shapes); the other
        arguments are cut along `dim`, the other results gathered, scalars to a vector with one entry per
        replica. One key per replica (`jax.random.split(key, n)`) is given out as pmap does (of several processes each
        passes one for each device of its own: fold in `jax.process_index()` first); a single key is folded with the
        replica's index. NNX objects among the arguments (a model, an `nnx.Optimizer`) are replicated and updated in
        place. What is `jdp.Scattered` already (`dp.prefetch`, `jdp.scatter(..., chunk_sizes=)`) stays as it is cut.

        The step's own `lax.pmean(..., axis_name)` makes replicas agree. State in which they still differ was made of
        each replica's own rows. If the loss, a metric or other state depends on it, it is trained, and the step is
        refused; so is one that adds to it (a count), and one in whose state nothing was reduced. What is left are
        statistics, as a BatchNorm's: the primary's are kept, as torch does, or with `reduce_state="mean"` the mean.
        "mean" takes a step that reduces nothing, too, where no other state depends on what differs: the mean of what
        SGD makes of each replica's gradient is what it makes of their mean, but that of Adam is not. (Keys may
        differ: the primary's is kept.)

        A program for pmap that holds arrays of shape (n, b, ...), one entry for each device, passes them without
        that axis, `x.reshape(-1, *x.shape[2:])`; or as they are, with "stacked" for their axis: a decoding cache
        with an index, the state of each device's environment, one padded graph for each device
        (`jax.tree.map(lambda *x: np.stack(x), *trees)`).

        Args:
            step_fn: `step_fn(state, *batch)`, with collectives of its own over `axis_name`.
            axis_name: the name it uses for the axis; None is the wrapper's.
            in_axes: an entry for each positional argument: an axis along which it is cut into chunks of rows, None for
                what is whole (state; a string or another object is part of the program), or "stacked" for pmap's own
                layout, one entry for each replica along the first axis, which the step does not see. An entry may be a
                tree of these, as in `jax.pmap`.
            out_axes: likewise for the results. None is one value: the primary's, where a result that is no state
                differs. "stacked" gives them as pmap does, and goes in again as such.
            static_broadcasted_argnums: positions of arguments that are part of the program, as in `jax.pmap`; the first
                of the others is the state.
            donate_argnums: positions of whole arguments whose arrays are freed, as in `jax.pmap`. Those that were not
                on every device yet are copied there, and stay. What is cut, and what NNX objects hold, is never freed.

        Raises:
            ValueError: chunks are uneven, and the step runs collectives; state is trained on one replica's rows;
                what is "stacked" has no entry for each replica.
            RuntimeError: an argument was donated already.

        Example:
            >>> import jax, jax.numpy as jnp, jdp, numpy as np
            >>> def step(w, x):
            ...     grad = jax.lax.pmean(jax.grad(lambda w: jnp.mean(w * x))(w), "batch")
            ...     return w - grad, jnp.sum(x)
            >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
            >>> w, sums = dp.parallel(step, axis_name="batch")(1.0, np.arange(3.0))
            >>> float(w), sums.tolist()
            (0.0, [3.0])
            >>> w, sums = dp.parallel(step, axis_name="batch", in_axes=(None, "stacked"))(1.0, np.arange(3.0)[None])
            >>> float(w), sums.tolist()
            (0.0, [3.0])

        Source: `pmap` in jax/_src/pmap.py.
        """
        options = _parallel.options(in_axes, out_axes, static_broadcasted_argnums, donate_argnums)
        return _parallel.parallel(self._config, step_fn, axis_name, options)
