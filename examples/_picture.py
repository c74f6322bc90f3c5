"""The picture of a run: left the learning curve, right the test digits that the model got wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a run without matplotlib has no picture, and goes on
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, RED = "#2a5db5", "#b5382a"
ROWS, COLUMNS = 5, 8


def picture(
    title: str,
    losses: Sequence[float],
    accuracies: Sequence[float],
    images: np.ndarray,
    labels: np.ndarray,
    predicted: np.ndarray,
    steps: int | None = None,
) -> Figure:
    """`losses` has one entry per step, `accuracies` one per epoch; the other three one row per test digit, or none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15))
    axes = left.subplots()
    axes.set_title(title)
    learning_curve(axes, losses, accuracies, steps)

    wrong = np.flatnonzero(predicted != labels)
    shown = wrong[: ROWS * COLUMNS]
    which = f"{len(wrong)}" if len(shown) == len(wrong) else f"{len(shown)} of the {len(wrong)}"
    told = f"{which} test digits that the model got wrong\nabove each: what it read (what it is)"
    right.suptitle(told if len(predicted) else "no epoch ended, so that the model was not tested")
    for axes, row in zip_longest(right.subplots(ROWS, COLUMNS).flat, shown):
        axes.axis("off")
        if row is not None:
            axes.imshow(images[row], cmap="gray_r")
            axes.set_title(f"{predicted[row]} ({labels[row]})", fontsize=11, pad=2)
    return figure


def learning_curve(axes: Axes, losses: Sequence[float], accuracies: Sequence[float], steps: int | None = None) -> None:
    """Each step's loss, thin, and the running mean, thick; on the right-hand axis the accuracy of each epoch.

    `steps` of an epoch, where the last one has not ended.
    """
    from matplotlib.ticker import MaxNLocator

    whole = len(losses) / steps if steps else len(accuracies)
    epochs = np.linspace(0, whole, len(losses) + 1)[1:]
    window = max(1, len(losses) // 25)
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(epochs, losses, color=BLUE, alpha=0.25, linewidth=0.8, label="loss of a step")
    axes.plot(epochs[window - 1 :], mean, color=BLUE, linewidth=2, label=f"its mean over {window} steps")
    axes.set(xlabel="epoch", yscale="log", xlim=(0, 1.03 * whole))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("training loss", color=BLUE)
    right = axes.twinx()
    accuracy = right.plot(range(1, len(accuracies) + 1), 100 * np.array(accuracies), "o-", color=RED, label="accuracy")
    right.set_ylabel("test accuracy, %", color=RED)
    lines = [*axes.lines, *accuracy]
    right.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
