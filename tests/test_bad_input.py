"""Bad input gets one clear error at the call, of the right type, and nothing has changed."""

import collections
import contextlib
import copy
import dataclasses
import re
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from laws import variables_of

import jdp

ROWS = np.random.RandomState(0).randn(10, 3).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, *rest, **more):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))


NET = Net()
VARIABLES = variables_of(NET, ROWS)
DP = jdp.DataParallel(NET, devices=range(4))
FN = jdp.DataParallel(lambda w, x, *rest, **more: x * w, devices=range(4))
WEIGHT = np.float32(3)


def said(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def snapshot(tree):
    def copied(leaf):
        if isinstance(leaf, jax.Array):
            assert not leaf.is_deleted()
            key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            return np.array(jax.random.key_data(leaf) if key else leaf), leaf.sharding
        return np.array(leaf) if isinstance(leaf, np.ndarray) else copy.deepcopy(leaf)

    return jax.tree.map(copied, tree)


@contextlib.contextmanager
def refused(kind, *patterns, keep=()):
    """The block raises exactly `kind`, its text matches every pattern, and the trees in `keep` are as they were."""
    before = snapshot(keep)
    with pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{p})" for p in patterns)) as info:
        yield info
    assert type(info.value) is kind
    assert len(said(info.value)) < 2000
    after = snapshot(keep)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b) if isinstance(a, np.ndarray) else None
        assert isinstance(a, np.ndarray) or a == b


def form(info):
    """The contract's form: who speaks first, then the fact."""
    assert re.match(r"jdp\.\w+: ", str(info.value)), str(info.value)


@pytest.fixture(autouse=True)
def works_afterwards():
    """After the refusal the same wrappers give the same right results."""
    yield
    np.testing.assert_allclose(FN(WEIGHT, ROWS), 3 * ROWS, rtol=1e-6)
    y, state = DP.apply(VARIABLES, ROWS, mutable=["batch_stats"])
    want, new = NET.apply(VARIABLES, ROWS[:3], mutable=["batch_stats"])
    np.testing.assert_allclose(y[:3], want, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, new)


# --- devices ---


def wrap(devices, **kw):
    return jdp.DataParallel(FN.module, devices, **kw)


def run(devices, **kw):
    return jdp.data_parallel(FN.module, WEIGHT, ROWS, devices, **kw)


@pytest.mark.parametrize("call", [wrap, run])
@pytest.mark.parametrize(
    "devices, patterns",
    [
        ([], ["device"]),
        ((), ["device"]),
        ([0, 1, 0], ["cpu:0|CPU_0|TFRT_CPU_0", "duplicate|twice|more than once|distinct"]),
        (["cpu:1", 1], ["cpu:1|TFRT_CPU_1", "duplicate|twice|more than once|distinct"]),
        ([0, 99], ["99"]),
        ([0, -9], ["-9"]),
        (["cpu:99"], ["cpu:99"]),
        (["gpu:0"], ["gpu:0"]),
        (["cuda:1"], ["cuda:1"]),
        (["nonsense"], ["nonsense"]),
        (["cpu:x"], ["cpu:x"]),
    ],
)
def test_empty_duplicate_and_unknown_devices(call, devices, patterns):
    with refused(ValueError, *patterns) as info:
        call(devices)
    form(info)


@pytest.mark.parametrize("call", [wrap, run])
def test_devices_of_several_platforms(call):
    real = jax.devices()[0]
    other = mock.Mock(spec=real, platform="gpu", id=0, device_kind="H200", process_index=0, client=mock.Mock())
    with refused(ValueError, "platform", "cpu", "gpu"):
        call([real, other])


@pytest.mark.parametrize("call", [wrap, run])
@pytest.mark.parametrize("devices", [1.5, [1.5], [None], object()])
def test_devices_that_are_none(call, devices):
    with pytest.raises((TypeError, ValueError), match="device"):
        call(devices)


@pytest.mark.parametrize("call", [wrap, run])
@pytest.mark.parametrize("where", ["nowhere", "gpu:0", "cpu:99", 99, "shard", -2])
def test_unknown_output_device(call, where):
    with refused(ValueError, re.escape(str(where))):
        call([0, 1], output_device=where)


# --- the constructor's other arguments ---


@pytest.mark.parametrize("module", [None, 3, "model", {"w": 1}, nn.Dense, nnx.Linear])
def test_a_module_that_is_none(module):
    with refused(TypeError, "Linen|linen", "NNX|nnx", "function"):
        jdp.DataParallel(module)


def test_unknown_reduce_state():
    with refused(ValueError, "reduce_state", "median", "primary", "mean"):
        jdp.DataParallel(NET, reduce_state="median")


def test_in_axes_of_another_length_or_shape():
    dp = jdp.DataParallel(FN.module, devices=range(4), in_axes=(0, 0))
    with refused(ValueError, "in_axes", keep=ROWS):
        dp(WEIGHT, ROWS)
    dp = jdp.DataParallel(FN.module, devices=range(4), in_axes=({"a": 0},))
    with refused(ValueError, "in_axes", keep=ROWS):
        dp(WEIGHT, {"b": ROWS})


def test_out_axes_that_do_not_fit_the_output():
    dp = jdp.DataParallel(FN.module, devices=range(4), out_axes=(0, 1))
    with refused(ValueError, "out_axes", keep=ROWS):
        dp(WEIGHT, ROWS)


def test_dim_that_is_no_int():
    for dim in ("rows", 1.5):
        with pytest.raises(TypeError, match="dim"):
            jdp.DataParallel(FN.module, devices=range(2), dim=dim)(WEIGHT, ROWS)


# --- parameters ---


@pytest.mark.parametrize("where", ["another", "subset", "sharded", "wrong order"])
def test_parameters_on_a_wrong_device(devices, where):
    """Row 21: torch's words, with the leaf's path, before anything is scattered."""
    auto = (jax.sharding.AxisType.Auto,)

    def on(mesh_devices, spec):
        return jax.NamedSharding(jax.sharding.Mesh(np.array(mesh_devices), ("data",), axis_types=auto), spec)

    place = {
        "another": devices[3],
        "subset": on(devices[:2], P()),
        "sharded": on(devices[4:8], P()),
        "wrong order": devices[1],
    }[where]
    wrong = jax.device_put(VARIABLES["params"]["Dense_0"]["kernel"], place)
    params = {**VARIABLES["params"], "Dense_0": {**VARIABLES["params"]["Dense_0"], "kernel": wrong}}
    variables = {**VARIABLES, "params": params}
    words = r"module must have its parameters and buffers on device .*\(device_ids\[0\]\) "
    words += "but found one of them on device"
    with refused(RuntimeError, words, "Dense_0", "kernel", keep=variables):
        DP.apply(variables, ROWS)
    with refused(RuntimeError, words, "Dense_0", "kernel", keep=variables):
        DP.apply(variables, ROWS, mutable=["batch_stats"])
    with refused(RuntimeError, words, keep=variables):
        jdp.data_parallel(NET.apply, variables, ROWS, devices=range(4), kwargs={"mutable": False})
    with refused(RuntimeError, words):
        FN(jax.device_put(WEIGHT, devices[5]), ROWS)


def test_buffers_on_a_wrong_device_are_found_too(devices):
    stats = jax.device_put(VARIABLES["batch_stats"], devices[2])
    with refused(RuntimeError, "device_ids", "BatchNorm_0", "(mean|var)"):
        DP.apply({**VARIABLES, "batch_stats": stats}, ROWS)


def test_nnx_parameters_moved_to_a_wrong_device(devices):
    dp = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=range(4))
    good = dp.module.kernel[...]
    dp.module.kernel.set_value(jax.device_put(np.asarray(good), devices[6]))
    with refused(RuntimeError, "device_ids", "kernel"):
        dp(ROWS)
    dp.module.kernel.set_value(good)
    assert dp(ROWS).shape == (10, 2)


def test_parameters_cut_over_the_devices(devices):
    """As pmap-style replicate makes them: they look replicated, for pmap."""
    stack = jax.tree.map(lambda w: np.stack([w] * 4), VARIABLES)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:4])
    cut = jax.device_put(stack, jax.NamedSharding(mesh, P("data")))
    with pytest.raises((ValueError, RuntimeError), match="(?s)pmap") as info:
        DP.apply(cut, ROWS)
    assert "Dense_0" in said(info.value) or "BatchNorm_0" in said(info.value)
    pmapped = jax.pmap(lambda _: VARIABLES, axis_name="data", devices=devices[:4])(np.arange(4))
    with pytest.raises((ValueError, RuntimeError), match="(?s)pmap"):
        DP.apply(pmapped, ROWS)


def test_parameters_stacked_with_a_leading_device_axis():
    for stack in (np.stack, jnp.stack):
        stacked = jax.tree.map(lambda w, stack=stack: stack([w] * 4), VARIABLES)
        with refused(ValueError, "pmap", keep=stacked):
            DP.apply(stacked, ROWS)
        with refused(ValueError, "pmap", keep=stacked):
            DP.apply(stacked, ROWS, mutable=["batch_stats"])


def test_calling_before_init():
    for call in (DP, DP.apply):
        with refused(TypeError, r"dp\.init|\.init\(", keep=ROWS):
            call(ROWS)
        with refused(TypeError, r"dp\.init|\.init\("):
            call(jnp.asarray(ROWS), ROWS)
    with pytest.raises(Exception, match="(?s)params|init"):
        DP.apply({}, ROWS)


def test_init_of_wrappers_that_have_none():
    """Functions bring their own parameters, and an NNX module is made with its own."""
    nnx_wrapper = jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=range(2))
    for dp in (FN, nnx_wrapper):
        with pytest.raises(AttributeError, match=r"init is for Linen modules, .*Call dp\(\*args\) for NNX"):
            dp.init(jax.random.key(0), ROWS)
    with pytest.raises((AttributeError, TypeError), match="apply|NNX|nnx"):
        nnx_wrapper.apply({}, ROWS)


# --- inputs ---


def test_arrays_that_disagree_on_the_batch_size():
    """Row 43: torch drops rows in silence."""
    for call in (lambda *a, **k: FN(WEIGHT, *a, **k), lambda *a, **k: DP.apply(VARIABLES, *a, **k)):
        with refused(ValueError, r"\[0\]", r"\[1\]", "10", "2", keep=ROWS) as info:
            call(ROWS, ROWS[:2])
        form(info)
        with refused(ValueError, "10", "9", "x", "labels", keep=ROWS):
            call({"x": ROWS, "labels": ROWS[:9, 0]})
        with refused(ValueError, "10", "9", "labels", keep=ROWS):
            call(ROWS, labels=ROWS[:9])
        with refused(ValueError, "10", "0"):
            call(ROWS, ROWS[:0])
    with refused(ValueError, "10", "2"):
        jdp.data_parallel(FN.module, WEIGHT, (ROWS, ROWS[:2]), range(4))
    with refused(ValueError, "10", "2", "labels"):
        jdp.data_parallel(FN.module, WEIGHT, (ROWS,), range(4), kwargs={"labels": ROWS[:2]})
    with refused(TypeError, "jdp.data_parallel: kwargs is a list; .* Pass a dict"):
        jdp.data_parallel(FN.module, WEIGHT, (ROWS,), range(4), kwargs=[ROWS])


def test_nnx_arrays_that_disagree_change_nothing():
    class Both(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x, y=None):
            return self.dropout(self.norm(x))

    dp = jdp.DataParallel(Both(), devices=range(4))
    before = jax.tree.leaves(nnx.state(dp))
    with refused(ValueError, "10", "2", keep=nnx.to_pure_dict(nnx.state(dp))):
        dp(ROWS, ROWS[:2])
    with refused(ValueError, "10", "2", "y", keep=nnx.to_pure_dict(nnx.state(dp))):
        dp(ROWS, y=ROWS[:2])
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(dp)), before, strict=True))
    assert dp(ROWS).shape == (10, 3)


@pytest.mark.parametrize("dim", [2, -3, 5])
def test_dim_out_of_range(dim):
    dp = jdp.DataParallel(FN.module, devices=range(4), dim=dim)
    with refused(IndexError, str(dim), "2", keep=ROWS) as info:
        dp(WEIGHT, {"x": ROWS})
    form(info)
    assert "x" in str(info.value)
    with refused(IndexError, str(dim), "2"):
        jdp.data_parallel(FN.module, WEIGHT, ROWS, range(4), dim=dim)


def test_dim_out_of_range_for_one_argument_of_several():
    """Row 41: with dim=1 a 1-d array of lengths cannot be cut."""
    dp = jdp.DataParallel(FN.module, devices=range(4), dim=1)
    with refused(IndexError, r"\[1\]", "1"):
        dp(WEIGHT, ROWS, np.zeros(3))


def test_out_axes_out_of_range():
    dp = jdp.DataParallel(FN.module, devices=range(4), out_axes=3)
    with refused(IndexError, "3", "2"):
        dp(WEIGHT, ROWS)


class MyDict(dict):
    pass


class MyTuple(tuple):
    pass


class MyList(list):
    pass


@dataclasses.dataclass
class Plain:
    x: np.ndarray


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda x: MyDict(x=x), "MyDict"),
        (lambda x: MyTuple((x,)), "MyTuple"),
        (lambda x: MyList([x]), "MyList"),
        (lambda x: collections.Counter(), "Counter"),
    ],
)
def test_unregistered_containers(make, name):
    box = make(ROWS)
    for call in (
        lambda: FN(WEIGHT, {"inner": box}),
        lambda: FN(WEIGHT, ROWS, inner=box),
        lambda: DP.apply(VARIABLES, ROWS, inner=box),
        lambda: jdp.data_parallel(FN.module, WEIGHT, {"inner": box}, range(4)),
    ):
        with refused(TypeError, name, "inner", keep=ROWS):
            call()


ODD_ARRAYS = [
    np.array([None, {}]),
    np.array(["a", "b"]),
    np.array(["2020-01-01"], "datetime64[D]"),
    np.ones(3, np.longdouble),
]


@pytest.mark.parametrize("array", ODD_ARRAYS)
def test_arrays_of_objects_strings_and_dates(array):
    for call in (lambda: FN(WEIGHT, ROWS[:2], bad=array), lambda: DP.apply(VARIABLES, ROWS[:2], {"bad": array})):
        with refused(TypeError, "bad", str(array.dtype).split("[")[0].replace("<", "")):
            call()


def test_torch_tensors_among_the_inputs():
    torch = pytest.importorskip("torch")
    for call in (lambda: FN(WEIGHT, torch.zeros(4, 3)), lambda: DP.apply(VARIABLES, {"x": torch.zeros(4, 3)})):
        with refused(TypeError, r"np\.asarray|numpy"):
            call()


def test_legacy_keys_among_the_inputs():
    """A uint32[2] array would be cut like rows."""
    key = jax.random.PRNGKey(0)
    for call in (
        lambda: FN(WEIGHT, ROWS, key),
        lambda: FN(WEIGHT, ROWS, key=key),
        lambda: FN(WEIGHT, {"x": ROWS, "key": np.asarray(key)}),
        lambda: FN(WEIGHT, ROWS[:2], key),
        lambda: DP.apply(VARIABLES, ROWS, key),
        lambda: jdp.data_parallel(FN.module, WEIGHT, (ROWS, key), range(4)),
    ):
        with refused(TypeError, r"jax\.random\.key", keep=(ROWS, key)):
            call()
    assert FN(WEIGHT, np.arange(2, dtype=np.uint32)[:, None]).shape == (2, 1)  # rows of uint32 are rows


def test_legacy_keys_that_in_axes_would_replicate():
    """All replicas would draw the same numbers; a typed key is folded with the replica's index."""
    key, noisy = jax.random.PRNGKey(0), lambda w, x, k: x * w + jax.random.uniform(k, x.shape)
    dp = jdp.DataParallel(noisy, range(4), in_axes=(0, None))
    with refused(TypeError, r"args\[1\] is a uint32\[2\] array, .* key.*draw the same numbers", keep=(ROWS, key)):
        dp(np.float32(1), ROWS[:4, 0], key)
    step = dp.train_step(lambda v, b: noisy(v["params"], *b).mean(), optax.sgd(0.1), in_axes=(0, None))
    with refused(TypeError, r"train_step: batch\[1\] is a uint32\[2\] array", keep=(ROWS, key)):
        step(step.init({"params": np.float32(1)}), (ROWS, key))
    assert len(np.unique(dp(np.float32(0), np.zeros(4, np.float32), jax.random.key(0)))) == 4


# --- outputs ---


@pytest.mark.parametrize("leaf, name", [("text", "str"), (object(), "object"), (len, "builtin"), ({1, 2}, "set")])
def test_an_output_leaf_that_is_not_an_array(leaf, name):
    """Row complaint: torch fails inside gather."""

    def model(w, x):
        return {"fine": x * w, "bad": [leaf]}

    dp = jdp.DataParallel(model, devices=range(4))
    for size in (8, 10):
        with refused(TypeError, "bad", name, keep=ROWS):
            dp(WEIGHT, ROWS[:size])
    with refused(TypeError, "bad"):
        jdp.data_parallel(model, WEIGHT, ROWS, range(4))
    with refused(TypeError, "bad"):
        jax.grad(lambda w: dp(w, ROWS)["fine"].sum())(WEIGHT)


def test_replicas_whose_outputs_differ_off_dim():
    dp = jdp.DataParallel(lambda w, x: {"gram": x @ x.T * w}, devices=range(4))
    with refused(ValueError, "gram", "3", "1", keep=ROWS):
        dp(WEIGHT, ROWS)
    assert dp(WEIGHT, ROWS[:8])["gram"].shape == (8, 2)  # even chunks agree: rows of 2


def test_replicas_whose_dtypes_ranks_or_keys_differ():
    def dtypes(w, x):
        return {"odd": x.astype(np.int32) if len(x) == 1 else x}

    def ranks(w, x):
        return {"odd": x[0] if len(x) == 1 else x}

    def keys(w, x):
        return {"odd": x} if len(x) == 1 else {"usual": x}

    for model in (dtypes, ranks, keys):
        with refused(ValueError, "odd", keep=ROWS):
            jdp.DataParallel(model, devices=range(4))(WEIGHT, ROWS)


def test_a_replaced_gather_that_is_handed_different_keys():
    """What a subclass hands to the verbs is checked by them."""

    class Split(jdp.DataParallel):
        def gather(self, outputs, output_device):
            trees = [outputs[i] for i in range(len(outputs))]
            return jdp.gather([{f"key{i}": tree} for i, tree in enumerate(trees)], output_device)

    with refused(ValueError, "key0", "key1"):
        Split(FN.module, devices=range(4))(WEIGHT, ROWS)


def test_scattered_for_other_devices():
    other = jdp.scatter((ROWS,), range(3))
    with refused(ValueError, "device|chunk"):
        FN(WEIGHT, other)
    with refused(ValueError, "chunk|rows|sizes"):
        FN(WEIGHT, jdp.scatter(ROWS, range(4)), jdp.scatter(ROWS[:8], range(4)))


# --- collectives and uneven batches ---


@pytest.mark.parametrize("size", [1, 5, 9, 10])
@pytest.mark.parametrize("way", ["psum", "pmean", "all_gather", "ppermute", "scan", "cond", "jit", "grad"])
def test_a_model_with_its_own_collectives_and_an_uneven_batch(way, size):
    """Before anything runs, never a hang, wherever the collective hides."""
    if size != 10 and way not in ("psum", "cond"):
        size = 5

    def model(w, x):
        total = lambda v: lax.psum(v, "data")  # noqa: E731
        if way == "psum":
            return x - total(x.sum())
        if way == "pmean":
            return x - lax.pmean(x.sum(), "data")
        if way == "all_gather":
            return x + lax.all_gather(x.sum(), "data").sum()
        if way == "ppermute":
            return x + lax.ppermute(x.sum(), "data", [(i, (i + 1) % 4) for i in range(4)])
        if way == "scan":
            return x + lax.scan(lambda c, _: (c + total(x.sum()), None), 0.0, length=2)[0]
        if way == "cond":
            return x + lax.cond(w > 0, lambda: total(x.sum()), lambda: 0.0)
        if way == "jit":
            return x + jax.jit(total)(x.sum())
        return x + jax.grad(lambda v: total((v * x).sum()))(w)

    ran = []
    dp = jdp.DataParallel(lambda w, x: (jax.debug.callback(ran.append, w), model(w, x))[1], devices=range(4))
    with refused(ValueError, "(?i:drop)", "(?i:pad)", "sync_batch_norm", keep=ROWS) as info:
        dp(WEIGHT, ROWS[:size])
    jax.effects_barrier()
    assert ran == [] and "data" in str(info.value)


def test_constants_of_the_axis_are_no_collectives():
    """`psum(1)` and `axis_index` wait for nobody, so an uneven batch is fine."""
    dp = jdp.DataParallel(lambda w, x: x * w + lax.psum(1, "data") + 0 * lax.axis_index("data"), devices=range(4))
    np.testing.assert_allclose(dp(WEIGHT, ROWS), 3 * ROWS + 4, rtol=1e-6)


def test_collectives_under_grad_and_jit_are_refused_too():
    dp = jdp.DataParallel(lambda w, x: x * w - lax.pmean(x.sum(), "data"), devices=range(4))
    with refused(ValueError, "(?i:drop)", "(?i:pad)"):
        jax.jit(dp)(WEIGHT, ROWS)
    with refused(ValueError, "(?i:drop)", "(?i:pad)"):
        jax.grad(lambda w: dp(w, ROWS).sum())(WEIGHT)


# --- the model raises ---


def test_a_model_that_raises_leaves_linen_variables_alone():
    class Raising(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.BatchNorm(use_running_average=False)(x)
            if len(x) == 1:
                raise ZeroDivisionError("no rows")
            return y

    dp = jdp.DataParallel(Raising(), devices=range(4))
    variables = dp.init(jax.random.key(0), ROWS)
    with refused(ZeroDivisionError, "no rows", keep=variables) as info:
        dp.apply(variables, ROWS, mutable=["batch_stats"])
    assert "Caught ZeroDivisionError in replica 3 on device" in said(info.value)


def test_a_wrong_call_of_the_model_keeps_pythons_own_error():
    """A forgotten or unknown argument: TypeError with Python's text."""
    dp = jdp.DataParallel(lambda w, x, y: x, devices=range(4))
    with refused(TypeError, "missing 1 required positional argument: 'y'") as info:
        dp(WEIGHT, ROWS)
    assert "replica 0" in said(info.value)
    with refused(TypeError, "unexpected keyword argument 'z'"):
        dp(WEIGHT, ROWS, ROWS, z=1)


def test_labels_as_a_list_of_python_numbers():
    """Each would go whole to every replica: 10 labels would come back 40 times."""
    n = len(ROWS)
    for batch, name in (((ROWS, [1] * n), r"args\[1\]"), (({"x": ROWS, "y": [0.5] * n},), r"args\[0\]\['y'\]")):
        with refused(TypeError, rf"{name} is a list of {len(ROWS)} Python numbers.*np\.asarray", keep=(ROWS,)):
            FN(WEIGHT, *batch)


def test_labels_as_a_tuple_of_numpys_numbers():
    n, numbers = len(ROWS), (*np.ones(len(ROWS), np.float32),)
    with refused(TypeError, rf"args\[1\] is a tuple of {n} 0-d arrays, as many as.*jnp\.asarray", keep=(ROWS,)):
        FN(WEIGHT, ROWS, numbers)


def test_numbers_that_are_no_labels():
    """As many as there are rows: a size, the arguments themselves, keys, and what is replicated by `in_axes`."""
    w, x, one = np.float32(1), np.ones(2, np.float32), np.float32(1)
    dp = jdp.DataParallel(lambda w, *args, x: x * w + 0 * len(args), devices=range(2))
    for args in (((4, 4),), (one, 2.0), ((jax.random.key(0), jax.random.key(1)),)):
        np.testing.assert_array_equal(dp(w, *args, x=x), x)
    dp = jdp.DataParallel(lambda w, x, args: x * w + 0 * len(args), devices=range(2), in_axes=(0, None))
    np.testing.assert_array_equal(dp(w, x, [one, one]), x)


@pytest.mark.parametrize("method", ["train", "eval"])
def test_a_mode_for_a_linen_module(method):
    with refused(TypeError, rf"{method}\(\) sets the mode of an NNX module.*train=", keep=()):
        getattr(DP, method)()


def _recursive_list():
    rows = [ROWS]
    rows.append(rows)
    return rows


def _recursive_dict():
    rows = {"a": [ROWS]}
    rows["a"].append((rows,))
    return rows


@pytest.mark.parametrize("make", [_recursive_list, _recursive_dict])
@pytest.mark.parametrize("known", [False, True])
def test_a_tree_that_holds_itself(refused, make, known):
    """JAX would flatten nothing any more after it had tried to flatten this."""
    dp = jdp.DataParallel(lambda w, x: x * w if not isinstance(x, list | dict) else w, devices=range(3))
    weight, rows = jdp.replicate(np.float32(2), range(3)), make()
    for _ in range(2 if known else 0):
        dp(weight, [ROWS[:6]])
    with refused(ValueError, "DataParallel", match=r"args\[0\] holds itself"):
        dp(weight, rows)
    with refused(ValueError, "scatter", match="inputs holds itself"):
        jdp.scatter(rows, [0])
    with refused(ValueError, "replicate", match="params holds itself"):
        jdp.replicate(rows, [0])
    with refused(ValueError, "DataParallel", match=r"args\[1\] holds itself"):
        dp.value_and_grad(lambda w, x: w)(weight, rows)
    with refused(ValueError, "DataParallel", match=r"kwargs\['x'\] holds itself"):
        jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=range(3))(x=rows)
    deep = ROWS[:6]
    for _ in range(100):
        deep = [deep]
    np.testing.assert_array_equal(jax.tree.leaves(jdp.gather(jdp.scatter(deep, [0, 1])))[0], ROWS[:6])
    np.testing.assert_array_equal(dp(weight, ROWS[:6]), 2 * ROWS[:6])


def test_the_state_of_a_step_is_no_variables_of_a_linen_module():
    """What is told gives the trained model, and not the one that dp.init makes anew."""
    import optax

    step = DP.train_step(lambda v, x: jnp.mean(NET.apply(v, x, mutable=["batch_stats"])[0] ** 2), optax.sgd(0.1))
    state, _ = step(step.init(VARIABLES), ROWS)
    with refused(TypeError, "variables is a TrainState", r"Pass \{'params': state.params, \*\*state.state\}"):
        DP.apply(state, ROWS)
    with pytest.raises(Exception, match="params") as error:
        DP.apply(state.params, ROWS)
    assert "{'params': state.params, **state.state}" in said(error.value)
    trained, _ = DP.apply({"params": state.params, **state.state}, ROWS, mutable=["batch_stats"])
    assert trained.shape == (10, 2)


@pytest.mark.parametrize(
    ("devices", "kind", "told"),
    [
        (2, TypeError, r"devices=2 is an int; .* there are 8. Pass range\(2\) for the first 2, or None for all.$"),
        (0, TypeError, r"devices=0 is an int; .* Pass \[0\] for the first 1, or None"),
        (12, TypeError, r"Pass range\(12\) .* jdp.virtual_cpu_devices\(12\), first in the program"),
        (range(12), ValueError, r"devices\[8\] 8 is unknown; .* jdp.virtual_cpu_devices\(9\), first in the program"),
        (["cpu:1", "cpu:1"], ValueError, "cpu:1"),
    ],
)
def test_devices_that_there_are_not(devices, kind, told):
    with refused(kind, told):
        jdp.DataParallel(NET, devices=devices)


def test_a_loss_of_one_column_is_told_to_be_a_vector():
    import optax

    step = FN.train_step(lambda v, x: (x * v["params"])[:, :1], optax.sgd(0.1))
    with refused(TypeError, r"the loss is float32\[3, 1\] for 3 rows", r"these: loss\[:, 0\] is the vector\."):
        step(step.init({"params": WEIGHT}), ROWS)


@pytest.mark.parametrize("door", ["apply", "scatter", "value_and_grad"])
def test_a_symbolic_number_of_rows(door):
    dp = jdp.DataParallel(lambda w, x: x @ w, devices=[0, 1])
    doors = {
        "apply": dp.apply,
        "scatter": lambda w, x: jdp.gather(jdp.scatter(x, [0, 1])),
        "value_and_grad": dp.value_and_grad(lambda w, x: ((x @ w) ** 2).mean(1)),
    }
    (b,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 4), (b, 8))]
    with refused(ValueError, "jdp", "symbolic number of rows, b.*Export the bare model"):
        jax.export.export(jax.jit(doors[door]))(*shapes)
