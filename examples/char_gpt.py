"""Train a small GPT (Flax NNX) on the text of Python's own help, character by character, on every device here.

    python examples/char_gpt.py                                                     under 2 minutes on 2 cores
    python examples/char_gpt.py --width 256 --layers 6 --dropout 0.3 --steps 1000   larger, for a GPU or a TPU
    python examples/char_gpt.py --shard-params --scan --width 2048 --layers 24      no device holds all parameters
    jdp launch -n 4 examples/char_gpt.py                                            four processes

Where JAX finds no accelerator, the CPU is split into 4 virtual devices (with `jdp launch` as it says). At the end: the
loss on held-out text in bits per character, a few lines that the model wrote, and a picture of the learning curve.

A run that goes on, on other numbers of devices and processes, to the same bits (compare the SHA-256 at the end):

    jdp launch -n 4 --min-processes 1 --replicas 8 --max-restarts 9 \\
        examples/char_gpt.py --checkpoints DIR --replicas 8 --deterministic
"""

from pathlib import Path
from pydoc_data.topics import topics

import _start  # before JAX: it says what comes
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _curve import curve
from _run import Bar, machine, one_process_speaks, parse, parser, positive, probability, rate, sha256, shares
from flax import nnx

import jdp

BFLOAT16 = jnp.bfloat16  # what layers compute in; their parameters are float32


def pieces(context: int) -> tuple[np.ndarray, list[str]]:
    """`(pieces, context + 1)` int32: whole lines, as many as fit; 0 is the start, and the padding. And the alphabet."""
    # Each paragraph once: topics quote each other, and what is held out must not be among the training text.
    text = "\n\n".join(dict.fromkeys(p for topic in topics.values() for p in topic.split("\n\n")))
    alphabet = ["", *sorted(set(text))]
    number = {character: i for i, character in enumerate(alphabet)}
    rows: list[list[int]] = [[0]]
    for line in text.splitlines(keepends=True):
        if len(rows[-1]) + len(line) > context + 1:
            rows.append([0])
        rows[-1] += [number[character] for character in line[:context]]
    return np.array([row + [0] * (context + 1 - len(row)) for row in rows], np.int32), alphabet


def rotary(x: jax.Array) -> jax.Array:
    """Su et al., RoFormer (2021): turns `(rows, length, heads, size)` by angles that grow along the length."""
    angles = jnp.arange(x.shape[1])[:, None, None] * 1000 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, dropout: float, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, dtype=BFLOAT16, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, dtype=BFLOAT16, rngs=rngs)
        self.mix = nnx.Linear(width, width, dtype=BFLOAT16, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=BFLOAT16, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=BFLOAT16, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=BFLOAT16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = (y.reshape(heads) for y in jnp.split(self.qkv(self.norm1(x)), 3, axis=-1))
        y = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True).reshape(x.shape)
        x += self.dropout(self.mix(y), deterministic=not train)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))), deterministic=not train)


def stacked(layers: int, width: int, heads: int, dropout: float, rngs: nnx.Rngs) -> Block:
    """So many blocks as one, whose arrays have an axis of layers in front, for a scan to run over."""
    make = nnx.vmap(lambda rngs: Block(width, heads, dropout, rngs))
    return nnx.split_rngs(splits=layers)(make)(rngs)


class GPT(nnx.Module):
    def __init__(
        self, alphabet: int, width: int, layers: int, heads: int, dropout: float, scan: bool, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.Embed(alphabet, width, dtype=BFLOAT16, embedding_init=nnx.initializers.normal(1), rngs=rngs)
        if scan:
            self.blocks = stacked(layers, width, heads, dropout, rngs)
        else:
            self.blocks = nnx.List([Block(width, heads, dropout, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=BFLOAT16, rngs=rngs)
        self.head = nnx.Linear(width, alphabet, dtype=BFLOAT16, rngs=rngs)

    def __call__(self, text: jax.Array, train: bool = False) -> jax.Array:
        x = self.embed(text)
        if isinstance(self.blocks, Block):
            x = nnx.scan(lambda block, x: block(x, train), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x, train)
        return self.head(self.norm(x)).astype(jnp.float32)  # (rows, length, alphabet); a softmax wants float32


def loss_fn(model: nnx.Module, text: jax.Array, train: bool = True) -> jdp.Mean:
    """The mean over characters, in bits. Pieces differ in length, so that a mean over pieces would be another."""
    logits, targets = model(text[:, :-1], train=train), text[:, 1:]
    bits = optax.softmax_cross_entropy_with_integer_labels(logits, targets) / np.log(2)
    real = targets > 0
    return jdp.Mean(jnp.sum(bits * real), jnp.sum(real))


@nnx.jit
def write(model: GPT, text: jax.Array, place: jax.Array, key: jax.Array) -> jax.Array:
    """The texts with one more character each, at `place`."""
    logits = model(text)[:, place - 1]
    return text.at[:, place].set(jax.random.categorical(key, logits / 0.7))


def arguments():
    options = parser(__doc__, picture="char_gpt.png")
    add = options.add_argument
    add("--steps", type=positive, default=320, metavar="N")
    add("--batch-size", type=positive, default=16, metavar="N", help="pieces in a batch, over all devices")
    add("--accumulate", type=positive, default=2, metavar="N", help="microbatches, one after the other in memory")
    add("--lr", type=rate, default=5e-3, help="AdamW's highest learning rate")
    add("--context", type=positive, default=160, metavar="N", help="characters in a piece")
    add("--width", type=positive, default=128, metavar="N")
    add("--layers", type=positive, default=3, metavar="N")
    add("--heads", type=positive, default=4, metavar="N")
    add("--dropout", type=probability, default=0.1)
    add("--scan", action="store_true", help="the layers as one, run by a scan: compiles faster")
    add("--shard-params", action="store_true", help="cut the parameters over the devices, too (ZeRO-3)")
    text = "cut a batch into R chunks on any number of devices (default: one for each)"
    add("--replicas", type=positive, metavar="R", help=text)
    add("--deterministic", action="store_true", help="the same bits on any number of devices that divides the replicas")
    add("--checkpoints", type=Path, metavar="DIR", help="save the run there, and go on with the one that is there")
    add("--save-every", type=positive, default=20, metavar="N", help="steps from one checkpoint to the next")
    args = parse(options)
    if args.width % (2 * args.heads):
        options.error(f"argument --width: {args.width} is no multiple of twice the {args.heads} heads")
    return args


def main() -> None:
    args = arguments()
    jdp.distributed.initialize()  # finds the other processes, if there are any
    if not jax.distributed.is_initialized():
        jdp.virtual_cpu_devices(args.devices or 4)  # before JAX first asks for devices; an accelerator is not affected
    one_process_speaks(args)
    devices = jax.devices()[: args.devices]  # of all processes
    rng = np.random.default_rng(args.seed)
    text, alphabet = pieces(args.context)
    held_out, text = np.split(rng.permutation(text), [len(text) // 10])
    counts = np.bincount(text[text > 0], minlength=len(alphabet)) + 1
    baseline = -np.log2(counts / counts.sum())[held_out[held_out > 0]].mean()

    def model() -> GPT:
        rngs = nnx.Rngs(args.seed)
        return GPT(len(alphabet), args.width, args.layers, args.heads, args.dropout, args.scan, rngs)

    # Given the function, it makes each part of the model where that part lives.
    made = model if args.shard_params else model()
    dp = jdp.DataParallel(made, devices, shard_params=args.shard_params, replicas=args.replicas)
    schedule = optax.warmup_cosine_decay_schedule(0, args.lr, args.steps // 10, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1), optax.adamw(schedule, b2=0.99, weight_decay=0.1))
    step = dp.train_step(
        loss_fn,
        tx,
        accumulate_steps=args.accumulate,
        shard_optimizer=True,
        shard_params=args.shard_params,
        reduce_dtype=jnp.bfloat16,
        deterministic=args.deterministic,
    )

    graph = nnx.graphdef(dp.module)

    def held_out_part(weights: nnx.State, text: jax.Array) -> jdp.Mean:
        return loss_fn(nnx.merge(graph, weights), text, train=False)

    def held_out_loss() -> float:
        """Over the held-out text, of which each device of each process reads its part."""
        (parts,) = dp.batches(held_out, len(held_out))
        loss = jdp.reduce_add(jdp.parallel_apply(held_out_part, nnx.state(dp.module), parts))
        return float(loss.total / loss.count)

    print(f"devices   {machine(devices)} in {jax.process_count()} process(es)")
    shown = shares(args.batch_size, args.replicas or len(devices))
    print(f"a batch   {args.batch_size} pieces of up to {args.context} characters: {shown}")
    print(f"text      {len(text):,} pieces for training, {len(held_out):,} held out; {len(alphabet) - 1} characters")
    for name, size in (("model", step.parameter_bytes()), ("optimizer", step.optimizer_bytes())):
        each, whole = size.cut + size.whole, size.cut * len(devices) + size.whole
        print(f"{name:9} {each / 1e6:.2f} MB on each device; uncut it would be {whole / 1e6:.2f} MB")

    run = {"losses": [], "held out": {}}  # by step; beside the weights it is all that a run needs to go on
    trained = {"model": dp.module, "optimizer": step.optimizer}
    if args.checkpoints:
        checkpointer = jdp.Checkpointer(args.checkpoints, every=args.save_every)
        _, found = checkpointer.restore(trained)  # in place
        run = found or run
    done, bits = len(run["losses"]), run["held out"]
    if done:
        print(f"going on  after step {done} of {args.steps}, from {args.checkpoints}")

    def picture(what: str) -> str:
        title, points = f"A character GPT on {machine(devices)}: {what}", {int(k): v for k, v in bits.items()}
        baseline_of = ("frequencies alone", baseline)
        return _start.save(args.picture, lambda: curve(title, bar.losses, points, baseline_of, "bits per character"))

    every = -(-args.steps // 8)  # the held-out loss, eight times
    with Bar(args.steps, "pieces", picture, run["losses"]) as bar:
        batches = dp.batches(text, args.batch_size, seed=args.seed, start=done, epochs=None, drop_last=True)
        for number, batch in zip(range(done + 1, args.steps + 1), batches, strict=False):
            metrics = step(batch)
            bar.step(metrics["loss"], args.batch_size)
            if number % every == 0 or number == args.steps:
                bar.pause()
                bits[str(number)] = held_out_loss()
                loss = np.mean(bar.losses[-every:])
                told = f"{loss:.3f}, held out {bits[str(number)]:.3f}"
                bar.print(f"step {number}   bits per character: {told}   {bar.rate()}")
            if args.checkpoints:
                bar.read()
                checkpointer.save(number, trained, data={"losses": bar.losses, "held out": bits})
    if args.checkpoints:
        checkpointer.close()  # waits for the last one

    last = bits[str(args.steps)]
    print(f"held out: {last:.3f} bits per character, where the characters' frequencies alone give {baseline:.3f}")
    written = jnp.zeros((4, args.context + 1), jnp.int32)
    for place in range(1, args.context + 1):
        written = write(dp.module, written, place, jax.random.fold_in(jax.random.key(args.seed), place))
    for row in np.asarray(written):
        print("-" * 80, "".join(alphabet[i] for i in row).strip(), sep="\n")
    print(f"parameters SHA-256 {sha256(nnx.state(dp.module, nnx.Param))}")
    print(picture(f"{last:.2f} bits per character"))


if __name__ == "__main__":
    main()
