"""The replicas' programs: made once for each function, dispatched a few at a time, and shown to `explain` first."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import operator
import signal
import threading
import types
import weakref
from _signal import getsignal  # type: ignore[import-not-found]  # without Python wrappers, at a tenth of the price
from _signal import signal as set_handler  # type: ignore[import-not-found]
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import jax

from .._jax.private import trace_state_clean
from .layout import Layout, Tree
from .replica_mesh import ReplicaMesh
from .scattered import Scattered, concrete

K = TypeVar("K")
S = TypeVar("S")
T = TypeVar("T")


class ReplicaProgram:
    """A function that runs on all replicas (`on_replicas` made it), and its programs: one for each kind of arguments.

    With `donates` the replicas are a tuple, and a program frees the arrays in its first entry.
    """

    def __init__(self, run: Callable[..., Scattered], donates: bool = False) -> None:
        self.__name__: str = run.__name__
        self._run, self._donates = run, donates
        self.programs: Recent[Any, Any] = Recent()  # by treedef and layouts

    def __call__(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None = None) -> Scattered:
        intercepted(self, replicas, inputs, kwargs)
        kw, rest = (None, ()) if kwargs is None else (kwargs._layout, kwargs._arrays)
        refuse_freed([*inputs._arrays, *rest], "DataParallel", lambda _: "an array of the batch")
        if inputs._layout.mesh.spans_processes:
            donated, held = (replicas[0], replicas[1:]) if self._donates else (None, replicas)
            return self._of_trees(inputs, kwargs)(donated, held, inputs, kwargs)
        leaves, treedef = jax.tree.flatten(replicas)
        refuse_freed(leaves, "DataParallel", lambda i: f"parameter {i} of {len(leaves)}")
        program = self.flat(treedef, inputs._layout, kw)
        count = treedef.children()[0].num_leaves if self._donates else 0
        operands = (leaves[:count], leaves[count:], *inputs._arrays, *rest)
        out = program.run(*operands) if is_plain() else arguments_of_this_jit_need_jdp_replicate(program.run, operands)
        return program.scattered(out)

    def flat(self, replicas: Any, inputs: Layout, kwargs: Layout | None) -> FlatProgram:
        """Returns the program for replicas of this treedef, and for inputs and kwargs of these layouts."""
        key = replicas, inputs, kwargs
        found = self.programs.used(key)
        if found is None:
            found = self.programs[key] = FlatProgram(self._run, *key)
        return found

    def _of_trees(self, inputs: Scattered, kwargs: Scattered | None) -> Callable[..., Scattered]:
        """Returns the program of several processes, which tell each other its operands by their names."""
        key = inputs._layout, None if kwargs is None else kwargs._layout
        found = self.programs.used(key)
        if found is None:
            run, donates = self._run, self._donates

            def of_trees(donated: Tree, held: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
                return run((donated, *held) if donates else held, inputs, kwargs)

            of_trees.__name__ = of_trees.__qualname__ = run.__name__
            program = jax.jit(of_trees, in_shardings=(None, None, *_where(inputs, kwargs)), donate_argnums=0)
            roots = ("donated", "params", "args", "kwargs")
            found = self.programs[key] = inputs._layout.mesh.same_program(program, roots)
        return found

    def jitted(self, inputs: Scattered | None, kwargs: Scattered | None) -> Any:
        """Returns the function of the trees themselves: names in it are those of the operands."""
        return jax.jit(self._run, in_shardings=(None, *_where(inputs, kwargs)))


def _where(*arguments: Scattered | None) -> tuple[Any, ...]:
    return tuple(None if s is None else Scattered(s._layout.shardings, s._layout) for s in arguments)


class FlatProgram:
    """A program that takes flat lists of arrays. The treedef of the replicas and the layouts of the batch are its own.

    Each call flattens the parameters anyway, to see where they lie. JAX would flatten them again, and sort the keys of
    every dict. `run` takes the replicas' leaves that are donated, the others, and the arrays of inputs and kwargs.
    """

    def __init__(self, run: Callable[..., Scattered], replicas: Any, inputs: Layout, kwargs: Layout | None) -> None:
        # The layouts of the results: each is known once JAX has traced the program for operands of some shapes.
        layouts: list[Layout] = []
        cut = len(inputs.arrays)

        def of_leaves(donated: list[Any], held: list[Any], *arrays: Any) -> tuple[Any, ...]:
            kw = None if kwargs is None else Scattered(arrays[cut:], kwargs)
            out = run(replicas.unflatten([*donated, *held]), Scattered(arrays[:cut], inputs), kw)
            layout = out._layout
            if layout not in layouts:
                layouts.append(layout)
            # The number of leading Nones is the index of the layout. For a `Scattered` JAX would call Python code.
            values = layout.fill(out._arrays) if layout.is_gathered else out._arrays
            return *[None] * layouts.index(layout), values

        of_leaves.__name__ = of_leaves.__qualname__ = run.__name__
        # With in_shardings the call itself puts numpy arrays onto the devices, at a fraction of what a device_put
        # before it costs, and into the one program that placed arrays run as well.
        where = (*inputs.shardings, *(kwargs.shardings if kwargs else ()))
        self.run: Any = jax.jit(of_leaves, in_shardings=(None, None, *where), donate_argnums=0)
        self.waits: bool = True  # whether few runs may be in flight at a time, because replicas wait for each other
        self._layouts = layouts

    def layout(self, out: tuple[Any, ...]) -> Layout:
        """Returns the layout of a run's results. If it `is_gathered`, the last of these is the tree itself."""
        return self._layouts[len(out) - 1]

    def scattered(self, out: tuple[Any, ...]) -> Scattered:
        """Returns a run's results as a `Scattered`."""
        return Scattered(jax.tree.leaves(out), self.layout(out))


def arguments_of_this_jit_need_jdp_replicate(program: Any, operands: Sequence[Any]) -> Any:
    """Calls a program as part of the user's own `jax.jit`.

    Where an argument of that is committed to one device, JAX refuses it later, in a text that ends with this name.
    """
    return program(*operands)


def is_plain() -> bool:
    """Returns True if a call now runs a compiled program, and is no part of another."""
    return trace_state_clean() and not _settings.jax_disable_jit


_settings: Any = jax.config
# Not a dict with weak keys: it compares them by value, and Linen modules need not be hashable.
_made: dict[int, tuple[Callable[[], Any], dict[Hashable, Any]]] = {}
MOST_HELD = 16
_held: list[tuple[Any, dict[int, Any]]] = []  # what cannot be referred to weakly, and its store; the last used last


def made_once(fn: Any, key: Hashable, make: Callable[[Callable[..., Any]], T], store: dict[int, Any] = _made) -> T:
    """Returns `make(fn)`, made once per `fn` and `key`, and freed with `fn`.

    `store` refers to `fn` weakly, and `make` gets a stand-in that calls `fn` and does not keep it alive. There is no
    weak reference to an object of a class with `__slots__`: the last 16 of those that were used stay alive. Python
    makes a bound method again at each access, so it is known by its object and its function.
    """
    owner, method = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn, None)
    number = id(owner)
    entry = store.get(number)
    if entry is None or entry[0]() is not owner:
        try:
            ref: Callable[[], Any] = weakref.ref(owner, lambda _: store.pop(number, None))
        except TypeError:  # of a class with slots
            ref = lambda: owner  # noqa: E731
        entry = store[number] = (ref, {})
    ref, made = entry
    if not isinstance(ref, weakref.ref):
        _hold(owner, store)
    if (method, key) not in made:

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            target: Any = ref()
            return target(*args, **kwargs) if method is None else method(target, *args, **kwargs)

        stand_in.__name__ = str(getattr(fn, "__name__", type(fn).__name__))
        for other in [x for x in made if _is_of_what_is_gone(x[1])]:
            del made[other]
        made[method, key] = make(stand_in)
    return made[method, key]


def _is_of_what_is_gone(key: Any) -> bool:
    """Returns True if a key refers weakly to an object, such as a wrapper's configuration, that has been freed."""
    return isinstance(key, tuple) and any(isinstance(x, weakref.ref) and x() is None for x in key)


def _hold(owner: Any, store: dict[int, Any]) -> None:
    """Keeps alive what is known by its id, so that no other object gets it; drops what was used longest ago."""
    _held[:] = [x for x in _held if x[0] is not owner or x[1] is not store] + [(owner, store)]
    if len(_held) > MOST_HELD:
        oldest, its_store = _held.pop(0)
        its_store.pop(id(oldest), None)


SIZES = 128
"""For how many batch sizes each function keeps its programs, its layouts and its known calls."""


class Recent(OrderedDict[K, T]):
    """A dict of at most `SIZES` entries; a new one takes the place of the one that was asked for longest ago."""

    def used(self, key: K) -> T | None:
        """Returns the entry with this key, which is now the last to be dropped; None if there is no such entry."""
        try:
            if len(self) > 1:  # to find a key twice takes long where a large model's treedef is part of it
                self.move_to_end(key)
        except KeyError:
            return None
        return self.get(key)

    def __setitem__(self, key: K, value: T) -> None:
        super().__setitem__(key, value)
        while len(self) > SIZES:
            self.popitem(last=False)


Layouts = Recent[Any, Layout]
"""The layouts of the batches of one door. A key holds all that decides how a batch is cut."""

# XLA's CPU client deadlocks (and aborts the process after a minute) once about 32 programs with
# collectives are in flight over several virtual devices; 12 keep two cores busy just as well. One
# small output of each is held until then. All wrappers share the devices, so they share the queue.
STEPS_IN_FLIGHT = 12
_SIZE = operator.attrgetter("size")
WAITED_FOR_AT_ONCE = 4  # the first wait costs most, because its code has left the caches
_running: collections.deque[tuple[str, jax.Array]] = collections.deque()  # each with its program's name


_ALONE = contextlib.nullcontext()  # what a dispatch runs in if there are no other processes


def dispatch(program: Callable[..., T], mesh: ReplicaMesh, *args: Any) -> T:
    """Runs `program(*args)`; on several CPU devices it waits for the oldest runs if too many are in flight."""
    few, exchange = mesh.may_deadlock, mesh.exchange
    if exchange is not None:
        exchange.come_to(program.__name__)
    with exchange.dispatching() if exchange is not None else _ALONE:
        out = program(*args)
    if (few or exchange) and (arrays := out._arrays if type(out) is Scattered else jax.tree.leaves(out)):
        smallest = min(arrays, key=_SIZE)
        if exchange is not None:
            exchange.dispatched(concrete(smallest))
        if few:
            _wait_for_earlier(program, smallest)
    return out


def dispatch_step(
    program: Callable[..., Any], mesh: ReplicaMesh, args: tuple[Any, ...], keep: Callable[..., tuple[S, dict[str, Any]]]
) -> tuple[S, dict[str, Any]]:
    """Dispatches a training step; its loss stands for the run, because its state is donated to the next step."""
    exchange = mesh.exchange
    if exchange is None:
        found = run_and_keep(program, args, keep)
    else:
        exchange.come_to(program.__name__)
        with exchange.dispatching():
            found = run_and_keep(program, args, keep)
        exchange.dispatched(concrete(found[1]["loss"]))
    if mesh.may_deadlock:
        _wait_for_earlier(program, found[1]["loss"])
    return found


def run_and_keep(program: Callable[..., Any], args: tuple[Any, ...], keep: Callable[..., T]) -> T:
    """Returns `keep(program(*args))`; no Ctrl-C comes between what the program frees and what `keep` stores.

    Python runs the handler of a signal between any two of its instructions, those inside of JAX as well. In here the
    first SIGINT waits until the result is kept. A second one does not wait.
    """
    handler = getsignal(_SIGINT)
    # Only the main thread gets signals. A handler of C's is not Python's to call, and ours is at work already.
    if handler is _hold_back or not callable(handler) or threading.get_ident() != _MAIN_THREAD:
        return keep(program(*args))
    _held_back[:] = [handler]
    set_handler(_SIGINT, _hold_back)
    try:
        return keep(program(*args))
    finally:
        set_handler(_SIGINT, handler)
        if len(_held_back) > 1:
            _deliver()


_SIGINT = int(signal.SIGINT)  # an IntEnum takes longer
_MAIN_THREAD = threading.main_thread().ident
_held_back: list[Any] = []  # the handler of SIGINT, and the frames of the signals that it has not been called for


def _hold_back(number: int, frame: FrameType | None) -> None:
    _held_back.append(frame)
    if len(_held_back) > 2:
        _deliver()


def _deliver() -> None:
    while len(_held_back) > 1:
        _held_back[0](_SIGINT, _held_back.pop())


def _wait_for_earlier(program: Any, output: Any) -> None:
    """Keeps one output of a call that was just dispatched, and waits for the oldest of too many."""
    value = concrete(output)
    if value is None:
        return
    _running.append((program.__name__, value))
    if len(_running) >= STEPS_IN_FLIGHT:
        _wait(STEPS_IN_FLIGHT - WAITED_FOR_AT_ONCE)


def wait_for_all() -> None:
    """Waits until nothing that was dispatched is running any more."""
    _wait(0)


def _wait(most: int) -> None:
    """Waits for the oldest, until there are no more than that."""
    while len(_running) > most:
        try:
            name, oldest = _running.popleft()
        except IndexError:  # another thread has taken the last one
            return
        if oldest.is_deleted():  # the user may have donated it
            continue
        try:
            oldest.block_until_ready()
        except Exception as error:  # raised here, because the results of that call may never be looked at
            error.add_note(
                f"jdp: this is the error of an earlier call, of {name!r}; the call that raises it only waited for that "
                f"one, and has not failed itself."
            )
            raise


_Interceptor = tuple[Callable[..., None], bool, Callable[..., None]]


def _nobody(*_: Any) -> None:
    pass


_NO_INTERCEPTOR: _Interceptor = (_nobody, False, _nobody)
_interceptor: contextvars.ContextVar[_Interceptor] = contextvars.ContextVar("jdp_interceptor", default=_NO_INTERCEPTOR)


@contextlib.contextmanager
def intercept(take: Callable[..., None], *, shapes: bool, stepped: Callable[..., None] = _nobody) -> Iterator[None]:
    """Gives `take` every program of replicas, and of a step, that is about to run in here, with its operands.

    It may end the call by raising. With `shapes` the operands are shapes alone: nothing is asked of other processes, or
    put anywhere. `stepped` gets every program of a step that has run, with the state after and the metrics.
    """
    token = _interceptor.set((take, shapes, stepped))
    try:
        yield
    finally:
        _interceptor.reset(token)


def intercepted(program: Any, *operands: Any) -> None:
    """Tells an interceptor that a program is about to run with these operands."""
    _interceptor.get()[0](program, *operands)


def stepped(program: Any, state: Any, metrics: Any) -> None:
    """Tells an interceptor that the program of a step has run, and its results."""
    _interceptor.get()[2](program, state, metrics)


def is_watched() -> bool:
    """Returns True if an interceptor takes the programs."""
    return _interceptor.get() is not _NO_INTERCEPTOR


def capturing() -> bool:
    """Returns True if this call is made with shapes, so that its program can be looked at."""
    return _interceptor.get()[1]


def are_freed(leaves: Sequence[Any]) -> bool:
    """Returns True if an array among them has been freed, as those that were donated to a training step."""
    try:
        # Every call checks every leaf, so no Python code runs per leaf, and no method is looked up.
        return bool(leaves) and any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, TypeError):  # leaves of several types: a key among arrays; numbers, tracers
        kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}  # never a tracer's
        return any(x.is_deleted() for x in leaves if type(x) in kinds)


def refuse_freed(leaves: Sequence[Any], verb: str, name: Callable[[int], str]) -> None:
    """Raises a `RuntimeError` for an array that has been freed, because XLA may crash on one; `name(i)` is a leaf's."""
    if are_freed(leaves):
        i = next(i for i, x in enumerate(leaves) if issubclass(type(x), jax.Array) and x.is_deleted())
        raise RuntimeError(
            f"jdp.{verb}: {name(i)} has been freed; a training step frees the state that it gets. Keep a copy from "
            f"before the step, jax.tree.map(jnp.copy, state.params), or make the step with donate=False."
        )
