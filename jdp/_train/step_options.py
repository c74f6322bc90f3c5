"""The options of a training step, and which of them contradict each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.layout import Tree
from .._model.config import Config
from .state import VERB


class StepOptions(NamedTuple):
    """The checked arguments of `train_step`."""

    accumulate_steps: int
    shard_optimizer: bool | None
    reduce_dtype: Any
    donate: bool
    skip_nonfinite: bool
    sync_batch_norm: bool
    check_replicas: int
    shard_params: bool | None
    gather_once: bool
    deterministic: bool

    @property
    def reserved(self) -> tuple[str, ...]:
        """The names of the metrics that the step itself adds."""
        return ("loss", "skipped") if self.skip_nonfinite else ("loss",)


def resolved(options: StepOptions, config: Config, are_cut: bool = False) -> StepOptions:
    """Decides what the caller left open; raises a `ValueError` for options that contradict each other."""
    shard_params = are_cut if options.shard_params is None else bool(options.shard_params)
    if shard_params and options.shard_optimizer is False:
        raise ValueError(
            f"jdp.{VERB}: shard_params is True and shard_optimizer False; the optimizer's state is cut as the "
            f"parameters are. Leave shard_optimizer out, or shard_params."
        )
    if options.gather_once and not shard_params:
        raise ValueError(
            f"jdp.{VERB}: gather_once is True and shard_params False; parameters are whole then, and nothing is "
            f"gathered. Leave gather_once out, or pass shard_params=True."
        )
    shard_optimizer = bool(options.shard_optimizer or shard_params)
    options = options._replace(shard_params=shard_params, shard_optimizer=shard_optimizer)
    on = dict(shard_params=shard_params, shard_optimizer=shard_optimizer, deterministic=options.deterministic)
    config.refuse_grouped(VERB, **on)
    _check_deterministic(options, config.replicas or len(config.devices))
    return options


def _check_deterministic(options: StepOptions, replicas: int) -> None:
    if not options.deterministic:
        return
    if replicas & (replicas - 1):
        raise ValueError(
            f"jdp.{VERB}: deterministic is True and there are {replicas} replicas; they are added in one balanced "
            f"tree, so their number must be a power of two. Pass jdp.DataParallel(..., replicas=8)."
        )
    if options.shard_params:
        raise ValueError(
            f"jdp.{VERB}: deterministic and shard_params are True; gradients of parameters that are cut are summed by "
            f"a reduce-scatter, whose order depends on the number of devices. Pass shard_optimizer=True instead."
        )


def check_shards(options: StepOptions, params: Tree, name: str) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params) if options.shard_params else ():
        if jnp.iscomplexobj(x):
            raise TypeError(
                f"jdp.{VERB}: shard_params is True, and {name}{jax.tree_util.keystr(path)} is of dtype {x.dtype}; "
                f"jax.checkpoint, which frees gathered parameters, takes no complex numbers. Pass "
                f"shard_optimizer=True instead."
            )
