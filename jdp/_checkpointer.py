"""`Checkpointer`: after `save(step, state)`, `restore(state)` gives it back bit for bit, on any number of devices."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import warnings
import weakref
from typing import Any

import jax

from ._checkpoint_agree import agree
from ._checkpoint_directory import Quiet, absolute, free_name, make_writable, manager, remove_unfinished
from ._checkpoint_items import VERB, decode, encode, leaves_of, manifest
from ._checkpoint_read import ARRAYS, MANIFEST, Damaged, read, tell_all
from ._layout import Tree
from ._preemption import Preemption


class Checkpointer:
    """Saves a training state while training goes on, and restores the newest checkpoint that is whole.

    Over Orbax's `CheckpointManager`, with what a long run needs besides:

    * every array is saved with a fingerprint of its bits, and checked against it when it is restored; a checkpoint
      that is damaged in any way is left for the newest intact one before it, and a warning says so;
    * a `kill -9` at any moment loses no checkpoint that was there before: one is made under another name and
      renamed when it is complete; older ones are deleted after that;
    * a SIGTERM, as a cluster sends before it takes the machine away: the `save` of the step that is being made saves,
      whatever `every` is, waits until it is on the disk, says so, and raises `SystemExit(0)`. Under
      `jax.distributed` all processes do that in the same step, whichever got the signal. Call `save` in every step.

    Make it in every process, after `jax.distributed.initialize`, and call its methods in all of them; the directory
    is one that all of them see.

    Args:
        directory: where the checkpoints are, one directory for each, named by its step. Made if it is not there.
        keep: how many are kept, the newest.
        every: save at steps that are multiples of this.

    Attributes:
        directory: the directory, absolute.
        latest_step: the newest complete checkpoint that was not found to be damaged, or None.

    Raises:
        OSError: the directory cannot be made or written.
        ValueError: `keep` or `every` is less than 1.

    Example:
        >>> import jdp, numpy as np, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> for attempt in range(2):
        ...     with jdp.Checkpointer(directory, keep=2, every=10) as checkpointer:
        ...         state, data = checkpointer.restore({"step": 0, "w": np.zeros(2)})
        ...         print(state["step"], state["w"], data)
        ...         for step in range(state["step"] + 1, 36):
        ...             state = {"step": step, "w": state["w"] + 1}
        ...             saved = checkpointer.save(step, state, data={"position": 64 * step})
        0 [0. 0.] None
        30 [30. 30.] {'position': 1920}

    Source: orbax.checkpoint.CheckpointManager.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3, every: int = 1) -> None:
        self._keep, self._every = _positive("keep", keep), _positive("every", every)
        self._quiet = Quiet()
        self.directory = absolute(directory)
        make_writable(self.directory)
        if jax.process_index() == 0:
            remove_unfinished(self.directory)
        self._manager: Any = manager(self.directory, self._keep)
        self._newest: int | None = None  # the step that this object has restored or saved last
        self._before: int | None = None  # what `_newest` was before the last save
        self._running: int | None = None  # the step whose save may not have ended yet
        self._looked = False  # whether it is known what this run goes on from
        self._cleared = False  # whether nothing in the directory is newer than what this run saves
        self._damaged: list[int] = []
        self._preemption = Preemption()
        # A Checkpointer that is dropped must not go on holding SIGTERM back.
        self._finalizer = weakref.finalize(self, _let_go, self._preemption, self._quiet)

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint that was not found to be damaged, or None."""
        return max((s for s in self._steps() if s not in self._damaged), default=None)

    def save(self, step: int, state: Tree, data: Any = None) -> bool:
        """Saves the state if `step` is a multiple of `every`, or if this is the step at which a SIGTERM ends the job.

        Returns as soon as the arrays are on the host, so that they may be donated to the next step; the rest goes on
        beside the training. Only one save runs at a time: the next waits for it.

        Args:
            step: the number of the step that has just been made; it grows from save to save.
            state: a `jdp.TrainState`, any pytree of arrays and numbers, an NNX object, or a pytree of NNX objects.
            data: what tells the data where to go on: None, numbers, strings, lists, dicts with string keys. It may
                differ between processes, and each gets its own back; in a job of another number of processes `restore`
                gives the list of them all.

        Returns:
            Whether it has saved; False also if this step is saved already.

        Raises:
            SystemExit: with code 0, after a SIGTERM.
            RuntimeError: the save before this one has failed, or this one could not begin; the checkpoints that were
                complete are untouched.
            TypeError: `data` is no JSON, or a leaf is no array.
            ValueError: `step` is less than one that was saved, or the directory holds a newer checkpoint, and nothing
                was restored; or a leaf that each process holds for itself is not the same in all.
        """
        step = operator.index(step)
        ending = self._preemption.reached()
        if not ending and step % self._every:
            return False
        if saving := step != self._newest:
            self._begin(step, state, data)
        if ending:
            self.wait()
            self._close(acted=True)
            if jax.process_index() == 0:
                print(f"jdp: SIGTERM: saved step {step} in {self.directory}; ending", flush=True)
            sys.exit(0)
        return saving

    def restore(self, state: Tree, step: int | None = None) -> tuple[Tree, Any]:
        """The newest intact checkpoint, in the shapes, dtypes and shardings of `state`, and its data cursor.

        So it comes onto any number of devices and processes, whatever the number was that saved it. NNX objects are
        updated in place. Where there is no checkpoint: the state as it was passed, and None.

        Checkpoints that are newer than the one restored stay, until the first `save` gives them another name.

        Args:
            state: one like the state that was saved; only its form counts, not its values.
            step: the step to restore; None is the newest that is intact.

        Returns:
            The state and `data`, as they were saved.

        Raises:
            RuntimeError: there are checkpoints, and all are damaged, or the one of `step` is.
            ValueError: the checkpoint is of another model, or there is none of `step`.
        """
        self.wait()
        leaves = leaves_of(state)
        # What process 0 sees counts, for a network file system may show the others something older.
        steps = [int(s) for s in tell_all(" ".join(map(str, self._steps()[-40:])))[0].split()]
        if step is not None and step not in steps:
            raise ValueError(
                f"jdp.{VERB}: {self.directory} has no step {step}; it has {steps or 'none'}. "
                f"Pass one of these, or None."
            )
        damaged: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            try:
                arrays, data = read(self.directory / str(candidate), leaves)
            except Damaged as e:
                damaged[candidate] = str(e)
                self._quiet.abandoned = True
                continue
            self._went_back(candidate, damaged)
            return decode(arrays, state), data
        if damaged:
            raise RuntimeError(
                f"jdp.{VERB}: in {self.directory} {_listed(damaged)}; a checkpoint is restored only if it is what was "
                f"saved. Bring an intact copy back, or begin anew in an empty directory."
            )
        self._looked = True
        return state, None

    def wait(self) -> None:
        """Waits until the save that is running, if any, is complete on the disk.

        Raises:
            RuntimeError: it has failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failed(e)
        self._running = None

    def close(self) -> None:
        """`wait`, and gives SIGTERM back to who had it before; `with` does this at its end."""
        self._close(acted=False)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except RuntimeError as e:
            if error is None:
                raise
            error.add_note(str(e))

    def _begin(self, step: int, state: Tree, data: Any) -> None:
        import orbax.checkpoint as ocp

        if self._newest is not None and step < self._newest:
            raise ValueError(
                f"jdp.{VERB}: step {step} comes after step {self._newest}; steps grow from save to save. To go back, "
                f"restore(state, step=...) first."
            )
        self.wait()
        leaves, data, apart = agree(self.directory, state, data)
        self._set_aside(step)
        arrays = encode(leaves)
        content = ocp.args.JsonSave(manifest(step, leaves, arrays, data, apart))
        items = {ARRAYS: ocp.args.PyTreeSave(arrays), MANIFEST: content}
        self._before, self._newest, self._running = self._newest, step, step
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        step, self._running = self._running, None
        self._quiet.abandoned = True
        if step is not None:
            self._newest = self._before
        if jax.process_index() == 0:
            remove_unfinished(self.directory)
        self._manager.reload()
        last = self.latest_step
        raise RuntimeError(
            f"jdp.{VERB}: step {step} was not saved in {self.directory}: {error}; "
            f"{'there is no checkpoint yet' if last is None else f'step {last} is the newest complete checkpoint'}. "
            f"Make room there, or make it writable, and save again."
        ) from error

    def _went_back(self, step: int, damaged: dict[int, str]) -> None:
        self._newest, self._looked, self._cleared, self._damaged = step, True, False, list(damaged)
        if damaged and jax.process_index() == 0:
            warnings.warn(
                f"jdp.{VERB}: in {self.directory} {_listed(damaged)}; step {step} is restored, which is intact. "
                f"The first save gives what is damaged another name.",
                stacklevel=3,
            )

    def _set_aside(self, step: int) -> None:
        """Renames what is damaged or of a future that this run has left, so that Orbax saves this step and finds it."""
        if self._cleared:
            return
        newer = sorted({s for s in self._steps() if s >= step or s in self._damaged})
        if newer and not self._looked:
            raise ValueError(
                f"jdp.{VERB}: step {step} is to be saved in {self.directory}, which holds step {newer[-1]} already; a "
                f"run goes on from what is there, or begins in an empty directory. Call restore first, or pass another."
            )
        tell_all("")  # all have looked before one changes anything
        for s in newer if jax.process_index() == 0 else ():
            name = free_name(self.directory, f"{s}.set-aside")
            (self.directory / str(s)).rename(self.directory / name)
            why = "is damaged" if s in self._damaged else f"is newer than step {self._newest}, where this run goes on"
            print(f"jdp: step {s} in {self.directory} {why}; it is now called {name}", flush=True)
        tell_all("")
        self._damaged, self._cleared = [], True
        self._manager.reload()

    def _steps(self) -> list[int]:
        import orbax.checkpoint as ocp

        return sorted(ocp.utils.checkpoint_steps(self.directory)) if self.directory.is_dir() else []

    def _close(self, acted: bool) -> None:
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # what has failed, wait has told
                self._manager.close()
            self._finalizer.detach()
            self._quiet.close()
            self._preemption.close(acted)


def _let_go(preemption: Preemption, quiet: Quiet) -> None:
    quiet.close()
    preemption.close()


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"jdp.{VERB}: {name} is {value!r}; it is a number of 1 or more. Pass such a number.")
    return value


def _listed(damaged: dict[int, str]) -> str:
    return ", and ".join(f"step {s} is damaged ({why})" for s, why in damaged.items())
