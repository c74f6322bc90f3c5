"""Fine-tune a pretrained model: another head, the body frozen at first, and then trained at a lower rate.

Checked by: a loop on one device that differentiates the head alone, and one that has a rate for each half.
"""

import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax

import jdp

jdp.virtual_cpu_devices(4)

rng = np.random.default_rng(0)
x = rng.normal(size=(69, 6)).astype(np.float32)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Body(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(16)(nn.tanh(nn.Dense(16)(x))))


class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes, name="head")(Body(name="body")(x))


# Somebody trained it on 12 classes, without jdp, and saved it.

folder = tempfile.mkdtemp()
with jdp.Checkpointer(folder) as checkpointer:
    checkpointer.save(1, Net(12).init(jax.random.key(1), x[:1]))

# A new head for 3 classes.

data = {"x": x, "y": (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)}
old = Net(12).init(jax.random.key(0), x[:1])  # for the form; its values do not matter
with jdp.Checkpointer(folder) as checkpointer:
    pretrained, _ = checkpointer.restore(old)
net = Net(3)
dp = jdp.DataParallel(net)
variables = dp.init(jax.random.key(2), x[:1])
variables["params"] = {**variables["params"], "body": pretrained["params"]["body"]}


def loss_fn(variables, batch):
    return cross_entropy(net.apply(variables, batch["x"]), batch["y"]).mean()


def trained(variables, tx):
    step = dp.train_step(loss_fn, tx)
    state = step.init(variables)
    for batch in dp.batches(data, 32, epochs=3):  # 32, 32 and 5 rows
        state, metrics = step(state, batch)
    return {"params": state.params}


frozen = optax.multi_transform(
    {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, {"body": "frozen", "head": "trained"}
)
first = trained(variables, frozen)
two_rates = optax.multi_transform(
    {"slow": optax.adam(1e-3), "fast": optax.adam(1e-2)}, {"body": "slow", "head": "fast"}
)
second = trained(first, two_rates)

# The same on one device.


def loop(parts, rates, fixed):
    """Trains some parts of the parameters, each with its own Adam."""
    tx = {name: optax.adam(rate) for name, rate in rates.items()}
    opt_states = {name: tx[name].init(parts[name]) for name in tx}

    @jax.jit
    def step(parts, opt_states, batch):
        grads = jax.grad(lambda parts: loss_fn({"params": {**fixed, **parts}}, batch))(parts)
        found = {name: tx[name].update(grads[name], opt_states[name]) for name in tx}
        after = {name: optax.apply_updates(parts[name], updates) for name, (updates, _) in found.items()}
        return after, {name: opt_state for name, (_, opt_state) in found.items()}

    for i in (0, 32, 64) * 3:
        parts, opt_states = step(parts, opt_states, {name: a[i : i + 32] for name, a in data.items()})
    return parts


body = Net(12).init(jax.random.key(1), x[:1])["params"]["body"]
head = net.init(jax.random.key(2), x[:1])["params"]["head"]
of_head = loop({"head": head}, {"head": 1e-2}, {"body": body})
jax.tree.map(np.testing.assert_array_equal, first["params"]["body"], body)
pairs = first["params"]["head"], of_head["head"]
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *pairs)
of_both = loop({"body": body, **of_head}, {"body": 1e-3, "head": 1e-2}, {})
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), second["params"], of_both)
