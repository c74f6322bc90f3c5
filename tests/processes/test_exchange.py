"""What the processes leave in JAX's coordination service for each other, here in a job of one process."""

import os
import subprocess
import sys
import time
import types

import pytest
from laws import free_port

from jdp._processes import agree, exchange

LEAVES = """
import sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
import numpy as np
from jdp._core.agreement import begin
from jdp._core.replica_mesh import make_mesh
from jdp._processes.coordination import client
from jdp._processes.exchange import exchange_of

def kept():
    return [key.rsplit("/", 2)[1] for key, _ in client().key_value_dir_get("jdp/all")]

group, mesh = exchange_of((0,)), make_mesh(tuple(jax.devices()))
outline = (("containers", "[0]"), ("batch", "float32[*]"))
begin(mesh, "call", (1, 2, 3), outline)()
before = kept()
for k in range(300):
    first, second = (begin(mesh, "call", (k, k + of, 7), outline) for of in (1, 2))  # two under way, as of prefetch
    assert first()[0] == (k, k + 1, 7) and second()[0] == (k, k + 2, 7)
unchanged = before == kept()
for k in range(100):
    assert group.tell("text", f"text {k}", 5) == {0: f"text {k}"}
print("KEPT", unchanged, len(kept()))
"""


@pytest.mark.parametrize(
    "gone, words",
    [({1}, "process 1 has ended its program, and process 0 waits"), ({1, 2}, "processes 1, 2 have ended their")],
)
def test_who_has_ended_is_named(monkeypatch, gone, words):
    monkeypatch.setattr(exchange, "ended", lambda: gone)
    monkeypatch.setattr(exchange, "under", lambda folder: [(f"{folder}0", '["call", null]')])
    group = types.SimpleNamespace(processes=(0, 1, 2), here=0)
    with pytest.raises(exchange.DesyncError, match=f"jdp.call: {words}"):
        exchange.Call(group, "call", "key").wait(lambda seconds: False, 20)


def test_a_call_that_all_have_come_to_makes_them_known(monkeypatch):
    """Where each is, on which machine: needed to say of one that it is stopped."""
    met = []
    monkeypatch.setattr(exchange.watch, "meet", met.append)
    group = types.SimpleNamespace(processes=(0, 1, 2), here=0)
    exchange.Call(group, "call", "key").wait(lambda seconds: True, 20)
    assert met == [(0, 1, 2)]


def test_a_process_that_is_stopped_while_it_compiles_is_named(monkeypatch):
    """Others wait half an hour for one that compiles, and not for one without a sign of life."""
    monkeypatch.setattr(exchange, "ended", lambda: set())
    monkeypatch.setattr(exchange, "under", lambda folder: [(f"{folder}0", '["step (compiled)", ""]')])
    monkeypatch.setattr(exchange.limits, "step", 0.2)
    group, silent = types.SimpleNamespace(processes=(0, 1), here=0), []
    monkeypatch.setattr(exchange.watch, "silent", lambda processes, least=None: [p for p in processes if p in silent])
    monkeypatch.setattr(exchange.watch, "why_silent", lambda silent: "has given no sign of life")
    monkeypatch.setattr(exchange.watch, "_stopped", lambda silent: False)
    asked = []

    def ready(seconds):
        asked.append(seconds)
        time.sleep(0.01)
        if len(asked) == 40:  # it compiles so long
            silent.append(1)
        return len(asked) > 400

    with pytest.raises(exchange.AbsentError, match=r"jdp.step \(compiled\): process 1 has given no sign of life"):
        exchange.Call(group, "step (compiled)", "key").wait(ready, 1800)
    assert 40 <= len(asked) <= 60


@pytest.mark.parametrize("running", [0, 60])
def test_one_that_waits_for_an_earlier_program_is_not_late(monkeypatch, running):
    """`if jax.process_index() == 0: print(float(loss))` after a long step: the others are at the next call already."""
    monkeypatch.setattr(exchange, "ended", lambda: set())
    monkeypatch.setattr(exchange, "under", lambda folder: [(f"{folder}0", '["step", null]')])
    monkeypatch.setattr(exchange, "_SLICE", 0.01)
    monkeypatch.setattr(exchange.watch, "is_busy", lambda process: False)
    group, asked = types.SimpleNamespace(processes=(0, 1), here=0), []
    monkeypatch.setattr(exchange.watch, "runs", lambda: len(asked) < running)

    def ready(seconds):
        asked.append(seconds)
        time.sleep(0.01)
        return len(asked) > 400

    with pytest.raises(exchange.AbsentError, match="jdp.step: process 1 did not come to this call within 0 s"):
        exchange.Call(group, "step", "key").wait(ready, 0.2)
    assert running < len(asked) < running + 60


def test_what_a_process_leaves_is_bounded():
    """A batch leaves nothing, and of the texts there are never more than 64."""
    environ = dict(os.environ)
    environ["JAX_NUM_CPU_DEVICES"] = "3"
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, str(free_port())], capture_output=True, text=True, timeout=60, env=environ
    )
    assert "KEPT True 64" in done.stdout, done.stdout + done.stderr[-2000:]  # Gloo writes there as well


def test_two_programs_are_shown_from_where_they_differ():
    """A table that a function closes over is one long line, which may differ in its middle alone."""
    table = [f"{k}.000000e+00" for k in range(3000)]
    texts = {}
    for process in range(3):
        table[777] = f"{777 + process // 2}.000000e+00"
        texts[process] = f"module @jit\n  %cst = stablehlo.constant dense<[{', '.join(table)}]>\n  return"
    found = agree._first_line(texts)
    start = (
        "line 2 of its StableHLO (a constant, of the code or one that a function closes over): processes 0, 1 have ..."
    )
    assert found.startswith(start) and len(found) < 600
    same, other = found.split("; process 2 has ...")
    assert " 777.000000e+00, 778.0" in same and " 778.000000e+00, 778.0" in other
    assert (
        agree._first_line({0: "a\n", 1: "a\nb"})
        == "line 2 of its StableHLO: process 0 has no such line; process 1 has b"
    )
