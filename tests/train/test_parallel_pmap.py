"""dp.parallel takes what jax.pmap takes: stacked and static arguments, donation; and what is scattered already."""

import flax.linen as nn
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from laws import variables_of

import jdp

N, ROWS = 8, 24
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 6)).astype(np.float32)
W = rng.normal(size=(6, 4)).astype(np.float32)
DP = jdp.DataParallel(lambda w, x: x @ w)


def by_device(x):
    return x.reshape(N, -1, *x.shape[1:])


class Decoder(nn.Module):
    """Attends to all tokens before; its cache has keys and values of the rows, and one index."""

    @nn.compact
    def __call__(self, token):
        token = nn.Embed(7, 4)(token)
        return nn.MultiHeadDotProductAttention(2, decode=True, name="attention")(token)


DECODER = Decoder()
PARAMS = variables_of(DECODER, np.zeros((1, 5), np.int32))["params"]
TOKENS = rng.integers(0, 7, (ROWS, 5))


def init_cache(tokens):
    return DECODER.init(jax.random.key(0), tokens)["cache"]


def predict(tokens, params, cache):
    out, updates = DECODER.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
    return out, updates["cache"]


@pytest.mark.full
@pytest.mark.parametrize(
    "rows", [ROWS, N]
)  # with n rows no size tells one entry for each replica from one for each row
def test_a_cache_with_an_index_goes_in_again(rows, same):
    """flax's init_cache and predict_step, a pair of pmap programs: an index is one value on each replica."""
    tokens = TOKENS[:rows]
    cache = DP.parallel(init_cache, in_axes=0, out_axes="stacked")(tokens)
    step = DP.parallel(predict, in_axes=(0, None, "stacked"), out_axes=(0, "stacked"))
    p_cache, p_step = jax.pmap(init_cache)(by_device(tokens)), jax.pmap(predict)
    p_params = jax_utils.replicate(PARAMS)
    same(cache, p_cache)
    for i in range(3):
        out, cache = step(tokens[:, i : i + 1], PARAMS, cache)
        want, p_cache = p_step(by_device(tokens[:, i : i + 1]), p_params, p_cache)
        same(out, jnp.asarray(np.asarray(want).reshape(rows, 1, 4)))
        same(cache, p_cache)
    assert cache["attention"]["cache_index"].tolist() == [3] * N


def test_axes_may_be_trees_as_in_pmap(same):
    """Here the index is one for all, and what has rows is cut."""

    def step(cache, x):
        return {"rows": cache["rows"] + x, "index": cache["index"] + 1}, x.sum()

    axes = {"rows": 0, "index": None}
    out, sums = DP.parallel(step, in_axes=(axes, 0), out_axes=(axes, 0))({"rows": X, "index": np.int32(3)}, X)
    same(out, {"rows": jnp.asarray(X + X), "index": jnp.int32(4)})
    assert sums.shape == (N,)


def graph(w, graphs):
    """A padded graph on each device: nodes, edges and a count of graphs are of different lengths."""
    nodes = jnp.zeros_like(graphs["nodes"]).at[graphs["to"]].add(graphs["nodes"][graphs["of"]]) @ w
    loss = (nodes**2).sum() / graphs["count"]
    return jax.lax.pmean(loss, "data"), nodes


def test_one_padded_tree_for_each_device(same):
    trees = [
        {
            "nodes": rng.normal(size=(5, 6)).astype(np.float32),
            "of": rng.integers(0, 5, 9),
            "to": rng.integers(0, 5, 9),
            "count": np.float32(i + 1),
        }
        for i in range(N)
    ]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    got = DP.parallel(graph, in_axes=(None, "stacked"), out_axes=(0, "stacked"))(W, batch)
    same(got, jax.pmap(graph, axis_name="data", in_axes=(None, 0))(W, batch))


def test_what_is_stacked_has_an_entry_for_each_replica(refused):
    step = DP.parallel(lambda w, x: (w, x), in_axes=(None, "stacked"))
    with refused(ValueError, "parallel", match=r"args\[1\]\['x'\] has shape \(24, 6\) and is 'stacked'"):
        step(1.0, {"x": X})
    with refused(ValueError, "parallel", match=r"args\[1\] has shape \(\) and is 'stacked'"):
        step(1.0, np.float32(3))
    with refused(TypeError, "parallel", match=r"in_axes holds 'stack'; an axis is an int or None \(or \"stacked\"\)"):
        DP.parallel(lambda w, x: w, in_axes=(None, "stack"))(1.0, X)


@pytest.mark.one_case
@pytest.mark.parametrize("axis_name", ["data", "batch"])
def test_scattered_arguments_stay_as_they_are_cut(axis_name, same):
    step = DP.parallel(lambda w, x, y: (w, x * w + y), axis_name=axis_name)
    want = jnp.asarray(X * 2 + X)
    same(step(2.0, jdp.scatter(X), X)[1], want)
    same(step(2.0, jdp.scatter(X, chunk_sizes=(10, 0, 2, 2, 2, 2, 2, 4)), X)[1], want)
    x = jdp.scatter({"x": X, "flag": True})
    _, rows = DP.parallel(lambda w, b: (w, b["x"] * w if b["flag"] else None), axis_name=axis_name)(2.0, x)
    same(rows, jnp.asarray(X * 2))


def test_numbers_are_results_as_in_pmap(same):
    def step(w, x):
        return w, {"rows": len(x), "scale": 0.5, "is": True, "np": np.float32(2)}

    _, got = DP.parallel(step)(W, X)
    _, want = jax.pmap(step)(jax_utils.replicate(W), by_device(X))
    same(got, want)


def test_strings_and_other_objects_may_be_whole(same):
    def step(w, how, x):
        return w, getattr(x, how["name"])(0) * how["scale"]

    parallel = DP.parallel(step, in_axes=(None, None, 0))
    for name in ("mean", "sum", "mean"):
        _, got = parallel(W, {"name": name, "scale": 2}, X)
        want = np.concatenate([getattr(x, name)(0) for x in by_device(jnp.asarray(X))]) * 2
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("positions", [2, (2,), [2]])
def test_static_arguments_are_those_of_pmap(positions, same):
    traces = []

    def step(w, x, how):
        traces.append(how)
        return w * 2, getattr(x, how["name"])(-1) if isinstance(how, dict) else getattr(x, how)(-1)

    parallel = DP.parallel(step, static_broadcasted_argnums=positions)
    pmapped = jax.pmap(step, static_broadcasted_argnums=positions)
    for how in ("mean", "sum"):
        w, rows = parallel(W, X, how)
        p_w, p_rows = pmapped(jax_utils.replicate(W), by_device(X), how)
        same((w, rows), (jax_utils.unreplicate(p_w), p_rows.reshape(-1)))
    traces.clear()
    parallel(W, X, "mean")
    assert traces == []


def test_a_static_argument_before_the_state(same):
    """The first argument that is not static is the state."""
    step = DP.parallel(lambda how, w, x: (w + 1, getattr(x, how)(-1)), static_broadcasted_argnums=0)
    w, sums = step("sum", W, X)
    same((w, sums), (jnp.asarray(W + 1), jnp.asarray(X).sum(-1)))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: DP.parallel(lambda w, x: w, static_broadcasted_argnums=2)(W, X), r"is \(2,\) for 2 arguments"),
        (lambda: DP.parallel(lambda w, x: w, static_broadcasted_argnums=1)(W, [1]), r"args\[1\] is a list"),
        (lambda: DP.parallel(lambda w, x: w, static_broadcasted_argnums="x"), "positions of arguments"),
        (lambda: DP.parallel(lambda w, x: w, donate_argnums=-1), "donate_argnums is -1"),
        (lambda: DP.parallel(lambda w, x: w, donate_argnums=True), "donate_argnums is True"),
    ],
)
def test_bad_positions(call, match, refused):
    with refused(ValueError, "parallel", match=match):
        call()


@pytest.mark.parametrize("positions", [np.int64(1), [np.int32(1)], np.array([1]), np.array(1)], ids=str)
def test_positions_may_be_integers_of_numpy(same, positions):
    """As in `jax.pmap`."""
    how = {"static_broadcasted_argnums": positions}
    mine = DP.parallel(lambda w, times, x: (w, x * times), **how)(W, 3, X)
    same(mine, (jnp.asarray(W), jnp.asarray(X) * 3))


@pytest.mark.full
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])  # keys of two words, and of four
def test_one_legacy_key_for_each_replica_is_that_of_pmap(impl):
    def draw(w, x, key):
        return w, x[:, 0] + jax.random.uniform(key, (len(x),))

    with jax.default_prng_impl(impl):
        keys = jax.random.split(jax.random.PRNGKey(3), N)
        _, got = DP.parallel(draw)(W, X, keys)
        _, expected = jax.pmap(draw, in_axes=(None, 0, 0))(W, by_device(X), keys)
    np.testing.assert_array_equal(got, expected.ravel())


def train(state, x):
    loss, grads = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * jax.lax.pmean(grads, "data"), "step": state["step"] + 1}, loss


def test_donated_state_is_freed(same, refused):
    step = DP.parallel(train, donate_argnums=0)
    pmapped = jax.pmap(train, axis_name="data", donate_argnums=0)
    on_host = {"w": W.copy(), "step": 0}
    device = {"w": jnp.asarray(W), "step": jnp.int32(0)}
    for given in (on_host, device):  # what is not in its place yet is copied: the caller still has it
        state, loss = step(given, X)
        np.testing.assert_array_equal(given["w"], W)
    want, losses = pmapped(jax_utils.replicate({"w": W, "step": 0}), by_device(X))
    for _ in range(40):  # more than may be in flight on CPU
        old, (state, loss) = state, step(state, X)
        want, losses = pmapped(want, by_device(X))
    assert old["w"].is_deleted() and old["step"].is_deleted() and not state["w"].is_deleted()
    same((state["w"], loss), (jax_utils.unreplicate(want)["w"], losses))
    with refused(RuntimeError, "parallel", match=r"args\[0\]\['step'\] .* donated to an earlier call"):
        step(old, X)


def test_a_donating_step_can_be_explained_and_jitted(same):
    step = DP.parallel(train, donate_argnums=0)
    assert jdp.explain(step, {"w": W, "step": 0}, X).collectives
    want = DP.parallel(train)({"w": W, "step": 0}, X)
    same(jax.jit(step)({"w": W, "step": jnp.int32(0)}, X)[0]["w"], want[0]["w"])


def test_nothing_else_is_donated(same):
    kept = jdp.replicate({"w": W, "step": np.int32(0)})
    x = jdp.scatter(X)
    step = DP.parallel(lambda s, t, x: train(s, x)[0], in_axes=(None, None, 0), donate_argnums=0)
    state = step(jdp.replicate({"w": W.copy(), "step": np.int32(0)}), kept, x)
    DP.parallel(train)(state, x)
    for array in (*jax.tree.leaves(kept), *jax.tree.leaves(state), *x._arrays):
        assert not array.is_deleted()


def two_states(g, d, x):
    return {"w": g["w"] + 1}, {"w": d["w"] + 1}, jax.lax.pmean(x.sum(), "data")


def test_a_second_state_says_what_it_needs(refused, same):
    g, d = {"w": np.ones(6, np.float32)}, {"w": np.ones((6, 2), np.float32)}
    with refused(ValueError, "parallel", match=r"args\[1\] has arrays of \[6\] rows .* in_axes=\(None, None, 0\)"):
        DP.parallel(two_states)(g, d, X)
    with refused(ValueError, "parallel", match=r"output\[1\] has the tree .* args\[1\].* out_axes=\(None, None, 0\)"):
        DP.parallel(two_states, in_axes=(None, None, 0))(g, d, X)
    step = DP.parallel(two_states, in_axes=(None, None, 0), out_axes=(None, None, 0))
    same(step(g, d, X)[:2], ({"w": jnp.full(6, 2.0)}, {"w": jnp.full((6, 2), 2.0)}))
    # One state that is a tuple, returned as two results.
    with refused(ValueError, "parallel", match=r"output\[1\] .* args\[0\]\[1\].* out_axes=\(None, None, 0\)"):
        DP.parallel(lambda s, x: two_states(*s, x))((g, d), X)


@pytest.mark.parametrize(
    "call, match",
    [
        (
            lambda: DP.parallel(lambda w, x, y: w)(W, X, X[:5]),
            r"args\[1\] has arrays of \[24\] rows .* batch has 5;.* equal rows",
        ),
        (lambda: DP.parallel(lambda w, x: w)(W, {"x": X, "y": X[1:]}), r"args\[1\]\['x'\] has 24 .*args\[1\]\['y'\]"),
        (
            lambda: DP.parallel(lambda a, w, x: w, in_axes=(0, None, 0))(X, W, X[1:]),
            r"args\[0\] has 24 .*args\[2\] has 23",
        ),
    ],
)
def test_errors_name_the_callers_own_positions(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_whole_arguments_have_names_in_errors(devices, refused):
    away = jax.device_put(W, devices[3])
    with pytest.raises(RuntimeError, match=r"jdp.parallel: args\[1\]\['w'\]: module must have its parameters"):
        DP.parallel(lambda w, t, x: w, in_axes=(None, None, 0))(W, {"w": away}, X)


def test_replicas_that_differ_in_shape_are_told_what_holds_at_every_door(refused):
    with refused(ValueError, "parallel_apply", match=r"along axis 0 only.* Return the rows along it; dp\(\.\.\.\)"):
        jdp.DataParallel(lambda w, x: jnp.pad(x.T, ((0, 0), (0, 1))))(W, X[:-1])
    with refused(ValueError, "parallel_apply", match=r"is float32\[6,3\] on replica 0 .* has one shape\. Return what"):
        DP.parallel(lambda w, x: (w, x.T), out_axes=(None, None))(W, X[:-1])


def test_an_uneven_batch_is_sent_to_train_step(refused):
    with refused(ValueError, "parallel", match=r"(?s)Drop rows or pad .* dp.train_step, which reduces by rows"):
        DP.parallel(train)({"w": W, "step": 0}, X[:-1])


def train_once(loss, x):
    step = DP.train_step(lambda v, x: loss(v["params"], x), optax.sgd(0.1))
    return step(step.init({"params": W}), x)


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_ordered_effects_are_refused_at_every_door(rows, refused):
    def loss(w, x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return ((x @ w) ** 2).mean()

    def called(w, x):
        return x * jax.experimental.io_callback(lambda v: v, jax.ShapeDtypeStruct((), x.dtype), x[0, 0], ordered=True)

    x = X[:rows]
    text = r"%s \(test_parallel_pmap.py:\d+\) has ordered=True and runs on 8 devices.* Pass ordered=False"
    for call in (
        lambda: DP.parallel(lambda w, x: (w, loss(w, x)))(W, x),
        lambda: DP.parallel(lambda w, x: (w, jax.lax.scan(lambda c, x: (c, loss(w, x[None])), 0, x)[1]))(W, x),
        lambda: DP.value_and_grad(loss)(W, x),
        lambda: train_once(loss, x),
        lambda: jdp.parallel_apply(loss, W, jdp.scatter((x,))),
        lambda: jdp.DataParallel(loss)(W, x),
    ):
        with refused(ValueError, "parallel_apply", match=text % "debug_print"):
            call()
    with refused(ValueError, "parallel_apply", match=text % "io_callback"):
        jdp.DataParallel(called)(W, x)


def test_one_device_keeps_the_order(capfd):
    """That of the replicas, too, if it has several."""

    def called(w, x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return x

    for replicas in (1, 4):
        one = jdp.DataParallel(called, devices=[0], replicas=replicas)
        np.testing.assert_array_equal(one(W, X), X)
        jax.effects_barrier()
        told = [float(line) for line in capfd.readouterr().out.split()]
        np.testing.assert_allclose(told, [x.sum() for x in np.split(X, replicas)], rtol=1e-4)


@pytest.mark.parametrize("out, what", [("text", "str"), ({1, 2}, "set"), (np.array("text"), "ndarray")])
def test_results_that_no_device_holds_are_named(refused, out, what):
    with refused(TypeError, "parallel", match=rf"output\[1\]\['a'\] is a {what}; .* Return jnp.asarray\(x\)"):
        DP.parallel(lambda w, x: (w, {"a": out}))(W, X)
