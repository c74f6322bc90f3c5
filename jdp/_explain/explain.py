"""explain: what a compiled call really does, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._core.devices import memory_bytes
from .._core.layout import Tree, Whole
from .._core.outputs import path_name
from .._jax.jaxprs import constants
from .._topology.chips import CHIPS
from .calls import Call, capture, unused_donations
from .collectives import Collective, carried, collectives
from .cost import totals
from .hlo import parse
from .report import Report, Work

VERB = "explain"


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Compiles the program that a call would run, and tells what it does: work, memory, collectives, overlap.

    Nothing is run, no state is changed, and the devices need not be there (`jdp.topology`).

    Args:
        fn: `dp.apply`, `dp`, what `dp.value_and_grad`, `dp.grad`, `dp.train_step` and `dp.parallel` return, or any
            function that calls one of them (of several, the first).
        *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        **kwargs: likewise.

    Returns:
        A report. Printed it is a table; `report.flops`, `.peak_bytes`, `.collectives`, `.in_flight` and so on are
        numbers for assertions in tests. Bytes are those of one device, the one with the most rows. Over several
        processes each has as many rows as this one.

    Raises:
        TypeError: `fn` cannot be called, or comes to no program of jdp's.
        ValueError: the function cannot be traced with shapes for arrays, with JAX's reason.
        RuntimeError: the compiler refuses the program: it does not fit the device's memory, for one.

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
        raise TypeError(f"jdp.{VERB}: fn is a {type(fn).__name__}; it is called. Pass dp.apply, or a step.")
    call = captured(fn, args, kwargs)
    start = time.perf_counter()
    donations: list[str] = []
    with unused_donations(donations):
        with _values_are_named(fn):
            traced = call.trace()
        compiled = _compiled(call, traced)
    return _report(call, traced.jaxpr, compiled, time.perf_counter() - start, tuple(donations))


def _compiled(call: Call, traced: Any) -> Any:
    try:
        return call.compile(traced)
    except jax.errors.JaxRuntimeError as error:
        kind, rows = call.mesh.devices.flat[0].device_kind, max(call.batch[0].sizes)
        full = "RESOURCE_EXHAUSTED" in str(error)
        raise RuntimeError(
            f"jdp.{VERB}: {call.label} with {rows} rows on each {kind} does not compile: {str(error).splitlines()[0]}; "
            + (
                "arguments, results and temporaries share its memory. Pass fewer rows, or make the step with "
                "accumulate_steps or shard_optimizer=True."
                if full
                else "the compiler for it says why. Change what it names."
            )
        ) from error


def _report(call: Call, jaxpr: Any, compiled: Any, seconds: float, donations: tuple[str, ...]) -> Report:
    hlo, memory, device = compiled.as_text(), compiled.memory_analysis(), call.mesh.devices.flat[0]
    module = parse(hlo)
    sizes = {role: bytes_on_each(tree) for role, tree in call.roles.items()}
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Report(
        label=call.label,
        platform=device.platform,
        device_kind=device.device_kind,
        devices=call.mesh.size,
        processes=len({d.process_index for d in call.mesh.devices.flat}),
        rows=call.batch[0].sizes,
        work=_work(compiled, module),
        parameter_bytes=sizes["parameters"],
        optimizer_bytes=sizes.get("optimizer", 0),
        state_bytes=sizes.get("state", 0),
        batch_bytes=sizes["batch"],
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=output,
        peak_bytes=memory.argument_size_in_bytes + output + memory.temp_size_in_bytes,
        memory_bytes=_memory_of(device),
        collectives=_collectives_of(call, module),
        unscattered=tuple(unscattered(call, jaxpr)),
        unused_donations=donations,
        compilations=call.compilations,
        compile_seconds=seconds,
        hlo=hlo,
        _call=call,
    )


def _collectives_of(call: Call, module: Any) -> tuple[Collective, ...]:
    leaves = {path_name(path): (str(x.dtype), tuple(x.shape)) for path, x in _leaves(call.differentiated)}
    return tuple(
        dataclasses.replace(c, parameters=tuple(map(_short, carried(c, leaves))))
        for c in collectives(module)
    )


def _memory_of(device: Any) -> int | None:
    """What programs can have of the device's memory: its own word, or for a described one the data sheet's."""
    chip = next((chip for chip in CHIPS.values() if chip.device_kind == device.device_kind), None)
    return memory_bytes(device) or (chip and int(chip.memory_bytes * chip.memory_share))


def captured(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of the program that `fn(*args, **kwargs)` would run."""
    with _values_are_named(fn):
        call = capture(fn, args, kwargs)
    if call is None:
        raise TypeError(
            f"jdp.{VERB}: {_name_of(fn)} comes to no program of jdp's; it explains what jdp compiles. Pass dp.apply, "
            f"a step, or a function that calls one."
        )
    return call


@contextlib.contextmanager
def _values_are_named(fn: Any) -> Iterator[None]:
    """JAX's errors for Python that looks at values, with what to do."""
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise ValueError(
            f"jdp.{VERB}: {_name_of(fn)} needs the values of its arguments, and they are only shapes here "
            f"({str(error).splitlines()[0]}). Let Python look at shapes alone, as under jax.jit."
        ) from error


def work_alone(call: Call) -> Work | None:
    """The work of the same call on the primary device alone, with the whole batch."""
    alone = call.alone()
    try:
        compiled = alone.compile(alone.trace())
    except jax.errors.JaxRuntimeError:  # more than one device holds
        return None
    return _work(compiled, None)


def _work(compiled: Any, module: Any) -> Work:
    cost = compiled.cost_analysis()
    if cost and cost.get("flops", 0) > 0:
        return Work(cost["flops"], cost.get("bytes accessed", 0.0), "compiled")
    # The compiler for GPUs counts nothing where there is none.
    total = totals(module or parse(compiled.as_text()))
    return Work(total.flops, total.bytes, "estimated")


def bytes_on_each(tree: Tree) -> int:
    """Bytes of the arrays of a tree that lie on one device."""
    return sum(_bytes(x) for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))


def _bytes(x: Any) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    item = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), x.dtype)) if key else None
    return math.prod(shape) * (x.dtype.itemsize if item is None else item.size * item.dtype.itemsize)


def _leaves(tree: Tree) -> list[tuple[Any, Any]]:
    return [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if hasattr(x, "dtype")]


def _short(name: str) -> str:
    """A parameter's name without the number of the argument it belongs to."""
    return re.sub(r"^(\d+\.)+", "", name).removesuffix(".value")


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def unscattered(call: Call, jaxpr: Any) -> list[str]:
    """Names of arguments and of constants that have as many rows as the batch, with their shapes."""
    rows = sum(call.batch[0].sizes)
    if rows < 2 or call.mesh.size == 1 or not any(s._layout.is_cut for s in call.batch):
        return []
    found = []
    for scattered in call.batch:
        layout = scattered._layout
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(layout.fill(scattered._arrays))]
        for x, leaf, name in zip(scattered._arrays, layout.arrays, names, strict=False):
            if isinstance(leaf, Whole) and rows in x.shape[:1]:
                found.append(f"argument {name or '0'}: {x.dtype}{list(x.shape)}")
    for x in constants(jaxpr):
        if getattr(x, "ndim", 0) and x.shape[0] == rows:
            found.append(f"a constant that the function closes over: {x.dtype}{list(x.shape)}")
    return list(dict.fromkeys(found))
