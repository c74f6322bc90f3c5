"""What a training step computes, as a pure function of the state and the batch, and the two forms that JAX compiles."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import NamedSharding

from .._core.global_arrays import put
from .._core.layout import Layout, Shard, Tree, Whole
from .._core.replicate import broadcast
from .._core.scattered import Scattered, children, trim
from .._core.shards import as_shards, axis_for_parameter
from .._jax.pieces import run_over
from .._model.config import Config
from .._model.nnx import Held, with_updates
from .compiler_options import CompilerOptions
from .criterion import gradients_on_replicas
from .gradients import Gradients, Loss, gradients
from .nonfinite import all_finite
from .state import TrainState, first_difference, update
from .state_shardings import InnerShardings, axis_for_optimizer, cut_shardings, gather_whole, like_params
from .step_options import StepOptions
from .terms import finished

Flat = tuple[list[Any], Any]
"""A tree's leaves and its treedef."""
Keep = Callable[[TrainState, list[Any], dict[str, Any], Tree], tuple[Any, dict[str, Any]]]
"""Stores the results of a step: the state, its leaves, the metrics, and the updates of NNX objects in the batch."""


may_trace: contextvars.ContextVar[bool] = contextvars.ContextVar("jdp_may_trace", default=False)
"""True while a step takes the ordinary path, which may trace. In a known step a trace means that something is new."""


class Retraced(Exception):
    """A signal, not an error: JAX would trace the program again, because something about the call is new."""


class Computation:
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
        scatter = (lambda x: axis_for_optimizer(x, n)) if cuts else None
        steps, loss = options.accumulate_steps, loss_of(options.sync_batch_norm)
        self.scanned: set[tuple[tuple[int, ...], int]] | None = None  # (shape, axis) not to cut; None before a batch
        loss = loss._replace(inspect=self._note_scanned) if options.shard_params else loss
        gather = "at once" if options.gather_once else "in the call"
        self.loss, self.call_of = loss, gradients(loss, steps, options.reduce_dtype, scatter)
        self.run = gradients_on_replicas(loss, steps, options.reduce_dtype, scatter, label, gather)
        # As noted last: those of the parameters, of the optimizer's view of them, and of the other state.
        self.inner_shardings: tuple[InnerShardings, ...] = ({}, {}, {})

    def shardings(self, state: TrainState) -> TrainState:
        """Returns the sharding of each part of a state, as a prefix of its tree."""
        everywhere = cast(Any, self.config.mesh.replicated)
        params = opt_state = others = everywhere
        if self.config.mesh.inner_axes:
            params, opt_state, others = self._inside(state)
        if self.options.shard_params:
            params = cut_shardings(state.params, self.config.mesh, self.axis_rule)
        if self.options.shard_optimizer:
            opt_state = cut_shardings(state.opt_state, self.config.mesh, self.axis_rule)
        key = None if state.key is None else everywhere
        return TrainState(step=everywhere, params=params, opt_state=opt_state, state=others, key=key)

    def _inside(self, state: TrainState) -> tuple[Tree, Tree, Tree]:
        """Returns the shardings of parameters, optimizer state and other state over the devices of a replica."""
        mesh = self.config.mesh
        params, of_view, others = self.inner_shardings
        parts = (state.params, params), (state.opt_state, of_view), (state.state, others)
        first, second, third = (like_params(tree, inner, mesh) for tree, inner in parts)
        return first, second, third if others else cast(Any, mesh.replicated)

    def axis_rule(self, x: Any, n: int) -> int | None:
        """Returns the axis to cut a leaf of the state along; with `shard_params`, by the rule for parameters."""
        return axis_for_parameter(x, n, self.scanned or ()) if self.options.shard_params else axis_for_optimizer(x, n)

    def _note_scanned(self, jaxpr: Any, whole: Sequence[Any]) -> None:
        """Notes the shapes of the parameters that the loss's scans iterate over, each with the axis."""
        if self.scanned is not None:
            self.scanned |= {(tuple(whole[i].shape), axis) for i, axis in run_over(jaxpr, len(whole))}

    def find_scanned(self, state: TrainState, batch: Scattered) -> None:
        """Traces the loss on the first batch, to find which parameters its scans iterate over."""
        if self.options.shard_params and self.scanned is None:
            self.scanned = set()
            try:
                jax.eval_shape(self.gradients, state, batch)
            except BaseException:
                self.scanned = None
                raise

    def placed(self, state: TrainState, owned: Callable[[Any, Any], Any] = lambda x, to: x) -> TrainState:
        """Returns the state with each array where it belongs: what `owned(x, to)` returns, moved if it is elsewhere."""

        def place(to: Any, part: Tree) -> Tree:
            return jax.tree.map(lambda x: at(owned(x, to), to), part)

        def at(x: Any, to: Any) -> Any:
            return x if getattr(x, "sharding", None) == to else put(x, to)

        return jax.tree.map(place, self.shardings(state), state)

    def step(self, state: TrainState, batch: Scattered) -> tuple[TrainState, dict[str, Any], Tree]:
        """Computes the new parameters from the old ones and the gradient of the mean over the whole batch."""
        return self.updated(state, batch, self.gradients(state, batch))

    def updated(self, state: TrainState, batch: Scattered, found: Gradients) -> tuple[TrainState, dict[str, Any], Tree]:
        """Returns the state after the step, the metrics, and the updates of NNX objects in the batch."""
        loss, metrics = found.out
        mesh = self.config.mesh
        grads, params = self.view(found.grads), self.view(state.params)
        shard = self.options.shard_optimizer and not self.options.deterministic
        axis = self.axis_rule if shard else None
        before, after, opt_state = update(self.tx, grads, state.opt_state, params, loss, mesh, axis)
        (new_state, updates), count = found.state, state.step + 1
        metrics = {"loss": loss, **metrics}
        if self.options.skip_nonfinite:
            finite = all_finite(grads).all()
            if jax.tree.structure(new_state) != jax.tree.structure(state.state):
                raise ValueError(
                    f"jdp.train_step: the state{first_difference(new_state, state.state)} after a step; a skipped step "
                    f"must leave the tree as it was. Make the variable when the model is made, or leave skip_nonfinite "
                    f"out."
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
            after = gather_whole(after, mesh)
        params = jax.tree.unflatten(jax.tree.structure(state.params), jax.tree.leaves(after))
        return state.replace(step=count, params=params, opt_state=opt_state, state=new_state), metrics, updates

    def operands(self, state: TrainState, batch: Scattered) -> tuple[tuple[Tree, Held], Scattered, Scattered | None]:
        """Returns the operands of the replicas' program: parameters and `Held`, the batch as one argument, the key."""
        rows, given = nodes_of(batch)
        layout, params = rows._layout, state.params
        inputs = Scattered(rows._arrays, layout.of(jax.tree_util.treedef_tuple([layout.treedef]), layout.leaves))
        if self.options.shard_params:
            params = as_shards(params, layout.mesh, self.scanned or ())
        return (params, held_for_loss(state.state, given)), inputs, step_key(state, layout)

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
        """Returns the replicas' results with each term replaced by its value, and each update by the whole state."""
        return found._replace(out=finished(found.out), state=state_and_updates(state.state, found.state))


def step_key(state: TrainState, layout: Layout) -> Scattered | None:
    """Returns the key of this step, as a keyword argument; each replica and microbatch folds it further."""
    if state.key is None:
        return None
    key = jax.random.fold_in(state.key, state.step)
    return Scattered((key,), layout.of(jax.tree.structure({"key": 0}), [Whole()]))


def held_for_loss(state: Tree, given: Held | None) -> Held:
    """Returns the model's state (collections, or `Held` of NNX) with that of the batch's NNX objects (`given`)."""
    if isinstance(state, Mapping):
        return Held(state, None, None) if given is None else Held(state, given.graph, given.variables)
    return state if given is None else state._replace(variables=with_updates(state.variables, given.variables))


def state_and_updates(state: Tree, found: Tree) -> tuple[Tree, Tree]:
    """Splits the state that replicas return: into that of the model, whole, and updates of the batch's objects."""
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
            f"jdp.train_step: {new[0]} of an NNX object in the batch was made in the step; a skipped step must leave "
            f"everything as it was. Make the variable when the object is made, or leave skip_nonfinite out."
        )
    return nnx.from_flat_state([(path, known[path]) for path, _ in nnx.to_flat_state(updates)])


def jit_of_state(computation: Computation, state: TrainState, layout: Layout, options: CompilerOptions) -> Any:
    """Returns the jitted function of `(state, arrays of the batch)`; JAX's errors name the leaves of the state."""

    def train_step(state: TrainState, arrays: tuple[Any, ...]) -> tuple[TrainState, dict[str, Any], Tree]:
        return computation.step(state, Scattered(arrays, layout))

    to = computation.shardings(state)
    return _jit(computation, train_step, (0,), (None, layout.operands), (to, None, to.step), options)


def jit_of_leaves(
    computation: Computation, state: TrainState, treedef: Any, layout: Layout, options: CompilerOptions
) -> Any:
    """Returns the same function of the state's leaves, followed by the batch's arrays; `from_leaves` reads its results.

    The caller has the leaves already, so JAX need not flatten the state again. That would sort the keys of every dict,
    which is most of what a call costs in Python.
    """
    count = treedef.num_leaves

    def train_step(*operands: Any) -> tuple[Any, ...]:
        if not may_trace.get():
            raise Retraced
        state, *more = computation.step(treedef.unflatten(operands[:count]), Scattered(operands[count:], layout))
        parts = (state.step, state.params), state.opt_state, (state.state, state.key)
        return tuple(map(jax.tree.leaves, parts)), *more, jax.tree_util.Partial(jax.tree.structure(state).unflatten)

    where, to = (*[None] * count, *layout.operands), computation.shardings(state)
    first, of_optimizer, last = (
        [to.step, *_sharding_of_each(to.params, state.params)],
        _sharding_of_each(to.opt_state, state.opt_state),
        to.step,
    )
    if to.state is not to.step:  # a tree, because some of it is cut inside of a replica
        last = [*_sharding_of_each(to.state, state.state), *[to.step] * (state.key is not None)]
    out = (first, of_optimizer, last), None, to.step, None
    return _jit(computation, train_step, tuple(range(count)), where, out, options)


def _sharding_of_each(where: Any, tree: Tree) -> list[Any]:
    """Returns the sharding of each leaf of a tree; `where` is one for all, or a tree of them."""
    return [where] * len(jax.tree.leaves(tree)) if isinstance(where, NamedSharding) else jax.tree.leaves(where)


def from_leaves(out: Any) -> tuple[TrainState, list[Any], dict[str, Any], Tree]:
    """Returns the arguments of `Keep`, given the results of a program from `jit_of_leaves`."""
    (first, opt_state, last), metrics, updates, unflatten = out
    leaves = [*first, *opt_state, *last]
    return unflatten(leaves), leaves, metrics, updates


def _jit(
    computation: Computation, fn: Any, donated: tuple[int, ...], where: Any, to: Any, options: CompilerOptions
) -> Any:
    fn.__name__ = fn.__qualname__ = f"train_step_{computation.label}"
    return jax.jit(
        fn,
        donate_argnums=donated if computation.options.donate else (),
        in_shardings=where,
        out_shardings=to,
        compiler_options=options or None,
    )


def with_objects(rows: Scattered, graph: Any, state: Tree, verb: str) -> Scattered:
    """Returns a scattered batch together with its NNX objects, as `Held`; the objects' state is replicated."""
    layout = rows._layout
    state = broadcast(state, layout.mesh, verb)
    arrays = jax.tree.leaves(state)
    tree = Held(jax.tree.unflatten(layout.treedef, [0] * layout.treedef.num_leaves), graph, state)
    leaves = (*layout.leaves, *[Whole()] * len(arrays))
    return Scattered((*rows._arrays, *arrays), layout.of(jax.tree.structure(tree), leaves))


def nodes_of(batch: Scattered) -> tuple[Scattered, Held | None]:
    """Undoes `with_objects`: returns the rows alone, and the `Held` of rows and NNX objects; None without objects."""
    tree = batch._layout.fill(batch._arrays)
    return (children(batch)[0], tree) if isinstance(tree, Held) else (batch, None)
