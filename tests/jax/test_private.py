"""What JAX and Flax do not promise is there, as jdp takes it; and where it is gone, a feature is lost and no number.

A test `test_canary_...` that fails says that this version of JAX or Flax has changed the name it is called by.
"""

import importlib
import inspect
import subprocess
import sys
import threading
import types

import flax.linen as nn
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jdp
from jdp._jax import callers, convolutions, jaxprs, private, rewrites
from jdp._processes import coordination, initialize, launchers
from jdp._tools.topology import topology

X = np.random.RandomState(0).randn(10, 4).astype(np.float32)  # ten rows: uneven over eight devices
W = np.random.RandomState(1).randn(4, 3).astype(np.float32)


def lost(name, feature):
    """What a canary says."""
    return f"this version has changed {name}; without it: {feature} (jdp/_jax)"


def product(w, x):
    return jnp.tanh(x @ w)


def outputs_and_gradients():
    """Of a new wrapper, on uneven chunks: what must not change, whatever is gone."""
    dp = jdp.DataParallel(product)
    y, pull = jax.vjp(lambda w: dp(w, X), W)
    inside = jax.jit(lambda w: dp(w, X))(W)
    trained = dp.value_and_grad(lambda w, x: product(w, x).mean())(W, X)
    return jax.device_get((y, pull(jnp.ones_like(y)), inside, trained))


@pytest.fixture(scope="module")
def want():
    return outputs_and_gradients()


@pytest.fixture
def without(monkeypatch):
    """`without(name)`: jdp finds the name no more; JAX itself goes on using it."""
    found, real_getattr, real_hasattr = private._found, getattr, hasattr

    def remove(name):
        def get(x, asked, *default):
            return default[0] if asked == name else real_getattr(x, asked, *default)

        if name == "trace_state_clean":
            monkeypatch.setattr(private, "_is_clean", None)
        monkeypatch.setattr(private, "_found", lambda module, n: None if n == name else found(module, n))
        monkeypatch.setattr(private, "getattr", get, raising=False)
        monkeypatch.setattr(private, "hasattr", lambda x, n: n != name and real_hasattr(x, n), raising=False)

    return remove


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---- jdp/_jax/private.py: the names


def test_the_docstring_has_twelve_names_at_most():
    numbered = [line for line in private.__doc__.splitlines() if line[:1].isdecimal()]
    assert [int(line.split(".")[0]) for line in numbered] == [*range(1, len(numbered) + 1)] and len(numbered) <= 12
    for line in numbered:
        assert hasattr(private, line.rsplit("`", 2)[1]), line


def test_what_is_gone_is_found_to_be_none():
    assert private._found("jax._src.core", "trace_state_clean") is not None
    assert private._found("jax._src.core", "no_such_name") is None
    assert private._found("jax._src.no_such_module", "name") is None


def states(ask):
    """What `ask()` gives at the top, under `jit`, `grad` and `vmap`, and in another thread while this one traces."""
    said = {"top": ask()}

    def note(name):
        def f(x):
            said[name] = ask()
            thread = threading.Thread(target=lambda: said.__setitem__(f"beside {name}", ask()))
            thread.start()
            thread.join()
            return x.sum()

        return f

    jax.jit(note("jit"))(jnp.ones(2))
    jax.grad(note("grad"))(jnp.ones(2))
    jax.vmap(note("vmap"))(jnp.ones((2, 2)))
    return said


STATES = {"top": True} | {
    name: clean for kind in ("jit", "grad", "vmap") for name, clean in ((kind, False), (f"beside {kind}", True))
}


def test_canary_trace_state_clean():
    name = "jax._src.core.trace_state_clean"
    is_clean = private._found("jax._src.core", "trace_state_clean")
    assert is_clean is not None and states(is_clean) == STATES, lost(name, "each call of jdp is slower")


@pytest.mark.parametrize("first", ["top", "jit"])
def test_without_trace_state_clean(monkeypatch, want, first):
    """The second choice gives the same answers, also where the first that asks is being traced."""
    users = [m for m in list(sys.modules.values()) if getattr(m, "__name__", "").startswith("jdp.")]
    for module in (module for module in users if hasattr(module, "trace_state_clean")):
        monkeypatch.setattr(module, "trace_state_clean", private.is_clean)
    if first == "jit":
        jax.jit(lambda x: [x, private.is_clean()][0])(1)
    assert states(private.is_clean) == STATES
    same(outputs_and_gradients(), want)


def concrete_values(ask):
    found = {}

    def note(name):
        def f(x):
            found[name] = ask(x)
            return x.sum()

        return f

    jax.grad(note("grad"))(jnp.arange(2.0))
    jax.jvp(note("jvp"), (jnp.arange(2.0),), (jnp.ones(2),))
    jax.jit(note("jit"))(jnp.arange(2.0))
    jax.vmap(note("vmap"))(jnp.ones((2, 2)))
    return {name: None if x is None else np.asarray(x).tolist() for name, x in found.items()}


VALUES = {"grad": [0.0, 1.0], "jvp": [0.0, 1.0], "jit": None, "vmap": None}


def test_canary_to_concrete_value():
    feature = lost("to_concrete_value of jax.core.Tracer", "the first call of each program is slower")
    assert callable(getattr(jax.core.Tracer, "to_concrete_value", None)), feature
    assert concrete_values(lambda x: x.to_concrete_value()) == VALUES, feature


@pytest.mark.full
def test_without_to_concrete_value(without, want):
    without("to_concrete_value")
    assert concrete_values(private.concrete_value) == VALUES
    same(outputs_and_gradients(), want)


def test_canary_cache_size():
    jitted = jax.jit(lambda x: x + 1)
    sizes = [private.compilations([jitted])]
    for n in (1, 2, 2):
        jitted(jnp.ones(n))
        sizes.append(private.compilations([jitted, jitted]))
    assert sizes == [0, 2, 4, 4], lost("_cache_size of a jitted function", "jdp.explain has no number of compilations")


def test_without_cache_size(without):
    dp = jdp.DataParallel(product)
    y = dp(W, X)
    name = "programs compiled by calls"
    before = jdp.explain(dp.apply, W, X)
    without("_cache_size")
    after = jdp.explain(dp.apply, W, X)
    assert (before.compilations, after.compilations) == (1, None)
    assert name in str(before) and name not in str(after) and after.flops == before.flops
    same(dp(W, X), y)


def test_canary_runtime_type():
    feature = lost("runtime_type of a device's client", "jdp.topology raises, and jdp plan with it")
    kind = getattr(jax.devices()[0].client, "runtime_type", None)
    assert isinstance(kind, str) and kind != "compile_only_runtime", feature


def described():
    return types.SimpleNamespace(client=types.SimpleNamespace(runtime_type="compile_only_runtime"))


def test_without_runtime_type(without, want, monkeypatch):
    assert private.is_described(described()) and not private.is_described(jax.devices()[0])
    without("runtime_type")
    assert not private.is_described(described())
    monkeypatch.setattr(topology, "_gpus", lambda *_: tuple(jax.devices()))
    with pytest.raises(NotImplementedError, match=r"jdp\.topology: JAX .* does not tell described"):
        jdp.topology("h100")
    monkeypatch.setattr(topology, "is_described", lambda device: True)
    assert jdp.topology("h100") == tuple(jax.devices())  # it is refused for that reason alone
    same(outputs_and_gradients(), want)


def test_canary_global_state():
    feature = lost("jax._src.distributed.global_state", "jdp runs in one process only")
    state = private._found("jax._src.distributed", "global_state")
    assert {*vars(private.JOB_OF_ONE)} <= {*dir(state)}, feature
    assert (state.client, state.process_id, state.num_processes) == (None, 0, 1), feature
    client = private._found("jaxlib._jax", "DistributedRuntimeClient")
    for method in ("key_value_set", "blocking_key_value_get", "key_value_try_get", "wait_at_barrier"):
        assert hasattr(client, method), lost(f"{method} of the coordination service's client", "as above")


def test_without_global_state(without, want, monkeypatch):
    without("global_state")
    assert (coordination.client(), coordination.own_process(), coordination.process_count()) == (None, 0, 1)
    same(outputs_and_gradients(), want)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(NotImplementedError, match=r"no jax\._src\.distributed\.global_state.* or run one process"):
        coordination.client()


def test_canary_cluster_detection():
    name = "jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params"
    find = private._found("jax._src.clusters", "ClusterEnv.auto_detect_unset_distributed_params")
    feature = lost(name, "jdp.distributed.initialize must be told the three arguments")
    assert find is not None, feature
    assert [*inspect.signature(find).parameters] == [
        "coordinator_address",
        "num_processes",
        "process_id",
        "local_device_ids",
        "cluster_detection_method",
        "initialization_timeout",
    ], feature
    assert private.found_by_cluster("host:1", 3, 2, [0], None, 1) == ("host:1", 3, 2), feature


def test_without_cluster_detection(without, monkeypatch):
    """A guess that there is one process would make several jobs out of one, so it is refused."""
    for name in ("JAX_COORDINATOR_ADDRESS", *launchers.SIZES):
        monkeypatch.delenv(name, raising=False)
    assert initialize._job(None, None, None, 1, {}) is None
    without("ClusterEnv.auto_detect_unset_distributed_params")
    with pytest.raises(NotImplementedError, match="whether a cluster has started other.*num_processes=1 to run alone"):
        jdp.distributed.initialize()
    jdp.distributed.initialize(num_processes=1)
    given = {"coordinator_address": "host:1", "num_processes": 3, "process_id": 2}
    assert initialize._job("host:1", 3, 2, 1, {}) == given
    monkeypatch.setenv("JDP_NUM_PROCESSES", "3")
    monkeypatch.setenv("JDP_PROCESS_ID", "2")
    assert initialize._job("host:1", None, None, 1, {}).items() >= given.items()


def test_canary_distributed_runtime_service():
    name = "jax._src.lib._jax.get_distributed_runtime_service"
    feature = lost(name, "where a process does not start, nobody says which")
    module = private._found("jax._src.lib", "_jax")
    assert "cluster_register_timeout" in module.get_distributed_runtime_service.__doc__, feature
    assert private._found("jax._src.distributed", "_jax") is module, feature  # JAX looks it up there


@pytest.fixture
def service(monkeypatch):
    """Stands for jaxlib's function: what it was called with, and what is there under its name."""
    calls = []

    def start(*args, **kwargs):
        calls.append((args, kwargs))
        return "service"

    module = importlib.import_module("jaxlib._jax")
    monkeypatch.setattr(module, "get_distributed_runtime_service", start)
    return types.SimpleNamespace(calls=calls, module=module, start=start)


def test_the_service_waits_as_long_as_it_is_told(service):
    with private.absent_are_named(7):
        assert service.module.get_distributed_runtime_service("host:1", 2, recoverable=False) == "service"
    assert service.calls == [(("host:1", 2), {"recoverable": False, "cluster_register_timeout": 7})]
    assert service.module.get_distributed_runtime_service is service.start


def test_without_the_service_s_argument(service, monkeypatch):
    def start(address, count, *, recoverable):
        return address, count, recoverable

    monkeypatch.setattr(service.module, "get_distributed_runtime_service", start)
    with private.absent_are_named(7):
        assert service.module.get_distributed_runtime_service("host:1", 2, recoverable=False) == ("host:1", 2, False)


def test_without_distributed_runtime_service(service, without):
    without("get_distributed_runtime_service")
    with private.absent_are_named(7):
        assert service.module.get_distributed_runtime_service is service.start
    assert service.module.get_distributed_runtime_service is service.start


def test_canary_gloo():
    name = "jax._src.lib._jax.make_gloo_tcp_collectives"
    feature = lost(name, "CPUs of several machines do not find each other where the hostname is 127.0.1.1")
    module = private._found("jax._src.lib", "_jax")
    assert "interface: str" in module.make_gloo_tcp_collectives.__doc__, feature
    assert private._found("jax._src.xla_bridge", "_jax") is module, feature  # JAX looks it up there


def test_gloo_goes_by_an_interface(monkeypatch):
    module = importlib.import_module("jaxlib._jax")
    monkeypatch.setattr(module, "make_gloo_tcp_collectives", lambda **arguments: arguments)
    private.gloo_goes_by("eth7")
    assert module.make_gloo_tcp_collectives(distributed_client=1) == {"distributed_client": 1, "interface": "eth7"}
    monkeypatch.setattr(module, "make_gloo_tcp_collectives", lambda distributed_client: distributed_client)
    private.gloo_goes_by("eth7")
    assert module.make_gloo_tcp_collectives(distributed_client=1) == 1


def test_without_gloo(without):
    without("make_gloo_tcp_collectives")
    module = importlib.import_module("jaxlib._jax")
    before = module.make_gloo_tcp_collectives
    private.gloo_goes_by("eth7")
    assert module.make_gloo_tcp_collectives is before


class Linear(nnx.Linear):
    """Of its own, for `nnx.tabulate` leaves the classes as it has changed them where it fails."""


class Wrapper(jdp.DataParallel):
    """Likewise."""


def test_canary_nnx_tabulate_id(without):
    seen = []

    class Seeing(nnx.Module):
        def __call__(self, x):
            seen.append(private.is_tabulated(self))
            return x

    nnx.tabulate(Seeing(), X)
    assert seen and all(seen), lost("_nnx_tabulate_id of an NNX object", "nnx.tabulate(dp, ...) fails in Flax")
    seeing = Seeing()
    seeing(X)
    assert not seen[-1]


def test_without_nnx_tabulate_id(without):
    model = Linear(4, 3, rngs=nnx.Rngs(0))
    dp, y = Wrapper(model), jdp.DataParallel(model)(X)
    assert "Wrapper Summary" in nnx.tabulate(dp, X)
    without("_nnx_tabulate_id")
    same(Wrapper(model)(X), y)
    with pytest.raises(TypeError):  # Flax's own
        nnx.tabulate(dp, X)
    same(jdp.DataParallel(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))(X), y)


class Listed(nnx.Module):
    def __init__(self, in_list):
        layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.layers = nnx.List([layer]) if in_list else layer
        self.seen = False

    def __call__(self, x):
        self.seen = self.seen or hasattr(self, private.CAPTURES)
        y = self.layers[0](x) if isinstance(self.layers, nnx.List) else self.layers(x)
        self.sow(nnx.Intermediate, "y", y)
        return y


def test_canary_captures():
    model = Listed(in_list=False)
    nnx.capture(model, nnx.Intermediate)(X)
    assert model.seen, lost("__captures__ of an NNX object", "nnx.capture(dp, ...) fails where there is an nnx.List")


@pytest.mark.filterwarnings("ignore:jdp.DataParallel. Listed.seen was changed")
def test_without_captures(monkeypatch):
    want, _ = nnx.capture(jdp.DataParallel(Listed(in_list=True)), nnx.Intermediate)(X)
    monkeypatch.setattr("jdp._model.nnx.CAPTURES", "__no_such_name__")
    got, captured = nnx.capture(jdp.DataParallel(Listed(in_list=False)), nnx.Intermediate)(X)
    same((got, jax.tree.leaves(captured)[0]), (want, want))

    # Flax 0.12.8 itself cannot flatten such a list's state: "Comparator raised". 0.12.12 can.
    flatten = lambda module: jax.tree.leaves(nnx.state(module))  # noqa: E731
    own = said(lambda: nnx.capture(flatten, nnx.Intermediate)(Listed(in_list=True)))
    assert said(lambda: nnx.capture(jdp.DataParallel(Listed(in_list=True)), nnx.Intermediate)(X)) == own


def said(call):
    """The words of the ValueError; None if there is none."""
    try:
        call()
    except ValueError as error:
        return str(error)


class Kept(dict):
    """Programs in the memory."""

    _path = "/no/folder"

    def put(self, key, data):
        self[key] = data


@pytest.fixture
def kept(monkeypatch):
    """`kept(process_id)`: what was kept of a program that is compiled twice, and how often it was then read."""
    cache, compiler = (importlib.import_module(f"jax._src.{name}") for name in ("compilation_cache", "compiler"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setattr(cache, "get_file_cache", cache.get_file_cache)  # put back at the end
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)

    def kept(process_id=0):
        programs = Kept()
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        cache.reset_cache()
        if not private.keep_programs(programs, "/no/folder"):
            return None
        hits.clear()
        x = jnp.arange(3.0)
        with monkeypatch.context() as patch:
            patch.setattr(private._found("jax._src.distributed", "global_state"), "process_id", process_id)
            for _ in range(2):
                assert jax.jit(lambda x: jnp.sin(x) * 11 + 7)(x).shape == (3,)
        return [key for key in programs if "lambda" in key], len(hits)

    yield kept
    for name, value in before.items():
        jax.config.update(name, value)
    monkeypatch.undo()
    cache.reset_cache()


@pytest.mark.parametrize("process", [0, 1])
def test_canary_compilation_cache(kept, process):
    name = "jax._src.{compilation_cache.get_file_cache,compiler._cache_write}"
    keys, hits = kept(process)
    assert len(keys) == 1 and hits >= 1, lost(name, f"process {process} of a restarted job compiles everything again")


def test_canary_callbacks():
    """Whichever thread calls back: that which dispatches, where the program has one device, or one of XLA's."""
    seen = []

    def look(x):
        seen.append(len(private.callbacks()))
        return x

    @jax.jit
    def f(x):
        y = jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), x)
        y = jax.experimental.io_callback(look, jax.ShapeDtypeStruct((), jnp.float32), y, ordered=True)
        jax.debug.callback(look, y)
        return y

    name = "jax._src.callback's _wrapped_callback"
    assert not private.callbacks()
    jax.block_until_ready(f(jnp.float32(1)))
    jax.effects_barrier()
    assert seen and min(seen) >= 1, lost(name, "a host callback that blocks is not named")
    assert len(seen) == 3 and not private.callbacks()


@pytest.mark.full
def test_canary_starts_backends():
    """A process that has begun to start its backends, and one that has them."""
    code = (
        "import sys, threading, jax\n"
        "from jdp._jax import private\n"
        "began, looked = threading.Event(), threading.Event()\n"
        "def slow(*args):\n"
        "    began.set(), looked.wait(60)\n"
        "    return make(*args)\n"
        "import jax._src.xla_bridge as bridge\n"
        "make, bridge._init_backend = bridge._init_backend, slow\n"
        "look = lambda: [private.starts_backends(), private.asked_for_devices()]\n"
        "before = look()\n"
        "thread = threading.Thread(target=jax.devices)\n"
        "thread.start(), began.wait(60)\n"
        "during = look()\n"
        "looked.set(), thread.join()\n"
        "print(*before, *during, *look())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    what = "a process that ends before its first call, or does not come to it, is not named in time"
    lost_is = lost("jax._src.xla_bridge's backends and _backends", what)
    assert run.stdout.split() == ["False", "False", "True", "True", "False", "True"], lost_is + run.stderr


def test_canary_pytype_aval_mappings():
    feature = lost("jax._src.core.pytype_aval_mappings", "x[i] of an array that a model closes over fails in JAX 0.10")
    table = jdp.replicate(W)
    of_jax = jax.typeof(table)
    found = jdp.DataParallel(lambda w, x: x @ w + table[0])(W, X)
    np.testing.assert_allclose(found, X @ W + W[0], rtol=1e-5, err_msg=feature)
    assert jax.typeof(table) == of_jax and not of_jax.sharding.mesh.manual_axes


def test_without_pytype_aval_mappings(without, want):
    table = jdp.replicate(W)
    without("pytype_aval_mappings")
    same(outputs_and_gradients(), want)
    np.testing.assert_allclose(jdp.DataParallel(lambda w, x: x @ w + x @ table)(W, X), 2 * X @ W, rtol=1e-5)


def test_without_compilation_cache(kept, without):
    without("_cache_write")
    assert len(kept(0)[0]) == 1 and kept(1) == ([], 0)
    directory = jax.config.values["jax_compilation_cache_dir"]
    without("get_file_cache")
    jax.config.update("jax_compilation_cache_dir", directory)
    assert kept() is None


# ---- jdp/_jax/jaxprs.py: equations and their parameters


def inside_replicas(fn, *args):
    """The equations of a function of replicas, nested ones too."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False)
    return [*jaxprs.equations(jax.make_jaxpr(run)(*args))]


def first(name, fn, *args):
    """The first equation of this name."""
    return next(eqn for eqn in jaxprs.equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == name)


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "data"),
    "pmax": lambda x: jax.lax.pmax(x, "data"),
    "pmin": lambda x: jax.lax.pmin(x, "data"),
    "ppermute": lambda x: jax.lax.ppermute(x, "data", [(0, 1)]),
    "all_gather": lambda x: jax.lax.all_gather(x, "data", tiled=True),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
    "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
    "axis_index": lambda x: x + jax.lax.axis_index("data"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_canary_axes_of(name):
    found = {eqn.primitive.name: jaxprs.axes(eqn) for eqn in inside_replicas(COLLECTIVES[name], jnp.ones((64, 8)))}
    assert found.get(name) == ("data",), lost(f"the name or the axes of {name}", "a collective in a model is not seen")
    assert name in jaxprs.COLLECTIVES


def test_canary_axis_index_groups():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    eqns = inside_replicas(lambda x: jax.lax.psum(x, "data", axis_index_groups=groups), jnp.ones(8))
    found = [eqn.params.get("axis_index_groups") for eqn in eqns if eqn.primitive.name == "psum"]
    assert [[[*g] for g in gs] for gs in found] == [groups], lost(
        "axis_index_groups", "dp.parallel takes what groups have reduced for what all have"
    )


@pytest.mark.parametrize("name", sorted(jaxprs.COLLECTIVES))
def test_a_collective_whose_axes_have_another_name_is_refused(name):
    eqn = types.SimpleNamespace(primitive=types.SimpleNamespace(name=name), params={"over": ("data",)})
    with pytest.raises(NotImplementedError, match=f"{name} of JAX .* has no parameter 'axes'"):
        jaxprs.axes(eqn)
    assert jaxprs.axes(types.SimpleNamespace(primitive=types.SimpleNamespace(name="add"), params={})) == ()


LOOPS = {
    "scan": lambda x: jax.lax.scan(lambda c, _: (c + x, None), x, None, length=3)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: c + x, x),
    "cond": lambda x: jax.lax.cond(x[0] > 0, lambda x: x, lambda x: -x, x),
}
PARAMETERS = {
    "scan": {"jaxpr", "length"},
    "while": {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"},
    "cond": {"branches"},
}


@pytest.mark.parametrize("name", LOOPS)
def test_canary_parameters_of(name):
    feature = lost(f"the parameters of {name}", "dp.train_step and dp.parallel refuse a model that has one")
    eqn = first(name, LOOPS[name], jnp.ones(2))
    assert PARAMETERS[name] <= {*eqn.params}, feature
    assert name != "scan" or "ft_in" in eqn.params or {"num_consts", "num_carry"} <= {*eqn.params}, feature
    inputs = [jaxprs.VARYING] * len(eqn.invars)
    assert all(v.varying for v in jaxprs._equation(eqn, inputs, "data")), feature
    assert not any(v.varying for v in jaxprs._equation(eqn, [jaxprs.SAME] * len(eqn.invars), "data")), feature


@pytest.mark.parametrize("name, parameter", [(name, p) for name in PARAMETERS for p in sorted(PARAMETERS[name])])
def test_a_loop_whose_parameters_have_other_names_is_refused(name, parameter):
    eqn = first(name, LOOPS[name], jnp.ones(2))
    params = {f"{p}_renamed" if p == parameter else p: value for p, value in eqn.params.items()}
    with pytest.raises(NotImplementedError, match=f"{name} of JAX .* has no parameter {parameter!r}"):
        jaxprs._equation(eqn.replace(params=params), [jaxprs.SAME] * len(eqn.invars), "data")


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@pytest.mark.parametrize(
    "fn", [jax.jit(jnp.sin), jax.nn.relu, doubled, jax.checkpoint(jnp.sin)], ids=["jit", "jvp", "vjp", "checkpoint"]
)
def test_canary_calls(fn):
    (eqn,) = jax.make_jaxpr(fn)(jnp.ones(2)).eqns
    feature = lost(f"{eqn.primitive.name}", "sync_batch_norm refuses uneven chunks of a model that has one")
    assert eqn.primitive.name in jaxprs.CALLS and len([*jaxprs.inside(eqn)]) == 1, feature
    is_inside = lambda eqn: eqn.primitive.name in ("sin", "mul", "max")  # noqa: E731
    got = rewrites.inlined(jax.make_jaxpr(fn)(jnp.ones(2)), is_inside, str)
    assert any(map(is_inside, got.eqns)), feature
    np.testing.assert_array_equal(jax.extend.core.jaxpr_as_fun(got)(X[0, :2])[0], fn(X[0, :2]))


def test_canary_literals_constants_and_operands():
    closed = jnp.asarray(X)
    jaxpr = jax.make_jaxpr(lambda x: (x + 2.0) @ closed)(X.T)
    (add, *_) = jaxpr.eqns
    feature = lost(
        "Literal.val or ClosedJaxpr.consts",
        "uneven chunks with sync_batch_norm fail; jdp.explain misses what a function closes over",
    )
    assert [jaxprs.is_literal(v) for v in add.invars] == [False, True] and add.invars[1].val == 2, feature
    for traced in (jaxpr, jax.make_jaxpr(jax.jit(lambda x: jax.lax.map(lambda row: row @ closed, x)))(X.T)):
        assert any(getattr(x, "shape", None) == X.shape for x in jaxprs.constants(traced)), feature
    assert 2.0 in [*jaxprs.constants(jaxpr)][1:], feature
    env = jaxprs.env_of(jaxpr, [X.T])
    for eqn in jaxpr.eqns:
        jaxprs.evaluate_eqn(eqn, env)
    np.testing.assert_allclose(jaxprs.read(env, jaxpr.jaxpr.outvars[0]), (X.T + 2) @ X, rtol=1e-5)


def test_canary_get_bind_params():
    feature = lost("Primitive.get_bind_params", "uneven chunks with sync_batch_norm fail")
    for fn in (jax.jit(jnp.sin), jax.nn.relu, doubled):
        (eqn,) = jax.make_jaxpr(fn)(jnp.ones(4)).eqns
        np.testing.assert_array_equal(jaxprs.bind(eqn, [X[0]])[0], fn(X[0]), err_msg=feature)


def test_canary_replace():
    """`replace` of jaxprs and equations, at the top and inside of calls, and what stays where nothing is replaced."""
    feature = lost("replace of a jaxpr or an equation", "convolutions are slow on the CPU; sync_batch_norm fails")
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + jnp.sin(x))(jnp.ones(4))
    new = rewrites.rewrite(jaxpr, lambda eqn: jnp.cos if eqn.primitive.name == "sin" else None)
    np.testing.assert_allclose(jax.extend.core.jaxpr_as_fun(new)(X[0])[0], 2 * np.cos(X[0]), rtol=1e-5, err_msg=feature)
    assert rewrites.rewrite(jaxpr, lambda eqn: None) is jaxpr, feature


def convolved(w, x):
    return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


ROWS, KERNEL = X.reshape(10, 2, 2), np.ones((2, 2, 2), np.float32)


def test_canary_convolution():
    feature = lost("conv_general_dilated_p or its dimension_numbers", "convolutions are slow on the CPU")
    jaxpr = jax.make_jaxpr(convolved)(KERNEL, ROWS)
    assert convolutions.canonical(jaxpr) is not jaxpr, feature


@pytest.mark.parametrize("error", [AttributeError, TypeError])
def test_without_the_rewriting_of_convolutions(monkeypatch, error):
    def changed(*_, **__):
        raise error("JAX has changed it")

    want = jdp.DataParallel(convolved)(KERNEL, ROWS)
    monkeypatch.setattr(convolutions, "rewrite", changed)
    jaxpr = jax.make_jaxpr(convolved)(KERNEL, ROWS)
    assert convolutions.canonical(jaxpr) is jaxpr
    np.testing.assert_allclose(jdp.DataParallel(convolved)(KERNEL, ROWS), want, rtol=1e-6)


def printed(w, x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x @ w


def called(w, x):
    zero = np.float32(0)
    return x @ w + jax.experimental.io_callback(lambda: zero, jax.typeof(zero), ordered=True)


def test_canary_ordered_effects():
    feature = lost("the effects of what is printed or called in order", "the error for it is JAX's, without the line")
    for fn, name in ((printed, "debug_print"), (called, "io_callback")):
        eqn = jaxprs.ordered(jax.make_jaxpr(jax.jit(fn))(W, X))
        assert eqn is not None and name in eqn.primitive.name, feature
        assert callers.source_line(eqn).startswith("test_private.py:"), lost("source_info", "errors name no line")
    free = jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(1)
    assert free.effects and jaxprs.ordered(free) is None, feature


def test_without_ordered_effects(monkeypatch):
    with pytest.raises(ValueError, match=r"jdp\.parallel_apply: debug_print \(test_private\.py:\d+\) has ordered=True"):
        jdp.DataParallel(printed)(W, X)
    monkeypatch.setattr(jaxprs, "_ordered_effects", tuple)
    with pytest.raises(ValueError, match="ordered effects are not supported for more than 1 device"):  # JAX's own
        jdp.DataParallel(printed)(W, X)


def test_canary_names_of_functions():
    eqn = jaxprs.first(jax.make_jaxpr(jax.jit(lambda x: jax.lax.associative_scan(jnp.add, x)))(X), "slice")
    feature = lost("the frames of source_info", "a loss that jax.lax.associative_scan makes along the rows is accepted")
    assert callers.is_made_in(eqn, "associative_scan"), feature
    assert not callers.is_made_in(jax.make_jaxpr(lambda x: x[:2])(X).eqns[0], "associative_scan")


def test_canary_modules():
    class Centred(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x - x.mean()

        @nn.compact
        def other(self, x):
            return x - x.mean()

    class Called:
        __call__ = Centred.__call__

    feature = lost("the frames of source_info", "a model that norms its rows by one number of all of them is refused")
    for run in (Centred().bind({}), Called()):
        assert all(callers.is_made_in_module([eqn]) for eqn in jax.make_jaxpr(run)(X).eqns), feature
    loss = jax.make_jaxpr(lambda x: Centred().apply({}, x, method="other"))(X)
    assert not any(callers.is_made_in_module([eqn]) for eqn in loss.eqns), "another method may be the loss"
    for run in (lambda x: x - x.mean(), jnp.std, jax.nn.relu):
        assert not any(callers.is_made_in_module([eqn]) for eqn in jax.make_jaxpr(run)(X).eqns)


def test_without_source_lines():
    eqn = types.SimpleNamespace(source_info=None, primitive=jax.lax.add_p)
    assert not callers.is_made_in_module([eqn])
    assert not callers.is_made_in(eqn, "associative_scan")
    assert callers.source_line(eqn) == callers.source_line(types.SimpleNamespace()) == ""


def test_canary_varying_of_other_variables():
    """`added` finds what an output adds to an input, in a jaxpr as JAX writes it."""
    jaxpr = jax.make_jaxpr(lambda old, x: (old + x, old * x))(1.0, 2.0)
    feature = lost("the primitive add", "dp.parallel keeps one replica's sum of its own rows, in state")
    assert jaxprs.added(jaxpr, 0, 0) == [jaxpr.jaxpr.invars[1]], feature
    assert jaxprs.added(jaxpr, 0, 1) is None
    (value,) = jaxprs.varying(jaxpr, [jaxprs.SAME, jaxprs.VARYING], "data", jaxprs.added(jaxpr, 0, 0))
    assert value.varying
