"""The calls that a wrapper knows: one like a call that ran before goes straight to its program.

Parameters that are replicated, and a batch that is cut already or can be handed over as it is, pass through scatter and
replicate unchanged. This module sees that before anything runs, leaf by leaf. Every other call takes all steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._core.inputs import NESTED, is_deep
from .._core.layout import Tree, is_key
from .._core.programs import Flat, Recent, dispatch, is_plain, may_deadlock
from .._core.replica_mesh import ReplicaMesh, replicated
from .._core.replicate import all_lie
from .._core.scattered import Scattered
from .._jax.jaxprs import communicates
from .._model.config import Config, Wrapper

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class Known:
    """A call that ran: what it takes to run its program again."""

    module: Any
    arrays: list[int] | None  # which leaves of the arguments these are; None for all
    programs: Recent[Any, Ran]  # by the treedef of the parameters


@dataclasses.dataclass(slots=True)
class Ran:
    """A program that ran."""

    program: Flat
    inside: Sequence[Any] | None  # the shardings of the parameters, if some are cut inside of the replicas
    waits: bool | None = None  # whether its replicas wait for each other; None before its second run

    def again(self, mesh: ReplicaMesh, *operands: Any) -> tuple[Any, ...]:
        """Runs it. Where its replicas wait for each other, few runs of it are in flight at a time."""
        run = self.program.run
        if self.waits is None:  # most often JAX has the trace from the first run
            self.waits = may_deadlock(mesh) and communicates(run.trace([], *operands).jaxpr)
        return dispatch(run, mesh, [], *operands) if self.waits else run([], *operands)


def run_known(dp: Wrapper, params: Tree, args: Args, kwargs: Kwargs) -> tuple[Flat, tuple[Any, ...]] | None:
    """Returns the program of a call like one that ran, and its result; None if the call is new, and nothing has run."""
    config = dp._config
    if not config.calls:
        return None
    key, batch = known_by(args, kwargs)
    known: Known | None = config.calls.used(key)
    if known is None or known.module is not dp.module:
        return None
    if not is_plain():
        return None
    leaves, treedef = jax.tree.flatten(params)
    ran = known.programs.used(treedef)
    if ran is None or not leaves:
        return None
    if not all_lie(leaves, replicated(config.mesh)) if ran.inside is None else _shardings(leaves) != ran.inside:
        return None
    batch = batch if known.arrays is None else [batch[i] for i in known.arrays]
    return ran.program, ran.again(config.mesh, leaves, *batch)


def remember(dp: Wrapper, params: Tree, args: Args, kwargs: Kwargs, inputs: Scattered, kw: Scattered) -> None:
    """Keeps a call that has run, if nothing of its batch had to be moved; nothing of its parameters had."""
    config: Config = dp._config
    if config.state_axes or config.mesh.spans_processes:
        return  # (with state_axes some of the variables may have to be cut, another time)
    key, leaves = known_by(args, kwargs)
    at = [i for i, x in enumerate(leaves) if type(x) not in _STATICS]
    arrays = [*inputs._arrays, *kw._arrays]
    if key is None or len(at) != len(arrays) or any(leaves[i] is not x for i, x in zip(at, arrays, strict=True)):
        return
    if not is_plain():
        return
    known: Known | None = config.calls.used(key)
    if known is None or known.module is not dp.module:
        known = config.calls[key] = Known(dp.module, None if len(at) == len(leaves) else at, Recent())
    found, treedef = jax.tree.flatten(params)
    inside = _shardings(found) if config.mesh.inner_axes and not all_lie(found, replicated(config.mesh)) else None
    known.programs[treedef] = Ran(config.program(dp.module).flat(treedef, inputs._layout, kw._layout), inside)


def _shardings(leaves: Sequence[Any]) -> list[Any]:
    return [getattr(x, "sharding", None) for x in leaves]


_STATICS = (bool, int, str)


def known_by(args: Args, kwargs: Kwargs) -> tuple[Any, Sequence[Any]]:
    """Returns what decides how the leaves are cut, and what of them is part of the program; None, if seldom seen."""
    key: list[Any] = [len(args)]
    leaves: list[Any] = []
    for x in (*args, kwargs) if kwargs else args:
        if type(x) is Scattered:  # cut already; JAX itself looks at the types of a program's arrays
            key.append(x._layout)
            # An array that jax.tree.map has put elsewhere is not one that the program takes.
            key += [getattr(y, "sharding", None) for y in x._arrays]
            leaves += x._arrays
        elif not _add(x, key, leaves):
            return None, []
    return tuple(key), leaves


def _add(x: Tree, key: list[Any], leaves: list[Any]) -> bool:
    """Returns the same of one argument that is not cut yet; False, if seldom seen."""
    if type(x) in NESTED and is_deep(x):
        return False
    try:
        found, treedef = jax.tree.flatten(x)
    except ValueError:  # keys of dicts that do not compare
        return False
    key.append(treedef)
    leaves += found
    for x in found:
        if type(x) is np.ndarray:
            key += x.dtype, x.shape
        elif type(x) in _STATICS:
            key += type(x), x
        elif isinstance(x, jax.Array) and not isinstance(x, Tracer) and not is_key(x):
            key += x.sharding, x.dtype, x.shape
        else:
            return False
    return True
