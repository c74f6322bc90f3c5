"""Finds which replica, and which of its rows, caused a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.devices import Device
from .._core.layout import Tree
from .._core.outputs import Marked
from .._core.parallel_apply import CallOf, on_replicas
from .._core.scattered import Scattered, Signature
from .._model.nnx import enter
from .criterion import Run, as_second_pass
from .forms import SeveralTerms
from .gradients import Loss, differentiate, results_of_replica, rows_of


class Nonfinite(NamedTuple):
    """A replica whose gradient is not finite, with the rows (of its process's batch) and the parameters concerned."""

    replica: int
    device: Device
    rows: tuple[int, ...]
    paths: tuple[str, ...]

    def __repr__(self) -> str:
        def few(values: tuple[Any, ...]) -> str:
            more = [f"... and {len(values) - 6} more"] if len(values) > 6 else []
            return f"({', '.join([*map(str, values[:6]), *more])})"

        rows, paths = few(self.rows), few(self.paths)
        return f"Nonfinite(replica={self.replica}, device={self.device}, rows={rows}, paths={paths})"


def all_finite(tree: Tree) -> jax.Array:
    """Returns one flag for each array: True if all of its entries are finite."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)], bool)


def flags(loss: Loss, steps: int) -> CallOf:
    """Returns what a replica runs to find which parameters, and which rows, have finite gradients."""

    def call_of(signature: Signature, replica: int) -> Callable[..., tuple[Marked, Marked]]:
        rows = signature.layout.sizes[replica] if signature.layout.is_cut else 1

        def call(*operands: Any) -> tuple[Marked, Marked]:
            values = signature.values_of_replica(operands, replica)
            (diff, before), _, _ = signature.fill(values)
            state = enter(before, signature.axis_name)
            added, _ = results_of_replica(loss, steps, signature, replica, values, diff, before)
            params = all_finite(added.sums[1])

            def alone(k: Any) -> Any:
                # The gradient of one row alone, with the chunk's random keys.
                part = rows_of(values, signature, rows, 0, k, 1)
                added = differentiate(loss, signature, replica, part, diff, state, 1, 1.0, was_accepted=True)
                return all_finite(added.sums[1]).all()

            return Marked(params[None], 0), Marked(jax.lax.map(alone, jnp.arange(rows)), 0)

        return call

    return call_of


def flags_on_replicas(loss: Loss, steps: int, name: str) -> Run:
    """Returns a function that finds for each replica and each row whether the gradient is finite."""
    directly = on_replicas(flags(loss, steps), name)
    in_two = as_second_pass(flags(loss._replace(is_backward=True), steps), loss, steps, name)

    def run(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        if loss.criterion is None:
            try:
                return directly(replicas, inputs, kwargs)
            except SeveralTerms:
                pass
        return in_two(replicas, inputs, kwargs)

    run.__name__ = run.__qualname__ = name
    return run


def report(found: Scattered, params: Tree) -> list[Nonfinite]:
    """Returns an entry for each replica whose gradient `flags` found not to be finite."""
    if not jax.tree.leaves(params):
        return []
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    layout = found._layout
    everywhere = jax.jit(lambda *arrays: arrays, out_shardings=layout.mesh.replicated)
    flags = [np.asarray(x) for x in everywhere(*found._arrays)]
    starts: dict[int, int] = {}  # by process: the number of the next row in its batch
    entries = []
    for i, size in enumerate(found.sizes):
        holder = layout.devices[i].process_index
        start = starts.setdefault(holder, 0)
        starts[holder] += size
        finite, by_row = (np.split(x, len(layout.devices))[i] for x in flags)
        if size and not finite.all():
            bad = np.flatnonzero(~by_row[:size])
            rows = bad if len(bad) else np.arange(size)
            paths = tuple(name for name, ok in zip(names, finite[0], strict=True) if not ok)
            entries.append(Nonfinite(i, found.devices[i], tuple(int(start + row) for row in rows), paths))
    return entries
