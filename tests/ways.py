"""How many files of jdp a call goes through, and how often it changes from one to another; for `test_ways.py`.

python tests/ways.py            prints the ways of a first, an uneven and a known call
python tests/ways.py apply      those of one door, and the files in the order in which they are entered
"""

import collections
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

DOORS = ("apply", "value_and_grad", "train_step")
ROOT = str(pathlib.Path(jdp.__file__).parent)


class Way(NamedTuple):
    """The way of one call."""

    files: int
    changes: int
    path: list[str]  # the files, in the order in which the call comes to them


def way(call: Callable[[], Any]) -> Way:
    """The files of jdp that a call goes through; a change is where the function that runs is in another one."""
    path: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            name = name[len(ROOT) + 1 :]
            if not path or path[-1] != name:
                path.append(name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Way(len({*path}), len(path) - 1, path)


def ways(door: str) -> dict[str, Way]:
    """The ways of a first call (16 rows), an uneven one (13 rows), and a call that is known."""
    model = nn.Dense(3)
    even, uneven = (np.ones((rows, 4), np.float32) for rows in (16, 13))
    variables = model.init(jax.random.key(0), even)

    def loss_fn(variables: Any, batch: Any) -> jax.Array:
        return jnp.mean(model.apply(variables, batch) ** 2)

    dp = jdp.DataParallel(model)
    state: Any = dp.init(jax.random.key(0), even) if door != "train_step" else None
    if door == "apply":
        run: Callable[[Any], Any] = lambda x: dp.apply(state, x)  # noqa: E731
    elif door == "value_and_grad":
        gradient = dp.value_and_grad(loss_fn)
        run = lambda x: gradient(state, x)  # noqa: E731
    else:
        step = dp.train_step(loss_fn, optax.sgd(0.1))
        last = [step.init(variables)]

        def run(x: Any) -> None:
            last[0], _ = step(last[0], x)

    calls = {"first": even, "uneven": uneven, "known": even}
    return {kind: way(lambda x=x: run(x)) for kind, x in calls.items()}


def main(arguments: list[str]) -> None:
    if not arguments:  # each door in a process of its own: what one call has made shortens the way of another
        for door in DOORS:
            subprocess.run([sys.executable, __file__, door, "--short"], check=True)
        return
    jdp.virtual_cpu_devices(8)
    door, found = arguments[0], ways(arguments[0])
    if "--json" in arguments:
        print(json.dumps({kind: one[:2] for kind, one in found.items()}))
        return
    print(f"{door:15}", *(f"{kind}: {one.files} files, {one.changes} changes   " for kind, one in found.items()))
    for kind, one in found.items() if "--short" not in arguments else ():
        print(door, kind, *one.path, sep="\n  ")
        pairs = collections.Counter(zip(one.path, one.path[1:], strict=False))
        print(*(f"  {count:3} {a} -> {b}" for (a, b), count in pairs.most_common()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
