"""parallel_apply runs a function on every replica, as one SPMD program: `s[i] == fn(replicas, *inputs[i])`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._check import is_key
from ._dispatch import dispatch
from ._kept import kept
from ._outputs import Outputs
from ._replicate import broadcast
from ._run_chunks import run_chunks
from ._scattered import Cut, Layout, Leaf, Scattered, Static, Tree, Whole, is_scattered, placed


def parallel_apply(
    fn: Callable[..., Tree], replicas: Tree, inputs: Scattered, kwargs: Scattered | None = None
) -> Scattered:
    """Runs `fn(replicas, *inputs[i], **kwargs[i])` on every device i at once: `jit(shard_map(fn))`.

    One compiled program, which is what `jax.pmap` is today. It is compiled once per function and
    shapes: `fn` is known by its identity (a bound method by its object and name), so a lambda made
    afresh for each call is compiled for each call. Python scalars, strings and other objects among
    the inputs are part of the program: each new value compiles anew. The axis `"data"` is live
    inside, for collectives. 0-d typed PRNG keys among the inputs are folded with the replica's index
    on every replica but the primary. Chunks of unequal size are run at their true sizes.

    Args:
        fn: the function; returns a pytree of arrays.
        replicas: its first argument, whole on every replica (`jdp.replicate`); arrays on the host or
            on the primary device are replicated first.
        inputs: from `jdp.scatter`; a tuple or list holds the positional arguments, anything else is one.
        kwargs: from `jdp.scatter`: the keyword arguments, a dict.

    Returns:
        A `jdp.Scattered`: `s[i]` is what `fn` returned on replica i.

    Raises:
        TypeError: an output leaf is no array, with its path.
        ValueError: outputs of replicas differ off `dim`; or `fn` runs collectives of its own and the
            chunks are uneven.

    Example:
        >>> import jdp, numpy as np
        >>> x = jdp.scatter((np.arange(4.0),), devices=[0])
        >>> y = jdp.parallel_apply(lambda w, x: w * x, 2.0, x)
        >>> jdp.gather(y).tolist()
        [0.0, 2.0, 4.0, 6.0]

    Source: torch/nn/parallel/parallel_apply.py; jax/_src/pmap.py.
    """
    if not isinstance(inputs, Scattered) or not isinstance(kwargs, Scattered | None):
        found = inputs if not isinstance(inputs, Scattered) else kwargs
        raise TypeError(
            f"jdp.parallel_apply: inputs and kwargs are a {type(found).__name__}; they are scattered trees. "
            f"Pass jdp.scatter(inputs)."
        )
    replicas = broadcast(replicas, inputs._layout.mesh, "parallel_apply")
    inputs, kwargs = placed(inputs), None if kwargs is None else placed(kwargs)
    return dispatch(kept(fn, "program", spmd), replicas, inputs, kwargs)


def spmd(fn: Callable[..., Tree], name: str | None = None) -> Callable[..., Scattered]:
    """The program that runs `fn` on every replica; compiled once per layout and shapes."""
    run = _spmd(fn, name)
    compiled: dict[Any, Callable[..., Scattered]] = {}

    def call(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        key = inputs._layout, None if kwargs is None else kwargs._layout
        program = compiled.get(key)
        if program is None:
            # With in_shardings the call itself puts numpy arrays onto the devices, at a fraction of what
            # a device_put before it costs, and into the one program that placed arrays run as well.
            where = [None if layout is None else Scattered(layout.shardings, layout) for layout in key]
            program = compiled[key] = jax.jit(run, in_shardings=(None, *where))
        return program(replicas, inputs, kwargs)

    return call


def _spmd(fn: Callable[..., Tree], name: str | None) -> Callable[..., Scattered]:
    seen: dict[Any, set[Any]] = {}
    label = name or getattr(fn, "__name__", type(fn).__name__)

    def run(replicas: Tree, inputs: Scattered, kwargs: Scattered | None) -> Scattered:
        nodes, treedef = jax.tree.flatten((replicas, inputs, kwargs), is_leaf=is_scattered)
        layout = _common_layout([x._layout for x in nodes if is_scattered(x)])
        axis_name = layout.mesh.axis_names[0]
        operands = [x for node in nodes for x in (node._arrays if is_scattered(node) else (node,))]
        leaves = [leaf for x in nodes for leaf in (x._layout.arrays if is_scattered(x) else (Whole(),))]
        warn_new_values(seen, nodes, operands, label)

        def call(values: Sequence[Any], replica: int) -> Tree:
            """`fn` on the values of one replica; `replica` is the lowest that has such shapes."""
            rest = iter(values)
            own = [
                node._layout.fill([next(rest) for _ in node._arrays]) if is_scattered(node) else next(rest)
                for node in nodes
            ]
            weights, args, kw = jax.tree.unflatten(treedef, own)
            args = args if isinstance(args, tuple | list) else (args,)
            try:
                return fn(weights, *args, **(kw or {}))
            except Exception as error:
                device = layout.devices[replica]
                error.add_note(f"Caught {type(error).__name__} in replica {replica} on device {device}.")
                raise

        plan: list[Outputs] = []

        def local(*operands: Any) -> tuple[list[Any], list[Any]]:
            index = jax.lax.axis_index(axis_name)
            given = len(operands) - sum(len(x._arrays) for x in (inputs, kwargs) if x is not None)
            operands = operands[:given] + tuple(
                fold_key(x, index) if isinstance(leaf, Whole) else x
                for x, leaf in zip(operands[given:], leaves[given:], strict=True)
            )
            values, outputs = run_chunks(call, operands, leaves, layout, index)
            plan.append(outputs)
            return outputs.reduce(values, index)

        with jax.named_scope("DataParallel"):
            cut, whole = jax.shard_map(
                local,
                mesh=layout.mesh,
                in_specs=tuple(_spec(leaf, axis_name) for leaf in leaves),
                out_specs=(PartitionSpec(axis_name), PartitionSpec()),
                check_vma=False,  # real models (a scan in an RNN) fail the checks
            )(*operands)
        return plan[-1].scattered(cut, whole)

    run.__name__ = run.__qualname__ = label
    return run


def fold_key(x: Any, index: Any) -> Any:
    """A 0-d typed PRNG key, folded with the replica's index on every replica but the primary."""
    # The same key draws the same numbers on every replica. The primary's stays, and so does that
    # of one device alone: its numbers are those of the bare model.
    if not is_key(x) or x.ndim:
        return x
    return jnp.where(index == 0, x, jax.random.fold_in(x, index))


def _spec(leaf: Leaf, axis_name: str) -> PartitionSpec:
    if isinstance(leaf, Whole):
        return PartitionSpec()
    return PartitionSpec(*[None] * (leaf.axis if isinstance(leaf, Cut) else 0), axis_name)


def _common_layout(layouts: Sequence[Layout]) -> Layout:
    """The layout whose chunks all agree on."""
    first = next((x for x in layouts if x.is_cut), layouts[0])
    for other in layouts:
        if other.mesh != first.mesh or other.is_cut and other.sizes != first.sizes:
            raise ValueError(
                f"jdp.parallel_apply: inputs have chunks {first.sizes} on {_names(first)}, others {other.sizes} on "
                f"{_names(other)}; all are cut alike. Scatter them together."
            )
    return first


def _names(layout: Layout) -> str:
    return ", ".join(str(d) for d in layout.devices)


def warn_new_values(seen: dict[Any, set[Any]], nodes: Sequence[Any], operands: Sequence[Any], name: str) -> None:
    """Warns, once, where Python values that differ from call to call compile the same program over and over."""
    layouts = [x._layout for x in nodes if is_scattered(x)]
    statics = tuple(leaf for x in layouts for leaf in x.leaves if isinstance(leaf, Static))
    shapes = tuple((x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in operands)
    values = seen.setdefault((shapes, tuple((x.treedef, x.arrays) for x in layouts)), set())
    values.add(statics)
    if len(values) == _MANY_VALUES:
        warnings.warn(
            f"jdp.parallel_apply: {name} was compiled {_MANY_VALUES} times for inputs that differ only in Python "
            f"values, the last {[s.value for s in statics]}; each value is part of the program. Pass what changes "
            f"between calls as a 0-d array, jnp.asarray(value).",
            UserWarning,
            stacklevel=2,
        )


_MANY_VALUES = 16
