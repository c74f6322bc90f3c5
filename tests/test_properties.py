"""The laws over random trees: what hypothesis finds, a table does not."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laws import examples

import jdp

DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"]


class Pair(NamedTuple):
    a: Any
    b: Any


def array(shape, dtype, seed):
    """Random bytes-worth of an array; all bit patterns that a cast of small integers gives."""
    values = np.random.default_rng(seed).integers(-100, 100, shape)
    return values.astype(jnp.dtype(dtype))


def chunks(x, sizes, dim):
    """numpy's own cut."""
    return np.split(x, np.cumsum(sizes)[:-1], axis=dim)


@st.composite
def arrays(draw, size, dim):
    """An array with `size` rows along `dim`."""
    rank = draw(st.integers(max(dim + 1, -dim), 3))
    shape = [draw(st.integers(0, 2)) for _ in range(rank)]
    shape[dim] = size
    return array(tuple(shape), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))


def trees(size, dim):
    """Trees with at least one array to cut, and anything else beside it."""
    whole = st.sampled_from([None, 3, 2.5, True, "mean", b"b", np.float32(1.5), np.array(2, np.int8), 1j])
    leaf = arrays(size, dim) | whole

    def containers(children):
        return (
            st.tuples(children)
            | st.lists(children, max_size=2)
            | st.dictionaries(st.sampled_from("abc"), children, max_size=2)
            | st.builds(Pair, children, children)
            | st.dictionaries(st.sampled_from("xy"), children, max_size=2).map(collections.OrderedDict)
        )

    return st.tuples(arrays(size, dim), st.recursive(leaf, containers, max_leaves=4))


@st.composite
def batches(draw):
    dim = draw(st.integers(-2, 1))
    size = draw(st.integers(0, 9))
    return draw(trees(size, dim)), size, dim


def cut_leaf(leaf):
    return isinstance(leaf, np.ndarray) and leaf.ndim > 0


@given(batches(), st.sampled_from([1, 2, 3, 8]))
def test_gather_undoes_scatter_and_the_chunks_are_numpy_s(same, devices, batch, n):
    tree, size, dim = batch
    s = jdp.scatter(tree, devices[:n], dim)
    assert s.sizes == jdp.chunk_sizes(size, n)
    for i in range(len(s)):
        same(s[i], jax.tree.map(lambda x: chunks(x, s.sizes, dim)[i] if cut_leaf(x) else x, tree))  # noqa: B023
    same(jdp.gather(s, dim=dim), tree)


@st.composite
def shares(draw):
    n = draw(st.integers(1, 4))
    return draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))


@examples(20)
@given(shares(), st.sampled_from([0, 1, -1]), st.sampled_from(DTYPES))
def test_any_chunk_sizes_will_do(same, devices, sizes, dim, dtype):
    x = np.moveaxis(array((sum(sizes), 2), dtype, 0), 0, dim)
    s = jdp.scatter({"x": x}, devices[: len(sizes)], dim, chunk_sizes=sizes)
    assert s.sizes == tuple(sizes)
    for i, chunk in enumerate(chunks(x, sizes, dim)):
        same(s[i], {"x": chunk})
    same(jdp.gather(s, dim=dim), {"x": x})


@given(batches(), st.sampled_from([2, 3]))
def test_the_tree_survives_as_a_pytree(same, devices, batch, n):
    tree, _, dim = batch
    s = jdp.scatter(tree, devices[:n], dim)
    leaves, structure = jax.tree.flatten(s)
    assert structure == jax.tree.structure(jdp.scatter(tree, devices[:n], dim))
    same(jdp.gather(jax.tree.unflatten(structure, leaves), dim=dim), tree)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.sampled_from([0, -1]), st.sampled_from(DTYPES))
def test_a_list_gathers_as_numpy_concatenates(same, sizes, dim, dtype):
    parts = [np.moveaxis(array((size, 2), dtype, i), 0, dim) for i, size in enumerate(sizes)]
    same(
        jdp.gather([{"y": (part, None)} for part in parts], dim=dim),
        {"y": (np.concatenate(parts, dim), None)},
    )


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 2), max_size=2).map(tuple),
    st.sampled_from(["int32", "float32", "complex64"]),
)
def test_reduce_add_is_the_sum(same, n, shape, dtype):
    parts = [array(shape, dtype, seed) for seed in range(n)]  # small integers: sums are exact in any order
    same(jdp.reduce_add([{"g": [part]} for part in parts]), {"g": [np.sum(parts, 0, dtype=dtype)]})


def rows_and_statistics(w, x):
    return {"rows": x * w, "sum": x.sum(0), "total": x.sum()}


@examples(12)
@given(shares().filter(any))
@example([0, 3, 0, 1])
def test_parallel_apply_is_a_loop_over_the_chunks(same, devices, sizes):
    x = array((sum(sizes), 2), "float32", 1)  # small integers again
    out = jdp.parallel_apply(
        rows_and_statistics, np.float32(2), jdp.scatter((x,), devices[: len(sizes)], chunk_sizes=sizes)
    )
    parts = [part for part in chunks(x, sizes, 0) if len(part)]
    assert out.sizes == tuple(sizes)
    got = jdp.gather(out)
    same(got["rows"], 2 * x)
    same(got["sum"], np.concatenate([part.sum(0) for part in parts]))
    same(got["total"], np.stack([part.sum() for part in parts]))


@given(st.integers(0, 10**12), st.integers(1, 10**4))
def test_chunk_sizes_are_full_but_for_the_last(size, n):
    sizes = jdp.chunk_sizes(size, n)
    assert sum(sizes) == size and 1 <= len(sizes) <= n
    full = -(-size // n)
    assert all(count == full for count in sizes[:-1])
    assert (0 < sizes[-1] <= full) if size else sizes == (0,) * n


@given(st.integers(0, 300), st.integers(1, 40))
def test_chunk_sizes_are_those_of_torch(size, n):
    torch = pytest.importorskip("torch")
    assert jdp.chunk_sizes(size, n) == tuple(len(chunk) for chunk in torch.zeros(size).chunk(n))


@given(batches(), st.integers(1, 3), st.sampled_from([2, 3]))
def test_one_array_that_disagrees_is_always_refused(devices, batch, extra, n):
    tree, size, dim = batch
    odd = np.zeros([2, 2, size + extra] if dim == -1 else [size + extra] * 3)
    with pytest.raises(ValueError, match=rf"(?s)^jdp\.scatter: .*{size}.*{size + extra}"):
        jdp.scatter((tree, {"odd": odd}), devices[:n], dim)
