"""A step with the same bits on any number of devices: programs for one device each, and one that adds their sums.

All additions and roundings, except sums of two values, run in programs for one device. These are the same for any
number of devices. A program for several devices would be compiled differently, and round differently.
"""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .._core.balanced_sum import (
    Parts,
    Segment,
    add_replica,
    chunks_of,
    exchange,
    numbers_of_rows,
    one_replica,
    put_together,
    segments,
    shape_of,
)
from .._core.layout import LEAF, Cut, Layout, Leaf, Stack, Tree, Whole
from .._core.outputs import Outputs
from .._core.parallel_apply import CallOf
from .._core.replica_mesh import make_mesh
from .._core.scattered import Scattered, unpadded
from .computation import Computation
from .criterion import Passes, padded, with_last
from .criterion import forward as forward_of
from .forms import SeveralTerms
from .gradients import gradients, has_cotangent
from .state import TrainState
from .terms import finished

Copies = dict[int, tuple[Any, Sequence[Any]]]
"""The arrays of the state that the last step made, by id, each with its copies on this process's devices."""


class TurnPrograms(NamedTuple):
    """The programs that a replica runs in its turn, one after the other; between two of them replicas exchange sums."""

    segments: list[Segment]
    parts: Parts  # the shapes of its results
    out: Outputs  # the outputs, without values; `put_together` needs their rules
    programs: list[list[Any]] = []  # for each segment, one for each device
    pick_own: Any = None  # picks one replica's cotangents out of those of all replicas


_traces: list[None] = []


@jax.jit
def _configuration() -> list[None]:
    """Returns a list whose length identifies JAX's configuration, because jit traces this once for each of them."""
    _traces.append(None)
    return [*_traces]


def _shape_key(operands: Any) -> Any:
    shapes = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(operands)]
    return len(_configuration()), *shapes


def _on_device(shapes: Any, device: Any) -> Any:
    """Returns the shapes, placed on this device."""
    to = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to, weak_type=x.weak_type), shapes)


class Deterministic:
    """The step for batches of one layout: `(state, arrays)` to `(state, metrics, updates of NNX objects)`."""

    def __init__(self, step: Computation, treedef: Any, layout: Layout, copies: Copies) -> None:
        """Takes `copies`, which the programs of all layouts share: with them no step splits the last state again."""
        self.__name__ = f"train_step_{step.label}"
        self._step, self._layout, self._copies = step, layout, copies
        self._devices: list[Any] = list(layout.mesh.own.devices)
        # By JAX's configuration and the shapes of the operands: the turns, the programs of a loss of all rows, those of
        # the update, and two treedefs of its results (the state; the metrics with the updates of NNX objects). A loss
        # of all rows runs between two turns; otherwise there is one turn. Each device has a program of each kind.
        self._compiled: dict[Any, tuple[list[TurnPrograms], list[Any], list[Any], list[Any]]] = {}
        one = make_mesh((self._devices[0],), layout.mesh.axis_name)
        # All replicas on one device: each replica is traced with this layout, on whatever device it runs.
        self._alone = Layout(layout.treedef, layout.leaves, layout.sizes, one, layout.dim, len(layout.devices))
        self._treedef = treedef

        def join(rows: list[list[Any]], axes: tuple[int, ...]) -> list[Any]:
            return [jnp.concatenate(x, axis) for axis, *x in zip(axes, *rows, strict=True)]

        self._join: Any = jax.jit(join, static_argnums=1)
        axes = [leaf.axis for leaf in layout.arrays]
        self._pick: Any = jax.jit(lambda arrays, number: chunks_of(arrays, axes, layout.per_device, number))
        self._gather: Any = jax.jit(lambda arrays: arrays, out_shardings=layout.mesh.replicated)
        on_device, self._turn_of_primary = layout.primary
        self._exchange: Any = exchange(layout.mesh, on_device)
        own = np.reshape(np.array(layout.own, np.int32), (-1, layout.per_device))
        self._indices = [jax.device_put([*mine], device) for mine, device in zip(own, self._devices, strict=True)]
        self._numbers = [jax.device_put([*np.arange(layout.per_device)], device) for device in self._devices]

    def __call__(self, state: TrainState, arrays: Sequence[Any]) -> tuple[TrainState, dict[str, Any], Tree]:
        states, batches = self._split_by_device(state, arrays)
        key = _shape_key((states[0], batches[0]))
        if key not in self._compiled:
            self.lower(state, arrays).compile()
        turns, loss_programs, updates, (of_state, of_others) = self._compiled[key]
        from_all_rows: list[Any] = [None] * len(states)  # the loss and the metrics, if a criterion returns them
        cotangents: list[list[Any]] = [[] for _ in states]
        if loss_programs:
            forward, _ = turns
            first = self._turns(forward, states, batches, cotangents)
            sums, _ = self._exchanged([x.sums for x in first], [[] for _ in first])
            rows, whole = self._gathered(forward.out, first, arrays)
            operands = zip(loss_programs, states, whole, rows, sums, strict=True)
            found = [loss_program(*of_device) for loss_program, *of_device in operands]
            cotangents = [x for _, x in found]
            from_all_rows = [x for x, _ in found] if self._step.loss.criterion else from_all_rows
        parts = self._turns(turns[-1], states, batches, cotangents)
        sums, of_primary = self._exchanged([x.sums for x in parts], [x.of_primary for x in parts])
        found = [x._replace(sums=s, of_primary=t, rows=[]) for x, s, t in zip(parts, sums, of_primary, strict=True)]
        operands = zip(updates, states, map(self._without_rows, batches), found, from_all_rows, strict=True)
        after, others = zip(*[update(*of_device) for update, *of_device in operands], strict=True)
        leaves = self._assembled(after, [None] * len(after[0]))
        self._copies.clear()
        if not self._step.options.shard_optimizer:
            self._copies.update((id(x), (x, copies)) for x, *copies in zip(leaves, *after, strict=True))
        state = of_state.unflatten(leaves)
        metrics, changed = of_others.unflatten(self._assembled(others, [None] * len(others[0])))
        if self._step.options.shard_optimizer:  # its state was gathered for the update, and is cut again
            state = self._step.placed(state)
        return state, self._with_rows(metrics, parts, turns[-1].out), changed

    def _split_by_device(self, state: TrainState, arrays: Sequence[Any]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns, for each device, the replicated leaves of the state and the device's part of the batch."""
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise ValueError(
                "jdp.train_step: deterministic is True under jax_disable_jit; it runs programs that are compiled for "
                "one device each, and none are compiled then. Leave jax_disable_jit or deterministic out."
            )
        leaves = jax.tree.leaves(state)
        if not all(x.is_fully_replicated for x in leaves):  # the optimizer's state is cut over the devices
            leaves = self._gather(leaves)
        return self._by_device(leaves), self._by_device(arrays)

    def _by_device(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Returns the parts of the arrays on each of this process's devices: a list for each device."""
        parts = [*map(self._parts_of, arrays)]
        return [[x[i] for x in parts] for i in range(len(self._devices))]

    def _parts_of(self, x: Any) -> Sequence[Any]:
        """Returns the parts of an array on this process's devices, in their order."""
        known = self._copies.get(id(x))
        if known is not None and known[0] is x:
            return known[1]
        found = {shard.device: shard.data for shard in x.addressable_shards}
        return [found[device] for device in self._devices]

    def _assembled(self, each: Sequence[Sequence[Any]], axes: Sequence[int | None]) -> list[Any]:
        """Returns arrays over all devices, assembled from the parts on each, along these axes (None: of copies)."""
        arrays, mesh = [], self._layout.mesh
        for parts, axis in zip(map(list, zip(*each, strict=True)), axes, strict=True):
            shape = tuple(n * mesh.size if i == axis else n for i, n in enumerate(parts[0].shape))
            arrays.append(jax.make_array_from_single_device_arrays(shape, mesh.along(axis), parts))
        return arrays

    def _gathered(self, out: Outputs, parts: list[Parts], batch: Sequence[Any]) -> tuple[list[list[Any]], ...]:
        """Returns, for each device, the gathered outputs of all replicas and the whole batch, both padded."""
        axes = [out.rules[i].axis or 0 for i in numbers_of_rows(out)]
        rows = self._assembled([x.rows for x in parts], axes) if axes else []
        found = self._gather([*rows, *batch])
        apart = self._by_device(found)
        return [x[: len(rows)] for x in apart], [x[len(rows) :] for x in apart]

    def _turns(
        self, turn: TurnPrograms, states: list[list[Any]], batches: list[list[Any]], cotangents: list[list[Any]]
    ) -> list[Parts]:
        """Returns each device's results. Its replicas take turns, and every device begins with its first one.

        All replicas run up to a sum over the replicas before any runs on; values that a replica needs later are held.
        """
        turns = range(self._layout.per_device)
        sums: list[list[Any]] = [[] for _ in states]
        held: list[list[list[Any]]] = [[[] for _ in turns] for _ in states]
        for j, (segment, runs) in enumerate(zip(turn.segments, turn.programs, strict=True)):
            totals = self._exchanged(sums, [[] for _ in sums])[0] if j else sums
            waiting: list[list[tuple[int, list[Any]]]] = [[] for _ in states]
            for k in turns:
                for d, (state, batch) in enumerate(zip(states, batches, strict=True)):
                    values = held[d][k] if j else self._operands(state, batch, d, k, turn.pick_own, cotangents[d])
                    mine, held[d][k] = segment.run(runs[d], totals[d], values)
                    add_replica(waiting[d], mine)
            sums = [total for ((_, total),) in waiting]
        rest = jax.tree.structure(turn.parts._replace(sums=[]))
        axes = tuple(turn.out.rules[i].axis or 0 for i in numbers_of_rows(turn.out))
        kept = [[rest.unflatten(x) for x in own] for own in held]
        return [
            Parts(total, own[self._turn_of_primary].of_primary, own[0].same, self._joined([x.rows for x in own], axes))
            for total, own in zip(sums, kept, strict=True)
        ]

    def _operands(
        self, state: list[Any], batch: list[Any], d: int, k: int, pick_own: Any = None, cotangents: Sequence[Any] = ()
    ) -> list[Any]:
        """Returns the operands of the first program of turn k on device d; its chunk is part of the device's batch."""
        chunk = batch if self._layout.per_device == 1 else self._pick(batch, self._numbers[d][k])
        index = self._indices[d][k]
        own = pick_own(cotangents, index) if cotangents else []
        return [*state, *chunk, *own, index]

    def _joined(self, rows: list[list[Any]], axes: tuple[int, ...]) -> list[Any]:
        return rows[0] if len(rows) == 1 else self._join(rows, axes)

    def _exchanged(self, sums: list[list[Any]], of_primary: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns, for each device, the sums over all devices and the values of the primary device."""
        if self._layout.mesh.size == 1:
            return sums, of_primary
        operands = [self._assembled(x, [0] * len(x[0])) for x in (sums, of_primary)]
        sums, of_primary = map(self._by_device, self._exchange(*operands))
        return sums, of_primary

    def _without_rows(self, batch: list[Any]) -> list[Any]:
        """Returns the batch with None for each array that has rows: the update reads only those of NNX objects."""
        return [x if leaf.axis is None else None for x, leaf in zip(batch, self._layout.arrays, strict=True)]

    def _with_rows(self, metrics: dict[str, Any], parts: list[Parts], out: Outputs) -> dict[str, Any]:
        """Returns the metrics; those with an entry for each row are put together from the devices' parts."""
        numbers = numbers_of_rows(out)
        if not numbers:
            return metrics
        leaves: list[Any] = [None] * len(out.rules)
        arrays = self._assembled([x.rows for x in parts], [out.rules[i].axis or 0 for i in numbers])
        for i, x in zip(numbers, arrays, strict=True):
            leaf = Cut(out.rules[i].axis or 0, out.sizes[i]) if out.sizes[i] else Stack()
            leaves[i] = Scattered((x,), self._layout.of(jax.tree.structure(0), [leaf]))
        _, rows = finished(out.treedef.unflatten(leaves).out)

        def fill(x: Any, of_rows: Any) -> Any:
            return x if of_rows is None else of_rows

        return metrics | jax.tree.map(fill, {k: metrics[k] for k in rows}, rows, is_leaf=lambda x: x is None)

    def _turn(self, call_of: CallOf, operands: Sequence[Any], leaves: Sequence[Leaf] = ()) -> TurnPrograms:
        """Returns the programs of a replica's turn; `leaves` describe the cotangents among the operands."""
        run, count, n = one_replica(call_of, self.__name__), self._treedef.num_leaves, len(self._layout.arrays)
        outs: list[Outputs] = []

        def turn(*operands: Any) -> Parts:
            state, (*arrays, index) = operands[:count], operands[count:]
            batch = Scattered(arrays[:n], self._alone)
            replicas, inputs, key = self._step.operands(self._treedef.unflatten(state), batch)
            if leaves:
                inputs = with_last(inputs, arrays[n:], leaves)
            parts, out = run(replicas, inputs, key, index)
            outs.append(out)
            return parts

        found, parts = segments(turn, operands, self._layout, self.__name__)
        return TurnPrograms(found, parts, outs[-1])

    def _loss_of_all_rows(self, forward: TurnPrograms) -> tuple[Any, list[Cut | Whole]]:
        """Returns the program of a loss of all rows, for one device, and a `Leaf` for each cotangent it returns."""
        out, passes = forward.out, Passes(self._step.loss, self._step.options.accumulate_steps)
        numbers, alone = numbers_of_rows(out), self._alone
        leaf_of = {i: Cut(out.rules[i].axis or 0, out.sizes[i]) for i in numbers}
        outputs, *_ = out.treedef.unflatten(range(len(out.rules)))
        each: list[int] = jax.tree.leaves(outputs)
        leaves: list[Cut | Whole] = [leaf_of.get(i, Whole()) for i in each if has_cotangent(out.values[i])]

        def loss_program(state: list[Any], batch: list[Any], rows: list[Any], sums: list[Any]) -> Any:
            scattered = Scattered(batch, alone)
            replicas, inputs, _ = self._step.operands(self._treedef.unflatten(state), scattered)
            values = put_together(Parts(sums, [[None]] * len(out.rules), [None] * len(out.rules), []), out)
            for i, x in zip(numbers, rows, strict=True):
                (values[i],) = unpadded(Scattered((x,), alone.of(LEAF, [leaf_of[i]])))
            outputs, *_, forms = out.treedef.unflatten(values)
            from_all_rows, cotangents, _ = passes.differentiated(forms, outputs, replicas, inputs, None)
            return from_all_rows, [padded(ct, leaf, alone) for ct, leaf in zip(cotangents, leaves, strict=True)]

        loss_program.__name__ = loss_program.__qualname__ = f"criterion_of_{self._step.label}"
        return jax.jit(loss_program), leaves

    def _traced(self, state: list[Any], batch: list[Any], arrays: Sequence[Any]) -> tuple[list[TurnPrograms], Any, Any]:
        """Returns a step's turns; for a loss of all rows, also the program between them and its operands' shapes."""
        step, steps = self._step, self._step.options.accumulate_steps
        operands = self._operands(state, batch, 0, 0)
        try:
            if step.loss.criterion:
                raise SeveralTerms
            return [self._turn(step.call_of, operands)], None, None
        except SeveralTerms:
            forward = self._turn(forward_of(step.loss, steps), operands)
        loss_program, leaves = self._loss_of_all_rows(forward)
        rows, whole, sums = self._shapes_of_all(forward, arrays)  # shapes, because nothing has run yet
        shapes = [jax.tree.map(shape_of, state), whole, rows, sums]
        axes, count = [leaf.axis for leaf in leaves], len(self._layout.devices)
        pick_own: Any = jax.jit(lambda cotangents, index: chunks_of(cotangents, axes, count, index))
        own = jax.eval_shape(pick_own, jax.eval_shape(loss_program, *shapes)[1], operands[-1])
        backward = gradients(step.loss._replace(is_backward=True), steps, step.options.reduce_dtype)
        turn = self._turn(backward, [*operands[:-1], *own, operands[-1]], leaves)
        return [forward, turn._replace(pick_own=pick_own)], loss_program, shapes

    def _update(self, out: Outputs) -> tuple[Any, list[Any]]:
        """Returns the program that computes the next state, and `trees`: its results' treedefs, set by tracing it."""
        trees: list[Any] = []

        def update(leaves: list[Any], arrays: list[Any], parts: Parts, from_all_rows: Any) -> Any:
            state = self._treedef.unflatten(leaves)
            found = self._step.read(state, out.treedef.unflatten(put_together(parts, out)))
            found = found if from_all_rows is None else found._replace(out=from_all_rows)
            after, *others = self._step.updated(state, Scattered(arrays, self._alone), found)
            flat, of_others = jax.tree.flatten(others)
            leaves, of_state = jax.tree.flatten(after)
            trees[:] = of_state, of_others
            return leaves, flat

        update.__name__ = update.__qualname__ = f"update_{self._step.label}"
        return jax.jit(update, donate_argnums=0 if self._step.options.donate else ()), trees

    def lower(self, state: TrainState, arrays: Sequence[Any]) -> types.SimpleNamespace:
        """Returns the step's programs: `as_text()`, which the processes compare, and `compile()`, for every device."""
        (states, batches), devices = self._split_by_device(state, arrays), self._devices
        turns, loss_program, shapes = self._traced(states[0], batches[0], arrays)
        update, trees = self._update(turns[-1].out)
        lowered = [x.program.lower(*_on_device(x.operands, d)) for one in turns for x in one.segments for d in devices]
        lowered += [loss_program.lower(*_on_device(shapes, d)) for d in devices] if loss_program else []

        def compile() -> None:
            from_all_rows: list[Any] = [None] * len(devices)
            if self._step.loss.criterion:
                result = jax.eval_shape(loss_program, *shapes)[0]
                from_all_rows = [_on_device(result, device) for device in devices]
            after = [_on_device(turns[-1].parts._replace(rows=[]), device) for device in devices]
            operands = zip(states, map(self._without_rows, batches), after, from_all_rows, strict=True)
            updates = [update.lower(*x) for x in operands]
            with concurrent.futures.ThreadPoolExecutor() as pool:
                programs = iter([*pool.map(lambda x: x.compile(), [*lowered, *updates])])
            ready = [one._replace(programs=[[next(programs) for _ in devices] for _ in one.segments]) for one in turns]
            loss_programs = [next(programs) for _ in devices] if loss_program else []
            self._compiled[_shape_key((states[0], batches[0]))] = ready, loss_programs, [*programs], trees

        text = "\n".join(x.as_text() for x in lowered[:: len(devices)])
        return types.SimpleNamespace(as_text=lambda: text, compile=compile)

    def _shapes_of_all(self, forward: TurnPrograms, batch: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the shapes that a criterion's program takes: of gathered outputs, the whole batch, and the sums."""
        out, rows = forward.out, []
        for i in numbers_of_rows(out):
            shape: list[int] = [*(out.values[i].shape or (1,))]
            axis = out.rules[i].axis or 0
            shape[axis] = len(self._layout.devices) * max([1, *out.sizes[i]])
            rows.append(jax.ShapeDtypeStruct(tuple(shape), out.values[i].dtype))
        return rows, [*map(shape_of, batch)], [*map(shape_of, forward.parts.sums)]

    def make_ready(self, state: TrainState, arrays: Sequence[Any]) -> None:
        """Compiles what the first call would compile: this takes long, and it can be interrupted here."""
        if not any(number == len(_configuration()) for number, *_ in self._compiled):
            self.lower(state, arrays).compile()
