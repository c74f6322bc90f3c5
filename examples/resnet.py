"""Train a small ResNet (Flax Linen) on MNIST, on every device of this machine; stop it at any time, and go on.

    python examples/resnet.py                                  10,000 embedded digits, about a minute on 2 cores
    python examples/resnet.py --checkpoint-dir /tmp/resnet     kill it, start it again: it goes on where it was

BatchNorm sees the whole batch, on however many devices, the uneven last one of an epoch too. With --checkpoint-dir
a run that was killed in the middle ends with the parameters of one that was not, to the last bit (on a GPU
with XLA_FLAGS=--xla_gpu_deterministic_ops=true): compare the SHA-256 that is printed at the end.

Where JAX finds no accelerator, the CPU is split into 4 virtual devices. At the end: the exact accuracy over
all test rows, and a picture of the learning curve and of the digits that the model got wrong.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import _start  # before JAX: it says what comes
import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from _mnist_data import add_arguments, from_arguments
from _picture import picture
from _run import Bar, machine, parse, parser, positive, rate, sha256, shares

import jdp

SETTINGS = ("epochs", "batch_size", "lr", "width", "blocks", "seed", "train_rows", "data_dir")  # a run keeps to these


class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = partial(nn.Conv, self.width, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(conv((3, 3), self.stride)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    width: int
    blocks: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = images[..., None] / 255  # (rows, 28, 28) uint8 -> (rows, 28, 28, 1) float32
        x = nn.Conv(self.width, (3, 3), 2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for i in range(self.blocks):  # twice the channels and half the height and width from each to the next
            x = Block(self.width * 2**i, stride=2 if i else 1)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def arguments() -> argparse.Namespace:
    options = parser(__doc__, picture="resnet.png")
    add = options.add_argument
    add("--epochs", type=positive, default=8, metavar="N")
    add("--batch-size", type=positive, default=126, metavar="N", help="rows in a batch, over all devices")
    add("--lr", type=rate, default=0.2, help="SGD's highest learning rate")
    add("--width", type=positive, default=16, metavar="N", help="channels of the first convolution")
    add("--blocks", type=positive, default=3, metavar="N")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="save the run there, and go on with the one that is there")
    add("--save-every", type=positive, default=50, metavar="N", help="steps from one checkpoint to the next")
    add_arguments(options)
    args = parse(options)
    if args.checkpoint_dir and args.checkpoint_dir.exists() and not args.checkpoint_dir.is_dir():
        options.error(f"argument --checkpoint-dir: {args.checkpoint_dir} is not a folder")
    return args


def main() -> None:
    args = arguments()
    jdp.virtual_cpu_devices(args.devices or 4)  # before JAX first asks for devices; an accelerator is not affected
    devices = jax.devices()[: args.devices]
    data = from_arguments(args)
    rows = len(data.train_labels)
    per_epoch = -(-rows // args.batch_size)
    steps = args.epochs * per_epoch

    model = ResNet(args.width, args.blocks)
    dp = jdp.DataParallel(model, devices)
    schedule = optax.warmup_cosine_decay_schedule(0, args.lr, steps // 10, steps)
    tx = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(schedule, momentum=0.9))

    def loss_fn(variables, batch):
        images, labels = batch
        logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), {}, updates  # {}: there are no metrics beside the loss

    step = dp.train_step(loss_fn, tx, sync_batch_norm=True)
    state = step.init(dp.init(jax.random.key(args.seed), data.train_images[:1]))

    def predict(state: jdp.TrainState) -> np.ndarray:
        variables = {"params": state.params, **state.state}
        parts = np.array_split(data.test_images, 4)
        return np.concatenate([np.asarray(dp.apply(variables, images)).argmax(axis=-1) for images in parts])

    # All that a run needs to go on; NaN is what is still to come.
    run = {"state": state, "losses": np.full(steps, np.nan), "accuracies": np.full(args.epochs, np.nan)}
    settings = {name: str(vars(args)[name]) for name in SETTINGS}
    manager, done = None, 0
    if args.checkpoint_dir:
        keep = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
        manager = ocp.CheckpointManager(args.checkpoint_dir.resolve(), options=keep)
        done = manager.latest_step() or 0  # of the complete ones; what was cut short is cleared away
    if done:
        found = manager.restore(done, args=ocp.args.Composite(settings=ocp.args.JsonRestore())).settings
        if found != settings:
            sys.exit(f"resnet: {args.checkpoint_dir} holds a run with {found}, and this one has {settings}")
        run = manager.restore(done, args=ocp.args.Composite(run=ocp.args.StandardRestore(run))).run
    state, losses, accuracies = run["state"], run["losses"], run["accuracies"]
    predicted = predict(state) if done else np.empty(0, int)  # after the last epoch

    def draw(what: str) -> str:
        title, tested = f"ResNet on {machine(devices)}: {what}", len(predicted)
        digits = data.test_images[:tested], data.test_labels[:tested], predicted
        ended = accuracies[~np.isnan(accuracies)]
        return _start.save(args.picture, lambda: picture(title, bar.losses, ended, *digits, per_epoch))

    print(f"devices   {machine(devices)}")
    last = rows % args.batch_size or args.batch_size
    print(f"a batch   {args.batch_size} rows: {shares(args.batch_size, len(devices))}")
    print(f"the last  {last} rows: {shares(last, len(devices))}")
    print(f"digits    {rows:,} for training, {len(data.test_labels):,} for the test")
    if done:
        print(f"going on  after step {done} of {steps}, from {args.checkpoint_dir}")

    with Bar(steps, "images", draw, losses[:done]) as bar:
        train = data.train_images, data.train_labels
        batches = dp.batches(train, args.batch_size, seed=args.seed, epochs=args.epochs, start=done)
        for number, batch in enumerate(batches, done + 1):
            state, metrics = step(state, batch)
            bar.step(metrics["loss"], sum(batch[0].sizes))
            epoch, rest = divmod(number, per_epoch)
            if not rest:
                bar.pause()
                predicted = predict(state)
                accuracies[epoch - 1] = accuracy = np.mean(predicted == data.test_labels)
                loss = np.mean(bar.losses[-per_epoch:])
                bar.print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  test accuracy {accuracy:.2%}  {bar.rate()}")
            if manager and (number % args.save_every == 0 or number == steps):
                bar.pause()
                losses[:number] = bar.losses
                run = ocp.args.StandardSave({"state": state, "losses": losses, "accuracies": accuracies})
                # Copies the state, then writes while the next steps run.
                manager.save(number, args=ocp.args.Composite(run=run, settings=ocp.args.JsonSave(settings)))
    if manager:
        manager.close()  # waits for the last one

    right = np.sum(predicted == data.test_labels)
    print(f"test accuracy {right / len(predicted):.2%}: {right:,} of {len(predicted):,} digits right")
    print(f"parameters SHA-256 {sha256(state.params)}")
    print(draw(f"{right / len(predicted):.2%} of the test digits right"))


if __name__ == "__main__":
    main()
