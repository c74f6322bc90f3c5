"""Replicas of several devices: steps, gradients and evaluation on a mesh are those of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from laws import close
from meshes import MESHES, SPECS, WEIGHTS, Annotated, AnnotatedNNX, Plain, bare, lies_as, mesh_of, mlp, placed, rows

import jdp

OPTIONS = {
    "plain": {},
    "accumulate": {"accumulate_steps": 2},
    "skip": {"skip_nonfinite": True},
    "compare": {"check_replicas": 1},
    "keep": {"donate": False},
    "sync": {"sync_batch_norm": True},
    "bfloat16": {"reduce_dtype": jnp.bfloat16},
}
LOSSES = {
    "mean": lambda f: (lambda v, x: (f(v["params"], x) ** 2).mean(), None),
    "terms": lambda f: (lambda v, x: jdp.Mean((f(v["params"], x) ** 2).sum(), x.size) + jdp.Sum(x.sum() * 1e-3), None),
    "criterion": lambda f: (lambda v, x: f(v["params"], x), lambda out, x: jnp.sqrt((out**2).sum())),
}
WHOLE = {
    "mean": lambda w, x: (bare(w, x) ** 2).mean(),
    "terms": lambda w, x: (bare(w, x) ** 2).sum() / x.size + x.sum() * 1e-3,
    "criterion": lambda w, x: jnp.sqrt((bare(w, x) ** 2).sum()),
}


TX = optax.adam(0.05)


@functools.cache
def trained(loss, sizes):
    """Parameters, moments and last loss of plain JAX on one device."""
    params, opt_state, value = WEIGHTS, TX.init(WEIGHTS), None
    for seed, n in enumerate(sizes):
        value, grads = jax.value_and_grad(WHOLE[loss])(params, rows(n, seed))
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state, value


def step_on(mesh, loss, tx, options):
    loss_fn, criterion = LOSSES[loss](mlp)
    return jdp.DataParallel(mlp, mesh).train_step(loss_fn, tx, criterion=criterion, **options)


def check_step(name, loss, option, sizes, tolerance=2e-4):
    mesh = mesh_of(name)
    step = step_on(mesh, loss, TX, OPTIONS[option])
    state = step.init({"params": placed(mesh)})
    lies_as(state.opt_state[0].mu)
    for seed, n in enumerate(sizes):
        state, metrics = step(state, rows(n, seed))
    params, opt_state, value = trained(loss, tuple(sizes))
    if option != "bfloat16":
        close(state.params, params, tolerance, tolerance)
        close(state.opt_state[0].nu, opt_state[0].nu, 1e-3, 1e-3)
    close(metrics["loss"], value, 5e-2 if option == "bfloat16" else 1e-3)
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        lies_as(tree)
    return step, state


@pytest.mark.each_pair
@pytest.mark.one_case
@pytest.mark.parametrize("loss", [*LOSSES])
@pytest.mark.parametrize("option", [*OPTIONS][::-1])
@pytest.mark.parametrize("name", ["one replica", "explicit", "4x2"])
def test_a_step_is_that_of_one_device(name, option, loss):
    check_step(name, loss, option, [10, 8, 3])


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from([*MESHES]),
    loss=st.sampled_from([*LOSSES]),
    option=st.sampled_from([x for x in OPTIONS if x != "bfloat16"]),
    sizes=st.lists(st.integers(1, 13), min_size=1, max_size=3),
)
def test_any_mesh_option_loss_and_rows(name, loss, option, sizes):
    check_step(name, loss, option, sizes, 1e-3)


CRITERIA = {
    "sums of classes": lambda out, y: (jax.ops.segment_sum(out, y, 3) ** 2).sum(),
    "largest of classes": lambda out, y: jax.ops.segment_max(out[:, 0], y, 3).clip(-9).sum(),
    "counts": lambda out, y: (out[:, 0] * jnp.bincount(y, length=3)[y]).mean(),
    "sorted": lambda out, y: (jnp.sort(out, 0) * jnp.arange(len(out))[:, None]).sum(),
    "rows by index": lambda out, y: (out[y] * out).mean(),
    "written": lambda out, y: (out[:, 0].at[y].add(out[:, 1]) ** 2).sum(),
}


@pytest.mark.full
@pytest.mark.parametrize("n", [3, 8, 13])
@pytest.mark.parametrize("name", ["2x4", "4x2"])
def test_a_criterion_that_moves_rows(name, n):
    """XLA partitions a scatter after a slice of cut rows wrongly, on a mesh of two axes."""
    x, y = rows(n), np.resize([0, 1, 1, 0, 2], n)
    mesh = mesh_of(name)
    dp, weights = jdp.DataParallel(mlp, mesh), placed(mesh)
    for c in CRITERIA.values():
        expected = jax.value_and_grad(lambda w, c=c: c(bare(w, x), jnp.asarray(y)))(WEIGHTS)
        of_rows = dp.value_and_grad(lambda w, x, y: mlp(w, x), criterion=lambda out, x, y, c=c: c(out, y))
        in_jit = jax.jit(jax.value_and_grad(lambda w, x, y, c=c: c(dp(w, x), y)))
        for found in of_rows(weights, x, y), in_jit(weights, x, jnp.asarray(y)):
            close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.one_case
@pytest.mark.parametrize("n", [8, 10])
@pytest.mark.parametrize("name", ["one replica", "2x4"])
def test_gradients_lie_as_their_parameters(name, n):
    mesh, x = mesh_of(name), rows(n)
    for loss in ("mean", "criterion"):
        loss_fn, criterion = LOSSES[loss](mlp)
        own = lambda w, x, loss_fn=loss_fn: loss_fn({"params": w}, x)  # noqa: E731
        value, grads = jdp.DataParallel(mlp, mesh).value_and_grad(own, criterion=criterion)(placed(mesh), x)
        expected, of_one = jax.value_and_grad(WHOLE[loss])(WEIGHTS, x)
        close(value, expected, 1e-5)
        close(grads, of_one, 1e-4, 1e-5)
        lies_as(grads)


def test_a_whole_parameter_stays_whole_next_to_a_cut_one_of_its_name():
    """The path of the cut one, `['kernel']`, ends the path of the other, `['a']['kernel']`."""
    mesh, one = mesh_of("2x2"), np.eye(6, dtype=np.float32)
    whole, cut = (jax.device_put(one, NamedSharding(mesh, spec)) for spec in (P(), P(None, "model")))
    step = jdp.DataParallel(bare, mesh).train_step(
        lambda v, x: ((x @ v["params"]["a"]["kernel"] @ v["params"]["kernel"]) ** 2).mean(), TX
    )
    state = step.init({"params": {"a": {"kernel": whole}, "kernel": cut}})
    for tree in (state.params, state.opt_state[0].mu):
        lies_as({"a": tree["a"]["kernel"], "kernel": tree["kernel"]}, {"a": P(), "kernel": P(None, "model")})


@pytest.mark.full
def test_the_optimizers_state_of_some_parameters_lies_as_they_do():
    """Moments under a mask, in a list of several optimizers, and factored ones that have another shape."""
    mesh, x = mesh_of("4x2"), rows(10)
    groups = {"wide": "adam", "narrow": "sgd", "bias": "sgd"}
    tx = optax.multi_transform({"adam": optax.adam(0.05), "sgd": optax.sgd(0.1, momentum=0.9)}, groups)
    step = step_on(mesh, "mean", tx, {})
    state, _ = step(step.init({"params": placed(mesh)}), x)
    mu = state.opt_state.inner_states["adam"].inner_state[0].mu
    trace = state.opt_state.inner_states["sgd"].inner_state[0].trace
    lies_as({"wide": mu["wide"], "narrow": trace["narrow"], "bias": trace["bias"]})
    grads = jax.grad(WHOLE["mean"])(WEIGHTS, x)
    updates, _ = tx.update(grads, tx.init(WEIGHTS), WEIGHTS)
    close(state.params, optax.apply_updates(WEIGHTS, updates), 1e-4, 1e-5)
    factored = step_on(mesh, "mean", optax.adafactor(0.01, min_dim_size_to_factor=2), {})
    state, _ = factored(factored.init({"params": placed(mesh)}), x)
    lies_as(state.params)


@pytest.mark.full
def test_a_step_is_compiled_once(compilations):
    step = step_on(mesh_of("2x2"), "mean", optax.adam(0.1), {})
    state = step.init({"params": placed(mesh_of("2x2"))})
    state, _ = step(state, rows(8))
    state, _ = step(state, rows(6))
    compilations()
    for seed in range(3):
        state, _ = step(state, rows(8, seed))
        state, _ = step(state, rows(6, seed))
    assert compilations() == 0
    restored = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
    step(restored, rows(8))
    compilations()  # to copy what no step has made
    step(restored, rows(8))
    assert compilations() == 0


def collectives(text):
    return sorted(re.findall(r"= \S+ (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", text))


def by_hand(mesh):
    """The expert's step: plain `jit` with the same shardings, and a batch that is cut over the replicas."""
    tx = optax.sgd(0.1, momentum=0.9)

    def step(w, opt_state, x):
        grads = jax.grad(WHOLE["mean"])(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    w = placed(mesh)
    opt_state = jax.tree.map(jnp.zeros_like, tx.init(w))
    opt_state = (optax.TraceState(jax.device_put(opt_state[0].trace, where)), *opt_state[1:])
    x = jax.device_put(rows(16), NamedSharding(mesh, P("data")))
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=(where, None)).lower(w, opt_state, x).compile()
    return collectives(compiled.as_text())


@pytest.mark.one_case
@pytest.mark.parametrize("n", [9, 16])
@pytest.mark.parametrize("name", ["2x4", "4x2"])
@pytest.mark.parametrize("loss", [*LOSSES])
def test_no_parameter_is_ever_whole(name, n, loss):
    """No array in the compiled program has the shape of a parameter, nor a part for a replica; if the loss is a mean,
    no part is gathered, and even rows meet the expert's number of collectives, of which one is the loss's."""
    mesh = mesh_of(name)
    step = step_on(mesh, loss, optax.sgd(0.1, momentum=0.9), {})
    text = step.lower(step.init({"params": placed(mesh)}), rows(n)).compile().as_text()
    assert re.search(r"f32\[(1,)*(6,16|16,4|16,6|4,16)\]", text) is None
    if loss != "mean":
        return
    found = collectives(text)
    # A replica without rows gets one of the primary's rows.
    assert found.count("all-gather") == (len(jdp.chunk_sizes(n, mesh.shape["data"])) < mesh.shape["data"])
    if n == 16:
        assert len(found) <= len(by_hand(mesh)) + 1, (found, by_hand(mesh))


@pytest.mark.full
def test_a_nan_is_skipped_and_found():
    mesh = mesh_of("4x2")
    step = step_on(mesh, "mean", optax.adam(0.1), {"skip_nonfinite": True, "donate": False})
    state = step.init({"params": placed(mesh)})
    x = rows(10)
    x[7, 2] = np.nan
    after, metrics = step(state, x)
    assert bool(metrics["skipped"])
    close(after.params, WEIGHTS)
    lies_as(after.params)
    (found,) = step.find_nonfinite(state, x)
    assert (found.replica, found.rows) == (2, (7,)) and {*found.paths} >= {"['wide']", "['narrow']"}


@pytest.mark.full
def test_check_compares_with_one_device():
    mesh = mesh_of("4x2")
    step = step_on(mesh, "mean", optax.adam(0.1), {})
    state = step.init({"params": placed(mesh)})
    assert step.check(state, rows(10)) and "on 8 devices" in str(step.check(state, rows(10)))
    normed = lambda v, x: ((lambda o: ((o - o.mean(0)) / (1 + o.var(0))) ** 2)(mlp(v["params"], x))).mean()  # noqa: E731
    wrong = jdp.DataParallel(mlp, mesh).train_step(normed, optax.adam(0.1))
    assert not wrong.check(state, rows(10))


@pytest.mark.full
@pytest.mark.parametrize("n", [4, 5])
def test_batch_norms_of_16_bits_are_synchronised_in_32(n):
    """XLA's CPU compiler ends the process at sums of 16 bits over replicas of several devices."""
    losses = []
    x = np.outer([-2, 1, 2, -1, 0][:n], np.arange(1, 7)).astype(jnp.bfloat16)  # mean 0: the variance cancels nothing
    norm = nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16, force_float32_reductions=False)

    def loss(variables, x):
        out, updates = norm.apply(variables, x, mutable=["batch_stats"])
        return ((out.astype(jnp.float32) - 1) ** 4).mean(), {}, updates

    for devices in (mesh_of("2x2"), [0]):
        dp = jdp.DataParallel(norm, devices)
        step = dp.train_step(loss, TX, sync_batch_norm=True)
        state, first = step(step.init(dp.init(jax.random.key(0), x)), x)
        losses.append([first["loss"], step(state, x)[1]["loss"]])
    close(*losses, 0.02)


def other_copy(x, device, value):
    parts = [s.data if s.device != device else jax.device_put(value, device) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def test_replicas_that_differ_are_named(refused):
    mesh = mesh_of("4x2")
    dp, w = jdp.DataParallel(mlp, mesh), placed(mesh)
    dp.check_replicas(w)
    device = mesh.devices[2, 1]
    part = np.asarray(next(s.data for s in w["wide"].addressable_shards if s.device == device)).copy()
    part[3, 2] = np.nextafter(part[3, 2], np.float32(9))
    bad = {**w, "wide": other_copy(w["wide"], device, part)}
    with refused(ValueError, "check_replicas", match=rf"\['wide'\] on .*id={device.id}\) is not what it is on 3 of 4"):
        dp.check_replicas(bad)
    bad = {**w, "bias": other_copy(w["bias"], device, np.zeros(4, np.float32))}
    with refused(ValueError, "check_replicas", match=rf"\['bias'\] on .*id={device.id}\) is not what it is on 7 of 8"):
        dp.check_replicas(bad)


@pytest.mark.full
@pytest.mark.parametrize("name", ["one replica", "2x4", "4x2"])
def test_annotated_models_train(name):
    mesh, sizes, tx = mesh_of(name), (10, 8, 3), optax.adam(0.05)
    dp = jdp.DataParallel(Annotated(), mesh)
    step = dp.train_step(lambda v, x: (dp.apply(v, x) ** 2).mean(), tx)
    state = step.init(dp.init(jax.random.key(0), rows(1)))
    with nnx.use_eager_sharding(False):
        model = AnnotatedNNX(nnx.Rngs(0))
    nnx_dp, alone = jdp.DataParallel(model, mesh), AnnotatedNNX(nnx.Rngs(0), annotated=False)
    nnx_dp.eval(), alone.eval()
    nnx_step = nnx_dp.train_step(lambda model, x: (model(x) ** 2).mean(), tx)
    params = Plain().init(jax.random.key(0), rows(1))["params"]
    opt_state, optimizer = tx.init(params), nnx.Optimizer(alone, tx, wrt=nnx.Param)
    for seed, n in enumerate(sizes):
        x = rows(n, seed)
        state, metrics = step(state, x)
        value, grads = jax.value_and_grad(lambda p, x=x: (Plain().apply({"params": p}, x) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        close(metrics["loss"], value, 1e-4)
        found = nnx_step(x)["loss"]
        value, grads = nnx.value_and_grad(lambda m, x=x: (m(x) ** 2).mean())(alone)
        optimizer.update(alone, grads)
        close(found, value, 1e-4)
    close(nn.meta.unbox(state.params), params, 1e-3, 1e-3)
    kernels = nn.meta.unbox((state.params, state.opt_state[0].mu))
    for tree in kernels:
        lies_as({"wide": tree["Dense_0"]["kernel"], "narrow": tree["Dense_1"]["kernel"]})
    mu = nnx.as_pure(nnx_step.optimizer.opt_state)[0].mu
    lies_as({"wide": mu["wide"]["kernel"], "narrow": model.narrow.kernel[...], "bias": model.narrow.bias[...]})


@pytest.mark.full
def test_evaluate_prefetch_and_batches():
    mesh, data = mesh_of("4x2"), rows(23)
    dp, w = jdp.DataParallel(mlp, mesh), placed(mesh)
    parts = [data[:10], data[10:18], data[18:]]
    found = dp.evaluate(lambda w, x: {"loss": (mlp(w, x) ** 2).mean(), "rows": mlp(w, x)}, w, parts)
    close(found["rows"], bare(WEIGHTS, data), 1e-5, 1e-5)
    close(found["loss"], (bare(WEIGHTS, data) ** 2).mean(), 1e-5)
    for x, y in zip(parts, [dp(w, x) for x in dp.prefetch(parts)], strict=True):
        close(y, bare(WEIGHTS, x), 1e-5, 1e-5)
    out = np.concatenate([np.asarray(dp(w, x)) for x in dp.batches(data, 7)])
    close(np.sort(out, 0), np.sort(np.asarray(bare(WEIGHTS, data)), 0), 1e-5, 1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("way", ["nnx", "jit", "gradient", "call", "step"])
def test_what_is_whole_in_the_batch_may_be_cut_inside_of_a_replica(way, n):
    """A teacher in the batch lies as the parameters do."""
    mesh, x, cut = mesh_of("2x2"), rows(n), NamedSharding(mesh_of("2x2"), P(None, "model"))
    f, w = lambda w, x: x @ w, jax.device_put(WEIGHTS["wide"], cut)
    dp, teacher, axes = jdp.DataParallel(f, mesh), 0.5 * w, {"in_axes": (0, None)}
    loss = lambda w, x, t: ((f(w, x) - f(t, x)) ** 2).mean()  # noqa: E731
    expected = loss(WEIGHTS["wide"], x, 0.5 * WEIGHTS["wide"])
    if way in ("step", "jit"):
        step = dp.train_step(lambda v, b: loss(v["params"], *b), optax.sgd(0.1), **axes, donate=False)
        state, run = step.init({"params": w}), jax.jit(step) if way == "jit" else step
        for batch in ((x, teacher), (x, np.asarray(teacher)), *dp.prefetch([(x, teacher)], **axes)):
            close(run(state, batch)[1]["loss"], expected, 1e-4)
    elif way == "gradient":
        close(dp.value_and_grad(loss, **axes)(w, x, teacher)[0], expected, 1e-4)
    elif way == "call":
        both = jdp.DataParallel(lambda w, x, t: f(w, x) - f(t, x), mesh, **axes)
        close(jax.value_and_grad(lambda t: (both(w, x, t) ** 2).mean())(teacher)[0], expected, 1e-4)
    else:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        with nnx.use_eager_sharding(False):
            models = [nnx.Linear(6, 8, kernel_init=init, rngs=nnx.Rngs(i)) for i in range(2)]
        squares = lambda model, b: ((model(b[0]) - b[1](b[0])) ** 2).mean()  # noqa: E731
        expected = squares(models[0], (x, models[1]))
        model, other = (jdp.DataParallel(one, mesh) for one in models)
        close(model.train_step(squares, optax.sgd(0.1))((x, other.module))["loss"], expected, 1e-4)
        lies_as({"wide": other.module.kernel[...]})


def test_a_pmap_step_runs_on_a_mesh():
    mesh, x = mesh_of("4x2"), rows(8)

    def step(w, x):
        grads = jax.lax.pmean(jax.grad(lambda w: (mlp(w, x) ** 2).mean())(w), "data")
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads)

    run = jdp.DataParallel(mlp, mesh).parallel(step)
    found, expected = placed(mesh), WEIGHTS
    for _ in range(2):
        found = run(found, x)
        expected = jax.tree.map(lambda a, b: a - 0.1 * b, expected, jax.grad(WHOLE["mean"])(expected, x))
    close(found, expected, 1e-4, 1e-5)
    lies_as(found)


@pytest.mark.full
def test_a_checkpoint_goes_from_one_mesh_to_another(tmp_path):
    tx, x = optax.adam(0.05), rows(10)
    first = step_on(mesh_of("4x2"), "mean", tx, {"donate": False})
    state, _ = first(first.init({"params": placed(mesh_of("4x2"))}), x)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    expected, _ = first(state, x)
    for name in ("2x4", "one replica", "one device each", None):
        mesh = mesh_of(name) if name else None
        if mesh is None:
            loss = lambda v, x: (bare(v["params"], x) ** 2).mean()  # noqa: E731
            step, weights = jdp.DataParallel(bare, jax.devices()[:3]).train_step(loss, tx), WEIGHTS
        else:
            step, weights = step_on(mesh, "mean", tx, {}), placed(mesh)
        with jdp.Checkpointer(tmp_path) as checkpointer:
            found, _ = checkpointer.restore(step.init({"params": weights}))
        close(found.params, jax.device_get(state.params))
        if mesh is not None:
            lies_as(found.params), lies_as(found.opt_state[0].mu)
        found, _ = step(found, x)
        close(found.params, jax.device_get(expected.params), 1e-4, 1e-5)


def test_explain_counts_the_parts():
    mesh, x = mesh_of("4x2"), rows(8)
    dp, w = jdp.DataParallel(mlp, mesh), placed(mesh)
    of_parts = sum(x.addressable_shards[0].data.nbytes for x in w.values())
    report = jdp.explain(dp.apply, w, x)
    assert report.parameter_bytes == of_parts
    step = dp.train_step(lambda v, x: (mlp(v["params"], x) ** 2).mean(), optax.sgd(0.1))
    report = jdp.explain(step, step.init({"params": w}), x)
    assert report.parameter_bytes == of_parts and report.devices == 8
    again = dp.train_step(lambda v, x: (mlp(v["params"], x) ** 2).mean(), optax.sgd(0.1))  # which has seen no state
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), step.init({"params": w})
    )
    assert jdp.explain(again, state, x).parameter_bytes == of_parts


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("look", ["lower", "explain", "check"])
def test_a_look_at_another_state_moves_nothing(look):
    """A step goes on with the state that it gave last, whose parameters stay in parts."""
    mesh, x = mesh_of("2x2"), rows(8)
    step = step_on(mesh, "mean", optax.adam(0.05), {})
    state, _ = step(step.init({"params": placed(mesh)}), x)
    other = jax.device_get(state)  # whole, on the host
    if look == "explain":
        jdp.explain(step, jax.eval_shape(lambda: other), x)
    else:
        getattr(step, look)(other, x)
    state, _ = step(state, x)
    lies_as(state.params)
    lies_as(state.opt_state[0].mu)


def test_options_that_are_refused(refused):
    dp = jdp.DataParallel(mlp, mesh_of("4x2"))
    loss = lambda v, x: (mlp(v["params"], x) ** 2).mean()  # noqa: E731
    for option in ("shard_params", "shard_optimizer", "deterministic"):
        with refused(ValueError, "train_step", match=f"{option} is given, and a replica is the devices along 'model'"):
            dp.train_step(loss, optax.sgd(0.1), **{option: True})
    over = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(dp.mesh, P("data")))
    step = dp.train_step(loss, optax.sgd(0.1))
    with refused(ValueError, "train_step", match=r"\['wide'\] is cut as .*Leave 'data' out of its spec"):
        step.init({"params": {**placed(dp.mesh), "wide": over}})
    state = step.init({"params": placed(dp.mesh)})
    with refused(ValueError, "train_step", match=r"params\['wide'\] is cut as .*Leave 'data' out of its spec"):
        narrow = jax.device_put(state.params["wide"].T, NamedSharding(dp.mesh, P("data"))).T
        step(state.replace(params={**state.params, "wide": narrow}), rows(8))
