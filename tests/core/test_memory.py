"""Any number of batch sizes takes no more memory than the sizes that are kept: those used last."""

import gc
import pathlib
import subprocess
import sys
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

W = {"params": {"w": np.ones((2, 2), np.float32)}}


def model(v, x):
    return jnp.tanh(x @ v["params"]["w"])


def loss_fn(v, x):
    return (model(v, x) ** 2).mean()


@pytest.fixture
def few(monkeypatch):
    """Three sizes are kept."""
    monkeypatch.setattr("jdp._core.programs.SIZES", 3)


def doors(dp):
    """A call of each door, of a batch; and what it keeps for sizes."""
    step, placed = dp.train_step(loss_fn, optax.sgd(0.0)), jdp.replicate(W, dp.devices)
    state = [step.init(W)]

    def train(x):
        state[0], metrics = step(state[0], x)
        return metrics["loss"]

    grad, parallel = dp.value_and_grad(loss_fn), dp.parallel(lambda v, x: (v, model(v, x)))
    return {
        "apply": lambda x: dp(placed, x),
        "value_and_grad": lambda x: grad(W, x)[0],
        "train_step": train,
        "parallel": lambda x: parallel(W, x)[1],
    }, step


@pytest.mark.full
def test_programs_of_the_sizes_used_last_are_kept(few):
    dp = jdp.DataParallel(model, devices=range(2))
    calls, step = doors(dp)
    program = dp._config.program(dp.module)
    for rows in (2, 3, 4, 5, 6, 7, 2, 3):
        x = np.linspace(0, 1, 2 * rows, dtype=np.float32).reshape(rows, 2)
        for name, call in calls.items():
            expected = model(W, x) if name in ("apply", "parallel") else loss_fn(W, x)
            np.testing.assert_allclose(call(x), expected, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(call(x), expected, rtol=1e-5, err_msg=name)  # a known one
    config = dp._config
    kept = (config.layouts, config.batch_layouts, config.calls, program.programs, step._program.compiled)
    assert [len(x) for x in kept] == [3] * len(kept)


def test_what_is_dropped_is_what_was_not_used_for_longest(few, compilations):
    dp = jdp.DataParallel(lambda v, x: x * v, devices=range(2))
    compiled = {}
    for rows in (2, 4, 6, 2, 8, 2, 10, 2):
        compilations()
        dp(1.0, np.ones(rows, np.float32))
        dp(1.0, np.ones(rows, np.float32))
        compiled.setdefault(rows, []).append(compilations())
    first, *later = compiled[2]
    assert first > 0 and later == [0, 0, 0]  # the one that was used all the time, once


@pytest.mark.full
def test_a_dropped_program_is_freed(few):
    dp = jdp.DataParallel(model, devices=range(2))
    calls, step = doors(dp)
    for call in calls.values():
        call(np.ones((2, 2), np.float32))
    programs = [
        next(iter(dp._config.program(dp.module).programs.values())),
        next(iter(step._program.compiled.values())),
    ]
    refs = [weakref.ref(program) for program in programs]
    del programs
    for rows in (4, 6, 8, 10):
        for call in calls.values():
            call(np.ones((rows, 2), np.float32))
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["linen", "function", "function with axes"])
def test_a_module_that_is_swapped_out_is_freed(kind):
    class Model(nn.Module):
        factor: float

        def __call__(self, x):
            return x * self.factor

    def make(factor):
        return Model(factor) if kind == "linen" else lambda v, x: x * factor

    dp = jdp.DataParallel(make(1.0), devices=range(2), out_axes=0 if kind == "function with axes" else None)
    x, seen, kept = np.ones(4, np.float32), [], make(7.0)
    for factor in (1.0, 2.0, 3.0):
        dp.module = make(factor)
        seen.append(weakref.ref(dp.module))
        for module in (dp.module, kept, dp.module):
            dp.module = module
            np.testing.assert_array_equal(dp.apply({}, x), x * (7.0 if module is kept else factor))
        module = None
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True, False]


def test_a_module_that_somebody_has_is_compiled_once(compilations):
    modules = [nn.Dense(2), nn.Dense(2, use_bias=False)]
    dp = jdp.DataParallel(modules[0], devices=range(2))
    x = np.ones((4, 3), np.float32)
    variables = [jdp.replicate(m.init(jax.random.key(0), x), dp.devices) for m in modules]
    for i in range(6):
        if i == 2:
            compilations()
        dp.module = modules[i % 2]
        dp.apply(variables[i % 2], x)
    assert compilations() == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_scattering_jax_arrays_compiles_nothing(compilations, dtype):
    """JAX keeps a program for the slices of each shape, forever: on CPU devices they are taken by numpy."""
    batches = [jax.device_put(np.arange(2.0 * rows).reshape(rows, 2).astype(jnp.dtype(dtype))) for rows in range(1, 9)]
    compilations()
    found = [jdp.scatter({"x": x}, devices=range(3)) for x in batches]
    assert compilations() == 0
    for x, s in zip(batches, found, strict=True):
        parts = [np.asarray(s[i]["x"]) for i in range(len(s))]
        np.testing.assert_array_equal(np.concatenate(parts), np.asarray(x))
        x.delete()  # what was scattered does not depend on it
        np.testing.assert_array_equal(np.asarray(s[0]["x"]), parts[0])


DOORS = ["apply", "value_and_grad", "train_step", "parallel"]
SCRIPT = """
import jdp; jdp.virtual_cpu_devices(2)
import gc, sys, numpy as np, jax, optax
sys.path.insert(0, {here!r})
import test_memory as t

def megabytes():
    gc.collect()
    (line,) = [x for x in open("/proc/self/status") if x.startswith("VmRSS")]
    return int(line.split()[1]) / 1024

jdp._core.programs.SIZES = {kept}
calls, _ = t.doors(jdp.DataParallel(t.model))
calls = [calls[door] for door in {doors!r}]
found = []
for rows in range(2, 2 + {sizes}):
    call = calls[rows % len(calls)]
    jax.block_until_ready(call(np.ones((rows, 2), np.float32)))
    if rows - 1 in ({warm}, {sizes}):
        found.append(megabytes())
print(found[1] - found[0])
"""


def growth(doors, sizes, warm, kept):
    """Megabytes that a process grows by from so many sizes, `warm`, to `sizes`, which go through the doors in turn."""
    code = SCRIPT.format(here=str(pathlib.Path(__file__).parent), doors=doors, sizes=sizes, warm=warm, kept=kept)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_sizes_take_no_more_memory_than_few():
    """As a script, this file takes other numbers: python tests/core/test_memory.py SIZES WARM KEPT."""
    assert growth(DOORS, sizes=160, warm=80, kept=16) < 80  # 2.5 MB for each size before: 200


if __name__ == "__main__":
    sizes, warm, kept = map(int, sys.argv[1:])
    print(f"from {warm} to {sizes} sizes: {growth(DOORS, sizes, warm, kept):.0f} MB")
