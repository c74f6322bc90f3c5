"""PARITY.md is complete, and tests of its own for the rows that nothing else shows."""

from __future__ import annotations

import ast
import collections
import dataclasses
import gc
import pathlib
import pickle
import re
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import sparse

import jdp

ROOT = pathlib.Path(__file__).parent.parent


def lettered(number, last):
    return [f"{number}{letter}" for letter in "abcdefghijklmnopq"[: ord(last) - ord("a") + 1]]


SECTIONS = {
    "A.1": [*range(1, 19)],
    "A.2": [*range(19, 38)],
    "A.3": [*range(38, 65)],
    "A.4": [*range(65, 71)],
    "A.5": [*range(71, 100)],
    "A.6": [*range(100, 121)],
    "A.7": [*range(121, 136), *lettered(135, "k")],
    "A.8": lettered(136, "o"),
    "A.9": lettered(137, "g"),
    "A.10": lettered(138, "e"),
    "A.11": lettered(139, "q"),
    "A.12": lettered(140, "h"),
    "A.13": lettered(141, "h"),
}
"""Every row of the catalogue of torch's behaviour, by section."""


def rows_of(text):
    """The rows that a cell like `1, 5-7, 135a-135c` names."""
    found = []
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        last = last or first
        if first.isdigit():
            found += [str(k) for k in range(int(first), int(last) + 1)]
        else:
            assert first[:-1] == last[:-1], piece
            found += [first[:-1] + chr(k) for k in range(ord(first[-1]), ord(last[-1]) + 1)]
    return found


def table():
    """The lines of PARITY.md's tables: section, rows, what jdp does, tests."""
    section = None
    for line in (ROOT / "PARITY.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.split()[1]
        elif re.match(r"\| \d", line):
            rows, _, what, tests = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            yield section, rows_of(rows), what, re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)


def test_every_row_is_in_its_section_once():
    found = collections.defaultdict(list)
    for section, rows, _, _ in table():
        found[section] += rows
    assert {name: sorted(rows) for name, rows in found.items()} == {
        name: sorted(map(str, rows)) for name, rows in SECTIONS.items()
    }


@pytest.mark.full
@pytest.mark.budget(8)  # it reads all tests
def test_every_line_says_what_became_of_it_and_names_tests_that_exist():
    names = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        names[path.relative_to(ROOT).as_posix()] = functions
    missing = []
    for _, rows, what, tests in table():
        assert re.match(r"(kept|improved|impossible|changed)\b", what), (rows, what)
        assert tests, rows
        missing += [(rows, path, name) for path, name in tests if name not in names.get(path, ())]
    assert not missing


# -- tests of their own, in the order of the rows


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def times(w, x):
    return x * w


def test_the_wrapper_is_generic(devices):
    dp: jdp.DataParallel[nn.Dense] = jdp.DataParallel(nn.Dense(2), devices[:2])
    assert jdp.DataParallel[nn.Dense].__args__ == (nn.Dense,) and isinstance(dp.module, nn.Dense)


def test_profiles_name_the_call(devices):
    lowered = jax.jit(jdp.DataParallel(times, devices[:2])).lower(2.0, ramp(4))
    assert "DataParallel" in lowered.as_text(debug_info=True)
    assert "DataParallel" not in jax.jit(times).lower(2.0, ramp(4)).as_text(debug_info=True)


def test_a_call_without_arguments_runs_once(devices):
    out = jdp.DataParallel(lambda w: jnp.ones(3) * w, devices[:4])(2.0)
    np.testing.assert_array_equal(out, [2, 2, 2])
    assert out.devices() == {devices[0]}


def test_a_swapped_module_is_used_at_once(devices):
    dp = jdp.DataParallel(times, devices[:4])
    np.testing.assert_array_equal(dp(2.0, ramp(5)), ramp(5) * 2)
    dp.module = lambda w, x: x + w
    np.testing.assert_array_equal(dp(2.0, ramp(5)), ramp(5) + 2)
    with pytest.raises(AttributeError, match="devices"):
        dp.devices = devices[:2]


def test_keywords_of_any_name_reach_the_model(devices):
    def model(w, *, inputs, module, devices, kwargs, params, output_device):
        return inputs + module + devices + kwargs + params + output_device

    names = ("inputs", "module", "devices", "kwargs", "params", "output_device")
    out = jdp.DataParallel(model, devices[:4])(2.0, **{name: ramp(5) for name in names})
    np.testing.assert_array_equal(out, 6 * ramp(5))


def test_a_list_of_samples_is_cut_by_a_scatter_of_ones_own(devices):
    class Samples(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return super().scatter((np.stack(inputs[0]),), kwargs, devices)

    images = [ramp(3, 2) + k for k in range(5)]
    out = Samples(lambda w, x: x.sum((1, 2)) * w, devices[:2])(1.0, images)
    np.testing.assert_array_equal(out, [image.sum() for image in images])


def test_keys_of_a_dict_are_sorted_and_those_of_an_ordered_dict_are_not(devices):
    plain, ordered = {"b": ramp(2), "a": ramp(2)}, collections.OrderedDict(b=ramp(2), a=ramp(2))
    s = jdp.scatter((plain, ordered), devices[:2])
    assert [list(part) for part in s[0]] == [["a", "b"], ["b", "a"]]
    assert list(jax.tree.map(lambda x: x, plain)) == ["a", "b"]  # as everywhere in JAX
    with pytest.raises(ValueError, match="keys"):
        jdp.scatter({1: ramp(2), "a": ramp(2)}, devices[:2])


@pytest.mark.full
def test_padded_sequences_go_with_their_lengths(devices):
    """In place of a PackedSequence: the lengths are cut with the batch, and the padding is masked in the model."""
    rnn = nn.RNN(nn.SimpleCell(3))
    x, lengths = (
        np.random.default_rng(0).standard_normal((5, 4, 2), dtype=np.float32),
        np.array([4, 2, 3, 1, 4]),
    )
    variables = rnn.init(jax.random.key(0), x)

    def model(variables, x, lengths):
        out = rnn.apply(variables, x, seq_lengths=lengths)
        return jnp.where(jnp.arange(4)[:, None] < lengths[:, None, None], out, 0.0)

    out = jdp.DataParallel(model, devices[:2])(variables, x, lengths)
    np.testing.assert_allclose(out, model(variables, x, lengths), rtol=1e-5, atol=1e-6)


def test_a_model_changes_no_container_of_the_caller(devices):
    empty, full, mapping = [], [ramp(4)], {}

    def model(w, x, empty, full, mapping):
        empty.append(x)
        full.append(x)
        mapping["x"] = x
        return x * w

    jdp.DataParallel(model, devices[:2])(1.0, ramp(4), empty, full, mapping)
    assert empty == [] and len(full) == 1 and mapping == {}


@dataclasses.dataclass
class Plain:
    x: object


@pytest.mark.parametrize(
    "make", [collections.UserDict, Plain, lambda d: Plain(d["x"])], ids=["UserDict", "dict", "array"]
)
def test_a_container_that_jax_does_not_know_is_refused(make, devices):
    """torch hands it whole to every replica, and the output has the rows of the batch once for each of them."""
    dp = jdp.DataParallel(lambda w, x, batch: x, devices[:2])
    with pytest.raises(TypeError, match=r"args\[1\].*[Rr]egister"):
        dp(1.0, ramp(4), make({"x": ramp(4)}))


def test_sparse_arrays_are_refused(devices):
    """As in torch. A BCOO is a pytree, whose arrays are no rows: cut, it would be a sum of matrices."""
    with pytest.raises((TypeError, NotImplementedError), match="BCOO"):
        jdp.DataParallel(lambda w, m: m @ w, devices[:2])(ramp(8, 2), sparse.BCOO.fromdense(jnp.eye(8)))


@pytest.mark.full
def test_nothing_waits_for_the_garbage_collector(devices):
    gc.collect()
    gc.disable()
    try:
        dp = jdp.DataParallel(lambda w, x: x * w, devices[:4])
        out = dp(2.0, ramp(10))
        s = jdp.scatter(ramp(10), devices[:4])
        refs = [weakref.ref(out), weakref.ref(jax.tree.leaves(s)[0]), weakref.ref(dp)]
        del out, s, dp
        assert [ref() for ref in refs] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.one_case
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, nn.jit, nn.remat], ids=lambda t: t.__name__)
def test_transformed_models_are_wrapped_like_any(transform, devices):
    """torch refuses or breaks script modules and fx graphs."""
    x = ramp(5, 3)
    if transform in (nn.jit, nn.remat):
        module = transform(nn.Dense)(2)
        dp = jdp.DataParallel(module, devices[:4])
        variables = dp.init(jax.random.key(0), x)
        np.testing.assert_allclose(dp.apply(variables, x), module.apply(variables, x), rtol=1e-6)
    else:
        np.testing.assert_array_equal(jdp.DataParallel(transform(times), devices[:4])(2.0, x), x * 2)


def test_parameters_are_visible_inside_the_model(devices):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(2)(x)
            return y * len(jax.tree.leaves(self.variables["params"]))

    class Nnx(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.inner(x) * len(jax.tree.leaves(nnx.state(self, nnx.Param)))

    x = ramp(5, 3)
    dp = jdp.DataParallel(Linen(), devices[:2])
    variables = dp.init(jax.random.key(0), x)
    np.testing.assert_allclose(
        dp.apply(variables, x), 2 * nn.Dense(2).apply({"params": variables["params"]["Dense_0"]}, x)
    )
    module = Nnx()
    wanted = module(x)
    np.testing.assert_allclose(jdp.DataParallel(module, devices[:2])(x), wanted, rtol=1e-6)


def test_submodules_in_a_list_have_parameters_on_every_replica(devices):
    class Linen(nn.Module):
        def setup(self):
            self.layers = [nn.Dense(4), nn.Dense(2)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    x = ramp(5, 3) / 10
    dp = jdp.DataParallel(Linen(), devices[:4])
    variables = dp.init(jax.random.key(0), x)
    np.testing.assert_allclose(dp.apply(variables, x), Linen().apply(variables, x), rtol=1e-5)
    grads = jax.grad(lambda v: dp.apply(v, x).sum())(variables)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_arrays_closed_over_reach_every_replica(devices):
    table = jnp.arange(4.0)  # on one device, as a plain tensor attribute is
    out = jdp.DataParallel(lambda w, x: table[x] * w, devices[:4])(2.0, np.array([3, 1, 0, 2, 3]))
    np.testing.assert_array_equal(out, [6, 2, 0, 4, 6])


def test_a_bound_method_takes_the_parameters_it_is_given(devices):
    module = nn.Dense(2)
    variables = module.init(jax.random.key(0), ramp(1, 3))
    dp = jdp.DataParallel(module.apply, devices[:4])
    for scale in (1.0, 3.0):
        scaled = jax.tree.map(lambda p, scale=scale: p * scale, variables)
        np.testing.assert_allclose(dp(scaled, ramp(5, 3)), module.apply(scaled, ramp(5, 3)), rtol=1e-6)


def test_attributes_set_in_the_model(devices):
    """Linen refuses them; NNX loses a plain attribute with a warning, and keeps the mean of a new variable."""

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.count = 1
            return x

    class Nnx(nnx.Module):
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            self.seen = nnx.Variable(jnp.float32(x.shape[0]))
            return x

    with pytest.raises(Exception, match="Can't set count=1"):
        jdp.DataParallel(Linen(), devices[:2]).apply({}, ramp(5))
    module, lost = Nnx(), pytest.warns(UserWarning, match="Nnx.calls was changed from 0 to 1 in a call")
    with lost, pytest.raises(ValueError, match="state seen.value is made by the call.*first chunk alone"):
        jdp.DataParallel(module, devices[:2])(ramp(5))
    with pytest.warns(UserWarning, match="Nnx.calls was changed from 0 to 1 in a call"):
        jdp.DataParallel(module, devices[:2], reduce_state="mean")(ramp(5))
    assert module.calls == 0 and float(module.seen[...]) == pytest.approx((3 * 3 + 2 * 2) / 5)


def test_replicas_pickle(devices):
    copies = pickle.loads(pickle.dumps(jdp.replicate({"w": ramp(3)}, devices)))
    np.testing.assert_array_equal(copies["w"], ramp(3))


def test_weight_norm(devices):
    module = nn.WeightNorm(nn.Dense(2))
    x = ramp(5, 3)
    variables = module.init(jax.random.key(0), x)
    dp = jdp.DataParallel(module, devices[:4])
    np.testing.assert_allclose(dp.apply(variables, x), module.apply(variables, x), rtol=1e-6)


def test_the_model_is_called_in_the_callers_thread_once_a_shape(devices):
    """So a warning in it is given once, and thread-local contexts are those of the caller."""
    threads = []

    def model(w, x):
        threads.append(threading.current_thread())
        warnings.warn("from the model", UserWarning, stacklevel=1)
        return x * w

    dp = jdp.DataParallel(model, devices[:4])
    with pytest.warns(UserWarning, match="from the model") as warned:
        dp(1.0, ramp(8))
        dp(2.0, ramp(8))
    assert threads == [threading.current_thread()] and len(warned) == 1


def test_of_several_failures_the_first_replicas_is_raised(devices):
    def fails(w, x):
        raise KeyError(x.shape[0])

    with pytest.raises(KeyError, match="3") as caught:
        jdp.DataParallel(fails, devices[:4])(1.0, ramp(10))
    assert caught.value.__notes__[0] == f"Caught KeyError in replica 0 on device {devices[0]}."


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_the_model_is_an_exit(kind, devices):
    def leaves(w, x):
        raise kind("now")

    with pytest.raises(kind, match="now"):
        jdp.DataParallel(leaves, devices[:4])(1.0, ramp(8))


def test_sizes_that_depend_on_the_data_are_refused_by_jax(devices):
    with pytest.raises(IndexError, match="Array boolean indices must be concrete") as caught:
        jdp.DataParallel(lambda w, x: x[x > w], devices[:2])(1.0, ramp(4))
    assert "jdp.Mean((x * mask).sum(), mask.sum())" in caught.value.__notes__[0]
    assert caught.value.__notes__[1].startswith("Caught NonConcreteBooleanIndexError in replica 0")


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")  # JAX's own word on generators
def test_numpy_outputs_are_arrays_and_generators_are_not(devices):
    out = jdp.DataParallel(lambda w, x: np.full((x.shape[0], 2), 3.0, np.float32), devices[:4])(1.0, ramp(10))
    np.testing.assert_array_equal(out, np.full((10, 2), 3.0))
    with pytest.raises(TypeError, match="generator"):
        jdp.DataParallel(lambda w, x: (y for y in [x]), devices[:4])(1.0, ramp(10))
    with pytest.raises(TypeError, match=r"output\[1\] is a str; .*Leave it out"):
        jdp.DataParallel(lambda w, x: (x, "a"), devices[:4])(1.0, ramp(10))
    with pytest.raises(ValueError, match=r"What dp\(\.\.\.\) returns is gathered already"):
        jdp.gather(out)
    for outputs in ([], (x for x in [ramp(1)])):
        with pytest.raises(ValueError, match="at least one tree to gather"):
            jdp.gather(outputs)


def test_gradients_of_all_parameters_travel_together(devices):
    """One all-reduce in the compiled step, whatever the number of parameters; torch's buckets are XLA's to make."""
    weights = jdp.replicate({"a": ramp(3, 4), "b": ramp(4), "c": ramp(4)}, devices[:4])
    dp = jdp.DataParallel(lambda w, x: (x @ w["a"] + w["b"]) * w["c"], devices[:4])
    step = jax.jit(jax.grad(lambda w: (dp(w, ramp(8, 3)) ** 2).sum()))
    text = step.lower(weights).compile().as_text()
    assert len(re.findall(r"\ball-reduce(?:-start)?\(", text)) == 1


def test_gradients_have_the_shape_and_dtype_of_their_parameter(devices):
    weights = {"half": jnp.ones(3, jnp.bfloat16), "full": jnp.ones((1, 3))}
    dp = jdp.DataParallel(lambda w, x: x * w["half"] * w["full"], devices[:4])
    grads = jax.grad(lambda w: dp(w, ramp(5, 3)).sum())(weights)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(lambda x: (x.shape, x.dtype), weights)


def identity_with_hook(seen):
    """The identity, whose gradient is noted on its way back: JAX's form of a tensor hook."""

    @jax.custom_vjp
    def hooked(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda g: seen.append(np.asarray(g)), g)
        return (g,)

    hooked.defvjp(lambda x: (x, None), backward)
    return hooked


def test_a_hook_on_a_parameter_sees_the_sum_once(devices):
    seen = []
    hooked = identity_with_hook(seen)
    dp = jdp.DataParallel(times, devices[:4])
    grad = jax.grad(lambda w: dp(hooked(w), ramp(10)).sum())(jnp.float32(2))
    jax.effects_barrier()
    assert float(grad) == 45 and [float(g) for g in seen] == [45]


def test_parameters_cannot_be_changed_in_the_model(devices):
    class Changes(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.put_variable("params", "w", jnp.zeros(1))
            return x

    variables = {"params": {"w": jnp.ones(1)}}
    with pytest.raises(Exception, match='collection "params" is immutable'):
        jdp.DataParallel(Changes(), devices[:2]).apply(variables, ramp(5))
    np.testing.assert_array_equal(variables["params"]["w"], [1])


def test_hooks_in_the_model(devices):
    """A Linen interceptor runs once for each chunk size, when it is traced, and ends with its block; a callback runs on
    every replica that has rows."""
    calls, chunks = [], []

    def intercept(method, args, kwargs, context):
        calls.append(args[0].shape)
        return method(*args, **kwargs)

    dp = jdp.DataParallel(nn.Dense(4), devices[:4])
    variables = dp.init(jax.random.key(0), ramp(5, 3))
    with nn.intercept_methods(intercept):
        dp.apply(variables, ramp(5, 3))
    dp.apply(variables, ramp(7, 3))
    assert calls == [(2, 3), (1, 3)]

    def model(w, x):
        jax.debug.callback(lambda x: chunks.append(x.shape[0]), x)
        return x * w

    jax.block_until_ready(jdp.DataParallel(model, devices[:4])(2.0, ramp(5)))
    jax.effects_barrier()
    assert sorted(chunks) == [1, 2, 2]


def test_a_hook_on_the_wrapper_sees_the_whole_batch_once(devices):
    seen = []

    class Hooked(jdp.DataParallel):
        def __call__(self, params, x):
            out = super().__call__(params, x)
            seen.append((x.shape, out.shape))
            return out

    Hooked(times, devices[:4])(2.0, ramp(10))
    assert seen == [((10,), (10,))]


def test_a_backward_hook_in_the_model_sees_each_chunks_gradient(devices):
    seen = []
    hooked = identity_with_hook(seen)
    dp = jdp.DataParallel(lambda w, x: hooked(x * w), devices[:4])
    jax.block_until_ready(jax.grad(lambda w: dp(w, ramp(10)).sum())(jnp.float32(2)))
    jax.effects_barrier()
    assert sorted(g.shape[0] for g in seen) == [1, 3, 3, 3]


def test_attributes_are_the_wrappers_own(devices):
    class Model(nn.Module):
        width: int = 3

        def __call__(self, x):
            return x

    for module in (Model(), nnx.Linear(2, 3, rngs=nnx.Rngs(0))):
        dp = jdp.DataParallel(module, devices[:2])
        name = "width" if isinstance(module, Model) else "out_features"
        match = f"'DataParallel' object has no attribute '{name}'; .*dp.module.{name}"
        with pytest.raises(AttributeError, match=match):
            getattr(dp, name)
        assert getattr(dp.module, name) == 3


def test_a_method_of_the_model_is_called_on_all_devices(devices):
    """The error for one that the wrapper has not got says how, and what it says is right."""

    class Linen(nn.Module):
        def setup(self):
            self.dense = nn.Dense(3)

        def encode(self, x):
            return self.dense(x)

        __call__ = encode

    class NNX(nnx.Linear):
        def encode(self, x):
            return self(x)

    x, model = ramp(10).reshape(10, 1), NNX(1, 3, rngs=nnx.Rngs(0))
    dp = jdp.DataParallel(model, devices[:4])
    with pytest.raises(AttributeError, match=re.escape("jdp.DataParallel(lambda model, x: model.encode(x), devices)")):
        dp.encode(x)
    on_all = jdp.DataParallel(lambda model, x: model.encode(x), devices[:4])(dp.module, x)
    np.testing.assert_allclose(on_all, model.encode(x), rtol=1e-6)
    dp = jdp.DataParallel(Linen(), devices[:4])
    variables = dp.init(jax.random.key(0), x)
    with pytest.raises(AttributeError, match=re.escape("dp.apply(variables, x, method='encode')")):
        dp.encode(x)
    np.testing.assert_allclose(dp.apply(variables, x, method="encode"), Linen().apply(variables, x), rtol=1e-6)


def test_casting_the_parameters_casts_the_model(devices):
    """torch's half() is a tree.map."""
    dp = jdp.DataParallel(lambda w, x: x @ w["w"], devices[:2])
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), {"w": ramp(3, 2)})
    out = dp(half, ramp(5, 3).astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), np.asarray(ramp(5, 3) @ ramp(3, 2)).astype(jnp.bfloat16))


def test_repr_shows_the_module(devices):
    for module in (nn.Dense(7), nnx.Linear(2, 7, rngs=nnx.Rngs(0))):
        text = repr(jdp.DataParallel(module, devices[:2]))
        assert text.startswith("DataParallel(\n") and type(module).__name__ in text and "features" in text


def test_the_wrapper_can_be_exported(devices):
    """torch's ONNX exporter refuses it. (Writing it to bytes needs the package flatbuffers.)"""
    dp = jdp.DataParallel(times, devices[:4])
    exported = jax.export.export(jax.jit(dp))(
        jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((10,), jnp.float32)
    )
    assert exported.nr_devices == 4 and exported.out_avals[0].shape == (10,)


def test_data_parallel_takes_a_namedtuple_and_a_list_as_one(devices):
    pair = collections.namedtuple("Pair", "a b")(ramp(5), ramp(5))
    out = jdp.data_parallel(lambda w, both: both.a + w * both.b, 2.0, pair, devices[:2])
    np.testing.assert_array_equal(out, 3 * ramp(5))
    out = jdp.data_parallel(lambda w, both: both[0] + w * both[1], 2.0, list(pair), devices[:2])
    np.testing.assert_array_equal(out, 3 * ramp(5))
