"""The collectives of compiled programs: on CPU devices those that were asked for, on GPU and TPU in their own forms."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdp
from jdp._tools.explain.collectives import carried, collectives
from jdp._tools.explain.hlo import parse

HLO = pathlib.Path(__file__).parent / "hlo"


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def made():
    """tests/explain/hlo/make.py, which compiled the saved programs."""
    spec = importlib.util.spec_from_file_location("make", HLO / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def saved(name):
    return collectives(parse((HLO / f"{name}.txt").read_text()))


CUT, WHOLE = P("data"), P()


def of(fn, *args, devices, specs=CUT, out=WHOLE):
    """The collectives of `fn`, compiled for CPU devices with its first arguments whole and the last one cut."""
    mesh = Mesh(np.array(devices), ("data",))
    specs = (*[P()] * (len(args) - 1), specs)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return collectives(parse(jax.jit(mapped).lower(*args).compile().as_text()))


def test_a_sum_of_known_arrays(devices):
    def fn(w, x):
        with jax.named_scope("reduce.params.w"):
            return jax.lax.psum(w * x.sum(), "data")

    (one,) = of(fn, np.ones((16, 4), np.float32), np.ones((8, 2), np.float32), devices=devices)
    assert (one.kind, one.dtype, one.bytes, one.arrays) == ("all-reduce", "f32", 256, (("f32", (16, 4)),))
    assert (one.runs, one.in_loop, one.group) == (1, False, 8)
    assert (one.asynchronous, one.overlapped, one.in_flight, one.name) == (False, (), False, one.done)
    assert carried(one, {"params.w": ("f32", (16, 4)), "params.v": ("f32", (16, 4))}) == ("params.w",)


def test_over_one_device_there_is_none(devices):
    assert of(lambda x: jax.lax.psum(x, "data"), np.ones((4, 2)), devices=devices[:1]) == []


def test_groups_are_counted(devices):
    mesh = Mesh(np.array(devices).reshape(4, 2), ("a", "b"))
    fn = jax.shard_map(lambda x: jax.lax.psum(x, "b"), mesh=mesh, in_specs=P(("a", "b")), out_specs=P("a"))
    (one,) = collectives(parse(jax.jit(fn).lower(np.ones((8, 3), np.float32)).compile().as_text()))
    assert (one.group, one.bytes) == (2, 12)


def test_in_a_loop_it_runs_as_often_as_the_loop(devices):
    def fn(w, x):
        def body(w, _):  # the carry depends on it, so that XLA cannot move it out
            return jnp.tanh(jax.lax.psum(w * x.sum(), "data")), None

        def outer(w, _):
            return jax.lax.scan(body, w, None, length=5)[0], None

        return jax.lax.scan(outer, w, None, length=3)[0]

    (one,) = of(fn, np.ones(6, np.float32), np.ones((8, 2), np.float32), devices=devices)
    assert (one.kind, one.bytes, one.runs, one.in_loop) == ("all-reduce", 24, 15, True)


def test_in_a_loop_of_unknown_length(devices):
    def fn(w, x):
        return jax.lax.while_loop(lambda w: w[0] < 100, lambda w: jax.lax.psum(w * x.sum(), "data"), w)

    (one,) = of(fn, np.ones(6, np.float32), np.ones((8, 2), np.float32), devices=devices)
    assert (one.runs, one.in_loop) == (None, True)


def test_scattered_sums_and_gathered_parts(devices):
    def fn(w, x):
        part = jax.lax.psum_scatter(w * x.sum(), "data", tiled=True)
        return jax.lax.all_gather(jnp.tanh(part), "data", tiled=True)

    scatter, gather = of(fn, np.ones((16, 3), np.float32), np.ones((8, 2), np.float32), devices=devices)
    assert (scatter.kind, scatter.bytes, scatter.arrays) == ("reduce-scatter", 192, (("f32", (16, 3)),))  # its operand
    assert (gather.kind, gather.bytes, gather.arrays) == ("all-gather", 192, (("f32", (16, 3)),))  # its result


@pytest.mark.parametrize(
    "fn, kind",
    [
        (lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]), "collective-permute"),
        (lambda x: jax.lax.all_to_all(x, "data", 1, 1, tiled=True), "all-to-all"),
    ],
)
def test_other_kinds(fn, kind, devices):
    (one,) = of(fn, np.ones((8, 16), np.float32), devices=devices, out=P("data"))
    assert (one.kind, one.bytes, one.group) == (kind, 64, 8)


@pytest.mark.one_case
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"shard_optimizer": True}])
def test_a_training_step_sends_each_gradient_once(options):
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"] + v["params"]["b"])
    step = dp.train_step(lambda v, batch: jnp.mean(dp.module(v, batch) ** 2), optax.adam(0.1), **options)
    state = step.init({"params": {"w": np.ones((16, 24), np.float32), "b": np.ones(24, np.float32)}})
    found = collectives(parse(step.lower(state, np.ones((32, 16), np.float32)).compile().as_text()))
    assert not any(one.in_loop for one in found)
    gradients = (16 * 24 + 24) * 4
    reduced = sum(one.bytes for one in found if one.kind in ("all-reduce", "reduce-scatter"))
    assert reduced in (gradients + 4, gradients + 8)  # the loss, and with uneven rows their count
    leaves = {"w": ("f32", (16, 24)), "b": ("f32", (24,))}  # XLA sends the one transposed
    assert sorted(p for one in found if one.kind != "all-gather" for p in carried(one, leaves)) == ["b", "w"]
    gathered = sum(one.bytes for one in found if one.kind == "all-gather")
    assert gathered == (gradients if "shard_optimizer" in options else 0)


LEAVES = {
    f"layer_{n}.{kind}": ("f32", shape) for n in range(3) for kind, shape in (("kernel", (256, 256)), ("bias", (256,)))
}


def test_gpu_waits_where_nothing_was_pulled_apart():
    (one,) = saved("gpu_waits")
    assert (one.kind, one.bytes, one.group) == ("all-reduce", 2 * (256 * 256 + 256) * 4, 8)
    assert (one.asynchronous, one.in_flight) == (False, False)
    assert sorted(one.arrays) == sorted(shape for path, shape in LEAVES.items() if "layer_2" not in path)
    assert set(carried(one, LEAVES)) == {path for path in LEAVES if "layer_2" not in path}


def test_gpu_sums_while_it_computes():
    found = saved("gpu_all_reduce")
    assert len(found) > 1 and all(one.asynchronous and one.kind == "all-reduce" for one in found)
    assert sum(one.bytes for one in found) == 3 * (256 * 256 + 256) * 4
    assert sorted(path for one in found for path in carried(one, LEAVES)) == sorted(LEAVES)
    text = (HLO / "gpu_all_reduce.txt").read_text()
    for one in found:  # what is named is in the text between start and done, and nothing in between is left out
        between = text[text.index(f"%{one.name} = ") : text.index(f"%{one.done} = ")]
        products = {line.split()[0][1:] for line in between.splitlines() if " %gemm" in line and " fusion(" in line}
        assert products <= set(one.overlapped) and all(f"%{name} = " in between for name in one.overlapped)
    assert any("gemm" in name for one in found for name in one.overlapped)
    assert not any(one.in_flight for one in found[-1:])  # after the last nothing is left to compute


def test_gpu_scatters_and_gathers():
    scatter, gather = saved("gpu_zero")
    gradients = 2 * (256 * 256 + 256) * 4
    assert (scatter.kind, scatter.bytes, gather.kind, gather.bytes) == (
        "reduce-scatter",
        gradients,
        "all-gather",
        gradients,
    )
    assert set(carried(scatter, LEAVES)) == {path for path in LEAVES if "layer_2" not in path}


@pytest.mark.parametrize("name, group", [("gpu_loop", 8), ("tpu_loop", 16)])
def test_gpu_and_tpu_in_a_loop(name, group):
    (one,) = saved(name)
    assert (one.bytes, one.runs, one.in_loop, one.group) == (2 * (64 * 64 + 64) * 4, 4, True, group)
    assert len(carried(one, LEAVES)) == 4


def test_tpu_sums_while_it_computes():
    found = saved("tpu_all_reduce")
    assert sum(one.bytes for one in found) == 2 * (1024 * 1024 + 1024) * 2 and {one.dtype for one in found} == {"bf16"}
    assert sorted(path for one in found for path in carried(one, LEAVES)) == [p for p in sorted(LEAVES) if "2" not in p]
    (flying,) = (one for one in found if one.in_flight)
    assert flying.asynchronous and flying.bytes == 1024 * 1024 * 2 and flying.name.startswith("async-collective-start")
    module = parse((HLO / "tpu_all_reduce.txt").read_text())
    for name in flying.overlapped:  # they carry it on, and multiply matrices meanwhile
        (called,) = (module.computations[c] for _, c in module.entry.by_name[name].called)
        assert {"all-reduce", "convolution"} <= {i.opcode for i in called}


def test_tpu_gathers_while_it_computes():
    gathers = [one for one in saved("tpu_all_gather") if one.kind == "all-gather"]
    assert [one.arrays for one in gathers] == [(("bf16", (1024, 1024)),)] * 2
    assert [one.in_flight for one in gathers] == [False, True]


WRAPPED = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%wrapped (q: f32[8]) -> f32[2] {
  %q = f32[8]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%q), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[8]{0} get-tuple-element(%t), index=1
  %cb = f32[8]{0} collective-broadcast(%v), replica_groups={{0,1},{2,3}}
  %alone = f32[8]{0} all-reduce(%v), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  ROOT %u = (s32[], f32[8]{0}) tuple(%i, %cb)
}

%cond (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %rs-start = ((f32[8]{0}), f32[2]{0}) async-start(%p), calls=%wrapped
  %copied = f32[8]{0} copy(%p)
  %renamed = f32[2,4]{1,0} bitcast(%copied)
  %computed = f32[8]{0} sine(%copied)
  %rs-done = f32[2]{0} async-done(%rs-start)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]{0}) tuple(%zero, %computed)
  %loop = (s32[], f32[8]{0}) while(%init), condition=%cond, body=%body
  ROOT %r = f32[2]{0} copy(%rs-done)
}
"""


def test_one_that_is_wrapped_and_one_that_is_alone():
    scatter, broadcast = collectives(parse(WRAPPED))
    assert (scatter.kind, scatter.bytes, scatter.group, scatter.done) == ("reduce-scatter", 32, 4, "rs-done")
    assert scatter.overlapped == ("computed",)  # the copy and the bitcast compute nothing
    assert (broadcast.kind, broadcast.bytes, broadcast.group) == ("collective-broadcast", 32, 2)
    assert (broadcast.runs, broadcast.in_loop) == (None, True)


FLATTENED = """HloModule m, is_scheduled=true, num_partitions=4

%cutting (q: f32[32]) -> f32[24] {
  %q = f32[32]{0} parameter(0)
  ROOT %first = f32[24]{0} slice(%q), slice={[0:24]}
}

ENTRY %main (a: f32[6,4], b: f32[8]) -> (f32[2,3,4], f32[8]) {
  %a = f32[6,4]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %flat = f32[24]{0} bitcast(%a)
  %all = f32[32]{0} concatenate(%flat, %b), dimensions={0}
  %sum = f32[32]{0} all-reduce(%all), replica_groups={{0,1,2,3}}, to_apply=%add
  %one = f32[24]{0} fusion(%sum), kind=kLoop, calls=%cutting
  %v = f32[2,3,4]{2,1,0} bitcast(%one)
  %w = f32[8]{0} slice(%sum), slice={[24:32]}
  ROOT %r = (f32[2,3,4]{2,1,0}, f32[8]{0}) tuple(%v, %w)
}
"""


def test_what_is_cut_out_of_a_vector_has_its_own_shape_again():
    (one,) = collectives(parse(FLATTENED))
    assert (one.bytes, one.arrays) == (128, (("f32", (2, 3, 4)), ("f32", (8,))))
    assert carried(one, {"v": ("f32", (3, 2, 4)), "w": ("f32", (8,))}) == ("v", "w")


def test_parameters_that_cannot_be_told_apart_are_left_out():
    (scatter, _) = collectives(parse(WRAPPED))
    assert carried(scatter, {"w": ("f32", (8,)), "v": ("f32", (2, 3))}) == ("w",)
    assert carried(scatter, {"w": ("f32", (8, 1))}) == ("w",)
    assert carried(scatter, {"w": ("f32", (8,)), "v": ("f32", (8,))}) == ()
    assert carried(scatter, {"w": ("f32", (8,)), "v": ("f32", (2, 4))}) == ()  # which may have been flattened
    assert carried(scatter, {"v": ("f32", (2, 4))}) == ()


@pytest.mark.compilers
@pytest.mark.parametrize("name", sorted(path.stem for path in HLO.glob("*.txt")))
def test_what_is_saved_is_what_is_compiled_now(name):
    if not installed("jax_plugins.xla_cuda12" if name.startswith("gpu") else "libtpu"):
        pytest.skip("no CUDA plugin: plan-gpu" if name.startswith("gpu") else "no libtpu: plan-tpu")
    now = collectives(parse(made().PROGRAMS[name]().as_text()))
    what = lambda found: sorted((one.kind, one.bytes, one.runs, one.group) for one in found)  # noqa: E731
    assert what(now) == what(saved(name))
