"""A program of the replicas, compiled once per layout of its inputs and shapes of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.core import trace_state_clean  # not public; nothing else tells what a closure over tracers does

from .._processes.agree import same_program
from .devices import spans_processes
from .layout import Layout, Tree
from .programs import Recent, intercepted
from .scattered import Scattered

ROOTS = ("params", "args", "kwargs")


def is_plain() -> bool:
    """Whether a call now runs a compiled program, and is no part of another."""
    return trace_state_clean() and not _settings.jax_disable_jit


_settings: Any = jax.config


class Layouts:
    """The layouts of what a program returns: each is known once JAX has traced it for operands of some shapes."""

    def __init__(self) -> None:
        self._seen: list[Layout] = []

    def wrap(self, outputs: Scattered) -> tuple[Any, ...]:
        """While it is traced: the outputs behind a None for each layout before theirs.

        A `Scattered` would be a call back into Python: it is the tree itself, or the padded arrays where gather has to
        trim them.
        """
        layout = outputs._layout
        if layout not in self._seen:
            self._seen.append(layout)
        values = layout.fill(outputs._arrays) if layout.is_even else outputs._arrays
        return *[None] * self._seen.index(layout), values

    def unwrap(self, out: tuple[Any, ...]) -> Scattered:
        """What the program returned, scattered again."""
        return Scattered(jax.tree.leaves(out), self._seen[len(out) - 1])


def arguments_of_this_jit_need_jdp_replicate(program: Any, operands: Sequence[Any]) -> Any:
    """Calls a program as part of another.

    Where an argument of the user's own `jax.jit` is committed to one device, it is JAX that refuses it, after all of
    this has returned. Its text ends with the name of this function, the one place where jdp can say what to do.
    """
    return program(*operands)


class Compiled:
    """What `on_replicas` made, called with `(replicas, inputs, kwargs)`.

    With `donates` the replicas are a tuple, and the program frees the arrays in the first of it.
    """

    def __init__(self, run: Callable[..., Scattered], donates: bool = False) -> None:
        self.label = run.__name__
        self._run, self._donates = run, donates
        # By the layouts; of one process with the layouts of what it returns.
        self.programs: Recent[Any, Any] = Recent()

    def __call__(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None = None) -> Scattered:
        intercepted(self, replicas, inputs, kwargs)
        kw, rest = (None, ()) if kwargs is None else (kwargs._layout, kwargs._arrays)
        if not spans_processes(inputs._layout.mesh):
            program, layouts = self.of_arrays(inputs._layout, kw)
            operands = (*self._split(replicas), *inputs._arrays, *rest)
            out = program(*operands) if is_plain() else arguments_of_this_jit_need_jdp_replicate(program, operands)
            return layouts.unwrap(out)
        key = inputs._layout, kw
        program = self.programs.used(key)
        if program is None:
            roots = ("donated", *ROOTS) if self._donates else ROOTS
            jitted = self._jit(self._run, self._where(inputs, kwargs))
            program = self.programs[key] = same_program(jitted, inputs._layout.mesh.devices.flat, roots)
        return program(*self._split(replicas), inputs, kwargs)

    def _split(self, replicas: Tree) -> tuple[Tree, ...]:
        return (replicas[0], replicas[1:]) if self._donates else (replicas,)

    def _jit(self, run: Callable[..., Any], where: tuple[Any, ...]) -> Any:
        """`run` of the replicas as `_split` gives them, and of what lies `where`."""
        if not self._donates:
            return jax.jit(run, in_shardings=(None, *where))

        def donating(donated: Tree, held: tuple[Tree, ...], *rest: Any) -> Any:
            return run((donated, *held), *rest)

        donating.__name__ = donating.__qualname__ = run.__name__
        return jax.jit(donating, in_shardings=(None, None, *where), donate_argnums=0)

    def of_arrays(self, inputs: Layout, kwargs: Layout | None) -> tuple[Any, Layouts]:
        """The jitted function of the replicas and the arrays of inputs and kwargs, one after the other."""
        found = self.programs.used((inputs, kwargs))
        if found is None:
            run, cut, layouts = self._run, len(inputs.arrays), Layouts()

            def of_arrays(replicas: Tree, *arrays: Any) -> tuple[Any, ...]:
                kw = None if kwargs is None else Scattered(arrays[cut:], kwargs)
                return layouts.wrap(run(replicas, Scattered(arrays[:cut], inputs), kw))

            of_arrays.__name__ = of_arrays.__qualname__ = run.__name__
            # With in_shardings the call itself puts numpy arrays onto the devices, at a fraction of what a device_put
            # before it costs, and into the one program that placed arrays run as well.
            where = (*inputs.shardings, *(kwargs.shardings if kwargs else ()))
            found = self.programs[inputs, kwargs] = self._jit(of_arrays, where), layouts
        return found

    def jitted(self, inputs: Scattered | None, kwargs: Scattered | None) -> Any:
        """The function of the trees themselves: names in it are those of the operands."""
        return jax.jit(self._run, in_shardings=(None, *self._where(inputs, kwargs)))

    def _where(self, inputs: Scattered | None, kwargs: Scattered | None) -> tuple[Any, ...]:
        return tuple(None if s is None else Scattered(s._layout.shardings, s._layout) for s in (inputs, kwargs))
