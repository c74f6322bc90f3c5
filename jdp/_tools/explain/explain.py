"""explain: what a compiled call really does, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax

from ..._core.devices import memory_bytes
from ..._core.layout import Static, Whole
from ..._core.outputs import path_name, paths_in
from ..._core.replica_mesh import outside_of_mesh
from ..._core.scattered import is_scattered
from ..._core.summary import bytes_on_each
from ..._jax.jaxprs import constants
from ..topology.chips import chip_of
from .calls import Call, capture, unused_donations
from .collectives import Collective, carried, collectives
from .cost import totals
from .estimate import Network
from .hlo import Module, parse
from .report import Report, Work


@outside_of_mesh
def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Compiles the program that a call would run, and reports what it does: work, memory, collectives, overlap.

    `print(jdp.explain(step, state, batch))`, or `print(jdp.explain(dp.apply, params, x))`. Nothing is run, no state is
    changed, and the devices need not be present (`jdp.topology`).

    Args:
        fn: `dp.apply`, `dp`, what `dp.value_and_grad`, `dp.grad`, `dp.train_step` and `dp.parallel` return, or any
            function that calls one of them (if it calls several, the first counts).
        *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        **kwargs: its keyword arguments, in the same way.

    Returns:
        A report. Printed, it is a table; `report.flops`, `.peak_bytes`, `.collectives`, `.in_flight` and so on are
        numbers for assertions in tests. Bytes are those of one device, the one with the most rows. With several
        processes, each is assumed to have as many rows as this one.

    Raises:
        TypeError: `fn` cannot be called, or runs no jdp program.
        ValueError: the function cannot be traced with shapes for arrays; the message has JAX's reason.
        RuntimeError: the compiler refuses the program, for example because it does not fit the device's memory.

    Example:
        >>> import jax, jax.numpy as jnp, jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x @ w, devices=[0])
        >>> report = jdp.explain(dp.apply, np.ones((4, 2)), jax.ShapeDtypeStruct((8, 4), jnp.float32))
        >>> int(report.flops), report.batch_bytes, report.collectives
        (128, 128, ())

    Source: `jax.stages.Compiled` (cost_analysis, memory_analysis, as_text); torch has no counterpart: its profiler
    looks at what has run.
    """
    if not callable(fn):
        raise TypeError(f"jdp.explain: fn is a {type(fn).__name__}; it is called. Pass dp.apply, or a step.")
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        call = capture(fn, args, kwargs)
        if call is None:
            raise TypeError(
                f"jdp.explain: {name} comes to no program of jdp's; it explains what jdp compiles. Pass dp.apply, a "
                f"step, or a function that calls one."
            )
        return compiled_call(dataclasses.replace(call, of=fn)).report()
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise ValueError(
            f"jdp.explain: {name} needs the values of its arguments, and they are only shapes here "
            f"({str(error).splitlines()[0]}). Let Python look at shapes alone, as under jax.jit."
        ) from error


@dataclasses.dataclass(frozen=True)
class CompiledCall:
    call: Call
    jaxpr: Any
    compiled: Any
    seconds: float  # spent on compiling
    donations: tuple[str, ...]  # the unused ones

    @property
    def peak_bytes(self) -> int:
        memory = self.compiled.memory_analysis()
        return memory.argument_size_in_bytes + _output_bytes(memory) + memory.temp_size_in_bytes

    def report(self) -> Report:
        call, compiled = self.call, self.compiled
        hlo, memory, device = compiled.as_text(), compiled.memory_analysis(), call.mesh.devices[0]
        module, chip = parse(hlo), chip_of(device.device_kind)
        sizes = {role: bytes_on_each(tree) for role, tree in call.roles.items()}
        return Report(
            label=call.label,
            platform=device.platform,
            device_kind=device.device_kind,
            devices=len(call.mesh.all_devices),
            processes=len({d.process_index for d in call.mesh.all_devices}),
            rows=_rows(call.batch[0]),
            work=_work(compiled, module),
            parameter_bytes=sizes["parameters"],
            gradient_bytes=sizes.get("gradients", 0),
            optimizer_bytes=sizes.get("optimizer", 0),
            state_bytes=sizes.get("state", 0),
            batch_bytes=bytes_on_each(call.batch),
            temp_bytes=memory.temp_size_in_bytes,
            output_bytes=_output_bytes(memory),
            peak_bytes=self.peak_bytes,
            # What the device reports; for a described device, what the data sheet says.
            memory_bytes=memory_bytes(device) or (chip and chip.available_bytes),
            collectives=_collectives_of(call, module),
            unscattered=unscattered(call, self.jaxpr),
            unused_donations=self.donations,
            compilations=call.compilations,
            compile_seconds=self.seconds,
            hlo=hlo,
            _alone=functools.partial(outside_of_mesh(work_alone, "explain"), call),
            _network=Network.of([*call.mesh.all_devices]) if chip else None,
        )


def compiled_call(
    call: Call, tracing: contextlib.AbstractContextManager[Any] | None = None, kernels: str | None = None
) -> CompiledCall:
    """Compiles the call. Python traces under `tracing`; compilers for absent GPUs may cache in the file `kernels`."""
    donations: list[str] = []
    start = time.perf_counter()
    with tracing or contextlib.nullcontext(), unused_donations(donations):
        traced = call.trace()
        lowered = traced.lower()
    compiled = _compiled(call, lowered, kernels)
    return CompiledCall(call, traced.jaxpr, compiled, time.perf_counter() - start, tuple(donations))


def _compiled(call: Call, lowered: Any, kernels: str | None) -> Any:
    try:
        return call.compile(lowered, kernels)
    except jax.errors.JaxRuntimeError as error:
        rows, kind = max(_rows(call.batch[0])), call.mesh.devices[0].device_kind
        what = f"{call.label} with {rows} rows on each {kind}"
        advice = "the compiler for it says why. Change what it names."
        if "RESOURCE_EXHAUSTED" in str(error):
            advice = (
                "arguments, results and temporaries share its memory. Pass fewer rows, or make the step with "
                "accumulate_steps, shard_optimizer=True or shard_params=True."
            )
        raise RuntimeError(f"jdp.explain: {what} does not compile: {str(error).splitlines()[0]}; {advice}") from error


def _output_bytes(memory: Any) -> int:
    """Returns the bytes of results that do not take the place of a donated argument."""
    return memory.output_size_in_bytes - memory.alias_size_in_bytes


def _collectives_of(call: Call, module: Module) -> tuple[Collective, ...]:
    """Returns the collectives with the names of the parameters they carry, without the leading argument numbers."""
    found = jax.tree_util.tree_leaves_with_path(call.params, is_leaf=is_scattered)
    found = [(path, x._arrays[0] if is_scattered(x) else x) for path, x in found]  # a cut parameter is a Scattered
    leaves = {path_name(path): (str(x.dtype), tuple(x.shape)) for path, x in found if hasattr(x, "dtype")}
    short = {name: re.sub(r"^(\d+\.)+", "", name).removesuffix(".value") for name in leaves}
    return tuple(
        dataclasses.replace(c, parameters=tuple(short[name] for name in carried(c, leaves)))
        for c in collectives(module)
    )


def work_alone(call: Call) -> Work | None:
    """Returns the work of the same call on the primary device alone, with the whole batch; None if it does not fit."""
    alone = call.alone()
    try:
        compiled = alone.compile(alone.trace().lower())
    except jax.errors.JaxRuntimeError:  # it needs more than one device has
        return None
    return _work(compiled)


def _work(compiled: Any, module: Module | None = None) -> Work:
    cost, module = compiled.cost_analysis(), module or parse(compiled.as_text())
    has_loop = any(one.opcode == "while" for computation in module.computations.values() for one in computation)
    if cost and cost.get("flops", 0) > 0 and not has_loop:
        return Work(cost["flops"], cost.get("bytes accessed", 0.0), "compiled")
    # A compiler counts a loop as one iteration, and that for GPUs counts nothing on a machine without a GPU.
    total = totals(module)
    return Work(total.flops, total.bytes, "estimated")


def _rows(batch: Any) -> tuple[int, ...]:
    """Returns the rows on each device that has chunks."""
    layout = batch._layout
    return layout.by_device[: -(-len(layout.sizes) // layout.per_device)]


def unscattered(call: Call, jaxpr: Any) -> tuple[str, ...]:
    """Returns replicated arguments and constants with as many rows as the batch, by name, dtype and shape."""
    rows = sum(call.batch[0].sizes)
    if rows < 2 or call.mesh.size == 1 or not any(s._layout.is_cut for s in call.batch):
        return ()
    found = []
    for scattered in call.batch:
        layout = scattered._layout
        named = zip(paths_in(layout.treedef), layout.leaves, strict=True)
        names = [path_name(path) for path, leaf in named if not isinstance(leaf, Static)]
        for x, leaf, name in zip(scattered._arrays, layout.arrays, names, strict=True):
            if isinstance(leaf, Whole) and rows in x.shape[:1]:
                found.append(f"argument {name or '0'}: {x.dtype}{list(x.shape)}")
    for x in constants(jaxpr):
        if getattr(x, "ndim", 0) and x.shape[0] == rows:
            found.append(f"a constant that the function closes over: {x.dtype}{list(x.shape)}")
    return tuple(dict.fromkeys(found))
