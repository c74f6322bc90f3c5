"""Reads pages: what stands in them, and that every element is closed."""

import html.parser
import re

VOID = ("meta", "link")


class Element:
    def __init__(self, name, attributes):
        self.name, self.attributes, self.inside = name, dict(attributes), []

    @property
    def text(self):
        return "".join(x if isinstance(x, str) else x.text for x in self.inside)

    def all(self, name, kind=None):
        """The elements of that name below it, in their order; of that class."""
        for x in self.inside:
            if isinstance(x, Element):
                if x.name == name and (kind is None or kind in x.attributes.get("class", "").split()):
                    yield x
                yield from x.all(name, kind)

    def one(self, name, kind=None):
        (found,) = self.all(name, kind)
        return found

    def number(self, name):
        """An attribute that is a number or a percentage."""
        return float(self.attributes[name].removesuffix("%"))

    def section(self, title):
        """The section with that heading."""
        (found,) = [x for x in self.all("section") if x.one("h2").text == title]
        return found

    def rows(self):
        """Of the first table in it, the text of each cell."""
        return [[cell.text for cell in row.all("td")] for row in next(self.all("tbody")).all("tr")]


class _Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, name, attributes):
        assert len(dict(attributes)) == len(attributes), f"an attribute of {name} is given twice"
        self.open[-1].inside.append(Element(name, attributes))
        if name not in VOID:
            self.open.append(self.open[-1].inside[-1])

    def handle_endtag(self, name):
        assert self.open[-1].name == name, f"{name} is closed within {self.open[-1].name}"
        self.open.pop()

    def handle_data(self, text):
        self.open[-1].inside.append(text)


def read(text):
    """The page, or a part of it: well formed, and it asks no other host, and runs nothing."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [x.name for x in reader.open] == [""], "an element is not closed"
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not [*reader.root.all("script"), *reader.root.all("img"), *reader.root.all("iframe")]
    assert not [name for x in _all(reader.root) for name in x.attributes if name.startswith("on")]
    return reader.root


def _all(element):
    for x in element.inside:
        if isinstance(x, Element):
            yield x
            yield from _all(x)
