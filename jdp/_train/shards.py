"""The loss of parameters that are cut over the replicas: where they are gathered, and their gradients summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.layout import Shard, Tree
from .._core.outputs import path_name
from .._core.replica_mesh import ReplicaMesh
from .._core.scattered import Signature
from .._core.shards import MOST_AT_ONCE, gather_of_pairs, refuse_constants, summing_gather, whole_shape
from .._jax.pieces import ShardedOperand, run_in_pieces
from .forms import Forms, at_least_32_bits


def axes_of_shards(signature: Signature) -> Tree:
    """Returns the axis along which each differentiated leaf is cut, as a tree; -1 if the leaf is whole."""
    (axes, _), _, _ = signature.fill([leaf.axis if isinstance(leaf, Shard) else -1 for leaf in signature.leaves])
    return axes


class ShardedParams(NamedTuple):
    """The differentiated leaves, which of them are cut over the replicas, and how the loss gets these whole."""

    leaves: list[Any]
    names: list[str]
    axes: list[int]  # -1 if a leaf is whole
    treedef: Any
    signature: Signature
    sent_as: Callable[[Any], Any]  # a gradient's dtype to the one sent; None: unchanged
    adds_first: bool  # whether the gradients of all microbatches are added before the sum over the replicas
    is_finished: bool  # whether they are gradients of the finished loss, as in a second pass

    @staticmethod
    def of(
        signature: Signature, diff: Tree, axes: Tree, sent_as: Callable[[Any], Any], adds_first: bool, is_finished: bool
    ) -> ShardedParams | None:
        """Returns the shards, or None if all parameters are gathered already."""
        if not signature.holds_shards:
            return None
        leaves, treedef = jax.tree.flatten(diff)
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(diff)]
        of_leaves = leaves, names, jax.tree.leaves(axes), treedef
        return ShardedParams(*of_leaves, signature, sent_as, adds_first, is_finished)

    @property
    def mesh(self) -> ReplicaMesh:
        return self.signature.layout.mesh

    def divisor(self, forms: Forms) -> float:
        """Returns the number that a gradient is divided by before it is sent in a narrow dtype.

        It makes the sum over the replicas roughly a mean, so that it does not overflow.
        """
        layout = self.signature.layout
        if self.is_finished or forms.has_shares(layout):
            return 1.0
        return float(self.mesh.size if forms.is_mean else sum(layout.sizes))

    def undivided(self, total: Any, forms: Forms) -> Any:
        """Multiplies a sum over the replicas by its `divisor` again, in 32 bits, where it cannot overflow."""
        if self.sent_as(total.dtype) is None:
            return total
        return at_least_32_bits(total) * self.divisor(forms)

    def shapes(self) -> Tree:
        """Returns the tree with the shape of the whole array for each leaf that is cut."""
        pairs = zip(self.leaves, self.axes, strict=True)
        return self.treedef.unflatten([x if axis < 0 else whole_shape(x, axis, self.mesh.size) for x, axis in pairs])

    def differentiated(self) -> Tree:
        """Returns the tree to differentiate by: the parts, or (if `adds_first`) zeros of the shapes of whole arrays."""
        if not self.adds_first:
            return self.treedef.unflatten(self.leaves)
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, self.shapes()
        )

    def in_microbatch(self, number: Any) -> ShardedParams:
        """Returns the shards for one microbatch. They depend on its number, or the compiler would gather only once."""
        return self._replace(leaves=jax.lax.optimization_barrier((self.leaves, number))[0]) if self.adds_first else self

    def function(self, jaxpr: Any, shapes: Tree, forms: Forms) -> Callable[..., Any]:
        """Returns the function of this jaxpr, except that it takes the tree of `differentiated()` and gathers it."""
        over, divisor = self.signature.axis_name, self.divisor(forms)
        gather_of = gather_of_pairs(over) if self.adds_first else summing_gather(over, self.sent_as, divisor)
        cut = [(x, axis) for x, axis in zip(self.leaves, self.axes, strict=True) if axis >= 0]
        refuse_constants(jaxpr, cut, self.mesh)

        def run(taken: Tree, *rest: Any) -> Any:
            operands: list[Any] = []
            mine = zip(jax.tree.leaves(taken), self.leaves, self.axes, self.names, strict=True)
            for x, own, axis, name in mine:
                operands.append(
                    x if axis < 0 else ShardedOperand((own, x) if self.adds_first else x, axis, gather_of(name))
                )
            out = run_in_pieces(jaxpr, [*operands, *jax.tree.leaves(rest)], MOST_AT_ONCE)
            return jax.tree.unflatten(jax.tree.structure(shapes), out)

        return run
