"""What `jdp replay` prints of the one step: what is not finite before, in and after it, its numbers, and its bits."""

from __future__ import annotations

import hashlib
import os
import pdb
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.fingerprint import fingerprint
from ..._core.layout import Tree, is_key
from ..._core.scattered import Scattered
from ..._train.program import Program
from ..._train.state import TrainState

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
_FEW = 6  # leaves that one line names


def before(program: Program, state: TrainState, batch: Scattered) -> Iterator[tuple[str, str]]:
    """Yields lines about the batch and the state of a step before it is made, and about its gradient."""
    layout = batch._layout
    count = len(batch.devices)
    rows = f"{sum(layout.sizes)} rows on {count} replicas" if layout.is_cut else "the same on every replica"
    yield "batch", f"{rows}; {_finite({'batch': layout.fill(batch._arrays)})}"
    yield "state", _finite(_parts(program, state))

    def norm(state: TrainState, arrays: tuple[Any, ...]) -> jax.Array:
        grads = program.view(program.gradients(state, Scattered(arrays, layout)).grads)
        squares = [jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in jax.tree.leaves(grads)]
        return jnp.sqrt(sum(squares, jnp.float32(0)))

    yield "gradient", f"norm {_text(jax.jit(norm)(state, tuple(batch._arrays)))}"
    for found in program.find_nonfinite(state, batch):
        where = f"replica {found.replica} ({found.device}), {_few('row', map(str, found.rows))}"
        yield "", f"not finite in {where}, {_few('leaf', found.paths, 'leaves')}"


def after(program: Program, state: TrainState, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields lines about the results of a step."""
    for name, value in metrics.items():
        yield name, _text(value)
    yield "state after", f"{_finite(_parts(program, state))}; bits {bits(state)}"


def bits(state: Tree) -> str:
    """Returns sixteen hexadecimal digits that depend on every bit of a tree, and not on its sharding."""
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(state)]
    return hashlib.sha256(fingerprint([x for x in leaves if x.size]).tobytes()).hexdigest()[:16]


def stop(number: int) -> bool:
    """Opens the debugger where the script calls its step; returns False if the user quits."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    print(f"jdp replay: this line makes step {number}; n makes it, q ends all", flush=True)
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.breaks or debugger.stoplineno != -1:  # any command but `c`: the script is traced from here on
        while frame is not None:
            frame.f_trace, debugger.botframe = debugger.trace_dispatch, frame
            frame = frame.f_back
        sys.settrace(debugger.trace_dispatch)
    return not debugger.quitting


def _parts(program: Program, state: TrainState) -> dict[str, Tree]:
    return {"params": program.view(state.params), "opt_state": state.opt_state, "state": state.state}


def _finite(parts: Mapping[str, Tree]) -> str:
    """Returns a text: "finite", or which leaves of these trees are not."""
    named = {
        part + jax.tree_util.keystr(path): x
        for part, tree in parts.items()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(x, "dtype") and not is_key(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    }
    finite = jax.jit(lambda arrays: [jnp.isfinite(x).all() for x in arrays])(list(named.values()))
    wrong = [name for name, ok in zip(named, finite, strict=True) if not ok]
    return f"not finite: {_few('leaf', wrong, 'leaves')}" if wrong else "finite"


def _few(what: str, names: Any, several: str = "") -> str:
    names = list(names)
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return f"{what if len(names) == 1 else several or what + 's'} {', '.join(names[:_FEW])}{more}"


def _text(value: Any) -> str:
    x = np.asarray(value)
    return str(x[()]) if not x.ndim else " ".join(np.array2string(x, threshold=9).split())
