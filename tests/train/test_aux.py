"""What stands beside the loss: a mean over the rows, entries per row, a `Mean` or a `Sum`; sizes that are equal by
chance decide nothing, and an array that is none of these is refused."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from laws import close, examples

import jdp

W = np.float32(1.5)


@functools.cache
def wrapper(n):
    return jdp.DataParallel(lambda w, x: w * x, devices=range(n))


def plain(tree):
    """Of one device and all rows: a sum is what it holds, a mean its total over its count."""
    is_marker = lambda x: isinstance(x, jdp.Mean | jdp.Sum)  # noqa: E731
    value = lambda x: x.total / x.count if isinstance(x, jdp.Mean) else x.total if is_marker(x) else x  # noqa: E731
    return jax.tree.map(value, tree, is_leaf=is_marker)


# --- the law: 200 random shapes, many of them as long as a chunk has rows ---

KINDS = {
    "per row": lambda w, x: w * x,
    "turned": lambda w, x: jnp.moveaxis(w * x, 0, -1),
    "flat": lambda w, x: (w * x).reshape(-1, *x.shape[2:]),
    "flat to the end": lambda w, x: (w * x).ravel(),
    "mean": lambda w, x: jdp.Mean(jnp.sum(w * x, axis=0), x.shape[0]),
    "mean of all": lambda w, x: jnp.mean(x),
    "integers": lambda w, x: (x[:, 0] > 0).astype(jnp.int8),
    "bools": lambda w, x: x > 0,
    "sum": lambda w, x: jdp.Sum(jnp.sum(w * x, axis=0)),
    "hits": lambda w, x: jdp.Sum(jnp.sum(x > 0)),
    "table": lambda w, x: jdp.Sum(
        jnp.einsum("bi,bj->ij", *[(x.reshape(x.shape[0], -1) > k).astype(int) for k in (0, 1)])
    ),
    "small integers": lambda w, x: jdp.Sum(jnp.sum(x > 0, axis=0, dtype=jnp.uint8)),
    "ratio": lambda w, x: jdp.Mean(jnp.sum(x * (x > 0), axis=0), jnp.sum(0 * x, axis=0) + x.shape[0]),
    "share": lambda w, x: jdp.Mean(jnp.sum(x > 0), x.size),
    # `len` wants a number, which a trace with a symbolic number of rows has not: a few numbers tell then.
    "by length": lambda w, x: jdp.Mean(jnp.sum(w * x, axis=0), len(x)),
}
# Few numbers, so that a trailing axis is often as long as a chunk or a microbatch, or as there are devices.
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)
LEAVES = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), SHAPES), min_size=8, max_size=8)


@examples(26)  # of 8 arrays each
@given(
    leaves=LEAVES,
    n=st.sampled_from([1, 2, 3, 4, 8]),
    rows=st.integers(1, 16),
    steps=st.integers(1, 3),
    door=st.sampled_from(["value_and_grad", "train_step"]),
)
def test_what_stands_beside_the_loss_is_that_of_one_device(leaves, n, rows, steps, door):
    random = np.random.RandomState(rows)
    batch = [random.randn(rows, *shape).astype(np.float32) for _, shape in leaves]

    def measured(w, batch):
        out = {f"{i} {kind}": KINDS[kind](w, x) for i, ((kind, _), x) in enumerate(zip(leaves, batch, strict=True))}
        return jnp.mean(w * batch[0]), out

    loss, want = jax.jit(measured)(W, batch)
    dp = wrapper(n)
    if door == "value_and_grad":
        (got_loss, got), _ = dp.value_and_grad(measured, has_aux=True, accumulate_steps=steps)(W, batch)
    else:
        step = dp.train_step(lambda v, b: measured(v["params"], b), optax.sgd(0.1), accumulate_steps=steps)
        _, got = step(step.init({"params": W}), batch)
        got_loss = got.pop("loss")
    close((got_loss, got), (loss, plain(want)))


# What ends at a number of rows, or is padded to one: `k` is often the rows of a chunk or of a microbatch.
ENDS = {
    "first": lambda k, w, x: (w * x)[:k],
    "first of pairs": lambda k, w, x: (w * x).reshape(-1, 2)[:k],
    "last": lambda k, w, x: (w * x)[-k:],
    "at most": lambda k, w, x: jnp.zeros((min(k, len(x)),)),
    "at least": lambda k, w, x: jnp.zeros((max(k, len(x)),)).at[: len(x)].set(w * x[:, 0]),
    "every": lambda k, w, x: (w * x)[::k],
    "more": lambda k, w, x: jnp.concatenate([jnp.ones((k, 4)), w * x]),
}


@examples(100)
@given(
    kind=st.sampled_from(sorted(ENDS)),
    k=st.integers(1, 9),
    n=st.sampled_from([1, 2, 3, 4, 8]),
    rows=st.integers(1, 16),
    steps=st.integers(1, 2),
)
def test_what_ends_is_that_of_one_device_or_refused(kind, k, n, rows, steps):
    x = np.random.RandomState(rows).randn(rows, 4).astype(np.float32)

    def measured(w, x):
        return jnp.mean(w * x), ENDS[kind](k, w, x)

    # On one replica and in one microbatch it is what the function returned.
    try:
        (_, got), _ = wrapper(n).value_and_grad(measured, has_aux=True, accumulate_steps=steps)(W, x)
    except TypeError as error:
        assert re.search(r"aux is .* rows.*Return jdp\.Mean|aux is float32\[\d+, \d\]; with the loss", str(error))
        return
    close(got, measured(W, x)[1])


# --- the cases that this came from ---


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [16, 8, 3, 13, 2])
@pytest.mark.parametrize("classes", [7, 2])
def test_flattened_logits_are_gathered(rows, classes):
    """Five tokens a row: (rows * 5, classes), for even and uneven batches, and as many rows as classes."""
    x = np.random.RandomState(0).randn(rows, 5, 3).astype(np.float32)
    w = np.random.RandomState(1).randn(3, classes).astype(np.float32)

    def loss_fn(w, x):
        logits = (x @ w).reshape(-1, classes)
        return logits.mean(), logits

    close(wrapper(4).value_and_grad(loss_fn, has_aux=True)(w, x), jax.value_and_grad(loss_fn, has_aux=True)(w, x))


def test_confusion_matrix_is_a_sum():
    """3 classes and chunks of 3 rows, in a model that takes no other number of rows."""
    guess, truth = np.random.RandomState(0).randint(0, 3, (2, 12))

    def loss_fn(w, guess, truth):
        assert guess.shape[0] == 3
        table = jnp.zeros((3, 3), jnp.int32).at[truth, guess].add(1)
        return w * jnp.mean(guess * 1.0), {"table": jdp.Sum(table)}

    (_, aux), _ = wrapper(4).value_and_grad(loss_fn, has_aux=True)(W, guess, truth)
    want = np.zeros((3, 3), int)
    np.add.at(want, (truth, guess), 1)
    np.testing.assert_array_equal(aux["table"], want)


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 3, 8])
def test_sum_of_linen_and_nnx_steps(n):
    """Idle replicas and microbatches add nothing twice; the dtype of a float stays."""
    x = np.random.RandomState(0).randn(7, 4).astype(np.float32)

    def measured(y):
        return jnp.mean(y**2), {
            "hits": jdp.Sum(jnp.sum(y > 0)),
            "half": jdp.Sum(jnp.sum(y * 0 + 1, dtype=jnp.bfloat16)),
        }

    dense = nn.Dense(2)
    dp = jdp.DataParallel(dense, devices=range(n))
    variables = dense.init(jax.random.key(0), x)
    step = dp.train_step(lambda v, x: measured(dense.apply(v, x)), optax.sgd(0.1), accumulate_steps=2)
    _, metrics = step(step.init(variables), x)
    assert int(metrics["hits"]) == int(np.sum(np.asarray(dense.apply(variables, x)) > 0))
    assert metrics["hits"].dtype == jnp.int32 and metrics["half"].dtype == jnp.bfloat16 and float(metrics["half"]) == 14

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    want = int(np.sum(np.asarray(model(x)) > 0))
    dp = jdp.DataParallel(model, devices=range(n))
    metrics = dp.train_step(lambda m, x: measured(m(x)), optax.sgd(0.1), accumulate_steps=2)(x)
    assert int(metrics["hits"]) == want


def test_scalars_of_any_kind_may_be_marked():
    """Integers and bools, of JAX, NumPy and Python: each replica's is one summand."""
    values = {"int": 3, "bool": True, "float": 0.5, "numpy": np.int8(100), "jax": jnp.bool_(True)}

    def loss_fn(w, x):
        return jnp.mean(w * x), {k: (jdp.Sum(v), jdp.Mean(v, 2), jdp.Mean(1, v)) for k, v in values.items()}

    (_, aux), _ = wrapper(4).value_and_grad(loss_fn, has_aux=True)(W, np.ones(8, np.float32))
    for name, (total, mean, over) in aux.items():
        value = float(values[name])
        assert float(total) == 4 * value and float(mean) == value / 2, name
        np.testing.assert_allclose(over, 1 / value, rtol=1e-6, err_msg=name)


def test_a_loss_vector_follows_the_rows(refused):
    """Losses of 3 classes are no losses of 3 rows."""
    dp = wrapper(2)
    with refused(TypeError, "value_and_grad", r"the loss is float32\[3\] for 3 rows and for other numbers of them"):
        dp.value_and_grad(lambda w, x: w * jnp.mean(x, axis=0))(W, np.ones((6, 3), np.float32))
    loss, _ = dp.value_and_grad(lambda w, x: w * jnp.mean(x, axis=1))(W, np.ones((6, 3), np.float32))
    assert float(loss) == 1.5


def test_inside_a_replica_a_sum_is_its_total():
    def step(w, x):
        (_, aux), _ = wrapper(2).value_and_grad(lambda w, x: (jnp.mean(w * x), jdp.Sum(jnp.sum(x))), has_aux=True)(w, x)
        return aux

    np.testing.assert_array_equal(jax.pmap(step, "data", in_axes=(None, 0))(W, np.ones((8, 3), np.float32)), [3] * 8)


def test_groups_of_rows():
    """One entry for each pair of rows, in a model that takes even numbers only."""
    x = np.random.RandomState(0).randn(16, 3).astype(np.float32)

    def loss_fn(w, x):
        pairs = w * x[::2] * x[1::2]
        return jnp.mean(pairs), (pairs, jdp.Mean(jnp.sum(pairs, axis=0), len(pairs)))

    want = jax.value_and_grad(loss_fn, has_aux=True)(W, x)
    close(wrapper(4).value_and_grad(loss_fn, has_aux=True)(W, x), plain(want))


# --- where nothing tells ---


def square(w, x):
    return x @ x.T


def with_a_prefix(w, x):
    return jnp.concatenate([jnp.zeros((2, x.shape[1])), x])


def padded(w, x):
    return jnp.zeros((-(-len(x) // 8) * 8, 2)).at[: len(x)].set(x)


def for_four_rows(w, x):
    assert len(x) == 4
    return x


def of_the_first(count):
    return lambda w, x: x[:count]


def by_length(fn):
    """The same, for a number of rows that is a number."""

    @functools.wraps(fn)
    def by_length(w, x):
        assert len(x) >= 0
        return fn(w, x)

    return by_length


NOT_ALONG_ONE = " for b rows, which is not in proportion along one axis"
UNKNOWN = [
    (of_the_first(1), r"\['a'\] is float32\[1, 2\]; with the loss come"),
    (of_the_first(3), r"\['a'\] is float32\[3, 2\] for 4 rows, and its shape is \(min\(b, 3\), 2\)" + NOT_ALONG_ONE),
    (of_the_first(4), r"\['a'\] is float32\[4, 2\] for 4 rows, and its shape is \(min\(b, 4\), 2\)" + NOT_ALONG_ONE),
    (of_the_first(64), r"\['a'\] is float32\[4, 2\] for 4 rows, and its shape is \(min\(b, 64\), 2\)" + NOT_ALONG_ONE),
    (square, r"\['a'\] is float32\[4, 4\] for 4 rows, and its shape is \(b, b\)" + NOT_ALONG_ONE),
    (with_a_prefix, r"\['a'\] is float32\[6, 2\] for 4 rows, and its shape is \(b \+ 2, 2\)" + NOT_ALONG_ONE),
    (by_length(of_the_first(1)), r"\['a'\] is float32\[1, 2\] for 4 rows, and \[0, 2\] for 0 rows"),
    (by_length(of_the_first(3)), r"\['a'\] is float32\[3, 2\] for 4 rows, and \[0, 2\] for 0 rows"),
    (by_length(of_the_first(4)), r"\['a'\] is float32\[4, 2\] for 4 rows, and \[0, 2\] for 0 rows"),
    (by_length(of_the_first(6)), r"\['a'\] is float32\[4, 2\] for 4 rows, and \[6, 2\] for 8 rows"),
    (by_length(of_the_first(64)), r"\['a'\] is float32\[4, 2\] for 4 rows, and \[64, 2\] for 132 rows"),
    (by_length(square), r"\['a'\] is float32\[4, 4\] for 4 rows, and \[8, 8\] for 8 rows"),
    (by_length(with_a_prefix), r"\['a'\] is float32\[6, 2\] for 4 rows, and \[10, 2\] for 8 rows"),
    (padded, r"\['a'\] is float32\[8, 2\] for 4 rows, and \[8, 2\] for 8 rows"),
    (for_four_rows, r"\['a'\] is float32\[4, 2\] for 4 rows, and loss_fn fails for other numbers .*AssertionError"),
]


@pytest.mark.parametrize("fn, match", UNKNOWN, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("door", ["value_and_grad", "train_step"])
def test_what_cannot_be_told_is_refused(refused, fn, match, door):
    """By its path, and with both markers."""
    x, dp = np.ones((8, 2), np.float32), wrapper(2)
    root = "aux" if door == "value_and_grad" else "metrics"
    with refused(TypeError, door, root + match + r".*jdp\.Mean.*jdp\.Sum"):
        if door == "value_and_grad":
            dp.value_and_grad(lambda w, x: (jnp.mean(w * x), {"a": fn(w, x)}), has_aux=True)(W, x)
        else:
            step = dp.train_step(lambda v, x: (jnp.mean(v["params"] * x), {"a": fn(v, x)}), optax.sgd(0.1))
            step(step.init({"params": W}), x)


def test_in_a_model_for_one_number_of_rows_means_of_classes_are_marked_as_in_any_other(refused):
    """7 classes are not made of 4 rows."""

    def with_means(means):
        def loss_fn(w, x):
            assert len(x) == 4
            return jnp.mean(w * x), {"classes": means(x)}

        return wrapper(2).value_and_grad(loss_fn, has_aux=True)

    x = np.random.RandomState(0).randn(8, 7).astype(np.float32)
    (_, aux), _ = with_means(lambda x: jdp.Mean(jnp.sum(x, axis=0), len(x)))(W, x)
    close(aux["classes"], x.mean(0))
    with refused(TypeError, "value_and_grad", r"aux\['classes'\] is float32\[7\]; with the loss come .*jdp\.Mean"):
        with_means(lambda x: jnp.mean(x, axis=0))(W, x)


BY_CLASS = {
    "a confusion matrix": lambda x, y: jnp.zeros((3, 3)).at[y, y].add(1.0),
    "means": lambda x, y: jnp.mean(x, axis=0),
    "shares": lambda x, y: jnp.mean(jax.nn.one_hot(y, 4), axis=0),
    "maxima": lambda x, y: jnp.max(x, axis=0),
    "of 16 bits": lambda x, y: jnp.sum(x, axis=0, dtype=jnp.bfloat16),
    "integers": lambda x, y: jnp.zeros((3, 3), jnp.int32).at[y, y].add(1),
    "bools": lambda x, y: jnp.any(x > 0, axis=0),
    "complex": lambda x, y: jnp.sum(x, axis=0) * 1j,
    "constants": lambda x, y: jnp.arange(4.0),
}


@pytest.mark.parametrize("n, steps", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("kind", BY_CLASS)
def test_an_array_without_rows_is_marked_or_refused(refused, kind, n, steps):
    """Of any dtype, by either door, on one device too; 4 classes are not the 4 rows of a chunk or a microbatch."""
    x, y = np.random.RandomState(0).randn(8, 4).astype(np.float32), np.resize([0, 2, 1, 1], 8)
    match = r"\['a'\] is (b?float|int|bool|complex)\d*\[[34, ]+\]; with the loss come .*jdp\.Mean.*jdp\.Sum"
    with refused(TypeError, "value_and_grad", "aux" + match):
        wrapper(n).value_and_grad(
            lambda w, x, y: (jnp.mean(w * x), {"a": BY_CLASS[kind](x, y)}), has_aux=True, accumulate_steps=steps
        )(W, x, y)
    step = wrapper(n).train_step(
        lambda v, b: (jnp.mean(v["params"] * b[0]), {"a": BY_CLASS[kind](*b)}), optax.sgd(0.1), accumulate_steps=steps
    )
    with refused(TypeError, "train_step", "metrics" + match):
        step(step.init({"params": W}), (x, y))


@pytest.mark.parametrize("marker", [jdp.Sum, lambda x: jdp.Mean(x, 1.0), lambda x: jdp.Mean(1.0, x)])
def test_rows_in_a_marker(refused, marker):
    """Rows are summed before: replicas would add row 0 to row 4."""
    with refused(
        TypeError, "value_and_grad", r"aux\['a'\] is a jdp\.(Sum|Mean) of \[4\] for 4 rows, with rows along axis 0"
    ):
        wrapper(2).value_and_grad(lambda w, x: (jnp.mean(w * x), {"a": marker(x)}), has_aux=True)(
            W, np.ones(8, np.float32)
        )


@pytest.mark.parametrize("value", ["text", None, [1.0]])
def test_a_sum_of_what_is_no_number(refused, value):
    with refused(TypeError, "value_and_grad", r"aux\['a'\].*jdp\.Sum"):
        wrapper(2).value_and_grad(lambda w, x: (jnp.mean(w * x), {"a": jdp.Sum(value)}), has_aux=True)(
            W, np.ones(8, np.float32)
        )


@pytest.mark.parametrize("n, steps", [(1, 1), (2, 3), (4, 1), (8, 2)])
def test_a_sum_is_a_loss(n, steps):
    """That of all rows: of uneven chunks and microbatches, and where replicas have none."""
    x = np.arange(1, 6, dtype=np.float32)
    loss = lambda w, x: jdp.Sum(jnp.sum((w * x) ** 2))  # noqa: E731
    close(wrapper(n).value_and_grad(loss, accumulate_steps=steps)(W, x), (W**2 * 55, 2 * W * 55))
    step = wrapper(n).train_step(lambda v, x: loss(v["params"], x), optax.sgd(0.01), accumulate_steps=steps)
    state, metrics = step(step.init({"params": W}), x)
    close((metrics["loss"], state.params), (W**2 * 55, W - 0.01 * 2 * W * 55))


@pytest.mark.parametrize("rows", [8, 16])
def test_a_model_of_pairs_of_rows_has_its_row_axis_found(rows):
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)

    def loss_fn(w, x):
        pairs = x.reshape(-1, 2, 2) * w
        return pairs.mean(), {"per_class": jdp.Mean(jnp.full(4, pairs.sum()), pairs.size), "rows": x[:, 0] * w}

    (_, metrics), _ = jdp.DataParallel(lambda w, x: x, devices=[0, 1]).value_and_grad(loss_fn, has_aux=True)(1.0, x)
    np.testing.assert_allclose(metrics["per_class"], np.full(4, x.mean()), rtol=1e-6)
    np.testing.assert_array_equal(metrics["rows"], x[:, 0])
