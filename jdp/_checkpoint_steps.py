"""Finds the checkpoint that a run goes on from, and sets aside those that are damaged or of a future it has left."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from ._checkpoint_directory import Quiet, free_name
from ._checkpoint_items import VERB
from ._checkpoint_read import Damaged, read, tell_all


class Steps:
    """The checkpoints in a directory, by their steps, and where among them this run is."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self.newest: int | None = None  # the step that this run has restored or saved last
        self._before: int | None = None  # what `newest` was before the last save
        self._looked = False  # whether it is known what this run goes on from
        self._cleared = False  # whether nothing in the directory is newer than what this run saves
        self._damaged: list[int] = []

    def latest(self) -> int | None:
        """The newest complete checkpoint that was not found to be damaged, or None."""
        return max((s for s in self._complete() if s not in self._damaged), default=None)

    def find(self, leaves: Mapping[str, Any], step: int | None, quiet: Quiet) -> tuple[dict[str, Any], Any] | None:
        """What `read` gives of `step`, or of the newest that is intact; None where there is no checkpoint.

        Raises:
            RuntimeError: all are damaged, or the one of `step` is.
            ValueError: the checkpoint is of another model, or there is none of `step`.
        """
        # What process 0 sees counts, for a network file system may show the others something older.
        complete = self._complete()
        seen = [step] if step in complete else complete[-40:]  # few words: they go to all
        steps = [int(s) for s in tell_all(" ".join(map(str, seen)))[0].split()]
        if step is not None and step not in steps:
            raise ValueError(
                f"jdp.{VERB}: {self._directory} has no step {step}; it has {steps or 'none'}. "
                f"Pass one of these, or None."
            )
        damaged: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            try:
                found = read(self._directory / str(candidate), leaves)
            except Damaged as e:
                damaged[candidate] = str(e)
                quiet.abandoned = True
                continue
            self._went_back(candidate, damaged)
            return found
        self._damaged = sorted({*self._damaged, *damaged})
        if damaged:
            raise RuntimeError(
                f"jdp.{VERB}: in {self._directory} {_listed(damaged)}; a checkpoint is restored only if it is what was "
                f"saved. Bring an intact copy back, or begin anew in an empty directory."
            )
        self._looked = True
        return None

    def check_grows(self, step: int) -> None:
        """Raises:
        ValueError: the step is less than the newest.
        """
        if self.newest is not None and step < self.newest:
            raise ValueError(
                f"jdp.{VERB}: step {step} comes after step {self.newest}; steps grow from save to save. To go back, "
                f"restore(state, step=...) first."
            )

    def set_aside(self, step: int) -> bool:
        """Renames what is damaged or of a future that this run has left, so that Orbax saves this step and finds it.

        Returns:
            Whether it has looked, after which Orbax has to look again.

        Raises:
            ValueError: there is such a future, and this run has not restored anything.
        """
        if self._cleared:
            return False
        here = step - 1 if self.newest is None else min(step - 1, self.newest)  # where this run goes on
        newer = sorted({s for s in self._complete() if s > here or s in self._damaged})
        if not self._looked and (ahead := [s for s in newer if s > here]):
            raise ValueError(
                f"jdp.{VERB}: step {step} is to be saved in {self._directory}, which holds step {ahead[-1]} already; a "
                f"run goes on from what is there, or begins in an empty directory. Call restore first, or pass another."
            )
        tell_all("")  # all have looked before one changes anything
        for s in newer if jax.process_index() == 0 else ():
            name = free_name(self._directory, f"{s}.set-aside")
            (self._directory / str(s)).rename(self._directory / name)
            why = "is damaged" if s in self._damaged else f"is newer than step {self.newest}, where this run goes on"
            print(f"jdp: step {s} in {self._directory} {why}; it is now called {name}", flush=True)
        tell_all("")
        self._damaged, self._cleared = [], True
        return True

    def advance(self, step: int) -> None:
        """The save of this step begins."""
        self._before, self.newest = self.newest, step

    def take_back(self) -> None:
        """That save has failed."""
        self.newest = self._before

    def _went_back(self, step: int, damaged: dict[int, str]) -> None:
        self.newest, self._looked, self._cleared = step, True, False
        self._damaged = sorted({*self._damaged, *damaged} - {step})
        if damaged and jax.process_index() == 0:
            warnings.warn(
                f"jdp.{VERB}: in {self._directory} {_listed(damaged)}; step {step} is restored, which is intact. "
                f"The first save gives what is damaged another name.",
                stacklevel=4,  # the user's line, beyond `find` and `restore`
            )

    def _complete(self) -> list[int]:
        import orbax.checkpoint as ocp

        return sorted(ocp.utils.checkpoint_steps(self._directory)) if self._directory.is_dir() else []


def _listed(damaged: dict[int, str]) -> str:
    return ", and ".join(f"step {s} is damaged ({why})" for s, why in damaged.items())
