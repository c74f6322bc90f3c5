"""A call goes through few files, and seldom changes from one to another: a reader can follow it."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("ways.py")
MOST = {  # files, and changes from one to another
    # Two changes of each are the question whether an array is freed: XLA may end the process for one.
    "apply": {"first": (18, 90), "uneven": (19, 122), "known": (5, 7)},
    # What a scalar is made of is read from its jaxpr, equation by equation: four files, and most of the changes.
    "value_and_grad": {"first": (27, 182), "uneven": (26, 188), "known": (5, 6)},
    "train_step": {"first": (28, 171), "uneven": (27, 194), "known": (4, 9)},
}


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("door", MOST)
def test_the_way_of_a_call(door):
    """In a process of its own, in which nothing was called before."""
    run = subprocess.run([sys.executable, SCRIPT, door, "--json"], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for kind, (files, changes) in MOST[door].items():
        way = found[kind]
        what = f"{kind} {door}: python tests/ways.py {door} shows the way"
        assert way[0] <= files and way[1] <= changes, f"{what}; {way} files and changes, {(files, changes)} at most"
