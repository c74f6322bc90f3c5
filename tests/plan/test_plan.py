"""plan: a script's step on machines that are not here. Most of it needs no compiler for them: CPUs stand in."""

import importlib.util
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import examples
from markup import read

import jdp
from jdp.__main__ import main
from jdp._core.replica_mesh import make_mesh
from jdp._model.config import scatter_batch
from jdp._tools.explain.calls import spread, step_call
from jdp._tools.explain.explain import compiled_call
from jdp._tools.plan import lines as plan_lines
from jdp._tools.plan import plan
from jdp._tools.plan.lines import Line, Most, most
from jdp._tools.plan.print import page, show
from jdp._tools.plan.script import WAYS, PlanError, capture_step
from jdp._tools.topology.chips import CHIPS, Chip, Protocol

STEP = """
    import sys
    import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
    import jdp

    width = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    dp = jdp.DataParallel(nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(3)]), devices=jax.devices()[:2])
    x = np.ones((10, 4), np.float32)
    variables = dp.init(jax.random.key(0), x)
    dp.apply(variables, x)  # other calls are run

    def loss_fn(variables, batch):
        return jnp.mean(dp.apply(variables, batch) ** 2, axis=1)

    step = dp.train_step(loss_fn, optax.adam(1e-3), accumulate_steps=2)
    state = step.init(variables)
    print("about to step, with", *sys.argv[1:])
    try:
        state, metrics = step(state, x)
    except Exception:
        raise SystemExit("a script does not see how it ends")
    open("stepped", "w")
"""

NNX = """
    import jax, jax.numpy as jnp, numpy as np, optax
    from flax import nnx
    import jdp

    dp = jdp.DataParallel(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), devices=jax.devices()[:2])
    step = dp.train_step(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), shard_optimizer=True)
    step(np.ones((6, 4), np.float32))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """`script(text)`: its path."""
    monkeypatch.chdir(tmp_path)

    def script(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return script


@pytest.fixture
def cpus(monkeypatch, devices):
    """A topology "h100" of the 8 CPU devices, with a chip of round figures."""
    link = (Protocol(0.0, 0.0),)
    chip = Chip("h100", "gpu", "cpu", {"bf16": 2e9, "f32": 1e9}, 200_000, 1e9, 1e9, (8,), link, dict.fromkeys(
        ("peaks", "memory_bytes", "bytes_per_second", "link", "network", "protocols"), "made up"), 1e8)  # fmt: skip
    monkeypatch.setitem(CHIPS, "h100", chip)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plan, "topology", lambda name, hosts, per_host: tuple(devices[: hosts * (per_host or 2)]))
    return chip


def test_a_script_runs_up_to_its_first_step(script, tmp_path, capsys):
    argv, path = list(sys.argv), list(sys.path)
    step = capture_step(script(STEP), ["32"])
    assert not (tmp_path / "stepped").exists()
    assert capsys.readouterr() == ("", "about to step, with 32\n")  # stdout is the plan's own
    assert (sys.argv, sys.path) == (argv, path) and sys.modules["__main__"].__name__ != "train"
    assert step.rows == 5 and step.program.options.accumulate_steps == 2
    leaves = jax.tree.leaves(step.state)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves) and (4, 32) in {x.shape for x in leaves}


def test_the_step_of_an_nnx_model_is_found(script):
    step = capture_step(script(NNX), [])
    assert step.rows == 3 and step.program.options.shard_optimizer


@pytest.mark.parametrize(
    "text, match, said",
    [
        ("x = 1 / 0", r"raised ZeroDivisionError \(division by zero\) before a training step", "line 1, in <module>"),
        ("import sys; sys.exit(3)", "ended with code 3 before", ""),
        ("import sys; sys.exit()", "ended with code 0 before", ""),
        ("print('no step here')", "ended before a training step", "no step here"),
    ],
)
def test_a_script_without_a_step(script, capsys, text, match, said):
    with pytest.raises(PlanError, match=match) as error:
        capture_step(script(text), [])
    assert re.fullmatch(r"jdp\.plan: .+; .+\. .+", str(error.value))
    assert said in capsys.readouterr().err


def test_a_batch_is_spread_over_other_devices(devices):
    dp = jdp.DataParallel(lambda w, x: x, devices=devices[:2])
    batch = {"x": np.ones((7, 3), np.float32), "rate": 0.5, "train": True}
    scattered = scatter_batch(dp._config, batch, "train_step", None, dp._config.batch_layouts)[0]
    other = spread(scattered, make_mesh(tuple(devices)), 6)
    assert other.sizes == (6,) * 8
    shapes = {x.shape for x in other._arrays}
    assert (48, 3) in shapes and shapes <= {(48, 3), ()}
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in other._arrays)


def all_lines_of(capsys):
    """The document that --json prints, by the number of devices and what of the state is cut over them."""
    document = json.loads(capsys.readouterr().out)
    assert document["jdp_plan"] == 2
    return {(one["devices"], one["way"]): one for one in document["lines"]}


def lines_of(capsys):
    """The script's own way, by the number of devices."""
    return {devices: one for (devices, _), one in all_lines_of(capsys).items() if one["is_own"]}


@pytest.mark.full
def test_a_plan_agrees_with_the_compiler(script, cpus, devices, capsys):
    path = script(STEP)
    assert main(["plan", path, "--topology", "h100", "--hosts", "1,4", "--json", "--", "32"]) == 0
    lines = lines_of(capsys)
    assert list(lines) == [2, 8]
    step = capture_step(path, ["32"])
    parameters = 4 * (4 * 32 + 32 + 32 * 3 + 3)
    for n, one in lines.items():
        assert one["compiles"] and one["fits"] and one["rows"] == 5
        # One reduction of the gradients, and a few numbers for the mean: 2 (n-1)/n of that
        sent = one["wire_bytes"] / (2 * (n - 1) / n)
        assert parameters <= sent <= parameters + 64
        assert one["estimated_seconds"] >= one["estimated_exposed_seconds"] >= parameters * (n - 1) / n / 1e9
        found = Most(**one["most"])
        assert found.compilations <= 4 and found.too_many - found.rows <= max(1, 0.01 * found.rows)
        mesh = make_mesh(tuple(devices[:n]))
        peaks = [peak(step, mesh, rows) for rows in (5, found.rows, found.too_many)]
        assert peaks[0] == one["peak_bytes"] and peaks[1] <= 150_000 < peaks[2]  # three quarters of the memory


def peak(step, mesh, rows, way=None):
    """Bytes that the compiled step needs, asked of the compiler without `plan` or `explain`."""
    memory = step_call(*step.on(mesh, rows, way)).trace().lower().compile().memory_analysis()
    both = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return both + memory.output_size_in_bytes - memory.alias_size_in_bytes


@pytest.mark.full
def test_each_machine_has_a_line_for_each_way_to_keep_the_state(script, cpus, devices, capsys):
    path = script(STEP.replace("accumulate_steps=2", "shard_optimizer=True"))
    assert main(["plan", path, "--topology", "h100", "--hosts", "1,4", "--json", "--", "1024"]) == 0
    lines = all_lines_of(capsys)
    assert list(lines) == [(n, way) for n in (2, 8) for way in WAYS]
    assert {way for (_, way), one in lines.items() if one["is_own"]} == {"shard_optimizer"}
    step = capture_step(path, ["1024"])
    for (n, way), one in lines.items():
        mesh = make_mesh(tuple(devices[:n]))
        found = Most(**one["most"])
        assert one["peak_bytes"] == peak(step, mesh, 5, way)
        assert peak(step, mesh, max(1, found.rows), way) <= 150_000 or not found.rows
        assert peak(step, mesh, found.too_many, way) > 150_000
        assert found.compilations <= 4
    for n in (2, 8):
        replicated, optimizer, params = (lines[n, way] for way in WAYS)
        assert replicated["peak_bytes"] > optimizer["peak_bytes"] > params["peak_bytes"]
        assert replicated["most"]["rows"] <= optimizer["most"]["rows"] < params["most"]["rows"]


@pytest.mark.full
def test_each_compilation_is_told_of(script, cpus, capsys):
    """Which one, when it begins and when it ends; as many lines as compilations, and in the document as many."""
    assert main(["plan", script(STEP), "--topology", "h100", "--hosts", "1,2", "--json"]) == 0
    told = capsys.readouterr()
    lines = json.loads(told.out)["lines"]
    begun = re.findall(r"^jdp plan: (\S+ x h100, \w+, [\d,]+ rows): compiling$", told.err, re.MULTILINE)
    ended = re.findall(r"^jdp plan: (.+ rows): [\d.]+ [kMG]?B, in [\d.]+ s$", told.err, re.MULTILINE)
    assert sorted(begun) == sorted(ended) and len(begun) == len(set(begun))
    assert len(begun) == 1 + sum(one["most"]["compilations"] for one in lines)
    assert told.err.startswith("jdp plan: running ") and begun[0] == "1 x h100, replicated, 5 rows"


def test_what_more_hosts_may_have_follows_from_fewer():
    few = Line("1 x 8", 8, 1, 4, peak_bytes=10_400, temp_bytes=5_000, most=Most(900, 901, 4))
    few.measured = {4: 10_400, 900: 99_500, 901: 100_100}

    def more(peak, temp, rows=4):
        return Line("2 x 8", 16, 2, rows, peak_bytes=peak, temp_bytes=temp, measured={rows: peak})

    assert few.most_of(more(10_404, 5_004), 100_000) == Most(900, 901, 1, False, 8)
    for peak, temp in ((9_000, 5_000), (11_000, 5_000), (10_406, 5_006), (10_400, None)):
        # 901 rows fit, too; 900 do not; other temporary bytes: not to be known without compiling
        assert few.most_of(more(peak, temp), 100_000) is None
    few.measured[901] = math.inf
    assert few.most_of(more(9_000, 5_000), 100_000).as_on == 8
    assert few.most_of(more(10_400, 5_000, rows=5), 100_000) is None


def test_what_another_way_may_have_follows_where_the_most_rows_need_as_much():
    """At the first rows they differ; what counts is what more rows need."""
    cut = Line("1 x 8", 8, 1, 4, "shard_optimizer", peak_bytes=10_400, temp_bytes=5_000, most=Most(900, 901, 4))
    cut.measured = {900: 99_500, 901: 100_100, 4: 10_400}

    def whole(at_most):
        measured = {900: at_most, 4: 10_700}  # the most rows count, in whatever order they were compiled
        return Line("1 x 8", 8, 1, 4, peak_bytes=10_700, temp_bytes=5_400, measured=measured)

    # 100 bytes less for the state
    assert cut.most_of(whole(99_400), 99_900) == Most(900, 901, 2, False, 8)
    assert cut.most_of(whole(99_490), 99_900) == Most(900, 901, 2, False, 8)  # as much, to a thousandth
    assert cut.most_of(whole(99_600), 99_900) is None
    assert cut.most_of(whole(99_400), 100_050) is None  # 901 rows fit, too


@pytest.mark.full
def test_only_with_its_parameters_cut_it_fits(script, cpus, capsys):
    """Replicated it does not fit, nor with the optimizer's state alone cut."""
    command = ["plan", script(STEP.replace(", accumulate_steps=2", "")), "--topology", "h100", "--hosts", "4"]
    assert main([*command, "--no-search", "--json", "--", "1600"]) == 0
    fits = {way: one["fits"] for (_, way), one in all_lines_of(capsys).items()}
    assert fits == {"replicated": False, "shard_optimizer": False, "shard_params": True}


def test_help_does_not_wait_for_jax():
    """Nor does any other command's; the modules are counted, and seconds on a busy machine are not."""
    code = """
import contextlib, io, sys
from jdp.__main__ import main
for command in ([], ["plan"], ["launch"], ["doctor"], ["replay"]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        assert main([*command, "--help"]) == 0
    assert "usage" in out.getvalue()
print([name for name in ("jax", "numpy", "flax", "optax", "orbax") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.full
def test_a_long_compilation_is_told_of_again(script, cpus, capsys, monkeypatch):
    def slow(*args):
        time.sleep(0.5)
        raise RuntimeError("as slow as that")

    monkeypatch.setattr(plan_lines, "compiled_call", slow)
    monkeypatch.setattr(plan_lines, "EVERY", 0.1)
    assert main(["plan", script(STEP), "--topology", "h100", "--no-search", "--json", "--per-host", "1"]) == 1
    told = capsys.readouterr().err
    assert len(re.findall(r"^jdp plan: still compiling 1 x h100, replicated, 5 rows \(\d s\)", told, re.M)) >= 2


@pytest.mark.full
@pytest.mark.parametrize("where", ["script", "compiler"])
def test_ctrl_c_ends_it_at_once_with_one_line(script, where):
    """While the script runs, or a compiler, which hears no signals and would go on for long."""
    # in short pieces: a signal just before a long sleep is seen at its end
    sleeps = "import time; print('at work', file=sys.stderr, flush=True); [time.sleep(0.1) for _ in range(300)]"
    code = f"""
import sys
import jax, jdp
jdp.virtual_cpu_devices(2)
from jdp.__main__ import run
from jdp._tools.plan import plan, lines
def compile(*args):
    {sleeps}
plan._topologies = lambda args: [("1 x 1", tuple(jax.devices()[:1])), ("1 x 2", tuple(jax.devices()))]
lines.compiled_call, lines.Network.of = compile, lambda devices: None
sys.argv = ["jdp", "plan", *sys.argv[1:]]
run()
"""
    path = script(f"import sys; {sleeps}" if where == "script" else STEP)
    command = [sys.executable, "-c", code, path, "--topology", "h100", "--no-search"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        told = ""
        while "at work" not in told:
            assert (line := process.stderr.readline()), told
            told += line
        begin = time.perf_counter()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 130 and time.perf_counter() - begin < 10
    assert [line for line in rest.splitlines() if line != "at work"][-1] == "jdp plan: interrupted"
    assert "Traceback" not in rest and "interrupted, in" not in rest


@pytest.mark.full
def test_one_device_has_one_line(script, cpus, capsys):
    command = ["plan", script(STEP), "--topology", "h100", "--no-search", "--json", "--per-host", "1"]
    assert main(command) == 0
    assert list(all_lines_of(capsys)) == [(1, "replicated")]


ON_MESH = STEP.replace("devices=jax.devices()[:2]", 'devices=jax.make_mesh((4, 2), ("data", "model"))').replace(
    "[nn.Dense(width), nn.relu,",
    '[nn.Dense(width, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))), nn.relu,',
)


@pytest.mark.full
def test_replicas_of_several_devices(script, cpus, devices, capsys):
    """A plan keeps the devices of a replica, and has more replicas on larger machines; one device has no mesh."""
    path = script(ON_MESH)
    assert main(["plan", path, "--topology", "h100", "--hosts", "1,2,4", "--no-search", "--json", "--", "64"]) == 0
    lines = all_lines_of(capsys)
    assert [*lines] == [(n, "replicated") for n in (2, 4, 8)]  # the only way that such a step has
    step = capture_step(path, ["64"])
    assert step.inside == 2
    for (n, _), one in lines.items():
        mesh = step.mesh_of(devices[:n])
        assert one["compiles"] and mesh.size == n // 2 and one["peak_bytes"] == peak(step, mesh, one["rows"])
    with pytest.raises(ValueError, match="3 devices are no whole number of replicas of 2 devices"):
        step.mesh_of(devices[:3])
    with pytest.raises(PlanError, match=r"--no-values leaves only shapes, .* inside of a replica\. Run it without"):
        capture_step(path, [], values=False)
    whole = script(STEP.replace("devices=jax.devices()[:2]", "devices=jax.devices()"))
    other = capture_step(whole, ["64"])
    assert lines[8, "replicated"]["peak_bytes"] < peak(other, make_mesh(tuple(devices)), other.rows)


@pytest.mark.parametrize("text", [STEP, NNX])
def test_without_values_a_script_takes_no_memory(script, text):
    """Of the same shapes, and wide as no array here could be."""
    path = script(text)
    step, shapes = capture_step(path, []), capture_step(path, [], values=False)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), step.state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes.state
    )
    assert step.rows == shapes.rows
    if text is STEP:
        wide = capture_step(script(text.replace("dp.apply(variables, x)", "pass")), [f"{10**11}"], values=False)
        assert (4, 10**11) in {x.shape for x in jax.tree.leaves(wide.state)}


def test_without_values_none_may_be_looked_at(script, capsys):
    path = script(STEP.replace("step = dp", "print(float(x.sum() + jax.numpy.ones(())))\n    step = dp"))
    assert capture_step(path, []).rows == 5
    match = "looked at the value of an array, of which --no-values leaves the shape, before a training step"
    with pytest.raises(PlanError, match=match):
        capture_step(path, [], values=False)


@pytest.mark.full
def test_efficiency_is_against_one_device_with_as_many_rows(script, cpus, capsys):
    command = ["plan", script(STEP), "--topology", "h100", "--no-search", "--json"]
    assert main([*command, "--hosts", "1,4", "--per-host", "1", "--batch-per-device", "2000"]) == 0
    lines = lines_of(capsys)
    assert lines[1]["estimated_efficiency"] == 1 and lines[1]["wire_bytes"] == 0 and lines[1]["most"] is None
    assert 0 < lines[4]["estimated_efficiency"] < 1 and lines[4]["rows"] == 2000
    ratio = lines[1]["estimated_seconds"] / lines[4]["estimated_seconds"]
    assert lines[4]["estimated_efficiency"] == pytest.approx(ratio)


@pytest.mark.full
def test_the_table_says_what_is_estimated_and_from_what(script, cpus, capsys, tmp_path):
    command = ["plan", script(STEP), "--topology", "h100", "--hosts", "1,4", "--no-search"]
    assert main([*command, "--picture", "plan.png"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "2 1 x 2 replicated* in",
        "8 4 x 2 shard_params in",
        "*: as the script has it",
        "~step",
        "~efficiency",
        "yes",
        "made up",
        "NCCL Tests",
        "75% of the device's",
    ):
        assert words in out, out
    assert (tmp_path / "plan.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.full
def test_the_page_has_the_lines_and_their_curves(script, cpus, capsys, tmp_path):
    command = ["plan", script(STEP), "--topology", "h100", "--hosts", "1,2,4", "--no-search", "--json"]
    assert main([*command, "--html", "plan.html"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    drawn = read((tmp_path / "plan.html").read_text(encoding="utf-8"))
    rows = drawn.section("each line").rows()
    assert [row[:3] for row in rows] == [
        [str(one["devices"]), one["where"], one["way"] + "*" * one["is_own"]] for one in lines
    ]
    figures = [*drawn.section("over devices").all("figure")]
    names = ("estimated_efficiency", "estimated_seconds", "estimated_exposed_seconds", "peak_bytes")
    for figure, name in zip(figures, names, strict=True):
        points = [(c.attributes["class"], c.number("cx"), c.number("cy")) for c in figure.all("circle")]
        want = [(f"c{WAYS.index(one['way'])}", one["devices"], one[name]) for one in lines]
        assert len(points) == len(want) == 9
        bottom = max(line.number("y1") for line in figure.all("line", "grid"))
        ordered = sorted(want, key=lambda one: one[:2])
        heights = np.array([bottom - y for _, _, y in points]) / np.array([y for _, _, y in ordered])
        np.testing.assert_allclose(heights, heights[0], atol=0.01 / min(y for *_, y in want), err_msg=name)
        assert [kind for kind, *_ in points] == [kind for kind, *_ in ordered]
        assert len({x for _, x, _ in points}) == 3
    assert "made up" in drawn.section("figures, and where they are from").text
    assert "NCCL Tests" in drawn.section("formulas").text


def test_a_line_that_does_not_compile_has_no_point():
    lines = [Line(f"{n} x 8", 8 * n, n, 5, compiles=n == 1, reason="<too much>" * (n > 1)) for n in (1, 2)]
    lines[0].peak_bytes, lines[0].seconds, lines[0].exposed_seconds, lines[0].efficiency = 2 * 10**9, 0.1, 0.0, 0.9
    found = page(lines, CHIPS["h100"], "train_step of <lambda>")
    drawn = read(found.document())
    assert len([*drawn.all("circle")]) == 4 and len(drawn.section("each line").rows()) == 2
    assert "<lambda>" in drawn.one("h1").text and "2 x 8, replicated: <too much>" in drawn.section("each line").text
    with pytest.raises(ValueError, match="jdp.save"):
        found.save("plan.txt")


def test_on_a_narrow_terminal_each_row_is_a_sentence(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    out.isatty = lambda: True
    lines = [Line(f"{n} x 8", 8 * n, n, 5, peak_bytes=2 * 10**9, seconds=0.1, compile_seconds=3.0) for n in (1, 2)]
    show(lines, CHIPS["h100"], "train_step of loss", out)
    title, first, second, *rest = re.split(r"\n  (?=devices|fits)", out.getvalue())
    said = "devices: 8, hosts: 1 x 8, state: replicated, compiles: in 3.0 s, peak: 2 GB, ~step: 100 ms"
    assert first.split() == said.split()
    assert second.startswith("devices: 16, hosts: 2 x 8,") and rest
    assert "train_step of loss" in title
    assert max(map(len, [*first.splitlines(), *second.splitlines()])) <= 58


@pytest.mark.full
def test_what_does_not_fit_or_compile_is_a_line_too(script, cpus, capsys, monkeypatch):
    command = ["plan", script(STEP), "--topology", "h100", "--hosts", "1", "--batch-per-device"]
    assert main([*command, "100000", "--no-search"]) == 0
    assert re.search(r"1 x 2 +replicated\* +in [\d.]+ s +no", capsys.readouterr().out)

    def refuse(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: far too\n much")

    monkeypatch.setattr("jdp._tools.plan.lines.compiled_call", refuse)
    assert main([*command, "5", "--no-search"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"1 x 2 +replicated\* +no +no", out) and "1 x 2, replicated: RESOURCE_EXHAUSTED: far too\n" in out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--hosts", "0"],
            "--hosts: it is '0'; a plan is made for 1 host or more. Pass whole numbers with",
        ),
        (["--hosts", "1,two"], "--hosts: it is '1,two'; a plan is made for 1 host"),
        (["--batch-per-device", "-1"], "--batch-per-device: it is '-1'; there is 1 or more of them. Pass a whole"),
        (["--per-host", "0"], "--per-host: it is '0'; there is 1 or more"),
        (["--shapes", "4x4"], "h100 is a GPU"),
        (["--topology", "v5e", "--hosts", "2"], "v5e is a TPU"),
        (["--topology", "v5e"], "give shapes"),
        (["--picture", "plan.txt"], "ends in none"),
        (["--picture", "nowhere/plan.png"], "no folder nowhere"),
        (["--html", "plan.txt"], "plan.txt does not end in .html"),
        (["--html", "nowhere/plan.html"], "no folder nowhere"),
    ],
)
def test_arguments_that_make_no_sense(script, capsys, arguments, said):
    assert main(["plan", script("raise KeyError"), "--topology", "h100", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.full
def test_without_matplotlib_a_plan_has_no_picture(script, cpus, capsys, monkeypatch, tmp_path):
    """It is said before the script runs, with the extra that brings it, and the plan goes on."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    command = ["plan", script(STEP), "--topology", "h100", "--no-search", "--per-host", "1"]
    assert main([*command, "--picture", "plan.png", "--json"]) == 0
    told = capsys.readouterr()
    line, after = told.err.splitlines()[:2]
    assert line.startswith("jdp.plan: matplotlib is not installed; there will be no picture. Run pip install")
    assert line.endswith("in a checkout of the repository; this package is not on PyPI, where jdp is another one.")
    assert "running" in after and json.loads(told.out)["lines"] and not (tmp_path / "plan.png").exists()


@pytest.mark.full
@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupt_keeps_the_lines_that_are_finished(script, cpus, capsys, monkeypatch, tmp_path, after):
    def some(step, chip, machines, rows, search):
        for i in range(after):
            yield Line(f"{i + 1} x 8", 8 * (i + 1), i + 1, rows, seconds=1.0, efficiency=1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "lines", some)
    assert main(["plan", script(STEP), "--topology", "h100", "--picture", "plan.png"]) == 130
    told = capsys.readouterr()
    last = told.err.splitlines()[-1]
    assert last == "jdp plan: interrupted" + "; 2 of its lines were finished" * (after > 0)
    assert (tmp_path / "plan.png").exists() == (after > 0) == ("2 x 8" in told.out)


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_memory_of_a_program_is_the_share_that_jax_takes(cpus, monkeypatch, name):
    whole = CHIPS["h100"].memory_bytes
    monkeypatch.setenv(name, "0.5")  # JAX calls the second one deprecated
    assert (CHIPS["h100"].available_bytes, CHIPS["v5e"].available_bytes) == (whole // 2, CHIPS["v5e"].memory_bytes)


def test_a_reader_that_has_seen_enough_is_no_error(script, cpus, monkeypatch):
    one = Line("1 x 8", 8, 1, 4, seconds=1.0, efficiency=1.0)
    monkeypatch.setattr(plan, "lines", lambda *args: [one])
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["plan", script(STEP), "--topology", "h100"]) == 0


def test_what_cannot_be_planned_is_said_in_a_line(script, cpus, capsys):
    assert main(["plan", "nowhere.py", "--topology", "h100"]) == 1
    assert capsys.readouterr().err.startswith("jdp.plan: there is no file nowhere.py;")
    assert main(["plan", script("pass"), "--topology", "h100"]) == 1
    assert "ended before a training step" in capsys.readouterr().err


def test_an_unknown_topology_is_refused_before_the_script_runs(script, capsys):
    assert main(["plan", script("raise KeyError"), "--topology", "h101"]) == 1
    assert capsys.readouterr().err.startswith("jdp.topology: name is 'h101', which is unknown; known are")


FUNCTIONS = {
    "a line": lambda x: 1e9 + 3.1e6 * x,
    "steep": lambda x: 1e9 + 3e9 * x,
    "a bend": lambda x: 1e9 + (4e6 * x if x < 8000 else 32e9 + 1.5e6 * (x - 8000)),
    "a power": lambda x: 1e9 + 1e5 * x**1.5,
    "refused": lambda x: 1e9 + 3.1e6 * x if x <= 19_000 else math.inf,
    "a step": lambda x: 1e9 + 3e6 * x + 5e9 * (x % 64 > 0),
    "nothing fits": lambda x: 61e9 + x,
    "all fit": lambda x: 1e9,
}
MEMORY = 60 * 10**9


def searched(needs, start, **known):
    """What is found, after the checks that hold whatever the memory is."""
    asked = {}

    def count(rows):
        assert rows not in asked and 1 <= rows < 2**31
        asked[rows] = needs(rows)
        return asked[rows]

    found = most(count, MEMORY, [start], **known)
    assert len(asked) == found.compilations <= 4
    assert found.rows == 0 or asked[found.rows] <= MEMORY
    assert found.too_many is None or found.too_many > found.rows and not asked[found.too_many] <= MEMORY
    assert found.refused == math.isnan(asked.get(found.too_many, 0))
    return found


@pytest.mark.parametrize("start", [1, 4, 100_000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_most_rows_are_found_in_four_compilations(name, start):
    found = searched(FUNCTIONS[name], start)
    if name in ("a line", "steep"):
        assert found.too_many - found.rows <= max(1, 0.01 * found.rows)
    if name == "nothing fits":
        assert found.rows == 0


@examples(300)
@given(
    share=st.floats(0, 0.9),
    log_rows=st.floats(0.5, 17),
    start=st.integers(1, 10_000),
    power=st.floats(0.98, 1.02),
    is_line=st.booleans(),
)
def test_the_most_rows_of_lines_and_of_slight_curves(share, log_rows, start, power, is_line):
    """Within 1 % where memory is a line, to a row where so many are few; within 4 % where it bends a little."""
    power = 1.0 if is_line else power
    fit = 2**log_rows + 1e-3
    scale = (1 - share) * MEMORY / fit**power

    found = searched(lambda x: share * MEMORY + scale * x**power, start)
    assert fit * (0.99 if is_line else 0.96) - 1 < found.rows <= fit
    if is_line:
        assert found.too_many is not None and found.too_many - found.rows <= max(1, 0.01 * found.rows)


def test_bytes_that_no_row_needs_and_a_like_programs_slope_lead_nearer():
    """Nine tenths are the state's: without knowing so, the second try would hardly be above the first."""
    asked = []

    def needs(x):
        asked.append(x)
        return 54e9 + 1e6 * x

    assert most(needs, MEMORY, [4], fixed=54e9).compilations == 3 and asked[1] > 5900
    asked.clear()
    found = most(needs, MEMORY, [4], slope=1e6)
    assert found.compilations == 3 and 5940 < asked[1] == found.rows <= 6000


def test_refusals_that_are_not_for_memory_say_nothing():
    def needs(rows):  # as XLA's tiling of matrix products for GPUs has it
        return 1e9 + 3.1e6 * rows if rows < 1000 or rows % 2048 == 0 else math.nan

    assert searched(needs, 4).rows == 2**14
    assert searched(lambda rows: math.nan, 4) == Most(0, 1, 2, True)
    found = searched(lambda rows: 1e8 * rows if rows < 300 else math.nan, 4)
    assert 256 <= found.rows < 300 <= found.too_many and found.refused


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.compilers
@pytest.mark.skipif(not installed("jax_plugins.xla_cuda12"), reason="no CUDA plugin: plan-gpu")
def test_compiling_for_16384_gpus_takes_no_longer_than_for_8(script, capsys):
    command = ["plan", script(STEP), "--topology", "h100", "--no-search", "--json", "--hosts"]
    seconds = {8: [], 16_384: []}
    for _ in range(3):
        assert main([*command, "1,2048"]) == 0
        for n, one in lines_of(capsys).items():
            seconds[n].append(one["compile_seconds"])
            assert one["hosts"] == n // 8 and one["compiles"] and one["in_flight"] is not None
    assert min(seconds[16_384]) < 1.5 * min(seconds[8])


@pytest.mark.compilers
@pytest.mark.skipif(not installed("jax_plugins.xla_cuda12"), reason="no CUDA plugin: plan-gpu")
def test_kept_kernels_change_nothing_but_the_time(script, tmp_path):
    step, mesh = capture_step(script(STEP), []), make_mesh(jdp.topology("h100"))
    call, kept = step_call(*step.on(mesh, 64)), tmp_path / "kernels"
    plain, filled, found = (compiled_call(call, kernels=name) for name in (None, str(kept), str(kept)))
    assert kept.stat().st_size > 1000
    assert plain.peak_bytes == filled.peak_bytes == found.peak_bytes
    assert plain.compiled.as_text() == filled.compiled.as_text() == found.compiled.as_text()


@pytest.mark.compilers
@pytest.mark.skipif(not installed("libtpu"), reason="no libtpu: plan-tpu")
def test_a_plan_for_tpus(script, capsys):
    assert main(["plan", script(NNX), "--topology", "v5e", "--no-search", "--json", "--shapes", "2x2,4x4"]) == 0
    lines = lines_of(capsys)
    assert list(lines) == [4, 16] and all(one["compiles"] and one["fits"] for one in lines.values())
