"""The race's picture: for each number of devices a panel, in it a group of bars for each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._report import LABELS, Results, peers_of

COLOURS = {
    "jdp_train_step": "#b5382a",
    "jit_shard_map": "#16325c",
    "flax_pmap": "#2a5db5",
    "auto_jit": "#7fa6e0",
    "keras_data_parallel": "#3b8f5a",
    "equinox_filter_shard": "#9ccf9f",
    "torch_ddp": "#c77b1c",
    "torch_threads": "#eebb66",
}
MOST = 4.0  # a bar that is longer is cut, and says so


def save(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    counts, models = list(dict.fromkeys(n for _, n in results)), list(dict.fromkeys(model for model, _ in results))
    peers = peers_of(results)
    figure = Figure(
        figsize=(4.4 * len(counts) + 1.2, 0.24 * (len(peers) + 1) * len(models) + 1.8), layout="constrained"
    )
    panels = figure.subplots(1, len(counts), sharex=True, squeeze=False)[0]
    timed = {key: [peer for peer in peers if "ratio" in rows.get(peer, {})] for key, rows in results.items()}
    apart = 1 + max(map(len, timed.values()))  # the same in all panels, whoever is missing in some
    for axes, n in zip(panels, counts, strict=True):
        for (model, m), shown in timed.items():
            for i, peer in enumerate(shown if m == n else ()):
                bar(axes, models.index(model) * apart + i, peer, results[model, n][peer])
        middles = {model: i * apart + (apart - 2) / 2 for i, model in enumerate(models)}
        dress(axes, n, middles, len(models) * apart, first=n == counts[0])
    figure.legend(*handles(peers), loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    figure.suptitle("Time for a training step, as a multiple of jdp's (longer: slower than jdp)", fontsize=13)
    figure.savefig(path, dpi=130)


def bar(axes: Any, at: float, peer: str, row: dict[str, Any]) -> None:
    ratio, noise, shown = row["ratio"], row["noise"], min(row["ratio"], MOST)
    error = noise if ratio == shown else None
    axes.barh(at, shown, 0.86, color=COLOURS[peer], xerr=error, error_kw={"ecolor": "#444444", "lw": 1})
    text = f"{ratio:.2f}" if ratio == shown else f"{ratio:.1f} (cut)"
    inside = ratio > 0.85 * MOST
    where = shown - noise * bool(error) - 0.06 if inside else shown + noise + 0.06
    behind = {"facecolor": COLOURS[peer] if inside else "white", "edgecolor": "none", "pad": 0.8}
    axes.text(where, at, text, va="center", ha="right" if inside else "left", fontsize=8, color="#111111", bbox=behind)


def dress(axes: Any, n: int, middles: dict[str, float], length: float, first: bool) -> None:
    axes.axvline(1, color=COLOURS["jdp_train_step"], linewidth=1, linestyle="--", zorder=0)
    axes.set_title(f"{n} device{'s' * (n > 1)}", fontsize=11)
    axes.set_yticks([*middles.values()], [*middles] if first else [""] * len(middles), fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, MOST), ylim=(length - 1, -1))
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def handles(peers: list[str]) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    return [Patch(color=COLOURS[peer]) for peer in peers], [LABELS[peer] for peer in peers]
