"""The processes tell each other, in the order of their calls: `result(post(x)) == {0: its x, 1: its x, ...}`."""

from __future__ import annotations

import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from .._jax.coordination import DesyncError, client, has_left
from .connections import Connections


class Limits:
    """Seconds to wait for the other processes; `jdp.distributed.initialize` sets them."""

    def __init__(self, step: float = 20.0, start: float = 60.0, compile: float = 1800.0) -> None:
        self.step, self.start, self.compile = step, start, compile


limits = Limits()
_SLICE = 1.0  # seconds after which a waiting process looks whether the one it waits for has ended
_MANY = 64  # calls that have gone on without what came for them, before that is dropped


class Exchange:
    """The calls of the processes that share a mesh, numbered; the first of them collects what each has posted."""

    calls = 0  # of all exchanges

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes, self.here = processes, jax.process_index()
        self._group = "jdp/" + "-".join(map(str, processes)) if len(processes) < jax.process_count() else "jdp/all"
        self.connections = Connections(self._group, processes, self.here)
        self._number, self._thread = 0, threading.get_ident()
        self._came: dict[int, dict[int, str]] = {}  # for each call, from each process
        self._unread: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()

    def post(self, what: str, entry: Any) -> Ticket:
        """Posts this process's entry for the next call, `what`; the ticket's `result` waits for the others'."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"jdp.{what}: called from thread {threading.current_thread().name!r}, and the calls before came from "
                f"another; all processes make their calls in one order, which two threads do not keep. Make all calls "
                f"from one thread."
            )
        number, self._number = self._number, self._number + 1
        Exchange.calls += 1
        text = json.dumps([what, entry], separators=(",", ":"))
        if self.here != self.processes[0]:
            self.send(number, text, self.processes[0])
        self._unread[number] = ticket = Ticket(self, what, text, number)
        if len(self._came) > _MANY:  # of iterators that were dropped
            for old in [n for n in self._came if n < number and n not in self._unread]:
                del self._came[old]
        return ticket

    def send(self, number: int, text: str, to: int) -> None:
        self.connections.send(f"{number} {text}".encode(), to)

    def came(self, number: int) -> dict[int, str]:
        """What has come for a call, and from whom."""
        return self._came.setdefault(number, {})

    def wait(self, number: int, processes: Iterable[int], end: float, meanwhile: Callable[[], None]) -> list[int]:
        """Waits until these processes have sent for a call; who has not, when the time is over or one has ended."""
        came, one_left = self.came(number), False
        while missing := [p for p in processes if not came.get(p)]:
            left = end - time.monotonic()
            if left <= 0 or one_left:
                return missing
            found = self.connections.receive(min(left, _SLICE))
            for process, message in found:
                name, text = message.decode().split(" ", 1)
                self.came(int(name))[process] = text
            if not found:
                meanwhile()
                # What it has sent before it ended comes in another round.
                one_left = has_left(missing[0]) and not self.connections.pending(missing[0])
        return []

    def done(self, number: int) -> None:
        self._came.pop(number, None)
        self._unread.pop(number, None)

    def publish(self, key: str, text: str) -> None:
        """Leaves a text that any process of the group can `read`."""
        client().key_value_set(f"{self._group}/{key}", text, allow_overwrite=True)

    def read(self, key: str, seconds: float) -> str:
        return client().blocking_key_value_get(f"{self._group}/{key}", int(seconds * 1000))


class Ticket:
    """One call's exchange, under way."""

    def __init__(self, exchange: Exchange, what: str, text: str, number: int) -> None:
        self._exchange, self._what, self._text, self.number = exchange, what, text, number

    def result(self, seconds: float) -> dict[int, Any]:
        """Each process's entry.

        Raises:
            DesyncError: a process did not come within so many seconds, has ended, or makes another call.
        """
        group, end = self._exchange, time.monotonic() + seconds
        first, *others = group.processes
        if group.here == first:
            absent = group.wait(self.number, others, end, self._say_here)
            # Equal entries once, for most are: a thousand processes then read a line, not a thousand.
            merged: dict[str, list[int]] = {self._text: [first]}
            for process, text in sorted(group.came(self.number).items()):
                merged.setdefault(text, []).append(process)
            answer = json.dumps([list(merged.items()), absent])
            for process in others:
                group.send(self.number, answer, process)
        else:
            # A little more, for the one who collects is to say who is absent; as long again, where it came late.
            came = group.came(self.number)
            absent = group.wait(self.number, [first], end + 2 * _SLICE, _nothing)
            if absent and first in came:
                absent = group.wait(self.number, [first], time.monotonic() + seconds + 2 * _SLICE, _nothing)
            if absent:
                raise DesyncError(self._absent(absent, seconds))
            merged_items, absent = json.loads(came[first])
            merged = dict(merged_items)
        group.done(self.number)
        if absent:
            raise DesyncError(self._absent(absent, seconds))
        entries = {process: json.loads(text) for text, processes in merged.items() for process in processes}
        if len({what for what, _ in entries.values()}) > 1:
            calls = by_value({process: what for process, (what, _) in entries.items()})
            raise DesyncError(
                f"jdp.{self._what}: the processes make different calls: {calls}; all make the same calls in the same "
                f"order. Look for a branch on jax.process_index(), or a loop that is shorter on one: "
                f"dp.prefetch(batches) goes on until all have run out."
            )
        return {process: entry for process, (_, entry) in entries.items()}

    def _say_here(self) -> None:
        """That the collector waits as well, in an empty message; said only where it does for long."""
        for process in self._exchange.came(self.number):
            self._exchange.send(self.number, "", process)

    def _absent(self, absent: list[int], seconds: float) -> str:
        several = len(absent) > 1
        how = f"process{'es' * several} {', '.join(map(str, absent))}"
        if all(map(has_left, absent)):
            how += " have ended their programs" if several else " has ended its program"
        else:
            how += f" did not come to this call within {seconds:.0f} s"
        return (
            f"jdp.{self._what}: {how}, and process {self._exchange.here} waits there; all processes make the same "
            f"calls in the same order. Iterate over dp.prefetch(batches), which goes on until all have run out of "
            f"data; for work that takes one process longer, jdp.distributed.initialize(timeout=...)."
        )


def _nothing() -> None:
    pass


@functools.cache
def exchange_of(processes: tuple[int, ...]) -> Exchange:
    return Exchange(processes)


def by_value(entries: Mapping[int, Any]) -> str:
    """Who has what: `processes 0, 1 have x; process 2 has y`."""
    merged: dict[str, list[int]] = {}
    for process, value in sorted(entries.items()):
        merged.setdefault(str(value), []).append(process)
    return "; ".join(
        f"process{'es' * (len(p) > 1)} {', '.join(map(str, p))} {'have' if len(p) > 1 else 'has'} {value}"
        for value, p in merged.items()
    )
