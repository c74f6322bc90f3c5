"""torch, one process: nothing is parallel but the threads inside of each operation."""

import torch
from torch.nn.functional import cross_entropy

from ._tasks import MOMENTUM, RATE, Task
from ._torch_models import build, params_of


def trainer(task: Task):
    model = build(task)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)

    def train(batches):
        for batch in batches:
            x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])
            optimizer.zero_grad()
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten().long())
            loss.backward()
            optimizer.step()

    return train, lambda: params_of(model)
