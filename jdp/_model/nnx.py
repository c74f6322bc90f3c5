"""Applies a Flax NNX module: it is split into a graph and its state, and updated in place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec

from .._core.global_arrays import put
from .._core.inputs import USUAL, flatten_batch, no_further
from .._core.layout import Tree, is_key
from .._core.outputs import Marked, Reduce
from .._core.replica_mesh import ReplicaMesh
from .._core.scattered import Scattered, fold_key
from .._core.shards import axis_for_parameter, refuse_too_large
from .._jax.jaxprs import MAYBE, passed_on
from .._jax.private import CAPTURES
from .linen import explain_batch_axis, mark_sown, mark_state, sharding_within
from .sync_batch_norm import sync_nodes

Filter = Callable[[Any, Any], bool]
"""An NNX predicate of a path and a variable."""


def filters_of(state_axes: Mapping[Any, int]) -> list[tuple[Filter, int]]:
    """Returns one predicate and axis for each entry, whose key is any NNX filter, or the name of a variable type."""

    def below(accepts: Filter) -> Filter:
        # The state is that of [module, *arguments], so that its paths have a number before the user's own.
        return lambda path, variable: accepts(path[1:], variable)

    return [(below(_filter(kind)), axis) for kind, axis in state_axes.items()]


def _filter(kind: Any) -> Filter:
    if isinstance(kind, tuple):
        return nnx.filterlib.Any(*map(_filter, kind))
    try:
        # To NNX itself a name is a tag; here "cache" is nnx.Cache, as it is for Linen.
        return nnx.filterlib.to_predicate(nnx.variable_type_from_name(kind) if isinstance(kind, str) else kind)
    except (TypeError, ValueError):
        if isinstance(kind, str):
            raise ValueError(
                f"jdp.DataParallel: state_axes has the key {kind!r}; a name must be that of a registered variable "
                f"type, as 'cache' is for nnx.Cache. Pass the type itself, or where the variable is: "
                f"nnx.PathContains({kind!r})."
            ) from None
        raise TypeError(
            f"jdp.DataParallel: state_axes has the key {kind!r}; a key is an NNX filter. Pass a variable type "
            f"(nnx.Cache), nnx.PathContains('name'), or a function of (path, variable)."
        ) from None


class Held(NamedTuple):
    """A tree with stand-ins for NNX objects, and the objects, split into a graph and their state."""

    others: Tree  # parameters (for an NNX module its stand-in), arguments, the collections of a state, or a batch
    graph: Any  # of the objects; None if there are none
    variables: Tree  # of the objects: one state, or several with parts of it


def with_nodes(
    function: Callable[..., Tree], reduce_state: Reduce, axis_name: str, filters: Sequence[tuple[Filter, int]]
) -> Callable[..., Tree]:
    """Returns `function` for `Held` parameters: it returns its result, and the updates of the objects."""

    def call(replicas: Held, /, *args: Any, **kwargs: Any) -> Tree:
        folded = [fold_state(state, axis_name) for state in replicas.variables]
        nodes = own_nodes(replicas.graph, folded)
        params, args, kwargs = put_nodes((replicas.others, args, kwargs), nodes)
        try:
            with lost_attributes(nodes):
                out = function(params, *args, **kwargs)
        except (TypeError, ValueError) as error:
            explain_batch_axis(error, (args, kwargs), _without_batch_axis(replicas.variables, filters))
            raise
        return out, mark_updates(nnx.state(nodes), replicas.variables, reduce_state, filters, folded)

    return call


def _without_batch_axis(
    states: Sequence[Tree], filters: Sequence[tuple[Filter, int]]
) -> Iterator[tuple[str, str, Any]]:
    """Yields each leaf of the replicated state, with its name and a filter that means it."""
    for path, v in (entry for state in states for entry in nnx.to_flat_state(state)):
        if not isinstance(v, nnx.Param) and not any(accepts(path, v) for accepts, _ in filters):
            key = "nnx.Cache" if isinstance(v, nnx.Cache) else f"nnx.PathContains({path[-1]!r})"
            yield from ((".".join(map(str, path[1:])), key, x) for x in jax.tree.leaves(v))


def made_in_shards(module: Any, mesh: ReplicaMesh) -> Any:
    """Returns the NNX module that a function makes; each device makes its own parts of the parameters."""
    if isinstance(module, nnx.Pytree):
        return module
    if not callable(module) or isinstance(module, linen.Module):
        raise TypeError(
            f"jdp.DataParallel: shard_params is True and module a {type(module).__name__}; with shard_params it must "
            f"be an NNX module, or a function that makes one. Pass lambda: Net(rngs=nnx.Rngs(0)); for Linen call "
            f"dp.init(..., shard_params=True)."
        )
    shapes = nnx.eval_shape(module) if _takes_nothing(module) else module
    if not isinstance(shapes, nnx.Pytree):
        what = f"returns a {type(shapes).__name__}" if shapes is not module else "takes arguments"
        raise TypeError(
            f"jdp.DataParallel: shard_params is True and module a function that {what}; with shard_params it must make "
            f"an NNX module, without arguments. Pass lambda: Net(rngs=nnx.Rngs(0)); a function apply_fn(params, x) "
            f"takes parameters that are cut as they are, without shard_params here."
        )
    graph, state = nnx.split(shapes)
    refuse_too_large(nnx.as_pure(state), mesh, "DataParallel", "model")

    def where(path: Any, variable: Any) -> Any:
        is_param = isinstance(variable, nnx.Param)
        return jax.tree.map(lambda x: mesh.along(axis_for_parameter(x, mesh.size) if is_param else None), variable)

    target = nnx.map_state(where, state)
    make = jax.jit(lambda: nnx.split(module())[1], out_shardings=target)
    # Compared between processes, because a process with a seed of its own has another program.
    return nnx.merge(graph, mesh.same_program(functools.update_wrapper(make, module), ())())


def put_annotated(state: Tree, mesh: ReplicaMesh) -> Tree:
    """Puts each variable where its annotation says, over the devices of each replica; one that lies there stays."""
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(state)))

    def place(path: Any, variable: Any) -> Any:
        x, spec = variable.get_value(), specs[path].get_value()
        if (
            not hasattr(x, "ndim")
            or not any(mesh.within(spec or PartitionSpec()))
            or mesh.holds(mesh.renamed(x.sharding))
        ):
            return variable
        return variable.replace(put(x, sharding_within(mesh, spec, x.shape, ".".join(map(str, path)))))

    return nnx.from_flat_state([(path, place(path, variable)) for path, variable in nnx.to_flat_state(state)])


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Returns True if a function can be called without arguments, or if its signature is unknown."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a function written in C
        return True
    return True


@contextlib.contextmanager
def sorted_captures(module: Any) -> Iterator[None]:
    """Removes the attribute that `nnx.capture` has set from each `nnx.List` of the module, while this context lasts.

    Flax's split and merge cannot sort its name among the numbers of a list. It is empty, because a list sows nothing.
    """
    taken = []
    if hasattr(module, CAPTURES):
        lists = [m for _, m in nnx.iter_modules(module) if isinstance(m, nnx.List)]
        taken = [(m, vars(m).pop(CAPTURES)) for m in lists if CAPTURES in vars(m)]
    try:
        yield
    finally:
        for m, captures in taken:
            vars(m)[CAPTURES] = captures


def own_nodes(graph: Any, states: Sequence[Tree], sync_over: str | None = None) -> list[Any]:
    """Returns a replica's own NNX objects; `sync_over` synchronises their BatchNorms."""
    # Copies, because merge takes the variables as they are, and the objects change them in place.
    nodes = nnx.merge(graph, *jax.tree.map(lambda x: x, states))
    if sync_over is not None:
        sync_nodes(nodes, sync_over)
    return nodes


@contextlib.contextmanager
def lost_attributes(nodes: Any) -> Iterator[None]:
    """Warns about each plain attribute of a replica's own NNX objects that the code in this context sets.

    Raises:
        ValueError: the code removes a variable, or makes two variables one; the user's own objects would keep both.
    """
    before, variables = _attributes(nodes), nnx.to_flat_state(nnx.state(nodes))
    yield
    kept = dict(nnx.to_flat_state(nnx.state(nodes)))
    if gone := [path for path, v in variables if path not in kept and not isinstance(v, nnx.Intermediate)]:
        (number, *own), *more = gone
        name = ".".join(map(str, (type(nodes[number]).__name__, *own)))
        raise ValueError(
            f"jdp.DataParallel: a call removes variable {name}{f' and {len(more)} more' * bool(more)}, or shares it "
            f"with another attribute; only values come back from the replicas, so your object would keep it. Make the "
            f"change before the call."
        )
    for (where, name), (owner, value) in _attributes(nodes).items():
        _, old = before.get((where, name), (owner, _ABSENT))
        if old is not value and not _is_equal(old, value):
            changed = "set" if old is _ABSENT else f"changed from {reprlib.repr(old)}"
            warnings.warn(
                f"jdp.DataParallel: {'.'.join(map(str, (owner, *where[1:], name)))} was {changed} to "
                f"{reprlib.repr(value)} in a call; a plain attribute belongs to the replica's copy, and is lost with "
                f"it, as in torch. Set it before the call, or keep the value in an nnx.Variable.",
                stacklevel=2,
            )


_ABSENT = object()
_FLAXS_OWN = ("_pytree__", "__")  # the beginnings of the names of attributes that Flax itself sets


def _attributes(nodes: Any) -> dict[tuple[Any, str], tuple[str, Any]]:
    """Returns the plain attributes of NNX objects, by path and name, each with its outermost object's type."""
    found = {}
    for path, x in nnx.iter_graph(nodes):
        if isinstance(x, nnx.Pytree) and not isinstance(x, nnx.List | nnx.Dict):
            owner = type(nodes[path[0]]).__name__
            for name, value in vars(x).items():
                is_cache = isinstance(getattr(type(x), name, None), functools.cached_property)
                if not (is_cache or name.startswith(_FLAXS_OWN) or _holds_state(value)):
                    found[path, name] = owner, value
    return found


def _holds_state(value: Any) -> bool:
    """Returns True for a value that holds arrays or NNX objects, which Flax keeps among the state."""
    return any(is_node(x) or isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(value, is_leaf=is_node))


def _is_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or callable(a) and callable(b)  # two functions may do the same
    except Exception:  # of an object of the user's
        return False


def fold_state(state: Tree, axis_name: str) -> Tree:
    """Returns the state, with the keys of its `nnx.Rngs` made the replica's own."""
    index = jax.lax.axis_index(axis_name)
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, _fold(v, index) if isinstance(v, nnx.RngKey) else v) for path, v in flat])


def mark_updates(
    state: Tree,
    before: Sequence[Tree],
    reduce: Reduce,
    filters: Sequence[tuple[Filter, int]] = (),
    folded: Sequence[Tree] = (),
) -> Tree:
    """Returns the variables that have changed, each leaf with its rule; `before` has the parts of the old state.

    `folded` has them with the keys that the replica began with. Without it, keys are not returned.
    """
    known = {path: v for part in before for path, v in nnx.to_flat_state(part)}
    entered = {path: v for part in folded for path, v in nnx.to_flat_state(part)}
    updates = []
    for path, after in nnx.to_flat_state(state):
        old = known.get(path)
        if isinstance(after, nnx.RngKey) and (path not in entered or _unchanged(entered[path], after)):
            continue  # a folded key is one replica's; only the counts go back
        if old is not None and _unchanged(old, after):
            continue
        axis = next((axis for accepts, axis in filters if accepts(path, after if old is None else old)), None)
        if isinstance(after, nnx.Intermediate) and axis is None:
            updates.append((path, mark_sown(after, old)))
        else:
            own = path[1:] or path  # below the number of the module or argument
            name, key = ".".join(map(str, own)), f"nnx.PathContains({own[-1]!r})"
            marked = mark_state(after, {} if old is None else old, name, reduce, axis, key)
            if axis is None and isinstance(after, nnx.metrics.MetricState):
                marked = jax.tree.map(functools.partial(_metric_of_all_rows, name), marked)
            updates.append((path, marked))
    return nnx.from_flat_state(updates)


def _metric_of_all_rows(name: str, marked: Marked) -> Marked:
    """Returns a leaf of a metric's state with an error, because one replica has not counted the others' rows."""
    return dataclasses.replace(
        marked,
        alone=f"jdp.DataParallel: state {name} belongs to an nnx.metrics.Metric, and each replica has updated it with "
        f"its own rows; only one replica's update would be kept. Update it outside, with what the call returns "
        f"(metric.update(...) with the outputs, or with the step's metrics), or return jdp.Mean(total, count) or "
        f"jdp.Sum(total) among the metrics.",
    )


def refuse_written(
    run: Callable[[Tree], Tree], before: Tree, after: Tree, verb: str, given: tuple[Any, ...], looked_at: set[Any]
) -> None:
    """Raises a `ValueError` for differentiated variables that the forward pass `run` has written: they would be lost.

    `before` and `after` are their state; `run(before)` makes a state like `after`. `looked_at` has the calls that were
    checked before, because a check takes another trace. An evaluation is not checked: it keeps nothing of the model.
    """
    known = {} if verb == "evaluate" else dict(nnx.to_flat_state(before))
    changed = [path for path, v in nnx.to_flat_state(after) if path in known and not _unchanged(known[path], v)]
    graph, *rest = given
    arguments, kind = jax.tree.flatten(rest)
    call = graph, kind, *(str(getattr(x, "aval", x)) for x in arguments), *changed
    if not changed or call in looked_at:
        return

    def leaves_of(state: Tree) -> list[Any]:
        flat = dict(nnx.to_flat_state(state))
        return [jax.tree.leaves(flat[path]) for path in changed]

    # A function that is jitted or rematerialised inside returns all variables, also those that it did not change.
    jaxpr = jax.make_jaxpr(lambda state: leaves_of(run(state)))(before)
    leaves, treedef = jax.tree.flatten(before)
    came = leaves_of(treedef.unflatten(range(len(leaves))))
    found = iter(passed_on(jaxpr))
    for path, places in zip(changed, came, strict=True):
        if any(next(found) not in (place, MAYBE) for place in places):
            raise ValueError(
                f"jdp.{verb}: {'.'.join(map(str, path[1:]))} is trained, and the forward pass writes to it, as "
                f"nnx.SpectralNorm and nnx.WeightNorm do; only a gradient comes back, and what was written would be "
                f"lost. A call of dp keeps it: take nnx.value_and_grad(lambda dp: loss(dp(x), y))(dp), then "
                f"optimizer.update(dp, grads)."
            )
    looked_at.add(call)


def enter(held: Held, axis_name: str) -> Held:
    """Returns the held objects with their random keys folded with the replica's index."""
    return held if held.graph is None else held._replace(variables=fold_state(held.variables, axis_name))


def leave(after: Held, before: Held, reduce: Reduce) -> Tree:
    """Returns the changed state of the NNX objects, each leaf with its rule."""
    if before.graph is None:
        return ()
    return mark_updates(after.variables, [before.variables], reduce)


def in_evaluation(model: Any) -> Any:
    """Returns a copy of the model in evaluation mode, with the same arrays; the model itself stays as it is."""
    copy = nnx.merge(*nnx.split(model))
    if hasattr(copy, "eval"):
        copy.eval()
    return copy


def own_values(updates: Tree) -> Tree:
    """Returns the updates with arrays of this process alone, because each process has its own NNX objects."""
    return jax.tree.map(lambda x: x if x.is_fully_addressable else x.addressable_data(0), updates)


def with_updates(state: Tree, updates: Tree) -> Tree:
    """Returns the state with the updates that `mark_updates` has found."""
    return nnx.from_flat_state({**dict(nnx.to_flat_state(state)), **dict(nnx.to_flat_state(updates))})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StandIn:
    """Stands for an NNX object among the arguments. It is static, because its index is part of the program."""

    index: int


def take_nodes(
    arguments: Tree,
    first: int = 0,
    verb: str = "DataParallel",
    root: str | tuple[str, ...] = ("args", "kwargs"),
    states: bool = True,
) -> tuple[Tree, list[Any]]:
    """Returns the arguments with a stand-in for each NNX object, numbered from `first`, and the objects.

    Variables in an `nnx.State` are objects only if `states` is true; otherwise they are values, as in `jax.jit`.
    """
    taken: list[Any] = []

    def take(x: Any) -> Any:
        if not is_node(x):
            return x
        taken.append(x)
        return StandIn(first + len(taken) - 1)

    def is_one(x: Any) -> bool:
        if type(x) in USUAL:
            return False
        return is_node(x) or isinstance(x, Scattered | Iterator) or not states and isinstance(x, nnx.State)

    leaves, treedef = flatten_batch(arguments, verb, root, is_one)
    return treedef.unflatten([take(x) for x in leaves]), taken


def stop_at_objects(x: Any) -> bool:
    """Returns True where flattening arguments stops: as anywhere else, and at NNX objects."""
    return type(x) not in USUAL and (no_further(x) or is_node(x))


def put_nodes(arguments: Tree, nodes: Sequence[Any] | Mapping[int, Any]) -> Tree:
    """Returns the arguments with the NNX objects in the places of their stand-ins: the inverse of `take_nodes`."""
    return jax.tree.map(lambda x: nodes[x.index] if _is_stand_in(x) else x, arguments, is_leaf=_is_stand_in)


def stand_ins(argument: Tree) -> tuple[int, ...]:
    """Returns the indices of the NNX objects that were taken out of this argument."""
    leaves = jax.tree.leaves(argument, is_leaf=lambda x: _is_stand_in(x) or isinstance(x, Scattered))
    return tuple(x.index for x in leaves if _is_stand_in(x))


def _is_stand_in(x: Any) -> bool:
    return isinstance(x, StandIn)


def is_node(x: Any) -> bool:
    """Returns True if `x` is an NNX object: one thing to jdp, though JAX may see a tree."""
    return type(x) not in USUAL and isinstance(x, nnx.Pytree | nnx.Variable)  # isinstance alone is slower to say no


def _fold(variable: Any, index: Any) -> Any:
    """Returns the key of an `nnx.Rngs`, or each of an array of them, folded with the replica's index."""

    def fold(x: Any) -> Any:
        if not is_key(x) or not x.ndim:
            return fold_key(x, index)
        return jax.vmap(lambda key: fold_key(key, index))(x.reshape(-1)).reshape(x.shape)

    return jax.tree.map(fold, variable)


def _unchanged(old: Any, new: Any) -> bool:
    a, b = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
