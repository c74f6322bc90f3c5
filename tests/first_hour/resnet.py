"""Train a small ResNet with BatchNorm, mixup and a learning-rate schedule on 4 devices, also where rows are left over.

Checked by: the same loop on one device, with optax and `jax.jit`.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

jdp.virtual_cpu_devices(4)

ROWS, BATCH, EPOCHS = 103, 32, 2  # the last batch of an epoch has 7 rows


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.width, (3, 3), use_bias=False)(x)))
        return nn.relu(x + norm()(nn.Conv(self.width, (3, 3), use_bias=False)(y)))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(8, (3, 3), 2)(images)
        x = Block(8)(x, train)
        return nn.Dense(4)(x.mean(axis=(1, 2)))


def read():
    """Returns images of four classes, each its own pattern under noise, and their labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=ROWS)
    images = rng.normal(size=(4, 8, 8, 1))[labels] + 0.5 * rng.normal(size=(ROWS, 8, 8, 1))
    return images.astype(np.float32), labels


def mixed(images, labels, seed):
    """Yields the batches of an epoch: shuffled rows, each mixed with another row of its batch."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(ROWS)
    for i in range(0, ROWS, BATCH):
        x, y = images[order[i : i + BATCH]], labels[order[i : i + BATCH]]
        lam, other = rng.beta(0.2, 0.2, size=len(x)).astype(np.float32), rng.permutation(len(x))
        weight = lam[:, None, None, None]
        yield {"x": weight * x + (1 - weight) * x[other], "y": y, "other": y[other], "lam": lam}


images, labels = read()
model = ResNet()
steps = EPOCHS * -(-ROWS // BATCH)
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=2, decay_steps=steps)
tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(schedule, momentum=0.9))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def loss_fn(variables, batch):
    logits, updates = model.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
    losses = batch["lam"] * cross_entropy(logits, batch["y"])
    losses += (1 - batch["lam"]) * cross_entropy(logits, batch["other"])
    return losses.mean(), {}, updates


dp = jdp.DataParallel(model)
step = dp.train_step(loss_fn, tx, sync_batch_norm=True)
variables = dp.init(jax.random.key(0), images[:1], train=False)
state = step.init(variables)
losses = []
for epoch in range(EPOCHS):
    for batch in dp.prefetch(mixed(images, labels, seed=epoch)):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])

# The same on one device.

variables = jax.device_get(variables)


@jax.jit
def step_of_one(params, batch_stats, opt_state, batch):
    def loss_and_updates(params):
        loss, _, updates = loss_fn({"params": params, "batch_stats": batch_stats}, batch)
        return loss, updates["batch_stats"]

    (loss, batch_stats_after), grads = jax.value_and_grad(loss_and_updates, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), batch_stats_after, opt_state, loss


params, batch_stats, opt_state = variables["params"], variables["batch_stats"], tx.init(variables["params"])
expected = []
for epoch in range(EPOCHS):
    for batch in mixed(images, labels, seed=epoch):
        params, batch_stats, opt_state, loss = step_of_one(params, batch_stats, opt_state, batch)
        expected.append(loss)

assert len(losses) == steps and losses[-1] < losses[0]
np.testing.assert_allclose(jnp.stack(losses), jnp.stack(expected), rtol=1e-4)
for mine, theirs in [(state.params, params), (state.state["batch_stats"], batch_stats)]:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), mine, theirs)
