"""The outputs of a replica: flat arrays, each with the axis that it is gathered along, or the way it is reduced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import row_traces
from .inputs import classify, is_array, is_sparse, refuse_wrapped, way_out
from .layout import Cut, Layout, Leaf, Shard, Stack, Tree, Whole, is_key
from .replica_mesh import HALVES, ReplicaMesh
from .scattered import Scattered

Reduce = Literal["primary", "mean", "same", "sum", "summed"]
"""How the replicas' values become one for all: the primary's is kept ("primary"), or their mean ("mean") or sum ("sum")
is taken. Nothing is done if they are equal ("same"), or are parts of a sum already ("summed")."""

Way = Literal["rows", "sum", "same", "primary"]
"""How the values of replicas that run one by one become one: they are joined along their rows or added, are the same,
or the primary's is kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Marked:
    """An output with its own rule for how the replicas' values become one; for `jax.tree` it is a leaf.

    In `Outputs.rules`, `value` is None, `old` is the index of an operand, and an int in `over` that of an output.
    """

    value: Any
    axis: int | None
    """The axis along which the replicas' values are concatenated. None: one value for all, as `reduce` says."""
    reduce: Reduce = "primary"
    old: Any = None
    """The value before the call; a replica without rows returns it."""
    over: Any = None
    """What the result is divided by: a float, or another output, whose sum over the replicas is taken."""
    wire: Any = None
    """The dtype that a sum is sent in."""
    dtype: Any = None
    """The dtype of the result."""
    scatter: int | None = None
    """The axis along which a sum comes back cut (a reduce-scatter); a "summed" value is cut along it already."""
    alone: str | None = None
    """The error if several replicas have rows, because one replica's value is not that of all."""

    @property
    def along(self) -> int | None:
        """The axis along which each replica has its own part of the result; None if the result is replicated."""
        return self.axis if self.scatter is None else self.scatter


def returned(out: Tree, layout: Layout, operands: Sequence[Any]) -> Outputs:
    """Returns, as `Outputs`, what a replica's call returned: arrays, treedef and one rule for each array."""
    leaves, treedef = jax.tree.flatten(out, is_leaf=is_sparse)  # the buffers of a sparse array are no rows
    marks = [leaf if isinstance(leaf, Marked) else Marked(leaf, layout.dim) for leaf in leaves]
    values, rules = [], []
    for i, mark in enumerate(marks):
        value, axis, over = mark.value, mark.axis, mark.over
        values.append(value if isinstance(value, jax.Array) else _as_output(value, treedef, i))
        if mark.alone is not None and len(layout.used) > 1:
            raise ValueError(mark.alone)
        if axis is not None and not value.ndim:
            axis = 0  # a vector with one entry per replica, whatever dim is
        elif axis is not None:
            if not -value.ndim <= axis < value.ndim:
                raise IndexError(
                    f"jdp.parallel_apply: {output_path(treedef, i)} has rank {value.ndim}, dim is {axis}; "
                    f"Dimension out of range (expected to be in range of [{-value.ndim}, {value.ndim - 1}], but got "
                    f"{axis}). Pass out_axes with an axis for each output (None: the primary replica's)."
                )
            axis %= value.ndim
        if over is not None and not isinstance(over, float):
            # The index of the count. If the same array is also the total of another mean, the count is the last one.
            over = max(j for j, other in enumerate(marks) if other.value is over and other.over is None)
        old = next((j for j, x in enumerate(operands) if x is mark.old), None)
        reduce: Reduce = "same" if value is mark.old else mark.reduce  # not changed, so equal everywhere
        rules.append(dataclasses.replace(mark, value=None, axis=axis, reduce=reduce, old=old, over=over, alone=None))
    return Outputs(values, treedef, tuple(rules), layout)


def _as_output(value: Any, treedef: Any, i: int) -> Any:
    """Returns output i, no jax array, in a form that JAX takes; raises an error if there is none of the same value."""
    path = functools.partial(output_path, treedef, i)
    if not is_array(value):
        way = "Leave it out" if isinstance(value, str) or callable(value) else f"Return {way_out(value)}"
        raise TypeError(
            f"jdp.parallel_apply: {path()} is a {type(value).__name__}; outputs are arrays with rows, because they "
            f"are gathered from all replicas. {way}."
        )
    value = classify(value, "parallel_apply", path)[1]
    refuse_wrapped(value, "parallel_apply", path)
    return value


def refuse_other_axes(
    out: Tree, run: Callable[..., Tree], operands: Sequence[Any], cut: Sequence[int | None], rows: int, dim: int
) -> None:
    """Raises a `ValueError` for an output whose rows would come back in another order.

    They do if they are along another axis than `dim`, along which the replicas' outputs are joined, or if an output has
    the rows of several arrays, one after the other. `out` is what `run(*operands)` has returned for `rows` rows. If the
    shapes do not show that all is well, `run` is traced again: with a symbolic number of rows or, if that
    fails, with a fixed one.
    """
    leaves, treedef = jax.tree.flatten(out, is_leaf=is_sparse)
    open_ones = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and _may_be_elsewhere(x.shape, rows, dim)]
    if not open_ones:
        return
    traced = row_traces.trace(run, operands, cut) or row_traces.trace(run, operands, cut, row_traces.PRIMES[0])
    if traced is None or len(traced.jaxpr.out_avals) != len(leaves):
        return  # the function takes no other number of rows
    for i in open_ones:
        axis, at = traced.axis(i), dim % leaves[i].ndim
        if isinstance(axis, int) and axis != at:
            raise ValueError(
                f"jdp.parallel_apply: {output_path(treedef, i)} is {list(leaves[i].shape)} for {rows} rows, which are "
                f"along axis {axis}; the replicas' outputs are joined along axis {at}. Pass out_axes={axis} to "
                f"jdp.DataParallel (a tree of axes where outputs differ), or return jnp.moveaxis(y, {axis}, {at})."
            )
        if axis == at and traced.is_joined(i):
            raise ValueError(
                f"jdp.parallel_apply: {output_path(treedef, i)} is {list(leaves[i].shape)} for {rows} rows, and has "
                f"those of several arrays, one after the other; the replicas' outputs are joined along axis {at}, so "
                f"that all rows would come back in another order. Return a tuple of the arrays, and concatenate them "
                f"outside."
            )


def _may_be_elsewhere(shape: tuple[int, ...], rows: int, dim: int) -> bool:
    """Returns True if another axis than `dim` may hold the rows, or if `dim` may hold those of several arrays.

    If `dim` alone has their number, it is taken to hold them.
    """
    if not rows or not -len(shape) <= dim < len(shape):
        return False
    if shape[dim] == rows:
        return shape.count(rows) > 1
    return any(size and size % rows == 0 for size in shape)


def output_path(treedef: Any, index: int) -> str:
    return "output" + jax.tree_util.keystr(paths_in(treedef)[index])


def paths_in(treedef: Any) -> list[Any]:
    """Returns the path of each leaf of a tree with this treedef."""
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["treedef", "rules", "layout", "sizes"]
)
@dataclasses.dataclass(frozen=True)
class Outputs:
    """A replica's output arrays. What they are (all other fields) is static data, so that it passes through `jit`."""

    values: list[Any]
    treedef: Any
    rules: tuple[Marked, ...]
    layout: Layout
    """The layout of the call's inputs."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """For each array its rows on every replica, once they are known; () if the array is not cut."""

    def is_mean(self, x: Any, rule: Marked) -> bool:
        """Returns True if an output's one value is the mean over the replicas, weighted by their rows."""
        has_rows = self.layout.is_cut and any(self.layout.rows)
        return rule.reduce == "mean" and has_rows and bool(jnp.issubdtype(x.dtype, jnp.inexact))

    @property
    def ways(self) -> list[Way]:
        """For each output, how the replicas' values become one."""

        def way(x: Any, rule: Marked) -> Way:
            if rule.axis is not None:
                return "rows"
            if rule.reduce == "sum" or self.is_mean(x, rule):
                return "sum"
            return "same" if rule.reduce == "same" else "primary"

        return [way(x, rule) for x, rule in zip(self.values, self.rules, strict=True)]

    def reduce(self, index: Any) -> tuple[list[Any], list[Any]]:
        """Reduces the outputs over all devices, inside the program; returns `(cut, whole)`.

        `cut` holds this device's part of each output that is cut, with the cut axis first; `whole` holds the outputs
        with one value for all. `self` has the outputs of this device's replica, or of its several replicas put
        together; `index` is the device's index.
        """
        cut, whole = [], []
        for x, rule in zip(self._summed(), self.rules, strict=True):
            if rule.along is None:
                whole.append(self._one_for_all(x, rule, index))
            elif not x.ndim:
                cut.append(jnp.expand_dims(x, 0))
            else:
                # All chunks go out along axis 0, so that one out_spec serves outputs not yet known;
                # the transposes here and in scattered() cancel in the compiler.
                cut.append(jnp.moveaxis(x, rule.along, 0))
        return cut, whole

    def _summed(self) -> list[Any]:
        """Returns the values: those that are sums, summed over the replicas, and each divided as its rule says."""
        mesh = self.layout.mesh
        at = sorted({rule.over for rule in self.rules if isinstance(rule.over, int)})
        totals = dict(zip(at, _psum([self.values[i] for i in at], mesh), strict=True))
        found = []
        for i, (x, rule, path) in enumerate(zip(self.values, self.rules, paths_in(self.treedef), strict=True)):
            over = totals[rule.over] if isinstance(rule.over, int) else rule.over
            if i in totals:
                found.append(totals[i])
            elif rule.reduce == "sum":
                found.append(_mean_or_sum(x, rule, over, path, mesh))
            else:
                x = divided(x, over)
                found.append(x if rule.dtype is None else x.astype(rule.dtype))
        return found

    def _one_for_all(self, x: Any, rule: Marked, index: Any) -> Any:
        layout, axis_name = self.layout, self.layout.mesh.axis_name
        # An idle replica returns the old value, or zeros if there is none. In the latter case a value that is the same
        # on all other replicas is taken from the primary.
        is_same = rule.reduce == "same" and (rule.old is not None or len(layout.used) == len(layout.devices))
        if is_same or rule.reduce == "sum" or layout.mesh.size == 1:
            return x
        is_mean = self.is_mean(x, rule)
        if layout.mesh.sums_in_32_bits and x.dtype in HALVES or is_mean and jnp.finfo(x.dtype).bits < 32:
            return self._one_for_all(x.astype(jnp.float32), rule, index).astype(x.dtype)
        rows = np.array(layout.by_device, float)
        if is_mean:
            if (rows == rows[0]).all():
                return jax.lax.pmean(x, axis_name)
            mine = jnp.asarray(rows / rows.sum(), jnp.finfo(x.dtype).dtype)[index]
            return jax.lax.psum(jnp.where(mine > 0, x * mine, jnp.zeros_like(x)), axis_name)
        # A masked sum: out_specs=P() alone would label values that differ between devices as equal.
        if is_key(x):
            data = self._one_for_all(jax.random.key_data(x), rule, index)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        primary, _ = layout.primary
        narrow = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        return jax.lax.psum(jnp.where(index == primary, narrow, jnp.zeros_like(narrow)), axis_name).astype(x.dtype)

    def scattered(self, cut: Sequence[Any], whole: Sequence[Any]) -> Scattered:
        """Puts the results of `reduce` into one `Scattered`; runs outside of the `shard_map`."""
        layout, mesh, cuts, wholes = self.layout, self.layout.mesh, iter(cut), iter(whole)
        arrays: list[Any] = []
        leaves: list[Leaf] = []
        for rule, sizes in zip(self.rules, self.sizes, strict=True):
            axis = rule.along
            if axis is None:
                arrays.append(next(wholes))
                leaves.append(Whole())
                continue
            x = next(cuts)
            x = jnp.moveaxis(x, 0, axis) if axis else x
            # Each device of a replica gets all rows of the replica, even if the model has cut them over the inner axes.
            arrays.append(jax.lax.with_sharding_constraint(x, mesh.along(axis)) if mesh.inner_axes else x)
            leaves.append(Shard(axis) if rule.scatter is not None else Cut(axis, sizes) if sizes else Stack())
        return Scattered(arrays, layout.of(self.treedef, leaves))


def path_name(path: Any) -> str:
    """Returns a path as a name: `hidden.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _mean_or_sum(x: Any, rule: Marked, over: Any, path: Any, mesh: ReplicaMesh) -> Any:
    """Returns the sum over the replicas, divided; its scope in the program names the output, or the parameter."""
    name = f"reduce.{path_name(path[1:] if path and getattr(path[0], 'name', '') == 'grads' else path)}"
    if rule.wire is None:
        x = divided(_sum_over_replicas(x, rule.scatter, name, mesh), over)
    else:
        # A value that is sent in a narrow type is divided before the sum, which might overflow otherwise; other values
        # are divided after the sum, as pmean does.
        x = divided(x, over)
        x = _sum_over_replicas(x.astype(rule.wire), rule.scatter, name, mesh).astype(x.dtype)
    return x if rule.dtype is None else x.astype(rule.dtype)


_TURNED = range(1 << 15, (1 << 17) + 1)  # elements


def _sum_over_replicas(x: Any, axis: int | None, name: str, mesh: ReplicaMesh) -> Any:
    """Returns the sum over the replicas, replicated or scattered along an axis; profiles and `explain` name it."""
    if axis is not None:
        with jax.named_scope(name):
            return jax.lax.psum_scatter(x, mesh.axis_name, scatter_dimension=axis, tiled=True)
    # The gradient of a dense layer's kernel is the transpose of a product. If the sum comes after the transpose, XLA's
    # CPU compiler merges product and transpose into a form that it computes slowly: a tenth of a small transformer's
    # step. So matrices of such sizes are transposed before and after the sum. For larger and for smaller ones the two
    # transposes cost more than that: a fifth of the step of a wide MLP, an eighth of that of one with 128 units.
    # Between processes, where the sum is another operation, they would cost a fifth, too.
    on_cpu = mesh.devices[0].platform == "cpu" and not mesh.spans_processes
    is_turned = on_cpu and mesh.size > 1 and x.ndim == 2 and x.size in _TURNED
    x = jnp.matrix_transpose(x) if is_turned else x
    with jax.named_scope(name):
        (x,) = _psum([x], mesh)
    return jnp.matrix_transpose(x) if is_turned else x


def _psum(values: list[Any], mesh: ReplicaMesh) -> list[Any]:
    """Returns the sums, in one collective."""
    # XLA does not take a sum over one device out of the program.
    if mesh.size == 1:
        return values
    if mesh.sums_in_32_bits:
        wide = [x.astype(jnp.float32) if x.dtype in HALVES else x for x in values]
        return [x.astype(y.dtype) for x, y in zip(jax.lax.psum(wide, mesh.axis_name), values, strict=True)]
    return jax.lax.psum(values, mesh.axis_name)


def in_32_bits(x: Any) -> Any:
    """Returns floats of less than 32 bits as float32; their mean in fewer would overflow or lose digits."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def divided(x: Any, by: Any) -> Any:
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    if by is None or is_inexact and isinstance(by, float) and by == 1:
        return x
    by = as_divisor(by, x)
    # A mean of integers is a float; a mean of 16-bit floats keeps its dtype.
    return (x / by).astype(x.dtype) if is_inexact else x / by


def as_divisor(by: Any, x: Any) -> Any:
    """Returns a count in the dtype of x, because strict type promotion does not divide floats by integers."""
    is_count = hasattr(by, "dtype") and not jnp.issubdtype(by.dtype, jnp.inexact)
    return by.astype(x.dtype) if is_count and jnp.issubdtype(x.dtype, jnp.inexact) else by
