"""Runs a traced function whose parameters are cut over the replicas: each is gathered where it is used.

A piece is a part of the program, with the parameters that it uses. They are gathered before it, dropped after it, and
gathered again in the backward pass. Products with parameters, convolutions, random numbers and the like are kept for
the backward pass; results of elementwise operations, and products of rows with each other, are computed again there.
Parameters that a scan iterates over are gathered in its body, one iteration at a time. Pieces are the units of Zhao et
al., "PyTorch FSDP" (2023).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from .jaxprs import Env, bind, env_of, evaluate_eqn, inside, is_literal, opened, parts_of_scan, read


class ShardedOperand(NamedTuple):
    """An operand that is cut along `axis`: `gather(value, axis, dtype)` returns the whole array.

    The value is an array, or a tree of arrays of one rank. It is sent in `dtype`, which may be narrower than its own.
    """

    value: Any
    axis: int
    gather: Callable[[Any, int, Any], Any]


def run_in_pieces(jaxpr: Any, operands: Sequence[Any], most: int, in_a_loop: bool = False) -> list[Any]:
    """Runs a closed jaxpr; returns its outputs. Operands that are `ShardedOperand` are gathered where they are used.

    A piece uses parameters of at most `most` bytes, or one larger parameter, or is one iteration of a scan.
    """
    if not any(isinstance(x, ShardedOperand) for x in operands):
        return jax.extend.core.jaxpr_as_fun(jaxpr)(*operands)
    jaxpr = without_calls(jaxpr)
    env = env_of(jaxpr, operands)
    sharded = {v: x for v, x in env.items() if isinstance(x, ShardedOperand)}
    results = [v for v in jaxpr.jaxpr.outvars if not is_literal(v)]
    pieces = _pieces(jaxpr.jaxpr, sharded, most)
    alone = in_a_loop and len(pieces) == 1  # a loop itself keeps its forward and its backward pass apart
    for i, piece in enumerate(pieces):
        given = [v for v in piece.reads() if v in env and v not in sharded]
        later = {*results, *(v for other in pieces[i + 1 :] for v in other.reads())}
        outs = [v for v in piece.makes() if v in later]
        run = functools.partial(_run_piece, piece, sharded, given, outs, most)
        again = jax.checkpoint(run, policy=_keeps(piece), prevent_cse=not alone) if piece.gathered else run
        operands = [sharded[v].value for v in piece.sources], [env[v] for v in given]
        env.update(zip(outs, again(*operands), strict=True))
    # A number that the program returns as it is stands in the jaxpr as JAX's own type of number, which has no shape.
    return [jnp.asarray(v.val, v.aval.dtype) if is_literal(v) else env[v] for v in jaxpr.jaxpr.outvars]


_JITS = {"jit", "pjit", "closed_call", "core_call"}


def without_calls(jaxpr: Any) -> Any:
    """Returns the closed jaxpr with each call of a jitted function replaced by its body."""

    def run(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        env = env_of(jaxpr, operands)
        for eqn in opened(jaxpr).eqns:
            if eqn.primitive.name in _JITS:
                (body,) = inside(eqn)
                env.update(zip(eqn.outvars, run(body, [read(env, v) for v in eqn.invars]), strict=True))
            else:
                evaluate_eqn(eqn, env)
        return [read(env, v) for v in opened(jaxpr).outvars]

    return jax.make_jaxpr(lambda *operands: run(jaxpr, operands))(*[v.aval for v in opened(jaxpr).invars])


class _View(NamedTuple):
    """A parameter after some casts and transposes, which are done again in each piece that uses it."""

    source: Any
    eqns: tuple[Any, ...] = ()

    @property
    def narrow(self) -> Any:
        """The dtype that the parameter is sent in: the first one that it is cast to, if that is narrower."""
        own = self.source.aval.dtype
        casts = [eqn.outvars[0].aval.dtype for eqn in self.eqns]
        found = next((dtype for dtype in casts if dtype != own), own)
        return found if found.itemsize < own.itemsize and jnp.issubdtype(found, jnp.floating) else own

    def order(self) -> tuple[int, ...]:
        """Returns the parameter's axes, in their order in the view."""
        axes = tuple(range(self.source.aval.ndim))
        for eqn in self.eqns:
            axes = tuple(axes[i] for i in eqn.params.get("permutation", range(len(axes))))
        return axes


_VIEWS = {"convert_element_type", "transpose"}


@dataclasses.dataclass
class _Piece:
    eqns: list[Any] = dataclasses.field(default_factory=list)
    views: dict[Any, _View] = dataclasses.field(default_factory=dict)
    within: Sequence[Any] = ()  # of a piece that is a scan or a checkpoint: the views that are gathered in its body

    @property
    def sources(self) -> list[Any]:
        """The parameters that it uses."""
        return [*dict.fromkeys(view.source for view in self.views.values())]

    @property
    def gathered(self) -> dict[Any, _View]:
        """The views whose parameters it gathers itself."""
        return {v: view for v, view in self.views.items() if v not in self.within}

    def takes(self, views: dict[Any, _View], most: int) -> bool:
        """Returns True if the parameters of these views fit into it."""
        have = dict.fromkeys(self.sources)
        want = have | dict.fromkeys(view.source for view in views.values())
        return not have or len(want) == len(have) or sum(map(_bytes, want)) <= most

    def reads(self) -> list[Any]:
        """Returns the variables that come from outside of it, except parameters."""
        own = {v for eqn in self.eqns for v in eqn.outvars}.union(self.views)
        found = [v for eqn in self.eqns for v in eqn.invars if not is_literal(v)]
        return [*dict.fromkeys(v for v in found if v not in own)]

    def makes(self) -> list[Any]:
        return [*self.gathered, *(v for eqn in self.eqns for v in eqn.outvars)]


def _bytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _pieces(jaxpr: Any, sharded: dict[Any, ShardedOperand], most: int) -> list[_Piece]:
    views = {v: _View(v) for v in sharded}
    pieces = [_Piece()]
    for eqn in jaxpr.eqns:
        found = {v: views[v] for v in eqn.invars if not is_literal(v) and v in views}
        if found and eqn.primitive.name in _VIEWS:
            (view,) = found.values()
            views[eqn.outvars[0]] = _View(view.source, (*view.eqns, eqn))
            continue
        within = _gathered_within(eqn, found, sharded)
        if within or pieces[-1].within or not pieces[-1].takes(found, most):
            pieces.append(_Piece(within=within))
        pieces[-1].eqns.append(eqn)
        pieces[-1].views.update(found)
    if given := {v: views[v] for v in jaxpr.outvars if not is_literal(v) and v in views}:
        pieces.append(_Piece(views=given))
    return pieces


def _gathered_within(eqn: Any, views: dict[Any, _View], sharded: dict[Any, ShardedOperand]) -> list[Any]:
    """Returns the views that can be gathered in the body of an equation.

    For a checkpoint these are all views; for a scan, the parameters that it iterates over, if they are cut along
    another axis than that of the iterations.
    """
    if eqn.primitive.name in _CHECKPOINTS:
        return [*views]
    if eqn.primitive.name != "scan":
        return []
    consts, carry, xs = parts_of_scan(eqn, eqn.invars)
    others = [v for v in (*consts, *carry) if not is_literal(v)]
    mine = [v for v in xs if not is_literal(v) and v in views and v not in others]
    return [v for v in mine if views[v].order().index(sharded[views[v].source].axis) != 0]


_CHECKPOINTS = {"checkpoint", "remat", "remat2"}
_KEEP_SIZE = {*_VIEWS, "reshape", "broadcast_in_dim", "squeeze", "slice", "copy", "rev"}


# Elementwise operations, and reductions. To compute their results again, where they are read, is less work than to keep
# them in memory: a scan would keep those of each iteration, on CPUs a fourth of the step (benchmarks/shard.py).
_CHEAP = set(
    """
    abs add add_any and argmax argmin broadcast_in_dim ceil clamp concatenate convert_element_type copy copy_p cos
    cosh div eq erf erf_inv exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min
    mul ne neg not or pad pow reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum rem reshape rev
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
    squeeze stop_gradient sub tan tanh transpose xor
    """.split()
)


def _keeps(piece: _Piece) -> Callable[..., bool]:
    """Returns the policy of what is kept for the backward pass: not what the piece gathers or another view of it, not a
    product of rows with each other, and no result of a `_CHEAP` operation.

    A policy sees only shapes, so an activation with as many elements as a parameter is computed again, too. A piece
    that prints or calls back keeps cheap results, because JAX would print them once more if it computed them again.
    """
    sizes = {view.source.aval.size for view in piece.gathered.values()}
    cheap = () if any(eqn.effects for eqn in piece.eqns) else _CHEAP

    def keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
        is_view = primitive.name in _KEEP_SIZE and avals[0].size in sizes
        # A batched product, such as the scores of attention, is large, and quickly computed again.
        is_batched = primitive.name == "dot_general" and bool(params["dimension_numbers"][1][0])
        of_rows = is_batched and not any(x.size in sizes for x in avals)
        return not is_view and not of_rows and primitive.name != "all_gather" and primitive.name not in cheap

    return keeps


def _run_piece(
    piece: _Piece,
    sharded: dict[Any, ShardedOperand],
    given: Sequence[Any],
    outs: Sequence[Any],
    most: int,
    shards: Sequence[Any],
    values: Sequence[Any],
) -> list[Any]:
    """Runs a piece on the shards of its parameters and the `values` of `given`; returns the values of `outs`."""
    env: Env = dict(zip(given, values, strict=True))
    mine = {v: sharded[v]._replace(value=x) for v, x in zip(piece.sources, shards, strict=True)}
    for source in dict.fromkeys(view.source for view in piece.gathered.values()):
        wanted = {view.narrow for view in piece.gathered.values() if view.source is source}
        dtype = wanted.pop() if len(wanted) == 1 else source.aval.dtype
        env[source] = mine[source].gather(mine[source].value, mine[source].axis, dtype)
    env |= {v: _view_of(env[view.source], view) for v, view in piece.gathered.items()}
    if piece.within:
        (eqn,) = piece.eqns
        run = _loop if eqn.primitive.name == "scan" else _checkpoint
        made = run(eqn, env, {v: _turned(mine, piece.views[v]) for v in piece.within}, most)
        env.update(zip(eqn.outvars, made, strict=True))
    else:
        for eqn in piece.eqns:
            evaluate_eqn(eqn, env)
    return [env[v] for v in outs]


def _view_of(x: Any, view: _View) -> Any:
    for eqn in view.eqns:
        (x,) = bind(eqn, [x])
    return x


def _turned(sharded: dict[Any, ShardedOperand], view: _View) -> ShardedOperand:
    """Returns a view as a sharded operand: its shard is transposed at once, and its casts follow the gathering."""
    value, axis, gather = sharded[view.source]
    order, dtypes = view.order(), [eqn.outvars[0].aval.dtype for eqn in view.eqns]
    is_cast = any(dtype != view.source.aval.dtype for dtype in dtypes)

    def cast(value: Any, axis: int, wanted: Any) -> Any:
        x = gather(value, axis, view.narrow if is_cast else wanted)
        for dtype in dtypes:  # one after the other: each may round
            x = x.astype(dtype)
        return x

    turned = jax.tree.map(lambda x: jnp.transpose(x, order), value)
    return ShardedOperand(turned, order.index(axis), cast if view.eqns else gather)


def _checkpoint(eqn: Any, env: Env, within: dict[Any, ShardedOperand], most: int) -> list[Any]:
    """Runs a checkpoint of the user's own, with its body in pieces."""
    (jaxpr,) = inside(eqn)
    cut = [None if is_literal(v) else within.get(v) for v in eqn.invars]
    values = [x.value if x else read(env, v) for v, x in zip(eqn.invars, cut, strict=True)]

    def run(*values: Any) -> list[Any]:
        mine = [one._replace(value=x) if one else x for one, x in zip(cut, values, strict=True)]
        return run_in_pieces(jaxpr, mine, most)

    how = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(run, **how)(*values)


def _loop(eqn: Any, env: Env, within: dict[Any, ShardedOperand], most: int) -> list[Any]:
    """Runs a scan, with its body in pieces."""
    (jaxpr,), params = inside(eqn), eqn.params
    consts, carry, xs = parts_of_scan(eqn, eqn.invars)
    cut = [None if is_literal(v) else within.get(v) for v in xs]
    fixed = [read(env, v) for v in consts]
    values = [x.value if x else read(env, v) for v, x in zip(xs, cut, strict=True)]

    def step(carry: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        rows = [one._replace(value=x, axis=one.axis - 1) if one else x for one, x in zip(cut, values, strict=True)]
        out = run_in_pieces(jaxpr, [*fixed, *carry, *rows], most, in_a_loop=True)
        return out[: len(carry)], out[len(carry) :]

    start = [read(env, v) for v in carry]
    after, made = jax.lax.scan(
        step, start, values, params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*after, *made]


def run_over(jaxpr: Any, count: int) -> set[tuple[int, int]]:
    """Returns which of the first `count` operands of a closed jaxpr its scans iterate over, each with the axis."""
    found: set[tuple[int, int]] = set()

    def look(jaxpr: Any, operands: Sequence[tuple[int, tuple[int, ...]] | None]) -> None:
        """Follows `operands` through the jaxpr: which one each value is, or is part of, and which axes it still has."""
        inner = without_calls(jaxpr).jaxpr
        known = {v: x for v, x in zip(inner.invars, operands, strict=False) if x}
        for eqn in inner.eqns:
            mine = [None if is_literal(v) else known.get(v) for v in eqn.invars]
            if not any(mine):
                continue
            if eqn.primitive.name in _VIEWS and mine[0]:
                index, axes = mine[0]
                known[eqn.outvars[0]] = index, tuple(axes[i] for i in eqn.params.get("permutation", range(len(axes))))
            elif eqn.primitive.name == "scan":
                consts, carry, xs = parts_of_scan(eqn, mine)
                found.update((x[0], x[1][0]) for x in xs if x)
                (body,) = inside(eqn)
                look(body, [*consts, *[None] * len(carry), *[x and (x[0], x[1][1:]) for x in xs]])
            elif eqn.primitive.name in _CHECKPOINTS:
                (body,) = inside(eqn)
                look(body, mine)

    avals = jaxpr.jaxpr.invars[:count]
    look(jaxpr, [(i, tuple(range(v.aval.ndim))) for i, v in enumerate(avals)])
    return found
