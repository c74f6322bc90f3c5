"""Wrong uses of jdp: both type checkers flag each line that ends in `# wrong`, and no other."""

from typing import Any

import flax.linen as nn
import numpy as np
import optax
from flax import nnx

import jdp

ROWS = np.ones((10, 2), np.float32)
TX = optax.sgd(0.1)


def loss(variables: Any, batch: Any) -> Any:
    return batch


dp = jdp.DataParallel(nn.Dense(3))
of_nnx = jdp.DataParallel(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

jdp.DataParallel(nn.Dense(3), output_device=3.5)  # wrong
jdp.DataParallel(nn.Dense(3), devices=0)  # wrong
jdp.DataParallel(nn.Dense(3), devices=[0.5])  # wrong
jdp.DataParallel(nn.Dense(3), dim="rows")  # wrong
jdp.DataParallel(nn.Dense(3), reduce_state="sum")  # wrong
jdp.DataParallel(nn.Dense(3), state_axes=["cache"])  # wrong
jdp.DataParallel(nn.Dense(3), divices=[0])  # wrong
jdp.DataParallel()  # wrong
jdp.DataParallel(nn.Dense(3), replicas="8")  # wrong
dp.moduel  # wrong
dp.no_sync()  # wrong
dp.dim = 1  # wrong
of_nnx.module.kernle  # wrong

step = dp.train_step(loss, TX)
step.inti({"params": ROWS})  # wrong
step.optimizer  # wrong
step.init(ROWS)  # wrong
state = step.init({"params": ROWS})
step(state)  # wrong
step(ROWS, state)  # wrong
state.parms  # wrong
new, metrics = step(state, ROWS)
metrics.loss  # wrong
new.step.shpae  # wrong
step.last.params  # wrong

dp.train_step(loss, "adam")  # wrong
dp.train_step(loss, 0.1)  # wrong
dp.train_step(TX, loss)  # wrong
dp.train_step(loss)  # wrong
dp.train_step(loss, nnx.Optimizer(of_nnx, TX, wrt=nnx.Param))  # wrong
dp.train_step(loss, TX, accumulate_steps=2.5)  # wrong
dp.train_step(loss, TX, acumulate_steps=2)  # wrong
dp.train_step(loss, TX, reduce_dtype=3)  # wrong
dp.train_step(loss, TX, 2)  # wrong

in_place = of_nnx.train_step(loss, TX)
in_place.init({"params": ROWS})  # wrong
in_place(ROWS).loss  # wrong
of_nnx.train_step(loss, TX)(ROWS).params  # wrong
of_nnx.train_step(loss, "adam")  # wrong

dp.value_and_grad(loss, argnums="params")  # wrong
dp.value_and_grad(loss, has_axu=True)  # wrong
dp.grad(loss, acumulate_steps=2)  # wrong
dp.grad("loss")  # wrong
dp.parallel(loss, donate_argnums="state")  # wrong
dp.prefetch(3)  # wrong
dp.batches(ROWS, "4")  # wrong
dp.batches(ROWS, 4).take  # wrong

jdp.scater(ROWS)  # wrong
jdp.scatter(ROWS, devices=3.5)  # wrong
jdp.scatter(ROWS).size  # wrong
jdp.scatter(ROWS) + 1  # wrong
-jdp.scatter(ROWS)  # wrong
jdp.gather(ROWS, output_device=3.5)  # wrong
jdp.chunk_sizes("10", 4)  # wrong
jdp.parallel_apply("fn", ROWS, ROWS)  # wrong
jdp.Mean(1.0)  # wrong
jdp.Checkpointer(3)  # wrong
jdp.Checkpointer("run", kep=3)  # wrong
jdp.topology(8)  # wrong
jdp.distributed.initialise()  # wrong
jdp.virtual_cpu_devices()  # wrong
jdp.explain(loss, ROWS).colectives  # wrong
