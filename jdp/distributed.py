"""More than one process: `initialize` before anything else, and the rest of jdp is as it is with one."""

from ._jax.coordination import DesyncError as DesyncError
from ._processes.initialize import initialize as initialize
