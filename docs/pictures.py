"""Draws the pictures of README.md and of the pages, as SVG next to this file.

python docs/pictures.py            # writes them
python docs/pictures.py --check    # writes nothing; exit status 1 where one is not what this file draws
"""

import argparse
import sys
from pathlib import Path
from xml.sax.saxutils import escape

# Colours that can be read on a white page and on a black one, as in architecture.py; one for each device.
STYLE = """text { font: 13px sans-serif; fill: #1b2a41; text-anchor: middle }
.out { fill: #7d8796 } .bold { font-weight: bold } .end { text-anchor: end } .left { text-anchor: start }
rect { stroke: #5b7db1; fill: #e4ecf7 }
.d0 { fill: #cfe0f7 } .d1 { fill: #d3ecd5 } .d2 { fill: #f7e6c4 } .d3 { fill: #f3d2d6 }
.none { fill: none; stroke-dasharray: 4 3 } .dark { fill: #9db7dd }
path { fill: none; stroke: #858c98; stroke-width: 1.5 } #head path { fill: #858c98; stroke: none }"""
COLOURS = ("d0", "d1", "d2", "d3")


def chunk_sizes(rows: int, n: int) -> list[int]:
    """Returns the sizes of the chunks by torch.chunk's rule, written here once more: this script needs only Python."""
    most = -(-rows // n)
    return [max(0, min(most, rows - i * most)) for i in range(n)]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{_class(kind)}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "", round_: int = 3) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_}"{_class(kind)}/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    half = (x + to_x) / 2
    return f'<path d="M{x:g},{y:g} C{half:g},{y:g} {half:g},{to_y:g} {to_x:g},{to_y:g}" marker-end="url(#head)"/>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    marker = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    marker += '<path d="M0,0 L8,4 L0,8 z"/></marker>'
    return (
        "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", marker, *parts, "</svg>"]) + "\n"
    )


def chunks() -> str:
    """Draws a batch of 10 rows, cut for 4 devices, and the output put together again."""
    sizes, row, parts, first = chunk_sizes(10, 4), 20, [], 0
    parts += [text(68, 22, "a batch of 10 rows", "out"), text(340, 22, "4 devices, one program", "out")]
    parts += [text(612, 22, "an output of 10 rows", "out")]
    for i, size in enumerate(sizes):
        top, middle = 36 + first * row, 36 + (first + size / 2) * row
        y, height = 36 + i * 52, 44
        for j in range(size):
            for x in (20, 580):
                parts += [
                    box(x, top + j * row, 80, row - 2, COLOURS[i]),
                    text(x + 40, top + j * row + 14, str(first + j)),
                ]
        parts += [box(220, y, 240, height, "", 6), text(276, y + 19, f"device {i}", "bold")]
        parts += [text(276, y + 36, f"{size} row{'s' * (size != 1)}")]
        parts += [box(340 + 36 * j, y + 13, 30, row - 2, COLOURS[i]) for j in range(size)]
        parts += [text(355 + 36 * j, y + 27, str(first + j)) for j in range(size)]
        parts += [arrow(102, middle, 217, y + height / 2), arrow(462, y + height / 2, 577, middle)]
        first += size
    return svg(680, 252, "10 rows on 4 devices: chunks of 3, 3, 3 and 1", parts)


def pipeline() -> str:
    """Draws the four verbs, and what goes from one to the next."""
    parts = []
    for x, y, name, what in (
        (140, 20, "scatter", "cuts the batch"),
        (140, 110, "replicate", "copied to every device"),
        (360, 65, "parallel_apply", "one program, n replicas"),
        (580, 20, "gather", "puts outputs together"),
        (580, 110, "reduce_add", "adds them up"),
    ):
        parts += [box(x, y, 170, 50, "", 6), text(x + 85, y + 21, name, "bold"), text(x + 85, y + 39, what)]
    for y, name in ((45, "inputs"), (135, "parameters")):
        parts += [text(50, y + 5, name, "out"), arrow(92, y, 137, y), arrow(312, y, 357, 90)]
    for y, name in ((45, "outputs"), (135, "sum")):
        parts += [arrow(532, 90, 577, y), arrow(752, y, 787, y), text(822, y + 5, name, "out")]
    return svg(860, 180, "The pipeline: scatter and replicate, parallel_apply, gather or reduce_add", parts)


def uneven() -> str:
    """Draws how one program runs chunks of two sizes: padding travels, a switch chooses the body of the true size."""
    parts = [text(90, 22, "what each device holds", "out"), text(330, 22, "the switch", "out")]
    parts += [text(575, 22, "what the model sees", "out")]
    for i, size in enumerate(chunk_sizes(10, 4)):
        y = 36 + 40 * i
        for j in range(3):
            kind = COLOURS[i] if j < size else "none"
            parts.append(box(20 + 48 * j, y, 44, 26, kind))
            parts.append(text(42 + 48 * j, y + 18, str(3 * i + j) if j < size else "pad", "" if j < size else "out"))
        body = 62 if size == 3 else 146
        parts += [arrow(168, y + 13, 247, body), box(520, y, 110, 26, COLOURS[i])]
        parts += [text(575, y + 18, f"{size} row{'s' * (size != 1)}"), arrow(412, body, 517, y + 13)]
    for y, size in ((62, 3), (146, 1)):
        parts += [box(250, y - 22, 160, 44, "", 6), text(330, y - 3, f"body for {size} row{'s' * (size != 1)}", "bold")]
        parts.append(text(330, y + 14, f"x[:{size}], then the model"))
    return svg(
        660, 205, "Uneven chunks where rows meet: padded to the largest, cut to their true size in a switch", parts
    )


def memory() -> str:
    """Draws what one of four devices keeps of a model under Adam, in the three ways to keep the state."""
    parts, unit = [], 120
    kinds = (("parameters", 1, "d0"), ("gradients", 1, "d1"), ("optimizer", 2, "d2"))
    ways = (("replicated", ()), ("shard_optimizer=True", ("optimizer",)), ("shard_params=True", None))
    for i, (way, cut) in enumerate(ways):
        y, x = 34 + 46 * i, 190.0
        parts.append(text(178, y + 19, way, "out end"))
        for name, size, colour in kinds:
            width = size * unit * (0.25 if cut is None or name in cut else 1)
            parts.append(box(x, y, width, 28, colour))
            x += width
    for i, (name, _, colour) in enumerate(kinds):
        parts += [box(190 + 160 * i, 8, 16, 14, colour), text(212 + 160 * i, 20, name, "out left")]
    return svg(690, 176, "What one of four devices keeps, by the way of keeping the state", parts)


def accumulate() -> str:
    """Draws a chunk as four microbatches, one after the other, and one sum over the devices at the end."""
    parts = []
    for i in range(2):
        y = 34 + 60 * i
        parts.append(text(60, y + 25, f"device {i}", "out bold"))
        for j in range(4):
            parts += [box(110 + 116 * j, y, 100, 40, COLOURS[j], 6), text(160 + 116 * j, y + 24, f"microbatch {j}")]
            if j:
                parts.append(arrow(96 + 116 * j, y + 20, 108 + 116 * j, y + 20))
        parts.append(arrow(560, y + 20, 597, 84))
    parts += [box(600, 62, 110, 44, "dark", 6), text(655, 81, "one sum", "bold"), text(655, 98, "then update")]
    parts.append(text(330, 20, "one after the other, in the memory of one: gradients are added on the device", "out"))
    return svg(730, 150, "accumulate_steps=4 on two devices", parts)


def exposed() -> str:
    """Draws a step on one device: what computes, what waits, and the collectives on the links at the same time."""
    parts = [text(92, 39, "the device", "out end"), text(92, 83, "the links", "out end")]
    for x, width, name, kind in (
        (104, 250, "computes", "d0"),
        (354, 120, "waits: exposed", "d3"),
        (474, 100, "computes", "d0"),
        (574, 80, "waits", "d3"),
    ):
        parts += [box(x, 20, width, 28, kind, 0), text(x + width / 2, 39, name)]
    for x, width, name in ((204, 270, "all-reduce of layer2, layer1"), (574, 80, "of layer0")):
        parts += [box(x, 64, width, 28, "d2", 0), text(x + width / 2, 83, name)]
    return svg(670, 104, "A step in time: a collective is exposed where the device waits for it", parts)


def mesh() -> str:
    """Draws four replicas of two devices each: rows are cut over one axis, parameters over the other."""
    parts = [text(60, 40, "10 rows,", "out"), text(60, 57, 'cut over "data"', "out")]
    parts.append(text(390, 40, 'each device has the parameters of four of 8 heads, cut over "model"', "out"))
    first = 0
    for i, size in enumerate(chunk_sizes(10, 4)):
        y, row = 70 + 64 * i, 16
        for j in range(size):
            top = 74 + 24 * (first + j)
            parts += [box(20, top, 80, row + 4, COLOURS[i]), text(60, top + 15, str(first + j))]
        parts += [arrow(102, 74 + 24 * (first + size / 2) - 2, 147, y + 26), box(150, y - 2, 480, 56, "none", 8)]
        parts.append(text(644, y + 30, f"replica {i}", "out bold left"))
        for j in range(2):
            x = 160 + 236 * j
            parts += [box(x, y + 4, 224, 44, "", 6), text(x + 42, y + 31, f"device {2 * i + j}", "bold")]
            parts += [box(x + 80 + 20 * k, y + 16, row, 20, COLOURS[i]) for k in range(size)]
            parts += [text(x + 88 + 20 * k, y + 31, str(first + k)) for k in range(size)]
            for k in range(2):  # what the device has of the heads, and what the other one has
                parts.append(box(x + 146 + 36 * k, y + 16, 34, 20, "dark" if k == j else "none", 0))
            parts.append(text(x + 163 + 36 * j, y + 31, "0-3" if j == 0 else "4-7"))
        first += size
    title = "A mesh of 4 x 2 devices: four replicas with chunks of 3, 3, 3 and 1 rows, each of two devices"
    return svg(720, 332, title, parts)


PICTURES = {draw.__name__: draw for draw in (chunks, pipeline, uneven, memory, accumulate, exposed, mesh)}


def main(arguments: list[str] | None = None, here: Path = Path(__file__).parent) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is out of date")
    check = parser.parse_args(arguments).check
    for name, draw in PICTURES.items():
        path, drawn = here / f"{name}.svg", draw()
        if check and (not path.exists() or path.read_text(encoding="utf-8") != drawn):
            sys.exit(f"{path.parent.name}/{path.name} is not what pictures.py draws. Run: make draw")
        if not check:
            path.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
