"""recall keeps a call that ran; apply knows one like it, and goes straight to the program: most have nothing to move.

Parameters that are whole on every device, and a batch that is cut already or can be handed over as it is, pass through
scatter and replicate unchanged. To look at them leaf by leaf takes as long as JAX takes to dispatch the program. JAX
looks at them anyway, and its cache of calls grows when it has not seen any like these before, or not with its settings
of now. Then they are looked at, and if they were not in their place, the call is made again as others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from .._core.compiled import Seen, is_plain
from .._core.devices import spans_processes
from .._core.inputs import NESTED, is_deep
from .._core.layout import Tree
from .._core.replicate import all_lie, first_leaf
from .._core.scattered import Scattered
from .._model.config import Config

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Known(NamedTuple):
    """A call that ran: what it takes to run its program again."""

    module: Any
    steps: Any  # of the wrapper's class
    where: NamedSharding
    program: Any  # of the parameters and the arrays of the batch, one after the other
    seen: Seen
    arrays: list[int] | None  # which leaves of the arguments these are; None for all
    stateful: bool
    stays: bool  # the output, where the program leaves it, which is what gather comes to


def look(known: Known, params: Tree, batch: Sequence[Any]) -> bool:
    """Looks at a call that JAX may not have seen before; False where it has to take all steps."""
    program, seen = known.program, known.seen
    if not is_plain():  # in a trace JAX keeps nothing of it
        return False
    if not all_lie(jax.tree.leaves(params), known.where):
        seen.recalled = False  # and from now on JAX knows these as well as the others
        return False
    seen.look(program, params, *batch)
    seen.checked = program._cache_size()
    return True


def remember(
    dp: Any, params: Tree, args: Args, kwargs: Kwargs, inputs: Scattered, kw: Scattered, stateful: bool
) -> None:
    """Keeps a call that has run, if nothing of its batch had to be moved; nothing of its parameters had."""
    config: Config = dp._config
    if config.state_axes or spans_processes(config.mesh) or not is_plain():
        return  # (with state_axes some of the variables may have to be cut, another time)
    compiled = config.program(dp.module)
    key, leaves = known_by(args, kwargs)
    at = [i for i, x in enumerate(leaves) if type(x) not in _STATICS]
    arrays = [*inputs._arrays, *kw._arrays]
    if key is None or len(at) != len(arrays) or any(leaves[i] is not x for i, x in zip(at, arrays, strict=True)):
        return
    program, seen = compiled.of_arrays(inputs._layout, kw._layout)
    places = None if len(at) == len(leaves) else at
    where, steps = getattr(first_leaf(params), "_sharding", None), steps_of(dp)
    if where is None or steps is None:  # no parameters, or keys first
        return
    stays = config.output_device is None and not stateful
    config.calls[key] = Known(dp.module, steps, where, program, seen, places, stateful, stays)


def steps_of(dp: Any) -> tuple[Any, ...] | None:
    """The four steps of the wrapper's class; None where the wrapper itself has one of its own."""
    kind, own = type(dp), vars(dp)
    if "scatter" in own or "replicate" in own or "parallel_apply" in own or "gather" in own:
        return None
    return kind.scatter, kind.replicate, kind.parallel_apply, kind.gather


_STATICS = (bool, int, str)


def known_by(args: Args, kwargs: Kwargs) -> tuple[Any, Sequence[Any]]:
    """The leaves, and what decides how they are cut and what of them is part of the program: None, if seldom seen."""
    if len(args) == 1 and not kwargs and type(args[0]) is Scattered:
        return args[0]._layout.token, args[0]._arrays
    key: list[Any] = [len(args)]
    leaves: list[Any] = []
    for x in (*args, kwargs) if kwargs else args:
        if type(x) is Scattered:  # cut already; JAX itself looks at the types and places of a program's arrays
            key.append(x._layout.token)
            leaves += x._arrays
        elif not _add(x, key, leaves):
            return None, []
    return tuple(key), leaves


def _add(x: Tree, key: list[Any], leaves: list[Any]) -> bool:
    """The same of one argument that is not cut yet; False, if seldom seen."""
    if type(x) in NESTED and is_deep(x):
        return False
    try:
        found, treedef = jax.tree.flatten(x)
    except ValueError:  # keys of dicts that do not compare
        return False
    key.append(treedef)
    leaves += found
    for x in found:
        if hasattr(x, "_sharding"):  # an array of numbers; of tracers and keys it is another attribute
            key += x._sharding, x.dtype, x.shape
        elif type(x) is np.ndarray:
            key += x.dtype, x.shape
        elif type(x) in _STATICS:
            key += type(x), x
        else:
            return False
    return True
