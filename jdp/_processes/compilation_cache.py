"""Compiled programs are kept in a folder, from which a restarted job reads them: it compiles none of them again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import secrets

import jax

from .._jax.private import keep_programs
from .coordination import say

LIMIT = 4 << 30  # bytes that a folder holds; then those go that were used longest ago
_SUFFIX = ".jdp-program"
_DIGEST = hashlib.sha256().digest_size  # bytes


def use_compilation_cache(folder: str | os.PathLike[str] | None) -> None:
    """Keeps what JAX compiles in this folder, or in the one that the launcher names; "none" is nowhere.

    A cache that JAX has been told of is the user's own, and is left alone. What goes wrong here is said, and ends
    nothing: without the folder a start takes longer.
    """
    path = os.path.expanduser(folder or os.environ.get("JDP_COMPILATION_CACHE") or "none")
    config = jax.config.values
    if path == "none" or config["jax_compilation_cache_dir"] or not config["jax_enable_compilation_cache"]:
        return
    try:
        programs = Programs(_opened(path), path)
    except OSError as error:
        return _say(path, error)
    if not keep_programs(programs, os.path.abspath(path)):
        return
    for name, default, ours in (
        ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.0),
        ("jax_persistent_cache_enable_xla_caches", "xla_gpu_per_fusion_autotune_cache_dir", "none"),  # not checked
    ):
        if config[name] == default and name.upper() not in os.environ:
            jax.config.update(name, ours)


def _opened(path: str) -> int:
    """Returns a descriptor of the folder, which only this user may use; renaming does not change which one it is."""
    if "://" in path:
        raise OSError("it is no folder of this machine's; for cloud storage set JAX_COMPILATION_CACHE_DIR")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):
        raise OSError(f"it is a link, which may lead elsewhere later. Pass the folder itself, {os.path.realpath(path)}")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(folder)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return folder
    os.close(folder)
    raise PermissionError(
        f"it belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}; a user who writes there runs code as "
        f"you, so it must be yours (user {os.geteuid()}) with mode 700. Run chmod 700 on it, or pass another"
    )


def _say(path: str, error: OSError) -> None:
    """Prints, once on each machine, that the folder cannot be used."""
    if os.environ.get("JDP_LOCAL_PROCESS_ID", "0") == "0":
        say(f"jdp: compiled programs cannot be kept in {path}: {error}; this run goes on without")


class Programs:
    """What `put` was told `get` gives back, to the last bit, to any process of any run, or None.

    Each program is a file. It is written under another name and renamed, so that no reader sees half of it. The SHA-256
    of its name and of the program stands in front: a file that is damaged, or has the name of another program, is
    deleted, and the program is compiled and written again. The folder holds `limit` bytes, and what each process has
    written since it last looked, at most a thirty-second of `limit`.
    """

    def __init__(self, folder: int, path: str, limit: int = LIMIT) -> None:
        self._folder, self._path, self._limit = folder, path, limit
        self._unseen = limit  # bytes that may have been added since this process looked
        self._said = False

    def get(self, key: str) -> bytes | None:
        name = _name(key)
        with contextlib.suppress(OSError):
            with open(os.open(name, os.O_RDONLY, dir_fd=self._folder), "rb") as file:
                digest, data = file.read(_DIGEST), file.read()
            if _digest(name, data) == digest:
                with contextlib.suppress(OSError):  # of a file system that is read-only
                    os.utime(name, dir_fd=self._folder)
                return data
            os.unlink(name, dir_fd=self._folder)
        return None

    def put(self, key: str, data: bytes) -> None:
        name = _name(key)
        beside = f"{secrets.token_hex(8)}{_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            try:
                with open(os.open(beside, flags, 0o600, dir_fd=self._folder), "wb") as file:
                    file.write(_digest(name, data) + data)
                os.replace(beside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(beside, dir_fd=self._folder)
                raise
            self._unseen += len(data)
            if self._unseen > self._limit // 32:
                self._unseen = 0
                self._prune()
        except OSError as error:  # the disk is full, or read-only
            if not self._said:
                self._said = True
                _say(self._path, error)

    def _prune(self) -> None:
        """Deletes the files that were used longest ago, of those that are ours, until the rest is small enough."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):  # another process looks, too
                        found = entry.stat(follow_symlinks=False)
                        files.append((found.st_mtime_ns, found.st_size, entry.name))
        over = sum(size for _, size, _ in files) - self._limit
        for _, size, name in sorted(files):
            if over <= 0:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
            over -= size


def _digest(name: str, data: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(data)
    return digest.digest()


def _name(key: str) -> str:
    """Returns the name of a program's file. JAX's key covers the program, versions, options and devices."""
    return hashlib.sha256(f"{key} {_machine()}".encode()).hexdigest() + _SUFFIX


@functools.cache
def _machine() -> str:
    """Returns which code this machine can run: machines with other processors may share the home directory."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine()
