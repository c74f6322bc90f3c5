"""The tests run on 8 virtual CPU devices; here is what the files share."""

import gc
import importlib.metadata
import os
import pathlib
import signal

# An import or a trace makes thousands of objects and drops most of them. Python looks for garbage after 700 new ones,
# which took a twelfth of the time of these tests. It looks at all objects after 60,000, by default after 70,000; after
# 1,000,000 a worker would keep half as much memory again.
gc.set_threshold(10_000, 3, 2)

# Where & in a script has started pytest, Ctrl-C is ignored, by all that it starts, too; tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that are compiled are kept in the checkout, for the next run and for the processes that tests start. JAX's
# key is the program itself with the versions of JAX and jaxlib, the devices, XLA's flags and the compiler's options,
# so nothing that changes a program finds an old one; tracing and lowering, which is what jdp does, happen each time.
# Most programs here compile in less than 0.1 s, and are read in a few milliseconds: all are kept. The folder may be
# deleted at any time.
_cache = pathlib.Path(__file__).parents[1] / ".jax_cache" / importlib.metadata.version("jax")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache))
# Where nothing was kept when pytest began, as on a fresh machine, no case is held to its budget.
os.environ.setdefault("JDP_TESTS_ARE_JUDGED", str(int(_cache.is_dir())))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# LLVM's optimization takes two fifths of the time to compile, and changes neither sums nor collectives. `.ci/run` runs
# the laws and what depends on versions with it, so that programs are tested as users have them, too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA:CPU's emitters for fused loops start MLIR anew for each program, which is half of the time to compile. The older
# ones do not. A JAX that does not know the flag, as 0.12, ends the process.
_flags = os.environ.get("XLA_FLAGS", "")
_knows = importlib.metadata.version("jaxlib").startswith("0.10.") and "xla_cpu_use_fusion_emitters" not in _flags
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and _knows:
    _flags += " --xla_cpu_use_fusion_emitters=false"
    _flags += " --xla_cpu_parallel_codegen_split_count=1"  # an eighth less: small programs in parts take longer
    os.environ["XLA_FLAGS"] = _flags.strip()
# JAX takes its own frames out of each traceback, and asks the file system about each frame for it: 30 ms an exception.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# A program that is lowered has at each operation the frames that called it; jdp finds the lines that its errors name in
# jaxprs. Without the frames a test takes a twentieth less.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jdp

jdp.virtual_cpu_devices(8)

import collections
import contextlib
import re
import sys
import threading
import time

import jax
import numpy as np
import pytest
from cases import some_of
from guard import pytest_sessionstart  # noqa: F401  a hook of pytest's
from hypothesis import Phase, settings
from jax._src.interpreters import mlir
from scheduling import pytest_xdist_make_scheduler  # noqa: F401  likewise

# JAX 0.12 lowers ten programs of a thread in one context of MLIR. 0.10 makes a context for each, which takes 3 ms and
# nearly half of the memory of these tests.
if importlib.metadata.version("jax").startswith("0.10."):
    _make_ir_context, _kept = mlir.make_ir_context, threading.local()

    def _ir_context():
        uses, context = getattr(_kept, "context", (0, None))
        context = context if uses % 10 else _make_ir_context()
        _kept.context = uses + 1, context
        return context

    mlir.make_ir_context = _ir_context

# The files that take longest, all tiers together: one that came last would be waited for.
LONGEST = tuple(
    f"test_{name}.py"
    for name in (
        *("deterministic", "loss_law", "training_examples", "shard_params", "walk", "deterministic_processes"),
        *("examples", "processes", "replay", "checkpoint_exit", "replicas"),
    )
)
# laws.examples takes its part of the examples of a test from the profile. A falsifying example is not made smaller in
# CI: that may take longer than a case may, because each try compiles.
IN_CI = os.environ.get("JDP_TESTS_RUN") == "ci"
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, *([] if IN_CI else [Phase.target, Phase.shrink])]
settings.register_profile("full", max_examples=30, deadline=None, derandomize=True, phases=PHASES)
settings.register_profile("fast", max_examples=3, deadline=None, derandomize=True, phases=PHASES)

# JAX says after each program how long it took to have it, also where it was read from the cache; and how long it read.
_compilations, _compiling, _begun = [], [0.0], []
_SECONDS = {"backend_compile_duration": 1, "cache_retrieval_time_sec": -1}


def _listen(event, duration, **_):
    name = event.rpartition("/")[2]
    _compiling[0] += _SECONDS.get(name, 0) * duration
    if name == "backend_compile_duration":
        _compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)

# CPU seconds of a case in the fast tier. Its cases were chosen among those that took less than half of it on two cores
# that others used too. The time of the process's threads counts, not the clock's, so a busy machine fails nothing.
BUDGET = 2.0
EXAMPLES = 10.0  # of a test of hypothesis, which is several cases
LOOP = 0.012  # CPU seconds of the loop in `slowness`: half of what it takes on the slowest machine that is known


def slowness():
    """Returns how many times slower than `LOOP` this machine is, so that a case is judged, and not the machine."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        sum(i * i % 7 for i in range(200_000))
        times.append(time.process_time() - begun)
    return max(1.0, min(times) / LOOP)


def is_fast(config):
    return "not full" in config.getoption("markexpr")


@pytest.hookimpl(trylast=True)  # when the reporter is there
def pytest_configure(config):
    settings.load_profile("fast" if is_fast(config) else "full")
    if IN_CI and (reporter := config.pluginmanager.get_plugin("terminalreporter")):  # not in a worker
        config.pluginmanager.register(FailuresAtOnce(reporter))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """What `one_case` leaves out is marked `full`; what `each_value` and `each_pair` leave out is not run."""
    families, left_out = collections.defaultdict(list), set()
    for item in items:
        families[item.path, getattr(item, "originalname", item.name)].append(item)
    for cases in families.values():
        fast = set()
        if mark := cases[0].get_closest_marker("one_case"):
            fast = {item for item in cases if item.callspec.id in mark.args} or {cases[-1]}
            for item in set(cases) - fast:
                item.add_marker("full")
        for size, name in enumerate(("each_value", "each_pair"), 1):
            if cases[0].get_closest_marker(name):
                left_out.update(set(cases) - fast - set(some_of(cases, size, fast)))
    # Workers take files in this order: those that take longest, then those with many cases.
    count = collections.Counter(item.path for item in items)
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path.name, len(LONGEST)), -count[item.path], item.path))
    if "::" not in " ".join(config.args):  # who names a case has it
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


class FailuresAtOnce:
    """Names a case that fails at once, because a run that is ended from outside has no summary."""

    def __init__(self, reporter):
        self.reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            last = (report.longreprtext.splitlines() or [""])[-1]
            self.reporter.write_line(f"\nFAILED {report.nodeid} after {report.duration:.0f} s: {last}")


def pytest_ignore_collect(collection_path, config):
    """make test-faults imports the files that have faults, and no others: each of its workers imports all of them."""
    if config.getoption("markexpr") == "faults" and collection_path.suffix == ".py":
        return True if "mark.faults" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_finish():
    """What is imported stays: the garbage collector need not look at it again and again, which took a twentieth."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """What a file leaves in JAX's caches stays, too. To look at it again after each file took a tenth of the time."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skips a case that has not begun when the time of the run is over; `.ci/run` sets it, and counts these cases."""
    if time.time() > float(os.environ.get("JDP_TESTS_UNTIL", "inf")):
        with open(os.environ.get("JDP_TESTS_LEFT_OUT", os.devnull), "a", encoding="utf-8") as left_out:
            left_out.write(item.nodeid + "\n")
        pytest.skip("no time is left for it in this run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A case of the fast tier fails that takes more CPU time than its budget.

    Not judged are a run that found no compiled programs, the first case of a process, one that imports much (torch),
    which the next ones find, and one for which a program was compiled that the cache did not have: the next run judges.
    """
    is_first = not _begun
    _begun.append(item.nodeid)
    cpu, compiling, modules = sum(os.times()[:2]), _compiling[0], len(sys.modules)
    result = yield
    imports_much = len(sys.modules) - modules > 100
    cpu, compiling = sum(os.times()[:2]) - cpu, _compiling[0] - compiling
    mark = item.get_closest_marker("budget")
    budget = mark.args[0] if mark else EXAMPLES if item.get_closest_marker("hypothesis") else BUDGET
    judged = is_fast(item.config) and os.environ["JDP_TESTS_ARE_JUDGED"] == "1"
    if judged and not (is_first or imports_much) and compiling < 0.25 and cpu > budget and cpu > budget * slowness():
        pytest.fail(
            f"{item.name} took {cpu:.1f} CPU s; a case of the fast tier may take {budget:g}. Make it smaller, keep one "
            "case of its parameters there (@pytest.mark.one_case), or leave it to make test-full (@pytest.mark.full).",
            pytrace=False,
        )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Who skips a test for want of a compiler marks it so: else `.ci/run` never runs it, where there is one."""
    report = yield
    if report.skipped and "plan-" in str(report.longrepr) and not item.get_closest_marker("compilers"):
        report.outcome, report.longrepr = "failed", f"{item.name} was skipped and is not marked `compilers`"
    return report


@pytest.fixture(scope="session")
def devices():
    """The 8 devices."""
    return jax.devices()


@pytest.fixture(params=[1, 2, 3, 8])
def n(request):
    """How many of the devices a law is tested on."""
    return request.param


def _host(leaf):
    """A leaf as numpy sees it; a typed key as its data."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def _same(got, want):
    """Asserts that two trees are equal to the last bit: structure, dtypes, shapes, values, whole objects."""
    is_none = lambda leaf: leaf is None  # noqa: E731
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got, is_leaf=is_none)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want, is_leaf=is_none)
    assert got_tree == want_tree
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        if not isinstance(w, (jax.Array, np.ndarray, np.generic)):
            assert type(g) is type(w) and g == w, where
            continue
        assert isinstance(g, jax.Array), where
        if not (isinstance(w, jax.Array) and jax.dtypes.issubdtype(w.dtype, jax.dtypes.prng_key)):
            w = np.asarray(w, jax.dtypes.canonicalize_dtype(w.dtype))
        assert g.dtype == w.dtype, where
        np.testing.assert_array_equal(_host(g), _host(w), err_msg=where, strict=True)


@pytest.fixture(scope="session")
def same():
    """`same(got, want)`: equal trees, to the last bit."""
    return _same


@pytest.fixture(scope="session")
def refused():
    """`with refused(ValueError, "scatter", match=...)`: a clear error, in the form the contract gives."""

    @contextlib.contextmanager
    def refused(kind, verb, match):
        with pytest.raises(kind, match=match) as info:
            yield
        # jdp.<verb>: <tree path> <fact with numbers>; <rule>. <what to do>
        assert re.fullmatch(rf"jdp\.{verb}: .+; .+\. .+", str(info.value), re.DOTALL), str(info.value)

    return refused


@pytest.fixture
def compilations():
    """`compilations()`: how many programs XLA has compiled since it was last asked."""
    seen = len(_compilations)

    def since_last():
        nonlocal seen
        new, seen = len(_compilations) - seen, len(_compilations)
        return new

    return since_last


@pytest.fixture
def traced():
    """`traced(fn)`: fn, counting in `.shapes` the shapes of its second argument at each trace."""

    def traced(fn):
        def counting(params, x, *args, **kwargs):
            counting.shapes.append(x.shape)
            return fn(params, x, *args, **kwargs)

        counting.shapes = []
        return counting

    return traced
