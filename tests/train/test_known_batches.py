"""A batch like one before goes straight to a step's program, and gives what it would have given with all steps."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
import jdp._train.step as door

X = np.arange(32, dtype=np.float32).reshape(16, 2) / 16


@contextlib.contextmanager
def straight(monkeypatch):
    """In here no batch may be looked at."""

    def refuse(*args, **kwargs):
        raise AssertionError("the batch was looked at")

    with monkeypatch.context() as patch:
        patch.setattr(door, "scatter_batch", refuse)
        yield


def loss_fn(variables, batch):
    leaves = [x for x in jax.tree.leaves(batch) if not isinstance(x, str)]
    return sum(jnp.mean(x * 1.0) * (i + 1) for i, x in enumerate(leaves)) * variables["params"]


def loss_of(batch):
    """What each step gives: its parameter stays 1."""
    return float(loss_fn({"params": 1.0}, jax.tree.map(np.asarray, batch)))


class Loop:
    def __init__(self, devices=8, **options):
        self.dp = jdp.DataParallel(lambda v, x: x, range(devices))
        self.step = self.dp.train_step(loss_fn, optax.sgd(0.0), **options)
        self.state = self.step.init({"params": np.float32(1)})

    def __call__(self, batch):
        self.state, metrics = self.step(self.state, batch)
        return float(metrics["loss"])


FORMS = {
    "array": lambda x: x,
    "dict": lambda x: {"x": x, "y": x[:, 0]},
    "tuple": lambda x: (x, {"y": x[:, 0].astype(np.int32)}),
    "number": lambda x: (x, 3),
    "device": lambda x: (jnp.asarray(x), x),
}


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", [1, 8])
def test_a_known_batch_is_not_looked_at(monkeypatch, form, devices):
    run, make = Loop(devices), FORMS[form]
    placed = form != "device"
    assert run(make(X)) == pytest.approx(loss_of(make(X)))
    with straight(monkeypatch) if placed else contextlib.nullcontext():
        for scale in (1, 2, 3):
            assert run(make(X * scale)) == pytest.approx(loss_of(make(X * scale)))
    with pytest.raises(AssertionError, match="looked at"), straight(monkeypatch):
        run(make(X[:8]))


def test_batches_of_a_loader_are_known(monkeypatch):
    run = Loop()
    batches = [{"x": X * i, "y": X[:, 0]} for i in range(4)]
    for i, batch in enumerate(run.dp.prefetch(batches)):
        with straight(monkeypatch) if i else contextlib.nullcontext():
            assert run(batch) == pytest.approx(loss_of(batches[i]))


@pytest.mark.full
def test_what_differs_is_another_batch():
    """Shapes, dtypes, trees, numbers and places, in turn and twice: each gives its own loss."""
    run = Loop()
    batches = [
        X,
        X[:13],
        X.astype(np.float16),
        X.astype(np.int32),
        X[:, :1],
        [X],
        {"x": X},
        {"y": X},
        (X, 1),
        (X, True),
        (X, 1.0),
        (X, 2),
        jdp.scatter(X),
        jdp.scatter({"x": X}),
        {"x": jdp.scatter(X)},
        jnp.asarray(X),
        jax.device_put(X, jax.devices()[0]),
        jdp.replicate(X),
    ]
    for _ in range(3):
        for batch in batches:
            plain = jdp.gather(batch) if isinstance(batch, jdp.Scattered) else batch
            plain = {"x": X} if isinstance(batch, dict) and isinstance(batch.get("x"), jdp.Scattered) else plain
            assert run(batch) == pytest.approx(loss_of(plain), rel=1e-3)


def test_axes_of_the_batch_are_kept():
    run = Loop(in_axes={"x": 1, "whole": None})
    for scale in (1, 2, 3):
        batch = {"x": X.T * scale, "whole": np.float32([scale])}
        assert run(batch) == pytest.approx(loss_of(batch))


def test_objects_in_a_batch_are_updated_by_each_step():
    class Count(nnx.Variable):
        pass

    class Seen(nnx.Module):
        def __init__(self):
            self.rows = Count(jnp.zeros(()))

    def loss_fn(variables, batch):
        batch["seen"].rows[...] += 1
        return jnp.mean(batch["x"]) * variables["params"]

    step = jdp.DataParallel(lambda v, x: x).train_step(loss_fn, optax.sgd(0.0))
    state, seen = step.init({"params": np.float32(1)}), Seen()
    for _ in range(3):
        state, _ = step(state, {"x": X, "seen": seen})
    assert float(seen.rows[...]) == 3


def test_a_known_batch_under_jit_and_in_explain():
    run = Loop(donate=False)
    for _ in range(2):
        expected = run(X)
    state, metrics = jax.jit(lambda state: run.step(state, X))(run.state)
    assert float(metrics["loss"]) == expected and isinstance(state, jdp.TrainState)
    (metrics,) = [jax.jit(lambda state, x: run.step(state, x)[1])(run.state, X)]
    assert float(metrics["loss"]) == expected
    assert "all-reduce" in str(jdp.explain(run.step, run.state, X))
    assert run.step.check(run.state, X)


def test_errors_are_those_of_a_batch_that_is_not_known():
    run = Loop(2)
    for _ in range(2):
        run(np.ones((2,), np.float32))
        with pytest.raises(TypeError, match="legacy PRNG key"):
            run(np.ones((2,), np.uint32))
        with pytest.raises(ValueError, match="has 0 rows"):
            run(np.ones((0, 2), np.float32))
        with pytest.raises(TypeError, match="holds batches or rows"):
            run(iter([X]))
