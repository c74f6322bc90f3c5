"""Move a loop that was written for `jax.pmap`: its step as it is, and then any number of rows.

Checked by: the loop under `jax.pmap`, to the last bit; and a loop on one device for the batches that pmap refuses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jdp

jdp.virtual_cpu_devices(4)

rng = np.random.default_rng(0)
batches = [{"x": x, "y": np.sin(x.sum(1))} for x in rng.normal(size=(5, 32, 6)).astype(np.float32)]
params = {"w": np.linspace(-1, 1, 6, dtype=np.float32), "b": np.float32(0)}


def apply_fn(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def loss_of(params, batch):
    return ((apply_fn(params, batch["x"]) - batch["y"]) ** 2).mean()


def train_step(state, batch):  # written for pmap
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    grads, loss = jax.lax.pmean((grads, loss), axis_name="batch")
    return state.apply_gradients(grads=grads), {"loss": loss}


def new_state():
    return TrainState.create(apply_fn=apply_fn, params=params, tx=optax.adam(0.05))


# Before: a state for each device, a batch in as many parts.

n = jax.device_count()
stacked = jax.tree.map(lambda x: np.stack([x] * n), new_state())
p_step = jax.pmap(train_step, axis_name="batch")
for batch in batches:
    stacked, metrics_of_pmap = p_step(stacked, jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), batch))
of_pmap = jax.tree.map(lambda x: x[0], stacked)

# After: the same step.

dp = jdp.DataParallel(apply_fn)
dp_step = dp.parallel(train_step, axis_name="batch")
state = new_state()
for batch in batches:
    state, metrics = dp_step(state, batch)

assert int(state.step) == 5
jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (of_pmap.params, of_pmap.opt_state))
assert metrics["loss"].tolist() == metrics_of_pmap["loss"].tolist()

# After that: any number of rows, with the loss alone.

uneven = [*batches, {name: x[:13] for name, x in batches[0].items()}]
step = dp.train_step(lambda variables, batch: loss_of(variables["params"], batch), optax.adam(0.05))
state = step.init({"params": params})
for batch in dp.prefetch(uneven):
    state, metrics = step(state, batch)

step_of_one = jax.jit(lambda state, batch: state.apply_gradients(grads=jax.grad(loss_of)(state.params, batch)))
alone = new_state()
for batch in uneven:
    alone = step_of_one(alone, batch)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, alone.params)
