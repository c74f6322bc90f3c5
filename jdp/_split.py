"""split is scatter with an axis for each leaf: it makes the layout, pads, and places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ._check import ARRAYS, axes_of, check_rows, classify, name_of, no_further, normal_axis, refuse_rows_of_numbers
from ._chunk import chunk_sizes, given_sizes, pad
from ._layout import Cut, Layout, Leaf, Stack, Static, Tree, Whole
from ._scattered import Scattered, is_scattered, placed


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
    stacked: Callable[[Any], bool] | None = None,
) -> Scattered:
    """`scatter`, with one axis (or None) for each leaf in `axes`; what is `Scattered` already stays so.

    `layouts` keeps the layouts of a wrapper, whose mesh, dim and axes do not change: a batch of known
    shapes is not looked at again. Without `place`, numpy arrays stay on the host, for the program's call
    to move. `stacked` tells which arrays hold one entry for each replica.
    """
    try:
        leaves, treedef = jax.tree.flatten(inputs, is_leaf=no_further)
    except ValueError as error:  # JAX's, for dict keys that do not compare
        raise ValueError(
            f"jdp.{verb}: a dict among the {'inputs' if isinstance(root, tuple) else root} has keys of several types "
            f"({error}); JAX sorts them. Pass keys of one type."
        ) from None
    key: Any = None
    if layouts is not None:
        key = (treedef, *[(x.shape, x.dtype) if isinstance(x, ARRAYS) else Static(x) for x in leaves])
        if (layout := layouts.get(key)) is not None:
            return _fill(leaves, layout, place)
    axis_of = [dim] * len(leaves) if axes is None else axes_of(axes, inputs)
    given = leaves
    if any(map(is_scattered, leaves)):
        each = [len(x._layout.leaves) if is_scattered(x) else 1 for x in leaves]
        axis_of = [axis for axis, count in zip(axis_of, each, strict=True) for _ in range(count)]
        inputs = jax.tree.unflatten(treedef, [_expand(x, mesh, verb) if is_scattered(x) else x for x in leaves])
        given, treedef = jax.tree.flatten(inputs)

    def name(i: int) -> str:
        return name_of(inputs, i, root)

    leaves, specs = _specs(given, axis_of, verb, name)
    if stacked is not None:
        specs = [Stack() if isinstance(s, int) and stacked(x) else s for x, s in zip(leaves, specs, strict=True)]
    chunks = _chunks(leaves, specs, mesh.size, verb, name, sizes)
    if verb != "scatter":
        refuse_rows_of_numbers(inputs, sum(chunks), verb, root)
    layout = Layout(treedef, tuple(Cut(s, chunks) if isinstance(s, int) else s for s in specs), chunks, mesh, dim)
    if layouts is not None and all(x is y and type(x) is not Ready for x, y in zip(leaves, given, strict=True)):
        layouts[key] = layout  # it holds for the next batch as it is: nothing was converted or scattered before
    return _fill(leaves, layout, place)


def _specs(
    given: Sequence[Any], axis_of: Sequence[int | None], verb: str, name: Callable[[int], str]
) -> tuple[list[Any], list[Any]]:
    """The leaves, in forms that JAX takes, and for each the axis that it is cut along or what else it is."""
    leaves, specs = [], []
    for i, (leaf, axis) in enumerate(zip(given, axis_of, strict=True)):
        if type(leaf) is Ready:
            spec: Any = leaf.spec
        else:
            array, leaf = classify(leaf, verb, lambda i=i: name(i))
            if not array:
                spec = Static(leaf)
            elif axis is None or not leaf.ndim:
                spec = Whole()
            else:
                spec = normal_axis(axis, leaf.ndim, verb, lambda i=i: name(i))
        leaves.append(leaf)
        specs.append(spec)
    return leaves, specs


def _chunks(
    leaves: Sequence[Any],
    specs: Sequence[Any],
    n: int,
    verb: str,
    name: Callable[[int], str],
    sizes: Sequence[int] | None,
) -> tuple[int, ...]:
    """The rows of each chunk: of what is scattered already, else `sizes`, else by torch's rule."""
    ready = {x.sizes for x in leaves if type(x) is Ready and not isinstance(x.spec, Whole)}
    if len(ready) > 1:
        raise ValueError(
            f"jdp.{verb}: inputs that are scattered already have chunks {' and '.join(map(str, sorted(ready)))}; all "
            f"inputs are cut alike. Scatter them together."
        )
    cut = [(x, axis, i) for i, (x, axis) in enumerate(zip(leaves, specs, strict=True)) if isinstance(axis, int)]
    if not cut:
        alone = (1,) * n if any(isinstance(s, Stack) for s in specs) else (1,)
        return ready.pop() if ready else alone if sizes is None else given_sizes(sizes, 0, n)
    rows = check_rows(cut, verb, name)
    if not ready:
        return chunk_sizes(rows, n) if sizes is None else given_sizes(sizes, rows, n)
    chunks = ready.pop()
    if sum(chunks) != rows:
        raise ValueError(
            f"jdp.{verb}: {name(cut[0][2])} has {rows} rows, what is scattered already has {sum(chunks)}; all inputs "
            f"are cut alike. Scatter them together."
        )
    return chunks


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
