"""`Checkpointer`: after `save(step, state)`, `restore(state)` gives it back bit for bit, on any number of devices."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from .._core.layout import Tree, as_int
from .._core.programs import refuse_freed
from .._processes.agree import difference
from .._processes.coordination import say
from .._processes.exchange import by_value
from .._processes.last_words import time_for_saves
from .._processes.places import limits
from .._processes.watch import watch
from .directory import Quiet, absolute
from .items import VERB, as_json, decode, describe, digest, encode, fingerprints, leaves_of, replicas_of
from .preemption import Preemption
from .ray_run import RayRun
from .read import tell_all
from .replay import current
from .steps import Steps
from .write import Writer, abandon, tell_loss

if TYPE_CHECKING:
    from etils import epath  # imported where it is needed: the import is slow

T = TypeVar("T")


class Checkpointer:
    """Saves a training state while training goes on, and restores the newest intact checkpoint.

    `checkpointer = jdp.Checkpointer("run", every=100)`; before the loop `state, data = checkpointer.restore(state)`;
    in every step `checkpointer.save(number, state)`, which saves at multiples of `every`.

    It is built on Orbax's `AsyncCheckpointer`, and adds what a long run needs:

    * every array is saved with a fingerprint of its bits, and checked against it when it is restored; `restore` skips
      a checkpoint that is damaged in any way, takes the newest intact one before it, and warns;
    * a `kill -9` at any moment loses no checkpoint that was there before: one is made under another name and
      renamed when it is complete; older ones are deleted after that, and only when one of those that stay has been
      read back from the disk and is intact;
    * a program that ends without `close`, by an exception or Ctrl-C too, waits for the save that is running; if that
      fails, a line on stderr says so, and the exit status is not 0;
    * one writer: from its first `save` until it is closed, dropped or killed a Checkpointer holds a lock (`flock` on
      the file `.jdp-lock`; in a job process 0 holds it for all), and a second that saves there is refused;
    * any number of readers, also while another writes: `restore` changes nothing, and needs no permission to write;
    * nothing outside the directory is read or written: links, FIFOs and devices in a checkpoint, files that are too
      large and manifests of another step count as damage;
    * a SIGTERM, as a cluster sends before it takes the machine away: the next `save` saves its step, whatever `every`
      is, waits until it is on the disk, prints that, and raises `SystemExit(0)`. Under `jax.distributed` all processes
      do that in the same step, whichever of them got the signal. Call `save` in every step.

    Make it in every process, after `jax.distributed.initialize`, and call its methods in all of them. All processes
    must see the directory.

    Args:
        directory: where the checkpoints are, one directory for each, named by its step. The first save makes it if it
            is not there. It may be a link. Cloud storage (`gs://...`) has no locks and no links: there the user has to
            make sure that only one job saves.
        keep: how many are kept, the newest. If they are found to be damaged, the newest intact one before them is kept
            too. With 1, only what has just been written can be checked, and the disk may yet lose that.
        every: save at steps that are multiples of this.
        ray: True in a loop of Ray Train. `directory` is then the name of a folder in that of Ray's run. Each checkpoint
            is reported to Ray when it is complete, with `{"step": step}`: at the next save, `wait` or `close`.
            `restore` takes the newest, whether or not it was reported to Ray. Ray's
            `CheckpointConfig(num_to_keep=...)` sets how many are kept, and `keep` does not. After Ray's notice that a
            node will be taken away, as after a SIGTERM, all processes save in the same step; then they go on, until
            Ray ends them and starts them again.

    Attributes:
        directory: the directory, absolute and without links.

    Raises:
        OSError: `directory` is not a directory.
        RuntimeError: `ray` is True, and this process is no worker of Ray Train.
        ValueError: `keep` or `every` is less than 1; or the path of `directory` has a backslash, `://` in the middle
            or a character that is not UTF-8; or, with `ray`, it is not the name of a folder.

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

    Source: orbax.checkpoint.AsyncCheckpointer and CheckpointManager.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3, every: int = 1, *, ray: bool = False) -> None:
        keep, self._every = _positive("keep", keep), _positive("every", every)
        self._ray = RayRun(directory) if ray else None
        if self._ray is not None:
            directory, keep = self._ray.directory, sys.maxsize  # only Ray may delete them: it expects to find them
        self.directory: epath.Path = absolute(directory)
        self._quiet = Quiet()
        self._replay = current()  # the replay that this run belongs to, if any: then nothing is written
        self._steps = Steps(self.directory, None if self._replay is None else self._replay.last(self.directory))
        self._writer = Writer(self.directory, keep, self._steps, self._quiet)
        self._preemption = Preemption()
        # A Checkpointer that is dropped must not go on holding SIGTERM back.
        self._finalizer = weakref.finalize(self, _let_go, self._preemption, self._quiet)
        if self._replay is not None:
            self._finalizer()  # a replay never acts on a SIGTERM

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint that was not found to be damaged, or None."""
        return self._steps.latest()

    def save(self, step: int, state: Tree, data: Any = None) -> bool:
        """Saves the state if `step` is a multiple of `every`, or if this is the step at which a SIGTERM ends the job.

        Call `checkpointer.save(number, state, data=cursor)` in every step. It returns as soon as the arrays are on the
        host, so that they may be donated to the next step; the files are written while training goes on. Only one save
        runs at a time: the next waits for it.

        Args:
            step: the number of the step that has just been made, 0 or more; it grows from save to save.
            state: a `jdp.TrainState`, any pytree of arrays and numbers, an NNX object, or a pytree of NNX objects.
            data: the position in the data from which to go on: None, numbers, strings, lists, dicts with string keys,
                together at most 32 MiB. It is copied. It may differ between processes, and each gets its own back; in
                a job with another number of processes `restore` returns the list of all of them. If it was the same
                in all, it comes back as it was, not as a list.

        Returns:
            True if this call saved the step; False also if the step is saved already.

        Raises:
            SystemExit: with code 0, after a SIGTERM (with `ray` all processes go on).
            RuntimeError: another job saves there; the save before this one has failed, or this one could not begin; or
                another process of the job has ended. The checkpoints that were complete are untouched.
            OSError: the directory cannot be written (in a job of several processes: RuntimeError).
            TypeError: `step` is no integer, `data` is no JSON, or a leaf is neither an array nor a number.
            ValueError: `step` is negative or less than one that was saved, or not the same in all processes; or the
                directory holds a newer checkpoint, and nothing was restored; or the leaves, or a leaf that each
                process holds for itself, are not the same in all; or two leaves have one path; or `data` is too large.

        Warns:
            UserWarning: checkpoints on the disk are damaged, so an older one is kept as well; or the file system has
                no locks.

        Example:
            >>> import jdp, numpy as np, tempfile
            >>> with jdp.Checkpointer(tempfile.mkdtemp(), every=10) as checkpointer:
            ...     [checkpointer.save(number, {"w": np.ones(2)}, data=64 * number) for number in (9, 10, 11)]
            [False, True, False]
        """
        step = _number(step)
        if self._replay is not None:
            self._replay.saved(self.directory, step, leaves_of(state))
            return False
        if self._ray is not None and self._ray.gives_notice():
            self._preemption.tell()
        if self._writer.failed and jax.process_count() == 1:
            self.wait()  # raises at once; several processes do that in a step that all save
        ending = self._preemption.reached()
        if not ending and step % self._every:
            return False
        if step != self._steps.newest:
            self.wait()  # it may find that an earlier, interrupted save of this step is complete
        if saving := step != self._steps.newest:
            self._steps.check_grows(step)
            self._writer.write(step, *agree(self._writer.prepare, step, state, data))
        if ending:
            self.wait()
            self._preemption.act()
            if self._ray is None:
                self.close()
            if jax.process_index() == 0:
                then = "ending" if self._ray is None else "going on until Ray ends the workers"
                say(f"jdp: SIGTERM: saved step {step} in {self.directory}; {then}", sys.stdout)
            if self._ray is None:  # to Ray, a loop that ends has failed or is finished
                sys.exit(0)
        return saving

    def restore(self, state: T, step: int | None = None) -> tuple[T, Any]:
        """Returns the newest intact checkpoint, in the shapes, dtypes and shardings of `state`, and its data cursor.

        `state, data = checkpointer.restore(state)`: if there is no checkpoint, the state as it was passed, and None.
        The number of devices and processes may differ from the number that saved it. NNX objects are updated in place.

        Checkpoints that are newer than the one restored stay, until the first `save` gives them another name.

        Args:
            state: a state of the same form as the one that was saved; its values do not matter.
            step: the step to restore; None is the newest that is intact.

        Returns:
            The state and `data`, as they were saved.

        Raises:
            MemoryError: there is no room for a second copy of the state, next to the one that was passed.
            OSError: the directory cannot be read.
            RuntimeError: there are checkpoints, and all are damaged, or the one of `step` is; or an array of `state`
                has been freed.
            TypeError: `step` is no integer.
            ValueError: the checkpoint is of another model, or there is no checkpoint of `step`; or `step` is not the
                same in all processes.

        Warns:
            UserWarning: checkpoints are damaged, and an older one is restored; or it was saved with another number of
                replicas, and `replicas=` was passed to `jdp.DataParallel` then or now.

        Example:
            >>> import jdp, numpy as np, tempfile
            >>> with jdp.Checkpointer(tempfile.mkdtemp()) as checkpointer:
            ...     saved = checkpointer.save(7, {"w": np.arange(2.0)}, data={"row": 448})
            ...     state, data = checkpointer.restore({"w": np.zeros(2)})
            >>> state["w"].tolist(), data
            ([0.0, 1.0], {'row': 448})
        """
        step = None if step is None else _number(step)
        self.wait()
        leaves = _leaves(state)
        found = self._steps.find(leaves, step)
        if found is None:
            return state, None
        arrays, data, replicas = found
        self._compare(replicas, leaves)
        state = decode(arrays, state)
        if self._replay is not None and self._steps.newest is not None:
            self._replay.restored(self.directory, self._steps.newest)
            return state, data
        self._report()  # a killed run may have saved it without reporting it
        return state, data

    def wait(self) -> None:
        """Waits until the save that is running, if any, is complete on the disk: `checkpointer.wait()`.

        Raises:
            RuntimeError: the save has failed.

        Example:
            >>> import jdp, numpy as np, tempfile
            >>> with jdp.Checkpointer(tempfile.mkdtemp()) as checkpointer:
            ...     saved = checkpointer.save(7, {"w": np.ones(2)})
            ...     checkpointer.wait()
            ...     checkpointer.latest_step
            7
        """
        self._writer.wait()
        self._report()

    def _compare(self, before: Any, leaves: dict[str, Any]) -> None:
        """Warns if the number of replicas has changed, then or now by choice; the state does not depend on it."""
        now = replicas_of(leaves)
        if not before or not now or before["number"] == now["number"] or not (before["chosen"] or now["chosen"]):
            return
        if jax.process_index() == 0:
            number = before["number"]
            warnings.warn(
                f"jdp.{VERB}: step {self._steps.newest} in {self.directory} was saved with {number} replicas, and here "
                f"are {now['number']}; the run goes on, but its batches are cut in another way, and so its bits are "
                f"others. For the same ones pass replicas={number} to jdp.DataParallel.",
                stacklevel=3,  # the user's line, beyond `restore`
            )

    def _report(self) -> None:
        if self._ray is not None:
            self._ray.report(self._steps.newest)

    def close(self) -> None:
        """Waits, and releases the lock: `checkpointer.close()`. At its end `with` does this by itself.

        The earlier handler of SIGTERM is put back.

        Example:
            >>> import jdp, numpy as np, tempfile
            >>> checkpointer = jdp.Checkpointer(tempfile.mkdtemp())
            >>> saved = checkpointer.save(7, {"w": np.ones(2)})
            >>> checkpointer.close()
            >>> checkpointer.latest_step
            7
        """
        self._close(None)

    def _close(self, seconds: float | None) -> None:
        try:
            self._writer.wait(seconds)
            self._report()
        finally:
            self._writer.close()
            self._finalizer()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        seconds = None
        if error is not None:
            self._ray = None  # the other processes may not have failed, and would not join a report
        in_job = error is not None and jax.process_count() > 1
        if in_job and isinstance(error, Exception | KeyboardInterrupt):
            seconds = time_for_saves(error)
        try:
            with watch.saving() if in_job else contextlib.nullcontext():
                self._close(seconds)
        except KeyboardInterrupt as again:
            if isinstance(error, KeyboardInterrupt):  # the second one: the user does not want to wait
                abandon(self._writer, again)
            raise
        except RuntimeError as e:
            if error is None:
                raise
            if isinstance(error, Exception | KeyboardInterrupt):
                error.add_note(str(e))
            else:  # Python prints no notes of a SystemExit
                tell_loss(str(e))


def _let_go(preemption: Preemption, quiet: Quiet) -> None:
    quiet.close()
    preemption.close()


def _leaves(state: Tree) -> dict[str, Any]:
    """Returns the leaves by their paths; raises a `RuntimeError` if one has been freed."""
    leaves = leaves_of(state)
    refuse_freed([*leaves.values()], VERB, lambda i: f"state{[*leaves][i].removeprefix('state')}")
    return leaves


def _number(step: int) -> int:
    """Returns the step, which may be any kind of integer, as Python's int."""
    number = as_int(step)
    if number is None:
        raise TypeError(
            f"jdp.{VERB}: step is {step!r:.100}, a {type(step).__name__}; a checkpoint is called by the number of its "
            f"step. Pass an int."
        )
    if number < 0:
        raise ValueError(f"jdp.{VERB}: step is {number}; the numbers of steps are 0 or more. Pass such a number.")
    return number


def _positive(name: str, value: int) -> int:
    number = as_int(value)
    if number is None or number < 1:
        raise ValueError(f"jdp.{VERB}: {name} is {value!r}; it is a number of 1 or more. Pass such a number.")
    return number


def agree(prepare: Callable[[], int | None], step: int, state: Tree, data: Any) -> tuple[dict[str, Any], Any, bool]:
    """Returns the leaves to save, the data, and whether that is a list of each process's data because they differ.

    If one process cannot save, all raise, with what is wrong there; `prepare` raises if another job saves, and returns
    the number of the writer.
    """
    leaves: dict[str, Any] = {}
    local: dict[str, str] = {}
    failed: Exception | None = None
    writer: int | None = None
    try:
        data = as_json(data)  # a copy, because the caller may change it before it is written
        leaves = _leaves(state)
        writer = prepare()
        if jax.process_count() == 1:
            return leaves, data, False
        own = {p: x for p, x in leaves.items() if not isinstance(x, jax.Array) or x.is_fully_addressable}
        local = {p: h for p, h in fingerprints(encode(own)).items() if p in own}  # and not the placeholder of none
    except Exception as error:
        if jax.process_count() == 1:
            raise
        failed = error
    problem = "" if failed is None else str(failed) or type(failed).__name__
    mine = {"problem": problem, "step": step, "writer": writer, "local": local}
    mine["data"] = None if failed else data
    mine["form"] = "" if failed else digest([*describe(leaves).items()])  # in their order
    try:
        # Not as long as for a process that writes: `save` has waited for the end of the save before, as all have.
        every = [json.loads(text) for text in tell_all(json.dumps(mine), limits.start)]
        if isinstance(failed, TypeError | ValueError):
            raise failed
    finally:
        failed = None  # the error refers to this frame, and this frame to the lock
    if problems := {i: e["problem"] for i, e in enumerate(every) if e["problem"]}:
        name = f"jdp.{VERB}: "
        raise RuntimeError(name + "; ".join(f"process {i}: {text.removeprefix(name)}" for i, text in problems.items()))
    _refuse_differences(every, leaves)
    apart = any(e["data"] != data for e in every)
    return leaves, [e["data"] for e in every] if apart else data, apart


def _refuse_differences(every: list[dict[str, Any]], leaves: dict[str, Any]) -> None:
    """Raises a `ValueError` if steps, Checkpointers, the leaves' forms, or values of one process are not the same."""
    steps = {i: e["step"] for i, e in enumerate(every)}
    if len({*steps.values()}) > 1:
        raise ValueError(
            f"jdp.{VERB}: the processes save different steps: {by_value(steps)}; all save the same step at the same "
            f"time. Count the steps alike in all processes, as with the step of jdp.TrainState."
        )
    if len({e["writer"] for e in every}) > 1:
        raise ValueError(
            f"jdp.{VERB}: the processes save with different Checkpointers: one has been closed in some of them only, "
            f"or each saves with another; all make, use and close them together. Call close in all processes."
        )
    for path in dict.fromkeys(path for e in every for path in e["local"]):
        hashes = {i: e["local"].get(path, "none") for i, e in enumerate(every)}
        if len({*hashes.values()}) > 1:
            raise ValueError(
                f"jdp.{VERB}: {path} is not the same in all processes (its hashes: {by_value(hashes)}), and one of "
                f"them would be saved; what each process holds for itself is equal in all. Pass it in data, which may "
                f"differ, or make it one array of all (jdp.replicate)."
            )
    if len({e["form"] for e in every}) > 1:
        forms = {path: f"{dtype}{shape}" for path, (dtype, shape) in describe(leaves).items()}
        told = {i: json.loads(text) for i, text in enumerate(tell_all(json.dumps(forms), limits.start))}
        raise ValueError(
            f"jdp.{VERB}: the processes save states of different forms: {difference(told) or 'in another order'}; a "
            f"checkpoint holds one state. Pass the same tree, with the same shapes and dtypes, in all processes."
        )
