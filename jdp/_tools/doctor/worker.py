"""The process that the tests of `jdp doctor` run in.

It reads requests from its stdin and answers on a pipe of its own, a line of JSON each: stdout belongs to the
libraries, which print there as they please.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ..._core.devices import Device, resolve_devices, warn_imbalance
from ..._core.replica_mesh import ReplicaMesh, make_mesh


def choose(spec: str | None) -> tuple[Device, ...]:
    """Returns the devices of `--devices`: a count, or names and indices between commas."""
    if spec is None:
        return resolve_devices("doctor", None)
    if spec.isdecimal():
        every = jax.devices()
        if not 1 <= int(spec) <= len(every):
            raise ValueError(
                f"jdp.doctor: --devices {spec} asks for {spec} devices, and there are {len(every)}; one at least is "
                f"tested. Pass a count from 1 to {len(every)}, or names such as {_name(every[0])}."
            )
        return tuple(every[: int(spec)])
    parts = [part.strip() for part in spec.split(",")]
    return resolve_devices("doctor", [int(part) if part.isdecimal() else part for part in parts if part])


def _name(device: Device) -> str:
    return f"{device.platform}:{jax.devices(device.platform).index(device)}"


def _described(device: Device) -> dict[str, Any]:
    try:
        memory = device.memory_stats() or {}
    except Exception:  # some platforms do not tell
        memory = {}
    return {
        "name": _name(device),
        "platform": device.platform,
        "kind": device.device_kind,
        "id": device.id,
        "process": device.process_index,
        "memory_limit_bytes": memory.get("bytes_limit"),
        "memory_in_use_bytes": memory.get("bytes_in_use"),
    }


def start(spec: str | None) -> tuple[tuple[Device, ...], dict[str, Any]]:
    """Starts JAX: the devices, and the answer that describes them."""
    jax.devices()  # what fails here is JAX's, and no fault of the arguments
    try:
        devices = choose(spec)
    except ValueError as error:
        return (), {"failure": "refused", "text": str(error)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_imbalance(devices)
    version = devices[0].client.platform_version
    imbalance = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return devices, {"devices": [_described(d) for d in devices], "platform_version": version, "imbalance": imbalance}


def _told(error: Exception) -> str:
    if str(error):
        return f"{type(error).__name__}: {error}"[:2000]
    at = traceback.extract_tb(error.__traceback__)[-1]  # JAX asserts where a platform is missing, without a word
    return f"{type(error).__name__} at {at.filename}:{at.lineno}, {at.line}"


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the parent is gone, or done: also in the middle of a test that hangs


def serve(reply: int) -> None:
    """Answers requests until stdin ends. Each carries the seconds after which the kernel ends this process."""
    os.set_inheritable(reply, False)  # a compiler that outlives this process must not hold the pipe open
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    devices = tuple[Device, ...]()
    with os.fdopen(reply, "w", buffering=1) as replies:
        replies.write(json.dumps({"ready": True}) + "\n")
        while True:
            signal.alarm(0)
            request = json.loads(requests.get())
            signal.alarm(request["alarm"])  # needs no Python to fire: nothing is left behind if the parent is killed
            try:
                if request["test"] == "start":
                    devices, answer = start(request["devices"])
                else:
                    chosen = [devices[i] for i in request["devices"]]
                    test, count = request["test"], request["words"]
                    if test == "deterministic":
                        from .deterministic import train  # with Flax and optax, which no other test needs

                        answer = {"digest": train(chosen, request["replicas"])}
                    else:
                        answer = compute(chosen[0], count) if test == "compute" else link(test, chosen, count)
            except Exception as error:
                answer = {"failure": "error", "text": _told(error)}
            replies.write(json.dumps(answer) + "\n")


PLACE, DEVICE = 2654435761, 40503  # odd: no two neighbouring words or devices look alike


BODIES: dict[str, Callable[[jax.Array, str], jax.Array]] = {
    "all_reduce": jax.lax.psum,
    "reduce_scatter": lambda x, axis: jax.lax.psum_scatter(x[0], axis, tiled=True)[None],
    "all_gather": lambda x, axis: jax.lax.all_gather(x[0], axis, tiled=True)[None],
    "permute": lambda x, axis: jax.lax.ppermute(x, axis, [(0, 1)]),
}


@functools.cache
def _program(name: str, mesh: ReplicaMesh) -> Callable[[jax.Array], jax.Array]:
    body, axis = BODIES[name], mesh.axis_name
    spec = PartitionSpec(axis)
    return jax.jit(
        jax.shard_map(lambda x: body(x, axis), mesh=mesh.jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


MOVES: dict[str, Callable[[jax.Array, ReplicaMesh], jax.Array]] = {
    "broadcast": lambda x, mesh: jax.device_put(x, mesh.replicated),  # what jdp.replicate does
    "copy": lambda x, mesh: jax.device_put(x, mesh.devices[1]),
    **{name: lambda x, mesh, name=name: _program(name, mesh)(x) for name in BODIES},
}


def words(device: int, count: int, seed: int) -> np.ndarray:
    """Returns what device number `device` is filled with: `count` words of 32 bits, other ones for every seed."""
    return _ramp(count, PLACE, device * DEVICE + seed)


def _ramp(count: int, slope: int, shift: int) -> np.ndarray:
    # modulo 2^32, as the devices count; numpy warns of that for scalars only
    return np.arange(count, dtype=np.uint32) * np.uint32(slope % 2**32) + np.uint32(shift % 2**32)


def must_be(test: str, n: int, at: int, count: int, seed: int) -> np.ndarray | None:
    """Returns what device number `at` of `n` holds when each had `count` words; `None`: nothing is asked of it."""
    if test in ("copy", "permute"):
        return words(0, count, seed) if at == 1 else None
    if test == "broadcast":
        return words(0, count, seed)
    if test == "all_gather":
        return np.concatenate([words(i, count, seed) for i in range(n)])
    total = _ramp(count, n * PLACE, n * (n - 1) // 2 * DEVICE + n * seed)
    return total if test == "all_reduce" else np.split(total, n)[at]


def _filled(test: str, devices: Sequence[Device], count: int) -> jax.Array:
    if test in ("broadcast", "copy"):
        return jax.device_put(words(0, count, 0), devices[0])
    rows = np.stack([words(i, count, 0) for i in range(len(devices))])
    return jax.device_put(rows, make_mesh(tuple(devices)).along(0))


def first_wrong(found: np.ndarray, expected: np.ndarray) -> dict[str, Any] | None:
    """Returns the first word that differs, and how many do; `None` where all agree."""
    if found.shape != expected.shape:
        return {"text": f"{found.shape} words instead of {expected.shape}"}
    wrong = np.flatnonzero(found != expected)
    if not wrong.size:
        return None
    index = int(wrong[0])
    fact = {"index": index, "expected": int(expected[index]), "found": int(found[index])}
    return fact | {"wrong_words": int(wrong.size), "words": int(expected.size)}


def _check(test: str, result: jax.Array, devices: Sequence[Device], count: int, seed: int) -> dict[str, Any] | None:
    shards = {shard.device: shard.data for shard in result.addressable_shards}
    for at, device in enumerate(devices):
        expected = must_be(test, len(devices), at, count, seed)
        if expected is None:
            continue
        if wrong := first_wrong(np.asarray(shards[device]).ravel(), expected):
            # the pair is known where a word has one sender: not in a sum
            sender = wrong.get("index", 0) // count if test == "all_gather" else 0
            return {"failure": "wrong", "at": at, "from": None if "reduce" in test else sender, **wrong}
    return None


@jax.jit
def _shifted(x: jax.Array, seed: jax.Array) -> jax.Array:
    return x + seed


def measure(test: str, devices: Sequence[Device], count: int, repeats: int) -> dict[str, Any]:
    """Returns the median seconds of the test, `{"seconds": ...}`, or the first word that went wrong.

    Every repeat moves other numbers, so that what an earlier one left in memory cannot pass for a result.
    """
    share = count // len(devices) if test == "all_gather" else count
    base, mesh, taken = _filled(test, devices, share), make_mesh(tuple(devices)), []
    for seed in range(1, repeats + 2):
        payload = jax.block_until_ready(_shifted(base, np.uint32(seed)))
        started = time.perf_counter()
        result = jax.block_until_ready(MOVES[test](payload, mesh))
        taken.append(time.perf_counter() - started)
        if wrong := _check(test, result, devices, share, seed):
            return wrong
    return {"seconds": statistics.median(taken[1:])}  # the first one compiles


def compute(device: Device, count: int) -> dict[str, Any]:
    """Sends numbers to the device, computes there, and reads the result: exact, because they are small and whole."""
    host = words(device.id, count, 7)
    found = np.asarray(_shifted(jax.device_put(host, device), np.uint32(5)))
    if wrong := first_wrong(found, host + np.uint32(5)):
        return {"failure": "wrong", "at": 0, "from": None, **wrong}
    a = (np.arange(256 * 256) % 7).reshape(256, 256)
    product = jax.jit(jax.numpy.matmul)(*(jax.device_put(m.astype(np.float32), device) for m in (a, a.T)))
    if wrong := first_wrong(np.asarray(product).astype(np.int64).ravel(), (a @ a.T).ravel()):
        return {"failure": "wrong", "at": 0, "from": None, "what": "a product of matrices", **wrong}
    return {}


def link(test: str, devices: Sequence[Device], count: int) -> dict[str, Any]:
    """Runs one test at both sizes: `{"latency": s, "bandwidth": s}` in seconds, or what went wrong."""
    n = len(devices)
    small, large = (-(-c // n) * n for c in (1024, count))  # the devices share these without a rest
    taken: dict[str, Any] = {"bytes": 4 * large}
    for size, c, repeats in (("latency", small, 10), ("bandwidth", large, 3)):
        answer = measure(test, devices, c, repeats)
        if "failure" in answer:
            return answer | {"bytes": 4 * large}
        taken[size] = answer["seconds"]
    return taken
