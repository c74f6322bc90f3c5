"""How Sphinx makes the site of the files next to this one: `make docs`. A new page needs a file here, no more."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import errors  # noqa: E402
import notebooks  # noqa: E402

project = "jdp"
author = copyright = "the jdp authors"
version = release = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # of a block that only begins as a language does

html_theme = "furo"  # which asks no other host for anything: fonts and scripts are the reader's and the site's own
pygments_style, pygments_dark_style = "default", "github-dark"  # a diff is red and green in both
html_title = f"jdp {release}"
smartquotes_action = "D"  # -- is a dash; quotation marks stay as they are typed
html_copy_source = html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

default_role = "literal"  # `x` in a docstring is code
add_module_names = False
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": False}

# Pages whose text stands elsewhere: `docs/parity.md` says so to its reader, and the site shows the text itself.
ELSEWHERE = {
    "parity": "PARITY.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
    "benchmarks": "benchmarks/RESULTS.md",
}


def text_of(app: Sphinx, docname: str, source: list[str]) -> None:
    """Puts in place the text of a page as the site has it: what stands elsewhere, and links to it."""
    if docname == "index":  # a page that no list of it has stands in the place of the star
        named = {"index", *re.findall(r"^(?:.*<)?(\w+)>?$", source[0], re.MULTILINE)}
        others = sorted({path.stem for path in HERE.glob("*.md")} - named)
        source[0] = source[0].replace("\n*\n", "\n" + "".join(f"{name}\n" for name in others))
    if docname == "errors":
        source[0] = source[0].partition("The site has")[0] + errors.page()
    if docname == "notebooks":
        texts = [notebooks.markdown(notebooks.read(path)) for path in sorted(notebooks.FOLDER.glob("*.ipynb"))]
        source[0] = source[0].partition("The site shows")[0] + "\n".join(texts)
    if docname in ELSEWHERE:
        path = HERE.parent / ELSEWHERE[docname]
        text = as_page(path.read_text(encoding="utf-8"), path.parent)
        if docname == "benchmarks":  # several pages in one: each is a section here
            text = source[0].partition("The site shows")[0] + re.sub("^# ", "## ", text, flags=re.MULTILINE)
        source[0] = text
    source[0] = linked(source[0])


def as_page(text: str, folder: Path) -> str:
    """Returns the text of a file in `folder`, with its links as they are from docs/."""
    up = "../" * len(folder.relative_to(HERE.parent).parts)
    base = folder.relative_to(HERE.parent).as_posix().strip(".")

    def link(found: re.Match[str]) -> str:
        target = found[1]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path = f"{base}/{target}".lstrip("/") if not up or not target.startswith("../") else target[len(up) :]
        return f"]({path.removeprefix('docs/') if path.startswith('docs/') else '../' + path})"

    return re.sub(r"\]\(([^)\s]+)\)", link, text)


def linked(text: str) -> str:
    """Links to what stands elsewhere lead to its page here."""
    for page, path in ELSEWHERE.items():
        text = text.replace(f"](../{path}", f"]({page}.md")
    return text


def as_markup(_app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Docstrings are written to be read as they are; reStructuredText wants two marks more."""
    text = "\n".join(lines)
    text = re.sub(r"(?<!`)`([^`\n]+)`(?=\w)", r"`\1`\\ ", text)  # `jax.Device`s
    code = r"(^[^\s:*.>][^\n]*\n)\n(?=    [^\s>])"  # an indented program below a paragraph
    lines[:] = re.sub(code, r"\1\n.. code-block:: python\n\n", text, flags=re.MULTILINE).split("\n")


def of_init(
    _app: Sphinx, what: str, _name: str, found: Any, _options: object, given: str | None, returns: str | None
) -> Any:
    """Gives a class the signature of what its own `__init__` takes; a metaclass says `*args, **kwargs`."""
    if what != "class" or "__init__" not in vars(found):
        return given, returns
    return stringify_signature(signature(found.__init__, bound_method=True), show_return_annotation=False), None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", of_init)
    app.connect("source-read", text_of)
    app.connect("autodoc-process-docstring", as_markup)
