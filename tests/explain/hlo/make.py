"""Writes the programs in this folder: small steps, compiled for machines that are not here.

    PYTHONPATH=. python tests/explain/hlo/make.py [name ...]

needs the extras plan-gpu and plan-tpu. The texts are XLA's own, less its tables of source files and what only its
backends read (`backend_config`, but for those of loops, collectives and calls of libraries).
"""

import os
import pathlib
import re
import sys

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp import topology
from jdp._tools.topology.quiet import quiet

HERE = pathlib.Path(__file__).parent
LAYERS, WIDTH, ROWS, SMALL = 3, 256, 32, 64
OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}
APART = OVERLAP | {"xla_gpu_all_reduce_combine_threshold_bytes": 300_000}
TPU_APART = {
    "xla_jf_crs_combiner_threshold_count": "1",
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}


def loss(weights, x):
    for name in sorted(weights):
        x = jnp.tanh(x @ weights[name]["kernel"] + weights[name]["bias"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def reduced(gradients, reduce):
    """The sum of each gradient, traced in a scope with its path."""

    def one(path, x):
        with jax.named_scope("reduce." + ".".join(key.key for key in path)):
            return reduce(x)

    return jax.tree_util.tree_map_with_path(one, gradients)


def all_reduce(weights, x):
    return reduced(jax.grad(loss)(weights, x), lambda g: jax.lax.psum(g, "data"))


def zero(weights, x):
    scatter = lambda g: jax.lax.psum_scatter(g, "data", tiled=True)  # noqa: E731
    mine = jax.lax.axis_index("data")

    def update(w, g):
        part = jax.lax.dynamic_slice_in_dim(w, mine * len(g), len(g)) - 0.1 * g
        return jax.lax.all_gather(part, "data", tiled=True)

    return jax.tree.map(update, weights, reduced(jax.grad(loss)(weights, x), scatter))


def loop(weights, x):
    """A step for each of four microbatches: each begins with what the one before has reduced."""

    def body(weights, x):
        return jax.tree.map(jnp.subtract, weights, all_reduce(weights, x)), None

    return jax.lax.scan(body, weights, x.reshape(4, -1, x.shape[-1]))[0]


def gathered(weights, x):
    """Weights that are cut over the devices, each gathered where it is used."""
    return jax.grad(lambda w: loss(jax.tree.map(lambda a: jax.lax.all_gather(a, "data", tiled=True), w), x))(weights)


def convolutions(weights, x):
    def loss(w):
        y = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(y**2)

    return jax.lax.psum(jax.grad(loss)(weights), "data")


def layers(width, dtype, layers=LAYERS):
    one = {"kernel": jax.ShapeDtypeStruct((width, width), dtype), "bias": jax.ShapeDtypeStruct((width,), dtype)}
    return {f"layer_{n}": one for n in range(layers)}


def compiled(fn, devices, weights, x, cut=False, options=None):
    """The compiled program of `fn` on all the devices; `x` is the shape of one's rows."""
    n = len(devices)
    part = P("data") if cut else P()
    mapped = jax.shard_map(
        fn, mesh=Mesh(np.array(devices), ("data",)), in_specs=(part, P("data")), out_specs=part, check_vma=False
    )
    with quiet():
        lowered = jax.jit(mapped).lower(weights, jax.ShapeDtypeStruct((n * x[0], *x[1:]), jnp.float32))
        return lowered.compile(compiler_options=options)


def h100(fn, weights, x=(ROWS, WIDTH), options=None):
    return lambda: compiled(fn, topology("h100"), weights, x, options=options)


def v5e(fn, weights, x=(ROWS, WIDTH), cut=False, options=None):
    return lambda: compiled(fn, topology("v5e", "4x4"), weights, x, cut, options)


PROGRAMS = {
    "gpu_waits": h100(all_reduce, layers(WIDTH, "float32", 2)),
    "gpu_all_reduce": h100(all_reduce, layers(WIDTH, "float32"), options=APART),
    "gpu_zero": h100(zero, layers(WIDTH, "float32", 2), options=OVERLAP),
    "gpu_loop": h100(loop, layers(SMALL, "float32", 2), (ROWS, SMALL), {"xla_gpu_enable_triton_gemm": False}),
    "gpu_convolutions": h100(convolutions, jax.ShapeDtypeStruct((3, 3, 32, 64), "float32"), (4, 16, 16, 32)),
    "tpu_all_reduce": v5e(all_reduce, layers(1024, "bfloat16", 2), (2048, 1024), options=TPU_APART),
    "tpu_all_gather": v5e(gathered, layers(1024, "bfloat16", 2), (512, 1024), cut=True),
    "tpu_loop": v5e(loop, layers(SMALL, "float32", 2), (ROWS, SMALL)),
}


def text(compiled):
    """The program, less its tables of source files and what only its backends read."""
    lines = compiled.as_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.endswith("{") and "->" in line)
    keeps = re.compile(r" (while|custom-call|[a-z-]+-start)\(")
    rest = [line if keeps.search(line) else re.sub(r", backend_config=\{.*", "", line) for line in lines[first:]]
    rest = [re.sub(r' (scheduling_name="[^"]*"|stack_frame_id=\d+)', "", line) for line in rest]
    return "\n".join([lines[0], "", *rest, ""])


if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        written = text(PROGRAMS[name]())
        (HERE / f"{name}.txt").write_text(written)
        print(f"{name}: {len(written)} characters")
