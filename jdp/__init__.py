"""torch.nn.DataParallel for JAX and Flax.

Four verbs, and the doors that call them:

    inputs -- scatter --> Scattered --+
                                      +-- parallel_apply --> Scattered --+-- gather ------> outputs
    params -- replicate -> replicas --+                                  +-- reduce_add --> sum
"""

from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version

from . import distributed as distributed
from ._checkpointer import Checkpointer as Checkpointer
from ._chunk import chunk_sizes as chunk_sizes
from ._data_parallel import DataParallel as DataParallel
from ._explain import explain as explain
from ._functional import data_parallel as data_parallel
from ._mean import Mean as Mean
from ._mean import Sum as Sum
from ._parallel_apply import parallel_apply as parallel_apply
from ._reduce_add import reduce_add as reduce_add
from ._replicate import replicate as replicate
from ._scatter_gather import gather as gather
from ._scatter_gather import scatter as scatter
from ._scattered import Scattered as Scattered
from ._topology import topology as topology
from ._train_state import TrainState as TrainState
from ._virtual import virtual_cpu_devices as virtual_cpu_devices

try:
    __version__ = _version("jax-data-parallel")
except _NotFound:  # run from a checkout that is not installed
    __version__ = "0+unknown"
