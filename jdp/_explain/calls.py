"""Takes the program out of a call that is about to run it: for `explain`, which runs none."""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from .._core.devices import are_described, make_mesh, own_mesh
from .._core.layout import Cut, Layout, Stack, Tree, replicated
from .._core.programs import Compiled, Flat, intercept
from .._core.scattered import Scattered, is_scattered
from .._jax.private import compilations
from .._train.program import Program, jit_of_state
from .._train.state import TrainState


class Call(abc.ABC):
    """A call of a program, with shapes in the place of arrays: what is lowered, and what its operands are."""

    def __init__(self, label: str, mesh: Mesh, roles: dict[str, Tree], batch: tuple[Scattered, ...]) -> None:
        self.label, self.mesh, self.roles, self.batch = label, mesh, roles, batch
        self.compilations: int | None = 0
        self.compiler_options: dict[str, Any] = {}

    def compile(self, traced: Any) -> Any:
        """The traced program, compiled as for a call."""
        # Where there is no GPU to try them on, XLA's own kernels for products have tiles for small ones only, and it
        # refuses the large; the library's, which it then plans with, take all.
        absent = {"xla_gpu_enable_triton_gemm": False} if self._is_absent_gpu else {}
        return traced.lower().compile(compiler_options={**absent, **self.compiler_options} or None)

    @property
    def _is_absent_gpu(self) -> bool:
        return are_described(self.mesh) and self.mesh.devices.flat[0].platform == "gpu"

    @property
    def differentiated(self) -> Tree:
        """The parameters whose gradients it reduces, if it does."""
        return self.roles["parameters"]

    @abc.abstractmethod
    def trace(self) -> Any:
        """`jax.jit(...).trace` of the program."""

    @abc.abstractmethod
    def alone(self) -> Call:
        """The same call on the primary device alone, with the whole batch."""


class Captured(BaseException):
    """No error: carries the call out of the functions that were about to run it."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


def capture(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The first call of a program of jdp's that `fn(*args, **kwargs)` comes to; None where it comes to none."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    at = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]

    def run(arrays: list[Any]) -> None:
        filled = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(treedef, filled)
        fn(*args, **kwargs)

    try:
        with intercept(_take, shapes=True):
            jax.eval_shape(run, [leaves[i] for i in at])
    except Captured as found:
        return found.call
    return None


def _take(program: Any, *operands: Any) -> None:
    raise Captured(StepCall(program, *operands) if isinstance(program, Program) else ReplicasCall(program, *operands))


def _is_node(x: Any) -> bool:
    """What is one object for jdp, though JAX sees a tree: NNX modules."""
    from flax import nnx

    return isinstance(x, nnx.Pytree)


def shapes_in(tree: Tree, where: Any) -> Tree:
    """The tree with a `jax.ShapeDtypeStruct` for each array, which lies `where` (a sharding, or a tree of them)."""
    if isinstance(where, jax.sharding.Sharding):
        return jax.tree.map(lambda x: shape_of(x, where), tree)
    return jax.tree.map(shape_of, tree, where)


def shape_of(x: Any, where: Any) -> Any:
    if not isinstance(x, Tracer) and not hasattr(x, "dtype"):
        return x  # a number, which is part of the call
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=getattr(x, "weak_type", False))


def shapes_of_scattered(s: Scattered) -> Scattered:
    return Scattered([shape_of(x, where) for x, where in zip(s._arrays, s._layout.shardings, strict=True)], s._layout)


def on_one_device(s: Scattered) -> Scattered:
    """The shapes of what is scattered, on the primary device alone: as if nobody had cut it."""
    layout, mesh = s._layout, alone(s._layout.mesh)
    rows = (sum(layout.sizes),) if layout.is_cut else layout.sizes
    leaves = tuple(Cut(x.axis, (sum(x.sizes),)) if isinstance(x, Cut) else x for x in layout.leaves)
    return shapes_cut_so(s, Layout(layout.treedef, leaves, rows, mesh, layout.dim))


def shapes_cut_so(s: Scattered, to: Layout) -> Scattered:
    """The shapes of what is scattered, if it were cut as in this layout."""
    arrays = []
    for x, leaf, where in zip(s._arrays, to.arrays, to.shardings, strict=True):
        shape = list(x.shape)
        if isinstance(leaf, Cut):
            shape[leaf.axis] = leaf.padded * to.mesh.size
        elif isinstance(leaf, Stack):
            shape[0] = to.mesh.size
        arrays.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=where))
    return Scattered(arrays, to)


def alone(mesh: Mesh) -> Mesh:
    return make_mesh((own_mesh(mesh).devices.flat[0],), mesh.axis_names[0])


class ReplicasCall(Call):
    """A call of a `Compiled`: `program(replicas, inputs, kwargs)`."""

    def __init__(self, program: Compiled, replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> None:
        self._program, self._mesh = program, inputs._layout.mesh
        place = replicated(self._mesh)
        self._replicas = jax.tree.map(
            lambda x: shapes_of_scattered(x) if is_scattered(x) else shape_of(x, place), replicas, is_leaf=is_scattered
        )
        self._inputs = tuple(None if s is None else shapes_of_scattered(s) for s in (inputs, kwargs))
        batch = tuple(s for s in self._inputs if s is not None)
        super().__init__(program.__name__, self._mesh, {"parameters": self._replicas, "batch": batch}, batch)
        self.compilations = compilations(_jitted_of(program.programs))

    @property
    def differentiated(self) -> Tree:
        # Of value_and_grad: what stands before what is only held. Of others nothing is looked for.
        return self._replicas[0] if isinstance(self._replicas, tuple) and self._replicas else self._replicas

    def trace(self) -> Any:
        return self._program.jitted(*self._inputs).trace(self._replicas, *self._inputs)

    def alone(self) -> Call:
        one = replicated(alone(self._mesh))
        replicas = jax.tree.map(
            lambda x: on_one_device(x) if is_scattered(x) else shape_of(x, one), self._replicas, is_leaf=is_scattered
        )
        inputs, kwargs = (None if s is None else on_one_device(s) for s in self._inputs)
        assert inputs is not None
        return ReplicasCall(self._program, replicas, inputs, kwargs)


def _jitted_of(programs: Any) -> list[Any]:
    """The jitted functions among what is kept by layout: of flat operands, or compared between processes."""
    runs: list[Any] = [x.run if isinstance(x, Flat) else x for x in programs.values()]
    return [run.__wrapped__ if hasattr(run, "make_ready") else run for run in runs]


@contextlib.contextmanager
def unused_donations(found: list[str]) -> Iterator[None]:
    """Collects what JAX warns of in there: donated arrays that no result could take the place of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if text.startswith("Some donated buffers were not usable"):
            found.append(text.splitlines()[0].partition(": ")[2].rstrip("."))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class StepCall(Call):
    """A call of a step's program: `program(state, batch)`."""

    def __init__(self, program: Program, state: TrainState, batch: Scattered) -> None:
        where = program.shardings(state)
        parts = {name: getattr(state, name) for name in ("step", "params", "opt_state", "state", "key")}
        self._program = program
        self._state = TrainState(**{name: shapes_in(part, getattr(where, name)) for name, part in parts.items()})
        shapes = self._state
        scattered = shapes_of_scattered(batch)
        roles = {
            "parameters": shapes.params,
            "optimizer": shapes.opt_state,
            "state": (shapes.step, shapes.state, shapes.key),
            "batch": scattered,
        }
        super().__init__(f"train_step of {program.label}", program.config.mesh, roles, (scattered,))
        self.compiler_options = program.compiler_options(state)
        self.compilations = compilations(_jitted_of(program.compiled))

    def trace(self) -> Any:
        (batch,) = self.batch
        return jit_of_state(self._program, self._state, batch._layout, {}).trace(self._state, batch._arrays)

    def alone(self) -> Call:
        return StepCall(self._program.on(alone(self.mesh)), self._state, on_one_device(self.batch[0]))
