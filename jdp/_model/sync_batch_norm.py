"""BatchNorm over the whole batch, without a change to the model: torch's `SyncBatchNorm.convert_sync_batchnorm`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from .._core.layout import Tree
from .._core.replica_mesh import HALVES
from .._core.scattered import Signature
from .._core.uneven import SyncedAxis, is_synced
from .._jax.jaxprs import bind, replayed
from .._jax.rewrites import rewrite


def synced(fn: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Returns `fn` with every Linen BatchNorm in it averaging its statistics over the axis."""

    def interceptor(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if not isinstance(module, linen.BatchNorm) or context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if kwargs.get("mask") is not None:
            raise _masked(".".join(module.path))
        before = module.axis_name
        # Linen freezes its modules; this one lives for the call alone, and is put back.
        object.__setattr__(module, "axis_name", SyncedAxis(axis_name))
        try:
            return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", before)

    def call(*args: Any, **kwargs: Any) -> Any:
        with linen.intercept_methods(interceptor):
            return fn(*args, **kwargs)

    return call


def apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` under one more axis, so that JAX's caches keep it apart from `fn` without synchronisation.

    Functions that are jitted inside the model (`nn.jit`, `jax.jit`) are traced once and cached. The key of that cache
    does not have the interceptor of `synced`, but it does have the axes around the call, and this adds one.
    """

    def call(*args: Any) -> Any:
        around = jax.vmap(lambda _: fn(*args), axis_name="jdp_sync_batch_norm", out_axes=None)
        return around(jnp.zeros(1))

    return call


def _masked(name: str) -> ValueError:
    return ValueError(
        f"jdp.DataParallel: BatchNorm {name} has a mask, and is synchronised over the replicas; Flax takes the mean of "
        f"the replicas' means, which is not that of all rows. Leave sync_batch_norm out, or the mask."
    )


def sync_nodes(nodes: Iterable[Any], axis_name: str) -> None:
    """Makes every BatchNorm of NNX objects (a replica's own copies) average its statistics over the axis."""
    for path, node in nnx.iter_graph(list(nodes)):
        if isinstance(node, nnx.BatchNorm):
            node.axis_name = SyncedAxis(axis_name)
            node.__class__ = _without_mask(type(node), ".".join(map(str, path[1:])))


def _without_mask(kind: type[nnx.BatchNorm], name: str) -> type[nnx.BatchNorm]:
    """Returns a subclass of a replica's own BatchNorm; it refuses a mask."""

    def call(self: Any, x: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
        if mask is not None:
            raise _masked(name)
        return kind.__call__(self, x, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


def with_weight(jaxpr: Any, weight: float, in_32_bits: bool) -> Any:
    """Returns the jaxpr with the replica's part in the statistics weighted, and 16-bit ones summed `in_32_bits`.

    Flax takes the mean of the replicas' means (`lax.pmean`). That is the mean over all rows only if all replicas have
    the same number of rows. Each replica's `weight = n * rows / all rows` makes it right for any numbers of rows.
    """

    def rule(eqn: Any) -> Callable[..., Any] | None:
        if not is_synced(eqn):
            return None

        def summed(*values: Any) -> list[Any]:
            wide = [x.astype(jnp.float32) if in_32_bits and x.dtype in HALVES else x for x in values]
            sums = bind(eqn, [x * jnp.asarray(weight, x.dtype) for x in wide])
            return [x.astype(out.aval.dtype) for x, out in zip(sums, eqn.outvars, strict=True)]

        return summed

    return rewrite(jaxpr, rule)


def by_rows(
    function: Callable[..., Any], jaxpr: Any, shapes: Tree, signature: Signature, replica: int
) -> Callable[..., Any]:
    """Returns the traced function, with the replica's part in shared statistics weighted by its number of rows."""
    chunks, in_32_bits = signature.layout.rows, signature.layout.mesh.sums_in_32_bits
    if len({*chunks}) == 1 and not in_32_bits:
        return function
    weight = len(chunks) * chunks[replica] / sum(chunks) if sum(chunks) else 1
    return replayed(with_weight(jaxpr, weight, in_32_bits), shapes)
