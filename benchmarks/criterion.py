"""What a loss of all rows, dp.train_step(forward, tx, criterion=...), costs beside others. Run: make bench

One process for each row of a table; in it the contenders take turns, in an order that is shuffled every round. A turn
is one step, from the batch in numpy to the loss and the new parameters. A figure is the median of the rounds' ratios,
its standard error after `±`, and in brackets the same of the processor's time, of all threads, which tells more than
the clock on the wall where other programs run. All train with one Adam, donate their state, and must give the same
losses before anything is timed.

A mean: the MLP of train.py; a ViT of 4 blocks of width 64, which sees 16 patches; a ResNet of 6 blocks of 16 to 64
features, with GroupNorm: a BatchNorm would see other rows in each contender. Both have 64 pictures of 16 x 16.

    chunk          dp.train_step(loss_fn, tx), whose loss_fn returns the same mean, of the chunk
    jit            jit of value_and_grad and the update, parameters replicated, the batch cut by its NamedSharding
    uneven / even  the same batch and a row fewer, with the same largest chunk, both with criterion=

A contrastive loss, SimCLR's: 256 rows of two views on 8 devices, embeddings of 64. The encoder is 8 layers of 64, which
run on each of the 32 places of a view, and the mean over the places: activations are most of a step's memory, on a
device 32 times the parameters.

    by hand        jit(shard_map(step)), which gathers the embeddings by all_gather, compares its own rows with all of
                   them, and sums the gradients once
    jit            as above
    gathered       by hand, but that each device compares all rows with all, as a plain criterion does
    memory         XLA's temporaries of the step with accumulate_steps=8, as a part of those without

This row differs by a few percent from process to process, so it is the middle one of three processes.

A first step: that of the ViT and that of train.py's Transformer on 8 devices, traced, lowered, compiled and run after
jax.clear_caches(), beside one that does not look whether the bare scalar is a mean (jdp._jax.row_traces.trace returns
None), in turn. And the part of the former's time on the wall that is spent in looking, which is far less noisy; the
target is for it, too. The ViT asks for its number of rows (`len(images)`), so it is traced for two numbers; the
Transformer does not, and is traced once.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _results
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from train import Loop, Placed, Task, faster_feed, loss_with, make_task, step_by_hand

import jdp
from jdp._jax import row_traces

MODELS = ("MLP", "ViT", "ResNet")
FIRST_STEPS = ("ViT", "Transformer")
MICROBATCHES = 8
ROWS, PLACES, FEATURES, WIDTH, LAYERS, EMBEDDING = 256, 32, 32, 64, 8, 64  # of the contrastive step
TARGETS = {"chunk": 1.05, "jit": 1.05, "uneven": 1.15, "by hand": 1.05, "memory": 0.25, "unseen": 1.05, "part": 1.05}


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(64, (4, 4), (4, 4))(images).reshape(len(images), -1, 64)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(4):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3))(x)
        for features, stride in (16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1):
            y = nn.relu(nn.GroupNorm(8)(nn.Conv(features, (3, 3), (stride, stride), use_bias=False)(x)))
            y = nn.GroupNorm(8)(nn.Conv(features, (3, 3), use_bias=False)(y))
            x = x if x.shape == y.shape else nn.Conv(features, (1, 1), (stride, stride), use_bias=False)(x)
            x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = nn.gelu(nn.Dense(WIDTH)(x))
        return nn.Dense(EMBEDDING)(x.mean(1))


def task_of(name: str, n: int) -> Task:
    if name in ("MLP", "Transformer"):
        return make_task(name, n)
    rng, model = np.random.default_rng(0), ViT() if name == "ViT" else ResNet()
    x = rng.normal(size=(64, 16, 16, 3)).astype(np.float32)
    return task(model, {"x": x, "y": rng.integers(10, size=64).astype(np.int32)}, n)


def task(model: nn.Module, batch: dict[str, np.ndarray], n: int) -> Task:
    variables = jax.device_get(jax.jit(model.init)(jax.random.key(0), batch["x"][:1]))
    return Task(model, variables, batch, optax.adam(1e-3), jax.devices()[:n])


def mean(logits: jax.Array, batch: dict[str, Any]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def simclr(embedded: tuple[jax.Array, jax.Array], _: Any = None) -> jax.Array:
    """The loss of all pairs: Chen et al., A Simple Framework for Contrastive Learning (2020)."""
    return of_rows(embedded, embedded, 0) / (2 * len(embedded[0]))


def of_rows(mine: tuple[jax.Array, jax.Array], everyone: tuple[jax.Array, jax.Array], start: Any) -> jax.Array:
    """The sum of the losses of some rows, the first of which is `start`, among all."""
    a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in mine)
    others = jnp.concatenate([z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in everyone])
    rows, total = start + jnp.arange(len(a)), len(everyone[0])
    own = jnp.concatenate([rows, rows + total])
    scores = jnp.concatenate([a, b]) @ others.T / 0.1
    scores = jnp.where(own[:, None] == jnp.arange(2 * total), -1e9, scores)
    return optax.softmax_cross_entropy_with_integer_labels(scores, (own + total) % (2 * total)).sum()


def jdp_loop(task: Task, loss_fn: Any, batch: Any, **options: Any) -> Loop:
    step = jdp.DataParallel(task.model, task.devices).train_step(loss_fn, task.tx, **options)
    return Loop(step, step.init(task.variables), lambda: batch)


def loop_by_hand(task: Task, at: Placed, step: Any) -> Loop:
    # Copied: device_put may alias, and donation would take it from the other contenders.
    state = jax.tree.map(np.array, (task.variables, task.tx.init(task.variables)))
    compiled = at.jit(step, out_shardings=at.whole, donate_argnums=0)
    return Loop(compiled, jax.device_put(state, at.whole), *at.feeds(task.batch))


def same_losses(loops: dict[str, Loop], like: str, steps: int = 4) -> None:
    """Runs each for some steps, which compiles it too. The uneven one has another batch, but for one row the same."""
    losses = {name: [float(loop()["loss"]) for _ in range(steps)] for name, loop in loops.items()}
    for name, found in losses.items():
        tolerance = 0.1 if name == "uneven" else 1e-4
        np.testing.assert_allclose(found, losses[like], rtol=tolerance, err_msg=name)


Times = dict[str, np.ndarray]
"""The seconds of each contender, of both clocks: `(rounds, 2)`."""


def clocks(calls: dict[str, Callable[[], Any]], seconds: float) -> Times:
    """The seconds of each call, on the wall and of the processor, in five rounds or more."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names, shuffle, end = list(calls), random.Random(0).shuffle, time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[names[0]]) < 5:
        shuffle(names)
        for name in names:
            wall, processor = time.perf_counter(), time.process_time()
            calls[name]()
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return {name: np.array(values) for name, values in times.items()}


def ratio(times: Times, one: str, other: str) -> list[float]:
    """The median of the rounds' ratios, its standard error if the noise is normal, and the processor's median."""
    wall, processor = (times[one] / times[other]).T
    upper, lower = np.percentile(wall, (75, 25))
    return [float(np.median(wall)), float(0.93 * (upper - lower) / len(wall) ** 0.5), float(np.median(processor))]


def timed(loops: dict[str, Loop], seconds: float) -> Times:
    feeds = {name: faster_feed(loop, 0.05 * seconds) for name, loop in loops.items() if len(loop.feeds) > 1}
    calls = {name: partial(loop, feeds.get(name, 0)) for name, loop in loops.items()}
    clocks(calls, 0.1 * seconds)  # warm
    return clocks(calls, 0.8 * seconds)


def of_mean(name: str, n: int, seconds: float) -> dict[str, Any]:
    task = task_of(name, n)
    apply, rows = task.model.apply, len(task.batch["y"])

    def forward(variables: Any, batch: Any) -> Any:
        return apply(variables, batch["x"])

    loops = {
        "criterion": jdp_loop(task, forward, task.batch, criterion=mean),
        "chunk": jdp_loop(task, loss_with(apply), task.batch),
        "jit": loop_by_hand(task, Placed(task.devices), step_by_hand(task)),
    }
    if n > 1:
        sizes = jdp.chunk_sizes(rows - 1, n)
        assert len({*sizes}) == 2 and max(sizes) == rows // n
        loops["uneven"] = jdp_loop(task, forward, {k: x[:-1] for k, x in task.batch.items()}, criterion=mean)
    same_losses(loops, "chunk")
    times = timed(loops, seconds)
    return {
        "ms": float(np.median(times["chunk"][:, 0]) * 1e3),
        "chunk": ratio(times, "criterion", "chunk"),
        "jit": ratio(times, "criterion", "jit"),
        "uneven": ratio(times, "uneven", "criterion") if n > 1 else None,
        "rounds": len(times["chunk"]),
    }


def encoded(model: nn.Module, variables: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return model.apply(variables, batch["x"]), model.apply(variables, batch["y"])  # type: ignore[return-value]


def contrastive(n: int) -> tuple[Task, dict[str, Loop]]:
    rng = np.random.default_rng(0)
    views = {name: rng.normal(size=(ROWS, PLACES, FEATURES)).astype(np.float32) for name in ("x", "y")}
    found = task(Encoder(), views, n)
    at, forward = Placed(found.devices), partial(encoded, found.model)

    def updated(state: Any, loss: jax.Array, grads: Any) -> Any:
        updates, opt_state = found.tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), {"loss": loss}

    def auto(state: Any, batch: Any) -> Any:
        return updated(state, *jax.value_and_grad(lambda v: simclr(forward(v, batch)))(state[0]))

    def by_hand(state: Any, batch: Any, whole: bool = False) -> Any:
        def loss_of(variables: Any) -> jax.Array:
            mine = forward(variables, batch)
            everyone = lax.all_gather(mine, "data", tiled=True)
            if whole:
                return simclr(everyone) / n
            return of_rows(mine, everyone, lax.axis_index("data") * (ROWS // n)) / (2 * ROWS)

        return updated(state, *lax.psum(jax.value_and_grad(loss_of)(state[0]), "data"))

    def mapped(step: Any) -> Any:
        return at.shard_map(step, (P(), P("data")), P())

    return found, {
        "criterion": jdp_loop(found, forward, views, criterion=simclr),
        "by hand": loop_by_hand(found, at, mapped(by_hand)),
        "gathered": loop_by_hand(found, at, mapped(partial(by_hand, whole=True))),
        "jit": loop_by_hand(found, at, auto),
        "accumulate": jdp_loop(found, forward, views, criterion=simclr, accumulate_steps=MICROBATCHES),
    }


def temporaries(loop: Loop) -> int:
    """Bytes of a device, beside the arguments and the results."""
    return loop.step.lower(loop.state, loop.feeds[0]()).compile().memory_analysis().temp_size_in_bytes


def of_contrastive(n: int, seconds: float) -> dict[str, Any]:
    _, loops = contrastive(n)
    used = {name: temporaries(loop) / 2**20 for name, loop in loops.items()}
    same_losses(loops, "by hand")
    times = timed(loops, seconds)
    return {
        "ms": float(np.median(times["by hand"][:, 0]) * 1e3),
        "by hand": ratio(times, "criterion", "by hand"),
        "gathered": ratio(times, "criterion", "gathered"),
        "jit": ratio(times, "criterion", "jit"),
        "accumulate": ratio(times, "accumulate", "criterion"),
        "memory": used,
        "rounds": len(times["by hand"]),
    }


class Looks:
    """The test of bare scalars, or none in its place; `seconds` were spent in it."""

    trace, faults = staticmethod(row_traces.trace), row_traces.Traced.faults

    def __init__(self) -> None:
        self.seconds = 0.0
        row_traces.Traced.faults = lambda *args: self.clocked(Looks.faults, *args)  # type: ignore[method-assign]

    def clocked(self, fn: Callable[..., Any], *args: Any) -> Any:
        begun = time.perf_counter()
        found = fn(*args)
        self.seconds += time.perf_counter() - begun
        return found

    def switch(self, on: bool) -> None:
        self.seconds = 0.0
        row_traces.trace = partial(self.clocked, Looks.trace) if on else lambda *_: None


def of_first_step(name: str, n: int, seconds: float) -> dict[str, Any]:
    found, looks = task_of(name, n), Looks()

    def fresh(on: bool) -> tuple[float, float, float]:
        jax.clear_caches()
        loop = jdp_loop(found, loss_with(found.model.apply), found.batch)
        looks.switch(on)
        wall, processor = time.perf_counter(), time.process_time()
        loop()
        return time.perf_counter() - wall, time.process_time() - processor, looks.seconds

    taken: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    fresh(True)  # what JAX itself needs once
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[True]) < 3:
        for on in random.Random(len(taken[True])).sample((True, False), 2):
            taken[on].append(fresh(on))
    seen, unseen = np.array(taken[True]), np.array(taken[False])
    times = {"seen": seen[:, :2], "unseen": unseen[:, :2]}
    return {
        "ms": float(np.median(unseen[:, 0]) * 1e3),
        "looks ms": float(np.median(seen[:, 2]) * 1e3),
        "unseen": ratio(times, "seen", "unseen"),
        "part": 1 + float(np.median(seen[:, 2] / (seen[:, 0] - seen[:, 2]))),
        "rounds": len(seen),
    }


def aimed(value: float, words: str, name: str) -> str:
    target = TARGETS.get(name)
    return words if target is None else f"{words} {'<=' if round(value, 2) <= target else '>'} {target:.2f}"


def against(row: dict[str, Any], name: str, aims: bool = True) -> str:
    if row[name] is None:
        return "-"
    value, noise, processor = row[name]
    words = f"{value:.2f} ± {noise:.2f} ({processor:.2f})"
    return aimed(value, words, name) if aims else words


MEAN = ("model", "devices", "chunk", "criterion / chunk", "criterion / jit", "uneven / even", "rounds")
CONTRASTIVE = ("devices", "by hand", "criterion / by hand", "/ gathered", "/ jit", "accumulate / criterion", "rounds")
MEMORY = ("devices", "by hand", "gathered", "jit", "criterion", "accumulate_steps=8", "memory")
FIRST = ("model", "devices", "does not look", "looking", "looks / does not look", "from the part", "rounds")


def mean_cells(name: str, n: int, row: dict[str, Any]) -> list[str]:
    ratios = [against(row, x) for x in ("chunk", "jit", "uneven")]
    return [name, str(n), f"{row['ms']:.2f} ms", *ratios, str(row["rounds"])]


def contrastive_cells(n: int, row: dict[str, Any]) -> tuple[list[str], list[str]]:
    hand, gathered, accumulate = (against(row, name) for name in ("by hand", "gathered", "accumulate"))
    jit = against(row, "jit", aims=False)
    used = row["memory"]
    part = used["accumulate"] / used["criterion"]
    memory = [f"{used[name]:.2f} MiB" for name in ("by hand", "gathered", "jit", "criterion", "accumulate")]
    times = [str(n), f"{row['ms']:.1f} ms", hand, gathered, jit, accumulate, str(row["rounds"])]
    return times, [str(n), *memory, aimed(part, f"{part:.2f}", "memory")]


def first_cells(name: str, n: int, row: dict[str, Any]) -> list[str]:
    took, part = [f"{row[x]:.0f} ms" for x in ("ms", "looks ms")], f"{row['part']:.3f}"
    return [name, str(n), *took, against(row, "unseen"), aimed(row["part"], part, "part"), str(row["rounds"])]


def asked(which: str, n: int, seconds: float, here: bool) -> dict[str, Any]:
    """A row, of a process of its own: the number of virtual devices is fixed once JAX has started."""
    command = [sys.executable, __file__, "--one", which, str(n), "--seconds", str(seconds), *["--here"] * here]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def one(which: str, n: int, seconds: float, here: bool) -> dict[str, Any]:
    if not here:
        jdp.virtual_cpu_devices(n)
    elif n > len(jax.devices()):
        sys.exit(f"criterion.py: --here, and there are {len(jax.devices())} devices; pass --devices")
    if which in MODELS:
        return of_mean(which, n, seconds)
    return of_contrastive(n, seconds) if which == "contrastive" else of_first_step(which.partition(" ")[2], n, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    tables = (*MODELS, "contrastive", "first")
    parser.add_argument("--only", nargs="*", choices=tables, default=[*tables], help="models and tables")
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 8], help="for the models; the others have 8")
    parser.add_argument("--seconds", type=float, default=30.0, help="of timing for each row")
    parser.add_argument("--here", action="store_true", help="on the devices that JAX finds; the table is printed alone")
    parser.add_argument("--write", action="store_true", help="write the tables to RESULTS.md beside this file")
    parser.add_argument("--one", nargs=2, metavar=("WHICH", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        found = one(args.one[0], int(args.one[1]), args.seconds, args.here)
        return print(json.dumps(found | {"device": jax.devices()[0].device_kind}))
    parts = []

    def show(columns: tuple[str, ...], rows: list[list[str]]) -> None:
        parts.append(_results.table(columns, rows))
        print(parts[-1], flush=True)

    models = [name for name in MODELS if name in args.only]
    if models:
        show(MEAN, [mean_cells(m, n, asked(m, n, args.seconds, args.here)) for m in models for n in args.devices])
    if "contrastive" in args.only:
        rows = [asked("contrastive", 8, args.seconds, args.here) for _ in range(3)]
        times, memory = contrastive_cells(8, sorted(rows, key=lambda row: row["by hand"])[1])
        show(CONTRASTIVE, [times])
        show(MEMORY, [memory])
    if "first" in args.only:
        show(FIRST, [first_cells(x, 8, asked(f"first {x}", 8, args.seconds, args.here)) for x in FIRST_STEPS])
    if args.write and not args.here:
        _results.write(
            "criterion",
            "criterion= against a mean on the chunk, and against the same by hand",
            f"{_results.versions()}, virtual CPU devices. Medians of the rounds' ratios, their standard errors, and in "
            f"brackets those of the processor's time; {args.seconds:g} s a row; beside its target; `>`: missed.",
            *parts,
        )


if __name__ == "__main__":
    main()
