"""Only arrays that a step made are donated: what anybody else put into the state is copied first, and stays."""

import concurrent.futures
import gc
import re
import sys
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import INPUTS

import jdp

X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)
VARIABLES = {
    "params": {"w": np.linspace(0, 1, 3, dtype=np.float32), "b": np.float32(0.5)},
    "seen": {"n": np.float32(0)},
}


def loss_fn(variables, x):
    params, n = variables["params"], variables["seen"]["n"]
    return ((x @ params["w"] + params["b"] - 1) ** 2).mean(), {}, {"seen": {"n": n + 1}}


def step_of(n=2, tx=None, **options):
    devices = range(n) if isinstance(n, int) else n
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"] + v["params"]["b"], devices)
    return dp.train_step(loss_fn, tx or optax.adam(0.1), **options)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.a(x)))


def nnx_step(n=2, **options):
    net = Net(nnx.Rngs(0))
    dp = jdp.DataParallel(net, devices=range(n))
    return net, dp.train_step(lambda m, x: ((m(x) - 1) ** 2).mean(), optax.adam(0.1), **options)


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def freed(tree):
    return [x.is_deleted() for x in arrays(tree)]


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def places(tree):
    return {x.addressable_data(0).unsafe_buffer_pointer() for x in arrays(tree)}


@pytest.fixture
def copies(monkeypatch):
    """The shapes of the arrays that a step copies."""
    found, copy = [], jnp.copy
    monkeypatch.setattr("jdp._train.state.jnp.copy", lambda x: found.append(x.shape) or copy(x))
    return found


# --- what others made stays ---


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("clone", [nnx.clone, lambda m: nnx.merge(*nnx.split(m))], ids=["clone", "merge"])
def test_a_clone_of_the_model_from_before_the_first_step_works_after_it(n, clone):
    net, step = nnx_step(n)
    ref, snapshot = clone(net), arrays(nnx.as_pure((nnx.state(net), nnx.state(step.optimizer))))
    was = [np.array(x) if x.dtype == np.float32 else None for x in snapshot]
    for _ in range(3):
        step(X)
    assert ref.a.kernel[...].shape == (3, 4) and ref(X).shape == (16, 4)
    assert not any(freed(snapshot))
    for x, y in zip(snapshot, was, strict=True):
        assert y is None or np.array_equal(x, y)


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2])
def test_what_is_put_into_an_nnx_model_between_steps_stays(n):
    net, step = nnx_step(n)
    step(X)
    mesh = jax.tree.leaves(nnx.state(net))[0].sharding
    mine = jax.device_put(jnp.ones((3, 4)), mesh)
    mu = jax.device_put(jnp.zeros((3, 4)), mesh)
    for _ in range(2):
        nnx.update(net, {"a": {"kernel": mine}})
        step.optimizer.opt_state[0].mu["a"]["kernel"].set_value(mu)
        for _ in range(3):
            step(X)
        assert not mine.is_deleted() and not mu.is_deleted()
        np.testing.assert_array_equal(mine, np.ones((3, 4)))
        np.testing.assert_array_equal(mu, np.zeros((3, 4)))


MADE_BY_HAND = {
    "replace": lambda step, state: state.replace(params=copied(state.params)),
    "all new": lambda step, state: copied(state),
    "built": lambda step, state: jdp.TrainState(**{k: copied(v) for k, v in vars(state).items()}),
    "one device": lambda step, state: jax.device_put(copied(state), jax.devices()[0]),
    "on the host": lambda step, state: jax.tree.map(np.asarray, state),
}


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("make", MADE_BY_HAND.values(), ids=MADE_BY_HAND.keys())
def test_a_state_made_by_hand_stays_and_trains_alike(make, n):
    step, other = step_of(n), step_of(n)
    state = step(step.init(VARIABLES), X)[0]
    expected = copied(state)
    mine = make(step, state)
    theirs = [x for x in jax.tree.leaves(mine) if all(x is not y for y in jax.tree.leaves(state))]
    was = [np.array(x) for x in theirs]
    for taker in (other, step):  # a step that never gave one, and one that did
        after = taker(mine if taker is other else make(step, expected), X)[0]
        again = taker(after, X)[0]
    assert not any(freed(theirs))
    for x, y in zip(theirs, was, strict=True):
        np.testing.assert_array_equal(x, y)
    want = forgetting(n)(expected, X)
    want = forgetting(n)(want, X)
    jax.tree.map(np.testing.assert_array_equal, again, want)


def forgetting(n):
    return lambda state, x: step_of(n, donate=False)(state, x)[0]


def test_an_aligned_numpy_array_keeps_its_values():
    """Memory that JAX can use as it is."""
    memory = np.zeros(4096 + 64, np.uint8)
    w = memory[-memory.ctypes.data % 64 :][:4096].view(np.float32)
    dp = jdp.DataParallel(lambda v, x: (x * v["params"]).sum(-1), devices=[0])
    step = dp.train_step(lambda v, x: dp(v, x).mean(), optax.sgd(1.0))
    state = step.init({"params": np.ones(1024, np.float32)})
    state, _ = step(state.replace(params=w), np.ones((2, 1024), np.float32))
    step(state, np.ones((2, 1024), np.float32))
    assert (w == 0).all()


def test_an_array_put_in_place_into_the_last_state_stays():
    step = step_of()
    state = step(step(step.init(VARIABLES), X)[0], X)[0]
    mine = jax.device_put(jnp.ones(3), state.params["w"].sharding)
    rest = [state.params["b"], state.opt_state[0].mu["w"]]
    state.params["w"] = mine
    state = step(state, X)[0]
    assert not mine.is_deleted() and all(freed(rest))
    step(state, X)
    np.testing.assert_array_equal(mine, np.ones(3))


@pytest.mark.one_case("2")
@pytest.mark.parametrize("n", [1, 2])
def test_what_the_batch_holds_of_the_state_is_not_freed(n):
    """Its key, its number, its parameters as a target: on two devices JAX would end the process."""

    def towards(variables, batch, key):
        x, target, _, other = batch
        away = jnp.mean((x @ variables["params"]["w"] - x @ target["w"]) ** 2)
        return away + 0 * jax.random.normal(key) + 0 * jax.random.normal(other)

    dp = jdp.DataParallel(lambda v, x: x, devices=range(n))
    step = dp.train_step(towards, optax.sgd(0.1), in_axes=(0, None, None, None))
    first = step.init(VARIABLES, key=jax.random.key(0))
    batch = (X, first.params, first.step, first.key)
    state, metrics = step(first, batch)
    assert float(metrics["loss"]) == 0 and not any(freed(batch)) and all(freed(first.opt_state))
    state = state.replace(params={**state.params, "w": state.params["w"] + 1})
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], np.mean(X.sum(1) ** 2), rtol=1e-5)
    assert not any(freed(batch))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("known", [False, True])
def test_what_shares_memory_with_the_state_is_not_freed(n, known):
    """`jax.device_put` to another mesh of the same devices gives another object for the same memory."""
    step = jdp.DataParallel(lambda v, x: x, devices=range(n)).train_step(
        lambda v, b: jnp.mean((b[0] @ v["params"] - b[0] @ b[1]) ** 2), optax.sgd(0.1), in_axes=(0, None)
    )
    state = step.init({"params": np.ones(3, np.float32)})
    mine = jax.sharding.NamedSharding(jax.make_mesh((n,), ("mine",), devices=jax.devices()[:n]), jax.P())
    if known:
        state, _ = step(state, (X, np.ones(3, np.float32)))
        assert step._program.known
    for _ in range(2):
        teacher = jax.device_put(state.params, mine)
        before, (state, metrics) = state, step(state, (X, teacher))
        assert float(metrics["loss"]) == 0 and not teacher.is_deleted() and before.step.is_deleted()
        np.testing.assert_array_equal(state.params, np.ones(3))


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2])
def test_a_clone_of_the_model_is_its_teacher_from_any_step_on(n):
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    dp = jdp.DataParallel(net, devices=range(n))
    step = dp.train_step(lambda m, b: jnp.mean((m(b[0]) - (b[1](b[0]) if len(b) > 1 else 0)) ** 2), optax.sgd(0.1))
    step((X,))
    teacher, kernel = nnx.clone(net), np.asarray(net.kernel[...])
    assert float(step((X, teacher))["loss"]) == 0
    step((X,))
    assert float(step((X, teacher))["loss"]) > 0
    np.testing.assert_array_equal(teacher.kernel[...], kernel)


@pytest.mark.parametrize(("n", "shard_params"), [(1, False), (4, True)])
def test_a_parameter_that_is_the_batch_too_is_copied(n, shard_params):
    """A table whose rows are cut as the batch is, or that lies on the one device: the same array comes in twice."""
    table = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    step = jdp.DataParallel(lambda v, x: x * v["params"][0], range(n)).train_step(
        lambda v, x: jnp.mean((x * v["params"][0]) ** 2), optax.sgd(0.1), shard_params=shard_params
    )
    state = step.init({"params": table})
    want = jax.value_and_grad(lambda p: jnp.mean((table * p[0]) ** 2))(table)
    state, metrics = step(state, state.params)
    np.testing.assert_allclose(metrics["loss"], want[0], rtol=1e-6)
    np.testing.assert_allclose(state.params, table - 0.1 * want[1], rtol=1e-5, atol=1e-7)


def test_one_array_in_two_places_is_donated_once():
    """As where a target network is set to the network."""
    step = step_of()
    state = step(step.init(VARIABLES), X)[0]
    tied = state.replace(params={**state.params, "b": state.state["seen"]["n"]})
    value = float(tied.params["b"])
    after, _ = step(tied, X)
    again, _ = step(after, X)
    assert int(again.step) == 3 and float(again.state["seen"]["n"]) == value + 2


def test_what_a_step_without_donation_gave_is_copied_once():
    """It may have passed the user's own arrays on."""
    first, second = step_of(donate=False), step_of()
    mine = jax.device_put(copied(first.init(VARIABLES)), jax.tree.leaves(first.init(VARIABLES))[0].sharding)
    given, _ = first(mine, X)
    second(given, X)
    assert not any(freed(given)) and not any(freed(mine))


@pytest.mark.one_case
@pytest.mark.parametrize(("first", "second"), [(range(4), [2, 3]), ([0], [0, 1])])
def test_a_state_that_a_step_on_other_devices_takes_stays_whole(first, second):
    """What is moved to some of the same devices may share their memory, which that step frees."""
    first, second = step_of(first), step_of(second)
    state, _ = first(first.init(VARIABLES), X)
    before = copied(state)
    second(state, X)
    assert not any(part.data.is_deleted() for x in arrays(state) for part in x.addressable_shards)
    after, _ = first(state, X)
    assert int(after.step) == 2 and all(freed(state)) and not any(freed(before))


# --- what steps made is donated, without a copy ---


@pytest.mark.parametrize("n", [1, 2])
def test_steps_that_take_turns_on_one_state_copy_nothing(n, copies):
    a, b = step_of(n), step_of(n)
    state = a.init(VARIABLES)
    copies.clear()
    memory = None
    for i in range(6):
        before, (state, _) = state, (a, b)[i % 2](state, X)
        assert all(freed(before)) and not any(freed(state))
        memory = memory or places(state.opt_state)
    assert not copies and len(memory & places(state.opt_state)) > 0


@pytest.mark.parametrize("n", [1, 2])
def test_one_step_on_several_states_copies_nothing(n, copies):
    step = step_of(n)
    states = [step.init(VARIABLES) for _ in range(3)]
    copies.clear()
    for _ in range(3):
        before, states = states, [step(state, X)[0] for state in states]
        assert all(freed(before))
    assert not copies and [int(state.step) for state in states] == [3, 3, 3]


@pytest.mark.full
def test_what_is_kept_of_several_states_goes_with_them():
    from jdp._train.program import _older

    others = set(_older)  # of other tests
    step = step_of()
    states = [step.init(VARIABLES) for _ in range(3)]
    states = [step(state, X)[0] for state in states]
    assert set(_older) - others
    del states
    gc.collect()  # JAX's frames of the first step hold it, in a circle
    assert not set(_older) - others


def test_a_part_that_is_replaced_is_copied_alone(copies):
    step = step_of()
    state = step.init(VARIABLES)
    copies.clear()
    for i in range(3):
        state = state.replace(params=jax.tree.map(lambda x: x * 0.5, state.params))
        before, (state, _) = state, step(state, X)
        assert sum(freed(before)) == len(arrays(before)) - 2 and len(copies) == 2 * (i + 1)


@pytest.mark.full
def test_nnx_copies_in_the_first_step_alone(copies):
    net, step = nnx_step()
    assert not copies
    step(X)
    first = len(copies)
    assert first == len(arrays(nnx.as_pure((nnx.state(net), nnx.state(step.optimizer)))))
    for _ in range(3):
        held = arrays(nnx.as_pure(nnx.state(net)))
        step(X)
        assert all(freed(held))
    assert len(copies) == first


@pytest.mark.full
def test_nnx_steps_that_take_turns_on_one_model_copy_nothing(copies):
    net = Net(nnx.Rngs(0))
    dp = jdp.DataParallel(net, devices=range(2))
    optimizer = nnx.Optimizer(dp, optax.adam(0.1), wrt=nnx.Param)
    a, b = (dp.train_step(lambda m, x, s=s: (m(x) - s).mean(), optimizer) for s in (0, 1))
    a(X)
    first = len(copies)
    for i in range(4):
        held = arrays(nnx.as_pure(nnx.state(net)))
        (b, a)[i % 2](X)
        assert all(freed(held))
    assert len(copies) == first and int(optimizer.step[...]) == 5


def test_a_state_of_which_a_part_was_donated_is_refused():
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=[0])  # on several JAX would crash
    step = dp.train_step(lambda v, x: jnp.mean(dp(v, x) ** 2), optax.sgd(0.1))
    state, _ = step(step.init({"params": {"w": np.ones((6, 2), np.float32)}}), INPUTS)
    jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)(state.params)
    with pytest.raises(RuntimeError, match=r"state\.params\['w'\] was donated"):
        step(state, INPUTS)


def freed_by_a_step(n):
    """The parameters before a step, which has freed them; as `best = state.params` keeps them."""
    step = step_of(n)
    state = step.init(VARIABLES)
    best = state.params
    step(state, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(best))
    return {"params": best}


def square(variables, x):
    return ((x @ variables["params"]["w"]) ** 2).mean()


DOORS = {
    "apply": lambda dp: lambda v, x: dp(v, x),
    "grad": lambda dp: jax.grad(lambda v, x: (dp(v, x) ** 2).sum()),
    "value_and_grad": lambda dp: dp.value_and_grad(square),
    "evaluate": lambda dp: lambda v, x: dp.evaluate(lambda v, b: {"loss": square(v, b)}, v, [x]),
    "parallel": lambda dp: dp.parallel(lambda v, x: (v, x * 2), in_axes=(None, 0)),
    "data_parallel": lambda dp: lambda v, x: jdp.data_parallel(dp.module, v, x, dp.devices),
    "parallel_apply": lambda dp: lambda v, x: jdp.parallel_apply(dp.module, v, jdp.scatter((x,), dp.devices)),
    "replicate": lambda dp: lambda v, x: jdp.replicate(v, dp.devices),
    "check_replicas": lambda dp: lambda v, x: dp.check_replicas(v),
    "init": lambda dp: lambda v, x: dp.train_step(square, optax.sgd(0.1)).init(v),
    "scatter": lambda dp: lambda v, x: jdp.scatter(v, dp.devices),
    "save": lambda dp: lambda v, x: saved(v),
}


def saved(variables):
    with tempfile.TemporaryDirectory() as folder, jdp.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, variables)


@pytest.mark.one_case
@pytest.mark.parametrize("rows", [16, 15], ids=["even", "uneven"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("door", DOORS)
def test_freed_parameters_are_refused_by_name(door, n, rows):
    """XLA:CPU ends the process for one in a compiled program of several devices."""
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=range(n))
    call, rows_of_x = DOORS[door](dp), X[:rows]
    for _ in range(2):  # so that the call is a known one
        call(jdp.replicate(VARIABLES, dp.devices), rows_of_x)
    with pytest.raises(RuntimeError, match=r"^jdp\.\w+: .*\['(w|b)'\] has been freed; .*jnp\.copy"):
        call(freed_by_a_step(n), rows_of_x)
    call(jdp.replicate(VARIABLES, dp.devices), rows_of_x)


def test_the_names_of_freed_variables():
    """As `step.init` gets them, and with a key beside them."""
    dp = jdp.DataParallel(lambda v, x: x, devices=range(2))
    step = dp.train_step(lambda v, x, key: square(v, x), optax.sgd(0.1))
    with pytest.raises(RuntimeError, match=r"variables\['params'\]\['\w'\] has been freed"):
        step.init(freed_by_a_step(2), jax.random.key(0))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("door", ["step", "apply", "value_and_grad"])
def test_a_freed_batch_is_refused(door, warm):
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"], devices=range(4))
    step = dp.train_step(square, optax.sgd(0.1))
    calls = {"step": lambda x: step(step.init(VARIABLES), x), "apply": lambda x: dp(VARIABLES, x)}
    calls["value_and_grad"] = lambda x: dp.value_and_grad(square)(VARIABLES, x)
    for _ in range(2 * warm):
        calls[door](jdp.scatter(X, dp.devices))
    batch = jdp.scatter(X, dp.devices)
    for x in jax.tree.leaves(batch):
        x.delete()
    with pytest.raises(RuntimeError, match="an array of the batch has been freed"):
        calls[door](batch)


def test_a_freed_nnx_model_is_refused():
    dp = jdp.DataParallel(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), devices=range(4))
    step = dp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
    step(X), dp(X)
    best = jax.tree.map(lambda x: x, nnx.state(dp.module))
    step(X)
    nnx.update(dp.module, best)
    with pytest.raises(RuntimeError, match="has been freed"):
        dp(X)
    with pytest.raises(RuntimeError, match="has been freed"):
        dp.evaluate(lambda model, x: {"loss": (model(x) ** 2).mean()}, [X])
    with pytest.raises(RuntimeError, match="was donated to an earlier step"):
        step(X)


@pytest.mark.one_case("jit")
@pytest.mark.parametrize("around", [jax.grad, jax.jit, lambda f: lambda x: jax.vmap(f)(x[None])])
def test_an_nnx_step_inside_of_a_transformation_frees_nothing(around):
    _, step = nnx_step(1)
    step(X)  # the next step frees what this one made
    with pytest.raises(Exception, match="Cannot mutate") as error:
        around(lambda x: step(x)["loss"])(X)
    assert any("inside of jax.jit or another transformation" in note for note in error.value.__notes__)
    assert np.isfinite(step(X)["loss"])


@pytest.mark.one_case("after 3 steps-False")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3], ids="after {} steps".format)  # the third one is a known step
def test_a_state_of_which_numpy_shares_a_part_is_freed_whole(steps, deterministic):
    """numpy shares the memory of the first device; XLA would free the other parts, and a use would crash."""
    dp = jdp.DataParallel(lambda v, x: x, devices=range(4), replicas=4)
    step = dp.train_step(loss_fn, optax.adam(0.1), deterministic=deterministic)
    state = step.init(VARIABLES)
    for _ in range(steps - 1):
        state, _ = step(state, X)
    before, host = state, jax.device_get(state)
    expected = host.params["w"].copy()
    state, _ = step(before, X)
    assert all(freed((before.step, before.params, before.opt_state)))
    with pytest.raises(RuntimeError, match=r"state\.step was donated to an earlier step"):
        step(before, X)
    with pytest.raises(RuntimeError, match="deleted"):
        _ = before.params["w"] + 1
    assert not any(freed(step(state, X)[0]))
    np.testing.assert_array_equal(host.params["w"], expected)


@pytest.mark.full
def test_a_model_of_which_numpy_shares_a_part_is_freed_whole():
    net, step = nnx_step(4)
    step(X)
    before = arrays(nnx.state(net, nnx.Param))
    host = [np.asarray(x) for x in before]
    step(X)
    assert all(freed(before)) and len(before) == len(host) == 4
    step(X)


def test_arguments_of_a_step_for_pmap_of_which_numpy_shares_a_part_are_freed_whole():
    dp = jdp.DataParallel(lambda w, x: x @ w, devices=range(4))
    step = dp.parallel(lambda w, x: (w + jax.lax.pmean(x.mean(), "data"), x.sum()), donate_argnums=0)
    before, _ = step(jdp.replicate(np.ones(3, np.float32), range(4)), X)
    host = np.asarray(before)
    step(before, X)
    assert before.is_deleted() and host.shape == (3,)


def of_threads(turn, state, turns, threads=4):
    """The last state, of turns that all threads take at once on one state; one of them returns the next, by `turn`."""
    together, before = threading.Barrier(threads), sys.getswitchinterval()

    def one(_):
        together.wait()
        try:
            return turn(state)
        except RuntimeError as error:
            assert re.search("was donated to an earlier|has been freed", str(error)), error

    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for _ in range(turns):
                (state,) = [after for after in pool.map(one, range(threads)) if after is not None]
    finally:
        sys.setswitchinterval(before)
    return state


@pytest.mark.one_case
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("known", [0, 1], ids=["first", "known"])
def test_threads_that_pass_one_state_donate_it_once(n, known):
    """All may see that it is not freed before one of them frees it; XLA may end the process for the others."""
    step = step_of(n)
    state = step.init(VARIABLES)
    if known:
        state, _ = step(state, X)
    state = of_threads(lambda state: step(state, X)[0], state, 40)
    assert int(state.step) == 40 + known and state is step.last


def test_threads_that_pass_one_argument_donate_it_once():
    dp = jdp.DataParallel(lambda v, x: x, devices=range(4))
    count = dp.parallel(lambda n, x: (n + 1, jnp.sum(x)), donate_argnums=0, out_axes=(None, None))
    start = jdp.replicate(np.float32(0), range(4))
    assert float(of_threads(lambda n: count(n, X)[0], start, 40)) == 40
