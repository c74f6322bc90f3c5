"""The processes agree on the program that all of them are about to run."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from .coordination import DesyncError
from .exchange import Exchange, by_value, exchange_of
from .places import limits
from .watch import watch

CONTAINERS = "containers"


def same_program(program: Any, devices: Iterable[Any], roots: tuple[str, ...]) -> Callable[..., Any]:
    """Returns the jitted function, which is compared with that of the other processes once for new shapes.

    Compared are the label, the versions, the order of the devices, the shapes and dtypes of the operands (`roots`
    names the arguments) and the StableHLO. The program is compiled before it runs, because the others wait in its
    first collective no longer than a time-out.
    """
    devices = tuple(devices)
    processes = tuple(sorted({d.process_index for d in devices}))
    seen: set[Any] = set()

    def make_ready(*args: Any, label: str = program.__name__, names: Sequence[str] | None = None) -> None:
        leaves, treedef = jax.tree.flatten(args)
        key = (treedef, *[getattr(x, "aval", type(x)) for x in leaves])
        if key not in seen:
            exchange = exchange_of(processes)
            with watch.preparing():
                lowered = program.lower(*args)
                _compare(lowered.as_text(), _operands(args, roots, names), devices, exchange, label)
                watch.compiling(True)
                lowered.compile()
                exchange.tell(f"{label} (compiled)", "", limits.compile)
            seen.add(key)

    @functools.wraps(program)
    def call(*args: Any, **names: Any) -> Any:
        make_ready(*args, **names)
        return program(*args)

    call.lower, call.make_ready = program.lower, make_ready  # type: ignore[attr-defined]
    return call


def _operands(args: Any, roots: tuple[str, ...], names: Sequence[str] | None) -> dict[str, str]:
    """Returns the dtype and shape of each operand, by its path or by the name given."""
    leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(args) if hasattr(x, "dtype")]
    paths = names or [roots[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in leaves]
    return {path: f"{x.dtype}{list(x.shape)}" for path, (_, x) in zip(paths, leaves, strict=True)}


def _compare(text: str, operands: dict[str, str], devices: Sequence[Any], exchange: Exchange, label: str) -> None:
    mine = {
        "versions": _versions(),
        "device order": " ".join(f"{d.platform}:{d.id}" for d in devices),
        "operands": _sha(json.dumps(operands)),
        "program": _sha(text),
    }
    entries = exchange.tell(f"{label} (a new program)", mine, limits.start)
    for what in mine:
        values = {process: entry[what] for process, entry in entries.items()}
        if len({*values.values()}) == 1:
            continue
        if what == "operands":
            found = _everybody(exchange, label, values, json.dumps(operands))
            detail = difference({p: json.loads(t) for p, t in found.items()}) or "their order"
        elif what == "program":
            detail = _first_line(_everybody(exchange, label, values, text))
        else:
            detail = by_value(values)
        raise DesyncError(
            f"jdp.{label}: the processes are about to run different things, which differ in the {what}: {detail}. "
            f"All processes run one program. Make the model, the loss and the optimizer alike on all of them."
        )


def difference(trees: dict[int, dict[str, str]]) -> str | None:
    """Returns the first path where the processes' trees differ, and what each has there; None if they are equal."""
    paths = dict.fromkeys(path for tree in trees.values() for path in tree)
    apart = [path for path in paths if len({tree.get(path) for tree in trees.values()}) > 1]
    apart.sort(key=lambda path: path == CONTAINERS)  # a path says more
    if not apart:
        return None
    more = f" ({len(apart) - 1} more differ)" if len(apart) > 1 else ""
    return f"{apart[0]}: {by_value({p: tree.get(apart[0], 'nothing') for p, tree in trees.items()})}{more}"


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _versions() -> str:
    return ", ".join([f"python {platform.python_version()}", *map(_version, ("jax", "jaxlib", "flax", "optax"))])


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} unknown"


_LONGEST = 2**19  # characters of a text that goes through the coordination service
_KINDS = 4  # of processes: so many texts are compared


def _everybody(exchange: Exchange, label: str, values: dict[int, Any], text: str) -> dict[int, str]:
    """Returns the text of each kind of process, sent by the first of its kind; all know already that they differ."""
    kinds: dict[Any, int] = {}
    for process, value in sorted(values.items()):
        if len(kinds) < _KINDS:
            kinds.setdefault(value, process)
    speaks = exchange.here in kinds.values()
    packed = base64.b64encode(zlib.compress(text.encode())).decode()[:_LONGEST] if speaks else ""
    told = exchange.tell(f"{label} (what differs)", packed, limits.step)
    texts = {
        value: zlib.decompressobj().decompress(base64.b64decode(told[process])).decode(errors="ignore")
        for value, process in kinds.items()
    }
    return {process: texts[value] for process, value in values.items() if value in texts}


def _first_line(texts: dict[int, str]) -> str:
    """Returns the first line of the programs that differs between processes, and of each from where it differs."""
    lines = {process: text.splitlines() for process, text in texts.items()}
    for number in range(max(map(len, lines.values()))):
        each = {p: (t[number].strip() if number < len(t) else "no such line") for p, t in lines.items()}
        if len({*each.values()}) > 1:
            cut = max(0, len(os.path.commonprefix([*each.values()])) - 60)
            shown = {p: "..." * (cut > 0) + line[cut : cut + 160] for p, line in each.items()}
            constant = any("stablehlo.constant" in line for line in each.values())
            kind = " (a constant, of the code or one that a function closes over)" if constant else ""
            return f"line {number + 1} of its StableHLO{kind}: {by_value(shown)}"
    return "its StableHLO, beyond what was compared line by line"
