"""A loss of parameters that are cut over the replicas: how it gets them whole, and where their gradients are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .._core.layout import Shard, Tree
from .._core.outputs import path_name
from .._core.scattered import Signature
from .._core.shards import MOST_AT_ONCE, GatherOf, parts_of, refuse_constants, summing, whole_shape
from .._jax.pieces import Sharded, run_in_pieces


def axes_of_shards(signature: Signature) -> Tree:
    """For each leaf of what a gradient is taken of the axis that it is cut along; -1 where it is whole."""
    (axes, _), _, _ = signature.fill([leaf.axis if isinstance(leaf, Shard) else -1 for leaf in signature.leaves])
    return axes


class Shards(NamedTuple):
    """Of what a gradient is taken of, what is cut over the replicas, and how the loss gets it whole."""

    leaves: list[Any]
    names: list[str]
    axes: list[int]  # -1 where a leaf is whole
    treedef: Any
    mesh: Mesh
    summing: GatherOf
    parts: GatherOf | None  # where microbatches are added before anything is summed

    @staticmethod
    def of(signature: Signature, diff: Tree, axes: Tree, wire: Any, several: bool) -> Shards | None:
        """None where all of them are gathered already."""
        if not signature.holds_shards:
            return None
        leaves, treedef = jax.tree.flatten(diff)
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(diff)]
        name = signature.axis_name
        gathers = summing(name, wire, float(sum(signature.layout.sizes))), parts_of(name) if several else None
        return Shards(leaves, names, jax.tree.leaves(axes), treedef, signature.layout.mesh, *gathers)

    @property
    def apart(self) -> bool:
        """Whether the gradients of the replicas are still to be summed."""
        return self.parts is not None

    def shapes(self) -> Tree:
        """The shapes of the whole arrays."""
        pairs = zip(self.leaves, self.axes, strict=True)
        return self.treedef.unflatten([x if axis < 0 else whole_shape(x, axis, self.mesh.size) for x, axis in pairs])

    def taken(self) -> Tree:
        """What the gradient is taken of: what is cut itself, or zeros in the places of the whole arrays."""
        if not self.apart:
            return self.treedef.unflatten(self.leaves)
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, self.shapes()
        )

    def at(self, number: Any) -> Shards:
        """For a microbatch of this number: or the compiler gathers once, outside of the loop."""
        return self._replace(leaves=jax.lax.optimization_barrier((self.leaves, number))[0]) if self.apart else self

    def function(self, jaxpr: Any, shapes: Tree) -> Callable[..., Any]:
        """The function that a jaxpr was traced from, of what is taken in place of the whole arrays."""
        cut = [(x, axis) for x, axis in zip(self.leaves, self.axes, strict=True) if axis >= 0]
        refuse_constants(jaxpr, cut, self.mesh)

        def run(taken: Tree, *rest: Any) -> Any:
            operands: list[Any] = []
            mine = zip(jax.tree.leaves(taken), self.leaves, self.axes, self.names, strict=True)
            for x, own, axis, name in mine:
                value, gather_of = (x, self.summing) if self.parts is None else ((own, x), self.parts)
                operands.append(x if axis < 0 else Sharded(value, axis, gather_of(name)))
            out = run_in_pieces(jaxpr, [*operands, *jax.tree.leaves(rest)], MOST_AT_ONCE)
            return jax.tree.unflatten(jax.tree.structure(shapes), out)

        return run
