"""Finds what looks like part of a batch, by its number of rows, and goes whole to every replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from .._core.layout import Whole
from .._core.outputs import path_name
from .calls import Call


def unscattered(call: Call, jaxpr: Any) -> list[str]:
    """Names of arguments and of constants that have as many rows as the batch, with their shapes."""
    rows = sum(call.batch[0].sizes)
    if rows < 2 or call.mesh.size == 1 or not any(s._layout.is_cut for s in call.batch):
        return []
    found = []
    for scattered in call.batch:
        layout = scattered._layout
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(layout.fill(scattered._arrays))]
        for x, leaf, name in zip(scattered._arrays, layout.arrays, names, strict=False):
            if isinstance(leaf, Whole) and rows in x.shape[:1]:
                found.append(f"argument {name or '0'}: {x.dtype}{list(x.shape)}")
    for x in _constants(jaxpr):
        if getattr(x, "ndim", 0) and x.shape[0] == rows:
            found.append(f"a constant that the function closes over: {x.dtype}{list(x.shape)}")
    return list(dict.fromkeys(found))


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The arrays that a traced function has closed over, nested ones too."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield from (x.val for x in eqn.invars if hasattr(x, "val"))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _constants(value)
