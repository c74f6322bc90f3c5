"""One process of the jobs that test_batches_processes.py starts: takes batches, and leaves what it got in a file.

Usage: batches_worker.py FOLDER, under `jdp launch`.
"""

import json
import pathlib
import sys
from typing import NamedTuple

import jdp

jdp.distributed.initialize(timeout=60, quiet=True)

import jax
import numpy as np

P, N = jax.process_index(), jax.process_count()
COUNT = 23
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)


class Row(NamedTuple):
    x: np.ndarray
    row: int


class Rows:
    """Rows with their indices, and which of them this process has read."""

    def __init__(self, make=dict, bad=None):
        self.make, self.bad, self.read = make, bad, []

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        if i == self.bad:
            raise OSError("the disk is gone")
        self.read.append(i)
        return self.make(x=X[i], row=i)


def taken(data, *args, **kwargs):
    """This process's own rows of each batch, the chunks of all, and the count."""
    dp = jdp.DataParallel(lambda w, x: x * w)
    batches, found = dp.batches(data, *args, **kwargs), []
    for batch in batches:
        rows = batch["row"] if isinstance(batch, dict) else batch.row
        x = batch["x"] if isinstance(batch, dict) else batch.x
        own = np.asarray(jdp.gather(rows))
        np.testing.assert_array_equal(jdp.gather(x), X[own])
        np.testing.assert_array_equal(dp(np.float32(2), x), 2 * X[own])
        found.append({"rows": own.tolist(), "sizes": list(x.sizes), "taken": batches.taken})
    assert len(batches) == len(found)
    return found


def text_of(call):
    try:
        return str(call())
    except Exception as error:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def cases():
    columns, rows, late, tiny = {"x": X, "row": np.arange(COUNT)}, Rows(), Rows(Row), Rows()
    found = {
        "columns": taken(columns, 11, seed=3, epochs=3),
        "rows": taken(rows, 11, seed=3, epochs=3, workers=2),
        "read": rows.read,
        "named": taken(late, 11, drop_last=True, size=0),
        "start": taken(Rows(), 11, seed=3, epochs=3, start=4),
        # Of two rows, or one, some processes never have any: they learn what a batch is from the others.
        "tiny": taken(tiny, 2, seed=1),
        "tiny read": tiny.read,
        "one row of columns": taken({"x": X, "row": np.arange(COUNT)}, 1, start=COUNT - 2),
        "seeds": text_of(lambda: taken(columns, 4, seed=P)),
        "numbers": text_of(lambda: taken(columns, 4, start=min(P, 1))),
    }
    last = np.random.default_rng([3, 0]).permutation(COUNT)[21]  # of the second batch
    return {**found, "bad": text_of(lambda: taken(Rows(bad=int(last)), 11, seed=3))}


def main():
    path = pathlib.Path(sys.argv[1]) / f"{P}.json"
    path.write_text(json.dumps(cases()))


if __name__ == "__main__":
    main()
