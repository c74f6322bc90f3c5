"""Who is named, and when, by those who wait for a program: by two and more watches with one clock and one service."""

import concurrent.futures
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from jax import monitoring

from jdp._processes import watch as module
from jdp._processes.places import Limits
from jdp._processes.watch import Watch

ALL = (0, 1, 2)


class Output(np.ndarray):
    """What a program gives, ready or not."""

    ready = False

    def is_ready(self):
        return self.ready

    def is_deleted(self):
        return False


class Job:
    """Processes that make calls and look for each other, a step of half a second at a time."""

    def __init__(self, monkeypatch, limits):
        self.now, self.here, self.keys, self.machines = 1000.0, 0, {}, {}
        self.state = "S"
        self.stopped, self.deaf, self.dead, self.left = set(), set(), set(), set()
        self.asking = set()  # those that wait for the devices of all
        self.called_back = {}  # the frames of the callbacks that run in a process
        monkeypatch.setattr(module, "limits", limits)
        monkeypatch.setattr(module, "machine", lambda: self.machines.get(self.here, "a"))
        monkeypatch.setattr(module.os, "getpid", lambda: 100 + self.here)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        for name, value in {
            "own_process": lambda: self.here,
            "process_count": lambda: len(ALL),
            "put": self.keys.__setitem__,
            "ended": lambda: self.left,
            "starts_backends": lambda: self.here in self.asking,
            "asked_for_devices": lambda: self.here in self.asking,
            "callbacks": lambda: self.called_back.get(self.here, []),
            "state_of": lambda pid: "Z" if pid in self.dead else self.state,
            "under": lambda folder: [(k, v) for k, v in self.keys.items() if k.startswith(folder)],
        }.items():
            monkeypatch.setattr(module, name, value)
        self.watches = {p: Watch() for p in ALL}

    def come(self, processes=ALL, what="step"):
        """These processes come to the next program, and dispatch it."""
        outputs = []
        for process in processes:
            self.here, output = process, np.zeros(1).view(Output)
            self.watches[process].moved("all", what)
            self.watches[process].dispatched("all", ALL, output)
            outputs.append(output)
        return outputs

    def go_on(self, seconds):
        """Time passes; gives what each process said, and when, if it gave up."""
        gave_up = {}
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            for process in set(ALL) - self.stopped:
                self.here, watch = process, self.watches[process]
                why = None if self.here in self.deaf else watch.look()
                why = why or watch.is_cut_off()
                if why and self.here not in gave_up:
                    gave_up[self.here] = why
        return gave_up


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch, Limits())


def test_nobody_is_late_who_has_come(job):
    """A long program, of which the watch cannot know how long: half an hour, then the devices stand still."""
    job.come()
    assert not job.go_on(1790)
    found = job.go_on(20)
    assert found.keys() == {*ALL}
    for why in found.values():
        assert "all processes have come to it: the devices, or the network between them, stand still" in why


def test_a_step_may_take_long_although_one_process_reads_its_loss(job):
    """The others dispatch the next step meanwhile; it begins when the first has ended, and so does the time for it."""
    steps = [job.come(), job.come((1, 2)), job.come((1, 2))]
    for step in steps[:2]:
        assert not job.go_on(30)
        for output in step:
            output.ready = True
        assert not job.go_on(1)
        if step is steps[0]:
            steps[1] += job.come((0,))
    assert not job.go_on(15)
    found = job.go_on(30)
    assert found.keys() == {1, 2} and all("process 0 did not come to it" in why for why in found.values())


def test_what_has_ended_is_not_waited_for(job):
    for output in job.come():
        output.ready = True
    assert not job.go_on(100)
    first, second = job.come(), job.come()  # the newest counts, when what was watched has ended
    job.go_on(1)
    for output in first:
        output.ready = True
    job.go_on(1)
    job.come((0,))
    for output in second:
        output.ready = True
    assert "processes 1, 2 did not come to it" in job.go_on(30)[0]


def test_who_has_ended_without_devices_is_named_by_those_that_wait_for_them(job):
    """After the time-out, because what starts may be slow."""
    job.asking = {0, 1}
    assert not job.go_on(50)
    job.asking = {1}
    assert not job.go_on(1)
    job.asking, job.left = {0, 1}, {2}
    found = job.go_on(19)
    assert list(found) == [1]
    assert "jdp.distributed: process 1 has waited 5" in found[1]
    assert "and process 2 has ended its program without asking for them; all processes make the same" in found[1]
    assert {*job.go_on(3)} == {0, 1}


@pytest.mark.parametrize(("state", "seconds", "why"), [
    ("S", 61, "has not asked for them; all processes do"), ("T", 12, "has given no sign of life for 1"),
])  # fmt: skip
def test_who_does_not_ask_for_devices_is_named(job, state, seconds, why):
    job.go_on(3)
    job.asking, job.state = {0, 1}, state
    job.stopped = {2} if state == "T" else set()
    assert not job.go_on(seconds - 4)
    found = job.go_on(6)
    assert found.keys() == {0, 1}
    assert (
        "jdp.distributed: process 1 has waited" in found[1]
        and f"for the devices of all processes, and process 2 {why}" in found[1]
    )


def test_process_0_is_stopped_while_another_waits_for_devices(job):
    job.asking = {1, 2}
    job.go_on(3)
    job.state, job.stopped, job.deaf = "T", {0}, {1, 2}
    found = job.go_on(24)
    assert found.keys() == {1, 2}
    assert "jdp.distributed: process 1 has waited" in found[1] and "process 0 does not answer: it is" in found[1]


def test_who_is_met_in_a_call_is_known(job):
    """One that is stopped right after its first call is known by its machine's process number."""
    for job.here in ALL:
        job.watches[job.here].tell()
    job.here = 1
    assert not job.watches[1]._places
    job.watches[1].meet(ALL)
    assert job.watches[1]._places.keys() == {*ALL}
    learnt, job.now = job.watches[1]._learnt, job.now + 5
    job.watches[1].meet((0, 1))
    assert job.watches[1]._learnt == learnt


def test_who_does_not_come_is_named_after_the_timeout(job):
    for output in job.come():
        output.ready = True
    job.come((0, 1))
    assert not job.go_on(19)
    found = job.go_on(3)
    assert found.keys() == {0, 1}
    assert "jdp.step: process 0 has waited 2" in found[0]
    assert "process 2 did not come to it (its last call: step" in found[0]


def test_another_call_in_its_place_is_named(job):
    """Each has come to as many calls as the other, so neither is late, and each waits for the other."""
    for output in job.come():
        output.ready = True
    job.come((0,), "prefetch")
    job.come((1, 2))
    found = job.go_on(19)
    assert not found
    found = job.go_on(5)
    assert "jdp.prefetch: process 0 has waited 2" in found[0]
    assert "process 1 is at another call in its place, jdp.step; all processes make the same calls" in found[0]
    assert "process 0 is at another call in its place, jdp.prefetch" in found[1]


def test_who_was_at_another_call_in_its_place_and_is_ahead_is_named(job):
    """A new program makes two moves. The process gives it up, catches the error, and does something else."""
    for output in job.come():
        output.ready = True
    for what in ("check_replicas", "check_replicas (a new program)"):
        job.watches[1].moved("all", what)
    job.come((0, 2))
    assert not job.go_on(19)
    found = job.go_on(5)
    assert found.keys() == {0, 2}
    assert all("process 1 is at another call in its place, jdp.check_replicas;" in why for why in found.values())


@pytest.mark.parametrize("more", [1, 7, 50])
def test_who_is_ahead_after_the_same_call_is_not_to_blame(job, more):
    """It does not wait for what it has dispatched; the names of its older calls may be forgotten."""
    job.come()
    for _ in range(more):
        job.watches[1].moved("all", "another")
    assert not job.go_on(100)


def test_another_call_of_another_group_is_none(job):
    """What a process does with others, apart from these, does not stand in the place of this program."""
    outputs = job.come()
    for watch in job.watches.values():
        watch.moved("others", f"call {id(watch)}")
    assert not job.go_on(100)
    for output in outputs:
        output.ready = True


def test_who_waits_for_another_is_not_to_blame(job):
    """Of two that have not come the one that has come less far: the other waits for it."""
    for output in [*job.come(), *job.come((1, 2)), *job.come((1,))]:
        output.ready = True
    job.watches[0].moved("all", "another")  # three calls before what process 2 waits for
    job.watches[2].moved("all", "step")
    job.watches[1].moved("all", "step")
    job.come((1,))
    found = job.go_on(30)
    assert "process 0 did not come to it (its last call: another" in found[1]


def test_who_comes_late_but_moves_is_waited_for(job):
    """A loop that is many programs behind, and goes on."""
    for _ in range(50):
        job.come((0,))
    for _ in range(10):
        job.come((1, 2))
        assert not job.go_on(15)


def test_who_compiles_is_not_late(job):
    job.come((0, 1))
    job.here = 2
    job.watches[2].compile_event("/jax/core/compile/backend_compile_duration", True)
    assert not job.go_on(300)
    job.watches[2].compile_event("/jax/core/compile/backend_compile_duration", False)
    assert not job.go_on(19) and job.go_on(5).keys() == {0, 1}


def test_a_process_that_compiles_is_not_late_though_another_of_its_threads_has_compiled(job):
    """As the one that saves does, to look at a checkpoint on the disk."""
    job.come((0, 1))
    job.here, watch = 2, job.watches[2]
    watch.compiling(True)
    with concurrent.futures.ThreadPoolExecutor() as other:
        other.submit(lambda: (watch.compiling(True), watch.compiling(False))).result()
    assert not job.go_on(300)


def test_what_is_lowered_is_not_compiled():
    """As for `cost_analysis`. By JAX's own events, and also if the compiler fails."""
    watch, seen = Watch(), []

    def compiles(event, *_, **__):
        if event.endswith("/backend_compile_duration"):
            seen.append(watch._compiles(module.time.monotonic()))

    def begins(event, value, **_):
        watch.compile_event(event, True)

    def ends(event, duration_secs, **_):
        watch.compile_event(event, False)

    monitoring.register_scalar_listener(begins)
    monitoring.register_scalar_listener(compiles)
    monitoring.register_event_duration_secs_listener(ends)
    try:
        lowered = jax.jit(lambda x: x + 1).lower(1.0)
        assert not watch._compiles(module.time.monotonic())
        lowered.compile()
        with pytest.raises(jax.errors.JaxRuntimeError):
            lowered.compile({"no_such_option": True})
    finally:
        monitoring.unregister_scalar_listener(begins)
        monitoring.unregister_scalar_listener(compiles)
        monitoring.unregister_event_duration_listener(ends)
    assert seen == [True, True] and not watch._compiles(module.time.monotonic())


def test_who_has_just_compiled_is_busy(job):
    """As one who waits in a call asks: so several programs, one after the other, are no fault either."""
    job.here = 2
    job.watches[2].compiling(True)
    job.go_on(100)
    assert job.watches[0].is_busy(2)
    job.here = 2
    job.watches[2].compiling(False)
    job.go_on(15)
    assert job.watches[0].is_busy(2)
    job.go_on(10)
    assert not job.watches[0].is_busy(2)


def test_a_compilation_has_an_end(job):
    job.come((0, 1))
    job.watches[2].compiling(True)
    assert not job.go_on(1790) and "process 2 did not come" in job.go_on(40)[0]


@pytest.mark.parametrize(
    "machine, state, words, seconds",
    [
        ("a", "T", "(stopped; on this machine)", 10),
        ("a", "S", "(its Python does not run; on this machine)", 20),
        ("b", "T", "the network to another machine", 20),
    ],
)
def test_who_gives_no_sign_of_life_is_named_though_it_had_come(job, capfd, machine, state, words, seconds):
    """The system says of a process of this machine that it is stopped: that is sure after half the time."""
    job.machines[2], job.state = machine, state
    job.come()
    job.go_on(1)
    job.stopped = {2}
    assert not job.go_on(seconds - 2)
    found = job.go_on(5)
    assert "process 2 has given no sign of life for" in found[0] and words in found[0] and words in found[1]
    assert capfd.readouterr().err.count("process 2 has given no sign of life") == 2  # each has said so once before


def test_a_silence_that_passes_ends_nothing(job, capfd):
    job.come()
    job.go_on(1)
    job.stopped = {2}
    assert not job.go_on(17)
    job.stopped = set()
    assert not job.go_on(60)
    job.stopped = {2}
    job.go_on(9)
    said = capfd.readouterr().err.splitlines()  # of each silence
    assert len(said) == 4 and all("process 2 has given no sign of life" in line for line in said)


def test_who_cannot_reach_process_0_says_so(job, capfd):
    job.come()
    job.go_on(2)
    job.deaf = {1}
    assert not job.go_on(17)
    assert "process 0 does not answer: the network to its machine is cut" in job.go_on(3)[1]
    assert capfd.readouterr().err.count("process 0 does not answer") == 1


def test_process_0_stopped_on_this_machine(job):
    job.come()
    job.go_on(3)
    job.state, job.stopped, job.deaf = "T", {0}, {1, 2}
    assert not job.go_on(6)
    for why in (found := job.go_on(5)).values():
        assert "process 0 does not answer: it is stopped." in why
    assert found.keys() == {1, 2}


def test_a_call_that_waits_says_so_too(job):
    with job.watches[1].waiting("call", 22):
        job.deaf = {1}
        assert not job.go_on(21)
        assert job.go_on(3)[1].startswith("jdp.call: process 1 has waited 22 s for the others, and process 0 does not")
    assert not job.go_on(100)


def test_a_call_that_may_wait_for_long_does_not_wait_for_a_service_that_is_silent(job):
    with job.watches[1].waiting("step (compiled)", 1800):
        assert not job.go_on(300)
        job.deaf = {1}
        assert "process 0 does not answer" in job.go_on(10)[1]


def test_pythons_lock_held_for_long_is_no_silence_of_the_service(job):
    """Neither thread runs meanwhile: the one that looks at the other's rounds has not looked itself."""
    job.come()
    job.go_on(2)
    job.now += 100
    job.here = 1
    assert job.watches[1].is_cut_off() is None


def test_no_timeout(monkeypatch):
    job = Job(monkeypatch, Limits(step=math.inf))
    job.come((0, 1))
    job.stopped = {2}
    assert not job.go_on(3000)


def test_what_a_process_tells(job):
    job.machines[1] = "b"
    job.come((1,), "step.mse")
    job.go_on(4)
    place = json.loads(job.keys["jdp/at/1"])
    assert (
        place[1:4] == ["b", 101, "step.mse"]
        and place[4] < 4
        and place[5:] == [False, {"all": 1}, 0.0, {"all": ["step.mse"]}, False]
    )


def test_who_was_killed_is_named_at_once_by_those_of_its_machine(job):
    job.machines[1] = "b"
    assert not job.go_on(3)  # also of those who do not wait for it, or in something that jdp knows nothing of
    job.dead, job.stopped = {102}, {2}
    found = job.go_on(3)
    assert found.keys() == {0} and "jdp: process 2 ended without a word: killed" in found[0]


def test_who_has_ended_in_good_order_was_not_killed(job, capfd):
    outputs = job.come()
    job.go_on(3)
    job.dead, job.stopped, job.left = {102}, {2}, {2}
    assert not job.go_on(15) and not capfd.readouterr().err
    for output in outputs:
        output.ready = True
    job.come((0, 1))  # which it does not come to
    assert "process 2 has ended its program" in job.go_on(4)[0]


def test_who_has_ended_after_the_same_calls_is_not_to_blame(job):
    """What it came to last it says before it says that it has ended."""
    job.come()
    job.go_on(3)
    job.come()
    job.here = 2
    job.watches[2].tell()
    job.stopped, job.left = {2}, {2}
    assert not job.go_on(120)


def leave(stack, job, *processes):
    """The programs of these processes end, and they wait for the others until the stack ends."""
    for job.here in processes:
        stack.enter_context(job.watches[job.here].leaving())
        job.watches[job.here].tell()
        job.left.add(job.here)


@pytest.fixture
def two_have_left(job):
    """A job of which processes 0 and 1 have ended their programs, and process 2 has work of its own."""
    for output in job.come():
        output.ready = True
    job.go_on(3)
    with contextlib.ExitStack() as stack:
        leave(stack, job, 0, 1)
        yield job


def test_who_has_ended_waits_for_one_that_works_as_long_as_jax_does(two_have_left, capfd):
    assert not two_have_left.go_on(298) and not capfd.readouterr().err
    found = two_have_left.go_on(4)
    assert found.keys() == {0, 1}
    words = r"process 1 ended its program 30\d s ago, and process 2 has not \(its last call: step, 30\d s ago\); all "
    assert re.search(words, found[1]) and "shutdown_timeout=" in found[1]


def test_nothing_is_said_when_all_have_ended(two_have_left):
    with contextlib.ExitStack() as stack:
        leave(stack, two_have_left, 2)
        assert not two_have_left.go_on(600)


def test_who_is_killed_after_the_others_have_ended_is_named(two_have_left):
    two_have_left.go_on(30)
    two_have_left.dead, two_have_left.stopped = {102}, {2}
    found = two_have_left.go_on(4)
    assert found.keys() == {0, 1} and "process 2 ended without a word: killed" in found[0]


@pytest.mark.parametrize(("state", "seconds"), [("T", 10), ("S", 299 - 30)], ids=["stopped", "holds Python's lock"])
def test_who_is_stopped_after_the_others_have_ended_is_named(two_have_left, state, seconds):
    """One that holds Python's lock may be at work (`json.dumps` holds it to its end)."""
    two_have_left.go_on(30)
    two_have_left.state, two_have_left.stopped = state, {2}
    assert not two_have_left.go_on(seconds - 2)
    found = two_have_left.go_on(6)
    assert found.keys() == {0, 1} and "process 1 ended its program" in found[1]
    assert ("process 2 has given no sign of life for 1" in found[1]) == (state == "T")


def test_process_0_is_stopped_after_the_others_have_ended(job):
    job.come()[0].ready = True
    for watch in job.watches.values():
        watch._running.clear()
    job.go_on(3)
    with contextlib.ExitStack() as stack:
        leave(stack, job, 1, 2)
        job.go_on(5)
        job.state, job.stopped, job.deaf = "T", {0}, {1, 2}
        found = job.go_on(20)
    assert found.keys() == {1, 2} and "process 0 does not answer: it is stopped" in found[1]


def test_no_older_place_is_written_over_the_last(job, monkeypatch):
    """The thread that looks may be about to write where the process was, when the main thread writes where it ends."""
    begun, goes_on, texts = threading.Event(), threading.Event(), []

    def put(key, text):
        if not begun.is_set():
            begun.set()
            goes_on.wait(20)
        texts.append(text)

    monkeypatch.setattr(module, "put", put)
    job.watches[0].moved("all", "first")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(job.watches[0].tell)
        begun.wait(20)
        job.watches[0].moved("all", "last")
        last = pool.submit(job.watches[0].tell)
        concurrent.futures.wait([last], 0.2)
        goes_on.set()
    assert [json.loads(text)[3] for text in texts] == ["first", "last"]


def enter(stack, job, process, what="step", **options):
    """This process comes to a program, and is in its dispatch until the stack ends."""
    job.here = process
    job.watches[process].moved("all", what)
    stack.enter_context(job.watches[process].dispatching("all", ALL, **options))


def test_a_dispatch_that_does_not_come_back_is_watched(job):
    """As that of a gather, where one CPU device is all of a process, and another process does not come to it."""
    for output in job.come():
        output.ready = True
    with contextlib.ExitStack() as stack:
        for process in (0, 1):
            enter(stack, job, process)
        assert not job.go_on(19)
        found = job.go_on(3)
        assert found.keys() == {0, 1} and "process 2 did not come to it (its last call: step" in found[0]
        job.left = {2}
        assert "process 2 has ended its program" in job.go_on(1)[0]
    for watch in job.watches.values():
        watch._running.clear()
    assert not job.go_on(100)


def test_the_others_may_take_longer_to_come_to_the_first_call_of_a_kind(job):
    with contextlib.ExitStack() as stack:
        enter(stack, job, 0, seconds=60)
        job.watches[1].moved("all", "before")
        job.watches[1]._positions["all"] = 0
        assert not job.go_on(59)
        assert "did not come to it" in job.go_on(4)[0]


def test_who_traces_or_compiles_in_a_dispatch_does_not_wait(job):
    with contextlib.ExitStack() as stack:
        enter(stack, job, 0)
        with job.watches[0].preparing():
            assert not job.go_on(100)
        assert not job.go_on(18)
        job.here = 0
        job.watches[0].compiling(True)
        assert not job.go_on(100)
        job.watches[0].compiling(False)
        assert not job.go_on(18)
        assert "processes 1, 2 did not come to it" in job.go_on(5).get(0, "")


def test_a_callback_that_does_not_come_back_is_named(job):
    """All have come to the program; only the process whose device waits for Python can know it."""
    job.come()
    frame = object()
    job.called_back = {2: [frame]}
    assert not job.go_on(20)
    found = job.go_on(8)
    assert found.keys() == {0, 1}
    for why in found.values():
        assert re.search(r"process 2 has been for 2\d s in a Python function that the program calls", why), why


def test_callbacks_that_come_back_are_no_fault(job):
    """Each is another one, however fast; and where all are in one, nobody waits for another."""
    job.come()
    for _ in range(60):
        job.called_back = {2: [object()]}
        assert not job.go_on(1)
    job.called_back = {process: [object()] for process in ALL}
    assert not job.go_on(100)


def test_process_0_is_stopped_before_this_one_has_looked_at_the_newest_program(job):
    """The look at the service stands still since then, and does not tell what is pending."""
    for output in job.come():
        output.ready = True
    job.go_on(3)
    job.state, job.stopped, job.deaf = "T", {0}, {1, 2}
    job.come((1, 2))
    assert {*job.go_on(15)} == {1, 2}


def test_the_state_of_a_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert module.state_of(process.pid) in ("R", "S", "D")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert module.state_of(process.pid) == "Z"
        process.wait()
        assert module.state_of(process.pid) == ""


@pytest.mark.parametrize("gap", [8, 30, 300])
def test_a_pause_of_the_whole_job_blames_nobody(job, gap):
    """As by `docker pause`: the clock goes on, and the first process to look again finds old notes of the others."""
    outputs = job.come()
    assert not job.go_on(10)
    job.now += gap
    assert not job.go_on(19)
    for output in outputs:
        output.ready = True
    job.come((0, 1))
    assert "process 2 did not come to it" in job.go_on(30)[0]
