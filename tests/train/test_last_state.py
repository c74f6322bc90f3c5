"""A step on the state that it gave last looks at less, and gives what a step without a memory gives."""

import contextlib

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

X = np.arange(32, dtype=np.float32).reshape(16, 2) / 32


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(nn.Dense(1)(x))


def loss_fn(variables, x, key=None):
    rngs = None if key is None else {"dropout": key}
    out, updates = Model().apply(variables, x, mutable=["batch_stats"], rngs=rngs)
    return ((out - 1) ** 2).mean(), {"out": out}, updates


def wrapper():
    dp = jdp.DataParallel(Model())
    return dp, dp.init(jax.random.key(0), X)


def forgetful(dp, **options):
    """A step that looks at every state as at one that it has never seen."""
    step = dp.train_step(loss_fn, optax.adam(0.1), **options)

    def call(state, batch):
        step._results = type(step._results)(options.get("donate", True))
        return step(state, batch)

    return step.init, call


def same(found, expected):
    def equal(a, b):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        a, b = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_array_equal(a, b)

    jax.tree.map(equal, found, expected)


OPTIONS = [
    {},
    {"donate": False},
    {"shard_optimizer": True},
    {"accumulate_steps": 2},
    {"skip_nonfinite": True},
]


@pytest.mark.full
@pytest.mark.budget(6)  # six batches of two shapes, by two steps
@pytest.mark.each_value
@pytest.mark.parametrize("prefetched", [True, False], ids=["prefetched", "numpy"])
@pytest.mark.parametrize("key", [None, 1], ids=["", "dropout"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_equal_those_of_one_without_a_memory(options, key, prefetched):
    dp, variables = wrapper()
    key = None if key is None else jax.random.key(key)
    init, expected = forgetful(dp, **options)
    step = dp.train_step(loss_fn, optax.adam(0.1), **options)
    a, b = step.init(variables, key), init(variables, key)
    batches = [X, X + 1, X[:5], X[:5], X + 2, X]
    batches = list(dp.prefetch(batches)) if prefetched else batches
    for batch in batches:
        found = step(a, batch)
        wanted = expected(b, batch)
        same(found, wanted)
        a, b = found[0], wanted[0]
    assert int(a.step) == 6


def after_two_steps(key=None, **options):
    dp, variables = wrapper()
    step = dp.train_step(loss_fn, optax.adam(0.1), **options)
    state = step.init(variables, key=key)
    (batch,) = dp.prefetch([X])
    for _ in range(2):
        state, _ = step(state, batch)
    return dp, step, state, batch


@pytest.mark.full
def test_what_somebody_puts_into_the_state_counts():
    dp, step, state, batch = after_two_steps(donate=False)
    init, expected = forgetful(dp, donate=False)
    kernel = state.params["Dense_0"]["kernel"]
    for new in (2 * kernel, np.ones((2, 3), np.float32), jnp.ones((2, 3))):
        state.params["Dense_0"]["kernel"] = new
        other = jax.tree.map(lambda x: x, state)
        for _ in range(2):
            same(step(state, batch), expected(other, batch))
            step._results.last = state  # as if it had given it: what was changed is the last state


def test_what_does_not_fit_is_refused_in_the_same_words():
    """JAX's own refusal names an operand by its number, and a model's error the replica."""
    _, step, state, batch = after_two_steps()
    kernel = state.params["Dense_0"]["kernel"]
    state.params["Dense_0"]["kernel"] = jdp.replicate(np.ones((5, 3), np.float32))
    with pytest.raises(flax.errors.ScopeParamShapeError) as error:
        step(state, batch)
    assert any("replica 0" in note for note in error.value.__notes__)
    state.params["Dense_0"]["kernel"] = "a kernel"
    with pytest.raises(TypeError, match=r"state\.params\['Dense_0'\]\['kernel'\]") as error:
        step(state, batch)
    assert "operands[" not in str(error.value)
    state.params["Dense_0"]["kernel"] = kernel
    assert int(step(state, batch)[0].step) == 3  # nothing of it had run


@pytest.mark.parametrize("key", [None, 0])
def test_an_array_that_was_freed_is_refused_with_its_path(key):
    _, step, state, batch = after_two_steps(None if key is None else jax.random.key(key))
    state.params["Dense_1"]["bias"].delete()
    with pytest.raises(RuntimeError, match=r"state\.params\['Dense_1'\]\['bias'\] was donated to an earlier step"):
        step(state, batch)


def test_a_key_that_was_freed_is_refused_with_its_path():
    _, step, state, batch = after_two_steps(jax.random.key(0))
    state.key.delete()
    with pytest.raises(RuntimeError, match=r"state\.key was donated to an earlier step"):
        step(state, batch)


def test_a_parameter_that_gets_another_name():
    dp = jdp.DataParallel(lambda v, x: x * sum(v["params"].values()))
    step = dp.train_step(lambda v, x: dp(v, x).mean(), optax.sgd(0.5))
    state = step.init({"params": {"a": np.float32(1), "b": np.float32(2)}})
    (batch,) = dp.prefetch([np.ones(8, np.float32)])
    for _ in range(2):
        state, _ = step(state, batch)
    state.params["z"] = state.params.pop("a")
    state, metrics = step(state, batch)
    assert jax.device_get(state.params) == {"b": 0.5, "z": -0.5} and metrics["loss"] == 1


@pytest.mark.parametrize("freed", [False, True])
def test_a_tree_where_an_array_was(freed):
    dp = jdp.DataParallel(lambda v, x: x * sum(jax.tree.leaves(v["params"])))
    step = dp.train_step(lambda v, x: dp(v, x).mean(), optax.sgd(0.5))
    state = step.init({"params": {"a": np.float32(1), "b": np.float32(2)}})
    (batch,) = dp.prefetch([np.ones(8, np.float32)])
    for _ in range(2):
        state, _ = step(state, batch)
    state.params["a"] = jdp.replicate({"c": np.float32(3), "d": np.float32(4)})
    if freed:
        state.params["a"]["d"].delete()
        with pytest.raises(RuntimeError, match=r"state\.params\['a'\]\['d'\] was donated to an earlier step"):
            step(state, batch)
        return
    for loss in (8, 6.5):  # b is 1 by now
        state, metrics = step(state, batch)
        assert metrics["loss"] == loss
    assert jax.device_get(state.params) == {"a": {"c": 2, "d": 3}, "b": 0}


def test_the_state_before_is_refused():
    _, step, state, batch = after_two_steps()
    after, _ = step(state, batch)
    with pytest.raises(RuntimeError, match="was donated to an earlier step"):
        step(state, batch)
    assert int(step(after, batch)[0].step) == 4


@pytest.mark.full
def test_another_state_is_looked_at():
    _, step, state, batch = after_two_steps(donate=False)
    narrow = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))
    with pytest.raises(ValueError, match=r"bfloat16\[3\], float32\[3\] is expected"):
        step(narrow, batch)


def test_none_is_refused_when_the_last_state_is_gone():
    _, step, state, batch = after_two_steps()
    del state
    with pytest.raises(TypeError, match="state is a NoneType"):
        step(None, batch)


@pytest.mark.full
def test_traces_and_settings_are_looked_at():
    dp, step, state, batch = after_two_steps(donate=False)
    _, expected = forgetful(dp, donate=False)
    wanted = expected(state, batch)
    traced = jax.jit(lambda: step(state, batch)[1]["loss"])
    np.testing.assert_allclose(traced(), wanted[1]["loss"], rtol=1e-6)
    step(state, batch)
    step._results.last = state
    mesh = jax.make_mesh((8,), ("other",))
    for given in (batch, X):
        with jax.sharding.set_mesh(mesh):
            found = step(state, given)
        np.testing.assert_allclose(found[1]["loss"], wanted[1]["loss"], rtol=1e-6)
    with jax.disable_jit():
        found = step(state, batch)
    np.testing.assert_allclose(found[1]["loss"], wanted[1]["loss"], rtol=1e-5)


def test_a_batch_that_cannot_be_cut_is_refused_and_changes_nothing():
    _, step, state, batch = after_two_steps()
    for wrong, error, words in (
        ({"x": X, "y": X[:3]}, ValueError, r"\['y'\] has 3"),
        (np.ones((0, 2), np.float32), ValueError, "the batch has 0 rows"),
    ):
        with pytest.raises(error, match=words):
            step(state, wrong)
    assert int(step(state, batch)[0].step) == 3


@pytest.mark.full
def test_explain_does_not_run_it():
    _, step, state, batch = after_two_steps()
    before = int(state.step)
    assert jdp.explain(step, state, batch).flops == jdp.explain(lambda: step(state, batch)).flops > 0
    assert int(state.step) == before and not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_state_of_another_model_forgets():
    dp = jdp.DataParallel(lambda v, x: x * v["params"].sum())
    step = dp.train_step(lambda v, x: dp(v, x).mean(), optax.sgd(0.5, momentum=0.0), shard_optimizer=True)
    (batch,) = dp.prefetch([np.ones(8, np.float32)])
    for rows in (16, 3, 16):
        state = step.init({"params": np.ones(rows, np.float32)})
        for _ in range(3):
            state, metrics = step(state, batch)
        assert step.optimizer_bytes(state).cut == (8 if rows == 16 else 0)
        assert float(metrics["loss"]) == rows - rows * 0.5 * 2 and state.params.tolist() == [-0.5] * rows


def test_replicas_are_compared_all_the_same():
    dp, variables = wrapper()
    step = dp.train_step(loss_fn, optax.adam(0.1), check_replicas=2)
    state = step.init(variables)
    (batch,) = dp.prefetch([X])
    for _ in range(4):
        state, _ = step(state, batch)
    assert step._program.steps == 4


@pytest.mark.parametrize("n", [1, 2])
def test_a_known_step_that_raises_ran_once(n):
    """And says why, not that its state is freed."""
    runs = []

    def callback(x):
        runs.append(x.shape)
        if len(runs) > 3 * n:
            raise ValueError("mine")
        return x

    def loss(v, x):
        return jnp.mean(v["params"] * jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

    dp = jdp.DataParallel(lambda v, x: x, devices=range(n))
    step = dp.train_step(loss, optax.sgd(0.1))
    state, x = step.init({"params": np.float32(1)}), np.ones(4, np.float32)
    for _ in range(3):
        state, metrics = step(state, x)
    jax.block_until_ready(metrics)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="mine"):
        jax.block_until_ready(step(state, x))
    while jdp._core.programs._running:  # else its error would come to a later call that waits
        with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):
            jdp._core.programs.wait_for_all()
    assert len(runs) == 4 * n


@pytest.mark.full
@pytest.mark.parametrize("method", ["check", "lower", "find_nonfinite"])
def test_what_only_looks_at_a_state_leaves_the_program_of_the_next_step(method):
    """Parameters that are whole stay whole, after a look at a state whose parameters are cut."""
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], range(4))
    whole = {"params": {"w": np.ones((8, 4), np.float32)}}
    cut = dp.train_step(lambda v, x: (dp(v, x) ** 2).mean(), optax.sgd(0.1), shard_params=True).init(whole)
    step = dp.train_step(lambda v, x: (dp(v, x) ** 2).mean(), optax.sgd(0.1))
    first, second = step.init({"params": cut.params}), step.init(whole)
    before = second.params["w"].sharding
    getattr(step, method)(first, np.ones((4, 8), np.float32))
    second, _ = step(second, np.ones((4, 8), np.float32))
    assert second.params["w"].sharding == before and before.is_fully_replicated


def test_a_last_state_that_was_changed_in_place_is_checked(refused):
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], range(4))
    step = dp.train_step(lambda v, x: (dp(v, x) ** 2).mean(), optax.sgd(0.1))
    state, x = step.init({"params": {"w": np.ones((2, 1), np.float32)}}), X[:8]
    state, _ = step(state, x)
    fresh = dp.train_step(lambda v, x: (dp(v, x) ** 2).mean(), optax.sgd(0.1))
    w = np.full((2, 1), 0.5, np.float32)
    state.params["w"] = jax.device_put(w, jax.devices()[2])  # as one that was restored there
    state, metrics = step(state, x)
    expected, _ = fresh(fresh.init({"params": {"w": w}}), x)
    np.testing.assert_array_equal(state.params["w"], expected.params["w"])
    state.params["w"] = np.ones((2, 1), np.int32)
    with refused(TypeError, "train_step", r"state\.params\['w'\] is .*int32"):
        step(state, x)
