"""prefetch: the next batches are scattered ahead, in order, and whatever happens nothing is left behind."""

import gc
import itertools
import threading
import time

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import jdp

DP = jdp.DataParallel(lambda w, x: x * w, devices=range(4))
WEIGHT = np.float32(2)


def batches(count, rows=5):
    return [np.full((rows, 2), i, np.float32) for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_batch_comes_once_and_in_order(size, count):
    got = list(DP.prefetch(batches(count), size=size))
    assert len(got) == count and all(isinstance(s, jdp.Scattered) for s in got)
    for scattered, batch in zip(got, batches(count), strict=True):
        np.testing.assert_array_equal(jdp.gather(scattered), batch)


def test_what_it_yields_takes_the_place_of_the_batch(devices):
    rows = [np.arange(2.0 * n, dtype=np.float32).reshape(n, 2) for n in (8, 8, 5, 0, 1)]
    for scattered, batch in zip(DP.prefetch(rows), rows, strict=True):
        assert scattered.sizes == jdp.scatter(batch, range(4)).sizes
        assert tuple(scattered.devices) == tuple(devices[: len(scattered)])
        np.testing.assert_array_equal(DP(WEIGHT, scattered), 2 * batch)
        np.testing.assert_array_equal(DP.apply(WEIGHT, scattered), 2 * batch)


def test_pytree_batches_and_dim():
    dp = jdp.DataParallel(lambda w, batch: batch["x"] * w + batch["y"][0], devices=range(3), dim=1)
    data = [{"x": np.ones((2, n), np.float32), "y": (np.full((1, n), n, np.float32), "name", 3)} for n in (6, 4)]
    for scattered, batch in zip(dp.prefetch(data), data, strict=True):
        np.testing.assert_array_equal(dp(WEIGHT, scattered), 2 + batch["y"][0] * np.ones((2, 1)))


def test_linen_and_nnx():
    model = nn.Dense(2)
    dp = jdp.DataParallel(model, devices=range(4))
    data = [np.random.RandomState(i).randn(5, 3).astype(np.float32) for i in range(3)]
    variables = dp.init(jax.random.key(0), data[0])
    for scattered, batch in zip(dp.prefetch(data), data, strict=True):
        np.testing.assert_allclose(dp.apply(variables, scattered), model.apply(variables, batch), rtol=1e-6)
        grads = jax.grad(lambda v, s=scattered: dp.apply(v, s).sum())(variables)
        np.testing.assert_allclose(grads["params"]["bias"], [5, 5], rtol=1e-6)
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    wrapper = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=range(4))
    for scattered, batch in zip(wrapper.prefetch(data), data, strict=True):
        np.testing.assert_allclose(wrapper(scattered), net(batch), rtol=1e-6)


def test_a_prefetched_batch_beside_one_that_is_not():
    dp = jdp.DataParallel(lambda w, x, y: x * w + y, devices=range(4))
    (scattered,) = dp.prefetch([np.arange(5.0, dtype=np.float32)])
    np.testing.assert_array_equal(dp(WEIGHT, scattered, np.ones(5, np.float32)), 2 * np.arange(5) + 1)


def test_no_program_of_its_own():
    """A prefetched batch runs the program that was compiled for the bare one."""
    calls = []

    def model(w, x):
        calls.append(len(x))
        return x * w

    dp = jdp.DataParallel(model, devices=range(4))
    w = jdp.replicate(WEIGHT, range(4))
    for scattered in dp.prefetch(batches(3, 8)):
        dp(w, scattered)
    dp(w, batches(1, 8)[0])
    assert calls == [2]


def test_it_runs_ahead_but_no_further_than_size():
    taken = []

    def source():
        for i in itertools.count():
            taken.append(i)
            yield np.full(4, i, np.float32)

    ahead = DP.prefetch(source(), size=2)
    for i in range(5):
        scattered = next(ahead)
        assert float(scattered[0][0]) == i
        deadline = time.monotonic() + 5
        while len(taken) < i + 2 and time.monotonic() < deadline:  # a thread may need a moment
            time.sleep(0.01)
        time.sleep(0.02)
        assert i + 2 <= len(taken) <= i + 4  # one in use, two ahead, perhaps one in the reader's hand
    ahead.close()


def test_an_exception_comes_after_the_batches_before_it():
    class Broken(Exception):
        pass

    def source():
        yield from batches(3)
        raise Broken("the disk is gone")

    got = []
    with pytest.raises(Broken, match="the disk is gone"):
        for scattered in DP.prefetch(source(), size=2):
            got.append(float(scattered[0][0, 0]))
    assert got == [0, 1, 2]


def test_an_exception_at_once_and_from_the_iterator_itself():
    def source():
        raise KeyError("first")
        yield

    with pytest.raises(KeyError, match="first"):
        next(iter(DP.prefetch(source())))

    class NotIterable:
        def __iter__(self):
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        next(iter(DP.prefetch(NotIterable())))


def test_a_batch_that_cannot_be_scattered_is_refused_in_its_turn():
    data = [np.ones(4, np.float32), (np.ones(4), np.ones(3)), np.ones(4, np.float32)]
    ahead = DP.prefetch(data, size=3)
    assert next(ahead).sizes == (1, 1, 1, 1)
    with pytest.raises(ValueError, match="(?s)(?=.*4)(?=.*3)"):
        next(ahead)


def test_after_the_end_it_stays_ended():
    ahead = DP.prefetch(batches(1))
    assert iter(ahead) is ahead
    next(ahead)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)


@pytest.mark.parametrize("how", ["close", "break", "drop", "exhaust", "error", "never started"])
def test_no_thread_is_left_behind(how):
    before = set(threading.enumerate())
    closed = []

    def source():
        try:
            yield from batches(2 if how == "exhaust" else 1000)
        finally:
            closed.append(True)

    ahead = DP.prefetch(source(), size=2)
    if how == "close":
        next(ahead)
        ahead.close()
    elif how == "break":
        for _ in ahead:
            break
    elif how == "drop":
        next(ahead)
    elif how == "exhaust":
        assert len(list(ahead)) == 2
    elif how == "error":
        with pytest.raises(RuntimeError, match="consumer"):
            for _ in ahead:
                raise RuntimeError("consumer")
    del ahead
    gc.collect()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()
    assert closed or how == "never started"  # the source's own `finally` ran


def aligned(rows):
    """A float32 buffer that device_put aliases on CPU: it begins at a multiple of 64 bytes."""
    raw = np.zeros(rows * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * 4].view(np.float32)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_loader_may_use_its_buffer_again(size):
    buffer = aligned(8)

    def source():
        for i in range(6):
            buffer[:] = i
            yield buffer

    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(4))
    assert [float(dp(np.float32(1), s)[0]) for s in dp.prefetch(source(), size)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [-1, True, 1.5])
def test_a_size_that_is_no_number_of_batches(size):
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(4))
    with pytest.raises(ValueError, match=r"jdp\.prefetch: size is .* Pass 0 or more"):
        dp.prefetch([np.ones(8)], size)


def test_axes_are_those_of_the_call():
    dp = jdp.DataParallel(lambda w, x, table: x * w + table.sum(), devices=range(4), in_axes=(1, None), out_axes=1)
    x, table = np.arange(10, dtype=np.float32).reshape(2, 5), np.ones(3, np.float32)
    (scattered,) = dp.prefetch([(x, table)])
    assert scattered.sizes == (2, 2, 1)
    assert scattered[1][1].shape == (3,)
    one = jdp.DataParallel(lambda w, x: x * w, devices=range(4), in_axes=(1,), out_axes=1)
    (scattered,) = one.prefetch([x])
    np.testing.assert_array_equal(one(np.float32(2), scattered), 2 * x)


def test_a_scattered_tuple_is_the_arguments_of_data_parallel():
    x, y = np.arange(10.0, dtype=np.float32), np.ones(10, np.float32)
    scattered = jdp.scatter((x, y), range(4))
    out = jdp.data_parallel(_add, np.float32(2), scattered, range(4))
    np.testing.assert_array_equal(out, 2 * x + y)


def _add(w, x, y):
    return w * x + y
