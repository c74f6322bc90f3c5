"""Finds backward passes of the user's own (`jax.custom_vjp`) that combine rows, although their function does not.

A backward pass that divides the cotangents by their norm, or subtracts their mean, would see the cotangents of one
replica's rows alone. A BatchNorm with its own backward pass is accepted, because its function combines rows, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .jaxprs import bind, parameter
from .row_values import CONST, Kind, RowValue

Read = Callable[[Any, Sequence[RowValue]], list[RowValue]]
OfRows = Callable[[Any], bool]


def backward_of(eqn: Any) -> Any:
    """Returns the jaxpr of a `custom_vjp_call`'s forward and backward pass; None if it cannot be traced.

    Its inputs are the operands, and the cotangents of the results that are not integers.
    """
    chosen = [i for i, v in enumerate(eqn.invars) if _has_cotangent(v)]

    def run(values: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        def of_some(*some: Any) -> list[Any]:
            known = dict(zip(chosen, some, strict=True))
            results = bind(eqn, [known.get(i, x) for i, x in enumerate(values)])
            return [x for x, v in zip(results, eqn.outvars, strict=True) if _has_cotangent(v)]

        return jax.vjp(of_some, *[values[i] for i in chosen])[1](cotangents)

    try:
        with warnings.catch_warnings(action="ignore"):
            return jax.make_jaxpr(run)([v.aval for v in eqn.invars], [v.aval for v in eqn.outvars if _has_cotangent(v)])
    except Exception:  # the user's own function may raise anything, for example if it needs the number of rows
        return None


def mixes_cotangents(eqn: Any, backward: Any, values: Sequence[RowValue], read: Read, of_rows: OfRows) -> bool:
    """Returns True if a backward pass combines several rows, and its function does not.

    `read(jaxpr, inputs)` returns what is known of the outputs; `of_rows(v)` tells whether a variable has rows.
    """
    inputs = [RowValue(v.kind) if v.kind in (Kind.ROWS, Kind.UNKNOWN) else CONST for v in values]
    outputs = read(parameter(eqn, "call_jaxpr"), inputs)
    if any(v.kind == Kind.ROWS and v.role or v.kind == Kind.UNKNOWN or v.lasting is not None for v in outputs):
        return False
    if any(v.kind == Kind.SUMMED and v.fault is not None for v in outputs):  # statistics of the rows, as a variance
        return False
    pairs = [(v, w) for v, w in zip(outputs, eqn.outvars, strict=True) if _has_cotangent(w)]
    cotangents = [RowValue(Kind.ROWS) if of_rows(w) else _cotangent(v) for v, w in pairs]
    return any(map(_is_mixed, read(backward, [*inputs, *cotangents])))


def is_linear(eqn: Any, backward: Any, read: Read) -> bool:
    """Returns True if a backward pass is linear in the cotangents, or cannot be followed."""
    total = RowValue(Kind.SUMMED, 1)
    cotangents = [total for v in eqn.outvars if _has_cotangent(v)]
    found = read(backward, [*[CONST] * len(eqn.invars), *cotangents])
    return not any(v.kind == Kind.SUMMED and v.fault is not None for v in found)


def _has_cotangent(v: Any) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.inexact))


def _cotangent(output: RowValue) -> RowValue:
    """Returns what is known of an output's cotangent: a constant's is a sum over the rows, a sum's a constant."""
    if output.kind == Kind.CONST:
        return RowValue(Kind.SUMMED, 1)
    return RowValue(Kind.ROWS) if output.kind == Kind.ROWS else CONST


def _is_mixed(cotangent: RowValue) -> bool:
    """Returns True if a result of a backward pass combines rows other than by a sum."""
    if cotangent.kind == Kind.ROWS:
        return cotangent.role is not None or cotangent.lasting is not None
    return cotangent.kind == Kind.SUMMED and cotangent.fault is not None
