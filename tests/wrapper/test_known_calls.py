"""A call like one before it goes straight to its program, and gives what it would have given with all steps."""

import contextlib
import gc
import threading
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import io_callback, sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp
import jdp._wrapper.forward as forward


def affine(params, x, scale=1.0):
    return x @ params["a"] * scale + params["b"]


def host_params(dtype=np.float32):
    return {"a": np.arange(6, dtype=dtype).reshape(2, 3), "b": np.ones(3, dtype)}


X = np.arange(32, dtype=np.float32).reshape(16, 2)
EXPECTED = X @ host_params()["a"] + 1


@contextlib.contextmanager
def straight(monkeypatch):
    """In here the four steps must not be taken."""

    def refuse(*args, **kwargs):
        raise AssertionError("the four steps were taken")

    with monkeypatch.context() as patch:
        patch.setattr(forward, "four_steps", refuse)
        yield


def wrapper(module=affine, **options):
    """A wrapper of a function of its own, that shares no program with another's."""
    return jdp.DataParallel(lambda *args, **kwargs: module(*args, **kwargs), **options)


def same(found, expected):
    np.testing.assert_array_equal(found, expected)
    assert found.sharding == expected.sharding


def test_scattered_and_host_batches_of_placed_parameters_are_recalled(monkeypatch):
    dp = wrapper()
    params = jdp.replicate(host_params())
    (scattered,) = dp.prefetch([X])
    for batch in (scattered, X):
        first = dp.apply(params, batch)
        with straight(monkeypatch):
            again = dp.apply(params, batch)
            other = dp.apply(jax.tree.map(lambda x: x * 2, params), batch)
        np.testing.assert_allclose(first, EXPECTED)
        same(again, first)
        np.testing.assert_allclose(other, 2 * EXPECTED)
    with pytest.raises(AssertionError, match="four steps"), straight(monkeypatch):
        dp.apply(params, X[:8])  # of another shape: not known


def test_parameters_that_were_replicated_under_another_name_of_the_axis_are_recalled(monkeypatch, compilations):
    """`jdp.replicate` calls the axis "data". Its arrays lie where they belong; but a state comes back as results do."""
    dp = wrapper(axis_name="batch")
    params = jdp.replicate(host_params())
    first = dp.apply(params, X)
    with straight(monkeypatch):
        same(dp.apply(params, X), first)
    np.testing.assert_allclose(first, EXPECTED)
    step = dp.parallel(lambda params, x: (jax.tree.map(jnp.negative, params), x.sum()), in_axes=(None, 0))
    state, _ = step(params, X)
    compilations()
    state, _ = step(state, X)
    assert not compilations()


@pytest.mark.one_case
@pytest.mark.parametrize("rows", [16, 13])
def test_one_program_with_outputs_of_several_trees(monkeypatch, rows):
    """They depend on the parameters: how many arrays, and which of them have a row for each of the batch."""

    def each(params, x):
        return {k: x * w if k != "whole" else w + 1 for k, w in params.items()}

    dp, kinds = wrapper(each), (["a"], ["a", "b"], ["whole"], ["a", "whole"])
    params = [jdp.replicate({k: np.float32(i + 2) for i, k in enumerate(kind)}) for kind in kinds]
    (scattered,) = dp.prefetch([X[:rows]])
    first = [dp.apply(w, scattered) for w in params]
    with straight(monkeypatch):
        again = [dp.apply(w, scattered) for w in params]
    for w, one, two in zip(params, first, again, strict=True):
        assert one.keys() == two.keys() == w.keys()
        for k, expected in each(jax.device_get(w), X[:rows]).items():
            same(two[k], one[k])
            np.testing.assert_array_equal(one[k], expected)


def test_uneven_scattered_batches_are_recalled_and_trimmed(monkeypatch):
    dp = wrapper()
    params = jdp.replicate(host_params())
    (scattered,) = dp.prefetch([X[:13]])
    first = dp.apply(params, scattered)
    with straight(monkeypatch):
        again = dp.apply(params, scattered)
    same(again, first)
    np.testing.assert_allclose(again, EXPECTED[:13])


@pytest.mark.parametrize("move", [lambda x: jax.device_put(x, jax.devices()[5]), np.asarray], ids=["device", "host"])
def test_chunks_that_were_moved_are_put_back_as_ever(move):
    """`jax.tree.map` keeps the layout of a `Scattered`, and not the place of its arrays."""
    dp, params, scattered = wrapper(), jdp.replicate(host_params()), jdp.scatter(X)
    for batch in (scattered, jax.tree.map(move, scattered), scattered):
        np.testing.assert_allclose(dp.apply(params, batch), EXPECTED)


def test_batches_that_were_scattered_one_by_one_are_recalled(monkeypatch):
    """Each has a layout of its own, equal to the others'."""
    dp, params = wrapper(), jdp.replicate(host_params())
    first = dp.apply(params, jdp.scatter(X))
    with straight(monkeypatch):
        same(dp.apply(params, jdp.scatter(X)), first)
        with pytest.raises(AssertionError, match="four steps"):
            dp.apply(params, jdp.scatter(X[:13]))


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [str, np.str_, np.bytes_])
def test_names_in_a_batch_that_are_of_numpys_types(kind):
    """They are Python values, as a str is: a known call has none of them among its arrays."""
    dp = wrapper(lambda params, batch: affine(params, batch["x"]))
    for name in ("a.png", "b.png"):
        value = kind(name.encode()) if kind is np.bytes_ else kind(name)
        np.testing.assert_array_equal(dp(host_params(), {"x": X, "name": value}), EXPECTED)


@pytest.mark.parametrize("moved", [["a"], ["b"], ["a", "b"]], ids=str)
@pytest.mark.parametrize("place", ["host", "primary", "uncommitted"])
def test_parameters_elsewhere_are_moved_as_ever(moved, place):
    """Also the second time, when JAX knows those too; and results lie where a wrapper without a memory puts them."""
    put = {
        "host": np.asarray,
        "primary": lambda x: jax.device_put(x, jax.devices()[0]),
        "uncommitted": jnp.asarray,
    }[place]
    dp, params = wrapper(), jdp.replicate(host_params())
    placed = dp.apply(params, X)
    elsewhere = {name: put(np.asarray(x)) if name in moved else x for name, x in params.items()}
    expected = wrapper().apply(elsewhere, X)
    for _ in range(3):
        same(dp.apply(elsewhere, X), expected)
        same(dp.apply(params, X), placed)
    np.testing.assert_allclose(expected, EXPECTED)


def test_parameters_of_another_device_are_refused_as_ever():
    dp, params = wrapper(), jdp.replicate(host_params())
    dp.apply(params, X)
    for name in params:
        wrong = params | {name: jax.device_put(np.asarray(params[name]), jax.devices()[3])}
        for _ in range(2):
            with pytest.raises(RuntimeError, match="must have its parameters and buffers on device"):
                dp.apply(wrong, X)
            with pytest.raises(RuntimeError, match="must have its parameters and buffers on device"):
                jax.jit(lambda wrong=wrong: dp.apply(wrong, X))()


@pytest.mark.parametrize("evicted", [False, True])
def test_parameters_that_are_cut_go_another_way(evicted):
    """JAX traces nothing anew for these, so only the number of its calls shows them."""
    dp, params = wrapper(), jdp.replicate({"a": np.ones((2, 16), np.float32), "b": np.ones(16, np.float32)})
    for _ in range(3):
        dp.apply(params, X)
    (known,) = dp._config.calls.values()
    mesh, spec = params["a"].sharding.mesh, PartitionSpec("data")
    cut = jax.device_put(params["b"], NamedSharding(mesh, spec))
    elsewhere = jax.device_put(params["b"], NamedSharding(Mesh(mesh.devices, ("other",)), PartitionSpec("other")))
    expected = dp.apply(params, X)
    if evicted:  # as happens to the oldest of thousands
        ((program, *_),) = known.values()
        program.run._clear_cache()
    for _ in range(2):
        np.testing.assert_array_equal(dp.apply(params | {"b": cut}, X), expected)  # of shard_params
        with pytest.raises(RuntimeError, match="must have its parameters and buffers on device"):
            dp.apply(params | {"b": elsewhere}, X)


def test_errors_are_those_of_a_call_that_is_not_known():
    dp, params = wrapper(), jdp.replicate(host_params())
    dp.apply(params, X)
    wrong = jdp.replicate({"a": np.ones((5, 3), np.float32), "b": np.ones(3, np.float32)})
    for _ in range(2):
        with pytest.raises(TypeError) as found:
            dp.apply(wrong, X)
        assert any("replica 0" in note for note in found.value.__notes__)


def test_what_is_part_of_the_program_is_part_of_the_memory(monkeypatch):
    dp = wrapper(lambda w, x, flag: x + w if flag is True else x - w)
    w = jdp.replicate(np.float32(1))
    for flag in (True, 1, False, 0, "yes"):
        expected = X + 1 if flag is True else X - 1
        np.testing.assert_array_equal(dp.apply(w, X, flag), expected)
        with straight(monkeypatch):
            np.testing.assert_array_equal(dp.apply(w, X, flag), expected)


def test_positional_and_keyword_arguments_are_not_confused():
    dp = wrapper(lambda w, *args, **kwargs: w * (args[0]["x"] if args else -kwargs["x"]))
    w = jdp.replicate(np.float32(1))
    for _ in range(2):
        np.testing.assert_array_equal(dp.apply(w, {"x": X}), X)
        np.testing.assert_array_equal(dp.apply(w, x=X), -X)


def test_a_legacy_key_is_refused_though_rows_of_its_shape_are_known():
    devices = jax.devices()[:2]
    dp, w = wrapper(lambda w, x: x * w, devices=devices), jdp.replicate(np.float32(1), devices)
    rows = jax.device_put(np.ones(2, np.float32), dp.scatter((np.ones(2),), {}, dp.devices)[0]._layout.shardings[0])
    for _ in range(2):
        assert dp.apply(w, rows).tolist() == [1, 1]
    assert dp._config.calls
    with pytest.raises(TypeError, match="legacy PRNG key"):
        dp.apply(w, rows.astype(np.uint32))


def test_the_order_of_keywords_does_not_matter():
    dp = wrapper(lambda w, **kwargs: w * (kwargs["p"] - 2 * kwargs["q"]))
    w = jdp.replicate(np.float32(1))
    for _ in range(2):
        np.testing.assert_array_equal(dp.apply(w, p=X, q=X + 1), X - 2 * (X + 1))
        np.testing.assert_array_equal(dp.apply(w, q=X + 1, p=X), X - 2 * (X + 1))


def test_a_module_that_takes_the_place_of_another():
    dp, w = wrapper(lambda w, x: x * w), jdp.replicate(np.float32(3))
    dp.apply(w, X)
    dp.module = lambda w, x: x - w
    for _ in range(2):
        np.testing.assert_array_equal(dp.apply(w, X), X - 3)


@pytest.mark.parametrize("step", ["scatter", "replicate", "parallel_apply", "gather"])
@pytest.mark.parametrize("of", ["subclass", "class", "instance"])
def test_replaced_steps_are_taken(monkeypatch, step, of):
    seen = []

    def replaced(self, *args):
        seen.append(step)
        return original(self, *args)

    original = getattr(jdp.DataParallel, step)
    kind = type("Sub", (jdp.DataParallel,), {step: replaced}) if of == "subclass" else jdp.DataParallel
    dp = kind(lambda w, x: x * w)
    w = jdp.replicate(np.float32(3))
    if of != "subclass":
        dp.apply(w, X)
        dp.apply(w, X)
    if of == "class":
        monkeypatch.setattr(jdp.DataParallel, step, replaced)
    if of == "instance":
        object.__setattr__(dp, step, lambda *args: replaced(dp, *args))
    for _ in range(2):
        np.testing.assert_array_equal(dp.apply(w, X), 3 * X)
    assert seen == [step, step]


@pytest.mark.parametrize("known", [True, False])
def test_a_step_of_another_wrapper_is_taken(known):
    """It is the same function, and another's method."""
    dp, other = wrapper(lambda w, x: x * w), wrapper(lambda w, x: x - w)
    w = jdp.replicate(np.float32(3))
    for _ in range(2 * known):
        dp.apply(w, X)
    object.__setattr__(dp, "parallel_apply", other.parallel_apply)
    for _ in range(3):
        np.testing.assert_array_equal(dp.apply(w, X), X - 3)


@pytest.mark.full
def test_transformations_and_replicas_after_a_call_that_is_known():
    dp, params = wrapper(), jdp.replicate(host_params())
    (scattered,) = dp.prefetch([X])
    for batch in (scattered, X):
        dp.apply(params, batch)
        dp.apply(params, batch)
        np.testing.assert_allclose(jax.jit(lambda p, batch=batch: dp.apply(p, batch))(params), EXPECTED)
        # Nothing is a tracer here but what is differentiated, which is no argument.
        assert jax.grad(lambda s, batch=batch: (dp.apply(params, batch) * s).sum())(2.0) == EXPECTED.sum()
        grads = jax.grad(lambda p, batch=batch: dp.apply(p, batch).sum())(params)
        np.testing.assert_allclose(grads["b"], [16, 16, 16])
    found, expected = (jax.jit(lambda dp=dp: dp.apply(elsewhere(params), X))() for dp in (dp, wrapper()))
    same(found, expected)
    inside = jax.pmap(lambda x: dp.apply(host_params(), x))(X.reshape(8, 2, 2))
    np.testing.assert_allclose(inside.reshape(16, 3), EXPECTED)


def per_replica(call):
    """The call on each of eight devices, which have an axis of the name that the program's own has."""
    each = PartitionSpec("data")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda i: call().sum() + i, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    return jax.jit(mapped)(np.zeros(8, np.float32))


TRACES = {  # of a call of the other parameters, with the batch and the first of them no tracers
    "replica": lambda call, b: per_replica(lambda: call(b)),
    "pmap": lambda call, b: jax.pmap(lambda i: call(b).sum() + i)(np.zeros(8, np.float32)),
    "vmap": lambda call, b: jax.vmap(lambda i: call(b).sum() + i)(np.zeros(8, np.float32)),
    "vmap of parameters": lambda call, b: jax.vmap(call)(jnp.stack([b, b * 2])),
    "grad": lambda call, b: jax.grad(lambda b: call(b).sum())(b),
    "hessian": lambda call, b: jax.hessian(lambda b: (call(b) ** 2).sum())(b),
    "jit": lambda call, b: jax.jit(lambda: call(b))(),
    "jit of parameters": lambda call, b: jax.jit(call)(b),
    "jit of the host's": lambda call, b: jax.jit(lambda: call(np.asarray(b)))(),
    "scan": lambda call, b: jax.lax.scan(lambda c, i: (c + call(b).sum(), i), 0.0, np.arange(3))[0],
    "remat": lambda call, b: jax.grad(jax.checkpoint(lambda b: call(b).sum()))(b),
}


@pytest.mark.each_value
@pytest.mark.one_case
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("devices", [8, 1])
@pytest.mark.parametrize("cut", [False, True], ids=["host", "scattered"])
def test_a_known_call_in_a_trace(trace, devices, cut):
    """Is what one is that is not known: within a replica the module itself, and elsewhere the program."""
    found = []
    for calls in (0, 3):
        dp = wrapper(devices=range(devices))
        params = jdp.replicate(host_params(), devices=dp.devices)
        batch = jdp.scatter(X, devices=dp.devices) if cut else X
        for _ in range(calls):
            dp.apply(params, batch)
        assert bool(dp._config.calls) == bool(calls)
        try:
            found.append(trace(lambda b, dp=dp, params=params, x=batch: dp.apply(params | {"b": b}, x), params["b"]))
        except TypeError as error:  # a replica's module does not take what is scattered
            found.append(error)
    if cut and trace in (TRACES["replica"], TRACES["pmap"]):
        assert [type(x) for x in found] == [TypeError, TypeError]
        assert str(found[0]) == str(found[1])
    else:
        same(*found)


def test_linen_with_updates_and_options(monkeypatch):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))

    dp = jdp.DataParallel(Model())
    variables = dp.init(jax.random.key(0), X, False)
    for options in ({"train": True, "mutable": ["batch_stats"]}, {"train": False}):
        first = dp.apply(variables, X, **options)
        with straight(monkeypatch):
            again = dp.apply(variables, X, **options)
        jax.tree.map(same, again, first)


def test_state_with_a_batch_axis_that_comes_later():
    """Not there in the first call, which is known then; in the next it has to be cut."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, ())
            if self.has_variable("cache", "shift"):
                x = x + self.get_variable("cache", "shift")
            return x * scale

    dp = jdp.DataParallel(Model(), state_axes={"cache": 0})
    params = jdp.replicate({"params": {"scale": np.float32(3)}})
    x = X[:8]  # one row each: all eight, whole on a replica, would broadcast
    for _ in range(2):
        np.testing.assert_array_equal(dp.apply(params, x), 3 * x)
    np.testing.assert_array_equal(dp.apply(params | {"cache": {"shift": jdp.replicate(x)}}, x), 6 * x)


def test_dropout_draws_anew():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(x))

    dp = jdp.DataParallel(Model())
    variables = dp.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    keys = [jdp.replicate(jax.random.key(i)) for i in (1, 1, 2)]
    first, again, other = (np.asarray(dp.apply(variables, X, rngs={"dropout": key})) for key in keys)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_output_device_is_kept(monkeypatch):
    for device in (jax.devices()[0], jax.devices()[5], "cpu", "sharded"):
        dp, w = wrapper(lambda w, x: x * w, output_device=device), jdp.replicate(np.float32(3))
        first = dp.apply(w, X)
        with straight(monkeypatch):
            same(dp.apply(w, X), first)


def elsewhere(params):
    """The first leaf in its place, another on the host."""
    return params | {"b": np.asarray(params["b"])}


def test_what_others_have_called_the_program_with_is_not_trusted():
    """The compiled program belongs to the function: other wrappers call it, and parallel_apply by hand."""

    class Lazy(jdp.DataParallel):
        def replicate(self, tree, devices):
            return tree

    def f(params, x):
        return affine(params, x)

    params = jdp.replicate(host_params())
    expected = wrapper().apply(elsewhere(params), X)
    dp = jdp.DataParallel(f)
    dp.apply(params, X)
    Lazy(f).apply(elsewhere(params), X)
    dp.apply(params, X)  # in their place: what is in JAX's cache now has been looked at, but for the lazy one's
    same(dp.apply(elsewhere(params), X), expected)

    dp = wrapper()
    dp.apply(params, X)
    dp.parallel_apply(elsewhere(params), *dp.scatter((X,), {}, dp.devices))
    dp.apply(params, X)
    same(dp.apply(elsewhere(params), X), expected)


@pytest.mark.full
@pytest.mark.parametrize("between", [jax.disable_jit, jax.clear_caches], ids=lambda f: f.__name__)
def test_where_jax_keeps_nothing_parameters_are_looked_at(between, monkeypatch):
    params = jdp.replicate(host_params())
    expected = wrapper().apply(elsewhere(params), X)
    dp = wrapper()
    for _ in range(2):
        dp.apply(params, X)
    with between() or contextlib.nullcontext():
        assert dp.apply(elsewhere(params), X).sharding == expected.sharding
    if between is jax.disable_jit:  # which does not count: JAX does not know them now
        with straight(monkeypatch):
            dp.apply(params, X)


def test_tracers_among_the_parameters_do_not_count_as_misplaced(monkeypatch):
    dp, params = wrapper(), jdp.replicate(host_params())
    for _ in range(3):
        dp.apply(params, X)
    dp.parallel_apply(jax.tree.map(lambda x: x.astype(np.float16), params), *dp.scatter((X,), {}, dp.devices))
    grad = jax.grad(lambda b: dp.apply(params | {"b": b}, X).sum())(params["b"])
    np.testing.assert_allclose(grad, [16, 16, 16])
    with straight(monkeypatch):
        np.testing.assert_allclose(dp.apply(params, X), EXPECTED)


def test_without_jit_the_module_runs_no_oftener_for_a_call_that_is_known():
    """Who turns it off looks at the module with prints and breakpoints."""
    runs, params = [], jdp.replicate(host_params())
    known, other = (wrapper(lambda *args: runs.append(args) or affine(*args)) for _ in range(2))
    for _ in range(3):
        known.apply(params, X)
    counts = []
    for dp in (known, other):
        runs.clear()
        with jax.disable_jit():
            np.testing.assert_allclose(dp.apply(params, X), EXPECTED)
        counts.append(len(runs))
    assert counts[0] == counts[1] > 0


SETTINGS = {
    "float64": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("float32"),
    "device": lambda: jax.default_device(jax.devices()[3]),
    "nans": lambda: jax.debug_nans(True),
    "its own mesh": lambda: jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_settings_of_jax_that_come_and_go(settings, dtype):
    """What is known from outside of them is right inside, and the other way around; numbers and their types."""
    params, batch = jdp.replicate(host_params()), X.astype(dtype)
    # A jit with in_shardings crashes in JAX itself now and then on arrays of 64 bits (0.10.2, 0.12): few calls here.
    times = 1 if settings is SETTINGS["float64"] and dtype is np.float64 else 3
    with settings():
        inside, moved = wrapper().apply(params, batch), wrapper().apply(elsewhere(params), batch)
    outside = wrapper().apply(params, batch)
    dp = wrapper()
    for _ in range(2):
        for _ in range(times):
            same(dp.apply(params, batch), outside)
            assert dp.apply(params, batch).dtype == outside.dtype
        with settings():
            for _ in range(times):
                same(dp.apply(params, batch), inside)
                assert dp.apply(params, batch).dtype == inside.dtype
            same(dp.apply(elsewhere(params), batch), moved)


def test_another_mesh_around_the_call_changes_nothing(monkeypatch):
    dp, params = wrapper(), jdp.replicate(host_params())
    (scattered,) = dp.prefetch([X])
    around = jax.make_mesh((4, 2), ("a", "b"))
    for batch in (scattered, X):
        for _ in range(3):
            for _ in range(2):
                found = dp.apply(params, batch)
            with jax.set_mesh(around):
                same(dp.apply(params, batch), found)
    with straight(monkeypatch):
        same(dp.apply(params, X), dp.apply(params, scattered))


def test_threads_that_call_at_once():
    params = jdp.replicate(host_params())
    expected = wrapper().apply(elsewhere(params), X)
    for _ in range(5):
        dp, found, together = wrapper(), [], threading.Barrier(3)
        dp.apply(params, X)

        def call(dp=dp, found=found, together=together):
            together.wait()
            found.append(dp.apply(elsewhere(params), X))

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for out in found:
            same(out, expected)
        assert len(found) == 3


def test_nothing_is_compiled_for_a_call_that_is_known(compilations):
    dp, params = wrapper(), jdp.replicate(host_params())
    dp.apply(params, X)
    compilations()
    for _ in range(3):
        dp.apply(params, X)
        dp.apply(host_params(), X)
    assert compilations() == 0


# --- a call runs once ---


CALLBACKS = {
    "io_callback": lambda f, x: io_callback(f, jax.ShapeDtypeStruct((), np.float32), x),
    "ordered": lambda f, x: io_callback(f, jax.ShapeDtypeStruct((), np.float32), x, ordered=True),
    "pure_callback": lambda f, x: jax.pure_callback(f, jax.ShapeDtypeStruct((), np.float32), x),
    "in a loop": lambda f, x: jax.lax.fori_loop(0, 1, lambda i, s: s + CALLBACKS["io_callback"](f, x), jnp.float32(0)),
}


@pytest.mark.parametrize("callback", CALLBACKS.values(), ids=CALLBACKS)
@pytest.mark.filterwarnings("ignore")
def test_a_program_that_raises_ran_once(callback):
    """On one device, where JAX raises as the call is made."""
    runs, wrong = [], []

    def called(x):
        runs.append(1)
        if wrong:
            raise KeyError("told to")
        return np.float32(0)

    def model(params, x):
        return affine(params, x) + callback(called, x.sum())

    dp, bare = wrapper(model, devices=[0]), jax.jit(model)
    params = jdp.replicate(host_params(), [0])
    for call in (dp, bare, dp, bare):
        np.testing.assert_allclose(call(params, X), EXPECTED)
    wrong.append(True)
    counts = []
    for call in (bare, dp):
        runs.clear()
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="told to"):
            jax.block_until_ready(call(params, X))
        counts.append(len(runs))
    assert counts == [1, 1]
    wrong.clear()
    # Parameters of which one has to be moved: that too shows before anything runs.
    runs.clear()
    np.testing.assert_allclose(dp(params | {"b": host_params()["b"]}, X), EXPECTED)
    assert len(runs) == 1


def test_nans_are_found_once(monkeypatch, capfd):
    """Where JAX looks at what came out, the call has run."""
    dp = wrapper(lambda w, x: jnp.log(w["w"] * x), devices=[0])
    good, bad = (jdp.replicate({"w": np.float32(w)}, [0]) for w in (1, -1))
    with jax.debug_nans(True):
        for _ in range(2):
            dp(good, X + 1)
        with straight(monkeypatch), pytest.raises(FloatingPointError):
            dp(bad, X + 1)


def test_what_is_refused_is_refused_after_an_array_of_the_same_shape():
    dp = jdp.DataParallel(lambda w, x: x * w, range(2))
    square = np.eye(4, dtype=np.float32)
    dp(np.float32(2), square)
    with pytest.raises(TypeError, match="a sparse array"):
        dp(np.float32(2), sparse.BCOO.fromdense(square))
    with pytest.raises(TypeError, match="is a csr_array, a sparse array"):
        dp(np.float32(2), scipy.sparse.csr_array(square))
    with pytest.raises(TypeError, match="jax.eval_shape"):
        dp(np.float32(2), jax.ShapeDtypeStruct((4, 4), np.float32))


def test_sparse_outputs_are_refused(refused):
    """Their buffers are no rows."""
    square = np.eye(4, dtype=np.float32)
    of_rows = lambda w, x: {"y": sparse.BCOO.fromdense(x * w, nse=x.size)}  # noqa: E731
    with refused(TypeError, "parallel_apply", r"output\['y'\] is a BCOO; .*Return x.todense\(\)"):
        jdp.DataParallel(of_rows, range(2))(np.float32(2), square)
    each = [sparse.BCOO.fromdense(square)] * 2
    for verb in (jdp.gather, jdp.reduce_add):
        with refused(TypeError, verb.__name__, r"outputs\[0\] is a BCOO; .*Pass x.todense\(\)"):
            verb(each)


@pytest.mark.full
def test_a_module_that_was_replaced_is_freed():
    """Also where the new one has other parameters, which are kept by their tree."""

    class Scaled(nn.Module):
        names: tuple

        @nn.compact
        def __call__(self, x):
            return x * sum(self.param(name, nn.initializers.ones, ()) for name in self.names)

    dp, seen = jdp.DataParallel(Scaled(("a",)), range(2)), []
    for names in (("a",), ("a", "b"), ("a", "b", "c")):
        module = Scaled(names)
        dp.module = module
        variables = dp.init(jax.random.key(0), X)
        for _ in range(2):
            np.testing.assert_array_equal(dp.apply(variables, X), X * len(names))
        seen.append(weakref.ref(module))
        del module
    gc.collect()
    assert [one() is None for one in seen] == [True, True, False]
