"""The processes exchange texts, in the order of their calls: `tell(what, x) == {0: its x, 1: its x, ...}`."""

from __future__ import annotations

import collections
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from .coordination import AbsentError, DesyncError, delete, ended, get, put, under
from .places import HINT, have_ended, limits, named
from .watch import watch

_SLICE = 1.0  # seconds after which a waiting process writes that it waits, and looks which others are absent
_KEPT = 64  # entries of a process in the coordination service, before it deletes the oldest


class Exchange:
    """The numbered calls of the processes that share a mesh; each process can write an entry for a call.

    Entries go through JAX's coordination service, which process 0 runs. What is exchanged with every batch goes through
    a collective, and needs an entry only if a process has to wait, or if the processes differ.
    """

    calls: int = 0  # of all exchanges

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes: tuple[int, ...] = processes
        self.here: int = jax.process_index()
        group = "-".join(map(str, processes)) if len(processes) < jax.process_count() else "all"
        self._group = f"jdp/{group}"
        self._number, self._thread = 0, 0  # the thread of the first call
        self._left: collections.deque[str] = collections.deque()

    def next_call(self, what: str) -> Call:
        """Begins the next call of the group, which is `what` in this process."""
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"jdp.{what}: called from thread {threading.current_thread().name!r}, and the calls before came from "
                f"another; all processes make their calls in one order, which two threads do not keep. Make all calls "
                f"from one thread."
            )
        self._number += 1
        Exchange.calls += 1
        watch.moved(self._group, what)
        return Call(self, what, f"{self._group}/{self._number}")

    def tell(self, what: str, entry: Any, seconds: float) -> dict[int, Any]:
        """Writes an entry for the next call, and returns those of all processes; raises as `Call.wait` does."""
        return self.next_call(what).tell(entry, seconds)

    def come_to(self, program: str) -> None:
        """Notes that this process is about to run a program, which all processes run."""
        watch.moved(self._group, program)

    def dispatching(self, seconds: float | None = None) -> AbstractContextManager[None]:
        """Marks the dispatch of that program; it may wait so many seconds for the others (None: `limits.step`)."""
        return watch.dispatching(self._group, self.processes, seconds)

    def dispatched(self, output: jax.Array | None) -> None:
        """Notes that the program runs; this is one of its outputs, or None while it is being traced."""
        if output is not None:
            watch.dispatched(self._group, self.processes, output)

    def leave(self, key: str, text: str) -> None:
        put(key, text)
        if key not in self._left:
            self._left.append(key)
        if len(self._left) > _KEPT:
            delete(self._left.popleft())


class Call:
    """A call that all processes make; each can write an entry for it."""

    def __init__(self, exchange: Exchange, what: str, key: str) -> None:
        self.exchange: Exchange = exchange
        self.what: str = what
        self._key = key
        self._began = self._late_since = time.monotonic()

    def leave(self, entry: Any = None) -> None:
        """Writes the entry of this process; None says that it waits here."""
        text = json.dumps([self.what, entry], separators=(",", ":"))
        with watch.waiting(self.what, limits.step):  # for process 0
            self.exchange.leave(f"{self._key}/{self.exchange.here}", text)

    def entries(self) -> dict[int, Any]:
        """Returns the entries of the processes that have come to this call.

        Raises:
            DesyncError: one of them makes another call.
        """
        found = self._found()
        if {what for what, _ in found.values()} <= {self.what}:
            return {process: entry for process, (_, entry) in found.items()}
        end = time.monotonic() + 2 * _SLICE  # the processes that wait have written so by then
        while len(found) < len(self.exchange.processes) and time.monotonic() < end:
            time.sleep(_SLICE / 20)
            found = self._found()
        calls = by_value({process: what for process, (what, _) in found.items()} | {self.exchange.here: self.what})
        raise DesyncError(
            f"jdp.{self.what}: the processes make different calls: {calls}; all make the same calls in the same "
            f"order. Look for a branch on jax.process_index() (what stands under `if jax.process_index() == 0` must "
            f"be called in all processes), or a loop that is shorter on one: dp.prefetch(batches) goes on until all "
            f"have run out."
        )

    def _found(self) -> dict[int, tuple[str, Any]]:
        """Returns by process which call each of those that have come makes, and its entry."""
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in under(f"{self._key}/")}

    def tell(self, entry: Any, seconds: float) -> dict[int, Any]:
        """Writes an entry, and returns those of all processes; raises as `wait` does."""
        self.leave(entry)
        return self.told_by(self.exchange.processes, seconds)

    def told_by(self, processes: Sequence[int], seconds: float) -> dict[int, Any]:
        """Returns the entries of these processes once they are there; raises as `wait` does."""
        found: dict[int, Any] = {}

        def are_there(seconds: float) -> bool:
            found.update(self.entries())
            missing = [p for p in processes if found.get(p) is None]
            if missing and missing[0] in found:  # it waits here, and will see that it has to write an entry
                time.sleep(_SLICE / 20)
            elif missing:
                get(f"{self._key}/{missing[0]}", seconds)
            return not missing

        self.wait(are_there, seconds)
        return found

    def wait(self, ready: Callable[[float], bool], seconds: float) -> None:
        """Waits until `ready(s)`, which may itself take s seconds.

        Raises:
            DesyncError: a process did not come to this call within so many seconds, has ended, or makes another call.
        """
        with watch.waiting(self.what, patience := seconds + 2 * _SLICE):  # one that waits has written so by then
            self._began = self._late_since = time.monotonic()
            while not ready(_SLICE):
                now = time.monotonic()
                self._late_since = now if watch.runs() else self._late_since  # others may wait for that program, too
                gone = ended()
                found = self.entries()
                if self.exchange.here not in found:
                    self.leave()
                absent = [p for p in self.exchange.processes if p not in found and p != self.exchange.here]
                if left := [p for p in absent if p in gone]:
                    raise DesyncError(self._text(have_ended(left)))
                silent = [p for p in watch.silent(absent) if p not in gone]  # nor will these finish compiling
                if now - self._late_since > patience or silent and watch.is_enough(now - self._began, silent):
                    self._give_up(absent, gone)
        watch.meet(self.exchange.processes)

    def _give_up(self, absent: list[int], gone: set[int]) -> None:
        """Raises unless the absent processes are busy, or all have come and are well."""
        silent = [p for p in watch.silent(self.exchange.processes) if p not in gone]
        seconds = time.monotonic() - self._late_since
        late = [p for p in absent if seconds > limits.compile or not watch.is_busy(p)]
        if silent:
            text = self._text(f"{named(silent)} {watch.why_silent(silent)}")
        elif late:
            text = self._text(f"{named(late)} did not come to this call within {seconds:.0f} s")
        elif not absent and seconds > limits.compile:
            text = (
                f"jdp.{self.what}: all processes have come to it {seconds:.0f} s ago; the devices, or the network "
                f"between them, stand still. Run jdp doctor on each machine."
            )
        else:
            return
        raise AbsentError(text)

    def _text(self, why: str) -> str:
        return (
            f"jdp.{self.what}: {why}, and process {self.exchange.here} waits there; all processes make "
            f"the same calls in the same order. Iterate over dp.prefetch(batches), which goes on until all have run "
            f"out of data. {HINT}"
        )


@functools.cache
def exchange_of(processes: tuple[int, ...]) -> Exchange:
    return Exchange(processes)


def by_value(entries: Mapping[int, Any]) -> str:
    """Returns which processes have which value: `processes 0, 1 have x; process 2 has y`."""
    merged: dict[str, list[int]] = {}
    for process, value in sorted(entries.items()):
        merged.setdefault(str(value), []).append(process)
    return "; ".join(f"{named(p)} {'have' if len(p) > 1 else 'has'} {value}" for value, p in merged.items())
