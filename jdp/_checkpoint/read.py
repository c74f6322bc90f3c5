"""Reads one checkpoint only if it is intact and of this model, with the same outcome in every process."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from .._processes.exchange import exchange_of
from .._processes.places import limits
from .directory import is_local, kind, open_file
from .items import (
    FORMAT,
    LARGEST,
    VERB,
    describe,
    digest,
    encode,
    fingerprints,
    manifest_difference,
    misformed,
    number_difference,
    target_of,
)

ARRAYS, MANIFEST = "state", "jdp"  # the items of a checkpoint, each a directory
_TEXT = 1000  # characters of a problem that one process sends to the others
_NO_ROOM = "*"  # a problem that begins so is no damage
_FILES = 10**6  # files of a checkpoint, at most
_SHARDINGS = "_sharding"  # Orbax's file of them, which grows with leaves times devices; jdp does not read it
_PIECE = 256 << 20  # bytes that are read at a time; an array that is larger is read alone


class Damaged(Exception):
    """The checkpoint is not what was written."""


T = TypeVar("T")
# A network, a disk or another program may cause them, and they may pass.
_PASSING = {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}
_PAUSE = 1.0  # seconds until it is read once more after one of them


@jax.transfer_guard("allow")
def read(path: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Returns the arrays, as `encode` gave them but with the shardings of `leaves`; the data cursor; and the replicas.

    Every process raises the same error: `Damaged` if anything cannot be read or does not match its checksum, ValueError
    if the checkpoint is of another model, MemoryError if there is no room for the arrays.
    """
    content: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    # Outside of `try`: what is wrong with the state that was passed is no damage.
    form, item = describe(leaves), encode(leaves)
    where = {name: target_of(leaves[name]) for name, x in item.items() if isinstance(x, jax.Array)}
    try:
        content, arrays, problem = _twice(lambda: _read_here(path, form, item, where))
    except Exception as e:  # noqa: BLE001 whatever is wrong with it
        problem = f"{_NO_ROOM if _lacks_room(e) else ''}{_brief(e)}"
    # If one process cannot read a file, the others must not wait for it in the collectives of the fingerprints.
    _agree(path, problem)
    try:
        problem = _not_saved(arrays, content)
        if not problem and (difference := number_difference(content, arrays, leaves)):
            problem = f"!{difference}"
    except Exception as e:
        if _lacks_room(e):  # raised here alone: the others may wait in its collective, and hear of the end of this one
            raise _no_room(path, _brief(e)) from e
        raise
    _agree(path, problem)
    data = content["data"]
    own = content.get("apart") and len(data) == jax.process_count()
    return arrays, data[jax.process_index()] if own else data, content.get("replicas")


def _read_here(
    path: Any, form: Mapping[str, list[Any]], item: Mapping[str, Any], where: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns the manifest and the arrays; or, without arrays, why they are of another model."""
    content = _read_manifest(path)
    if content["format"] > FORMAT:
        version = content["versions"].get("jdp")
        return content, {}, f"!it was written by jdp {version!s:.50}, in a form that this version does not know"
    if difference := manifest_difference(content, form):
        return content, {}, f"!{difference}"
    # Python numbers were saved in dtypes of their own, and are read in these; `decode` gives them the state's.
    numbers = {name: np.zeros((), content["leaves"][name][0]) for name in content.get("numbers", ()) if name in item}
    where = {name: target for name, target in where.items() if name not in numbers}
    return content, _read_arrays(path / ARRAYS, {**item, **numbers}, where), ""


def _twice(read: Callable[[], T]) -> T:
    """Returns what `read` returns; after an error that may pass, it is called once more."""
    try:
        return read()
    except Exception as e:  # noqa: BLE001 tensorstore raises all kinds
        codes = {getattr(cause, "errno", None) for cause in _causes(e)}
        codes |= {int(code) for cause in _causes(e) for code in re.findall(r"os_error_code='(\d+)'", str(cause))}
        if not codes & _PASSING:
            raise
    time.sleep(_PAUSE)
    return read()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _lacks_room(error: BaseException) -> bool:
    """Returns True if a device or the host has no memory left, which is no damage."""
    full = [isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e) for e in _causes(error)]
    return any(full) or any(isinstance(e, MemoryError) for e in _causes(error))


@jax.transfer_guard("allow")
def intact(path: Any) -> str:
    """Returns what is wrong with a checkpoint, or "". It runs in one process, on the host, in any thread.

    Raises a `MemoryError` or a `JaxRuntimeError` if there is no room to look.
    """
    try:
        return _twice(lambda: _wrong_with(path))
    except Exception as e:  # noqa: BLE001 whatever is wrong with it
        if _lacks_room(e):
            raise
        return _brief(e)


def _wrong_with(path: Any) -> str:
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was set up without a CPU backend
        host = None
    content = _read_manifest(path)
    if content["format"] > FORMAT:
        return f"its form is {content['format']}, which this version of jdp does not know"
    # The placeholder of a state without any array to write is no leaf.
    expected = {name: content["leaves"].get(name, ["uint8", [1]]) for name in content["fingerprints"]}
    for arrays in _pieces(path / ARRAYS, expected, {}):
        with jax.default_device(host):
            if problem := _not_saved(arrays, content):
                return problem
    return ""


def unlike(path: Any, leaves: Mapping[str, Any]) -> list[str]:
    """Returns the leaves that differ from a checkpoint's in any bit; or, if its manifest is damaged, what is wrong."""
    try:
        content = _read_manifest(path)
    except Exception as e:  # noqa: BLE001 whatever is wrong with it
        return [_brief(e)]
    found, saved = fingerprints(encode(leaves)), content["fingerprints"]
    return [path for path in {**found, **saved} if found.get(path) != saved.get(path)]


def tell_all(text: str, seconds: float = limits.compile) -> list[str]:
    """Returns the texts of all processes, in their order; all of them have to call this.

    One process may come much later than another, because it has written a large checkpoint: the others wait so many
    seconds for it.

    Raises:
        RuntimeError: the connection to another process is broken.
    """
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    raw = text.encode(errors="replace")  # the name of a file may be none in UTF-8
    exchange = exchange_of(tuple(range(jax.process_count())))
    exchange.come_to(VERB)
    try:
        with exchange.dispatching(seconds):
            longest = int(np.max(multihost_utils.process_allgather(np.int32(len(raw)))))
            message = np.zeros(max(_TEXT, 1 << longest.bit_length()), np.uint8)  # few lengths: each is compiled
            message[: len(raw)] = np.frombuffer(raw, np.uint8)
            every = np.asarray(multihost_utils.process_allgather(message))
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        if not (gone := absent(e)):
            raise
        raise RuntimeError(
            f"jdp.{VERB}: {gone}; all processes of a job save and restore together. Start the job again: it goes "
            f"on from the newest checkpoint."
        ) from e
    return [bytes(m).rstrip(b"\0").decode(errors="replace") for m in every]


def absent(error: BaseException | None) -> str:
    """Returns a text that another process is gone, if JAX's runtime raised the error and not a file; else ""."""
    # A device that computes in the thread that dispatches raises the error of the connection as a ValueError.
    while not (isinstance(error, jax.errors.JaxRuntimeError) or isinstance(error, ValueError) and "Gloo" in str(error)):
        if error is None:
            return ""
        error = error.__cause__ or error.__context__
    if jax.process_count() == 1:
        return ""
    said = re.split(r"\. |\n", str(error))[0]
    return f"another process of the job has ended, or does not answer ({said:.300})"


def _agree(path: Any, problem: str) -> None:
    """Raises in every process if any of them has found a problem."""
    told = tell_all(problem[:_TEXT])
    texts = dict.fromkeys(t.removeprefix("!").removeprefix(_NO_ROOM) for t in told if t)
    if not texts:
        return
    text = "; ".join(texts)
    if any(t.startswith(_NO_ROOM) for t in told):
        raise _no_room(path, text)
    if any(t.startswith("!") for t in told):
        raise ValueError(
            f"jdp.{VERB}: {path} is of another model or training state: {text}; a state is restored into one of the "
            f"same leaves, shapes and dtypes. Pass the state that the script made when it saved, or another directory."
        )
    raise Damaged(text)


def _no_room(path: Any, text: str) -> MemoryError:
    return MemoryError(
        f"jdp.{VERB}: there is no room for the arrays of {path} ({text}); they are read while the state that was "
        f"passed is still there. Pass a state of NumPy arrays (np.empty), which is filled on the host, with "
        f"nothing else on the devices; or use more devices."
    )


def _read_manifest(path: Any) -> dict[str, Any]:
    """Checks all files of the checkpoint, and returns the content of its manifest."""
    file = path / MANIFEST / "metadata"
    if is_local(path):
        _check_files(os.fspath(path))
    with _named(f"{MANIFEST}/metadata"):
        if is_local(path):
            with open(open_file(os.fspath(file)), "rb") as opened:
                text = opened.read(os.fstat(opened.fileno()).st_size)
        else:
            text = file.read_text()
        whole = json.loads(text)
        content, told = whole["content"], whole["sha256"]
        if digest(content) != told:
            raise Damaged("not what was saved (its SHA-256 is another)")
        if problem := misformed(content, int(path.name)):
            raise Damaged(problem)
    return content


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Turns any error in its block into a `Damaged` that begins with this name."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 whatever is wrong with it
        raise Damaged(f"{name}: {_brief(e)}") from e


def _check_files(top: str) -> None:
    """Refuses files that lead out of a checkpoint, that block when opened, or that are too large to read at once."""
    if not stat.S_ISDIR(mode := os.lstat(top).st_mode):
        raise Damaged(f"it is {kind(mode)}, and nothing outside of the directory is read")
    todo, seen = [top], 0
    while todo:
        folder = todo.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                mode, size = (info := entry.stat(follow_symlinks=False)).st_mode, info.st_size
                name = os.path.relpath(entry.path, top)
                if stat.S_ISDIR(mode):
                    todo.append(entry.path)
                elif not stat.S_ISREG(mode):
                    raise Damaged(f"{name}: it is {kind(mode)}, and only files of the checkpoint are read")
                # The folder "d" has the arrays.
                elif size > LARGEST and os.path.basename(folder) != "d" and entry.name != _SHARDINGS:
                    raise Damaged(f"{name}: it has {size / 2**20:,.0f} MiB, and at most {LARGEST >> 20} MiB are read")
                if (seen := seen + 1) > _FILES:
                    raise Damaged(f"it has more than {_FILES:,} files")


def _not_saved(arrays: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    found, expected = fingerprints(arrays), content["fingerprints"]
    wrong = [name for name in found if found[name] != expected.get(name)]
    more = f" and {len(wrong) - 1} more leaves" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}: not the values that were saved" if wrong else ""


def _read_arrays(path: Any, item: Mapping[str, Any], where: Mapping[str, Any]) -> dict[str, Any]:
    if is_local(path):
        files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names if name != _SHARDINGS]
        size = sum(os.lstat(file).st_size for file in files)
        if size > 2 * sum(x.nbytes for x in item.values()) + LARGEST:
            raise Damaged(f"{path.name}: it has {size / 2**20:,.0f} MiB, far more than what was saved")
    return {name: x for some in _pieces(path, describe(item), where) for name, x in some.items()}


def _pieces(path: Any, expected: Mapping[str, list[Any]], where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the arrays, some at a time, in the shardings of `where`; an array without one there comes onto the host.

    It does not use Orbax, which reads arrays of any size, and does not name the one that it could not read.
    """
    import tensorstore

    # A local path is not passed as a URL, because some characters have a meaning there.
    base = {"driver": "file", "path": f"{os.fspath(path)}/"} if is_local(path) else f"{os.fspath(path)}/"
    context = tensorstore.Context()
    with _named(next(iter(expected), "nothing")):
        about = path / "_METADATA"  # the arrays can be read without this file
        driver = "zarr3" if about.exists() and json.loads(about.read_text()).get("use_zarr3") else "zarr"
    begun: dict[str, Callable[[], Any]] = {}
    size = 0
    for name, entry in expected.items():
        with _named(name):
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            array = tensorstore.open({"driver": driver, "kvstore": kvstore}, context=context, read=True).result()
            _check_form(array, *entry)
            more = math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
        if begun and size + more > _PIECE:
            yield _ended(begun)
            begun, size = {}, 0
        with _named(name):
            begun[name], size = _begin(array, where.get(name)), size + more
    yield _ended(begun)


def _check_form(array: Any, dtype: str, shape: list[int]) -> None:
    """Checks an array before it is read, because a damaged file may announce an array of any size."""
    chunk = array.chunk_layout.read_chunk.shape or ()
    if any((c or 0) > max(1, s) for c, s in zip(chunk, array.shape, strict=False)):
        raise Damaged(f"it has chunks of {chunk!s:.100} in {array.shape!s:.100}")
    if dtype.startswith("key<"):  # described as a key, and stored as its data
        return
    if (stored := list(array.shape)) != shape:
        raise Damaged(f"{stored!s:.100} are stored, and not {shape!s:.100}")
    if str(array.dtype.numpy_dtype) != dtype:
        raise Damaged(f"not the {dtype:.50} that was saved")


def _begin(array: Any, where: Any) -> Callable[[], Any]:
    """Begins to read this process's part of an array; returns a function that waits for it."""
    if where is None:
        return array.read().result
    parts = {str(index): index for index in where.addressable_devices_indices_map(array.shape).values()}
    reads = {part: array[index].read() for part, index in parts.items()}
    return lambda: jax.make_array_from_callback(array.shape, where, lambda index: reads[str(index)].result())


def _ended(begun: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    arrays = {}
    for name, end in begun.items():
        with _named(name):
            arrays[name] = end()
    return arrays


def _brief(e: BaseException) -> str:
    if isinstance(e, Damaged):
        return str(e)
    lines = str(e).strip().splitlines() or [""]
    return f"{type(e).__name__}: {lines[0]:.300}"
