"""Two processes on one mesh of replicas of two devices: each passes its rows, and all is as on one device."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import close, free_port
from meshes import Plain, rows

HERE = pathlib.Path(__file__).parent


@pytest.mark.full
def test_two_processes(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
    port, worker = str(free_port()), str(HERE / "mesh_worker.py")
    logs, started = [tmp_path / f"{i}.log" for i in range(2)], []
    for i, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, worker, str(i), port, str(tmp_path)]
            started.append(subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [one.wait(300) for one in started]
    finally:
        for one in started:
            one.kill()
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(texts)
    assert all("has devices of the processes 0, 1" in text for text in texts)
    found, x, model = [dict(np.load(tmp_path / f"{i}.npz")) for i in range(2)], rows(13), Plain()
    params = model.init(jax.random.key(0), x)["params"]
    apply = lambda p, x: model.apply({"params": p}, x)  # noqa: E731
    close(np.concatenate([one["out"] for one in found]), apply(params, x), 1e-5, 1e-5)
    close(np.concatenate([one["evaluate rows"] for one in found]), apply(params, x), 1e-5, 1e-5)
    losses = {
        "mean": lambda p: (apply(p, x) ** 2).mean(),
        "criterion": lambda p: jnp.sqrt((apply(p, x) ** 2).sum()),
    }
    tx = optax.adam(0.05)
    for name, loss in losses.items():
        mine, opt_state = params, tx.init(params)
        for _ in range(3):
            value, grads = jax.value_and_grad(loss)(mine)
            updates, opt_state = tx.update(grads, opt_state, mine)
            mine = optax.apply_updates(mine, updates)
        for one in found:
            close(one[f"{name} loss"], value, 1e-4)
            close(one["evaluate loss"], losses["mean"](params), 1e-4)
            for path, leaf in jax.tree_util.tree_leaves_with_path(mine):
                close(one[f"{name}{jax.tree_util.keystr(path)}"], leaf, 1e-3, 1e-3)
