"""RESULTS.md, which has a section of each benchmark, between markers of its name."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def machine() -> str:
    return f"Python {platform.python_version()}, {os.cpu_count()} cores ({platform.machine()})"


def versions() -> str:
    """JAX's from its metadata: a script that only starts workers need not import it."""
    return f"jax {version('jax')}, {machine()}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, with the rows in the order of the columns."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def write(name: str, title: str, about: str, *parts: str, said_in: str = "") -> None:
    """This section of RESULTS.md; the rest stays, and so does the order.

    `about` goes on after the sentence that all sections have, which names the script, or `said_in`.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    about = f"Written by `make bench`; what is compared is said in {said_in or f'{name}.py'}. {about}"
    section = "\n".join([first, "\n\n".join([f"# {title}", about, *parts]), last])
    found = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    before, begun, rest = found.partition(first)
    _, ended, after = rest.partition(last)
    if begun and not ended:  # all that follows would go, figures of other scripts among it
        raise ValueError(f"{RESULTS} has {first}, and no {last} after it")
    sections = [before.rstrip("\n"), section, after.strip("\n")]
    RESULTS.write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")
