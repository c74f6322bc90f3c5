"""jdp beside torch's own DataParallel, in one process, where torch is installed.

torch's code runs with its GPUs played by the CPU (golden/torch_side.py). First the agreements, on other cases than
the committed vectors; then the places where jdp does better, each with what torch does there.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import linen as fnn
from golden import flax_side, make_golden, torch_side
from golden.structures import Point, encode
from hypothesis import given
from hypothesis import strategies as st
from laws import close, examples
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
from torch.nn.parallel.scatter_gather import scatter_kwargs

import jdp

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def torch_on_cpu():
    with torch_side.gpus_played_by_the_cpu():
        yield


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# -- agreement


@pytest.mark.full
def test_committed_vectors_are_what_torch_says():
    for name, content in make_golden.golden().items():
        if name.endswith(".json"):
            assert (GOLDEN / name).read_text() == torch_side.dumps(content), name
            continue
        with np.load(GOLDEN / name) as file:
            assert sorted(file) == sorted(content)
            for key in file:
                # torch computes them in float64: only its last digits may depend on the machine
                np.testing.assert_allclose(file[key], content[key], rtol=1e-6, atol=1e-7, err_msg=f"{name} {key}")


def test_chunk_sizes_of_larger_batches():
    for rows in range(41, 260, 3):
        for n in (2, 3, 7, 8, 16, 64, 100):
            assert jdp.chunk_sizes(rows, n) == tuple(len(c) for c in torch.zeros(rows).chunk(n)), (rows, n)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model", "rows", "n"),
    [("MLP", 9, 4), ("MLP", 5, 2), ("Conv", 5, 4), ("LSTM", 3, 2), ("Tokens", 3, 1), ("Tied", 17, 8)],
)
def test_a_step_equals_torchs(model, rows, n, devices):
    record = torch_side.run_case(model, rows, n, seed=rows * n)
    dp = jdp.DataParallel(flax_side.MODELS[model](), devices[:n])
    close(flax_side.run_case(model, dp.apply, n, record), flax_side.expected(model, n, record))


@pytest.mark.one_case
@pytest.mark.parametrize(("rows", "n"), [(10, 4), (5, 3)])
def test_data_parallel_is_a_loop_over_chunks(rows, n, devices):
    """The meaning of both, without either's machinery: the bare torch module, chunk by chunk."""
    torch.manual_seed(rows)
    module = torch_side.Conv()
    state = {name: x.clone() for name, x in module.state_dict().items()}
    x, _ = torch_side.batch("Conv", rows, np.random.default_rng(rows))
    outputs, stats = [], None
    for i, chunk in enumerate(torch.from_numpy(x).chunk(n)):
        module.load_state_dict(state)
        outputs.append(module(chunk))
        if i == 0:
            stats = torch_side.numpy_state(module)
    before = {name: value.numpy() for name, value in state.items()}
    dp = jdp.DataParallel(flax_side.Conv(), devices[:n])
    out, updates = dp.apply(flax_side.variables("Conv", before), flax_side.layout("Conv", x), mutable=["batch_stats"])
    close(out, torch.cat(outputs).detach().numpy())
    values = 36 * len(torch.zeros(rows).chunk(n)[0])
    close(updates["batch_stats"], flax_side.batch_stats("Conv", before, stats, values))


arrays = st.builds(lambda width: ("array", width), st.integers(1, 3))
trees = st.recursive(
    arrays | st.sampled_from([None, "text", 7, 1.5, True]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(lambda xs: ("tuple", xs))
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda xs: ("point", xs))
    ),
    max_leaves=6,
)


def build(spec, rows, make):
    """The structure of a spec, its arrays with `rows` rows."""
    if isinstance(spec, list):
        return [build(child, rows, make) for child in spec]
    if isinstance(spec, dict):
        return {key: build(child, rows, make) for key, child in spec.items()}
    if not isinstance(spec, tuple):
        return spec
    kind, rest = spec
    if kind == "array":
        return make(ramp(rows, rest))
    children = [build(child, rows, make) for child in rest]
    return Point(*children) if kind == "point" else tuple(children)


@examples(60)
@given(spec=trees, rows=st.integers(1, 12), n=st.sampled_from([1, 2, 3, 8]))
def test_scatter_equals_torchs_on_any_structure(spec, rows, n):
    # an array beside it, so that there is something to cut: with nothing jdp makes one chunk, torch n
    spec = [("array", 1), spec]
    pieces = scatter(build(spec, rows, torch.from_numpy), list(range(n)))
    s = jdp.scatter(build(spec, rows, np.asarray), jax.devices()[:n])
    assert [encode(piece) for piece in s] == [encode(piece) for piece in pieces]
    assert s.sizes == tuple(len(piece[0]) for piece in pieces)


def test_kwargs_are_scattered_beside_the_inputs(devices):
    x, mask = ramp(5, 2), ramp(5)
    args, kwargs = scatter_kwargs((torch.from_numpy(x),), {"mask": torch.from_numpy(mask)}, [0, 1])
    dp = jdp.DataParallel(lambda w, x, *, mask: x * mask[:, None], devices[:2])
    got, got_kwargs = dp.scatter((x,), {"mask": mask}, dp.devices)
    assert [encode(a) for a in got] == [encode(a) for a in args]
    assert [encode(k) for k in got_kwargs] == [encode(k) for k in kwargs]


def test_scatter_and_gather_are_twice_differentiable_as_torchs(devices):
    x = torch.from_numpy(ramp(5, 2)).requires_grad_()
    out = (gather(scatter(x, [0, 1]), "cpu") ** 3).sum()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)

    def model(x):
        return (jdp.gather(jdp.scatter(x, devices[:2])) ** 3).sum()

    close(jax.grad(model)(ramp(5, 2)), first.detach().numpy())
    close(jax.grad(lambda x: jax.grad(model)(x).sum())(ramp(5, 2)), second.numpy())


def test_replicate_copies_and_sums_the_gradient_as_torchs(devices):
    linear = nn.Linear(2, 1)
    replicas = replicate(linear, [0, 1, 2])
    assert [replica.weight.tolist() for replica in replicas] == [linear.weight.tolist()] * 3
    sum(replica.weight.sum() for replica in replicas).backward()
    weight = linear.weight.detach().numpy()
    copies = jdp.replicate(weight, devices[:3])
    for shard in copies.addressable_shards:
        np.testing.assert_array_equal(shard.data, weight)

    def total(weight):
        s = jdp.scatter((np.zeros(3, np.float32),), devices[:3])
        return jdp.gather(jdp.parallel_apply(lambda w, x: w.sum(), jdp.replicate(weight, devices[:3]), s)).sum()

    np.testing.assert_array_equal(jax.grad(total)(weight), linear.weight.grad.numpy())


def test_parallel_apply_takes_what_torchs_takes(devices):
    """A tuple or list is the positional arguments, anything else is one argument."""
    linear = nn.Linear(3, 2)
    weights = {"w": linear.weight.detach().numpy().T, "b": linear.bias.detach().numpy()}
    x = ramp(4, 3)
    for wrap in (lambda x: (x,), lambda x: [x], lambda x: x):
        wanted = parallel_apply([linear, linear], [wrap(c) for c in torch.from_numpy(x).chunk(2)], devices=[0, 1])
        got = jdp.parallel_apply(lambda p, x: x @ p["w"] + p["b"], weights, jdp.scatter(wrap(x), devices[:2]))
        for a, b in zip(got, wanted, strict=True):
            close(a, b.detach().numpy())


def test_sparse_embedding_gradient_is_the_same_made_dense(devices):
    module = nn.Embedding(11, 4, sparse=True)
    table = module.weight.detach().numpy().copy()
    tokens = np.random.default_rng(0).integers(0, 11, (10, 3), dtype=np.int32)
    torch_side.data_parallel(module, 4)(torch.from_numpy(tokens)).pow(2).sum().backward()
    dp = jdp.DataParallel(lambda table, tokens: table[tokens], devices[:4])
    grad = jax.grad(lambda table: (dp(table, tokens) ** 2).sum())(table)
    close(grad, module.weight.grad.to_dense().numpy())


def test_scalar_outputs_become_a_vector(devices):
    x = ramp(5, 2)

    class Loss(nn.Module):
        def forward(self, x):
            return x.mean()

    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        wanted = torch_side.data_parallel(Loss(), 4)(torch.from_numpy(x))
    got = jdp.DataParallel(lambda w, x: x.mean(), devices[:4])({}, x)  # in silence: warnings are errors here
    assert got.shape == (3,)
    close(got, wanted.numpy())


def test_dropped_state_and_kept_state(devices):
    """A counter that every replica adds to goes up by one in both: the primary replica's update is the one."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(len(x))
            return x

    class Twin(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            seen = self.variable("buffers", "seen", lambda: jnp.zeros(()))
            seen.value = seen.value + x.shape[0]
            return x

    module = Counts()
    torch_side.data_parallel(module, 4)(torch.zeros(10, 1))
    dp = jdp.DataParallel(Twin(), devices[:4])
    _, updates = dp.apply({"buffers": {"seen": jnp.zeros(())}}, ramp(10, 1), mutable=["buffers"])
    assert float(updates["buffers"]["seen"]) == float(module.seen) == 3


# -- where jdp does better


def test_arrays_that_disagree_are_an_error_not_dropped_rows(devices):
    pieces = scatter((torch.zeros(10), torch.zeros(2)), [0, 1, 2, 3])
    assert sum(len(x) for x, _ in pieces) == 6  # torch forgets four rows
    with pytest.raises(ValueError, match=r"inputs\[0\] has 10 rows.*inputs\[1\] has 2"):
        jdp.scatter((ramp(10), ramp(2)), devices[:4])


def test_0d_arrays_go_whole_to_every_replica(devices):
    with pytest.raises(RuntimeError, match="chunk expects at least a 1-dimensional tensor"):
        scatter((torch.zeros(4), torch.tensor(2.0)), [0, 1])
    s = jdp.scatter((ramp(4), jnp.float32(2)), devices[:2])
    assert [float(piece[1]) for piece in s] == [2, 2]


def test_with_nothing_to_cut_the_module_runs_once(devices):
    class Ones(nn.Module):
        def forward(self, size):
            return torch.ones(size)

    assert torch_side.data_parallel(Ones(), 4)(3).shape == (12,)  # four copies
    assert jdp.DataParallel(lambda w, size: jnp.ones(size), devices[:4])({}, 3).shape == (3,)


def test_objects_among_the_arguments_do_not_add_replicas(devices):
    class Flagged(nn.Module):
        def forward(self, x, flag=False):
            return x if flag else -x

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        torch_side.data_parallel(Flagged(), 4)(torch.zeros(5, 1), flag=True)
    out = jdp.DataParallel(lambda w, x, flag=False: x if flag else -x, devices[:4])({}, ramp(5, 1), flag=True)
    np.testing.assert_array_equal(out, ramp(5, 1))


def test_a_short_keyword_is_an_error_not_a_missing_argument(devices):
    class Optional(nn.Module):
        def forward(self, x, y, bias=None):
            return x + y if bias is None else x + y + bias

    x, bias = torch.zeros(8, 1), torch.ones(1, 1)
    out = torch_side.data_parallel(Optional(), 4)(x, x, bias=bias)
    assert out.sum() == 2  # torch's replicas 1 to 3 run without the bias
    with pytest.raises(ValueError, match=r"args\[0\] has 8 rows.*kwargs\['bias'\] has 1"):
        jdp.DataParallel(lambda w, x, y, bias=None: x + y, devices[:4])({}, ramp(8, 1), ramp(8, 1), bias=ramp(1, 1))


def test_containers_that_torch_breaks(devices):
    tree = collections.defaultdict(list, {"a": torch.zeros(4)})
    with pytest.raises(TypeError, match="first argument must be callable or None"):
        scatter(tree, [0, 1])
    piece = jdp.scatter(collections.defaultdict(list, {"a": ramp(4)}), devices[:2])[1]
    assert type(piece) is collections.defaultdict and piece.default_factory is list

    class Pair(tuple):
        pass

    assert type(scatter(Pair([torch.zeros(4)]), [0, 1])[0]) is tuple  # the type is lost
    with pytest.raises(TypeError, match="Pair, a subclass of tuple that JAX does not know"):
        jdp.scatter(Pair([ramp(4)]), devices[:2])
    counter = scatter(collections.Counter(a=1), [0])[0]
    assert counter == {("a", 1): 1}  # a count has become part of the key
    with pytest.raises(TypeError, match="Counter, a subclass of dict that JAX does not know"):
        jdp.scatter(collections.Counter(a=1), devices[:2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: object


def test_registered_dataclasses_are_cut_and_gathered(devices):
    assert scatter(Batch(torch.zeros(4)), [0, 1])[0].x.shape == (4,)  # whole, on both
    with pytest.raises(TypeError, match="'Batch' object is not iterable"):
        gather([Batch(torch.zeros(2))] * 2, "cpu")
    out = jdp.DataParallel(lambda w, b: Batch(b.x + 1), devices[:2])({}, Batch(ramp(5)))
    assert type(out) is Batch
    np.testing.assert_array_equal(out.x, ramp(5) + 1)


@pytest.mark.parametrize("leaf", ["text", 3, 1.5, True])
def test_an_output_that_is_no_array_is_refused_with_its_path(leaf, devices):
    if leaf == "text":
        assert gather([{"a": leaf}] * 2, "cpu")["a"].startswith("<map object")  # torch's gather of a string
    else:
        with pytest.raises(TypeError, match="object is not iterable"):
            gather([{"a": leaf}] * 2, "cpu")
    with pytest.raises(TypeError, match=rf"output\['a'\] is a {type(leaf).__name__}"):
        jdp.DataParallel(lambda w, x: {"a": leaf, "x": x}, devices[:2])({}, ramp(4))


def test_outputs_that_differ_between_replicas(devices):
    assert gather([None, torch.zeros(2)], "cpu") is None  # torch looks at the first alone
    with pytest.raises(ValueError, match="all trees must agree"):
        jdp.gather([None, ramp(2)])
    with pytest.raises(KeyError):
        gather([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], "cpu")
    with pytest.raises(ValueError, match="all trees must agree"):
        jdp.gather([{"a": ramp(1)}, {"b": ramp(1)}])


def test_batch_norm_on_one_row(devices):
    """Ten rows over four devices leave one row for the last: torch refuses, Flax normalises it to the bias."""
    x = ramp(10, 3)
    with pytest.raises(ValueError, match="(?s)in replica 3 on device 3.*more than 1 value per channel"):
        torch_side.data_parallel(nn.BatchNorm1d(3), 4)(torch.from_numpy(x))
    dp = jdp.DataParallel(fnn.BatchNorm(use_running_average=False), devices[:4])
    variables = dp.init(jax.random.key(0), x)
    out, _ = dp.apply(variables, x, mutable=["batch_stats"])
    wanted = nn.functional.batch_norm(torch.from_numpy(x[:3]), None, None, training=True)
    np.testing.assert_allclose(out[:3], wanted.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[9], np.zeros(3))


def test_unused_parameters_have_zero_gradients_on_any_number_of_devices(devices):
    module = torch_side.Tied()
    module(torch.zeros(4, 5)).sum().backward()
    assert module.idle.weight.grad is None  # bare, and on one device
    torch_side.data_parallel(module, 2)(torch.zeros(4, 5)).sum().backward()
    assert not module.idle.weight.grad.any()  # zeros, so that weight decay acts on it
    variables = flax_side.variables("Tied", torch_side.numpy_state(module))
    for n in (1, 2):
        dp = jdp.DataParallel(flax_side.Tied(), devices[:n])
        grads = jax.grad(lambda v, dp=dp: dp.apply(v, ramp(4, 5)).sum())(variables)
        np.testing.assert_array_equal(grads["params"]["idle"]["kernel"], np.zeros((5, 5)))


def test_a_mean_inside_the_module_is_a_mean_of_means(devices):
    """The same numbers as torch's, biased where chunks are uneven; a row per example, gathered, has the true mean."""
    x = ramp(10) ** 2

    class Loss(nn.Module):
        def forward(self, x):
            return x.mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        biased = torch_side.data_parallel(Loss(), 4)(torch.from_numpy(x)).mean()
    got = jdp.DataParallel(lambda w, x: x.mean(), devices[:4])({}, x).mean()
    close(got, biased.numpy())
    assert abs(float(got) - x.mean()) > 1
    assert float(jdp.DataParallel(lambda w, x: x, devices[:4])({}, x).mean()) == x.mean()


def test_one_device_is_not_a_special_case(devices):
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("gone")

    with pytest.raises(KeyError) as bare:
        torch_side.data_parallel(Fails(), 1)(torch.zeros(2))
    assert "replica" not in str(bare.value)  # torch tells where only if there are several

    def fails(w, x):
        raise KeyError("gone")

    for n in (1, 2):
        with pytest.raises(KeyError, match="gone") as caught:
            jdp.DataParallel(fails, devices[:n])({}, ramp(2))
        assert caught.value.__notes__[0] == f"Caught KeyError in replica 0 on device {devices[0]}."


def test_an_empty_batch_runs_no_replica(devices):
    calls = []

    class Counts(nn.Module):
        def forward(self, x):
            calls.append(len(x))
            return x

    assert torch_side.data_parallel(Counts(), 4)(torch.zeros(0, 3)).shape == (0, 3)
    assert calls == [0, 0, 0, 0]
    dp = jdp.DataParallel(flax_side.MLP(), devices[:4])
    variables = dp.init(jax.random.key(0), ramp(2, 5))
    out, updates = dp.apply(variables, ramp(0, 5), mutable=["batch_stats"])
    assert out.shape == (0, 3)
    close(updates["batch_stats"], variables["batch_stats"])  # torch's would be nan


def test_arguments_are_checked_without_an_accelerator_too(monkeypatch):
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(module, "_get_available_device_type", lambda: None)
    assert nn.DataParallel(nn.Linear(1, 1), ["nonsense"]).device_ids == []  # ignored, and so is its `dim`
    with pytest.raises(ValueError, match="'nonsense' is unknown"):
        jdp.DataParallel(lambda w, x: x, ["nonsense"])
