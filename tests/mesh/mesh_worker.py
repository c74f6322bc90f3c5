"""One of two processes with four devices each, on a mesh of 4 replicas of 2 devices; argv: number, port, folder."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh
from meshes import Annotated, lies_as, rows

import jdp

process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jdp.virtual_cpu_devices(4)
jdp.distributed.initialize(f"127.0.0.1:{port}", 2, process)
devices = np.array(jax.devices())
mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
dp, x = jdp.DataParallel(Annotated(), mesh), rows(13)
mine = x[:7] if process == 0 else x[7:]
variables = dp.init(jax.random.key(0), x[:1])
results = {"out": np.asarray(dp.apply(variables, mine))}
for name in ("mean", "criterion"):
    criterion = None if name == "mean" else lambda out, x: jnp.sqrt((out**2).sum())
    loss = dp.apply if criterion else lambda v, x: (dp.apply(v, x) ** 2).mean()
    step = dp.train_step(loss, optax.adam(0.05), criterion=criterion, check_replicas=1)
    state = step.init(variables)
    for _ in range(3):
        state, metrics = step(state, mine)
    params = nn.meta.unbox(state.params)
    lies_as({"wide": params["Dense_0"]["kernel"], "narrow": params["Dense_1"]["kernel"]})
    whole = jax.jit(lambda t: t, out_shardings=jax.NamedSharding(dp.mesh, jax.P()))(params)
    flat = {jax.tree_util.keystr(path): v for path, v in jax.tree_util.tree_leaves_with_path(whole)}
    results |= {f"{name}{path}": np.asarray(v.addressable_data(0)) for path, v in flat.items()}
    results[f"{name} loss"] = np.asarray(metrics["loss"].addressable_data(0))
found = dp.evaluate(lambda v, x: {"loss": (dp.apply(v, x) ** 2).mean(), "rows": dp.apply(v, x)}, variables, [mine])
results |= {"evaluate rows": found["rows"], "evaluate loss": found["loss"]}
with jdp.Checkpointer(f"{folder}/saved") as checkpointer:
    checkpointer.save(1, state)
    restored, _ = checkpointer.restore(step.init(variables))
lies_as({"wide": nn.meta.unbox(restored.params)["Dense_0"]["kernel"]})
try:  # each replica has a device of both processes
    jdp.DataParallel(Annotated(), Mesh(devices.reshape(2, 4).T, ("data", "model")))
except ValueError as error:
    print("REFUSED", error, flush=True)
np.savez(f"{folder}/{process}.npz", **results)
