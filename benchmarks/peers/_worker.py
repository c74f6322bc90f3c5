"""One peer in a process of its own, which does what it is asked, one line of JSON at a time, until its input ends."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import _tasks


def serve(peer: str, path: str) -> None:
    """Requests come on stdin."""
    answer = answering()
    try:
        module = importlib.import_module(f"peers.{peer}")
    except ImportError as error:
        return answer({"missing": first_line(error)})
    task = _tasks.load(path)
    train, params = module.trainer(task)
    batches = itertools.cycle(task.batches)
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        match request["do"]:
            case "train":
                given = [*itertools.islice(batches, request["steps"])]
                start = time.perf_counter()
                train(given)
                answer({"start": start, "end": time.perf_counter()})
            case "params":
                save(params(), request["to"])
                answer({"saved": True})
            case "memory":
                answer({"peak": peak_rss()})
            case "uneven":
                answer(uneven(module.trainer, path, request["to"]))


def answering() -> Callable[[dict[str, Any]], None]:
    """What gives an answer, on what was stdout; what libraries print goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda found: print(json.dumps(found), file=answers, flush=True)


def uneven(trainer: Callable[[Any], Any], path: str, to: str) -> dict[str, Any]:
    """A step on 13 rows, by a trainer that has seen nothing else: what it has learnt, or how it refused."""
    task = _tasks.load(path)
    try:
        train, params = trainer(task)
        train([task.uneven()])
        save(params(), to)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {first_line(error)}"}
    return {"saved": True}


def save(params: _tasks.Params, to: str) -> None:
    arrays: Any = {f"{layer}/{key}": np.asarray(value) for layer, kv in params.items() for key, value in kv.items()}
    np.savez(to, **arrays)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def peak_rss() -> int | None:
    """Bytes; not `ru_maxrss`, which starts with the memory of the process that started this one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return None
