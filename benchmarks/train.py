"""What a training step of dp.train_step costs beside the same step written by hand. Run: make bench

One process for each model and number of devices; in it the contenders take turns, in an order that is shuffled
every round, so that noise of a shared machine meets all of them. A turn is one step, from the batch in numpy to the
loss and the new parameters; figures are medians, and ratios of medians. All have one loss function and one Adam,
donate their state, and must give the same losses before anything is timed.

    hand-written   jit(shard_map(step)), with in_shardings: lax.pmean of the gradients, and optax, inside
    pmap           flax's recipe: jax_utils.replicate, the batch reshaped to (devices, rows), jax.pmap
    jit            auto-sharded: parameters replicated, the batch cut by its NamedSharding, no shard_map
    accumulate     accumulate_steps=8, against 8 x the gradient of an eighth of the batch, by a jitted shard_map that
                   reduces nothing, + one psum of such gradients (the optimizer's update is in the step alone)
    uneven / even  the same batch and a row fewer, with the same largest chunk, both by dp.train_step
    memory         the step's peak against hand-written's: XLA's arguments + outputs + temporaries - aliases

The fastest of three is, by the luck of the noise, too fast: read "jdp / best" beside the ± of "jdp / hand".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _results
import flax.jax_utils
import flax.linen as nn
import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

MICROBATCHES = 8
TARGETS = {"best": {"MLP": 1.10, "CNN": 1.03, "Transformer": 1.03}, "accumulate": 1.05, "uneven": 1.15, "memory": 1.02}
BY_HAND = ("hand-written", "pmap", "jit")


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    """That of examples/mnist.py, without its dropout: the contenders could not draw the same masks."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images[..., None] / 255
        x = nn.max_pool(nn.relu(nn.Conv(16, (5, 5))(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


class Transformer(nn.Module):
    """A small decoder, which sees the tokens up to each and predicts the next."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(128, 128)(tokens) + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], 128))
        mask = nn.make_causal_mask(tokens)
        for _ in range(4):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, mask=mask)
            y = nn.Dense(512)(nn.LayerNorm()(x))
            x = x + nn.Dense(128)(nn.gelu(y))
        return nn.Dense(128)(nn.LayerNorm()(x))


class Task(NamedTuple):
    """What all contenders are task."""

    model: nn.Module
    variables: Any
    batch: dict[str, np.ndarray]
    tx: optax.GradientTransformation
    devices: list[Any]


def make_task(model_name: str, n: int) -> Task:
    rng = np.random.default_rng(0)
    if model_name == "MLP":  # rows for each device: what is dispatched is to be timed, not computed
        model, x, y = MLP(), rng.normal(size=(16 * n, 128)).astype(np.float32), rng.integers(10, size=16 * n)
    elif model_name == "CNN":
        model, x, y = CNN(), rng.integers(256, size=(128, 28, 28)).astype(np.uint8), rng.integers(10, size=128)
    else:
        model, tokens = Transformer(), rng.integers(128, size=(64, 33))
        x, y = tokens[:, :-1].astype(np.int32), tokens[:, 1:]
    variables = jax.device_get(jax.jit(model.init)(jax.random.key(0), x[:1]))
    return Task(model, variables, {"x": x, "y": y.astype(np.int32)}, optax.adam(1e-3), jax.devices()[:n])


def loss_with(apply: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def loss_fn(variables: Any, batch: dict[str, Any]) -> Any:
        logits = apply(variables, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss_fn


class Loop:
    """A training loop, one step a call: the state is donated, and goes round. `feeds`: ways to give the batch."""

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, *feeds: Callable[[], Any]) -> None:
        self.step, self.state, self.feeds = step, state, feeds

    def __call__(self, feed: int = 0) -> Any:
        self.state, metrics = self.step(self.state, self.feeds[feed]())
        jax.block_until_ready((self.state, metrics))
        return metrics


class Placed:
    """The mesh, and programs whose first argument is whole on every device and whose second is cut."""

    def __init__(self, devices: list[Any]) -> None:
        self.mesh = Mesh(np.array(devices), ("data",))
        self.whole, self.cut = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P("data"))

    def jit(self, fn: Callable[..., Any], **kwargs: Any) -> Any:
        return jax.jit(fn, in_shardings=(self.whole, self.cut), **kwargs)

    def shard_map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def feeds(self, batch: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Two ways to give a batch, of which the faster is taken: as it is, and put in place first."""
        return (lambda: batch), (lambda: jax.device_put(batch, self.cut))


def step_by_hand(task: Task, axis_name: str | None = None) -> Callable[[Any, Any], Any]:
    """For the replicas of `axis_name`; or in global view."""
    loss_fn = loss_with(task.model.apply)

    def step(state: Any, batch: Any) -> Any:
        variables, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(variables, batch)
        if axis_name:
            loss, grads = lax.pmean((loss, grads), axis_name)
        updates, opt_state = task.tx.update(grads, opt_state, variables)
        return (optax.apply_updates(variables, updates), opt_state), {"loss": loss}

    return step


def by_hand(task: Task, at: Placed) -> dict[str, Loop]:
    n, step = len(task.devices), step_by_hand(task, "data")
    sharded = at.jit(at.shard_map(step, (P(), P("data")), P()), donate_argnums=0)
    pmapped = jax.pmap(step, axis_name="data", donate_argnums=0, devices=task.devices)
    global_view = at.jit(step_by_hand(task), out_shardings=at.whole, donate_argnums=0)

    def state() -> Any:  # copied: device_put may alias, and donation would take it from the other contenders
        return jax.tree.map(np.array, (task.variables, task.tx.init(task.variables)))

    def reshaped() -> Any:
        return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), task.batch)

    stacked = flax.jax_utils.replicate(state(), task.devices)
    return {
        "hand-written": Loop(sharded, jax.device_put(state(), at.whole), *at.feeds(task.batch)),
        "pmap": Loop(pmapped, stacked, reshaped, lambda: jax.device_put(reshaped(), at.cut)),
        "jit": Loop(global_view, jax.device_put(state(), at.whole), *at.feeds(task.batch)),
    }


def by_jdp(task: Task) -> dict[str, Loop]:
    rows, n = len(task.batch["y"]), len(task.devices)
    uneven = jax.tree.map(lambda x: x[:-1], task.batch)  # any fewer, and torch's rule may make equal chunks again
    sizes = jdp.chunk_sizes(rows - 1, n)
    assert n == 1 or len({*sizes}) == 2 and max(sizes) == rows // n
    dp = jdp.DataParallel(task.model, task.devices)
    loss_fn = loss_with(dp.apply)

    def loop(batch: Any, accumulate_steps: int = 1) -> Loop:
        # Each its own step, which knows the state that it gave last; two states in turn it would check each time.
        step = dp.train_step(loss_fn, task.tx, accumulate_steps=accumulate_steps)
        return Loop(step, step.init(task.variables), lambda: batch)

    return {"jdp": loop(task.batch), "uneven": loop(uneven), "accumulate": loop(task.batch, MICROBATCHES)}


def pieces(task: Task, at: Placed, feed: int) -> dict[str, Callable[[], Any]]:
    """What accumulation is made of: the gradient of a microbatch, each device's own, and the sum over devices."""
    rows, n = len(task.batch["y"]), len(task.devices)
    assert rows % (MICROBATCHES * n) == 0
    gradients = jax.value_and_grad(loss_with(task.model.apply))

    def stacked(variables: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x[None], gradients(variables, batch))

    microbatch = at.jit(at.shard_map(stacked, (P(), P("data")), P("data")))
    psum = jax.jit(at.shard_map(lambda grads: lax.psum(grads, "data"), P("data"), P()))
    variables = jax.device_put(task.variables, at.whole)
    give = at.feeds(jax.tree.map(lambda x: x[: rows // MICROBATCHES], task.batch))[feed]
    _, grads = microbatch(variables, give())
    calls = {"microbatch": lambda: microbatch(variables, give()), "psum": lambda: psum(grads)}
    return {name: lambda call=call: jax.block_until_ready(call()) for name, call in calls.items()}


def same_losses(loops: dict[str, Loop], steps: int = 4) -> None:
    """Runs each for some steps, which compiles it too. The uneven one has another batch, but for one row the same."""
    losses = {name: [float(np.mean(loop()["loss"])) for _ in range(steps)] for name, loop in loops.items()}
    for name, found in losses.items():
        tolerance = 0.1 if name == "uneven" else 1e-5
        np.testing.assert_allclose(found, losses["hand-written"], rtol=tolerance, err_msg=name)


def clock(calls: dict[Any, Callable[[], Any]], seconds: float) -> dict[Any, np.ndarray]:
    """The seconds of each, in five rounds or more."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    names, shuffle, end = list(calls), random.Random(0).shuffle, time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        shuffle(names)  # nobody always comes after the same neighbour
        for name in names:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in times.items()}


def faster_feed(loop: Loop, seconds: float) -> int:
    took = clock({i: partial(loop, i) for i in range(len(loop.feeds))}, seconds)
    return min(took, key=lambda i: np.median(took[i]))


def peak(loop: Loop) -> int:
    """Bytes that the compiled step needs on one device."""
    memory = loop.step.lower(loop.state, loop.feeds[0]()).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return used - memory.alias_size_in_bytes


def measure(model_name: str, n: int, seconds: float) -> dict[str, Any]:
    task = make_task(model_name, n)
    at = Placed(task.devices)
    loops = by_hand(task, at) | by_jdp(task)
    same_losses(loops)
    feeds = {name: faster_feed(loops[name], 0.05 * seconds) for name in BY_HAND}
    calls = {name: partial(loop, feeds.get(name, 0)) for name, loop in loops.items() if n > 1 or name != "uneven"}
    calls |= pieces(task, at, feeds["hand-written"])
    clock(calls, 0.1 * seconds)  # warm
    times = clock(calls, 0.75 * seconds)
    took = {name: float(np.median(values)) for name, values in times.items()}
    best = min(BY_HAND, key=lambda name: took[name])
    upper, lower = np.percentile(times["jdp"] / times["hand-written"], (75, 25))  # of pairs, each in one round
    rounds = len(times["jdp"])
    return {
        "best": took["jdp"] / took[best],
        "which": best,
        "jdp/hand": took["jdp"] / took["hand-written"],
        "noise": 0.93 * (upper - lower) / rounds**0.5,  # a median's standard error, if the noise is normal
        "accumulate": took["accumulate"] / (MICROBATCHES * took["microbatch"] + took["psum"]),
        "uneven": took["uneven"] / took["jdp"] if n > 1 else None,
        "memory": peak(loops["jdp"]) / peak(loops["hand-written"]),
        "rounds": rounds,
        "took": took,
        "feeds": feeds,
    }


def rss(steps: int) -> None:
    """A plain loop, which waits for nothing: its memory is not to grow.

    The heap settles by some 8 MiB, of the hand-written step too; a leak of 1 KiB a step would be 18 more.
    """
    task, mib = make_task("MLP", 8), []
    dp = jdp.DataParallel(task.model, task.devices)
    step = dp.train_step(loss_with(dp.apply), task.tx)
    state = step.init(task.variables)
    for i in range(1, steps + 1):
        state, _ = step(state, task.batch)
        if i in (steps // 10, steps):
            jax.block_until_ready(state)
            mib.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
            print(f"step {i}: RSS {mib[-1]:.1f} MiB")
    print(f"growth {mib[1] - mib[0]:+.1f} MiB (target: about none; 8 is the heap, settling)")


def cells(model_name: str, n: int, row: dict[str, Any]) -> list[str]:
    def ratio(name: str) -> str:
        value, target = row[name], TARGETS[name][model_name] if name == "best" else TARGETS[name]
        return "-" if value is None else f"{value:.2f} {'<=' if round(value, 2) <= target else '>'} {target:.2f}"

    others = map(ratio, ("accumulate", "uneven", "memory"))
    hand, to_hand = f"{row['took']['hand-written'] * 1e3:.2f} ms", f"{row['jdp/hand']:.2f} ± {row['noise']:.2f}"
    return [model_name, str(n), hand, f"{ratio('best')} {row['which']}", to_hand, *others, str(row["rounds"])]


def write(columns: tuple[str, ...], rows: list[list[str]], seconds: float) -> None:
    _results.write(
        "train",
        "dp.train_step against the same by hand",
        f"{_results.versions()}, virtual CPU devices. Ratios of medians, {seconds:g} s a row, each beside its target; "
        "`>`: missed.",
        _results.table(columns, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=[*TARGETS["best"]], default=[*TARGETS["best"]])
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--seconds", type=float, default=30.0, help="of timing for each row")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md beside this file")
    parser.add_argument("--rss", action="store_true", help="only train the MLP on 8 devices, and print memory")
    parser.add_argument("--steps", type=int, default=20_000, help="of --rss")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rss:
        jdp.virtual_cpu_devices(8)
        return rss(args.steps)
    if args.one:  # a process of its own: the number of virtual devices is fixed once JAX has started
        model_name, n = args.one
        jdp.virtual_cpu_devices(int(n))
        return print(json.dumps(measure(model_name, int(n), args.seconds)))
    from rich.console import Console
    from rich.table import Table

    ratios = "jdp / best", "jdp / hand", "accumulate", "uneven / even", "memory"
    columns = "model", "devices", "hand-written", *ratios, "rounds"
    table = Table(title="dp.train_step, ratios of medians beside their targets (1.00 is the same speed)")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    rows = []
    for model_name in args.models:
        for n in args.devices:
            command = [sys.executable, __file__, "--one", model_name, str(n), "--seconds", str(args.seconds)]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            rows.append(cells(model_name, n, row))
            table.add_row(*rows[-1])
    Console(width=140).print(table)
    if args.write:
        write(columns, rows, args.seconds)


if __name__ == "__main__":
    main()
