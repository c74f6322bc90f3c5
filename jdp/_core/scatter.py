"""scatter looks at a batch, cuts it and places the chunks: `gather(scatter(x)) == x`. The processes agree first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from .._jax.private import trace_state_clean
from .._processes.agree import Outline, begin, fail, finish
from .agreement import alike, outline_of, own_rows, own_sizes, rows_of_all
from .devices import (
    Devices,
    mesh_of,
    own_mesh,
    processes_of,
    spans_processes,
)
from .global_arrays import assemble, global_shapes
from .inputs import (
    ARRAYS,
    STACKED,
    axes_of,
    check_dim,
    check_rows,
    classify,
    name_of,
    no_further,
    normal_axis,
    refuse_deep,
    refuse_rows_of_numbers,
)
from .layout import Cut, Layout, Leaf, Stack, Static, Tree, Whole, chunk_sizes, given_sizes, pad
from .programs import SIZES, Recent, capturing
from .scattered import Scattered, is_scattered, on_mesh, placed


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


def split(
    inputs: Tree,
    mesh: Mesh,
    dim: int,
    *,
    verb: str,
    root: str | tuple[str, ...],
    axes: Tree = None,
    sizes: Sequence[int] | None = None,
    layouts: Recent[Any, Layout] | None = None,
    place: bool = True,
    stacked: Callable[[Any], bool] | None = None,
) -> Scattered:
    """`scatter`, with one axis (or None) for each leaf in `axes`; what is `Scattered` already stays so.

    `layouts` keeps the layouts of a wrapper, whose mesh, dim and axes do not change: a batch of known
    shapes is not looked at again. Without `place`, numpy arrays stay on the host, for the program's call
    to move. `stacked` tells which arrays hold one entry for each replica.
    """
    options: Any = {"root": root, "axes": axes, "sizes": sizes, "layouts": layouts, "stacked": stacked}
    try:
        batch = prepare(inputs, mesh, dim, verb=verb, **options)
    except Exception as error:
        if spans_processes(mesh):
            fail(processes_of(mesh), verb, error)
        raise
    if isinstance(batch, Prepared):
        chunks = batch.sizes
        if batch.outline is not None:
            chunks = alike(mesh, chunks) if capturing() else _agreed_on(mesh, verb, chunks, batch.outline)
        return filled(batch, chunks, layouts, place)
    leaves, layout = batch
    return _fill(leaves, layout, place)


def _agreed_on(mesh: Mesh, verb: str, sizes: tuple[int, ...], outline: Outline) -> tuple[int, ...]:
    """The rows of every replica, when all processes have told theirs."""
    return rows_of_all(mesh, finish(begin(processes_of(mesh), verb, sizes, outline)).rows)


def filled(batch: Prepared, chunks: tuple[int, ...], layouts: Recent[Any, Layout] | None, place: bool) -> Scattered:
    """The batch as a `Scattered`, with the rows of every replica."""
    specs = tuple(Cut(s, chunks) if isinstance(s, int) else s for s in batch.specs)
    layout = Layout(batch.treedef, specs, chunks, batch.mesh, batch.dim)
    if layouts is not None and batch.key is not None:
        # With several processes the rows of the others are no part of the key; one object for each all the same.
        key = batch.key if batch.outline is None else (chunks, batch.key)
        layout = layouts.setdefault(key, layout)
    return _fill(batch.leaves, layout, place)


def _fill(leaves: Sequence[Any], layout: Layout, place: bool) -> Scattered:
    """The leaves, padded, as a `Scattered`; on the devices, but for numpy arrays where not `place`."""
    several = spans_processes(layout.mesh)
    own = layout.here if several else layout
    n, even = len(own.devices), own.is_even
    arrays = []
    for x, leaf in zip(leaves, own.leaves, strict=True):
        if type(x) is Ready:
            arrays.append(x.array)
        elif type(leaf) is not Static:
            arrays.append(x if even or type(leaf) is not Cut else _pad(x, leaf, n))
    if several:
        return Scattered(global_shapes(arrays, layout) if capturing() else assemble(arrays, layout), layout)
    # In a job of several processes a program takes numpy arrays for what is whole on all of them, and no others.
    as_it_is = not place and jax.process_count() == 1 and {*map(type, arrays)} <= {np.ndarray}
    s = Scattered(arrays, layout)
    return s if as_it_is else placed(s)


def _pad(x: Any, leaf: Cut, n: int) -> Any:
    return pad(x, leaf, n) if isinstance(x, np.ndarray) else _padding(leaf, n)(x)


@functools.lru_cache(SIZES)
def _padding(leaf: Cut, n: int) -> Any:
    return jax.jit(lambda x: pad(x, leaf, n))


class Prepared(NamedTuple):
    """A batch whose leaves are known, but not yet how many rows every replica has."""

    leaves: list[Any]
    specs: list[Any]
    treedef: Any
    sizes: tuple[int, ...]  # of this process's own replicas, where it has an outline
    mesh: Mesh
    dim: int
    key: Any  # under which the layout is kept; None where it is not
    outline: Outline | None  # for the other processes; None where there are none, or they know it
    nodes: Mapping[int, Any] = {}  # the NNX objects that were taken out of it


def prepare(
    inputs: Tree,
    mesh: Mesh,
    dim: int,
    *,
    verb: str,
    root: str | tuple[str, ...],
    axes: Tree = None,
    sizes: Sequence[int] | None = None,
    layouts: Recent[Any, Layout] | None = None,
    stacked: Callable[[Any], bool] | None = None,
) -> Prepared | tuple[list[Any], Layout]:
    """The batch, checked; or its leaves and their layout, where that is known."""
    _refuse_trace(mesh, verb)
    leaves, treedef = flat(inputs, verb, root)
    key: Any = None
    if layouts is not None:
        key = (treedef, *map(known_by, leaves))
        if (layout := layouts.used(key)) is not None:
            return [y for x in leaves for y in (_ready(x) if type(x) is Scattered else (x,))], layout
    axis_of = [dim] * len(leaves) if axes is None else axes_of(axes, inputs, verb)
    given = leaves
    if any(isinstance(x, Scattered) for x in leaves):
        each = [len(x._layout.leaves) if is_scattered(x) else 1 for x in leaves]
        axis_of = [axis for axis, count in zip(axis_of, each, strict=True) for _ in range(count)]
        inputs = jax.tree.unflatten(treedef, [_expand(x, mesh, verb) if is_scattered(x) else x for x in leaves])
        given, treedef = jax.tree.flatten(inputs)

    def name(i: int) -> str:
        return name_of(inputs, i, root)

    if axes is not None:
        _refuse_cut_otherwise(given, axis_of, dim, verb, name)
    leaves, specs = _specs(given, axis_of, verb, name)
    if stacked is not None:
        specs = [Stack() if isinstance(s, int) and stacked(x) else s for x, s in zip(leaves, specs, strict=True)]
    several = spans_processes(mesh)
    mixed = several and any(type(x) is Ready for x in leaves) and not all(type(x) is Ready for x in leaves)
    if mixed or any(x is not y for x, y in zip(leaves, given, strict=True)):
        key = None  # the layout does not hold for the next batch as it is: something was converted, or all must agree
    outline = None
    if several:
        leaves = own_rows(leaves, specs, mesh, verb, name)
        if not _agreed(leaves, specs):
            outline = outline_of([x.array if type(x) is Ready else x for x in leaves], specs, treedef, root)
    chunks = _chunks(leaves, specs, mesh, verb, name, sizes)
    if verb != "scatter":
        known = several and outline is None  # by all processes, the rows of them all
        own = own_sizes(mesh, (*chunks, *[0] * (mesh.size - len(chunks)))) if known else chunks
        cut = outline is not None or any(isinstance(s, int | Cut | Stack) for s in specs)
        refuse_rows_of_numbers(inputs, sum(own) if cut else None, verb, root)
    return Prepared(leaves, specs, treedef, chunks, mesh, dim, key, outline)


def flat(
    inputs: Tree, verb: str, root: str | tuple[str, ...], stop: Callable[[Any], bool] = no_further
) -> tuple[list[Any], Any]:
    """The leaves of a batch, and its treedef."""
    refuse_deep(inputs, verb, root)
    try:
        return jax.tree.flatten(inputs, is_leaf=stop)
    except ValueError as error:  # JAX's, for dict keys that do not compare
        raise ValueError(
            f"jdp.{verb}: a dict among the {'inputs' if isinstance(root, tuple) else root} has keys of several types "
            f"({error}); JAX sorts them. Pass keys of one type."
        ) from None


def _refuse_trace(mesh: Mesh, verb: str) -> None:
    """A `ValueError` inside of a transformation that would see one process's rows."""
    if spans_processes(mesh) and not trace_state_clean() and not capturing():
        raise ValueError(
            f"jdp.{verb}: called inside of jax.jit, jax.grad or the like, and each process passes its own rows; JAX's "
            f"transformations see one process's program, not the rows of the others. Call it outside of them: "
            f"dp.value_and_grad and dp.train_step give gradients over all processes."
        )


def _agreed(leaves: Sequence[Any], specs: Sequence[Any]) -> bool:
    """Whether all processes know the rows already, from what came scattered: its own, or of nothing that is cut."""
    ready = [type(x) is Ready for x in leaves]
    rows = [isinstance(s, int | Cut | Stack) for s in specs]
    return any(r and cut for r, cut in zip(ready, rows, strict=True)) or any(ready) and not any(rows)


def _refuse_cut_otherwise(
    given: Sequence[Any], axis_of: Sequence[int | None], dim: int, verb: str, name: Callable[[int], str]
) -> None:
    """A `ValueError` for what came cut, and that `in_axes` wants whole, or cut along another axis."""
    for i, (x, axis) in enumerate(zip(given, axis_of, strict=True)):
        if type(x) is not Ready or not isinstance(x.spec, Cut) or axis == dim:
            continue
        if axis is None or axis % x.array.ndim != x.spec.axis:
            raise ValueError(
                f"jdp.{verb}: {name(i)} came cut along axis {x.spec.axis}, and in_axes has {axis} for it; what is "
                f"scattered stays as it was cut. Scatter it with the same in_axes, dp.prefetch(batches, in_axes=...)."
            )


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
            elif axis is STACKED:
                spec = Stack()
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
    mesh: Mesh,
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
    several = spans_processes(mesh)
    n = own_mesh(mesh).size if several else mesh.size
    cut = [(x, axis, i) for i, (x, axis) in enumerate(zip(leaves, specs, strict=True)) if isinstance(axis, int)]
    if not cut and several and _agreed(leaves, specs) and not ready:
        return next(x.sizes for x in leaves if type(x) is Ready)
    if not cut:
        alone = (1,) * n if any(isinstance(s, Stack) for s in specs) else (1, *[0] * (n - 1)) if several else (1,)
        return ready.pop() if ready else alone if sizes is None else given_sizes(sizes, 0, n)
    rows = check_rows(cut, verb, name)
    if not ready:
        own = chunk_sizes(rows, n) if sizes is None else given_sizes(sizes, rows, n)
        return (*own, *[0] * (n - len(own))) if several else own
    chunks = ready.pop()
    if sum(own_sizes(mesh, chunks) if several else chunks) != rows:
        raise ValueError(
            f"jdp.{verb}: {name(cut[0][2])} has {rows} rows, what is scattered already has {sum(chunks)}; all inputs "
            f"are cut alike. Scatter them together."
        )
    return chunks


def known_by(x: Any) -> Any:
    """What decides how a leaf of a batch is cut."""
    if type(x) is Scattered:
        return x._layout
    return (x.shape, x.dtype) if isinstance(x, ARRAYS) else Static(x)


class Ready:
    """One array of an argument that came scattered already."""

    __slots__ = ("array", "spec", "sizes")

    def __init__(self, array: Any, spec: Leaf, sizes: tuple[int, ...]) -> None:
        self.array, self.spec, self.sizes = array, spec, sizes


def _ready(s: Scattered) -> list[Any]:
    """The leaves of `s`, with a `Ready` for each array."""
    arrays = iter(s._arrays)
    return [
        leaf.value if type(leaf) is Static else Ready(next(arrays), leaf, s._layout.sizes) for leaf in s._layout.leaves
    ]


def _expand(s: Scattered, mesh: Mesh, verb: str) -> Tree:
    """The tree of `s`, with a `Ready` for each array."""
    s = on_mesh(s, mesh)
    layout = s._layout
    if layout.mesh != mesh:
        raise ValueError(
            f"jdp.{verb}: an input is scattered over ({', '.join(map(str, s.devices))}), the call runs on "
            f"({', '.join(map(str, mesh.devices.flat))}); one call runs on one set of devices. Scatter it over these."
        )
    return jax.tree.unflatten(layout.treedef, _ready(s))
