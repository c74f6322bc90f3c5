"""Makes the vectors in this folder from torch itself: `python tests/golden/make_golden.py` where torch is installed."""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np
from golden import torch_side


def golden() -> dict[str, object]:
    """The content of every file, by name."""
    cases = {}
    for k, (model, rows, n) in enumerate(torch_side.CASES):
        cases |= {
            f"{model}-{rows}-{n}/{key}": value for key, value in torch_side.run_case(model, rows, n, seed=k).items()
        }
    return {
        "chunk_sizes.json": torch_side.chunk_table(),
        "structures.json": torch_side.structures(),
        "messages.json": torch_side.messages(),
        "cases.npz": cases,
        "training.npz": torch_side.run_training(seed=100),
    }


if __name__ == "__main__":
    for name, content in golden().items():
        path = HERE / name
        if name.endswith(".npz"):
            np.savez_compressed(path, **content)
        else:
            path.write_text(torch_side.dumps(content))
        print(f"{name}: {path.stat().st_size / 1024:.1f} KiB")
