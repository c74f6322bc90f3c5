"""benchmarks/_results.py: a section of RESULTS.md is written, and the others are as they were."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


def section(name, words="old ± 1\n\n  text"):
    return f"<!-- {name} -->\n# {name}\n\n{words}\n<!-- /{name} -->\n"


def written(name, words):
    return section(name, f"Written by `make bench`; what is compared is said in {name}.py. {words}")


@pytest.fixture
def results(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmarks_results", BENCHMARKS / "_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "RESULTS.md")
    return module


def after(results, before, name):
    results.RESULTS.write_text(before, encoding="utf-8")
    results.write(name, name, "new")
    return results.RESULTS.read_text(encoding="utf-8")


@pytest.mark.parametrize("gap", ["", "\n", "\n\n\n"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_section_is_replaced_and_the_others_stay(results, name, gap):
    found = after(results, gap.join(map(section, "abc")), name)
    # The gaps of the section itself are mended; one that it does not touch stays.
    gaps = ["\n" if name in between else gap for between in ("ab", "bc")]
    a, b, c = (written(each, "new") if each == name else section(each) for each in "abc")
    assert found == a + gaps[0] + b + gaps[1] + c
    assert after(results, found, name) == found


def test_a_missing_section_is_appended(results):
    assert after(results, section("a") + section("b"), "c") == f"{section('a')}{section('b')}\n{written('c', 'new')}"


def test_a_missing_file_is_made(results):
    results.write("a", "a", "new", results.table(["x", "y"], [["1", "2|3"]]), "more")
    table = "| x | y |\n| --- | --- |\n| 1 | 2/3 |"
    assert results.RESULTS.read_text() == written("a", f"new\n\n{table}\n\nmore")


def test_a_section_that_does_not_end_is_refused(results):
    before = section("a").replace("<!-- /a -->\n", "") + section("b")
    with pytest.raises(ValueError, match="no <!-- /a --> after it"):
        after(results, before, "a")
    assert results.RESULTS.read_text(encoding="utf-8") == before


def test_the_file_is_sections_with_a_blank_line_between():
    text = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    one = re.compile(r"<!-- (\w+) -->\n# .+?<!-- /\1 -->\n", flags=re.DOTALL)
    sections = one.findall(text)
    assert len({*sections}) == len(sections) > 0
    assert one.sub("", text) == "\n" * (len(sections) - 1)


@pytest.mark.full
def test_each_benchmark_can_be_imported():
    """They use modules of jdp's that are not public, whose names change; no other test runs most of them."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.endswith("_torch"))
    assert {"criterion", "leaves", "train"} <= set(names)
    imports = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", imports, *names], cwd=BENCHMARKS, capture_output=True, text=True)
    assert not done.returncode, done.stderr
