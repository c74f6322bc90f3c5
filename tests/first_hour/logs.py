"""Log a run: a progress bar, and in a CSV file the loss, the learning rate and the gradient's norm of each step.

Checked by: the numbers of the file against a loop on one device.
"""

import csv
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

import jdp

jdp.virtual_cpu_devices(4)

rng = np.random.default_rng(0)
x = rng.normal(size=(90, 6)).astype(np.float32)
data = {"x": x, "y": x[:, :1] ** 2}
model = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)])
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.3, warmup_steps=2, decay_steps=8)


def keep_norm():
    """Keeps the norm of the gradient that comes in."""
    update = lambda grads, before, params: (grads, optax.tree.norm(grads))  # noqa: E731
    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def loss_fn(variables, batch):
    return ((model.apply(variables, batch["x"]) - batch["y"]) ** 2).mean()


sgd = optax.inject_hyperparams(optax.sgd)(schedule)
tx = optax.chain(keep_norm(), optax.clip_by_global_norm(0.5), sgd)
dp = jdp.DataParallel(model)
step = dp.train_step(loss_fn, tx)
variables = dp.init(jax.random.key(0), x[:1])
state = step.init(variables)


with tempfile.NamedTemporaryFile("w+", newline="") as file:
    writer, last = csv.writer(file), None
    writer.writerow(["step", "loss", "rate", "norm"])

    def write(line):
        if line is not None and jax.process_index() == 0:
            writer.writerow([line[0], *map(float, line[1:])])

    batches = dp.batches(data, 25, epochs=2)
    for batch in track(batches, disable=jax.process_index() != 0):
        state, metrics = step(state, batch)
        write(last)  # of the step before: the host does not wait for this one
        norm, _, rates = state.opt_state  # which the next step frees
        last = batches.taken, metrics["loss"], jnp.copy(rates.hyperparams["learning_rate"]), jnp.copy(norm)
    write(last)
    file.seek(0)
    rows = [*csv.DictReader(file)]

# The same on one device.

params, trace = jax.device_get(variables["params"]), []
tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(schedule))
opt_state = tx.init(params)
value_and_grad = jax.jit(jax.value_and_grad(lambda params, batch: loss_fn({"params": params}, batch)))
for k in range(8):
    i = 25 * (k % 4)
    loss, grads = value_and_grad(params, {name: a[i : i + 25] for name, a in data.items()})
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
    trace.append((k + 1, float(loss), float(schedule(k)), norm))
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)

assert len(rows) == len(trace) == 8
found = [[float(row[name]) for name in ("step", "loss", "rate", "norm")] for row in rows]
np.testing.assert_allclose(found, trace, rtol=1e-3, atol=1e-6)
