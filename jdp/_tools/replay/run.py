"""Runs a script from its newest checkpoint up to one step, says what is not finite in that step, and ends the run."""

from __future__ import annotations

import bdb
import collections
import hashlib
import os
import pdb
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._checkpoint.directory import absolute, steps_in
from ..._checkpoint.read import unlike
from ..._checkpoint.replay import replaying
from ..._core.fingerprint import fingerprint
from ..._core.layout import Tree, is_key
from ..._core.programs import intercept
from ..._core.scattered import Scattered
from ..._train.program import Program
from ..._train.state import TrainState
from ..script import print_error, run_script

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
_FEW = 6  # leaves that one line names
_MANY = 20  # steps that one message names


class ReplayError(Exception):
    """The reason why a step cannot be made again, as a message for the user."""


class Ended(BaseException):
    """Not an error: ends the script. It has a text if something is wrong with the script."""


def replay(directory: str, number: int, script: str, args: Sequence[str], debug: bool = False) -> None:
    """Makes step `number` of the script again, and prints what it finds; nothing is written to the directory.

    Raises:
        ReplayError: there is no checkpoint before that step, or the script does not reach it.
    """
    if not os.path.isfile(script):
        raise ReplayError(
            f"jdp.replay: there is no file {script}; replay runs the script whose checkpoints these are. Pass its path."
        )
    run = Run(directory, number, debug)
    problem, how, error = "", "", None
    with intercept(run.take, shapes=False, stepped=run.stepped), replaying(run):
        try:
            how, error = run_script(script, args)
        except Ended as end:
            problem = str(end)
    if isinstance(error, bdb.BdbQuit):  # in the debugger, after the step
        return
    if error is not None:
        print_error(error, script)
    if how and (error is not None or not run.made):
        problem = f"{how} {run.where()}"
    if problem:
        raise ReplayError(f"jdp.replay: {script} {problem}")


class Run:
    """The progress of the run: its steps are numbered as in `Checkpointer.save`.

    A checkpoint that is restored or would be saved gives the number of the last step; the calls of a step function
    after that have the next numbers. If a script has several step functions, each counts its own calls.
    """

    def __init__(self, directory: str, number: int, debug: bool) -> None:
        self._directory, self._number, self._debug = absolute(directory), number, debug
        there = steps_in(self._directory)
        if not any(s < number for s in there):
            has = f"the oldest are {there[:_MANY]}" if there else "there are no checkpoints in it"
            way = f"--step {there[0] + 1} or more" if there else "the directory of the script's Checkpointer"
            raise ReplayError(
                f"jdp.replay: {directory} has no checkpoint of step {number - 1} or before, and {has}; a step is made "
                f"again from the newest checkpoint before it. Pass {way}."
            )
        self._from: int | None = None  # the checkpoint that was restored
        self._last: int | None = None  # the step that was restored or would have been saved last
        self._calls: collections.Counter[Program] = collections.Counter()  # since `_last`
        self._begun: list[Program] = []
        self.made: list[Program] = []  # the programs that have made the step
        self._elsewhere: set[str] = set()  # other directories of Checkpointers

    def where(self) -> str:
        """Returns how far the run has come, and what to do about it, for an error message."""
        if self._last is not None:
            come = self._last + max(self._calls.values(), default=0)
            return (
                f"after step {come}, and did not make step {self._number}; replay knows the steps of dp.train_step. "
                f"Pass a step that the script makes, and the arguments that it had."
            )
        used = f"; its Checkpointers are over {', '.join(sorted(self._elsewhere))}" if self._elsewhere else ""
        return (
            f"before it restored a checkpoint of {self._directory}{used}; replay goes on from one. Pass the directory "
            f"of the script's Checkpointer, and the script's arguments after it."
        )

    def last(self, directory: Any) -> int | None:
        if directory == self._directory:
            return self._number - 1
        self._elsewhere.add(os.fspath(directory))
        return None

    def restored(self, directory: Any, step: int) -> None:
        if directory == self._directory:
            self._from = self._last = step
            self._calls.clear()

    def saved(self, directory: Any, step: int, leaves: Mapping[str, Any]) -> None:
        if directory != self._directory:
            return
        if self.made:
            if step == self._number and step in steps_in(directory):
                other = unlike(directory / str(step), leaves)
                same = f"it has other bits: {', '.join(other[:3])}{', ...' * (len(other) > 3)}"
                self._say([("checkpoint", same if other else "it has the same bits")])
            raise Ended
        if step >= self._number:
            raise Ended(f"goes on to save step {step} {self.where()}")
        self._last = step
        self._calls.clear()

    def take(self, program: Any, *operands: Any) -> None:
        """Handles a program that is about to run: looks at its operands if it makes the step, ends the run after it."""
        if not isinstance(program, Program) or program in self._begun and program not in self.made:
            return
        number = self._calls[program] + 1 + (-1 if self._last is None else self._last)
        if self._last is None:
            raise Ended(f"makes a training step {self.where()}")
        if number > self._number:
            raise Ended
        if number == self._number:
            self._begun.append(program)
            self._look(program, *operands)

    def _look(self, program: Program, state: TrainState, batch: Scattered) -> None:
        self._say([("", f"step {self._number} (train_step of {program.label}), from the checkpoint of {self._from}")])
        self._say(_before(program, state, batch))
        if self._debug and not _open_debugger(self._number):
            raise Ended

    def stepped(self, program: Program, state: TrainState, metrics: Mapping[str, Any]) -> None:
        """Counts a step that has been made; prints its results if it is the one."""
        self._calls[program] += 1
        if program in self._begun:
            self.made.append(program)
            self._say(_after(program, state, metrics))

    def _say(self, lines: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> None:
        for name, text in lines:  # in every process, because all of them compute some lines together
            if jax.process_index() == 0:
                print(f"  {name:<11} {text}" if name or text.startswith("not") else f"jdp replay: {text}", flush=True)


def _before(program: Program, state: TrainState, batch: Scattered) -> Iterator[tuple[str, str]]:
    """Yields lines about the batch and the state of a step before it is made, and about its gradient."""
    layout = batch._layout
    count = len(batch.devices)
    rows = f"{sum(layout.sizes)} rows on {count} replicas" if layout.is_cut else "the same on every replica"
    yield "batch", f"{rows}; {_finite({'batch': layout.fill(batch._arrays)})}"
    yield "state", _finite(_parts(program, state))

    def norm(state: TrainState, arrays: tuple[Any, ...]) -> jax.Array:
        grads = jax.tree.leaves(program.view(program.gradients(state, Scattered(arrays, layout)).grads))
        sizes = [jnp.abs(x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)) for x in grads]
        most = jnp.array([jnp.float32(0), *(x.max(initial=0) for x in sizes)]).max()
        unit = jnp.where((most > 0) & jnp.isfinite(most), most, 1)  # squares of large numbers are no float32
        return unit * jnp.sqrt(sum((jnp.sum(jnp.square(x / unit)) for x in sizes), jnp.float32(0)))

    yield "gradient", f"norm {_text(jax.jit(norm)(state, tuple(batch._arrays)))}"
    for found in program.find_nonfinite(state, batch):
        where = f"replica {found.replica} ({found.device}), {_few('row', map(str, found.rows))}"
        yield "", f"not finite in {where}, {_few('leaf', found.paths, 'leaves')}"


def _after(program: Program, state: TrainState, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields lines about the results of a step."""
    for name, value in metrics.items():
        yield name, _text(value)
    yield "state after", f"{_finite(_parts(program, state))}; bits {_bits(state)}"


def _bits(state: Tree) -> str:
    """Returns sixteen hexadecimal digits that depend on every bit of a tree, and not on its sharding."""
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(state)]
    return hashlib.sha256(fingerprint([x for x in leaves if x.size]).tobytes()).hexdigest()[:16]


def _open_debugger(number: int) -> bool:
    """Opens the debugger where the script calls its step; returns False if the user quits."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    print(f"jdp replay: this line makes step {number}; n makes it, q ends all", flush=True)
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.breaks or debugger.stoplineno != -1:  # any command but `c`: the script is traced from here on
        while frame is not None:
            frame.f_trace, debugger.botframe = debugger.trace_dispatch, frame
            frame = frame.f_back
        sys.settrace(debugger.trace_dispatch)
    return not debugger.quitting


def _parts(program: Program, state: TrainState) -> dict[str, Tree]:
    return {"params": program.view(state.params), "opt_state": state.opt_state, "state": state.state}


def _finite(parts: Mapping[str, Tree]) -> str:
    """Returns a text: "finite", or which leaves of these trees are not."""
    named = {
        part + jax.tree_util.keystr(path): x
        for part, tree in parts.items()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(x, "dtype") and not is_key(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    }
    finite = jax.jit(lambda arrays: [jnp.isfinite(x).all() for x in arrays])(list(named.values()))
    wrong = [name for name, ok in zip(named, finite, strict=True) if not ok]
    return f"not finite: {_few('leaf', wrong, 'leaves')}" if wrong else "finite"


def _few(what: str, names: Any, several: str = "") -> str:
    names = list(names)
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return f"{what if len(names) == 1 else several or what + 's'} {', '.join(names[:_FEW])}{more}"


def _text(value: Any) -> str:
    x = np.asarray(value)
    return str(x[()]) if not x.ndim else " ".join(np.array2string(x, threshold=9).split())
