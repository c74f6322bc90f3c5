"""Remembers the calls of a public entry point: a repeated call goes straight to its program.

scatter and replicate pass some arrays on unchanged: replicated parameters, arrays of a batch that is cut already, and
numpy arrays that the program itself places. If all arrays of a call are such, it is remembered by their shapes and
dtypes (and the shardings of jax arrays). A later call with the same ones skips scatter and replicate. A batch that has
to be padded is padded in each call, so only its layout is remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._jax.jaxprs import communicates
from .._jax.private import trace_state_clean
from .inputs import NESTED, USUAL, is_deep
from .layout import Layout, Tree, is_key
from .programs import FlatProgram, Layouts, Recent, ReplicaProgram, all_lie, are_freed, dispatch, is_plain, is_watched
from .replica_mesh import ReplicaMesh
from .scatter import as_scattered
from .scattered import Scattered
from .unread import Reads, may_hide

flatten = jax.tree_util.default_registry.flatten  # without the Python around it

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


Known = tuple[FlatProgram, Sequence[Any] | None, Any]
"""A program that ran; the shardings of its parameters, if some are cut inside of the replicas; and what its caller
needs to finish a repeated call (for value_and_grad, the roles of its arguments)."""


class Calls(Recent[Any, Recent[Any, Known]]):
    """The calls that one entry point has run: by the key of `key_of_call`, then by the treedef of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Reads = {}  # the Python values that the user's function has asked for
        self._module: Any = None  # the module of these calls; they are dropped if the user has replaced it

    def run_known(
        self, mesh: ReplicaMesh, module: Any, params: Tree, args: Args, kwargs: Kwargs
    ) -> tuple[FlatProgram, Any, tuple[Any, ...]] | None:
        """Runs a call like an earlier one; returns its program, its `extra` and the result. None if it is new."""
        if not self or module is not self._module or not trace_state_clean():
            return None
        key, arrays = key_of_call(args, kwargs)
        known = self.used(key)
        if known is None or not is_plain() or is_watched():
            return None
        for treedef, found in [*known.items()]:  # as a rule there is one; another thread may add one
            with contextlib.suppress(ValueError, TypeError):  # another structure; keys that do not compare
                leaves, (program, inside, extra) = treedef.flatten_up_to(params), found  # compares, too, and is faster
                break
        else:
            return None
        if not leaves:
            return None
        if not all_lie(leaves, mesh) if inside is None else _shardings(leaves) != inside:
            return None
        placed = [x for x in arrays if type(x) is not np.ndarray]
        if placed and are_freed(placed) or inside is not None and are_freed(leaves):
            return None  # the ordinary path raises an error that names it
        run = program.run
        out = dispatch(run, mesh, [], leaves, *arrays) if program.is_limited else run([], leaves, *arrays)
        return program, extra, out

    def remember(
        self,
        program: Callable[[], ReplicaProgram],
        module: Any,
        call: tuple[Tree, Args, Kwargs],
        operands: tuple[Tree, Scattered, Scattered],
        extra: Any = None,
    ) -> None:
        """Remembers a call that ran with these operands, if scatter and replicate passed its arrays on unchanged.

        `extra` is what the caller needs to finish a repeated call.
        """
        (params, args, kwargs), (replicas, inputs, kw) = call, operands
        mesh = inputs._layout.mesh
        if not _is_known_by_arrays(inputs._layout):
            return
        key, arrays = key_of_call(args, kwargs)
        if key is None or not _are(arrays, [*inputs._arrays, *kw._arrays]):
            return
        (found, treedef), (moved, of_replicas) = jax.tree.flatten(params), jax.tree.flatten(replicas)
        lie = all_lie(found, mesh)
        if not _are(found, moved) or not (lie or mesh.inner_axes) or not is_plain():
            return
        if module is not self._module:
            self.clear()
            self._module = module
        known = self.used(key)
        if known is None:
            known = self[key] = Recent()
        inside = None if lie else _shardings(found)
        ran = program().flat(of_replicas, inputs._layout, kw._layout)
        known[treedef] = ran, inside, extra
        # With inner axes XLA adds collectives that are not in the trace. JAX still has the trace from the run.
        ran.is_limited = mesh.may_deadlock and (
            bool(mesh.inner_axes) or communicates(ran.run.trace([], moved, *arrays).jaxpr)
        )


def known_batch(known: Layouts, batch: Tree) -> Scattered | None:
    """Returns the batch as a `Scattered`, if a batch like it was cut before; None if it is new."""
    if not known or type(batch) is Scattered or not trace_state_clean():
        return None
    key, arrays = key_of_call((batch,), {})
    layout = known.used(key)
    if layout is None or not is_plain():
        return None
    return Scattered(arrays, layout) if layout.is_even else as_scattered(arrays, layout, place=False)


def remember_batch(known: Layouts, batch: Tree, scattered: Scattered) -> None:
    """Remembers how a batch was cut, if its arrays were passed on unchanged or only padded on the host."""
    layout = scattered._layout
    if scattered is batch or not _is_known_by_arrays(layout):
        return
    key, arrays = key_of_call((batch,), {})
    same = _are(arrays, scattered._arrays) or not layout.is_even and _are_padded(arrays, scattered._arrays)
    if key is not None and same and is_plain():
        known[key] = layout


def _is_known_by_arrays(layout: Layout) -> bool:
    """Returns True if `key_of_call` holds all that decides how a batch is cut, and with which program it runs."""
    return not (layout.mesh.spans_processes or layout.holds_statics and may_hide(layout))


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Returns True if both hold the same objects."""
    return len(some) == len(others) and all(x is y for x, y in zip(some, others, strict=True))


def _are_padded(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Returns True if both hold numpy arrays of the same dtypes; padding has changed the lengths at most."""
    return len(some) == len(others) and all(
        type(x) is type(y) is np.ndarray and x.dtype == y.dtype for x, y in zip(some, others, strict=True)
    )


def _shardings(leaves: Sequence[Any]) -> list[Any]:
    return [getattr(x, "sharding", None) for x in leaves]


_STATICS = (bool, int, str)


def key_of_call(args: Args, kwargs: Kwargs) -> tuple[Any, Sequence[Any]]:
    """Returns `(key, arrays)` of a call: the key tells how the arrays are cut, and holds its bools, ints and strings.

    Returns `(None, [])` if a leaf is of another type (a float, a function, a PRNG key); no such call is remembered.
    """
    key: list[Any] = [len(args)]
    arrays: list[Any] = []
    for x in (*args, kwargs) if kwargs else args:
        if type(x) is Scattered:  # cut already; JAX itself compares dtypes and shapes when the program is called
            key.append(x._layout)
            # jax.tree.map may have put an array elsewhere, and then the program does not take it.
            key += [getattr(y, "sharding", None) for y in x._arrays]
            arrays += x._arrays
        elif not _add_leaves(x, key, arrays):
            return None, []
    return tuple(key), arrays


def _add_leaves(x: Tree, key: list[Any], arrays: list[Any]) -> bool:
    """Appends one argument that is no `Scattered` to the key and to the arrays; returns False if a leaf is unusual."""
    if is_deep(x) if type(x) in NESTED else type(x) not in USUAL and isinstance(x, Iterator):
        return False
    try:
        found, treedef = flatten(x)
    except ValueError:  # keys of dicts that do not compare
        return False
    key.append(treedef)
    for x in found:
        if type(x) is np.ndarray:
            key += x.dtype, x.shape
        elif type(x) in _STATICS:
            key += type(x), x
            continue
        elif isinstance(x, jax.Array) and not isinstance(x, Tracer) and not is_key(x):
            key += x.sharding, x.dtype, x.shape
        else:
            return False
        arrays.append(x)
    return True
