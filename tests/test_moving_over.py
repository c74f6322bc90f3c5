"""What users of torch and of other JAX libraries do first: it works, or the error names jdp's way."""

import collections
import dataclasses
import functools
import re
import sys
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

X = np.random.RandomState(0).randn(8, 3).astype(np.float32)
W = np.random.RandomState(1).randn(3, 2).astype(np.float32)


def matmul(w, x):
    return x @ w


def wrap(module=matmul, n=4, **options):
    return jdp.DataParallel(module, devices=range(n), **options)


def linear():
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


# --- torch ---


def test_torch_modules(refused):
    torch = pytest.importorskip("torch")

    class Own(torch.nn.Module):
        pass

    for module, name in ((torch.nn.Linear(3, 2), "Linear"), (Own(), "Own")):
        match = f"module is a torch.nn.Module, a {name}; .*Flax"
        with refused(TypeError, "DataParallel", match=match):
            wrap(module)
        with refused(TypeError, "data_parallel", match=match):
            jdp.data_parallel(module, W, X)


def test_torch_is_not_imported_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.nn", raising=False)
    np.testing.assert_allclose(wrap()(W, X), X @ W, rtol=1e-5)
    assert "torch.nn" not in sys.modules


def test_torch_tensors_as_parameters_or_inputs(refused):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    dp = wrap(lambda p, x: x @ p["weight"].T + p["bias"])
    how = r"Pass x.detach\(\).cpu\(\).numpy\(\)"
    with refused(TypeError, "DataParallel", match=rf"\['bias'\] is a torch.Tensor, .*{how}"):
        dp(dict(model.state_dict()), X)
    with refused(TypeError, "DataParallel", match=rf"\['weight'\] is a torch.nn.parameter.Parameter, .*{how}"):
        dp({"weight": model.weight}, X)
    with refused(TypeError, "DataParallel", match=rf"args\[0\] is a torch.Tensor, .*{how}"):
        dp({}, torch.ones(8, 3))
    with refused(TypeError, "replicate", match=how):
        jdp.replicate(torch.ones(3))
    params = {name: x.detach().cpu().numpy() for name, x in model.named_parameters()}  # as the message says
    np.testing.assert_allclose(dp(params, X), model(torch.from_numpy(X)).detach().numpy(), rtol=1e-5)


def test_device_ids(devices):
    assert jdp.DataParallel(matmul, device_ids=[2, 0]).devices == (devices[2], devices[0])
    assert jdp.DataParallel(linear(), device_ids=range(3)).devices == tuple(devices[:3])
    out = jdp.data_parallel(matmul, W, X, device_ids=[1, 3])
    assert out.devices() == {devices[1]}
    np.testing.assert_allclose(out, X @ W, rtol=1e-5)


def test_devices_and_device_ids(refused):
    match = r"devices is \[0, 1\] and device_ids is \[0, 1\]; .*Pass devices alone"
    with refused(TypeError, "DataParallel", match=match):
        jdp.DataParallel(matmul, [0, 1], device_ids=[0, 1])
    with refused(TypeError, "data_parallel", match=match):
        jdp.data_parallel(matmul, W, X, [0, 1], device_ids=[0, 1])
    with refused(ValueError, "DataParallel", match="devices is empty"):
        jdp.DataParallel(matmul, device_ids=[])


ADVICE = {
    "cuda": ("jdp.replicate", "at construction"),
    "to": ("jdp.replicate", "at construction"),
    "cpu": ("jdp.replicate", "at construction"),
    "state_dict": ("to_state_dict", r"nnx.state\(dp.module\)"),
    "load_state_dict": ("from_state_dict", r"nnx.update\(dp.module, state\)"),
    "parameters": ("jax.tree.leaves", r"nnx.state\(dp.module, nnx.Param\)"),
    "named_parameters": ("tree_leaves_with_path", "nnx.to_flat_state"),
    "device_ids": ("dp.devices", "dp.devices"),
    "modules": ("dp.module.bind", r"nnx.iter_modules\(dp.module\)"),
    "requires_grad_": ("optax.multi_transform", "optax.multi_transform"),
    "register_forward_hook": ("'intermediates'", "nnx.Intermediate"),
    "zero_grad": ("dp.value_and_grad", "dp.value_and_grad"),
    "no_sync": ("accumulate_steps", "accumulate_steps"),
    "join": ("dp.prefetch", "dp.prefetch"),
    "half": ("jax.tree.map", "nnx.update"),
    "float": ("jax.tree.map", "nnx.update"),
    "type": ("jax.tree.map", "nnx.update"),
    "forward": (r"Call dp\(params, \*args\)", r"Call dp\(\*args\)"),
    "buffers": (r"variables\['batch_stats'\]", r"nnx.state\(dp.module, nnx.BatchStat\)"),
    "named_buffers": (r"variables\['batch_stats'\]", r"nnx.state\(dp.module, nnx.BatchStat\)"),
    "training": ("train=False", r"dp.train\(\) or dp.eval\(\)"),
    "src_device_obj": ("dp.devices", "dp.devices"),
    "share_memory": ("jdp launch", "jdp launch"),
    "get_submodule": ("dp.module.bind", r"nnx.iter_modules\(dp.module\)"),
    "get_parameter": ("by its path", "dp.module.linear.kernel"),
    "add_module": ("in setup", "__init__"),
    "register_buffer": ("self.variable", "nnx.Variable"),
    "compile": ("compiled already", "compiled already"),
    "register_comm_hook": ("reduce_dtype=jnp.bfloat16", "reduce_dtype=jnp.bfloat16"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_names_of_torch(refused, name):
    for module, advice in zip((nn.Dense(2), matmul, linear()), (*ADVICE[name][:1] * 2, ADVICE[name][1]), strict=True):
        dp = wrap(module)
        with refused(AttributeError, "DataParallel", match=rf"\.{name} is torch's; .*{advice}"):
            getattr(dp, name)
        assert not hasattr(dp, name) and not hasattr(nnx.Module, name)


@pytest.mark.parametrize(
    "name, text", [("num_devices", r"is Lightning's; .*len\(dp.devices\)"), ("apply_fn", r"is Flax's; .*Call dp")]
)
def test_names_of_others(refused, name, text):
    for module in (nn.Dense(2), matmul, linear()):
        with refused(AttributeError, "DataParallel", match=text):
            getattr(wrap(module), name)


def test_a_name_of_torchs_that_the_module_has_is_the_modules():
    class Net(nn.Module):
        training: bool = True

        def forward(self, x):
            return x

    class OfNNX(nnx.Module):
        def __init__(self):
            self.training = True

        def forward(self, x):
            return x

    for module, way in ((Net(), r"dp\.apply\(variables, x, method='forward'\)"), (OfNNX(), r"lambda model, x: model")):
        with pytest.raises(AttributeError, match=f"its module has one. Call .*{way}"):
            wrap(module).forward  # noqa: B018
        with pytest.raises(AttributeError, match=r"its module has one. Read dp\.module\.training$"):
            wrap(module).training  # noqa: B018


@pytest.mark.parametrize("name", ["bind", "tabulate", "init_with_output", "lazy_init"])
def test_methods_of_every_linen_module_are_those_of_the_module(name):
    with pytest.raises(
        AttributeError, match=rf"its module has one, which is Flax's own. Call dp\.module\.{name}\(\.\.\.\)$"
    ):
        getattr(wrap(nn.Dense(2)), name)


def test_properties_of_a_bound_module():
    with pytest.raises(AttributeError, match=r"Read dp\.module\.bind\(variables\)\.variables$"):
        wrap(nn.Dense(2)).variables  # noqa: B018


def test_submodules_of_a_linen_module_are_there_once_it_is_bound():
    class Net(nn.Module):
        def setup(self):
            self.layer = nn.Dense(2)

        def __call__(self, x):
            return self.layer(x)

    dp = wrap(Net())
    with pytest.raises(AttributeError, match=r"Read dp\.module\.bind\(variables\)\.layer$"):
        dp.layer  # noqa: B018
    layer = dp.module.bind(dp.init(jax.random.key(0), X)).layer
    assert layer.features == 2
    with pytest.raises(AttributeError, match="^'DataParallel' object has no attribute 'head'$"):
        dp.head  # noqa: B018


@pytest.mark.parametrize("module", [matmul, nn.Dense(2)], ids=["function", "linen"])
def test_a_call_without_parameters(refused, module):
    with refused(TypeError, "DataParallel", match=r"without the parameters, .*Call dp\(params, \*args\)"):
        wrap(module)()


class InSetup(nn.Module):
    def setup(self):
        self.features = wrap(nn.Dense(6))

    def __call__(self, x):
        return self.features(x)


class InField(nn.Module):
    features: Any

    @nn.compact
    def __call__(self, x):
        return self.features(x)


PARTS = {
    "InSetup": InSetup,
    "InField": lambda: InField(wrap(nn.Dense(6))),
    "Sequential": lambda: nn.Sequential([nn.Dense(3), wrap(nn.Dense(6))]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_wrapper_as_a_part_of_a_linen_model(refused, name):
    text = rf"is a part of the Linen model {name}; .*Wrap the whole model: jdp\.DataParallel\({name}\("
    with refused(TypeError, "DataParallel", match=text):
        PARTS[name]().init(jax.random.key(0), X)
    with refused(TypeError, "DataParallel", match=text):
        wrap(PARTS[name]()).init(jax.random.key(0), X)
    with refused(
        TypeError, "DataParallel", match=r"variables is a ndarray; .*dp\.init\(key, x\)"
    ):  # not within a model
        wrap(nn.Dense(2))(X)


def test_other_names_are_pythons_own_error():
    for dp in (wrap(), wrap(linear())):
        with pytest.raises(AttributeError, match="^'DataParallel' object has no attribute 'forward_hooks'$"):
            dp.forward_hooks  # noqa: B018


def test_a_wrapper_may_have_an_attribute_of_such_a_name():
    class Own(jdp.DataParallel):
        def parameters(self):
            return nnx.state(self.module, nnx.Param)

    dp = Own(linear(), devices=range(2))
    dp.half = 3
    assert len(jax.tree.leaves(dp.parameters())) == 2 and dp.half == 3


# --- a key that was forgotten ---


@pytest.mark.parametrize("rngs, what", [(X, r"float32\[8, 3\]"), ({"image": X}, r"float32\[8, 3\]"), (0, "number, 0")])
def test_init_without_a_key(refused, rngs, what):
    dp = wrap(nn.Dense(2))
    with refused(TypeError, "init", match=rf"rngs is a {what}; .*dp.init\(jax.random.key\(0\), x\)"):
        dp.init(rngs)


def test_init_with_keys_of_any_style():
    dp, want = wrap(nn.Dense(2)), nn.Dense(2).init(jax.random.key(0), X)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        for rngs in (key, {"params": key}):
            jax.tree.map(np.testing.assert_array_equal, dp.init(rngs, X), want)
            jax.tree.map(np.testing.assert_array_equal, jax.jit(dp.init)(rngs, X), want)


# --- parameters that are somewhere else ---


@pytest.mark.one_case
@pytest.mark.parametrize("known", [False, True])
def test_parameters_on_one_device_under_jit(devices, known):
    """JAX refuses them when jdp has returned; where it says what it was that did not fit, it says jdp.replicate."""
    dp = wrap()
    for _ in range(2 if known else 0):
        dp(jdp.replicate(W, range(4)), X)
    w = jax.device_put(W, devices[0])
    for program in (dp, jax.grad(lambda w, x: (dp(w, x) ** 2).sum()), dp.value_and_grad(lambda w, x: jnp.mean(x @ w))):
        with pytest.raises(ValueError, match="(?s)incompatible devices.*jdp_replicate"):
            jax.jit(program)(w, X)
        jax.jit(program)(jdp.replicate(w, range(4)), X)


def test_parameters_that_are_cut_already(refused, devices):
    mesh = Mesh(np.array(devices[:2]), ("fsdp",))
    cut = jax.device_put(np.ones((4, 2), np.float32), NamedSharding(mesh, P("fsdp")))
    match = r"\['w'\].*must have its parameters.*cut into pieces \(\(4, 2\) as \('fsdp',\)\)"
    match += r".*jdp.replicate\(jax.device_get\(params\), devices\)"
    for verb, call in (
        ("DataParallel", lambda: wrap(lambda p, x: x @ p["w"])({"w": cut}, np.ones((8, 4)))),
        ("replicate", lambda: jdp.replicate({"w": cut}, range(4))),
    ):
        with refused(RuntimeError, verb, match=match):
            call()
    # What it says, done.
    params = jdp.replicate(jax.device_get({"w": cut}), range(4))
    assert wrap(lambda p, x: x @ p["w"])(params, np.ones((8, 4))).shape == (8, 2)


def test_parameters_that_look_stacked_for_pmap(refused):
    """As long as there are devices, and cut along that axis: stacked copies, or the parts of one parameter."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    cut = jax.device_put(np.ones((4, 2), np.float32), NamedSharding(mesh, P("fsdp")))
    match = r"looks replicated for jax.pmap.* x\[0\].*parts of one parameter, jdp.replicate\(jax.device_get\(params\)"
    with refused(RuntimeError, "DataParallel", match=match):
        wrap(lambda p, x: x @ p["w"])({"w": cut}, np.ones((8, 4)))


def test_parameters_on_another_device(refused, devices):
    w = jax.device_put(W, devices[5])
    with refused(
        RuntimeError, "DataParallel", match=r"device_put\(params, CpuDevice\(id=0\)\).*jax.device_get\(params\)"
    ):
        wrap()(w, X)
    for params in (jax.device_put(w, devices[0]), jdp.replicate(jax.device_get(w), range(4))):
        np.testing.assert_allclose(wrap()(params, X), X @ W, rtol=1e-5)


# --- callable pytrees ---


@jax.tree_util.register_pytree_node_class
class Module:
    """As equinox's are: a callable whose leaves are its arrays."""

    def __init__(self, weight, activation=jnp.tanh):
        self.weight, self.activation = weight, activation

    def __call__(self, x):
        return self.activation(x @ self.weight)

    def tree_flatten(self):
        return [self.weight], self.activation

    @classmethod
    def tree_unflatten(cls, activation, leaves):
        return cls(*leaves, activation)


@pytest.mark.parametrize(
    "module", [Module(W), jax.tree_util.Partial(matmul, jnp.asarray(W))], ids=["module", "Partial"]
)
def test_callable_pytrees_with_arrays(refused, module):
    name = type(module).__name__
    with refused(TypeError, "DataParallel", match=rf"module is a {name}, .*holds 1 array.*eqx.partition.*Partial"):
        wrap(module)


def test_what_the_message_says_of_callable_pytrees():
    model = Module(W)
    dp = wrap(lambda model, x: model(x))
    np.testing.assert_allclose(dp(model, X), model(X), rtol=1e-5)
    leaves, treedef = jax.tree.flatten(model)
    dp = wrap(lambda leaves, x: jax.tree.unflatten(treedef, leaves)(x))
    np.testing.assert_allclose(dp(leaves, X), model(X), rtol=1e-5)
    # Callables without arrays are functions, whatever they are.
    for fn in (functools.partial(matmul), jax.tree_util.Partial(matmul), jax.jit(matmul)):
        np.testing.assert_allclose(wrap(fn)(W, X), X @ W, rtol=1e-5)


# --- named tuples ---


class Batch(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@pytest.mark.one_case
@pytest.mark.parametrize("size", [7, 8])
def test_a_named_tuple_is_one_argument(size):
    """Only a plain tuple is the arguments."""
    batch = Batch(X[:size], 2 * X[:size])

    def model(w, batch):
        assert type(batch) is Batch
        return (batch.x + batch.y) @ w

    want = 3 * X[:size] @ W
    for given in (batch, (batch,), jdp.scatter(batch, range(4)), jdp.scatter((batch,), range(4))):
        out = jdp.data_parallel(model, W, given, devices=range(4))
        np.testing.assert_allclose(out, want, rtol=1e-5)
    out = jdp.parallel_apply(model, W, jdp.scatter(batch, range(4)))
    np.testing.assert_allclose(jdp.gather(out), want, rtol=1e-5)
    np.testing.assert_allclose(wrap(model)(W, batch), want, rtol=1e-5)
    plain = jdp.data_parallel(lambda w, x, y: (x + y) @ w, W, tuple(batch), devices=range(4))
    np.testing.assert_allclose(plain, want, rtol=1e-5)


# --- what is passed or returned in another form: the error, or its note, has the form that works ---


@dataclasses.dataclass
class Output:
    logits: jax.Array


class OrderedOutput(collections.OrderedDict):
    """As a ModelOutput of Hugging Face: a mapping of a class that JAX does not look into."""


@pytest.mark.parametrize(
    "kind, way", [(Output, "a dict of its arrays (or register its class"), (OrderedOutput, "Return dict(x)")]
)
def test_outputs_of_classes_that_jax_does_not_know(kind, way):
    with pytest.raises(TypeError, match=f"output is a {kind.__name__}; outputs are arrays") as info:
        wrap(lambda w, x: kind(logits=x @ w))(W, X)
    assert way in str(info.value)


def test_parameters_without_their_collection():
    module = nn.Dense(2)
    variables = module.init(jax.random.key(0), X)
    for params in (variables["params"], {"Dense_0": variables["params"]}):
        with pytest.raises(Exception, match="dictionary|collection") as info:
            wrap(module).apply(params, X)
        assert "{'params': state.params, **state.state}" in "".join(info.value.__notes__)


def test_a_collective_over_an_axis_of_another_name():
    """As a program for pmap has it, `axis_name="batch"`."""
    mean = lambda w, x: jax.lax.pmean((x @ w).mean(), "batch")  # noqa: E731
    dp = wrap(lambda w, x: x @ w)
    doors = {"parallel": dp.parallel(lambda w, x: (w, mean(w, x))), "value_and_grad": dp.value_and_grad(mean)}
    for door in doors.values():
        with pytest.raises(NameError, match="batch") as info:
            door(W, X)
        assert "that of the replicas is 'data'. Pass axis_name=" in "".join(info.value.__notes__)


def test_a_tuple_is_the_arguments():
    def loss(w, batch):
        return batch[0] @ w + batch[1]

    with pytest.raises(TypeError, match="positional argument") as info:
        jdp.data_parallel(loss, W, (X, X[:, :1]), devices=range(4))
    assert "pass ((x, y),)" in "".join(info.value.__notes__)
    out = jdp.data_parallel(loss, W, ((X, X[:, :1]),), devices=range(4))
    np.testing.assert_allclose(out, X @ W + X[:, :1], rtol=1e-5)


@pytest.mark.parametrize("fn", [jnp.mean, jnp.asarray, lambda x: jnp.square(x).mean(), np.asarray])
def test_a_scattered_in_a_loss_by_hand(fn):
    with pytest.raises(TypeError, match=r"it is used as an array; .*jdp.gather\(x\)"):
        fn(jdp.scatter(X, range(4)))


def test_labels_that_are_scattered_in_a_loss_of_optax():
    """It asks for their dtype first; JAX says there that it cannot determine one, and hides what a TypeError says."""
    for _, labels in jdp.DataParallel(linear(), range(4)).prefetch([(X, np.arange(len(X)) % 2)]):
        with pytest.raises(
            AttributeError, match=r"^jdp\.Scattered: it is used as an array; .*np\.asarray\(jdp.gather\(x\)"
        ):
            optax.softmax_cross_entropy_with_integer_labels(jnp.ones((len(X), 2)), labels)


@pytest.mark.parametrize("size", [7, 8])
def test_what_the_error_advises_meets_outputs_on_all_devices(size):
    """torch's loop of a test, `(model(x).argmax(1) == y).sum()`. jdp.gather alone puts the rows on one device."""
    dp = jdp.DataParallel(linear(), range(4))
    for x, y in dp.prefetch([(X[:size], np.arange(size) % 2)]):
        with pytest.raises(TypeError, match="used as an array") as info:
            dp(x).argmax(1) == y  # noqa: B015
        advice = re.search(r"the rows of the batch, (\S+),", str(info.value))[1]
        rows = eval(advice, {"np": np, "jdp": jdp, "x": y})
        hits = (dp(x).argmax(1) == rows).sum()
    assert hits == (np.asarray(dp.module(X[:size])).argmax(1) == np.arange(size) % 2).sum()


def test_the_rows_of_a_scattered():
    """`len` is the number of chunks, as of torch's scatter."""
    for size, of in (8, X), (7, {"x": X[:7], "n": 3}):
        scattered = jdp.scatter(of, range(4))
        assert scattered.rows == size and len(scattered) == 4


def test_another_method_of_an_nnx_module():
    class Model(nnx.Module):
        def __init__(self):
            self.linear, self.calls = linear(), nnx.Variable(jnp.zeros(()))

        def encode(self, x):
            self.calls[...] += 1
            return 2 * self.linear(x)

    dp = wrap(Model())
    with pytest.raises(TypeError, match=r"lambda model, x: model.encode\(x\), devices\)\(dp.module, x\)"):
        dp.apply(X, method="encode")
    with pytest.raises(TypeError, match=r"lambda model, x: model.encode\(x\), devices\)\(dp.module, x\)"):
        wrap(linear())(X, method="encode")
    out = wrap(lambda model, x: model.encode(x))(dp.module, X)
    np.testing.assert_allclose(out, 2 * dp.module.linear(X), rtol=1e-5)
    assert dp.module.calls[...] == 1
