"""Gathering: in input order, true sizes only, onto the output device."""

import collections
import importlib
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp

gathering = importlib.import_module("jdp._core.gather")


class Pair(NamedTuple):
    a: Any
    b: Any


def rows(count, *shape):
    return np.arange(count * int(np.prod(shape)), dtype=np.float32).reshape(count, *shape)


def keep(params, x):
    """Rows, a number, and something that depends on the rows of the chunk."""
    return {"x": x, "sum": x.sum(), "count": jnp.int32(x.shape[0])}


# --- of a Scattered


@pytest.mark.one_case
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_gather_concatenates_in_input_order(same, devices, n, size):
    x = rows(size, 2)
    same(jdp.gather(jdp.scatter((x, {"y": x[:, 0]}), devices[:n])), (x, {"y": x[:, 0]}))


def test_0_d_outputs_become_a_vector_with_an_entry_per_replica_used(same, devices):
    x = rows(9, 2)
    out = jdp.gather(jdp.parallel_apply(keep, None, jdp.scatter((x,), devices[:4])))
    chunks = [x[0:3], x[3:6], x[6:9]]
    same(out, {"x": x, "sum": np.stack([c.sum() for c in chunks]), "count": np.int32([3, 3, 3])})


def test_0_d_outputs_of_idle_replicas_are_absent(same, devices):
    x = rows(3, 2)
    out = jdp.gather(jdp.parallel_apply(keep, None, jdp.scatter((x,), devices[:4], chunk_sizes=(0, 2, 0, 1))))
    same(out, {"x": x, "sum": np.stack([x[:2].sum(), x[2:].sum()]), "count": np.int32([2, 1])})


def test_0_d_outputs_are_a_vector_on_one_device_and_for_any_dim(same, devices):
    x = rows(2, 4)
    out = jdp.gather(jdp.parallel_apply(keep, None, jdp.scatter((x,), devices[:1], 1)), dim=1)
    same(out, {"x": x, "sum": x.sum()[None], "count": np.int32([2])})
    out = jdp.gather(jdp.parallel_apply(keep, None, jdp.scatter((x,), devices[:2], -1)), dim=-1)
    same(out, {"x": x, "sum": np.stack([x[:, :2].sum(), x[:, 2:].sum()]), "count": np.int32([2, 2])})


@pytest.mark.parametrize("dim", [1, -2, 7])
def test_dim_out_of_range_is_refused(refused, devices, dim):
    with refused(IndexError, "gather", rf"(?s)\['x'\].*1 dimension.*{dim}"):
        jdp.gather(jdp.scatter({"x": rows(4)}, devices[:2]), dim=dim)
    with refused(IndexError, "gather", rf"(?s)\['x'\].*1 dimension.*{dim}"):
        jdp.gather([{"x": rows(4)}, {"x": rows(4)}], dim=dim)
    with refused(IndexError, "gather", r"outputs\['x'\]"):  # Python values before it do not count
        jdp.gather(jdp.scatter({"a": "text", "x": rows(4)}, devices[:2]), dim=dim)


@pytest.mark.one_case
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("size", [8, 5, 3])
def test_under_jit_the_values_are_the_same_and_stay_on_the_replicas(same, devices, wrap, size):
    x = rows(size, 2)

    def run(x):
        return jdp.gather(jdp.parallel_apply(keep, None, jdp.scatter((x,), devices[:4])))

    got = wrap(run)(x)
    same(got, run(x))
    expected = set(devices[:1]) if wrap is not jax.jit else set(devices[:4])
    assert got["x"].sharding.device_set == expected


# --- the output device


def test_sharded_is_one_array_over_the_replicas(same, devices, n):
    x = rows(2, 8 * 3)
    y = jdp.gather(jdp.scatter(x, devices[:n], 1), "sharded", dim=1)
    same(y, x)
    assert y.sharding.device_set == set(devices[:n])
    width = 24 // n
    shards = {shard.device: np.asarray(shard.data) for shard in y.addressable_shards}
    for i in range(n):
        np.testing.assert_array_equal(shards[devices[i]], x[:, i * width : (i + 1) * width])


def test_sharded_rows_that_do_not_divide_are_replicated(same, devices):
    y = jdp.gather(jdp.scatter(rows(10, 2), devices[:4]), "sharded")
    same(y, rows(10, 2))
    assert y.sharding.device_set == set(devices[:4]) and y.is_fully_replicated


def test_sharded_depends_on_the_rows_of_the_output_not_of_the_chunks(same, devices):
    # 1 and 3 rows are 4: two for each replica
    y = jdp.gather(jdp.scatter(rows(4, 2), devices[:2], chunk_sizes=(1, 3)), "sharded")
    same(y, rows(4, 2))
    assert [shard.data.shape for shard in y.addressable_shards] == [(2, 2), (2, 2)]


# --- of a list


def test_a_list_with_one_tree_per_device(same, devices):
    trees = [
        {"y": jax.device_put(rows(3, 2), devices[0]), "loss": jnp.float32(1)},
        {"y": jax.device_put(rows(1, 2), devices[1]), "loss": jax.device_put(jnp.float32(2), devices[1])},
    ]
    got = jdp.gather(trees, 3)
    same(got, {"y": np.concatenate([rows(3, 2), rows(1, 2)]), "loss": np.float32([1, 2])})
    assert got["y"].devices() == got["loss"].devices() == {devices[3]}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_list_of_numpy_arrays_along_any_dim(same, dim):
    a, b = np.moveaxis(rows(2, 3), 0, dim), np.moveaxis(rows(1, 3), 0, dim)
    same(jdp.gather([a, b], dim=dim), np.concatenate([a, b], dim))
    same(jdp.gather((a, b), dim=dim), np.concatenate([a, b], dim))


def test_a_list_over_the_devices_is_cut_leaf_by_leaf(same, devices):
    """0-d outputs, whatever dim is, outputs of other numbers of rows, and two words that are no key."""
    leaves = rows(2, 3), np.uint32(7), rows(2, 1)
    trees = [jax.device_put(leaves, device) for device in devices[:2]]
    wide, words, narrow = jdp.gather(trees, "sharded", dim=1)
    same(wide, np.concatenate([leaves[0]] * 2, 1))
    same(words, np.uint32([7, 7]))
    same(narrow, np.concatenate([leaves[2]] * 2, 1))
    assert [x.addressable_shards[0].data.shape for x in (wide, words, narrow)] == [(2, 3), (1,), (2, 1)]
    same(
        jdp.gather([{"a": rows(3), "b": jnp.zeros(1)}] * 2, "sharded"),
        {"a": np.tile(rows(3), 2), "b": np.zeros(2, "f")},
    )


def test_a_list_that_begins_with_an_array_of_the_host(same, devices):
    some = [rows(2), *(jax.device_put(rows(2), device) for device in devices[1:3])]
    same(jdp.gather(some), np.tile(rows(2), 3))
    same(jdp.reduce_add(some), 3 * rows(2))
    assert jdp.gather(some).devices() == jdp.reduce_add(some).devices() == {devices[1]}


def test_a_list_of_one(same):
    same(jdp.gather([Pair(rows(2), np.float32(3))]), Pair(rows(2), np.float32([3])))


def test_a_list_of_scattered_chunks_gathers_as_the_scattered_does(same, devices):
    s = jdp.scatter({"x": rows(5, 2)}, devices[:3])
    got = jdp.gather(list(s))
    same(got, jdp.gather(s))
    assert got["x"].devices() == {devices[0]}


def test_list_containers_none_and_keys(same, devices):
    keys = jax.random.split(jax.random.key(0), 3)
    tree = lambda lo, hi: collections.OrderedDict(z=(None, rows(9)[lo:hi]), a=[keys[lo:hi], {}])  # noqa: E731
    same(jdp.gather([tree(0, 2), tree(2, 3)]), collections.OrderedDict(z=(None, rows(3)), a=[keys, {}]))
    assert jdp.gather([None, None]) is None


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "complex64"])
def test_list_dtypes_survive(same, dtype):
    x = rows(3, 2).astype(jnp.dtype(dtype))
    same(jdp.gather([x[:2], x[2:]]), x)


def test_numpy_s_64_bits_are_jax_s_32_in_a_list(same):
    mixed = [rows(2).astype(np.float64), jnp.asarray(rows(2))]
    same(jdp.gather(mixed), np.concatenate([rows(2), rows(2)]))
    same(jdp.reduce_add(mixed), rows(2) * 2)


def test_a_list_is_twice_differentiable(same, devices):
    x = rows(3)

    def cubes(x):
        return (jdp.gather([x[:2], jax.device_put(x[2:], devices[1])]) ** 3).sum()

    same(jax.grad(cubes)(x), 3 * x**2)
    same(jax.grad(lambda x: jax.grad(cubes)(x).sum())(x), 6 * x)
    same(jax.jit(jax.grad(lambda x: (jdp.gather([x[:2], x[2:]]) ** 3).sum()))(x), 3 * x**2)


@pytest.mark.parametrize(
    "outputs, match",
    [
        ([], "at least one|empty"),
        ((), "at least one|empty"),
        ([{"a": rows(1)}, {"b": rows(1)}], r"(?s)'?a'?.*'?b'?"),
        ([{"a": rows(1)}, {"a": rows(1), "b": rows(1)}], "b"),
        ([(rows(1),), (rows(1), rows(1))], r"(?s)outputs\[0\].*outputs\[1\]"),
        ([(rows(1),), [rows(1)]], "(?s)tuple.*list|PyTreeDef"),
        ([None, rows(1)], "None"),
        ([{"y": rows(1, 2)}, {"y": rows(1, 3)}], r"(?s)\['y'\].*\(1, 2\).*\(1, 3\)"),
        ([{"y": rows(1, 2)}, {"y": rows(2)}], r"(?s)\['y'\].*\(1, 2\).*\(2,\)"),
        ([{"y": np.float32(1)}, {"y": rows(2)}], r"(?s)\['y'\].*\(\).*\(2,\)"),
        ([{"y": rows(1)}, {"y": rows(1).astype(np.int32)}], r"(?s)\['y'\].*float32.*int32"),
    ],
    ids=[
        "empty",
        "empty tuple",
        "keys",
        "more keys",
        "lengths",
        "types",
        "None",
        "shape",
        "rank",
        "0-d",
        "dtype",
    ],
)
def test_outputs_that_do_not_fit_together_are_refused(refused, outputs, match):
    with refused(ValueError, "gather", match):
        jdp.gather(outputs)


@pytest.mark.parametrize(
    "leaf", [1, 2.0, True, "text", object(), np.array(["s"])], ids=lambda leaf: type(leaf).__name__
)
def test_a_leaf_that_is_no_array_is_refused(refused, leaf):
    with refused(TypeError, "gather", r"(?s)\['loss'\]"):
        jdp.gather([{"loss": leaf}, {"loss": leaf}])


def test_masked_and_big_endian_arrays(same, refused):
    with refused(TypeError, "gather", r"outputs\[0\]\['m'\] is a numpy.ma.MaskedArray"):
        jdp.gather([{"m": np.ma.masked_array(rows(2), [0, 1])}] * 2)
    x = rows(2).astype(">f4")
    same(jdp.gather([x, x]), np.concatenate([x, x]).astype(np.float32))


def test_freed_arrays_are_named(refused, devices):
    x, s = jnp.ones(4), jdp.scatter({"x": jnp.ones(4)}, devices[:2])
    for array in (x, *jax.tree.leaves(s)):
        array.delete()
    with refused(RuntimeError, "gather", r"outputs\[0\]\['x'\] has been freed"):
        jdp.gather([{"x": x}, {"x": x}])
    with refused(RuntimeError, "gather", r"outputs\['x'\] has been freed"):
        jdp.gather(s)
    with refused(RuntimeError, "reduce_add", r"outputs\['x'\] has been freed"):
        jdp.reduce_add(s)
    with refused(RuntimeError, "reduce_add", r"outputs\[0\] has been freed"):
        jdp.reduce_add([x, x])


@pytest.mark.parametrize("outputs", [3, None, {"a": rows(2)}, rows(2)], ids=["int", "None", "dict", "array"])
def test_what_is_neither_scattered_nor_a_list_is_refused(refused, outputs):
    with refused((TypeError, ValueError), "gather", "list"):
        jdp.gather(outputs)


def test_a_refused_gather_changes_nothing(same, devices):
    outputs = [{"y": jnp.asarray(rows(2))}, {"y": jnp.asarray(rows(2)).astype(jnp.int32)}]
    with pytest.raises(ValueError, match="int32"):
        jdp.gather(outputs)
    same(outputs, [{"y": rows(2)}, {"y": rows(2).astype(np.int32)}])


@pytest.mark.one_case
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_accelerators_send_their_parts_to_one_another(monkeypatch, n, rows):
    """Played by CPU devices: outputs and gradients are the same to the bit, and nothing is read through the host."""
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    variables = {"w": np.ones((4, 3), np.float32), "key": jax.random.key(0)}

    def model(v, x):
        y = x @ v["w"]
        keys = jax.vmap(lambda i: jax.random.fold_in(v["key"], i))(jnp.arange(len(x)))
        return {"y": y, "turned": y.T, "sum": y.sum(), "keys": keys, "pair": (y.astype(jnp.bfloat16), v["w"].sum())}

    out_axes = {"y": 0, "turned": 1, "sum": 0, "keys": 0, "pair": (0, None)}
    dp = jdp.DataParallel(model, range(n), out_axes=out_axes)
    expected = dp(variables, x)
    gradient = jax.grad(lambda w: (dp(variables | {"w": w}, x)["y"] ** 2).sum())(variables["w"])
    monkeypatch.setattr(gathering, "_HOST", "")
    asked = mock.Mock(wraps=gathering._from_device_to_device)
    monkeypatch.setattr(gathering, "_from_device_to_device", asked)
    with jax.transfer_guard_device_to_host("disallow"):
        found = dp(variables, x)
    assert asked.call_count == (len(jdp.chunk_sizes(rows, n)) > 0)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.devices() == b.devices() == {jax.devices()[0]} and a.dtype == b.dtype
        a, b = (jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y for y in (a, b))
        np.testing.assert_array_equal(a, b)
    again = jax.grad(lambda w: (dp(variables | {"w": w}, x)["y"] ** 2).sum())(variables["w"])
    np.testing.assert_array_equal(again, gradient)
    nothing = jdp.DataParallel(lambda v, x: {}, range(n))
    assert nothing(variables, x) == {}
