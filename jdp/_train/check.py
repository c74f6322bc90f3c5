"""Compares a step's loss on several devices with that on one device by running both: a trace cannot show all faults."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.layout import Cut, Layout, Tree, is_key
from .._core.replica_mesh import ReplicaMesh, make_mesh
from .._core.scattered import Scattered, map_scattered, unpadded
from .._jax.jaxprs import equations, reached
from .followed import ON_BATCH
from .gradients import Gradients
from .program import Program
from .state import TrainState, inexact_arrays_of


@dataclasses.dataclass(frozen=True)
class LossCheck:
    """The comparison of a step's loss, metrics, updates and gradient on its devices with those on one device.

    Made by `step.check(state, batch)` (NNX: `step.check(batch)`). It is true if all of them agree up to rounding.
    `str(check)` names what differs, with both values, and the likely cause.

    Attributes:
        devices: how many devices the step runs on.
        differences: a line for each value that differs.
        cause: the likely cause of the differences, or why no comparison was possible; empty if all agree.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np, optax
        >>> dp = jdp.DataParallel(lambda v, x: x * v["params"], devices=[0])
        >>> step = dp.train_step(lambda v, x: jnp.mean((dp(v, x) - 6) ** 2), optax.sgd(0.1))
        >>> bool(step.check(step.init({"params": np.float32(1)}), np.full(5, 2, np.float32)))
        True
    """

    devices: int
    differences: tuple[str, ...] = ()
    cause: str = ""

    def __bool__(self) -> bool:
        return not self.cause

    def __str__(self) -> str:
        if self:
            return f"The loss on {self.devices} devices, its metrics, updates and gradient are those of one device."
        first = f"The loss on {self.devices} devices is not that of one device with the whole batch:"
        if not self.differences:
            first = f"The loss on {self.devices} devices cannot be compared with that of one device."
        return "\n".join([first, *(f"  {line}" for line in self.differences), self.cause])


def checked(program: Program, state: TrainState, batch: Scattered) -> LossCheck:
    """Compares the program's loss on its devices with its loss on one device and the whole batch; changes nothing."""
    mesh, options = program.config.mesh, program.options
    one = make_mesh(mesh.own.devices[:1], mesh.axis_name)
    # Only the loss is compared, not the placement of its parameters, and not how gradients are sent.
    plain: dict[str, Any] = dict(shard_optimizer=False, shard_params=False, gather_once=False, deterministic=False)
    plain |= dict(reduce_dtype=None, check_replicas=0, donate=False, sync_batch_norm=True)
    alone = program.like(one, **plain, accumulate_steps=1)
    state_of_one, batch_of_one = _on_one(state, mesh, one), _whole_batch(batch, one)
    is_random, narrowest = _traced(alone, state_of_one, batch_of_one)
    if is_random:
        return LossCheck(
            len(mesh.all_devices),
            cause="It depends on a random key, and each replica draws from its own. Check it without dropout and the "
            "like: a loss that ignores its key is compared.",
        )
    here = program.like(**plain)
    expected: Gradients = jax.jit(alone.gradients)(state_of_one, batch_of_one)
    state = here.placed(state)
    try:
        found = jax.jit(here.gradients)(state, batch)
    except ValueError as error:
        if options.accumulate_steps == 1 or "a BatchNorm runs in a" not in str(error):
            raise
        found = jax.jit(program.like(**plain, accumulate_steps=1).gradients)(state, batch)
    return _compared(found, expected, program, narrowest)


def _compared(found: Gradients, expected: Gradients, program: Program, narrowest: float) -> LossCheck:
    mesh, steps = program.config.mesh, program.options.accumulate_steps
    names, n = ("loss", "metrics", "update of state", "gradient of params"), len(mesh.all_devices)
    lines: list[str] = []
    what: set[str] = set()
    here = "on 1 device" if n == 1 else f"on {n} devices"
    parts = [_compared_parts(gradients, program) for gradients in (found, expected)]
    for name, tree, other in zip(names, *parts, strict=True):
        mine, theirs = (jax.tree_util.tree_leaves_with_path(_as_numpy(x)) for x in (tree, other))
        largest = max([_largest(x) for _, x in theirs if _is_inexact(x)], default=0.0)
        for (path, a), (_, b) in zip(mine, theirs, strict=True):
            least = 1e-3 * largest if name.startswith("gradient") else 0.0
            if line := _difference(a, b, least, narrowest, here):
                lines.append(f"{name}{jax.tree_util.keystr(path)}: {line}")
                what.add(name)
    if not lines:
        return LossCheck(n)
    if what == {"update of state"}:
        cause = "An update of the state is made of one replica's rows, as torch's is (reduce_state='mean' averages)."
    elif what == {"gradient of params"} and program.loss.criterion is None:
        cause = (
            "The values agree, and the gradient does not: a backward pass of the function's own (jax.custom_vjp) "
            "combines several rows, as a norm of the gradient does, or is part of a jdp.Mean. Pass the loss as "
            f"{ON_BATCH}."
        )
    elif program.loss.criterion is not None:
        cause = "The outputs of a replica's rows depend on its other rows, in another layer than BatchNorm."
    else:
        cause = (
            "What the function returns is no mean, sum or jdp.Mean of values that are computed from one row each: it "
            f"combines rows with other rows, as a variance or a loss of pairs does. Pass the loss as {ON_BATCH}."
        )
    if steps > 1:
        cause += f" With accumulate_steps={steps}, BatchNorm and the loss see the rows of one microbatch."
    return LossCheck(n, tuple(lines), cause)


def _compared_parts(found: Gradients, program: Program) -> tuple[Tree, Tree, Tree, Tree]:
    (loss, metrics), (state, _) = found.out, found.state
    return loss, metrics, inexact_arrays_of(state), program.view(found.grads)


def _difference(a: Any, b: Any, least: float, narrowest: float, here: str) -> str:
    """Returns how the array `a`, which was computed `here`, differs from `b`, or "" if they agree up to rounding.

    The relative tolerance is the square root of `narrowest` or of their dtype's `eps`, whichever is larger.
    """
    if np.shape(a) != np.shape(b):
        return f"shape {np.shape(a)} {here}, {np.shape(b)} on one"
    if not _is_inexact(b):
        return "" if np.array_equal(a, b) else f"{_short_value(a)} {here}, {_short_value(b)} on one"
    wide = np.complex128 if np.iscomplexobj(b) else np.float64
    rounding = max(narrowest, float(jnp.finfo(b.dtype).eps)) ** 0.5
    a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = np.abs(a - b)
    alike = (gap <= rounding * max(_largest(b), least, 1e-6)) | (a == b) | np.isnan(a) & np.isnan(b)
    if np.all(alike):
        return ""
    if not b.ndim:
        return f"{_short_value(a)} {here}, {_short_value(b)} on one"
    worst = np.unravel_index(np.argmax(np.where(alike, 0, np.nan_to_num(gap, nan=np.inf))), b.shape)
    at = ", ".join(map(str, worst))
    return f"{_short_value(a[worst])} {here}, {_short_value(b[worst])} on one, and most so at [{at}]"


def _largest(x: Any) -> float:
    """Returns the largest absolute value of the finite entries."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))


def _short_value(x: Any) -> str:
    return f"{x.item():.6g}" if not np.ndim(x) else str(x)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _as_numpy(tree: Tree) -> Tree:
    """Returns the tree as NumPy arrays, each with all rows."""
    tree = map_scattered(lambda s: s._layout.fill(_all_rows_on_one(s)), tree)
    tree = jax.tree.map(lambda x: x if getattr(x, "is_fully_addressable", True) else x.addressable_data(0), tree)
    return jax.tree.map(np.asarray, tree)


def _all_rows_on_one(s: Scattered) -> list[Any]:
    """Gathers all rows of `s` on every device, without padding, and returns one device's copies."""
    layout = s._layout
    run = jax.jit(lambda arrays: unpadded(Scattered(arrays, layout)), out_shardings=layout.mesh.replicated)
    return [x.addressable_data(0) for x in run(list(s._arrays))]


def _whole_batch(batch: Scattered, one: ReplicaMesh) -> Scattered:
    """Returns the batch of all replicas as the batch of a single replica on the mesh `one`."""
    layout, rows = batch._layout, (sum(batch._layout.sizes),)

    def leaf(x: Any) -> Any:
        return Cut(x.axis, (sum(x.sizes),)) if isinstance(x, Cut) else x

    to = Layout(layout.treedef, tuple(map(leaf, layout.leaves)), rows, one, layout.dim, 1)
    return Scattered(jax.device_put(_all_rows_on_one(batch), list(to.shardings)), to)


def _on_one(state: TrainState, mesh: ReplicaMesh, one: ReplicaMesh) -> TrainState:
    whole = jax.jit(lambda x: x, out_shardings=mesh.replicated)(state)
    return jax.tree.map(lambda x: jax.device_put(x.addressable_data(0), one.replicated), whole)


def _traced(program: Program, state: TrainState, batch: Scattered) -> tuple[bool, float]:
    """Returns whether the loss depends on a random key of the state or batch, and the largest `eps` of its dtypes."""
    operands, treedef = jax.tree.flatten((state, batch))

    def loss(*operands: Any) -> Any:
        return program.gradients(*treedef.unflatten(operands)).out[0]

    jaxpr, keys = jax.make_jaxpr(loss)(*operands), [is_key(x) for x in operands]
    dtypes = {v.aval.dtype for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")}
    rounding = [float(jnp.finfo(x).eps) for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    return any(keys) and reached(jaxpr, keys)[0], max(rounding, default=0.0)
