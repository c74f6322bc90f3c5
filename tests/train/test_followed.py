"""How often a loss is traced: once for any number of rows, and once for each size of a chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp._train.followed import Followed

PARAMS = {"params": {"w": np.ones((4, 2), np.float32)}}


def batch(rows):
    return {"x": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) / 100}


def door(kind, dp, count):
    """A call of a batch, with a function that counts its traces."""

    def outputs(params, batch):
        count.append(batch["x"].shape[0])
        return batch["x"] @ params["params"]["w"]

    def mean(params, batch):
        return jnp.mean(outputs(params, batch) ** 2)

    if kind == "step":
        step = dp.train_step(mean, optax.sgd(0.1))
        state = [step.init(PARAMS)]

        def run(batch):
            state[0], metrics = step(state[0], batch)
            return metrics["loss"]

        return run
    criterion = None if kind == "grad" else lambda out, batch: jnp.mean(out**2)
    gradient = dp.value_and_grad(outputs if criterion else mean, criterion=criterion)
    return lambda batch: gradient(PARAMS, batch)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["grad", "criterion", "step"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_new_size_is_traced_once_for_each_size_of_a_chunk(kind, devices):
    count = []
    run = door(kind, jdp.DataParallel(lambda p, x: x, range(devices)), count)
    run(batch(16))
    assert len(count) == 2  # one of them for any number of rows
    for rows in (12, 13, 7, 3, 16):
        count.clear()
        run(batch(rows))
        sizes = {size for size in jdp.chunk_sizes(rows, devices) if size}
        assert sorted(count) == sorted(sizes - {4 if devices > 1 else 16} if rows == 16 else sizes)


def test_a_loss_of_other_types_is_traced_again():
    """What was found for one loss does not hold for others: of other shapes, dtypes, objects in the batch."""

    def loss(params, batch):
        x = batch["x"] @ params["params"]["w"]
        if batch["how"] == "sum" or batch["y"].dtype == np.int32 or batch["y"].shape[1] == 5:
            return x.sum() / 2
        return jnp.mean(x)

    gradient = jdp.DataParallel(lambda p, x: x, range(4)).value_and_grad(loss)
    right = {"how": "mean", "y": np.ones((16, 3), np.float32)}
    for other in ({"how": "sum"}, {"y": np.ones((16, 3), np.int32)}, {"y": np.ones((16, 5), np.float32)}):
        gradient(PARAMS, batch(16) | right)
        with pytest.raises(TypeError, match="a sum over the rows"):
            gradient(PARAMS, batch(16) | right | other)


def test_where_a_python_value_stands_is_part_of_what_is_known():
    def loss(params, batch):
        x = batch["b"]  # which is read in any case
        x = x if isinstance(batch["a"], str) else batch["a"]
        total = jnp.sum(x @ params["params"]["w"])
        return total / len(jax.tree.leaves(x)) if isinstance(batch["a"], str) else total / x.shape[0]

    gradient = jdp.DataParallel(lambda p, x: x, range(4)).value_and_grad(loss)
    x = batch(16)["x"]
    for _ in range(2):
        gradient(PARAMS, {"a": x, "b": "none"})
        with pytest.raises(TypeError, match="a sum over the rows"):
            gradient(PARAMS, {"a": "none", "b": x})


def test_values_of_a_program_around_it_are_not_kept():
    traces = {}

    def follow(scale, x):
        followed = Followed(scale, 4, 4, lambda x: jnp.mean(x) * scale, (x,), [0], traces)
        return followed.depends(0) * scale

    assert jax.jit(follow)(2.0, np.ones(4, np.float32)) == 2
    assert not traces
    assert follow(2.0, np.ones(4, np.float32)) == 2
    assert [*traces] == [0]


def test_a_loss_of_such_values_is_right_for_each_size():
    cell = [None]

    def loss(params, batch):
        x = (batch["x"] @ params["params"]["w"]) * cell[0]
        return jnp.mean(x**2) * (cell[0] + 1)

    gradient = jdp.DataParallel(lambda p, x: x, range(4)).value_and_grad(loss)

    def outer(scale, batch):
        cell[0] = scale
        return gradient(PARAMS, batch)

    for rows in (16, 12, 13):
        found = jax.jit(outer)(2.0, batch(rows))
        cell[0] = 2.0
        expected = jax.value_and_grad(loss)(PARAMS, batch(rows))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)


@pytest.mark.one_case
@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_rows_in_groups_are_followed(size):
    """Answers to one prompt stand together, as in GRPO: there are 4 prompts."""
    x = np.random.default_rng(0).normal(size=(4 * size, 4)).astype(np.float32)
    w, dp = np.ones((4, 2), np.float32), jdp.DataParallel(lambda w, x: x @ w, devices=range(2))

    def of(std, total):
        def loss(w, x):
            rewards = x[:, 0].reshape(-1, size)
            advantages = (rewards - rewards.mean(1, keepdims=True)) / (std(rewards) + 1e-4)
            return total(jax.nn.log_softmax(x @ w)[:, 0] * advantages.reshape(-1))

        return loss

    by_group = lambda r: r.std(1, keepdims=True)  # noqa: E731
    right = of(by_group, jnp.mean)
    got, want = dp.value_and_grad(right)(w, x), jax.value_and_grad(right)(w, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
    for wrong in (of(by_group, jnp.sum), of(jnp.std, jnp.mean)):
        with pytest.raises(TypeError, match="a scalar counts as the mean"):
            dp.value_and_grad(wrong)(w, x)


@pytest.mark.one_case
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("rows", [8, 12])
def test_every_second_row_needs_a_multiple_of_two(rows, devices):
    """Of chunks of 3 rows these are other rows than of the batch; of two entries for each row it is one of each."""
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    w, dp = np.ones(4, np.float32), jdp.DataParallel(lambda w, x: x @ w, devices=range(devices))

    def of_two(w, x):
        twice = jnp.repeat(x @ w, 2)
        return jax.nn.softplus(twice[::2] - 0.5 * twice[1::2]).sum() / len(x)

    losses = [lambda w, x: jax.nn.softplus((x @ w)[::2] - (x @ w)[1::2]).mean(), of_two]
    for loss, is_cut in zip(losses, [rows / devices % 2, False], strict=True):
        if is_cut:
            with pytest.raises(
                TypeError, match=r"made of every second row .* no multiple of that \(slice at test_followed"
            ):
                dp.value_and_grad(loss)(w, x)
            continue
        for got, want in zip(dp.value_and_grad(loss)(w, x), jax.value_and_grad(loss)(w, x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_chunk_of_one_row_is_not_broadcast_to_the_rows_of_another_array(devices, refused):
    """Shapes fit by chance: with more rows in a chunk JAX raises an error. A function for one row alone is accepted."""
    rng = np.random.default_rng(0)
    w, x, t = (rng.normal(size=s).astype(np.float32) for s in ((4, 3), (devices, 4), (devices, 3)))
    dp = jdp.DataParallel(lambda w, x: x @ w, devices=range(devices))

    def closed_over(w, x):
        return ((x @ w - t) ** 2).mean()

    def of_one_row(w, x):
        return (jnp.squeeze(x, 0) @ w).mean()

    text = f"made of 1 row, .* an array of all {devices} rows, which is not cut"
    with refused(TypeError, "value_and_grad", text):
        dp.value_and_grad(closed_over)(w, x)
    with refused(TypeError, "value_and_grad", text):
        dp.value_and_grad(lambda w, x, t: ((x @ w - t) ** 2).mean(), in_axes=(0, None))(w, x, t)
    with refused(TypeError, "evaluate", text):
        dp.evaluate(lambda w, x: {"loss": jdp.Sum(closed_over(w, x))}, w, [x])
    np.testing.assert_allclose(dp.value_and_grad(of_one_row)(w, x)[0], (x @ w).mean(), rtol=1e-5)


class Every:
    """A model that centres its rows by every second one of them."""

    def __call__(self, v):
        return jnp.tanh(v - v[::2].mean(0))


def test_what_a_module_takes_of_its_rows_is_its_own():
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    w, dp, every = np.ones((3, 2), np.float32), jdp.DataParallel(lambda w, x: x @ w, devices=range(2)), Every()
    loss, _ = dp.value_and_grad(lambda w, x: every(x @ w).mean())(w, x)
    np.testing.assert_allclose(loss, np.mean([every(chunk @ w).mean() for chunk in (x[:3], x[3:])]), rtol=1e-5)
    with pytest.raises(TypeError, match="made of every second row"):
        dp.value_and_grad(lambda w, x: jnp.tanh((x @ w)[::2]).mean())(w, x)
