"""Messages between processes, here between two ends in one process: what is sent comes, whole and in order."""

import json
import socket
import threading
import time

import pytest

from jdp import _connections
from jdp._connections import Connections

FIRST, OTHER = 0, 3


def framed(message):
    """As `multiprocessing.connection.Connection` sends it."""
    return len(message).to_bytes(4, "big") + message


@pytest.fixture
def kept(monkeypatch):
    """The keys and values of a coordination service."""
    values = {}

    class Client:
        def key_value_set(self, key, value):
            values[key] = value

    monkeypatch.setattr(_connections, "client", Client)
    monkeypatch.setattr(_connections, "get", lambda key, seconds: values.get(key))
    monkeypatch.setattr(_connections, "coordinator_host", lambda: "127.0.0.1")
    servers = []
    listen = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: servers.append(listen(*a, **k)) or servers[-1])
    yield values
    for server in servers:
        server.close()


@pytest.fixture
def first(kept):
    return Connections("g", (FIRST, OTHER), FIRST)


@pytest.fixture
def other(kept, first):
    return Connections("g", (FIRST, OTHER), OTHER)


def test_what_is_sent_comes_whole_and_in_order(first, other):
    sent = [b"one", b"", b"x" * 1_000_000, b"four"]
    for message in sent[:2]:
        other.send(message, FIRST)  # before there is a connection
    assert other.receive(0.05) == []
    got = []
    for message in sent[2:]:
        # What a socket does not hold is written while the other end reads.
        writer = threading.Thread(target=other.send, args=(message, FIRST))
        writer.start()
        while message not in [m for _, m in got]:
            got += first.receive(1)
        writer.join()
    assert got == [(OTHER, message) for message in sent]
    first.send(b"answer", OTHER)
    assert other.receive(1) == [(FIRST, b"answer")]


def test_before_the_first_listens_nothing_comes(kept):
    other = Connections("g", (FIRST, OTHER), OTHER)
    other.send(b"early", FIRST)
    assert other.receive(0.01) == []
    first = Connections("g", (FIRST, OTHER), FIRST)
    assert other.receive(0.01) == []
    assert first.receive(1) == [(OTHER, b"early")]


def test_a_lost_connection_is_seen_at_once_and_what_came_before_is_read(first, other):
    other.send(b"last", FIRST)
    other.receive(0.01)
    assert first.receive(1) == [(OTHER, b"last")]
    other._open.pop(FIRST).close()
    start = time.monotonic()
    assert first.receive(20) == []
    assert time.monotonic() - start < 5
    assert not first.pending(OTHER)
    first.send(b"to nobody", OTHER)
    assert first._unsent == []
    assert first.receive(0.01) == []


def test_the_first_is_lost(first, other):
    other.receive(0.01)
    first._server.close()
    other._open[FIRST].close()
    del other._open[FIRST]
    start = time.monotonic()
    assert other.receive(0.2) == []  # no second connection, and no busy loop
    assert 0.15 < time.monotonic() - start < 5


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        framed(b'["wrong", 3]') + framed(b"heard"),
        b"\xff\xff\xff\xff" + (2**62).to_bytes(8, "big"),
        b"\x00\x00\x00\x09[1,",
        b"",
    ],
    ids=["http", "text", "token", "huge", "half", "nothing"],
)
def test_strangers_are_not_heard_and_stop_nobody(first, other, kept, words, monkeypatch):
    monkeypatch.setattr(_connections, "_TO_CONNECT", 1)
    _, port, _ = json.loads(kept["g/address"])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(words)
        assert first.receive(0.1) == []
        other.send(b"mine", FIRST)
        other.receive(0.01)
        deadline = time.monotonic() + 5
        got = []
        while not got and time.monotonic() < deadline:
            got = first.receive(0.5)
        assert got == [(OTHER, b"mine")]
        assert list(first._open) == [OTHER]


def test_an_address_that_cannot_be_reached_is_named(kept, monkeypatch):
    monkeypatch.setattr(_connections, "_TO_CONNECT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    kept["g/address"] = json.dumps([["127.0.0.1"], port, "token"])
    other = Connections("g", (FIRST, OTHER), OTHER)
    with pytest.raises(RuntimeError, match=rf"process 3 cannot connect to process 0 on port {port} of 127\.0\.0\.1 \("):
        other.receive(1)
