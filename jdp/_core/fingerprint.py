"""Compares replicas bit for bit, by the fingerprints of trees."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._processes.agree import difference
from .._processes.coordination import DesyncError
from .._processes.places import limits
from .layout import Tree, is_key
from .programs import dispatch
from .replica_mesh import ReplicaMesh, outside_of_mesh

_NAMED = 3  # how many leaves an error names, and how many devices for each


@outside_of_mesh
def check_replicas(tree: Tree, mesh: ReplicaMesh, verb: str) -> None:
    """Raises a `ValueError` if a leaf does not hold the same bits on every replica.

    If a replica is several devices and a leaf is cut over them, the parts at the same place of all replicas are
    compared.

    The error names the leaves, and for each the processes and devices that differ from the majority. Every process has
    to call this, and all raise the same error. Leaves with only one copy are left out.
    """
    start(tree, mesh, verb)(verb)


def start(tree: Tree, mesh: ReplicaMesh, verb: str = "check_replicas") -> Callable[[str], None]:
    """Begins the comparison and does not wait for it: one collective, however many leaves.

    Returns the function that waits for it, and raises as `check_replicas` does; it takes the verb in errors. The tree
    may be donated to the next program right away.
    """
    paths, copies = [], []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if _has_copies(x, mesh) and x.size:  # XLA refuses a program of empty arrays alone
            paths.append(jax.tree_util.keystr(path) or "the array")
            copies.append(_over(x, mesh))
    if not copies:
        return lambda verb: None
    specs = tuple(x.sharding.spec for x in copies) if mesh.inner_axes else ()
    if mesh.spans_processes:
        program = _comparison(mesh, specs)
        program = functools.update_wrapper(functools.partial(program, label=verb, names=paths), program)
    else:  # a program for each shape compiles faster than one for all leaves
        program, copies = _comparison(mesh, specs, True), [_hash_each(x, mesh, x.sharding.spec) for x in copies]
    extremes, own = dispatch(program, mesh, copies)
    return functools.partial(_finish_comparison, mesh, paths, specs, extremes, own)


def compare_processes(tree: Tree, mesh: ReplicaMesh, verb: str, root: str) -> None:
    """Raises a `ValueError` if the processes have different values of a leaf that will be cut over the devices.

    Once each device has only its part, such a difference can no longer be noticed. Leaves that are cut already are left
    out. Every process has to call this, and all raise the same error, which calls the tree `root`.
    """
    if mesh.exchange is None:
        return
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    mine = {
        root + jax.tree_util.keystr(path): fingerprint([x]).tobytes().hex()  # one at a time: it is whole on a device
        for path, x in leaves
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    }
    if found := _difference_between(mesh, verb, "values to be cut", mine):
        raise ValueError(
            f"jdp.{verb}: the processes have different values to be cut over the devices, by their hashes "
            f"{found}; each device must get its part of one value. Make them from the same seed "
            f"on all processes, or let process 0 send its own "
            f"(jax.experimental.multihost_utils.broadcast_one_to_all)."
        )


def check_made_alike(tree: Tree, mesh: ReplicaMesh, verb: str) -> None:
    """Compares a tree that each process has made, and first its form: its leaves' paths, shapes and dtypes.

    A process that has compared such a tree before would not compare the program of `check_replicas` again, and one
    whose tree has no leaves makes no such call. Every process of a job has to call this; alone a process compares
    nothing.
    """
    if mesh.exchange is None:
        return
    mine = {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree.leaves_with_path(tree)}
    if found := _difference_between(mesh, verb, "its state", mine):
        raise DesyncError(
            f"jdp.{verb}: the processes have states of different forms: {found}; all processes run one program. Make "
            f"the model and the optimizer alike on all of them."
        )
    check_replicas(tree, mesh, verb)


def _difference_between(mesh: ReplicaMesh, verb: str, what: str, mine: dict[str, str]) -> str:
    """Returns how texts by path differ between the processes; an empty string if they do not. All have to call this."""
    assert mesh.exchange is not None
    all_of_it = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len({*mesh.exchange.tell(f"{verb} ({what})", all_of_it, limits.start).values()}) == 1:
        return ""
    return difference(mesh.exchange.tell(f"{verb} (what differs)", mine, limits.step)) or "in another order"


def _with_one_value(mesh: ReplicaMesh, specs: Sequence[PartitionSpec], i: int) -> Sequence[Sequence[Any]]:
    """Returns groups of devices that must agree on leaf `i`: all in one, or one group for each place in a replica."""
    return [*zip(*mesh.groups, strict=True)] if specs and any(specs[i]) else [mesh.all_devices]


def _finish_comparison(
    mesh: ReplicaMesh,
    paths: Sequence[str],
    specs: Sequence[PartitionSpec],
    extremes: jax.Array,
    own: jax.Array,
    verb: str,
) -> None:
    """Waits for the comparison, and raises as `check_replicas` does.

    `specs` says how each leaf is cut over the devices of a replica. `extremes` holds for each leaf the smallest hash of
    all devices and the complement of the greatest; it is the same in every process. `own` holds each device's hashes,
    on that device.
    """
    least, most = np.asarray(extremes)
    if (least == ~most).all():
        return
    # Only now are the hashes of all devices gathered. Every process comes here, because all have the same extremes.
    hashes = np.asarray(jax.jit(lambda x: x, out_shardings=mesh.replicated)(own))
    found = []
    for i, path in enumerate(paths):
        of = dict(zip(mesh.all_devices, map(tuple, hashes[:, i].tolist()), strict=True))
        for devices in _with_one_value(mesh, specs, i):
            (usual, count), *_ = collections.Counter(of[d] for d in devices).most_common()
            odd = [d for d in devices if of[d] != usual]
            if odd:
                found.append(f"{path} on {_device_names(odd)} is not what it is on {count} of {len(devices)} devices")
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    raise ValueError(
        f"jdp.{verb}: of {len(paths)} replicated leaves {len(found)} differ: "
        f"{', '.join(found[:_NAMED])}{more}; all copies of a leaf must be equal, bit for bit. Go back to a checkpoint, "
        f"or put one copy on all devices again with jdp.replicate(jax.device_get(tree)). Unless each device updated "
        f"the leaf on its own (its own seed, its own batch statistics), suspect the device."
    )


@functools.lru_cache(64)
def _comparison(mesh: ReplicaMesh, specs: tuple[PartitionSpec, ...], are_hashed: bool = False) -> Any:
    """Returns the program that compares a list of leaves, or (`are_hashed`) a list of what `_hash_each` returned."""
    axes, is_cut = mesh.jax_mesh.axis_names, np.array([any(spec) for spec in specs], bool)

    def compare(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
        own = found = jnp.concatenate(leaves) if are_hashed else hash_leaves(leaves)
        if is_cut.any():  # the parts of a leaf differ; each is compared with the first replica's part of it
            first = jnp.where(jax.lax.axis_index(mesh.axis_name) == 0, own, _ZERO)
            found = jnp.where(is_cut[:, None], own ^ jax.lax.psum(first, mesh.axis_name), own)
        # max(h) is ~min(~h): one collective finds both.
        return jax.lax.pmin(jnp.stack([found, ~found]), axes), own[None]

    of: Any = PartitionSpec(axes) if are_hashed else ([*specs],) if specs else PartitionSpec()
    out = (PartitionSpec(), PartitionSpec(axes))
    compare.__name__ = "check_replicas"
    # Without check_vma, because whether the copies are equal is what the program has to find out.
    program = jax.jit(jax.shard_map(compare, mesh=mesh.jax_mesh, in_specs=of, out_specs=out, check_vma=False))
    # The processes compare their programs first. With different trees, each would wait in another collective.
    return mesh.same_program(program, ("tree",))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _hash_each(x: jax.Array, mesh: ReplicaMesh, spec: PartitionSpec) -> jax.Array:
    """Returns the hash of each device's part of an array, uint32[devices, 2], each on its device."""
    specs: Any = dict(in_specs=spec, out_specs=PartitionSpec(mesh.jax_mesh.axis_names), check_vma=False)
    return jax.shard_map(lambda x: hash_leaf(x)[None], mesh=mesh.jax_mesh, **specs)(x)


def _has_copies(x: Any, mesh: ReplicaMesh) -> bool:
    if not isinstance(x, jax.Array) or is_key(x) and not x.is_fully_replicated:
        return False
    if mesh.inner_axes and mesh.size > 1 and mesh.holds(x.sharding):
        return True
    return x.is_fully_replicated and x.sharding.device_set == set(mesh.all_devices)


def _over(x: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Returns the same copies as an array over this mesh, because the comparison takes no others."""
    target = mesh.replicated
    if x.sharding == target or not x.is_fully_replicated:
        return x
    if is_key(x):
        x = jax.random.key_data(x)
    return jax.make_array_from_single_device_arrays(x.shape, target, [s.data for s in x.addressable_shards])


def _device_names(devices: Sequence[Any]) -> str:
    """Returns `process 1, CpuDevice(id=5), ...`: `_NAMED` devices at most, and how many more there are."""
    by_process: dict[int, list[str]] = {}
    for d in devices[:_NAMED]:
        by_process.setdefault(d.process_index, []).append(repr(d))
    text = " and ".join(f"process {p}, {', '.join(names)}" for p, names in by_process.items())
    return text + (f" and {len(devices) - _NAMED} more devices" if len(devices) > _NAMED else "")


# Odd numbers without structure. Multiplying by one of them, and xor with a shifted copy, are bijections of uint32.
_PLACE, _ONE, _TWO, _THREE = (np.uint32(x) for x in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F))
_ZERO = np.uint32(0)


@outside_of_mesh
def fingerprint(tree: Tree) -> np.ndarray:
    """Returns a 64-bit hash of the bits of each leaf: equal leaves have equal ones, whatever devices they live on.

    If one element changes, the hash changes for certain (for a complex128, and for any other change of the leaf, with
    probability 1 - 2**-64). So it does if two elements swap places, unless these are a multiple of 2**32 apart.
    Zeros of either sign differ, and so do NaNs of different bits. Shapes and dtypes are not part of it.

    The tree holds numbers and arrays, numpy's or jax's. If a leaf is cut over devices, every process has to call this,
    because the hash is a sum over all parts. Only the first copy of a replicated leaf is read; `check_replicas`
    compares the copies. The result is uint32 of shape (leaves, 2), on the host.
    """
    leaves = jax.tree.leaves(tree)
    found: dict[int, Any] = {}
    cut: dict[Any, list[int]] = {}  # by the mesh
    # A program for each shape compiles faster than one for all leaves. But the programs of cut leaves have collectives,
    # and only a few such programs may be in flight, so all cut leaves of a mesh share one.
    for i, x in enumerate(leaves):
        if not isinstance(x, jax.Array):
            found[i] = _hash_words(*jax.device_put(_host_words(x)))  # explicitly, for a transfer guard
        elif x.is_fully_replicated:
            found[i] = _hash_one((jax.random.key_data(x) if is_key(x) else x).addressable_data(0))  # on one device
        else:
            cut.setdefault(getattr(x.sharding, "mesh", None), []).append(i)
    for mesh, own in cut.items():
        where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        hashes = jax.jit(hash_leaves, out_shardings=where)([leaves[i] for i in own])
        found |= dict(zip(own, np.asarray(hashes), strict=True))
    return np.array([np.asarray(found[i]) for i in range(len(leaves))], np.uint32).reshape(-1, 2)


def hash_leaf(x: Any) -> jax.Array:
    """Returns the hash of an array, uint32[2]; under `jit` of the whole array, under `shard_map` of a device's part."""
    return hash_words(*_words(x))


def hash_leaves(leaves: Sequence[Any]) -> jax.Array:
    """Returns `hash_leaf` of each, uint32[leaves, 2]."""
    return jnp.stack([hash_leaf(x) for x in leaves])


def hash_words(low: Any, high: Any = None) -> jax.Array:
    """Returns uint32[2]: sums over all elements of a bijection of the element's two words that depends on its place."""
    place = jnp.zeros(low.shape, jnp.uint32)
    stride = 1
    # Axis by axis, and not by a reshape to one axis, so that a leaf that is cut stays where it is.
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


_hash_one = jax.jit(hash_leaf)
_hash_words = jax.jit(hash_words)


def _words(x: Any) -> tuple[Any, Any]:
    """Returns the bits of each element as one uint32, or as a low and a high one."""
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
    """Returns `_words` of a host array; numpy splits 64-bit values, which JAX by default would convert to 32 bits."""
    x = np.asarray(x)
    if x.dtype == np.complex128:
        x = np.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize != 8:
        return _words(jnp.asarray(x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))))
    pairs = np.frombuffer(x.astype(x.dtype.newbyteorder("<")).tobytes(), "<u4").reshape(*x.shape, 2)
    return pairs[..., 0], pairs[..., 1]
