"""What `deterministic=True` costs: a step with it beside the ordinary one. Run: make bench

In one process for each model, on 8 virtual devices, the two steps take turns; a turn is five steps and a wait until
they have run. Figures are medians over the turns, and ratios of medians. Compiled is what the first step takes.

    MLP            4 layers of 512, 512 rows
    CNN            2 convolutions with BatchNorm, 256 pictures of 28 x 28
    CNN, synced    the same with sync_batch_norm=True
    Transformer    4 blocks of width 128 with dropout, 64 texts of 64 letters
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import _results

MODELS = ("MLP", "CNN", "CNN, synced", "Transformer")


def task(name: str) -> tuple[Any, Any]:
    """The model, and a batch."""
    import flax.linen as nn
    import numpy as np

    rng = np.random.default_rng(0)

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):  # noqa: ANN001, ANN204
            for _ in range(4):
                x = nn.relu(nn.Dense(512)(x))
            return nn.Dense(10)(x)

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):  # noqa: ANN001, ANN204
            for features in (16, 32):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(features, (3, 3))(x)))
                x = nn.avg_pool(x, (2, 2), (2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x):  # noqa: ANN001, ANN204
            x = nn.Embed(64, 128)(x)
            for _ in range(4):
                y = nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
                x = x + nn.Dropout(0.1, deterministic=False)(y)
                y = nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
                x = x + nn.Dropout(0.1, deterministic=False)(y)
            return nn.Dense(10)(x.mean(1))

    if name == "MLP":
        return MLP(), (rng.normal(size=(512, 512)).astype(np.float32), rng.integers(0, 10, 512))
    if name.startswith("CNN"):
        return CNN(), (rng.normal(size=(256, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, 256))
    return Transformer(), (rng.integers(0, 64, (64, 64)), rng.integers(0, 10, 64))


def measure(name: str, n: int, seconds: float) -> dict[str, float]:
    import jdp

    jdp.virtual_cpu_devices(n)
    import jax
    import optax

    model, batch = task(name)
    dp = jdp.DataParallel(model, range(n))

    def loss(v: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        out, updates = model.apply(v, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(out, y), {}, updates

    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch[0][:1])
    options = {"sync_batch_norm": name.endswith("synced")}
    steps = {which: dp.train_step(loss, optax.adamw(1e-3), deterministic=which, **options) for which in (False, True)}
    states, found = {}, {}
    for which, step in steps.items():
        begun = time.perf_counter()
        states[which] = step(step.init(variables, key=jax.random.key(2)), batch)[0]
        jax.block_until_ready(states[which])
        found["compiled" if which else "compiled, ordinary"] = time.perf_counter() - begun
    times: dict[bool, list[float]] = {False: [], True: []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for which in (False, True) if len(times[True]) % 2 else (True, False):
            begun = time.perf_counter()
            for _ in range(5):
                states[which], _ = steps[which](states[which], batch)
            jax.block_until_ready(states[which])
            times[which].append((time.perf_counter() - begun) / 5)
    ordinary, mine = (statistics.median(times[which]) for which in (False, True))
    return found | {"ordinary": ordinary, "deterministic": mine, "ratio": mine / ordinary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.devices, args.seconds)))
        return
    rows = []
    for name in args.models:
        command = [sys.executable, __file__, "--one", name, "--devices", str(args.devices)]
        command += ["--seconds", str(args.seconds)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        steps = [f"{found[x] * 1e3:.1f} ms" for x in ("ordinary", "deterministic")]
        compiled = [f"{found[x]:.1f} s" for x in ("compiled, ordinary", "compiled")]
        rows.append([name, *steps, f"{found['ratio']:.2f}", *compiled])
        print(rows[-1], flush=True)
    columns = ["model", "ordinary step", "deterministic", "ratio", "compiled, ordinary", "compiled, deterministic"]
    table = _results.table(columns, rows)
    print(table)
    if args.write:
        about = f"On {args.devices} virtual devices; {_results.versions()}."
        _results.write("deterministic", "What the same bits cost", about, table)


if __name__ == "__main__":
    main()
