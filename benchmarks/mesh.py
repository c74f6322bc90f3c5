"""What a training step costs whose replicas are groups of devices, beside the same by hand. Run: make bench

One process for each model and mesh; in it the contenders take turns, in an order that is shuffled every round. A turn
is one step, from the batch in numpy to the loss and the new parameters; figures are medians, and ratios of medians. All
train the same model with one Adam, from parameters that lie alike, and must give the same losses before anything is
timed. Attention heads and the MLP are cut over "model" (Megatron), the rest is whole. The ViT is that of criterion.py,
and the GPT is the Transformer of train.py.

    by hand        jit of the whole step, with in_shardings and out_shardings for the parameters, the optimizer's state
                   and the batch, on the same mesh: XLA sees to the rest
    jdp            dp.train_step(loss_fn, tx) of jdp.DataParallel(model, mesh)
    uneven / even  the same batch and a row fewer, with the same largest chunk, both by dp.train_step; each replica
                   computes on chunks of both sizes
    on a list      the same ratio where each replica is one device
    collectives    how many the optimized program has, and what a device gives to them
    memory         XLA's temporaries of the step on a device
    gathered       collectives that give a device a whole parameter that is cut, or its gradient; none should

With --compiled the same steps are compiled for 8 H100 that are not here, and nothing is timed.
"""

from __future__ import annotations

import argparse
import collections as of_python
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import _results
import jax
import numpy as np
import optax
from criterion import task_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train import Loop, Task, clock, faster_feed, loss_with, make_task, step_by_hand

import jdp
from jdp._tools.explain import collectives, hlo

MODELS = ("ViT", "GPT")
MESHES = ("4x2", "2x4")
TARGETS = {"jdp / by hand": 1.05, "uneven / even": 1.15, "memory": 1.05}


class Placed(NamedTuple):
    """A task, and where its state and its batch lie on a mesh."""

    task: Task
    mesh: Mesh
    state: Any
    rows: NamedSharding

    def put(self) -> Any:
        """The state, in arrays of its own: donation takes them."""
        return jax.tree.map(
            lambda x, where: jax.device_put(np.array(x), where),
            (self.task.variables, self.task.tx.init(self.task.variables)),
            self.state,
        )


def placed(model_name: str, sizes: tuple[int, int]) -> Placed:
    n = sizes[0] * sizes[1]
    task = task_of(model_name, n) if model_name == "ViT" else make_task("Transformer", n)
    mesh = Mesh(np.array(task.devices).reshape(sizes), ("data", "model"))
    specs = jax.tree_util.tree_map_with_path(spec, task.variables)
    state = jax.eval_shape(task.tx.init, task.variables)
    of_state = optax.tree_map_params(task.tx, lambda _, s: s, state, specs, transform_non_params=lambda _: P())
    where = jax.tree.map(lambda s: NamedSharding(mesh, s), (specs, of_state))
    return Placed(task, mesh, where, NamedSharding(mesh, P("data")))


def spec(path: Any, x: Any) -> P:
    """Heads are cut, and the wide layer in the middle of an MLP."""
    *_, layer, name = [part.key for part in path]
    if layer in ("query", "key", "value"):
        return P(None, "model") if name == "kernel" else P("model")
    if layer == "out":
        return P("model") if name == "kernel" else P()
    if name == "kernel" and x.ndim == 2 and x.shape[1] == 4 * x.shape[0]:
        return P(None, "model")
    if name == "kernel" and x.ndim == 2 and x.shape[0] == 4 * x.shape[1] or name == "bias" and x.shape[0] >= 256:
        return P("model")
    return P()


def contenders(at: Placed) -> dict[str, Loop]:
    task = at.task
    by_hand = jax.jit(
        step_by_hand(task), in_shardings=(at.state, at.rows), out_shardings=(at.state, None), donate_argnums=0
    )
    uneven = jax.tree.map(lambda x: x[:-1], task.batch)

    def loop(devices: Any, variables: Any, batch: Any) -> Loop:
        dp = jdp.DataParallel(task.model, devices)
        step = dp.train_step(loss_with(dp.apply), task.tx)
        return Loop(step, step.init(variables), lambda: batch)

    on_mesh, on_list = (at.mesh, at.put()[0]), (task.devices[: at.mesh.shape["data"]], task.variables)
    feeds = (lambda: task.batch), (lambda: jax.device_put(task.batch, at.rows))  # the faster one is taken
    return {
        "by hand": Loop(by_hand, at.put(), *feeds),
        "jdp": loop(*on_mesh, task.batch),
        "uneven": loop(*on_mesh, uneven),
        "list": loop(*on_list, task.batch),
        "list, uneven": loop(*on_list, uneven),
    }


class Program(NamedTuple):
    """What XLA made of a step: its collectives, the bytes that a device gives to them, and its temporaries."""

    kinds: dict[str, int]
    sent: int
    temporary: int
    gathered: int


def program(loop: Loop, at: Placed) -> Program:
    compiled = loop.step.lower(loop.state, loop.feeds[0]()).compile()
    return program_of(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, at)


def program_of(text: str, temporary: int, at: Placed) -> Program:
    found = collectives.collectives(hlo.parse(text))
    kinds = of_python.Counter(c.kind for c in found)
    return Program(
        dict(sorted(kinds.items())),
        sum(c.bytes * (c.runs or 1) for c in found),
        temporary,
        whole_parameters(text, at),
    )


def whole_parameters(text: str, at: Placed) -> int:
    """How many lines with a collective give an array of the shape of a whole parameter that is cut, and of no other."""
    leaves = list(zip(jax.tree.leaves(at.task.variables), jax.tree.leaves(at.state[0]), strict=True))
    cut = {x.shape for x, where in leaves if any(where.spec)}
    whole = {",".join(map(str, shape)) for shape in cut - {x.shape for x, where in leaves if not any(where.spec)}}
    lines = [line for line in text.splitlines() if " all-gather" in line or " all-to-all" in line]
    return sum(any(f"[{shape}]" in line.split(" all-", 1)[0] for shape in whole) for line in lines)


def measure(model_name: str, sizes: tuple[int, int], seconds: float) -> dict[str, Any]:
    at = placed(model_name, sizes)
    loops = contenders(at)
    programs = {name: program(loop, at) for name, loop in loops.items() if "list" not in name}
    losses = {name: [float(loop()["loss"]) for _ in range(4)] for name, loop in loops.items()}
    for name, found in losses.items():  # an uneven one has another batch, but for one row the same
        np.testing.assert_allclose(found, losses["by hand"], rtol=0.1 if "uneven" in name else 1e-4, err_msg=name)
    feeds = {"by hand": faster_feed(loops["by hand"], 0.1 * seconds)}
    calls: dict[str, Callable[[], Any]] = {name: partial(loop, feeds.get(name, 0)) for name, loop in loops.items()}
    clock(calls, 0.1 * seconds)  # warm
    times = clock(calls, 0.8 * seconds)
    took = {name: float(np.median(values)) for name, values in times.items()}
    upper, lower = np.percentile(times["jdp"] / times["by hand"], (75, 25))  # of pairs, each in one round
    rounds = len(times["jdp"])
    noise = 0.93 * (upper - lower) / rounds**0.5  # a median's standard error, if the noise is normal
    programs_ = {name: found._asdict() for name, found in programs.items()}
    return {"took": took, "programs": programs_, "noise": float(noise), "rounds": rounds}


def compiled(model_name: str, sizes: tuple[int, int], devices: Sequence[Any]) -> dict[str, Program]:
    """What the compiler for these devices makes of the same steps; of all it takes shapes, and runs nothing."""
    at = placed(model_name, sizes)
    task, mesh = at.task, Mesh(np.array(devices).reshape(sizes), ("data", "model"))

    def there(tree: Any, where: Any) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s.spec)), tree, where
        )

    state = there((task.variables, jax.eval_shape(task.tx.init, task.variables)), at.state)
    batch = there(task.batch, jax.tree.map(lambda _: at.rows, task.batch))
    step = jax.jit(
        step_by_hand(task), out_shardings=(jax.tree.map(lambda x: x.sharding, state), None), donate_argnums=0
    )
    options = {"xla_gpu_enable_triton_gemm": False} if devices[0].platform == "gpu" else None  # as explain compiles
    by_hand = step.lower(state, batch).compile(compiler_options=options)
    dp = jdp.DataParallel(task.model, mesh)
    opt_state = jax.eval_shape(task.tx.init, task.variables["params"])
    own = jdp.TrainState(jax.ShapeDtypeStruct((), np.int32), state[0]["params"], opt_state, {}, None)
    report = jdp.explain(dp.train_step(loss_with(dp.apply), task.tx), own, task.batch)
    memory = by_hand.memory_analysis().temp_size_in_bytes
    return {
        "by hand": program_of(by_hand.as_text(), memory, at),
        "jdp": program_of(report.hlo, report.temp_bytes, at),
    }


COMPILED = (
    "model", "replicas x devices", "collectives: by hand", "jdp", "MB sent: by hand", "jdp", "MB temporary: by hand",
    "jdp", "gathered",
)  # fmt: skip


def cells_compiled(model_name: str, mesh: str, found: dict[str, Program]) -> list[str]:
    both = found["by hand"], found["jdp"]
    return [
        model_name,
        mesh.replace("x", " x "),
        *(", ".join(f"{n} {kind}" for kind, n in one.kinds.items()) for one in both),
        *(f"{one.sent / 1e6:.1f}" for one in both),
        *(f"{one.temporary / 1e6:.1f}" for one in both),
        ", ".join(str(one.gathered) for one in both),
    ]


COLUMNS = (
    "model", "replicas x devices", "by hand", "jdp / by hand", "uneven / even", "on a list", "memory",
    "collectives: by hand", "jdp", "uneven", "sent: jdp / by hand", "gathered", "rounds",
)  # fmt: skip


def cells(model_name: str, mesh: str, row: dict[str, Any]) -> list[str]:
    took, found = row["took"], row["programs"]

    def beside(name: str, value: float) -> str:
        return f"{value:.2f} {'<=' if round(value, 2) <= TARGETS[name] else '>'} {TARGETS[name]:.2f}"

    def count(name: str) -> str:
        return ", ".join(f"{n} {kind}" for kind, n in found[name]["kinds"].items())

    return [
        model_name,
        mesh.replace("x", " x "),
        f"{took['by hand'] * 1e3:.1f} ms",
        f"{beside('jdp / by hand', took['jdp'] / took['by hand'])} ± {row['noise']:.2f}",
        beside("uneven / even", took["uneven"] / took["jdp"]),
        f"{took['list, uneven'] / took['list']:.2f}",
        beside("memory", found["jdp"]["temporary"] / found["by hand"]["temporary"]),
        *map(count, ("by hand", "jdp", "uneven")),
        f"{found['jdp']['sent'] / found['by hand']['sent']:.2f}",
        ", ".join(str(found[name]["gathered"]) for name in ("by hand", "jdp", "uneven")),
        str(row["rounds"]),
    ]


def mesh_sizes(text: str) -> tuple[int, int]:
    replicas, model = map(int, text.split("x"))
    return replicas, model


def write_compiled(args: argparse.Namespace) -> None:
    jdp.virtual_cpu_devices(8)
    devices, rows = jdp.topology("h100", hosts=1), []
    for model_name in args.models:
        for mesh in args.meshes:
            rows.append(cells_compiled(model_name, mesh, compiled(model_name, mesh_sizes(mesh), devices)))
            print(rows[-1], flush=True)
    if args.write:
        _results.write(
            "mesh_compiled",
            "Replicas of several devices on 8 H100 that are not here, against the same by hand",
            f"{_results.versions()}. Compiled, not run.",
            _results.table(COMPILED, rows),
            said_in="mesh.py",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--meshes", nargs="*", default=[*MESHES], metavar="RxM", help="replicas x devices of each")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing for each row")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md beside this file")
    parser.add_argument("--compiled", action="store_true", help="compile for 8 H100 in place of running")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "RxM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # a process of its own: the number of virtual devices is fixed once JAX has started
        model_name, sizes = args.one[0], mesh_sizes(args.one[1])
        jdp.virtual_cpu_devices(sizes[0] * sizes[1])
        return print(json.dumps(measure(model_name, sizes, args.seconds)))
    if args.compiled:
        return write_compiled(args)
    rows = []
    for model_name in args.models:
        for mesh in args.meshes:
            command = [sys.executable, __file__, "--seconds", str(args.seconds), "--one", model_name, mesh]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(cells(model_name, mesh, json.loads(out.splitlines()[-1])))
            print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    if args.write:
        _results.write(
            "mesh",
            "Replicas of several devices against the same by hand",
            f"{_results.versions()}, virtual CPU devices. Ratios of medians, {args.seconds:g} s a row, beside their "
            "targets; `>`: missed.",
            _results.table(COLUMNS, rows),
        )


if __name__ == "__main__":
    main()
