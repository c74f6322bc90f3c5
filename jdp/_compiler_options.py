"""What XLA is asked for beside its defaults, so that gradients travel while others are still computed."""

from __future__ import annotations

import functools
import os

import jax
from jax.sharding import Mesh

from ._devices import replicated

Options = dict[str, bool | int]

_BUCKET = 30 << 20  # bytes that travel together: XLA's own choice for all-reduces, and near torch's (25 MiB)


def compiler_options(mesh: Mesh) -> Options:
    """For a training step on these devices: `compiler_options` of `jax.jit`.

    What the user has set in `XLA_FLAGS` stays, and what this compiler does not know is left out. On TPUs XLA's defaults
    are kept: the options that make their all-reduces asynchronous split them so finely that a step is estimated to take
    longer. `benchmarks/overlap.py` shows what this is worth.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "gpu":
        return {}
    said = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in wanted(mesh.size).items() if name not in said}
    return options if _known(mesh, tuple(options.items())) else {}


def wanted(n: int) -> Options:
    """On n GPUs."""
    # XLA counts what comes out of a reduce-scatter, 1/n of what goes in, and so waits for n times as much: for all
    # gradients of most models, when nothing is left to be computed meanwhile.
    return {"xla_gpu_reduce_scatter_combine_threshold_bytes": _BUCKET // n}


@functools.cache
def _known(mesh: Mesh, options: tuple[tuple[str, bool | int], ...]) -> bool:
    """Whether the compiler takes these options: XLA refuses a program for one that it does not know."""
    probe = jax.jit(lambda: 0, out_shardings=replicated(mesh), compiler_options=dict(options))
    try:
        probe.lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
