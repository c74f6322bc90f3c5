"""The fast tier has one case of a family, and none that takes longer than its budget."""

import itertools
import math
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import pytest
from cases import some_of

TESTS = """
import time
import pytest
from conftest import slowness

def burn():
    end = time.process_time() + 3 * slowness()  # the budget is 2
    while time.process_time() < end:
        pass

def test_first():  # which is not judged
    burn()

def test_long():
    burn()

@pytest.mark.budget(5)
def test_that_may():
    burn()

@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 2, 3])
def test_last(n):
    pass

@pytest.mark.one_case("2")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_named(n):
    pass

@pytest.mark.full
def test_full():
    burn()
"""


def run_tests(tmp_path, tier, **environ):
    """Runs TESTS with this conftest.py, and returns the names of those that passed and that failed, and the text."""
    (tmp_path / "test_it.py").write_text(TESTS)
    root = pathlib.Path(__file__).parents[2]
    inherited = {x: value for x, value in os.environ.items() if "PYTEST" not in x and x != "JDP_TESTS_UNTIL"}
    environ = {**inherited, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]), **environ}
    command = [sys.executable, "-m", "pytest", "-c", str(root / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-p", "conftest", "-p", "no:cacheprovider", "-m", tier, "-rpfs", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False)
    text = done.stdout + done.stderr
    named = [set(re.findall(rf"^{word} \S*::(\S+)", text, re.MULTILINE)) for word in ("PASSED", "FAILED")]
    return *named, text


@pytest.mark.full
@pytest.mark.parametrize(
    ("tier", "passed", "failed"),
    [
        ("not full", {"test_first", "test_that_may", "test_last[3]", "test_named[2]"}, {"test_long"}),
        ("full", {"test_last[1]", "test_last[2]", "test_named[1]", "test_named[3]", "test_full"}, set()),
    ],
)
def test_a_tier_has_its_cases_and_the_fast_one_judges_them(tmp_path, tier, passed, failed):
    *found, text = run_tests(tmp_path, tier, JDP_TESTS_ARE_JUDGED="1")
    assert found == [passed, failed], text
    if failed:
        assert re.search(r"test_long took \d+\.\d CPU s; a case of the fast tier may take 2\. Make", text)


@pytest.mark.full
def test_cases_that_have_not_begun_in_time_are_skipped_and_counted(tmp_path):
    left_out = tmp_path / "left_out"
    passed, failed, text = run_tests(tmp_path, "full", JDP_TESTS_UNTIL="1", JDP_TESTS_LEFT_OUT=str(left_out))
    assert not (passed or failed) and re.search(r"SKIPPED \[5\].* no time is left for it in this run", text), text
    assert len(left_out.read_text().splitlines()) == 5


CRASHES = """
import os
import pytest

@pytest.mark.parametrize("i", range(4))
def test_crashes(i):
    assert i != {}, os.abort()
"""


@pytest.mark.full
@pytest.mark.parametrize("n", ["1", "2"])
def test_a_run_ends_though_workers_crash(tmp_path, n):
    """In the middle of a file, before its last case, and in it: all others are run, on a worker that takes over."""
    (tmp_path / "conftest.py").write_text("from scheduling import pytest_xdist_make_scheduler")
    for name, at in {"a": 1, "b": 9, "c": 2, "d": 9, "e": 3}.items():
        (tmp_path / f"test_{name}.py").write_text(CRASHES.format(at))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", n, "--dist", "loadfile", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=200)
    assert "3 failed, 17 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.full
def test_a_run_passes_where_ctrl_c_is_ignored():
    """As in a script that starts it with &: the tests send Ctrl-C to processes that they start."""
    ignored = "import signal, sys, pytest; signal.signal(2, signal.SIG_IGN); sys.exit(pytest.main(sys.argv[1:]))"
    case = "tests/wrapper/test_batches.py::test_a_row_that_is_never_read_holds_no_exit_up[Ctrl-C]"
    command = [sys.executable, "-c", ignored, "-n", "0", "-m", "", "-p", "no:cacheprovider", case]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=200)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("lists", [(range(7), range(3), range(3)), (range(2),) * 4, (range(5),), (range(8), range(4))])
def test_every_entry_and_every_pair_of_entries_is_in_some_case(lists):
    def case(values):
        params = dict(zip("abcd", values, strict=False))
        marks = [pytest.mark.parametrize(name, values).mark for name, values in zip("abcd", lists, strict=False)]
        return mock.Mock(callspec=mock.Mock(params=params), iter_markers=lambda name: marks)

    cases = {case(values): values for values in itertools.product(*lists)}
    for size in (1, 2):
        chosen = [cases[each] for each in some_of([*cases], size)]
        for columns in itertools.combinations(range(len(lists)), min(size, len(lists))):
            found = {tuple(values[column] for column in columns) for values in chosen}
            assert found == set(itertools.product(*(lists[column] for column in columns)))
        two = sorted(map(len, lists))[-size:]
        assert len(chosen) <= 1.5 * math.prod(two)
        first = [*cases][0]
        rest = [cases[each] for each in some_of([*cases], size, {first})]
        assert len(rest) < len(chosen) or cases[first] not in rest
