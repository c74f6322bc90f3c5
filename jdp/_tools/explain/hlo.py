"""Reads the text of an optimized program: computations in the order of their schedule, and their instructions.

XLA prints one instruction a line, `%name = shape opcode(operands), attributes`. A line of a program for thousands of
devices can be 100 KB long, nearly all of it groups of devices, so nothing is parsed before it is needed.
"""

from __future__ import annotations

import copy
import functools
import math
import re

_NAME = r"%?([^\s,(){}]+)"
_INSTRUCTION = re.compile(rf"\s+(ROOT )?{_NAME} = (.*?) ?([a-z][\w-]*)\(")
_HEADER = re.compile(rf"(ENTRY )?{_NAME} .*\{{$")
_PERCENT = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation|called_computations"
                     r"|branch_computations)=(\{[^}]*\}|[^\s,]+)")  # fmt: skip
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'known_trip_count[^\d}]*"?n"?:"?(\d+)')
_BRACKETS = {"(": re.compile(r"[()]"), "{": re.compile(r"[{}]")}
_CALLERS = ("fusion", "while", "conditional", "call", "async-start", "custom-call", "map", "reduce", "sort")


class Instruction:
    """One line of a computation. Its parts are read from the text when they are first needed."""

    def __init__(self, name: str, opcode: str, result: str, line: str, start: int, root: bool) -> None:
        self.name, self.opcode, self.root = name, opcode, root
        self._result, self._line, self._start = result, line, start

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Dtype and dimensions of each array of the result, nested tuples flattened; of a dynamic `<=8` the maximum."""
        found = _ARRAY.findall(self._result)
        return tuple((dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims, _ in found)

    @functools.cached_property
    def near(self) -> tuple[bool, ...]:
        """For each array of the result, True if it is on the chip itself: its layout names another memory, `S(1)`."""
        return tuple("S(" in layout for *_, layout in _ARRAY.findall(self._result))

    @functools.cached_property
    def _end(self) -> int:
        """Where the operands end: the closing parenthesis that belongs to the opcode's."""
        return _closing(self._line, self._start - 1)

    @property
    def literal(self) -> str:
        """The text between the parentheses: operands, a constant's value, a parameter's number."""
        return self._line[self._start : self._end]

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the instructions whose results it takes."""
        return tuple(_PERCENT.findall(self.literal))

    @property
    def attributes(self) -> str:
        """The rest of the line, as XLA wrote it."""
        return self._line[self._end + 1 :]

    def attribute(self, name: str) -> str | None:
        """Returns the text of one attribute, with its braces; None if there is no such attribute."""
        start = self._line.find(f", {name}=", self._end)
        if start < 0:
            return None
        start += len(name) + 3
        if self._line.startswith("{", start):
            return self._line[start : _closing(self._line, start) + 1]
        return self._line[start:].partition(", ")[0]

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns an attribute that is a list of numbers, `dimensions={0,1}`; empty if there is no such attribute."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(name) or "")))

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the user's program it comes from, `jit(step)/…/dot_general`; empty if XLA has lost it."""
        found = _OP_NAME.search(self._line, self._end)
        return found.group(1) if found else ""

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) of each computation that it runs: `("body", "region_0.7")`."""
        if self.opcode not in _CALLERS:
            return ()
        found = _CALLED.findall(self._line[self._end :])
        return tuple((role, name) for role, text in found for name in re.findall(_NAME, text))

    @functools.cached_property
    def known_trips(self) -> int | None:
        """How often a `while` runs its body, if XLA says so; else None."""
        found = _TRIPS.search(self._line, self._end)
        return int(found.group(1)) if found else None


def _closing(line: str, start: int) -> int:
    """Returns the position where the bracket at `start` is closed."""
    depth = 0
    for match in _BRACKETS[line[start]].finditer(line, start):
        depth += 1 if match.group() == line[start] else -1
        if not depth:
            return match.start()
    return len(line)


class Computation(list[Instruction]):
    """Instructions in the order they were printed, which is the schedule's in a scheduled program."""

    def __init__(self, name: str) -> None:
        self.name = name

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each one's result."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    @functools.cached_property
    def root(self) -> Instruction:
        return next((i for i in reversed(self) if i.root), self[-1])


class Module:
    """A program: its computations by name, the one it begins with, and the number of devices it runs on."""

    def __init__(self, header: str, computations: dict[str, Computation], entry: Computation) -> None:
        self.computations, self.entry = computations, entry
        sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.devices = math.prod(map(int, sizes))
        self._dissolved: dict[str, Computation] = {}

    def dissolved(self, computation: Computation) -> Computation:
        """Returns the computation with its fusions and tuples inlined: every operand is the value that was computed.

        A parameter of a fusion becomes what is passed to it, and its result becomes its root. An instruction in a
        fusion is named `fusion/name`.
        """
        if computation.name in self._dissolved:
            return self._dissolved[computation.name]
        flat: dict[str, Instruction] = {}
        same: dict[str, str] = {}

        def add(inside: Computation, prefix: str, passed: tuple[str, ...] | None) -> None:
            for one in inside:
                name, operands = prefix + one.name, tuple(same.get(prefix + x, prefix + x) for x in one.operands)
                if one.opcode == "parameter" and passed is not None:
                    same[name] = passed[int(one.literal)]
                elif one.opcode in ("fusion", "async-start") and one.called:
                    called = self.computations[one.called[0][1]]
                    add(called, f"{name}/", operands)
                    root = f"{name}/{called.root.name}"
                    same[name] = same.get(root, root)
                elif one.opcode == "get-tuple-element" and flat[operands[0]].opcode == "tuple":
                    same[name] = flat[operands[0]].operands[one.integers("index")[0]]
                else:
                    flat[name] = copy.copy(one)
                    flat[name].name, flat[name].operands = name, operands

        add(computation, "", None)
        found = self._dissolved[computation.name] = Computation(computation.name)
        found.extend(flat.values())
        found.root = flat[same.get(computation.root.name, computation.root.name)]
        return found


def parse(text: str) -> Module:
    """Parses the program that `compiled.as_text()` shows.

    Raises:
        ValueError: the text is no HLO module.
    """
    header, computations, entry, current = "", {}, None, None
    for line in text.splitlines():
        if current is not None and (match := _INSTRUCTION.match(line)):
            root, name, result, opcode = match.groups()
            current.append(Instruction(name, opcode, result, line, match.end(), bool(root)))
        elif line.startswith("}"):
            current = None
        elif line.startswith("HloModule"):
            header = line
        elif header and not line.startswith(" ") and (match := _HEADER.match(line)):
            current = computations[match.group(2)] = Computation(match.group(2))
            entry = current if match.group(1) else entry
    if entry is None:
        raise ValueError(f"jdp.parse: the text has {len(text)} characters and no ENTRY computation; it must be an HLO "
                         f"module. Pass compiled.as_text().")  # fmt: skip
    return Module(header, computations, entry)


Shape = tuple[str, tuple[int, ...]]  # dtype and dimensions, as XLA names them: ("f32", (8, 128))
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<= ?]*)\](\{[^}]*\})?")


def nbytes(shape: Shape) -> int:
    """Returns the bytes of an array; types of less than a byte are packed, and a layout's padding is not counted."""
    dtype, dims = shape
    digits = re.search(r"\d+", dtype)  # f8e4m3fn has 8
    bits = int(digits.group()) if digits else 0 if dtype in ("token", "opaque") else 8  # pred
    return (math.prod(dims) * bits + 7) // 8


KINDS = tuple(
    "all-reduce reduce-scatter all-gather all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all optimization-barrier add-dependency domain "
    "partition-id replica-id".split()
)
_MOVES = frozenset(
    "copy reshape transpose convert broadcast iota slice dynamic-slice dynamic-update-slice concatenate pad "
    "reverse bitcast-convert send recv infeed outfeed".split()
)
_MARKS = frozenset(  # custom calls that only tell TPU's compiler something
    "AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart ConcatBitcast "
    "GatherScatterIndicesBitpacked Sharding".split()
)
# They return their operand, in another place or form.
PASS_ON = ("bitcast", "reshape", "copy", "convert", "transpose", "copy-start", "copy-done", "optimization-barrier")
CONTROL = ("while", "call", "conditional", "async-start")  # they run other computations


def is_work(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Returns True if a scheduled instruction computes something that takes time."""
    opcode = instruction.opcode
    if opcode in FREE or opcode in KINDS or opcode in _MOVES:
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


def target(instruction: Instruction) -> str:
    return (instruction.attribute("custom_call_target") or "").strip('"')


def _scalars(computation: Computation, instruction: Instruction) -> bool:
    """Returns True if all operands and results are single numbers: a counter, a learning rate."""
    around = [instruction, *(computation.by_name[name] for name in instruction.operands)]
    return all(math.prod(dims) <= 1 for i in around for _, dims in i.shapes)
