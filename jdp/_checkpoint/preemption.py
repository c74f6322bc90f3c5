"""Preemption: a SIGTERM is held back until the next save, at which all processes see it in the same step."""

from __future__ import annotations

import itertools
import signal
import threading
from typing import Any

import jax

# The service counts the calls of a process, and agrees on one that no process has made yet; a second Checkpointer of
# the process must go on counting where the first stopped.
_calls = itertools.count(1)


class Preemption:
    """Whether this job has been told to end: `reached()` is asked once per step, by every process.

    Under `jax.distributed` SIGTERM goes to JAX's preemption service, which tells all processes to stop at the same
    call. Elsewhere a handler is installed (in the main thread, the only one that may; not where SIGTERM is ignored),
    which calls an earlier one of Python's too.
    """

    def __init__(self) -> None:
        self._told = False
        self._service = jax.distributed.is_initialized()
        self._over = True  # where there is no handler
        self.acted = False  # whether the SIGTERM has been acted on
        self._before = signal.getsignal(signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        if main and not self._service and self._before not in (signal.SIG_IGN, None):
            self._over = False
            signal.signal(signal.SIGTERM, self._note)

    def reached(self) -> bool:
        """Whether this is the step after which to stop."""
        if not self._service:
            return self._told
        if not jax.config.values["jax_enable_preemption_service"]:
            return False
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(next(_calls))

    def close(self) -> None:
        """Puts the earlier handler back; a SIGTERM on which nobody has acted is delivered to it now."""
        if self._over or threading.current_thread() is not threading.main_thread():
            return
        self._over = True
        found = handler = signal.getsignal(signal.SIGTERM)
        while isinstance(one := getattr(handler, "__self__", None), Preemption) and one._over:
            handler = one._before  # of several the first to close need not be the last that began
        if handler is not found:
            signal.signal(signal.SIGTERM, handler)
        if self._told and not self.acted and not callable(self._before):
            signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: Any) -> None:
        self._told = True
        if callable(self._before):
            self._before(number, frame)
