"""For several processes: call `initialize` before anything else; the rest of jdp works as with one."""

from ._core.programs import wait_for_all as _wait_for_all
from ._processes.coordination import DesyncError as DesyncError
from ._processes.hooks import before_leaving as _before_leaving
from ._processes.initialize import initialize as initialize

_before_leaving(_wait_for_all)  # `_processes` must not import `_core`
