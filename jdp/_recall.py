"""recall knows a call by one before it, and goes straight to the program: most calls have nothing to move.

Parameters that are whole on every device, and a batch that is cut already or can be handed over as it is, pass through
scatter and replicate unchanged. To look at them leaf by leaf takes as long as JAX takes to dispatch the program. JAX
looks at them anyway, and its cache of calls grows by one when it has not seen any like these before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax._src.core import trace_state_clean  # not public; nothing else tells what a closure over a batch does
from jax.sharding import Mesh, get_abstract_mesh

from ._compiled import Compiled
from ._config import Config
from ._devices import replicated
from ._dispatch import dispatch
from ._layout import Tree
from ._processes import spans_processes
from ._replicate import all_lie, first_leaf
from ._run_chunks import communicates
from ._scattered import Scattered

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class Known:
    """A call that ran: what it takes to run its program again."""

    module: Any
    compiled: Compiled
    program: Any  # of the parameters and the arrays of the batch, one after the other
    arrays: list[int] | None  # which leaves of the arguments these are; None for all
    communicates: bool = False

    def look(self, mesh: Mesh, params: Tree, batch: list[Any]) -> None:
        """Sees whether the program for such operands has collectives."""
        jaxpr = self.program.trace(params, *batch).jaxpr.jaxpr  # traced it is already
        self.communicates = self.communicates or communicates(jaxpr, mesh.axis_names[0])


def recall(config: Config, module: Any, params: Tree, args: Args, kwargs: Kwargs) -> Scattered | None:
    """The outputs, where such a call is known; None where it is not, or where something has to be moved."""
    # Under a trace arrays may be tracers, and the call may run within a replica; in a set_mesh it may not run at all.
    if not trace_state_clean() or not get_abstract_mesh().empty:
        return None
    key, batch = _known_by(args, kwargs)
    known: Known | None = config.calls.get(key)
    where = replicated(config.mesh)
    if known is None or known.module is not module or getattr(first_leaf(params), "_sharding", None) != where:
        return None
    program = known.program
    if program in known.compiled.distrusted:
        return None
    batch = batch if known.arrays is None else [batch[i] for i in known.arrays]
    size = program._cache_size()
    try:
        # Without collectives any number may be in flight, as of any other program.
        outputs = dispatch(program, config.mesh, params, *batch) if known.communicates else program(params, *batch)
    except Exception:  # what is wrong is said, in better words, by the call that takes all steps
        return None
    if program._cache_size() != size:
        if not all_lie(jax.tree.leaves(params), where):
            known.compiled.distrusted.add(program)  # for it knows these as well from now on
            return None
        known.look(config.mesh, params, batch)
    return outputs


def remember(
    config: Config, module: Any, params: Tree, args: Args, kwargs: Kwargs, inputs: Scattered, kw: Scattered
) -> None:
    """Keeps a call that has run, if nothing of its batch had to be moved; nothing of its parameters had."""
    compiled = config.program(module)
    if spans_processes(config.mesh) or config.state_axes or not trace_state_clean() or not jax.tree.leaves(params):
        return  # (with state_axes some of the variables may have to be cut, another time)
    key, leaves = _known_by(args, kwargs)
    at = [i for i, x in enumerate(leaves) if type(x) not in _STATICS]
    arrays = [*inputs._arrays, *kw._arrays]
    if key is None or len(at) != len(arrays) or any(leaves[i] is not x for i, x in zip(at, arrays, strict=True)):
        return
    program = compiled.of_arrays(inputs._layout, kw._layout)
    known = config.calls[key] = Known(module, compiled, program, None if len(at) == len(leaves) else at)
    known.look(config.mesh, params, arrays)


_STATICS = (bool, int, str)


def _known_by(args: Args, kwargs: Kwargs) -> tuple[Any, list[Any]]:
    """The leaves, and what decides how they are cut and what of them is part of the program: None, if seldom seen."""
    key: list[Any] = [len(args)]
    leaves: list[Any] = []
    for x in (*args, kwargs) if kwargs else args:
        if type(x) is Scattered:  # nearly every one; flattening takes longer
            key.append(x._layout)
            leaves += x._arrays
            continue
        try:
            found, treedef = jax.tree.flatten(x)
        except ValueError:  # keys of dicts that do not compare
            return None, []
        key.append(treedef)
        leaves += found
    for x in leaves:
        if hasattr(x, "_sharding"):  # an array of numbers; of tracers and keys it is another attribute
            key += x._sharding, x.dtype, x.shape
        elif type(x) is np.ndarray:
            key += x.dtype, x.shape
        elif type(x) in _STATICS:
            key += type(x), x
        else:
            return None, []
    return tuple(key), leaves
