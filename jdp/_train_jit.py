"""jit_of_state and jit_of_leaves make the compiled function of a training step's program, for a layout of the batch."""

from __future__ import annotations

from typing import Any

import jax

from ._compiler_options import Options
from ._layout import Layout
from ._scattered import Scattered
from ._train_state import TrainState


def jit_of_state(program: Any, state: TrainState, layout: Layout, options: Options) -> Any:
    """The function of `(state, arrays of the batch)`: names in it are those of the state."""

    def train_step(state: TrainState, arrays: tuple[Any, ...]) -> tuple[TrainState, dict[str, Any]]:
        return program.step(state, Scattered(arrays, layout))

    return _jit(program, train_step, state, (0,), (None, layout.shardings), options)


def jit_of_leaves(program: Any, state: TrainState, treedef: Any, layout: Layout, options: Options) -> Any:
    """The same of the state's leaves and the batch's arrays, one after the other.

    What calls it has looked at the leaves, and JAX need not flatten the state once more: it sorts the keys of every
    dict, and most of what a call costs in Python is that.
    """
    count = treedef.num_leaves

    def train_step(*operands: Any) -> tuple[TrainState, dict[str, Any]]:
        return program.step(treedef.unflatten(operands[:count]), Scattered(operands[count:], layout))

    where = (*[None] * count, *layout.shardings)
    return _jit(program, train_step, state, tuple(range(count)), where, options)


def _jit(program: Any, fn: Any, state: TrainState, donated: tuple[int, ...], where: Any, options: Options) -> Any:
    fn.__name__ = fn.__qualname__ = f"train_step_{program.label}"
    return jax.jit(
        fn,
        donate_argnums=donated if program.options.donate else (),
        in_shardings=where,
        out_shardings=(program.shardings(state), None),
        compiler_options=options or None,
    )
