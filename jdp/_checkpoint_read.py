"""Reading one checkpoint: whole, unharmed and of this model, or not at all, and the same in every process."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ._checkpoint_items import FORMAT, VERB, describe, digest, encode, fingerprints, first_difference, target_of

ARRAYS, MANIFEST = "state", "jdp"  # the items of a checkpoint, each a directory
_ABANDONED = 0.2  # seconds in which reads that were abandoned end, for the most part
_TEXT = 1000  # bytes of what one process tells the others


class Damaged(Exception):
    """The checkpoint is not what was written; in every process, with the same text."""


def read(path: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The arrays, as `encode` gave them but with the shardings of `leaves`, and the data cursor.

    Raises:
        Damaged: anything cannot be read, or is not what its checksum says.
        ValueError: the checkpoint is of another model.
    """
    content, problem = _read_manifest(path / MANIFEST)
    if content is not None and (difference := _difference(content, leaves)):
        problem = f"!{difference}"
    arrays: dict[str, Any] = {}
    if not problem:
        arrays, problem = _read_arrays(path / ARRAYS, leaves)
    # A process that cannot read a file must not leave the others alone in the collectives of the fingerprints.
    _agree(path, problem)
    assert content is not None
    found, expected = fingerprints(arrays), content["fingerprints"]
    wrong = [name for name in found if found[name] != expected.get(name)]
    more = f" and {len(wrong) - 1} more leaves" if len(wrong) > 1 else ""
    _agree(path, f"{wrong[0]}{more}: not the values that were saved" if wrong else "")
    data = content["data"]
    own = content.get("apart") and len(data) == jax.process_count()
    return arrays, data[jax.process_index()] if own else data


def tell_all(text: str) -> list[str]:
    """What each process says; all of them have to call this."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    raw = text.encode()
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(raw)))))
    message = np.zeros(max(_TEXT, 1 << longest.bit_length()), np.uint8)  # of few lengths, for each is compiled
    message[: len(raw)] = np.frombuffer(raw, np.uint8)
    every = np.asarray(multihost_utils.process_allgather(message))
    return [bytes(m).rstrip(b"\0").decode(errors="replace") for m in every]


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
    told = tell_all(problem)
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
    try:
        whole = json.loads((path / "metadata").read_text())
        content, told = whole["content"], whole["sha256"]
    except Exception as e:  # noqa: BLE001 whatever is wrong with it
        return None, f"{path.name}/metadata: {_brief(e)}"
    if digest(content) != told:
        return None, f"{path.name}/metadata: not what was saved (its SHA-256 is another)"
    return content, ""


def _difference(content: Mapping[str, Any], leaves: Mapping[str, Any]) -> str | None:
    if content["format"] > FORMAT:
        return f"it was written by jdp {content['versions']['jdp']}, in a form that this version does not know"
    return first_difference(content["leaves"], describe(leaves))


def _read_arrays(path: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    # By Orbax's handler, not by its manager, which makes all processes wait for one that has failed.
    import orbax.checkpoint as ocp

    handler = array_handler()
    item = encode(leaves)
    how = {name: _how(x, leaves.get(name)) for name, x in item.items()}
    try:
        return dict(handler.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=how))), ""
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
