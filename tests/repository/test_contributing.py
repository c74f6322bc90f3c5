"""CONTRIBUTING.md sends nobody to a file or a command that is not there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`([\w./-]+(?:/|\.md|\.toml|/[\w.]+))`", TEXT)))
# The rows of the map of a call: each file, with the functions and classes to read there.
ROWS = re.findall(r"^\| `(jdp/[\w/]+\.py)` \| ([`\w, ]+) \|", TEXT, re.MULTILINE)
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


def test_the_map_of_a_call_has_rows():
    assert len(ROWS) > 20


@pytest.mark.parametrize("name, read", ROWS)
def test_what_the_map_of_a_call_names_is_in_that_file(name, read):
    source = (ROOT / name).read_text(encoding="utf-8")
    missing = [
        one for one in re.findall(r"\w+", read) if not re.search(rf"^ *(def|class) {one}\b", source, re.MULTILINE)
    ]
    assert missing == []
