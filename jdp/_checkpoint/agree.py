"""Before a save the processes tell each other what they have: half of a save would wait for the other half."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._core.layout import Tree
from .._processes.exchange import by_value
from .items import VERB, check_data, encode, fingerprints, leaves_of
from .read import tell_all


def agree(prepare: Callable[[], None], state: Tree, data: Any) -> tuple[dict[str, Any], Any, bool]:
    """The leaves to save and the data, and whether that is a list with each process's own, for they differ.

    Args:
        prepare: makes sure that this process can save, or raises.

    Raises:
        TypeError: a leaf is no array, or `data` is no JSON.
        ValueError: a leaf that each process holds for itself is another in another process.
        RuntimeError: a process cannot save: another job does, or the directory cannot be written.
        OSError: the latter, in a job of one process.
    """
    if jax.process_count() == 1:
        check_data(data)
        leaves = leaves_of(state)
        prepare()
        return leaves, data, False
    leaves: dict[str, Any] = {}
    failed: Exception | None = None
    mine: dict[str, Any] = {"problem": None, "local": {}, "data": None}
    try:
        leaves = leaves_of(state)
        check_data(data)
        prepare()
        mine |= {"local": fingerprints(encode(_local(leaves))), "data": data}
    except Exception as error:
        failed = error
        mine["problem"] = str(error)
    every = [json.loads(text) for text in tell_all(json.dumps(mine))]
    if isinstance(failed, TypeError | ValueError):
        raise failed
    if problems := {i: e["problem"] for i, e in enumerate(every) if e["problem"]}:
        name = f"jdp.{VERB}: "
        raise RuntimeError(name + "; ".join(f"process {i}: {text.removeprefix(name)}" for i, text in problems.items()))
    for path in mine["local"]:
        hashes = {i: e["local"].get(path, "none") for i, e in enumerate(every)}
        if len({*hashes.values()}) > 1:
            raise ValueError(
                f"jdp.{VERB}: {path} is not the same in all processes (its hashes: {by_value(hashes)}), and one of "
                f"them would be saved; what each process holds for itself is equal in all. Pass it in data, which may "
                f"differ, or make it one array of all (jdp.replicate)."
            )
    apart = any(e["data"] != data for e in every)
    return leaves, [e["data"] for e in every] if apart else data, apart


def _local(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that this process holds for itself."""
    return {p: x for p, x in leaves.items() if not isinstance(x, jax.Array) or x.is_fully_addressable}
