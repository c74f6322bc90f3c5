"""Several replicas on a device take turns; they run side by side if they meet, or if a loop asks for their index."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._jax.rewrites import OutOfReach, over_more, with_index
from .layout import Cut, Layout, Stack, is_key
from .outputs import Marked, Outputs
from .scattered import Signature
from .uneven import Bodies, BodyOf, collectives, run_body, trace_bodies

Turn = Callable[[Any, Sequence[Any]], Outputs]
"""What one replica does: its outputs, of its number on the device and of its chunks."""


def take_turns(body_of: BodyOf, operands: Sequence[Any], signature: Signature, device: Any) -> Outputs:
    """Returns the outputs of a device's replicas, put together as those of one: chunks one after the other, sums added.

    `body_of(replica)` is the user's function on that replica's size of chunk; `device` is the device's index.
    """
    layout, axis_name, pairs = signature.layout, signature.axis_name, [*zip(operands, signature.leaves, strict=True)]
    chunks = [_taken_apart(x, leaf.axis, layout.per_device) for x, leaf in pairs if isinstance(leaf, Cut | Stack)]

    def operands_of(mine: Sequence[Any], index: Any) -> tuple[Any, ...]:
        rest = iter(mine)
        return signature.fold_keys([next(rest) if isinstance(leaf, Cut | Stack) else x for x, leaf in pairs], index)

    bodies = trace_bodies(body_of, operands_of([x[0] for x in chunks], device), signature)

    def turn(settled: Callable[[Any, Any], Any]) -> Turn:
        """Returns a replica's turn; `settled(jaxpr, index)` is the jaxpr with its index and collectives resolved."""

        def run(number: Any, mine: Sequence[Any]) -> Outputs:
            index = device * layout.per_device + number
            own = {sizes: body._replace(jaxpr=settled(body.jaxpr, index)) for sizes, body in bodies.items()}
            return weighted(run_body(own, operands_of(mine, index), signature, index), index)

        return run

    if not _meet(bodies, axis_name):
        try:
            return _one_after_the_other(turn(lambda jaxpr, index: with_index(jaxpr, axis_name, index)), chunks, layout)
        except OutOfReach:  # side by side JAX itself knows a replica's index, in loops too
            pass
    return _side_by_side(turn(lambda jaxpr, _: _over_all(jaxpr, axis_name, layout)), chunks, layout)


def _taken_apart(x: Any, axis: int, count: int) -> Any:
    """Returns what lies on a device, with one entry for each of its replicas along the first axis."""
    parts = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


def _meet(bodies: Bodies, axis_name: str) -> bool:
    """Returns True if the replicas wait for each other somewhere."""
    jaxprs = [body.jaxpr.jaxpr for body in bodies.values()]
    return any([*collectives(jaxpr, axis_name, synced)] for jaxpr in jaxprs for synced in (False, True))


def weighted(out: Outputs, index: Any) -> Outputs:
    """Multiplies each output that is a mean by the replica's share of its device's rows."""
    rows = np.reshape(out.layout.rows, (-1, out.layout.per_device)).astype(float)
    weights = (rows / np.maximum(rows.sum(1, keepdims=True), 1)).reshape(-1)

    def part(x: Any, rule: Marked) -> Any:
        if not out.is_mean(x, rule):
            return x
        mine = jnp.asarray(weights, jnp.finfo(x.dtype).dtype)[index]
        return jnp.where(mine > 0, x * mine, jnp.zeros_like(x))

    return dataclasses.replace(out, values=[part(x, rule) for x, rule in zip(out.values, out.rules, strict=True)])


class _Way(NamedTuple):
    """How the values of a device's replicas become one."""

    axis: int | None = None  # along which chunks are put together
    taken: int | None = None  # the replica whose value it is; where both are None, they are added
    stacks: bool = True  # whether the values of all are there at a time

    def of(self, x: Any) -> Any:
        """Makes one value of those of all replicas, which lie along the first axis."""
        if self.taken is not None:
            return x[self.taken]
        if self.axis is None:
            return x.sum(0, dtype=x.dtype)
        return x if x.ndim == 1 else jax.lax.collapse(jnp.moveaxis(x, 0, self.axis), self.axis, self.axis + 2)


def _ways(out: Outputs) -> list[_Way]:
    layout = out.layout
    primary = layout.used[0] % layout.per_device if layout.used else 0

    def way(x: Any, rule: Marked) -> _Way:
        if rule.axis is not None:
            return _Way(axis=rule.axis)
        if rule.reduce == "sum" or out.is_mean(x, rule):
            return _Way(stacks=False)
        return _Way(taken=primary, stacks=is_key(x))  # a loop cannot begin with a key of zeros

    return [way(x, rule) for x, rule in zip(out.values, out.rules, strict=True)]


def _one_after_the_other(turn: Turn, chunks: list[Any], layout: Layout) -> Outputs:
    """Runs the replicas in a loop, in the memory of one: what is added, or is one replica's, is there once."""
    numbers = jnp.arange(layout.per_device, dtype=jnp.int32)
    out = jax.eval_shape(turn, numbers[0], [x[0] for x in chunks])
    ways = _ways(out)

    def step(before: list[Any], xs: tuple[Any, Sequence[Any]]) -> tuple[list[Any], list[Any]]:
        number, mine = xs
        found, stacked = [], []
        kept = iter(before)
        for x, way in zip(turn(number, mine).values, ways, strict=True):
            if way.stacks:
                stacked.append(x)
            elif way.taken is None:
                found.append(next(kept) + x)
            else:
                found.append(jnp.where(number == way.taken, x, next(kept)))
        return found, stacked

    start = [jnp.zeros(x.shape, x.dtype) for x, way in zip(out.values, ways, strict=True) if not way.stacks]
    kept, stacked = map(iter, jax.lax.scan(step, start, (numbers, chunks)))
    return dataclasses.replace(out, values=[way.of(next(stacked)) if way.stacks else next(kept) for way in ways])


_LANES = "jdp_replicas_of_a_device"


def _side_by_side(turn: Turn, chunks: list[Any], layout: Layout) -> Outputs:
    """Runs the replicas at once, in the memory of all, along an axis of their own."""
    found: list[Outputs] = []

    def run(number: Any, mine: Sequence[Any]) -> list[Any]:
        found.append(turn(number, mine))
        return found[-1].values

    stacked = jax.vmap(run, axis_name=_LANES)(jnp.arange(layout.per_device, dtype=jnp.int32), chunks)
    ways = _ways(found[-1])
    return dataclasses.replace(found[-1], values=[way.of(x) for x, way in zip(stacked, ways, strict=True)])


def _over_all(jaxpr: Any, axis_name: str, layout: Layout) -> Any:
    """Returns the jaxpr of a replica whose collectives reach the others of its device, and those elsewhere."""

    def refuse(name: str) -> ValueError:
        return ValueError(
            f"jdp.parallel_apply: the model runs {name} over {axis_name!r}, and {layout.mesh.size} devices have "
            f"{layout.per_device} replicas each; psum, pmean, pmax and pmin of all reach those of one device. Use "
            f"these, or as many devices as replicas."
        )

    return over_more(jaxpr, axis_name, _LANES, layout.per_device, refuse)
