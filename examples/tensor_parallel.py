"""Train a small GPT (Flax Linen) whose heads and MLP are cut over devices, on replicas that are groups of devices.

    python examples/tensor_parallel.py                           about a minute on 2 cores
    python examples/tensor_parallel.py --meshes 2x2 4x1 --steps 40

It learns to add: its text is sums like `27+58=85`, character by character. On 4 x 2 devices four replicas have two
devices each, and each device has half of the heads. The run is saved after half of its steps, and goes on with 2 x 4
devices: two replicas of four devices, each with a quarter of the heads. Then one device makes all steps again, in plain
JAX, and the losses of both are compared. The last batch of an epoch has 7 rows, which neither 4 nor 2 divides.

Where JAX finds no accelerator, the CPU is split into virtual devices.
"""

import argparse
import math
import tempfile
from functools import partial

import _start  # noqa: F401  before JAX: it says what comes
import flax.linen as nn
import jax
import numpy as np
import optax
from _run import natural, positive, shares
from jax.sharding import Mesh

import jdp

ALPHABET = " +0123456789="
ROWS, BATCH, SUMS = 151, 24, 5  # of the text, of a batch, in a row; the last batch of an epoch has 7 rows
WIDTH, HEADS, LAYERS = 64, 8, 2


def cut(*axes: str | None):
    """Makes a parameter whose axes are cut over the axes of the mesh that are named; None is an axis left whole."""
    return nn.with_partitioning(nn.initializers.lecun_normal(), axes)


class Block(nn.Module):
    """Attention and an MLP. Of each the first layer is cut by its outputs, and the second by its inputs (Megatron).

    So each device computes its own heads and its own part of the MLP, and XLA adds up what the devices of a replica
    give, twice in a block.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        outputs, inputs = cut(None, "model"), cut("model", None)
        dense, heads = partial(nn.Dense, use_bias=False), (*x.shape[:2], HEADS, WIDTH // HEADS)
        y = nn.LayerNorm()(x)
        q, k, v = (dense(WIDTH, kernel_init=outputs, name=name)(y).reshape(heads) for name in ("q", "k", "v"))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x += dense(WIDTH, kernel_init=inputs, name="mix")(y)
        y = dense(4 * WIDTH, kernel_init=outputs, name="up")(nn.LayerNorm()(x))
        return x + dense(WIDTH, kernel_init=inputs, name="down")(nn.gelu(y))


class GPT(nn.Module):
    """It says, for each character of `(rows, length)`, which one comes next."""

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(len(ALPHABET), WIDTH)(text)
        x += self.param("places", nn.initializers.normal(0.02), (text.shape[1], WIDTH))
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(len(ALPHABET))(nn.LayerNorm()(x))


def sums(rng: np.random.Generator) -> np.ndarray:
    """`(ROWS, characters)` int32: each row is so many sums, one after the other."""
    pairs = rng.integers(10, 50, (ROWS, SUMS, 2))
    text = ["".join(f" {a}+{b}={a + b}" for a, b in row) for row in pairs]
    return np.array([[ALPHABET.index(character) for character in row] for row in text], np.int32)


def loss_fn(variables, text: jax.Array) -> jax.Array:  # sees the rows of one replica; returns their mean
    logits = GPT().apply(variables, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def check_shards(tree, mesh: Mesh) -> tuple[int, int]:
    """Returns the numbers in a tree, and how many of them one device has.

    Raises:
        AssertionError: a device has more of an annotated array than its part.
    """
    is_box = lambda x: isinstance(x, nn.Partitioned)  # noqa: E731  what with_partitioning puts a parameter into
    for path, box in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        if is_box(box):
            over = [mesh.shape[name] if name else 1 for name in box.names]
            part = tuple(size // n for size, n in zip(box.value.shape, over, strict=True))
            for shard in box.value.addressable_shards:
                found = f"{jax.tree_util.keystr(path)} {shard.data.shape} on {shard.device}"
                assert shard.data.shape == part, f"{found}, and its part is {part}"
    arrays = jax.tree.leaves(tree)
    return sum(x.size for x in arrays), sum(x.addressable_data(0).size for x in arrays)


def of_one_device(tx: optax.GradientTransformation, key: jax.Array, batches: list[np.ndarray]) -> list[float]:
    """The losses of the same steps on one device and the whole batch, without jdp."""
    params = GPT().init(key, batches[0][:1, :-1])["params"]
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, text):
        loss, grads = jax.value_and_grad(lambda params: loss_fn({"params": params}, text))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for text in batches:
        params, opt_state, loss = step(params, opt_state, text)
        losses.append(float(loss))
    return losses


def mesh_sizes(text: str) -> tuple[int, int]:
    replicas, _, model = text.partition("x")
    sizes = positive(replicas), positive(model)
    if HEADS % sizes[1]:
        raise argparse.ArgumentTypeError(f"{text}: {HEADS} heads cannot be cut over {model} devices")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=positive, default=84, metavar="N")
    help_ = "replicas x devices of each, for the first half of the steps and for the second (default: 4x2 2x4)"
    add("--meshes", type=mesh_sizes, nargs=2, default=[(4, 2), (2, 4)], metavar="RxM", help=help_)
    add("--seed", type=natural, default=0, metavar="N")
    args = parser.parse_args()
    most = max(map(math.prod, args.meshes))
    jdp.virtual_cpu_devices(most)  # before JAX first asks for devices; an accelerator is not affected
    if len(jax.devices()) < most:
        parser.error(f"argument --meshes: they need {most} devices, here are {len(jax.devices())}; JAX_PLATFORMS=cpu?")

    text, key = sums(np.random.default_rng(args.seed)), jax.random.key(args.seed)
    epoch = [text[i : i + BATCH] for i in range(0, ROWS, BATCH)]
    batches = [epoch[i % len(epoch)] for i in range(args.steps)]
    tx, losses = optax.adam(3e-3), []

    with tempfile.TemporaryDirectory() as folder:
        for part, sizes in enumerate(args.meshes, 1):
            mesh = jax.make_mesh(sizes, ("data", "model"), devices=jax.devices()[: math.prod(sizes)])
            dp = jdp.DataParallel(GPT(), mesh)  # "data" counts the replicas
            step = dp.train_step(loss_fn, tx)
            # The model is made in parts, each on its device; so is what the checkpoint restores.
            with jdp.Checkpointer(folder) as checkpointer:
                state, _ = checkpointer.restore(step.init(dp.init(key, text[:1, :-1])))
                done, end = int(state.step), args.steps * part // 2
                print(f"mesh      {sizes[0]} replicas of {sizes[1]} {mesh.devices.flat[0].device_kind} devices")
                print(f"a batch   {BATCH} rows: {shares(BATCH, sizes[0])}; the last of an epoch", end=" ")
                print(f"{len(epoch[-1])} rows: {shares(len(epoch[-1]), sizes[0])}")
                for name, tree in (("model", state.params), ("optimizer", state.opt_state)):
                    whole, each = check_shards(tree, mesh)
                    print(f"{name:9} {whole:,} numbers, of which each device has {each:,}")
                print(f"going on  after step {done} of {args.steps}" if done else "begins    with new parameters")
                for number in range(done + 1, end + 1):
                    state, metrics = step(state, batches[number - 1])
                    losses.append(float(metrics["loss"]))
                    if number % len(epoch) == 0 or number == end:
                        print(f"step {number:3}  loss {losses[-1]:.4f}", flush=True)
                check_shards((state.params, state.opt_state), mesh)
                checkpointer.save(end, state)

    alone = of_one_device(tx, key, batches)
    np.testing.assert_allclose(losses, alone, rtol=1e-3)
    difference = np.max(np.abs(np.array(losses) / alone - 1))
    print(f"one device, in plain JAX, has the same {len(alone)} losses, up to {difference:.0e} of their values")


if __name__ == "__main__":
    main()
