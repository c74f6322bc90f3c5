"""Runs the notebooks in docs/notebooks, each in a process of its own, and writes what they print. It needs no Jupyter.

python docs/notebooks.py                 # runs all, and writes their outputs
python docs/notebooks.py --check FILE    # runs one, and writes nothing; exit status 1 where it prints something else
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
Notebook = dict[str, Any]


def read(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def run(notebook: Notebook) -> Notebook:
    """Returns the notebook with what its cells print when they run from the top."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            lines = printed.getvalue().splitlines(keepends=True)
            cell = {**cell, "outputs": [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []}
        cells.append(cell)
    return {**notebook, "cells": cells}


def markdown(notebook: Notebook) -> str:
    """Returns the notebook as a section of a page: its text, its programs and what they print."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"]).rstrip("\n")
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"^#", "##", text, flags=re.MULTILINE))
            continue
        parts.append(f"```python\n{text}\n```")
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where the outputs differ")
    parser.add_argument("file", nargs="?", type=Path, help="one notebook; all of them, if left out")
    given = parser.parse_args()
    if given.file is None:
        for path in sorted(FOLDER.glob("*.ipynb")):  # each fixes the number of devices before JAX starts
            subprocess.run([sys.executable, __file__, *["--check"] * given.check, path], check=True)
        return
    before = read(given.file)
    after = run(before)
    if given.check and after != before:
        sys.exit(f"{given.file.name} prints something else than it shows:\n{markdown(after)}")
    if not given.check:
        given.file.write_text(json.dumps(after, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
