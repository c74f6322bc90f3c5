"""The arguments that a wrapper was constructed with, which do not change, and how it cuts a batch."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, Protocol, TypeVar

import jax
import numpy as np
from flax import linen, nnx
from jax.sharding import AxisType, Mesh

from .._core.calls import Calls
from .._core.devices import (
    Device,
    DeviceLike,
    Devices,
    names_of,
    refuse_alone,
    resolve_devices,
    resolve_output,
    warn_imbalance,
)
from .._core.inputs import ARRAYS, NESTED, checked_dim, is_array, no_further, refuse_loader
from .._core.layout import Tree, as_int
from .._core.outputs import Reduce
from .._core.parallel_apply import spmd
from .._core.programs import Layouts, ReplicaProgram, capturing, made_once
from .._core.replica_mesh import ReplicaMesh, make_mesh, replica_mesh, will_run
from .._core.scatter import Cutting, split
from .._core.scattered import Scattered, leaf_by_leaf, placed
from .._core.unread import reading
from .linen import is_stateful, linen_function, mark_outputs
from .nnx import filters_of, put_nodes, take_nodes, with_nodes

ModuleKind = Literal["linen", "nnx", "function"]


_in_step: ContextVar[Any] = ContextVar("jdp_in_step", default=None)


@contextlib.contextmanager
def training(config: Config) -> Iterator[None]:
    """Traces its body as the loss of a step of this wrapper, which holds an NNX module."""
    token = _in_step.set(config)
    try:
        yield
    finally:
        _in_step.reset(token)


def is_training(config: Config) -> bool:
    """Returns True while the loss of a step of this wrapper is traced."""
    return _in_step.get() is config


class Config:
    """The arguments of `DataParallel`, checked, and the programs compiled for it.

    They are apart from the wrapper, so that NNX sees one static attribute. Copies of the wrapper, as
    `nnx.split` and `nnx.merge` make them in every `nnx.jit`, share it, and compile nothing twice.
    """

    def __init__(
        self,
        kind: ModuleKind,
        devices: Devices,
        output_device: DeviceLike | None,
        dim: int,
        in_axes: Tree,
        out_axes: Tree,
        axis_name: str,
        reduce_state: Reduce,
        state_axes: Mapping[Any, int] | None,
        shard_params: bool = False,
        replicas: int | None = None,
    ) -> None:
        verb = "DataParallel"
        dim = checked_dim(verb, dim)
        mesh = devices if isinstance(devices, Mesh) else None
        axis_name = _name_of_axis(axis_name, mesh)
        axes = state_axes or {}
        if not isinstance(axes, Mapping) or None in map(as_int, axes.values()):
            raise TypeError(f"jdp.{verb}: state_axes is {state_axes!r}; it must map names to ints, as {{'cache': 0}}.")
        if reduce_state not in ("primary", "mean"):
            raise ValueError(
                f"jdp.{verb}: reduce_state is {reduce_state!r}; it is 'primary' or 'mean'. Pass one of them."
            )
        if state_axes and kind == "function":
            raise ValueError(
                f"jdp.{verb}: state_axes is {dict(state_axes)}; it names the state of Flax modules, and this is a "
                f"function. Pass what has a batch axis as an argument."
            )
        if kind == "nnx":
            filters_of(state_axes or {})
        self.kind: ModuleKind = kind
        self.devices: tuple[Device, ...] = resolve_devices(verb, [*mesh.devices.flat] if mesh is not None else devices)
        refuse_alone(verb, self.devices)
        self.output_device: Device | str | None = resolve_output(verb, output_device)
        self.dim: int = dim
        # Copied, because the caller may change a list or dict of axes later.
        self.in_axes: Tree = copy.deepcopy(in_axes)
        self.out_axes: Tree = copy.deepcopy(out_axes)
        self.axis_name: str = axis_name
        self.reduce_state: Reduce = reduce_state
        self.state_axes: dict[Any, int] = {name: operator.index(axis) for name, axis in axes.items()}
        self.shard_params: bool = bool(shard_params)
        self.mesh: ReplicaMesh = make_mesh(self.devices, axis_name) if mesh is None else replica_mesh(mesh, axis_name)
        self.refuse_grouped(verb, shard_params=self.shard_params, replicas=replicas is not None)
        self.replicas: int | None = _checked(replicas, self.mesh.size)
        self.per_device: int = 1 if self.replicas is None else self.replicas // self.mesh.size
        self._forget()
        warn_imbalance(self.devices)
        will_run(self, self.mesh, self.replicas)

    def _forget(self) -> None:
        """Begins with nothing compiled, and no known calls."""
        self._programs: dict[int, Any] = {}  # those of each module, until it is freed
        self.layouts: Layouts = Layouts()
        self.batch_layouts: Layouts = Layouts()
        self.calls: Calls = Calls()  # the calls that ran, and may go straight to their programs

    def layouts_of(self, in_axes: Tree) -> Layouts:
        """Returns the store for layouts of batches that are cut by these `in_axes`, or by the wrapper's (None)."""
        return self.batch_layouts if in_axes is None else Layouts()

    @property
    def is_described(self) -> bool:
        """Whether the devices are those of a topology, on which nothing runs."""
        return self.mesh.is_described

    def mesh_of(self, devices: Devices) -> ReplicaMesh:
        """Returns the mesh of other devices than the wrapper's own, which a subclass chose for a step."""
        return make_mesh(resolve_devices("DataParallel", devices), self.axis_name)

    def refuse_grouped(self, verb: str, **options: bool) -> None:
        """Raises a `ValueError` for the first of the options that is on, if a replica is several devices."""
        on = [name for name, is_on in options.items() if is_on]
        if on and self.mesh.inner_axes:
            axes = " and ".join(map(repr, self.mesh.inner_axes))
            raise ValueError(
                f"jdp.{verb}: {on[0]} is given, and a replica is the devices along {axes} of the mesh; the two cannot "
                f"be combined. Leave {on[0]} out, or pass a mesh of the axis {self.axis_name!r} alone."
            )

    def refuse_described(self) -> None:
        if self.is_described and not capturing():
            raise RuntimeError(
                f"jdp.DataParallel: called on {self.devices[0].device_kind} devices of a topology, which are only "
                f"described; programs are compiled for them, and nothing runs there. Pass the call to jdp.explain, or "
                f"make the wrapper over jax.devices()."
            )

    def refuse_state_axes(self, verb: str) -> None:
        """Raises a `ValueError` where the wrapper has `state_axes`, at entry points that see more than one batch."""
        if self.state_axes:
            raise ValueError(
                f"jdp.{verb}: the wrapper has state_axes={self.state_axes}; such state belongs to the rows of one "
                f"batch, and {verb} keeps none of that kind. Make a second wrapper without it, "
                f"jdp.DataParallel(dp.module, dp.devices), pass the state in its batch, and return the arrays with an "
                f"entry per row among the metrics (of dp.value_and_grad with has_aux=True); or call dp for each batch."
            )

    def refuse_other_mesh(self) -> None:
        self.refuse_described()
        around = jax.sharding.get_abstract_mesh()
        if not around.empty and around != self.mesh.jax_mesh.abstract_mesh:
            raise ValueError(
                f"jdp.DataParallel: traced inside jax.set_mesh of {around}, whose axes are Explicit: values are typed "
                f"by that mesh, and the wrapper has a mesh of its own. Trace it outside of that context, or make the "
                f"axes Auto: jax.make_mesh(..., axis_types=(AxisType.Auto,) * {len(around.axis_names)})."
            )

    def program(self, module: Any, holds_nodes: bool = False) -> ReplicaProgram:
        """Returns the program of this module's call; `holds_nodes`: its parameters are `Held`, with NNX objects."""
        kind, out_axes, reduce_state, state_axes = self.kind, self.out_axes, self.reduce_state, self.state_axes
        axis_name, name = self.axis_name, getattr(module, "__name__", None) or type(module).__name__
        if kind == "function" and out_axes is None and not holds_nodes:
            return made_once(module, "program", _of_function)  # one for all wrappers of this function

        def gathered(out: Tree, kwargs: Mapping[str, Any]) -> Tree:
            """Returns the outputs alone, if they are joined along `dim`."""
            if out_axes is not None:
                return ()
            out = out[0] if holds_nodes else out
            return out[0] if kind == "linen" and is_stateful(kwargs) else out

        def make(call: Callable[..., Any]) -> ReplicaProgram:
            call = reading(call)
            if kind == "linen":
                call = linen_function(call, out_axes, reduce_state, state_axes)
            elif out_axes is not None:
                call = _marking(call, out_axes)
            filters = filters_of(state_axes) if kind == "nnx" else []
            call = with_nodes(call, reduce_state, axis_name, filters) if holds_nodes else call
            return spmd(call, name, gathered)

        # An NNX module is one of the objects, and its graph an argument.
        call = operator.call if kind == "nnx" else module.apply if kind == "linen" else module
        return made_once(call, ("program", holds_nodes), make, self._programs)

    def on(self, mesh: ReplicaMesh) -> Config:
        """Returns a config with the same arguments on other devices, each with one replica."""
        other = object.__new__(Config)
        changed = {"mesh": mesh, "devices": mesh.all_devices, "replicas": None, "per_device": 1}
        vars(other).update(vars(self) | changed)
        other._forget()
        return other

    def __deepcopy__(self, memo: Any) -> Config:
        return self  # nothing in it changes

    def __reduce__(self) -> Any:
        named = (*self.devices, self.output_device)
        devices = [d if d is None or isinstance(d, str) else (d.platform, d.id) for d in named]
        mesh = [*self.mesh.jax_mesh.shape.items()]
        rest = self.dim, self.in_axes, self.out_axes, self.axis_name, self.reduce_state, self.state_axes
        rest = *rest, self.shard_params, self.replicas
        return _unpickled, (self.kind, devices, mesh, *rest)


def _name_of_axis(axis_name: str, mesh: Mesh | None) -> str:
    """Returns the name of the replicas' axis: one of the mesh's, if there is a mesh."""
    if not isinstance(axis_name, str):
        raise TypeError(f"jdp.DataParallel: axis_name is {axis_name!r}; it must be the axis's name. Pass a str.")
    if mesh is None or len(mesh.axis_names) > 1 and axis_name in mesh.axis_names:
        return axis_name
    if len(mesh.axis_names) != 1:
        raise ValueError(
            f"jdp.DataParallel: axis_name is {axis_name!r}, and the mesh has the axes "
            f"{', '.join(map(repr, mesh.axis_names))}; one of them counts the replicas. Pass axis_name="
            f"{mesh.axis_names[0] if mesh.axis_names else 'data'!r}, or another of them."
        )
    (name,) = mesh.axis_names
    if axis_name not in ("data", name):
        raise ValueError(
            f"jdp.DataParallel: axis_name is {axis_name!r}, and the mesh has the axis {name!r}; the replicas are along "
            f"that one. Leave axis_name out."
        )
    return name


def _checked(replicas: Any, n: int) -> int | None:
    """Returns the user's number of replicas (or None); it must be a multiple of the number of devices."""
    if replicas is None:
        return None
    number = as_int(replicas)
    if number is None:
        raise TypeError(
            f"jdp.DataParallel: replicas is {replicas!r}; it is the number of chunks of each batch. Pass an int, a "
            f"multiple of the {n} devices, or None for one replica on each."
        )
    if number < 1 or number % n:
        raise ValueError(
            f"jdp.DataParallel: replicas is {replicas} and there are {n} devices; all devices have the same number of "
            f"replicas, 1 or more. Pass a multiple of {n}, or devices whose number divides {replicas}."
        )
    return number


def _unpickled(kind: ModuleKind, portable: list[Any], axes: list[tuple[str, int]], *rest: Any) -> Config:
    *devices, output_device = _here(portable)
    names, sizes = zip(*axes, strict=True)
    mesh = Mesh(np.array(devices, dtype=object).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    return Config(kind, mesh, output_device, *rest)


def _of_function(function: Callable[..., Tree]) -> ReplicaProgram:
    return spmd(reading(function), gathered=lambda out, _: out)


def _marking(function: Callable[..., Tree], out_axes: Tree) -> Callable[..., Tree]:
    def call(params: Tree, /, *args: Any, **kwargs: Any) -> Tree:
        return mark_outputs(function(params, *args, **kwargs), out_axes)

    return call


def kind_of(module: Any, verb: str = "DataParallel") -> ModuleKind:
    """Returns the kind of a module; a wrapper has the kind of the module in it."""
    inner = getattr(module, "_config", None)
    if isinstance(inner, Config):
        return inner.kind
    if isinstance(module, linen.Module):
        return "linen"
    if isinstance(module, nnx.Pytree):
        return "nnx"
    torch_nn = sys.modules.get("torch.nn")  # a user who has one of its modules has imported it
    if torch_nn is not None and isinstance(module, torch_nn.Module):
        raise TypeError(
            f"jdp.{verb}: module is a torch.nn.Module, a {type(module).__name__}; jdp runs JAX's programs, and torch's "
            f"modules compute with torch's tensors. Write it in Flax (torch.nn.Linear is nnx.Linear and nn.Dense), and "
            f"take its weights over as x.detach().numpy()."
        )
    arrays = [x for x in jax.tree.leaves(module) if is_array(x)] if callable(module) else []
    if arrays and verb == "DataParallel":
        raise TypeError(
            f"jdp.{verb}: module is a {type(module).__name__}, a callable pytree that holds {len(arrays)} arrays; the "
            f"arrays of a function are its params, because those that it holds itself have no gradient. Pass them "
            f"apart: params, static = eqx.partition(model, eqx.is_array), and a function that calls "
            f"eqx.combine(params, static); for a jax.tree_util.Partial, its function and the arrays as params."
        )
    if callable(module) and not isinstance(module, type):
        return "function"
    what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
    raise TypeError(
        f"jdp.{verb}: module is {what}; it is a Flax Linen or NNX module, or a function apply_fn(params, *args). "
        f"Pass an instance or a function."
    )


def _here(devices: list[Any]) -> list[Any]:
    """Returns this machine's devices with the pickled platforms and ids; an entry that is no device stays as it is."""
    found = [_find(*d) if isinstance(d, tuple) else d for d in devices]
    missing = [f"{d[0]}:{d[1]}" for d, here in zip(devices, found, strict=True) if d is not None and here is None]
    if missing:
        raise ValueError(
            f"jdp.DataParallel: the pickled wrapper runs on {', '.join(missing)}, which this machine lacks; it has "
            f"{names_of(jax.devices())}. Pickle the variables instead, and make a wrapper here."
        )
    return found


def _find(platform: str, number: int) -> Device | None:
    try:
        return next((d for d in jax.devices(platform) if d.id == number), None)
    except RuntimeError:  # no such platform
        return None


M = TypeVar("M", covariant=True)


class Wrapper(Protocol[M]):
    """A `jdp.DataParallel` as the packages below it see it: its arguments, the module, and the four steps."""

    _config: Config

    @property
    def module(self) -> M: ...
    @property
    def devices(self) -> tuple[Device, ...]: ...
    def scatter(self, *args: Any, **kwargs: Any) -> Any: ...
    def replicate(self, *args: Any, **kwargs: Any) -> Any: ...
    def parallel_apply(self, *args: Any, **kwargs: Any) -> Any: ...
    def gather(self, *args: Any, **kwargs: Any) -> Any: ...


def leaf_by_leaf_of(config: Config, batch: Tree, in_axes: Tree, layouts: Layouts) -> Tree:
    """Returns a batch with a `Scattered` for each of its arrays; a batch that is one `Scattered` stays one."""
    rows, nodes = scatter_batch(config, batch, "prefetch", in_axes, layouts)
    return placed(rows) if type(batch) is Scattered else put_nodes(leaf_by_leaf(placed(rows)), nodes)


def scatter_batch(
    config: Config, batch: Tree, verb: str, in_axes: Tree, layouts: Layouts
) -> tuple[Scattered, dict[int, Any]]:
    """Returns one batch, scattered by `in_axes` (None: the wrapper's); `layouts` are those of `config.layouts_of`.

    Also returns the NNX objects of the batch by number; stand-ins are in their places.
    """
    if type(batch) is Scattered and (batch._layout.mesh, batch._layout.per_device) == (config.mesh, config.per_device):
        return batch, {}
    inputs, nodes = take_objects(config, batch, verb)
    if not nodes and not isinstance(batch, (*ARRAYS, *NESTED)):
        if jax.tree_util.treedef_is_leaf(jax.tree.structure(batch, is_leaf=no_further)):
            refuse_loader(batch, verb)
    axes = axes_of_batch(config, batch, in_axes)
    mesh, dim, replicas = config.mesh, config.dim, config.replicas
    how = Cutting(mesh, dim, verb, "batch", axes=axes, layouts=layouts, place=False, replicas=replicas)
    return split(inputs, how), nodes


def take_objects(config: Config, batch: Tree, verb: str) -> tuple[Tree, dict[int, Any]]:
    """Returns the batch with stand-ins for its NNX objects, and these by number: in a step an NNX model is number 0."""
    if isinstance(batch, ARRAYS):
        return batch, {}
    first = int(config.kind == "nnx")
    inputs, nodes = take_nodes(batch, first, verb, "batch")
    return inputs if nodes else batch, dict(enumerate(nodes, first))


def axes_of_batch(config: Config, batch: Tree, in_axes: Tree = None) -> Tree:
    """Returns the axes of a batch as a prefix of its tree; tuples of axes also fit lists, and lists of axes tuples.

    `in_axes` are those of an entry point; None stands for the wrapper's.
    """
    axes = config.in_axes if in_axes is None else in_axes
    if type(axes) not in (tuple, list):
        return axes
    fits = isinstance(batch, tuple | list) and len(batch) == len(axes)
    if in_axes is None and not fits:
        return axes[0] if axes else config.dim
    return type(batch)(axes) if type(batch) in (tuple, list) else axes
