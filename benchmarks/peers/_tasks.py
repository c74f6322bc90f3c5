"""The models as all peers see them: names and shapes of layers, parameters and batches in numpy."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RATE, MOMENTUM = 0.02, 0.9  # SGD with momentum is the same formula in every framework; Adam's epsilon is not
VOCABULARY, LENGTH, WIDTH, HEADS = 128, 32, 128, 4
UNEVEN = 13  # rows of the last batch

Layers = dict[str, tuple[str, tuple[int, ...]]]


def _transformer(blocks: int) -> Layers:
    layers: Layers = {"embed": ("embed", (VOCABULARY, WIDTH)), "positions": ("embed", (LENGTH, WIDTH))}
    for i in range(blocks):
        layers |= {
            f"block{i}_norm1": ("norm", (WIDTH,)),
            f"block{i}_qkv": ("dense", (WIDTH, 3 * WIDTH)),
            f"block{i}_mix": ("dense", (WIDTH, WIDTH)),
            f"block{i}_norm2": ("norm", (WIDTH,)),
            f"block{i}_up": ("dense", (WIDTH, 4 * WIDTH)),
            f"block{i}_down": ("dense", (4 * WIDTH, WIDTH)),
        }
    return layers | {"norm": ("norm", (WIDTH,)), "head": ("dense", (WIDTH, VOCABULARY))}


BLOCKS = 3
LAYERS: dict[str, Layers] = {
    "MLP": {"dense1": ("dense", (784, 512)), "dense2": ("dense", (512, 512)), "head": ("dense", (512, 10))},
    "CNN": {
        "conv1": ("conv", (5, 5, 1, 16)),
        "conv2": ("conv", (3, 3, 16, 32)),
        "dense1": ("dense", (7 * 7 * 32, 128)),
        "head": ("dense", (128, 10)),
    },
    "Transformer": _transformer(BLOCKS),
}
Params = dict[str, dict[str, Any]]


class Task(NamedTuple):
    """What all peers do: `batches` of `{"x", "y"}`, over and over, from these parameters."""

    name: str
    params: Params
    batches: list[dict[str, np.ndarray]]

    def batch(self, i: int) -> dict[str, np.ndarray]:
        return self.batches[i % len(self.batches)]

    def uneven(self) -> dict[str, np.ndarray]:
        return {key: value[:UNEVEN] for key, value in self.batches[0].items()}

    def items(self) -> int:
        """Images, or tokens, in a batch."""
        return self.batches[0]["y"].size


def make(name: str, rows: int, batches: int = 4) -> Task:
    rng = np.random.default_rng(0)
    params = {layer: _initial(rng, *what) for layer, what in LAYERS[name].items()}
    x, y = _text(rows * batches) if name == "Transformer" else _digits(rows * batches, flat=name == "MLP")
    cuts = [slice(i * rows, (i + 1) * rows) for i in range(batches)]
    return Task(name, params, [{"x": x[cut], "y": y[cut]} for cut in cuts])


def _initial(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    if kind == "norm":
        return {"scale": np.ones(shape, np.float32), "bias": np.zeros(shape, np.float32)}
    if kind == "embed":
        return {"embedding": rng.normal(0, 0.02, shape).astype(np.float32)}
    kernel = rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32)
    return {"kernel": kernel, "bias": np.zeros(shape[-1], np.float32)}


def _digits(rows: int, flat: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first of MNIST's digits that come with the examples."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    mnist = importlib.import_module("_mnist_data")
    data = mnist.load(mnist.EMBEDDED)
    images = data.train_images[:rows].astype(np.float32) / 255
    return images.reshape(rows, -1) if flat else images[..., None], data.train_labels[:rows].astype(np.int32)


def _text(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Python's own help: each character, and the next."""
    from pydoc_data.topics import topics

    text = "".join(topics.values()).encode("ascii", "ignore")[: rows * LENGTH + 1]
    characters = np.frombuffer(text, np.uint8).astype(np.int32)
    return characters[:-1].reshape(rows, LENGTH), characters[1:].reshape(rows, LENGTH)


def save(task: Task, path: str) -> None:
    arrays: dict[str, Any] = {
        f"params/{layer}/{key}": value for layer, kv in task.params.items() for key, value in kv.items()
    }
    arrays |= {f"batch/{i:03}/{key}": value for i, batch in enumerate(task.batches) for key, value in batch.items()}
    np.savez(path, name=np.array(task.name), **arrays)


def load(path: str) -> Task:
    """Fresh arrays each time: `device_put` may alias them, and donation then takes them away."""
    params: Params = {}
    batches: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        for key in file.files:
            match key.split("/"):
                case ["params", layer, leaf]:
                    params.setdefault(layer, {})[leaf] = file[key]
                case ["batch", i, leaf]:
                    batches.setdefault(i, {})[leaf] = file[key]
        return Task(str(file["name"]), params, list(batches.values()))
