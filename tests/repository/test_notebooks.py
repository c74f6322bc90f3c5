"""The notebooks in docs/notebooks run from the top with nothing but jdp, and print what they show."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "notebooks.py"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def check(path):
    environ = {name: value for name, value in os.environ.items() if name != "NPROC"}
    command = [sys.executable, str(SCRIPT), "--check", str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env=environ)


def test_there_are_four():
    assert len(NOTEBOOKS) == 4


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path):
    done = check(path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_that_jupyter_opens(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        assert set(cell) == (keys if cell["cell_type"] == "markdown" else keys | {"execution_count", "outputs"})
    assert "".join(notebook["cells"][0]["source"]).startswith("# ")


def made(path, code, shown):
    output = [{"name": "stdout", "output_type": "stream", "text": [shown]}] if shown else []
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "a",
        "metadata": {},
        "outputs": output,
        "source": [code],
    }
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_a_notebook_that_prints_something_else_is_found(tmp_path):
    assert check(made(tmp_path / "right.ipynb", "print(1 + 1)", "2\n")).returncode == 0
    wrong = check(made(tmp_path / "wrong.ipynb", "print(1 + 1)", "3\n"))
    assert wrong.returncode == 1 and "wrong.ipynb prints something else" in wrong.stderr


def test_a_notebook_becomes_a_section_of_a_page(tmp_path):
    spec = importlib.util.spec_from_file_location("docs_notebooks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    notebook = module.run(module.read(made(tmp_path / "a.ipynb", "print('x')\n", "")))
    notebook["cells"].insert(0, {"cell_type": "markdown", "source": ["# Title\n", "text"]})
    assert module.markdown(notebook) == "## Title\ntext\n\n```python\nprint('x')\n```\n\n```text\nx\n```\n"
