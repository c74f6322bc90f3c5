"""What a stranger looks at first: versions agree everywhere, forms are well-formed, and no address is made up."""

import pathlib
import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_is_that_of_the_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert f"## [{citation['version']}] - {citation['date-released']}" in read("CHANGELOG.md")


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_form_of_an_issue_has_what_it_needs(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        return
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert ids and len(ids) == len(set(ids))


def test_the_versions_on_the_page_are_those_that_are_installed():
    page, needs = read("docs/versions.md"), dict(re.match(r"([\w-]+)(.*)", x).groups() for x in PROJECT["dependencies"])
    assert needs["jax"] == ">=0.10,<0.13" and "0.10 to 0.12" in page
    assert needs["flax"] == ">=0.12.8,<0.13" and "0.12.8 and newer, below 0.13" in page
    assert PROJECT["requires-python"] == ">=3.11" and "3.11 and newer" in page


def test_tools_of_an_extra_have_one_version():
    pins = [pin for extra in ("docs", "release") for pin in PROJECT["optional-dependencies"][extra]]
    assert pins and all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins)


def test_ci_builds_the_site_and_tests_the_wheel_as_make_does():
    run, makefile = read(".ci/run"), read("Makefile")
    assert ".installed-docs" in run and "tests/repository/test_site.py" in run
    assert ".ci/wheel" in run and ".ci/wheel" in makefile
    release = re.search(r"^release:.*?\n\n", makefile, re.DOTALL | re.MULTILINE)[0]
    assert "twine check" in release and "twine upload" not in makefile


def test_the_lock_file_has_a_version_of_everything_that_is_needed():
    """On each Python that CI runs, one version that pyproject.toml allows; with hashes, and without an address."""
    text = read("requirements.lock")
    locked = [Requirement(line.rstrip(" \\")) for line in text.splitlines() if re.match(r"[a-z]", line)]
    extras = PROJECT["optional-dependencies"]
    needed = [*map(Requirement, [*PROJECT["dependencies"], *extras["examples"], *extras["test"]])]
    for python in ("3.11", "3.12"):
        where = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
        here = {x.name: x for x in locked if x.marker is None or x.marker.evaluate(where)}
        for need in (x for x in needed if x.name != PROJECT["name"]):
            (version,) = (x.version for x in here[need.name].specifier)
            assert need.specifier.contains(version), (need, version, "make lock")
    assert "://" not in text and text.count("--hash=sha256:") >= len(locked)


def test_no_message_names_a_package_that_anybody_may_register():
    """PyPI does not have this one; who registers its name would run code where people do what a message says."""
    files = [*(ROOT / "jdp").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.py")]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert not [path.name for path in files if "jax-data-parallel[" in path.read_text(encoding="utf-8")]
