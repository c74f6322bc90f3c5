"""Train a CNN (Flax Linen) on MNIST, on every device of this machine.

    python examples/mnist.py                             10,000 embedded digits, under a minute on 2 cores
    python examples/mnist.py --download --data-dir DIR   all 60,000: 98.5 % or more in a few minutes

Where JAX finds no accelerator, the CPU is split into 4 virtual devices. At the end: the exact accuracy over
all test rows, and a picture of the learning curve and of the digits that the model got wrong.
"""

import _start  # noqa: F401  before JAX: it says what comes
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist_data import from_arguments
from _show import Show, arguments

import jdp


class CNN(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = images[..., None] / 255  # (rows, 28, 28) uint8 -> (rows, 28, 28, 1) float32
        x = nn.relu(nn.Conv(16, (5, 5))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(128)(x))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(10)(x)


def main() -> None:
    args = arguments(__doc__, picture="mnist.png")
    # Before JAX first asks for devices; an accelerator is not affected.
    jdp.virtual_cpu_devices(args.devices or 4)
    devices = jax.devices()[: args.devices]
    data = from_arguments(args)
    rng = np.random.default_rng(args.seed)
    key = jax.random.key(args.seed)

    model = CNN()
    dp = jdp.DataParallel(model, devices)
    steps = args.epochs * (len(data.train_labels) // args.batch_size)
    tx = optax.adam(optax.cosine_decay_schedule(args.lr, steps))

    def forward(variables, batch, key):  # runs on each device, with its rows
        images, _ = batch
        return model.apply(variables, images, train=True, rngs={"dropout": key})

    def criterion(logits, batch):  # runs once, with the outputs of all rows
        _, labels = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": jnp.mean(logits.argmax(axis=-1) == labels)}

    step = dp.train_step(forward, tx, criterion=criterion)
    state = step.init(dp.init(key, data.train_images[:1]), key=key)

    with Show(args, devices, data) as show:
        for _ in range(args.epochs):
            for batch in data.batches(args.batch_size, rng):
                state, metrics = step(state, batch)
                show.step(metrics["loss"], metrics["accuracy"])
            logits = [dp.apply({"params": state.params}, images) for images in data.test_batches()]
            show.epoch([np.asarray(x).argmax(axis=-1) for x in logits])
    show.result()


if __name__ == "__main__":
    main()
