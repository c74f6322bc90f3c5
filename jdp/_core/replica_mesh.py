"""`ReplicaMesh`: a mesh of devices, and which axis counts the replicas. jdp's programs run outside of other meshes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._jax.private import is_described, trace_state_clean
from .._processes.agree import same_program
from .._processes.coordination import text_of
from .._processes.exchange import Exchange, exchange_of
from .devices import Device, Devices, names_of, resolve_devices

HALVES = (jnp.bfloat16, jnp.float16)


class ReplicaMesh:
    """A mesh of devices, and the axis of it that counts the replicas; one object for each pair (`replica_mesh`).

    A replica is one device or, if the mesh has other axes, the group of devices along these.
    """

    __slots__ = (
        *("jax_mesh", "axis_name", "size", "groups", "devices", "all_devices", "inner_axes"),
        *("processes", "spans_processes", "exchange", "own_indices", "is_described", "may_deadlock"),
        *("inside", "along", "replicated", "sums_in_32_bits", "gathering", "switch", "_own"),
    )

    def __init__(self, mesh: Mesh, axis_name: str) -> None:
        self.jax_mesh = mesh
        self.axis_name = axis_name
        self.size: int = mesh.shape[axis_name]
        """The size of the replicas' axis. The number of replicas is a multiple of it (`Config.replicas`)."""
        rows = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), 0).reshape(self.size, -1)
        self.groups: tuple[tuple[Device, ...], ...] = tuple(map(tuple, rows))
        """For each index along the replicas' axis, the devices along the inner axes."""
        self.devices: tuple[Device, ...] = tuple(group[0] for group in self.groups)
        self.all_devices: tuple[Device, ...] = tuple(mesh.devices.flat)
        self.inner_axes: tuple[str, ...] = tuple(name for name in mesh.axis_names if name != axis_name)
        """The axes inside of a replica; none where a replica is one device."""
        self.switch: Callable[..., Any] = switch_of_all if len(self.all_devices) > self.size else jax.lax.switch
        """`lax.switch(which, branches, *operands)` in a program, if `which` depends on the replica."""
        self.processes: tuple[int, ...] = tuple(sorted({d.process_index for d in self.all_devices}))
        # Devices that are only described (a topology, to compile for) have process indices, too, in a job of one.
        self.spans_processes: bool = jax.process_count() > 1 and len(self.processes) > 1
        """Whether other processes hold some of the devices, so that each has rows of its own."""
        self.exchange: Exchange | None = exchange_of(self.processes) if self.spans_processes else None
        """How this process tells the others what it does; None if there are no others."""
        here = jax.process_index()
        self.own_indices: tuple[int, ...] = self.indices_of(None if self.exchange is None else here)
        """The indices of this process's groups; those of all groups if the devices are only described."""
        self.is_described: bool = is_described(self.all_devices[0])
        """Whether the devices are those of a topology: programs are compiled for them, and do not run."""
        self.may_deadlock: bool = len(self.all_devices) > 1 and self.devices[0].platform == "cpu"
        """Whether XLA may deadlock if many programs with collectives are in flight; see `programs.STEPS_IN_FLIGHT`."""
        self.along: Callable[[int | None], NamedSharding] = functools.cache(self._along)
        """Returns the sharding of an array that is cut over the replicas along an axis; None: replicated."""
        self.replicated: NamedSharding = self.along(None)
        """The sharding of an array that is replicated over all devices."""
        # XLA's CPU compiler widens sums of 16 bits. If the sum is over a Manual axis of a mesh that also has Auto axes,
        # the compiler crashes, so jdp widens the values itself.
        self.sums_in_32_bits: bool = bool(self.inner_axes) and self.size > 1 and self.devices[0].platform == "cpu"
        self.gathering: Any = None
        """How its processes compare their batches; `agreement.py` sets it."""
        self._own: ReplicaMesh | None = None
        # The mesh inside of a replica's program, where the compiler partitions over the inner axes alone.
        manual = {axis_name: AxisType.Manual} if self.size > 1 else {}
        self.inside: AbstractMesh = mesh.abstract_mesh.update_axis_types(manual) if manual else mesh.abstract_mesh

    def __repr__(self) -> str:
        return f"ReplicaMesh({self.jax_mesh}, {self.axis_name!r})"

    def __reduce__(self) -> Any:
        return replica_mesh, (self.jax_mesh, self.axis_name)

    def __deepcopy__(self, memo: Any) -> ReplicaMesh:
        return self

    def indices_of(self, process: int | None) -> tuple[int, ...]:
        """Returns the indices of the groups of a process; for None, of all groups."""
        return tuple(i for i, d in enumerate(self.devices) if process in (None, d.process_index))

    @property
    def own(self) -> ReplicaMesh:
        """The mesh of this process's groups alone, in the order of the whole mesh."""
        if self._own is None:
            axis = self.jax_mesh.axis_names.index(self.axis_name)
            self._own = self
            if self.exchange is not None:
                own = np.take(self.jax_mesh.devices, self.own_indices, axis)
                self._own = replica_mesh(Mesh(own, self.jax_mesh.axis_names), self.axis_name)
        return self._own

    def same_program(self, program: Any, roots: tuple[str, ...]) -> Any:
        """Returns the jitted function; several processes compare it before it runs. `roots` names its arguments."""
        return program if self.exchange is None else same_program(program, self.all_devices, roots)

    def _along(self, axis: int | None) -> NamedSharding:
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.axis_name)
        return NamedSharding(self.jax_mesh, spec)

    def replicates(self, sharding: Any) -> bool:
        """Returns True if this sharding replicates over the devices, in their order, whatever its axes are called."""
        if sharding == self.replicated:
            return True
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return False
        is_auto = all(kind == AxisType.Auto for kind in sharding.mesh.axis_types)
        is_whole = sharding.is_fully_replicated and sharding.memory_kind == self.replicated.memory_kind
        return is_auto and is_whole and (*sharding.mesh.devices.flat,) == self.all_devices

    def holds(self, sharding: Any) -> bool:
        """Returns True if each replica holds an array with this sharding: whole, or cut over the replica's devices."""
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.jax_mesh:
            return False
        names = {name for entry in sharding.spec for name in (entry if isinstance(entry, tuple) else (entry,))}
        return self.axis_name not in names

    def renamed(self, sharding: Any) -> Any:
        """Returns a sharding over a mesh of the same devices and axes (Explicit ones) as one over this mesh."""
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return sharding
        other = sharding.mesh
        if other == self.jax_mesh or other.shape != self.jax_mesh.shape or (*other.devices.flat,) != self.all_devices:
            return sharding
        return NamedSharding(self.jax_mesh, sharding.spec, memory_kind=sharding.memory_kind)

    def cut(self, x: Any, axis: int | None) -> Any:
        """Returns, inside a program, an array that is cut over the replicas along `axis` (None: along none).

        How it lies inside of a replica of several devices is left to the compiler.
        """
        return self._constrained(x, axis, self.axis_name)

    def gathered(self, x: Any, axis: int | None) -> Any:
        """Returns, inside a program, an array that is not cut along `axis`; the rest is left open, as in `cut`."""
        return self._constrained(x, axis, None)

    def _constrained(self, x: Any, axis: int | None, name: str | None) -> Any:
        if not self.inner_axes:
            return jax.lax.with_sharding_constraint(x, self.along(None if name is None else axis))
        entries = [name if i == axis else PartitionSpec.UNCONSTRAINED for i in range(x.ndim)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.jax_mesh, PartitionSpec(*entries)))

    def within(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec with the axes inside of a replica alone, in the form that JAX gives to results."""
        kept = tuple(self._inner(entry) for entry in spec)
        while kept and kept[-1] is None:
            kept = kept[:-1]
        return PartitionSpec(*kept)

    def _inner(self, entry: Any) -> Any:
        if entry is PartitionSpec.UNCONSTRAINED:
            return entry
        names = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name in self.inner_axes)
        return names if len(names) > 1 else names[0] if names else None


def switch_of_all(which: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Computes all branches of a `lax.switch`, and chooses: replicas of several devices do that.

    The compiler moves parts of arrays between a replica's devices by collective-permutes, at which the devices of all
    replicas have to meet. If each replica ran its own branch, they would wait for each other forever.
    """
    results = [branch(*_if_chosen(which == k, operands)) for k, branch in enumerate(branches)]
    return jax.tree.map(functools.partial(jax.lax.select_n, which), *results)


def _if_chosen(is_chosen: Any, operands: Any) -> Any:
    """Returns the same values; derivatives go through them only if they are chosen, even if what follows gives NaN."""

    def guarded(x: Any) -> Any:
        return jnp.where(is_chosen, x, jax.lax.stop_gradient(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(guarded, operands)


def replica_mesh(mesh: Mesh, axis_name: str) -> ReplicaMesh:
    """Returns the `ReplicaMesh` of a mesh and the replicas' axis: always the same object. Explicit axes become Auto.

    Raises:
        ValueError: a replica's devices belong to several processes, so that none of these can pass its rows.
    """
    return _mesh_of_devices(tuple(mesh.devices.flat), mesh.devices.shape, mesh.axis_names, axis_name)


def make_mesh(devices: tuple[Device, ...], axis_name: str = "data") -> ReplicaMesh:
    """Returns the mesh of replicas of one device each, in the order of the devices."""
    return _mesh_of_devices(devices, (len(devices),), (axis_name,), axis_name)


@functools.cache
def _mesh_of_devices(
    devices: tuple[Device, ...], shape: tuple[int, ...], names: tuple[Any, ...], axis_name: str
) -> ReplicaMesh:
    # Not jax.make_mesh: it may reorder devices, and makes Explicit axes by default.
    types = (AxisType.Auto,) * len(names)
    found = ReplicaMesh(Mesh(np.array(devices, dtype=object).reshape(shape), names, axis_types=types), axis_name)
    for i, group in enumerate(found.groups):
        processes = sorted({d.process_index for d in group})
        if len(processes) > 1 and jax.process_count() > 1:
            raise ValueError(
                f"jdp.DataParallel: replica {i} of the mesh has devices of the processes "
                f"{', '.join(map(str, processes))} ({names_of(group)}); each process passes the rows of its own "
                f"replicas, so that a replica belongs to one process. Order the devices so that the axes other than "
                f"{axis_name!r} stay inside of a process."
            )
    return found


def mesh_of(verb: str, devices: Devices) -> ReplicaMesh:
    """Returns the mesh of these devices; a mesh of one axis among jax's keeps its name, as `DataParallel` does."""
    found = resolve_devices(verb, devices)
    return make_mesh(found, *devices.axis_names) if isinstance(devices, Mesh) else make_mesh(found)


_on_meshes: weakref.WeakKeyDictionary[Any, tuple[ReplicaMesh, int | None]] = weakref.WeakKeyDictionary()


def will_run(wrapper: Any, mesh: ReplicaMesh, replicas: int | None) -> None:
    """Registers a wrapper that runs on a mesh, while it lives; `replicas` is None if the user has not chosen them."""
    _on_meshes[wrapper] = mesh, replicas


def replicas_on(jax_mesh: Any) -> tuple[set[int], bool]:
    """Returns the numbers of replicas that wrappers run on a jax mesh, and whether the user chose them."""
    here = [(mesh, replicas) for mesh, replicas in list(_on_meshes.values()) if mesh.jax_mesh == jax_mesh]
    chosen = {replicas for _, replicas in here if replicas is not None}
    return (chosen, True) if chosen else ({mesh.size for mesh, _ in here} or {jax_mesh.size}, False)


_NO_MESH = Mesh(np.empty((), object), ())
settings: Any = jax.config  # the types of JAX do not know its names
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


forked_from: list[int] = []  # if this process was forked after JAX had started: its parent, which has JAX's threads


def _after_fork() -> None:
    if _mesh_of_devices.cache_info().currsize:  # its devices have started JAX
        forked_from[:] = [os.getppid()]


os.register_at_fork(after_in_child=_after_fork)


def outside_of_mesh(function: Callable[_Given, _Result], verb: str | None = None) -> Callable[_Given, _Result]:
    """Runs a function outside of the context's mesh (`jax.set_mesh`), because jdp's programs have a mesh of their own.

    While another program is being traced, JAX lets only the abstract mesh change, so that one is emptied. A mesh with
    Explicit axes stays, because the types of the incoming values refer to it, and so does the mesh of a `shard_map`.
    In a process that was forked after JAX had started, the call raises a `RuntimeError`: it would hang forever there.
    With `jax_debug_nans` or `jax_debug_infs` set, JAX checks the results of every program of the call.
    `verb` is the name of the public function, if the function's own is another.
    """

    name = verb or function.__name__.strip("_")

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            around = jax.sharding.get_abstract_mesh()
            if around.empty and not forked_from and not searches():
                return function(*args, **kwargs)
            with _searching(), _no_mesh(name, around):
                return function(*args, **kwargs)
        except Exception as error:
            if hides_nonfinite(error):
                raise FloatingPointError(
                    "jdp.DataParallel: something is not finite, and jax_debug_nans or jax_debug_infs is set; in a "
                    "program of replicas JAX cannot find the operation. Call the model itself, without jdp: JAX names "
                    "the operation there."
                ) from error
            error.with_traceback(_without_own_frames(error))
            raise

    return call


def hides_nonfinite(error: BaseException | None) -> bool:
    """Returns True if an error comes from JAX's search for a NaN (`jax_debug_nans`), but its text does not say so.

    JAX runs the program again, operation by operation. A `shard_map` then calls itself without end or, on a mesh of
    several axes, is refused.
    """
    if not isinstance(error, RecursionError) and "an axis marked as manual" not in text_of(error):
        return False
    while error is not None and type(error).__name__ != "InternalFloatingPointError":
        error = error.__context__
    return error is not None


def searches() -> bool:
    """Returns True if JAX checks results for NaNs or infinities (`jax_debug_nans`, `jax_debug_infs`)."""
    return settings.jax_debug_nans or settings.jax_debug_infs


@contextlib.contextmanager
def _searching() -> Iterator[None]:
    """Makes JAX check the results of all programs, old ones too, if `jax_debug_nans` or `jax_debug_infs` is set.

    JAX 0.10 forgets `jax.config.update("jax_debug_nans", True)` in a thread that has traced the gradient of a `relu`, a
    `scan` or a `switch`: a program that was compiled before then returns NaN. A context of the same value is not lost.
    """
    if not searches():
        yield
        return
    with jax.debug_nans(settings.jax_debug_nans), jax.debug_infs(settings.jax_debug_infs):
        yield


@contextlib.contextmanager
def _no_mesh(name: str, around: AbstractMesh) -> Iterator[None]:
    """Runs its body, a call of the public function `name`, outside of the mesh that is around it."""
    if forked_from:
        raise RuntimeError(
            f"jdp.{name}: process {os.getpid()} was forked from {forked_from[0]}, where "
            f"JAX had started; a fork has none of JAX's threads, and would wait forever. Start it by "
            f"multiprocessing.get_context('spawn') (a DataLoader: multiprocessing_context='spawn')."
        )
    if around.empty:
        yield
        return
    if trace_state_clean():
        with jax.set_mesh(_NO_MESH):
            yield
        return
    if not around.are_all_axes_auto:
        yield
        return
    try:
        with jax.sharding.use_abstract_mesh(_NO_MESH.abstract_mesh):
            yield
    except ValueError as error:
        if "jit's context mesh" not in str(error):
            raise
        raise ValueError(
            f"jdp.{name}: called inside jax.set_mesh of {around}, under jax.grad or the like; "
            f"JAX runs no program on other devices there. Put jax.jit around jax.grad, take the gradient outside "
            f"of that context, or by dp.value_and_grad."
        ) from error


def _without_own_frames(error: Exception) -> types.TracebackType | None:
    """Returns the traceback of an error without jdp's frames, so that it leads from the user's call to the user's code.

    If the user's code did not raise the error, and its text is not one of jdp's own, all frames stay, because they are
    needed to mend jdp. They also stay if JAX is told to keep its own (`JAX_TRACEBACK_FILTERING=off`).
    """
    left = error.__traceback__
    frames: list[types.TracebackType] = []
    while left is not None:
        frames.append(left)
        left = left.tb_next
    files = [x.tb_frame.f_code.co_filename for x in frames]
    last = max((i for i, file in enumerate(files) if file.startswith(_OWN)), default=-1)
    is_of_user = any(not file.startswith(_LIBRARIES) for file in files[last + 1 :])
    if settings.jax_traceback_filtering == "off" or not (is_of_user or text_of(error).startswith("jdp.")):
        return error.__traceback__
    for x, file in zip(frames[::-1], files[::-1], strict=True):
        if not file.startswith(_OWN):
            left = types.TracebackType(left, x.tb_frame, x.tb_lasti, x.tb_lineno)
    return left


_OWN, _JAX = (os.path.dirname(str(sys.modules[x].__file__)) + os.sep for x in (__name__.partition(".")[0], "jax"))
_LIBRARIES = _OWN, _JAX
