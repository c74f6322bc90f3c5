"""Collects every message of jdp from its code: `jdp.<verb>: <fact>; <rule>. <what to do>`.

`python docs/errors.py` prints the list on the page *Errors by their text* of the site, which is made when the site is
built.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
START = re.compile(r"jdp(\.[\w.<>]+)?: ")
FORM = re.compile(r"(?P<fact>.+?); (?P<rule>.+?)\. (?P<way>[A-Z<…].*)")
SHORT = re.compile(r"(?P<fact>.+?)(?P<rule>)(?:\. |; )(?P<way>.+)")  # without a rule, or without what to do
HEAD = """These are all {count} messages that are in the code of jdp. To find yours, search this page for a few of its
words. Names and numbers of your own are `<...>` or `…` here, so leave them out. (The search of the site takes the whole
message, too.)
"""


class Message(NamedTuple):
    text: str
    """With `<name>` or `…` in the place of what is known only when it is raised."""
    kind: str
    """The exception; `"warning"`, `"printed"`, or `""` where the message is made in one place and raised in another."""
    file: str

    @property
    def verb(self) -> str:
        return re.match(r"jdp\.?([\w.<>]*): ", self.text)[1]

    @property
    def parts(self) -> tuple[str, str, str]:
        """The fact, the rule and what to do; a text of another form lacks one or two of them."""
        found = FORM.fullmatch(self.text) or SHORT.fullmatch(self.text)
        return (found["fact"], found["rule"], found["way"]) if found else (self.text, "", "")


def _name(node: ast.expr) -> str:
    """Returns what stands for a value in a text: `<rows>` for a name, `…` for an expression."""
    while isinstance(node, ast.Call) and not node.args and not node.keywords:
        node = node.func
    if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return f"<{name.strip('_')}>"
    return "…"


class Texts:
    """The strings of a module, with its own constants (`VERB`) and the local names that stand for strings filled in."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.known: dict[str, ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and any(x.name == "VERB" for x in node.names):
                self.known["VERB"] = Texts(path.with_name(f"{node.module}.py")).known["VERB"]
        assigned = [x for x in ast.walk(self.tree) if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)]
        times = Counter(node.targets[0].id for node in assigned)
        for node in assigned:
            name, value = node.targets[0].id, node.value
            is_text = isinstance(value, ast.JoinedStr) or isinstance(getattr(value, "value", None), str)
            if is_text and times[name] == 1:
                self.known[name] = value

    def of(self, node: ast.expr, first: bool = True) -> str | None:
        """Returns the text of an expression; None if it has none."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.of(node.left), self.of(node.right, False)
            return None if left is None else left + (right or _name(node.right))
        if isinstance(node, ast.JoinedStr):
            return "".join(self._value(part, i == 0 and first) for i, part in enumerate(node.values))
        return None

    def _value(self, part: ast.expr, first: bool) -> str:
        if isinstance(part, ast.Constant):
            return part.value
        inner = part.value
        plural = isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mult)
        if plural and isinstance(inner.left, ast.Constant) and isinstance(inner.left.value, str):
            return f"({inner.left.value})"
        if isinstance(inner, ast.Name) and inner.id in self.known and (first or inner.id == "VERB"):
            return self.of(self.known[inner.id]) or _name(inner)
        return _name(inner)


def _raised(tree: ast.Module) -> dict[int, str]:
    """Returns the expressions that are the text of an exception or of a warning, by their ids, with its name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name.endswith(("Error", "Exit")):
                found[id(node.args[0])] = name
            elif name.startswith("warn"):
                found[id(node.args[0])] = "warning"
            elif name == "print":
                found[id(node.args[0])] = "printed"
    return found


def messages(package: Path = ROOT / "jdp") -> list[Message]:
    """Returns every message, once, in the order of its verb."""
    found = dict.fromkeys(x for path in sorted(package.rglob("*.py")) for x in _of_file(path, package))
    begun = {x for x in found for y in found if y.text != x.text and y.text.startswith(x.text)}  # and goes on elsewhere
    return sorted(
        found.keys() - begun,
        key=lambda message: (not message.verb, message.verb.startswith("<"), message.verb.lower(), message.text),
    )


def _of_file(path: Path, package: Path) -> Iterator[Message]:
    texts = Texts(path)
    raised, skip = _raised(texts.tree), set()
    for node in ast.walk(texts.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skip.add(id(node.value))  # a docstring
        if id(node) in skip or not isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant):
            continue
        text = texts.of(node)
        if text is None:
            continue
        skip |= {id(inner) for inner in ast.walk(node)}
        if id(node) in raised and re.match(r"<name> is |<fact>", text):  # which a caller has begun: "jdp.<verb>: ..."
            text = f"jdp.<verb>: {text}"
        text = " ".join(text.split())
        if START.match(text) and len(text) > len(START.match(text)[0]) + 12:
            yield Message(text, raised.get(id(node), ""), str(path.relative_to(package.parent)))


def page() -> str:
    """Returns the list, in Markdown."""
    every = messages()
    lines, title = [HEAD.replace("{count}", str(len(every)))], None
    for message in every:
        if _title(message.verb) != title:
            title = _title(message.verb)
            lines.append(f"## {title}\n")
        fact, rule, way = message.parts
        kind = {"printed": "a line on the terminal", "warning": "a warning"}.get(message.kind, message.kind)
        lines.append(f"``{fact}``" + (f" ({kind})" if kind else ""))
        said = [f"The rule: {_prose(rule)}."] if rule else []
        said += [f"{'What to do' if rule else 'The text goes on'}: {_prose(way)}"] if way else []
        lines.append((": " + "\\\n  ".join(said) + "\n") if said else "")
    return "\n".join(lines)


def _title(verb: str) -> str:
    if verb.startswith("<"):
        return "Messages of several verbs"
    return f"jdp.{verb}" if verb else "Messages without a verb"


def _prose(text: str) -> str:
    """Returns a text that Markdown leaves as it is; options of a command are code, where two hyphens are no dash."""
    return re.sub(r"(?<!\S)(--[\w-]+)", r"`\1`", re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", text))


if __name__ == "__main__":
    print(page())
