"""batches: every row once an epoch, in numpy's order, on any number of devices; what is wrong has its row's index."""

import collections
import dataclasses
import gc
import itertools
import operator
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import one_in

import jdp

ROOT = pathlib.Path(__file__).parents[2]
DP = jdp.DataParallel(lambda w, x: x * w, devices=range(4))
X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
Y = np.arange(11, dtype=np.int32)
Pair = collections.namedtuple("Pair", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Digits:
    image: np.ndarray
    label: np.ndarray


@dataclasses.dataclass
class Unknown:
    image: np.ndarray


def order(rows, seed, epochs):
    """The rows of all epochs, by numpy alone."""
    if seed is None:
        return [np.arange(rows)] * epochs
    return [np.random.default_rng([seed, epoch]).permutation(rows) for epoch in range(epochs)]


def reference(rows, size, seed=None, epochs=1, drop_last=False):
    """The rows of each batch."""
    found = [epoch[k : k + size] for epoch in order(rows, seed, epochs) for k in range(0, rows, size)]
    return [batch for batch in found if len(batch) == size or not drop_last]


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def equal(found, expected):
    found = [np.asarray(jdp.gather(batch)) for batch in found]
    assert [batch.tolist() for batch in found] == [np.asarray(batch).tolist() for batch in expected]


class Recorded:
    """Rows that are their indices, and which of them were read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        assert type(i) is int
        self.read.append(i)
        return i


# ---- the order


@pytest.mark.each_value
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [None, 0, 2**40])
@pytest.mark.parametrize(("rows", "size"), [(23, 5), (8, 8), (3, 8), (16, 4), (5, 1)])
@pytest.mark.parametrize("kind", ["array", "rows"])
def test_every_row_once_an_epoch_in_the_order_of_numpy(n, seed, rows, size, kind):
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(n))
    data = np.arange(rows) if kind == "array" else Recorded(rows)
    batches = dp.batches(data, size, seed=seed, epochs=3)
    expected = reference(rows, size, seed, epochs=3)
    found = list(batches)
    equal(found, expected)
    assert len(batches) == len(expected) == 3 * batches.per_epoch
    for batch, wanted in zip(found, expected, strict=True):  # torch.chunk's rule, of the whole batch
        assert batch.sizes == jdp.chunk_sizes(len(wanted), n)
        for i, chunk in enumerate(np.split(wanted, np.cumsum(batch.sizes)[:-1])):
            np.testing.assert_array_equal(batch[i], chunk)
    values = np.concatenate([jdp.gather(batch) for batch in found]).reshape(3, rows)
    assert (np.sort(values) == np.arange(rows)).all()
    if seed is not None and rows > 8:
        assert len({epoch.tobytes() for epoch in values}) == 3


@pytest.mark.parametrize("start", [0, 1, 4, 5, 8, 14, 15, 40])
@pytest.mark.parametrize("drop_last", [False, True])
def test_start_is_to_skip(start, drop_last):
    """And no row that was taken before is read again."""
    data = Recorded(23)
    batches = DP.batches(data, 5, seed=1, epochs=3, start=start, drop_last=drop_last)
    expected = reference(23, 5, 1, 3, drop_last)[start:]
    assert len(batches) == len(expected) == operator.length_hint(batches)
    assert (batches.start, batches.taken) == (start, start)
    for _ in range(2):  # iterating again starts there again
        data.read.clear()
        equal(batches, expected)
        assert data.read == [i for batch in expected for i in batch.tolist()]
        assert batches.taken == start + len(expected)


def test_the_last_batch_comes_unless_it_is_dropped():
    assert [len(jdp.gather(b)) for b in DP.batches(X, 4)] == [4, 4, 3]
    dropped = DP.batches(X, 4, drop_last=True, epochs=2)
    assert [len(jdp.gather(b)) for b in dropped] == [4] * 4 and (len(dropped), dropped.per_epoch) == (4, 2)


def test_epochs_without_end(refused):
    batches = DP.batches(Recorded(5), 2, seed=3, epochs=None, start=4)
    equal(itertools.islice(batches, 6), reference(5, 2, 3, 4)[4:10])
    with refused(TypeError, "batches", match="epochs is None"):
        len(batches)
    assert operator.length_hint(batches, -1) == -1  # what a progress bar asks
    assert list(DP.batches(X, 2, epochs=0)) == []


def test_taken_counts_what_the_loop_has_taken_and_not_what_is_ahead():
    batches = DP.batches(X, 2, start=1, size=3)
    for number, _ in enumerate(batches, 2):
        assert batches.taken == number
        if number == 3:
            break
    equal(DP.batches(X, 2, start=batches.taken), [X[i : i + 2] for i in range(6, 11, 2)])


def test_taken_counts_the_newest_loop():
    batches = DP.batches(X, 2)
    older, newer = iter(batches), iter(batches)
    for loop in (older, older, newer, older):
        next(loop)
    assert batches.taken == 1


# ---- what data may be


COLUMNS = {
    "array": lambda x, y: x,
    "jax array": lambda x, y: jnp.asarray(x),
    "dict": lambda x, y: {"x": x, "y": y},
    "tuple": lambda x, y: (x, y),
    "named": Pair,
    "dataclass": Digits,
    "nested": lambda x, y: {"in": (x, [y]), "name": "train", "scale": np.float32(2), "none": None},
    "keys": lambda x, y: (x, jax.random.split(jax.random.key(3), 11)[y]),
    "big-endian": lambda x, y: (x.astype(">f4"), y.astype(">i2")),
    "strided": lambda x, y: (np.asfortranarray(x), np.repeat(y, 2)[::2]),
}


@pytest.mark.parametrize("make", COLUMNS.values(), ids=COLUMNS.keys())
@pytest.mark.parametrize("workers", [1, 3])
def test_a_tree_of_arrays_is_cut_along_its_rows(make, workers, same):
    found = list(DP.batches(make(X, Y), 4, workers=workers))
    assert len(found) == 3
    for k, batch in zip((0, 4, 8), found, strict=True):
        same(jdp.gather(batch), jdp.gather(next(DP.prefetch([make(X[k : k + 4], Y[k : k + 4])]))))
        assert type(batch) is type(make(X, Y)) or isinstance(batch, jdp.Scattered)


def test_shuffled_columns_keep_their_rows_together():
    for batch in DP.batches({"x": X, "y": Y}, 4, seed=5):
        np.testing.assert_array_equal(jdp.gather(batch["x"]), X[jdp.gather(batch["y"])])


def test_a_file_in_memory(tmp_path):
    np.save(tmp_path / "x.npy", X)
    found = DP.batches(np.load(tmp_path / "x.npy", mmap_mode="r"), 4, seed=1)
    equal(found, [X[rows] for rows in reference(11, 4, 1)])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_of_strided_data_copies_no_other_rows(axis):
    data = np.arange(2.0**20, dtype=np.float32).reshape(1024, 1024)[::2, ::2]
    batches = jdp.DataParallel(lambda w, x: x, devices=[0], dim=axis).batches(data, 4, seed=1, size=0)
    tracemalloc.start()
    try:
        batch = next(iter(batches))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(jdp.gather(batch, dim=axis), data.take(reference(512, 4, 1)[0], axis))
    assert most < data.nbytes / 8


@pytest.mark.parametrize("spec", [None, "i"])
def test_weak_types_stay_weak_wherever_they_lie(devices, spec):
    where = jax.sharding.NamedSharding(jax.make_mesh((1 if spec is None else 2,), ("i",)), jax.P(spec))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 12), where)
    data = {"x": jax.device_put(jnp.full(12, 1.5), where), "scale": jnp.asarray(2.0), "keys": keys}
    for batch in DP.batches(data, 4, seed=0):
        got = jdp.DataParallel(lambda w, b: w * b["x"] * b["scale"], DP.devices)(jnp.bfloat16(3), batch)
        assert got.dtype == jnp.bfloat16 and got.tolist() == [9.0] * 4


@pytest.mark.parametrize("data", [jax.random.split(jax.random.key(0), 11), jnp.full(11, 1.5)], ids=["keys", "weak"])
def test_rows_of_an_array_on_a_device_are_taken_under_a_transfer_guard(data):
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")  # a context would not reach the threads
    try:
        found = [batch.sizes for batch in DP.batches(data, 4, seed=0)]
    finally:
        jax.config.update("jax_transfer_guard", before)
    assert sum(map(sum, found)) == 11


def test_axes_are_those_of_the_call():
    dp = jdp.DataParallel(lambda w, x, table: x * w, devices=range(4), in_axes=(1, None), out_axes=1)
    for k, (x, table) in zip((0, 4, 8), dp.batches((X.T, np.ones(3)), 4), strict=True):
        np.testing.assert_array_equal(jdp.gather(x, dim=1), X.T[:, k : k + 4])
        assert table[1].shape == (3,)
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(2), dim=-1)
    found = [np.asarray(dp.gather(x, None)) for x in dp.batches([row for row in X], 4)]
    np.testing.assert_array_equal(np.concatenate(found, 1), X.T)


ROWS = {
    "arrays": (lambda i: X[i], lambda r: X[r]),
    "numbers": (lambda i: float(i), lambda r: np.float32(r)),
    "bools": (lambda i: i % 2 == 0, lambda r: r % 2 == 0),
    "tuples": (lambda i: (X[i], i), lambda r: (X[r], Y[r])),
    "named": (lambda i: Pair(X[i], {"y": np.int32(i)}), lambda r: Pair(X[r], {"y": Y[r]})),
    "dicts": (lambda i: {"x": jnp.asarray(X[i]), "y": i}, lambda r: {"x": X[r], "y": Y[r]}),
    "lists of numbers": (lambda i: {"ids": [[i, 1]]}, lambda r: {"ids": np.stack([[[i, 1]] for i in r])}),
    "lists of complex": (lambda i: [1j, i], lambda r: np.stack([[1j, i] for i in r]).astype(np.complex64)),
    "lists of arrays": (lambda i: [X[i], np.float16(i)], lambda r: [X[r], r.astype(np.float16)]),
    "None beside": (lambda i: (X[i], None), lambda r: (X[r], None)),
}


@pytest.mark.parametrize(("row", "expected"), ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_are_stacked_leaf_by_leaf(row, expected, workers, same):
    found = list(DP.batches([row(i) for i in range(11)], 4, seed=2, workers=workers))
    for batch, rows in zip(found, reference(11, 4, 2), strict=True):
        same(jdp.gather(batch), jax.tree.map(np.asarray, expected(rows)))


def test_anything_with_len_and_an_index_is_rows():
    equal(DP.batches(range(3, 8), 2), [[3, 4], [5, 6], [7]])
    equal(DP.batches(collections.deque([1, 2, 3]), 2), [[1, 2], [3]])


@pytest.mark.full
def test_a_loop_that_is_open_when_python_ends_says_nothing():
    script = "import jdp; it = iter(jdp.DataParallel(lambda w, x: x).batches(list(range(20)), 4)); next(it)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stderr) == (0, "")


def test_rows_that_come_in_one_buffer():
    """As a reader that decodes each row into the same array gives them."""

    class Reader:
        buffer = np.zeros(3, np.float32)

        def __len__(self):
            return 8

        def __getitem__(self, i):
            self.buffer[:] = i
            return {"x": self.buffer, "of": [self.buffer[:1]]}

    batches = [jdp.gather(batch) for batch in DP.batches(Reader(), 4)]
    for first, batch in zip((0, 4), batches, strict=True):
        np.testing.assert_array_equal(batch["x"], np.repeat(np.arange(first, first + 4), 3).reshape(4, 3))
        np.testing.assert_array_equal(batch["of"][0][:, 0], np.arange(first, first + 4))


def test_torch_datasets_and_tensors():
    torch = pytest.importorskip("torch")
    from torch.utils.data import Subset, TensorDataset

    data = TensorDataset(torch.from_numpy(X), torch.arange(11))
    for rows, (x, y) in zip(reference(11, 4, 7), DP.batches(data, 4, seed=7, workers=2), strict=True):
        np.testing.assert_array_equal(jdp.gather(x), X[rows])
        np.testing.assert_array_equal(jdp.gather(y), rows)
    ((_, y),) = DP.batches(Subset(data, [3, 1]), 2)
    assert jdp.gather(y).tolist() == [3, 1]
    ((x, y),) = DP.batches((torch.from_numpy(X), torch.arange(11).to(torch.bfloat16)), 11)
    np.testing.assert_array_equal(jdp.gather(x), X)
    assert jdp.gather(y).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match=r"data is a DataLoader.*dp\.prefetch"):
        DP.batches(torch.utils.data.DataLoader(data), 2)
    with pytest.raises(TypeError, match=r"jdp\.batches: a torch tensor .*sparse_coo.*to_dense"):
        DP.batches(torch.ones(3, 4).to_sparse(), 2)


@pytest.mark.full
def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    table = pytest.importorskip("pyarrow").table({"ids": [[i, 2 * i] for i in range(11)], "label": range(11)})
    data = datasets.Dataset(table, fingerprint="of its own")  # it would pickle the table to find one
    for kind in (None, "numpy"):
        for rows, batch in zip(reference(11, 4, 7), DP.batches(data.with_format(kind), 4, seed=7), strict=True):
            np.testing.assert_array_equal(jdp.gather(batch["ids"]), np.stack([rows, 2 * rows], 1))
            np.testing.assert_array_equal(jdp.gather(batch["label"]), rows)
    with pytest.raises(TypeError, match=r"a DatasetDict of the splits 'train', 'test'; .* data\['train'\]\."):
        DP.batches(datasets.DatasetDict(train=data, test=data), 4)


# ---- bad input


NO_NUMBER = {
    "batch_size": [0, -1, 2.0, True, None, "4"],
    "seed": [-1, 1.5, "a"],
    "start": [-1, 0.0, None],
    "epochs": [-1, 1.5],
    "size": [-1, 2.5, True],
    "workers": [0, -2, 1.5],
}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, values in NO_NUMBER.items() for v in values])
def test_a_number_out_of_its_range(name, value, refused):
    with refused(ValueError, "batches", match=rf"{name} is {re.escape(repr(value))}; .*Pass an int, [01] or more"):
        DP.batches(X, **{"batch_size": 4, name: value})


def test_data_in_several_arguments(refused):
    """As in torch's TensorDataset(x, y)."""
    with refused(ValueError, "batches", match=r"batch_size is an array; .*Pass dp\.batches\(\(x, y\), 64\)"):
        DP.batches(X, np.arange(len(X)))


def test_numbers_of_other_kinds():
    equal(DP.batches(X, np.int64(4), start=jnp.asarray(1), seed=np.uint8(3)), [X[r] for r in reference(11, 4, 3)[1:]])


BAD = {
    "no rows": (ValueError, lambda: X[:0], "data is a ndarray with 0 rows"),
    "no list": (ValueError, lambda: [], "data is a list with 0 rows"),
    "no columns": (ValueError, lambda: {"x": X[:0]}, "data is a dict with 0 rows"),
    "no array": (ValueError, lambda: (1, 2), "data is a tuple that holds no array with rows"),
    "None": (ValueError, lambda: None, "data is a NoneType that holds no array with rows"),
    "a scalar": (ValueError, lambda: np.float32(3), "no array with rows"),
    "unequal columns": (ValueError, lambda: {"x": X, "y": Y[:8]}, r"data\['x'\] has 11 rows .*data\['y'\] has 8 .*"),
    "a list beside arrays": (TypeError, lambda: {"x": X[:3], "y": [1, 2, 3]}, r"data\['y'\] is a list of 3 Python"),
    "strings": (TypeError, lambda: (X, np.array(["a"] * 11)), r"data\[1\] is an array of dtype <U1"),
    "a loader": (TypeError, lambda: iter([X]), r"data is a list_iterator, .*dp\.prefetch"),
    "a name": (TypeError, lambda: "train", "data is a str"),
    "a set": (TypeError, lambda: {1, 2}, "data is a set"),
    "a number": (TypeError, lambda: 3, "data is a int"),
    "a mapping": (TypeError, lambda: collections.UserDict(x=X), "data is a UserDict"),
    "a dict of its own": (TypeError, lambda: type("Own", (dict,), {})(x=X), "data is a Own, a subclass of dict"),
    "an unknown dataclass": (TypeError, lambda: Unknown(X), "data is a Unknown.*register_dataclass"),
    "scattered": (TypeError, lambda: jdp.scatter(X, range(2)), "data is a jdp.Scattered of 2 chunks"),
}


@pytest.mark.parametrize(("kind", "data", "match"), BAD.values(), ids=BAD.keys())
def test_data_without_rows_that_can_be_indexed(kind, data, match, refused):
    with refused(kind, "batches", match=match):
        DP.batches(data(), 4)


def test_an_epoch_without_a_batch(refused):
    with refused(ValueError, "batches", match="data has 11 rows, fewer than batch_size, 12, and drop_last"):
        DP.batches(X, 12, drop_last=True)


BAD_ROWS = {
    "another shape": (ValueError, {"x": np.ones(2)}, r"data\[6\]\['x'\] is float64\[2\], in data\[0\] .* float64\[3\]"),
    "another dtype": (ValueError, {"x": np.ones(3, int)}, r"data\[6\]\['x'\] is int64\[3\], in data\[0\] .* float64"),
    "other parts": (ValueError, {"y": np.ones(3)}, r"data\[6\] is a .*'y'.*, data\[0\] is a .*'x'"),
    "a string": (TypeError, {"x": "seven"}, r"data\[6\]\['x'\] is a str"),
    "objects": (TypeError, {"x": np.array([None])}, r"data\[6\]\['x'\] is an array of dtype object"),
    "a key": (TypeError, {"x": jax.random.key(0)}, r"data\[6\]\['x'\] is a key<fry>"),
    "lists of other lengths": (ValueError, {"x": [[1], [2, 3]]}, r"data\[6\]\['x'\] is a list with lists of different"),
    "nothing": (TypeError, None, r"data\[6\] is None"),
}


@pytest.mark.parametrize(("kind", "row", "match"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_row_unlike_the_others_is_named_after_the_batches_before_it(kind, row, match, refused):
    data, seen = [{"x": np.ones(3)}] * 11, []
    data[6] = row
    with refused(kind, "batches", match=match):
        for batch in DP.batches(data, 2):
            seen.append(batch["x"].sizes)
    assert seen == [(1, 1)] * 3


def test_parts_of_rows_that_would_be_whole_are_refused(refused):
    dp = jdp.DataParallel(lambda w, x, y: x * w, devices=range(2), in_axes=(0, None))
    with refused(ValueError, "batches", match="in_axes has None for a part of a row"):
        list(dp.batches([(1.0, 2.0)] * 3, 2))


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, KeyError, StopIteration])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_the_data_raises_comes_in_its_turn_with_the_index(error, workers):
    class Data(Recorded):
        def __getitem__(self, i):
            if i in (7, 8):
                raise error("the disk is gone")
            return super().__getitem__(i)

    before, seen = set(threading.enumerate()), []
    with pytest.raises(RuntimeError if error is StopIteration else error) as info:
        for batch in DP.batches(Data(20), 3, workers=workers):
            seen.append(int(jdp.gather(batch)[0]))
    assert seen == [0, 3]
    text = "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])
    assert "data[7]" in text and "data[8]" not in text
    if error is not StopIteration:
        assert "the disk is gone" in text
    wait_for(lambda: set(threading.enumerate()) <= before)


# ---- threads


@pytest.mark.one_case
@pytest.mark.parametrize("how", ["close", "break", "drop", "exhaust", "error", "never started"])
def test_no_thread_is_left_behind(how):
    before = set(threading.enumerate())
    iterator = iter(DP.batches(Recorded(6 if how == "exhaust" else 10_000), 2, workers=3))
    if how == "close":
        next(iterator)
        iterator.close()
    elif how == "break":
        for _ in iterator:
            break
    elif how == "drop":
        next(iterator)
    elif how == "exhaust":
        assert len(list(iterator)) == 3
    elif how == "error":
        with pytest.raises(RuntimeError, match="consumer"):
            for _ in iterator:
                raise RuntimeError("consumer")
    del iterator
    gc.collect()
    wait_for(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_it_reads_ahead_but_no_further(size):
    data = Recorded(1000)
    iterator = iter(DP.batches(data, 2, size=size))
    for taken in range(1, 5):
        next(iterator)
        most = 2 * (taken + size + max(1, size))
        wait_for(lambda most=most: len(data.read) == most)
        time.sleep(0.02)
        assert len(data.read) == most
    iterator.close()


def test_workers_read_at_once_and_the_order_stays():
    together = threading.Barrier(3)

    class Data(Recorded):
        def __getitem__(self, i):
            together.wait(10)  # breaks unless three rows are being read
            return super().__getitem__(i)

    equal(DP.batches(Data(12), 4, seed=1, workers=3), reference(12, 4, 1))


def test_a_batch_that_was_used_is_not_kept():
    iterator = iter(DP.batches(X, 2, size=0))
    array = weakref.ref(next(iterator)._arrays[0])
    assert array() is None
    iterator.close()


SCRIPT = """
import sys, threading, time, jdp
began = threading.Event()
jdp.virtual_cpu_devices(2)

class Slow:
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        if i == 8:
            print("standing still", flush=True)
            began.set()
        time.sleep(1000 * (i >= 8))
        return i

iterator = iter(jdp.DataParallel(lambda w, x: x).batches(Slow(), 2, workers=2))
next(iterator)
began.wait()
{}
"""


@pytest.mark.full
@pytest.mark.parametrize("how", one_in(3, ["its end", "Ctrl-C", "sys.exit"]))
def test_a_row_that_is_never_read_holds_no_exit_up(how):
    then = {"its end": "", "Ctrl-C": "for _ in iterator: pass", "sys.exit": "sys.exit(7)"}[how]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT.format(then)]
    worker = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "standing still\n"
        if how == "Ctrl-C":
            time.sleep(0.3)  # until the loop waits
            worker.send_signal(signal.SIGINT)
        _, errors = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert worker.returncode == {"its end": 0, "Ctrl-C": -signal.SIGINT, "sys.exit": 7}[how], errors
    assert ("KeyboardInterrupt" in errors) == (how == "Ctrl-C")


# ---- the page about it


PAGE = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
PROGRAM, BAR = re.findall(r"```python(?: sketch)?\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.full
def test_the_program_of_the_page_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jdp.distributed, "initialize", lambda: None)
    save, rows = jdp.Checkpointer.save, []

    def stop(self, number, state, data):
        assert number == data
        rows.append(number)
        if len(rows) == 30:
            raise KeyboardInterrupt
        return save(self, number, state, data)

    monkeypatch.setattr(jdp.Checkpointer, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        exec(compile(PROGRAM, "batches.md", "exec"), {})
    first = capsys.readouterr().out
    names = {}
    exec(compile(PROGRAM, "batches.md", "exec"), names)
    assert rows == [*range(1, 31), *range(21, 81)]  # a checkpoint every 20
    assert [line.split(":")[0] for line in first.splitlines()] == ["epoch 1"]
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [f"epoch {k}" for k in range(2, 6)]
    assert int(names["state"].step) == 80
    exec(compile(BAR, "batches.md", "exec"), names)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ({"x": X, "name": [f"{i}.png" for i in range(11)]}, TypeError, "data['name'] is a list of 11 strings"),
        ({"x": jdp.scatter(X, range(4)), "y": Y}, TypeError, "data holds a jdp.Scattered; it is cut already"),
        (np.ma.array(X, mask=X > 0), TypeError, "is a numpy.ma.MaskedArray"),
        ([np.ma.array(x, mask=x > 0) for x in X], TypeError, "data[0] is a numpy.ma.MaskedArray"),
    ],
)
def test_data_of_which_something_would_be_lost(data, error, text):
    with pytest.raises(error, match=re.escape(text)):
        next(iter(DP.batches(data, 4)))


def test_a_list_of_numbers_of_numpy_in_a_row_is_an_array():
    data = [{"x": list(np.arange(3) + i), "y": list(np.arange(2.0))} for i in range(4)]
    (batch,) = DP.batches(data, 4)
    assert {name: jdp.gather(x).shape for name, x in batch.items()} == {"x": (4, 3), "y": (4, 2)}


def test_a_wrapper_without_axes_of_arguments():
    dp = jdp.DataParallel(lambda w, *x: w, devices=range(2), in_axes=())
    assert [jdp.gather(x).shape for x in dp.prefetch([X])] == [X.shape]
