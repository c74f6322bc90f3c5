"""Takes the training step out of a user's script: runs it up to its first step, which is not run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .._core.programs import intercept
from .._core.scattered import Scattered
from .._explain.calls import Captured, shape_of, spread
from .._train.program import Program
from .._train.state import TrainState


class PlanError(Exception):
    """What a plan cannot be made of, as a message for its user."""


WAYS = ("replicated", "shard_optimizer", "shard_params")
"""What of its state a step may cut over the devices: nothing, or what the argument of `train_step` says."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step as the script called it, in shapes."""

    program: Program
    state: TrainState
    batch: Scattered

    @property
    def rows(self) -> int:
        """Rows of the batch on the device that has most."""
        return max(self.batch._layout.by_device)

    @property
    def way(self) -> str:
        """How the script has it keep its state: one of `WAYS`."""
        options = self.program.options
        return "shard_params" if options.shard_params else "shard_optimizer" if options.shard_optimizer else WAYS[0]

    @property
    def is_cut(self) -> bool:
        """Whether there is a batch at all: one that every replica gets whole has no rows to plan."""
        return self.batch._layout.is_cut

    def on(self, mesh: Mesh, rows: int, way: str | None = None) -> tuple[Program, TrainState, Scattered]:
        """The same step on other devices, with so many rows on each, and its state kept in that way of `WAYS`."""
        params = (way or self.way) == "shard_params"
        changed = {"shard_params": params, "shard_optimizer": params or (way or self.way) == "shard_optimizer"}
        return self.program.on(mesh, **changed), self.state, spread(self.batch, mesh, rows)


def capture_step(script: str, args: Sequence[str], values: bool = True) -> Step:
    """The first training step that the script comes to, on the CPU; what it prints goes to stderr.

    Without `values` JAX traces the script: its arrays are shapes, which take no memory.

    Raises:
        PlanError: it fails or ends before that.
    """
    if not os.path.isfile(script):
        raise PlanError(f"jdp.plan: there is no file {script}; plan runs a script up to its first step. Pass its path.")
    found: list[Step] = []
    how = "ended"

    def stop(program: Any, *operands: Any) -> None:
        if not isinstance(program, Program):
            return
        state, batch = operands
        found.append(Step(program, jax.tree.map(lambda x: shape_of(x, None), state), shape_of(batch, None)))
        raise Captured  # which ends the script

    def run() -> None:
        runpy.run_path(script, run_name="__main__")

    # All of train_step's steps come here (and their `lower`), with everything checked.
    with intercept(stop, shapes=not values), _as_main(script, args):
        try:
            run() if values else jax.eval_shape(run)
        except Captured:
            pass
        except SystemExit as end:
            how = f"ended with code {end.code}"
        except Exception as error:
            how = f"raised {type(error).__name__} ({(str(error).strip().splitlines() or [''])[0]})"
            if not values and isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
                how = "looked at the value of an array, of which --no-values leaves the shape,"
            if not found:
                _print_error(error, script)
    if not found:
        raise PlanError(
            f"jdp.plan: {script} {how} before a training step; plan reads the first call of what dp.train_step made. "
            f"Pass a script that trains with one, and its own arguments after --."
        )
    return found[0]


def _print_error(error: BaseException, script: str) -> None:
    """The script's own part of the traceback."""
    at, name = error.__traceback__, os.path.abspath(script)
    while at is not None and os.path.abspath(at.tb_frame.f_code.co_filename) != name:
        at = at.tb_next
    traceback.print_exception(type(error), error, at, chain=False)


@contextlib.contextmanager
def _as_main(script: str, args: Sequence[str]) -> Iterator[None]:
    """What a script finds where Python runs it by itself, but for its output and its devices."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv, sys.path[0:0] = [script, *args], [os.path.dirname(os.path.abspath(script))]
    # Its small arrays can be anywhere, and a GPU that is here has no part in the plan.
    jax.config.update("jax_platforms", "cpu")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
