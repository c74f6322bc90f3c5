"""batches cuts data that can be indexed into batches: every row once an epoch, on any number of devices."""

from __future__ import annotations

import atexit
import collections
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from .._core.layout import Tree, as_int, chunk_sizes
from .._core.replica_mesh import outside_of_mesh
from .._core.scatter import Cutting, Prepared, prepare
from .._model.config import Config, Wrapper, axes_of_batch, leaf_by_leaf_of
from .prefetch import ahead, together
from .rows import VERB, Columns, Rows, columns_or_rows


def batches(
    dp: Wrapper[object],
    data: Any,
    batch_size: int,
    *,
    seed: int | None = None,
    start: int = 0,
    epochs: int | None = 1,
    drop_last: bool = False,
    size: int = 2,
    workers: int = 1,
) -> Batches:
    """Yields batches of data that can be indexed: every row once an epoch, on any number of devices and processes.

    `for batch in dp.batches(data, 256, seed=0): state, metrics = step(state, batch)`.

    It yields what `dp.prefetch` yields: the containers of the data, or of a row, with a `jdp.Scattered` for each
    array, `size` batches ahead. With several processes, each passes the same arguments, and reads only the rows of its
    own chunks (`jdp.chunk_sizes` of the whole batch). A process without rows in a batch learns its shapes from the
    others.

    Without a seed the rows come in the order of the data. With one, those of epoch 0, 1, ... come in the order
    `np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(rows)`, and nothing else
    influences it. (A later numpy may draw another permutation: keep its version while a run goes on.)

    To go on after a restart, save `batches.taken` and pass it as `start`. It counts the batches that the loop has
    taken, over all epochs; `state.step` does not count those that `skip_nonfinite` has skipped. No row is read again
    to get there, and the number of processes may be another; `batch_size` and `drop_last` must stay.

        with jdp.Checkpointer("run", every=100) as checkpointer:
            state, taken = checkpointer.restore(step.init(variables))
            batches = dp.batches(data, 256, seed=0, epochs=10, start=taken or 0)
            for batch in batches:
                state, metrics = step(state, batch)
                checkpointer.save(batches.taken, state, data=batches.taken)

    Args:
        data: a tree of arrays (one array, or a dict, tuple, NamedTuple or registered dataclass of numpy or jax arrays
            or torch tensors), which is cut along its rows as a batch is, by the `in_axes` and `dim` of the wrapper. Or
            rows: a list, a map-style `Dataset` of torch, one of Hugging Face's `datasets`, or whatever has `len` and
            takes an index. A row is a number, array or tensor, or a tree of them; a list of numbers in it is an array.
            All rows have one shape and dtype, and are stacked leaf by leaf.
        batch_size: rows in a batch, over all devices of all processes.
        seed: shuffles the rows, differently in each epoch; None keeps their order.
        start: how many batches were taken already, in all epochs. From the end on there are none.
        epochs: how often each row comes; None never ends.
        drop_last: leaves out the last batch of each epoch where it has fewer rows.
        size: how many batches are on the devices ahead of the one in use; as many again, or one, are read ahead.
        workers: threads that read rows; with several the data is indexed by several at once. They end with the loop.

    Returns:
        An iterable with a length. Each loop over it begins at `start`, and the length is the number of batches from
        there to the end. `taken` is `start` plus the number of batches that the loop has taken, `per_epoch` the number
        of batches in an epoch.

    Raises:
        ValueError: the data has no rows, or arrays with different numbers of rows; a number is out of its range;
            `drop_last`, and an epoch has no batch; or, when it is read, a row unlike the first one (the error names
            it).
        TypeError: `data` can't be indexed, or has no length; a row holds something else.
        DesyncError: the processes passed different arguments, or one of them has failed. An error that `data` raises
            ends the loop in all processes; a note has the row's index.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x, y: w * x + y, devices=[0])
        >>> data = np.arange(5.0), np.ones(5)
        >>> batches = dp.batches(data, 2, epochs=2, start=1)
        >>> len(batches), [dp(2.0, x, y).tolist() for x, y in batches]
        (5, [[5.0, 7.0], [9.0], [1.0, 3.0], [5.0, 7.0], [9.0]])
        >>> batches.taken, batches.per_epoch
        (6, 3)

    Source: `DataLoader` and `DistributedSampler` in torch/utils/data, which pads the last batch with rows seen before.
    """
    return Batches(
        dp._config,
        columns_or_rows(dp._config, data),
        batch_size=_number("batch_size", batch_size, 1, "the rows of a batch"),
        seed=None if seed is None else _number("seed", seed, 0, "None, or the number that the order follows from"),
        start=_number("start", start, 0, "how many batches were taken already"),
        epochs=None if epochs is None else _number("epochs", epochs, 0, "None, or how often each row comes"),
        drop_last=bool(drop_last),
        size=_number("size", size, 0, "how many batches wait ahead"),
        workers=_number("workers", workers, 1, "how many threads read rows"),
    )


def _number(name: str, value: Any, least: int, what: str) -> int:
    number = as_int(value)
    if number is None and getattr(value, "shape", ()):  # dp.batches(x, y), as in torch's TensorDataset(x, y)
        raise ValueError(f"jdp.{VERB}: {name} is an array; the data are one argument. Pass dp.batches((x, y), 64).")
    if number is None or number < least:
        raise ValueError(f"jdp.{VERB}: {name} is {value!r}; it is {what}. Pass an int, {least} or more.")
    return number


class Batches:
    """Batches of data that can be indexed, made by `dp.batches(data, 256)`: an iterable that counts what was taken.

    Attributes:
        epochs: how often each row comes; None if they never end.
        per_epoch: the number of batches of an epoch.
        start: the number of batches that were taken before.
        taken: `start` and the number of batches that the newest loop has taken; pass it as `start` to go on from there.

    Example:
        >>> import jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
        >>> batches: jdp.Batches = dp.batches(np.arange(10.0), 4, seed=0, epochs=1)
        >>> [batch.rows for batch in batches], batches.per_epoch, batches.taken
        ([4, 4, 2], 3, 3)
    """

    def __init__(
        self,
        config: Config,
        data: Columns | Rows,
        *,
        batch_size: int,
        seed: int | None,
        start: int,
        epochs: int | None,
        drop_last: bool,
        size: int,
        workers: int,
    ) -> None:
        self._config, self._data = config, data
        self._cutting = Cutting(config.mesh, config.dim, VERB, "batch", replicas=config.replicas)
        self._batch_size, self._seed, self._size, self._workers = batch_size, seed, size, workers
        self.epochs: int | None = epochs
        self.start: int = start
        self.taken: int = start
        self._newest = object()  # stands for the newest loop
        self.per_epoch: int = data.count // batch_size if drop_last else -(-data.count // batch_size)
        if not self.per_epoch:
            raise ValueError(
                f"jdp.{VERB}: data has {data.count} rows, fewer than batch_size, {batch_size}, and drop_last leaves "
                f"them out; an epoch has a batch at least. Pass drop_last=False, or a smaller batch_size."
            )
        # This must be equal on all processes, so that they read the rows in the same order.
        self._plan = f"{data.count} rows, {batch_size=}, {seed=}, {start=}, {epochs=}, {drop_last=}"

    def __len__(self) -> int:
        """Returns how many batches there are from `start` on."""
        if self.epochs is None:
            raise TypeError(f"jdp.{VERB}: epochs is None; batches that never end have no length. Pass epochs.")
        return max(0, self.epochs * self.per_epoch - self.start)

    def __iter__(self) -> Iterator[Tree]:
        config = self._config
        loop = self._newest = object()
        self.taken = self.start
        threads = Threads(self._workers)
        # A thread that runs on while Python ends may crash it, and one that Python waits for may never end.
        atexit.register(threads.stop, 1.0)
        unregister = atexit.unregister  # if the loop is still open when Python ends, modules are gone by then
        try:
            read = self._read(threads)
            if config.mesh.spans_processes:
                own = itertools.starmap(lambda x, sizes: None if x is None else self._prepared(x, sizes), read)
                scattered = together(own, self._prepared, self._cutting, self._size)
            else:
                layouts, scatter = config.batch_layouts, outside_of_mesh(leaf_by_leaf_of, VERB)
                scattered = ahead(read, lambda batch: scatter(config, batch[0], None, layouts), self._size)
            # `map` and not a loop: the loop's variable would keep a batch on the devices until the next one is there.
            yield from map(self._took, itertools.repeat(loop), itertools.count(self.start + 1), scattered)
        finally:
            unregister(threads.stop)
            threads.stop()

    def _took(self, loop: object, number: int, batch: Tree) -> Tree:
        if loop is self._newest:
            self.taken = number
        return batch

    def _read(self, threads: Threads) -> Iterator[tuple[Tree, Sequence[int]]]:
        """Yields the rows of this process in each batch (None if it has none), and the number for each replica."""
        own = map(self._own, self._rows())
        reading: collections.deque[Future[tuple[Tree, Sequence[int]]]] = collections.deque()
        while True:
            for rows, sizes in itertools.islice(own, 1 + max(1, self._size) - len(reading)):
                reading.append(begin_to_read(self._data, rows, sizes, threads))
            if not reading:
                return
            yield reading.popleft().result()

    def _rows(self) -> Iterator[np.ndarray]:
        """Yields the rows of each batch, of all processes."""
        epoch, order = None, np.arange(self._data.count)
        numbers = itertools.count(self.start)
        for number in numbers if self.epochs is None else itertools.islice(numbers, len(self)):
            if self._seed is not None and epoch != number // self.per_epoch:
                epoch = number // self.per_epoch
                order = order_of(self._data.count, self._seed, epoch)
            first = number % self.per_epoch * self._batch_size
            yield order[first : first + self._batch_size]

    def _own(self, rows: np.ndarray) -> tuple[np.ndarray, Sequence[int]]:
        """Returns the rows of a batch that belong to this process, and how many each of its replicas has."""
        mesh, each = self._config.mesh, self._config.per_device
        if not mesh.spans_processes:
            return rows, ()
        chunks = np.split(rows, np.cumsum(chunk_sizes(len(rows), mesh.size * each)))  # the last is empty
        replicas = [index * each + i for index in mesh.own_indices for i in range(each)]
        own = [chunks[min(i, len(chunks) - 1)] for i in replicas]  # the empty one if a replica has no chunk
        return np.concatenate(own), [len(chunk) for chunk in own]

    def _prepared(self, batch: Tree, sizes: Sequence[int] | None = None) -> Prepared:
        """Returns a batch that is ready to be cut, with the outline that the other processes get."""
        axes = axes_of_batch(self._config, batch)
        found = prepare(batch, self._cutting._replace(axes=axes, sizes=sizes))
        assert found.outline is not None
        return found._replace(outline=(*found.outline, (f"dp.{VERB}", self._plan)))


def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of `count` rows in an epoch."""
    # PCG64 by name, because numpy may change its default.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(count)


def begin_to_read(
    data: Columns | Rows, rows: np.ndarray, sizes: Sequence[int], threads: Threads
) -> Future[tuple[Tree, Sequence[int]]]:
    """Lets the threads read a batch part by part; the thread that ends last joins the parts to the batch.

    Returns a future of the batch and its sizes, or of the exception of the first part that failed.
    """
    parts: Sequence[Any] = data.parts(rows)
    values: list[Any] = [None] * len(parts)
    errors: dict[int, BaseException] = {}
    left, lock = len(parts), threading.Lock()
    batch: Future[tuple[Tree, Sequence[int]]] = Future()

    def read(i: int) -> None:
        nonlocal left
        try:
            values[i] = data.read(parts[i])
        except BaseException as error:
            errors[i] = error
        with lock:
            left -= 1
            if left:
                return
        try:
            if errors:
                raise errors[min(errors)]
            batch.set_result((data.join(values), sizes))
        except BaseException as error:
            batch.set_exception(error)

    if not parts:
        batch.set_result((None, sizes))
    for i in range(len(parts)):
        threads.do(read, i)
    return batch


class Threads:
    """Threads that do their tasks in the order of the calls, until they are stopped."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[int], None], int] | None] = queue.SimpleQueue()
        self._stopped = False
        # Daemons, because Python would wait at its end for a thread that is stuck.
        self._all = [threading.Thread(target=self._work, name=f"jdp.{VERB}", daemon=True) for _ in range(count)]
        for thread in self._all:
            thread.start()

    def do(self, task: Callable[[int], None], i: int) -> None:
        self._tasks.put((task, i))

    def stop(self, seconds: float = 0.0) -> None:
        """Lets each thread end after its current task, and waits for that at most `seconds`."""
        if self._stopped:
            return
        self._stopped = True
        for _ in self._all:
            self._tasks.put(None)
        end = time.monotonic() + seconds
        for thread in self._all if seconds else ():
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped:
            do, i = task
            do(i)
            del task, do  # or the rows would stay until the next ones come
