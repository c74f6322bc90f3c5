"""check_replicas compares the copies of every replicated leaf in the devices: they are one value, bit for bit."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._processes.same_program import same_program
from .devices import replicated
from .dispatch import dispatch
from .fingerprint import hash_leaves
from .inputs import is_key
from .layout import Tree
from .processes import spans_processes

_NAMED = 3  # so many leaves are named in an error, and as many devices of each


def check_replicas(tree: Tree, mesh: Mesh, verb: str) -> None:
    """Raises where a replicated leaf does not hold the same bits on every device of the mesh.

    Every process has to call it, and every process raises the same error. Leaves that are cut over the devices have
    one copy only, and those on the host or on one device too: they are left out.

    Raises:
        ValueError: copies differ; it names the leaves, and for each the processes and devices that the majority of
            the copies contradicts.
    """
    start(tree, mesh, verb).result(verb)


def start(tree: Tree, mesh: Mesh, verb: str = "check_replicas") -> Check:
    """Begins the comparison and does not wait for it: one program, with one collective, however many leaves.

    The tree may be donated to the next program right away.
    """
    paths, copies = [], []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if _is_replicated(x, mesh):
            paths.append(jax.tree_util.keystr(path) or "the array")
            copies.append(_over(x, mesh))
    if not copies:
        return Check(mesh, paths, None, None)
    program = _program(mesh)
    if spans_processes(mesh):
        program = functools.partial(program, label=verb, names=paths)
    extremes, own = dispatch(program, mesh, copies)
    return Check(mesh, paths, extremes, own)


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison that has been started.

    `extremes` has of each leaf's hashes the least and the complement of the greatest, the same in every process;
    `own` each device's hashes, on that device.
    """

    mesh: Mesh
    paths: Sequence[str]
    extremes: jax.Array | None
    own: jax.Array | None

    def result(self, verb: str) -> None:
        """Waits for the comparison, and raises as `check_replicas` does."""
        if self.extremes is None or self.own is None:
            return
        least, most = np.asarray(self.extremes)
        if (least == ~most).all():
            return
        # Only now do the hashes of all devices travel; every process comes here, for all have the same extremes.
        hashes = np.asarray(jax.jit(lambda x: x, out_shardings=replicated(self.mesh))(self.own))
        devices = list(self.mesh.devices.flat)
        found = []
        for i, path in enumerate(self.paths):
            of = [tuple(h) for h in hashes[:, i].tolist()]
            (usual, count), *_ = collections.Counter(of).most_common()
            odd = [d for d, h in zip(devices, of, strict=True) if h != usual]
            if odd:
                found.append(f"{path} on {_names(odd)} is not what it is on {count} of {len(devices)} devices")
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise ValueError(
            f"jdp.{verb}: of {len(self.paths)} replicated leaves {len(found)} differ: "
            f"{', '.join(found[:_NAMED])}{more}; all copies of a leaf are equal, bit for bit. Go back to a checkpoint, "
            f"or put one copy on all devices again with jdp.replicate(jax.device_get(tree)); if the cause is not an "
            f"update that each device made on its own (a seed or batch statistics of its own), the device is suspect."
        )


@functools.cache
def _program(mesh: Mesh) -> Any:
    axes = mesh.axis_names

    def compare(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
        own = hash_leaves(leaves)
        # max(h) is ~min(~h): one collective finds both.
        return jax.lax.pmin(jnp.stack([own, ~own]), axes), own[None]

    out = (PartitionSpec(), PartitionSpec(axes))
    compare.__name__ = "check_replicas"
    # Not checked: that the copies are equal is what is to be found out.
    program = jax.jit(jax.shard_map(compare, mesh=mesh, in_specs=PartitionSpec(), out_specs=out, check_vma=False))
    # Trees that differ in their leaves would wait for each other, each in a collective of its own.
    return same_program(program, mesh, ("tree",)) if spans_processes(mesh) else program


def _is_replicated(x: Any, mesh: Mesh) -> bool:
    return isinstance(x, jax.Array) and x.is_fully_replicated and x.sharding.device_set == set(mesh.devices.flat)


def _over(x: jax.Array, mesh: Mesh) -> jax.Array:
    """The same copies as an array of this mesh, of which `jit` takes no other."""
    target = replicated(mesh)
    if x.sharding == target:
        return x
    if is_key(x):
        x = jax.random.key_data(x)
    return jax.make_array_from_single_device_arrays(x.shape, target, [s.data for s in x.addressable_shards])


def _names(devices: Sequence[Any]) -> str:
    """Process 1: CpuDevice(id=5), ...; at most some of them."""
    by_process: dict[int, list[str]] = {}
    for d in devices[:_NAMED]:
        by_process.setdefault(d.process_index, []).append(repr(d))
    text = " and ".join(f"process {p}, {', '.join(names)}" for p, names in by_process.items())
    return text + (f" and {len(devices) - _NAMED} more devices" if len(devices) > _NAMED else "")
