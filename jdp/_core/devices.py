"""Devices: which ones take part, which one is the primary, and where outputs go."""

from __future__ import annotations

import operator
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from .._jax.private import is_described
from .._processes.launchers import astray

if TYPE_CHECKING:

    @runtime_checkable
    class Device(Protocol):
        """A `jax.Device`. jaxlib's own class has no types, and a type checker would accept anything in its place."""

        @property
        def id(self) -> int: ...
        @property
        def platform(self) -> str: ...
        @property
        def device_kind(self) -> str: ...
        @property
        def process_index(self) -> int: ...
        @property
        def client(self) -> Any: ...
        def memory_stats(self) -> dict[str, int] | None: ...

else:
    Device = jax.Device

DeviceLike: TypeAlias = Device | int | str
"""A `jax.Device`, an index into `jax.devices()`, or a string such as `"gpu:0"`."""
Devices: TypeAlias = Sequence[DeviceLike] | Mesh | None
"""The devices of a verb, or a mesh (of one axis, except for `DataParallel`); `None` is all of `jax.devices()`."""


def resolve_device(verb: str, device: DeviceLike, what: str) -> Device:
    """Returns the `jax.Device` that `device` names; raises a `ValueError`, which calls it `what`, if there is none."""
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        platform, _, index = device.partition(":")
        try:
            candidates = jax.devices(platform) if platform else []
            # int() would take "cpu:-1", " 1" and "1_0" as well; a device index is plain digits.
            position = int(index) if index.isdecimal() else 0 if device == platform else -1
        except RuntimeError:
            candidates, position = [], -1
    else:
        try:
            position = -1 if isinstance(device, bool) else operator.index(device)
        except TypeError:
            raise TypeError(
                f"jdp.{verb}: {what} {device!r} is a {type(device).__name__}; a device is a jax.Device, an int "
                f"(index into jax.devices()) or a string like 'cpu:0'. Pass one of these."
            ) from None
        candidates = jax.devices()
    if 0 <= position < len(candidates):
        return candidates[position]
    raise ValueError(
        f"jdp.{verb}: {what} {device!r} is unknown; this machine has {names_of(jax.devices())}. "
        f"Pass one of these, or its index from 0 to {len(jax.devices()) - 1}."
        f"{_virtual(device + 1 if isinstance(device, int) else 0)}"
    )


def _virtual(count: int) -> str:
    """Returns advice on how to make the CPU `count` devices, if it has fewer; otherwise an empty text."""
    if count <= len(jax.devices()) or jax.devices()[0].platform != "cpu":
        return ""
    return f" jdp.virtual_cpu_devices({count}), first in the program, makes the CPU {count} devices."


def names_of(devices: Sequence[Device]) -> str:
    return ", ".join(str(d) for d in devices)


def named_once(verb: str, devices: Devices, device_ids: Devices) -> Devices:
    """Returns the argument that was passed, by jdp's name (`devices`) or torch's; a `TypeError` if it is both."""
    if device_ids is None:
        return devices
    if devices is not None:
        raise TypeError(
            f"jdp.{verb}: devices is {devices!r} and device_ids is {device_ids!r}; these are jdp's and torch's name of "
            f"one argument. Pass devices alone."
        )
    return device_ids


def resolve_devices(verb: str, devices: Devices) -> tuple[Device, ...]:
    """Returns the devices, checked: at least one, all known, no duplicates, one platform."""
    if devices is None:
        return tuple(jax.devices())
    if isinstance(devices, int) and not isinstance(devices, bool):
        raise TypeError(
            f"jdp.{verb}: devices={devices} is an int; devices are a sequence, and there are {len(jax.devices())}. "
            f"Pass {f'range({devices})' if devices > 0 else '[0]'} for the first {max(devices, 1)}, or None for all."
            f"{_virtual(devices)}"
        )
    if isinstance(devices, Mesh | np.ndarray | np.flatiter):
        devices = _in_a_row(verb, devices)
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(
            f"jdp.{verb}: devices={devices!r} is a {type(devices).__name__}; devices are a sequence. "
            f"Pass a list like jax.devices()[:2], [0, 1] or ['gpu:0', 'gpu:1'], or None for all."
        )
    found = tuple(resolve_device(verb, d, f"devices[{i}]") for i, d in enumerate(devices))
    if not found:
        raise ValueError(f"jdp.{verb}: devices is empty; at least one is needed. Pass None for all devices.")
    first: dict[Device, int] = {}
    for i, device in enumerate(found):
        if first.setdefault(device, i) != i:
            raise ValueError(
                f"jdp.{verb}: device {device} is given twice, at devices[{first[device]}] and "
                f"devices[{i}]; a device is named once. Remove the duplicate (for several replicas on each there is "
                f"jdp.DataParallel(..., replicas=8))."
            )
    platforms = sorted({d.platform for d in found})
    if len(platforms) > 1:
        raise ValueError(
            f"jdp.{verb}: devices are of platforms {' and '.join(platforms)} ({names_of(found)}); one program "
            f"runs on one platform. Pass devices of one of them."
        )
    _refuse_foreign(verb, found)
    return found


def _in_a_row(verb: str, devices: Any) -> Sequence[DeviceLike]:
    """Returns the devices of a mesh or numpy array with one axis; raises a `ValueError` if it has more axes."""
    if isinstance(devices, np.ndarray) and devices.ndim != 1:
        raise ValueError(
            f"jdp.{verb}: devices is an array of shape {devices.shape}; devices are a sequence. Pass a row of it, or "
            f"devices.ravel() for all; replicas of several devices are for jdp.DataParallel(model, mesh), with a "
            f"mesh = Mesh(devices, names)."
        )
    if not isinstance(devices, Mesh):
        return tuple(devices)
    if len(devices.axis_names) != 1:
        axes = ", ".join(f"{name} ({size})" for name, size in devices.shape.items())
        raise ValueError(
            f"jdp.{verb}: devices is a mesh of the axes {axes}; here a replica is one device, and its mesh has one "
            f"axis. Pass the devices along it, as mesh.devices[:, 0], or all, mesh.devices.flat; replicas of several "
            f"devices are for jdp.DataParallel(model, mesh)."
        )
    return tuple(devices.devices.flat)


def resolve_output(verb: str, output_device: DeviceLike | None) -> Device | str | None:
    """Returns `None`, `"sharded"` or the `jax.Device`; `"cpu"` and torch's -1 are the host's CPU."""
    if output_device is None or isinstance(output_device, str) and output_device == "sharded":
        return output_device
    if isinstance(output_device, str | int) and output_device in ("cpu", -1):
        return jax.local_devices(backend="cpu")[0]
    return _own_device(resolve_device(verb, output_device, "output_device"))


def _own_device(device: Device) -> Device:
    """Returns the device; if it is another process's (`output_device=0`), the one at the same place among our own."""
    if device.process_index == jax.process_index():
        return device
    theirs = [d for d in jax.devices(device.platform) if d.process_index == device.process_index]
    ours = jax.local_devices(backend=device.platform)
    return ours[min(theirs.index(device), len(ours) - 1)]


def _refuse_foreign(verb: str, devices: tuple[Device, ...]) -> None:
    """Raises a `ValueError` if none of the devices belongs to this process."""
    here = jax.process_index()
    holders = sorted({d.process_index for d in devices})
    if jax.process_count() > 1 and here not in holders and devices[0] in jax.devices(devices[0].platform):
        raise ValueError(
            f"jdp.{verb}: devices are {names_of(devices)}, all of process{'es' * (len(holders) > 1)} "
            f"{', '.join(map(str, holders))}; process {here} has none among them, and cannot run there. Pass None "
            f"(the devices of all processes), or jax.local_devices() for this process alone."
        )


def refuse_alone(verb: str, devices: tuple[Device, ...]) -> None:
    """Raises a `RuntimeError` if several processes were started and are not one job: each would train alone."""
    said = None if is_described(devices[0]) else astray()
    if said is not None and jax.process_count() == 1:
        raise RuntimeError(
            f"jdp.{verb}: this is one of several processes by {said}, and they are not one job; each would work alone, "
            f"on all of the data. Call jdp.distributed.initialize() first in the program, or "
            f"jdp.distributed.initialize(num_processes=1) to run alone."
        )


def warn_imbalance(devices: tuple[Device, ...]) -> None:
    """Warns, once, if a device has under 75 % of another's memory or cores: torch's balance check.

    Source: `_check_balance` in torch/nn/parallel/data_parallel.py.
    """
    for what, measure in (("memory", memory_bytes), ("cores", lambda d: getattr(d, "core_count", None))):
        known = [(size, d) for d in devices if (size := measure(d))]
        if len(known) < 2:
            continue
        (low, small), (high, large) = (pick(known, key=lambda k: k[0]) for pick in (min, max))
        if low < 0.75 * high:
            warnings.warn(
                f"jdp.DataParallel: device {small} has {low} and device {large} has {high} ({what}); equal chunks "
                f"wait for the smaller one. Leave {small} out of devices, or give it fewer rows with "
                f"jdp.scatter(..., chunk_sizes=...).",
                UserWarning,
                stacklevel=outside(),
            )
            return


def outside() -> int:
    """Returns the stacklevel of the user's own line, so that a warning points to it and shows once per line."""
    level, frame, others = 1, sys._getframe(1), ("jdp", "flax", "jax", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in others:
        level, frame = level + 1, frame.f_back
    return level


def memory_bytes(device: Device) -> int | None:
    """Returns how many bytes of the device's memory JAX may use; None if the device does not say."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:  # described devices (of an absent machine) have no memory to ask
        return None


def virtual_cpu_devices(n: int) -> None:
    """Makes the CPU count as `n` devices, safely: `jdp.virtual_cpu_devices(8)`, before anything asks JAX for devices.

    Other platforms are not touched: on a machine with GPUs, `jax.devices()` still returns the GPUs. Besides
    JAX's own `jax_num_cpu_devices` this gives XLA two threads for each device (`NPROC`), without
    which a plain loop of jitted steps with collectives deadlocks on few cores: XLA aborts the
    process after a minute, "Expected 8 threads to join the rendezvous".

    A process of `jdp launch --devices-per-process` has its devices already, and this leaves them as they are.

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
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"jdp.virtual_cpu_devices: n is {n!r}; it is a number of devices. Pass 1 or more.")
    n = int(n)  # JAX takes no integer of numpy
    if "JDP_NUM_PROCESSES" in os.environ and "JAX_NUM_CPU_DEVICES" in os.environ:
        return  # the launcher has set both, and the number of threads
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
        os.environ["XLA_FLAGS"] = " ".join(kept)  # the older way to set the number; JAX refuses both at once
    if _threads() < 2 * n:
        os.environ["NPROC"] = str(2 * n)
        os.environ.pop("PJRT_NPROC", None)  # it would win over NPROC


def _threads() -> int:
    value = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or "0"
    return int(value) if value.isdecimal() else 0
