"""What several examples share: options, the lines about the machine, the progress bar."""

import argparse
import hashlib
import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from _mnist_data import positive
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import jdp


def parser(doc: str | None, picture: str) -> argparse.ArgumentParser:
    """The options that every example has; add your own, then `parse`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--devices", type=positive, metavar="N", help="use the first N (default: all, or 4 virtual CPU devices)")
    add("--seed", type=natural, default=0, metavar="N")
    add("--picture", type=Path, default=Path(picture), metavar="PATH", help=f"default: {picture}")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    # Refused now, and not after minutes of training.
    if args.picture.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"argument --picture: {args.picture} ends in none of .png, .svg, .pdf")
    if not args.picture.parent.is_dir():
        parser.error(f"argument --picture: there is no folder {args.picture.parent}")
    return args


def natural(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def rate(text: str) -> float:
    """A learning rate."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return number


def probability(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return number


def machine(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} x " + ", ".join(sorted({device.device_kind for device in devices}))


def one_process_speaks(args: argparse.Namespace) -> None:
    """What the others print and draw goes nowhere; their errors are seen."""
    if jax.process_index() > 0:
        sys.stdout, args.picture = open(os.devnull, "w"), io.BytesIO()


def shares(rows: int, replicas: int) -> str:
    """What each replica gets of so many rows: "4, 4, 4, 3"."""
    sizes = jdp.chunk_sizes(rows, replicas)
    return ", ".join(map(str, (*sizes, *[0] * (replicas - len(sizes)))))


def sha256(tree: Any) -> str:
    """Of all bytes of a tree of arrays, and their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


class Bar:
    """How far the run is, how fast, and how long it will take; off a terminal, only what is printed through it.

    `step(loss, count)` after each step, with how many of `unit` it worked on; `losses` has the numbers, after `read`
    that of the last step too. `pause` before anything else that takes time. The rate is the median of the last steps:
    some may have compiled. After Ctrl-C `picture` draws what there is, under the title that it is given.
    """

    def __init__(self, steps: int, unit: str, picture: Callable[[str], str], losses: Sequence[float] = ()) -> None:
        self.unit, self._picture = unit, picture
        self.losses = list(losses)  # one per step; those that are here already are of steps done before
        self._pending: jax.Array | None = None
        self._since: float | None = None  # when the first step after a pause was on its way
        self._rates: deque[float] = deque(maxlen=50)
        self.console = Console(highlight=False, soft_wrap=True, markup=False)
        self.print = self.console.print
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(14),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.progress.add_task("", total=steps, completed=len(self.losses), state="compiling")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self.losses:
            self.print(self._picture(f"interrupted after {len(self.losses)} steps"))

    def step(self, loss: jax.Array, count: int) -> None:
        """Keep a step's loss, and show that of the step before it: to read its own is to wait for it."""
        self.read()
        self._pending = loss
        now = time.perf_counter()
        if self._since is not None:
            self._rates.append(count / (now - self._since))
        self._since = now

    def pause(self) -> None:
        """Wait for the last step; the time until the next one is not counted."""
        self.read()
        self._since = None

    def rate(self) -> str:
        return f"{np.median(self._rates):,.0f} {self.unit}/s" if self._rates else ""

    def read(self) -> None:
        """Wait for the last step's loss."""
        if self._pending is None:
            return
        loss, self._pending = float(self._pending), None
        if not math.isfinite(loss):
            sys.exit(f"the loss of step {len(self.losses) + 1} is {loss}; try a lower --lr")
        self.losses.append(loss)
        self.progress.update(self.task, advance=1, state=f"{self.rate()}  loss {np.mean(self.losses[-20:]):.3f}")
