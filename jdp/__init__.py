"""torch.nn.DataParallel for JAX and Flax.

Four verbs, which the rest of the package calls:

    inputs -- scatter --> Scattered --+
                                      +-- parallel_apply --> Scattered --+-- gather ------> outputs
    params -- replicate -> replicas --+                                  +-- reduce_add --> sum
"""

import importlib
import sys
import typing

from ._version import __version__ as __version__

if typing.TYPE_CHECKING:
    from ._public import *

__all__ = [
    "Batches",
    "Checkpointer",
    "DataParallel",
    "LossCheck",
    "Mean",
    "NNXTrainStep",
    "Report",
    "Scattered",
    "Sum",
    "TrainState",
    "TrainStep",
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

_METHODS = ("apply", "batches", "evaluate", "grad", "init", "parallel", "prefetch", "train_step", "value_and_grad")


def __dir__() -> list[str]:
    return __all__


if not typing.TYPE_CHECKING:  # a type checker would accept every name then

    def __getattr__(name: str) -> object:
        """Imports all of jdp when a public name is first used, so that `jdp --help` need not wait for JAX."""
        if name not in __all__:
            text = f"module {__name__!r} has no attribute {name!r}"
            if name in _METHODS:
                text += f"; it is a method of the wrapper. Call jdp.DataParallel(model).{name}(...)"
            raise AttributeError(text, name=name, obj=sys.modules[__name__])
        public = importlib.import_module("._public", __name__)
        globals().update((each, getattr(public, each)) for each in __all__ if each != "__version__")
        return globals()[name]
