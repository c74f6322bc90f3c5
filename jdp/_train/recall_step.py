"""recall_step runs a step like the one before it: on the state that it gave, and a batch that is cut the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax._src.core import eval_trace, trace_state_strong_ref  # not public; trace_ctx.trace, without its Python frame

from .._core.layout import Tree
from .._core.programs import hold, may_deadlock, run_and_keep
from .._core.scattered import Scattered
from .program import Flat, Keep, Program, of_leaves
from .state import Given, TrainState, refuse_deleted


class KnownStep(NamedTuple):
    """A step that ran: what it takes to run its program again."""

    treedef: Any  # of the state
    program: Any  # of the state's leaves and the batch's arrays
    waits: bool  # for the steps before it


def known_by(batch: Tree) -> tuple[Any, Sequence[Any]]:
    """What decides how a batch is cut, and its arrays as they are; None for containers and leaves that are seldom."""
    # Written out, for what a step on a small model takes: a general flatten is a call back into Python for each leaf.
    kind = type(batch)
    if kind is Scattered:
        return batch._layout.token, batch._arrays
    key: list[Any] = [kind]
    arrays: list[Any] = []
    if kind is tuple or kind is list:
        pass
    elif kind is dict:
        try:
            names = sorted(batch)  # as JAX flattens it
        except TypeError:
            return None, arrays
        key.append(tuple(names))
        batch = [batch[name] for name in names]
    elif kind is np.ndarray:
        batch = (batch,)
    else:
        return None, arrays
    for x in batch:
        if type(x) is Scattered:
            key.append(x._layout.token)
            arrays += x._arrays
        elif type(x) is np.ndarray:
            key += x.shape, x.dtype
            arrays.append(x)
        else:
            return None, arrays
    return tuple(key), arrays


def recall_step(
    known: KnownStep, given: Given, arrays: Sequence[Any], keep: Keep
) -> tuple[TrainState, dict[str, Any]] | None:
    """What the step gives, on the last state; None where all of it has to be looked at, or where JAX refuses it."""
    if trace_state_strong_ref.value is not eval_trace:
        return None
    state = given.last
    try:
        # Makes no treedef to compare, as flatten would; and none is the key of a dict, for which each name in it would
        # have to be hashed.
        leaves = known.treedef.flatten_up_to(state)
        refuse_deleted(state, leaves)
    except (TypeError, ValueError):  # somebody put another tree into it
        return None
    if not given.has(leaves):
        return None  # or another array
    try:
        found = run_and_keep(known.program, (*leaves, *arrays), lambda out: keep(*of_leaves(out)))
    except (TypeError, ValueError) as error:
        if "operands[" in str(error):  # JAX refuses one of the arguments, and nothing has run
            return None
        raise
    if known.waits:
        hold(found[1]["loss"])
    return found


def known_step(program: Program, state: TrainState, batch: Scattered, flat: Flat) -> KnownStep:
    """Of a step that has run, what it takes to run it again with a batch of that layout."""
    layout, treedef = batch._layout, flat[1]
    return KnownStep(treedef, program.of_leaves(state, treedef, layout), may_deadlock(layout.mesh))
