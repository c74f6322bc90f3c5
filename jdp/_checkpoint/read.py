"""Reading one checkpoint: whole, unharmed and of this model, or not at all, and the same in every process."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

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
    target_of,
)

ARRAYS, MANIFEST = "state", "jdp"  # the items of a checkpoint, each a directory
_ABANDONED = 0.2  # seconds in which reads that were abandoned end, for the most part
_TEXT = 1000  # bytes of what one process tells the others
_FILES = 10**6  # of a checkpoint
_PIECE = 256 << 20  # bytes that `intact` has on the host at a time, or one array


class Damaged(Exception):
    """The checkpoint is not what was written; in every process, with the same text."""


def read(path: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The arrays, as `encode` gave them but with the shardings of `leaves`, and the data cursor.

    Raises:
        Damaged: anything cannot be read, or is not what its checksum says.
        ValueError: the checkpoint is of another model.
    """
    content, problem = _read_manifest(path)
    if content is not None and (difference := _difference(content, leaves)):
        problem = f"!{difference}"
    arrays: dict[str, Any] = {}
    if not problem:
        arrays, problem = _read_arrays(path / ARRAYS, leaves)
    # A process that cannot read a file must not leave the others alone in the collectives of the fingerprints.
    _agree(path, problem)
    assert content is not None
    found, expected = fingerprints(arrays), content["fingerprints"]
    _agree(path, _not_saved(found, expected))
    data = content["data"]
    own = content.get("apart") and len(data) == jax.process_count()
    return arrays, data[jax.process_index()] if own else data


def intact(path: Any) -> str:
    """What is wrong with a checkpoint, or ""; for one process alone, on the host, with little memory, in any thread."""
    content, problem = _read_manifest(path)
    if content is None:
        return problem
    if content["format"] > FORMAT:
        return f"its form is {content['format']}, which this version of jdp does not know"
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to do without
        host = None
    try:
        for arrays in _pieces(path / ARRAYS, content):
            with jax.default_device(host):
                found = fingerprints(arrays)
            if problem := _not_saved(found, content["fingerprints"]):
                return problem
    except Exception as e:  # noqa: BLE001 whatever is wrong with it
        return _brief(e)
    return ""


def tell_all(text: str) -> list[str]:
    """What each process says; all of them have to call this."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    raw = text.encode()
    try:
        longest = int(np.max(multihost_utils.process_allgather(np.int32(len(raw)))))
        message = np.zeros(max(_TEXT, 1 << longest.bit_length()), np.uint8)  # of few lengths, for each is compiled
        message[: len(raw)] = np.frombuffer(raw, np.uint8)
        every = np.asarray(multihost_utils.process_allgather(message))
    except jax.errors.JaxRuntimeError as e:
        raise RuntimeError(
            f"jdp.{VERB}: {absent(e)}; all processes of a job save and restore together. Start the job again: it goes "
            f"on from the newest checkpoint."
        ) from e
    return [bytes(m).rstrip(b"\0").decode(errors="replace") for m in every]


def absent(error: BaseException | None) -> str:
    """That another process is gone, if an error comes from waiting for the others, and not from a file; else ""."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    if error is None or jax.process_count() == 1:
        return ""
    said = re.split(r"\. |\n", str(error))[0]
    return f"another process of the job has ended, or does not answer ({said:.300})"


def array_handler() -> Any:
    """Orbax's handler of a tree of arrays, for writing and reading."""
    import orbax.checkpoint as ocp

    kinds = ocp.type_handlers
    registry = kinds.create_type_handler_registry(
        # Of a replicated array the first copy is written, which is the one that the fingerprint was made of.
        (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, kinds.NumpyHandler()),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _agree(path: Any, problem: str) -> None:
    """Raises in every process what any has found."""
    told = tell_all(problem[:_TEXT])
    texts = dict.fromkeys(t.removeprefix("!") for t in told if t)
    if not texts:
        return
    text = "; ".join(texts)
    if any(t.startswith("!") for t in told):
        raise ValueError(
            f"jdp.{VERB}: {path} is of another model or training state: {text}; a state is restored into one of the "
            f"same leaves, shapes and dtypes. Pass the state that the script made when it saved, or another directory."
        )
    raise Damaged(text)


def _read_manifest(path: Any) -> tuple[dict[str, Any] | None, str]:
    """What the checkpoint says that it is, or what is wrong with it; after a look at all files that are in it."""
    file = path / MANIFEST / "metadata"
    try:
        if is_local(path):
            if foreign := _foreign(os.fspath(path)):
                return None, foreign
            with open(open_file(os.fspath(file)), "rb") as opened:
                text = opened.read(os.fstat(opened.fileno()).st_size)
        else:
            text = file.read_text()
        whole = json.loads(text)
        content, told = whole["content"], whole["sha256"]
        same = digest(content) == told
        problem = misformed(content, int(path.name)) if same else "not what was saved (its SHA-256 is another)"
    except Exception as e:  # noqa: BLE001 whatever is wrong with it
        problem, content = _brief(e), None
    return (None, f"{MANIFEST}/metadata: {problem}") if problem else (content, "")


def _foreign(top: str) -> str:
    """What below a checkpoint leads out of it, blocks who opens it, or is too large to be read at once; or ""."""
    if not stat.S_ISDIR(mode := os.lstat(top).st_mode):
        return f"it is {kind(mode)}, and nothing outside of the directory is read"
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
                    return f"{name}: it is {kind(mode)}, and only files of the checkpoint are read"
                elif size > LARGEST and os.path.basename(folder) != "d":  # where the bytes of the arrays are
                    return f"{name}: it has {size / 2**20:,.0f} MiB, and at most {LARGEST >> 20} MiB are read"
                if (seen := seen + 1) > _FILES:
                    return f"it has more than {_FILES:,} files"
    return ""


def _size(path: Any) -> int:
    """The bytes of all files below a directory."""
    return sum(os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(path) for name in names)


def _difference(content: Mapping[str, Any], leaves: Mapping[str, Any]) -> str | None:
    if content["format"] > FORMAT:
        version = content["versions"].get("jdp")
        return f"it was written by jdp {version!s:.50}, in a form that this version does not know"
    return manifest_difference(content["leaves"], describe(leaves))


def _not_saved(found: Mapping[str, str], expected: Mapping[str, Any]) -> str:
    wrong = [name for name in found if found[name] != expected.get(name)]
    more = f" and {len(wrong) - 1} more leaves" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}: not the values that were saved" if wrong else ""


def _stored(path: Any, name: str) -> Any:
    """An array as it is stored: with what it says of itself, and not read yet.

    Raises:
        ValueError: it cannot be opened, or its chunks are larger than it is.
    """
    import tensorstore

    base = {"driver": "file", "path": f"{os.fspath(path)}/"}
    where = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": where}, open=True, read=True).result()
    chunk = array.chunk_layout.read_chunk.shape or ()
    if any((c or 0) > max(1, s) for c, s in zip(chunk, array.shape, strict=False)):
        raise ValueError(f"{name}: it has chunks of {chunk!s:.100} in {array.shape!s:.100}")
    return array


def _pieces(path: Any, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arrays, some at a time.

    Raises:
        ValueError: one is stored in another shape than the manifest says, or cannot be read.
    """
    some: dict[str, Any] = {}
    size = 0
    for name in content["fingerprints"]:
        array = _stored(path, name)
        dtype, told = content["leaves"].get(name, ["key<", []])  # what stands for no arrays at all is no leaf
        if not dtype.startswith("key<") and list(array.shape) != told:
            raise ValueError(f"{name}: {array.shape!s:.100} are stored, and not {told!s:.100}")
        more = math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
        if some and size + more > _PIECE:
            yield {n: read.result() for n, read in some.items()}
            some, size = {}, 0
        some[name] = array.read()
        size += more
    yield {n: read.result() for n, read in some.items()}


def _read_arrays(path: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    # By Orbax's handler, not by its manager, which makes all processes wait for one that has failed.
    import orbax.checkpoint as ocp

    handler = array_handler()
    item = encode(leaves)
    how = {name: _how(x, leaves.get(name)) for name, x in item.items()}
    try:
        if is_local(path) and (size := _size(path)) > 2 * sum(x.nbytes for x in item.values()) + LARGEST:
            return {}, f"{path.name}: it has {size / 2**20:,.0f} MiB, far more than what was saved"
        for name, x in item.items() if is_local(path) else ():
            if (shape := list(_stored(path, name).shape)) != list(x.shape):  # of any size, and all of it would be read
                return {}, f"{name}: {shape!s:.100} are stored, and not {list(x.shape)}"
        arrays = dict(handler.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=how)))
        other = [name for name, x in item.items() if getattr(arrays.get(name), "dtype", None) != x.dtype]
        return arrays, f"{other[0]}: not the {item[other[0]].dtype} that was saved" if other else ""
    except Exception as e:  # noqa: BLE001 Orbax raises all kinds, the bare Exception among them
        first = e
    time.sleep(_ABANDONED)
    for name in item:  # which leaf it was
        one = ocp.args.PyTreeRestore(item={name: item[name]}, restore_args={name: how[name]}, partial_restore=True)
        try:
            handler.restore(path, args=one)
        except Exception as e:  # noqa: BLE001
            return {}, f"{name}: {_brief(e)}"
    return {}, _brief(first)


def _how(x: Any, like: Any) -> Any:
    import orbax.checkpoint as ocp

    where = target_of(like) if isinstance(x, jax.Array) else None
    if where is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=where, global_shape=x.shape, dtype=x.dtype)


def _brief(e: BaseException) -> str:
    lines = str(e).strip().splitlines() or [""]
    return f"{type(e).__name__}: {lines[0]:.300}"
