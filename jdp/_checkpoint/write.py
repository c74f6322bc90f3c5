"""Writes one checkpoint beside the training; one that fails takes no other with it, and the error says what is left."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._processes.coordination import client
from .._processes.watch import limits
from .directory import Lock, Quiet, delete, is_local, make_writable, remove_unfinished, steps_in
from .items import VERB, encode, manifest
from .read import ARRAYS, MANIFEST, absent, intact, together
from .steps import Steps, listed

_saves, _writers = itertools.count(), itertools.count()  # the same in all processes
_PATIENCE = 1200  # seconds for which the processes wait for the deletions of process 0, as Orbax for its writes


class Writer:
    """The right to write in the directory, and the save that is running there."""

    def __init__(self, directory: Any, keep: int, steps: Steps, quiet: Quiet) -> None:
        self._directory, self._keep, self._steps, self._quiet = directory, keep, steps, quiet
        self._orbax: Any = None  # made by the first save: who only reads has none
        self._before: int | None = None  # the newest step before the one that is being saved
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._news: list[str] = []  # what the thread has to tell
        self._told: set[int] = set()  # the steps of which that was
        self._lock = Lock(directory)
        weakref.finalize(self, self._lock.release)  # not before the thread has ended, which holds `self`

    def prepare(self) -> None:
        """Makes sure that this process can write, or raises; of a job, process 0 takes the lock for all."""
        if jax.process_index() == 0:
            self._lock.acquire()
        if jax.process_count() > 1:
            make_writable(self._directory)

    def write(self, step: int, leaves: Mapping[str, Any], data: Any, apart: bool) -> None:
        """Begins the save, and returns when the arrays are on the host."""
        import orbax.checkpoint as ocp

        arrays = encode(leaves)
        content = ocp.args.JsonSave(manifest(step, leaves, arrays, data, apart))
        self._steps.set_aside(step)
        self._before, self._steps.newest = self._steps.newest, step
        if self._quiet.abandoned:  # writes of a save that failed may have come when it had been deleted
            self._delete_unfinished()
        try:
            if self._orbax is None:
                self._orbax = _checkpointer()
            items = {ARRAYS: ocp.args.PyTreeSave(arrays), MANIFEST: content}
            self._orbax.save(self._directory / str(step), args=ocp.args.Composite(**items))
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failed(e)
        self._thread = threading.Thread(target=self._finish, args=(next(_saves),), name="jdp-saves")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the save that is running, if any, is complete on the disk, and older ones are deleted."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            self._failed(failure)
        while self._news:
            warnings.warn(self._news.pop(0), stacklevel=4)  # the user's line, beyond `save`

    def close(self) -> None:
        """Ends Orbax's threads, and gives the lock back."""
        if self._orbax is not None:
            with contextlib.suppress(Exception):  # what has failed, wait has told
                self._orbax.close()
        self._lock.release()

    def _finish(self, number: int) -> None:
        """In its own thread: the end of the save, and then the deletions."""
        try:
            self._orbax.wait_until_finished()
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failure = e
            return
        if jax.process_index() == 0:
            try:
                self._delete_old()
            except Exception as e:  # noqa: BLE001 the save itself has not failed
                self._news.append(
                    f"jdp.{VERB}: in {self._directory} what is older than the newest {self._keep} could not be "
                    f"deleted: {e}; it takes room there. Delete it by hand."
                )
        if together():
            # Here, for the next thing that all do together is a collective, which has a time-out.
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # a process that has ended ends the job elsewhere
                client().wait_at_barrier(f"jdp/saved/{number}", _PATIENCE * 1000)

    def _delete_old(self) -> None:
        """Deletes what is older than the newest `keep`, but never the newest that can be read back."""
        steps = steps_in(self._directory)
        if len(steps) <= self._keep:
            return
        damaged: dict[int, str] = {}
        # What has just been written is read from the system's memory, which does not tell what the disk keeps of it; if
        # there is another, that one is read, and for the most part no more. Cloud storage keeps what it was given.
        for whole in reversed(steps[:-1] if self._keep > 1 else steps):
            if not is_local(self._directory) or not (problem := intact(self._directory / str(whole))):
                break
            damaged[whole] = problem
        else:
            whole = None
        if {*damaged} - self._told:
            kept = f"step {whole} is kept, which is intact" if whole is not None else "nothing is deleted"
            self._news.append(
                f"jdp.{VERB}: in {self._directory} {listed(damaged)}; {kept}. Look after the disk: what is saved there "
                f"does not stay as it is."
            )
            self._told |= {*damaged}
        for step in steps[: -self._keep] if whole is not None else ():
            if step != whole:
                delete(self._directory / str(step))

    def _failed(self, error: Exception) -> None:
        step, self._steps.newest = self._steps.newest, self._before
        self._quiet.abandoned = True
        self._delete_unfinished()
        last = self._steps.latest()
        left = "there is no checkpoint yet" if last is None else f"step {last} is the newest complete checkpoint"
        way = "Make room there, or make it writable, and save again."
        if why := absent(error):
            way = "All processes of a job save together: start the job again, and it goes on from there."
        raise RuntimeError(
            f"jdp.{VERB}: step {step} was not saved in {self._directory}: {why or error}; {left}. {way}"
        ) from error

    def _delete_unfinished(self) -> None:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the error to tell is the save's; the next Checkpointer tries again
                remove_unfinished(self._directory)


def _checkpointer() -> Any:
    """Orbax's `AsyncCheckpointer`, of one item with the arrays and one with what is said about them."""
    import orbax.checkpoint as ocp

    kinds = ocp.type_handlers
    arrays = kinds.create_type_handler_registry(
        # Of a replicated array the first copy is written, which is the one that the fingerprint was made of.
        (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, kinds.NumpyHandler()),
    )
    # Two Checkpointers may save the same step at once; their processes must not wait at each other's barriers. By a
    # number, for a directory may have another name on another machine.
    apart = ocp.options.MultiprocessingOptions(
        active_processes={0} if limits.recovers else None, barrier_sync_key_prefix=f"jdp{next(_writers)}"
    )
    tree = ocp.PyTreeCheckpointHandler(type_handler_registry=arrays, multiprocessing_options=apart)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.PyTreeSave, tree)
    registry.add(MANIFEST, ocp.args.JsonSave, ocp.JsonCheckpointHandler(multiprocessing_options=apart))
    # A directory that cannot be made leaves threads of Orbax waiting, and the process with them, if a thread was to
    # make it. In many processes it has to be one: else Orbax runs collectives in a thread that is not the user's.
    how = ocp.AsyncOptions(create_directories_asynchronously=together())
    options = ocp.CompositeOptions(async_options=how, multiprocessing_options=apart)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, handler_registry=registry)
    return ocp.AsyncCheckpointer(handler, async_options=how, multiprocessing_options=apart)
