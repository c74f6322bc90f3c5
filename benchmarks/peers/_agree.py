"""What is right: the same steps on one device, by a program that shares nothing with the peers but the models."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from ._tasks import MOMENTUM, RATE, Params, Task

RIGHT = 1e-4  # of a step; the rounding of float32, in orders of summation that differ
Flat = dict[str, np.ndarray]


def flat(params: Params) -> Flat:
    return {f"{layer}/{key}": np.asarray(value) for layer, kv in params.items() for key, value in kv.items()}


def read(path: Path) -> Flat:
    with np.load(path) as file:
        return dict(file)


def after(task: Task, batches: list[dict[str, np.ndarray]]) -> Flat:
    """The parameters after a step on each; SGD with momentum, written out."""
    import jax

    gradient = jax.jit(jax.grad(_loss(task.name)))
    params, momentum = task.params, jax.tree.map(np.zeros_like, task.params)
    for batch in batches:
        grads = jax.device_get(gradient(params, batch))
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - RATE * m, params, momentum)
    return flat(params)


def loss(task: Task, params: Flat) -> float:
    """On the first batch."""
    nested: Params = {}
    for name, value in params.items():
        layer, key = name.split("/")
        nested.setdefault(layer, {})[key] = value
    return float(_loss(task.name)(nested, task.batches[0]))


@functools.cache
def _loss(name: str):
    import jax
    import optax

    from ._flax_models import MODELS

    def loss_fn(params, batch):
        logits = MODELS[name].apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return jax.jit(loss_fn)


def off(before: Flat, right: Flat, found: Flat) -> float:
    """How far the step found is from the right one, as a share of that: 0 is right, 1 is as far off as no step."""
    if {*found} != {*right}:
        raise ValueError(f"parameters {sorted({*found} ^ {*right})} are on one side only")
    missed = sum(float(np.sum((found[name] - right[name]) ** 2)) for name in right)
    moved = sum(float(np.sum((right[name] - before[name]) ** 2)) for name in right)
    return (missed / moved) ** 0.5


def verdict(share: float) -> str:
    return "right" if share <= RIGHT else f"wrong: the step is {share:.1%} off"  # NaN is wrong, too
