"""Figures of GPUs and TPUs, each with its source; the estimates of a plan use no other figures."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import NamedTuple

GB, TERA = 1e9, 1e12


class Protocol(NamedTuple):
    """A way of sending: its latencies in seconds, and the share of the links' bytes that is payload."""

    launch: float  # before the first byte moves
    hop: float  # from one device to the next
    network_hop: float = 0.0  # from one host to the next
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator: its peaks, and its links."""

    name: str  # its name in `jdp.topology`
    kind: str  # "gpu" or "tpu"
    device_kind: str  # JAX's name for it
    peaks: Mapping[str, float]  # operations per second by the format of the unit ("bf16", "tf32", ...), dense
    memory_bytes: int  # device memory available to JAX, of which programs get `available_bytes`
    bytes_per_second: float  # of the device's memory
    link: float  # bytes per second and direction, from a GPU to the others of its host, or of one link of a TPU
    domain: tuple[int, ...]  # GPUs that are connected by such links; for a TPU the largest shape
    protocols: tuple[Protocol, ...]  # the ways that collectives can send; the fastest is used
    sources: Mapping[str, str]  # the source of each figure
    network: float = 0.0  # bytes per second and direction of each GPU's own way out of its host, if it has one

    def flops(self, dtype: str) -> float:
        """Returns the operations per second of matrix products with operands of this dtype, named as in HLO."""
        return next(self.peaks[unit] for unit in (*_DONE_IN.get(dtype, ()), "f32") if unit in self.peaks)

    @property
    def available_bytes(self) -> int:
        """The bytes that a program can use: on a GPU three quarters of them, or `XLA_CLIENT_MEM_FRACTION`."""
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is deprecated
        said = next(filter(None, map(os.environ.get, names)), 0.75)
        share = float(said) if self.kind == "gpu" else 1.0
        return int(self.memory_bytes * share)


# JAX multiplies float32 in TensorFloat-32 on GPUs and in bfloat16 on TPUs, unless a precision is asked for.
_DONE_IN: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "f16": ("f16", "bf16"),
    "f32": ("tf32", "bf16"),
    "f64": ("f64",),
    "c64": ("f32",),
    "c128": ("f64",),
    "s8": ("s8", "bf16"),
    "u8": ("s8", "bf16"),
    "f8e4m3fn": ("f8", "bf16"),
    "f8e5m2": ("f8", "bf16"),
}
_NVLINK = "NVLink: both directions together in the data sheet, half of it in each; all GPUs through NVSwitch"
_PROPERTIES = "CUDA device properties (totalGlobalMem), as in OpenXLA's target_config specs"
_NCCL = "NCCL's model of itself, rings with the protocols Simple and LL: src/graph/tuning.cc"
_PROTOCOLS = (Protocol(8.4e-6, 3.4e-6, 9.6e-6), Protocol(3.6e-6, 0.47e-6, 2.7e-6, 1 / 4))
_INFINIBAND = {25: "HDR", 50: "NDR"}  # by GB/s


def _gpu(
    name: str, device_kind: str, sheet: str, peaks: Mapping[str, float], memory: tuple[int, float], link: int, nic: int
) -> Chip:
    """Makes the chip of a DGX; links and network cards in GB/s, peaks in TFLOP/s."""
    cards = f"8 x {8 * nic} Gb/s InfiniBand {_INFINIBAND[nic]}, one for each GPU"
    sources = {
        "peaks": f"{sheet}; dense, without sparsity",
        "memory_bytes": _PROPERTIES,
        "bytes_per_second": sheet,
        "link": f"{sheet}; {_NVLINK}",
        "network": f"NVIDIA DGX {name.upper()} Data Sheet: {cards}",
        "protocols": _NCCL,
    }
    peaks = {kind: value * TERA for kind, value in peaks.items()}
    return Chip(name, "gpu", device_kind, peaks, *memory, link * GB, (8,), _PROTOCOLS, sources, nic * GB)


def _tpu(
    name: str, device_kind: str, bf16: float, memory: tuple[int, float], link: float, domain: tuple[int, ...]
) -> Chip:
    book = 'Google DeepMind, "How to Scale Your Model" (2025), part 2: TPUs'
    sources = {
        "peaks": f"{book}, as in Google Cloud's pages; f32: a sixth of it, as six products of bf16 parts",
        "memory_bytes": "what libtpu's compiler says it has, where a program does not fit",
        "bytes_per_second": book,
        "link": f"{book}; one link, one direction",
        "protocols": f"{book}; 1 us a hop",
    }
    peaks = {"bf16": bf16 * TERA, "f32": bf16 * TERA / 6}
    return Chip(name, "tpu", device_kind, peaks, *memory, link * GB, domain, (Protocol(0.0, 1e-6),), sources)


_A100 = {"bf16": 312, "f16": 312, "s8": 624, "tf32": 156, "f32": 19.5, "f64": 19.5}
_H100 = {"bf16": 989.4, "f16": 989.4, "f8": 1978.9, "s8": 1978.9, "tf32": 494.7, "f32": 66.9, "f64": 66.9}
_B200 = {"bf16": 2250, "f16": 2250, "f8": 4500, "s8": 4500, "tf32": 1125, "f32": 75, "f64": 37}
_SHEET = "NVIDIA {} Tensor Core GPU Data Sheet, SXM"
_BRIEF = "NVIDIA DGX B200 Data Sheet and Blackwell Architecture Technical Brief"
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu("a100", "NVIDIA A100-SXM4-80GB", _SHEET.format("A100 80GB"), _A100, (85_100_068_864, 2.039e12), 300, 25),
        _gpu("h100", "NVIDIA H100 80GB HBM3", _SHEET.format("H100"), _H100, (84_942_979_072, 3.35e12), 450, 50),
        _gpu("h200", "NVIDIA H200", _SHEET.format("H200"), _H100, (151_397_597_184, 4.8e12), 450, 50),
        _gpu("b200", "NVIDIA B200", _BRIEF, _B200, (191_514_411_008, 8.0e12), 900, 50),
        _tpu("v4", "TPU v4", 275, (int(30.75 * 2**30), 1.2e12), 45, (16, 16, 16)),
        _tpu("v5e", "TPU v5 lite", 197, (int(15.75 * 2**30), 8.1e11), 45, (16, 16)),
        _tpu("v5p", "TPU v5", 459, (int(95.73 * 2**30), 2.8e12), 90, (16, 20, 28)),
        _tpu("v6e", "TPU v6 lite", 920, (int(31.24 * 2**30), 1.6e12), 90, (16, 16)),
    )
}


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip that JAX calls `device_kind`; None if its figures are not known."""
    return next((chip for chip in CHIPS.values() if chip.device_kind == device_kind), None)


class Target(NamedTuple):
    """`cudaDeviceProp` with the names of XLA's proto; `target_config` has the values that all chips share."""

    compute_capability: int  # the major one; the minor one is 0 on all of them
    core_count: int  # streaming multiprocessors
    fpus_per_core: int  # float32 lanes
    clock_rate_ghz: float
    memory_bandwidth: int  # twice the memory clock times the bus's width
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


# Source: CUDA's device properties, as OpenXLA lists them for these GPUs in xla/backends/gpu/target_config/specs.
TARGETS = {
    "a100": Target(8, 108, 64, 1.41, 2_039_040_000_000, 40 * 2**20, 164 * 2**10, 163 * 2**10),
    "h100": Target(9, 132, 128, 1.98, 3_352_320_000_000, 50 * 2**20, 228 * 2**10, 227 * 2**10),
    "h200": Target(9, 132, 128, 1.98, 4_800_000_000_000, 50 * 2**20, 228 * 2**10, 227 * 2**10),
    "b200": Target(10, 148, 128, 1.965, 7_672_320_000_000, 132_644_864, 228 * 2**10, 227 * 2**10),
}


def target_config(name: str) -> str:
    """Returns XLA's `GpuTargetConfigProto`, as text."""
    target, chip = TARGETS[name], CHIPS[name]
    # "Accelerated" are instructions that only this generation has, such as those of its tensor cores (sm_90a, sm_100a).
    features = "ACCELERATED_FEATURES" if target.compute_capability >= 9 else "NONE"
    fields = target._asdict()
    major = fields.pop("compute_capability")
    fields |= {
        "device_memory_size": chip.memory_bytes,
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 * 2**10,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
    }
    info = "\n".join(f"  {field}: {value}" for field, value in fields.items())
    return (
        f"gpu_device_info {{\n{info}\n"
        f"  cuda_compute_capability {{ major: {major} feature_extension: {features} }}\n}}\n"
        f'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: 9 minor: 10 patch: 0 }}\n"
        f"runtime_version {{ major: 12 minor: 8 patch: 0 }}\n"
        f'device_description_str: "{chip.device_kind}"\n'
    )
