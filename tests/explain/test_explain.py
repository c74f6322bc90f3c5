"""explain: its figures are those of the program, worked out by hand, and nothing runs or changes."""

import dataclasses
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp._core.programs import FlatProgram
from jdp._jax.private import compilations
from jdp._processes.agree import same_program
from jdp._tools.explain.calls import _jitted_of, unused_donations

S = jax.ShapeDtypeStruct
ROWS, WIDTH = 64, 32


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="out")(nn.relu(nn.Dense(WIDTH, name="hidden")(x)))


MODEL = Model()
X, Y = S((ROWS, 16), jnp.float32), S((ROWS, 8), jnp.float32)
VARIABLES = jax.eval_shape(MODEL.init, jax.random.key(0), X)
SIZES = {"hidden.kernel": 16 * WIDTH, "hidden.bias": WIDTH, "out.kernel": WIDTH * 8, "out.bias": 8}
BYTES = 4 * sum(SIZES.values())


def loss_fn(variables, batch):
    return jnp.mean((MODEL.apply(variables, batch["x"]) - batch["y"]) ** 2)


def state_of(tx, key=None):
    params = VARIABLES["params"]
    return jdp.TrainState(S((), jnp.int32), params, jax.eval_shape(tx.init, params), {}, key)


BATCH = {"x": X, "y": Y}


@pytest.fixture
def dp(devices):
    return jdp.DataParallel(MODEL, devices)


def test_each_device_does_its_share_of_the_work(dp, devices):
    report = jdp.explain(dp.apply, VARIABLES, X)
    products = 2 * ROWS * (16 * WIDTH + WIDTH * 8)
    assert report.work.source == "compiled"
    assert products / 8 <= report.flops <= 1.2 * products / 8
    assert report.one_device.flops == pytest.approx(8 * report.flops, rel=0.02)
    assert report.collectives == () and report.in_flight is None and report.collective_bytes == 0
    assert (report.devices, report.rows, report.platform) == (8, (8,) * 8, "cpu")
    assert report.parameter_bytes == BYTES and report.batch_bytes == 16 * ROWS * 4 / 8
    assert report.peak_bytes >= report.parameter_bytes + report.batch_bytes


def test_uneven_rows_are_those_of_the_busiest(dp):
    report = jdp.explain(dp.apply, VARIABLES, S((10, 16), jnp.float32))
    assert report.rows == (2,) * 5
    assert report.batch_bytes == 2 * 16 * 4
    assert report.flops >= 2 * 2 * (16 * WIDTH + WIDTH * 8)


def test_a_loop_counts_as_often_as_it_runs(devices):
    def layers(w, x):
        return jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0]

    report = jdp.explain(jdp.DataParallel(layers, devices).apply, S((12, 16, 16), jnp.float32), X)
    products = 12 * 2 * ROWS // 8 * 16 * 16
    assert products <= report.flops <= 1.2 * products and report.bytes >= 12 * 16 * 16 * 4
    assert report.work.source == "estimated" and report.one_device.flops == pytest.approx(8 * report.flops, rel=0.02)


@pytest.mark.one_case
@pytest.mark.parametrize("accumulate_steps", [1, 4])
def test_a_step_reduces_every_gradient_once(dp, accumulate_steps):
    tx = optax.adam(1e-3)
    report = jdp.explain(dp.train_step(loss_fn, tx, accumulate_steps=accumulate_steps), state_of(tx), BATCH)
    assert {c.kind for c in report.collectives} == {"all-reduce"}
    assert report.collective_bytes == BYTES + 4  # the loss
    assert sorted(p for c in report.collectives for p in c.parameters) == sorted(SIZES)
    assert not any(c.in_loop for c in report.collectives) and {c.runs for c in report.collectives} == {1}
    assert report.parameter_bytes == BYTES and report.optimizer_bytes == 2 * BYTES + 4
    assert report.batch_bytes == (16 + 8) * ROWS * 4 / 8
    assert report.unused_donations == () and report.unscattered == ()


def test_a_step_that_cuts_the_optimizer(dp):
    tx = optax.adam(1e-3)
    report = jdp.explain(dp.train_step(loss_fn, tx, shard_optimizer=True), state_of(tx), BATCH)
    by_kind = {kind: [c for c in report.collectives if c.kind == kind] for kind in ("reduce-scatter", "all-gather")}
    assert sum(c.bytes for c in by_kind["reduce-scatter"]) == BYTES
    assert sum(c.bytes for c in by_kind["all-gather"]) == BYTES
    assert report.optimizer_bytes == 2 * BYTES / 8 + 4
    assert sorted(p for c in by_kind["reduce-scatter"] for p in c.parameters) == sorted(SIZES)


def test_a_step_that_cuts_the_parameters(dp):
    tx = optax.adam(1e-3)
    report = jdp.explain(dp.train_step(loss_fn, tx, shard_params=True), state_of(tx), BATCH)
    assert report.parameter_bytes == report.gradient_bytes == BYTES / 8  # 8 divides all of them
    assert report.optimizer_bytes == 2 * BYTES / 8 + 4
    by_kind = {kind: [c for c in report.collectives if c.kind == kind] for kind in ("reduce-scatter", "all-gather")}
    assert sum(c.bytes for c in by_kind["reduce-scatter"]) == BYTES
    assert sorted(p for c in by_kind["reduce-scatter"] for p in c.parameters) == sorted(SIZES)
    gathered = [(p, c.bytes) for c in by_kind["all-gather"] for p in c.parameters]
    assert {p for p, _ in gathered} == {*SIZES}
    assert BYTES <= sum(size for _, size in gathered) <= 2 * BYTES  # forward, and backward what it needs there
    assert "gradients" in str(report)


def test_gradients_on_each_device(dp):
    """Those of microbatches are added whole; else they are as the optimizer has its state."""
    tx = optax.sgd(0.1)
    for options, size in (
        ({}, BYTES),
        ({"shard_optimizer": True}, BYTES / 8),
        ({"shard_params": True, "accumulate_steps": 2}, BYTES),
    ):
        assert jdp.explain(dp.train_step(loss_fn, tx, **options), state_of(tx), BATCH).gradient_bytes == size
    assert jdp.explain(dp.apply, VARIABLES, X).gradient_bytes == 0


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("steps", [1, 2])
def test_layers_that_a_scan_gathers_travel_as_often_as_it_runs(devices, steps):
    layers, width = 5, 16
    params = {"w": S((layers, width, width), jnp.float32)}

    def loss(variables, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, variables["params"]["w"])
        return jnp.mean(x**2)

    tx = optax.sgd(0.1)
    dp = jdp.DataParallel(lambda v, x: x, devices)
    state = jdp.TrainState(S((), jnp.int32), params, jax.eval_shape(tx.init, params), {}, None)
    step = dp.train_step(loss, tx, shard_params=True, accumulate_steps=steps)
    report = jdp.explain(step, state, S((ROWS, width), jnp.float32))
    whole = 4 * layers * width**2
    gathers, scatters = ([c for c in report.collectives if c.kind == kind] for kind in ("all-gather", "reduce-scatter"))
    assert {c.parameters for c in gathers} == {("w",)} and any(c.in_loop for c in gathers)
    assert {c.bytes for c in gathers} == {whole // layers}
    assert sum(c.bytes * c.runs for c in gathers) == 2 * steps * whole
    assert sum(c.bytes * c.runs for c in scatters) == whole  # each gradient once
    assert report.collective_bytes == (2 * steps + 1) * whole + 4
    assert "Reduce once after" not in str(report)  # it is meant so


def test_value_and_grad_and_grad(dp):
    for transform in (dp.value_and_grad, dp.grad):
        report = jdp.explain(transform(loss_fn), VARIABLES, BATCH)
        assert report.collective_bytes in (BYTES, BYTES + 4)
        assert sorted(p for c in report.collectives for p in c.parameters) == sorted(f"params.{p}" for p in SIZES)


@pytest.mark.full
def test_parameters_that_are_cut_are_gathered(dp):
    """By a call as by a step: each parameter once, where it is used; and no device holds more than its part before."""
    x, names = np.ones((ROWS, 16), np.float32), sorted(f"params.{p}" for p in SIZES)
    variables = dp.init(jax.random.key(0), x, shard_params=True)
    report = jdp.explain(dp.apply, variables, x)
    assert {c.kind for c in report.collectives} == {"all-gather"} and report.collective_bytes == BYTES
    assert sorted(p for c in report.collectives for p in c.parameters) == names
    assert report.parameter_bytes == BYTES / 8
    report = jdp.explain(dp.value_and_grad(loss_fn), variables, {"x": x, "y": np.ones((ROWS, 8), np.float32)})
    of = {kind: [c for c in report.collectives if c.kind == kind] for kind in ("reduce-scatter", "all-gather")}
    assert sorted(p for c in of["reduce-scatter"] for p in c.parameters) == names  # the gradients
    assert sum(c.bytes for c in of["reduce-scatter"]) == BYTES
    assert {p for c in of["all-gather"] for p in c.parameters} == {*names}
    assert BYTES <= sum(c.bytes for c in of["all-gather"]) <= 2 * BYTES  # forward, and backward what it needs there
    model = jdp.DataParallel(nnx.Linear(16, WIDTH, rngs=nnx.Rngs(0)), dp.devices, shard_params=True)
    report = jdp.explain(model, x)
    assert report.collective_bytes == 4 * 17 * WIDTH
    assert sorted(p for c in report.collectives for p in c.parameters) == ["bias", "kernel"]
    whole = jdp.explain(dp.apply, jdp.replicate(variables, dp.devices), jax.device_put(x, dp.devices[0]))
    assert whole.collective_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
@pytest.mark.parametrize("names", [("data",), ("rows",)])
def test_a_mesh_around_it_changes_nothing(dp, names, axes):
    mesh = jax.make_mesh((8,), names, axis_types=(jax.sharding.AxisType[axes],))
    expected = jdp.explain(dp.value_and_grad(loss_fn), VARIABLES, {"x": X, "y": Y})
    with jax.set_mesh(mesh):
        report = jdp.explain(dp.value_and_grad(loss_fn), VARIABLES, {"x": X, "y": Y})
        assert report.one_device.flops == expected.one_device.flops
    assert report.collectives == expected.collectives and report.flops == expected.flops


def test_parameters_of_one_shape_in_a_tuple_are_told_apart(dp):
    """By the scope that each is gathered in; by their shapes they could not be."""
    x = np.ones(X.shape, X.dtype)
    pair = tuple(dp.init(jax.random.key(i), x, shard_params=True)["params"]["hidden"]["kernel"] for i in range(2))
    both = jdp.DataParallel(lambda pair, x: (x @ pair[0]) * (x @ pair[1]), dp.devices)
    report = jdp.explain(both, pair, x)
    assert sorted(p for c in report.collectives for p in c.parameters) == ["0", "1"]


@pytest.mark.full
def test_the_parameters_of_a_function_that_takes_an_nnx_object(dp):
    x = np.ones(X.shape, X.dtype)
    kernel = dp.init(jax.random.key(0), x, shard_params=True)["params"]["hidden"]["kernel"]
    teacher = nnx.Linear(16, WIDTH, rngs=nnx.Rngs(0))
    both = jdp.DataParallel(lambda params, x, teacher: x @ params["kernel"] - teacher(x), dp.devices)
    report = jdp.explain(both.apply, {"kernel": kernel}, x, teacher)
    assert [c.parameters for c in report.collectives] == [("kernel",)]


def test_the_function_that_was_explained_may_be_gone(dp):
    """What one device would do is worked out when it is asked for."""
    report = jdp.explain(dp.value_and_grad(lambda v, x: jnp.mean(MODEL.apply(v, x) ** 2)), VARIABLES, X)
    assert report.one_device.flops > report.flops > 0


def test_a_collective_in_a_loop_is_seen(devices):
    def step(w, x):
        def one(w, row):
            return w - jax.lax.pmean(jnp.tanh(w * row), "batch"), None  # depends on the carry: XLA cannot hoist it

        return jax.lax.scan(one, w, x)[0], jnp.sum(x)

    dp = jdp.DataParallel(lambda w, x: w * x, devices)
    report = jdp.explain(dp.parallel(step, axis_name="batch"), S((5,), jnp.float32), S((24, 5), jnp.float32))
    loops = [c for c in report.collectives if c.in_loop]
    assert [(c.kind, c.bytes, c.runs) for c in loops] == [("all-reduce", 20, 3)]
    assert "loop, 3" in str(report) and "Reduce once after" in str(report)


def test_a_batch_that_goes_whole_to_every_replica_is_named(devices):
    labels = np.ones((ROWS, 8), np.float32)
    dp = jdp.DataParallel(lambda w, x, y: jnp.sum((x @ w - y[: len(x)]) ** 2, 1), devices, in_axes=(0, None))
    w = S((16, 8), jnp.float32)
    report = jdp.explain(dp.apply, w, X, Y)
    assert report.unscattered == (f"argument 1: float32[{ROWS}, 8]",)
    assert "every replica gets all of it" in re.sub(r"\s+", " ", str(report))
    closed = jdp.DataParallel(lambda w, x: x @ w - jnp.asarray(labels)[: len(x)], devices)
    assert jdp.explain(closed.apply, w, X).unscattered == (
        f"a constant that the function closes over: float32[{ROWS}, 8]",
    )
    clean = jdp.DataParallel(lambda w, x, y: x @ w - y, devices)
    assert jdp.explain(clean.apply, w, X, Y).unscattered == ()


def test_nothing_runs_and_nothing_changes(dp):
    ran = []

    def loss(variables, batch):
        jax.debug.callback(lambda: ran.append(1))
        return loss_fn(variables, batch)

    tx = optax.sgd(0.1)
    step = dp.train_step(loss, tx)
    other = jdp.TrainState(S((), jnp.int32), {"w": S((3,), jnp.float32)}, jax.eval_shape(tx.init, {}), {}, None)
    with pytest.raises(Exception, match="hidden"):
        jdp.explain(step, other, BATCH)  # of another model; it must not become the step's own
    variables = MODEL.init(jax.random.key(0), jnp.ones((1, 16)))
    state = step.init(variables)
    batch = {name: np.ones(x.shape, x.dtype) for name, x in BATCH.items()}
    before = jax.device_get(state)
    counts = [jdp.explain(step, state, batch).compilations]
    assert ran == [] and not any(x.is_deleted() for x in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    state, _ = step(state, batch)
    jax.block_until_ready(state)
    counts.append(jdp.explain(step, state, batch).compilations)
    counts.append(jdp.explain(step, state, batch).compilations)
    assert counts == [0, 1, 1]


def test_programs_that_processes_have_compared_are_counted_too():
    jitted = jax.jit(lambda x: x + 1)
    compared = same_program(jitted, jax.devices()[:1], ("x",))
    for x in (1.0, 2):
        jitted(x)
    flat = object.__new__(FlatProgram)
    flat.run = jitted
    assert compilations(_jitted_of({"flat": flat, "compared": compared})) == 4


def test_arrays_and_shapes_give_one_report(dp):
    variables = MODEL.init(jax.random.key(0), jnp.ones((1, 16)))
    reports = [
        jdp.explain(dp.apply, VARIABLES, X),
        jdp.explain(dp.apply, variables, np.ones(X.shape, np.float32)),
        jdp.explain(dp, variables, jnp.ones(X.shape)),
        jdp.explain(lambda v, x: dp.apply(v, x) * 2, VARIABLES, X),
        jdp.explain(jax.jit(dp.apply), VARIABLES, X),
    ]
    for name in ("flops", "peak_bytes", "parameter_bytes", "batch_bytes", "rows"):
        assert len({getattr(r, name) for r in reports}) == 1, name


def test_arguments_of_numpy_that_are_no_arrays_of_numbers_are_taken_as_in_a_call(devices):
    dp = jdp.DataParallel(lambda w, x, name: w * x if name == "a" else x, devices)
    x = np.ones((8, 2), np.float32)
    assert jdp.explain(dp.apply, np.float32(1), x, np.str_("a")).flops == dp(np.float32(1), x, np.str_("a")).size / 8
    with pytest.raises(TypeError, match=r"args\[1\] is an array of dtype <U1; devices hold numbers"):
        jdp.explain(dp.apply, np.float32(1), x, np.array(["a"] * 8))


def test_nnx(devices):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x))

    dp = jdp.DataParallel(Net(nnx.Rngs(0)), devices)
    mean = dp.module.norm.mean[...]
    report = jdp.explain(dp, X)
    assert report.batch_bytes == ROWS // 8 * 16 * 4
    step = dp.train_step(lambda model, b: jnp.mean((model(b["x"]) - b["y"]) ** 2), optax.adam(1e-3))
    report = jdp.explain(step, BATCH)
    params = 16 * 8 + 8 + 16 + 16
    carried = [p for c in report.collectives for p in c.parameters]
    assert len(carried) == len(set(carried)) == 4
    assert report.optimizer_bytes == 8 * params + 4
    assert dp.module.norm.mean[...] is mean or (dp.module.norm.mean[...] == mean).all()


def test_a_donated_array_that_no_result_replaces(dp):
    found = []
    with pytest.warns(UserWarning, match="another"), unused_donations(found):
        jax.jit(lambda x: x[:2], donate_argnums=0).lower(S((3,), jnp.float32))
        warnings.warn("another", UserWarning, stacklevel=1)
    assert found == ["float32[3]"]
    report = dataclasses.replace(jdp.explain(dp.apply, VARIABLES, X), unused_donations=tuple(found))
    assert "float32[3]. Return what replaces it" in re.sub(r"\s+", " ", str(report))


def test_the_table(dp):
    tx = optax.adam(1e-3)
    text = str(jdp.explain(dp.train_step(loss_fn, tx), state_of(tx), BATCH))
    for part in ("train_step of loss_fn on 8 x", "64 rows, at most 8", "optimizer's state", "all-reduce", "compiled"):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_bad_input(dp):
    with pytest.raises(TypeError, match=r"jdp.explain: fn is a dict; it is called\. Pass dp.apply, or a step\."):
        jdp.explain({})
    with pytest.raises(TypeError, match="jdp.explain: <lambda> comes to no program of jdp's"):
        jdp.explain(lambda x: x, X)
    with pytest.raises(ValueError, match="jdp.explain: data_dependent needs the values of its arguments"):

        def data_dependent(v, x):
            return dp.apply(v, x) if x.sum() > 0 else x

        jdp.explain(data_dependent, VARIABLES, X)
    with pytest.raises(ValueError, match="jdp.explain: .* needs the values of its arguments"):
        jdp.explain(jdp.DataParallel(lambda w, x: x[x > 0] * w).apply, 1.0, X)
    with pytest.raises(Exception, match="kernel"):
        jdp.explain(dp.apply, {"params": {}}, X)
    with pytest.raises(ValueError, match="the batch has 0 rows"):
        tx = optax.sgd(0.1)
        none = {name: S((0, *x.shape[1:]), x.dtype) for name, x in BATCH.items()}
        jdp.explain(dp.train_step(loss_fn, tx), state_of(tx), none)
    with pytest.raises(TypeError, match="state is a dict; a step takes a jdp.TrainState"):
        jdp.explain(dp.train_step(loss_fn, tx), dict(VARIABLES), BATCH)


def test_what_does_not_fit(dp, monkeypatch):
    report = jdp.explain(dp.apply, VARIABLES, X)
    assert report.fits is None and report.memory_bytes is None  # nobody knows of CPUs
    small = dataclasses.replace(report, memory_bytes=report.peak_bytes - 1)
    assert small.fits is False and "it does not fit" in str(small)
    assert dataclasses.replace(report, memory_bytes=report.peak_bytes).fits is True

    def refused(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 17.2G of 16.0G hbm\nmore")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refused)
    words = r"Model with 8 rows on each cpu does not compile: .* 17.2G of 16.0G hbm; arguments, .* Pass fewer rows, "
    with pytest.raises(RuntimeError, match=words):
        jdp.explain(dp.apply, VARIABLES, X)


@pytest.fixture
def described():
    try:
        return jdp.topology("h100", hosts=2, per_host=2)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.compilers
def test_on_devices_that_are_not_there(described):
    dp = jdp.DataParallel(MODEL, described)
    variables = dp.init(jax.random.key(0), jnp.ones((1, 16)))
    report = jdp.explain(dp.apply, variables, X)
    assert (report.devices, report.processes, report.platform) == (4, 2, "gpu")
    assert report.work.source == "estimated" and report.flops >= 2 * ROWS // 4 * (16 * WIDTH + WIDTH * 8)
    assert report.fits is True and report.memory_bytes > 60e9
    product = jdp.DataParallel(lambda w, x: x @ w, described)
    large = jdp.explain(product.apply, S((2**18, 2**16), jnp.float32), S((ROWS, 2**18), jnp.float32))
    assert large.fits is False and "it does not fit: a device has" in str(large)
    for call in (lambda: dp.apply(variables, np.ones((8, 16))), lambda: dp.value_and_grad(loss_fn)(variables, X)):
        with pytest.raises(RuntimeError, match="NVIDIA H100 .* only described; .* Pass the call to jdp.explain"):
            call()
    step = dp.train_step(loss_fn, optax.adam(1e-3))
    with pytest.raises(RuntimeError, match="only described"):
        step.init(variables)


@pytest.mark.compilers
def test_nnx_on_devices_that_are_not_there(described):
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    dp = jdp.DataParallel(model, described)
    assert jdp.explain(dp, X).devices == 4
    step = dp.train_step(lambda m, b: jnp.mean((m(b["x"]) - b["y"]) ** 2), optax.adam(1e-3))
    report = jdp.explain(step, BATCH)
    assert report.collective_bytes == 4 * (16 * 8 + 8) + 4
    assert sorted(p for c in report.collectives for p in c.parameters) == ["bias", "kernel"]
    with pytest.raises(RuntimeError, match="only described"):
        dp(np.ones((8, 16), np.float32))
    with pytest.raises(RuntimeError, match="only described"):
        step({"x": np.ones((8, 16), np.float32), "y": np.ones((8, 8), np.float32)})


def test_an_array_is_named_by_its_place_among_all_arguments():
    """Also where a string or a number stands before it, which is no array."""
    dp = jdp.DataParallel(lambda w, mode, tab, x: x @ w, devices=range(2), in_axes=(None, None, 0))
    w, x, table = np.ones((8, 2), np.float32), np.ones((16, 8), np.float32), np.ones((16, 2), np.float32)
    assert jdp.explain(dp.apply, w, "mode", table, x).unscattered == ("argument 1: float32[16, 2]",)
    dp = jdp.DataParallel(lambda w, b: b["x"] @ w, devices=range(2), in_axes=({"mode": None, "tab": None, "x": 0},))
    report = jdp.explain(dp.apply, w, {"mode": "mode", "tab": table, "x": x})
    assert report.unscattered == ("argument 0.tab: float32[16, 2]",)


@pytest.mark.full
@pytest.mark.parametrize("give", ["numpy", "placed", "prefetched"])
def test_the_batch_of_an_nnx_model_is_no_parameter(give):
    x = np.ones((16, 4), np.float32)
    dp = jdp.DataParallel(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), devices=range(4))
    step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    place = {"numpy": lambda: x, "prefetched": lambda: next(iter(dp.prefetch([x])))}
    place["placed"] = lambda: jax.device_put(x, NamedSharding(mesh, P("data")))
    for fn in (step, dp):
        report, plain = jdp.explain(fn, place[give]()), jdp.explain(fn, x)
        assert (report.rows, report.collectives) == (plain.rows, plain.collectives) and report.rows == (4, 4, 4, 4)
