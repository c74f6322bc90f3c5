"""The tests run on 8 virtual CPU devices; here is what the files share."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jdp

jdp.virtual_cpu_devices(8)

import contextlib
import re

import jax
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("jdp", max_examples=30, deadline=None, derandomize=True)
settings.load_profile("jdp")

_compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: _compilations.append(event) if event.endswith("backend_compile_duration") else None
)


def pytest_addoption(parser):
    parser.addoption("--one-case", action="store_true", help="of each test's parameters only the last combination")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--one-case"):
        last = {(item.path, getattr(item, "originalname", item.name)): item for item in items}
        items[:] = [item for item in items if item in last.values()]


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
