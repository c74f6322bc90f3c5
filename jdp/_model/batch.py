"""What the wrapper does around calls: prefetch scatters batches ahead, check_replicas compares what is replicated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx

from .._core.devices import spans_processes
from .._core.fingerprint import check_replicas
from .._core.inputs import ARRAYS, USUAL, no_further, refuse_loader
from .._core.layout import Layout, Tree
from .._core.programs import Recent
from .._core.scatter import Prepared, flat, known_by, prepare
from .._core.scattered import Scattered, holds_scattered, leaf_by_leaf, placed
from .._core.split import split
from .._wrapper.prefetch import on_host, prefetch, prefetch_together, refuse_one_batch
from .config import Config
from .nnx import is_node, put_nodes, take_nodes


class BatchAxes(NamedTuple):
    """The `in_axes` of a door of its own, and the layouts of the batches that were cut by them."""

    in_axes: Tree
    layouts: Recent[Any, Layout]


class Taken(NamedTuple):
    """A batch in which there are NNX objects: scattered with stand-ins for them, and the objects by number."""

    rows: Scattered
    nodes: dict[int, Any]


def taken(batch: Scattered | Taken) -> tuple[Scattered, list[Any]]:
    """A batch, scattered, and the NNX objects in it."""
    return (batch.rows, list(batch.nodes.values())) if isinstance(batch, Taken) else (batch, [])


class Batches:
    """What `jdp.DataParallel` does around calls."""

    _config: Config
    module: Any

    def prefetch(self, batches: Iterable[Tree], size: int = 2, *, in_axes: Tree = None) -> Iterator[Tree]:
        """Scatters the next batches ahead: yields each batch, in order, with a `jdp.Scattered` for each of its arrays.

        What it yields has the containers of the batch, and goes in its place, as a whole or in parts: every call takes
        a `jdp.Scattered` where it takes an array, and `jdp.gather` gives the batch back. Python values, strings, None
        and NNX objects stay what they are. Batches are copied, so that the loader may use its buffers again; not
        those of a torch `DataLoader` that makes each of new tensors. An exception of the loader comes after the
        batches before it.

        Of several processes each passes its own batches, as many as it has, of any size: it goes on until all have run
        out, with batches of no rows for those that have. The processes tell each other one batch ahead, so that no
        step waits for it.

        Args:
            batches: a list of batches, or a loader: any iterable of pytrees of arrays (jax or numpy arrays, torch
                tensors).
            size: how many batches are on the devices ahead of the one in use.
            in_axes: as in `jax.vmap`, a tree prefix of each batch: an int, None (whole to every replica), or a tuple,
                list or dict of them. Default: that of the wrapper, with which a tuple is the arguments of a call, and
                anything else the first one; without, `dim` for all.

        Raises:
            TypeError: `batches` is one array or one batch.
            ValueError: `size` is negative; in its turn, a batch that cannot be cut.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x, y: x * w + y, devices=[0])
            >>> [dp(2.0, x, y).tolist() for x, y in dp.prefetch([(np.arange(2.0), np.ones(2))])]
            [[1.0, 3.0]]

        Source: `prefetch_to_device` in flax/jax_utils.py.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"jdp.prefetch: size is {size!r}; it is how many batches wait ahead. Pass 0 or more.")
        refuse_one_batch(batches)
        config, own = self._config, None if in_axes is None else BatchAxes(in_axes, Recent())
        convert = on_host(batches)

        def host(batch: Tree) -> Tree:
            leaves, treedef = flat(batch, "prefetch", "batch", _stop)
            return treedef.unflatten(map(convert, leaves))

        source = map(host, batches)
        if not spans_processes(config.mesh):
            return prefetch(source, lambda batch: self._leaf_by_leaf(batch, own), size)

        def begin(batch: Tree) -> Prepared:
            if holds_scattered(batch):
                raise ValueError(
                    "jdp.prefetch: a batch is scattered already; it is what prefetch does. Pass the arrays."
                )
            inputs, nodes = self._take_nodes(batch)
            axes = self._axes_of(batch, own)
            prepared = prepare(inputs, config.mesh, config.dim, verb="prefetch", root="batch", axes=axes)
            return cast(Prepared, prepared)._replace(nodes=nodes)

        return prefetch_together(source, begin, config.mesh, config.batch_layouts, size)

    def _leaf_by_leaf(self, batch: Tree, own: BatchAxes | None) -> Tree:
        """A batch, with a `Scattered` for each of its arrays; one that is a `Scattered` stays it."""
        found = self._scatter_batch(batch, "prefetch", own)
        if isinstance(found, Taken):
            return put_nodes(leaf_by_leaf(placed(found.rows)), found.nodes)
        return placed(found) if type(batch) is Scattered else leaf_by_leaf(placed(found))

    def _scatter_batch(self, batch: Tree, verb: str, own: BatchAxes | None = None) -> Scattered | Taken:
        """One batch, scattered: by the `in_axes` of a door of its `own`, else by the wrapper's."""
        config = self._config
        if type(batch) is Taken or type(batch) is Scattered and batch._layout.mesh == config.mesh:
            return batch
        layouts = config.batch_layouts if own is None else own.layouts
        # A batch that was seen before: a step on a small model is no longer than all that follows.
        leaves, treedef = flat(batch, verb, "batch", _stop)
        seen = layouts.used((treedef, *map(known_by, leaves)))
        if seen is not None and (arrays := _at_hand(leaves, seen)) is not None:
            return Scattered(arrays, seen)
        if len(leaves) == 1 and leaves[0] is batch and not is_node(batch):
            refuse_loader(batch, verb)
        inputs, nodes = self._take_nodes(batch) if any(map(is_node, leaves)) else (batch, {})
        axes = self._axes_of(batch, own)
        rows = split(inputs, config.mesh, config.dim, verb=verb, root="batch", axes=axes, layouts=layouts, place=False)
        return Taken(rows, nodes) if nodes else rows

    def _take_nodes(self, batch: Tree) -> tuple[Tree, dict[int, Any]]:
        """The batch with stand-ins for its NNX objects, and these by number: in a step an NNX model is number 0."""
        first = int(self._config.kind == "nnx")
        inputs, nodes = take_nodes(batch, first)
        return inputs, dict(enumerate(nodes, first))

    def _axes_of(self, batch: Tree, own: BatchAxes | None) -> Tree:
        """An axis, or None, for each part of a batch: of a list and a tuple either stands for the other."""
        axes = self._config.in_axes if own is None else own.in_axes
        if type(axes) not in (tuple, list):
            return axes
        fits = isinstance(batch, tuple | list) and len(batch) == len(axes)
        if own is None and not fits:
            return axes[0]
        return type(batch)(axes) if type(batch) in (tuple, list) else axes

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


def _stop(x: Any) -> bool:
    """Where flattening a batch stops: as anywhere else, and at NNX objects."""
    return type(x) not in USUAL and (no_further(x) or is_node(x))


def _at_hand(leaves: Sequence[Any], layout: Layout) -> list[Any] | None:
    """The arrays of a batch of that layout, if nothing is to be done to them; None if something is."""
    arrays: list[Any] = []
    for x in leaves:
        if type(x) is Scattered:
            arrays += x._arrays
        elif isinstance(x, ARRAYS):  # numpy's, for the program's call to move; of several processes no program takes it
            if type(x) is not np.ndarray or not layout.is_even or jax.process_count() > 1:
                return None
            arrays.append(x)
    return arrays
