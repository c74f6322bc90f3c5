"""Train a CNN (Flax Linen) on MNIST by Ray Train: kill a worker, take a node away, and the run goes on.

    pip install -e ".[examples,ray]"
    python examples/ray_mnist.py --storage /tmp/runs                    two workers, on CPUs
    python examples/ray_mnist.py --storage /shared --gpus --workers 8   a GPU each, on the machines of a cluster
    python examples/ray_mnist.py --storage /shared --min-workers 1      goes on with one where there is no room for two

Of Ray the loop has nothing but `ray=True`. The same `--name` once more goes on with the run of that name. A batch and
its order are functions of the seed and the step, and each worker takes its part of the batch: a run that is disturbed
ends as one that is not, to the last bit if it has as many workers. Compare the SHA-256 that is printed at the end.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _mnist_data import add_arguments, from_arguments, positive
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def loop(config: dict[str, Any]) -> None:
    """What each worker does. JAX starts here, when Ray has said which devices the worker has."""
    import flax.linen as nn
    import jax
    import numpy as np
    import optax
    from _run import machine, sha256

    import jdp

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, images: jax.Array) -> jax.Array:
            x = images[..., None] / 255  # (rows, 28, 28) uint8 -> (rows, 28, 28, 1) float32
            x = nn.max_pool(nn.relu(nn.Conv(16, (5, 5))(x)), (2, 2), (2, 2))
            x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
            x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
            return nn.Dense(10)(x)

    def batches(steps: range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This worker's part of the batches of these steps."""
        rows, size = len(data.train_labels), args.batch_size
        for step in steps:
            epoch, number = divmod(step, -(-rows // size))
            order = np.random.default_rng((args.seed, epoch)).permutation(rows)[number * size : (number + 1) * size]
            mine = np.array_split(order, jax.process_count())[jax.process_index()]
            yield data.train_images[mine], data.train_labels[mine]

    jdp.distributed.initialize()
    args = argparse.Namespace(**config)
    data, first = from_arguments(args), jax.process_index() == 0
    steps = args.epochs * -(-len(data.train_labels) // args.batch_size)
    dp = jdp.DataParallel(model := CNN())

    def loss_fn(variables, batch):
        images, labels = batch
        logits = model.apply(variables, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step = dp.train_step(loss_fn, optax.adam(2e-3))
    state = step.init(dp.init(jax.random.key(args.seed), data.train_images[:1]))
    with jdp.Checkpointer("checkpoints", every=args.save_every, ray=True) as checkpointer:
        state, _ = checkpointer.restore(state)
        todo = range(int(state.step), steps)
        if first:
            devices = f"{machine(jax.devices())} in {jax.process_count()} worker(s)"
            print(f"{devices}: steps {todo.start} to {steps}", flush=True)
        for number, batch in zip(todo, dp.prefetch(batches(todo)), strict=True):
            state, metrics = step(state, batch)
            checkpointer.save(number + 1, state)  # in every step: it acts on Ray's notice, too
            if first and (number + 1) % 20 == 0:
                print(f"step {number + 1}  loss {float(metrics['loss']):.4f}", flush=True)
    params = jax.device_get(state.params)
    if first:
        right = (model.apply({"params": params}, data.test_images).argmax(axis=-1) == data.test_labels).mean()
        print(f"test accuracy {right:.2%}; parameters SHA-256 {sha256(params)}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--storage", type=Path, required=True, metavar="DIR", help="where the run is kept, seen by all machines")
    add("--name", default="ray_mnist", help="of the run (default: ray_mnist)")
    add("--workers", type=positive, default=2, metavar="N")
    add("--min-workers", type=positive, metavar="N", help="go on with as few (default: with all)")
    add("--gpus", action="store_true", help="a GPU for each worker")
    add("--max-failures", type=int, default=3, metavar="N", help="starts after a failure; a node taken away is none")
    add("--epochs", type=positive, default=2, metavar="N")
    add("--batch-size", type=positive, default=126, metavar="N", help="rows in a batch, over all workers")
    add("--save-every", type=positive, default=20, metavar="N", help="steps from one checkpoint to the next")
    add("--seed", type=int, default=0, metavar="N")
    add_arguments(options)
    args = options.parse_args()
    from_arguments(args)  # what is wrong with the data is told here; and it is fetched once
    args.download = False
    workers = (args.min_workers, args.workers) if args.min_workers else args.workers
    result = JaxTrainer(
        loop,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=args.gpus),
        run_config=RunConfig(
            name=args.name,
            storage_path=str(args.storage.resolve()),
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
    ).fit()
    print(f"newest checkpoint {result.checkpoint.path if result.checkpoint else 'none'}")


if __name__ == "__main__":
    main()
