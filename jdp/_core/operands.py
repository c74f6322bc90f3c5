"""The arguments of a call as flat operands, and back: what goes through `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .layout import Cut, Layout, Leaf, Tree, Whole, is_key
from .scattered import Scattered, is_scattered, own


class Signature(NamedTuple):
    """All of a call but its arrays: how `(replicas, inputs, kwargs)` is made of flat operands."""

    treedef: Any
    nodes: tuple[Layout | None, ...]  # a scattered tree, or (None) one array that is whole on every replica
    weights: int  # how many of the operands are the replicas'
    layout: Layout  # the chunks that all agree on

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What each operand is."""
        return tuple(leaf for node in self.nodes for leaf in (node.arrays if node else (Whole(),)))

    @property
    def axis_name(self) -> str:
        return self.layout.mesh.axis_names[0]

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(
            PartitionSpec()
            if isinstance(leaf, Whole)
            else PartitionSpec(*[None] * (leaf.axis if isinstance(leaf, Cut) else 0), self.axis_name)
            for leaf in self.leaves
        )

    def arguments(self, operands: Sequence[Any], replica: int) -> tuple[Tree, Sequence[Any], dict[str, Any]]:
        """`(replicas, args, kwargs)` of a replica, out of what lies on its device: without the padding."""
        return self.fill(self.own(operands, replica))

    def own(self, operands: Sequence[Any], replica: int) -> list[Any]:
        """What lies on the replica's device, without the padding."""
        return [own(x, leaf, replica) for x, leaf in zip(operands, self.leaves, strict=True)]

    def fill(self, values: Sequence[Any]) -> tuple[Tree, Sequence[Any], dict[str, Any]]:
        """`(replicas, args, kwargs)` with these values for the operands."""
        rest = iter(values)
        values = [node.fill([next(rest) for _ in node.arrays]) if node else next(rest) for node in self.nodes]
        replicas, args, kwargs = jax.tree.unflatten(self.treedef, values)
        return replicas, args if type(args) in (tuple, list) else (args,), kwargs or {}

    def fold_keys(self, operands: Sequence[Any], index: Any) -> tuple[Any, ...]:
        """The operands, with each key among the inputs made the replica's own."""
        return tuple(
            fold_key(x, index) if i >= self.weights and isinstance(leaf, Whole) else x
            for i, (x, leaf) in enumerate(zip(operands, self.leaves, strict=True))
        )


def flatten_call(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> tuple[list[Any], Signature]:
    """The operands of a call, and its signature."""
    nodes, treedef = jax.tree.flatten((replicas, inputs, kwargs), is_leaf=is_scattered)
    operands = [x for node in nodes for x in (node._arrays if is_scattered(node) else (node,))]
    weights = len(operands) - sum(len(x._arrays) for x in (inputs, kwargs) if x is not None)
    layouts = tuple(node._layout if is_scattered(node) else None for node in nodes)
    return operands, Signature(treedef, layouts, weights, _common_layout([x for x in layouts if x]))


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
