"""The replicas' programs: made once for each function, dispatched a few at a time, and shown to `explain` first."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
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
from jax.core import Tracer

from .._jax.private import trace_state_clean
from .layout import Layout, Tree
from .replica_mesh import ReplicaMesh, settings
from .scattered import Scattered, concrete

K = TypeVar("K")
S = TypeVar("S")
T = TypeVar("T")


class ReplicaProgram:
    """A function that runs on all replicas (from `on_replicas`), and its programs: one for each kind of arguments.

    With `donates`, the argument `replicas` is a tuple, and a program frees the arrays in its first entry (donation).
    """

    def __init__(self, run: Callable[..., Scattered], donates: bool = False) -> None:
        self.__name__: str = run.__name__
        self._run, self._donates = run, donates
        self.programs: Recent[Any, Any] = Recent()  # by treedef and layouts

    def __call__(self, replicas: Tree, inputs: Scattered, kwargs: Scattered | None = None) -> Scattered:
        intercepted(self, replicas, inputs, kwargs)
        kw, rest = (None, ()) if kwargs is None else (kwargs._layout, kwargs._arrays)
        refuse_freed([*inputs._arrays, *rest], "DataParallel", lambda _: "an array of the batch")
        mesh = inputs._layout.mesh
        if mesh.spans_processes:
            donated, held = (replicas[0], replicas[1:]) if self._donates else (None, replicas)
            found = self._of_trees(inputs, kwargs)(donated, held, inputs, kwargs)
            free_rest(jax.tree.leaves(donated), mesh)
            return found
        leaves, treedef = jax.tree.flatten(replicas)
        refuse_freed(leaves, "DataParallel", lambda i: f"parameter {i} of {len(leaves)}")
        program = self.flat(treedef, inputs._layout, kw)
        count = treedef.children()[0].num_leaves if self._donates else 0
        operands = (leaves[:count], leaves[count:], *inputs._arrays, *rest)
        out = program.run(*operands) if is_plain() else arguments_of_this_jit_need_jdp_replicate(program.run, operands)
        free_rest(leaves[:count], mesh)
        return program.scattered(out)

    def flat(self, replicas: Any, inputs: Layout, kwargs: Layout | None) -> FlatProgram:
        """Returns the program for replicas of this treedef, and for inputs and kwargs of these layouts."""
        key = replicas, inputs, kwargs
        found = self.programs.used(key)
        if found is None:
            found = self.programs[key] = FlatProgram(self._run, *key)
        return found

    def _of_trees(self, inputs: Scattered, kwargs: Scattered | None) -> Callable[..., Scattered]:
        """Returns the program for several processes. It takes trees, because the processes compare operands by path."""
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
        """Returns the jitted function of the trees themselves, whose operands have names, for `explain`."""
        return jax.jit(self._run, in_shardings=(None, *_where(inputs, kwargs)))


def _where(*arguments: Scattered | None) -> tuple[Any, ...]:
    """Returns `in_shardings` for these arguments: each tree with shardings in place of its arrays."""
    return tuple(None if s is None else Scattered(s._layout.operands, s._layout) for s in arguments)


class FlatProgram:
    """A program that takes flat lists of arrays. It belongs to one treedef of the replicas and to one layout of inputs.

    A call has flattened the parameters anyway, to see where they lie. With trees, JAX would flatten them once more and
    sort the keys of every dict. `run` takes the donated leaves of the replicas, the other leaves, and the arrays of
    inputs and kwargs.
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
            # A program cannot return a layout, so the number of leading Nones is its index. With a `Scattered` as the
            # result, JAX would call Python code in every run.
            values = layout.fill(out._arrays) if layout.is_gathered else out._arrays
            return *[None] * layouts.index(layout), values

        of_leaves.__name__ = of_leaves.__qualname__ = run.__name__
        # With in_shardings the call itself puts numpy arrays onto the devices, at a fraction of what a device_put
        # before it costs. Arrays that are on the devices already run the same program.
        where = (*inputs.operands, *(kwargs.operands if kwargs else ()))
        self.run: Any = jax.jit(of_leaves, in_shardings=(None, None, *where), donate_argnums=0)
        self.is_limited: bool = True  # whether only a few runs may be in flight at once, because XLA may deadlock
        self._layouts = layouts

    def layout(self, out: tuple[Any, ...]) -> Layout:
        """Returns the layout of a run's results. If it `is_gathered`, the last of these is the tree itself."""
        return self._layouts[len(out) - 1]

    def scattered(self, out: tuple[Any, ...]) -> Scattered:
        """Returns a run's results as a `Scattered`."""
        return Scattered(jax.tree.leaves(out), self.layout(out))


def arguments_of_this_jit_need_jdp_replicate(program: Any, operands: Sequence[Any]) -> Any:
    """Calls a program as part of the user's own `jax.jit`.

    If an argument of that jit is committed to one device, JAX raises an error later, whose text ends with this name.
    """
    return program(*operands)


def is_plain() -> bool:
    """Returns True if a call now runs a compiled program, and is no part of another."""
    return trace_state_clean() and not settings.jax_disable_jit


# Not a dict with weak keys: it compares them by value, and Linen modules need not be hashable.
_made: dict[int, tuple[Callable[[], Any], dict[Hashable, Any]]] = {}
MOST_HELD = 16
# Objects without weak references, each with its store; the one that was used last is the last one.
_kept_alive: list[tuple[Any, dict[int, Any]]] = []


def made_once(fn: Any, key: Hashable, make: Callable[[Callable[..., Any]], T], store: dict[int, Any] = _made) -> T:
    """Returns `make(fn)`, made once per `fn` and `key`, and freed with `fn`.

    `store` refers to `fn` weakly, and `make` gets a stand-in that calls `fn` and does not keep it alive. An object of a
    class with `__slots__` has no weak references: the 16 that were used last are kept alive. Python makes a new bound
    method at each access, so a method is known by its object and its function.
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
        _keep_alive(owner, store)
    if (method, key) not in made:

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            target: Any = ref()
            return target(*args, **kwargs) if method is None else method(target, *args, **kwargs)

        stand_in.__name__ = str(getattr(fn, "__name__", type(fn).__name__))
        for other in [x for x in [*made] if _refers_to_freed(x[1])]:
            made.pop(other, None)  # another thread may have done so
        made.setdefault((method, key), make(stand_in))
    return made[method, key]


def _refers_to_freed(key: Any) -> bool:
    """Returns True if a key refers weakly to an object, such as a wrapper's configuration, that has been freed."""
    return isinstance(key, tuple) and any(isinstance(x, weakref.ref) and x() is None for x in key)


def _keep_alive(owner: Any, store: dict[int, Any]) -> None:
    """Keeps an object alive, so that no other object gets its id; drops the one that was used longest ago."""
    _kept_alive[:] = [x for x in _kept_alive if x[0] is not owner or x[1] is not store] + [(owner, store)]
    if len(_kept_alive) > MOST_HELD:
        oldest, its_store = _kept_alive.pop(0)
        its_store.pop(id(oldest), None)


SIZES = 128
"""For how many batch sizes each function keeps its programs, its layouts and its known calls."""


class Recent(OrderedDict[K, T]):
    """A dict of at most `SIZES` entries: a new entry replaces the one that was used longest ago (an LRU cache)."""

    def used(self, key: K) -> T | None:
        """Returns the entry with this key, and marks it as used; None if there is no such entry."""
        try:
            if len(self) > 1:  # looking a key up twice is slow if a large model's treedef is part of it
                self.move_to_end(key)
        except KeyError:
            return None
        return self.get(key)

    def __setitem__(self, key: K, value: T) -> None:
        super().__setitem__(key, value)
        while len(self) > SIZES:
            self.popitem(last=False)


Layouts = Recent[Any, Layout]
"""The layouts of the batches of one entry point. A key holds all that decides how a batch is cut."""

# XLA's CPU client deadlocks (and aborts the process after a minute) once about 32 programs with
# collectives are in flight over several virtual devices; 12 keep two cores busy just as well. One
# small output of each is held until then. All wrappers share the devices, so they share the queue.
STEPS_IN_FLIGHT = 12
_SIZE = operator.attrgetter("size")
WAITED_FOR_AT_ONCE = 4  # several at once, because the first wait costs most: its code has left the processor's caches
_running: collections.deque[tuple[str, jax.Array]] = collections.deque()  # each with its program's name


_ALONE = contextlib.nullcontext()  # the context of a dispatch if there are no other processes


def dispatch(program: Callable[..., T], mesh: ReplicaMesh, *args: Any) -> T:
    """Runs `program(*args)`; on several CPU devices it waits for the oldest runs if too many are in flight."""
    exchange = mesh.exchange
    if exchange is not None:
        exchange.come_to(program.__name__)
    with exchange.dispatching() if exchange is not None else _ALONE:
        out = program(*args)
    if (mesh.may_deadlock or exchange) and (arrays := out._arrays if type(out) is Scattered else jax.tree.leaves(out)):
        smallest = min(arrays, key=_SIZE)
        if exchange is not None:
            exchange.dispatched(concrete(smallest))
        if mesh.may_deadlock:
            _wait_for_earlier(program, smallest)
    return out


def dispatch_step(
    program: Callable[..., Any],
    mesh: ReplicaMesh,
    args: tuple[Any, ...],
    keep: Callable[..., tuple[S, dict[str, Any]]],
    donated: Sequence[Any],
) -> tuple[S, dict[str, Any]]:
    """Dispatches a training step. Later calls wait for its loss, because its state is donated to the next step."""
    exchange = mesh.exchange
    if donated:
        keep = functools.partial(_free_and_keep, donated, mesh, keep)
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


def _free_and_keep(donated: Sequence[Any], mesh: ReplicaMesh, keep: Callable[[Any], T], out: Any) -> T:
    free_rest(donated, mesh)
    return keep(out)


def free_rest(donated: Sequence[Any], mesh: ReplicaMesh) -> None:
    """Frees donated arrays of which XLA has freed only a part. Using such an array may end the process.

    On CPUs `np.asarray(x)` shares the memory of the first device. XLA then copies that part, and frees the parts of the
    other devices. JAX looks only at the first part, so `x.is_deleted()` is False.
    """
    if not donated or not mesh.may_deadlock:  # it happens only on several CPU devices
        return
    with contextlib.suppress(AttributeError, TypeError):  # leaves of several types, as in `are_freed`
        if all(map(type(donated[0]).is_deleted, donated)):  # as a rule; no Python code runs per leaf
            return
    for x in donated:
        if issubclass(type(x), jax.Array) and not x.is_deleted():  # never a tracer
            if any(shard.data.is_deleted() for shard in x.addressable_shards):
                x.delete()


def run_and_keep(program: Callable[..., Any], args: tuple[Any, ...], keep: Callable[..., T]) -> T:
    """Returns `keep(program(*args))`; Ctrl-C cannot come between the program, which frees the old state, and `keep`.

    Python may run the handler of a signal between any two instructions, also of JAX's code. In here the handler of a
    first SIGINT is called after `keep`. A second SIGINT does not wait.
    """
    handler = getsignal(_SIGINT)
    # Only the main thread gets signals. Python cannot call a handler that C code has installed. If the handler is
    # `_hold_back`, this call is inside of another one.
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
    """Keeps one output of a call that was just dispatched; if too many calls are in flight, waits for the oldest."""
    value = concrete(output) if isinstance(output, Tracer) else output
    if value is None:
        return
    _running.append((program.__name__, value))
    if len(_running) >= STEPS_IN_FLIGHT:
        _wait(STEPS_IN_FLIGHT - WAITED_FOR_AT_ONCE)


def wait_for_all() -> None:
    """Waits until nothing that was dispatched is running any more."""
    _wait(0)


def _wait(most: int) -> None:
    """Waits for the oldest runs, until at most `most` are in flight."""
    while len(_running) > most:
        try:
            name, oldest = _running.popleft()
        except IndexError:  # another thread has taken the last one
            return
        if oldest.is_deleted():  # the user may have donated it
            continue
        try:
            oldest.block_until_ready()
        except Exception as error:
            if oldest.is_deleted():  # another thread has done so since
                continue
            # Raised here, because the results of that call may never be looked at
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
    """Calls `take(program, *operands)` before each program of replicas, or of a training step, that runs in its body.

    `take` may raise, to end the call. With `shapes` the operands have shapes and no values: no array is put anywhere,
    and the other processes are asked nothing. `stepped(program, state, metrics)` is called after the program of each
    step has run.
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
    """Returns True if operands have shapes and no values, because only the program is wanted (see `intercept`)."""
    return _interceptor.get()[1]


def are_freed(leaves: Sequence[Any]) -> bool:
    """Returns True if one of the leaves is an array that was freed, as by a training step that it was donated to."""
    try:
        # Every call checks every leaf, so this is written without Python code, or the look-up of a method, per leaf.
        return bool(leaves) and any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, TypeError):  # leaves of several types: a key among arrays; numbers, tracers
        kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}  # never a tracer's
        return any(x.is_deleted() for x in leaves if type(x) in kinds)


def all_lie(leaves: list[Any], mesh: ReplicaMesh) -> bool:
    """Returns True if all leaves are arrays that are replicated over the mesh, and none was freed."""
    try:
        found = [x.sharding for x in leaves]
    except AttributeError:  # numbers, numpy's arrays and tracers have none
        return False
    # Usually all leaves share one sharding object, which `count` compares by identity; so only one is looked at.
    lies = bool(found) and (found[0] == mesh.replicated or mesh.replicates(found[0]))
    return not found or lies and found.count(found[0]) == len(found) and not are_freed(leaves)


def refuse_freed(leaves: Sequence[Any], verb: str, name: Callable[[int], str]) -> None:
    """Raises a `RuntimeError` for a freed array, because XLA may crash on one; `name(i)` is the name of leaf i."""
    if are_freed(leaves):
        i = next(i for i, x in enumerate(leaves) if issubclass(type(x), jax.Array) and x.is_deleted())
        raise RuntimeError(
            f"jdp.{verb}: {name(i)} has been freed; a training step frees the state that it gets. Keep a copy from "
            f"before the step, jax.tree.map(jnp.copy, state.params), or make the step with donate=False."
        )
