"""sync: what a process that has come back gets from the others."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._processes.agree import difference, same_program
from .._processes.coordination import DesyncError
from .._processes.exchange import Exchange, exchange_of
from .._processes.members import members
from .._processes.recovery import enter, meet, raise_if_changed
from .._processes.watch import limits
from .devices import Devices, make_mesh, processes_of, resolve_devices
from .layout import is_key

T = TypeVar("T")
_VERB = "distributed.sync"


def sync(tree: T, devices: Devices) -> T:
    """Gives a process that has come back what the others have: an experiment, `initialize(recover=True)`.

    Call it in the loop that catches `ProcessesChanged`, in all processes, before the first step; for NNX before the
    wrapper is made, which compares the parameters. Where nobody has come back it gives the tree as it is, and asks
    nobody. A process that was started again waits in its first call until the others let it in, at the end of a step,
    and gets the `ProcessesChanged` that they get; in its second call the values. Until then `jdp.DataParallel(model)`
    is one over its own devices there.

    Args:
        tree: the state, the number of batches taken, and what else the loop holds: arrays, whole in each process, of
            any dtypes, and numbers. For NNX `nnx.state((model, optimizer))`, and `nnx.update` for what comes back.
        devices: those of the wrapper: of `ProcessesChanged`, or None before there was one.

    Returns:
        In a process that has come back the values of process 0, in leaves like those of `tree`, bit for bit; in all
        others `tree` itself.

    Raises:
        ProcessesChanged: this process is let in, or one has died meanwhile.
        DesyncError: the trees of the processes differ in their paths, shapes or dtypes.
        TypeError: a leaf is no array and no number.
        ValueError: a leaf is cut over the processes.
        SystemExit: in a process that was started again; with code 0, the job has ended, or has no place for it.

    Example:
        >>> import jdp, numpy as np
        >>> jdp.distributed.sync((np.float32(2), 7), None)  # nobody has come back
        (np.float32(2.0), 7)

    Source: `State.sync` of Elastic Horovod (horovod/common/elastic.py).
    """
    if members.waits:
        enter()
    if not members.joined:
        return tree
    mesh = make_mesh(resolve_devices(_VERB, devices))
    if {*members.joined} & {*processes_of(mesh)}:  # else it is not needed, and has ended
        exchange = exchange_of(processes_of(mesh))
        try:
            tree = _synced(tree, mesh, exchange)
        except Exception as error:
            raise_if_changed(exchange, _VERB, error)
            raise
    members.joined = ()
    return tree


def _synced(tree: Any, mesh: Mesh, exchange: Exchange) -> Any:
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    values = {jax.tree_util.keystr(path) or "the tree": _value(path, x) for path, x in flat}
    outline = {path: f"{x.dtype}{[*x.shape]}" for path, x in values.items()}
    meet(exchange, _VERB)  # it may have died again
    told = exchange.tell(_VERB, outline, limits.start)
    if len({json.dumps(x) for x in told.values()}) > 1:
        raise DesyncError(
            f"jdp.{_VERB}: the processes have different trees: {difference(told) or 'in another order'}; who has come "
            f"back takes the values of the others. Make the state in all processes by the same lines."
        )
    data = b"".join(x.tobytes() for x in values.values())
    words = np.frombuffer(data + bytes(-len(data) % 4), np.uint32)
    program = _program(mesh)
    operand = jax.make_array_from_callback(
        (mesh.size, words.size), NamedSharding(mesh, PartitionSpec(*mesh.axis_names)), lambda index: words[None]
    )
    program.make_ready(operand)
    exchange.come_to(_VERB)
    found = np.asarray(program.__wrapped__(operand).addressable_data(0)).tobytes()
    meet(exchange, _VERB)  # all have it, or none
    if exchange.here not in members.joined:
        return tree
    leaves, start = [], 0
    for (_, x), value in zip(flat, values.values(), strict=True):
        leaves.append(_like(np.frombuffer(found, value.dtype, value.size, start).reshape(value.shape), x))
        start += value.nbytes
    return treedef.unflatten(leaves)


sync.__module__ = "jdp.distributed"


def _value(path: Any, x: Any) -> np.ndarray:
    """A leaf as it is on this process's first device."""
    if isinstance(x, jax.Array):
        x = jax.random.key_data(x) if is_key(x) else x
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(
                f"jdp.{_VERB}: the leaf at {jax.tree_util.keystr(path)} is cut over the processes; each is to have all "
                f"of it, for who has died takes its part along. Leave shard_params and shard_optimizer out."
            )
        return np.asarray(x if x.is_fully_addressable else x.addressable_data(0))
    if isinstance(x, bool | int | float | complex | np.ndarray | np.generic) and np.asarray(x).dtype != object:
        return np.asarray(x)
    raise TypeError(
        f"jdp.{_VERB}: the leaf at {jax.tree_util.keystr(path)} is a {type(x).__name__}; a leaf is an array or a "
        f"number. Leave it out of the tree."
    )


def _like(value: np.ndarray, x: Any) -> Any:
    """The value, as an array or number of the kind of x, where that is."""
    if not isinstance(x, jax.Array):
        return value.copy() if isinstance(x, np.ndarray) else value[()] if isinstance(x, np.generic) else value.item()
    if is_key(x):
        return jax.random.wrap_key_data(jax.device_put(value), impl=jax.random.key_impl(x))
    return jax.device_put(value, x.sharding)


def _program(mesh: Mesh) -> Any:
    """Gives all devices the words of process 0, which never was away: as integers, whose sum with zeros is exact."""
    (axis_name,) = mesh.axis_names
    source = next(i for i, d in enumerate(mesh.devices.flat) if d.process_index == 0)

    def local(words: jax.Array) -> jax.Array:
        here = jax.lax.axis_index(axis_name) == source
        return jax.lax.psum(jnp.where(here, words[0], jnp.zeros_like(words[0])), axis_name)

    def sync(words: jax.Array) -> jax.Array:
        mapped = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(axis_name), out_specs=PartitionSpec())
        return mapped(words)

    return same_program(jax.jit(sync), mesh.devices.flat, ("the tree",))
