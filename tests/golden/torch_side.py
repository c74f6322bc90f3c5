"""The torch half of the comparison: torch's own DataParallel, run on a CPU, and the cases it is asked about.

torch's `DataParallel.forward`, its `scatter`, `replicate`, `parallel_apply` and `gather` run here as they are. Only
what moves bytes between GPUs is replaced by something that does the same on one CPU: `Scatter`, `Gather` and
`Broadcast` (with their backward passes), `comm.broadcast_coalesced`, and the questions about streams.

torch computes in float64, from numbers that float32 holds exactly. So jdp, in float32, is off by its own rounding
only, and that is all the tolerance allows for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import operator
import types
import warnings
from unittest import mock

import numpy as np
import torch
from golden.structures import GATHERED, SCATTERED, decode, encode
from torch import nn
from torch.nn.parallel import _functions

torch.set_num_threads(1)


class Scatter(torch.autograd.Function):
    """torch.chunk, one chunk for each device."""

    @staticmethod
    def forward(ctx, devices, sizes, dim, x):
        ctx.dim = dim
        pieces = x.chunk(len(devices), dim) if sizes is None else x.split(list(sizes), dim)
        return tuple(piece.clone() for piece in pieces)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, Gather.apply("cpu", ctx.dim, *grads)


class Gather(torch.autograd.Function):
    """torch.cat, with the rule for scalars that torch's Gather has."""

    @staticmethod
    def forward(ctx, device, dim, *xs):
        ctx.scalars, ctx.dim = all(x.dim() == 0 for x in xs) and dim == 0, dim
        if ctx.scalars:
            warnings.warn("Was asked to gather along dimension 0, but all input tensors were scalars", stacklevel=2)
            xs = tuple(x.view(1) for x in xs)
        ctx.sizes = tuple(x.size(dim) for x in xs)
        return torch.cat(xs, dim)

    @staticmethod
    def backward(ctx, grad):
        grads = Scatter.apply(range(len(ctx.sizes)), ctx.sizes, ctx.dim, grad)
        return None, None, *(g[0] if ctx.scalars else g for g in grads)


class Broadcast(torch.autograd.Function):
    """The tensors themselves for the first device and copies for the others; backward sums."""

    @staticmethod
    def forward(ctx, devices, *xs):
        ctx.count = len(xs)
        unused = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        copies = [[x.view_as(x) for x in xs], *([x.clone() for x in xs] for _ in devices[1:])]
        ctx.mark_non_differentiable(*(copy[i] for copy in copies for i in unused))
        return tuple(x for copy in copies for x in copy)

    @staticmethod
    def backward(ctx, *grads):
        return None, *(functools.reduce(operator.add, grads[k :: ctx.count]) for k in range(ctx.count))


def _broadcast_coalesced(tensors, devices):
    return [list(tensors), *([x.detach().clone() for x in tensors] for _ in devices[1:])]


@contextlib.contextmanager
def gpus_played_by_the_cpu():
    """Inside, torch.nn.parallel takes any device index and works on the CPU."""
    # by import_module, for in torch.nn.parallel the functions hide the modules of the same names
    modules = {
        name: importlib.import_module(f"torch.nn.parallel.{name}")
        for name in ("data_parallel", "scatter_gather", "replicate", "parallel_apply")
    }
    with contextlib.ExitStack() as stack:
        for where, name, value in [
            (modules["data_parallel"], "_get_available_device_type", lambda: "cpu"),
            (modules["scatter_gather"], "Scatter", Scatter),
            (modules["scatter_gather"], "Gather", Gather),
            (_functions, "Broadcast", Broadcast),
            (modules["replicate"].comm, "broadcast_coalesced", _broadcast_coalesced),
            (torch.accelerator, "is_available", lambda *a: True),
            (torch.accelerator, "current_stream", lambda *a: contextlib.nullcontext()),
            (torch.accelerator, "device_index", lambda *a: contextlib.nullcontext()),
            (torch.accelerator, "current_accelerator", lambda *a: types.SimpleNamespace(type="cpu")),
        ]:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def data_parallel(module, n, dim=0):
    """`torch.nn.DataParallel(module, range(n))`, to be called inside `gpus_played_by_the_cpu`."""
    dp = nn.DataParallel(module, list(range(n)), dim=dim)
    dp.src_device_obj = torch.device("cpu")
    return dp


# The models. Each has a twin of the same name in flax_side.py.


class MLP(nn.Sequential):
    def __init__(self):
        # An epsilon that is not small: two rows that are nearly equal, normalised, would be all rounding.
        super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8, eps=0.1), nn.ReLU(), nn.Linear(8, 3))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        x = nn.functional.avg_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.head(x.mean((2, 3)))


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


class Tied(nn.Module):
    """One weight used twice, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.shared, self.idle = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.shared(torch.tanh(self.shared(x)))


MODELS = {"MLP": MLP, "Conv": Conv, "LSTM": LSTM, "Tokens": Tokens, "Tied": Tied}

# (model, rows, devices). A chunk of one row is an error in torch's BatchNorm1d, so MLP has none.
CASES = [
    ("MLP", 8, 4), ("MLP", 11, 4), ("MLP", 6, 4), ("MLP", 17, 8),
    ("Conv", 10, 4), ("Conv", 1, 4),
    ("LSTM", 10, 4),
    ("Tokens", 10, 4), ("Tokens", 5, 8),
    ("Tied", 10, 4), ("Tied", 2, 3),
]  # fmt: skip


def batch(model, rows, rng):
    """The inputs and targets of a model, as numpy arrays in torch's layout."""
    shape = {"MLP": (5,), "Conv": (2, 6, 6), "LSTM": (4, 3), "Tokens": (6,), "Tied": (5,)}[model]
    target = {"LSTM": (4, 3), "Tied": (5,)}.get(model, (3,))
    if model == "Tokens":
        x = rng.integers(0, 11, (rows, *shape), dtype=np.int32)
    else:
        x = rng.standard_normal((rows, *shape), dtype=np.float32)
    return x, rng.standard_normal((rows, *target), dtype=np.float32)


def doubles(x):
    """A numpy array as a torch tensor, floats as float64."""
    x = torch.from_numpy(x)
    return x.double() if x.is_floating_point() else x


def rounded(x):
    """A torch tensor as a numpy array, float64 as float32."""
    x = x.detach().numpy()
    return x.astype(np.float32) if x.dtype == np.float64 else x.copy()


def numpy_state(module):
    return {name: rounded(x) for name, x in module.state_dict().items()}


def run_case(model, rows, n, seed):
    """One forward and backward pass of torch's DataParallel: what went in, and all that came out."""
    torch.manual_seed(seed)
    module = MODELS[model]().double()
    x, target = batch(model, rows, np.random.default_rng(seed))
    record = {f"before.{k}": v for k, v in numpy_state(module).items()} | {"x": x, "target": target}
    with gpus_played_by_the_cpu():
        x = doubles(x)
        x.requires_grad_(x.is_floating_point())
        out = data_parallel(module, n)(x)
        loss = ((out - doubles(target)) ** 2).mean()
        loss.backward()
    record |= {"out": rounded(out), "loss": rounded(loss)}
    record |= {f"after.{k}": v for k, v in numpy_state(module).items()}
    record |= {f"grad.{k}": rounded(p.grad) for k, p in module.named_parameters()}
    if x.grad is not None:
        record["grad_x"] = rounded(x.grad)
    return record


TRAINING_ROWS = (8, 11, 6, 8, 11, 6)  # over 4 devices: 2,2,2,2 then 3,3,3,2 then 2,2,2


def run_training(seed):
    """Six steps of SGD with momentum through DataParallel on 4 devices, then the test of the trained model."""
    torch.manual_seed(seed)
    module, rng = MODELS["MLP"]().double(), np.random.default_rng(seed)
    record = {f"before.{k}": v for k, v in numpy_state(module).items()}
    with gpus_played_by_the_cpu():
        dp = data_parallel(module, 4)
        optimizer = torch.optim.SGD(dp.parameters(), lr=0.05, momentum=0.9)
        for step, rows in enumerate(TRAINING_ROWS):
            x, target = batch("MLP", rows, rng)
            loss = ((dp(doubles(x)) - doubles(target)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record |= {f"{step}.x": x, f"{step}.target": target, f"{step}.loss": rounded(loss)}
            record |= {f"{step}.{k}": v for k, v in numpy_state(module).items()}
        x, _ = batch("MLP", 10, rng)
        dp.eval()
        record |= {"test.x": x, "test.out": rounded(dp(doubles(x)))}
    return record


def chunk_table():
    """The sizes of `torch.chunk`'s chunks: [rows][devices - 1]."""
    return [[[c.shape[0] for c in torch.zeros(rows, 1).chunk(n)] for n in range(1, 10)] for rows in range(41)]


def structures():
    """What torch's scatter and gather give for each structure."""
    table = {}
    with gpus_played_by_the_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scalars
        for name, (tree, n, dim) in SCATTERED.items():
            pieces = nn.parallel.scatter(decode(tree, torch.tensor), list(range(n)), dim)
            table[f"scatter {name}"] = [encode(piece) for piece in pieces]
        for name, (trees, dim) in GATHERED.items():
            outputs = [decode(tree, torch.tensor) for tree in trees]
            table[f"gather {name}"] = encode(nn.parallel.gather(outputs, "cpu", dim))
    return table


def messages():
    """torch's own words for some errors."""
    found = {}

    def catch(name, call):
        try:
            call()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]

    class Fails(nn.Module):
        def forward(self, x):
            if x.shape[0] < 3:
                raise KeyError("no such row")
            return x

    with gpus_played_by_the_cpu():
        devices = [0, 1]
        catch("scatter_dim", lambda: nn.parallel.scatter(torch.zeros(4), devices, 1))
        catch("scatter_dim_negative", lambda: nn.parallel.scatter(torch.zeros(4, 2), devices, -3))
        catch("gather_keys", lambda: nn.parallel.gather([{"a": torch.ones(1)}, {}], 0))
        linear = nn.Linear(2, 2)
        linear.bias = nn.Parameter(linear.bias.to("meta"))
        catch("wrong_device", lambda: data_parallel(linear, 2)(torch.zeros(4, 2)))
        catch("replica_error", lambda: data_parallel(Fails(), 4)(torch.zeros(10, 1)))
    # of the traceback the two lines around it are torch's; the lines of files between them are this machine's
    kind, text = found["replica_error"]
    lines = text.splitlines()
    found["replica_error"] = [kind, "\n".join([lines[0], lines[-1]])]
    return found


def dumps(table):
    """JSON, one entry a line."""
    if isinstance(table, dict):
        rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table.items()]
        return "{\n" + ",\n".join(rows) + "\n}\n"
    return "[\n" + ",\n".join(json.dumps(row) for row in table) + "\n]\n"
