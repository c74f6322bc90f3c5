"""scatter looks at a batch, cuts it and places the chunks: `gather(scatter(x)) == x`. Several processes agree first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from .._jax.private import trace_state_clean
from .agreement import Outline, begin, fail, layout_of_all, outline_of
from .devices import Devices, names_of
from .global_arrays import assemble, global_shapes, own_memory, own_part
from .inputs import (
    ARRAYS,
    STACKED,
    axes_of,
    check_rows,
    checked_dim,
    classify,
    flatten_batch,
    no_further,
    normal_axis,
    paths_of,
    refuse_cut_graphs,
    refuse_legacy_key,
    refuse_rows_of_numbers,
    refuse_wrapped,
)
from .layout import Cut, Layout, Leaf, Stack, Static, Tree, Whole, chunk_sizes, given_sizes, pad
from .programs import SIZES, Layouts, capturing, refuse_freed
from .replica_mesh import ReplicaMesh, mesh_of, outside_of_mesh
from .scattered import Scattered, in_host_memory, leaf_by_leaf, on_mesh, placed


@outside_of_mesh
def scatter(
    inputs: Tree, devices: Devices = None, dim: int = 0, *, chunk_sizes: Sequence[int] | None = None
) -> Scattered:
    """Cuts every array of a pytree along `dim`, one chunk per device: `gather(scatter(x)) == x`.

    Arrays (jax or numpy) with `ndim >= 1` are cut by `torch.chunk`'s rule (`jdp.chunk_sizes`); any
    number of rows will do. 0-d arrays, Python scalars, strings, functions and other objects are
    replicated, and `None` stays `None`. Containers that JAX knows survive. With nothing to cut there is
    one chunk, on the primary device. Differentiable. With several processes, each passes its own rows,
    which go to its own devices.

    Args:
        inputs: a pytree; all its cut arrays have the same number of rows along `dim`. A `Scattered` in it (over these
            devices) stays as it is.
        devices: the devices, the primary first; `None` is all of `jax.devices()`.
        dim: the axis to cut along, negative allowed.
        chunk_sizes: rows per device, if the devices are uneven; zeros allowed. Default: torch's rule.

    Returns:
        A `jdp.Scattered`: `s[i]` is the tree of replica i, on its device.

    Raises:
        ValueError: cut arrays disagree on their rows, or `chunk_sizes` does not fit.
        IndexError: `dim` is out of range for an array.
        TypeError: a container that JAX does not know, an array of objects or strings, a torch tensor; `chunk_sizes`
            that are no ints.
        OverflowError: numpy's integers of 64 bits that do not fit in 32, without `jax_enable_x64`.

    Example:
        >>> import jdp, numpy as np
        >>> s = jdp.scatter((np.zeros((10, 3)), "mean"), devices=[0])
        >>> s.sizes, s[0][0].shape, s[0][1]
        ((10,), (10, 3), 'mean')

    Source: `scatter` in torch/nn/parallel/scatter_gather.py, which silently drops rows if arrays
    disagree; `scatter` in torch/nn/parallel/comm.py for `chunk_sizes`.
    """
    dim = checked_dim("scatter", dim)
    leaves, _ = flatten_batch(inputs, "scatter", "inputs", stop=None)
    refuse_freed(leaves, "scatter", lambda i: paths_of(inputs, "inputs", stop=None)[i])
    return split(inputs, Cutting(mesh_of("scatter", devices), dim, "scatter", "inputs", sizes=chunk_sizes))


class Cutting(NamedTuple):
    """How to cut a batch, and how errors name it."""

    mesh: ReplicaMesh
    dim: int
    verb: str
    root: str | tuple[str, ...]  # the name of the batch, or one name for each child of a tuple
    axes: Tree = None  # a tree prefix as in jax.vmap, with None for replicated leaves; default: dim for all
    sizes: Sequence[int] | None = None  # of the chunks; default: torch's rule
    stacked: Callable[[Any], bool] | None = None  # tells which arrays hold one entry for each replica
    # A wrapper's cache (its mesh, dim and axes do not change), so that batches of known shapes are not examined again.
    layouts: Layouts | None = None
    place: bool = True  # if False, numpy arrays stay on the host, and the call of the program moves them
    # The number of replicas, if the user has fixed it. Then torch's rule cuts the batch of all processes together, and
    # each process must pass the rows of its replicas. None: one replica per device, and each process passes any rows.
    replicas: int | None = None

    @property
    def per_device(self) -> int:
        return 1 if self.replicas is None else self.replicas // self.mesh.size


def split(inputs: Tree, how: Cutting) -> Scattered:
    """Scatters a batch as `how` says; a `Scattered` in it stays as it is."""
    try:
        batch = prepare(inputs, how)
    except Exception as error:
        fail(how.mesh, how.verb, error)
        raise
    arrays, layout = batch.arrays, batch.layout
    if batch.outline is not None:
        if capturing():  # explain asks no other process: each is taken to have the rows of this one
            rows = {process: iter(layout.rows) for process in how.mesh.processes}
            devices = [d for d in how.mesh.devices for _ in range(how.per_device)]
            sizes = tuple(next(rows[d.process_index], 0) for d in devices)
        else:
            finish = begin(how.mesh, how.verb, layout.by_device, batch.outline)
            arrays = put_early(batch)
            found, _ = finish()
            sizes = sizes_of_all(found, layout, how)
        layout = layout_of_all(layout, how.mesh, sizes)
    return as_scattered(arrays, layout, how.place)


class Prepared(NamedTuple):
    """A batch before it is padded and placed: its arrays and their layout."""

    arrays: list[Any]
    layout: Layout  # if there is an outline, the layout of this process's own chunks
    outline: Outline | None = None  # if the processes still have to exchange it, to learn each other's rows
    nodes: Mapping[int, Any] = {}  # the NNX objects that were taken out of it


def prepare(inputs: Tree, how: Cutting) -> Prepared:
    """Finds what each leaf of a batch is, and how many rows each chunk has."""
    several = how.mesh.spans_processes
    if several and not trace_state_clean() and not capturing():
        raise ValueError(_called_while_traced(how.verb))
    leaves, treedef = flatten_batch(inputs, how.verb, how.root)
    key_of_leaves, arrays = _key_of_batch(leaves)
    key = (treedef, *key_of_leaves)
    layout = None if how.layouts is None else how.layouts.used(key)
    if layout is not None:
        return Prepared(arrays, layout)
    if any(type(x) is Scattered for x in leaves):
        inputs = treedef.unflatten([leaf_by_leaf(_on_mesh(x, how)) if type(x) is Scattered else x for x in leaves])
        leaves, treedef = jax.tree.flatten(inputs, is_leaf=no_further)

    def name(i: int) -> str:
        return paths_of(inputs, how.root)[i]

    axes = [how.dim] * len(leaves) if how.axes is None else axes_of(how.axes, inputs, how.verb)
    values, specs = _kinds_of_leaves(leaves, axes, how, name)
    arrays = [x for x, spec in zip(values, specs, strict=True) if not isinstance(spec, Static)]
    # If some leaves came scattered, all processes know the rows already (or know that nothing is cut).
    came = [x._layout for x in leaves if type(x) is Scattered]
    is_cut = any(are_cut := [isinstance(spec, Cut | Stack) for spec in specs])
    refuse_cut_graphs(values, are_cut, treedef, how.verb, how.root)
    agreed = not several or any(x.is_cut for x in came) or bool(came) and not is_cut
    mesh = how.mesh if agreed else how.mesh.own
    outline = None if agreed else outline_of(values, specs, treedef, how.root)
    sizes = _chunk_rows(values, specs, came, mesh, how, name)
    given = tuple(Cut(spec.axis, sizes) if isinstance(spec, Cut) and not spec.sizes else spec for spec in specs)
    converted = any(x is not y and type(x) is not Scattered for x, y in zip(leaves, values, strict=True))
    # A 0-d array that the user wants to be replicated (axis None) is no row, so a string takes its place.
    may_be_rows = [x if a is not None or not hasattr(x, "dtype") else "" for x, a in zip(leaves, axes, strict=True)]
    layout = Layout(treedef, given, sizes, mesh, how.dim, how.per_device)
    if how.verb != "scatter":
        count = sum(layout.here.sizes) if is_cut else None
        refuse_rows_of_numbers(treedef.unflatten(may_be_rows), count, how.verb, how.root)
    # A batch of a known layout is taken as it came, so a batch with converted leaves must not become known.
    if how.layouts is not None and not converted and (not several or len(came) == len(leaves)):
        how.layouts[key] = layout
    return Prepared(arrays, layout, outline)


def sizes_of_all(found: Sequence[int], own: Layout, how: Cutting) -> tuple[int, ...]:
    """Returns the rows of each replica; `found` has those of each device, and `own` is this process's layout.

    Raises:
        ValueError: the number of replicas is fixed, and a process has more or fewer rows than its replicas take.
    """
    if how.replicas is None:
        return tuple(found)
    if not own.is_cut:  # the first replica of each process runs
        return tuple(x for rows in found for x in (rows, *[0] * (how.per_device - 1)))
    sizes = chunk_sizes(sum(found), how.replicas)
    sizes = (*sizes, *[0] * (how.replicas - len(sizes)))
    of = np.array([d.process_index for d in how.mesh.devices])
    processes = how.mesh.processes
    passed = [int(np.array(found)[of == p].sum()) for p in processes]
    meant = [int(np.array(sizes)[of.repeat(how.per_device) == p].sum()) for p in processes]
    if passed != meant:
        here = processes.index(jax.process_index())
        raise ValueError(
            f"jdp.{how.verb}: processes {', '.join(map(str, processes))} pass {', '.join(map(str, passed))} of "
            f"{sum(found)} rows; with replicas={how.replicas} the batch of all processes is cut into chunks of "
            f"{sizes}, and each passes the rows of its replicas. Pass {', '.join(map(str, meant))} rows, here "
            f"{meant[here]}."
        )
    return sizes


def put_early(batch: Prepared) -> list[Any]:
    """Puts the arrays on this process's devices while it waits for the others' rows, unless they need padding."""
    own = batch.layout
    if batch.outline is None or not own.is_even:  # the padding depends on the rows of the others
        return batch.arrays
    return jax.device_put(batch.arrays, list(own.shardings))


def _called_while_traced(verb: str) -> str:
    """Returns the text of the error for a call inside of a transformation, which would see one process's rows."""
    return (
        f"jdp.{verb}: called inside of jax.jit, jax.grad or the like, and each process passes its own rows; JAX's "
        f"transformations see one process's program, not the rows of the others. Call it outside of them: "
        f"dp.value_and_grad and dp.train_step give gradients over all processes."
    )


def _key_of_batch(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the key of a batch, a list of all that decides how its leaves are cut, and the arrays in them."""
    key: list[Any] = []
    arrays: list[Any] = []
    for x in leaves:
        if type(x) is Scattered:
            key.append(x._layout)
            arrays += x._arrays
        elif isinstance(x, ARRAYS) and not isinstance(x, str | bytes):  # numpy has strings of its own
            key.append((x.shape, x.dtype, type(x) is np.ma.MaskedArray))  # `classify` refuses it
            arrays.append(x)
        else:
            key.append(Static(x))
    return key, arrays


def _on_mesh(s: Scattered, how: Cutting) -> Scattered:
    s = on_mesh(s, how.mesh)
    if s._layout.mesh != how.mesh:
        raise ValueError(
            f"jdp.{how.verb}: an input is scattered over ({names_of(s.devices)}), the call runs on "
            f"({names_of([*how.mesh.devices])}); one call runs on one set of devices. Scatter it over these."
        )
    if s._layout.per_device != how.per_device:
        raise other_replicas(s, how.verb, how.per_device)
    return s


def other_replicas(s: Scattered, verb: str, per_device: int) -> ValueError:
    """Returns the error for a `Scattered` over another number of replicas on the same devices."""
    n = s._layout.mesh.size
    return ValueError(
        f"jdp.{verb}: an input is scattered over {s._layout.per_device * n} replicas on {n} devices, the call runs on "
        f"{per_device * n}; one call has one number of replicas. Pass the array itself, or scatter it with dp.prefetch."
    )


def _kinds_of_leaves(
    leaves: Sequence[Any], axes: Sequence[Any], how: Cutting, name: Callable[[int], str]
) -> tuple[list[Any], list[Leaf]]:
    """Returns the leaves in a form that JAX takes, and the kind of each; a new `Cut` has no sizes yet."""
    values: list[Any] = []
    specs: list[Leaf] = []
    for i, (x, axis) in enumerate(zip(leaves, axes, strict=True)):
        spec: Leaf
        if type(x) is Scattered:
            (x,), (spec,) = x._arrays, x._layout.arrays
            if isinstance(spec, Cut) and axis != how.dim and (axis is None or axis % x.ndim != spec.axis):
                raise ValueError(
                    f"jdp.{how.verb}: {name(i)} came cut along axis {spec.axis}, and in_axes has {axis} for it; an "
                    f"array that is scattered stays as it was cut. Scatter it with the same in_axes, "
                    f"dp.prefetch(batches, in_axes=...)."
                )
        else:
            called = functools.partial(name, i)
            found, x = classify(x, how.verb, called)
            if found and how.verb == "scatter":  # in a call, the model may never read this leaf
                refuse_wrapped(x, how.verb, called)
                x = own_memory(x, how.mesh)
            if not found:
                spec = Static(x)
            elif axis is STACKED:
                spec = Stack()
            elif axis is None or not x.ndim:
                if how.verb != "scatter":
                    refuse_legacy_key(x, how.verb, called, "make all replicas draw the same numbers")
                spec = Whole()
            else:
                spec = Cut(normal_axis(axis, x.ndim, how.verb, called), ())
                if how.stacked is not None and how.stacked(x):
                    spec = Stack()
                else:
                    x = _rows_here(x, spec.axis, how, called)
        values.append(x)
        specs.append(spec)
    return values, specs


def _rows_here(x: Any, axis: int, how: Cutting, name: Callable[[], str]) -> Any:
    """Returns this process's rows of an array: all, or those on its devices if the array spans several processes."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.is_fully_addressable:
        return x
    if not x.sharding.is_equivalent_to(how.mesh.along(axis), x.ndim):
        raise ValueError(
            f"jdp.{how.verb}: {name()} is an array over several processes, {x.sharding}; only if it is cut over the "
            f"replicas along axis {axis} does it show which rows are this process's. Pass these as a numpy array."
        )
    return own_part(x, axis, how.mesh)


def _chunk_rows(
    values: Sequence[Any],
    specs: Sequence[Leaf],
    came: Sequence[Layout],
    mesh: ReplicaMesh,
    how: Cutting,
    name: Callable[[int], str],
) -> tuple[int, ...]:
    """Returns the rows of each chunk: as in leaves that came scattered, or as the user asked, or by torch's rule."""
    cut = [
        (x, spec.axis, i)
        for i, (x, spec) in enumerate(zip(values, specs, strict=True))
        if isinstance(spec, Cut) and not spec.sizes
    ]
    rows = check_rows(cut, how.verb, name) if cut else 0
    found = {x.sizes: x for x in came if x.is_cut}
    if len(found) > 1:
        raise ValueError(
            f"jdp.{how.verb}: inputs that are scattered already have chunks {' and '.join(map(str, sorted(found)))}; "
            f"all inputs are cut in the same way. Scatter them together."
        )
    if found:
        ((sizes, layout),) = found.items()
        if cut and sum(layout.here.sizes) != rows:
            raise ValueError(
                f"jdp.{how.verb}: {name(cut[0][2])} has {rows} rows, what is scattered already has {sum(sizes)}; all "
                f"inputs are cut in the same way. Scatter them together."
            )
        n = mesh.size * how.per_device
        if how.sizes is not None and given_sizes(how.sizes, sum(sizes), n) != (*sizes, *[0] * (n - len(sizes))):
            raise ValueError(
                f"jdp.{how.verb}: chunk_sizes is {tuple(how.sizes)}, and what is scattered already has chunks {sizes}; "
                f"it stays as it was cut. Leave chunk_sizes out, or pass what jdp.gather makes of it."
            )
        return sizes
    if came and mesh.spans_processes:
        return came[0].sizes
    n = mesh.size * how.per_device
    is_stacked = not cut and any(isinstance(spec, Stack) for spec in specs)  # one entry for each replica, and no rows
    if how.sizes is not None:
        return given_sizes(how.sizes, sum(how.sizes) if is_stacked else rows, n)
    if cut:
        return chunk_sizes(rows, n)
    return (1,) * (n if is_stacked else 1)


def as_scattered(arrays: Sequence[Any], layout: Layout, place: bool = True) -> Scattered:
    """Pads the arrays, puts them on the devices, and returns them as a `Scattered`.

    Without `place`, numpy arrays stay on the host, and the program that takes them puts them on the devices.
    """
    own, kinds_before = layout.here, {*map(type, arrays)}
    if not own.is_even:
        arrays = [_pad_leaf(x, leaf, len(own.devices)) for x, leaf in zip(arrays, own.arrays, strict=True)]
    if layout.mesh.spans_processes:
        return Scattered(global_shapes(arrays, layout) if capturing() else assemble(arrays, layout), layout)
    # In a job of several processes JAX treats numpy arrays as replicated, so they are placed here.
    as_it_is = not place and jax.process_count() == 1 and {*map(type, arrays)} <= {np.ndarray}
    if as_it_is and not kinds_before <= {np.ndarray}:
        # jdp padded jax arrays on the host. A transfer guard would refuse that the program moves them back.
        as_it_is = jax.config.jax_transfer_guard_host_to_device in (None, "allow")  # type: ignore[attr-defined]
    s = Scattered(arrays, layout)
    return s if as_it_is else placed(s)


def _pad_leaf(x: Any, leaf: Leaf, n: int) -> Any:
    if not isinstance(leaf, Cut) or x.shape[leaf.axis] != sum(leaf.sizes):  # it came scattered, and is padded already
        return x
    x = in_host_memory(x)
    return pad(x, leaf, n) if isinstance(x, np.ndarray) else jitted_for(pad, leaf, n)(x)


@functools.lru_cache(SIZES)
def jitted_for(fn: Callable[..., Any], *static: Any) -> Any:
    """Returns `fn(x, *static)`, jitted, as a function of x; the cache drops it if it is not used for long."""
    return jax.jit(lambda x: fn(x, *static))
