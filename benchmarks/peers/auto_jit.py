"""Plain jit: the parameters replicated, the batch sharded, and the compiler does the rest."""

from functools import partial

import jax
import optax
from jax.sharding import Mesh, NamedSharding  # parallel
from jax.sharding import PartitionSpec as P  # parallel

from ._flax_models import MODELS
from ._tasks import MOMENTUM, RATE, Task


def trainer(task: Task):
    model, tx = MODELS[task.name], optax.sgd(RATE, MOMENTUM)
    mesh = Mesh(jax.devices(), ("data",))  # parallel
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))  # parallel

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    @partial(jax.jit, donate_argnums=0, in_shardings=(whole, cut), out_shardings=whole)  # parallel
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = jax.device_put((task.params, tx.init(task.params)), whole)  # parallel

    def train(batches):
        nonlocal state
        for batch in batches:
            state, loss = step(state, batch)
        jax.block_until_ready(state)

    return train, lambda: state[0]
