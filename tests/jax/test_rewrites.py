"""Products of all pairs of rows: which equations are told how they are cut, and that the numbers stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp._jax.rewrites import with_pairs_cut

ROWS = 6
Z = np.random.RandomState(0).randn(2, ROWS, 4).astype(np.float32)
WEIGHTS = np.ones((4, ROWS), np.float32)  # as wide as there are rows


@jax.custom_vjp
def product(a, b):
    return a @ b.T


product.defvjp(lambda a, b: (a @ b.T, (a, b)), lambda kept, g: (g @ kept[1], g.T @ kept[0]))


def simclr(a, b):
    both = jnp.concatenate([a, b])
    own = jnp.concatenate([jnp.arange(ROWS), jnp.arange(ROWS) + ROWS])
    scores = both @ both.T
    return jax.nn.logsumexp(jnp.where(own[:, None] == jnp.arange(2 * ROWS), -9.0, scores), 1).mean()


def with_images(a, b):
    """The second array is larger than what the product takes."""
    images = jnp.concatenate([jnp.repeat(a, 9, 1), jnp.repeat(b, 9, 1)])
    return (a @ b.T).sum() + jnp.square(images).sum()


def of_tokens(a, b):
    """The first operand, which is joined, is larger than the second, and stays cut."""
    tokens = jnp.concatenate([jnp.repeat(a[:, None], ROWS, 1), jnp.repeat(b[:, None], ROWS, 1)], 1)
    return jnp.einsum("ntd,md->ntm", tokens, b).max(1).mean()


def beside(a, b):
    """What is joined is no part of the product."""
    return (a @ b.T).mean() + jnp.tanh(jnp.concatenate([a, b])).mean()


def pairs(first, product):
    """The first operand is cut along an axis of rows, and the product too."""
    return [first, product]


OF_ROWS = pairs(((ROWS, 4), 0), ((ROWS, ROWS), 0))
JOINED = [((ROWS, 4), None)] * 2 + [((2 * ROWS, 4), None)] + [((ROWS,), None)] * 2 + [((2 * ROWS,), None)]
CASES = {
    "what is joined is no operand": (beside, OF_ROWS),
    "tokens": (of_tokens, pairs(((ROWS, 2 * ROWS, 4), 0), ((ROWS, 2 * ROWS, ROWS), 0))),
    "two views": (simclr, JOINED + pairs(((2 * ROWS, 4), 0), ((2 * ROWS, 2 * ROWS), 0))),
    "two towers": (lambda a, b: jax.nn.log_softmax(a @ b.T).trace(), OF_ROWS),
    "inside of a jit": (lambda a, b: jax.jit(lambda x: jnp.tanh(x @ b.T))(a).sum(), OF_ROWS),
    "along the last axis": (lambda a, b: jnp.einsum("ik,jk->ij", a, b).sum(), OF_ROWS),
    "along the first axis": (
        lambda a, b: jax.lax.dot_general(a.T, b, (((0,), (1,)), ((), ()))).sum(),
        pairs(((4, ROWS), 1), ((ROWS, ROWS), 0)),
    ),
    "rows second": (lambda a, b: (a[None] @ b.T).sum(), pairs(((1, ROWS, 4), 1), ((1, ROWS, ROWS), 1))),
    "what is joined is large": (with_images, OF_ROWS),
    "a layer": (lambda a, b: jnp.concatenate([a @ WEIGHTS, b @ WEIGHTS]).sum(), []),
    "of each row": (lambda a, b: jnp.einsum("ik,ik->i", a, b).sum(), []),
    "of features": (lambda a, b: (a.T @ b).sum(), []),
    "with its own backward pass": (lambda a, b: product(a, b).sum(), []),
    "no product": (lambda a, b: jnp.concatenate([a, b]).std(), []),
}


@pytest.mark.one_case("two views")
@pytest.mark.parametrize("name", CASES)
def test_pairs_of_rows_are_cut(name):
    fn, wanted = CASES[name]
    jaxpr, seen = jax.make_jaxpr(fn)(*Z), []

    def constrained(x, axis):
        seen.append((x.shape, axis))
        return x

    cut = with_pairs_cut(jaxpr, [True, True], ROWS, constrained)
    assert sorted(seen, key=str) == sorted(wanted, key=str)
    run = jax.extend.core.jaxpr_as_fun(cut)
    np.testing.assert_array_equal(run(*Z)[0], jax.extend.core.jaxpr_as_fun(jaxpr)(*Z)[0])
    found, wanted = (jax.grad(lambda a, b, f=f: f(a, b)[0], (0, 1))(*Z) for f in (run, fn_of(fn)))
    # What was joined is multiplied in parts, and some CPUs round the sum of these products in another way.
    rounding = {"rtol": 1e-6, "atol": 3e-8} if name == "two views" else {"rtol": 0}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **rounding), found, wanted)


def fn_of(fn):
    return lambda *args: [fn(*args)]
