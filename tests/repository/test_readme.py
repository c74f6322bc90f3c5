"""Every program of the README and of the pages in docs/ runs and prints what they say, and their commands exist."""

import contextlib
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp._launch.options import parse
from jdp._tools.plan import cli
from jdp._tools.replay import cli as replay

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SKETCH = "python sketch"  # not run: it needs what the tests do not have, and its page says so


class Program(NamedTuple):
    page: str
    line: int
    code: str
    prints: str | None
    """The text block right below it; None where there is none."""


def blocks(path):
    """Each block: its language, its text, and where it begins."""
    text = path.read_text(encoding="utf-8")
    return [(found[1].strip(), found[2], found.start(), found.end(), text) for found in BLOCK.finditer(text)]


def programs(path):
    found = blocks(path)
    for (language, code, start, end, text), after in zip(found, [*found, None][1:], strict=True):
        if language == "python":
            shown = after is not None and after[0] == "text" and not text[end : after[2]].strip()
            yield Program(path.name, text[:start].count("\n") + 2, code, after[1] if shown else None)


PROGRAMS = [program for path in PAGES for program in programs(path)]
COMMANDS = [
    shlex.split(line, comments=True)
    for path in PAGES
    for language, code, *_ in blocks(path)
    if language == "sh"
    for line in code.replace("\\\n", " ").splitlines()
]
by_place = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.page}:{program.line}")


def test_blocks_are_of_known_languages():
    for path in PAGES:
        kinds = {"sh", "python", "text", "diff", SKETCH, "{toctree}", "{eval-rst}"}
        assert {language for language, *_ in blocks(path)} <= kinds, path
    assert len(PROGRAMS) >= 20
    assert any(program.page == "README.md" and program.prints for program in PROGRAMS)


@pytest.mark.full
@pytest.mark.budget(20)
@pytest.mark.one_case
@by_place
def test_a_program_runs_and_prints_what_is_shown(program, tmp_path, monkeypatch):
    if re.search(r"^import .*\btorch\b", program.code, re.MULTILINE):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # some make checkpoints
    if "virtual_cpu_devices" in program.code:
        printed = in_fresh_process(program.code, tmp_path)
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:  # on the 8 devices of these tests
            exec(compile(program.code, f"{program.page}:{program.line}", "exec"), {"__name__": "__main__"})
        printed = out.getvalue()
    if program.prints is not None:
        assert printed == program.prints


def in_fresh_process(code, folder):
    environ = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_code_fits_the_column_of_the_site():
    pages = [path for path in PAGES if path != README]
    lines = [(path.name, line) for path in pages for _, code, *_ in blocks(path) for line in code.splitlines()]
    assert not [(name, line) for name, line in lines if len(line) > 100]


def test_the_readme_is_short_and_its_program_too():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 125
    (whole,) = [program for program in PROGRAMS if program.page == "README.md" and program.prints]
    assert len(whole.code.splitlines()) <= 28


def test_commands_are_of_known_programs():
    known = {"make", "jdp", "srun", "sbatch", "mpirun", "torchrun", "pip", "python", ".venv/bin/pre-commit"}
    assert {command[0] for command in COMMANDS if command} <= known


def test_nothing_is_installed_that_is_not_published():
    for command in COMMANDS:
        if command[:2] == ["pip", "install"]:
            assert all(re.match(r"\.($|\[|/)", what) for what in command[2:]), command
    for path in PAGES:
        assert not re.search(r"pip install \"?jax-data-parallel", path.read_text(encoding="utf-8")), path


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_commands_are_targets_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = [command[1] for command in COMMANDS if command and command[0] == "make"]
    named += [name for path in PAGES for name in re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8"))]
    assert {"mnist", "test"} <= set(named) <= set(targets)


def test_files_that_are_named_are_there():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:examples|jdp|tests|benchmarks|docs)/[\w./]+)`", text):
            assert (ROOT / name).exists(), f"{path.name} names {name}"
        for target in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", text):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_jdp_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [command[1:] for command in COMMANDS if command and command[0] == "jdp"]
    for command, *args in commands:
        assert command in ("launch", "doctor", "plan", "replay")
        if command == "launch":
            script, *own = parse(args).command[1:]
            assert script == "train.py" or script.startswith("examples/")
            text = (tmp_path / script).read_text(encoding="utf-8")
            assert all(f'"{option}"' in text for option in own if option.startswith("--"))
        if command == "plan":
            own = args[: args.index("--")] if "--" in args else args  # what follows is the script's
            options = cli._parser().parse_args(own)
            cli._check(cli._parser(), options)
            assert (ROOT / options.script).is_file()
        if command == "replay":
            assert replay._parser().parse_args(args).script == "train.py"
    assert len(commands) > 4 and ["doctor"] in commands


@pytest.mark.budget(20)
def test_the_lines_beside_those_of_torch_run():
    (block,) = [code for _, code, *_ in blocks(ROOT / "docs" / "from_torch.md") if code.startswith("torch ")]
    width = block.index("jdp\n")
    right = "\n".join(line[width:] for line in block.splitlines()[1:])
    rows = np.ones((10, 3), np.float32), np.zeros((10, 2), np.float32)
    names = {"nnx": nnx, "jdp": jdp, "optax": optax, "loader": [rows]}
    names["Net"] = lambda rngs: nnx.Linear(3, 2, rngs=rngs)
    names["forward"] = lambda model, batch: model(batch[0])
    names["criterion"] = lambda outputs, batch: ((outputs - batch[1]) ** 2).mean()
    exec(compile(right, "from_torch.md", "exec"), names)
    assert float(names["metrics"]["loss"]) > 0


def sides(path):
    """The two programs of a page's diff."""
    (diff,) = [code.splitlines() for language, code, *_ in blocks(path) if language == "diff"]
    assert {line[:2] for line in diff} <= {"  ", "- ", "+ ", "-", "+", ""}
    return ["\n".join(line[2:] for line in diff if line[:1] in ("", " ", side)) for side in "-+"]


@pytest.mark.budget(20)
def test_both_sides_of_the_diff_in_the_readme_train_alike():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 3)).astype(np.float32), rng.normal(size=(50, 2)).astype(np.float32)
    losses = []
    for program in sides(README):
        names = {
            "nnx": nnx,
            "jdp": jdp,
            "optax": optax,
            "loader": [(x[i : i + 16], y[i : i + 16]) for i in (0, 16, 32, 48)],
        }
        names["Net"] = lambda rngs: nnx.Linear(3, 2, rngs=rngs)
        names["loss_fn"] = lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean()
        exec(compile(program, "README.md", "exec"), names)
        losses.append(float(names["loss"]))  # of the last batch, of 2 rows, after three steps
    assert "jdp" not in sides(README)[0]
    assert np.isclose(*losses, rtol=1e-5)


@pytest.mark.full
@pytest.mark.budget(20)
def test_both_sides_of_the_diff_for_pmap_end_with_the_same_numbers():
    before, after = sides(ROOT / "docs" / "from_pmap.md")
    assert "jdp" not in before and len(before.splitlines()) > len(after.splitlines()) + 15
    ends = []
    for program in (before, after):
        names = {}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(program, "from_pmap.md", "exec"), names)
        ends.append((out.getvalue(), names["loss"], names["accuracy"]))
    (said, loss, accuracy), (same, loss_of_jdp, accuracy_of_jdp) = ends
    assert said == same and accuracy == accuracy_of_jdp > 0.8
    assert np.isclose(loss, loss_of_jdp, rtol=1e-5)


def test_each_option_of_a_training_step_is_explained_on_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    options = [
        p.name for p in inspect.signature(jdp.DataParallel.train_step).parameters.values() if p.kind == p.KEYWORD_ONLY
    ]
    assert "accumulate_steps" in options
    assert not [name for name in options if f"### {name}\n" not in text and f"`{name}=" not in text]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_figures_of_the_benchmarks_page_are_those_of_the_last_race():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [cells(line) for line in page.splitlines() if line.startswith("|")]
    measured = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").partition("<!-- peers -->")[2]
    tables = [[cells(x) for x in t.splitlines() if x[0] == "|"] for t in measured.split("\n\n") if t.startswith("|")]
    times, lines = tables[0], next(table for table in tables if table[0][1].startswith("lines"))
    assert rows[0][0] == "on 2 devices" and lines[0][3] == "13 rows over 2"
    at = [times[0].index(f"{name}, 2") for name in rows[0][3:]]
    for name, written, uneven, *figures in rows[2:]:
        of_race = next(row for row in times if row[0] == name)
        of_text = next(row for row in lines if row[0] == name)
        assert figures == [of_race[i].partition(" ")[0] for i in at], name
        assert written == of_text[1] and uneven == of_text[3].partition(":")[0], name
    assert len(at) == 3 and len(rows) > 7
