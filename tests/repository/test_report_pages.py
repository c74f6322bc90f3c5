"""Pages of reports in a browser: on a telephone, without a word in the console, without a request to anyone."""

import dataclasses
import html

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from browser import in_browser, wrong_pages
from flax import nnx

import jdp
from jdp._page import Html, Page, tag
from jdp._tools.explain.estimate import Network
from jdp._tools.plan.lines import Line
from jdp._tools.plan.print import page as page_of_plan
from jdp._tools.plan.script import WAYS
from jdp._tools.topology.chips import CHIPS

LONG = "a_name_without_a_space_" * 12 + "<script>console.error('run')</script>"


def loss(variables, x):
    return jnp.mean(x @ variables["params"][LONG])


loss.__name__ = LONG


def a_report():
    step = jdp.DataParallel(lambda v, x: x, jax.devices()).train_step(loss, optax.adam(1e-3), shard_optimizer=True)
    state = step.init({"params": {LONG: np.ones((16, 8), np.float32)}})
    return step, state, jdp.explain(step, state, np.ones((32, 16), np.float32))


def a_plan():
    lines = [
        Line(f"{n // 8} x 8", n, n // 8, 16, way, seconds=0.1 * n, exposed_seconds=0.01, efficiency=1 / n, peak_bytes=n)
        for n in (8, 16, 64, 2048, 16384)
        for way in WAYS
    ]
    lines.append(Line("9 x 8", 72, 9, 16, compiles=False, reason=LONG))
    return page_of_plan(lines, CHIPS["h100"], LONG)


@in_browser
@pytest.mark.full
def test_no_page_is_wider_than_a_telephone_or_asks_for_anything(tmp_path):
    step, state, report = a_report()
    on_gpus = dataclasses.replace(report, device_kind=LONG, memory_bytes=9, _network=Network(CHIPS["h100"], (1, 8)))
    folder = tmp_path / "pages"
    folder.mkdir()
    report.save(folder / "report.html")
    on_gpus.save(folder / "gpus.html")
    a_plan().save(folder / "plan.html")
    dp = jdp.DataParallel(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    objects = [state, dp, dp.train_step(loss, optax.sgd(0.1)), jdp.scatter({LONG: np.ones((10, 3))}), report]
    for i, one in enumerate(objects):
        opened = one._repr_html_().replace("<details", "<details open")
        (folder / f"{i}.html").write_text(f"<!doctype html>{opened}", encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3 + len(objects)
    assert html.escape(LONG) in (folder / "report.html").read_text(encoding="utf-8")
    assert wrong_pages(folder, names, tmp_path / "profile") == ([], [], [])


@in_browser
@pytest.mark.full
def test_the_browser_tells_of_what_it_should(tmp_path):
    """A page that is too wide, and one that asks another host, are found."""
    folder = tmp_path / "pages"
    folder.mkdir()
    Page("wide", [tag("div", "wide", style="width: 500px")]).save(folder / "wide.html")
    Page("asks", [tag("img", src="//other.invalid/picture.png")]).save(folder / "asks.html")
    Page("runs", [tag("script", Html("console.error('it ran')"))]).save(folder / "runs.html")
    names = sorted(path.name for path in folder.iterdir())
    wrong, missing, said = wrong_pages(folder, names, tmp_path / "profile")  # each as on a telephone, and on a laptop
    assert [one.split(" ")[:2] for one in wrong] == [["asks.html:", "asks"]] * 2 + [["wide.html:", "html"]]
    assert not missing and len(said) == 2 and all("it ran" in one for one in said)
