"""replay: a step that is made again has the bits that it had, what is wrong in it is named, and nothing is written."""

import hashlib
import io
import os
import pathlib
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from jdp.__main__ import main

# The loop of docs/batches.md: noise from a key, Adam, uneven chunks, a checkpoint every 4 steps. What it logs stands in
# another folder.
TRAIN = """
    import hashlib, pathlib, signal, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import jdp

    bad, n = int(sys.argv[1]), int(sys.argv[2])
    dp = jdp.DataParallel(lambda v, x: jnp.tanh(x @ v["params"]["w"]) + v["params"]["b"], devices=jax.devices()[:n])

    def loss_fn(v, batch, key):
        out = dp(v, batch["x"])
        error = (out - batch["y"] + 0.1 * jax.random.normal(key, out.shape)) ** 2
        return jnp.mean(error, axis=1), {"worst": jnp.max(error, axis=1)}

    step = dp.train_step(loss_fn, optax.adam(0.1))
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(23, k)).astype(np.float32) for name, k in (("x", 3), ("y", 2))}

    def main():
        params = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
        state = step.init({"params": params}, jax.random.key(1))
        with jdp.Checkpointer("run", keep=9, every=4) as checkpointer, jdp.Checkpointer("best") as best:
            state, taken = checkpointer.restore(state)
            batches = dp.batches(data, 5, seed=0, epochs=3, start=taken or 0)
            for batch in batches:
                if batches.taken == bad:
                    batch = jax.tree.map(np.array, jdp.gather(batch))
                    batch["x"][3, 1] = np.nan
                state, metrics = step(state, batch)
                leaves = [jax.random.key_data(x) if x is state.key else x for x in jax.tree.leaves(state)]
                digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()
                with open("log", "a") as log:
                    print(batches.taken, digest, *np.asarray(metrics["worst"]), float(metrics["loss"]), file=log)
                best.save(batches.taken, state)
                checkpointer.save(batches.taken, state, data=batches.taken)

    if __name__ == "__main__":
        main()
"""

# That of examples/char_gpt.py, an NNX model, which here saves as docs/checkpoints.md says.
NNX = """
    import sys
    import jax, jax.numpy as jnp, numpy as np, optax
    from flax import nnx
    import jdp

    dp = jdp.DataParallel(nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
                                         nnx.Dropout(0.5, rngs=nnx.Rngs(7))), devices=jax.devices()[:4])
    step = dp.train_step(lambda model, x: jnp.mean(model(x) ** 2, axis=1), optax.adam(0.1), shard_optimizer=True)
    held = {"model": dp.module, "optimizer": step.optimizer}
    with jdp.Checkpointer("run", keep=9, every=3) as checkpointer:
        _, last = checkpointer.restore(held)
        for number in range((last or 0) + 1, 9):
            metrics = step(np.random.default_rng(number).normal(size=(10, 3)).astype(np.float32))
            state = nnx.state(dp.module, nnx.Not(nnx.RngKey)), nnx.state(step.optimizer)
            leaves = jax.tree.leaves(nnx.as_pure(state))
            with open("log", "a") as log:
                print(number, float(metrics["loss"]), [np.asarray(x).tobytes().hex() for x in leaves], file=log)
            checkpointer.save(number, held, data=number)
"""

SMALL = """
    import jax, jax.numpy as jnp, numpy as np, optax
    import jdp

    dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices=jax.devices()[:2])
    step = dp.train_step(lambda v, x: jnp.mean((dp(v, x) - 1) ** 2, axis=1), optax.sgd(0.1))
    state = step.init({"params": np.zeros((3, 1), np.float32)})
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)

    def log(*what):
        with open("log", "a") as file:
            print(*what, file=file)
"""
LOOP = """
    with jdp.Checkpointer("run", keep=9, every=2) as checkpointer:
        state, _ = checkpointer.restore(state)
        for number in range(int(state.step) + 1, 7):
            np.save(f"w{number - 1}", state.params)
            state, metrics = step(state, x)
            checkpointer.save(number, state)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """`script(text)`: its path, in the folder in which all runs."""
    monkeypatch.chdir(tmp_path)

    def script(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return script


def train(path, *args):
    """Runs it, undisturbed."""
    before = sys.argv
    sys.argv = [path, *args]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before


def contents(folder):
    """Everything in a folder, and when it was written."""
    return {
        str(p.relative_to(folder)): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest() * p.is_file())
        if p.is_file()
        else p.stat().st_mtime_ns
        for p in [folder, *folder.rglob("*")]
    }


def replayed(tmp_path, path, number, *args, options=()):
    """What a replay logs, with nothing written beside that."""
    log, folders = tmp_path / "log", [p for p in (tmp_path / "run", tmp_path / "best") if p.is_dir()]
    log.unlink(missing_ok=True)
    before = [contents(folder) for folder in folders]
    assert main(["replay", "run", "--step", str(number), *options, path, *args]) == 0
    assert [contents(folder) for folder in folders] == before
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.full
@pytest.mark.budget(6)  # each replay compiles anew
def test_a_step_that_is_made_again_has_the_bits_that_it_had(script, tmp_path, capsys):
    path = script(TRAIN)
    train(path, "0", "4")
    log = (tmp_path / "log").read_text().splitlines()
    assert len(log) == 15 and len({*log}) == 15
    for number, begin in ((5, 4), (8, 4), (11, 8), (15, 12)):
        assert replayed(tmp_path, path, number, "0", "4") == log[begin:number]
        out = capsys.readouterr().out
        assert f"step {number} (train_step of loss_fn), from the checkpoint of {begin}\n" in out
        assert f"loss        {np.float32(log[number - 1].split()[-1])!s}\n" in out
        assert "not finite" not in out and ("checkpoint  it has the same bits" in out) == (number == 8)


@pytest.mark.full
@pytest.mark.budget(6)
def test_on_other_devices_a_deterministic_step_has_the_same_bits(script, tmp_path, capsys):
    """Of the loop above, which fixes its replicas then: trained on 4 devices, made again on one and on two."""
    text = TRAIN.replace("[:n])", "[-n:], replicas=4)")
    path = script(text.replace("optax.adam(0.1))", "optax.adam(0.1), deterministic=True)"))
    train(path, "0", "4")
    log = (tmp_path / "log").read_text().splitlines()
    for n in ("1", "2"):
        assert replayed(tmp_path, path, 8, "0", n) == log[4:8]
        assert "checkpoint  it has the same bits" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.budget(6)
def test_what_is_not_finite_is_named(script, tmp_path, capsys):
    path = script(TRAIN)
    train(path, "6", "4")
    replayed(tmp_path, path, 5, "6", "4")
    assert "not finite" not in capsys.readouterr().out
    replayed(tmp_path, path, 6, "6", "4")
    out = capsys.readouterr().out
    assert "batch       5 rows on 3 replicas; not finite: leaf batch['x']\n" in out  # chunks of 2, 2 and 1
    assert "state       finite\n" in out and "gradient    norm nan\n" in out and "loss        nan\n" in out
    assert "not finite in replica 1 (cpu:1), row 3, leaves ['b'], ['w']\n" in out and "replica 0" not in out
    assert "state after not finite: leaves params['b'], params['w'], opt_state[0].mu['b']" in out
    replayed(tmp_path, path, 7, "6", "4")
    out = capsys.readouterr().out
    assert "batch       5 rows on 3 replicas; finite\n" in out and "state       not finite: leaves params['b']" in out


@pytest.mark.full
def test_other_bits_than_those_of_the_checkpoint_are_told(script, tmp_path, capsys):
    path = script(TRAIN)
    train(path, "0", "4")
    replayed(tmp_path, path, 8, "0", "2")  # the noise of each replica is another
    assert "checkpoint  it has other bits: .params['b'], .params['w']" in capsys.readouterr().out


@pytest.mark.full
def test_an_nnx_model(script, tmp_path, capsys):
    path = script(NNX)
    train(path)
    log = (tmp_path / "log").read_text().splitlines()
    assert replayed(tmp_path, path, 6) == log[3:6] and replayed(tmp_path, path, 8) == log[6:8]
    out = capsys.readouterr().out
    assert "it has the same bits" in out and "not finite" not in out


@pytest.mark.full
def test_a_job_of_two_processes(script, tmp_path):
    """Both make the step again, the first says so; and so does one process alone, with as many devices."""
    text = TRAIN.replace("import jdp\n", "import jdp\n    jdp.distributed.initialize()\n", 1)
    text = text.replace("if batches.taken == bad", "if False").replace("best.save(batches.taken, state)", "")
    text = text.replace('open("log"', 'open(f"log{jax.process_index()}"')
    path = script(text)
    launch = [sys.executable, "-m", "jdp", "launch", "-n", "2", "--devices-per-process", "2"]

    def run(*command, **more):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(*launch, path, "0", "4")
    logs = [(tmp_path / f"log{i}").read_text().splitlines() for i in range(2)]
    before = contents(tmp_path / "run")
    out = run(*launch, "-m", "jdp", "replay", "run", "--step", "8", path, "0", "4")
    again = [(tmp_path / f"log{i}").read_text().splitlines()[15:] for i in range(2)]
    assert again == [log[4:8] for log in logs] and out.count("it has the same bits") == 1
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    flags = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    alone = run(sys.executable, "-m", "jdp", "replay", "run", "--step", "8", path, "0", "4", env=flags)
    norms = [float(re.search(r"norm (\S+)", text)[1]) for text in (alone, out)]
    np.testing.assert_allclose(*norms, rtol=1e-6)  # processes add up in another order
    assert contents(tmp_path / "run") == before


@pytest.mark.full
def test_the_norm_of_the_gradient(script, tmp_path, capsys):
    loop = LOOP.replace("checkpointer.save", "if number % 2 == 0: checkpointer.save")  # it need not be called
    large = SMALL.replace("jnp.mean(", "1e21 * jnp.mean(").replace("sgd(0.1)", "sgd(1e-22)")  # its square is infinite
    path = script(large + loop)
    train(path)
    replayed(tmp_path, path, 4)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    gradient = 1e21 * 2 / 5 * x.T.astype(float) @ (x @ np.load(tmp_path / "w3.npy") - 1)
    norm = re.search(r"gradient +norm (\S+)\n", capsys.readouterr().out)[1]
    np.testing.assert_allclose(float(norm), np.linalg.norm(gradient), rtol=1e-6)


@pytest.mark.full
def test_each_of_several_steps_is_made_again(script, tmp_path, capsys):
    text = (SMALL + LOOP).replace("state, metrics = step(state, x)", "state, metrics = step(state, x)\n" + " " * 12
        + "other, _ = second(other, x); log(number, int(other.step))")  # fmt: skip
    text = text.replace("state = step.init", "second = dp.train_step(lambda v, x: jnp.mean(dp(v, x)), optax.sgd(0.1))\n"
        "    other = second.init({'params': np.ones((3, 1), np.float32)})\n    state = step.init")  # fmt: skip
    path = script(text)
    train(path)
    assert replayed(tmp_path, path, 4) == ["3 1", "4 2"]
    assert capsys.readouterr().out.count("jdp replay: step 4 (train_step of <lambda>), from the checkpoint of 2") == 2


@pytest.mark.full
def test_a_step_that_was_skipped_is_made_again(script, tmp_path, capsys):
    text = (SMALL + LOOP).replace("optax.sgd(0.1))", "optax.sgd(0.1), skip_nonfinite=True)")
    text = text.replace("step(state, x)", "step(state, x * np.nan if number == 4 else x)").replace(
        "save(number", "save(int(state.step)"
    )
    path = script(text)
    train(path)
    replayed(tmp_path, path, 4)
    out = capsys.readouterr().out
    assert "skipped     True\n" in out and "state after finite" in out and out.count("jdp replay: step 4") == 1


@pytest.mark.full
def test_the_checkpoint_before_one_that_is_damaged_is_taken(script, tmp_path, capsys):
    path = script(SMALL + LOOP)
    train(path)
    (tmp_path / "run" / "4" / "jdp" / "metadata").write_text("{}")
    with pytest.warns(UserWarning, match="step 4 is damaged .*; step 2 is restored"):
        replayed(tmp_path, path, 6)
    out = capsys.readouterr().out
    assert "from the checkpoint of 2\n" in out and "checkpoint  it has the same bits" in out


def test_sigterm_is_nobodys(script, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    text = (SMALL + LOOP).replace("step(state, x)", "step(state, x); log(signal.getsignal(15))")
    path = script("    import signal" + text)
    train(path)
    assert replayed(tmp_path, path, 3) == [str(before)]


def test_the_debugger_stops_before_the_step(script, tmp_path, capsys, monkeypatch):
    path = script(SMALL + LOOP)
    train(path)
    capsys.readouterr()
    typed = ["p 'before', number, int(state.step)", "n", "p 'after', number, int(state.step)", "c"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed)))
    replayed(tmp_path, path, 4, options=["--pdb"])
    out = capsys.readouterr().out
    places = [out.index(s) for s in ("norm", "('before', 4, 3)", "state after finite", "('after', 4, 4)", "same bits")]
    assert places == sorted(places) and "-> state, metrics = step(state, x)\n" in out
    assert sys.gettrace() is None or "pdb" not in repr(sys.gettrace())


@pytest.mark.full
@pytest.mark.parametrize("typed", ["q", "n\nq"])
def test_who_quits_the_debugger_ends_the_replay(script, tmp_path, capsys, monkeypatch, typed):
    path = script(SMALL + LOOP)
    train(path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    replayed(tmp_path, path, 4, options=["--pdb"])
    out, errors = capsys.readouterr()
    assert ("state after" in out) == ("n" in typed) and "same bits" not in out and not errors


RESTORES = "state, _ = jdp.Checkpointer('run').restore(state)\n"


@pytest.mark.one_case
@pytest.mark.parametrize(
    "text, number, match",
    [
        (SMALL + LOOP, 2, r"no checkpoint of step 1 or before, and the oldest are \[2, 4, 6\]; .*Pass --step 3"),
        (SMALL + LOOP, 9, "ended after step 6, and did not make step 9; .*Pass a step that the script makes"),
        (SMALL + "    " + RESTORES, 4, "ended after step 2, and did not make step 4; replay knows .*dp.train_step"),
        ("print('nothing')", 4, "ended before it restored a checkpoint of .*run; .*Pass the directory of the script's"),
        (SMALL + "    step(state, x)", 4, "makes a training step before it restored a checkpoint of .*run; "),
        (SMALL + "    jdp.Checkpointer('other').restore(state); step(state, x)", 4, "Checkpointers are over .*other; "),
        (SMALL + "    " + RESTORES + "    1 / 0", 4, r"raised ZeroDivisionError \(division by zero\) after step 2"),
        (SMALL + LOOP.replace("save(number", "save(10 * number"), 4, "goes on to save step 30 after step 3, and did"),
        (SMALL + "    raise SystemExit(3)", 4, "ended with code 3 before it restored"),
    ],
)
def test_a_script_that_does_not_come_to_the_step(script, tmp_path, capsys, text, number, match):
    train(script(SMALL + LOOP))
    capsys.readouterr()
    before = contents(tmp_path / "run")
    assert main(["replay", "run", "--step", str(number), script(text)]) == 1
    errors = capsys.readouterr().err
    assert re.search(match, errors) and re.fullmatch(r"jdp\.replay: .+; .+\. .+", errors.splitlines()[-1])
    assert ("ZeroDivisionError: division by zero\n" in errors) == ("1 / 0" in text)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    "directory, path, match",
    [
        ("nothing", "train.py", "nothing has no checkpoint of step 3 or before, and there are no checkpoints in it; "),
        ("train.py", "train.py", "train.py cannot be written"),
        (".", "absent.py", "there is no file absent.py; "),
    ],
)
def test_a_directory_or_a_script_that_is_none(script, capsys, directory, path, match):
    script("raise KeyError")
    assert main(["replay", directory, "--step", "4", path]) == 1
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--step", "0"], ["--step", "-1"], ["--step", "1.5"], []])
def test_a_step_that_is_none(script, capsys, options):
    assert main(["replay", "run", *options, script("raise KeyError")]) == 2
    errors = capsys.readouterr().err
    assert "argument --step" in errors or "required: --step" in errors


def test_only_the_script_is_missing(capsys):
    assert main(["replay", "run", "--step", "4"]) == 2
    assert capsys.readouterr().err.endswith("are required: script\n")  # and not its arguments


def test_a_script_that_trains_in_a_thread_writes_nothing_either(script, tmp_path, capsys):
    train(script(SMALL + LOOP))
    loop = textwrap.indent(textwrap.dedent(LOOP), " " * 8).replace("restore(state)", "restore(begin)")
    text = f"{SMALL}    begin = state\n    def main():{loop}\n    import threading\n    threading.excepthook = print\n"
    before = contents(tmp_path / "run")
    path = script(text + "    thread = threading.Thread(target=main)\n    thread.start()\n    thread.join()\n")
    assert main(["replay", "run", "--step", "4", path]) == 1
    assert "did not make step 4; replay knows" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before


def test_help(capsys):
    assert main(["replay", "--help"]) == 0 and main(["--help"]) == 0
    assert capsys.readouterr().out.count("replay CHECKPOINTS --step 1200") == 2


def test_the_example_of_the_page(script, tmp_path, capsys):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    program, command, shown = re.search(
        r"## One step again\n.*?```python\n(.*?)```.*?```sh\njdp (.*?)\n```\n\n.*?```text\n(.*?)```", page, re.DOTALL
    ).groups()
    path = script(program)
    train(path)
    capsys.readouterr()
    assert main(shlex.split(command)) == 0
    digits = re.compile(r"bits [0-9a-f]{16}")
    assert digits.sub("bits", capsys.readouterr().out) == digits.sub("bits", shown)
