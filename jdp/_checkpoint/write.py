"""Writes one checkpoint beside the training; one that fails takes no other with it, and the error says what is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._processes.coordination import client
from .at_exit import tell_loss, wait_at_exit
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
        self._step: int | None = None  # the one that is being saved
        self._before: int | None = None  # the newest step before it
        self._interrupted = False  # whether its save was, and may go on or not
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._unheard: list[str] = []  # what `wait` is going to say of it
        self._news: list[str] = []  # what the thread has to tell
        self._told: set[int] = set()  # the steps of which that was
        self._lock = Lock(directory)
        self.process = os.getpid()
        # Not before the thread has ended, which holds `self`.
        weakref.finalize(self, _dropped, self._lock, self._unheard, self.process)

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
        self._step, self._before = step, self._steps.newest
        if self._quiet.abandoned:  # writes of a save that failed may have come when it had been deleted
            self._delete_unfinished()
        try:
            self._steps.newest = step
            wait_at_exit(self)
            if self._orbax is None:
                self._orbax = _checkpointer()
            items = {ARRAYS: ocp.args.PyTreeSave(arrays), MANIFEST: content}
            self._orbax.save(self._directory / str(step), args=ocp.args.Composite(**items))
            self._thread = threading.Thread(target=self._finish, args=(next(_saves),), name="jdp-saves")
            self._thread.start()
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failed(e)
        except BaseException:  # Ctrl-C
            self._steps.newest, self._quiet.abandoned, self._interrupted = self._before, True, True
            if self._thread is not None and not self._thread.is_alive():
                self._thread = None
            raise

    def wait(self) -> None:
        """Waits until the save that is running, if any, is complete on the disk, and older ones are deleted."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._interrupted:
            self._settle()
        failure, self._failure = self._failure, None
        self._unheard.clear()
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
            self._unheard.append(self.loss(e))
            _clear(e)
            del self  # the frames of the error lead here, and the writer has the error: it would hold itself
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

    def _settle(self) -> None:
        """After a save that was interrupted: waits for what was begun of it, and takes note if it is complete."""
        if self._orbax is not None:
            with contextlib.suppress(Exception):  # nobody was told that it is saved
                self._orbax.wait_until_finished()
        if self._step in steps_in(self._directory):
            self._steps.newest = self._step
        self._interrupted = False

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
        self._steps.newest, self._quiet.abandoned = self._before, True
        self._delete_unfinished()
        _clear(error)
        raise RuntimeError(self.loss(error)) from error

    def loss(self, error: BaseException) -> str:
        """What says that this error has ended the save that was running."""
        last = self._steps.latest()
        left = "there is no checkpoint yet" if last is None else f"step {last} is the newest complete checkpoint"
        why, way = error, "Make room there, or make it writable, and save again."
        if gone := absent(error):
            why, way = gone, "All processes of a job save together: start the job again, and it goes on from there."
        elif "interpreter shutdown" in str(error):  # Python 3.12.0 to 3.12.2 begin no thread while a program ends
            way = "Close the Checkpointer before the program ends, or use it in a with statement."
        elif not isinstance(error, Exception):
            why, way = f"{type(error).__name__} came before it was complete", "Start the program again."
        return f"jdp.{VERB}: step {self._step} was not saved in {self._directory}: {why}; {left}. {way}"

    def _delete_unfinished(self) -> None:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the error to tell is the save's; the next Checkpointer tries again
                remove_unfinished(self._directory)


def _dropped(lock: Lock, unheard: list[str], process: int) -> None:
    """The end of a writer, whom nobody will ask what has become of its save."""
    lock.release()
    if process == os.getpid():  # and not a child that was forked
        for text in unheard:
            tell_loss(text)


def _clear(error: BaseException | None) -> None:
    """Takes the variables out of an error's frames: Orbax keeps the error in one of them, and so all that they hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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
    apart = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=f"jdp{next(_writers)}")
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
