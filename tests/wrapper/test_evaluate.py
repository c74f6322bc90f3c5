"""evaluate: the metrics of a whole data set are those of one pass over all rows, however it is cut."""

import contextlib
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from laws import examples

import jdp

ROWS = np.random.default_rng(0).normal(size=(61, 5)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(3, size=61).astype(np.int32)
MODEL = nn.Dense(3)
VARIABLES = jax.device_get(MODEL.init(jax.random.key(0), ROWS[:1]))


def metrics_of(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    predicted = logits.argmax(-1)
    hits = predicted == labels
    return {
        "loss": losses.mean(),
        "accuracy": jdp.Mean(hits.sum(), hits.size),
        "of class 1": jdp.Mean((hits * (labels == 1)).sum(), (labels == 1).sum()),
        "both": 2 * jdp.Mean(losses.sum(), losses.size) + jdp.Mean((hits * logits[:, 0]).sum(), hits.sum()),
        "hits": jdp.Sum(hits.sum()),
        "confusion": jdp.Sum(jnp.zeros((3, 3), jnp.int32).at[labels, predicted].add(1)),
        "by class": jdp.Mean(jnp.zeros(3).at[labels].add(losses), jnp.zeros(3).at[labels].add(1.0)),
        "rows": {"predicted": predicted, "logits": logits.T},
    }


def linen_metrics(variables, batch):
    return metrics_of(MODEL.apply(variables, batch["x"]), batch["y"])


def expected(rows):
    """The same in float64, by numpy, of all rows at once."""
    params = VARIABLES["params"]
    logits = ROWS[:rows].astype(np.float64) @ params["kernel"] + params["bias"]
    labels, each = LABELS[:rows], np.arange(rows)
    losses = np.log(np.exp(logits).sum(-1)) - logits[each, labels]
    predicted = logits.argmax(-1)
    hits = predicted == labels
    confusion = np.zeros((3, 3), np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    with np.errstate(invalid="ignore"):
        return {
            "loss": losses.mean(),
            "accuracy": hits.mean(),
            "of class 1": (hits * (labels == 1)).sum() / (labels == 1).sum(),
            "both": 2 * losses.mean() + (hits * logits[:, 0]).sum() / hits.sum(),
            "hits": hits.sum(),
            "confusion": confusion,
            "by class": np.array([losses[labels == k].sum() / (labels == k).sum() for k in range(3)]),
            "rows": {"predicted": predicted, "logits": logits.T},
        }


def cut_at(*cuts, rows=61):
    ends = [0, *sorted(cuts), rows]
    return [{"x": ROWS[a:b], "y": LABELS[a:b]} for a, b in itertools.pairwise(ends)]


def same_metrics(found, rows=61):
    want = expected(rows)
    assert {*found} == {*want}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, want)


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_metrics_are_those_of_all_rows(n):
    dp = jdp.DataParallel(MODEL, range(n))
    found = dp.evaluate(linen_metrics, VARIABLES, cut_at(16, 32, 48))
    same_metrics(found)
    assert type(found["loss"]) is type(found["accuracy"]) is type(found["both"]) is float
    assert type(found["hits"]) is int and found["confusion"].dtype == np.int64
    assert type(found["rows"]["logits"]) is np.ndarray and found["rows"]["logits"].dtype == np.float32
    assert found["rows"]["predicted"].dtype == np.int32 and found["rows"]["logits"].shape == (3, 61)


@pytest.mark.hypothesis
@examples(40)
@given(st.integers(1, 61), st.lists(st.integers(0, 61), max_size=3), st.sampled_from([1, 2, 4, 8]), st.data())
def test_any_rows_in_any_batches(rows, cuts, n, draw):
    replicas = draw.draw(st.sampled_from([None, 2 * n]))
    dp = jdp.DataParallel(MODEL, range(n), replicas=replicas)
    same_metrics(dp.evaluate(linen_metrics, VARIABLES, cut_at(*(min(c, rows) for c in cuts), rows=rows)), rows)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("give", [list, iter, "prefetch", "batches", "placed"])
def test_all_that_prefetch_takes_and_gives(give):
    dp = jdp.DataParallel(MODEL, range(4))
    batches = cut_at(13, 26, 39, 52)
    if give == "prefetch":
        batches = dp.prefetch(batches)
    elif give == "batches":
        batches = dp.batches({"x": ROWS, "y": LABELS}, 13)
    elif give == "placed":
        batches = jax.device_put(batches, jax.devices()[2])
    else:
        batches = give(batches)
    same_metrics(dp.evaluate(linen_metrics, dp.init(jax.random.key(0), ROWS[:1]), batches))


def test_a_function_and_its_axes():
    """Rows along another axis, and a table that is whole on every replica."""
    table = np.arange(3.0)
    dp = jdp.DataParallel(lambda w, x: x, range(4), in_axes=({"x": 1, "y": 0, "table": None},))
    batches = [{"x": b["x"].T, "y": b["y"], "table": table} for b in cut_at(20)]

    def metrics(w, batch):
        assert batch["table"].shape == (3,) and batch["x"].shape[1] == batch["y"].shape[0]
        return {"mean": (w * batch["x"]).mean(), "entries": batch["table"][batch["y"]], "x": batch["x"]}

    found = dp.evaluate(metrics, np.float32(2), batches)
    np.testing.assert_allclose(found["mean"], 2 * ROWS.astype(np.float64).mean(), rtol=1e-6)
    np.testing.assert_array_equal(found["entries"], table[LABELS])
    np.testing.assert_array_equal(found["x"], ROWS.T)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.frozen = nnx.BatchNorm(5, rngs=rngs, use_running_average=True)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(self.frozen(self.norm(x))))


def nnx_metrics(model, batch):
    assert model.dropout.deterministic and model.norm.use_running_average
    return {"mean": model(batch["x"]).mean(), "y": model(batch["x"])}


@pytest.mark.full
@pytest.mark.parametrize("shard_params", [False, True])
def test_an_nnx_model_runs_in_evaluation_mode_and_stays_as_it_was(shard_params):
    bare = Net(nnx.Rngs(0))
    dp = jdp.DataParallel(Net(nnx.Rngs(0)), range(4), shard_params=shard_params)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(dp.module, nnx.Not(nnx.RngKey))))
    found = dp.evaluate(nnx_metrics, cut_at(17))
    modes = [dp.module.norm.use_running_average, dp.module.frozen.use_running_average, dp.module.dropout.deterministic]
    assert modes == [False, True, False]
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(dp.module, nnx.Not(nnx.RngKey))))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    bare.eval()
    np.testing.assert_allclose(found["y"], bare(ROWS), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["mean"], np.asarray(bare(ROWS), np.float64).mean(), rtol=1e-4, atol=1e-6)

    def fails(model, batch):
        raise OSError("the disk is full")

    with pytest.raises(OSError):
        dp.evaluate(fails, cut_at())
    assert dp.module.frozen.use_running_average and not dp.module.norm.use_running_average


@pytest.mark.full
def test_parameters_that_are_cut():
    dp = jdp.DataParallel(nn.Dense(4), range(4))
    variables = dp.init(jax.random.key(0), ROWS[:1], shard_params=True)
    assert not variables["params"]["bias"].sharding.is_fully_replicated
    bare = nn.Dense(4).apply(jax.device_get(variables), ROWS)
    found = dp.evaluate(lambda v, b: {"y": nn.Dense(4).apply(v, b["x"])}, variables, cut_at(20))
    np.testing.assert_allclose(found["y"], bare, rtol=1e-5, atol=1e-6)


def test_an_own_rngs_in_a_batch_and_python_values():
    dp = jdp.DataParallel(lambda w, x: x, range(2))

    def metrics(w, batch):
        assert batch["split"] == "test"
        return {"kept": jdp.Mean((nnx.Dropout(0.5)(batch["x"], rngs=batch["rngs"]) != 0).sum(), batch["x"].size)}

    found = dp.evaluate(metrics, 1.0, [{"x": ROWS + 10, "rngs": nnx.Rngs(0), "split": "test"}])
    assert 0.3 < found["kept"] < 0.7


def test_the_host_adds_in_64_bits():
    dp = jdp.DataParallel(lambda w, x: x, range(4))
    big, small = np.full(4, 2**28, np.int32), np.full(4, 0.1, np.float32)

    def metrics(w, batch):
        x, y = batch
        return {"ints": jdp.Sum((x + 1).sum()), "floats": jdp.Sum((1e7 + y).sum()), "mean": y.mean()}

    found = dp.evaluate(metrics, 1.0, [(big, small)] * 40)
    assert found["ints"] == 160 * (2**28 + 1) > 2**32
    np.testing.assert_allclose(found["floats"], 160 * 1e7, rtol=1e-12)
    np.testing.assert_allclose(found["mean"], np.float64(np.float32(0.1)), rtol=1e-9)


def test_terms_of_integers_are_added_with_factors():
    def metrics_fn(w, x):
        return {"found": jdp.Sum(jnp.sum(x > 0)) + jdp.Mean(jnp.sum(x > 1), x.shape[0]) / 2 - jdp.Sum(jnp.sum(x < 0))}

    dp, x = jdp.DataParallel(lambda w, x: w * x, devices=range(2)), ROWS[:7, 0]
    want = (x > 0).sum() + (x > 1).mean() / 2 - (x < 0).sum()
    assert dp.evaluate(metrics_fn, 1.0, [x[:4], x[4:]])["found"] == pytest.approx(want)
    (_, metrics), _ = dp.value_and_grad(lambda w, x: (jnp.mean(w * x), metrics_fn(w, x)), has_aux=True)(1.0, x)
    assert float(metrics["found"]) == pytest.approx(want)


def test_rows_keep_their_dtype():
    dp = jdp.DataParallel(lambda w, x: x, range(4))
    found = dp.evaluate(
        lambda w, x: {"half": x.astype(jnp.bfloat16), "bool": x[:, 0] > 0, "mean": x.astype(jnp.bfloat16).mean()},
        1.0,
        [ROWS[:9], ROWS[9:14]],
    )
    assert found["half"].dtype == ml_dtypes.bfloat16 and found["half"].shape == (14, 5)
    np.testing.assert_array_equal(found["bool"], ROWS[:14, 0] > 0)
    assert type(found["mean"]) is float


def test_batches_without_rows_add_nothing():
    dp = jdp.DataParallel(MODEL, range(4))
    same_metrics(dp.evaluate(linen_metrics, VARIABLES, cut_at(0, 13, 13, 61)))


def test_few_batches_are_in_memory():
    """The loader is asked for a batch when there is room for it, and not before."""
    dp, live = jdp.DataParallel(lambda w, x: x, range(2)), []

    def loader():
        for k in range(12):
            live.append(len([x for x in jax.live_arrays() if x.shape == (1234, 3)]))
            yield np.full((1234, 3), k, np.float32)

    found = dp.evaluate(lambda w, x: {"mean": x.mean()}, 1.0, loader())
    assert found == {"mean": 5.5} and max(live) <= 6 and len(live) == 12


def test_a_known_batch_compiles_nothing(compilations):
    dp = jdp.DataParallel(MODEL, range(4))
    same_metrics(dp.evaluate(linen_metrics, VARIABLES, cut_at(16, 32, 48)))
    compilations()
    same_metrics(dp.evaluate(linen_metrics, VARIABLES, cut_at(16, 32, 48)))
    assert not compilations()


def changing(batch):
    return {"a": batch["x"].mean()} if "y" in batch else {"b": batch["x"].mean()}


TWO = [{"x": ROWS[:9], "y": LABELS[:9]}, {"x": ROWS[9:20]}]


def mean_of(x):
    return jdp.Mean(x.sum(), x.size)


@pytest.mark.parametrize("form", [jnp.mean, mean_of, lambda x: jdp.Sum(x.sum()), lambda x: mean_of(x) + 1.0])
def test_a_sum_may_have_another_dtype_in_each_batch(form):
    dp, batches = jdp.DataParallel(lambda w, x: x, range(2)), [np.array([1, 2], np.float32), np.array([4], np.float16)]
    found = [dp.evaluate(lambda w, x: {"a": form(x)}, 1.0, b) for b in (batches, [x.astype(float) for x in batches])]
    assert found[0] == found[1]


BAD = {
    "no dict": (TypeError, lambda b: b["x"].mean(), "returns an array alone; each metric has a name. Return a dict"),
    "a standard deviation": (TypeError, lambda b: {"std": b["x"].std()}, r"\['std'\] is a scalar.*Return an entry for"),
    "a sum": (TypeError, lambda b: {"s": b["x"].sum()}, r"\['s'\] .*sum over the rows.*Return jdp.Sum\(total\)"),
    "an int": (TypeError, lambda b: {"n": (b["x"] > 0).sum()}, r"metrics\['n'\] is int32\[\]; metrics are 0-d floats"),
    "a table": (TypeError, lambda b: {"t": jnp.zeros((2, 2)) * b["x"].mean()}, r"\['t'\] is float32\[2, 2\].*jdp\.Sum"),
    "a string after rows": (TypeError, lambda b: {"a": b["x"], "b": "s"}, r"metrics\['b'\] is a str; metrics are 0-d"),
    "keys": (
        TypeError,
        lambda b: {"k": jax.random.split(jax.random.key(0), len(b["x"]))},
        r"metrics\['k'\] is key<fry>\[\d+\]; .*jax\.random\.key_data",
    ),
    "other names": (ValueError, changing, r"metrics\['a'\] is not in a later batch"),
    "another form": (
        ValueError,
        lambda b: {"a": b["x"].mean() if "y" in b else jdp.Sum(b["x"].sum())},
        r"metrics\['a'\] is a mean .* and in a later batch a jdp\.Sum",
    ),
    "another shape": (
        ValueError,
        lambda b: {"a": b["x"] if "y" in b else b["x"][:, :2]},
        r"metrics\['a'\] is an array of float32 with an entry of shape \(5,\) .*\(2,\)",
    ),
    "another term": (
        ValueError,
        lambda b: {"a": jdp.Sum(b["x"].sum()) + (jdp.Sum(b["x"].sum()) if "y" in b else mean_of(b["x"]))},
        r"metrics\['a'\] is .* \(a jdp\.Sum \+ a jdp\.Sum\) of .* later .* \(a jdp\.Sum \+ a jdp\.Mean\) of",
    ),
    "another total": (
        ValueError,
        lambda b: {"a": jdp.Sum(b["x"].sum(0) if "y" in b else b["x"].sum())},
        r"metrics\['a'\] is a jdp\.Sum of shape \(5,\), and in a later batch a jdp\.Sum of shape \(\)",
    ),
}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("case", BAD)
def test_metrics_that_are_refused(case, n, refused):
    kind, metrics, match = BAD[case]
    with refused(kind, "evaluate", match):
        jdp.DataParallel(MODEL, range(n)).evaluate(lambda v, b: metrics(b), VARIABLES, TWO)


def total_of_replicas(x):
    return jax.lax.psum(x, "data")


ADDED = r"is .* a sum over the replicas already.* \(psum at test_evaluate\.py:\d+\).*Leave the collective out"


@pytest.mark.one_case
@pytest.mark.parametrize("door", ["evaluate", "value_and_grad"])
@pytest.mark.parametrize("form", ["sum", "mean", "count", "bare", "in a sum of terms"])
def test_metrics_that_the_function_has_added_up_itself(form, door, refused):
    """A sum over the replicas is the same on all of them: added up once more, it would count once for each."""

    def metric(x):
        total = total_of_replicas(x.sum())
        return {
            "sum": lambda: jdp.Sum(total),
            "mean": lambda: jdp.Mean(total, len(x)),
            "count": lambda: jdp.Mean(x.sum(), total_of_replicas((x == x).sum())),
            "bare": lambda: total_of_replicas(x.mean()),
            "in a sum of terms": lambda: jdp.Sum(x.sum()) - 2 * jdp.Sum(total),
        }[form]()

    run_door(door, metric, (refused, TypeError, door, ADDED))
    # What is right: the mean of a sum that is the same everywhere, means of means, and the sum of the replicas' means.
    x = ROWS[:16]
    for right, want in (
        (lambda x: total_of_replicas(x.sum()), x.sum()),
        (lambda x: total_of_replicas(x.sum()) / total_of_replicas(x.size), x.mean()),
        (lambda x: jax.lax.pmean(x.mean(), "data"), x.mean()),
        (lambda x: jdp.Sum(jax.lax.pmean(x.sum(), "data")), x.sum()),
        (lambda x: jdp.Mean(total_of_replicas(x.sum()), total_of_replicas((x == x).sum())), x.mean()),
    ):
        np.testing.assert_allclose(run_door(door, right), want, rtol=1e-5)


def run_door(door, metric, expected=None):
    """Returns the metric of 16 rows on 4 devices by this public function, or sees it refused."""
    dp, x = jdp.DataParallel(lambda w, x: x @ w, range(4)), ROWS[:16]
    w = np.ones(5, np.float32)
    with contextlib.nullcontext() if expected is None else expected[0](*expected[1:]):
        if door == "evaluate":
            return dp.evaluate(lambda w, x: {"m": metric(x)}, w, [x])["m"]
        return dp.value_and_grad(lambda w, x: ((x @ w).mean(), metric(x)), has_aux=True)(w, x)[0][1]


def test_collectives_on_uneven_chunks(refused):
    """The last batch of an epoch is uneven, and the error says what stands for the collective."""
    dp = jdp.DataParallel(MODEL, range(4))
    match = r"chunks are \(2, 2, 1\).*or leave the collectives out: jdp\.Mean\(total, count\) and jdp\.Sum"
    with refused(ValueError, "evaluate", match):
        dp.evaluate(lambda v, x: {"m": jax.lax.pmean(x.mean(), "data")}, VARIABLES, [ROWS[:5]])


@pytest.mark.parametrize("batches", [[], [{"x": ROWS[:0], "y": LABELS[:0]}]])
def test_no_rows_at_all(batches, refused):
    with refused(ValueError, "evaluate", "the batches have no rows"):
        jdp.DataParallel(MODEL, range(4)).evaluate(linen_metrics, VARIABLES, batches)


@pytest.mark.full
def test_a_training_state_in_place_of_variables(refused):
    """A metrics function gets what was passed, and may take it as a state; if it does not, a note says what to pass."""
    dp = jdp.DataParallel(MODEL, range(2))
    step = dp.train_step(lambda v, b: MODEL.apply(v, b["x"]).mean(), optax.sgd(0.1))
    state = step.init(VARIABLES)
    with pytest.raises(Exception) as raised:
        dp.evaluate(linen_metrics, state, cut_at())
    assert any(
        "If it takes variables, pass {'params': state.params, **state.state}" in x for x in raised.value.__notes__
    )
    found = dp.evaluate(lambda s, b: linen_metrics({"params": s.params, **s.state}, b), state, cut_at())
    expected = dp.evaluate(linen_metrics, VARIABLES, cut_at())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


def test_arguments(refused):
    dp, held = jdp.DataParallel(MODEL, range(2)), jdp.DataParallel(Net(nnx.Rngs(0)), range(2))
    with refused(TypeError, "evaluate", r"1 arguments after metrics_fn; .*dp.evaluate\(metrics_fn, variables, batches"):
        dp.evaluate(linen_metrics, cut_at())
    with refused(TypeError, "evaluate", r"2 arguments after metrics_fn; .*holds its state.*\(metrics_fn, batches\)"):
        held.evaluate(nnx_metrics, held.module, cut_at())
    with refused(TypeError, "evaluate", "batches is a dict of 2, .*Pass \\[batch\\]"):
        dp.evaluate(linen_metrics, VARIABLES, cut_at()[0])
    with refused(ValueError, "evaluate", r"batches.epochs is None; these never end\. Pass dp.batches\(..., epochs=1\)"):
        dp.evaluate(linen_metrics, VARIABLES, dp.batches(cut_at()[0], 4, epochs=None))
    with refused(TypeError, "evaluate", "metrics_fn is a dict; it is called"):
        dp.evaluate(VARIABLES, linen_metrics, cut_at())
    with refused(TypeError, "evaluate", "called inside of jax.jit"):
        jax.jit(lambda v: dp.evaluate(linen_metrics, v, cut_at()))(VARIABLES)
    with refused(TypeError, "explain", "explain shows one program. Explain dp.apply"):
        jdp.explain(dp.evaluate, linen_metrics, VARIABLES, cut_at())


def test_lengths(refused):
    dp = jdp.DataParallel(MODEL, range(2))
    batches = dp.prefetch(cut_at(20, 40))
    assert len(batches) == len(dp.batches({"x": ROWS}, 25)) == 3 and batches
    next(batches)
    assert len(batches) == 3 and len([*batches]) == 2
    unknown = dp.prefetch(iter(cut_at(20)))
    assert unknown and len([*unknown]) == 2
    with pytest.raises(TypeError, match="len"):
        len(unknown)


def test_a_loader_that_begins_again_after_its_end():
    class Loader:  # as NVIDIA DALI's with auto_reset
        def __init__(self):
            self.count = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.count == 3:
                self.count = 0
                raise StopIteration
            self.count += 1
            return np.full(2, self.count, np.float32)

    dp = jdp.DataParallel(lambda w, x: w * x, devices=range(2))
    loader = Loader()
    for _ in range(2):
        found = [float(jdp.gather(x)[0]) for x in itertools.islice(dp.prefetch(loader), 10)]
        assert found == [1, 2, 3]
    assert float(dp.evaluate(lambda w, x: {"mean": dp(w, x).mean()}, np.float32(1), loader)["mean"]) == 2


class Carried(nn.Module):
    @nn.compact
    def __call__(self, x):
        carry = self.variable("carry", "c", jnp.zeros, x.shape)
        carry.value = carry.value + x
        return carry.value


def test_state_with_a_batch_axis_is_refused_where_there_are_several_batches():
    dp = jdp.DataParallel(Carried(), devices=range(2), state_axes={"carry": 0})
    x = np.arange(4, dtype=np.float32)
    variables = {"carry": {"c": x}, "params": {"w": np.float32(1)}}
    with pytest.raises(ValueError, match=r"jdp\.evaluate: the wrapper has state_axes=\{'carry': 0\}"):
        dp.evaluate(lambda v, x: {"s": jdp.Sum(dp(v, x)[0].sum())}, variables, [x])
    for door in (dp.value_and_grad, dp.grad):
        with pytest.raises(ValueError, match=r"jdp\.value_and_grad: the wrapper has state_axes=\{'carry': 0\}"):
            door(lambda v, x: (dp(v, x)[0]).mean())(variables, x)
