"""How large the models of benchmarks/gpu.py are, and what they are fed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ResNetSize(NamedTuple):
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    image: int = 224


class GPTSize(NamedTuple):
    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    vocabulary: int = 50304  # 50257, rounded up to a multiple of 128, as is done for speed


TINY_RESNET = ResNetSize(stages=(1, 1), width=8, classes=10, image=16)
TINY_GPT = GPTSize(layers=1, width=32, heads=2, length=16, vocabulary=128)


# (model, its size, rows for each device)
FULL = {"ResNet-50": (ResNetSize(), 64), "GPT, 125M": (GPTSize(), 8)}
TINY = {"ResNet-50": (TINY_RESNET, 4), "GPT, 125M": (TINY_GPT, 4)}


def batch_of(size: ResNetSize | GPTSize, rows: int) -> dict[str, np.ndarray]:
    """Noise: what it is made of does not change how long a step takes."""
    rng = np.random.default_rng(0)
    if isinstance(size, ResNetSize):
        images = rng.normal(size=(rows, size.image, size.image, 3)).astype(np.float32)
        return {"x": images, "y": rng.integers(size.classes, size=rows).astype(np.int32)}
    text = rng.integers(size.vocabulary, size=(rows, size.length + 1)).astype(np.int32)
    return {"x": text[:, :-1].copy(), "y": text[:, 1:].copy()}
