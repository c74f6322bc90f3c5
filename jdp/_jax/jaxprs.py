"""Jaxprs: walks their equations, runs them one by one, and tells which values differ between replicas.

JAX does not promise what is assumed here about equations and their parameters. If an assumption fails, the code that
needs it raises an error, or its feature is left out; `tests/jax/test_private.py` has a test for each. The same holds
for the modules that build on this one: `rewrites.py`, `segments.py`, `pieces.py` and `row_*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.extend
import jax.numpy as jnp


def inside(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs that an equation holds."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, closed or open, nested ones too."""
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for inner in inside(eqn):
            yield from equations(inner)


def first(jaxpr: Any, primitive: str) -> Any:
    """Returns the first equation with the primitive of this name, nested ones too; None if there is none."""
    return next((eqn for eqn in equations(jaxpr) if eqn.primitive.name == primitive), None)


def opened(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one, and an open one as it is."""
    # JAX 0.12 has one class for open and closed jaxprs; its attribute `jaxpr` is the object itself.
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that a traced function has closed over, nested ones too."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in opened(jaxpr).eqns:
        yield from (v.val for v in eqn.invars if is_literal(v))
        for inner in inside(eqn):
            yield from constants(inner)


def filled_with(jaxpr: Any) -> list[Any] | None:
    """Returns the number that fills each result, as 0 fills `jnp.zeros`; None if some result has no such number."""
    fills = [eqn for eqn in opened(jaxpr).eqns if eqn.primitive.name == "broadcast_in_dim"]
    numbers = {id(eqn.outvars[0]): eqn.invars[0].val for eqn in fills if is_literal(eqn.invars[0])}
    outs = opened(jaxpr).outvars
    if any(getattr(v.aval, "weak_type", False) or not (is_literal(v) or id(v) in numbers) for v in outs):
        return None
    return [v.val if is_literal(v) else numbers[id(v)] for v in outs]


def is_literal(v: Any) -> bool:
    """Returns True if an equation's operand is a literal value, and no variable."""
    return hasattr(v, "val")


def _changed(eqn: Any, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"jdp: {eqn.primitive.name} of JAX {jax.__version__} has no parameter {name!r}, which tells jdp "
        f"what differs between replicas. Install a version that has it (0.10 to 0.12)."
    )


def parameter(eqn: Any, name: str) -> Any:
    """Returns a parameter of an equation; raises a `NotImplementedError` if this version of JAX does not have it."""
    if name not in eqn.params:
        raise _changed(eqn, name)
    return eqn.params[name]


def parts_of_scan(eqn: Any, inputs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the operands of a scan as `(consts, carry, xs)`."""
    if "ft_in" in eqn.params:  # JAX 0.12
        consts, carry, xs = eqn.params["ft_in"].update(list(inputs)).unpack()
        return list(consts), list(carry), list(xs)
    first = parameter(eqn, "num_consts")
    last = first + parameter(eqn, "num_carry")
    return list(inputs[:first]), list(inputs[first:last]), list(inputs[last:])


# Calls that may be replaced by their bodies.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}

# Collectives whose result is the same on every replica.
REDUCERS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
COLLECTIVES = {*REDUCERS, "ppermute", "all_to_all", "reduce_scatter", "axis_index"}


def axes(eqn: Any) -> tuple[Any, ...]:
    """Returns the axes that an equation is over: names for collectives and `axis_index`, numbers for reductions."""
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    if names is None:
        if eqn.primitive.name in COLLECTIVES:  # one that is overlooked would run where it must not
            raise _changed(eqn, "axes")
        return ()
    return tuple(names) if isinstance(names, tuple | list) else (names,)


def is_sum_over(eqn: Any, axis_name: str) -> bool:
    """Returns True if it is a sum over all members of this one axis."""
    return eqn.primitive.name == "psum" and axes(eqn) == (axis_name,) and eqn.params.get("axis_index_groups") is None


def are_means(jaxpr: Any, axis_name: str, n: int) -> bool:
    """Returns True if each sum over the axis is divided right away by `n`, its number of members, as in `lax.pmean`.

    True also if there is no sum; other collectives are not looked at.
    """
    jaxpr = opened(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("psum") and axis_name in axes(eqn):
            users = [other for other in jaxpr.eqns if any(v is out for v in other.invars for out in eqn.outvars)]
            by = [other.invars[1] for other in users if other.primitive.name == "div"]
            is_result = any(v is out for v in jaxpr.outvars for out in eqn.outvars)
            if is_result or len(by) != len(users) or not all(is_literal(v) and v.val == n for v in by):
                return False
        if not all(are_means(inner, axis_name, n) for inner in inside(eqn)):
            return False
    return True


def replayed(jaxpr: Any, shapes: Any) -> Callable[..., Any]:
    """Returns the function that a jaxpr was traced from; `shapes` are those of its results, as a tree."""
    run = jax.extend.core.jaxpr_as_fun(jaxpr)
    return lambda *operands: jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(operands)))


def communicates(jaxpr: Any) -> bool:
    """Returns True if a jaxpr has a collective, where devices wait for each other."""
    names = (axis for eqn in equations(jaxpr) if eqn.primitive.name != "axis_index" for axis in axes(eqn))
    return not all(hasattr(axis, "__index__") for axis in names)  # a number is an axis of an array


def ordered(jaxpr: Any) -> Any:
    """Returns the first equation with an ordered effect (print, callback), which JAX allows on one device only."""
    jaxpr = opened(jaxpr)
    for eqn in jaxpr.eqns if any(map(_is_ordered, jaxpr.effects)) else ():
        if any(map(_is_ordered, eqn.effects)):
            return next((found for inner in inside(eqn) if (found := ordered(inner)) is not None), eqn)
    return None


def _is_ordered(effect: Any) -> bool:
    return isinstance(effect, _ordered_effects())


def _ordered_effects() -> tuple[type, ...]:
    # JAX has no public name for these types, so they are taken from an ordered print and an ordered callback.
    traced = [
        jax.make_jaxpr(lambda: jax.debug.print("", ordered=True))(),
        jax.make_jaxpr(lambda: jax.experimental.io_callback(lambda: None, None, ordered=True))(),
    ]
    return tuple({type(effect) for jaxpr in traced for effect in jaxpr.effects})


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation for these values."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


Env = dict[Any, Any]
"""The values of a jaxpr's variables."""


def env_of(jaxpr: Any, operands: Sequence[Any]) -> Env:
    """Returns the values of a jaxpr's constants and of its inputs."""
    inner, consts = opened(jaxpr), getattr(jaxpr, "consts", ())
    return dict(zip([*getattr(inner, "constvars", ()), *inner.invars], [*consts, *operands], strict=True))


def read(env: Env, v: Any) -> Any:
    """Returns the value of an operand."""
    return v.val if is_literal(v) else env[v]


def evaluate_eqn(eqn: Any, env: Env) -> None:
    """Evaluates an equation, and adds its results to the values."""
    env.update(zip(eqn.outvars, bind(eqn, [read(env, v) for v in eqn.invars]), strict=True))


class ReplicaValue(NamedTuple):
    """How a value depends on the replica: whether it may differ between replicas, and what it comes from."""

    varying: bool
    # The last collective that it depends on; if it varies, one that brought in the parts of other replicas.
    reduced: Any = None
    sources: int = 0  # a bit for each marked input that it depends on, also through collectives
    groups: Any = None  # if it varies, and came only through collectives within groups of replicas: these groups


SAME, VARYING = ReplicaValue(False), ReplicaValue(True)


def varying(
    jaxpr: Any, inputs: Sequence[ReplicaValue], axis_name: str, of: Sequence[Any] | None = None
) -> list[ReplicaValue]:
    """Returns the `ReplicaValue` of each output of a jaxpr (or of each variable in `of`), given those of its inputs.

    JAX's own types (`check_vma=True`) would tell what varies, but real models do not pass that check.
    """
    jaxpr = opened(jaxpr)
    known: dict[Any, ReplicaValue] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v: Any) -> ReplicaValue:
        return SAME if is_literal(v) else known.get(v, SAME)

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(v) for v in eqn.invars], axis_name)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in (jaxpr.outvars if of is None else of)]


# The results of these contain the parts of all operands, as in a sum that is passed around a ring of replicas. The
# slice selects the operands that are only indices.
_COLLECTORS = {
    "add": slice(0, 0),
    "add_any": slice(0, 0),
    "concatenate": slice(0, 0),
    "scatter-add": slice(1, 2),
    "scatter": slice(1, 2),
    "dynamic_update_slice": slice(2, 99),
}


def _equation(eqn: Any, inputs: list[ReplicaValue], axis_name: str) -> list[ReplicaValue]:
    name, params, n = eqn.primitive.name, eqn.params, len(eqn.outvars)
    if axis_name in axes(eqn):
        # A collective of several arrays acts on each array alone.
        return [_collective(eqn, v) for v in (inputs if len(inputs) == n else [_joined_values(inputs)] * n)]
    if name == "scan":
        return _scan_rule(eqn, inputs, axis_name)
    if name == "while":
        return _while(eqn, inputs, axis_name)
    if name == "cond":
        branches = [varying(branch, inputs[1:], axis_name) for branch in parameter(eqn, "branches")]
        return [_joined_values([inputs[0], *outputs]) for outputs in zip(*branches, strict=True)]
    inner = [opened(p) for p in params.values() if hasattr(p, "eqns")]
    if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == (len(inputs), n):
        return varying(inner[0], inputs, axis_name)
    joined = _joined_values(inputs)
    # Something in its body communicates over the axis, or asks for the replica's index.
    if any(axis_name in axes(e) for body in inside(eqn) for e in equations(body)):
        return [ReplicaValue(True, None, joined.sources)] * n
    if name in _COLLECTORS:
        at = _COLLECTORS[name]
        parts, indices = [*inputs[: at.start], *inputs[at.stop :]], inputs[at]
        exchanged = next((v for v in parts if v.varying and is_exchanged(v)), None)
        if exchanged is not None and not any(v.varying and v.reduced is None for v in indices):
            return [exchanged._replace(sources=joined.sources)] * n
    return [joined] * n


def _collective(eqn: Any, value: ReplicaValue) -> ReplicaValue:
    if eqn.params.get("axis_index_groups") is None:
        return ReplicaValue(eqn.primitive.name not in REDUCERS, eqn, value.sources)
    if not value.varying or value.reduced is not None:
        return ReplicaValue(True, eqn, value.sources)
    # One collective within groups leaves out the rows of the other groups; a second one, across these, brings them in.
    groups = _connected([*(value.groups or ()), *map(frozenset, eqn.params["axis_index_groups"])])
    return ReplicaValue(True, eqn if len(groups) == 1 else None, value.sources, groups)


def _connected(groups: Sequence[frozenset[int]]) -> frozenset[frozenset[int]]:
    """Merges the groups that have a replica in common."""
    found: list[frozenset[int]] = []
    for group in groups:
        apart = [g for g in found if g.isdisjoint(group)]
        found = [*apart, group.union(*(g for g in found if g not in apart))]
    return frozenset(found)


def _joined_values(values: Sequence[ReplicaValue]) -> ReplicaValue:
    sources = 0
    for v in values:
        sources |= v.sources
    apart = [v for v in values if v.varying]
    if any(v.reduced is None for v in apart):
        groups = {v.groups for v in apart}
        return ReplicaValue(True, None, sources, groups.pop() if len(groups) == 1 else None)
    found = sorted((v for v in apart or values if v.reduced is not None), key=is_exchanged)
    return ReplicaValue(bool(apart), found[-1].reduced if found else None, sources)


def _scan_rule(eqn: Any, inputs: list[ReplicaValue], axis_name: str) -> list[ReplicaValue]:
    body, length = parameter(eqn, "jaxpr"), parameter(eqn, "length")
    consts, carry, xs = parts_of_scan(eqn, inputs)
    while True:  # until nothing more is found to vary, or to depend on something
        outputs = varying(body, [*consts, *carry, *xs], axis_name)
        after = [_joined_values([a, b]) for a, b in zip(carry, outputs, strict=False)]
        if _alike(after, carry):
            return outputs if length else [*after, *outputs[len(carry) :]]
        carry = after


def _while(eqn: Any, inputs: list[ReplicaValue], axis_name: str) -> list[ReplicaValue]:
    condition, step = parameter(eqn, "cond_jaxpr"), parameter(eqn, "body_jaxpr")
    first = parameter(eqn, "cond_nconsts")
    last = first + parameter(eqn, "body_nconsts")
    cond, body, carry = inputs[:first], inputs[first:last], inputs[last:]
    while True:
        (goes_on,) = varying(condition, [*cond, *carry], axis_name)
        outputs = varying(step, [*body, *carry], axis_name)
        # Replicas that take different numbers of rounds end with different values.
        rounds = goes_on if goes_on.varying else ReplicaValue(False, None, goes_on.sources)
        after = [_joined_values([a, b, rounds]) for a, b in zip(carry, outputs, strict=True)]
        if _alike(after, carry):
            return after
        carry = after


def _alike(a: Sequence[ReplicaValue], b: Sequence[ReplicaValue]) -> bool:
    known = [[(v.varying, v.reduced is None, v.sources, v.groups) for v in values] for values in (a, b)]
    return known[0] == known[1]


def is_exchanged(value: ReplicaValue) -> bool:
    """Returns True if a collective has brought parts of other replicas into a value."""
    return value.reduced is not None and value.reduced.primitive.name != "axis_index"


def added(jaxpr: Any, old: int, new: int) -> list[Any] | None:
    """Returns the variables that output `new` adds to input `old` of a closed jaxpr without calls.

    A maximum with other variables counts as such a sum. So does a choice between the input and something else, of which
    only the variable that decides is returned. Returns None if the output is anything else, such as a moving average.
    """
    jaxpr = opened(jaxpr)
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def uncast(v: Any) -> Any:
        while not is_literal(v) and v in made and made[v].primitive.name in _CASTS:
            v = made[v].invars[0]
        return v

    before, eqn = jaxpr.invars[old], made.get(uncast(jaxpr.outvars[new]))
    if eqn is None or not any(uncast(v) is before for v in eqn.invars):
        return None
    first, *others = eqn.invars
    if eqn.primitive.name == "select_n":  # the operand that decides
        return [first]
    if eqn.primitive.name in _ADDS_TO_FIRST:
        is_descent = eqn.primitive.name == "sub" and jnp.issubdtype(first.aval.dtype, jnp.inexact)
        return others if uncast(first) is before and not is_descent else None
    return [v for v in eqn.invars if uncast(v) is not before] if eqn.primitive.name in _ADDS else None


_CASTS = {"convert_element_type", "copy", "reshape", "squeeze", "broadcast_in_dim"}
_ADDS = {"add", "add_any", "max", "min", "or", "and", "xor"}
_ADDS_TO_FIRST = {"sub", "scatter-add", "scatter", "scatter-max", "scatter-min", "dynamic_update_slice"}


def reached(jaxpr: Any, inputs: Sequence[bool], through: Callable[[Any], bool] = lambda _: True) -> list[bool]:
    """Returns for each output whether it depends on a marked input, by way of values whose type `through` accepts.

    Each result of a loop or a branch counts as dependent on all of its operands.
    """
    jaxpr = opened(jaxpr)
    known = {v: mark and through(v.aval) for v, mark in zip(jaxpr.invars, inputs, strict=True)}
    for eqn in jaxpr.eqns:
        mine = [not is_literal(v) and known.get(v, False) for v in eqn.invars]
        bodies = [*inside(eqn)] if eqn.primitive.name not in ("scan", "while", "cond") else []
        sizes = [(len(opened(body).invars), len(opened(body).outvars)) for body in bodies]
        if sizes == [(len(mine), len(eqn.outvars))]:
            found = reached(bodies[0], mine, through)
        else:
            found = [any(mine)] * len(eqn.outvars)
        known.update((v, x and through(v.aval)) for v, x in zip(eqn.outvars, found, strict=True))
    return [not is_literal(v) and known.get(v, False) for v in jaxpr.outvars]


MAYBE = -1
_SAME = {"copy", "sharding_constraint", "optimization_barrier"}
_MOVES = {"reshape", "squeeze", "broadcast_in_dim"}


def passed_on(jaxpr: Any) -> list[int | None]:
    """Returns for each output which input it is, passed on unchanged; None if it was computed, or transposed.

    Functions that are jitted or rematerialised are looked into. `MAYBE` stands for what is not followed: outputs of
    loops and branches, and inputs in another shape.
    """
    jaxpr = opened(jaxpr)
    axes_of = [tuple(range(getattr(v.aval, "ndim", 0))) for v in jaxpr.invars]
    # For each value: the input that it is, and the order of its axes (None: not known).
    known: dict[Any, tuple[int, tuple[int, ...] | None] | None] = dict(
        zip(jaxpr.invars, enumerate(axes_of), strict=True)
    )
    for eqn in jaxpr.eqns:
        name, bodies, count = eqn.primitive.name, [*inside(eqn)], len(eqn.outvars)
        came = [None if is_literal(v) else known.get(v) for v in eqn.invars]
        found: list[tuple[int, tuple[int, ...] | None] | None] = [None] * count
        if name in ("scan", "while", "cond"):
            found = [(MAYBE, None)] * count
        elif [len(opened(body).invars) for body in bodies] == [len(came)]:
            found = [(i, None) if i == MAYBE else None if i is None else came[i] for i in passed_on(bodies[0])]
        elif name in _SAME:
            found = came[:count]
        elif name in _MOVES and came[0] is not None:
            found = [(came[0][0], None)]
        elif name == "transpose" and came[0] is not None:
            place, order = came[0]
            found = [(place, order and tuple(order[i] for i in parameter(eqn, "permutation")))]
        known.update(zip(eqn.outvars, found, strict=False))
    ends = [None if is_literal(v) else known.get(v) for v in jaxpr.outvars]
    return [_end_of(end, axes_of) for end in ends]


def _end_of(end: tuple[int, tuple[int, ...] | None] | None, axes_of: Sequence[tuple[int, ...]]) -> int | None:
    if end is None:
        return None
    index, order = end
    return MAYBE if order is None else index if order == axes_of[index] else None
