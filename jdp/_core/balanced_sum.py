"""Adds over all replicas in one balanced tree: the sums have the same bits on any number of devices.

Each replica runs alone, and all run the same program, which is compiled for one device. The sums of two neighbours are
added, then those of two pairs, and so on: first on each device, then between devices. The order of additions does not
depend on where one device ends and the next begins. If the loss itself sums over the replicas (`sync_batch_norm`), its
program is split at that sum: one part runs before it, one after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from .._jax.jaxprs import axes, env_of, evaluate_eqn, is_sum_over, read
from .._jax.rewrites import asks_inside_of, inlined, with_index
from .._jax.segments import Segmented, recomputed, segmented
from .layout import Layout, Tree, is_key
from .outputs import Marked, Outputs, divided
from .parallel_apply import CallOf, body_of
from .replica_mesh import ReplicaMesh
from .scattered import Scattered, flatten_call
from .turns import weighted
from .uneven import run_body, trace_bodies


class Parts(NamedTuple):
    """The results of one replica, or of several combined, grouped by how the replicas' values become one."""

    sums: list[Any]
    """All results that are added, packed into one vector per dtype; lengths are multiples of the number of replicas."""
    of_primary: list[Any]
    """Results of which the primary replica's is kept; each has a leading axis of size 1."""
    same: list[Any]
    """Results that are equal on all replicas."""
    rows: list[Any]
    """Results that are gathered."""


def one_replica(call_of: CallOf, label: str) -> Callable[..., tuple[Parts, Outputs]]:
    """Returns `run(replicas, inputs, kwargs, index) -> (parts, outputs)` for one replica; `outputs` has shapes alone.

    Each layout describes all replicas as if they were on one device. `inputs` is the chunk of this
    replica, padded like all chunks.
    """
    body = body_of(call_of, label)

    def run(replicas: Tree, inputs: Scattered, kwargs: Scattered | None, index: Any) -> tuple[Parts, Outputs]:
        operands, signature = flatten_call(replicas, inputs, kwargs, "train_step")
        operands = list(signature.fold_keys(operands, index))
        bodies = trace_bodies(functools.partial(body, signature), operands, signature)
        place = signature.axis_name, index
        for one in bodies.values():
            hidden = asks_inside_of(one.jaxpr, signature.axis_name)
            if hidden is not None:
                raise ValueError(
                    f"jdp.train_step: deterministic is True, and the loss asks for the replica's index in a {hidden}; "
                    f"replicas run one by one then, and their index is known only outside of loops and branches. Call "
                    f"jax.lax.axis_index before the {hidden}."
                )
        found = {sizes: one._replace(jaxpr=with_index(one.jaxpr, *place)) for sizes, one in bodies.items()}
        out = weighted(run_body(found, operands, signature, index), index)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out.values]
        return _as_parts(out), dataclasses.replace(out, values=shapes)

    return run


class Segment(NamedTuple):
    """A program for one device: what a replica runs between two sums over all replicas.

    A replica holds some values between two segments. A segment reads some of them, and makes others.
    """

    program: Any
    """`(totals, values) -> (sums, made)`: takes the last sum over all replicas, returns its part of the next."""
    operands: tuple[list[Any], list[Any]]
    """The shapes of these totals and values."""
    reads: list[int]
    """The indices of the values that it reads, among those that the replica holds."""
    after: list[int]
    """The values that the replica holds afterwards: their indices in the list of those it held, then those made."""

    def run(self, program: Any, totals: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns a replica's part of the next sum, and the values that it holds then (at the end: its results).

        `program` is this segment's program, compiled for one device; `values` are those that the replica holds.
        """
        sums, made = program(totals, [values[i] for i in self.reads])
        both = [*values, *made]
        return sums, [both[i] for i in self.after]


def segments(
    turn: Callable[..., Parts], operands: Sequence[Any], layout: Layout, label: str
) -> tuple[list[Segment], Parts]:
    """Splits a replica's program, `turn(*operands)`, at its sums over all replicas.

    Returns the segments, and the shapes of the results.

    The first segment begins with the operands. Values that a later segment reads are held between two segments.
    """
    axis_name, n = layout.mesh.axis_name, len(layout.devices)
    found: list[tuple[Segmented, Parts]] = []

    def of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
        # Under a mesh of one device the axis has its name, and a wrapper that the function calls runs its model
        # directly.
        mesh, whole = AbstractMesh((1,), (axis_name,)), PartitionSpec()
        return jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)

    def look(*operands: Any) -> tuple[()]:
        jaxpr, parts = jax.make_jaxpr(turn, return_shape=True)(*operands)
        found.append((_cut_where_replicas_meet(jaxpr, axis_name), parts))
        return ()

    jax.eval_shape(of_one(look), *operands)
    ((code, parts),) = found
    have: list[Any] = [*code.jaxpr.jaxpr.invars]
    result = []
    for j in range(len(code.segments)):
        needed, later, met = set(code.reads[j]), code.later[j], code.cuts[j - 1].outvars if j else []
        reads = [i for i, v in enumerate(have) if v in needed]
        mine, made = [have[i] for i in reads], [*(v for v in met if v in later), *code.keeps(j)]
        program = _segment_program(code, j, mine, made, parts, n)
        program.__name__ = program.__qualname__ = f"{label}_{j}" if j else label
        shapes = jax.eval_shape(functools.partial(packed, n=n), _shapes_of(met)), _shapes_of(mine)
        if j < len(code.cuts):
            after = [i for i, v in enumerate([*have, *made]) if v in later]
        else:  # the last segment makes the parts
            after = [len(have) + i for i in range(len(jax.tree.leaves(parts)) - len(parts.sums))]
        result.append(Segment(jax.jit(of_one(program)), shapes, reads, after))
        have = [v for v in [*have, *made] if v in later]
    return result, parts


def _cut_where_replicas_meet(jaxpr: Any, axis_name: str) -> Segmented:
    """Returns the jaxpr, cut at its sums over all replicas; raises a `ValueError` for any other collective."""

    def meets(eqn: Any) -> bool:
        return axis_name in axes(eqn)

    def refuse(eqn: Any) -> ValueError:
        what = eqn.primitive.name
        return ValueError(
            f"jdp.train_step: deterministic is True, and replicas meet in a {what}, which has a sum over {axis_name!r} "
            f"or a BatchNorm with sync_batch_norm in it; replicas run one by one, from one such sum to the next, and "
            f"cannot stop inside of a {what}. Leave the {what} out of the loss, or leave deterministic out."
        )

    code = recomputed(segmented(inlined(jaxpr, meets, refuse, unroll=True), meets))
    for eqn in code.cuts:
        if not is_sum_over(eqn, axis_name):
            raise ValueError(
                f"jdp.train_step: deterministic is True, and the loss runs a collective ({eqn.primitive.name} over "
                f"{axis_name!r}) that is no sum over all replicas; they run one by one then, and exchange only such "
                f"sums. Use jax.lax.psum or pmean over {axis_name!r} alone, or leave deterministic out."
            )
    return code


def _segment_program(
    code: Segmented, j: int, mine: list[Any], made: list[Any], parts: Parts, n: int
) -> Callable[..., Any]:
    def run(totals: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        env = env_of(code.jaxpr, [None] * len(code.jaxpr.jaxpr.invars)) | dict(zip(mine, values, strict=True))
        if j:
            met = code.cuts[j - 1].outvars
            env.update(zip(met, unpacked(totals, _shapes_of(met)), strict=True))
        for eqn in code.segments[j]:
            evaluate_eqn(eqn, env)
        last = j == len(code.cuts)
        out = [jnp.asarray(read(env, v)) for v in (code.jaxpr.jaxpr.outvars if last else code.cuts[j].invars)]
        if last:
            return out[: len(parts.sums)], out[len(parts.sums) :]
        return packed(out, n), [env[v] for v in made]

    return run


def _shapes_of(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [shape_of(v.aval) for v in variables]


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def packed(values: Sequence[Any], n: int) -> list[Any]:
    """Returns one vector for each dtype, with a length that is a multiple of n."""
    vectors = []
    for dtype in dict.fromkeys(x.dtype for x in values):
        flat = jnp.concatenate([x.reshape(-1) for x in values if x.dtype == dtype])
        vectors.append(jnp.pad(flat, (0, -flat.size % n)))
    return vectors


def unpacked(vectors: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Returns the arrays of these shapes that were packed."""
    start, values = {x.dtype: 0 for x in vectors}, []
    for x in shapes:
        vector = next(v for v in vectors if v.dtype == x.dtype)
        values.append(jax.lax.slice_in_dim(vector, start[x.dtype], start[x.dtype] + x.size).reshape(x.shape))
        start[x.dtype] += x.size
    return values


def _as_parts(out: Outputs) -> Parts:
    parts = Parts([], [], [], [])
    added = []
    for x, way, rule in zip(out.values, out.ways, out.rules, strict=True):
        if way == "sum":
            added.append(_to_send(x, rule, out.layout))
        elif way == "primary":
            parts.of_primary.append(x[None])
        elif way == "same":
            parts.same.append(x)
        else:
            parts.rows.append(x if x.ndim else x[None])
    return parts._replace(sums=packed(added, len(out.layout.devices)))


def _divisor(rule: Marked, layout: Layout) -> float | None:
    """Returns what a sum is divided by before it is sent in a narrow dtype, where it might overflow; else None."""
    if rule.reduce != "sum" or rule.wire is None:
        return None
    return rule.over if isinstance(rule.over, float) else float(max(1, sum(layout.sizes)))


def _to_send(x: Any, rule: Marked, layout: Layout) -> Any:
    by = _divisor(rule, layout)
    return x if by is None else divided(_widened(x, x.dtype), by).astype(rule.wire)


def _widened(x: Any, dtype: Any) -> Any:
    return x.astype(jnp.promote_types(dtype, jnp.float32))


def put_together(parts: Parts, out: Outputs) -> list[Any]:
    """Returns the value of each output, given the combined parts of all replicas; None for a gathered output."""
    ways, of_primary, same = out.ways, iter(parts.of_primary), iter(parts.same)
    each = [*zip(out.values, ways, out.rules, strict=True)]
    sums = iter(unpacked(parts.sums, [_sent(x, rule, out.layout) for x, way, rule in each if way == "sum"]))
    totals = [next(sums) if way == "sum" else None for way in ways]
    values = []
    for (x, way, rule), total in zip(each, totals, strict=True):
        if way == "sum":
            values.append(_finished(total, x.dtype, rule, _divisor(rule, out.layout), totals))
        else:
            values.append(next(of_primary)[0] if way == "primary" else next(same) if way == "same" else None)
    return values


def _sent(x: Any, rule: Marked, layout: Layout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype if _divisor(rule, layout) is None else rule.wire)


def _finished(total: Any, dtype: Any, rule: Marked, before: float | None, totals: list[Any]) -> Any:
    """Returns the final value of a sum: divided as its rule says, in its dtype."""
    over = totals[rule.over] if isinstance(rule.over, int) else rule.over
    if before is not None:
        total = _widened(total, dtype)
        # A constant divisor was applied before the sum. Other sums were divided by the rows, which is undone here.
        total, over = (total, None) if isinstance(rule.over, float) else (total * before, over)
    total = divided(total, over)
    return total if rule.dtype is None else total.astype(rule.dtype)


def numbers_of_rows(out: Outputs) -> list[int]:
    """Returns the indices of the outputs that are gathered."""
    return [i for i, way in enumerate(out.ways) if way == "rows"]


@jax.jit(donate_argnums=0)
def _add_lists(first: list[Any], second: list[Any]) -> list[Any]:
    return [x + y for x, y in zip(first, second, strict=True)]


def add_replica(waiting: list[tuple[int, list[Any]]], sums: list[Any]) -> None:
    """Adds a replica's sums to those that came before, as one adds 1 to a binary number.

    `waiting` holds partial sums, each with the number of replicas in it. In the end one is left, if the number of all
    replicas is a power of two.
    """
    count = 1
    while waiting and waiting[-1][0] == count:
        sums = _add_lists(waiting.pop()[1], sums)
        count *= 2
    waiting.append((count, sums))


def exchange(mesh: ReplicaMesh, primary: int) -> Any:
    """Returns the program that adds the devices' sums, and copies the values of device `primary` to all devices."""
    axis_name = mesh.axis_name

    def local(sums: list[Any], of_primary: list[Any]) -> tuple[list[Any], list[Any]]:
        index = jax.lax.axis_index(axis_name)
        totals = [_tree_sum(x, axis_name, mesh.size) for x in sums]
        return totals, [_from(primary, x, index, axis_name) for x in of_primary]

    cut, whole = PartitionSpec(axis_name), PartitionSpec()
    local.__name__ = "exchange"  # the program's name
    return jax.jit(jax.shard_map(local, mesh=mesh.jax_mesh, in_specs=cut, out_specs=whole, check_vma=False))


_SMALL = 1 << 16  # bytes


def _tree_sum(x: Any, axis_name: str, n: int) -> Any:
    """Returns the sum of a vector over n devices, neighbours first."""
    if x.size * x.dtype.itemsize * n > _SMALL:
        return _butterfly(x, axis_name, n)
    # With a small vector it is not the bytes that take time, but waiting for the others: here each device waits once.
    rows = jax.lax.all_gather(x, axis_name)
    while len(rows) > 1:
        rows = rows[::2] + rows[1::2]
    return rows[0]


def _butterfly(x: Any, axis_name: str, n: int) -> Any:
    """Returns the sum of a vector over n devices, by recursive halving and doubling: neighbours first.

    It sends as many bytes as a reduce-scatter and an all-gather. The order of messages does not change the result.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
    """
    index, steps = jax.lax.axis_index(axis_name), range(n.bit_length() - 1)

    def swapped(x: Any, step: int) -> Any:
        return jax.lax.ppermute(x, axis_name, [(i, i ^ (1 << step)) for i in range(n)])

    for step in steps:  # each device keeps the half that this bit of its index selects, and sends the other
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
    """Copies one device's value to all devices, bit for bit: as integers, whose sum with zeros is exact."""
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


def chunks_of(arrays: Sequence[Any], axes: Sequence[int | None], count: int, number: Any) -> list[Any]:
    """Returns the chunks of replica `number`, out of padded arrays of `count` replicas, each with its axis.

    Replicated arrays, whose axis is None, stay as they are.
    """
    found = []
    for x, axis in zip(arrays, axes, strict=True):
        if axis is not None:
            size = x.shape[axis] // count
            x = jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)
        found.append(x)
    return found
