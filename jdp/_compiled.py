"""A program of the replicas, compiled once per layout of its inputs and shapes of its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ._capture import Captured, ReplicasCall
from ._capturing import capturing
from ._layout import Layout, Tree
from ._processes import spans_processes
from ._same_program import same_program
from ._scattered import Scattered

ROOTS = ("params", "args", "kwargs")


class Compiled:
    """What `on_replicas` made, to be called with `(replicas, inputs, kwargs)`."""

    def __init__(self, run: Callable[..., Scattered]) -> None:
        self._run = run
        self._programs: dict[Any, Callable[..., Scattered]] = {}
        self.distrusted: set[Any] = set()  # programs that have run with parameters somewhere else (see recall)

    def __call__(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None = None) -> Scattered:
        if capturing():
            raise Captured(ReplicasCall(self._run.__name__, self._jitted, self._programs, replicas, inputs, kwargs))
        kw, rest = (None, ()) if kwargs is None else (kwargs._layout, kwargs._arrays)
        if not spans_processes(inputs._layout.mesh):
            return self.of_arrays(inputs._layout, kw)(replicas, *inputs._arrays, *rest)
        key = inputs._layout, kw
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = same_program(self._jitted(inputs, kwargs), inputs._layout.mesh, ROOTS)
        return program(replicas, inputs, kwargs)

    def of_arrays(self, inputs: Layout, kwargs: Layout | None) -> Any:
        """The jitted function of the replicas and the arrays of inputs and kwargs, one after the other."""
        program = self._programs.get((inputs, kwargs))
        if program is None:
            run, cut = self._run, len(inputs.arrays)

            def of_arrays(replicas: Tree, *arrays: Any) -> Scattered:
                kw = None if kwargs is None else Scattered(arrays[cut:], kwargs)
                return run(replicas, Scattered(arrays[:cut], inputs), kw)

            of_arrays.__name__ = of_arrays.__qualname__ = run.__name__
            # With in_shardings the call itself puts numpy arrays onto the devices, at a fraction of what a device_put
            # before it costs, and into the one program that placed arrays run as well.
            where = (*inputs.shardings, *(kwargs.shardings if kwargs else ()))
            program = self._programs[inputs, kwargs] = jax.jit(of_arrays, in_shardings=(None, *where))
        return program

    def _jitted(self, inputs: Scattered, kwargs: Scattered | None) -> Any:
        """The function of the trees themselves: names in it are those of the operands."""
        where = [None if s is None else Scattered(s._layout.shardings, s._layout) for s in (inputs, kwargs)]
        return jax.jit(self._run, in_shardings=(None, *where))
