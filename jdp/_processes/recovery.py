"""Recovery, an experiment: where a process dies, the others learn at one place in their programs who is left.

JAX lets the others live (`jax_enable_recoverability`) and says who does (`live_devices`, at which all meet). What they
meet at here is the end of each training step, and any exchange that has failed: so all are told at the same batch.
A process that was started again says so in the coordination service; process 0 names a meeting after which it is one
of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
from jax.experimental.multihost_utils import ProcessFailureError, live_devices

from .coordination import DesyncError, client, delete, ended, get, now, own_process, process_count, put, under
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
        self.lost, self.joined = tuple(lost), tuple(joined)
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
            f"alone it would do their work a second time. Call jdp.distributed.sync(state, dp) before the first step."
        )
    if members.joined:
        raise RuntimeError(
            f"jdp.{program.__name__}: {named(members.joined)} came back, and did not get the state of the others; all "
            f"would go on with different ones. Call jdp.distributed.sync(state, dp) after each ProcessesChanged, before "
            f"the next step."
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
        _meet(meets, program.__name__)
        return out

    return run


def raise_if_changed(exchange: Exchange, what: str, error: Exception) -> None:
    """Raises `ProcessesChanged` where an error comes from the death of a process."""
    if limits.recovers and not isinstance(error, ProcessesChanged):
        _meet(exchange, what, error)


class _Meeting:
    """What the watch sees of it: like an output of a program."""

    nbytes, is_over = 0, False

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.is_over


_members = "jdp/members"
_let_in = "jdp/let_in/"
_back = "jdp/back/"


def _meet(exchange: Exchange, what: str, error: Exception | None = None) -> None:
    """Waits for all that live; raises `ProcessesChanged` where one of them is missing, or one more is there."""
    devices = [d for d in jax.devices() if d.process_index in exchange.processes]
    meeting: Any = _Meeting()
    exchange.come_to(f"{what} (who is there)")
    exchange.dispatched(meeting)
    members.meetings += 1
    if own_process() == 0:
        _invite(exchange.processes, devices)
    gone: set[int] = set()
    try:
        with _live(exchange)(devices) as before:  # those of the last meeting
            gone = {*exchange.processes} - {d.process_index for d in before}
    except ProcessFailureError as failure:
        gone |= {d.process_index for d in failure.failed_devices} & {*exchange.processes}
    finally:
        meeting.is_over = True
    joined = _invited()
    if not (gone or joined):
        return
    watch.forget(gone)
    there = ({*exchange.processes} - gone) | {*joined}
    members.joined = tuple(sorted(({*members.joined} - gone) | {*joined}))
    members.generation, members.meetings = members.generation + 1, 0
    members.there = tuple(sorted(there))
    if own_process() == 0:
        put(_members, json.dumps(members.there))
        entered = [members.generation, members.there, members.joined, sorted(members.used)]
        for process, life in joined.items():
            delete(f"{_back}{process}")
            put(_entry(process, life), json.dumps(entered))
    raise _changed(what, gone, [*joined]) from error


def _changed(what: str, gone: set[int], joined: Sequence[int]) -> ProcessesChanged:
    died = f"{named(sorted(gone))} {'have' if len(gone) > 1 else 'has'} died" if gone else ""
    back = f"{named(joined)} {'have' if len(joined) > 1 else 'has'} come back" if joined else ""
    return ProcessesChanged(
        f"jdp.{what}: {' and '.join(filter(None, [died, back]))}; {named(members.there)} can go on with the same "
        f"batch. Catch jdp.distributed.ProcessesChanged, and make the wrapper again over its devices.",
        [d for d in jax.devices() if d.process_index in members.there], sorted(gone), joined,
    )


@functools.cache
def _live(exchange: Exchange) -> Any:
    """JAX's `live_devices`, which compares with the meeting before: one for those that meet in a generation."""
    return type(live_devices)()


def _invite(processes: tuple[int, ...], devices: list[Any]) -> None:
    """Process 0 names this meeting to all, where others wait to be let in; each generation does so once."""
    waiting = {int(key.removeprefix(_back)): int(life) for key, life in under(_back)}
    waiting = {process: life for process, life in waiting.items() if process not in processes}
    if not waiting or now(f"{_let_in}{members.generation}") is not None:
        return
    every = devices + [d for d in jax.devices() if d.process_index in waiting]
    if members.has_place_for(every):
        put(f"{_let_in}{members.generation}", json.dumps([members.meetings, waiting]))
        return
    for process, life in waiting.items():
        delete(f"{_back}{process}")
        put(_entry(process, life), "null")


def _invited() -> dict[int, int]:
    """Who is one of the others from this meeting on, and in which of its lives."""
    found = now(f"{_let_in}{members.generation}")
    meeting, waiting = json.loads(found) if found else (None, {})
    return {int(process): life for process, life in waiting.items()} if meeting == members.meetings else {}


def _entry(process: int, life: int) -> str:
    return f"jdp/entry/{process}/{life}"


def begin() -> None:
    """This process has joined the job: for the first time, or again, where it had died."""
    if not limits.recovers:
        return
    here = own_process()
    before = now(f"jdp/life/{here}")
    members.life = 0 if before is None else int(before) + 1
    put(f"jdp/life/{here}", str(members.life))
    if here == 0:
        put(_members, json.dumps([*range(process_count())]))
    if members.life:
        members.waits, watch.lost = True, {here}
        _be_missed()


def _be_missed() -> None:
    """Waits until the others have seen that this process had died."""

    def is_missed() -> bool:
        return own_process() not in json.loads(now(_members) or "[]")

    time.sleep(_SEEN)
    if not is_missed():
        # They wait for all that live, so for this one, too; and see there that it is another.
        client().get_live_nodes(json.loads(now(_members) or "[]"))
    while not is_missed():
        time.sleep(_SEEN)


_SEEN = 1.0  # seconds after a meeting in which process 0 says who was there


def enter() -> NoReturn:
    """Waits until the others let this process in, and raises the `ProcessesChanged` that they get there.

    Raises:
        SystemExit: with code 0; the job has ended, or there is no place any more.
    """
    here = own_process()
    put(f"{_back}{here}", str(members.life))
    entered = None
    try:
        while entered is None:
            if now(_OVER) is not None:
                _end(f"process {here} was started again, and the job has ended without it")
            entered = get(_entry(here, members.life), _SEEN)
    except DesyncError:
        _end(f"process {here} was started again, and the job has ended without it")
    found = json.loads(entered)
    if found is None:
        _end(f"process {here} was started again, and Gloo has no order of devices left in which it could be reached")
    members.generation, there, joined, used = found
    members.there, members.joined, members.waits = tuple(there), tuple(joined), False
    members.used |= {*map(tuple, used)}
    raise _changed("distributed.sync", set(), [here])


_OVER = "jdp/over"


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
        with contextlib.suppress(ProcessFailureError), live_devices(jax.devices()):
            pass
