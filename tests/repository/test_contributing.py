"""CONTRIBUTING.md sends nobody to a file or a command that is not there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`([\w./-]+(?:/|\.md|\.toml|/[\w.]+))`", TEXT)))
TARGETS = sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE)))


def test_the_text_names_files_and_commands():
    assert {"jdp/_train/computation.py", "README.md", ".ci/run", "tests/jax/"} <= set(FILES)
    assert {"install", "test", "lint", "bench"} <= set(TARGETS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_named_is_there(name):
    assert (ROOT / name).exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_command_that_is_named_is_there(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
