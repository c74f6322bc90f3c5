"""Train a GAN: a critic and a generator, each with a step and an optimizer of its own.

Checked by: the same two steps on one device, with `nnx.jit` and `nnx.Optimizer`.
"""

import jax
import numpy as np
import optax
from flax import nnx

import jdp

jdp.virtual_cpu_devices(4)

rng = np.random.default_rng(0)
rows = (rng.normal(size=(75, 2)) * [1, 0.1] + [2, 0]).astype(np.float32)
batches = [
    (x, rng.normal(size=(len(x), 3)).astype(np.float32)) for x in np.split(rows, [16, 32, 48, 64])
]  # 11 are left


class MLP(nnx.Module):
    def __init__(self, n, m, rngs):
        self.first, self.last = nnx.Linear(n, 16, rngs=rngs), nnx.Linear(16, m, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.leaky_relu(self.first(x)))


def bce(logits, label):
    return optax.sigmoid_binary_cross_entropy(logits, label).mean()


def d_loss(critic, batch):
    x, z, generator = batch
    fake = jax.lax.stop_gradient(generator(z))
    return bce(critic(x), 1.0) + bce(critic(fake), 0.0)


def g_loss(generator, batch):
    z, critic = batch
    return bce(critic(generator(z)), 1.0)


generator = jdp.DataParallel(MLP(3, 2, nnx.Rngs(0)))
critic = jdp.DataParallel(MLP(2, 1, nnx.Rngs(1)))
d_step = critic.train_step(d_loss, optax.adam(1e-2, b1=0.5))
g_step = generator.train_step(g_loss, optax.adam(1e-2, b1=0.5))
losses = []
for x, z in batches * 2:
    d = d_step((x, z, generator.module))
    g = g_step((z, critic.module))
    losses.append((float(d["loss"]), float(g["loss"])))

# The same on one device.

others = MLP(3, 2, nnx.Rngs(0)), MLP(2, 1, nnx.Rngs(1))
g_optimizer, d_optimizer = (nnx.Optimizer(model, optax.adam(1e-2, b1=0.5), wrt=nnx.Param) for model in others)


@nnx.jit
def both(generator, critic, g_optimizer, d_optimizer, x, z):
    d, grads = nnx.value_and_grad(d_loss)(critic, (x, z, generator))
    d_optimizer.update(critic, grads)
    g, grads = nnx.value_and_grad(g_loss)(generator, (z, critic))
    g_optimizer.update(generator, grads)
    return d, g


expected = [[*map(float, both(*others, g_optimizer, d_optimizer, x, z))] for x, z in batches * 2]
np.testing.assert_allclose(losses, expected, rtol=1e-3)
for mine, theirs in zip((generator.module, critic.module), others, strict=True):
    pairs = zip(jax.tree.leaves(nnx.state(mine)), jax.tree.leaves(nnx.state(theirs)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
