"""The models in Flax Linen."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._tasks import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(512, name="dense1")(x))
        x = nn.relu(nn.Dense(512, name="dense2")(x))
        return nn.Dense(10, name="head")(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.max_pool(nn.relu(nn.Conv(16, (5, 5), name="conv1")(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3), name="conv2")(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128, name="dense1")(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


class Transformer(nn.Module):
    """A decoder: from the characters up to each, the next."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        positions = nn.Embed(LENGTH, WIDTH, name="positions")(jnp.arange(LENGTH))
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(x) + positions
        for i in range(BLOCKS):
            y = nn.LayerNorm(1e-5, name=f"block{i}_norm1")(x)
            y = nn.Dense(3 * WIDTH, name=f"block{i}_qkv")(y)
            q, k, v = (z.reshape(*z.shape[:2], HEADS, -1) for z in jnp.split(y, 3, axis=-1))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + nn.Dense(WIDTH, name=f"block{i}_mix")(y.reshape(x.shape))
            y = nn.LayerNorm(1e-5, name=f"block{i}_norm2")(x)
            y = nn.relu(nn.Dense(4 * WIDTH, name=f"block{i}_up")(y))
            x = x + nn.Dense(WIDTH, name=f"block{i}_down")(y)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(1e-5, name="norm")(x))


MODELS = {"MLP": MLP(), "CNN": CNN(), "Transformer": Transformer()}
