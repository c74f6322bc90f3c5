"""replicate puts a copy of every leaf of a tree on every device: `replicate(tree)[device i] == tree`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .devices import Devices
from .fingerprint import compare_processes
from .global_arrays import own_copies, own_memory, put, refuse_traced
from .inputs import classify, flatten_batch, refuse_wrapped
from .layout import Tree
from .programs import all_lie, capturing, refuse_freed
from .replica_mesh import ReplicaMesh, mesh_of, outside_of_mesh
from .scattered import concrete, has_values, is_scattered, put_all, reshard
from .shards import axis_for_parameter, cut_axis_of, refuse_too_large, shard


@outside_of_mesh
def replicate(tree: Tree, devices: Devices = None) -> Tree:
    """Puts a copy of every leaf of a pytree on every device: `params = jdp.replicate(params)`.

    Leaves that are there already are neither moved nor copied; if all of them are, the very same tree
    comes back. A jax array on one of the devices may share its memory with the copy there, and donation of
    one frees both; numpy arrays are copied. Python scalars become 0-d arrays. Differentiable: the gradient
    comes back to where the leaf was. Under `jax.jit` the tree passes through, because the program replicates
    it. With several processes, all pass the same values; `dp.check_replicas` compares them.

    Args:
        tree: a pytree of arrays: on the host, on the primary device, replicated, or cut over these devices
            (`shard_params`).
        devices: the devices, the primary first; `None` is all of `jax.devices()`.

    Returns:
        The tree, each leaf a `jax.Array` that is replicated over `devices`.

    Raises:
        RuntimeError: a leaf is committed to any other device.
        TypeError: a leaf is no array and no number.
        OverflowError: integers that do not fit in 32 bits, without `jax_enable_x64`.

    Example:
        >>> import jdp, numpy as np
        >>> w = jdp.replicate({"w": np.ones(3)}, devices=[0])["w"]
        >>> w.is_fully_replicated
        True

    Source: torch/nn/parallel/replicate.py; the device check is that of `DataParallel.forward` in
    torch/nn/parallel/data_parallel.py.
    """
    return broadcast(tree, mesh_of("replicate", devices), "replicate", cut="whole")


OfShards = Literal["scattered", "whole", "kept"]


def broadcast(
    tree: Tree, mesh: ReplicaMesh, verb: str, root: str = "", cut: OfShards = "scattered", comes_back: bool = False
) -> Tree:
    """Replicates a tree, which errors call `root`. A `Scattered` in it (state with a batch axis) stays as it is.

    `cut` says what becomes of a leaf that is cut over this mesh (`shard_params`): "scattered", so that the program
    gathers it, "whole", or "kept" as it is. If the tree `comes_back` from the program, as a state does, it gets the
    very sharding of the results; otherwise the next call would compile the program again.
    """
    target = mesh.replicated
    leaves, _ = flatten_batch(tree, verb, "params", stop=None)
    if mesh.is_described or all_lie(leaves, mesh) and not (comes_back and leaves and leaves[0].sharding != target):
        return tree
    refuse_freed_in(tree, leaves, verb, root)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_scattered)
    if mesh.inner_axes:
        found = [
            _over_inner_axes(x, mesh, verb, functools.partial(_path_at, tree, i, root)) for i, x in enumerate(leaves)
        ]
        _pin_gradients(found, mesh)
        tree = tree if all(map(operator.is_, found, leaves)) else treedef.unflatten(found)
        leaves = found
    away = _away(leaves, mesh, comes_back)
    if not away:
        return tree
    for i in list(away):
        axis = cut_axis_of(leaves[i], mesh)
        if axis is not None:
            if cut != "whole":
                leaves[i] = shard(leaves[i], axis, mesh) if cut == "scattered" else leaves[i]
                away.remove(i)
            continue
        if capturing():  # nothing is moved for a program that is only looked at
            away.remove(i)
            continue
        leaves[i] = _checked_parameter(own_copies(leaves[i], target), mesh, verb, tree, i, root)
        if isinstance(leaves[i], Tracer) and not has_values():
            away.remove(i)
        elif isinstance(leaves[i], Tracer) and not isinstance(concrete(leaves[i]), jax.Array):
            # A gradient goes back to the device that the value came from. A value of the host has none, so it gets one.
            leaves[i] = jax.device_put(leaves[i], mesh.own.devices[0])
    values = [own_memory(leaves[i], mesh) if verb == "replicate" else leaves[i] for i in away]
    refuse_traced(values, mesh, verb)
    moved = [put(x, target) for x in values] if mesh.spans_processes else put_all(values, target)
    for i, x in zip(away, moved, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def refuse_freed_in(tree: Tree, leaves: list[Any], verb: str, root: str) -> None:
    """Raises a `RuntimeError` for a leaf that has been freed, also for one that an eager transformation wraps."""

    def name(i: int) -> str:
        return root + jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(tree)[i][0]) or "params"

    refuse_freed([concrete(x) if isinstance(x, Tracer) else x for x in leaves], verb, name)


def _away(leaves: list[Any], mesh: ReplicaMesh, comes_back: bool) -> list[int]:
    """Returns the indices of the leaves that do not lie on the replicas yet."""

    def is_away(x: Any) -> bool:
        if is_scattered(x) or (value := concrete(x)) is None:
            return False
        # Not by equivalence: on one device an uncommitted array is in the right place, but a jitted step would compile
        # once for it, and again for what comes back committed.
        found = getattr(value, "sharding", None)
        lies = found == mesh.replicated or not comes_back and mesh.replicates(found)
        return not (lies or mesh.inner_axes and mesh.holds(found))

    return [i for i, x in enumerate(leaves) if is_away(x)]


def sharded(tree: Tree, mesh: ReplicaMesh, verb: str, root: str = "") -> Tree:
    """Cuts each leaf over the devices, or replicates it if no axis of it divides; a leaf that is in place stays."""

    def checked(index: int, x: Any) -> Any:
        if isinstance(x, Tracer) and concrete(x) is None:
            return x  # under jit there is no value to place yet
        if cut_axis_of(x, mesh) is None:
            x = _checked_parameter(own_copies(x, mesh.replicated), mesh, verb, tree, index, root)
        return x if hasattr(x, "ndim") else jnp.asarray(x)

    def place(x: Any) -> Any:
        target = mesh.along(axis_for_parameter(x, mesh.size))
        return x if isinstance(x, Tracer) or getattr(x, "sharding", None) == target else put(x, target)

    refuse_too_large(tree, mesh, verb, root)
    leaves, treedef = jax.tree.flatten(tree)
    refuse_freed_in(tree, leaves, verb, root)
    tree = treedef.unflatten([checked(i, x) for i, x in enumerate(leaves)])
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        compare_processes(tree, mesh, verb, root)
    return jax.tree.map(place, tree)


def lives_replicated(tree: Tree, mesh: ReplicaMesh) -> bool:
    """Returns True if a tree's arrays are replicated over the mesh's devices, as any mesh of them, or cut over it."""
    values = [concrete(x) for x in jax.tree.leaves(tree, is_leaf=is_scattered) if not is_scattered(x)]
    target = mesh.replicated
    return bool(values) and all(
        isinstance(x, jax.Array)
        and (
            x.sharding == target
            or x.sharding.is_equivalent_to(target, x.ndim)
            or mesh.holds(mesh.renamed(x.sharding))
            or cut_axis_of(x, mesh) is not None
        )
        for x in values
        if x is not None
    )


def placed_like(tree: Tree, params: Tree, mesh: ReplicaMesh) -> Tree:
    """Puts each array of a tree where the parameter at the same path lies, if both lie on the replicas."""

    def place(x: Any, param: Any) -> Any:
        to, found = _sharding_of(param), _sharding_of(x)
        is_there = to is None or found == to or not mesh.holds(found) or not mesh.holds(to)
        return x if is_there else jax.device_put(x, to)

    return jax.tree.map(place, tree, params)


def _checked_parameter(leaf: Any, mesh: ReplicaMesh, verb: str, tree: Tree, index: int, root: str) -> Any:
    """Returns a parameter in a form that JAX takes; raises an error for one that cannot be replicated."""
    x, path = concrete(leaf), functools.partial(_path_at, tree, index, root)
    if isinstance(x, jax.Array):
        primary, found = mesh.own.devices[0], x.sharding.device_set
        whole = x.is_fully_replicated and found == set(mesh.all_devices)
        if x.committed and found != {primary} and not whole:
            raise RuntimeError(_wrong_device(x, mesh, verb, path(), jax.tree.leaves(tree)))
        return leaf
    is_number = isinstance(x, bool | int | float | complex)
    is_array, converted = (False, x) if is_number else classify(x, verb, path)
    if not is_array and not is_number:
        raise TypeError(
            f"jdp.{verb}: {path()} is a {type(x).__name__}; parameters are arrays. Keep it out of the parameters and "
            f"pass it as an argument."
        )
    if is_array or isinstance(x, int):
        refuse_wrapped(x, verb, path)
    return leaf if converted is x else converted


def _sharding_of(x: Any) -> Any:
    return getattr(concrete(x), "sharding", None)


def _pin_gradients(leaves: list[Any], mesh: ReplicaMesh) -> None:
    """Makes each gradient come back cut as its parameter is, even if the compiler would cut it in another way."""
    traced = {i: x for i, x in enumerate(leaves) if isinstance(x, Tracer) and mesh.holds(_sharding_of(x))}
    if traced:
        found = _with_gradients_at(tuple(map(_sharding_of, traced.values())), tuple(traced.values()))
        for i, x in zip(traced, found, strict=True):
            leaves[i] = x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_gradients_at(shardings: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arrays as they are; only their tangents, and so their gradients, are put onto the shardings."""
    return arrays


@_with_gradients_at.defjvp
def _(shardings: tuple[Any, ...], arrays: Any, tangents: Any) -> tuple[Any, Any]:
    return arrays[0], reshard(tangents[0], shardings)


def _over_inner_axes(x: Any, mesh: ReplicaMesh, verb: str, path: Callable[[], str]) -> Any:
    """Returns a parameter for replicas of several devices; one on the same mesh with Explicit axes comes to this mesh.

    Raises:
        ValueError: it is cut over the replicas, or a program around the call has typed it by Explicit axes.
    """
    if is_scattered(x):
        return x
    if isinstance(x, Tracer) and concrete(x) is None and jax.typeof(x).sharding.mesh.explicit_axes:
        raise ValueError(
            f"jdp.{verb}: traced (by jax.jit or the like) with parameters over Explicit axes, {jax.typeof(x)}; values "
            f"are typed by these axes, and a replica's program has Auto ones. Put the parameters on dp.mesh, whose "
            f"axes are Auto: jax.device_put(x, NamedSharding(dp.mesh, x.sharding.spec))."
        )
    found = _sharding_of(x)
    where = mesh.renamed(found)
    x = x if where is found else jax.device_put(x, where)
    if cut_axis_of(x, mesh) is not None:
        raise ValueError(cut_over_replicas(verb, path(), x, mesh))
    return x


def cut_over_replicas(verb: str, path: str, x: Any, mesh: ReplicaMesh) -> str:
    """Returns the error for a parameter that is cut over the replicas of several devices."""
    return (
        f"jdp.{verb}: {path} is cut as {concrete(x).sharding.spec}, and {mesh.axis_name!r} counts the replicas; each "
        f"replica holds all of a parameter, cut over {' and '.join(map(repr, mesh.inner_axes))} at most. Leave "
        f"{mesh.axis_name!r} out of its spec."
    )


def _path_at(tree: Tree, index: int, root: str) -> str:
    path = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scattered)[index][0]
    return root + jax.tree_util.keystr(path) or "params"


def _wrong_device(x: jax.Array, mesh: ReplicaMesh, verb: str, path: str, all_of_them: list[Any]) -> str:
    n, primary = len(mesh.all_devices), mesh.own.devices[0]
    spec = tuple(getattr(x.sharding, "spec", ()))
    found = ", ".join(sorted(str(d) for d in x.sharding.device_set))
    one_each = len(x.sharding.device_set) == n and all(jax.numpy.shape(y)[:1] == (n,) for y in all_of_them)
    if one_each and not x.is_fully_replicated and (not spec or spec[0] is not None):
        return (
            f"jdp.{verb}: {path} has shape {x.shape} and is cut over {n} devices along its first axis: it looks "
            f"replicated for jax.pmap, one copy stacked for each device; jdp takes plain parameters. Pass "
            f"jax.tree.map(lambda x: x[0], params) (flax.jax_utils.unreplicate); or, where these are no copies but the "
            f"parts of one parameter, jdp.replicate(jax.device_get(params), devices)."
        )
    fact = (
        f"jdp.{verb}: {path}: module must have its parameters and buffers on device {primary} (device_ids[0]) but "
        f"found one of them on device: {found}"
    )
    if mesh.inner_axes:
        return (
            f"{fact}; parameters live there, on the host, or on the replicas' mesh. Put each "
            f"on that mesh, with its own spec or P(): jax.device_put(x, NamedSharding(dp.mesh, spec))."
        )
    if not x.is_fully_replicated:
        return (
            f"{fact}, cut into pieces ({x.shape} as {spec}); every replica holds all of it. Gather all of them and put "
            f"them on every device: jdp.replicate(jax.device_get(params), devices). Make an NNX model, and its "
            f"optimizer, under nnx.use_eager_sharding(False)."
        )
    return (
        f"{fact}; parameters live there, on the host, or on all of the replicas. Move them with jax.device_put(params, "
        f"{primary!r}), or replicate them from the host: jdp.replicate(jax.device_get(params), devices)."
    )
