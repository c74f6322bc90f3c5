"""Messages between processes: the first has a connection to each of the others, and they have one to it."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from multiprocessing.connection import Connection, wait

from ._coordination import client, coordinator_host, get

_TO_CONNECT = 5  # seconds, for each address; and for a stranger to say who it is
# Sockets and not the coordination service, whose gRPC takes ten times as long: a step's rows go this way.


class Connections:
    """Connections of their own, of the processes in `group`; the coordination service brings them together."""

    def __init__(self, group: str, processes: tuple[int, ...], here: int) -> None:
        self._key, self._first, self._here = f"{group}/address", processes[0], here
        self._listens, self._connected = here == processes[0], False
        self._open: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        self._unsent: list[bytes] = []
        if self._listens:
            self._listen(len(processes))

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
        ready = wait([*listening, *self._strangers, *self._open.values()], seconds)
        if self._listens and self._server in ready:
            self._strangers.append(_connection(self._server.accept()[0]))
        for stranger in [c for c in self._strangers if c in ready]:
            self._strangers.remove(stranger)
            self._welcome(stranger)
        complete = True
        for process, connection in [(p, c) for p, c in self._open.items() if c in ready]:
            try:
                while connection.poll():
                    found.append((process, connection.recv_bytes()))
            except (OSError, EOFError):
                del self._open[process]
                complete = False
        return complete

    def _listen(self, backlog: int) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=dual)
        self._token = secrets.token_hex()
        address = [_own_hosts(self._here), self._server.getsockname()[1], self._token]
        client().key_value_set(self._key, json.dumps(address))

    def _welcome(self, stranger: Connection) -> None:
        """Only a process of the job knows the token, which the coordination service gave it."""
        try:
            token, process = json.loads(stranger.recv_bytes(maxlength=1000))
        except (OSError, EOFError, ValueError, TypeError):
            return
        if hmac.compare_digest(str(token), self._token):
            self._open[process] = stranger

    def _connect(self, seconds: float) -> bool:
        """Connects to the first process, if it listens by then."""
        text = get(self._key, seconds)
        if text is None:
            return False
        hosts, port, token = json.loads(text)
        failed = []
        for host in hosts:
            try:
                connection = _connection(socket.create_connection((host, port), timeout=_TO_CONNECT))
            except OSError as error:
                failed.append(f"{host} ({error})")
                continue
            self._connected, self._open[self._first] = True, connection
            for message in [json.dumps([token, self._here]).encode(), *self._unsent]:
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
