"""prefetch: the next batches are scattered ahead, in order, and whatever happens nothing is left behind."""

import collections
import contextlib
import functools
import gc
import itertools
import threading
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from laws import NUMBERS

import jdp

DP = jdp.DataParallel(lambda w, x: x * w, devices=range(4))
WEIGHT = np.float32(2)

try:
    import torch
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="there is no torch here")


def batches(count, rows=5):
    return [np.full((rows, 2), i, np.float32) for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_batch_comes_once_and_in_order(size, count):
    got = list(DP.prefetch(batches(count), size=size))
    assert len(got) == count and all(isinstance(s, jdp.Scattered) for s in got)
    for scattered, batch in zip(got, batches(count), strict=True):
        np.testing.assert_array_equal(jdp.gather(scattered), batch)


def test_the_size_may_be_an_integer_of_numpy():
    assert [batch.rows for batch in DP.prefetch(batches(3), size=np.int64(2))] == [5, 5, 5]


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
        assert scattered["y"][1:] == ("name", 3)
        np.testing.assert_array_equal(dp(WEIGHT, scattered), 2 + batch["y"][0] * np.ones((2, 1)))


@pytest.mark.full
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
    for scattered in dp.prefetch(batches(3, 12)):
        dp(w, scattered)
    dp(w, batches(1, 12)[0])
    assert calls == [3]


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


class Broken(Exception):
    pass


@pytest.mark.parametrize("kind", [Broken, SystemExit, GeneratorExit])
def test_an_exception_comes_after_the_batches_before_it(kind):
    def source():
        yield from batches(3)
        raise kind("the disk is gone")

    got = []
    with pytest.raises(kind, match="the disk is gone"):
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


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_loop_over_a_loader_is_refused(fails, refused):
    """A loader of torch would begin again; here no batch would come, without a word."""
    ahead = DP.prefetch([*batches(2), (np.ones(3), np.ones(4))][: 2 + fails], size=0)
    for _ in itertools.islice(ahead, 1):
        assert iter(ahead) is ahead  # another loop goes on with the rest
    with pytest.raises(ValueError, match="must agree") if fails else contextlib.nullcontext():
        assert len([*ahead]) == 1
    with refused(RuntimeError, "prefetch", "for each epoch"):
        list(ahead)


def test_a_second_loop_over_an_iterator_is_as_in_python():
    ahead = DP.prefetch(iter(batches(2)))
    assert [len([*ahead]) for _ in range(2)] == [2, 0]


@pytest.mark.one_case
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
    ((rows, whole),) = dp.prefetch([(x, table)])
    assert rows.sizes == (2, 2, 1) and rows[1].shape == (2, 2)
    assert whole[1].shape == (3,)
    np.testing.assert_array_equal(dp(np.float32(2), rows, whole), 2 * x + 3)
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


Pair = collections.namedtuple("Pair", "x y")
X = np.random.RandomState(0).randn(11, 3).astype(np.float32)
Y = np.random.RandomState(1).randn(11).astype(np.float32)
W = np.arange(1, 4, dtype=np.float32)


def parts(rows):
    return X[:rows], Y[:rows]


CONTAINERS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"image": x, "label": y},
    "named": Pair,
    "nested": lambda x, y: {"in": (x, [None, "name", 3, 0.5]), "out": {"y": y, "scale": np.float32(2)}},
    "keys": lambda x, y: (x, jax.random.split(jax.random.key(3), len(x)), jax.random.key(4), y),
}


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [8, 5, 0], ids="{} rows".format)
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_a_batch_keeps_its_containers(make, rows, n, same):
    """What comes out has the tree that went in, a `Scattered` for each array; `gather` gives the batch back."""
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(n))
    batch = make(*parts(rows))
    (got,) = dp.prefetch([batch])
    is_scattered = lambda x: isinstance(x, jdp.Scattered)  # noqa: E731
    leaves, treedef = jax.tree.flatten(got, is_leaf=is_scattered)
    given, structure = jax.tree.flatten(batch)
    assert treedef == structure and type(got) is type(batch)
    for x, leaf in zip(given, leaves, strict=True):
        if hasattr(x, "shape"):
            assert is_scattered(leaf) and leaf.sizes == jdp.scatter(batch, range(n)).sizes
        else:
            assert leaf is x
    same(jdp.gather(got), batch)
    same(dp.gather(got, None), batch)
    same(jdp.gather(jdp.scatter(got, range(n))), batch)


def test_gather_and_reduce_add_of_a_batch():
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(2))
    (got,) = dp.prefetch([{"x": X[:4], "name": "a", "list": [Y[:4]]}])
    np.testing.assert_array_equal(jdp.gather(got, "cpu:3")["list"][0], Y[:4])
    summed = jdp.reduce_add(got)
    assert summed["name"] == "a"
    np.testing.assert_array_equal(summed["x"], X[:2] + X[2:4])
    axes = jdp.DataParallel(lambda w, x: x * w, devices=range(2), dim=1)
    (got,) = axes.prefetch([(X, X[:4])])
    np.testing.assert_array_equal(axes.gather(got, None)[1], X[:4])
    np.testing.assert_array_equal(jdp.gather(got, dim=1)[0], X)


def loss_of(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@functools.cache
def wanted(rows, steps=2):
    """Parameters after some steps on one device, in plain optax."""
    tx, w = optax.sgd(0.1), jnp.asarray(W)
    state = tx.init(w)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(loss_of)(w, *parts(rows)), state)
        w = optax.apply_updates(w, updates)
    return np.asarray(w)


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [8, 11, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_for_x_y_in_prefetch_does_not_depend_on_the_number_of_devices(n, rows):
    dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=range(n))
    step = dp.train_step(lambda v, b: loss_of(v["params"], *b), optax.sgd(0.1))
    state = step.init({"params": W})
    for x, y in dp.prefetch([parts(rows)] * 2):
        state, metrics = step(state, (x, y))
    np.testing.assert_allclose(state.params, wanted(rows), rtol=2e-5)
    by_name = dp.train_step(lambda v, b: loss_of(v["params"], b["x"], b["y"]), optax.sgd(0.1))
    state = by_name.init({"params": W})
    for batch in dp.prefetch([Pair(*parts(rows))] * 2):  # in another container
        state, metrics = by_name(state, {"y": batch.y, "x": batch.x})
    np.testing.assert_allclose(state.params, wanted(rows), rtol=2e-5)
    for batch in dp.prefetch([{"x": X[:rows], "y": Y[:rows]}]):
        state, metrics = by_name(by_name.init({"params": W}), batch)
    np.testing.assert_allclose(metrics["loss"], loss_of(W, *parts(rows)), rtol=2e-5)


@pytest.mark.full
@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [8, 7])
def test_every_door_takes_the_parts_of_a_batch(n, rows):
    x, y = parts(rows)
    want = x @ W + y
    dp = jdp.DataParallel(lambda w, x, y: x @ w + y, devices=range(n))
    ((a, b),) = dp.prefetch([(x, y)])
    np.testing.assert_allclose(dp(W, a, b), want, rtol=2e-5)
    np.testing.assert_allclose(dp.apply(W, a, y=b), want, rtol=2e-5)
    np.testing.assert_allclose(dp(W, a, y), want, rtol=2e-5)  # beside one that is not scattered
    np.testing.assert_allclose(jdp.data_parallel(_dot, W, (a, b), range(n)), want, rtol=2e-5)
    np.testing.assert_allclose(jdp.gather(jdp.parallel_apply(_dot, W, (a, b))), want, rtol=2e-5)
    np.testing.assert_allclose(jdp.gather(jdp.parallel_apply(_dot, W, (a,), {"y": b})), want, rtol=2e-5)
    value, grad = dp.value_and_grad(loss_of)(W, a, b)
    np.testing.assert_allclose(value, loss_of(W, x, y), rtol=2e-5)
    np.testing.assert_allclose(grad, jax.grad(loss_of)(W, x, y), rtol=2e-4, atol=1e-5)
    rows_of = dp.parallel(lambda w, batch: (w, batch["x"] @ w + batch["y"]))
    np.testing.assert_allclose(rows_of(W, {"x": a, "y": b})[1], want, rtol=2e-5)
    net, bare = (nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    wrapper = jdp.DataParallel(net, devices=range(n))
    step = wrapper.train_step(lambda m, batch: jnp.mean((m(batch["x"])[:, 0] - batch["y"]) ** 2), optax.sgd(0.1))
    (batch,) = wrapper.prefetch([{"x": x, "y": y}])
    np.testing.assert_allclose(wrapper(batch["x"]), bare(x), rtol=2e-5, atol=1e-6)
    want = float(jnp.mean((bare(x)[:, 0] - y) ** 2))
    assert float(step(batch)["loss"]) == pytest.approx(want, rel=1e-5)


def _dot(w, x, y):
    return x @ w + y


def test_a_key_of_a_batch_is_the_replicas_own():
    """A 0-d key is whole: folded by each replica, as one that was not scattered."""
    dp = jdp.DataParallel(lambda w, x, key: x + jax.random.normal(key, x.shape), devices=range(2))
    key = jax.random.key(5)
    ((x, k),) = dp.prefetch([(X, key)])
    got = dp(W, x, k)
    np.testing.assert_array_equal(got, dp(W, X, key))
    assert not np.array_equal(got[:3] - X[:3], got[6:9] - X[6:9])


def test_nnx_objects_of_a_batch_stay_what_they_are(n):
    rngs = nnx.Rngs(dropout=3)
    dp = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=range(n))
    for _, batch in zip(range(2), dp.prefetch({"x": X, "rngs": rngs} for _ in range(2)), strict=True):
        assert batch["rngs"] is rngs and isinstance(batch["x"], jdp.Scattered)
        assert jdp.gather(batch)["rngs"] is rngs


def test_a_step_on_batches_that_were_seen_looks_at_none_anew(monkeypatch):
    """The parts of a prefetched batch find its layout: nothing is split a second time, and nothing compiled."""
    traced = []

    def loss(v, batch):
        traced.append(len(batch[0]))
        return loss_of(v["params"], *batch)

    dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=range(4))
    step = dp.train_step(loss, optax.sgd(0.1))
    state = step.init({"params": W})
    *batches, one, other = dp.prefetch([parts(8), parts(11)] * 2)
    for x, y in batches:
        state, _ = step(state, (x, y))
    before = len(traced)
    monkeypatch.setattr(jdp._core.scatter, "_kinds_of_leaves", lambda *args, **kwargs: pytest.fail("split again"))
    state, _ = step(state, one)
    state, _ = step(state, other)
    assert before and len(traced) == before


ONE_BATCH = {
    "an array": (lambda: X, r"one array of shape \(11, 3\).*dp\.prefetch\(\[x\]\)"),
    "a jax array": (lambda: jnp.asarray(X), r"one array of shape \(11, 3\).*dp\.prefetch\(\[x\]\)"),
    "a tuple": (lambda: (X, Y), r"a tuple of 2 with arrays in it.*dp\.prefetch\(\[\(x, y\)\]\)"),
    "one in a tuple": (lambda: (X,), r"a tuple of 1.*dp\.prefetch\(\[\(x,\)\]\)"),
    "a named tuple": (lambda: Pair(X, Y), r"a tuple of 2"),
    "a tuple with a tree": (lambda: ({"a": X}, Y), r"a tuple of 2"),
    "a dict": (lambda: {"x": X}, r"a dict of 1, and each of its keys.*dp\.prefetch\(\[batch\]\)"),
    "a scattered": (lambda: jdp.scatter((X, Y), range(2)), r"a jdp\.Scattered of 2 chunks.*dp\.prefetch\(\[batch\]\)"),
    "scattered parts": (lambda: tuple(jdp.scatter(v, range(2)) for v in (X, Y)), r"a tuple of 2"),
    "a number": (lambda: 3, "batches is a int, which holds no batches"),
    "a name": (lambda: "train", "batches is a str, which holds no batches"),
    "None": (lambda: None, "batches is a NoneType"),
}


@pytest.mark.parametrize(("one", "match"), ONE_BATCH.values(), ids=ONE_BATCH.keys())
def test_one_batch_is_no_loader(one, match, refused):
    """Refused at the call, not when the first batch is asked for."""
    with refused(TypeError, "prefetch", match):
        DP.prefetch(one())


@needs_torch
def test_one_tensor_or_tensors_are_no_loader(refused):
    with refused(TypeError, "prefetch", r"one array of shape \(4, 2\).*dp\.prefetch\(\[x\]\)"):
        DP.prefetch(torch.ones(4, 2))
    with refused(TypeError, "prefetch", r"a tuple of 2.*dp\.prefetch\(\[\(x, y\)\]\)"):
        DP.prefetch((torch.ones(4), torch.ones(4)))
    assert len(list(DP.prefetch([torch.ones(4), torch.ones(4)]))) == 2


def test_lists_and_tuples_of_batches_are_loaders():
    for loader in ([X, X], ((X, Y), (X, Y)), iter([X, X]), (x for x in (X, X))):
        assert len(list(DP.prefetch(loader))) == 2
    assert list(DP.prefetch(())) == []


@pytest.mark.full
@needs_torch
@pytest.mark.parametrize(("n", "workers"), [(1, 0), (3, 0), (8, 0), (3, 1)])
def test_a_torch_loader(n, workers):
    data = TensorDataset(torch.from_numpy(X), torch.arange(11))
    dp = jdp.DataParallel(lambda w, x, y: x @ w + y, devices=range(n))
    loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context="spawn" if workers else None)
    got = [dp(W, x, y) for x, y in dp.prefetch(loader)]
    assert [len(y) for y in got] == [4, 4, 3]
    np.testing.assert_allclose(np.concatenate(got), X @ W + np.arange(11), rtol=2e-5)


@needs_torch
def test_a_torch_loader_of_dicts_with_names():
    rows = [{"x": X[i], "label": i, "name": f"row {i}"} for i in range(11)]
    dp = jdp.DataParallel(lambda w, x: x @ w, devices=range(2))
    (batch, *_) = dp.prefetch(DataLoader(rows, batch_size=8))
    assert batch["name"] == [f"row {i}" for i in range(8)]
    np.testing.assert_array_equal(jdp.gather(batch["label"]), np.arange(8))
    np.testing.assert_allclose(dp(W, batch["x"]), X[:8] @ W, rtol=2e-5)


@needs_torch
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float16", "float32", "int8", "uint8", "bool", "int32"])
def test_tensors_keep_their_bits(name):
    rows = torch.tensor([0.5, 1.5, -2.0, 0.0, 3.0]).to(getattr(torch, name))
    (got,) = DP.prefetch([rows])
    array = np.asarray(jdp.gather(got))
    assert array.dtype == np.dtype(getattr(ml_dtypes, name, name))
    np.testing.assert_array_equal(array.astype(np.float32), rows.to(torch.float32).numpy())


@needs_torch
def test_tensors_of_all_sorts(refused):
    base = torch.arange(12.0).reshape(3, 4)
    for rows in (base.t(), base[:, ::2], base.clone().requires_grad_(), base.to(torch.bfloat16).t()):
        (got,) = DP.prefetch([rows])
        np.testing.assert_array_equal(np.asarray(jdp.gather(got), np.float32), rows.detach().float().numpy())
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    (got,) = DP.prefetch([conjugated])
    np.testing.assert_array_equal(jdp.gather(got), conjugated.resolve_conj().numpy())
    with refused(TypeError, "prefetch", r"shape \(3, 4\) and layout torch.sparse_coo.*to_dense"):
        next(DP.prefetch([base.to_sparse()]))


@needs_torch
def test_tensors_are_copied_where_their_loader_may_fill_them_anew():
    """Not where torch's loader makes new ones: these are handed over as they are."""
    buffer = torch.zeros(8)

    def source():
        for i in range(6):
            yield buffer.fill_(i)

    assert [float(jdp.gather(s)[0]) for s in DP.prefetch(source(), 3)] == [0, 1, 2, 3, 4, 5]

    class Refilled(torch.utils.data.IterableDataset):
        def __iter__(self):
            return source()

    loader = DataLoader(Refilled(), batch_size=None)
    assert [float(jdp.gather(s)[0]) for s in DP.prefetch(loader, 3)] == [0, 1, 2, 3, 4, 5]
    rows = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)
    tensor = next(iter(rows))[0]
    assert np.shares_memory(jdp._wrapper.prefetch._to_numpy(rows)(tensor), tensor.numpy())
    assert not np.shares_memory(jdp._wrapper.prefetch._to_numpy([tensor])(tensor), tensor.numpy())
    own = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, collate_fn=lambda rows: [buffer])
    assert not np.shares_memory(jdp._wrapper.prefetch._to_numpy(own)(buffer), buffer.numpy())


def test_other_loaders():
    grain = pytest.importorskip("grain.python")
    source = grain.MapDataset.source(list(X)).batch(4)
    got = [jdp.gather(batch) for batch in DP.prefetch(source.to_iter_dataset())]
    np.testing.assert_array_equal(np.concatenate(got), X)


@pytest.mark.full
def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X, "label": np.arange(11)}).with_format("numpy")
    got = list(DP.prefetch(rows.iter(batch_size=4)))
    np.testing.assert_allclose(np.concatenate([jdp.gather(b)["x"] for b in got]), X)
    np.testing.assert_array_equal(np.concatenate([jdp.gather(b)["label"] for b in got]), np.arange(11))


def test_rows_as_lists_of_numbers_are_refused(refused):
    """As Hugging Face's datasets give them without a format."""
    with refused(TypeError, "prefetch", r"batch\['label'\] is a list of 11 Python numbers.*np\.asarray"):
        next(DP.prefetch([{"x": X.tolist(), "label": [0] * 11}]))
    with refused(TypeError, "prefetch", r"batch\['x'\] is a list of 11 lists of Python numbers, as many as"):
        next(DP.prefetch([{"x": X.tolist(), "label": np.zeros(11)}]))


def test_axes_of_its_own(refused):
    dp = jdp.DataParallel(lambda w, x, table: x @ w + table.sum(), devices=range(4))
    table = np.ones(8, np.float32)
    for batch in ((X, table), [X, table]):  # torch's loader makes lists of tuples
        ((x, whole),) = dp.prefetch([batch], in_axes=(0, None))
        assert x.sizes == whole.sizes == (3, 3, 3, 2) and whole[2].shape == (8,)
        np.testing.assert_allclose(dp(W, x, whole), X @ W + 8, rtol=2e-5)
    (batch,) = dp.prefetch([{"x": X.T, "whole": {"a": table}}], in_axes={"x": 1, "whole": None})
    assert batch["x"][0].shape == (3, 3) and batch["whole"]["a"][3].shape == (8,)
    ahead = dp.prefetch([{"x": X}], in_axes={"y": 0})
    with refused(ValueError, "prefetch", "in_axes does not fit the arguments.*tree prefix"):
        next(ahead)
    cut = jdp.DataParallel(lambda w, x, y: x, devices=range(4), in_axes=(0, None))
    x, y = (jdp.scatter(v, range(4)) for v in (X, X))
    with refused(ValueError, "DataParallel", r"args\[1\] came cut along axis 0, and in_axes has None.*in_axes"):
        cut(W, x, y)


def test_prefetch_leaves_the_callers_iterator_open():
    source = iter([NUMBERS, NUMBERS + 1, NUMBERS + 2])
    generator = (x for x in source)
    dp = jdp.DataParallel(lambda w, x: x * w, range(2))
    for _ in dp.prefetch(generator, size=0):
        break
    np.testing.assert_array_equal(next(generator), NUMBERS + 1)


def test_a_masked_array_is_refused():
    with pytest.raises(TypeError, match=r"jdp\.prefetch: batch is a numpy\.ma\.MaskedArray.*x\.filled\(value\)"):
        next(jdp.DataParallel(lambda w, x: w * x, devices=range(2)).prefetch([np.ma.array([1.0, 2.0], mask=[0, 1])]))
