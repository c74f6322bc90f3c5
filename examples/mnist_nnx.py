"""Train a CNN (Flax NNX) on MNIST, on every device of this machine.

    python examples/mnist_nnx.py                             10,000 embedded digits, under a minute on 2 cores
    python examples/mnist_nnx.py --download --data-dir DIR   all 60,000: 98.5 % or more in a few minutes

Where JAX finds no accelerator, the CPU is split into 4 virtual devices. At the end: the exact accuracy over
all test rows, and a picture of the learning curve and of the digits that the model got wrong.
"""

import _start  # noqa: F401  before JAX: it says what comes
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist_data import from_arguments
from _show import Show, arguments
from flax import nnx

import jdp


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (5, 5), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(7 * 7 * 32, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = images[..., None] / 255  # (rows, 28, 28) uint8 -> (rows, 28, 28, 1) float32
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        x = nnx.relu(self.dense1(x.reshape(len(x), -1)))
        return self.dense2(self.dropout(x, deterministic=not train))


def main() -> None:
    args = arguments(__doc__, picture="mnist_nnx.png")
    # Before JAX first asks for devices; an accelerator is not affected.
    jdp.virtual_cpu_devices(args.devices or 4)
    devices = jax.devices()[: args.devices]
    data = from_arguments(args)
    rng = np.random.default_rng(args.seed)

    dp = jdp.DataParallel(CNN(nnx.Rngs(args.seed)), devices)
    steps = args.epochs * (len(data.train_labels) // args.batch_size)
    tx = optax.adam(optax.cosine_decay_schedule(args.lr, steps))

    def loss_fn(model, batch):
        images, labels = batch
        logits = model(images, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": jnp.mean(logits.argmax(axis=-1) == labels)}

    step = dp.train_step(loss_fn, tx)

    with Show(args, devices, data) as show:
        for _ in range(args.epochs):
            for batch in data.batches(args.batch_size, rng):
                metrics = step(batch)
                show.step(metrics["loss"], metrics["accuracy"])
            show.epoch([np.asarray(dp(images)).argmax(axis=-1) for images in data.test_batches()])
    show.result()


if __name__ == "__main__":
    main()
