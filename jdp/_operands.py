"""The arguments of a replica's call as flat arrays, and back: what goes through `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._check import is_key
from ._scattered import Cut, Layout, Leaf, Scattered, Tree, Whole, is_scattered


class Operands:
    """`(replicas, inputs, kwargs)`, flat: `arrays`, what each one is (`leaves`), and the chunks (`layout`)."""

    def __init__(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> None:
        self.nodes, self.treedef = jax.tree.flatten((replicas, inputs, kwargs), is_leaf=is_scattered)
        self.arrays: list[Any] = []
        self.leaves: list[Leaf] = []
        for node in self.nodes:
            self.arrays += node._arrays if is_scattered(node) else (node,)
            self.leaves += node._layout.arrays if is_scattered(node) else (Whole(),)
        self.layout = _common_layout([node._layout for node in self.nodes if is_scattered(node)])
        self.axis_name = self.layout.mesh.axis_names[0]
        self._weights = len(self.arrays) - sum(len(x._arrays) for x in (inputs, kwargs) if x is not None)

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(
            PartitionSpec()
            if isinstance(leaf, Whole)
            else PartitionSpec(*[None] * (leaf.axis if isinstance(leaf, Cut) else 0), self.axis_name)
            for leaf in self.leaves
        )

    def arguments(self, values: Sequence[Any]) -> tuple[Tree, Sequence[Any], dict[str, Any]]:
        """One replica's `(replicas, args, kwargs)`, of its own values."""
        rest = iter(values)
        own = [
            node._layout.fill([next(rest) for _ in node._arrays]) if is_scattered(node) else next(rest)
            for node in self.nodes
        ]
        replicas, args, kwargs = jax.tree.unflatten(self.treedef, own)
        return replicas, args if isinstance(args, tuple | list) else (args,), kwargs or {}

    def fold_keys(self, operands: Sequence[Any], index: Any) -> tuple[Any, ...]:
        """The operands, with each key among the inputs made the replica's own."""
        return tuple(
            fold_key(x, index) if i >= self._weights and isinstance(leaf, Whole) else x
            for i, (x, leaf) in enumerate(zip(operands, self.leaves, strict=True))
        )


def fold_key(x: Any, index: Any) -> Any:
    """A 0-d typed PRNG key, folded with the replica's index on every replica but the primary."""
    # The same key draws the same numbers on every replica. The primary's stays, and so does that
    # of one device alone: its numbers are those of the bare model.
    if not is_key(x) or x.ndim:
        return x
    return jnp.where(index == 0, x, jax.random.fold_in(x, index))


def _common_layout(layouts: Sequence[Layout]) -> Layout:
    """The layout whose chunks all agree on."""
    first = next((x for x in layouts if x.is_cut), layouts[0])
    for other in layouts:
        if other.mesh != first.mesh or other.is_cut and other.sizes != first.sizes:
            raise ValueError(
                f"jdp.parallel_apply: inputs have chunks {first.sizes} on {_names(first)}, others {other.sizes} on "
                f"{_names(other)}; all are cut alike. Scatter them together."
            )
    return first


def _names(layout: Layout) -> str:
    return ", ".join(str(d) for d in layout.devices)
