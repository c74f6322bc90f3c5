"""A program that is cut at some equations, and what its segments hand to each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp._jax.jaxprs import env_of, evaluate_eqn, read
from jdp._jax.segments import recomputed, segmented

X, W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3), np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


def program(x, w, np=jnp):
    """Cut at its two sines. `twice` is cheap to make of `h`; `h` is a product, and `e` no cheap one."""
    h = x @ w
    twice = 2 * h + 1
    e = np.exp(h)
    mean = np.sin(twice.mean(0))
    y = (twice - mean) * e
    return np.sin(y.sum()) + (y / 3 - h).sum(1)


def cut(fn, *operands):
    return segmented(jax.make_jaxpr(fn)(*operands), lambda eqn: eqn.primitive.name == "sin")


def in_turn(code, *operands):
    """Each segment sees nothing but what it reads: of the operands, of what was kept, and of the cuts."""
    have = dict(zip(code.jaxpr.jaxpr.invars, operands, strict=True))
    for j, eqns in enumerate(code.segments):
        env = env_of(code.jaxpr, [None] * len(operands)) | {v: have[v] for v in code.reads[j]}
        for eqn in [*eqns, *code.cuts[j : j + 1]]:
            evaluate_eqn(eqn, env)
        have |= {v: env[v] for v in [*code.keeps(j), *(v for eqn in code.cuts[j : j + 1] for v in eqn.outvars)]}
    return [read(env, v) for v in code.jaxpr.jaxpr.outvars]


@pytest.mark.parametrize("how", [lambda code: code, recomputed])
def test_the_segments_in_turn_are_the_program(how):
    code = how(cut(program, X, W))
    assert len(code.cuts) == 2
    (out,) = in_turn(code, X, W)
    np.testing.assert_allclose(out, program(np.float64(X), np.float64(W), np), rtol=1e-5)


def test_what_is_cheap_is_made_again_and_not_kept():
    """Of 8 x 4 values after the first cut: h, 2 * h, e at most; made again, only h and e, and no product twice."""
    plain = cut(program, X, W)
    again = recomputed(plain)
    large = [sum(v.aval.shape == (8, 4) for v in code.keeps(0)) for code in (plain, again)]
    assert large == [3, 2]
    names = [eqn.primitive.name for eqns in again.segments[1:] for eqn in eqns]
    assert "dot_general" not in names and "exp" not in names


def test_two_large_ones_are_not_kept_for_the_one_that_is_made_of_them():
    def sums(x, w):
        y = jnp.exp(x) + jnp.cos(x)
        return jnp.sin(x.sum()) + y

    again = recomputed(cut(sums, X, W))
    assert [v.aval.shape for v in again.keeps(0)] == [X.shape]
    assert [eqn.primitive.name for eqn in again.segments[1]] == ["add"]
