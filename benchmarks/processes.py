"""What several processes cost: a training step over them by jdp, beside the same step written by hand. Run: make bench

Starts its workers with `jdp launch`; in each the contenders take turns, in an order that is shuffled every round and
the same in all processes. A turn is five steps, from the batch in numpy to the new parameters, and is over when they
have run; figures are medians over the turns, and ratios of medians.

    hand-written   jit(shard_map(step)) with lax.pmean, on jax.make_array_from_process_local_data(batch): an expert's
                   step, which takes for granted that all processes have equal rows
    with a gather  the same, and before each step an all-gather of 24 bytes, which nobody reads: the least that it costs
                   to tell the other processes of a batch
    jdp            step(state, batch): the processes agree on the rows of every batch before they run it
    trusting       step(state, batch) with the agreement taken out, as if all rows were known to be equal
    prefetch       for batch in dp.prefetch(...): step(state, batch), which agrees one batch ahead
    uneven         process 0 has a row fewer than the others
    check          train_step(check_replicas=5), so that a turn has one comparison; the figure is for one in 100 steps
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import _results

STEPS = 5


def contenders(width: int, rows: int) -> dict[str, Callable[[], None]]:
    """Five steps of each."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jdp

    model = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(width), nn.relu, nn.Dense(10)])
    rng = np.random.default_rng(jax.process_index())
    batch = {"x": rng.normal(size=(rows, width)).astype(np.float32), "y": rng.integers(0, 10, rows)}
    fewer = {name: x[1:] if jax.process_index() == 0 else x for name, x in batch.items()}
    tx = optax.adam(1e-3)

    def loss_fn(variables: Any, batch: Any) -> jax.Array:
        logits = model.apply(variables, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    mesh = Mesh(np.array(jax.devices()), ("data",))
    cut, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def by_hand(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, batch), "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    specs = (PartitionSpec(), PartitionSpec("data"))
    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    program = jax.jit(mapped, donate_argnums=0)
    variables = jax.device_get(model.init(jax.random.key(0), batch["x"][:1]))
    to_all = jax.jit(lambda: (variables, tx.init(variables)), out_shardings=whole)
    dp = jdp.DataParallel(model)
    step = dp.train_step(loss_fn, tx)
    checking = dp.train_step(loss_fn, tx, check_replicas=STEPS)
    states = {"hand-written": to_all(), "with a gather": to_all()} | {
        name: step.init(variables) for name in ("jdp", "trusting", "prefetch", "uneven", "check")
    }
    losses: dict[str, Any] = {}

    def to_tell(words: jax.Array) -> jax.Array:
        return jax.lax.all_gather(words, "data", tiled=True)

    words = jax.device_put(jnp.zeros((jax.device_count(), 6), jnp.uint32), cut)
    tell = jax.jit(jax.shard_map(to_tell, mesh=mesh, in_specs=specs[1], out_specs=PartitionSpec(), check_vma=False))

    def hand_written(name: str) -> Callable[[], None]:
        def turn() -> None:
            for _ in range(STEPS):
                placed = {key: jax.make_array_from_process_local_data(cut, x) for key, x in batch.items()}
                if name == "with a gather":
                    tell(words)
                states[name], losses[name] = program(states[name], placed)
            jax.block_until_ready(states[name])

        return turn

    def by_jdp(name: str, step: Any, batches: Callable[[], Any]) -> Callable[[], None]:
        def turn() -> None:
            for batch in batches():
                states[name], metrics = step(states[name], batch)
                losses[name] = metrics["loss"]
            jax.block_until_ready(states[name])

        return turn

    (ahead,) = dp.prefetch([batch])
    without = mock.patch.multiple("jdp._core.scatter", begin=lambda *_: lambda: (ahead["x"].sizes, ()))
    by_trust = by_jdp("trusting", step, lambda: itertools.repeat(batch, STEPS))

    def trusting() -> None:
        with without:
            by_trust()

    turns = {
        "hand-written": hand_written("hand-written"),
        "with a gather": hand_written("with a gather"),
        "jdp": by_jdp("jdp", step, lambda: itertools.repeat(batch, STEPS)),
        "trusting": trusting,
        "prefetch": by_jdp("prefetch", step, lambda: dp.prefetch(itertools.repeat(batch, STEPS))),
        "uneven": by_jdp("uneven", step, lambda: itertools.repeat(fewer, STEPS)),
        "check": by_jdp("check", checking, lambda: itertools.repeat(batch, STEPS)),
    }
    for turn in turns.values():
        turn()
    for name in ("jdp", "trusting", "prefetch", "check"):
        np.testing.assert_allclose(losses[name], losses["hand-written"], rtol=1e-4, err_msg=name)
    assert jnp.isfinite(losses["uneven"])
    return turns


def worker(out: str, width: int, rows: int, seconds: float, only: list[str] | None) -> None:
    import jdp

    jdp.distributed.initialize(timeout=120, start_timeout=120, quiet=True)
    import jax

    turns = {name: turn for name, turn in contenders(width, rows).items() if only is None or name in only}
    times: dict[str, list[float]] = {name: [] for name in turns}
    order, shuffle = list(turns), random.Random(0)
    one = {}
    for name in order:
        start = time.perf_counter()
        turns[name]()
        one[name] = time.perf_counter() - start
    # As many rounds in all processes, which process 0's clock decides before they begin.
    from jax.experimental import multihost_utils

    rounds = int(multihost_utils.broadcast_one_to_all(max(5, int(seconds / sum(one.values())))))
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            turns[name]()
            times[name].append((time.perf_counter() - start) / STEPS)
    if jax.process_index() == 0:
        Path(out).write_text(json.dumps({name: statistics.median(t) for name, t in times.items()} | {"rounds": rounds}))


def measure(
    processes: int, devices: int, width: int, rows: int, seconds: float, only: list[str] | None
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        launch = ["-m", "jdp", "launch", "-n", str(processes), "--devices-per-process", str(devices)]
        task = ["--worker", str(out), str(width), str(rows), "--seconds", str(seconds)]
        task += ["--only", *only] if only else []
        subprocess.run([sys.executable, *launch, __file__, *task], check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


COLUMNS = (
    "processes x devices",
    "hand-written",
    "with a gather",
    "jdp / hand",
    "jdp / trusting",
    "prefetch / trusting",
    "uneven / even",
    "check, of 100",
    "rounds",
)


def cells(processes: int, devices: int, t: dict[str, float]) -> list[str]:
    hand = t["hand-written"]
    check = (t["check"] - t["jdp"]) * STEPS / (100 * t["jdp"])  # one comparison, in a hundred steps
    return [
        f"{processes} x {devices}",
        f"{hand * 1e3:.1f} ms",
        f"{t['with a gather'] / hand:.3f}",
        f"{t['jdp'] / hand:.3f}",
        f"{t['jdp'] / t['trusting']:.3f}",
        f"{t['prefetch'] / t['trusting']:.3f}",
        f"{t['uneven'] / t['jdp']:.3f}",
        f"{check:+.2%}",
        str(t["rounds"]),
    ]


def write(rows: list[list[str]], seconds: float) -> None:
    _results.write(
        "processes",
        "dp.train_step over processes against the same by hand",
        f"{_results.versions()}, processes on loopback. Ratios of medians of {STEPS} steps, {seconds:.0f} s a row.",
        _results.table(COLUMNS, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", nargs=3, metavar=("OUT", "WIDTH", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=20, help="for each row (20)")
    parser.add_argument("--width", type=int, default=896, help="of the layers (896)")
    parser.add_argument("--rows", type=int, default=384, help="of each process's batch (384)")
    parser.add_argument("--jobs", nargs="+", default=["2x1", "4x1"], help="processes x devices of each (2x1 4x1)")
    parser.add_argument("--only", nargs="+", help="these contenders: more rounds, and no table")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md")
    args = parser.parse_args()
    if args.only and args.write:
        parser.error("--write wants all contenders, not --only some")
    if args.worker:
        out, width, rows = args.worker
        return worker(out, int(width), int(rows), args.seconds, args.only)
    rows = []
    for job in args.jobs:
        processes, devices = map(int, job.split("x"))
        times = measure(processes, devices, args.width, args.rows, args.seconds, args.only)
        if args.only:
            print(job, times, flush=True)
            continue
        rows.append(cells(processes, devices, times))
        print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    if args.write:
        write(rows, args.seconds)


if __name__ == "__main__":
    main()
