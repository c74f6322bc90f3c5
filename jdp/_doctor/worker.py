"""The process that the tests of `jdp doctor` run in.

It reads requests from its stdin and answers on a pipe of its own, a line of JSON each: stdout belongs to the
libraries, which print there as they please.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from typing import Any

import jax

from .._core.devices import Device, resolve_devices, warn_imbalance
from .links import compute, link, rounded


def choose(spec: str | None) -> tuple[Device, ...]:
    """The devices of `--devices`: a count, or names and indices between commas."""
    if spec is None:
        return resolve_devices("doctor", None)
    if "," not in spec and spec.isdecimal():
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


def _answer(request: dict[str, Any], devices: tuple[Device, ...]) -> dict[str, Any]:
    chosen = [devices[i] for i in request["devices"]]
    count = rounded(request["words"], len(chosen))
    if request["test"] == "compute":
        return compute(chosen[0], count)
    return link(request["test"], chosen, count) | {"bytes": 4 * count}


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
    devices: tuple[Device, ...] = ()
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
                    answer = _answer(request, devices)
            except Exception as error:
                answer = {"failure": "error", "text": _told(error)}
            replies.write(json.dumps(answer) + "\n")
