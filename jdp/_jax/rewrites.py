"""Rewrites jaxprs: replaces equations by functions, calls by their bodies, and `axis_index` by a known index.

`rewrite` keeps loops and branches, and replaces each equation that a rule accepts by one function. `with_pairs_cut`
uses it to tell XLA how to cut a product of all pairs of rows over the devices. `inlined` removes the calls and loops
around some equations, so that the code before and after these can be run separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from .callers import is_made_by
from .jaxprs import (
    CALLS,
    axes,
    bind,
    env_of,
    equations,
    evaluate_eqn,
    inside,
    is_literal,
    opened,
    parameter,
    parts_of_scan,
    read,
)

Rule = Callable[[Any], Callable[..., Any] | None]
"""Returns the function that replaces an equation, or None if the equation stays."""


def rewrite(jaxpr: Any, rule: Rule) -> Any:
    """Returns the jaxpr, closed or open, with the rule's functions in place of equations; itself if there are none."""
    inner = opened(jaxpr)
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
    params = {name: _rewritten_parameter(value, rule) for name, value in eqn.params.items()}
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _rewritten_parameter(x: Any, rule: Rule) -> Any:
    """Returns an equation's parameter with the jaxprs in it rewritten."""
    if type(x) in (tuple, list) and any(hasattr(y, "eqns") for y in x):
        new = type(x)(_rewritten_parameter(y, rule) for y in x)
        return x if all(a is b for a, b in zip(new, x, strict=True)) else new
    return rewrite(x, rule) if hasattr(x, "eqns") else x


def with_adjoints_in(context: Callable[[], Any], call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `call`; if it holds a loop of equinox, its backward pass runs in the context of the forward pass.

    JAX runs the backward pass of a `shard_map` under its own mesh. The mesh is part of the types of values, which the
    loops of equinox (and so the adjoints of diffrax) compare in both passes. Values that such a forward pass would
    keep have other types, too, so the backward pass starts from the operands and runs it again.
    """

    def run(operands: Any) -> Any:
        jaxpr, out = jax.make_jaxpr(call, return_shape=True)(operands)
        again = jax.extend.core.jaxpr_as_fun(jaxpr)  # and not `call`, which would be traced twice
        passed = jax.custom_vjp(again)

        def backward(operands: Any, cotangents: Any) -> Any:
            with context():
                return jax.vjp(again, *operands)[1](cotangents)

        passed.defvjp(lambda *operands: (again(*operands), operands), backward)
        is_held = any(e.primitive.name == "custom_vjp_call" and is_made_by(e, "equinox") for e in equations(jaxpr))
        return jax.tree.unflatten(jax.tree.structure(out), (passed if is_held else again)(*operands))

    return run


_CUSTOM_CALLS = {"custom_jvp_call", "custom_vjp_call"}  # with derivatives of the user's own
_PLAIN_CALLS = CALLS - _CUSTOM_CALLS


def _not_differentiable(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands of a custom call whose body replaces it; raises a `ValueError` where a derivative is taken.

    The body's own derivative is not the user's, and the user's has collectives that nothing has rewritten.
    """

    @jax.custom_jvp
    def same(values: Sequence[Any]) -> Sequence[Any]:
        return values

    @same.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        name = eqn.primitive.name.removesuffix("_call")
        raise ValueError(
            f"jdp.parallel_apply: a jax.{name} of the model has a collective over the replicas or their index in it, "
            f"and its gradient is taken from outside of the replicas; with several replicas on a device, or unequal "
            f"chunks, jdp runs another body in its place. Use dp.value_and_grad or dp.train_step, or as many devices "
            f"as replicas and a batch that divides by them."
        )

    return same(values) if values else values  # type: ignore[no-any-return]


def with_pairs_cut(
    jaxpr: Any, have_rows: Sequence[bool], rows: int, constrained: Callable[[Any, int | None], Any]
) -> Any:
    """Returns the closed jaxpr with each product of all pairs of rows cut along the first of its two axes of rows.

    `have_rows` marks the inputs that have `rows` rows. `constrained(x, axis)` cuts an array along an axis over the
    devices, or replicates it (None). If rows are concatenated before such a product, and the result is no larger than
    each of the product's operands, they are replicated before and after the concatenation, and so are their labels.
    Otherwise XLA would exchange these rows first, and gather them later. The product's first operand is cut, so that
    each device takes its part of the rows from its own copy.
    """
    # By the equation's id: the axis to cut in the first operand, and the one in the result.
    products: dict[int, tuple[int, int]] = {}
    whole: set[int] = set()  # the ids of the equations that concatenate rows for a product
    lists: set[int] = set()  # the ids of those that concatenate one number per row, such as labels

    def follow(jaxpr: Any, inputs: Sequence[_Joined]) -> list[_Joined]:
        jaxpr = opened(jaxpr)
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def of(variables: Sequence[Any]) -> list[_Joined]:
            return [None if is_literal(v) else known.get(v) for v in variables]

        for eqn in jaxpr.eqns:
            values = of(eqn.invars)
            came = [x for x in values if x is not None]
            made = {eqn_id: size for x in came for eqn_id, size in x.items()} if came else None
            if _joins_rows(eqn, rows):
                if eqn.outvars[0].aval.ndim == 1:
                    lists.add(id(eqn))
                made = made if made is None else {**made, id(eqn): eqn.outvars[0].aval.size}
            if len(came) == 2 and (axes := _axes_of_pairs(eqn, rows)) is not None:
                products[id(eqn)] = axes
                least = min(v.aval.size for v in eqn.invars)
                whole.update(eqn_id for x in came for eqn_id, size in x.items() if size <= least)
            sizes = [len(opened(body).invars) for body in inside(eqn)]
            is_call = eqn.primitive.name in _PLAIN_CALLS and sizes == [len(values)]
            found = follow(next(inside(eqn)), values) if is_call else [made] * len(eqn.outvars)
            known.update(zip(eqn.outvars, found, strict=True))
        return of(jaxpr.outvars)

    follow(jaxpr, [{} if has_rows else None for has_rows in have_rows])
    whole |= lists if products else set()
    return rewrite(jaxpr, functools.partial(_rule_to_cut, whole, products, constrained))


def _rule_to_cut(
    whole: set[int], products: dict[int, tuple[int, int]], constrained: Callable[[Any, int | None], Any], eqn: Any
) -> Callable[..., Any] | None:
    """Returns the function that replaces an equation by itself with constraints on how it is cut; None: it stays."""

    def all_whole(values: Sequence[Any]) -> list[Any]:
        return [constrained(x, None) for x in values]

    if id(eqn) in whole:
        return lambda *values: all_whole(bind(eqn, all_whole(values)))
    if id(eqn) not in products:
        return None
    of_first, of_product = products[id(eqn)]
    return lambda x, y: [constrained(z, of_product) for z in bind(eqn, [constrained(x, of_first), y])]


_Joined = dict[int, int] | None
"""For a value made of rows, the concatenations of rows that it comes from: the size of each result, by equation id."""


def _joins_rows(eqn: Any, rows: int) -> bool:
    if eqn.primitive.name != "concatenate":
        return False
    axis = parameter(eqn, "dimension")
    return all(v.aval.shape[axis] % rows == 0 for v in eqn.invars)


def _axes_of_pairs(eqn: Any, rows: int) -> tuple[int, int] | None:
    """Returns where a product of all rows with all rows has its first axis of rows; None if it is no such product.

    The first number is the axis in the first operand, the second the axis in the product.
    """
    if eqn.primitive.name != "dot_general":
        return None
    contracted, batch = parameter(eqn, "dimension_numbers")
    if any(batch):
        return None
    first, second = (
        [i for i in range(v.aval.ndim) if i not in summed] for v, summed in zip(eqn.invars, contracted, strict=True)
    )
    x, y = (v.aval.shape for v in eqn.invars)
    with_rows = [(i, at) for at, i in enumerate(first) if x[i] % rows == 0]
    return with_rows[0] if with_rows and any(y[i] % rows == 0 for i in second) else None


_OF_ALL = {"psum", "pmax", "pmin"}


def over_more(jaxpr: Any, axis_name: str, inner: str, size: int, refuse: Callable[[str], Exception]) -> Any:
    """Returns the closed jaxpr with its collectives over the axis extended to `inner`, an axis of `size` members.

    Each device then stands for `size` members of the axis. Raises `refuse(its name)` for a collective that cannot be
    extended.
    """

    def rule(eqn: Any) -> Callable[..., Any] | None:
        if eqn.primitive.name in _CUSTOM_CALLS:
            new = rewrite(body := next(inside(eqn)), rule)
            run = jax.extend.core.jaxpr_as_fun(new)
            return None if new is body else lambda *values: run(*_not_differentiable(eqn, values))
        if axis_name not in axes(eqn):
            return None
        name = eqn.primitive.name
        if name == "axis_index":
            return lambda: jax.lax.axis_index(axis_name) * size + jax.lax.axis_index(inner)
        if name not in _OF_ALL or eqn.params.get("axis_index_groups") is not None:
            raise refuse(name if name not in _OF_ALL else f"{name} within groups")
        wider = eqn.replace(params={**eqn.params, "axes": (*axes(eqn), inner)})
        return lambda *values: bind(wider, values)

    return rewrite(jaxpr, rule)


def inlined(jaxpr: Any, wanted: Callable[[Any], bool], refuse: Callable[[Any], Exception], unroll: bool = False) -> Any:
    """Returns the closed jaxpr with the wanted equations at its top level, where calls around them are inlined.

    Raises `refuse(eqn)` for a loop or branch around one. With `unroll`, a scan around one is replaced by its
    iterations.
    """

    def inline(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        env = env_of(jaxpr, operands)
        for eqn in opened(jaxpr).eqns:
            bodies = [*inside(eqn)]
            if not any(wanted(e) for body in bodies for e in equations(body)):
                evaluate_eqn(eqn, env)
            elif eqn.primitive.name in CALLS:
                values: Sequence[Any] = [read(env, v) for v in eqn.invars]
                values = _not_differentiable(eqn, values) if eqn.primitive.name in _CUSTOM_CALLS else values
                env.update(zip(eqn.outvars, inline(bodies[0], values), strict=True))
            elif unroll and eqn.primitive.name == "scan" and parameter(eqn, "length"):
                env.update(zip(eqn.outvars, iterations(eqn, [read(env, v) for v in eqn.invars]), strict=True))
            else:
                raise refuse(eqn)
        return [read(env, v) for v in opened(jaxpr).outvars]

    def iterations(eqn: Any, operands: Sequence[Any]) -> list[Any]:
        consts, carry, xs = parts_of_scan(eqn, operands)
        numbers, ys = range(parameter(eqn, "length")), {}
        for i in reversed(numbers) if parameter(eqn, "reverse") else numbers:
            out = inline(parameter(eqn, "jaxpr"), [*consts, *carry, *(x[i] for x in xs)])
            carry, ys[i] = out[: len(carry)], out[len(carry) :]
        return [*carry, *(jnp.stack(y) for y in zip(*(ys[i] for i in numbers), strict=True))]

    return jax.make_jaxpr(lambda *operands: inline(jaxpr, operands))(*[v.aval for v in jaxpr.jaxpr.invars])


def _asks(eqn: Any, axis_name: str) -> bool:
    """Returns True if an equation is an `axis_index` of the axis."""
    return eqn.primitive.name == "axis_index" and axis_name in axes(eqn)


def asks_inside_of(jaxpr: Any, axis_name: str) -> str | None:
    """Returns the name of a loop or a branch with an `axis_index` of the axis in it; None if there is none."""
    for eqn in opened(jaxpr).eqns:
        bodies = [*inside(eqn)]
        if not any(_asks(e, axis_name) for body in bodies for e in equations(body)):
            continue
        name: str = eqn.primitive.name
        found = asks_inside_of(bodies[0], axis_name) if name in CALLS else name
        if found is not None:
            return found
    return None


def with_index(jaxpr: Any, axis_name: str, index: Any) -> Any:
    """Returns the closed jaxpr with `index` in place of `axis_index`, which must not be inside of a loop or branch."""
    if not any(_asks(eqn, axis_name) for eqn in equations(jaxpr)):
        return jaxpr
    flat = inlined(jaxpr, lambda eqn: _asks(eqn, axis_name), lambda eqn: ValueError(eqn.primitive.name))

    def run(*operands: Any) -> list[Any]:
        env = env_of(flat, operands)
        for eqn in flat.jaxpr.eqns:
            if _asks(eqn, axis_name):
                env[eqn.outvars[0]] = index
            else:
                evaluate_eqn(eqn, env)
        return [read(env, v) for v in flat.jaxpr.outvars]

    return jax.make_jaxpr(run)(*[v.aval for v in flat.jaxpr.invars])
