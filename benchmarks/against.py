"""What jdp costs in this checkout beside another commit of it. Run: python benchmarks/against.py COMMIT

The programs are jdp's own in the other benchmarks of this checkout; only the package `jdp` is taken from COMMIT. Each
tree has a process of its own, and the two take turns: while one runs, the other waits. A round is a turn of the old
one, two of the new, and one of the old, so that neither always comes first; a turn is a call that is not counted and
then some that are, some 30 ms of them. A round gives one ratio, of the medians of its turns.

    overhead       dp.apply of overhead.py: the full batch (jdp), a row fewer (uneven), and jitted gradients of both
    train          dp.train_step of train.py: the full batch (jdp), a row fewer (uneven), and accumulate_steps=8
    peers          four steps of peers/jdp_train_step.py, from batches in numpy
    host_cost      five calls of dp.apply or of a step on a model that is all leaves (10, 100 or 1000 of them), with a
                   batch that is cut already, or one in numpy
    new / old      the median of the rounds' ratios: above 1, this checkout is slower
    interval       of that median, 95 %: a bootstrap over the starts of processes, and over the rounds in each. Two
                   processes of one program differ by a few percent, so the rounds of one start tell too little
    processor      the same two of the processor's time, of all threads: where other programs run on the machine, it
                   tells more than the clock on the wall. It decides nothing

The exit status is 1 when an interval of the time on the wall lies wholly above the bound, or when a program did not run
on one of the sides.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import _results
import numpy as np
from peers._ask import Asked, Gone, environment

ROOT = Path(__file__).resolve().parents[1]
TURN = 0.03  # seconds of calls in a turn
MIN_ROUNDS = 3  # of each start
Calls = dict[str, Callable[[], Any]]


def of_overhead(model: str, n: int) -> Calls:
    import jax
    import overhead

    calls, _ = overhead.contenders(model, n)
    return {name: lambda call=call: jax.block_until_ready(call()) for name, call in calls.items()}


def of_train(model: str, n: int) -> Calls:
    import train

    return {**train.by_jdp(train.make_task(model, n))}


def of_peers(model: str, n: int) -> Calls:
    from peers import _tasks, jdp_train_step

    task = _tasks.make(model, 128)
    train, _ = jdp_train_step.trainer(task)
    return {"four steps": partial(train, task.batches)}


def of_host_cost(leaves: str, n: int) -> Calls:
    import host_cost
    import jax

    def five(call: Callable[[], Any]) -> None:
        jax.block_until_ready([call() for _ in range(5)])

    return {name: partial(five, call) for name, call in host_cost.by_jdp(host_cost.Task(int(leaves))).items()}


# What makes the calls of a benchmark on n devices, from one of its cases; the cases; and which of the calls are timed.
BENCHMARKS: dict[str, tuple[Callable[[str, int], Calls], list[str], list[str]]] = {
    "overhead": (of_overhead, ["MLP", "CNN"], ["jdp", "uneven", "gradient", "uneven gradient"]),
    "train": (of_train, ["MLP", "CNN", "Transformer"], ["jdp", "uneven", "accumulate"]),
    "peers": (of_peers, ["MLP", "CNN", "Transformer"], ["four steps"]),
    "host_cost": (of_host_cost, ["10", "100", "1000"], ["apply", "apply numpy", "step", "step numpy"]),
}


def worker(benchmark: str, case: str, n: int) -> None:
    """One of the two processes: answers with the seconds of a call, of both clocks, for each turn it is asked for."""
    from peers._worker import answering

    import jdp

    answer = answering()
    calls = BENCHMARKS[benchmark][0](case, n)
    answer({"tree": str(Path(jdp.__file__).resolve().parents[1])})
    for line in sys.stdin:
        request = json.loads(line)
        call, times = calls[request["name"]], []
        call()
        computed = time.process_time()
        for _ in range(request["calls"]):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        computed = (time.process_time() - computed) / request["calls"]
        answer({"seconds": [float(np.median(times)), computed]})


class Tree(Asked):
    """A process whose `jdp` is that of a tree."""

    def __init__(self, tree: Path, benchmark: str, case: str, n: int) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "against.py"), "--worker", benchmark, case, str(n)]
        super().__init__(command, [environment("jdp_train_step", n) | {"PYTHONPATH": str(tree)}])
        self.tree = tree.resolve()

    def begin(self) -> None:
        """Waits until it has made the program."""
        (found,) = self.ask()
        if found["tree"] != str(self.tree):
            raise Gone(f"imports the jdp of {found['tree']}, not of {self.tree}")

    def turn(self, name: str, calls: int) -> np.ndarray:
        """The seconds of a call, on the wall and of the processor."""
        (found,) = self.ask("turn", name=name, calls=calls)
        return np.array(found["seconds"])


def take_turns(old: Tree, new: Tree, names: list[str], seconds: float) -> dict[str, np.ndarray]:
    """The seconds of a call of each program: `(rounds, 2 trees, 2 clocks)`."""
    calls, found = {}, {name: [] for name in names}
    for name in names:
        for tree in old, new:
            tree.turn(name, 3)  # compiles, and warms up
        calls[name] = max(1, min(500, round(TURN / old.turn(name, 3)[0])))
    end = time.perf_counter() + seconds * len(names)
    while time.perf_counter() < end or len(found[names[-1]]) < MIN_ROUNDS:
        for name in names:
            a, b, c, d = (tree.turn(name, calls[name]) for tree in (old, new, new, old))
            found[name].append(((a + d) / 2, (b + c) / 2))
    return {name: np.array(rounds) for name, rounds in found.items()}


def race(
    trees: list[Path], benchmark: str, case: str, n: int, names: list[str], seconds: float, starts: int
) -> dict[str, list[np.ndarray]]:
    """For each program the rounds of each start, in which both processes are new."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for _ in range(starts):
        with ExitStack() as closing:
            old, new = pair = [Tree(tree, benchmark, case, n) for tree in trees]
            for tree in pair:
                closing.callback(tree.close)
            for tree in pair:
                tree.begin()
            for name, rounds in take_turns(old, new, names, seconds / starts).items():
                found[name].append(rounds)
    return found


def interval(starts: list[np.ndarray]) -> tuple[float, float]:
    """Where 95 % of the medians lie when as many starts are drawn again, and as many rounds of each."""
    draw = np.random.default_rng(0)
    medians = []
    for _ in range(1000):
        drawn = (starts[i] for i in draw.integers(len(starts), size=len(starts)))
        medians.append(np.median(np.concatenate([draw.choice(rounds, size=len(rounds)) for rounds in drawn])))
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def cells(starts: list[np.ndarray], bound: float) -> tuple[list[str], bool]:
    """What is said of a program, and whether it is too slow."""
    rounds = np.concatenate(starts)
    old, new = np.median(rounds[:, :, 0], axis=0) * 1e6
    (wall, low), (processor, _) = (ratio([of[:, 1, clock] / of[:, 0, clock] for of in starts]) for clock in (0, 1))
    verdict = f"over {bound:g}" if low > bound else ""
    return [f"{old:,.0f} us", f"{new:,.0f} us", *wall, *processor, str(len(rounds)), verdict], low > bound


def ratio(starts: list[np.ndarray]) -> tuple[list[str], float]:
    """The median and its interval in words, and where that begins."""
    low, high = interval(starts)
    return [f"{np.median(np.concatenate(starts)):.3f}", f"{low:.3f} to {high:.3f}"], low


def unpack(commit: str, to: Path) -> None:
    """The package as it is in the commit; the checkout and its git are as they were."""
    archive = subprocess.run(["git", "archive", commit, "jdp"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"against.py: there is no {commit} to compare with: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(to, filter="data")


def chosen(only: list[str], n: int) -> dict[tuple[str, str], list[str]]:
    """The programs whose names have one of the words in them, by benchmark and case."""
    found: dict[tuple[str, str], list[str]] = {}
    for benchmark, (_, cases, names) in BENCHMARKS.items():
        for case in cases:
            of_case = [
                name
                for name in names
                if any(word in f"{benchmark} {case}: {name}" for word in only) and (n > 1 or "uneven" not in name)
            ]
            found |= {(benchmark, case): of_case} if of_case else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    if "--worker" in sys.argv:
        benchmark, case, n = sys.argv[2:]
        return worker(benchmark, case, int(n))
    parser.add_argument("commit", help="what git calls it: a hash, HEAD, a branch")
    parser.add_argument("--seconds", type=float, default=10, help="for each program and number of devices (10)")
    parser.add_argument("--starts", type=int, default=5, help="of each process, among which the seconds are shared (5)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help='programs with them, as "train MLP: jdp"'
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8], help="how many (1 2 8)")
    parser.add_argument("--bound", type=float, default=1.02, help="above it an interval is a failure (1.02)")
    args = parser.parse_args()
    if not any(chosen(args.only, n) for n in args.devices):
        parser.error(f"no program has {' or '.join(map(repr, args.only))} in its name; see the docstring")
    rows, bad = [], False
    with tempfile.TemporaryDirectory() as folder:
        unpack(args.commit, Path(folder))
        trees = [Path(folder), ROOT]
        for n in args.devices:
            for (benchmark, case), names in chosen(args.only, n).items():
                try:
                    found = race(trees, benchmark, case, n, names, args.seconds, args.starts)
                except Gone as error:
                    rows.append([f"{benchmark} {case}", str(n), *["-"] * 7, str(error)])
                    bad = True
                    continue
                for name, starts in found.items():
                    found_of, slower = cells(starts, args.bound)
                    rows.append([f"{benchmark} {case}: {name}", str(n), *found_of])
                    bad |= slower
                    print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    columns = "program", "devices", "old", "new", "new / old", "interval", "processor", "interval", "rounds", ""
    print(f"This checkout against {args.commit}: {_results.versions()}.\n\n{_results.table(columns, rows)}")
    sys.exit(bad)


if __name__ == "__main__":
    main()
