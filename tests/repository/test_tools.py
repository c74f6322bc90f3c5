"""Style and types are checked by the same tools, of the same versions, at a commit, by hand and in CI."""

import os
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]


def commands(*targets):
    """What make runs for these targets, and what it would first have to install for them."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "VENV"))}
    make = ["make", "--dry-run", "--no-print-directory", *targets]
    return subprocess.run(make, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout.splitlines()


def test_each_tool_has_one_version():
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    tools = [re.sub(r"\[\w+\]", "", pin) for pin in pins if not pin.startswith("jax-data-parallel")]
    assert [re.sub(r"==\d+(\.\d+)+$", "", tool) for tool in tools] == ["mypy", "pre-commit", "pyright", "ruff"]


@pytest.mark.parametrize("tool", ["ruff", "pyright"])
def test_a_commit_runs_what_make_lint_runs(tool):
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hook = next(hook for hook in repository["hooks"] if hook["id"] == tool)
    # A hook of another kind would have an environment, and so versions, of its own.
    assert repository["repo"] == "local" and hook["language"] == "system" and hook["entry"] == f"make {tool}"
    runs = [line for line in commands(tool) if line.startswith(f".venv/bin/{tool} ")]
    assert runs and {*runs} <= {*commands("lint")}
    assert any(line.endswith('.ci/pip --editable ".[dev]"') for line in commands("--what-if=pyproject.toml", tool))


def test_make_lint_checks_the_prose():
    assert ".venv/bin/python tests/repository/prose.py" in commands("lint")


def test_make_lint_checks_what_users_see_of_the_types():
    run = ".venv/bin/python tests/types/check.py"
    assert run in commands("types") and run in commands("lint")


def test_ci_runs_make_lint():
    assert re.search(r"^beside lint .* make lint\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
