"""jit, grad, vjp, jvp, hessian, vmap, scan and checkpoint around a call: what they give for the bare model."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from laws import close

import jdp

ROWS = np.random.RandomState(0).randn(10, 3).astype(np.float32)
PARAMS = {"w": np.random.RandomState(1).randn(3, 2).astype(np.float32), "b": np.float32([0.5, -0.5])}
WHERE = ["host", "uncommitted", "primary", "replicated"]
INSIDE = ["host", "uncommitted", "replicated"]  # a transformation's arrays may not be committed to one device of many


def model(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


N = 4
DP = jdp.DataParallel(model, devices=range(N))
ONE = jdp.DataParallel(model, devices=[0])


def placed(where, tree=PARAMS):
    if where == "host":
        return tree
    if where == "uncommitted":
        return jax.tree.map(jnp.asarray, tree)
    return jax.device_put(tree, jax.devices()[0]) if where == "primary" else jdp.replicate(tree, range(N))


def devices_of(tree):
    return [leaf.devices() for leaf in jax.tree.leaves(tree)]


def loss(apply):
    """Not a sum over rows."""
    return lambda params, x: jnp.sqrt(1 + jnp.sum(apply(params, x) ** 2))


# --- grad and value_and_grad, outside and inside jit ---


def penalty(apply):
    """That of WGAN-GP: a gradient with respect to the rows, beside the output, and a gradient of both."""

    def of(params, x):
        grads = jax.grad(lambda x: apply(params, x).sum())(x)
        return apply(params, x).mean() + ((jnp.linalg.norm(grads, axis=1) - 1) ** 2).mean()

    return of


@pytest.mark.full
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", [8, 10])
@pytest.mark.parametrize("lie", [np.asarray, jnp.asarray])
def test_a_gradient_of_rows_on_the_host_is_beside_the_output(where, size, lie):
    """Eagerly JAX refuses to add arrays on other devices."""
    found = jax.value_and_grad(penalty(DP))(placed(where), lie(ROWS[:size]))
    close(found, jax.value_and_grad(penalty(model))(PARAMS, ROWS[:size]))


@pytest.mark.full
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", [8, 10])
def test_gradients_are_the_sum_and_come_back_where_the_parameters_live(where, size):
    """Rows 136a and 136g."""
    params, x = placed(where), ROWS[:size]
    value, (dparams, dx) = jax.value_and_grad(loss(DP), (0, 1))(params, x)
    want_value, want = jax.value_and_grad(loss(model), (0, 1))(PARAMS, x)
    close((value, (dparams, dx)), (want_value, want))
    home = set(jax.devices()[:N]) if where == "replicated" else {jax.devices()[0]}
    assert devices_of(dparams) == [home] * 2


@pytest.mark.one_case
@pytest.mark.parametrize("where", INSIDE)
@pytest.mark.parametrize("size", [0, 8, 10])
def test_under_jit(where, size):
    params, x = placed(where), ROWS[:size]
    close(JITTED["call"](params, x), model(PARAMS, x))
    want = jax.value_and_grad(loss(model), (0, 1))(PARAMS, x)
    close(JITTED["grad outside"](params, x), want)
    if size == 10:
        close(JITTED["grad inside"](params, x), want)


JITTED = {
    "call": jax.jit(DP.apply),
    "grad inside": jax.value_and_grad(jax.jit(lambda p, x: loss(DP)(p, x)), (0, 1)),
    "grad outside": jax.jit(jax.value_and_grad(lambda p, x: loss(DP)(p, x), (0, 1))),
}


def test_one_device_takes_committed_parameters_under_jit():
    params = placed("primary")
    close(jax.jit(ONE)(params, ROWS), model(PARAMS, ROWS))
    close(jax.jit(jax.grad(loss(ONE)))(params, ROWS), jax.grad(loss(model))(PARAMS, ROWS))


@pytest.mark.parametrize("where", INSIDE)
def test_gradient_of_inputs_of_other_placements(where):
    """An input on any device: its gradient comes back to it."""
    x = jax.device_put(ROWS, jax.devices()[6])
    dx = jax.grad(loss(DP), 1)(placed(where), x)
    close(dx, jax.grad(loss(model), 1)(PARAMS, ROWS))
    assert dx.devices() == x.devices()


def test_two_backward_passes_add_up_and_the_same_call_may_be_used_twice():
    """Row 136b."""

    def twice(apply):
        return lambda p: jnp.sum(apply(p, ROWS) * apply(p, ROWS[:7]).sum())

    close(jax.grad(twice(DP))(PARAMS), jax.grad(twice(model))(PARAMS))
    close(jax.grad(twice(DP))(placed("replicated")), jax.grad(twice(model))(PARAMS))


def test_frozen_and_unused_parameters_have_zero_gradients():
    """Rows 136c and 136e."""
    dp = jdp.DataParallel(lambda p, x: x * lax.stop_gradient(p["frozen"]) * p["used"], devices=range(N))
    params = {"frozen": np.float32(2), "used": np.float32(3), "unused": np.ones(2, np.float32)}
    grads = jax.grad(lambda p: dp(p, ROWS).sum())(params)
    assert float(grads["frozen"]) == 0 and float(grads["used"]) == pytest.approx(2 * ROWS.sum(), rel=1e-5)
    np.testing.assert_array_equal(grads["unused"], [0, 0])


def test_gradients_with_respect_to_state():
    """Row 78: a buffer may be differentiated."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.variable("buffers", "scale", jnp.ones, (3,)).value

    dp = jdp.DataParallel(Net(), devices=range(N))
    variables = dp.init(jax.random.key(0), ROWS)
    grads = jax.grad(lambda v: jnp.sum(dp.apply(v, ROWS) ** 2))(variables)
    close(grads["buffers"]["scale"], 2 * np.sum(ROWS**2, 0))


# --- vjp, jvp, higher derivatives ---


@pytest.mark.parametrize("where", WHERE)
def test_vjp(where):
    x = ROWS
    cotangent = np.cos(np.arange(20, dtype=np.float32)).reshape(10, 2)
    y, back = jax.vjp(DP, placed(where), x)
    want, want_back = jax.vjp(model, PARAMS, x)
    close(y, want)
    close(back(jax.device_put(cotangent, y.sharding)), want_back(cotangent))


@pytest.mark.one_case
@pytest.mark.parametrize("where", INSIDE)
def test_jvp_and_linearize(where):
    params, x = placed(where), ROWS
    tangents = jax.tree.map(jnp.ones_like, (params, x))
    # Compiled as DP is: JAX's way through the operations one by one rounds a sum elsewhere.
    want = jax.jit(functools.partial(jax.jvp, model))((PARAMS, x), jax.tree.map(np.ones_like, (PARAMS, x)))
    close(jax.jvp(DP, (params, x), tangents), want)
    y, linear = jax.linearize(DP, params, x)
    close((y, linear(*tangents)), want)


@pytest.mark.full
def test_hessian_and_jacobians():
    x = ROWS[:5]
    got = jax.jit(jax.hessian(lambda p: loss(DP)(p, x)))(placed("replicated"))
    close(got, jax.jit(jax.hessian(lambda p: loss(model)(p, x)))(PARAMS), rtol=1e-4, atol=1e-5)
    close(jax.jacrev(DP)(PARAMS, x), jax.jacrev(model)(PARAMS, x))
    close(jax.jacfwd(DP)(PARAMS, x), jax.jacfwd(model)(PARAMS, x))


@pytest.mark.full
@pytest.mark.parametrize("where", ["host", "replicated"])
def test_gradient_penalty(where):
    """Row 136h: the derivative of a derivative, outside jit."""

    def penalty(apply):
        return lambda p: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(apply(p, x))))(ROWS) ** 2)

    close(jax.grad(penalty(DP))(placed(where)), jax.grad(penalty(model))(PARAMS), rtol=1e-4)


def test_hessian_vector_product():
    def hvp(apply, params, v):
        return jax.jvp(jax.grad(lambda p: loss(apply)(p, ROWS)), (params,), (v,))[1]

    v = jax.tree.map(np.ones_like, PARAMS)
    close(jax.jit(lambda p, v: hvp(DP, p, v))(PARAMS, v), hvp(model, PARAMS, v), rtol=1e-4)


# --- vmap ---


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("size", [8, 10])
def test_vmap_over_parameters(size):
    """An ensemble, each member over all devices."""
    stack = jax.tree.map(lambda w: np.stack([w, 2 * w, -w]), PARAMS)
    x = ROWS[:size]
    want = jax.vmap(model, (0, None))(stack, x)
    close(jax.vmap(DP, (0, None))(stack, x), want)
    if size == 8:
        return
    close(jax.jit(jax.vmap(DP, (0, None)))(stack, x), want)
    got = jax.vmap(jax.grad(loss(DP)), (0, None))(stack, x)
    close(got, jax.vmap(jax.grad(loss(model)), (0, None))(stack, x))


def test_vmap_over_inputs():
    x = np.stack([ROWS, ROWS[::-1]])
    for axis in (0, 1, 2):
        xs = np.moveaxis(x, 0, axis)
        close(jax.vmap(lambda x: DP(PARAMS, x), axis)(xs), jax.vmap(lambda x: model(PARAMS, x), axis)(xs))
    replicated = placed("replicated")
    close(jax.vmap(lambda x: DP(replicated, x))(x), jax.vmap(lambda x: model(PARAMS, x))(x))


def test_vmap_whose_axis_has_the_name_of_the_replicas_axis_is_refused(refused):
    xs = np.stack([ROWS[:5], 2 * ROWS[:5]])
    close(DP(PARAMS, xs[0]), model(PARAMS, xs[0]))  # a program that is known outside of the vmap is not taken inside
    with refused(ValueError, "DataParallel", r"axis_name='data'\), and the .*axis_name='replicas'"):
        jax.vmap(lambda x: DP(PARAMS, x), axis_name="data")(xs)
    named = jdp.DataParallel(model, range(N), axis_name="replicas")
    close(jax.vmap(lambda x: named(PARAMS, x), axis_name="data")(xs), jax.vmap(lambda x: model(PARAMS, x))(xs))


# --- scan, checkpoint, control flow ---


def descend(apply, params, xs):
    """SGD in one scan."""

    def step(params, x):
        value, grads = jax.value_and_grad(loss(apply))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return lax.scan(step, params, xs)


@pytest.mark.one_case
@pytest.mark.parametrize("where", INSIDE)
def test_scan(where):
    xs = np.stack([ROWS[:5], ROWS[5:], 2 * ROWS[:5]])
    want = descend(model, PARAMS, xs)
    if where != "host":
        close(descend(DP, placed(where), xs), want)
    close(jax.jit(lambda p, xs: descend(DP, p, xs))(placed(where), xs), want)
    if where == "uncommitted":
        got = jax.grad(lambda p: descend(DP, p, xs)[1].sum())(placed(where))
        close(got, jax.grad(lambda p: descend(model, p, xs)[1].sum())(PARAMS), rtol=1e-4)


LOOPS = {
    "scan": lambda call: lax.scan(lambda total, k: (total + call(k).sum(), None), 0.0, jnp.arange(1.0, 4))[0],
    "fori_loop": lambda call: lax.fori_loop(1, 4, lambda i, total: total + call(i).sum(), 0.0),
    "cond": lambda call: lax.cond(jnp.float32(1) > 0, lambda: call(2.0).sum(), lambda: (call(1.0) ** 2).sum()),
    "map": lambda call: lax.map(call, jnp.arange(1.0, 4)).sum(),
}


@pytest.mark.full
@pytest.mark.parametrize("rows", ["host", "uncommitted"])
@pytest.mark.parametrize("where", INSIDE)
@pytest.mark.parametrize("loop", LOOPS)
def test_an_eager_gradient_of_a_loop_over_what_it_closes_over(loop, where, rows):
    """The body is a program of JAX's: what is differentiated outside of it must not be committed to devices there."""
    small = ROWS / 4  # where tanh is not flat
    x = placed(rows, small)

    def of(apply):
        return lambda params, x: LOOPS[loop](lambda k: apply(params, x * k))

    got = jax.grad(of(DP), argnums=(0, 1))(placed(where), x)
    close(got, jax.grad(of(model), argnums=(0, 1))(PARAMS, small))
    got = jax.grad(lambda params: of(DP)(params, x))(placed(where))
    close(got, jax.grad(lambda params: of(model)(params, small))(PARAMS))


@pytest.mark.full
@pytest.mark.parametrize("where", ["uncommitted", "replicated"])
def test_checkpoint(where):
    want = jax.grad(loss(model), (0, 1))(PARAMS, ROWS)
    close(jax.grad(jax.checkpoint(loss(DP)), (0, 1))(placed(where), ROWS), want)
    close(jax.jit(jax.grad(loss(jax.checkpoint(DP)), (0, 1)))(placed(where), ROWS), want)
    inside = jdp.DataParallel(jax.checkpoint(model), devices=range(N))  # and in the model itself
    close(jax.grad(loss(inside), (0, 1))(placed(where), ROWS), want)


def test_cond_and_while_and_fori_loop():
    f = jax.jit(lambda flag, x: lax.cond(flag, lambda x: DP(PARAMS, x), lambda x: -DP(PARAMS, x), x))
    close(f(True, ROWS), model(PARAMS, ROWS))
    close(f(False, ROWS), -model(PARAMS, ROWS))
    square = jdp.DataParallel(lambda w, x: jnp.tanh(x @ w), devices=range(N))
    w = np.eye(3, dtype=np.float32)
    got = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, x: square(w, x), x))(ROWS)
    close(got, np.tanh(np.tanh(np.tanh(ROWS))))


def test_custom_derivatives_inside_the_model():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

    def clipped(p, x):
        return clip(x @ p["w"]) * 3

    dp = jdp.DataParallel(clipped, devices=range(N))
    close(jax.grad(loss(dp), (0, 1))(PARAMS, ROWS), jax.grad(loss(clipped), (0, 1))(PARAMS, ROWS))


def test_shapes_without_running():
    shape = jax.eval_shape(DP, PARAMS, ROWS)
    assert shape.shape == (10, 2) and shape.dtype == np.float32
    assert jax.jit(DP).lower(PARAMS, ROWS).compile()(PARAMS, ROWS).shape == (10, 2)


# --- the whole: state, keys and an optimizer under jit ---


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, use_fast_variance=False)(x)
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=False)(jnp.tanh(x)))


@pytest.mark.full
def test_a_training_step_of_optax_inside_and_outside_jit_is_the_same():
    net, tx, x = Net(), optax.adam(0.01), ROWS
    dp = jdp.DataParallel(net, devices=range(N))
    variables = dp.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def step(variables, opt_state, key):
        def loss(params):
            y, state = dp.apply({**variables, "params": params}, x, rngs={"dropout": key}, mutable=["batch_stats"])
            return jnp.mean((y - 1) ** 2), state

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, opt_state = tx.update(grads, opt_state)
        return {"params": optax.apply_updates(variables["params"], updates), **state}, opt_state, value

    results = []
    for run in (step, jax.jit(step)):
        now, opt_state = variables, tx.init(variables["params"])
        losses = []
        for i in range(2):
            now, opt_state, value = run(now, opt_state, jax.random.key(i))
            losses.append(float(value))
        results.append((now, losses))
        assert all(home == set(jax.devices()[:N]) for home in devices_of(now))
    close(results[0][1], results[1][1], rtol=1e-4)
    close(results[0][0]["batch_stats"], results[1][0]["batch_stats"], rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_keys_under_jit_and_scan_draw_as_outside():
    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(x)

    dp = jdp.DataParallel(Drop(), devices=range(N))
    x, keys = np.ones((10, 8), np.float32), jax.random.split(jax.random.key(0), 2)
    eager = [dp.apply({}, x, rngs={"dropout": key}) for key in keys]
    jitted = jax.jit(lambda key: dp.apply({}, x, rngs={"dropout": key}))
    _, scanned = jax.jit(lambda keys: lax.scan(lambda c, key: (c, jitted(key)), 0, keys))(keys)
    for want, key, got in zip(eager, keys, scanned, strict=True):
        np.testing.assert_array_equal(jitted(key), want)
        np.testing.assert_array_equal(got, want)
    assert not np.array_equal(eager[0], eager[1])


def test_output_device_under_a_transformation_keeps_the_values():
    """Under tracing, values are the same and stay on the replicas."""
    for where in (5, "sharded"):
        dp = jdp.DataParallel(model, devices=range(N), output_device=where)
        close(jax.jit(dp)(PARAMS, ROWS), model(PARAMS, ROWS))
        close(jax.grad(loss(dp))(PARAMS, ROWS), jax.grad(loss(model))(PARAMS, ROWS))
        close(jax.grad(loss(dp))(placed("replicated"), ROWS), jax.grad(loss(model))(PARAMS, ROWS))


@pytest.mark.full
def test_devices_other_than_jaxs_first():
    """Host parameters under jit and grad on devices 5 and 3."""
    dp = jdp.DataParallel(model, devices=[5, 3])
    close(jax.jit(dp)(PARAMS, ROWS), model(PARAMS, ROWS))
    want = jax.grad(loss(model))(PARAMS, ROWS)
    close(jax.grad(loss(dp))(PARAMS, ROWS), want)
    replicated = jdp.replicate(PARAMS, [5, 3])
    grads = jax.grad(loss(dp))(replicated, ROWS)
    close(grads, want)
    assert devices_of(grads) == [{jax.devices()[5], jax.devices()[3]}] * 2
    primary = jax.device_put(PARAMS, jax.devices()[5])
    grads = jax.grad(loss(dp))(primary, ROWS)
    close(grads, want)
    assert devices_of(grads) == [{jax.devices()[5]}] * 2


def test_donated_arguments_of_a_users_jit():
    """The user's own donation is safe: nothing jdp made aliases what it was given."""
    step = jax.jit(lambda p, x: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss(DP))(p, x)), donate_argnums=0)
    params, want = placed("replicated"), PARAMS
    for _ in range(3):
        params = step(params, ROWS)
        want = jax.tree.map(lambda w, g: w - 0.1 * g, want, jax.grad(loss(model))(want, ROWS))
    close(params, want, rtol=1e-4)
    np.testing.assert_array_equal(PARAMS["b"], [0.5, -0.5])
