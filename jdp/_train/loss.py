"""Makes the `Loss` that `gradients` takes from a user's loss function of variables, NNX modules or anything else.

First each argument of a call gets its role: it is replicated or cut, differentiated or not, and may hold NNX objects.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.inputs import is_unbound_axis
from .._core.layout import Tree
from .._core.outputs import Reduce
from .._core.parallel_apply import explain_values
from .._core.unread import reading
from .._model.linen import mark_state, unbox
from .._model.nnx import Held, leave, lost_attributes, own_nodes, put_nodes, refuse_written, stand_ins
from .._model.sync_batch_norm import synced
from .gradients import Gradients, Loss, Traces
from .state import VERB, first_difference, in_containers_of, thawed
from .terms import described, finished, is_number

Wanted = tuple[int, tuple[int, ...], Any]
"""An argument to differentiate: its position, the indices of its NNX objects, and the filter of their variables."""


class Roles(NamedTuple):
    """What each positional argument of a call is for; it is hashable, because there is a program for each `Roles`."""

    wanted: tuple[Wanted, ...]
    has_aux: bool
    whole: tuple[int, ...]  # positions of the replicated arguments
    arity: int  # the number of positional arguments

    @property
    def cut(self) -> list[int]:
        """The positions of the other arguments, in the order that the program takes them in."""
        return [p for p in range(self.arity) if p not in self.whole]

    @property
    def rows(self) -> dict[int, int]:
        """The differentiated arguments that are cut, each with its position among the cut ones."""
        cut = self.cut
        return {p: cut.index(p) for p, nodes, _ in self.wanted if not nodes and p in cut}

    def is_diff(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Returns True if a variable of the NNX objects is differentiated."""
        filters = [wrt for _, nodes, wrt in self.wanted if path[0] in nodes]
        return any(nnx.filterlib.to_predicate(wrt)(path[1:], variable) for wrt in filters)


Replicated = tuple[tuple[dict[int, Tree], Tree], Held]
"""The replicated arguments of a call: `((plain ones, variables of NNX objects), held)`; the pair is differentiated."""


def assign_roles(
    args: Sequence[Any],
    nodes: list[Any],
    argnums: Sequence[tuple[int, Any]],
    has_aux: bool,
    in_axes: Sequence[Any],
    verb: str,
) -> tuple[Roles, Replicated]:
    """Assigns the roles of a call's positional arguments, which have stand-ins for the NNX objects `nodes`.

    `argnums` are positions and NNX filters, `in_axes` one axis or None per argument.
    """
    wanted = tuple((p, stand_ins(args[p]), wrt) for p, wrt in argnums)
    differentiated = {p for p, _ in argnums}
    whole = tuple(p for p, axis in enumerate(in_axes) if p == 0 or (axis is None and p in differentiated))
    roles = Roles(wanted, has_aux, whole, len(args))
    diff_state, rest, graph = None, None, None
    if nodes:
        graph, diff_state, rest = nnx.split(nodes, roles.is_diff, ...)
        _refuse_shared(nodes, wanted, verb)
        for position, mine, _ in wanted:
            if mine:
                _refuse_mixed(position, args[position], verb)
    plain = {position for position, mine, _ in wanted if not mine}
    diff = {p: args[p] for p in whole if p in plain}
    held = Held({p: args[p] for p in whole if p not in plain}, graph, rest)
    return roles, ((diff, diff_state), held)


def _refuse_mixed(position: int, argument: Tree, verb: str) -> None:
    """Raises a `TypeError` for arrays next to an NNX object in one argument that is differentiated."""
    for path, x in jax.tree_util.tree_leaves_with_path(argument):
        if is_number(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"jdp.{verb}: args[{position}]{jax.tree_util.keystr(path)} is {described(x)} next to an NNX "
                f"object; an argument that is differentiated holds NNX objects or arrays, but not both. Pass the "
                f"arrays as an argument of their own, and name it in argnums."
            )


def _refuse_shared(nodes: list[Any], wanted: Sequence[Wanted], verb: str) -> None:
    """Raises a `ValueError` for a variable in two arguments, if one of them is differentiated."""
    for position, mine, wrt in wanted:
        others = [node for i, node in enumerate(nodes) if i not in mine]
        if not others:  # as a rule; to go through the variables takes longer than to split the model
            continue
        own = {id(v) for i in mine for _, v in nnx.iter_graph(nodes[i]) if isinstance(v, nnx.Variable)}
        for node in others:
            for path, v in nnx.iter_graph(node):
                if id(v) in own and nnx.filterlib.to_predicate(wrt)(path, v):
                    raise ValueError(
                        f"jdp.{verb}: {'.'.join(map(str, path))} is in args[{position}] and in another argument; a "
                        f"variable has one gradient. Pass it in one of them."
                    )


Criterion = Callable[..., Any]
"""A user's function of the outputs of all rows, and of the batch."""


def loss_of(
    loss_fn: Callable[..., Any],
    roles: Roles,
    verb: str,
    axis_name: str,
    reduce_state: Reduce,
    criterion: Criterion | None,
    sync: bool,
) -> Loss:
    """Returns the `Loss` for calls whose arguments have these roles; `sync` synchronises its BatchNorms."""
    looked_at: set[Any] = set()
    loss_fn, sync_over = (synced(loss_fn, axis_name), axis_name) if sync else (loss_fn, None)

    def call_of(plain: dict[int, Tree], held: Held, args: Sequence[Any], kwargs: dict[str, Any], nodes: Any) -> Tree:
        known = unbox(plain) | held.others | dict(zip(roles.cut, args, strict=True))
        call: Tree = ([known[p] for p in range(roles.arity)], kwargs)
        return put_nodes(call, nodes) if nodes else call

    def compute(diff: Tree, held: Held, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tree, Held]:
        plain, diff_state = diff

        def run(diff_state: Tree) -> tuple[Any, list[Any]]:
            nodes = [] if held.graph is None else own_nodes(held.graph, (diff_state, held.variables), sync_over)
            positional, keywords = call_of(plain, held, args, kwargs, nodes)
            with lost_attributes(nodes) if nodes else contextlib.nullcontext():
                return reading(loss_fn)(*positional, **keywords), nodes

        out, nodes = run(diff_state)
        loss, aux = _loss_and_aux(out, verb) if roles.has_aux and criterion is None else (out, ())
        if not nodes:
            return loss, aux, held
        trained, after = nnx.state(nodes, roles.is_diff, ...)
        writes = lambda state: nnx.state(run(state)[1], roles.is_diff)  # noqa: E731
        refuse_written(writes, diff_state, trained, verb, (held.graph, args, kwargs), looked_at)
        return loss, aux, held._replace(variables=after)

    def run_criterion(outputs: Tree, diff: Tree, held: Held, args: Sequence[Any]) -> tuple[Any, Tree]:
        plain, diff_state = diff
        nodes = [] if held.graph is None else own_nodes(held.graph, (diff_state, held.variables))
        (_, *rest), _ = call_of(plain, held, args, {}, nodes)
        out = call_criterion(verb, criterion, outputs, *rest)
        loss, aux = _loss_and_aux(out, verb, criterion) if roles.has_aux else (out, ())
        return checked_scalar(loss, verb), finished(aux)

    left = functools.partial(leave, reduce=reduce_state)
    loss = Loss(compute, verb, left, Traces(), tuple(roles.rows.values()), sync)
    is_direct = any(position for position, _, _ in roles.wanted)
    return loss if criterion is None else loss._replace(criterion=run_criterion, is_direct=is_direct)


def call_criterion(verb: str, criterion: Any, *args: Any) -> Any:
    """Calls a criterion; if it raises an error, adds a note with the criterion's name."""
    try:
        return reading(criterion)(*args)
    except Exception as error:
        name = getattr(criterion, "__name__", type(criterion).__name__)
        if any("in criterion" in note for note in getattr(error, "__notes__", ())):
            raise
        a_tuple = ", a tuple" if type(args[-1]) is tuple else ""
        others = {1: "", 2: f" and the whole batch{a_tuple}"}.get(
            len(args), f" and the {len(args) - 1} arguments of the batch"
        )
        rows = f"which gets the outputs of all rows{others}"
        error.add_note(f"Caught {type(error).__name__} in criterion {name}, {rows}.")
        explain_values(error, f"jdp.{verb}: criterion {name}")
        if isinstance(error, NameError) and is_unbound_axis(error):
            error.add_note("It runs once, outside of the replicas. Leave the collective out: x.mean() is of all rows.")
        raise


def checked_scalar(loss: Any, verb: str) -> Any:
    """Returns a criterion's loss if it is a real 0-d array; raises a `TypeError` for anything else."""
    if isinstance(loss, jax.Array) and not loss.ndim and jnp.issubdtype(loss.dtype, jnp.floating):
        return loss
    if isinstance(loss, tuple):
        way = "Return the loss alone, or (loss, metrics) with metrics that are a dict (value_and_grad: has_aux=True)"
    elif is_number(loss) and jnp.ndim(loss):
        way = "Return its mean or its sum"
    else:
        way = "Return a 0-d array of floats; it has all rows, so jdp.Mean(total, count) is total / count there"
    raise TypeError(
        f"jdp.{verb}: criterion returns {described(loss)}; it is a real scalar, the loss of all rows. {way}."
    )


def checked_criterion(criterion: Any, verb: str) -> Criterion | None:
    """Returns the criterion; raises a `TypeError` if it is a class or torch's, or cannot be called."""
    if type(criterion).__module__.startswith("torch.") or getattr(criterion, "__module__", "") == "torch.nn.functional":
        raise TypeError(
            f"jdp.{verb}: criterion is torch's {getattr(criterion, '__name__', type(criterion).__name__)}; it computes "
            f"with torch's tensors, and jdp runs JAX's programs. Pass a function of optax's losses: lambda outputs, "
            f"batch: optax.softmax_cross_entropy_with_integer_labels(outputs, batch[1]).mean()."
        )
    if criterion is None or callable(criterion) and not isinstance(criterion, type):
        return criterion
    what = f"the class {criterion.__name__}" if isinstance(criterion, type) else f"a {type(criterion).__name__}"
    raise TypeError(
        f"jdp.{verb}: criterion is {what}; it is called with the outputs of all rows and the batch. Pass a function, "
        f"criterion(outputs, batch)."
    )


def _loss_and_aux(out: Any, verb: str, criterion: Any = None) -> tuple[Any, Any]:
    if isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    what = "criterion" if criterion else "the function"
    raise TypeError(
        f"jdp.{verb}: has_aux is True, and {what} returns a {type(out).__name__}"
        f"{f' of {len(out)}' if isinstance(out, tuple | list) else ''}; it must be a pair then. Return (loss, aux)."
    )


def gradient_trees(roles: Roles, found: Gradients, args: Sequence[Any]) -> tuple[Tree, ...]:
    """Returns one tree of gradients for each argument that is differentiated."""
    known, state = found.grads
    known |= {p: found.row_grads[i] for p, i in roles.rows.items()}
    for position, nodes, _ in roles.wanted:
        if nodes:
            own = {i: state[i] if i in state else nnx.State({}) for i in nodes}
            known[position] = put_nodes(args[position], own)
    return tuple(known[position] for position, _, _ in roles.wanted)


FORMS = ("loss", "(loss, metrics)", "(loss, metrics, updates)")


def check_signature(loss_fn: Callable[..., Any], first: str, key: bool | None = None, role: str = "loss_fn") -> None:
    """Raises a `TypeError` if a loss function does not take what a step passes.

    `key` says whether a step passes a random key; it is None for an NNX step, which never does.
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a function written in C
        return

    def takes(count: int) -> bool:
        try:
            signature.bind(*range(count))
        except TypeError:
            return False
        return True

    if takes(3 if key else 2):
        return
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    what, way = f"takes {signature}", "Put all that belongs to the batch into one tree"
    if takes(2) and key:
        what = "takes no third argument, and there is a key"
        way = "Leave key= out of step.init, or take it"
    elif takes(3):
        what = "takes a third argument, and there is no key"
        way = "If it is a key, pass one: step.init(variables, key=jax.random.key(0))"
        if key is None:
            way = "If it is a key, draw from an nnx.Rngs of the model (nnx.Dropout(..., rngs=rngs))"
        way += "; if it is of the batch, take that as one tree: x, y = batch"
    last = ", key" if key else ""
    raise TypeError(f"jdp.{VERB}: {role} {name} {what}; a step calls {role}({first}, batch{last}). {way}.")


def results_of(out: Any, reserved: Sequence[str], forms: tuple[str, ...] = FORMS) -> tuple[Any, dict[str, Any], Any]:
    """Returns a loss function's result as `(loss, metrics, updates)`; the step itself adds the `reserved` metrics."""
    parts = tuple(out) if isinstance(out, tuple | list) else (out,)
    if not 1 <= len(parts) <= len(forms):
        raise TypeError(
            f"jdp.{VERB}: loss_fn returns a {type(out).__name__} of {len(parts)}; it returns {' or '.join(forms)}. "
            f"Return one of these."
        )
    loss, metrics, updates = (*parts, *[None] * (3 - len(parts)))
    return loss, checked_metrics(metrics, reserved, loss), updates


def checked_metrics(metrics: Any, reserved: Sequence[str], loss: Any) -> dict[str, Any]:
    """Returns the metrics as a dict; raises a `TypeError` for anything else, a `ValueError` for a reserved name.

    The loss itself, one number, may be among them as "loss", and is left out: the step gives it anyway.
    """
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        what = "n array alone" if isinstance(metrics, jax.Array) else f" {type(metrics).__name__}"
        way = "Return them as a dict, {'accuracy': ...}"
        if isinstance(metrics, tuple) and len(metrics) == 2 and isinstance(metrics[1], Mapping):  # Flax's own examples
            way += "; updates of collections are the third result: return loss, {'logits': logits}, updates"
        raise TypeError(f"jdp.{VERB}: the metrics are a{what}; each has a name. {way}.")
    if metrics.get("loss") is loss and not (is_number(loss) and jnp.ndim(loss)):
        metrics = {name: x for name, x in metrics.items() if name != "loss"}
    clash = [name for name in reserved if name in metrics]
    if clash:
        raise ValueError(
            f"jdp.{VERB}: a metric is called {clash[0]!r}; the step itself adds one of that name. Leave it out, or "
            f"give it another name."
        )
    return dict(metrics)


def _refuse_updates_as(metrics: dict[str, Any], collections: Mapping[str, Any]) -> None:
    """Raises a `TypeError` for metrics that have the names of the state's collections, as updates do."""
    if metrics and set(metrics) <= set(collections):
        raise TypeError(
            f"jdp.{VERB}: loss_fn returns {sorted(metrics)} as its second result, and these are collections of the "
            f"state; the second result is the metrics, and the updates are the third. Return loss, {{}}, updates."
        )


@contextlib.contextmanager
def rows_explained(batch: Tree) -> Iterator[None]:
    """Adds a note to an error of the loss function, if the batch looks like a list of its rows."""
    try:
        yield
    except Exception as error:
        rows = batch if type(batch) is list else []
        kinds = {(jax.tree.structure(row), *map(jnp.shape, jax.tree.leaves(row))) for row in rows}
        if len(kinds) == 1 and (len(rows) > 2 or len(rows) == 2 and not jax.tree_util.all_leaves(rows)):
            error.add_note(
                f"jdp.{VERB}: batch is a list of {len(rows)} parts of one shape, and each array in it is cut along an "
                f"axis of its own; a batch is one tree of arrays. If the parts are its rows, pass np.stack(rows)."
            )
        raise


def variables_loss(
    loss_fn: Callable[..., Any],
    reserved: Sequence[str],
    reduce_state: Reduce,
    axis_name: str,
    criterion: Criterion | None,
    sync: bool,
) -> Loss:
    """Returns the `Loss` of `loss_fn(variables, batch[, key])`; collections other than the parameters are held."""
    sync_over = axis_name if sync else None
    if sync:
        loss_fn = synced(loss_fn, axis_name)

    def compute(params: Tree, held: Held, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tree, Held]:
        collections = held.others
        nodes = [] if held.graph is None else own_nodes(held.graph, (held.variables,), sync_over)
        if nodes:
            args = put_nodes(args, nodes)
        of_nodes = lost_attributes(nodes) if nodes else contextlib.nullcontext()
        with _params_explained(params), rows_explained(*args), of_nodes:
            out = reading(loss_fn)({"params": unbox(params), **collections}, *args, *kwargs.values())
        if criterion is None:
            loss, metrics, updates = results_of(out, reserved)
            _refuse_updates_as(metrics, collections)
        else:
            loss, metrics, updates = _outputs(out, collections)
        after = collections if updates is None else _updated(collections, updates)
        return loss, metrics, Held(after, held.graph, nnx.state(nodes) if nodes else None)

    def leave_all(after: Held, before: Held) -> Tree:
        new, old = after.others, before.others
        marked = {name: mark_state(new[name], old[name], name, reduce_state, None) for name in old}
        return marked, leave(after, before, reduce_state)

    def run_criterion(outputs: Tree, _: Tree, held: Held, args: Sequence[Any]) -> tuple[Any, Tree]:
        if held.graph is not None:
            args = put_nodes(args, own_nodes(held.graph, (held.variables,)))
        return of_criterion(criterion, outputs, args, reserved)

    return Loss(compute, VERB, leave_all, Traces(), sync=sync, criterion=None if criterion is None else run_criterion)


@contextlib.contextmanager
def _params_explained(params: Tree) -> Iterator[None]:
    """Adds a note to the error of a loss function that mistakes the variables for the parameters."""
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if isinstance(params, Mapping) and isinstance(key, str) and key in params:
            error.add_note(
                f"jdp.{VERB}: loss_fn(variables, batch) gets all variables, and {key!r} is a parameter. Take "
                f"it from variables['params']."
            )
        raise


def of_criterion(criterion: Any, outputs: Tree, args: Sequence[Any], reserved: Sequence[str]) -> tuple[Any, Tree]:
    """Returns `(loss, metrics)` of a step's criterion, which returns the loss or such a pair."""
    out = call_criterion(VERB, criterion, outputs, *args)
    loss, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    metrics = checked_metrics(metrics, reserved, loss)
    for path, x in jax.tree_util.tree_leaves_with_path(metrics):
        if not is_number(x):
            raise TypeError(
                f"jdp.{VERB}: metrics{jax.tree_util.keystr(path)} of criterion is {described(x)}; metrics are arrays "
                f"and numbers. Leave it out, or return a number."
            )
    return checked_scalar(loss, VERB), finished(metrics)


def _outputs(out: Any, collections: Mapping[str, Tree]) -> tuple[Any, Tree, Any]:
    """Returns a forward pass's `(outputs, (), updates)`; a pair has updates if its second part holds collections."""
    is_pair = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping)
    if is_pair and all(name in collections for name in out[1]):
        return out[0], (), out[1]
    return out, (), None


def _updated(state: Mapping[str, Tree], updates: Any) -> dict[str, Tree]:
    if not isinstance(updates, Mapping):
        raise TypeError(
            f"jdp.{VERB}: the updates are a {type(updates).__name__}; they are collections by name. Return what "
            f"model.apply(..., mutable=['batch_stats']) returns with its output."
        )
    updates = thawed(updates)
    for name, collection in updates.items():
        if name not in state:
            what = "holds the parameters, which the optimizer updates" if name == "params" else "is not in the state"
            raise ValueError(
                f"jdp.{VERB}: the updates have a collection {name!r}, which {what}; the state has "
                f"{sorted(state) or 'none'}. Leave it out of the updates, or pass it to step.init with the variables."
            )
        updates[name] = collection = in_containers_of(state[name], collection)
        difference = first_difference(collection, state[name], dtypes=False)  # the step restores the dtypes
        if difference is not None:
            raise ValueError(
                f"jdp.{VERB}: updates[{name!r}]{difference}; the state keeps its tree and shapes from step to step. "
                f"Return all of the collection and nothing else."
            )
    return {**state, **updates}
