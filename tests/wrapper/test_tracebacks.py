"""A traceback leads from the user's call to the user's code: jdp's frames between the two are left out."""

import os
import traceback

import jax
import numpy as np
import optax
import pytest

import jdp
from jdp._train import value_and_grad

X, W = np.ones((6, 4), np.float32), {"params": np.ones((4, 3), np.float32)}
OWN = os.path.dirname(jdp.__file__) + os.sep


@pytest.fixture(autouse=True)
def as_for_users():
    """The other tests show all frames."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def wrong(w, x):
    raise LookupError("of the user")


def total(w, x):
    return (x @ w["params"]).sum()


def doors(fn):
    dp = jdp.DataParallel(fn, devices=range(2))
    step = dp.train_step(fn, optax.sgd(0.1))
    return {
        "apply": lambda: dp(W, X),
        "jit": lambda: jax.jit(dp.apply)(W, X),
        "value_and_grad": lambda: dp.value_and_grad(fn)(W, X),
        "criterion": lambda: dp.value_and_grad(lambda w, x: x, criterion=lambda out, x: fn(W, x))(W, X),
        "train_step": lambda: step(step.init(W), X),
        "check": lambda: step.check(step.init(W), X),
        "evaluate": lambda: dp.evaluate(lambda w, x: {"a": fn(w, x)}, W, [X]),
        "parallel": lambda: dp.parallel(fn)(W, X),
        "parallel_apply": lambda: jdp.parallel_apply(fn, jdp.replicate(W, range(2)), jdp.scatter((X,), range(2))),
    }


def raised(call, error):
    with pytest.raises(error) as info:
        call()
    frames = traceback.extract_tb(info.value.__traceback__)
    return [x for x in frames if x.filename.startswith(OWN)], [x for x in frames if not x.filename.startswith(OWN)]


@pytest.mark.parametrize("door", doors(wrong))
def test_an_error_of_the_users_function_ends_there(door):
    own, others = raised(doors(wrong)[door], LookupError)
    assert len(own) <= 3  # the door, and what is around it
    assert others[-1].name == "wrong" and others[-1].filename == __file__


@pytest.mark.parametrize("door", ["value_and_grad", "train_step", "evaluate"])
def test_an_error_of_jdps_own_ends_at_the_door(door):
    own, others = raised(doors(total)[door], TypeError)
    assert len(own) <= 3 and others[-1].filename == __file__


def test_an_error_inside_of_jdp_keeps_all_frames(monkeypatch):
    """It has to be mended there."""

    monkeypatch.setattr(value_and_grad, "dispatch", None)
    own, _ = raised(doors(lambda w, x: total(w, x) / len(x))["value_and_grad"], TypeError)
    assert len(own) > 3 and own[-1].name == "<lambda>"


def test_jaxs_own_setting_keeps_all_frames():
    jax.config.update("jax_traceback_filtering", "off")
    own, _ = raised(doors(wrong)["train_step"], LookupError)
    assert len(own) > 10
