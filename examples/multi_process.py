"""Train a CNN (Flax Linen) on MNIST in one process or in many, with the same numbers; stop it at any time, and go on.

    python examples/multi_process.py                                            one process
    jdp launch -n 2 examples/multi_process.py                                   two on this machine
    jdp launch -n 4 --max-restarts 3 examples/multi_process.py --checkpoints D  four; kill one, and they go on

A batch, its order and its dropout are functions of the seed and the step; each process takes its own part of the batch.
So the numbers are the same on however many processes and devices, but for the rounding of sums (which grows: after 160
steps a few of the 2,000 test digits fall otherwise), and a run may go on with another number of them than it had.
On the same number it ends with the same parameters to the last bit (on a GPU with
XLA_FLAGS=--xla_gpu_deterministic_ops=true), killed or not: compare the SHA-256 that is printed at the end.

At the end: the exact accuracy over all test rows, and a picture of the learning curve.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import _start
import flax.linen as nn
import jax
import numpy as np
import optax
from _curve import curve
from _mnist_data import MNIST, add_arguments, from_arguments
from _run import machine, natural, one_process_speaks, parse, positive, rate, sha256

import jdp

SETTINGS = ("epochs", "batch_size", "lr", "seed", "train_rows", "data_dir")  # a run keeps to these


class CNN(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = images[..., None] / 255  # (rows, 28, 28) uint8 -> (rows, 28, 28, 1) float32
        x = nn.relu(nn.Conv(16, (5, 5))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(128)(x))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(10)(x)


class Batch(NamedTuple):
    images: np.ndarray
    labels: np.ndarray
    places: np.ndarray  # each row's number in the whole run, of which its dropout is a function


def own_part(rows: np.ndarray) -> np.ndarray:
    """This process's part of the rows: together all have all of them, in order."""
    return np.array_split(rows, jax.process_count())[jax.process_index()]


def batches(data: MNIST, size: int, seed: int, steps: range) -> Iterator[Batch]:
    """This process's part of the batches of these steps."""
    rows = len(data.train_labels)
    for step in steps:
        epoch, number = divmod(step, -(-rows // size))
        places = own_part(np.arange(number * size, min((number + 1) * size, rows)))
        order = np.random.default_rng((seed, epoch)).permutation(rows)[places]
        yield Batch(data.train_images[order], data.train_labels[order], epoch * rows + places)


def test_batches(data: MNIST, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This process's part of the test rows. Another may have a batch more or less: `dp.prefetch` takes care."""
    mine = own_part(np.arange(len(data.test_labels)))
    for start in range(0, len(mine), size):
        rows = mine[start : start + size]
        yield data.test_images[rows], data.test_labels[rows]


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--epochs", type=positive, default=2, metavar="N")
    add("--batch-size", type=positive, default=126, metavar="N", help="rows in a batch, over all processes")
    add("--lr", type=rate, default=2e-3, help="Adam's learning rate")
    add("--seed", type=natural, default=0, metavar="N")
    add("--checkpoints", type=Path, metavar="DIR", help="save the run there, and go on with the one that is there")
    add("--save-every", type=positive, default=20, metavar="N", help="steps from one checkpoint to the next")
    add("--picture", type=Path, default=Path("multi_process.png"), metavar="PATH", help="default: multi_process.png")
    add_arguments(options)
    return parse(options)


def main() -> None:
    args = arguments()
    jdp.distributed.initialize()  # finds the other processes, if there are any; all else is as with one
    one_process_speaks(args)
    if missing := _start.no_picture():  # the run goes on
        print(missing)
    begin = time.perf_counter()
    data = from_arguments(args)
    rows = len(data.test_labels)
    per_epoch = -(-len(data.train_labels) // args.batch_size)
    steps = args.epochs * per_epoch

    model = CNN()
    dp = jdp.DataParallel(model)  # on all devices of all processes

    def loss_fn(variables, batch):
        def logits(image, place):  # of one row, with a dropout mask of its own, wherever it is
            key = jax.random.fold_in(jax.random.key(args.seed), place)
            return model.apply(variables, image[None], train=True, rngs={"dropout": key})[0]

        outputs = jax.vmap(logits)(batch.images, batch.places)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, batch.labels).mean()

    def test_sums(variables, images, labels):
        logits = model.apply(variables, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": losses.sum(), "right": (logits.argmax(axis=-1) == labels).sum()}

    def test(state: jdp.TrainState) -> dict[str, float]:
        """The sums over the test rows of all processes."""
        variables = {"params": state.params}
        parts = (jdp.parallel_apply(test_sums, variables, batch) for batch in dp.prefetch(test_batches(data, 250)))
        sums = [jdp.reduce_add(part) for part in parts]
        return {name: sum(s[name].item() for s in sums) for name in ("loss", "right")}

    step = dp.train_step(loss_fn, optax.adam(args.lr), check_replicas=100)
    state = step.init(dp.init(jax.random.key(args.seed), data.train_images[:1]))

    run = {"settings": {name: str(vars(args)[name]) for name in SETTINGS}, "losses": [], "tests": {}}
    if args.checkpoints:
        checkpointer = jdp.Checkpointer(args.checkpoints, every=args.save_every)
        state, found = checkpointer.restore(state)
        if found and found["settings"] != run["settings"]:
            sys.exit(f"{args.checkpoints} holds a run with {found['settings']}, and this one has {run['settings']}")
        run = found or run
    losses, tests = run["losses"], run["tests"]
    done = int(state.step)

    print(f"devices   {machine(jax.devices())} in {jax.process_count()} process(es)")
    print(f"digits    {len(data.train_labels):,} for training, {rows:,} for the test")
    if done:
        print(f"going on  after step {done} of {steps}, from {args.checkpoints}")

    todo, told = range(done, steps), time.perf_counter()
    for number, batch in zip(todo, dp.prefetch(batches(data, args.batch_size, args.seed, todo)), strict=True):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))  # of all rows, and so the same in every process
        if time.perf_counter() - told > 5:  # seconds without a word
            told = time.perf_counter()
            print(f"step {number + 1}/{steps}  loss {losses[-1]:.4f}", flush=True)
        epoch, rest = divmod(number + 1, per_epoch)
        if not rest:
            tests[str(number + 1)] = sums = test(state)
            loss, accuracy = np.mean(losses[-per_epoch:]), sums["right"] / rows
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  test accuracy {accuracy:.2%}", flush=True)
        if args.checkpoints:
            checkpointer.save(number + 1, state, data=run)  # in every step: it ends the job after a SIGTERM, too
    if args.checkpoints:
        checkpointer.close()  # waits for the last one

    sums = tests[str(steps)]
    accuracy = sums["right"] / rows
    print(f"test accuracy {accuracy:.2%}: {sums['right']:,} of {rows:,} digits right; loss {sums['loss'] / rows:.4f}")
    print(f"parameters SHA-256 {sha256(state.params)}")
    title = f"MNIST on {machine(jax.devices())}: {accuracy:.2%} of the test digits right"
    held_out = {int(number): s["loss"] / rows for number, s in tests.items()}
    picture = _start.save(args.picture, lambda: curve(title, losses, held_out, ("guessing", np.log(10)), "loss"))
    print(f"{picture}; {time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
