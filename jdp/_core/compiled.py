"""A program of the replicas, compiled once per layout of its inputs and shapes of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.core import trace_state_clean  # not public; nothing else tells what a closure over tracers does
from jax.sharding import Mesh

from .._processes.agree import same_program
from .devices import replicated, spans_processes
from .layout import Layout, Tree
from .programs import Recent, intercepted
from .replicate import all_lie
from .scattered import Scattered
from .uneven import calls_back, communicates

ROOTS = ("params", "args", "kwargs")


def is_plain() -> bool:
    """Whether a call now runs a compiled program, and is no part of another."""
    return trace_state_clean() and not _settings.jax_disable_jit


_settings: Any = jax.config


class Seen:
    """What is known of the calls of a program, all of which JAX keeps in one cache."""

    __slots__ = ("turns", "recalled", "communicates", "checked", "mesh", "layouts", "even")

    def __init__(self, mesh: Mesh) -> None:
        self.turns = [object()]  # a lock: who takes it out has it, and a list is quicker there than a Lock
        # Whether a call may go straight to it. Not if one had parameters that were not whole on every device, and not
        # if it calls back into Python: such a call might have to be made again, and what it does there done twice.
        self.recalled = True
        # Whether replicas wait for each other in one of them. If not, any number may be in flight, as of others.
        self.communicates = False
        self.checked = 0  # how many there were when it was last known that all were in their place
        self.mesh = mesh
        self.layouts: list[Layout] = []  # of the outputs
        self.even = True  # whether all of them are

    def outputs(self, out: tuple[Any, ...]) -> tuple[Any, Layout]:
        """The arrays that the program returned, and their layout."""
        return jax.tree.leaves(out), self.layouts[len(out) - 1]

    def look(self, program: Any, *operands: Any) -> None:
        """Sees whether the program has collectives for these operands, and whether it calls back into Python."""
        jaxpr = program.trace(*operands).jaxpr.jaxpr  # traced it is already
        self.communicates = self.communicates or communicates(jaxpr, self.mesh.axis_names[0])
        self.recalled = self.recalled and not calls_back(jaxpr)


def arguments_of_this_jit_need_jdp_replicate(program: Any, operands: Sequence[Any]) -> Any:
    """Calls a program as part of another.

    Where an argument of the user's own `jax.jit` is committed to one device, it is JAX that refuses it, after all of
    this has returned. Its text ends with the name of this function, the one place where jdp can say what to do.
    """
    return program(*operands)


class Compiled:
    """What `on_replicas` made, called with `(replicas, inputs, kwargs)`; `recalled`: `recall` may call it, too.

    With `donates` the replicas are a tuple, and the program frees the arrays in the first of it.
    """

    def __init__(self, run: Callable[..., Scattered], recalled: bool = False, donates: bool = False) -> None:
        self.label = run.__name__
        self._run, self._recalled, self._donates = run, recalled, donates
        # By the layouts; of one of arrays with what is known of its calls.
        self.programs: Recent[Any, Any] = Recent()

    def __call__(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None = None) -> Scattered:
        intercepted(self, replicas, inputs, kwargs)
        kw, rest = (None, ()) if kwargs is None else (kwargs._layout, kwargs._arrays)
        if not spans_processes(inputs._layout.mesh):
            program, seen = self.of_arrays(inputs._layout, kw)
            operands = (*self._split(replicas), *inputs._arrays, *rest)
            if not is_plain():
                out = arguments_of_this_jit_need_jdp_replicate(program, operands)
            else:
                out = self._noticed(program, seen, *operands) if self._recalled else program(*operands)
            return Scattered(*seen.outputs(out))
        key = inputs._layout, kw
        program = self.programs.used(key)
        if program is None:
            roots = ("donated", *ROOTS) if self._donates else ROOTS
            jitted = self._jit(self._run, self._where(inputs, kwargs))
            program = self.programs[key] = same_program(jitted, inputs._layout.mesh, roots)
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

    def _noticed(self, program: Any, seen: Seen, replicas: Tree, *arrays: Any) -> Any:
        """A call of which `recall` has to know."""
        size = program._cache_size()
        if not all_lie(jax.tree.leaves(replicas), replicated(seen.mesh)):
            seen.recalled = False  # by a subclass's replicate, or by parallel_apply called by hand
        out = program(replicas, *arrays)
        if program._cache_size() != size:
            seen.look(program, replicas, *arrays)
        return out

    def of_arrays(self, inputs: Layout, kwargs: Layout | None) -> tuple[Any, Seen]:
        """The jitted function of the replicas and the arrays of inputs and kwargs, one after the other.

        It returns the outputs behind a None for each layout before theirs, for a `Scattered` is a call back into
        Python: the tree itself, or the padded arrays where gather has to trim them.
        """
        found = self.programs.used((inputs, kwargs))
        if found is None:
            run, cut, seen = self._run, len(inputs.arrays), Seen(inputs.mesh)

            def of_arrays(replicas: Tree, *arrays: Any) -> tuple[Any, ...]:
                kw = None if kwargs is None else Scattered(arrays[cut:], kwargs)
                out = run(replicas, Scattered(arrays[:cut], inputs), kw)
                layout = out._layout
                if layout not in seen.layouts:
                    seen.layouts.append(layout)
                    seen.even = seen.even and layout.is_even
                values = layout.fill(out._arrays) if layout.is_even else out._arrays
                return *[None] * seen.layouts.index(layout), values

            of_arrays.__name__ = of_arrays.__qualname__ = run.__name__
            # With in_shardings the call itself puts numpy arrays onto the devices, at a fraction of what a device_put
            # before it costs, and into the one program that placed arrays run as well.
            where = (*inputs.shardings, *(kwargs.shardings if kwargs else ()))
            found = self.programs[inputs, kwargs] = self._jit(of_arrays, where), seen
        return found

    def jitted(self, inputs: Scattered, kwargs: Scattered | None) -> Any:
        """The function of the trees themselves: names in it are those of the operands."""
        return jax.jit(self._run, in_shardings=(None, *self._where(inputs, kwargs)))

    def _where(self, inputs: Scattered, kwargs: Scattered | None) -> tuple[Any, ...]:
        return tuple(None if s is None else Scattered(s._layout.shardings, s._layout) for s in (inputs, kwargs))
