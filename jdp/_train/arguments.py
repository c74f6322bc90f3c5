"""A loss function's arguments: which are whole and which are cut, what is differentiated, what is NNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from .._core.layout import Tree
from .._core.outputs import Reduce
from .._core.scatter import Cutting, split
from .._model import nnx as _nnx
from .._model.config import Config
from .._model.linen import unbox
from .._model.sync_batch_norm import sync_nodes, synced
from .gradients import Loss

Position = tuple[int, Any]
"""The position of an argument to differentiate, and for NNX the filter of the variables that are."""


class Division(NamedTuple):
    """The static part: hashable, so that each has one program."""

    argnums: tuple[Position, ...]
    has_aux: bool
    whole: tuple[int, ...]  # positions of the arguments that are whole on every replica
    arity: int  # the number of positional arguments
    nodes: tuple[tuple[int, ...], ...]  # for each of argnums, its NNX objects among all

    @property
    def rows(self) -> tuple[int, ...]:
        """The differentiated arguments that are cut, as positions among the cut ones."""
        cut = [p for p in range(self.arity) if p not in self.whole]
        return tuple(
            cut.index(p) for (p, _), nodes in zip(self.argnums, self.nodes, strict=True) if not nodes and p in cut
        )

    @property
    def plain(self) -> tuple[int, ...]:
        """The differentiated arguments that are whole, but for NNX objects."""
        return tuple(p for (p, _), nodes in zip(self.argnums, self.nodes, strict=True) if not nodes and p in self.whole)

    def is_diff(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Whether a variable of the NNX objects is differentiated."""
        return any(
            path[0] in nodes and nnx.filterlib.to_predicate(wrt)(path[1:], variable)
            for (_, wrt), nodes in zip(self.argnums, self.nodes, strict=True)
        )


class Divided(NamedTuple):
    """One call, divided: `replicas` is `(diff, held)`, `inputs` and `kwargs` are still to be cut."""

    division: Division
    replicas: tuple[Tree, _nnx.Held]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    nodes: list[Any]
    args: tuple[Any, ...]  # all positional ones, with stand-ins for the NNX objects

    @property
    def first(self) -> Tree:
        """The first argument's arrays: results go where these live."""
        (_, diff), held = self.replicas
        states = [state for state in (diff, held.variables) if state is not None]
        return self.args[0], [state[i] for state in states for i in _nnx.stand_ins(self.args[0]) if i in state]


def divide(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: tuple[Position, ...],
    has_aux: bool,
    in_axes: Sequence[Any],
    verb: str,
) -> Divided:
    """Divides a call's arguments; `in_axes` has an axis, or None, for each positional argument."""
    (taken, keywords), nodes = _nnx.take_nodes((tuple(args), dict(kwargs)))
    within = tuple(_nnx.stand_ins(taken[p]) for p, _ in argnums)
    differentiated = {p for p, _ in argnums}
    whole = tuple(p for p, axis in enumerate(in_axes) if p == 0 or (axis is None and p in differentiated))
    division = Division(argnums, has_aux, whole, len(args), within)
    diff_state, rest, graph = None, None, None
    if nodes:
        graph, diff_state, rest = nnx.split(nodes, division.is_diff, ...)
        _refuse_shared(nodes, argnums, within, verb)
    diff = (tuple(taken[p] for p in division.plain), diff_state)
    held = _nnx.Held(tuple(taken[p] for p in whole if p not in division.plain), graph, rest)
    inputs = tuple(x for p, x in enumerate(taken) if p not in whole)
    return Divided(division, (diff, held), inputs, keywords, nodes, taken)


def _refuse_shared(
    nodes: list[Any], argnums: tuple[Position, ...], within: Sequence[tuple[int, ...]], verb: str
) -> None:
    """A `ValueError` for a variable in two arguments, of which one is differentiated."""
    for (position, wrt), mine in zip(argnums, within, strict=True):
        own = {id(v) for i in mine for _, v in nnx.iter_graph(nodes[i]) if isinstance(v, nnx.Variable)}
        for i, node in enumerate(nodes):
            for path, v in nnx.iter_graph(node) if i not in mine else ():
                if id(v) in own and nnx.filterlib.to_predicate(wrt)(path, v):
                    raise ValueError(
                        f"jdp.{verb}: {'.'.join(map(str, path))} stands in args[{position}] and in another; a variable "
                        f"has one gradient. Pass it in one of them."
                    )


def loss_of(
    loss_fn: Callable[..., Any], division: Division, verb: str, axis_name: str, reduce_state: Reduce, sync: bool
) -> Loss:
    """The loss of a call that was divided so; `sync` synchronises its BatchNorms."""
    if sync:
        loss_fn = synced(loss_fn, axis_name)

    def compute(
        diff: Tree, held: _nnx.Held, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Tree, _nnx.Held]:
        plain, diff_state = diff
        known = dict(zip(division.plain, unbox(plain), strict=True))
        known |= zip([p for p in division.whole if p not in division.plain], held.others, strict=True)
        cut = iter(args)
        call: Tree = ([known[p] if p in known else next(cut) for p in range(division.arity)], kwargs)
        nodes: list[Any] = []
        if held.graph is not None:
            nodes = own_nodes(held.graph, (diff_state, held.variables), axis_name if sync else None)
            call = _nnx.put_nodes(call, nodes)
        positional, keywords = call
        out = loss_fn(*positional, **keywords)
        loss, aux = _two(out, verb) if division.has_aux else (out, ())
        if nodes:
            after = nnx.state(nodes, lambda path, variable: not division.is_diff(path, variable))
            held = held._replace(variables=after)
        return loss, aux, held

    def leave(after: _nnx.Held, before: _nnx.Held) -> Tree:
        return _nnx.leave(after, before, reduce_state)

    return Loss(compute, verb, division.rows, lambda held: _nnx.enter(held, axis_name), leave, sync)


def own_nodes(graph: Any, states: tuple[Tree, ...], sync_over: str | None) -> list[Any]:
    """A replica's own NNX objects; `sync_over` synchronises their BatchNorms."""
    # Copies, for merge takes the variables as they are, and the model changes them in place.
    nodes = nnx.merge(graph, *_nnx.copies(states))
    if sync_over is not None:
        sync_nodes(nodes, sync_over)
    return nodes


def _two(out: Any, verb: str) -> tuple[Any, Any]:
    if isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    raise TypeError(
        f"jdp.{verb}: has_aux is True, and the function returns a {type(out).__name__}"
        f"{f' of {len(out)}' if isinstance(out, tuple | list) else ''}; it is a pair then. Return (loss, aux)."
    )


def assemble(division: Division, grads: Tree, row_grads: Sequence[Tree], args: Sequence[Any]) -> tuple[Tree, ...]:
    """One tree of gradients for each of argnums."""
    plain, state = grads
    known = dict(zip(division.plain, plain, strict=True))
    rows = iter(row_grads)
    found = []
    for (position, _), nodes in zip(division.argnums, division.nodes, strict=True):
        if nodes:
            found.append(_nnx.put_nodes(args[position], {i: state[i] if i in state else nnx.State({}) for i in nodes}))
        else:
            found.append(known[position] if position in known else next(rows))
    return tuple(found)


def cut(config: Config, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], axes: Tree, verb: str) -> Any:
    """`(inputs, kwargs)` scattered, each positional argument along its own of `axes`."""
    how = Cutting(config.mesh, config.dim, verb, ("args", "kwargs"), axes=(axes, config.dim), place=False)
    return split((inputs, dict(kwargs)), how)
