"""jdp beside what people use instead: the same model, batches and optimizer in eight programs. Run: make bench

The programs are the files of peers/, each the shortest honest one for its users. Every one runs in a process of its
own (torch's DistributedDataParallel in one per device), which stays up and waits; this one gives them turns, in an
order that is shuffled every round, so that the noise of a shared machine meets all of them. A turn is a few steps, from
batches in numpy to new parameters, and is over when they have run. Figures are medians, and ratios of medians.

    time to the first step   from the start of the process, imports and compilation included, with nothing else running
    peak RSS                 of the process after all its turns; several processes are added up
    uneven                   a fresh trainer makes one step on 13 rows; right is the step that one device makes on them
    agree                    the loss of the parameters that each has after four steps, evaluated by one program
    lines                    of the peer's file: those marked `# parallel`, and all of them

A peer that is not installed says so in its row. torch's two take one number of devices each: two processes with a
thread each, and one process with two threads, which stands beside the others on one device, where XLA uses both, too.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peers import _agree, _report, _tasks, _worker
from peers._ask import Gone, Peer, warm_files

AGREE_STEPS = 4
SETTLE = 0.005  # seconds before a turn: torch's threads spin on a little after theirs
ROWS = {"MLP": 256, "CNN": 128, "Transformer": 64}
ONLY = {"torch_ddp": 2, "torch_threads": 1}  # devices
Row = dict[str, Any]


class Options(NamedTuple):
    """How much of everything; `quick` is for a look, and for tests."""

    models: list[str]
    devices: list[int]
    peers: list[str]
    seconds: float
    steps: int = 4
    rows: dict[str, int] = ROWS

    def contenders(self, n: int) -> list[str]:
        return [peer for peer in self.peers if ONLY.get(peer, n) == n]


@contextmanager
def noted(row: Row, alive: dict[str, Peer], name: str) -> Iterator[None]:
    """A peer that is gone has that in its row, and no more turns."""
    try:
        yield
    except Gone as error:
        row["gone"] = str(error)
        alive.pop(name, None)


def begin(name: str, n: int, path: str, closing: ExitStack, row: Row) -> Peer | None:
    """Started and past its first step, or the reason why not in `row`."""
    peer = Peer(name, n, path)
    closing.callback(peer.close)
    missing = next((answer["missing"] for answer in peer.ask() if "missing" in answer), None)
    if missing:
        row["missing"] = missing
        return None
    row["first"] = peer.turn(1)[1] - peer.started
    return peer


def race(model: str, n: int, options: Options) -> dict[str, Row]:
    """A row for each contender, with as much in it as the contender got to."""
    rows: dict[str, Row] = {name: {} for name in options.contenders(n)}
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        task, path = _tasks.make(model, options.rows[model]), str(folder / "task.npz")
        _tasks.save(task, path)
        alive: dict[str, Peer] = {}
        for name, row in rows.items():
            with noted(row, alive, name):
                peer = begin(name, n, path, closing, row)
                alive |= {name: peer} if peer else {}
        right = _agree.after(task, task.batches[:AGREE_STEPS])
        each(alive, rows, lambda peer, row: agreement(peer, row, task, right, folder / "learnt.npz"))
        times = take_turns(alive, rows, options)
        for name, values in times.items():
            rows[name] |= {"seconds": float(np.median(values)), "rounds": len(values)}
        compare(rows, times)
        for name in times:
            rows[name]["rate"] = task.items() / rows[name]["seconds"]
        each(alive, rows, lambda peer, row: row.update(rss=sum(a["peak"] or 0 for a in peer.ask("memory"))))
        if model == "MLP":  # of which the answer does not depend
            each(alive, rows, lambda peer, row: row.update(uneven=uneven(peer, task, folder)))
    return rows


def each(alive: dict[str, Peer], rows: dict[str, Row], do: Any) -> None:
    for name, peer in [*alive.items()]:
        with noted(rows[name], alive, name):
            do(peer, rows[name])


def agreement(peer: Peer, row: Row, task: _tasks.Task, right: _agree.Flat, to: Path) -> None:
    """After the first step some more; then the loss, beside that of one device, as a share of it."""
    peer.turn(AGREE_STEPS - 1)
    peer.params("params", to)
    found, loss = _agree.read(to), _agree.loss(task, right)
    row["agree"] = abs(_agree.loss(task, found) - loss) / loss
    row["moved"] = _agree.off(_agree.flat(task.params), right, found)


def uneven(peer: Peer, task: _tasks.Task, folder: Path) -> str:
    """Right, wrong by how much, refused with which words, or a crash."""
    try:
        answer = peer.params("uneven", folder / "uneven.npz")
    except Gone as error:
        return f"crash: {error}"
    if "refused" in answer:
        return f"refused: {answer['refused']}"
    right = _agree.after(task, [task.uneven()])
    return _agree.verdict(_agree.off(_agree.flat(task.params), right, _agree.read(folder / "uneven.npz")))


def take_turns(alive: dict[str, Peer], rows: dict[str, Row], options: Options) -> dict[str, list[float]]:
    """Seconds for a step, by contender and round; five rounds or more, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in alive}
    names, shuffle, end = [*alive], random.Random(0).shuffle, time.perf_counter() + options.seconds
    rounds = -1
    while alive and (rounds < 5 or time.perf_counter() < end):
        shuffle(names)  # nobody always comes after the same neighbour
        for name in names:
            if name in alive:
                with noted(rows[name], alive, name):
                    time.sleep(SETTLE)
                    first, last = alive[name].turn(options.steps)
                    if rounds >= 0:
                        times[name].append((last - first) / options.steps)
        rounds += 1
    return {name: values for name, values in times.items() if name in alive}


def compare(rows: dict[str, Row], times: dict[str, list[float]]) -> None:
    """The ratio of medians to jdp's; and how sure it is, from the pairs of one round each."""
    ours = times.get("jdp_train_step")
    if ours is None:
        return
    for name, values in times.items():
        pairs = np.array(values) / np.array(ours)
        upper, lower = np.percentile(pairs, (75, 25))
        rows[name]["ratio"] = float(np.median(values) / np.median(ours))
        rows[name]["noise"] = 0.93 * float(upper - lower) / len(pairs) ** 0.5  # a median's error, if noise is normal


def main() -> None:
    parser = argparse.ArgumentParser(description="jdp beside what people use instead")
    parser.add_argument("--worker", nargs=2, metavar=("PEER", "TASK"), help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=[*ROWS])
    parser.add_argument("--devices", nargs="+", type=int, help="how many (1 2 8)")
    parser.add_argument("--peers", nargs="+", choices=[*_report.LABELS], default=[*_report.LABELS])
    parser.add_argument("--seconds", type=float, default=15, help="of turns for each model and number of devices (15)")
    parser.add_argument("--quick", action="store_true", help="a minute in all: one model, small batches, few turns")
    parser.add_argument("--write", action="store_true", help="the tables into RESULTS.md, and peers.png beside it")
    args = parser.parse_args()
    if args.worker:
        return _worker.serve(*args.worker)
    if args.write and (args.quick or "jdp_train_step" not in args.peers):
        parser.error("--write wants the whole race, with jdp in it and not --quick")
    options = Options(args.models or [*ROWS], args.devices or [1, 2, 8], args.peers, args.seconds)
    if args.quick:
        few = Options(args.models or ["MLP"], args.devices or [1, 2], args.peers, 0.5)
        options = few._replace(steps=1, rows=dict.fromkeys(ROWS, 16))
    warm_files(options.peers)
    results = {}
    for model in options.models:
        for n in options.devices:
            print(f"{model} on {n}", file=sys.stderr, flush=True)
            results[model, n] = race(model, n, options)
    sections = _report.tables(results)
    print("\n\n".join(sections))
    if args.write:
        from peers import _picture

        _report.write(sections, options.seconds, options.steps)
        _picture.save(results, Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
