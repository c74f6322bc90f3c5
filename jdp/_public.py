"""The public names, each from the module that defines it. `jdp/__init__.py` imports them when one is first used."""

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
from ._tools.explain.explain import explain as explain
from ._tools.explain.report import Report as Report
from ._tools.topology.topology import topology as topology
from ._train.check import LossCheck as LossCheck
from ._train.nnx_step import NNXTrainStep as NNXTrainStep
from ._train.state import TrainState as TrainState
from ._train.step import TrainStep as TrainStep
from ._train.terms import Mean as Mean
from ._train.terms import Sum as Sum
from ._wrapper.batches import Batches as Batches
from ._wrapper.data_parallel import DataParallel as DataParallel
from ._wrapper.functional import data_parallel as data_parallel

for _name, _value in list(globals().items()):
    if not _name.startswith("_") and hasattr(_value, "__module__"):
        _value.__module__ = "jdp"  # where users find it; for messages, pickles and documentation
