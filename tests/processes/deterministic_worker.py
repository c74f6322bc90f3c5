"""One process of a job that trains with `deterministic=True`; writes what came out, as SHA-256."""

import functools
import json
import pathlib
import sys

import jax
import numpy as np

import jdp

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "train")]
import test_deterministic as law  # noqa: E402

jdp.distributed.initialize()
found = {}
OPTIONS = {
    "mlp": {"shard_optimizer": True, "accumulate_steps": 2},
    "synced": {"sync_batch_norm": True},
    "transformer": {},
}
for name, options in OPTIONS.items():
    model = {**law.LINEN, "synced": law.Synced}[name]()
    dp = jdp.DataParallel(model, replicas=4)
    step = dp.train_step(functools.partial(law.linen_loss, model), law.TX, deterministic=True, **options)
    state, rows = step.init(law.variables_of(model), key=jax.random.key(2)), []
    for batch in dp.batches((law.X, law.Y), 57, epochs=2):
        state, metrics = step(state, batch)
        rows += metrics.pop("rows").tolist()
    whole = jax.tree.map(lambda x: x.addressable_data(0), (state.params, state.state, metrics))
    found[name] = {"state": law.digest(whole), "rows": np.float32(rows).tobytes().hex()}
    if not options:
        found[name]["optimizer"] = law.digest([x.addressable_data(0) for x in jax.tree.leaves(state.opt_state)])
(pathlib.Path(sys.argv[1]) / f"{jax.process_index()}.json").write_text(json.dumps(found))
