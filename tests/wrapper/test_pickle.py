"""Wrappers pickle and copy: devices by platform and id."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp
from jdp._model import config

ROWS = np.random.RandomState(0).randn(5, 3).astype(np.float32)


def round_trip(dp):
    return pickle.loads(pickle.dumps(dp))


COPIES = [copy.copy, copy.deepcopy, round_trip]


class Model(nn.Module):
    """nn.Dense itself does not pickle: its default initializer is a closure."""

    features: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(x)


def double(params, x):
    return x * params


class Gained(jdp.DataParallel):
    """A subclass with a step of its own."""

    def gather(self, outputs, output_device):
        return super().gather(outputs, output_device) + 1


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.linear

    def __call__(self, x):
        return self.dropout(self.norm(self.tied(self.linear(x))))


@pytest.mark.one_case
@pytest.mark.parametrize("again", COPIES)
def test_linen(devices, again):
    model = Model(2)
    dp = jdp.DataParallel(
        model, [3, 1], "cpu:5", axis_name="rows", reduce_state="mean", in_axes=(0,), out_axes=0, state_axes={"cache": 0}
    )
    variables = dp.init(jax.random.key(0), ROWS)
    before = dp.apply(variables, ROWS)
    copied = again(dp)
    assert type(copied) is jdp.DataParallel and copied is not dp
    assert tuple(copied.devices) == (devices[3], devices[1]) and copied.output_device == devices[5]
    assert copied.dim == dp.dim and copied.module == model
    y = copied.apply(variables, ROWS)
    np.testing.assert_array_equal(y, before)
    assert y.devices() == {devices[5]}
    np.testing.assert_array_equal(again(copied).apply(variables, ROWS), before)  # and once more
    np.testing.assert_array_equal(dp.apply(variables, ROWS), before)


def test_a_wrapper_of_described_devices_is_one_of_devices_where_they_are_real(devices, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(config.Config, "is_described", True)
        dp = jdp.DataParallel(double, devices[:2])
        with pytest.raises(RuntimeError, match="devices of a topology, which are only described"):
            dp(2.0, ROWS)
        packed = pickle.dumps(dp)
    np.testing.assert_allclose(pickle.loads(packed)(2.0, ROWS), 2 * ROWS)


@pytest.mark.parametrize("again", COPIES)
def test_functions_and_subclasses(again):
    for kind, want in ((jdp.DataParallel, 2 * ROWS), (Gained, 2 * ROWS + 1)):
        dp = kind(double, devices=range(3))
        copied = again(dp)
        assert type(copied) is kind and copied.module is double
        np.testing.assert_array_equal(copied(np.float32(2), ROWS), want)


@pytest.mark.full
@pytest.mark.parametrize("again", [copy.deepcopy, round_trip])
def test_nnx(devices, again):
    dp = jdp.DataParallel(Net(nnx.Rngs(0)), devices=[2, 3, 4], output_device="cpu:1")
    dp(ROWS)
    copied = again(dp)
    assert copied.module is not dp.module and tuple(copied.devices) == tuple(devices[2:5])
    assert copied.module.tied is copied.module.linear
    for leaf in jax.tree.leaves(nnx.state(copied)):
        assert leaf.is_fully_replicated and leaf.devices() == set(devices[2:5])
    stats = np.asarray(dp.module.norm.mean[...])
    np.testing.assert_array_equal(copied.module.norm.mean[...], stats)
    y = copied(ROWS)
    assert y.devices() == {devices[1]}
    np.testing.assert_array_equal(dp.module.norm.mean[...], stats)  # the original did not move
    np.testing.assert_array_equal(dp(ROWS), y)  # the same masks: keys and counts were copied too


def test_output_device_forms_survive():
    for where in (None, "sharded", "cpu", -1):
        dp = jdp.DataParallel(double, devices=[1, 2], output_device=where)
        copied = round_trip(dp)
        w = jdp.replicate(np.float32(2), [1, 2])
        assert copied(w, ROWS[:4]).sharding == dp(w, ROWS[:4]).sharding


def test_a_wrapper_within_a_pickled_tree():
    dp = jdp.DataParallel(Model(2), devices=range(2))
    variables = dp.init(jax.random.key(0), ROWS)
    loaded, same = pickle.loads(pickle.dumps([{"dp": dp, "variables": variables}, dp]))
    assert loaded["dp"] is same
    np.testing.assert_array_equal(same.apply(loaded["variables"], ROWS), dp.apply(variables, ROWS))


def test_a_pickle_does_not_hold_programs_or_grow_with_use():
    dp = jdp.DataParallel(double, devices=range(2))
    fresh = len(pickle.dumps(dp))
    for size in (1, 2, 3, 5):
        dp(jnp.float32(2), ROWS[:size])
    assert len(pickle.dumps(dp)) == fresh < 2000


SCRIPT = """
    import pickle, sys
    sys.path.insert(0, {here!r})
    import jdp
    jdp.virtual_cpu_devices(2)
    import numpy as np
    for path in sys.argv[1:]:
        try:
            dp = pickle.load(open(path, "rb"))
        except ValueError as error:
            print("ValueError:", str(error).replace("\\n", " "))
        else:
            print("loaded", [d.id for d in dp.devices], type(dp.module).__name__)
"""


@pytest.mark.full
def test_a_machine_without_the_devices_is_told_which(tmp_path):
    """Row 139j: torch loads it, and fails at the first call."""
    wrappers = {
        "linen": jdp.DataParallel(Model(2), devices=[0, 3, 5]),
        "nnx": jdp.DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), devices=[1, 6]),
        "output": jdp.DataParallel(Model(2), devices=[0, 1], output_device=7),
        "there": jdp.DataParallel(Model(2), devices=[1, 0]),
    }
    for name, dp in wrappers.items():
        (tmp_path / name).write_bytes(pickle.dumps(dp))
    here = os.path.dirname(os.path.abspath(__file__))
    script = textwrap.dedent(SCRIPT).format(here=here)
    command = [sys.executable, "-c", script, *(str(tmp_path / name) for name in wrappers)]
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(here))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    linen, nnx_line, output, there = done.stdout.splitlines()
    assert linen.startswith("ValueError:") and "cpu:3" in linen and "cpu:5" in linen
    assert nnx_line.startswith("ValueError:") and "cpu:6" in nnx_line
    assert output.startswith("ValueError:") and "cpu:7" in output
    assert there == "loaded [1, 0] Model"


def times(w, x):
    return w * x


@pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply", "gather"])
def test_a_bound_step_is_pickled_by_its_name(name):
    dp = jdp.DataParallel(times, range(2))
    step = pickle.loads(pickle.dumps(getattr(dp, name)))
    assert step.__name__ == name and step.__self__.devices == dp.devices
    method = getattr(jdp.DataParallel, name)
    assert pickle.loads(pickle.dumps(method)) is method
