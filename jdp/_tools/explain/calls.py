"""Captures the program that a call is about to run, so that `explain` can read it without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..._core.inputs import is_array
from ..._core.layout import Cut, Layout, Stack, Tree
from ..._core.programs import FlatProgram, ReplicaProgram, intercept
from ..._core.replica_mesh import ReplicaMesh, make_mesh, replica_mesh
from ..._core.scattered import Scattered, holds_scattered, is_scattered
from ..._core.shards import cut_axis_of, params_of, shard
from ..._jax.private import compilations
from ..._train.computation import jit_of_state
from ..._train.program import Program
from ..._train.state import TrainState


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a program, with shapes in place of arrays: what is lowered, and what its operands are."""

    label: str
    mesh: ReplicaMesh
    roles: dict[str, Tree]
    batch: tuple[Scattered, ...]
    params: Tree  # the parameters that it gathers, or whose gradients it reduces
    compilations: int | None
    trace: Callable[[], Any]  # `jax.jit(...).trace` of the program
    alone: Callable[[], Call]  # the same call on the primary device alone, with the whole batch
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    of: Any = None  # the function that was called: kept, because its program does not keep it alive

    def compile(self, lowered: Any, kernels: str | None = None) -> Any:
        """Returns the lowered program, compiled as for a call.

        A compiler for absent GPUs may cache its kernels in the file `kernels`, and reuses them for another program
        with the same kernels. The instructions, their order and their memory are compiled each time.
        """
        absent = self.mesh.is_described and self.mesh.devices[0].platform == "gpu"
        if not absent:
            return lowered.compile(compiler_options=self.compiler_options or None)
        # Without a GPU to tune on, XLA's own kernels for matrix products have tiles for small products only, and XLA
        # refuses large ones. The library's kernels take any size, and XLA uses them if its own are off.
        options = {"xla_gpu_enable_triton_gemm": False} | self.compiler_options
        kept = {
            "xla_gpu_enable_llvm_module_compilation_parallelism": True,
            "xla_gpu_kernel_cache_file": kernels,
            "xla_backend_optimization_level": 0,  # the kernels are never run
            "xla_llvm_disable_expensive_passes": True,
        }
        if kernels is not None:
            try:
                return lowered.compile(compiler_options=options | kept)
            except jax.errors.JaxRuntimeError as error:
                if "No such compile option" not in str(error):  # JAX's next version may lack it
                    raise
        return lowered.compile(compiler_options=options)


class Captured(BaseException):
    """Not an error: carries the call out of the functions that were about to run it."""


def capture(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Returns the first call of a jdp program that `fn(*args, **kwargs)` makes; None if it makes none."""
    from flax import nnx

    # jdp takes an NNX module as one object, although JAX sees a tree.
    def is_one(x: Any) -> bool:
        return isinstance(x, nnx.Pytree)

    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_one)
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x) or isinstance(x, jax.ShapeDtypeStruct)}

    # A tracer does not know its array's sharding, so parameters that are cut (in the first argument) are marked here.
    first = len(jax.tree.leaves(args[0], is_leaf=is_one)) if args and _takes_parameters(fn, args[0]) else 0
    cut = {i: (_mesh_of(x), axis) for i, x in arrays.items() if i < first and (axis := own_axis(x)) is not None}

    inside: dict[int, Any] = {}  # the shardings of parameters that are cut inside of a replica, by id of their tracers

    def run(arrays: dict[int, Any]) -> None:
        inside.update({id(x): leaves[i].sharding for i, x in arrays.items() if i < first and lies_inside(leaves[i])})
        arrays |= {i: shard(arrays[i], axis, mesh) for i, (mesh, axis) in cut.items()}
        args, kwargs = jax.tree.unflatten(treedef, [arrays.get(i, x) for i, x in enumerate(leaves)])
        fn(*args, **kwargs)

    def take(program: Any, *operands: Any) -> None:
        if isinstance(program, Program):
            # A step that has seen no state yet: shapes alone say where the parameters would lie.
            if args and isinstance(args[0], TrainState) and not any(program.inner_shardings):
                program.note_shardings(args[0].params, args[0].state)
            raise Captured(step_call(program, *operands))
        raise Captured(replicas_call(program, *operands, inside=inside))

    try:
        with intercept(take, shapes=True):
            jax.eval_shape(run, arrays)
    except Captured as found:
        return found.args[0]
    return None


def _takes_parameters(fn: Callable[..., Any], first: Any) -> bool:
    """Returns True if the first argument of a call holds parameters: of an NNX wrapper or step it is the batch."""
    owner = getattr(fn, "__self__", fn)
    config = getattr(getattr(owner, "_dp", owner), "_config", None)
    if isinstance(first, TrainState) or config is not None and config.kind == "nnx":
        return False
    return not holds_scattered(first)


def own_axis(x: Any) -> int | None:
    """Returns the axis along which an array is cut over all devices of its one-axis mesh; None for anything else."""
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    return cut_axis_of(x, _mesh_of(x)) if mesh is not None and len(mesh.axis_names) == 1 else None


def _mesh_of(x: Any) -> ReplicaMesh:
    """Returns the mesh that an array is cut over, all of whose devices are replicas."""
    return replica_mesh(x.sharding.mesh, x.sharding.mesh.axis_names[0])


def lies_inside(x: Any) -> bool:
    """Returns True if an array is cut over a mesh of several axes."""
    where = getattr(x, "sharding", None)
    return isinstance(where, NamedSharding) and len(where.mesh.axis_names) > 1 and not where.is_fully_replicated


def shape_of(x: Any, where: jax.sharding.Sharding | None) -> Any:
    """Returns a `jax.ShapeDtypeStruct` with sharding `where` for an array; for a `Scattered`, one per array in it."""
    if is_scattered(x):
        return Scattered(list(map(shape_of, x._arrays, x._layout.shardings)), x._layout)
    if not hasattr(x, "dtype"):
        return x  # a number, which is part of the call
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=getattr(x, "weak_type", False))


def spread(s: Scattered, mesh: ReplicaMesh, rows: int | None = None) -> Scattered:
    """Returns the shapes as if scattered over the devices of `mesh`: `rows` on each, or all rows on its only device."""
    layout = s._layout

    def sizes(old: tuple[int, ...]) -> tuple[int, ...]:
        return (sum(old),) if rows is None else (rows,) * mesh.size

    leaves = tuple(Cut(x.axis, sizes(x.sizes)) if isinstance(x, Cut) else x for x in layout.leaves)
    to = Layout(layout.treedef, leaves, sizes(layout.sizes) if layout.is_cut else (1,), mesh, layout.dim, 1)
    arrays = []
    for x, leaf, where in zip(s._arrays, to.arrays, to.shardings, strict=True):
        shape = list(x.shape)
        if isinstance(leaf, Cut):
            shape[leaf.axis] = leaf.padded * mesh.size
        elif isinstance(leaf, Stack):
            shape[0] = mesh.size
        arrays.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=where))
    return Scattered(arrays, to)


def _primary(mesh: ReplicaMesh) -> ReplicaMesh:
    return make_mesh((mesh.own.devices[0],), mesh.axis_name)


def replicas_call(
    program: ReplicaProgram,
    replicas: Tree,
    inputs: Scattered,
    kwargs: Scattered | None,
    inside: Mapping[int, NamedSharding] = {},
) -> Call:
    """Returns the `Call` of `program(replicas, inputs, kwargs)`; `inside` is how parameters lie inside of a replica."""
    mesh = inputs._layout.mesh

    def shape(x: Any) -> Any:
        return shape_of(x, inside.get(id(x), mesh.replicated))

    operands = jax.tree.map(shape, (replicas, inputs, kwargs), is_leaf=is_scattered)
    replicas, *rest = operands

    def alone() -> Call:
        one = _primary(mesh)
        return replicas_call(
            program, *jax.tree.map(lambda x: spread(x, one) if is_scattered(x) else x, operands, is_leaf=is_scattered)
        )

    return Call(
        label=program.__name__,
        mesh=mesh,
        roles={"parameters": replicas},
        batch=tuple(s for s in rest if s is not None),
        params=params_of(replicas),
        compilations=compilations(_jitted_of(program.programs)),
        trace=lambda: program.jitted(*rest).trace(*operands),
        alone=alone,
    )


def step_call(program: Program, state: TrainState, batch: Scattered) -> Call:
    """Returns the `Call` of a step's `program(state, batch)`."""
    mesh, where = program.config.mesh, program.shardings(state)
    shapes = jax.tree.map(lambda to, part: jax.tree.map(lambda x: shape_of(x, to), part), where, state)
    scattered = shape_of(batch, None)

    def alone() -> Call:
        one = _primary(mesh)
        return step_call(program.like(one), shapes, spread(scattered, one))

    return Call(
        label=f"train_step of {program.label}",
        mesh=mesh,
        roles={
            "parameters": shapes.params,
            "gradients": _gradients(program, shapes.params),
            "optimizer": shapes.opt_state,
            "state": (shapes.step, shapes.state, shapes.key),
        },
        batch=(scattered,),
        params=shapes.params,
        compilations=compilations(_jitted_of(program.compiled)),
        trace=lambda: jit_of_state(program, shapes, batch._layout, {}).trace(shapes, scattered._arrays),
        alone=alone,
        compiler_options=program.options_of_compiler(state),
    )


def _gradients(program: Program, params: Tree) -> Tree:
    """Returns shapes of the gradients as the optimizer gets them, or as microbatches or replicas are summed."""
    options, mesh = program.options, program.config.mesh
    several = options.accumulate_steps > 1 or program.config.per_device > 1  # sums are not cut, of >= 32 bits

    def kept(x: Any) -> Any:
        axis = program.axis_rule(x, mesh.size) if options.shard_optimizer and not several else None
        dtype = jnp.promote_types(x.dtype, jnp.float32) if several else x.dtype
        where = x.sharding if mesh.inner_axes else mesh.along(axis)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=where)

    return jax.tree.map(lambda x: kept(x) if hasattr(x, "dtype") else x, params)


def _jitted_of(programs: Any) -> list[Any]:
    """Returns the jitted functions of these programs, which may be in a `FlatProgram` or in a check of processes."""
    runs: list[Any] = [x.run if isinstance(x, FlatProgram) else x for x in programs.values()]
    return [run.__wrapped__ if hasattr(run, "make_ready") else run for run in runs]


@contextlib.contextmanager
def unused_donations(found: list[str]) -> Iterator[None]:
    """Collects the donated arrays of its block that no result can replace, as JAX's warnings name them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if text.startswith("Some donated buffers were not usable"):
            found.append(text.splitlines()[0].partition(": ")[2].rstrip("."))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
