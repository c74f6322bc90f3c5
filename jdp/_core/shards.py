"""Parameters that are cut over the replicas: where each is cut, and how a program gathers it (ZeRO-3, FSDP)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._jax.jaxprs import constants
from .._jax.pieces import ShardedOperand, run_in_pieces
from .devices import memory_bytes
from .layout import LEAF, Layout, Shard, Tree
from .outputs import Outputs, path_name
from .replica_mesh import ReplicaMesh
from .scattered import Scattered, Signature, concrete

Gather = Callable[[Any, int, Any], Any]
"""`gather(x, axis, dtype)` returns the whole array, of which `x` is a part; the parts are sent in the dtype."""
GatherOf = Callable[[str], Gather]
"""`gather_of(name)` is the `Gather` of the parameter with this name, which `explain` and a profile show."""
MOST_AT_ONCE = 32 << 20
"""Bytes of parameters that are gathered together; one parameter may be larger."""

Scanned = Collection[tuple[tuple[int, ...], int]]
"""Shapes of parameters, each with an axis that a scan runs over, so that it must not be cut."""


def axis_for_parameter(x: Any, n: int, scanned: Scanned = ()) -> int | None:
    """Returns the axis to cut a parameter along over n devices; None if it stays whole.

    It is the first axis whose size is a multiple of n, so that each part is contiguous in memory. With three or more
    axes, axis 0 is the last choice, because a scan may iterate over it.
    """
    axes = [
        axis for axis, size in enumerate(x.shape) if size and size % n == 0 and (tuple(x.shape), axis) not in scanned
    ]
    if n == 1 or not axes:
        return None
    return axes[0] if len(x.shape) < 3 else next((axis for axis in axes if axis), 0)


def as_shards(params: Tree, mesh: ReplicaMesh, scanned: Scanned) -> Tree:
    """Returns the parameters as operands of the replicas' program: a `Scattered` for each that the rule above cuts."""

    def cut(x: Any) -> Any:
        axis = axis_for_parameter(x, mesh.size, scanned)
        return x if axis is None else shard(x, axis, mesh)

    return jax.tree.map(cut, params)


def shard(x: Any, axis: int, mesh: ReplicaMesh) -> Scattered:
    """Returns an array that is cut over the mesh along an axis, as an operand of the replicas' program."""
    return Scattered((x,), Layout(LEAF, (Shard(axis),), (1,), mesh, 0, 1))


def refuse_too_large(tree: Tree, mesh: ReplicaMesh, verb: str, root: str) -> None:
    """Raises a `ValueError` for a parameter that a device cannot hold, because it is replicated while it is used."""
    device = mesh.devices[0]
    most = memory_bytes(device) or float("inf")
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        size = x.size * x.dtype.itemsize if hasattr(x, "dtype") else 0
        if size > most:
            raise ValueError(
                f"jdp.{verb}: {root}{jax.tree_util.keystr(path)} has {size:,} bytes, and {device} {int(most):,}; a "
                f"parameter that is cut is gathered on each device while it is used. Split it into smaller ones."
            )


def refuse_constants(jaxpr: Any, sharded: Sequence[tuple[Any, int]], mesh: ReplicaMesh) -> None:
    """Raises a `ValueError` if the model closes over its parameters; `sharded` holds a shard of each, and its axis."""
    cut = {(whole_shape(x, axis, mesh.size).shape, axis) for x, axis in sharded}
    for x in constants(jaxpr):
        axis = cut_axis_of(x, mesh)
        if axis is not None and (x.shape, axis) in cut:
            raise ValueError(
                f"jdp.shard_params: the model closes over an array {x.dtype}{list(x.shape)} that is cut over the "
                f"replicas as its parameters are; what a function closes over is a constant, and has no gradient. Take "
                f"it from the parameters that the function is called with."
            )


def cut_axis_of(x: Any, mesh: ReplicaMesh) -> int | None:
    """Returns the axis that an array is cut along over this very mesh; None for all else."""
    sharding = getattr(concrete(x), "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh.jax_mesh or mesh.size == 1:
        return None
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    cut = [axis for axis, names in enumerate(entries) if mesh.axis_name in names]
    return cut[0] if cut else None


def all_gathered(signature: Signature, operands: Sequence[Any]) -> tuple[Signature, list[Any]]:
    """Gathers all parameters that are cut; returns the signature that says so, and the operands."""
    gather_of = plain_gather(signature.axis_name)
    triples = zip(operands, signature.leaves, names_of_params(signature), strict=True)
    whole = [gather_of(name)(x, leaf.axis, x.dtype) if isinstance(leaf, Shard) else x for x, leaf, name in triples]
    leaves = (leaf._replace(is_whole=True) if isinstance(leaf, Shard) else leaf for leaf in signature.leaves)
    return signature._replace(leaves=tuple(leaves)), whole


def params_of(replicas: Tree) -> Tree:
    """Returns a program's parameters: its `replicas`, the first of a loss's pair, or the state of its NNX module."""
    # NNX objects come as a `Held` of `_model/nnx.py`, which the core must not import: it has a `graph`.
    is_pair = type(replicas) is tuple and len(replicas) == 2 and hasattr(replicas[1], "graph")
    params: Any = replicas[0] if is_pair else replicas
    if hasattr(params, "graph"):  # a function may have parameters, too; the stand-in of an NNX module has no leaves
        return params.others if jax.tree.leaves(params.others) else params.variables
    return params


def names_of_params(signature: Signature) -> list[str]:
    """Returns the path of each operand that is a parameter, and "" for the others."""
    numbers = range(len(signature.leaves))
    replicas, _, _ = signature.fill(numbers)
    params = params_of(replicas)
    path_of = {number: path_name(path) for path, number in jax.tree_util.tree_leaves_with_path(params)}
    return [path_of.get(number, "") for number in numbers]


def plain_gather(axis_name: str) -> GatherOf:
    """Returns a `GatherOf` with JAX's own gradient: the sum over the replicas, cut in the same way."""
    return lambda name: functools.partial(_whole_array, axis_name, name)


def _whole_array(axis_name: str, name: str, x: Any, axis: int, dtype: Any) -> Any:
    """Gathers a whole array from the replicas' parts of it."""
    with jax.named_scope(f"gather.{name}"):
        return jax.lax.all_gather(x.astype(dtype), axis_name, axis=axis, tiled=True)


def whole_shape(x: Any, axis: int, n: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of the whole array; `x` is one of its n parts along the axis."""
    return jax.ShapeDtypeStruct((*x.shape[:axis], x.shape[axis] * n, *x.shape[axis + 1 :]), x.dtype)


def as_used(body: Callable[..., Outputs], operands: Sequence[Any], signature: Signature) -> Outputs:
    """Runs the body, which takes whole parameters; each is gathered where the body uses it."""
    n, gather_of = signature.layout.mesh.size, plain_gather(signature.axis_name)
    axes = [leaf.axis if isinstance(leaf, Shard) else None for leaf in signature.leaves]
    cut = [*zip(operands, axes, strict=True)]
    shapes = [x if axis is None else whole_shape(x, axis, n) for x, axis in cut]
    jaxpr, out = jax.make_jaxpr(body, return_shape=True)(*shapes)
    refuse_constants(jaxpr, [(x, axis) for x, axis in cut if axis is not None], signature.layout.mesh)
    named = zip(cut, names_of_params(signature), strict=True)
    given = [x if axis is None else ShardedOperand(x, axis, gather_of(name)) for (x, axis), name in named]
    values = run_in_pieces(jaxpr, given, MOST_AT_ONCE)
    return dataclasses.replace(out, values=values)


def summing_gather(axis_name: str, sent_as: Callable[[Any], Any], before: float) -> GatherOf:
    """Returns a `GatherOf` whose gradient is the sum over the replicas, cut as `x` is.

    `sent_as(dtype)` is the narrower dtype to send a gradient in, or None. In a narrower dtype the sum might overflow,
    so such a gradient is divided by `before` first, and the result stays divided.
    """

    def backward(name: str, axis: int, own: Any, grad: Any) -> Any:
        grad, wire = grad.astype(own), sent_as(own)
        sent = grad if wire is None else (grad / before).astype(wire)
        with jax.named_scope(f"reduce.{name}"):
            found = jax.lax.psum_scatter(sent, axis_name, scatter_dimension=axis, tiled=True)
        return found.astype(own)

    return _with_gradient(axis_name, lambda x: (x, x), backward)


def gather_of_pairs(axis_name: str) -> GatherOf:
    """Returns a `GatherOf` of pairs `(x, like)`: it gathers `x`; the gradient goes to `like`, whole and not reduced.

    So the gradients of several microbatches can be added first, and their sum is reduced over the replicas once.
    `like` is zeros of the shape of the whole array; XLA never makes them.
    """
    return _with_gradient(axis_name, lambda both: both, lambda name, axis, own, grad: (None, grad.astype(own)))


def _with_gradient(
    axis_name: str, pair: Callable[[Any], tuple[Any, Any]], backward: Callable[[str, int, Any, Any], Any]
) -> GatherOf:
    """Returns a `GatherOf` that gathers the first of `pair(value)`, and has the gradient that `backward` computes.

    `backward(name, axis, dtype, cotangent)` gets the dtype of the second of the pair.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3, 4))
    def gather(name: str, value: Any, axis: int, dtype: Any, own: Any) -> Any:
        return _whole_array(axis_name, name, pair(value)[0], axis, dtype)

    def forward(name: str, value: Any, axis: int, dtype: Any, own: Any) -> tuple[Any, None]:
        return _whole_array(axis_name, name, pair(value)[0], axis, dtype), None

    def pull(name: str, axis: int, dtype: Any, own: Any, _: None, grad: Any) -> tuple[Any]:
        return (backward(name, axis, own, grad),)

    gather.defvjp(forward, pull)
    return lambda name: lambda value, axis, dtype: gather(name, value, axis, dtype, pair(value)[1].dtype)
