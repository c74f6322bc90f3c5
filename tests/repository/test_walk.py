"""The newcomer's walk is walked: nothing that a person types fails, or hangs.

How long a silence lasts is the machine's too, and here it has other work; 10 seconds are the limit of a walk by hand.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="no terminals of that kind on this machine")

import walk


@pytest.mark.full
def test_silences_are_measured(tmp_path, capfd):
    step = walk.run("echo begun; sleep 1.5; echo again; sleep 1; exit 3", tmp_path)
    assert step.code == 3 and 0.7 <= step.silence < step.seconds - 0.2 and step.after == "begun"
    assert walk.run("sleep 0.3", tmp_path).after == "the command was typed"
    assert "again" in capfd.readouterr().out


def test_every_example_and_readme_program_is_on_the_way(tmp_path):
    for folder in ("examples", "docs"):
        shutil.copytree(walk.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("data", "notebooks"))
    shutil.copy(walk.ROOT / "README.md", tmp_path)
    found, more = walk.commands(tmp_path, False), walk.commands(tmp_path, True)
    for path in (walk.ROOT / "examples").glob("[!_]*.py"):
        assert path.name == "ray_mnist.py" or any(f"examples/{path.name}" in command for command in found), path
    assert ".venv/bin/python walk_README_1.py" in found and len(more) > len(found) + 10


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(not all(map(shutil.which, ("git", "make"))), reason="no git or make on this machine")
@pytest.mark.skipif(not (walk.ROOT / ".git").exists(), reason="no checkout to clone")
def test_a_newcomers_walk_succeeds():
    command = [sys.executable, walk.__file__, "--limit", "120", "--quick"]
    walked = subprocess.run(command, capture_output=True, text=True, cwd=Path.home())
    print(walked.stdout[walked.stdout.rfind("in all") :])
    if re.search(r"No matching distribution|Could not find a version|Failed to establish a new conn", walked.stdout):
        pytest.skip("pip cannot install the packages here")
    assert walked.returncode == 0, walked.stdout[-5000:] + walked.stderr
