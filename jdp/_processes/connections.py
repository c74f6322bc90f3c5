"""Messages between processes: the first has a connection to each of the others, and they have one to it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import json
import secrets
import socket
import struct
import time
from multiprocessing.connection import Connection, wait

from .._jax.coordination import client, coordinator_host, get

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
