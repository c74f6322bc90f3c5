"""The check of the prose finds what it is there to find, and leaves plain English alone."""

import pytest
from prose import EXCEPTIONS, faults

DIALECT = [
    "Whether all is well.",
    "The sum of all.",
    "Returns the sum, for it is needed.",
    "Ends the process, which tells who has died.",
    "Returns the ways in which it fails.",
    "Returns the sum. Of several processes each has its own.",
    "Returns what is to be done.",
    "Makes it anew.",
    "Runs it meanwhile.",
    "Runs it likewise.",
    "Returns the sum beside the mean.",
    "Puts it whole on every device.",
    "Waits for nobody.",
    "Returns None where there is none.",
]
PLAIN = [
    "Returns True if all is well.",
    "Returns the sum, because it is needed.",
    "Tells the user who has called it, for example.",
    "Sums the rows of each replica; with several processes, each has its own.",
    "Returns `whether` it is so.",
]


def found(tmp_path, monkeypatch, docstring):
    monkeypatch.setattr("prose.ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(f'def function():\n    """{docstring}"""\n')
    return [*faults(path)]


@pytest.mark.parametrize("docstring", DIALECT)
def test_the_dialect_is_refused(tmp_path, monkeypatch, docstring):
    assert found(tmp_path, monkeypatch, docstring)


@pytest.mark.parametrize("docstring", PLAIN)
def test_plain_english_is_not(tmp_path, monkeypatch, docstring):
    assert found(tmp_path, monkeypatch, docstring) == []


def test_there_are_few_exceptions():
    assert len(EXCEPTIONS) <= 10
