"""Equinox: filter_shard inside and outside of filter_jit, and the compiler does the rest."""

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, NamedSharding  # parallel
from jax.sharding import PartitionSpec as P  # parallel

from ._equinox_models import build, params_of
from ._tasks import MOMENTUM, RATE, Task


def trainer(task: Task):
    model, tx = build(task), optax.sgd(RATE, MOMENTUM)
    mesh = Mesh(jax.devices(), ("data",))  # parallel
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))  # parallel

    def loss_fn(model, batch):
        logits = jax.vmap(model)(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, state):
        model, opt_state = eqx.filter_shard(state, whole)  # parallel
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.filter_shard((eqx.apply_updates(model, updates), opt_state), whole), loss  # parallel

    state = eqx.filter_shard((model, tx.init(eqx.filter(model, eqx.is_array))), whole)  # parallel

    def train(batches):
        nonlocal state
        for batch in batches:
            batch = eqx.filter_shard(batch, cut)  # parallel
            state, loss = step(batch, state)
        jax.block_until_ready(eqx.filter(state, eqx.is_array))

    return train, lambda: params_of(state[0])
