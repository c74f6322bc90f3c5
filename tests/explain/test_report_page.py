"""A report as a page: what it draws and says is what the report says."""

import dataclasses
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from markup import read

import jdp
from jdp._tools.explain.collectives import collectives
from jdp._tools.explain.estimate import Network
from jdp._tools.explain.hlo import parse
from jdp._tools.explain.report import page_of_report
from jdp._tools.topology.chips import CHIPS


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="out")(nn.relu(nn.Dense(32, name="hidden")(x)))


MODEL = Model()
X = jax.ShapeDtypeStruct((64, 16), jnp.float32)
VARIABLES = jax.eval_shape(MODEL.init, jax.random.key(0), X)


def loss_fn(variables, x):
    return jnp.mean(MODEL.apply(variables, x) ** 2)


@pytest.fixture(scope="module")
def on_cpus():
    tx = optax.adam(1e-3)
    step = jdp.DataParallel(MODEL, jax.devices()).train_step(loss_fn, tx, shard_optimizer=True)
    params = VARIABLES["params"]
    state = jdp.TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(tx.init, params), {}, None)
    return jdp.explain(step, state, X)


@pytest.fixture(params=["cpu", "h100"])
def report(request, on_cpus):
    """A step on CPUs; and the same program as if it were one of H100s, of which there are figures."""
    if request.param == "cpu":
        return dataclasses.replace(on_cpus)
    memory = CHIPS["h100"].available_bytes
    return dataclasses.replace(on_cpus, platform="gpu", memory_bytes=memory, _network=Network(CHIPS["h100"], (1, 8)))


LANES = ("computes", "waits", "sends")


def saved(report, tmp_path):
    report.save(tmp_path / "step.html")
    return read((tmp_path / "step.html").read_text(encoding="utf-8"))


def amount(words):
    """The number and its unit, in bytes or seconds."""
    number, unit = words.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "us": 1e-6, "ms": 1e-3, "s": 1}[unit]


def test_the_time_on_the_page_is_that_of_the_report(report, tmp_path):
    section = saved(report, tmp_path).section("what happens when")
    schedule, lanes = report.schedule, section.one("div", "lanes")
    assert schedule.exposed_seconds > 0
    drawn = {kind: [*lanes.all("rect", kind)] for kind in LANES}
    share = {kind: sum(x.number("width") for x in found) / 100 for kind, found in drawn.items()}
    assert share["waits"] * schedule.seconds == pytest.approx(schedule.exposed_seconds, rel=1e-4)
    assert share["computes"] + share["waits"] == pytest.approx(1, rel=1e-4)
    assert share["sends"] * schedule.seconds == pytest.approx(schedule.collective_seconds, rel=1e-4)
    words = [p.text for p in section.all("p") if p.text.endswith("(exposed).")][0]
    said = re.search(r"(?:While|For) (\S+ \S+?),? ", words)[1]
    assert amount(said) == pytest.approx(schedule.exposed_seconds, rel=1e-2)
    assert float(re.search(r"([\d.]+)%", words)[1]) == pytest.approx(100 * share["waits"], abs=0.06)
    told = [x.one("title").text for x in drawn["sends"]]
    assert len(told) == len(report.collectives)
    assert sum("all-gather" in x and "hidden.kernel" in x for x in told) == 1


@pytest.mark.parametrize("path", sorted((pathlib.Path(__file__).parent / "hlo").glob("*.txt")), ids=lambda p: p.stem)
def test_programs_of_gpus_and_tpus_are_drawn(on_cpus, path):
    """Where collectives run beside the computation, too, and in loops."""
    text = path.read_text()
    report = dataclasses.replace(on_cpus, hlo=text, collectives=tuple(collectives(parse(text))))
    page, schedule = read(page_of_report(report, waits=False).document()), report.schedule
    drawn = {kind: [x.number("width") for x in page.all("rect", kind) if x.inside] for kind in LANES}
    assert sum(drawn["computes"]) + sum(drawn["waits"]) == pytest.approx(100, rel=1e-3)
    assert sum(drawn["waits"]) * schedule.seconds == pytest.approx(100 * schedule.exposed_seconds, rel=1e-3)
    assert len(drawn["sends"]) == len(report.collectives)
    assert sum(drawn["sends"]) * schedule.seconds == pytest.approx(100 * schedule.collective_seconds, rel=1e-3)


def test_seconds_are_those_of_devices_with_figures_and_else_bytes(report):
    """Of CPUs the schedule is in bytes: those of the program and of its collectives."""
    if report.platform == "cpu":
        assert report.seconds is None is report.exposed_seconds
        assert report.schedule.collective_seconds == report.collective_bytes
        assert report.schedule.compute_seconds > report.parameter_bytes
    else:
        network, times = Network(CHIPS["h100"], (1, 8)), report.schedule
        assert (report.seconds, report.exposed_seconds) == (times.seconds, times.exposed_seconds)
        each = [network.seconds(c.kind, c.bytes, c.group) for c in report.collectives]
        assert times.collective_seconds == pytest.approx(sum(each))
        assert times.exposed_seconds <= report.seconds == pytest.approx(times.compute_seconds + times.exposed_seconds)


def test_bars_are_as_long_as_the_bytes_and_sum_to_the_peak(report, tmp_path):
    section = saved(report, tmp_path).section("memory of a device")
    sizes = {
        "parameters": report.parameter_bytes,
        "optimizer's state": report.optimizer_bytes,
        "other state": report.state_bytes,
        "batch": report.batch_bytes,
        "results": report.output_bytes,
        "temporaries": report.temp_bytes,
    }
    rest = report.peak_bytes - sum(sizes.values())
    assert rest >= 0
    sizes |= {"other arguments": rest} if rest else {}
    whole, *each = section.all("svg")
    pieces = {x.one("title").text: x.number("width") / 100 for x in whole.all("rect")}
    assert sum(pieces.values()) == pytest.approx(1, rel=1e-4)
    assert pieces == pytest.approx({name: size / report.peak_bytes for name, size in sizes.items() if size}, rel=1e-4)
    names = [row[0] for row in section.one("div", "bars").rows()]
    longest = max(sizes.values())
    drawn = {name: svg.one("rect") for name, svg in zip(names, each, strict=True)}
    for name, bar in drawn.items():
        assert bar.number("width") == pytest.approx(100 * sizes[name] / longest, rel=1e-4), name
    colours = {x.one("title").text: x.attributes["class"] for x in whole.all("rect")}
    assert colours == {name: bar.attributes["class"] for name, bar in drawn.items()}
    said = {row[0]: amount(row[2]) for row in section.one("div", "bars").rows()}
    assert said == pytest.approx({name: sizes[name] for name in names}, rel=1e-3)


def test_every_collective_has_its_row_with_all_that_it_carries(report, tmp_path):
    many = dataclasses.replace(report, collectives=report.collectives * 5)
    rows = saved(many, tmp_path).section("collectives, in the order of the program").rows()
    assert len(rows) == len(many.collectives) > 24
    for row, one in zip(rows, many.collectives, strict=True):
        assert (row[0], row[1]) == (one.kind, one.dtype) and row[-1].endswith(", ".join(one.parameters))
        assert amount(row[2]) == pytest.approx(one.bytes, rel=1e-3)
    carried = ", ".join(row[-1] for row in rows if row[0] == "reduce-scatter")
    assert all(name in carried for name in ("hidden.kernel", "hidden.bias", "out.kernel", "out.bias"))


def test_where_the_memory_ends_is_marked(report, tmp_path):
    if report.memory_bytes:
        assert "under 0.1% of the 59.33 GiB" in saved(report, tmp_path).section("memory of a device").text
    limit = report.peak_bytes // 2
    page = saved(dataclasses.replace(report, memory_bytes=limit), tmp_path)
    mark = page.section("memory of a device").one("rect", "mark")
    assert mark.number("x") == pytest.approx(100 * limit / report.peak_bytes, rel=1e-4)
    assert ", 200.0% of the" in page.section("memory of a device").text
    assert "it does not fit" in " ".join(p.text for p in page.all("p", "bad"))
    assert not [*saved(dataclasses.replace(report, memory_bytes=2 * report.peak_bytes), tmp_path).all("rect", "mark")]


def test_arguments_that_the_program_does_not_use_are_said(devices):
    dp = jdp.DataParallel(lambda w, x: x * w["used"], devices)
    weights = {"used": np.ones(16, np.float32), "unused": np.ones((100, 100), np.float32)}
    report = jdp.explain(dp.apply, weights, X)
    unused = report.parameter_bytes + report.batch_bytes + report.output_bytes + report.temp_bytes - report.peak_bytes
    assert unused == 40_000
    section = read(page_of_report(report).document()).section("memory of a device")
    assert "does not use 39.06 KiB" in section.text
    assert sum(x.number("width") for x in next(section.all("svg")).all("rect")) == pytest.approx(100, rel=1e-4)
    assert "none: the devices do not wait" in page_of_report(report).document()


def test_names_of_the_user_are_text(devices, tmp_path):
    def loss(variables, x):
        return jnp.mean(x @ variables["params"]["<b>&'\""])

    loss.__name__ = "<script>alert('loss')</script>"
    tx, params = optax.sgd(0.1), {"<b>&'\"": jax.ShapeDtypeStruct((16, 3), jnp.float32)}
    step = jdp.DataParallel(lambda v, x: x, devices).train_step(loss, tx)
    state = jdp.TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(tx.init, params), {}, None)
    page = saved(jdp.explain(step, state, X), tmp_path)
    assert loss.__name__ in page.one("h1").text
    assert "<b>&'\"" in page.section("collectives, in the order of the program").text


def test_a_notebook_compiles_nothing_and_a_file_has_the_share_of_one_device(on_cpus, tmp_path, compilations):
    report = dataclasses.replace(on_cpus)
    compilations()
    first = read(report._repr_html_()).section("amounts").rows()
    assert compilations() == 0 and first[0][0] == "flops" and first[0][2] == ""
    rows = saved(report, tmp_path).section("amounts").rows()
    assert float(rows[0][2]) == pytest.approx(report.flops / report.one_device.flops, abs=1e-3)
    assert read(report._repr_html_()).section("amounts").rows() == rows
