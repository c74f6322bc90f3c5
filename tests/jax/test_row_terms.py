"""Which scalars are means over the rows, told from their jaxprs.

Each of these breaks of the analysis was made by hand, and the test named after it failed:

* the product of two sums counts as linear: nonlinear (`e.mean() * x.mean()`, the balance of experts)
* no ratio lasts in what it makes together with rows: ratio (`(e / m.sum()).sum()`, a softmax over the rows)
* every ratio lasts: "maml of words" and others are refused
* a value with two axes of the rows is no pair: all of pairs
* a row that is picked is a value like any other: nonlinear (`o.max()`, `x[0].mean()`)
* the carry of a scan is what it was at first: nonlinear (`in_a_scan`), and "sum over time" is refused
* a small number added to a divisor counts: "list" and "masked BatchNorm" are refused
* the blamed equation's own line is the only one that is looked for: the lines of `twice` and of jnp.std
"""

import inspect
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import one_in
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from laws import variables_of

from jdp._jax.row_traces import PRIMES, trace

RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# What a function gets by the names of its arguments. First what has rows: 8 of them.
ROWS = {
    "x": random(8, 5),
    "z": random(8, 5),
    "e": random(8) ** 2,
    "y": RNG.integers(3, size=8).astype(np.int32),
    "m": RNG.integers(2, size=8).astype(bool),
    "o": random(8, 3),
    "q": jax.nn.softmax(random(8, 3)),
    "sign": np.sign(random(8)),
    "t": random(8, 6, 5),
    "i": random(8, 8, 8, 1),
    "keys": jax.random.split(jax.random.key(1), 8),
    "half": random(8, 5).astype(jnp.bfloat16),
}
WHOLE = {"w": random(5, 3), "s": np.float32(0.5), "key": jax.random.key(0), "table": random(7, 4)}


def traced(fn, prime=0):
    known = ROWS | WHOLE
    names = list(inspect.signature(fn).parameters)
    cut = [0 if name in ROWS else None for name in names for _ in jax.tree.leaves(known[name])]
    return trace(fn, tuple(known[name] for name in names), cut, prime)


def counted(fn, kind="mean", at=(0,)):
    """What is said of two traces with Python's numbers of rows: side by side, or what both agree in."""
    found = [traced(fn, prime) for prime in PRIMES]
    if all(found) and (beside := found[1].paired_with(found[0])) is not found[1]:
        found = [beside]
    each = [x.faults(kind, at) if x else [None] for x in found]  # None: a function for 8 rows alone
    return [found[0].kind if all(found) else None for found in zip(*each, strict=True)]


def ce(o, y):
    return optax.softmax_cross_entropy_with_integer_labels(o, y)


class Net(nn.Module):
    """Of images, with BatchNorm and Dropout."""

    @nn.compact
    def __call__(self, i):
        h = nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(i))
        h = nn.max_pool(nn.relu(h), (2, 2), (2, 2)).reshape(i.shape[0], -1)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(nn.BatchNorm(use_running_average=False)(h)))


class Time(nn.Module):
    """Of sequences: an LSTM, and causal attention in two layers by nn.scan and nn.remat."""

    @nn.compact
    def __call__(self, t):
        t = t + nn.RNN(nn.LSTMCell(5))(t)
        mask = nn.make_causal_mask(t[..., 0])

        def layer(module, t, _):
            y = nn.LayerNorm()(t)
            return t + nn.MultiHeadDotProductAttention(1, name="attention")(y, mask=mask), None

        class Layer(nn.Module):
            __call__ = nn.compact(layer)

        many = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(3)(many()(t, None)[0])


ZERO = jnp.zeros(())
NET, TIME = variables_of(Net(), ROWS["i"]), variables_of(Time(), ROWS["t"])


def cnn(i, y, key):
    o, _ = Net().apply(NET, i, rngs={"dropout": key}, mutable=["batch_stats"])
    return ce(o, y).mean()


def nnx_model(i, y):
    rngs = nnx.Rngs(0)
    h = nnx.relu(nnx.BatchNorm(4, rngs=rngs)(nnx.Conv(1, 4, (3, 3), rngs=rngs)(i))).mean((1, 2))
    return ce(nnx.Linear(4, 3, rngs=rngs)(nnx.Dropout(0.1, rngs=rngs)(h)), y).mean()


def penalty(w, x):
    grads = jax.grad(lambda x: jnp.tanh(x @ w).sum())(x)
    return ((jnp.sqrt((grads**2).sum(1) + 1e-6) - 1) ** 2).mean()


def penalty_through_batch_norm(i, y, key):
    def total(i):
        o, _ = Net().apply(NET, i, rngs={"dropout": key}, mutable=["batch_stats"])
        return ce(o, y).sum()

    return (jax.grad(total)(i) ** 2).sum((1, 2, 3)).mean()


def maml(w, x, o):
    def loss(w):
        return ((jnp.tanh(x @ w) - o) ** 2).mean()

    return loss(w - 0.1 * jax.grad(loss)(w))


def maml_of_words(table, y, o):
    def loss(table):
        return ((jnp.tanh(table[y])[:, :3] - o) ** 2).mean()

    grad = jax.grad(loss)(table)
    return loss(table - 0.1 * grad / jnp.sqrt(grad**2 + 1e-3))


def maml_with_adam(w, x, o):
    def loss(w):
        return ((x @ w - o) ** 2).mean()

    tx = optax.adam(1e-2)
    state = tx.init(w)
    for _ in range(2):
        updates, state = tx.update(jax.grad(loss)(w), state)
        w = optax.apply_updates(w, updates)
    return loss(w)


def maml_with_batch_norm(i, y, key):
    def loss(params):
        variables = {**NET, "params": params}
        return ce(Net().apply(variables, i, rngs={"dropout": key}, mutable=["batch_stats"])[0], y).mean()

    params = NET["params"]
    return loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)))


def sharpness_aware(w, x, o):
    def loss(w):
        return ((jnp.tanh(x @ w) - o) ** 2).mean()

    grad = jax.grad(loss)(w)
    return loss(w + 0.05 * grad / (optax.global_norm(grad) + 1e-12))


def transported(x, z):
    """Sinkhorn's plan, until it changes no more."""
    cost = ((x[:, None] - z[None]) ** 2).sum(-1)  # <-

    def scaled(state):
        before = state[1]
        f = -jax.nn.logsumexp(before[None] - cost, 1)
        return before, -jax.nn.logsumexp(f[:, None] - cost, 0)

    start = jnp.ones(x.shape[0]), jnp.zeros(x.shape[0])
    _, g = lax.while_loop(lambda v: jnp.abs(v[0] - v[1]).max() > 1e-3, scaled, start)
    return g.mean()


def paired(x, z):
    """Pairs each row with the nearest one that is still free."""
    cost = ((x[:, None] - z[None]) ** 2).sum(-1)

    def step(used, distances):
        nearest = jnp.argmin(jnp.where(used, jnp.inf, distances))
        return used.at[nearest].set(True), nearest

    order = lax.scan(step, jnp.zeros(x.shape[0], bool), cost)[1]  # <-
    return ((x - z[order]) ** 2).mean()


def assigned(x, z):
    cost = ((x[:, None] - z[None]) ** 2).sum(-1)  # <-
    i, j = optax.assignment.hungarian_algorithm(cost)
    return ((x[i] - z[j]) ** 2).mean()


def assigned_in_each_row(t):
    i, j = jax.vmap(optax.assignment.hungarian_algorithm)(t)
    return jax.vmap(lambda cost, i, j: cost[i, j])(t, i, j).mean()


def ppo(e, o, y):
    """Its advantages are divided by the root of an unbiased variance, which is one number, and no BatchNorm's."""
    advantage = (e - e.mean()) / (jnp.std(e, ddof=1) + 1e-8)  # <-
    log_p = jax.nn.log_softmax(o)[jnp.arange(o.shape[0]), y]
    ratio = jnp.exp(log_p - lax.stop_gradient(log_p))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()


class Gated(nn.Module):
    """A model that norms its rows by one number of all of them, and multiplies them by others."""

    @nn.compact
    def __call__(self, x, z):
        one = nn.BatchNorm(use_running_average=False)(nn.Dense(1)(x))
        return jnp.maximum(one * z, (x - x.mean()) / x.std() * jax.nn.silu(x - x.mean()) * z)


class Relativistic(nn.Module):
    """A critic with a method for its loss, which is no part of its forward pass."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[:, 0]

    def loss(self, x, z):
        return nn.softplus(self(z).mean() - self(x)).mean()


class GatedObject:
    """As `Gated`, without parameters, as an object of any library that is called."""

    def __call__(self, x, z):
        return jnp.tanh((x - x.mean()) / (x.std() + 1e-6)) * z


class Cutting(nn.Module):
    """A model that cuts its rows off by numbers of all of them, chooses by one, and looks some up by class."""

    def __call__(self, x, y):
        counts = jax.nn.one_hot(y, 3).sum(0)
        cut = jnp.minimum(x, x.mean(0)) * (x > x.max(0) / 2) * (counts[y] > 1)[:, None]
        return jnp.where((x > 1).any(), cut, x)


class Centring(nn.Module):
    """A model that centres its outputs, and scales them by their mean and by their largest."""

    def __call__(self, o):
        return o - o.mean(0) + o / o.mean(0) + jnp.exp(o - o.max())


def surrogate(o, advantage):
    ratio = jnp.exp(o[:, 0])
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()


def whitened(x):
    x = x - x.mean(0)
    return jnp.tanh(x / jnp.sqrt((x**2).sum(0) / (x.shape[0] - 1) + 1e-5)).mean()


def gradient_of_a_kernel(i):
    kernel = jnp.ones((3, 3, 1, 4))

    def loss(kernel):
        y = lax.conv_general_dilated(i, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (nn.max_pool(nn.relu(y), (2, 2)) ** 2).mean()

    return (kernel * jax.grad(loss)(kernel)).sum()


def vae(x, w, key):
    mean, log_var = x @ w, jnp.tanh(x @ w)
    z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
    kl = -0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(1)
    return ((x - z @ w.T) ** 2).sum(1).mean() + kl.sum() / x.shape[0]


@jax.custom_vjp
def clipped(x):
    return x**2


clipped.defvjp(lambda x: (x**2, x), lambda x, g: (jnp.clip(g, -1, 1) * x,))


@jax.custom_jvp
def safe_log(x):
    return jnp.log(jnp.maximum(x, 1e-6))


safe_log.defjvp(lambda x, dx: (safe_log(*x), dx[0] / x[0]))


def ctc(t, y, m):
    labels, none = jnp.stack([y, y + 1], 1), jnp.zeros((y.shape[0], 2))
    return optax.ctc_loss(t, jnp.zeros(t.shape[:2]), labels, none).mean()


def over_time(t):
    _, losses = lax.scan(lambda h, x: (jnp.tanh(h + x), (h**2).mean()), jnp.zeros_like(t[:, 0]), t.swapaxes(0, 1))
    return losses.mean()


def added_over_time(t):
    def step(carry, x):
        h, total = carry
        return (jnp.tanh(h + x), total + (h**2).sum()), None

    return lax.scan(step, (t[:, 0], 0.0), t.swapaxes(0, 1))[0][1] / t[..., 0].size


# Loops over the rows, each round of which takes its own row; and sums, which go round in the carry.
def row_by_row(x, w):
    return lax.scan(lambda total, row: (total + (row @ w).sum(), jnp.tanh(row @ w).mean()), 0.0, x)[1].mean()


def kahan(e):
    """A sum that keeps what rounding took away."""

    def step(carry, v):
        total, lost = carry
        v = v - lost
        return (total + v, (total + v - total) - v), None

    return lax.scan(step, (0.0, 0.0), e)[0][0] / e.shape[0]


def mean_as_it_goes(e):
    return lax.scan(lambda c, v: ((c[0] + 1.0, c[1] + (v - c[1]) / (c[0] + 1.0)), None), (0.0, 0.0), e)[0][1]


def sum_and_count(e, m):
    def step(carry, row):
        return lax.cond(row[1], lambda: (carry[0] + row[0], carry[1] + 1), lambda: (carry[0], carry[1] + 1)), None

    total, count = lax.scan(step, (0.0, 0), (e, m))[0]
    return total / count


def while_there_are_rows(e):
    return lax.while_loop(lambda c: c[0] < e.shape[0], lambda c: (c[0] + 1, c[1] + e[c[0]]), (0, 0.0))[1] / e.shape[0]


def row_by_index(x):
    def step(carry, _):
        i, rows, key = carry
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, rows[i].shape)
        return (i + 1, rows, key), ((rows[i] + noise) ** 2).mean()

    return lax.scan(step, (0, x, jax.random.key(0)), jnp.zeros_like(x))[1].mean()


def row_by_row_in_place(x):
    def step(rows, i):
        rows = rows.at[i].set(jnp.tanh(rows[i]))
        return rows, (rows[i] ** 2).mean()

    return lax.scan(step, x, jnp.arange(x.shape[0]))[1].mean()


def row_by_place(e, x):
    """Each round takes a number of its own from an array of all rows."""
    return lax.map(lambda t: t[1] - e[t[0]], (jnp.arange(x.shape[0]), x[:, 0])).mean()


def gradients_row_by_row(x, w):
    """The backward pass of the loop adds up the gradient of w in its carry."""

    def loss(w):
        return lax.map(lambda row: jnp.tanh(row @ w).sum(), x).mean()

    return loss(w - 0.1 * jax.grad(loss)(w))


def guarded(e):
    mean = e.mean()
    mean = lax.cond(jnp.isfinite(mean), lambda: mean, lambda: 0.0)
    return jnp.nan_to_num(jnp.where(jnp.isnan(mean) | jnp.isinf(mean), 0.0, mean))


def quantized(x):
    scale = jnp.abs(x).max() / 127
    return (jnp.round(x / scale) * scale).mean()  # <-


def asymmetric(x):
    scale = (x.max() - x.min()) / 255
    zero = jnp.round(-x.min() / scale)
    return ((jnp.clip(jnp.round(x / scale) + zero, 0, 255) - zero) * scale).mean()  # <-


def fused_rows(x, w, axis=0):
    inv = lax.rsqrt(x.var(axis) + 1e-5)
    return x * inv + (w.sum() - x.mean(axis) * inv)


def fused_batch_norm(x, s, axis=0):
    return (fused_rows(x, s, axis) ** 2).mean()


def batch_norm(x, axis=0):
    mean = x.mean(axis)
    return (x - mean) / jnp.sqrt(((x - mean) * (x - mean)).mean(axis) + 1e-5)


def batch_renorm(x):
    mean, std = x.mean(0), jnp.sqrt(x.var(0) + 1e-3)
    scale, shift = jnp.clip(std / 0.8, 1 / 3, 3), jnp.clip((mean - 0.1) / 0.8, -5, 5)
    return (x - mean) / std * lax.stop_gradient(scale) + lax.stop_gradient(shift)


def whitened_by_newton(x):
    x = x - x.mean(0)
    cov = x.T @ x / x.shape[0] + 1e-3 * jnp.eye(5)
    trace, root = jnp.trace(cov), jnp.eye(5)
    for _ in range(3):
        root = 0.5 * (3 * root - root @ root @ root @ cov / trace)
    return jnp.tanh(x @ (root / jnp.sqrt(trace))).mean()  # <-


def whitened_by_cholesky(x):
    x = x - x.mean(0)
    root = jnp.linalg.cholesky(x.T @ x / x.shape[0] + 1e-3 * jnp.eye(5))
    return (jax.scipy.linalg.solve_triangular(root, x.T, lower=True) ** 3).mean()  # <-


def principal_components(x):
    x = x - x.mean(0)
    return jnp.abs(x @ jnp.linalg.eigh(x.T @ x / x.shape[0])[1]).mean()  # <-


def until_all_are_there(e):
    def step(state):
        root, _ = state
        after = (root + e / root) / 2
        return after, jnp.abs(after - root).max()

    return lax.while_loop(lambda state: state[1] > 1e-3, step, (e + 1, jnp.float32(1)))[0].mean()  # <-


def rounded(x):
    scale = jnp.abs(x).max() / 127
    return jnp.tanh(x + lax.stop_gradient(jnp.round(x / scale) * scale - x)).mean()  # <-


def masked_batch_norm(x, m):
    mask = m[:, None] + 0.0
    n = jnp.maximum(mask.sum(), 1)
    mean = (x * mask).sum(0) / n
    var = ((x - mean) ** 2 * mask).sum(0) / n
    return ((x - mean) * lax.rsqrt(var + 1e-5)).mean()


def prototypes(x, y):
    hot = jax.nn.one_hot(y, 3)
    mean = hot.T @ x / (hot.sum(0)[:, None] + 1e-6)
    return ((x - mean[y]) ** 2).mean()  # <-


def segment_mean(e, y):
    return jax.ops.segment_sum(e, y, 3) / (jax.ops.segment_sum(jnp.ones_like(e), y, 3) + 1e-6)


def by_callback(e):
    return jax.pure_callback(lambda e: np.sqrt(e.mean()), jax.ShapeDtypeStruct((), np.float32), e)


def total_of_list(e, x):
    total = 0.0
    for each in (e, x[:, 0], x[:, 1] ** 2):
        total += each.sum()
    return total / (x.shape[0] + 1e-8)


# Means over the rows, of which no line needs to be known.
def masked_autoencoder(t, key):
    rest = jnp.argsort(jnp.argsort(jax.random.uniform(key, t.shape[:2]), 1), 1)
    mask = jnp.where(rest < 2, 0.0, 1.0)
    return ((t**2).mean(-1) * mask).sum() / mask.sum()


def drawn_places(t, keys):
    mask = jax.vmap(lambda key: jax.random.permutation(key, jnp.arange(6) < 2))(keys)
    return ((t**2).mean(-1) * mask).sum() / mask.sum()


def capacity(x, y):
    chosen = jax.nn.one_hot(y, 3, dtype=int)
    fits = (jnp.cumsum(chosen, 0) * chosen).sum(1) <= 2 * x.shape[0]
    return ((x**2).mean(1) * fits).mean()


def expert_choice(x, w):
    gates, rows = lax.top_k(jax.nn.softmax(x @ w).T, len(x) * 2 // 3)
    picked = gates[..., None] * jnp.tanh(x[rows])
    return (jnp.zeros_like(x).at[rows.reshape(-1)].add(picked.reshape(-1, 5)) ** 2).mean()


def pgd(w, x):
    """The worst of the rows near by: each gradient is normed, so that it does not matter that it is of a mean."""

    def loss(x):
        return jnp.tanh(((x @ w) ** 2).sum(1)).mean()

    grads = jax.grad(loss)(x)
    return loss(x + 0.1 * grads / (jnp.linalg.norm(grads, axis=1, keepdims=True) + 1e-12))


def softmax_by_hand(o, weights=1.0):
    e = jnp.exp(o - o.max()) * weights
    return e / e.sum(1, keepdims=True)


def generation(o, y):
    """Tokens are drawn until all rows are done, as in a model of language."""

    def step(carry):
        i, tokens, done = carry
        token = jnp.where(done, 0, (o.argmax(1) + i + y) % 5)
        return i + 1, tokens.at[:, i].set(token), done | (token == 0)

    start = 0, jnp.zeros((o.shape[0], 6), int), jnp.zeros(o.shape[0], bool)
    tokens = lax.while_loop(lambda carry: (carry[0] < 6) & ~carry[2].all(), step, start)[1]
    return (tokens > 0).mean()


ACCEPTED = {
    "a row in place of others": lambda x, e: (jnp.tanh(jnp.where(e[:, None] > 9, x[0], x)) * (e[:, None] <= 9)).mean(),
    "a branch by a row": lambda x, o: lax.cond(x[0, 0] < 99, jnp.tanh, lambda o: o, o).mean(),
    "rolled": lambda e: jnp.tanh(jnp.roll(e, 2)).mean(),
    "zeros like a row": lambda x, s: jnp.tanh(x + jnp.zeros_like(x[0]) + s).mean(),
    "the first of each row": lambda x: jnp.tanh(x - x[:, :1]).mean(),
    "pgd": pgd,
    "masked autoencoder": masked_autoencoder,
    "drawn places": drawn_places,
    "capacity": capacity,
    "assigned in each row": assigned_in_each_row,
    "guarded rows": lambda e: jnp.where(jnp.isfinite(e), e, 0.0).mean(),
    "more than one": lambda e: jnp.where(jnp.asarray(e.shape[0]) > 1, e.mean(), 0.0),
    "unused": lambda e, x, w: e.mean() + 0 * (x @ w).max() + 0.0 * jnp.tanh(jnp.ones((5, 5)) + x.mean()).mean(),
    "mse": lambda x, z: ((x - z) ** 2).mean(),
    "of any power, at 1": lambda x, z: (jnp.abs(x - z) ** 1).mean() ** (1 / 1) + x.mean() ** 1,
    "sum by rows": lambda e: jnp.sum(e) / e.shape[0],
    "sum by size": lambda x: x.sum() / x.size,
    "rows before the sum": lambda e: (e / e.shape[0]).sum(),
    "by one over rows": lambda e: e.sum() * (1 / e.shape[0]),
    "at least one row": lambda e: e.sum() / max(e.shape[0], 1),
    "at least one row in jax": lambda e: e.sum() / jnp.maximum(e.shape[0], 1),
    "ones": lambda e: e.sum() / jnp.ones_like(e).sum(),
    "list": total_of_list,
    "vdot": lambda x: jnp.vdot(x, x) / x.size,
    "einsum": lambda x, z: jnp.einsum("bi,bi->", x, z) / x.shape[0],
    "average": lambda e: jnp.average(e),
    "picked class": lambda o, y: -jax.nn.log_softmax(o)[jnp.arange(y.shape[0]), y].mean(),
    "along axis": lambda o, y: jnp.take_along_axis(o, y[:, None], 1).mean(),
    "one hot": lambda o, y: (jax.nn.one_hot(y, 3) * jax.nn.log_softmax(o)).sum(1).mean(),
    "time": lambda t: (t**2).mean(1).mean(),
    "flat": lambda t, w: ce((t @ w).reshape(-1, 3), jnp.zeros(t[..., 0].size, int)).mean(),
    "l2": lambda o, y, w: ce(o, y).mean() + 1e-4 * (w**2).sum(),
    "hits": lambda o, y: 100 * (o.argmax(-1) == y).mean(),
    "counted hits": lambda o, y: (o.argmax(-1) == y).sum() / y.shape[0],
    "top 2": lambda o, y: (lax.top_k(o, 2)[1] == y[:, None]).any(1).mean(),
    "stop gradient": lambda e, s: lax.stop_gradient(e.mean()) * s,
    "uncertainty": lambda e, s: jnp.exp(-s) * e.mean() + s,
    "two terms": lambda e, x: e.mean() + 0.5 * jnp.abs(x).mean() - x[:, 0].sum() / x.shape[0],
    "parameter": lambda w: jnp.linalg.norm(w),
    "literal": lambda e: 0.0,
    "centred, then a layer": lambda x, w: jax.nn.relu((x - x.mean(0)) @ w).mean(),
    "normed by absolute values": lambda x, y: ce((d := x - x.mean(0)) / (jnp.abs(d).mean(0) + 1e-5), y).mean(),
    "variance of each row": lambda o: jnp.var(o, 1).mean(),
    "normalized by jnp.var": lambda o, y: ce((o - o.mean(0)) / jnp.sqrt(jnp.var(o, 0) + 1e-5), y).mean(),
    "entropy": lambda o: -(jax.nn.softmax(o) * jax.nn.log_softmax(o)).sum(-1).mean(),
    "squared norm": lambda x: jnp.linalg.norm(x) ** 2 / x.shape[0],
    "pairs of neighbours": lambda x: (x.reshape(2, x.shape[0] // 2, 5) ** 2).mean(),
    "rows that are written": lambda x: x.reshape(8, 5).mean(),
    "counts": lambda y: (jnp.bincount(y, length=3) / y.shape[0]) @ jnp.arange(3.0),
    "not a number": lambda e: jnp.nansum(e) / e.shape[0],
    "constant matrix": lambda x: (jnp.full((1, x.shape[0]), 1 / x.shape[0]) @ x).sum(),
    "row norm": lambda x: jnp.linalg.norm(x, axis=1).mean(),
    "perplexity of rows": lambda o, y: jnp.exp(ce(o, y)).mean(),
    "noise": lambda x, key: (x + jax.random.normal(key, x.shape)).mean(),
    "mixup": lambda x, s: (s * x + (1 - s) * jnp.roll(x[::-1], 1, 0)).mean(),
    "key per row": lambda e, keys: (e * jax.vmap(jax.random.uniform)(keys)).mean(),
    "vmap": lambda x, z: jax.vmap(lambda a, b: jnp.sqrt(((a - b) ** 2).sum()))(x, z).mean(),
    "map": lambda x: lax.map(lambda a: jnp.max(a) / a.sum(), x).mean(),
    "map of turned rows": lambda x, z: nn.softplus(lax.map(jnp.sin, x[::-1])[::-1] * z).mean(),
    "sorted by class": lambda x, y: ce(x[o := jnp.argsort(y)], y[o]).mean(),
    "sorted by class, the last one first": lambda x, y: ce(x[o := jnp.argsort(y)[::-1]], y[o]).mean(),
    "scan from a zero": lambda e: lax.scan(lambda c, v: (c + v, None), ZERO, e)[0] / e.shape[0],
    "rows by a carried number": lambda e, z: (
        lax.scan(lambda c, v: ((c[0] + 1, c[1] + v * z[c[0], 0]), None), (0, 0.0), e)[0][1] / e.shape[0]
    ),
    "sorted by class, and back": lambda x, w, y: jnp.take_along_axis(
        (x[o := jnp.argsort(y)] @ w)[jnp.argsort(o)], y[:, None], 1
    ).mean(),
    "experts": lambda x, table, y: (
        jnp.zeros(x.shape[0]).at[o := jnp.argsort(y)].set((x[o] * table[y[o], :1]).sum(1)).mean()
    ),
    "context, then a layer": lambda x, w, z: (((jax.nn.relu(x) + x.mean(0)) @ w - z[:, :3]) ** 2).mean(),
    "added up for each class, in one other order": lambda e, y: (
        jax.ops.segment_sum(e[::-1], y[::-1], 3) @ jnp.arange(3.0) / e.shape[0]
    ),
    "picked by their places": lambda x, z: (x[jnp.arange(x.shape[0])] * z).mean(),
    "in one other order": lambda x, z: ((x[next_to(x)] - jnp.tanh(z)[next_to(z)]) ** 2).mean(),
    "turned by their places": lambda x, z: (x[jnp.arange(x.shape[0])[::-1]] * z[::-1]).mean(),
    "vmap by index": lambda x, z: jax.vmap(lambda i: jnp.exp(x[i] @ z[i]))(jnp.arange(x.shape[0])).mean(),
    "map by index, from the end": lambda x, z: lax.map(lambda i: x[-1 - i] @ z[-1 - i], jnp.arange(x.shape[0])).mean(),
    "every second of two": lambda x, z: (jnp.stack([x, z], 1).reshape(-1, 5)[::2] * z).mean(),
    "classes in another order": lambda o, q: (o[:, (jnp.arange(3) + 1) % 3] * q).mean(),
    "map by index": lambda x: lax.map(lambda i: jnp.exp(x[i]).sum(), jnp.arange(x.shape[0])).mean(),
    "fori over rows": lambda e: lax.fori_loop(0, e.shape[0], lambda i, total: total + e[i], 0.0) / e.shape[0],
    "fori": lambda e: lax.fori_loop(0, 3, lambda i, total: total + i * e.mean(), 0.0),
    "gradient of a row": lambda x, w: jax.vmap(jax.grad(lambda a: jnp.tanh(a @ w).sum()))(x).mean(),
    "bf16": lambda half, w: ((half @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean().astype(jnp.bfloat16),
    "custom vjp": lambda x: clipped(x).mean(),
    "custom jvp": lambda q: safe_log(q).mean(),
    "jit": lambda x: jax.jit(lambda x: (x**2).sum())(x) / x.size,
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: (jnp.tanh(x @ w) ** 2).mean())(x),
    "cond": lambda e, x, s: lax.cond(s > 0, lambda: e.mean(), lambda: (x**2).mean()),
    "cond of rows": lambda e, s: lax.cond(s > 0, jnp.exp, jnp.sqrt, e).mean(),
    "smooth": lambda o, q: optax.softmax_cross_entropy(o, optax.smooth_labels(q, 0.1)).mean(),
    "cutoff": lambda e, s: jnp.where(s > 0, e.mean(), 2 * e.mean()),
    "cholesky of rows": lambda x: jnp.linalg.cholesky(x[:, :, None] * x[:, None] + jnp.eye(5)).mean(),
    "svd of rows": lambda t: jnp.linalg.svd(t, compute_uv=False).sum(-1).mean(),
    "fft of rows": lambda t: jnp.abs(jnp.fft.fft(t, axis=1)).mean(),
    "stack": lambda e, x: jnp.stack([e.mean(), x.mean()]) @ jnp.array([0.3, 0.7]),
    "dict of means": lambda e, x: sum({"a": e.mean(), "b": x.mean()}.values()) / 2,
    "gathered dot": lambda y, table, x: (table[y][:, :3] * x[:, :3]).sum(1).mean(),
    "map of rows by callback": lambda e: jax.pure_callback(np.sqrt, jax.ShapeDtypeStruct(e.shape, e.dtype), e).mean(),
    "numpy": lambda e: e.sum() / np.prod(e.shape),
    "callback": by_callback,
    "cnn": cnn,
    "nnx": nnx_model,
    "lstm and attention": lambda t: (Time().apply(TIME, t) ** 2).mean(),
    "gradient penalty": penalty,
    "gradient penalty with BatchNorm": penalty_through_batch_norm,
    "maml": maml,
    "maml of words": maml_of_words,
    "maml with adam": maml_with_adam,
    "ctc": ctc,
    "maml with BatchNorm": maml_with_batch_norm,
    "sharpness aware": sharpness_aware,
    "vae": vae,
    "second derivatives": lambda x, w: jax.vmap(jax.hessian(lambda a: jnp.tanh(a @ w).sum()))(x).mean(),
    "mean of each of an ensemble": lambda x, w: jax.vmap(lambda c: (x * c).mean())(w[:, 0]).mean(),
    "dot_product_attention": lambda t: jax.nn.dot_product_attention(*[t[:, :, None]] * 3, is_causal=True).mean(),
    "unbiased variance in a model": whitened,
    "gradient of a kernel": gradient_of_a_kernel,
    "labels written": lambda o, y: (o.at[jnp.arange(o.shape[0]), y].multiply(2.0) ** 2).mean(),
    "a rank": lambda o, y: (jnp.argsort(o, axis=1)[jnp.arange(o.shape[0]), y] * o[:, 0]).mean(),
    "centred in a module": lambda o, y: ce(Centring().apply({}, o), y).mean(),
    "a transform of each row": lambda x: jnp.abs(jnp.fft.rfft(x)).mean(),
    "both halves": lambda x, w: (
        (lambda n: (jnp.tanh(x[:n] @ w) ** 2).sum() + (jnp.tanh(x[n:] @ w) ** 2).sum())(x.shape[0] // 2) / x.shape[0]
    ),
    "both halves, joined again": lambda e: jnp.concatenate([2 * e[: e.shape[0] // 2], 2 * e[e.shape[0] // 2 :]]).mean(),
    "zeros behind a function": lambda e: jnp.tanh(jnp.pad(jnp.expm1(e), (0, 2))).sum() / e.shape[0],
    "a root of a share": lambda o, y: -(jnp.sqrt(jax.nn.softmax(o)) * jax.nn.one_hot(y, 3)).sum(1).mean(),
    "a softmax by hand, of words": lambda x, w: (lambda e: e @ w / e.sum(1, keepdims=True))(
        jnp.exp(x - x.max())
    ).mean(),
    "a logarithm by hand": lambda o, y: (lambda v: ce(v - jnp.log(jnp.exp(v).sum(1, keepdims=True)), y).mean())(
        o - o.max()
    ),
    "a logsumexp by hand": lambda o: (lambda c: jnp.log(jnp.exp(o - c).sum(1)) + c)(lax.stop_gradient(o.max())).mean(),
    "shifted by a mean, and a softmax": lambda o, y: ce(o - o.mean(), y).mean(),
    "shifted, by a temperature": lambda o, y, s: ce((o - o.max()) / s, y).mean(),
    "shifted, under a mask": lambda o, y: ce(jnp.where(jnp.arange(3) < 2, o - o.max(), -1e9), y).mean(),
    "shifted, and the largest is found": lambda o, y: ((o - o.max()).argmax(1) == y).mean(),
    "a column of means": lambda x, e: x.at[:, 1].set(e.mean()).mean(),
    "each row until it is there": lambda e: jax.vmap(
        lambda v: lax.while_loop(lambda r: jnp.abs(r * r - v) > 0.1, lambda r: (r + v / r) / 2, v + 1)
    )(e).mean(),
    "rounds that some rows skip": lambda e: lax.while_loop(
        lambda r: (jnp.abs(r * r - e) > 0.1).any(),
        lambda r: jnp.where(jnp.abs(r * r - e) > 0.1, (r + e / r) / 2, r),
        e + 1,
    ).mean(),
    "weights of each row by their sum": lambda o, q: (q / q.sum(1, keepdims=True) * o).sum(1).mean(),
    "quantized weights": lambda x, w: jnp.tanh(x @ (jnp.round(w / jnp.abs(w).max() * 127) / 127)).mean(),
    "rounds by a mean": lambda e: lax.while_loop(lambda mean: mean > 1, jnp.sqrt, e.mean()),
    "scan over time": over_time,
    "sum over time": added_over_time,
    "diagonal of pairs": lambda x, z: jnp.log(jnp.diag(jnp.exp(x @ z.T / 2)) + 1).mean(),
    "diagonal of distances": lambda x, z: jnp.diag(((x[:, None] - z[None]) ** 2).sum(-1)).mean(),
    "diagonal by einsum": lambda x, z: jnp.einsum("ii->i", x @ z.T).mean(),
    "diagonal by a mask": lambda x, z: ((x @ z.T) * jnp.eye(x.shape[0])).sum(1).mean(),
    "trace": lambda x, z: jnp.trace(x @ z.T) / x.shape[0],
    "normed, by other rows": lambda x, z: (batch_norm(x) * z).mean() + jnp.tanh(batch_norm(x) + z).mean(),
    "attention of normed rows": lambda x, w: jnp.tanh(batch_norm(x, None) @ w * (batch_norm(x, None) @ w**2)).mean(),
    "normed, with dropout": lambda x, key, w: (
        (batch_norm(x, None) * jax.random.bernoulli(key, 0.9, x.shape)) @ w
    ).mean(),
    "renormed, by other rows": lambda x, z: (batch_renorm(x) * z).mean(),
    "fused, by other rows": lambda x, z, w: (fused_rows(x, w) * z).mean(),
    "rows by an index": lambda x, z: jnp.abs(lax.map(lambda i: x[i] * 2, jnp.arange(x.shape[0])) + z).mean(),
    "a layer of its own": lambda x, w: jax.nn.gelu((x / x.std()) @ w).mean() + jax.nn.silu((x - x.mean()) @ w).mean(),
    "a model that norms by a number": lambda x, z: Gated().init_with_output(jax.random.key(0), x, z)[0].mean(),
    "a model that cuts rows off": lambda x, y: Cutting().apply({}, x, y).mean(),
    "such a model in nn.jit": lambda x, z: nn.jit(Gated)().init_with_output(jax.random.key(0), x, z)[0].mean(),
    "a called object that norms": lambda x, z: GatedObject()(x, z).mean(),
    "standardized, and a layer": lambda x, w, m: nn.relu(jax.nn.standardize(x, axis=None) @ w * m[:, None]).mean(),
    "a softmax by hand": lambda o, y: -jnp.log(softmax_by_hand(o)[jnp.arange(o.shape[0]), y]).mean(),
    "a softmax by hand, masked": lambda o, m: jnp.log1p(softmax_by_hand(o, m[:, None] + 0.1)).mean(),
    "a token in front": lambda x, w, e: (jnp.concatenate([w.sum(1)[None], x])[1:, 0] * e).mean(),
    "centred, and a softmax": lambda x, w, q: optax.softmax_cross_entropy((x - x.mean()) @ w, q).mean(),
    "row by row": row_by_row,
    "rows that end by themselves": generation,
    "a root that is guarded": lambda x, z: (
        (x - x.mean(0)) * jnp.where((s := lax.rsqrt(x.var(0) + 1e-3)) > 9, 1.0, s) * z
    ).mean(),
    "Kahan's sum": kahan,
    "a mean as it goes": mean_as_it_goes,
    "a sum and a count": sum_and_count,
    "while there are rows": while_there_are_rows,
    "sum of rows": lambda x: (lax.scan(lambda t, row: (t + row, None), jnp.zeros(5), x)[0] / x.shape[0]).mean(),
    "31 steps in time": lambda e: lax.fori_loop(0, 31, lambda i, m: 0.9 * m + e.mean(), 0.0),
    "largest over time": lambda t: lax.scan(
        lambda m, x: (jnp.maximum(m, x), None), jnp.zeros_like(t[:, 0]), t.swapaxes(0, 1)
    )[0].mean(),
    "row by index": row_by_index,
    "row by row in place": row_by_row_in_place,
    "row by place": row_by_place,
    "gradients row by row": gradients_row_by_row,
    "dots of rows": lambda x, z: jnp.einsum("bi,bi->b", x, z).mean() + jnp.vdot(x, z) / x.shape[0],
    "whole numbers of each row": lambda e: jnp.floor(e).astype(int).mean() + e.astype(int).sum() / e.shape[0],
    "counted in integers": lambda e, m: (e * m).astype(bool).astype(float).sum().astype(int) / e.shape[0],
    "fused BatchNorm": lambda x, s: fused_batch_norm(x, s),
    "fused BatchNorm of all": lambda x, s, w: jnp.tanh(fused_rows(x, s, None) @ w).mean(),
    "softmax, with the largest of all": lambda o, y: ce(o - o.max(), y).mean(),
    "minus the largest": lambda o, y: ce(o - lax.stop_gradient(o.max()), y).mean(),
    "solved row by row": lambda x: jax.vmap(lambda v: jnp.linalg.solve(jnp.outer(v, v) + jnp.eye(5), v).sum())(
        x
    ).mean(),
    "beside other rows": lambda e, x: jax.nn.logsumexp(jnp.stack([e, x[:, 0]], 1), 1).mean(),
    "a quotient of rows": lambda e, x: (e / (x[:, 0] ** 2 + 1)).mean(),
    "minus the mean": lambda e: (e - e.mean()).mean(),
    "plus a mean": lambda e, x: (e + (x**2).mean() + 0.1).mean(),
    "plus a parameter": lambda e, w, s: (e + jnp.sqrt((w**2).sum()) + jnp.log(s)).mean(),
    "by a shape in jax": lambda q: q.sum() / jnp.prod(jnp.array(q.shape)),
    "by sizes in jax": lambda t: t.sum() / jnp.stack([t.shape[0], t.shape[1] * t.shape[2]]).prod(),
    "a column is written": lambda x: (x.at[:, 0].set(1.0) ** 2).mean(),
    "an entry of each row is written": lambda x, y: (x.at[jnp.arange(x.shape[0]), y].add(-1.0) ** 2).mean(),
    "a row of the transposed": lambda x: (x.T.at[0].set(0.0) ** 2).mean(),
    "an entry, row by row": lambda x: (jax.vmap(lambda row: row.at[0].set(0.0))(x) ** 2).mean(),
    "padded to a size": lambda e: jnp.pad(e, (0, 2)).sum() / e.shape[0],
    "padded, and masked": lambda e, m: (jnp.pad(e, (0, 2)) * jnp.pad(m, (0, 2))).sum() / e.shape[0],
    "padded squares": lambda x: jnp.square(jnp.pad(x, ((3, 0), (0, 1)))).sum(1).sum() / x.shape[0],
    "padded dot": lambda x, z: jnp.vdot(jnp.pad(x, ((0, 2), (0, 0))), jnp.pad(z, ((0, 2), (0, 0)))) / x.shape[0],
    "pooling over time": lambda t: nn.avg_pool(t, (2,), (2,)).max(1).mean() + nn.max_pool(t, (3,)).mean(),
    "convolution of each row": lambda t: jax.vmap(lambda a: jnp.convolve(a, jnp.ones(3), "same"))(t[..., 0]).mean(),
    "guarded": guarded,
    "masked BatchNorm": masked_batch_norm,
}
OPTAX = {
    "cosine_distance": lambda x, z: optax.cosine_distance(x, z).mean(),
    "cosine_similarity": lambda x, z: optax.cosine_similarity(x, z, epsilon=1e-6).mean(),
    "convex_kl": lambda q, o: optax.convex_kl_divergence(jax.nn.log_softmax(o), q).mean(),
    "generalized_kl": lambda q, o: optax.losses.generalized_kl_divergence(jax.nn.log_softmax(o), q).mean(),
    "kl": lambda q, o: optax.kl_divergence(jax.nn.log_softmax(o), q).mean(),
    "kl_log": lambda q, o: optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(o), jnp.log(q)).mean(),
    "hinge": lambda e, sign: optax.hinge_loss(e, sign).mean(),
    "huber": lambda x, z: optax.huber_loss(x, z).mean(),
    "l2": lambda x, z: optax.l2_loss(x, z).mean(),
    "squared": lambda x, z: optax.squared_error(x, z).mean(),
    "log_cosh": lambda x, z: optax.log_cosh(x, z).mean(),
    "multiclass_hinge": lambda o, y: optax.losses.multiclass_hinge_loss(o, y).mean(),
    "multiclass_perceptron": lambda o, y: optax.losses.multiclass_perceptron_loss(o, y).mean(),
    "perceptron": lambda e, sign: optax.losses.perceptron_loss(e, sign).mean(),
    "multiclass_sparsemax": lambda o, y: optax.losses.multiclass_sparsemax_loss(o, y).mean(),
    "sparsemax": lambda e, m: optax.losses.sparsemax_loss(e, m).mean(),
    "poly": lambda o, q: optax.losses.poly_loss_cross_entropy(o, q).mean(),
    "ranking": lambda o, q: optax.losses.ranking_softmax_loss(o, q, reduce_fn=None).mean(),
    "ranking's own": lambda o, q: optax.losses.ranking_softmax_loss(o, q),
    "safe": lambda o, q: optax.safe_softmax_cross_entropy(o, q).mean(),
    "sigmoid": lambda o, q: optax.sigmoid_binary_cross_entropy(o, q).mean(),
    "focal": lambda o, q: optax.sigmoid_focal_loss(o, q, alpha=0.3).mean(),
    "softmax": lambda o, q: optax.softmax_cross_entropy(o, q).mean(),
    "integer": lambda o, y: ce(o, y).mean(),
    "triplet": lambda x, z: optax.losses.triplet_margin_loss(x, z, z[:, ::-1]).mean(),
    "fenchel_young": lambda o, q: optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)(o, q).mean(),
    "dice of each": lambda i: optax.losses.dice_loss(i, jax.nn.sigmoid(i)).mean(),
}


@pytest.mark.parametrize("name", [*ACCEPTED, *OPTAX])
def test_a_mean_over_the_rows_is_accepted(name):
    found = traced((ACCEPTED | OPTAX)[name])
    assert found is not None
    assert found.axis(0) is None
    assert found.faults("mean", [0])[0] is None


@pytest.mark.full
@pytest.mark.parametrize("name", [*ACCEPTED, *OPTAX])
def test_a_mean_over_so_many_rows_is_accepted(name):
    """Sizes and numbers that are by chance multiples of one prime are none of the other."""
    assert counted((ACCEPTED | OPTAX)[name]) == [None]


def by_chance(e):
    total = e.sum()  # <-
    return total / 8.0


def in_a_scan(t):
    def step(total, x):
        return total + jnp.sqrt((x**2).mean()), None  # <-

    return lax.scan(step, 0.0, t.swapaxes(0, 1))[0]


def in_a_jit(e):
    return jax.jit(
        lambda e: jnp.log(  # <-
            e.mean()
        )
    )(e)


def drawn(e, key):
    m = jax.random.bernoulli(key, 0.3, e.shape) + 0.0
    return (e * m).sum() / m.sum()  # <-


def unlabelled(e, o):
    m = jnp.where(jnp.isnan(o[:, 0]), 0.0, 1.0)
    return (e * m).sum() / m.sum()  # <-


def next_to(x):
    """The places of the next rows."""
    return (jnp.arange(x.shape[0]) + 1) % x.shape[0]


def f1(o, y):
    hit, said, true = [(v + 0.0).sum() for v in ((o.argmax(1) == 1) & (y == 1), o.argmax(1) == 1, y == 1)]
    precision, recall = hit / said, hit / true  # <-
    return 2 * precision * recall / (precision + recall)


def dice(q, m):
    p, m = q[:, 0], m + 0.0
    return 1 - (2 * (p * m).sum() + 1) / (p.sum() + m.sum() + 1)  # <-


def simclr(x, z):
    both = jnp.concatenate([x, z])
    both = both / jnp.linalg.norm(both, axis=1, keepdims=True)
    near = both @ both.T  # <-
    near = jnp.where(jnp.eye(both.shape[0], dtype=bool), -jnp.inf, near)
    return ce(near, jnp.roll(jnp.arange(both.shape[0]), x.shape[0])).mean()


def advantages(e):
    _, after = lax.scan(lambda after, delta: (delta + 0.9 * after,) * 2, 0.0, e, reverse=True)  # <-
    return (after * e).mean()


def over_the_rows(t, w):
    """A recurrent network of time-major data whose rows are cut along the time."""

    def step(h, x):
        h = jnp.tanh(0.5 * h + x @ w)
        return h, h

    return (lax.scan(step, jnp.zeros((6, 3)), t)[1] ** 2).mean()  # <-


def largest_so_far(x):
    def step(largest, i):
        largest = jnp.maximum(largest, x[i].mean())
        return largest, largest

    return lax.scan(step, 0.0, jnp.arange(x.shape[0]))[1].mean()  # <-


def barlow(x, z):
    c = x.T @ z / x.shape[0]
    return ((jnp.diag(c) - 1) ** 2).sum() + ((c * (1 - jnp.eye(5))) ** 2).sum()  # <-


def twice(x):
    jnp.linalg.norm(x)
    return jnp.linalg.norm(x)  # <-


def unfinished_maml(w, x, o):
    def loss(w):
        return ((x @ w - o) ** 2).sum()  # <-

    return loss(w - 0.1 * jax.grad(loss)(w)) / x.shape[0]


REFUSED = {
    "row": [
        lambda e: jax.nn.relu(e - e[0]).mean(),
        lambda x, s: jnp.tanh(s * x + x[-1]).sum(1).mean(),
        lambda x: jnp.exp(x @ x[0]).mean(),
        lambda e: jnp.maximum(e, e[0]).mean(),
        lambda e: lax.fori_loop(0, e.shape[0], lambda i, t: t + e[i] * e[0], 0.0) / e.shape[0],
        lambda e: jnp.abs(e - e[jnp.argmin(e)]).mean(),
        lambda x: jnp.tanh(jnp.concatenate([x, jnp.broadcast_to(x[0], x.shape)], 1)).mean(),
        lambda x, o: jnp.where(x[0, 0] > 0, jax.nn.relu(o), 0).mean(),
        lambda x: x.at[0].set(0).mean(),
        lambda x: x.at[-1].set(0).mean(),
        lambda x: x.at[:2].add(1.0).mean(),
        lambda x: x.at[jnp.array([0, 2])].multiply(2.0).mean(),
        lambda e: (2 * e).at[0].set(e[0]).mean(),
    ],
    "sum": [
        lambda e: e.sum(),
        lambda e: 3 * e.sum() + 1,
        lambda e: e.sum() / 32.0,
        lambda e: e.mean() + e.sum(),
        lambda e: e.mean() / e.shape[0],
        lambda e: e.sum() / jnp.sqrt(e.shape[0]),
        lambda x: jnp.float32(x.shape[0]),
        lambda x: jnp.log(x.shape[0]),
        lambda o, y: (o.argmax(1) == y).sum(),
        lambda x: jnp.einsum("bi,bi->", x, x),
        lambda e: (e + e.sum()).mean(),
        lambda x, w: jax.vmap(lambda a: jnp.tanh(a @ w).max())(x).sum(),
        lambda e: (e / (e.shape[0] - 1)).sum(),
        lambda e: jnp.pad(e, (0, 2)).mean(),
        lambda x, z: jnp.trace(x @ z.T),
        lambda x, z: ((x @ z.T) * jnp.eye(x.shape[0])).mean(),
        lambda e: lax.scan(lambda t, v: (t + v, None), 0.0, e)[0],
        lambda e, s: lax.scan(lambda t, v: (t + v, None), s, e)[0] / e.shape[0],
        lambda e: lax.scan(lambda i, v: (i + 1, v * (i % 2)), 0, e)[1].mean(),
        lambda e: lax.fori_loop(0, e.shape[0], lambda i, t: t + jnp.exp(e[i]), 0.0) / 8,
        unfinished_maml,
        by_chance,
    ],
    "part": [
        lambda e: (jax.nn.softplus(-e[: e.shape[0] // 2]).sum() + e[e.shape[0] // 2 :].sum()) / e.shape[0],
        lambda e: (e[: e.shape[0] // 2].sum() - e[e.shape[0] // 2 :].sum()) / e.shape[0],
        lambda e: (e[: e.shape[0] // 2].sum() + (2 * e[e.shape[0] // 2 :]).sum()) / e.shape[0],
        lambda x: jnp.where(x[: x.shape[0] // 2] > 0, x[: x.shape[0] // 2], 0).sum() / x.shape[0],
        lambda e: e[:-1].mean(),
        lambda e: e[1:].sum() / e.shape[0],
        lambda x: jnp.vdot(x[1:] - x[:-1], x[1:] - x[:-1]) / x.shape[0],
        lambda x: jnp.einsum("bi,bi->", x[1:], x[:-1]) / x.shape[0],
        lambda e: jnp.pad(e, (0, 1), constant_values=100.0).sum() / e.shape[0],
        lambda e: (jnp.pad(e, (0, 2)) + 1).sum() / e.shape[0],
        lambda e: (jnp.pad(e, (0, 2)).sum() / e.shape[0] * jnp.ones(3)).sum() + e[1:].sum() / e.shape[0],
        lambda e: jnp.exp(jnp.pad(e, (0, 2))).sum() / e.shape[0],
        lambda e: jnp.pad(e[1:], (0, 2)).sum() / e.shape[0],
        lambda e: jnp.pad(e, (0, 2))[1:].sum() / e.shape[0],
        lambda e: (e[: e.shape[0] // 2] ** 2).mean(),
        lambda e: e[e.shape[0] // 3 :].sum() / e.shape[0],
        lambda e: (e[: e.shape[0] // 2] ** 2).mean() + jnp.abs(e[e.shape[0] // 2 :]).mean(),
    ],
    "count": [
        lambda x, z: (x + 5.0 * jax.grad(lambda v: jnp.tanh(v).mean())(z)).mean(),
        lambda x: ((jax.grad(lambda v: (v**2).mean())(x) - 1) ** 2).mean(),
        lambda e, m: jnp.where((jnp.arange(e.shape[0]) < 5) & m, e, 0.0).mean(),
        lambda e: jnp.where(~(jnp.arange(e.shape[0]) < 4), e, 0.0).mean(),
        lambda e: (e * jnp.sign(jnp.arange(e.shape[0]) - 4)).mean(),
        lambda e, table: (e * table[jnp.arange(e.shape[0]), 0]).mean(),
        lambda e: lax.fori_loop(0, e.shape[0], lambda i, c: c + (e * jnp.arange(e.shape[0]))[i], 0.0) / e.shape[0],
        lambda e: lax.scan(lambda c, v: (c + v, None), 0.0, e * jnp.arange(e.shape[0]))[0] / e.shape[0],
        lambda e: (e * (jnp.arange(e.shape[0]) % 2 == 0)).sum() / e.shape[0],
        lambda e: jnp.where(jnp.arange(e.shape[0]) == 0, 0.0, e).mean(),
        lambda e: (e * jnp.arange(e.shape[0])).mean(),
        lambda e: jnp.where(jnp.arange(e.shape[0]) < 4, e, 0.0).mean(),
        lambda e: jnp.where(e * jnp.arange(e.shape[0]) > 0, 2 * e, e).mean(),
    ],
    "ratio": [
        lambda e, m: (e * m).sum() / m.sum(),
        lambda e, m: (e * m).sum() / jnp.maximum(m.sum(), 1),
        lambda e, m: (e * m).sum() / (m.sum() + 1e-6),
        lambda e, m: (e / m.sum()).sum(),
        lambda e, m: (e * (1 / m.sum())).sum(),
        lambda e, m: jnp.mean(e, where=m),
        lambda e, m: (e + (e * m).sum() / m.sum()).mean(),
        lambda e, m: jnp.average(e, weights=m),
        lambda e, m: e.mean() + (e * m).mean() / m.mean(),
        lambda e, m: jnp.where(m.sum() > 0, (e * m).sum() / m.sum(), 0.0),
        lambda o, y, s: (ce(o, y) * (1 + s * y)).sum() / (1 + s * y).sum(),
        lambda e, o: (jax.nn.softmax(o[:, 0]) * e).sum(),
        lambda e: 1 / e.mean(),
        drawn,
        unlabelled,
        f1,
        dice,
    ],
    "nonlinear": [
        lambda e: (e.mean() + 1) ** -1.0,
        lambda o: (jnp.log(jnp.exp(o - (c := o.max())).sum(1)) + 2 * c).mean(),
        lambda o: jnp.log(jnp.exp(o - (c := o.max()) - c + c).sum(1)).mean(),
        lambda x: jnp.var(x[:, 0], ddof=1) * 1.0,
        lambda e, y: (jnp.zeros(3).at[y].subtract(e) ** 2).sum() / e.shape[0] ** 2,
        lambda x: (x - x.max(0)).mean(),
        lambda x: (x - x.min(0)).sum(1).mean(),
        lambda x: (x + x.std(0)).mean(),
        lambda x: (x + x.mean(0) ** 2).mean(),
        lambda x: ((x - x.min(0)) / (x.max(0) - x.min(0))).mean(),
        lambda e: jnp.tile(jnp.sqrt(e.mean()), 3).mean(),
        lambda o, e: (jnp.exp(o[:, 0] - o[:, 0].max()) * e).mean(),
        lambda o: jnp.exp(o - o.max()).mean(),
        lambda x: (batch_norm(x) ** 2 / 2 + 0.5 * jnp.log(x.var(0))).sum(1).mean(),
        lambda e: jnp.sqrt(e.mean()),
        lambda e: jnp.log(e.mean()),
        lambda e: jnp.exp(e.mean()),
        lambda x: lax.scan(lambda before, row: (row, None), jnp.zeros(5), x)[0].sum(),
        lambda e: (e.max() - e).mean(),
        lambda e: (e + jnp.sqrt(e.mean())).mean(),
        lambda e: (e - jnp.log(e.sum())).sum() / e.shape[0],
        lambda e, m: jnp.where(m, 2 * e + 3 * jnp.sqrt(e.mean()), 0).mean(),
        lambda e, x: (e[:, None] + jnp.maximum(x.mean(), 0)).sum(1).mean(),
        lambda e, x: lax.cond(True, lambda: e + x.std(), lambda: e).mean(),
        lambda e, o: (e + jax.nn.relu(1 - jnp.sqrt(o.var(0) + 1e-4)).mean()).mean(),
        lambda e, o: (e + (jax.nn.softmax(o).mean(0) * jnp.log(jax.nn.softmax(o).mean(0))).sum()).mean(),
        lambda e, o: (e + o.max()).mean(),
        lambda e: e.mean() ** 2,
        lambda x, e: jnp.linalg.solve(x.T @ x / x.shape[0] + jnp.eye(5), x[0]).sum(),
        lambda x: jnp.trace(jnp.linalg.inv(x.T @ x / x.shape[0] + jnp.eye(5))),
        lambda e: jax.scipy.special.gammainc(2.0, e.mean()),
        lambda e: jax.scipy.special.i0e(e.mean()),
        lambda e: jax.scipy.special.polygamma(1, e.mean()),
        lambda e: lax.reduce(e, -9.0, jnp.logaddexp, (0,)),
        lambda e: jnp.abs(e.mean()),
        lambda e: jnp.maximum(e.mean(), 0.1),
        lambda e: jnp.clip(e.mean(), 0.1, 3),
        lambda e, x: e.mean() * x.mean(),
        lambda o: jnp.linalg.norm(o),
        lambda o: jnp.std(o),
        lambda o: jnp.var(o, 0).mean(),
        lambda o, e: e.mean() + 0.1 * o.var(),
        lambda o: o.max(),
        lambda e: (100 * e.mean()).astype(int) / 100,
        lambda e: e.prod(),
        lambda m: m.all().astype(float),
        lambda x: x[0].mean(),
        lambda e: jnp.where(e.mean() > 1, e.mean(), 0.0),
        lambda e: lax.cond(e.mean() > 1, lambda: 1.0, lambda: 0.0),
        lambda o: 3 * (jax.nn.softmax(o).mean(0) * jax.nn.one_hot(o.argmax(1), 3).mean(0)).sum(),
        lambda o: -(jax.nn.softmax(o).mean(0) * jnp.log(jax.nn.softmax(o).mean(0))).sum(),
        lambda o: (jax.nn.log_softmax(o, axis=0) * o).sum(),
        lambda x: jnp.linalg.eigvalsh(x.T @ x / x.shape[0]).sum(),
        lambda e: e.mean() + jnp.sqrt(e.mean()),
        lambda e, w: jax.vmap(lambda c: jnp.sqrt((e * c).mean()))(w[:, 0]).mean(),
        lambda e: jnp.log(jnp.maximum(jnp.exp(e).sum(), 1)) + e.mean(),
        lambda o: jnp.sqrt((o**2).mean(0)).sum() ** 2,
        lambda x: (x / jnp.linalg.norm(x)).sum(),
        lambda x: jnp.sort(x.mean(0))[-1],
        lambda m, table: lax.dynamic_slice(table, (m.sum(), 0), (1, 4), allow_negative_indices=False).sum(),
        lambda e: lax.scan(lambda t, v: (jnp.maximum(t, v), None), 0.0, e)[0],
        lambda e: lax.scan(lambda t, v: (0.9 * t + v, None), 0.0, e)[0],
        lambda e, m: lax.scan(lambda t, v: (jnp.where(v[1], 0, t + v[0]), None), 0.0, (e, m))[0] / e.shape[0],
        lambda e, s: lax.scan(lambda t, v: (s * t + v, None), 0.0, e)[0] / e.shape[0],
        lambda e: lax.scan(lambda t, v: (0.9 * t + v, None), 0.0, e)[0] * e.mean(),
        lambda e: lax.fori_loop(0, e.shape[0], lambda i, t: jnp.maximum(t, e[i]), 0.0),
        lambda e: lax.while_loop(lambda c: c[0] < e.shape[0], lambda c: (c[0] + 1, 0.9 * c[1] + e[c[0]]), (0, 0.0))[1],
        lambda e: lax.scan(lambda t, v: (jnp.where(v > t, v, t), None), 0.0, e)[0],
        lambda e: lax.scan(lambda c, v: ((c[0] + v, c[0] + c[1]), None), (0.0, 0.0), e)[0][1] / e.shape[0],
        lambda x: (lax.scan(lambda h, row: (jnp.tanh(h + row), None), jnp.zeros(5), x)[0] ** 2).mean(),
        in_a_scan,
        in_a_jit,
        barlow,
        twice,
    ],
    "loop": [until_all_are_there],
    "number": [
        lambda x, e: ((x - x.mean(0)) @ jnp.ones(5) * e).mean(),
        lambda x, e: ((x - x.mean()) / x.std() @ jnp.tri(5) * e[:, None]).mean(),
        lambda x: jnp.tanh((x - x.mean(0)) / x.std(0) * x.std()).mean(),
        lambda x, w: ((h := x @ w - (x @ w).mean(0)).T @ h / x.shape[0]).mean(),
        lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c + x), x - x.mean(0)).mean(),
        lambda x: (x / jnp.exp(x.mean(0))).mean(),
        lambda x, z: (x / (1 + z.mean(0) ** 2)).mean(),
        lambda x: jnp.tanh(x / jnp.abs(x).mean(0)).mean(),
        lambda x, z: jnp.tanh(x * z.mean(0)).mean(),
        lambda x, z, w: (jax.nn.relu(x * z.mean(0)) @ w).mean(),
        lambda z: jax.nn.softplus(z @ z.mean(0)).mean(),
        lambda x, z: jnp.tanh(x @ (z.T @ x / x.shape[0])).mean(),
        lambda e: jnp.floor(e / e.std()).mean(),
        lambda x, e: jnp.tanh(x.at[:, 1].set(e.mean())).mean(),
        lambda e: jnp.digitize(e, jnp.stack([e.mean(), e.mean() + 1])).mean(),
        lambda x, w: (jax.nn.relu(x - x.mean(0)) @ w).mean(),
        lambda x, w: (jax.nn.softplus(x / x.mean()) @ w).mean(),
        lambda x, w, y: ce((x / x.max()) @ w, y).mean(),
        lambda t: (t / t.max() + jnp.round(t / t.max())).mean(),
        lambda x, m: ((x - (x * (m[:, None] / m.mean())).mean(0)) ** 2).mean(),
        lambda o, y: ce((o - o.max()) + 2 * (o - o.max()) ** 2, y).mean(),
        prototypes,
        quantized,
        asymmetric,
        rounded,
        whitened_by_newton,
        whitened_by_cholesky,
        principal_components,
        lambda o, y: (lambda hot: -(hot.mean(0) ** 0.75 * hot * jax.nn.log_softmax(o)).sum(1).mean())(
            jax.nn.one_hot(y, 3)
        ),
        lambda e: (e > e.mean()).mean(),
        lambda e: jnp.where(e > e.mean(), e, 0.0).mean(),
        lambda x, z: (x @ z.mean(0)).mean(),
        lambda x, z: (x @ (z.T @ x / x.shape[0])).sum(1).mean(),
        lambda x, z: (z * (x - x.mean(0))).sum(1).mean(),
        lambda x: (x**2 * jax.nn.softmax((x**2).mean(0))).sum(1).mean(),
        lambda e, x: jnp.vdot(e * jnp.tanh(e.mean()), x[:, 0]) / e.shape[0],
        lambda x, z: ((x - x.mean(0)) * (z - z.mean(0))).mean(),
        lambda x, m: jnp.where(m[:, None], x, x.mean(0)).sum(1).mean(),
        lambda q, o: -(lax.stop_gradient(q / q.mean(0)) * jax.nn.log_softmax(o)).mean(),
        lambda x: (x / x.max(0)).mean(),
        lambda o, y: (ce(o, y) * (o.shape[0] / jnp.bincount(y, length=3))[y]).mean(),
        lambda e, o: jax.nn.softplus(e - jnp.tile(o.mean(), e.shape[0])).mean(),
        ppo,
        lambda e, m: jnp.where(m, e, e.mean()).mean(),
        lambda e, m: jnp.where(m, e, e.std()).mean(),
        lambda e, m: jnp.tanh(jnp.where(m, e, e.mean())).mean(),
        lambda e, m: ((jnp.where(m, e, e.mean()) - m) ** 2).mean(),
        lambda e: ((e - e.mean()) ** 2).sum() / (e.shape[0] - 1),
        lambda e: jnp.square(e - e.mean()).mean(),
        lambda e: ((d := e - e.mean()) * d).mean(),
        lambda e: ((e - e.mean()) ** 3).mean(),
        lambda e: ((e - e.mean()) ** 4).mean(),
        lambda e, m: (m * (e - e.mean()) ** 2).mean(),
        lambda e: jnp.sqrt((e - e.mean()) ** 2 + 1e-6).mean(),
        lambda e: jnp.exp(-((e - e.mean()) ** 2)).mean(),
        lambda e, x: (jnp.sign(e - e.mean()) * x[:, 0]).mean(),
        lambda e, x: (e / (x[:, 0] ** 2 + x.var())).mean(),
        lambda e, x: (e / (x[:, 0] ** 2 + (x**2).mean())).mean(),
        lambda e, x: (e / (1 + x[:, 0] ** 2 / (x**2).mean())).mean(),
        lambda e, x: (e / (jnp.abs(x[:, 0]) + x.max())).mean(),
        lambda e: (e / (e + lax.stop_gradient(e.mean()))).mean(),
        lambda e, y: ce(jnp.stack([e, jnp.full_like(e, e.mean())], 1), y % 2).mean(),
        lambda e: jax.nn.logsumexp(jnp.stack([e, jnp.full_like(e, e.mean())], 1), 1).mean(),
        lambda e: jnp.stack([e, jnp.full_like(e, e.mean())], 1).prod(1).mean(),
        lambda e: jnp.concatenate([e[:, None], jnp.full((e.shape[0], 1), e.mean())], 1).max(1).mean(),
        lambda o, y: ce(o - o.mean(0), y).mean(),
        lambda x, y: x[:, jnp.bincount(y, length=3).argmax()].mean(),
        lambda x: x[:, x.mean(0).argmax()].mean(),
        lambda x, y: jnp.take_along_axis(x, jnp.full((x.shape[0], 1), jnp.bincount(y, length=3).argmax()), 1).mean(),
        lambda x: ((x - x.mean(0)) ** 2).mean(),
        lambda x, z: ((x - x.mean(0) - z) ** 2).mean(),
        lambda x: jnp.abs(x - x.mean(0)).mean(),
        lambda x: (x**2 + jnp.log(((x - x.mean(0)) ** 2).mean(0))).mean(),
        lambda q: (q * jnp.log(q / q.mean(0))).sum(1).mean(),
        lambda q, o: -(jax.nn.softmax(jnp.log(q / q.mean(0))) * jax.nn.log_softmax(o)).sum(1).mean(),
        lambda x: jax.nn.softmax((x - x.mean(0)) / 0.1).max(1).mean(),
        lambda x, z: ((x - x.mean()) / jnp.sqrt(x.var() + 1e-5) * z).mean(),
        lambda e, o: jax.nn.relu((o[:, 0] - o.mean()) * lax.rsqrt(o.var() + 1e-6) * e).mean(),
        lambda e, m, s: (s * (e - (e * m).sum() / m.sum()) / (e.std() + 1e-6)).mean(),
        lambda e, o: surrogate(o, e - e.mean()),
        lambda e, o: surrogate(o, e / jnp.abs(e).max()),
        lambda e, o: surrogate(o, (e - e.min()) / (e.max() - e.min())),
        lambda e, o: surrogate(o, jax.nn.standardize(e)),
        lambda e, o: surrogate(o, (e - e.mean(keepdims=True)) / (e.std(keepdims=True) + 1e-8)),
        lambda e, o: surrogate(o, (((a := e[:, None]) - a.mean(0)) / (a.std(0) + 1e-8))[:, 0]),
        lambda e, o: surrogate(o, (e - e.mean()) / (jnp.abs(e).mean() + 1e-8)),
        lambda e, o: surrogate(o, jnp.clip(jax.nn.standardize(e), -3, 3)),
        lambda e, o: jax.nn.softplus(o[:, 0] - e.mean()).mean(),
        lambda e, o: -jax.nn.log_sigmoid(e - o[:, 0].mean()).mean(),
        lambda e: jnp.abs(e - e.mean()).mean(),
        lambda e, o: ((o[:, 0] - jax.nn.standardize(e)) ** 2).mean(),
        lambda e, o: (((o[:, 0] - e) / e.std()) ** 2).mean(),
        lambda e, o: optax.huber_loss(o[:, 0], e / (e.std() + 1e-8)).mean(),
        lambda e: jnp.maximum(e, e.mean()).mean(),
        lambda e, o: ((e - e.mean()) * (o[:, 0] - o[:, 0].mean())).mean(),
        lambda e, o: 1 - (jax.nn.standardize(e) * jax.nn.standardize(o[:, 0])).mean(),
        lambda e, m: (e * (m / m.mean())).mean(),
        lambda e, q: (e * (q[:, 0] / q[:, 0].max())).mean(),
        lambda e, x: (x[:, 0] * (e - e.mean())).mean(),
        lambda e, o, y: ((e.mean() - e) * jax.nn.log_softmax(o)[jnp.arange(o.shape[0]), y]).mean(),
        lambda o, y: (ce(o, y) * (jax.nn.one_hot(y, 3) / jax.nn.one_hot(y, 3).mean(0).max()).sum(1)).mean(),
        lambda e: (e * (1 - jnp.exp(-e.mean())) ** 2).mean(),
        lambda e: (e * e.mean()).mean(),
        lambda e, x: (e * lax.stop_gradient(jax.nn.sigmoid(x.mean()))).sum() / e.shape[0],
        lambda e, m, x: jnp.where(m, e * x.std(), 0).mean(),
        lambda e: jnp.nan_to_num(e * jnp.exp(e.mean())).mean(),
        lambda e: (e * jnp.sqrt(e.mean()) * jnp.exp(e.mean())).mean(),
        lambda e, x: (e * (1 / (x**2).mean())).mean(),
        lambda e, m: jnp.where(m, e * ((1 - m).sum() / m.sum()), e).mean(),
        lambda e: jnp.where(e > 0.1 * e.sum(), e, 0.0).mean(),
        lambda e: jnp.where(e == e.max(), e, 0.0).mean(),
        lambda e: (e * (e >= e.max() - 0.5)).mean(),
        lambda o: jnp.where(o > o.mean(0), o, 0.0).mean(),
        lambda o: (o * (o == o.max(0))).sum(1).mean(),
        lambda e: jnp.minimum(e, e.mean() + e.std()).mean(),
        lambda o: jnp.clip(o, -2 * o.std(0), 2 * o.std(0)).mean(),
        lambda e: jnp.clip(e, -0.3 * jnp.abs(e).max(), 0.3 * jnp.abs(e).max()).mean(),
        lambda e: jax.nn.relu(e - e.max() + 1).mean(),
        lambda e, o: (((e - e.min()) / (e.max() - e.min() + 1e-6) - o[:, 0]) ** 2).mean(),
        lambda e, y: (e * (jnp.bincount(y, length=3)[y] > 1)).mean(),
        lambda e, y: (e * (e == jax.ops.segment_max(e, y, 3)[y])).mean(),
        lambda e, y: ((e - segment_mean(e, y)[y]) ** 2).mean(),
        lambda o, y: ce(jnp.where(jax.nn.one_hot(y, 3).sum(0) > 0, o, -10.0), y).mean(),
        lambda e, m: jnp.where(m.any(), e, 0.0).mean(),
        lambda e: lax.scan(lambda c, v: (c + v, None), 0.0, jnp.tanh(e - e.mean()))[0] / e.shape[0],
        lambda e: lax.map(lambda v: 1.5 * v, e * e.mean()).mean(),
        lambda e: jax.vmap(jnp.tanh)(e * e.mean()).mean(),
        lambda e: jax.nn.relu(e * e.mean()).mean(),
        lambda e, y: optax.sigmoid_binary_cross_entropy(e * (y == 1).mean(), (y == 1) + 0.0).mean(),
        lambda e: jnp.log1p(e**2 / lax.stop_gradient((e**2).mean())).mean(),
        lambda e: jnp.exp(-(e**2) / (e**2).mean()).mean(),
        lambda o, y: ce(o / jnp.linalg.norm(o, axis=1).mean(), y).mean(),
        lambda e: ((v := e * e.mean()) * v).mean(),
        lambda e: jax.nn.relu(e * e.max()).mean(),
    ],
    "pairs": [
        lambda e: jnp.diff(e[::-1], append=0.0).mean(),
        lambda e: (jnp.pad(e[::-1], (1, 0))[:-1] ** 2).mean(),
        lambda e: ((e > jnp.quantile(e, 0.3)) * e).mean(),
        lambda x, y: jnp.take_along_axis(x, y[::-1, None], 1).mean(),
        lambda x, y: jnp.take_along_axis(x, jnp.roll(y, 1)[:, None], 1).mean(),
        lambda x, y: jnp.take_along_axis(x[::-1], y[:, None], 1).mean(),
        lambda x, y: (jnp.take_along_axis(x, y[:, None], 1) + jnp.take_along_axis(x, y[::-1, None], 1)).mean(),
        lambda e, y: jax.ops.segment_sum(e, y[::-1], 3) @ jnp.arange(3.0) / e.shape[0],
        lambda e, y: jnp.zeros(3).at[y[::-1]].add(e) @ jnp.arange(3.0) / e.shape[0],
        lambda x, z: jnp.diag(x @ z[::-1].T).mean(),
        lambda x, z: jnp.diag(jnp.exp(x @ jnp.roll(z, 1, 0).T)).mean(),
        lambda x, z: jnp.trace(x @ z[::-1].T) / x.shape[0],
        lambda x, z: (lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h), x[::-1]) * z).mean(),
        lambda e, y: (e.at[y].subtract(0.5) ** 2).mean(),
        lambda x: (x @ x.T).mean(),
        lambda x, z: (lax.map(lambda q: jax.nn.logsumexp(x @ q), x) - (x * z).sum(1)).mean(),
        lambda x: lax.map(lambda q: jnp.exp(-((x - q) ** 2).sum(1)).mean(), x).mean(),
        lambda x: lax.scan(lambda c, q: (c + jax.nn.logsumexp(x @ q), None), 0.0, x)[0] / x.shape[0],
        lambda e: lax.map(lambda q: jnp.exp(q - e).sum(), e).mean(),
        lambda x: lax.map(lambda s: jnp.exp((s[0] - s[1]).sum()), (x, jnp.roll(x, 1, 0))).mean(),
        lambda x, z: ((lax.map(jnp.sin, x[::-1]) - z) ** 2).mean(),
        lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c + jax.nn.logsumexp(x @ x[i]), 0.0) / x.shape[0],
        lambda e, y: (e * e[jnp.argsort(y)]).mean(),
        lambda e, m: jnp.where(m, e, e[jnp.argsort(m, descending=True)]).mean(),
        lambda e: lax.map(lambda a: lax.scan(lambda c, b: (c + jnp.exp(a * b), None), 0.0, e)[0], e).mean(),
        lambda e: lax.scan(lambda c, a: (c + lax.map(lambda b: a * b, e).mean(), None), 0.0, e)[0] / e.shape[0],
        lambda x: jnp.sort(x, 0)[-1].mean(),
        lambda x, y: x[y].mean(),
        lambda x, y: jnp.abs(x[y, 0] - x[:, 0]).mean(),
        lambda x, y: jnp.take_along_axis(x, y[:, None], 0).mean(),
        lambda x, o: (x[jnp.argmax(o, 1)] ** 2).mean(),
        lambda e, y: (e.at[y].add(0.5) ** 2).mean(),
        lambda e, y: (jnp.zeros_like(e).at[y].add(e) ** 2).mean(),
        lambda x, y: lax.map(lambda t: (x[t[1]] * t[0]).sum(), (x, y)).mean(),
        lambda x: (jnp.tri(x.shape[0]) @ x).mean(),
        lambda x: ((jnp.eye(x.shape[0]) - 1 / x.shape[0]) @ x).mean(),
        lambda x: (jnp.eye(x.shape[0])[::-1] @ x).mean(),
        lambda e: jnp.diff(e, prepend=0.0).mean(),
        lambda x: jnp.pad(x[1:], ((0, 1), (0, 0))).mean(),
        lambda o: (o.T.reshape(o.shape)[:, 0] ** 2).mean(),
        lambda e: jnp.abs(jnp.fft.fft(e)).mean(),
        lambda x, z: ((jnp.sort(x, 0) - jnp.sort(z, 0)) ** 2).mean(),
        lambda x: ((x[:, None] - x[None]) ** 2).sum(-1).mean(),
        lambda x: jnp.maximum(0, x[:, None, 0] - x[None, :, 0] + 0.1).max(1).mean(),
        lambda x: (jax.nn.softmax(x @ x.T / 2) @ x).mean(),
        lambda x, z: jnp.diag(jax.nn.log_softmax(x @ z.T)).mean(),
        lambda x, z: jnp.diag(x @ z.T @ x @ z.T).mean(),
        lambda x, z: jnp.diag(jnp.cumsum(x @ z.T, 0)).mean(),
        lambda x, z: (jnp.diag(x @ z.T)[:, None] - x @ z.T).mean(),
        lambda x, z: ((x @ z.T) * (1 - jnp.eye(x.shape[0]))).sum() / x.shape[0],
        lambda x, z: jnp.where(jnp.eye(x.shape[0], dtype=bool), 0, x @ z.T).sum() / x.shape[0],
        lambda e, x: jax.vmap(lambda a: jax.vmap(lambda b: jnp.exp(a @ b))(x))(x).sum(1).mean(),
        lambda e: lax.reduce_window(e, -jnp.inf, lax.max, (2,), (1,), "SAME").mean(),
        lambda e: (lax.reduce_window(e, 0.0, lax.add, (2,), (1,), "SAME") ** 2).mean(),
        lambda e: nn.max_pool(e[None, :, None], (2,), padding="SAME").mean(),
        lambda e: lax.conv(e[None, None], jnp.ones((1, 1, 3)), (1,), "SAME").mean(),
        lambda x, z: jax.nn.logsumexp(lax.map(lambda i: x[i], jnp.arange(x.shape[0])) @ z.T, 1).mean(),
        lambda e: jnp.abs(jnp.diff(e)).sum() / e.shape[0],
        lambda x, z: nn.relu(((x - z) ** 2).sum(1) - ((x - jnp.roll(z, 1, 0)) ** 2).sum(1) + 0.2).mean(),
        lambda x, z: (x * jnp.roll(z, 2, 0)).sum(1).mean(),
        lambda x, z: jnp.vdot(x[::-1], z) / x.shape[0],
        lambda x, z: (x * z[next_to(x)]).sum(1).mean(),
        lambda x, z: (x * jnp.take(z, next_to(x), axis=0)).mean(),
        lambda x, z: jnp.abs(x - z[x.shape[0] - 1 - jnp.arange(x.shape[0])]).mean(),
        lambda x, z: (x * z[jnp.arange(x.shape[0])[::-1]]).mean(),
        lambda x, z: jax.vmap(lambda i: jnp.exp(x[i] @ z[(i + 1) % x.shape[0]]))(jnp.arange(x.shape[0])).mean(),
        lambda x, z: lax.map(lambda i: x[i] @ z[(i + 1) % x.shape[0]], jnp.arange(x.shape[0])).mean(),
        lambda x: lax.fori_loop(1, x.shape[0], lambda i, sum: sum + x[i] @ x[i - 1], 0.0) / x.shape[0],
        lambda x, s: ((s * x + (1 - s) * x[::-1]) ** 2).mean(),
        lambda x, m: jnp.where(m[:, None], x, x[::-1]).mean(),
        simclr,
        advantages,
        transported,
        paired,
        assigned,
        over_the_rows,
        largest_so_far,
    ],
}


@pytest.mark.parametrize("kind, fn", [(kind, fn) for kind, fns in REFUSED.items() for fn in fns])
def test_what_is_no_mean_is_refused_with_its_line(kind, fn):
    fault = traced(fn).faults("mean", [0])[0]
    assert fault is not None
    lines, first = inspect.getsourcelines(fn)
    at = next((n for n, line in enumerate(lines) if "# <-" in line), 0)
    assert (fault.kind, fault.line) == (kind, f"test_row_terms.py:{first + at}")


def test_what_a_library_computes_is_blamed_on_the_line_that_calls_it():
    fault = traced(lambda x: optax.global_norm(x)).faults("mean", [0])[0]
    assert fault.line == f"test_row_terms.py:{inspect.currentframe().f_lineno - 1}"


def test_a_method_of_a_module_that_is_not_its_call_may_be_a_loss():
    critic = Relativistic()
    variables = critic.init(jax.random.key(0), ROWS["x"])
    fault = traced(lambda x, z: critic.apply(variables, x, z, method="loss")).faults("mean", [0])[0]
    assert fault.kind == "number"


@pytest.mark.full
def test_what_is_no_mean_over_so_many_rows_is_refused():
    fns = [(kind, fn) for kind, fns in REFUSED.items() for fn in fns]
    assert [inspect.getsource(fn) for kind, fn in fns if counted(fn) != [kind]] == []


def running_scale(t):
    """Over 31 steps in time."""
    steps = jnp.concatenate([t] * 6, 1)[:, :31].swapaxes(0, 1)

    def step(scale, x):
        scale = 0.9 * scale + 0.1
        return scale, (scale * x**2).mean()

    return lax.scan(step, jnp.ones(()), steps)[1].mean()


def triangle(x):
    return ((x[:, None] - x[None]) ** 2).sum(-1)


def near_each_other(both, rows):
    both = both / jnp.linalg.norm(both, axis=1, keepdims=True)
    return (both[:rows] * both[rows:]).sum(1).mean()


def near_in_turns(both, rows):
    return nn.softplus(both[::2] - both[1::2]).mean() * (rows / rows)


def stacked(x):
    return jnp.stack([jnp.tanh(x[i]) for i in range(len(x))])


def filled(entries):
    found = jnp.zeros(len(entries))
    for i, entry in enumerate(entries):
        found = found.at[i].set(entry)
    return found


def counted_one_by_one(x, y):
    counts = jnp.zeros(4)
    for row, label in zip(x, y, strict=True):
        counts = counts.at[label].add(jnp.tanh(row).sum())
    return counts


def total_of_stacks(e):
    total = jnp.zeros(())
    for v in e:
        total = jnp.stack([total, v]).sum()
    return total


def one_by_one(both, rows):
    return sum(both[i] @ both[rows + i] for i in range(rows))


def discounted(e):
    rates = jnp.full_like(e, 0.9)
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (rates, e), reverse=True)[1]


def halves(x):
    return x.reshape(2, len(x) // 2, *x.shape[1:])


COUNTS = {
    "discounted returns": (lambda e: discounted(e).mean(), "pairs"),
    "advantages": (lambda e, x: (discounted(e) * x[:, 0]).mean(), "pairs"),
    "the largest so far": (lambda e: lax.associative_scan(jnp.maximum, e).mean(), "pairs"),
    "the last of a sum": (lambda e: lax.associative_scan(jnp.add, e)[-1], "pairs"),
    "a scan of columns": (lambda x: jax.vmap(lambda c: lax.associative_scan(jnp.add, c), 1)(x).mean(), "pairs"),
    "a scan over time": (lambda t: lax.associative_scan(jnp.add, t, axis=1).mean() * (len(t) / len(t)), None),
    "a scan of each row": (lambda x: jax.vmap(discounted)(x).mean() * (len(x) / len(x)), None),
    "a scan of places": (lambda e, m: (e * (lax.associative_scan(jnp.add, m.astype(int)) < 5)).mean(), None),
    "diagonal, one by one": (lambda x, z: sum((x @ z.T)[i, i] for i in range(len(x))) / len(x), None),
    "the two largest, about": (lambda e: lax.approx_max_k(e, 2)[0].mean(), "nonlinear"),
    "a sum, one by one": (lambda x: sum(jnp.tanh(v).sum() for v in x), "sum"),
    "a sum, one by one, by a number": (lambda x: sum(jnp.tanh(v).sum() for v in x) / 8, "sum"),
    "a sum of a stack": (lambda x: stacked(x).sum(), "sum"),
    "a sum of a list": (lambda x: jnp.asarray([jnp.tanh(v).sum() for v in x]).sum(), "sum"),
    "a mean of a list": (lambda x: jnp.asarray([jnp.tanh(v).sum() for v in x]).mean(), None),
    "a sum of parts": (lambda e: jnp.concatenate(jnp.split(e, len(e))).sum(), "sum"),
    "a mean of parts": (lambda e: jnp.concatenate(jnp.split(e, len(e))).mean(), None),
    "shares, one by one": (lambda x: sum(jnp.tanh(v).sum() / len(x) for v in x) + 1.0, None),
    "zeros of numpy": (lambda e: (e + np.zeros(len(e), np.float32)).mean(), None),
    "zeros of numpy, in a sum": (lambda e: (e + np.zeros(len(e), np.float32)).sum(), "sum"),
    "zeros of numpy, in a root": (lambda x: jnp.sqrt((x + np.zeros((len(x), 5))).mean()), "nonlinear"),
    "shares of numpy": (lambda e: (e * np.full(len(e), 1 / len(e))).sum(), None),
    "features of numpy": (lambda x: (x * np.tile(np.arange(5.0), (len(x), 1))).mean(), None),
    "weights of numpy": (lambda x: (x * np.linspace(0, 1, len(x))[:, None]).mean(), "count"),
    "noise of numpy": (lambda x: (x * np.random.default_rng(0).normal(size=x.shape)).mean(), "count"),
    "as long as a prime": (lambda e: (e[:, None] * np.linspace(0, 1, 46)).mean() * len(e) / len(e), None),
    "a temperature of 31 by numpy": (lambda e: (e / np.full(len(e), 31.0)).mean(), None),
    "a temperature of 30 by numpy": (lambda e: (e / np.full(len(e), 30.0)).mean(), None),
    "lengths of 62 by numpy": (lambda x: (x * (np.arange(5) < np.full(len(x), 62)[:, None])).mean(), None),
    "nothing by numpy": (lambda x: jnp.nan_to_num(jnp.where(x > 0, x, np.full(x.shape, np.nan))).mean(), None),
    "a graph for each row": (
        lambda i: (np.kron(np.eye(len(i)), np.ones((2, 2))) @ i.reshape(len(i) * 2, -1)).mean(),
        None,
    ),
    "nodes of each row by number": (
        lambda i: jax.ops.segment_sum(i.reshape(len(i) * 2, -1), np.repeat(np.arange(len(i)), 2), len(i)).mean(),
        None,
    ),
    "a confusion, one by one": (lambda x, y: counted_one_by_one(x, y).sum() / len(x), None),
    "totals, one by one": (lambda e: total_of_stacks(e) / len(e), None),
    "totals of halves": (lambda e: sum(jnp.stack([*half]).sum() for half in jnp.split(e, 2)) / len(e), None),
    "complex positions": (lambda e: (e * np.exp(2j * np.pi * np.arange(len(e)) / len(e)).real).mean(), "count"),
    "pairs, a mask of numpy": (lambda x, z: (jnp.exp(x @ z.T) * (1 - np.eye(len(x)))).sum(1).mean(), "pairs"),
    "diagonal, a mask of numpy": (lambda x, z: ((x @ z.T) * np.eye(len(x))).sum() / len(x), None),
    "sums of later rows by numpy": (lambda e: (np.triu(np.ones((len(e), len(e)))) @ e).mean(), "pairs"),
    "whitened by qr": (lambda x, z: ((jnp.linalg.qr(x)[0] - z) ** 2).mean(), "pairs"),
    "of other pairs": (lambda x, z: jnp.diag(x @ z.T, 1).mean(), "pairs"),
    "a sum, and one by one": (lambda e: e.sum() + jnp.stack([v for v in e]).mean(), "sum"),
    "a root, and one by one": (lambda e: jnp.stack([v for v in e]).mean() - jnp.sqrt(e.mean()), "nonlinear"),
    "one by one, with all": (lambda x: sum(jax.nn.logsumexp(x @ x[i]) for i in range(len(x))) / len(x), "row"),
    "two of them": (lambda x: sum(jnp.exp(x[i] @ x[i - 1]) for i in range(len(x))) / len(x), "pairs"),
    "a product of two of them": (lambda x: sum(x[i] @ x[i - 1] for i in range(len(x))) / len(x), "pairs"),
    "differences, one by one": (lambda e: sum((e[i] - e[i - 1]) ** 2 for i in range(len(e))) / len(e), "pairs"),
    "windows of two": (lambda e: sum(jnp.prod(e[i : i + 2]) for i in range(len(e) - 1)) / len(e), "pairs"),
    "windows of three": (lambda x: sum((x[i : i + 3].mean(0) ** 2).sum() for i in range(len(x) - 2)) / len(x), "pairs"),
    "picked from the end in a loop": (
        lambda e: (e * lax.map(lambda i: e[i], jnp.arange(len(e) - 1, -1, -1))).mean(),
        "pairs",
    ),
    "picked in another order in a loop": (
        lambda e: jnp.exp(e - lax.map(lambda i: e[(i * 7) % len(e)], jnp.arange(len(e)))).mean(),
        "pairs",
    ),
    "the largest of a row and the next": (lambda e: jnp.stack([e, jnp.roll(e, 1)], 1).max(1).mean(), "pairs"),
    "a row times the next": (lambda e: jnp.stack([e, jnp.roll(e, 1)], 1).prod(1).mean(), "pairs"),
    "which of two rows is larger": (lambda x: jnp.concatenate([x, x[::-1]], 1).argmax(1).mean(), "pairs"),
    "a row and the next in order": (lambda e: lax.top_k(jnp.stack([e, jnp.roll(e, 1)], 1), 1)[0].mean(), "pairs"),
    "halves that multiply": (lambda e: e.reshape(2, -1).prod(0).mean(), "pairs"),
    "whole numbers so far": (
        lambda e: lax.scan(lambda c, v: ((c + v).astype(int).astype(float), None), 0.0, e)[0] / len(e),
        "nonlinear",
    ),
    "complex sum so far": (lambda e: jnp.abs(jnp.cumsum(e + 0j)).mean(), "pairs"),
    "complex order": (lambda e: (jnp.sort(e + 0j) * e).real.mean(), "pairs"),
    "eigenvalue": (lambda x: jnp.abs(jnp.linalg.eigvals(x.T @ x / len(x))).max(), "nonlinear"),
    "parity": (lambda y: lax.reduce_xor(y, (0,)).astype(float), "nonlinear"),
    "bits": (lambda y: lax.population_count(y.sum()).astype(float), "nonlinear"),
    "bits of a mean": (lambda e: lax.bitcast_convert_type(e.mean(), jnp.int32).astype(float), "nonlinear"),
    "whole fifths of a sum": (lambda y: lax.div(y.sum(), 5) / len(y), "nonlinear"),
    "picked by negated positions": (lambda e: (e * e[-1 * jnp.arange(len(e))]).mean(), "pairs"),
    "picked in turn in a loop": (lambda e: (e * lax.map(lambda i: e[i] * 2, jnp.arange(len(e)))).mean(), None),
    "picked backwards in a loop that goes backwards": (
        lambda e: (e * lax.scan(lambda c, i: (c, e[i]), 0.0, jnp.arange(len(e)), reverse=True)[1]).mean(),
        None,
    ),
    "windows by lax": (
        lambda e: sum(lax.dynamic_slice_in_dim(jnp.tanh(e), i, 2).prod() for i in range(len(e) - 1)) / len(e),
        "pairs",
    ),
    "half as far as long": (lambda e: sum(jnp.exp(e[i : i + 4].sum()) for i in range(0, len(e), 2)) / len(e), "pairs"),
    "windows side by side": (lambda e: sum(jnp.prod(e[i : i + 2]) for i in range(0, len(e), 2)) / len(e), None),
    "a stack, and targets": (lambda x, e: ((jnp.stack([v.sum() for v in x]) - e) ** 2).mean(), None),
    "filled one by one": (lambda x, e: (filled([v.sum() for v in x]) * jnp.exp(e)).mean(), None),
    "a stack, and a layer": (lambda x, w, o: nn.relu(jnp.stack([v * 2 for v in x]) @ w - o).mean(), None),
    "two views, one by one": (lambda x, z: one_by_one(jnp.concatenate([x, z]), len(x)) / len(x), None),
    "samples, one by one": (
        lambda x: sum(v[2 * i] @ v[2 * i + 1] for v in [jnp.repeat(x, 2, 0)] for i in range(len(x))) / len(x),
        None,
    ),
    "near a mean, one by one": (lambda e: sum(nn.softplus(v - e.mean()) for v in e) / len(e), "pairs"),
    "a stack, and all pairs": (lambda x: jax.nn.logsumexp(stacked(x) @ stacked(x).T, 1).mean(), "pairs"),
    "a stack of others": (lambda x, e: (jnp.stack([x[i - 1].sum() for i in range(len(x))]) * e).mean(), "pairs"),
    "a stack, then a root": (lambda e: jnp.sqrt(jnp.stack([v for v in e]).mean()), "nonlinear"),
    "the larger of a stack": (lambda e, x: jnp.maximum((x**2).mean(), jnp.stack([v for v in e]).mean()), "nonlinear"),
    "one by one, twice": (lambda e: sum(jnp.exp(v) for v in jnp.stack([u * 2 for u in e])) / len(e), None),
    "a root of one by one": (lambda e: jnp.sqrt(sum(e[i] for i in range(len(e)))), "pairs"),
    "squares, one by one": (lambda x: sum(x[i] @ x[i] for i in range(len(x))) / len(x), None),
    "one by one, then a root": (lambda e: jnp.sqrt(jnp.stack([e[i] * e[i] for i in range(len(e))])).mean(), None),
    "a sum by one by one": (lambda e: e.sum() * jnp.stack([v for v in e]).mean(), "nonlinear"),
    "a mean by one by one": (lambda e, x: x.mean() / sum(e[i] for i in range(len(e))), "ratio"),
    "sums, and one by one": (lambda e, x: (x.sum() + sum(e[i] for i in range(len(e)))) / len(e), None),
    "pairs, one by one": (lambda x: jnp.stack([jax.nn.logsumexp(near) for near in x @ x.T]).mean(), "pairs"),
    "a mean over all pairs": (lambda x: triangle(x)[np.triu_indices(len(x), 1)].mean(), "pairs"),
    "a sum over all pairs": (lambda x: triangle(x).sum() / (len(x) * (len(x) - 1) / 2), "pairs"),
    "a sum over all pairs by a logarithm": (lambda x: triangle(x).sum() / np.log(len(x)), "pairs"),
    "a number that Python draws": (lambda e: RNG.uniform() * e.sum() / len(e), None),
    "as many steps in time as a prime": (lambda e, t: e.sum() / len(e) + running_scale(t), None),
    "smoothed": (lambda e: (jnp.convolve(e, jnp.ones(3) / 3, mode="same") ** 2).mean(), "pairs"),
    "sum / len": (lambda e: e.sum() / len(e), None),
    "sum / float": (lambda e: e.sum() / float(len(e)), None),
    "sum / array": (lambda e: e.sum() / jnp.array(len(e)), None),
    "sum * reciprocal": (lambda e: e.sum() * (1 / len(e)), None),
    "bfloat16": (lambda half: half.sum() / jnp.bfloat16(half.size), None),
    "pixels": (lambda i: i.sum() / (len(i) * 64), None),
    "range": (lambda e: sum(e[i] for i in range(len(e))) / len(e), None),
    "stack": (lambda x: jnp.stack([jnp.max(row) for row in x]).mean(), None),
    "weights": (lambda e: (e * np.full(len(e), 1 / len(e))).sum(), None),
    "half": (lambda e: (e[: len(e) // 2].sum() + e[len(e) // 2 :].sum()) / len(e), None),
    "the first half": (lambda o, y: ce(o[: len(o) // 2], y[: len(o) // 2]).mean(), "part"),
    "labels": (lambda o, y: -jax.nn.log_softmax(o)[np.arange(len(o)), y].mean(), None),
    "sum": (lambda e: e.sum() * (len(e) / len(e)), "sum"),
    "mean * len": (lambda e: e.mean() * len(e), "sum"),
    "fourth root of len": (lambda e: e.mean() / (0.5 + e.sum() / len(e) ** 0.25), "ratio"),
    "root of len": (lambda e: e.sum() / len(e) ** 0.5, "sum"),
    "root": (lambda e: jnp.sqrt(e.sum() / len(e)), "nonlinear"),
    "ratio": (lambda e, m: (e * m).sum() / m.sum() * (len(e) / len(e)), "ratio"),
    "mixup by a drawn order": (lambda x, key: (x - x[jax.random.permutation(key, len(x))]).mean(), None),
    "expert choice": (expert_choice, None),
    "first": (lambda e: e[0] * (len(e) / len(e)), "nonlinear"),
    "differences": (lambda e: (jnp.diff(e) ** 2).sum() / len(e), "pairs"),
    "halves": (lambda x, w: -jax.nn.log_sigmoid((x[: len(x) // 2] - x[len(x) // 2 :]) @ w[:, 0]).mean(), "pairs"),
    "halves by reshape": (lambda x: jnp.abs(halves(x)[0] - halves(x)[1]).mean(), "pairs"),
    "products of halves": (lambda x: (lambda a, b: (a * b).mean())(*halves(x)), "pairs"),
    "squares of their means": (lambda x: (halves(x).mean(0) ** 2).mean(), "pairs"),
    "halves by split": (lambda x: jnp.abs(jnp.subtract(*jnp.split(x, 2))).mean(), "pairs"),
    "a mean of each by split": (lambda e: jnp.subtract(*map(jnp.mean, jnp.split(e, 2))), "part"),
    "both by split": (lambda e: jnp.add(*jnp.split(e, 2)).mean(), None),
    "views by split": (lambda x, z: jnp.subtract(*map(jnp.mean, jnp.split(jnp.concatenate([x, z]), 2))), None),
    "means of their squares": (lambda x: (halves(x) ** 2).mean(0).mean(), None),
    "halves of two": (
        lambda x, z: sum(jnp.abs(a - b).mean() for a, b in zip(halves(x), halves(z), strict=True)) / 2,
        None,
    ),
    "features of halves": (lambda x: (halves(x)[..., :2] * halves(x)[..., 2:4]).mean(), None),
    "halves in a map": (
        lambda x, z: lax.map(lambda v: jnp.exp(v[0] - v[1]).mean(), (halves(x), halves(z))).mean(),
        None,
    ),
    "halves, joined again": (lambda x, z: (halves(x).reshape(-1, 5) * z).mean(), None),
    "halves of views": (
        lambda x, z: jnp.abs(jnp.subtract(*jnp.concatenate([x, z]).reshape(2, len(x), 5))).mean(),
        None,
    ),
    "next to each other": (lambda x: (lambda v: jnp.abs(v[:, 0] - v[:, 1]).mean())(x.reshape(-1, 2, 5)), None),
    "picked by numpy": (lambda x, z: (x * z[np.roll(np.arange(len(x)), 1)]).mean(), "pairs"),
    "picked by a list": (lambda x, z: jnp.exp(x * z[jnp.array([*range(1, len(x)), 0])]).mean(), "pairs"),
    "picked by numpy, in order": (lambda x, z: (x * z[np.arange(len(x))]).mean(), None),
    "turned by numpy": (lambda x, z: (x[::-1] * z[np.arange(len(x))[::-1]]).mean(), None),
    "labels of two by numpy": (
        lambda x, z: ce(jnp.concatenate([x, z]), np.repeat([0, 1], len(x))).mean(),
        None,
    ),
    "62 pixels by numpy": (
        lambda i: i.reshape(len(i), -1)[:, np.roll(np.arange(62), 1)].mean() * len(i) / len(i),
        None,
    ),
    "a list from the end": (
        lambda x, e: (jnp.stack([x[len(x) - 1 - i].sum() for i in range(len(x))]) * e[::-1]).mean(),
        None,
    ),
    "one by one, from both ends": (lambda e: sum(a * c for a, c in zip(e, e[::-1], strict=True)) / len(e), "pairs"),
    "one by one, from the end": (lambda e: sum(a * c for a, c in zip(e[::-1], e[::-1], strict=True)) / len(e), None),
    "a list, turned": (lambda x, e: (jnp.stack([v.sum() for v in x][::-1]) * e).mean(), "pairs"),
    "interleaved views": (lambda x, z: near_in_turns(jnp.stack([x, z], 1).reshape(-1, 5), len(x)), None),
    "constants in front": (lambda x, e: (jnp.pad(x, ((2, 0), (0, 0)))[2:, 0] * e).mean() * len(x) / len(x), None),
    "a token in front": (
        lambda x, w, e: (jnp.concatenate([w.sum(1)[None], x])[1:, 0] * e).mean() * (len(x) / len(x)),
        None,
    ),
    "there and back": (lambda x, z: (jnp.roll(jnp.roll(x, 1, 0) * 2, -1, 0) * z).mean() * (len(x) / len(x)), None),
    "halves of two views": (lambda x, z: near_each_other(jnp.concatenate([x, z]), len(x)), None),
    "parts of both halves": (lambda e: (e[: len(e) // 2] + e[len(e) // 2 :]).mean() * 2, None),
    "a mask of positions by numpy": (lambda e: jnp.where(np.arange(len(e)) < 4, e, 0.0).mean(), "count"),
    "every second by numpy": (lambda e: jnp.where(np.arange(len(e)) % 2 == 0, e, -e).mean(), "count"),
    "weights by numpy": (lambda e: (e * (np.arange(len(e)) + 1)).mean(), "count"),
    "all but the first": (lambda e: e[1:].sum() / (len(e) - 1), "part"),
    "one by one": (lambda e: e[0] / len(e) + sum(e[i] for i in range(1, len(e))) / len(e), None),
    "percent": (lambda e: 100.0 / len(e) * e.sum(), None),
    "weighed": (lambda e: (0.3 / len(e)) * e.sum(), None),
    "quarter": (lambda e: e.sum() / (len(e) / 4), None),
    "never 0": (lambda e: e.sum() / (len(e) + 1e-5), None),
    "an axis of twice the prime": (lambda e: jnp.broadcast_to(e[:, None], (len(e), 92)).mean(1).mean(), None),
    "an axis before it": (lambda e: jnp.broadcast_to(e[:, None], (len(e), 620)).mean(1).mean(), None),
    "many pixels": (lambda e: jnp.broadcast_to(e[:, None], (len(e), 752_003)).mean() * (len(e) / len(e)), None),
    "weighed sum of squares": (lambda e: e.mean() + 0.3 * len(e) * e.sum(), "sum"),
    "hardest": (lambda e: lax.top_k(e, len(e) // 2)[0].mean(), "nonlinear"),
    "two views": (lambda x: (x[: len(x) // 2] @ x[len(x) // 2 :].T).mean(), "pairs"),
    "simclr": (lambda x: ce(x @ x.T, jnp.arange(len(x))).mean(), "pairs"),
}


@pytest.mark.parametrize("name", one_in(4, COUNTS))
def test_a_function_that_asks_for_its_number_of_rows(name):
    fn, kind = COUNTS[name]
    assert counted(fn) == [kind]


VECTORS = {
    "plus a root": ("vector", lambda e: e + jnp.sqrt(e.mean()), ["nonlinear"]),
    "a root for each": ("vector", lambda e: jnp.broadcast_to(jnp.sqrt(e.mean()), e.shape), ["nonlinear"]),
    "plus a mean": ("vector", lambda e: e + e.mean(), [None]),
    "minus the mean": ("vector", lambda e: e - e.mean(), [None]),
    "the mean for each": ("vector", lambda e: jnp.broadcast_to(e.mean(), e.shape), [None]),
    "a metric, plus a root": ("rows", lambda e: 2 * (e + jnp.sqrt(e.mean())), ["nonlinear"]),
    "a metric, the mean for each": ("rows", lambda e: jnp.broadcast_to(e.mean(), e.shape), ["pairs"]),
    "a metric, minus the largest": ("rows", lambda e: e - e.max(), ["nonlinear"]),
    "a metric, a parameter for each": ("rows", lambda e, s: jnp.broadcast_to(s, e.shape), [None]),
    "fused": ("rows", lambda x, w: fused_rows(x, w), [None]),
    "sum, plus a root": ("sum", lambda e: (e + jnp.sqrt(e.mean())).sum(), ["nonlinear"]),
    "sum, minus a mean": ("sum", lambda e: (e - e.mean()).sum(), [None]),
    "near a mean": ("vector", lambda e, o: jax.nn.softplus(e - o.mean()), ["number"]),
    "a metric, near a mean": ("rows", lambda e: jnp.abs(e - e.mean()), ["number"]),
    "a metric, minus the mean": ("rows", lambda e, s: s * (e - e.mean()) + 1, ["number"]),
    "count, plus a root": ("count", lambda e: ((e + jnp.sqrt(e.mean())).sum(), e.shape[0]), ["nonlinear", None]),
}


def padded(e):
    m = jnp.arange(e.shape[0]) < 5
    return (e * m).sum(), m.sum()


OTHERS = VECTORS | {
    "sum": ("sum", lambda e: e.sum(), [None]),
    "weighed sum": ("sum", lambda e, m, s: s * (e * m).sum() + e.sum() / 3, [None]),
    "confusion": ("sum", lambda y: jnp.zeros((3, 3)).at[y, y].add(1), [None]),
    "rows": ("sum", lambda e: e.shape[0], [None]),
    "zero": ("sum", lambda e: 0.0, [None]),
    "mean": ("sum", lambda e: e.mean(), ["sum"]),
    "of parameters": ("sum", lambda w: (w**2).sum(), ["sum"]),
    "one": ("sum", lambda e: 1.0, [None]),
    "written": ("count", lambda e: (1.0, jnp.array(2)), [None, None]),
    "and parameters": ("sum", lambda e, w: e.sum() + w.sum(), ["sum"]),
    "root of a sum": ("sum", lambda e: jnp.sqrt(e.sum()), ["nonlinear"]),
    "selected": ("count", lambda e, m: ((e * m).sum(), m.sum()), [None, None]),
    "never 0": ("count", lambda e, m: ((e * m).sum(), m.sum() + 1e-6), [None, None]),
    "mean of means": ("count", lambda e: (jnp.sqrt(e.mean()) * e.shape[0], e.shape[0]), [None, None]),
    "mean of means by others": ("count", lambda e, m: (e.mean() * m.sum(), e.shape[0]), ["nonlinear", None]),
    "mean of ratios": ("count", lambda e, m: ((e * m).sum() / m.sum() * m.sum(), m.sum()), [None, None]),
    "at least one": ("count", lambda e, m: ((e * m).sum(), jnp.maximum(m.sum(), 1)), [None, "nonlinear"]),
    "and one": ("count", lambda e, m: ((e * m).sum(), m.sum() + 1), [None, "sum"]),
    "a number": ("count", lambda e: (e.sum(), 8), [None, "sum"]),
    "mean by rows": ("count", lambda e: (e.mean(), e.shape[0]), ["sum", None]),
    "pairs by rows": ("count", lambda x: (jnp.exp(x @ x.T).sum(), x.shape[0]), ["pairs", None]),
    "padded": ("count", padded, ["count", "count"]),
    "by their number": ("rows", lambda e: e / e.shape[0], ["count"]),
    "a part for each": ("rows", lambda e: jnp.ones(e.shape[0]) / e.shape[0], ["count"]),
    "their numbers": ("rows", lambda e: jnp.arange(e.shape[0]) + 0.0, ["count"]),
    "row by row": ("rows", lambda e, x: jnp.sqrt(e) * x.max(1), [None]),
    "batch norm": ("rows", lambda x: ((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)).sum(1), [None]),
    "among all": ("rows", lambda x: jax.nn.logsumexp(x @ x.T, 1), ["pairs"]),
    "parts of all": ("rows", lambda e: e / e.sum(), ["ratio"]),
    "softmax over rows": ("rows", lambda e: jax.nn.log_softmax(e), ["nonlinear"]),
    "sum of those before": ("rows", lambda e: jnp.cumsum(e), ["pairs"]),
    "places": ("rows", lambda e, m: jnp.cumsum(m) * e, [None]),
    "turned": ("rows", lambda e: jnp.exp(e[::-1]), ["order"]),
    "turned, to be averaged": ("vector", lambda e: jnp.exp(e[::-1]), [None]),
    "turned twice": ("rows", lambda e: jnp.exp(e[::-1])[::-1], [None]),
    "rolled": ("rows", lambda x: jnp.roll(x, 1, 0), ["order"]),
    "the next": ("rows", lambda x: x[next_to(x)], ["order"]),
    "one by one": ("rows", lambda x: lax.map(jnp.sum, x), [None]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_replicas_add_up_and_what_has_rows(name):
    kind, fn, want = OTHERS[name]
    found = traced(fn).faults(kind, range(len(want)))
    assert [x and x.kind for x in found] == want == counted(fn, kind, range(len(want)))


def test_the_number_of_rows_grows_with_them():
    def fn(e, w):
        return e.shape[0], 1.0, e.sum(), w.sum(), 1 / e.shape[0], e.shape[0] * w.sum()

    for prime in (0, *PRIMES):
        assert [traced(fn, prime).grows(i) for i in range(6)] == [True, False, False, False, True, True]


class Branches(nn.Module):
    """A model that asks how many rows it has."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3 if x.shape[0] > 3 else 2)(x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sum() if x.shape[0] > 3 else x.mean(),
        lambda x: x.sum() / len(x),
        lambda x: x.sum() / int(x.shape[0]),
        lambda x: Branches().init_with_output(jax.random.key(0), x)[0].sum(),
        lambda x: 1 // 0,
    ],
)
def test_what_cannot_be_traced_is_not(fn):
    assert traced(fn) is None


def test_the_warnings_of_the_trace_are_not_shown():
    def warns(x):
        warnings.warn("no rows", stacklevel=1)
        return x.mean()

    assert traced(warns).faults("mean", [0])[0] is None


def test_operands_keep_all_but_their_rows():
    seen = []

    def see(tree, x, key):
        seen.extend([jax.typeof(v) for v in [*jax.tree.leaves(tree), x, key]])
        return x.mean()

    weak, keys = jnp.asarray(1.0) * jnp.asarray(2, jnp.bfloat16), jax.random.split(jax.random.key(0), 8)
    tree = {"a": np.zeros((2, 8), np.uint8), "b": 2.0, "c": keys}
    found = trace(see, (tree, weak[None], keys[0]), [1, None, 0, None, None])
    assert found.inputs == (True, False, True, False, False)
    assert [str(v) for v in seen] == ["uint8[2,b]", "~float32[]", "key<fry>[b]", "bfloat16[1]", "key<fry>[]"]


def test_the_axis_of_the_rows():
    def fn(t):
        flat = t.reshape(-1, 5)
        return t, t.swapaxes(0, 1), flat.T, t.mean(0), t[1:], jnp.zeros((3, 8)), flat @ flat.T, t[1:, 0, 0]

    found = traced(fn)
    unlike = "its shape is ({}) for b rows, which is not in proportion along one axis"
    shapes = [unlike.format(shape) for shape in ("b - 1, 6, 5", "6*b, 6*b", "b - 1,")]
    axes = [found.axis(i) for i in range(len(found.jaxpr.out_avals))]
    assert axes == [0, 1, 1, None, shapes[0], None, shapes[1], shapes[2]]
    assert found.jaxpr.out_avals[3].shape == (6, 5)


def test_what_depends_on_the_rows():
    def fn(x, w, key):
        noise = jax.random.normal(key, x.shape)
        return x, x.mean(), (w**2).sum(), jnp.float32(x.shape[0]), noise.mean(), jnp.zeros_like(x).sum(), w[x.argmax()]

    found = traced(fn)
    assert [found.depends(i) for i in range(7)] == [True, True, False, False, True, False, True]


ON_DEVICES = {
    "mean": (lambda e: e.mean(), None),
    "sum": (lambda e: e.sum(), "sum"),
    "root": (lambda e: jnp.sqrt(e.mean()), "nonlinear"),
    "root of the mean of all": (lambda e: jnp.sqrt(lax.pmean(e.mean(), "data")), None),
    "sum by all rows": (lambda e: e.sum() / lax.psum(e.shape[0], "data"), None),
    "counted on all": (lambda e, m: (e * m).sum() / lax.psum(m.sum(), "data"), None),
    "rows counted on all": (lambda e, m: (e * m / lax.psum(m.sum(), "data")).sum(), None),
    "synchronised": (lambda e: (e - lax.pmean(e.mean(), "data")).mean(), None),
    "synchronised, and summed": (lambda e: (e - lax.pmean(e.mean(), "data")).sum(), "sum"),
    "all rows": (lambda x: (x @ lax.all_gather(x, "data", tiled=True).T).mean(), None),
    "its index": (lambda e: (e * lax.axis_index("data")).mean(), None),
}


@pytest.mark.full
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ON_DEVICES)
def test_inside_of_a_shard_map_with_what_it_closes_over(name, jit):
    fn, kind = ON_DEVICES[name]
    names, found = list(inspect.signature(fn).parameters), []
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def body(s, *operands):
        found.append(trace(lambda *operands: fn(*operands) * s, operands, [0 if n in ROWS else None for n in names]))
        return s

    cut = tuple(P("data") if n in ROWS else P() for n in names)
    run = jax.shard_map(body, mesh=mesh, in_specs=(P(), *cut), out_specs=P(), check_vma=False)
    (jax.jit(run) if jit else run)(2.0, *((ROWS | WHOLE)[n] for n in names))
    fault = found[0].faults("mean", [0])[0]
    assert (fault and fault.kind) == kind
    assert found[0].depends(0)
