"""topology: the devices of a machine that is not here, described well enough to compile for."""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc

from ..._core.devices import Device, is_described
from .chips import CHIPS, Chip, target_config
from .quiet import quiet

GPUS = tuple(name for name, chip in CHIPS.items() if chip.kind == "gpu")
TPUS = tuple(name for name, chip in CHIPS.items() if chip.kind == "tpu")


def topology(
    name: str, shape: str | None = None, *, hosts: int | None = None, per_host: int | None = None
) -> tuple[Device, ...]:
    """Returns devices of an absent machine: `DataParallel(model, topology("h100", hosts=8))` compiles for 64 GPUs.

    Nothing runs on them. A step of such a wrapper is compiled as for the machine itself (`step.lower(...).compile()`
    with `jax.ShapeDtypeStruct`s), and `jdp.explain` reads the result. At the same time JAX may run on the CPU, or on a
    GPU that is attached. The same call returns the same devices.

    Args:
        name: "a100", "h100", "h200" or "b200" (with 80, 80, 141 and 180 GB, on NVLink), "v4", "v5e", "v5p" or "v6e".
        shape: the shape of a TPU slice, in chips: "16x16" (v5e, v6e), "8x8x16" (v4, v5p).
        hosts: how many machines with GPUs; 1 by default.
        per_host: GPUs in each; 8 by default, which is as many as NVLink connects there.

    Raises:
        ValueError: an unknown name; a shape that such TPUs do not come in; a number of hosts that is no positive int.
        ImportError: the compiler for these devices is not installed; the message names the extra that installs it.
        NotImplementedError: this version of JAX cannot tell such devices from real ones.

    Example:
        >>> import jdp
        >>> len(jdp.topology("h100", hosts=2))  # doctest: +SKIP
        16
        >>> jdp.topology("h100", "4x4")
        Traceback (most recent call last):
        ...
        ValueError: jdp.topology: shape is '4x4', and h100 is a GPU; shapes are those of TPU slices. Pass hosts=....

    Source: `get_topology_desc` in jax/experimental/topologies.py. torch has no counterpart.
    """
    chip = CHIPS.get(name) if isinstance(name, str) else None
    if chip is None:
        raise ValueError(
            f"jdp.topology: name is {name!r}, which is unknown; known are the GPUs {', '.join(GPUS)} and the TPUs "
            f"{', '.join(TPUS)}. Pass one of them."
        )
    if chip.kind == "tpu":
        devices = _tpus(name, _checked_shape(chip, shape, hosts, per_host))
    elif shape is not None:
        raise ValueError(
            f"jdp.topology: shape is {shape!r}, and {name} is a GPU; shapes are those of TPU slices. Pass hosts=...."
        )
    else:
        hosts = _checked_count("hosts", 1 if hosts is None else hosts)
        per_host = _checked_count("per_host", chip.domain[0] if per_host is None else per_host)
        if per_host > chip.domain[0]:
            raise ValueError(
                f"jdp.topology: per_host is {per_host}; NVLink connects {chip.domain[0]} {name}s. Pass more hosts."
            )
        devices = _gpus(name, hosts, per_host)
    if not is_described(devices[0]):  # otherwise jdp would run programs on them
        raise NotImplementedError(
            f"jdp.topology: JAX {jax.__version__} does not tell described devices from real ones; nothing runs on "
            f"described ones. Install a version that does (0.10 to 0.12)."
        )
    return devices


def _checked_count(what: str, count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"jdp.topology: {what} is {count!r}; it is a number of machines or GPUs. Pass 1 or more.")
    return int(count)


def _checked_shape(chip: Chip, shape: str | None, hosts: int | None, per_host: int | None) -> str:
    """Returns the shape of a slice. It is checked here because some invalid shapes make libtpu end the process."""
    name, most = chip.name, "x".join(map(str, chip.domain))
    if hosts is not None or per_host is not None:
        raise ValueError(
            f"jdp.topology: hosts is {hosts} and per_host is {per_host}, and {name} is a TPU; its slices come in "
            f'shapes, which fix both. Pass topology("{name}", "4x4{"x4" * (len(chip.domain) - 2)}").'
        )
    good = isinstance(shape, str) and re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})+", shape) is not None
    sides = [int(side) for side in shape.split("x")] if good and shape else []
    if len(sides) != len(chip.domain):
        raise ValueError(
            f"jdp.topology: shape is {shape!r}; {name}s are connected in {len(chip.domain)} dimensions. Pass chips "
            f"along each, up to {most!r}."
        )
    if any(a > b for a, b in zip(sorted(sides), sorted(chip.domain), strict=True)):
        raise ValueError(f"jdp.topology: shape is {shape!r}; the largest of {name} is {most}. Pass a smaller one.")
    if math.prod(sides) > 1 and any(side % 2 for side in sides[:2]):
        raise ValueError(
            f"jdp.topology: shape is {shape!r}; a host has 2x2 {name}s, so that the first two sides are even. Pass "
            f"even ones."
        )
    return "x".join(map(str, sides))


@functools.cache
def _gpus(name: str, hosts: int, per_host: int) -> tuple[Device, ...]:
    plugins = [p for p in ("xla_cuda12", "xla_cuda13") if _installed(f"jax_plugins.{p}")]
    if not plugins:
        raise _missing(name, "JAX's CUDA plugin", "plan-gpu")
    # JAX looks for CUDA's libraries when it loads the plugin, but the compiler needs none of them.
    absent = {} if glob.glob("/dev/nvidia[0-9]*") else {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    options = {"target_config": target_config(name), "topology": f"1x{hosts}x{per_host}"}
    with quiet(), _environment(absent):
        try:
            described = get_topology_desc(name, "cuda", **options)
        except NotImplementedError:  # JAX has started without the plugin, because those libraries are missing
            importlib.import_module(f"jax_plugins.{plugins[0]}").initialize()
            described = get_topology_desc(name, "cuda", **options)
    return tuple(described.devices)


@functools.cache
def _tpus(name: str, shape: str) -> tuple[Device, ...]:
    if not _installed("libtpu"):
        raise _missing(name, "libtpu", "plan-tpu")
    absent = {
        "TPU_SKIP_MDS_QUERY": "1",  # no query of Google's metadata server: that describes the machine this runs on
        "TPU_ACCELERATOR_TYPE": "",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    if not glob.glob("/dev/accel[0-9]*") and not glob.glob("/dev/vfio/[0-9]*"):
        absent["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there is no TPU to share, so no lock is needed
    # The two cores of a v4 are one device, as on the real machine; for later TPUs that is the default.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if name == "v4" else {}
    if math.prod(map(int, shape.split("x"))) == 1:  # less than a host, which some versions of libtpu do not notice
        options["chips_per_host_bounds"] = (1, 1, 1)
    with quiet(), _environment(absent):
        try:
            return tuple(get_topology_desc(f"{name}:{shape}", "tpu", **options).devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"jdp.topology: shape is {shape!r}, which libtpu refuses for {name} ({error}); slices come in certain "
                f"shapes. Pass another one."
            ) from None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would contain it is missing
        return False


def _missing(name: str, what: str, extra: str) -> ImportError:
    return ImportError(
        f"jdp.topology: {name} needs {what}, which is not installed; it is the compiler for them, and takes no such "
        f"device. {how_to_install(extra)}"
    )


def how_to_install(extra: str) -> str:
    # It does not name the package, because PyPI does not have it, and anybody may take the name.
    return (
        f'Run pip install -e ".[{extra}]" in a checkout of the repository; this package is not on PyPI, where jdp '
        f"is another one."
    )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets the environment variables that are not set yet, and removes them after its block."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
