"""docs/errors.py: the page has every message of the package, also those that it has not been told of."""

import importlib.util
import pathlib
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errors():
    spec = importlib.util.spec_from_file_location("docs_errors", ROOT / "docs" / "errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_every_line_of_the_code_that_begins_a_message_is_on_the_page(errors):
    page, missing, seen = " ".join(re.sub(r"[\\`]", "", errors.page()).split()), [], 0
    for path in sorted((ROOT / "jdp").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            begins = re.search(r"""(?<![\w`])f?["']jdp(?:\.[\w.{}]+)?: (.*?)["'][,)]?$""", line)
            if begins is None:
                continue
            # What stands there for everybody, between what is filled in; quotes and braces are part of what is.
            pieces = re.split(r"\{[^}]*\}+|; |\. ", begins[1])
            pieces = [piece for piece in pieces if len(piece.strip(" .;")) > 10 and not re.search(r"[\"'{}]", piece)]
            seen += 1
            missing += [f"{path.name}:{number} {piece}" for piece in pieces if piece.strip(" .;") not in page]
    assert seen > 150
    assert not missing


@pytest.fixture(scope="module")
def messages(errors):
    return errors.messages()


def is_a(text, message):
    """Whether a text is that of a message, with something in the place of `<name>` and `…`."""
    return re.fullmatch(re.sub(r"\\?<[\w .]+\\?>|…", ".*?", re.escape(message.text)), text, re.DOTALL)


@pytest.mark.full
@pytest.mark.parametrize(
    "call",
    [
        lambda: jdp.scatter((np.ones((10, 2)), np.ones((8, 2)))),
        lambda: jdp.chunk_sizes(-1, 4),
        lambda: jdp.DataParallel(lambda w, x: x, devices=[]),
        lambda: jdp.DataParallel(lambda w, x: x).train_step("loss", optax.sgd(0.1)),
        lambda: jdp.DataParallel(lambda w, x: x).train_step(lambda v, b: 0.0, "adam").init({"params": np.ones(2)}),
        lambda: jdp.DataParallel(lambda w, x: x).prefetch(np.ones((4, 2))),
        lambda: jdp.explain(3),
        lambda: jdp.topology("h1000"),
    ],
)
def test_a_message_that_is_raised_is_on_the_page(messages, call):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    text = " ".join(str(raised.value).split())
    assert [message for message in messages if is_a(text, message)], text


def test_a_message_has_its_cause_and_its_cure(messages):
    told = {message.parts[0]: message.parts[1:] for message in messages}
    rule, way = told["jdp.chunk_sizes: size <size> over n=<n>"]
    assert rule == "size is at least 0 and n at least 1" and way == "Pass such numbers."
    both = [message for message in messages if all(message.parts)]
    assert len(both) > 0.75 * len(told)


def test_messages_are_found_in_code_of_every_form(errors, tmp_path):
    (tmp_path / "jdp").mkdir()
    (tmp_path / "jdp" / "a.py").write_text(
        '"""jdp.none: a docstring; it is none. Skip it."""\n'
        'VERB = "cut"\n'
        "def f(x, n):\n"
        '    raise ValueError(f"jdp.{VERB}: x is {x!r}, {n} row{\'s\' * (n != 1)}; it is one. " "Pass one.")\n'
        "def g(name):\n"
        '    fact = f"jdp.cut: {name} is odd"\n'
        '    return f"{fact}; none is. Pass even ones."\n'
    )
    found = {message.text: message.kind for message in errors.messages(tmp_path / "jdp")}
    assert found == {
        "jdp.cut: x is <x>, <n> row(s); it is one. Pass one.": "ValueError",
        "jdp.cut: <name> is odd; none is. Pass even ones.": "",
    }


# The first section of the page: each heading is a part of a message, and here is who gets it.

X = np.ones((10, 3), np.float32)
W = {"params": np.ones(3, np.float32)}


def mean_square(variables, x):
    return jnp.mean((x @ variables["params"]) ** 2)


def one_step(loss_fn, batch=X):
    step = jdp.DataParallel(lambda v, x: x @ v["params"]).train_step(loss_fn, optax.sgd(0.1))
    return step(step.init(W), batch)


def a_donated_state():
    step = jdp.DataParallel(lambda v, x: x @ v["params"]).train_step(mean_square, optax.sgd(0.1))
    state, _ = step(step.init(W), X)
    step(state, X)
    step(state, X)


def parameters_elsewhere():
    dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=[0, 1])
    dp(jax.device_put(W, jax.devices()[3]), X)


def parameters_of_pmap():
    n = jax.device_count()
    stacked = jax.pmap(lambda i: {"params": jnp.ones(3) + 0 * i})(np.zeros(n))
    jdp.DataParallel(lambda v, x: x @ v["params"])(stacked, X)


def a_scattered_array():
    for batch in jdp.DataParallel(lambda v, x: x).prefetch([X]):
        jnp.sum(batch)


def a_number_that_changes():
    def of_both(variables, batch):
        return batch["beta"] * mean_square(variables, batch["x"])

    step = jdp.DataParallel(lambda v, x: x @ v["params"]).train_step(of_both, optax.sgd(0.1))
    state = step.init(W)
    for number in range(4):
        state, _ = step(state, {"x": X, "beta": float(number)})


def a_collective():
    norm = nn.BatchNorm(use_running_average=False, axis_name="data")
    dp = jdp.DataParallel(norm)
    dp.apply(norm.init(jax.random.key(0), X), X, mutable=["batch_stats"])


CASES = {
    "a scalar counts as the mean over the rows": lambda: one_step(lambda v, x: jnp.sum(x @ v["params"])),
    "all arrays that are cut must agree": lambda: jdp.scatter((X, X[:8])),
    "was donated to an earlier step": a_donated_state,
    "module must have its parameters and buffers on device": parameters_elsewhere,
    "it looks replicated for jax.pmap": parameters_of_pmap,
    "it is used as an array; it is a sequence": a_scattered_array,
    "asks for the value of an array": lambda: one_step(lambda v, x: mean_square(v, x) if x.sum() > 0 else 0.0),
    "is compiled for the 4th time": a_number_that_changes,
    "the model runs a collective": a_collective,
    "with the loss come 0-d floats": lambda: one_step(lambda v, x: (mean_square(v, x), {"std": x.std(axis=0)})),
    "the updates have a collection": lambda: one_step(lambda v, x: (mean_square(v, x), {}, {"batch_stats": x.mean()})),
    "would count as a batch": lambda: jdp.DataParallel(lambda v, x: x).prefetch((X, X)),
    "a step takes a jdp.TrainState": lambda: jdp.DataParallel(lambda v, x: x).train_step(mean_square, optax.sgd(0.1))(
        W, X
    ),
    "JAX has started already": lambda: jdp.virtual_cpu_devices(64),
    ".cuda is torch's": lambda: jdp.DataParallel(lambda v, x: x).cuda(),
}


def test_the_first_section_has_fifteen_messages():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert re.findall(r'^### "(.*)"$', page, re.MULTILINE) == [*CASES] and len(CASES) == 15


@pytest.mark.budget(20)
@pytest.mark.parametrize("words", CASES)
def test_a_message_of_the_first_section_is_raised(words):
    with warnings.catch_warnings(), pytest.raises((Exception, UserWarning)) as raised:
        warnings.simplefilter("error")
        CASES[words]()
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert words in said
