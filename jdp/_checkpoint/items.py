"""What goes into a checkpoint: `decode(encode(leaves_of(state)), state) == state`, and what proves it intact."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from .._core.fingerprint import fingerprint
from .._core.global_arrays import weakly_typed
from .._core.inputs import has_fields, is_array
from .._core.layout import Tree, is_key
from .._core.replica_mesh import replicas_on
from .._version import __version__

VERB = "Checkpointer"
FORMAT = 1
_NUMBERS = bool, int, float, complex
_JOINED = {"bool": np.generic, "int64": np.number, "uint64": np.number}  # a number's dtype, and what can keep it
_JOINED |= {"float64": np.inexact, "complex128": np.complexfloating}
LARGEST = 32 << 20  # bytes of a manifest, and of any other file of a checkpoint that is read at once


def leaves_of(state: Tree) -> dict[str, Any]:
    """Returns the leaves by their paths, all of them arrays or numbers; for an NNX object, those of its state."""
    leaves = [(jax.tree_util.keystr(p) or "state", x) for p, x in jax.tree_util.tree_leaves_with_path(plain(state))]
    flat = dict(leaves)
    if len(flat) < len(leaves):
        twice = collections.Counter(path for path, _ in leaves).most_common(1)[0][0]
        raise ValueError(
            f"jdp.{VERB}: two leaves of the state are called {twice}; a checkpoint finds each leaf by its path. Give "
            f"keys that differ a text (repr) that differs."
        )
    for path, x in flat.items():
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"jdp.{VERB}: {path} is a numpy.ma.MaskedArray; a checkpoint holds arrays without masks. Pass "
                f"x.filled(value), and the mask (np.ma.getmaskarray(x)) next to it."
            )
        is_structured = isinstance(x, np.ndarray | np.generic) and has_fields(x)  # `_is_kept` names its dtype
        if not is_array(x) and not is_structured and not isinstance(x, _NUMBERS):
            raise TypeError(
                f"jdp.{VERB}: {path} is a {type(x).__name__}; a checkpoint holds arrays and numbers. Pass it in data, "
                f"as JSON, or leave it out."
            )
        if not _is_kept(x):
            raise TypeError(
                f"jdp.{VERB}: {path} is of dtype {_dtype(x)}; a checkpoint holds the dtypes that JAX has, other than "
                f"uint2 and uint4. Convert it (uint4 to uint8, float128 to float64), or pass an int of more than "
                f"64 bits in data."
            )
    if not flat:
        raise ValueError(f"jdp.{VERB}: the state has no leaves; a checkpoint is of at least one array. Pass the state.")
    return flat


def plain(state: Tree) -> Tree:
    """Returns the state with each NNX object replaced by its own state."""
    return jax.tree.map(lambda x: nnx.state(x) if _is_node(x) else x, state, is_leaf=_is_node)


def encode(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays for Orbax to write: keys as their data, numbers as arrays, and no array without elements."""
    # Orbax refuses arrays without elements, and, in a job of several processes, arrays of one process alone.
    local = jax.process_count() > 1
    out = {}
    for path, x in leaves.items():
        x = _data(x) if isinstance(x, jax.Array) else np.asarray(x)
        if isinstance(x, jax.Array) and local and x.is_fully_addressable:
            x = np.asarray(x)
        if x.size:
            out[path] = x
    return out or {"nothing": np.zeros(1, np.uint8)}  # Orbax also refuses to write no arrays at all


def decode(arrays: Mapping[str, Any], state: Tree) -> Tree:
    """Undoes `encode`: returns a tree like `state`, with its kinds of leaves; updates NNX objects in place."""

    def leaf(path: Any, like: Any) -> Any:
        return _like(like, arrays.get(jax.tree_util.keystr(path) or "state"))

    new = jax.tree_util.tree_map_with_path(leaf, plain(state))

    def put(old: Any, value: Any) -> Any:
        if not _is_node(old):
            return value
        nnx.update(old, value)
        return old

    return jax.tree.map(put, state, new, is_leaf=_is_node)


def describe(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the dtype and shape of each leaf, as JSON."""
    return {path: [_dtype(x), list(np.shape(x))] for path, x in leaves.items()}


def manifest(
    step: int, leaves: Mapping[str, Any], encoded: Mapping[str, Any], data: Any, apart: bool
) -> dict[str, Any]:
    """Returns what is saved with the arrays: their forms, their hashes, the data cursor, and a digest of all that.

    `apart` is True if the data is a list with the data of each process.
    """
    from orbax.checkpoint import __version__ as orbax

    content = {
        "format": FORMAT,
        "step": step,
        "versions": {"jdp": __version__, "jax": jax.__version__, "orbax-checkpoint": orbax},
        "leaves": describe(leaves),
        "numbers": [path for path, x in leaves.items() if type(x) in _NUMBERS],
        "fingerprints": fingerprints(encoded),
        "data": data,
        "apart": apart,
        "replicas": replicas_of(leaves),
    }
    size = len(json.dumps(content))
    if size > LARGEST - 1000:
        raise ValueError(
            f"jdp.{VERB}: data and the names of {len(leaves):,} leaves are {size / 2**20:.1f} MiB as JSON; they are "
            f"read back if they are at most {LARGEST >> 20} MiB. Put what is large into the state, as arrays."
        )
    return {"content": content, "sha256": digest(content)}


def misformed(content: Any, step: int) -> str:
    """Returns how a manifest differs from what `manifest` makes for this step; "" if it does not."""
    for key, kind in {"format": int, "step": int, "versions": dict, "leaves": dict, "fingerprints": dict}.items():
        if not isinstance(found := content.get(key), kind) or isinstance(found, bool):
            return f"its {key!r} is {found!r:.100}, and no {kind.__name__}"
    if content["step"] != step:
        return f"it is of step {content['step']!r:.30}, which somebody has called {step}; a checkpoint keeps its name"
    if content["format"] > FORMAT:
        return ""  # written by a newer version: what else is in it is unknown
    for path, entry in content["leaves"].items():
        form = isinstance(entry, list) and [type(part) for part in entry] == [str, list]
        if not (form and all(type(size) is int and size >= 0 for size in entry[1])):
            return f"its entry of {path:.100} is {entry!r:.100}, and no dtype with a shape"
    if "data" not in content or content.get("apart") and not isinstance(content["data"], list):
        return "it has no data of each process"
    # Earlier versions wrote neither of these.
    if not isinstance(numbers := content.get("numbers", []), list) or not {*map(str, numbers)} <= {*content["leaves"]}:
        return f"its 'numbers' is {numbers!r:.100}"
    if (there := content.get("replicas")) is not None and not (
        isinstance(there, dict) and type(there.get("number")) is int and type(there.get("chosen")) is bool
    ):
        return f"its 'replicas' is {there!r:.100}"
    return ""


def replicas_of(leaves: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns how many replicas work on these leaves, and whether the user chose that; None if it is unknown."""
    shardings = [x.sharding for x in leaves.values() if isinstance(x, jax.Array)]
    meshes = {where.mesh for where in shardings if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh)}
    if len(meshes) != 1:
        return None
    numbers, chosen = replicas_on(meshes.pop())
    return {"number": numbers.pop(), "chosen": chosen} if len(numbers) == 1 else None


def fingerprints(encoded: Mapping[str, Any]) -> dict[str, str]:
    """Returns sixteen hexadecimal digits for each array."""
    # A list and not the mapping: JAX would sort that by its keys.
    hashes = fingerprint(list(encoded.values()))
    return {path: f"{a:08x}{b:08x}" for path, (a, b) in zip(encoded, hashes.tolist(), strict=True)}


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def as_json(data: Any) -> Any:
    """Returns a copy of the data, as JSON gives it back; raises a `TypeError` if that is not equal to it."""
    try:
        back = json.loads(json.dumps(data))
    except (TypeError, ValueError) as e:
        problem = str(e)
    else:
        if back == data:
            return back
        problem = f"{data!r:.200} comes back as {back!r:.200}"
    raise TypeError(
        f"jdp.{VERB}: data cannot be kept as JSON: {problem}; it is None, or made of dicts with string keys, lists, "
        f"strings, finite numbers, booleans and None. Convert it: int(x) for NumPy's numbers, list(x) for tuples."
    )


def manifest_difference(content: Mapping[str, Any], expected: Mapping[str, list[Any]]) -> str | None:
    """Returns the first leaf whose form differs between the checkpoint and the state, or that one of them lacks.

    A Python number, such as a learning rate that was set before the save, fits a 0-d array of a dtype that can keep it
    (`number_difference` compares its value).
    """
    stored = content["leaves"]
    for path in [*expected, *(p for p in stored if p not in expected)]:
        if path not in stored:
            return f"{path} is not in it"
        if path not in expected:
            return f"it has {path}, which is not in the state"
        is_number = path in content.get("numbers", ())
        if stored[path] != expected[path] and not (is_number and _joins(stored[path][0], *expected[path])):
            there, here = (f"{dtype}{shape}"[:200] for dtype, shape in (stored[path], expected[path]))
            return f"{path} is {there} in it, {here} in the state"
    return None


def number_difference(content: Mapping[str, Any], arrays: Mapping[str, Any], leaves: Mapping[str, Any]) -> str:
    """Returns the first Python number of a checkpoint that is too large for the state's array; "" if there is none."""
    for path in content.get("numbers", ()):
        if isinstance(like := leaves[path], _NUMBERS):
            continue
        with np.errstate(all="ignore"):
            value, kept = arrays[path], np.asarray(arrays[path], like.dtype)
        is_whole = jnp.issubdtype(like.dtype, jnp.integer)
        if not (kept == value if is_whole else np.isfinite(kept) == np.isfinite(value)):
            return f"{path} is {value} in it, too large or too small for {_dtype(like)} in the state"
    return ""


def _like(like: Any, x: Any) -> Any:
    if x is None:  # it has no elements, and was not written
        if isinstance(like, jax.Array) and not like.is_fully_addressable:
            return like
        x = np.asarray(_data(like)) if isinstance(like, jax.Array) else like
    if isinstance(like, _NUMBERS):
        return type(like)(np.asarray(x).item())
    if not isinstance(like, jax.Array):
        x = np.asarray(x, like.dtype)
        return x if isinstance(like, np.ndarray) else x[()]
    if not isinstance(x, jax.Array):
        x = jax.device_put(np.asarray(x, _data(like).dtype), target_of(like))
    if getattr(like, "weak_type", False):  # keys have none
        return weakly_typed(x, target_of(like))
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if is_key(like) else x


def _joins(number: str, dtype: str, shape: list[int]) -> bool:
    """Returns True if a Python number, saved in the dtype `number`, can be kept in a 0-d array of the other dtype."""
    kind = _JOINED.get(number)
    return not shape and kind is not None and not dtype.startswith("key<") and jnp.issubdtype(dtype, kind)


def target_of(like: jax.Array) -> Any:
    """Returns the sharding to restore in; None for an uncommitted array, whose placement JAX may choose again."""
    return _data(like).sharding if like.committed else None


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if is_key(x) else x


def _dtype(x: Any) -> str:
    return str(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


def _is_kept(x: Any) -> bool:
    """Returns False for what the files of a checkpoint, or the fingerprints, have no form for."""
    if isinstance(x, jax.Array):
        return str(x.dtype) not in _UNSIGNED
    dtype = np.asarray(x).dtype  # of an int of more than 64 bits: object
    strange = (np.object_, np.void, np.longdouble, np.clongdouble)
    return dtype.type not in strange and dtype.isnative and dtype.name not in _UNSIGNED


_UNSIGNED = ("uint2", "uint4")  # tensorstore has none of them


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)  # a variable alone, as in nnx.state(model), is a tree of one leaf
