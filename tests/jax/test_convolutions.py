"""Convolutions rewritten into the layout that XLA's CPU compiler is fast at: the same numbers, in that one layout."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp._jax import convolutions
from jdp._jax.convolutions import canonical

rng = np.random.default_rng(0)
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def layouts(fn, *operands):
    """The layouts of all convolutions in the program, before XLA changes any."""
    return re.findall(r"dim_numbers = (\[.+?\]->\[.+?\])", jax.jit(fn).lower(*operands).as_text())


def is_fast(layout):
    space = ", ".join(map(str, range(layout.count(",") // 3 - 1)))
    return layout == f"[b, {space}, f]x[{space}, i, o]->[b, {space}, f]"


def convolution(numbers, window_strides=None, padding=1, **options):
    def fn(x, kernel):
        n = x.ndim - 2
        strides, pads = window_strides or (1,) * n, [(padding, padding)] * n
        return jax.lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=numbers, **options)

    return fn


def derivatives(fn):
    """A function that gives what `fn` gives, and its derivatives of both modes and orders, in batches too."""

    def loss(x, kernel):
        return jnp.sum(jnp.sin(fn(x, kernel).astype(jnp.float32)))

    def slope(x, kernel):
        return sum(jnp.sum(jnp.cos(g.astype(jnp.float32))) for g in grad(x, kernel))

    grad = jax.grad(loss, argnums=(0, 1))

    def run(x, kernel):
        at, two = (x, kernel), (jnp.stack([x, 2 * x]), jnp.stack([kernel, -kernel]))
        return {
            "value": fn(*at),
            "reverse": grad(*at),
            "forward": jax.jvp(fn, at, at)[1],
            "forward over reverse": jax.jvp(grad, at, at)[1],
            "reverse over reverse": jax.grad(slope, argnums=(0, 1))(*at),
            "of a batch of inputs": jax.vmap(grad, in_axes=(0, None))(two[0], kernel),
            "of a batch of kernels": jax.vmap(grad, in_axes=(None, 0), out_axes=-1)(x, two[1]),
            "of batches of both": jax.vmap(grad)(*two),
        }

    return run


CASES = {
    "NCHW": ((3, 4, 5, 6), (5, 4, 3, 2), NCHW, {"window_strides": (2, 1)}),
    "1d": ((3, 7, 4), (3, 4, 5), ("NWC", "WIO", "NWC"), {}),
    "mixed, dilated": ((3, 7, 6, 4), (3, 2, 4, 5), ("NHWC", "HWIO", "NCHW"), {"rhs_dilation": (2, 1)}),
    "3d in groups": ((2, 4, 5, 4, 3), (6, 2, 3, 2, 2), ("NCDHW", "OIDHW", "NDHWC"), {"feature_group_count": 2}),
    "depthwise": ((3, 5, 5, 3), (3, 3, 1, 6), NHWC, {"feature_group_count": 3, "padding": 0}),
    "batch in groups": ((4, 4, 3, 2), (3, 3, 2, 4), NHWC, {"lhs_dilation": (2, 2), "batch_group_count": 2}),
    "bf16": ((3, 5, 5, 4), (3, 3, 4, 5), NHWC, {"preferred_element_type": jnp.float32}),
}


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("x, kernel, numbers, options", CASES.values(), ids=CASES)
def test_all_derivatives_are_the_same_and_fast(x, kernel, numbers, options):
    dtype = jnp.bfloat16 if "preferred_element_type" in options else jnp.float32
    x, kernel = jnp.asarray(rng.normal(size=x), dtype), jnp.asarray(rng.normal(size=kernel), dtype)
    fn = convolution(numbers, **options)
    rewritten = jax.extend.core.jaxpr_as_fun(canonical(jax.make_jaxpr(fn)(x, kernel)))
    new = derivatives(lambda x, kernel: rewritten(x, kernel)[0])
    got, want = jax.jit(new)(x, kernel), jax.jit(derivatives(fn))(x, kernel)
    for name in want:
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            # Rounding of sums, which XLA adds in another order: 2 to 4 units in the last place of the largest number.
            scale = np.abs(b).max() * (2e-2 if dtype == jnp.bfloat16 else 4e-6)
            np.testing.assert_allclose(a, b, rtol=0, atol=max(scale, 1e-6), err_msg=name)
    before, after = layouts(derivatives(fn), x, kernel), layouts(new, x, kernel)
    assert not all(map(is_fast, before)) and len(after) >= 10 and all(map(is_fast, after))


def test_outputs_and_gradients_are_the_same_in_a_loop():
    """Of a jaxpr that holds the gradient, too, as that of a step does."""
    x, kernel = rng.normal(size=(3, 4, 5, 6)).astype(np.float32), rng.normal(size=(5, 4, 3, 2)).astype(np.float32)
    grad = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(convolution(NCHW)(x, kernel))), argnums=(0, 1))

    def fn(x, kernel):
        def body(carry, _):  # in a loop, and in a call
            return jax.tree.map(jnp.add, carry, jax.jit(grad)(x, kernel)), None

        return jax.lax.scan(body, (jnp.zeros_like(x), jnp.zeros_like(kernel)), length=2)[0]

    rewritten = jax.extend.core.jaxpr_as_fun(canonical(jax.make_jaxpr(fn)(x, kernel)))
    for a, b in zip(jax.jit(rewritten)(x, kernel), jax.jit(fn)(x, kernel), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    before, after = layouts(fn, x, kernel), layouts(rewritten, x, kernel)
    assert not any(map(is_fast, before)) and len(after) == len(before) == 3 and all(map(is_fast, after))


@pytest.mark.full
def test_the_gradient_through_an_uneven_call_is_fast():
    def model(kernel, x):
        return jnp.flip(jnp.flip(jnp.tanh(convolution(NCHW)(x, kernel)), 0), 0)  # rows that move: in a switch

    def gradients(model):
        def loss(kernel, x):
            return jnp.sum(jnp.sin(model(kernel, x)))

        grad = jax.value_and_grad(loss, argnums=(0, 1))
        return grad, lambda kernel, x: jax.jvp(grad, (kernel, x), (kernel, x))[1]

    kernel, x = rng.normal(size=(2, 3, 3, 3)).astype(np.float32), rng.normal(size=(10, 3, 4, 4)).astype(np.float32)
    for got, want in zip(gradients(jdp.DataParallel(model, range(4))), gradients(model), strict=True):
        for run in (got, jax.jit(got)):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(kernel, x), want(kernel, x)
            )
        found = layouts(got, kernel, x)
        assert len(found) >= 6 and all(map(is_fast, found))


def test_without_convolutions_the_very_same_jaxpr_comes_back():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x))(np.ones(3))
    assert canonical(jaxpr) is jaxpr


@pytest.fixture
def unknown():
    """Forgets the primitive, before and after: what is changed for the test is in no other one."""
    made = convolutions._primitive, convolutions._try
    for function in made:
        function.cache_clear()
    yield
    for function in made:
        function.cache_clear()


@pytest.mark.parametrize("name", ["_fast_convolution", "_transposed_to_x", "_transposed_to_kernel", "_batched"])
def test_where_jax_calls_what_is_put_in_place_otherwise_the_jaxpr_stays(unknown, monkeypatch, name):
    monkeypatch.setattr(convolutions, name, lambda: None)
    jaxpr = jax.make_jaxpr(convolution(NCHW))(np.ones((1, 1, 3, 3)), np.ones((1, 1, 3, 3)))
    assert canonical(jaxpr) is jaxpr


@pytest.mark.parametrize("name", ["ad.defbilinear", "batching.primitive_batchers", "mlir.lower_fun"])
def test_where_jax_has_no_such_name_the_jaxpr_stays(unknown, monkeypatch, name):
    monkeypatch.delattr(f"jax.interpreters.{name}")
    jaxpr = jax.make_jaxpr(convolution(NCHW))(np.ones((1, 1, 3, 3)), np.ones((1, 1, 3, 3)))
    assert canonical(jaxpr) is jaxpr
