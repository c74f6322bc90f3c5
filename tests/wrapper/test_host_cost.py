"""What Python does for a call and for a step does not grow with the leaves, nor with the devices: counts, no times."""

import gc
import sys

import jax
import numpy as np
import optax
import pytest

import jdp
from jdp._core.programs import STEPS_IN_FLIGHT


def model(variables, x):
    return x * sum(variables["params"].values())


def loss_fn(variables, x):
    return ((model(variables, x) - 1) ** 2).mean()


def counted(call):
    """How many functions are called, of Python and of C, in one call of what was called before."""
    for _ in range(STEPS_IN_FLIGHT + 2):  # until each waits for one before it
        jax.block_until_ready(call())
    found = []
    gc.collect()
    gc.disable()
    for _ in range(3):  # the fewest: now and then something of another test is freed, in Python
        calls = []
        sys.setprofile(lambda frame, event, arg, calls=calls: calls.append(event) if "call" in event else None)
        try:
            out = call()
        finally:
            sys.setprofile(None)
        jax.block_until_ready(out)
        found.append(len(calls))
    gc.enable()
    return min(found)


def cost(kind, leaves, n, batch="scattered"):
    devices = jax.devices()[:n]
    dp = jdp.DataParallel(lambda variables, x: model(variables, x), devices)  # with no program of another test's
    variables = jdp.replicate({"params": {f"w{i:04}": np.float32(i) for i in range(leaves)}}, devices)
    x = np.ones(2 * n, np.float32)
    if batch == "scattered":
        (x,) = dp.prefetch([x])
    if kind == "apply":
        return counted(lambda: dp.apply(variables, x))
    step = dp.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(variables)

    def call():
        nonlocal state
        state, metrics = step(state, x)
        return metrics["loss"]

    return counted(call)


@pytest.mark.budget(8)  # a step of 100 leaves is traced
@pytest.mark.full
@pytest.mark.parametrize("batch", ["scattered", "numpy"])
@pytest.mark.parametrize("kind", ["apply", "step"])
def test_no_python_runs_for_each_leaf(kind, batch):
    few, many = (cost(kind, leaves, 2, batch) for leaves in (10, 100))
    # A loop that calls one function for each leaf makes it 90: a call asks each parameter where it lies.
    assert many - few < (20 if kind == "step" else 110)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["apply", "step"])
def test_no_python_runs_for_each_device(kind):
    # Not one alone, which waits for nothing: there nothing can deadlock.
    two, eight = (cost(kind, 10, n) for n in (2, 8))
    assert abs(eight - two) < 6


@pytest.mark.budget(6)  # a step of many leaves is traced
@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "limit"), [("apply", 220), ("step", 120)])
def test_a_call_is_few_calls_of_python(kind, limit):
    assert cost(kind, 100, 8) < limit


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 8])
def test_a_scattered_batch_is_known_again(n):
    """The layout of what came scattered is made once, and its arrays are those that run."""
    dp = jdp.DataParallel(lambda w, x, *, more=0: w * x + more, jax.devices()[:n])
    w = jdp.replicate(np.float32(2), dp.devices)
    (x,) = dp.prefetch([np.arange(4.0, dtype=np.float32)])
    for more in (1, 2, 1):
        np.testing.assert_array_equal(dp.apply(w, x, more=more), 2 * np.arange(4.0) + more)
    known = len(dp._config.layouts)
    (y,) = dp.prefetch([np.ones(4, np.float32)])
    np.testing.assert_array_equal(dp.apply(w, y, more=2), np.full(4, 4.0))
    assert len(dp._config.layouts) == known
    (z,) = dp.prefetch([np.ones(3, np.float32)])
    np.testing.assert_array_equal(dp.apply(w, z, more=2), np.full(3, 4.0))
    assert len(dp._config.layouts) == known + 1


def test_scattered_batches_of_other_shapes_are_refused_beside_arrays():
    """A known scattered batch beside rows that do not fit is an error as it was the first time."""
    dp = jdp.DataParallel(lambda w, x, y: w * x + y, jax.devices()[:2])
    (x,) = dp.prefetch([np.ones(4, np.float32)])
    np.testing.assert_array_equal(dp.apply(1.0, x, np.ones(4, np.float32)), np.full(4, 2.0))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"args\[1\] has 3 rows, what is scattered already has 4"):
            dp.apply(1.0, x, np.ones(3, np.float32))


def test_parameters_that_change_in_their_dict_are_seen():
    """Nothing is remembered of a tree, which may change in place between calls."""
    dp = jdp.DataParallel(model, jax.devices()[:2], output_device="sharded")
    variables = jdp.replicate({"params": {"a": np.float32(1), "b": np.float32(2)}}, dp.devices)
    x = np.ones(4, np.float32)
    np.testing.assert_array_equal(dp.apply(variables, x), np.full(4, 3.0))
    variables["params"]["b"] = np.float32(5)
    np.testing.assert_array_equal(dp.apply(variables, x), np.full(4, 6.0))
    variables["params"]["b"] = jax.device_put(np.float32(5), jax.devices()[1])
    with pytest.raises(RuntimeError, match="must have its parameters and buffers on device"):
        dp.apply(variables, x)


@pytest.mark.parametrize("params", [{}, {"params": {}}, (), None, [{}, ({},)]])
def test_no_parameters_at_all_live_nowhere(params):
    """Outputs go to the primary device then, as torch's do."""
    dp = jdp.DataParallel(lambda p, x: x + 1, jax.devices()[:2])
    out = dp.apply(params, np.zeros(4, np.float32))
    assert out.sharding.device_set == {dp.devices[0]}
    np.testing.assert_array_equal(out, np.ones(4))
