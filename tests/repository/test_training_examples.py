"""The training examples run as a person runs them, on tiny settings; a run that is killed goes on to the same end."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# 5 even batches an epoch, and a last one of 3 rows: 2 and 1.
RESNET = (
    "--train-rows",
    "103",
    "--batch-size",
    "20",
    "--width",
    "8",
    "--blocks",
    "1",
    "--epochs",
    "12",
    "--devices",
    "2",
)
STEPS = 12 * 6


def command(script, *args):
    return [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, args)]


def environment(**more):
    left_out = ["NPROC", "PJRT_NPROC"]  # conftest's, for 8 devices
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    env["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), env.get("PYTHONPATH", "")])
    return env | more


def run(script, *args, env=None):
    env = env or environment()
    done = subprocess.run(command(script, *args), capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def refused(script, *args, env=None):
    env = env or environment()
    done = subprocess.run(command(script, *args), capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    return done.stderr


def sha256(out):
    return re.search(r"SHA-256 ([0-9a-f]{64})", out).group(1)


def complete(folder):
    """The steps of which there is a complete checkpoint: Orbax renames a folder to its number when all is in it."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


@pytest.mark.full
def test_char_gpt_learns_more_than_the_frequencies_of_characters(tmp_path):
    picture = tmp_path / "curve.png"
    out = run(
        *("char_gpt.py", "--steps", "60", "--batch-size", "10", "--context", "80", "--width", "32", "--layers", "1"),
        *("--devices", "4", "--picture", picture),
    )
    assert "10 pieces of up to 80 characters: 3, 3, 3, 1" in out
    each, uncut = map(float, re.search(r"optimizer ([\d.]+) MB .* ([\d.]+) MB", out).groups())
    assert each < uncut / 3  # on 4 devices
    bits, frequencies = map(float, re.search(r"held out: ([\d.]+) bits .* ([\d.]+)$", out, re.M).groups())
    assert 4 < frequencies < 5 and 1 < bits < frequencies - 0.5
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize(("rows", "blocks"), [(10, ("--layers", "1")), (8, ("--layers", "2", "--scan"))])
def test_char_gpt_learns_the_same_with_its_parameters_cut(tmp_path, rows, blocks):
    """10 rows on 4 devices are uneven, and 8 even: there each piece is gathered as it is used."""
    args = ("--steps", "16", "--context", "80", "--width", "32", "--devices", "4", *blocks)
    held_out = []
    for option in ((), ("--shard-params",)):
        out = run("char_gpt.py", *args, *option, "--batch-size", rows, "--picture", tmp_path / "curve.png")
        each, uncut = map(float, re.search(r"model +([\d.]+) MB .* ([\d.]+) MB", out).groups())
        assert each < uncut / 3 if option else each == uncut
        assert out.index("model ") < out.index("step 2 ")  # before the first step
        held_out.append([float(x) for x in re.findall(r"held out ([\d.]+)", out)])
    plain, cut = held_out
    assert len(plain) == 8 and plain[-1] < plain[0]
    assert cut == pytest.approx(plain, abs=0.02)  # gradients travel in bfloat16


@pytest.mark.full
def test_tensor_parallel_has_the_losses_of_one_device():
    """4 x 2 devices, then 2 x 4. The program itself compares the losses, and looks at what each device has."""
    out = run("tensor_parallel.py", "--steps", "28")
    assert "7 rows: 2, 2, 2, 1" in out and "7 rows: 4, 3" in out
    assert "going on  after step 14 of 28" in out
    sizes = [int(x.replace(",", "")) for x in re.findall(r"^model .* each device has ([\d,]+)", out, re.M)]
    whole = int(re.search(r"^model +([\d,]+)", out, re.M).group(1).replace(",", ""))
    assert sizes[0] < 0.6 * whole and sizes[1] < 0.35 * whole
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]
    assert "has the same 28 losses" in out


@pytest.mark.faults
def test_resnet_that_is_killed_goes_on_to_the_same_parameters(tmp_path):
    # Four runs that compile the same programs: once is enough.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    env = environment(**cache)
    picture, folder = tmp_path / "digits.png", tmp_path / "checkpoints"
    whole = run("resnet.py", *RESNET, "--picture", picture, env=env)
    assert "the last  3 rows: 2, 1" in whole
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", whole)]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]
    assert re.search(r"test accuracy [\d.]+%: [\d,]+ of 2,000", whole)
    assert picture.read_bytes().startswith(b"\x89PNG")

    resumed = tmp_path / "resumed.png"
    args = (*RESNET, "--picture", resumed, "--checkpoint-dir", folder, "--save-every", "4")
    with subprocess.Popen(command("resnet.py", *args), stdout=subprocess.DEVNULL, env=env) as process:
        deadline = time.monotonic() + 250
        while not complete(folder) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()  # -9
    assert process.returncode == -9
    begun = complete(folder)[-1]
    assert 4 <= begun < STEPS and not resumed.exists()

    out = run("resnet.py", *args, env=env)
    assert f"after step {begun} of {STEPS}" in out
    assert sha256(out) == sha256(whole)
    assert complete(folder)[-1] == STEPS and resumed.exists()

    assert "this one has" in refused("resnet.py", *args, "--lr", "0.1", env=env)


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("script", "args", "match"),
    [
        ("char_gpt.py", ("--width", "20", "--heads", "3"), "--width: 20"),
        ("char_gpt.py", ("--lr", "nan"), "--lr"),
        ("tensor_parallel.py", ("--meshes", "4x2", "2x3"), "8 heads cannot be cut over 3 devices"),
        ("resnet.py", ("--picture", "nowhere/a.png"), "there is no folder nowhere"),
        ("resnet.py", ("--checkpoint-dir", __file__), "is not a folder"),
    ],
)
def test_bad_arguments_are_refused_at_once(script, args, match):
    assert match in refused(script, *args)
