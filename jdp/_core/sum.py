"""sum_over adds values up over the replicas: one sum for each, by whose name the compiled program knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .processes import spans_processes


def psum(values: list[Any], mesh: Mesh) -> list[Any]:
    """The sums, in one collective."""
    # XLA leaves a sum over one device in the program, where it still waits for nobody.
    return values if mesh.size == 1 else jax.lax.psum(values, mesh.axis_names[0])


def _named(values: list[Any], names: Sequence[str], mesh: Mesh) -> list[Any]:
    """The sums, each of which the compiled program (and so `explain`, and a profile) knows by its name."""
    sums = []
    for x, name in zip(values, names, strict=True):
        with jax.named_scope(name):
            sums += psum([x], mesh)
    return sums


_SMALL = 1 << 17  # elements


def _psum_of_transposed(values: list[Any], names: Sequence[str], mesh: Mesh) -> list[Any]:
    # The gradient of a dense layer's kernel is the transpose of a product. With the sum behind the transpose, XLA's CPU
    # compiler makes one product of both, of a form that it is slow at: a tenth of a small transformer's step. Of large
    # ones the transposes take longer than that: a fifth of an MLP's. Between processes the sum is another operation,
    # and they would be a fifth of the step, too.
    if mesh.devices.flat[0].platform != "cpu" or spans_processes(mesh):
        return _named(values, names, mesh)
    turn = [jnp.matrix_transpose if x.ndim == 2 and x.size <= _SMALL else (lambda y: y) for x in values]
    sums = _named([f(x) for f, x in zip(turn, values, strict=True)], names, mesh)
    return [f(x) for f, x in zip(turn, sums, strict=True)]


def sum_over(values: Sequence[Any], axes: Sequence[int | None], names: Sequence[str], mesh: Mesh) -> list[Any]:
    """The sums over the replicas, whole on all; or, where an axis is given, scattered along it."""
    whole = [(x, name) for x, axis, name in zip(values, axes, names, strict=True) if axis is None]
    sums = iter(_psum_of_transposed([x for x, _ in whole], [name for _, name in whole], mesh))
    found = []
    for x, axis, name in zip(values, axes, names, strict=True):
        if axis is None:
            found.append(next(sums))
            continue
        with jax.named_scope(name):
            found.append(jax.lax.psum_scatter(x, mesh.axis_names[0], scatter_dimension=axis, tiled=True))
    return found
