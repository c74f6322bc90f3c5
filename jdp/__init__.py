"""torch.nn.DataParallel for JAX and Flax.

Four verbs, and the doors that call them:

    inputs -- scatter --> Scattered --+
                                      +-- parallel_apply --> Scattered --+-- gather ------> outputs
    params -- replicate -> replicas --+                                  +-- reduce_add --> sum
"""

from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version

from . import distributed as distributed
from ._checkpoint.checkpointer import Checkpointer as Checkpointer
from ._core.devices import virtual_cpu_devices as virtual_cpu_devices
from ._core.gather import gather as gather
from ._core.gather import scatter as scatter
from ._core.layout import chunk_sizes as chunk_sizes
from ._core.parallel_apply import parallel_apply as parallel_apply
from ._core.reduce_add import reduce_add as reduce_add
from ._core.replicate import replicate as replicate
from ._core.scattered import Scattered as Scattered
from ._explain.explain import explain as explain
from ._topology.topology import topology as topology
from ._train.state import TrainState as TrainState
from ._train.terms import Mean as Mean
from ._train.terms import Sum as Sum
from ._wrapper.data_parallel import DataParallel as DataParallel
from ._wrapper.functional import data_parallel as data_parallel

try:
    __version__ = _version("jax-data-parallel")
except _NotFound:  # run from a checkout that is not installed
    __version__ = "0+unknown"
