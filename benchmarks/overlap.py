"""What of a step's communication is hidden behind its computing, on machines that are not here. Run: make bench

Compiles a training step of a transformer of six layers for 8 H100s, and for 16 TPU v5e, and reads the schedule that XLA
made: no device is needed, only the compilers (`pip install -e ".[plan-gpu,plan-tpu]"`). Compared are

    hand-written   jit(shard_map(step)) with one lax.pmean of loss and gradients
    automatic      jit(step) on a batch that is cut; XLA finds the reductions itself
    jdp, plain     dp.train_step without the compiler options that it sets
    jdp            dp.train_step

and the share of the collectives' bytes that is in flight while something is computed, while some of the backward pass
is, and by the links' and the chip's published figures (jdp/_tools/topology/chips.py) an estimate of the time and of
what is exposed.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp
from jdp._tools.explain import collectives, estimate, hlo
from jdp._tools.explain.estimate import Network
from jdp._tools.topology.quiet import quiet

LAYERS, VOCABULARY, HEADS = 6, 8192, 8
COLUMNS = (
    "step on",
    "by",
    "collectives",
    "MB",
    "in flight",
    "under backward",
    "step, estimated",
    "exposed, estimated",
)


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        half = jnp.bfloat16
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        h = nn.LayerNorm(dtype=half)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=half)(h, h, mask=mask)
        h = nn.Dense(4 * self.width, dtype=half)(nn.LayerNorm(dtype=half)(x))
        return x + nn.Dense(self.width, dtype=half)(nn.gelu(h))


class Transformer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, self.width, dtype=jnp.bfloat16)(tokens)
        for _ in range(LAYERS):
            x = Block(self.width)(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


class Contenders:
    """The same step in several ways, for the same devices: each as the text of the optimized program."""

    def __init__(self, devices: tuple[jax.Device, ...], width: int, rows: int, length: int) -> None:
        self.devices, self.mesh = devices, Mesh(np.array(devices), ("data",))
        self.model, self.tx = Transformer(width), optax.adamw(1e-3)
        self.tokens = jax.ShapeDtypeStruct((rows * len(devices), length), jnp.int32)
        self.variables = jax.eval_shape(self.model.init, jax.random.key(0), self.tokens)
        self.opt_state = jax.eval_shape(self.tx.init, self.variables["params"])

    def loss(self, variables: Any, tokens: jax.Array) -> jax.Array:
        logits = self.model.apply(variables, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def update(self, params: Any, opt_state: Any, loss: Any, grads: Any) -> Any:
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def automatic(self) -> str:
        def step(params: Any, opt_state: Any, tokens: Any) -> Any:
            found = jax.value_and_grad(lambda p: self.loss({"params": p}, tokens))(params)
            return self.update(params, opt_state, *found)

        return self.compiled(step)

    def hand_written(self) -> str:
        def step(params: Any, opt_state: Any, tokens: Any) -> Any:
            found = jax.value_and_grad(lambda p: self.loss({"params": p}, tokens))(params)
            return self.update(params, opt_state, *jax.lax.pmean(found, "data"))

        whole, cut = PartitionSpec(), PartitionSpec("data")
        specs = (whole, whole, cut)
        return self.compiled(jax.shard_map(step, mesh=self.mesh, in_specs=specs, out_specs=whole, check_vma=False))

    def compiled(self, step: Callable[..., Any]) -> str:
        whole, cut = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

        def placed(tree: Any, where: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

        arguments = placed((self.variables["params"], self.opt_state), whole)
        run = jax.jit(step, donate_argnums=(0, 1), out_shardings=whole)
        # As explain compiles for GPUs that are not there.
        options = {"xla_gpu_enable_triton_gemm": False} if self.devices[0].platform == "gpu" else None
        return run.lower(*arguments, placed(self.tokens, cut)).compile(compiler_options=options).as_text()

    def by_jdp(self, options: dict[str, int] | None = None, **arguments: Any) -> str:
        """With the compiler options that jdp sets, or with these."""
        step = jdp.DataParallel(self.model, self.devices).train_step(self.loss, self.tx, **arguments)
        params = self.variables["params"]
        state = jdp.TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, self.opt_state, {}, None)
        with mock.patch("jdp._train.program.compiler_options", lambda *_: options) if options is not None else quiet():
            return jdp.explain(step, state, self.tokens).hlo


def under_backward(module: hlo.Module, collective: collectives.Collective) -> bool:
    """Whether some of the backward pass, by the names that JAX gives, runs while it is under way."""
    instructions = module.computations[collective.computation].by_name
    return any("transpose(jvp" in instructions[name].op_name for name in collective.overlapped)


def figures(text: str, network: Network) -> list[str]:
    module = hlo.parse(text)
    found = collectives.collectives(module)
    total = sum(c.bytes for c in found)
    schedule = estimate.simulate(module, network.chip, lambda c: network.seconds(c.kind, c.bytes, c.group))
    return [
        str(len(found)),
        f"{total / 1e6:.1f}",
        f"{sum(c.bytes for c in found if c.in_flight) / total:.1%}",
        f"{sum(c.bytes for c in found if under_backward(module, c)) / total:.1%}",
        f"{schedule.seconds * 1e3:.2f} ms",
        f"{schedule.exposed_seconds * 1e3:.2f} ms",
    ]


WAYS: dict[str, tuple[bool, dict[str, Any]]] = {  # of jdp: with its compiler options or without, and the arguments
    "jdp, plain": (False, {}),
    "jdp": (True, {}),
    "jdp, reduce_dtype=bfloat16": (True, {"reduce_dtype": jnp.bfloat16}),
    "jdp, shard_optimizer, plain": (False, {"shard_optimizer": True}),
    "jdp, shard_optimizer": (True, {"shard_optimizer": True}),
}


def ways(made: Contenders, options: list[str]) -> dict[str, Callable[[], str]]:
    """What is compared, by name."""
    found: dict[str, Callable[[], str]] = {"hand-written": made.hand_written, "automatic": made.automatic}
    for name, (own, arguments) in WAYS.items():
        found[name] = lambda own=own, arguments=arguments: made.by_jdp(None if own else {}, **arguments)
    for said in options:
        asked = {name: int(value) for name, value in (option.split("=") for option in said.split(","))}
        for name, (own, arguments) in WAYS.items():
            if own:
                found[f"{name}, {said}"] = lambda arguments=arguments, asked=asked: made.by_jdp(asked, **arguments)
    if made.devices[0].platform == "tpu":  # whose compiler takes minutes for each
        return {name: found[name] for name in found if name in ("hand-written", "jdp") or name.startswith("jdp, xla")}
    return found


def rows(arguments: argparse.Namespace) -> Iterator[list[str]]:
    for where, name, shape in (("8 H100", "h100", {"hosts": 1}), ("16 TPU v5e", "v5e", {"shape": "4x4"})):
        if name not in arguments.chips:
            continue
        try:
            devices = jdp.topology(name, **shape)
        except ImportError as error:
            yield [where, str(error), *[""] * (len(COLUMNS) - 2)]
            continue
        made, network = Contenders(devices, arguments.width, arguments.rows, arguments.length), Network.of(devices)
        for by, way in ways(made, arguments.options).items():
            if arguments.only and not by.startswith(tuple(arguments.only)):
                continue
            with quiet():
                text = way()
            yield [where, by, *figures(text, network)]


def write(lines: list[list[str]], arguments: argparse.Namespace) -> None:
    _results.write(
        "overlap",
        "How much of a step's communication is hidden, on machines that are not here",
        f"A transformer of {LAYERS} layers, width {arguments.width}, {arguments.rows} sequences of {arguments.length} "
        f"tokens on each device, bfloat16, AdamW; jax {jax.__version__}, Python {platform.python_version()}. Compiled; "
        "the times are estimated from published figures.",
        _results.table(COLUMNS, lines),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512, help="of the layers (512)")
    parser.add_argument("--rows", type=int, default=16, help="sequences on each device (16)")
    parser.add_argument("--length", type=int, default=256, help="tokens of each (256)")
    parser.add_argument("--chips", nargs="+", default=["h100", "v5e"], help="kinds to compile for (h100 v5e)")
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="NAME=VALUE,...", help="rows of jdp with these compiler options"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WAY", help="only the ways whose names begin so")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md")
    arguments = parser.parse_args()
    lines = []
    for line in rows(arguments):
        lines.append(line)
        print(dict(zip(COLUMNS, line, strict=True)), flush=True)
    if arguments.write:
        write(lines, arguments)


if __name__ == "__main__":
    main()
