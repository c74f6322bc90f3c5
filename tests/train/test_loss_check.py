"""`step.check(state, batch)` is whether the step's loss gives on the devices what it gives on one, with all rows."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import close

import jdp

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(24, 3).astype(np.float32), RANDOM.randn(24, 2).astype(np.float32)
PARAMS = {"w": RANDOM.randn(3, 2).astype(np.float32), "b": np.zeros(2, np.float32)}
SGD = optax.sgd(0.1)
ROWS = pytest.mark.parametrize("rows", [8, 7])  # even chunks on two devices, and not


def model(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def error(variables, batch):
    return jnp.sum((model(variables["params"], batch["x"]) - batch["y"]) ** 2, 1)


def normed(variables, batch):
    """What no trace can tell from a BatchNorm and a mean: a loss that norms its rows."""
    out = model(variables["params"], batch["x"])
    return jnp.mean(((out - out.mean(0)) / (1 + out.var(0))) ** 2)


def batch(rows):
    return {"x": X[:rows], "y": Y[:rows]}


@functools.cache
def wrapper(n):
    return jdp.DataParallel(model, devices=range(n))


def checked(n, loss, rows, key=None, **options):
    step = wrapper(n).train_step(loss, SGD, **options)
    return step.check(step.init({"params": PARAMS}, key), batch(rows))


def says(check, *values):
    """That a check failed, and that its words hold these numbers."""
    assert isinstance(check, jdp.LossCheck) and not check
    found = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", str(check))]
    for value in values:
        assert any(np.isclose(value, number, rtol=1e-2, atol=1e-6) for number in found), (value, str(check))
    return True


RIGHT = {
    "a mean": lambda v, b: error(v, b).mean(),
    "rows": error,
    "terms": lambda v, b: jdp.Mean(error(v, b).sum(), len(b["x"])) + jdp.Sum(error(v, b).sum()) / 3,
    "metrics": lambda v, b: (error(v, b).mean(), {"rows": error(v, b), "sum": jdp.Sum(jnp.sum(b["y"] > 0))}),
}


@pytest.mark.one_case("rows-3-7", "metrics-3-7")
@pytest.mark.parametrize("n, rows", [(1, 5), (2, 8), (8, 5), (3, 7)])
@pytest.mark.parametrize("what", RIGHT)
def test_a_loss_that_is_right(what, n, rows):
    check = checked(n, RIGHT[what], rows)
    assert isinstance(check, jdp.LossCheck) and check, str(check)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_rounding_to_16_bits_is_no_fault(dtype):
    """A model that computes in 16 bits, with parameters and a loss in 32; and one of 16 bits altogether."""

    def loss(variables, batch):
        half = jax.tree.map(lambda leaf: leaf.astype(dtype), (variables["params"], batch["x"]))
        out = jax.nn.relu(model(*half) @ half[0]["w"].T) @ half[0]["w"]
        return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

    for rows in (24, 23):
        check = checked(4, loss, rows)
        assert check, str(check)


MARKED = {
    "a sum of what is no sum": lambda v, b: jdp.Sum(error(v, b).sum()) + jdp.Sum(jnp.sum(v["params"]["w"] ** 2)),
    "a count that is at least one": lambda v, b: jdp.Mean(
        jnp.sum(error(v, b) * (b["x"][:, 0] > 2)), jnp.maximum(jnp.sum(b["x"][:, 0] > 2), 1)
    ),
    "rows of pairs": lambda v, b: jax.nn.logsumexp(model(v["params"], b["x"]) @ model(v["params"], b["x"]).T, 1),
    "a cumulative sum": lambda v, b: jnp.cumsum(error(v, b)).mean(),
}


@pytest.mark.one_case("rows of pairs")
@pytest.mark.parametrize("what", MARKED)
def test_other_losses_that_are_wrong(what):
    """A step takes them or refuses them; a check never says that they are right."""
    try:
        check = checked(2, MARKED[what], 7)
    except (TypeError, ValueError) as refused:
        assert str(refused).startswith("jdp.")
    else:
        assert says(check) and "loss" in str(check)


def by_chunks(n, rows):
    """The mean of the losses of the chunks, weighted by their rows: what a step would train on."""
    size = -(-rows // n)
    parts = [batch(rows)["x"][i : i + size] for i in range(0, rows, size)]

    def loss(params):
        return sum(normed({"params": params}, {"x": x}) * len(x) / rows for x in parts)

    return jax.jit(jax.value_and_grad(loss))(PARAMS)


@pytest.mark.one_case("7")
@ROWS
def test_a_normalization_is_named_with_both_values(rows):
    """The loss and each leaf of the gradient: that of the devices, and that of one."""
    check = checked(2, normed, rows)
    text = str(check)
    for n in (1, 2):
        assert says(check, by_chunks(n, rows)[0])
    assert "loss" in text and "['w']" in text and "['b']" in text


def test_an_infinite_gradient_hides_no_other():
    """Of another parameter, at which the loss is not differentiable; both sides have that one."""
    step = wrapper(2).train_step(lambda v, b: normed(v, b) + jnp.sqrt(v["params"]["s"]), SGD)
    text = str(step.check(step.init({"params": {**PARAMS, "s": np.float32(0)}}), batch(7)))
    assert "gradient of params['w']" in text and "['s']" not in text
    metric = lambda v, b: jnp.stack([jnp.inf + 0 * normed(v, b), normed(v, b)])  # noqa: E731
    check = checked(2, lambda v, b: (error(v, b).mean(), {"two": jdp.Mean(metric(v, b) * len(b["x"]), len(b["x"]))}), 7)
    assert "most so at [1]" in str(check)


@pytest.mark.parametrize("steps, right", [(1, True), (2, False)])
def test_one_device(steps, right):
    """It has the whole batch, but for microbatches."""
    assert bool(checked(1, normed, 8, accumulate_steps=steps)) is right


def test_a_metric_is_named():
    check = checked(2, lambda v, b: (error(v, b).mean(), {"fine": error(v, b).mean(), "spread": normed(v, b)}), 7)
    assert says(check, by_chunks(1, 7)[0], by_chunks(2, 7)[0])
    assert "spread" in str(check) and "fine" not in str(check) and "['w']" not in str(check)


def centred(variables, batch):
    """A centre of the outputs in the state, as DINO has it."""
    centre = model(variables["params"], batch["x"]).mean(0)
    return error(variables, batch).mean(), {}, {"centre": {"value": centre}}


@pytest.mark.one_case
@pytest.mark.parametrize("reduce_state", ["mean", "primary"])
def test_an_update_is_named(reduce_state):
    dp = jdp.DataParallel(model, devices=range(2), reduce_state=reduce_state)
    step = dp.train_step(centred, SGD)
    state = step.init({"params": PARAMS, "centre": {"value": np.zeros(2, np.float32)}})
    check = step.check(state, batch(7))
    if reduce_state == "mean":
        assert check, str(check)
    else:
        assert says(check) and "centre" in str(check) and "['w']" not in str(check)


# --- it changes nothing ---


def test_nothing_is_changed(same):
    """Neither the state nor the batch, which is not donated either; the step after it is as without."""
    step = wrapper(2).train_step(normed, SGD, skip_nonfinite=True)
    state, rows = step.init({"params": PARAMS}), jax.tree.map(jnp.asarray, batch(7))
    before = jax.tree.map(lambda leaf: leaf.copy(), state)
    assert not step.check(state, rows)
    same(state, before)
    after, metrics = step(state, rows)
    want, want_metrics = step(before, batch(7))
    same((after, metrics), (want, want_metrics))


class Net(nnx.Module):
    def __init__(self, norm=True, drop=False):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, use_fast_variance=False, rngs=rngs) if norm else lambda x: x
        self.drop = nnx.Dropout(0.5, rngs=rngs) if drop else lambda x: x

    def __call__(self, x):
        return self.last(self.drop(nnx.tanh(self.norm(self.first(x)))))


def nnx_error(net, batch):
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)


def nnx_normed(net, batch):
    out = net(batch["x"])
    return jnp.mean(((out - out.mean(0)) / (1 + out.var(0))) ** 2)


@pytest.mark.one_case("False-nnx_normed")
@pytest.mark.parametrize("loss", [nnx_error, nnx_normed])
@pytest.mark.parametrize("norm", [True, False])
def test_nnx(same, loss, norm):
    """Batch normalization is synchronised in both; the model and the optimizer stay as they were."""
    dp = jdp.DataParallel(Net(norm), devices=range(3))
    step = dp.train_step(loss, optax.adam(0.1))
    step(batch(8))
    seen = lambda: nnx.as_pure(nnx.state((dp.module, step.optimizer)))  # noqa: E731
    before = jax.tree.map(np.array, seen())
    check = step.check(batch(7))
    assert bool(check) is (loss is nnx_error), str(check)
    assert check or ("loss" in str(check) and "kernel" in str(check))
    same(seen(), before)


def test_nnx_dropout_cannot_be_compared():
    dp = jdp.DataParallel(Net(drop=True), devices=range(2))
    check = dp.train_step(nnx_error, SGD).check(batch(8))
    assert not check and re.search("key|random|draw", str(check))
    assert int(jax.tree.leaves(nnx.state(dp.module, nnx.RngCount))[0]) == 0


# --- batch normalization ---


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=False, momentum=0.5, use_fast_variance=False)
        return nn.Dense(2)(nn.tanh(norm(nn.Dense(4)(x))))


@pytest.mark.one_case
@pytest.mark.parametrize("sync", [True, False])
@ROWS
def test_batch_norm_is_no_fault(rows, sync):
    """It is each replica's own in the step, as in torch, and synchronised in the check."""
    net = Normed()

    def loss(variables, batch):
        out, updates = net.apply(variables, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), {}, updates

    dp = jdp.DataParallel(net, devices=range(2))
    step = dp.train_step(loss, SGD, sync_batch_norm=sync)
    check = step.check(step.init(net.init(jax.random.key(0), X)), batch(rows))
    assert check, str(check)


# --- keys ---


def test_a_loss_that_draws_cannot_be_compared():
    def loss(variables, batch, key):
        return (error(variables, batch) * jax.random.bernoulli(key, 0.5, (len(batch["x"]),))).mean()

    check = checked(2, loss, 8, key=jax.random.key(0))
    assert not check and "key" in str(check)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("right", [True, False])
def test_a_loss_that_has_a_key_and_does_not_draw_is_compared(right):
    loss = error if right else normed
    check = checked(2, lambda v, b, key: loss(v, b), 7, key=jax.random.key(0))
    assert bool(check) is right
    assert right or "['w']" in str(check)


# --- the options of a step ---


@pytest.mark.full
def test_with_a_criterion():
    """A loss that norms its rows is exact there."""

    def spread(out, batch):
        return jnp.mean(((out - out.mean(0)) / (1 + out.var(0))) ** 2)

    check = checked(2, lambda v, b: model(v["params"], b["x"]), 7, criterion=spread, accumulate_steps=2)
    assert check, str(check)


OPTIONS = {
    "accumulate_steps": {"accumulate_steps": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_params": {"shard_params": True},
    "reduce_dtype": {"reduce_dtype": jnp.bfloat16},
    "skip_nonfinite": {"skip_nonfinite": True},
    "check_replicas": {"check_replicas": 1},
    "donate": {"donate": False},
    "deterministic": {"deterministic": True},
}


@pytest.mark.full
@pytest.mark.one_case("shard_params")
@pytest.mark.parametrize("option", OPTIONS)
def test_with_options(option):
    for loss in (error, normed):
        check = checked(2, loss, 7, **OPTIONS[option])
        assert bool(check) is (loss is error), str(check)


def test_in_axes_and_objects_of_the_batch():
    def loss(variables, batch):
        assert batch["kind"] == "squared"
        return error(variables, batch) * batch["classes"].sum()

    step = wrapper(2).train_step(loss, SGD, in_axes={"x": 0, "y": 0, "classes": None, "kind": None})
    rows = {**batch(7), "classes": np.float32([1, 2]), "kind": "squared"}
    check = step.check(step.init({"params": PARAMS}), rows)
    assert check, str(check)


def test_what_a_step_refuses_a_check_refuses():
    step = wrapper(2).train_step(lambda v, b: jnp.sqrt(error(v, b).mean()), SGD)
    state = step.init({"params": PARAMS})
    with pytest.raises((TypeError, ValueError), match="criterion="):
        step(state, batch(8))
    with pytest.raises((TypeError, ValueError), match="criterion="):
        step.check(step.init({"params": PARAMS}), batch(8))


@pytest.mark.full
def test_it_takes_the_step_on_rows_as_they_come():
    """The loss of the check's own text is that of the step."""
    step = wrapper(2).train_step(normed, SGD)
    state = step.init({"params": PARAMS})
    check = step.check(state, next(iter(wrapper(2).prefetch([batch(7)]))))
    assert says(check, float(step(state, batch(7))[1]["loss"]))
    close(by_chunks(2, 7)[0], step(step.init({"params": PARAMS}), batch(7))[1]["loss"])
