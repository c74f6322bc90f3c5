"""One contender of benchmarks/gpu.py in a process of its own: makes as many steps as it is asked for, on every device.

The batch is on the devices before the clock starts: what is compared is the step. All compute in bfloat16 with float32
parameters. ResNet-50 learns by SGD with momentum, the GPT by AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gpu_sizes import FULL, TINY, ResNetSize, batch_of

RATE, MOMENTUM, DECAY = 1e-3, 0.9, 0.1
Steps = Callable[[int], float]  # so many steps, run to their end: the last one's loss


def loss_of(model: Any) -> Callable[[Any, Any], Any]:
    """`loss_fn(variables, batch)` with metrics and the model's updated state, as dp.train_step takes it."""
    import optax

    def loss_fn(variables: Any, batch: Any) -> Any:
        state = [name for name in variables if name != "params"]
        logits, updates = model.apply(variables, batch["x"], mutable=state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {}, updates

    return loss_fn


def flax_task(size: Any) -> tuple[Any, Any, Any]:
    """The model, its optimizer, and its variables in numpy."""
    import gpu_models
    import jax
    import optax

    image = isinstance(size, ResNetSize)
    model = gpu_models.ResNet(size) if image else gpu_models.GPT(size)
    tx = optax.sgd(RATE, MOMENTUM) if image else optax.adamw(RATE, weight_decay=DECAY)
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch_of(size, 1)["x"])
    rng = np.random.default_rng(0)
    return model, tx, jax.tree_util.tree_map_with_path(partial(initial, rng), shapes)


def initial(rng: np.random.Generator, path: Any, leaf: Any) -> np.ndarray:
    """Drawn by numpy: to compile Flax's own initializers takes longer than to compile the step."""
    name = path[-1].key
    if name in ("kernel", "embedding"):
        scale = 0.02 if name == "embedding" else np.prod(leaf.shape[:-1]) ** -0.5
        return (scale * rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)
    return np.full(leaf.shape, name in ("scale", "var"), leaf.dtype)


def count(tree: Any) -> int:
    import jax

    return sum(x.size for x in jax.tree.leaves(tree["params"]))


def forward_of(model: Any) -> Callable[[Any, Any], Any]:
    """`forward(variables, batch)`, which leaves the loss to a criterion of all rows, as torch's DataParallel does."""

    def forward(variables: Any, batch: Any) -> Any:
        return model.apply(variables, batch["x"], mutable=[name for name in variables if name != "params"])

    return forward


def cross_entropy(logits: Any, batch: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def by_jdp(size: Any, rows: int, platform: str, on_all_rows: bool = False) -> tuple[Steps, dict[str, Any]]:
    import jax

    import jdp

    model, tx, variables = flax_task(size)
    dp = jdp.DataParallel(model)
    if on_all_rows:
        step = dp.train_step(forward_of(model), tx, criterion=cross_entropy)
    else:
        step = dp.train_step(loss_of(model), tx)
    state = step.init(variables)
    batch = next(iter(dp.prefetch([batch_of(size, rows * len(dp.devices))])))

    def steps(many: int) -> float:
        nonlocal state
        metrics = {}
        for _ in range(many):
            state, metrics = step(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return steps, {"parameters": count(variables), "devices": len(dp.devices), "rows": rows * len(dp.devices)}


def by_jit(size: Any, rows: int, platform: str) -> tuple[Steps, dict[str, Any]]:
    """Auto-sharded where there are several devices: BatchNorm then sees the whole batch, not each device's own."""
    import jax
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    model, tx, variables = flax_task(size)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, loss_fn = NamedSharding(mesh, P()), loss_of(model)

    def step(state: Any, batch: Any) -> Any:
        variables, opt_state = state
        rest = {name: tree for name, tree in variables.items() if name != "params"}

        def of_params(params: Any) -> Any:
            loss, _, updates = loss_fn({"params": params, **rest}, batch)
            return loss, updates

        (loss, updates), grads = jax.value_and_grad(of_params, has_aux=True)(variables["params"])
        change, opt_state = tx.update(grads, opt_state, variables["params"])
        return ({"params": optax.apply_updates(variables["params"], change), **updates}, opt_state), loss

    program = jax.jit(step, donate_argnums=0, out_shardings=whole)
    state = jax.device_put((variables, tx.init(variables["params"])), whole)
    batch = jax.device_put(batch_of(size, rows * mesh.size), NamedSharding(mesh, P("data")))

    def steps(many: int) -> float:
        nonlocal state
        loss = 0.0
        for _ in range(many):
            state, loss = program(state, batch)
        jax.block_until_ready(state)
        return float(loss)

    return steps, {"parameters": count(variables), "devices": mesh.size, "rows": rows * mesh.size}


def by_torch(size: Any, rows: int, platform: str) -> tuple[Steps, dict[str, Any]]:
    """torch.nn.DataParallel, eager, with autocast."""
    import torch
    from torch.nn.functional import cross_entropy

    if platform == "gpu" and not torch.cuda.is_available():
        raise ImportError(f"torch {torch.__version__} finds no GPU")
    import gpu_torch

    image, device = isinstance(size, ResNetSize), torch.device("cuda" if platform == "gpu" else "cpu")
    n = torch.cuda.device_count() if platform == "gpu" else 1
    torch.backends.cudnn.benchmark = True
    bare = (gpu_torch.resnet(size) if image else gpu_torch.GPT(size)).to(device)
    model = torch.nn.DataParallel(bare) if platform == "gpu" else torch.nn.DataParallel(bare, [])
    sgd, adamw = partial(torch.optim.SGD, momentum=MOMENTUM), partial(torch.optim.AdamW, weight_decay=DECAY)
    optimizer = (sgd if image else adamw)(bare.parameters(), lr=RATE, fused=True)
    batch = {name: torch.from_numpy(x).to(device) for name, x in batch_of(size, rows * n).items()}
    x, y = batch["x"].permute(0, 3, 1, 2) if image else batch["x"], batch["y"].flatten().long()

    def steps(many: int) -> float:
        loss: Any = None
        for _ in range(many):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(x)
            loss = cross_entropy(logits.float().flatten(0, -2), y)
            loss.backward()
            optimizer.step()
        if platform == "gpu":
            torch.cuda.synchronize()
        return float(loss)

    parameters = sum(p.numel() for p in bare.parameters())
    return steps, {"parameters": parameters, "devices": n, "rows": rows * n}


CONTENDERS = {"jdp": by_jdp, "criterion": partial(by_jdp, on_all_rows=True), "jit": by_jit, "torch": by_torch}


def serve(contender: str, model: str, platform: str, tiny: bool) -> None:
    """A line of JSON for each number of steps on stdin; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    size, rows = (TINY if tiny else FULL)[model]
    try:
        steps, facts = CONTENDERS[contender](size, rows, platform)
    except ImportError as error:
        return print(json.dumps({"missing": str(error)}), file=answers, flush=True)
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        loss = steps(int(line))
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), file=answers, flush=True)
