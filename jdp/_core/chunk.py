"""Which rows go to which replica, how chunks are padded to one size, and how the padding comes off."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .layout import Cut


def chunk_sizes(size: int, n: int) -> tuple[int, ...]:
    """The chunk sizes of `torch.chunk(x, n)` for `size` rows: `ceil(size / n)` each, the last one smaller.

    There may be fewer than `n` chunks: 10 rows over 4 are 3, 3, 3, 1, but 9 are 3, 3, 3. No rows are
    `n` chunks of none. (`jnp.array_split` is another rule: 3, 3, 2, 2.)

    Args:
        size: number of rows, 0 or more.
        n: number of devices, 1 or more.

    Returns:
        A tuple of at most `n` ints whose sum is `size`.

    Raises:
        ValueError: `size` is negative, or `n` is not positive.

    Example:
        >>> import jdp
        >>> jdp.chunk_sizes(10, 4), jdp.chunk_sizes(9, 4), jdp.chunk_sizes(5, 4)
        ((3, 3, 3, 1), (3, 3, 3), (2, 2, 1))

    Source: `chunk` in aten/src/ATen/native/TensorShape.cpp; torch/nn/parallel/scatter_gather.py.
    """
    if size < 0 or n < 1:
        raise ValueError(
            f"jdp.chunk_sizes: size {size} over n={n}; size is at least 0 and n at least 1. Pass such numbers."
        )
    if size == 0:
        return (0,) * n
    each = -(-size // n)
    return tuple(min(each, size - start) for start in range(0, size, each))


def given_sizes(sizes: Sequence[int], rows: int, n: int) -> tuple[int, ...]:
    """The user's own `chunk_sizes`, checked against the rows and the devices."""
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != n:
        raise ValueError(
            f"jdp.scatter: Expected devices and chunk_sizes to be of same length, but got len(devices) = {n} and "
            f"len(chunk_sizes) = {len(sizes)}. Pass one size per device; 0 leaves a device idle."
        )
    if min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"jdp.scatter: chunk_sizes {sizes} sum to {sum(sizes)}, the inputs have {rows} rows; sizes are not "
            f"negative and sum to the rows. Pass sizes that do."
        )
    return sizes


def _padding_runs(leaf: Cut, n: int) -> list[tuple[int, int]]:
    """Runs of (rows, padding rows) that make the padded array; neighbours without padding are one run."""
    runs: list[tuple[int, int]] = []
    for size in (*leaf.sizes, *[0] * (n - len(leaf.sizes))):
        blank = leaf.padded - size
        if runs and (runs[-1][1] == 0 or size == 0):
            rows, padding = runs.pop()
            runs.append((rows + size, padding + blank))
        else:
            runs.append((size, blank))
    return runs


def pad(x: Any, leaf: Cut, n: int) -> Any:
    """`x` with every chunk padded to the largest, for `n` devices; `x` itself where nothing is missing."""
    runs = _padding_runs(leaf, n)
    if len(runs) == 1 and runs[0][1] == 0:
        return x
    concatenate = np.concatenate if isinstance(x, np.ndarray) else jnp.concatenate
    pieces, start = [], 0
    for rows, blank in runs:
        if rows:
            pieces.append(_rows(x, start, start + rows, leaf.axis))
        if blank:
            pieces.append(_blank(x, blank, leaf.axis))
        start += rows
    return concatenate(pieces, axis=leaf.axis) if len(pieces) > 1 else pieces[0]


def unpad(x: Any, leaf: Cut, n: int) -> Any:
    """The inverse of `pad`: the true rows of all chunks, in input order."""
    runs = _padding_runs(leaf, n)
    if len(runs) == 1 and runs[0][1] == 0:
        return x
    starts = itertools.accumulate((rows + blank for rows, blank in runs), initial=0)
    pieces = [_rows(x, start, start + rows, leaf.axis) for start, (rows, _) in zip(starts, runs, strict=False) if rows]
    if not pieces:
        return _rows(x, 0, 0, leaf.axis)
    return jnp.concatenate(pieces, axis=leaf.axis) if len(pieces) > 1 else pieces[0]


def _rows(x: Any, start: int, stop: int, axis: int) -> Any:
    if isinstance(x, np.ndarray):
        return x[(slice(None),) * axis + (slice(start, stop),)]
    return jax.lax.slice_in_dim(x, start, stop, axis=axis)


def _blank(x: Any, rows: int, axis: int) -> Any:
    zeros = np.zeros if isinstance(x, np.ndarray) else jnp.zeros
    return zeros((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)
