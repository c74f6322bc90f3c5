"""The directory of a `Checkpointer`, and Orbax's manager of it."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import jax

from ._checkpoint_items import VERB
from ._checkpoint_read import ARRAYS, MANIFEST, array_handler


def absolute(directory: str | os.PathLike[str]) -> Any:
    """The absolute path that is meant; `~` is the user's home."""
    from etils import epath  # Orbax's own paths: those of cloud storage too

    path = os.fspath(directory)
    return epath.Path(path if "://" in path else os.path.abspath(os.path.expanduser(path)))


def make_writable(directory: Any) -> None:
    """Makes the directory if need be, and a file in it.

    Raises:
        OSError: either is impossible.
    """
    probe = directory / f".jdp-{os.getpid()}-{jax.process_index()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as e:
        raise type(e)(
            f"jdp.{VERB}: {directory} cannot be written: {e.strerror or e}; checkpoints are made there by this user. "
            f"Make it writable, or pass another directory.",
        ) from e


def manager(directory: Any, keep: int) -> Any:
    """Orbax's `CheckpointManager`, of one item with the arrays and one with what is said about them."""
    import orbax.checkpoint as ocp

    class Manager(ocp.CheckpointManager):
        def reached_preemption(self, step: int) -> bool:
            # Orbax asks JAX's service too, and in its own thread with the numbers of steps long gone: the processes
            # would then agree to stop at a step that is over.
            return False

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    arrays, manifests = array_handler(), ocp.JsonCheckpointHandler()
    for kind, handler in ((ocp.args.PyTreeSave, arrays), (ocp.args.PyTreeRestore, arrays)):
        registry.add(ARRAYS, kind, handler)
    for kind, handler in ((ocp.args.JsonSave, manifests), (ocp.args.JsonRestore, manifests)):
        registry.add(MANIFEST, kind, handler)
    # A directory that cannot be made leaves threads of Orbax waiting, and the process with them, if a thread was to
    # make it. In many processes it has to be one: else Orbax runs collectives in a thread that is not the user's.
    how = ocp.AsyncOptions(create_directories_asynchronously=jax.process_count() > 1)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=False, async_options=how)
    return Manager(directory, options=options, handler_registry=registry)


class Quiet(logging.Filter):
    """Keeps to itself what Orbax logs, as long as a Checkpointer is open: its failures come as exceptions.

    So too the reads and writes that Orbax abandons when another fails, and which report in their own threads that
    nobody waits for them any more.
    """

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("absl").addFilter(self)
        self.abandoned = False  # whether some are; they may report at any time from then on
        self._before, self._hook = sys.unraisablehook, self._unraisable  # one object: each access makes another
        sys.unraisablehook = self._hook

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def close(self) -> None:
        """Ends it."""
        logging.getLogger("absl").removeFilter(self)
        if sys.unraisablehook is self._hook and not self.abandoned:
            sys.unraisablehook = self._before

    def _unraisable(self, report: Any) -> None:
        if not (isinstance(report.exc_value, RuntimeError) and str(report.exc_value) == "Event loop is closed"):
            self._before(report)


def free_name(directory: Any, name: str) -> str:
    """The name, or with a number behind it if it is taken."""
    taken = {path.name for path in directory.iterdir()}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 10**6))) if n not in taken)


def remove_unfinished(directory: Any, patience: float = 5) -> None:
    """Deletes what saves have left that were killed, or failed.

    Args:
        directory: that of the checkpoints.
        patience: the seconds for which a failed save may go on writing there: Orbax waits for none of the writes that
            it abandons.

    Raises:
        OSError: something cannot be deleted.
    """
    end = time.monotonic() + patience
    for path in directory.iterdir() if directory.is_dir() else ():
        while ".orbax-checkpoint-tmp" in path.name and path.is_dir():
            try:
                path.rmtree()
            except OSError as e:
                if time.monotonic() > end:
                    raise type(e)(
                        f"jdp.{VERB}: {path} cannot be deleted: {e.strerror or e}; it is what is left of a save that "
                        f"did not end, and nothing reads it. Delete it by hand, or pass another directory."
                    ) from e
                time.sleep(0.02)
