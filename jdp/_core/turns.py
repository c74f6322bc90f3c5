"""Runs the replicas of a device one after the other.

They run all at once (`jax.vmap`) if they communicate, or if a loop asks for the replica's index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax.rewrites import asks_inside_of, over_more, with_index
from .layout import Cut, Layout, Stack, is_key
from .outputs import Marked, Outputs, Way, in_32_bits
from .scattered import Signature
from .uneven import Bodies, BodyOf, collectives, run_body, trace_bodies

Turn = Callable[[Any, Sequence[Any]], Outputs]
"""`turn(number, chunks)` runs one replica, by its number on the device, on its chunks, and returns its outputs."""


def take_turns(body_of: BodyOf, operands: Sequence[Any], signature: Signature, device: Any) -> Outputs:
    """Runs a device's replicas; returns their outputs as if there were one: chunks one after the other, sums added.

    `body_of(replica)` is the user's function on that replica's size of chunk; `device` is the device's index.
    """
    layout, axis_name, pairs = signature.layout, signature.axis_name, [*zip(operands, signature.leaves, strict=True)]
    chunks = [_taken_apart(x, leaf.axis, layout.per_device) for x, leaf in pairs if isinstance(leaf, Cut | Stack)]

    def operands_of(mine: Sequence[Any], index: Any) -> tuple[Any, ...]:
        rest = iter(mine)
        return signature.fold_keys([next(rest) if isinstance(leaf, Cut | Stack) else x for x, leaf in pairs], index)

    bodies = trace_bodies(body_of, operands_of([x[0] for x in chunks], device), signature)

    # Side by side (under vmap), JAX itself knows a replica's index, also in loops.
    asks_in_a_loop = any(asks_inside_of(body.jaxpr, axis_name) is not None for body in bodies.values())
    are_side_by_side = asks_in_a_loop or _meet(bodies, axis_name)

    def settled(jaxpr: Any, index: Any) -> Any:
        """Returns the jaxpr of a body with its collectives, or the replica's index, resolved."""
        return _over_all(jaxpr, axis_name, layout) if are_side_by_side else with_index(jaxpr, axis_name, index)

    def turn(number: Any, mine: Sequence[Any]) -> Outputs:
        index = device * layout.per_device + number
        own = {sizes: body._replace(jaxpr=settled(body.jaxpr, index)) for sizes, body in bodies.items()}
        return weighted(run_body(own, operands_of(mine, index), signature, index), index)

    return (_side_by_side if are_side_by_side else _one_after_the_other)(turn, chunks, layout)


def _taken_apart(x: Any, axis: int, count: int) -> Any:
    """Splits an array of a device into the parts of its replicas, stacked along a new first axis."""
    parts = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


def _meet(bodies: Bodies, axis_name: str) -> bool:
    """Returns True if the replicas run collectives, `sync_batch_norm`'s included."""
    jaxprs = [body.jaxpr.jaxpr for body in bodies.values()]
    return any([*collectives(jaxpr, axis_name, synced)] for jaxpr in jaxprs for synced in (False, True))


def weighted(out: Outputs, index: Any) -> Outputs:
    """Multiplies each mean by the replica's share of its device's rows, in 32 bits or more; `rule.dtype` is kept."""
    rows = np.reshape(out.layout.rows, (-1, out.layout.per_device)).astype(float)
    weights = (rows / np.maximum(rows.sum(1, keepdims=True), 1)).reshape(-1)

    def part(x: Any, rule: Marked) -> tuple[Any, Marked]:
        if not out.is_mean(x, rule):
            return x, rule
        rule, x = dataclasses.replace(rule, dtype=rule.dtype or x.dtype), in_32_bits(x)
        mine = jnp.asarray(weights, jnp.finfo(x.dtype).dtype)[index]
        return jnp.where(mine > 0, x * mine, jnp.zeros_like(x)), rule

    parts = [part(x, rule) for x, rule in zip(out.values, out.rules, strict=True)]
    return dataclasses.replace(out, values=[x for x, _ in parts], rules=tuple(rule for _, rule in parts))


def _one_of_all(x: Any, way: Way, rule: Marked, layout: Layout) -> Any:
    """Combines the values of a device's replicas, stacked along the first axis, into one."""
    if way == "sum":
        return x.sum(0, dtype=x.dtype)
    if way == "rows":
        axis = rule.axis or 0
        return x if x.ndim == 1 else jax.lax.collapse(jnp.moveaxis(x, 0, axis), axis, axis + 2)
    return x[layout.primary[1]]


def _one_after_the_other(turn: Turn, chunks: list[Any], layout: Layout) -> Outputs:
    """Runs the replicas in a loop, which carries sums and the primary's values: those of one replica are in memory."""
    numbers, (_, primary) = jnp.arange(layout.per_device, dtype=jnp.int32), layout.primary
    out = jax.eval_shape(turn, numbers[0], [x[0] for x in chunks])
    each = [*zip(out.values, out.ways, out.rules, strict=True)]
    # Outputs with rows are stacked; so are keys, because the loop's carry would have to begin with a key of zeros.
    are_carried = [way == "sum" or way != "rows" and not is_key(x) for x, way, _ in each]

    def step(before: list[Any], xs: tuple[Any, Sequence[Any]]) -> tuple[list[Any], list[Any]]:
        number, mine = xs
        found, stacked = [], []
        kept = iter(before)
        for x, way, is_carried in zip(turn(number, mine).values, out.ways, are_carried, strict=True):
            if not is_carried:
                stacked.append(x)
            elif way == "sum":
                found.append(next(kept) + x)
            else:
                found.append(jnp.where(number == primary, x, next(kept)))
        return found, stacked

    start = [jnp.zeros(x.shape, x.dtype) for x, is_carried in zip(out.values, are_carried, strict=True) if is_carried]
    kept, stacked = map(iter, jax.lax.scan(step, start, (numbers, chunks)))
    values = [
        next(kept) if is_carried else _one_of_all(next(stacked), way, rule, layout)
        for is_carried, (_, way, rule) in zip(are_carried, each, strict=True)
    ]
    return dataclasses.replace(out, values=values)


_LANES = "jdp_replicas_of_a_device"


def _side_by_side(turn: Turn, chunks: list[Any], layout: Layout) -> Outputs:
    """Runs the replicas at once, in the memory of all, as the lanes of a vmap."""
    found: list[Outputs] = []

    def run(number: Any, mine: Sequence[Any]) -> list[Any]:
        found.append(turn(number, mine))
        return found[-1].values

    stacked = jax.vmap(run, axis_name=_LANES)(jnp.arange(layout.per_device, dtype=jnp.int32), chunks)
    out = found[-1]
    values = [_one_of_all(x, way, rule, layout) for x, way, rule in zip(stacked, out.ways, out.rules, strict=True)]
    return dataclasses.replace(out, values=values)


def _over_all(jaxpr: Any, axis_name: str, layout: Layout) -> Any:
    """Returns a replica's jaxpr with collectives that reach the other replicas of its device, and those elsewhere."""

    def refuse(name: str) -> ValueError:
        return ValueError(
            f"jdp.parallel_apply: the model runs {name} over {axis_name!r}, and {layout.mesh.size} devices have "
            f"{layout.per_device} replicas each; then only psum, pmean, pmax and pmin over all replicas work. Use one "
            f"of these, or as many devices as replicas."
        )

    return over_more(jaxpr, axis_name, _LANES, layout.per_device, refuse)
