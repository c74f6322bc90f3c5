"""Never a deadlock on CPU: loops of 5,000 steps that nobody waits for, on 8 virtual devices.

In processes of their own, for the number of threads is fixed when JAX starts, and a deadlock aborts.
"""

import collections
import os
import subprocess
import sys
import textwrap

import pytest

from jdp._core import programs

STEPS = 5_000  # a deadlock comes once about 32 are in flight


def run(code, **env):
    """The last line that a fresh Python prints, with only these variables beside the path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=kept | env, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.full
def test_eager_loop_of_collectives_without_set_up():
    # 8 devices by XLA's own flag: no help from virtual_cpu_devices, jdp's own queue must do it.
    code = f"""
        import jax, jdp, numpy as np
        dp = jdp.DataParallel(lambda w, x: jax.lax.pmean(x * w, "data"))
        w = jdp.replicate(np.float32(3))
        for _ in range({STEPS}):
            y = dp(w, np.arange(8, dtype=np.float32))
        print(y.tolist())
    """
    last = run(code, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert last == str([10.5] * 8)


@pytest.mark.full
def test_calls_without_collectives_among_calls_with_them():
    """The former must not keep the latter from their devices."""
    code = f"""
        import jax, jdp, numpy as np
        plain, mean = jdp.DataParallel(lambda w, x: x * w), jdp.DataParallel(lambda w, x: jax.lax.pmean(x * w, "data"))
        w, x = jdp.replicate(np.float32(3)), np.arange(8, dtype=np.float32)
        for i in range({STEPS}):
            y = plain(w, x) if i % 50 else mean(w, x)
        print(y.tolist(), mean(w, x).tolist())
    """
    last = run(code, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert last == f"{[3.0 * i for i in range(8)]} {[10.5] * 8}"


@pytest.mark.full
def test_jitted_loop_of_the_user_with_virtual_cpu_devices():
    code = f"""
        import jdp
        jdp.virtual_cpu_devices(8)
        import jax, numpy as np
        dp = jdp.DataParallel(lambda w, x: x * w)
        x = jax.device_put(np.ones(8, np.float32), jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(jax.devices()), ("data",)), jax.sharding.PartitionSpec("data")))
        step = jax.jit(lambda w, x: w + jax.grad(lambda w: dp(w, x).sum())(w))
        w = jdp.replicate(np.float32(0))
        for _ in range({STEPS}):
            w = step(w, x)
        print(float(w))
    """
    assert run(code) == str(8.0 * STEPS)


def test_the_queue_is_bounded_and_waits():
    import jax
    import numpy as np

    import jdp
    from jdp._core import programs

    dp = jdp.DataParallel(lambda w, x: w * x)
    outs = [dp(1.0, np.ones(8, np.float32)) for _ in range(40)]
    assert len(programs._running) < 12
    assert all(y.is_ready() for y in outs[:-12])
    jax.block_until_ready(outs)


def test_known_calls_without_collectives_need_no_queue():
    """No replica waits for another in them, so that any number may be in flight."""
    import jax
    import numpy as np

    import jdp
    from jdp._core import programs

    plain = jdp.DataParallel(lambda w, x: w * x)
    of_columns = jdp.DataParallel(lambda w, x: 2 * w * jax.nn.softmax(x))  # each replica adds up its own numbers
    mean = jdp.DataParallel(lambda w, x: jax.lax.pmean(w * x, "data"))
    w, (x,) = jdp.replicate(np.float32(2), plain.devices), plain.prefetch([np.ones((8, 2), np.float32)])
    for dp, is_queued in ((plain, False), (of_columns, False), (mean, True)):
        for _ in range(2):  # known from now on
            dp(w, x)
        programs.wait_for_all()
        np.testing.assert_array_equal(dp(w, x), np.full((8, 2), 2.0))
        assert bool(programs._running) == is_queued
    # The same batch with other parameters may be another program.
    either = jdp.DataParallel(lambda w, x: jax.lax.pmean(w["w"] * x, "data") if "mean" in w else w["w"] * x)
    for _ in range(2):
        for _ in range(2):  # known from now on, and without a collective
            either({"w": w}, x)
        programs.wait_for_all()
        either({"w": w, "mean": w}, x)
        assert programs._running


def test_so_are_steps():
    import jax
    import numpy as np
    import optax

    import jdp
    from jdp._core import programs

    dp = jdp.DataParallel(lambda v, x: x * v["params"])
    step = dp.train_step(lambda v, x: dp(v, x).mean(), optax.sgd(0.1))
    state = step.init({"params": np.float32(1)})
    (batch,) = dp.prefetch([np.ones(8, np.float32)])
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    assert len(programs._running) < 12
    assert all(y.is_ready() for y in losses[:-12])
    jax.block_until_ready(losses)


@pytest.mark.full
def test_virtual_cpu_devices_sets_up_devices_and_threads():
    code = """
        import os, jdp
        import numpy as np
        jdp.virtual_cpu_devices(np.int64(3))
        import jax
        jdp_devices = len(jax.devices())
        jdp.virtual_cpu_devices(3)  # the same again is no error
        print(jdp_devices, os.environ["NPROC"])
    """
    assert run(code) == "3 6"


@pytest.mark.full
def test_virtual_cpu_devices_wins_over_the_older_flag():
    code = "import jdp; jdp.virtual_cpu_devices(3); import jax; print(len(jax.devices()))"
    assert run(code, XLA_FLAGS="--xla_force_host_platform_device_count=8") == "3"


def test_two_threads_wait_for_the_last(monkeypatch):
    """Both see that there is one, and the other takes it."""

    class Shared(collections.deque):
        def __len__(self):
            seen = super().__len__()
            self.clear()  # the other thread, between two steps of this one
            return seen

    running = Shared()
    running.append(("scale", None))
    monkeypatch.setattr(programs, "_running", running)
    programs.wait_for_all()


def test_the_error_of_an_earlier_call_names_it():
    """It is raised once, where the queue waits, in whatever call that is."""
    import numpy as np

    import jdp

    class Failed:
        def is_deleted(self):
            return False

        def block_until_ready(self):
            raise RuntimeError("the sensor is gone")

    def scale(w, x):
        return w * x

    def sensor():
        raise AssertionError("it has run")

    x, dp = np.ones(8, np.float32), jdp.DataParallel(scale)
    programs.wait_for_all()
    assert dp(2.0, x).tolist() == [2.0] * 8
    assert [name for name, _ in programs._running] == ["scale"]
    programs._wait_for_earlier(sensor, Failed())
    with pytest.raises(RuntimeError, match="the sensor is gone") as caught:
        for _ in range(12):
            dp(2.0, x)
    (note,) = caught.value.__notes__
    assert note.startswith("jdp: this is the error of an earlier call, of 'sensor'; the call that raises it only")
    for _ in range(24):
        assert dp(2.0, x).tolist() == [2.0] * 8


@pytest.mark.full
def test_virtual_cpu_devices_says_so_when_jax_has_started():
    code = """
        import jax, jdp
        jax.devices()
        try:
            jdp.virtual_cpu_devices(4)
        except RuntimeError as error:
            print(error)
    """
    assert "JAX has started already, with 1 CPU devices" in run(code)


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "4"])
def test_virtual_cpu_devices_refuses_what_is_no_number_of_devices(n):
    import jdp

    with pytest.raises(ValueError, match=r"jdp\.virtual_cpu_devices: n is .* Pass 1 or more"):
        jdp.virtual_cpu_devices(n)


@pytest.mark.full
def test_loops_of_the_verbs_do_not_deadlock():
    code = """
import jax, jdp, numpy as np
s = jdp.scatter(np.ones((16, 64, 64), np.float32))
u = jdp.scatter(np.ones((15, 64, 64), np.float32))
for _ in range(3000):
    total, whole = jdp.reduce_add(s, "all"), jdp.gather(u, "sharded")
print(float(total.sum()), whole.shape)
"""
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PJRT_NPROC")}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=280)
    assert done.stdout.strip() == "65536.0 (15, 64, 64)", done.stderr[-2000:]
