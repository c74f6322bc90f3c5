"""Parameters as torch and equinox lay them out: outputs first, and channels before height and width."""

from __future__ import annotations

from typing import Any

KEYS = {(2, True): ("kernel", "bias"), (2, False): ("scale", "bias"), (1, True): ("embedding",)}


def channels_first(layer: str, values: list[Any]) -> list[Any]:
    """A kernel as torch and equinox have it: outputs first; `dense1` after a convolution sees channels first."""
    kernel, *bias = values
    if not bias or kernel.ndim == 1:
        return values
    if kernel.ndim == 4:
        return [kernel.transpose(3, 2, 0, 1), *bias]
    if layer == "dense1" and len(kernel) == 7 * 7 * 32:
        kernel = kernel.reshape(7, 7, 32, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
    return [kernel.T, *bias]


def channels_last(layer: str, values: list[Any]) -> list[Any]:
    kernel, *bias = values
    if not bias or kernel.ndim == 1:
        return values
    if kernel.ndim == 4:
        return [kernel.transpose(2, 3, 1, 0), *bias]
    kernel = kernel.T
    if layer == "dense1" and len(kernel) == 7 * 7 * 32:
        kernel = kernel.reshape(32, 7, 7, -1).transpose(1, 2, 0, 3).reshape(kernel.shape)
    return [kernel, *bias]
