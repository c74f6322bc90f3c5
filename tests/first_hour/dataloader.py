"""Train from a torch `DataLoader` with two workers, which are processes of their own.

Checked by: every row comes once an epoch, and a loop on one device over the same rows in the same order.
"""

import jax
import numpy as np
import optax
import torch
from flax import nnx

import jdp

ROWS = 53


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        x = np.random.default_rng(i).normal(size=6).astype(np.float32)
        return {"x": torch.from_numpy(x), "y": torch.tensor(x.sum() > 0, dtype=torch.float32), "row": i}


def loss_fn(model, batch):
    losses = optax.sigmoid_binary_cross_entropy(model(batch["x"])[:, 0], batch["y"])
    return losses.mean(), {"row": batch["row"]}


def main():
    jdp.virtual_cpu_devices(4)
    dp = jdp.DataParallel(nnx.Linear(6, 1, rngs=nnx.Rngs(0)))
    step = dp.train_step(loss_fn, optax.adam(0.1))
    rows, losses = [], []
    loader = torch.utils.data.DataLoader(
        Rows(), 16, shuffle=True, num_workers=2, multiprocessing_context="spawn", persistent_workers=True
    )
    for _ in range(2):
        for batch in dp.prefetch(loader):
            metrics = step(batch)
            rows.append(np.asarray(metrics["row"]))
            losses.append(float(metrics["loss"]))

    # The same on one device.

    model = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step_of_one(model, optimizer, batch):
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return loss

    assert [len(x) for x in rows] == [16, 16, 16, 5] * 2
    epochs = np.concatenate(rows[:4]), np.concatenate(rows[4:])
    assert all(sorted(epoch) == [*range(ROWS)] for epoch in epochs) and not np.array_equal(*epochs)
    data, expected = Rows(), []
    for numbers in rows:
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(data[int(i)] for i in numbers))
        expected.append(float(step_of_one(model, optimizer, batch)))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(dp.module.kernel[...], model.kernel[...], rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    main()
