"""Which instructions compute something: not those that name, move, cut or join data, nor counters."""

from __future__ import annotations

import math

from .hlo import Computation, Instruction, Module

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all optimization-barrier add-dependency domain "
    "partition-id replica-id".split()
)
MOVES = frozenset(
    "copy reshape transpose convert broadcast iota slice dynamic-slice dynamic-update-slice concatenate pad "
    "reverse bitcast-convert".split()
)
_COMMUNICATE = frozenset([*KINDS, "send", "recv", "infeed", "outfeed"])
_MARKS = (  # custom calls that only tell TPU's compiler something
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "Sharding",
)
CONTROL = ("while", "call", "conditional", "async-start")  # they run other computations


def is_work(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Whether a scheduled instruction computes something that takes time."""
    opcode = instruction.opcode
    if opcode in FREE or opcode in MOVES or opcode in _COMMUNICATE:
        return False
    if opcode == "fusion" or opcode in CONTROL:
        inside = (module.computations[name] for _, name in instruction.called)
        works = any(is_work(module, c, i) for c in inside for i in c)
        return works and not (opcode == "fusion" and _scalars(computation, instruction))
    if opcode.endswith(("-start", "-done", "-update")):
        return False
    if opcode == "custom-call":
        return target(instruction) not in _MARKS
    return not _scalars(computation, instruction)


def work(module: Module, computation: Computation) -> tuple[list[int], list[str]]:
    """Where in the schedule something is computed, in rising order, and the names."""
    places = [n for n, i in enumerate(computation) if is_work(module, computation, i)]
    return places, [computation.instructions[n].name for n in places]


def target(instruction: Instruction) -> str:
    """What a custom call calls."""
    return (instruction.attribute("custom_call_target") or "").strip('"')


def _scalars(computation: Computation, instruction: Instruction) -> bool:
    """Whether it takes and gives single numbers only: a counter, a learning rate."""
    around = [instruction, *(computation.by_name[name] for name in instruction.operands)]
    return all(math.prod(dims) <= 1 for i in around for _, dims in i.shapes)
