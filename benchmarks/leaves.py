"""What many parameters cost before the first step and in each one after it, beside a hand-written jit. Run: make bench

The parameters are matrices of (8, 4), as many as the table says, and the loss the mean of x @ each of them; Adam. Both
begin with parameters in numpy's memory, on the host. One process for each row: within it, each contender starts anew
several times, after jax.clear_caches(), and after a garbage collection, because a collection of everything takes 90 ms
and would fall on either. Each is made first as often as the other, because the known steps of the hand-written one are
faster if it was made first. Figures are medians, and ratios of medians.

    by hand        device_put of the parameters and the optimizer's state, replicated; a jit of value_and_grad and of
                   the update, which donates them; the batch cut by its in_shardings
    start          jdp's step.init and first step, until its loss is there, beside the same of by hand
    init           step.init alone
    known          a step that has run before, from a batch in numpy to its loss
    call           dp.value_and_grad of parameters that are replicated, beside a jit of jax.value_and_grad
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import _results

TARGETS = {"start": 1.15, "known": 1.12, "call": 1.12}
COLUMNS = ("leaves", "devices", "by hand", "start", "init", "known step by hand", "known", "call")


class Task:
    """What both have, on all devices."""

    def __init__(self, leaves: int) -> None:
        import jax
        import numpy as np
        import optax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        import jdp

        mesh = Mesh(np.array(jax.devices()), ("data",))
        self.whole, self.cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
        rng = np.random.default_rng(0)
        self.params = {f"w{i:04}": rng.normal(size=(8, 4)).astype(np.float32) for i in range(leaves)}
        self.batch = rng.normal(size=(2 * mesh.size, 8)).astype(np.float32)
        self.tx, self.dp = optax.adam(1e-3), jdp.DataParallel(self.model)

    def model(self, variables: Any, x: Any) -> Any:
        return sum(x @ w for w in variables["params"].values())

    def loss(self, variables: Any, x: Any) -> Any:
        return (self.model(variables, x) ** 2).mean()

    def by_hand(self) -> Callable[[], Any]:
        import jax
        import optax

        @functools.partial(jax.jit, in_shardings=(self.whole, self.cut), out_shardings=self.whole, donate_argnums=0)
        def step(state: Any, x: Any) -> Any:
            variables, opt_state = state
            loss, grads = jax.value_and_grad(self.loss)(variables, x)
            updates, opt_state = self.tx.update(grads, opt_state, variables)
            return (optax.apply_updates(variables, updates), opt_state), loss

        variables = {"params": self.params}
        state = jax.device_put((variables, self.tx.init(variables)), self.whole)

        def call() -> Any:
            nonlocal state
            state, loss = step(state, self.batch)
            return loss

        return call

    def by_jdp(self) -> Callable[[], Any]:
        step = self.dp.train_step(self.loss, self.tx)
        state = step.init({"params": self.params})

        def call() -> Any:
            nonlocal state
            state, metrics = step(state, self.batch)
            return metrics["loss"]

        return call

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Of the gradient alone, with parameters that are on all devices."""
        import jax

        variables = jax.device_put({"params": self.params}, self.whole)
        by_hand = jax.jit(jax.value_and_grad(self.loss), in_shardings=(self.whole, self.cut), out_shardings=self.whole)
        by_jdp = self.dp.value_and_grad(self.loss)
        return {"by hand": lambda: by_hand(variables, self.batch), "jdp": lambda: by_jdp(variables, self.batch)}


def seconds(call: Callable[[], Any]) -> float:
    import jax

    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: 1 - 2 * (i % 2)]:  # neither always comes first
            times[name].append(seconds(calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def one(leaves: int, n: int, starts: int) -> dict[str, float]:
    import jax

    import jdp

    jdp.virtual_cpu_devices(n)
    begun: dict[str, list[float]] = {"by hand": [], "jdp": [], "init": []}
    known: dict[str, list[float]] = {"by hand": [], "jdp": []}
    for i in range(-1, starts):
        jax.clear_caches()
        task, made = Task(leaves), {}
        for name, make in [("by hand", task.by_hand), ("jdp", task.by_jdp)][:: 1 - 2 * (i % 2)]:
            gc.collect()
            start = time.perf_counter()
            made[name] = make()
            init = time.perf_counter() - start
            made[name]().block_until_ready()
            if i >= 0:  # the first loads what JAX needs once
                begun[name].append(time.perf_counter() - start)
                begun["init"] += [init] * (name == "jdp")
        if i >= 0:
            for name, value in in_turn(made, 40).items():
                known[name].append(value)
    calls = task.calls()
    in_turn(calls, 2)  # compiled
    call = in_turn(calls, 40)
    found = {name: statistics.median(values) for name, values in begun.items()}
    steps = {name: statistics.median(values) for name, values in known.items()}
    return {
        "by hand": found["by hand"],
        "start": found["jdp"] / found["by hand"],
        "init": found["init"],
        "step": steps["by hand"],
        "known": steps["jdp"] / steps["by hand"],
        "call": call["jdp"] / call["by hand"],
    }


def cells(leaves: int, n: int, row: dict[str, float]) -> list[str]:
    def aimed(name: str) -> str:
        return f"{row[name]:.2f} {'<=' if round(row[name], 2) <= TARGETS[name] else '>'} {TARGETS[name]:.2f}"

    own = f"{row['by hand']:.2f} s", aimed("start"), f"{row['init']:.2f} s"
    return [f"{leaves:,}", str(n), *own, f"{1e3 * row['step']:.2f} ms", aimed("known"), aimed("call")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--leaves", type=int, nargs="*", default=[100, 400, 1500])
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--starts", type=int, default=4, help="of each contender in a process, an even number")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md beside this file")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(one(*args.one, args.starts)))
    rows = []
    for leaves in args.leaves:
        for n in args.devices:
            command = [sys.executable, __file__, "--one", str(leaves), str(n), "--starts", str(args.starts)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(cells(leaves, n, json.loads(out.splitlines()[-1])))
            print(_results.table(COLUMNS, rows[-1:]).splitlines()[-1], flush=True)
    if args.write:
        starts = f"Medians of {args.starts} starts" if args.starts > 1 else "One start of each"
        about = f"{_results.versions()}, virtual CPU devices. {starts}; `>`: a target is missed."
        _results.write("leaves", "Many parameters: the start and each step", about, _results.table(COLUMNS, rows))


if __name__ == "__main__":
    main()
