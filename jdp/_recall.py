"""recall knows a call by one before it, and goes straight to the program: most calls have nothing to move.

Parameters that are whole on every device, and a batch that is cut already or can be handed over as it is, pass through
scatter and replicate unchanged. To look at them leaf by leaf takes as long as JAX takes to dispatch the program. JAX
looks at them anyway, and its cache of calls grows when it has not seen any like these before. Then they are looked at,
and if they were not in their place, the call is made again as others are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import get_abstract_mesh

from ._compiled import Seen, is_plain
from ._config import Config
from ._devices import replicated
from ._dispatch import dispatch
from ._layout import Tree
from ._processes import spans_processes
from ._replicate import all_lie, first_leaf
from ._scattered import Scattered

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Known(NamedTuple):
    """A call that ran: what it takes to run its program again."""

    module: Any
    program: Any  # of the parameters and the arrays of the batch, one after the other
    seen: Seen
    arrays: list[int] | None  # which leaves of the arguments these are; None for all


def recall(config: Config, module: Any, params: Tree, args: Args, kwargs: Kwargs) -> Scattered | None:
    """The outputs, where such a call is known; None where it is not, or where something has to be moved."""
    # Under a trace arrays may be tracers, and the call may run within a replica; in a set_mesh it may not run at all.
    if not is_plain() or not get_abstract_mesh().empty:
        return None
    key, batch = _known_by(args, kwargs)
    known: Known | None = config.calls.get(key)
    where = replicated(config.mesh)
    if known is None or known.module is not module or getattr(first_leaf(params), "_sharding", None) != where:
        return None
    batch = batch if known.arrays is None else [batch[i] for i in known.arrays]
    seen = known.seen
    # Of two threads at once the other takes all steps: what is new in the cache must be this call's.
    if seen.misplaced or not seen.lock.acquire(blocking=False):
        return None
    try:
        return _run(known.program, seen, config, params, batch)
    finally:
        seen.lock.release()


def _run(program: Any, seen: Seen, config: Config, params: Tree, batch: list[Any]) -> Scattered | None:
    before = program._cache_size()
    try:
        # Without collectives any number may be in flight, as of any other program.
        outputs = dispatch(program, config.mesh, params, *batch) if seen.communicates else program(params, *batch)
    except Exception:  # what is wrong is said, in better words, by the call that takes all steps
        return None
    size = program._cache_size()
    if (before, size) != (seen.checked, seen.checked):
        if not all_lie(jax.tree.leaves(params), replicated(config.mesh)):
            seen.misplaced = True  # and from now on JAX knows these as well as the others
            return None
        seen.look(program, params, *batch)
        seen.checked = size
    return outputs


def remember(
    config: Config, module: Any, params: Tree, args: Args, kwargs: Kwargs, inputs: Scattered, kw: Scattered
) -> None:
    """Keeps a call that has run, if nothing of its batch had to be moved; nothing of its parameters had."""
    if config.state_axes or spans_processes(config.mesh) or not is_plain():
        return  # (with state_axes some of the variables may have to be cut, another time)
    compiled = config.program(module)
    key, leaves = _known_by(args, kwargs)
    at = [i for i, x in enumerate(leaves) if type(x) not in _STATICS]
    arrays = [*inputs._arrays, *kw._arrays]
    if key is None or len(at) != len(arrays) or any(leaves[i] is not x for i, x in zip(at, arrays, strict=True)):
        return
    program = compiled.of_arrays(inputs._layout, kw._layout)
    config.calls[key] = Known(module, program, compiled.seen[program], None if len(at) == len(leaves) else at)


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
