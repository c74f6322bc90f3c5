"""Writes one checkpoint while training goes on; a failed save harms no other, and its error says what is left.

The program waits for it at its end, and reports on stderr a save that is lost.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 its exit hook has to be registered before `_finish`
import contextlib
import functools
import itertools
import os
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from .._processes.coordination import AbsentError, client, ended, flush, say
from .._processes.last_words import before_failing
from .._processes.places import limits, named
from .._processes.watch import watch
from .directory import Lock, Quiet, delete, is_local, make_writable, remove_unfinished, steps_in
from .items import VERB, encode, manifest
from .read import ARRAYS, MANIFEST, absent, intact
from .steps import Steps, listed

_saves, _writers = itertools.count(), itertools.count()  # the same in all processes
_SLICE = 0.5  # seconds between two looks for the others while the save is waited for
_PATIENCE = 1200  # seconds that the processes wait for the deletions of process 0, as long as Orbax for its writes
_STRAYS = 60.0  # seconds, at most, that threads of an interrupted save may take


class Writer:
    """The right to write in the directory, and the save that is running there."""

    def __init__(self, directory: Any, keep: int, steps: Steps, quiet: Quiet) -> None:
        self._directory, self._keep, self._steps, self._quiet = directory, keep, steps, quiet
        self._orbax: Any = None  # made by the first save: a reader has none
        self._number: int | None = None  # of what Orbax has made, the same in all processes
        self._step: int | None = None  # the one that is being saved
        self._before: int | None = None  # the newest step before it
        self._interrupted = False  # whether its save was interrupted; it may still go on
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # set when the thread is about to end
        self._failure: Exception | None = None
        self._unheard: list[str] = []  # the message of a failure that `wait` has not raised yet
        self._news: list[str] = []  # the thread's warnings, which `wait` issues
        self._told: set[int] = set()  # the damaged steps that it has warned of
        self._lock = Lock(directory)
        # It runs only after the thread has ended, because that holds `self`.
        weakref.finalize(self, _dropped, self._lock, self._unheard, os.getpid())

    @property
    def failed(self) -> bool:
        """Whether a save has failed, and `wait` has not raised its error yet."""
        return self._failure is not None

    def prepare(self) -> int | None:
        """Makes sure that this process can write, or raises; in a job, process 0 takes the lock for all.

        Returns what tells this writer from the others of this process; None if it has not saved since it was closed.
        """
        if jax.process_index() == 0:
            self._lock.acquire()
        if jax.process_count() > 1:
            make_writable(self._directory)
        return self._number

    def write(self, step: int, leaves: Mapping[str, Any], data: Any, apart: bool) -> None:
        """Begins the save, and returns when the arrays are on the host."""
        import orbax.checkpoint as ocp

        number = next(_saves)  # before anything can fail here, because the processes count alike
        arrays = encode(leaves)
        content = ocp.args.JsonSave(manifest(step, leaves, arrays, data, apart))
        self._steps.set_aside(step)
        self._step, self._before = step, self._steps.newest
        if self._quiet.abandoned:  # a failed save may have written after it was deleted
            self._delete_unfinished()
        try:
            self._steps.newest = step
            _register()
            _open.add(self)
            if self._orbax is None:
                self._number = next(_writers)
                self._orbax = _checkpointer(self._number)
            items = {ARRAYS: ocp.args.PyTreeSave(arrays), MANIFEST: content}
            self._orbax.save(self._directory / str(step), args=ocp.args.Composite(**items))
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._finish, args=(number, self._ended), name="jdp-saves")
            self._thread.start()
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failed(e)
        except BaseException:  # Ctrl-C
            self._steps.newest, self._quiet.abandoned, self._interrupted = self._before, True, True
            if self._thread is not None and not self._thread.is_alive():
                self._thread = None
            raise

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the save that is running, if any, is complete on the disk, and older ones are deleted.

        Raises:
            RuntimeError: the save has failed, or is not complete after so many seconds, or another process that saves
                with this one is stopped; then it is left alone.
        """
        if (thread := self._thread) is not None:
            self._join(thread, seconds)
            if thread.is_alive():
                raise RuntimeError(self.leave(TimeoutError("the job ended first")))
            if self._thread is thread:  # else another thread has waited, too
                self._thread = None
        if self._interrupted:
            self._settle()
        failure, self._failure = self._failure, None
        self._unheard.clear()
        if failure is not None:
            self._failed(failure)
        while self._news:
            warnings.warn(self._news.pop(0), stacklevel=4)  # the user's line, beyond `save`

    def _join(self, thread: threading.Thread, seconds: float | None) -> None:
        """Waits for the thread that saves, or so many seconds; raises if another process is stopped by then."""
        over = None if seconds is None else time.monotonic() + max(_MOMENT, seconds)
        while thread.is_alive() and (over is None or time.monotonic() < over):
            moment = _SLICE if over is None else max(0.0, min(_SLICE, over - time.monotonic()))
            if self._ended.wait(moment):  # Ctrl-C in `join` would make Python take a thread that runs for ended
                thread.join(moment)
            silent = watch.silent(range(jax.process_count())) if jax.process_count() > 1 and thread.is_alive() else []
            silent = [p for p in silent if p not in ended()] if silent else silent
            if silent and not watch.is_enough(limits.step / 2, silent):  # not known to be stopped: it may only be slow
                silent = watch.silent(silent, limits.step)
            if silent and thread.is_alive():
                raise AbsentError(self.leave(TimeoutError(f"{named(silent)} {watch.why_silent(silent)}")))

    def leave(self, why: BaseException) -> str:
        """Returns the message that the running save is lost; nothing waits for that save from then on."""
        _open.discard(self)
        return self.loss(why)

    def close(self) -> None:
        """Ends Orbax's threads and releases the lock, unless a save still runs, which another writer would delete."""
        if self._thread is not None:
            return
        if self._orbax is not None:
            with contextlib.suppress(Exception):  # `wait` has raised what failed
                self._orbax.close()
            self._orbax = self._number = None  # a later save makes another
        self._lock.release()
        self._steps.may_change()

    def _finish(self, number: int, ended: threading.Event) -> None:
        """Waits for the end of the save, then deletes old checkpoints; runs in its own thread."""
        try:
            self._orbax.wait_until_finished()
        except Exception as e:  # noqa: BLE001 Orbax raises all kinds
            self._failure = e
            self._unheard.append(self.loss(e))
            _clear(e)
            ended.set()
            del self  # the error's frames refer to `self`, and `self` to the error: no cycle
            return
        if jax.process_index() == 0:
            try:
                self._delete_old()
            except Exception as e:  # noqa: BLE001 the save itself has not failed
                self._news.append(
                    f"jdp.{VERB}: in {self._directory} what is older than the newest {self._keep} could not be "
                    f"deleted: {e}; it takes room there. Delete it by hand."
                )
        if jax.process_count() > 1:
            # The processes wait here, because the next thing they do together is a collective, which has a time-out.
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # a process that has ended ends the job elsewhere
                client().wait_at_barrier(f"jdp/saved/{number}", _PATIENCE * 1000)
        ended.set()

    def _settle(self) -> None:
        """Waits for what an interrupted save has begun, and notes its step as the newest if it is complete."""
        if self._orbax is not None:
            with contextlib.suppress(Exception):  # the interrupted `save` has already raised
                self._orbax.wait_until_finished()
        over = time.monotonic() + _STRAYS
        for thread in threading.enumerate():  # Ctrl-C in `start`: Orbax does not know a thread that writes
            if type(thread).__module__.startswith("orbax.") and thread.is_alive():
                thread.join(max(0.0, over - time.monotonic()))
        if self._step in steps_in(self._directory):
            self._steps.newest = self._step
        self._interrupted = False

    def _delete_old(self) -> None:
        """Deletes what is older than the newest `keep`, but never the newest that can be read back."""
        steps = steps_in(self._directory)
        if len(steps) <= self._keep:
            return
        damaged: dict[int, str] = {}
        # What has just been written is read from the system's cache, which does not show what the disk keeps. So an
        # older checkpoint is read if there is one, in most cases only one. Cloud storage keeps what it was given.
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
        """Returns the message that this error has ended the save that was running."""
        last = None
        try:
            last = self._steps.latest()
            left = "there is no checkpoint yet" if last is None else f"step {last} is the newest complete checkpoint"
        except OSError as e:
            left = f"the directory cannot be read ({e})"
        why, way = error, "Make room there, or make it writable, and save again."
        if gone := absent(error):
            why, way = gone, "All processes of a job save together: start the job again, and it goes on from there."
        elif "interpreter shutdown" in str(error):  # Python 3.12.0 to 3.12.2 start no thread while a program ends
            way = "Close the Checkpointer before the program ends, or use it in a with statement."
        elif isinstance(error, TimeoutError) and error.errno is None:  # of `_finish_within`, and not of a disk
            way = "Start the job again, and it goes on from there."
        elif not isinstance(error, Exception):
            why, way = f"{type(error).__name__} came before it was complete", "Start the program again."
        if self._step is not None and last == self._step:  # it has its name; what comes after has not ended
            what = gone or str(error) or type(error).__name__
            return f"jdp.{VERB}: step {last} is complete in {self._directory}; only the end of its save failed: {what}"
        return f"jdp.{VERB}: step {self._step} was not saved in {self._directory}: {why}; {left}. {way}"

    def _delete_unfinished(self) -> None:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the save's error matters; the next Checkpointer tries again
                remove_unfinished(self._directory)


def _dropped(lock: Lock, unheard: list[str], process: int) -> None:
    """Releases the lock of a dropped writer, and reports the failures that no `wait` has raised."""
    lock.release()
    if process == os.getpid():  # and not a forked child
        for text in unheard:
            tell_loss(text)


def _clear(error: BaseException | None) -> None:
    """Clears the variables of an error's frames: Orbax keeps the error in one, and with it all that they hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _checkpointer(number: int) -> Any:
    """Makes Orbax's `AsyncCheckpointer`, with one item for the arrays and one for the manifest."""
    import orbax.checkpoint as ocp

    kinds = ocp.type_handlers
    arrays = kinds.create_type_handler_registry(
        # The first copy of a replicated array is written, because the fingerprint was made of that copy.
        (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, kinds.NumpyHandler()),
    )
    # Two Checkpointers may save the same step at once; their processes must not wait at each other's barriers. The
    # prefix is a number, because a directory may have another name on another machine.
    apart = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=f"jdp{number}")
    tree = ocp.PyTreeCheckpointHandler(type_handler_registry=arrays, multiprocessing_options=apart)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.PyTreeSave, tree)
    registry.add(MANIFEST, ocp.args.JsonSave, ocp.JsonCheckpointHandler(multiprocessing_options=apart))
    # If a thread makes the directories and fails, threads of Orbax wait forever, and the process with them. With
    # several processes a thread has to make them: otherwise Orbax runs collectives outside of the user's thread.
    how = ocp.AsyncOptions(create_directories_asynchronously=jax.process_count() > 1)
    options = ocp.CompositeOptions(async_options=how, multiprocessing_options=apart)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, handler_registry=registry)
    return ocp.AsyncCheckpointer(handler, async_options=how, multiprocessing_options=apart)


_MOMENT = 0.2  # seconds, at least, to see that a save has ended
_FOR_THE_TEXT = 2.0  # seconds
_open: weakref.WeakSet[Writer] = weakref.WeakSet()  # those that the program waits for when it ends
os.register_at_fork(after_in_child=_open.clear)  # a child leaves its parent's saves alone


@functools.cache  # once; a forked child inherits the hook
def _register() -> None:
    # `atexit` comes too late: Orbax's threads hand work to those of concurrent.futures, which accept none by then.
    # Those threads end by a hook of this kind, and the hook that was registered last is called first.
    before_failing(_finish_within)
    threading._register_atexit(_finish)  # pyright: ignore[reportAttributeAccessIssue]: private, and in CPython since 3.9
    atexit.register(_finish, late=True)  # in case Ctrl-C in an earlier hook has skipped the rest


def _finish(late: bool = False) -> None:
    lost = False
    for writer in [*_open]:
        try:
            writer.wait()
        except Exception as e:  # noqa: BLE001 a program ends here, whatever it is
            lost = True
            tell_loss(str(e))
        except BaseException as e:  # Ctrl-C: the user does not want to wait
            _open.clear()
            tell_loss(writer.loss(e))
            raise
    if late and lost:  # functions that are registered now are not called
        _end()


def _finish_within(seconds: float) -> None:
    """Waits so long for the saves of a process of a job that has failed, and says which of them are lost."""
    over = time.monotonic() + seconds
    for writer in [*_open]:
        lost: list[str] = []
        late, stopped = threading.Event(), threading.Event()

        def wait(writer: Writer = writer, lost: list[str] = lost, done: threading.Event = stopped) -> None:
            try:
                writer.wait()
            except Exception as e:  # noqa: BLE001 whatever it is, the process ends
                lost.append(str(e))
            done.set()

        def tell(writer: Writer = writer, done: threading.Event = late) -> None:
            say(writer.loss(TimeoutError("the job ended first")))
            done.set()

        threading.Thread(target=wait, daemon=True).start()
        if not stopped.wait(max(_MOMENT, over - time.monotonic())):
            threading.Thread(target=tell, daemon=True).start()  # it lists the directory, which may take forever, too
            late.wait(_FOR_THE_TEXT)
        for text in lost:
            say(text)


def abandon(writer: Writer, why: BaseException) -> None:
    """Reports the save that is running as lost, and lets the program end without it."""
    tell_loss(writer.leave(why))
    # Python would wait for the threads that save before it calls the functions of `atexit`.
    threading._register_atexit(_fail, os.getpid())  # pyright: ignore[reportAttributeAccessIssue]: as above


def tell_loss(text: str) -> None:
    """Prints on stderr what was lost, because no caller is left to raise to; the exit status will not be 0."""
    atexit.register(_fail, os.getpid())
    say(text)


def _fail(process: int) -> None:
    """Runs all other exit functions, then ends with status 1: it is registered last, so `atexit` calls it first."""
    if process != os.getpid():
        return
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    _end()


def _end() -> NoReturn:
    flush()
    os._exit(1)
