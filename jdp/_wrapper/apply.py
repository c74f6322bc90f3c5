"""apply runs a Linen module or a function; a call like one before it goes straight to its program.

What decides this is all in line: the devices' threads empty the processor's caches between two calls, so what counts is
how much code a call touches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
from flax import nnx
from jax._src.config import disable_jit  # what jax.config.jax_disable_jit reads, without its frames in Python

from .._core.layout import Tree
from .._core.programs import dispatch
from .._core.replicate import first_leaf
from .._core.scattered import Scattered
from .._core.split import split
from .._model import linen as _linen
from .._model import nnx as _nnx
from .calls import Known, known_by, look
from .steps import Steps


class Apply(Steps):
    """A call of `jdp.DataParallel`, for all but NNX modules."""

    def apply(self, variables: Tree, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a Linen module or a function: `dp.apply(variables, x) == module.apply(variables, x)`.

        For Linen modules `rngs`, `mutable` and `method` are those of `flax.linen.Module.apply`; with
        `mutable` the result is `(output, updated collections)`. Each replica draws from its own keys,
        the primary from those given.

        Args:
            variables: the variables of a Linen module (from `dp.init`), or a function's parameters.
            *args: cut along `dim` (or `in_axes`). NNX objects (an `nnx.Rngs`, a model) go whole to every replica, and
                their state is updated.
            **kwargs: likewise; also `rngs`, `mutable` and `method` for Linen.

        Raises:
            ValueError: arrays disagree on the batch size; uneven chunks for a model with collectives.
            RuntimeError: parameters on a device that is neither the host nor the primary device.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
            >>> dp.apply(np.float32(2), np.arange(3.0)).tolist()
            [0.0, 2.0, 4.0]
        """
        config = self._config
        if kwargs and config.kind == "linen":
            kwargs = _linen.normal_options(kwargs)
        if not config.calls:
            return self._all_steps(variables, args, kwargs)
        one = len(args) == 1 and not kwargs and type(args[0]) is Scattered  # what is called most, as in known_by
        key, batch = (args[0]._layout.token, args[0]._arrays) if one else known_by(args, kwargs)
        known: Known | None = config.calls.used(key)
        if known is None or type(variables) is not dict and _nnx.is_node(variables):
            return self._all_steps(variables, args, kwargs)
        module, steps, where, program, seen, arrays, stateful, stays = known
        leaf = variables
        while type(leaf) is dict and leaf:  # as nearly every tree begins
            leaf = next(iter(leaf.values()))
        found = getattr(leaf, "_sharding", None) or getattr(first_leaf(variables), "_sharding", None)
        moved = (found is not where and found != where) or not seen.recalled
        kind, own = type(self), self.__dict__  # steps_of(self)
        replaced = "scatter" in own or "replicate" in own or "parallel_apply" in own or "gather" in own
        replaced = replaced or (kind.scatter, kind.replicate, kind.parallel_apply, kind.gather) != steps
        if moved or replaced or self.module is not module or disable_jit.value:
            return self._all_steps(variables, args, kwargs)
        turn = out = None
        try:
            turn = seen.turns.pop()
            batch = batch if arrays is None else [batch[i] for i in arrays]
            before = program._cache_size()
            ran = dispatch(program, config.mesh, variables, *batch) if seen.communicates else program(variables, *batch)
            if before == program._cache_size() == seen.checked or look(known, variables, batch):
                out = ran
        except (jax.errors.JaxRuntimeError, FloatingPointError):  # it ran, or something that it waited for
            raise
        except Exception:  # another thread's turn, or within a replica, where JAX refuses the program; or something is
            pass  # wrong with the arguments, which a call that takes all steps says in better words
        finally:
            if turn:
                seen.turns.append(turn)
        if out is None:
            return self._all_steps(variables, args, kwargs)
        return out[-1] if stays and seen.even else self._gathered(Scattered(*seen.outputs(out)), True, stateful)

    def _all_steps(self, variables: Tree, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The same, of a call that is not known."""
        config, stateful = self._config, False
        if config.kind == "nnx":
            raise TypeError("jdp.DataParallel: an NNX module holds its own state. Call dp(*args) instead of dp.apply.")
        if config.kind == "linen":
            _linen.check_variables(variables)
            stateful = _linen.is_stateful(kwargs)
        if in_replica():
            module = cast(Any, self.module)
            if config.kind == "linen":
                return module.apply(_linen.unboxed(variables, kwargs.get("mutable", False)), *args, **kwargs)
            return module(variables, *args, **kwargs)
        cut = [
            (
                name,
                split(variables[name], config.mesh, config.dim, verb="DataParallel", root=f"state {name}", axes=axis),
            )
            for name, axis in config.state_axes.items()
            if name in variables
        ]
        if cut:
            variables = {**variables, **dict(cut)}
        whole, nodes = (variables, []) if not _nnx.is_node(variables) else _nnx.take_nodes(variables)
        (args, kwargs), given = _nnx.take_nodes((args, kwargs), len(nodes))
        nodes += given
        if nodes:  # a model, an nnx.Rngs: whole on every replica, and updated
            whole = _nnx.Beside(whole, *nnx.split(nodes))
        try:
            out = self._forward(whole, args, kwargs, stateful, cut, variables if nodes else None)
        except Exception as error:
            _linen.explain_stacked(error, variables, len(config.devices))
            raise
        if nodes:
            out, updates = out
            nnx.update(nodes, updates)
        return out


def in_replica() -> bool:
    """Whether this is traced inside a replica's program already."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)
