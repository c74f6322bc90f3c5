"""`initialize(recover=True)`: who dies is left out, the others make the same batch again, and end with the same bits.

JDP_RECOVERY_TABLE=FILE collects how long each death took: from the kill to the notice, and from there to a good step.
"""

import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recovery_worker as worker
from hypothesis import given
from hypothesis import strategies as st

import jdp
from jdp._core import sync
from jdp._launch.protocol import WAITED
from jdp._processes import recovery
from jdp._processes.members import Members, members
from jdp._processes.watch import limits
from jdp._wrapper.batches import order_of

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
ENDS = 40  # seconds from a fault within which a job ends that does not go on
AGAIN = 5  # seconds from the notice to the next good step


class Job:
    """A job that has ended: its exit code, what was printed, and what the processes have noted."""

    def __init__(self, folder, plan, processes=4, devices=2, options=("--recover",)):
        folder.mkdir()
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        # conftest's, for 8 devices, and for a cache of large programs alone
        for name in ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"):
            environ.pop(name, None)
        cache = folder / "programs"
        cache.mkdir(mode=0o700)
        head = ["-m", "jdp", "launch", "-n", str(processes), "--devices-per-process", str(devices)]
        worker = [str(HERE / "recovery_worker.py"), str(folder), json.dumps(plan)]
        command = [sys.executable, *head, "--compilation-cache", str(cache), *options, *worker]
        self.began = time.time()
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=800)
        self.ended, self.code, self.printed = time.time(), done.returncode, done.stdout + done.stderr
        lines = [line for path in folder.glob("notes-*") for line in path.read_text().split("\n")[:-1]]
        self._notes = sorted(map(json.loads, lines), key=lambda note: note["time"])

    def notes(self, what, **where):
        wanted = {"what": what, **where}
        return [note for note in self._notes if wanted.items() <= note.items()]

    def __str__(self):
        lines = [line for line in self.printed.splitlines() if not re.search(r"\[Gloo\]|\] +@ ", line)]
        return "\n".join([f"exit code {self.code}", *lines[-60:]])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """`undisturbed(kind, steps)`: the bits of one process with all 8 devices, to which nothing happens."""
    found = {}

    def undisturbed(kind, steps):
        if (kind, steps) not in found:
            plan = {"kind": kind, "steps": steps, "faults": []}
            job = Job(tmp_path_factory.mktemp("whole") / kind, plan, processes=1, devices=8)
            assert job.code == 0, str(job)
            found[kind, steps] = job.notes("end")[0]["state"]
        return found[kind, steps]

    return undisturbed


def rows_of(steps):
    """The rows of each batch, by the rule in the docstring of `dp.batches`."""
    per_epoch = worker.ROWS // worker.BATCH
    rows = [order_of(worker.ROWS, 0, epoch) for epoch in range(-(-steps // per_epoch))]
    return np.concatenate(rows).reshape(-1, worker.BATCH)[:steps].tolist()


def assert_every_row_once(job, steps):
    """In each batch those who made it have the rows that belong to it.

    One that died at it, after the others had its part, has only said which rows it took.
    """
    for taken, rows in enumerate(rows_of(steps), 1):
        made = job.notes("step", taken=taken, attempt=0)
        found = sum((note["rows"] for note in made), [])
        if len(found) < len(rows):
            dead = {note["rank"] for note in job.notes("fault")} - {note["rank"] for note in made}
            last = [job.notes("begins", taken=taken, rank=rank)[-1:] for rank in dead]
            found += sum((note["rows"] for note in sum(last, [])), [])
        assert sorted(found) == sorted(rows), f"batch {taken}: {made}"


def assert_soon(job, title):
    """Each change is told to all who are there, at one batch, and the next good step comes within the seconds.

    On a machine that is busy with more all takes longer; so did the start of this very job.
    """
    table, faults = [], [fault for fault in job.notes("fault") if fault["number"] != "unlucky"]
    least = max(AGAIN, (job.notes("step")[0]["time"] - job.began) / 2)
    for fault, end in zip(faults, [*[fault["time"] for fault in faults[1:]], float("inf")], strict=True):
        changed = [x for x in job.notes("changed") if fault["time"] < x["time"] < end]
        lost = [x for x in changed if fault["rank"] in x["lost"]]
        back = [x for x in changed if fault["rank"] in x["joined"]]
        assert lost and fault["rank"] not in {x["rank"] for x in lost}, str(job)
        assert not back or fault["rank"] in {x["rank"] for x in back}, str(job)
        for told, what in ((lost, "has died"), (back, "has come back")):
            last = max([x["time"] for x in told], default=0)
            good = {x["rank"]: x for x in reversed(job.notes("step")) if x["time"] > last}
            for x in told:
                assert f"process {fault['rank']} {what}" in x["text"]
                since, again = x["time"] - fault["time"], good[x["rank"]]["time"] - x["time"]
                assert again < least, f"{again:.1f} s, at most {least:.1f}: {job}"
                table.append(f"| {title} | {fault['rank']} {what} | {x['rank']} | {since:.1f} | {again:.1f} |")
            assert len({good[x["rank"]]["taken"] for x in told}) <= 1
    print("\n".join(table))
    if path := os.environ.get("JDP_RECOVERY_TABLE"):
        with open(path, "a") as file:
            file.write("\n".join([*table, ""]))


def assert_all_end_so(job, ranks, state):
    assert job.code == 0, str(job)
    assert {(end["rank"], end["state"]) for end in job.notes("end")} == {(rank, state) for rank in ranks}, str(job)


BACK = ["--recover", "--max-restarts"]


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_ten_die_in_900_steps_and_come_back_and_the_bits_are_the_same(tmp_path, undisturbed):
    """The 8 replicas are on 8 and on 4 devices, in turns; in the end all four processes are there."""
    killed = [[2, 1, 3][i % 3] for i in range(10)]
    faults = [[rank, 80 * (i + 1), "dies soon" if i % 3 == 1 else "dies"] for i, rank in enumerate(killed)]
    job = Job(tmp_path / "job", {"kind": "linen", "steps": 900, "slow": True, "faults": faults}, options=[*BACK, "10"])
    assert_all_end_so(job, range(4), undisturbed("linen", 900))
    assert [note["rank"] for note in job.notes("fault")] == killed
    assert_every_row_once(job, 900)
    assert_soon(job, "900 steps")
    assert job.printed.count("the others go on without it, and it starts again, alone") == 10


@pytest.mark.faults
def test_three_of_four_die_and_the_bits_are_the_same(tmp_path, undisturbed):
    """One process is left in the end, of 2 devices; before, the 8 replicas were on 8, 4 and 4 devices. With NNX."""
    killed = [[2, 50, "dies"], [1, 100, "dies soon"], [3, 150, "dies"]]
    job = Job(tmp_path / "job", {"kind": "nnx", "steps": 200, "faults": killed})
    assert_all_end_so(job, [0], undisturbed("nnx", 200))
    assert [note["rank"] for note in job.notes("fault")] == [2, 1, 3]
    assert_every_row_once(job, 200)
    assert_soon(job, "200 steps of NNX")
    assert job.printed.count("was ended by SIGKILL") == 3 and "the others go on without it" in job.printed


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_all_but_one_die_and_come_back(tmp_path, undisturbed):
    """With NNX. One of them dies again as it is let in."""
    plan = {"kind": "nnx", "steps": 200, "slow": True, "unlucky": [3]}
    plan["faults"] = [[1, 20, "dies"], [2, 20, "dies"], [3, 20, "dies"]]
    job = Job(tmp_path / "job", plan, options=[*BACK, "4"])
    assert_all_end_so(job, range(4), undisturbed("nnx", 200))
    assert [note["rank"] for note in job.notes("fault", number="unlucky")] == [3]
    assert {2, 3} <= {p for note in job.notes("changed", rank=1) for p in note["joined"]}
    assert_every_row_once(job, 200)


@pytest.mark.faults
def test_the_job_ends_without_one_that_was_started_again(tmp_path, undisturbed):
    """It is still busy with what comes before `sync`."""
    plan = {"kind": "linen", "steps": 60, "faults": [[2, 58, "dies"]], "late": 60}
    job = Job(tmp_path / "job", plan, options=[*BACK, "1"])
    assert_all_end_so(job, [0, 1, 3], undisturbed("linen", 60))
    assert "it starts again, alone (1 of 1)" in job.printed
    assert "[2] jdp: process 2 was started again, and the job has ended without it" in job.printed
    assert job.ended - job.notes("end")[-1]["time"] < 20


@pytest.mark.faults
def test_one_that_cannot_come_back(tmp_path, undisturbed):
    """Two devices have two orders, and Gloo has broken connections in both. The other goes on alone."""
    plan = {"kind": "linen", "steps": 200, "slow": True, "faults": [[1, 20, "dies"]]}
    job = Job(tmp_path / "job", plan, processes=2, devices=1, options=[*BACK, "1"])
    assert_all_end_so(job, [0], undisturbed("linen", 200))
    assert "[1] jdp: process 1 was started again, and Gloo has no order of devices left" in job.printed


@pytest.mark.faults
def test_two_die_at_once(tmp_path, undisturbed):
    job = Job(tmp_path / "job", {"kind": "linen", "steps": 60, "faults": [[1, 20, "dies"], [2, 20, "dies"]]})
    assert job.code == 0, str(job)
    assert {(end["rank"], end["state"]) for end in job.notes("end")} == {(r, undisturbed("linen", 60)) for r in (0, 3)}
    assert_every_row_once(job, 60)


@pytest.mark.faults
def test_who_is_not_needed_any_more_ends(tmp_path, undisturbed):
    """Three devices do not divide 8 replicas: two go on, and the third process ends well."""
    plan = {"kind": "linen", "steps": 60, "faults": [[1, 20, "dies"]]}
    job = Job(tmp_path / "job", plan, devices=1)
    assert job.code == 0, str(job)
    assert {(end["rank"], end["state"]) for end in job.notes("end")} == {(r, undisturbed("linen", 60)) for r in (0, 2)}
    assert "[3] jdp: process 3 is not needed: 2 devices have the 8 replicas" in job.printed
    assert_every_row_once(job, 60)
    assert len(job.notes("changed")) == 3, "the end of the third is no death"


@pytest.mark.faults
def test_without_replicas_and_with_own_rows(tmp_path):
    """All devices that are left, three times one; the rows of who is dead are lost with it."""
    plan = {"kind": "uneven", "steps": 30, "faults": [[1, 10, "dies soon"], [3, 20, "dies"]]}
    job = Job(tmp_path / "job", plan, devices=1)
    assert job.code == 0, str(job)
    assert [(end["rank"], end["devices"]) for end in job.notes("end")] in ([(0, 2), (2, 2)], [(2, 2), (0, 2)])
    assert len({end["state"] for end in job.notes("end")}) == 1
    assert [note["taken"] for note in job.notes("step", rank=0)] == [*range(1, 31)]


@pytest.mark.faults
def test_one_that_is_stopped_for_good_is_left_out(tmp_path, undisturbed):
    """It cannot say that it is alive. The launcher kills it when the others have ended."""
    job = Job(tmp_path / "job", {"kind": "linen", "steps": 60, "faults": [[2, 20, "stops"]]})
    assert job.code == 0, str(job)
    assert {(x["rank"], x["state"]) for x in job.notes("end")} == {(r, undisturbed("linen", 60)) for r in (0, 1, 3)}
    assert_every_row_once(job, 60)


@pytest.mark.faults
def test_process_0_dies_and_all_start_again(tmp_path, undisturbed):
    """JAX's coordination service is in it."""
    plan = {"kind": "linen", "steps": 60, "faults": [[2, 10, "dies"], [0, 30, "dies"]]}
    job = Job(tmp_path / "job", plan, options=[*BACK, "1"])
    assert job.code == 0, str(job)
    assert "rank 0 was ended by SIGKILL" in job.printed and "all 4 processes start again" in job.printed
    assert [end["attempt"] for end in job.notes("end")] == [1] * 4
    assert {end["state"] for end in job.notes("end")} == {undisturbed("linen", 60)}
    assert job.notes("step", attempt=1)[0]["time"] - job.notes("fault", rank=0)[0]["time"] < ENDS


@pytest.mark.faults
def test_checkpoints_go_on_after_a_death(tmp_path, undisturbed):
    """Process 0 saves alone, for it is there all the time; its own death starts all from what it saved last."""
    plan = {"kind": "linen", "steps": 100, "slow": True, "checkpoints": str(tmp_path / "run"), "every": 10}
    plan["faults"] = [[1, 25, "dies"], [0, 68, "dies"]]
    job = Job(tmp_path / "job", plan, options=[*BACK, "1"])
    assert_all_end_so(job, range(4), undisturbed("linen", 100))
    began = [(note["rank"], note["attempt"], note["taken"]) for note in job.notes("restored")]
    saved = began[-1][2]
    assert saved in (50, 60), "a save goes on beside the steps, and ends before the next"
    assert sorted(began) == sorted([(r, 0, 0) for r in (0, 1, 1, 2, 3)] + [(r, 1, saved) for r in range(4)])
    assert_every_row_once(job, 60)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("rank", "what", "code", "said"),
    [
        (0, "dies", 128 + signal.SIGKILL, r"jdp launch: rank 0 was ended by SIGKILL after .*, before any other"),
        (2, "sleeps", WAITED, r"process 2 did not come to it"),
        (2, "raises", 1, r"jdp: process 2 has failed \(ValueError: row 17 is no good"),
    ],
)
def test_what_ends_all_as_without(tmp_path, rank, what, code, said):
    """The death of process 0; one that lives and does not come, or that fails by itself."""
    job = Job(tmp_path / "job", {"kind": "linen", "steps": 60, "faults": [[rank, 20, what]]})
    assert job.code == code and re.search(said, job.printed), str(job)
    assert not job.notes("end")
    assert job.ended - job.notes("fault")[0]["time"] < ENDS


# ---- in one process


class FakeDevice:
    platform = "cpu"

    def __init__(self, process, number):
        self.process_index, self.number, self.id = process, number, 100 * process + number

    def __repr__(self):
        return f"{self.process_index}:{self.number}"


@pytest.mark.parametrize(
    ("held", "replicas", "expected"),
    [
        ({0: 2, 1: 2, 3: 2}, 8, "0:0 0:1 1:0 3:0"),  # 6 do not divide 8; 4 do, and all processes have some
        ({0: 2, 3: 2}, 8, "0:0 0:1 3:0 3:1"),
        ({0: 3, 2: 1}, 6, "0:0 0:1 2:0"),
        ({0: 1, 1: 1, 2: 1}, 3, "0:0 1:0 2:0"),
        ({0: 8}, 4, "0:0 0:1 0:2 0:3"),
    ],
)
def test_the_devices_for_so_many_replicas(held, replicas, expected):
    devices = [FakeDevice(process, k) for process, count in held.items() for k in range(count)]
    lost = jdp.distributed.ProcessesChanged("process 9 has died", devices)
    assert " ".join(map(str, lost.devices_for(replicas))) == expected


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_an_order_is_used_once(counts, data):
    """Each is one of those devices, a process's beside each other, and new, as is its own order for the gather."""
    mine, used = Members(), set()
    devices = [FakeDevice(process, k) for process, count in enumerate(counts) for k in range(count)]
    while (found := mine.fresh(some := data.draw(parts_of(devices)))) is not None and len(used) < 20:
        assert sorted(found, key=lambda d: d.id) == some
        assert len([process for process, _ in itertools.groupby(found, lambda d: d.process_index)]) == len(
            {d.process_index for d in found}
        )
        if len({d.process_index for d in some}) == 1:
            assert [*found] == some
            break
        ids = [d.id for d in found]
        both = {tuple(ids), tuple(ids[-1:] + ids[:-1])}
        assert not both & used
        used |= both
        mine.uses(found)
    if found is None:
        assert used, "there is one at first"


def parts_of(devices):
    """All of them, or those of some of the processes."""
    kept = st.sets(st.sampled_from([*{d.process_index for d in devices}]), min_size=1)
    return kept.map(lambda processes: [d for d in devices if d.process_index in processes])


@pytest.mark.parametrize(
    ("processes", "each", "comes_back"),
    [(2, 1, 0), (2, 2, 7), (3, 1, 0), (4, 1, 1), (4, 2, 20)],
)
def test_how_often_one_can_come_back(processes, each, comes_back):
    """The same one, again and again, before an order is missing: as docs/processes.md has it; 20 and more for 4 x 2."""
    mine, devices = Members(), [FakeDevice(process, k) for process in range(processes) for k in range(each)]
    mine.uses(devices)
    for count in range(20):  # noqa: B007
        without = [d for d in devices if d.process_index != 1]
        mine.uses(mine.fresh(without))
        if not mine.have_place_for(devices):
            break
        mine.uses(mine.fresh(devices))
    else:
        count = 20
    assert count == comes_back


def test_what_one_that_comes_back_is_told():
    told, heard = Members(), Members()
    told.there, told.lives, told.generation, told.joined = (0, 2, 3), {0: 5, 1: 6, 2: 2**63, 3: 8}, 4, (2,)
    told.uses([FakeDevice(0, 0), FakeDevice(2, 0)])
    heard.waits = True
    heard.hear(json.loads(json.dumps(told.to_tell())))
    told.lives = {0: 5, 2: 2**63, 3: 8}
    assert vars(heard) == vars(told) | {"meetings": 0}


def test_sync_where_nobody_has_come_back():
    tree = {"x": np.ones(3), "taken": 7, "what": object()}
    assert jdp.distributed.sync(tree, None) is tree


LEAVES = {
    "bf16": jnp.array([1, -0.0, float("nan")], jnp.bfloat16),
    "float32": jnp.float32(7),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4)),
    "bool": np.array([True, False]),
    "complex64": np.complex64(1 - 2j),
    "int8": np.int8(-3),
    "none": np.zeros((0, 3)),
    "int": 2**40,
    "float": 0.1,
    "flag": True,
}


def test_what_a_leaf_becomes_on_the_way():
    """The bits and the kind of each, from one process's values into another's tree."""
    for name, x in LEAVES.items():
        sent = sync._value((), x)
        got = sync._like(np.frombuffer(sent.tobytes(), sent.dtype).reshape(sent.shape), x)
        assert type(got) is type(x) and getattr(got, "dtype", None) == getattr(x, "dtype", None), name
        assert sync._value((), got).tobytes() == sent.tobytes(), name
    for what in ("text", None.__class__, [1], 2**70, np.array(["a"], object)):
        with pytest.raises(TypeError, match=r"jdp.distributed.sync: the leaf at \['x'\] is a \w+; a leaf is an array"):
            sync._value((jax.tree_util.DictKey("x"),), what)


def test_what_is_cut_over_the_processes_is_refused(refused, monkeypatch, tmp_path):
    """Who has died takes its part along; and process 0 would save its own part alone."""
    cut = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x")))
    monkeypatch.setattr(type(cut), "is_fully_addressable", False)
    with refused(ValueError, "distributed.sync", match=r"the leaf at \['x'\] is cut over the processes"):
        sync._value((jax.tree_util.DictKey("x"),), cut)
    monkeypatch.setattr(limits, "recovers", True)
    with jdp.Checkpointer(tmp_path / "run") as checkpointer:
        with refused(ValueError, "Checkpointer", match=r"\['x'\] is cut over the processes"):
            checkpointer.save(1, {"x": cut})


def test_trees_that_differ_are_refused(refused, monkeypatch):
    """The leaf is named, and who has what there."""

    class Told:
        here, processes = 0, (0, 1)

        def tell(self, what, outline, seconds):
            return {0: outline, 1: {**outline, "['x']": "float32[4]"}}

    monkeypatch.setattr(sync, "meet", lambda exchange, what: None)
    with refused(jdp.distributed.DesyncError, "distributed.sync", match=r"trees: \['x'\]: process 0 has float32\[3\]"):
        sync._synced({"x": np.ones(3, np.float32)}, None, Told())


@pytest.mark.parametrize(("name", "value", "text"), [
    ("waits", True, "was started again, and the others have not let it in"),
    ("joined", (2,), "process 2 came back, and did not get the state of the others"),
])  # fmt: skip
def test_a_step_before_sync_is_refused(refused, monkeypatch, name, value, text):
    """Else the job would be done twice, or with different states."""
    monkeypatch.setattr(limits, "recovers", True)
    step = jdp.DataParallel(lambda v, x: x, devices=[0, 1]).train_step(
        lambda v, x: (x * v["params"]).mean(-1), optax.sgd(0.1)
    )
    state = step.init({"params": np.float32(1)})
    monkeypatch.setattr(members, name, value)
    with refused(RuntimeError, r"train_step_\S+", match=text):
        step(state, np.ones((4, 2), np.float32))


def test_a_process_without_devices_ends(monkeypatch, capsys):
    monkeypatch.setattr(recovery, "own_process", lambda: 2)
    lost = jdp.distributed.ProcessesChanged("process 9 has died", [FakeDevice(p, 0) for p in range(3)])
    with pytest.raises(SystemExit) as end:
        lost.devices_for(4)  # of processes 0 and 1
    assert end.value.code == 0 and "process 2 is not needed: 2 devices have the 4 replicas" in capsys.readouterr().err


def test_what_recovery_refuses(refused, monkeypatch):
    job = {"coordinator_address": "127.0.0.1:1", "num_processes": 2, "process_id": 1}
    with refused(ValueError, "distributed.initialize", match="recover is True and timeout is None"):
        jdp.distributed.initialize(**job, recover=True, timeout=None)
    monkeypatch.setattr(limits, "recovers", True)
    dp = jdp.DataParallel(lambda v, x: x, devices=[0, 1])
    for name in ("shard_optimizer", "shard_params"):
        with refused(ValueError, "train_step", match=f"{name} is True, and the job was started with"):
            dp.train_step(lambda v, x: x.mean(), optax.sgd(0.1), **{name: True})


def test_a_step_keeps_the_state_that_goes_in(monkeypatch):
    monkeypatch.setattr(limits, "recovers", True)
    step = jdp.DataParallel(lambda v, x: x, devices=[0, 1]).train_step(
        lambda v, x: (x * v["params"]).mean(-1), optax.sgd(0.1), donate=True
    )
    before = step.init({"params": np.float32(1)})
    step(before, np.ones((4, 2), np.float32))
    assert not any(x.is_deleted() for x in jax.tree.leaves(before))


def test_checkpoints_after_a_change(refused, monkeypatch, tmp_path):
    """Process 0 saves alone; the others, and one that comes back, neither write nor read."""
    state = {"x": np.arange(3)}
    with jdp.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.save(1, state, data=1)
        checkpointer.wait()
        monkeypatch.setattr(limits, "recovers", True)
        monkeypatch.setattr(members, "generation", 2)
        with refused(RuntimeError, "Checkpointer", match="restore is called after a jdp.distributed.ProcessesChanged"):
            checkpointer.restore(state)
        monkeypatch.setattr(members, "waits", True)
        assert checkpointer.restore(state) == (state, None)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        assert checkpointer.save(2, state) and not checkpointer.save(2, state)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdecimal()] == ["1"]


def test_a_step_is_made_by_all_or_by_none(monkeypatch):
    """Where a process dies at the end of a step, it may have run here: what it gave is not kept."""

    def program(x):
        return x + 1

    def meet(exchange, what, error=None):
        raise jdp.distributed.ProcessesChanged(f"{what}: {error}", [])

    some = object()
    assert recovery.in_all(some, program) is program
    monkeypatch.setattr(limits, "recovers", True)
    monkeypatch.setattr(recovery, "meet", meet)
    assert recovery.in_all(None, program) is program, "a program of this process alone"
    with pytest.raises(jdp.distributed.ProcessesChanged, match="program: None"):
        recovery.in_all(some, program)(np.ones(2))
    with pytest.raises(jdp.distributed.ProcessesChanged, match="program: unsupported operand"):
        recovery.in_all(some, program)(None)
    monkeypatch.setattr(members, "there", (0,))
    with pytest.raises(jdp.distributed.ProcessesChanged, match="program: None"):
        recovery.in_all(None, program)(np.ones(2))
