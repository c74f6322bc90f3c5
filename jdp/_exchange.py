"""The processes tell each other, in the order of their calls: `result(post(x)) == {0: its x, 1: its x, ...}`."""

from __future__ import annotations

import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ._processes import client


class DesyncError(RuntimeError):
    """The processes of a job do not do the same: a call, a shape, a program or a value differs, or one is absent."""

    __module__ = "jdp.distributed"


class Limits:
    """Seconds to wait for the other processes; `jdp.distributed.initialize` sets them."""

    def __init__(self, step: float = 20.0, start: float = 60.0, compile: float = 1800.0) -> None:
        self.step, self.start, self.compile = step, start, compile


limits = Limits()
_SLICE = 1.0  # seconds after which a waiting process looks whether the one it waits for has ended
_BLOCK = 64  # calls whose keys are deleted together


class Exchange:
    """The calls of the processes that share a mesh, numbered; the first of them collects what each has posted."""

    calls = 0  # of all exchanges

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes, self.here = processes, jax.process_index()
        self._group = "jdp/" + "-".join(map(str, processes)) if len(processes) < jax.process_count() else "jdp/all"
        self._number, self._deleted, self._thread = 0, 0, threading.get_ident()
        self.unread: weakref.WeakSet[Ticket] = weakref.WeakSet()  # of an iterator that was dropped, none

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
        if number % _BLOCK == 0 and self.here == self.processes[0]:
            self._delete_read(number)
        path = f"{self._group}/{number // _BLOCK}/{number % _BLOCK}"
        text = json.dumps([what, entry], separators=(",", ":"))
        if self.here != self.processes[0]:
            client().key_value_set(f"{path}/{self.here}", text)
        ticket = Ticket(self, what, path, text, number)
        self.unread.add(ticket)
        return ticket

    def _delete_read(self, number: int) -> None:
        """Deletes what all have read: they have, one block later, but for what waits in an iterator."""
        oldest = min([ticket.number for ticket in self.unread], default=number)
        while (self._deleted + 1) * _BLOCK <= min(oldest, number - _BLOCK):
            client().key_value_delete(f"{self._group}/{self._deleted}/")
            self._deleted += 1

    def publish(self, key: str, text: str) -> None:
        """Leaves a text that any process of the group can `read`."""
        client().key_value_set(f"{self._group}/{key}", text, allow_overwrite=True)

    def read(self, key: str, seconds: float) -> str:
        return client().blocking_key_value_get(f"{self._group}/{key}", int(seconds * 1000))


class Ticket:
    """One call's exchange, under way."""

    def __init__(self, exchange: Exchange, what: str, path: str, text: str, number: int) -> None:
        self._exchange, self._what, self._path, self._text, self.number = exchange, what, path, text, number

    def result(self, seconds: float) -> dict[int, Any]:
        """Each process's entry.

        Raises:
            DesyncError: a process did not come within so many seconds, has ended, or makes another call.
        """
        group, end = self._exchange, time.monotonic() + seconds
        if group.here == group.processes[0]:
            found, absent = self._collected(end)
            # Equal entries once, for most are: a thousand processes then read a line, not a thousand.
            merged: dict[str, list[int]] = {}
            for process, text in sorted(found.items()):
                merged.setdefault(text, []).append(process)
            client().key_value_set(f"{self._path}/all", json.dumps([list(merged.items()), absent]))
        else:
            # A little more, for the one who collects is to say who is absent; as long again, where it came late.
            first, key = group.processes[0], f"{self._path}/all"
            text = _wait(key, end + 2 * _SLICE, lambda: _has_left(first))
            if text is None and now(f"{self._path}/here") is not None:
                text = _wait(key, time.monotonic() + seconds + 2 * _SLICE, lambda: _has_left(first))
            if text is None:
                raise DesyncError(self._absent([group.processes[0]], seconds))
            merged_items, absent = json.loads(text)
            merged = dict(merged_items)
        group.unread.discard(self)
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

    def _collected(self, end: float) -> tuple[dict[int, str], list[int]]:
        group, found = self._exchange, {self._exchange.here: self._text}
        while missing := [p for p in group.processes if p not in found]:
            text = _wait(f"{self._path}/{missing[0]}", end, lambda p=missing[0]: self._say_here() or _has_left(p))
            if text is None:
                late = self._posted()
                return {**found, **late}, [p for p in missing if p not in late]
            found[missing[0]] = text
            if len(missing) > 2:
                found |= self._posted()
        return found, []

    def _say_here(self) -> None:
        """That the collector waits as well; said only where it does for long."""
        client().key_value_set(f"{self._path}/here", "", allow_overwrite=True)

    def _posted(self) -> dict[int, str]:
        entries = [(key.rsplit("/", 1)[1], text) for key, text in client().key_value_dir_get(self._path + "/")]
        return {int(name): text for name, text in entries if name.isdecimal()}

    def _absent(self, absent: list[int], seconds: float) -> str:
        several = len(absent) > 1
        how = f"process{'es' * several} {', '.join(map(str, absent))}"
        if all(map(_has_left, absent)):
            how += " have ended their programs" if several else " has ended its program"
        else:
            how += f" did not come to this call within {seconds:.0f} s"
        return (
            f"jdp.{self._what}: {how}, and process {self._exchange.here} waits there; all processes make the same "
            f"calls in the same order. Iterate over dp.prefetch(batches), which goes on until all have run out of "
            f"data; for work that takes one process longer, jdp.distributed.initialize(timeout=...)."
        )


def _wait(key: str, end: float, stop: Callable[[], bool]) -> str | None:
    """The value of a key, once it is there; None when the time is over, or there is nothing to wait for."""
    while (left := end - time.monotonic()) > 0:
        try:
            return client().blocking_key_value_get(key, max(1, int(min(left, _SLICE) * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise DesyncError(
                    f"jdp: process 0, through which the processes tell each other, has ended "
                    f"({str(error).splitlines()[0]}). Its own output says why."
                ) from error
        if stop():
            # It may have posted this and ended since.
            return now(key)
    return None


def now(key: str) -> str | None:
    """The value of a key, or None."""
    try:
        return client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _has_left(process: int) -> bool:
    return now(left_key(process)) is not None


def left_key(process: int) -> str:
    """What a process sets that ends its program in good order."""
    return f"jdp/left/{process}"


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
