"""Every leaf whole on every device, moved no more than needed."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp


@flax.struct.dataclass
class Params:
    w: jax.Array
    b: jax.Array | None
    name: str = flax.struct.field(pytree_node=False, default="net")


def tree():
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "deep": [Params(jnp.ones(3, jnp.bfloat16), None, "a"), (jnp.int32(4), jnp.zeros((0, 2)))],
        "mask": np.array([True, False]),
        "complex": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(1),
        "none": None,
    }


def test_every_leaf_is_whole_on_every_device(same, devices, n):
    got = jdp.replicate(tree(), devices[:n])
    same(got, tree())
    for leaf in jax.tree.leaves(got):
        assert leaf.is_fully_replicated and leaf.devices() == set(devices[:n])
    for shard in got["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, tree()["w"])


def test_python_numbers_become_arrays(same, devices):
    same(jdp.replicate((2.0, 3, True), devices[:2]), (jnp.asarray(2.0), jnp.asarray(3), jnp.asarray(True)))


def test_leaves_in_place_are_not_copied_again(devices):
    once = jdp.replicate(tree(), devices[:3])
    twice = jdp.replicate(once, devices[:3])
    assert all(a is b for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True))


def test_one_leaf_out_of_place_moves_alone(devices):
    once = jdp.replicate({"a": jnp.ones(3), "b": jnp.ones(3)}, devices[:2])
    for other in (np.ones(3), jnp.ones(3), jax.device_put(np.ones(3), devices[0])):
        mixed = jdp.replicate({"a": once["a"], "b": other}, devices[:2])
        assert mixed["a"] is once["a"] and mixed["b"].devices() == set(devices[:2])


@pytest.mark.parametrize("where", ["host", "uncommitted", "primary", "replicated"])
def test_parameters_are_read_from_where_they_may_live(same, devices, where):
    w = np.arange(3, dtype=np.float32)
    mesh = jax.make_mesh((2,), ("anything",), devices=devices[1:3], axis_types=(jax.sharding.AxisType.Auto,))
    placed = {
        "host": lambda: w,
        "uncommitted": lambda: jnp.asarray(w),
        "primary": lambda: jax.device_put(w, devices[1]),
        "replicated": lambda: jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.P())),
    }[where]()
    got = jdp.replicate(placed, devices[1:3])
    same(got, w)
    assert got.devices() == set(devices[1:3])
    same(placed if where != "host" else jnp.asarray(placed), w)  # and stay there


def test_a_parameter_elsewhere_is_refused_in_torch_s_words(devices):
    params = {"dense": {"kernel": jnp.ones(2), "bias": jax.device_put(np.ones(3), devices[5])}}
    words = (
        r"module must have its parameters and buffers on device .*0.*\(device_ids\[0\]\) "
        r"but found one of them on device: .*5"
    )
    with pytest.raises(RuntimeError, match=words) as info:
        jdp.replicate(params, devices[:2])
    assert str(info.value).startswith("jdp.replicate: ") and "['dense']['bias']" in str(info.value)
    assert params["dense"]["bias"].devices() == {devices[5]}


def test_a_parameter_on_a_device_that_is_not_the_primary_is_refused(devices):
    with pytest.raises(RuntimeError, match=r"\(device_ids\[0\]\) but found one of them on device: .*1"):
        jdp.replicate({"w": jax.device_put(np.ones(3), devices[1])}, devices[:2])


def test_parameters_stacked_for_pmap_are_refused(devices):
    mesh = jax.make_mesh((2,), ("batch",), devices=devices[:2], axis_types=(jax.sharding.AxisType.Auto,))
    stacked = jax.device_put(np.ones((2, 3)), jax.sharding.NamedSharding(mesh, jax.P("batch")))
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)^jdp\.replicate: .*\['w'\].*pmap"):
        jdp.replicate({"w": stacked}, devices[:2])


@pytest.mark.parametrize(
    "leaf", ["text", object(), np.array([None]), np.array(["s"])], ids=["str", "object", "None", "U"]
)
def test_a_leaf_that_is_no_array_is_refused(refused, devices, leaf):
    with refused(TypeError, "replicate", r"(?s)\['bad'\]"):
        jdp.replicate({"w": np.ones(3), "bad": leaf}, devices[:2])


@pytest.mark.parametrize("n", [2**40, -(2**40), 2**70])
def test_a_python_int_that_jax_cannot_hold_is_refused(refused, devices, n):
    text = rf"\['n'\] holds {n}; integers here are int32, .*Pass smaller numbers or floats"
    with refused(OverflowError, "replicate", text):
        jdp.replicate({"n": n}, devices[:2])
    with refused(OverflowError, "DataParallel", text):
        jdp.DataParallel(lambda w, x: x * w["n"], devices[:2])({"n": n}, np.ones(4, np.float32))


def test_big_endian_parameters_are_converted(same, devices):
    w = np.arange(4, dtype=">f4")
    same(jdp.replicate({"w": w}, devices[:2]), {"w": w.astype(np.float32)})
    dp = jdp.DataParallel(lambda w, x: x * w, devices[:2])
    same(dp(w, np.ones((2, 4), np.float32)), np.stack([w, w]).astype(np.float32))
    _, grad = dp.value_and_grad(lambda w, x: (x * w).sum(1).mean())(w, np.ones((2, 4), np.float32))
    same(grad, np.ones(4, np.float32))


class MyDict(dict):
    pass


def test_a_container_that_jax_does_not_know_is_refused(refused, devices):
    with refused(TypeError, "replicate", "(?s)MyDict.*register"):
        jdp.replicate({"net": MyDict(w=np.ones(3))}, devices[:2])


def test_a_torch_tensor_is_refused(refused, devices):
    torch = pytest.importorskip("torch")
    with refused(TypeError, "replicate", r"(?s)\['w'\].*np\.asarray"):
        jdp.replicate({"w": torch.zeros(4)}, devices[:2])


def test_the_gradient_comes_back_to_where_the_leaf_was(same, devices):
    w = jax.device_put(np.float32([1, 2, 3]), devices[0])
    g = jax.grad(lambda w: (jdp.replicate({"w": w}, devices[:3])["w"] ** 3).sum())(w)
    same(g, np.float32([3, 12, 27]))
    assert g.devices() == {devices[0]}
    same(jax.grad(lambda w: jax.grad(lambda w: (jdp.replicate(w, devices[:3]) ** 3).sum())(w).sum())(w), 6 * w)


def test_under_jit_the_tree_passes_through(same, devices):
    same(jax.jit(lambda t: jdp.replicate(t, devices[:2]))(tree()), tree())


def test_the_caller_s_arrays_stay_alive(same, devices):
    w = jnp.arange(3.0)
    jdp.replicate({"w": w}, devices[:2])
    assert not w.is_deleted()
    same(w, np.float32([0, 1, 2]))


@pytest.mark.parametrize("make", [lambda w, d: jdp.replicate([w], d)[0], lambda w, d: jdp.scatter(w, d)[0]])
@pytest.mark.parametrize("n", [1, 4])
def test_a_numpy_array_that_is_changed_later_changes_nothing(devices, make, n):
    """JAX uses the memory of an array that begins at a multiple of 64 bytes, for as long as its own array lives."""
    memory = np.zeros(4096 + 64, np.uint8)
    w = memory[-memory.ctypes.data % 64 :][:4096].view(np.float32)
    found = jax.block_until_ready(make(w, devices[:n]))
    w[:] = 1
    assert not np.asarray(found).any()


def test_a_mesh_keeps_the_name_of_its_axis(devices):
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("batch",))
    w, dp = jdp.replicate({"w": np.float32(2)}, mesh), jdp.DataParallel(lambda w, x: w["w"] * x, mesh)
    assert dp.replicate(w, dp.devices) is w  # each call would move it
    x = np.arange(10, dtype=np.float32)
    out = jdp.parallel_apply(lambda w, x: w["w"] * jax.lax.pmax(x.max(), "batch"), w, jdp.scatter(x[:8], mesh))
    assert jdp.gather(out).tolist() == [14.0] * 4 and dp(w, jdp.scatter(x, mesh)).tolist() == (2 * x).tolist()
