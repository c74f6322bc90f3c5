"""torch.nn.DataParallel for JAX and Flax.

Four verbs, and the doors that call them:

    inputs -- scatter --> Scattered --+
                                      +-- parallel_apply --> Scattered --+-- gather ------> outputs
    params -- replicate -> replicas --+                                  +-- reduce_add --> sum
"""

from . import distributed as distributed
from ._checkpoint.checkpointer import Checkpointer as Checkpointer
from ._core.devices import virtual_cpu_devices as virtual_cpu_devices
from ._core.gather import gather as gather
from ._core.layout import chunk_sizes as chunk_sizes
from ._core.parallel_apply import parallel_apply as parallel_apply
from ._core.reduce_add import reduce_add as reduce_add
from ._core.replicate import replicate as replicate
from ._core.scatter import scatter as scatter
from ._core.scattered import Scattered as Scattered
from ._explain.explain import explain as explain
from ._topology.topology import topology as topology
from ._train.state import TrainState as TrainState
from ._train.terms import Mean as Mean
from ._train.terms import Sum as Sum
from ._version import __version__ as __version__
from ._wrapper.data_parallel import DataParallel as DataParallel
from ._wrapper.functional import data_parallel as data_parallel

__all__ = [
    "Checkpointer",
    "DataParallel",
    "Mean",
    "Scattered",
    "Sum",
    "TrainState",
    "__version__",
    "chunk_sizes",
    "data_parallel",
    "distributed",
    "explain",
    "gather",
    "parallel_apply",
    "reduce_add",
    "replicate",
    "scatter",
    "topology",
    "virtual_cpu_devices",
]

for _public in (globals()[name] for name in __all__):
    if hasattr(_public, "__module__"):
        _public.__module__ = "jdp"  # where a person finds it, in messages, pickles and documentation


def __dir__() -> list[str]:
    return __all__
