"""Programs that run in pieces: the numbers of the whole program, with each parameter gathered where it is used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp._jax.jaxprs import equations
from jdp._jax.pieces import ShardedOperand, run_in_pieces, run_over

RANDOM = np.random.default_rng(0)
W = {
    "a": RANDOM.normal(size=(4, 6)).astype(np.float32),
    "b": RANDOM.normal(size=(6, 6)).astype(np.float32) / 2,
    "stack": RANDOM.normal(size=(3, 6, 6)).astype(np.float32) / 2,
}
H = RANDOM.normal(size=(5, 4)).astype(np.float32)


def model(w, x):
    h = jax.jit(lambda h, w: jnp.tanh(h @ w["a"]) @ w["b"])(x, w)
    h, rows = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), h, w["stack"])
    return h @ w["b"].T, rows


def loss(w, x):
    out, rows = model(w, x)
    return jnp.mean(out**2) + 0.1 * jnp.sum(rows**2)


def plain(fn):
    """The reference: JAX alone."""
    return fn(jax.tree.map(jnp.asarray, W), jnp.asarray(H))


class Gathers:
    """Gathers what was not cut at all, and remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, x, axis, dtype):
        self.asked.append((x.shape, axis, jnp.dtype(dtype).name))
        return x.astype(dtype)


def in_pieces(fn, w, x, most, gather, axis=1):
    """`fn(w, x)`, with all of `w` cut along an axis."""
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(w, x)
    operands = [ShardedOperand(leaf, axis, gather) for leaf in jax.tree.leaves(w)]
    return jax.tree.unflatten(jax.tree.structure(shapes), run_in_pieces(jaxpr, [*operands, x], most))


@pytest.mark.full
@pytest.mark.one_case("200")
@pytest.mark.parametrize("most", [0, 200, 1 << 20])
def test_values_and_gradients_are_those_of_the_whole_program(most):
    """Bit for bit: no sum is taken in another order."""
    for got, want in zip(in_pieces(model, W, H, most, Gathers()), plain(model), strict=True):
        np.testing.assert_array_equal(got, want)
    run = functools.partial(in_pieces, loss, most=most, gather=Gathers())
    got, want = jax.grad(run, argnums=(0, 1))(W, H), jax.grad(loss, argnums=(0, 1))(W, H)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6), got, want)


def test_each_piece_gathers_what_it_uses_once():
    """In small pieces what is used twice is gathered twice; of a stack one layer at a time."""
    asked = Gathers()
    jax.eval_shape(functools.partial(in_pieces, model, most=0, gather=asked), W, H)
    layer = ((6, 6), 0, "float32")
    assert sorted(asked.asked) == sorted(
        [((4, 6), 1, "float32"), ((6, 6), 1, "float32"), layer, ((6, 6), 1, "float32")]
    )
    # The axis of a scan itself cannot be gathered in its body.
    asked = Gathers()
    jax.eval_shape(functools.partial(in_pieces, model, most=1 << 20, gather=asked, axis=0), W, H)
    assert ((3, 6, 6), 0, "float32") in asked.asked and ((6, 6), -1, "float32") not in asked.asked


@pytest.mark.parametrize("most, gathers", [(0, 3), (4 * 4 * 6 + 4 * 6 * 6, 2), (1 << 20, 2)])
def test_a_piece_has_so_many_bytes_of_parameters_or_one(most, gathers):
    asked = Gathers()
    in_pieces(lambda w, x: jnp.tanh(x @ w["a"] @ w["b"]) @ w["a"].T, W, H, most, asked)
    assert len(asked.asked) == gathers


def test_nothing_is_gathered_that_is_not_used():
    asked = Gathers()
    in_pieces(lambda w, x: jnp.sum(x @ w["a"]), W, H, 0, asked)
    assert asked.asked == [((4, 6), 1, "float32")]


@pytest.mark.parametrize("narrow, travels", [(jnp.bfloat16, "bfloat16"), (jnp.float32, "float32")])
def test_a_parameter_travels_in_the_narrow_dtype_that_it_is_cast_to(narrow, travels):
    fn = lambda w, x: (x.astype(narrow) @ w["a"].astype(narrow).T.T).astype(jnp.float32)  # noqa: E731
    asked = Gathers()
    np.testing.assert_array_equal(in_pieces(fn, W, H, 0, asked), plain(fn))
    assert asked.asked == [((4, 6), 1, travels)]


def test_a_parameter_that_is_used_in_two_dtypes_travels_in_its_own():
    fn = lambda w, x: x @ w["a"] + (x.astype(jnp.bfloat16) @ w["a"].astype(jnp.bfloat16))  # noqa: E731
    asked = Gathers()
    np.testing.assert_array_equal(in_pieces(fn, W, H, 1 << 20, asked), plain(fn))
    assert asked.asked == [((4, 6), 1, "float32")]


def test_integers_do_not_make_a_float_travel_as_an_integer():
    fn = lambda w, x: x @ w["a"].astype(jnp.int8).astype(jnp.float32)  # noqa: E731
    asked = Gathers()
    np.testing.assert_array_equal(in_pieces(fn, W, H, 0, asked), plain(fn))
    assert asked.asked == [((4, 6), 1, "float32")]


@pytest.mark.full
@pytest.mark.parametrize("dtypes", [(jnp.int8,), (bool,), (jnp.float16, jnp.bfloat16), (jnp.bfloat16,)])
def test_casts_before_a_scan_are_made_one_after_the_other(dtypes):
    """Each rounds, and an integer has no gradient."""

    def fn(w, x):
        stack = w["stack"]
        for dtype in (*dtypes, jnp.float32):
            stack = stack.astype(dtype)
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ w["a"], stack)[0].sum()

    run = functools.partial(in_pieces, fn, most=0, gather=Gathers())
    got, want = jax.value_and_grad(run)(W, H), jax.value_and_grad(fn)(W, H)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6), got, want)


def test_results_that_are_parameters_literals_or_inputs_are_given_back():
    fn = lambda w, x: (w["a"], w["b"].T, x, 3.0, len(x), w["a"])  # noqa: E731
    for got, want in zip(in_pieces(fn, W, H, 0, Gathers()), plain(fn), strict=True):
        np.testing.assert_array_equal(got, want)
        assert isinstance(got, jax.Array | np.ndarray)


def test_what_a_loop_or_a_checkpoint_gathers_may_be_a_result_too():
    fn = lambda w, x: (model(w, x), w["stack"], jax.checkpoint(jnp.matmul)(x, w["a"]), w["a"])  # noqa: E731
    got, want = in_pieces(fn, W, H, 0, Gathers(), axis=1), plain(fn)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_program_without_parameters_runs_as_it_is():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), 2 * x))(H)
    for got, want in zip(run_in_pieces(jaxpr, [H], 0), (np.sin(H), 2 * H), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_products_are_not_computed_twice_and_what_is_element_by_element_is():
    """In the backward pass: as many products as without pieces, and each tanh once more at most."""

    def count(jaxpr, name):
        found = 0
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found += eqn.primitive.name == name
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(value, "eqns"):
                    found += count(value, name)
        return found

    plain = jax.make_jaxpr(jax.grad(loss))(W, H)
    for most in (0, 200, 1 << 20):
        pieces = jax.make_jaxpr(jax.grad(functools.partial(in_pieces, loss, most=most, gather=Gathers())))(W, H)
        assert count(pieces, "dot_general") == count(plain, "dot_general"), most
        assert count(plain, "tanh") <= count(pieces, "tanh") <= 2 * count(plain, "tanh"), most


def test_what_scans_run_over_is_found():
    """Through casts, transposes, calls, checkpoints and other scans; what a scan closes over is not run over."""

    def function(a, b, c, d, x):
        def outer(x, w):
            inner = jax.checkpoint(lambda x, row: (x + row.sum() + d.sum(), None))
            return jax.lax.scan(inner, x, w.T)[0], None

        x, _ = jax.lax.scan(outer, x, a)
        x, _ = jax.jit(lambda x, b: jax.lax.scan(lambda x, w: (x + w.sum(), None), x, jnp.moveaxis(b, 2, 0)))(x, b)
        return x, c * 2

    shapes = [jnp.zeros(shape) for shape in ((2, 3, 4), (5, 6, 7), (8,), (9,), ())]
    jaxpr = jax.make_jaxpr(function)(*shapes)
    assert run_over(jaxpr, 4) == {(0, 0), (0, 2), (1, 2)}
    assert run_over(jaxpr, 1) == {(0, 0), (0, 2)}


def products(fn, *operands):
    """How many products a program computes: those with a batch axis, and the others."""
    counts = {True: 0, False: 0}
    for eqn in equations(jax.make_jaxpr(fn)(*operands).jaxpr):
        if eqn.primitive.name == "dot_general":
            counts[bool(eqn.params["dimension_numbers"][1][0])] += 1
    return counts


def test_products_of_rows_with_each_other_are_made_again_and_those_with_parameters_are_kept():
    """Of attention the scores, and not what parameters make, also those of experts, which have a batch axis."""
    w = {"key": np.ones((6, 8), np.float32), "experts": np.ones((2, 8, 5), np.float32)}
    x = RANDOM.normal(size=(4, 4, 6)).astype(np.float32)

    def attention(w, x):
        key = x @ w["key"]
        out = jax.nn.softmax(jnp.einsum("btd,bsd->bts", key, key)) @ key
        return jnp.mean(jnp.einsum("gnd,gdf->gnf", jnp.tanh(out).reshape(2, 8, 8), w["experts"]) ** 2)

    plainly = products(jax.grad(attention), w, x)
    found = products(jax.grad(functools.partial(in_pieces, attention, most=1 << 20, gather=Gathers())), w, x)
    assert found[False] == plainly[False] and found[True] == plainly[True] + 2  # the scores, and what is made of them
