"""The driver's side of a peer: its processes, and what to ask of them."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).parents[1] / "peers.py"
PATIENCE = 180  # seconds for one answer; a peer that hangs is not to hold up the others
TORCH = ("torch_ddp", "torch_threads")


class Gone(Exception):
    """The peer ended, or hung, instead of answering; says which."""


class Asked:
    """Processes that answer each request with a line of JSON, and wait for the next. Only one works at a time."""

    def __init__(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """One process of `command` in each of the environments, which are added to this process's own."""
        self.errors = tempfile.TemporaryFile("w+")
        self.processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=os.environ | environment,
            )
            for environment in environments
        ]

    def ask(self, do: str = "", **request: Any) -> list[dict[str, Any]]:
        """One answer from each process. Without `do`: what a new one says by itself."""
        if do:
            line = (json.dumps({"do": do} | request) + "\n").encode()
            for process in self.processes:
                assert process.stdin
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                except BrokenPipeError:
                    raise Gone(self.last_words(process)) from None
        return [self._answer(process) for process in self.processes]

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            if not waiting.select(PATIENCE):
                raise Gone(f"hung: no answer in {PATIENCE} s")
        line = process.stdout.readline()
        if not line:
            raise Gone(self.last_words(process))
        return json.loads(line)

    def last_words(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait(10)
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return f"exit status {status}: {lines[-1] if lines else 'no word'}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # one that crashed its partner waits for it for ever
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        self.errors.close()


class Peer(Asked):
    """A peer on `n` devices: one process that has them, or n processes (torch's way)."""

    def __init__(self, name: str, n: int, path: str) -> None:
        self.started = time.perf_counter()
        port, ranks = free_port(), n if name == "torch_ddp" else 1
        command = [sys.executable, str(DRIVER), "--worker", name, path]
        super().__init__(command, [environment(name, n) | torchrun(rank, ranks, port) for rank in range(ranks)])

    def turn(self, steps: int) -> tuple[float, float]:
        """When the first of its processes began, and when the last was done; all have one clock."""
        answers = self.ask("train", steps=steps)
        return min(a["start"] for a in answers), max(a["end"] for a in answers)

    def params(self, do: str, to: Path) -> dict[str, Any]:
        """`do` is "params" or "uneven". All processes save what they have; torch's are the same in all."""
        answers = self.ask(do, to=str(to))
        return next((answer for answer in answers if "refused" in answer), answers[0])


def environment(name: str, n: int) -> dict[str, str]:
    """n devices of the CPU; for torch n threads, or one in each of n processes (torchrun's default, too)."""
    if name in TORCH:
        return {"OMP_NUM_THREADS": "1" if name == "torch_ddp" else "2"}
    # Two threads for each device: with fewer, XLA's collectives can wait for each other for ever on few cores.
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(n), "NPROC": str(2 * n), "XLA_FLAGS": ""}


def torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def warm_files(peers: list[str]) -> None:
    """Reads the libraries from disk once, or the first peer to start would pay for those that came after it."""
    for package in {"optax", *(peer.partition("_")[0] for peer in peers)} & {
        "jdp",
        "optax",
        "keras",
        "equinox",
        "torch",
    }:
        subprocess.run([sys.executable, "-c", f"import {package}"], stderr=subprocess.DEVNULL, check=False)
