"""The examples run as a person runs them, on small settings; and the default learns what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


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
