"""The examples run as a person runs them, on small settings; and the default learns what it promises."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_what_an_example_shows_stands_in_it(path):
    """It imports no other example, and what it shares with others, in files with an underscore, does nothing of jdp."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {x.names[0].name if isinstance(x, ast.Import) else x.module for x in ast.walk(tree) if hasattr(x, "names")}
    beside = {name for name in named if (EXAMPLES / f"{name}.py").exists()}
    assert all(name.startswith("_") for name in beside)
    of_jdp = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and getattr(x.value, "id", "") == "jdp"}
    assert of_jdp <= {"chunk_sizes"} if path.name.startswith("_") else "DataParallel" in of_jdp


def test_the_picture_of_a_run_says_what_its_lines_are(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    picture = importlib.import_module("_picture").picture
    figure = picture("title", [3.0, 2.0, 1.0] * 50, [0.5, 0.9], np.zeros((4, 28, 28)), np.arange(4), np.arange(4))
    axes = next(axes for axes in figure.subfigs[0].axes if axes.get_legend())
    handles, words = axes.get_legend().legend_handles, [x.get_text() for x in axes.get_legend().texts]
    assert words == ["loss of a step", "its mean over 6 steps", "accuracy"]
    thin, thick, _ = (line.get_linewidth() for line in handles)
    assert thin < 1 < thick


def run(script, *args):
    # conftest's, for 8 devices and quick compiling: with LLVM's optimization this takes a third of the time
    left_out = ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    env["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("script", ["mnist.py", "mnist_nnx.py"])
def test_small_settings(script, tmp_path):
    picture = tmp_path / "digits.png"
    out = run(script, "--train-rows", "512", "--epochs", "2", "--devices", "3", "--picture", str(picture))
    assert "cpu:2" in out
    right, rows = re.search(r"test accuracy [\d.]+%: ([\d,]+) of ([\d,]+)", out).groups()
    assert rows == "2,000" and int(right.replace(",", "")) > 600
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_default_settings_reach_96_percent(tmp_path):
    out = run("mnist.py", "--picture", str(tmp_path / "digits.png"))
    assert float(re.search(r"test accuracy ([\d.]+)%:", out).group(1)) >= 96


@pytest.mark.full
def test_from_torch_is_short_and_learns():
    assert len((EXAMPLES / "from_torch.py").read_text().splitlines()) < 60
    out = run("from_torch.py")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) >= 2 and losses[-1] < losses[0] / 2
    assert float(re.search(r"test accuracy ([\d.]+)%", out).group(1)) > 85
