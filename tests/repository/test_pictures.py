"""docs/pictures.py: the pictures are well-formed, up to date, and show the chunks that jdp makes."""

import importlib.util
import pathlib
import xml.etree.ElementTree as ET

import pytest

import jdp

ROOT = pathlib.Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rows, n", [(10, 4), (8, 4), (5, 4), (9, 4), (0, 3), (1, 1), (7, 8)])
def test_the_rule_of_the_pictures_is_that_of_jdp(pictures, rows, n):
    assert [size for size in pictures.chunk_sizes(rows, n) if size] == [
        size for size in jdp.chunk_sizes(rows, n) if size
    ]


def test_the_picture_of_the_chunks_has_each_row_three_times_in_the_colour_of_its_device(pictures):
    root = ET.fromstring(pictures.chunks())
    kinds = [box.get("class") for box in root.findall(f"{SVG}rect")]
    expected = dict(zip(pictures.COLOURS, jdp.chunk_sizes(10, 4), strict=True))
    assert {kind: kinds.count(kind) / 3 for kind in expected} == expected


def test_nothing_of_a_picture_lies_outside_of_it(pictures):
    for draw in pictures.PICTURES.values():
        root = ET.fromstring(draw())
        for box in root.findall(f"{SVG}rect"):
            x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + width <= int(root.get("width")) and y + height <= int(root.get("height"))


def test_check_fails_until_the_pictures_are_drawn(pictures, tmp_path):
    with pytest.raises(SystemExit, match="chunks.svg is not what pictures.py draws. Run: make draw"):
        pictures.main(["--check"], tmp_path)
    pictures.main([], tmp_path)
    pictures.main(["--check"], tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(pictures.PICTURES)
