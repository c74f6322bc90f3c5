"""`TrainState`: all that a training run carries from one step to the next."""

from __future__ import annotations

import difflib
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from .._core.layout import Tree, outline


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

    def __repr__(self) -> str:
        return outline("TrainState", self)


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


class Given:
    """What a step gave last. Only arrays that a step made may be donated to the next: all others are copied first."""

    def __init__(self, donates: bool) -> None:
        self.last: Any = None  # as the user got it
        self.leaves: Sequence[Any] = ()  # of the state
        self._donates = donates
        if donates:
            _steps.add(self)

    def keep(self, last: Any, leaves: Sequence[Any]) -> None:
        """Remembers what a step gives now."""
        if self._donates and self.leaves and not self.leaves[0].is_deleted():
            # Another state than the last went in, and the last is still good for a step.
            for x in self.leaves:
                _older[id(x)] = weakref.ref(x, functools.partial(_forget, id(x)))
        self.last, self.leaves = last, leaves

    def has(self, leaves: Sequence[Any]) -> bool:
        """Whether these are the leaves that it gave last. Each step asks it, so there is no Python for each leaf."""
        return len(leaves) == len(self.leaves) and all(map(operator.is_, leaves, self.leaves))

    def own(self) -> Callable[[Any], Any]:
        """A function that gives what a step made as it is, once, and a copy of all else that a step would donate."""
        if not self._donates:
            return lambda x: x
        made = {id(x) for step in _steps for x in step.leaves} | _older.keys()

        def own(x: Any) -> Any:
            if id(x) in made:
                made.discard(id(x))  # one array cannot be donated in two places
                return x
            if isinstance(x, np.ndarray):
                return x.copy()  # for JAX may use its memory as it is
            return jnp.copy(x) if isinstance(x, jax.Array) and not isinstance(x, Tracer) else x

        return own


_steps: weakref.WeakSet[Given] = weakref.WeakSet()
_older: dict[int, weakref.ref[Any]] = {}
"""Arrays that steps gave before their last, and that are not donated yet, by their id."""


def _forget(number: int, _: Any) -> None:
    _older.pop(number, None)


def refuse_more(more: Sequence[Any], spelling: str) -> None:
    """A `TypeError` for a batch in several arguments."""
    if more:
        raise TypeError(
            f"jdp.train_step: a step is called with {1 + len(more)} arguments for the batch; a batch is one tree of "
            f"arrays. Pass {spelling}, which loss_fn gets as its second argument."
        )


def no_attribute(step: Any, name: str) -> AttributeError:
    """The error for an attribute that a step has not."""
    has = [x for x in dir(type(step)) if not x.startswith("_")] + [x for x in vars(step) if not x.startswith("_")]
    near = difflib.get_close_matches(name, has, 1)
    way = f"Use step.{near[0]}" if near else "Use one of these"
    text = f"jdp.train_step: a {type(step).__name__} has no attribute {name!r}; it has {', '.join(sorted(has))}. {way}."
    return AttributeError(text, name=name, obj=step)


def interrupted(state: Tree, done: bool, what: str = "state", last: str = "step.last") -> str:
    """What is told beside a KeyboardInterrupt: where the state is that training goes on with."""
    if done:
        return f"jdp.train_step: interrupted when a step was done; {last} is the {what} after it. Go on with {last}."
    if any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted() for x in jax.tree.leaves(state)):
        return (
            f"jdp.train_step: interrupted twice, and the second time in the middle of a step; the {what} before it is "
            f"freed, that after it is lost. Go on with a checkpoint."
        )
    return f"jdp.train_step: interrupted before a step began; the {what} is as it was. Go on with the same {what}."
