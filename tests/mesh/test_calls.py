"""Replicas of several devices: a call on a mesh is the call on one device, for every number of rows."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from laws import close
from meshes import (
    EXPLICIT,
    MESHES,
    RULES,
    SPECS,
    WEIGHTS,
    Annotated,
    AnnotatedNNX,
    Plain,
    bare,
    lies_as,
    mesh_of,
    mlp,
    placed,
    rows,
)

import jdp
from jdp._core import gather, replicate


def squares(f):
    return lambda w, x: (f(w, x) ** 2).sum()


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("n", [8, 3, 0, 10])
@pytest.mark.parametrize("name", [*MESHES][::-1])
def test_outputs_and_gradients_are_those_of_one_device(name, n):
    mesh, x = mesh_of(name), rows(n)
    dp = jdp.DataParallel(mlp, mesh)
    assert dp.devices == (*mesh.devices.flat,) and dp.mesh.shape == mesh.shape
    for w in (placed(mesh), WEIGHTS):
        close(dp(w, x), bare(WEIGHTS, x), 1e-5, 1e-5)
        if n:
            close(jax.grad(squares(dp))(w, x), jax.grad(squares(bare))(WEIGHTS, x), 1e-4, 1e-4)
    if n:
        lies_as(jax.grad(squares(dp))(placed(mesh), x))
        lies_as(jax.jit(jax.grad(squares(dp)))(placed(dp.mesh), x))
    assert dp(placed(mesh), x).sharding.device_set == {*mesh.devices.flat}
    assert dp(WEIGHTS, x).devices() == {mesh.devices.flat[0]}


def thirds(w, x):
    """Three thirds of a product, as attention cuts off its queries, keys and values, and how much the rows deviate.

    Rows that are equal deviate by the root of zero, whose derivative is infinite. The loop never ends for zeros.
    """
    doubled = jax.lax.while_loop(lambda y: (jnp.abs(y) < 1).any(), lambda y: 2 * y, jax.lax.stop_gradient(x[:, :1]))
    hidden = jnp.tanh(x @ w["wide"]) * jnp.sign(doubled)
    q, k, v = jnp.split(hidden[:, :12], 3, axis=-1)
    return (q * k + v) @ w["narrow"][:4] + w["bias"] + (hidden.std(0)[:4] if len(x) > 1 else 0)


NARROW_WHOLE = {**SPECS, "narrow": P()}


@pytest.mark.full
@pytest.mark.parametrize(("name", "n"), [("4x2", 10), ("2x4", 3), ("4x2", 1), ("2x2", 7)])
def test_uneven_replicas_that_move_parts_of_arrays_inside_do_not_wait_for_each_other(name, n):
    """XLA cuts an array that is cut already by collective-permutes, for which it needs the devices of all replicas."""
    mesh, x = mesh_of(name), rows(n)
    dp, w, count = jdp.DataParallel(thirds, mesh), placed(mesh, NARROW_WHOLE), mesh.shape["data"]
    chunks = np.split(x, np.cumsum(jdp.chunk_sizes(n, count))[:-1])

    def loop(w, x):
        return jnp.concatenate([thirds(w, chunk) for chunk in chunks])

    value, grads = jax.value_and_grad(squares(loop))(WEIGHTS, x)
    close(dp(w, x), loop(WEIGHTS, x), 1e-5, 1e-5)
    close(jax.grad(squares(dp))(w, x), grads, 1e-4, 1e-4)
    lies_as(jax.grad(squares(dp))(w, x), NARROW_WHOLE)
    both = dp.value_and_grad(thirds, criterion=lambda out, x: (out**2).sum())
    close(both(w, x), (value, grads), 1e-4, 1e-4)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 17), name=st.sampled_from([*MESHES]), data=st.data())
def test_any_rows_and_any_placement(n, name, data):
    """The parameters may be cut over any axes inside of a replica, or over none."""
    mesh, x = mesh_of(name), rows(n)
    options = {
        "wide": [P(), P(None, "model"), P("model")],
        "narrow": [P(), P("model"), P(None, "model")],
        "bias": [P()],
    }
    if name in ("one replica", "2x4"):  # of 6 rows 4 devices have no equal parts
        options["wide"].pop()
    w = placed(mesh, {k: data.draw(st.sampled_from(specs)) for k, specs in options.items()})
    dp = jdp.DataParallel(bare, mesh)
    close(dp(w, x), bare(WEIGHTS, x), 1e-5, 1e-5)
    if n:
        close(jax.grad(squares(dp))(w, x), jax.grad(squares(bare))(WEIGHTS, x), 1e-4, 1e-4)


def test_a_call_is_compiled_once_and_the_next_is_straight(compilations):
    mesh = mesh_of("2x2")
    dp, w = jdp.DataParallel(lambda w, x: mlp(w, x), mesh), placed(mesh)
    batches = [rows(8, seed) for seed in range(3)]
    expected = [bare(WEIGHTS, x) for x in batches]
    dp(w, batches[0])
    compilations()
    for x, y in zip(batches, expected, strict=True):
        close(dp(w, x), y, 1e-5, 1e-5)
    assert compilations() == 0 and dp._config.calls
    moved = placed(mesh, {**SPECS, "wide": P("model")})  # the same call with parameters that lie in another way
    close(dp(moved, batches[0]), bare(WEIGHTS, batches[0]), 1e-5, 1e-5)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("logical", [True, False])
@pytest.mark.parametrize("name", ["4x2", "one replica", "explicit", "2x2"])
def test_annotations_of_linen(name, logical):
    mesh, x = mesh_of(name), rows(10)
    with nn.logical_axis_rules(RULES):
        dp = jdp.DataParallel(Annotated(logical), mesh)
        variables = dp.init(jax.random.key(0), x)
        out = dp.apply(variables, x)
    expected = Plain().init(jax.random.key(0), x)
    kernels = variables["params"]
    assert isinstance(kernels["Dense_0"]["kernel"], nn.Partitioned)
    plain = nn.meta.unbox(kernels)
    wide, narrow = plain["Dense_0"], plain["Dense_1"]
    lies_as({"wide": wide["kernel"], "narrow": narrow["kernel"], "bias": narrow["bias"]})
    close(plain, expected["params"])
    close(out, Plain().apply(expected, x), 1e-5, 1e-5)


def test_an_annotation_with_more_axes_than_the_value():
    """Flax's DenseGeneral makes its kernel flat, and applies the annotation of the whole one to that."""
    init = nn.initializers.lecun_normal()
    boxed, x = nn.with_partitioning(init, (None, None, "model", None)), rows(10)
    model = nn.DenseGeneral((3, 4, 2), use_bias=False, kernel_init=boxed)
    dp = jdp.DataParallel(model, mesh_of("4x2"))
    variables = dp.init(jax.random.key(0), x)
    assert nn.meta.unbox(variables)["params"]["kernel"].addressable_data(0).shape == (6, 3, 2, 2)
    plain = nn.DenseGeneral((3, 4, 2), use_bias=False, kernel_init=init)
    close(dp(variables, x), plain.apply(plain.init(jax.random.key(0), x), x), 1e-5, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("how", ["in the mesh", "lazily"])
@pytest.mark.parametrize("name", ["4x2", "one replica", "explicit", "2x2"])
def test_annotations_of_nnx(name, how):
    mesh, x = mesh_of(name), rows(10)
    with jax.set_mesh(mesh) if how == "in the mesh" else nnx.use_eager_sharding(False):
        model = AnnotatedNNX(nnx.Rngs(0))
    dp, alone = jdp.DataParallel(model, mesh), AnnotatedNNX(nnx.Rngs(0), annotated=False)
    dp.eval(), alone.eval()
    lies_as({"wide": model.wide.kernel[...], "narrow": model.narrow.kernel[...], "bias": model.narrow.bias[...]})
    close(dp(x), alone(x), 1e-5, 1e-5)
    grads = nnx.grad(lambda dp: (dp(x) ** 2).mean())(dp)
    expected = nnx.grad(lambda model: (model(x) ** 2).mean())(alone)
    close(nnx.as_pure(grads)["module"], nnx.as_pure(expected), 1e-4, 1e-5)
    dp.train(), alone.train()
    dp(rows(8)), alone(rows(8)[: 8 // mesh.shape["data"]])  # the primary replica's rows
    close(model.norm.mean[...], alone.norm.mean[...], 1e-5, 1e-5)


@pytest.mark.full
def test_masks_are_those_of_as_many_single_devices():
    drop = lambda key, x: jax.random.bernoulli(key, 0.5, x.shape) * x  # noqa: E731
    x, key = rows(10), jax.random.key(3)
    found = jdp.DataParallel(lambda w, x, key: drop(key, x), mesh_of("4x2"))({}, x, key)
    np.testing.assert_array_equal(
        found, jdp.DataParallel(lambda w, x, key: drop(key, x), jax.devices()[:4])({}, x, key)
    )


def test_collectives_over_the_replicas_and_none_inside():
    mesh = mesh_of("4x2")
    out = jdp.DataParallel(lambda w, x: mlp(w, x) - jax.lax.pmean(mlp(w, x).mean(0), "data"), mesh)(
        placed(mesh), rows(8)
    )
    y = bare(WEIGHTS, rows(8))
    close(out, y - y.mean(0), 1e-5, 1e-5)
    with pytest.raises(ValueError, match=r"psum over 'data'\) and its chunks are \(3, 3, 3, 1\)"):
        jdp.DataParallel(lambda w, x: x - jax.lax.pmean(x.mean(), "data"), mesh)(WEIGHTS, rows(10))
    alone = mesh_of("one replica")  # whose axis has one member
    out = jdp.DataParallel(lambda w, x: x - jax.lax.pmean(x.mean(0), "data"), alone)(WEIGHTS, rows(5))
    close(out, rows(5) - rows(5).mean(0), 1e-5, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("n", [8, 10])
@pytest.mark.parametrize("way", ["ppermute", "psum"])
def test_a_shard_map_of_the_models_own(way, n):
    """It takes the mesh from the context, and names the axes inside of the replica."""
    mesh, x = mesh_of("4x2"), rows(n)
    spec = {"psum": P("model", None), "ppermute": P(None, "model")}[way]
    out_spec = P() if way == "psum" else P(None, "model")

    @functools.partial(jax.shard_map, in_specs=(spec, P()), out_specs=out_spec, axis_names={"model"}, check_vma=False)
    def product(w, x):
        if way == "ppermute":
            return jax.lax.ppermute(x @ w, "model", [(0, 1), (1, 0)])
        start = jax.lax.axis_index("model") * len(w)
        return jax.lax.psum(jax.lax.dynamic_slice_in_dim(x, start, len(w), 1) @ w, "model")

    def expected(w, x):
        return jnp.roll(x @ w, 8, 1) if way == "ppermute" else x @ w

    dp, w = jdp.DataParallel(product, mesh), jax.device_put(WEIGHTS["wide"], NamedSharding(mesh, spec))
    close(dp(w, x), expected(WEIGHTS["wide"], x), 1e-5, 1e-5)
    close(jax.grad(squares(dp))(w, x), jax.grad(squares(expected))(WEIGHTS["wide"], x), 1e-4, 1e-4)
    named = functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, P()), out_specs=P(), axis_names={"model"})
    with pytest.raises(ValueError) as info:
        jdp.DataParallel(named(lambda w, x: x.sum() * w), mesh)(w, x)
    assert any("Leave mesh= out" in note for note in info.value.__notes__)


class Split(nn.Module):
    """Has a shard_map over the axis inside of the replica, and the names of all axes in a constraint."""

    tanh: object

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.with_partitioning(nn.initializers.normal(), (None, "model")), (6, 8))
        y = jax.lax.with_sharding_constraint(self.tanh(x @ kernel), P("data", "model"))
        return y - jax.lax.pmean(x.mean(), "data")


@pytest.mark.full
@pytest.mark.parametrize("name", ["one replica", "explicit", "2x2"])
def test_init_of_a_model_with_a_shard_map(name):
    """JAX's shard_map keeps the mesh of its first call, which is that of `dp.init`."""
    tanh = jax.shard_map(jnp.tanh, axis_names={"model"}, in_specs=P(None, "model"), out_specs=P(None, "model"))
    dp, x = jdp.DataParallel(Split(tanh), mesh_of(name)), rows(4)
    variables = dp.init(jax.random.key(0), x)
    kernel = variables["params"]["kernel"].value
    lies_as({"wide": kernel})
    close(dp(variables, x), np.tanh(x @ np.asarray(kernel)) - x.mean(), 1e-5, 1e-5)


def context(name):
    if name == "other":
        return jax.set_mesh(jax.make_mesh((8,), ("rows",), axis_types=(mesh_of("2x2").axis_types[0],)))
    return jax.set_mesh(mesh_of(name))


@pytest.mark.full
@pytest.mark.parametrize("name", ["other", "2x4", "4x2"])
def test_the_mesh_of_the_context_changes_nothing(name):
    mesh, x = mesh_of("4x2"), rows(10)
    dp, w = jdp.DataParallel(mlp, mesh), placed(mesh)
    with context(name):
        close(dp(w, x), bare(WEIGHTS, x), 1e-5, 1e-5)
        close(jdp.DataParallel(mlp, mesh)(placed(mesh), x), bare(WEIGHTS, x), 1e-5, 1e-5)
        close(dp.value_and_grad(squares_mean)(w, x)[1], jax.grad(squares_mean_bare)(WEIGHTS, x), 1e-4, 1e-5)
        dp.check_replicas(w)


def squares_mean(w, x):
    return (mlp(w, x) ** 2).mean()


def squares_mean_bare(w, x):
    return (bare(w, x) ** 2).mean()


@pytest.mark.parametrize("again", [lambda dp: pickle.loads(pickle.dumps(dp)), copy.deepcopy], ids=["pickle", "copy"])
def test_a_wrapper_on_a_mesh_pickles(again):
    mesh = mesh_of("model first")
    dp = again(jdp.DataParallel(mlp, mesh))
    assert dp.mesh == mesh and dp.devices == (*mesh.devices.flat,)
    close(dp(placed(mesh), rows(10)), bare(WEIGHTS, rows(10)), 1e-5, 1e-5)


def test_where_outputs_go():
    mesh = mesh_of("4x2")
    w, x = placed(mesh), rows(8)
    for device, where in (("cpu", {jax.devices()[0]}), (3, {jax.devices()[3]}), ("sharded", {*jax.devices()})):
        out = jdp.DataParallel(mlp, mesh, output_device=device)(w, x)
        close(out, bare(WEIGHTS, x), 1e-5, 1e-5)
        assert out.devices() == where
    assert {s.data.shape for s in out.addressable_shards} == {(2, 4)}


def test_accelerators_send_one_of_the_parts_that_a_replica_has(monkeypatch):
    """Each device of a replica has the replica's rows; to gather them, one of these travels."""
    monkeypatch.setattr(gather, "_HOST", "no platform of this name")
    mesh = mesh_of("4x2")
    for n in (8, 10):
        for device, w in ((None, WEIGHTS), (3, placed(mesh))):
            out = jdp.DataParallel(mlp, mesh, output_device=device)(w, rows(n))
            close(out, bare(WEIGHTS, rows(n)), 1e-5, 1e-5)
            assert out.devices() == {jax.devices()[device or 0]}


def test_what_is_refused(refused):
    mesh, x = mesh_of("4x2"), rows(8)
    dp, w = jdp.DataParallel(mlp, mesh), placed(mesh)
    with refused(ValueError, "DataParallel", match="replicas is given, and a replica is the devices along 'model'"):
        jdp.DataParallel(mlp, mesh, replicas=8)
    with refused(ValueError, "DataParallel", match="axis_name is 'rows', and the mesh has the axes 'data', 'model'"):
        jdp.DataParallel(mlp, mesh, axis_name="rows")
    with refused(ValueError, "parallel", match="axis_name is 'batch', and 'data' counts the replicas of the mesh"):
        jdp.DataParallel(mlp, mesh).parallel(lambda w, x: w, axis_name="batch")
    for spec in (P("data"), P(("data", "model"))):
        over = {**w, "wide": jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, spec))}
        with refused(ValueError, "DataParallel", match=r"\['wide'\] is cut as .*Leave 'data' out of its spec"):
            dp(over, x)
        with refused(ValueError, "value_and_grad", match=r"\['wide'\] is cut as .*Leave 'data' out of its spec"):
            dp.value_and_grad(squares_mean)(over, x)
    twice = np.array([jax.devices()[0]] * 4).reshape(2, 2)
    with refused(ValueError, "DataParallel", match="device .* is given twice"):
        jdp.DataParallel(mlp, Mesh(twice, ("data", "model")))
    for verb, call in (("scatter", lambda: jdp.scatter(x, mesh)), ("replicate", lambda: jdp.replicate(x, mesh))):
        with refused(ValueError, verb, match=r"devices is a mesh of the axes data \(4\), model \(2\)"):
            call()
    with refused(ValueError, "data_parallel", match="replicas of several devices are for"):
        jdp.data_parallel(mlp, w, x, mesh)

    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5, kernel_init=nn.with_partitioning(nn.initializers.zeros, (None, "model")))(x)

    with refused(
        ValueError, "DataParallel", match=r"\['Dense_0'\]\['kernel'\] has shape \(6, 5\), .* cuts axis 1 over 2"
    ):
        jdp.DataParallel(Odd(), mesh).init(jax.random.key(0), x)
    twice = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.zeros, ("model", "model")))
    with refused(ValueError, "DataParallel", match=r"\['kernel'\] has the annotation .*, which cuts two axes over"):
        jdp.DataParallel(twice, mesh).init(jax.random.key(0), x)
    with refused(ValueError, "init", match="shard_params is given, and a replica is the devices along 'model'"):
        jdp.DataParallel(Odd(), mesh).init(jax.random.key(0), x, shard_params=True)
    with nnx.use_eager_sharding(False):
        odd = nnx.Linear(
            6, 5, rngs=nnx.Rngs(0), kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
        )
    with refused(ValueError, "DataParallel", match=r"kernel has shape \(6, 5\), .* cuts axis 1 over 2"):
        jdp.DataParallel(odd, mesh)


@pytest.mark.parametrize("name", ["pure_callback", "io_callback"])
def test_callbacks_that_return_a_value_are_refused(name, refused):
    call = {"pure_callback": jax.pure_callback, "io_callback": jax.experimental.io_callback}[name]
    model = lambda w, x: call(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ w  # noqa: E731
    for run in (lambda dp: dp, lambda dp: jax.jit(dp.apply)):
        with refused(NotImplementedError, "parallel_apply", match=rf"the model calls {name} \(.*test_calls.py"):
            run(jdp.DataParallel(model, mesh_of("2x2")))(WEIGHTS["wide"], rows(4))
    alone = jdp.DataParallel(model, mesh_of("one replica"))(WEIGHTS["wide"], rows(4))
    close(alone, np.sin(rows(4)) @ WEIGHTS["wide"], 1e-5, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bits(dtype, refused):
    """XLA's CPU compiler ends the process at sums of 16 bits over the replicas: none is left in the program."""
    mesh, x = mesh_of("2x2"), rows(10).astype(dtype)
    w = jax.tree.map(lambda x: x.astype(dtype), placed(mesh))
    dp, halves = jdp.DataParallel(mlp, mesh), jax.tree.map(lambda x: x.astype(dtype), WEIGHTS)
    loss = lambda f: lambda w, x: (f(w, x).astype(jnp.float32) ** 2).mean()  # noqa: E731
    expected = jax.grad(loss(bare))(halves, x)
    for grads in (jax.grad(loss(dp))(w, x), dp.value_and_grad(loss(mlp))(w, x)[1]):
        assert {g.dtype for g in grads.values()} == {jnp.dtype(dtype)}
        widened = [jax.tree.map(lambda x: np.asarray(x, np.float32), tree) for tree in (grads, expected)]
        close(*widened, 0.05, 0.05)
    for name in ("psum", "pmax", "all_gather"):
        own = functools.partial(getattr(jax.lax, name), axis_name="data")
        with refused(ValueError, "parallel_apply", match=rf"{name} over 'data' of .*16\[4\]; .*Cast to float32"):
            jdp.DataParallel(lambda w, x, own=own: x @ w - own((x @ w).mean(0)).sum(), mesh)(
                halves["wide"][:, :4], x[:8]
            )


@pytest.mark.one_case
@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("reduce_state", ["primary", "mean"])
def test_state_and_outputs_of_16_bits_that_are_one_for_all(reduce_state, size):
    """They are added over the replicas, too: equal to those of replicas of one device."""

    class Kept(nn.Module):
        @nn.compact
        def __call__(self, x):
            kept = self.variable("kept", "sum", jnp.zeros, 6, jnp.bfloat16)
            kept.value = x.sum(0).astype(jnp.bfloat16)
            return x, x.max().astype(jnp.bfloat16)

    x, found = rows(size), []
    for devices in (mesh_of("2x2"), range(2)):
        dp = jdp.DataParallel(Kept(), devices, reduce_state=reduce_state, out_axes=(0, None))
        found.append(dp.apply({"kept": {"sum": np.zeros(6, jnp.bfloat16)}}, x, mutable=["kept"]))
        assert {leaf.dtype for leaf in jax.tree.leaves(found[-1][1])} == {jnp.dtype(jnp.bfloat16)}
    widened = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), each) for each in found]
    close(*widened, 0.01, 0.01)


def test_explicit_axes_are_treated_as_auto(refused):
    mesh = mesh_of("explicit")
    assert mesh.axis_types[0] == EXPLICIT
    dp = jdp.DataParallel(mlp, mesh)
    assert not {EXPLICIT} & {*dp.mesh.axis_types}
    with refused(ValueError, "DataParallel", match=r"traced .* with parameters over Explicit axes, float32"):
        jax.jit(dp)(placed(mesh), rows(8))


def test_parameters_of_another_mesh_are_told_to_be_put_on_this_one():
    """Replicated from the host, all of them would be whole on every device."""
    other = Mesh(np.array(jax.devices()[:2]), ("model",))
    w = jax.device_put(np.ones((4, 2), np.float32), NamedSharding(other, P(None, "model")))
    dp = jdp.DataParallel(lambda w, x: x @ w, mesh_of("4x2"))
    with pytest.raises(RuntimeError, match=r"NamedSharding\(dp\.mesh, spec\)") as error:
        dp(w, np.ones((8, 4), np.float32))
    assert "jdp.replicate" not in str(error.value)
    assert dp(jax.device_put(w, NamedSharding(dp.mesh, w.sharding.spec)), np.ones((8, 4), np.float32)).shape == (8, 2)


def test_a_gradient_is_put_in_place_without_a_copy_of_the_parameters():
    where = NamedSharding(jdp.DataParallel(lambda p, x: x @ p, mesh_of("2x2")).mesh, P(None, "model"))
    w = jax.device_put(np.ones((4, 4), np.float32), where)
    (same,), pull = jax.vjp(lambda w: replicate._with_gradients_at((where,), (w,)), w)
    assert [x.data.unsafe_buffer_pointer() for x in same.addressable_shards] == [
        x.data.unsafe_buffer_pointer() for x in w.addressable_shards
    ]
    assert pull((jnp.ones((4, 4)),))[0].sharding.is_equivalent_to(where, 2)
