"""Flax's recipe: jax_utils.replicate, common_utils.shard, jax.pmap."""

from functools import partial

import jax
import optax
from flax import jax_utils  # parallel
from flax.training import common_utils  # parallel

from ._flax_models import MODELS
from ._tasks import MOMENTUM, RATE, Task


def trainer(task: Task):
    model, tx = MODELS[task.name], optax.sgd(RATE, MOMENTUM)

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    @partial(jax.pmap, axis_name="data", donate_argnums=0)  # parallel
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jax.lax.pmean((loss, grads), "data")  # parallel
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = jax_utils.replicate((task.params, tx.init(task.params)))  # parallel

    def train(batches):
        nonlocal state
        for batch in batches:
            batch = common_utils.shard(batch)  # parallel
            state, loss = step(state, batch)
        jax.block_until_ready(state)

    return train, lambda: jax_utils.unreplicate(state[0])  # parallel
