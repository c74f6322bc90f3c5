"""What a call costs in Python: dp.apply and a step, beside the compiled function called directly. Run: make bench

The model has nothing to compute, only leaves: numbers that are added up, as many as the table says. So a call is what
Python, JAX's dispatch and the devices' threads take. In one process for each number of virtual devices jdp and the
direct call take turns, in an order that is shuffled every round. A turn is five calls, then a wait until they have run;
figures are medians over the turns, and ratios of medians. With --mixed all contenders take turns, those
that begin with a numpy batch among them, and meet each other's code in the processor's caches.

    direct, apply  jit(shard_map(model)) on placed parameters and a batch that is cut already
    direct, step   the very program that jdp compiled for the step, on the state and the cut batch: a hand-written one
                   would differ in what it computes, too
    direct, nnx    nnx.jit of nnx.value_and_grad and optimizer.update, on a model and an optimizer that are replicated
    jdp            dp.apply(params, batch), step(state, batch), and step(batch) of an NNX model; the batch is from
                   dp.prefetch
    thread         the time that the calling thread itself computes, until the last call returns: the host's share
    from numpy     the ratio where both begin with a numpy batch, which the compiled functions' in_shardings cut
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import _results


class Task:
    """What all contenders have, on all devices."""

    def __init__(self, leaves: int) -> None:
        import jax
        import numpy as np
        import optax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        import jdp

        self.mesh = Mesh(np.array(jax.devices()), ("data",))
        self.cut = NamedSharding(self.mesh, PartitionSpec("data"))
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        weights = {f"w{i:04}": np.float32(1 / leaves) for i in range(leaves)}
        self.variables = jax.device_put({"params": weights}, self.whole)
        self.batch = np.arange(2 * self.mesh.size, dtype=np.float32)
        self.dp = jdp.DataParallel(self.model)
        (self.scattered,) = self.dp.prefetch([self.batch])
        # One for each run of states: a step looks closely at a state that is not the one it gave last.
        self.step, self.step_of_numpy = (self.dp.train_step(self.loss_fn, optax.sgd(1e-6)) for _ in range(2))

    def model(self, variables: Any, x: Any) -> Any:
        return x * sum(variables["params"].values())

    def loss_fn(self, variables: Any, x: Any) -> Any:
        return ((self.model(variables, x) - 1) ** 2).mean()

    def of_nnx(self) -> Any:
        """The same model, as an NNX module."""
        from flax import nnx

        class Leaves(nnx.Module):
            def __init__(self, weights: Any) -> None:
                self.weights = nnx.List(map(nnx.Param, weights))

            def __call__(self, x: Any) -> Any:
                return x * sum(weight[...] for weight in self.weights)

        return Leaves(self.variables["params"].values())

    def loss_of_nnx(self, model: Any, x: Any) -> Any:
        return ((model(x) - 1) ** 2).mean()

    def stepped(self, step: Callable[[Any], Any]) -> Callable[[], Any]:
        """Calls with a state of their own, which goes round."""
        state = self.step.init(self.variables)

        def call() -> Any:
            nonlocal state
            state, metrics = step(state)
            return metrics["loss"]

        return call


def by_jdp(task: Task) -> dict[str, Callable[[], Any]]:
    """One call of each."""
    import optax

    import jdp

    of_nnx = jdp.DataParallel(task.of_nnx()).train_step(task.loss_of_nnx, optax.sgd(1e-6))
    return {
        "nnx": lambda: of_nnx(task.scattered)["loss"],
        "apply": lambda: task.dp.apply(task.variables, task.scattered),
        "apply numpy": lambda: task.dp.apply(task.variables, task.batch),
        "step": task.stepped(lambda state: task.step(state, task.scattered)),
        "step numpy": task.stepped(lambda state: task.step_of_numpy(state, task.batch)),
    }


def direct(task: Task) -> dict[str, Callable[[], Any]]:
    import jax
    import optax
    from flax import nnx
    from jax.sharding import PartitionSpec

    specs = (PartitionSpec(), PartitionSpec("data"))
    mapped = jax.shard_map(task.model, mesh=task.mesh, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=False)
    by_hand = jax.jit(mapped, in_shardings=(task.whole, task.cut))
    placed = jax.device_put(task.batch, task.cut)
    program = task.step._program.jitted(task.step.init(task.variables), task.scattered._layout)
    model = task.of_nnx()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-6), wrt=nnx.Param)
    for part in model, optimizer:
        nnx.update(part, jax.device_put(nnx.state(part), task.whole))

    @nnx.jit
    def step_of_nnx(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(task.loss_of_nnx)(model, x)
        optimizer.update(model, grads)
        return loss

    return {
        "nnx direct": lambda: step_of_nnx(model, optimizer, placed),
        "apply direct": lambda: by_hand(task.variables, placed),
        "apply numpy direct": lambda: by_hand(task.variables, task.batch),
        "step direct": task.stepped(lambda state: program(state, (placed,))[:2]),
        "step numpy direct": task.stepped(lambda state: program(state, (task.batch,))[:2]),
    }


def measure(leaves: int, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a call, and of the calling thread alone, for each contender."""
    import jax
    import numpy as np

    task = Task(leaves)
    calls = by_jdp(task) | direct(task)
    found = {name: jax.device_get(call()) for name, call in calls.items()}
    for name, value in found.items():
        np.testing.assert_allclose(value, found[f"{name.split()[0]} direct"], rtol=1e-5, err_msg=name)
    kinds = ("apply", "apply numpy", "step", "step numpy", "nnx")
    races = [list(calls)] if args.mixed else [[kind, f"{kind} direct"] for kind in kinds]
    medians, rounds = {}, 0
    for names in races:
        rounds = race({name: calls[name] for name in names}, args.seconds / len(races), args.calls, medians)
    return {"leaves": leaves, "rounds": rounds, "medians": medians}


def race(calls: dict[str, Callable[[], Any]], seconds: float, turn: int, medians: dict[str, Any]) -> int:
    """Lets them take turns; returns how many there were."""
    import jax

    wall: dict[str, list[float]] = {name: [] for name in calls}
    thread: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0)
    end = time.perf_counter() + seconds
    out, rounds = None, -2  # the first two rounds warm up
    while rounds < 5 or time.perf_counter() < end:
        shuffle.shuffle(order)
        for name in order:
            call, start, computed = calls[name], time.perf_counter(), time.thread_time()
            for _ in range(turn):
                out = call()
            computed = time.thread_time() - computed
            jax.block_until_ready(out)
            if rounds >= 0:
                wall[name].append((time.perf_counter() - start) / turn * 1e6)
                thread[name].append(computed / turn * 1e6)
        rounds += 1
    medians |= {name: (statistics.median(wall[name]), statistics.median(thread[name])) for name in calls}
    return rounds


COLUMNS = (
    "call",
    "leaves x devices",
    "direct",
    "jdp",
    "jdp / direct",
    "thread direct",
    "thread jdp",
    "jdp / direct",
    "from numpy",
    "rounds",
)


def cells(devices: int, row: dict[str, Any]) -> list[list[str]]:
    lines = []
    for call in ("apply", "step", "nnx"):
        (jdp, thread), (direct, alone) = row["medians"][call], row["medians"][f"{call} direct"]
        from_numpy = "-"
        if f"{call} numpy" in row["medians"]:
            from_numpy = f"{row['medians'][f'{call} numpy'][0] / row['medians'][f'{call} numpy direct'][0]:.3f}"
        line = [call, f"{row['leaves']} x {devices}", f"{direct:.0f} us", f"{jdp:.0f} us", f"{jdp / direct:.3f}"]
        line += [f"{alone:.0f} us", f"{thread:.0f} us", f"{thread / alone:.3f}", from_numpy]
        lines.append([*line, str(row["rounds"])])
    return lines


def write(rows: list[list[str]], seconds: float, turn: int) -> None:
    _results.write(
        "host_cost",
        "dp.apply and dp.train_step against the compiled function called directly",
        f"{_results.versions()}, virtual CPU devices. Ratios of medians of turns of {turn} calls, {seconds:.0f} s for "
        "each number of leaves and devices.",
        _results.table(COLUMNS, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--one", type=int, metavar="DEVICES", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=16, help="for each number of leaves and devices (16)")
    parser.add_argument("--calls", type=int, default=5, help="in a turn (5)")
    parser.add_argument("--mixed", action="store_true", help="all contenders take turns, not jdp and direct alone")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8, 64], help="numbers of them (1 8 64)")
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 100, 1000], help="numbers of them (10 100 1000)")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md")
    args = parser.parse_args()
    if args.one:  # a process of its own: the number of virtual devices is fixed once JAX has started
        import jdp

        jdp.virtual_cpu_devices(args.one)
        for leaves in args.leaves:
            print(json.dumps(measure(leaves, args)), flush=True)
        return
    rows = []
    for devices in args.devices:
        for leaves in args.leaves:
            command = [sys.executable, __file__, "--one", str(devices), "--leaves", str(leaves)]
            command += ["--seconds", str(args.seconds), "--calls", str(args.calls)]
            command += ["--mixed"] * args.mixed
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            for line in cells(devices, json.loads(out)):
                rows.append(line)
                print(" | ".join(line), flush=True)
    if args.write:
        write(rows, args.seconds, args.calls)


if __name__ == "__main__":
    main()
