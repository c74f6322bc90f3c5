"""The race's tables, and its section of RESULTS.md."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import _results

from . import _lines

LABELS = {
    "jdp_train_step": "jdp",
    "jit_shard_map": "jit(shard_map) by hand",
    "flax_pmap": "flax's pmap recipe",
    "auto_jit": "auto-sharded jit",
    "keras_data_parallel": "keras DataParallel",
    "equinox_filter_shard": "equinox filter_shard",
    "torch_ddp": "torch DDP, 2 processes",
    "torch_threads": "torch, 1 process, 2 threads",
}
UNITS = {"MLP": "images/s", "CNN": "images/s", "Transformer": "tokens/s"}
AGREE = 1e-4
Results = dict[tuple[str, int], dict[str, dict[str, Any]]]


def peers_of(results: Results) -> list[str]:
    return [peer for peer in LABELS if any(peer in rows for rows in results.values())]


def of_peer(results: Results, peer: str) -> list[dict[str, Any]]:
    return [rows[peer] for rows in results.values() if peer in rows]


def grid(results: Results, cell: Callable[[dict[str, Any]], str]) -> str:
    """A row for each peer, a column for each model and number of devices."""
    lines = []
    for peer in peers_of(results):
        found = (rows.get(peer) for rows in results.values())
        lines.append([LABELS[peer], *(words(row, cell) for row in found)])
    return _results.table(["", *(f"{model}, {n}" for model, n in results)], lines)


def words(row: dict[str, Any] | None, cell: Callable[[dict[str, Any]], str]) -> str:
    if row is None:
        return "-"
    try:
        return cell(row)
    except KeyError:  # it did not get that far
        return "not installed" if "missing" in row else "ended" if "gone" in row else "-"


def tables(results: Results) -> list[str]:
    units = ", ".join(f"{model}: {UNITS[model]}" for model in dict.fromkeys(model for model, _ in results))
    rounds = [row["rounds"] for rows in results.values() for row in rows.values() if "rounds" in row]
    spread = f"; {min(rounds)} to {max(rounds)} rounds" if rounds else ""
    return [
        f"Seconds for a step, as a multiple of jdp's on as many devices (above 1: slower than jdp){spread}.\n\n"
        + grid(results, lambda row: f"{row['ratio']:.2f} ± {row['noise']:.2f}"),
        f"Speed ({units}).\n\n" + grid(results, lambda row: f"{row['rate']:,.0f}"),
        "Seconds to the first step, from the start of the process.\n\n"
        + grid(results, lambda row: f"{row['first']:.1f}"),
        "Peak RSS, MiB.\n\n" + grid(results, lambda row: f"{row['rss'] / 2**20:,.0f}"),
        "The program, what it makes of 13 rows, and its loss after four steps beside that of SGD written out for one "
        f"device (up to {AGREE:g} of it off: the same; of its parameters, the share of their way that they are off)."
        "\n\n" + program(results),
    ]


def program(results: Results) -> str:
    shared = [n for n in dict.fromkeys(n for _, n in results) if n > 1]
    columns, lines = ["", "lines: parallel", "of", *(f"13 rows over {n}" for n in shared), "losses"], []
    for peer in peers_of(results):
        verdicts = {n: rows[peer]["uneven"] for (_, n), rows in results.items() if "uneven" in rows.get(peer, {})}
        parallel, whole = _lines.of(peer)
        cells = [short(verdicts.get(n, "-")) for n in shared]
        lines.append([LABELS[peer], str(parallel), str(whole), *cells, losses(of_peer(results, peer))])
    return _results.table(columns, lines)


def short(text: str, most: int = 240) -> str:
    return text if len(text) <= most else f"{text[:most].rstrip()} …"


def losses(rows: list[dict[str, Any]]) -> str:
    """The worst of all models and numbers of devices; or why there is none."""
    for key, what in ("missing", "not installed"), ("gone", "ended"):
        found = next((row[key] for row in rows if key in row), None)
        if found is not None:
            return f"{what}: {short(found)}"
    worst, moved = (max(row[key] for row in rows) for key in ("agree", "moved"))
    return f"{'the same' if worst <= AGREE else 'DIFFERENT'} ({worst:.0e} off; its parameters {moved:.0e})"


def packages() -> str:
    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    return ", ".join(map(of, ("jax", "flax", "optax", "keras", "equinox", "torch")))


def write(sections: list[str], seconds: float, steps: int) -> None:
    _results.write(
        "peers",
        "The race against every peer",
        f"{packages()}; {_results.machine()}, virtual CPU devices. SGD with momentum. Medians of {steps} steps, "
        f"{seconds:g} s a column.",
        "![each peer's time for a step, as a multiple of jdp's](peers.png)",
        *sections,
        said_in="peers.py, and the programs are the files of peers/",
    )
