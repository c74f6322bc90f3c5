"""What the tests share."""

import contextlib
import random
import socket

import jax
import numpy as np
from hypothesis import settings

NUMBERS = np.random.RandomState(0).randn(10, 4).astype(np.float32)  # ten rows: uneven over four devices
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(8, 6)).astype(np.float32)
TARGETS = _random.normal(size=(8, 4)).astype(np.float32)


def examples(count: int) -> settings:
    """So many examples of a law in the full tier, and a tenth of them, but two at least, in the fast one."""
    return settings(max_examples=max(2, count * settings.default.max_examples // 30))


def variables_of(model, *example):
    """Variables in the shapes of a Linen model's `init`, drawn by numpy: no program is compiled for them.

    Each worker collects all files. If a file called `init` then, each worker would compile it, and most never use it.
    """
    random = np.random.default_rng(0)

    def draw(path, leaf):
        is_one = getattr(path[-1], "key", "") in ("var", "scale")
        return np.ones(leaf.shape, leaf.dtype) if is_one else random.normal(0, 0.4, leaf.shape).astype(leaf.dtype)

    rngs = lambda: {"params": jax.random.key(0), "dropout": jax.random.key(1)}  # noqa: E731
    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: model.init(rngs(), *example)))


def free_port() -> int:
    """A port at which nobody listens, nor at the next one.

    None of those that the system gives to connections: one of these may have it by the time that a process listens.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000, 2), 1000):
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise OSError("no port is free")


def close(got, want, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The same tree, and the same values to float32's rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert np.shape(g) == np.shape(w), f"{where}: {np.shape(g)}, {np.shape(w)} is right"
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol, err_msg=where)


def close_to_rounding(got, want, single: float = 2e-6) -> None:
    """The same tree, shapes and dtypes, and values of the order of one, equal to the rounding of their dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert g.dtype == w.dtype and np.shape(g) == np.shape(w), where
        limit = {"float64": 1e-12, "float32": single}.get(g.dtype.name, 0)
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=limit, atol=limit, err_msg=where)


def divides(x, n):
    """Whether an axis of an array can be cut over n devices."""
    return n > 1 and any(size and size % n == 0 for size in np.shape(x))


def assert_cut(tree, n, cut=True):
    """By the bytes that lie on each device: an n-th of every array with an axis that n divides, the rest whole."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        part = n if cut and divides(x, n) else 1
        held = {shard.device: shard.data.nbytes for shard in x.addressable_shards}
        assert held == {d: x.nbytes // part for d in jax.devices()[:n]}, jax.tree_util.keystr(path)


def bytes_of(tree, n):
    """Bytes on each device of the leaves that can be cut, and of the others."""
    leaves = jax.tree.leaves(tree)
    return sum(x.nbytes // n for x in leaves if divides(x, n)), sum(x.nbytes for x in leaves if not divides(x, n))
