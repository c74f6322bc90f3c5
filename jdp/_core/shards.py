"""Parameters that are cut over the replicas: where each is cut, and how a program makes it whole (ZeRO-3, FSDP)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from .._jax.jaxprs import constants
from .._jax.pieces import Sharded, run_in_pieces
from .devices import memory_bytes
from .layout import Layout, Shard, Tree
from .outputs import Outputs
from .scattered import Scattered, Signature, concrete

Gather = Callable[[Any, int, Any], Any]
"""The whole array of `(value, axis, dtype)`; it travels in the dtype."""
MOST_AT_ONCE = 32 << 20
"""Bytes of parameters that are gathered together; one parameter may be larger."""


def shard_axis(x: Any, n: int) -> int | None:
    """The axis that a parameter is cut along over n devices; None where it stays whole.

    The first that n divides; the leading one only where no other does, for a scan may run over it.
    """
    if n == 1:
        return None
    return next(
        (axis for axis in (*range(1, x.ndim), *range(min(x.ndim, 1))) if x.shape[axis] and x.shape[axis] % n == 0), None
    )


def as_shards(params: Tree, mesh: Mesh) -> Tree:
    """The parameters, with a `Scattered` for each that is cut, for the replicas' program."""

    def cut(x: Any) -> Any:
        axis = shard_axis(x, mesh.size)
        return x if axis is None else shard(x, axis, mesh)

    return jax.tree.map(cut, params)


def shard(x: Any, axis: int, mesh: Mesh) -> Scattered:
    """An array that is cut over the mesh along an axis, as an operand of the replicas' program."""
    return Scattered((x,), Layout(_LEAF, (Shard(axis),), (1,), mesh, 0))


_LEAF = jax.tree.structure(0)


def refuse_too_large(tree: Tree, mesh: Mesh, verb: str, root: str) -> None:
    """A `ValueError` for a parameter that no device can hold, for while it is used it is whole on each."""
    device = mesh.devices.flat[0]
    most = memory_bytes(device) or float("inf")
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        size = x.size * x.dtype.itemsize if hasattr(x, "dtype") else 0
        if size > most:
            raise ValueError(
                f"jdp.{verb}: {root}{jax.tree_util.keystr(path)} has {size:,} bytes, and {device} {int(most):,}; a "
                f"parameter that is cut is whole on each device while it is used. Make several smaller ones of it."
            )


def refuse_constants(jaxpr: Any, sharded: Sequence[tuple[Any, int]], mesh: Mesh) -> None:
    """A `ValueError` where the model has closed over its own parameters: these (shards, each with its axis)."""
    cut = {(whole_shape(x, axis, mesh.size).shape, axis) for x, axis in sharded}
    for x in constants(jaxpr):
        axis = cut_axis_of(x, mesh)
        if axis is not None and (x.shape, axis) in cut:
            raise ValueError(
                f"jdp.shard_params: the model closes over an array {x.dtype}{list(x.shape)} that is cut over the "
                f"replicas as its parameters are; what a function closes over is a constant, and has no gradient. Take "
                f"it from the parameters that the function is called with."
            )


def cut_axis_of(x: Any, mesh: Mesh) -> int | None:
    """The axis that an array is cut along over this very mesh; None for all else."""
    sharding = getattr(concrete(x), "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh or mesh.size == 1:
        return None
    cut = [axis for axis, name in enumerate(sharding.spec) if name in (mesh.axis_names[0], mesh.axis_names)]
    return cut[0] if cut else None


def all_gathered(signature: Signature, operands: Sequence[Any]) -> tuple[Signature, list[Any]]:
    """The operands, with the parameters whole that are cut, and the signature that says so."""
    pairs, axis_name = zip(operands, signature.leaves, strict=True), signature.axis_name
    whole = [gathered(x, leaf.axis, x.dtype, axis_name) if isinstance(leaf, Shard) else x for x, leaf in pairs]
    leaves = (leaf._replace(is_whole=True) if isinstance(leaf, Shard) else leaf for leaf in signature.leaves)
    return signature._replace(leaves=tuple(leaves)), whole


def gathered(x: Any, axis: int, dtype: Any, axis_name: str) -> Any:
    """An array whole, of the replicas' parts of it."""
    return jax.lax.all_gather(x.astype(dtype), axis_name, axis=axis, tiled=True)


def whole_shape(x: Any, axis: int, n: int) -> jax.ShapeDtypeStruct:
    """That of the array of which `x` is one of n parts along the axis."""
    return jax.ShapeDtypeStruct((*x.shape[:axis], x.shape[axis] * n, *x.shape[axis + 1 :]), x.dtype)


def as_used(body: Callable[..., Outputs], operands: Sequence[Any], signature: Signature) -> Outputs:
    """What the body makes of whole parameters, each of which is gathered where it is used."""
    n, name = signature.layout.mesh.size, signature.axis_name
    cut = [
        (x, leaf.axis if isinstance(leaf, Shard) else None) for x, leaf in zip(operands, signature.leaves, strict=True)
    ]
    shapes = [x if axis is None else whole_shape(x, axis, n) for x, axis in cut]
    jaxpr, out = jax.make_jaxpr(body, return_shape=True)(*shapes)
    refuse_constants(jaxpr, [(x, axis) for x, axis in cut if axis is not None], signature.layout.mesh)
    gather = functools.partial(gathered, axis_name=name)
    values = run_in_pieces(jaxpr, [x if axis is None else Sharded(x, axis, gather) for x, axis in cut], MOST_AT_ONCE)
    return dataclasses.replace(out, values=values)


def summing(axis_name: str, wire: Any, before: float) -> Gather:
    """A function `(x, axis, dtype)` that gathers, and whose gradient is the sum over the replicas, cut as `x` is.

    The gradient travels in the dtype `wire`, divided by `before`, for a sum of many may leave its range.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
    def gather(x: Any, axis: int, dtype: Any, own: Any) -> Any:
        return gathered(x, axis, dtype, axis_name)

    def forward(x: Any, axis: int, dtype: Any, own: Any) -> tuple[Any, None]:
        return gathered(x, axis, dtype, axis_name), None

    def backward(axis: int, dtype: Any, own: Any, _: None, grad: Any) -> tuple[Any]:
        grad = grad.astype(own)
        sent = grad if wire is None else (grad / before).astype(wire)
        found = jax.lax.psum_scatter(sent, axis_name, scatter_dimension=axis, tiled=True).astype(own)
        return (found if wire is None else found * jnp.asarray(before, own),)

    gather.defvjp(forward, backward)
    return lambda x, axis, dtype: gather(x, axis, dtype, x.dtype)


def parts_of(axis_name: str) -> Gather:
    """A function `((x, like), axis, dtype)` that gathers `x`, and whose gradient is that of `like`, whole as it is.

    `like` is zeros in the place of the whole array, which are never made: the gradients of several microbatches are
    added as they are, and their sum is reduced once.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
    def gather(both: tuple[Any, Any], axis: int, dtype: Any, own: Any) -> Any:
        return gathered(both[0], axis, dtype, axis_name)

    def forward(both: tuple[Any, Any], axis: int, dtype: Any, own: Any) -> tuple[Any, None]:
        return gathered(both[0], axis, dtype, axis_name), None

    def backward(axis: int, dtype: Any, own: Any, _: None, grad: Any) -> tuple[Any]:
        return ((None, grad.astype(own)),)

    gather.defvjp(forward, backward)
    return lambda both, axis, dtype: gather(both, axis, dtype, both[1].dtype)
