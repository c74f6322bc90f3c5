"""What XLA asks of a GPU when it compiles: CUDA's device properties, of GPUs that are not here."""

from __future__ import annotations

from typing import NamedTuple

from .chips import CHIPS


class Target(NamedTuple):
    """`cudaDeviceProp` in the names of XLA's proto; what is alike on all of them is in `target_config`."""

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
    """XLA's `GpuTargetConfigProto`, as text."""
    target, chip = TARGETS[name], CHIPS[name]
    # The instructions that only this generation has, among them those of the tensor cores (sm_90a, sm_100a).
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
