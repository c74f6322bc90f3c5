"""What the wrapper does around calls: prefetch scatters batches ahead, check_replicas compares what is replicated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from ._check_replicas import check_replicas
from ._config import Config
from ._layout import Tree
from ._prefetch import prefetch, prefetch_together
from ._prepare import Prepared, prepare
from ._processes import spans_processes
from ._scattered import Scattered, is_scattered, placed
from ._split import split


class Batches:
    """What `jdp.DataParallel` does around calls."""

    _config: Config
    module: Any

    def prefetch(self, batches: Iterable[Tree], size: int = 2) -> Iterator[Scattered]:
        """Scatters the next batches ahead: yields `scatter(batch)` for each batch, in order.

        What it yields goes in place of the batch: a call takes a `jdp.Scattered` for any argument. The
        batches are copied, so that the iterable may use its buffers again. An exception of the iterable
        comes after the batches before it.

        Of several processes each passes its own batches, as many as it has, of any size: it goes on until all have run
        out, with batches of no rows for those that have. The processes tell each other one batch ahead, so that no
        step waits for it.

        Args:
            batches: any iterable of pytrees of arrays; with `in_axes` a tuple is the arguments, anything
                else the first one.
            size: how many batches are on the devices ahead of the one in use.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
            >>> [dp(2.0, x).tolist() for x in dp.prefetch([np.arange(2.0), np.arange(3.0)])]
            [[0.0, 2.0], [0.0, 2.0, 4.0]]

        Source: `prefetch_to_device` in flax/jax_utils.py.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"jdp.prefetch: size is {size!r}; it is how many batches wait ahead. Pass 0 or more.")

        # Copied, for a loader may fill its buffer anew while the batch waits, and device_put may alias it.
        copied = (jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch) for batch in batches)
        config = self._config
        if not spans_processes(config.mesh):
            return prefetch(copied, lambda batch: placed(self._scatter_batch(batch, "prefetch")), size)

        def begin(batch: Tree) -> Prepared:
            if any(map(is_scattered, jax.tree.leaves(batch, is_leaf=is_scattered))):
                raise ValueError(
                    "jdp.prefetch: a batch is scattered already; it is what prefetch does. Pass the arrays."
                )
            axes, verb = self._batch_axes(batch), "prefetch"
            return cast(Prepared, prepare(batch, config.mesh, config.dim, verb=verb, root="batch", axes=axes))

        return prefetch_together(copied, begin, config.mesh, config.batch_layouts, size)

    def _scatter_batch(self, batch: Tree, verb: str) -> Scattered:
        """One batch, scattered: a tuple is the arguments where `in_axes` says so, else the batch is one."""
        config = self._config
        if type(batch) is Scattered and batch._layout.mesh == config.mesh:
            return batch
        # The batch of numpy arrays that was seen before: a step on a small model is no longer than all that follows.
        leaves, treedef = jax.tree.flatten(batch)
        seen = config.batch_layouts.get((treedef, *[(x.shape, x.dtype) for x in leaves if type(x) is np.ndarray]))
        if seen is not None and len(leaves) == len(seen.arrays) and seen.is_even and jax.process_count() == 1:
            return Scattered(leaves, seen)
        axes, layouts = self._batch_axes(batch), config.batch_layouts
        return split(batch, config.mesh, config.dim, verb=verb, root="batch", axes=axes, layouts=layouts, place=False)

    def _batch_axes(self, batch: Tree) -> Tree:
        axes = self._config.in_axes
        if isinstance(axes, tuple | list):
            axes = tuple(axes) if isinstance(batch, tuple) and len(batch) == len(axes) else axes[0]
        return axes

    def check_replicas(self, tree: Tree = None) -> None:
        """Compares the replicas of a tree bit for bit, in the devices: each leaf is one value.

        JAX does not notice where copies of a replicated array differ: after a fault of a device, or with several
        processes that did not start alike. Leaves that are cut, or on one device, have no copies to compare. With
        several processes all make this call. `train_step(..., check_replicas=100)` does it on the way.

        Args:
            tree: parameters, a `jdp.TrainState`, ...; None is the state of an NNX module.

        Raises:
            ValueError: some differ; names the leaves, and for each the processes and devices.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
            >>> dp.check_replicas(jdp.replicate({"w": np.ones(3)}, devices=[0]))

        Source: `_verify_param_shape_across_processes` in torch/nn/parallel/distributed.py, which compares shapes.
        """
        if tree is None:
            self._needs_nnx("check_replicas")
            tree = nnx.state(self.module)
        check_replicas(tree, self._config.mesh, "check_replicas")

    def _needs_nnx(self, method: str) -> None:
        if self._config.kind != "nnx" and method == "check_replicas":
            raise TypeError(
                "jdp.check_replicas: tree is missing; only an NNX module holds its own state. Pass the variables."
            )
        if self._config.kind != "nnx":
            raise TypeError(
                f"jdp.DataParallel: {method}() sets the mode of an NNX module, and this wraps none; it would do "
                f"nothing. Pass the mode as an argument, dp.apply(variables, x, train={method == 'train'})."
            )
