"""jit_of_state and jit_of_leaves make the compiled function of a training step's program, for a layout of the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._core.layout import Layout
from .._core.scattered import Scattered
from .compiler_options import Options
from .state import TrainState


def jit_of_state(program: Any, state: TrainState, layout: Layout, options: Options) -> Any:
    """The function of `(state, arrays of the batch)`: names in it are those of the state."""

    def train_step(state: TrainState, arrays: tuple[Any, ...]) -> tuple[TrainState, dict[str, Any]]:
        return program.step(state, Scattered(arrays, layout))

    return _jit(program, train_step, (0,), (None, layout.shardings), (program.shardings(state), None), options)


def jit_of_leaves(program: Any, state: TrainState, treedef: Any, layout: Layout, options: Options) -> Any:
    """The same of the state's leaves and the batch's arrays, one after the other; `of_leaves` reads what it gives.

    What calls it has looked at the leaves, and JAX need not flatten the state once more: it sorts the keys of every
    dict, and most of what a call costs in Python is that.
    """
    count = treedef.num_leaves

    def train_step(*operands: Any) -> tuple[Any, ...]:
        state, metrics = program.step(treedef.unflatten(operands[:count]), Scattered(operands[count:], layout))
        parts = (state.step, state.params), state.opt_state, (state.state, state.key)
        return tuple(map(jax.tree.leaves, parts)), metrics, _Tree(jax.tree.structure(state))

    where, to = (*[None] * count, *layout.shardings), program.shardings(state)
    cut = jax.tree.leaves(to.opt_state) if program.options.shard_optimizer else to.opt_state
    return _jit(program, train_step, tuple(range(count)), where, ((to.step, cut, to.step), None, None), options)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Tree:
    """A treedef as part of what a program gives."""

    treedef: Any


def of_leaves(out: Any) -> tuple[TrainState, list[Any], dict[str, Any]]:
    """`(state, its leaves, metrics)` of what a program of leaves gave."""
    (first, opt_state, last), metrics, tree = out
    leaves = [*first, *opt_state, *last]
    return tree.treedef.unflatten(leaves), leaves, metrics


def of_state(out: Any) -> tuple[TrainState, list[Any], dict[str, Any]]:
    """The same, of what a program of the state gave."""
    state, metrics = out
    return state, jax.tree.leaves(state), metrics


def _jit(program: Any, fn: Any, donated: tuple[int, ...], where: Any, to: Any, options: Options) -> Any:
    fn.__name__ = fn.__qualname__ = f"train_step_{program.label}"
    return jax.jit(
        fn,
        donate_argnums=donated if program.options.donate else (),
        in_shardings=where,
        out_shardings=to,
        compiler_options=options or None,
    )
