"""parallel_apply runs a function on every replica, as one SPMD program: `s[i] == fn(replicas, *inputs[i])`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from .._jax.private import arrays_on_its_mesh
from .._jax.rewrites import with_adjoints_in
from .._processes.coordination import text_of
from .devices import outside
from .inputs import is_unbound_axis
from .layout import Cut, Layout, Static, Tree, Whole
from .outputs import Outputs, paths_in, refuse_other_axes, returned
from .programs import SIZES, Recent, ReplicaProgram, dispatch, made_once
from .replica_mesh import HALVES, ReplicaMesh, outside_of_mesh
from .replicate import broadcast
from .scatter import Cutting, split
from .scattered import Scattered, Signature, flatten_call, holds_scattered, is_scattered, on_mesh, placed
from .shards import all_gathered
from .turns import take_turns
from .uneven import is_uneven, run_chunks


@outside_of_mesh
def parallel_apply(
    fn: Callable[..., Tree], replicas: Tree, inputs: Scattered | Tree, kwargs: Scattered | Tree = None
) -> Scattered:
    """Runs `fn(replicas, *inputs[i], **kwargs[i])` on every device i at once: `jit(shard_map(fn))`.

    `outputs = jdp.parallel_apply(fn, jdp.replicate(params), jdp.scatter((x,)))`.

    One compiled program, which is what `jax.pmap` is today. It is compiled once per function and shapes: `fn` is known
    by its identity (a bound method by its object and name), so a new lambda for each call is compiled for each call.
    Python scalars, strings and other objects among the inputs are part of the program: each new value compiles it
    again. The axis `"data"` is bound inside (or that of the mesh that the inputs were scattered over), so that `fn` can
    run collectives. 0-d typed PRNG keys among the inputs are folded with the replica's index on every replica but the
    primary. If chunks have unequal sizes, the outputs have their true sizes.

    Args:
        fn: the function; returns a pytree of arrays.
        replicas: its first argument, replicated (`jdp.replicate`); arrays on the host or
            on the primary device are replicated first.
        inputs: from `jdp.scatter`, or a batch from `dp.prefetch`; a tuple or list holds the positional arguments,
            anything else, also a NamedTuple, is a single argument.
        kwargs: the keyword arguments, a dict; from the same sources.

    Returns:
        A `jdp.Scattered`: `s[i]` is what `fn` returned on replica i.

    Raises:
        TypeError: an output leaf is no array, with its path.
        ValueError: the replicas' outputs differ other than in their size along `dim`; or `fn` runs collectives of its
            own and the chunks are uneven.

    Example:
        >>> import jdp, numpy as np
        >>> x = jdp.scatter((np.arange(4.0),), devices=[0])
        >>> y = jdp.parallel_apply(lambda w, x: w * x, 2.0, x)
        >>> jdp.gather(y).tolist()
        [0.0, 2.0, 4.0, 6.0]

    Source: torch/nn/parallel/parallel_apply.py; jax/_src/pmap.py.
    """
    inputs, kwargs = _joined_batch(inputs), _joined_batch(kwargs)
    if not isinstance(inputs, Scattered) or not isinstance(kwargs, Scattered | None):
        found = inputs if not isinstance(inputs, Scattered) else kwargs
        raise TypeError(
            f"jdp.parallel_apply: inputs and kwargs are a {type(found).__name__}; they are scattered trees. "
            f"Pass jdp.scatter(inputs)."
        )
    if not callable(fn):
        raise TypeError(f"jdp.parallel_apply: fn is a {type(fn).__name__}; it is called. Pass a function.")
    replicas = broadcast(replicas, inputs._layout.mesh, "parallel_apply")
    inputs, kwargs = placed(inputs), None if kwargs is None else placed(on_mesh(kwargs, inputs._layout.mesh))
    return dispatch(made_once(fn, "parallel_apply", spmd), inputs._layout.mesh, replicas, inputs, kwargs)


def _joined_batch(batch: Tree) -> Tree:
    """Returns a batch whose leaves are scattered, as one `Scattered`; anything else as it is."""
    if isinstance(batch, Scattered) or not holds_scattered(batch):
        return batch
    layout = next(x for x in jax.tree.leaves(batch, is_leaf=is_scattered) if is_scattered(x))._layout
    replicas = None if layout.per_device == 1 else len(layout.devices)
    return split(batch, Cutting(layout.mesh, layout.dim, "parallel_apply", "inputs", replicas=replicas))


GatherTime = Literal["as used", "at once", "in the call"]
"""When the parameters that are cut over the replicas are gathered."""
OutputsOf = Callable[[Tree, Mapping[str, Any]], Tree]
"""`gathered(returned, kwargs)` picks those outputs of a function that are concatenated along `dim`."""
CallOf = Callable[[Signature, int], Callable[..., Tree]]
"""`call_of(signature, replica)` returns the function that a replica runs on its operands.

Replicas with chunks of the same size share one function; `replica` is the first of them."""


def spmd(fn: Callable[..., Tree], name: str | None = None, gathered: OutputsOf = lambda *_: ()) -> ReplicaProgram:
    """Returns the program that runs `fn` on every replica; compiled once per layout and shapes."""
    call_of = _call_of_function(fn, gathered)
    return ReplicaProgram(on_replicas(call_of, name or getattr(fn, "__name__", type(fn).__name__)))


def on_replicas(
    call_of: CallOf, label: str, gather: GatherTime = "as used", verb: str = "parallel_apply"
) -> Callable[..., Scattered]:
    """Returns the function `(replicas, inputs, kwargs) -> outputs` that a program is compiled from.

    `gather` says when parameters that are cut are gathered: each as it is used, all at once, or in the call, which gets
    the shards. If chunks are uneven, or a device has several replicas, they are gathered all at once, because such
    replicas run different code, or at different times, and would wait for each other in a gather.
    """
    seen: Recent[Any, set[Any]] = Recent()
    body = body_of(call_of, label)

    def run(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        operands, signature = flatten_call(replicas, inputs, kwargs, verb)
        mesh, in_specs = signature.layout.mesh, signature.specs
        axis_name = mesh.axis_name
        _warn_new_values(seen, operands, signature, label)
        found: list[Outputs] = []
        operands, narrowed = widened(operands, signature)

        def local(*arrays: Any) -> tuple[list[Any], list[Any]]:
            arrays = narrowed(arrays)
            index = jax.lax.axis_index(axis_name) if mesh.size > 1 or not mesh.inner_axes else jnp.int32(0)
            mine, several = signature, signature.layout.per_device > 1
            operands = list(arrays if several else signature.fold_keys(arrays, index))
            if mine.holds_shards and (gather == "at once" or several or is_uneven(mine)):
                mine, operands = all_gathered(mine, operands)
            if several:
                outputs = take_turns(functools.partial(body, mine), operands, mine, index)
            else:
                outputs = run_chunks(functools.partial(body, mine), operands, mine, index, gather == "as used")
            found.append(dataclasses.replace(outputs, values=[]))  # no tracer may outlive its trace
            return outputs.reduce(index)

        with jax.named_scope("DataParallel"):
            cut, whole = mapped(local, mesh, in_specs)(*operands)
        return found[-1].scattered(cut, whole)

    run.__name__ = run.__qualname__ = label
    return run


def mapped(local: Callable[..., Tree], mesh: ReplicaMesh, in_specs: Sequence[PartitionSpec]) -> Callable[..., Tree]:
    """Returns a function that runs `local` on all replicas; `local` returns `(cut outputs, replicated outputs)`.

    If a replica is several devices, the compiler partitions its work over them, as under `jax.jit`.
    """
    with contextlib.suppress(NameError):  # as a rule, there is no such axis
        if not in_replica() and jax.lax.psum(1, mesh.axis_name):
            raise ValueError(
                f"jdp.DataParallel: called inside of jax.vmap(..., axis_name={mesh.axis_name!r}), and the replicas' "
                f"axis has the same name; JAX would take one for the other. Give one of them another name: "
                f"jdp.DataParallel(..., axis_name='replicas')."
            )
    if mesh.size == 1 and mesh.inner_axes:
        # XLA cannot sum over a Manual axis of one device where other axes are Auto ("Cross-partition allreduce must be
        # in (partial) manual partitioning mode"). One replica needs no such axis, only a name for it.
        def alone(*operands: Any) -> Tree:
            lanes = jax.vmap(lambda _: local(*operands), axis_name=mesh.axis_name)(jnp.zeros(1))
            return jax.tree.map(lambda x: x[0], lanes)

        return alone
    if mesh.inner_axes and jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "jdp.parallel_apply: jax_disable_jit is set, and a replica is several devices; XLA's compiler is what cuts "
            "a replica over them. Leave jax_disable_jit out, or look at the model on one device: "
            "jdp.DataParallel(model, devices=[0])."
        )
    return jax.shard_map(
        local,
        mesh=mesh.jax_mesh,
        in_specs=tuple(in_specs),
        out_specs=(PartitionSpec(mesh.axis_name), PartitionSpec()),
        axis_names={mesh.axis_name},
        check_vma=False,  # it fails on real models (the scan of an RNN)
    )


def widened(operands: list[Any], signature: Signature) -> tuple[list[Any], Callable[[Any], Any]]:
    """Returns the operands with 16-bit parameters in 32 bits, where their gradients cannot be summed in 16.

    Also returns the function that takes these back to 16 bits, inside of a replica.
    """
    if not signature.layout.mesh.sums_in_32_bits:
        return operands, lambda arrays: arrays
    dtypes = [x.dtype for x in operands]
    pairs = zip(operands, signature.leaves, strict=True)
    wide = [x.astype(jnp.float32) if isinstance(leaf, Whole) and x.dtype in HALVES else x for x, leaf in pairs]

    def narrowed(arrays: Sequence[Any]) -> list[Any]:
        return [x.astype(dtype) if x.dtype != dtype else x for x, dtype in zip(arrays, dtypes, strict=True)]

    return wide, narrowed


def _call_of_function(fn: Callable[..., Tree], gathered: OutputsOf) -> CallOf:
    """Returns what a replica runs for `fn(replicas, *args, **kwargs)`; checks the axes of its `gathered` outputs."""

    def call_of(signature: Signature, replica: int) -> Callable[..., Tree]:
        def of(operands: Sequence[Any]) -> tuple[Tree, dict[str, Any]]:
            replicas, args, kwargs = signature.fill(operands)
            return fn(replicas, *args, **kwargs), kwargs

        def call(*operands: Any) -> Tree:
            mine = signature.values_of_replica(operands, replica)
            out, kwargs = of(mine)
            layout = signature.layout
            if layout.is_cut and len(layout.rows) > 1 and layout.used[:1] == (replica,):
                axes = [leaf.axis if isinstance(leaf, Cut) else None for leaf in signature.leaves]
                rows, dim = layout.rows[replica], layout.dim
                refuse_other_axes(gathered(out, kwargs), lambda *x: gathered(*of(x)), mine, axes, rows, dim)
            return out

        return call

    return call_of


def body_of(call_of: CallOf, label: str) -> Callable[[Signature, int], Callable[..., Outputs]]:
    """Returns `body(signature, replica)`: what `call_of` returns, jitted, and with its results as `Outputs`."""

    @functools.lru_cache(SIZES)
    def body(signature: Signature, replica: int) -> Callable[..., Outputs]:
        run = call_of(signature, replica)
        inside = functools.partial(replica_context, signature.layout.mesh)

        def traced(context: Callable[[], Any], operands: Sequence[Any]) -> Outputs:
            try:
                with context():
                    out = run(*operands)
            except Exception as error:
                _explain(error, label, signature.layout, replica)
                raise
            return returned(out, signature.layout, operands)

        def call(*operands: Any) -> Outputs:
            if "equinox" in sys.modules:
                return with_adjoints_in(inside, functools.partial(traced, inside))(operands)
            return traced(inside, operands)

        def call_under_mesh(*operands: Any) -> Outputs:
            return traced(functools.partial(inside, under_mesh=True), operands)

        call.__name__ = call_under_mesh.__name__ = label
        # Jitted, so that fn is traced once for all programs around it, whatever the batch and with a gradient or not.
        return _either(jax.jit(call), jax.jit(call_under_mesh))

    return body


def _either(call: Callable[..., Outputs], under_mesh: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Returns the call of a replica, traced under the replicas' mesh if it closes over arrays that lie on a mesh.

    Without a mesh around it JAX does not combine such an array with those of the replica.
    """

    def either(*operands: Any) -> Outputs:
        try:
            return call(*operands)
        except ValueError as error:
            if not any(text in text_of(error) for text in _OF_TWO_MESHES):
                raise
        return under_mesh(*operands)

    return either


def _explain(error: Exception, label: str, layout: Layout, replica: int) -> None:
    """Adds notes to an error of the function that a replica runs: what to do about it, and where it was raised."""
    explain_values(error, f"jdp.parallel_apply: {label}")
    is_of_a_mesh = isinstance(error, ValueError) and any(text in text_of(error) for text in _OTHER_MESH)
    if is_of_a_mesh and layout.mesh.inner_axes:
        error.add_note(
            "jdp.parallel_apply: inside of a replica the mesh is that of the replica, and a shard_map of the model's "
            "own takes it from there. Leave mesh= out, and name the replica's axes: "
            "jax.shard_map(f, axis_names={...}, in_specs=..., out_specs=...)."
        )
    if (is_of_a_mesh or "shard_map applied to the function" in text_of(error)) and not layout.mesh.inner_axes:
        error.add_note(
            "jdp.parallel_apply: inside of a replica, which is one device, a shard_map of the model's own has nothing "
            "to split. Call the function without shard_map, on the chunk."
        )
    if isinstance(error, NameError) and is_unbound_axis(error):
        error.add_note(
            f"jdp.parallel_apply: {label} runs a collective over another axis; that of the replicas is "
            f"{layout.mesh.axis_name!r}. Pass axis_name= with the name that it uses, or, in a loss, leave the "
            f"collective out: losses and gradients are added up for it."
        )
    if type(error).__name__ == "TraceContextError":
        error.add_note(
            f"jdp.parallel_apply: {label} changes an NNX object that it closes over, as BatchNorm and Dropout do in "
            f"training; replicas can only change objects that are passed to them. Call its eval(), or pass it in the "
            f"batch; inside of jax.vmap or jax.grad, use nnx.vmap or nnx.grad."
        )
    if isinstance(error, TypeError | ValueError) and layout.is_cut and _is_of_rows(text_of(error), sum(layout.sizes)):
        error.add_note(
            f"jdp.parallel_apply: replica {replica} has {layout.sizes[replica]} of the batch's {sum(layout.sizes)} "
            "rows, and a group of rows must not be cut. Pass a batch that gives each replica whole groups, or "
            "jdp.scatter(batch, devices, chunk_sizes=...). If the function makes an array for all rows, pass that "
            "array in the batch, or make it for x.shape[0] rows."
        )
    error.add_note(f"Caught {type(error).__name__} in replica {replica} on device {layout.devices[replica]}.")


def _is_of_rows(text: str, rows: int) -> bool:
    return "cannot reshape" in text or "equal div" in text or "for broadcasting" in text and f"({rows}," in text


def explain_values(error: Exception, who: str) -> None:
    """Adds a note to JAX's error for a traced function, `who`, that asks for the values of an array, or by a mask."""
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        error.add_note(
            f"{who} asks for the value of an array (float(x), x.item(), np.asarray(x), if x, table[x] of a numpy "
            f"table); it is traced, before there are values. Return the arrays themselves, and take float(...) of what "
            f"the call gives; index jnp.asarray(table)."
        )
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        error.add_note(
            f"{who} takes entries by a mask, x[mask]; how many these are is known only when there are values. Multiply "
            f"by the mask: a mean of x[mask] is jdp.Mean((x * mask).sum(), mask.sum()), and in a criterion "
            f"(x * mask).sum() / mask.sum()."
        )


_OF_TWO_MESHES = "Mesh for all inputs", "should match the mesh of sharding"  # JAX's words
_OTHER_MESH = _OF_TWO_MESHES[0], "should match the mesh passed to shard_map"
_NO_AXES = AbstractMesh((), ())

# The meshes of the replicas that this thread traces, one inside of another; None for a replica of one device.
_inside: contextvars.ContextVar[tuple[ReplicaMesh | None, ...]] = contextvars.ContextVar("jdp_replicas", default=())
_lock = threading.Lock()
_threads_inside = 0


@contextlib.contextmanager
def replica_context(mesh: ReplicaMesh | None = None, under_mesh: bool = False) -> Iterator[None]:
    """Traces its body as the code of a replica: sharding constraints name the axes inside of it, and no others.

    A model that was written for a mesh names its axes in `with_sharding_constraint`, in `with_logical_constraint` of
    Flax, and in the boxes of its parameters. Those of the replica itself hold; all others are left out. A replica of
    one device has no axes: it is traced under no mesh, and has nothing to constrain.

    JAX itself traces the inside of a `shard_map` under a mesh of Manual axes. The types of values that `jax.eval_shape`
    gives there have that mesh in them or not, depending on the pass. Programs that compare types (the adjoints of
    equinox and diffrax) take equal ones for different, and fail. Under the empty mesh they run as on one device.
    Collectives over the replicas' axis need nothing but its name, and stay as they are.

    With `under_mesh` JAX's own mesh stays, because the function closes over arrays that lie on a mesh.
    """
    is_grouped = mesh is not None and bool(mesh.inner_axes)
    inside = mesh.inside if mesh and is_grouped else _NO_AXES
    with _left_out(), arrays_on_its_mesh() if under_mesh else jax.sharding.use_abstract_mesh(inside):
        token = _inside.set((*_inside.get(), mesh if is_grouped else None))
        try:
            yield
        finally:
            _inside.reset(token)


def in_replica() -> bool:
    """Returns True while a replica is traced: one of jdp's, or one of a `shard_map` or a `pmap` of the user's."""
    return bool(_inside.get()) or bool(jax.sharding.get_abstract_mesh().manual_axes)


@contextlib.contextmanager
def _left_out() -> Iterator[None]:
    """Replaces `jax.lax.with_sharding_constraint` while any thread traces a replica.

    Nothing in JAX leaves axes out: inside of a `shard_map` a constraint that names an axis of another mesh, or one of
    the `shard_map`, is an error before it becomes part of the program. Flax looks the function up at each call, and so
    do most models; one that was imported by name stays as it is, and JAX's error with it.
    """
    global _threads_inside
    with _lock:
        if not _threads_inside:
            jax.lax.with_sharding_constraint = _constraint
        _threads_inside += 1
    try:
        yield
    finally:
        with _lock:
            _threads_inside -= 1
            if not _threads_inside:
                jax.lax.with_sharding_constraint = _of_jax


_of_jax = jax.lax.with_sharding_constraint


@functools.wraps(_of_jax)
def _constraint(x: Any, shardings: Any, *args: Any, **kwargs: Any) -> Any:
    if not _inside.get():
        return _of_jax(x, shardings, *args, **kwargs)
    mesh = _inside.get()[-1]
    if mesh is None:
        return x

    def within(sharding: Any) -> Any:
        spec = sharding if isinstance(sharding, PartitionSpec) else getattr(sharding, "spec", None)
        return sharding if spec is None else NamedSharding(mesh.inside, mesh.within(spec))

    found = jax.tree.map(within, shardings, is_leaf=lambda x: isinstance(x, PartitionSpec | Sharding))
    # Flax's DenseGeneral first makes its kernel with two axes, but constrains it with names for all its final axes.
    if isinstance(found, NamedSharding) and len(found.spec) > jnp.ndim(x):
        return x
    return _of_jax(x, found, *args, **kwargs)


def _warn_new_values(seen: dict[Any, set[Any]], operands: Sequence[Any], signature: Signature, name: str) -> None:
    """Warns, once, where Python values that differ from call to call compile the same program over and over."""
    layouts = [node for node in signature.layouts if node]
    statics = tuple(leaf for x in layouts for leaf in x.leaves if isinstance(leaf, Static))
    if not statics:
        return
    shapes = tuple((x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in operands)
    shapes = shapes, tuple(type(leaf.value) for leaf in statics)
    values = seen.setdefault((shapes, tuple((x.treedef, x.arrays) for x in layouts)), set())
    if len(values) == _MANY_VALUES:  # it has warned, and keeps no more of the user's values alive
        return
    values.add(statics)
    if len(values) == _MANY_VALUES:
        named = [pair for x in layouts for pair in zip(paths_in(x.treedef), x.leaves, strict=True)]
        paths = [jax.tree_util.keystr(path) for path, leaf in named if isinstance(leaf, Static)]
        first, *others = [i for i, each in enumerate(zip(*values, strict=True)) if len({*each}) > 1]
        more = f" and {len(others)} more" * bool(others)
        warnings.warn(
            f"jdp.{signature.verb}: {name} is compiled for the {_MANY_VALUES}th time for inputs that differ only in "
            f"Python values: {paths[first]} is {repr(statics[first].value)[:80]} now{more}. Each value is part of the "
            f"program. Pass a number that changes between calls as an array, jnp.asarray(value), and leave strings out "
            f"of the batch.",
            UserWarning,
            stacklevel=outside(),
        )


_MANY_VALUES = 4
