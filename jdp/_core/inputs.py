"""What may be an input: the kinds of leaves, their names in messages, axes and row counts."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._processes.coordination import text_of
from .layout import as_int, is_key
from .scattered import is_scattered

ARRAYS = (np.ndarray, jax.Array, np.generic)
NESTED = (dict, list, tuple)
USUAL = frozenset({dict, list, tuple, np.ndarray, str, bool, int, float, type(None)})


def is_unbound_axis(error: NameError) -> bool:
    """Returns True if this is JAX's error for a collective outside of its axis, and not a misspelt name."""
    return "unbound axis name" in text_of(error)


def is_array(x: Any) -> bool:
    """Returns True if `x` is a jax or numpy array of numbers, bools or typed PRNG keys."""
    if isinstance(x, jax.Array):
        return True
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "OSUMmT" and not has_fields(x)


def has_fields(x: Any) -> bool:
    """Returns True for NumPy's structured arrays and arrays of records."""
    return issubclass(x.dtype.type, np.void)  # np.record is one; the dtypes of ml_dtypes are none


def is_sparse(x: Any) -> bool:
    """Returns True if `x` is a sparse array of JAX (a pytree, whose leaves must not be cut like rows) or of SciPy."""
    of_jax, of_scipy = map(sys.modules.get, ("jax.experimental.sparse", "scipy.sparse"))  # whose users import them
    return of_jax is not None and isinstance(x, of_jax.JAXSparse) or of_scipy is not None and of_scipy.issparse(x)


def way_out(x: Any) -> str:
    """Returns the code that converts `x` to an array, for the advice in an error."""
    if is_sparse(x):
        return "x.todense()"
    if isinstance(x, Mapping):  # of a class that JAX does not look into
        return "dict(x)"
    if dataclasses.is_dataclass(x):
        return "a dict of its arrays (or register its class with jax.tree_util.register_dataclass)"
    return "jnp.asarray(x)"


def no_further(x: Any) -> bool:
    """Returns True where flattening a batch stops: at a `Scattered`, and at objects that `classify` must see whole."""
    # Nearly all objects are of the usual types, and isinstance of an abstract class is slow to say no.
    return type(x) not in USUAL and (is_scattered(x) or isinstance(x, Iterator) or is_sparse(x))


def is_deep(x: Any, levels: int = 250) -> bool:
    """Returns True if a list, tuple or dict nests others deeper than `levels`; one that holds itself does."""
    for y in x.values() if isinstance(x, dict) else x:
        # Every call comes here with its arguments, and isinstance is slower to say no for an array.
        if issubclass(type(y), NESTED) and (not levels or is_deep(y, levels - 1)):
            return True
    return False


def refuse_deep(tree: Any, verb: str, root: str | tuple[str, ...]) -> None:
    """Raises a `ValueError` for a tree that is too deep, before JAX sees it: JAX does not recover from one."""
    if not isinstance(tree, NESTED) or not is_deep(tree):
        return
    name = root if isinstance(root, str) else "args"
    for part, x in zip(root, tree, strict=False) if isinstance(root, tuple) else ():
        children = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, NESTED) else ()
        name = next((f"{part}[{key!r}]" for key, y in children if isinstance(y, NESTED) and is_deep(y)), name)
    raise ValueError(
        f"jdp.{verb}: {name} holds itself, or is nested more than 250 levels deep; JAX flattens all of a tree. Pass "
        f"lists, tuples and dicts that end in arrays."
    )


def flatten_batch(
    inputs: Any, verb: str, root: str | tuple[str, ...], stop: Callable[[Any], bool] | None = no_further
) -> tuple[list[Any], Any]:
    """Returns the leaves of a batch, and its treedef."""
    refuse_deep(inputs, verb, root)
    try:
        return jax.tree.flatten(inputs, is_leaf=stop)
    except ValueError as error:
        if "Comparator" not in text_of(error):  # JAX's own: the keys of a dict cannot be compared
            raise
        raise ValueError(
            f"jdp.{verb}: a dict among the {'inputs' if isinstance(root, tuple) else root} has keys of several types "
            f"({error}); JAX sorts them. Pass keys of one type."
        ) from None


def classify(leaf: Any, verb: str, name: Callable[[], str]) -> tuple[bool, Any]:
    """Returns True and the leaf in a form that JAX takes, if it is an array; else False and the object."""
    if isinstance(leaf, jax.Array):
        return True, leaf
    if isinstance(leaf, str | bytes):  # np.str_, an entry of an array of strings, is one
        return False, leaf
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.kind in "OSUMmT" or has_fields(leaf) or leaf.dtype.char in "gG":  # g: np.longdouble
            raise TypeError(
                f"jdp.{verb}: {name()} is an array of dtype {leaf.dtype}; devices hold numbers, bools and PRNG keys. "
                f"Convert it to one of these, or leave it out."
            )
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(
                f"jdp.{verb}: {name()} is a numpy.ma.MaskedArray; JAX has no such arrays, and the mask would be lost. "
                f"Pass x.filled(value), and the mask (np.ma.getmaskarray(x)) next to it."
            )
        # JAX refuses big-endian arrays.
        return True, leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))
    _refuse(leaf, verb, name)
    return False, leaf


def refuse_wrapped(x: Any, verb: str, name: Callable[[], str]) -> None:
    """Raises an `OverflowError` for integers of Python or numpy that JAX would wrap, without a word, to 32 bits."""
    if isinstance(x, jax.Array) or not isinstance(x, int) and (x.dtype.kind not in "iu" or not x.size):
        return
    dtype = np.dtype(np.int64) if isinstance(x, int) else x.dtype
    kept = np.iinfo(jax.dtypes.canonicalize_dtype(dtype))
    if not isinstance(x, int) and kept.bits == 8 * dtype.itemsize:
        return
    for value in (x,) if isinstance(x, int) else (x.min(), x.max()):
        if not kept.min <= int(value) <= kept.max:
            raise OverflowError(
                f"jdp.{verb}: {name()} holds {value}; integers here are {kept.dtype}, from {kept.min} to {kept.max}. "
                f"Pass smaller numbers or floats, or call jax.config.update('jax_enable_x64', True) first."
            )


def _refuse(leaf: Any, verb: str, name: Callable[[], str]) -> None:
    """Raises a `TypeError` for an object that holds arrays, because they would not be cut."""
    if isinstance(leaf, NESTED):
        kind = next(t.__name__ for t in NESTED if isinstance(leaf, t))
        raise TypeError(
            f"jdp.{verb}: {name()} is a {type(leaf).__name__}, a subclass of {kind} that JAX does not know as a "
            f"pytree; its arrays would not be cut. Register it (jax.tree_util.register_pytree_node) or pass a {kind}."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(
            f"jdp.{verb}: {name()} is a jax.ShapeDtypeStruct, which has no values. Wrap the call in jax.eval_shape."
        )
    if isinstance(leaf, memoryview) or hasattr(leaf, "__array__") and not isinstance(leaf, type):
        kind = type(leaf)
        of_torch = kind.__module__.partition(".")[0] == "torch"
        how = "x.detach().cpu().numpy(), which is np.asarray(x) of a tensor" if of_torch else "np.asarray(x)"
        raise TypeError(
            f"jdp.{verb}: {name()} is a {kind.__module__}.{kind.__name__}, no jax or numpy array; programs of JAX "
            f"take only those. Pass {how}."
        )
    if is_sparse(leaf):
        raise TypeError(
            f"jdp.{verb}: {name()} is a {type(leaf).__name__}, a sparse array, whose rows are not those of its "
            f"buffers; it cannot be cut. Pass a dense array (x.todense())."
        )
    if isinstance(leaf, Iterator):
        raise TypeError(
            f"jdp.{verb}: {name()} is an iterator; one call takes one batch. Pass next(it), or loop over it."
        )
    if _holds_arrays(leaf):
        raise TypeError(
            f"jdp.{verb}: {name()} is a {type(leaf).__name__} that holds arrays, a container that JAX does not know as "
            f"a pytree; they would not be cut. Register it (jax.tree_util.register_dataclass, "
            f"register_pytree_node), or pass a dict, list or tuple of them."
        )


def refuse_cut_graphs(leaves: Sequence[Any], is_cut: Sequence[bool], treedef: Any, verb: str, root: Any) -> None:
    """Raises a `TypeError` for a `jraph.GraphsTuple` that would be cut, and is not a stack of several."""
    jraph = sys.modules.get("jraph")  # a user who has one has imported it
    if jraph is None:
        return
    numbered = treedef.unflatten(range(len(leaves)))

    def is_one(x: Any) -> bool:
        return isinstance(x, jraph.GraphsTuple)

    for path, x in jax.tree_util.tree_leaves_with_path(numbered, is_leaf=is_one):
        if is_one(x) and any(is_cut[i] for i in jax.tree.leaves(x)) and leaves[x.n_node].ndim < 2:
            raise TypeError(
                f"jdp.{verb}: {_called(root, path)} is one jraph.GraphsTuple, whose edges name nodes of all graphs by "
                f"their number; it cannot be cut like rows. Pass a stack of padded graphs, one for each row or device "
                f"(jax.tree.map(lambda *x: np.stack(x), *graphs)), and jax.vmap the model over it."
            )


def _holds_arrays(x: Any) -> bool:
    """Returns True if `x` is a container with arrays that are not 0-d: a deque, a UserDict, a plain dataclass."""
    if isinstance(x, str | bytes | range):
        return False
    if isinstance(x, Mapping):
        inside: Iterable[Any] = x.values()
    elif isinstance(x, Collection):
        inside = x
    elif dataclasses.is_dataclass(x) and not isinstance(x, type) or isinstance(x, types.SimpleNamespace):
        inside = vars(x).values() if hasattr(x, "__dict__") else ()
    else:
        return False
    return any(is_array(value) and value.ndim for value in jax.tree.leaves(list(inside)))


def paths_of(tree: Any, root: str | tuple[str, ...], stop: Callable[[Any], bool] | None = no_further) -> list[str]:
    """Returns the path of each leaf, `args[0]['x']`; `root` names the tree, or each child of a tree that is a tuple."""
    return [_called(root, path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop)]


def _called(root: str | tuple[str, ...], path: Any) -> str:
    if isinstance(root, tuple):
        return root[path[0].idx] + jax.tree_util.keystr(path[1:])
    return root + jax.tree_util.keystr(path)


def checked_dim(verb: str, dim: Any) -> int:
    found = as_int(dim)
    if found is None:
        raise TypeError(f"jdp.{verb}: dim is {dim!r}; it must be the axis to cut along. Pass an int.")
    return found


def normal_axis(axis: int, ndim: int, verb: str, name: Callable[[], str]) -> int:
    """Returns the axis counted from the front, or torch's `IndexError`."""
    if not -ndim <= axis < ndim:
        raise IndexError(
            f"jdp.{verb}: {name()} is of rank {ndim} ({ndim} dimension{'s' * (ndim != 1)}), dim is {axis}; Dimension "
            f"out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {axis}). Pass another "
            f"dim{_axes_advice(verb, name())}."
        )
    return axis % ndim


def check_rows(cut: Sequence[tuple[Any, int, int]], verb: str, name: Callable[[int], str]) -> int:
    """Returns the number of rows that all cut arrays (array, axis, index) agree on."""
    if verb != "scatter":  # in an argument it is a key; in a tree that is only scattered it may be two rows
        for x, _, i in cut:
            refuse_legacy_key(x, verb, lambda i=i: name(i))
    first, axis, index = cut[0]
    rows = first.shape[axis]
    if not isinstance(rows, int):
        raise ValueError(
            f"jdp.{verb}: {name(index)} has a symbolic number of rows, {rows}; a batch is cut by its number of rows, "
            f"so each number has a program of its own. Export the bare model, or this call for one number of rows."
        )
    for other, other_axis, other_index in cut[1:]:
        found = other.shape[other_axis]
        if found != rows:
            names = name(index), name(other_index)
            refuse_legacy_key(first, verb, lambda: name(index))
            refuse_legacy_key(other, verb, lambda i=other_index: name(i))
            raise ValueError(
                f"jdp.{verb}: {names[0]} has {rows} rows (axis {axis}), {names[1]} has {found} (axis {other_axis}); "
                f"all arrays that are cut must agree. Pass equal rows{_axes_advice(verb, max(names))}."
            )
    return rows


def is_legacy_key(x: Any, *lead: int) -> bool:
    """Returns True for what looks like `jax.random.PRNGKey(0)`, or like an array of such keys of the shape `lead`.

    How many words it has, two or four, depends on `jax_default_prng_impl`.
    """
    if x.dtype != np.uint32 or x.shape[:-1] != lead or x.shape[-1:] not in ((2,), (4,)):
        return False
    return x.shape[-1:] == jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape


def refuse_legacy_key(x: Any, verb: str, name: Callable[[], str], why: str = "") -> None:
    """Raises a `TypeError` for what looks like `jax.random.PRNGKey(0)`: words that are no rows."""
    if is_legacy_key(x):
        why = why or f"be cut into its {'two' if len(x) == 2 else len(x)} words"
        raise TypeError(
            f"jdp.{verb}: {name()} is a uint32[{len(x)}] array, a legacy PRNG key; it would {why}. "
            f"Pass a typed key, jax.random.key(seed) (or jax.random.wrap_key_data(key)); if it is no key, cast it to "
            f"another dtype, such as int32."
        )


def _axes_advice(verb: str, name: str) -> str:
    """Returns the advice to pass other axes, if the call takes axes."""
    if name.startswith("state"):
        return ", or let state_axes name what has a batch axis and no more (NNX: nnx.PathContains('name') as its key)"
    if verb in ("train_step", "value_and_grad"):
        return f", or pass in_axes to dp.{verb}, with None for what must be replicated"
    if verb != "DataParallel":
        return ""
    if name.startswith("kwargs"):
        return (
            "; in_axes holds for positional arguments alone. Pass an argument that must be replicated by position, and "
            "construct DataParallel with in_axes that has None in its place"
        )
    return ", or construct DataParallel with in_axes, None for an argument that must be replicated"


def refuse_rows_of_numbers(inputs: Any, rows: int | None, verb: str, root: str | tuple[str, ...]) -> None:
    """Raises a `TypeError` for rows as a list or tuple of numbers, or of 0-d arrays: each would be replicated.

    `rows` is None if nothing is cut. Then any list of numbers in a batch counts as rows, but none among a call's
    arguments does. A short tuple may be a size, or hold the weights of losses.
    """
    is_batch = isinstance(root, str)
    tops = () if is_batch else (inputs, *inputs)

    def are_rows(x: Any) -> bool:
        if type(x) not in (list, tuple) or len(x) < 2 or any(x is top for top in tops):
            return False
        if type(x) is tuple and (rows is None or len(x) < 5):
            return False
        if len(x) != rows and not (rows is None and is_batch):
            return False
        inside = jax.tree.leaves(x) if is_batch else x
        return bool(inside) and all(isinstance(v, bool | int | float) or _is_number(v) for v in inside)

    for path, x in jax.tree_util.tree_leaves_with_path(inputs, is_leaf=lambda x: are_rows(x) or no_further(x)):
        if are_rows(x):
            many = "and nothing in the batch is an array" if rows is None else "as many as the batch has rows"
            of = f"{type(x[0]).__name__}s of " if isinstance(x[0], NESTED) else ""
            what, also, way = "0-d arrays", "", "jnp"
            if all(isinstance(v, bool | int | float) for v in jax.tree.leaves(x)):
                what, also, way = "Python numbers", ", and each new value compile again", "np"
            raise TypeError(
                f"jdp.{verb}: {_called(root, path)} is a {type(x).__name__} of {len(x)} {of}{what}, {many}; each would "
                f"be replicated{also}. Pass {way}.asarray(x), which is cut, or leave it whole by in_axes."
            )


def _is_number(x: Any) -> bool:
    return is_array(x) and not x.ndim and not is_key(x)


def refuse_loader(batch: Any, verb: str) -> None:
    """Raises a `TypeError` for a batch that is a loader, a dataset or an iterator."""
    # Other objects that are no batch, and containers that JAX does not know, are refused elsewhere.
    if isinstance(batch, (*ARRAYS, *NESTED, str, bytes, type)) or hasattr(batch, "__array__"):
        return
    if is_scattered(batch) or is_sparse(batch) or _holds_arrays(batch):
        return
    if hasattr(batch, "__iter__") or hasattr(batch, "__getitem__"):
        raise TypeError(
            f"jdp.{verb}: batch is a {type(batch).__name__}, which holds batches or rows; one call takes one batch, a "
            f"tree of arrays. Loop over it: for batch in dp.prefetch(loader)."
        )


STACKED: Any = object()
"""The axis of what is stacked for `jax.pmap`: one entry for each replica, along the first axis."""


def axes_of(axes: Any, tree: Any, verb: str = "DataParallel", what: str = "in_axes") -> list[Any]:
    """Returns one axis for each leaf of `tree`, out of a tree prefix of ints and Nones, as in `jax.vmap`."""
    prefix, prefixdef = jax.tree.flatten(axes, is_leaf=lambda a: a is None)
    try:
        subtrees = prefixdef.flatten_up_to(tree)
    except ValueError:
        raise ValueError(
            f"jdp.{verb}: {what} does not fit the {'outputs' if what == 'out_axes' else 'arguments'}, whose tree is "
            f"{jax.tree.structure(tree)}; it must be a tree prefix, as in jax.vmap. Pass an int or None for each."
        ) from None
    for axis in prefix:
        if axis is not None and axis is not STACKED and (isinstance(axis, bool) or not isinstance(axis, int)):
            other = ' (or "stacked")' if verb == "parallel" else ""
            raise TypeError(f"jdp.{verb}: {what} holds {axis!r}; an axis is an int or None{other}. Pass one of these.")
    return [
        axis
        for axis, subtree in zip(prefix, subtrees, strict=True)
        for _ in jax.tree.leaves(subtree, is_leaf=no_further)
    ]


def entries(verb: str, axes: Any, count: int, name: str, what: str) -> list[Any]:
    """Returns an entry of `axes` for each argument, or each result."""
    given = list(axes) if isinstance(axes, tuple | list) else [axes] * count
    if len(given) != count:
        raise ValueError(
            f"jdp.{verb}: {name} has {len(given)} entries for {count} {what}; as in jax.vmap each has one. Pass "
            f"{name} of that length, None for what is whole."
        )
    return given
