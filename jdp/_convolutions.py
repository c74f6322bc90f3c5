"""Convolutions that XLA's CPU compiler has fast kernels for, inside of loops and branches too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def canonical(jaxpr: Any) -> Any:
    """The closed jaxpr, with every convolution in the one layout that is fast on a CPU.

    XLA:CPU transposes convolutions into the layout of its kernels (batch, space, features) only in the
    entry computation of a program. Inside a `scan` or a `switch` they stay as they are, and the gradient of
    a convolution, whose layout is another, takes the slow path: ten times slower on a small CNN. So it is
    done here. Transposes that are not needed cost nothing: the compiler takes them out.
    """
    # JAX 0.12 has one class for open and closed jaxprs, of which `jaxpr` is the object itself.
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=canonical(inner))
    if not _has_convolutions(jaxpr):
        return jaxpr
    return jaxpr.replace(eqns=[_equation(eqn) for eqn in jaxpr.eqns])


def _has_convolutions(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(_has_convolutions, x))
    return hasattr(x, "eqns") and any(
        eqn.primitive is jax.lax.conv_general_dilated_p or any(map(_has_convolutions, eqn.params.values()))
        for eqn in x.eqns
    )


def _equation(eqn: Any) -> Any:
    if eqn.primitive is jax.lax.conv_general_dilated_p:
        # One equation that calls the new function, made by JAX itself, in place of the old one.
        call = jax.jit(lambda x, kernel: _convolution(x, kernel, **eqn.params))
        (new,) = jax.make_jaxpr(call)(*[v.aval for v in eqn.invars]).eqns
        return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
    return eqn.replace(params={name: _inside(value) for name, value in eqn.params.items()})


def _inside(x: Any) -> Any:
    """The jaxprs among an equation's parameters."""
    if isinstance(x, tuple | list) and type(x) in (tuple, list):
        return type(x)(map(_inside, x))
    return canonical(x) if hasattr(x, "eqns") else x


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
