"""docs/architecture.py: the page and its picture are what the code says, for packages and for modules side by side."""

import importlib.util
import pathlib
import xml.etree.ElementTree as ET

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "docs" / "architecture.py"

TREE = {
    "__init__.py": '"""The facade."""\nfrom ._door import Door as Door\nfrom . import _tools as tools',
    "__main__.py": '"""The command."""\nimport os\nimport jdp._tools\n\ndef main():\n    from jdp import Door',
    "_door/__init__.py": '"""The door | thin.\n\nMore of it."""',
    "_door/door.py": '"""One class."""\nfrom .._core.verbs import cut\nfrom ..  import _tools\nfrom . import other\n',
    "_door/other.py": '"""Another."""\nfrom jdp._core import verbs\n',
    "_core/__init__.py": '"""The algorithm."""',
    "_core/verbs.py": '"""The verbs."""\nfrom typing import Any\nfrom .deep.down import x\nfrom .. import _tools\n',
    "_core/deep/down.py": '"""Deeper."""\nfrom ..._tools import y\n',
    "_tools.py": '"""Tools."""\n' * 4,
    "py.typed": "",
}


@pytest.fixture
def architecture():
    spec = importlib.util.spec_from_file_location("docs_architecture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [module.rounded(n) for n in (0, 1, 100, 101, 14_000)] == ["0", "100", "100", "200", "14,000"]
    module.rounded = str  # the exact numbers, to be counted
    return module


def made(folder, files):
    for name, text in files.items():
        path = folder / "jdp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "docs").mkdir(exist_ok=True)
    return folder / "docs"


def test_imports_of_every_form_are_seen(architecture, tmp_path):
    made(tmp_path, TREE)
    parts = architecture.read(tmp_path / "jdp")
    assert {name: part.imports for name, part in parts.items()} == {
        "__init__.py": {"_door/", "_tools.py"},
        "__main__.py": {"__init__.py", "_tools.py"},
        "_door/": {"_core/", "_tools.py"},
        "_core/": {"_tools.py"},
        "_tools.py": set(),
    }
    assert parts["_door/"].about == "The door | thin."
    assert parts["_core/"].files == [
        ("__init__.py", "The algorithm.", 1),
        ("deep/down.py", "Deeper.", 2),
        ("verbs.py", "The verbs.", 4),
    ]
    assert parts["_tools.py"].lines == 4


def test_each_part_stands_above_what_it_imports_and_implied_arrows_are_left_out(architecture, tmp_path):
    made(tmp_path, TREE)
    parts = architecture.read(tmp_path / "jdp")
    level, circular = architecture.layers(parts)
    assert level == {"_tools.py": 0, "_core/": 1, "_door/": 2, "__init__.py": 3, "__main__.py": 4}
    assert not circular
    assert architecture.arrows(parts, circular) == [
        ("__init__.py", "_door/"),
        ("__main__.py", "__init__.py"),
        ("_core/", "_tools.py"),
        ("_door/", "_core/"),
    ]


def test_the_page_has_every_part_from_the_top_down_and_every_file(architecture, tmp_path):
    made(tmp_path, TREE)
    page = architecture.page(architecture.read(tmp_path / "jdp"))
    found = [line for line in page.splitlines() if line.startswith(("| `", "| all", "## "))]
    assert found == [
        "| `__main__.py` | The command. | `__init__.py` `_tools.py` | 1 | 6 |",
        "| `__init__.py` | The facade. | `_door/` `_tools.py` | 1 | 3 |",
        "| `_door/` | The door \\| thin. | `_core/` `_tools.py` | 3 | 9 |",
        "| `_core/` | The algorithm. | `_tools.py` | 3 | 7 |",
        "| `_tools.py` | Tools. |  | 1 | 4 |",
        "| all |  |  | 9 | 29 |",
        "## _door/",
        "| `__init__.py` | The door \\| thin. | 3 |",
        "| `door.py` | One class. | 4 |",
        "| `other.py` | Another. | 2 |",
        "## _core/",
        "| `__init__.py` | The algorithm. | 1 |",
        "| `deep/down.py` | Deeper. | 2 |",
        "| `verbs.py` | The verbs. | 4 |",
    ]
    assert "circle" not in page


def test_the_picture_has_a_box_for_each_part_none_upon_another_and_its_arrows(architecture, tmp_path):
    made(tmp_path, TREE | {"_side.py": '"""Beside <it>."""\nfrom . import _tools\n'})
    root = ET.fromstring(architecture.picture(architecture.read(tmp_path / "jdp")))
    svg = "{http://www.w3.org/2000/svg}"
    boxes = {g.find(f"{svg}text").text: g.find(f"{svg}rect").attrib for g in root.findall(f"{svg}g")}
    assert set(boxes) == {"__init__.py", "__main__.py", "_core/", "_door/", "_side.py", "_tools.py"}
    corners = [tuple(int(box[side]) for side in ("x", "y")) for box in boxes.values()]
    for i, (x, y) in enumerate(corners):
        assert 0 <= x <= int(root.get("width")) - architecture.BOX and 0 <= y <= int(root.get("height"))
        assert all(y != b or abs(x - a) >= architecture.BOX for a, b in corners[:i])
    assert int(boxes["_door/"]["y"]) < int(boxes["_core/"]["y"]) < int(boxes["_tools.py"]["y"])
    assert len(root.findall(f"{svg}path")) == 5


def test_a_circle_is_named(architecture, tmp_path):
    made(tmp_path, TREE | {"_tools.py": "from ._core import verbs\n"})
    parts = architecture.read(tmp_path / "jdp")
    assert architecture.layers(parts).circular == {("_tools.py", "_core/")}
    assert "**A circle:** `_tools.py` imports `_core/`, which leads back to it" in architecture.page(parts)
    ET.fromstring(architecture.picture(parts))


@pytest.mark.parametrize("stale", ["architecture.md", "architecture.svg"])
def test_check_fails_until_the_page_is_drawn_and_when_the_code_has_changed(architecture, tmp_path, stale):
    docs = made(tmp_path, TREE)
    with pytest.raises(SystemExit, match="architecture.md is not what the code says. Run: make draw"):
        architecture.main(["--check"], docs)
    assert not list(docs.iterdir())
    architecture.main([], docs)
    architecture.main(["--check"], docs)
    (docs / stale).write_text("")
    with pytest.raises(SystemExit, match=f"{stale} is not what the code says"):
        architecture.main(["--check"], docs)
    architecture.main([], docs)
    made(tmp_path, {"_core/more.py": '"""More."""\nimport jdp._door\n'})
    with pytest.raises(SystemExit, match="architecture.md is not what the code says"):
        architecture.main(["--check"], docs)


def test_a_house_without_packages_is_drawn_too(architecture, tmp_path):
    docs = made(tmp_path, {name.replace("/", "_"): "" for name in TREE} | {"_a.py": "from ._tools import x\n"})
    architecture.main([], docs)
    assert "| `_a.py` |  | `_tools.py` | 1 | 1 |" in (docs / "architecture.md").read_text()
