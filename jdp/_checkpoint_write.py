"""Writes one checkpoint beside the training; one that fails takes no other with it, and the error says what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax

from ._checkpoint_directory import Quiet, manager, remove_unfinished
from ._checkpoint_items import VERB, encode, manifest
from ._checkpoint_read import ARRAYS, MANIFEST
from ._checkpoint_steps import Steps


class Writer:
    """Orbax's manager of the directory, and the save that it runs."""

    def __init__(self, directory: Any, keep: int, steps: Steps, quiet: Quiet) -> None:
        self._directory, self._steps, self._quiet = directory, steps, quiet
        self._manager: Any = manager(directory, keep)
        self._running: int | None = None  # the step whose save may not have ended yet

    def write(self, step: int, leaves: Mapping[str, Any], data: Any, apart: bool) -> None:
        """Begins the save, and returns when the arrays are on the host.

        Raises:
            RuntimeError: it could not begin.
            ValueError: the directory holds a newer checkpoint, and nothing was restored.
        """
        import orbax.checkpoint as ocp

        if self._steps.set_aside(step):
            self._manager.reload()
        arrays = encode(leaves)
        content = ocp.args.JsonSave(manifest(step, leaves, arrays, data, apart))
        items = {ARRAYS: ocp.args.PyTreeSave(arrays), MANIFEST: content}
        self._steps.advance(step)
        self._running = step
        if self._quiet.abandoned:  # writes of a save that failed may have come when it had been deleted
            self._delete_unfinished()
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failed(e)

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
        """Ends Orbax's threads."""
        with contextlib.suppress(Exception):  # what has failed, wait has told
            self._manager.close()

    def _failed(self, error: Exception) -> None:
        step, self._running = self._running, None
        self._quiet.abandoned = True
        if step is not None:
            self._steps.take_back()
        self._delete_unfinished()
        self._manager.reload()
        last = self._steps.latest()
        raise RuntimeError(
            f"jdp.{VERB}: step {step} was not saved in {self._directory}: {error}; "
            f"{'there is no checkpoint yet' if last is None else f'step {last} is the newest complete checkpoint'}. "
            f"Make room there, or make it writable, and save again."
        ) from error

    def _delete_unfinished(self) -> None:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the error to tell is the save's; the next Checkpointer tries again
                remove_unfinished(self._directory)
