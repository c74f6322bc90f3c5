"""prefetch scatters the next batches while the current one is in use."""

from __future__ import annotations

import collections
import copy
import itertools
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.agreement import Finish, begin, layout_of_all, without_rows
from .._core.inputs import ARRAYS, flatten_batch
from .._core.layout import Cut, Tree, as_int
from .._core.replica_mesh import outside_of_mesh
from .._core.scatter import Cutting, Prepared, as_scattered, prepare, put_early, sizes_of_all
from .._core.scattered import Scattered, holds_scattered, is_scattered, leaf_by_leaf
from .._model.config import Config, Wrapper, axes_of_batch, leaf_by_leaf_of, take_objects
from .._model.nnx import put_nodes, stop_at_objects
from .._processes.coordination import DesyncError


def prefetch(dp: Wrapper[object], batches: Iterable[Tree], size: int = 2, *, in_axes: Tree = None) -> Prefetched:
    """Scatters the next batches ahead: yields each batch, in order, with a `jdp.Scattered` for each of its arrays.

    `for batch in dp.prefetch(loader): state, metrics = step(state, batch)`. While a step runs, the next batches go to
    the devices.

    What it yields has the containers of the batch, and can be used in its place, as a whole or in parts: every call
    takes a `jdp.Scattered` where it takes an array, and `jdp.gather` gives the batch back. Python values, strings, None
    and NNX objects stay what they are. Batches are copied, so that the loader may use its buffers again, except those
    of a torch `DataLoader` that makes new tensors for each. An exception of the loader comes after the batches before
    it.

    With several processes, each passes its own batches, as many as it has, of any size. The loop goes on until all
    processes have run out of batches; one that has run out gets batches with no rows. The processes tell each other
    about a batch `size` batches ahead, so that no step waits for it.

    The loader is up to `size` batches ahead of the loop. To go on after a restart, save the number of batches that
    the loop has taken, and not the loader's own position. For data that can be indexed there is `dp.batches`, which
    counts them: each process reads its own rows, each row comes once, and a run can go on after a restart.

    Args:
        batches: a list of batches, or a loader: any iterable of pytrees of arrays (jax or numpy arrays, torch
            tensors).
        size: how many batches are on the devices ahead of the one in use.
        in_axes: as in `jax.vmap`, a tree prefix of each batch: an int, None (replicated), or a tuple,
            list or dict of them. Default: that of the wrapper, with which a tuple is the arguments of a call, and
            anything else the first one; without, `dim` for all.

    Returns:
        An iterator for one loop, whose `len()` is that of `batches` where these have one, in a job of one process.

    Raises:
        TypeError: `batches` is one array or one batch.
        ValueError: `size` is negative; or, when its turn comes, a batch that cannot be cut.
        RuntimeError: a second loop over what it returned, when all batches of a loader have been taken.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x, y: x * w + y, devices=[0])
        >>> [dp(2.0, x, y).tolist() for x, y in dp.prefetch([(np.arange(2.0), np.ones(2))])]
        [[1.0, 3.0]]

    Source: `prefetch_to_device` in flax/jax_utils.py.
    """
    number = as_int(size)
    if number is None or number < 0:
        raise ValueError(f"jdp.prefetch: size is {size!r}; it is how many batches wait ahead. Pass 0 or more.")
    refuse_one_batch(batches, "prefetch")
    scattered = _scattered(dp._config, batches, number, copy.deepcopy(in_axes))
    return Prefetched(scattered, batches, dp._config.mesh.spans_processes)


class Prefetched(Iterator[Tree]):
    """The iterator that `dp.prefetch` returns; it knows how many batches there are, if the loader does."""

    def __init__(self, batches: Generator[Tree], loader: Iterable[Tree], several: bool) -> None:
        self._batches, self._loader, self._several = batches, loader, several
        self._ended = False

    def __iter__(self) -> Iterator[Tree]:
        if self._ended and not isinstance(self._loader, Iterator):  # the loader would begin again, as in torch
            raise RuntimeError(
                "jdp.prefetch: this prefetch has ended, and a second loop would get no batches; it goes through the "
                "loader once. Call dp.prefetch(loader) again for each epoch."
            )
        return self

    def __next__(self) -> Tree:
        self._ended = True  # also after an exception
        batch = next(self._batches)
        self._ended = False
        return batch

    def __len__(self) -> int:
        """Returns the number of all batches, including those that were taken already."""
        if self._several:
            raise TypeError(
                "jdp.prefetch: each process has as many batches as its loader gives, and goes on until all have run "
                "out; one process does not know how many that are. Count them, or use dp.batches, which has a length."
            )
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """Frees the batches that wait, as a generator's `close` does."""
        self._batches.close()
        self._ended = True


def _scattered(config: Config, batches: Iterable[Tree], size: int, in_axes: Tree) -> Generator[Tree]:
    """Returns the batches, scattered `size` ahead."""
    layouts, convert = config.layouts_of(in_axes), _to_numpy(batches)

    def host(batch: Tree) -> Tree:
        leaves, treedef = flatten_batch(batch, "prefetch", "batch", stop_at_objects)
        return treedef.unflatten(map(convert, leaves))

    source = map(host, (batch for batch in batches))  # a loader that ends may begin again when it is asked once more
    if not config.mesh.spans_processes:
        scattered = outside_of_mesh(leaf_by_leaf_of, "prefetch")
        return ahead(source, lambda batch: scattered(config, batch, in_axes, layouts), size)

    how = Cutting(config.mesh, config.dim, "prefetch", "batch", replicas=config.replicas)

    def prepare_batch(batch: Tree) -> Prepared:
        if holds_scattered(batch):
            raise ValueError("jdp.prefetch: a batch is scattered already; prefetch does that. Pass the arrays.")
        inputs, nodes = take_objects(config, batch, "prefetch")
        return prepare(inputs, how._replace(axes=axes_of_batch(config, batch, in_axes)))._replace(nodes=nodes)

    return together(map(prepare_batch, source), prepare_batch, how, size)


def refuse_one_batch(batches: Any, verb: str) -> None:
    """Raises a `TypeError` for a single batch, and for an object that cannot be iterated over."""
    what, spelling = None, "batch"
    if is_scattered(batches):
        what = f"a jdp.Scattered of {len(batches)} chunks, and each of them"
    elif _is_array(batches):
        what, spelling = f"one array of shape {tuple(batches.shape)}, and each of its rows", "x"
    elif isinstance(batches, tuple) and any(is_scattered(x) or _is_array(x) for x in batches):
        spelling = f"({', '.join('xyz'[: len(batches)])}{',' * (len(batches) == 1)})" if len(batches) < 4 else "batch"
        what = f"a tuple of {len(batches)} with arrays in it, and each of them"
    elif isinstance(batches, Mapping):
        what = f"a {type(batches).__name__} of {len(batches)}, and each of its keys"
    if what is not None:
        raise TypeError(
            f"jdp.{verb}: batches is {what} would count as a batch; it is a list of batches or a loader. Pass "
            f"{f'dp.prefetch([{spelling}])' if verb == 'prefetch' else f'[{spelling}]'}."
        )
    if isinstance(batches, str | bytes) or not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"jdp.{verb}: batches is a {type(batches).__name__}, which holds no batches; it is a list of "
            f"batches or a loader. Pass one of these."
        )


def _to_numpy(batches: Any) -> Callable[[Any], Any]:
    """Returns the function that converts an array of a batch to numpy, in memory that the loader does not reuse."""
    # A batch waits, and device_put may alias its memory, so it is copied. A DataLoader that collates rows by its
    # default makes new tensors each time.
    data = sys.modules.get("torch.utils.data")  # a user of torch's loader has imported it
    fresh = (
        data is not None
        and isinstance(batches, data.DataLoader)
        and batches.batch_sampler is not None
        and batches.collate_fn is data.default_collate
    )

    def convert(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x if isinstance(x, np.ma.MaskedArray) else _copy(x)  # scatter refuses a masked one
        if not is_tensor(x):
            return x
        array = numpy_of(x, "prefetch")
        return array if fresh or x.device.type != "cpu" else _copy(array)

    return convert


def _copy(x: np.ndarray) -> np.ndarray:
    """Returns a copy that begins where XLA wants it to, so that a CPU device takes it as it is."""
    if x.dtype.hasobject:
        return x.copy()
    copy = aligned(x.shape, x.dtype)
    copy[...] = x
    return copy


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns new memory for an array of numbers, aligned as XLA wants it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


_ALIGNED = 64  # bytes


def _is_array(x: Any) -> bool:
    return isinstance(x, ARRAYS) or is_tensor(x)


def is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")  # a user of tensors has imported it
    return torch is not None and isinstance(x, torch.Tensor)


def numpy_of(tensor: Any, verb: str) -> np.ndarray:
    """Returns a torch tensor as a numpy array, in the same memory where that is the host's."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"jdp.{verb}: a torch tensor has shape {tuple(tensor.shape)} and layout {tensor.layout}; its buffers have "
            f"no rows. Pass tensor.to_dense()."
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):  # numpy has none: the same bits in JAX's dtype
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
        return bits.numpy().view(jnp.dtype(name))
    return tensor.numpy()


def ahead(batches: Iterable[Tree], scatter: Callable[[Tree], Tree], size: int) -> Generator[Tree]:
    """Yields `scatter(batch)` for each batch, in order, with `size` batches on the devices ahead."""
    # No thread: JAX's transfers are asynchronous already, so that a queue of started ones is all it
    # takes, and there is nothing to leak or to join when the consumer stops early.
    source = iter(batches)  # the caller's own, if it is an iterator: left open, to go on with
    waiting: collections.deque[Tree] = collections.deque()
    failed: BaseException | None = None
    while True:
        try:
            if failed is None:
                waiting.extend(scatter(b) for b in itertools.islice(source, size + 1 - len(waiting)))
        except (Exception, SystemExit, GeneratorExit) as error:  # it comes after the batches before it
            failed = error
        if not waiting:
            break
        yield waiting.popleft()
    if failed is not None:
        raise failed


def together(
    batches: Iterator[Prepared | None], prepare_batch: Callable[[Tree], Prepared], how: Cutting, size: int
) -> Generator[Tree]:
    """Scatters the batches of all processes until all have run out; a process that has run out adds no rows.

    None stands for a batch of which this process has no rows. The processes tell each other about a batch, and put it
    on their devices, `size` batches before they need it.
    """
    last: Prepared | None = None
    tell, of_all = outside_of_mesh(_tell, how.verb), outside_of_mesh(_of_all_processes, how.verb)
    told: collections.deque[_Told] = collections.deque()
    failed: BaseException | None = None
    while True:
        while len(told) <= size:  # also after a failure, because the others go on
            batch = None  # this process has run out
            try:
                batch = None if failed is not None else next(batches, None)
            except (Exception, SystemExit, GeneratorExit) as error:
                failed = error  # it is raised after the batches before it, at the same time in all processes
            told.append(tell(how, batch, failed, last is None and batch is None))
        found = of_all(how, *told.popleft(), last, prepare_batch)
        if found is None:
            return
        s, last = found
        del found
        yield put_nodes(leaf_by_leaf(s), last.nodes)
        del s  # or this batch would lie on the devices until the next is asked for


_Told = tuple[Prepared | None, list[Any], Finish, BaseException | None]
"""A batch that the processes are telling each other about, or None; its arrays on the devices; the function that waits
for the others; and the error of this process, if it has failed."""


def _tell(how: Cutting, batch: Prepared | None, failed: BaseException | None, never: bool) -> _Told:
    """Begins to tell the other processes about a batch, and to put it on this process's devices.

    `never` says that this process has had no batch so far, and so does not know their shapes.
    """
    rows = (0,) * how.mesh.own.size if batch is None else batch.layout.by_device
    outline = None if batch is None else batch.outline
    finish = begin(how.mesh, how.verb, rows, outline, failed, never)
    return batch, [] if batch is None else put_early(batch), finish, failed


def _of_all_processes(
    how: Cutting,
    batch: Prepared | None,
    arrays: list[Any],
    finish: Finish,
    failed: BaseException | None,
    last: Prepared | None,
    prepare_batch: Callable[[Tree], Prepared],
) -> tuple[Scattered, Prepared] | None:
    """Waits for the other processes; returns the batch of all and this process's part, or None if all have run out."""
    try:
        sizes, outline = finish()
    except DesyncError:
        if isinstance(failed, SystemExit):
            sys.exit(failed.code)  # once more: an exit from before a call of jdp counts as caught, without its code
        if failed is not None:
            raise failed from None
        raise
    if not sizes:
        return None
    if batch is None:
        batch = prepare_batch(without_rows(outline, how.verb)) if last is None else _without_rows(last)
        arrays = batch.arrays
    return as_scattered(arrays, layout_of_all(batch.layout, how.mesh, sizes_of_all(sizes, batch.layout, how))), batch


def _without_rows(batch: Prepared) -> Prepared:
    """Returns an empty batch, with the tree, shapes and dtypes of this one."""
    arrays = [
        jax.lax.slice_in_dim(x, 0, 0, axis=leaf.axis) if isinstance(leaf, Cut) else x
        for x, leaf in zip(batch.arrays, batch.layout.arrays, strict=True)
    ]
    return batch._replace(arrays=arrays)
