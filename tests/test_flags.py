"""The table of doors and of JAX's own flags: each door gives under each flag what it gives without, the numbers of one
device; on even batches as on uneven ones.

A numpy batch under a transfer guard is JAX's to refuse, as in a plain `jit`: so the batch is on a device already.
"""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import close

import jdp

W = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
TX = optax.sgd(0.1, momentum=0.9)


def model(v, x):
    return jnp.tanh(x @ v["params"])


def loss_fn(v, x):
    return (model(v, x) ** 2).mean()


def root(out, x):
    return jnp.sqrt((out**2).sum())


def root_of(v, x):
    return root(model(v, x), x)


def stepped(loss):
    """What two steps of one device leave."""

    def run(v, x):
        params, state = v["params"], TX.init(v["params"])
        for _ in range(2):
            grads = jax.grad(lambda p: loss({"params": p}, x))(params)
            updates, state = TX.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return run


def two_steps(dp, v, x, loss=loss_fn, **options):
    step = dp.train_step(loss, TX, **options)
    state = step.init(v)
    for _ in range(2):
        state, _ = step(state, x)
    return state.params


def through_verbs(dp, v, x):
    out = jdp.parallel_apply(model, jdp.replicate(v, dp.devices), jdp.scatter((x,), dp.devices))
    return jdp.gather(out)


# Each with what it equals on one device.
DOORS = {
    "apply": (lambda dp, v, x: dp(v, x), model),
    "data_parallel": (lambda dp, v, x: jdp.data_parallel(model, v, x, dp.devices), model),
    "verbs": (through_verbs, model),
    "prefetch": (lambda dp, v, x: [dp(v, batch) for batch in dp.prefetch([x, x])][1], model),
    "gradient": (lambda dp, v, x: jax.grad(lambda v: (dp(v, x) ** 2).mean())(v), jax.grad(loss_fn)),
    "value_and_grad": (lambda dp, v, x: dp.value_and_grad(loss_fn)(v, x), jax.value_and_grad(loss_fn)),
    "criterion": (
        lambda dp, v, x: dp.value_and_grad(model, criterion=root)(v, x),
        jax.value_and_grad(root_of),
    ),
    "train_step": (two_steps, stepped(loss_fn)),
    "its criterion": (functools.partial(two_steps, loss=model, criterion=root), stepped(root_of)),
    "deterministic": (functools.partial(two_steps, deterministic=True), stepped(loss_fn)),
}


def mesh(n, name="data"):
    return jax.set_mesh(
        jax.make_mesh((n,), (name,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:n])
    )


FLAGS = {
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": lambda: jax.disable_jit(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "equal mesh": lambda: mesh(4),
    "other mesh": lambda: mesh(2, "model"),
    "highest precision": lambda: jax.default_matmul_precision("highest"),
    "a thread": contextlib.nullcontext,
}
# JAX lets no mesh change inside of jax.grad, which itself puts a 1.0 onto a device.
NOT_JDPS = {("gradient", "equal mesh"), ("gradient", "other mesh"), ("gradient", "transfer_guard")}
REFUSED = {("deterministic", "disable_jit"): "deterministic is True under jax_disable_jit"}


def run(door, flag, v, x):
    found = []

    def call():
        dp = jdp.DataParallel(model, range(4), replicas=4 if door == "deterministic" else None)
        with FLAGS[flag]():
            found.append(DOORS[door][0](dp, v, x))

    if flag == "a thread":
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    else:
        call()
    return found[0]


CASES = [(d, f, rows) for d in DOORS for f in FLAGS if (d, f) not in NOT_JDPS for rows in (8, 10)]


@pytest.mark.budget(10)
@pytest.mark.parametrize(
    "door, flag, rows",
    [pytest.param(*case, marks=[pytest.mark.full] * (i % 3 > 0)) for i, case in enumerate(CASES)],
)
def test_a_flag_changes_no_numbers(door, flag, rows):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32))
    v = {"params": jnp.asarray(W)}
    if (door, flag) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[door, flag]):
            run(door, flag, v, x)
        return
    close(jax.device_get(run(door, flag, v, x)), jax.device_get(DOORS[door][1](v, x)), rtol=2e-5)


COUNTED = {
    "a number of rows": lambda v, x: jdp.Mean((model(v, x) ** 2).sum(), 2 * x.shape[0]),
    "an array": lambda v, x: jdp.Mean((model(v, x) ** 2).sum(), 2 * (x[:, 0] < 9).sum()),
    "a sum of terms": lambda v, x: jdp.Mean((model(v, x) ** 2).sum(), 4 * (x[:, 0] < 9).sum()) + loss_fn(v, x) * 0.5,
}


@pytest.mark.one_case("1-an array", "2-a sum of terms")
@pytest.mark.parametrize("count", COUNTED)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_count_of_integers_under_strict_promotion(count, steps):
    """It divides a total of floats, which is jdp's own doing."""
    x, v = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32), {"params": W}
    with jax.numpy_dtype_promotion("strict"):
        found = two_steps(jdp.DataParallel(model, range(4)), v, x, COUNTED[count], accumulate_steps=steps)
    close(found, stepped(loss_fn)(v, x), rtol=2e-5)


def test_replicas_of_several_devices_need_the_compiler():
    grouped = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    dp = jdp.DataParallel(model, grouped)
    with jax.disable_jit(), pytest.raises(ValueError, match="jax_disable_jit is set, and a replica is several devices"):
        dp({"params": W}, np.ones((4, 3), np.float32))
