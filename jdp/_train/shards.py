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
from .._core.shards import MOST_AT_ONCE, parts_of, refuse_constants, summing, whole_shape
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
    signature: Signature
    sent_as: Callable[[Any], Any]  # the dtype in which gradients of a dtype travel
    apart: bool  # whether microbatches are added before anything is summed over the replicas

    @staticmethod
    def of(signature: Signature, diff: Tree, axes: Tree, sent_as: Callable[[Any], Any], apart: bool) -> Shards | None:
        """None where all of them are gathered already."""
        if not signature.holds_shards:
            return None
        leaves, treedef = jax.tree.flatten(diff)
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(diff)]
        return Shards(leaves, names, jax.tree.leaves(axes), treedef, signature, sent_as, apart)

    @property
    def mesh(self) -> Mesh:
        return self.signature.layout.mesh

    def before(self, is_ratio: bool) -> float:
        """What a gradient is divided by before it travels in a narrow dtype: about what makes a mean of it."""
        return float(sum(self.signature.layout.sizes) if is_ratio else self.mesh.size)

    def undivided(self, total: Any, is_ratio: bool) -> Any:
        """A sum over the replicas that has come back, no longer divided: in 32 bits, whose range it does not leave."""
        if self.sent_as(total.dtype) is None:
            return total
        return total.astype(jnp.promote_types(total.dtype, jnp.float32)) * self.before(is_ratio)

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

    def function(self, jaxpr: Any, shapes: Tree, is_ratio: bool) -> Callable[..., Any]:
        """The function that a jaxpr was traced from, of what is taken in place of the whole arrays."""
        name = self.signature.axis_name
        gather_of = parts_of(name) if self.apart else summing(name, self.sent_as, self.before(is_ratio))
        cut = [(x, axis) for x, axis in zip(self.leaves, self.axes, strict=True) if axis >= 0]
        refuse_constants(jaxpr, cut, self.mesh)

        def run(taken: Tree, *rest: Any) -> Any:
            operands: list[Any] = []
            mine = zip(jax.tree.leaves(taken), self.leaves, self.axes, self.names, strict=True)
            for x, own, axis, name in mine:
                operands.append(x if axis < 0 else Sharded((own, x) if self.apart else x, axis, gather_of(name)))
            out = run_in_pieces(jaxpr, [*operands, *jax.tree.leaves(rest)], MOST_AT_ONCE)
            return jax.tree.unflatten(jax.tree.structure(shapes), out)

        return run
