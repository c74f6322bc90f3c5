"""Which values of a replica's program differ between replicas, and which a collective has made one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp

Rule = Callable[[Any], Callable[..., Any] | None]
"""For an equation the function to put in its place, or None where it stays."""


def rewrite(jaxpr: Any, rule: Rule) -> Any:
    """The jaxpr, closed or open, with the rule's functions in place of equations; itself where there are none."""
    # JAX 0.12 has one class for open and closed jaxprs, of which `jaxpr` is the object itself.
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner is not jaxpr:
        new = rewrite(inner, rule)
        return jaxpr if new is inner else jaxpr.replace(jaxpr=new)
    eqns = [_rewritten(eqn, rule) for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _rewritten(eqn: Any, rule: Rule) -> Any:
    function = rule(eqn)
    if function is not None:
        # One equation that calls the new function, made by JAX itself, in place of the old one.
        (new,) = jax.make_jaxpr(jax.jit(function))(*[v.aval for v in eqn.invars]).eqns
        return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
    params = {name: _inside(value, rule) for name, value in eqn.params.items()}
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _inside(x: Any, rule: Rule) -> Any:
    """The jaxprs among an equation's parameters."""
    if type(x) in (tuple, list) and any(hasattr(y, "eqns") for y in x):
        new = type(x)(_inside(y, rule) for y in x)
        return x if all(a is b for a, b in zip(new, x, strict=True)) else new
    return rewrite(x, rule) if hasattr(x, "eqns") else x


def canonical(jaxpr: Any) -> Any:
    """The jaxpr, with every convolution in the one layout that is fast on a CPU.

    XLA:CPU transposes convolutions into the layout of its kernels (batch, space, features) only in the
    entry computation of a program. Inside a `scan` or a `switch` they stay as they are, and the gradient of
    a convolution, whose layout is another, takes the slow path: ten times slower on a small CNN. So it is
    done here. Transposes that are not needed cost nothing: the compiler takes them out.
    """
    return rewrite(jaxpr, _rule)


def _rule(eqn: Any) -> Callable[..., Any] | None:
    if eqn.primitive is not jax.lax.conv_general_dilated_p:
        return None
    return functools.partial(_convolution, **eqn.params)


def _convolution(x: Any, kernel: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    lhs, rhs, out = dimension_numbers
    n = len(lhs)
    space = tuple(range(1, n - 1))
    x = jnp.transpose(x, (lhs[0], *lhs[2:], lhs[1]))
    kernel = jnp.transpose(kernel, (*rhs[2:], rhs[1], rhs[0]))
    numbers = jax.lax.ConvDimensionNumbers((0, n - 1, *space), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *space))
    y = jax.lax.conv_general_dilated_p.bind(x, kernel, dimension_numbers=numbers, **params)
    back = [0] * n
    for position, axis in enumerate((out[0], *out[2:], out[1])):
        back[axis] = position
    return jnp.transpose(y, back)


# What these give is the same on every replica.
_REDUCERS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
# What these give has the parts of all their operands, as a sum that goes round a ring of replicas does; but not of
# the indices, which stand there.
_COLLECTORS = {
    "add": slice(0, 0),
    "add_any": slice(0, 0),
    "concatenate": slice(0, 0),
    "scatter-add": slice(1, 2),
    "scatter": slice(1, 2),
    "dynamic_update_slice": slice(2, 99),
}


class Value(NamedTuple):
    """What is known of a value: whether replicas may differ in it, and what it comes from."""

    varying: bool
    reduced: Any = None  # the last collective; of what differs, one that gave it the parts of other replicas, too
    sources: int = 0  # a bit for each marked input that it depends on, through whatever collectives
    groups: Any = None  # of what differs and came through collectives within groups of replicas only: those


SAME, VARYING = Value(False), Value(True)


def varying(jaxpr: Any, inputs: Sequence[Value], axis_name: str) -> list[Value]:
    """What is known of the outputs of a jaxpr, from what is known of its inputs.

    JAX's own types (`check_vma=True`) would tell, but real models do not pass that check.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v: Any) -> Value:
        return SAME if hasattr(v, "val") else known.get(v, SAME)

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(v) for v in eqn.invars], axis_name)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def is_exchanged(value: Value) -> bool:
    """Whether a collective has brought something of other replicas into it."""
    return value.reduced is not None and value.reduced.primitive.name != "axis_index"


def _equation(eqn: Any, inputs: list[Value], axis_name: str) -> list[Value]:
    name, params, n = eqn.primitive.name, eqn.params, len(eqn.outvars)
    if axis_name in _axes(params):
        # A collective of several arrays is one of each.
        return [_collective(eqn, v) for v in (inputs if len(inputs) == n else [_join(inputs)] * n)]
    if name == "scan":
        return _scan(params, inputs, axis_name)
    if name == "while":
        return _while(params, inputs, axis_name)
    if name == "cond":
        branches = [varying(branch, inputs[1:], axis_name) for branch in params["branches"]]
        return [_join([inputs[0], *outputs]) for outputs in zip(*branches, strict=True)]
    inner = [getattr(p, "jaxpr", p) for p in params.values() if hasattr(p, "eqns")]
    if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == (len(inputs), n):
        return varying(inner[0], inputs, axis_name)
    joined = _join(inputs)
    if any(_mentions(p, axis_name) for p in params.values()):
        return [Value(True, None, joined.sources)] * n
    if name in _COLLECTORS:
        at = _COLLECTORS[name]
        parts, indices = [*inputs[: at.start], *inputs[at.stop :]], inputs[at]
        exchanged = next((v for v in parts if v.varying and is_exchanged(v)), None)
        if exchanged is not None and not any(v.varying and v.reduced is None for v in indices):
            return [exchanged._replace(sources=joined.sources)] * n
    return [joined] * n


def _collective(eqn: Any, value: Value) -> Value:
    if eqn.params.get("axis_index_groups") is None:
        return Value(eqn.primitive.name not in _REDUCERS, eqn, value.sources)
    if not value.varying or value.reduced is not None:
        return Value(True, eqn, value.sources)
    # One round within groups leaves the rows of the others out; a second, across them, brings them in.
    groups = _connected([*(value.groups or ()), *map(frozenset, eqn.params["axis_index_groups"])])
    return Value(True, eqn if len(groups) == 1 else None, value.sources, groups)


def _connected(groups: Sequence[frozenset[int]]) -> frozenset[frozenset[int]]:
    """The groups, with those that have a replica in common as one."""
    found: list[frozenset[int]] = []
    for group in groups:
        apart = [g for g in found if g.isdisjoint(group)]
        found = [*apart, group.union(*(g for g in found if g not in apart))]
    return frozenset(found)


def _join(values: Sequence[Value]) -> Value:
    sources = 0
    for v in values:
        sources |= v.sources
    apart = [v for v in values if v.varying]
    if any(v.reduced is None for v in apart):
        groups = {v.groups for v in apart}
        return Value(True, None, sources, groups.pop() if len(groups) == 1 else None)
    found = sorted((v for v in apart or values if v.reduced is not None), key=is_exchanged)
    return Value(bool(apart), found[-1].reduced if found else None, sources)


def _scan(params: Any, inputs: list[Value], axis_name: str) -> list[Value]:
    if "ft_in" in params:  # JAX 0.12
        consts, carry, xs = (list(part) for part in params["ft_in"].update(inputs).unpack())
    else:
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, xs = inputs[:first], inputs[first:last], inputs[last:]
    while True:  # each round more is known to differ, or to depend on something, or it is the last
        outputs = varying(params["jaxpr"], [*consts, *carry, *xs], axis_name)
        after = [_join([a, b]) for a, b in zip(carry, outputs, strict=False)]
        if _alike(after, carry):
            return outputs if params["length"] else [*after, *outputs[len(carry) :]]
        carry = after


def _while(params: Any, inputs: list[Value], axis_name: str) -> list[Value]:
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond, body, carry = inputs[:first], inputs[first:last], inputs[last:]
    while True:
        (goes_on,) = varying(params["cond_jaxpr"], [*cond, *carry], axis_name)
        outputs = varying(params["body_jaxpr"], [*body, *carry], axis_name)
        # Replicas that take different numbers of rounds end with different values.
        rounds = goes_on if goes_on.varying else Value(False, None, goes_on.sources)
        after = [_join([a, b, rounds]) for a, b in zip(carry, outputs, strict=True)]
        if _alike(after, carry):
            return after
        carry = after


def _alike(a: Sequence[Value], b: Sequence[Value]) -> bool:
    known = [[(v.varying, v.reduced is None, v.sources, v.groups) for v in values] for values in (a, b)]
    return known[0] == known[1]


def _axes(params: Any) -> tuple[Any, ...]:
    names = params.get("axes", params.get("axis_name", ()))
    return tuple(names) if isinstance(names, tuple | list) else (names,)


def _mentions(x: Any, axis_name: str) -> bool:
    """Whether something inside communicates over the axis, or asks for the replica's index."""
    if isinstance(x, tuple | list):
        return any(_mentions(y, axis_name) for y in x)
    return hasattr(x, "eqns") and any(
        axis_name in _axes(eqn.params) or any(_mentions(p, axis_name) for p in eqn.params.values()) for eqn in x.eqns
    )


def source_line(eqn: Any) -> str:
    """The user's own line that made an equation: "file.py:12", or "" where JAX has not kept it."""
    traceback = getattr(eqn.source_info, "traceback", None)
    libraries = [os.path.dirname(os.path.abspath(str(module.__file__))) for module in (jax, flax)]
    libraries.append(os.path.dirname(os.path.abspath(__file__)))
    for frame in getattr(traceback, "frames", ()):
        path = os.path.abspath(frame.file_name)
        if not any(path.startswith(library + os.sep) for library in libraries) and "importlib" not in path:
            return f"{os.path.basename(path)}:{frame.line_num}"
    return ""
