"""Train on 4 devices, lose the program to a `kill -9`, and go on with 2 devices from the last checkpoint.

    python resume.py                             starts the two runs below, one after the other
    python resume.py train 4 FOLDER              is killed after step 9
    python resume.py train 2 FOLDER              goes on

Checked by: the same loop on one device, with optax and `jax.jit`, which nothing interrupts.
"""

import os
import signal
import subprocess
import sys
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax

import jdp

ROWS, BATCH, EPOCHS = 90, 25, 4  # 25, 25, 25 and 15 rows
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 6)).astype(np.float32)
data = {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}
model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)])
tx = optax.adam(1e-2)


def loss_fn(variables, batch):
    return ((model.apply(variables, batch["x"]) - batch["y"]) ** 2).mean()


def train(folder):
    dp = jdp.DataParallel(model)
    step = dp.train_step(loss_fn, tx)
    state = step.init(dp.init(jax.random.key(0), x[:1]))
    with jdp.Checkpointer(folder, keep=2, every=4) as checkpointer:
        state, taken = checkpointer.restore(state)
        batches = dp.batches(data, BATCH, seed=7, epochs=EPOCHS, start=taken or 0)
        print("begins at", batches.taken, "on", len(dp.devices), flush=True)
        for batch in batches:
            state, metrics = step(state, batch)
            checkpointer.save(batches.taken, state, data=batches.taken)
            if batches.taken == 9 and not taken:
                checkpointer.wait()  # step 8 is on the disk then; step 9 is lost
                os.kill(os.getpid(), signal.SIGKILL)
    np.savez(f"{folder}.npz", *jax.tree.leaves(state.params), steps=state.step)


def of_one_device():
    params = model.init(jax.random.key(0), x[:1])["params"]
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(lambda params: loss_fn({"params": params}, batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for epoch in range(EPOCHS):
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, epoch]))).permutation(ROWS)
        for i in range(0, ROWS, BATCH):
            batch = jax.tree.map(lambda a, rows=order[i : i + BATCH]: a[rows], data)
            params, opt_state = step(params, opt_state, batch)
    return params


def main():
    folder = os.path.join(tempfile.mkdtemp(), "run")
    runs = [
        subprocess.run([sys.executable, __file__, "train", n, folder], capture_output=True, text=True) for n in "42"
    ]
    assert [run.returncode for run in runs] == [-signal.SIGKILL, 0], runs[-1].stderr
    assert [run.stdout for run in runs] == ["begins at 0 on 4\n", "begins at 8 on 2\n"]
    found = np.load(f"{folder}.npz")
    assert found["steps"] == 16
    for i, expected in enumerate(jax.tree.leaves(of_one_device())):
        np.testing.assert_allclose(found[f"arr_{i}"], expected, rtol=1e-3, atol=1e-5)


if sys.argv[1:2] == ["train"]:
    jdp.virtual_cpu_devices(int(sys.argv[2]))
    train(sys.argv[3])
else:
    main()
