"""Adjoints of other libraries, which compare the types of values in both passes, run inside of a replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import close

import jdp

ROWS = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
WEIGHT = 0.3 * np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)


def library(name):
    """Imports a package when a case begins, because each worker collects this file and few run it."""
    return pytest.importorskip(name, reason='needs pip install ".[adjoints]"')


def equation(weight, rows):
    """A differential equation for each row."""
    diffrax = library("diffrax")

    def solve(row):
        term = diffrax.ODETerm(lambda _, y, weight: jnp.tanh(y @ weight))
        return diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.1, row, args=weight).ys[-1]

    return jax.vmap(solve)(rows)


def loop(weight, rows):
    loops = library("equinox.internal")

    def body(carry):
        i, y = carry
        return i + 1, jnp.tanh(y @ weight)

    return loops.while_loop(lambda carry: carry[0] < 5, body, (0, rows), kind="checkpointed", max_steps=16)[1]


def losses(model):
    return lambda weight, rows: (model(weight, rows) ** 2).mean(1)


def mean_of_squares(outputs, rows):
    return (outputs**2).mean()


DOORS = {
    "value_and_grad": lambda dp, model: dp.value_and_grad(losses(model)),
    "accumulate": lambda dp, model: dp.value_and_grad(losses(model), accumulate_steps=2),
    "criterion": lambda dp, model: dp.value_and_grad(model, criterion=mean_of_squares),
    "jax.grad": lambda dp, model: jax.value_and_grad(lambda w, x: mean_of_squares(dp(w, x), x)),
    "criterion, accumulate": lambda dp, model: dp.value_and_grad(model, criterion=mean_of_squares, accumulate_steps=2),
}


def check(model, door, n, rows):
    expected = jax.value_and_grad(lambda w: losses(model)(w, ROWS[:rows]).mean())(WEIGHT)
    found = DOORS[door](jdp.DataParallel(model, range(n)), model)(WEIGHT, ROWS[:rows])
    close(jax.device_get(found), jax.device_get(expected), rtol=1e-4)


@pytest.mark.full
@pytest.mark.one_case("jax.grad-4-10")
@pytest.mark.parametrize(("n", "rows"), [(1, 8), (4, 8), (4, 10)])
@pytest.mark.parametrize("door", DOORS)
def test_a_loop_of_equinox(door, n, rows):
    check(loop, door, n, rows)


@pytest.mark.full
@pytest.mark.parametrize("door", ["value_and_grad", "criterion", "jax.grad"])
def test_an_equation_of_diffrax(door):
    check(equation, door, 4, 8)


@pytest.mark.full
@pytest.mark.parametrize("criterion", [None, mean_of_squares])
def test_a_step(criterion):
    def forward(variables, rows):
        outputs = loop(variables["params"], rows)
        return outputs if criterion else (outputs**2).mean()

    expected = WEIGHT - 0.1 * jax.grad(lambda w: losses(loop)(w, ROWS).mean())(WEIGHT)
    step = jdp.DataParallel(forward, range(4)).train_step(forward, optax.sgd(0.1), criterion=criterion)
    state, _ = step(step.init({"params": WEIGHT}), ROWS)
    np.testing.assert_allclose(state.params, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_other_derivatives_through_the_wrapper():
    dp = jdp.DataParallel(loop, range(3))
    close(jax.device_get(dp(WEIGHT, ROWS)), jax.device_get(loop(WEIGHT, ROWS)))
    found = jax.jit(jax.jacrev(lambda w: dp(w, ROWS)))(WEIGHT)
    close(jax.device_get(found), jax.device_get(jax.jacrev(lambda w: loop(w, ROWS))(WEIGHT)), rtol=1e-4)


@pytest.mark.full
def test_replicas_that_are_meshes():
    dp = jdp.DataParallel(loop, jax.make_mesh((2, 2), ("data", "model")))
    found = jax.grad(lambda w: mean_of_squares(dp(w, ROWS), ROWS))(WEIGHT)
    close(jax.device_get(found), jax.device_get(jax.grad(lambda w: mean_of_squares(loop(w, ROWS), ROWS))(WEIGHT)))
