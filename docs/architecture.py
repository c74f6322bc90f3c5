"""Draws architecture.md and architecture.svg, next to this file, from the code of jdp: its packages and their imports.

python docs/architecture.py            # writes both
python docs/architecture.py --check    # writes nothing; exit status 1 where they are not what the code says
"""

import argparse
import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

BOX, LANE, HEIGHT, GAP, STOREY = 150, 20, 44, 22, 96  # pixels; a lane is what an arrow takes that passes a level
# These colours can be read on a white page and on a black one: no viewer tells a picture which of the two it has.
STYLE = """text { font: 12px sans-serif; fill: #1b2a41; text-anchor: middle }
.name { font-weight: bold; font-size: 14px }
rect { fill: #e4ecf7; stroke: #5b7db1 } path { fill: none; stroke: #858c98; stroke-width: 1.5 }
#head path { fill: #858c98; stroke: none }"""


class File(NamedTuple):
    name: str
    about: str
    """The first line of its docstring."""
    lines: int


class Part(NamedTuple):
    """A package of jdp, or a module that stands next to the packages."""

    about: str
    files: list[File]
    imports: set[str]
    """The other parts that it imports."""

    @property
    def lines(self) -> int:
        return sum(file.lines for file in self.files)


def rounded(lines: int) -> str:
    """Rounds up to the next hundred, so that the page stays as it is when a line is added."""
    return f"{-(-lines // 100) * 100:,}"


class Layers(NamedTuple):
    level: dict[str, int]
    """How many others stand below each part, on the longest way down."""
    circular: set[tuple[str, str]]
    """Imports that lead back to where they came from; the levels leave them out."""


class Point(NamedTuple):
    """Where the picture has a part, or lets the arrow from `part` to `passing` through."""

    level: int
    part: str
    passing: str | None = None


def imported(source: ast.Module, package: list[str]) -> Iterator[list[str]]:
    """Yields the full names that a module of `package` imports."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            module = node.module.split(".") if node.module else []
            yield from ([*start, *module, alias.name] for alias in node.names)


def read(root: Path) -> dict[str, Part]:
    """Returns the parts of the package in the folder `root`, by the names that `ls` gives them."""
    entries = {x.stem: x for x in sorted(root.iterdir()) if x.suffix == ".py" or (x / "__init__.py").exists()}
    named = {stem: path.name + ("/" if path.is_dir() else "") for stem, path in entries.items()}
    parts = {}
    for stem, path in entries.items():
        files, imports = [], set()
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_text(encoding="utf-8")
            source = ast.parse(text)
            about = (ast.get_docstring(source) or "").partition("\n")[0]
            files.append(File(str(file.relative_to(path if path.is_dir() else root)), about, len(text.splitlines())))
            for name in imported(source, [root.name, *file.relative_to(root).parts[:-1]]):
                if name[0] == root.name:
                    inner = name[1] if len(name) > 1 and name[1] in named else "__init__"
                    imports.add(named[inner])
        about = next(file.about for file in files if file.name in ("__init__.py", path.name))
        parts[named[stem]] = Part(about, files, imports - {named[stem]})
    return parts


def layers(parts: dict[str, Part]) -> Layers:
    found = Layers({}, set())

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in found.level:
            return
        below = -1
        for other in sorted(parts[name].imports):
            if other in above:
                found.circular.add((name, other))
            else:
                visit(other, (*above, name))
                below = max(below, found.level[other])
        found.level[name] = below + 1

    for name in sorted(parts):
        visit(name, ())
    return found


def arrows(parts: dict[str, Part], circular: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the imports, without those that others imply: a to c, where a imports b and b imports c."""
    below = {a: {b for b in part.imports if (a, b) not in circular} for a, part in parts.items()}

    @functools.cache
    def reached(name: str) -> set[str]:
        return below[name].union(*(reached(other) for other in below[name]))

    return [(a, b) for a in sorted(below) for b in sorted(below[a]) if not any(b in reached(c) for c in below[a])]


def ways(found: Layers, pairs: list[tuple[str, str]]) -> list[list[Point]]:
    """Returns the arrows, each from level to level; on those in between it passes the parts that stand there."""
    level = found.level
    passed = {(a, b): [Point(i, a, b) for i in range(level[a] - 1, level[b], -1)] for a, b in pairs}
    return [[Point(level[a], a), *passed[a, b], Point(level[b], b)] for a, b in pairs]


def placed(names: list[str], found: Layers, drawn: list[list[Point]]) -> dict[Point, float]:
    """Returns the middle of each point; each level is in the order of what it is joined to, so that few lines cross."""
    points = dict.fromkeys([Point(found.level[name], name) for name in names] + [p for way in drawn for p in way])
    rows = [[p for p in points if p.level == i] for i in range(max(found.level.values()) + 1)]
    steps = [(a, b) for way in drawn for a, b in zip(way, way[1:], strict=False)]
    joined: dict[Point, list[Point]] = {p: [] for p in points}
    for a, b in steps:
        joined[a].append(b)
        joined[b].append(a)
    at: dict[Point, float] = {}

    def spread(row: list[Point]) -> None:
        widths = [LANE if p.passing else BOX for p in row]
        x = -(sum(widths) + GAP * (len(row) - 1)) / 2
        for p, width in zip(row, widths, strict=True):
            at[p] = x + width / 2
            x += width + GAP

    def middle(p: Point, level: int) -> float:
        near = [at[q] for q in joined[p] if q.level == level]
        return sum(near) / len(near) if near else at[p]

    for row in rows:
        spread(row)
    for _ in range(8):
        for beside in (-1, 1):
            for row in rows[::-beside]:
                row.sort(key=lambda p: middle(p, p.level + beside))  # noqa: B023
                spread(row)
    left = min(at.values()) - BOX / 2 - GAP
    return {p: x - left for p, x in at.items()}


def picture(parts: dict[str, Part]) -> str:
    """Draws an SVG: a box for each part, above all that it imports."""
    found = layers(parts)
    drawn = ways(found, arrows(parts, found.circular))
    at = placed(list(parts), found, drawn)
    top = max(found.level.values())

    def y(level: int) -> int:
        return GAP + (top - level) * STOREY

    def line(way: list[Point]) -> str:
        """Draws a line through the points of a way, straight next to a box and bent between two levels."""
        path = f"M{at[way[0]]:.0f},{y(way[0].level) + HEIGHT}"
        for a, b in zip(way, way[1:], strict=False):
            start, end = y(a.level) + HEIGHT, y(b.level) - (0 if b.passing else 7)
            half = (start + end) // 2
            path += f" C{at[a]:.0f},{half} {at[b]:.0f},{half} {at[b]:.0f},{end}" + (f" v{HEIGHT}" if b.passing else "")
        return f'<path d="{path}" marker-end="url(#head)"/>'

    def box(name: str) -> list[str]:
        x, above, part = at[Point(found.level[name], name)], y(found.level[name]), parts[name]
        size = f"{len(part.files)} files, " if name.endswith("/") else ""
        return [
            f"<g><title>{escape(part.about)}</title>",
            f'<rect x="{x - BOX / 2:.0f}" y="{above}" width="{BOX}" height="{HEIGHT}" rx="6"/>',
            f'<text class="name" x="{x:.0f}" y="{above + 19}">{escape(name)}</text>',
            f'<text x="{x:.0f}" y="{above + 36}">{size}{rounded(part.lines)} lines</text></g>',
        ]

    width, height = round(max(at.values()) + BOX / 2 + GAP), y(0) + HEIGHT + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        '<marker id="head" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="6" markerHeight="6" orient="auto">',
        '<path d="M0,0 L8,4 L0,8 z"/></marker>',
        *map(line, drawn),
        *(text for name in parts for text in box(name)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Returns a table of Markdown; numbers, which stand last, are set to the right."""
    bars = ["---"] * (len(head) - 1) + ["--:"]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, bars, *rows]] + [""]


def page(parts: dict[str, Part]) -> str:
    """Returns the page, in Markdown: the picture, a table of the parts, and for each part one of its files."""
    found = layers(parts)
    order = sorted(parts, key=lambda name: (-found.level[name], name))
    lines = [
        "# Architecture",
        "",
        "`make draw` draws this page from the code, so do not edit it; `make lint` checks that it is up to date.",
        "",
        "![The packages of jdp, and what they import](architecture.svg)",
        "",
        "An arrow points to what is imported. One that others imply is left out: the table has them all. Imports go",
        "down only; `ORDER` in `tests/test_layers.py` names what each package may import, and that test holds it.",
        "",
    ]
    for a, b in sorted(found.circular):
        lines += [f"**A circle:** `{a}` imports `{b}`, which leads back to it; the picture leaves this import out.", ""]
    overview = []
    for name in order:
        imports = " ".join(f"`{other}`" for other in order if other in parts[name].imports)
        part = parts[name]
        overview.append([f"`{name}`", part.about, imports, str(len(part.files)), rounded(part.lines)])
    files, total = sum(len(part.files) for part in parts.values()), sum(part.lines for part in parts.values())
    overview.append(["all", "", "", str(files), rounded(total)])
    lines += table(["part", "what it is for", "imports", "files", "lines, about"], overview)
    for name in order:
        if name.endswith("/"):
            rows = [[f"`{file.name}`", file.about, rounded(file.lines)] for file in parts[name].files]
            lines += [f"## {name}", "", *table(["file", "what it is for", "lines, about"], rows)]
    return "\n".join(lines[:-1]) + "\n"


def main(arguments: list[str] | None = None, here: Path = Path(__file__).parent) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is out of date")
    check = parser.parse_args(arguments).check
    parts = read(here.parent / "jdp")
    for path, text in ((here / "architecture.md", page(parts)), (here / "architecture.svg", picture(parts))):
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            sys.exit(f"{path.parent.name}/{path.name} is not what the code says. Run: make draw")
        if not check:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
