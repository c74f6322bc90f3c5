"""Rewrites convolutions, and all their derivatives, into the one layout that is fast on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from .jaxprs import bind, first
from .rewrites import rewrite


def canonical(jaxpr: Any) -> Any:
    """Returns the jaxpr with every convolution, and its derivatives of any order, in the layout that is fast on a CPU.

    XLA:CPU transposes convolutions into the layout of its kernels (batch, space, features) only in the
    entry computation of a program. Inside a `scan` or a `switch` they stay as they are, and the gradient of
    a convolution, whose layout is another, takes the slow path: ten times slower on a small CNN. So they are
    transposed here. Transposes that are not needed cost nothing, because the compiler removes them. If a version of
    JAX has changed what this needs, the jaxpr stays as it is, and slow.
    """
    try:
        if first(jaxpr, "conv_general_dilated") is None:
            return jaxpr
        new = rewrite(jaxpr, _rule)
        _try()
        return new
    except (AttributeError, ImportError, NotImplementedError, TypeError):
        return jaxpr


def _rule(eqn: Any) -> Callable[..., Any] | None:
    if eqn.primitive is not jax.lax.conv_general_dilated_p:
        return None
    own = eqn.replace(primitive=_primitive())
    return lambda *operands: bind(own, operands)[0]


@functools.cache
def _primitive() -> Any:
    """Returns a primitive that replaces JAX's own, with the same parameters; it changes the layout when it is compiled.

    If the layout were changed earlier, JAX would derive convolutions in other layouts from the new one. So the rules to
    transpose and to batch it run JAX's own rules, and rewrite the convolutions in their results.
    """
    from jax.interpreters import ad, batching, mlir

    own = jax.extend.core.Primitive("convolution")
    own.def_impl(_fast_convolution)
    own.def_effectful_abstract_eval(jax.lax.conv_general_dilated_p.abstract_eval)
    mlir.register_lowering(own, mlir.lower_fun(_fast_convolution, multiple_results=False))
    ad.defbilinear(own, _transposed_to_x, _transposed_to_kernel)
    batching.primitive_batchers[own] = _batched
    return own


@functools.cache
def _try() -> None:
    """Raises an error if this version of JAX cannot differentiate, batch and compile the primitive."""

    def loss(x: Any, kernel: Any) -> Any:
        return jax.extend.core.jaxpr_as_fun(rewrite(plain, _rule))(x, kernel)[0].sum()

    one = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    plain = jax.make_jaxpr(lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, (1,), "SAME"))(one, one)
    ones = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)))).lower(ones, ones)


def _transposed_to_x(cotangent: Any, x: Any, kernel: Any, **params: Any) -> Any:
    return _run_rewritten(
        lambda ct, kernel: _transpose(lambda x: _plain_convolution(x, kernel, **params), x, ct), cotangent, kernel
    )


def _transposed_to_kernel(cotangent: Any, x: Any, kernel: Any, **params: Any) -> Any:
    return _run_rewritten(
        lambda ct, x: _transpose(lambda kernel: _plain_convolution(x, kernel, **params), kernel, ct), cotangent, x
    )


def _batched(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    return _run_rewritten(jax.vmap(functools.partial(_plain_convolution, **params), in_axes=tuple(axes)), *operands), 0


def _plain_convolution(x: Any, kernel: Any, **params: Any) -> Any:
    return jax.lax.conv_general_dilated_p.bind(x, kernel, **params)


def _transpose(linear: Callable[..., Any], x: Any, cotangent: Any) -> Any:
    return jax.linear_transpose(linear, x.aval)(cotangent)[0]


def _run_rewritten(function: Callable[..., Any], *operands: Any) -> Any:
    """Runs a function with its convolutions rewritten."""
    return jax.extend.core.jaxpr_as_fun(rewrite(jax.make_jaxpr(function)(*operands), _rule))(*operands)[0]


def _fast_convolution(x: Any, kernel: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """Convolves in the layout (batch, space, features); the result has the layout that was asked for."""
    lhs, rhs, out = dimension_numbers
    n = len(lhs)
    space = tuple(range(1, n - 1))
    x = jnp.transpose(x, (lhs[0], *lhs[2:], lhs[1]))
    kernel = jnp.transpose(kernel, (*rhs[2:], rhs[1], rhs[0]))
    numbers = jax.lax.ConvDimensionNumbers((0, n - 1, *space), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *space))
    y = _plain_convolution(x, kernel, dimension_numbers=numbers, **params)
    back = [0] * n
    for position, axis in enumerate((out[0], *out[2:], out[1])):
        back[axis] = position
    return jnp.transpose(y, back)
