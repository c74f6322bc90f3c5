"""What a replica returns: flat arrays, each with the axis it is gathered along or the way it is reduced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .devices import spans_processes
from .inputs import is_array
from .layout import Cut, Layout, Leaf, Stack, Tree, Whole, is_key
from .scattered import Scattered

Reduce = Literal["primary", "mean", "same", "sum"]
"""Whose value is the one for all: the primary's, the mean, that of any, since they are equal, or the sum."""


@dataclasses.dataclass(slots=True, eq=False)
class Marked:
    """A leaf that a door's function returns with its own rule; to `jax.tree` it is a leaf, as is any object.

    With `axis` an int the replicas' values are concatenated along it. With `None` there is one value
    for all: the primary replica's, the mean weighted by rows, or the sum; `old` is what it was before,
    for replicas without rows. `over` divides it: a number, or the sum of the replicas' values of an
    array that is an output, too. `wire` is the dtype in which a sum travels, `dtype` that of the result;
    with `scatter` a sum comes back cut along that axis (a reduce-scatter). `alone` is the error where
    there are several replicas with rows, for one value that is not one for all.
    """

    value: Any
    axis: int | None
    reduce: Reduce = "primary"
    old: Any = None
    over: Any = None
    wire: Any = None
    dtype: Any = None
    scatter: int | None = None
    alone: str | None = None


class Rule(NamedTuple):
    """How one output array goes on: along `axis`, or (None) reduced; `old` is the operand it replaces."""

    axis: int | None
    reduce: Reduce
    old: int | None
    over: float | None = None  # what it is divided by
    over_sum_of: int | None = None  # or: the output whose sum it is divided by
    wire: Any = None
    dtype: Any = None
    scatter: int | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["treedef", "rules"])
@dataclasses.dataclass
class Returned:
    """The output arrays of a replica, and (as static data, so that it passes through `jit`) what they are."""

    values: list[Any]
    treedef: Any
    rules: tuple[Rule, ...]


def returned(out: Tree, layout: Layout, operands: Sequence[Any]) -> Returned:
    """What a replica's call returned: the arrays of the tree, its treedef and one rule for each array."""
    dim = layout.dim
    leaves, treedef = jax.tree.flatten(out)
    values, rules = [], []
    for i, leaf in enumerate(leaves):
        mark = leaf if isinstance(leaf, Marked) else Marked(leaf, dim)
        value = mark.value
        if not isinstance(value, jax.Array) and not is_array(value):
            raise TypeError(
                f"jdp.parallel_apply: {output_path(out, i)} is a {type(value).__name__}; outputs are arrays, "
                f"for they are gathered from all replicas. Return jnp.asarray(x), or leave it out."
            )
        if mark.alone is not None and len(layout.used) > 1:
            raise ValueError(mark.alone)
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
        old = next((j for j, x in enumerate(operands) if x is mark.old), None)
        over, count = mark.over, None
        if over is not None and not isinstance(over, float):
            over, count = None, next(j for j, x in enumerate(leaves) if isinstance(x, Marked) and x.value is mark.over)
        values.append(value)
        reduce: Reduce = "same" if value is mark.old else mark.reduce  # what did not change is equal as it is
        rules.append(Rule(axis, reduce, old, over, count, mark.wire, mark.dtype, mark.scatter))
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
        for x, rule in zip(self._summed(values), self.rules, strict=True):
            axis = rule.axis if rule.scatter is None else rule.scatter
            if axis is None:
                whole.append(self._one_for_all(x, rule, index))
            elif not x.ndim:
                cut.append(jnp.expand_dims(x, 0))
            else:
                # All chunks go out along axis 0, so that one out_spec serves outputs not yet known;
                # the transposes here and in scattered() cancel in the compiler.
                cut.append(jnp.moveaxis(x, axis, 0))
        return cut, whole

    def _summed(self, values: Sequence[Any]) -> list[Any]:
        """The values, with sums over the replicas in place of summands, and divided where a rule says so."""
        mesh = self.layout.mesh
        at = sorted({rule.over_sum_of for rule in self.rules if rule.over_sum_of is not None})
        totals = dict(zip(at, psum([values[i] for i in at], mesh), strict=True))
        over = [rule.over if rule.over_sum_of is None else totals[rule.over_sum_of] for rule in self.rules]
        values = [
            totals[i] if i in totals else x if rule.reduce == "sum" and rule.wire is None else _divided(x, by)
            for i, (x, by, rule) in enumerate(zip(values, over, self.rules, strict=True))
        ]
        sums = {i: rule for i, rule in enumerate(self.rules) if rule.reduce == "sum" and i not in totals}
        # What travels in a narrow type is divided before, for a sum of many may leave its range; the rest after, as
        # pmean does.
        sent = [values[i] if rule.wire is None else values[i].astype(rule.wire) for i, rule in sums.items()]
        names = self._names() if sums else []
        summed = sum_over(sent, [rule.scatter for rule in sums.values()], [names[i] for i in sums], mesh)
        for x, (i, rule) in zip(summed, sums.items(), strict=True):
            x = _divided(x, over[i]) if rule.wire is None else x.astype(values[i].dtype)
            values[i] = x if rule.dtype is None else x.astype(rule.dtype)
        return values

    def _names(self) -> list[str]:
        """For each output what its sum is called in the program: `reduce.` and its path, a gradient's parameter's."""
        numbered = jax.tree.unflatten(self.treedef, range(self.treedef.num_leaves))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
        return [f"reduce.{path_name(p[1:] if p and getattr(p[0], 'name', '') == 'grads' else p)}" for p in paths]

    def _one_for_all(self, x: Any, rule: Rule, index: Any) -> Any:
        if rule.reduce in ("same", "sum") or self.layout.mesh.size == 1:
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
        layout, cuts, wholes = self.layout, iter(cut), iter(whole)
        arrays: list[Any] = []
        leaves: list[Leaf] = []
        for rule, sizes in zip(self.rules, self.sizes, strict=True):
            axis = rule.axis if rule.scatter is None else rule.scatter
            if axis is None:
                arrays.append(next(wholes))
                leaves.append(Whole())
                continue
            x = next(cuts)
            arrays.append(jnp.moveaxis(x, 0, axis) if axis else x)
            if rule.scatter is not None:
                sizes = (x.shape[0] // layout.mesh.size,) * layout.mesh.size
            leaves.append(Cut(axis, sizes) if sizes else Stack())
        return Scattered(arrays, Layout(self.treedef, tuple(leaves), layout.sizes, layout.mesh, layout.dim))


def path_name(path: Any) -> str:
    """A path as a name: `hidden.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _divided(x: Any, by: Any) -> Any:
    if by is None:
        return x
    # A mean of integers is no integer; one of 16-bit floats stays what it is.
    return (x / by).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x / by


def psum(values: list[Any], mesh: Mesh) -> list[Any]:
    """The sums, in one collective."""
    # XLA leaves a sum over one device in the program, where it still waits for nobody.
    return values if mesh.size == 1 else jax.lax.psum(values, mesh.axis_names[0])


def _named(values: list[Any], names: Sequence[str], mesh: Mesh) -> list[Any]:
    """The sums, each of which the compiled program (and so `explain`, and a profile) knows by its name."""
    sums = []
    for x, name in zip(values, names, strict=True):
        with jax.named_scope(name):
            sums += psum([x], mesh)
    return sums


_SMALL = 1 << 17  # elements


def _psum_of_transposed(values: list[Any], names: Sequence[str], mesh: Mesh) -> list[Any]:
    # The gradient of a dense layer's kernel is the transpose of a product. With the sum behind the transpose, XLA's CPU
    # compiler makes one product of both, of a form that it is slow at: a tenth of a small transformer's step. Of large
    # ones the transposes take longer than that: a fifth of an MLP's. Between processes the sum is another operation,
    # and they would be a fifth of the step, too.
    if mesh.devices.flat[0].platform != "cpu" or spans_processes(mesh):
        return _named(values, names, mesh)
    turn = [jnp.matrix_transpose if x.ndim == 2 and x.size <= _SMALL else (lambda y: y) for x in values]
    sums = _named([f(x) for f, x in zip(turn, values, strict=True)], names, mesh)
    return [f(x) for f, x in zip(turn, sums, strict=True)]


def sum_over(values: Sequence[Any], axes: Sequence[int | None], names: Sequence[str], mesh: Mesh) -> list[Any]:
    """The sums over the replicas, whole on all; or, where an axis is given, scattered along it."""
    whole = [(x, name) for x, axis, name in zip(values, axes, names, strict=True) if axis is None]
    sums = iter(_psum_of_transposed([x for x, _ in whole], [name for _, name in whole], mesh))
    found = []
    for x, axis, name in zip(values, axes, names, strict=True):
        if axis is None:
            found.append(next(sums))
            continue
        with jax.named_scope(name):
            found.append(jax.lax.psum_scatter(x, mesh.axis_names[0], scatter_dimension=axis, tiled=True))
    return found
