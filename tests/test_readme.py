"""Every code block of the README runs, and its commands exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def test_blocks_are_of_known_languages():
    assert {language for language, _ in BLOCKS} == {"sh", "python"}
    assert len(PYTHON) >= 4


@pytest.mark.parametrize("code", [c for c in PYTHON if "virtual_cpu_devices" not in c])
def test_python_block_runs(code):
    names = {}
    exec(compile(code, "README.md", "exec"), names)  # on the 8 devices of these tests
    if "logits" in names:
        assert names["logits"].shape == (50, 10)
        assert names["grads"]["params"].keys() == names["variables"]["params"].keys()
    if "loss" in names and "step" in names:
        assert float(names["loss"]) > 0


@pytest.mark.parametrize("code", [c for c in PYTHON if "virtual_cpu_devices" in c])
def test_block_that_starts_jax_runs_in_a_fresh_process(code):
    code += "\nimport jax\nassert len(jax.devices('cpu')) == 8\nprint('eight')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "eight"), done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_commands_are_targets_of_the_makefile():
    commands = [line.split("#")[0].split() for lang, code in BLOCKS if lang == "sh" for line in code.splitlines()]
    assert commands
    for command in commands:
        assert command[0] == "make"
        done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
