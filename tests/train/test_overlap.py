"""Gradients travel while others are computed: in the schedules that XLA makes for GPUs and TPUs that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp._core.replica_mesh import make_mesh
from jdp._tools.explain.collectives import collectives
from jdp._tools.explain.hlo import parse
from jdp._train import program
from jdp._train.compiler_options import _known, compiler_options, wanted

S = jax.ShapeDtypeStruct
WIDTH, LAYERS, ROWS = 2048, 6, 256
PARAMS = {f"w{i}": S((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
BYTES = 4 * LAYERS * WIDTH**2
BATCH = S((8 * ROWS, WIDTH), jnp.float32)
TX = optax.adam(1e-3)


def loss(variables, x):
    for i in range(LAYERS):
        x = jnp.tanh(x @ variables["params"][f"w{i}"])
    return jnp.mean(x**2)


def described(name, *shape):
    try:
        return jdp.topology(name, *shape)
    except ImportError as error:
        pytest.skip(str(error))


@functools.cache
def explained(name="h100", shape=(), plain=False, **options):
    step = jdp.DataParallel(lambda v, x: x, described(name, *shape)).train_step(loss, TX, **options)
    state = jdp.TrainState(S((), jnp.int32), PARAMS, jax.eval_shape(TX.init, PARAMS), {}, None)
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(program, "compiler_options", lambda *to: {})
        return jdp.explain(step, state, BATCH)


def under_backward(hlo):
    """The share of the collectives' bytes that is in flight while some of the backward pass runs."""
    module = parse(hlo)
    found = collectives(module)
    known = {name: x.op_name for computation in module.computations.values() for name, x in computation.by_name.items()}
    names = [[known[name] for name in c.overlapped] for c in found]
    hidden = sum(c.bytes for c, n in zip(found, names, strict=True) if any("transpose(jvp" in x for x in n))
    return hidden / sum(c.bytes for c in found)


@functools.cache
def by_hand(automatic=False):
    """The optimized program of `jit(shard_map(step))`, or of `jit(step)`."""
    mesh = make_mesh(described("h100")).jax_mesh
    whole, cut = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",)))

    def step(params, opt_state, x):
        found = jax.value_and_grad(lambda p: loss({"params": p}, x))(params)
        value, grads = found if automatic else jax.lax.pmean(found, "data")
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    specs = (jax.P(), jax.P(), jax.P("data"))
    mapped = step if automatic else jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
    run = jax.jit(mapped, donate_argnums=(0, 1), out_shardings=whole)
    state = jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=whole), (PARAMS, jax.eval_shape(TX.init, PARAMS)))
    return run.lower(*state, S(BATCH.shape, BATCH.dtype, sharding=cut)).compile().as_text()


@pytest.mark.compilers
def test_on_eight_h100_every_gradient_travels_once_and_beside_the_backward_pass():
    report = explained()
    assert report.collective_bytes == BYTES + 4  # the loss
    assert sorted(p for c in report.collectives for p in c.parameters) == sorted(PARAMS)
    assert not any(c.in_loop for c in report.collectives)
    assert report.in_flight == 1
    # All but the first layer's, which is the last to be ready: nothing is left of the backward pass then.
    assert under_backward(report.hlo) == pytest.approx(1 - 1 / LAYERS, abs=1e-3)
    best = max(under_backward(by_hand()), under_backward(by_hand(automatic=True)))
    assert under_backward(report.hlo) >= best - 4.1 / BYTES  # the loss comes before the backward pass there


@pytest.mark.compilers
def test_gradients_that_are_fewer_than_xla_waits_for_do_not_travel_last(monkeypatch):
    """A smaller model: all in one collective, behind the backward pass, if XLA is left alone."""
    width = WIDTH // 2
    monkeypatch.setitem(globals(), "PARAMS", {name: S((width, width), jnp.float32) for name in PARAMS})
    monkeypatch.setitem(globals(), "BATCH", S((8 * ROWS, width), jnp.float32))
    shares = [under_backward(text) for text in (by_hand.__wrapped__(), by_hand.__wrapped__(automatic=True))]
    shares.append(under_backward(explained.__wrapped__(plain=True).hlo))
    assert max(shares) < 0.01
    assert under_backward(explained.__wrapped__().hlo) >= 0.5


@pytest.mark.compilers
def test_in_microbatches_too():
    report = explained(accumulate_steps=4)
    assert report.collective_bytes == BYTES + 4
    assert not any(c.in_loop for c in report.collectives)


@pytest.mark.compilers
def test_half_the_bytes_in_bfloat16():
    report = explained(reduce_dtype=jnp.bfloat16)
    assert report.collective_bytes == BYTES / 2 + 4
    assert report.in_flight >= 0.95


@pytest.mark.compilers
def test_reduce_scatters_do_not_wait_for_the_last_gradient():
    plain, report = explained(shard_optimizer=True, plain=True), explained(shard_optimizer=True)
    for found in (plain, report):
        by_kind = {k: sum(c.bytes for c in found.collectives if c.kind == k) for k in ("reduce-scatter", "all-gather")}
        assert by_kind == {"reduce-scatter": BYTES, "all-gather": BYTES}
    assert under_backward(plain.hlo) == 0  # one collective carries all: what the option is for
    # Half of the bytes, those that are gathered, are parameters: they are there when the backward pass is over.
    assert under_backward(report.hlo) == pytest.approx((1 - 1 / LAYERS) / 2, abs=1e-3)
    assert report.in_flight >= 0.8


@pytest.mark.compilers
def test_parameters_that_are_cut_are_gathered_and_their_gradients_scattered_all_along_the_program():
    plain, report = explained(shard_params=True, plain=True), explained(shard_params=True)
    assert sum(c.kind == "reduce-scatter" for c in plain.collectives) == 1  # behind the backward pass
    gathers, scatters = ([c for c in report.collectives if c.kind == k] for k in ("all-gather", "reduce-scatter"))
    assert {c.bytes for c in gathers + scatters} == {4 * WIDTH**2}  # one at a time
    assert sorted(p for c in scatters for p in c.parameters) == sorted(PARAMS)
    # Once forward and once backward; what the last layer needs may still be there.
    assert sorted({p for c in gathers for p in c.parameters}) == sorted(PARAMS) and len(gathers) <= 2 * LAYERS
    assert under_backward(report.hlo) > under_backward(plain.hlo) + 0.2
    assert report.parameter_bytes == report.gradient_bytes == BYTES / 8
    assert report.optimizer_bytes == 2 * BYTES / 8 + 4


@pytest.mark.compilers
def test_on_tpus_every_gradient_travels_once():
    report = explained("v5e", ("2x4",))
    assert report.collective_bytes == BYTES + 4
    assert sorted(p for c in report.collectives for p in c.parameters) == sorted(PARAMS)


@pytest.mark.compilers
def test_what_is_asked_of_the_compiler(devices, monkeypatch):
    mesh = make_mesh(tuple(devices))
    assert not program.takes_options(mesh)  # of CPUs nothing is asked
    for sent, bucket in ((1 << 20, 13 << 20), (140 << 20, 20 << 20), (1 << 40, 30 << 20)):
        sums = {
            "xla_gpu_all_reduce_combine_threshold_bytes": bucket,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": bucket // 8,
        }
        assert wanted(8, sent) == sums
        assert wanted(8, sent, True) == {"xla_gpu_all_gather_combine_threshold_bytes": bucket, **sums}
    assert _known(mesh, (("xla_cpu_enable_fast_math", False),))
    assert not _known(mesh, (("xla_no_such_option", 1),))  # another version's: left out, and no error
    mesh = make_mesh(described("h100"))
    assert compiler_options(mesh, 1 << 30) == wanted(8, 1 << 30)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_reduce_scatter_combine_threshold_bytes=1")
    kept = "xla_gpu_all_reduce_combine_threshold_bytes"  # of the other the user's own word counts
    assert compiler_options(mesh, 1 << 30) == {kept: 30 << 20}


def test_a_failure_that_is_not_of_the_options_is_raised_and_not_kept(devices, monkeypatch):
    """Else a full memory, once, would take the overlap from all steps of the process."""
    mesh, options = make_mesh(tuple(devices[:3])), (("xla_cpu_enable_fast_math", True),)

    def full(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", full)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            _known(mesh, options)
    assert _known(mesh, options)


def test_a_step_with_options_also_runs_inside_of_a_jit(devices, monkeypatch):
    """Where JAX refuses any, for they are those of the outermost one."""
    asked = []
    monkeypatch.setattr(
        program, "compiler_options", lambda *to: asked.append(to) or {"xla_cpu_enable_fast_math": False}
    )
    monkeypatch.setattr(program, "takes_options", lambda mesh: True)
    step = jdp.DataParallel(lambda v, x: x, devices).train_step(
        lambda v, x: jnp.mean((x @ v["params"]["w"]) ** 2), optax.sgd(0.1), donate=False
    )
    state = step.init({"params": {"w": np.ones((3, 2), np.float32)}})
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    alone, _ = step(state, x)
    inside, _ = jax.jit(step)(state, x)
    again, _ = step(state, x)
    scanned, _ = jax.lax.scan(lambda s, _: step(s, jnp.asarray(x)), state, None, length=1)
    for other in (inside, again, scanned):
        np.testing.assert_allclose(other.params["w"], alone.params["w"], rtol=1e-6)
    assert asked == [(make_mesh(tuple(devices)), 4 * 3 * 2, False)]  # once, and for that many bytes of gradients
