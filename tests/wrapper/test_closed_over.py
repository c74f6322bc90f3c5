"""A function that runs on replicas may close over any array: the numbers are those of the array as an argument."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from laws import close

import jdp

N = 3
RNG = np.random.RandomState(0)
X, W, V = (RNG.randn(*shape).astype(np.float32) for shape in ((9, 4), (4, 2), (4, 2)))
DP = jdp.DataParallel(lambda w, x: x @ w, devices=range(N))


# What jdp itself has returned lies over the devices.
CLOSED_OVER = {
    "host": lambda: V,
    "replicated": lambda: jdp.replicate(V, DP.devices),
    "replicated on all": lambda: jdp.replicate(V),
    "cut": lambda: jax.device_put(np.concatenate([V, V[:2]]), NamedSharding(DP.mesh, PartitionSpec("data")))[:4],
    "an output": lambda: DP(jdp.replicate(np.eye(2, dtype=np.float32), DP.devices), V),
    "on one device": lambda: jdp.replicate(V, [0]),
}


def plain(w, x):
    return jnp.tanh(x @ w)


def in_a_scan(v):
    """A constant of a loop's body, of a rematerialised function, and of a jitted one."""

    @jax.checkpoint
    def body(w, x):
        carry, _ = jax.lax.scan(lambda c, _: (c + jax.jit(lambda x: x @ v)(x), None), x @ w, None, length=2)
        return jnp.tanh(carry)

    return body


FUNCTIONS = {
    "plain": lambda v: lambda w, x: jnp.tanh(x @ w - x @ v),
    "nested": in_a_scan,
    "its entries": lambda v: lambda w, x: jnp.tanh(x @ w - v[1] * v[:3].sum() - jnp.asarray(v)[jnp.argmax(x, 1)]),
}


def value_and_grad(dp, fn, x):
    return dp.value_and_grad(lambda w, x: jnp.mean(fn(w, x) ** 2))(W, x)


def gradient_of_a_call(dp, fn, x):
    return jax.value_and_grad(lambda w: jnp.sqrt(jnp.sum(jdp.DataParallel(fn, dp.devices)(w, x) ** 2)))(W)


def step(dp, fn, x, **options):
    train = dp.train_step(lambda v, x: jnp.mean(fn(v["params"], x) ** 2), optax.sgd(0.1), **options)
    state, metrics = train(train.init({"params": W}), x)
    return metrics["loss"], state.params


DOORS = {
    "call": lambda dp, fn, x: jdp.DataParallel(fn, dp.devices)(W, x),
    "gradient of a call": gradient_of_a_call,
    "jit": lambda dp, fn, x: jax.jit(jdp.DataParallel(fn, dp.devices))(W, x),
    "value_and_grad": value_and_grad,
    "step": step,
    "step of microbatches": lambda dp, fn, x: step(dp, fn, x, accumulate_steps=2),
    "step of shards": lambda dp, fn, x: step(dp, fn, x, shard_params=True),
    "evaluate": lambda dp, fn, x: dp.evaluate(lambda v, x: {"m": jnp.mean(fn(v, x))}, W, [x]),
}


@pytest.mark.each_pair
@pytest.mark.one_case
@pytest.mark.parametrize("rows", [9, 7])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("what", CLOSED_OVER)
@pytest.mark.parametrize("door", DOORS)
def test_it_is_as_if_it_were_on_the_host(door, what, function, rows):
    make = FUNCTIONS[function]
    close(DOORS[door](DP, make(CLOSED_OVER[what]()), X[:rows]), DOORS[door](DP, make(V), X[:rows]))


@pytest.mark.one_case
@pytest.mark.parametrize("door", DOORS)
def test_what_is_replicated(door):
    v = jdp.replicate(V, DP.devices)
    fn = FUNCTIONS["plain"]
    one = jdp.DataParallel(plain, devices=[0])
    close(DOORS[door](DP, fn(v), X[:7]), DOORS[door](one, fn(V), X[:7]))


def test_its_entries_where_a_replica_is_several_devices():
    of, mesh = FUNCTIONS["its entries"], jax.make_mesh((2, 2), ("data", "model"))
    close(value_and_grad(jdp.DataParallel(plain, mesh), of(jdp.replicate(V)), X), value_and_grad(DP, of(V), X))


def test_a_scalar_and_a_metric():
    (loss, _), two = value_and_grad(DP, plain, jdp.scatter(X, DP.devices)), jdp.replicate(np.float32(2), DP.devices)
    found = DP.value_and_grad(lambda w, x: jnp.mean(plain(w, x) * two - loss))(W, X)
    want = jax.value_and_grad(lambda w: jnp.mean(plain(w, X) * 2 - float(loss)))(W)
    close(found, want)


def test_a_teacher_that_is_wrapped():
    """Knowledge distillation, with the teacher's variables where `dp.init` has put them."""
    student, teacher = nn.Dense(3), nn.Dense(3)
    of_student, of_teacher = (jdp.DataParallel(m, devices=range(N)) for m in (student, teacher))
    taught = of_teacher.init(jax.random.key(1), X)

    def loss(variables, x):
        return jnp.mean((student.apply(variables, x) - teacher.apply(taught, x)) ** 2)

    train = of_student.train_step(loss, optax.sgd(0.1))
    variables = jax.device_get(of_student.init(jax.random.key(0), X))
    _, metrics = train(train.init(variables), X[:7])
    given = jax.device_get(taught)
    want = np.mean((student.apply(variables, X[:7]) - teacher.apply(given, X[:7])) ** 2)
    close(metrics["loss"], want)


@pytest.mark.full
def test_an_nnx_teacher_that_is_wrapped():
    student, teacher = (jdp.DataParallel(nnx.Linear(4, 3, rngs=nnx.Rngs(i)), devices=range(N)) for i in range(2))
    teacher(X)  # its parameters lie over the devices from here on
    want = np.mean((student.module(X[:7]) - teacher.module(X[:7])) ** 2)
    step = student.train_step(lambda model, x: jnp.mean((model(x) - teacher.module(x)) ** 2), optax.sgd(0.1))
    close(step(X[:7])["loss"], want)


@pytest.mark.parametrize("on_the_devices", [False, True])
def test_a_teacher_in_training_is_named(on_the_devices):
    student = jdp.DataParallel(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), devices=range(N))
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(1))
    if on_the_devices:
        jdp.DataParallel(norm, devices=range(N))
    step = student.train_step(lambda model, x: jnp.mean(model(norm(x)) ** 2), optax.sgd(0.1))
    with pytest.raises(Exception, match="Cannot mutate") as error:
        step(X)
    assert any("changes an NNX object that it closes over" in note for note in error.value.__notes__)
    assert not any("inside of jax.jit" in note for note in error.value.__notes__)
    norm.eval()
    assert np.isfinite(step(X)["loss"])


def test_a_shard_map_of_the_models_own_has_nothing_to_split():
    """The error is another one under a mesh, and the way out is the same."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("inner",))
    twice = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    with pytest.raises(ValueError, match="mesh|Mesh") as error:
        jdp.DataParallel(lambda w, x: twice(x) * w, devices=range(N))(np.float32(1), X)
    assert any("has nothing to split" in note for note in error.value.__notes__)
    assert not any("name the replica's axes" in note for note in error.value.__notes__)


def test_a_table_of_numpy_is_told_to_be_one_of_jax():
    table = np.ones((3, 2), np.float32)
    with pytest.raises(jax.errors.TracerArrayConversionError) as error:
        jdp.DataParallel(lambda w, i: table[i] * w, devices=range(N))(np.float32(1), np.zeros(6, np.int32))
    assert any("jnp.asarray(table)" in note for note in error.value.__notes__)
