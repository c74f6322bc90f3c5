"""The output of several processes as one: whole lines, each behind the rank of its process."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

_STDERR = 2
_TAIL = 120  # lines of stderr kept of each process: more than a traceback through JAX and Flax has
_SHORT_TAIL = 20  # shown of them when there is no traceback
_LONGEST = 1 << 20  # bytes; what is longer is cut, so that no process fills the launcher's memory
_MUCH = 1 << 20  # bytes that may be left to write
_MOMENT = 1.0  # seconds
_ROUNDS = 16  # a pipe holds a MiB at most, and each reads a 16th of it
_ERASE = b"\x1b[K"  # the terminal's: to the end of the line
# A line ends with \n or \r\n, a step of a progress bar with \r: what comes after tells which one it is.
_END = re.compile(rb"\r?\n|\r(?=[^\n])")


class Lines:
    """Cuts the bytes of one stream into lines: `feed` gives those that are complete, `end` what is left."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL)
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        searched = max(0, len(self._rest) - 1)  # a \r at the end may be half of an end
        self._rest += data
        pieces, start = [], 0
        for found in _END.finditer(self._rest, searched):
            pieces += self._piece(bytes(self._rest[start : found.start()]), found[0])
            start = found.end()
        del self._rest[:start]
        return pieces + (self.end() if len(self._rest) > _LONGEST else [])

    def end(self) -> list[bytes]:
        rest, self._rest = bytes(self._rest.rstrip(b"\r")), bytearray()
        return self._piece(rest, b"\n") if rest else []

    def _piece(self, text: bytes, end: bytes) -> list[bytes]:
        if end == b"\r":
            return [self.prefix + text + end] if text else []
        line = self.prefix + text + b"\n"
        self.tail.append(line)
        return [line]


class Printer:
    """Writes to the launcher's own stdout and stderr, never two lines into each other.

    A separate thread writes. It blocks if the output is not read (a pager, Ctrl-S), and the launcher must not.
    """

    def __init__(self, on_broken: Callable[[int], None]) -> None:
        self.hurries = False
        self._on_broken = on_broken
        self._broken: set[int] = set()
        self._bar = False  # the cursor stands in a progress bar, on the terminal
        self._changed = threading.Condition()
        self._left: collections.deque[tuple[int, list[bytes]]] = collections.deque()
        self._size = 0  # bytes that are left
        threading.Thread(target=self._run, name="jdp launch: printer", daemon=True).start()

    def say(self, text: str, lines: Sequence[bytes] = ()) -> None:
        """Writes a line of the launcher itself, and more, to stderr; waits for that a moment, and no longer."""
        with self._changed:
            self._add(_STDERR, [f"jdp launch: {text}\n".encode(errors="replace"), *lines])
        self.has_written(_MOMENT)

    def write(self, fd: int, pieces: list[bytes]) -> None:
        """Writes all pieces to a file descriptor. Waits while much is left to write; in a hurry it drops them then."""
        with self._changed:
            self._changed.wait_for(lambda: self._size < _MUCH or self.hurries)
            if pieces and self._size < _MUCH:
                self._add(fd, pieces)

    def hurry(self) -> None:
        """Drops output that is not read from now on: the job must end, and a process that cannot write cannot end."""
        with self._changed:
            self.hurries = True
            self._changed.notify_all()

    def has_written(self, seconds: float) -> bool:
        """Returns True if all is written, now or within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, seconds)

    def _add(self, fd: int, pieces: list[bytes]) -> None:
        self._left.append((fd, pieces))
        self._size += sum(map(len, pieces))
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left)
                fd, pieces = self._left[0]
            if fd not in self._broken:
                try:
                    _write(fd, self._over_bars(pieces) if os.isatty(fd) else b"".join(pieces))
                except BrokenPipeError:  # the reader is gone (`| head`)
                    self._broken.add(fd)  # the processes must not block on their pipes
                    self._on_broken(signal.SIGPIPE)
                except OSError as error:  # the disk is full
                    self._go_on_without(fd, error)
            with self._changed:
                self._left.popleft()
                self._size -= sum(map(len, pieces))
                self._changed.notify_all()

    def _go_on_without(self, fd: int, error: OSError) -> None:
        """Drops what would go there from now on, and says so: a training that runs for days is worth more."""
        self._broken.add(fd)
        if fd != _STDERR:
            with self._changed:
                text = f"jdp launch: stdout cannot be written ({error}); the processes go on without it\n"
                self._add(_STDERR, [text.encode(errors="replace")])

    def _over_bars(self, pieces: list[bytes]) -> bytes:
        # a line that is shorter than the bar before it would leave the bar's end behind
        text = b""
        for piece in pieces:
            text += (_ERASE if self._bar else b"") + piece
            self._bar = piece.endswith(b"\r")
        return text


def open_the_closed() -> None:
    """Opens the null device for each of stdin, stdout and stderr that is closed: a pipe would get its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which gets the lowest number that is free


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            select.select([], [fd], [])


class Reader(threading.Thread):
    """Prints what processes write, from pipes of theirs: `(pipe, rank, file descriptor to print to)`."""

    def __init__(self, pipes: list[tuple[IO[bytes], int, int]], printer: Printer) -> None:
        super().__init__(name="jdp launch: output", daemon=True)
        self._pipes = pipes
        self._printer = printer
        self._lines = {(rank, fd): Lines(b"[%d] " % rank) for _, rank, fd in pipes}
        self._until: float | None = None

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for pipe, rank, fd in self._pipes:
                selector.register(stack.enter_context(pipe), selectors.EVENT_READ, (rank, fd))
            late = 0  # rounds when the time is up, because what is in the pipes then is still printed
            while selector.get_map() and late < _ROUNDS:
                ready = selector.select(timeout=0.5)
                late += self._until is not None and time.monotonic() >= self._until
                for key, _ in ready:
                    data, lines = os.read(key.fd, 1 << 16), self._lines[key.data]
                    self._printer.write(key.data[1], lines.feed(data) if data else lines.end())
                    if not data:
                        selector.unregister(key.fileobj)
                if not ready and self._until is not None:
                    break  # what still holds a pipe is no process of ours
        for (_, fd), lines in self._lines.items():
            self._printer.write(fd, lines.end())

    def finish(self) -> None:
        """Makes it end when the rest in the pipes is printed; call this when the processes have ended."""
        self._until = time.monotonic() + 5  # a process that fled to a session of its own may go on writing

    def has_ended(self, seconds: float) -> bool:
        """Returns True if it has, now or within this time."""
        self.join(seconds)
        return not self.is_alive()

    def last_words(self, rank: int) -> list[bytes]:
        """Returns the last lines that the process wrote to stderr: from its traceback on, or the last few."""
        tail = list(self._lines[rank, _STDERR].tail)
        start = next((i for i, line in enumerate(tail) if b"Traceback (most recent call last)" in line), None)
        return tail[-_SHORT_TAIL:] if start is None else tail[start:]
