"""Reports as pages: one file of HTML that asks no other host for anything, or the same in a notebook."""

from __future__ import annotations

import functools
import html
import importlib
import itertools
import math
import os
import pathlib
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Html(str):
    """Markup. Any other text is escaped when it is put into markup."""


def tag(name: str, *inside: object, **attributes: object) -> Html:
    """Makes an element; `class_` is the attribute `class`, and `text_anchor` is `text-anchor`."""
    given = "".join(f' {k.rstrip("_").replace("_", "-")}="{html.escape(str(x))}"' for k, x in attributes.items())
    return Html(f"<{name}{given}>{''.join(map(_markup, inside))}</{name}>")


def _markup(x: object) -> str:
    return x if isinstance(x, Html) else html.escape(str(x))


class Page(NamedTuple):
    """A page: its title, and the body below it."""

    title: str
    body: Sequence[Html]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page, as one file.

        Raises:
            ValueError: the file's name does not end in .html.
        """
        if not os.fspath(path).endswith(".html"):
            raise ValueError(
                f"jdp.save: path is {os.fspath(path)!r}; a report is a page of HTML, and its name ends in .html. "
                f"Pass a name like 'step.html'."
            )
        pathlib.Path(path).write_text(self.document(), encoding="utf-8")

    def show(self) -> None:
        """Shows the page: in the notebook that asks for it, else in a browser; with no display, it prints the path."""
        ipython = sys.modules.get("IPython")
        if ipython and hasattr(ipython.get_ipython(), "kernel"):  # only a notebook has a kernel
            importlib.import_module("IPython.display").display(self)
            return
        file, name = tempfile.mkstemp(suffix=".html", prefix="jdp-")
        os.close(file)
        path = pathlib.Path(name)
        self.save(path)
        # If none of these is set, webbrowser may start a text browser in the terminal.
        has_display = any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
        if not ((has_display or sys.platform in ("darwin", "win32")) and webbrowser.open(path.as_uri())):
            print(path)

    def __repr__(self) -> str:
        return f"Page({self.title!r})"

    def document(self) -> str:
        """Returns the whole file."""
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        head += '<link rel="icon" href="data:,">'  # otherwise a browser requests one
        title = tag("title", self.title)
        return f'<!doctype html>\n<html lang="en"><head>{head}{title}</head><body>{self._repr_html_()}</body></html>\n'

    def _repr_html_(self) -> Html:
        return tag("div", tag("style", Html(STYLE)), tag("h1", self.title), *self.body, class_="jdp")


def in_notebook(make: Callable[[T], Page]) -> Callable[[T], str | None]:
    """Makes a `_repr_html_` of a function that makes a page. On errors it gives None, and a notebook shows text."""

    @functools.wraps(make)
    def _repr_html_(self: T) -> str | None:
        try:
            return make(self)._repr_html_()
        except Exception:
            return None

    return _repr_html_


def scaled(amount: float, units: Sequence[tuple[float, str]], digits: int = 4) -> str:
    """Returns the amount, rounded, in the first unit that it reaches then, or in the last; the units fall in size."""
    numbers = [(float(f"{amount / size:.{digits}g}"), unit) for size, unit in units]
    number, unit = next((one for one in numbers if one[0] >= 1), numbers[-1])
    return f"{number:.12g} {unit}"


def in_bytes(amount: float) -> str:
    return scaled(amount, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def in_seconds(seconds: float) -> str:
    return scaled(seconds, ((1, "s"), (1e-3, "ms"), (1e-6, "us")), 3)


def section(title: str, *inside: object) -> Html:
    return tag("section", tag("h2", title), *inside)


def text(words: object, kind: str = "note") -> Html:
    return tag("p", words, class_=kind)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Makes a table that scrolls if it is wider than the page."""
    top = tag("thead", tag("tr", *(tag("th", name) for name in head))) if head else ""
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))
    return tag("div", tag("table", top, body), class_="wide")


def bars(rows: Sequence[tuple[object, float, object]]) -> Html:
    """Draws a bar for each `(name, amount, in words)`, as long as the amount; the longest has the whole width."""
    whole = max((amount for _, amount, _ in rows), default=0.0) or 1.0
    drawn = []
    for i, (name, amount, said) in enumerate(rows):
        bar = lane([(f"k{i % 7}", 0.0, amount, "")], whole)
        drawn.append(tag("tr", tag("td", name), tag("td", bar, class_="bar"), tag("td", said)))
    return tag("div", tag("table", tag("tbody", *drawn)), class_="wide bars")


def stack(pieces: Iterable[tuple[str, float]], whole: float, mark: float | None = None) -> Html:
    """Draws each `(name, amount)` after the other in one bar, in the colours of `bars`, with a line at `mark`."""
    spans, start = [], 0.0
    for i, (name, amount) in enumerate(pieces):
        spans.append((f"k{i % 7}", start, start + amount, name))
        start += amount
    if mark is not None:
        spans.append(("mark", mark, mark + whole / 200, ""))
    return lane(spans, whole)


def lane(spans: Iterable[tuple[str, float, float, str]], whole: float) -> Html:
    """Draws stretches `(kind, start, end, tooltip)` on a line that is `whole` long."""
    drawn = (
        tag("rect", *([tag("title", said)] if said else []), class_=kind, x=_percent(start / whole), y=0,
            width=_percent((end - start) / whole), height="100%")
        for kind, start, end, said in spans
    )  # fmt: skip
    return tag("svg", *drawn, class_="lane")


def legend(names: Mapping[str, object]) -> Html:
    """Makes a legend: the colour of each kind, and its name."""
    key = '<svg class="key"><rect class="{}" width="100%" height="100%"></rect></svg>'
    return tag("p", *(tag("span", Html(key.format(kind)), name) for kind, name in names.items()), class_="legend")


def curves(title: str, series: Mapping[str, Mapping[int, float]], said: Callable[[float], str]) -> Html:
    """Draws amounts by number of devices, a line for each of the series; `said` formats an amount."""
    counts = sorted({n for one in series.values() for n in one}) or [1]
    most = _round(max((y for one in series.values() for y in one.values()), default=1.0))
    left, width = math.log2(counts[0]), math.log2(counts[-1] / counts[0])

    def across(n: int) -> str:
        return _percent(0.16 + 0.79 * ((math.log2(n) - left) / width if width else 0.5))

    def down(y: float) -> float:
        return round(190 - 165 * y / most, 2)

    parts = [tag("text", f"{n:,}", x=across(n), y=207, text_anchor="middle") for n in counts]
    for y in (0.0, most / 2, most):
        parts.append(tag("line", class_="grid", x1=0, x2="100%", y1=down(y), y2=down(y)))
        parts.append(tag("text", said(y), x=0, y=down(y) - 4))
    for i, (name, one) in enumerate(series.items()):
        points = sorted(one.items())
        for (n, y), (m, z) in itertools.pairwise(points):
            parts.append(tag("line", class_=f"c{i}", x1=across(n), y1=down(y), x2=across(m), y2=down(z)))
        for n, y in points:
            told = tag("title", f"{name}, {n:,} device{'s' * (n != 1)}: {said(y)}")
            parts.append(tag("circle", told, class_=f"c{i}", cx=across(n), cy=down(y), r=4))
    return tag("figure", tag("figcaption", title), tag("svg", *parts, class_="curves"))


def _round(amount: float) -> float:
    """Returns the next of 1, 2, 2.5, 4, 5, 10, ... that is not less."""
    unit = 10.0 ** math.floor(math.log10(amount)) if amount > 0 else 1.0
    return next((n * unit for n in (1, 2, 2.5, 4, 5) if n * unit >= amount), 10 * unit)


def _percent(share: float) -> str:
    return f"{100 * share:.6g}%"


STYLE = """
.jdp { --page: #fff; --ink: #1b2a41; --soft: #5b6675; --line: #d9dee7; --empty: #eef1f6; --bad: #c2362b;
  --k0: #2a5db5; --k1: #d9822b; --k2: #3a8f5c; --k3: #8a63b8; --k4: #b5892a; --k5: #4aa3b8; --k6: #9aa3b0;
  color: var(--ink); background: var(--page); font: 15px/1.45 system-ui, sans-serif; padding: 8px 16px 16px }
@media (prefers-color-scheme: dark) { .jdp { --page: #14181f; --ink: #e3e8f0; --soft: #9aa5b5; --line: #333c4a;
  --empty: #222a35; --bad: #ef6f61; --k0: #6f9ff0; --k1: #eda04f; --k2: #62bd86; --k3: #b394e0; --k4: #d6b25c;
  --k5: #6cc4d8; --k6: #7d8796 } body:has(> .jdp) { background: #14181f } }
body:has(> .jdp) { margin: 0 } body > .jdp { max-width: 960px; margin: 0 auto; padding: 16px }
.jdp h1 { font-size: 20px; margin: 8px 0; overflow-wrap: anywhere; color: inherit }
.jdp h2 { font-size: 16px; margin: 28px 0 8px; padding-top: 8px; border-top: 1px solid var(--line); color: inherit }
.jdp p { margin: 6px 0; overflow-wrap: anywhere } .jdp .note { color: var(--soft) } .jdp .bad { color: var(--bad) }
.jdp .wide { overflow-x: auto } .jdp table { border-collapse: collapse; font-variant-numeric: tabular-nums }
.jdp td, .jdp th { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; border: 0; color: inherit;
  background: none; white-space: nowrap; font-size: 14px }
.jdp th { color: var(--soft); font-weight: normal; border-bottom: 1px solid var(--line) }
.jdp .names { white-space: normal; min-width: 14em; overflow-wrap: anywhere }
.jdp .bars table { width: 100%; margin-top: 8px } .jdp .bars td.bar { width: 100%; min-width: 80px }
.jdp .bars td:last-child { padding-right: 0; text-align: right } .jdp svg { display: block; fill: var(--ink) }
.jdp .lane { width: 100%; height: 18px; background: var(--empty); border-radius: 3px; margin: 2px 0 }
.jdp .curves { width: 100%; height: 215px; font-size: 12px; overflow: visible } .jdp .curves text { fill: var(--soft) }
.jdp figure { margin: 16px 0 24px } .jdp figcaption { margin-bottom: 8px } .jdp .grid { stroke: var(--line) }
.jdp .legend span { margin-right: 18px; white-space: nowrap } .jdp .lanes p { margin: 8px 0 0 }
.jdp .key { display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px }
.jdp .lane .computes, .jdp .k0, .jdp .computes { fill: var(--k0) } .jdp .sends, .jdp .k1 { fill: var(--k1) }
.jdp .waits { fill: var(--bad) } .jdp .sends, .jdp .waits { stroke: var(--page); stroke-width: .5 }
.jdp .mark { fill: var(--ink) } .jdp .k2 { fill: var(--k2) } .jdp .k3 { fill: var(--k3) }
.jdp .k4 { fill: var(--k4) } .jdp .k5 { fill: var(--k5) } .jdp .k6 { fill: var(--k6) }
.jdp .c0 { stroke: var(--k6); fill: var(--k6) } .jdp .c1 { stroke: var(--k1); fill: var(--k1) }
.jdp .c2 { stroke: var(--k0); fill: var(--k0) } .jdp line.c0, .jdp line.c1, .jdp line.c2 { stroke-width: 2.5 }
"""
