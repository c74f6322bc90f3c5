"""The picture of a run without images: its learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a run without matplotlib has no picture, and goes on
    from matplotlib.figure import Figure

BLUE, RED, GREY = "#2a5db5", "#b5382a", "#777777"


def curve(
    title: str, losses: Sequence[float], held_out: dict[int, float], baseline: tuple[str, float], ylabel: str
) -> Figure:
    """`losses` has one entry per step; `held_out` the loss on held-out data after some of the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    window = max(1, len(losses) // 25)
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(range(1, len(losses) + 1), losses, color=BLUE, alpha=0.25, linewidth=0.8, label="a step")
    steps = np.arange(len(mean)) + (window + 1) / 2
    axes.plot(steps, mean, color=BLUE, linewidth=2, label=f"training, mean over {window} steps")
    axes.plot(list(held_out), list(held_out.values()), "o-", color=RED, label="held out")
    axes.axhline(baseline[1], color=GREY, linestyle="--", linewidth=1, label=f"{baseline[0]}: {baseline[1]:.2f}")
    axes.set(title=title, xlabel="step", ylabel=ylabel, xlim=(0, 1.02 * len(losses)), ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend()
    return figure
