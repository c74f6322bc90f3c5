"""Microbatches: `accumulate(one)` is `one(first) + one(second) + ...`, in the memory of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from .._core.layout import Tree
from .._jax.convolutions import canonical
from .state import first_difference


class Added(NamedTuple):
    """What a microbatch adds: sums, arrays with its rows along `axes`, and the state it leaves to the next."""

    sums: Tree
    rows: list[Any]
    state: Tree


One = Callable[[Any, Any, int, Tree], Added]
"""A microbatch, of its number, its first row, its number of rows and the state that the last one left."""


def accumulate(one: One, axes: Callable[[], tuple[int, ...]], state: Tree, rows: int, size: int, cpu: bool) -> Added:
    """All microbatches of `size` rows, and last one of the rest, one after the other; `axes()` once one was traced."""
    whole, rest = divmod(rows, size)
    if whole + bool(rest) <= 1:
        return one(0, 0, rows, state)
    done = _scan(one, axes, state, whole, size, cpu)
    if not rest:
        return done
    last = one(whole, whole * size, rest, done.state)
    sums = jax.tree.map(jnp.add, done.sums, last.sums)
    stacked = [jnp.concatenate(x, axis) for *x, axis in zip(done.rows, last.rows, axes(), strict=True)]
    return Added(sums, stacked, last.state)


def _scan(one: One, axes: Callable[[], tuple[int, ...]], state: Tree, n: int, size: int, cpu: bool) -> Added:
    # Traced by hand: for the shapes of the sums, and to see what of the state stays as it is.
    step = jax.make_jaxpr(lambda k, state: one(k, k * size, size, state), return_shape=True)
    jaxpr, shapes = step(jnp.int32(0), state)
    if jax.tree.structure(shapes.state) != jax.tree.structure(state):
        raise ValueError(
            f"jdp.accumulate_steps: the state{first_difference(shapes.state, state)} after a microbatch; microbatches "
            f"hand one tree on. Make the variable when the model is made, or pass accumulate_steps=1."
        )
    run = jax.extend.core.jaxpr_as_fun(canonical(jaxpr) if cpu else jaxpr)
    treedef = jax.tree.structure(shapes)

    def body(carry: tuple[Tree, Tree], k: Any) -> tuple[tuple[Tree, Tree], list[Any]]:
        sums, state = carry
        added = jax.tree.unflatten(treedef, run(k, *jax.tree.leaves(state)))
        # In the dtype of the sums, which is wider than that of 16-bit gradients.
        return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, added.sums), added.state), added.rows

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, _at_least(x.dtype))), shapes.sums)
    (sums, after), stacked = jax.lax.scan(body, (zeros, state), jnp.arange(n, dtype=jnp.int32))
    before, invars = jax.tree.leaves(state), jaxpr.jaxpr.invars[1:]
    kept = jaxpr.jaxpr.outvars[treedef.num_leaves - len(before) :]
    after = [
        old if out is var else new
        for old, new, var, out in zip(before, jax.tree.leaves(after), invars, kept, strict=True)
    ]
    stacked = [_one_after_the_other(x, axis) for x, axis in zip(stacked, axes(), strict=True)]
    return Added(sums, stacked, jax.tree.unflatten(jax.tree.structure(state), after))


def _at_least(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


def _one_after_the_other(x: Any, axis: int) -> Any:
    """`(microbatches, ..., rows, ...)` as `(..., microbatches * rows, ...)`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
