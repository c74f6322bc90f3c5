"""The processes tell each other, in the order of their calls: `result(post(x)) == {0: its x, 1: its x, ...}`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hmac
import json
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import jax

from .coordination import DesyncError, client, coordinator_host, get, has_left


class Limits:
    """Seconds to wait for the other processes; `jdp.distributed.initialize` sets them."""

    def __init__(self, step: float = 20.0, start: float = 60.0, compile: float = 1800.0) -> None:
        self.step, self.start, self.compile = step, start, compile


limits = Limits()
_SLICE = 1.0  # seconds after which a waiting process looks whether the one it waits for has ended
_MANY = 64  # calls that have gone on without what came for them, before that is dropped
_PUBLISHED = 1024  # texts that a process leaves for others to read, before it deletes the oldest


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
        self._published: dict[str, None] = {}  # the keys of `publish_once`, the one used last at the end

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

    def publish_once(self, key: str, text: str) -> None:
        """The same, where the text of a key never changes; of very many those used longest ago are deleted."""
        if key not in self._published:
            self.publish(key, text)
        self._published.pop(key, None)
        self._published[key] = None
        if len(self._published) > _PUBLISHED:
            oldest = next(iter(self._published))
            del self._published[oldest]
            client().key_value_delete(f"{self._group}/{oldest}")

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


_TO_CONNECT = 5  # seconds, for each address; and for a stranger to say who it is
_STRANGERS = 64  # that may wait to say who they are, beside those of the group
_GREETING = struct.Struct("!64sI")  # the token, and the number of the process


# Sockets and not the coordination service, whose gRPC takes ten times as long: a step's rows go this way.


@dataclasses.dataclass(eq=False)
class _Stranger:
    """Who has connected, and has not yet said who it is."""

    socket: socket.socket
    deadline: float
    said: bytes = b""


class Connections:
    """Connections of their own, of the processes in `group`; the coordination service brings them together."""

    def __init__(self, group: str, processes: tuple[int, ...], here: int) -> None:
        self._key, self._first, self._here = f"{group}/address", processes[0], here
        self._listens, self._connected = here == processes[0], False
        self._open: dict[int, Connection] = {}
        self._others = frozenset(processes) - {here}
        self._strangers: list[_Stranger] = []  # the one that came first is the first
        self._unsent: list[bytes] = []
        if self._listens:
            self._listen()

    def send(self, message: bytes, to: int) -> None:
        """Sends a message; one for the first process waits here until that listens."""
        if to not in self._open:
            if not self._listens and not self._connected:  # else that process has ended, or waits no longer
                self._unsent.append(message)
            return
        with contextlib.suppress(OSError):  # it has ended: who waits for its answer sees that
            self._open[to].send_bytes(message)

    def receive(self, seconds: float) -> list[tuple[int, bytes]]:
        """The messages that have come, and from whom; waits so long for the first one, or for a connection to end."""
        end = time.monotonic() + seconds
        if not self._listens and not self._connected and not self._connect(seconds):
            return []
        found: list[tuple[int, bytes]] = []
        while not found and (left := end - time.monotonic()) > 0:
            if not self._read_ready(found, left):
                break
        return found

    def pending(self, process: int) -> bool:
        """Whether something of this process is here that was not received."""
        return process in self._open and self._open[process].poll()

    def _read_ready(self, found: list[tuple[int, bytes]], seconds: float) -> bool:
        """Adds what is ready; whether all connections are still there."""
        listening = [self._server] if self._listens else []
        if self._strangers:
            seconds = min(seconds, max(0.0, self._strangers[0].deadline - time.monotonic()))
        ready = wait([*listening, *(s.socket for s in self._strangers), *self._open.values()], seconds)
        for stranger in [*self._strangers]:
            if stranger.socket in ready or stranger.deadline <= time.monotonic():
                self._hear(stranger)
        if self._listens and self._server in ready:
            self._accept()
        complete = True
        for process, connection in [(p, c) for p, c in self._open.items() if c in ready]:
            try:
                while connection.poll():
                    found.append((process, connection.recv_bytes()))
            except (OSError, EOFError):
                del self._open[process]
                complete = False
        return complete

    def _listen(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        # While this process computes nobody accepts, and whoever finds the queue full cannot connect.
        backlog = len(self._others) + 1024
        self._server = socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=dual)
        self._server.setblocking(False)
        self._token = secrets.token_hex(32)
        address = [_own_hosts(self._here), self._server.getsockname()[1], self._token]
        client().key_value_set(self._key, json.dumps(address))

    def _accept(self) -> None:
        """Takes in who has connected; of too many that say nothing the one that has waited longest goes."""
        try:
            accepted, _ = self._server.accept()
            accepted.setblocking(False)
        except OSError as error:  # it has gone already, or this process has no file descriptor left
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                self._dismiss(self._strangers[0])
            else:
                time.sleep(0.01)
            return
        self._strangers.append(_Stranger(accepted, time.monotonic() + _TO_CONNECT))
        if len(self._strangers) > len(self._others) + _STRANGERS:
            self._dismiss(self._strangers[0])

    def _hear(self, stranger: _Stranger) -> None:
        """Reads what is there of a greeting; only a process of the job has the token, from the coordination service."""
        over = stranger.deadline <= time.monotonic()
        try:
            some = stranger.socket.recv(_GREETING.size - len(stranger.said))
            stranger.said += some
            over |= not some  # it has closed the connection
        except BlockingIOError:
            pass
        except OSError:
            over = True
        if len(stranger.said) < _GREETING.size:
            if over:
                self._dismiss(stranger)
            return
        token, process = _GREETING.unpack(stranger.said)
        expected = process in self._others and process not in self._open  # nobody takes the place of one that is there
        if not (hmac.compare_digest(token, self._token.encode()) and expected):
            self._dismiss(stranger)
            return
        self._strangers.remove(stranger)
        self._open[process] = _connection(stranger.socket)

    def _dismiss(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        stranger.socket.close()

    def _connect(self, seconds: float) -> bool:
        """Connects to the first process, if it listens by then."""
        text = get(self._key, seconds)
        if text is None:
            return False
        hosts, port, token = json.loads(text)
        failed = []
        for host in hosts:
            try:
                connected = socket.create_connection((host, port), timeout=_TO_CONNECT)
                connected.sendall(_GREETING.pack(token.encode(), self._here))
            except OSError as error:
                failed.append(f"{host} ({error})")
                continue
            self._connected, self._open[self._first] = True, _connection(connected)
            for message in self._unsent:
                self.send(message, self._first)
            self._unsent.clear()
            return True
        raise RuntimeError(
            f"jdp: process {self._here} cannot connect to process {self._first} on port {port} of {', '.join(failed)}; "
            f"the processes of a job open connections between each other, as NCCL and Gloo do. Let the network between "
            f"these machines allow it."
        )


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A message comes whole or not at all; who sends half of one is none of ours, and is not waited for.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _TO_CONNECT, 0))
    return Connection(connected.detach())


def _own_hosts(process: int) -> list[str]:
    """Where others find this process, the likeliest first."""
    coordinator = coordinator_host()
    hosts = [coordinator] if process == 0 else []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((coordinator, 1))  # sends nothing: the system only chooses the way, and with it the own address
        hosts.append(probe.getsockname()[0])
    return list(dict.fromkeys([*hosts, socket.gethostname()]))
