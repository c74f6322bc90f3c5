"""Which functions make each row from that row alone, at its place, told from two of their jaxprs.

What is taken for such a function is run on more rows than there are: their results and derivatives are compared with
those of the rows alone. Each of these breaks was made by hand, and the test named after it failed:

* rev, sort, cumsum or split along the rows is taken for one along another axis: mixes (`flip`, `sorted`, ...)
* a reshape does not look at the axes before the rows: mixes (`turned`)
* literals are not compared: mixes (`count`)
* the derivative of a custom_jvp is not looked at: mixes (`custom_jvp`)
* a custom_vjp is a call like any other: mixes (`custom_vjp`)
* random numbers of any generator: test_random_numbers_of_rbg
* a slice is whole wherever it begins: mixes (`ends`)
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from laws import variables_of

from jdp._jax.row_places import keeps_places

RNG = np.random.default_rng(0)
ROWS, MORE = 5, 7
W = RNG.normal(size=(6, 4)).astype(np.float32)
KEY = jax.random.key(3)


def bodies(fn, *shapes, dtype=jnp.float32):
    return [jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct((n, *s), dtype) for s in shapes]) for n in (MORE, ROWS)]


def told(fn, *shapes, **more):
    return keeps_places(*bodies(fn, *shapes, **more), (MORE, ROWS))


def module(model, shape, method=None):
    variables = variables_of(model, np.zeros((2, *shape), np.float32))
    return lambda x: model.apply(variables, x)


@jax.custom_jvp
def swish(x):
    return x * jax.nn.sigmoid(x)


swish.defjvp(lambda x, t: (swish(x[0]), t[0] * (jax.nn.sigmoid(x[0]) + x[0] * jax.nn.sigmoid(x[0]) ** 2)))

# Each with the shape of a row.
KEEPS = {
    "dense": (lambda x: jax.nn.relu(x @ W) + 1, (6,)),
    "attention": (lambda x: jax.nn.softmax(jnp.einsum("bij,bkj->bik", x @ W, x @ W)) @ x, (3, 6)),
    "transformer words": (lambda x: jnp.take(jnp.asarray(W), jnp.abs(x).astype(int) % 6, axis=0), (3,)),
    "convolution": (module(nn.Conv(3, (3, 3)), (8, 8, 2)), (8, 8, 2)),
    "group norm, pool": (lambda x: nn.max_pool(module(nn.GroupNorm(2), (8, 8, 4))(x), (2, 2), (2, 2)), (8, 8, 4)),
    "lstm": (module(nn.RNN(nn.LSTMCell(4)), (5, 3)), (5, 3)),
    "scan over time": (
        lambda x: lax.scan(lambda c, y: (c + y, c * y), x[:, 0], x.swapaxes(0, 1))[1].swapaxes(0, 1),
        (4, 3),
    ),
    "fori": (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + i, x), (4,)),
    "cond": (lambda x: lax.cond(jnp.sum(W) > 0, jnp.sin, jnp.cos, x), (4,)),
    "remat": (jax.checkpoint(lambda x: jnp.tanh(x @ W)), (6,)),
    "custom_jvp": (lambda x: swish(x) + jax.nn.softplus(x) + jax.nn.logsumexp(x, -1, keepdims=True), (6,)),
    "dropout": (lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0), (6, 3)),
    "noise": (lambda x: x + jax.random.normal(KEY, x.shape) * jax.random.truncated_normal(KEY, -1, 1, x.shape), (3,)),
    "dropout in bfloat16": (lambda x: x * jax.random.uniform(KEY, x.shape, jnp.bfloat16), (6,)),
    "a key of each row": (
        lambda x: jax.vmap(lambda y: y + jax.random.normal(jax.random.fold_in(KEY, 1), (3,)))(x),
        (3,),
    ),
    "keys by rows": (lambda x: jax.vmap(lambda y: jax.random.normal(jax.random.key(y[0].astype(int)), (3,)))(x), (3,)),
    "merged with time": (lambda x: (x.reshape(-1, 6) @ W).reshape(len(x), -1), (3, 6)),
    "patches": (lambda x: x.reshape(len(x), 2, 2, 2, 2).transpose(1, 3, 0, 2, 4)[0].swapaxes(0, 1), (4, 4)),
    "one hot": (lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 6) @ W, (6,)),
    "sorted columns": (lambda x: jnp.sort(x, -1)[:, ::-1], (6,)),
    "top_k": (lambda x: lax.top_k(x, 2)[0], (6,)),
    "take_along_axis": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1), (6,)),
    "columns": (lambda x: jnp.concatenate([x[:, 1:], jnp.pad(x, ((0, 0), (0, 2)))[:, -3:], x[:, :1]], 1), (6,)),
    "einsum of two": (lambda x: jnp.einsum("bij,bkj->bik", x, jnp.sin(x)), (3, 4)),
    "rows last": (lambda x: (W.T @ x.T).T, (6,)),
    "ones": (lambda x: jnp.concatenate([x, jnp.ones((len(x), 1))], 1), (4,)),
    "cumsum of columns": (lambda x: jnp.cumsum(x, 1), (4,)),
    "norms": (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), (4,)),
    "triangle": (lambda x: jnp.tril(jnp.einsum("bi,bj->bij", x, x)), (4,)),
    "a constant": (lambda x: (x, jnp.asarray(W)), (4,)),
    "split": (lambda x: jnp.split(x, 2, axis=-1)[1] * 2, (4,)),
    "quantiles": (lambda x: jnp.median(x, axis=1), (5,)),
    "vmap": (jax.vmap(lambda y: jnp.outer(y, y).sum(0) @ W), (6,)),
    "dynamic": (lambda x: lax.dynamic_update_slice_in_dim(x, x[:, :2] * 2, 1, axis=1), (6,)),
    "integers": (lambda x: (x.astype(int) << 2) ^ 5, (3,)),
}


def pulled(fn, x, cotangents):
    """The results for some rows, and what the inputs get of cotangents: zeros for rows that are not in `x`."""
    out, pull = jax.vjp(fn, x)
    leaves, treedef = jax.tree.flatten(out)
    given = []
    for y, ct in zip(leaves, cotangents, strict=True):
        rows = np.zeros(y.shape, np.float32)
        rows[: len(ct)] = ct[: len(rows)]
        given.append(
            rows.astype(y.dtype) if jnp.issubdtype(y.dtype, jnp.inexact) else np.zeros(y.shape, jax.dtypes.float0)
        )
    return leaves, pull(treedef.unflatten(given))[0]


@pytest.mark.one_case
@pytest.mark.parametrize("name", KEEPS)
def test_more_rows_change_nothing_of_what_keeps_places(name):
    fn, shape = KEEPS[name]
    assert told(fn, shape)
    x = RNG.normal(size=(ROWS, *shape)).astype(np.float32)
    more = np.concatenate([x, x[: MORE - ROWS]])
    cotangents = [RNG.normal(size=y.shape) for y in jax.tree.leaves(jax.eval_shape(fn, x))]
    expected, gradient = jax.jit(lambda x: pulled(fn, x, cotangents))(x)
    found, of_more = jax.jit(lambda x: pulled(fn, x, cotangents))(more)
    for y, all_of_them in zip(expected, found, strict=True):
        np.testing.assert_allclose(all_of_them[: len(y)].astype(np.float32), y.astype(np.float32), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_more[:ROWS], gradient, rtol=1e-4, atol=1e-4)
    assert not np.any(of_more[ROWS:])


@jax.custom_jvp
def centred(x):
    return x * 2


centred.defjvp(lambda x, t: (centred(x[0]), t[0] - t[0].mean(0)))


@jax.custom_vjp
def ones(x):
    return x * 2


ones.defvjp(lambda x: (x * 2, None), lambda _, ct: (jnp.ones_like(ct),))

MIXES = {
    "flip": (lambda x: x[::-1], (3,)),
    "rolled": (lambda x: jnp.roll(x, 1, 0), (3,)),
    "sorted": (lambda x: jnp.sort(x, 0), (3,)),
    "cumsum": (lambda x: jnp.cumsum(x, 0), (3,)),
    "ends": (lambda x: x[1:] * 2, (3,)),
    "split": (lambda x: jnp.concatenate([*reversed(jnp.split(x, [2], axis=0))]), (3,)),
    "centred": (lambda x: x - x.mean(0), (3,)),
    "the first": (lambda x: x - x[0], (3,)),
    "softmax over rows": (lambda x: jax.nn.softmax(x, 0), (3,)),
    "largest": (lambda x: x / x.max(), (3,)),
    "pairs": (lambda x: x @ x.T, (3,)),
    "twice": (lambda x: jnp.concatenate([x, x]), (3,)),
    "turned": (lambda x: x.T.reshape(len(x), -1), (3,)),
    "turned and flat": (lambda x: x.T.reshape(-1), (3,)),
    "count": (lambda x: x / len(x), (3,)),
    "places": (lambda x: x * jnp.linspace(0, 1, len(x))[:, None], (3,)),
    "positions": (lambda x: x + jnp.asarray(RNG.normal(size=(len(x), 3))), (3,)),
    "permuted": (lambda x: jax.random.permutation(KEY, x), (3,)),
    "scan over rows": (lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x)[1], (3,)),
    "until all": (lambda x: lax.while_loop(lambda c: (c < 9).any(), lambda c: c + 1, x), (3,)),
    "by all": (lambda x: lax.cond((x > 0).all(), jnp.sin, jnp.cos, x), (3,)),
    "branch": (lambda x: jnp.sin(x) if len(x) > 6 else jnp.cos(x), (3,)),
    "batch norm": (
        lambda x: nn.BatchNorm(use_running_average=False).apply(
            {
                "params": {"scale": jnp.ones(3), "bias": jnp.ones(3)},
                "batch_stats": {"mean": jnp.ones(3), "var": jnp.ones(3)},
            },
            x,
            mutable=["batch_stats"],
        )[0],
        (3,),
    ),
    "custom_jvp": (lambda x: centred(x), (3,)),
    "custom_vjp": (lambda x: ones(x), (3,)),
    "printed": (lambda x: (jax.debug.print("{}", x), x)[1], (3,)),
    "other rows": (lambda x: x[jnp.arange(len(x)) // 2], (3,)),
    "rows of rows": (lambda x: x[jnp.argsort(x[:, 0])], (3,)),
    "added to the first": (lambda x: x.at[0].add(1.0), (3,)),
    "padded": (lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1], (3,)),
    "a window of rows": (lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"), (3,)),
    "rows as time": (lambda x: lax.conv(x.T[None], jnp.ones((3, 3, 3)), (1,), "SAME")[0].T, (3,)),
}


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_rows_is_told(name):
    fn, shape = MIXES[name]
    assert not told(fn, shape)


def test_random_numbers_of_rbg():
    """That generator draws all numbers at once: of more rows the first are others."""
    key = jax.random.key(0, impl="rbg")
    assert not told(lambda x: x + jax.random.normal(key, x.shape), (3,))


def test_another_number_of_rows_in_each_argument():
    """What is no multiple of the rows is not followed."""
    shapes = [
        [jax.ShapeDtypeStruct((n, 3), jnp.float32), jax.ShapeDtypeStruct((2 * n + 1,), jnp.float32)] for n in (7, 5)
    ]
    one, other = (jax.make_jaxpr(lambda x, y: (x, jnp.sin(y)))(*s) for s in shapes)
    assert not keeps_places(one, other, (7, 5))
