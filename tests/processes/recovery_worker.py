"""One process of a job that test_recovery.py starts, under `jdp launch`: it trains, and goes on where others die.

Usage: recovery_worker.py FOLDER PLAN. The plan is JSON: `kind` of the model, `steps`, and `faults`, a list of `[rank,
batches taken, what]`; with `slow` the steps take longer while somebody is missing, and most before the next fault; who
is `unlucky` dies when it has been let in again; who is started again is `late` by so many seconds. What happens goes to
FOLDER/notes-RANK, a line of JSON each.
"""

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdp

HERE, ATTEMPT = int(os.environ.get("JDP_PROCESS_ID", 0)), int(os.environ.get("JDP_ATTEMPT", 0))
REPLICAS, ROWS, BATCH = 8, 1000, 50
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 6)).astype(np.float32)
DATA = {"x": X, "y": np.sin(X.sum(-1, keepdims=True)), "row": np.arange(ROWS)}


def notes_here():
    return pathlib.Path(sys.argv[1]) / f"notes-{HERE}"


HAD = []  # the numbers of this process's faults, those of its lives before with them


def plan(what, default=None):
    return json.loads(sys.argv[2]).get(what, default)


def note(what, **facts):
    with notes_here().open("a") as notes:
        notes.write(json.dumps({"what": what, "time": time.time(), "rank": HERE, "attempt": ATTEMPT, **facts}) + "\n")


def fault(number, what):
    HAD.append(number)
    note("fault", fault=what, number=number)
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "dies soon":  # in the middle of something
        threading.Timer(0.007, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif what == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "pauses":  # for longer than the others wait
        subprocess.Popen(["sh", "-c", f"sleep 12; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        note("awake")
    elif what == "sleeps":
        time.sleep(1000)
    else:
        raise ValueError("row 17 is no good")


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dropout(0.1, deterministic=not train)(nn.tanh(nn.Dense(16)(x)))
        return nn.Dense(1)(x)


class NNXMLP(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def linen_loss(v, batch, key):
    out = MLP().apply(v, batch["x"], rngs={"dropout": key})
    return ((out - batch["y"]) ** 2).mean(-1), {"rows": batch["row"]}


def nnx_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1), {"rows": batch["row"]}


def digest(tree):
    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        found.update(np.asarray(x.addressable_data(0)).tobytes())
    return found.hexdigest()


def train_linen():
    checkpointer = jdp.Checkpointer(plan("checkpoints"), every=plan("every")) if plan("checkpoints") else None
    devices, state, taken = None, None, 0
    while True:
        dp = jdp.DataParallel(MLP(), devices, replicas=REPLICAS)
        step = dp.train_step(linen_loss, optax.adam(1e-2), deterministic=True)
        if state is None:
            state = step.init(MLP().init(jax.random.key(0), X[:1], train=False), key=jax.random.key(1))
            if checkpointer is not None:
                state, found = checkpointer.restore(state)
                taken = found or 0
                note("restored", taken=taken)
        try:
            state, taken = jdp.distributed.sync((state, taken), dp.devices)
            batches = dp.batches(DATA, BATCH, seed=0, epochs=None, start=taken)
            for batch in batches:
                before(taken, dp, batch)
                state, metrics = step(state, batch)
                taken = batches.taken
                if checkpointer is not None:
                    checkpointer.save(taken, state, data=taken)
                after(taken, metrics)
                if taken == plan("steps"):
                    if checkpointer is not None:
                        checkpointer.close()
                    return state
        except jdp.distributed.ProcessesChanged as changed:
            devices = after_change(changed).devices_for(REPLICAS)


def train_nnx():
    model, devices, taken = NNXMLP(nnx.Rngs(0)), None, 0
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    while True:
        try:
            found, taken = jdp.distributed.sync((nnx.state((model, optimizer)), taken), devices)
            nnx.update((model, optimizer), found)
            dp = jdp.DataParallel(model, devices, replicas=REPLICAS)
            step = dp.train_step(nnx_loss, optimizer, deterministic=True)
            batches = dp.batches(DATA, BATCH, seed=0, epochs=None, start=taken)
            for batch in batches:
                before(taken, dp, batch)
                metrics = step(batch)
                taken = batches.taken
                after(taken, metrics)
                if taken == plan("steps"):
                    return nnx.as_pure(nnx.state((model, optimizer)))
        except jdp.distributed.ProcessesChanged as changed:
            devices = after_change(changed).devices_for(REPLICAS)


def train_uneven():
    """Without `replicas`, on all devices that are left, and with rows that each process passes itself."""
    devices, state, taken = None, None, 0
    while True:
        dp = jdp.DataParallel(MLP(), devices)
        step = dp.train_step(linen_loss, optax.adam(1e-2))
        if state is None:
            state = step.init(MLP().init(jax.random.key(0), X[:1], train=False), key=jax.random.key(1))
        try:
            state, taken = jdp.distributed.sync((state, taken), dp.devices)
            while taken < plan("steps"):
                before(taken, dp)
                state, metrics = step(state, jax.tree.map(lambda x: x[HERE::4][:5], DATA))
                taken += 1
                after(taken, metrics)
            return state
        except jdp.distributed.ProcessesChanged as changed:
            devices = after_change(changed).devices


def before(taken, dp, batch=None):
    """A process that dies may have made its step, and not said so: which rows it takes it says before."""
    if batch is not None:
        note("begins", taken=taken + 1, rows=np.asarray(jdp.gather(batch["row"])).tolist())
    if plan("slow") and len(dp.devices) < jax.device_count():
        time.sleep(0.5 if any(taken < at <= taken + 20 for _, at, _ in plan("faults")) else 0.1)
    for number, (rank, at, what) in enumerate(plan("faults") if ATTEMPT == 0 else ()):
        if rank == HERE and at <= taken and number not in HAD:
            fault(number, what)
            break


def after_change(changed):
    note("changed", text=str(changed), lost=changed.lost, joined=changed.joined)
    if HERE in changed.joined and HERE in plan("unlucky", []) and "unlucky" not in HAD:
        fault("unlucky", "dies")
    return changed


def after(taken, metrics):
    note("step", taken=taken, rows=np.asarray(metrics["rows"]).tolist())


def main():
    if notes_here().exists():
        HAD.extend(json.loads(line).get("number") for line in notes_here().read_text().splitlines())
    jdp.distributed.initialize(recover=True, timeout=4)
    if HAD:
        time.sleep(plan("late", 0))
    state = {"linen": train_linen, "nnx": train_nnx, "uneven": train_uneven}[plan("kind")]()
    note("end", state=digest(state), devices=len(jax.tree.leaves(state)[0].sharding.device_set))


if __name__ == "__main__":
    main()
