"""The order of the doctor's tests, and what is made of their answers."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..tables import say
from .advice import BY_NCCL, GPU, remedies
from .watch import Worker

FEW = 8  # with more devices than these, all pairs would take too long
ENOUGH = 2  # tests of a kind that hang or die, before the rest of the kind is left out: each costs a deadline

Result = dict[str, Any]


def bandwidth(test: str, size: int, seconds: float, n: int) -> tuple[float, float]:
    """Returns the algorithm and bus bandwidth in GB/s (10^9 bytes), as nccl-tests define them.

    The first is `size / seconds`, with the bytes of the whole buffer that is summed, scattered, or gathered. The second
    is the first times the share of the data that a link must carry, however clever the algorithm.

    Source: doc/PERFORMANCE.md of NVIDIA's nccl-tests.
    """
    algorithm = size / seconds / 1e9
    share = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": (n - 1) / n}
    return algorithm, algorithm * share.get(test, 1.0)


def pairs(n: int) -> tuple[list[tuple[int, int]], str]:
    """Returns the pairs of devices that are tested, and in words which they are."""
    every = list(itertools.permutations(range(n), 2))
    if n <= FEW:
        return every, "all pairs of devices"
    ring = [(i, (i + 1) % n) for i in range(n)]
    others = random.Random(n).sample([pair for pair in every if pair not in ring], n)  # the same ones every time
    return ring + others, f"{2 * n} of {len(every)} pairs: a ring, and {n} others drawn by chance"


def plan(n: int, deterministic: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the tests, as name and numbers of the devices: each device, then all of them, then pair by pair.

    Last, if it is asked for, `deterministic` training on 1, 2, 4 ... devices.
    """
    tests: list[tuple[str, tuple[int, ...]]] = [("compute", (i,)) for i in range(n)]
    if n > 1:
        together = ("broadcast", "all_reduce", "reduce_scatter", "all_gather")
        tests += [(test, tuple(range(n))) for test in together]
        tests += [(test, pair) for test in ("copy", "permute") for pair in pairs(n)[0]]
    if deterministic:
        tests += [("deterministic", tuple(range(1 << i))) for i in range(n.bit_length())]
    return tests


class Examination:
    """Runs tests in a worker, and in a new one after each that hung or died."""

    def __init__(self, environ: Mapping[str, str], seconds: float, chosen: str | None) -> None:
        # This machine is examined alone, also from the shell of a pod that is one of several processes.
        of_others = ("JAX_NUM_PROCESSES", "JDP_NUM_PROCESSES")
        alone = {name: value for name, value in environ.items() if name not in of_others}
        # without it JAX takes 3/4 of a GPU's memory, and fails where another program has it
        self.environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **alone}
        self.seconds, self.chosen = seconds, chosen
        self._worker: Worker | None = None
        self._tried: set[str] = set()  # the tests that were run without P2P: each of those costs a start of JAX

    def close(self) -> None:
        if self._worker:
            self._worker.close()

    def start(self) -> Result:
        """Returns a worker whose JAX runs: its devices, or the failure."""
        self.close()
        seconds = 2 * self.seconds  # drivers are slow
        self._worker = Worker(self.environ, seconds)
        answer, step = self._worker.ask(None, seconds), "importing jax and jdp"
        if "failure" not in answer:
            answer, step = self._worker.ask({"test": "start", "devices": self.chosen}, seconds), "jax.devices()"
        if answer.get("failure", "refused") != "refused":
            answer["text"] = f"{step}: {_worded(answer, [])}"
        return answer

    def run(self, tests: Iterable[tuple[str, tuple[int, ...]]], devices: Sequence[Result], size: int) -> list[Result]:
        """Returns the results of all the tests, in their order; the ones that were left out say why.

        At the worst every test hangs: then it ends after `ENOUGH` deadlines and starts of JAX for each kind.
        """
        results, lost, gone = [], dict[str, int](), ""
        for test, numbers in tests:
            names = [devices[i]["name"] for i in numbers]
            result = {"test": test, "devices": names}
            results.append(result)
            if not gone and lost.get(test, 0) < ENOUGH and not (self._worker and self._worker.alive):
                again = self.start()
                gone = f"the rest was left out: JAX does not start again, {again['text']}" if "failure" in again else ""
            if gone or lost.get(test, 0) >= ENOUGH:
                result |= {"ok": None, "text": gone or f"the rest of {test} was left out after {ENOUGH} failures"}
                continue
            say("doctor", f"{test} {' '.join(names)}")
            result |= self._one(test, numbers, names, size, 1 << (len(devices).bit_length() - 1))
            if result.get("failure") in ("hang", "died", "error"):
                lost[test] = lost.get(test, 0) + 1
                self.close()  # after an error too: a GPU's context may be lost with it
            if not result["ok"]:
                platform = devices[0]["platform"]
                result["remedies"] = remedies(test, result["failure"], platform, len(devices))
                if platform in GPU and test in BY_NCCL:
                    result |= self._without_p2p(test, numbers, names, size)
        return results

    def _one(self, test: str, numbers: tuple[int, ...], names: list[str], size: int, replicas: int = 1) -> Result:
        assert self._worker
        asked = {"test": test, "devices": numbers, "words": max(1, size // 4), "replicas": replicas}
        answer = self._worker.ask(asked, self.seconds)
        if "failure" in answer:
            named = {k: v for k, v in answer.items() if k not in ("at", "from", "text")}
            named |= {k: names[answer[k]] for k in ("at", "from") if answer.get(k) is not None}
            return {"ok": False, **named, "text": _worded(answer, names, test in ("copy", "permute"))}
        if test == "compute":
            return {"ok": True}
        if test == "deterministic":
            return {"ok": True, "digest": answer["digest"]}
        algorithm, bus = bandwidth(test, answer["bytes"], answer["bandwidth"], len(names))
        speed = {"latency_us": answer["latency"] * 1e6, "algbw_gb_per_s": algorithm, "busbw_gb_per_s": bus}
        return {"ok": True, "bytes": answer["bytes"], **speed}

    def _without_p2p(self, test: str, numbers: tuple[int, ...], names: list[str], size: int) -> Result:
        if self.environ.get("NCCL_P2P_DISABLE", "0") != "0" or test in self._tried:
            return {}
        self._tried.add(test)
        environ = self.environ | {"NCCL_P2P_DISABLE": "1"}
        with contextlib.closing(Examination(environ, self.seconds, self.chosen)) as other:
            cured = "failure" not in other.start() and other._one(test, numbers, names, size)["ok"]
        return {"cured_by_nccl_p2p_disable": cured}


def compared(results: list[Result]) -> None:
    """Marks the trainings whose bits are not those of the one on the fewest devices as wrong."""
    for result in results[1:]:
        if result["ok"] and results[0]["ok"] and result["digest"] != results[0]["digest"]:
            text = f"after the same steps the bits are others than on {len(results[0]['devices'])} device"
            result |= {"ok": False, "failure": "wrong", "text": text}
            result["remedies"] = [
                "XLA_FLAGS=--xla_gpu_deterministic_ops=true, on GPUs; the same kind of device for all",
            ]


def _worded(answer: Result, names: list[str], pair: bool = False) -> str:
    """Returns the failure as a sentence; of a `pair`, the names are said already."""
    if answer["failure"] != "wrong":
        printed = answer.get("printed", "")
        return answer["text"] + (f'; it printed: "{printed}"' if printed else "")
    where = f"{names[answer['at']]}: "
    if answer.get("from") is not None and answer["from"] != answer["at"]:
        where = f"{names[answer['from']]} -> {where}"
    where = "" if pair or len(names) == 1 else where
    if "index" not in answer:
        return where + answer["text"]
    count = f"{answer['wrong_words']} of {answer['words']} words wrong"
    word = f"at index {answer['index']} expected {answer['expected']}, found {answer['found']}"
    return f"{where}{word} ({count}{', in ' + answer['what'] if 'what' in answer else ''})"
