"""ZeRO-1 (`shard_optimizer=True`): the same parameters as one device's, and a part of the optimizer's state on each."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hlo import BYTES, COLLECTIVE, computations, in_loops, size_in_bytes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from laws import INPUTS, assert_cut, bytes_of, divides

import jdp

RANDOM = np.random.RandomState(0)
ROWS = 64
X, Y = RANDOM.randn(ROWS, 3), RANDOM.randn(ROWS, 6)
# Cut along the first axis, along the second, by 2 devices but not by 8, and not at all.
PARAMS = {
    "in": {"w": RANDOM.randn(3, 16) / 2, "b": RANDOM.randn(16) / 2},
    "mid": RANDOM.randn(16, 16) / 4,
    "out": [RANDOM.randn(16, 6) / 4, RANDOM.randn(6) / 4],
    "scale": np.float64(1.5),
}


def single(tree):
    return jax.tree.map(np.float32, tree)


def double(tree):
    return tree


def batch(size, cast=single, start=0):
    return cast((X[start : start + size], Y[start : start + size]))


def model(params, x):
    h = jnp.tanh(jnp.tanh(x @ params["in"]["w"] + params["in"]["b"]) @ params["mid"])
    return (h @ params["out"][0] + params["out"][1]) * params["scale"]


def loss(variables, batch):
    x, y = batch
    return jnp.mean((model(variables["params"], x) - y) ** 2)


@functools.cache
def wrapper(n):
    return jdp.DataParallel(model, devices=range(n))


@functools.cache
def step_of(n, tx, **options):
    """One step for all tests with the same arguments, so that its programs are compiled once."""
    return wrapper(n).train_step(loss, tx, **options)


@functools.cache
def gradient():
    return jax.jit(jax.value_and_grad(lambda params, *batch: loss({"params": params}, batch)))


@functools.cache
def update(tx):
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(update)


def plain_loop(tx, params, batches):
    """The reference: one device, the whole batch, a bare optax loop."""
    opt_state = jax.jit(tx.init)(params)
    for data in batches:
        _, grads = gradient()(params, *data)
        params, opt_state = update(tx)(grads, opt_state, params)
    return params, opt_state


def train(step, state, batches):
    for data in batches:
        state, _ = step(state, data)
    return state


def close(got, want, tolerance=None):
    """The same tree, shapes and dtypes, and values equal to rounding: they are of the order of one."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree
    for (path, g), w in zip(got_leaves, want_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        assert g.dtype == w.dtype and np.shape(g) == np.shape(w), where
        exact = not jnp.issubdtype(g.dtype, jnp.floating)
        limit = 0 if exact else tolerance or {8: 1e-12, 4: 1e-5}[g.dtype.itemsize]
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=limit, atol=limit, err_msg=where)


@pytest.fixture
def float64():
    """For this test alone: the context is part of the key of each of JAX's caches."""
    with jax.enable_x64(True):
        yield


# --- the equation, and where the state lies ---

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)


def labels(params):
    return jax.tree.map_with_path(lambda path, _: "b" if "b" in jax.tree_util.keystr(path[-1:]) else "w", params)


TRANSFORMATIONS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.05),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05)),
    "lamb": optax.lamb(0.05),
    # Factored moments, of all matrices here: rows and columns of their own shapes.
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=2),
    "lion": optax.lion(0.01),
    "two of them": optax.multi_transform({"w": optax.adam(0.05), "b": optax.sgd(0.1, momentum=0.9)}, labels),
    "a schedule": optax.adam(SCHEDULE),
    "several steps": optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "a mask": optax.masked(optax.adam(0.05), {"in": True, "mid": False, "out": [True, True], "scale": False}),
}
# In turn 8 devices, and 2 with microbatches; and in turn an uneven batch, and an even and an uneven one.
CASES = [(name, *((8, 1), (2, 2))[i % 2], (16, 13)[i // 2 % 2 :]) for i, name in enumerate(TRANSFORMATIONS)]


@pytest.mark.one_case("lamb-2-2-sizes3")
@pytest.mark.parametrize("name, n, accumulate, sizes", CASES)
def test_every_optimizer_is_that_of_one_device(name, n, accumulate, sizes):
    """Norms, factored moments and layers of their own are those of the whole arrays, whatever is cut."""
    tx = TRANSFORMATIONS[name]
    step = step_of(n, tx, shard_optimizer=True, accumulate_steps=accumulate)
    batches = [batch(sizes[i % len(sizes)], start=3 * i) for i in range(4)]
    first = step.init({"params": single(PARAMS)})
    where = jax.tree.map(lambda x: x.sharding, first)
    assert_cut(first.opt_state, n)
    state = train(step, first, batches)
    close((state.params, state.opt_state), plain_loop(tx, single(PARAMS), batches))
    assert jax.tree.map(lambda x: x.sharding, state) == where  # as init has cut it, so it stays
    assert_cut(state.opt_state, n)
    assert_cut((state.params, state.step), n, cut=False)
    assert step.optimizer_bytes(state) == bytes_of(state.opt_state, n)


@pytest.mark.full
def test_the_shapes_of_a_state_hold_no_number_of_devices():
    """Nor does it matter whether the state is cut."""
    for name in ("adam", "adafactor", "two of them"):
        tx = TRANSFORMATIONS[name]
        want = jax.eval_shape(tx.init, single(PARAMS))
        for n, shard in ((8, True), (2, True), (1, True), (8, False)):
            state = step_of(n, tx, shard_optimizer=shard).init({"params": single(PARAMS)})
            got = jax.tree.map(lambda x: (x.shape, x.dtype), state)
            assert got.opt_state == jax.tree.map(lambda x: (x.shape, x.dtype), want)
            assert got.params == jax.tree.map(lambda x: (x.shape, x.dtype), single(PARAMS))
            assert_cut(state.opt_state, n, cut=shard)


@pytest.mark.one_case
@pytest.mark.parametrize("n, accumulate, size", [(2, 2, 21), (3, 1, 24), (8, 1, 21)])
def test_it_is_the_unsharded_step(float64, n, accumulate, size):
    tx = TRANSFORMATIONS["adam"]
    batches = [batch(size, cast=double, start=i) for i in range(4)]
    states = []
    for shard in (True, False):
        step = step_of(n, tx, shard_optimizer=shard, accumulate_steps=accumulate)
        states.append(train(step, step.init({"params": PARAMS}), batches))
        part, whole = bytes_of(states[-1].opt_state, n if shard else 1)
        assert step.optimizer_bytes(states[-1]) == (part, whole) and (part > 0) == shard
    close(*states)
    close((states[0].params, states[0].opt_state), plain_loop(tx, PARAMS, batches))


@pytest.mark.full
def test_one_device_has_nothing_to_cut(same):
    tx, batches = TRANSFORMATIONS["adam"], [batch(7)] * 2
    states = []
    for shard in (True, False):
        step = step_of(1, tx, shard_optimizer=shard)
        states.append(train(step, step.init({"params": single(PARAMS)}), batches))
    same(*states)
    assert_cut(states[0].opt_state, 1)


def test_adam_takes_an_eighth_of_its_memory_on_each_of_8_devices():
    """Of the moments, where all that is large can be cut; measured on the device, not computed."""
    params = {"w": np.ones((64, 128), np.float32), "b": np.ones(128, np.float32)}
    step = wrapper(8).train_step(lambda v, x: jnp.mean(x @ v["params"]["w"] + v["params"]["b"]), optax.adam(0.1))
    cut = wrapper(8).train_step(
        lambda v, x: jnp.mean(x @ v["params"]["w"] + v["params"]["b"]), optax.adam(0.1), shard_optimizer=True
    )
    moments = 2 * sum(w.nbytes for w in params.values())
    assert step.optimizer_bytes(step.init({"params": params})) == (0, moments + 4)  # and the count
    state = cut.init({"params": params})
    assert cut.optimizer_bytes(state) == (moments // 8, 4)
    x = np.ones((8, 64), np.float32)
    sizes = [s.lower(s.init({"params": params}), x).compile().memory_analysis() for s in (step, cut)]
    saved = sizes[0].argument_size_in_bytes - sizes[1].argument_size_in_bytes
    assert saved == moments - moments // 8


# --- collections, keys, skipped steps, donation ---


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(16, use_bias=False)(x))
        return nn.Dense(6)(nn.Dropout(0.5, deterministic=not train)(nn.tanh(x)))


def normed_loss(variables, batch, key):
    x, y = batch
    out, updates = Normed().apply(variables, x, mutable=["batch_stats"], rngs={"dropout": key})
    return jnp.mean((out - y) ** 2), {"out": out}, updates


@pytest.mark.full
def test_collections_keys_metrics_and_skipped_steps_are_those_of_the_unsharded_step():
    variables = jax.tree.map(np.asarray, jax.jit(lambda x: Normed().init(jax.random.key(0), x, train=False))(X))
    good, bad = batch(16), batch(16)
    bad[0][13, 1] = np.nan
    # eps: behind a BatchNorm of two rows gradients are all but zero, and adam would make steps of their rounding.
    tx, found = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05, eps=1e-3)), []
    for shard in (True, False):
        step = jdp.DataParallel(Normed(), devices=range(8)).train_step(
            normed_loss, tx, shard_optimizer=shard, skip_nonfinite=True
        )
        state, metrics = step(step.init(variables, jax.random.key(1)), good)
        assert not metrics["skipped"]
        before = jax.tree.map(np.array, state.replace(key=None))
        after, skipped = step(state, bad)
        assert skipped["skipped"] and all(x.is_deleted() for x in jax.tree.leaves(state))
        jax.tree.map(np.testing.assert_array_equal, after.replace(key=None), before)
        assert_cut(after.opt_state, 8, cut=shard)
        last, more = step(after, good)
        assert not more["skipped"] and int(last.step) == 2
        found.append((last.params, last.opt_state, last.state, metrics, more))
    close(*found)


def test_a_call_that_fails_leaves_the_cut_state_as_it_was():
    step = step_of(8, TRANSFORMATIONS["adam"], shard_optimizer=True)
    state = step.init({"params": single(PARAMS)})
    with pytest.raises(ValueError, match="the batch has 0 rows"):
        step(state, batch(0))
    after, _ = step(state, batch(16))
    with pytest.raises(RuntimeError, match="was donated"):
        step(state, batch(16))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))


@pytest.mark.full
def test_inside_of_jit_and_of_a_scan_the_state_stays_cut():
    tx, n = TRANSFORMATIONS["clipped adamw"], 8
    step, batches = step_of(n, tx, shard_optimizer=True), [batch(16, start=i) for i in range(3)]
    state = step.init({"params": single(PARAMS)})
    scanned, _ = jax.jit(lambda state, data: jax.lax.scan(step, state, data))(
        state, jax.tree.map(lambda *rows: np.stack(rows), *batches)
    )
    close((scanned.params, scanned.opt_state), plain_loop(tx, single(PARAMS), batches))
    assert_cut(scanned.opt_state, n)
    once, _ = jax.jit(lambda state, data: step(state, data))(state, batches[0])
    assert_cut(once.opt_state, n)


@pytest.mark.full
def test_multi_steps_as_optax_gives_it():
    """It has `init` and `update`, which flax's TrainState and nnx.Optimizer take, and is no GradientTransformation."""
    step = wrapper(2).train_step(loss, optax.MultiSteps(optax.adam(0.05), 2), shard_optimizer=True)
    state = train(step, step.init({"params": single(PARAMS)}), [batch(16)] * 2)
    want, _ = plain_loop(TRANSFORMATIONS["several steps"], single(PARAMS), [batch(16)] * 2)
    close(state.params, want)


# --- NNX ---


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(3, 16, rngs=rngs), nnx.Linear(16, 6, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def nnx_loss(net, batch):
    x, y = batch
    return jnp.mean((net(x) - y) ** 2)


@pytest.mark.full
@pytest.mark.parametrize("n, accumulate, made_of", [(8, 1, "transformation"), (2, 2, "wrapper")])
def test_nnx_optimizers_are_cut_in_place(n, accumulate, made_of):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
    dp, net = jdp.DataParallel(Net(nnx.Rngs(0)), devices=range(n)), Net(nnx.Rngs(0))
    ours = tx if made_of == "transformation" else nnx.Optimizer(dp, tx, wrt=nnx.Param)
    step = dp.train_step(nnx_loss, ours, shard_optimizer=True, accumulate_steps=accumulate)
    assert made_of == "transformation" or step.optimizer is ours
    theirs = nnx.Optimizer(net, tx, wrt=nnx.Param)
    one = nnx.jit(lambda net, theirs, batch: theirs.update(net, nnx.grad(nnx_loss)(net, batch)))
    for size in (16, 13, 16):
        assert_cut(nnx.as_pure(step.optimizer.opt_state), n)
        step(batch(size))
        one(net, theirs, batch(size))
    close(nnx.state(dp.module), nnx.state(net))
    found, want = (jax.tree.leaves(nnx.as_pure(o.opt_state)) for o in (step.optimizer, theirs))
    close(found, want)
    assert_cut(nnx.as_pure(step.optimizer.opt_state), n)
    assert_cut(nnx.as_pure(nnx.state(dp.module)), n, cut=False)
    assert step.optimizer_bytes() == bytes_of(nnx.as_pure(step.optimizer.opt_state), n)


# --- Orbax ---


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
BATCHES = [batch(16, start=3 * i) for i in range(4)]


def keyed(variables, batch, key):
    """What is drawn changes nothing, so that any number of devices gives the same."""
    return loss(variables, batch), {"drawn": jnp.full(len(batch[0]), jax.random.bits(key))}


@functools.cache
def keyed_step(n, shard):
    return wrapper(n).train_step(keyed, CLIPPED, shard_optimizer=shard)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Where Orbax has saved the state after two steps on 8 devices, cut, and with a key."""
    step = keyed_step(8, True)
    state = train(step, step.init({"params": single(PARAMS)}, jax.random.key(5)), BATCHES[:2])
    path = tmp_path_factory.mktemp("checkpoint")
    with ocp.CheckpointManager(path) as manager:
        manager.save(2, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return path


@pytest.mark.full
@pytest.mark.parametrize("n, shard", [(8, True), (2, True), (3, False), (1, False)])
def test_a_checkpoint_goes_on_on_any_number_of_devices(checkpoint, n, shard):
    """As the run would have gone on, and lying as a state of the new step does."""
    step = keyed_step(n, shard)
    like = step.init({"params": single(PARAMS)}, jax.random.key(0))
    with ocp.CheckpointManager(checkpoint) as manager:
        restored = manager.restore(2, args=ocp.args.StandardRestore(like))
    assert isinstance(restored, jdp.TrainState) and int(restored.step) == 2
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, like)
    assert_cut(restored.opt_state, n, cut=shard)
    if n == 1:  # as after a restart: the step has never seen a state
        step = wrapper(n).train_step(keyed, CLIPPED)
    for i in (2, 3):
        restored, metrics = step(restored, BATCHES[i])
    close((restored.params, restored.opt_state), plain_loop(CLIPPED, single(PARAMS), BATCHES))
    key = jax.random.fold_in(jax.random.key(5), 3)
    assert int(restored.step) == 4 and int(metrics["drawn"][0]) == int(jax.random.bits(key))
    assert_cut(restored.opt_state, n, cut=shard)


@pytest.mark.full
def test_a_state_that_lies_elsewhere_is_put_where_it_belongs():
    """On the host, on one device, on fewer devices, or whole where it is cut."""
    tx = TRANSFORMATIONS["adam"]
    two, eight = step_of(2, tx, shard_optimizer=True), step_of(8, tx, shard_optimizer=True)
    batches = [batch(16), batch(16, start=4)]
    want = plain_loop(tx, single(PARAMS), batches)

    def state():
        return train(two, two.init({"params": single(PARAMS)}), batches[:1])

    whole = NamedSharding(Mesh(jax.devices(), "data"), PartitionSpec())
    for place in (
        lambda tree: tree,
        lambda tree: jax.tree.map(np.asarray, tree),
        lambda tree: jax.device_put(tree, jax.devices()[3]),
        lambda tree: jax.device_put(tree, whole),
    ):
        after, _ = eight(place(state()), batches[1])
        close((after.params, after.opt_state), want)
        assert_cut(after.opt_state, 8)


# --- what the program does ---


def collectives(hlo, loops):
    """The bytes that each kind of collective gives out, of which none is in a loop, and there are loops if it is so."""
    found = computations(hlo)
    looped = in_loops(found)
    assert bool(looped) == loops
    sent = {}
    for name, lines in found.items():
        for line in lines:
            if match := COLLECTIVE.search(line):
                assert name not in looped, line
                sent[match[2]] = sent.get(match[2], 0) + size_in_bytes(match[1])
    return sent


def weigh(tree):
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))


def split(params, n):
    """Bytes of the parameters that can be cut, and of the others."""
    leaves = jax.tree.leaves(params)
    return weigh([x for x in leaves if divides(x, n)]), weigh([x for x in leaves if not divides(x, n)])


@pytest.mark.full
@pytest.mark.parametrize("size, accumulate", [(64, 1), (61, 4)])
def test_each_gradient_is_reduced_once_whatever_the_microbatches(size, accumulate):
    """Unsharded: one all-reduce of each gradient and of the loss, and nothing else."""
    step = step_of(8, TRANSFORMATIONS["clipped adamw"], accumulate_steps=accumulate)
    state = step.init({"params": single(PARAMS)})
    hlo = step.lower(state, batch(size)).compile().as_text()
    assert collectives(hlo, loops=accumulate > 1) == {"all-reduce": weigh(single(PARAMS)) + 4}


@pytest.mark.one_case
@pytest.mark.parametrize("name, scalars", [("adam", 0), ("clipped adamw", 4)])
@pytest.mark.parametrize("size, accumulate", [(64, 1), (61, 4)])
def test_gradients_are_scattered_and_parameters_gathered_once(size, accumulate, name, scalars):
    """ZeRO: a reduce-scatter of what can be cut, an all-gather of its parameters, and none of the optimizer's state."""
    n = 8
    step = step_of(n, TRANSFORMATIONS[name], shard_optimizer=True, accumulate_steps=accumulate)
    state = step.init({"params": single(PARAMS)})
    hlo = step.lower(state, batch(size)).compile().as_text()
    cut, rest = split(single(PARAMS), n)
    sent = collectives(hlo, loops=accumulate > 1)
    assert sent.pop("reduce-scatter") == cut // n  # what comes out, of operands of n times the size
    assert sent.pop("all-gather") == cut
    # The whole gradients and the loss; and of a global norm the sum of each array's squares.
    leaves = len(jax.tree.leaves(PARAMS))
    assert rest + 4 <= sent.pop("all-reduce") <= rest + 4 + scalars * leaves
    assert not sent


def test_a_step_that_may_be_skipped_gathers_each_parameter_once():
    """It chooses between the parts, and gathers what it chose; not the parameters before and after."""
    step = step_of(8, TRANSFORMATIONS["adam"], shard_optimizer=True, skip_nonfinite=True)
    hlo = step.lower(step.init({"params": single(PARAMS)}), batch(64)).compile().as_text()
    assert collectives(hlo, loops=False)["all-gather"] == split(single(PARAMS), 8)[0]


def stable(lowered, kind):
    """The operands of a collective as the program is handed to the compiler: (dtype, bytes)."""
    found = re.findall(rf"stablehlo\.{kind}\"?.*?\}}\) : \((.*?)\) ->", lowered.as_text(), re.DOTALL)
    arrays = re.findall(r"tensor<((?:\d+x)*)(\w+)>", " ".join(found))
    return [(dtype, BYTES[dtype] * int(np.prod([int(d) for d in dims.split("x") if d]))) for dims, dtype in arrays]


@pytest.mark.full
@pytest.mark.parametrize("shard", [False, True])
def test_gradients_travel_in_the_dtype_that_is_asked_for(shard):
    """bfloat16 halves the bytes; the loss stays in float32. In StableHLO, for XLA's CPU compiler sends float32."""
    step = step_of(8, TRANSFORMATIONS["adam"], shard_optimizer=shard, reduce_dtype=jnp.bfloat16, accumulate_steps=2)
    lowered = step.lower(step.init({"params": single(PARAMS)}), batch(64))
    cut, rest = split(single(PARAMS), 8)
    reduced, scattered = stable(lowered, "all_reduce"), stable(lowered, "reduce_scatter")
    assert sum(size for _, size in scattered) == (cut // 2 if shard else 0)
    assert {kind for kind, _ in scattered} <= {"bf16"}
    assert sum(size for kind, size in reduced if kind == "bf16") == (rest if shard else cut + rest) // 2
    assert [(kind, size) for kind, size in reduced if kind != "bf16"] == [("f32", 4)]


@pytest.mark.full
def test_what_travels_in_bfloat16_gives_nearly_the_same_parameters():
    step = step_of(8, TRANSFORMATIONS["momentum"], shard_optimizer=True, reduce_dtype=jnp.bfloat16)
    state = train(step, step.init({"params": single(PARAMS)}), [batch(64), batch(61)])
    want, _ = plain_loop(TRANSFORMATIONS["momentum"], single(PARAMS), [batch(64), batch(61)])
    for got, exact, first in zip(*map(jax.tree.leaves, (state.params, want, single(PARAMS))), strict=True):
        assert got.dtype == np.float32
        # Each summand is rounded to 8 bits, and so may be each of the sums.
        got, exact = np.asarray(got), np.asarray(exact)
        assert 0 < np.abs(got - exact).max() < 2**-6 * np.abs(exact - first).max()


@pytest.mark.full
def test_a_second_init_of_other_shapes_is_cut_along_its_own_axes():
    dp = jdp.DataParallel(lambda v, x: x)
    tx = optax.adam(0.1)
    step = dp.train_step(lambda v, x: x.mean() * jnp.mean((v["params"] - 3) ** 2), tx, shard_optimizer=True)
    for shape, cut in ((16,), 16), ((5,), 0), ((3, 8), 24):
        state, _ = step(step.init({"params": np.ones(shape, np.float32)}), INPUTS)
        assert state.params.shape == shape and step.optimizer_bytes(state).cut == cut
