"""Pages: what is drawn is as long as what it stands for, all text is escaped, and one file is all of it."""

import pathlib
import sys
import types
import webbrowser

import pytest
from markup import read

from jdp._page import (
    Html,
    Page,
    bars,
    curves,
    in_bytes,
    in_notebook,
    in_seconds,
    lane,
    legend,
    section,
    stack,
    table,
    tag,
    text,
)

HOSTILE = "<script>alert(1)</script>&\"'"


def widths(markup):
    return [rect.number("width") for rect in read(markup).all("rect")]


@pytest.mark.parametrize(
    "markup",
    [
        tag("p", HOSTILE),
        tag("p", tag("b", HOSTILE)),
        text(HOSTILE),
        section(HOSTILE),
        table([HOSTILE], [[HOSTILE]]),
        bars([(HOSTILE, 1.0, HOSTILE)]),
        stack([(HOSTILE, 1.0)], 1.0),
        lane([("k0", 0.0, 1.0, HOSTILE)], 1.0),
        legend({"k0": HOSTILE}),
        curves(HOSTILE, {HOSTILE: {1: 1.0}}, lambda y: HOSTILE),
        Html(Page(HOSTILE, [text("x")]).document()),
    ],
)
def test_what_comes_from_a_user_is_text(markup):
    assert HOSTILE in read(markup).text


def test_an_attribute_is_escaped_too():
    assert read(tag("p", class_='a" onclick="b')).one("p").attributes == {"class": 'a" onclick="b'}


def test_amounts_are_plain_numbers_in_the_unit_that_they_are_rounded_to():
    assert [*map(in_seconds, (0, 59.96, 0.9999, 1234.5))] == ["0 us", "60 s", "1 s", "1230 s"]
    assert [*map(in_bytes, (1023, 2**20 - 1, 12345 * 2**30))] == ["1023 B", "1 MiB", "12340 GiB"]


def test_bars_are_as_long_as_their_amounts():
    assert widths(bars([("a", 3, ""), ("b", 1, ""), ("c", 0, "")])) == pytest.approx([100, 100 / 3, 0], rel=1e-5)
    assert widths(bars([("a", 0, "")])) == [0] and widths(bars([])) == []


def test_the_pieces_of_a_stack_follow_each_other_and_are_the_whole():
    *pieces, mark = read(stack([("a", 1), ("b", 5), ("c", 2)], 8, mark=6)).all("rect")
    assert [x.number("width") for x in pieces] == [12.5, 62.5, 25]
    assert [x.number("x") for x in pieces] == [0, 12.5, 75]
    assert (mark.attributes["class"], mark.number("x")) == ("mark", 75)


def test_curves_are_as_high_as_their_amounts_and_as_far_apart_as_the_devices_are_doubled():
    drawn = read(curves("t", {"a": {1: 0.0, 2: 50.0, 8: 100.0}, "b": {2: 25.0}}, "{:g} W".format))
    places = [(c.attributes["class"], c.number("cx"), c.number("cy")) for c in drawn.all("circle")]
    (_, x1, y1), (_, x2, y2), (_, x8, y8), (kind, x, y) = places
    assert (x8 - x2) == pytest.approx(2 * (x2 - x1), rel=1e-4) and (kind, x) == ("c1", x2)
    assert (y1 - y2, y1 - y) == pytest.approx(((y1 - y8) / 2, (y1 - y8) / 4))
    grid = {t.text: t.number("y") + 4 for t in drawn.all("text") if t.text.endswith("W")}
    assert grid == {"0 W": y1, "50 W": y2, "100 W": y8}
    ends = [[line.number(k) for k in ("x1", "y1", "x2", "y2")] for line in drawn.all("line", "c0")]
    assert ends == [[x1, y1, x2, y2], [x2, y2, x8, y8]]
    assert [t.text for t in drawn.all("title")][:2] == ["a, 1 device: 0 W", "a, 2 devices: 50 W"]


@pytest.mark.parametrize("series", [{}, {"a": {}}, {"a": {4: 0.0}}])
def test_curves_of_nothing_and_of_one_point(series):
    assert len([*read(curves("t", series, str)).all("circle")]) == sum(map(len, series.values()))


PAGE = Page("a title", [text("a page")])


def test_a_page_is_one_file(tmp_path):
    PAGE.save(tmp_path / "a.html")
    assert [x.name for x in tmp_path.iterdir()] == ["a.html"]
    page = read((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert page.one("title").text == page.one("h1").text == "a title"
    assert {x.attributes.get("name") for x in page.all("meta")} >= {"viewport"}
    assert "prefers-color-scheme: dark" in page.one("style").text


@pytest.mark.parametrize("name", ["step.txt", "step", "step.html.png"])
def test_a_name_that_does_not_end_in_html_is_refused(name, tmp_path, refused):
    with refused(ValueError, "save", match=rf"path is '.*{name}'; .* Pass a name like 'step.html'"):
        PAGE.save(str(tmp_path / name))
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """What a browser was asked to open; with a display."""
    urls = []
    monkeypatch.setattr(webbrowser, "open", lambda url: urls.append(url) or True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return urls


def test_a_browser_shows_a_file(opened, monkeypatch, capsys):
    monkeypatch.setenv("DISPLAY", ":0")
    PAGE.show()
    (url,) = opened
    assert pathlib.Path(url.removeprefix("file://")).read_text(encoding="utf-8") == PAGE.document()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("display", ["", ":0"])
def test_without_a_display_or_a_browser_the_path_is_printed(opened, monkeypatch, capsys, display):
    if display:
        monkeypatch.setenv("DISPLAY", display)
        monkeypatch.setattr(webbrowser, "open", lambda url: False)
    PAGE.show()
    path = pathlib.Path(capsys.readouterr().out.strip())
    assert not opened and path.suffix == ".html" and path.read_text(encoding="utf-8") == PAGE.document()


@pytest.mark.parametrize("kernel", [True, False])
def test_a_notebook_shows_the_page_itself_and_ipython_in_a_terminal_does_not(opened, monkeypatch, capsys, kernel):
    shown = []
    shell = types.SimpleNamespace(**{"kernel": None} if kernel else {})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=shown.append))
    PAGE.show()
    assert (shown == [PAGE]) == kernel == (capsys.readouterr().out == "")
    assert read(PAGE._repr_html_()).one("div", "jdp").one("p").text == "a page"


def test_what_cannot_be_drawn_is_left_to_the_text():
    class Broken:
        @in_notebook
        def _repr_html_(self):
            raise RuntimeError("no")

    assert Broken()._repr_html_() is None
