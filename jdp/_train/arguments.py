"""A loss function's arguments: which are whole and which are cut, what is differentiated, what is NNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from .._core.layout import Tree
from .._core.outputs import Reduce
from .._model.linen import unbox
from .._model.nnx import Held, leave, own_nodes, put_nodes, stand_ins, take_nodes
from .._model.sync_batch_norm import synced
from .gradients import Gradients, Loss


class Wanted(NamedTuple):
    """An argument to differentiate: its position, its NNX objects among all, and the filter of their variables."""

    position: int
    nodes: tuple[int, ...]
    wrt: Any


class Division(NamedTuple):
    """The static part: hashable, so that each has one program."""

    wanted: tuple[Wanted, ...]
    has_aux: bool
    whole: tuple[int, ...]  # positions of the arguments that are whole on every replica
    arity: int  # the number of positional arguments

    @property
    def cut(self) -> list[int]:
        """The positions of the others, which the program gets one after the other."""
        return [p for p in range(self.arity) if p not in self.whole]

    @property
    def rows(self) -> dict[int, int]:
        """The differentiated arguments that are cut, each with its position among the cut ones."""
        cut = self.cut
        return {w.position: cut.index(w.position) for w in self.wanted if not w.nodes and w.position in cut}

    def is_diff(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Whether a variable of the NNX objects is differentiated."""
        return any(path[0] in w.nodes and nnx.filterlib.to_predicate(w.wrt)(path[1:], variable) for w in self.wanted)


class Divided(NamedTuple):
    """One call, divided: `replicas` is `(diff, held)`, `inputs` and `kwargs` are still to be cut."""

    division: Division
    replicas: tuple[tuple[dict[int, Tree], Tree], Held]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    nodes: list[Any]
    args: tuple[Any, ...]  # all positional ones, with stand-ins for the NNX objects

    @property
    def first(self) -> Tree:
        """The first argument's arrays: results go where these live."""
        (_, diff), held = self.replicas
        states = [state for state in (diff, held.variables) if state is not None]
        return self.args[0], [state[i] for state in states for i in stand_ins(self.args[0]) if i in state]


def divide(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: Sequence[tuple[int, Any]],
    has_aux: bool,
    in_axes: Sequence[Any],
    verb: str,
) -> Divided:
    """Divides a call's arguments: `argnums` are positions and NNX filters, `in_axes` has an axis or None for each."""
    (taken, keywords), nodes = take_nodes((tuple(args), dict(kwargs)))
    wanted = tuple(Wanted(p, stand_ins(taken[p]), wrt) for p, wrt in argnums)
    differentiated = {p for p, _ in argnums}
    whole = tuple(p for p, axis in enumerate(in_axes) if p == 0 or (axis is None and p in differentiated))
    division = Division(wanted, has_aux, whole, len(args))
    diff_state, rest, graph = None, None, None
    if nodes:
        graph, diff_state, rest = nnx.split(nodes, division.is_diff, ...)
        _refuse_shared(nodes, wanted, verb)
    plain = {w.position for w in wanted if not w.nodes}
    diff = {p: taken[p] for p in whole if p in plain}
    held = Held({p: taken[p] for p in whole if p not in plain}, graph, rest)
    inputs = tuple(taken[p] for p in division.cut)
    return Divided(division, ((diff, diff_state), held), inputs, keywords, nodes, taken)


def _refuse_shared(nodes: list[Any], wanted: Sequence[Wanted], verb: str) -> None:
    """A `ValueError` for a variable in two arguments, of which one is differentiated."""
    for position, mine, wrt in wanted:
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

    def compute(diff: Tree, held: Held, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tree, Held]:
        plain, diff_state = diff
        known = unbox(plain) | held.others | dict(zip(division.cut, args, strict=True))
        call: Tree = ([known[p] for p in range(division.arity)], kwargs)
        nodes: list[Any] = []
        if held.graph is not None:
            nodes = own_nodes(held.graph, (diff_state, held.variables), axis_name if sync else None)
            call = put_nodes(call, nodes)
        positional, keywords = call
        out = loss_fn(*positional, **keywords)
        loss, aux = _two(out, verb) if division.has_aux else (out, ())
        if nodes:
            after = nnx.state(nodes, lambda path, variable: not division.is_diff(path, variable))
            held = held._replace(variables=after)
        return loss, aux, held

    def left(after: Held, before: Held) -> Tree:
        return leave(after, before, reduce_state)

    return Loss(compute, verb, left, tuple(division.rows.values()), sync)


def _two(out: Any, verb: str) -> tuple[Any, Any]:
    if isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    raise TypeError(
        f"jdp.{verb}: has_aux is True, and the function returns a {type(out).__name__}"
        f"{f' of {len(out)}' if isinstance(out, tuple | list) else ''}; it is a pair then. Return (loss, aux)."
    )


def assemble(division: Division, found: Gradients, args: Sequence[Any]) -> tuple[Tree, ...]:
    """One tree of gradients for each argument that is differentiated."""
    known, state = found.grads
    known |= {p: found.row_grads[i] for p, i in division.rows.items()}
    for w in division.wanted:
        if w.nodes:
            own = {i: state[i] if i in state else nnx.State({}) for i in w.nodes}
            known[w.position] = put_nodes(args[w.position], own)
    return tuple(known[w.position] for w in division.wanted)


def entries(verb: str, axes: Any, count: int, name: str, what: str) -> list[Any]:
    """An entry of `axes` for each argument, or each result."""
    given = list(axes) if isinstance(axes, tuple | list) else [axes] * count
    if len(given) != count:
        raise ValueError(
            f"jdp.{verb}: {name} has {len(given)} entries for {count} {what}; as in jax.vmap each has one. Pass "
            f"{name} of that length, None for what is whole."
        )
    return given
