"""The processes agree on the rows of a batch, and on the program that all of them are about to run."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jax.private import trace_state_clean
from .coordination import DesyncError
from .exchange import Call, Exchange, by_value, exchange_of, limits

Outline = tuple[tuple[str, str], ...]
"""For each leaf its path, and its dtype and shape without the rows."""

_Words = tuple[int, ...]
_NO_BATCH, _NEVER_A_BATCH, _FAILED = (0, 0), (0, 1), (0, 2)  # in place of the digest of a batch


class Pending(NamedTuple):
    """A batch that the others are being told of."""

    call: Call
    outline: Outline | None
    failure: Exception | None
    group: _Group
    gathered: Any  # a jax.Array, on all devices
    seconds: float  # that the others may take


class Agreed(NamedTuple):
    """What all processes know of a batch."""

    sizes: tuple[int, ...]  # the rows of each replica
    is_over: bool  # nobody has a batch any more
    outline: Outline = ()  # the others' batch, where this process never had one


def begin(
    mesh: Mesh,
    verb: str,
    sizes: Sequence[int],
    outline: Outline | None,
    failure: Exception | None = None,
    never: bool = False,
) -> Pending:
    """Tells the other processes of a batch, in a collective that it does not wait for.

    Args:
        mesh: the devices of all replicas.
        verb: the call, by its name in errors.
        sizes: the rows of each replica of this process.
        outline: what the batch is; None where this process has run out of data.
        failure: what came instead of a batch: the others are not to wait for one.
        never: this process never had a batch, and is to be told what the others' is.
    """
    group = _group(mesh)
    if group.last is None:
        group.start(verb)
    call = group.exchange.next_call(verb)
    batch = _FAILED if failure is not None else _digest(outline) if outline else _NEVER_A_BATCH if never else _NO_BATCH
    rows = sizes or [0] * len(group.own)
    gathered = group.gather(tuple((*_name(verb), *batch, size) for size in rows))
    # What comes before the first call of a kind (data that is loaded, a model that is made) takes one process longer
    # than another; what comes between two steps does not.
    seconds = limits.start if _is_new((group.exchange, verb)) else limits.step
    return Pending(call, outline, failure, group, gathered, seconds)


def finish(pending: Pending) -> Agreed:
    """Waits for the other processes.

    Raises:
        DesyncError: the processes' batches differ, or one does not come to this call.
    """
    call, seconds, here = pending.call, pending.seconds, pending.call.exchange.here
    words = _read(pending)
    sizes = tuple(words[:, -2].tolist())
    if words[0, 2] and (words[:, :4] == words[0, :4]).all():  # the same call, and the same batch but for its rows
        return Agreed(sizes, False)
    if (words[:, :2] != words[0, :2]).any():
        call.tell("", seconds)  # which raises: to the others it is another call
    batches = {p: tuple(words[replicas[0], 2:4].tolist()) for p, replicas in pending.group.replicas.items()}
    if _FAILED in batches.values():
        failure = pending.failure
        texts = call.tell("" if failure is None else f"{type(failure).__name__}: {failure}"[:500], seconds)
        process = next(p for p, batch in batches.items() if batch == _FAILED)
        raise DesyncError(
            f"jdp.{call.what}: process {process} has no batch, but an error ({texts[process]}); all processes make the "
            f"same calls. Its own output says more."
        )
    having = [p for p, batch in batches.items() if batch not in (_NO_BATCH, _NEVER_A_BATCH)]
    if len({batches[p] for p in having}) > 1:
        told = call.tell(pending.outline or "", seconds)
        what = difference({p: dict(told[p]) for p in having})
        raise DesyncError(
            f"jdp.{call.what}: the processes' batches differ: {what or 'in their order'}; the number of rows (*) may "
            f"differ between processes, nothing else. Pass arrays of one shape and dtype."
        )
    outline: Outline = ()
    if having and _NEVER_A_BATCH in batches.values():
        if here == having[0]:
            call.leave(pending.outline)
        if batches[here] == _NEVER_A_BATCH:
            outline = tuple((path, what) for path, what in call.told_by(having[:1], seconds)[having[0]])
    return Agreed(sizes, not having, outline)


def _read(pending: Pending) -> np.ndarray:
    """The words of all replicas, once they are there."""
    call = pending.call

    def is_there(seconds: float) -> bool:
        # Not block_until_ready, in which no signal is heard, and nobody looks for those who do not come.
        began = time.monotonic()
        while not pending.gathered.is_ready():
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            time.sleep(min(_NAP, waited / 4))
        return True

    def all_are_here(seconds: float) -> bool:
        time.sleep(seconds / 4)
        return {*call.entries()} >= {*call.exchange.processes}

    call.wait(is_there, pending.seconds)
    try:
        return np.asarray(pending.gathered)[pending.group.places]
    except jax.errors.JaxRuntimeError as error:  # the connection to one that has died, or does not come
        call.leave()
        call.wait(all_are_here, 0)
        raise DesyncError(
            f"jdp.{call.what}: the processes cannot reach each other ({str(error).splitlines()[0]}), and all have come "
            f"to this call. Look at the network between their machines."
        ) from error


_NAP = 1e-3  # seconds between two looks


def fail(mesh: Mesh, verb: str, failure: Exception) -> None:
    """Tells the others that this process has failed at a call, but for what fails in the tracing of all."""
    if not trace_state_clean():
        return
    try:
        finish(begin(mesh, verb, (), None, failure))
    except RuntimeError:  # a DesyncError too: its own is the one to raise
        pass


class _Group:
    """The processes of a mesh, and the gather by which they tell each other some words of each replica."""

    def __init__(self, mesh: Mesh) -> None:
        devices = [*mesh.devices.flat]
        of = [d.process_index for d in devices]
        self.replicas = {process: [i for i, p in enumerate(of) if p == process] for process in sorted({*of})}
        self.exchange = exchange_of(tuple(self.replicas))
        self.own = self.replicas[self.exchange.here]
        self.last: Any = None  # what was gathered last
        # Not in the mesh's order: for each order Gloo has connections of its own. So who makes another call is waited
        # for; on the same connections its bytes would come in the place of these, and end both processes.
        self._order = np.roll(np.arange(len(devices)), 1 if devices[0].platform == "cpu" else 0)
        self.places = np.argsort(self._order)  # of the mesh's replicas, in what was gathered
        self._mesh = Mesh(np.array(devices)[self._order], ("replicas",))
        self._described = " ".join(f"{d.platform}:{d.id}" for d in devices)
        cut, whole = PartitionSpec("replicas"), PartitionSpec()
        mapped = jax.shard_map(_gather, mesh=self._mesh, in_specs=(cut, whole), out_specs=whole, check_vma=False)
        self._program = jax.jit(mapped)
        self._placed = functools.lru_cache(maxsize=16)(self._place)

    def start(self, verb: str) -> None:
        """Compares the devices, before the first gather."""
        found = self.exchange.tell(f"{verb} (its first call)", self._described, limits.start)
        if len({*found.values()}) > 1:
            raise DesyncError(
                f"jdp.{verb}: the processes name different devices: {by_value(found)}; one call runs on one list of "
                f"devices. Pass the same devices, in the same order, on all processes."
            )
        self.last = self._array(np.zeros((len(self._order), 6), np.uint32), PartitionSpec())

    def gather(self, own: tuple[_Words, ...]) -> Any:
        """The words of all replicas (`places` says where), and after each the number of this gather."""
        self.last = self._program(self._placed(own), self.last)
        return self.last

    def _place(self, own: tuple[_Words, ...]) -> jax.Array:
        words = np.zeros((len(self._order), len(own[0])), np.uint32)
        words[self.own] = own
        return self._array(words[self._order], PartitionSpec("replicas"))

    def _array(self, host: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(host.shape, NamedSharding(self._mesh, spec), lambda index: host[index])


def _gather(words: jax.Array, before: jax.Array) -> jax.Array:
    # The number comes out of the gather before: so they run in the order of the calls, whatever else the devices do.
    number = before[:1, -1:] + 1
    return jax.lax.all_gather(jnp.concatenate([words, number], axis=1), "replicas", tiled=True)


@functools.cache
def _group(mesh: Mesh) -> _Group:
    return _Group(mesh)


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


def _name(verb: str) -> _Words:
    return _digest(((verb, ""),))


@functools.lru_cache(maxsize=256)
def _digest(outline: Outline) -> _Words:
    """64 bits, as two words of which the first is not 0."""
    first, second = np.frombuffer(hashlib.sha256(repr(outline).encode()).digest()[:8], np.uint32).tolist()
    return first | 1, second


_seen: set[Any] = set()


def _is_new(key: Any) -> bool:
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
            exchange.tell(f"{label} (compiled)", "", limits.compile)
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
_KINDS = 4  # of processes, whose texts are compared


def _everybody(exchange: Exchange, label: str, values: dict[int, Any], text: str) -> dict[int, str]:
    """A text of each kind of process, by the first of its kind; all processes know by now that they differ."""
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
    """The first line of the programs that is not the same everywhere."""
    lines = {process: text.splitlines() for process, text in texts.items()}
    for number in range(max(map(len, lines.values()))):
        each = {p: (t[number].strip() if number < len(t) else "no such line") for p, t in lines.items()}
        if len({*each.values()}) > 1:
            return f"line {number + 1} of its StableHLO: {by_value({p: t[:160] for p, t in each.items()})}"
    return "its StableHLO, beyond what was compared line by line"
