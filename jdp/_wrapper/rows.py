"""Data that can be indexed: a tree of arrays that are cut along their rows, or rows that are stacked."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.inputs import ARRAYS, axes_of, classify, flatten_batch, normal_axis
from .._core.layout import Cut, Tree, is_key
from .._core.scatter import Cutting, prepare
from .._core.scattered import is_scattered
from .._model.config import Config, axes_of_batch
from .prefetch import aligned, is_tensor, numpy_of

VERB = "batches"


def columns_or_rows(config: Config, data: Any) -> Columns | Rows:
    """Returns the data as `Columns` or `Rows`; raises a `TypeError` if it has no rows to index."""
    if is_scattered(data):
        raise TypeError(f"jdp.{VERB}: data is a jdp.Scattered of {len(data)} chunks; it is cut. Pass the arrays.")
    if isinstance(data, dict) and data and all(hasattr(x, "column_names") for x in data.values()):
        splits = ", ".join(map(repr, data))
        raise TypeError(
            f"jdp.{VERB}: data is a {type(data).__name__} of the splits {splits}; each has rows of its own. Pass one "
            f"of them, as data[{next(iter(data))!r}]."
        )
    is_tree = isinstance(data, dict | tuple) or not isinstance(data, list) and not jax.tree_util.all_leaves([data])
    if is_tree or isinstance(data, ARRAYS) or is_tensor(data):
        return Columns(config, data)
    is_indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not is_indexed or isinstance(data, str | bytes | Mapping | type):
        raise TypeError(
            f"jdp.{VERB}: data is a {type(data).__name__}, whose rows cannot be indexed; it is a tree of arrays, or an "
            f"object that has len and takes an index. Pass a loader or an iterable to dp.prefetch, and register a "
            f"dataclass of arrays (jax.tree_util.register_dataclass)."
        )
    return Rows(config, data)


class Columns:
    """Data that is a tree of arrays. A batch is read as one part: its rows of each array."""

    def __init__(self, config: Config, data: Tree) -> None:
        leaves, treedef = flatten_batch(data, VERB, "data")
        if any(map(is_scattered, leaves)):
            raise TypeError(f"jdp.{VERB}: data holds a jdp.Scattered; it is cut already. Pass the arrays.")
        leaves = [numpy_of(x, VERB) if is_tensor(x) else x for x in leaves]
        how = Cutting(config.mesh.own, config.dim, VERB, "data", axes=axes_of_batch(config, data))
        arrays, self._layout, *_ = prepare(treedef.unflatten(leaves), how)
        self._arrays = [_as_indexed(x) for x in arrays]
        if not self._layout.is_cut:
            raise ValueError(
                f"jdp.{VERB}: data is a {type(data).__name__} that holds no array with rows; an epoch has one at "
                f"least. Pass arrays with rows, or a list of rows."
            )
        self.count: int = _checked_count(data, sum(self._layout.sizes))
        _refuse_strings(data, self.count)

    def parts(self, rows: np.ndarray) -> Sequence[np.ndarray]:
        """Returns the parts of a batch of these rows, each of which is one call of `read`."""
        return [rows]

    def read(self, rows: np.ndarray) -> Tree:
        """Returns these rows of all arrays that are cut, and the other arrays whole."""
        found = zip(self._arrays, self._layout.arrays, strict=True)
        return self._layout.fill([_taken(x, rows, leaf.axis) if isinstance(leaf, Cut) else x for x, leaf in found])

    def join(self, parts: Sequence[Tree]) -> Tree:
        """Makes the batch of its parts."""
        (batch,) = parts
        return batch


def _refuse_strings(data: Tree, count: int) -> None:
    """Raises a `TypeError` for a list with a string for each row: each batch would have all of them, in their order."""

    def is_column(x: Any) -> bool:
        return type(x) is list and len(x) == count and all(isinstance(y, str | bytes) for y in x)

    for path, x in jax.tree_util.tree_leaves_with_path(data, is_leaf=is_column):
        if is_column(x):
            raise TypeError(
                f"jdp.{VERB}: data{jax.tree_util.keystr(path)} is a list of {count} strings, one for each row; each "
                f"batch would have all of them. Pass np.arange({count}) in its place, which comes with the rows, and "
                f"index the list with it."
            )


def _as_indexed(x: Any) -> Any:
    """Returns an array as numpy's; keys and weak types, which numpy does not have, stay JAX's, on one device."""
    is_numpys = not is_key(x) and not getattr(x, "weak_type", False)
    return np.asarray(x) if is_numpys else jax.device_put(x, min(x.devices(), key=_ID))


_ID = operator.attrgetter("id")


def _taken(x: Any, rows: np.ndarray, axis: int) -> Any:
    if isinstance(x, jax.Array):  # of keys or of a weak type; all others are numpy's
        with jax.transfer_guard("allow"):  # `rows` are on the host
            return jnp.take(x, rows, axis)
    out = aligned((*x.shape[:axis], len(rows), *x.shape[axis + 1 :]), x.dtype)
    if not (x.flags.c_contiguous and x.flags.aligned):  # np.take would copy all of it first
        out[...] = x[(slice(None),) * axis + (rows,)]
        return out
    return np.take(x, rows, axis, out, mode="clip")  # in any other mode numpy fills a buffer first


class Rows:
    """Data that is indexed. A batch is read as one part for each row, and these are stacked leaf by leaf."""

    def __init__(self, config: Config, data: Any) -> None:
        self._config, self._data = config, data
        self.count: int = _checked_count(data, len(data))
        # The number, treedef, dtypes and shapes of the row that was read first; all others must be like it.
        self._first: tuple[int, Any, list[tuple[np.dtype, tuple[int, ...]]]] | None = None
        self._lock = threading.Lock()

    def parts(self, rows: np.ndarray) -> Sequence[int]:
        """Returns the parts of a batch of these rows, each of which is one call of `read`."""
        return rows.tolist()

    def read(self, number: int) -> list[np.ndarray]:
        """Returns the leaves of a row; raises a `ValueError` if it is unlike the first row that was read."""
        try:
            row = self._data[number]
        except StopIteration as error:  # it would end the loop
            raise RuntimeError(
                f"jdp.{VERB}: data[{number}] raised StopIteration; by its len it has this row. Return the row."
            ) from error
        except BaseException as error:
            error.add_note(f"jdp.{VERB}: data[{number}] raised it.")
            raise
        leaves, treedef = jax.tree.flatten(row, is_leaf=_is_array_of_numbers)
        name = functools.partial(_element_name, row, number)
        arrays = [_array(x, functools.partial(name, k)) for k, x in enumerate(leaves)]
        if not arrays:
            raise TypeError(f"jdp.{VERB}: data[{number}] is {row!r:.80}; a row holds numbers or arrays. Return them.")
        kinds = [(x.dtype, x.shape) for x in arrays]
        with self._lock:
            if self._first is None:
                self._first = number, treedef, kinds
            first, first_treedef, first_kinds = self._first
        if treedef != first_treedef:
            raise ValueError(
                f"jdp.{VERB}: data[{number}] is a {treedef}, data[{first}] is a {first_treedef}; all rows have the "
                f"same tree. Return rows that do."
            )
        for k, (kind, other) in enumerate(zip(kinds, first_kinds, strict=True)):
            if kind != other:
                raise ValueError(
                    f"jdp.{VERB}: {name(k)} is {_text(kind)}, in data[{first}] it is {_text(other)}; all rows have one "
                    f"shape and dtype. Pad or convert it (arrays that are columns go in a tuple or a dict, not in a "
                    f"list)."
                )
        return arrays

    def join(self, parts: Sequence[list[np.ndarray]]) -> Tree:
        """Makes the batch of its rows."""
        assert self._first is not None
        config, (_, treedef, _) = self._config, self._first
        row = treedef.unflatten(parts[0])
        axes = axes_of_batch(config, row)
        axes = [config.dim] * len(parts[0]) if axes is None else axes_of(axes, row, VERB)
        leaves = zip(*parts, strict=True)
        return treedef.unflatten([_stacked(x, axis) for x, axis in zip(leaves, axes, strict=True)])


def _element_name(row: Any, number: int, k: int) -> str:
    paths = jax.tree_util.tree_leaves_with_path(row, is_leaf=_is_array_of_numbers)
    return f"data[{number}]{jax.tree_util.keystr(paths[k][0])}"


def _stacked(arrays: Sequence[np.ndarray], axis: int | None) -> np.ndarray:
    shape = arrays[0].shape
    if axis is None:
        raise ValueError(
            f"jdp.{VERB}: in_axes has None for a part of a row, of shape {shape}; an array that is replicated "
            f"cannot be part of a row. Pass it to the call, next to the batch."
        )
    axis = normal_axis(axis, len(shape) + 1, VERB, lambda: "a batch")
    return np.stack(arrays, axis, aligned((*shape[:axis], len(arrays), *shape[axis:]), arrays[0].dtype))


def _is_array_of_numbers(x: Any) -> bool:
    """Returns True for a list of numbers, or of such lists, in a row; as in Hugging Face's datasets it is an array."""
    return isinstance(x, list) and all(isinstance(y, _NUMBERS) or _is_array_of_numbers(y) for y in x)


_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def _array(x: Any, name: Callable[[], str]) -> np.ndarray:
    """Returns a leaf of a row as a numpy array."""
    if isinstance(x, bool | int | float | complex | list):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ValueError(
                f"jdp.{VERB}: {name()} is a list with lists of different lengths ({error}); it must be an array. Pad "
                f"them."
            ) from None
    elif is_tensor(x):
        x = numpy_of(x, VERB)
    is_array, x = classify(x, VERB, name)
    if not is_array or is_key(x):
        what = x.dtype if is_array else type(x).__name__
        raise TypeError(
            f"jdp.{VERB}: {name()} is a {what}; a row holds numbers, arrays and tensors. Convert it, or leave it out."
        )
    return np.array(x)  # a copy, because data may give each row in the same buffer


def _text(kind: tuple[np.dtype, tuple[int, ...]]) -> str:
    dtype, shape = kind
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _checked_count(data: Any, rows: int) -> int:
    if not rows:
        raise ValueError(
            f"jdp.{VERB}: data is a {type(data).__name__} with 0 rows; an epoch has one at least. Pass data with rows."
        )
    return rows
