"""What train_step(shard_params=True) costs beside fully sharded steps that were written by hand. Run: make bench

Timed: one process for each form of the model and number of devices; in it the contenders take turns, in an order that
is shuffled every round. A turn is one step, from the batch in numpy to the loss and the new parameters; figures are
medians, and ratios of medians. All train one Transformer with one Adam, and must give the same losses before anything
is timed.

Compiled (`--compiled`): a larger one, in bfloat16, for 8 H100 that are not here, and its communication read from XLA's
schedule, as overlap.py does. Both forms without the user's own checkpoint around a block.

    by hand     jit(shard_map(step)): each block's parameters are gathered in the block, under a jax.checkpoint that
                keeps all but what was gathered; the update runs on the shards
    recomputed  the same under plain jax.checkpoint, which computes each block twice
    gspmd       jit, with shardings for the parameters and the batch, and nothing else: XLA chooses what it gathers
    jdp         dp.train_step(loss_fn, tx, shard_params=True)
    zero1       dp.train_step(loss_fn, tx, shard_optimizer=True), to compare
    replicated  dp.train_step(loss_fn, tx), to compare
    torch       FSDP2 of torch, each block fully_shard, a process of one thread for each of 2 devices, where torch is
                installed; it has no scan
    memory      XLA's arguments, results and temporaries of the step on a device, as a multiple of replicated's
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shard_torch import fsdp2
from train import clock

import jdp
from jdp._tools.explain import collectives, estimate, hlo
from jdp._tools.explain.estimate import Network
from jdp._tools.topology.quiet import quiet

Gather = Callable[[Any], Any]
FORMS = ("scanned", "unrolled")
BY_HAND = ("by hand", "recomputed", "gspmd")
TX = optax.adam(1e-3)


class Model(NamedTuple):
    """A Transformer, and its batch: `rows` for each device, of `length` letters."""

    form: str
    layers: int = 12
    width: int = 256
    heads: int = 4
    length: int = 32
    letters: int = 256
    rows: int = 4
    dtype: Any = jnp.float32  # that it computes in; its parameters are float32

    def parameters(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        d = self.width

        def normal(*shape: int) -> np.ndarray:
            return 0.02 * rng.standard_normal(shape, np.float32)

        def block(*layers: int) -> dict[str, np.ndarray]:
            return {
                "norm1": np.ones((*layers, d), np.float32),
                "qkv": normal(*layers, d, 3 * d),
                "mix": normal(*layers, d, d),
                "norm2": np.ones((*layers, d), np.float32),
                "up": normal(*layers, d, 4 * d),
                "down": normal(*layers, 4 * d, d),
            }

        blocks = block(self.layers) if self.form == "scanned" else [block() for _ in range(self.layers)]
        return {"letters": normal(self.letters, d), "blocks": blocks, "head": normal(d, self.letters)}

    def batch(self, n: int) -> np.ndarray:
        return np.random.default_rng(1).integers(0, self.letters, (self.rows * n, self.length + 1), np.int32)

    def loss(
        self, params: Any, batch: Any, gather: Gather = lambda p: p, again: Callable[..., Any] = lambda f: f
    ) -> jax.Array:
        """`gather` makes a part of the parameters whole, `again` is the checkpoint around what it is used in."""

        def ready(p: Any) -> Any:
            return gather(jax.tree.map(lambda x: x.astype(self.dtype), p))

        def run(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
            return block(x, ready(p), self.heads)

        x = again(lambda p: ready(p)[batch[:, :-1]])(params["letters"])
        if self.form == "scanned":
            x, _ = lax.scan(lambda x, p: (again(run)(x, p), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = again(run)(x, p)
        logits = again(lambda x, p: (x @ ready(p)).astype(jnp.float32))(x, params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


FOR_CHIPS = {"width": 1024, "heads": 16, "length": 512, "letters": 8192, "rows": 8, "dtype": jnp.bfloat16}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(x: jax.Array, p: dict[str, jax.Array], heads: int) -> jax.Array:
    rows, length, width = x.shape
    q, k, v = jnp.split((norm(x, p["norm1"]) @ p["qkv"]).reshape(rows, length, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5
    scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
    x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["mix"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name != "all_gather"


class ByHand:
    """A step of sharded parameters; `compiled` is XLA's program, as a text, and its bytes on a device."""

    def __init__(self, name: str, model: Model, devices: Sequence[Any]) -> None:
        self.mesh, self.model = Mesh(np.array(devices), ("data",)), model
        params = jax.eval_shape(model.parameters)
        stacked = P(None, "data") if model.form == "scanned" else P("data")
        specs = {"letters": P("data"), "blocks": jax.tree.map(lambda _: stacked, params["blocks"]), "head": P("data")}
        state_specs = jax.eval_shape(TX.init, params)
        cut = optax.tree_map_params(TX, lambda _, s: s, state_specs, specs, transform_non_params=lambda _: P())
        self.where = jax.tree.map(lambda s: NamedSharding(self.mesh, s), (specs, cut))
        rows = NamedSharding(self.mesh, P("data"))

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            if name == "gspmd":
                loss, grads = jax.value_and_grad(model.loss)(params, batch)
            else:
                again = jax.checkpoint if name == "recomputed" else partial(jax.checkpoint, policy=keeps)

                def gather(p: Any) -> Any:  # of a block, or of one matrix: along the first axis that is left
                    return jax.tree.map(lambda x: lax.all_gather(x, "data", tiled=True), p)

                loss, grads = jax.value_and_grad(model.loss)(params, batch, gather, again)
                loss, grads = lax.pmean(loss, "data"), jax.tree.map(lambda g: g / len(devices), grads)
            updates, opt_state = TX.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

        if name != "gspmd":
            both = ((specs, cut), P("data")), ((specs, cut), P())
            step = jax.shard_map(step, mesh=self.mesh, in_specs=both[0], out_specs=both[1], check_vma=False)
        # As explain compiles for GPUs that are not there.
        options = {"xla_gpu_enable_triton_gemm": False} if devices[0].platform == "gpu" else None
        where = {"in_shardings": (self.where, rows), "out_shardings": (self.where, None)}
        self.step = jax.jit(step, **where, donate_argnums=0, compiler_options=options)

    def start(self) -> Any:
        params = self.model.parameters()
        return jax.device_put((params, TX.init(params)), self.where)

    def compiled(self, batch: Any) -> tuple[str, int]:
        params = jax.eval_shape(self.model.parameters)
        found = self.step.lower((params, jax.eval_shape(TX.init, params)), batch).compile()
        memory = found.memory_analysis()
        made = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return found.as_text(), memory.argument_size_in_bytes + made + memory.temp_size_in_bytes


class ByJdp:
    def __init__(self, model: Model, devices: Sequence[Any], **options: Any) -> None:
        self.model = model
        dp = jdp.DataParallel(lambda variables, batch: model.loss(variables["params"], batch), devices)
        self.step = dp.train_step(dp.module, TX, **options)

    def start(self) -> Any:
        return self.step.init({"params": self.model.parameters()})

    def compiled(self, batch: Any) -> tuple[str, int]:
        params = jax.eval_shape(self.model.parameters)
        state = jdp.TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(TX.init, params), {}, None)
        found = jdp.explain(self.step, state, batch)
        return found.hlo, found.peak_bytes


def contenders(model: Model, devices: Sequence[Any]) -> dict[str, Any]:
    return {name: ByHand(name, model, devices) for name in BY_HAND} | {
        "jdp": ByJdp(model, devices, shard_params=True),
        "zero1": ByJdp(model, devices, shard_optimizer=True),
        "replicated": ByJdp(model, devices),
    }


def measure(form: str, n: int, seconds: float) -> dict[str, Any]:
    model = Model(form)
    batch, found = model.batch(n), contenders(model, jax.devices()[:n])
    used = {name: one.compiled(batch)[1] for name, one in found.items()}
    states = {name: one.start() for name, one in found.items()}

    def turn(name: str) -> float:
        states[name], metrics = found[name].step(states[name], batch)
        jax.block_until_ready(states[name])
        return float(metrics["loss"])

    calls = {name: partial(turn, name) for name in found}
    with contextlib.ExitStack() as stack:
        if form == "unrolled" and n == 2 and importlib.util.find_spec("torch"):
            job = stack.enter_context(fsdp2(model.parameters(), model.heads, n))
            calls["torch"] = lambda: job.turn(batch)
        losses = {name: [call() for _ in range(4)] for name, call in calls.items()}
        for name, values in losses.items():
            np.testing.assert_allclose(values, losses["by hand"], rtol=1e-4, err_msg=name)
        clock(calls, 0.1 * seconds)  # warm
        times = clock(calls, 0.9 * seconds)
    took = {name: float(np.median(values)) for name, values in times.items()}
    return {"took": took, "memory": used, "rounds": len(times["jdp"])}


COLUMNS = (
    "form", "devices", "by hand", "jdp / best of these", "recomputed", "gspmd", "zero1", "replicated", "torch",
    "memory: jdp", "by hand ", "gspmd ", "zero1 ", "rounds",
)  # fmt: skip


def cells(form: str, n: int, row: dict[str, Any]) -> list[str]:
    took, used = row["took"], row["memory"]
    best = min(BY_HAND, key=lambda name: took[name])
    others = ("recomputed", "gspmd", "zero1", "replicated", "torch")
    ratios = [f"{took[name] / took['by hand']:.2f}" if name in took else "" for name in others]
    share = [f"{used[name] / used['replicated']:.2f}" for name in ("jdp", "by hand", "gspmd", "zero1")]
    first = f"{took['jdp'] / took[best]:.2f} ({best})"
    return [form, str(n), f"{took['by hand'] * 1e3:.1f} ms", first, *ratios, *share, str(row["rounds"])]


COMPILED = ("form", "by", "collectives", "MB", "in flight", "peak memory", "step, estimated", "exposed, estimated")


def compiled(form: str) -> Iterator[list[str]]:
    """Of each contender, compiled for 8 H100: its communication, and how long it should take."""
    model, devices = Model(form, **FOR_CHIPS), jdp.topology("h100", hosts=1)
    network = Network.of(devices)
    batch = jax.ShapeDtypeStruct((model.rows * len(devices), model.length + 1), jnp.int32)
    half = {"shard_params": True, "reduce_dtype": jnp.bfloat16}
    found = contenders(model, devices) | {
        "jdp, reduce_dtype=bfloat16": ByJdp(model, devices, **half),
        "jdp, reduce_dtype=bfloat16, gather_once": ByJdp(model, devices, **half, gather_once=True),
    }
    for name, one in found.items():
        with quiet():
            text, peak = one.compiled(batch)
        module = hlo.parse(text)
        sent = collectives.collectives(module)
        total = sum(c.bytes * (c.runs or 1) for c in sent)
        times = estimate.simulate(module, network.chip, lambda c: network.seconds(c.kind, c.bytes, c.group))
        yield [
            form,
            name,
            str(sum(c.runs or 1 for c in sent)),
            f"{total / 1e6:.0f}",
            f"{sum(c.bytes * (c.runs or 1) for c in sent if c.in_flight) / total:.1%}",
            f"{peak / 1e9:.2f} GB",
            f"{times.seconds * 1e3:.2f} ms",
            f"{times.exposed_seconds * 1e3:.2f} ms",
        ]


def print_compiled(forms: Sequence[str]) -> list[list[str]]:
    rows = []
    for form in forms:
        for row in compiled(form):
            rows.append(row)
            print(dict(zip(COMPILED, row, strict=True)), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=[*FORMS])
    parser.add_argument("--devices", type=int, nargs="*", default=[2, 8], help="to be timed on")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing for each row")
    parser.add_argument("--compiled", action="store_true", help="only compile, for 8 H100")
    parser.add_argument("--write", action="store_true", help="write the tables to RESULTS.md beside this file")
    parser.add_argument("--one", nargs=2, metavar=("FORM", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # a process of its own: the number of virtual devices is fixed once JAX has started
        form, n = args.one
        jdp.virtual_cpu_devices(int(n))
        return print(json.dumps(measure(form, int(n), args.seconds)))
    if args.compiled:
        rows = print_compiled(args.forms)
        if args.write:
            write_compiled(rows)
        return
    rows = []
    for form in args.forms:
        for n in args.devices:
            command = [sys.executable, __file__, "--seconds", str(args.seconds), "--one", form, str(n)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(cells(form, n, json.loads(out.splitlines()[-1])))
            print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    if args.write:
        write_timed(rows, args.seconds)


def write_timed(rows: list[list[str]], seconds: float) -> None:
    model = Model("scanned")
    _results.write(
        "shard",
        "shard_params against fully sharded steps by hand",
        f"{_results.versions()}, virtual CPU devices. A Transformer of {model.layers} blocks, width {model.width}, "
        f"{model.rows} rows of {model.length} letters a device, Adam. Times as multiples of `by hand`, medians, "
        f"{seconds:g} s a row; memory as multiples of the replicated step's.",
        _results.table(COLUMNS, rows),
    )


def write_compiled(rows: list[list[str]]) -> None:
    model = Model("scanned", **FOR_CHIPS)
    _results.write(
        "shard_compiled",
        "shard_params against fully sharded steps by hand, compiled for 8 H100 that are not here",
        f"{_results.versions()}. A Transformer of {model.layers} blocks, width {model.width}, {model.rows} rows of "
        f"{model.length} tokens a device, bfloat16, Adam. Bytes and numbers of collectives are those of a step; the "
        "times are estimated from published figures.",
        _results.table(COMPILED, rows),
        said_in="shard.py",
    )


if __name__ == "__main__":
    main()
