"""Messages between processes, here between two ends in one process: what is sent comes, whole and in order."""

import contextlib
import json
import os
import random
import resource
import socket
import threading
import time

import pytest

from jdp._processes import exchange
from jdp._processes.exchange import Connections

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

    monkeypatch.setattr(exchange, "client", Client)
    monkeypatch.setattr(exchange, "get", lambda key, seconds: values.get(key))
    monkeypatch.setattr(exchange, "coordinator_host", lambda: "127.0.0.1")
    servers = []
    listen = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: servers.append(listen(*a, **k)) or servers[-1])
    yield values
    for server in servers:
        server.close()


@pytest.fixture
def first(kept):
    made = Connections("g", (FIRST, OTHER), FIRST)
    yield made
    for stranger in made._strangers:
        stranger.socket.close()


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
        framed('["\u00e9", 3]'.encode()),
        framed(b"[" * 999),
        framed(b'[{"a": 1}, []]'),
        b"\xc3\xa9" * 500,
        *(random.Random(seed).randbytes(68) for seed in range(3)),
    ],
    ids=["http", "text", "token", "huge", "half", "nothing", "letter", "deep", "types", "letters", "1", "2", "3"],
)
def test_strangers_are_not_heard_and_stop_nobody(first, other, kept, words, monkeypatch):
    monkeypatch.setattr(exchange, "_TO_CONNECT", 1)
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


@pytest.fixture
def knock(first, kept):
    """`knock()`: a connection to the first process, from anywhere."""
    _, port, _ = json.loads(kept["g/address"])
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))


def hear(first, seconds):
    """What the first process receives within so many seconds, until there is something."""
    end, got = time.monotonic() + seconds, []
    while not got and time.monotonic() < end:
        got = first.receive(0.2)
    return got


def is_closed(stranger):
    stranger.settimeout(0.01)
    try:
        return stranger.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("head", [b"", framed(b"x" * 900)[:5]], ids=["bare", "header"])
def test_who_says_who_it_is_byte_by_byte_stops_nobody_and_is_closed_in_time(first, other, knock, head, monkeypatch):
    monkeypatch.setattr(exchange, "_TO_CONNECT", 1)
    stranger, stop = knock(), threading.Event()

    def trickle():
        with contextlib.suppress(OSError):
            stranger.sendall(head)
            for _ in range(60):
                if stop.wait(0.1):
                    return
                stranger.sendall(b"x")

    trickler = threading.Thread(target=trickle)
    trickler.start()
    try:
        first.receive(0.3)
        start = time.monotonic()
        other.send(b"mine", FIRST)
        other.receive(0.01)
        assert hear(first, 5) == [(OTHER, b"mine")]
        assert time.monotonic() - start < 0.5
        assert first.receive(1.5) == []
        trickler.join(1)
        assert not trickler.is_alive()  # who sends to a closed connection is told so
    finally:
        stop.set()
        trickler.join()


def test_a_greeting_that_was_there_in_time_is_heard_however_late(first, other, monkeypatch):
    """Process 0 computes for longer than a stranger may take, after it has accepted the connection."""
    monkeypatch.setattr(exchange, "_TO_CONNECT", 1)
    create_connection = socket.create_connection
    sent = threading.Event()

    class Late(socket.socket):
        def sendall(self, *args):
            assert sent.wait(5)
            super().sendall(*args)

    def connect(*args, **kwargs):
        connected = create_connection(*args, **kwargs)
        return Late(fileno=connected.detach())

    monkeypatch.setattr(socket, "create_connection", connect)
    other.send(b"mine", FIRST)
    connecting = threading.Thread(target=other.receive, args=(0.01,))
    connecting.start()
    while not first._strangers:
        assert first.receive(0.05) == []
    sent.set()
    connecting.join()
    time.sleep(1.2)
    assert hear(first, 2) == [(OTHER, b"mine")]


def test_who_says_nothing_is_closed_and_so_many_are_not_kept(first, other, knock, monkeypatch):
    monkeypatch.setattr(exchange, "_TO_CONNECT", 1)
    strangers = [knock() for _ in range(200)]  # before anybody accepts one: they fit into the queue
    assert first.receive(0.3) == []
    assert len(first._strangers) < 100
    other.send(b"mine", FIRST)
    other.receive(0.01)
    assert hear(first, 5) == [(OTHER, b"mine")]
    end = time.monotonic() + 5
    while first._strangers:
        assert first.receive(0.2) == [] and time.monotonic() < end
    assert all(map(is_closed, strangers))


def test_without_file_descriptors_strangers_make_room_and_the_job_goes_on(first, other, knock):
    strangers = [knock(), knock()]
    while len(first._strangers) < len(strangers):
        assert first.receive(0.05) == []
    other.send(b"mine", FIRST)
    other.receive(0.01)
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        assert hear(first, 2) == [(OTHER, b"mine")]  # sooner than the strangers' time is over
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        other.send(b"more", FIRST)
        assert hear(first, 2) == [(OTHER, b"more")]
        assert first.receive(0.2) == []
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    other.send(b"last", FIRST)
    assert hear(first, 2) == [(OTHER, b"last")]


def test_nobody_is_heard_without_the_token(first, other, kept):
    hosts, port, token = json.loads(kept["g/address"])
    right = kept["g/address"]
    for wrong in (token[:-1] + "x", "x" * len(token), token.upper(), ""):
        kept["g/address"] = json.dumps([hosts, port, wrong])
        impostor = Connections("g", (FIRST, OTHER), OTHER)
        impostor.send(b"false", FIRST)
        impostor.receive(0.01)
        assert first.receive(0.2) == [] and first._open == {}
    kept["g/address"] = right
    other.send(b"mine", FIRST)
    other.receive(0.01)
    assert hear(first, 2) == [(OTHER, b"mine")]


@pytest.mark.parametrize("claimed", [7, FIRST, OTHER], ids=["foreign", "the first", "connected"])
def test_who_knows_the_token_is_still_only_one_of_the_group_and_once(first, other, kept, claimed):
    other.send(b"mine", FIRST)
    other.receive(0.01)
    assert hear(first, 5) == [(OTHER, b"mine")]
    impostor = Connections("g", (FIRST, OTHER), 99)
    impostor._here = claimed
    impostor.send(b"false", FIRST)
    impostor.receive(0.01)
    assert first.receive(0.3) == []
    assert list(first._open) == [OTHER]
    assert impostor._open[FIRST].poll(1)  # its end
    other.send(b"more", FIRST)
    assert first.receive(1) == [(OTHER, b"more")]


def test_an_address_that_cannot_be_reached_is_named(kept, monkeypatch):
    monkeypatch.setattr(exchange, "_TO_CONNECT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    kept["g/address"] = json.dumps([["127.0.0.1"], port, "token"])
    other = Connections("g", (FIRST, OTHER), OTHER)
    with pytest.raises(RuntimeError, match=rf"process 3 cannot connect to process 0 on port {port} of 127\.0\.0\.1 \("):
        other.receive(1)
