"""The first hour of a newcomer: ten tasks, each a program of `tests/first_hour/` that checks its own numbers.

They use of jdp nothing but what the README and the pages show.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tests" / "first_hour").glob("*.py"))
QUICK = ("evaluate",)  # what the fast tier runs
LAUNCHED = {"crash": ("-m", "jdp", "launch", "-n", "2", "--devices-per-process", "2", "--max-restarts", "1")}
NEEDS = {"dataloader": "torch", "logs": "rich"}
WARNINGS = "error,ignore:Error reading persistent compilation cache:UserWarning"
WARNINGS += ",ignore:Error writing persistent compilation cache:UserWarning"

PAGES = [ROOT / "README.md", *(x for x in (ROOT / "docs").glob("*.md") if x.name not in ("api.md", "changelog.md"))]
CODE = "\n".join(found for page in PAGES for found in re.findall(r"```python.*?```|`[^`\n]+`", page.read_text(), re.S))
OBJECTS = {"jdp", "dp", "step", "checkpointer", "batches", "report", "generator", "critic"}
OBJECTS |= {"dp_step", "d_step", "g_step"}


def test_there_are_ten_tasks_and_more():
    assert len(SCRIPTS) >= 10 and {*QUICK, *LAUNCHED, *NEEDS} <= {path.stem for path in SCRIPTS}


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "path", [pytest.param(x, id=x.stem, marks=() if x.stem in QUICK else pytest.mark.full) for x in SCRIPTS]
)
def test_a_task_is_done_as_the_pages_say_and_its_numbers_are_right(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    left_out = ("NPROC", "PJRT_NPROC")  # conftest's, for 8 devices
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    env |= {"PYTHONWARNINGS": WARNINGS, "TMPDIR": str(tmp_path)}
    command = [sys.executable, *LAUNCHED.get(path.stem, ()), str(path), *[str(tmp_path)] * (path.stem in LAUNCHED)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    if path.stem in LAUNCHED:
        assert re.search(r"rank 1 was ended by SIGKILL .*restart 1 of 1", done.stderr), done.stderr[-3000:]
        assert "went on from 8" in done.stdout


def used(path):
    """Yields what a program uses of jdp, as a pattern that finds it on a page: `.evaluate`, `seed=`."""
    for node in ast.walk(ast.parse(path.read_text())):
        of_model = ".module." in ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node).partition(".")[0] in OBJECTS and not of_model:
            yield rf"\.{node.attr}\b"
        if isinstance(node, ast.Call) and re.match(r"\w*", ast.unparse(node.func))[0] in OBJECTS:
            yield from (rf"\b{keyword.arg}=" for keyword in node.keywords if keyword.arg)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_task_needs_no_name_that_no_page_shows(path):
    names = {*used(path)}
    assert r"\.DataParallel\b" in names and not re.search(r"\.tree_flatten\b", CODE)
    assert [name for name in names if not re.search(name, CODE)] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_task_takes_no_other_parts_of_jdp_and_no_helpers(path):
    tree = ast.parse(path.read_text())
    modules = [x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)]
    modules += [alias.name for x in ast.walk(tree) if isinstance(x, ast.Import) for alias in x.names]
    assert "jdp" in modules and not any(name.startswith("jdp.") for name in modules)
    folders = path.parent, ROOT / "tests"
    assert not [name for name in modules for folder in folders if (folder / f"{name}.py").exists()]
