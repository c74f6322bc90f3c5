"""The Transformer of shard.py in torch, its blocks fully sharded (FSDP2) over processes on the CPU, one thread each.

`Fsdp2` starts the processes; a turn is one step of all of them, from the batch in numpy to the loss.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np


def train(rank: int, ranks: int, port: int, pipe: Any) -> None:
    """A process of the job: gets the model, then a batch at a time, its own rows; sends the loss of those."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F

    class Norm(nn.Module):
        def __init__(self, scale: np.ndarray) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(scale))

        def forward(self, x: Any) -> Any:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale

    class Product(nn.Module):
        def __init__(self, matrix: np.ndarray) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.tensor(matrix))

        def forward(self, x: Any) -> Any:
            return x @ self.matrix

    class Block(nn.Module):
        def __init__(self, p: dict[str, np.ndarray], heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = Norm(p["norm1"]), Norm(p["norm2"])
            self.qkv, self.mix, self.up, self.down = (Product(p[name]) for name in ("qkv", "mix", "up", "down"))

        def forward(self, x: Any) -> Any:
            parts = self.qkv(self.norm1(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
            x = x + self.mix(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    params, heads = pipe.recv()
    letters = nn.Embedding.from_pretrained(torch.tensor(params["letters"]), freeze=False)
    blocks = [Block(p, heads) for p in params["blocks"]]
    model = nn.Sequential(letters, *blocks, Product(params["head"]))
    mesh = init_device_mesh("cpu", (ranks,))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    pipe.send("ready")
    while (rows := pipe.recv()) is not None:
        tokens = torch.from_numpy(rows).long()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pipe.send(loss.item())
    dist.destroy_process_group()


class Fsdp2:
    """`ranks` processes that train one model; they wait, and take no time, between their turns."""

    def __init__(self, params: Any, heads: int, ranks: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(ranks)]
        self.pipes = [mine for mine, _ in ends]
        self.processes = [
            context.Process(target=train, args=(rank, ranks, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        self._all((params, heads) for _ in self.pipes)

    def _all(self, messages: Any) -> list[Any]:
        for pipe, message in zip(self.pipes, messages, strict=True):
            pipe.send(message)
        return [pipe.recv() for pipe in self.pipes]

    def turn(self, batch: np.ndarray) -> float:
        return float(np.mean(self._all(np.split(batch, len(self.pipes)))))

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(30)


@contextlib.contextmanager
def fsdp2(params: Any, heads: int, ranks: int) -> Iterator[Fsdp2]:
    job = Fsdp2(params, heads, ranks)
    try:
        yield job
    finally:
        job.close()
