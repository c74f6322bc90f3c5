"""benchmarks/gpu.py where there is no GPU: that it says so, that its models are twins, and that all of it runs."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCHMARKS.parent)},
    )


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", BENCHMARKS / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_results():
    """Nothing is written by what the test does."""
    before = {path: path.stat().st_mtime_ns for path in BENCHMARKS.glob("results/*")}
    yield
    assert {path: path.stat().st_mtime_ns for path in BENCHMARKS.glob("results/*")} == before


@pytest.mark.full
def test_without_a_gpu_it_says_so_and_writes_nothing(no_results):
    found = run()
    assert found.returncode == 0, found.stderr
    assert "No GPU that JAX can use (" in found.stdout and "nothing is written" in found.stdout
    assert " ms" not in found.stdout


def test_a_full_run_on_the_cpu_is_refused():
    found = run("--platform", "cpu")
    assert found.returncode == 2 and "--tiny" in found.stderr


@pytest.mark.full
def test_tiny_models_go_through_all_of_it(no_results):
    found = run("--platform", "cpu", "--tiny", "--rounds", "1", "--steps", "1")
    assert found.returncode == 0, found.stderr
    rows = [line for line in found.stdout.splitlines() if line.startswith(("| ResNet-50", "| GPT"))]
    assert len(rows) == 8 and "Nothing is written" in found.stdout
    for row in rows:
        measured = " ms | " in row
        assert measured or "torch" in row and "not measured: No module named" in row, row
        assert "ended" not in row
    losses = np.reshape([float(row.split(" | ")[-2]) for row in rows if "torch" not in row], (2, 3))  # of two models
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses[:, :2], losses[:, 2:].repeat(2, 1), rtol=1e-2)  # plain jit's, in bfloat16


@pytest.mark.full
@pytest.mark.parametrize("model, parameters", [("ResNet-50", 25_557_032), ("GPT, 125M", 124_475_904)])
def test_the_models_are_twins_of_the_size_they_are_known_for(gpu, model, parameters):
    """torchvision's count for ResNet-50; GPT-2's smallest (124,439,808) with 47 rows more in its table of words."""
    import gpu_models
    from gpu_sizes import FULL, ResNetSize, batch_of

    size, _ = FULL[model]
    ours = gpu_models.ResNet(size) if isinstance(size, ResNetSize) else gpu_models.GPT(size)
    shapes = jax.eval_shape(ours.init, jax.random.key(0), batch_of(size, 1)["x"])["params"]
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == parameters
    torch = pytest.importorskip("torch")
    import gpu_torch

    with torch.device("meta"):
        theirs = gpu_torch.resnet(size) if isinstance(size, ResNetSize) else gpu_torch.GPT(size)
    assert sum(p.numel() for p in theirs.parameters()) == parameters


def test_what_is_written_names_the_machine_the_versions_and_who_was_not_measured(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    rows = {
        "jdp": {"seconds": 0.1, "ratio": 1.0, "rows": 8, "parameters": 5, "loss": 1.0, "rounds": 3},
        "jit": {"seconds": 0.2, "ratio": 2.0, "rows": 8, "parameters": 5, "loss": 1.0, "rounds": 3},
        "torch": {"missing": "torch 2.0+cpu finds no GPU"},
    }
    path = gpu.write(["Some GPU"] * 2, {"ResNet-50": rows}, argparse.Namespace(steps=10))
    text = path.read_text()
    assert path.name == "gpu-2-some-gpu.md" and path.with_suffix(".json").exists()
    assert "2 x Some GPU" in text and f"jax {jax.__version__}" in text
    assert "| plain jit | 200.00 ms | 2.00 | 40 |" in text
    assert "| torch DataParallel | not measured: torch 2.0+cpu finds no GPU | - |" in text
