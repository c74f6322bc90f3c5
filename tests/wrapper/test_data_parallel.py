"""DataParallel of Linen modules and plain functions: `dp(params, x) == module(params, x)`."""

import collections
import dataclasses
import gc
import importlib
import sys
import threading
import types
import weakref
from typing import Any, NamedTuple

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from laws import NUMBERS, close

import jdp

ROWS = np.random.RandomState(0).randn(17, 3).astype(np.float32)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.tanh(nn.Dense(4)(x)))

    def hidden(self, x, scale=1.0):
        return x * scale + self.variables["params"]["Dense_0"]["kernel"].sum()


class Dropper(nn.Module):
    """Returns its dropout mask: which numbers a replica drew."""

    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dropout(0.5, deterministic=not train)(x)


MODEL = MLP()
VARIABLES = jax.tree.map(np.asarray, MODEL.init(jax.random.key(0), ROWS))
WRAPPERS = {n: jdp.DataParallel(MODEL, devices=range(n)) for n in (1, 2, 3, 8)}
ONES = np.ones((10, 16), np.float32)
DROP = {n: jdp.DataParallel(Dropper(), devices=range(n)) for n in (1, 4)}


def linear(params, x):
    return x @ params["w"] + params["b"]


LINEAR = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.float32([1, -1])}
WEIGHT = np.float32(3)


# --- the equation ---


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 16])
def test_linen_equals_the_module(n, size):
    dp, x = WRAPPERS[n], ROWS[:size]
    want = MODEL.apply(VARIABLES, x)
    for got in (dp.apply(VARIABLES, x), dp(VARIABLES, x)):
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_functional_form_equals_the_function(n):
    x = ROWS[:10]
    want = linear(LINEAR, x)
    for batch in (x, (x,)):
        got = jdp.data_parallel(linear, LINEAR, batch, devices=range(n))
        np.testing.assert_allclose(got, want, rtol=1e-6)
    dp = jdp.DataParallel(linear, devices=range(n))
    np.testing.assert_allclose(dp(LINEAR, x), want, rtol=1e-6)
    np.testing.assert_allclose(dp.apply(LINEAR, x), want, rtol=1e-6)


def test_functional_form_takes_the_name_of_a_meshs_axis_and_a_dim_that_is_an_int(devices):
    def centred(w, x):
        return w * x - lax.pmean(x.mean(), "batch")

    x, mesh = ROWS[:8], jax.sharding.Mesh(np.array(devices[:4]), ("batch",))
    np.testing.assert_allclose(jdp.data_parallel(centred, WEIGHT, x, mesh), WEIGHT * x - x.mean(), rtol=1e-5, atol=1e-6)
    for dim in ([0], 0.0, True):
        jdp.data_parallel(linear, LINEAR, x)
        with pytest.raises(TypeError, match=r"jdp\.data_parallel: dim is .*Pass an int"):
            jdp.data_parallel(linear, LINEAR, x, dim=dim)


def test_devices_none_is_all_devices(devices):
    dp = jdp.DataParallel(linear)
    assert list(dp.devices) == devices
    np.testing.assert_allclose(jdp.data_parallel(linear, LINEAR, ROWS), linear(LINEAR, ROWS), rtol=1e-6)


def test_even_batches_agree_with_pmap_to_the_last_bit(devices):
    """Outputs, and the summed gradient against psum of each replica's."""
    n, x = 4, ROWS[:16]
    dp = jdp.DataParallel(MODEL, devices=range(n))
    stack = x.reshape(n, 4, 3)
    pmap = {"axis_name": "data", "devices": devices[:n]}
    want = jax.pmap(MODEL.apply, in_axes=(None, 0), **pmap)(VARIABLES, stack)
    np.testing.assert_array_equal(dp.apply(VARIABLES, x), np.reshape(want, (16, 2)))

    def loss(variables, x):
        return jnp.sum(MODEL.apply(variables, x) ** 2)

    def summed(variables, x):
        return lax.psum(jax.grad(loss)(variables, x), "data")

    want = jax.pmap(summed, in_axes=(None, 0), **pmap)(VARIABLES, stack)
    variables = jdp.replicate(VARIABLES, range(n))
    for wrap in (lambda f: f, jax.jit):
        got = wrap(jax.grad(lambda v: jnp.sum(dp.apply(v, x) ** 2)))(variables)
        jax.tree.map(lambda g, w: np.testing.assert_array_equal(g, w[0]), got, want)


def test_batch_norm_and_dropout_agree_with_pmap_to_the_last_bit(devices):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
            return nn.Dropout(0.5, deterministic=False)(x)

    net, n, x = Net(), 4, ROWS[:16]
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    key = jax.random.key(7)

    def one(variables, x):
        index = lax.axis_index("data")
        own = lax.cond(index == 0, lambda: key, lambda: jax.random.fold_in(key, index))
        return net.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": own})

    want, stats = jax.pmap(one, in_axes=(None, 0), axis_name="data", devices=devices[:n])(variables, x.reshape(n, 4, 3))
    dp = jdp.DataParallel(net, devices=range(n))
    got, state = dp.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": key})
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(g, w[0]), state, stats)
    np.testing.assert_array_equal(got[:4], want[0])
    assert not np.array_equal(got[4:8], got[:4])


# --- Linen's doors ---


def test_init_returns_the_models_own_tree_replicated(devices):
    dp = WRAPPERS[8]
    for rngs in (jax.random.key(0), {"params": jax.random.key(0)}):
        variables = dp.init(rngs, ROWS)
        assert jax.tree.structure(variables) == jax.tree.structure(VARIABLES)  # no `module.` prefix
        jax.tree.map(np.testing.assert_array_equal, variables, VARIABLES)
        for leaf in jax.tree.leaves(variables):
            assert leaf.is_fully_replicated and leaf.devices() == set(devices)


def test_init_of_another_batch_size_and_of_uneven_rows():
    for size in (1, 2, 5):
        variables = WRAPPERS[8].init(jax.random.key(0), ROWS[:size])
        jax.tree.map(np.testing.assert_array_equal, variables, VARIABLES)


def test_checkpoints_load_in_the_wrapper_and_back():
    dp = WRAPPERS[3]
    ours = dp.init(jax.random.key(5), ROWS)
    theirs = MODEL.init(jax.random.key(6), ROWS)
    loaded = flax.serialization.from_bytes(theirs, flax.serialization.to_bytes(ours))
    np.testing.assert_allclose(MODEL.apply(loaded, ROWS), dp.apply(ours, ROWS), rtol=1e-6, atol=1e-6)
    loaded = flax.serialization.from_bytes(ours, flax.serialization.to_bytes(theirs))
    np.testing.assert_allclose(dp.apply(loaded, ROWS), MODEL.apply(theirs, ROWS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["hidden", MLP.hidden])
def test_method_other_than_call(method):
    """Row 139e: any method runs in parallel."""
    x = ROWS[:10]
    got = WRAPPERS[3].apply(VARIABLES, x, method=method, scale=2.0)
    alone = jax.jit(lambda v, x: MODEL.apply(v, x, method="hidden", scale=2.0))  # compiled, as the other is
    np.testing.assert_allclose(got, alone(VARIABLES, x), rtol=1e-6)


def test_mutable_false_returns_the_output_alone_and_a_list_returns_a_pair():
    dp, x = WRAPPERS[3], ROWS[:4]
    assert isinstance(dp.apply(VARIABLES, x), jax.Array)
    y, state = dp.apply(VARIABLES, x, mutable=["batch_stats"])
    assert y.shape == (4, 2) and jax.tree.leaves(state) == []
    y, state = dp.apply(VARIABLES, x, mutable=True)
    jax.tree.map(np.testing.assert_array_equal, state["params"], VARIABLES["params"])


# --- plain functions ---


def test_a_functions_keywords_are_its_own():
    """Row 36: rngs, mutable, method, and the names of the wrapper's own parameters are no one's."""

    def model(p, x, *, rngs, mutable, method, variables, inputs, module, self, params, args, devices):
        assert method == "sum" and mutable is True
        return p * x * rngs + variables + inputs + module + self + params + args + devices

    rows = np.arange(5, dtype=np.float32)
    kw = dict(rngs=rows, mutable=True, method="sum", variables=rows, inputs=rows, module=rows, self=rows)
    kw |= dict(params=rows, args=rows, devices=rows)
    want = 2 * rows * rows + 7 * rows
    dp = jdp.DataParallel(model, devices=range(2))
    np.testing.assert_allclose(dp.apply(np.float32(2), rows, **kw), want)
    kw.pop("self")
    dp = jdp.DataParallel(lambda p, x, **kw: model(p, x, self=x, **kw), devices=range(2))
    np.testing.assert_allclose(dp(np.float32(2), rows, **kw), want)
    got = jdp.data_parallel(lambda p, x, **kw: model(p, x, self=x, **kw), np.float32(2), rows, [0, 1], kwargs=kw)
    np.testing.assert_allclose(got, want)


def test_keywords_are_cut_like_arguments():
    def model(p, x, *, scale, shift=0.0, bias):
        assert scale.shape == x.shape and bias.shape == ()
        return p * x * scale + shift + bias

    x, scale = np.arange(5, dtype=np.float32), np.arange(5, 10, dtype=np.float32)
    kw = dict(scale=scale, shift=2.0, bias=np.float32(1))
    got = jdp.DataParallel(model, devices=range(3))(WEIGHT, x, **kw)
    np.testing.assert_allclose(got, 3 * x * scale + 3)
    got = jdp.data_parallel(model, WEIGHT, x, devices=range(3), kwargs=kw)
    np.testing.assert_allclose(got, 3 * x * scale + 3)


@pytest.mark.parametrize("in_axes", [None, (1,)])
def test_keywords_are_cut_along_dim(in_axes):
    x, scale = np.arange(10, dtype=np.float32).reshape(2, 5), np.arange(15, dtype=np.float32).reshape(3, 5)
    dp = jdp.DataParallel(lambda p, x, *, scale: p * x * scale.sum(0), range(3), dim=1, in_axes=in_axes)
    np.testing.assert_allclose(dp.apply(WEIGHT, x, scale=scale), WEIGHT * x * scale.sum(0))


def test_batch_of_data_parallel_tuple_none_list_and_the_rest():
    """Row 140a: a plain tuple is the arguments, None is none, a NamedTuple or a list is one argument."""
    Pair = collections.namedtuple("Pair", "a b")
    x = np.arange(4, dtype=np.float32)
    run = jdp.data_parallel
    np.testing.assert_array_equal(run(lambda w, a, b: w * a + b, WEIGHT, (x, x), [0, 1]), 4 * x)
    np.testing.assert_array_equal(run(lambda w, ab: w * ab.a + ab.b, WEIGHT, Pair(x, x), [0, 1]), 4 * x)
    np.testing.assert_array_equal(run(lambda w, ab: w * ab[0] + ab[1], WEIGHT, [x, x], [0, 1]), 4 * x)
    np.testing.assert_array_equal(run(lambda w, d: w * d["x"], WEIGHT, {"x": x}, [0, 1]), 3 * x)
    np.testing.assert_array_equal(run(lambda w: w * jnp.ones((2, 1)), WEIGHT, None, [0, 1]), [[3], [3]])
    np.testing.assert_array_equal(run(lambda w: w * jnp.ones((2, 1)), WEIGHT, (), [0, 1]), [[3], [3]])
    np.testing.assert_array_equal(run(lambda w, *, x: w * x, WEIGHT, None, [0, 1], kwargs={"x": x}), 3 * x)


def test_data_parallel_output_device_and_dim(devices):
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    y = jdp.data_parallel(lambda w, x: w * x, WEIGHT, x, devices[:3], devices[6], 1)
    np.testing.assert_array_equal(y, 3 * x)
    assert y.devices() == {devices[6]}


def test_with_nothing_to_cut_the_model_runs_once_on_the_primary_device():
    """Rows 23 and 29: torch runs it on every device and concatenates."""
    seen = []

    def model(w, scale=1.0, name="", key=None):
        jax.debug.callback(lambda w: seen.append(threading.get_ident()), w)
        return w * scale * jnp.ones((2, 3))

    dp = jdp.DataParallel(model, devices=[2, 3, 5])
    for args in ((), (2.0,), (np.float32(2), "name"), (2.0, "name", jax.random.key(0))):
        seen.clear()
        y = dp(WEIGHT, *args)
        jax.effects_barrier()
        assert y.shape == (2, 3) and float(y[0, 0]) == (6 if args else 3)
        assert y.devices() == {jax.devices()[2]}
        assert len(seen) == 1


def test_static_values_reach_the_model_as_they_are():
    def model(w, x, mode, *, train, fn, sizes):
        assert mode == "twice" and train is True and sizes == (1, None, [2]) and type(sizes[0]) is int
        return fn(x) * w

    dp = jdp.DataParallel(model, devices=range(2))
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(dp(WEIGHT, x, "twice", train=True, fn=jnp.negative, sizes=(1, None, [2])), -3 * x)


def test_many_distinct_static_values_warn_once():
    dp = jdp.DataParallel(lambda w, x, k: w * x + k, devices=[0])
    x = np.ones(2, np.float32)
    for k in (0, 1, 2, 0, 1):
        dp(WEIGHT, x, k)
    with pytest.warns(UserWarning, match=r"for the 4th time .* Python values: \[1\] is 3 now\. Each") as record:
        dp(WEIGHT, x, 3)
    assert len(record) == 1 and record[0].filename == __file__  # the user's line
    for k in (3, 4, 5):
        np.testing.assert_array_equal(dp(WEIGHT, x, k), 3 + np.full(2, k))  # no second warning, which is an error


def test_names_of_files_that_a_model_reads_warn():
    """torch's collate puts strings into a batch; where a model reads them, each batch is a program of its own."""
    dp = jdp.DataParallel(lambda w, batch: w * batch["x"] * len(batch["names"][0]), devices=[0])
    batches = [{"x": np.ones(2, np.float32), "names": [f"{i}.png", f"{i + 1}.png"], "kind": "train"} for i in range(4)]
    for batch in batches[:3]:
        dp(WEIGHT, batch)
    with pytest.warns(UserWarning, match=r"\[0\]\['names'\]\[0\] is '3\.png' now and 1 more\."):
        dp(WEIGHT, batches[3])


def test_python_and_zero_d_scalars_are_the_same_to_the_model():
    dp = jdp.DataParallel(lambda w, x, s: x * s * w, devices=range(3))
    x = np.arange(7, dtype=np.float32)
    for s in (2, 2.0, np.float32(2), np.float64(2), jnp.float32(2), np.array(2)):
        np.testing.assert_array_equal(dp(WEIGHT, x, s), 6 * x)


# --- devices and where things are ---


@pytest.mark.parametrize("given", [[3, 1], ["cpu:3", "cpu:1"], ("cpu:3", 1), range(3, 0, -2)])
def test_forms_of_devices(devices, given):
    dp = jdp.DataParallel(linear, devices=given)
    assert tuple(dp.devices) == (devices[3], devices[1])
    y = dp(LINEAR, ROWS[:5])
    assert y.devices() == {devices[3]}  # the first is the primary device
    np.testing.assert_allclose(y, linear(LINEAR, ROWS[:5]), rtol=1e-6)
    assert tuple(jdp.DataParallel(linear, devices=[devices[3], "cpu:1"]).devices) == (devices[3], devices[1])


def test_attributes(devices):
    dp = jdp.DataParallel(MODEL, [1, 2], output_device="cpu:4", dim=0)
    assert dp.module is MODEL and tuple(dp.devices) == tuple(devices[1:3]) and dp.dim == 0
    assert dp.output_device == devices[4]
    assert jdp.DataParallel[MLP](MODEL, [1]).module is MODEL  # row 17
    assert "MLP" in repr(dp)


def test_outputs_follow_the_parameters(devices):
    dp = jdp.DataParallel(linear, devices=[2, 3, 4])
    replicated = jdp.replicate(LINEAR, [2, 3, 4])
    for x in (ROWS[:9], ROWS[:10], ROWS[:1]):
        assert dp(LINEAR, x).devices() == {devices[2]}
        assert dp(jax.device_put(LINEAR, devices[2]), x).devices() == {devices[2]}
        assert dp(replicated, x).devices() == set(devices[2:5])
        assert dp(replicated, jax.device_put(x, devices[6])).devices() == set(devices[2:5])


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("where, at", [("cpu", 0), (-1, 0), ("cpu:6", 6), (7, 7), (None, 2)])
@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_output_device(devices, where, at, size):
    dp = jdp.DataParallel(linear, devices=[2, 3], output_device=where)
    for params in (LINEAR, jax.device_put(LINEAR, devices[2])):
        y = dp(params, ROWS[:size])
        assert y.devices() == {devices[at]}
        np.testing.assert_allclose(y, linear(LINEAR, ROWS[:size]), rtol=1e-6)


def test_output_device_holds_for_one_device_too(devices):
    """Row 24: torch ignores it there."""
    dp = jdp.DataParallel(linear, devices=[2], output_device=devices[5])
    assert dp(LINEAR, ROWS[:5]).devices() == {devices[5]}
    assert dp(jdp.replicate(LINEAR, [2]), ROWS[:5]).devices() == {devices[5]}


def test_sharded_outputs(devices):
    dp = jdp.DataParallel(lambda w, x: (x * w, x.T * w), devices=[1, 2], output_device="sharded", out_axes=(0, 1))
    y, t = dp(WEIGHT, ROWS[:6])
    assert y.sharding.spec == P("data") and t.sharding.spec == P(None, "data")
    assert y.devices() == set(devices[1:3]) and y.addressable_shards[0].data.shape == (3, 3)
    y, t = dp(WEIGHT, ROWS[:5])  # 5 rows do not divide by 2
    assert y.is_fully_replicated and t.is_fully_replicated and y.devices() == set(devices[1:3])
    np.testing.assert_array_equal(y, 3 * ROWS[:5])
    np.testing.assert_array_equal(t, 3 * ROWS[:5].T)


def test_inputs_may_live_anywhere(devices):
    """Row 30."""
    want = linear(LINEAR, ROWS[:10])
    mesh = jax.make_mesh((5,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[3:])
    places = [devices[7], devices[0], jax.NamedSharding(mesh, P("rows")), jax.NamedSharding(mesh, P())]
    dp = jdp.DataParallel(linear, devices=[2, 3, 4])
    for place in places:
        x = jax.device_put(ROWS[:10], place)
        np.testing.assert_allclose(dp(LINEAR, x), want, rtol=1e-6)
        assert not x.is_deleted()
    np.testing.assert_allclose(dp(LINEAR, ROWS.T.copy().T[:10]), want, rtol=1e-6)  # row 31: not contiguous


def test_an_output_is_never_an_input_in_disguise(devices):
    """The caller may donate what came back, and keep what went in."""
    dp = jdp.DataParallel(lambda w, x: x, devices=[0])
    x = jax.device_put(ROWS, devices[0])
    y = dp(WEIGHT, x)
    y.delete()
    np.testing.assert_array_equal(x, ROWS)


def test_new_parameters_are_seen_at_once():
    """Row 33."""
    dp = WRAPPERS[3]
    other = jax.tree.map(lambda w: w + 1, VARIABLES)
    x = ROWS[:5]
    first = dp.apply(VARIABLES, x)
    np.testing.assert_allclose(dp.apply(other, x), MODEL.apply(other, x), rtol=1e-6)
    np.testing.assert_array_equal(dp.apply(VARIABLES, x), first)
    mutable = {"w": LINEAR["w"].copy(), "b": LINEAR["b"]}
    function = jdp.DataParallel(linear, devices=range(2))
    function(mutable, x)
    mutable["w"] *= 2  # in place: a wrapper that remembers arrays by identity would be wrong
    np.testing.assert_allclose(function(mutable, x), linear(mutable, x), rtol=1e-6)


# --- axes ---


def test_dim():
    model = lambda w, x, y: {"out": x * w + y}  # noqa: E731
    x, y = np.arange(30, dtype=np.float32).reshape(3, 10), np.ones((1, 10), np.float32)
    for dim in (1, -1):
        dp = jdp.DataParallel(model, devices=range(4), dim=dim)
        np.testing.assert_array_equal(dp(WEIGHT, x, y)["out"], 3 * x + 1)


def test_in_axes_and_out_axes_mean_what_they_mean_in_vmap():
    """Axes are an argument's: cut along its own, None goes whole, out None is the primary replica's."""

    def model(w, x, table, pair):
        assert table.shape == (2, 2) and x.shape[1] == pair["a"].shape[0] == pair["b"].shape[1]
        return (x * w).T, {"whole": table * x.shape[1], "rows": pair["a"] + pair["b"][0]}

    dp = jdp.DataParallel(
        model, devices=range(4), in_axes=(1, None, {"a": 0, "b": -1}), out_axes=(0, {"whole": None, "rows": 0})
    )
    x = np.arange(20, dtype=np.float32).reshape(2, 10)
    table = np.eye(2, dtype=np.float32)
    pair = {"a": np.arange(10, dtype=np.float32), "b": np.ones((1, 10), np.float32)}
    out, rest = dp(WEIGHT, x, table, pair)
    np.testing.assert_array_equal(out, 3 * x.T)
    np.testing.assert_array_equal(rest["whole"], 3 * table)  # the primary replica has 3 of the 10 rows
    np.testing.assert_array_equal(rest["rows"], pair["a"] + 1)


def test_in_axes_one_int():
    x = np.arange(20, dtype=np.float32).reshape(2, 10)
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(4), in_axes=1, out_axes=1)
    np.testing.assert_array_equal(dp(WEIGHT, x), 3 * x)


def test_in_axes_none_is_dim_and_a_tuple_of_none_cuts_nothing():
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(4), in_axes=None)
    np.testing.assert_array_equal(dp(WEIGHT, ROWS), 3 * ROWS)
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(4), in_axes=(None,))
    np.testing.assert_array_equal(dp(WEIGHT, ROWS), 3 * ROWS)  # nothing to cut: once, not four times


# --- outputs of every shape ---


class Two(NamedTuple):
    logits: Any
    loss: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Box:
    value: Any
    name: str = dataclasses.field(default="box", metadata=dict(static=True))


@pytest.mark.one_case
@pytest.mark.parametrize("n, entries", [(1, 1), (4, 4), (8, 5)])
def test_containers_survive_and_zero_d_outputs_become_a_vector(n, entries):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, batch: Box):
            assert isinstance(batch, Box) and batch.name == "mine"
            y = nn.Dense(2)(batch.value["x"])
            loss = jnp.mean((y - batch.value["y"]) ** 2)
            return {"two": Two(y, loss), "box": Box([y, None], "out"), "tuple": (loss,)}

    net = Net()
    batch = Box({"x": ROWS[:10], "y": ROWS[:10, :2]}, "mine")
    dp = jdp.DataParallel(net, devices=range(n))
    variables = dp.init(jax.random.key(0), batch)
    out = dp.apply(variables, batch)
    want = net.apply(variables, batch)
    assert type(out["two"]) is Two and type(out["box"]) is Box and out["box"].name == "out"
    assert type(out["tuple"]) is tuple and out["box"].value[1] is None
    np.testing.assert_allclose(out["two"].logits, want["two"].logits, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out["box"].value[0], want["two"].logits, rtol=1e-6, atol=1e-6)
    per_row = np.mean((want["two"].logits - batch.value["y"]) ** 2, 1)
    size = -(-10 // n)
    losses = [per_row[i : i + size].mean() for i in range(0, 10, size)]
    assert len(losses) == entries
    np.testing.assert_allclose(out["two"].loss, losses, rtol=1e-5)
    np.testing.assert_allclose(out["tuple"][0], losses, rtol=1e-5)


# --- real models ---


@pytest.mark.full
def test_cnn_with_batch_norm_and_dropout_trains():
    """Three steps of plain SGD through dp.apply equal the same three steps of the plain loop over chunks."""

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Conv(3, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5, use_fast_variance=False)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
            x = nn.Dropout(0.5, deterministic=not train)(x.reshape(len(x), -1))
            return nn.Dense(2)(x)

    net = CNN()
    x = np.random.RandomState(1).randn(5, 4, 4, 1).astype(np.float32)
    labels = np.array([0, 1, 1, 0, 1])
    dp = jdp.DataParallel(net, devices=range(3))  # chunks of 2, 2, 1
    start = dp.init(jax.random.key(0), x, train=False)
    assert set(start) == {"params", "batch_stats"}

    def cross_entropy(logits, labels):
        return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]

    def apply_chunks(variables, x, key):
        outs = [
            net.apply(variables, x[i : i + 2], True, mutable=["batch_stats"], rngs={"dropout": own})
            for i, own in zip((0, 2, 4), (key, jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)), strict=True)
        ]
        return jnp.concatenate([y for y, _ in outs]), outs[0][1]

    def apply_dp(variables, x, key):
        return dp.apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": key})

    def train(apply, variables, steps=3):
        @jax.jit
        def step(variables, key):
            def loss(params):
                logits, state = apply({**variables, "params": params}, x, key)
                return cross_entropy(logits, labels).mean(), state

            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
            return {"params": params, **state}, value

        losses = []
        for i in range(steps):
            variables, value = step(variables, jax.random.key(i))
            losses.append(float(value))
        return variables, losses

    got, losses = train(apply_dp, start)
    want, wanted = train(apply_chunks, jax.tree.map(np.asarray, start))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    close(got, want, rtol=1e-4, atol=1e-5)
    close(dp.apply(got, x, train=False), net.apply(jax.tree.map(np.asarray, got), x, False))


@pytest.mark.full
def test_lstm_with_a_time_axis_first():
    """Row complaint 12: the batch in dim 1, the carry's in dim 0, sequence lengths beside it."""
    rnn = nn.RNN(nn.LSTMCell(4), time_major=True, return_carry=True)
    x = np.random.RandomState(0).randn(3, 5, 2).astype(np.float32)  # (time, batch, features)
    lengths = np.array([3, 1, 2, 3, 2])
    variables = rnn.init(jax.random.key(0), x)
    (c, h), want = rnn.apply(variables, x, seq_lengths=lengths)
    dp = jdp.DataParallel(Lengths(rnn), devices=range(3), in_axes=(1, 0), out_axes=((0, 0), 1))
    variables = {"params": {"rnn": variables["params"]}}
    (dc, dh), got = dp.apply(variables, x, lengths)
    close((dc, dh, got), (c, h, want))
    grads = jax.grad(lambda v: jnp.sum(dp.apply(v, x, lengths)[1] ** 2))(variables)
    want = jax.grad(lambda v: jnp.sum(Lengths(rnn).apply(v, x, lengths)[1] ** 2))(variables)
    close(grads, want)


class Lengths(nn.Module):
    rnn: nn.Module

    def __call__(self, x, lengths):
        return self.rnn(x, seq_lengths=lengths)


@pytest.mark.full
def test_rnn_along_dim_one():
    rnn = nn.RNN(nn.SimpleCell(4), time_major=True)
    x = np.random.RandomState(0).randn(3, 5, 2).astype(np.float32)
    variables = rnn.init(jax.random.key(0), x)
    dp = jdp.DataParallel(rnn, devices=range(3), dim=1)
    close(dp.apply(variables, x), rnn.apply(variables, x))


@pytest.mark.full
def test_tied_weights():
    """Row 79: one table, two uses; its gradient is the sum of both."""

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(7, 4)
            return embed.attend(nn.tanh(embed(tokens)))

    net, tokens = Tied(), np.arange(10).reshape(5, 2) % 7
    variables = net.init(jax.random.key(0), tokens)
    dp = jdp.DataParallel(net, devices=range(3))
    close(dp.apply(variables, tokens), net.apply(variables, tokens))
    got = jax.grad(lambda v: jnp.sum(dp.apply(v, tokens) ** 2))(variables)
    close(got, jax.grad(lambda v: jnp.sum(net.apply(v, tokens) ** 2))(variables))


def test_odd_parameters_survive():
    """Rows 80, 93, 94: None, complex, zero-size, integer and bfloat16 parameters."""
    params = {
        "none": None,
        "complex": np.array([1 + 2j], np.complex64),
        "empty": np.zeros((0, 3), np.float32),
        "int": np.int32(2),
        "bf16": jnp.ones(1, jnp.bfloat16),
    }

    def model(p, x):
        assert p["none"] is None and p["empty"].shape == (0, 3) and p["bf16"].dtype == jnp.bfloat16
        return (x * p["complex"]).imag * p["int"] + p["empty"].sum() + p["bf16"].astype(np.float32)

    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(jdp.DataParallel(model, devices=range(3))(params, x), 4 * x + 1)


# --- randomness ---


def test_replicas_draw_different_masks_and_the_primary_the_models_own():
    key = {"dropout": jax.random.key(3)}
    y = np.asarray(DROP[4].apply({}, ONES, rngs=key))
    chunks = [y[0:3], y[3:6], y[6:9]]
    for i in range(3):
        for j in range(i):
            assert not np.array_equal(chunks[i], chunks[j]), (i, j)
    assert not np.array_equal(y[9], y[0]) and not np.array_equal(y[9], y[3])
    np.testing.assert_array_equal(y[:3], Dropper().apply({}, ONES[:3], rngs=key))
    np.testing.assert_array_equal(y, DROP[4].apply({}, ONES, rngs=key))  # reproducible
    assert not np.array_equal(y, DROP[4].apply({}, ONES, rngs={"dropout": jax.random.key(4)}))
    assert not np.array_equal(y[:3], y[3:6]) and 0.3 < (y == 0).mean() < 0.7


def test_one_device_draws_what_the_bare_model_draws():
    key = {"dropout": jax.random.key(3)}
    np.testing.assert_array_equal(DROP[1].apply({}, ONES, rngs=key), Dropper().apply({}, ONES, rngs=key))
    bare = jax.random.key(3)  # Flax takes one key for all collections too
    np.testing.assert_array_equal(DROP[1].apply({}, ONES, rngs=bare), Dropper().apply({}, ONES, rngs=bare))
    np.testing.assert_array_equal(DROP[4].apply({}, ONES, rngs=bare)[:3], Dropper().apply({}, ONES[:3], rngs=bare))


def test_legacy_keys_are_taken_in_rngs():
    legacy, typed = jax.random.PRNGKey(3), jax.random.key(3)
    y = DROP[4].apply({}, ONES, rngs={"dropout": legacy})
    np.testing.assert_array_equal(y, DROP[4].apply({}, ONES, rngs={"dropout": typed}))


@pytest.mark.full
def test_keys_among_the_arguments():
    """A 0-d key is folded with the replica's index but on the primary; a (B,) array of keys is cut."""

    def model(_, x, key, keys, *, kwkey):
        assert keys.shape == (len(x),)
        own = jax.random.bits(key, (len(x), 2))
        kw = jax.random.bits(kwkey, (len(x), 2))
        return own, jax.vmap(lambda k: jax.random.bits(k, (2,)))(keys), kw

    x, key, keys = np.zeros(10), jax.random.key(1), jax.random.split(jax.random.key(2), 10)
    dp = jdp.DataParallel(model, devices=range(4))
    own, rows, kw = dp(None, x, key, keys, kwkey=key)
    np.testing.assert_array_equal(rows, model(None, x, key, keys, kwkey=key)[1])
    np.testing.assert_array_equal(own[:3], jax.random.bits(key, (3, 2)))
    np.testing.assert_array_equal(own, kw)
    assert not np.array_equal(own[3:6], own[:3]) and not np.array_equal(own[3:6], own[6:9])
    one = jdp.DataParallel(model, devices=[0])(None, x, key, keys, kwkey=key)
    np.testing.assert_array_equal(one[0], jax.random.bits(key, (10, 2)))


# --- four steps that a subclass may replace ---


def test_the_four_steps_are_called_in_torchs_order_and_their_results_are_used():
    class Traced(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            steps.append("scatter")
            assert type(inputs) is tuple and list(devices) == list(self.devices)
            doubled = tuple(2 * x for x in inputs)
            return jdp.scatter(doubled, devices, self.dim), jdp.scatter(kwargs, devices, self.dim)

        def replicate(self, tree, devices):
            steps.append("replicate")
            return super().replicate(jax.tree.map(lambda w: 10 * w, tree), devices)

        def parallel_apply(self, replicas, inputs, kwargs):
            steps.append("parallel_apply")
            assert isinstance(inputs, jdp.Scattered) and inputs.sizes == (3, 3, 1)
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            steps.append("gather")
            assert isinstance(outputs, jdp.Scattered)
            return super().gather(outputs, output_device) + 1

    steps = []
    dp = Traced(lambda w, x: x * w, devices=range(3))
    x = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(dp(WEIGHT, x), 60 * x + 1)
    assert steps == ["scatter", "replicate", "parallel_apply", "gather"]
    assert float(jax.grad(lambda w: dp(w, x).sum())(WEIGHT)) == 20 * x.sum()


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("step", ["scatter", "replicate", "parallel_apply", "gather"])
def test_one_step_replaced_in_a_linen_wrapper_with_state(step):
    calls = []

    def spy(self, *args):
        calls.append(len(args))
        return getattr(jdp.DataParallel, step)(self, *args)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, shift):
            return nn.BatchNorm(use_running_average=False)(x) + shift

    net = Net()
    dp = type("Spied", (jdp.DataParallel,), {step: spy})(net, devices=range(3))
    plain = jdp.DataParallel(net, devices=range(3))
    shift = np.ones((7, 1), np.float32)
    variables = plain.init(jax.random.key(0), ROWS[:7], shift=shift)
    got = dp.apply(variables, ROWS[:7], mutable=["batch_stats"], shift=shift)
    close(got, plain.apply(variables, ROWS[:7], mutable=["batch_stats"], shift=shift))
    assert calls and set(calls) == {{"scatter": 3, "replicate": 2, "parallel_apply": 3, "gather": 2}[step]}


def test_the_four_steps_by_hand_are_the_wrapper():
    dp = jdp.DataParallel(linear, devices=range(3))
    inputs, kwargs = dp.scatter((ROWS[:10],), {}, dp.devices)
    assert isinstance(inputs, jdp.Scattered) and inputs.sizes == (4, 4, 2)
    outputs = dp.parallel_apply(dp.replicate(LINEAR, dp.devices), inputs, kwargs)
    np.testing.assert_allclose(outputs[2], linear(LINEAR, ROWS[8:10]), rtol=1e-6)
    y = dp.gather(outputs, dp.devices[1])
    assert y.devices() == {dp.devices[1]}
    np.testing.assert_array_equal(y, dp(LINEAR, ROWS[:10]))


# --- compilation, memory, order ---


def test_the_model_is_called_once_per_shape():
    calls = []

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            calls.append(x.shape)
            return nn.Dense(5)(x)  # of a square output it would look where the rows are, in one more call

    dp = jdp.DataParallel(Counting(), devices=range(4))
    variables = dp.init(jax.random.key(0), ROWS[:4])
    calls.clear()
    for size in (8, 4, 8, 4):
        for _ in range(3):
            dp.apply(variables, ROWS[:size])
            dp(variables, jnp.asarray(ROWS[:size]))
    assert calls == [(2, 3), (1, 3)]
    dp.apply(variables, ROWS[:8], train=True)  # another constant, another program
    dp.apply(variables, ROWS[:8], train=True)
    assert calls == [(2, 3), (1, 3), (2, 3)]
    before = len(calls)
    grad = jax.jit(jax.grad(lambda v, x: dp.apply(v, x).sum()))
    for _ in range(3):
        variables = jax.tree.map(lambda v, g: v - g, variables, grad(variables, ROWS[:8]))
    assert len(calls) - before <= 1
    before = len(calls)
    for _ in range(3):
        jax.grad(lambda v: dp.apply(v, ROWS[:8]).sum())(variables)  # a new function each time, the same program
    assert len(calls) - before <= 1
    before = len(calls)
    for seed in range(3):
        dp.apply(variables, ROWS[:8], rngs={"dropout": jax.random.key(seed)})
    assert len(calls) - before <= 1


def test_functional_form_compiles_once_for_a_function():
    calls = []

    def model(w, x):
        calls.append(1)
        return x * w

    for _ in range(4):
        jdp.data_parallel(model, WEIGHT, ROWS[:8], devices=range(4))
    assert len(calls) == 1
    bound = WRAPPERS[1].module.apply
    first = jdp.data_parallel(bound, VARIABLES, ROWS[:4], devices=range(2))
    close(first, MODEL.apply(VARIABLES, ROWS[:4]))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_wrapper_is_freed():
    class Holder:
        def __init__(self):
            self.big = np.zeros(10)

        def __call__(self, params, x):
            return params * x + self.big[0]

    def use(module, *args):
        dp = jdp.DataParallel(module, devices=range(3))
        x = np.ones(5, np.float32)
        dp(*args, x)
        jax.grad(lambda w: dp(w, x).sum())(*args)
        return weakref.ref(dp), weakref.ref(module)

    refs = use(Holder(), WEIGHT)
    gc.collect()
    assert [r() for r in refs] == [None, None]

    def use_linen():
        dp = jdp.DataParallel(MLP(), devices=range(3))
        dp.apply(dp.init(jax.random.key(0), ROWS), ROWS)
        return weakref.ref(dp), weakref.ref(dp.module)

    refs = use_linen()
    gc.collect()
    assert [r() for r in refs] == [None, None]


@pytest.mark.full
def test_parameters_are_not_kept():
    dp = WRAPPERS[3]
    variables = dp.init(jax.random.key(1), ROWS)
    dp.apply(variables, ROWS)
    dp.apply(jax.tree.map(jnp.asarray, VARIABLES), ROWS)
    refs = [weakref.ref(leaf) for leaf in jax.tree.leaves(variables)]
    del variables
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


@pytest.mark.full
def test_an_eager_loop_without_waiting_ends():
    """DESIGN's fact 5: XLA on the CPU deadlocks once some 32 steps with collectives are in flight."""
    dp = jdp.DataParallel(lambda w, x: jnp.tanh(x * w) + lax.psum(x.sum(), "data"), devices=range(8))
    uneven = jdp.DataParallel(lambda w, x: jnp.tanh(x * w), devices=range(8))
    w = jdp.replicate(WEIGHT, range(8))
    x, y = np.ones((8, 2), np.float32), np.ones((10, 2), np.float32)
    out, grad = [], jax.grad(lambda w: uneven(w, y).sum())
    for _ in range(300):
        out = [dp(w, x), uneven(w, y)]
    for _ in range(60):
        w = w - 0.001 * grad(w)
    assert np.isfinite(out[0]).all() and np.isfinite(float(w)) and out[1].shape == (10, 2)


def test_threads_may_share_a_wrapper():
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(4))
    errors = []

    def work(i):
        try:
            for size in (8, 5, 8):
                np.testing.assert_array_equal(dp(np.float32(i), ROWS[:size]), np.float32(i) * ROWS[:size])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# --- wrappers within wrappers, and within other replica contexts ---


def test_nested_wrappers_run_once():
    sizes = []

    def model(w, x):
        sizes.append(x.shape)
        return x * w + lax.axis_index("data") * 0

    inner = jdp.DataParallel(model, devices=range(4))
    outer = jdp.DataParallel(inner, devices=range(4))
    x = ROWS[:8]
    np.testing.assert_allclose(outer(WEIGHT, x), 3 * x, rtol=1e-6)
    assert sizes == [(2, 3)]
    np.testing.assert_allclose(outer(WEIGHT, ROWS[:7]), 3 * ROWS[:7], rtol=1e-6)
    assert float(jax.grad(lambda w: outer(w, x[:, 0]).sum())(WEIGHT)) == pytest.approx(x[:, 0].sum(), rel=1e-5)


def test_nested_linen_wrappers_run_once():
    outer = jdp.DataParallel(WRAPPERS[2], devices=range(3))
    x = ROWS[:10]
    variables = outer.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables, VARIABLES)
    close(outer.apply(variables, x), MODEL.apply(VARIABLES, x))
    close(outer(variables, x), MODEL.apply(VARIABLES, x))


def test_a_wrapper_called_inside_a_model_runs_its_module_directly():
    sizes = []

    def part(w, x):
        sizes.append(len(x))
        return x * w

    inner = jdp.DataParallel(part, devices=range(2))
    outer = jdp.DataParallel(lambda w, x: inner(w, x) + 1, devices=range(4))
    np.testing.assert_allclose(outer(WEIGHT, ROWS[:8]), 3 * ROWS[:8] + 1, rtol=1e-6)
    assert sizes == [2]


def test_inside_pmap_and_shard_map_the_module_runs_directly(devices):
    sizes = []

    def model(w, x):
        sizes.append(len(x))
        return x * w

    dp = jdp.DataParallel(model, devices=range(4))
    x = ROWS[:8]
    got = jax.pmap(lambda x: dp(WEIGHT, x), devices=devices[:2])(x.reshape(2, 4, 3))
    np.testing.assert_allclose(got.reshape(8, 3), 3 * x, rtol=1e-6)
    assert sizes == [4]
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:2])
    shard_map = jax.shard_map(lambda x: dp(WEIGHT, x), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    np.testing.assert_allclose(shard_map(x), 3 * x, rtol=1e-6)
    assert sizes == [4, 4]


# --- collectives of the model's own ---


def test_the_axis_is_live_under_its_name(devices):
    for name in ("data", "replicas"):
        dp = jdp.DataParallel(
            lambda w, x, name=name: x - lax.pmean(x, name) + lax.axis_index(name) * w, devices=range(4), axis_name=name
        )
        x = np.arange(8, dtype=np.float32)
        want = x - np.tile(x.reshape(4, 2).mean(0), 4) + 3 * np.repeat(np.arange(4), 2)
        np.testing.assert_allclose(dp(WEIGHT, x), want, rtol=1e-6)


# --- exceptions of the model ---


class OddError(Exception):
    """It cannot be made from one string: a handler that rebuilds it fails."""

    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code = code


def everything_said(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("error", [KeyError("boom"), OddError(3, where="here"), StopIteration("boom"), ValueError()])
def test_an_exception_keeps_its_type_and_text_and_says_where_it_came_from(devices, error):
    def model(w, x):
        if x.shape[0] == 2:
            raise error
        return x * w

    dp = jdp.DataParallel(model, devices=[1, 2, 3])
    text = str(error)
    with pytest.raises(type(error)) as info:
        dp(WEIGHT, ROWS[:6])
    said = everything_said(info.value)
    assert type(info.value) is type(error) and text in str(info.value)
    assert f"Caught {type(error).__name__} in replica 0 on device" in said
    assert str(devices[1]) in said or "cpu:1" in said
    np.testing.assert_allclose(dp(WEIGHT, ROWS[:9]), 3 * ROWS[:9], rtol=1e-6)  # and works afterwards


class TextFails(Exception):
    def __str__(self):
        raise ZeroDivisionError("of its text")


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("way", ["call", "value_and_grad", "step", "prefetch"])
def test_an_error_whose_text_fails_keeps_its_type(way, rows):
    def model(w, x):
        raise TextFails

    def loader():
        yield ROWS[:rows]
        raise TextFails

    dp = jdp.DataParallel(model, range(4))
    step = dp.train_step(model, optax.sgd(0.1))
    call = {
        "call": lambda: dp(WEIGHT, ROWS[:rows]),
        "value_and_grad": lambda: dp.value_and_grad(model)(WEIGHT, ROWS[:rows]),
        "step": lambda: step(step.init({"params": WEIGHT}), ROWS[:rows]),
        "prefetch": lambda: list(dp.prefetch(loader())),
    }
    with pytest.raises(TextFails):
        call[way]()


def test_the_failing_chunk_names_its_replica(devices):
    def model(w, x):
        if x.shape[0] == 1:
            raise KeyError("lonely")
        return x * w

    dp = jdp.DataParallel(model, devices=range(4))
    with pytest.raises(KeyError, match="lonely") as info:
        dp(WEIGHT, ROWS[:10])
    said = everything_said(info.value)
    assert "Caught KeyError in replica 3 on device" in said
    assert str(devices[3]) in said or "cpu:3" in said
    with pytest.raises(KeyError, match="lonely") as info:  # and again: a failure is not remembered as a success
        dp(WEIGHT, ROWS[:10])
    assert "replica 3" in everything_said(info.value)
    np.testing.assert_allclose(dp(WEIGHT, ROWS[:9]), 3 * ROWS[:9], rtol=1e-6)


def test_an_exception_under_jit_and_grad_says_so_too():
    def model(w, x):
        raise KeyError("boom")

    dp = jdp.DataParallel(model, devices=range(2))
    for call in (jax.jit(lambda w: dp(w, ROWS)), jax.grad(lambda w: dp(w, ROWS).sum())):
        with pytest.raises(KeyError, match="boom") as info:
            call(WEIGHT)
        assert "Caught KeyError in replica 0 on device" in everything_said(info.value)


def test_linen_and_functional_exceptions_say_so_too():
    class Raising(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise OddError(5, where="layer")

    for call in (
        lambda: jdp.DataParallel(Raising(), devices=range(2)).apply({}, ROWS),
        lambda: jdp.data_parallel(Raising().apply, {}, ROWS, devices=range(2)),
    ):
        with pytest.raises(OddError, match="code 5 at layer") as info:
            call()
        assert info.value.code == 5
        assert "Caught OddError in replica 0 on device" in everything_said(info.value)


@pytest.mark.parametrize("pieces", [[(0, 3), (3, 7), (7, 8), (8, 10)], [(0, 5), (5, 10)]])
def test_a_scatter_as_in_torch_may_return_lists(pieces):
    """Row 35: a subclass cuts batches of its own, one tuple of arguments for each device."""

    class Mine(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            (rows,) = inputs
            return [(rows[a:b], "twice") for a, b in pieces], [{} for _ in pieces]

    sizes = []

    def model(w, x, how):
        sizes.append(x.shape)
        return x * w * (2 if how == "twice" else 1)

    x = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(Mine(model, range(4))(np.float32(3), x), 6 * x)
    assert {b - a for a, b in pieces} == {shape[0] for shape in sizes}


def test_an_nnx_module_has_no_params_to_pass(refused):
    model, x = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), np.ones((4, 3), np.float32)
    for apply_fn in (model, jdp.DataParallel(model, devices=range(2))):
        for batch in (x, None, [0, 1]):
            with refused(TypeError, "data_parallel", r"an NNX module, .*Call jdp\.DataParallel\(model, devices\)"):
                jdp.data_parallel(apply_fn, x, batch)


def test_a_keyword_argument_that_cannot_be_cut_goes_by_position(refused):
    dp = jdp.DataParallel(lambda p, x, mask=None: x * p * mask, devices=range(2), in_axes=(0, None))
    x, mask = np.ones((10, 8), np.float32), np.ones((1, 8), np.float32)
    with refused(ValueError, "DataParallel", r"in_axes holds for positional arguments alone\. Pass .* by position"):
        jdp.DataParallel(dp.module, devices=range(2))(np.float32(2), x, mask=mask)
    np.testing.assert_array_equal(dp(np.float32(2), x, mask), 2 * x)


def test_lists_of_a_scatter_that_do_not_fit_are_refused():
    class Mine(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return inputs[0], None

    dp = Mine(lambda w, *xs: xs[0] * w, range(2))
    with pytest.raises(TypeError, match="came out of scatter as a ndarray; there are 2 devices"):
        dp(np.float32(1), np.ones(4, np.float32))
    with pytest.raises(ValueError, match=r"inputs have chunks \(2, 1\) and \(2, 2\)"):
        dp(np.float32(1), [(np.ones(2), np.ones(2)), (np.ones(2), np.ones(1))])
    along_columns = Mine(lambda w, x: x * w, range(2), dim=1)
    with pytest.raises(IndexError, match=r"jdp.DataParallel: an array of inputs is of rank 1 .* dim is 1"):
        along_columns(np.float32(1), [(np.ones(3),), (np.ones(3),)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.dtype("float16")])
def test_a_dtype_is_an_argument_like_any_object(dtype):
    dp = jdp.DataParallel(lambda w, x, dtype: x.astype(dtype), range(2))
    assert dp(np.float32(1), NUMBERS, dtype).dtype == dtype


def test_boxed_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    model = nn.Dense(3, kernel_init=init)
    variables = model.init(jax.random.key(0), NUMBERS)
    dp = jdp.DataParallel(model, range(4))
    np.testing.assert_allclose(dp.apply(variables, NUMBERS), model.apply(variables, NUMBERS), rtol=1e-5, atol=1e-6)


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


def everywhere(dp, rows, folder):
    """What the doors give for so many rows."""
    w, x = np.full(3, 2, np.float32), np.arange(3.0 * rows, dtype=np.float32).reshape(rows, 3)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    of_model = jdp.DataParallel(model, dp.devices)
    step = dp.train_step(lambda v, x: jnp.mean(dp(v["params"], x)), optax.adam(0.1))
    state, metrics = step(state := step.init({"params": w}), x)
    dp.check_replicas(state)
    with jdp.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        saved = checkpointer.restore(state)[0]
    return [
        [dp.apply(w, x), jdp.data_parallel(dp.module, w, x, dp.devices), of_model(x)],
        [dp.apply(w, b) for b in dp.prefetch([x, x])],
        [metrics, state.params, saved.params, bool(step.check(state, x))],
        of_model.train_step(lambda model, x: jnp.mean(model(x)), optax.adam(0.1))(x),
        dp.value_and_grad(lambda w, x: jnp.mean(x * w))(w, x),
        dp.value_and_grad(lambda w, x: x * w, criterion=lambda out, x: jnp.sqrt(jnp.mean(out)))(w, x),
        jdp.gather(jdp.parallel_apply(dp.module, w, jdp.scatter((x,), dp.devices))),
        jdp.reduce_add(jdp.scatter(x[: rows // 4 * 4], dp.devices)),
    ]


@pytest.mark.full
@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize(
    "shape, names, kind", [((4,), "data", AUTO), ((4,), "data", EXPLICIT), ((2, 2), ("data", "model"), AUTO)]
)
def test_the_mesh_around_a_call_changes_nothing(rows, shape, names, kind, tmp_path):
    dp = jdp.DataParallel(lambda w, x: x * w, range(4))
    mesh = jax.make_mesh(shape, tuple(np.atleast_1d(names)), (kind,) * len(shape), devices=jax.devices()[:4])
    want = everywhere(dp, rows, tmp_path / "outside")
    with jax.set_mesh(mesh):
        found = everywhere(jdp.DataParallel(lambda w, x: x * w, range(4)), rows, tmp_path / "inside")
        again = everywhere(dp, rows, tmp_path / "known")
    jax.tree.map(np.testing.assert_array_equal, found, want)
    jax.tree.map(np.testing.assert_array_equal, again, want)


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_over_an_explicit_axis_of_another_name(n):
    """`jax.make_mesh` makes such axes, which are part of the type of what jit traces."""
    mesh = jax.make_mesh((n,), ("batch",), devices=jax.devices()[:n])
    x = jax.device_put(np.arange(24.0, dtype=np.float32).reshape(8, 3), jax.NamedSharding(mesh, P("batch")))
    w, plain = np.full(3, 2, np.float32), np.asarray(x)
    dp = jdp.DataParallel(lambda w, x: jnp.sin(x * w), range(n))
    loss = lambda w, x: jnp.sin(x * w).mean()  # noqa: E731
    step = dp.train_step(lambda v, x: loss(v["params"], x), optax.sgd(0.1))
    np.testing.assert_allclose(dp(w, x), np.sin(plain * w), rtol=1e-5)
    np.testing.assert_allclose(dp.value_and_grad(loss)(w, x)[1], jax.grad(loss)(w, plain), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: dp(w, x).sum())(x), np.cos(plain * w) * w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(step(step.init({"params": w}), x)[1]["loss"], loss(w, plain), rtol=1e-5)
    np.testing.assert_allclose(dp.evaluate(lambda w, x: {"l": loss(w, x)}, w, [x])["l"], loss(w, plain), rtol=1e-5)
    with pytest.raises(ValueError, match=r"traced .* a batch over the Explicit axis 'batch', float32.*NamedSharding"):
        jax.jit(dp)(w, x)
    at_home = jax.device_put(plain, jax.NamedSharding(dp.mesh, P("data")))
    np.testing.assert_allclose(jax.jit(dp)(w, at_home), np.sin(plain * w), rtol=1e-5)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradients_of_a_batch_over_an_explicit_axis_under_jit(n):
    """The axis is part of the type of what jit traces, and of its cotangent; the replicas' program knows Auto axes."""
    mesh = jax.make_mesh((n,), ("data",), (EXPLICIT,), devices=jax.devices()[:n])
    plain, w = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3), np.array([1, 2, 3], np.float32)
    x = jax.device_put(plain, jax.NamedSharding(mesh, P("data")))
    numbers = np.arange(8)[:, None]
    i = jax.device_put(numbers, jax.NamedSharding(mesh, P("data")))
    model = jdp.DataParallel(lambda w, b: jnp.sin(b["x"] * w) * (b["i"] % 3), range(n))
    dp, one = lambda w, x: model(w, {"x": x, "i": i}), lambda w, x: model.module(w, {"x": x, "i": numbers})

    def square(apply):
        return lambda w, x: jnp.sum(apply(w, x) ** 2)

    def penalty(apply):
        return lambda x: jnp.sum(jax.grad(square(apply), argnums=1)(w, x) ** 2)

    def scaled(apply):
        return lambda x: jax.vmap(lambda s: square(apply)(w, x * s))(jnp.arange(3.0))

    def pushed(apply):
        return lambda x: jax.jvp(lambda x: apply(w, x), (x,), (x,))

    found = jax.jit(jax.grad(square(dp), argnums=(0, 1)))(w, x)
    jax.tree.map(close, found, jax.grad(square(one), argnums=(0, 1))(w, plain))
    assert n == 1 or found[1].sharding.is_equivalent_to(x.sharding, 2)
    close(jax.jit(jax.grad(penalty(dp)))(x), jax.grad(penalty(one))(plain))
    close(jax.jit(scaled(dp))(x), scaled(one)(plain))
    close(jax.jit(pushed(dp))(x), pushed(one)(plain))


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_weak_type_stays(n):
    """What `jnp.where(mask, 1.0, 0.0)` gives takes the dtype of what it meets, however many rows there are."""
    x, w = jnp.full((10, 4), 2.0), jnp.ones((), jnp.bfloat16)
    assert x.weak_type and (x * w).dtype == jnp.bfloat16
    dp, loss = jdp.DataParallel(lambda w, x: x * w, range(n)), lambda w, x: (x * w).mean()
    step = dp.train_step(lambda v, x: loss(v["params"], x), optax.sgd(0.1))
    (batch,) = dp.prefetch([x])
    found = [dp(w, x), dp(w, batch), jax.jit(dp)(w, x), jdp.data_parallel(dp.module, w, x, range(n))]
    found += [dp.value_and_grad(loss)(w, x)[0], step(step.init({"params": w}), x)[1]["loss"]]
    assert [x.dtype for x in found] == [jnp.bfloat16] * 6
    assert jdp.gather(jdp.scatter(x, range(n))).weak_type


def test_another_mesh_around_a_program_is_an_error_that_says_so():
    dp = jdp.DataParallel(lambda w, x: x * w, range(4))
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AUTO,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"inside jax\.set_mesh of .*outside"):
        jax.grad(lambda w: dp(w, NUMBERS).sum())(np.float32(1))


def test_the_public_scatter_in_a_subclass_with_its_own_axis_name():
    class Mine(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return jdp.scatter(inputs, devices, chunk_sizes=(4, 2, 3, 1)), jdp.scatter(kwargs, devices)

    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    want = np.asarray(model(NUMBERS))
    np.testing.assert_allclose(Mine(model, range(4), axis_name="batch")(NUMBERS), want, rtol=1e-5, atol=1e-6)


def test_a_subclass_may_use_fewer_devices():
    class Mine(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return super().scatter(inputs, kwargs, devices[:2])

        def replicate(self, tree, devices):
            return super().replicate(tree, devices[:2])

    np.testing.assert_array_equal(Mine(lambda w, x: x * w, range(4))(np.float32(2), NUMBERS), 2 * NUMBERS)


def test_a_callable_without_weak_references():
    @dataclasses.dataclass(slots=True)
    class Scale:
        by: float

        def __call__(self, w, x):
            return x * w * self.by

    dp = jdp.DataParallel(Scale(3.0), range(2))
    np.testing.assert_array_equal(dp(np.float32(2), NUMBERS), 6 * NUMBERS)
    np.testing.assert_array_equal(jdp.data_parallel(Scale(3.0), np.float32(2), NUMBERS, range(2)), 6 * NUMBERS)


def test_keywords_named_like_our_own():
    class Model(nnx.Module):
        def __call__(self, replicas):
            return replicas * 2

    np.testing.assert_array_equal(jdp.DataParallel(Model(), range(2))(replicas=NUMBERS), 2 * NUMBERS)
    dp = jdp.DataParallel(lambda w, params: params * w, range(2), out_axes=0)
    np.testing.assert_array_equal(dp(np.float32(2), params=NUMBERS), 2 * NUMBERS)


def test_a_wrong_input_is_not_taken_for_stacked_parameters():
    dp = jdp.DataParallel(nn.Dense(4, use_bias=False), range(4))
    variables = dp.init(jax.random.key(0), np.ones((8, 4), np.float32))
    with pytest.raises(Exception, match="generate shape") as info:
        dp.apply(variables, np.ones((8, 5), np.float32))
    assert type(info.value).__name__ == "ScopeParamShapeError"


@pytest.mark.parametrize(
    "arguments",
    [{"axis_name": 3}, *({"state_axes": axes} for axes in ("cache", {"cache": "a"}, {"cache": True}, 1))],
)
def test_arguments_are_checked_at_construction(arguments):
    with pytest.raises(TypeError, match=rf"jdp\.DataParallel: {next(iter(arguments))} is .*must"):
        jdp.DataParallel(nn.Dense(2), range(2), **arguments)


def test_axes_that_do_not_fit_name_what_they_do_not_fit():
    dp = jdp.DataParallel(lambda w, x: x, range(2), out_axes=(0, None))
    with pytest.raises(ValueError, match=r"out_axes does not fit the outputs, whose tree is .*prefix"):
        dp(np.float32(1), NUMBERS)
    dp = jdp.DataParallel(lambda w, x: x, range(2), in_axes=({"z": 0},))
    with pytest.raises(ValueError, match=r"in_axes does not fit the arguments, whose tree is .*prefix"):
        dp(np.float32(1), NUMBERS)


def test_a_sparse_output_is_refused_also_with_out_axes():
    sparse = importlib.import_module("jax.experimental.sparse")
    dp = jdp.DataParallel(lambda w, x: sparse.BCOO.fromdense(x, nse=2), range(2), out_axes=0)
    with pytest.raises(TypeError, match=r"output is a BCOO; .*Return x\.todense\(\)"):
        dp(np.float32(1), np.ones((2, 2), np.float32))


def test_a_dict_whose_keys_do_not_compare_is_refused_at_every_door(refused):
    dp = jdp.DataParallel(lambda w, x: w, devices=range(2))
    batch = {1: np.ones(4, np.float32), "a": np.ones(4, np.float32)}
    step = dp.train_step(lambda v, x: v["params"].sum(), optax.sgd(0.1))
    with refused(ValueError, "DataParallel", "keys of several types .*Pass keys of one type"):
        dp(1.0, batch)
    with refused(ValueError, "train_step", "keys of several types .*Pass keys of one type"):
        step(step.init({"params": np.ones(2, np.float32)}), batch)
    with refused(ValueError, "DataParallel", "the params has keys of several types .*Pass keys of one type"):
        jdp.DataParallel(nn.Dense(2), devices=range(2)).apply({"params": batch}, np.ones((4, 3), np.float32))
    with refused(ValueError, "check_replicas", "a dict among the tree has keys of several types"):
        dp.check_replicas(batch)


class Turned(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 5, rngs=rngs)

    def __call__(self, x):
        return self.layer(x).T


TURNED = {
    "turned": lambda w, x: (x @ w).T,
    "of rank 3": lambda w, x: (x @ w).T[:, :, None],
    "time first": lambda w, x: jax.lax.scan(lambda c, y: (c, y * w[0, 0]), 0.0, x.T)[1],
    "one of two": lambda w, x: {"y": x @ w, "turned": (x @ w).T},
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("rows", [16, 14, 20])  # of 20 each replica has 5, as many as there are columns
def test_rows_along_another_axis_than_outputs_are_joined_along(name, rows):
    """torch puts them out of order; jdp names out_axes."""
    w, x = np.ones((3, 5), np.float32), np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    dp = jdp.DataParallel(TURNED[name], range(4))
    match = r"which are along axis 1; the replicas' outputs are joined along axis 0\. Pass out_axes=1"
    with pytest.raises(ValueError, match=match):
        dp(w, x)
    axes = {"y": 0, "turned": 1} if name == "one of two" else 1
    found = jdp.DataParallel(TURNED[name], range(4), out_axes=axes)(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, TURNED[name](w, x))


def test_rows_along_another_axis_if_the_primary_is_idle():
    x = jdp.scatter(np.ones((12, 2), np.float32), range(4), chunk_sizes=(0, 4, 4, 4))
    with pytest.raises(ValueError, match="which are along axis 1"):
        jdp.DataParallel(lambda w, x: (x * w).T, range(4))(np.float32(1), x)


JOINED = {
    "concatenated": lambda w, x: jnp.concatenate([x @ w, 2 * x @ w]),
    "flattened after that": lambda w, x: jnp.concatenate([x @ w, x @ w])[:, None].reshape(-1, w.shape[1]),
    "tiled": lambda w, x: {"y": jnp.tile(x @ w, (2, 1))},
}
SEVERAL_OF_EACH = {
    "repeated": lambda w, x: jnp.repeat(x @ w, 2, 0),
    "side by side": lambda w, x: jnp.stack([x @ w, -x @ w], 1).reshape(-1, w.shape[1]),
    "flat": lambda w, x: (x @ w).reshape(-1),
}


@pytest.mark.full
@pytest.mark.parametrize("rows", [16, 13])
def test_the_rows_of_several_arrays_one_after_the_other(rows):
    """torch gathers those of the first replica, then those of the second; jdp refuses what would be out of order."""
    w, x = np.ones((3, 5), np.float32), np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    for model in JOINED.values():
        with pytest.raises(
            ValueError, match=r"has those of several arrays, one after the other.* Return a tuple of the"
        ):
            jdp.DataParallel(model, range(4))(w, x)
    for model in SEVERAL_OF_EACH.values():
        np.testing.assert_allclose(jdp.DataParallel(model, range(4))(w, x), model(w, x), rtol=1e-5)


@pytest.mark.full
def test_rows_of_modules_along_another_axis():
    x = np.ones((16, 3), np.float32)
    with pytest.raises(ValueError, match="which are along axis 1"):
        jdp.DataParallel(Turned(nnx.Rngs(0)), range(4))(x)

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x.T)  # of which nothing is refused: no out_axes would name it
            return nn.Dense(5)(x)

    sown = Linen()
    variables = sown.init(jax.random.key(0), x)
    y, state = jdp.DataParallel(sown, range(4)).apply({"params": variables["params"]}, x, mutable=["intermediates"])
    assert y.shape == (16, 5) and state["intermediates"]["h"][0].shape == (12, 4)


def test_what_only_looks_like_rows_is_joined():
    """A weight for each replica, twice as many rows, products of rows with each other: torch's rule."""
    w, x = np.ones((4, 4), np.float32), np.ones((16, 4), np.float32)
    dp = jdp.DataParallel(lambda w, x: (w, jnp.repeat(x, 2, 0), x @ x.T), range(4))
    assert [y.shape for y in dp(w, x)] == [(16, 4), (32, 4), (16, 4)]


@pytest.mark.budget(10)
@pytest.mark.parametrize("rows", [8, 10, 3])
def test_a_batch_on_a_device_is_never_moved_without_a_word(rows):
    """Under `jax.transfer_guard("disallow")`: also one that is padded. numpy arrays JAX itself refuses there."""
    x, w = jnp.ones((rows, 3)), jnp.ones(3)
    dp = jdp.DataParallel(lambda w, x: x @ w, devices=range(4))
    step = dp.train_step(lambda v, x: (x @ v["params"]).mean(), optax.sgd(0.1))
    whole = dp.train_step(lambda v, x: x @ v["params"], optax.sgd(0.1), criterion=lambda out, x: (out**2).mean())
    states = step.init({"params": w}), whole.init({"params": w})
    jax.block_until_ready(states)
    with jax.transfer_guard("disallow"):
        close(dp(w, x), np.full(rows, 3))
        dp.value_and_grad(lambda w, x: (x @ w).mean())(w, x)
        for run, state in zip((step, whole), states, strict=True):
            run(run(state, x)[0], x)
        jdp.gather(jdp.parallel_apply(lambda w, x: x @ w, w, jdp.scatter((x,), range(4))))
        assert len([*dp.prefetch([x, x])]) == 2


class GraphsTuple(NamedTuple):
    """As jraph's."""

    nodes: Any
    edges: Any
    receivers: Any
    senders: Any
    globals: Any
    n_node: Any
    n_edge: Any


def test_one_graph_is_not_cut_like_rows(monkeypatch):
    """Edges name nodes by number. A stack of graphs is cut, and one that goes whole to each replica is not."""
    monkeypatch.setitem(sys.modules, "jraph", types.SimpleNamespace(GraphsTuple=GraphsTuple))

    def model(w, graph):
        return jax.ops.segment_sum(graph.nodes[graph.senders] * w, graph.receivers, len(graph.nodes))

    numbers = np.array([1, 2, 3, 0, 0, 1, 2, 3])
    one = GraphsTuple(np.ones((8, 2), np.float32), None, numbers, numbers[::-1], None, np.full(8, 1), np.full(8, 1))
    dp = jdp.DataParallel(model, range(4))
    with pytest.raises(TypeError, match=r"args\[0\] is one jraph\.GraphsTuple, .*jax\.vmap the model over it"):
        dp(np.float32(2), one)
    with pytest.raises(TypeError, match=r"batch\['graph'\] is one jraph\.GraphsTuple"):
        next(iter(dp.prefetch([{"graph": one}])))
    graphs = jax.tree.map(lambda x: np.stack([x * (i + 1) % 7 for i in range(6)]), one)
    close(
        jdp.DataParallel(jax.vmap(model, (None, 0)), range(4))(np.float32(2), graphs),
        jax.vmap(model, (None, 0))(2, graphs),
    )
    x = np.ones((8, 2), np.float32)
    beside = jdp.DataParallel(lambda w, x, graph: x + model(w, graph).sum(0), range(4), in_axes=(0, None))
    close(beside(np.float32(2), x, one), x + model(2, one).sum(0))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_an_output_of_a_batch_without_rows_that_has_other_axes(n):
    dp = jdp.DataParallel(lambda w, x: x.T @ x * w, devices=range(n), out_axes=0)
    assert dp(np.float32(1), np.zeros((0, 3), np.float32)).shape[-1] == 3


def test_the_gather_of_the_wrapper_takes_each_form_of_a_device():
    dp = jdp.DataParallel(lambda w, x: x * w, devices=range(2))
    outputs = dp.parallel_apply(dp.replicate(2.0, dp.devices), *dp.scatter((np.arange(4.0),), {}, dp.devices))
    for device in ("cpu:1", 1, -1, "cpu", jax.devices()[1], None, "sharded"):
        assert dp.gather(outputs, device).tolist() == [0, 2, 4, 6]
    assert dp.gather(outputs, 1).devices() == {jax.devices()[1]}


@pytest.mark.full
def test_programs_go_with_their_wrapper_though_the_function_lives_on():
    from jdp._core.programs import _made

    def loss_fn(w, x):
        return (w * x).mean()

    def metrics_fn(w, x):
        return {"mean": (w * x).mean()}

    counts = []
    for _ in range(3):
        dp = jdp.DataParallel(lambda w, x: w * x, devices=range(2))
        dp.value_and_grad(loss_fn)(1.0, np.ones(4, np.float32))
        dp.evaluate(metrics_fn, 1.0, [np.ones(4, np.float32)])
        del dp
        gc.collect()
        counts.append((len(_made[id(loss_fn)][1]), len(_made[id(metrics_fn)][1])))
    assert counts[0] == counts[2]


@pytest.mark.full
@pytest.mark.parametrize("hold", [lambda m: {"m": m}, lambda m: (m, 1.0), lambda m: m], ids=["dict", "tuple", "itself"])
def test_nnx_objects_among_the_parameters_of_a_function_keep_their_state(hold):
    def find(params):
        return params["m"] if isinstance(params, dict) else params[0] if isinstance(params, tuple) else params

    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    dp = jdp.DataParallel(lambda params, x: find(params)(x), devices=range(2))
    for i in range(2):
        dp(hold(norm), np.full((4, 3), 5, np.float32))
        np.testing.assert_allclose(norm.mean[...], 5 * (1 - 0.99 ** (i + 1)), rtol=1e-4)
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    dp = jdp.DataParallel(lambda params, x: find(params)(x), devices=range(2))
    first, second = (np.asarray(dp(hold(drop), np.ones((4, 64), np.float32))) for _ in range(2))
    assert (first[:2] != first[2:]).any() and (first != second).any()


OWN: list[Any] = []  # the values of the devices


class OfLists(jdp.DataParallel):
    """Its scatter returns lists, as torch's does, with values of each device's own."""

    def scatter(self, inputs, kwargs, devices):
        x, *_ = inputs
        return [(x[2 * i : 2 * i + 2], value) for i, value in enumerate(OWN)], [{}] * len(OWN)


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_chunks_of_a_subclass_keep_their_own_values(count):
    dp, x = OfLists(lambda w, x, s: w * x * s, devices=range(4)), np.ones(2 * count, np.float32)
    OWN[:] = [np.float32(i + 1) for i in range(count)]
    assert dp(np.float32(1), x).tolist() == [i // 2 + 1 for i in range(2 * count)]
    OWN[:] = [jax.device_put(np.float32(i + 1), jax.devices()[i]) for i in range(count)]
    assert dp(np.float32(1), x).tolist() == [i // 2 + 1 for i in range(2 * count)]
    OWN[:] = [np.float32(3)] * count
    assert dp(np.float32(1), x).tolist() == [3] * 2 * count
    draw = OfLists(lambda w, x, key: x + jax.random.uniform(key), devices=range(4))
    OWN[:] = [jax.random.key(i) for i in range(count)]
    found = np.asarray(draw(np.float32(1), x))
    assert len({*found.tolist()}) == count


class OfNumbers(OfLists):
    """Its scatter returns a number for each of some devices, and no rows."""

    def scatter(self, inputs, kwargs, devices):
        return [(value,) for value in OWN], [{}] * len(OWN)


def test_numbers_of_a_subclass_are_as_many_as_it_returns():
    OWN[:] = np.float32([1, 2])
    assert OfNumbers(lambda w, x: w * x, devices=range(4))(np.float32(3), None).tolist() == [3, 6]


@pytest.mark.parametrize("values", [(1, 2), ("a", "b"), (1, True), (None, 1)])
def test_python_values_of_a_subclass_are_the_same_for_all(values):
    dp = OfLists(lambda w, x, s: w * x, devices=range(2))
    OWN[:] = values
    with pytest.raises(ValueError, match="other Python values in one place|differ in their trees"):
        dp(np.float32(1), np.ones(4, np.float32))


def test_chunks_of_a_subclass_keep_their_own_values_under_jit():
    dp, x = OfLists(lambda w, x, s: w * x * s, devices=range(2)), np.ones(4, np.float32)

    def run(first, second):
        OWN[:] = [first, second]
        return dp(np.float32(1), x)

    assert jax.jit(run)(np.float32(2), np.float32(3)).tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])  # keys of two words, and of four
@pytest.mark.parametrize("in_axes, why", [(None, "be cut into its"), ((0, None), "make all replicas draw the same")])
def test_a_legacy_key_of_any_generator_is_refused(refused, impl, in_axes, why):
    with jax.default_prng_impl(impl):
        key = jax.random.PRNGKey(0)
        dp = jdp.DataParallel(lambda w, x, key: x + jax.random.uniform(key, (len(x),)), range(2), in_axes=in_axes)
        for new in (False, True):  # of typed keys; the data of one are a legacy key in any case
            with jax.enable_custom_prng(new), refused(TypeError, "DataParallel", match=rf"uint32\[{len(key)}\].*{why}"):
                dp(np.float32(1), np.zeros(len(key), np.float32), key)
