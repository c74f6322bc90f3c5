"""The list of mutants keeps up with the code: each can be put in, and the tests that are named for it are there."""

import ast
import collections
import pathlib
import re

import mutants
import pytest

TESTS = pathlib.Path(mutants.__file__).parent


@pytest.mark.full
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_one_change_of_code_that_compiles(mutant):
    right = (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    wrong = mutant.text()  # the old text stands there once
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(right))
    assert len(wrong.splitlines()) == len(right.splitlines())  # docs/architecture.md counts the lines
    compile(wrong, mutant.file, "exec")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_are_named_are_there(mutant):
    assert mutant.tests
    for name in mutant.tests:
        file, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), name
    assert (TESTS / mutant.file.split("/")[-2].strip("_")).is_dir()


def test_mutants_are_spread_over_the_wings():
    wings = collections.Counter(mutant.file.split("/")[1] for mutant in mutants.MUTANTS)
    assert {"_core", "_train", "_wrapper", "_model", "_processes", "_checkpoint"} <= set(wings)
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 40
