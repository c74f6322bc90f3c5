"""fingerprint hashes the bits of leaves: `fingerprint(a) == fingerprint(b)` if, and only if, `a` and `b` are equal."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .devices import replicated
from .inputs import is_key
from .layout import Tree

# Odd numbers without structure: to multiply by one, or to xor with what is shifted, is a bijection of uint32.
_PLACE, _ONE, _TWO, _THREE = (np.uint32(x) for x in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F))
_ZERO = np.uint32(0)


def fingerprint(tree: Tree) -> np.ndarray:
    """A 64-bit hash of the bits of each leaf: equal leaves have equal ones, whatever devices they live on.

    A change of one element changes it for certain (of a complex128: all but one time in 2**64, as any other change).
    Places count, so that two elements which change places are seen (unless they are a multiple of 2**32 apart).
    Zeros of either sign differ, and so do NaNs of different bits. Shapes and dtypes are not part of it.

    Args:
        tree: a pytree of arrays and numbers: numpy's, or jax's on one device, replicated, or cut over devices (then
            every process has to call this, for the pieces are summed over all). Of a leaf that is replicated the
            first copy is read; `check_replicas` compares the others with it.

    Returns:
        uint32 of shape (leaves, 2), on the host.
    """
    leaves = jax.tree.leaves(tree)
    cut = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not x.is_fully_replicated]
    found: dict[int, Any] = {}
    # A program for each shape compiles faster than one for all leaves. But of programs with collectives, which those
    # of cut leaves have, few may be in flight: these are one.
    for i, x in enumerate(leaves):
        if i not in cut:
            found[i] = _hash_words(*_host_words(x)) if not isinstance(x, jax.Array) else _hash_one(_first_copy(x))
    for mesh in dict.fromkeys(getattr(leaves[i].sharding, "mesh", None) for i in cut):
        own = [i for i in cut if getattr(leaves[i].sharding, "mesh", None) == mesh]
        where = None if mesh is None else replicated(mesh)
        found |= dict(zip(own, np.asarray(_hash_all(where)([leaves[i] for i in own])), strict=True))
    return np.array([np.asarray(found[i]) for i in range(len(leaves))], np.uint32).reshape(-1, 2)


def hash_leaf(x: Any) -> jax.Array:
    """uint32[2]: the hash of one array, traceable: in `jit` of the whole of it, in `shard_map` of a replica's copy."""
    return hash_words(*_words(x))


def hash_leaves(leaves: Sequence[Any]) -> jax.Array:
    """uint32[leaves, 2]: `hash_leaf` of each."""
    return jnp.stack([hash_leaf(x) for x in leaves])


def hash_words(low: Any, high: Any = None) -> jax.Array:
    """uint32[2]: the sums, over all elements, of a bijection of the element's two words that depends on its place."""
    place = jnp.zeros(low.shape, jnp.uint32)
    stride = 1
    # By axes, not as the one axis of a reshaped array: a leaf that is cut stays where it is then.
    for axis in reversed(range(low.ndim)):
        step = np.uint32(stride * int(_PLACE) % 2**32)
        place += jax.lax.broadcasted_iota(jnp.uint32, low.shape, axis) * step
        stride *= low.shape[axis]
    a = low ^ place
    a = (a ^ (a >> 16)) * _ONE
    a = (a ^ (a >> 13)) * _TWO
    a ^= a >> 16
    b = (a if high is None else a + high) ^ place
    b = (b ^ (b >> 15)) * _THREE
    b ^= b >> 16
    a += (b << 15) | (b >> 17)
    # One reduction of the pair: XLA's CPU backend computes both sums in one vectorized loop then, 10 times as fast as
    # in two. Sums that wrap around do not depend on their order.
    add = lambda s, t: (s[0] + t[0], s[1] + t[1])  # noqa: E731
    return jnp.stack(jax.lax.reduce((a, b), (_ZERO, _ZERO), add, tuple(range(low.ndim))))


@functools.cache
def _hash_all(where: NamedSharding | None) -> Any:
    return jax.jit(hash_leaves, out_shardings=where)


_hash_one = jax.jit(hash_leaf)
_hash_words = jax.jit(hash_words)


def _words(x: Any) -> tuple[Any, Any]:
    """The bits of each element as one uint32, or as a low and a high one."""
    if is_key(x):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool:
        return x.astype(jnp.uint32), None
    if x.dtype == jnp.complex64:
        real, imag = (jax.lax.bitcast_convert_type(part, jnp.uint32) for part in (x.real, x.imag))
        return real, imag
    if x.dtype == jnp.complex128:
        x = jnp.stack([x.real, x.imag], axis=-1)
    bits = (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype).bits
    words = jax.lax.bitcast_convert_type(x, f"uint{bits}")
    if bits == 64:
        return words.astype(jnp.uint32), (words >> np.uint64(32)).astype(jnp.uint32)
    return words.astype(jnp.uint32), None


def _host_words(x: Any) -> tuple[Any, Any]:
    """`_words` of what is on the host; JAX itself would take 64 bits for 32 there, unless it is told otherwise."""
    x = np.asarray(x)
    if x.dtype == np.complex128:
        x = np.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize != 8:
        return _words(jnp.asarray(x))
    pairs = np.frombuffer(x.astype(x.dtype.newbyteorder("<")).tobytes(), "<u4").reshape(*x.shape, 2)
    return pairs[..., 0], pairs[..., 1]


def _first_copy(x: jax.Array) -> Any:
    """The whole leaf on one device, so that not every device hashes it."""
    return (jax.random.key_data(x) if is_key(x) else x).addressable_data(0)
