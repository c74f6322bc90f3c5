"""Recovery, an experiment: where a process dies, the others learn at one place in their programs who is left.

JAX lets the others live (`jax_enable_recoverability`) and says who does (`alive`, for which all meet). What they
meet at here is the end of each training step, and any exchange that has failed: so all are told at the same batch.
A process that was started again says so in the coordination service; process 0 names a meeting after which it is one
of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax

from .._jax.private import GLOO_KEYS
from .coordination import DesyncError, alive, delete, ended, get, keys, now, own_process, process_count, put, under
from .exchange import Exchange, exchange_of
from .members import members
from .watch import limits, named, watch

T = TypeVar("T")


class ProcessesChanged(RuntimeError):
    """A process has died, or has come back, and the others go on: an experiment, `initialize(recover=True)`.

    Raised at the same batch in all that are there: by a training step, which has then changed nothing, or by the loop
    over `dp.batches`; in a process that has come back by `jdp.distributed.sync`. The wrapper, made again over
    `devices`, takes the state that this process has, and the same batch again.

    Attributes:
        lost: the processes that have died.
        joined: those that have come back.

    Example:
        >>> import jax, jdp
        >>> changed = jdp.distributed.ProcessesChanged("process 2 has died", jax.devices()[:3], lost=[2])
        >>> changed.lost, len(changed.devices), len(changed.devices_for(8))
        ((2,), 3, 2)
    """

    __module__ = "jdp.distributed"

    def __init__(
        self, text: str, devices: Sequence[Any], lost: Sequence[int] = (), joined: Sequence[int] = ()
    ) -> None:
        super().__init__(text)
        self.lost: tuple[int, ...] = tuple(lost)
        self.joined: tuple[int, ...] = tuple(joined)
        self._devices = tuple(devices)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of the processes that are there, in an order that was not used before."""
        return self._in_order(self._devices)

    def devices_for(self, replicas: int) -> tuple[Any, ...]:
        """The most of the devices that divide so many replicas, for `jdp.DataParallel(..., replicas=replicas)`.

        They are taken from all processes alike. A process of which none is taken ends here, with exit code 0.
        """
        each: dict[int, list[Any]] = {}
        for device in self._devices:
            each.setdefault(device.process_index, []).append(device)
        turns = [(k, process) for process, own in each.items() for k in range(len(own))]
        most = next(n for n in range(len(turns), 0, -1) if replicas % n == 0)
        taken = sorted(turns, key=lambda turn: (turn[0], turn[1]))[:most]
        if own_process() not in {process for _, process in taken}:
            said = f"{most} devices have the {replicas} replicas, and none of them is its own"
            _end(f"process {own_process()} is not needed: {said}")
        return self._in_order([each[process][k] for process, k in sorted((process, k) for k, process in taken)])

    def _in_order(self, devices: Sequence[Any]) -> tuple[Any, ...]:
        found = members.fresh(devices)
        if found is None:
            raise RuntimeError(
                f"jdp.distributed.ProcessesChanged: no order of {[*devices]} is left; Gloo keeps the connections to a "
                f"process that has died for each order that was used. Start the job again."
            ) from self
        return found


def _end(why: str) -> NoReturn:
    """Ends this process well, which the others do not wait for."""
    print(f"jdp: {why}; it ends", file=sys.stderr)
    sys.exit(0)


def set_up(timeout: float) -> int:
    """Before JAX starts: nobody dies with another. Gives the seconds for which one waits for a sum, or a heartbeat."""
    seconds = max(1, int(timeout))
    jax.config.update("jax_enable_recoverability", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={seconds}".strip()
    limits.recovers, limits.step = True, max(timeout, _PATIENCE)
    return seconds


_LAST = 60.0  # seconds
_PATIENCE = 12.0  # seconds for which jdp's own watch waits at least: JAX is to find out first who has died
_FLAG = "--xla_cpu_collective_timeout_seconds"


def in_all(exchange: Exchange | None, program: Callable[..., T]) -> Callable[..., T]:
    """The program as it is; with recovery it ends when it has run in all processes, or has changed nothing in any."""
    if not limits.recovers:
        return program
    if members.waits:
        raise RuntimeError(
            f"jdp.{program.__name__}: process {own_process()} was started again, and the others have not let it in; "
            f"alone it would do their work a second time. Call jdp.distributed.sync(state, devices) before the first "
            f"step."
        )
    if members.joined:
        raise RuntimeError(
            f"jdp.{program.__name__}: {named(members.joined)} came back, and did not get the state of the others; all "
            f"would go on with different ones. Call jdp.distributed.sync(state, devices) after each ProcessesChanged, "
            f"before the next step."
        )
    if exchange is None:
        if members.there != (own_process(),):  # a program of this process alone, beside that of all
            return program
        exchange = exchange_of(members.there)
    meets = exchange

    def run(*args: Any) -> T:
        try:
            out = jax.block_until_ready(program(*args))
        except Exception as error:
            raise_if_changed(meets, program.__name__, error)
            raise
        meet(meets, program.__name__)
        return out

    return run


def raise_if_changed(exchange: Exchange, what: str, error: Exception) -> None:
    """Raises `ProcessesChanged` where an error comes from the death of a process."""
    if limits.recovers and not isinstance(error, ProcessesChanged):
        meet(exchange, what, error)


class _Meeting:
    """What the watch sees of it: like an output of a program."""

    nbytes, is_over = 0, False

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.is_over


_MEMBERS = "jdp/members"
_BORN = "jdp/born/"
_BACK = "jdp/back/"
_LET_IN = "jdp/let_in/"
_OVER = "jdp/over"


def meet(exchange: Exchange, what: str, error: Exception | None = None) -> None:
    """Waits for all that live; raises `ProcessesChanged` where one of them is missing, or one more is there."""
    meeting: Any = _Meeting()
    exchange.come_to(f"{what} (who is there)")
    exchange.dispatched(meeting)
    members.meetings += 1
    if error is not None:
        exchange.failed()
    if own_process() == 0:
        _invite(exchange.processes)
    try:
        found = alive(exchange.processes)
    finally:
        meeting.is_over = True
    if not members.lives:  # the first meeting of all
        members.lives = {int(key.removeprefix(_BORN)): int(life) for key, life in under(_BORN)}
    gone = {p for p in exchange.processes if p not in found or found[p] != members.lives.get(p)}
    joined = _invited()
    if not (gone or joined):
        return
    watch.forget(gone)
    members.lives |= joined
    members.there = tuple(sorted(({*exchange.processes} - gone) | {*joined}))
    members.joined = tuple(sorted(({*members.joined} - gone) | {*joined}))
    members.generation, members.meetings = members.generation + 1, 0
    if own_process() == 0:
        _delete_addresses(gone)
        put(_MEMBERS, json.dumps(members.there))
        for process, life in joined.items():
            delete(f"{_BACK}{process}")
            put(_entry(process, life), json.dumps(members.to_tell()))
    raise _changed(what, gone, [*joined]) from error


def _delete_addresses(gone: set[int]) -> None:
    """Of the devices that each of these has had for itself: it may come back, and would not find its own."""
    found = keys(GLOO_KEYS)
    for process in gone:
        own = {str(d.id) for d in jax.devices() if d.process_index == process}
        for key in found:
            if own >= {*key.removeprefix(GLOO_KEYS).split("/")[0].split(",")}:
                delete(key)


def _changed(what: str, gone: set[int], joined: Sequence[int]) -> ProcessesChanged:
    died = f"{named(sorted(gone))} {'have' if len(gone) > 1 else 'has'} died" if gone else ""
    back = f"{named(joined)} {'have' if len(joined) > 1 else 'has'} come back" if joined else ""
    return ProcessesChanged(
        f"jdp.{what}: {' and '.join(filter(None, [died, back]))}; {named(members.there)} can go on with the same "
        f"batch. Catch jdp.distributed.ProcessesChanged, and make the wrapper again over its devices.",
        [d for d in jax.devices() if d.process_index in members.there], sorted(gone), joined,
    )


def _invite(processes: tuple[int, ...]) -> None:
    """Process 0 names this meeting to all, where others wait to be let in; each generation does so once."""
    waiting = {int(key.removeprefix(_BACK)): int(life) for key, life in under(_BACK)}
    waiting = {process: life for process, life in waiting.items() if process not in processes}
    if not waiting or now(f"{_LET_IN}{members.generation}") is not None:
        return
    if members.have_place_for([d for d in jax.devices() if d.process_index in {*processes, *waiting}]):
        put(f"{_LET_IN}{members.generation}", json.dumps([members.meetings, waiting]))
        return
    for process, life in waiting.items():
        delete(f"{_BACK}{process}")
        put(_entry(process, life), "null")


def _invited() -> dict[int, int]:
    """Who is one of the others from this meeting on, and in which of its lives."""
    found = now(f"{_LET_IN}{members.generation}")
    meeting, waiting = json.loads(found) if found else (None, {})
    return {int(process): life for process, life in waiting.items()} if meeting == members.meetings else {}


def _entry(process: int, life: int) -> str:
    return f"jdp/entry/{process}/{life}"


def begin() -> None:
    """This process has joined the job: for the first time, or again, where it had died."""
    if not limits.recovers:
        return
    here = own_process()
    members.life = alive([here])[here]
    if now(f"{_BORN}{here}") is None:
        put(f"{_BORN}{here}", str(members.life))
        if here == 0:
            put(_MEMBERS, json.dumps([*range(process_count())]))
        return
    members.waits = True
    with _in_time():
        _be_missed()


def _be_missed() -> None:
    """Waits until the others know that this process had died."""

    def join() -> None:
        with contextlib.suppress(DesyncError):
            alive(_members())

    time.sleep(_SEEN)
    if own_process() in _members():
        # They wait for all that live, so for this one, too; and see there that it is another.
        threading.Thread(target=join, name="jdp-is-missed", daemon=True).start()
    while own_process() in _members():
        time.sleep(_SEEN / 4)
        leave_if_over()


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Ends this process well where the job ends before it is one of it again."""
    try:
        yield
    except DesyncError:  # process 0, which keeps the keys, has gone
        _leave()


def leave_if_over() -> None:
    """The same, wherever this process is; a thread asks each second."""
    if members.waits and now(_OVER) is not None:
        _leave()


def _leave() -> NoReturn:
    print(f"jdp: process {own_process()} was started again, and the job has ended without it", file=sys.stderr)
    os._exit(0)  # a thread may be waiting in JAX's client


_SEEN = 1.0  # seconds after a meeting in which process 0 says who was there


def _members() -> list[int]:
    return json.loads(now(_MEMBERS) or "[]")


def enter() -> NoReturn:
    """Waits until the others let this process in, and raises the `ProcessesChanged` that they get there.

    Raises:
        SystemExit: with code 0; there is no place any more.
    """
    here, life, entered = own_process(), members.life, None
    with _in_time():
        put(f"{_BACK}{here}", str(life))
        while entered is None:
            entered = get(_entry(here, life), _SEEN)
    if entered == "null":
        _end(f"process {here} was started again, and Gloo has no order of devices left in which it could be reached")
    members.hear(json.loads(entered))
    raise _changed("distributed.sync", set(), members.joined)


def stay() -> None:
    """Has process 0 leave last: JAX aborts who leaves after it."""
    if not limits.recovers or own_process() != 0:
        return
    with contextlib.suppress(DesyncError):
        put(_OVER, "")
    end = time.monotonic() + _LAST
    while (here := watch.running() - ended()) and time.monotonic() < end:
        time.sleep(0.1)
    if not here:
        with contextlib.suppress(DesyncError):
            alive(range(process_count()))  # who has left, JAX knows a moment later
