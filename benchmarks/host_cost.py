"""What a call costs in Python: dp.apply and a step, beside the compiled function called directly. Run: make bench

The model has nothing to compute, only leaves: numbers that are added up, as many as the table says. So a call is what
Python, JAX's dispatch and the devices' threads take. In one process for each number of virtual devices jdp and the
direct call take turns, in an order that is shuffled every round. A turn is five calls, then a wait until they have run;
figures are medians over the turns, and ratios of medians. With --mixed all contenders take turns, those
that begin with a numpy batch among them, and meet each other's code in the processor's caches.

    direct, apply  jit(shard_map(model)) on placed parameters and a batch that is cut already
    direct, step   the very program that jdp compiled for the step, on the state and the cut batch: a hand-written one
                   would differ in what it computes, too
    jdp            dp.apply(params, batch) and step(state, batch), with a batch from dp.prefetch
    thread         the time that the calling thread itself computes, until the last call returns: the host's share
    from numpy     the ratio where both begin with a numpy batch, the direct call with jax.device_put(batch, sharding)
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


def contenders(leaves: int) -> dict[str, Callable[[], Any]]:
    """One call of each, on all devices."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jdp

    def model(variables: Any, x: Any) -> Any:
        return x * sum(variables["params"].values())

    mesh = Mesh(np.array(jax.devices()), ("data",))
    cut, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    weights = {f"w{i:04}": np.float32(1 / leaves) for i in range(leaves)}
    variables = jax.device_put({"params": weights}, whole)
    batch = np.arange(2 * mesh.size, dtype=np.float32)
    placed = jax.device_put(batch, cut)

    dp = jdp.DataParallel(model)
    (scattered,) = dp.prefetch([batch])
    specs = (PartitionSpec(), PartitionSpec("data"))
    mapped = jax.shard_map(model, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=False)
    by_hand = jax.jit(mapped)

    def loss_fn(variables: Any, x: Any) -> Any:
        return ((model(variables, x) - 1) ** 2).mean()

    # One for each run of states: a step looks closely at a state that is not the one it gave last.
    step, step_of_numpy = (dp.train_step(loss_fn, optax.sgd(1e-6)) for _ in range(2))
    program = step._program.of(step.init(variables), scattered)
    states = {name: step.init(variables) for name in ("step direct", "step numpy direct", "step")}
    states["step numpy"] = step_of_numpy.init(variables)

    def stepped(name: str, call: Callable[[Any], Any]) -> Callable[[], Any]:
        def turn() -> Any:
            states[name], metrics = call(states[name])
            return metrics["loss"]

        return turn

    return {
        "apply": lambda: dp.apply(variables, scattered),
        "apply direct": lambda: by_hand(variables, placed),
        "apply numpy": lambda: dp.apply(variables, batch),
        "apply numpy direct": lambda: by_hand(variables, jax.device_put(batch, cut)),
        "step": stepped("step", lambda state: step(state, scattered)),
        "step direct": stepped("step direct", lambda state: program(state, (placed,))),
        "step numpy": stepped("step numpy", lambda state: step_of_numpy(state, batch)),
        "step numpy direct": stepped("step numpy direct", lambda state: program(state, (jax.device_put(batch, cut),))),
    }


def measure(leaves: int, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a call, and of the calling thread alone, for each contender."""
    import jax
    import numpy as np

    calls = contenders(leaves)
    found = {name: jax.device_get(call()) for name, call in calls.items()}
    for name, value in found.items():
        np.testing.assert_allclose(value, found[f"{name.split()[0]} direct"], rtol=1e-5, err_msg=name)
    kinds = ("apply", "apply numpy", "step", "step numpy")
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
    for call in ("apply", "step"):
        (jdp, thread), (direct, alone) = row["medians"][call], row["medians"][f"{call} direct"]
        from_numpy = row["medians"][f"{call} numpy"][0] / row["medians"][f"{call} numpy direct"][0]
        line = [call, f"{row['leaves']} x {devices}", f"{direct:.0f} us", f"{jdp:.0f} us", f"{jdp / direct:.3f}"]
        line += [f"{alone:.0f} us", f"{thread:.0f} us", f"{thread / alone:.3f}", f"{from_numpy:.3f}"]
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
