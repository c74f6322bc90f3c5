"""Which values of a replica's program differ between replicas, and which a collective has made one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax
import jax

# What these give is the same on every replica.
_REDUCERS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


class Value(NamedTuple):
    """What is known of a value: whether replicas may differ in it, and the last collective that it comes from."""

    varying: bool
    reduced: Any = None


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


def _equation(eqn: Any, inputs: list[Value], axis_name: str) -> list[Value]:
    name, params, n = eqn.primitive.name, eqn.params, len(eqn.outvars)
    if axis_name in _axes(params):
        whole = name in _REDUCERS and params.get("axis_index_groups") is None
        return [Value(False, eqn) if whole else VARYING] * n
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
    if any(_mentions(p, axis_name) for p in params.values()):
        return [VARYING] * n
    return [_join(inputs)] * n


def _join(values: Sequence[Value]) -> Value:
    if any(v.varying for v in values):
        return VARYING
    return next((v for v in values if v.reduced is not None), SAME)


def _scan(params: Any, inputs: list[Value], axis_name: str) -> list[Value]:
    if "ft_in" in params:  # JAX 0.12
        consts, carry, xs = (list(part) for part in params["ft_in"].update(inputs).unpack())
    else:
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, xs = inputs[:first], inputs[first:last], inputs[last:]
    while True:  # each round at least one more varies, or it is the last
        outputs = varying(params["jaxpr"], [*consts, *carry, *xs], axis_name)
        after = [_join([a, b]) for a, b in zip(carry, outputs, strict=False)]
        if [v.varying for v in after] == [v.varying for v in carry]:
            return [*after, *outputs[len(carry) :]]
        carry = after


def _while(params: Any, inputs: list[Value], axis_name: str) -> list[Value]:
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond, body, carry = inputs[:first], inputs[first:last], inputs[last:]
    while True:
        (goes_on,) = varying(params["cond_jaxpr"], [*cond, *carry], axis_name)
        outputs = varying(params["body_jaxpr"], [*body, *carry], axis_name)
        # Replicas that take different numbers of rounds end with different values.
        after = [_join([a, b, *([goes_on] if goes_on.varying else [])]) for a, b in zip(carry, outputs, strict=True)]
        if [v.varying for v in after] == [v.varying for v in carry]:
            return after
        carry = after


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
