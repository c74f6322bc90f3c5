"""One SPMD program over the chunks: as a loop over them, and as `jax.pmap`."""

import contextlib
import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from jdp._core.parallel_apply import _warn_new_values
from jdp._core.programs import MOST_HELD, made_once


def rows(count, *shape):
    return np.arange(count * int(np.prod(shape)), dtype=np.float32).reshape(count, *shape)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PARAMS = {"w": noise(3, 2, seed=1), "b": noise(2, seed=2)}


def net(params, x):
    """Rows that depend on the other rows of the chunk (as in BatchNorm), and a number for each chunk."""
    h = jnp.tanh(x @ params["w"] + params["b"])
    h = h - h.mean(0)
    return {"h": h, "loss": (h**2).mean(), "h0": h[:1]}


def run(fn, params, x, devices, dim=0, **options):
    return jdp.parallel_apply(fn, params, jdp.scatter((x,), devices, dim, **options))


def loop(fn, params, x, sizes):
    """What fn returns for each chunk, one after the other, on one device."""
    ends = np.cumsum(sizes)
    return [jax.jit(fn)(params, x[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


# --- even: jax.pmap


@pytest.mark.one_case
def test_even_batches_agree_with_pmap_to_the_last_bit(same, devices, n):
    x = noise(4 * n, 3)
    expected = jax.pmap(net, axis_name="data", in_axes=(None, 0), devices=devices[:n])(PARAMS, x.reshape(n, 4, 3))
    out = run(net, PARAMS, x, devices[:n])
    for i in range(n):
        same(out[i], jax.tree.map(lambda a: np.asarray(a)[i], expected))  # noqa: B023
    got = jdp.gather(out)
    same(got["h"], np.asarray(expected["h"]).reshape(-1, 2))
    same(got["loss"], np.asarray(expected["loss"]))


def collectives(params, x):
    total = lax.psum(x.sum(0), "data")
    return {
        "x": x - lax.pmean(x.mean(0), "data"),
        "total": total[None],
        "index": lax.axis_index("data")[None],
        "all": lax.all_gather(x[:1], "data", tiled=True),
        "size": jnp.int32(lax.psum(1, "data"))[None],
    }


@pytest.mark.one_case
def test_collectives_on_even_chunks_agree_with_pmap(same, devices, n):
    x = noise(2 * n, 3)
    expected = jax.pmap(collectives, axis_name="data", in_axes=(None, 0), devices=devices[:n])(None, x.reshape(n, 2, 3))
    out = run(collectives, None, x, devices[:n])
    for i in range(n):
        same(out[i], jax.tree.map(lambda a: np.asarray(a)[i], expected))  # noqa: B023


def test_gradients_agree_with_pmap(same, devices):
    x = noise(8, 3)
    grad = jax.grad(lambda params, x: net(params, x)["loss"])
    expected = jax.pmap(grad, axis_name="data", in_axes=(None, 0), devices=devices[:2])(PARAMS, x.reshape(2, 4, 3))
    out = run(grad, PARAMS, x, devices[:2])
    for i in range(2):
        same(out[i], jax.tree.map(lambda a: np.asarray(a)[i], expected))  # noqa: B023


# --- uneven: the loop


UNEVEN = [(10, 4, None), (5, 4, None), (9, 4, None), (7, 3, None), (1, 2, None), (9, 8, None)]
GIVEN = [(4, 3, (0, 3, 1)), (4, 3, (3, 0, 1)), (4, 3, (1, 3, 0))]


@pytest.mark.one_case
@pytest.mark.parametrize("size, n, sizes", UNEVEN + GIVEN)
def test_uneven_chunks_are_as_a_loop_over_them(devices, size, n, sizes):
    x = noise(size, 3)
    out = run(net, PARAMS, x, devices[:n], chunk_sizes=sizes)
    sizes = sizes or jdp.chunk_sizes(size, n)
    assert out.sizes == sizes
    used = [i for i, count in enumerate(sizes) if count]
    expected = loop(net, PARAMS, x, [count for count in sizes if count])
    for i, want in zip(used, expected, strict=True):
        close(out[i], want)
        assert out[i]["h"].devices() == {devices[i]}
    got = jdp.gather(out)
    close(got["h"], np.concatenate([want["h"] for want in expected]))
    close(got["h0"], np.concatenate([want["h0"] for want in expected]))
    close(got["loss"], np.stack([want["loss"] for want in expected]))


def test_each_replica_sees_the_true_size_of_its_chunk(same, devices):
    def fn(params, x):
        return {"size": jnp.full(x.shape[:1], x.shape[0]), "parity": x[:: x.shape[0]] * 1.0}

    got = jdp.gather(run(fn, None, rows(10, 2), devices[:4]))
    same(got, {"size": np.int32([3] * 9 + [1]), "parity": rows(10, 2)[[0, 3, 6, 9]]})


def test_outputs_may_have_other_rows_than_the_inputs(same, devices):
    def fn(params, x):
        return {
            "twice": jnp.concatenate([x, x]),
            "one": x.sum(0, keepdims=True),
            "none": x[:0],
            "fixed": jnp.full((3, 2), x.shape[0]),
            "less": x[1:],
        }

    x = rows(7, 2)
    chunks = [x[0:3], x[3:6], x[6:7]]
    got = jdp.gather(run(fn, None, x, devices[:3]))
    want = {
        "twice": np.concatenate([c for chunk in chunks for c in (chunk, chunk)]),
        "one": np.stack([chunk.sum(0) for chunk in chunks]),
        "none": x[:0],
        "fixed": np.repeat(np.int32([3, 3, 1]), 3)[:, None].repeat(2, 1),
        "less": np.concatenate([chunk[1:] for chunk in chunks]),
    }
    same(got, want)


def test_a_returned_parameter_comes_back_once_for_each_replica(same, devices):
    w = rows(3, 2)
    same(jdp.gather(run(lambda w, x: w, w, rows(4), devices[:2])), np.concatenate([w, w]))


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("size", [4, 5])
def test_along_another_dim(same, devices, dim, size):
    x = rows(2, size)

    def fn(w, x):
        return {"scaled": w * x, "total": x.sum(1, keepdims=True)}

    out = run(fn, np.float32(2), x, devices[:3], dim)
    ends = np.cumsum(out.sizes)
    chunks = [x[:, end - count : end] for count, end in zip(out.sizes, ends, strict=True)]
    same(
        jdp.gather(out, dim=dim),
        {"scaled": 2 * x, "total": np.stack([chunk.sum(1) for chunk in chunks], 1)},
    )


def test_outputs_of_another_rank_along_the_last_dim(same, devices):
    x = rows(2, 5)
    out = run(lambda _, x: {"flat": x[0], "deep": x[None]}, None, x, devices[:2], -1)
    same(jdp.gather(out, dim=-1), {"flat": x[0], "deep": x[None]})


@pytest.mark.parametrize("size", [0, 3])
def test_no_rows_give_no_rows(same, devices, size):
    # 0 rows over 2 devices, or 3 rows all on the second
    out = run(net, PARAMS, noise(size, 3), devices[:2], chunk_sizes=(0, size))
    got = jdp.gather(out)
    assert out.sizes == (0, size)
    assert got["h"].shape == (size, 2)
    assert np.isfinite(got["h"]).all() and np.isfinite(got["loss"]).all()
    if size:
        close(got["loss"], loop(net, PARAMS, noise(size, 3), [3])[0]["loss"][None])


def test_padding_never_shows(same, devices):
    # where a padded row would give nan, inf or a count too many
    def fn(params, x):
        return {
            "inverse": 1 / x,
            "count": (x == 0).sum(),
            "log": jnp.log(x).min()[None],
            "nan": jnp.isnan(x).any(),
        }

    x = 1 + rows(7)
    got = jdp.gather(run(fn, None, x, devices[:4]))
    same(got["count"], np.zeros(4, np.int32))
    same(got["nan"], np.zeros(4, bool))
    close({"i": got["inverse"], "l": got["log"]}, {"i": 1 / x, "l": np.log(x[::2])})


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("size", [4, 3])
def test_dtypes(same, devices, dtype, size):
    x = rows(size, 2).astype(jnp.dtype(dtype))
    same(jdp.gather(run(lambda _, x: (x, x[:, 0]), None, x, devices[:2])), (x, x[:, 0]))


# --- arguments


def test_a_tuple_or_a_list_is_the_positional_arguments_and_anything_else_is_one(same, devices):
    x = rows(4)
    s = partial(jdp.scatter, devices=devices[:2])
    add = lambda w, a, b: w + a + b  # noqa: E731
    same(jdp.gather(jdp.parallel_apply(add, np.float32(1), s((x, x)))), 1 + 2 * x)
    same(jdp.gather(jdp.parallel_apply(add, np.float32(1), s([x, x]))), 1 + 2 * x)
    same(jdp.gather(jdp.parallel_apply(lambda w, d: d["a"], None, s({"a": x}))), x)
    same(jdp.gather(jdp.parallel_apply(lambda w, a: a, None, s(x))), x)


class Pair(NamedTuple):
    a: Any
    b: Any


def test_keyword_arguments(same, devices):
    def fn(w, x, *, y, scale=1.0, mode="sum"):
        return (x + y) * scale * w if mode == "sum" else x - y

    for size in (4, 5):
        x = rows(size)
        inputs = jdp.scatter((x,), devices[:2])
        kwargs = jdp.scatter({"y": 2 * x, "scale": 3.0}, devices[:2])
        same(jdp.gather(jdp.parallel_apply(fn, np.float32(2), inputs, kwargs)), 18 * x)
        kwargs = jdp.scatter({"y": 2 * x, "mode": "difference"}, devices[:2])
        same(jdp.gather(jdp.parallel_apply(fn, np.float32(2), inputs, kwargs)), -x)


@pytest.mark.parametrize("size", [4, 5])
def test_keywords_with_nothing_to_cut_do_not_set_the_number_of_replicas(same, devices, size):
    # torch calls the last replica without its positional argument here
    inputs = jdp.scatter((rows(size),), devices[:4])
    kwargs = jdp.scatter({"flag": True}, devices[:4])
    got = jdp.gather(jdp.parallel_apply(lambda _, x, flag: x + 1 if flag else x, None, inputs, kwargs))
    same(got, rows(size) + 1)


@pytest.mark.parametrize("size", [4, 5])
def test_rows_in_the_keywords_alone(same, devices, size):
    inputs, kwargs = jdp.scatter((2.0,), devices[:4]), jdp.scatter({"x": rows(size)}, devices[:4])
    same(jdp.gather(jdp.parallel_apply(lambda _, scale, x: scale * x, None, inputs, kwargs)), 2 * rows(size))
    inputs = jdp.scatter((), devices[:4])
    same(jdp.gather(jdp.parallel_apply(lambda _, x: x, None, inputs, kwargs)), rows(size))


def test_inputs_and_keywords_that_disagree_on_their_rows_are_refused(refused, devices):
    inputs, kwargs = jdp.scatter((rows(4),), devices[:2]), jdp.scatter({"y": rows(6)}, devices[:2])
    with refused(ValueError, "parallel_apply", r"(?s)4|2.*6|3"):
        jdp.parallel_apply(lambda _, x, y: x, None, inputs, kwargs)


def test_inputs_and_keywords_on_different_devices_are_refused(refused, devices):
    inputs, kwargs = jdp.scatter((rows(4),), devices[:2]), jdp.scatter({"y": rows(4)}, devices[2:4])
    with refused(ValueError, "parallel_apply", r"(?s)cpu:0.*cpu:2"):
        jdp.parallel_apply(lambda _, x, y: x, None, inputs, kwargs)


def test_with_nothing_to_cut_it_runs_once_on_the_primary_device(same, devices, traced):
    fn = traced(lambda w, x: w * x)
    out = jdp.parallel_apply(fn, rows(3), jdp.scatter((np.float32(2),), devices[2:4]))
    assert len(out) == 1 and out[0].devices() == {devices[2]}
    same(out[0], 2 * rows(3))
    same(jdp.gather(out), 2 * rows(3))


def test_no_arguments_at_all(same, devices):
    for inputs in ((), [], None, {}):
        args = 0 if inputs == () or inputs == [] else 1
        out = jdp.parallel_apply(lambda w, *a: w * 2 + len(a), rows(3), jdp.scatter(inputs, devices[:2]))  # noqa: B023
        assert len(out) == 1
        same(jdp.gather(out), rows(3) * 2 + args)


def test_objects_reach_the_function_as_they_are(same, devices):
    class Config:
        factor = 3.0

    def fn(w, x, config, mode, activation, table, flag):
        assert type(flag) is bool and mode == "mean" and table == {1, 2}
        return activation(x * config.factor)

    inputs = jdp.scatter((rows(4), Config(), "mean", jnp.negative, {1, 2}, True), devices[:2])
    same(jdp.gather(jdp.parallel_apply(fn, None, inputs)), -3 * rows(4))


def test_equal_python_scalars_of_different_types_are_not_confused(same, devices):
    def fn(_, x, scalar):
        return x * 0 + {bool: 1, int: 2, float: 3}[type(scalar)]

    for scalar, expected in [(1, 2), (True, 1), (1.0, 3), (1, 2), (0, 2), (False, 1), (0.0, 3)]:
        got = jdp.gather(jdp.parallel_apply(fn, None, jdp.scatter((rows(2), scalar), devices[:2])))
        same(got, np.full(2, expected, np.float32))


def test_zeros_of_different_sign_are_not_confused(devices):
    fn = lambda _, x, zero: x * 0 + float(str(zero).replace("0.0", "1"))  # noqa: E731
    for zero, expected in [(0.0, 1), (-0.0, -1), (0.0, 1)]:
        got = jdp.gather(jdp.parallel_apply(fn, None, jdp.scatter((rows(2), zero), devices[:2])))
        np.testing.assert_array_equal(got, np.full(2, expected, np.float32))


def test_an_object_changed_between_calls_is_seen_as_it_is_now(same, devices):
    names = {"a"}
    fn = lambda _, x, names: x + len(names)  # noqa: E731
    same(jdp.gather(jdp.parallel_apply(fn, None, jdp.scatter((rows(2), names), devices[:2]))), rows(2) + 1)
    names.add("b")
    same(jdp.gather(jdp.parallel_apply(fn, None, jdp.scatter((rows(2), names), devices[:2]))), rows(2) + 2)


@flax.struct.dataclass
class Output:
    y: jax.Array
    aux: Any = None


@pytest.mark.parametrize("size", [4, 5])
def test_output_containers_survive(same, devices, size):
    out = jdp.gather(run(lambda _, x: Pair(Output(x), [{"k": (x, None)}, (), {}]), None, rows(size), devices[:2]))
    same(out, Pair(Output(rows(size)), [{"k": (rows(size), None)}, (), {}]))


def test_parameters_whole_on_the_host_the_primary_or_all(same, devices):
    x, w = rows(4, 2), rows(2)
    fn = lambda w, x: x * w  # noqa: E731
    for params in (w, jnp.asarray(w), jax.device_put(w, devices[1]), jdp.replicate(w, devices[1:3])):
        same(jdp.gather(run(fn, params, x, devices[1:3])), x * w)
    with pytest.raises(RuntimeError, match=r"(?s)\['w'\].*but found one of them on device: .*5"):
        run(lambda p, x: x * p["w"], {"w": jax.device_put(w, devices[5])}, x, devices[1:3])


# --- collectives and uneven chunks


def _psum(x):
    return lax.psum(x.sum(0), "data")


COLLECTIVES = {
    "psum": _psum,
    "pmean": lambda x: lax.pmean(x.sum(0), "data"),
    "pmax": lambda x: lax.pmax(x.max(0), "data"),
    "all_gather": lambda x: lax.all_gather(x.sum(0), "data")[0],
    "ppermute": lambda x: lax.ppermute(x.sum(0), "data", [(0, 1), (1, 0)]),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.ones(2) * x.sum(), "data", tiled=True).sum() * jnp.ones(2),
    "all_to_all": lambda x: lax.all_to_all(jnp.ones((2, 1)) * x.sum(), "data", 0, 0).sum() * jnp.ones(2),
    "inside jit": lambda x: jax.jit(_psum)(x),
    "inside scan": lambda x: lax.scan(lambda c, _: (c + _psum(x), None), jnp.zeros(2), None, 2)[0],
    "inside cond": lambda x: lax.cond(x[0, 0] > -1, _psum, lambda x: x.sum(0), x),
    "inside while": lambda x: lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] + _psum(x)), (0, jnp.zeros(2))
    )[1],
    "inside checkpoint": lambda x: jax.checkpoint(_psum)(x),
    "inside grad": lambda x: jax.grad(lambda x: _psum(x * x).sum())(x)[0],
    "inside vmap": lambda x: jax.vmap(lambda r: lax.psum(r, "data"))(x).sum(0),
    "inside custom_vjp": lambda x: _custom(x),
}


@jax.custom_vjp
def _custom(x):
    return _psum(x)


_custom.defvjp(lambda x: (_psum(x), x), lambda x, g: (x * g,))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_one_s_own_refuse_an_uneven_batch_before_anything_runs(refused, devices, name):
    ran = []

    def fn(params, x):
        jax.debug.callback(lambda: ran.append(1))
        return {"y": x + COLLECTIVES[name](x)}

    x = jnp.asarray(rows(3, 2))
    s = jdp.scatter((x,), devices[:2])
    with refused(ValueError, "parallel_apply", r"(?is)(?=.*2, 1)(?=.*drop)(?=.*pad)(?=.*sync_batch_norm)"):
        jdp.parallel_apply(fn, None, s)
    jax.effects_barrier()
    assert ran == []
    assert not x.is_deleted() and s.sizes == (2, 1)
    # and the function is none the worse for it
    even = jdp.parallel_apply(fn, None, jdp.scatter((rows(4, 2),), devices[:2]))
    assert even.sizes == (2, 2) and np.isfinite(jdp.gather(even)["y"]).all()
    jax.effects_barrier()
    assert len(ran) == 2


@pytest.mark.parametrize("size, sizes", [(2, None), (9, None), (4, (4, 0, 0, 0)), (5, (2, 1, 1, 1))])
def test_fewer_chunks_than_devices_is_uneven_for_collectives_too(refused, devices, size, sizes):
    s = jdp.scatter((rows(size, 2),), devices[:4], chunk_sizes=sizes)
    with refused(ValueError, "parallel_apply", "(?i)drop"):
        jdp.parallel_apply(lambda _, x: x + _psum(x), None, s)


def test_what_is_no_collective_takes_an_uneven_batch(same, devices):
    def fn(_, x):
        inner = jax.vmap(lambda r: r - lax.pmean(r, "rows"), axis_name="rows")(x)
        index = lax.axis_index("data") + jnp.zeros(x.shape[0], jnp.int32)
        return {"index": index, "n": lax.psum(1, "data") * x, "inner": inner}

    got = jdp.gather(run(fn, None, rows(5, 2), devices[:3]))
    x = rows(5, 2)
    inner = np.concatenate([chunk - chunk.mean(0) for chunk in (x[:2], x[2:4], x[4:])])
    same(got, {"index": np.int32([0, 0, 1, 1, 2]), "n": 3 * x, "inner": inner})


def test_one_device_is_never_uneven(same, devices):
    same(
        jdp.gather(run(lambda _, x: x + _psum(x), None, rows(3, 2), devices[:1])),
        rows(3, 2) + rows(3, 2).sum(0),
    )


# --- keys


def draw(_, key, x):
    return x * 0 + jax.random.normal(key, x.shape)


@pytest.mark.one_case
@pytest.mark.parametrize("size", [6, 5])
def test_a_0_d_key_is_folded_with_the_replica_s_index_but_for_the_primary(same, devices, size):
    key = jax.random.key(7)
    x = rows(size, 2)
    out = jdp.parallel_apply(draw, None, jdp.scatter((key, x), devices[:3]))
    same(out[0], jax.random.normal(key, (2, 2)))
    for i in (1, 2):
        same(out[i], jax.random.normal(jax.random.fold_in(key, i), (out.sizes[i], 2)))
    same(key, jax.random.key(7))


def test_keys_in_containers_and_keywords_are_folded_too(same, devices):
    key = jax.random.key(7)
    inputs = jdp.scatter((rows(4, 2),), devices[:2])
    kwargs = jdp.scatter({"rngs": {"dropout": key, "noise": [key]}}, devices[:2])

    def fn(_, x, rngs):
        return draw(None, rngs["dropout"], x), draw(None, rngs["noise"][0], x)

    first, second = jdp.parallel_apply(fn, None, inputs, kwargs)
    want = jax.random.normal(key, (2, 2)), jax.random.normal(jax.random.fold_in(key, 1), (2, 2))
    same(first, (want[0], want[0]))
    same(second, (want[1], want[1]))


def test_on_one_device_a_key_draws_as_in_the_bare_function(same, devices):
    key = jax.random.key(3)
    got = jdp.gather(jdp.parallel_apply(draw, None, jdp.scatter((key, rows(4, 2)), devices[:1])))
    same(got, jax.jit(draw)(None, key, rows(4, 2)))


@pytest.mark.one_case
@pytest.mark.parametrize("size", [4, 5])
def test_a_key_for_each_row_is_cut_and_not_folded(same, devices, size):
    keys = jax.random.split(jax.random.key(0), size)
    fn = lambda _, keys: jax.vmap(lambda k: jax.random.bits(k, (2,)))(keys)  # noqa: E731
    same(jdp.gather(jdp.parallel_apply(fn, None, jdp.scatter((keys,), devices[:3]))), fn(None, keys))


@pytest.mark.parametrize("size", [4, 5])
def test_keys_may_be_returned(same, devices, size):
    keys = jax.random.split(jax.random.key(0), size)
    same(jdp.gather(jdp.parallel_apply(lambda _, k: k, None, jdp.scatter((keys,), devices[:3]))), keys)


# --- derivatives


def mean_over_chunks(params, x, devices):
    return (jdp.gather(run(net, params, x, devices))["loss"] ** 2).sum()


def mean_over_loop(params, x, sizes):
    ends = np.cumsum(sizes)
    losses = [net(params, x[end - size : end])["loss"] for size, end in zip(sizes, ends, strict=True)]
    return (jnp.stack(losses) ** 2).sum()


@pytest.mark.one_case("2-3-jit")
@pytest.mark.each_value
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("size, n", [(8, 2), (7, 3), (5, 4), (2, 3)])
def test_gradients_are_those_of_the_loop(devices, wrap, size, n):
    x = noise(size, 3)
    got = wrap(jax.grad(partial(mean_over_chunks, devices=devices[:n]), (0, 1)))(PARAMS, x)
    want = jax.grad(partial(mean_over_loop, sizes=jdp.chunk_sizes(size, n)), (0, 1))(PARAMS, x)
    close(got, want)


@pytest.mark.full
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("size", [8, 5])
def test_second_derivatives_are_those_of_the_loop(devices, wrap, size):
    x = noise(size, 3)

    def double(f):
        inner = lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(p, x)))  # noqa: E731
        return jax.grad(inner)

    got = wrap(double(partial(mean_over_chunks, devices=devices[:3])))(PARAMS)
    close(got, double(partial(mean_over_loop, sizes=jdp.chunk_sizes(size, 3)))(PARAMS))


def test_the_gradient_of_a_parameter_is_the_sum_over_replicas_where_it_lives(same, devices):
    x = rows(5, 2)
    fn = lambda w, x: (x * w).sum()  # noqa: E731
    total = lambda w: jdp.reduce_add(run(fn, w, x, devices[1:4]))  # noqa: E731
    for w, where in (
        (jax.device_put(np.float32([1, 1]), devices[1]), {devices[1]}),
        (jdp.replicate(np.float32([1, 1]), devices[1:4]), set(devices[1:4])),
    ):
        g = jax.grad(total)(w)
        same(g, x.sum(0))
        assert g.devices() == where


def test_the_gradient_of_a_whole_input_is_the_sum_over_replicas(same, devices):
    def f(temperature):
        inputs = jdp.scatter((rows(5), temperature), devices[:3])
        return jdp.gather(jdp.parallel_apply(lambda _, x, t: x * t, None, inputs)).sum()

    same(jax.grad(f)(jnp.float32(2)), np.float32(10))
    same(jax.jit(jax.grad(f))(jnp.float32(2)), np.float32(10))


def test_idle_replicas_add_nothing_to_a_gradient(same, devices):
    # the second would give nan on no rows
    for fn in (lambda w, x: x * w, lambda w, x: x * w / x.mean()):
        total = lambda w: jdp.gather(run(fn, w, rows(3), devices[:3], chunk_sizes=(0, 3, 0))).sum()  # noqa: B023, E731
        same(jax.grad(total)(jnp.float32(2)), np.float32(3))


def test_no_rows_have_no_gradient(same, devices):
    f = lambda w: jdp.gather(run(lambda w, x: x * w, w, rows(0, 2), devices[:2])).sum()  # noqa: E731
    same(jax.grad(f)(jnp.ones(2)), np.zeros(2, np.float32))


@pytest.mark.full
def test_under_scan_and_checkpoint(devices):
    x = noise(5, 3)

    def f(params, apply):
        step = lambda carry, _: (carry + apply(params), None)  # noqa: E731
        return lax.scan(step, 0.0, None, length=2)[0]

    inner = jax.checkpoint(partial(mean_over_chunks, x=x, devices=devices[:2]))
    want = jax.value_and_grad(partial(f, apply=partial(mean_over_loop, x=x, sizes=(3, 2))))(PARAMS)
    close(jax.jit(jax.value_and_grad(partial(f, apply=inner)))(PARAMS), want)


# --- compiled once


def test_one_trace_for_each_even_shape_and_none_for_a_shape_seen_before(devices, traced):
    fn = traced(lambda w, x: x * w)
    for size in (4, 4, 8, 4, 8, 8):
        run(fn, np.float32(2), rows(size), devices[:2])
    assert fn.shapes == [(2,), (4,)]


def test_new_values_objects_and_scatters_do_not_retrace(devices, traced):
    fn = traced(lambda w, x, mode: x * w)
    for value in range(3):
        inputs = jdp.scatter((rows(4) + value, "".join(["me", "an"])), devices[:2])
        jdp.parallel_apply(fn, {"w": jnp.float32(value)}["w"], inputs)
    assert fn.shapes == [(2,)]


def test_an_uneven_shape_seen_before_does_not_retrace(devices, traced, compilations):
    fn = traced(lambda w, x: x * w)
    first = {}
    for size in (10, 9, 4, 10, 9, 4, 5, 10):
        s = jax.block_until_ready(jdp.scatter((rows(size, 2),), devices[:4]))
        traces = len(fn.shapes)
        compilations()
        jdp.parallel_apply(fn, np.float32(2), s)
        new = len(fn.shapes) - traces, compilations()
        if size in first:
            assert new == (0, 0)
        first.setdefault(size, new)
    # each true size is traced, and none but these; each batch size is one program at most
    assert {size: shapes[1] for size, shapes in first.items()} == {10: 1, 9: 1, 4: 1, 5: 1}
    assert {shape[0] for shape in fn.shapes} <= {3, 1, 2}


def test_the_whole_pipeline_compiles_nothing_for_a_shape_seen_before(devices, compilations):
    def pipeline(size, value):
        out = jdp.parallel_apply(net, PARAMS, jdp.scatter((noise(size, 3, seed=value),), devices[:3]))
        return jdp.reduce_add([{"loss": chunk["loss"]} for chunk in out]), jdp.gather(out)

    for size in (6, 5):
        pipeline(size, 0)
        compilations()
        jax.block_until_ready(pipeline(size, 1))
        assert compilations() == 0


def test_a_bound_method_is_compiled_once(devices, traced):
    class Model:
        traces = 0

        def apply(self, w, x):
            Model.traces += 1
            return x * w

    model = Model()
    for _ in range(3):
        run(model.apply, np.float32(2), rows(4), devices[:2])
    assert Model.traces == 1


@pytest.mark.full
@pytest.mark.parametrize("size", [4, 5])
def test_a_function_is_freed_after_use(devices, size):
    def use():
        big = jnp.ones(3)

        def fn(w, x):
            return (x * w * big.sum()).sum() + x

        jdp.gather(run(fn, np.float32(2), rows(size), devices[:3]))
        jax.grad(lambda w: jdp.gather(run(fn, w, rows(size), devices[:3])).sum())(np.float32(2))
        return weakref.ref(fn), weakref.ref(big)

    watch = use()
    gc.collect()
    assert [ref() for ref in watch] == [None, None]


class Slotted:
    """No weak reference can be made to it, nor can it be hashed."""

    __slots__ = ("scale", "traces")
    __hash__ = None

    def __init__(self, scale):
        self.scale, self.traces = scale, []

    def __call__(self, w, x):
        self.traces.append(x.shape)
        return w * x * self.scale

    def double(self, w, x):
        return 2 * self(w, x)


def test_a_callable_with_slots_is_traced_once(devices):
    one, two = Slotted(1.0), Slotted(10.0)
    for fn, scale in ((one, 1), (two, 10), (one.double, 2), (two, 10), (one, 1), (one.double, 2)):
        out = jdp.gather(run(fn, np.float32(2), rows(4), devices[:2]))
        np.testing.assert_allclose(out, 2 * scale * rows(4), rtol=1e-6)
    assert len(one.traces) == 2 and len(two.traces) == 1  # of `one` also that of its method
    jdp.data_parallel(two, np.float32(2), rows(4), devices=[0])
    jdp.data_parallel(two, np.float32(2), rows(4), devices=[0])
    assert len(two.traces) == 2


@pytest.mark.full
def test_callables_with_slots_do_not_pile_up(devices):
    def alive():
        gc.collect()
        return sum(type(x) is Slotted for x in gc.get_objects())

    for i in range(20):
        run(Slotted(float(i)), np.float32(2), rows(2), devices[:1])
    assert alive() <= 16
    for i in range(20):  # ids are given again, to other objects
        out = jdp.gather(run(Slotted(float(i)), np.float32(2), rows(2), devices[:1]))
        np.testing.assert_allclose(out, 2 * i * rows(2), rtol=1e-6)
    assert alive() <= 16


def test_what_is_kept_in_a_store_of_its_own_does_not_pile_up():
    """A wrapper keeps its programs in its own store, and its module may be exchanged for another at any time."""
    store = {}
    for i in range(3 * MOST_HELD):
        assert made_once(Slotted(float(i)), "key", lambda fn: fn(1, np.ones(1)), store)[0] == i
    assert len(store) <= MOST_HELD


# --- errors of the function


class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.a, self.b = a, b


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize(
    "error, text",
    [
        (KeyError("missing"), "missing"),
        (ValueError("no such\nthing"), "no such\nthing"),
        (TwoArguments("left", 2), "left"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "odd byte"), "odd byte"),
        (OSError(2, "no file", "f.txt"), "no file"),
        (StopIteration("over"), "over"),
        (NotImplementedError(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_keeps_its_type_and_text_and_says_where_it_was(devices, size, error, text):
    def fn(w, x):
        raise error

    kind = type(error)
    with pytest.raises(kind, match=rf"Caught {kind.__name__} in replica 0 on device .*cpu:?0") as info:
        run(fn, None, rows(size), devices[:2])
    assert type(info.value) is kind
    assert text in str(info.value)


def test_an_exception_keeps_its_attributes(devices):
    def fn(w, x):
        raise TwoArguments("left", 2)

    with pytest.raises(TwoArguments, match="left") as info:
        run(fn, None, rows(4), devices[:2])
    assert (info.value.a, info.value.b) == ("left", 2)


def test_the_replica_named_is_the_one_whose_chunk_raised(devices):
    def fn(w, x):
        if x.shape[0] == 1:
            raise KeyError("too short")
        return x

    with pytest.raises(KeyError, match=r"Caught KeyError in replica 3 on device .*cpu:?5"):
        run(fn, None, rows(10), devices[2:6])


def test_an_exception_raised_again_and_again_says_it_once(devices):
    def fn(w, x):
        raise KeyError("missing")

    for _ in range(2):
        with pytest.raises(KeyError, match="Caught KeyError in replica 0") as info:
            run(fn, None, rows(4), devices[:2])
        text = str(info.value) + "".join(getattr(info.value, "__notes__", []))
        assert text.count("Caught KeyError") == 1


def test_wrong_arguments_are_a_type_error_from_the_replica(devices):
    with pytest.raises(TypeError, match="Caught TypeError in replica 0 on device"):
        run(lambda w: w, 1.0, rows(4), devices[:2])


def test_after_an_exception_the_function_runs_again(same, devices):
    broken = [True]

    def fn(w, x):
        if broken[0]:
            raise ValueError("not yet")
        return x

    x = jnp.asarray(rows(4))
    with pytest.raises(ValueError, match="not yet"):
        run(fn, None, x, devices[:2])
    broken[0] = False
    same(jdp.gather(run(fn, None, x, devices[:2])), rows(4))


# --- outputs that are refused


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("leaf", [1, 2.0, True, "text", object()], ids=lambda leaf: type(leaf).__name__)
def test_an_output_that_is_no_array_is_refused(refused, devices, size, leaf):
    with refused(TypeError, "parallel_apply", r"(?s)\['aux'\]\[1\]"):
        run(lambda _, x: {"y": x, "aux": (x, leaf)}, None, rows(size), devices[:2])


def test_numpy_s_arrays_among_outputs_are_taken_as_those_among_inputs_are(refused, same, devices):
    big = np.arange(2).astype(">i4")
    same(jdp.gather(run(lambda _, x: (x, big), None, rows(3), devices[:2])), (rows(3), np.int32([0, 1, 0, 1])))
    for value, error, match in (
        (np.array([2**40]), OverflowError, r"output\[1\] holds 1099511627776; integers here are int32"),
        (np.ma.masked_array([1.0], [True]), TypeError, r"output\[1\] is a numpy.ma.MaskedArray.*x\.filled"),
    ):
        with refused(error, "parallel_apply", match):
            run(lambda _, x, value=value: (x, value), None, rows(3), devices[:2])


@pytest.mark.parametrize(
    "fn, match",
    [
        (lambda _, x: {"y": jnp.ones((2, x.shape[0]))}, r"(?s)\['y'\].*3.*2"),
        (lambda _, x: {"y": x if x.shape[0] == 3 else x[:, None]}, r"(?s)\['y'\]"),
        (lambda _, x: {"y": x if x.shape[0] == 3 else x.astype(int)}, r"(?s)\['y'\].*float32.*int32"),
        (lambda _, x: {"y": x if x.shape[0] == 3 else x.sum()}, r"(?s)\['y'\]"),
        (lambda _, x: {"y": x} if x.shape[0] == 3 else {"z": x}, r"(?s)y.*z"),
        (lambda _, x: (x,) if x.shape[0] == 3 else (x, x), r"(?s)replica"),
        (lambda _, x: x if x.shape[0] == 3 else None, r"(?s)None"),
    ],
    ids=["off dim", "rank", "dtype", "0-d", "keys", "length", "None"],
)
def test_replicas_whose_outputs_differ_off_dim_are_refused(refused, devices, fn, match):
    with refused(ValueError, "parallel_apply", match):
        run(fn, None, rows(5), devices[:2])


def test_nothing_changes_on_a_refused_call(same, devices):
    w, x = jnp.asarray(rows(2)), jnp.asarray(rows(5, 2))
    s = jdp.scatter({"x": x}, devices[:2])
    with pytest.raises(TypeError, match=r"\['b'\] is a str"):
        jdp.parallel_apply(lambda w, d: {"a": d["x"] * w, "b": "text"}, {"w": w}["w"], s)
    assert not w.is_deleted() and not x.is_deleted()
    same((w, x, jdp.gather(s)), (rows(2), rows(5, 2), {"x": rows(5, 2)}))


def test_strict_promotion_settings_are_no_trouble(devices):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for size in (4, 3):
            x = noise(size, 3)
            got = jdp.gather(run(lambda w, x: {"y": x @ w, "key": (x**2).sum()}, PARAMS["w"], x, devices[:2]))
            close(got["y"], x @ PARAMS["w"])


def test_a_number_of_each_replica_is_not_one_for_all():
    """Inputs that differ in nothing else: each is a program of its own, whichever comes first."""
    x = np.arange(16, dtype=np.float32)
    each = jdp.parallel_apply(lambda _, x: (x, x.sum()), None, jdp.scatter((x,)))
    one = jdp.scatter((x, np.float32(5)))
    for inputs in ((each, one), (one, each)):

        def add(_, x, y):
            return x + y

        found = [jdp.gather(jdp.parallel_apply(add, None, s)) for s in inputs]
        expected = {id(each): x + np.repeat(x.reshape(8, 2).sum(1), 2), id(one): x + 5}
        for s, out in zip(inputs, found, strict=True):
            np.testing.assert_array_equal(out, expected[id(s)])


def test_a_whole_leaf_of_a_cut_batch_runs_once_when_it_comes_alone():
    dp = jdp.DataParallel(lambda w, x: w * x, devices=range(4))
    with contextlib.closing(dp.prefetch([(np.ones(8, np.float32), np.float32(3))])) as batches:
        ((_, whole),) = batches
    out = jdp.gather(jdp.parallel_apply(lambda w, t: w * t, 2.0, whole))
    np.testing.assert_array_equal(out, [6])


def test_an_update_in_another_dtype_on_idle_replicas():
    class Narrow(nn.Module):
        @nn.compact
        def __call__(self, x):
            mean = self.variable("stats", "mean", jnp.zeros, (), jnp.float32)
            mean.value = jnp.mean(x.astype(jnp.bfloat16))
            return x

    dp, variables = jdp.DataParallel(Narrow(), range(4)), {"stats": {"mean": np.float32(0)}}
    for rows in (8, 5):
        _, after = dp.apply(variables, np.ones(rows, np.float32), mutable=["stats"])
        assert after["stats"]["mean"].dtype == jnp.bfloat16 and float(after["stats"]["mean"]) == 1


def test_of_the_values_that_it_warns_about_it_keeps_a_few():
    """A server that passes a new number with each call compiles each time, but does not grow without end."""
    seen = {}
    with pytest.warns(UserWarning, match="for the 4th time") as record:
        for i in range(9):
            called = SimpleNamespace(layouts=(jdp.scatter((i,), [0])._layout,), verb="parallel_apply")
            _warn_new_values(seen, [], called, "fn")
    assert len(record) == 1 and [len(values) for values in seen.values()] == [4]


def test_keyword_arguments_may_come_from_a_mesh_with_another_name(devices):
    mesh, y = jax.sharding.Mesh(np.array(devices[:2]), ("batch",)), np.arange(5.0, dtype=np.float32)
    inputs, kwargs = jdp.scatter((y,), mesh), jdp.scatter({"y": y}, devices[:2])
    found = jdp.parallel_apply(lambda w, x, y: w * x + y, 2.0, inputs, kwargs)
    assert jdp.gather(found).tolist() == (3 * y).tolist()
