"""jdp against vectors that torch itself made (golden/make_golden.py), and the ideas of torch's own DataParallel tests.

No torch here. The vectors hold what torch's DataParallel returned, its gradients and BatchNorm statistics.
"""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from golden import flax_side
from golden.structures import GATHERED, SCATTERED, Point, decode, encode
from laws import close

import jdp

GOLDEN = pathlib.Path(__file__).parent / "golden"


def load(name):
    if name.endswith(".json"):
        return json.loads((GOLDEN / name).read_text())
    with np.load(GOLDEN / name) as file:
        return dict(file)


@functools.cache
def cases():
    """The records of all cases by (model, rows, devices)."""
    found = collections.defaultdict(dict)
    for key, value in load("cases.npz").items():
        name, _, entry = key.partition("/")
        model, rows, n = name.split("-")
        found[model, int(rows), int(n)][entry] = value
    return dict(found)


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# -- torch's numbers


def test_chunk_sizes_are_torchs():
    table = load("chunk_sizes.json")
    assert len(table) == 41 and all(len(row) == 9 for row in table)
    for rows, row in enumerate(table):
        for n, sizes in enumerate(row, 1):
            assert jdp.chunk_sizes(rows, n) == tuple(sizes), (rows, n)


@pytest.mark.parametrize("name", SCATTERED)
def test_scatter_gives_torchs_pieces(name, devices):
    tree, n, dim = SCATTERED[name]
    s = jdp.scatter(decode(tree, np.asarray), devices[:n], dim)
    assert [encode(piece) for piece in s] == load("structures.json")[f"scatter {name}"]


@pytest.mark.parametrize("name", GATHERED)
def test_gather_gives_torchs_whole(name, devices):
    trees, dim = GATHERED[name]
    outputs = [jax.device_put(decode(t, np.asarray), device) for t, device in zip(trees, devices, strict=False)]
    assert encode(jdp.gather(outputs, dim=dim)) == load("structures.json")[f"gather {name}"]


@pytest.mark.one_case("Conv-10-4", "MLP-17-8")
@pytest.mark.parametrize(("model", "rows", "n"), sorted(cases()), ids=lambda x: str(x))
def test_output_gradients_and_state_are_torchs(model, rows, n, devices):
    record = cases()[model, rows, n]
    dp = jdp.DataParallel(flax_side.MODELS[model](), devices[:n])
    got = flax_side.run_case(model, dp.apply, n, record)
    close(got, flax_side.expected(model, n, record))


@pytest.mark.full
def test_without_jit_too(devices):
    record = cases()["MLP", 11, 4]
    dp = jdp.DataParallel(flax_side.MLP(), devices[:4])
    got = flax_side.run_case("MLP", dp.apply, 4, record, transform=lambda gradient: gradient)
    close(got, flax_side.expected("MLP", 4, record))


def test_bare_model_is_not_torchs_data_parallel():
    """The vectors can tell chunk statistics from those of the whole batch: a bare model does not pass."""
    record = cases()["MLP", 8, 4]
    got = flax_side.run_case("MLP", flax_side.MLP().apply, 4, record)
    wanted = flax_side.expected("MLP", 4, record)
    assert np.abs(got["out"] - wanted["out"]).max() > 0.1


def train_linen(dp, record, steps):
    """SGD with momentum, as in torch_side.run_training: the losses, and the variables after every step."""
    tx = optax.sgd(0.05, momentum=0.9)
    variables = flax_side.variables("MLP", flax_side.part(record, "before"))
    opt_state = tx.init(variables["params"])

    def loss_fn(params, stats, x, target):
        out, updates = dp.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return ((out - target) ** 2).mean(), updates["batch_stats"]

    @jax.jit
    def step(variables, opt_state, x, target):
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = gradient(variables["params"], variables["batch_stats"], x, target)
        updates, opt_state = tx.update(grads, opt_state)
        return (
            loss,
            {"params": optax.apply_updates(variables["params"], updates), "batch_stats": stats},
            opt_state,
        )

    for k in range(steps):
        loss, variables, opt_state = step(variables, opt_state, record[f"{k}.x"], record[f"{k}.target"])
        yield loss, variables


def flax_history(record, n):
    """The variables that Flax has after every step where torch has those of the record."""
    var = record["before.1.running_var"]
    for k in range(sum(key.endswith(".loss") for key in record)):
        before = flax_side.part(record, "before" if k == 0 else str(k - 1))
        after = flax_side.part(record, str(k))
        rows = -(-len(record[f"{k}.x"]) // n)
        stats = flax_side.batch_stats("MLP", before, after, rows)["BatchNorm_0"]
        # the same update of this step, onto Flax's own value of the step before
        var = stats["var"] - 0.9 * before["1.running_var"] + 0.9 * var
        params = flax_side.params("MLP", after)
        yield (
            record[f"{k}.loss"],
            {"params": params, "batch_stats": {"BatchNorm_0": {"mean": stats["mean"], "var": var}}},
        )


def test_training_follows_torch_step_by_step(devices):
    record = load("training.npz")
    history = list(flax_history(record, 4))
    assert len(history) == 6
    dp = jdp.DataParallel(flax_side.MLP(), devices[:4])
    for got, wanted in zip(train_linen(dp, record, 6), history, strict=True):
        close(got, wanted)


def test_trained_torch_model_predicts_the_same(devices):
    """Running statistics carry over: evaluation does not look at chunks, with 10 rows over 4 devices or over 1."""
    record = load("training.npz")
    variables = flax_side.variables("MLP", flax_side.part(record, "5"))
    for n in (1, 4):
        dp = jdp.DataParallel(flax_side.MLP(train=False), devices[:n])
        close(dp.apply(variables, record["test.x"]), record["test.out"])


class TwinMLP(nnx.Module):
    """flax_side.MLP in NNX."""

    def __init__(self, state):
        rngs = nnx.Rngs(0)
        self.inner, self.outer = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, epsilon=0.1, rngs=rngs)
        values = flax_side.variables("MLP", state)
        for layer, name in ((self.inner, "Dense_0"), (self.outer, "Dense_1"), (self.norm, "BatchNorm_0")):
            for key, value in {**values["params"][name], **values["batch_stats"].get(name, {})}.items():
                getattr(layer, key)[...] = value

    def __call__(self, x):
        return self.outer(nnx.relu(self.norm(self.inner(x))))


@pytest.mark.full
def test_nnx_training_follows_torch(devices):
    record = load("training.npz")
    dp = jdp.DataParallel(TwinMLP(flax_side.part(record, "before")), devices[:4])
    optimizer = nnx.Optimizer(dp, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    history = list(flax_history(record, 4))[:2]

    @nnx.jit
    def step(dp, optimizer, x, target):
        loss, grads = nnx.value_and_grad(lambda dp: ((dp(x) - target) ** 2).mean())(dp)
        optimizer.update(dp, grads)
        return loss

    for k, (loss, wanted) in enumerate(history):
        close(step(dp, optimizer, record[f"{k}.x"], record[f"{k}.target"]), loss)
        stats = wanted["batch_stats"]["BatchNorm_0"]
        close(dp.module.norm.mean[...], stats["mean"])
        close(dp.module.norm.var[...], stats["var"])
        close(dp.module.inner.kernel[...], wanted["params"]["Dense_0"]["kernel"])


def words(name):
    kind, text = load("messages.json")[name]
    return {
        "IndexError": IndexError,
        "ValueError": ValueError,
        "RuntimeError": RuntimeError,
        "KeyError": KeyError,
    }[kind], text


def test_errors_have_torchs_type_and_words(devices):
    kind, text = words("scatter_dim")
    with pytest.raises(kind, match=re.escape(text)):
        jdp.scatter(ramp(4), devices[:2], 1)
    kind, text = words("scatter_dim_negative")
    with pytest.raises(kind, match=re.escape(text)):
        jdp.scatter(ramp(4, 2), devices[:2], -3)
    kind, text = words("gather_keys")
    with pytest.raises(kind, match=re.escape(text)):
        jdp.gather([{"a": ramp(1)}, {}])
    kind, text = words("wrong_device")
    text = text.replace("cpu", str(devices[0])).replace("meta", str(devices[3]))
    with pytest.raises(kind, match=re.escape(text)):
        jdp.replicate({"bias": jax.device_put(ramp(2), devices[3])}, devices[:2])


def test_an_exception_of_the_model_says_where_as_torch_does(devices):
    def fails(params, x):
        if x.shape[0] < 3:
            raise KeyError("no such row")
        return x * params

    kind, text = words("replica_error")
    where, what = text.splitlines()
    with pytest.raises(kind) as caught:
        jdp.DataParallel(fails, devices[:4])(1.0, ramp(10))
    assert what == f"KeyError: {caught.value}"
    assert caught.value.__notes__[0] == where.replace("device 3", f"device {devices[3]}")


# -- the ideas of torch's own tests (test/distributed/test_data_parallel.py, test/test_cuda_multigpu.py)


@pytest.fixture
def linear():
    """A linear layer as a function, its parameters, and a batch of 10."""
    rng = np.random.default_rng(0)
    params = {
        "w": rng.standard_normal((5, 3), dtype=np.float32),
        "b": rng.standard_normal(3, dtype=np.float32),
    }
    return lambda p, x: x @ p["w"] + p["b"], params, rng.standard_normal((10, 5), dtype=np.float32)


def test_multiple_input(devices):
    """Positional, keyword and default arguments, arrays and floats, in every combination that torch tries."""

    def model(w, x, y, *, scale=1.0, shift=None):
        z = x @ w["w"] + y * scale
        return z if shift is None else z + shift

    w, x, y, shift = {"w": ramp(3, 3)}, ramp(7, 3), ramp(7, 3), ramp(7, 3)
    for args, kwargs in [
        ((x, y), {}),
        ((x, y), {"scale": 2.0}),
        ((x, y), {"shift": shift}),
        ((x,), {"y": y, "scale": 0.5, "shift": shift}),
        ((), {"x": x, "y": y}),
    ]:
        out = jdp.data_parallel(model, w, args, devices[:3], kwargs=kwargs)
        np.testing.assert_array_equal(out, model(w, *args, **kwargs))


def test_module_kwargs_only(linear, devices):
    model, params, x = linear
    out = jdp.DataParallel(lambda p, *, input: model(p, input), devices[:4])(params, input=x)
    np.testing.assert_allclose(out, model(params, x), rtol=1e-6)


@pytest.mark.parametrize("empty", [[], {}, (), None], ids=repr)
def test_empty_containers_reach_the_model(empty, linear, devices):
    model, params, x = linear

    def checked(p, x, other, *, more):
        assert other == empty and more == [empty] and type(other) is type(empty)
        return model(p, x)

    out = jdp.DataParallel(checked, devices[:4])(params, x, empty, more=[empty])
    np.testing.assert_allclose(out, model(params, x), rtol=1e-6)


def test_small_batch_runs_on_the_first_devices(devices):
    seen = jdp.scatter(ramp(3, 2), devices)
    assert seen.sizes == (1, 1, 1) and seen.devices == tuple(devices[:3])
    variables = {"params": {"kernel": ramp(2, 4), "bias": ramp(4)}}
    dp = jdp.DataParallel(nn.Dense(4), devices)
    out = dp.apply(variables, ramp(3, 2))
    np.testing.assert_array_equal(out, ramp(3, 2) @ ramp(2, 4) + ramp(4))


def test_nested_input_and_output(devices):
    def model(w, batch):
        x = batch["a"][0][1]
        return {"list": [x * w, (x + w, {"deep": x - w})], "point": Point(x, x * x), "none": None}

    x = ramp(5, 2)
    out = jdp.DataParallel(model, devices[:2])(np.float32(3), {"a": [(None, x), "text"]})
    wanted = model(np.float32(3), {"a": [(None, x), "text"]})
    close(out, wanted)
    assert type(out["point"]) is Point and out["none"] is None and type(out["list"][1]) is tuple


def test_scatter_and_gather_of_a_namedtuple(devices):
    pieces = jdp.scatter(Point(ramp(4, 3), label="kept"), devices[:2])
    for i, piece in enumerate(pieces):
        assert type(piece) is Point and piece.label == "kept"
        np.testing.assert_array_equal(piece.x, ramp(4, 3)[2 * i : 2 * i + 2])
    whole = jdp.gather([Point(ramp(2), ramp(1)), Point(ramp(1), ramp(1))])
    assert type(whole) is Point
    np.testing.assert_array_equal(whole.x, [0, 1, 0])


@pytest.mark.one_case
@pytest.mark.parametrize(("place", "dim"), [("host", 0), ("host", 1), ("first", -1), ("second", 0), ("second", 1)])
def test_scatter_from_any_place_and_back(place, dim, devices):
    """torch's scatter_cpu and scatter_gpu, with the gradient, which comes back to where the input was."""
    x = ramp(5, 4)
    if place != "host":
        x = jax.device_put(x, devices[("first", "second").index(place)])
    s = jdp.scatter(x, devices[:2], dim)
    for i, (piece, wanted) in enumerate(
        zip(s, np.split(np.asarray(x), [3] if dim == 0 else [2], axis=dim), strict=True)
    ):
        np.testing.assert_array_equal(piece, wanted)
        assert piece.devices() == {devices[i]}
    grad = jax.grad(lambda x: (jdp.gather(jdp.scatter(x, devices[:2], dim), dim=dim) * ramp(5, 4)).sum())(
        jnp.asarray(x)
    )
    np.testing.assert_array_equal(grad, ramp(5, 4))
    if place != "host":
        assert grad.devices() == x.devices()


@pytest.mark.parametrize("sizes", [(3, 2), (1, 4), (5, 0)])
def test_scatter_in_given_sizes(sizes, devices):
    s = jdp.scatter(ramp(5, 2), devices[:2], chunk_sizes=sizes)
    assert s.sizes == sizes and [len(piece) for piece in s] == list(sizes)
    np.testing.assert_array_equal(jdp.gather(s), ramp(5, 2))


@pytest.mark.one_case
@pytest.mark.parametrize(("destination", "dim"), [(None, 0), (0, 1), (1, -2), (1, 1), (-1, 0), ("cpu", -2)])
def test_gather_to_any_place(destination, dim, devices):
    """torch's gather_cpu and gather_gpu, with the gradient, which comes back to the parts."""
    shapes = [(3, 2), (1, 2)] if dim != 1 else [(2, 3), (2, 1)]
    parts = [jax.device_put(ramp(*shape), devices[i]) for i, shape in enumerate(shapes)]
    out = jdp.gather(parts, destination, dim)
    np.testing.assert_array_equal(out, np.concatenate(parts, axis=dim))
    assert out.devices() == {devices[1 if destination == 1 else 0]}
    grads = jax.grad(lambda parts: (jdp.gather(parts, destination, dim) ** 2).sum() / 2)(parts)
    for grad, part in zip(grads, parts, strict=True):
        np.testing.assert_array_equal(grad, part)
        assert grad.devices() == part.devices()


def test_gather_of_scalars_and_of_dicts_of_other_lengths(devices):
    np.testing.assert_array_equal(jdp.gather([np.float32(3), np.float32(5)]), [3, 5])
    with pytest.raises(ValueError, match="must have the same number of keys"):
        jdp.gather([{"a": ramp(1)}, {"a": ramp(1), "b": ramp(1)}])


def test_broadcast_reaches_every_device(devices):
    tree = {"f": ramp(3, 2), "i": np.arange(4), "empty": np.zeros((0, 3), np.float32), "scalar": 2.5}
    copies = jdp.replicate(tree, devices)
    for name, value in tree.items():
        shards = copies[name].addressable_shards
        assert [shard.device for shard in shards] == list(devices)
        for shard in shards:
            np.testing.assert_array_equal(shard.data, value)
            assert shard.data.dtype == jnp.asarray(value).dtype


def test_reduce_add_over_mixed_types(devices):
    """torch's reduce_add and its coalesced form: order and types of the tensors are kept."""
    trees = [
        {"half": np.full(3, i, np.float16), "ints": np.arange(4) * i, "big": np.full((50, 50), i, np.float32)}
        for i in range(4)
    ]
    total = jdp.reduce_add([jax.device_put(t, d) for t, d in zip(trees, devices, strict=False)])
    for name, value in total.items():
        np.testing.assert_array_equal(value, sum(t[name] for t in trees))
        assert value.dtype == jnp.asarray(trees[0][name]).dtype and value.devices() == {devices[0]}


def test_parallel_apply_with_given_replicas(linear, devices):
    model, params, x = linear
    outputs = jdp.parallel_apply(model, jdp.replicate(params, devices[:2]), jdp.scatter((x,), devices[:2]))
    assert len(outputs) == 2
    for i, out in enumerate(outputs):
        np.testing.assert_allclose(out, model(params, x[5 * i : 5 * i + 5]), rtol=1e-6)
        assert out.devices() == {devices[i]}


def test_parallel_apply_passes_the_exception_on(devices):
    with pytest.raises(KeyError, match="the model's own text") as caught:
        jdp.parallel_apply(lambda w, x: {}["the model's own text"], 1.0, jdp.scatter((ramp(4),), devices[:2]))
    assert caught.value.__notes__[0] == f"Caught KeyError in replica 0 on device {devices[0]}."


@pytest.mark.full
def test_rnn_final_state_has_its_batch_on_another_axis(devices):
    """torch's rnn test; and where torch joins `h_n` along the layers, `out_axes` names the batch axis."""
    cell = nn.RNN(nn.SimpleCell(4), return_carry=True)
    x = np.random.default_rng(0).standard_normal((5, 6, 3), dtype=np.float32)
    variables = cell.init(jax.random.key(0), x)

    def layers_first(variables, x):
        carry, out = cell.apply(variables, x)
        return out, carry[None]

    got = jdp.DataParallel(layers_first, devices[:3], out_axes=(0, 1))(variables, x)
    assert got[1].shape == (1, 5, 4)
    close(got, layers_first(variables, x))


def test_complex_numbers(devices):
    def model(w, x):
        return (x * w).sum(-1)

    x, w = (ramp(10, 2) + 1j).astype(np.complex64), np.array([1 + 2j, 3 - 1j], np.complex64)
    dp = jdp.DataParallel(model, devices[:4])
    np.testing.assert_allclose(dp(w, x), model(w, x), rtol=1e-6)
    grads = [jax.grad(lambda w, f=f: jnp.abs(f(w, x)).sum())(jnp.asarray(w)) for f in (dp, model)]
    np.testing.assert_allclose(*grads, rtol=1e-5)


def test_device_arguments_of_every_form(linear, devices):
    model, params, x = linear
    wanted = model(params, x)
    for ids in (
        [0, 1],
        (0, 1),
        range(2),
        ["cpu:0", "cpu:1"],
        [devices[1], devices[0]],
        ["cpu:1", devices[0]],
        [1, 0],
    ):
        dp = jdp.DataParallel(model, ids)
        out = dp(params, x)
        np.testing.assert_allclose(out, wanted, rtol=1e-6)
        assert out.devices() == {dp.devices[0]}


def test_output_device_outside_the_replicas(linear, devices):
    model, params, x = linear
    for n in (1, 2):  # torch ignores it on one device
        out = jdp.DataParallel(model, devices[:n], output_device=5)(params, x)
        np.testing.assert_allclose(out, model(params, x), rtol=1e-6)
        assert out.devices() == {devices[5]}


def test_gradient_of_a_gradient_after_the_loss_is_gone(devices):
    """torch's function_deletion: a gradient penalty, whose weight gradient is known by hand."""
    dp = jdp.DataParallel(lambda p, x: x @ p["w"] + p["b"], devices[:2])
    params = {"w": jnp.ones((2, 1)), "b": jnp.ones(1)}
    x = jnp.ones((4, 2))

    def penalty(params):
        slope = jax.grad(lambda x: dp(params, x).sum())(x)
        return (slope**2).sum(1).mean()

    grads = jax.grad(penalty)(params)
    np.testing.assert_allclose(grads["w"], 2 * np.ones((2, 1)), rtol=1e-6)
    np.testing.assert_array_equal(grads["b"], [0])


def test_gradient_of_state_is_summed(devices):
    """torch's buffers_requiring_grad: any collection can be differentiated."""

    class Shifted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.variable("buffers", "shift", lambda: jnp.zeros(2)).value

    dp = jdp.DataParallel(Shifted(), devices[:4])
    variables = dp.init(jax.random.key(0), ramp(1, 2))
    grads = jax.grad(lambda v: dp.apply(v, ramp(10, 2)).sum())(variables)
    np.testing.assert_array_equal(grads["buffers"]["shift"], [10, 10])


def test_uninitialised_model_says_call_init(devices):
    """torch's lazy_linear."""
    dp = jdp.DataParallel(nn.Dense(2), devices[:2])
    with pytest.raises(Exception, match=r'Tried to access "kernel" from collection "params"') as caught:
        dp.apply({}, ramp(4, 3))
    assert any("dp.init" in note for note in caught.value.__notes__)


def test_parameters_in_lists_dicts_and_of_no_size(devices):
    """torch's parameter_list_dict_replica and its parameters of empty shape."""
    params = {"list": [ramp(2), ramp(2)], "dict": {"a": ramp(1)}, "empty": np.zeros((0, 2), np.float32)}

    def model(p, x):
        assert len(p["list"]) == 2 and p["empty"].shape == (0, 2)
        return x * sum(p["list"]) + p["dict"]["a"] + p["empty"].sum()

    dp = jdp.DataParallel(model, devices[:4])
    close(dp(params, ramp(5, 2)), model(params, ramp(5, 2)))
    grads = jax.grad(lambda p: dp(p, ramp(5, 2)).sum())(params)
    close(grads, jax.grad(lambda p: model(p, ramp(5, 2)).sum())(params))


def test_gradients_accumulate_by_adding(linear, devices):
    """torch's zero_grad and no_sync ideas: two half batches, added, are the whole batch."""
    model, params, x = linear
    dp = jdp.DataParallel(model, devices[:3])

    @jax.jit
    def gradient(x):
        return jax.grad(lambda p: (dp(p, x) ** 2).sum())(params)

    whole, halves = gradient(x), [gradient(x[:4]), gradient(x[4:])]
    close(jax.tree.map(jnp.add, *halves), whole, rtol=1e-5, atol=1e-5)


def test_stop_gradient_is_torchs_no_grad(linear, devices):
    model, params, x = linear
    dp = jdp.DataParallel(model, devices[:2])
    grads = jax.grad(lambda p: dp(jax.lax.stop_gradient(p), x).sum() + p["b"].sum())(params)
    np.testing.assert_array_equal(grads["w"], np.zeros((5, 3)))
    np.testing.assert_array_equal(grads["b"], np.ones(3))


def test_precision_context_reaches_the_replicas(devices):
    """torch's autocast test: there the threads forget the dtype; here a context is read when the program is traced."""
    seen = []

    def model(w, x):
        seen.append(jax.config.jax_default_matmul_precision)
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    dp = jdp.DataParallel(model, devices[:2])
    with jax.default_matmul_precision("highest"):
        out = dp(ramp(3, 3), ramp(4, 3))
    assert seen == ["highest"] and out.dtype == jnp.bfloat16


def test_no_device_moves_what_the_model_returns_untouched(devices):
    """torch's small_back and model_device: the result is the model's whichever device is primary."""
    dp = jdp.DataParallel(lambda w, x: x, [devices[2], devices[0], devices[1]])
    out = dp({}, ramp(7, 2))
    np.testing.assert_array_equal(out, ramp(7, 2))
    assert out.devices() == {devices[2]}
