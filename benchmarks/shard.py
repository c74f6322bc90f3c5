"""What train_step(shard_params=True) costs beside fully sharded steps that were written by hand. Run: make bench

One process for each form of the model and number of devices; in it the contenders take turns, in an order that is
shuffled every round. A turn is one step, from the batch in numpy to the loss and the new parameters; figures are
medians, and ratios of medians. All train one Transformer with one Adam, and must give the same losses before anything
is timed.

    by hand     jit(shard_map(step)): each block's parameters are gathered in the block, under a jax.checkpoint that
                keeps all but what was gathered; the update runs on the shards
    recomputed  the same under plain jax.checkpoint, which computes each block twice
    gspmd       jit, with shardings for the parameters and the batch, and nothing else: XLA chooses what it gathers
    jdp         dp.train_step(loss_fn, tx, shard_params=True)
    zero1       dp.train_step(loss_fn, tx, shard_optimizer=True), to compare
    replicated  dp.train_step(loss_fn, tx), to compare
    memory      XLA's arguments + temporaries of the step on a device, as a multiple of replicated's
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train import clock

import jdp

LAYERS, WIDTH, HEADS, LENGTH, LETTERS = 12, 256, 4, 32, 256
ROWS = 4  # for each device
FORMS = ("scanned", "unrolled")
TX = optax.adam(1e-3)


def parameters(form: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.02, shape).astype(np.float32)

    def block(*layers: int) -> dict[str, np.ndarray]:
        ones = np.ones((*layers, WIDTH), np.float32)
        return {
            "norm1": ones,
            "qkv": normal(*layers, WIDTH, 3 * WIDTH),
            "mix": normal(*layers, WIDTH, WIDTH),
            "norm2": ones.copy(),
            "up": normal(*layers, WIDTH, 4 * WIDTH),
            "down": normal(*layers, 4 * WIDTH, WIDTH),
        }

    blocks = block(LAYERS) if form == "scanned" else [block() for _ in range(LAYERS)]
    return {"letters": normal(LETTERS, WIDTH), "blocks": blocks, "head": normal(WIDTH, LETTERS)}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    rows, length, _ = x.shape
    q, k, v = jnp.split((norm(x, p["norm1"]) @ p["qkv"]).reshape(rows, length, HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
    x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["mix"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


Gather = Callable[[Any], Any]


def loss_of(
    params: Any, batch: np.ndarray, form: str, gather: Gather = lambda p: p, again: Callable[..., Any] = lambda f: f
) -> jax.Array:
    """The loss; `gather` makes a part of the parameters whole, `again` is the checkpoint around what it is used in."""

    def run(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        return block(x, gather(p))

    x = again(lambda p: gather(p)[batch[:, :-1]])(params["letters"])
    if form == "scanned":
        x, _ = lax.scan(lambda x, p: (again(run)(x, p), None), x, params["blocks"])
    else:
        for p in params["blocks"]:
            x = again(run)(x, p)
    logits = again(lambda x, p: x @ gather(p))(x, params["head"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name != "all_gather"


class ByHand:
    """A step of sharded parameters, and its state."""

    def __init__(self, name: str, form: str, devices: list[Any]) -> None:
        self.mesh = Mesh(np.array(devices), ("data",))
        params = parameters(form)
        stacked = form == "scanned"
        first = {"letters": P("data"), "head": P("data")}
        specs = first | {"blocks": jax.tree.map(lambda _: P(None, "data") if stacked else P("data"), params["blocks"])}
        state_specs = jax.eval_shape(TX.init, params)
        cut = optax.tree_map_params(TX, lambda _, s: s, state_specs, specs, transform_non_params=lambda _: P())
        where = jax.tree.map(lambda s: NamedSharding(self.mesh, s), (specs, cut))
        rows = NamedSharding(self.mesh, P("data"))
        self.state = jax.device_put((params, TX.init(params)), where)

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            if name == "gspmd":
                loss, grads = jax.value_and_grad(partial(loss_of, form=form))(params, batch)
            else:
                again = jax.checkpoint if name == "recomputed" else partial(jax.checkpoint, policy=keeps)

                def gather(p: Any) -> Any:  # of a block, or of one matrix: along the first axis that is left
                    return jax.tree.map(lambda x: lax.all_gather(x, "data", tiled=True), p)

                loss, grads = jax.value_and_grad(loss_of)(params, batch, form, gather, again)
                loss, grads = lax.pmean(loss, "data"), jax.tree.map(lambda g: g / len(devices), grads)
            updates, opt_state = TX.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

        if name != "gspmd":
            specs = ((specs, cut), P("data")), ((specs, cut), P())
            step = jax.shard_map(step, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        self.step = jax.jit(step, in_shardings=(where, rows), out_shardings=(where, None), donate_argnums=0)


class ByJdp:
    def __init__(self, form: str, devices: list[Any], **options: bool) -> None:
        dp = jdp.DataParallel(lambda variables, batch: loss_of(variables["params"], batch, form), devices)
        self.step = dp.train_step(dp.module, TX, **options)
        self.state = self.step.init({"params": parameters(form)})


def contenders(form: str, devices: list[Any]) -> dict[str, Any]:
    by_hand = {name: ByHand(name, form, devices) for name in ("by hand", "recomputed", "gspmd")}
    return by_hand | {
        "jdp": ByJdp(form, devices, shard_params=True),
        "zero1": ByJdp(form, devices, shard_optimizer=True),
        "replicated": ByJdp(form, devices),
    }


def memory(one: Any, batch: np.ndarray) -> int:
    found = one.step.lower(one.state, batch).compile().memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes


def measure(form: str, n: int, seconds: float) -> dict[str, Any]:
    devices = jax.devices()[:n]
    batch = np.random.default_rng(1).integers(0, LETTERS, (ROWS * n, LENGTH + 1))
    found = contenders(form, devices)
    used = {name: memory(one, batch) for name, one in found.items()}

    def turn(one: Any) -> float:
        one.state, metrics = one.step(one.state, batch)
        jax.block_until_ready(one.state)
        return float(metrics["loss"])

    losses = {name: [turn(one) for _ in range(4)] for name, one in found.items()}
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses["by hand"], rtol=1e-4, err_msg=name)
    calls = {name: partial(turn, one) for name, one in found.items()}
    clock(calls, 0.1 * seconds)  # warm
    times = clock(calls, 0.9 * seconds)
    took = {name: float(np.median(values)) for name, values in times.items()}
    return {"took": took, "memory": used, "rounds": len(times["jdp"])}


COLUMNS = (
    "form", "devices", "by hand", "jdp / best of these", "recomputed", "gspmd", "zero1", "replicated", "memory: jdp",
    "by hand ", "gspmd ", "zero1 ", "rounds",
)  # fmt: skip


def cells(form: str, n: int, row: dict[str, Any]) -> list[str]:
    took, used = row["took"], row["memory"]
    best = min(("by hand", "recomputed", "gspmd"), key=lambda name: took[name])
    ratios = [f"{took[name] / took['by hand']:.2f}" for name in ("recomputed", "gspmd", "zero1", "replicated")]
    share = [f"{used[name] / used['replicated']:.2f}" for name in ("jdp", "by hand", "gspmd", "zero1")]
    first = f"{took['jdp'] / took[best]:.2f} ({best})"
    return [form, str(n), f"{took['by hand'] * 1e3:.1f} ms", first, *ratios, *share, str(row["rounds"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=[*FORMS])
    parser.add_argument("--devices", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing for each row")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md beside this file")
    parser.add_argument("--one", nargs=2, metavar=("FORM", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # a process of its own: the number of virtual devices is fixed once JAX has started
        form, n = args.one
        jdp.virtual_cpu_devices(int(n))
        return print(json.dumps(measure(form, int(n), args.seconds)))
    rows = []
    for form in args.forms:
        for n in args.devices:
            command = [sys.executable, __file__, "--seconds", str(args.seconds), "--one", form, str(n)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(cells(form, n, json.loads(out.splitlines()[-1])))
            print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    if args.write:
        _results.write(
            "shard",
            "shard_params against fully sharded steps by hand",
            f"{_results.versions()}, virtual CPU devices. A Transformer of {LAYERS} blocks, width {WIDTH}, {ROWS} rows "
            f"of {LENGTH} letters a device, Adam. Times as multiples of `by hand`, medians, {args.seconds:g} s a row; "
            f"memory as multiples of the replicated step's.",
            _results.table(COLUMNS, rows),
        )


if __name__ == "__main__":
    main()
