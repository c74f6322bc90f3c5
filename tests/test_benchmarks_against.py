"""benchmarks/against.py: a race of a checkout with itself, and how it judges."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
PROGRAM = "host_cost 10: step"


@pytest.fixture
def against(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmarks_against", BENCHMARKS / "against.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needs_git():
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=BENCHMARKS, capture_output=True).returncode
    except OSError:
        found = 1
    if found:
        pytest.skip("there is no git, or this is no checkout of it: no other commit to compare with")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "against.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"PYTHONPATH": ""},
    )


def rounds(ratio, seed=0, count=20):
    """`(rounds, 2 trees, 2 clocks)` with some noise."""
    old = np.random.default_rng(seed).uniform(1, 1.001, size=(count, 1, 2))
    return np.concatenate([old, old * ratio], axis=1)


@pytest.mark.full
def test_a_race_with_its_own_commit_has_a_row_and_a_bound_that_fails_it():
    needs_git()
    only = ["--only", PROGRAM + " numpy", "--devices", "2", "--seconds", "0.2", "--starts", "1"]
    found = run("HEAD", *only, "--bound", "0.01")
    row = next(line for line in found.stdout.splitlines() if line.startswith(f"| {PROGRAM} numpy | 2 |"))
    assert 0.1 < float(row.split("|")[5]) < 10
    assert row.endswith("| over 0.01 |") and found.returncode == 1, found.stderr


def test_a_commit_that_is_not_there_is_named():
    needs_git()
    found = run("no-such-commit", "--only", PROGRAM)
    assert found.returncode == 1 and "there is no no-such-commit to compare with" in found.stderr


def test_words_that_no_program_has_are_refused():
    found = run("HEAD", "--only", "no such program")
    assert found.returncode == 2 and "no program has 'no such program' in its name" in found.stderr


@pytest.mark.full
def test_only_an_interval_above_the_bound_is_too_slow(against):
    row, slower = against.cells([rounds(1.05), rounds(1.06, 1)], 1.02)
    assert slower and row[-1] == "over 1.02" and 1.05 <= float(row[2]) <= 1.06
    row, slower = against.cells([rounds(1.05), rounds(1.00, 1)], 1.02)  # one start alone may have had bad luck
    assert not slower and row[-1] == ""
    assert not against.cells([rounds(0.9), rounds(1.0, 1)], 1.02)[1]


@pytest.mark.full
def test_all_contenders_of_host_cost_compute_the_same():
    """The script itself compares what they return, before it times them."""
    command = [sys.executable, str(BENCHMARKS / "host_cost.py"), "--devices", "2", "--leaves", "3", "--seconds", "0.1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, env=os.environ | {"PYTHONPATH": ""})
    assert [line.split(" | ")[0] for line in found.stdout.splitlines()] == ["apply", "step", "nnx"], found.stderr


@pytest.mark.full
def test_the_interval_has_the_median_in_it_and_the_luck_of_the_starts(against):
    noise = [1 + 0.1 * np.random.default_rng(seed).normal(size=50) for seed in range(5)]
    low, high = against.interval(noise)
    assert low < np.median(np.concatenate(noise)) < high and 0.01 < high - low < 0.1
    apart = [rounds / 2 if i % 2 else rounds for i, rounds in enumerate(noise)]
    low, high = against.interval(apart)
    assert high - low > 0.3


@pytest.mark.full
def test_a_process_with_the_jdp_of_another_tree_is_refused(against, tmp_path):
    tree = against.Tree(BENCHMARKS.parent, "host_cost", "10", 1)
    try:
        tree.tree = tmp_path
        with pytest.raises(against.Gone, match=f"not of {tmp_path}"):
            tree.begin()
    finally:
        tree.close()


@pytest.mark.full
def test_a_program_that_ends_has_a_row_that_says_so_and_the_others_go_on(against, monkeypatch, capsys):
    def race(trees, benchmark, case, n, names, seconds, starts):
        if case == "CNN":
            raise against.Gone("exit status 1: AttributeError: no such door")
        return {name: [rounds(1.0)] for name in names}

    monkeypatch.setattr(against, "race", race)
    monkeypatch.setattr(against, "unpack", lambda commit, to: None)
    monkeypatch.setattr(sys, "argv", ["against.py", "HEAD", "--only", "train", "--devices", "2"])
    with pytest.raises(SystemExit) as end:
        against.main()
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 1
    assert any("train CNN" in line and "no such door" in line for line in lines)
    assert any(line.startswith("| train Transformer: jdp | 2 |") for line in lines)


def test_on_one_device_nothing_is_uneven(against):
    names = against.chosen(["overhead MLP", "train CNN"], 1)
    assert names == {("overhead", "MLP"): ["jdp", "gradient"], ("train", "CNN"): ["jdp", "accumulate"]}
    assert "uneven" in against.chosen(["train CNN"], 2)["train", "CNN"]
