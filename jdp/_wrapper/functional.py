"""data_parallel, the functional form: `data_parallel(f, params, batch) == f(params, *batch)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from .._core.devices import DeviceLike, Devices, named_once, refuse_alone, resolve_devices, resolve_output
from .._core.inputs import checked_dim
from .._core.layout import Tree
from .._core.programs import made_once
from .._core.scattered import Scattered, children
from .._model.config import kind_of
from .._model.linen import module_of
from .data_parallel import DataParallel


def data_parallel(
    apply_fn: Any,
    params: Tree,
    batch: Tree,
    devices: Devices = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device_ids: Devices = None,
) -> Tree:
    """Runs a function on every device, each with its chunk of the batch: `== apply_fn(params, *batch)`.

    `y = jdp.data_parallel(apply_fn, params, x)` is the functional form of `jdp.DataParallel`. The program is compiled
    once for each function, known by its identity: pass `model.apply`, or a function that you keep, not a new
    lambda for each call.

    Args:
        apply_fn: a function `apply_fn(params, *args, **kwargs)`, or a Linen module.
        params: its first argument, replicated.
        batch: its further arguments: a tuple (scattered or not) holds the arguments, `None` is none,
            anything else, also a NamedTuple, is a single argument.
        devices: as for `jdp.DataParallel`.
        output_device: as for `jdp.DataParallel`.
        dim: the axis along which inputs are cut and outputs concatenated.
        kwargs: keyword arguments of `apply_fn`.
        device_ids: torch's name of `devices`.

    Returns:
        What `apply_fn` returns, the rows of all chunks in input order.

    Example:
        >>> import jdp, numpy as np
        >>> jdp.data_parallel(lambda w, x: x @ w, np.ones((2, 3)), np.ones((5, 2)), devices=[0]).shape
        (5, 3)

    Source: `data_parallel` in torch/nn/parallel/data_parallel.py.
    """
    arguments: Sequence[Any] = batch if type(batch) is tuple else () if batch is None else (batch,)
    if isinstance(batch, Scattered) and type(batch._layout.fill(batch._arrays)) is tuple:
        arguments = children(batch)
    devices = named_once("data_parallel", devices, device_ids)
    if kind_of(apply_fn, "data_parallel") == "nnx":
        raise TypeError(
            f"jdp.data_parallel: apply_fn is an NNX module, a {type(apply_fn).__name__}; it holds its own parameters, "
            f"so there is no params to pass. Call jdp.DataParallel(model, devices)(*batch)."
        )
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(
            f"jdp.data_parallel: kwargs is a {type(kwargs).__name__}; keyword arguments have names. Pass a dict."
        )
    found = resolve_devices("data_parallel", devices)
    refuse_alone("data_parallel", found)
    where = devices if isinstance(devices, Mesh) else found  # a mesh has a name for its axis, too
    key = (where, resolve_output("data_parallel", output_device), checked_dim("data_parallel", dim))
    linen_module = module_of(apply_fn)
    if linen_module is None:
        dp = made_once(apply_fn, key, lambda weak: DataParallel(weak, *key))
    else:
        # A clone, because the wrapper lives as long as the user's module, and must not keep that alive.
        dp = made_once(linen_module, key, lambda _: DataParallel(linen_module.clone(), *key))
    try:
        return dp(params, *arguments, **(kwargs or {}))
    except TypeError as error:
        if len(arguments) > 1 and "positional argument" in str(error):
            error.add_note("A tuple is the arguments. To a function of one batch pass ((x, y),), or a list or dict.")
        raise
