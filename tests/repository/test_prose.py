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
    return found_in(tmp_path, monkeypatch, "module.py", f'def function():\n    """{docstring}"""\n')


def found_in(tmp_path, monkeypatch, name, text):
    monkeypatch.setattr("prose.ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    return [*faults(tmp_path / name)]


@pytest.mark.parametrize("docstring", DIALECT)
def test_the_dialect_is_refused(tmp_path, monkeypatch, docstring):
    assert found(tmp_path, monkeypatch, docstring)


@pytest.mark.parametrize("docstring", PLAIN)
def test_plain_english_is_not(tmp_path, monkeypatch, docstring):
    assert found(tmp_path, monkeypatch, docstring) == []


@pytest.mark.parametrize(
    "text",
    [
        'raise ValueError(f"jdp.gather: {path} has no rows; it is to be an array. Pad it.")\n',
        'raise ValueError(\n    f"jdp.gather: {path} is anything; "\n    f"{name} runs anew. Pad it."\n)\n',
        'class A:\n    x: int = 0\n    """The rows, for it holds them."""\n',
        "# It runs anew.\n",
    ],
    ids=["an error", "one in parts", "an attribute", "a comment"],
)
def test_each_text_of_a_module_is_read(tmp_path, monkeypatch, text):
    assert len(found_in(tmp_path, monkeypatch, "module.py", text)) == 1


def test_a_page_is_read_but_not_its_programs(tmp_path, monkeypatch):
    page = "# A page\n\nIt runs anew.\nNobody has tried it.\n\n```python\nx = 'it runs anew'\n```\n"
    assert [(x.line, x.rule.partition(":")[0]) for x in found_in(tmp_path, monkeypatch, "page.md", page)] == [
        (3, "'anew'")
    ]


def test_there_are_few_exceptions():
    assert len(EXCEPTIONS) <= 10
