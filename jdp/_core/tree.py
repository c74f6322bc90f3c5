"""One balanced tree of sums over all replicas: the same bits on any number of devices.

Each replica runs alone, by one and the same program for one device. Its sums are added to its neighbour's, the two to
the two beside them, and so on: first on a device, then between devices. Where a device ends changes nothing then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from .._jax.jaxprs import Hidden, with_index
from .layout import Layout, Tree, is_key
from .outputs import Marked, Outputs, divided
from .parallel_apply import CallOf, body_of
from .scattered import Scattered, flatten_call
from .turns import weighted
from .uneven import collectives, run_body, trace_bodies


class Parts(NamedTuple):
    """What one replica gives, or several together."""

    sums: list[Any]
    """One vector for each dtype, with all that is added; their lengths are multiples of the number of replicas."""
    taken: list[Any]
    """What is the primary replica's, after an axis of one entry."""
    same: list[Any]
    """What is equal on all replicas."""
    rows: list[Any]
    """What is gathered."""


def one_replica(call_of: CallOf, label: str) -> Callable[..., tuple[Parts, Outputs]]:
    """`run(replicas, inputs, kwargs, index)`: the parts of the replica with this index, and what they are parts of.

    The layouts have all replicas on one device; the inputs are the chunk of this one, padded as all are.
    """
    body = body_of(call_of, label)

    def run(replicas: Tree, inputs: Scattered, kwargs: Scattered | None, index: Any) -> tuple[Parts, Outputs]:
        operands, signature = flatten_call(replicas, inputs, kwargs)
        operands = list(signature.fold_keys(operands, index))
        bodies = trace_bodies(functools.partial(body, signature), operands, signature)
        for name in collectives(next(iter(bodies.values())).jaxpr.jaxpr, signature.axis_name):
            raise ValueError(
                f"jdp.train_step: deterministic is True, and the loss runs a collective ({name} over "
                f"{signature.axis_name!r}); replicas run one by one then, and none would answer. Leave the collective "
                f"out, or deterministic."
            )
        try:
            place = signature.axis_name, index, len(signature.layout.devices)
            found = {sizes: one._replace(jaxpr=with_index(one.jaxpr, *place)) for sizes, one in bodies.items()}
        except Hidden as hidden:
            raise ValueError(
                f"jdp.train_step: deterministic is True, and the loss asks for the replica's index in a {hidden}; "
                f"replicas run one by one then, and loops and branches do not know it. Ask before the {hidden}."
            ) from None
        out = weighted(run_body(found, operands, signature, index), index)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out.values]
        return _apart(out), dataclasses.replace(out, values=shapes)

    return run


Kind = Literal["sum", "taken", "same", "rows"]


def _kinds(out: Outputs) -> list[Kind]:
    def kind(x: Any, rule: Marked) -> Kind:
        if rule.axis is not None:
            return "rows"
        if rule.reduce == "sum" or out.is_mean(x, rule):
            return "sum"
        return "same" if rule.reduce == "same" else "taken"

    return [kind(x, rule) for x, rule in zip(out.values, out.rules, strict=True)]


def _apart(out: Outputs) -> Parts:
    parts = Parts([], [], [], [])
    added = []
    for x, kind, rule in zip(out.values, _kinds(out), out.rules, strict=True):
        if kind == "sum":
            added.append(_to_send(x, rule, out.layout))
        elif kind == "taken":
            parts.taken.append(x[None])
        elif kind == "same":
            parts.same.append(x)
        else:
            parts.rows.append(x if x.ndim else x[None])
    for dtype in dict.fromkeys(x.dtype for x in added):
        flat = jnp.concatenate([x.reshape(-1) for x in added if x.dtype == dtype])
        parts.sums.append(jnp.pad(flat, (0, -flat.size % len(out.layout.devices))))
    return parts


def _divisor(rule: Marked, layout: Layout) -> float | None:
    """What a sum is divided by before it travels: in a narrow type it may leave the range of its mean."""
    if rule.reduce != "sum" or rule.wire is None:
        return None
    return rule.over if isinstance(rule.over, float) else float(max(1, sum(layout.sizes)))


def _to_send(x: Any, rule: Marked, layout: Layout) -> Any:
    by = _divisor(rule, layout)
    return x if by is None else divided(_wide(x, x.dtype), by).astype(rule.wire)


def _wide(x: Any, dtype: Any) -> Any:
    return x.astype(jnp.promote_types(dtype, jnp.float32))


def put_together(parts: Parts, out: Outputs) -> list[Any]:
    """The value of each output, of the parts of all replicas together; None for what is gathered."""
    kinds, taken, same = _kinds(out), iter(parts.taken), iter(parts.same)
    start = [0] * len(parts.sums)
    at = {x.dtype: i for i, x in enumerate(parts.sums)}
    totals: list[Any] = []
    for x, kind, rule in zip(out.values, kinds, out.rules, strict=True):
        if kind != "sum":
            totals.append(None)
            continue
        i = at[x.dtype if _divisor(rule, out.layout) is None else jnp.dtype(rule.wire)]
        totals.append(jax.lax.slice_in_dim(parts.sums[i], start[i], start[i] + x.size).reshape(x.shape))
        start[i] += x.size
    values = []
    for x, kind, rule, total in zip(out.values, kinds, out.rules, totals, strict=True):
        if kind == "sum":
            values.append(_finished(total, x.dtype, rule, _divisor(rule, out.layout), totals))
        else:
            values.append(next(taken)[0] if kind == "taken" else next(same) if kind == "same" else None)
    return values


def _finished(total: Any, dtype: Any, rule: Marked, before: float | None, totals: list[Any]) -> Any:
    """What a sum comes to: divided, in its own dtype."""
    over = totals[rule.over] if isinstance(rule.over, int) else rule.over
    if before is not None:
        total = _wide(total, dtype)
        total, over = (total, None) if before is rule.over else (total * before, over)
    total = divided(total, over)
    return total if rule.dtype is None else total.astype(rule.dtype)


def numbers_of_rows(out: Outputs) -> list[int]:
    """The numbers of the outputs that are gathered."""
    return [i for i, kind in enumerate(_kinds(out)) if kind == "rows"]


@jax.jit(donate_argnums=0)
def _add(first: list[Any], second: list[Any]) -> list[Any]:
    return [x + y for x, y in zip(first, second, strict=True)]


class Counter:
    """The sums of replicas that come one after the other, added as one adds to a binary number."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Any]]] = []  # with the number of replicas in each

    def add(self, sums: list[Any]) -> None:
        count = 1
        while self._waiting and self._waiting[-1][0] == count:
            sums = _add(self._waiting.pop()[1], sums)
            count *= 2
        self._waiting.append((count, sums))

    @property
    def total(self) -> list[Any]:
        """The sum of all, whose number is a power of two."""
        ((_, sums),) = self._waiting
        return sums


def exchange(mesh: Mesh, primary: int) -> Any:
    """The program that adds the devices' sums, and gives all what is the primary's; `primary` is its device's index."""
    (axis_name,) = mesh.axis_names

    def local(sums: list[Any], taken: list[Any]) -> tuple[list[Any], list[Any]]:
        index = jax.lax.axis_index(axis_name)
        return [_butterfly(x, axis_name, mesh.size) for x in sums], [_from(primary, x, index, axis_name) for x in taken]

    specs = PartitionSpec(axis_name), PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

    def exchange(sums: list[Any], taken: list[Any]) -> Any:
        return mapped(sums, taken)

    return jax.jit(exchange)


def _butterfly(x: Any, axis_name: str, n: int) -> Any:
    """The sum of a vector over n devices, by recursive halving and doubling: neighbours first.

    The bytes are those of a reduce-scatter and an all-gather, and in which order messages come changes nothing.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
    """
    index, steps = jax.lax.axis_index(axis_name), range(n.bit_length() - 1)

    def swapped(x: Any, step: int) -> Any:
        return jax.lax.ppermute(x, axis_name, [(i, i ^ (1 << step)) for i in range(n)])

    for step in steps:  # each keeps the half that this digit of its index says, and sends the other
        digit = (index >> step) & 1
        halves = x.reshape(2, -1)
        mine, other = (jax.lax.dynamic_index_in_dim(halves, i, keepdims=False) for i in (digit, 1 - digit))
        x = mine + swapped(other, step)
    for step in reversed(steps):
        first = (index >> step) & 1 == 0
        theirs = swapped(x, step)
        x = jnp.concatenate([jnp.where(first, x, theirs), jnp.where(first, theirs, x)])
    return x


def _from(primary: int, x: Any, index: Any, axis_name: str) -> Any:
    """One device's value on all, to the bit: as integers, of which a sum with zeros is exact."""
    if is_key(x):
        data = _from(primary, jax.random.key_data(x), index, axis_name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(*(_from(primary, part, index, axis_name) for part in (x.real, x.imag)))
    if x.dtype == jnp.bool_:
        return _from(primary, x.astype(jnp.uint8), index, axis_name).astype(jnp.bool_)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    found = jax.lax.psum(jnp.where(index == primary, bits, jnp.zeros_like(bits)), axis_name)
    return jax.lax.bitcast_convert_type(found, x.dtype)


def picked(arrays: Sequence[Any], layout: Layout, number: Any) -> list[Any]:
    """Of what lies on a device the chunks of one of its replicas; what is whole stays so."""
    found = []
    for x, leaf in zip(arrays, layout.arrays, strict=True):
        if leaf.axis is not None:
            size = x.shape[leaf.axis] // layout.per_device
            x = jax.lax.dynamic_slice_in_dim(x, number * size, size, leaf.axis)
        found.append(x)
    return found
