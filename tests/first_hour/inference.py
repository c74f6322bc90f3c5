"""Predict for 1,003 rows of a file: the class and the probabilities of each, in the order of the file.

Checked by: the bare model on one device, with all rows at once.
"""

import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np

import jdp

jdp.virtual_cpu_devices(4)

path = pathlib.Path(tempfile.mkdtemp()) / "rows.npy"
np.save(path, np.random.default_rng(0).normal(size=(1003, 12)).astype(np.float32))
model = nn.Sequential([nn.Dense(16), nn.relu, nn.Dropout(0.5, deterministic=True), nn.Dense(7), nn.softmax])

rows = np.load(path, mmap_mode="r")  # only the rows of a batch are read
dp = jdp.DataParallel(model)
variables = dp.init(jax.random.key(0), rows[:1])


def predict(variables, x):
    probabilities = model.apply(variables, x)
    return {"class": probabilities.argmax(-1), "probabilities": probabilities}


found = dp.evaluate(predict, variables, dp.batches(rows, 256))

# The same on one device, and one row alone.

alone = jax.device_put(jax.device_get(variables), jax.devices()[0])
expected = np.asarray(model.apply(alone, np.load(path)))
assert found["class"].shape == (1003,) and isinstance(found["probabilities"], np.ndarray)
np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5, atol=1e-7)
np.testing.assert_array_equal(found["class"], expected.argmax(-1))
np.testing.assert_allclose(dp(variables, rows[1002:])[0], expected[1002], rtol=1e-5, atol=1e-7)
