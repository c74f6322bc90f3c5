"""The examples run as a person runs them, on small settings; and the default learns what it promises."""

import ast
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
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


@pytest.mark.full
def test_the_picture_of_a_run_says_what_its_lines_are(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    picture = importlib.import_module("_picture").picture
    figure = picture("title", [3.0, 2.0, 1.0] * 50, [0.5, 0.9], np.zeros((4, 28, 28)), np.arange(4), np.arange(4))
    axes = next(axes for axes in figure.subfigs[0].axes if axes.get_legend())
    handles, words = axes.get_legend().legend_handles, [x.get_text() for x in axes.get_legend().texts]
    assert words == ["loss of a step", "its mean over 6 steps", "accuracy"]
    thin, thick, _ = (line.get_linewidth() for line in handles)
    assert thin < 1 < thick


def run(script, *args, computes=False):
    """What a program prints. One that computes takes a third of the time if LLVM optimizes it, and others longer."""
    left_out = ["NPROC", "PJRT_NPROC"]  # conftest's, for 8 devices
    left_out += ["XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"] if computes else []
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    env["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def broken(folder, module, error):
    """A folder for PYTHONPATH in which the import of a module ends so."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(error)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(EXAMPLES.parent)])}


@pytest.mark.parametrize("script", ["mnist", "mnist_nnx", "char_gpt", "resnet", "tensor_parallel"])
def test_the_first_line_comes_before_jax(script, tmp_path):
    env = broken(tmp_path, "jax", "raise SystemExit(7)")
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{script}.py")], capture_output=True, text=True, env=env)
    assert done.returncode == 7 and done.stderr == ""
    assert done.stdout == f"{script}: JAX is started, then the model is compiled; each takes some seconds\n"


@pytest.mark.full
@pytest.mark.parametrize("script", ["mnist", "multi_process"])
def test_without_matplotlib_a_run_goes_on(script, tmp_path):
    env = broken(tmp_path, "matplotlib", "raise ModuleNotFoundError('none', name='matplotlib')")
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), "--train-rows", "256", "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_, last = done.stdout.splitlines()
    said = 'no picture: matplotlib is not installed. pip install -e ".[examples]" brings it'
    assert last.startswith(f"{said};")
    assert first == said or script == "mnist"  # a run of many processes may take hours
    assert not (tmp_path / f"{script}.png").exists()


LONG = {  # runs that do not come to their end while a test waits
    "mnist": ("--epochs", "500", "--train-rows", "512"),
    "char_gpt": ("--steps", "1000", "--devices", "1", "--width", "32", "--layers", "1", "--context", "32"),
    "resnet": ("--epochs", "500", "--devices", "1", "--width", "4", "--blocks", "1", "--train-rows", "512"),
}


def interrupted(process):
    """Interrupts a program, as a person does; again, if Python was in JAX's callback of its garbage collector.

    What is raised there is printed, and goes no further.
    """
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=60)
    except subprocess.TimeoutExpired as error:
        assert b"Exception ignored in: <function _xla_gc_callback" in (error.stderr or b"")
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "after"), [("mnist", "digits"), ("mnist", "epoch 1"), ("char_gpt", "step 125"), ("resnet", "epoch 1")]
)
def test_an_interrupt_keeps_the_picture_of_what_there_is(script, after, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), *LONG[script], "--picture", str(picture)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        while not (line := process.stdout.readline()).startswith(after):
            assert line
        time.sleep(0.01 if after == "digits" else 0)
        out, error = interrupted(process)
    assert process.returncode == 130 and error.endswith(f"{script}: interrupted\n")
    assert error.count("\n") == 1 or "Exception ignored in: <function _xla_gc_callback" in error
    if after != "digits":
        assert picture.read_bytes().startswith(b"\x89PNG") and f"picture {picture}" in out


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_mnist_says_at_once_what_comes(tmp_path):
    command = ["make", "mnist", f"VENV={tmp_path / 'none'}", "PYTHON=no-such-python", "ACCELERATOR="]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of make test
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent, env=env)
    what, before, missing, *_ = done.stdout.splitlines()
    assert "learns handwritten digits" in what and "up to a minute on two busy cores" in what
    assert "1 to 3 minutes" in before and missing.startswith("There is no no-such-python here.")


@pytest.mark.full
def test_what_pip_does_is_told_briefly_and_whole_where_it_fails(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PIP_QUIET"}
    command = [sys.executable, str(EXAMPLES.parent / ".ci/pip")]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and re.fullmatch(r"  pip: done, in \d+ s\n", done.stdout)
    done = subprocess.run([*command, "--no-index", "no-such-package"], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "No matching distribution found for no-such-package" in done.stdout


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
    out = run("mnist.py", "--picture", str(tmp_path / "digits.png"), computes=True)
    assert float(re.search(r"test accuracy ([\d.]+)%:", out).group(1)) >= 96


@pytest.mark.full
def test_from_torch_is_short_and_learns():
    assert len((EXAMPLES / "from_torch.py").read_text().splitlines()) < 60
    out = run("from_torch.py")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) >= 2 and losses[-1] < losses[0] / 2
    assert float(re.search(r"test accuracy ([\d.]+)%", out).group(1)) > 85
