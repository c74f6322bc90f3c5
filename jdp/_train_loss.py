"""A training step's loss function, in the form that `gradients` takes: for variables, and for NNX modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.core

from ._layout import Tree
from ._linen import mark_state, unbox
from ._microbatch import Loss
from ._outputs import Reduce
from ._sync_batch_norm import synced
from ._train_state import first_difference

VERB = "train_step"


FORMS = ("loss", "(loss, metrics)", "(loss, metrics, updates)")


def returned(out: Any, reserved: Sequence[str], forms: tuple[str, ...] = FORMS) -> tuple[Any, dict[str, Any], Any]:
    """`(loss, metrics, updates)` of what a loss function returned.

    Raises:
        TypeError: it is another tuple, or metrics are no dict.
        ValueError: a metric has a name that the step gives.
    """
    parts = tuple(out) if isinstance(out, tuple | list) else (out,)
    if not 1 <= len(parts) <= len(forms):
        raise TypeError(
            f"jdp.{VERB}: loss_fn returns a {type(out).__name__} of {len(parts)}; it returns {' or '.join(forms)}. "
            f"Return one of these."
        )
    loss, metrics, updates = (*parts, *[None] * (3 - len(parts)))
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"jdp.{VERB}: the metrics are a {type(metrics).__name__}; each has a name. Return them as a dict, "
            f"{{'accuracy': ...}}."
        )
    clash = [name for name in reserved if name in metrics]
    if clash:
        raise ValueError(
            f"jdp.{VERB}: a metric is called {clash[0]!r}; the step gives one of that name itself. Give yours another."
        )
    return loss, dict(metrics), updates


def variables_loss(
    loss_fn: Callable[..., Any], reserved: Sequence[str], reduce_state: Reduce, sync_over: str | None
) -> Loss:
    """The loss of `loss_fn(variables, batch[, key])`: `diff` is the parameters, `state` the other collections."""
    if sync_over is not None:
        loss_fn = synced(loss_fn, sync_over)

    def compute(params: Tree, state: Tree, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tree, Tree]:
        out = loss_fn({"params": unbox(params), **state}, *args, *kwargs.values())
        loss, metrics, updates = returned(out, reserved)
        return loss, metrics, state if updates is None else _updated(state, updates)

    def leave(after: Tree, before: Tree) -> Tree:
        return {name: mark_state(after[name], before[name], name, reduce_state, None) for name in before}

    return Loss(compute, VERB, leave=leave, sync=sync_over is not None)


def _updated(state: Mapping[str, Tree], updates: Any) -> dict[str, Tree]:
    if not isinstance(updates, Mapping):
        raise TypeError(
            f"jdp.{VERB}: the updates are a {type(updates).__name__}; they are collections by name. Return what "
            f"model.apply(..., mutable=['batch_stats']) gives beside its output."
        )
    updates = flax.core.unfreeze(dict(updates))
    for name, collection in updates.items():
        if name not in state:
            what = "holds the parameters, which the optimizer updates" if name == "params" else "is not in the state"
            raise ValueError(
                f"jdp.{VERB}: the updates have a collection {name!r}, which {what}; the state has "
                f"{sorted(state) or 'none'}. Leave it out of the updates, or pass it to step.init with the variables."
            )
        difference = first_difference(collection, state[name], dtypes=False)  # those are made what they were
        if difference is not None:
            raise ValueError(
                f"jdp.{VERB}: updates[{name!r}]{difference}; the state keeps its tree and shapes from step to step. "
                f"Return all of the collection and nothing else."
            )
    return {**state, **updates}
