"""`reduce_add(s) == s[0] + s[1] + ...`: torch's ReduceAdd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import NUMBERS

import jdp


def rows(count, *shape):
    return np.arange(count * int(np.prod(shape)), dtype=np.float32).reshape(count, *shape)


def statistics(params, x):
    """The same sizes in every replica, whatever its rows: what a gradient looks like."""
    return {"sum": x.sum(0), "count": jnp.int32(x.shape[0]), "weighted": params * x.sum()}


@pytest.mark.one_case
@pytest.mark.parametrize("size", [1, 5, 8, 9, 17])
def test_the_sum_over_the_replicas_used(same, devices, n, size):
    x = rows(size, 2)
    w = np.float32([1, 2])
    got = jdp.reduce_add(jdp.parallel_apply(statistics, w, jdp.scatter((x,), devices[:n])))
    same(got, {"sum": x.sum(0), "count": np.int32(size), "weighted": w * x.sum()})
    assert got["sum"].devices() == {devices[0]}


@pytest.mark.parametrize("sizes", [(0, 3, 2), (5, 0, 0), (0, 0, 5)])
def test_idle_replicas_add_nothing(same, devices, sizes):
    x = rows(5, 2)
    out = jdp.parallel_apply(
        lambda w, x: {"sum": x.sum(0) + w}, np.float32(10), jdp.scatter((x,), devices[:3], chunk_sizes=sizes)
    )
    used = sum(size > 0 for size in sizes)
    same(jdp.reduce_add(out), {"sum": x.sum(0) + 10 * used})


def test_what_is_whole_is_added_once_for_each_replica_with_rows(same, devices):
    x = rows(2, 2)
    mixed = jdp.scatter((x, np.float32(5)), devices[:3], chunk_sizes=(1, 0, 1))
    same(jdp.reduce_add(mixed), (x[:1] + x[1:], np.float32(10)))
    same(jdp.reduce_add(jdp.scatter(np.float32(5), devices[:3])), np.float32(5))  # nothing to cut: one replica


def test_even_chunks_add_up_row_by_row(same, devices):
    s = jdp.scatter(rows(6, 2), devices[:3])
    same(jdp.reduce_add(s), s[0] + jax.device_get(s[1]) + jax.device_get(s[2]))


@pytest.mark.parametrize("destination, index", [(None, 2), (4, 4), ("cpu:1", 1), ("cpu", 0), (-1, 0)], ids=repr)
def test_destination(same, devices, destination, index):
    got = jdp.reduce_add([jax.device_put(rows(2), devices[2]), jax.device_put(rows(2), devices[3])], destination)
    same(got, 2 * rows(2))
    assert got.devices() == {devices[index]}
    got = jdp.reduce_add(jdp.scatter(rows(4), devices[2:4]), destination)
    assert got.devices() == {devices[index]}


def test_destination_all_is_replicated_over_the_devices(same, devices):
    got = jdp.reduce_add(jdp.scatter({"x": rows(6, 2)}, devices[:3]), "all")
    same(got, {"x": rows(6, 2).reshape(3, 2, 2).sum(0)})
    assert got["x"].is_fully_replicated and got["x"].devices() == set(devices[:3])
    for shard in got["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, rows(6, 2).reshape(3, 2, 2).sum(0))


def test_destination_all_of_a_list(same, devices):
    got = jdp.reduce_add([jax.device_put(rows(2), devices[i]) for i in (1, 0, 2)], "all")
    same(got, 3 * rows(2))
    assert got.is_fully_replicated and got.devices() == set(devices[:3])


def test_a_list_of_numpy_trees(same):
    tree = {"w": rows(2, 3), "b": (np.int32(2), None)}
    same(jdp.reduce_add([tree, tree, tree]), {"w": 3 * rows(2, 3), "b": (np.int32(6), None)})
    same(jdp.reduce_add([tree]), tree)


@pytest.mark.parametrize("dtype", ["int8", "int32", "bfloat16", "float16", "float32", "complex64"])
def test_dtypes_survive(same, dtype):
    x = np.array([1, 2, 3]).astype(jnp.dtype(dtype))
    same(jdp.reduce_add([x, x]), np.array([2, 4, 6]).astype(jnp.dtype(dtype)))


@pytest.mark.one_case
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_twice_differentiable(same, devices, wrap):
    x = rows(6)

    def f(x):
        total = jdp.reduce_add(jdp.scatter(x, devices[:3]))  # x0+x2+x4, x1+x3+x5
        return (total**3).sum()

    total = x.reshape(3, 2).sum(0)
    same(wrap(jax.grad(f))(x), np.tile(3 * total**2, 3))
    # the Hessian's row sums: three entries of 6 * total in each
    same(wrap(jax.grad(lambda x: jax.grad(f)(x).sum()))(x), np.tile(18 * total, 3))


def test_the_gradient_of_a_list(same):
    f = lambda a, b: (jdp.reduce_add([a, b]) ** 2).sum()  # noqa: E731
    same(jax.grad(f, (0, 1))(rows(2), rows(2)), (4 * rows(2), 4 * rows(2)))


@pytest.mark.parametrize(
    "outputs, match",
    [
        ([rows(3), rows(4)], r"All inputs of ReduceAdd must have the same size, but got .*3.* and .*4"),
        (
            [rows(2, 3), rows(2, 4)],
            r"All inputs of ReduceAdd must have the same size, but got .*2, 3.* and .*2, 4",
        ),
        ([rows(1), np.float32(1)], r"All inputs of ReduceAdd must have the same size, but got .*1.* and"),
        ([rows(3), rows(1)], r"All inputs of ReduceAdd must have the same size, but got .*3.* and .*1"),
        (
            [rows(3), rows(3).astype(np.int32)],
            "All inputs of ReduceAdd must have the same dtype, but got float32 and int32",
        ),
    ],
    ids=["rows", "columns", "rank", "broadcast", "dtype"],
)
def test_sizes_and_dtypes_that_differ_are_refused_in_torch_s_words(outputs, match):
    with pytest.raises(ValueError, match=match) as info:
        jdp.reduce_add([{"g": leaf} for leaf in outputs])
    assert str(info.value).startswith("jdp.reduce_add: ") and "['g']" in str(info.value)


def test_uneven_chunks_are_different_sizes(devices):
    with pytest.raises(ValueError, match=r"\['x'\].*must have the same size, but got .*3.* and .*1"):
        jdp.reduce_add(jdp.scatter({"x": rows(10)}, devices[:4]))


@pytest.mark.parametrize(
    "outputs, match",
    [
        ([], "at least one|empty"),
        ([{"a": rows(1)}, {"b": rows(1)}], "(?s)a.*b"),
        ([(rows(1),), (rows(1), rows(1))], r"(?s)outputs\[0\].*outputs\[1\]"),
        ([rows(1), None], "None"),
    ],
    ids=["empty", "keys", "lengths", "None"],
)
def test_trees_that_differ_are_refused(refused, outputs, match):
    with refused(ValueError, "reduce_add", match):
        jdp.reduce_add(outputs)


@pytest.mark.parametrize("leaf", [1.0, "text", object()], ids=lambda leaf: type(leaf).__name__)
def test_a_leaf_that_is_no_array_is_refused(refused, leaf):
    with refused(TypeError, "reduce_add", r"(?s)\['g'\]"):
        jdp.reduce_add([{"g": leaf}, {"g": leaf}])


def test_keys_are_no_summands():
    with pytest.raises(TypeError, match=r"^jdp\.reduce_add: .*\['key'\].*key"):
        jdp.reduce_add([{"key": jax.random.key(0)}, {"key": jax.random.key(1)}])


def test_the_summands_stay_as_they_are(same):
    a = jnp.asarray(rows(3))
    jdp.reduce_add([a, a])
    assert not a.is_deleted()
    same(a, rows(3))


def test_gradients_through_reduce_add_where_some_sums_are_not_used():
    """A law only: the joint device_put that failed for a model with a scan happens to pass here."""
    s = jdp.scatter((NUMBERS[:8],), range(4))

    def sums(w):
        out = jdp.parallel_apply(lambda w, x: {"a": x.sum(0) * w, "b": (x * w).sum()}, w, s)
        return jdp.reduce_add(out)

    np.testing.assert_allclose(jax.grad(lambda w: sums(w)["a"].sum())(np.float32(2)), NUMBERS[:8].sum(), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda w: sums(w)["b"])(np.float32(2)), NUMBERS[:8].sum(), rtol=1e-5)


@pytest.mark.parametrize("scatters", [True, False], ids=["scattered", "list"])
def test_a_path_is_made_for_an_error_alone(monkeypatch, scatters):
    """The path of a leaf takes as long to find as the tree is large: for each leaf, that was a second for 400."""
    tree = {f"w{i}": rows(4, 2) for i in range(3)}
    outputs = jdp.scatter(tree, range(2)) if scatters else [tree, tree]
    asked = []
    monkeypatch.setattr("jdp._core.reduce_add.paths_of", lambda *args: asked.append(args) or ["outputs"] * 3)
    jdp.reduce_add(outputs)
    assert asked == []
