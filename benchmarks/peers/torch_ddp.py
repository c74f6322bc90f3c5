"""torch: DistributedDataParallel, a process for each device, as torchrun starts them."""

import torch
import torch.distributed as dist  # parallel
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel  # parallel
from torch.utils.data import DistributedSampler  # parallel

from ._tasks import MOMENTUM, RATE, Task
from ._torch_models import build, params_of

dist.init_process_group("gloo")  # parallel


def trainer(task: Task):
    model = DistributedDataParallel(build(task))  # parallel
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)

    def train(batches):
        for batch in batches:
            own = [*DistributedSampler(batch["y"], shuffle=False)]  # parallel
            x, y = torch.from_numpy(batch["x"][own]), torch.from_numpy(batch["y"][own])  # parallel
            optimizer.zero_grad()
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten().long())
            loss.backward()
            optimizer.step()

    return train, lambda: params_of(model)
