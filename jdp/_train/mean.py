"""`Mean` and `Sum`: what a loss function returns that is no mean over rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean that is `total / count` over the whole batch: sums of both over all replicas, divided once.

    For a loss or a metric whose weight is not the number of rows: the loss per token of sentences
    that differ in length. Replicas and microbatches each give their own total and count. The count
    is a constant to the gradient.

    Args:
        total: the sum, 0-d for a loss; a metric may have a shape, which does not follow the rows.
        count: what it is a sum of: a number of tokens or a sum of weights, of the total's shape or 0-d.
            Both may be floats, integers or bools.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> def loss_fn(w, x, mask):
        ...     return jdp.Mean(jnp.sum(w * x * mask), jnp.sum(mask))
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> x, mask = np.array([[1.0, 2.0], [6.0, 8.0]]), np.array([[1, 1], [1, 0]])
        >>> float(dp.value_and_grad(loss_fn)(2.0, x, mask)[0])
        6.0

    Source: "Fixing gradient accumulation", as `num_items_in_batch` in transformers/trainer.py: a mean of means is
    no mean.
    """

    total: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A metric that is a sum over the whole batch: added up over all replicas, microbatches and processes.

    For what is neither a mean over rows nor an entry per row: a confusion matrix, a histogram, a number of hits.

    Args:
        total: the sum over the rows that the function was given. Any shape that does not follow the rows. Floats
            keep their dtype; integers and bools are added as 32 bits at least, as `jnp.sum` adds them.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> def loss_fn(w, x):
        ...     return jnp.mean(w * x), {"positive": jdp.Sum(jnp.sum(x > 0))}
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> (_, metrics), _ = dp.value_and_grad(loss_fn, has_aux=True)(2.0, np.array([-1.0, 3.0, 5.0]))
        >>> int(metrics["positive"])
        2

    Source: `dist_reduce_fx="sum"` of torchmetrics.
    """

    total: Any
