"""The program of a training step: compiled for batches of each layout, and dispatched.

The ordinary path looks at each array of the batch, and at what is around the call (meshes, transformations, `explain`).
A step is known if it gets the state that the last step returned, and a batch of known shapes: then only the trees are
compared, and the program is called at once. JAX compares shapes, dtypes and precisions in any case. If one of these is
new, JAX begins to trace the program again; our function raises `Retraced` in that trace, and the step takes the
ordinary path. If a batch has to be padded, JAX sees the padded arrays only; so the step itself compares the arrays'
shapes before they are padded.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._core.calls import flatten
from .._core.fingerprint import start
from .._core.gather import join
from .._core.global_arrays import sharing
from .._core.inputs import NESTED, is_deep
from .._core.layout import Layout, Tree
from .._core.programs import (
    STEPS_IN_FLIGHT,
    Recent,
    ReplicaProgram,
    are_freed,
    dispatch,
    dispatch_step,
    intercepted,
    is_plain,
    is_watched,
    refuse_freed,
    stepped,
)
from .._core.replica_mesh import ReplicaMesh, forked_from, hides_nonfinite, searches, settings
from .._core.scatter import as_scattered
from .._core.scattered import Scattered, map_scattered, placed
from .._core.unread import Reads, unread
from .._jax.private import trace_state_clean
from .._model.config import Config
from .._processes.coordination import text_of
from .compiler_options import CompilerOptions, compiler_options
from .computation import (
    Computation,
    Flat,
    Keep,
    Retraced,
    from_leaves,
    jit_of_leaves,
    jit_of_state,
    may_trace,
)
from .deterministic import Copies, Deterministic
from .gradients import Loss
from .nonfinite import Nonfinite, flags_on_replicas, report
from .state import TrainState, was_donated
from .state_shardings import inner_shardings_of, on_other_mesh
from .step_options import StepOptions


class Program(Computation):
    """The step, compiled for batches of each layout."""

    def __init__(
        self,
        config: Config,
        loss_of: Callable[[bool], Loss],
        tx: Any,
        view: Callable[[Tree], Tree],
        options: StepOptions,
        label: str,
    ) -> None:
        super().__init__(config, loss_of, tx, view, options, label)
        # BatchNorms are not synchronised here, because a NaN of one replica would reach all others.
        alone, name = loss_of(False), f"find_nonfinite_{label}"
        self.flags = ReplicaProgram(flags_on_replicas(alone, options.accumulate_steps, name))
        self.compiled: Recent[Any, Any] = Recent()
        # The program, the treedefs of state and batch, and how the batch is padded, by the shape of the first array.
        self.known: Recent[Any, Any] = Recent()
        self.shapes: set[tuple[int, ...]] = set()  # of the state's arrays
        self._reads: Reads = {}  # the Python values in batches that the loss has asked for
        self.steps = 0  # dispatched so far; counted with `check_replicas` alone
        self._comparison: Callable[[str], None] | None = None  # of the replicas, which is under way
        self._copies: Copies = {}  # of a deterministic step
        self._donating = threading.RLock()  # held from the last look at a state until it is freed

    def note_shardings(self, params: Tree, others: Tree) -> None:
        """Notes how parameters and other variables are cut inside of a replica; traced ones do not show it."""
        mesh = self.config.mesh
        if mesh.inner_axes and not any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
            found = (
                inner_shardings_of(params, mesh, "params"),
                inner_shardings_of(self.view(params), mesh, "params"),
                inner_shardings_of(others, mesh, "state"),
            )
            if found != self.inner_shardings:
                self.forget()
            self.inner_shardings = found

    def forget(self) -> None:
        """Drops the programs, because they are those of other shapes or shardings."""
        self.compiled.clear()
        self.known.clear()
        self.scanned = None

    def __call__(self, state: TrainState, batch: Scattered, flat: Flat, keep: Keep) -> tuple[Any, dict[str, Any]]:
        """Dispatches one step; `flat` is the flattened state, which the caller has already.

        Returns `keep(state, its leaves, metrics, updates)`; a first Ctrl-C waits until that is done.
        """
        if self.options.shard_params and self.scanned is None:
            self.find_scanned(state, batch)
            state = self.placed(state) if self.scanned else state
            flat = jax.tree.flatten(state)
        intercepted(self, state, batch)
        refuse_freed(batch._arrays, "train_step", lambda _: "an array of the batch")
        if self.options.check_replicas and not trace_state_clean():
            raise ValueError(
                f"jdp.train_step: check_replicas is {self.options.check_replicas}, and the step is called inside of "
                f"jax.jit or the like; it compares values, and there are none while a program is traced. Call the step "
                f"outside of it, or make it with check_replicas=0 and pass the state that comes out to "
                f"dp.check_replicas(state)."
            )
        if self.options.deterministic and not trace_state_clean():
            raise ValueError(
                "jdp.train_step: deterministic is True, and the step is called inside of jax.jit or the like; it is "
                "several programs, which would become one there, and round differently. Call the step outside of it."
            )
        try:
            if self.options.donate:
                state, flat = _unshared(state, flat, batch)
            run = lambda rows: self._prepare_and_dispatch(state, rows, flat, keep)  # noqa: E731
            hides = batch._layout.holds_statics and not self.options.deterministic
            state, metrics = unread(run, batch, self._reads) if hides else run(batch)
        except Exception as error:
            _raise_better(error, state, flat[0])
            raise
        stepped(self, state, metrics)
        if self.options.check_replicas:
            self._compare_replicas(state)
        return state, metrics

    def _prepare_and_dispatch(
        self, state: TrainState, batch: Scattered, flat: Flat, keep: Keep
    ) -> tuple[Any, dict[str, Any]]:
        """Chooses the program for a batch of this layout, compiles it if it is new, and dispatches it."""
        layout, (leaves, treedef) = batch._layout, flat
        one_by_one = self.options.deterministic and len(layout.devices) > 1
        if one_by_one or self.config.mesh.spans_processes:
            program = self._one_by_one(treedef, layout) if one_by_one else self.jitted(state, layout)
            operands = state, placed(batch)._arrays if one_by_one else batch._arrays
            program.make_ready(*operands)  # takes long; a Ctrl-C is not held back here
            run = getattr(program, "__wrapped__", program)  # the processes have compared it by now
            return self.dispatch_program(run, state, leaves, operands, lambda out: keep(*_from_state(out)))
        args = *leaves, *batch._arrays
        token = may_trace.set(True)
        try:
            program = self._jitted_of_leaves(state, layout, treedef, args)
            return self.dispatch_program(program, state, leaves, args, lambda out: keep(*from_leaves(out)))
        finally:
            may_trace.reset(token)

    def dispatch_program(
        self, run: Callable[..., Any], state: TrainState, leaves: Sequence[Any], args: Any, keep: Callable[..., Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Dispatches a program of this step. If several threads donate one state, all but the first get an error."""
        mesh = self.config.mesh
        if not self.options.donate:
            return dispatch_step(run, mesh, args, keep, ())
        with self._donating:
            # On several devices JAX would pass freed arrays on, and may crash; on one it raises an error of its own.
            if len(mesh.all_devices) > 1 and are_freed(leaves):
                raise was_donated(state)
            return dispatch_step(run, mesh, args, keep, leaves)

    def lower(self, state: TrainState, batch: Scattered) -> Any:
        self.find_scanned(state, batch)
        intercepted(self, state, batch)
        return self.jitted(state, batch._layout).lower(state, batch._arrays)

    def _made_once(self, make: Callable[[], Any], *key: Any) -> Any:
        found = self.compiled.used(key)
        if found is None:
            found = self.compiled[key] = make()
        return found

    def jitted(self, state: TrainState, layout: Layout) -> Any:
        """Returns the jitted function of `(state, arrays of the batch)`."""
        traced = not trace_state_clean()  # then JAX accepts compiler options of the outermost jit alone

        def make() -> Any:
            found = jit_of_state(self, state, layout, {} if traced else self.options_of_compiler(state))
            return layout.mesh.same_program(found, ("state", "batch"))

        return self._made_once(make, layout, None, traced)

    def _jitted_of_leaves(self, state: TrainState, layout: Layout, treedef: Any, args: Sequence[Any]) -> Any:
        """Returns the jitted function of the leaves of the state and the arrays of the batch, `args`.

        A program that will run is compiled for them at once, because a Ctrl-C is not held back here.
        """
        traced = not trace_state_clean()

        def make() -> Any:
            found = jit_of_leaves(self, state, treedef, layout, {} if traced else self.options_of_compiler(state))
            self.shapes |= {*map(jnp.shape, args[: treedef.num_leaves])}
            if is_plain():
                found.lower(*args).compile()
            return found

        return self._made_once(make, layout, treedef, traced)

    def _one_by_one(self, treedef: Any, layout: Layout) -> Any:
        """Returns the step as programs for one device each."""

        def make() -> Any:
            found = Deterministic(self, treedef, layout, self._copies)
            return layout.mesh.same_program(found, ("state", "batch"))

        return self._made_once(make, layout, treedef, "one by one")

    def options_of_compiler(self, state: TrainState) -> CompilerOptions:
        if not takes_options(self.config.mesh):
            return {}
        wire = self.options.reduce_dtype
        arrays = [x for x in jax.tree.leaves(state.params) if hasattr(x, "dtype")]  # JAX refuses the rest
        sent = sum(x.size * jnp.dtype(wire or x.dtype).itemsize for x in arrays)
        return compiler_options(self.config.mesh, sent, bool(self.options.shard_params))

    def like(self, mesh: ReplicaMesh | None = None, **changed: Any) -> Program:
        """Returns the same step with these options changed, on the devices of this mesh, or (None) on its own."""
        config = self.config if mesh is None else self.config.on(mesh)
        options = self.options._replace(**changed)
        other = Program(config, self.loss_of, self.tx, self.view, options, self.label)
        if mesh is None:
            other.inner_shardings = self.inner_shardings
        elif mesh.inner_axes:
            other.inner_shardings = tuple(on_other_mesh(inner, mesh) for inner in self.inner_shardings)
        return other

    def _compare_replicas(self, state: TrainState) -> None:
        """Starts to compare the replicas every `check_replicas` steps; raises for a difference found some steps ago."""
        every, mesh = self.options.check_replicas, self.config.mesh
        self.steps += 1
        if self.steps % every == 0:
            self._comparison = start(state, mesh)
        # Not read at once, because that waits for the step. All processes read it at the same step.
        if self._comparison is not None and self.steps % every == min(every - 1, STEPS_IN_FLIGHT):
            finish, self._comparison = self._comparison, None
            finish("train_step")

    def find_nonfinite(self, state: TrainState, batch: Scattered) -> list[Nonfinite]:
        replicas, inputs, key = self.operands(state, batch)
        found = dispatch(self.flags, self.config.mesh, replicas, placed(inputs), key)
        return report(found, self.view(state.params))


def _raise_better(error: Exception, state: TrainState, leaves: Sequence[Any]) -> None:
    """Raises errors of our own for a NaN in a step with `jax_debug_nans`, and for a state that is freed."""
    # To find the operation, JAX runs the program again, with a state that is donated already: it fails, or recurses.
    is_jax = (
        type(error).__name__ == "InternalFloatingPointError" or "deleted" in text_of(error) or hides_nonfinite(error)
    )
    is_found = is_jax or isinstance(error, FloatingPointError | Retraced)
    if is_found and searches():
        raise FloatingPointError(
            "jdp.train_step: something is not finite after the step, and jax_debug_nans or jax_debug_infs is set; the "
            "state that went in is gone if the step donates it. Call step.find_nonfinite(state, batch) with a state "
            "from before, which names the replicas and rows, or make the step with skip_nonfinite=True."
        ) from error
    if "has been deleted" in text_of(error) and are_freed(leaves):
        raise was_donated(state) from error


def _unshared(state: TrainState, flat: Flat, batch: Scattered) -> tuple[TrainState, Flat]:
    """Copies each array of the state that is also in the batch, or its memory: `state.key`, or a table cut by rows.

    An array must not be both donated and an argument: on several CPU devices that ends the process.
    """
    leaves, treedef = flat
    of_jax = [x for x in batch._arrays if type(x) is not np.ndarray]
    held = sharing(leaves, of_jax) if of_jax else set()
    if not held:
        return state, flat
    leaves = [jnp.copy(x) if id(x) in held else x for x in leaves]
    return treedef.unflatten(leaves), (leaves, treedef)


def _from_state(out: Any) -> tuple[TrainState, list[Any], dict[str, Any], Tree]:
    """Returns the arguments of `Keep`, given the results of a program of the state.

    Metrics with an entry per row keep this process's rows only.
    """
    state, metrics, updates = out
    return state, jax.tree.leaves(state), map_scattered(lambda s: join(s, "sharded"), metrics), updates


def takes_options(mesh: ReplicaMesh) -> bool:
    """Returns True if the compiler is told how to combine the gradients that are sent: on several GPUs."""
    return mesh.size > 1 and mesh.devices[0].platform == "gpu"


class LastResults:
    """The last results of a step. Only arrays that a step made may be donated to the next; others are copied first."""

    def __init__(self, donates: bool) -> None:
        self.last: Any = None  # as the user received it
        self.leaves: Sequence[Any] = ()  # of the state
        self._donates = donates
        if donates:
            with _noting:
                _steps.add(self)

    def keep(self, last: Any, leaves: Sequence[Any]) -> None:
        """Remembers the results of a step."""
        if self._donates and self.leaves and not self.leaves[0].is_deleted():
            # A state other than the last went in, so the last is not freed, and can still be passed to a step.
            with _noting:
                _older.update((id(x), x) for x in self.leaves)
        self.last, self.leaves = last, leaves

    def has(self, leaves: Sequence[Any]) -> bool:
        """Returns True if the step returned these leaves last. Every step calls it, so no Python code runs per leaf."""
        return len(leaves) == len(self.leaves) and all(map(operator.is_, leaves, self.leaves))

    def owned(self, donates: bool) -> Callable[[Any, Any], Any]:
        """Returns `owned(x, to)`: x itself if a step has made it there (the first time it comes), else a copy.

        What `owned` returns may be moved and donated. Without `donates` it copies nothing.
        """
        if not (donates and self._donates):
            return lambda x, to: x
        made: set[int] | None = None  # of the arrays that steps have made

        def owned(x: Any, to: Any) -> Any:
            nonlocal made
            if made is None:  # on the first call only: a step on the state that it returned last makes none
                with _noting:
                    made = {id(x) for step in _steps for x in step.leaves}.union(_older)
            if id(x) in made and x.sharding == to:  # what is moved from x may share its memory, and x stays
                made.discard(id(x))  # one array cannot be donated in two places
                return x
            if isinstance(x, np.ndarray):
                return x.copy()  # because JAX may use its memory without a copy
            return jnp.copy(x) if isinstance(x, jax.Array) and not isinstance(x, Tracer) else x

        return owned


_noting = threading.Lock()  # of what follows, which several threads may change and read
_steps: weakref.WeakSet[LastResults] = weakref.WeakSet()
_older: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Arrays, by id, that steps returned before their last results, and that are not donated yet."""


def run_known_step(
    program: Program, state: TrainState, batch: Tree, results: LastResults, keep: Keep
) -> tuple[Any, dict[str, Any]] | None:
    """Dispatches a known step on the state that the last one returned; returns None if anything about it is new."""
    # What `searches` does is written out here, because every known step would pay for the call.
    searches_here = settings.jax_debug_nans or settings.jax_debug_infs
    if forked_from or is_watched() or searches_here or not jax.sharding.get_abstract_mesh().empty:
        return None
    try:
        found = None if type(batch) in NESTED and is_deep(batch) else _known_step(program, state, batch)
    except (TypeError, ValueError, KeyError):  # keys that do not compare, for example
        return None
    if found is None:
        return None
    run, leaves, arrays, key = found
    if not results.has(leaves):
        return None
    of_jax = [x for x in arrays if type(x) is not np.ndarray]
    if of_jax and (any(isinstance(x, Tracer) for x in of_jax) or are_freed(of_jax)):
        return None
    alike = [x for x in of_jax if getattr(x, "shape", None) in program.shapes]
    try:
        if alike and program.options.donate and sharing(leaves, alike):
            return None
        return program.dispatch_program(run, state, leaves, (*leaves, *arrays), lambda out: keep(*from_leaves(out)))
    except Exception as error:
        if isinstance(error, Retraced | TypeError | ValueError) and not any(x.is_deleted() for x in leaves):
            program.known.pop(key, None)
            return None  # the ordinary path raises an error that says what is wrong
        _raise_better(error, state, leaves)
        raise


def _known_step(program: Program, state: TrainState, batch: Tree) -> tuple[Any, list[Any], list[Any], Any] | None:
    """Returns the program of a known step, the leaves of the state, the arrays of the batch, and its key."""
    arrays, of_batch = flatten(batch)
    key = getattr(arrays[0], "shape", None) if arrays else None
    entry = program.known.get(key)
    if entry is None:
        return None
    program.known.move_to_end(key)  # it was used last
    run, of_state, known_batch, padding = entry
    if known_batch != of_batch:
        return None
    if padding is not None:
        layout, types = padding
        if _types(arrays) != types:
            return None
        arrays = list(as_scattered(arrays, layout, place=False)._arrays)
    # Flattens the state and compares its structure in one pass; raises a ValueError if it is another one.
    return run, of_state.flatten_up_to(state), arrays, key


def _types(arrays: Sequence[Any]) -> list[Any]:
    """Returns the type, dtype and shape of each leaf; a leaf that is no array has None for the last two."""
    return [(type(x), getattr(x, "dtype", None), getattr(x, "shape", None)) for x in arrays]


def remember_step(program: Program, of_state: Any, batch: Tree, scattered: Scattered, loss: Any) -> None:
    """Remembers the program that has just run, with the treedefs, if these and the shapes decide how the batch is cut.

    They do if all leaves of the batch are arrays, and scatter has passed them on unchanged or padded them on the host.
    """
    layout, options = scattered._layout, program.options
    run = program.compiled.get((layout, of_state, False))
    if (
        run is None
        or options.check_replicas
        or options.deterministic
        or isinstance(loss, Tracer)
        or layout.mesh.spans_processes
        or takes_options(layout.mesh)
    ):
        return
    arrays, of_batch = flatten(batch)
    given = scattered._arrays
    if not arrays or len(arrays) != len(given):
        return
    if all(x is y for x, y in zip(arrays, given, strict=True)):
        padding = None
    elif {*map(type, arrays), *map(type, given)} == {np.ndarray}:
        padding = layout, _types(arrays)
    else:
        return
    if is_plain():
        program.known[arrays[0].shape] = run, of_state, of_batch, padding
