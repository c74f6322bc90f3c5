"""Operations and bytes of optimized programs, against XLA's own count and against numbers worked out by hand."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jdp._tools.explain.cost import cost, totals
from jdp._tools.explain.hlo import parse

HLO = pathlib.Path(__file__).parent / "hlo"


def counted(fn, *args):
    """(our count, XLA's own) of a function compiled for one CPU device."""
    compiled = jax.jit(fn).lower(*args).compile()
    analysis = compiled.cost_analysis()
    return totals(parse(compiled.as_text())), analysis


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jax.nn.gelu(h @ w)
        return jnp.mean(h**2)

    return jax.grad(loss)(weights)


def attention(x, w):
    def loss(w):
        q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 3, 4, 16), 2, 0)
        return jnp.sum(jax.nn.dot_product_attention(q, k, v) ** 2)

    return jax.grad(loss)(w)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "fn, args, products",
    [
        (jnp.dot, (f32(64, 96), f32(96, 32)), 2 * 64 * 96 * 32),
        (jnp.matmul, (f32(5, 64, 96), f32(5, 96, 32)), 5 * 2 * 64 * 96 * 32),
        (mlp, ([f32(128, 128)] * 3, f32(64, 128)), 8 * 2 * 64 * 128 * 128),  # forward 3, backward 3 + 2
        # (x @ w) forward and backward by w; 2 products forward, 4 backward
        (attention, (f32(2, 32, 64), f32(64, 192)), 2 * 2 * (2 * 32) * 64 * 192 + 6 * 2 * 2 * 4 * 32 * 32 * 16),
    ],
)
def test_products_are_counted_as_by_hand_and_all_as_xla_counts(fn, args, products):
    ours, xla = counted(fn, *args)
    assert sum(ours.products.values()) == products and set(ours.products) == {"f32"}
    assert ours.flops == pytest.approx(xla["flops"], rel=0.02)
    assert ours.bytes == pytest.approx(xla["bytes accessed"], rel=0.25)


@pytest.mark.parametrize("stride, padding", [(1, "SAME"), (2, "SAME"), (3, "VALID")])
@pytest.mark.parametrize("gradient", [None, 0, 1])
def test_convolutions_count_what_does_not_fall_into_the_padding(stride, padding, gradient):
    def fn(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=numbers)

    if gradient is not None:
        forward = fn
        fn = lambda x, w: jax.grad(lambda *a: jnp.sum(forward(*a)), gradient)(x, w)  # noqa: E731
    ours, xla = counted(fn, f32(4, 20, 20, 16), f32(3, 3, 16, 32))
    assert ours.flops == pytest.approx(xla["flops"], rel=0.02) and ours.flops > 0


def test_a_loop_counts_as_often_as_it_runs():
    once, _ = counted(lambda w, x: jnp.tanh(x @ w), f32(64, 64), f32(8, 64))
    ten, xla = counted(
        lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=10)[0], f32(64, 64), f32(8, 64)
    )
    assert ten.products["f32"] == 10 * once.products["f32"]
    assert xla["flops"] < 2 * once.flops  # XLA's own count takes one iteration


def test_of_branches_the_largest_counts():
    branches = [lambda w, x: x, lambda w, x: x @ w, lambda w, x: x @ w @ w]
    ours, _ = counted(
        lambda i, w, x: jax.lax.switch(i, branches, w, x), jax.ShapeDtypeStruct((), jnp.int32), f32(64, 64), f32(8, 64)
    )
    assert ours.products == {"f32": 2 * 2 * 8 * 64 * 64}


def test_what_is_cut_out_of_an_array_is_all_that_is_read_of_it():
    def fn(table, i):
        return jnp.tanh(jax.lax.dynamic_slice_in_dim(table, i, 4)) * 2

    ours, _ = counted(fn, f32(100_000, 32), jax.ShapeDtypeStruct((), jnp.int32))
    assert ours.bytes < 20 * 4 * 32 * 4


def test_elementwise_work_is_what_it_reads_and_writes():
    ours, _ = counted(lambda a, b: jnp.sin(a) * b + 1, f32(1000), f32(1000))
    assert (ours.bytes, ours.products) == (3 * 4000, {}) and ours.flops == 3000


@pytest.mark.parametrize(
    "name, products",
    [
        ("gpu_waits", 5 * 2 * 32 * 256 * 256),  # of two layers: forward 2, backward 2 + 1
        ("gpu_all_reduce", 8 * 2 * 32 * 256 * 256),
        ("gpu_loop", 4 * 5 * 2 * 8 * 64 * 64),  # by cuBLAS
        ("gpu_convolutions", 2 * 2 * 4 * 32 * 64 * (3 * 8) ** 2),  # by cuDNN, on an image that was padded before
        ("tpu_loop", 4 * 5 * 2 * 8 * 64 * 64),
        ("tpu_all_reduce", 5 * 2 * 2048 * 1024 * 1024),  # TPU writes products as convolutions
        ("tpu_all_gather", 5 * 2 * 512 * 1024 * 1024),
    ],
)
def test_products_of_gpu_and_tpu_programs(name, products):
    module = parse((HLO / f"{name}.txt").read_text())
    total = totals(module)
    assert sum(total.products.values()) == products
    assert products <= total.flops < 1.1 * products
    assert total.flops == sum(cost(module, module.entry, i).flops for i in module.entry)


def test_room_that_a_library_works_in_is_no_traffic():
    module = parse((HLO / "gpu_loop.txt").read_text())
    arrays = 2 * (64 * 64 + 64) + 8 * 64  # floats; of the workspace there are 32 MB
    assert totals(module).bytes < 4 * 4 * 100 * arrays


LIVE = """
import jax, jax.numpy as jnp
from jdp._tools.topology.quiet import quiet
from jdp import topology
from jdp._tools.explain.hlo import parse
from jdp._tools.explain.cost import totals
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
def mlp(ws, x):
    def loss(ws):
        h = x
        for w in ws: h = jax.nn.gelu(h @ w)
        return jnp.mean(h.astype(jnp.float32)**2)
    return jax.grad(loss)(ws)
where = NamedSharding(Mesh(np.array(topology("v5e", "2x2")[:1]), ("x",)), PartitionSpec())
f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
with quiet():
    c = jax.jit(mlp).lower([f(512, 512)] * 3, f(256, 512)).compile()
t = totals(parse(c.as_text()))
print(sum(t.products.values()), t.flops, c.cost_analysis()["flops"])
"""


@pytest.mark.compilers
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu: plan-tpu")
def test_as_xla_counts_for_tpus():
    done = subprocess.run([sys.executable, "-c", LIVE], capture_output=True, text=True, env=os.environ, check=True)
    products, flops, xla = map(float, done.stdout.split()[-3:])
    assert products == 8 * 2 * 256 * 512 * 512
    assert flops == pytest.approx(xla, rel=0.02)
