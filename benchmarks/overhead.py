"""What a call of dp.apply costs beside the same program written by hand. Run: make bench

Everything is timed in one process per number of devices, the contenders taking turns, so that noise
of a shared machine meets all of them; a figure is the median of the ratios of neighbouring calls.

    hand-written   jit(shard_map) with in_shardings, which takes the numpy batch, then device_put of the output to one
                   device
    pmap           flax's recipe: shard the batch on the host, jax.pmap, reshape the output
    uneven         a row fewer, so that the last chunk is shorter, against the full batch, both by dp.apply
                   (on one device there is one chunk, and nothing is uneven)
    its gradient   the same two batches, in a jitted jax.grad of the sum of the outputs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _results

import jdp


def contenders(model_name: str, n: int) -> tuple[dict[str, Callable[[], Any]], list[int]]:
    """The calls to time, and the list of chunk sizes that jdp traced the model on."""
    import flax.linen as nn
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    traces: list[int] = []

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):  # noqa: ANN001, ANN204
            for _ in range(3):
                x = nn.relu(nn.Dense(128)(x))
            return nn.Dense(10)(x)

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):  # noqa: ANN001, ANN204
            for features in (16, 32):
                x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))

    model, shape, chunk = (MLP(), (128,), 16) if model_name == "MLP" else (CNN(), (28, 28, 1), 128 // n)
    devices = jax.devices()[:n]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n * chunk, *shape)).astype(np.float32)
    uneven = x[:-1]  # any fewer, and torch's rule may make smaller chunks that are equal again
    assert n == 1 or len({*jdp.chunk_sizes(len(uneven), n)}) == 2 and max(jdp.chunk_sizes(len(uneven), n)) == chunk

    counting = type(model)()

    def apply(variables: Any, x: Any) -> Any:
        traces.append(x.shape[0])
        return counting.apply(variables, x)

    dp = jdp.DataParallel(apply, devices, output_device=devices[0])
    mesh = Mesh(np.array(devices), ("data",))
    everywhere, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    variables = jax.device_put(model.init(jax.random.key(0), x[:1]), everywhere)
    by_hand = jax.jit(
        jax.shard_map(model.apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False),
        in_shardings=(everywhere, cut),
    )
    stacked = jax.device_put(
        jax.tree.map(lambda w: np.broadcast_to(w, (n, *w.shape)), variables), NamedSharding(mesh, P("data"))
    )
    pmapped = jax.pmap(model.apply, axis_name="data", devices=devices)

    def hand_written() -> Any:
        return jax.device_put(by_hand(variables, x), devices[0])

    def pmap() -> Any:
        out = pmapped(stacked, x.reshape(n, chunk, *shape))
        return jax.device_put(out.reshape(n * chunk, *out.shape[2:]), devices[0])

    gradient = jax.jit(jax.grad(lambda variables, x: dp(variables, x).sum()))
    calls = {
        "hand-written": hand_written,
        "pmap": pmap,
        "jdp": partial(dp, variables, x),
        "uneven": partial(dp, variables, uneven),
        "gradient": partial(gradient, variables, x),
        "uneven gradient": partial(gradient, variables, uneven),
    }
    return calls, traces


def measure(model_name: str, n: int, seconds: float) -> dict[str, Any]:
    import jax
    import numpy as np

    calls, traces = contenders(model_name, n)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    for name in ("jdp", "uneven"):  # first alone: each is to compile its model once, and a slice at most
        jax.block_until_ready(calls[name]())
    compilations = len(compiled)
    for _ in range(10):
        for call in calls.values():
            jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    gradients = [name for name in calls if "gradient" in name]  # apart, for they may take far longer
    for names, share in ([name for name in calls if name not in gradients], 0.7), (gradients, 0.3):
        end = time.perf_counter() + share * seconds
        while time.perf_counter() < end:
            names = names[1:] + names[:1]  # nobody always comes after the same neighbour
            for name in names:
                start = time.perf_counter()
                jax.block_until_ready(calls[name]())
                times[name].append(time.perf_counter() - start)
    at = {name: np.array(values) for name, values in times.items()}

    def ratio(a: str, b: str) -> float:
        return float(np.median(at[a]) / np.median(at[b]))

    return {
        "model": model_name,
        "devices": n,
        "hand_us": float(np.median(at["hand-written"]) * 1e6),
        "jdp/hand": ratio("jdp", "hand-written"),
        "jdp/pmap": ratio("jdp", "pmap"),
        "uneven/even": ratio("uneven", "jdp"),
        "gradient": ratio("uneven gradient", "gradient"),
        "calls": len(at["jdp"]),
        "traces": len(traces),
        "compilations": compilations,
    }


def write(columns: tuple[str, ...], rows: list[list[str]], seconds: float) -> None:
    _results.write(
        "overhead",
        "dp.apply against the same by hand",
        f"{_results.versions()}, virtual CPU devices. Ratios of medians, {seconds:g} s a row; 1.00 is the same speed.",
        _results.table(columns, rows),
        "The last column: how often the model was traced, and its program compiled, for the two batch sizes (an uneven "
        "size is traced once for each size of chunk).",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing for each row")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md beside this file")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # a process of its own: the number of virtual devices is fixed once JAX has started
        model_name, n = args.one
        jdp.virtual_cpu_devices(int(n))
        print(json.dumps(measure(model_name, int(n), args.seconds)))
        return
    from rich.console import Console
    from rich.table import Table

    rows = []
    table = Table(title="dp.apply, ratios of medians (1.00 is the same speed)")
    ratios = "jdp / hand", "jdp / pmap", "uneven / even", "its gradient"
    columns = "model", "devices", "hand-written", *ratios, "calls", "traces, compiled"
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for model_name in ("MLP", "CNN"):
        for n in args.devices:
            command = [sys.executable, __file__, "--one", model_name, str(n), "--seconds", str(args.seconds)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append(
                [
                    model_name,
                    str(n),
                    f"{row['hand_us']:.0f} us",
                    f"{row['jdp/hand']:.2f}",
                    f"{row['jdp/pmap']:.2f}",
                    f"{row['uneven/even']:.2f}" if n > 1 else "-",
                    f"{row['gradient']:.2f}" if n > 1 else "-",
                    str(row["calls"]),
                    f"{row['traces']}, {row['compilations']}",
                ]
            )
            table.add_row(*rows[-1])
    Console(width=120).print(table)
    if args.write:
        write(columns, rows, args.seconds)


if __name__ == "__main__":
    main()
