"""Convolutions that XLA's CPU compiler has fast kernels for, inside of loops and branches too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .rewrite import rewrite


def canonical(jaxpr: Any) -> Any:
    """The jaxpr, with every convolution in the one layout that is fast on a CPU.

    XLA:CPU transposes convolutions into the layout of its kernels (batch, space, features) only in the
    entry computation of a program. Inside a `scan` or a `switch` they stay as they are, and the gradient of
    a convolution, whose layout is another, takes the slow path: ten times slower on a small CNN. So it is
    done here. Transposes that are not needed cost nothing: the compiler takes them out.
    """
    return rewrite(jaxpr, _rule)


def _rule(eqn: Any) -> Callable[..., Any] | None:
    if eqn.primitive is not jax.lax.conv_general_dilated_p:
        return None
    return functools.partial(_convolution, **eqn.params)


def _convolution(x: Any, kernel: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    lhs, rhs, out = dimension_numbers
    n = len(lhs)
    space = tuple(range(1, n - 1))
    x = jnp.transpose(x, (lhs[0], *lhs[2:], lhs[1]))
    kernel = jnp.transpose(kernel, (*rhs[2:], rhs[1], rhs[0]))
    numbers = jax.lax.ConvDimensionNumbers((0, n - 1, *space), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *space))
    y = jax.lax.conv_general_dilated_p.bind(x, kernel, dimension_numbers=numbers, **params)
    back = [0] * n
    for position, axis in enumerate((out[0], *out[2:], out[1])):
        back[axis] = position
    return jnp.transpose(y, back)
