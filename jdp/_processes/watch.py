"""The watch: each process leaves word of where it is; who waits too long for the others learns where these are."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .coordination import ended, own_process, process_count, put, under


class Limits:
    """Seconds to wait for the other processes; `jdp.distributed.initialize` sets them."""

    def __init__(self, step: float = 20.0, start: float = 60.0, compile: float = 1800.0) -> None:
        self.step, self.start, self.compile = step, start, compile


limits = Limits()
_FOLDER = "jdp/at/"
_BEAT = 2.0  # seconds between two words of where this process is
_SILENCE = 3 * _BEAT  # which those who are well and within reach do not keep
_FEW = 64  # processes, which may all ask for all
_DEAD = ("", "Z", "X")  # states of Linux: no such process, or nothing of it but its code
_SMALL = 4096  # bytes of what may be held while it is computed, and a moment longer


class Place(NamedTuple):
    """Where a process is, as it tells the others."""

    beat: int  # how often it has told
    machine: str
    pid: int
    doing: str  # the last call or program that it came to
    idle: float  # seconds since
    compiles: bool
    positions: dict[str, int]  # in each group's calls and programs, to which all of the group come in one order


class Pending(NamedTuple):
    """A program that was dispatched."""

    group: str
    processes: tuple[int, ...]
    position: int
    what: str
    since: float
    output: Callable[[], Any]  # one of its outputs; None where nobody holds it any more

    def is_done(self) -> bool:
        x = self.output()
        return x is None or x.is_deleted() or x.is_ready()


class Watch:
    """Where this process is, and where the others are as far as it knows.

    The main thread says what it comes to. Two other threads (`last_words.py`) look: `look` asks the coordination
    service, and `is_cut_off` sees when that does not answer.
    """

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}
        self._doing, self._since = "its start", time.monotonic()
        self._compiles_since: float | None = None
        self._pending: Pending | None = None  # what is watched: one at a time, and when it has ended, the newest
        self._newest: Pending | None = None
        self._waits: tuple[str, float, float] | None = None  # for a call's others: since when, and until when
        self._places: dict[int, tuple[Place, float]] = {}  # and since when it has been silent
        self._beat, self._told, self._learnt = 0, 0.0, 0.0
        self._rounds, self._seen, self._looks = 0, 0, 0
        self._warned: object = None  # the silence of which it has warned
        self._gone: list[int] = []

    def moved(self, group: str, what: str) -> None:
        """This process has come to the next call or program of a group."""
        self._positions[group] = self._positions.get(group, 0) + 1
        self._doing, self._since, self._compiles_since = what, time.monotonic(), None

    def dispatched(self, group: str, processes: tuple[int, ...], output: jax.Array) -> None:
        """What it came to last is a program, which runs now."""
        held: Callable[[], Any] = (lambda: output) if output.nbytes <= _SMALL else weakref.ref(output)
        self._newest = Pending(group, processes, self._positions[group], self._doing, time.monotonic(), held)

    def compiling(self, whether: bool) -> None:
        """This process begins, or ends, to compile a program: until then, and `limits.compile`, it is not late."""
        self._since, self._told = time.monotonic(), 0.0  # which the others are to hear at once
        self._compiles_since = self._since if whether else None

    def compile_event(self, event: str, duration_secs: float, **_: Any) -> None:
        """Of `jax.monitoring`: between these two JAX compiles, the user's own programs too."""
        if event.endswith("/jaxpr_to_mlir_module_duration"):
            self.compiling(True)
        elif event.endswith("/backend_compile_duration"):
            self.compiling(False)

    @contextlib.contextmanager
    def waiting(self, what: str, seconds: float) -> Iterator[Callable[[], bool]]:
        """In here the main thread waits for the others; gives a function that tells whether the seconds are over."""
        began = time.monotonic()
        self._waits = what, began, began + seconds
        try:
            yield lambda: time.monotonic() > began + seconds
        finally:
            self._waits = None

    def is_busy(self, process: int) -> bool:
        """Whether it compiles a program, or has come to something, or compiled, less than the time-out ago."""
        if process not in self._places:
            return False
        place, since = self._places[process]
        return place.compiles or place.idle + time.monotonic() - since <= limits.step

    def silent(self, processes: Sequence[int], least: float | None = None) -> list[int]:
        """Those of which there has been no sign of life for so many seconds, as far as `look` has learnt."""
        least = max(_SILENCE, limits.step / 2) if least is None else least
        heard = {p: self._learnt - since for p, (_, since) in self._places.items()}
        return [p for p in processes if p != own_process() and heard.get(p, 0) > least]

    def why_silent(self, silent: Sequence[int]) -> str:
        """In words, of all of them."""
        seconds = time.monotonic() - max(self._places[p][1] for p in silent)
        sign = f"{'have' if len(silent) > 1 else 'has'} given no sign of life for {seconds:.0f} s"
        places = [self._places[p][0] for p in silent]
        if any(place.machine != _machine() for place in places):
            return f"{sign} (the network to another machine is cut, or what ran there is stopped)"
        return f"{sign} ({'stopped' if self._stopped(silent) else 'its Python does not run'}; on this machine)"

    def _stopped(self, silent: Sequence[int]) -> bool:
        """Whether the system says of each of them that it is stopped."""
        places = [self._places[p][0] for p in silent]
        return bool(places) and all(p.machine == _machine() and _state(p.pid) in ("T", "t") for p in places)

    def look(self) -> str | None:
        """Tells where this process is, and looks for the others; gives, in words, why it is to wait no longer."""
        now = time.monotonic()
        if now >= self._told + _BEAT:
            self._tell()
        self._rounds += 1
        pending, waits = self._still_running(), self._waits
        waited = now - min(pending.since if pending else now, waits[1] if waits else now)
        # To process 0 it costs nothing to ask itself; where there are many, the others ask when they have to.
        many = own_process() != 0 and process_count() > _FEW
        if (many and waited < limits.step / 2) or now < self._learnt + self._pause():
            return None
        self._learn()
        if dead := self._dead():
            return (
                f"jdp: {named(dead)} ended without a word: killed by the kernel, where memory runs out, or by a "
                f"person; process {own_process()} ends."
            )
        left = ended() if self.silent([*self._places], _SILENCE) else set()
        quiet = [p for p in self.silent([*self._places], _SILENCE) if p not in {*left, *dead} and waited > _BEAT]
        self._warn(f"{named(quiet)} {self.why_silent(quiet)}" if quiet else "", quiet)
        if pending is None:
            return None
        waited = now - pending.since
        silent = [p for p in self.silent(pending.processes) if p not in left]
        if waited < (limits.step / 2 if self._stopped(silent) else limits.step):
            return None
        late = [] if silent else self._late(pending)
        if not (silent or late or waited > limits.compile + _SILENCE):  # who compiles too long is late by then
            return None
        why = "all processes have come to it: the devices, or the network between them, stand still"
        if silent:
            why = f"{named(silent)} {self.why_silent(silent)}"
        elif late:
            why = f"{named(late)} did not come to it{self._last_of(late[0])}"
        return (
            f"jdp.{pending.what}: process {own_process()} has waited {waited:.0f} s for it, and {why}; all processes "
            f"make the same calls in the same order. For work that takes one process longer, "
            f"jdp.distributed.initialize(timeout=...)."
        )

    def is_cut_off(self) -> str | None:
        """The same, where the coordination service does not answer; called every half second, from another thread."""
        # Looks are counted, not seconds: where something holds Python's lock, neither thread runs.
        self._looks = self._looks + 1 if self._rounds == self._seen else 0
        self._seen = self._rounds
        now, pending, waits = time.monotonic(), self._pending, self._waits
        if self._looks < 2 * _SILENCE or own_process() == 0 or (pending is None and waits is None):
            return None
        stopped = self._stopped([p for p in self._places if p == 0])
        why = f"process 0 does not answer: {'' if stopped else 'the network to its machine is cut, or '}it is stopped"
        self._warn(why, 0)
        if pending is not None and now - pending.since > (limits.step / 2 if stopped else limits.step):
            what, since = pending.what, pending.since
        elif waits is not None and now > waits[2]:
            what, since, _ = waits
        else:
            return None
        return f"jdp.{what}: process {own_process()} has waited {now - since:.0f} s for the others, and {why}."

    def _still_running(self) -> Pending | None:
        if self._pending is None or self._pending.is_done():
            newest = self._newest
            self._pending = None if newest is None or newest.is_done() else newest
        return self._pending

    def _pause(self) -> float:
        """Seconds between two looks for the others: one process answers them all."""
        return max(_BEAT / 2, process_count() / _FEW)

    def _warn(self, why: str, of: object) -> None:
        """Says what it sees, once; it may pass."""
        before, self._warned = self._warned, of
        if why and before != of:
            print(f"jdp: {why}; process {own_process()} waits", file=sys.stderr)

    def _dead(self) -> list[int]:
        """Those of this machine that do not run any more, also when this looked before, and have not said why."""
        machine = _machine()
        here = [p for p, (place, _) in self._places.items() if place.machine == machine]
        before, self._gone = self._gone, [p for p in here if _state(self._places[p][0].pid) in _DEAD]
        dead = [p for p in self._gone if p in before]
        return [p for p in dead if p not in ended()] if dead else []

    def _tell(self) -> None:
        now = time.monotonic()
        self._beat, self._told = self._beat + 1, now
        compiles = self._compiles_since is not None and now - self._compiles_since < limits.compile
        idle, positions = round(now - self._since, 1), dict(self._positions)
        place = Place(self._beat, _machine(), os.getpid(), self._doing, idle, compiles, positions)
        put(f"{_FOLDER}{own_process()}", json.dumps(place))

    def _learn(self) -> None:
        found = under(_FOLDER)
        self._learnt = time.monotonic()
        for key, text in found:
            process, place = int(key.removeprefix(_FOLDER)), Place(*json.loads(text))
            before = self._places.get(process)
            if before is None or before[0].beat != place.beat:
                self._places[process] = place, self._learnt

    def _late(self, pending: Pending) -> list[int]:
        """Those who have come least far, of those who have not come to it, and have not moved either."""
        behind = {}
        for process in pending.processes:
            place, since = self._places.get(process, (_NOWHERE, 0.0))
            position = place.positions.get(pending.group, 0)
            still = place.idle + self._learnt - since > limits.step and not place.compiles
            if process != own_process() and position < pending.position and still:
                behind[process] = position
        return [p for p, position in behind.items() if position == min(behind.values())]

    def _last_of(self, process: int) -> str:
        if process not in self._places:
            return ""
        place, since = self._places[process]
        return f" (its last call: {place.doing}, {place.idle + time.monotonic() - since:.0f} s ago)"


_NOWHERE = Place(0, "", 0, "", 0.0, False, {})
watch = Watch()


def named(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


def _machine() -> str:
    """This machine, and which of its networks and of its lists of processes."""
    spaces = []
    with contextlib.suppress(OSError):  # not Linux
        spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    return " ".join([platform.node(), *spaces])


def _state(pid: int) -> str:
    """Linux's letter for what a process of this machine does; "" where there is none, "?" where Linux does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else "?"
    except OSError:
        return "?"
