"""Convolutions rewritten into the layout that XLA's CPU compiler is fast at: the same numbers, in that one layout."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jdp._jax.jaxprs import canonical

rng = np.random.default_rng(0)


def convolutions(jaxpr):
    """The dimension numbers of all convolutions in a jaxpr, inside of loops and calls too."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive is jax.lax.conv_general_dilated_p:
            yield eqn.params["dimension_numbers"]
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(value, "eqns"):
                yield from convolutions(value)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "x, kernel, numbers, options",
    [
        ((3, 7, 4), (3, 4, 5), ("NWC", "WIO", "NWC"), {}),
        ((3, 4, 7, 6), (5, 4, 3, 2), ("NCHW", "OIHW", "NCHW"), {"window_strides": (2, 1)}),
        ((3, 7, 6, 4), (3, 2, 4, 5), ("NHWC", "HWIO", "NCHW"), {"rhs_dilation": (2, 1)}),
        ((2, 4, 5, 4, 3), (6, 2, 3, 2, 2), ("NCDHW", "OIDHW", "NDHWC"), {"feature_group_count": 2}),
        ((4, 6, 5, 2), (3, 3, 2, 4), ("NHWC", "HWIO", "NHWC"), {"lhs_dilation": (2, 2), "batch_group_count": 2}),
    ],
    ids=["1d", "NCHW", "mixed", "3d in groups", "dilated, batch in groups"],
)
def test_outputs_and_gradients_are_the_same(x, kernel, numbers, options):
    x, kernel = rng.normal(size=x).astype(np.float32), rng.normal(size=kernel).astype(np.float32)
    options = {"window_strides": (1,) * (x.ndim - 2), **options}

    def fn(x, kernel):
        def loss(x, kernel):
            padding = [(1, 1)] * (x.ndim - 2)
            y = jax.lax.conv_general_dilated(x, kernel, padding=padding, dimension_numbers=numbers, **options)
            return jnp.sum(jnp.sin(y)), y

        def body(carry, _):  # in a loop, and in a call
            return jax.tree.map(jnp.add, carry, jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, kernel)), None

        grads = jax.eval_shape(jax.grad(loss, argnums=(0, 1), has_aux=True), x, kernel)
        return jax.lax.scan(body, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), grads), length=2)[0]

    jaxpr = jax.make_jaxpr(fn)(x, kernel)
    rewritten = canonical(jaxpr)
    got = jax.extend.core.jaxpr_as_fun(rewritten)(x, kernel)
    for a, b in zip(got, jax.tree.leaves(fn(x, kernel)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    n = x.ndim
    channels_last = ((0, n - 1, *range(1, n - 1)), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *range(1, n - 1)))
    before, after = list(convolutions(jaxpr)), list(convolutions(rewritten))
    assert any(tuple(d) != channels_last for d in before) and len(after) == len(before) >= 3
    assert all(tuple(d) == channels_last for d in after)


def test_without_convolutions_the_very_same_jaxpr_comes_back():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x))(np.ones(3))
    assert canonical(jaxpr) is jaxpr
