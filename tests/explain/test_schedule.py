"""simulate: the time of a program on a chip with round numbers, against what the schedule says by hand."""

import itertools
import pathlib

import pytest

from jdp._tools.explain.estimate import simulate
from jdp._tools.explain.hlo import parse

HLO = pathlib.Path(__file__).parent / "hlo"


class Chip:
    """1,000 operations a second (500 for float32) and 1,000 bytes a second."""

    bytes_per_second = 1000.0

    def flops(self, dtype):
        return 500.0 if dtype == "f32" else 1000.0


START = "%start = f32[100]{0} all-reduce-start(%p), replica_groups=[1,4]<=[4], to_apply=%add"
PIECES = {
    "start": START,
    "waits": START + ', backend_config={"is_sync":true}',
    "second": "%start.2 = f32[100]{0} all-reduce-start(%p), replica_groups=[1,4]<=[4], to_apply=%add",
    "done": "%done = f32[100]{0} all-reduce-done(%start)",
    "done.2": "%done.2 = f32[100]{0} all-reduce-done(%start.2)",
    "sine": "%sine = f32[125]{0} sine(%x)",  # 125 floats in, 125 out: a second
    "cosine": "%cosine = f32[125]{0} cosine(%x)",
    "sync": "%sync = f32[100]{0} all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%add",
}
BODY = """%body (b: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %b = (s32[], f32[100]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %p = f32[100]{{0}} get-tuple-element(%b), index=1
  %x = f32[125]{{0}} constant({{...}})
{}
  ROOT %out = (s32[], f32[100]{{0}}) tuple(%i, %p)
}}

%cond (c: (s32[], f32[100])) -> pred[] {{
  %c = (s32[], f32[100]{{0}}) parameter(0)
  ROOT %always = pred[] constant(true)
}}

"""


def lines(*pieces):
    return "\n".join(f"  {PIECES[piece]}" for piece in pieces)


LANES = ("computes", "waits", "sends")


def timed(*pieces, seconds=3.0, loop=()):
    result = program(*pieces, seconds=seconds, loop=loop)
    return result.seconds, result.compute_seconds, result.collective_seconds, result.exposed_seconds


def program(*pieces, seconds=3.0, loop=()):
    """The simulation of a program of these pieces, in this order; with `loop`, of a loop of 5 after them."""
    text = "HloModule m, is_scheduled=true, num_partitions=4\n\n" + (BODY.format(lines(*loop)) if loop else "")
    text += "ENTRY %main (p: f32[100], x: f32[125]) -> f32[100] {\n  %p = f32[100]{0} parameter(0)\n"
    text += "  %x = f32[125]{0} parameter(1)\n" + lines(*pieces) + "\n"
    if loop:
        text += "  %zero = s32[] constant(0)\n  %init = (s32[], f32[100]{0}) tuple(%zero, %p)\n"
        text += "  %loop = (s32[], f32[100]{0}) while(%init), condition=%cond, body=%body, "
        text += 'backend_config={"known_trip_count":{"n":"5"}}\n'
    return simulate(parse(text + "  ROOT %r = f32[100]{0} bitcast(%p)\n}\n"), Chip(), lambda one: seconds)


@pytest.mark.parametrize(
    "pieces, seconds, want",
    [
        (("sine", "cosine"), 3.0, (2, 2, 0, 0)),
        (("sync", "sine"), 3.0, (4, 1, 3, 3)),
        (("start", "sine", "done"), 3.0, (3, 1, 3, 2)),  # one of the three seconds is hidden
        (("start", "sine", "cosine", "done"), 1.5, (2, 2, 1.5, 0)),  # all of them are
        (("start", "done", "sine"), 3.0, (4, 1, 3, 3)),  # begun, but nothing runs meanwhile
        (("waits", "sine", "done"), 3.0, (4, 1, 3, 3)),
        (("start", "second", "sine", "done", "done.2"), 3.0, (6, 1, 6, 5)),  # one after the other
        (("start", "sine", "second", "cosine", "done.2", "done"), 0.5, (2, 2, 1, 0)),
    ],
)
def test_a_schedule_takes_as_long_as_by_hand(pieces, seconds, want):
    assert timed(*pieces, seconds=seconds) == pytest.approx(want)


def test_a_loop_takes_its_iterations():
    assert timed(loop=("start", "sine", "done")) == pytest.approx((15, 5, 15, 10))
    assert timed("sine", loop=("sync",)) == pytest.approx((16, 1, 15, 15))


def test_after_a_loop_the_link_is_free():
    """A collective that is begun after a loop does not wait for what the loop had sent."""
    once = timed("start", "done", loop=("start", "sine", "done"))
    assert once == pytest.approx((18, 5, 18, 13))


def test_products_or_bytes_whichever_takes_longer():
    def seconds(dtype, rows):
        text = f"""HloModule m, is_scheduled=true

ENTRY %main (a: f32[{rows},10], b: f32[10,10]) -> f32[{rows},10] {{
  %a = {dtype}[{rows},10] parameter(0)
  %b = {dtype}[10,10] parameter(1)
  ROOT %dot = {dtype}[{rows},10] dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
        return simulate(parse(text), Chip(), lambda one: 0.0).seconds

    assert seconds("f32", 50) == pytest.approx(2 * 50 * 10 * 10 / 500)  # 20 s; of its bytes 4.4
    assert seconds("bf16", 50) == pytest.approx(2 * 50 * 10 * 10 / 1000)
    assert seconds("f32", 1) == pytest.approx((10 + 100 + 10) * 4 / 1000)  # 0.48 s; of its products 0.4


@pytest.mark.parametrize("name", sorted(path.stem for path in HLO.glob("*.txt")))
def test_saved_programs_keep_what_holds_for_any(name):
    module = parse((HLO / f"{name}.txt").read_text())
    free, slow = (simulate(module, Chip(), lambda one, s=s: s) for s in (0.0, 1e9))
    assert free.exposed_seconds == free.collective_seconds == 0 and free.seconds == pytest.approx(free.compute_seconds)
    assert slow.compute_seconds == pytest.approx(free.compute_seconds)
    assert slow.seconds == pytest.approx(slow.compute_seconds + slow.exposed_seconds)
    assert slow.collective_seconds % 1e9 == 0 and slow.collective_seconds * 0.9 < slow.exposed_seconds


def sums(schedule):
    """Of the spans, by lane; and that those of a device fill its time, with no gap and none twice."""
    lanes = {lane: [s for s in schedule.spans if s.lane == lane] for lane in LANES}
    now = 0.0
    for span in sorted([*lanes["computes"], *lanes["waits"]], key=lambda s: s.start):
        assert span.start == pytest.approx(now, rel=1e-9, abs=1e-9 * schedule.seconds)
        now = span.end
    assert now == pytest.approx(schedule.seconds)
    for before, after in itertools.pairwise(sorted(lanes["sends"], key=lambda s: s.start)):
        assert after.start >= before.end - 1e-9 * schedule.seconds
    return [sum(s.end - s.start for s in lane) for lane in lanes.values()]


@pytest.mark.parametrize("each", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("name", sorted(path.stem for path in HLO.glob("*.txt")))
def test_the_spans_are_all_of_the_time(name, each):
    schedule = simulate(parse((HLO / f"{name}.txt").read_text()), Chip(), lambda one: each)
    want = [schedule.compute_seconds, schedule.exposed_seconds, schedule.collective_seconds]
    assert sums(schedule) == pytest.approx(want, abs=1e-14 * schedule.seconds)  # instants are rounded to their own size


def test_the_spans_of_a_loop_are_drawn_out_to_its_length():
    schedule = program("sine", "start", "done", loop=("start", "sine", "done"))
    computes, waits, sends = ([(s.start, s.end) for s in schedule.spans if s.lane == lane] for lane in LANES)
    assert computes == [(0, 1), (4, 9)] and waits == [(1, 4), (9, 19)] and sends == [(1, 4), (4, 19)]
    assert sums(schedule) == [6, 13, 18]


def test_of_branches_the_spans_are_those_of_the_longest():
    sine = "  %p = f32[125]{0} parameter(0)\n  ROOT %sine.N = f32[125]{0} sine(%p)\n}\n\n"
    twice = sine.replace("  ROOT", "  %cosine = f32[125]{0} cosine(%p)\n  ROOT")
    text = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
    for name, body in (("short", sine), ("long", twice), ("other", sine)):
        text += f"%{name} (p: f32[125]) -> f32[125] {{\n{body.replace('N', name)}"
    text += "ENTRY %main (i: s32[], x: f32[125]) -> f32[125] {\n  %i = s32[] parameter(0)\n"
    text += "  %x = f32[125]{0} parameter(1)\n  ROOT %c = f32[125]{0} conditional(%i, %x, %x, %x), "
    schedule = simulate(parse(text + "branch_computations={%short, %long, %other}\n}\n"), Chip(), lambda one: 0.0)
    assert [s.name for s in schedule.spans] == ["cosine", "sine.long"] and sums(schedule) == [2, 0, 0]


@pytest.mark.parametrize("name, hidden", [("gpu_waits", False), ("gpu_all_reduce", True), ("tpu_loop", False)])
def test_what_runs_meanwhile_is_hidden(name, hidden):
    module = parse((HLO / f"{name}.txt").read_text())
    alone = simulate(module, Chip(), lambda one: 0.0).seconds
    some = simulate(module, Chip(), lambda one: alone * 0.01)
    assert some.exposed_seconds == pytest.approx(0 if hidden else some.collective_seconds)
    assert some.seconds == pytest.approx(alone + some.exposed_seconds)
