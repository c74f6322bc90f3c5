"""Which of a mesh's devices are this process's own."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from .devices import make_mesh


@functools.cache
def spans_processes(mesh: Mesh) -> bool:
    """Whether other processes hold some of the mesh's devices, so that each has rows of its own."""
    # Devices of an absent machine (of a topology, to compile for) name processes as well, in a job of one.
    return jax.process_count() > 1 and len(processes_of(mesh)) > 1


@functools.cache
def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that hold devices of the mesh, in ascending order."""
    return tuple(sorted({d.process_index for d in mesh.devices.flat}))


@functools.cache
def own_replicas(mesh: Mesh) -> tuple[int, ...]:
    """The replicas on this process's devices."""
    here = jax.process_index()
    return tuple(i for i, d in enumerate(mesh.devices.flat) if d.process_index == here)


@functools.cache
def own_mesh(mesh: Mesh) -> Mesh:
    """The mesh of this process's devices alone, in the order of the whole one."""
    if not spans_processes(mesh):
        return mesh
    return make_mesh(tuple(mesh.devices.flat[i] for i in own_replicas(mesh)), mesh.axis_names[0])
