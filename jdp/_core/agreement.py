"""The processes agree on each batch: what it is without its rows, and how many rows each device has."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jax.private import trace_state_clean
from .._processes.agree import CONTAINERS, difference
from .._processes.coordination import DesyncError, FailedError, text_of
from .._processes.exchange import Call, by_value, exchange_of
from .._processes.places import limits
from .inputs import paths_of
from .layout import Cut, Layout, Leaf, Static, Tree, Whole
from .replica_mesh import ReplicaMesh

Outline = tuple[tuple[str, str], ...]
"""For each leaf its path, and its dtype and shape without the rows."""

_WEAK = " (of Python)"  # ends the description of an array that is weakly typed, as Python's numbers are

_Words = tuple[int, ...]  # numbers of 32 bits, which the processes gather
_NO_BATCH, _NEVER_A_BATCH, _FAILED = (0, 0), (0, 1), (0, 2)  # in place of the digest of a batch


Finish = Callable[[], tuple[tuple[int, ...], Outline]]
"""Waits until the descriptions of the other processes' batches have arrived.

Returns the rows on each device (an empty tuple if no process has a batch any more), and the outline of the others'
batch if this process never had one (else an empty outline).
"""


def begin(
    mesh: ReplicaMesh,
    verb: str,
    sizes: Sequence[int],
    outline: Outline | None,
    failure: BaseException | None = None,
    never: bool = False,
) -> Finish:
    """Sends a description of a batch to the other processes, in a collective; returns the function that waits for them.

    Args:
        mesh: the devices of all replicas.
        verb: the name of the call in errors.
        sizes: the rows on each device of this process.
        outline: what the batch is; None if this process has run out of data.
        failure: the error that this process has instead of a batch; the others get it, so that they do not wait.
        never: this process never had a batch, and asks what the others' batches look like.
    """
    group = _group(mesh)
    batch = _FAILED if failure is not None else _digest(outline) if outline else _NEVER_A_BATCH if never else _NO_BATCH
    rows = sizes or [0] * len(mesh.own_indices)
    # The first call of a kind gets the longer limit: loading the data or making the model may take one process much
    # longer than another. Between two steps there is no such difference.
    seconds = limits.step if verb in group.calls else limits.start
    group.calls.add(verb)
    if group.last is None:
        group.start(verb)
    call = group.exchange.next_call(verb)
    # The words of each device: two for the verb, two for the batch, and its rows. The gather adds its own number.
    gathered = group.gather(call, tuple((*_digest(((verb, ""),)), *batch, size) for size in rows), seconds)
    return functools.partial(_finish, group, call, outline, failure, gathered, seconds)


def _finish(
    group: _Group, call: Call, outline: Outline | None, failure: BaseException | None, gathered: Any, seconds: float
) -> tuple[tuple[int, ...], Outline]:
    """Waits up to `seconds` for `gathered`, the words of all processes; see `Finish`.

    Raises:
        DesyncError: the processes' batches differ, or a process does not make this call.
    """
    here, words = call.exchange.here, _read(group, call, gathered, seconds)
    sizes = tuple(words[:, -2].tolist())
    if words[0, 2] and (words[:, :4] == words[0, :4]).all():  # the same call, and the same batch but for its rows
        return sizes, ()
    if (words[:, :2] != words[0, :2]).any():
        call.tell("", seconds)  # raises, because the processes are in different calls
    mesh = group.mesh
    batches = {p: tuple(words[mesh.indices_of(p)[0], 2:4].tolist()) for p in mesh.processes}
    if _FAILED in batches.values():
        texts = call.tell("" if failure is None else _text_of(failure), seconds)
        process = next(p for p, batch in batches.items() if batch == _FAILED)
        raise FailedError(
            f"jdp.{call.what}: process {process} has no batch, but an error ({texts[process]}); all processes make the "
            f"same calls. Look at the output of that process."
        )
    having = [p for p, batch in batches.items() if batch not in (_NO_BATCH, _NEVER_A_BATCH)]
    if len({batches[p] for p in having}) > 1:
        told = call.tell(outline or "", seconds)
        what = difference({p: dict(told[p]) for p in having})
        raise DesyncError(
            f"jdp.{call.what}: the processes' batches differ: {what or 'in their order'}; the number of rows (*) may "
            f"differ between processes, nothing else. Pass arrays of one shape and dtype."
        )
    theirs: Outline = ()
    if having and _NEVER_A_BATCH in batches.values():
        if here == having[0]:
            call.leave(outline)
        if batches[here] == _NEVER_A_BATCH:
            theirs = tuple((path, what) for path, what in call.told_by(having[:1], seconds)[having[0]])
    return sizes if having else (), theirs


def _text_of(failure: BaseException) -> str:
    """Returns the text about a failure that the other processes get, with jdp's own notes (which row it was)."""
    notes = [note for note in getattr(failure, "__notes__", ()) if note.startswith("jdp.")]
    return "; ".join([f"{type(failure).__name__}: {text_of(failure)}"[:500], *notes])


def _read(group: _Group, call: Call, gathered: Any, seconds: float) -> np.ndarray:
    """Returns the words of all devices, once they have arrived."""

    def is_there(within: float) -> bool:
        # Not block_until_ready, which neither handles signals nor notices that a process is gone.
        began = time.monotonic()
        while not gathered.is_ready():
            waited = time.monotonic() - began
            if waited > within:
                return False
            time.sleep(min(_NAP, waited / 4))
        return True

    call.wait(is_there, seconds)
    try:
        return np.asarray(gathered)[group.places]
    except jax.errors.JaxRuntimeError as error:
        _raise_absent(call, error)


def _raise_absent(call: Call, error: Exception) -> NoReturn:
    """Raises after a gather has failed on its connection; names the process that died or did not make the call."""

    def all_are_here(seconds: float) -> bool:
        time.sleep(seconds / 4)
        return {*call.entries()} >= {*call.exchange.processes}

    call.leave()
    call.wait(all_are_here, 0)
    raise DesyncError(
        f"jdp.{call.what}: the processes cannot reach each other ({str(error).splitlines()[0]}), and all have come to "
        f"this call. Look at the network between their machines."
    ) from error


_NAP = 1e-3  # seconds between two looks


def fail(mesh: ReplicaMesh, verb: str, failure: Exception) -> None:
    """Sends an error to the other processes; does nothing if there are none, or while JAX traces."""
    if mesh.exchange is None or not trace_state_clean():
        return
    try:
        begin(mesh, verb, (), None, failure)()
    except RuntimeError:  # or a DesyncError; the caller raises the failure itself
        pass


class _Group:
    """The processes of a mesh, and the program that gathers a few words (32-bit numbers) of each device."""

    def __init__(self, mesh: ReplicaMesh) -> None:
        devices = [*mesh.devices]
        self.mesh, self.exchange = mesh, exchange_of(mesh.processes)
        self.last: Any = None  # the result of the last gather
        self.calls: set[str] = set()  # the verbs that were called before
        # Gloo keeps separate connections for each order of devices, and this gather has its own order. So if another
        # process makes a different call, this one waits for it, and can report it. In the mesh's order the bytes of
        # that call would arrive here, be taken for words, and crash both processes.
        self._order = np.roll(np.arange(len(devices)), 1 if devices[0].platform == "cpu" else 0)
        self.places = np.argsort(self._order)  # the row of each of the mesh's devices in a gather's result
        self._ordered = Mesh(np.array(devices)[self._order], ("replicas",))
        cut, whole = PartitionSpec("replicas"), PartitionSpec()
        mapped = jax.shard_map(
            _gather_words, mesh=self._ordered, in_specs=(cut, whole), out_specs=whole, check_vma=False
        )
        self._program = jax.jit(mapped)
        self._placed = functools.lru_cache(maxsize=16)(self._place)

    def start(self, verb: str) -> None:
        """Compares the devices, before the first gather."""
        devices = " ".join(f"{d.platform}:{d.id}" for d in self.mesh.devices)
        found = self.exchange.tell(f"{verb} (its first call)", devices, limits.start)
        if len({*found.values()}) > 1:
            raise DesyncError(
                f"jdp.{verb}: the processes name different devices: {by_value(found)}; one call runs on one list of "
                f"devices. Pass the same devices, in the same order, on all processes."
            )
        self.last = self._array(np.zeros((len(self._order), 6), np.uint32), PartitionSpec())

    def gather(self, call: Call, own: tuple[_Words, ...], seconds: float) -> Any:
        """Starts a gather of all devices' words: row `places[i]` has those of device i, then the gather's number."""
        placed = self._placed(own)
        try:
            with self.exchange.dispatching(seconds):
                self.last = self._program(placed, self.last)
        except ValueError as error:  # a device that computes in this thread raises the error of the connection so
            if "Gloo" not in str(error):
                raise
            _raise_absent(call, error)
        return self.last

    def _place(self, own: tuple[_Words, ...]) -> jax.Array:
        words = np.zeros((len(self._order), len(own[0])), np.uint32)
        words[[*self.mesh.own_indices]] = own
        return self._array(words[self._order], PartitionSpec("replicas"))

    def _array(self, host: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(host.shape, NamedSharding(self._ordered, spec), lambda index: host[index])


def _gather_words(words: jax.Array, before: jax.Array) -> jax.Array:
    # The number is computed from the result of the gather before, so that gathers run in the order of the calls.
    number = before[:1, -1:] + 1
    return jax.lax.all_gather(jnp.concatenate([words, number], axis=1), "replicas", tiled=True)


def _group(mesh: ReplicaMesh) -> _Group:
    if mesh.gathering is None:
        mesh.gathering = _Group(mesh)
    return mesh.gathering


def _digest(outline: Outline) -> _Words:
    """Returns a hash of 64 bits, as two words; the first is not 0."""
    first, second = np.frombuffer(hashlib.sha256(repr(outline).encode()).digest()[:8], np.uint32).tolist()
    return first | 1, second


def outline_of(leaves: Sequence[Any], specs: Sequence[Leaf], treedef: Any, root: str | tuple[str, ...]) -> Outline:
    """Returns the containers, and of each leaf the path with its dtype and shape (`*` for rows) or its Python value."""
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    containers, paths = (CONTAINERS, json.dumps(skeleton(tree))), paths_of(tree, root)
    return (containers, *[(path, _kind_of(x, spec)) for path, x, spec in zip(paths, leaves, specs, strict=True)])


def _kind_of(x: Any, spec: Leaf) -> str:
    if isinstance(spec, Static):
        name = type(spec.value).__name__
        return f"{name} {spec.value!r}" if isinstance(spec.value, bool | int | float | str) else name
    shape = ["*" if axis == spec.axis else str(size) for axis, size in enumerate(x.shape)]
    weak = _WEAK if getattr(x, "weak_type", False) else ""
    return f"{x.dtype}[{', '.join(shape)}]{' (whole)' if isinstance(spec, Whole) else ''}{weak}"


def skeleton(tree: Tree) -> Any:
    """Returns the containers of a tree in a form for JSON; a container that JSON does not have is named by its type."""
    if tree is None:
        return None
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: skeleton(value) for key, value in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [skeleton(x) for x in tree]}
    return "leaf" if jax.tree_util.all_leaves([tree]) else type(tree).__name__


def without_rows(outline: Outline, verb: str) -> Tree:
    """Returns a batch of no rows with this outline."""
    (_, containers), *leaves = outline
    shapes = iter(what for _, what in leaves)

    def build(part: Any) -> Tree:
        if part == "leaf":
            return _empty(next(shapes), verb)
        if part is None:
            return None
        if isinstance(part, str):
            raise DesyncError(
                f"jdp.{verb}: process {jax.process_index()} never had a batch, and those of the others are of type "
                f"{part}; it cannot make an empty one of that type. Use dicts, or yield one batch of no rows on that "
                f"process."
            )
        ((kind, children),) = part.items()
        if kind == "dict":
            return {key: build(children[key]) for key in sorted(children)}
        return (list if kind == "list" else tuple)(map(build, children))

    return build(json.loads(containers))


def _empty(what: str, verb: str) -> Any:
    """Returns an array with no rows (zeros, if the leaf has no row axis), or the Python value."""
    kind, _, value = what.partition(" ")
    if kind in ("bool", "int", "float", "str"):
        return float(value) if kind == "float" else ast.literal_eval(value)  # literal_eval knows no nan
    dtype, bracket, rest = what.partition("[")
    if not bracket:
        raise DesyncError(
            f"jdp.{verb}: process {jax.process_index()} never had a batch, and those of the others hold a {kind}; it "
            f"cannot make such an object. Yield one batch of no rows on that process."
        )
    shape = tuple(0 if size == "*" else int(size) for size in rest.partition("]")[0].split(", ") if size)
    if dtype.startswith("key<"):
        key = jax.random.key(0, impl=dtype[len("key<") : -1])
        return jax.random.split(key, shape) if shape else key
    if what.endswith(_WEAK):
        return jnp.full(shape, np.zeros((), dtype).item())
    return np.zeros(shape, jnp.dtype(dtype))


def layout_of_all(own: Layout, mesh: ReplicaMesh, sizes: tuple[int, ...]) -> Layout:
    """Returns the layout over all processes, given this process's own layout and the rows of each replica."""
    leaves = tuple(Cut(leaf.axis, sizes) if isinstance(leaf, Cut) else leaf for leaf in own.leaves)
    return Layout(own.treedef, leaves, sizes, mesh, own.dim, own.per_device)
