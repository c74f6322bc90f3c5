"""What a training step says to those who call it as another library is called."""

import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training import train_state
from laws import INPUTS, TARGETS

import jdp

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.ones(8, np.float32)
W = {"params": {"w": np.linspace(0, 1, 3, dtype=np.float32)}}
SGD = optax.sgd(0.1)


def loss_fn(variables, x):
    return ((x @ variables["params"]["w"] - 1) ** 2).mean()


def keyed(variables, x, key):
    return loss_fn(variables, x) + 0 * jax.random.normal(key)


def wrapper(n=2):
    return jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=range(n))


def step_of(loss=loss_fn, tx=SGD, n=2):
    return wrapper(n).train_step(loss, tx)


def net():
    return jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=range(2))


# --- the call ---


def test_a_batch_in_several_arguments(refused):
    step = step_of()
    state = step.init(W)
    with refused(
        TypeError, "train_step", r"2 arguments for the batch; a batch is one tree.*Pass step\(state, \(x, y\)\)"
    ):
        step(state, X, Y)
    with refused(TypeError, "train_step", r"3 arguments for the batch; .*Pass step\(\(x, y\)\)"):
        net().train_step(lambda m, b: m(b[0]).mean(), SGD)(X, Y, Y)
    assert int(step(state, X)[0].step) == 1


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loss_that_wants_a_key_and_gets_none(refused, by_hand):
    step = step_of(keyed)
    words = r"keyed takes a third argument, and there is no key; .*step\.init\(variables, key=jax\.random\.key\(0\)\)"
    with refused(TypeError, "train_step", words):
        if by_hand:
            step(step_of().init(W), X)
        else:
            step.init(W)
    assert int(step(step.init(W, key=jax.random.key(0)), X)[0].step) == 1


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loss_that_wants_no_key_and_gets_one(refused, by_hand):
    step, key = step_of(), jax.random.key(0)
    with refused(TypeError, "train_step", r"loss_fn takes no third argument, and there is a key; .*Leave key= out"):
        if by_hand:
            step(step_of(keyed).init(W, key=key), X)
        else:
            step.init(W, key=key)


def test_losses_that_take_both_or_anything():
    for loss in (lambda v, x, key=None: loss_fn(v, x), lambda *args: loss_fn(*args[:2])):
        for key in (None, jax.random.key(0)):
            step = step_of(loss)
            assert int(step(step.init(W, key=key), X)[0].step) == 1


def test_a_loss_of_other_arguments(refused):
    with refused(
        TypeError, "train_step", r"loss_fn three takes \(v, x, y, z\); a step calls loss_fn\(variables, batch\)"
    ):

        def three(v, x, y, z): ...

        step_of(three).init(W)
    with refused(
        TypeError, "train_step", r"calls loss_fn\(model, batch\)\. If it is a key, draw from an nnx\.Rngs of the model"
    ):
        net().train_step(lambda m, x, key: m(x).mean(), SGD)


ASKING = {
    "item": lambda x: x.mean().item(),
    "float": lambda x: float(x.mean()),
    "numpy": lambda x: np.asarray(x).mean(),
    "if": lambda x: x.mean() if x.mean() > 0 else x.sum(),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING.keys())
@pytest.mark.parametrize("kind", ["variables", "nnx"])
def test_a_loss_that_asks_for_a_number(ask, kind):
    """JAX's own error, with what to do."""
    dp = wrapper() if kind == "variables" else net()

    def loss(v, x):
        return ask(x @ v["params"]["w"] if kind == "variables" else v(x))

    step = dp.train_step(loss, SGD)
    state = step.init(W) if kind == "variables" else None
    with pytest.raises(TypeError, match="racer") as error:
        step(*[state, X][kind == "nnx" :])
    says = "jdp.parallel_apply: loss asks for the value of an array"
    notes = [n for n in error.value.__notes__ if n.startswith(says)]
    assert len(notes) == 1 and "Return the arrays themselves" in notes[0]
    assert type(error.value).__module__ == "jax.errors"


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING.keys())
def test_a_call_that_asks_for_a_number(ask):
    """The same at the other doors."""
    dp = jdp.DataParallel(lambda v, x: ask(x @ v["params"]["w"]), devices=range(2))
    for door in (dp, dp.value_and_grad(lambda v, x: ask(x @ v["params"]["w"]))):
        with pytest.raises(TypeError, match="racer") as error:
            door(W, X)
        assert [n for n in error.value.__notes__ if "asks for the value of an array" in n]


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING.keys())
@pytest.mark.parametrize("rows", [8, 7])
def test_a_criterion_that_asks_for_a_number(ask, rows):
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=range(2))

    def mine(out, *_):
        return ask(out)

    step = dp.train_step(dp, SGD, criterion=mine)
    for verb, call in {
        "value_and_grad": lambda x: dp.value_and_grad(dp, criterion=mine)(W, x),
        "train_step": lambda x: step(step.init(W), x),
    }.items():
        with pytest.raises(TypeError, match="racer") as error:
            call(np.resize(X, (rows, *X.shape[1:])))
        says = f"jdp.{verb}: criterion mine asks for the value of an array"
        assert len([n for n in error.value.__notes__ if n.startswith(says)]) == 1


def test_a_group_of_rows_that_is_cut():
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=range(2))
    with pytest.raises(TypeError, match="cannot reshape") as error:
        dp.value_and_grad(lambda v, x: dp(v, x).reshape(-1, 2).max(1).mean())(W, X[:6])
    assert [n for n in error.value.__notes__ if "replica 0 has 3 of the batch's 6 rows" in n]
    rows = jdp.scatter(X[:6], range(2), chunk_sizes=[4, 2])
    got = dp.value_and_grad(lambda v, x: dp(v, x).reshape(-1, 2).max(1).mean())(W, rows)[0]
    np.testing.assert_allclose(got, (X[:6] @ W["params"]["w"]).reshape(-1, 2).max(1).mean(), rtol=1e-6)


OF_ALL_ROWS = {
    "labels of a GAN": lambda o: ((o - jnp.ones((6, 1))) ** 2).mean(),
    "labels, one for each row": lambda o: jnp.where(jnp.arange(6) > 2, o[:, 0], 0).mean(),
    "two views": lambda o: jnp.subtract(*jnp.split(o, 2)).mean(),
}


@pytest.mark.parametrize("what", OF_ALL_ROWS)
def test_shapes_that_fit_with_all_rows_alone(what):
    """JAX's error names two shapes, and with one device there is none."""
    assert np.isfinite(OF_ALL_ROWS[what](X[:6] @ W["params"]["w"][:, None]))
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=range(2))
    with pytest.raises((TypeError, ValueError)) as error:
        dp.value_and_grad(lambda v, x: OF_ALL_ROWS[what](dp(v, x)[:, None]))(W, X[:6])
    (note,) = (n for n in error.value.__notes__ if "replica 0 has 3 of the batch's 6 rows" in n)
    assert "whole groups" in note and "in the batch, or make it for x.shape[0] rows" in note


RETURNS = {
    "a dict": (lambda loss: {"loss": loss}, "the loss is dict"),
    "nothing": (lambda loss: None, "the loss is NoneType"),
    "a string": (lambda loss: "loss", "the loss is str"),
    "a number": (lambda loss: 3, "the loss is int"),
    "a function": (lambda loss: len, "the loss is builtin_function_or_method"),
    "four": (lambda loss: (loss, {}, {}, {}), "loss_fn returns a tuple of 4"),
    "a nested pair": (lambda loss: ((loss, {}), {}), "the loss is tuple"),
    "metrics as an array": (lambda loss: (loss, loss), "the metrics are a"),
    "metrics and updates as in Flax's ImageNet example": (
        lambda loss: (loss, (loss, {"batch_stats": {}})),
        r"the metrics are a tuple; .*the third result: return loss, \{'logits': logits\}, updates",
    ),
    "metrics first": (lambda loss: ({"a": loss}, loss), "the metrics are a"),
    "a string as a metric": (lambda loss: (loss, {"a": "b"}), r"\['a'\] is a str"),
    "a string after rows": (lambda loss: (loss, {"a": X, "b": "b"}), r"\['b'\] is a str"),
    "updates as a list": (lambda loss: (loss, {}, [loss]), "the updates are a list"),
    "a metric of the step's name": (
        lambda loss: (loss, {"loss": 2 * loss}),
        "a metric is called 'loss'; .*Leave it out, or give it another name",
    ),
}


@pytest.mark.parametrize(("form", "words"), RETURNS.values(), ids=RETURNS.keys())
def test_what_a_loss_returns_and_should_not(refused, form, words):
    step = step_of(lambda v, x: form(loss_fn(v, x)))
    state = step.init(W)
    with refused(TypeError if "called" not in words else ValueError, "train_step", words):
        step(state, X)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state)) and step.last is state
    np.testing.assert_array_equal(state.params["w"], W["params"]["w"])


def test_what_belongs_to_the_other_kind_of_step(refused):
    step = step_of()
    state = step.init(W)
    with refused(TypeError, "train_step", r"the batch is a jdp.TrainState; .*Pass step\(batch\)"):
        net().train_step(lambda m, x: m(x).mean(), SGD)(state, X)
    assert int(step(state, X)[0].step) == 1
    of_nnx = net().train_step(lambda m, x: m(x).mean(), SGD)
    for first in (net().module, nnx.state(net().module), of_nnx.optimizer):
        with refused(TypeError, "train_step", rf"the batch is a {type(first).__name__}; .*takes the batch alone"):
            of_nnx(first, X)


def test_arguments_in_the_other_order(refused):
    with refused(TypeError, "train_step", r"loss_fn is a GradientTransformation\w*; .*train_step\(loss_fn, tx\)"):
        net().train_step(SGD, lambda m, x: m(x).mean())
    step = step_of()
    state = step.init(W)
    for call in (step, step.check, step.find_nonfinite):
        with refused(TypeError, "train_step", r"state is a ndarray; a step takes .* Call step\(state, batch\)"):
            call(X, state)
    of_flax = train_state.TrainState.create(apply_fn=None, params=W["params"], tx=SGD)
    with refused(TypeError, "train_step", r"state is a flax\.training\.train_state\.TrainState; a step takes a jdp"):
        step(of_flax, X)


def test_arrays_of_other_sizes_may_be_left_whole(refused):
    step = step_of()
    with refused(ValueError, "train_step", r"has 3 rows .* all arrays that are cut must agree.*in_axes"):
        step(step.init(W), {"x": X, "weight": np.ones(3, np.float32)})


def test_misspelt_attributes(refused):
    step, other = step_of(), net().train_step(lambda m, x: m(x).mean(), SGD)
    with refused(
        AttributeError, "train_step", r"a TrainStep has no attribute 'inti'; it has .*last.* Use step\.init\."
    ):
        step.inti(W)
    with refused(AttributeError, "train_step", r"a NNXTrainStep has no attribute 'optimiser'; .*Use step\.optimizer\."):
        _ = other.optimiser
    with refused(AttributeError, "train_step", r"no attribute 'init'; .* state of dp.module: call step"):
        other.init(W)
    with refused(AttributeError, "train_step", r"has no attribute 'state'; it has .* Use one of these"):
        _ = other.state
    assert not hasattr(step, "__deepcopy__") and not hasattr(step, "_repr_mimebundle_")


def test_an_optimizer_by_name(refused):
    with refused(TypeError, "train_step", r"tx is a str; it is an optax transformation"):
        wrapper().train_step(loss_fn, "adam")
    with refused(TypeError, "train_step", r"tx is a str; it is an optax transformation"):
        net().train_step(lambda m, x: m(x).mean(), "adam")


# --- optimizers ---


def sam():
    return optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))


TAKES = {
    "sam": sam,
    "sam in a chain": lambda: optax.chain(optax.clip(1.0), sam()),
    "sam in steps": lambda: optax.MultiSteps(sam(), 2),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "polyak": lambda: optax.polyak_sgd(),
    "lbfgs without a search": lambda: optax.lbfgs(0.1, linesearch=None),
}


@pytest.mark.full
@pytest.mark.parametrize("make", TAKES.values(), ids=TAKES.keys())
def test_what_is_passed_goes_to_those_that_take_it(make):
    """Equal to optax by hand, with `value` where the transformation takes it."""
    step, tx = step_of(tx=make()), make()
    state = step.init(W)
    params, opt_state = W["params"], tx.init(W["params"])
    takes_value = "sam" not in str(make.__code__.co_names)
    for _ in range(4):
        state, metrics = step(state, X)
        loss, grads = jax.value_and_grad(lambda p: loss_fn({"params": p}, X))(params)
        more = {"value": loss} if takes_value else {}
        updates, opt_state = (
            optax.with_extra_args_support(tx).update(grads, opt_state, params, **more)
            if not isinstance(tx, optax.MultiSteps)
            else tx.update(grads, opt_state, params)
        )
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5, atol=1e-6)


NEEDS = {
    "lbfgs": (optax.lbfgs, "tx needs value_fn and grad as well as the gradient .*linesearch=None"),
    "sophia": (lambda: optax.contrib.sophia(0.1), "tx needs obj_fn as well as the gradient"),
    "opaque sam": (
        lambda: optax.contrib.sam(SGD, SGD, opaque_mode=True),
        r"tx needs grad_fn as well as the gradient .*without \(optax\.contrib\.sam has opaque_mode=False\)",
    ),
    "lookahead": (lambda: optax.lookahead(SGD, 5, 0.5), r"tx takes two trees of parameters, optax\.LookaheadParams"),
    "dpsgd": (
        lambda: optax.chain(optax.contrib.differentially_private_aggregate(1.0, 0.5, 0), SGD),
        r"clips the gradient of each row.*docs/training\.md, DP-SGD",
    ),
    "in a chain": (lambda: optax.chain(optax.clip(1.0), optax.lbfgs()), "tx needs value_fn and grad as well as"),
}


@pytest.mark.parametrize(("make", "words"), NEEDS.values(), ids=NEEDS.keys())
def test_what_needs_more_is_refused_before_anything_runs(refused, make, words):
    with refused(TypeError, "train_step", words):
        step_of(tx=make()).init(W)
    with refused(TypeError, "train_step", words):
        net().train_step(lambda m, x: m(x).mean(), make())


@pytest.mark.parametrize(
    "tx, words",
    [
        (optax.masked(optax.lbfgs(), {"w": True}), "tx needs value_fn and grad as well as"),
        (optax.multi_transform({"a": optax.contrib.sophia(0.1)}, {"w": "a"}), "tx needs obj_fn as well as"),
    ],
    ids=["a mask", "labels"],
)
def test_what_needs_the_names_of_all_parameters_is_refused_as_early(refused, tx, words):
    with refused(TypeError, "train_step", words):
        step_of(tx=tx).init(W)


def test_before_the_first_step_the_update_of_one_parameter_is_traced():
    """An update of all of them takes long to trace, and the first step traces it anyway."""
    leaves = []

    def update(grads, state, params=None):
        leaves.append(len(jax.tree.leaves(grads)))
        return jax.tree.map(jnp.negative, grads), state

    step = jdp.DataParallel(lambda v, x: x @ sum(v["params"])).train_step(
        lambda v, x: (x @ sum(v["params"])).mean(), optax.GradientTransformation(lambda p: (), update)
    )
    state = step.init({"params": [np.ones(3, np.float32)] * 5})
    assert leaves == [1]
    step(state, X)
    assert leaves == [1, 5]


def test_a_name_error_in_an_optimizer_is_its_own():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -lerning_rate * g, grads), state  # noqa: F821

    step = step_of(tx=optax.GradientTransformation(lambda p: (), update))
    state = step.init(W)
    with pytest.raises(NameError, match=r"name 'lerning_rate' is not defined"):
        step(state, X)
    assert not state.params["w"].is_deleted()


def test_a_collective_in_an_optimizer_is_named(refused):
    def update(grads, state, params=None):
        return jax.lax.pmean(grads, "data"), state

    step = step_of(tx=optax.GradientTransformation(lambda p: (), update))
    with refused(ValueError, "train_step", r"the optimizer runs a collective \(.*unbound axis name"):
        step(step.init(W), X)


def test_a_name_error_in_init_is_its_own():
    calls = []

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls.append(1)
            return nn.Dense(features)(x)  # noqa: F821

    with pytest.raises(NameError, match=r"^name 'features' is not defined"):
        jdp.DataParallel(Model()).init(jax.random.key(0), X)
    assert len(calls) == 1


def test_an_optimizer_of_the_bare_model_trains_alike():
    """In train_step it does not matter of which of the two it was made."""
    losses = []
    for of in ("model", "wrapper"):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        dp = jdp.DataParallel(model, devices=range(2))
        optimizer = nnx.Optimizer(model if of == "model" else dp, optax.adam(0.1), wrt=nnx.Param)
        step = dp.train_step(lambda m, x: ((m(x) - 1) ** 2).mean(), optimizer)
        losses.append([float(step(X)["loss"]) for _ in range(3)])
    assert losses[0] == losses[1]


def test_the_form_of_the_errors():
    """None of them dumps an array."""
    step = step_of()
    with pytest.raises(TypeError) as error:
        step(step.init(W), X, jnp.ones(1000))
    assert len(str(error.value)) < 300 and not re.search(r"\[1\. 1\.", str(error.value))


# --- what is printed ---


def texts(x):
    return [repr(x), str(x)]


def test_a_state_is_printed_without_its_values():
    step = step_of(tx=optax.adam(0.1))
    state = step.init(W)
    mesh = state.step.sharding.mesh
    cut = jax.device_put(jnp.ones((4, 4)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    mixed = state.replace(params={"cut": cut, "host": np.ones(3), "number": 3, "one": jnp.ones(2), "object": len})
    assert repr(mixed) == (
        "TrainState(\n  .step: int32[] whole on 2 devices\n  .params['cut']: float32[4, 4] cut over 2 devices\n"
        "  .params['host']: float64[3] on the host\n  .params['number']: int 3\n"
        "  .params['object']: builtin_function_or_method\n  .params['one']: float32[2] on cpu:0\n"
        "  .opt_state[0].count: int32[] whole on 2 devices\n"
        "  .opt_state[0].mu['w']: float32[3] whole on 2 devices\n"
        "  .opt_state[0].nu['w']: float32[3] whole on 2 devices\n)"
    )
    step(state, X)
    assert all(".params['w']: float32[3] deleted\n" in text for text in texts(state))
    seen = []
    jax.jit(lambda state: seen.extend(texts(state)) or 0)(mixed.replace(params={"w": jnp.ones(3)}))
    assert all(".params['w']: float32[3] traced\n" in text for text in seen) and seen
    shapes = jax.eval_shape(lambda: W)
    assert ".params['w']: float32[3] described\n" in repr(jdp.TrainState(0, shapes["params"], (), {}))
    again = pickle.loads(pickle.dumps(jax.device_get(step.last)))
    assert ".params['w']: float32[3] on the host\n" in repr(again)
    long = repr(state.replace(params={f"w{i:04}": np.ones(1000) for i in range(1000)}))
    assert len(long) < 1000 and long.endswith("\n  ... and 992 more of 1004\n)")


def test_a_step_and_what_is_scattered_are_printed_in_a_line():
    step, other = step_of(), net().train_step(lambda m, x: m(x).mean(), SGD)
    assert texts(step) == ["TrainStep(loss_fn, devices=(cpu:0, cpu:1))"] * 2
    assert texts(other) == ["NNXTrainStep(<lambda>, devices=(cpu:0, cpu:1))"] * 2
    s = jdp.scatter({"x": jnp.ones((3, 2))}, range(2))
    line = "Scattered(sizes=(2, 1), devices=(cpu:0, cpu:1), padded arrays: float32[4, 2] cut over 2 devices)"
    assert texts(s) == [line] * 2
    s._arrays[0].delete()
    assert repr(s) == line.replace("cut over 2 devices", "deleted")
    many = repr(jdp.scatter([np.ones(3)] * 100, range(2)))
    assert many.endswith("and 92 more)") and len(many) < 500


def test_reports_are_printed_in_a_line():
    found = [jdp.explain(step_of(), step_of().init(W), X)]
    assert re.fullmatch(r"Report\('train_step of loss_fn', 2 x cpu, flops=\S+, peak_bytes=\d+\)", repr(found[0]))
    step = step_of(lambda v, x: jnp.sqrt(x @ v["params"]["w"]).mean())
    (bad, *_) = step.find_nonfinite(step.init(W), -np.ones((400, 3), np.float32))
    assert re.fullmatch(
        r"Nonfinite\(replica=0, device=cpu:0, rows=\(0, 1, 2, 3, 4, 5, \.\.\. and 194 more\), paths=\(\['w'\]\)\)",
        repr(bad),
    )
    assert repr(step.optimizer_bytes(step.init(W))) == "Bytes(cut=0, whole=0)"


class Growing(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.dense(x)
        self.seen = nnx.Variable(y.mean())
        return y


def squared(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


@pytest.mark.parametrize("option", [{"skip_nonfinite": True}, {"accumulate_steps": 2}])
def test_a_state_that_grows_is_refused_where_it_must_not(option):
    def step_of(**option):
        dp = jdp.DataParallel(Growing(), devices=[0, 1], reduce_state="mean")  # the first chunk's alone is refused
        return dp.train_step(squared, optax.sgd(0.1), **option)

    step = step_of(**option)
    with pytest.raises(ValueError, match=r"jdp\.\w+: the state.*seen.* is not expected.*Make the variable when"):
        step((INPUTS, TARGETS))
    step_of()((INPUTS, TARGETS))


def test_filters_may_be_lists_and_must_find_something(refused):
    model = Growing().dense
    dp = jdp.DataParallel(model, devices=[0, 1])
    step = dp.train_step(squared, nnx.Optimizer(model, optax.sgd(0.1), wrt=[nnx.Param, nnx.LoRAParam]))
    assert step((INPUTS, TARGETS))["loss"] > 0
    loss, grads = dp.value_and_grad(lambda m, x: m(x).mean(), argnums=nnx.DiffState(0, [nnx.Param]))(model, INPUTS)
    assert set(grads) == {"kernel", "bias"}
    with refused(ValueError, "train_step", "the model has no variables of"):
        dp.train_step(squared, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam))


def test_scales_of_fp8_are_refused(refused):
    """Their "gradient" is their next value, a maximum over the rows; averaged, or left out, it would be wrong."""
    model = nn.Dense(4, dot_general_cls=Fp8DirectDotGeneralOp)
    x = np.ones((8, 3), np.float32)
    variables = model.init(jax.random.key(0), x)
    assert "_overwrite_with_gradient" in variables
    dp = jdp.DataParallel(model, range(2))

    def loss_fn(v, x):
        return model.apply(v, x).mean()

    with refused(ValueError, "train_step", "'_overwrite_with_gradient' .*nn.Dense"):
        dp.train_step(loss_fn, SGD).init(variables)
    with refused(ValueError, "value_and_grad", "'_overwrite_with_gradient'"):
        dp.value_and_grad(loss_fn)(variables, x)


@pytest.mark.full
@pytest.mark.parametrize("change", ["another head", "one more layer"])
def test_a_model_that_has_changed_since_its_optimizer_was_made(change, refused):
    model = nnx.Sequential(nnx.Linear(6, 5, rngs=nnx.Rngs(0)), nnx.Linear(5, 4, rngs=nnx.Rngs(0)))
    dp = jdp.DataParallel(model, range(2))
    step = dp.train_step(lambda m, b: (m(b) ** 2).mean(), nnx.Optimizer(dp, optax.adam(0.1), wrt=nnx.Param))
    step(INPUTS)
    if change == "another head":
        model.layers[1] = nnx.Linear(5, 2, rngs=nnx.Rngs(1))
    else:
        model.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
    with refused(ValueError, "train_step", "opt_state.*other parameters than when the optimizer was made.*a new step"):
        step(INPUTS)


def test_a_loss_that_calls_its_wrapper_would_train_nothing():
    dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=range(2))
    teacher = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(1)), devices=range(2))
    x = np.ones((8, 3), np.float32)
    for step in (
        dp.train_step(lambda model, x: (dp(x) ** 2).mean(), optax.sgd(0.1)),
        dp.train_step(lambda model, x: dp(x), optax.sgd(0.1), criterion=lambda out, x: (out**2).mean()),
    ):
        with pytest.raises(TypeError, match="calls dp itself, whose parameters are constants.*model\\(x\\)"):
            step(x)
    expected = ((dp.module(x) - teacher.module(x)) ** 2).mean()
    step = dp.train_step(lambda model, x: ((model(x) - teacher(x)) ** 2).mean(), optax.sgd(0.1))
    np.testing.assert_allclose(step(x)["loss"], expected, rtol=1e-5)
    assert dp(x).shape == (8, 1)


@pytest.mark.parametrize(
    ("key", "says"), [("kernel", True), ("other", False), (["kernel"], False), (np.ones(2), False)]
)
def test_a_loss_written_for_parameters_is_told_of_variables(key, says):
    def loss(params, x):
        if not isinstance(key, str):
            raise KeyError(key)
        return (x @ params[key]).mean()

    step = jdp.DataParallel(lambda v, x: x).train_step(loss, optax.sgd(0.1))
    with pytest.raises(KeyError) as error:
        step(step.init({"params": {"kernel": np.ones((3, 2), np.float32)}}), np.ones((8, 3), np.float32))
    notes = "".join(error.value.__notes__)
    assert ("variables['params']" in notes) == says, notes


def test_a_criterion_with_the_arguments_of_torch_is_told_of_the_batch():
    step = jdp.DataParallel(lambda v, x: x).train_step(
        lambda v, batch: batch[0] @ v["params"],
        optax.sgd(0.1),
        criterion=lambda logits, y: optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(),
    )
    with pytest.raises(TypeError) as error:
        step(step.init({"params": np.ones((3, 2), np.float32)}), (np.ones((8, 3), np.float32), np.zeros(8, np.int32)))
    assert any("gets the outputs of all rows and the whole batch, a tuple." in note for note in error.value.__notes__)


ITSELF = {"a number": lambda e: e.mean(), "a Mean": lambda e: jdp.Mean(e.sum(), e.shape[0])}


@pytest.mark.parametrize("form", ITSELF.values(), ids=ITSELF.keys())
def test_the_loss_itself_may_be_among_the_metrics(form):
    """Many programs return it there, too; the step gives it under that name."""

    def loss_and_metrics(v, x):
        loss = form((x @ v["params"]["w"] - 1) ** 2)
        return loss, {"loss": loss, "twice": 2 * loss}

    state, metrics = (step := step_of(loss_and_metrics))(step.init(W), X)
    expected, want = (plain := step_of())(plain.init(W), X)
    assert sorted(metrics) == ["loss", "twice"]
    np.testing.assert_allclose([metrics["loss"], metrics["twice"] / 2], [want["loss"]] * 2, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-6)


WAYS = {
    "places": (lambda e: (e - jnp.arange(len(e))).mean(), r"positions.*iota.*Pass the number of all rows"),
    "linspace": (lambda e: (e - jnp.linspace(0, 1, e.shape[0])).mean(), "Pass the number of all rows"),
    "all but the last": (lambda e: e[:-1].mean(), r"a sum over fewer or more entries than rows.*Multiply by a mask"),
    "a sum": (lambda e: e.sum(), r"not divided by their number.*Return jdp\.Sum\(total\)"),
    "a column": (
        lambda e: ((e[:, None] - jnp.tanh(e)) ** 2).mean(),
        r"sub at .* If shapes \(n,\) and \(n, 1\) met there, .*; else pass the loss as criterion=",
    ),
    "neighbours": (
        lambda e: jax.nn.relu(1 + e - jnp.roll(e, 1)).mean(),
        r"max at .*rows of the chunk\. Pass the loss as criterion=",
    ),
    "a matrix of all rows": (
        lambda e: jnp.tanh(e[:, None] @ e[None]).mean(),
        r"dot\w* at .*rows of the chunk\. Pass the loss as criterion=",
    ),
    "a loop until all rows are done": (
        lambda e: jax.lax.while_loop(lambda v: jnp.abs(v).max() > 0.1, lambda v: v / 2, e).mean(),
        r"a loop that ends when all rows are done.*jnp\.where\(done, old, new\) in the loop's body, or pass",
    ),
}


@pytest.mark.parametrize(("form", "words"), WAYS.values(), ids=WAYS.keys())
def test_the_way_out_is_that_of_the_fault(refused, form, words):
    step = step_of(lambda v, x: form(x @ v["params"]["w"]))
    with refused(TypeError, "train_step", words):
        step(step.init(W), X)
