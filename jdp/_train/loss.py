"""A training step's loss function, in the form that `gradients` takes: for variables, and for NNX modules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
from flax import nnx

from .._core.layout import Tree
from .._core.outputs import Reduce
from .._model.linen import mark_state, unbox
from .._model.nnx import Held, leave, own_nodes, put_nodes
from .._model.sync_batch_norm import synced
from .gradients import Loss
from .state import first_difference

VERB = "train_step"
FORMS = ("loss", "(loss, metrics)", "(loss, metrics, updates)")


def check_signature(loss_fn: Callable[..., Any], first: str, key: bool | None = None) -> None:
    """A `TypeError` where a loss function does not take what a step passes; `key`: whether there is one (NNX: None)."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of C's
        return

    def takes(count: int) -> bool:
        try:
            signature.bind(*range(count))
        except TypeError:
            return False
        return True

    if takes(3 if key else 2):
        return
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    what, way = f"takes {signature}", "Put all that belongs to the batch into one tree"
    if takes(2) and key:
        what = "takes no third argument, and there is a key"
        way = "Leave key= out of step.init, or take it"
    elif takes(3):
        what = "takes a third argument, and there is no key"
        way = "Pass one: step.init(variables, key=jax.random.key(0))"
        if key is None:
            way = "Draw from an nnx.Rngs of the model (nnx.Dropout(..., rngs=rngs))"
    last = ", key" if key else ""
    raise TypeError(f"jdp.{VERB}: loss_fn {name} {what}; a step calls loss_fn({first}, batch{last}). {way}.")


def results_of(out: Any, reserved: Sequence[str], forms: tuple[str, ...] = FORMS) -> tuple[Any, dict[str, Any], Any]:
    """`(loss, metrics, updates)` of what a loss function returned; `reserved` are the metrics of the step itself."""
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


@contextlib.contextmanager
def rows_explained(batch: Tree) -> Iterator[None]:
    """Adds a note to what the loss function raises, where the batch looks like a list of its rows."""
    try:
        yield
    except Exception as error:
        rows = batch if type(batch) is list else []
        kinds = {(jax.tree.structure(row), *map(jnp.shape, jax.tree.leaves(row))) for row in rows}
        if len(kinds) == 1 and (len(rows) > 2 or len(rows) == 2 and not jax.tree_util.all_leaves(rows)):
            error.add_note(
                f"jdp.{VERB}: batch is a list of {len(rows)} parts of one shape, and each array in it is cut along an "
                f"axis of its own; a batch is one tree of arrays. If the parts are its rows, pass np.stack(rows)."
            )
        raise


def variables_loss(
    loss_fn: Callable[..., Any], reserved: Sequence[str], reduce_state: Reduce, axis_name: str, sync: bool
) -> Loss:
    """The loss of `loss_fn(variables, batch[, key])`: `diff` is the parameters.

    What is held is the other collections, and the NNX objects in the batch.
    """
    sync_over = axis_name if sync else None
    if sync:
        loss_fn = synced(loss_fn, axis_name)

    def compute(params: Tree, held: Held, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tree, Held]:
        collections = held.others
        nodes = None if held.graph is None else own_nodes(held.graph, (held.variables,), sync_over)
        if nodes is not None:
            args = put_nodes(args, nodes)
        with rows_explained(*args):
            out = loss_fn({"params": unbox(params), **collections}, *args, *kwargs.values())
        loss, metrics, updates = results_of(out, reserved)
        after = collections if updates is None else _updated(collections, updates)
        return loss, metrics, Held(after, held.graph, None if nodes is None else nnx.state(nodes))

    def leave_all(after: Held, before: Held) -> Tree:
        new, old = after.others, before.others
        marked = {name: mark_state(new[name], old[name], name, reduce_state, None) for name in old}
        return marked, leave(after, before, reduce_state)

    return Loss(compute, VERB, leave_all, sync=sync)


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
