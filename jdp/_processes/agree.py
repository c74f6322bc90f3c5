"""The processes agree on a batch: each has rows of its own, and all must know how many every replica gets."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax._src.core import trace_state_clean
from jax.sharding import Mesh

from .._core.processes import own_replicas, processes_of
from .._jax.coordination import DesyncError
from .exchange import Ticket, by_value, exchange_of, limits

Described = tuple[tuple[str, str], ...]
"""For each leaf its path, and its dtype and shape without the rows."""


class Pending(NamedTuple):
    """A batch that the others are being told of."""

    mesh: Mesh
    verb: str
    described: Described | None
    ticket: Ticket
    first: bool


def begin(
    mesh: Mesh, verb: str, sizes: Sequence[int], described: Described | None, failure: Exception | None = None
) -> Pending:
    """Tells the others the rows of this process's own replicas; `described` is None when it has run out of data.

    `failure` is what came instead of a batch: the others are not to wait for one.
    """
    exchange = exchange_of(processes_of(mesh))
    digest = None
    if described is not None:
        digest = _digest(described)
        if _is_new((exchange, digest)):
            exchange.publish(f"batch/{exchange.here}/{digest}", json.dumps(described))
    ticket = exchange.post(verb, [list(sizes), digest, _text(failure)])
    return Pending(mesh, verb, described, ticket, _is_new((exchange, verb, "call")))


class Agreed(NamedTuple):
    """What all processes know of a batch: the rows of every replica, and a digest of it for each that has data."""

    rows: tuple[int, ...]
    digests: dict[int, str]


def finish(pending: Pending) -> Agreed:
    """Waits for the other processes.

    Raises:
        DesyncError: the processes' batches differ, or one does not come to this call.
    """
    mesh, verb = pending.mesh, pending.verb
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
        raise DesyncError(_differing(verb, mesh, digests))
    rows = [0] * mesh.size
    for process, (sizes, _, _) in entries.items():
        for replica, size in zip(_replicas_of(mesh, process), sizes, strict=True):
            rows[replica] = size
    return Agreed(tuple(rows), digests)


def fail(mesh: Mesh, verb: str, failure: Exception) -> None:
    """Tells the others that this process has failed at a call, but for what fails in the tracing of all."""
    if not trace_state_clean():
        return
    try:
        finish(begin(mesh, verb, (), None, failure))
    except RuntimeError:  # a DesyncError too: its own is the one to raise
        pass


def _text(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"[:500]


def described_by_others(mesh: Mesh, agreed: Agreed) -> Described:
    """The batch of those that have one, for a process that never had any."""
    process, digest = next(iter(agreed.digests.items()))
    return _read(mesh, process, digest)


def _read(mesh: Mesh, process: int, digest: str) -> Described:
    text = exchange_of(processes_of(mesh)).read(f"batch/{process}/{digest}", limits.step)
    return tuple((path, shape) for path, shape in json.loads(text))


def _differing(verb: str, mesh: Mesh, digests: dict[int, str]) -> str:
    """Which leaf differs, and how."""
    what = difference({process: dict(_read(mesh, process, digest)) for process, digest in digests.items()})
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
def _digest(described: Described) -> str:
    return hashlib.sha256(repr(described).encode()).hexdigest()[:12]


_seen: set[Any] = set()


def _is_new(key: Any) -> bool:
    if len(_seen) > 10_000:  # Python values that change with every batch; what is told twice does no harm
        _seen.clear()
    new = key not in _seen
    _seen.add(key)
    return new


@functools.cache
def _replicas_of(mesh: Mesh, process: int) -> tuple[int, ...]:
    return tuple(i for i, d in enumerate(mesh.devices.flat) if d.process_index == process)


def alike(mesh: Mesh, sizes: Sequence[int]) -> tuple[int, ...]:
    """The rows of every replica if all processes have as many as this one."""
    rows = [0] * mesh.size
    for process in processes_of(mesh):
        for replica, size in zip(_replicas_of(mesh, process), sizes, strict=False):
            rows[replica] = size
    return tuple(rows)


def own_sizes(mesh: Mesh, sizes: Sequence[int]) -> tuple[int, ...]:
    """Of the rows of every replica those of this process's own."""
    return tuple(sizes[i] for i in own_replicas(mesh))
