"""Rewrites equations of a jaxpr, inside of loops, branches and calls too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

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
