"""A tree in a few lines: of each leaf what it is and where it lies, and never its values."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from .layout import Tree


def outline(name: str, tree: Tree) -> str:
    """The tree in a few lines, one for each leaf: its path and what it is."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    lines = [f"  {jax.tree_util.keystr(path) or 'leaf'}: {outline_of_leaf(x)}" for path, x in leaves[:12]]
    if len(leaves) > 12:
        lines.append(f"  ... and {len(leaves) - 12} more of {len(leaves)}")
    return "\n".join([f"{name}(", *lines, ")"]) if lines else f"{name}()"


def outline_of_leaf(x: Any) -> str:
    """The dtype, shape and place of an array, and never its values; a short Python value itself."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        text = repr(x) if isinstance(x, bool | int | float | complex | str) else ""
        return type(x).__name__ + f" {text}" * (0 < len(text) < 40)
    return f"{x.dtype}[{', '.join(map(str, x.shape))}] {_place(x)}"


def _place(x: Any) -> str:
    """Where an array lies; of one that is freed nothing else can be asked."""
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
