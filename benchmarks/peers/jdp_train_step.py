"""jdp: dp.train_step."""

import jax
import optax

import jdp  # parallel

from ._flax_models import MODELS
from ._tasks import MOMENTUM, RATE, Task


def trainer(task: Task):
    model = MODELS[task.name]

    def loss_fn(variables, batch):
        logits = model.apply(variables, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    dp = jdp.DataParallel(model)  # parallel
    step = dp.train_step(loss_fn, optax.sgd(RATE, MOMENTUM))  # parallel
    state = step.init({"params": task.params})  # parallel

    def train(batches):
        nonlocal state
        for batch in batches:
            state, metrics = step(state, batch)
        jax.block_until_ready(state)

    return train, lambda: state.params
