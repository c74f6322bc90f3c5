"""One process of a job that somebody else's launcher has started: trains, and notes what it was and each loss.

Usage: launchers_worker.py FOLDER STEPS [CHECKPOINTS [SECONDS]]. What a start at time T finds is FOLDER/rank-R-T.json.
With CHECKPOINTS it saves there at each step, goes on from what is there, and waits SECONDS after each step.
"""

import contextlib
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp


def batch_of(process, k, rows=4, features=4):
    """The rows of a process in step k."""
    x = np.random.default_rng((process, k)).normal(size=(rows, features)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1, keepdims=True))}


def mse(v, batch):
    return jnp.mean((batch["x"] @ v["params"]["w"] - batch["y"]) ** 2)


def fail():
    raise ValueError("it fails here")


def main(
    folder, steps, checkpoints=None, seconds=0.0, fails=None, fail=fail, saver=jdp.Checkpointer, replicas=None, **more
):
    jdp.distributed.initialize(timeout=30, **more)
    here = jax.process_index()
    found = {"rank": here, "n": jax.process_count(), "pid": os.getpid(), "began": 0, "losses": []}
    note = pathlib.Path(folder) / f"rank-{here}-{time.time_ns()}.json"

    def tell():
        part = note.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(note)

    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], replicas=replicas)
    step = dp.train_step(mse, optax.sgd(0.1), deterministic=replicas is not None)
    state = step.init({"params": {"w": np.full((4, 1), 0.1, np.float32)}})
    with contextlib.ExitStack() as stack:
        saver = checkpoints and stack.enter_context(saver(checkpoints))
        if saver:
            state, _ = saver.restore(state)
        found["began"] = int(state.step)
        tell()
        for k in range(int(state.step), steps):
            if fails == (here, k) and found["began"] == 0:
                fail()
            mine = np.array_split(range(2), jax.process_count())[here]  # of two parts, also where this is the only one
            batch = jax.tree.map(lambda *parts: np.concatenate(parts), *(batch_of(part, k) for part in mine))
            state, metrics = step(state, batch)
            found["losses"].append(float(metrics["loss"]))
            tell()
            if saver:
                saver.save(k + 1, state)
            time.sleep(seconds)


if __name__ == "__main__":
    folder, steps, *more = sys.argv[1:]
    options = {"cluster_detection_method": "mpi4py"} if os.environ.get("BY_MPI4PY") else {}
    main(folder, int(steps), *more[:1], *map(float, more[1:]), **options)
