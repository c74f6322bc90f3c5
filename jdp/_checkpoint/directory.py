"""The directory of a `Checkpointer`: many may read it, one writes it, and only its own files are touched."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import jax

from .items import VERB

LOCK = ".jdp-lock"
_SEEN = ".jdp-seen-"  # how the names of the files begin that processes look for
_UNFINISHED = re.compile(r"(0|[1-9][0-9]*)\.orbax-checkpoint-tmp(-[0-9]+)?")  # Orbax's name for an incomplete step
_STEP = re.compile(r"0|[1-9][0-9]*")
# Seconds that a failed save may go on writing (Orbax does not wait for the writes that it abandons).
_LATE = 5.0
_PATIENCE = 60.0  # seconds that a process looks for the file that process 0 has made


def absolute(directory: str | os.PathLike[str]) -> Any:
    """Returns the absolute path, with links resolved; `~` is the user's home."""
    from etils import epath  # Orbax's own paths, which include cloud storage

    path = os.fspath(directory)
    scheme, _, rest = path.rpartition("://")
    _check_path(path, rest if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) else path)
    if scheme:
        try:
            return epath.Path(path)
        except KeyError:
            raise ValueError(
                f"jdp.{VERB}: {path!r} is in a storage that jdp has no access to; it is a directory, or begins with "
                f"gs:// or s3://. Pass one of these."
            ) from None
    path = os.path.realpath(os.path.expanduser(path))
    _check_path(path, path)  # again, because a link may lead anywhere
    with _writing(path), contextlib.suppress(FileNotFoundError):  # the first save makes it
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is no directory")
    return epath.Path(path)


def _check_path(path: str, rest: str) -> None:
    """Refuses a path that not all libraries would read the same way; `rest` is the path without its scheme."""
    wrong = {"\\": "a backslash", "\0": "a null character", "://": "'://' in the middle"}
    found = [what for text, what in wrong.items() if text in rest]
    if any("\ud800" <= c <= "\udfff" for c in path):
        found.append("a character that is none in UTF-8")
    if found:
        raise ValueError(
            f"jdp.{VERB}: {path!r} has {' and '.join(found)}; what writes the arrays would look for another place, or "
            f"find none. Pass a directory whose path has nothing of the kind, or rename it."
        )


def is_local(path: Any) -> bool:
    """Returns True if the path is in a file system, with links and locks, and not in cloud storage."""
    return "://" not in os.fspath(path)


def make_writable(directory: Any) -> None:
    """Makes the directory if needed, and makes and deletes a file in it; raises if it cannot be written."""
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if is_local(directory):  # nameless or with a free name: a known name may be a link to elsewhere
            tempfile.TemporaryFile(prefix=".jdp-", dir=directory).close()
        else:
            probe = directory / f".jdp-{os.getpid()}-{jax.process_index()}"
            probe.write_text("")
            probe.unlink()


@contextlib.contextmanager
def _writing(directory: Any) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise type(e)(
            f"jdp.{VERB}: {directory} cannot be written: {e.strerror or e}; checkpoints are made there by this "
            f"user. Make it writable, or pass another directory."
        ) from e


class Sign:
    """A file that process 0 makes. The others look for it: if they see it, they see the same directory.

    Not the lock's file: a job that was killed may have left one in another directory, and some file systems of a
    network show a file only when it has been closed.
    """

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._path: str | None = None

    def make(self) -> str:
        """Makes the file, complete and on the disk, and returns its name, which is a new one; "" in cloud storage."""
        if not is_local(self._directory):
            return ""
        for left in self._directory.glob(f"{_SEEN}*"):  # by a job that was killed: the lock says that there is no other
            with contextlib.suppress(OSError):
                left.unlink()
        name = f"{_SEEN}{uuid.uuid4().hex}"
        path = os.path.join(self._directory, name)
        with _writing(self._directory), open(path, "xb") as file:
            self._path = path
            file.write(b"jdp")
            file.flush()
            os.fsync(file.fileno())
        return name

    def why_unseen(self, name: str) -> str:
        """Returns why this process does not see the file, or ""; it looks for a minute, as a network may be late."""
        end = time.monotonic() + _PATIENCE
        while name and is_local(self._directory):
            try:
                os.lstat(os.path.join(self._directory, name))
                return ""
            except OSError as e:
                why = e.strerror or str(e)
            if time.monotonic() > end:
                return why
            with contextlib.suppress(OSError):
                make_writable(self._directory)  # after a change of its own a client of NFS looks there again
            time.sleep(0.1)
        return ""

    def delete(self) -> None:
        """Deletes the file, if this process has made one."""
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)


def kind(mode: int) -> str:
    """Returns what a file of this mode is, for an error message."""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}
    return "a file" if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "a device")


def open_file(path: str, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file and returns its descriptor; refuses others, because a link leads out and a FIFO blocks."""
    with contextlib.suppress(FileNotFoundError):  # checked before, because opening a device may have effects
        _check_file(os.lstat(path).st_mode)
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_file(os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_file(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind(mode)} and no file")


class Lock:
    """The right to write in a directory: one process has it until it releases it or ends, even by a `kill -9`.

    It is `flock` on a file in the directory, which names the process that holds it and exists as long as it is held.
    Cloud storage has no such locks.
    """

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._path = os.path.join(directory, LOCK)
        self._handle: int | None = None

    def acquire(self) -> None:
        """Takes the lock unless it holds it; raises if another process has it, warns if there are no locks."""
        if self._holds():
            return
        self.release()
        make_writable(self._directory)
        while is_local(self._directory):
            with _writing(self._directory):
                self._handle = open_file(self._path, os.O_RDWR | os.O_CREAT)
                if os.fstat(self._handle).st_nlink > 1:
                    self._forget()
                    raise OSError(errno.EMLINK, f"{LOCK} is a file elsewhere, too")
            _held.add(self)
            self._lock()
            if self._holds():
                with contextlib.suppress(OSError):  # a full disk: then the file does not name the holder
                    os.ftruncate(self._handle, 0)
                    os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return
            self._forget()  # the process that held it has deleted this file

    def release(self) -> None:
        """Releases the lock."""
        if self._handle is not None and self._holds():
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._forget()

    def _lock(self) -> None:
        import fcntl

        assert self._handle is not None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as e:
            text = os.read(self._handle, 400).decode(errors="replace").strip()
            who = text if re.fullmatch(r"process [0-9]+ on [\w.-]+", text) else "another process"
            self._forget()
            raise RuntimeError(
                f"jdp.{VERB}: {self._directory} is being written by {who}; a directory of checkpoints has one writer "
                f"at a time, and any number of readers. End that one, or close its Checkpointer, or pass another "
                f"directory."
            ) from e
        except OSError as e:
            warnings.warn(
                f"jdp.{VERB}: {self._directory} is on a file system without locks ({e.strerror or e}); a second writer "
                f"would not be noticed. See to it that one job at a time saves there.",
                stacklevel=6,  # the user's line, beyond `save`
            )

    def _holds(self) -> bool:
        """Returns True if the lock is held, and its file is still at its path, where other processes look for it."""
        if self._handle is None:
            return False
        try:
            there = os.lstat(self._path)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the directory cannot be reached: a save will raise the reason
        return os.path.samestat(os.fstat(self._handle), there)

    def _forget(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


# A forked child inherits the descriptor and with it the lock, and it may live longer than its parent.
_held: weakref.WeakSet[Lock] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock._forget() for lock in _held])


class Quiet(logging.Filter):
    """Hides what Orbax logs as long as a Checkpointer is open, because its failures are raised as exceptions.

    It also hides the errors of writes that Orbax abandons when another fails: these report in their own threads that
    the event loop is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("absl").addFilter(self)
        self.abandoned = False  # whether writes were abandoned; these may report for some seconds
        self._over = False
        self._before, sys.unraisablehook = sys.unraisablehook, self._unraisable

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def close(self) -> None:
        """Ends the hiding; a few seconds later if writes were abandoned."""
        logging.getLogger("absl").removeFilter(self)
        if not self.abandoned:
            return self._put_back()
        later = threading.Timer(_LATE, self._put_back)
        later.daemon = True
        with contextlib.suppress(RuntimeError):  # at exit, when Python starts no more threads
            later.start()

    def _put_back(self) -> None:
        self._over = True
        hook = sys.unraisablehook
        while isinstance(quiet := getattr(hook, "__self__", None), Quiet) and quiet._over:
            hook = quiet._before  # several may be active, and may end in any order
        sys.unraisablehook = hook

    def _unraisable(self, report: Any) -> None:
        if not (isinstance(report.exc_value, RuntimeError) and str(report.exc_value) == "Event loop is closed"):
            self._before(report)


def steps_in(directory: Any) -> list[int]:
    """Returns the steps that have a complete checkpoint, or a link in its place."""
    if not is_local(directory):
        import orbax.checkpoint as ocp

        return sorted(ocp.utils.checkpoint_steps(directory)) if directory.is_dir() else []
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if e.is_symlink() or e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def delete(path: Any) -> None:
    """Deletes a checkpoint; if it is a link, only the link."""
    if os.path.islink(path):
        path.unlink()
    else:
        path.rmtree()


def free_name(directory: Any, name: str) -> str:
    """Returns the name, with a number appended if it is taken."""
    taken = {path.name for path in directory.iterdir()}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 10**6))) if n not in taken)


def remove_unfinished(directory: Any, patience: float = _LATE) -> None:
    """Deletes what killed or failed saves have left; a failed one may go on writing for `patience` seconds."""
    end = time.monotonic() + patience
    for path in directory.iterdir() if directory.is_dir() else ():
        while _UNFINISHED.fullmatch(path.name) and path.is_dir() and not os.path.islink(path):
            try:
                path.rmtree()
            except OSError as e:
                if time.monotonic() > end:
                    raise type(e)(
                        f"jdp.{VERB}: {path} cannot be deleted: {e.strerror or e}; it is what is left of a save that "
                        f"did not end, and nothing reads it. Delete it by hand, or pass another directory."
                    ) from e
                time.sleep(0.02)
