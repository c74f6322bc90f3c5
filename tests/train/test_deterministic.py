"""`deterministic=True`: after any number of steps the same bits on any number of devices that divides the replicas."""

import contextlib
import functools
import hashlib
import re
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st
from laws import close

import jdp
from jdp._core import balanced_sum
from jdp._core.balanced_sum import add_replica, exchange
from jdp._core.replica_mesh import make_mesh

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(64, 8, 8, 3).astype(np.float32), RANDOM.randint(0, 10, 64)
DEVICES = [1, 2, 4, 8]
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for width in (32, 32):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(10)(x.mean((1, 2)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x.reshape(len(x), 8, -1))
        x = x + nn.Dropout(0.1, deterministic=False)(nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x)))
        x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))))
        return nn.Dense(10)(x.mean(1))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(192, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x.reshape(len(x), -1))))))


SLOW = [pytest.param(name, marks=pytest.mark.full) for name in ("cnn", "transformer")]
LINEN = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}


def digest(tree):
    """The SHA-256 of all bits of a tree."""
    found = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        found.update(f"{jax.tree_util.keystr(path)}{x.dtype}{x.shape}".encode() + np.asarray(x).tobytes())
    return found.hexdigest()


def bare(tree):
    """The leaves of a tree, keys as numbers."""
    leaves = jax.tree.leaves(tree)
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def per_row(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def linen_loss(model, v, batch, key):
    x, y = batch
    logits, updates = model.apply(v, x, rngs={"dropout": key}, mutable=["batch_stats"])
    losses = per_row(logits, y)
    right = logits.argmax(-1) == y
    metrics = {"right": jdp.Sum(right.sum()), "mean": jdp.Mean(losses.sum(), len(y)), "rows": losses}
    return losses.mean(), metrics, updates


def variables_of(model):
    return model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X[:2])


def run(name, n, sizes, *, tx=TX, replicas=8, spoilt=(), reduce_state="primary", **options):
    """The state after a step on each of these numbers of rows, and all metrics."""
    options = {"deterministic": True, **options}

    def batch(i, rows):
        x = np.roll(X, i, 0)[:rows]
        return (np.where(i in spoilt, np.nan, x).astype(np.float32), np.roll(Y, i)[:rows])

    metrics = []
    if name == "nnx":
        model = NNX(nnx.Rngs(0))
        dp = jdp.DataParallel(model, range(n), replicas=replicas, reduce_state=reduce_state)

        def loss(model, batch):
            losses = per_row(model(batch[0]), batch[1])
            return losses.mean(), {"rows": losses}

        step = dp.train_step(loss, tx, **options)
        for i, rows in enumerate(sizes):
            metrics.append(step(batch(i, rows)))
        return nnx.as_pure(nnx.state((dp.module, step.optimizer))), metrics
    model = LINEN[name]()
    dp = jdp.DataParallel(model, range(n), replicas=replicas, reduce_state=reduce_state)
    variables = variables_of(model)
    step = dp.train_step(functools.partial(linen_loss, model), tx, **options)
    state = step.init(variables, key=jax.random.key(2))
    for i, rows in enumerate(sizes):
        state, found = step(state, batch(i, rows))
        metrics.append(found)
    return state, metrics


def check_bits(name, sizes, replicas, devices=DEVICES, **options):
    """The same on as many devices as replicas, and on any smaller power of two, or on some of these."""
    found = {n: [*map(digest, run(name, n, sizes, replicas=replicas, **options))] for n in devices if n <= replicas}
    assert len({tuple(x) for x in found.values()}) == 1, found


@pytest.mark.one_case("mlp-2")
@pytest.mark.budget(6)  # each number of devices compiles its own programs
@pytest.mark.parametrize(("name", "replicas"), [("mlp", 2), ("mlp", 4), ("cnn", 2), ("transformer", 2), ("nnx", 2)])
def test_the_bits_are_the_same_on_any_number_of_devices(name, replicas):
    check_bits(name, [32, 7], replicas)


@pytest.mark.full
@pytest.mark.parametrize("name", [*LINEN, "nnx"])
def test_after_50_steps(name):
    check_bits(name, [64] * 49 + [7], 8, DEVICES if name == "mlp" else (2, 8))


@pytest.mark.full
@pytest.mark.budget(6)
def test_without_it_they_are_not():
    assert len({digest(run("mlp", n, [64, 64, 7], deterministic=False)[0].params) for n in (1, 2)}) > 1


@pytest.mark.full
@pytest.mark.one_case("mlp")
@pytest.mark.budget(6)
@pytest.mark.parametrize("name", ["mlp", "nnx", *SLOW])
def test_the_numbers_are_those_of_the_ordinary_step(name):
    (state, metrics), (want, expected) = (
        run(name, 2, [64, 7], replicas=2, tx=optax.sgd(0.1), deterministic=which) for which in (True, False)
    )
    close(metrics, expected)
    close(bare(state), bare(want))


OPTIONS = {
    "accumulated": {"accumulate_steps": 3},
    "bfloat16 on the wire": {"reduce_dtype": jnp.bfloat16},
    "a cut optimizer": {"shard_optimizer": True},
    "skipped": {"skip_nonfinite": True, "spoilt": (1,)},
    "the mean of states": {"reduce_state": "mean"},
    "nothing donated": {"donate": False},
    "compared": {"check_replicas": 1},
    "all": {"accumulate_steps": 2, "shard_optimizer": True, "skip_nonfinite": True, "spoilt": (2,)},
}


# Each program is compiled for each number of devices: an option meets two numbers with statistics of each replica, and
# the third, beside one of these, with statistics of all.
TWO = {option: [(1, 2), (2, 4), (1, 4)][i % 3] for i, option in enumerate(OPTIONS)}
OTHER_TWO = {option: [(1, 4), (1, 2), (2, 4)][i % 3] for i, option in enumerate(OPTIONS)}


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
def test_with_other_options(option):
    check_bits("cnn", [13, 13, 1], 4, TWO[option], **OPTIONS[option])


class Synced(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(8)(x.reshape(len(x), -1)))
        return nn.Dense(10)(jnp.tanh(x))


def on_one_device(model, sizes, rate, accumulate_steps=1):
    """The variables after steps of plain Flax on whole batches, cut into microbatches by their position in a chunk."""
    variables = model.init(jax.random.key(0), X[:2])

    @jax.jit
    def gradient(variables, x, y):
        def loss(params):
            logits, updates = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return per_row(logits, y).mean(), updates

        grads, updates = jax.grad(loss, has_aux=True)(variables["params"])
        return grads, updates

    for i, rows in enumerate(sizes):
        x, y = np.roll(X, i, 0)[:rows], np.roll(Y, i)[:rows]
        parts = [(x, y)]
        if accumulate_steps > 1:  # of 4 replicas with equal chunks
            size = -(-rows // 4 // accumulate_steps)
            place = np.arange(rows) % max(rows // 4, 1) // size  # below 4 rows a chunk has one
            parts = [(x[place == k], y[place == k]) for k in range(place.max() + 1)]
        before, total = variables, jax.tree.map(jnp.zeros_like, variables["params"])
        for mine in parts:
            grads, updates = gradient(variables, *mine)
            step = rate * len(mine[0]) / rows
            total = optax.tree.add_scale(total, step, grads)
            variables = {**variables, **updates}
        variables["params"] = optax.tree.sub(before["params"], total)
    return variables


def check_synced(sizes, devices, **options):
    """Of 4 replicas the same bits on any number of devices, and the numbers of one device and the whole batch."""
    steps, tx = options.get("accumulate_steps", 1), optax.sgd(0.1)
    with mock.patch.dict(LINEN, synced=Synced):
        found = [run("synced", n, sizes, replicas=4, tx=tx, sync_batch_norm=True, **options) for n in devices]
    assert len({(digest(state), digest(metrics)) for state, metrics in found}) == 1
    want = on_one_device(Synced(), sizes, 0.1, steps)
    state = found[0][0]
    close({"params": state.params, **state.state}, want)
    return found[0]


@pytest.mark.full
@pytest.mark.budget(6)
def test_statistics_of_the_whole_batch():
    """Chunks of 4, then of 3, 3, 3 and 2, then of one row on three replicas and none on the last."""
    check_synced([16, 11, 3], (1, 2))


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 3])
def test_statistics_of_the_whole_microbatch(steps):
    check_synced([32, 16, 3], (1, 2, 4), accumulate_steps=steps)


@pytest.mark.full
@pytest.mark.parametrize("name", ["cnn", "nnx"])
def test_statistics_of_the_whole_batch_after_50_steps(name):
    check_bits(name, [64] * 49 + [7], 8, (1, 4), sync_batch_norm=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["cnn", "nnx"])
def test_statistics_of_the_whole_batch_are_those_of_the_ordinary_step(name):
    (state, metrics), (want, expected) = (
        run(name, 4, [64, 13, 7], tx=optax.sgd(0.1), sync_batch_norm=True, deterministic=which)
        for which in (True, False)
    )
    close(metrics, expected)
    close(bare(state), bare(want))


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
def test_statistics_of_the_whole_batch_with_other_options(option):
    check_bits("cnn", [16, 16, 3], 4, OTHER_TWO[option], sync_batch_norm=True, **OPTIONS[option])


@pytest.mark.full
@pytest.mark.budget(6)
def test_a_cut_optimizer_changes_no_bit():
    whole, cut = (digest(run("mlp", 2, [64, 7], replicas=2, shard_optimizer=x)[0]) for x in (False, True))
    assert whole == cut


@pytest.mark.full
@pytest.mark.budget(6)
def test_without_replicas_it_is_as_with_as_many():
    assert digest(run("mlp", 4, [64, 7], replicas=None)) == digest(run("mlp", 1, [64, 7], replicas=4))


@pytest.mark.full
def test_a_run_goes_on_elsewhere(tmp_path):
    """Stopped at 4 devices and resumed on 2 and on 8: the bits of an undisturbed run."""
    sizes = [64, 64, 7, 64, 64, 7]
    undisturbed = digest(run("cnn", 1, sizes)[0])
    model = CNN()
    variables = variables_of(model)

    def part(n, steps):
        dp = jdp.DataParallel(model, range(n), replicas=8)
        step = dp.train_step(functools.partial(linen_loss, model), TX, deterministic=True)
        state = step.init(variables, key=jax.random.key(2))
        with jdp.Checkpointer(tmp_path) as saved:
            if steps[0]:
                state, _ = saved.restore(state)
            for i in steps:
                state, _ = step(state, (np.roll(X, i, 0)[: sizes[i]], np.roll(Y, i)[: sizes[i]]))
            saved.save(steps[-1] + 1, state)
        return digest(state)

    part(4, range(3))
    assert part(2, range(3, 5)) != undisturbed
    assert part(8, range(5, 6)) == undisturbed


def test_no_more_bytes_travel_than_in_an_all_reduce():
    """Recursive halving and doubling sends 2 (n - 1) / n of the vector, as a ring does."""
    mesh, size = make_mesh(tuple(jax.devices())), 1 << 12
    x = jax.ShapeDtypeStruct((8 * size,), np.float32, sharding=mesh.along(0))
    text = exchange(mesh, 0).lower([x], []).compile().as_text()
    sent = [int(n) for n in re.findall(r"= f32\[(\d+)\][^=]* collective-permute\(", text)]
    assert sum(sent) == 2 * size * 7 // 8 and "all-reduce(" not in text


VECTORS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8)


def balanced(rows):
    """The sum by pairs, neighbours first."""
    rows = list(rows)
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


@given(VECTORS, st.sampled_from(DEVICES), st.integers(0, 2**31), st.booleans())
@example([1e4, 0.7, -9e3, 0.3, 77.7, -2.5e3, 3e-3, 11.1], 8, 0, True)
@example([1e4, 0.7, -9e3, 0.3, 77.7, -2.5e3, 3e-3, 11.1], 8, 0, False)
def test_sums_are_one_balanced_tree(row, n, seed, small):
    values = np.outer(row, np.float32([1, 1e-3, -7, 1e3] * 2)).astype(np.float32)
    values = np.random.RandomState(seed).permutation(values)
    values[np.abs(values) < 1e-30] = 0  # XLA takes what is too small for a normal number for 0
    devices = jax.devices()[:n]
    mesh = make_mesh(tuple(devices))
    totals = []
    for device, mine in zip(devices, np.split(values, n), strict=True):
        waiting = []
        for x in mine:
            add_replica(waiting, [jax.device_put(x, device)])
        ((_, (total,)),) = waiting
        totals.append(total)
    where = mesh.along(0)
    together = jax.make_array_from_single_device_arrays((8 * n,), where, totals)
    rows = jax.device_put(np.asarray(together).reshape(n, 8), where)
    with mock.patch.object(balanced_sum, "_SMALL", 1 << 16 if small else 0):  # a small vector is gathered whole
        (found,), (taken,) = exchange(mesh, n - 1)([together], [rows])
    np.testing.assert_array_equal(np.asarray(found), balanced(values))
    np.testing.assert_array_equal(np.asarray(taken)[0], np.asarray(totals[-1]))
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), balanced(values))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "uint32"])
def test_what_is_the_primarys_comes_to_all_to_the_bit(dtype):
    bits = RANDOM.randint(0, 256, (4, 16), np.uint8)
    x = (bits > 127) if dtype == "bool" else bits.view(jnp.dtype(dtype))
    x = np.concatenate([x, x[:, ::-1]], 1)
    mesh = make_mesh(tuple(jax.devices()[:4]))
    _, (found,) = exchange(mesh, 2)([], [jax.device_put(x, mesh.along(0))])
    assert np.asarray(found)[0].tobytes() == np.ascontiguousarray(x[2]).tobytes()


def step_of(loss=None, replicas=8, n=2, **options):
    dp = jdp.DataParallel(lambda v, x: x * v["params"], range(n), replicas=replicas)
    return dp.train_step(loss or (lambda v, x: jnp.mean((dp(v, x) - 6) ** 2)), optax.sgd(0.1), **options)


HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def total(x):
    return jax.lax.psum(x.sum(), "data")


def plain(v, x):
    return jnp.mean((x * v["params"] - 6) ** 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replicas": 6}, "there are 6 replicas"),
        ({"shard_params": True}, "deterministic and shard_params"),
        ({"loss": lambda v, x: plain(v, x) + 0 * jax.lax.pmax(x.sum(), "data")}, "runs a collective .pmax"),
        ({"loss": lambda v, x: plain(v, x) + jax.lax.psum(x, "data", axis_index_groups=HALVES)[0]}, "no sum over all"),
        ({"loss": lambda v, x: plain(v, x) + jax.lax.cond(x[0] > 9, total, jnp.mean, x)}, "replicas meet in a cond"),
        (
            {"loss": lambda v, x: plain(v, x) * jax.lax.fori_loop(0, 3, lambda *_: jax.lax.axis_index("data"), 0)},
            "asks for the replica's index",
        ),
    ],
)
def test_refused(options, text):
    with pytest.raises(ValueError, match=text):
        step = step_of(**{"loss": plain, **options}, deterministic=True)
        step(step.init({"params": np.float32(1)}), np.ones(8, np.float32))


@pytest.mark.full
@pytest.mark.budget(6)
def test_sums_of_the_loss_s_own():
    """By numpy: each replica's mean times the mean of all rows, and a sum in each of three iterations of a loop."""

    def loss(v, x):
        def body(i, total):
            return total + jax.lax.psum((i + 1) * x.sum(), "data")

        return jnp.mean(x * v["params"]) * jax.lax.pmean(x.mean(), "data"), {
            "looped": jdp.Sum(jax.lax.fori_loop(0, 3, body, 0.0)),
            "squared": x**2,
        }

    x, found = np.sin(np.arange(16, dtype=np.float32)), []
    for n in (1, 2):
        step = step_of(loss, replicas=4, n=n, deterministic=True)
        found.append(step(step.init({"params": np.float32(2)}), x))
    (state, metrics), other = found
    assert (digest(state), digest(metrics)) == tuple(map(digest, other))
    mean = x.astype(np.float64).mean()
    close([metrics["loss"], metrics["looped"], metrics["squared"]], [2 * mean**2, 4 * 6 * x.sum(dtype=float), x**2])
    close(state.params, 2 - 0.1 * mean**2)


def test_inside_of_a_jit_it_is_refused():
    step = step_of(plain, deterministic=True)
    state = step.init({"params": np.float32(1)})
    with pytest.raises(ValueError, match="inside of jax.jit"):
        jax.jit(lambda s, x: step(s, x))(state, np.ones(8, np.float32))


@pytest.mark.full
def test_the_index_and_keys_are_those_of_the_replica():
    def loss(v, x, key):
        index = jax.lax.axis_index("data")
        return plain(v, x), {"index": jnp.full(len(x), index), "drawn": jax.random.uniform(key, (len(x),))}

    x, found = np.ones(10, np.float32), []
    for n in DEVICES:
        step = step_of(loss, n=n, deterministic=n < 8)
        _, metrics = step(step.init({"params": np.float32(1)}, key=jax.random.key(0)), x)
        found.append(jax.tree.map(np.asarray, metrics))
    np.testing.assert_array_equal(found[0]["index"], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    for other in found[1:]:
        np.testing.assert_array_equal(other["index"], found[0]["index"])
        np.testing.assert_array_equal(other["drawn"], found[0]["drawn"])


@pytest.mark.full
def test_it_follows_jaxs_configuration():
    """As the ordinary step does: a change compiles new programs, and the old ones are found again."""

    def loss(v, x, key):
        return jnp.mean((x @ v["params"]) ** 2), {"u": jax.random.uniform(key, (len(x),)), "a": jdp.Sum(jnp.ones(()))}

    def metrics_of(**options):
        step = jdp.DataParallel(lambda v, x: x, range(2), replicas=4).train_step(loss, optax.sgd(0.1), **options)
        state, found = step.init({"params": np.ones(3, np.float32)}, key=jax.random.key(1)), []
        for around in (contextlib.nullcontext(), jax.threefry_partitionable(False), jax.enable_x64(True)) * 2:
            with around:
                found.append(step(state, np.ones((8, 3), np.float32))[1])
        return [{name: (x.dtype, np.asarray(x).tolist()) for name, x in one.items() if name != "loss"} for one in found]

    found = metrics_of(deterministic=True, donate=False)
    assert found == metrics_of(donate=False) and found[0]["u"] != found[1]["u"] and found[2]["a"][0] == np.float64


def test_the_state_that_went_in_is_donated():
    step = step_of(plain, deterministic=True)
    state = step.init({"params": np.float32(1)})
    after, _ = step(state, np.ones(8, np.float32))
    assert state.params.is_deleted() and step.last is after
    with pytest.raises(RuntimeError, match="was donated"):
        step(state, np.ones(8, np.float32))


def test_a_cut_optimizer_is_whole_nowhere_between_steps():
    step = step_of(lambda v, x: jnp.mean(x * v["params"].sum()), deterministic=True, shard_optimizer=True)
    state, _ = step(step.init({"params": np.ones(8, np.float32)}), np.ones(8, np.float32))
    assert not step._program._copies


@pytest.mark.one_case("13")
@pytest.mark.budget(6)
@pytest.mark.parametrize("rows", [16, 13])
def test_a_loss_that_calls_the_wrapper_runs_its_model(rows):
    found = []
    for n in (1, 4):
        dp = jdp.DataParallel(lambda v, x: x * v["params"], range(n), replicas=4)
        step = dp.train_step(lambda v, x, dp=dp: jnp.mean((dp(v, x) - 6) ** 2), optax.adam(0.1), deterministic=True)
        state = step.init({"params": np.float32(1)})
        for i in range(3):
            state, metrics = step(state, np.sin(np.arange(rows, dtype=np.float32) + i))
        found.append((digest(state), digest(metrics)))
    assert found[0] == found[1]


@pytest.mark.full
@pytest.mark.parametrize("criterion", [False, True], ids=["chunk", "criterion"])
def test_metrics_by_the_shape_of_a_row(criterion):
    """Batches of one layout may have rows of several shapes, each with metrics of its own."""

    def of(out, x):
        if x.shape[1] == 2:
            return (out**2).mean(), {"narrow": out.mean()}
        return (out**2).mean(), {"wide_sum": out.sum() if criterion else jdp.Sum(out.sum()), "rows": out}

    def forward(v, x):
        return x.sum(1) * v["params"]

    def loss_fn(v, x):
        return of(forward(v, x), x)

    dp = jdp.DataParallel(forward, devices=range(2), replicas=2)
    options = {"criterion": of} if criterion else {}
    step = dp.train_step(forward if criterion else loss_fn, optax.sgd(0.0), deterministic=True, **options)
    state = step.init({"params": np.float32(1)})
    narrow, wide = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(12, dtype=np.float32).reshape(4, 3)
    for _ in range(2):
        for x in (narrow, wide):
            state, metrics = step(state, x)
            expected = {"narrow": x.sum(1).mean()} if x is narrow else {"wide_sum": x.sum(), "rows": x.sum(1)}
            assert metrics.keys() == expected.keys() | {"loss"}
            for name, value in expected.items():
                np.testing.assert_allclose(metrics[name], value, rtol=1e-6)
