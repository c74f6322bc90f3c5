"""`Scattered`: an immutable sequence of chunks, and a pytree."""

import collections.abc
import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp


def rows(count, *shape):
    return np.arange(count * int(np.prod(shape)), dtype=np.float32).reshape(count, *shape)


@pytest.fixture
def s(devices):
    return jdp.scatter({"x": rows(5, 2), "mode": "sum"}, devices[:3])


def test_it_is_a_sequence(same, devices, s):
    assert isinstance(s, collections.abc.Sequence) and isinstance(s, jdp.Scattered)
    assert len(s) == len(s.sizes) == len(list(s)) == 3
    assert s.sizes == (2, 2, 1) and isinstance(s.sizes, tuple)
    assert tuple(s.devices) == tuple(devices[:3])
    same(s[-1], s[2])
    same(list(s[1:]), [s[1], s[2]])
    same(list(reversed(s)), [s[2], s[1], s[0]])
    first, *_ = s
    same(first, {"x": rows(5, 2)[:2], "mode": "sum"})


@pytest.mark.parametrize("index", [3, -4, 100])
def test_an_index_out_of_range_is_an_index_error(s, index):
    with pytest.raises(IndexError, match="out of range"):
        s[index]


def test_fewer_chunks_than_devices(devices):
    s = jdp.scatter(rows(9), devices[:4])
    assert len(s) == 3 and s.sizes == (3, 3, 3)
    with pytest.raises(IndexError, match="out of range"):
        s[3]


def test_a_replica_s_tree_is_on_its_device(devices, s):
    for i in range(3):
        assert s[i]["x"].devices() == {devices[i]}
        assert s[i]["x"].shape == (s.sizes[i], 2)


def test_it_is_immutable(same, s):
    for change in (
        lambda: setattr(s, "sizes", (5,)),
        lambda: setattr(s, "anything", 1),
        lambda: delattr(s, "sizes"),
        lambda: s.__setitem__(0, None),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    chunk = s[0]
    chunk["x"] = None  # the caller's own dict
    same(s[0], {"x": rows(5, 2)[:2], "mode": "sum"})
    for name in vars(s) if hasattr(s, "__dict__") else getattr(type(s), "__slots__", ()):
        with pytest.raises((AttributeError, TypeError)):
            setattr(s, name, None)
    same(jdp.gather(s), {"x": rows(5, 2), "mode": "sum"})


def test_the_tree_that_was_scattered_may_change_afterwards(same, devices):
    tree = {"x": rows(4), "list": [rows(4)]}
    s = jdp.scatter(tree, devices[:2])
    tree["x"] = None
    tree["list"].append(1)
    same(jdp.gather(s), {"x": rows(4), "list": [rows(4)]})


@pytest.mark.parametrize("size", [4, 5, 0, 1])
def test_it_is_a_pytree_that_round_trips(same, devices, size):
    tree = {"x": rows(size, 2), "mode": "sum", "none": None}
    s = jdp.scatter(tree, devices[:2])
    leaves, structure = jax.tree.flatten(s)
    back = jax.tree.unflatten(structure, leaves)
    assert isinstance(back, jdp.Scattered) and back.sizes == s.sizes and tuple(back.devices) == tuple(s.devices)
    same(jdp.gather(back), tree)


def test_structures_of_equal_scatters_are_equal_and_hashable(devices):
    structure = lambda size, mode="sum", n=2: jax.tree.structure(jdp.scatter((rows(size), mode), devices[:n]))  # noqa: E731
    assert structure(4) == structure(4) and hash(structure(4)) == hash(structure(4))
    assert structure(4) != structure(4, mode="mean")
    assert structure(4) != structure(4, n=4)
    assert structure(7) != structure(8)


def test_tree_map_keeps_the_sizes(same, devices):
    s = jax.tree.map(lambda a: a * 2, jdp.scatter({"x": rows(5, 2), "mode": "sum"}, devices[:3]))
    assert s.sizes == (2, 2, 1)
    same([chunk["x"] for chunk in s], [2 * rows(5, 2)[:2], 2 * rows(5, 2)[2:4], 2 * rows(5, 2)[4:]])
    same(jdp.gather(s), {"x": 2 * rows(5, 2), "mode": "sum"})


def test_tree_map_of_two(same, devices):
    a, b = jdp.scatter(rows(5), devices[:3]), jdp.scatter(rows(5) + 1, devices[:3])
    same(jdp.gather(jax.tree.map(jnp.add, a, b)), 2 * rows(5) + 1)


@pytest.mark.parametrize("size", [4, 5, 3])
def test_through_jit(same, devices, size):
    s = jdp.scatter({"x": rows(size, 2), "mode": "sum"}, devices[:4])
    out = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s))(s)
    assert isinstance(out, jdp.Scattered) and out.sizes == s.sizes
    for i in range(len(s)):
        same(out[i], {"x": np.asarray(s[i]["x"]) + 1, "mode": "sum"})
        assert out[i]["x"].devices() == {devices[i]}
    same(jdp.gather(out), {"x": rows(size, 2) + 1, "mode": "sum"})


def test_indexing_inside_jit(same, devices):
    s = jdp.scatter(rows(5, 2), devices[:3])
    same(
        jax.jit(lambda s: (s[0] * 2, s[2], jdp.gather(s)))(s),
        (2 * rows(5, 2)[:2], rows(5, 2)[4:], rows(5, 2)),
    )


def test_jit_does_not_retrace_for_the_same_sizes(devices):
    traces = []

    @jax.jit
    def f(s):
        traces.append(s.sizes)
        return jdp.gather(s)

    for size in (5, 4, 5, 4, 5):
        assert f(jdp.scatter(rows(size), devices[:3])).shape == (size,)
    assert traces == [(2, 2, 1), (2, 2)]


def test_through_grad(same, devices):
    s = jdp.scatter(rows(5, 2), devices[:3])
    g = jax.grad(lambda s: (jdp.gather(s) ** 2).sum())(s)
    assert isinstance(g, jdp.Scattered) and g.sizes == s.sizes
    same(jdp.gather(g), 2 * rows(5, 2))
    g = jax.grad(lambda s: (s[1] ** 2).sum())(s)
    same(jdp.gather(g), np.float32([[0, 0], [0, 0], [8, 10], [12, 14], [0, 0]]))


def test_through_scan(same, devices):
    s = jdp.scatter(rows(5), devices[:3])
    out, _ = jax.lax.scan(lambda s, _: (jax.tree.map(lambda a: a + 1, s), None), s, None, length=3)
    same(jdp.gather(out), rows(5) + 3)


def test_eval_shape(devices):
    shape = jax.eval_shape(lambda x: jdp.scatter(x, devices[:3]), rows(5, 2))
    assert isinstance(shape, jdp.Scattered) and shape.sizes == (2, 2, 1)


def test_copies_are_equal(same, s):
    same(jdp.gather(copy.copy(s)), jdp.gather(s))
    same(jdp.gather(copy.deepcopy(s)), jdp.gather(s))


def test_block_until_ready_and_repr(s):
    assert jax.block_until_ready(s).sizes == s.sizes
    assert "Scattered" in repr(s) and "(2, 2, 1)" in repr(s)


AS_AN_ARRAY = {
    "jax ==": lambda s: jnp.arange(5) == s,
    "numpy ==": lambda s: np.arange(5) == s,
    "== numpy": lambda s: s == np.arange(5),
    "!=": lambda s: s != 3,
    "two": lambda s: s == jdp.scatter(np.arange(5), s.devices),
    "numpy *": lambda s: np.float32(2) * s,
    "jax -": lambda s: jnp.arange(5) - s,
    "/": lambda s: s / 255.0,
    "<": lambda s: np.arange(5) < s,
    "np.asarray": np.asarray,
    "jnp.asarray": jnp.asarray,
    "np.mean": np.mean,
    "np.array_equal": lambda s: np.array_equal(np.arange(5), s),
    "np.allclose": lambda s: np.allclose(s, np.arange(5)),
    "one_hot": lambda s: jax.nn.one_hot(s, 3),
}


@pytest.mark.parametrize("what", AS_AN_ARRAY)
@pytest.mark.parametrize("count", [3, 5])
def test_it_is_no_array(refused, devices, what, count):
    """`labels == s` was False, and so an accuracy 0; `np.asarray(s)` stacked chunks of one size."""
    s = jdp.scatter(np.arange(count), devices[:3])
    with refused(TypeError, "Scattered", r"used as an array; .*jdp\.gather\(x\)"):
        AS_AN_ARRAY[what](s)


def test_what_is_asked_of_an_array(refused, s):
    with refused(AttributeError, "Scattered", r"it has no attribute 'shape'; it is a sequence.*jdp\.gather\(x\)"):
        s.shape  # noqa: B018
    with refused(AttributeError, "Scattered", r"'size'; .*ask for their number, x\.rows"):
        s.size  # noqa: B018
    for number in (float, int):
        with refused(TypeError, "Scattered", "used as an array"):
            number(s)
    assert not hasattr(s, "dtype") and not hasattr(s, "something_else")
    assert s == s and s is not None and s != "text" and s in [None, s] and len({s, s}) == 1
