"""`TrainState`: all that a training run carries from one step to the next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ._layout import Tree


class TrainState(struct.PyTreeNode):
    """What a step takes and gives back: a plain pytree, in whose shapes is no number of devices.

    Made by `step.init`; Orbax saves and restores it, onto any number of devices. `state.replace(...)`
    is the state with other parts.

    Attributes:
        step: the number of updates so far, a 0-d int32.
        params: `variables["params"]`, whole on every replica.
        opt_state: the optimizer's state; cut over the replicas with `shard_optimizer=True`.
        state: the other collections of the variables (`batch_stats`), by name.
        key: the typed PRNG key that the steps' keys are made of, or None.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np, optax
        >>> dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=[0])
        >>> step = dp.train_step(lambda v, x: jnp.mean(dp(v, x)), optax.sgd(0.5))
        >>> state = step.init({"params": np.ones(2, np.float32)})
        >>> state, metrics = step(state, np.ones((3, 2), np.float32))
        >>> int(state.step), state.params.tolist(), float(metrics["loss"])
        (1, [0.5, 0.5], 2.0)

    Source: `TrainState` in flax/training/train_state.py.
    """

    step: Any
    params: Tree
    opt_state: Tree
    state: Tree
    key: Any = None


def first_difference(found: Tree, expected: Tree, dtypes: bool = True) -> str | None:
    """The first path at which two trees of arrays differ in structure, shape or dtype, and how; None if nowhere."""
    a, b = ({jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(t)} for t in (found, expected))
    for path in [*b, *(p for p in a if p not in b)]:
        if path not in a or path not in b:
            return f"{path} is {'missing' if path not in a else 'not expected'}"
        if jnp.shape(a[path]) != jnp.shape(b[path]) or dtypes and a[path].dtype != b[path].dtype:
            return f"{path} is {_short(a[path])}, {_short(b[path])} is expected"
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return f"the tree is {jax.tree.structure(found)}, {jax.tree.structure(expected)} is expected"
    return None


def _short(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}"


def refuse_deleted(state: Tree, leaves: list[Any], root: str = "state") -> None:
    """A `RuntimeError` for arrays that an earlier step has freed: JAX passes them on, and may crash."""
    try:
        # Each step asks each leaf: no Python for it, and not even the look-up of a method.
        if not any(map(type(leaves[0]).is_deleted, leaves)):
            return
    except (AttributeError, TypeError):  # of several types: a key among arrays; numbers, tracers; a tree for an array
        leaves = jax.tree.leaves(leaves)
        kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}  # to which no tracer belongs
        if not any(x.is_deleted() for x in leaves if type(x) in kinds):
            return
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if issubclass(type(x), jax.Array) and x.is_deleted():
            raise RuntimeError(
                f"jdp.train_step: {root}{jax.tree_util.keystr(path)} was donated to an earlier step, which has freed "
                f"it; a state is good for one step. Pass on the state that the last step returned (to keep one, "
                f"jax.tree.map(jnp.copy, state)), or make the step with donate=False."
            )
