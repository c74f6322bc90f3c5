"""Arguments are one thing at all doors: NNX objects, whole arrays, keys and static values in the batch of a step."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(24, 6).astype(np.float32)
Y = RANDOM.randn(24, 6).astype(np.float32)
EYE = np.eye(6, dtype=np.float32)
# one device, even chunks, uneven ones, and uneven ones of which two are absent
PLACES = pytest.mark.parametrize("n, rows", [(1, 11), (2, 16), (3, 16), (8, 11)])


class Noisy(nnx.Module):
    """A model that draws from the Rngs it is called with."""

    def __init__(self, seed=0):
        self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(seed))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.linear(x), rngs=rngs)


class Teacher(nnx.Module):
    def __init__(self, seed=5):
        self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(seed))
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))


def noisy_loss(model, batch):
    return jnp.mean((model(batch["x"], batch["rngs"]) - batch["y"]) ** 2)


def rngs_of(replica, seed=3):
    """The Rngs that a replica draws from: its key is the primary's own, or folded with the replica's index."""
    rngs = nnx.Rngs(dropout=seed)
    if replica:
        rngs.dropout.key.set_value(jax.random.fold_in(rngs.dropout.key[...], replica))
    return rngs


def sizes_of(rows, n):
    return [size for size in jdp.chunk_sizes(rows, n) if size]


def by_replica(loss, rows, n):
    """`loss(x, y, rngs)` of the chunks one after the other, each on one device, as a mean over the rows."""
    total, start = 0.0, 0
    for replica, size in enumerate(sizes_of(rows, n)):
        part = slice(start, start + size)
        total = total + loss(X[part], Y[part], replica) * size / rows
        start += size
    return total


@pytest.mark.full
@PLACES
def test_rngs_in_the_batch_of_an_nnx_step(n, rows):
    """The masks differ from step to step, and are those of the replicas' own keys; on one device the bare model's."""
    bare = Noisy()
    rngs = [rngs_of(i) for i in range(n)]
    want = []
    for _ in range(3):
        want.append(by_replica(lambda x, y, i: noisy_loss(bare, {"x": x, "y": y, "rngs": rngs[i]}), rows, n))
    given = nnx.Rngs(dropout=3)
    key = given.dropout.key[...]
    step = jdp.DataParallel(Noisy(), devices=range(n)).train_step(noisy_loss, optax.sgd(0.0))
    got = [step({"x": X[:rows], "y": Y[:rows], "rngs": given})["loss"] for _ in range(3)]
    np.testing.assert_allclose(got, want, rtol=2e-5)
    assert len(set(map(float, got))) == 3
    assert int(given.dropout.count[...]) == 3
    assert given.dropout.key[...] == key  # a folded key is never written


def mask_of(replica, step, size):
    rngs = rngs_of(replica)
    rngs.dropout.count.set_value(jnp.uint32(step))
    return jax.random.bernoulli(rngs.dropout(), 0.5, (size, 6))


@pytest.mark.full
@PLACES
def test_rngs_in_the_batch_of_a_function_and_of_linen(n, rows):
    def masked(w, x, y, mask):
        return jnp.mean((x @ w * mask - y) ** 2)

    weights, want = jnp.asarray(EYE), []
    for number in range(2):
        masks = [mask_of(at, number, size) for at, size in enumerate(sizes_of(rows, n))]

        def loss(w, masks=tuple(masks)):
            return by_replica(lambda x, y, i: masked(w, x, y, masks[i]), rows, n)

        value, grad = jax.value_and_grad(loss)(weights)
        weights = weights - 0.1 * grad
        want.append(value)
    for module in (lambda v, x: x, nn.Dense(3)):
        given = nnx.Rngs(dropout=3)
        dp = jdp.DataParallel(module, devices=range(n))

        def of_chunk(v, batch):
            (x, y), rngs = batch
            return masked(v["params"], x, y, jax.random.bernoulli(rngs.dropout(), 0.5, x.shape))

        step = dp.train_step(of_chunk, optax.sgd(0.1))
        state, got = step.init({"params": EYE}), []
        for x, y, r in dp.prefetch([(X[:rows], Y[:rows], given)] * 2):
            assert r is given
            state, metrics = step(state, ((x, y), r))
            got.append(metrics["loss"])
        np.testing.assert_allclose(got, want, rtol=2e-5)
        np.testing.assert_allclose(state.params, weights, rtol=1e-4, atol=1e-5)
        assert int(given.dropout.count[...]) == 2


@functools.cache
def distilled(rows, steps):
    """Parameters of a student on one device, after some steps towards a teacher."""
    student, teacher = nnx.Linear(6, 6, rngs=nnx.Rngs(1)), Teacher()
    teacher.eval()
    optimizer = nnx.Optimizer(student, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(student, optimizer):
        grads = nnx.grad(lambda s: jnp.mean((s(X[:rows]) - teacher(X[:rows])) ** 2))(student)
        optimizer.update(student, grads)

    for _ in range(steps):
        step(student, optimizer)
    return np.asarray(student.kernel[...])


@pytest.mark.full
@PLACES
def test_a_teacher_in_the_batch(n, rows):
    """Whole on every replica, neither trained nor donated; the student is one device's."""
    teacher = Teacher()
    teacher.eval()
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(teacher)))
    arrays = jax.tree.leaves(nnx.state(teacher))
    dp = jdp.DataParallel(nnx.Linear(6, 6, rngs=nnx.Rngs(1)), devices=range(n))
    step = dp.train_step(lambda m, b: jnp.mean((m(b[0]) - b[1](b[0])) ** 2), optax.adam(0.1))
    for _ in range(3):
        step((X[:rows], teacher))
    np.testing.assert_allclose(dp.module.kernel[...], distilled(rows, 3), rtol=1e-4, atol=1e-5)
    fn = jdp.DataParallel(lambda v, x: x, devices=range(n))
    step = fn.train_step(
        lambda v, b: jnp.mean((b["x"] @ v["params"]["kernel"] + v["params"]["bias"] - b["t"](b["x"])) ** 2),
        optax.adam(0.1),
    )
    student = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
    state = step.init({"params": {"kernel": student.kernel[...], "bias": student.bias[...]}})
    for _ in range(3):
        state, _ = step(state, {"x": X[:rows], "t": teacher})
    np.testing.assert_allclose(state.params["kernel"], distilled(rows, 3), rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(teacher)), before)
    assert all(x is y for x, y in zip(jax.tree.leaves(nnx.state(teacher)), arrays, strict=True))
    teacher(X)


@pytest.mark.full
@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["nnx", "function"])
@pytest.mark.parametrize("reduce_state", ["primary", "mean", "sync"])
@pytest.mark.parametrize("n", [1, 3])
def test_the_state_of_a_teacher_follows_reduce_state(n, reduce_state, kind):
    rows, bare = 11, Teacher()
    if reduce_state == "sync":
        bare(X[:rows])
        want = bare.norm.mean[...]
    else:
        means = [_mean_after(x) for x in np.split(X[:rows], np.cumsum(sizes_of(rows, n))[:-1])]
        want = means[0] if reduce_state == "primary" else np.average(means, 0, sizes_of(rows, n))
    teacher, options = Teacher(), {"sync_batch_norm": reduce_state == "sync"}
    module = nnx.Linear(6, 6, rngs=nnx.Rngs(1)) if kind == "nnx" else lambda v, x: x @ v["params"]
    reduce_state = "primary" if reduce_state == "sync" else reduce_state
    dp = jdp.DataParallel(module, devices=range(n), reduce_state=reduce_state)
    if kind == "nnx":
        step = dp.train_step(lambda m, b: jnp.mean((m(b[0]) - b[1](b[0])) ** 2), optax.sgd(0.1), **options)
        step((X[:rows], teacher))
    else:
        step = dp.train_step(lambda v, b: jnp.mean((b[0] @ v["params"] - b[1](b[0])) ** 2), optax.sgd(0.1), **options)
        step(step.init({"params": EYE}), (X[:rows], teacher))
    np.testing.assert_allclose(teacher.norm.mean[...], want, rtol=1e-5, atol=1e-6)
    assert np.abs(want).max() > 0.01


def _mean_after(x):
    teacher = Teacher()
    teacher(x)
    return np.asarray(teacher.norm.mean[...])


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 3])
def test_rngs_in_the_batch_under_every_option(n):
    """Microbatches draw one after the other; ZeRO, skipping, comparing, lowering and explaining take such batches."""

    def loss(v, b):
        return jnp.mean((b["x"] @ v["params"] * jax.random.bernoulli(b["rngs"].dropout(), 0.5, b["x"].shape)) ** 2)

    dp = jdp.DataParallel(lambda v, x: x, devices=range(n))
    rngs = nnx.Rngs(dropout=3)
    batch = {"x": X[:12], "rngs": rngs}
    options = {"accumulate_steps": 2, "shard_optimizer": True, "skip_nonfinite": True, "check_replicas": 1}
    step = dp.train_step(loss, optax.adam(0.1), **options)
    state = step.init({"params": EYE})
    assert "jit_train_step" in step.lower(state, batch).as_text()
    assert step.find_nonfinite(state, batch) == []
    assert "train_step of loss" in str(jdp.explain(step, state, batch))
    assert int(rngs.dropout.count[...]) == 0  # none of these has run it
    chunk = 12 // n
    want = 0.0
    for replica in range(n):
        own = rngs_of(replica)
        for part in np.split(X[replica * chunk : (replica + 1) * chunk], 2):
            want += float(loss({"params": EYE}, {"x": part, "rngs": own})) / (2 * n)
    state, metrics = step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)
    assert int(rngs.dropout.count[...]) == 2
    bad = {"x": np.full_like(X[:12], np.nan), "rngs": rngs}
    after, metrics = step(state, bad)
    assert bool(metrics["skipped"]) and int(rngs.dropout.count[...]) == 2  # a skipped step leaves all as it was
    assert [entry.replica for entry in step.find_nonfinite(after, bad)] == list(range(n))
    after, metrics = step(after, batch)
    assert not bool(metrics["skipped"]) and int(rngs.dropout.count[...]) == 4


def test_a_variable_that_a_skipped_step_would_have_to_take_back(refused):
    class Counter(nnx.Module):
        def __call__(self, x):
            self.seen = nnx.Variable(jnp.zeros(()))
            return x

    dp = jdp.DataParallel(lambda v, x: x, devices=range(2), reduce_state="mean")
    step = dp.train_step(lambda v, b: jnp.mean(b[1](b[0]) @ v["params"]), optax.sgd(0.1), skip_nonfinite=True)
    with refused(ValueError, "train_step", "seen of an NNX object in the batch was made in the step"):
        step(step.init({"params": EYE}), (X[:8], Counter()))


@pytest.mark.full
def test_the_same_rngs_in_the_model_and_in_the_batch(n):
    """One object: what draws from it in the model goes on where what draws in the loss has stopped."""

    class Own(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.rngs = nnx.Linear(6, 6, rngs=nnx.Rngs(0)), rngs

        def __call__(self, x):
            return self.linear(x) * jax.random.bernoulli(self.rngs.dropout(), 0.5, x.shape)

    def loss(model, batch):
        x, rngs = batch
        return jnp.mean((model(x) * jax.random.normal(rngs.dropout(), x.shape)) ** 2)

    rngs = nnx.Rngs(dropout=3)
    dp = jdp.DataParallel(Own(rngs), devices=range(n))
    step = dp.train_step(loss, optax.sgd(0.0))
    got = [float(step((X[:8], rngs))["loss"]) for _ in range(2)]
    replicas = [Own(rngs_of(i)) for i in range(n)]
    want = [by_replica(lambda x, y, i: loss(replicas[i], (x, replicas[i].rngs)), 8, n) for _ in range(2)]
    np.testing.assert_allclose(got, want, rtol=2e-5)
    assert int(rngs.dropout.count[...]) == int(dp.module.rngs.dropout.count[...]) == 4


def test_a_parameter_in_the_model_and_in_the_batch_is_refused(refused):
    model = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
    dp = jdp.DataParallel(model, devices=range(2))
    step = dp.train_step(lambda m, b: jnp.mean(b[1](m(b[0]))), optax.sgd(0.1))
    with refused(ValueError, "train_step", r"is in args\[0\] and in another argument"):
        step((X[:8], model))


def test_a_refused_step_leaves_the_objects_as_they_were():
    rngs = nnx.Rngs(dropout=3)
    step = jdp.DataParallel(Noisy(), devices=range(2)).train_step(noisy_loss, optax.sgd(0.1))
    before = [rngs.dropout.key[...], rngs.dropout.count[...]]
    with pytest.raises(ValueError, match="all arrays that are cut must agree"):
        step({"x": X[:8], "y": Y[:6], "rngs": rngs})
    with pytest.raises(ValueError, match="0 rows"):
        step({"x": X[:0], "y": Y[:0], "rngs": rngs})
    assert rngs.dropout.key[...] is before[0] and rngs.dropout.count[...] is before[1]


def weighted(variables, batch):
    """A loss with a table that is whole: class weights, a teacher's parameters."""
    x, labels, table = batch["x"], batch["labels"], batch["table"]
    logits = x @ variables["params"] - x @ table["teacher"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]
    return -(picked * table["weights"][labels])


TABLE = {"weights": np.arange(1.0, 7, dtype=np.float32), "teacher": RANDOM.randn(6, 6).astype(np.float32)}
AXES = {"x": 0, "labels": 0, "table": None}


@pytest.mark.one_case
@PLACES
def test_in_axes_of_a_step(n, rows):
    """What is None goes whole; the numbers are one device's, with the wrapper's own in_axes or without."""
    batch = {"x": X[:rows], "labels": np.arange(rows) % 6, "table": TABLE}
    want, grad = jax.value_and_grad(lambda w: weighted({"params": w}, batch).mean())(EYE)
    want = float(want)
    for own in (None, (1, 1)):
        dp = jdp.DataParallel(lambda v, x: x, devices=range(n), in_axes=own)
        step = dp.train_step(weighted, optax.sgd(1.0), in_axes=AXES)
        states = [step.init({"params": EYE}) for _ in range(3)]
        (ahead,) = dp.prefetch([batch], in_axes=AXES)
        parts = {"x": ahead["x"], "labels": ahead["labels"], "table": TABLE}
        for state, given in zip(states, (batch, ahead, parts), strict=True):
            after, metrics = step(state, given)
            assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)
            np.testing.assert_allclose(EYE - after.params, grad, rtol=1e-4, atol=1e-5)
        value, _ = dp.value_and_grad(weighted, in_axes=(AXES,))({"params": EYE}, batch)
        assert float(value) == pytest.approx(want, rel=1e-5)


def test_what_the_wrapper_has_cut_a_step_cuts_along_its_own_axis():
    """One array, as rows and as columns."""
    dp = jdp.DataParallel(lambda v, x: x * v, devices=range(2))
    rows = X[:6]

    def loss(v, x):
        assert x.shape == (6, 3)
        return jnp.mean(x * v["params"])

    one = {"params": np.float32(1)}
    np.testing.assert_array_equal(dp.apply(np.float32(1), rows), rows)
    by_rows = dp.train_step(lambda v, x: jnp.mean(x * v["params"]), optax.sgd(1.0))
    assert float(by_rows(by_rows.init(one), rows)[1]["loss"]) == pytest.approx(rows.mean(), abs=1e-6)
    assert float(dp.value_and_grad(loss, in_axes=1)(one, rows)[0]) == pytest.approx(rows.mean(), abs=1e-6)
    step = dp.train_step(loss, optax.sgd(1.0), in_axes=1)
    assert float(step(step.init(one), rows)[1]["loss"]) == pytest.approx(rows.mean(), abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 3])
def test_in_axes_of_an_nnx_step(n):
    def loss(model, batch):
        columns, table, rngs = batch
        return jnp.mean((model(columns.T, rngs) * table) ** 2)

    table, rngs = np.arange(6, dtype=np.float32), nnx.Rngs(dropout=3)
    step = jdp.DataParallel(Noisy(), devices=range(n)).train_step(loss, optax.sgd(0.0), in_axes=(1, None, None))
    bare, own = Noisy(), [rngs_of(i) for i in range(n)]
    want = by_replica(lambda x, y, i: loss(bare, (x.T, table, own[i])), 11, n)
    assert float(step((X[:11].T, table, rngs))["loss"]) == pytest.approx(float(want), rel=1e-5)


def test_the_wrappers_in_axes_hold_for_a_step_and_for_prefetch():
    dp = jdp.DataParallel(lambda v, x, table: x, devices=range(4), in_axes=(0, None))
    step = dp.train_step(lambda v, b: jnp.mean((b[0] @ v["params"] * b[1]) ** 2), optax.sgd(0.1))
    table = np.arange(6, dtype=np.float32)
    want = np.mean((X[:11] * table) ** 2)
    for batch in [(X[:11], table), *dp.prefetch([(X[:11], table)])]:
        _, metrics = step(step.init({"params": EYE}), batch)
        assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)


BAD_AXES = {
    "another tree": ({"y": 0}, ValueError, "in_axes does not fit the arguments.*tree prefix"),
    "no axis": ({"x": "rows"}, TypeError, "in_axes holds 'rows'"),
    "out of range": ({"x": 2}, IndexError, r"batch\['x'\] is of rank 2"),
}


@pytest.mark.parametrize(("axes", "kind", "match"), BAD_AXES.values(), ids=BAD_AXES.keys())
def test_in_axes_that_do_not_fit(axes, kind, match, refused):
    dp = jdp.DataParallel(lambda v, x: x, devices=range(2))
    step = dp.train_step(lambda v, b: jnp.mean(b["x"] @ v["params"]), optax.sgd(0.1), in_axes=axes)
    with refused(kind, "train_step", match):
        step(step.init({"params": EYE}), {"x": X[:8]})


def total(w, x, y):
    return jnp.mean(x @ y) * w


DP = jdp.DataParallel(total, range(2))


def trains(axes):
    step = DP.train_step(lambda v, b: total(v["params"], *b), optax.sgd(0.1), in_axes=axes)
    return lambda x, y: step(step.init({"params": np.float32(1)}), (x, y))[1]["loss"]


def calls(**options):
    dp = jdp.DataParallel(lambda w, x, y: [x @ y * w, y], range(2), **options)

    def run(x, y):
        out, same = dp(1.0, x, y)
        return out.mean() + same.size - y.size

    return run


def prefetches(axes):
    batches = DP.prefetch(iter([(X, Y[0])]), in_axes=axes)
    step = DP.train_step(lambda v, b: total(v["params"], *b), optax.sgd(0.1))
    return lambda x, y: step(step.init({"params": np.float32(1)}), next(batches))[1]["loss"]


TAKE_AXES = {
    "in_axes": lambda axes: calls(in_axes=axes, out_axes=[0, None]),
    "out_axes": lambda axes: calls(in_axes=(0, None), out_axes=axes),
    "train_step": trains,
    "prefetch": prefetches,
    "value_and_grad": lambda axes: functools.partial(DP.value_and_grad(total, in_axes=axes), np.float32(1)),
    "parallel": lambda axes: functools.partial(
        DP.parallel(lambda *b: jax.lax.pmean(total(1.0, *b), "data"), in_axes=axes)
    ),
}


@pytest.mark.parametrize("make", TAKE_AXES.values(), ids=TAKE_AXES.keys())
def test_axes_that_the_caller_changes_later_stay(make):
    axes = [0, None]
    run = make(axes)
    axes[1] = 0  # for something else
    np.testing.assert_allclose(jax.tree.leaves(run(X, Y[0]))[0], np.mean(X @ Y[0]), rtol=1e-4)


def test_what_came_cut_otherwise_is_refused(refused):
    dp = jdp.DataParallel(lambda v, x: x, devices=range(2))
    step = dp.train_step(lambda v, b: jnp.mean(b["x"] @ v["params"]) * b["w"].sum(), optax.sgd(0.1), in_axes=AXES_XW)
    state = step.init({"params": EYE})
    (batch,) = dp.prefetch([{"x": X[:6], "w": X[:6]}])
    with refused(ValueError, "train_step", r"batch\['w'\] came cut along axis 0, and in_axes has None.*in_axes=\.\.\."):
        step(state, batch)
    turned = dp.train_step(lambda v, b: jnp.mean(b["x"]), optax.sgd(0.1), in_axes={"x": 1})
    with refused(ValueError, "train_step", r"batch\['x'\] came cut along axis 0, and in_axes has 1"):
        turned(state, {"x": batch["x"]})


AXES_XW = {"x": 0, "w": None}


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 3])
def test_keys_and_static_values_mean_what_they_mean_in_value_and_grad(n):
    def loss(v, batch):
        noise = jax.random.normal(batch["key"], batch["x"].shape) if batch["train"] else 0.0
        return jnp.mean((batch["x"] @ v["params"] + noise) ** batch["power"])

    dp = jdp.DataParallel(lambda v, x: x, devices=range(n))
    step = dp.train_step(loss, optax.sgd(0.1))
    for train in (True, False):
        batch = {"x": X[:11], "key": jax.random.key(7), "train": train, "power": 2, "none": None}
        want, _ = dp.value_and_grad(loss)({"params": EYE}, batch)
        _, metrics = step(step.init({"params": EYE}), batch)
        assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-6)
        (ahead,) = dp.prefetch([batch])
        assert ahead["train"] is train
        _, metrics = step(step.init({"params": EYE}), ahead)
        assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-6)


def torch():
    return pytest.importorskip("torch")


class Loader:
    def __iter__(self):
        return iter([(X, Y)])


NO_BATCH = {
    "a loader": (Loader, "batch is a Loader, which holds batches or rows.*for batch in dp.prefetch"),
    "torch's loader": (
        lambda: torch().utils.data.DataLoader(torch().utils.data.TensorDataset(torch().ones(4, 6)), batch_size=2),
        "batch is a DataLoader, which holds batches or rows.*for batch in dp.prefetch",
    ),
    "a dataset": (lambda: torch().utils.data.TensorDataset(torch().ones(4, 6)), "batch is a TensorDataset"),
    "a tensor": (lambda: (torch().ones(4, 6), 1), r"batch\[0\] is a torch\.Tensor, no jax or numpy array.*\.numpy\(\)"),
    "a generator": (lambda: (x for x in (X, Y)), "batch is a generator, which holds batches or rows"),
    "rows of numbers": (X.tolist, r"batch is a list of 24 lists of Python numbers.*np\.asarray"),
    "lists of numbers": (lambda: {"x": [1.0, 2.0]}, r"batch\['x'\] is a list of 2 Python numbers.*np\.asarray"),
    "labels": (lambda: (X, [0] * 24), r"batch\[1\] is a list of 24 Python numbers, as many as.*np\.asarray"),
    "a tuple of labels": (lambda: (X, (0,) * 24), r"batch\[1\] is a tuple of 24 Python numbers, as many as"),
    "numpy's numbers": (lambda: (X, list(X[:, 0])), r"batch\[1\] is a list of 24 0-d arrays, as many as.*jnp\.asarray"),
    "jax's numbers": (lambda: (X, (*jnp.array(X[:, 0]),)), r"batch\[1\] is a tuple of 24 0-d arrays, as many as"),
}


@pytest.mark.parametrize("kind", ["function", "nnx"])
@pytest.mark.parametrize(("make", "match"), NO_BATCH.values(), ids=NO_BATCH.keys())
def test_what_is_no_batch(make, match, kind, refused):
    if kind == "nnx":
        dp = jdp.DataParallel(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), devices=range(2))
        run = dp.train_step(lambda m, b: jnp.mean(m(jnp.asarray(b))), optax.sgd(0.1))
    else:
        dp = jdp.DataParallel(lambda v, x: x, devices=range(2))
        step = dp.train_step(lambda v, b: jnp.mean(jnp.asarray(b) @ v["params"]), optax.sgd(0.1))
        run = functools.partial(step, step.init({"params": EYE}))
    with refused(TypeError, "train_step", match):
        run(make())


def test_a_batch_in_the_wrong_place_or_container_has_its_own_error(refused):
    dp = jdp.DataParallel(lambda v, x: x, devices=range(2))
    step = dp.train_step(lambda v, b: jnp.mean(b @ v["params"]), optax.sgd(0.1))
    state = step.init({"params": EYE})
    with refused(ValueError, "train_step", r"scattered over \(cpu:0, cpu:1, cpu:2\).*Scatter it over these"):
        step(state, jdp.scatter(X, range(3)))
    with refused(ValueError, "train_step", r"scattered over \(cpu:0, cpu:1, cpu:2\).*Scatter it over these"):
        step(state, (jdp.scatter(X, range(3)), 1))
    with refused(TypeError, "train_step", "batch is a UserDict that holds arrays.*pass a dict"):
        step(state, collections.UserDict(x=X))


@pytest.mark.parametrize("kind", ["function", "nnx"])
def test_a_list_of_rows_is_named_where_the_loss_fails(kind):
    """Such a list is a tree of arrays, which a loss may take; one that fails on it is told what the list looks like."""
    if kind == "nnx":
        dp = jdp.DataParallel(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), devices=range(2))
        run = dp.train_step(lambda m, b: jnp.mean(m(np.asarray(b))), optax.sgd(0.1))
    else:
        dp = jdp.DataParallel(lambda v, x: x, devices=range(2))
        step = dp.train_step(lambda v, b: jnp.mean(np.asarray(b) @ v["params"]), optax.sgd(0.1))
        run = functools.partial(step, step.init({"params": EYE}))
    with pytest.raises(jax.errors.TracerArrayConversionError) as info:
        run(list(X))
    assert any("batch is a list of 24 parts of one shape" in note for note in info.value.__notes__)
    assert any("np.stack(rows)" in note for note in info.value.__notes__)


@pytest.mark.one_case
def test_a_list_of_arrays_is_a_batch(n):
    dp = jdp.DataParallel(lambda v, x: x, devices=range(n))
    step = dp.train_step(lambda v, b: jnp.mean(sum(x @ v["params"] for x in b) ** 2), optax.sgd(0.1))
    _, metrics = step(step.init({"params": EYE}), [X, Y, X])
    np.testing.assert_allclose(metrics["loss"], np.mean((2 * X + Y) ** 2), rtol=1e-5)


# --- calls of functions and Linen modules with NNX objects ---


def dropped(w, x, rngs):
    return nnx.Dropout(0.5)(w * x, rngs=rngs)


class Student(nn.Module):
    @nn.compact
    def __call__(self, x, teacher, train=True):
        self.variable("seen", "calls", lambda: jnp.int32(0)).value += 1
        return nn.Dense(3)(teacher(x))


@pytest.mark.full
@PLACES
def test_a_function_draws_from_rngs_that_go_on(n, rows):
    """Each replica from its own, and in each call other numbers; also where calls without them are known."""
    dp, x = jdp.DataParallel(dropped, devices=range(n)), X[:rows]
    rngs, own = nnx.Rngs(dropout=3), [rngs_of(i) for i in range(n)]
    for call in range(3):
        chunks = np.split(x, np.cumsum(sizes_of(rows, n))[:-1])
        want = np.concatenate([dropped(2.0, chunk, own[i]) for i, chunk in enumerate(chunks)])
        got = dp(2.0, x, rngs) if call else jdp.data_parallel(dropped, 2.0, (x, rngs), devices=range(n))
        np.testing.assert_array_equal(got, want)
        assert int(rngs.dropout.count[...]) == call + 1


@pytest.mark.full
@PLACES
def test_a_linen_module_and_a_function_take_an_nnx_model(n, rows):
    """Whole on every replica; what it changes of itself is kept as reduce_state says."""
    x, sizes = X[:rows], sizes_of(rows, n)
    teacher, bare = Teacher(), Teacher()
    student = Student()
    variables = student.init(jax.random.key(0), x, Teacher())
    dp = jdp.DataParallel(student, devices=range(n), reduce_state="mean")
    chunks = np.split(x, np.cumsum(sizes)[:-1])
    nodes = [nnx.clone(bare) for _ in chunks]
    for _ in range(2):  # of a batch that was seen before, too
        got, updates = dp.apply(variables, x, teacher, mutable=["seen"])
        want = [student.apply(variables, c, node, mutable=["seen"]) for c, node in zip(chunks, nodes, strict=True)]
        np.testing.assert_allclose(got, np.concatenate([y for y, _ in want]), rtol=1e-5, atol=1e-6)
        assert int(updates["seen"]["calls"]) == int(want[0][1]["seen"]["calls"])
        mean = sum(k / rows * node.norm.mean[...] for k, node in zip(sizes, nodes, strict=True))
        np.testing.assert_allclose(teacher.norm.mean[...], mean, rtol=1e-5, atol=1e-6)
        for node in nodes:
            nnx.update(node, nnx.state(teacher))
    plain = jdp.DataParallel(lambda w, x, model: w * model.linear(x), devices=range(n))
    np.testing.assert_allclose(plain(2.0, x, teacher), 2 * teacher.linear(x), rtol=1e-5, atol=1e-6)


def test_an_nnx_model_as_the_parameters_of_a_function():
    """It is updated, also after a call like it with plain parameters; an nnx.State is a plain tree."""

    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            self.calls.set_value(self.calls[...] + 1)
            return self.linear(x)

    model, bare = Model(), Model()
    graph, state = nnx.split(bare)
    dp = jdp.DataParallel(lambda m, x: (m if isinstance(m, Model) else nnx.merge(graph, m))(x), devices=range(4))
    whole = jdp.replicate(state, dp.devices)
    for call in range(3):
        np.testing.assert_allclose(dp(whole, X), bare.linear(X), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dp(model, X), bare.linear(X), rtol=1e-5, atol=1e-6)
        assert int(model.calls[...]) == call + 1
