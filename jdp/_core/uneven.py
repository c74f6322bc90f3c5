"""Runs a function on every replica's chunk, inside one SPMD program, with the results of the chunk's true size.

If each row of a function's outputs depends on that row of its inputs alone, no replica is idle, and the largest chunk
has at most 4/3 of the mean number of rows, all replicas run it on chunks of that size. Shorter chunks are filled up
with copies of a row, and the results of the copies are dropped. Otherwise the function is traced once for each size of
chunk, and each replica takes the branch (`lax.switch`) that was traced for its size. A replica of several devices
computes all of the branches, and keeps the results of its own (`replica_mesh.switch_of_all`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from .._jax.callers import source_line
from .._jax.convolutions import canonical
from .._jax.jaxprs import REDUCERS, Env, axes, bind, env_of, equations, evaluate_eqn, first, ordered, read
from .._jax.rewrites import inlined
from .._jax.row_places import keeps_places
from .._jax.segments import Segmented, segmented
from .layout import Cut, Layout, is_key
from .outputs import Marked, Outputs, output_path
from .replica_mesh import HALVES, ReplicaMesh, settings
from .scattered import Signature, value_of_replica
from .shards import as_used

BodyOf = Callable[[int], Callable[..., Outputs]]


def is_uneven(signature: Signature) -> bool:
    """Returns True if the chunks of the replicas differ in size, or if some replica has none."""
    layout = signature.layout
    if layout.used != tuple(range(len(layout.devices))) or (layout.is_cut and len({*layout.rows}) > 1):
        return True
    return any(len({*x.sizes}) > 1 for x in signature.leaves if isinstance(x, Cut))


def run_chunks(
    body_of: BodyOf, operands: Sequence[Any], signature: Signature, index: Any, gather_as_used: bool
) -> Outputs:
    """Returns the outputs of the one replica on a device, padded to the same size on all replicas.

    `body_of(replica)` is the user's function for that replica's size of chunk. If all chunks are equal, or may be
    filled up to one size, every replica runs the same body. Otherwise `lax.switch` chooses it by the replica's
    `index`. With `gather_as_used`, parameters that are cut are gathered where the body uses them.
    """
    n = signature.layout.mesh.size
    if is_uneven(signature):
        bodies = trace_bodies(body_of, operands, signature)
        largest = _body_for_all(bodies, signature)
        if largest is None:
            return run_body(bodies, operands, signature, index)
        mine = _at_size(_filled_up(operands, signature, index), signature, largest.replica)
        return dataclasses.replace(body_of(largest.replica)(*mine), sizes=_rows_of_outputs(bodies, signature))
    if gather_as_used and signature.holds_shards:
        out = as_used(body_of(0), operands, signature)
    else:
        if not settings.jax_disable_jit:  # the body is jitted, so this trace serves the call below, too
            _refuse_what_needs_devices(jax.make_jaxpr(body_of(0))(*operands), signature.layout.mesh)
        out = body_of(0)(*operands)
    sizes = tuple((x.shape[r.axis],) * n if _is_cut(x, r) else () for x, r in zip(out.values, out.rules, strict=True))
    return dataclasses.replace(out, sizes=sizes)


def _is_cut(x: Any, rule: Marked) -> bool:
    return rule.axis is not None and x.ndim > 0


def _body_for_all(bodies: Bodies, signature: Signature) -> Body | None:
    """Returns the body of the largest chunks if all replicas may run it, as each row is computed alone; else None."""
    layout, rows = signature.layout, signature.layout.rows
    # If the user has made some chunks much smaller than others, perhaps for a slower device, filling these up would
    # give that device the work of the largest.
    if 3 * max(rows) * len(rows) > 4 * sum(rows) or len(layout.used) < len(rows):
        return None
    largest = bodies[max(bodies)]
    pairs = [(body, (rows[largest.replica], rows[body.replica])) for body in bodies.values() if body is not largest]
    return largest if all(keeps_places(largest.jaxpr, body.jaxpr, each) for body, each in pairs) else None


def _filled_up(operands: Sequence[Any], signature: Signature, index: Any) -> list[Any]:
    """Returns the operands with copies of a row as padding, because zeros might give a NaN, or a loop without end."""
    filled, used, count = [], signature.layout.used, len(signature.layout.rows)
    for x, leaf in zip(operands, signature.leaves, strict=True):
        sizes = (*leaf.sizes, *[0] * (count - len(leaf.sizes))) if isinstance(leaf, Cut) else ()
        if isinstance(leaf, Cut) and len({*sizes}) > 1:
            shape = tuple(x.shape[leaf.axis] if i == leaf.axis else 1 for i in range(x.ndim))
            places = jax.lax.broadcasted_iota(jnp.int32, shape, leaf.axis)
            first = jax.lax.slice_in_dim(x, 0, 1, axis=leaf.axis)
            if len(used) < count and not is_key(x):  # a replica without rows has none to copy
                first = jax.lax.all_gather(jax.lax.stop_gradient(first), signature.axis_name)[used[0]]
            x = jnp.where(places < jnp.asarray(np.array(sizes, np.int32))[index], x, first)
        filled.append(x)
    return filled


def _at_size(operands: Sequence[Any], signature: Signature, replica: int) -> list[Any]:
    """Returns the operands with each chunk cut to the size that the chunks of this replica have."""
    pairs = zip(operands, signature.leaves, strict=True)
    return [value_of_replica(x, leaf, replica) if isinstance(leaf, Cut) else x for x, leaf in pairs]


class Body(NamedTuple):
    """The user's function traced on one size of chunk; its operands have that size."""

    replica: int
    jaxpr: Any
    out: Outputs  # with shapes for its values


Bodies = dict[tuple[int, ...], Body]
"""The bodies by the sizes of chunk that they were traced on, as `_sizes_of_operands` returns them."""


def trace_bodies(body_of: BodyOf, operands: Sequence[Any], signature: Signature) -> Bodies:
    """Returns one body for each size of chunk; the first replica of a size stands for all of that size."""
    layout = signature.layout
    axis_env = _axis_env(signature)
    # With no rows at all, the model is traced on zero rows to find the shapes of its outputs; see `_on_no_rows`.
    first = {_sizes_of_operands(signature, i): i for i in reversed(layout.used)} or {(): 0}
    bodies = {}
    for sizes, replica in sorted(first.items(), key=lambda item: item[1]):
        # Traced here, before lax.switch does, to know the shapes of outputs and to look for collectives.
        mine = _at_size(operands, signature, replica)
        jaxpr, out = jax.make_jaxpr(body_of(replica), axis_env=axis_env, return_shape=True)(*mine)
        _refuse_what_needs_devices(jaxpr, layout.mesh)
        if layout.used and is_uneven(signature):
            _refuse_collectives(jaxpr.jaxpr, signature)
        bodies[sizes] = Body(replica, jaxpr, out)
    lead, *others = bodies.values()
    for other in others:
        _must_agree(lead, other)
    return bodies


def _axis_env(signature: Signature) -> list[tuple[str, int]] | None:
    """Returns the axis with as many members as replicas if a device has several; otherwise JAX's own axis is right."""
    layout = signature.layout
    return [(signature.axis_name, len(layout.devices))] if layout.per_device > 1 else None


def _on_padded(body: Body, operands: Sequence[Any], signature: Signature) -> Any:
    """Returns the jaxpr of a body that takes padded operands, and cuts them to its own size first."""
    is_cpu = signature.layout.devices[0].platform == "cpu"
    run = jax.extend.core.jaxpr_as_fun(canonical(body.jaxpr) if is_cpu else body.jaxpr)

    def on_padded(*operands: Any) -> list[Any]:
        return run(*_at_size(operands, signature, body.replica))

    return jax.make_jaxpr(on_padded, axis_env=_axis_env(signature))(*operands)


def run_body(bodies: Bodies, operands: Sequence[Any], signature: Signature, index: Any) -> Outputs:
    """Returns the outputs of the replica with this index, by the body for its size of chunk."""
    layout = signature.layout
    lead = next(iter(bodies.values()))
    rules = lead.out.rules
    outputs = [*zip(*[body.out.values for body in bodies.values()], strict=True)]
    shapes = [_padded_shape(found, rule) for found, rule in zip(outputs, rules, strict=True)]

    def idle(*operands: Any) -> list[Any]:
        return [
            jnp.zeros(shape, x.dtype) if rule.old is None else _as_dtype(operands[rule.old], x.dtype)
            for shape, x, rule in zip(shapes, lead.out.values, rules, strict=True)
        ]

    def finish(values: Sequence[Any]) -> list[Any]:
        return [_pad_to(x, shape) for x, shape in zip(values, shapes, strict=True)]

    def branch(jaxpr: Any) -> Callable[..., list[Any]]:
        run = jax.extend.core.jaxpr_as_fun(jaxpr)
        return lambda *operands: finish(run(*operands))

    # Replicas of several devices also compute on more rows than they have: see `switch_of_all`.
    if layout.used and len(layout.mesh.all_devices) > layout.mesh.size:
        operands = _filled_up(operands, signature, index)
    jaxprs = [_on_padded(body, operands, signature) for body in bodies.values()]
    order = list(bodies) if layout.used else []

    def branch_of(replica: int) -> int:  # the last branch is the idle one
        return order.index(_sizes_of_operands(signature, replica)) if replica in layout.used else len(order)

    which = [*map(branch_of, range(len(layout.devices)))]
    branches = [branch(jaxpr) for jaxpr in jaxprs[: len(order)]] + ([idle] if len(order) in which else [])
    mine = jnp.asarray(np.array(which, np.int32))[index]
    if not layout.used and any(rule.axis is None and rule.old is None for rule in rules):
        values = _on_no_rows(lead, branch(jaxprs[0]), idle, operands, signature, index)
    elif len(branches) > 1 and any(collectives(lead.jaxpr.jaxpr, layout.mesh.axis_name, synced=True)):
        values = run_segments(jaxprs, mine, operands, finish, idle(*operands), layout)
    else:
        values = layout.mesh.switch(mine, branches, *operands)
    return dataclasses.replace(lead.out, values=values, sizes=_rows_of_outputs(bodies, signature))


def _as_dtype(x: Any, dtype: Any) -> Any:
    """Returns the array in this dtype; a key, whose dtype does not change, stays as it is."""
    return jnp.asarray(x) if x.dtype == dtype else jnp.asarray(x, dtype)


def _rows_of_outputs(bodies: Bodies, signature: Signature) -> tuple[tuple[int, ...], ...]:
    """Returns for each output the rows on each replica; () if it is not cut."""
    layout, lead = signature.layout, next(iter(bodies.values()))
    replicas = range(len(layout.sizes))
    outputs = [bodies[_sizes_of_operands(signature, i)].out.values if i in layout.used else None for i in replicas]
    return tuple(
        tuple(values[k].shape[rule.axis] if values else 0 for values in outputs) if _is_cut(x, rule) else ()
        for k, (x, rule) in enumerate(zip(lead.out.values, lead.out.rules, strict=True))
    )


def _on_no_rows(
    lead: Body,
    run: Callable[..., Any],
    idle: Callable[..., Any],
    operands: Sequence[Any],
    signature: Signature,
    index: Any,
) -> list[Any]:
    """Runs a batch without rows: the primary computes each output that all replicas share and that has no old value."""
    _refuse_collectives(lead.jaxpr.jaxpr, signature)

    def primary(*operands: Any) -> list[Any]:
        made = zip(run(*operands), idle(*operands), lead.out.rules, strict=True)
        return [x if rule.axis is None and rule.old is None else kept for x, kept, rule in made]

    return signature.layout.mesh.switch(jnp.minimum(index, 1), [primary, idle], *operands)


def _sizes_of_operands(signature: Signature, replica: int) -> tuple[int, ...]:
    """Returns the key of a replica's body: its rows (they weight its results), and its rows of each cut operand."""
    return signature.layout.rows[replica], *(leaf.sizes[replica] for leaf in signature.leaves if isinstance(leaf, Cut))


def _must_agree(lead: Body, other: Body) -> None:
    if (lead.out.treedef, lead.out.rules) != (other.out.treedef, other.out.rules):
        raise ValueError(
            f"jdp.parallel_apply: replica {lead.replica} returns {lead.out.treedef}, replica {other.replica} "
            f"{other.out.treedef}; all replicas return the same tree. Return one that does not depend on the rows."
        )
    for k, (a, b, rule) in enumerate(zip(lead.jaxpr.out_avals, other.jaxpr.out_avals, lead.out.rules, strict=True)):
        apart = [i for i, (p, q) in enumerate(zip(a.shape, b.shape, strict=False)) if p != q and i != rule.axis]
        if a.ndim != b.ndim or a.dtype != b.dtype or apart:
            how = (
                "what is one for all replicas has one shape. Return what does not depend on the number of rows"
                if rule.axis is None
                else f"replicas may differ along axis {rule.axis} only, which is that of their rows. Return the rows "
                f"along it{', one row too: squeeze(-1), not squeeze()' * (a.ndim != b.ndim)}; dp(...) and dp.parallel "
                f"take another axis in out_axes"
            )
            raise ValueError(
                f"jdp.parallel_apply: {output_path(lead.out.treedef, k)} is {a.str_short()} on replica "
                f"{lead.replica} and {b.str_short()} on replica {other.replica}; {how}."
            )


def _padded_shape(values: Sequence[Any], rule: Marked) -> tuple[int, ...]:
    """Returns the shape that an output of all replicas is padded to."""
    shape = list(values[0].shape)
    if _is_cut(values[0], rule):
        shape[rule.axis] = max(1, *(x.shape[rule.axis] for x in values))  # type: ignore[index]
    return tuple(shape)


def _pad_to(x: Any, shape: tuple[int, ...]) -> Any:
    for axis, rows in enumerate(shape):
        if x.shape[axis] != rows:
            missing = jnp.zeros((*x.shape[:axis], rows - x.shape[axis], *x.shape[axis + 1 :]), x.dtype)
            x = jnp.concatenate([x, missing], axis=axis)
    return x


_IN_TRAINING = (
    "leave the collectives out: means are reduced by rows anyway, and a loss that needs the outputs of all rows is "
    "criterion=, which gets them (sync_batch_norm=True stands for the axis_name of a BatchNorm)"
)
# What an error advises in place of collectives on unequal chunks, by the public function that was called.
_BY_ROWS = {
    "value_and_grad": _IN_TRAINING,
    "train_step": _IN_TRAINING,
    "evaluate": "leave the collectives out: jdp.Mean(total, count) and jdp.Sum(total) are added up over all rows "
    "anyway, and arrays with an entry for each row come back for all rows",
    "parallel": "write the step for dp.train_step, which reduces by rows (sync_batch_norm=True there stands for the "
    "axis_name of a BatchNorm)",
    "parallel_apply": "leave the collectives to dp.train_step or dp.value_and_grad, which reduce by rows and whose "
    "criterion= gets the outputs of all rows (sync_batch_norm=True there stands for the axis_name of a BatchNorm)",
}


def _refuse_collectives(jaxpr: Any, signature: Signature) -> None:
    layout, axis_name, verb = signature.layout, signature.axis_name, signature.verb
    n = len(layout.devices)
    for name in collectives(jaxpr, axis_name):
        if not layout.is_cut:
            raise ValueError(
                f"jdp.{verb}: the model runs a collective ({name} over {axis_name!r}) and no input is cut, so "
                f"that it runs on the primary device alone; it would wait for {n - 1} others forever. Pass a batch, "
                f"or leave the collective out (drop and pad do not help; sync_batch_norm of dp.train_step does)."
            )
        raise ValueError(
            f"jdp.{verb}: the model runs a collective ({name} over {axis_name!r}) and its chunks are "
            f"{layout.sizes} on {layout.mesh.size} devices; replicas with unequal chunks run different code and would "
            f"wait for each other forever. Drop rows or pad the batch to a multiple of {n}, or {_BY_ROWS[verb]}."
        )


# The gradient of a gather is a sum that is scattered.
_ENDING_AT_HALVES = {*REDUCERS, "reduce_scatter"}


def _refuse_what_needs_devices(traced: Any, mesh: ReplicaMesh) -> None:
    """Raises a `ValueError` for a `shard_map` in a replica of one device, and for callbacks that are ordered.

    Also for a collective that would end the process: see `ReplicaMesh.sums_in_32_bits`. On replicas of several devices
    JAX has no callbacks that return a value: a `NotImplementedError`.
    """
    for eqn in equations(traced.jaxpr) if mesh.sums_in_32_bits else ():
        half = next((x.aval for x in eqn.invars if mesh.axis_name in axes(eqn) and x.aval.dtype in HALVES), None)
        if half is not None and eqn.primitive.name in _ENDING_AT_HALVES:
            raise ValueError(
                f"jdp.parallel_apply: the model runs {eqn.primitive.name} over {mesh.axis_name!r} of "
                f"{half.str_short()}; XLA's CPU compiler ends the process at sums of 16 bits over replicas of several "
                f"devices, at maxima, and at the gradient of a gather, which is a sum. Cast to float32 before it."
            )
    for name in ("pure_callback", "io_callback") if mesh.inner_axes and mesh.size > 1 else ():
        if (eqn := first(traced, name)) is not None:
            where = source_line(eqn)
            raise NotImplementedError(
                f"jdp.parallel_apply: the model calls {name}{where and f' ({where})'} on replicas of several devices; "
                f"JAX calls back from one device of each replica at most. Compute it before the call, and pass it with "
                f"the batch, or wrap the model for a list of devices."
            )
    own = None if mesh.inner_axes else first(traced, "shard_map")
    if own is not None:
        where = source_line(own)
        raise ValueError(
            f"jdp.parallel_apply: the model calls shard_map{where and f' ({where})'}; it runs on one device of each "
            f"replica, which cannot be split further. Call the function without shard_map, on the chunk."
        )
    n = len(mesh.all_devices)
    eqn = ordered(traced.jaxpr) if n > 1 and traced.effects else None
    if eqn is not None:
        where = source_line(eqn)
        raise ValueError(
            f"jdp.parallel_apply: {eqn.primitive.name}{where and f' ({where})'} has ordered=True and runs on {n} "
            f"devices at once; JAX keeps an order on one device only. Pass ordered=False."
        )


def collectives(jaxpr: Any, axis_name: str, synced: bool = False) -> Iterable[str]:
    """Yields the primitives that communicate over the axis, nested ones too.

    With `synced` only those of `sync_batch_norm`, else all but those.
    """
    for eqn in equations(jaxpr):
        if axis_name in axes(eqn) and eqn.primitive.name != "axis_index" and is_synced(eqn) == synced:
            yield eqn.primitive.name


def run_segments(
    jaxprs: Sequence[Any],
    which: Any,
    operands: Sequence[Any],
    finish: Callable[[Sequence[Any]], list[Any]],
    idle: list[Any],
    layout: Layout,
) -> list[Any]:
    """Computes `lax.switch(which, jaxprs, *operands)` as several switches, with the collectives between them.

    So all replicas meet at each collective (of `sync_batch_norm`), also those that take different branches. An index
    beyond the jaxprs is an idle replica: it adds zeros to the collectives, and returns `idle`. `finish` pads the
    outputs to one shape.
    """

    def in_a_loop(eqn: Any) -> ValueError:
        return ValueError(
            f"jdp.sync_batch_norm: a BatchNorm runs in a {eqn.primitive.name}, the chunks are {layout.rows}; replicas "
            f"with unequal chunks must meet at each BatchNorm, and cannot inside of a loop. Pass a batch that divides "
            f"by {len(layout.devices)}, or leave the loop out (of the model; accumulate_steps=1)."
        )

    parts = [segmented(inlined(jaxpr, is_synced, in_a_loop), is_synced) for jaxpr in jaxprs]
    count = len(parts[0].cuts)
    if any(len(part.cuts) != count for part in parts):
        raise ValueError(
            f"jdp.sync_batch_norm: chunks are {layout.rows}, and how many BatchNorms run depends on the number of "
            f"rows; all replicas must meet at each. Run the same number for any rows, or pass a batch that divides by "
            f"{len(layout.devices)}."
        )
    kept: list[list[list[Any]]] = []  # for each segment and each part, the values that later segments read
    results: list[list[Any]] = []  # of each collective

    def nothing(j: int, *_: Any) -> tuple[list[Any], list[list[Any]]]:
        return _zeros(parts[0].cuts[j].invars), [_zeros(part.keeps(j)) for part in parts]

    for j in range(count):
        branches = [functools.partial(_segment, parts, k, j) for k in range(len(parts))]
        branches.append(functools.partial(nothing, j))
        sent, found = layout.mesh.switch(which, branches, operands, kept, results)
        results.append(bind(parts[0].cuts[j], sent))
        kept.append(found)

    def last(k: int, *so_far: Any) -> list[Any]:
        env = _run_segment(parts[k], k, count, *so_far)
        return finish([read(env, v) for v in parts[k].jaxpr.jaxpr.outvars])

    branches = [functools.partial(last, k) for k in range(len(parts))]
    return layout.mesh.switch(which, [*branches, lambda *_: idle], operands, kept, results)


def _segment(parts: Sequence[Segmented], k: int, j: int, *so_far: Any) -> tuple[list[Any], list[list[Any]]]:
    """Runs segment j of part k: returns the operands of the collective, and the values to keep for later segments.

    The parts keep values of different shapes, but the branches of a switch must return equal shapes. So each part
    returns zeros for the values of the others.
    """
    env = _run_segment(parts[k], k, j, *so_far)
    sent = [jnp.asarray(read(env, v)) for v in parts[k].cuts[j].invars]
    return sent, [[env[v] for v in part.keeps(j)] if part is parts[k] else _zeros(part.keeps(j)) for part in parts]


def _run_segment(part: Segmented, k: int, j: int, operands: Any, kept: Sequence[Any], results: Sequence[Any]) -> Env:
    """Runs segment j of part k; returns its values. `kept` and `results` are what the segments before it have left."""
    env = env_of(part.jaxpr, operands)
    for i, (found, result) in enumerate(zip(kept, results, strict=True)):
        env.update(zip(part.keeps(i), found[k], strict=True))
        env.update(zip(part.cuts[i].outvars, result, strict=True))
    for eqn in part.segments[j]:
        evaluate_eqn(eqn, env)
    return env


def _zeros(variables: Sequence[Any]) -> list[Any]:
    return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]


class SyncedAxis(str):
    """The axis name that a synchronised BatchNorm gets: equal to the plain name, but recognised in a jaxpr."""


def is_synced(eqn: Any) -> bool:
    """Returns True if an equation is a collective of such a BatchNorm."""
    return any(isinstance(axis, SyncedAxis) for axis in axes(eqn))
