"""Describes a tree in a few lines: what each leaf is and where it lies, but never its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from .._page import Page, bars, in_bytes, table, tag, text
from .layout import Tree


def summary(name: str, tree: Tree) -> str:
    """Returns the tree in a few lines, one for each leaf: its path and what it is."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    lines = [f"  {jax.tree_util.keystr(path) or 'leaf'}: {summary_of_leaf(x)}" for path, x in leaves[:12]]
    if len(leaves) > 12:
        lines.append(f"  ... and {len(leaves) - 12} more of {len(leaves)}")
    return "\n".join([f"{name}(", *lines, ")"]) if lines else f"{name}()"


def summary_of_leaf(x: Any) -> str:
    """Returns the dtype, shape and place of an array, but never its values; or the type and value of a Python value."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        text = repr(x) if isinstance(x, bool | int | float | complex | str) else ""
        return type(x).__name__ + f" {text}" * (0 < len(text) < 40)
    return f"{x.dtype}[{', '.join(map(str, x.shape))}] {_place(x)}"


def _place(x: Any) -> str:
    """Returns in words where an array lies, or that it is freed."""
    if isinstance(x, Tracer):
        return "traced"
    if isinstance(x, jax.ShapeDtypeStruct):
        return "described"
    if not isinstance(x, jax.Array):
        return "on the host"
    if x.is_deleted():
        return "deleted"
    devices = sorted(x.sharding.device_set, key=lambda d: d.id)
    if len(devices) == 1:
        return f"on {devices[0]}"
    return f"{'whole on' if x.sharding.is_fully_replicated else 'cut over'} {len(devices)} devices"


def page_of(title: str, facts: Sequence[tuple[str, object]], trees: Mapping[str, Tree]) -> Page:
    """Returns a page with some facts, and for each tree its arrays and how much of a device's memory they take.

    It reads no value and waits for no device, so that a notebook may draw it at any time.
    """
    body = [table((), facts)] if facts else []
    trees = {name: tree for name, tree in trees.items() if jax.tree.leaves(tree)}
    sizes = {name: bytes_on_each(tree) for name, tree in trees.items()}
    if len(sizes) > 1:
        body += [text("on each device"), bars([(name, size, in_bytes(size)) for name, size in sizes.items()])]
    for name, tree in trees.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        rows = [(jax.tree_util.keystr(path) or name, summary_of_leaf(x)) for path, x in leaves[:_MANY]]
        rows += [(f"and {len(leaves) - _MANY} more", "")] * (len(leaves) > _MANY)
        shapes = [x.shape for _, x in leaves if hasattr(x, "shape")]
        told = f"{name}: {sum(map(math.prod, shapes)):,} numbers in {len(shapes)} array{'s' * (len(shapes) != 1)}"
        body.append(tag("details", tag("summary", told), table(("array", "what it is"), rows)))
    return Page(title, body)


_MANY = 200  # arrays


def bytes_on_each(tree: Tree) -> int:
    """Returns how many bytes a tree's arrays take on one device; freed arrays take none."""
    size = 0
    for x in jax.tree.leaves(tree):
        is_here = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        if hasattr(x, "dtype") and not (is_here and x.is_deleted()):
            where = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
            size += math.prod(x.shape if where is None else where.shard_shape(x.shape)) * x.dtype.itemsize
    return size
