"""The law of losses: whatever a loss is, it gives the numbers of one device and the whole batch, or it is refused.

A random loss is a line of Python over what a small model puts out, as a user might write it: a falsifying example is
that line. Said on the chunk, `dp.value_and_grad(loss)`, it is refused on any number of devices alike, or its value, its
gradient and its metrics are those of `jax.value_and_grad` on one device. Said on the batch, `dp.value_and_grad(forward,
criterion=criterion)`, each of them is exact and none is refused.

On one device a `Mean` is its total divided by its count, a `Sum` its total, and a vector of rows its mean. All is
computed in float64: there a wrong weight shows in the first digits and rounding in the last ones, whatever a random
quotient or logarithm does to float32. The last law says the same of float32.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import one_in
from flax import nnx
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from laws import examples

import jdp

# ---------------------------------------------------------------------------------------------------------- models

WIDTH, WORDS, CLASSES = 4, 5, 3


def batch_of(rows, seed, dtype=np.float64):
    """Rows of which many do not count: `w` and `keep` may be nought on a whole chunk, and are not on the batch."""
    random = np.random.default_rng([seed, rows])
    keep = random.random(rows) < 0.4
    keep[rows // 2] = True
    return {
        "x": random.normal(size=(rows, WIDTH)).astype(dtype),
        "words": random.integers(0, WORDS, rows).astype(np.int32),
        "y": random.uniform(-1, 1, (rows, CLASSES)).astype(dtype),
        "label": random.integers(0, CLASSES, rows).astype(np.int32),
        "w": (keep * random.uniform(0.5, 2, rows)).astype(dtype),
        "keep": keep,
        "t": np.array(0.8, dtype),  # 0-d: whole on each replica
    }


def dense(params, batch):
    h = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"])
    return {"z": h, "u": jnp.sin(2 * h), "s": params["s"]}


def two_heads(params, batch):
    h = jnp.tanh(batch["x"] @ params["kernel"])
    return {"z": jnp.tanh(h @ params["z"]), "u": jnp.tanh(h @ params["u"]), "s": params["s"]}


class Conv(nn.Module):
    @nn.compact
    def __call__(self, batch):
        h = jnp.tanh(nn.Conv(CLASSES, (2,))(batch["x"][..., None]))
        s = self.param("s", nn.initializers.constant(0.3), ())
        return {"z": h.mean(1), "u": jnp.tanh(nn.Dense(CLASSES)(h[:, 0])), "s": s}


class Embedded(nnx.Module):
    def __init__(self):
        self.words = nnx.Param(jnp.ones((WORDS, CLASSES)))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(1))
        self.s = nnx.Param(jnp.float32(0.3))

    def __call__(self, batch):
        z = jnp.tanh(self.words[batch["words"]] + self.head(batch["x"]))
        return {"z": z, "u": jnp.cos(self.head(z @ jnp.ones((CLASSES, WIDTH), z.dtype) / 3)), "s": self.s[...]}


SHAPES = {
    "dense": {"kernel": (WIDTH, CLASSES), "bias": (CLASSES,), "s": ()},
    "two_heads": {"kernel": (WIDTH, 2), "z": (2, CLASSES), "u": (2, CLASSES), "s": ()},
    "conv": {
        "params": {
            "Conv_0": {"kernel": (2, 1, CLASSES), "bias": (CLASSES,)},
            "Dense_0": {"kernel": (CLASSES, CLASSES), "bias": (CLASSES,)},
            "s": (),
        }
    },
    "embed": {
        "words": (WORDS, CLASSES),
        "head": {"kernel": (WIDTH, CLASSES), "bias": (CLASSES,)},
        "s": (),
    },
}
MODULES = {"dense": lambda: dense, "two_heads": lambda: two_heads, "conv": Conv, "embed": Embedded}
MODELS = sorted(MODULES)


def weights(model, dtype=np.float64):
    random = np.random.default_rng(7)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: random.uniform(0.2, 0.9, shape).astype(dtype), SHAPES[model], is_leaf=is_shape)


def loaded(w):
    """An NNX model with these weights."""
    model = Embedded()
    nnx.update(model, jax.tree.map(jnp.asarray, w))
    return model


def outputs_of(model, apply, params, batch):
    """What the losses are made of: two matrices of rows, and two numbers that are the same on all rows."""
    out = params(batch) if model == "embed" else apply(params, batch)
    leaves = jax.tree.leaves(nnx.state(params, nnx.Param) if model == "embed" else params)
    return {**out, "l2": sum(jnp.sum(leaf**2) for leaf in leaves)}


# ---------------------------------------------------------------------------------------------------------- grammar


# Of each kind of expression the lines that it may be, the simplest first; {rows} stands for any line of the kind rows.
GRAMMAR = {
    "number": ["2", "0.5", "8", "np.float32(3)", "jnp.array(0.7)"],
    # a number that is the same for all rows
    "factor": ["{number}", "jnp.exp(-s)", "(1 + s**2)", "t", "(t * s)"],
    # (rows, classes)
    "matrix": ["(z - y) ** 2", "z * u", "jnp.abs(u - y)", "jnp.exp(z)", "jax.nn.softmax(z)"],
    # (rows,), positive and of the order of one
    "rows": [
        "jnp.sum((z - y) ** 2, 1)",
        "jnp.mean(jnp.abs(u - y), 1)",
        "optax.softmax_cross_entropy_with_integer_labels(z, label)",
        "jax.nn.softplus(u[:, 0])",
        "jax.nn.logsumexp(z, 1)",
        "-jax.nn.log_softmax(u)[jnp.arange(b), label]",
        "({rows} * {rows})",
        "({rows} + {factor} * {rows})",
        "({rows} / (1 + {rows}))",
        "jnp.sqrt({rows} + 0.5)",
        "jnp.log1p({rows})",
        "jnp.exp(-{rows})",
        "jnp.maximum({rows}, 0.4)",
        "jnp.where(keep, {rows}, 0.1)",
        "({rows} * w + 0.2)",
    ],
    # all pairs of rows
    "pairs": [
        "z @ u.T",
        "jnp.einsum('ik,jk->ij', z, u)",
        "jnp.abs({rows}[:, None] - {rows}[None] + 0.1)",
        "jnp.sum((z[:, None] - u[None]) ** 2, -1)",
        "jnp.where(jnp.eye(b, dtype=bool), 0.0, z @ z.T)",
    ],
    # a sum over rows, and what may be a count of them
    "total": [
        "jnp.sum({rows})",
        "jnp.sum({rows} * keep)",
        "jnp.sum({matrix})",
        "jnp.where(keep[:, None], {matrix}, 0.0).sum()",
        "jnp.vdot({rows}, w)",
        "jnp.einsum('ij,i->', z, {rows})",
        "({factor} * jnp.sum({rows}) + jnp.sum({matrix}))",
    ],
    "count": ["b", "jnp.sum(w)", "jnp.sum(keep)", "z.size", "jnp.count_nonzero(keep)", "jnp.sum({rows})"],
    # a mean over rows
    "mean": [
        "jnp.mean({rows})",
        "jnp.mean({matrix})",
        "jnp.sum({rows}) / b",
        "jnp.sum({rows} / b)",
        "{factor} * jnp.mean({rows})",
        "(jnp.mean({rows}) + {number} * jnp.mean({matrix}))",
        "(jnp.mean({rows}) - jnp.sum({matrix}) / z.size)",
        "-jnp.mean({rows})",
        "jnp.vdot({rows}, w) / b",
        "jnp.einsum('ij,ij->', z, {matrix}) / z.shape[0]",
        "jnp.mean({matrix}, 0).sum()",
        "(jnp.mean({rows}) + 0.01 * l2)",
        "jnp.where(keep, {rows}, 0.0).mean()",
        "jnp.mean(jnp.where(keep[:, None], {matrix}, 0.0))",
        "jnp.sum({rows}) / len(z)",
        "jnp.sum({matrix}) / float(z.size)",
        "jnp.stack([row for row in {rows}]).mean()",
        "jnp.mean(jnp.diag(z @ u.T))",
        "jnp.trace(jnp.exp(z @ u.T)) / b",
        "jax.lax.scan(lambda total, row: (total + row, None), 0.0 * s, {rows})[0] / b",
    ],
    # a number that is none, but for a few that are by chance
    "no mean": [
        "jnp.sum({rows})",
        "{total} / {number}",
        "jnp.mean({rows}) * b",
        "jnp.mean({rows}) / b",
        "(jnp.mean({rows}) + 1 / b)",
        "jnp.sum({rows}) / (b + 1)",
        "{total} / jnp.sum(w)",
        "{total} / jnp.sum({rows})",
        "jnp.sum({rows} * keep) / jnp.maximum(jnp.sum(keep), 1)",
        "jnp.average({rows}, weights=w)",
        "jnp.mean({rows}, where=keep)",
        "jnp.sqrt(jnp.mean({rows}) + 0.1)",
        "jnp.log(jnp.mean({rows}) + 1)",
        "jnp.linalg.norm({rows})",
        "jnp.max({rows})",
        "jnp.max({matrix})",
        "jax.nn.logsumexp({rows})",
        "jnp.sum(jnp.mean({matrix}, 0) ** 2)",
        "jnp.sqrt(jnp.sum({matrix} * 0.1, 0) ** 2 + 1).sum()",
        "jnp.sqrt(jnp.mean({matrix}) ** 2 + jnp.mean({rows}))",
        "jnp.mean({pairs})",
        "jnp.max({pairs})",
        "jnp.sum({pairs}) / b",
        "jnp.mean(jax.nn.logsumexp({pairs}, 1))",
        "-jnp.mean(jnp.diag(jax.nn.log_softmax({pairs} * 2)))",
        "jnp.linalg.norm(z.T @ u + 1)",
        "(1 - 2 * jnp.sum({rows} * w) / (jnp.sum({rows}) + jnp.sum(w)))",
        "{rows}[0]",
        "jnp.mean(jnp.cumsum({rows}))",
        "jnp.sum({rows}) / b**0.5",
        "jnp.mean({rows}) * len(z)",
        "jnp.sqrt(jnp.sum({rows}) / len(z))",
        "jnp.mean(jax.nn.logsumexp({pairs} + jnp.arange(len(z)), 1))",
        "jax.lax.scan(lambda largest, row: (jnp.maximum(largest, row), None), s, {rows})[0]",
        "jax.lax.scan(lambda after, row: (0.9 * after + row, None), 0.0 * s, {rows}, reverse=True)[0]",
        "jnp.mean(jax.lax.associative_scan(jnp.maximum, {rows}))",
        "jnp.mean({rows} * jax.lax.associative_scan(jnp.add, {rows}, reverse=True))",
        "jnp.mean({rows} * jnp.exp(-jnp.mean({rows})))",
        "jnp.mean({rows} * (w / jnp.mean(w)))",
        "jnp.mean(({rows} - jnp.mean({rows})) * w)",
        "jnp.mean(jax.nn.softplus({rows} - jnp.mean({rows})))",
        "jnp.mean(jnp.maximum({rows}, jnp.mean({rows})))",
        "sum(jax.nn.logsumexp(u @ z[i]) for i in range(len(z))) / len(z)",
        "({no mean} + {mean})",
        "({factor} * {no mean})",
        "({no mean} * {mean})",
        "({mean} / (0.5 + {no mean} ** 2))",
        "jnp.maximum({no mean}, {mean})",
        "jnp.log1p({no mean} ** 2)",
        "jnp.where({no mean} > 1, {no mean}, {mean})",
    ],
    "term": [
        "Mean({total}, b)",
        "Mean({total}, {count})",
        "Mean(jnp.sum({rows} * w), jnp.sum(w))",
        "Sum({total})",
        "Mean({mean} * b, b)",
        "Mean({total}, len(z))",
    ],
    "sum of terms": [
        "{term} + {term}",
        "{term} - {number} * {term}",
        "{term} + {number} * {term} + {term} / 3",
        "-{term} + {term}",
        "sum([{term}, {term} * {number}, {term}])",
        "{factor} * {term} + s",
        "{factor} * ({term} + {term})",
        "{term} + {mean}",
        "{mean} + {factor} * {term}",
        "{term} + Rows({rows})",
        "Rows({rows}) + {number} * {term}",
        "({term} + 0.01 * l2) / 2",
    ],
    "no sum of terms": [
        "{term} * {term}",
        "{term} / {term}",
        "{term} ** 2",
        "{term} + {no mean}",
        "{no mean} + {term}",
        "{term} * {mean}",
        "jnp.sum({rows}) * {term}",
        "{term} / {no mean}",
    ],
    # what may stand beside a loss, and is none
    "metric": [
        "{rows}",
        "{matrix}",
        "z.T",
        "jnp.ravel(z)",
        "Mean(jnp.sum({matrix}, 0), {count})",
        "Sum(jnp.sum({matrix}, 0))",
        "Sum(z.T @ u)",
        "jnp.argmax(z, 1) == label",
        "jnp.mean(jnp.argmax(z, 1) == label)",
        "Mean(jnp.sum(jnp.argmax(z, 1) == label), b)",
        "Sum(jnp.sum(keep))",
        "{mean}",
        "{term}",
        "{sum of terms}",
    ],
    "no metric": [
        "{no mean}",
        "{no sum of terms}",
        "jnp.sum(keep)",
        "jnp.mean({matrix}, 0)",
        "z.T @ u",
        "{pairs}",
        "jnp.zeros(3).at[label].add(1.0)",
    ],
    "loss": ["Rows({rows})", "{mean}", "{mean}", "{term}", "{sum of terms}"],
    "no loss": ["{no mean}", "{no mean}", "{no mean}", "{no sum of terms}"],
}


PART = re.compile(r"\{([a-z ]+)\}")


IS_FAST = settings.default.max_examples < 30
DEPTH, METRICS = (1, 1) if IS_FAST else (2, 2)  # at most, of a random loss


def grown(draw, kind, depth=DEPTH):
    """A line of this kind; so deep are lines of one kind in others of the same."""
    lines = [line for line in GRAMMAR[kind] if depth or f"{{{kind}}}" not in line]
    part = lambda match: grown(draw, match[1], depth - (match[1] == kind))  # noqa: E731
    return re.sub(PART, part, draw(st.sampled_from(lines)))


@st.composite
def programs(draw):
    """The line of a loss and those of its metrics. At most one of them may be anything at all."""
    wrong = draw(st.sampled_from([None, None, None, "loss", "loss", "metric"]))
    loss = grown(draw, "no loss" if wrong == "loss" else "loss")
    metrics = [grown(draw, "metric") for _ in range(draw(st.integers(0, METRICS)))]
    return loss, (*metrics, grown(draw, "no metric")) if wrong == "metric" else tuple(metrics)


# ------------------------------------------------------------------------------------------- what a program means

FINISHED = {"Mean": lambda total, count: total / count, "Sum": lambda total: total, "Rows": jnp.mean}
ON_THE_CHUNK = {"Mean": jdp.Mean, "Sum": jdp.Sum, "Rows": lambda rows: rows}


def run(line, meaning, out, batch):
    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "b": out["z"].shape[0], **meaning, **out, **batch}
    return eval(line, names)


def evaluate(program, meaning, out, batch):
    """The loss and its metrics."""
    loss, metrics = program
    measured = {f"{i}: {line}": run(line, meaning, out, batch) for i, line in enumerate(metrics)}
    return run(loss, meaning, out, batch), measured


@functools.cache
def wrapper(model, n):
    return jdp.DataParallel(MODULES[model](), range(n))


def pure(tree):
    """A gradient as a dict, an NNX one too."""
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def whole(program, model, dtype, batch):
    """One device and the whole batch."""
    w = weights(model, dtype)
    module = None if model == "embed" else MODULES[model]()
    apply = getattr(module, "apply", module)
    if model == "embed":
        graph, w = nnx.split(loaded(w))

    def loss(w, batch):
        params = nnx.merge(graph, w) if model == "embed" else w
        return evaluate(program, FINISHED, outputs_of(model, apply, params, batch), batch)

    (value, metrics), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(w, batch)
    return value, pure(grad), metrics


def call(fn, model, dtype, batch):
    """A gradient of jdp's: the value, the gradient and the metrics."""
    w = weights(model, dtype)
    (value, metrics), grad = fn(loaded(w) if model == "embed" else w, batch)
    return value, pure(grad), metrics


def on_the_chunk(program, model, n, dtype, batch, steps):
    dp = wrapper(model, n)

    def loss(params, batch):
        out = outputs_of(model, None if model == "embed" else dp.apply, params, batch)
        return evaluate(program, ON_THE_CHUNK, out, batch)

    return call(dp.value_and_grad(loss, has_aux=True, accumulate_steps=steps), model, dtype, batch)


def by_criterion(program, model, n, dtype, batch, steps):
    dp = wrapper(model, n)

    def forward(params, batch):
        return outputs_of(model, None if model == "embed" else dp.apply, params, batch)

    def criterion(out, batch):
        return evaluate(program, FINISHED, out, batch)

    fn = dp.value_and_grad(forward, criterion=criterion, has_aux=True, accumulate_steps=steps)
    return call(fn, model, dtype, batch)


def verdict(call, *args):
    """What a call gives, or the type of its error, which is in jdp's own words."""
    try:
        return call(*args), None
    except (TypeError, ValueError) as error:
        assert str(error).startswith("jdp."), error
        return None, type(error)


TOLERANCE = {"float64": 1e-10, "float32": 1e-5}  # JAX has the mean of bools in float32


def assert_equal(got, want):
    """The same trees. A gradient may be the difference of large ones: its error is that of the largest number."""
    got, want = jax.tree.map(np.asarray, (got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(want))
    largest = max(1.0, *(float(np.max(np.abs(leaf), initial=0)) for leaf in jax.tree.leaves(want)))
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert g.shape == w.shape, f"{where}: {g.shape}, {w.shape} is right"
        np.testing.assert_allclose(g, w, rtol=0, atol=TOLERANCE.get(w.dtype.name, 0) * largest, err_msg=where)


# ---------------------------------------------------------------------------------------------------------- the law

seeds, models = st.integers(0, 99), st.sampled_from(MODELS)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@examples(15)
@given(programs(), models, st.integers(1, 33), seeds, st.sampled_from([np.float64, np.float64, np.float32]))
def test_a_loss_is_that_of_one_device_or_refused(n, steps, program, model, rows, seed, dtype):
    assume(seed)  # hypothesis begins with the simplest example, which would be the same one in each case
    with jax.enable_x64(dtype == np.float64):
        batch = batch_of(rows, seed, dtype)
        want = whole(program, model, dtype, batch)
        # XLA may compute a maximum twice, rounded in two ways: then its gradient is 0 / 0 in plain JAX, too. And of one
        # row the logarithm of a softmax over the rows is 0, by which others may be divided.
        may_be_infinite = "jnp.max(" in program[0] or rows == 1
        assume(not may_be_infinite or all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want)))
        if n % 2 == steps % 2 or not IS_FAST:
            assert_equal(by_criterion(program, model, n, dtype, batch, steps), want)
        got, refused = verdict(on_the_chunk, program, model, n, dtype, batch, steps)
        event("refused" if refused else "accepted")
        if not refused:
            assert_equal(got, want)
        if n > 1 and (steps == 1 or not IS_FAST):  # traced only, which tells as much, and is not compiled
            on_one = functools.partial(on_the_chunk, program, model, 1, dtype, batch, 1)
            assert verdict(jax.eval_shape, on_one)[1] == refused


@pytest.mark.full
@pytest.mark.parametrize("way", ["terms", "criterion"])
def test_32_bits_stay_32_bits_under_x64(way):
    """A Python number is of the dtype that it meets, also where JAX promotes nothing else."""
    w, x = np.float32([1, 2, 3]), np.random.RandomState(0).randn(7, 3).astype(np.float32)
    loss, options, whole = {
        "terms": (
            lambda w, x: jdp.Mean(jnp.sum(x @ w), len(x)) + 0.5 * jdp.Sum(jnp.sum(x @ w)),
            {},
            lambda w: jnp.mean(x @ w) + 0.5 * jnp.sum(x @ w),
        ),
        "criterion": (
            lambda w, x: x @ w,
            {"criterion": lambda out, x: jnp.sqrt(jnp.sum(out**2)), "accumulate_steps": 2},
            lambda w: jnp.sqrt(jnp.sum((x @ w) ** 2)),
        ),
    }[way]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = jdp.DataParallel(lambda w, x: x @ w, range(2)).value_and_grad(loss, **options)(w, x)
        want = jax.value_and_grad(whole)(w)
        for a, b in zip(found, want, strict=True):
            assert a.dtype == b.dtype == jnp.float32
            np.testing.assert_allclose(a, b, rtol=1e-5)


def traced(loss, metrics=(), n=1):
    """The type of the error at a trace of the gradient, which computes nothing."""
    batch = batch_of(6, 1, np.float32)
    return verdict(jax.eval_shape, lambda: on_the_chunk((loss, metrics), "dense", n, np.float32, batch, 1))[1]


def each(*kinds, one_of=1):
    """Each line of these kinds, with the simplest parts; the fast tier has one of so many."""

    def simplest(line):
        return re.sub(PART, lambda part: simplest(GRAMMAR[part[1]][0]), line)

    return pytest.mark.parametrize("line", one_in(one_of, [simplest(x) for kind in kinds for x in GRAMMAR[kind]]))


@each("mean", "term", "sum of terms")
def test_what_is_right_is_accepted(line):
    """As a loss and as a metric: the law would hold, too, if all were refused."""
    assert traced(line, (line.replace("Rows", ""),)) is None


@each("metric")
def test_a_metric_that_is_right_is_accepted(line):
    assert traced("l2", (line.replace("Rows", ""),)) is None


@each("no mean", "no sum of terms", one_of=3)
def test_what_is_wrong_is_refused(line):
    """As a loss and as a metric, on one device and on two."""
    errors = {traced(*program, n) for program in ((line, ()), ("l2", (line,))) for n in (1, 2)}
    assert len(errors) == 1 and None not in errors


@each("no metric")
def test_a_metric_that_is_wrong_is_refused(line):
    errors = {traced("l2", (line,), n) for n in (1, 2)}
    assert len(errors) == 1 and None not in errors


@pytest.mark.full
def test_enough_losses_are_accepted():
    """Of the random ones, and enough are refused."""
    seen = []

    @examples(300)
    @given(programs())
    def judge(program):
        seen.append(traced(*program) is None)

    judge()
    assert 1 / 3 < sum(seen) / len(seen) < 3 / 4


# --- what the errors say ---


def summed(w, x):
    return jnp.sum((x @ w) ** 2)


def weighted(w, x):
    return jnp.sum((x @ w) ** 2) / jnp.sum(x > 0)


def root(w, x):
    return jnp.sqrt(jnp.mean((x @ w) ** 2))


def contrastive(w, x):
    return jnp.mean(jax.nn.logsumexp((x @ w) @ (x @ w).T, 1))


W, X = np.ones((4, 2), np.float32), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


@pytest.mark.parametrize(
    "loss, way",
    [
        (summed, "jdp.Sum"),
        (summed, "criterion="),
        (weighted, "jdp.Mean"),
        (root, "criterion="),
        (contrastive, "criterion="),
    ],
)
def test_an_error_names_the_line_and_the_way_out(loss, way):
    """As a loss and as a metric, which is named; in a gradient and in a step."""
    dp = wrapper("dense", 2)
    step = dp.train_step(lambda v, x: loss(v["params"], x), optax.sgd(0.1))
    measured = dp.train_step(lambda v, x: (jnp.mean(x @ v["params"]), {"name": loss(v["params"], x)}), optax.sgd(0.1))
    state = step.init({"params": W})
    doors = {
        "value_and_grad": lambda: dp.value_and_grad(loss)(W, X),
        "train_step": lambda: step(state, X),
        "train_step: .*name": lambda: measured(state, X),
    }
    line = loss.__code__.co_firstlineno + 1
    for door, call in doors.items():
        with pytest.raises((TypeError, ValueError), match=rf"(?s)^jdp\.{door}.*{re.escape(way)}") as info:
            call()
        assert f"test_loss_law.py:{line}" in str(info.value)
