"""A known step, whose program runs at once, is the same step: its numbers, its state, its errors."""

import contextlib
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp._train import step as step_module

X = np.arange(12, dtype=np.float32).reshape(6, 2) / 10
Y = 2 * X.sum(1) + 1


def model(v, x):
    return x @ v["params"]["w"] + v["params"]["b"]


def variables():
    return {"params": {"w": jnp.ones(2), "b": jnp.zeros(())}}


def step_on(devices, **options):
    dp = jdp.DataParallel(model, devices=devices)
    return dp.train_step(lambda v, batch: ((dp(v, batch["x"]) - batch["y"]) ** 2).mean(), optax.adam(0.1), **options)


def by_hand(batches):
    tx, params = optax.adam(0.1), variables()["params"]
    opt_state, losses = tx.init(params), []
    for batch in batches:
        loss, grads = jax.value_and_grad(lambda p, b=batch: ((model({"params": p}, b["x"]) - b["y"]) ** 2).mean())(
            params
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, losses


@pytest.fixture
def again(monkeypatch):
    """Counts the steps that ran at once."""
    found = []
    run_known_step = step_module.run_known_step

    def counted(*args):
        out = run_known_step(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(step_module, "run_known_step", counted)
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_even_and_uneven_batches_in_turn(n, donate, again):
    batches = [{"x": X[:rows] + i, "y": Y[:rows] - i} for i, rows in enumerate((4, 4, 3, 4, 3, 3, 5, 5, 4))]
    step = step_on(range(n), donate=donate)
    state, losses = step.init(variables()), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    params, expected = by_hand(batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, params)
    assert sum(again) == 6  # all but the first of each size


@pytest.mark.one_case
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("other", ["rows", "padded", "dtype", "jax", "number"])
def test_an_uneven_batch_is_known_by_all_of_its_arrays(n, other, again):
    """JAX sees the padded arrays alone: a batch that pads to the same shapes is told from the known one here."""
    step = step_on(range(n))
    state = step.init(variables())
    for _ in range(2):
        state, _ = step(state, {"x": X[:3], "y": Y[:3]})
    assert again == [True]
    half, of_jax = Y[:3].astype(np.float16), jnp.asarray(Y[:3])
    labels = {"rows": Y[:2], "padded": Y[:4], "dtype": half, "jax": of_jax, "number": 1.0}[other]
    if np.shape(labels) in ((), (3,)):
        expected = float(((model({"params": jax.device_get(state.params)}, X[:3]) - labels) ** 2).mean())
        state, metrics = step(state, {"x": X[:3], "y": labels})
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-3)
    else:
        with pytest.raises(ValueError, match="rows"):
            step(state, {"x": X[:3], "y": labels})
    assert again == [True, False]


def test_what_differs_takes_the_usual_way(again):
    """Another dtype, a batch that is on the devices, a state that was changed in place, another state, shards."""
    step = step_on([0, 1])
    state = step.init(variables())
    batch = {"x": X[:4], "y": Y[:4]}
    for _ in range(3):
        state, _ = step(state, batch)
    assert again[-1]
    for other in (jax.tree.map(jnp.asarray, batch), {"x": X[:4].astype(np.float16), "y": Y[:4]}):
        kept = jax.tree.map(jnp.copy, state)
        expected = step(kept, batch)[1]["loss"]
        state, metrics = step(jax.tree.map(jnp.copy, state), other)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-2)
    state, _ = step(state, batch)
    state.params["b"] = jnp.full((), 3.0)
    loss = float(((model({"params": jax.device_get(state.params)}, X[:4]) - Y[:4]) ** 2).mean())
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


def test_a_batch_that_holds_an_array_of_the_state():
    step = step_on([0, 1])
    state = step.init({"params": {"w": jnp.ones(2), "b": jnp.zeros(())}})
    for i in range(3):
        batch = {"x": jnp.stack([state.params["w"]] * 2), "y": state.params["w"]}
        expected = float(((model({"params": jax.device_get(state.params)}, batch["x"]) - batch["y"]) ** 2).mean())
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4, err_msg=str(i))


@pytest.mark.parametrize("n", [1, 2])
def test_a_state_that_was_freed_is_named(n):
    step = step_on(range(n))
    state = step.init(variables())
    for _ in range(3):
        state, _ = step(state, {"x": X[:4], "y": Y[:4]})
    state.params["w"].delete()
    with pytest.raises(RuntimeError, match=r"jdp\.train_step: state\.params\['w'\] was donated"):
        step(state, {"x": X[:4], "y": Y[:4]})


@pytest.mark.full
def test_inside_of_a_transformation_and_of_a_mesh(again):
    step = step_on([0, 1], donate=False)
    state = step.init(variables())
    batch = {"x": X[:4], "y": Y[:4]}
    for _ in range(3):
        state, metrics = step(state, batch)
    last = again[-1]
    traced = jax.jit(lambda: step(state, batch)[1]["loss"])()
    with jax.set_mesh(jax.make_mesh((2,), ("other",), devices=jax.devices()[:2])):
        around = step(state, batch)[1]["loss"]
    kept = step.last
    with jax.disable_jit():
        plain = step(state, batch)[1]["loss"]
    assert last and kept is not state
    np.testing.assert_allclose([traced, around], plain, rtol=1e-5)


def ran(n, change, **options):
    """A step that is known, then one that differs: its loss, and that of a step that has not run before."""
    batch = {"x": X[:4], "y": Y[:4]}
    step, fresh = step_on(range(n), **options), step_on(range(n), **options)
    state = step.init(variables())
    for _ in range(3):
        state, _ = step(state, batch)
    copy = jax.tree.map(lambda x: np.array(x), state)
    with change.get("around", contextlib.nullcontext()):
        batch = change.get("batch", lambda b: b)(batch)
        expected = fresh(copy, batch)[1]["loss"]
        _, metrics = step(change.get("state", lambda s: s)(state), batch)
    return metrics["loss"], expected


CHANGES = {
    "another key": {"batch": lambda b: {**b, "z": b["y"]}},
    "float64": {"batch": lambda b: jax.tree.map(np.float64, b)},
    "ints": {"batch": lambda b: {"x": np.int32(b["x"] * 10), "y": b["y"]}},
    "on a device": {"batch": lambda b: {"x": jnp.asarray(b["x"]), "y": b["y"]}},
    "big endian": {"batch": lambda b: {"x": b["x"].astype(">f4"), "y": b["y"]}},
    "more rows": {"batch": lambda b: {"x": np.concatenate([b["x"]] * 2), "y": np.concatenate([b["y"]] * 2)}},
    "precision": {"around": jax.default_matmul_precision("highest")},
    "debug_nans": {"around": jax.debug_nans(True)},
    "x64": {"around": jax.enable_x64(True)},
    "no cache": {"batch": lambda b: (jax.clear_caches(), b)[1]},
    "one array less on the host": {"state": lambda s: s.replace(params={**s.params, "b": np.array(s.params["b"])})},
    "other containers": {"state": lambda s: s.replace(params=dict(reversed([*s.params.items()])))},
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", CHANGES)
def test_a_known_step_after_a_change(name):
    found, expected = ran(2, CHANGES[name])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"x": np.ma.array(X[:4], mask=X[:4] > 0), "y": Y[:4]}, TypeError, r"batch\['x'\] is a numpy\.ma\.MaskedArray"),
        ({"x": X[:4], "y": Y[:3]}, ValueError, "rows"),
        ({"x": X[:4].tolist(), "y": Y[:4]}, TypeError, "Python numbers"),
        ({1: X[:4], "y": Y[:4]}, ValueError, "keys of several types"),
    ],
)
def test_a_known_step_refuses_what_any_step_refuses(batch, error, text):
    step = step_on([0, 1])
    state = step.init(variables())
    for _ in range(3):
        state, _ = step(state, {"x": X[:4], "y": Y[:4]})
    with pytest.raises(error, match=text):
        step(state, batch)
    state, metrics = step(state, {"x": X[:4], "y": Y[:4]})  # the state is as it was
    assert np.isfinite(metrics["loss"])


def test_a_mesh_around_all_steps(again):
    """The program is that of no mesh: each known step would be traced, in vain."""
    step = step_on([0, 1])
    state = step.init(variables())
    with jax.set_mesh(jax.make_mesh((2,), ("other",), devices=jax.devices()[:2])):
        for _ in range(4):
            state, metrics = step(state, {"x": X[:4], "y": Y[:4]})
    assert again == [False] * 3
    for _ in range(2):  # the first is traced once more, without a mesh
        state, metrics = step(state, {"x": X[:4], "y": Y[:4]})
    assert again[-1]


@pytest.mark.full
@pytest.mark.parametrize("donate", [True, False])
def test_a_known_step_that_is_not_finite(donate):
    step = step_on([0, 1], donate=donate)
    state = step.init(variables())
    for _ in range(3):
        state, _ = step(state, {"x": X[:4], "y": Y[:4]})
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"jdp\.train_step: something is not finite"):
        step(state, {"x": X[:4] * np.nan, "y": Y[:4]})


def test_a_known_step_of_parameters_of_other_shapes():
    dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=range(2))
    step = dp.train_step(lambda v, x: (dp(v, x) ** 2).mean(), optax.sgd(0.1), shard_optimizer=True)
    for features in (2, 4, 2):
        state = step.init({"params": np.ones((features, 2), np.float32)})
        for i in range(3):
            state, metrics = step(state, np.ones((4, features), np.float32))
            assert np.isfinite(metrics["loss"]), i


DONATED = """
import jdp, numpy as np, optax, jax
jdp.virtual_cpu_devices(2)
dp = jdp.DataParallel(lambda v, x: x @ v["params"])
first, other = (dp.train_step(lambda v, x: (dp(v, x) ** 2).mean(), optax.sgd(0.1)) for _ in range(2))
state, x = first.init({"params": np.ones((3, 2), np.float32)}), np.ones((4, 3), np.float32)
for _ in range(3):
    state, _ = first(state, x)
GIVE
try:
    first(state, x)
except RuntimeError as error:
    assert "jdp.train_step: state.step was donated to an earlier step" in str(error), error
    print("named")
"""


@pytest.mark.full
@pytest.mark.parametrize("give", ["other(state, x)", "jax.jit(lambda s: s, donate_argnums=0)(state)"])
def test_a_state_that_was_donated_elsewhere_is_named(give):
    """In a process of its own, because JAX ends it where a program gets arrays that are freed."""
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(jdp.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", DONATED.replace("GIVE", give)]
    done = subprocess.run(command, env=environ, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0 and "named" in done.stdout, done.stderr
