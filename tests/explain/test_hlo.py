"""The text of optimized programs, read: the order of the schedule, shapes, groups of devices, lengths of loops."""

import pathlib
import time

import jax
import jax.numpy as jnp
import pytest

from jdp._tools.explain.collectives import group_size
from jdp._tools.explain.cost import trips
from jdp._tools.explain.hlo import nbytes, parse

SAVED = sorted((pathlib.Path(__file__).parent / "hlo").glob("*.txt"))
PAIR = "(f32[8,128]{1,0:T(8,128)S(1)}, (bf16[4]{0:T(256)(2,1)}, s32[]{:T(128)}), /*index=2*/token[])"


def program(*lines, devices=8, more=""):
    return parse(
        f"HloModule m, is_scheduled=true, num_partitions={devices}\n\n{more}ENTRY %main (p: f32[]) -> f32[] {{\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\n}\n"
    )


def test_the_instructions_of_a_computation():
    module = program(
        "%p = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)",
        f'%pair.1 = {PAIR} custom-call(%p, /*index=1*/%p), custom_call_target="a, b={{", metadata={{op_name="f/x"}}',
        "ROOT %gte = f32[8,128]{1,0} get-tuple-element(%pair.1), index=0",
    )
    p, pair, gte = module.entry
    assert (p.name, p.opcode, p.literal, p.operands) == ("p", "parameter", "0", ())
    assert pair.shapes == (("f32", (8, 128)), ("bf16", (4,)), ("s32", ()), ("token", ()))
    assert pair.near == (True, False, False, False)
    assert (pair.operands, pair.op_name) == (("p", "p"), "f/x")
    assert gte.root and module.entry.root is gte and gte.integers("index") == (0,)
    assert module.entry.users["p"] == [pair] and module.devices == 8


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[2,3]", 24),
        ("pred[5]", 5),
        ("s4[3]", 2),
        ("f8e4m3fn[4]", 4),
        ("c64[2]", 16),
        ("bf16[]", 2),
        ("f32[<=8]", 32),
    ],
)
def test_bytes_of_an_array(shape, size):
    (one,) = program(f"ROOT %p = {shape} parameter(0)").entry
    assert nbytes(*one.shapes) == size
    assert one.near == (False,)


@pytest.mark.parametrize(
    "groups, size",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups={}", 8),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", 1),
    ],
)
def test_devices_in_a_group(groups, size):
    module = program("%p = f32[4] parameter(0)", f"ROOT %r = f32[4] all-reduce(%p), {groups}, to_apply=%add")
    assert group_size(module, module.entry.root) == size


@pytest.mark.parametrize("pairs, size", [("{{0,1},{1,0},{2,3},{3,2}}", 2), ("{{0,1},{1,2},{2,3}}", 4), ("{{0,0}}", 1)])
def test_devices_that_a_permutation_connects(pairs, size):
    module = program(
        "%p = f32[4] parameter(0)", f"ROOT %r = f32[4] collective-permute(%p), source_target_pairs={pairs}"
    )
    assert group_size(module, module.entry.root) == size


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_every_instruction_of_a_saved_program_is_read(path):
    text = path.read_text()
    module = parse(text)
    assert module.devices == (8 if path.stem.startswith("gpu") else 16)
    instructions = [(c, i) for c in module.computations.values() for i in c]
    assert len(instructions) == sum(" = " in line for line in text.splitlines() if line.startswith("  "))
    for computation, instruction in instructions:
        assert set(instruction.operands) <= computation.by_name.keys()
        assert {name for _, name in instruction.called} <= module.computations.keys()


@pytest.mark.parametrize("name", ["gpu_loop", "tpu_loop"])
def test_a_loop_is_as_long_as_the_scan(name):
    module = parse((SAVED[0].parent / f"{name}.txt").read_text())
    (loop,) = (i for i in module.entry if i.opcode == "while")
    assert (loop.known_trips is None) == (name == "tpu_loop")  # there it is read off the counter
    assert trips(module, module.entry, loop) == 4
    loop.__dict__["known_trips"] = None
    assert trips(module, module.entry, loop) == 4


@pytest.mark.parametrize("begin, end, step, n", [(0, 10, 1, 10), (3, 10, 2, 4), (5, 5, 1, 0)])
def test_the_length_of_a_loop_from_its_counter(begin, end, step, n):
    carry = "(s32[], f32[])"
    more = f"""%body (b: {carry}) -> {carry} {{
  %b = {carry} parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[] get-tuple-element(%b), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  ROOT %out = {carry} tuple(%next, %x)
}}

%cond (c: {carry}) -> pred[] {{
  %c = {carry} parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant({end})
  ROOT %lt = pred[] compare(%j, %end), direction=LT
}}

"""
    module = program(
        "%p = f32[] parameter(0)",
        f"%zero = s32[] constant({begin})",
        f"%init = {carry} tuple(%zero, %p)",
        f"%loop = {carry} while(%init), condition=%cond, body=%body",
        "ROOT %r = f32[] get-tuple-element(%loop), index=1",
        more=more,
    )
    assert trips(module, module.entry, module.entry.by_name["loop"]) == n


def test_the_length_of_a_loop_that_jax_made():
    text = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda i, x: jnp.sin(x * i), x)).lower(1.0).compile().as_text()
    module = parse(text)
    assert [trips(module, c, i) for c in module.computations.values() for i in c if i.opcode == "while"] == [7]


def test_a_loop_that_ends_when_a_value_says_so_has_no_known_length():
    text = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 9.0, lambda x: x * 1.5, x)).lower(1.0).compile().as_text()
    module = parse(text)
    loops = [(c, i) for c in module.computations.values() for i in c if i.opcode == "while"]
    assert [trips(module, *loop) for loop in loops] == [None]


def test_programs_for_many_devices_are_read_fast():
    """200 collectives with groups of 16,384 devices: 20 MB of text, nearly all of it numbers that nobody asks for."""
    groups = "replica_groups={{" + ",".join(map(str, range(16384))) + "}}"
    lines = [
        f'%r{n} = f32[4]{{0}} all-reduce(%r{n - 1}), {groups}, to_apply=%add, metadata={{op_name="x{n}"}}'
        for n in range(1, 200)
    ]
    start = time.process_time()
    module = program("%r0 = f32[4]{0} parameter(0)", *lines, devices=16384)
    assert {group_size(module, i) for i in module.entry if i.opcode == "all-reduce"} == {16384}
    assert [i.op_name for i in module.entry][1:3] == ["x1", "x2"]
    assert time.process_time() - start < 3


def test_what_is_no_program_is_refused(refused):
    with refused(ValueError, "parse", match="11 characters and no ENTRY computation"):
        parse("no program.")
