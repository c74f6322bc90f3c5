"""Reads the text of an optimized program: its computations, its loops, and the bytes of arrays."""

import re

import numpy as np

COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)
CALLED = re.compile(r"(?:body|condition|to_apply|calls|(?:true|false)_computation)=%?([\w.-]+)")
BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}


def computations(hlo):
    """The instructions of each computation, by its name."""
    found, name = {}, None
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = head[1]
            found[name] = []
        elif line == "}":
            name = None
        elif name:
            found[name].append(line)
    return found


def in_loops(found):
    """The names of the computations that run once in every turn of a loop."""
    todo = [name for lines in found.values() for line in lines for name in re.findall(r"body=%?([\w.-]+)", line)]
    names = set()
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            for line in found[name]:
                todo += CALLED.findall(line)
                for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
                    todo += [branch.strip(" %") for branch in branches.split(",")]
    return names


def size_in_bytes(types):
    """Of arrays as HLO writes their types: f32[3,2]{1,0}."""
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", types)
    return sum(BYTES[kind] * int(np.prod([int(d) for d in dims.split(",") if d])) for kind, dims in shapes)
