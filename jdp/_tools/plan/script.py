"""Captures the training step of a user's script: runs the script up to its first step, which is not run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..._core.devices import Device
from ..._core.programs import intercept
from ..._core.replica_mesh import ReplicaMesh, make_mesh, replica_mesh
from ..._core.scattered import Scattered
from ..._train.program import Program
from ..._train.state import TrainState
from ..explain.calls import Captured, shape_of, spread
from ..script import print_error, run_script


class PlanError(Exception):
    """The reason why a plan cannot be made, as a message for the user."""


WAYS = ("replicated", "shard_optimizer", "shard_params")
"""Which part of its state a step may cut over the devices: none, or the one that the argument of `train_step` names."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step as the script called it, in shapes."""

    program: Program
    state: TrainState
    batch: Scattered

    @property
    def rows(self) -> int:
        """The rows of the batch on the device that has most."""
        return max(self.batch._layout.by_device)

    @property
    def way(self) -> str:
        """How the script's step keeps its state: one of `WAYS`."""
        options = self.program.options
        return "shard_params" if options.shard_params else "shard_optimizer" if options.shard_optimizer else WAYS[0]

    @property
    def is_cut(self) -> bool:
        """True if the batch is cut: a replicated batch has no rows to plan."""
        return self.batch._layout.is_cut

    @property
    def inside(self) -> int:
        """The number of devices of a replica."""
        return len(self.program.config.mesh.groups[0])

    def mesh_of(self, devices: Sequence[Device]) -> ReplicaMesh:
        """Returns the mesh of these devices, with as many in each replica as the script's; one device is a replica.

        Raises:
            ValueError: the devices are no whole number of replicas.
        """
        mesh, name = self.program.config.mesh, self.program.config.axis_name
        if not mesh.inner_axes or len(devices) == 1:
            return make_mesh(tuple(devices), name)
        replicas, more = divmod(len(devices), self.inside)
        if more or not replicas:
            raise ValueError(f"{len(devices)} devices are no whole number of replicas of {self.inside} devices")
        sizes = [replicas if axis == name else size for axis, size in mesh.jax_mesh.shape.items()]
        return replica_mesh(Mesh(np.array(devices, dtype=object).reshape(sizes), mesh.jax_mesh.axis_names), name)

    def on(self, mesh: ReplicaMesh, rows: int, way: str | None = None) -> tuple[Program, TrainState, Scattered]:
        """Returns the same step on other devices, with `rows` on each, and its state kept in that way of `WAYS`."""
        params = (way or self.way) == "shard_params"
        changed = {"shard_params": params, "shard_optimizer": params or (way or self.way) == "shard_optimizer"}
        return self.program.like(mesh, **changed), self.state, spread(self.batch, mesh, rows)


def capture_step(script: str, args: Sequence[str], values: bool = True) -> Step:
    """Returns the first training step of the script, which runs on the CPU; what it prints goes to stderr.

    Without `values` JAX traces the script: its arrays are shapes, which take no memory.

    Raises:
        PlanError: the script fails or ends before its first step.
    """
    if not os.path.isfile(script):
        raise PlanError(f"jdp.plan: there is no file {script}; plan runs a script up to its first step. Pass its path.")
    found: list[Step] = []
    how: str = ""
    error: Exception | None = None

    def stop(program: Any, *operands: Any) -> None:
        if not isinstance(program, Program):
            return
        state, batch = operands
        found.append(Step(program, jax.tree.map(lambda x: shape_of(x, None), state), shape_of(batch, None)))
        raise Captured  # it ends the script

    # The script's arrays can be anywhere, and a GPU of this machine has no part in the plan.
    jax.config.update("jax_platforms", "cpu")
    # Compilers are a tenth faster if they do not get the line of Python that each instruction is from.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    call = (lambda run: run()) if values else jax.eval_shape
    # All steps of train_step (and their `lower`) call `stop`, after all checks.
    with intercept(stop, shapes=not values), contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Captured):
        how, error = run_script(script, args, call)
    if not values and isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        how = "looked at the value of an array, of which --no-values leaves the shape,"
    if not found and error is not None:
        print_error(error, script)
    if not found:
        raise PlanError(
            f"jdp.plan: {script} {how} before a training step; plan reads the first call of what dp.train_step made. "
            f"Pass a script that trains with one, and its own arguments after --."
        )
    if not values and found[0].program.config.mesh.inner_axes:
        raise PlanError(
            f"jdp.plan: {script} trains replicas of several devices, and --no-values leaves only shapes, which do not "
            f"say how the parameters lie inside of a replica. Run it without --no-values."
        )
    return found[0]
