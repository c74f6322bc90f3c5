"""What a replica returns: flat arrays, each with the axis it is gathered along or the way it is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._check import is_array, is_key
from ._layout import Cut, Layout, Leaf, Stack, Tree, Whole
from ._scattered import Scattered

Reduce = Literal["primary", "mean", "same"]
"""Whose value is the one for all: the primary's, the mean, or that of any, since they are equal."""


class Marked:
    """A leaf that a door's function returns with its own rule; to `jax.tree` it is a leaf, as is any object.

    With `axis` an int the replicas' values are concatenated along it. With `None` there is one value
    for all: the primary replica's, or the mean weighted by rows; `old` is what it was before, for
    replicas without rows.
    """

    __slots__ = ("value", "axis", "reduce", "old")

    def __init__(self, value: Any, axis: int | None, reduce: Reduce = "primary", old: Any = None) -> None:
        self.value, self.axis, self.old = value, axis, old
        # What did not change is equal on all replicas as it is.
        self.reduce: Reduce = "same" if value is old else reduce


class Rule(NamedTuple):
    """How one output array goes on: along `axis`, or (None) reduced; `old` is the operand it replaces."""

    axis: int | None
    reduce: Reduce
    old: int | None


@jax.tree_util.register_pytree_node_class
class Returned:
    """The output arrays of a replica, and (as static data, so that it passes through `jit`) what they are."""

    def __init__(self, values: Sequence[Any], treedef: Any, rules: tuple[Rule, ...]) -> None:
        self.values, self.treedef, self.rules = list(values), treedef, rules

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, tuple[Rule, ...]]]:
        return self.values, (self.treedef, self.rules)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, tuple[Rule, ...]], values: Sequence[Any]) -> Returned:
        return cls(values, *static)


def returned(out: Tree, dim: int, operands: Sequence[Any]) -> Returned:
    """What a replica's call returned: the arrays of the tree, its treedef and one rule for each array.

    Raises:
        TypeError: a leaf is no array, with its path.
        IndexError: a leaf has no axis `dim`.
    """
    leaves, treedef = jax.tree.flatten(out)
    values, rules = [], []
    for i, leaf in enumerate(leaves):
        mark = leaf if isinstance(leaf, Marked) else Marked(leaf, dim)
        value = mark.value
        if not is_array(value):
            raise TypeError(
                f"jdp.parallel_apply: {output_path(out, i)} is a {type(value).__name__}; outputs are arrays, "
                f"for they are gathered from all replicas. Return jnp.asarray(x), or leave it out."
            )
        axis = mark.axis
        if axis is not None and not value.ndim:
            axis = 0  # a vector with one entry per replica, whatever dim is
        elif axis is not None:
            if not -value.ndim <= axis < value.ndim:
                raise IndexError(
                    f"jdp.parallel_apply: {output_path(out, i)} has rank {value.ndim}, dim is {axis}; "
                    f"Dimension out of range (expected to be in range of [{-value.ndim}, {value.ndim - 1}], but got "
                    f"{axis}). Pass out_axes with an axis for each output (None: the primary replica's)."
                )
            axis %= value.ndim
        old = next((j for j, x in enumerate(operands) if x is mark.old), None) if mark.old is not None else None
        values.append(value)
        rules.append(Rule(axis, mark.reduce, old))
    return Returned(values, treedef, tuple(rules))


def output_path(out: Tree, index: int) -> str:
    return "output" + jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(out)[index][0])


class Outputs(NamedTuple):
    """The outputs of all replicas: one rule and the rows on each replica for every array."""

    layout: Layout
    treedef: Any
    rules: tuple[Rule, ...]
    sizes: tuple[tuple[int, ...], ...]

    def reduce(self, values: Sequence[Any], index: Any) -> tuple[list[Any], list[Any]]:
        """Inside the program: the replica's arrays, chunk axis first, and those that are one for all."""
        cut, whole = [], []
        for x, rule in zip(values, self.rules, strict=True):
            if rule.axis is None:
                whole.append(self._one_for_all(x, rule, index))
            elif not x.ndim:
                cut.append(jnp.expand_dims(x, 0))
            else:
                # All chunks go out along axis 0, so that one out_spec serves outputs not yet known;
                # the transposes here and in scattered() cancel in the compiler.
                cut.append(jnp.moveaxis(x, rule.axis, 0))
        return cut, whole

    def _one_for_all(self, x: Any, rule: Rule, index: Any) -> Any:
        if rule.reduce == "same":
            return x
        layout, (axis_name,) = self.layout, self.layout.mesh.axis_names
        rows = np.zeros(len(layout.devices))
        rows[: len(layout.sizes)] = layout.sizes
        if rule.reduce == "mean" and layout.is_cut and rows.any() and jnp.issubdtype(x.dtype, jnp.inexact):
            if (rows == rows[0]).all():
                return jax.lax.pmean(x, axis_name)
            mine = jnp.asarray(rows / rows.sum(), jnp.finfo(x.dtype).dtype)[index]
            return jax.lax.psum(jnp.where(mine > 0, x * mine, jnp.zeros_like(x)), axis_name)
        # A masked sum: out_specs=P() alone would label values that differ between devices as equal.
        if is_key(x):
            data = self._one_for_all(jax.random.key_data(x), rule, index)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        primary = layout.used[0] if layout.used else 0
        narrow = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        return jax.lax.psum(jnp.where(index == primary, narrow, jnp.zeros_like(narrow)), axis_name).astype(x.dtype)

    def scattered(self, cut: Sequence[Any], whole: Sequence[Any]) -> Scattered:
        """Outside the program's body: the arrays as one `Scattered`."""
        cuts, wholes = iter(cut), iter(whole)
        arrays: list[Any] = []
        leaves: list[Leaf] = []
        for rule, sizes in zip(self.rules, self.sizes, strict=True):
            if rule.axis is None:
                arrays.append(next(wholes))
                leaves.append(Whole())
                continue
            x = next(cuts)
            arrays.append(jnp.moveaxis(x, 0, rule.axis) if rule.axis else x)
            leaves.append(Cut(rule.axis, sizes) if sizes else Stack())
        layout = self.layout
        return Scattered(arrays, Layout(self.treedef, tuple(leaves), layout.sizes, layout.mesh, layout.dim))
