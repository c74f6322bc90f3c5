"""Every code block of the README runs, and its commands exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jdp._launch.options import parse
from jdp._plan import cli

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def test_blocks_are_of_known_languages():
    assert {language for language, _ in BLOCKS} == {"sh", "python"}
    assert len(PYTHON) >= 4


@pytest.mark.budget(20)
@pytest.mark.one_case
@pytest.mark.parametrize("code", [c for c in PYTHON if "virtual_cpu_devices" not in c])
def test_python_block_runs(code, tmp_path, monkeypatch):
    if re.search(r"^import .*\btorch\b", code, re.MULTILINE):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # one makes checkpoints
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


COMMANDS = [shlex.split(line, comments=True) for lang, code in BLOCKS if lang == "sh" for line in code.splitlines()]


def test_commands_are_of_known_programs():
    assert {command[0] for command in COMMANDS} == {"make", "jdp", "srun", "mpirun", "torchrun"}


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_commands_are_targets_of_the_makefile():
    for command in (c for c in COMMANDS if c[0] == "make"):
        done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def test_jdp_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    commands = [command[1:] for command in COMMANDS if command[0] == "jdp"]
    for command, *args in commands:
        assert command in ("launch", "doctor", "plan")
        if command == "launch":
            assert parse(args).command[1:] == ("train.py",)
        if command == "plan":
            own = args[: args.index("--")] if "--" in args else args  # what follows is the script's
            options = cli._parser().parse_args(own)
            cli._check(cli._parser(), options)
            assert (ROOT / options.script).is_file()
    assert len(commands) > 4 and ["doctor"] in commands
