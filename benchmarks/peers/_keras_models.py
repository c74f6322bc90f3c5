"""The models in Keras, and their parameters out of and into it."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers as kl

from ._tasks import BLOCKS, HEADS, LAYERS, LENGTH, WIDTH, Params, Task

NAMES = {"gamma": "scale", "beta": "bias", "embeddings": "embedding"}


def _layer(name: str, kind: str, shape: tuple[int, ...]) -> Any:
    relu = "relu" if name != "head" and not name.endswith(("qkv", "mix", "down")) else None
    if kind == "dense":
        return kl.Dense(shape[-1], relu, name=name)
    if kind == "conv":
        return kl.Conv2D(shape[-1], shape[:2], padding="same", activation=relu, name=name)
    return (
        kl.Embedding(shape[0], shape[1], name=name)
        if kind == "embed"
        else kl.LayerNormalization(epsilon=1e-5, name=name)
    )


class Model(keras.Model):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.kind = name
        self.named = {layer: _layer(layer, *what) for layer, what in LAYERS[name].items()}
        self.pool, self.flatten = kl.MaxPooling2D(), kl.Flatten()

    def call(self, x: Any) -> Any:
        named = self.named
        if self.kind == "Transformer":
            x = named["embed"](x) + named["positions"](keras.ops.arange(LENGTH))
            for i in range(BLOCKS):
                x = self.block(x, f"block{i}_")
            return named["head"](named["norm"](x))
        if self.kind == "CNN":
            x = self.flatten(self.pool(named["conv2"](self.pool(named["conv1"](x)))))
            return named["head"](named["dense1"](x))
        return named["head"](named["dense2"](named["dense1"](x)))

    def block(self, x: Any, prefix: str) -> Any:
        norm1, qkv, mix, norm2, up, down = (
            self.named[prefix + name] for name in ("norm1", "qkv", "mix", "norm2", "up", "down")
        )
        heads: Any = (-1, LENGTH, HEADS, WIDTH // HEADS)
        parts: Any = keras.ops.split(qkv(norm1(x)), 3, axis=-1)
        q, k, v = (keras.ops.reshape(part, heads) for part in parts)
        y = keras.ops.dot_product_attention(q, k, v, is_causal=True)
        x = x + mix(keras.ops.reshape(y, (-1, LENGTH, WIDTH)))
        return x + down(up(norm2(x)))


def build(task: Task) -> Model:
    model = Model(task.name)
    model(task.batches[0]["x"][:1])
    for layer, name, variable in _variables(model):
        variable.assign(task.params[layer][name])
    return model


def params_of(model: Model) -> Params:
    found: Params = {}
    for layer, name, variable in _variables(model):
        found.setdefault(layer, {})[name] = variable.value
    return found


def _variables(model: Model) -> list[Any]:
    split: list[Any] = [(*variable.path.split("/")[-2:], variable) for variable in model.trainable_variables]
    return [(layer, NAMES.get(name, name), variable) for layer, name, variable in split]
