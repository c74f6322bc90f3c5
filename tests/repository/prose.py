"""Refuses the turns of phrase that make a reader read a sentence twice: in docstrings, comments, errors and pages.

Run: make lint

Only what a regular expression can find. Each rule has the plain wording beside it. A docstring of a function begins
with a verb in the third person, as in the standard library's documentation ("Returns the mesh"). ruff's D401 wants the
imperative, and would refuse that. Properties and classes are nouns, and begin with one.
"""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("jdp", "docs", "README.md", "CONTRIBUTING.md", "PARITY.md", "SECURITY.md")
GENERATED = ("docs/architecture.md",)

VERBS = "is|are|was|were|has|have|had|may|might|would|does|do|did|can|could|will|[a-z]+(?<!s)s"
RULES = {
    "', for' that means because: write because": rf", for (?!example|instance|which)(?=[^.;:,]*\b(?:{VERBS})\b)",
    "'who' without a noun: name the process, the thread, the user": (
        r"(?<!user )(?<!users )(?<!person )(?<!people )(?<!reader )(?<!readers )(?<!caller )(?<!callers )"
        r"(?<!somebody )(?<!someone )(?<!anybody )(?<!anyone )\b[Ww]ho\b"
    ),
    "'for/in/by which': make two sentences": r"\b(?:for|in|by) which\b",
    "'Of several ...' in front: begin with the subject": r"(?:^|(?<=\. ))Of (?!course)",
    "'is to be': must, will, or should": (
        r"\b(?:is|are|was|were) to (?!the\b|a\b|an\b|all\b|it\b|them\b|each\b|this\b)[a-z]+"
    ),
    "'anew': again": r"\banew\b",
    "'meanwhile': at the same time": r"\b[Mm]eanwhile\b",
    "'likewise': also, the same": r"\b[Ll]ikewise\b",
    "'beside': next to, in addition to, with, other than": r"\b[Bb]eside\b",
    "'whole on every': replicated": r"\bwhole on (?:every|each|all)\b",
    "'leave word': write a key, send": r"\bl(?:eft|eaves?|eaving) word\b",
    "'nobody' of processes: name what does not": r"\b[Nn]obody\b",
    "'where nothing', 'where there is none': if there is no": r"\b[Ww]here (?:nothing|there is none|there are none)\b",
}
OF_PEOPLE = {"'nobody' of processes: name what does not"}  # pages speak of people, too
NO_VERBS = {
    *("As", "Its", "This", "Bytes", "Rows", "Devices", "Processes", "Arrays", "Axes", "Leaves", "Paths"),
    *("Names", "Shapes", "Values", "Words", "Lines", "Always", "Has", "Is", "Does", "Was", "Less", "Seconds"),
    *("Metrics", "Gradients", "Replicas", "Chunks", "Keys", "Outputs", "Inputs", "Batches", "Texts", "Results"),
    *(
        "Programs",
        "Parameters",
        "Steps",
        "Threads",
        "Files",
        "Numbers",
        "Flags",
        "Types",
        "Places",
        "Parts",
        "Pieces",
        "Cells",
    ),
}
EXCEPTIONS: set[tuple[str, str]] = set()  # (file, text of the sentence); at most ten


class Found(NamedTuple):
    file: str
    line: int
    rule: str
    text: str


def passages(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yields each docstring, string and block of comments: its line, text, and whether it must begin with a verb."""
    read: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # a node comes before what is in it
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                read.update(ast.walk(node.body[0]))
                yield node.body[0].lineno, text, _does_something(node)
        elif isinstance(node, ast.JoinedStr):
            read.update(ast.walk(node))
            yield node.lineno, "".join(x.value if isinstance(x, ast.Constant) else "X" for x in node.values), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in read:
            yield node.lineno, node.value, False
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# noqa", "# type:", "# pyright", "#!")):
            continue
        if block and token.start[0] != last + 1:
            yield first, " ".join(block), False
            block = []
        first = first if block else token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield first, " ".join(block), False


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yields each line of a page in Markdown that is no program, and its number."""
    in_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def _does_something(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names = {ast.unparse(x).rpartition(".")[2] for x in node.decorator_list}
    return not names & {"property", "cached_property", "setter", "overload"}


def prose_of(text: str) -> str:
    """Returns the text without its examples, code and equations."""
    lines, in_code = [], False
    for line in text.splitlines():
        in_code = line.lstrip().startswith((">>>", "...")) or (in_code and bool(line.strip()))
        lines.append("" if in_code or line.startswith("    ") and "=" in line else line.strip())
    return re.sub(r"`[^`]*`", "`code`", " ".join(lines))


def faults(path: pathlib.Path) -> Iterator[Found]:
    """Yields what a file has to say in other words."""
    file, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        found = [(line, text, False) for line, text in paragraphs(source)]
    else:
        found = [*passages(source)]
    for line, text, needs_verb in found:
        prose = prose_of(text)
        first = prose.split(maxsplit=1)[0] if prose.split() else ""
        if needs_verb and (not re.fullmatch(r"[A-Z][a-z]+s[,;:]?", first) or first.rstrip(",;:") in NO_VERBS):
            yield Found(file, line, "a function's docstring begins with a verb: Returns, Makes, Raises", prose[:90])
        for rule, pattern in RULES.items():
            if path.suffix == ".md" and rule in OF_PEOPLE:
                continue
            for match in re.finditer(pattern, prose):
                said = prose[max(0, match.start() - 40) : match.end() + 40]
                if (file, said) not in EXCEPTIONS:
                    yield Found(file, line, rule, said)


def main() -> None:
    """Prints the faults of the files that are named, or of all; the status is 1 where there are some."""
    named = [pathlib.Path(name).resolve() for name in sys.argv[1:] if not name.startswith("-")]
    roots = named or [ROOT / folder for folder in FOLDERS]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.[pm][yd]")))]
    files = [file for file in files if str(file.relative_to(ROOT)) not in GENERATED]
    found = [fault for file in files for fault in faults(file)]
    if "--count" in sys.argv:
        for name, count in collections.Counter(fault.rule for fault in found).most_common():
            print(f"{count:5} {name}")
        return
    for fault in found:
        print(f"{fault.file}:{fault.line}: {fault.rule}\n    {fault.text}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
