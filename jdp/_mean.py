"""`Mean`: a total and a count, which are summed before they are divided."""

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
        total: the sum, 0-d for a loss; a metric may have a shape.
        count: what it is a sum of: a number of tokens or a sum of weights, of the total's shape or 0-d.

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
