"""The models in equinox, and their parameters out of and into it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._outputs_first import KEYS, channels_first, channels_last
from ._tasks import BLOCKS, HEADS, LAYERS, LENGTH, Params, Task


def _layer(kind: str, shape: tuple[int, ...]) -> Any:
    key = jax.random.key(0)
    match kind, shape:
        case "dense", (inputs, outputs):
            return eqx.nn.Linear(inputs, outputs, key=key)
        case "conv", (height, width, inputs, outputs):
            return eqx.nn.Conv2d(inputs, outputs, (height, width), padding="SAME", key=key)
        case "embed", (rows, width):
            return eqx.nn.Embedding(rows, width, key=key)
    return eqx.nn.LayerNorm(shape)


class Model(eqx.Module):
    """Of one example, as equinox's layers are; `jax.vmap` makes it one of a batch."""

    name: str = eqx.field(static=True)
    named: dict[str, Any]

    def __call__(self, x: jax.Array) -> jax.Array:
        return {"MLP": self.mlp, "CNN": self.cnn, "Transformer": self.transformer}[self.name](x)

    def mlp(self, x: jax.Array) -> jax.Array:
        named, relu = self.named, jax.nn.relu
        return named["head"](relu(named["dense2"](relu(named["dense1"](x)))))

    def cnn(self, x: jax.Array) -> jax.Array:
        named, relu, pool = self.named, jax.nn.relu, eqx.nn.MaxPool2d(2, 2)
        x = x.reshape(1, 28, 28)  # one channel: the same numbers, whether it comes first or last
        x = pool(relu(named["conv2"](pool(relu(named["conv1"](x))))))
        return named["head"](relu(named["dense1"](x.ravel())))

    def transformer(self, x: jax.Array) -> jax.Array:
        each = {name: jax.vmap(layer) for name, layer in self.named.items()}
        x = each["embed"](x) + each["positions"](jnp.arange(LENGTH))
        for i in range(BLOCKS):
            y = each[f"block{i}_qkv"](each[f"block{i}_norm1"](x))
            q, k, v = (z.reshape(LENGTH, HEADS, -1) for z in jnp.split(y, 3, axis=-1))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + each[f"block{i}_mix"](y.reshape(x.shape))
            y = jax.nn.relu(each[f"block{i}_up"](each[f"block{i}_norm2"](x)))
            x = x + each[f"block{i}_down"](y)
        return each["head"](each["norm"](x))


def build(task: Task) -> Model:
    named = {layer: _layer(*what) for layer, what in LAYERS[task.name].items()}
    for layer, values in task.params.items():
        arrays = zip(_leaves(named[layer]), channels_first(layer, [*values.values()]), strict=True)
        new = [jnp.asarray(value.reshape(leaf.shape)) for leaf, value in arrays]  # a convolution's bias is 3-d
        named[layer] = eqx.tree_at(_leaves, named[layer], new)
    return Model(task.name, named)


def params_of(model: Model) -> Params:
    found: Params = {}
    for layer, module in model.named.items():
        arrays = _leaves(module)
        arrays = [arrays[0], *(bias.ravel() for bias in arrays[1:])]
        found[layer] = dict(zip(KEYS[len(arrays), arrays[0].ndim > 1], channels_last(layer, arrays), strict=True))
    return found


def _leaves(layer: Any) -> list[Any]:
    return [leaf for leaf in (layer.weight, getattr(layer, "bias", None)) if leaf is not None]
