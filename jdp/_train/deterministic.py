"""A step of the same bits on any number of devices: programs for one device each, and one that exchanges their sums.

All that adds or rounds, but for sums of two, runs in programs for one device. They are the same however many devices
there are; one program for several is compiled in other ways, and rounds in others.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from .._core.devices import own_mesh, spans_processes
from .._core.layout import Cut, Layout, Stack, Tree, cut_along, replicated
from .._core.outputs import Outputs
from .._core.scattered import Scattered
from .._core.tree import (
    Counter,
    Parts,
    Segment,
    exchange,
    numbers_of_rows,
    one_replica,
    picked,
    put_together,
    segments,
)
from .state import TrainState

if TYPE_CHECKING:
    from .program import Program


class OnDevices:
    """Arrays over a mesh, as what lies on each of this process's devices; and back."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.devices: list[Any] = list((own_mesh(mesh) if spans_processes(mesh) else mesh).devices.flat)
        self._known: dict[int, tuple[Any, Sequence[Any]]] = {}  # the arrays that were put together last, by their ids

    def apart(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """For each device what lies there."""
        parts = [*map(self._parts, arrays)]
        return [[x[i] for x in parts] for i in range(len(self.devices))]

    def _parts(self, x: Any) -> Sequence[Any]:
        known = self._known.get(id(x))
        if known is not None and known[0] is x:
            return known[1]
        found = {shard.device: shard.data for shard in x.addressable_shards}
        return [found[device] for device in self.devices]

    def whole(self, each: Sequence[Sequence[Any]], remember: bool = False) -> list[Any]:
        """The arrays that are equal on all devices, of each one's; to `remember` if they are taken apart next."""
        to, parts = replicated(self.mesh), [*map(list, zip(*each, strict=True))]
        arrays = [jax.make_array_from_single_device_arrays(x[0].shape, to, x) for x in parts]
        if remember:
            self._known = {id(x): (x, of_x) for x, of_x in zip(arrays, parts, strict=True)}
        return arrays

    def cut(self, each: Sequence[Sequence[Any]], axes: Sequence[int]) -> list[Any]:
        """The arrays of which each device has a part along these axes."""
        arrays = []
        for parts, axis in zip(map(list, zip(*each, strict=True)), axes, strict=True):
            shape = tuple(n * self.mesh.size if i == axis else n for i, n in enumerate(parts[0].shape))
            arrays.append(jax.make_array_from_single_device_arrays(shape, cut_along(self.mesh, axis), parts))
        return arrays


class Lowered(NamedTuple):
    """The programs for one device each, for the processes to compare, and to be compiled."""

    text: str
    compile: Callable[[], Compiled]

    def as_text(self) -> str:
        return self.text


class Compiled(NamedTuple):
    """What runs where the operands have some shapes."""

    turn: list[tuple[Segment, list[Any]]]  # with its program for each device
    update: list[Any]  # for each device
    parts: Parts  # their shapes
    out: Outputs  # what they are parts of


def _shapes(operands: Any) -> Any:
    return tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(operands))


def _on_device(shapes: Any, device: Any) -> Any:
    """The shapes, of arrays on this device."""
    to = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to, weak_type=x.weak_type), shapes)


class Deterministic:
    """The step for batches of one layout: `(state, arrays)` to `(state, metrics, updates of NNX objects)`."""

    # Known once the programs are traced: what the parts are, and the trees of what the update gives.
    _out: Outputs
    _after: Any
    _others: Any

    def __init__(self, program: Program, treedef: Any, layout: Layout, on: OnDevices) -> None:
        self.__name__ = f"train_step_{program.label}"
        self._program, self._layout, self._on = program, layout, on
        self._compiled: dict[Any, Compiled] = {}  # by the shapes of the operands
        one = Mesh(np.array(on.devices[:1]), layout.mesh.axis_names)
        # With all replicas on one device: so each of them is traced, wherever it runs.
        alone = Layout(layout.treedef, layout.leaves, layout.sizes, one, layout.dim, len(layout.devices))
        run = one_replica(program.call_of, self.__name__)

        def turn(*operands: Any) -> Parts:
            leaves, (*arrays, index) = operands[: treedef.num_leaves], operands[treedef.num_leaves :]
            batch = Scattered(arrays, alone)
            parts, self._out = run(*program.operands(treedef.unflatten(leaves), batch), index)
            return parts

        def update(leaves: list[Any], arrays: list[Any], parts: Parts) -> Any:
            state, out = treedef.unflatten(leaves), self._out
            found = program.read(state, out.treedef.unflatten(put_together(parts, out)))
            after, *others = program.updated(state, Scattered(arrays, alone), found)
            leaves, self._after = jax.tree.flatten(after)
            others, self._others = jax.tree.flatten(others)
            return leaves, others

        def join(rows: list[list[Any]]) -> list[Any]:
            numbers = numbers_of_rows(self._out)
            return [jnp.concatenate(x, self._out.rules[i].axis) for i, *x in zip(numbers, *rows, strict=True)]

        update.__name__ = update.__qualname__ = f"update_{program.label}"
        self._turn = turn
        self._update: Any = jax.jit(update, donate_argnums=0 if program.options.donate else ())
        self._join: Any = jax.jit(join)
        self._pick: Any = jax.jit(lambda arrays, number: picked(arrays, layout, number))
        self._gather: Any = jax.jit(lambda arrays: arrays, out_shardings=replicated(layout.mesh))
        on_device, self._turn_of_primary = divmod(layout.used[0], layout.per_device)
        self._exchange: Any = exchange(layout.mesh, on_device)
        own = np.reshape(np.array(layout.own, np.int32), (-1, layout.per_device))
        self._indices = [jax.device_put([*mine], device) for mine, device in zip(own, on.devices, strict=True)]
        self._numbers = [jax.device_put([*np.arange(layout.per_device)], device) for device in on.devices]

    def __call__(self, state: TrainState, arrays: Sequence[Any]) -> tuple[TrainState, dict[str, Any], Tree]:
        states, batches = self._apart(state, arrays)
        key = _shapes((states[0], batches[0]))
        if key not in self._compiled:
            self.lower(state, arrays).compile()
        programs = self._compiled[key]
        self._out = programs.out
        parts = self._turns(programs, states, batches)
        sums, taken = self._together([x.sums for x in parts], [x.taken for x in parts])
        found = [x._replace(sums=s, taken=t, rows=[]) for x, s, t in zip(parts, sums, taken, strict=True)]
        operands = zip(programs.update, states, map(self._whole, batches), found, strict=True)
        after, others = zip(*[update(*of_device) for update, *of_device in operands], strict=True)
        state = self._after.unflatten(self._on.whole(after, remember=True))
        metrics, updates = self._others.unflatten(self._on.whole(others))
        return self._placed(state), self._with_rows(metrics, parts), updates

    def _apart(self, state: TrainState, arrays: Sequence[Any]) -> tuple[list[list[Any]], list[list[Any]]]:
        """For each device the state's leaves, whole, and its part of the batch."""
        leaves = jax.tree.leaves(state)
        if not all(x.is_fully_replicated for x in leaves):  # the optimizer's state is cut over the devices
            leaves = self._gather(leaves)
        return self._on.apart(leaves), self._on.apart(arrays)

    def _turns(self, programs: Compiled, states: list[list[Any]], batches: list[list[Any]]) -> list[Parts]:
        """What each device gives: its replicas take turns, and all devices begin with their first.

        Where they meet, all have their turns up to there; what a replica needs later is held, of all of them.
        """
        turns = range(self._layout.per_device)
        sums: list[list[Any]] = [[] for _ in states]
        held: list[list[list[Any]]] = [[[] for _ in turns] for _ in states]
        for j, (segment, runs) in enumerate(programs.turn):
            totals = self._together(sums, [[] for _ in sums])[0] if j else sums
            counters = [Counter() for _ in states]
            for k in turns:
                for d, (state, batch) in enumerate(zip(states, batches, strict=True)):
                    values = held[d][k] if j else [*state, *self._chunk(batch, d, k), self._indices[d][k]]
                    mine, held[d][k] = segment.run(runs[d], totals[d], values)
                    counters[d].add(mine)
            sums = [counter.total for counter in counters]
        rest = jax.tree.structure(programs.parts._replace(sums=[]))
        kept = [[rest.unflatten(x) for x in own] for own in held]
        return [
            Parts(total, own[self._turn_of_primary].taken, own[0].same, self._joined([x.rows for x in own]))
            for total, own in zip(sums, kept, strict=True)
        ]

    def _chunk(self, batch: list[Any], d: int, k: int) -> list[Any]:
        """What turn k of device d takes of the batch."""
        return batch if self._layout.per_device == 1 else self._pick(batch, self._numbers[d][k])

    def _joined(self, rows: list[list[Any]]) -> list[Any]:
        return rows[0] if len(rows) == 1 else self._join(rows)

    def _together(self, sums: list[list[Any]], taken: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
        """For each device the sums over all, and what the primary gave."""
        if self._layout.mesh.size == 1:
            return sums, taken
        operands = [self._on.cut(x, [0] * len(x[0])) for x in (sums, taken)]
        sums, taken = map(self._on.apart, self._exchange(*operands))
        return sums, taken

    def _whole(self, batch: list[Any]) -> list[Any]:
        """What of a batch the update may ask for: the arrays of NNX objects, no rows."""
        return [x if leaf.axis is None else None for x, leaf in zip(batch, self._layout.arrays, strict=True)]

    def _placed(self, state: TrainState) -> TrainState:
        """The state, with what is cut over the devices cut again."""
        return self._program.placed(state) if self._program.options.shard_optimizer else state

    def _with_rows(self, metrics: dict[str, Any], parts: list[Parts]) -> dict[str, Any]:
        """The metrics, with those that have an entry for each row: chunks, which are to be gathered."""
        out = self._out
        numbers = numbers_of_rows(out)
        if not numbers:
            return metrics
        leaves: list[Any] = [None] * len(out.rules)
        arrays = self._on.cut([x.rows for x in parts], [out.rules[i].axis or 0 for i in numbers])
        for i, x in zip(numbers, arrays, strict=True):
            leaf = Cut(out.rules[i].axis or 0, out.sizes[i]) if out.sizes[i] else Stack()
            leaves[i] = Scattered((x,), self._layout.of(jax.tree.structure(0), [leaf]))
        _, rows = out.treedef.unflatten(leaves).out

        def fill(x: Any, of_rows: Any) -> Any:
            return x if of_rows is None else of_rows

        return metrics | jax.tree.map(fill, {k: metrics[k] for k in rows}, rows, is_leaf=lambda x: x is None)

    def lower(self, state: TrainState, arrays: Sequence[Any]) -> Lowered:
        """The programs, for the processes to compare; each is compiled once for each device."""
        (states, batches), devices = self._apart(state, arrays), self._on.devices
        chunk = self._chunk(batches[0], 0, 0)
        found, parts = segments(self._turn, [*states[0], *chunk, self._indices[0][0]], self._layout, self.__name__)
        out = self._out
        turns = [x.program.lower(*_on_device(x.operands, device)) for x in found for device in devices]

        def compile() -> Compiled:
            after = [_on_device(parts._replace(rows=[]), device) for device in devices]
            updates = [self._update.lower(*x) for x in zip(states, map(self._whole, batches), after, strict=True)]
            with concurrent.futures.ThreadPoolExecutor() as pool:
                programs = [*pool.map(lambda x: x.compile(), [*turns, *updates])]
            each = [programs[i : i + len(devices)] for i in range(0, len(programs), len(devices))]
            made = Compiled([*zip(found, each, strict=False)], each[-1], parts, out)
            self._compiled[_shapes((states[0], batches[0]))] = made
            return made

        return Lowered("\n".join(x.as_text() for x in turns[:: len(devices)]), compile)

    def make_ready(self, state: TrainState, arrays: Sequence[Any]) -> None:
        """Compiles what a first call would: it takes long, and here it can be interrupted."""
        if not self._compiled:
            self.lower(state, arrays).compile()
