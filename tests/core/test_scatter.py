"""`gather(scatter(x)) == x`: how a batch is cut, and what is not."""

import collections
import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import NUMBERS

import jdp


class Pair(NamedTuple):
    a: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    image: Any
    label: Any
    name: str = dataclasses.field(default="train", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    x: Any
    mode: str = flax.struct.field(pytree_node=False, default="fast")


def rows(count, *shape, dtype=np.float32):
    """An array with `count` rows, all entries different."""
    return np.arange(count * int(np.prod(shape)), dtype=np.float64).reshape(count, *shape).astype(dtype)


# --- torch.chunk's rule


@pytest.mark.parametrize(
    "size, n, expected",
    [
        # rows 38 and 39 of the catalogue, from torch itself
        (10, 4, (3, 3, 3, 1)),
        (5, 4, (2, 2, 1)),
        (1, 4, (1,)),
        (2, 4, (1, 1)),
        (6, 4, (2, 2, 2)),
        (9, 4, (3, 3, 3)),
        (7, 4, (2, 2, 2, 1)),
        (8, 3, (3, 3, 2)),
        (9, 8, (2, 2, 2, 2, 1)),
        (17, 8, (3, 3, 3, 3, 3, 2)),
        (36, 7, (6,) * 6),
        (100, 8, (13,) * 7 + (9,)),
        (8, 4, (2, 2, 2, 2)),
        (0, 4, (0, 0, 0, 0)),
        (0, 1, (0,)),
        (3, 1, (3,)),
    ],
)
def test_chunk_sizes_are_torch_s(size, n, expected):
    assert jdp.chunk_sizes(size, n) == expected


@pytest.mark.parametrize("size, n, match", [(-1, 2, "-1"), (3, 0, "0"), (3, -2, "-2")])
def test_chunk_sizes_refuses_what_is_no_count(refused, size, n, match):
    with refused(ValueError, "chunk_sizes", match):
        jdp.chunk_sizes(size, n)


@pytest.mark.parametrize("size, n", [(3.0, 2), (True, 2), (3, "a"), (3, None)])
def test_chunk_sizes_refuses_what_is_no_int(refused, size, n):
    with refused(TypeError, "chunk_sizes", f"size {size!r} over n={n!r}"):
        jdp.chunk_sizes(size, n)


def test_chunk_sizes_of_numpys_integers_are_ints():
    assert repr(jdp.chunk_sizes(np.int64(3), np.int32(2))) == "(2, 1)"


def torch_chunks(x, n, dim=0):
    """torch.chunk's own loop: `ceil(B / n)` rows at a time until none are left; n empty ones for no rows."""
    size = x.shape[dim]
    if size == 0:
        return [x] * n
    step = -(-size // n)
    return [np.take(x, range(i, min(i + step, size)), axis=dim) for i in range(0, size, step)]


@pytest.mark.one_case
@pytest.mark.parametrize("size", range(18))
def test_chunks_are_slices_in_order_each_on_its_device(same, devices, n, size):
    x = rows(size, 2)
    s = jdp.scatter(x, devices[:n])
    expected = torch_chunks(x, n)
    assert s.sizes == tuple(len(chunk) for chunk in expected)
    assert len(s) == len(s.sizes)
    for i, chunk in enumerate(expected):
        same(s[i], chunk)
        assert s[i].devices() == {devices[i]}
    same(jdp.gather(s), x)


@pytest.mark.one_case
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("size", [4, 5])
def test_any_dim_negative_ones_too(same, devices, dim, size):
    x = np.moveaxis(rows(size, 2, 3), 0, dim)
    s = jdp.scatter(x, devices[:3], dim)
    assert len(s) == len(torch_chunks(x, 3, dim))
    for got, chunk in zip(s, torch_chunks(x, 3, dim), strict=True):
        same(got, chunk)
    same(jdp.gather(s, dim=dim), x)


def test_a_negative_dim_counts_from_each_array_s_own_end(same, devices):
    tree = {"mask": rows(4), "x": rows(3, 4), "image": rows(2, 3, 4)}
    s = jdp.scatter(tree, devices[:2], -1)
    same(s[1], {"mask": tree["mask"][2:], "x": tree["x"][:, 2:], "image": tree["image"][..., 2:]})
    same(jdp.gather(s, dim=-1), tree)


@pytest.mark.one_case
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "int32",
        "uint32",
        "float16",
        "bfloat16",
        "float32",
        "complex64",
        "float8_e4m3fn",
    ],
)
def test_every_dtype_survives(same, devices, dtype, size):
    x = rows(size, 2).astype(jnp.dtype(dtype))
    s = jdp.scatter({"numpy": x, "jax": jnp.asarray(x)}, devices[:2])
    same(s[1], {"numpy": x[-(size // 2) :], "jax": x[-(size // 2) :]})
    same(jdp.gather(s), {"numpy": x, "jax": x})


def test_64_bit_numpy_arrays_become_what_jax_makes_of_them(same, devices):
    x = np.arange(5)
    assert x.dtype == np.int64
    assert jdp.gather(jdp.scatter(x, devices[:2])).dtype == jnp.asarray(x).dtype


def test_special_values_survive(devices):
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    got = np.asarray(jdp.gather(jdp.scatter(x, devices[:2])))
    np.testing.assert_array_equal(got.view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("size", [4, 5])
def test_typed_keys_in_an_array_are_cut_like_any_array(same, devices, size):
    keys = jax.random.split(jax.random.key(0), size)
    s = jdp.scatter({"keys": keys, "x": rows(size, 2)}, devices[:2])
    same(s[1]["keys"], keys[-(size // 2) :])
    same(jdp.gather(s)["keys"], keys)


def test_typed_keys_of_another_implementation(same, devices):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 5)
    same(jdp.gather(jdp.scatter(keys, devices[:2])), keys)


def test_non_contiguous_and_big_endian_arrays(same, devices):
    x = rows(6, 4)
    same(jdp.gather(jdp.scatter(x[::-2, ::2], devices[:2])), x[::-2, ::2].copy())
    same(jdp.gather(jdp.scatter(x.T, devices[:2])), x.T.copy())
    same(jdp.gather(jdp.scatter(x.astype(">f4"), devices[:2])), x)


@pytest.mark.parametrize("where", ["other device", "replicated", "sharded"])
def test_inputs_may_live_anywhere(same, devices, where):
    x = rows(6, 2)
    mesh = jax.make_mesh((3,), ("i",), devices=devices[5:8], axis_types=(jax.sharding.AxisType.Auto,))
    spec = {"replicated": (), "sharded": ("i",)}.get(where)
    place = devices[5] if spec is None else jax.sharding.NamedSharding(mesh, jax.P(*spec))
    placed = jax.device_put(x, place)
    s = jdp.scatter(placed, devices[:2])
    same(s[1], x[3:])
    assert s[1].devices() == {devices[1]}
    assert placed.sharding.device_set <= set(devices[5:8])


# --- what goes whole


class Config:
    """An object of the user's."""


def test_what_is_no_array_goes_whole_to_every_replica(same, devices):
    key = jax.random.key(3)
    config = Config()
    tree = {
        "x": rows(5, 2),
        "none": None,
        "int": 3,
        "float": 0.5,
        "complex": 1j,
        "bool": True,
        "str": "mean",
        "bytes": b"b",
        "function": rows,
        "dtype": np.dtype("float32"),
        "object": config,
        "numpy scalar": np.float32(2.5),
        "numpy 0-d": np.array(7, np.int32),
        "jax 0-d": jnp.asarray(1.5),
        "key": key,
    }
    s = jdp.scatter(tree, devices[:3])
    assert s.sizes == (2, 2, 1)
    for i, chunk in enumerate(torch_chunks(tree["x"], 3)):
        same(s[i], {**tree, "x": chunk})
        assert s[i]["object"] is config and s[i]["function"] is rows
    same(jdp.gather(s), tree)


@pytest.mark.parametrize("tree", [3, "mean", None, (), [], {}, (2.0, {"a": None}), np.float32(1)], ids=repr)
def test_with_nothing_to_cut_there_is_one_chunk_on_the_primary_device(same, devices, tree):
    s = jdp.scatter(tree, devices[2:5])
    assert len(s) == 1 and s.sizes == (1,) and s.devices[0] == devices[2]
    same(s[0], tree)
    same(jdp.gather(s), tree)


def test_a_0_d_key_alone_is_nothing_to_cut(same, devices):
    s = jdp.scatter((jax.random.key(0),), devices[:2])
    assert s.sizes == (1,)
    same(s[0], (jax.random.key(0),))


# --- containers


CONTAINERS = {
    "array": lambda x: x,
    "tuple": lambda x: (x, 1),
    "list": lambda x: [x, [x, "s"]],
    "dict": lambda x: {"b": x, "a": {"c": x}},
    "int keys": lambda x: {2: x, 1: x},
    "NamedTuple": lambda x: Pair(x, Pair(None, 2)),
    "namedtuple": lambda x: collections.namedtuple("Point", "u v")(x, x),
    "OrderedDict": lambda x: collections.OrderedDict([("z", x), ("a", 1)]),
    "defaultdict": lambda x: collections.defaultdict(list, {"x": x}),
    "registered dataclass": lambda x: Batch(x, None, name="test"),
    "flax.struct": lambda x: Struct(x, mode="slow"),
    "FrozenDict": lambda x: flax.core.freeze({"params": {"w": x}}),
    "empties": lambda x: ((), [], {}, None, x),
    "nested": lambda x: {"a": [Pair(x, Batch(x, (x, "s")))], "b": collections.OrderedDict(q=Struct(None))},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_container_types_survive(same, devices, make):
    x = rows(5, 2)
    tree = make(x)
    s = jdp.scatter(tree, devices[:3])
    for i, chunk in enumerate(torch_chunks(x, 3)):
        same(s[i], jax.tree.map(lambda leaf: chunk if leaf is x else leaf, tree))  # noqa: B023
        assert type(s[i]) is type(tree) or make(x) is x
    same(jdp.gather(s), tree)


def test_the_order_of_an_ordered_dict_and_the_factory_of_a_defaultdict_survive(devices):
    x = rows(2)
    back = jdp.gather(jdp.scatter((CONTAINERS["OrderedDict"](x), CONTAINERS["defaultdict"](x)), devices[:2]))
    assert list(back[0]) == ["z", "a"]
    assert back[1]["missing"] == []


class MyDict(dict):
    pass


class MyList(list):
    pass


class MyTuple(tuple):
    pass


@pytest.mark.parametrize(
    "container",
    [
        MyDict(x=rows(4)),
        MyList([rows(4)]),
        MyTuple([rows(4)]),
        collections.Counter("ab"),
        MyDict(),
    ],
    ids=["dict", "list", "tuple", "Counter", "empty"],
)
def test_a_container_that_jax_does_not_know_is_refused(refused, devices, container):
    name = type(container).__name__
    with refused(TypeError, "scatter", rf"(?s)\['bad'\].*{name}.*register"):
        jdp.scatter({"x": rows(4), "bad": container}, devices[:2])


# --- what is refused


def test_arrays_that_disagree_on_their_size_are_refused(refused, devices):
    batch = ({"x": rows(10, 2)}, rows(2))
    with refused(ValueError, "scatter", r"(?s)\[0\]\['x'\].*10.*\[1\].*2"):
        jdp.scatter(batch, devices[:4])
    # torch would have dropped 4 of the 10 rows; here nothing has changed
    assert batch[0]["x"].shape == (10, 2) and batch[1].shape == (2,)


def test_arrays_that_disagree_by_broadcasting_are_refused_too(refused, devices):
    with refused(ValueError, "scatter", r"(?s)\[0\].*4.*\[1\].*1"):
        jdp.scatter((rows(4), rows(1)), devices[:2])


def test_one_empty_array_beside_a_full_one_is_refused(refused, devices):
    with refused(ValueError, "scatter", r"(?s)\[0\].*4.*\[1\].*0"):
        jdp.scatter((rows(4), rows(0)), devices[:2])


@pytest.mark.parametrize("dim, rank", [(1, 1), (-2, 1), (5, 1), (2, 2), (-3, 2)])
def test_dim_out_of_range_is_refused(refused, devices, dim, rank):
    with refused(IndexError, "scatter", rf"(?s)\['x'\].*{rank} dimension.*{dim}"):
        jdp.scatter({"x": np.zeros((4,) * rank)}, devices[:2], dim)


@pytest.mark.parametrize(
    "bad",
    [
        *(np.array([1, "a", None], object), np.array(["a", "b"]), np.array([b"a"]), np.array([Config()])),
        np.array(["a", "b"], np.dtypes.StringDType()),
    ],
    ids=["object", "str", "bytes", "config", "text"],
)
def test_arrays_of_objects_are_refused(refused, devices, bad):
    with refused(TypeError, "scatter", r"(?s)\[0\]\['bad'\].*(object|str|<U1|\|S1|bytes|StringDType)"):
        jdp.scatter(({"bad": bad},), devices[:2])


RECORDS = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", int), ("b", float)])


@pytest.mark.parametrize("bad", [RECORDS, RECORDS[0], np.array(RECORDS)], ids=["array", "entry", "structured"])
def test_records_are_refused_at_each_door(refused, devices, bad):
    text = r"(?s)\['bad'\] is an array of dtype .*'a'.*Convert it"
    with refused(TypeError, "scatter", text):
        jdp.scatter({"bad": bad}, devices[:2])
    with refused(TypeError, "replicate", text):
        jdp.replicate({"bad": bad}, devices[:2])
    with refused(TypeError, "gather", text):
        jdp.gather([{"bad": bad}] * 2)
    dp = jdp.DataParallel(lambda w, x: x, devices[:2])
    with refused(TypeError, "DataParallel", text):
        dp(None, {"bad": bad})
    with refused(TypeError, "DataParallel", text):
        dp({"bad": bad}, rows(2))
    with refused(TypeError, "parallel_apply", "; outputs are arrays with rows"):
        jdp.DataParallel(lambda w, x: {"x": x, "bad": bad}, devices[:2])(None, rows(2))


@pytest.mark.parametrize("view", [bytearray(b"abcd"), b"abcd", rows(4), rows(4, 2)], ids=lambda x: type(x).__name__)
def test_a_memoryview_is_refused(refused, devices, view):
    dp = jdp.DataParallel(lambda w, x, *y: x, devices[:2])
    with refused(TypeError, "scatter", r"\['v'\] is a builtins.memoryview, .*Pass np\.asarray\(x\)"):
        jdp.scatter({"v": memoryview(view)}, devices[:2])
    with refused(TypeError, "replicate", r"\['v'\] is a builtins.memoryview, .*Pass np\.asarray\(x\)"):
        jdp.replicate({"v": memoryview(view)}, devices[:2])
    with refused(TypeError, "DataParallel", r"args\[1\] is a builtins.memoryview"):
        dp(None, rows(4), memoryview(view))


LARGE = [np.array([2**40]), np.array([1, -(2**31) - 1]), np.array([2**33], np.uint64), np.int64(2**40)]


@pytest.mark.parametrize("x", LARGE, ids=repr)
def test_integers_that_jax_would_wrap_are_refused(same, refused, devices, x):
    for verb, call in {
        "scatter": lambda: jdp.scatter({"i": x}, devices[:2]),
        "replicate": lambda: jdp.replicate({"i": x}, devices[:2]),
        "gather": lambda: jdp.gather([{"i": x}] * 2),
    }.items():
        with refused(OverflowError, verb, r"\['i'\] holds -?\d+; integers here are u?int32.*jax_enable_x64"):
            call()
    batch = {"i": np.resize(x, 2), "x": rows(2)}  # a column of a batch that the function does not read is no trouble
    same(jdp.DataParallel(lambda w, batch: batch["x"], devices[:2])(None, batch), rows(2))
    with jax.enable_x64(True):
        same(jdp.gather(jdp.scatter(np.atleast_1d(x), devices[:2])), np.atleast_1d(x))


def test_integers_that_fit_in_32_bits_are_no_trouble(same, devices):
    x = np.array([2**31 - 1, -(2**31), 0])
    same(jdp.gather(jdp.scatter(x, devices[:2])), x.astype(np.int32))
    same(jdp.gather(jdp.scatter(x[:0], devices[:2])), x[:0].astype(np.int32))


def test_keys_of_several_types_are_refused_at_each_door(refused, devices):
    mixed = {1: rows(4), "a": rows(4)}
    text = "a dict among the (inputs|params|outputs) has keys of several types .*Pass keys of one type"
    with refused(ValueError, "scatter", text):
        jdp.scatter(mixed, devices[:2])
    with refused(ValueError, "replicate", text):
        jdp.replicate(mixed, devices[:2])
    with refused(ValueError, "gather", text):
        jdp.gather([mixed, mixed])
    with refused(ValueError, "reduce_add", text):
        jdp.reduce_add([mixed, mixed])


def test_a_legacy_key_beside_other_rows_is_refused(refused, devices):
    with refused(TypeError, "scatter", r"(?s)\[1\].*jax\.random\.key"):
        jdp.scatter((rows(10, 3), jax.random.PRNGKey(0)), devices[:2])
    with refused(TypeError, "scatter", r"(?s)\['rng'\].*jax\.random\.key"):
        jdp.scatter({"rng": jax.random.PRNGKey(0), "x": rows(5)}, devices[:2])


def test_a_torch_tensor_is_refused(refused, devices):
    torch = pytest.importorskip("torch")
    with refused(TypeError, "scatter", r"(?s)\['x'\].*np\.asarray"):
        jdp.scatter({"x": torch.zeros(4)}, devices[:2])


# --- chunk_sizes=


@pytest.mark.parametrize(
    "sizes", [(5, 0, 0), (0, 5, 0), (0, 0, 5), (1, 4, 0), (4, 0, 1), (0, 2, 3), (2, 1, 2), (1, 1, 3)]
)
def test_chunk_sizes_give_unequal_shares(same, devices, sizes):
    x = rows(5, 2)
    s = jdp.scatter({"x": x, "mode": "sum"}, devices[:3], chunk_sizes=sizes)
    assert s.sizes == sizes and len(s) == 3
    ends = np.cumsum(sizes)
    for i in range(3):
        same(s[i], {"x": x[ends[i] - sizes[i] : ends[i]], "mode": "sum"})
        assert s[i]["x"].devices() == {devices[i]}
    same(jdp.gather(s), {"x": x, "mode": "sum"})


def test_chunk_sizes_along_another_dim(same, devices):
    x = rows(2, 5)
    s = jdp.scatter(x, devices[:2], -1, chunk_sizes=[4, 1])
    same(list(s), [x[:, :4], x[:, 4:]])
    same(jdp.gather(s, dim=-1), x)


def test_chunk_sizes_of_no_rows(same, devices):
    s = jdp.scatter(rows(0, 2), devices[:2], chunk_sizes=(0, 0))
    assert s.sizes == (0, 0)
    same(jdp.gather(s), rows(0, 2))


@pytest.mark.parametrize(
    "sizes, match",
    [
        ((3, 3), "(?s)6.*5|5.*6"),
        ((1, 1), "(?s)2.*5|5.*2"),
        ((6, -1), "-1"),
    ],
)
def test_chunk_sizes_that_do_not_fit_are_refused(refused, devices, sizes, match):
    with refused(ValueError, "scatter", match):
        jdp.scatter(rows(5), devices[:2], chunk_sizes=sizes)


def test_chunk_sizes_of_what_is_scattered_already(refused, devices):
    s = jdp.scatter(rows(5), devices[:4])
    assert jdp.scatter((s,), devices[:4], chunk_sizes=(2, 2, 1, 0)).sizes == s.sizes
    with refused(ValueError, "scatter", r"chunk_sizes is \(1, 2, 1, 1\), .*already has chunks \(2, 2, 1\)"):
        jdp.scatter((s,), devices[:4], chunk_sizes=(1, 2, 1, 1))


@pytest.mark.parametrize("sizes", [(0.9, 4.7), (True, 4), (None, 5), 5, np.array(5), "ab"], ids=repr)
def test_chunk_sizes_that_are_no_ints_are_refused(refused, devices, sizes):
    with refused(TypeError, "scatter", r"chunk_sizes is .*Pass a tuple of ints"):
        jdp.scatter(rows(5), devices[:2], chunk_sizes=sizes)


def test_numpys_integers_are_ints(same, devices):
    x = rows(4, 5)
    assert jdp.scatter(x, devices[:2], np.int64(1), chunk_sizes=np.array([4, 1])).sizes == (4, 1)
    same(jdp.gather([x, x], dim=np.int64(1)), np.concatenate([x, x], 1))
    dp = jdp.DataParallel(lambda w, x: x * w, devices[:2], dim=np.int64(1), replicas=np.int32(4))
    same(dp(np.float32(2), x), 2 * x)
    dp.value_and_grad(lambda w, x: (w * x).mean(), accumulate_steps=np.int64(1))(np.float32(2), x)


@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1), ()])
def test_chunk_sizes_of_another_length_are_refused_in_torch_s_words(devices, sizes):
    match = (
        r"^jdp\.scatter: .*Expected devices and chunk_sizes to be of same length, "
        rf"but got len\(devices\) = 2 and len\(chunk_sizes\) = {len(sizes)}"
    )
    with pytest.raises(ValueError, match=match):
        jdp.scatter(rows(5), devices[:2], chunk_sizes=sizes)


# --- derivatives


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("size", [4, 5, 0])
def test_scatter_and_gather_are_twice_differentiable(same, devices, wrap, size):
    x = rows(size, 2)

    def cubes(x):
        s = jdp.scatter({"x": x}, devices[:3])
        return (jdp.gather(s)["x"] ** 3).sum()

    same(wrap(jax.grad(cubes))(x), 3 * x**2)
    same(wrap(jax.grad(lambda x: jax.grad(cubes)(x).sum()))(x), 6 * x)


def test_the_gradient_through_one_chunk_is_zero_elsewhere(same, devices):
    x = rows(5, 2)
    same(
        jax.grad(lambda x: jdp.scatter(x, devices[:3])[1].sum())(x),
        np.float32([[0, 0]] * 2 + [[1, 1]] * 2 + [[0, 0]]),
    )


def test_the_gradient_comes_back_to_where_the_input_was(same, devices):
    x = jax.device_put(rows(5), devices[3])
    g = jax.grad(lambda x: (jdp.gather(jdp.scatter(x, devices[:2])) ** 2).sum())(x)
    assert g.devices() == {devices[3]}
    same(g, 2 * rows(5))


@pytest.mark.parametrize("size", [4, 5])
def test_forward_mode(same, devices, size):
    x = rows(size, 2)
    value, tangent = jax.jvp(lambda x: jdp.gather(jdp.scatter(x, devices[:2])) ** 2, (x,), (np.ones_like(x),))
    same((value, tangent), (x**2, 2 * x))


def test_under_jit_the_values_are_the_same(same, devices, n):
    for size in (8, 5):
        x = rows(size, 2)
        got = jax.jit(lambda x: jdp.gather(jdp.scatter({"x": x, "mode": None}, devices[:n])))(x)
        same(got, {"x": x, "mode": None})


def test_strict_promotion_settings_are_no_trouble(same, devices):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for size in (4, 5):
            x = rows(size, 2)
            same(jdp.gather(jdp.scatter((x, x.astype(np.int8)), devices[:2])), (x, x.astype(np.int8)))


def test_no_array_of_the_caller_is_changed_or_deleted(same, devices):
    x = jnp.asarray(rows(4, 2))
    tree = {"x": x, "more": [x, "s"]}
    s = jdp.scatter(tree, devices[:2])
    jdp.gather(s)
    assert tree["x"] is x and tree["more"][0] is x and not x.is_deleted()
    same(x, rows(4, 2))


@pytest.mark.parametrize("dim", [None, 1.5, True])
def test_a_dim_that_is_no_int(dim):
    with pytest.raises(TypeError, match=r"jdp\.scatter: dim is .*Pass an int"):
        jdp.scatter(NUMBERS, dim=dim)


def test_an_entry_of_an_array_of_strings_is_a_string():
    name = np.array(["a.png", "b.png"])[1]
    for leaf in (name, name.encode(), np.bytes_(b"c")):
        scattered = jdp.scatter({"x": np.arange(4.0), "name": leaf}, range(2))
        assert [scattered[i]["name"] for i in range(2)] == [leaf, leaf]
