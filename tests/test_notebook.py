"""What a notebook shows of jdp's objects: sizes and places, without values, at any time."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from markup import read

import jdp

KEY = "<b>&'\""


def rows(count, *shape):
    return np.zeros((count, *shape), np.float32)


def drawn(x):
    return read(x._repr_html_()).one("div", "jdp")


def chunks(page):
    """(name, length of the bar, words) of each bar."""
    table = page.one("div", "bars")
    lengths = [svg.one("rect").number("width") for svg in table.all("svg")]
    return [(name, length, words) for (name, _, words), length in zip(table.rows(), lengths, strict=True)]


def details(page):
    """By its first words, what each part of the page says of its arrays."""
    return {x.one("summary").text: dict(x.rows()) for x in page.all("details")}


def test_the_chunks_of_a_scattered_are_as_long_as_their_rows(devices):
    page = drawn(jdp.scatter({KEY: rows(10, 3), "mode": "sum", "rate": 0.5}, devices[:4]))
    assert page.one("h1").text == "Scattered: 10 rows in 4 chunks"
    names, lengths, words = zip(*chunks(page), strict=True)
    assert names == tuple(f"replica {i} on {devices[i]}" for i in range(4))
    assert lengths == pytest.approx([100, 100, 100, 100 / 3], rel=1e-4) and words == ("3 rows",) * 3 + ("1 row",)
    (arrays,) = details(page).values()
    assert arrays == {
        f"[{KEY!r}]": "float32[12, 3] cut over 4 devices", "['mode']": "str 'sum'", "['rate']": "float 0.5"
    }  # fmt: skip


def test_of_several_replicas_on_a_device_each_has_its_bar(devices):
    dp = jdp.DataParallel(lambda w, x: x * w, devices[:2], replicas=4)
    batch, _ = dp.scatter((rows(7),), {}, dp.devices)
    assert [(name.split(" on ")[1], words) for name, _, words in chunks(drawn(batch))] == [
        (str(devices[i // 2]), f"{n} row{'s' * (n > 1)}") for i, n in enumerate((2, 2, 2, 1))
    ]
    assert dict(drawn(dp).rows())["replicas"] == "4"


def test_of_many_replicas_the_first_are_drawn(devices):
    dp = jdp.DataParallel(lambda w, x: x * w, devices[:1], replicas=100)
    page = drawn(dp.scatter((rows(200),), {}, dp.devices)[0])
    assert len(chunks(page)) == 64 and "and 36 replicas more" in page.text


def test_where_nothing_is_cut(devices):
    page = drawn(jdp.scatter({"rate": 0.5}, devices))
    assert page.one("h1").text == "Scattered: nothing is cut" and not [*page.all("svg")]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 24, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


def test_a_wrapper_says_what_it_has(devices):
    page = drawn(jdp.DataParallel(Net(nnx.Rngs(0)), devices))
    count = 16 * 24 + 24 + 2 * 16
    assert dict(page.rows()) == {
        "model": "Net",
        "devices": ", ".join(map(str, devices)),
        "replicas": "8",
        "parameters": f"{count}, {4 * count / 2**10:.4g} KiB on each device",
    }
    assert [words for *_, words in chunks(page)] == [f"{4 * count / 2**10:.4g} KiB", "128 B"]  # mean and variance
    parts = details(page)
    assert [*parts] == [f"parameters: {count} numbers in 4 arrays", "other state: 32 numbers in 2 arrays"]
    assert len(parts[f"parameters: {count} numbers in 4 arrays"]) == 4


@pytest.mark.parametrize("module", [nn.Dense(3), lambda w, x: x * w], ids=["linen", "function"])
def test_a_wrapper_without_parameters_says_so(devices, module):
    facts = dict(drawn(jdp.DataParallel(module, devices)).rows())
    assert facts["parameters"] == "not held here: each call takes them"
    assert ("Dense" if isinstance(module, nn.Module) else "<lambda>") in facts["model"]


def loss_fn(variables, x, key):
    return jnp.mean(nn.Dense(24).apply(variables, x) ** 2)


@pytest.fixture
def trained(devices):
    """A step, and a state that it has not seen."""
    dp = jdp.DataParallel(nn.Dense(24), devices)
    step = dp.train_step(loss_fn, optax.adam(1e-3), shard_optimizer=True)
    return step, step.init(dp.init(jax.random.key(0), rows(1, 16)), key=jax.random.key(1))


def test_a_state_has_its_bytes_on_each_device(trained):
    step, state = trained
    page = drawn(state)
    sizes = {"params": sum(step.parameter_bytes(state)), "opt_state": sum(step.optimizer_bytes(state))}
    assert sizes["params"] == 4 * (16 * 24 + 24) and sizes["opt_state"] == sizes["params"] / 4 + 4
    bars = {name: (length, words) for name, length, words in chunks(page)}
    assert [*bars] == [*sizes]
    assert bars["opt_state"][0] == pytest.approx(100 * sizes["opt_state"] / sizes["params"], rel=1e-4)
    assert bars["params"] == (100, f"{sizes['params'] / 2**10:.4g} KiB")
    assert dict(page.rows()) == {"step": "int32[] whole on 8 devices", "key": "key<fry>[] whole on 8 devices"}
    kernels = [what for part in details(page).values() for path, what in part.items() if "kernel" in path]
    assert kernels == ["float32[16, 24] whole on 8 devices"] + ["float32[16, 24] cut over 8 devices"] * 2


def test_a_state_of_shapes_and_one_that_is_freed(trained, devices):
    step, state = trained
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    assert chunks(drawn(shapes)) == chunks(drawn(state))  # so it needs no values
    step(step(state, rows(8, 16))[0], rows(8, 16))
    freed = step.last
    step(freed, rows(8, 16))
    assert freed.params["kernel"].is_deleted()
    page = drawn(freed)
    assert {words for *_, words in chunks(page)} == {"0 B"} and "deleted" in page.text


def test_an_nnx_step_has_the_state_of_model_and_optimizer(devices):
    dp = jdp.DataParallel(Net(nnx.Rngs(0)), devices)
    step = dp.train_step(lambda model, x: jnp.mean(model(x) ** 2), optax.adam(1e-3))
    bars = {name: words for name, _, words in chunks(drawn(step))}
    sizes = (sum(step.parameter_bytes()), 128, sum(step.optimizer_bytes()))
    assert sizes[2] == 2 * sizes[0] + 4
    words = [f"{size / 2**10:.4g} KiB" if size >= 2**10 else f"{size} B" for size in sizes]
    assert bars == dict(zip(("parameters", "other state", "optimizer's state"), words, strict=True))


def test_nothing_is_read_run_or_waited_for(trained, devices, monkeypatch, compilations):
    """So a notebook can draw it while the devices are busy, and one process of several alone."""
    step, state = trained
    dp = jdp.DataParallel(Net(nnx.Rngs(0)), devices)
    objects = [state, jdp.scatter(rows(5, 2), devices), dp, dp.train_step(lambda m, x: jnp.mean(m(x)), optax.sgd(0.1))]
    of_arrays = type(state.step)

    def refuse(*_, **__):
        raise AssertionError("an array is read")

    names = ("__array__", "__repr__", "__str__", "__format__", "__float__", "__int__", "__index__", "__getitem__")
    for name in (*names, "item", "tolist", "block_until_ready", "addressable_shards", "addressable_data"):
        monkeypatch.setattr(of_arrays, name, refuse)
    monkeypatch.setattr(of_arrays, "_value", property(refuse))
    with pytest.raises(AssertionError, match="is read"):
        float(state.step)
    compilations()
    for x in objects:
        assert drawn(x).one("h1").text
    assert compilations() == 0


def test_it_never_raises(devices):
    class Awkward:
        def __repr__(self):
            raise RuntimeError("no")

        __str__ = __repr__
        shape = dtype = property(__repr__)

    s = jdp.scatter({"x": rows(4, 2)}, devices[:2])
    assert jdp.TrainState(Awkward(), Awkward(), 3, {KEY: object()})._repr_html_() is None
    assert "object" in drawn(jdp.TrainState(1, None, 3, {KEY: object()})).text
    assert drawn(jax.tree.map(lambda x: None, s)) and drawn(jax.tree.map(lambda x: "text", s))
    seen = []
    jax.jit(lambda s: (seen.append(s._repr_html_()), s)[1])(s)
    assert "traced" in read(seen[0]).text
