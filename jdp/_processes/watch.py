"""The watch: each process writes where it is, and a process that waits too long learns where the others are.

The states of a process. The main thread changes them. Two other threads (`last_words.py`) look, and end the process
if it waits in vain.

* In its start. JAX's backend waits until all processes have asked for their devices, which Python's threads show. One
  that has not is named: after `limits.start`, after `limits.step` if it has ended, after half of that if it is stopped.
* At its own work (`moved` was called last). It does not wait, and blames no other process. Processes that have waited
  for `limits.step` blame it if it has not moved for as long: "did not come to it".
* In a call (`waiting`). The main thread looks itself, and raises. `is_cut_off` ends it if process 0 is silent.
* Saving and restoring. `Checkpointer` waits for the others in a collective of JAX's, which is watched as a dispatch. A
  process that writes for long is late after `limits.compile` only. Orbax's own barriers, while it writes, are not
  watched: JAX gives them up.
* Entering a dispatch. `Exchange.come_to` moves, and `dispatching` notes what the process is about to wait for, before
  it calls the program. The reason is that a single CPU device computes in the thread that dispatches, and the call
  returns only when the others have come. During the dispatch the process is
  - tracing and comparing (`preparing`): it waits only in calls.
  - compiling (`compiling`, by `same_program` and by JAX's own events): it does not wait, and until `limits.compile` the
    others do not consider it late.
  - in the dispatch: it waits, since the last of these. A process that does not come, has come to another call
    instead, has ended or is silent is named.
* A program runs (`dispatched`). The process waits until an output is ready. The oldest running program counts, since
  it was dispatched or the one before it was done.
* In a callback, also during a dispatch: a device waits for Python, which the frames of Python's threads show. All
  processes have come to the program then. Processes that are in no callback name the one that is, after `limits.step`.

How a process ends, and how the others learn of it:

* The end of the script, `sys.exit(0)`, `raise SystemExit(3)`: `_leave` writes the last position, and then that the
  process has ended. A process that waits for it in a later call or program says so at once.
* An exception, `sys.exit(3)`, `exit(3)`: the process writes its failure, and all others look for one each half second.
* `os._exit`, SIGKILL, no memory: the others of its machine see that the process is gone. Elsewhere a connection breaks.
  A process that fails with that error waits 3 s, so that its listener can learn which process has ended.
* At its end (`leaving`), after the first of these: it waits until all have left, and looks as before, because another
  may fail, or be killed. One that is known to be stopped is named after half of `limits.step`, and one that works after
  `limits.shutdown`, which is the time of JAX's own barrier. That one follows when all have left, and is not watched.
* SIGSTOP: no sign of life. The process is named after half of `limits.step` if this machine says that it is stopped,
  and after all of it otherwise. The coordination service is in process 0, so `is_cut_off` reports that one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import jax

from .._jax.private import asked_for_devices, callbacks, starts_backends
from .coordination import ended, own_process, process_count, put, say, under
from .places import DEAD, HINT, NOWHERE, Pending, Place, have_ended, have_not_asked, limits, machine, named, state_of

_Block = AbstractContextManager[None]
_FOLDER = "jdp/at/"
_BEAT = 2.0  # seconds between two notes of where this process is
_SILENCE = 3 * _BEAT  # a process that is well and within reach is never silent for so long
_KNOWN = 8  # calls of each process that the others know
_FEW = 64  # up to so many processes, each may ask for all others
_SAME = f"; all processes make the same calls in the same order. {HINT}"
_SMALL = 4096  # bytes of an output that may be kept alive until it is computed


class Watch:
    """Where this process is, and where the others are as far as it knows.

    `look` asks the coordination service, and `is_cut_off` sees when that does not answer.
    """

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}
        self._calls: dict[str, tuple[str, ...]] = {}  # the last few in each group
        self._doing, self._since = "its start", time.monotonic()
        self._starts_since: float | None = None  # since when JAX's backend has been starting
        self._compiling: dict[int, float | None] = {}  # since when, by thread: the one that saves compiles, too
        self._saves_since: float | None = None  # since when it has been finishing its saves, after an error
        self._running: collections.deque[Pending] = collections.deque(maxlen=1024)  # in the order of their dispatch
        self._finding = threading.Lock()  # of the oldest that still runs
        self._dispatch: Pending | None = None  # the one that the main thread is dispatching
        self._callbacks: dict[FrameType, float] = {}  # that run, and when each was seen first
        self._waits: tuple[str, float, float] | None = None  # for a call's others: since when, and until when
        self._places: dict[int, tuple[Place, float]] = {}  # and since when it has been silent
        self._beat, self._told, self._learnt, self._looked = 0, 0.0, 0.0, 0.0
        self._rounds, self._seen, self._looks = 0, 0, 0
        self._warned: object = None  # the silence of which it has warned
        self._gone: list[int] = []
        self._leaves: float | None = None  # since when, if the program has ended
        self._telling = threading.Lock()  # so that no older place is written over the last

    def moved(self, group: str, what: str) -> None:
        """Notes that this process has come to the next call or program of a group."""
        self._positions[group] = self._positions.get(group, 0) + 1
        self._calls[group] = *self._calls.get(group, ())[1 - _KNOWN :], what
        self._doing, self._since, self._compiling = what, time.monotonic(), {}

    def dispatched(self, group: str, processes: tuple[int, ...], output: jax.Array) -> None:
        """Notes that the program that this process came to last runs now."""
        held: Callable[[], Any] = (lambda: output) if output.nbytes <= _SMALL else weakref.ref(output)
        now = time.monotonic()
        with self._finding:
            self._running.append(Pending(group, processes, self._positions[group], self._doing, now, held))

    def dispatching(self, group: str, processes: tuple[int, ...], seconds: float | None = None) -> _Block:
        """Marks a block: the main thread dispatches the program that it came to last.

        A CPU device that is the only one of its process computes in that thread, so a program may wait for the
        others before it has an output that could be asked.
        """
        return self._with(_dispatch=Pending(group, processes, 0, "", time.monotonic(), lambda: None, seconds))

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Marks a block: the main thread traces and compares the program, and waits only in calls that say so."""
        with self._with(_dispatch=None):
            yield
        if self._dispatch is not None:
            self._dispatch = self._dispatch._replace(since=time.monotonic())

    @contextlib.contextmanager
    def _with(self, **state: Any) -> Iterator[None]:
        """Gives these attributes other values in a block."""
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)

    def compiling(self, whether: bool) -> None:
        """Notes that this process begins or ends to compile a program; it is not late before `limits.compile`."""
        self._since, self._told = time.monotonic(), 0.0  # written at once for the others
        self._compiling[threading.get_ident()] = self._since if whether else None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Marks a block: this process has failed and finishes its saves; until `limits.compile` it is not late."""
        with self._with(_saves_since=time.monotonic()):
            self._told = 0.0  # written at once for the others
            yield

    def compile_event(self, event: str, begins: bool) -> None:
        """Listens to `jax.monitoring`, which says when JAX begins and ends to compile, also programs of the user."""
        if event.endswith("/backend_compile_duration"):
            self.compiling(begins)

    def waiting(self, what: str, seconds: float) -> _Block:
        """Marks a block: the main thread waits for the others, as a rule for at most so many seconds."""
        began = time.monotonic()
        return self._with(_waits=(what, began, began + seconds))

    def leaving(self) -> _Block:
        """Marks a block: the program of this process has ended, and it waits for those of the others."""
        self._leaves = time.monotonic()
        return self.waiting("distributed (the end of the program)", limits.shutdown)

    def runs(self) -> bool:
        """Returns True while a program runs that this process has dispatched: a step may take long."""
        return self._oldest() is not None

    def is_busy(self, process: int) -> bool:
        """Returns True if it compiles, or has compiled or come to something less than `limits.step` ago."""
        if process not in self._places:
            return False
        place, since = self._places[process]
        return place.compiles or place.idle + time.monotonic() - since <= limits.step

    def silent(self, processes: Sequence[int], least: float | None = None) -> list[int]:
        """Returns the processes without a sign of life for at least so many seconds, as far as `look` has learnt."""
        least = max(_SILENCE, limits.step / 2) if least is None else least
        heard = {p: self._learnt - since for p, (_, since) in self._places.copy().items()}  # `look` adds
        return [p for p in processes if p != own_process() and heard.get(p, 0) > least]

    def why_silent(self, silent: Sequence[int]) -> str:
        """Returns in words why these processes are taken for silent."""
        seconds = time.monotonic() - max(self._places[p][1] for p in silent)
        sign = f"{'have' if len(silent) > 1 else 'has'} given no sign of life for {seconds:.0f} s"
        places = [self._places[p][0] for p in silent]
        if any(place.machine != machine() for place in places):
            return f"{sign} (the network to another machine is cut, or what ran there is stopped)"
        return f"{sign} ({'stopped' if self._stopped(silent) else 'its Python does not run'}; on this machine)"

    def is_enough(self, waited: float, silent: Sequence[int]) -> bool:
        """Returns True after `limits.step`; after half of it, if the silent processes are known to be stopped."""
        return waited >= (limits.step / 2 if self._stopped(silent) else limits.step)

    def _stopped(self, silent: Sequence[int]) -> bool:
        """Returns True if the operating system says of each of them that it is stopped."""
        places = [self._places[p][0] for p in silent]
        return bool(places) and all(p.machine == machine() and state_of(p.pid) in ("T", "t") for p in places)

    def look(self) -> str | None:
        """Writes where this process is, and looks for the others; returns in words why it should stop waiting."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if before and now - before > _SILENCE + 2 * self._pause():  # it stood still, and so may have the others
            self._begin_again(now)
            return None
        pending, waits = self._still_running(), self._waits
        self._see_callbacks(pending)
        if now >= self._told + _BEAT:
            self.tell()
        self._rounds += 1
        waited = now - min(pending.since if pending else now, waits[1] if waits else now)
        # Process 0 asks itself, which costs nothing. In a large job the others ask only when they have to.
        many = own_process() != 0 and process_count() > _FEW
        if (many and waited < limits.step / 2) or now < self._learnt + self._pause():
            return None
        # This comes before `_learn`: a process writes its last position and then its end, so both are known here.
        waits_elsewhere = self._leaves is not None or self._starts_since is not None
        asks = waited > _BEAT or waits_elsewhere or self.silent([*self._places], _SILENCE)
        left = ended() if asks else set()
        self._learn()
        if dead := self._dead():
            return (
                f"jdp: {named(dead)} ended without a word: killed by the kernel, where memory runs out, or by a "
                f"person, or ended by os._exit; process {own_process()} ends."
            )
        quiet = [p for p in self.silent([*self._places], _SILENCE) if p not in {*left, *dead} and waited > _BEAT]
        self._warn(f"{named(quiet)} {self.why_silent(quiet)}" if quiet else "", quiet)
        if self._leaves is not None:
            return self._why_in_vain_at_its_end(now - self._leaves, left)
        why = self._why_in_vain(pending, left) if pending else None
        if pending is None or why is None:
            return self._why_in_vain_in_its_start(now, left)
        return f"jdp.{pending.what}: process {own_process()} has waited {now - pending.since:.0f} s for it, and {why}"

    def _begin_again(self, now: float) -> None:
        """Takes the others for heard of now, and the running programs for new, after a pause of this process."""
        self._places = {p: (place, now) for p, (place, _) in self._places.items()}
        self._since, self._leaves, self._starts_since = now, self._leaves and now, self._starts_since and now
        with self._finding:
            self._running.extend([self._running.popleft()._replace(since=now) for _ in [*self._running]])
        self._dispatch = self._dispatch and self._dispatch._replace(since=now)

    def _why_in_vain(self, pending: Pending, left: set[int]) -> str | None:
        """Returns in words why this process should not wait for a program any longer; None if it should."""
        waited = time.monotonic() - pending.since
        gone = [p for p in pending.processes if p in left and self._position(p, pending) < pending.position]
        if gone:
            return f"{have_ended(gone)}{_SAME}"
        silent = [p for p in self.silent(pending.processes) if p not in left]
        if not self.is_enough(waited, silent):
            return None
        if silent:
            return f"{named(silent)} {self.why_silent(silent)}{_SAME}"
        may_take = limits.step if pending.seconds is None else pending.seconds
        if waited > may_take and (late := self._late(pending)):
            return f"{named(late)} did not come to it{self._last_of(late[0])}{_SAME}"
        if waited > may_take and (others := self._elsewhere(pending)):
            process, what = next(iter(others.items()))
            return f"{named([process])} is at another call in its place, jdp.{what}{_SAME}"
        if held := self._called_back(pending):
            seconds = self._places[held[0]][0].called_back
            return (
                f"{named(held[:1])} has been for {seconds:.0f} s in a Python function that the program calls ("
                f"jax.pure_callback, io_callback, jax.debug.callback). Look at what that function waits for; for work "
                f"that takes one process longer, jdp.distributed.initialize(timeout=...)."
            )
        if waited > limits.compile + _SILENCE:  # a process that compiles for too long is late by then
            return f"all processes have come to it: the devices, or the network between them, stand still{_SAME}"
        return None

    def _why_in_vain_in_its_start(self, now: float, left: set[int]) -> str | None:
        """Returns in words why this process should not wait for the devices of all; None if it should, or has them."""
        if self._starts_since is None:
            return None
        waited = now - self._starts_since
        absent = [p for p, (place, _) in self._places.items() if not place.asked]
        gone = [p for p in absent if p in left]
        silent = self.silent(absent)
        stopped = [p for p in silent if self._stopped([p])]
        if gone and waited > limits.step:
            why = f"{have_ended(gone)} without asking for them{_SAME}"
        elif stopped and self.is_enough(waited, stopped):
            why = f"{named(stopped)} {self.why_silent(stopped)}."
        elif absent and waited > limits.start:
            why = f"{named(silent)} {self.why_silent(silent)}." if silent else have_not_asked(absent)
        else:
            return None
        begun = f"jdp.distributed: process {own_process()} has waited {waited:.0f} s for the devices of all processes"
        return f"{begun}, and {why}"

    def _why_in_vain_at_its_end(self, waited: float, left: set[int]) -> str | None:
        """Returns in words why this process, whose program has ended, should not wait for the others' ends."""
        others = [p for p in self._places if p != own_process() and p not in left]
        stopped = [p for p in self.silent(others) if self._stopped([p])]  # one that holds Python's lock may be at work
        if stopped and self.is_enough(waited, stopped):
            why = f"{named(stopped)} {self.why_silent(stopped)}."
        elif others and waited > limits.shutdown:
            why = (
                f"{named(others)} {'have' if len(others) > 1 else 'has'} not{self._last_of(others[0])}; all processes "
                f"end together. Look at what it does there; if it needs more time at its end, pass "
                f"jdp.distributed.initialize(shutdown_timeout=...)."
            )
        else:
            return None
        return f"jdp.distributed: process {own_process()} ended its program {waited:.0f} s ago, and {why}"

    def is_cut_off(self) -> str | None:
        """Returns in words why this process should stop waiting, if the coordination service does not answer.

        Another thread calls it every half second.
        """
        # Looks are counted, not seconds: where something holds Python's lock, neither thread runs. The thread that
        # asks the service does so less often in a large job.
        self._looks = self._looks + 1 if self._rounds == self._seen else 0
        self._seen = self._rounds
        # Not what `look` knew: it may stand still since before the newest program was dispatched.
        now, pending, waits = time.monotonic(), self._still_running(), self._waits
        starts = self._starts_since = (self._starts_since or now) if starts_backends() else None
        if starts is not None:
            waits = "distributed", starts, starts + limits.step
        few = self._looks < 2 * _SILENCE + process_count() // 250
        if few or own_process() == 0 or (pending is None and waits is None):
            return None
        stopped = self._stopped([p for p in self._places if p == 0])
        why = f"process 0 does not answer: {'' if stopped else 'the network to its machine is cut, or '}it is stopped"
        self._warn(why, 0)
        if pending is not None and now - pending.since > (limits.step / 2 if stopped else limits.step):
            what, since = pending.what, pending.since
        elif waits is not None and (now > waits[2] or now - waits[1] > limits.step + _BEAT):
            what, since, _ = waits
        else:
            return None
        return f"jdp.{what}: process {own_process()} has waited {now - since:.0f} s for the others, and {why}."

    def _oldest(self) -> Pending | None:
        """Returns the oldest program that still runs; it counts since the one before it was done."""
        with self._finding:
            while self._running and self._running[0].is_done():
                self._running.popleft()
                if self._running:
                    since = max(self._running[0].since, time.monotonic())
                    self._running[0] = self._running[0]._replace(since=since)
            return self._running[0] if self._running else None

    def _still_running(self) -> Pending | None:
        return self._oldest() or self._dispatched_now()

    def _dispatched_now(self) -> Pending | None:
        """Returns the program that the main thread dispatches, unless it compiles it or waits in a call."""
        dispatch = self._dispatch
        if dispatch is None or self._waits is not None or self._compiles(time.monotonic()):
            return None
        position, since = self._positions.get(dispatch.group, 0), max(dispatch.since, self._since)
        return dispatch._replace(position=position, what=self._doing, since=since)

    def _compiles(self, now: float) -> bool:
        return any(x is not None and now - x < limits.compile for x in (*self._compiling.values(), self._saves_since))

    def _see_callbacks(self, pending: Pending | None) -> None:
        """Notes since when each call back into Python has been running, where a program runs for long."""
        now, before = time.monotonic(), self._callbacks
        frames = callbacks() if pending is not None and now - pending.since > _BEAT / 4 else []
        self._callbacks = {f: before.get(f, now) for f in frames}  # kept, so that no other can be taken for one

    def _pause(self) -> float:
        """Returns the seconds between two looks for the others; one process answers the looks of all."""
        return max(_BEAT / 2, process_count() / _FEW)

    def _warn(self, why: str, of: object) -> None:
        """Warns once of what it sees, which may pass by itself."""
        before, self._warned = self._warned, of
        if why and before != of:
            say(f"jdp: {why}; process {own_process()} waits")

    def _dead(self) -> list[int]:
        """Returns the processes of this machine that were gone in two looks and have not written why."""
        own = machine()
        here = [p for p, (place, _) in self._places.items() if place.machine == own]
        before, self._gone = self._gone, [p for p in here if state_of(self._places[p][0].pid) in DEAD]
        dead = [p for p in self._gone if p in before]
        return [p for p in dead if p not in ended()] if dead else []

    def tell(self) -> None:
        """Writes for the others where this process is; once more at its end, before it writes that it has ended."""
        with self._telling:
            now = time.monotonic()
            self._beat, self._told = self._beat + 1, now
            idle, positions, calls = round(now - self._since, 1), dict(self._positions), dict(self._calls)
            called_back = round(now - min(self._callbacks.values()), 1) if self._callbacks else 0.0
            at = self._doing, idle, self._compiles(now), positions, called_back, calls, asked_for_devices()
            place = Place(self._beat, machine(), os.getpid(), *at)
            put(f"{_FOLDER}{own_process()}", json.dumps(place))

    def meet(self, processes: Sequence[int]) -> None:
        """Learns where these processes are, which are in one call with this one, if it has not learnt it before."""
        if process_count() <= _FEW and not self._places.keys() >= {*processes}:
            self._learn()

    def _learn(self) -> None:
        found = under(_FOLDER)
        self._learnt = time.monotonic()
        for key, text in found:
            process, place = int(key.removeprefix(_FOLDER)), Place(*json.loads(text))
            before = self._places.get(process)
            if before is None or before[0].beat != place.beat:
                self._places[process] = place, self._learnt

    def processes(self) -> set[int]:
        """Returns the processes that have told where they are: those that called `jdp.distributed.initialize`."""
        return {int(key.removeprefix(_FOLDER)) for key, _ in under(_FOLDER)}

    def _position(self, process: int, pending: Pending) -> int:
        place, _ = self._places.get(process, (NOWHERE, 0.0))
        return place.positions.get(pending.group, 0)

    def _called_back(self, pending: Pending) -> list[int]:
        """Returns the processes whose devices wait for Python; none where those of this process wait, too."""
        if self._callbacks:
            return []
        places = {p: self._places[p][0] for p in pending.processes if p != own_process() and p in self._places}
        return [p for p, place in places.items() if place.called_back > limits.step]

    def _still(self, pending: Pending) -> dict[int, Place]:
        """Returns where the others are that have not moved for `limits.step`, and do not compile."""
        places = {p: self._places.get(p, (NOWHERE, 0.0)) for p in pending.processes if p != own_process()}
        long = {p: place for p, (place, since) in places.items() if place.idle + self._learnt - since > limits.step}
        return {p: place for p, place in long.items() if not place.compiles}

    def _late(self, pending: Pending) -> list[int]:
        """Returns the processes that lag furthest behind this program and have not moved for `limits.step`."""
        behind = {p: self._position(p, pending) for p in self._still(pending)}
        behind = {p: position for p, position in behind.items() if position < pending.position}
        return [p for p, position in behind.items() if position == min(behind.values())]

    def _elsewhere(self, pending: Pending) -> dict[int, str]:
        """Returns the processes that came to another call in the place of this program, and may have gone on since."""
        found = {}
        for process, place in self._still(pending).items():
            calls, ahead = place.calls.get(pending.group, ()), self._position(process, pending) - pending.position
            if 0 <= ahead < len(calls) and calls[-1 - ahead] != pending.what:
                found[process] = calls[-1 - ahead]
        return found

    def _last_of(self, process: int) -> str:
        if process not in self._places:
            return ""
        place, since = self._places[process]
        return f" (its last call: {place.doing}, {place.idle + time.monotonic() - since:.0f} s ago)"


watch = Watch()
