"""dp.parallel: steps written for jax.pmap run as they are, and agree with jax.pmap."""

import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import laws
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax.training import train_state

import jdp
from jdp._jax.jaxprs import SAME, VARYING, varying

N, ROWS = 8, 24
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(ROWS, 6)).astype(np.float32), rng.integers(0, 4, ROWS)
close = functools.partial(laws.close, rtol=2e-6, atol=1e-7)


def by_device(tree):
    """The batch as pmap wants it."""
    return jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), tree)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.Dropout(0.3, deterministic=not train)(nn.relu(x)))


class State(train_state.TrainState):
    batch_stats: dict


# The step of flax's imagenet example, with dropout: not a line of it knows of jdp.
def train_step(state, batch, dropout_rng):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": dropout_rng}
        logits, updates = state.apply_fn(variables, batch["x"], train=True, rngs=rngs, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, (logits, updates)

    (loss, (logits, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    metrics = {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["y"])}
    metrics = jax.lax.pmean(metrics, axis_name="batch")
    return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), metrics


def classifier_state():
    model = Classifier()
    variables = model.init(jax.random.key(0), X[:1], train=False)
    return State.create(apply_fn=model.apply, tx=TX, **variables)


# eps: a bias before a BatchNorm has no gradient but rounding, and adam would make steps of that.
TX = optax.adam(1e-2, eps=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("new_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "legacy"])
def test_a_classifier_with_batch_norm_is_that_of_pmap(new_key):
    step = jdp.DataParallel(Classifier()).parallel(train_step, axis_name="batch")
    pmapped = jax.pmap(train_step, axis_name="batch")
    state, stacked = classifier_state(), jax_utils.replicate(classifier_state())
    for i in range(4):
        rngs = jax.random.split(new_key(i), N)
        state, metrics = step(state, {"x": X, "y": Y}, rngs)
        stacked, expected = pmapped(stacked, by_device({"x": X, "y": Y}), rngs)
        close(metrics, expected)
    want = jax_utils.unreplicate(stacked)
    assert int(state.step) == 4 and state.params["Dense_0"]["kernel"].shape == (6, 16)
    close(state.params, want.params, rtol=1e-5)
    close(state.batch_stats, want.batch_stats, rtol=1e-5)  # those of the first device


@pytest.mark.full
def test_reduce_state_mean_averages_what_differs_and_leaves_what_agrees():
    stats = {}
    for reduce_state in ("primary", "mean"):
        step = jdp.DataParallel(Classifier(), reduce_state=reduce_state).parallel(train_step, axis_name="batch")
        state, _ = step(classifier_state(), {"x": X, "y": Y}, jax.random.split(jax.random.key(0), N))
        stats[reduce_state] = state.batch_stats["BatchNorm_0"]["mean"]
    stacked, _ = jax.pmap(train_step, axis_name="batch")(
        jax_utils.replicate(classifier_state()), by_device({"x": X, "y": Y}), jax.random.split(jax.random.key(0), N)
    )
    each = stacked.batch_stats["BatchNorm_0"]["mean"]
    close(stats["mean"], each.mean(0), rtol=1e-5)
    close(stats["primary"], each[0], rtol=1e-5)
    assert not np.allclose(stats["mean"], stats["primary"])


class Net(nn.Module):
    out: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.out)(nn.leaky_relu(nn.Dense(12)(x)))


GENERATOR, CRITIC = Net(6), Net(1)
G_TX, D_TX = optax.adam(1e-3, b1=0.5), optax.rmsprop(2e-3)


def gan_step(state, real, key):
    """A GAN with two optimizers, each with its own gradient and its own pmean."""
    (g, g_opt), (d, d_opt) = state
    key = jax.random.fold_in(key, jax.lax.axis_index("batch"))
    noise = jax.random.normal(key, (len(real), 3))

    def d_loss(d):
        fake = CRITIC.apply(d, GENERATOR.apply(g, noise))
        return jnp.mean(jax.nn.softplus(fake)) + jnp.mean(jax.nn.softplus(-CRITIC.apply(d, real)))

    def g_loss(g):
        return jnp.mean(jax.nn.softplus(-CRITIC.apply(d, GENERATOR.apply(g, noise))))

    d_value, d_grads = jax.value_and_grad(d_loss)(d)
    updates, d_opt = D_TX.update(jax.lax.pmean(d_grads, "batch"), d_opt)
    d = optax.apply_updates(d, updates)
    g_value, g_grads = jax.value_and_grad(g_loss)(g)
    updates, g_opt = G_TX.update(jax.lax.pmean(g_grads, "batch"), g_opt)
    g = optax.apply_updates(g, updates)
    return ((g, g_opt), (d, d_opt)), jax.lax.pmean({"g": g_value, "d": d_value}, "batch"), GENERATOR.apply(g, noise)


def gan_state():
    g, d = GENERATOR.init(jax.random.key(1), np.ones((1, 3))), CRITIC.init(jax.random.key(2), X[:1])
    return (g, G_TX.init(g)), (d, D_TX.init(d))


@pytest.mark.full
def test_a_gan_with_two_optimizers_is_that_of_pmap():
    step, pmapped = jdp.DataParallel(GENERATOR, axis_name="batch").parallel(gan_step), jax.pmap(gan_step, "batch")
    state, stacked = gan_state(), jax_utils.replicate(gan_state())
    for i in range(3):
        keys = jax.random.split(jax.random.key(i), N)
        state, metrics, fake = step(state, X, keys)
        stacked, expected, fake_by_device = pmapped(stacked, by_device(X), keys)
        close(metrics, expected, rtol=1e-5)
    close(state, jax_utils.unreplicate(stacked), rtol=2e-5)
    close(fake, fake_by_device.reshape(ROWS, 6), rtol=2e-5)  # with a row per example: gathered in order


@pytest.mark.full
def test_two_states_are_two_whole_arguments_by_in_axes():
    def two(g, d, batch, key):
        state, metrics, _ = gan_step((g, d), batch, key)
        return *state, metrics

    dp = jdp.DataParallel(GENERATOR, axis_name="batch")
    step = dp.parallel(two, in_axes=(None, None, 0, 0), out_axes=(None, None, 0))
    keys = jax.random.split(jax.random.key(0), N)
    g, d, metrics = step(*gan_state(), X, keys)
    want, expected, _ = dp.parallel(gan_step)(gan_state(), X, keys)
    close(((g, d), metrics), (want, expected), rtol=1e-5)


def test_one_key_is_folded_with_the_replica():
    dp = jdp.DataParallel(lambda w, x: x)
    _, bits = dp.parallel(lambda w, x, key: (w, jax.random.bits(key)))(1.0, X, jax.random.key(0))
    assert bits.shape == (N,) and len(set(bits.tolist())) == N
    assert bits[0] == jax.random.bits(jax.random.key(0))


def test_an_evaluation_step_loses_no_rows():
    """Its single result is no state: what differs between replicas is gathered, what agrees is one."""
    dp = jdp.DataParallel(lambda w, x: x)

    def evaluate(w, x):
        return {"rows": x * w, "mean": jax.lax.pmean(x.mean(), "data")}

    out = dp.parallel(evaluate)(2.0, X)
    np.testing.assert_array_equal(out["rows"], X * 2)
    assert out["mean"].shape == () and np.isclose(out["mean"], X.mean())


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.dense, self.norm = nnx.Linear(6, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.dense(x)))))


@pytest.mark.full
def test_nnx_objects_are_replicated_and_updated_in_place():
    def step(model, optimizer, x, y):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, jax.lax.pmean(grads, "data"))
        return jax.lax.pmean(loss, "data")

    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    parallel = jdp.DataParallel(model).parallel(step)
    losses = [parallel(model, optimizer, X, Y) for _ in range(5)]
    assert losses[0].shape == (N,) and len(set(losses[-1].tolist())) == 1
    assert losses[-1][0] < losses[0][0]
    assert int(optimizer.step[...]) == 5 and int(model.dropout.rngs.count[...]) == 5
    # Independent: one replica's own loop has the same statistics after one step.
    alone = Model()
    alone(X[:3])
    fresh = Model()
    jdp.DataParallel(fresh).parallel(step)(fresh, nnx.Optimizer(fresh, optax.sgd(0.0), wrt=nnx.Param), X, Y)
    close(fresh.norm.mean[...], alone.norm.mean[...], rtol=1e-5)


def test_uneven_chunks_are_refused_before_anything_runs():
    dp = jdp.DataParallel(lambda w, x: x)
    step = dp.parallel(lambda w, x: (w, jax.lax.pmean(x.mean(), "data")))
    with pytest.raises(ValueError, match=r"\(psum over 'data'\) and its chunks are \(3, 3, 3, 3, 3, 3, 3, 2\)"):
        step(1.0, X[:-1])
    no_collective = dp.parallel(lambda w, x: (w, x * w))
    np.testing.assert_array_equal(no_collective(2.0, X[:-1])[1], X[:-1] * 2)


@pytest.mark.full
def test_it_is_compiled_once_and_composes_with_donation(compilations):
    step = jdp.DataParallel(Classifier()).parallel(train_step, axis_name="batch")
    donating = jax.jit(step, donate_argnums=0)
    state = jdp.replicate(classifier_state())
    keys = jax.random.split(jax.random.key(0), N)
    for _ in range(2):  # flax makes the first state's step a Python number, which JAX types weakly
        state, _ = donating(state, {"x": X, "y": Y}, keys)
    old, compiled = state, compilations()
    state, _ = donating(state, {"x": X, "y": Y}, keys)
    assert compiled and compilations() == 0
    assert all(x.is_deleted() for x in jax.tree.leaves(old.params))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda dp: dp.parallel(3), "step_fn is a int"),
        (lambda dp: dp.parallel(lambda: 1)(), "no arguments"),
        (lambda dp: dp.parallel(lambda w, x: w, in_axes=(None,))(1.0, X), "in_axes has 1 entries for 2"),
        (lambda dp: dp.parallel(lambda w, x: (w, x), out_axes=(None,))(1.0, X), "out_axes has 1 entries for 2"),
    ],
)
def test_bad_input(call, match, refused):
    with refused((TypeError, ValueError), "parallel", match=match):
        call(jdp.DataParallel(lambda w, x: x))


def loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, c: c + x, jnp.zeros(()))


def until(x):
    return jax.lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] + 1), (0.0, 0.0))[1]


def scan(w, x):
    return jax.lax.scan(lambda c, _: ((c[1], x), None), (w, w), length=3)[0][0]


@pytest.mark.one_case
@pytest.mark.parametrize(
    "fn, differs",
    [
        (lambda w, x: w * 2, False),
        (lambda w, x: x * 2, True),
        (lambda w, x: jax.lax.psum(x, "data") * w, False),
        (lambda w, x: jax.lax.pmax(jax.jit(jnp.sin)(x), "data"), False),
        (lambda w, x: jax.lax.all_gather(x, "data"), False),
        (lambda w, x: jax.lax.psum(x, "data", axis_index_groups=[list(range(4)), list(range(4, 8))]), True),
        (lambda w, x: jax.lax.ppermute(w, "data", [(0, 1)]), True),
        (lambda w, x: w * jax.lax.axis_index("data"), True),
        (lambda w, x: jax.jit(lambda a: a * jax.lax.axis_index("data"))(w), True),
        (lambda w, x: loop(w), False),
        (lambda w, x: loop(x), True),
        (lambda w, x: until(w), False),
        (lambda w, x: until(x), True),
        (lambda w, x: scan(w, x), True),  # only in the third round
        (lambda w, x: scan(w, jax.lax.pmean(x, "data")), False),
        (lambda w, x: jax.lax.cond(x > 0, lambda: 1.0, lambda: 2.0), True),
        (lambda w, x: jax.lax.cond(w > 0, lambda: x, lambda: 2.0), True),
        (lambda w, x: jax.lax.cond(w > 0, lambda: w, lambda: 2.0), False),
        (lambda w, x: jax.nn.relu(w), False),  # a custom_jvp
        (lambda w, x: jax.checkpoint(jnp.sin)(x), True),
        (lambda w, x: jax.grad(lambda w: jax.lax.pmean(w * x, "data"))(w), True),
        (lambda w, x: jax.lax.pmean(jax.grad(lambda w: w * x)(w), "data"), False),
    ],
)
def test_which_values_differ_between_replicas(fn, differs, devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    found = []

    def local(w, x):
        jaxpr = jax.make_jaxpr(fn)(w, x[0])
        found.extend(varying(jaxpr, [SAME, VARYING], "data"))
        out = fn(w, x[0])
        return jnp.ravel(out)[None]

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"), check_vma=False)
    out = np.asarray(jax.jit(mapped)(1.5, np.arange(8.0) - 3))
    assert found[0].varying == differs
    if not differs:  # nothing that is called the same may differ
        assert (out == out[:1]).all()
    else:
        assert not (out == out[:1]).all()


def test_inside_a_replica_the_step_runs_directly(devices):
    step = jdp.DataParallel(lambda w, x: x).parallel(lambda w, x: (w, jax.lax.psum(x, "data")))
    out = jax.pmap(partial(step, 1.0), axis_name="data")(np.arange(8.0))
    np.testing.assert_array_equal(out[1], np.full(8, 28.0))


@pytest.mark.parametrize("rows", [5, 1])
def test_a_state_that_a_step_returns_as_it_came_stays_on_idle_replicas(rows):
    """5 rows over 4 devices are 2, 2 and 1: the last replica has none, and its copy of the state is the others'."""
    dp = jdp.DataParallel(lambda w, x: x, devices=range(4))
    step = dp.parallel(lambda w, x: (w, x * w))
    w, y = step(np.float32(2), np.ones(rows, np.float32))
    assert [float(shard.data) for shard in w.addressable_shards] == [2] * 4
    np.testing.assert_array_equal(y, np.full(rows, 2, np.float32))
    np.testing.assert_array_equal(step(w, np.ones(8, np.float32))[1], np.full(8, 2, np.float32))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_an_array_that_comes_in_twice_is_not_freed(n, moved):
    """In two places of what is donated, and as another argument; also as another object with the same memory."""
    dp = jdp.DataParallel(lambda w, x: x, devices=range(n))
    train = dp.parallel(
        lambda s, ema, x: (
            {"w": s["w"] - 0.5 * ema, "target": s["target"] + s["w"]},
            x * s["w"][0],
        ),
        in_axes=(None, None, 0),
        out_axes=(None, 0),
        donate_argnums=0,
    )
    w, x = np.arange(1, 5, dtype=np.float32), np.ones(8, np.float32)
    state, _ = train({"w": w, "target": w}, w, x)
    state = {**state, "target": state["w"]}
    want = np.asarray(state["w"])
    mesh = jax.make_mesh((n,), ("mine",), devices=jax.devices()[:n])
    ema = jax.device_put(state["w"], jax.sharding.NamedSharding(mesh, jax.P())) if moved else state["w"]
    after, y = train(state, ema, x)
    np.testing.assert_array_equal(after["w"], 0.5 * want)
    np.testing.assert_array_equal(after["target"], 2 * want)
    np.testing.assert_array_equal(y, np.full(8, want[0]))
