"""The models of benchmarks/gpu.py in Flax Linen; gpu_torch.py has their twins.

ResNet-50: He et al., Deep Residual Learning for Image Recognition (2015), with the stride in the 3 x 3 convolution.
GPT: the decoder of Radford et al., Language Models are Unsupervised Multitask Learners (2019); its smallest, without
the biases of a tied head, has 124 million parameters. Both compute in bfloat16; parameters are float32.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from gpu_sizes import GPTSize, ResNetSize

BFLOAT16 = jnp.bfloat16


class Bottleneck(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(features: int, size: int, stride: int = 1) -> Any:
            padding = [(size // 2, size // 2)] * 2
            return nn.Conv(features, (size, size), (stride, stride), padding, use_bias=False, dtype=BFLOAT16)

        def norm() -> Any:
            return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=BFLOAT16)

        y = nn.relu(norm()(conv(self.width, 1)(x)))
        y = nn.relu(norm()(conv(self.width, 3, self.stride)(y)))
        y = norm()(conv(4 * self.width, 1)(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, 1, self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    size: ResNetSize = ResNetSize()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = self.size.width
        x = nn.Conv(width, (7, 7), (2, 2), [(3, 3)] * 2, use_bias=False, dtype=BFLOAT16)(x.astype(BFLOAT16))
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=BFLOAT16)(x))
        around: Any = [(1, 1)] * 2
        x = nn.max_pool(x, (3, 3), (2, 2), around)
        for stage, blocks in enumerate(self.size.stages):
            for block in range(blocks):
                x = Bottleneck(width * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(self.size.classes)(x.astype(jnp.float32).mean((1, 2)))


class GPT(nn.Module):
    size: GPTSize = GPTSize()

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, width = self.size, self.size.width
        embed = nn.Embed(size.vocabulary, width, dtype=BFLOAT16)
        positions = nn.Embed(size.length, width, dtype=BFLOAT16)
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for _ in range(size.layers):
            y = nn.Dense(3 * width, dtype=BFLOAT16)(nn.LayerNorm(1e-5, dtype=BFLOAT16)(x))
            q, k, v = (z.reshape(*z.shape[:2], size.heads, -1) for z in jnp.split(y, 3, axis=-1))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention())
            x = x + nn.Dense(width, dtype=BFLOAT16)(y.reshape(x.shape))
            y = nn.Dense(4 * width, dtype=BFLOAT16)(nn.LayerNorm(1e-5, dtype=BFLOAT16)(x))
            x = x + nn.Dense(width, dtype=BFLOAT16)(nn.gelu(y))
        return embed.attend(nn.LayerNorm(1e-5, dtype=BFLOAT16)(x)).astype(jnp.float32)


def attention() -> Any:
    """torch picks a fused kernel by itself; JAX has to be told, and cuDNN's wants compute capability 8."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return "cudnn" if capability.partition(".")[0].isdecimal() and float(capability) >= 8 else None
