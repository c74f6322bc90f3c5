"""The port: a program for torch.nn.DataParallel in the comments on the right, the same with jdp beside it.

`python examples/from_torch.py` takes a few seconds on a CPU, which it splits into 4 virtual devices.
"""

# fmt: off
# isort: off
import jax                                                      # import torch
import numpy as np
import optax                                                    # import torch.nn.functional as F
from _mnist_data import EMBEDDED, load
from flax import nnx                                            # from torch import nn

import jdp

jdp.virtual_cpu_devices(4)                                      # (for a CPU; GPUs are used as they are)
digits = load(EMBEDDED)
train_x, test_x = (x.reshape(-1, 784) / np.float32(255) for x in (digits.train_images, digits.test_images))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class MLP(nnx.Module):                                          # class MLP(nn.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:                 #     def __init__(self):
        self.hidden = nnx.Linear(784, 256, rngs=rngs)           #         self.hidden = nn.Linear(784, 256)
        self.norm = nnx.BatchNorm(256, momentum=0.9, rngs=rngs) #         self.norm = nn.BatchNorm1d(256)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)              #         self.dropout = nn.Dropout(0.2)
        self.out = nnx.Linear(256, 10, rngs=rngs)               #         self.out = nn.Linear(256, 10)

    def __call__(self, x: jax.Array) -> jax.Array:              #     def forward(self, x):
        x = nnx.relu(self.norm(self.hidden(x)))                 #         x = self.norm(self.hidden(x)).relu()
        return self.out(self.dropout(x))                        #         return self.out(self.dropout(x))


def forward(model, batch):                                      # (A step of jdp is one program,
    return model(batch[0])                                      #  made of these two functions.)


def criterion(logits, batch):                                   # (The logits of all rows, as in torch.)
    return cross_entropy(logits, batch[1]).mean()


model = MLP(nnx.Rngs(0))                                        # model = MLP().cuda()
model = jdp.DataParallel(model)                                 # model = nn.DataParallel(model)
tx = optax.adam(3e-3)                                           # optimizer = torch.optim.Adam(
step = model.train_step(forward, tx, criterion=criterion)       #     model.parameters(), lr=3e-3)

model.train()                                                   # model.train()
for i in range(300):                                            # for i in range(300):
    rows = np.arange(100 * i, 100 * i + 100) % 10_000
    x, y = train_x[rows], digits.train_labels[rows]
    loss = step((x, y))["loss"]                                 #     loss = F.cross_entropy(model(x), y.cuda())
                                                                #     optimizer.zero_grad()
                                                                #     loss.backward(); optimizer.step()
    if i % 50 == 49:
        print(f"step {i:3}  loss {loss:.3f}")                   #         print(f"step {i}  loss {loss.item():.3f}")
model.eval()                                                    # model.eval()
logits = np.asarray(model(test_x))                              # logits = model(test_x).detach()
np.testing.assert_allclose(logits, model.module(test_x), rtol=1e-4, atol=1e-4)
print(f"test accuracy {(logits.argmax(-1) == digits.test_labels).mean():.2%}; the bare model agrees")
