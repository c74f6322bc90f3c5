"""Finds the checkpoint that a run goes on from, and sets aside those that are damaged or newer than that."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from .._processes.coordination import say
from .._processes.exchange import by_value
from .._processes.places import limits, named
from .directory import Sign, free_name, remove_unfinished, steps_in
from .items import VERB
from .read import Damaged, read, tell_all

_FEW = 40  # steps that one message names


class Steps:
    """The checkpoints in a directory, by their steps, and where among them this run is."""

    def __init__(self, directory: Any, last: int | None = None) -> None:
        self._directory = directory
        self._last = last  # if given, newer checkpoints are ignored
        self.newest: int | None = None  # the step that this run has restored or saved last
        self._looked = False  # whether it is known what this run goes on from
        self._cleared = False  # whether nothing in the directory is newer than what this run saves
        self._damaged: set[int] = set()

    def latest(self) -> int | None:
        """Returns the newest complete checkpoint that was not found to be damaged, or None."""
        return max((s for s in self._there() if s not in self._damaged), default=None)

    def _there(self) -> list[int]:
        there = steps_in(self._directory)
        return there if self._last is None else [s for s in there if s <= self._last]

    def find(self, leaves: Mapping[str, Any], step: int | None) -> tuple[dict[str, Any], Any, Any] | None:
        """Returns what `read` returns for `step`, or for the newest intact checkpoint; None if there is none."""
        damaged: dict[int, str] = {}
        while (candidate := self._next(step, damaged)) is not None:
            try:
                found = read(self._directory / str(candidate), leaves)
            except Damaged as e:
                damaged[candidate] = str(e)
                continue
            self.newest, self._looked, self._cleared = candidate, True, False
            self._damaged = (self._damaged | damaged.keys()) - {candidate}
            if damaged and jax.process_index() == 0:
                warnings.warn(
                    f"jdp.{VERB}: in {self._directory} {listed(damaged)}; step {candidate} is restored, which is "
                    f"intact. The first save gives what is damaged another name.",
                    stacklevel=3,  # the user's line, beyond `restore`
                )
            return found
        self._damaged |= damaged.keys()
        if damaged:
            raise RuntimeError(
                f"jdp.{VERB}: in {self._directory} {listed(damaged)}; a checkpoint is restored only if it is what was "
                f"saved. Bring an intact copy back, or start again in an empty directory."
            )
        self._looked = True
        return None

    def may_change(self) -> None:
        """Notes that others may write in the directory from now on; this run may not know what they save."""
        self._looked, self._cleared = self._looked and not self._cleared, False

    def check_grows(self, step: int) -> None:
        """Raises a `ValueError` if the step is less than the newest."""
        if self.newest is not None and step < self.newest:
            raise ValueError(
                f"jdp.{VERB}: step {step} comes after step {self.newest}; steps grow from save to save. To go back, "
                f"restore(state, step=...) first."
            )

    def set_aside(self, step: int) -> None:
        """Renames damaged checkpoints and those newer than where this run goes on, and deletes unfinished saves.

        Raises a `ValueError` if there are newer checkpoints and this run has not called `restore`, and a `RuntimeError`
        if the processes see different directories.
        """
        if self._cleared:
            return
        here = step - 1 if self.newest is None else min(step - 1, self.newest)  # where this run goes on
        ahead, newer = self._meet(here)
        if not self._looked and ahead >= 0:
            raise ValueError(
                f"jdp.{VERB}: step {step} cannot be saved in {self._directory}, which holds step {ahead} already; a "
                f"run goes on from what is there, or begins in an empty directory. Call restore first, or pass another."
            )
        failed: OSError | None = None
        try:
            if jax.process_index() == 0:
                self._rename(newer)
                remove_unfinished(self._directory)
        except OSError as e:
            failed = e
        try:
            if problem := tell_all(str(failed or ""))[0]:
                raise failed or OSError(problem)
        finally:
            failed = None  # the error refers to this frame, and this frame to the lock
        self._damaged, self._cleared = set(), True

    def _meet(self, here: int) -> tuple[int, list[int]]:
        """Returns the newest step after `here`, or -1, and in process 0 the steps to set aside.

        Raises in all processes if process 0 cannot look, or one does not see what process 0 writes.
        """
        sign, name, newer, failed = Sign(self._directory), "", [], None
        try:
            try:
                if jax.process_index() == 0:
                    newer = [s for s in steps_in(self._directory) if s > here or s in self._damaged]
                    name = sign.make() if jax.process_count() > 1 else ""
            except OSError as e:
                failed = e
            ahead = max((s for s in newer if s > here), default=-1)
            ahead, name, problem = json.loads(tell_all(json.dumps([ahead, name, str(failed or "")]))[0])
            if problem:
                raise failed or OSError(problem)
            unseen = {p: why for p, why in enumerate(tell_all(sign.why_unseen(name))) if why} if name else {}
        finally:
            failed = None  # the error refers to this frame, and this frame to the lock
            sign.delete()
        if unseen:
            raise RuntimeError(
                f"jdp.{VERB}: {named([*unseen])} {'do' if len(unseen) > 1 else 'does'} not see what process 0 writes "
                f"in {self._directory} ({'; '.join(dict.fromkeys(unseen.values()))}); all processes must see the "
                f"directory. Pass one on a shared file system."
            )
        return ahead, newer

    def _next(self, step: int | None, damaged: dict[int, str]) -> int | None:
        """Returns the step to read next, or None; removes from `damaged` the one that has been deleted."""
        # Process 0 decides, because a network file system may show the other processes something older.
        there: list[int] = []
        failed: OSError | None = None
        try:
            there = self._there() if jax.process_index() == 0 else []
        except OSError as e:
            failed = e
        found = max((s for s in there if s not in damaged and step in (s, None)), default=None)
        gone = [s for s in [*damaged][-1:] if s not in there and step is None]  # deleted by its writer
        mine = {"step": step, "next": found, "gone": gone, "newest": there[-_FEW:]}
        mine["problem"] = str(failed or "")
        # A process that is late here has not restored or saved before; the others wait for it as they do at a save.
        try:
            told, *others = [json.loads(text) for text in tell_all(json.dumps(mine), limits.start)]
            if told["problem"]:
                raise failed or OSError(told["problem"])
        finally:
            failed = None  # the error refers to this frame, and this frame to the lock
        asked = {process: e["step"] for process, e in enumerate([told, *others])}
        if len({*asked.values()}) > 1:
            raise ValueError(
                f"jdp.{VERB}: the processes restore different steps: {by_value(asked)}; all restore the same. Pass one "
                f"step in all processes, or None."
            )
        for s in told["gone"]:
            del damaged[s]
        if step is not None and step not in damaged and told["next"] is None:
            has = "it has" if len(told["newest"]) < _FEW else "the newest are"
            raise ValueError(
                f"jdp.{VERB}: {self._directory} has no step {step}; {has} {told['newest'] or 'none'}. "
                f"Pass one of these, or None."
            )
        return told["next"]

    def _rename(self, steps: list[int]) -> None:
        for s in steps:
            name = free_name(self._directory, f"{s}.set-aside")
            (self._directory / str(s)).rename(self._directory / name)
            why = "is damaged" if s in self._damaged else f"is newer than step {self.newest}, where this run goes on"
            say(f"jdp: step {s} in {self._directory} {why}; it is now called {name}", sys.stdout)


def listed(damaged: dict[int, str]) -> str:
    """Returns a text that names the newest of them, each with what is wrong with it."""
    some = ", and ".join(f"step {s} is damaged ({why})" for s, why in [*damaged.items()][:_FEW])
    return some + (f", and so are {len(damaged) - _FEW} more" if len(damaged) > _FEW else "")
