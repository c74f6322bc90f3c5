"""scatter cuts a pytree into chunks, gather puts the chunks together: `gather(scatter(x)) == x`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._processes.agree import same_program
from .devices import Device, DeviceLike, Devices, cut_along, mesh_of, replicated, resolve_output, spans_processes
from .inputs import check_dim, name_of, normal_axis
from .layout import Cut, Layout, Leaf, Stack, Static, Tree, Whole, pad, unpad
from .programs import SIZES, dispatch
from .scattered import (
    Scattered,
    concrete,
    holds_scattered,
    map_scattered,
    own_part,
    placed,
    put_all,
    refuse_traced,
    reshard,
)
from .split import split


def scatter(
    inputs: Tree, devices: Devices = None, dim: int = 0, *, chunk_sizes: Sequence[int] | None = None
) -> Scattered:
    """Cuts every array of a pytree along `dim`, one chunk per device: `gather(scatter(x)) == x`.

    Arrays (jax or numpy) with `ndim >= 1` are cut by `torch.chunk`'s rule (`jdp.chunk_sizes`); any
    number of rows will do. 0-d arrays, Python scalars, strings, functions and other objects go
    whole to every replica, and `None` stays `None`. Containers that JAX knows survive. With nothing
    to cut there is one chunk, on the primary device. Differentiable. Of several processes each passes
    its own rows, which go to its own devices.

    Args:
        inputs: a pytree; all its cut arrays have the same number of rows along `dim`. What is `Scattered` in it
            (over these devices) stays so.
        devices: the devices, the primary first; `None` is all of `jax.devices()`.
        dim: the axis to cut along, negative allowed.
        chunk_sizes: rows per device, for uneven devices; zeros allowed. Default: torch's rule.

    Returns:
        A `jdp.Scattered`: `s[i]` is the tree of replica i, on its device.

    Raises:
        ValueError: cut arrays disagree on their rows, or `chunk_sizes` does not fit.
        IndexError: `dim` is out of range for an array.
        TypeError: a container that JAX does not know, an array of objects or strings, a torch tensor.

    Example:
        >>> import jdp, numpy as np
        >>> s = jdp.scatter((np.zeros((10, 3)), "mean"), devices=[0])
        >>> s.sizes, s[0][0].shape, s[0][1]
        ((10,), (10, 3), 'mean')

    Source: `scatter` in torch/nn/parallel/scatter_gather.py, where arrays that disagree drop rows
    in silence; `scatter` in torch/nn/parallel/comm.py for `chunk_sizes`.
    """
    check_dim("scatter", dim)
    return split(inputs, mesh_of("scatter", devices), dim, verb="scatter", root="inputs", sizes=chunk_sizes)


def gather(outputs: Scattered | Tree, output_device: DeviceLike | None = None, dim: int = 0) -> Tree:
    """Concatenates the chunks of all replicas along `dim`, in input order: `gather(scatter(x)) == x`.

    True sizes only: padding never shows. 0-d arrays become a vector with one entry per replica
    used, in silence (torch warns). Leaves that are whole on every replica come back as they are.
    Under `jax.jit` the values are the same, and stay on the replicas. Of several processes each gets the
    rows of its own devices.

    Args:
        outputs: a `jdp.Scattered`; a tree that holds some, as `dp.prefetch` yields (what else is in it stays as it
            is); or a list with one tree of arrays per device.
        output_device: the device of the result: a device, `"cpu"` or -1 (the host's CPU), or
            `"sharded"`: one array over the replicas, sharded along `dim` where its rows divide,
            else replicated. `None` is the primary device, torch's default.
        dim: the axis to concatenate along, negative allowed.

    Returns:
        One tree, with the rows of all chunks.

    Raises:
        ValueError: an empty list, or trees that differ off `dim` (keys, shapes, dtypes).
        TypeError: a leaf of a list that is no array, with its path.
        IndexError: `dim` is out of range.

    Example:
        >>> import jdp, numpy as np
        >>> jdp.gather([np.zeros((3, 2)), np.zeros((1, 2))]).shape
        (4, 2)

    Source: `gather` in torch/nn/parallel/scatter_gather.py.
    """
    device = resolve_output("gather", output_device)
    check_dim("gather", dim)
    if isinstance(outputs, Scattered):
        return join(_along(placed(outputs), dim), device)
    if holds_scattered(outputs):
        return map_scattered(lambda s: join(_along(placed(s), dim), device), outputs)
    from .gather_list import gather_list  # the rarer door; it needs this module

    return gather_list(outputs, device, dim)


def join(outputs: Scattered, device: Device | str | None) -> Tree:
    """`gather`, each leaf along its own axis."""
    outputs = placed(outputs)
    layout = outputs._layout
    if device == "sharded" and layout.is_even and not spans_processes(layout.mesh):
        return layout.fill(outputs._arrays)
    values = [concrete(x) for x in outputs._arrays]
    if spans_processes(layout.mesh):
        refuse_traced(outputs._arrays, "gather")
        return _join_own(own_part(values, layout), layout.own, device)
    if any(value is None for value in values):
        return layout.fill(_trim(outputs))
    if device == "sharded":
        return layout.fill(dispatch(_trimming(layout, True), layout.mesh, outputs._arrays))
    target = layout.devices[0] if device is None else device
    arrays: Sequence[Any] = outputs._arrays
    if layout.devices != (target,):  # else they are there
        arrays = [_one_copy(x, leaf, layout) for x, leaf in zip(arrays, layout.arrays, strict=True)]
        arrays = put_all(arrays, [target] * len(arrays))
    return layout.fill(arrays if layout.is_even else _trimming(layout, False)(arrays))


def _join_own(arrays: list[Any], own: Layout, device: Device | str | None) -> Tree:
    """`join` of this process's own chunks; what is whole on all processes stays so, or comes here as one copy."""
    cut = [i for i, leaf in enumerate(own.arrays) if not isinstance(leaf, Whole)]
    if cut:
        leaves = tuple(own.arrays[i] for i in cut)
        layout = Layout(jax.tree.structure([0] * len(cut)), leaves, own.sizes, own.mesh, own.dim)
        for i, x in zip(cut, join(Scattered([arrays[i] for i in cut], layout), device), strict=True):
            arrays[i] = x
    if device != "sharded":
        target = own.devices[0] if device is None else device
        whole = [i for i in range(len(arrays)) if i not in cut]
        copies = put_all([arrays[i].addressable_data(0) for i in whole], [target] * len(whole))
        for i, x in zip(whole, copies, strict=True):
            arrays[i] = x
    return own.fill(arrays)


def _one_copy(x: Any, leaf: Leaf, layout: Layout) -> Any:
    """An array that device_put brings to one device well."""
    if isinstance(x, Tracer):
        return x if isinstance(leaf, Whole) else reshard(x, replicated(layout.mesh))
    if isinstance(leaf, Whole):
        return x.addressable_data(0)  # device_put would read it through the host, and from other processes not at all
    return x


def _trim(s: Scattered) -> list[Any]:
    """The arrays without padding and without the entries of idle replicas."""
    layout, n = s._layout, len(s._layout.devices)
    used = layout.used
    out = []
    for x, leaf in zip(s._arrays, layout.arrays, strict=True):
        if isinstance(leaf, Cut):
            x = unpad(x, leaf, n)
        elif isinstance(leaf, Stack) and len(used) < n:
            x = x[: len(used)] if used == tuple(range(len(used))) else x[np.array(used)]
        out.append(x)
    return out


@functools.lru_cache(SIZES)
def _trimming(layout: Layout, sharded: bool) -> Any:
    """A jitted function of a layout's arrays of its own, which goes when the layout is seldom seen."""
    what = trim if sharded else _trim
    return jax.jit(lambda arrays: what(Scattered(arrays, layout)))


def trim(s: Scattered) -> Sequence[Any]:
    """Inside a program: the arrays without padding, over the replicas where their rows divide."""
    if s._layout.is_even:
        return s._arrays
    mesh = s._layout.mesh
    return [
        jax.lax.with_sharding_constraint(
            x,
            cut_along(mesh, leaf.axis)
            if isinstance(leaf, Cut) and x.shape[leaf.axis] % mesh.devices.size == 0
            else replicated(mesh),
        )
        for x, leaf in zip(_trim(s), s._layout.arrays, strict=True)
    ]


def _along(s: Scattered, dim: int) -> Scattered:
    """`s` with its chunks side by side along `dim`; itself, where they are."""
    layout = s._layout
    axes = [
        normal_axis(dim, x.ndim, "gather", lambda i=i: name_of(layout.fill(s._arrays), i, "outputs"))
        if isinstance(leaf, Cut)
        else 0
        for i, (x, leaf) in enumerate(zip(s._arrays, layout.arrays, strict=True))
    ]
    if all(not isinstance(leaf, Cut) or leaf.axis == axis for leaf, axis in zip(layout.arrays, axes, strict=True)):
        return s
    return dispatch(_realigning(layout, tuple(axes)), layout.mesh, s)


@functools.lru_cache(SIZES)
def _realigning(layout: Layout, axes: tuple[int, ...]) -> Any:
    realign = jax.jit(lambda s: _realign(s, axes))
    return same_program(realign, layout.mesh, ("outputs",)) if spans_processes(layout.mesh) else realign


def _realign(s: Scattered, axes: tuple[int, ...]) -> Scattered:
    layout, n = s._layout, len(s._layout.devices)
    arrays, leaves = [], iter(axes)
    specs: list[Leaf] = []
    values = iter(s._arrays)
    for leaf in layout.leaves:
        if isinstance(leaf, Static):
            specs.append(leaf)
            continue
        x, axis = next(values), next(leaves)
        if isinstance(leaf, Cut) and leaf.axis != axis:
            sizes = tuple(x.shape[axis] if i in layout.used else 0 for i in range(len(layout.sizes)))
            if len({leaf.sizes[i] for i in layout.used}) > 1:
                raise ValueError(
                    f"jdp.gather: chunks of {leaf.sizes} rows along axis {leaf.axis} cannot be concatenated along "
                    f"axis {axis}; shapes must agree off dim. Pass dim={leaf.axis}."
                )
            moved = Cut(axis, sizes)
            x = jnp.concatenate(
                [
                    jax.lax.slice_in_dim(x, i * leaf.padded, i * leaf.padded + leaf.sizes[i], axis=leaf.axis)
                    for i in layout.used
                ],
                axis=axis,
            )
            x, leaf = pad(x, moved, n), moved
        arrays.append(x)
        specs.append(leaf)
    return Scattered(arrays, Layout(layout.treedef, tuple(specs), layout.sizes, layout.mesh, layout.dim))
