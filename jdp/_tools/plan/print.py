"""Writes a plan as a table, as JSON, as a picture and as a page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from ..._page import Page, curves, in_seconds, legend, scaled, section, table, text
from ..explain.estimate import SOURCES
from ..tables import Block, Table, Text, Title, show_blocks
from ..topology.chips import GB, TERA, Chip
from .lines import Line
from .script import WAYS

WIDE = 132
HEAD = ("state", "compiles", "fits", "peak", "most rows", "on the wire", "~exposed", "~step", "~efficiency")


def show(lines: Sequence[Line], chip: Chip, title: str, out: TextIO) -> None:
    """Prints the plan as wide as the terminal, or wide enough for its table if `out` is no terminal."""
    show_blocks(_blocks(lines, chip, title), out, WIDE)


def _blocks(lines: Sequence[Line], chip: Chip, title: str) -> Iterator[Block]:
    yield Title(_title(lines, chip, title))
    yield Table(_head(chip), [_row(one) for one in lines])
    yield from map(Text, _notes(lines, chip))
    yield Title("figures, and where they are from")
    yield from (Text(f"{figure}\n    {chip.sources[name]}") for figure, name in _figures(chip))
    yield Title("formulas")
    yield from map(Text, SOURCES)


def _title(lines: Sequence[Line], chip: Chip, title: str) -> str:
    return f"{title} on {chip.device_kind}, {lines[0].rows:,} rows on each device"


def _head(chip: Chip) -> tuple[str, ...]:
    return "devices", "shape" if chip.kind == "tpu" else "hosts", *HEAD


def page(lines: Sequence[Line], chip: Chip, title: str) -> Page:
    """Returns the plan as a page: `page(...).save("plan.html")`, or `.show()`."""
    memory = chip.available_bytes
    drawn = (
        ("efficiency, estimated", "efficiency", lambda share: f"{100 * share:.3g}%"),
        ("the time of a step, estimated", "seconds", in_seconds),
        ("of it exposed: the device waits for a collective", "exposed_seconds", in_seconds),
        (f"peak of a device's memory; a program can have {_bytes(memory)}", "peak_bytes", _bytes),
    )
    figures = []
    for what, name, said in drawn:
        known = [(one, y) for one in lines if (y := getattr(one, name)) is not None]
        series = {way: {one.devices: y for one, y in known if one.way == way} for way in WAYS}
        figures.append(curves(what, series, said))
    key = legend({f"c{i}": way for i, way in enumerate(WAYS)})
    sources = [text(f"{figure} ({chip.sources[name]})") for figure, name in _figures(chip)]
    return Page(
        _title(lines, chip, title),
        [
            section("over devices", key, *figures),
            section("each line", table(_head(chip), map(_row, lines)), *map(text, _notes(lines, chip))),
            section("figures, and where they are from", *sources),
            section("formulas", *map(text, SOURCES)),
        ],
    )


def _row(one: Line) -> tuple[str, ...]:
    most = "" if one.most is None else f"{one.most.rows:,}{'=' * (one.most.as_on is not None)}"
    if one.most is not None and not one.most.is_exact:
        most += " or more" if one.most.too_many is None else f" <{one.most.too_many:,}{'!' * one.most.refused}"
    exposed = ""
    if one.exposed_seconds is not None and one.seconds:
        exposed = f"{_seconds(one.exposed_seconds)} ({one.exposed_seconds / one.seconds:.0%})"
    return (
        f"{one.devices:,}",
        one.where,
        f"{one.way}{'*' * one.is_own}",
        "no" if one.compile_seconds is None else f"in {one.compile_seconds:.1f} s",
        "" if one.fits is None else "yes" if one.fits else "no",
        _bytes(one.peak_bytes),
        most,
        _bytes(one.wire_bytes),
        exposed,
        _seconds(one.seconds),
        "" if one.efficiency is None else f"{one.efficiency:.1%}",
    )


def _notes(lines: Sequence[Line], chip: Chip) -> Iterator[str]:
    for one in lines:
        if one.reason:
            yield f"{one.where}, {one.way}: {one.reason}"
    if any(one.is_own for one in lines):
        yield "*: as the script has it; the others are arguments of dp.train_step."
    memory = chip.available_bytes
    yield f"fits: the peak of a program's memory is within {_bytes(memory)}" + (
        f", {memory / chip.memory_bytes:.0%} of the device's; XLA_CLIENT_MEM_FRACTION sets another share."
        if memory != chip.memory_bytes
        else "."
    )
    if any(one.most is not None for one in lines):
        yield (
            "most rows: of one device, compiled and within it; one more, or what stands behind <, is not. !: the "
            "compiler refuses so many, and memory is not the reason."
        )
    if any(one.most is not None and one.most.as_on is not None for one in lines):
        yield (
            "=: compiled for another line, whose devices need the same for as many rows, to a thousandth; less or more "
            "for its part of the state is counted."
        )
    yield (
        "~: estimated, by following the compiled schedule with each chip and link at its peak and no time between "
        "instructions. Real ones are slower, in small programs by far; the ratios say more than the times. "
        "Efficiency: against one such device alone with as many rows."
    )
    if any((one.efficiency or 0) > 1 for one in lines):
        yield "Above 100 %: where the state is cut, a device updates its part of it alone."


def _figures(chip: Chip) -> Iterator[tuple[str, str]]:
    """Yields the figures that the estimates are made of, each with the key of its source."""
    where = "the link to the host's other GPUs" if chip.kind == "gpu" else "each link to a neighbour"
    yield "peaks: " + ", ".join(f"{k} {peak / TERA:,.4g}" for k, peak in chip.peaks.items()) + " Tflop/s", "peaks"
    yield f"memory: {_bytes(chip.memory_bytes)}", "memory_bytes"
    yield f"memory: {chip.bytes_per_second / GB:,.0f} GB/s", "bytes_per_second"
    yield f"{where}: {chip.link / GB:g} GB/s, each way", "link"
    if chip.network:
        yield f"each GPU's way to other hosts: {chip.network / GB:g} GB/s, each way", "network"
    for p in chip.protocols:
        out = f", {p.network_hop * 1e6:g} us a host" if chip.network else ""
        start = f"{p.launch * 1e6:g} us to start, " if p.launch else ""
        yield f"latency: {start}{p.hop * 1e6:g} us a device{out}; {p.share:.0%} of the bytes is payload", "protocols"


def _bytes(size: float | None) -> str:
    return "" if size is None else scaled(size, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else in_seconds(seconds)


def as_json(lines: Sequence[Line], chip: Chip) -> str:
    """Returns one JSON document with the lines and their chip; the names of estimates say so."""
    whole = {"jdp_plan": 2, "chip": dataclasses.asdict(chip), "formulas": SOURCES, "lines": [*map(_plain, lines)]}
    return json.dumps(whole, indent=2)


def _plain(one: Line) -> dict[str, Any]:
    plain = dataclasses.asdict(one)
    del plain["measured"]
    plain["most"] = one.most and one.most._asdict()
    for name in ("exposed_seconds", "seconds", "efficiency"):
        plain[f"estimated_{name}"] = plain.pop(name)
    return plain


def picture(lines: Sequence[Line], chip: Chip, title: str) -> Any:
    """Draws a matplotlib figure: the estimated efficiency against the number of devices."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    known = [one for one in lines if one.efficiency is not None]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for way, color in zip(WAYS, ("#8a8f98", "#e08a1e", "#2a5db5"), strict=True):
        mine = [one for one in known if one.way == way]
        x, y = [one.devices for one in mine], [one.efficiency or 0.0 for one in mine]
        axes.plot(x, y, "o-", color=color, linewidth=2, label=way)
        for one in mine:
            if one.is_own:  # the texts of all ways would overlap
                axes.annotate(
                    f"{one.efficiency:.0%}\n{_seconds(one.seconds)}", (one.devices, one.efficiency or 0),
                    xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9,
                )  # fmt: skip
    axes.legend(loc="lower left")
    devices = sorted({one.devices for one in known})
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{n:,}" for n in devices])
    axes.minorticks_off()
    axes.margins(x=0.08)
    axes.set_ylim(0, 1.2)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(axis="y", alpha=0.3)
    axes.set(xlabel=f"devices ({chip.device_kind})", ylabel="efficiency, and the time of a step (estimated)")
    axes.set_title(f"{title}, {lines[0].rows:,} rows on each device")
    return figure
