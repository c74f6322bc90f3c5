"""What one of eight devices keeps and sends of one GPT: replicated, cut, and on meshes. It compiles, and runs no step.

    python benchmarks/mesh_bytes.py            the table of docs/mesh.md, in half a minute

All bytes are those of jdp.explain, for one device, and a step of Adam on 32 rows of 128 tokens. "gradients" are part of
"temporaries"; "sent" is what the device gives to collectives.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import _results
import flax.linen as nn
import jax
import numpy as np
import optax

import jdp

ROWS, LENGTH, TOKENS, WIDTH, HEADS, LAYERS = 8, 128, 4096, 512, 8, 4
WAYS: dict[str, tuple[tuple[int, int] | None, dict[str, bool]]] = {
    "replicated": (None, {}),
    "`shard_optimizer=True`": (None, {"shard_optimizer": True}),
    "`shard_params=True`": (None, {"shard_params": True}),
    "a mesh of 4 x 2": ((4, 2), {}),
    "a mesh of 2 x 4": ((2, 4), {}),
    "a mesh of 1 x 8": ((1, 8), {}),
}
COLUMNS = ("8 devices", "parameters", "optimizer's state", "gradients", "temporaries", "peak", "sent", "collectives")


def cut(*axes: str | None) -> Any:
    return nn.with_partitioning(nn.initializers.normal(0.02), axes)


class GPT(nn.Module):
    """Its heads, its MLP and its vocabulary are cut over "model"; without such an axis nothing is."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense, heads = partial(nn.Dense, use_bias=False), (*tokens.shape, HEADS, WIDTH // HEADS)
        outputs, inputs = cut(None, "model"), cut("model", None)
        x = nn.Embed(TOKENS, WIDTH, embedding_init=inputs)(tokens)
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            q, k, v = (dense(WIDTH, kernel_init=outputs)(y).reshape(heads) for _ in range(3))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x += dense(WIDTH, kernel_init=inputs)(y)
            y = dense(4 * WIDTH, kernel_init=outputs)(nn.LayerNorm()(x))
            x += dense(WIDTH, kernel_init=inputs)(nn.gelu(y))
        return dense(TOKENS, kernel_init=outputs)(nn.LayerNorm()(x))


def loss_fn(variables: Any, tokens: jax.Array) -> jax.Array:
    logits = GPT().apply(variables, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def report(sizes: tuple[int, int] | None, options: dict[str, bool], rows: int) -> jdp.Report:
    devices = jax.devices() if sizes is None else jax.make_mesh(sizes, ("data", "model"))
    dp = jdp.DataParallel(GPT(), devices)
    tokens = np.zeros((rows, LENGTH + 1), np.int32)
    step = dp.train_step(loss_fn, optax.adam(1e-3), **options)
    in_shards = {"shard_params": True} if "shard_params" in options else {}
    state = step.init(dp.init(jax.random.key(0), tokens[:1, :-1], **in_shards))
    return jdp.explain(step, state, tokens)


def cells(way: str, rows: int) -> list[str]:
    r = report(*WAYS[way], rows)
    sizes = r.parameter_bytes, r.optimizer_bytes, r.gradient_bytes, r.temp_bytes, r.peak_bytes, r.collective_bytes
    return [way, *(f"{size / 1e6:.1f} MB" for size in sizes), str(sum(c.runs or 1 for c in r.collectives))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS, metavar="N", help=f"default: {ROWS}")
    args = parser.parse_args()
    jdp.virtual_cpu_devices(8)
    print(_results.table(COLUMNS, (cells(way, args.rows) for way in WAYS)))


if __name__ == "__main__":
    main()
