"""Replicas with chunks of different sizes that communicate: a `switch` between any two collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._model.sync_batch_norm import is_synced
from .inputs import is_key
from .layout import Layout

# Calls whose body may be put in their place.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


def _communicates(x: Any) -> bool:
    """Whether an equation, a jaxpr or what is among an equation's parameters has a collective in it."""
    if isinstance(x, tuple | list):
        return any(map(_communicates, x))
    if hasattr(x, "primitive"):
        return is_synced(x) or any(map(_communicates, x.params.values()))
    return hasattr(x, "eqns") and any(map(_communicates, x.eqns))


def inlined(jaxpr: Any, layout: Layout) -> Any:
    """The closed jaxpr, with its collectives at the top.

    Raises:
        ValueError: one stands in a loop or a branch.
    """

    def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip([*getattr(jaxpr, "constvars", ()), *jaxpr.invars], [*consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            values = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
            inner = [p for p in eqn.params.values() if hasattr(p, "eqns")]
            if not inner or not _communicates(eqn):
                out = _results(eqn, values)
            elif eqn.primitive.name in _CALLS:
                out = evaluate(getattr(inner[0], "jaxpr", inner[0]), getattr(inner[0], "consts", ()), values)
            else:
                raise ValueError(
                    f"jdp.sync_batch_norm: a BatchNorm runs in a {eqn.primitive.name}, the chunks are {layout.rows}; "
                    f"unequal replicas meet at each BatchNorm, which a loop hides. Pass a batch that divides by "
                    f"{len(layout.devices)}, or leave the loop out (of the model; accumulate_steps=1)."
                )
            env.update(zip(eqn.outvars, out, strict=True))
        return [v.val if hasattr(v, "val") else env[v] for v in jaxpr.outvars]

    avals = [v.aval for v in jaxpr.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate(jaxpr.jaxpr, jaxpr.consts, args))(*avals)


def _results(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """What an equation makes of these values."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


class Segmented(NamedTuple):
    """A jaxpr cut at its collectives: `segments[j]` comes before `collectives[j]`, the last after them all."""

    jaxpr: Any
    segments: list[list[Any]]
    collectives: list[Any]

    def keeps(self, j: int) -> list[Any]:
        """The variables that segment j makes and a later segment reads."""
        later = [v for eqns in self.segments[j + 1 :] for eqn in eqns for v in eqn.invars] + list(
            self.jaxpr.jaxpr.outvars
        )
        wanted = {v for v in later if not hasattr(v, "val")}
        return [v for eqn in self.segments[j] for v in eqn.outvars if v in wanted]


def segmented(jaxpr: Any) -> Segmented:
    segments: list[list[Any]] = [[]]
    collectives = []
    for eqn in jaxpr.jaxpr.eqns:
        if is_synced(eqn):
            collectives.append(eqn)
            segments.append([])
        else:
            segments[-1].append(eqn)
    return Segmented(jaxpr, segments, collectives)


def run_segments(
    jaxprs: Sequence[Any],
    which: Any,
    operands: Sequence[Any],
    finish: Callable[[Sequence[Any]], list[Any]],
    idle: list[Any],
    layout: Layout,
) -> list[Any]:
    """`lax.switch(which, jaxprs, *operands)`, but for the collectives, which run between the switches.

    An index beyond the jaxprs is an idle replica: it gives zeros to the collectives, and `idle` in the end.
    `finish` pads the outputs to one shape.
    """
    parts = [segmented(inlined(jaxpr, layout)) for jaxpr in jaxprs]
    bags: list[list[Any]] = []
    results: list[list[Any]] = []
    count = len(parts[0].collectives)
    if any(len(part.collectives) != count for part in parts):
        raise ValueError(
            f"jdp.sync_batch_norm: chunks are {layout.rows}, the number of BatchNorms depends on the rows; replicas "
            f"meet at each. Leave that out of the model, or pass a batch that divides by {len(layout.devices)}."
        )
    for j in range(count + 1):
        runs = [functools.partial(_segment, part, j, _lengths(parts, j)) for part in parts]
        shapes = jax.eval_shape(functools.partial(runs[0], finish), operands, bags, results)
        rest = idle if j == count else [jnp.zeros(x.shape, x.dtype) for x in shapes[0]]
        nothing = (rest, [jnp.zeros(x.shape, x.dtype) for x in shapes[1]])
        branches = [functools.partial(run, finish) for run in runs] + [lambda *_, nothing=nothing: nothing]
        sent, bag = jax.lax.switch(which, branches, operands, bags, results)
        if j == count:
            return sent
        eqn = parts[0].collectives[j]
        results.append(_results(eqn, sent))
        bags.append(bag)
    raise AssertionError


def _segment(
    part: Segmented,
    j: int,
    lengths: dict[str, int],
    finish: Callable[[Sequence[Any]], list[Any]],
    operands: Sequence[Any],
    bags: Sequence[Sequence[Any]],
    results: Sequence[Sequence[Any]],
) -> tuple[list[Any], list[Any]]:
    """One branch of one switch: what goes to the collective (the outputs, after the last), and what is kept."""
    inner = part.jaxpr.jaxpr
    env = dict(zip([*getattr(inner, "constvars", ()), *inner.invars], [*part.jaxpr.consts, *operands], strict=False))
    for i, bag in enumerate(bags):
        env.update(_unpacked(part.keeps(i), bag))
        env.update(zip(part.collectives[i].outvars, results[i], strict=True))

    def read(v: Any) -> Any:
        return v.val if hasattr(v, "val") else env[v]

    for eqn in part.segments[j]:
        env.update(zip(eqn.outvars, _results(eqn, [read(v) for v in eqn.invars]), strict=True))
    if j == len(part.collectives):
        return finish([read(v) for v in inner.outvars]), []
    return [jnp.asarray(read(v)) for v in part.collectives[j].invars], _packed([env[v] for v in part.keeps(j)], lengths)


# What is kept has other shapes in other branches, and a switch wants one: so it goes as one vector for each dtype,
# padded to the longest.


def _lengths(parts: Sequence[Segmented], j: int) -> dict[str, int]:
    """The longest vector of each dtype that a branch keeps."""
    lengths: dict[str, int] = {}
    for part in parts:
        mine: dict[str, int] = {}
        for v in part.keeps(j):
            data = jax.eval_shape(_plain, v.aval)
            mine[str(data.dtype)] = mine.get(str(data.dtype), 0) + data.size
        lengths |= {dtype: max(size, lengths.get(dtype, 0)) for dtype, size in mine.items()}
    return dict(sorted(lengths.items()))


def _plain(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x


def _packed(values: Sequence[Any], lengths: dict[str, int]) -> list[Any]:
    bag = []
    data = [_plain(x) for x in values]
    for dtype, length in lengths.items():
        flat = [x.ravel() for x in data if str(x.dtype) == dtype]
        missing = length - sum(x.size for x in flat)
        bag.append(jnp.concatenate([*flat, jnp.zeros(missing, dtype)]) if flat or missing else jnp.zeros(0, dtype))
    return bag


def _unpacked(variables: Sequence[Any], bag: Sequence[Any]) -> dict[Any, Any]:
    vectors, start = {str(x.dtype): x for x in bag}, dict.fromkeys([str(x.dtype) for x in bag], 0)
    found = {}
    for v in variables:
        data = jax.eval_shape(_plain, v.aval)
        dtype = str(data.dtype)
        x = jax.lax.slice_in_dim(vectors[dtype], start[dtype], start[dtype] + data.size).reshape(data.shape)
        found[v] = jax.random.wrap_key_data(x, impl=jax.random.key_impl(v.aval)) if is_key(v.aval) else x
        start[dtype] += data.size
    return found
