"""After Ctrl-C at any moment the training state is whole: all before a step, or all after it.

As a script it interrupts loops at random moments, and says how often the state was lost:
python tests/train/test_interrupts.py 200
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import jdp

if __name__ == "__main__":
    jdp.virtual_cpu_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

OWN = os.path.dirname(jdp.__file__) + os.sep  # the folder of a clone may be named jdp, too

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
W = np.linspace(0, 1, 3, dtype=np.float32)
SGD = optax.sgd(0.01, momentum=0.9)


class Variables:
    """A loop `state, metrics = step(state, batch)`; with a key JAX dispatches the program in Python."""

    def __init__(self, n=2, key=None, batch=X):
        def loss_fn(v, x, key=None):
            noise = 0 if key is None else jax.random.normal(key, (3,))
            return ((x @ (v["params"] + 0.1 * noise) - 1) ** 2).mean()

        dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=range(n))
        self.step, self.batch = dp.train_step(loss_fn, SGD), batch
        self.state = self.step.init({"params": W}, key=None if key is None else jax.random.key(key))

    def turn(self):
        self.state, _ = self.step(self.state, self.batch)

    def recover(self):
        self.state = self.step.last

    def held(self):
        return self.state.replace(key=None)

    def count(self):
        return int(self.state.step)


class Net(nnx.Module):
    def __init__(self):
        self.w, self.calls = nnx.Param(jnp.asarray(W)), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x @ self.w[...]


class Model:
    """A loop `metrics = step(batch)` that trains an NNX model in place."""

    def __init__(self, n=2):
        self.net = Net()
        dp = jdp.DataParallel(self.net, devices=range(n))
        self.step = dp.train_step(lambda m, x: ((m(x) - 1) ** 2).mean(), SGD)

    def turn(self):
        self.step(X)

    def recover(self):
        pass

    def held(self):
        return nnx.as_pure((nnx.state(self.net), nnx.state(self.step.optimizer)))

    def count(self):
        assert int(self.net.calls[...]) == int(self.step.optimizer.step[...])
        return int(self.step.optimizer.step[...])


class Plain:
    """The same with `jax.jit(step, donate_argnums=0)` alone."""

    def __init__(self, n=2):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("data",))
        whole, cut = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*p)) for p in ((), ("data",)))

        def step(state, x):
            count, w, opt_state = state
            grads = jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(w)
            updates, opt_state = SGD.update(grads, opt_state, w)
            return (count + 1, optax.apply_updates(w, updates), opt_state), {"loss": grads[0]}

        self.step = jax.jit(step, donate_argnums=0, out_shardings=(whole, whole))
        self.batch = jax.device_put(X, cut)
        self.state = jax.device_put((jnp.zeros((), jnp.int32), W, SGD.init(W)), whole)

    def turn(self):
        self.state, metrics = self.step(self.state, self.batch)
        if self.count_up():
            metrics["loss"].block_until_ready()

    def count_up(self):  # for too many on their way are a deadlock
        self.turns = getattr(self, "turns", 0) + 1
        return self.turns % 10 == 0

    def recover(self):
        pass

    def held(self):
        return self.state

    def count(self):
        return int(self.state[0])


KINDS = {
    "variables": Variables,
    "key": lambda: Variables(key=3),
    "numpy, one device": lambda: Variables(1),
    "uneven": lambda: Variables(3, batch=X[:7]),
    "nnx": Model,
}


def host(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def lost(run):
    """Whether some of what the run goes on with is freed."""
    return any(x.is_deleted() for x in jax.tree.leaves(run.held()) if isinstance(x, jax.Array))


class Reference:
    """What a run without an interrupt holds after so many steps."""

    def __init__(self, make):
        self.run, self.found = make(), []
        self.found.append(host(self.run.held()))

    def after(self, count):
        while len(self.found) <= count:
            self.run.turn()
            self.found.append(host(self.run.held()))
        return self.found[count]


def again(call):
    """The call; once more where after an interrupt one of JAX's caches counts as entered, as in plain JAX, too."""
    try:
        return call()
    except RecursionError as error:
        assert "Recursively calling" in str(error)
        jax.clear_caches()
        return call()


def check_whole(run, reference, more=2):
    """The run is where some step left it, and goes on from there as if nothing had been."""
    count = run.count()
    for found, expected in zip(host(run.held()), reference.after(count), strict=True):
        np.testing.assert_array_equal(found, expected)
    for _ in range(more):
        run.turn()
    assert run.count() == count + more
    for found, expected in zip(host(run.held()), reference.after(count + more), strict=True):
        np.testing.assert_array_equal(found, expected)


def _comes_from_an_interrupt(error):
    while error is not None:
        # Of what is raised where it compares the fields of a pytree, it tells no more than that.
        told = "KeyboardInterrupt" in str(error) or "Exception raised while checking equality" in str(error)
        if told or isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def interrupted_at(moment, call, times=1):
    """Calls it, with SIGINT at this moment, counted in Python's lines and, in jdp, instructions; None if it ended."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = frame.f_code.co_filename.startswith(OWN)
        count += 1
        if moment <= count < moment + times:
            signal.raise_signal(signal.SIGINT)
        # Not within what is Python's own, which holds locks where no signal comes.
        return (
            trace if frame.f_code.co_filename.startswith(OWN) or "site-packages" in frame.f_code.co_filename else None
        )

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return count, error
    except Exception as error:  # C++ that calls Python makes an error of its own of what comes out there
        if count < moment or not _comes_from_an_interrupt(error):
            raise
        return count, error
    finally:
        sys.settrace(None)
    return count, None


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # put back, whatever happened
    signal.signal(signal.SIGINT, before)


@pytest.mark.budget(10)
@pytest.mark.one_case
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as below
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_each_moment_of_a_step_leaves_a_whole_state(kind):
    run, reference = KINDS[kind](), Reference(KINDS[kind])
    for _ in range(3):
        run.turn()
    for _ in range(2):  # from the second time on Python 3.12 tells of single instructions, too
        events, error = interrupted_at(10**9, run.turn)
    assert error is None and events > 50
    draw, before, after = random.Random(0), 0, 0
    moments = range(1, events) if events < 400 else sorted(draw.sample(range(1, events), 250))
    for moment in moments:
        count = run.count()
        _, error = interrupted_at(moment, run.turn)
        run.recover()
        assert not lost(run)
        done = run.count() - count
        assert done in (0, 1)
        if error is None:
            continue  # the step's end came before
        before, after = before + (done == 0), after + (done == 1)
        told = isinstance(error, KeyboardInterrupt)
        # Not before or after all of it: in the step's own frame, or in the one that leaves the context's mesh.
        own = [
            name
            for name in _files(error.__traceback__)
            if name.startswith(OWN) and not name.endswith("/replica_mesh.py")
        ]
        within = len(own) > 1
        if told and within:
            (note,) = error.__notes__
            assert note.startswith("jdp.train_step: interrupted ")
            assert ("when a step was done" if done else "before a step began") in note
        if moment % 10 == 0:
            check_whole(run, reference)
    check_whole(run, reference)
    assert before > 10 and after > 10


def _files(traceback):
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next


# Python itself ignores an interrupt that comes while it closes a generator, and says so.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["variables", "nnx"])
def test_an_interrupt_in_the_first_step_leaves_a_whole_state(kind):
    """While the program is traced and compiled, too, which is not held back."""
    reference, draw = Reference(KINDS[kind]), random.Random(1)
    events, _ = interrupted_at(10**9, KINDS[kind]().turn)
    early = 0
    for moment in draw.sample(range(1, events), 12):
        run = KINDS[kind]()
        ended, error = interrupted_at(moment, run.turn)
        early += error is not None and ended < moment + 200
        run.recover()
        assert not lost(run)
        again(lambda run=run: check_whole(run, reference))
    assert early > 6


def test_the_next_step_after_the_note():
    """What the note says is what is so."""
    run, seen = Variables(), set()
    for _ in range(2):
        run.turn()
    for _ in range(2):  # from the second time on Python 3.12 tells of single instructions, too
        events, _ = interrupted_at(10**9, run.turn)
    for moment in range(1, events, 7):
        was, count = run.state, run.count()
        _, error = interrupted_at(moment, run.turn)
        if error is None or not hasattr(error, "__notes__"):
            run.recover()
            continue
        (note,) = error.__notes__
        seen.add(note)
        if "Go on with the same state" in note:
            assert run.state is was and int(run.step(run.state, X)[0].step) == count + 1
        else:
            assert "Go on with step.last" in note and was.step.is_deleted()
        run.recover()
    assert seen == {
        "jdp.train_step: interrupted before a step began; the state is as it was. Go on with the same state.",
        "jdp.train_step: interrupted when a step was done; step.last is the state after it. Go on with step.last.",
    }


def test_a_second_interrupt_does_not_wait(monkeypatch):
    from jdp._core import programs

    ran = []

    def program():
        signal.raise_signal(signal.SIGINT)
        ran.append("first")
        signal.raise_signal(signal.SIGINT)
        ran.append("second")

    with pytest.raises(KeyboardInterrupt):
        programs.run_and_keep(program, (), lambda out: ran.append("kept"))
    assert ran == ["first"]


def test_handlers_of_other_kinds_are_called_once_or_left_alone():
    from jdp._core import programs

    calls = []
    for handler in (lambda number, frame: calls.append(number), signal.SIG_IGN):
        signal.signal(signal.SIGINT, handler)
        found = programs.run_and_keep(lambda: signal.raise_signal(signal.SIGINT), (), lambda out: (len(calls), out))
        assert signal.getsignal(signal.SIGINT) is handler or handler == signal.getsignal(signal.SIGINT)
        assert found == (0, None) if handler is not signal.SIG_IGN else found == (1, None)
    assert calls == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_error_does_not_swallow_the_interrupt():
    from jdp._core import programs

    def program():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the model")

    with pytest.raises(KeyboardInterrupt) as error:
        programs.run_and_keep(program, (), lambda out: out)
    assert isinstance(error.value.__context__, ValueError)


def test_other_threads_step_as_ever():
    run, errors = Variables(), []

    def turns():
        try:
            for _ in range(3):
                run.turn()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=turns)
    thread.start()
    thread.join()
    assert not errors and run.count() == 3


def test_last_is_none_before_and_the_newest_after():
    run = Variables()
    assert run.step.last is run.state
    run.turn()
    assert run.step.last is run.state
    model = Model()
    assert model.step.last is None
    metrics = model.step(X)
    assert model.step.last is metrics


@pytest.mark.full
def test_last_holds_no_tracer():
    run = Variables()
    last = run.step.last
    with jax.checking_leaks():
        jax.jit(lambda state: run.step(state, X)[1]["loss"])(run.state)
    assert run.step.last is last


# --- at random moments, from another thread ---


def interrupt(seconds, over):
    """Sends SIGINT after so many seconds, and again: Python ignores one that comes in a callback of its collector."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGINT)
    while not over.wait(2):
        os.kill(os.getpid(), signal.SIGINT)


def at_random(make, count, seed, check=True):
    """How many of so many interrupted loops lost their state."""
    draw, reference, gone, noted = random.Random(seed), Reference(make), 0, 0
    run = make()
    for _ in range(3):
        run.turn()
    for _ in range(count):
        over = threading.Event()
        timer = threading.Thread(target=interrupt, args=(draw.uniform(0, 0.02), over))
        try:
            timer.start()
            while True:
                again(run.turn)
        except KeyboardInterrupt as error:
            over.set()
            noted += any("jdp.train_step" in note for note in getattr(error, "__notes__", ()))
        timer.join()
        run.recover()
        if lost(run):
            gone, run = gone + 1, make()
        elif check:
            again(lambda run=run: check_whole(run, reference, 3))
        if run.count() > 2000:
            run = make()
    return gone, noted


def main(count):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs in the background
    for name, make in {**KINDS, "plain jax.jit": Plain}.items():
        gone, noted = at_random(make, count, 0)
        print(f"{name}: {count} interrupts, {gone} lost the state, {noted} said where it is", flush=True)


def run_script(count, timeout):
    done = subprocess.run(
        [sys.executable, __file__, str(count)], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(KINDS) + 1
    for line in lines[:-1]:
        assert f"{count} interrupts, 0 lost the state" in line
    return lines


@pytest.mark.full
def test_interrupts_at_random_moments_lose_nothing():
    run_script(15, 240)


if __name__ == "__main__":
    main(int(sys.argv[1]))
