"""Virtual CPU devices: n of them on any machine, to try a program before there are GPUs."""

from __future__ import annotations

import os

import jax


def virtual_cpu_devices(n: int) -> None:
    """Makes the CPU count as `n` devices, safely; call it before anything asks JAX for devices.

    Other platforms are not touched: where there are GPUs, `jax.devices()` still is the GPUs. Besides
    JAX's own `jax_num_cpu_devices` this gives XLA two threads for each device (`NPROC`), without
    which a plain loop of jitted steps with collectives deadlocks on few cores: XLA aborts the
    process after a minute, "Expected 8 threads to join the rendezvous".

    Args:
        n: number of CPU devices, 1 or more.

    Raises:
        RuntimeError: JAX has started already with another number of CPU devices.
        ValueError: `n` is not positive.

    Example:
        >>> import jdp
        >>> jdp.virtual_cpu_devices(8)
        >>> import jax
        >>> len(jax.devices("cpu"))
        8
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"jdp.virtual_cpu_devices: n is {n!r}; it is a number of devices. Pass 1 or more.")
    flag = "--xla_force_host_platform_device_count"
    kept = [word for word in os.environ.get("XLA_FLAGS", "").split() if not word.startswith(flag)]
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:
        if len(jax.devices("cpu")) == n and _threads() >= 2 * n:
            return  # the same call, again
        raise RuntimeError(
            f"jdp.virtual_cpu_devices: JAX has started already, with {len(jax.devices('cpu'))} CPU devices and "
            f"NPROC={os.environ.get('NPROC', 'unset')}; both are fixed once it has. Call "
            f"jdp.virtual_cpu_devices({n}) first in the program, before jax.devices() and before any array."
        ) from None
    if "XLA_FLAGS" in os.environ:
        os.environ["XLA_FLAGS"] = " ".join(kept)  # the older way to say it; JAX refuses two answers
    if _threads() < 2 * n:
        os.environ["NPROC"] = str(2 * n)
        os.environ.pop("PJRT_NPROC", None)  # it would win over NPROC


def _threads() -> int:
    value = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or "0"
    return int(value) if value.isdecimal() else 0
