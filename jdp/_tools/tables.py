"""Prints titles, sentences and tables on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

import rich.box
import rich.console
import rich.padding
import rich.table
import rich.text


def show_blocks(found: Iterable[Block], out: TextIO, wide: int = 80) -> None:
    """Prints titles, tables and text, as wide as the terminal, or `wide` columns if `out` is no terminal."""
    columns = shutil.get_terminal_size((wide, 24)).columns if out.isatty() else wide
    width = max(40, min(max(120, wide), columns))
    console = _Console(file=out, width=width, highlight=False)
    for block in found:
        if isinstance(block, Title):
            console.print(rich.text.Text(f"\n{block.text}", style="bold"))
        elif isinstance(block, Text) or not any(block.head) or _wide(block, 3) > width - 2:
            lines = _wrapped(block.text, width - 2) if isinstance(block, Text) else _aligned(block, width - 2)
            style = block.style if isinstance(block, Text) else ""
            console.print(rich.text.Text("\n".join(f"  {line}" for line in lines), style=style), soft_wrap=True)
        else:
            table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            for i, name in enumerate(block.head):
                table.add_column(rich.text.Text(name), justify="left" if i == 0 else "right")
            for row in block.rows:
                table.add_row(*(rich.text.Text(cell) for cell in row))
            console.print(rich.padding.Padding(table, (0, 0, 0, 2), expand=False))


def say(command: str, text: str, out: TextIO | None = None) -> None:
    """Shows on a terminal what is being done, on a line that the next call overwrites; "" clears the line."""
    out = sys.stderr if out is None else out
    if out is not None and out.isatty():
        with contextlib.suppress(OSError):
            print(f"\r\x1b[K{f'jdp {command}: {text} ...' if text else ''}"[:78], end="", file=out, flush=True)


@contextlib.contextmanager
def as_long_as_read(out: TextIO) -> Iterator[None]:
    """Ends its block without an error when the reader of `out` has closed the pipe: `| head` has seen enough."""
    try:
        yield
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # otherwise Python complains once more at its end


class Title(NamedTuple):
    text: str


class Text(NamedTuple):
    text: str
    style: str = ""


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = Title | Text | Table


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        raise  # the reader has closed the pipe: the caller decides, whereas rich would end the process


def _wrapped(text: str, width: int, hang: int = 0) -> list[str]:
    pieces = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        further = " " * (indent + 2 if indent else hang)
        # never breaks inside a word, because users copy flags and commands
        pieces += textwrap.wrap(
            line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return pieces


def _wide(table: Table, gap: int) -> int:
    return sum(_widths(table)) + gap * (len(table.head) - 1)


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]


def _aligned(table: Table, width: int) -> list[str]:
    rows, widths = [row for row in (table.head, *table.rows) if any(row)], _widths(table)
    if _wide(table, 2) <= width:
        return ["  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    if len(table.head) > 2:  # too narrow for columns: a sentence for each row
        told = (", ".join(f"{h}: {x}" for h, x in zip(table.head, row, strict=True) if x) for row in table.rows)
        return [part for row in told for part in _wrapped(row, width, 2)]
    wrapped = [(name, _wrapped(text, width - widths[0] - 2)) for name, text in rows]
    return [f"{name if i == 0 else '':{widths[0]}}  {part}" for name, parts in wrapped for i, part in enumerate(parts)]
