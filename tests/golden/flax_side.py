"""The Flax half of the comparison: twins of the models in torch_side.py, and torch's numbers in Flax's layout.

Imports no torch. Where Flax and torch differ by convention, the difference is computed, not tolerated:

* BatchNorm: `momentum` is the weight of the old value (torch: of the new one), and torch keeps a running variance
  that is unbiased, b / (b - 1) times the one Flax keeps, for b values per channel.
* Linear and convolution weights are transposed, images are channels-last.
* An LSTM's four gates lie in one torch matrix; Flax has a kernel for each, and one bias where torch adds two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class MLP(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not self.train, momentum=0.9, epsilon=0.1)(x))
        return nn.Dense(3)(x)


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5)(nn.Conv(4, (3, 3))(x))
        return nn.Dense(3)(nn.avg_pool(nn.relu(x), (2, 2), (2, 2)).mean((1, 2)))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.RNN(nn.OptimizedLSTMCell(4))(x))


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Embed(11, 4)(x).mean(1))


class Tied(nn.Module):
    def setup(self):
        self.shared, self.idle = nn.Dense(5), nn.Dense(5)

    def __call__(self, x):
        if self.is_initializing():
            self.idle(x)
        return self.shared(jnp.tanh(self.shared(x)))


MODELS = {"MLP": MLP, "Conv": Conv, "LSTM": LSTM, "Tokens": Tokens, "Tied": Tied}


def part(record, prefix):
    """The entries whose names start with `prefix.`, without it."""
    return {k.removeprefix(prefix + "."): v for k, v in record.items() if k.startswith(prefix + ".")}


def layout(model, x):
    """Inputs in Flax's layout: channels last."""
    return np.moveaxis(x, 1, -1) if model == "Conv" else x


def params(model, state):
    """torch's parameters (or their gradients), by name, as Flax's `params` collection."""

    def dense(name):
        return {"kernel": state[f"{name}.weight"].T, "bias": state[f"{name}.bias"]}

    def norm(name):
        return {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}

    if model == "MLP":
        return {"Dense_0": dense("0"), "BatchNorm_0": norm("1"), "Dense_1": dense("3")}
    if model == "Conv":
        kernel = state["conv.weight"].transpose(2, 3, 1, 0)
        conv = {"kernel": kernel, "bias": state["conv.bias"]}
        return {"Conv_0": conv, "BatchNorm_0": norm("norm"), "Dense_0": dense("head")}
    if model == "LSTM":
        gates = {}
        inner, outer = (np.split(state[f"rnn.weight_{kind}_l0"], 4) for kind in ("ih", "hh"))
        # the sum of torch's two biases, as parameters; their gradients are equal, and each is that of the sum
        bias = state["rnn.bias_ih_l0"] + state["rnn.bias_hh_l0"]
        for k, gate in enumerate("ifgo"):
            gates[f"i{gate}"] = {"kernel": inner[k].T}
            gates[f"h{gate}"] = {"kernel": outer[k].T, "bias": np.split(bias, 4)[k]}
        return {"OptimizedLSTMCell_0": gates, "Dense_0": dense("head")}
    if model == "Tokens":
        return {"Embed_0": {"embedding": state["embed.weight"]}, "Dense_0": dense("head")}
    return {"shared": dense("shared"), "idle": dense("idle")}


def gradients(model, grads):
    """torch's gradients as those of Flax's parameters."""
    if model == "LSTM":
        np.testing.assert_array_equal(grads["rnn.bias_ih_l0"], grads["rnn.bias_hh_l0"])
        grads = grads | {"rnn.bias_hh_l0": np.zeros_like(grads["rnn.bias_hh_l0"])}
    return params(model, grads)


def batch_stats(model, before, after, values):
    """The running statistics that Flax keeps where torch went from `before` to `after`.

    `values` is b, the number of values per channel that the primary replica normalised.
    """
    name = {"MLP": "1", "Conv": "norm"}[model]
    was, now = before[f"{name}.running_var"], after[f"{name}.running_var"]
    biased = 0.9 * was + (now - 0.9 * was) * (values - 1) / values
    return {"BatchNorm_0": {"mean": after[f"{name}.running_mean"], "var": biased}}


def has_state(model):
    return model in ("MLP", "Conv")


def variables(model, state):
    """All of the model's variables, with torch's numbers as they are."""
    collections = {"params": params(model, state)}
    if has_state(model):
        name = {"MLP": "1", "Conv": "norm"}[model]
        stats = {"mean": state[f"{name}.running_mean"], "var": state[f"{name}.running_var"]}
        collections["batch_stats"] = {"BatchNorm_0": stats}
    return jax.tree.map(jnp.asarray, collections)


def run_case(model, apply, n, record, transform=jax.jit):
    """Output, loss, gradients and state that `apply` (dp.apply, or a bare module's) makes of a case of torch's record.

    `transform` is applied to the gradient function: `jax.jit`, or nothing for an eager call.
    """
    x, target = layout(model, record["x"]), record["target"]
    state = variables(model, part(record, "before"))
    rest = {k: v for k, v in state.items() if k != "params"}

    def loss_fn(weights, x):
        out = apply({"params": weights, **rest}, x, mutable=list(rest)) if rest else (apply({"params": weights}, x), {})
        return ((out[0] - target) ** 2).mean(), out

    argnums = (0, 1) if x.dtype == np.float32 else (0,)
    gradient = jax.value_and_grad(loss_fn, argnums, has_aux=True)
    (loss, (out, updates)), grads = transform(gradient)(state["params"], jnp.asarray(x))
    return {"out": out, "loss": loss, "updates": updates, "grads": grads}


def expected(model, n, record):
    """torch's record of a case in the form that `run_case` gives."""
    rows = -(-len(record["x"]) // n)
    values = rows * (36 if model == "Conv" else 1)
    grads = [gradients(model, part(record, "grad"))]
    if "grad_x" in record:
        grads.append(layout(model, record["grad_x"]))
    updates = {}
    if has_state(model):
        updates["batch_stats"] = batch_stats(model, part(record, "before"), part(record, "after"), values)
    return {"out": record["out"], "loss": record["loss"], "updates": updates, "grads": tuple(grads)}
