"""What XLA is asked for beside its defaults, so that gradients travel while others are still computed."""

from __future__ import annotations

import functools
import os

import jax
from jax.sharding import Mesh

from .._core.devices import replicated

Options = dict[str, bool | int]

# Bytes that travel together: a seventh of the gradients, so that the last of them, when nothing is left to compute, are
# few, but neither so few that their start takes longer than they do, nor more than XLA takes by itself.
_LEAST, _MOST = 13 << 20, 30 << 20


def compiler_options(mesh: Mesh, sent: int) -> Options:
    """For a training step on these devices, of `sent` bytes of gradients: `compiler_options` of `jax.jit`.

    What the user has set in `XLA_FLAGS` stays, and what this compiler does not know is left out. On TPUs XLA's defaults
    are kept. `benchmarks/overlap.py` shows what this is worth, and with `--options` what others would be.
    """
    if not takes_options(mesh):
        return {}
    said = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in wanted(mesh.size, sent).items() if name not in said}
    return options if _known(mesh, tuple(options.items())) else {}


def takes_options(mesh: Mesh) -> bool:
    return mesh.size > 1 and mesh.devices.flat[0].platform == "gpu"


def wanted(n: int, sent: int) -> Options:
    """On n GPUs."""
    bucket = min(max(sent // 7, _LEAST), _MOST)
    return {
        "xla_gpu_all_reduce_combine_threshold_bytes": bucket,
        # XLA counts what comes out of a reduce-scatter, 1/n of what goes in, and so waits for n times as much: for all
        # gradients of most models.
        "xla_gpu_reduce_scatter_combine_threshold_bytes": bucket // n,
    }


@functools.cache
def _known(mesh: Mesh, options: tuple[tuple[str, bool | int], ...]) -> bool:
    """Whether the compiler takes these options: XLA refuses a program for one that it does not know."""
    probe = jax.jit(lambda: 0, out_shardings=replicated(mesh), compiler_options=dict(options))
    try:
        probe.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise  # memory was full, say: that tells nothing of the options, and nothing is kept of it
        return False
    return True
