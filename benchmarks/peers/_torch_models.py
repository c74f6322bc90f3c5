"""The models in torch, and their parameters out of and into it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ._outputs_first import KEYS, channels_first, channels_last
from ._tasks import BLOCKS, HEADS, LAYERS, LENGTH, Params, Task


def _layer(kind: str, shape: tuple[int, ...]) -> nn.Module:
    match kind, shape:
        case "dense", (inputs, outputs):
            return nn.Linear(inputs, outputs)
        case "conv", (height, width, inputs, outputs):
            return nn.Conv2d(inputs, outputs, (height, width), padding="same")
        case "embed", (rows, width):
            return nn.Embedding(rows, width)
    return nn.LayerNorm([*shape])


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.run = {"MLP": self.mlp, "CNN": self.cnn, "Transformer": self.transformer}[name]
        self.named = nn.ModuleDict({layer: _layer(*what) for layer, what in LAYERS[name].items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        named = self.named
        return named["head"](F.relu(named["dense2"](F.relu(named["dense1"](x)))))

    def cnn(self, x: torch.Tensor) -> torch.Tensor:
        named = self.named
        x = x.reshape(-1, 1, 28, 28)  # one channel: the same numbers, whether it comes first or last
        x = F.max_pool2d(F.relu(named["conv1"](x)), 2)
        x = F.max_pool2d(F.relu(named["conv2"](x)), 2)
        return named["head"](F.relu(named["dense1"](x.flatten(1))))

    def transformer(self, x: torch.Tensor) -> torch.Tensor:
        named = self.named
        x = named["embed"](x) + named["positions"](torch.arange(LENGTH))
        for i in range(BLOCKS):
            y = named[f"block{i}_qkv"](named[f"block{i}_norm1"](x))
            q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in y.chunk(3, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + named[f"block{i}_mix"](y)
            y = F.relu(named[f"block{i}_up"](named[f"block{i}_norm2"](x)))
            x = x + named[f"block{i}_down"](y)
        return named["head"](named["norm"](x))


def build(task: Task) -> Model:
    model = Model(task.name)
    with torch.no_grad():
        for layer, values in task.params.items():
            weights: dict[str, Any] = dict(
                zip(("weight", "bias"), channels_first(layer, [*values.values()]), strict=False)
            )
            for name, parameter in model.named.get_submodule(layer).named_parameters():
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))
    return model


def params_of(model: nn.Module) -> Params:
    """Of the model, or of the wrapper that has it as `.module`."""
    named: Any = getattr(model, "module", model).named
    arrays = {layer: [p.detach().numpy() for p in module.parameters()] for layer, module in named.items()}
    return {
        layer: dict(zip(KEYS[len(found), found[0].ndim > 1], channels_last(layer, found), strict=True))
        for layer, found in arrays.items()
    }
