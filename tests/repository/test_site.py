"""The site that `make docs` builds: no warning, every link and anchor resolves, nothing comes from another host."""

import html.parser
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

import pytest
from browser import in_browser, served, shown, wrong_pages
from flax import nnx

import jdp

ROOT = pathlib.Path(__file__).parents[2]
SITE = ROOT / "build" / "site"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="no Sphinx here: make docs installs it"),
    pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine"),
]


class Page(html.parser.HTMLParser):
    """What a page links to, what it has for links to lead to, and what a browser fetches for it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.fetched = [], set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "index", "search"):
            self.fetched.append(given["href"])
        if tag in ("script", "img", "iframe", "source", "object", "video"):
            self.fetched += [given[name] for name in ("src", "srcset", "data") if given.get(name)]


@pytest.fixture(scope="module")
def pages():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "VENV"))}
    done = subprocess.run(
        ["make", "docs", f"VENV={sys.prefix}", "--old-file=draw"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr  # a warning is an error
    return {path.relative_to(SITE).as_posix(): Page(path) for path in SITE.rglob("*.html")}


def test_each_file_of_docs_is_a_page_that_the_first_one_leads_to(pages):
    names = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert names <= set(pages)
    assert names - {"index.html"} <= {link.partition("#")[0] for link in pages["index.html"].links}


def test_every_link_and_anchor_resolves(pages):
    broken = []
    for name, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (
                (SITE / name).parent.joinpath(urllib.parse.unquote(url.path)).resolve() if url.path else SITE / name
            )
            key = target.relative_to(SITE).as_posix()
            whole = target.is_file() and (not url.fragment or urllib.parse.unquote(url.fragment) in pages[key].ids)
            if not whole:
                broken.append(f"{name}: {link}")
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert not broken


def test_a_reader_asks_no_other_host_for_anything(pages):
    fetched = {url for page in pages.values() for url in page.fetched}
    for path in SITE.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        fetched |= set(re.findall(r"url\(['\"]?(?!data:)([^)'\"]+)", text)) | set(
            re.findall(r"@import ['\"]([^'\"]+)", text)
        )
    assert len(fetched) > 5
    assert not [url for url in fetched if re.match(r"[a-z]+:|//", url)]


def test_the_api_has_every_public_name(pages):
    ids = pages["api.html"].ids
    assert {f"jdp.{name}" for name in jdp.__all__ if name not in ("__version__", "distributed")} <= ids
    methods = [name for name in dir(jdp.DataParallel) if name[0] != "_" and name not in dir(nnx.Module)]
    assert {"train_step", "apply", "init", "devices"} <= set(methods)
    assert {f"jdp.DataParallel.{name}" for name in methods} <= ids
    assert {"jdp.distributed.initialize", "jdp.distributed.DesyncError"} <= ids


def test_pages_show_no_marks_that_should_have_become_something(pages):
    for name in pages:
        text = re.sub(
            r"<(script|style|pre|code).*?</\1>", "", (SITE / name).read_text(encoding="utf-8"), flags=re.DOTALL
        )
        text = re.sub(r"<[^>]+>", "", text)
        assert not re.search(r"\]\(|^\s*\* |```|``|:: *$", text, re.MULTILINE), name


@in_browser
def test_no_page_is_wider_than_a_screen_or_cuts_code_off_or_fails_in_the_console(pages, tmp_path):
    assert wrong_pages(SITE, sorted(pages), tmp_path) == ([], [], [])


@in_browser
def test_each_program_has_a_button_that_copies_it(pages, tmp_path):
    with served(SITE) as (address, missing):
        text, console = shown(f"{address}/index.html", tmp_path)
    assert text.count('<button class="copybtn') == text.count('<div class="highlight">') == 2
    assert not console


BOTH_SIZES = (
    "jdp.scatter: inputs[0] has 10 rows (axis 0), inputs[1] has 8 (axis 0); all arrays that are cut must agree."
)


@in_browser
@pytest.mark.parametrize(
    "words, found",
    [
        ("train_step", "api.html#jdp.DataParallel.train_step"),
        (BOTH_SIZES, "errors.html"),
        ("tensorboard", "recipes.html"),
        ("clip", "recipes.html"),
        ("warmup", "recipes.html"),
        ("mixup", "recipes.html"),
        ("ema", "recipes.html"),
        ("bf16", "recipes.html"),
        ("gan", "losses.html"),
        ("bert", "losses.html"),
        ("slow", "slow.html"),
    ],
)
def test_search_finds(pages, tmp_path, words, found):
    with served(SITE) as (address, missing):
        text, console = shown(f"{address}/search.html?q={urllib.parse.quote(words)}", tmp_path)
    results = re.findall(r'<a href="([^"]+)"', text.partition('id="search-results"')[2])
    assert [link for link in results if link.startswith(found)], results
    assert not console
