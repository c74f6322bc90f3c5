"""Python values in a batch are part of the program where the function reads them, and only there."""

import copy
import json
import operator
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import one_in
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from laws import examples

import jdp
from jdp._core.unread import Entries, reading

PARAMS = {"params": {"w": np.ones((4, 2), np.float32)}}


def batch(i, rows=16, mode="train"):
    return {
        "x": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) / 10,
        "file": [f"{i}-{k}.png" for k in range(rows)],
        "mode": mode,
        "meta": {"id": i, "scale": np.full(rows, 2, np.float32)},
    }


def outputs(w, batch):
    out = batch["x"] @ w
    return (out * 3 if batch["mode"] == "train" else out) * batch["meta"]["scale"][:, None]


def door(kind, devices, count):
    """A call of a batch that gives a mean over its outputs, with a function that counts its traces."""

    def forward(variables, batch):
        count.append(1)
        return outputs(variables["params"]["w"], batch)

    def mean(variables, batch):
        return jnp.mean(forward(variables, batch))

    def of_model(model, batch):
        count.append(1)
        return jnp.mean(model(batch))

    if kind == "linen":

        class Linen(nn.Module):
            @nn.compact
            def __call__(self, batch):
                count.append(1)
                return outputs(self.param("w", lambda _: jnp.ones((4, 2))), batch)

        model = jdp.DataParallel(Linen(), devices)
        variables = model.init(jax.random.key(0), batch(0))
        return lambda batch: np.mean(model(variables, batch))
    if kind.startswith("nnx"):
        dp = jdp.DataParallel(NnxModel(), devices)
        gradient, step = dp.value_and_grad(of_model), dp.train_step(of_model, optax.sgd(0.0))
        return (
            (lambda batch: gradient(dp.module, batch)[0]) if kind == "nnx grad" else lambda batch: step(batch)["loss"]
        )
    dp = jdp.DataParallel(forward, devices)
    if kind == "apply":
        return lambda batch: np.mean(dp.apply(PARAMS, batch))
    if kind == "evaluate":
        metrics = lambda variables, batch: {"mean": mean(variables, batch)}  # noqa: E731
        return lambda batch: dp.evaluate(metrics, PARAMS, [batch])["mean"]
    if kind == "grad":
        gradient = dp.value_and_grad(mean)
        return lambda batch: gradient(PARAMS, batch)[0]
    if kind == "criterion":
        gradient = dp.value_and_grad(forward, criterion=lambda out, batch: out.mean() + 0 * len(batch))
        return lambda batch: gradient(PARAMS, batch)[0]
    step = dp.train_step(mean, optax.sgd(0.0))
    state = [step.init(PARAMS)]

    def run(batch):
        for one in dp.prefetch([batch]) if kind == "prefetched" else [batch]:
            state[0], metrics = step(state[0], one)
        return metrics["loss"]

    return run


class NnxModel(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((4, 2)))

    def __call__(self, batch):
        return outputs(self.w[...], batch)


DOORS = ["apply", "linen", "grad", "criterion", "evaluate", "nnx grad", "nnx step", "prefetched", "step"]


def expected(batch):
    return np.mean(outputs(PARAMS["params"]["w"], batch))


@pytest.mark.each_pair
@pytest.mark.one_case
@pytest.mark.parametrize("kind", DOORS)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("rows", [16, 13])
def test_what_is_not_read_does_not_trace_again(kind, devices, rows):
    count = []
    run = door(kind, range(devices), count)
    with warnings.catch_warnings(action="error"):
        for i in range(6):
            np.testing.assert_allclose(run(batch(i, rows)), expected(batch(i, rows)), rtol=1e-5)
            if not i:
                assert count
                count.clear()
    assert not count
    for mode in ("eval", "train"):
        np.testing.assert_allclose(run(batch(9, rows, mode)), expected(batch(9, rows, mode)), rtol=1e-5)
    assert count  # of the mode, which is read


def swallowing(batch):
    try:
        return batch["scale"]
    except Exception:
        return 7.0


def matched(batch):
    match batch:
        case {"scale": scale}:
            return scale
    return 7.0


def updated(batch):
    other = {"other": 7.0}
    other.update(batch)
    return other["scale"]


def unpacked(x, scale, **others):
    return scale


READS = {  # ways to read batch["scale"], a Python number
    "item": lambda b: b["scale"],
    "get": lambda b: b.get("scale", 7.0),
    "itemgetter": operator.itemgetter("scale"),
    "pop": lambda b: b.pop("scale"),
    "setdefault": lambda b: b.setdefault("scale", 7.0),
    "items": lambda b: dict(b.items())["scale"],
    "values": lambda b: sum(x for x in b.values() if isinstance(x, float)),
    "dict": lambda b: dict(b)["scale"],
    "unpacked": lambda b: {**b}["scale"],
    "keywords": lambda b: unpacked(**b),
    "keys": lambda b: sum(b[k] for k in b if k == "scale"),
    "update": updated,
    "or": lambda b: (b | {})["scale"],
    "ror": lambda b: ({} | b)["scale"],
    "copy": lambda b: b.copy()["scale"],
    "copy.copy": lambda b: copy.copy(b)["scale"],
    "match": matched,
    "compared": lambda b: 1.0 if {**b, "x": 0} == {"x": 0, "scale": 1.0, "rest": "?"} else 5.0,
    "equal": lambda b: 1.0 if [b] == [{"x": b["x"], "scale": 1.0, "rest": "?"}] else 5.0,
    "tree.map": lambda b: jax.tree.map(lambda x: x, b)["scale"],
    "tree.leaves": lambda b: jax.tree.leaves(b)[1],
    "tree with path": lambda b: dict((p[0].key, x) for p, x in jax.tree_util.tree_leaves_with_path(b))["scale"],
    "json": lambda b: json.loads(json.dumps(b, default=str))["scale"],
    "repr": lambda b: float(repr(b).split("'scale': ")[1].split(",")[0].split("}")[0]),
    "format": lambda b: float("{scale}".format(**b)),
    "format_map": lambda b: float("{scale}".format_map(b)),
    "percent": lambda b: float("%(scale)s" % b),  # noqa: UP031
    "swallowed": swallowing,
    "popitem": lambda b: [b.popitem() for _ in range(2)][1][1],
    "list": lambda b: [*b.values()][1],
    "frozen": lambda b: nn.FrozenDict(b)["scale"],
    "sorted": lambda b: sorted(b.items(), key=lambda pair: pair[0])[1][1],
}


@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("deep", one_in(2, [False, True]), ids=["batch", "nested"])
def test_each_way_to_read_a_value_makes_it_part_of_the_program(way, deep):
    read = READS[way]

    def f(w, batch):
        inner = batch["inner"][0] if deep else batch
        x = inner["x"]
        return x * w * (2 if read(inner) == 1.0 else 3)  # what stands for a hidden value equals nothing

    dp, x = jdp.DataParallel(f, range(2)), np.arange(4, dtype=np.float32)
    for scale in (1.0, 2.0, 1.0, 3.0):
        one = {"x": x, "scale": scale, "rest": "?"}
        factor = f(1.0, {"inner": [dict(one)]} if deep else dict(one)) / np.where(x, x, 1)
        np.testing.assert_allclose(dp.apply(1.0, {"inner": [one]} if deep else one), x * factor)


OPTIONS = {
    "microbatches": ({}, {"accumulate_steps": 2}),
    "replicas": ({"replicas": 8}, {}),
    "deterministic": ({"replicas": 8}, {"deterministic": True}),
    "shard_params": ({}, {"shard_params": True}),
    "shard_optimizer": ({}, {"shard_optimizer": True}),
    "sync_batch_norm": ({}, {"sync_batch_norm": True}),
    "bfloat16": ({}, {"reduce_dtype": jnp.bfloat16}),
    "skip_nonfinite": ({}, {"skip_nonfinite": True}),
}


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("option", OPTIONS)
def test_values_that_are_read_and_others_with_each_option_of_a_step(option):
    of_wrapper, of_step = OPTIONS[option]

    def loss(variables, batch):
        return jnp.mean(outputs(variables["params"]["w"], batch))

    step = jdp.DataParallel(lambda v, x: x, range(4), **of_wrapper).train_step(loss, optax.sgd(0.0), **of_step)
    state = step.init(PARAMS)
    for i, mode in enumerate(("train", "train", "eval", "train", "eval")):
        one = batch(i, 16, mode)
        state, metrics = step(state, one)
        np.testing.assert_allclose(metrics["loss"], expected(one), rtol=1e-5)
        assert step.check(state, one)
    assert step.find_nonfinite(state, batch(7)) == []


@pytest.mark.full
def test_values_under_jit_and_in_explain():
    def loss(variables, batch):
        return jnp.mean(outputs(variables["params"]["w"], batch))

    dp = jdp.DataParallel(lambda v, x: x, range(4))
    step, gradient = dp.train_step(loss, optax.sgd(0.0), donate=False), dp.value_and_grad(loss)
    state = step.init(PARAMS)
    for i, mode in enumerate(("train", "eval", "train")):
        one = batch(i, 16, mode)
        for call in (lambda: step(state, one)[1]["loss"], lambda: gradient(PARAMS, one)[0]):  # noqa: B023
            np.testing.assert_allclose(call(), expected(one), rtol=1e-5)
            np.testing.assert_allclose(jax.jit(call)(), expected(one), rtol=1e-5)
        assert "all-reduce" in str(jdp.explain(step, state, one))
        assert "all-reduce" in str(jdp.explain(gradient, PARAMS, one))


def test_counting_naming_and_deleting_reads_nothing():
    count = []

    def f(w, batch):
        count.append(1)
        assert len(batch) == 3 and "file" in batch and [*batch] == ["file", "more", "x"] and batch
        assert isinstance(batch, dict) and [*batch.keys()] == ["file", "more", "x"]
        del batch["file"]
        batch["more"] = 2.0
        return batch["x"] * w * batch["more"] * batch.get("none", 1) * batch.pop("no", 1)

    dp, x = jdp.DataParallel(f, range(2)), np.arange(4, dtype=np.float32)
    for i in range(4):
        np.testing.assert_array_equal(dp.apply(3.0, {"x": x, "file": f"{i}.png", "more": i}), 6 * x)
    assert len(count) == 1


def test_empty_parts_of_a_batch_are_no_leaves():
    """None and empty containers have no number: the next leaf, a flag here, is not hidden in their place."""
    seen = []

    def f(w, batch, flag):
        seen.append(flag)
        return batch["x"] * w * (2 if flag else 3)

    dp, x = jdp.DataParallel(f, range(2)), np.arange(4, dtype=np.float32)
    for empty in (None, {}, [], ()):
        np.testing.assert_array_equal(dp.apply(1.0, {"x": x, "z": empty}, False), 3 * x)
        np.testing.assert_array_equal(dp.apply(1.0, {"a": "b", "x": x, "z": [empty]}, False), 3 * x)
    assert {*map(type, seen)} == {bool}


def test_a_batch_that_is_changed_and_returned():
    """What stood there is not read, and what the function puts there comes back."""

    def f(w, batch):
        batch["file"] = batch["x"] * w
        return batch

    dp, x = jdp.DataParallel(f, range(2)), np.arange(4, dtype=np.float32)
    for i in range(3):
        out = dp.apply(2.0, {"x": x, "file": f"{i}.png"})
        assert type(out) is dict and [*out] == ["file", "x"]
        np.testing.assert_array_equal(out["file"], 2 * x)


def test_a_swallowed_flattening_is_read():
    def f(w, batch):
        try:
            n = len(jax.tree.leaves(batch))
        except Exception:
            n = 0
        return batch["x"] * w * n

    dp, x = jdp.DataParallel(f, range(2)), np.arange(4, dtype=np.float32)
    for i in range(2):
        np.testing.assert_array_equal(dp.apply(1.0, {"x": x, "file": f"{i}.png"}), 2 * x)


def test_what_a_callback_reads_later_is_read():
    seen = []

    def f(w, batch):
        jax.debug.callback(lambda _: seen.append(batch["file"]), batch["x"][0])
        return batch["x"] * w

    dp, x = jdp.DataParallel(f, [0]), np.arange(4, dtype=np.float32)
    for i in range(3):
        np.testing.assert_array_equal(dp.apply(1.0, {"x": x, "file": f"{i}.png"}), x)
    jax.effects_barrier()
    assert seen == ["0.png", "1.png", "2.png"]


def test_a_wrapper_inside_of_a_loss_reads_nothing():
    """It looks for known calls only where it runs a program of its own."""
    count = []

    def model(variables, batch):
        count.append(1)
        return batch["x"] @ variables["params"]["w"]

    dp = jdp.DataParallel(model, range(4))
    for _ in range(2):
        dp.apply(jdp.replicate(PARAMS, range(4)), {"x": jdp.scatter(batch(0)["x"], range(4))})
    assert dp._config.calls
    gradient = dp.value_and_grad(lambda variables, batch: jnp.mean(dp(variables, batch)))
    for i in range(4):
        np.testing.assert_allclose(gradient(PARAMS, batch(i))[0], batch(i)["x"].sum(1).mean(), rtol=1e-5)
        if not i:
            count.clear()
    assert not count


class Kind:
    """An object that is compared by what it is."""


def test_objects_are_hidden_too_and_told_apart_where_they_are_read():
    kinds, count = [Kind(), Kind()], []

    def f(w, batch):
        count.append(1)
        return batch["x"] * w * (2 if batch["kind"] is kinds[0] else 3)

    dp, x = jdp.DataParallel(f, range(2)), np.arange(4, dtype=np.float32)
    for i in (0, 1, 0, 1):
        np.testing.assert_array_equal(dp.apply(1.0, {"x": x, "kind": kinds[i], "other": Kind()}), (2, 3)[i] * x)
    assert len(count) == 3  # the first one ended where it asked for the kind


def test_an_error_of_the_function_is_its_own():
    def f(w, batch):
        raise LookupError("of the user")

    dp = jdp.DataParallel(f, range(2))
    for _ in range(2):
        with pytest.raises(LookupError, match="of the user") as found:
            dp.apply(1.0, {"x": np.ones(4, np.float32), "file": "a.png"})
        assert found.value.__cause__ is None and found.value.__context__ is None


def test_what_is_returned_is_read():
    dp = jdp.DataParallel(lambda w, batch: {**batch, "y": batch["x"] * w}, range(2))
    for i in range(3):
        with pytest.raises(TypeError, match=f"'{i}.png'|is a str"):
            dp.apply(1.0, {"x": np.ones(4, np.float32), "file": f"{i}.png"})


def test_a_step_that_reads_more_on_other_rows():
    """What one size of a batch does not read, another may."""

    def loss(variables, batch):
        scale = batch["scale"] if batch["x"].shape[0] == 2 else 1.0
        return jnp.mean(batch["x"] * variables["params"] * scale)

    step = jdp.DataParallel(lambda v, x: x, range(2)).train_step(loss, optax.sgd(0.0))
    state = step.init({"params": np.float32(1)})
    for rows in (8, 4, 8, 4):
        for scale in (2.0, 3.0):
            state, metrics = step(state, {"x": np.ones(rows, np.float32), "scale": scale})
            assert float(metrics["loss"]) == (scale if rows == 4 else 1.0)


def test_a_donated_state_survives_a_trace_that_ends_early():
    """A known program is traced again for another dtype, and reads more then: nothing is freed before that."""

    def loss(variables, batch):
        scale = batch["scale"] if batch["x"].dtype == np.float32 else 1.0
        return jnp.mean(batch["x"] * variables["params"] * scale)

    step = jdp.DataParallel(lambda v, x: x, range(2)).train_step(loss, optax.sgd(0.5))
    state, losses = step.init({"params": np.float32(1)}), []
    for dtype in (np.float16, np.float32, np.float16, np.float32):
        state, metrics = step(state, {"x": np.ones(4, dtype), "scale": 4.0})
        losses.append(float(metrics["loss"]))
    assert losses == [1, 2, -1.5, -8]  # the parameter is 1, 0.5, -1.5, -2


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.booleans(), st.integers(1, 9)), max_size=6),
    st.sets(st.sampled_from(["name", "number", "flag"])),
)
@examples(20)
def test_law_a_sequence_of_values_is_what_the_bare_function_gives(calls, read):
    def f(w, batch):
        x = batch["x"] * w
        if "name" in read:
            x = x * (2 if batch["name"] == "a" else 3)
        if "number" in read:
            x = x + batch["nested"][0]["number"]
        if "flag" in read and batch["nested"][0]["flag"]:
            x = -x
        return x

    dp = jdp.DataParallel(f, range(3))
    for name, number, flag, rows in calls:
        one = {"x": np.arange(rows, dtype=np.float32), "name": name, "nested": [{"number": number, "flag": flag}]}
        np.testing.assert_array_equal(dp.apply(np.float32(2), one), f(2, one))


def test_entries_are_a_dict_of_what_is_not_hidden():
    seen = []
    call = reading(lambda batch: seen.append(batch))
    plain = {"x": 1, "y": [2, {"z": 3}]}
    call(plain)
    assert seen[0] is plain and not isinstance(plain, Entries)
