"""topology: devices of machines that are not here. The compilers for them are not installed in every environment."""

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jdp
from jdp import topology
from jdp._tools.topology.chips import CHIPS, TARGETS, target_config
from jdp._tools.topology.quiet import quiet
from jdp._tools.topology.topology import GPUS, TPUS, _checked_count, _gpus, _tpus


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_gpus = pytest.mark.skipif(not installed("jax_plugins.xla_cuda12"), reason="no CUDA plugin: plan-gpu")
needs_tpus = pytest.mark.skipif(not installed("libtpu"), reason="no libtpu: plan-tpu")


def compiled(devices):
    """The program of a sum over the devices, of a matrix product of each one's rows."""
    mesh = Mesh(np.array(devices), ("data",))

    def f(w, x):
        return jax.lax.psum(x.T @ (x @ w), "data")

    split = PartitionSpec("data")
    g = jax.shard_map(f, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=PartitionSpec(), check_vma=False)
    w, x = (jax.ShapeDtypeStruct((n, 256), jnp.bfloat16) for n in (256, 32 * len(devices)))
    with quiet():
        return jax.jit(g).lower(w, x).compile().as_text()


@pytest.mark.compilers
@needs_gpus
@pytest.mark.parametrize("name", GPUS)
def test_programs_are_compiled_for_gpus_that_are_not_here(name):
    devices = topology(name, hosts=3, per_host=4)
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert {d.device_kind for d in devices} == {CHIPS[name].device_kind}
    assert {d.platform for d in devices} == {"gpu"}
    assert re.search(r"all-reduce.*replica_groups=\{\{0,1,2,3,4,5,6,7,8,9,10,11\}\}", compiled(devices))


@pytest.mark.compilers
@needs_tpus
@pytest.mark.parametrize(
    "name, shape, hosts", [("v4", "4x4x4", 16), ("v5e", "4x4", 4), ("v5p", "2x2x2", 2), ("v6e", "2x4", 2)]
)
def test_programs_are_compiled_for_tpus_that_are_not_here(name, shape, hosts):
    devices = topology(name, shape)
    assert len(devices) == math.prod(map(int, shape.split("x")))  # a device is a chip, of v4 too
    assert len({d.process_index for d in devices}) == hosts
    assert {d.device_kind for d in devices} == {CHIPS[name].device_kind}
    if len(devices) <= 16:
        assert "all-reduce" in compiled(devices)


@pytest.mark.compilers
@needs_gpus
def test_the_same_call_gives_the_same_devices():
    assert topology("h100") is topology("h100", hosts=1, per_host=8)
    assert len(topology("h100")) == 8
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.compilers
@needs_tpus
def test_libtpu_says_as_much_memory_as_the_chips_table():
    devices = topology("v5e", "2x2")
    mesh = Mesh(np.array(devices), ("data",))
    x = jax.ShapeDtypeStruct((4 * 400_000, 100_000), jnp.float32)
    split = PartitionSpec("data")
    f = jax.shard_map(lambda x: jnp.tanh(x).T @ jnp.sin(x), mesh=mesh, in_specs=split, out_specs=split)
    with quiet(), pytest.raises(jax.errors.JaxRuntimeError, match=r"available HBM \(15\.75G\)"):
        jax.jit(f).lower(x).compile()
    assert CHIPS["v5e"].memory_bytes == 15.75 * 2**30


@pytest.mark.compilers
@needs_gpus
@needs_tpus
def test_nothing_is_logged_and_no_variable_is_left():
    code = (
        "import os, sys, jax; from jdp import topology\n"
        "print('begin', file=sys.stderr, flush=True); before = dict(os.environ)\n"
        "topology('h100', hosts=2); topology('v5e', '2x2'); assert dict(os.environ) == before\n"
        "print('end', file=sys.stderr, flush=True)"
    )
    for variables in ({"JAX_PLATFORMS": "cpu"}, {}):
        kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=kept | variables, cwd="."
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr.partition("begin\n")[2] == "end\n"


@pytest.mark.compilers
@needs_gpus
def test_jax_may_have_started_without_the_plugin():
    code = "import jax; jax.devices()\nfrom jdp import topology\n"
    code += "print(len(topology('a100', hosts=2)))"
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout == "16\n", run.stderr


@pytest.mark.parametrize("name, extra", [("h100", "plan-gpu"), ("v5e", "plan-tpu")])
def test_a_missing_extra_is_named(monkeypatch, refused, name, extra):
    monkeypatch.setattr("jdp._tools.topology.topology._installed", lambda module: False)
    _gpus.cache_clear(), _tpus.cache_clear()
    shape = "4x4" if name == "v5e" else None
    with refused(ImportError, "topology", match=rf'device\. Run pip install -e "\.\[{extra}\]" in a checkout'):
        topology(name, shape)


@pytest.mark.parametrize(
    "args, kwargs, match",
    [
        (("h101",), {}, "name is 'h101'.*a100, h100, h200, b200 .* v4, v5e, v5p, v6e"),
        ((100,), {}, "name is 100"),
        (("h100",), {"hosts": 0}, "hosts is 0"),
        (("h100",), {"hosts": -1}, "hosts is -1"),
        (("h100",), {"hosts": True}, "hosts is True"),
        (("h100",), {"hosts": 2.0}, "hosts is 2.0"),
        (("h100",), {"hosts": "2"}, "hosts is '2'"),
        (("h100",), {"per_host": 0}, "per_host is 0"),
        (("h100",), {"per_host": 16}, "per_host is 16; NVLink connects 8"),
        (("h100", "4x4"), {}, "shape is '4x4', and h100 is a GPU"),
        (("v5e", "4x4"), {"hosts": 2}, "hosts is 2 .* v5e is a TPU"),
        (("v5p", "4x4x4"), {"per_host": 4}, "per_host is 4, and v5p is a TPU"),
        (("v5e",), {}, "shape is None; v5es are connected in 2 dimensions"),
        (("v5e", 16), {}, "shape is 16"),
        (("v5e", "big"), {}, "shape is 'big'"),
        (("v5e", "0x2"), {}, "shape is '0x2'"),
        (("v5e", "4x4x4"), {}, "shape is '4x4x4'; v5es are connected in 2"),
        (("v5p", "8x16"), {}, "shape is '8x16'; v5ps are connected in 3"),
        (("v5e", "3x3"), {}, "shape is '3x3'; a host has 2x2"),
        (("v5e", "32x16"), {}, "shape is '32x16'; the largest of v5e is 16x16"),
        (("v5p", "32x2x2"), {}, "the largest of v5p is 16x20x28"),
    ],
)
def test_bad_arguments_are_refused(refused, args, kwargs, match):
    with refused(ValueError, "topology", match=match):
        topology(*args, **kwargs)


def test_every_gpu_has_a_target_and_every_figure_a_source():
    assert set(TARGETS) == set(GPUS) and {*GPUS, *TPUS} == set(CHIPS)
    for chip in CHIPS.values():
        named = ", ".join(chip.sources)
        figures = ["peaks", "memory_bytes", "bytes_per_second", "link", "protocols"]
        assert all(figure in named for figure in figures + ["network"] * (chip.kind == "gpu")), chip.name
        assert all(chip.sources.values()) and "bf16" in chip.peaks


def test_a_target_agrees_with_the_chips_figures():
    for name, target in TARGETS.items():
        chip = CHIPS[name]
        assert f"device_memory_size: {chip.memory_bytes}\n" in target_config(name)
        assert target.memory_bandwidth == pytest.approx(chip.bytes_per_second, rel=0.05)
        # float32 lanes, a multiply and an add each, at the boost clock: the data sheet's peak
        lanes = target.core_count * target.fpus_per_core * target.clock_rate_ghz * 1e9 * 2
        assert lanes == pytest.approx(chip.peaks["f32"], rel=0.05)


def test_flops_are_those_of_the_units_that_jax_uses():
    h100, v5e = CHIPS["h100"], CHIPS["v5e"]
    assert h100.flops("bf16") == 989.4e12 == 2 * h100.flops("f32")  # TensorFloat-32
    assert h100.flops("c64") == h100.peaks["f32"] and h100.flops("f64") == h100.flops("c128")
    assert v5e.flops("f32") == v5e.flops("bf16") == 197e12
    assert v5e.flops("f64") == v5e.peaks["f32"]


def test_quiet_drops_the_loggers_lines_alone(capfd):
    with quiet():
        os.write(
            2, b"I0000 00:00:1795306221.128085   12249 cudart_stub.cc:31] Could not find cuda drivers\nsomething else\n"
        )
        print("and this", file=sys.stderr)
    assert sorted(capfd.readouterr().err.splitlines()) == ["and this", "something else"]


def test_quiet_does_not_keep_the_last_words_of_a_compiler_that_aborts():
    code = """
import os
from jdp._tools.topology.quiet import quiet
with quiet():
    os.write(2, b"I0000 00:00:1795306221.128085 1 a.cc:1] starting\\nF0000 a.cc:2] Check failed: size > 0\\nno newline")
    os.abort()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGABRT
    # (JAX's CUDA plugin, where it is installed, speaks before.)
    assert done.stderr.endswith("F0000 a.cc:2] Check failed: size > 0\nno newline") and "starting" not in done.stderr


@pytest.mark.compilers
@needs_gpus
def test_a_wrapper_of_described_devices_leaves_the_model_where_it_is():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    dp = jdp.DataParallel(model, topology("h100", hosts=2))
    step = dp.train_step(lambda model, x: jnp.mean(model(x) ** 2), optax.adam(1e-3))
    report = jdp.explain(step, jax.ShapeDtypeStruct((64, 4), jnp.float32))
    assert report.devices == 16 and report.device_kind == CHIPS["h100"].device_kind
    assert [c.group for c in report.collectives] == [16] * len(report.collectives) != []
    assert model.kernel[...].devices() == before.devices() == {jax.devices()[0]}


def test_a_number_of_hosts_may_be_an_integer_of_numpy(refused):
    assert type(_checked_count("hosts", np.int64(2))) is int
    for count in (0, True, 2.0, np.float32(2), "2"):
        with refused(ValueError, "topology", match="hosts is .*; it is a number of machines or GPUs"):
            _checked_count("hosts", count)
