"""The four steps of a call: scatter, replicate, parallel_apply, gather, as `torch.nn.DataParallel` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._core.devices import DeviceLike, Devices
from .._core.gather import gather, join
from .._core.gather_list import scatter_list
from .._core.layout import Tree
from .._core.programs import dispatch
from .._core.replicate import broadcast, first_leaf, lives_replicated
from .._core.scattered import Scattered, holds_scattered, map_scattered, on_mesh, parts
from .._core.split import split
from .._model.config import Config
from .._model.nnx import Beside
from .calls import remember, steps_of


class Steps:
    """What a call of `jdp.DataParallel` consists of."""

    _config: Config
    module: Any

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Devices
    ) -> tuple[Scattered, Scattered]:
        """Step one: cuts the arguments into chunks. A subclass may replace it, to cut batches of its own."""
        config = self._config
        axes = None
        if config.in_axes is not None:
            in_axes = config.in_axes
            in_axes = tuple(in_axes) if isinstance(in_axes, tuple | list) else (in_axes,) * len(inputs)
            if len(in_axes) != len(inputs):
                raise ValueError(
                    f"jdp.DataParallel: in_axes has {len(in_axes)} entries for {len(inputs)} arguments; as in "
                    f"jax.vmap each positional argument has one. Pass in_axes of that length."
                )
            axes = (in_axes, config.dim)
        own = devices is config.devices
        both = split(
            (tuple(inputs), dict(kwargs)),
            config.mesh_of(devices),
            config.dim,
            verb="DataParallel",
            root=("args", "kwargs"),
            axes=axes,
            layouts=config.layouts if own else None,
            place=False,
        )
        args, kw = parts(both)
        return args, kw

    def replicate(self, tree: Tree, devices: Devices) -> Tree:
        """Step two: puts the parameters whole on every device; those in place stay as they are."""
        return broadcast(tree, self._config.mesh_of(devices), "DataParallel")

    def parallel_apply(self, replicas: Tree, inputs: Scattered, kwargs: Scattered) -> Scattered:
        """Step three: runs the module on every replica, as one program.

        `inputs` and `kwargs` come from `scatter`; lists with one tree per device, as in torch, will do.
        """
        if not isinstance(inputs, Scattered):
            inputs = scatter_list(inputs, self._config.mesh, self._config.dim, "inputs")
        if not isinstance(kwargs, Scattered):
            kwargs = scatter_list(kwargs or [{}], self._config.mesh, self._config.dim, "kwargs")
        inputs, kwargs = (on_mesh(s, self._config.mesh) for s in (inputs, kwargs))
        program = self._config.program(self.module, type(replicas) is Beside)
        return dispatch(program, inputs._layout.mesh, replicas, inputs, kwargs)

    def gather(self, outputs: Scattered, output_device: DeviceLike | None) -> Tree:
        """Step four: concatenates the outputs on the output device."""
        if isinstance(outputs, Scattered):
            return join(outputs, output_device)
        if holds_scattered(outputs):  # a batch, each array of which has its own axis
            return map_scattered(lambda s: join(s, output_device), outputs)
        return gather(outputs, output_device, self._config.dim)

    def _forward(
        self,
        params: Tree,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stateful: bool,
        cut: Sequence[tuple[str, Scattered]],
        home: Tree = None,
    ) -> Any:
        """The four steps; with parameters `Beside` NNX objects what it returns, and the updates of these.

        `stateful`: the program returns (output, state). `cut`: the state with a batch axis, by name. `home`: what of
        the parameters tells where results go, if not all of them do.
        """
        config = self._config
        config.refuse_other_mesh()
        inputs, kw = self.scatter(args, kwargs, config.devices)
        for name, state in cut if isinstance(inputs, Scattered) and isinstance(kw, Scattered) else ():
            batched = inputs._layout.is_cut or kw._layout.is_cut
            if batched and state._layout.is_cut and state.sizes != inputs.sizes:
                raise ValueError(
                    f"jdp.DataParallel: state {name} has {sum(state.sizes)} rows, the batch has {sum(inputs.sizes)}; "
                    f"state with a batch axis is cut like the batch. Pass state of that many rows."
                )
        replicas = self.replicate(params, config.devices)
        outputs = self.parallel_apply(replicas, inputs, kw)
        in_place, beside = replicas is params, type(params) is Beside
        if in_place and not cut and not beside and config.kind != "nnx" and self._takes_own_steps:
            remember(self, params, args, kwargs, inputs, kw, stateful)
        # (The first of the two tests is the fast one.)
        stay = first_leaf(params) is not None if in_place else stateful or config.output_device is None
        home = params if home is None else home
        lives = in_place or not jax.tree.leaves(home) or lives_replicated(home, config.mesh)
        if not beside:
            return self._gathered(outputs, stay and lives, stateful)
        outputs, updates = parts(outputs)
        return self._gathered(outputs, stay and lives, stateful), join(updates, "sharded" if lives else None)

    def _gathered(self, outputs: Scattered, stay: bool, stateful: bool) -> Any:
        """The last step: results come back where the parameters live, which is over the replicas where they `stay`."""
        home = "sharded" if stay else None
        device = self._config.output_device
        device = home if device is None else device
        if not stateful:
            return self.gather(outputs, device)
        out, state = parts(outputs)
        return self.gather(out, device), join(state, home)

    @property
    def _takes_own_steps(self) -> bool:
        """Whether the four steps are these, and no subclass's."""
        return steps_of(self) == _STEPS


_STEPS = Steps.scatter, Steps.replicate, Steps.parallel_apply, Steps.gather
