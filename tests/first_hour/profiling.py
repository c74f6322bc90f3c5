"""See what a step does before it runs, and then profile three steps.

Checked by: bytes and collectives counted by hand, and the step's name, which is in the trace of each device.
"""

import gzip
import json
import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax

import jdp

jdp.virtual_cpu_devices(4)
model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
batch = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)


def mean_square(variables, x):
    return (model.apply(variables, x) ** 2).mean()


dp = jdp.DataParallel(model)
step = dp.train_step(mean_square, optax.adam(1e-3))
state = step.init(dp.init(jax.random.key(0), batch[:1]))
report = jdp.explain(step, state, batch)
print(report)

state, metrics = step(state, batch)  # compiles
jax.block_until_ready(metrics)
folder = tempfile.mkdtemp()
with jax.profiler.trace(folder):
    for number in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            state, metrics = step(state, batch)
    jax.block_until_ready(metrics)

# By hand, and in the trace.

numbers = 32 * 64 + 64 + 64 * 10 + 10
assert report.parameter_bytes == report.gradient_bytes == 4 * numbers
assert report.optimizer_bytes == 2 * 4 * numbers + 4
assert report.batch_bytes == batch.nbytes / 4 and report.rows == (16, 16, 16, 16)
(collective,) = report.collectives  # the loss travels with the gradients
assert collective.kind == "all-reduce" and report.collective_bytes == 4 * (numbers + 1)
assert report.flops > 16 * 2 * (32 * 64 + 64 * 10)  # the products of the forward pass alone

(path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
assert [x["args"]["step_num"] for x in events if x.get("name") == "train"] == ["0", "1", "2"]
on_devices = [x["args"] for x in events if x.get("args", {}).get("hlo_module") == "jit_train_step_mean_square"]
reduced = {x["device_ordinal"] for x in on_devices if x["hlo_op"].startswith("all-reduce")}
assert reduced == {"0", "1", "2", "3"}
