"""A long run: 20,000 steps on 8 virtual devices, of which the memory does not grow."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.faults

PROGRAM = """
import os, pathlib
import jdp
jdp.virtual_cpu_devices(8)
import jax, jax.numpy as jnp, numpy as np, optax
dp = jdp.DataParallel(lambda v, x: jnp.tanh(x @ v["params"]["w"]))
step = dp.train_step(lambda v, x: jnp.mean((dp(v, x) - 1) ** 2), optax.adam(1e-3))
state = step.init({"params": {"w": np.ones((8, 8), np.float32)}})
batches = [np.full((16, 8), i, np.float32) for i in range(4)] + [np.ones((13, 8), np.float32)]
for i in range(1, 20_001):
    state, metrics = step(state, batches[i % 5])
    if i in (2_000, 20_000):
        jax.block_until_ready(state)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        print(pages * os.sysconf("SC_PAGE_SIZE"), len(jax.live_arrays()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_over_20_000_steps():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    (early, arrays), (late, arrays_late) = [map(int, line.split()) for line in run.stdout.splitlines()]
    assert arrays_late == arrays
    assert late <= 1.02 * early, f"{early / 2**20:.1f} MiB after 2,000 steps, {late / 2**20:.1f} MiB after 20,000"
    print(f"RSS {early / 2**20:.1f} -> {late / 2**20:.1f} MiB")
