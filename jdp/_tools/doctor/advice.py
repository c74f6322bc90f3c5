"""Known traps and known remedies: what the doctor says in addition to the facts.

Those for GPUs and TPUs come from the makers' manuals and from reports of users; they were not tried on hardware here.
Source: NCCL's troubleshooting guide (PCI access control services, shared memory, sockets); JAX's installation guide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GPU = ("gpu", "cuda", "rocm")
P2P = (
    "NCCL_P2P_DISABLE=1 sends through the host's memory. If it helps, direct copies over PCIe are broken, most often "
    "by an IOMMU or by ACS: boot with iommu=pt, or turn both off in the BIOS, for full speed"
)
BY_NCCL = ("all_reduce", "reduce_scatter", "all_gather", "permute")

Note = dict[str, str]


def remedies(test: str, failure: str, platform: str, n: int) -> list[str]:
    """Returns what is known to help where `test` failed so, the likeliest first."""
    if test == "start":
        return _start(failure)
    if failure == "error":
        return ["read the text; if it is the memory, end other programs on the device or pass a smaller --mebibytes"]
    if test == "compute":
        return [f"leave the device out (--devices, jdp's devices=); a {platform} that computes wrong is broken"]
    if platform in GPU and test in BY_NCCL:
        return [
            P2P,
            "NCCL_SHM_DISABLE=1, or more shared memory (docker run --shm-size=1g) where /dev/shm is small",
            "NCCL_SOCKET_IFNAME=lo (one machine) or your network's interface, and NCCL_IB_DISABLE=1, where it hangs "
            "while it connects; NCCL_DEBUG=INFO prints how far it came",
        ]
    if platform in GPU:
        return [
            "boot with iommu=pt, or turn the IOMMU and ACS off in the BIOS: they break direct copies over PCIe; "
            "nvidia-smi topo -p2p r shows which pairs copy directly",
            "till then copy through the host: jax.device_put(numpy.asarray(x), device)",
        ]
    if platform == "cpu" and failure in ("hang", "died"):
        return [
            f"jdp.virtual_cpu_devices({n}) before JAX starts, or NPROC={2 * n} in the environment: XLA needs a "
            "thread for every device, and deadlocks with fewer",
            "--xla_cpu_collective_call_terminate_timeout_seconds=600 in XLA_FLAGS, if the machine is only slow",
        ]
    return ["leave the device out (--devices, jdp's devices=), and run this again to see which one it is"]


def _start(failure: str) -> list[str]:
    said = {
        "error": "JAX_PLATFORMS may name a platform whose plugin is missing: unset it, or install the plugin with "
        'pip install -e ".[cuda13]", [cuda12] or [tpu] in a checkout of the repository',
        "died": "XLA_FLAGS may hold a flag that this version does not know, which ends the process: unset it",
    }
    return [text for kind, text in said.items() if kind == failure] + [
        "JAX_PLATFORMS=cpu python -m jdp doctor: if that works, JAX is well and the accelerator's driver is not",
        "GPU: nvidia-smi must answer at once; with NVSwitch, systemctl status nvidia-fabricmanager; LD_LIBRARY_PATH "
        "must not lead to another CUDA",
        "TPU: one process at a time may hold it, and a slice of several machines waits until JAX runs on all of them",
    ]


def notes(facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], environ: Mapping[str, str]) -> list[Note]:
    """Returns the traps that this machine is in: `problem`s fail the examination, `note`s do not."""
    platform = devices[0]["platform"] if devices else ""
    problems, harmless = _problems(facts, platform, environ), _notes(facts, platform, len(devices), environ)
    return [{"level": "problem", "text": text} for text in problems] + [
        {"level": "note", "text": text} for text in harmless
    ]


def _problems(facts: Mapping[str, Any], platform: str, environ: Mapping[str, str]) -> Iterator[str]:
    cards = facts["gpus"]
    if cards and platform == "cpu" and not _cpu_is_asked_for(environ):
        here = f"{len(cards)} GPUs are here and"
        plugins = [p for p in facts["versions"] if re.fullmatch(r"jax-cuda\d+-plugin", p)]
        if plugins:
            yield (
                f"{here} {plugins[0]} is installed, and yet JAX runs on the CPU: the plugin did not start. "
                f"JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()' says why."
            )
        else:
            yield (
                f"{here} JAX runs on the CPU: no CUDA plugin is installed. Run pip install -e "
                f'".[{cuda_extra(cards)}]" in a checkout of the repository, or set JAX_PLATFORMS=cpu if you want that.'
            )
    if facts.get("gpus_error"):
        yield f"{facts['gpus_error']}. Look into dmesg for Xid, and start the machine again."


def _cpu_is_asked_for(environ: Mapping[str, str]) -> bool:
    asked = environ.get("JAX_PLATFORMS") or environ.get("JAX_PLATFORM_NAME")
    return asked == "cpu" or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def _notes(facts: Mapping[str, Any], platform: str, n: int, environ: Mapping[str, str]) -> Iterator[str]:
    if facts["gpus"] and platform == "cpu" and _cpu_is_asked_for(environ):
        yield f"{len(facts['gpus'])} GPUs are here, and the environment keeps JAX on the CPU."
    versions = facts["versions"]
    jaxlib = versions.get("jaxlib")
    for p in versions if jaxlib else ():
        if re.fullmatch(r"jax|jax-(cuda|rocm)\d+-(plugin|pjrt)", p) and versions[p] != jaxlib:
            text = f"{p} is {versions[p]} and jaxlib is {jaxlib}; they belong together."
            yield f"{text} pip install --upgrade {p} jaxlib."
    said = environ.get("PJRT_NPROC") or environ.get("NPROC") or ""
    threads = int(said) if said.isdecimal() else facts["cores"]
    if platform == "cpu" and 2 <= n and threads < 2 * n:
        yield (
            f"{n} CPU devices share {threads} threads ({'NPROC' if said else 'cores; NPROC is unset'}): a plain loop "
            f"of steps with collectives deadlocks there, and XLA ends the process after a minute. Call "
            f"jdp.virtual_cpu_devices({n}) first in the program, or set NPROC={2 * n}."
        )
    proxies = sorted(k for k, v in environ.items() if re.fullmatch("(https?|grpc|all)_proxy", k, re.I) and v)
    spared = ",".join(v for k, v in environ.items() if k.lower() == "no_proxy")
    if proxies and not ("*" in spared or "localhost" in spared and "127.0.0.1" in spared):
        yield (
            f"{', '.join(proxies)} is set and no_proxy spares neither side of jax.distributed: processes may wait for "
            f"each other through the proxy. Add localhost,127.0.0.1 and the coordinator's address to no_proxy."
        )
    address = facts.get("address") or ""
    if platform == "cpu" and address.startswith("127.0."):
        yield (
            f"the hostname {facts['hostname']} stands for {address}: processes of other machines that meet this one on "
            f"CPU (Gloo) fail with 'Connection refused'. For jobs over several machines, let /etc/hosts have the "
            f"address that the others see: 10.0.0.5 {facts['hostname']}."
        )
    if platform in GPU and n >= 2 and not facts.get("nvlink"):
        yield (
            f"{n} GPUs without NVLink are driven by one process: that has been seen to hang in collectives where a "
            f"process for each GPU did not. If yours hang: jdp launch -n {n} train.py."
        )
    if platform in GPU:
        yield from _notes_for_gpus(n, environ)


def _notes_for_gpus(n: int, environ: Mapping[str, str]) -> Iterator[str]:
    if n >= 2 and os.path.isdir("/dev/shm"):
        shared = os.statvfs("/dev/shm")
        if (mebibytes := shared.f_bavail * shared.f_frsize >> 20) < 64 * n:
            yield f"/dev/shm has {mebibytes} MiB free for {n} GPUs, NCCL may need more: docker run --shm-size=1g."
    if "LD_LIBRARY_PATH" in environ:
        yield "LD_LIBRARY_PATH is set: it goes before the CUDA libraries that pip installed. Unset it if JAX fails."
    left = sorted(k for k, v in environ.items() if re.fullmatch(r"NCCL_(P2P|SHM|IB)_DISABLE", k) and v not in ("", "0"))
    if left:
        yield f"{', '.join(left)} is set: it costs bandwidth. Unset it once the cause is gone."


def cuda_extra(cards: Sequence[Mapping[str, str]]) -> str:
    """Returns the extra for these GPUs: CUDA 13 needs driver 580 and compute capability 7.5; CUDA 12 runs on less.

    Example:
        >>> cuda_extra([{"driver_version": "570.86", "compute_cap": "9.0"}])
        'cuda12'
    """

    def number(text: str) -> float:
        digits = re.match(r"\d+(\.\d+)?", text)
        return float(digits[0]) if digits else 0.0

    old = any(number(c["driver_version"]) < 580 or number(c["compute_cap"]) < 7.5 for c in cards)
    return "cuda12" if old else "cuda13"
