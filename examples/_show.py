"""What a person sees of a training run: the options, the devices, the progress bar, the result."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
import numpy as np
from _mnist_data import MNIST, TEST_BATCH, add_arguments, positive
from _picture import picture
from _start import save
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import jdp


def arguments(doc: str | None, picture: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=positive, default=5, metavar="N")
    add("--batch-size", type=positive, default=128, metavar="N", help="rows in a batch, over all devices")
    add("--lr", type=float, default=4e-3, help="Adam's learning rate at the start; it decays to zero")
    add(
        "--devices",
        type=positive,
        metavar="N",
        help="use the first N (default: all, or 4 virtual CPU devices)",
    )
    add("--seed", type=int, default=0)
    add("--picture", type=Path, default=Path(picture), metavar="PATH", help=f"default: {picture}")
    add_arguments(parser)
    args = parser.parse_args()
    # Refused now, and not after minutes of training.
    if args.picture.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"argument --picture: {args.picture} ends in none of .png, .svg, .pdf")
    if not args.picture.parent.is_dir():
        parser.error(f"argument --picture: there is no folder {args.picture.parent}")
    return args


class Show:
    """A run's numbers, as they come: `step` after each step, `epoch` after each epoch, `result` last.

    On a terminal a bar moves while the `with` block lasts; elsewhere only the plain lines are printed.
    """

    def __init__(self, args: argparse.Namespace, devices: Sequence[jax.Device], data: MNIST) -> None:
        self.args, self.devices, self.data = args, devices, data
        self.steps = len(data.train_labels) // args.batch_size
        self.losses: list[float] = []  # one per step
        self.hits: list[float] = []  # the share of the batch that was right, one per step
        self.accuracies: list[float] = []  # on the test rows, one per epoch
        self.predicted = np.empty(0, np.int64)  # the last epoch's, one per test row
        self._pending: tuple[jax.Array, jax.Array] | None = None
        self._begin = time.perf_counter()
        self._since: float | None = None  # when this epoch's first step was on its way, its compilation over
        self._counted = 0  # steps that have ended since then
        self.console = Console(highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(14),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=self.steps * args.epochs, epoch=self._epoch(), state="compiling")

    def __enter__(self) -> Self:
        train, test = len(self.data.train_labels), len(self.data.test_labels)
        self.console.print(f"devices   {self._machine()}")
        self.console.print(f"a batch   {self.args.batch_size} rows: {self._shares(self.args.batch_size)}")
        self.console.print(f"digits    {train:,} for training, {test:,} for the test")
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self.losses:
            tested = f", {len(self.accuracies)} epochs tested" if self.accuracies else ""
            title = f"MNIST on {self._machine()}: interrupted after {len(self.losses)} steps{tested}"
            self.console.print(self._save(title), markup=False)

    def step(self, loss: jax.Array, accuracy: jax.Array) -> None:
        """Keep a step's numbers, and show those of the step before it: to read its own is to wait for it."""
        self._read()
        self._pending = loss, accuracy
        if self._since is None:
            self._since, self._counted = time.perf_counter(), 0

    def epoch(self, predicted: Sequence[np.ndarray]) -> None:
        """The exact accuracy over all test rows, of what the model reads in them, batch by batch."""
        self._read()
        speed, self._since = self._speed(), None
        self.predicted, labels = np.concatenate(predicted), self.data.test_labels
        self.accuracies.append(float(np.mean(self.predicted == labels)))
        loss, hits = np.mean(self.losses[-self.steps :]), np.mean(self.hits[-self.steps :])
        self.console.print(
            f"epoch {len(self.accuracies)}/{self.args.epochs}   loss {loss:.4f}   accuracy {hits:.2%}   "
            f"test accuracy {self.accuracies[-1]:.2%}   {speed}"
        )

    def result(self) -> None:
        """The last epoch's test result in full, and the picture."""
        labels = self.data.test_labels
        rows, right = len(labels), int(np.sum(self.predicted == labels))
        last = rows % TEST_BATCH or min(rows, TEST_BATCH)
        self.console.print(
            f"test accuracy {right / rows:.2%}: {right:,} of {rows:,} digits right, {rows - right:,} wrong"
        )
        self.console.print(f"(in batches of {TEST_BATCH} rows; the last has {last}: {self._shares(last)})")
        title = f"MNIST on {self._machine()}: {right / rows:.2%} of the test digits right"
        self.console.print(f"{self._save(title)}; {time.perf_counter() - self._begin:.0f} s in all", markup=False)

    def _save(self, title: str) -> str:
        tested = len(self.predicted)
        digits = self.data.test_images[:tested], self.data.test_labels[:tested], self.predicted
        return save(self.args.picture, lambda: picture(title, self.losses, self.accuracies, *digits, self.steps))

    def _read(self) -> None:
        if self._pending is None:
            return
        loss, hit = (float(number) for number in self._pending)
        self._pending = None
        if not math.isfinite(loss):
            sys.exit(f"mnist: the loss of step {len(self.losses) + 1} is {loss}; try a lower --lr")
        self.losses.append(loss)
        self.hits.append(hit)
        self._counted += 1
        loss, hit = np.mean(self.losses[-50:]), np.mean(self.hits[-50:])  # one batch's alone would jump about
        state = f"{self._speed()}  loss {loss:.3f}  accuracy {hit:.1%}"
        self.bar.update(self.task, advance=1, epoch=self._epoch(), state=state)

    def _epoch(self) -> str:
        return f"{len(self.accuracies) + 1}/{self.args.epochs}"

    def _speed(self) -> str:
        if self._since is None or not self._counted:
            return ""
        return f"{self._counted * self.args.batch_size / (time.perf_counter() - self._since):,.0f} images/s"

    def _machine(self) -> str:
        return f"{len(self.devices)} x " + ", ".join(sorted({device.device_kind for device in self.devices}))

    def _shares(self, rows: int) -> str:
        """What each device gets of so many rows: "cpu:0 126, cpu:1 126, ..."."""
        shares = jdp.chunk_sizes(rows, len(self.devices))
        idle = len(self.devices) - len(shares)
        return ", ".join(
            f"{device.platform}:{device.id} {share}"
            for device, share in zip(self.devices, (*shares, *[0] * idle), strict=True)
        )
