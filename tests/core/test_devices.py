"""What counts as devices, and as an output device."""

import ast
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jdp
import jdp._core.devices as device_module


def double(params, x):
    return 2 * x


ROWS = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize(
    "given, ids",
    [
        (None, range(8)),
        ([0], [0]),
        ([2, 0, 5], [2, 0, 5]),
        (range(3), [0, 1, 2]),
        ((1, 2), [1, 2]),
        (["cpu:3", "cpu:1"], [3, 1]),
        (["cpu:4", 1], [4, 1]),
        ([np.int64(3), np.int32(0)], [3, 0]),
    ],
    ids=repr,
)
def test_devices_are_indices_strings_or_all_of_them_in_the_order_given(devices, given, ids):
    expected = [devices[i] for i in ids]
    s = jdp.scatter(ROWS, given)
    assert list(s.devices) == expected
    assert [chunk.devices() for chunk in s] == [{d} for d in expected]
    assert jdp.replicate(ROWS, given).devices() == set(expected)
    assert list(jdp.DataParallel(double, given).devices) == expected


def test_devices_may_be_jax_devices_beside_indices(devices):
    assert list(jdp.scatter(ROWS, [devices[3], 1, "cpu:0"]).devices) == [devices[3], devices[1], devices[0]]


def test_the_first_device_is_the_primary_device(devices):
    s = jdp.scatter(ROWS, [5, 0])
    assert jdp.gather(s).devices() == {devices[5]}
    assert jdp.reduce_add(s).devices() == {devices[5]}
    assert jdp.DataParallel(double, [5, 0])(1.0, ROWS).devices() == {devices[5]}


VERBS = {
    "scatter": lambda devices: jdp.scatter(ROWS, devices),
    "replicate": lambda devices: jdp.replicate(ROWS, devices),
    "DataParallel": lambda devices: jdp.DataParallel(double, devices),
    "data_parallel": lambda devices: jdp.data_parallel(double, 1.0, ROWS, devices),
}
each_verb = pytest.mark.parametrize("verb", VERBS)


@each_verb
@pytest.mark.parametrize(
    "given, match",
    [
        ([], "empty"),
        ((), "empty"),
        ([0, 0], "cpu:0.* twice|duplicate"),
        ([1, 0, "cpu:1"], "cpu:1.* twice|duplicate"),
        ([0, 8], "8"),
        ([-1], "-1"),
        ([True], "True"),
        ([False], "False"),
        (["cpu:8"], "cpu:8"),
        (["cpu:-1"], "cpu:-1"),
        (["tpu:0"], "tpu:0"),
        (["nonsense"], "nonsense"),
        ([""], "''"),
    ],
    ids=repr,
)
def test_empty_duplicate_and_unknown_devices_are_refused(refused, verb, given, match):
    with refused(ValueError, verb, match):
        VERBS[verb](given)


@each_verb
@pytest.mark.parametrize(
    "given", [{0, 1}, 2, "cpu:0", iter([0]), {0: 1}], ids=["set", "int", "str", "iterator", "dict"]
)
def test_devices_that_are_no_sequence_are_refused(refused, verb, given):
    with refused(TypeError, verb, "sequence"):
        VERBS[verb](given)


@pytest.mark.parametrize("element", [1.5, None, object()], ids=["float", "None", "object"])
def test_an_element_that_is_no_device_is_refused(element):
    with pytest.raises((TypeError, ValueError), match=r"^jdp\.scatter: devices\[1\]"):
        jdp.scatter(ROWS, [0, element])


def gpu(index, memory=100, cores=100):
    """Stands in for a GPU, which the test machine has none of."""
    device = mock.Mock(spec=jax.devices()[0], platform="gpu", id=index, core_count=cores, process_index=0)
    device.memory_stats.return_value = {"bytes_limit": memory}
    device.__str__ = lambda self: f"gpu:{index}"
    return device


@each_verb
def test_devices_of_several_platforms_are_refused(refused, devices, verb):
    with refused(ValueError, verb, "(?s)cpu.*gpu"):
        VERBS[verb]([devices[0], gpu(0)])


@pytest.mark.parametrize("uneven", [{"memory": 74}, {"cores": 74}, {"memory": 10, "cores": 10}], ids=repr)
def test_devices_below_three_quarters_of_another_bring_one_warning(uneven):
    pair = [gpu(0), gpu(1, **uneven)]
    with pytest.warns(UserWarning) as warned:
        jdp.DataParallel(double, pair)
    assert len(warned) == 1
    # both are named
    text = str(warned[0].message)
    assert all(name in text for name in ("gpu:0", "gpu:1")) or all(repr(d) in text for d in pair)


def test_devices_at_three_quarters_bring_no_warning():
    pair = [gpu(0), gpu(1, memory=75, cores=75)]
    assert list(jdp.DataParallel(double, pair).devices) == pair


@pytest.mark.parametrize(
    "given, index",
    [(None, 1), (6, 6), ("cpu:2", 2), ("cpu", 0), (-1, 0)],
    ids=repr,
)
def test_output_device(devices, given, index):
    s = jdp.scatter(ROWS, [1, 2])
    assert jdp.gather(s, given).devices() == {devices[index]}
    assert jdp.reduce_add(s, given).devices() == {devices[index]}
    dp = jdp.DataParallel(double, [1, 2], output_device=given)
    y = dp(1.0, ROWS)
    assert y.devices() == {devices[index]}
    np.testing.assert_array_equal(y, 2 * ROWS)


def test_output_device_may_be_a_jax_device_that_is_no_replica(devices):
    assert jdp.gather(jdp.scatter(ROWS, [0, 1]), devices[7]).devices() == {devices[7]}


OUTPUTS = {
    "gather": lambda device: jdp.gather(jdp.scatter(ROWS, [0, 1]), device),
    "reduce_add": lambda device: jdp.reduce_add(jdp.scatter(ROWS, [0, 1]), device),
    "DataParallel": lambda device: jdp.DataParallel(double, [0, 1], output_device=device),
}


@pytest.mark.parametrize("verb", OUTPUTS)
@pytest.mark.parametrize("given", [8, -2, True, "cpu:8", "nonsense"], ids=repr)
def test_unknown_output_devices_are_refused(refused, verb, given):
    with refused(ValueError, verb, str(given)):
        OUTPUTS[verb](given)


@pytest.mark.parametrize("text", ["all", "sharded"])
def test_all_is_for_sums_and_sharded_is_for_rows(text):
    verb = {"all": "gather", "sharded": "reduce_add"}[text]
    with pytest.raises(ValueError, match=rf"^jdp\.{verb}: .*{text}"):
        OUTPUTS[verb](text)


def test_one_device_goes_through_the_same_code(same):
    one, two = jdp.scatter({"x": ROWS}, [0]), jdp.scatter({"x": ROWS}, [0, 1])
    assert type(one) is type(two) is jdp.Scattered
    same(jdp.gather(one), jdp.gather(two))


def test_the_virtual_devices_are_there_and_asking_again_is_harmless(devices):
    jdp.virtual_cpu_devices(8)
    assert len(jax.devices("cpu")) == len(devices) == 8


def test_virtual_devices_after_jax_has_started_are_refused(refused, devices):
    with refused(RuntimeError, "virtual_cpu_devices", "(?s)8.*started|started.*8"):
        jdp.virtual_cpu_devices(4)
    assert jax.devices() == devices


@pytest.mark.parametrize("bad", [0, -1])
def test_fewer_than_one_virtual_device_is_refused(refused, bad):
    with refused(ValueError, "virtual_cpu_devices", str(bad)):
        jdp.virtual_cpu_devices(bad)


def test_a_device_has_what_type_checkers_are_told_of_it(devices):
    tree = ast.parse(pathlib.Path(device_module.__file__).read_text())
    (told,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Device"]
    names = [node.name for node in told.body if isinstance(node, ast.FunctionDef)]
    assert "platform" in names and [name for name in names if not hasattr(devices[0], name)] == []
    assert device_module.Device is jax.Device


# --- a mesh ---


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_one_axis_is_its_devices(kind):
    mesh = Mesh(np.array(jax.devices()[3::-1]), ("replicas",), axis_types=(kind,))
    x = np.arange(10.0, dtype=np.float32)
    dp = jdp.DataParallel(lambda w, x: w * x + jax.lax.axis_index("replicas"), mesh)
    assert dp.devices == tuple(jax.devices()[3::-1]) and dp.mesh.axis_names == ("replicas",)
    assert list(dp.mesh.devices.flat) == list(mesh.devices.flat)
    np.testing.assert_array_equal(dp(np.float32(2), x), 2 * x + np.repeat(range(4), [3, 3, 3, 1]))
    step = dp.train_step(lambda v, x: jnp.mean(v["params"] * x), optax.sgd(1.0))
    state, _ = step(step.init({"params": np.float32(2)}), x)
    np.testing.assert_allclose(state.params, 2 - x.mean(), rtol=1e-6)
    assert jdp.DataParallel(lambda w, x: w, mesh, axis_name="replicas").mesh.axis_names == ("replicas",)
    np.testing.assert_array_equal(jdp.data_parallel(lambda w, x: w * x, np.float32(2), x, mesh), 2 * x)
    assert jdp.scatter(x, mesh).devices == dp.devices and jdp.replicate(x, mesh).sharding.device_set == {*dp.devices}


def test_other_meshes_are_refused(refused):
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    match = (
        r"devices is a mesh of the axes data \(2\), model \(2\); .*mesh\.devices\[:, 0\].*DataParallel\(model, mesh\)"
    )
    with refused(ValueError, "scatter", match=match):
        jdp.scatter(np.ones(4), two)
    for verb, call in (("DataParallel", jdp.DataParallel), ("scatter", jdp.scatter)):
        with refused(
            ValueError, verb, match=r"devices is an array of shape \(2, 2\); .*devices\.ravel\(\).*Mesh\(devices"
        ):
            call(np.ones(4) if verb == "scatter" else lambda w, x: x, two.devices)
    for devices in (two.devices[:, 0], two.devices.flat):
        x = np.arange(5.0)
        np.testing.assert_array_equal(jdp.DataParallel(lambda w, x: w * x, devices)(2.0, x), 2 * x)
    with refused(ValueError, "DataParallel", match="axis_name is 'rows', and the mesh has the axis 'data'"):
        jdp.DataParallel(lambda w, x: x, Mesh(np.array(jax.devices()[:2]), ("data",)), axis_name="rows")


@pytest.mark.full
def test_a_forked_process_is_refused():
    """It has none of JAX's threads: a call would wait forever. A fork from before the first device is one's own."""
    script = """
import os, warnings, jdp, numpy as np
warnings.simplefilter("ignore")
jdp.virtual_cpu_devices(2)

def forked(what):
    if not os.fork():
        try:
            print(what(), flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()

def call():
    return jdp.DataParallel(lambda w, x: x * w)(2.0, np.ones(4)).sum()

forked(call)
dp = jdp.DataParallel(lambda w, x: x * w)
print(dp(2.0, np.ones(4)).sum(), flush=True)
forked(lambda: dp(2.0, np.ones(4)))
forked(lambda: jdp.replicate(np.ones(4)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    before, parent, *refused = run.stdout.splitlines()
    assert before == parent == "8.0" and len(refused) == 2
    assert all("was forked from" in line and "get_context('spawn')" in line for line in refused)
