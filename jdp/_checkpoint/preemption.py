"""The notice that a job has to end: a SIGTERM, upon which all processes save and stop at one step."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import weakref
from typing import Any

import jax

# The service counts the calls of each process, and picks a call that no process has made yet. A second Checkpointer in
# the process must go on counting where the first stopped.
_calls = itertools.count(1)


class Preemption:
    """The notice that this job has to end: every process calls `reached()` once per step.

    Under `jax.distributed` SIGTERM goes to JAX's preemption service, which makes all processes stop at the same
    call. Otherwise a handler is installed, which also calls an earlier Python handler. Only the main thread may install
    it, and it is not installed if SIGTERM is ignored.
    """

    def __init__(self) -> None:
        self._told, self._process = False, os.getpid()
        self._service = jax.distributed.is_initialized()
        self._over = True  # True as long as no handler is installed
        self.acted = False  # whether the SIGTERM has been acted on
        self._before = signal.getsignal(signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        if main and not self._service and self._before not in (signal.SIG_IGN, None):
            self._over = False
            _installed.add(self)
            signal.signal(signal.SIGTERM, self._note)

    def tell(self) -> None:
        """Notes that the job has to end, after a notice other than SIGTERM; it counts as a SIGTERM."""
        if not self._service:
            self._told = True
        elif jax.config.values["jax_enable_preemption_service"]:
            os.kill(os.getpid(), signal.SIGTERM)  # the service can be notified in no other way

    def act(self) -> None:
        """Notes, in all that are open, that the SIGTERM has been acted on."""
        for one in {self, *_installed}:
            one._told, one.acted = False, True

    def reached(self) -> bool:
        """Returns True if this is the step after which to stop."""
        if not self._service:
            if jax.process_count() > 1:
                raise RuntimeError(
                    "jdp.Checkpointer: it was made before jax.distributed was initialized, so a SIGTERM would not stop "
                    "all processes at one step, and the last state would not be saved. Make it after "
                    "jdp.distributed.initialize()."
                )
            return self._told
        if not jax.config.values["jax_enable_preemption_service"]:
            return False
        from jax.experimental import multihost_utils

        # The service says it once. The save of that step may fail, and then the next one has to stop.
        self._told = multihost_utils.reached_preemption_sync_point(next(_calls)) or self._told
        return self._told

    def close(self) -> None:
        """Puts the earlier handler back; a SIGTERM that has not been acted on is delivered to it now.

        Only the main thread may set handlers. If another thread calls it, ours stays until the next SIGTERM, and hands
        that on to the earlier one.
        """
        if self._over:
            return
        self._over = True
        if threading.current_thread() is not threading.main_thread():
            if self._told and not self.acted:
                os.kill(os.getpid(), signal.SIGTERM)
            return
        found = signal.getsignal(signal.SIGTERM)
        handler = self._put_back(found)
        if self._told and not self.acted and not callable(handler):  # the last that was open
            signal.raise_signal(signal.SIGTERM)

    def _put_back(self, found: Any) -> Any:
        """Sets the first handler, from the one that was found on, that is not over; returns it."""
        handler = found
        while isinstance(one := getattr(handler, "__self__", None), Preemption) and one._over:
            handler = one._before  # several may be open, and may close in any order
        if handler is not found:
            signal.signal(signal.SIGTERM, handler)
        return handler

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a child of os.fork, which ends as it would without a Checkpointer
            handler: Any = self._note
            while isinstance(one := getattr(handler, "__self__", None), Preemption):
                handler = one._before
            signal.signal(signal.SIGTERM, handler)
            signal.raise_signal(signal.SIGTERM)
            return
        if self._over and signal.getsignal(signal.SIGTERM) == self._note:  # closed in another thread
            self._put_back(self._note)
            signal.raise_signal(signal.SIGTERM)
            return
        self._told = True
        if callable(self._before):
            self._before(number, frame)


_installed: weakref.WeakSet[Preemption] = weakref.WeakSet()
