"""How many lines a peer's file has, and how many of them are there because there is more than one device."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

HERE = Path(__file__).parent
# What only a parallel program says; a line with one of these has to be marked.
GIVES_AWAY = re.compile(
    r"\bjdp\b|\bstep\.init\b|Mesh|Sharding|PartitionSpec|shard|pmap|pmean|replicate|axis_name|device_put\b"
    r"|DataParallel|Distributed|distribution|\bdist\b"
)
MARK = "# parallel"


def programs() -> list[str]:
    return sorted(path.stem for path in HERE.glob("[!_]*.py"))


def code(text: str) -> dict[int, str]:
    """The lines with code on them, by number: no blank ones, no comments, no docstrings."""
    lines, found, statement = text.splitlines(), {}, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if [t.type for t in statement] != [tokenize.STRING]:  # a string alone is a docstring
                found |= {i: lines[i - 1] for t in statement for i in range(t.start[0], t.end[0] + 1)}
            statement = []
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)
    return dict(sorted(found.items()))


def count(text: str) -> tuple[int, int]:
    """Lines of the parallel part, and of the whole program."""
    lines = code(text)
    return sum(line.rstrip().endswith(MARK) for line in lines.values()), len(lines)


def unmarked(text: str) -> list[str]:
    """Lines of the parallel part that have no mark, and would not be counted."""
    parallel = {i: line for i, line in code(text).items() if GIVES_AWAY.search(line.partition("#")[0])}
    return [f"{i}: {line.strip()}" for i, line in parallel.items() if not line.rstrip().endswith(MARK)]


def of(peer: str) -> tuple[int, int]:
    return count((HERE / f"{peer}.py").read_text())
