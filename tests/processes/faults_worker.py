"""One process of a job that test_faults_processes.py starts: trains, and on one rank does what the case is about.

Usage: faults_worker.py FOLDER CASE RANK, under `jdp launch` or with its environment. What happens, and when, goes to
FOLDER/notes-RANK, a line of JSON each; the clock is one for all processes of a machine.
"""

import itertools
import json
import os
import pathlib
import signal
import socket
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
from jdp._processes.places import limits

HERE = int(os.environ.get("JDP_PROCESS_ID", 0))
ATTEMPT = int(os.environ.get("JDP_ATTEMPT", 0))
AT = 3  # the step at which things happen
COUNTS = (3, 5, 0, 2)  # batches of each process, where they are uneven
TOTAL = 30  # steps of a run that is killed and goes on
kept = []  # what is not to be closed before the process ends


def note(what, **facts):
    line = json.dumps({"what": what, "time": time.monotonic(), "rank": HERE, "attempt": ATTEMPT, **facts})
    with (folder() / f"notes-{HERE}").open("a") as notes:
        notes.write(line + "\n")


def folder():
    return pathlib.Path(sys.argv[1])


def culprit():
    return int(sys.argv[3]) == HERE


def sleep_for_ever():
    while True:
        time.sleep(1)


def batch_of(process, k=0, rows=4, features=4):
    """The rows of a process in step k: a function of the two, so that a run can go on anywhere."""
    rng = np.random.default_rng((process, k))
    x = rng.normal(size=(rows, features)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1, keepdims=True))}


def linear(v, x):
    return x @ v["params"]["w"] + v["params"]["b"]


def variables():
    return {"params": {"w": np.full((4, 1), 0.1, np.float32), "b": np.zeros(1, np.float32)}}


def mse(v, batch):
    return jnp.mean((linear(v, batch["x"]) - batch["y"]) ** 2)


def slow_mse(v, batch):
    """A loss that keeps a few cores busy for a second, in the device."""
    begin = jnp.ones((384, 384)) + batch["x"].mean()
    busy = jax.lax.fori_loop(0, 100, lambda _, m: jnp.tanh(m @ m), jax.lax.stop_gradient(begin))
    return mse(v, batch) + 0 * busy.mean()


def hexes(tree):
    """Every number of a tree, to the last bit."""

    def data(x):
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(data(x)).tobytes().hex() for x in jax.tree.leaves(tree)]


def nothing(*args):
    pass


def train(count=None, loss=mse, batch=lambda k: batch_of(HERE), before=nothing, during=nothing, after=nothing):
    step = jdp.DataParallel(linear).train_step(loss, optax.sgd(0.1))
    state = step.init(variables())
    for k in itertools.count(1) if count is None else range(1, count + 1):
        before(k)
        state, metrics = step(state, batch(k))
        during(k, metrics["loss"])
        note("step", k=k, loss=float(metrics["loss"]))
        after(k)


def at_the_step(do):
    """`do` on the culprit, when the step has come."""

    def hook(k, *args):
        if k == AT and culprit():
            do(*args)

    return hook


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def case_killed():
    steps = []

    def kill(loss):
        def run():
            time.sleep(steps[-1] / 4)
            note("fault", in_the_step=not loss.is_ready())
            kill_myself()

        threading.Thread(target=run).start()

    train(
        loss=slow_mse,
        before=lambda k: steps.append(-time.monotonic()),
        during=at_the_step(lambda loss: (steps.pop(), kill(loss))),
        after=lambda k: steps.append(steps.pop() + time.monotonic()),
    )


def fail():
    note("fault")
    raise ValueError("row 17 is no good")


def case_raises_before():
    train(before=at_the_step(fail))


def case_raises_in():
    def loss(v, batch):
        if culprit() and len(batch["x"]) == 4:  # of the eight rows that come with the third step
            fail()
        return mse(v, batch)

    train(loss=loss, batch=lambda k: batch_of(HERE, rows=8 if k == AT else 4))


def case_raises_after():
    train(after=at_the_step(fail))


def case_stopped():
    def stop():
        note("fault")
        os.kill(os.getpid(), signal.SIGSTOP)
        note("goes on")

    train(after=at_the_step(stop))


def case_asleep():
    def sleep():
        note("fault")
        sleep_for_ever()

    train(after=at_the_step(sleep))


def case_asleep_in_a_callback():
    """All come to the program; what it calls back into Python does not come back on one of them."""
    calls = itertools.count(1)

    def look(loss):
        if culprit() and next(calls) > 2 * jax.local_device_count():
            note("fault")
            sleep_for_ever()
        return loss

    def loss(v, batch):
        found = jax.lax.stop_gradient(mse(v, batch))
        seen = jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), found, vmap_method="sequential")
        return mse(v, batch) + 0 * seen

    train(loss=loss)


def case_one_call_more():
    """What stands under `if jax.process_index() == ...`, at the end of the program."""
    train(AT)
    if culprit():
        note("fault")
        jdp.DataParallel(linear).apply(variables(), batch_of(HERE)["x"])


def case_one_save_more():
    train(AT)
    if culprit():
        note("fault")
        with jdp.Checkpointer(folder() / "run") as checkpointer:
            checkpointer.save(1, variables())


def case_asleep_before_its_save():
    def sleep():
        note("fault")
        sleep_for_ever()

    limits.start = 10  # and not by start_timeout, which is for the start of the processes, too
    with jdp.Checkpointer(folder() / "run") as checkpointer:
        checkpointer.save(1, variables())
        train(AT, after=at_the_step(sleep))
        checkpointer.save(2, variables())


def case_os_exit():
    def leave():
        note("fault")
        os._exit(0)

    train(after=at_the_step(leave))


def ahead(do, count=AT + 3):
    """Trains on batches that are agreed on ahead, and does something between a batch and its step."""
    dp = jdp.DataParallel(linear)
    step = dp.train_step(mse, optax.sgd(0.1))
    state = step.init(variables())
    for k, batch in enumerate(dp.prefetch(batch_of(HERE, k) for k in range(count)), 1):
        do(k)
        state, metrics = step(state, batch)
        note("step", k=k, loss=float(metrics["loss"]))
    note("end")


def case_asleep_ahead():
    def sleep():
        note("fault")
        sleep_for_ever()

    ahead(at_the_step(sleep))


def case_a_loop_left():
    """One process leaves a loop of `prefetch` before its end, and begins the next one."""
    dp = jdp.DataParallel(linear)
    step = dp.train_step(mse, optax.sgd(0.1))
    state = step.init(variables())
    for _ in range(2):
        for k, batch in enumerate(dp.prefetch(batch_of(HERE, k) for k in range(AT + 3)), 1):
            if culprit() and k == AT:
                note("fault")
                break
            state, metrics = step(state, batch)
            note("step", k=k, loss=float(metrics["loss"]))


def case_stopped_in():
    """While the step runs on the device: the others have all come to it."""

    def stop():
        time.sleep(0.3)
        note("fault")
        os.kill(os.getpid(), signal.SIGSTOP)

    train(loss=slow_mse, before=at_the_step(lambda: threading.Thread(target=stop).start()))


def case_stopped_compiling():
    """In the compilation of the step: the others have compiled it, and wait for this process to say so."""

    def stop():
        def listen(event, duration_secs, **_):
            frames, frame = set(), sys._getframe()
            while frame:
                frames.add(frame.f_code.co_name)
                frame = frame.f_back
            if "make_ready" in frames and event.endswith("/backend_compile_duration"):
                note("fault")
                os.kill(os.getpid(), signal.SIGSTOP)

        jax.monitoring.register_event_duration_secs_listener(listen)

    # The step has another number of rows, so that it is a new program.
    train(
        batch=lambda k: jax.tree.map(lambda x: x[: -1 if k == AT else None], batch_of(HERE)), before=at_the_step(stop)
    )


def case_compiles():
    """One process compiles programs of its own for longer than the others wait: a listener sleeps meanwhile."""

    def compile():
        seconds, began = [15.0], time.monotonic()

        def listen(event, began, **_):
            if seconds and event.endswith("/backend_compile_duration"):
                time.sleep(seconds.pop())

        jax.monitoring.register_scalar_listener(listen)  # called after jdp's own, when the compilation begins
        now = time.time() % 1  # no cache has this program
        jax.jit(lambda x: x * now)(1.0)
        note("compiled", seconds=time.monotonic() - began)

    ahead(at_the_step(compile))
    train(5, before=at_the_step(compile))


def case_network():
    train(200, after=lambda k: time.sleep(0.1))
    note("end")


def case_network_for_ever():
    train(after=lambda k: time.sleep(0.1))


def case_shapes():
    def batch(k):
        if k == AT and culprit():
            note("fault")
        return batch_of(HERE, features=5 if k == AT and culprit() else 4)

    train(batch=batch)


def case_run():
    train()


def case_exits():
    def leave():
        note("fault")
        sys.exit(3)

    train(after=at_the_step(leave))


def case_exits_by_the_builtin():
    def leave():
        note("fault")
        exit(3)  # noqa: PLR1722

    train(after=at_the_step(leave))


def case_leaves():
    """A plain loop over the batches of this process, of which one has fewer."""
    train(AT if culprit() else None)
    note("fault")


def at_the_end(do):
    """`do` on the culprit, after the last call, when the others have ended."""
    train(AT)
    if culprit():
        time.sleep(2)
        do()


def case_killed_at_the_end():
    at_the_end(lambda: (note("fault"), kill_myself()))


def case_raises_at_the_end():
    at_the_end(fail)


def case_stopped_at_the_end():
    at_the_end(lambda: (note("fault"), os.kill(os.getpid(), signal.SIGSTOP)))


def case_works_at_the_end():
    at_the_end(lambda: time.sleep(20))
    note("end")


def case_exits_with_0():
    """A loop of prefetch that one process leaves for good, as if all were well."""
    dp = jdp.DataParallel(linear)
    step = dp.train_step(mse, optax.sgd(0.1))
    state = step.init(variables())
    for k, batch in enumerate(dp.prefetch(batch_of(HERE, k) for k in range(TOTAL))):
        if k == AT and culprit():
            note("fault")
            sys.exit(0)
        state, metrics = step(state, batch)
        float(metrics["loss"])


def case_loader_fails():
    """The data of one place cannot be read, at each start."""
    dp, v = jdp.DataParallel(linear), variables()

    def batches():
        for k in range(4):
            if k == 2 and culprit() and jax.process_count() == 2:
                note("fault")
                raise OSError("the disk is broken")
            yield batch_of(HERE, k)

    for batch in dp.prefetch(batches()):
        dp.apply(v, batch["x"])


def case_exits_before_the_first_call():
    """One has nothing to do, as it thinks, and never asks for its devices."""
    if culprit():
        note("fault")
        sys.exit(0)
    train()


def case_late():
    """One process is late, by less than the time-out; then it takes longer than that to compile."""

    def compile_slowly(lowered, *args, **kwargs):
        time.sleep(22)
        return compile(lowered, *args, **kwargs)

    compile = jax.stages.Lowered.compile
    if culprit():
        # After the first compilations, which come before the first step.
        before = at_the_step(lambda: (time.sleep(15), setattr(jax.stages.Lowered, "compile", compile_slowly)))
    else:
        before = nothing
    train(6, before=before, batch=lambda k: batch_of(HERE, rows=4 if k < 5 else 8))


def attempt(name, call):
    """What a call raises, which the program survives, and how long it took."""
    note(f"{name} begins")
    try:
        call()
    except Exception as error:
        note(name, text=f"{type(error).__name__}: {error}")
    else:
        note(name, text="nothing was raised")


def good_step(name):
    """All are together again, and train."""
    dp = jdp.DataParallel(linear)
    step = dp.train_step(mse, optax.sgd(0.1))
    state, metrics = step(step.init(variables()), batch_of(HERE))
    note(name, loss=float(metrics["loss"]), params=hexes(state.params))


def case_programs():
    dp = jdp.DataParallel(linear)
    rate = 0.2 if culprit() else 0.1
    step = dp.train_step(mse, optax.sgd(rate))
    state = step.init(variables())
    attempt("rate", lambda: step(state, batch_of(HERE)))
    good_step("after rate")

    step = dp.train_step(mse, optax.sgd(0.1))
    state = step.init(variables())
    if culprit():
        attempt("verb", lambda: dp.value_and_grad(mse)(variables(), batch_of(HERE)))
    else:
        attempt("verb", lambda: step(state, batch_of(HERE)))
    good_step("after verb")

    tx = optax.sgd(0.1) if culprit() else optax.adam(0.1)  # of which one has no state
    attempt("optimizer", lambda: dp.train_step(mse, tx).init(variables()))
    model = nn.Dense(9 if culprit() else 8)
    attempt("size", lambda: jdp.DataParallel(model).init(jax.random.key(0), np.ones((2, 4), np.float32)))
    attempt("loop", evaluate_or_train)
    good_step("after loop")


def evaluate_or_train():
    """A loop that ends earlier on one process, which goes on to evaluate."""
    dp = jdp.DataParallel(linear)
    step = dp.train_step(mse, optax.sgd(0.1))
    state = step.init(variables())
    for _ in range(2 if culprit() else 3):
        state, _ = step(state, batch_of(HERE))
    dp.apply({"params": state.params}, batch_of(HERE)["x"])


def one_ulp(tree):
    """Replicated arrays, of which the culprit's last device holds another value of one."""

    def changed(path, x):
        w = "['w']" in jax.tree_util.keystr(path)
        own = [np.asarray(s.data).copy() for s in x.addressable_shards]
        if culprit() and w:
            own[-1][0] = np.nextafter(own[-1][0], np.float32(np.inf))
        copies = [jax.device_put(c, s.device) for c, s in zip(own, x.addressable_shards, strict=True)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)

    return jax.tree_util.tree_map_with_path(changed, tree)


def case_parameters():
    """Each of these differs on the culprit alone."""
    seed, x = jax.random.key(1 if culprit() else 0), np.ones((2, 4), np.float32)
    attempt("init", lambda: jdp.DataParallel(nn.Dense(3)).init(seed, x))
    step = jdp.DataParallel(linear).train_step(mse, optax.sgd(0.1))
    own = {"params": {**variables()["params"], "b": np.full(1, 1.0 if culprit() else 0.0, np.float32)}}
    attempt("step.init", lambda: step.init(own))
    attempt("nnx", lambda: jdp.DataParallel(nnx.Linear(4, 3, rngs=nnx.Rngs(1 if culprit() else 0))))
    attempt("ulp", drift)
    good_step("after ulp")


def drift():
    # An update so small that the difference stays one unit in the last place.
    step = jdp.DataParallel(linear).train_step(mse, optax.sgd(1e-30), check_replicas=5)
    state = step.init(variables())
    for k in range(1, 30):
        if k == 7:
            state = state.replace(params=one_ulp(state.params))
        note("drift", k=k)
        state, _ = step(state, batch_of(HERE))


def case_uneven():
    """Processes with more batches than others, of other sizes; one has none."""
    dp = jdp.DataParallel(linear)
    step = dp.train_step(mse, optax.sgd(0.1))
    state, losses = step.init(variables()), []
    for batch in dp.prefetch(batch_of(HERE, k, rows=3 + HERE) for k in range(COUNTS[HERE])):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    note("end", losses=losses, params=[x.tolist() for x in jax.tree.leaves(jax.device_get(state.params))])


def case_alive():
    """What one process does wrong, and the job survives."""
    dp = jdp.DataParallel(linear)
    step = dp.train_step(mse, optax.sgd(0.1), skip_nonfinite=True)
    state = step.init(variables())
    batch = batch_of(HERE)
    state, _ = step(state, batch)
    if culprit():
        thread = threading.Thread(target=attempt, args=("thread", lambda: step(state, batch)), name="second")
        thread.start()
        thread.join()
    before = hexes(state.params)
    bad = {**batch, "x": np.where(np.arange(4)[:, None] == 2, np.nan, batch["x"]) if culprit() else batch["x"]}
    state, metrics = step(state, bad)
    found = [(b.replica, b.device.process_index, b.rows, b.paths) for b in step.find_nonfinite(state, bad)]
    note("nan", skipped=bool(metrics["skipped"]), found=found, same=hexes(state.params) == before)
    state, metrics = step(state, batch)
    note("end", loss=float(metrics["loss"]), skipped=bool(metrics["skipped"]), step=int(state.step))


def case_preempted():
    step = jdp.DataParallel(linear).train_step(mse, optax.adam(1e-2))
    with jdp.Checkpointer(folder() / "run", every=1000) as checkpointer:
        state, data = checkpointer.restore(step.init(variables()))
        began = time.monotonic()
        with jdp.Checkpointer(
            folder() / f"first-{data or 0}"
        ) as first:  # it imports, and compiles, what the next needs
            first.save(0, state)
        note("from", k=data or 0, state=hexes(state), saved=time.monotonic() - began)
        for k in itertools.count((data or 0) + 1):
            state, _ = step(state, batch_of(HERE, k))
            note("step", k=k, state=hexes(state))
            checkpointer.save(k, state, data=k)


def case_port_taken():
    """Under the launcher another program has the port that it chose, in the first attempt."""
    note("end")


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.3, deterministic=False)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(1)(x)


class DroppedNNX(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.first(x))))


def linen_run():
    """The wrapper, all that is saved, and a step that changes it."""
    model = Dropped()
    dp = jdp.DataParallel(model)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def loss(v, batch, key):
        return jnp.mean((model.apply(v, batch["x"], rngs={"dropout": key}) - batch["y"]) ** 2)

    step = dp.train_step(loss, optax.adam(1e-2))
    begin = step.init(dp.init(keys, batch_of(0)["x"]), jax.random.key(2))
    return dp, begin, step


def nnx_run():
    dp = jdp.DataParallel(DroppedNNX(nnx.Rngs(0)))
    tx = nnx.Optimizer(dp, optax.adam(1e-2), wrt=nnx.Param)
    change = dp.train_step(lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2), tx)
    return dp, (dp.module, tx), lambda both, batch: (both, change(batch))


def case_restart():
    run(*linen_run())


def case_restart_nnx():
    run(*nnx_run())


def alive():
    """The seconds since this process was started; Linux keeps them, from before Python's imports."""
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def run(dp, begin, step):
    """Training that goes on from the last checkpoint; FOLDER/kills.json has who is killed when: `[[rank, step]]`."""
    kills = json.loads((folder() / "kills.json").read_text())
    with jdp.Checkpointer(folder() / "run", every=3) as checkpointer:
        state, data = checkpointer.restore(begin)
        first = data["next"] if data else 0
        note("from", k=first, alive=alive())
        for k, batch in enumerate(dp.prefetch(batch_of(HERE, k) for k in range(first, TOTAL)), first):
            state, metrics = step(state, batch)
            if ATTEMPT < len(kills) and kills[ATTEMPT] == [HERE, k]:
                note("fault", k=k)
                kill_myself()
            note("step", k=k, loss=float(metrics["loss"]).hex())
            checkpointer.save(k + 1, state, data={"next": k + 1})
    note("end", state=hexes(nnx.state(state) if isinstance(state, tuple) else state))


class Rows:
    """What `case_every_row` trains on: 50 rows, of which one is no number; their features, and which they are."""

    count, bad, size, epochs, seed = 50, 17, 8, 3, 7
    x = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        x = np.full(4, np.nan, np.float32) if i == self.bad else self.x[i]
        return {"x": x, "y": np.sin(self.x[i].sum(keepdims=True)), "row": i}


def case_every_row():
    """Goes on from the last checkpoint, and logs its own rows; FOLDER/run.json has which run it is, who is killed when.

    The step that meets the bad row is skipped: the optimizer's steps are not the batches that were taken.
    """
    plan = json.loads((folder() / "run.json").read_text())
    dp = jdp.DataParallel(linear)
    step = dp.train_step(lambda v, b: (mse(v, b), {"rows": b["row"]}), optax.sgd(0.1), skip_nonfinite=True)
    with jdp.Checkpointer(folder() / "run", every=2) as checkpointer:
        state, taken = checkpointer.restore(step.init(variables()))
        note("from", run=plan["run"], taken=taken or 0)
        batches = dp.batches(Rows(), Rows.size, seed=Rows.seed, epochs=Rows.epochs, start=taken or 0)
        for batch in batches:
            state, metrics = step(state, batch)
            rows = np.asarray(metrics["rows"]).tolist()
            note("rows", run=plan["run"], taken=batches.taken, rows=rows, skipped=bool(metrics["skipped"]))
            if plan["kill"] == [HERE, batches.taken]:
                note("fault", run=plan["run"])
                kill_myself()
            checkpointer.save(batches.taken, state, data=batches.taken)
    note("end", taken=batches.taken, step=int(state.step), params=[x.tolist() for x in jax.tree.leaves(state.params)])


def before_it_starts():
    """What goes wrong before the processes know each other."""
    case = sys.argv[2]
    if case == "absent" and culprit():
        note("fault")
        sleep_for_ever()
    if case == "deaf":
        if HERE == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("deaf")
            sleep_for_ever()
        if culprit():
            while not (folder() / "notes-1").exists() or "deaf" not in (folder() / "notes-1").read_text():
                time.sleep(0.05)
            fail()
    if case == "port_taken" and HERE == 0 and "JDP_LOCAL_PROCESS_ID" in os.environ and ATTEMPT == 0:
        host, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
        kept.append(socket.create_server((host, int(port))))
        note("fault")


def main():
    note("begin", pid=os.getpid())
    before_it_starts()
    short = {"start_timeout": 10}
    options = {"absent": short, "port_taken": short, "compiles": {"timeout": 10}}
    jdp.distributed.initialize(**options.get(sys.argv[2], {}))
    globals()[f"case_{sys.argv[2]}"]()


if __name__ == "__main__":
    main()
