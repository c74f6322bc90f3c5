"""Right uses of jdp, as a type checker sees them: `tests/types/check.py` wants no error here."""

from collections.abc import Iterator
from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdp
from jdp import Checkpointer, DataParallel, Mean, Scattered, Sum, TrainState

ROWS = np.ones((10, 2), np.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
    return w * x


def loss_of_variables(variables: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch)


def loss_of_model(model: Net, batch: Any) -> tuple[Mean, dict[str, Sum]]:
    out = model(batch)
    return Mean(out.sum(), out.size), {"positive": Sum((out > 0).sum())}


def linen() -> None:
    dp = DataParallel(nn.Dense(3), devices=range(2), output_device="cpu")
    assert_type(dp.module.features, int)
    assert_type(dp.dim, int)
    variables = dp.init(jax.random.key(0), ROWS)
    dp.apply(variables, ROWS, mutable=["batch_stats"])
    step = dp.train_step(loss_of_variables, optax.adam(1e-3), accumulate_steps=2, reduce_dtype=jnp.bfloat16)
    state = step.init(variables, key=jax.random.key(1))
    assert_type(state, TrainState)
    assert_type(step(state, ROWS), tuple[TrainState, dict[str, jax.Array]])
    assert_type(step.last, TrainState | None)
    assert_type(state.step, jax.Array)
    assert_type(state.replace(step=state.step), TrainState)
    step.lower(state, ROWS).compile()
    print(step.optimizer_bytes(state).cut, [found.rows for found in step.find_nonfinite(state, ROWS)])
    with Checkpointer("run", every=10) as checkpointer:
        checkpointer.save(1, state)


def models() -> None:
    dp = DataParallel(Net(nnx.Rngs(0)), ["cpu:0", jax.devices()[0], 1], -1, reduce_state="mean")
    assert_type(dp.module, Net)
    step = dp.train_step(loss_of_model, optax.chain(optax.clip(1.0), optax.sgd(0.1)))
    assert_type(step(ROWS), dict[str, jax.Array])
    assert_type(step.last, dict[str, jax.Array] | None)
    given = dp.train_step(loss_of_model, nnx.Optimizer(dp, optax.sgd(0.1), wrt=nnx.Param))
    assert_type(given(ROWS)["loss"], jax.Array)
    nnx.update(dp.module, nnx.state(dp, nnx.Param))
    dp.eval()
    dp.value_and_grad(loss_of_model, argnums=nnx.DiffState(0, nnx.Param), has_aux=True)(dp.module, ROWS)
    in_shards = DataParallel(lambda: Net(nnx.Rngs(0)), shard_params=True)
    assert_type(in_shards.module, Net)


def functions() -> None:
    dp = DataParallel(scaled, in_axes=(0,), device_ids=[0, 1], replicas=8)
    assert_type(dp.module(jnp.ones(2), jnp.ones(2)), jax.Array)
    loss, gradient = dp.value_and_grad(scaled)(2.0, ROWS)
    dp.grad(scaled, argnums=(0, 1), accumulate_steps=2)(loss, gradient)
    dp.parallel(scaled, axis_name="batch", donate_argnums=0)(2.0, ROWS)
    for x in dp.prefetch([ROWS, ROWS], size=1):
        dp(2.0, x)
    batches = dp.batches({"x": ROWS}, 4, seed=0, epochs=None)
    assert_type(batches.taken, int)
    assert_type(iter(batches), Iterator[Any])
    dp.check_replicas({"w": ROWS})


def verbs() -> None:
    jdp.virtual_cpu_devices(4)
    scattered = jdp.scatter(ROWS, devices=[0, 1], chunk_sizes=(3, 7))
    assert_type(scattered, Scattered)
    assert_type(scattered.sizes, tuple[int, ...])
    assert_type({scattered: len(scattered)}, dict[Scattered, int])
    out = jdp.parallel_apply(scaled, jdp.replicate(2.0, [0, 1]), scattered)
    assert_type(out, Scattered)
    jdp.reduce_add(out, destination="all")
    jdp.gather(out, "cpu")
    jdp.data_parallel(scaled, 2.0, (ROWS,), devices=[0])
    assert_type(jdp.chunk_sizes(10, 4), tuple[int, ...])
    print(jdp.explain(scaled, 2.0, ROWS).collectives, jdp.topology("h100", hosts=2), jdp.__version__)
    jdp.distributed.initialize()


class Gained(DataParallel[Net]):
    """A subclass with a step of its own."""

    def gather(self, outputs: Scattered, output_device: Any) -> Any:
        return super().gather(outputs, output_device)


assert_type(Gained(Net(nnx.Rngs(0))).module, Net)
