"""Known steps: where the state that a step returned comes with a batch of known shapes, the program runs at once.

The usual way looks at each array of the batch, and at all that may surround the call. Here only the trees are compared,
and the compiled program is called: JAX compares shapes, dtypes and precisions in any case. If one of these is new, JAX
begins to trace the program again. Our function raises `Retraced` in that trace, and the step takes the usual way.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._core.inputs import NESTED, is_deep
from .._core.layout import Tree
from .._core.programs import dispatch_step, is_plain, is_watched
from .._core.replica_mesh import cut_off
from .._core.scattered import Scattered
from .program import Keep, Program, Retraced, of_leaves, raise_nonfinite, takes_options
from .state import Given, TrainState, refuse_deleted

flatten = jax.tree_util.default_registry.flatten  # without the Python around it


def step_again(
    program: Program, state: TrainState, batch: Tree, given: Given, keep: Keep
) -> tuple[Any, dict[str, Any]] | None:
    """Dispatches a known step on the state that the last one returned; returns None if anything about it is new."""
    if cut_off or is_watched() or not jax.sharding.get_abstract_mesh().empty:
        return None
    try:
        found = None if type(batch) in NESTED and is_deep(batch) else _looked_up(program, state, batch)
    except (TypeError, ValueError):  # keys that do not compare, for example
        return None
    if found is None:
        return None
    run, leaves, arrays, key = found
    if not given.has(leaves):
        return None
    placed = [x for x in arrays if type(x) is not np.ndarray]
    if placed and (any(isinstance(x, Tracer) for x in placed) or not set(map(id, placed)).isdisjoint(map(id, leaves))):
        return None
    refuse_deleted(state, leaves)  # JAX would pass freed arrays on, and may crash
    try:
        return dispatch_step(run, program.config.mesh, (*leaves, *arrays), lambda out: keep(*of_leaves(out)))
    except Exception as error:
        if isinstance(error, Retraced | TypeError | ValueError) and not any(x.is_deleted() for x in leaves):
            program.known.pop(key, None)
            return None  # the usual way names what is wrong
        raise_nonfinite(error)
        raise


def _looked_up(program: Program, state: TrainState, batch: Tree) -> tuple[Any, list[Any], list[Any], Any] | None:
    """Returns the program of a known step, the leaves of the state, the arrays of the batch, and its key."""
    arrays, of_batch = flatten(batch)
    key = getattr(arrays[0], "shape", None) if arrays else None
    entry = program.known.get(key)
    if entry is None:
        return None
    leaves, of_state = flatten(state)
    run, *trees = entry
    return (run, leaves, arrays, key) if trees == [of_state, of_batch] else None


def remember_step(program: Program, of_state: Any, batch: Tree, scattered: Scattered, loss: Any) -> None:
    """Remembers the program that has just run, with the treedefs, if these and the shapes tell how the batch is cut.

    So the batch has to be all arrays, which were passed on unchanged.
    """
    layout, options = scattered._layout, program.options
    run = program.compiled.get((layout, of_state, False))
    if (
        run is None
        or options.check_replicas
        or isinstance(loss, Tracer)
        or not is_plain()
        or takes_options(layout.mesh)
    ):
        return
    if layout.mesh.spans_processes or options.deterministic or not layout.is_even and scattered is not batch:
        return
    arrays, of_batch = flatten(batch)
    given = scattered._arrays
    if arrays and len(arrays) == len(given) and all(x is y for x, y in zip(arrays, given, strict=True)):
        program.known[getattr(arrays[0], "shape", None)] = run, of_state, of_batch
