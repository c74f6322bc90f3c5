"""The program of a training step: the replicas' gradients, their sum, and the optimizer's update, compiled as one."""

from __future__ import annotations

import contextvars
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._core.fingerprint import Check, start
from .._core.gather import join
from .._core.global_arrays import put
from .._core.layout import Layout, Shard, Tree, Whole
from .._core.parallel_apply import on_replicas
from .._core.programs import STEPS_IN_FLIGHT, Compiled, Recent, dispatch, dispatch_step, intercepted, is_plain, stepped
from .._core.replica_mesh import ReplicaMesh, replicated
from .._core.scattered import Scattered, map_scattered, placed, trim
from .._core.shards import as_shards, shard_axis
from .._core.unread import Reads, unread
from .._jax.pieces import run_over
from .._jax.private import trace_state_clean
from .._model.config import Config, nodes_of
from .._model.nnx import Held, with_updates
from .._processes.agree import same_program
from .criterion import gradients_on_replicas, pulled
from .deterministic import Deterministic, OnDevices
from .forms import SeveralTerms
from .gradients import Gradients, Loss, gradients
from .nonfinite import Nonfinite, all_finite, flags, report
from .state import (
    TrainState,
    cut_axis,
    cut_shardings,
    first_difference,
    like_params,
    on_other_mesh,
    places_of,
    update,
    whole,
)
from .step_options import StepOptions
from .terms import finished

Leaves = tuple[list[Any], Any]
"""A tree's leaves and its treedef."""
Keep = Callable[[TrainState, list[Any], dict[str, Any], Tree], tuple[Any, dict[str, Any]]]
"""Stores the results of a step: the state, its leaves, the metrics, and the updates of NNX objects in the batch."""


may_trace: contextvars.ContextVar[bool] = contextvars.ContextVar("jdp_may_trace", default=False)
"""True while a step takes the usual way, which may trace. In a known step a trace means that something is new."""


class Retraced(Exception):
    """A signal, not an error: JAX would trace the program again, because something about the call is new."""


class Program:
    """The step as a pure function, `(state, batch) -> (state, metrics, updates of NNX objects in the batch)`."""

    def __init__(
        self,
        config: Config,
        loss_of: Callable[[bool], Loss],
        tx: Any,
        view: Callable[[Tree], Tree],
        options: StepOptions,
        label: str,
    ) -> None:
        """Takes `loss_of(sync)`, the loss with BatchNorms synchronised or not; the optimizer sees `view(params)`."""
        self.config, self.loss_of, self.tx, self.view = config, loss_of, tx, view
        self.options, self.label = options, label
        n = config.mesh.size
        cuts = options.shard_optimizer and not options.shard_params and not options.deterministic
        scatter = (lambda x: cut_axis(x, n)) if cuts else None
        steps, loss = options.accumulate_steps, loss_of(options.sync_batch_norm)
        self.never: set[tuple[tuple[int, ...], int]] | None = None  # (shape, axis) not to cut; None before a batch
        loss = loss._replace(look=self._look) if options.shard_params else loss
        gather = "at once" if options.gather_once else "in the call"
        self.loss, self.call_of = loss, gradients(loss, steps, options.reduce_dtype, scatter)
        self.run = gradients_on_replicas(loss, steps, options.reduce_dtype, scatter, label, gather)
        # BatchNorms are not synchronised here, because a NaN of one replica would reach all others.
        alone, name = loss_of(False), f"find_nonfinite_{label}"
        self.flags = Compiled(_flags(alone, steps, name))
        self.compiled: Recent[Any, Any] = Recent()
        self.known: Recent[Any, Any] = (
            Recent()
        )  # the program, and the treedefs of state and batch, by the shape of the first array
        self._reads: Reads = {}  # the Python values in batches that the loss has asked for
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()  # the programs among them that XLA has compiled
        self.places: tuple[Any, ...] = ({}, {}, {})  # of what is cut inside of a replica, when the state was seen last
        self.steps = 0  # calls so far
        self.check: Check | None = None  # the comparison under way
        self._on = OnDevices(config.mesh) if options.deterministic else None

    def shardings(self, state: TrainState) -> TrainState:
        """Returns the sharding of each part of a state, as a prefix of its tree."""
        everywhere = cast(Any, replicated(self.config.mesh))
        params = opt_state = others = everywhere
        if self.config.mesh.inner_axes:
            params, opt_state, others = self._inside(state)
        if self.options.shard_params:
            params = cut_shardings(state.params, self.config.mesh, self.axis)
        if self.options.shard_optimizer:
            opt_state = cut_shardings(state.opt_state, self.config.mesh, self.axis)
        key = None if state.key is None else everywhere
        return TrainState(step=everywhere, params=params, opt_state=opt_state, state=others, key=key)

    def _inside(self, state: TrainState) -> tuple[Tree, Tree, Tree]:
        """Returns the shardings of parameters, optimizer state and other state over the devices of a replica."""
        mesh = self.config.mesh
        params, of_view, others = self.places
        parts = (state.params, params), (state.opt_state, of_view), (state.state, others)
        first, second, third = (like_params(tree, places, mesh) for tree, places in parts)
        return first, second, third if others else cast(Any, replicated(mesh))

    def see(self, params: Tree, others: Tree) -> None:
        """Takes note of where the variables lie that are cut inside of a replica; traced ones do not tell."""
        mesh = self.config.mesh
        if mesh.inner_axes and not any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
            found = (
                places_of(params, mesh, "params"),
                places_of(self.view(params), mesh, "params"),
                places_of(others, mesh, "state"),
            )
            if found != self.places:
                self.forget()
            self.places = found

    def forget(self) -> None:
        """Drops the programs, because they are those of other shapes or places."""
        self.compiled.clear()
        self.known.clear()

    def axis(self, x: Any, n: int) -> int | None:
        """Returns the axis that a leaf is cut along over n devices; optimizer state is cut as its parameters are."""
        return shard_axis(x, n, self.never or ()) if self.options.shard_params else cut_axis(x, n)

    def _look(self, jaxpr: Any, whole: Sequence[Any]) -> None:
        """Records the shapes of the parameters that the loss's scans iterate over, each with the axis."""
        if self.never is not None:
            self.never |= {(tuple(whole[i].shape), axis) for i, axis in run_over(jaxpr, len(whole))}

    def learn(self, state: TrainState, batch: Scattered) -> None:
        """Traces the loss on the first batch, to find which parameters its scans iterate over."""
        if self.options.shard_params and self.never is None:
            self.never = set()
            try:
                jax.eval_shape(self.gradients, state, batch)
            except BaseException:
                self.never = None
                raise

    def placed(self, state: TrainState, owned: Callable[[Any], Any] = lambda x: x) -> TrainState:
        """Puts the state's arrays, after `owned`, where they belong; one that is there already stays the same array."""

        def place(to: Any, part: Tree) -> Tree:
            return jax.tree.map(lambda x: at(owned(x), to), part)

        def at(x: Any, to: Any) -> Any:
            return x if getattr(x, "sharding", None) == to else put(x, to)

        return jax.tree.map(place, self.shardings(state), state)

    def __call__(self, state: TrainState, batch: Scattered, flat: Leaves, keep: Keep) -> tuple[Any, dict[str, Any]]:
        """Dispatches one step; `flat` is the flattened state, which the caller has already.

        It returns what `keep` makes of `(state, its leaves, metrics, updates)`; a first Ctrl-C waits until then.
        """
        if self.options.shard_params and self.never is None:
            self.learn(state, batch)
            state = self.placed(state) if self.never else state
            flat = jax.tree.flatten(state)
        intercepted(self, state, batch)
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
                "several programs, which would become one there and be rounded in other ways. Call the step outside of "
                "it."
            )
        if self.options.donate:
            state, flat = _unshared(state, flat, batch)
        try:
            run = lambda rows: self._dispatched(state, rows, flat, keep)  # noqa: E731
            hides = batch._layout.holds_statics and not self.options.deterministic
            state, metrics = unread(run, batch, self._reads) if hides else run(batch)
        except Exception as error:
            raise_nonfinite(error)
            raise
        stepped(self, state, metrics)
        if self.options.check_replicas:
            self._compare_replicas(state)
        return state, metrics

    def _dispatched(self, state: TrainState, batch: Scattered, flat: Leaves, keep: Keep) -> tuple[Any, dict[str, Any]]:
        layout, mesh = batch._layout, self.config.mesh
        named = state, batch._arrays
        leaves, treedef = flat
        if self.options.deterministic and len(layout.devices) > 1:
            named = state, placed(batch)._arrays
            program = self._one_by_one(treedef, layout)
        elif mesh.spans_processes:
            program = self.of(state, layout)
        else:
            program = None
        if program is not None:
            program.make_ready(*named)  # takes long; a Ctrl-C is not held back here
            run = getattr(program, "__wrapped__", program)
            return dispatch_step(run, mesh, named, lambda out: keep(*of_state(_with_own_rows(out))))
        args = *leaves, *batch._arrays
        token = may_trace.set(True)
        try:
            program = self.of(state, layout, treedef)
            if program not in self._compiled and is_plain():
                program.lower(*args).compile()  # takes long, too
                self._compiled.add(program)
            return dispatch_step(program, mesh, args, lambda out: keep(*of_leaves(out)))
        except (TypeError, ValueError) as error:
            if "operands[" not in str(error):
                raise
        finally:
            may_trace.reset(token)
        # JAX has refused an argument by a name such as operands[3]. This program gives it the name in the state.
        return dispatch_step(self.of(state, layout), mesh, named, lambda out: keep(*of_state(out)))

    def lower(self, state: TrainState, batch: Scattered) -> Any:
        self.learn(state, batch)
        intercepted(self, state, batch)
        return self.of(state, batch._layout).lower(state, batch._arrays)

    def of(self, state: TrainState, layout: Layout, treedef: Any = None) -> Any:
        """Returns the jitted function of `(state, arrays of the batch)`; with a treedef, of the leaves of both."""
        # Inside of another jit, JAX refuses compiler options: only the outer jit may have them.
        traced = takes_options(self.config.mesh) and not trace_state_clean()
        key = layout, treedef, traced
        found = self.compiled.used(key)
        if found is None:
            options = {} if traced else self.compiler_options(state)
            if treedef is not None:
                found = jit_of_leaves(self, state, treedef, layout, options)
            else:
                found = jit_of_state(self, state, layout, options)
                if layout.mesh.spans_processes:
                    found = same_program(found, layout.mesh.all_devices, ("state", "batch"))
            self.compiled[key] = found
        return found

    def _one_by_one(self, treedef: Any, layout: Layout) -> Any:
        """Returns the step as programs for one device each."""
        key = layout, treedef, "one by one"
        found = self.compiled.used(key)
        if found is None:
            found = Deterministic(self, treedef, layout, cast(OnDevices, self._on))
            if layout.mesh.spans_processes:
                found = same_program(found, layout.mesh.all_devices, ("state", "batch"))
            self.compiled[key] = found
        return found

    def compiler_options(self, state: TrainState) -> CompilerOptions:
        wire = self.options.reduce_dtype
        arrays = [x for x in jax.tree.leaves(state.params) if hasattr(x, "dtype")]  # JAX refuses the rest
        sent = sum(x.size * jnp.dtype(wire or x.dtype).itemsize for x in arrays)
        return compiler_options(self.config.mesh, sent, bool(self.options.shard_params))

    def on(self, mesh: ReplicaMesh, **changed: Any) -> Program:
        """Returns the same step on other devices, with these options changed."""
        options = self.options._replace(**changed)
        other = Program(self.config.on(mesh), self.loss_of, self.tx, self.view, options, self.label)
        if mesh.inner_axes:
            other.places = tuple(on_other_mesh(places, mesh) for places in self.places)
        return other

    def like(self, **changed: Any) -> Program:
        """Returns the same step on the same devices, with these options changed."""
        options = self.options._replace(**changed)
        other = Program(self.config, self.loss_of, self.tx, self.view, options, self.label)
        other.places = self.places
        return other

    @staticmethod
    def view_of_state(state: Tree) -> Tree:
        """Returns the inexact arrays of the state that the loss updates, by path: no counts, no keys."""
        tree = state if isinstance(state, Mapping) else nnx.as_pure(state.variables)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): x for path, x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)}

    def step(self, state: TrainState, batch: Scattered) -> tuple[TrainState, dict[str, Any], Tree]:
        """Computes the new parameters from the old ones and the gradient of the mean over the whole batch."""
        return self.updated(state, batch, self.gradients(state, batch))

    def updated(self, state: TrainState, batch: Scattered, found: Gradients) -> tuple[TrainState, dict[str, Any], Tree]:
        """Returns the state after the step, the metrics, and the updates of NNX objects in the batch."""
        loss, metrics = found.out
        mesh = self.config.mesh
        grads, params = self.view(found.grads), self.view(state.params)
        shard = self.options.shard_optimizer and not self.options.deterministic
        axis = self.axis if shard else None
        before, after, opt_state = update(self.tx, grads, state.opt_state, params, loss, mesh, axis)
        (new_state, updates), count = found.state, state.step + 1
        metrics = {"loss": loss, **metrics}
        if self.options.skip_nonfinite:
            finite = all_finite(grads).all()
            if jax.tree.structure(new_state) != jax.tree.structure(state.state):
                raise ValueError(
                    f"jdp.train_step: the state{first_difference(new_state, state.state)} after a step; a skipped one "
                    f"leaves one tree as it was. Make the variable when the model is made, or leave skip_nonfinite out."
                )

            def choose(new: Tree, old: Tree) -> Tree:
                return jax.tree.map(lambda a, b: a if a is b else jax.lax.select(finite, a, b), new, old)

            after, opt_state = choose(after, before), choose(opt_state, state.opt_state)
            new_state, count = choose(new_state, state.state), choose(count, state.step)
            updates = choose(updates, _before(updates, batch))
            if axis:  # otherwise the compiler gathers both before it chooses
                after = jax.lax.with_sharding_constraint(after, cut_shardings(after, mesh, axis))
            metrics["skipped"] = ~finite
        if shard and not self.options.shard_params:
            after = whole(after, mesh)
        params = jax.tree.unflatten(jax.tree.structure(state.params), jax.tree.leaves(after))
        return state.replace(step=count, params=params, opt_state=opt_state, state=new_state), metrics, updates

    def _compare_replicas(self, state: TrainState) -> None:
        """Starts to compare the replicas every `check_replicas` steps; raises for a difference found some steps ago."""
        every, mesh = self.options.check_replicas, self.config.mesh
        self.steps += 1
        if self.steps % every == 0:
            self.check = start(state, mesh)
        # Not read at once, because that waits for the step. All processes read it at the same step.
        if self.check is not None and self.steps % every == min(every - 1, STEPS_IN_FLIGHT):
            check, self.check = self.check, None
            check.result("train_step")

    def find_nonfinite(self, state: TrainState, batch: Scattered) -> list[Nonfinite]:
        replicas, inputs, key = self.operands(state, batch)
        found = dispatch(self.flags, self.config.mesh, replicas, placed(inputs), key)
        return report(found, self.view(state.params))

    def operands(self, state: TrainState, batch: Scattered) -> tuple[tuple[Tree, Held], Scattered, Scattered | None]:
        """Returns the operands of the replicas' program: parameters and `Held`, the batch as one argument, the key."""
        rows, given = nodes_of(batch)
        layout, params = rows._layout, state.params
        inputs = Scattered(rows._arrays, layout.of(jax.tree_util.treedef_tuple([layout.treedef]), layout.leaves))
        if self.options.shard_params:
            params = as_shards(params, layout.mesh, self.never or ())
        return (params, entered(state.state, given)), inputs, step_key(state, layout)

    def gradients(self, state: TrainState, batch: Scattered) -> Gradients:
        outputs = self.run(*self.operands(state, batch))
        layout = outputs._layout
        found: Gradients = layout.fill(trim(outputs))
        if layout.mesh.spans_processes:
            # Metrics with an entry per row stay scattered: each process takes its own rows after the program has run.
            arrays = [
                x if isinstance(leaf, Whole | Shard) else Scattered((x,), one)
                for x, leaf, one in zip(outputs._arrays, layout.arrays, layout.each, strict=True)
            ]
            found = found._replace(out=layout.fill(arrays).out)
        return self.read(state, found)

    def read(self, state: TrainState, found: Gradients) -> Gradients:
        """Returns what the replicas found, with the values of all terms and the whole state after the step."""
        return found._replace(out=finished(found.out), state=left(state.state, found.state))


def raise_nonfinite(error: Exception) -> None:
    """Raises a `FloatingPointError` for the errors that JAX raises for a NaN in a step with `jax_debug_nans`."""
    settings: Any = jax.config
    if not (settings.jax_debug_nans or settings.jax_debug_infs):
        return
    # To find the operation, JAX runs the program again, with a state that is donated already: it fails, or recurses.
    is_jax = type(error).__name__ == "InternalFloatingPointError"
    if is_jax or isinstance(error, FloatingPointError | RecursionError | Retraced) or "deleted" in str(error):
        raise FloatingPointError(
            "jdp.train_step: something is not finite after the step, and jax_debug_nans or jax_debug_infs is set; the "
            "state that went in is gone if the step donates it. Call step.find_nonfinite(state, batch) with a state "
            "from before, which names the replicas and rows, or make the step with skip_nonfinite=True."
        ) from error


def _flags(loss: Loss, steps: int, name: str) -> Any:
    """Returns a function that finds for each replica and each row whether the gradient is finite."""
    once = on_replicas(flags(loss, steps), name)
    several = pulled(flags(loss._replace(pulls=True), steps), loss, steps, name)

    def run(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        if loss.criterion is None:
            try:
                return once(replicas, inputs, kwargs)
            except SeveralTerms:
                pass
        return several(replicas, inputs, kwargs)

    run.__name__ = run.__qualname__ = name
    return run


def _unshared(state: TrainState, flat: Leaves, batch: Scattered) -> tuple[TrainState, Leaves]:
    """Copies each array of the state that is also in the batch: `state.key`, or a table that is cut by rows as well.

    An array must not be both donated and an argument: on several CPU devices that ends the process.
    """
    held = set(map(id, batch._arrays))
    leaves, treedef = flat
    if held.isdisjoint(map(id, leaves)):
        return state, flat
    leaves = [jnp.copy(x) if id(x) in held else x for x in leaves]
    return treedef.unflatten(leaves), (leaves, treedef)


def step_key(state: TrainState, layout: Layout) -> Scattered | None:
    """Returns the key of this step, as a keyword argument; each replica and microbatch folds it further."""
    if state.key is None:
        return None
    key = jax.random.fold_in(state.key, state.step)
    return Scattered((key,), layout.of(jax.tree.structure({"key": 0}), [Whole()]))


def entered(state: Tree, given: Held | None) -> Held:
    """Returns the state together with that of the NNX objects in the batch."""
    if isinstance(state, Mapping):
        return Held(state, None, None) if given is None else Held(state, given.graph, given.variables)
    return state if given is None else state._replace(variables=with_updates(state.variables, given.variables))


def left(state: Tree, found: Tree) -> tuple[Tree, Tree]:
    """Returns the state with the changes of the step, and the changes of the NNX objects in the batch."""
    if isinstance(state, Mapping):
        return found
    mine, updates = of_model(found)
    return state._replace(variables=with_updates(state.variables, mine)), updates


def of_model(state: Tree) -> tuple[Tree, Tree]:
    """Splits the state of several NNX objects into that of the first, the model, and that of the others."""
    flat = nnx.to_flat_state(state)
    first, others = ([(path, v) for path, v in flat if (path[0] == 0) is mine] for mine in (True, False))
    return nnx.from_flat_state(first), nnx.from_flat_state(others)


def _before(updates: Tree, batch: Scattered) -> Tree:
    """Returns the values before the step of the variables in `updates`, which belong to NNX objects in the batch."""
    _, given = nodes_of(batch)
    if given is None:
        return updates  # there are none
    known = dict(nnx.to_flat_state(given.variables))
    new = [".".join(map(str, path[1:])) for path, _ in nnx.to_flat_state(updates) if path not in known]
    if new:
        raise ValueError(
            f"jdp.train_step: {new[0]} of an NNX object in the batch was made in the step; a skipped one leaves all as "
            f"it was. Make the variable when the object is made, or leave skip_nonfinite out."
        )
    return nnx.from_flat_state([(path, known[path]) for path, _ in nnx.to_flat_state(updates)])


def jit_of_state(program: Any, state: TrainState, layout: Layout, options: CompilerOptions) -> Any:
    """Returns the jitted function of `(state, arrays of the batch)`; JAX's errors name the leaves of the state."""

    def train_step(state: TrainState, arrays: tuple[Any, ...]) -> tuple[TrainState, dict[str, Any], Tree]:
        return program.step(state, Scattered(arrays, layout))

    to = program.shardings(state)
    return _jit(program, train_step, (0,), (None, layout.shardings), (to, None, to.step), options)


def jit_of_leaves(program: Any, state: TrainState, treedef: Any, layout: Layout, options: CompilerOptions) -> Any:
    """Returns the same function of the state's leaves, followed by the batch's arrays; `of_leaves` reads its results.

    The caller has the leaves already, so JAX need not flatten the state again. That would sort the keys of every dict,
    which is most of what a call costs in Python.
    """
    count = treedef.num_leaves

    def train_step(*operands: Any) -> tuple[Any, ...]:
        if not may_trace.get():
            raise Retraced
        state, *more = program.step(treedef.unflatten(operands[:count]), Scattered(operands[count:], layout))
        parts = (state.step, state.params), state.opt_state, (state.state, state.key)
        return tuple(map(jax.tree.leaves, parts)), *more, jax.tree_util.Partial(jax.tree.structure(state).unflatten)

    where, to = (*[None] * count, *layout.shardings), program.shardings(state)
    first, cut, last = (
        [to.step, *_sharding_of_each(to.params, state.params)],
        _sharding_of_each(to.opt_state, state.opt_state),
        to.step,
    )
    if to.state is not to.step:
        last = [*_sharding_of_each(to.state, state.state), *[to.step] * (state.key is not None)]
    out = (first, cut, last), None, to.step, None
    return _jit(program, train_step, tuple(range(count)), where, out, options)


def _sharding_of_each(where: Any, tree: Tree) -> list[Any]:
    """Returns the sharding of each leaf of a tree; `where` is one for all, or a tree of them."""
    return [where] * len(jax.tree.leaves(tree)) if isinstance(where, NamedSharding) else jax.tree.leaves(where)


def of_leaves(out: Any) -> tuple[TrainState, list[Any], dict[str, Any], Tree]:
    """Returns the arguments of `Keep`, from the results of a program of leaves."""
    (first, opt_state, last), metrics, updates, unflatten = out
    leaves = [*first, *opt_state, *last]
    return unflatten(leaves), leaves, metrics, updates


def _with_own_rows(out: Any) -> Any:
    """Returns the results of a program of the state; metrics with an entry per row keep this process's rows only."""
    state, metrics, updates = out
    return state, map_scattered(lambda s: join(s, "sharded"), metrics), updates


def of_state(out: Any) -> tuple[TrainState, list[Any], dict[str, Any], Tree]:
    """Returns the arguments of `Keep`, from the results of a program of the state."""
    state, metrics, updates = out
    return state, jax.tree.leaves(state), metrics, updates


def _jit(program: Any, fn: Any, donated: tuple[int, ...], where: Any, to: Any, options: CompilerOptions) -> Any:
    fn.__name__ = fn.__qualname__ = f"train_step_{program.label}"
    return jax.jit(
        fn,
        donate_argnums=donated if program.options.donate else (),
        in_shardings=where,
        out_shardings=to,
        compiler_options=options or None,
    )


CompilerOptions = dict[str, bool | int]
# Limits of the bytes that are sent together, a seventh of the gradients. The last of them are sent when nothing is left
# to compute, so they should be few. With less, starting would take longer than sending; the most is XLA's own default.
_LEAST, _MOST = 13 << 20, 30 << 20


def compiler_options(mesh: ReplicaMesh, sent: int, gathers: bool = False) -> CompilerOptions:
    """Returns the `compiler_options` of `jax.jit` for a step on these devices that sends `sent` bytes of gradients.

    With `gathers` the step gathers its parameters as it uses them.

    Options that the user has set in `XLA_FLAGS` are left out; all are, if the compiler does not know one of the others.
    On TPUs XLA's defaults are kept. `benchmarks/overlap.py` measures the gain; `--options` is for other options.
    """
    if not takes_options(mesh):
        return {}
    said = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in wanted(mesh.size, sent, gathers).items() if name not in said}
    return options if _known(mesh, tuple(options.items())) else {}


def takes_options(mesh: ReplicaMesh) -> bool:
    return mesh.size > 1 and mesh.devices[0].platform == "gpu"


def wanted(n: int, sent: int, gathers: bool = False) -> CompilerOptions:
    """Returns the options for n GPUs."""
    bucket = min(max(sent // 7, _LEAST), _MOST)
    # XLA combines gathers across the pieces that jdp has made: those of a small model all into one.
    once = {"xla_gpu_all_gather_combine_threshold_bytes": bucket} if gathers else {}
    return once | {
        "xla_gpu_all_reduce_combine_threshold_bytes": bucket,
        # XLA counts the bytes that come out of a reduce-scatter, 1/n of those that go in. With the same threshold it
        # would wait for n times as many, which are all gradients of most models.
        "xla_gpu_reduce_scatter_combine_threshold_bytes": bucket // n,
    }


@functools.cache
def _known(mesh: ReplicaMesh, options: tuple[tuple[str, bool | int], ...]) -> bool:
    """Returns True if the compiler knows these options; XLA refuses a program if it does not know one of them."""
    probe = jax.jit(lambda: 0, out_shardings=replicated(mesh), compiler_options=dict(options))
    try:
        probe.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise  # out of memory, for example: that says nothing about the options, and is not cached
        return False
    return True
