"""Keras on JAX: keras.distribution.DataParallel."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras

from ._keras_models import build, params_of
from ._tasks import MOMENTUM, RATE, Task


def trainer(task: Task):
    keras.distribution.set_distribution(keras.distribution.DataParallel())  # parallel
    model = build(task)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE, MOMENTUM), loss_fn)

    def train(batches):
        rows = ((batch["x"], batch["y"]) for batch in batches)
        model.fit(rows, steps_per_epoch=len(batches), verbose=0)  # pyright: ignore[reportArgumentType]
        jax.block_until_ready(params_of(model))

    return train, lambda: params_of(model)
