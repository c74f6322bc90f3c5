"""Before a program first runs over several processes, they compare it: another one anywhere would hang them all."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import platform
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.sharding import Mesh

from .._core.processes import processes_of
from .._jax.coordination import DesyncError
from .agree import difference
from .exchange import Exchange, by_value, exchange_of, limits


def same_program(program: Any, mesh: Mesh, roots: tuple[str, ...]) -> Callable[..., Any]:
    """The jitted function, compared with that of the other processes once for each shapes of its arguments.

    Compared are the label, the versions, the order of the devices, the shapes and dtypes of the operands (`roots`
    names the arguments) and the StableHLO. Compiled before it runs, for the others wait in its first collective no
    longer than a time-out.
    """
    seen: set[Any] = set()

    def make_ready(*args: Any, label: str = program.__name__, names: Sequence[str] | None = None) -> None:
        leaves, treedef = jax.tree.flatten(args)
        key = (treedef, *[getattr(x, "aval", type(x)) for x in leaves])
        if key not in seen:
            lowered = program.lower(*args)
            _compare(lowered.as_text(), _operands(args, roots, names), mesh, label)
            lowered.compile()
            exchange_of(processes_of(mesh)).post(f"{label} (compiled)", None).result(limits.compile)
            seen.add(key)

    @functools.wraps(program)
    def call(*args: Any, **names: Any) -> Any:
        make_ready(*args, **names)
        return program(*args)

    call.lower, call.make_ready = program.lower, make_ready  # type: ignore[attr-defined]
    return call


def _operands(args: Any, roots: tuple[str, ...], names: Sequence[str] | None) -> dict[str, str]:
    """The dtype and shape of each operand, by its path or by the name given."""
    leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(args) if hasattr(x, "dtype")]
    paths = names or [roots[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in leaves]
    return {path: f"{x.dtype}{list(x.shape)}" for path, (_, x) in zip(paths, leaves, strict=True)}


def _compare(text: str, operands: dict[str, str], mesh: Mesh, label: str) -> None:
    exchange = exchange_of(processes_of(mesh))
    mine = {
        "versions": _versions(),
        "device order": " ".join(f"{d.platform}:{d.id}" for d in mesh.devices.flat),
        "operands": _sha(json.dumps(operands)),
        "program": _sha(text),
    }
    entries = exchange.post(f"{label} (a new program)", mine).result(limits.start)
    for what in mine:
        values = {process: entry[what] for process, entry in entries.items()}
        if len({*values.values()}) == 1:
            continue
        if what == "operands":
            found = _everybody(exchange, values, "operands", json.dumps(operands))
            detail = difference({p: json.loads(t) for p, t in found.items()}) or "their order"
        elif what == "program":
            detail = _first_line(_everybody(exchange, values, "program", text))
        else:
            detail = by_value(values)
        raise DesyncError(
            f"jdp.{label}: the processes are about to run different things, which differ in the {what}: {detail}. "
            f"All processes run one program. Make the model, the loss and the optimizer alike on all of them."
        )


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


_LONGEST = 2**21  # characters that go through the coordination service


def _everybody(exchange: Exchange, values: dict[int, Any], name: str, text: str) -> dict[int, str]:
    """A text of each kind of process, by the first of its kind; all processes know by now that they differ."""
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    exchange.publish(f"{name}/{exchange.here}", packed[:_LONGEST])
    found: dict[int, str] = {}
    for process, value in sorted(values.items()):
        if value not in [values[p] for p in found]:
            packed = exchange.read(f"{name}/{process}", limits.step)
            found[process] = zlib.decompressobj().decompress(base64.b64decode(packed)).decode(errors="ignore")
    kinds = {values[p]: t for p, t in found.items()}
    return {process: kinds[value] for process, value in values.items()}


def _first_line(texts: dict[int, str]) -> str:
    """The first line of the programs that is not the same everywhere."""
    lines = {process: text.splitlines() for process, text in texts.items()}
    for number in range(max(map(len, lines.values()))):
        each = {p: (t[number].strip() if number < len(t) else "no such line") for p, t in lines.items()}
        if len({*each.values()}) > 1:
            return f"line {number + 1} of its StableHLO: {by_value({p: t[:160] for p, t in each.items()})}"
    return "its StableHLO, beyond what was compared line by line"
