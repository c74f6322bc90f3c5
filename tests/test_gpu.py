"""On a real GPU: the numbers of the same programs on the CPU. Run: JAX_PLATFORMS=cuda,cpu pytest tests/test_gpu.py

One GPU is enough, because `replicas=` cuts a batch into several chunks on one device. The other tests run on virtual
CPU devices, also where there is a GPU.
"""

import os
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import close

import jdp

pytestmark = pytest.mark.skipif("cuda" not in os.environ["JAX_PLATFORMS"], reason="needs JAX_PLATFORMS=cuda,cpu")

REPLICAS = (1, 2, 3, 4)
ROWS = np.random.default_rng(0).normal(size=(10, 8, 8, 3)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(4, size=10).astype(np.int32)


class Network(nn.Module):
    """A convolution, BatchNorm and a head, all of them in full float32."""

    statistics: bool = True

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(8, (3, 3), precision="highest")(x)
        x = nn.BatchNorm(use_running_average=not train)(x) if self.statistics else nn.GroupNorm(2)(x)
        return nn.Dense(4, precision="highest")(nn.relu(x).mean((1, 2)))


def variables_of(model):
    return jax.device_get(model.init(jax.random.key(0), ROWS[:1]))


def on(platform, model, replicas):
    return jdp.DataParallel(model, [f"{platform}:0"], replicas=replicas)


def both(run, model, replicas):
    """What a program gives on the GPU and on the CPU, on the host."""
    return [jax.device_get(run(on(platform, model, replicas))) for platform in ("gpu", "cpu")]


def same(run, model, replicas, rtol=2e-4):
    found, expected = both(run, model, replicas)
    close(found, expected, rtol=rtol, atol=2e-5)
    return found


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("rows", [1, 7, 8, 10])
def test_forward(rows, replicas):
    model = Network()
    variables = variables_of(model)

    def run(dp):
        return dp.apply(variables, ROWS[:rows], train=True, mutable=["batch_stats"])

    same(run, model, replicas)
    whole = on("gpu", model, replicas).apply(variables, ROWS[:rows])
    close(jax.device_get(whole), jax.device_get(model.apply(variables, ROWS[:rows])), rtol=2e-4, atol=2e-5)


def test_outputs_lie_where_they_should():
    model = Network()
    gpu = jax.devices("gpu")[0]
    variables = jax.device_put(variables_of(model), gpu)
    assert on("gpu", model, 3).apply(variables, ROWS).devices() == {gpu}
    assert jdp.DataParallel(model, ["cuda:0"]).devices == (gpu,)
    for host in ("cpu", -1):
        dp = jdp.DataParallel(model, ["gpu:0"], host)
        assert {device.platform for device in dp.apply(variables, ROWS).devices()} == {"cpu"}
    with pytest.raises(RuntimeError, match="found one of them on device: cpu:1"):
        on("gpu", model, 1).apply(jax.device_put(variables, jax.devices("cpu")[1]), ROWS)
    with pytest.raises(ValueError, match="platform"):
        jdp.DataParallel(model, ["gpu:0", "cpu:0"])
    found = pickle.loads(pickle.dumps(on("gpu", model, 3)))
    assert found.devices == (gpu,)
    parts = jdp.scatter(ROWS, ["gpu:0"])
    assert parts.devices == (gpu,) and jdp.gather(parts).devices() == {gpu}
    np.testing.assert_array_equal(jdp.reduce_add([jnp.ones(3), jnp.ones(3)]), np.full(3, 2.0))


def losses(variables, batch):
    logits = Network(statistics=False).apply(variables, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("rows", [7, 8])
def test_gradients(rows, replicas):
    model, batch = Network(statistics=False), {"x": ROWS[:rows], "y": LABELS[:rows]}
    variables = variables_of(model)

    def on_chunks(dp):
        return dp.value_and_grad(lambda v, b: losses(v, b))(variables, batch)

    found = same(on_chunks, model, replicas)
    close(found, jax.device_get(jax.value_and_grad(lambda v: losses(v, batch).mean())(variables)), rtol=2e-4, atol=2e-5)

    def root(dp):
        def forward(v, b):
            return model.apply(v, b["x"])

        def criterion(logits, b):
            return jnp.sqrt(((logits - jax.nn.one_hot(b["y"], 4)) ** 2).mean())

        return dp.value_and_grad(forward, criterion=criterion)(variables, batch)

    same(root, model, replicas)


OPTIONS = {
    "plain": {},
    "microbatches": {"accumulate_steps": 2},
    "optimizer": {"shard_optimizer": True},
    "parameters": {"shard_params": True},
    "bfloat16": {"reduce_dtype": jnp.bfloat16},
    "finite": {"skip_nonfinite": True},
    "synchronised": {"sync_batch_norm": True},
    "checked": {"check_replicas": 1},
    "kept": {"donate": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps(options):
    model = Network()
    variables = variables_of(model)

    def loss_fn(variables, batch):
        logits, updates = model.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), {"correct": jdp.Sum((logits.argmax(-1) == batch["y"]).sum())}, updates

    def train(dp):
        step = dp.train_step(loss_fn, optax.sgd(0.1, momentum=0.9), **options)
        state = step.init(variables)
        for rows in (8, 10, 8):
            state, metrics = step(state, {"x": ROWS[:rows], "y": LABELS[:rows]})
        return metrics, state.params, state.state

    same(train, model, 4, rtol=5e-2 if "reduce_dtype" in options else 5e-4)


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_same_bits_again(replicas):
    model = Network(statistics=False)
    variables = variables_of(model)
    batch = {"x": ROWS, "y": LABELS}

    def train():
        dp = on("gpu", model, replicas)
        step = dp.train_step(lambda v, b: losses(v, b).mean(), optax.adam(1e-2), deterministic=True)
        state = step.init(variables)
        for _ in range(5):
            state, metrics = step(state, batch)
        return jax.device_get((metrics, state.params))

    first, second = train(), train()
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("replicas", [1, 3])
def test_nnx(replicas):
    def train(dp_of):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(192, 16, precision="highest", rngs=rngs), nnx.relu]
        model = nnx.Sequential(*layers, nnx.Linear(16, 4, precision="highest", rngs=rngs))
        dp = dp_of(model)

        def loss_fn(m, b):
            return optax.softmax_cross_entropy_with_integer_labels(m(b["x"]), b["y"]).mean()

        optimizer = nnx.Optimizer(dp, optax.adam(1e-2), wrt=nnx.Param)
        step = dp.train_step(loss_fn, optimizer)
        metrics = [step({"x": ROWS.reshape(10, -1), "y": LABELS}) for _ in range(3)]
        return metrics, nnx.to_pure_dict(nnx.state(dp.module, nnx.Param))

    found, expected = (
        jax.device_get(train(lambda model, platform=platform: on(platform, model, replicas)))
        for platform in ("gpu", "cpu")
    )
    close(found, expected, rtol=5e-4, atol=5e-5)


def test_dropout_is_that_of_the_bare_model():
    model = nn.Dropout(0.5, deterministic=False)
    key, x = jax.random.key(3), jnp.asarray(ROWS)
    found = on("gpu", model, 1).apply({}, x, rngs={"dropout": key})
    np.testing.assert_array_equal(found, model.apply({}, x, rngs={"dropout": key}))


def test_evaluation_and_prefetch():
    model = Network(statistics=False)
    variables = variables_of(model)
    batches = [{"x": ROWS[:6], "y": LABELS[:6]}, {"x": ROWS[6:], "y": LABELS[6:]}]

    def metrics(v, b):
        return {"loss": losses(v, b).mean(), "rows": losses(v, b)}

    found = same(lambda dp: dp.evaluate(metrics, variables, batches), model, 3)
    np.testing.assert_allclose(found["rows"], losses(variables, {"x": ROWS, "y": LABELS}), rtol=2e-4, atol=2e-5)
    for batch, expected in zip(on("gpu", model, 2).prefetch(batches), batches, strict=True):
        np.testing.assert_array_equal(jdp.gather(batch["x"]), expected["x"])


def test_a_checkpoint_moves_between_platforms(tmp_path):
    model = Network(statistics=False)
    steps = {
        platform: on(platform, model, 1).train_step(lambda v, b: losses(v, b).mean(), optax.adam(1e-2))
        for platform in ("gpu", "cpu")
    }
    state, _ = steps["gpu"](steps["gpu"].init(variables_of(model)), {"x": ROWS, "y": LABELS})
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        found, _ = checkpointer.restore(steps["cpu"].init(variables_of(model)))
    assert {device.platform for device in found.params["Dense_0"]["kernel"].devices()} == {"cpu"}
    close(jax.device_get(found), jax.device_get(state))


def test_pmap_and_explain():
    def step_fn(params, x):
        loss, gradients = jax.value_and_grad(lambda w: ((x.reshape(len(x), -1) @ w) ** 2).mean())(params)
        return params - 0.01 * jax.lax.pmean(gradients, "data"), jax.lax.pmean(loss, "data")

    dp = jdp.DataParallel(lambda w, x: x @ w, ["gpu:0"])
    params, x = jnp.full((192, 2), 0.1), jnp.asarray(ROWS)
    found, expected = dp.parallel(step_fn)(params, x), jax.pmap(step_fn, "data")(params[None], x[None])
    close(found[0], expected[0][0], rtol=2e-4, atol=2e-5)
    said = str(jdp.explain(dp.apply, params, x.reshape(10, -1)))
    assert "gpu" in said.lower() or "H100" in said or "NVIDIA" in said, said
