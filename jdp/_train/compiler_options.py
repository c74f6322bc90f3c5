"""The compiler's options for a training step on several GPUs: how many bytes of gradients are sent together."""

from __future__ import annotations

import functools
import os

import jax

from .._core.replica_mesh import ReplicaMesh

CompilerOptions = dict[str, bool | int]
# A seventh of the gradients is sent together, within these limits (in bytes). The last seventh is sent when nothing is
# left to compute, so it should be small. To send less than the lower limit would take less time than to start sending;
# the upper limit is XLA's own default.
_LEAST, _MOST = 13 << 20, 30 << 20


def compiler_options(mesh: ReplicaMesh, sent: int, gathers: bool = False) -> CompilerOptions:
    """Returns the `compiler_options` of `jax.jit` for a step on these GPUs that sends `sent` bytes of gradients.

    With `gathers` the step gathers its parameters as it uses them.

    Options that the user has set in `XLA_FLAGS` are left out. If the compiler does not know one of the others, all are
    left out. `benchmarks/overlap.py` measures the gain; its `--options` is for other options.
    """
    said = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in wanted(mesh.size, sent, gathers).items() if name not in said}
    return options if _known(mesh, tuple(options.items())) else {}


def wanted(n: int, sent: int, gathers: bool = False) -> CompilerOptions:
    """Returns the options for n GPUs."""
    bucket = min(max(sent // 7, _LEAST), _MOST)
    # XLA combines gathers across the pieces that jdp has made: those of a small model all into one.
    once = {"xla_gpu_all_gather_combine_threshold_bytes": bucket} if gathers else {}
    return once | {
        "xla_gpu_all_reduce_combine_threshold_bytes": bucket,
        # XLA counts the bytes that come out of a reduce-scatter, 1/n of those that go in. With the same threshold it
        # would wait for n times as many, which are all gradients of most models.
        "xla_gpu_reduce_scatter_combine_threshold_bytes": bucket // n,
    }


@functools.cache
def _known(mesh: ReplicaMesh, options: tuple[tuple[str, bool | int], ...]) -> bool:
    """Returns True if the compiler knows these options; XLA refuses a program if it does not know one of them."""
    probe = jax.jit(lambda: 0, out_shardings=mesh.replicated, compiler_options=dict(options))
    try:
        probe.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise  # out of memory, for example: that says nothing about the options, and is not cached
        return False
    return True
