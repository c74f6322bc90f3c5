"""The processes agree on the rows of a batch, and on the program that all of them are about to run."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import platform
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax

from .._jax.private import trace_state_clean
from .coordination import DesyncError
from .exchange import Exchange, Ticket, by_value, exchange_of, limits

Outline = tuple[tuple[str, str], ...]
"""For each leaf its path, and its dtype and shape without the rows."""


class Pending(NamedTuple):
    """A batch that the others are being told of."""

    processes: tuple[int, ...]
    verb: str
    outline: Outline | None
    ticket: Ticket
    first: bool


def begin(
    processes: tuple[int, ...],
    verb: str,
    sizes: Sequence[int],
    outline: Outline | None,
    failure: Exception | None = None,
) -> Pending:
    """Tells the others the rows of this process's own replicas; `outline` is None when it has run out of data.

    `failure` is what came instead of a batch: the others are not to wait for one.
    """
    exchange = exchange_of(processes)
    digest = None
    if outline is not None:
        digest = _digest(outline)
        exchange.publish_once(f"batch/{exchange.here}/{digest}", json.dumps(outline))
    ticket = exchange.post(verb, [list(sizes), digest, _text(failure)])
    return Pending(processes, verb, outline, ticket, _is_new((exchange, verb, "call")))


class Agreed(NamedTuple):
    """What all processes know of a batch: each one's rows, and a digest of it for those that have data."""

    rows: dict[int, list[int]]
    digests: dict[int, str]


def finish(pending: Pending) -> Agreed:
    """Waits for the other processes.

    Raises:
        DesyncError: the processes' batches differ, or one does not come to this call.
    """
    verb = pending.verb
    # What comes before the first call of a kind (data that is loaded, a model that is made) takes one process longer
    # than another; what comes between two steps does not.
    entries = pending.ticket.result(limits.start if pending.first else limits.step)
    failures = {process: failure for process, (_, _, failure) in entries.items() if failure}
    if failures:
        process, failure = next(iter(failures.items()))
        raise DesyncError(
            f"jdp.{verb}: process {process} has no batch, but an error ({failure}); all processes make the same calls. "
            f"Its own output says more."
        )
    digests = {process: digest for process, (_, digest, _) in entries.items() if digest is not None}
    if len({*digests.values()}) > 1:
        raise DesyncError(_differing(verb, pending.processes, digests))
    return Agreed({process: sizes for process, (sizes, _, _) in entries.items()}, digests)


def fail(processes: tuple[int, ...], verb: str, failure: Exception) -> None:
    """Tells the others that this process has failed at a call, but for what fails in the tracing of all."""
    if not trace_state_clean():
        return
    try:
        finish(begin(processes, verb, (), None, failure))
    except RuntimeError:  # a DesyncError too: its own is the one to raise
        pass


def _text(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"[:500]


def outline_of_others(processes: tuple[int, ...], agreed: Agreed) -> Outline:
    """The batch of those that have one, for a process that never had any."""
    process, digest = next(iter(agreed.digests.items()))
    return _read(processes, process, digest)


def _read(processes: tuple[int, ...], process: int, digest: str) -> Outline:
    text = exchange_of(processes).read(f"batch/{process}/{digest}", limits.step)
    return tuple((path, shape) for path, shape in json.loads(text))


def _differing(verb: str, processes: tuple[int, ...], digests: dict[int, str]) -> str:
    """Which leaf differs, and how."""
    what = difference({process: dict(_read(processes, process, digest)) for process, digest in digests.items()})
    return (
        f"jdp.{verb}: the processes' batches differ: {what or 'in their order'}; the number of rows (*) may differ "
        f"between processes, nothing else. Pass arrays of one shape and dtype."
    )


def difference(trees: dict[int, dict[str, str]]) -> str | None:
    """The first path at which the processes' trees differ, and who has what there; None if nowhere."""
    paths = dict.fromkeys(path for tree in trees.values() for path in tree)
    apart = [path for path in paths if len({tree.get(path) for tree in trees.values()}) > 1]
    apart.sort(key=lambda path: path == CONTAINERS)  # a path says more
    if not apart:
        return None
    more = f" ({len(apart) - 1} more differ)" if len(apart) > 1 else ""
    return f"{apart[0]}: {by_value({p: tree.get(apart[0], 'nothing') for p, tree in trees.items()})}{more}"


CONTAINERS = "containers"


@functools.lru_cache(maxsize=256)
def _digest(outline: Outline) -> str:
    return hashlib.sha256(repr(outline).encode()).hexdigest()[:12]


_seen: set[Any] = set()


def _is_new(key: Any) -> bool:
    if len(_seen) > 10_000:  # Python values that change with every batch; what is told twice does no harm
        _seen.clear()
    new = key not in _seen
    _seen.add(key)
    return new


def same_program(program: Any, devices: Iterable[Any], roots: tuple[str, ...]) -> Callable[..., Any]:
    """The jitted function, compared with that of the other processes once for each shapes of its arguments.

    Compared are the label, the versions, the order of the devices, the shapes and dtypes of the operands (`roots`
    names the arguments) and the StableHLO. Compiled before it runs, for the others wait in its first collective no
    longer than a time-out.
    """
    devices = tuple(devices)
    processes = tuple(sorted({d.process_index for d in devices}))
    seen: set[Any] = set()

    def make_ready(*args: Any, label: str = program.__name__, names: Sequence[str] | None = None) -> None:
        leaves, treedef = jax.tree.flatten(args)
        key = (treedef, *[getattr(x, "aval", type(x)) for x in leaves])
        if key not in seen:
            exchange = exchange_of(processes)
            lowered = program.lower(*args)
            _compare(lowered.as_text(), _operands(args, roots, names), devices, exchange, label)
            lowered.compile()
            exchange.post(f"{label} (compiled)", None).result(limits.compile)
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


def _compare(
    text: str, operands: dict[str, str], devices: Sequence[Any], exchange: Exchange, label: str
) -> None:
    mine = {
        "versions": _versions(),
        "device order": " ".join(f"{d.platform}:{d.id}" for d in devices),
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
