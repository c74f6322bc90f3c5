"""The hash of a leaf's bits: that of its definition in plain integers, whatever the devices; any change is seen."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp._core.fingerprint import fingerprint, hash_leaf

RNG = np.random.default_rng(0)


def words_of(x):
    """The low and high words of every element, as Python integers."""
    x = np.asarray(x)
    if x.dtype == bool:
        return [(int(v), 0) for v in x.ravel()]
    if x.dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        return [(int(v) & 15, 0) for v in x.ravel()]
    if x.dtype == np.complex128:
        x = x.view(np.float64)
    raw, size = x.tobytes(), x.dtype.itemsize
    whole = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
    return [(v % 2**32, v >> 32) for v in whole]


def reference(x):
    """The definition, one element at a time."""
    m = 2**32
    first = second = 0
    for i, (low, high) in enumerate(words_of(x)):
        place = i * 0x9E3779B9 % m
        a = low ^ place
        a = (a ^ a >> 16) * 0x85EBCA6B % m
        a = (a ^ a >> 13) * 0xC2B2AE35 % m
        a ^= a >> 16
        b = (a + high) % m ^ place
        b = (b ^ b >> 15) * 0x27D4EB2F % m
        b ^= b >> 16
        first += a + ((b << 15) % m | b >> 17)
        second += b
    return [first % m, second % m]


def values(dtype, shape=(6, 8)):
    raw = RNG.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    if np.dtype(dtype) == bool:
        return raw[..., 0] > 100
    if dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        return (raw[..., 0] % 8).astype(dtype)
    return raw.view(dtype)[..., 0]


NARROW = [bool, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.float16, np.float32, np.complex64]
NARROW += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4]
WIDE = [np.int64, np.uint64, np.float64, np.complex128]


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", NARROW + WIDE, ids=lambda d: np.dtype(d).name)
def test_it_is_the_definition_in_plain_integers(dtype):
    x = values(dtype)
    assert fingerprint([x]).tolist() == [reference(x)]  # on the host, 64 bits are 64 bits
    with jax.enable_x64(True):
        assert fingerprint([jnp.asarray(x)]).tolist() == [reference(x)]


@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.float64, np.complex64])
def test_the_order_of_bytes_in_memory_does_not_matter(dtype):
    x = values(dtype)
    assert fingerprint([x.astype(x.dtype.newbyteorder(">"))]).tolist() == [reference(x)]


@pytest.mark.one_case
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_every_rank_and_no_elements(shape):
    x = RNG.integers(0, 2**32, shape, dtype=np.uint32)
    assert fingerprint({"a": x, "b": jnp.asarray(x)}).tolist() == [reference(x)] * 2


def test_leaves_are_in_the_order_of_the_tree_and_scalars_are_leaves():
    found = fingerprint({"b": 3, "a": [np.float32(2), True]})
    assert found.tolist() == [reference(np.float32(2)), reference(np.bool(True)), reference(np.int64(3))]
    assert found.dtype == np.uint32 and fingerprint({}).shape == (0, 2)


def test_a_typed_key_is_its_data():
    keys = jax.random.split(jax.random.key(3), 4)
    assert fingerprint(keys).tolist() == [reference(jax.random.key_data(keys))]


@pytest.mark.one_case
@pytest.mark.parametrize("spec", [(), ("a",), (None, "a"), ("a", "b"), (("a", "b"),), (None, "b")], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.complex64, bool], ids=lambda d: np.dtype(d).name)
def test_it_does_not_depend_on_how_the_leaf_lies(devices, spec, dtype):
    x = values(dtype, (8, 16))
    mesh = Mesh(np.array(devices).reshape(4, 2), ("a", "b"))
    there = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    assert fingerprint([there, x, jax.device_put(x, devices[3])]).tolist() == [reference(x)] * 3


def test_cut_keys_and_cut_leaves_on_two_meshes(devices):
    keys = jax.random.split(jax.random.key(0), 8)
    cut = lambda n: NamedSharding(Mesh(np.array(devices[:n]), ("a",)), PartitionSpec("a"))  # noqa: E731
    x = np.arange(8.0, dtype=np.float32)
    tree = [jax.device_put(keys, cut(8)), jax.device_put(x, cut(2)), jax.device_put(x, cut(4))]
    assert fingerprint(tree).tolist() == [reference(jax.random.key_data(keys)), reference(x), reference(x)]


def test_any_single_bit_and_any_two_places(devices):
    x = RNG.integers(0, 2**64, 8, dtype=np.uint64)
    seen = {tuple(reference(x))}
    for i in range(8):
        for bit in range(64):
            y = x.copy()
            y[i] ^= np.uint64(1) << np.uint64(bit)
            seen.add(tuple(fingerprint([y])[0].tolist()))
        for j in range(i):
            y = x.copy()
            y[[i, j]] = y[[j, i]]
            seen.add(tuple(fingerprint([y])[0].tolist()))
    assert len(seen) == 1 + 8 * 64 + 28


def test_every_value_of_one_element_has_a_hash_of_its_own():
    every = np.arange(2**16, dtype=np.uint16)
    hashes = jax.jit(jax.vmap(lambda v: hash_leaf(jnp.array([7, 1, 9], jnp.uint16).at[1].set(v))))(every)
    assert len({tuple(h) for h in np.asarray(hashes).tolist()}) == 2**16


def test_signs_of_zero_and_bits_of_nan():
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    leaves = [jnp.asarray(np.float32([v])) for v in (0.0, -0.0)] + [np.array([quiet]), np.array([other])]
    assert len({tuple(h) for h in fingerprint(leaves).tolist()}) == 4
    assert fingerprint(leaves).tolist() == [reference(x) for x in leaves]


def test_leaves_of_one_shape_share_a_program(compilations):
    leaves = [jnp.full((3, 17), v, jnp.float32) for v in range(30)]
    fingerprint(leaves)
    compilations()
    fingerprint([x + 1 for x in leaves][:29])
    assert compilations() <= 1  # the addition's
    assert math.prod(fingerprint(leaves).shape) == 60
