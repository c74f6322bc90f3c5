"""One call of a wrapper, from top to bottom: `apply` (of an NNX model `run_nnx`), `four_steps`, and the four steps.

A call like one that ran before goes straight to its program. Any other call takes the four steps, which a subclass may
replace; before them, each NNX object among its arguments is replaced by a stand-in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from .._core.devices import Device, Devices, resolve_output
from .._core.gather import gather, join, scatter_list
from .._core.inputs import entries
from .._core.layout import Tree
from .._core.parallel_apply import in_replica
from .._core.programs import dispatch
from .._core.replica_mesh import ReplicaMesh, outside_of_mesh
from .._core.replicate import broadcast, lives_replicated
from .._core.scatter import Cutting, other_replicas, split
from .._core.scattered import Scattered, children, concrete, holds_scattered, map_scattered, on_mesh
from .._core.unread import unread
from .._jax.private import trace_state_clean
from .._model.config import Config, Wrapper
from .._model.linen import call_options, explain_stacked, place, unboxed
from .._model.nnx import Held, StandIn, filters_of, is_node, take_nodes
from .._processes.coordination import text_of

_NO_APPLY = (
    "jdp.DataParallel: an NNX module holds its own state. Call dp(*args) instead of dp.apply; another method runs by "
    "jdp.DataParallel(lambda model, x: model.encode(x), devices)(dp.module, x)."
)
_NO_METHOD = (
    "jdp.DataParallel: method is an argument of dp.apply for a Linen module; an NNX module has none. Call "
    "jdp.DataParallel(lambda model, x: model.encode(x), devices)(dp.module, x)."
)


@outside_of_mesh
def apply(dp: Wrapper[object], variables: Tree, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a Linen module or a function: `dp.apply(variables, x) == module.apply(variables, x)`.

    For Linen modules `rngs`, `mutable` and `method` are those of `flax.linen.Module.apply`; with
    `mutable` the result is `(output, updated collections)`. Each replica draws from its own keys,
    the primary from those given.

    Args:
        variables: the variables of a Linen module (from `dp.init`), or a function's parameters.
        *args: cut along `dim` (or `in_axes`). NNX objects (an `nnx.Rngs`, a model) are replicated, and
            their state is updated.
        **kwargs: as `args`; also `rngs`, `mutable` and `method` for Linen.

    Raises:
        ValueError: arrays disagree on the batch size; uneven chunks for a model with collectives.
        RuntimeError: parameters on a device that is neither the host nor the primary device.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
        >>> dp.apply(np.float32(2), np.arange(3.0)).tolist()
        [0.0, 2.0, 4.0]
    """
    config, stateful = dp._config, False
    if config.kind == "nnx":
        raise TypeError(_NO_APPLY)
    default_steps = _has_default_steps(dp)
    if config.kind == "linen":
        kwargs, stateful = call_options(variables, kwargs)
    if default_steps and (type(variables) is dict or not is_node(variables)):
        known = config.calls.run_known(config.mesh, dp.module, variables, args, kwargs)
        if known is not None:
            program, _, out = known
            if program.layout(out).is_gathered and config.output_device in (None, "sharded"):
                return out[-1]
            return _gathered(dp, program.scattered(out), True, stateful)  # its parameters are replicated
    if not in_replica():
        return _run(dp, variables, args, kwargs, stateful)
    module: Any = dp.module
    if config.kind == "linen":
        return module.apply(unboxed(variables, kwargs.get("mutable", False)), *args, **kwargs)
    return module(variables, *args, **kwargs)


def _run(dp: Wrapper[object], variables: Tree, args: tuple[Any, ...], kwargs: Mapping[str, Any], stateful: bool) -> Any:
    """Runs a call that is not a known one. State with a batch axis is cut; NNX objects are replicated, then updated."""
    config = dp._config
    cut = {}
    for name, axis in config.state_axes.items():
        if name in variables:
            cut[name] = _cut_state(config, variables[name], axis, f"state {name}")
    if cut:
        variables = {**variables, **cut}
    # Parameters of a function may hold NNX objects. Such a call is never a known one.
    is_function = config.kind == "function"
    whole, nodes = take_nodes(variables, root="params") if is_function else (variables, [])
    (args, kwargs), given = take_nodes((args, kwargs), len(nodes))
    nodes += given
    if nodes:
        graph, *states = nnx.split(nodes)
        whole = Held(whole, graph, tuple(states))
    try:
        out = four_steps(dp, whole, args, kwargs, stateful, cut, variables)
    except Exception as error:
        explain_stacked(error, variables, len(config.devices))
        raise
    if nodes:
        out, updates = out
        nnx.update(nodes, updates)
    return out


@outside_of_mesh
def run_nnx(dp: Wrapper[object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an NNX module, and updates its state, and that of NNX objects among the arguments (an `nnx.Rngs`)."""
    config = dp._config
    filters = filters_of(config.state_axes)
    (args, kwargs), given = take_nodes((args, kwargs), 1)
    nodes = [dp.module, *given]
    graph, *batched, sown, rest = nnx.split(nodes, *[accepts for accepts, _ in filters], nnx.Intermediate, ...)
    cut = {
        f"{kind}": _cut_state(config, state, axis, "state")
        for state, (kind, axis) in zip(batched, config.state_axes.items(), strict=True)
    }
    sown = place(sown, config.mesh)  # it came back cut, like an output
    params = Held(StandIn(0), graph, (*cut.values(), sown, rest))
    try:
        out, updates = four_steps(dp, params, args, kwargs, stateful=False, cut=cut, home=rest.get(0, ()))
    except TypeError as error:
        if "unexpected keyword argument 'method'" in text_of(error):  # as for Linen
            error.add_note(_NO_METHOD)
        raise
    nnx.update(nodes, updates)
    return out


def four_steps(
    dp: Wrapper[object],
    params: Tree,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    stateful: bool,
    cut: Mapping[str, Scattered],
    home: Tree,
) -> Any:
    """Runs the four steps; returns the result, and if `params` is a `Held`, also the updates of its NNX objects.

    Args:
        dp: the wrapper, whose methods are the four steps.
        params: the parameters, with a stand-in for each NNX object among them.
        args: the positional arguments after the parameters.
        kwargs: the keyword arguments.
        stateful: whether the program returns (output, state).
        cut: the parts of `params` that have a batch axis, by name; they are cut already.
        home: the part of the parameters that decides where results go. It has no stand-ins.
    """
    config, holds_objects, default_steps = dp._config, type(params) is Held, _has_default_steps(dp)
    config.refuse_other_mesh()
    if not trace_state_clean():
        args, kwargs = _at_home((args, kwargs), home, config.mesh)
    inputs, kw = dp.scatter(args, kwargs, config.devices)
    if cut:
        _refuse_other_rows(cut, inputs, kw)
    replicas = dp.replicate(params, config.devices)
    if default_steps and inputs._layout.holds_statics:
        outputs = unread(lambda rows: dp.parallel_apply(replicas, rows, kw), inputs, config.calls.reads)
    else:
        outputs = dp.parallel_apply(replicas, inputs, kw)
    in_place = replicas is params
    # No call with state_axes is remembered, because another one may have to cut some of the variables.
    if default_steps and in_place and not config.state_axes and not holds_objects:
        call, operands = (params, args, kwargs), (replicas, inputs, kw)
        config.calls.remember(functools.partial(config.program, dp.module), dp.module, call, operands)
    stay = _stays(config, params, home, in_place)
    if not holds_objects:
        return _gathered(dp, outputs, stay, stateful)
    outputs, updates = children(outputs)
    return _gathered(dp, outputs, stay, stateful), join(updates, "sharded" if stay else None)


def _at_home(call: tuple[Any, ...], home: Tree, mesh: ReplicaMesh) -> tuple[Any, ...]:
    """Puts traced arrays of a call where the parameters are, if they are on the host or committed to no device.

    Then their gradients come back there, as the outputs do, and can be added: JAX adds no arrays of different devices.
    If the parameters are replicated, each device gets the whole array before it is cut.
    """
    to = mesh.own.replicated if lives_replicated(home, mesh) else mesh.own.devices[0]

    def put(x: Any) -> Any:
        value = concrete(x) if isinstance(x, Tracer) else None
        is_free = value is not None and not getattr(value, "committed", False)
        return jax.device_put(x, to, src=to) if is_free else x

    return jax.tree.map(put, call, is_leaf=is_node)  # type: ignore[no-any-return]


def _stays(config: Config, params: Tree, home: Tree, in_place: bool) -> bool:
    """Returns True if results stay spread over the replicas, because the parameters live on all of them.

    If there are no arrays at all, results go to the primary device. If only NNX objects among the arguments have
    arrays, results stay.
    """
    if in_place:
        return bool(jax.tree.leaves(params))
    return not jax.tree.leaves(home) or lives_replicated(home, config.mesh)


def _gathered(dp: Wrapper[object], outputs: Scattered, stay: bool, stateful: bool) -> Any:
    """Runs the last step, `gather`: outputs go where the user wants them, and the state where the parameters live."""
    home = "sharded" if stay else None
    output_device = dp._config.output_device
    device = home if output_device is None else output_device
    if not stateful:
        return dp.gather(outputs, device)
    out, state = children(outputs)
    return dp.gather(out, device), join(state, home)


def _cut_state(config: Config, state: Tree, axis: Any, name: Any) -> Scattered:
    """Cuts state with a batch axis like the batch."""
    how = Cutting(config.mesh, config.dim, "DataParallel", name, axes=axis, replicas=config.replicas)
    return split(state, how)


def _refuse_other_rows(cut: Mapping[str, Scattered], inputs: Any, kw: Any) -> None:
    """Raises a `ValueError` for state with a batch axis that has other rows than the batch."""
    if not isinstance(inputs, Scattered) or not isinstance(kw, Scattered):
        return  # a subclass's `scatter` made them
    for name, state in cut.items():
        batched = inputs._layout.is_cut or kw._layout.is_cut
        if not batched or not state._layout.is_cut or state.sizes == inputs.sizes:
            continue
        rows, wanted = sum(state.sizes), sum(inputs.sizes)
        if rows == wanted:
            raise ValueError(
                f"jdp.DataParallel: state {name} is cut into chunks of {state.sizes} rows, the batch into "
                f"{inputs.sizes}; state with a batch axis is cut like the batch. Pass the batch as a plain array, or "
                f"a Linen module's state as jdp.scatter(state, dp.devices, chunk_sizes={inputs.sizes})."
            )
        raise ValueError(
            f"jdp.DataParallel: state {name} has {rows} rows, the batch has {wanted}; state with a batch axis is cut "
            f"like the batch. Pass state of that many rows."
        )


def scatter_arguments(
    dp: Wrapper[object], inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Devices
) -> tuple[Scattered, Scattered]:
    """Cuts the arguments into chunks, step one: `inputs, kw = dp.scatter((x,), {}, dp.devices)`.

    A subclass may replace it, to cut its own kind of batches.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
        >>> inputs, kw = dp.scatter((np.arange(3.0),), {}, dp.devices)
        >>> inputs.sizes, inputs[0][0].tolist()
        ((3,), [0.0, 1.0, 2.0])
    """
    config = dp._config
    axes = None
    if config.in_axes is not None:
        in_axes = entries("DataParallel", config.in_axes, len(inputs), "in_axes", "arguments")
        axes = (tuple(in_axes), config.dim)
    own = devices is config.devices
    mesh, layouts = (config.mesh, config.layouts) if own else (config.mesh_of(devices), None)
    roots, replicas = ("args", "kwargs"), config.replicas
    how = Cutting(mesh, config.dim, "DataParallel", roots, axes=axes, layouts=layouts, place=False, replicas=replicas)
    args, kw = children(split((tuple(inputs), dict(kwargs)), how))
    return args, kw


def replicate_parameters(dp: Wrapper[object], tree: Tree, devices: Devices) -> Tree:
    """Replicates the parameters, step two: `dp.replicate(params, dp.devices)`. Those in place stay as they are.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
        >>> float(dp.replicate(np.float32(2), dp.devices))
        2.0
    """
    config = dp._config
    mesh = config.mesh if devices is config.devices else config.mesh_of(devices)
    return broadcast(tree, mesh, "DataParallel")


def run_module(dp: Wrapper[object], replicas: Tree, inputs: Scattered, kwargs: Scattered) -> Scattered:
    """Runs the module on every replica, as one program, step three: `dp.parallel_apply(replicas, inputs, kw)`.

    `inputs` and `kwargs` come from `scatter`; lists with one tree per device, as in torch, will do.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
        >>> inputs, kw = dp.scatter((np.arange(3.0),), {}, dp.devices)
        >>> dp.parallel_apply(dp.replicate(2.0, dp.devices), inputs, kw)[0].tolist()
        [0.0, 2.0, 4.0]
    """
    config = dp._config
    if not isinstance(inputs, Scattered):
        inputs = scatter_list(inputs, config.mesh, config.dim, "inputs", config.replicas)
    if not isinstance(kwargs, Scattered):
        kwargs = scatter_list(kwargs or [{}], config.mesh, config.dim, "kwargs", config.replicas)
    mesh = config.mesh
    inputs, kwargs = (s if s._layout.mesh is mesh else on_mesh(s, mesh) for s in (inputs, kwargs))
    if inputs._layout.mesh is mesh and inputs._layout.per_device != config.per_device:
        raise other_replicas(inputs, "DataParallel", config.per_device)
    program = config.program(dp.module, type(replicas) is Held)
    return dispatch(program, inputs._layout.mesh, replicas, inputs, kwargs)


def gather_outputs(dp: Wrapper[object], outputs: Scattered, output_device: Device | str | None) -> Tree:
    """Concatenates the outputs on the output device, step four: `dp.gather(outputs, dp.output_device)`.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
        >>> inputs, kw = dp.scatter((np.arange(3.0),), {}, dp.devices)
        >>> outputs = dp.parallel_apply(dp.replicate(2.0, dp.devices), inputs, kw)
        >>> dp.gather(outputs, dp.output_device).tolist()
        [0.0, 2.0, 4.0]
    """
    if output_device not in (None, "sharded"):
        output_device = resolve_output("DataParallel", output_device)
    if isinstance(outputs, Scattered):
        return join(outputs, output_device)
    if holds_scattered(outputs):  # a batch, whose arrays have an axis each
        return map_scattered(lambda s: join(s, output_device), outputs)
    return gather(outputs, output_device, dp._config.dim)


_STEPS: dict[str, Any] = {
    "scatter": scatter_arguments,
    "replicate": replicate_parameters,
    "parallel_apply": run_module,
    "gather": gather_outputs,
}
for _name, _step in _STEPS.items():  # by the names of the methods, for pickle and help
    _step.__name__, _step.__qualname__ = _name, f"DataParallel.{_name}"
    _step.__module__ = f"{__package__}.data_parallel"
_OWN = tuple(_STEPS.values())


def _has_default_steps(dp: Wrapper[object]) -> bool:
    """Returns True if neither a subclass nor the user has replaced one of the four steps."""
    kind: Any = type(dp)
    steps = kind.scatter, kind.replicate, kind.parallel_apply, kind.gather
    return steps == _OWN and _STEPS.keys().isdisjoint(vars(dp))
