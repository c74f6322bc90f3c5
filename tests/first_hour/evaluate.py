"""Evaluate a classifier on 517 rows: loss, accuracy, the confusion matrix, F1, and the predictions.

Checked by: the bare model on all rows at once, and numpy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdp

jdp.virtual_cpu_devices(4)

CLASSES, ROWS = 5, 517
rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(ROWS, 8)).astype(np.float32), "y": rng.integers(CLASSES, size=ROWS)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.dropout = nnx.Linear(8, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.hidden(x))))


def metrics_fn(model, batch):
    logits, y = model(batch["x"]), batch["y"]
    predicted = logits.argmax(-1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return {
        "loss": losses.mean(),
        "loss of class 0": jdp.Mean((losses * (y == 0)).sum(), (y == 0).sum()),
        "accuracy": jdp.Mean((predicted == y).sum(), len(y)),
        "confusion": jdp.Sum(jnp.zeros((CLASSES, CLASSES), jnp.int32).at[y, predicted].add(1)),
        "predicted": predicted,
    }


dp = jdp.DataParallel(Net(nnx.Rngs(0)))
found = dp.evaluate(metrics_fn, dp.batches(data, 64))
right, of_class, named = (f(found["confusion"]) for f in (np.diag, lambda c: c.sum(1), lambda c: c.sum(0)))
f1 = 2 * right / (of_class + named)

# The same without jdp. The model is in the mode that it was in.

assert not dp.module.dropout.deterministic
model = jax.device_put(nnx.clone(dp.module), jax.devices()[0])
model.eval()
logits, y = np.asarray(model(data["x"])), data["y"]
losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, y))
expected = logits.argmax(-1)
assert np.array_equal(found["predicted"], expected)
assert found["accuracy"] == np.mean(expected == y)
assert np.isclose(found["loss"], losses.mean(dtype=np.float64), rtol=1e-6)
assert np.isclose(found["loss of class 0"], losses[y == 0].mean(dtype=np.float64), rtol=1e-6)
for k in range(CLASSES):
    both, either = ((expected == k) & (y == k)).sum(), (expected == k).sum() + (y == k).sum()
    assert np.isclose(f1[k], 2 * both / either)
