"""jdp on GPUs beside plain jit and torch's DataParallel: a training step of ResNet-50 and of a GPT of 125M parameters.
jdp twice: with a loss of the chunk, and with a criterion of all rows.

    python benchmarks/gpu.py                         where JAX finds no GPU, it says so, and writes nothing
    python benchmarks/gpu.py --platform cpu --tiny   runs all of the code on tiny models; writes nothing either

Each contender has a process of its own, which stays up; they take turns of a few steps, in an order that is shuffled
every round, and a turn is over when the devices are done. Figures are medians, and ratios of medians. The loss is that
of the last step: jdp and plain jit start from the same parameters, torch from its own. What was found is written to
benchmarks/results/, under the GPU's name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_sizes import FULL
from gpu_worker import CONTENDERS, serve

RESULTS = Path(__file__).with_name("results")
LABELS = {"jdp": "jdp", "criterion": "jdp, criterion=", "jit": "plain jit", "torch": "torch DataParallel"}
COLUMNS = ["model", "", "step", "x jdp's", "rows/s", "rows", "parameters", "loss", "rounds"]
Row = dict[str, Any]


class Worker:
    """A contender's process."""

    def __init__(self, contender: str, model: str, platform: str, tiny: bool) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        command = [sys.executable, __file__, "--worker", contender, model, "--platform", platform]
        # All keep their memory while they wait, and JAX would take three quarters each.
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.24"} if platform == "gpu" else {"JAX_PLATFORMS": "cpu"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command + ["--tiny"] * tiny, text=True, env=os.environ | memory, **pipes)

    def ask(self, steps: int | None = None) -> Row:
        """What it says after so many steps; without a number, what it says of itself."""
        assert self.process.stdin and self.process.stdout
        try:
            if steps is not None:
                print(steps, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.errors.seek(0)
        said = [words.strip() for words in self.errors if words.strip()]
        return {"gone": f"ended with status {self.process.wait()}: {said[-1][:200] if said else 'no word'}"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe:
                pipe.close()


def find_gpus() -> tuple[list[str], str]:
    """Their names, in a process that lets go of them; or none, and why."""
    code = "import json, jax; print(json.dumps([d.device_kind for d in jax.devices('gpu')]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1]), ""
    return [], next((line for line in reversed(run.stderr.splitlines()) if line.strip()), "no word")


def measure(model: str, args: argparse.Namespace) -> dict[str, Row]:
    """A row for each contender; one that is missing, or ended, has that in its row and no figure."""
    with ExitStack() as closing:
        workers = {name: Worker(name, model, args.platform, args.tiny) for name in CONTENDERS}
        for worker in workers.values():
            closing.callback(worker.close)
        rows = {name: worker.ask() for name, worker in workers.items()}
        alive = [name for name, row in rows.items() if "parameters" in row]
        times: dict[str, list[float]] = {name: [] for name in alive}
        shuffle = random.Random(0).shuffle
        for counted in range(-1, args.rounds):  # in the first they compile
            shuffle(alive)  # nobody always comes after the same neighbour
            for name in [*alive]:
                answer = workers[name].ask(args.steps)
                rows[name] |= answer
                if "gone" in answer:
                    alive.remove(name)
                elif counted >= 0:
                    times[name].append(answer["seconds"] / args.steps)
    for name in alive:
        rows[name] |= {"seconds": statistics.median(times[name]), "rounds": len(times[name])}
        if "jdp" in alive:
            rows[name]["ratio"] = rows[name]["seconds"] / statistics.median(times["jdp"])
    return rows


def cells(model: str, name: str, row: Row) -> list[str]:
    if "gone" in row or "missing" in row:
        return [model, LABELS[name], row.get("gone") or f"not measured: {row['missing']}", *["-"] * (len(COLUMNS) - 3)]
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
    figures = f"{row['seconds'] * 1e3:.2f} ms", ratio, f"{row['rows'] / row['seconds']:,.0f}"
    facts = str(row["rows"]), f"{row['parameters']:,}", f"{row['loss']:.4f}", str(row["rounds"])
    return [model, LABELS[name], *figures, *facts]


def table(results: dict[str, dict[str, Row]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [cells(model, name, row) for model, rows in results.items() for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in ("jax", "jaxlib", "flax", "optax", "torch", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(names: list[str]) -> str:
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{kinds}; {os.cpu_count()} CPU cores ({platform.machine()})"


def write(names: list[str], results: dict[str, dict[str, Row]], args: argparse.Namespace) -> Path:
    """A table to read, and all that was found beside it."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{len(names)} {names[0]}".lower()).strip("-")
    RESULTS.mkdir(exist_ok=True)
    found = {"machine": machine(names), "versions": versions(), "steps": args.steps, "results": results}
    (RESULTS / f"gpu-{slug}.json").write_text(json.dumps(found, indent=1) + "\n")
    said = ", ".join(f"{package} {number}" for package, number in found["versions"].items())
    path = RESULTS / f"gpu-{slug}.md"
    path.write_text(
        f"# A training step on {machine(names)}\n\nWritten by gpu.py, which says what is compared. {said}. bfloat16; "
        f"medians of {args.steps} steps, ratios of medians.\n\n{table(results)}\n"
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="jdp on GPUs beside plain jit and torch's DataParallel")
    parser.add_argument("--worker", nargs=2, metavar=("CONTENDER", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs; writes nothing")
    parser.add_argument("--models", nargs="+", choices=[*FULL], default=[*FULL])
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender (20)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (10)")
    args = parser.parse_args()
    if args.worker:
        contender, model = args.worker
        return serve(contender, model, args.platform, args.tiny)
    if args.platform == "cpu" and not args.tiny:
        parser.error("--platform cpu is there to try the code: it wants --tiny")
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds and --steps are 1 or more")
    names, why = find_gpus() if args.platform == "gpu" else (["CPU"], "")
    if not names:
        return print(f"No GPU that JAX can use ({why}). Nothing was measured, and nothing is written.")
    results = {model: measure(model, args) for model in args.models}
    print(f"{machine(names)}\n{table(results)}")
    if args.tiny:
        return print("Tiny models: these figures say that the code runs, and nothing else. Nothing is written.")
    print(f"Written to {write(names, results, args)}.")


if __name__ == "__main__":
    main()
