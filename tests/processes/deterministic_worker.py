"""One process of a job that trains with `deterministic=True`; writes what came out, as SHA-256.

Usage: deterministic_worker.py FOLDER [NAME ...], without a name all of OPTIONS.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jdp

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "train")]
import test_deterministic as law  # noqa: E402

jdp.distributed.initialize()
found = {}


def forward(model, v, batch, key):
    """The outputs of `linen_loss`, without its loss."""
    return model.apply(v, batch[0], rngs={"dropout": key}, mutable=["batch_stats"])


def of_all_rows(logits, batch):
    """A loss that needs all rows, of all processes."""
    losses = law.per_row(logits, batch[1])
    return jnp.sqrt((losses**2).mean()) + jax.nn.logsumexp(logits @ logits.T, -1).mean(), {"largest": losses.max()}


OPTIONS = {
    "mlp": {"shard_optimizer": True, "accumulate_steps": 2},
    "synced": {"sync_batch_norm": True},
    "transformer": {},
    "criterion": {"criterion": of_all_rows},
}
for name in sys.argv[2:] or OPTIONS:
    options = OPTIONS[name]
    model = {**law.LINEN, "synced": law.Synced, "criterion": law.MLP}[name]()
    dp = jdp.DataParallel(model, replicas=4)
    loss = forward if name == "criterion" else law.linen_loss
    step = dp.train_step(functools.partial(loss, model), law.TX, deterministic=True, **options)
    state, rows = step.init(law.variables_of(model), key=jax.random.key(2)), []
    for batch in dp.batches((law.X, law.Y), 57, epochs=2):
        state, metrics = step(state, batch)
        rows += metrics.pop("rows", np.zeros(0)).tolist()
    whole = jax.tree.map(lambda x: x.addressable_data(0), (state.params, state.state, metrics))
    found[name] = {"state": law.digest(whole), "rows": np.float32(rows).tobytes().hex()}
    if not options:
        found[name]["optimizer"] = law.digest([x.addressable_data(0) for x in jax.tree.leaves(state.opt_state)])
(pathlib.Path(sys.argv[1]) / f"{jax.process_index()}.json").write_text(json.dumps(found))
