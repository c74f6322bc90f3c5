"""What a reviewer found: each law here was broken once."""

import dataclasses
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import sparse

import jdp

X = np.random.RandomState(0).randn(10, 4).astype(np.float32)


def test_loops_of_the_verbs_do_not_deadlock():
    code = """
import jax, jdp, numpy as np
s = jdp.scatter(np.ones((16, 64, 64), np.float32))
u = jdp.scatter(np.ones((15, 64, 64), np.float32))
for _ in range(3000):
    total, whole = jdp.reduce_add(s, "all"), jdp.gather(u, "sharded")
print(float(total.sum()), whole.shape)
"""
    import os

    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PJRT_NPROC")}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=280)
    assert done.stdout.strip() == "65536.0 (15, 64, 64)", done.stderr[-2000:]


def test_sown_values_passed_back_in_are_appended_to():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x)
            return x

    dp = jdp.DataParallel(Sows(), range(4))
    _, state = dp.apply({}, X, mutable=["intermediates"])
    _, state = dp.apply(state, X, mutable=["intermediates"])
    first, second = state["intermediates"]["h"]
    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(second, X)


def test_rngs_among_the_arguments_advance():
    dp = jdp.DataParallel(nnx.Dropout(0.5), range(4))
    rngs = nnx.Rngs(1)
    first, second = dp(X, rngs=rngs), dp(X, rngs=rngs)
    assert rngs.dropout.count[...] == 2
    assert (np.asarray(first) != np.asarray(second)).any()
    bare, key = nnx.Dropout(0.5), nnx.Rngs(1)
    np.testing.assert_array_equal(first[:3], bare(X[:3], rngs=key))  # the primary draws as the bare model
    np.testing.assert_array_equal(second[:3], bare(X[:3], rngs=key))


def test_a_variable_among_the_arguments_is_updated():
    class Counts(nnx.Module):
        def __call__(self, x, counter):
            counter[...] += 1
            return x

    counter = nnx.Variable(jnp.zeros((), jnp.int32))
    dp = jdp.DataParallel(Counts(), range(4))
    dp(X, counter)
    dp(X, counter)
    assert counter[...] == 2


def test_what_is_refused_is_refused_after_an_array_of_the_same_shape():
    dp = jdp.DataParallel(lambda w, x: x * w, range(2))
    square = np.eye(4, dtype=np.float32)
    dp(np.float32(2), square)
    with pytest.raises(TypeError, match="a sparse array"):
        dp(np.float32(2), sparse.BCOO.fromdense(square))
    with pytest.raises(TypeError, match="jax.eval_shape"):
        dp(np.float32(2), jax.ShapeDtypeStruct((4, 4), np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.dtype("float16")])
def test_a_dtype_is_an_argument_like_any_object(dtype):
    dp = jdp.DataParallel(lambda w, x, dtype: x.astype(dtype), range(2))
    assert dp(np.float32(1), X, dtype).dtype == dtype


def test_the_mean_of_state_is_exact_in_float64():
    with jax.enable_x64(True):
        x = np.random.RandomState(1).randn(10, 3)
        dp = jdp.DataParallel(nn.BatchNorm(use_running_average=False, momentum=0.0), range(4), reduce_state="mean")
        _, state = dp.apply(dp.init(jax.random.key(0), x), x, mutable=["batch_stats"])
        np.testing.assert_allclose(state["batch_stats"]["mean"], x.mean(0), rtol=1e-13)


@pytest.mark.parametrize("n", [1, 4])
def test_no_rows_what_is_not_made_of_rows_is_the_models(n):
    dp = jdp.DataParallel(lambda w, x: (x, w * 3), range(n), out_axes=(0, None))
    rows, three = dp(np.float32(2), X[:0])
    assert rows.shape == (0, 4) and float(three) == 6


@pytest.mark.parametrize("dim", [None, 1.5, True])
def test_a_dim_that_is_no_int(dim):
    with pytest.raises(TypeError, match=r"jdp\.scatter: dim is .*Pass an int"):
        jdp.scatter(X, dim=dim)


def test_boxed_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    model = nn.Dense(3, kernel_init=init)
    variables = model.init(jax.random.key(0), X)
    dp = jdp.DataParallel(model, range(4))
    np.testing.assert_allclose(dp.apply(variables, X), model.apply(variables, X), rtol=1e-5, atol=1e-6)


def test_another_mesh_around_the_call_is_an_error_that_says_so():
    dp = jdp.DataParallel(lambda w, x: x * w, range(4))
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"inside jax\.set_mesh of .*outside"):
        dp(np.float32(1), X)


def test_the_public_scatter_in_a_subclass_with_its_own_axis_name():
    class Mine(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return jdp.scatter(inputs, devices, chunk_sizes=(4, 2, 3, 1)), jdp.scatter(kwargs, devices)

    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    want = np.asarray(model(X))
    np.testing.assert_allclose(Mine(model, range(4), axis_name="batch")(X), want, rtol=1e-5, atol=1e-6)


def test_a_subclass_may_use_fewer_devices():
    class Mine(jdp.DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return super().scatter(inputs, kwargs, devices[:2])

        def replicate(self, tree, devices):
            return super().replicate(tree, devices[:2])

    np.testing.assert_array_equal(Mine(lambda w, x: x * w, range(4))(np.float32(2), X), 2 * X)


def test_a_callable_without_weak_references():
    @dataclasses.dataclass(slots=True)
    class Scale:
        by: float

        def __call__(self, w, x):
            return x * w * self.by

    dp = jdp.DataParallel(Scale(3.0), range(2))
    np.testing.assert_array_equal(dp(np.float32(2), X), 6 * X)
    np.testing.assert_array_equal(jdp.data_parallel(Scale(3.0), np.float32(2), X, range(2)), 6 * X)


def test_keywords_named_like_our_own():
    class Model(nnx.Module):
        def __call__(self, replicas):
            return replicas * 2

    np.testing.assert_array_equal(jdp.DataParallel(Model(), range(2))(replicas=X), 2 * X)
    dp = jdp.DataParallel(lambda w, params: params * w, range(2), out_axes=0)
    np.testing.assert_array_equal(dp(np.float32(2), params=X), 2 * X)


def test_a_wrong_input_is_not_taken_for_stacked_parameters():
    dp = jdp.DataParallel(nn.Dense(4, use_bias=False), range(4))
    variables = dp.init(jax.random.key(0), np.ones((8, 4), np.float32))
    with pytest.raises(Exception, match="generate shape") as info:
        dp.apply(variables, np.ones((8, 5), np.float32))
    assert type(info.value).__name__ == "ScopeParamShapeError"


def test_prefetch_leaves_the_callers_iterator_open():
    source = iter([X, X + 1, X + 2])
    generator = (x for x in source)
    dp = jdp.DataParallel(lambda w, x: x * w, range(2))
    for _ in dp.prefetch(generator, size=0):
        break
    np.testing.assert_array_equal(next(generator), X + 1)


@pytest.mark.parametrize("arguments", [{"axis_name": 3}, {"state_axes": "cache"}, {"state_axes": {"cache": "a"}}])
def test_arguments_are_checked_at_construction(arguments):
    with pytest.raises(TypeError, match=rf"jdp\.DataParallel: {next(iter(arguments))} is .*must"):
        jdp.DataParallel(nn.Dense(2), range(2), **arguments)


def test_axes_that_do_not_fit_name_what_they_do_not_fit():
    dp = jdp.DataParallel(lambda w, x: x, range(2), out_axes=(0, None))
    with pytest.raises(ValueError, match=r"out_axes does not fit the outputs, whose tree is .*prefix"):
        dp(np.float32(1), X)
    dp = jdp.DataParallel(lambda w, x: x, range(2), in_axes=({"z": 0},))
    with pytest.raises(ValueError, match=r"in_axes does not fit the arguments, whose tree is .*prefix"):
        dp(np.float32(1), X)


def test_gradients_through_reduce_add_where_some_sums_are_not_used():
    """A law only: the joint device_put that failed for a model with a scan happens to pass here."""
    s = jdp.scatter((X[:8],), range(4))

    def sums(w):
        out = jdp.parallel_apply(lambda w, x: {"a": x.sum(0) * w, "b": (x * w).sum()}, w, s)
        return jdp.reduce_add(out)

    np.testing.assert_allclose(jax.grad(lambda w: sums(w)["a"].sum())(np.float32(2)), X[:8].sum(), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda w: sums(w)["b"])(np.float32(2)), X[:8].sum(), rtol=1e-5)
