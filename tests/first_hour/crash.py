"""Train in two processes, of which one is killed; the job starts again by itself, and goes on.

    jdp launch -n 2 --devices-per-process 2 --max-restarts 1 crash.py FOLDER

Checked by: the same loop on one device, which nothing interrupts.
"""

import os
import pathlib
import signal
import sys

import flax.linen as nn
import jax
import numpy as np
import optax

import jdp

jdp.distributed.initialize()

ROWS, BATCH, EPOCHS = 90, 25, 4  # 25, 25, 25 and 15 rows
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 6)).astype(np.float32)
data = {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}
model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)])
tx = optax.adam(1e-2)
folder = pathlib.Path(sys.argv[1])


def loss_fn(variables, batch):
    return ((model.apply(variables, batch["x"]) - batch["y"]) ** 2).mean()


dp = jdp.DataParallel(model)  # on all devices of both processes
step = dp.train_step(loss_fn, tx)
state = step.init(dp.init(jax.random.key(0), x[:1]))
with jdp.Checkpointer(folder / "run", every=4) as checkpointer:
    state, taken = checkpointer.restore(state)
    batches = dp.batches(data, BATCH, epochs=EPOCHS, start=taken or 0)
    for batch in batches:
        state, metrics = step(state, batch)
        checkpointer.save(batches.taken, state, data=batches.taken)
        if batches.taken == 9 and not taken:
            checkpointer.wait()  # step 8 is on the disk then; step 9 is lost
            if jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
metrics = dp.evaluate(lambda v, batch: {"loss": loss_fn(v, batch)}, {"params": state.params}, dp.batches(data, BATCH))

# The same on one device.

params = model.init(jax.random.key(0), x[:1])["params"]
opt_state = tx.init(params)
gradient = jax.jit(jax.grad(lambda params, batch: loss_fn({"params": params}, batch)))
for i in (0, 25, 50, 75) * EPOCHS:
    grads = gradient(params, {name: a[i : i + BATCH] for name, a in data.items()})
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)

assert (jax.process_count(), len(dp.devices), taken, int(state.step)) == (2, 4, 8, 16)
mine = jax.tree.map(np.asarray, state.params)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), mine, params)
np.testing.assert_allclose(metrics["loss"], loss_fn({"params": params}, data), rtol=1e-3)
if jax.process_index() == 0:
    print("went on from", taken)
