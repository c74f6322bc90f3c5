"""The twins of gpu_models.py in torch: the same layers, shapes and number of parameters."""

from __future__ import annotations

from typing import Any

import torch
from gpu_sizes import GPTSize, ResNetSize
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(before, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, 4 * width, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)])
        self.short = None
        if stride > 1 or before != 4 * width:
            conv = nn.Conv2d(before, 4 * width, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norms[0](self.convs[0](x)))
        y = F.relu(self.norms[1](self.convs[1](y)))
        return F.relu((self.short(x) if self.short else x) + self.norms[2](self.convs[2](y)))


def resnet(size: ResNetSize) -> nn.Module:
    layers: list[Any] = [nn.Conv2d(3, size.width, 7, 2, 3, bias=False), nn.BatchNorm2d(size.width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = size.width
    for stage, blocks in enumerate(size.stages):
        for block in range(blocks):
            width = size.width * 2**stage
            layers.append(Bottleneck(before, width, 2 if stage and not block else 1))
            before = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, size.classes)]
    model: Any = nn.Sequential(*layers)
    return model.to(memory_format=torch.channels_last)


class Block(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        heads = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.mix(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        for table in (self.embed, self.positions):
            nn.init.normal_(table.weight, 0, 0.02)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)
