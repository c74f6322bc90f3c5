"""scatter cuts a pytree into chunks, gather puts the chunks together: `gather(scatter(x)) == x`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ._check import axes_of, check_rows, classify, name_of, normal_axis
from ._chunk import chunk_sizes as torch_chunk_sizes
from ._chunk import given_sizes, pad, unpad
from ._devices import DeviceLike, Devices, cut_along, mesh_of, replicated, resolve_output
from ._scattered import Cut, Layout, Leaf, Scattered, Stack, Static, Tree, Whole, concrete, is_scattered, placed, reshard


def scatter(
    inputs: Tree, devices: Devices = None, dim: int = 0, *, chunk_sizes: Sequence[int] | None = None
) -> Scattered:
    """Cuts every array of a pytree along `dim`, one chunk per device: `gather(scatter(x)) == x`.

    Arrays (jax or numpy) with `ndim >= 1` are cut by `torch.chunk`'s rule (`jdp.chunk_sizes`); any
    number of rows will do. 0-d arrays, Python scalars, strings, functions and other objects go
    whole to every replica, and `None` stays `None`. Containers that JAX knows survive. With nothing
    to cut there is one chunk, on the primary device. Differentiable.

    Args:
        inputs: a pytree; all its cut arrays have the same number of rows along `dim`.
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
    return split(inputs, mesh_of("scatter", devices), dim, verb="scatter", root="inputs", sizes=chunk_sizes)


def split(
    inputs: Tree,
    mesh: Mesh,
    dim: int,
    *,
    verb: str,
    root: str | tuple[str, ...],
    axes: Tree = None,
    sizes: Sequence[int] | None = None,
    layouts: dict[Any, Layout] | None = None,
    place: bool = True,
) -> Scattered:
    """`scatter`, with one axis (or None) for each leaf in `axes`; what is `Scattered` already stays so.

    `layouts` keeps the layouts of a wrapper, whose mesh, dim and axes do not change: a batch of known
    shapes is not looked at again. Without `place`, numpy arrays stay on the host, for the program's call
    to move.
    """
    leaves, treedef = jax.tree.flatten(inputs, is_leaf=is_scattered)
    key: Any = None
    if layouts is not None:
        key = (treedef, *[(x.shape, x.dtype) if hasattr(x, "dtype") else Static(x) for x in leaves])
        layout = layouts.get(key)
        if layout is not None:
            return _fill(leaves, layout, place)
    axis_of = [dim] * len(leaves) if axes is None else axes_of(axes, inputs)
    ready: list[Ready] = []
    if any(map(is_scattered, leaves)):
        axis_of = [a for a, x in zip(axis_of, leaves, strict=True) for _ in (x._layout.leaves if is_scattered(x) else "-")]
        inputs = jax.tree.unflatten(treedef, [_expand(x, mesh, verb) if is_scattered(x) else x for x in leaves])
        leaves, treedef = jax.tree.flatten(inputs)
        ready = [x for x in leaves if type(x) is Ready]
    specs: list[Any] = []
    converted = False
    for i, (leaf, axis) in enumerate(zip(leaves, axis_of, strict=True)):
        if type(leaf) is Ready:
            specs.append(leaf.spec)
            continue
        is_array, leaves[i] = classify(leaf, verb, lambda i=i: name_of(inputs, i, root))
        converted |= leaves[i] is not leaf
        if not is_array:
            specs.append(Static(leaf))
        elif axis is None or not leaf.ndim:
            specs.append(Whole())
        else:
            specs.append(normal_axis(axis, leaf.ndim, verb, lambda i=i: name_of(inputs, i, root)))
    n = mesh.devices.size
    cut = [(i, spec) for i, spec in enumerate(specs) if isinstance(spec, int)]
    chunks = next((x.sizes for x in ready if not isinstance(x.spec, Whole)), None)
    if cut:
        rows = check_rows([(leaves[i], axis, i) for i, axis in cut], verb, lambda i: name_of(inputs, i, root))
        if chunks is not None and sum(chunks) != rows:
            raise ValueError(
                f"jdp.{verb}: {name_of(inputs, cut[0][0], root)} has {rows} rows, what is scattered already has "
                f"{sum(chunks)}; all inputs are cut alike. Scatter them together."
            )
        chunks = chunks or (torch_chunk_sizes(rows, n) if sizes is None else given_sizes(sizes, rows, n))
    elif chunks is None:
        chunks = (1,) if sizes is None else given_sizes(sizes, 0, n)
    if any(x.sizes != chunks for x in ready if not isinstance(x.spec, Whole)):
        raise ValueError(
            f"jdp.{verb}: inputs that are scattered already have chunks {[x.sizes for x in ready]}; all inputs are "
            f"cut alike. Scatter them together."
        )
    layout = Layout(treedef, tuple(Cut(s, chunks) if isinstance(s, int) else s for s in specs), chunks, mesh, dim)
    if layouts is not None and not ready and not converted:
        layouts[key] = layout
    return _fill(leaves, layout, place)


def _fill(leaves: Sequence[Any], layout: Layout, place: bool) -> Scattered:
    """The leaves, padded, as a `Scattered`; on the devices, but for numpy arrays where not `place`."""
    n, even = len(layout.devices), layout.is_even
    arrays = []
    for x, leaf in zip(leaves, layout.leaves, strict=True):
        if type(x) is Ready:
            arrays.append(x.array)
        elif type(leaf) is not Static:
            arrays.append(x if even or type(leaf) is not Cut else _pad(x, leaf, n))
    s = Scattered(arrays, layout)
    return s if not place and all(type(x) is np.ndarray for x in arrays) else placed(s)


class Ready:
    """One array of an argument that came scattered already."""

    __slots__ = ("array", "spec", "sizes")

    def __init__(self, array: Any, spec: Leaf, sizes: tuple[int, ...]) -> None:
        self.array, self.spec, self.sizes = array, spec, sizes


def _expand(s: Scattered, mesh: Mesh, verb: str) -> Tree:
    """The tree of `s`, with a `Ready` for each array."""
    layout = s._layout
    if layout.mesh != mesh:
        raise ValueError(
            f"jdp.{verb}: an input is scattered over ({', '.join(map(str, s.devices))}), the call runs on "
            f"({', '.join(map(str, mesh.devices.flat))}); one call runs on one set of devices. Scatter it over these."
        )
    return layout.fill([Ready(x, leaf, layout.sizes) for x, leaf in zip(s._arrays, layout.arrays, strict=True)])


def _pad(x: Any, leaf: Cut, n: int) -> Any:
    return pad(x, leaf, n) if isinstance(x, np.ndarray) else _jit_pad(x, leaf, n)


_jit_pad = jax.jit(pad, static_argnums=(1, 2))


def gather(
    outputs: Scattered | Sequence[Tree], output_device: DeviceLike | None = None, dim: int = 0
) -> Tree:
    """Concatenates the chunks of all replicas along `dim`, in input order: `gather(scatter(x)) == x`.

    True sizes only: padding never shows. 0-d arrays become a vector with one entry per replica
    used, in silence (torch warns). Leaves that are whole on every replica come back as they are.
    Under `jax.jit` the values are the same, and stay on the replicas.

    Args:
        outputs: a `jdp.Scattered`, or a list with one tree of arrays per device.
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
    if isinstance(outputs, Scattered):
        return join(_along(placed(outputs), dim), device)
    from ._gather_list import gather_list  # the rarer door; it needs this module

    return gather_list(outputs, device, dim)


def join(outputs: Scattered, device: jax.Device | str | None) -> Tree:
    """`gather`, each leaf along its own axis."""
    outputs = placed(outputs)
    layout = outputs._layout
    values = [concrete(x) for x in outputs._arrays]
    if any(value is None for value in values):
        return layout.fill(_trim(outputs))
    if device == "sharded":
        return layout.fill(outputs._arrays if layout.is_even else _trim_sharded(outputs))
    target = layout.devices[0] if device is None else device
    arrays: Sequence[Any] = outputs._arrays
    if layout.devices != (target,):  # else they are there
        arrays = [_one_copy(x, leaf, layout) for x, leaf in zip(arrays, layout.arrays, strict=True)]
        arrays = [jax.device_put(arrays[0], target)] if len(arrays) == 1 else jax.device_put(arrays, target)
    return layout.fill(arrays if layout.is_even else _jit_trim(Scattered(arrays, layout)))


def _one_copy(x: Any, leaf: Leaf, layout: Layout) -> Any:
    """An array that device_put brings to one device well."""
    if isinstance(x, jax.core.Tracer):
        return x if isinstance(leaf, Whole) else reshard(x, replicated(layout.mesh))
    if isinstance(leaf, Whole) and x.is_fully_addressable:
        return x.addressable_data(0)  # device_put would read it through the host
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


_jit_trim = jax.jit(_trim)


@jax.jit
def _trim_sharded(s: Scattered) -> list[Any]:
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
    return _realign(s, tuple(axes))


@functools.partial(jax.jit, static_argnums=1)
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

