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

from .._core.layout import Cut, Layout, Tree
from .._core.programs import intercept
from .._core.scattered import Scattered
from .._explain.calls import shape_of, shapes_cut_so
from .._train.program import Program
from .._train.state import TrainState


class PlanError(Exception):
    """What a plan cannot be made of, as a message for its user."""


class _Stop(BaseException):
    """No error: ends the script at its first step."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step as the script called it, in shapes."""

    program: Program
    state: TrainState
    batch: Scattered

    @property
    def rows(self) -> int:
        """Rows of the batch on the device that has most."""
        return max(self.batch.sizes)

    @property
    def is_cut(self) -> bool:
        """Whether there is a batch at all: one that every replica gets whole has no rows to plan."""
        return self.batch._layout.is_cut

    def on(self, mesh: Mesh, rows: int) -> tuple[Program, TrainState, Scattered]:
        """The same step on other devices, with so many rows on each of them."""
        return self.program.on(mesh), self.state, spread(self.batch, mesh, rows)


def spread(batch: Scattered, mesh: Mesh, rows: int) -> Scattered:
    """The shapes of a batch like this one, with so many rows on each device of the mesh."""
    layout = batch._layout
    sizes = (rows,) * mesh.size if layout.is_cut else (1,)
    leaves = tuple(Cut(leaf.axis, sizes) if isinstance(leaf, Cut) else leaf for leaf in layout.leaves)
    return shapes_cut_so(batch, Layout(layout.treedef, leaves, sizes, mesh, layout.dim))


def capture_step(script: str, args: Sequence[str]) -> Step:
    """The first training step that the script comes to, on the CPU; what it prints goes to stderr.

    Raises:
        PlanError: it fails or ends before that.
    """
    if not os.path.isfile(script):
        raise PlanError(f"jdp.plan: there is no file {script}; plan runs a script up to its first step. Pass its path.")
    found: list[Step] = []

    def stop(program: Any, *operands: Any) -> None:
        if not isinstance(program, Program):
            return
        state, batch = operands
        arrays = [_shape(x) for x in batch._arrays]
        found.append(Step(program, jax.tree.map(_shape, state), Scattered(arrays, batch._layout)))
        raise _Stop

    # All of train_step's steps come here (and their `lower`), with everything checked.
    with intercept(stop, shapes=False), _as_main(script, args):
        try:
            runpy.run_path(script, run_name="__main__")
        except _Stop:
            pass
        except SystemExit as end:
            if not found:
                raise _ended(script, f"ended with code {end.code}") from None
        except Exception as error:
            if not found:
                _print_error(error, script)
                raise _ended(script, f"raised {type(error).__name__} ({_line(error)})") from None
    if not found:
        raise _ended(script, "ended")
    return found[0]


def _ended(script: str, how: str) -> PlanError:
    return PlanError(
        f"jdp.plan: {script} {how} before a training step; plan reads the first call of what dp.train_step made. "
        f"Pass a script that trains with one, and its own arguments after --."
    )


def _shape(x: Tree) -> Tree:
    return shape_of(x, None)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _print_error(error: BaseException, script: str) -> None:
    """The script's own part of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    name = os.path.abspath(script)
    first = next((i for i, frame in enumerate(frames) if os.path.abspath(frame.filename) == name), 0)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[first:])]
    print("".join(lines + traceback.format_exception_only(error)), end="", file=sys.stderr)


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
