"""A captured call of a training step: its operands' shapes, and the program that it was about to run."""

from __future__ import annotations

from typing import Any

from .._core.scattered import Scattered
from .._train.jit import jit_of_state
from .._train.state import TrainState
from .calls import Call, alone, on_one_device, shapes_in, shapes_of_scattered


class StepCall(Call):
    """A call of a step's program: `program(state, batch)`."""

    def __init__(self, program: Any, state: TrainState, batch: Scattered) -> None:
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
        self.compilations = sum(run._cache_size() for run in program.compiled.values() if hasattr(run, "_cache_size"))

    def trace(self) -> Any:
        (batch,) = self.batch
        return jit_of_state(self._program, self._state, batch._layout, {}).trace(self._state, batch._arrays)

    def alone(self) -> Call:
        return StepCall(self._program.on(alone(self.mesh)), self._state, on_one_device(self.batch[0]))
