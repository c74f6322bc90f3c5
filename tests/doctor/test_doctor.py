"""`jdp doctor`: links that hang, lie and crash are named, nothing hangs, nothing is left behind."""

import contextlib
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from jdp.__main__ import main
from jdp._tools.doctor import advice, cli, examine, machine, watch
from jdp._tools.doctor.report import show
from jdp._tools.doctor.worker import MOVES, choose, compute, first_wrong, measure

ROOT = pathlib.Path(__file__).parents[2]
MEBIBYTES = ["--mebibytes", "1"]


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """`worker(code)`: the tests run in a process that runs `code` first; `REPLY` is its pipe."""

    def worker(code, name="worker.py"):
        script = tmp_path / name
        head = f"import os, sys, time, json\nsys.path.insert(0, {str(ROOT)!r})\nREPLY = int(sys.argv[1])\n"
        script.write_text(head + textwrap.dedent(code))
        monkeypatch.setattr(watch, "command", lambda reply, seconds: [sys.executable, str(script), str(reply)])
        return script

    return worker


@pytest.fixture
def fake(worker):
    """`fake(n, platform, answer)`: a worker without JAX; `answer` is the body of `def answer(test, devices):`."""

    def fake(n=2, platform="cpu", answer="", start=""):
        worker(f"""
            def say(thing):
                os.write(REPLY, json.dumps(thing).encode() + b"\\n")
            def answer(test, devices):
                {answer or "pass"}
                if test == "compute":
                    return {{}}
                return {{"latency": 2e-5, "bandwidth": 1.5, "bytes": 3_000_000_000}}
            say({{"ready": True}})
            for line in sys.stdin:
                request = json.loads(line)
                if request["test"] == "start":
                    {start or "pass"}
                    about = dict(platform={platform!r}, kind="kind", process=0)
                    about |= dict(memory_limit_bytes=2**34, memory_in_use_bytes=2**33)
                    each = [dict(name=f"{platform}:{{i}}", id=i, **about) for i in range({n})]
                    say({{"devices": each, "platform_version": "fake", "imbalance": []}})
                else:
                    say(answer(request["test"], request["devices"]))
        """)

    return fake


@pytest.fixture
def doctor(capsys, monkeypatch):
    """`doctor(*arguments)`: the exit code, and what it printed (the report, with --json)."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)  # conftest's

    def doctor(*arguments):
        code = cli.main(list(arguments))
        printed = capsys.readouterr().out
        return code, json.loads(printed) if "--json" in arguments else printed

    return doctor


def is_gone(pid, within=5.0):
    """Whether the process has ended, or does soon."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with contextlib.suppress(OSError):  # where nobody reaps orphans, they stay as zombies
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.05)
    return False


def by_name(report):
    return {(t["test"], *t["devices"]): t for t in report["computes"] + report["links"]["tests"]}


def test_a_healthy_machine(doctor):
    code, report = doctor("--json", *MEBIBYTES)
    assert code == 0 and report["ok"] and report["verdict"].startswith("All is well: 3 devices, 19 tests, none failed")
    assert report["machine"]["versions"]["jax"] == jax.__version__
    assert report["machine"]["settings"]["JAX_NUM_CPU_DEVICES"] == "3"
    assert report["machine"]["memory_bytes"] > report["machine"]["memory_available_bytes"] > 0
    assert [d["name"] for d in report["devices"]] == ["cpu:0", "cpu:1", "cpu:2"]
    tests = by_name(report)
    names = [d["name"] for d in report["devices"]]
    expected = {("compute", name) for name in names}
    expected |= {(test, *names) for test in ("broadcast", "all_reduce", "reduce_scatter", "all_gather")}
    expected |= {(test, a, b) for test in ("copy", "permute") for a in names for b in names if a != b}
    assert set(tests) == expected and all(test["ok"] for test in tests.values())
    for test in report["links"]["tests"]:
        assert test["bytes"] in (2**20, 2**20 + 8)  # rounded up for three devices
        assert 0.001 < test["algbw_gb_per_s"] < 1000 and 0.5 < test["latency_us"] < 1e6


@pytest.mark.full
def test_one_device_has_no_links_and_jax_is_not_started_here():
    code = "import jdp, sys; from jdp._tools.doctor.cli import main; code = main(['--devices', '1']); "
    code += "jdp.virtual_cpu_devices(5); import jax; print(code, len(jax.devices()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "none: there is one device" in run.stdout and run.stderr == ""
    assert run.stdout.splitlines()[-1] == "0 5"  # it could still choose the number of devices
    assert "\nVerdict\n  All is well: 1 device, 1 test, none failed" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80 and "\x1b" not in run.stdout


FAULTS = """
    import signal, jax, numpy as np
    from jdp._tools.doctor import worker

    def flipped(result, device, index):
        shards = [s.data for s in result.addressable_shards]
        at = [s.device.id for s in result.addressable_shards].index(device)
        flat = shards[at].reshape(-1)
        flat = flat.at[index].set(flat[index] ^ 1)
        shards[at] = jax.device_put(flat.reshape(shards[at].shape), shards[at].device)
        return jax.make_array_from_single_device_arrays(result.shape, result.sharding, shards)

    true = dict(worker.MOVES)

    def gather(x, mesh):
        return flipped(true["all_gather"](x, mesh), 2, 347)  # 342 words from each

    def scatter(x, mesh):
        raise RuntimeError("no such collective")

    def copy(x, mesh):
        ids = [d.id for d in mesh.devices]
        return flipped(true["copy"](x, mesh), 1, 17) if ids == [0, 1] else true["copy"](x, mesh)

    def permute(x, mesh):
        if [d.id for d in mesh.devices] == [2, 0]:
            import subprocess
            subprocess.Popen(["sleep", "600"], close_fds=False)  # it must not hold the pipe open
            print("F0101 Check failed: the link is gone", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return true["permute"](x, mesh)

    worker.MOVES |= {"all_reduce": lambda x, mesh: time.sleep(600), "all_gather": gather, "reduce_scatter": scatter}
    worker.MOVES |= {"copy": copy, "permute": permute}
    worker.serve(REPLY)
"""


@pytest.mark.full
def test_links_that_hang_lie_and_crash_are_named_and_the_rest_goes_on(doctor, worker):
    worker(FAULTS)
    started = time.monotonic()
    code, report = doctor("--json", "--timeout", "6", *MEBIBYTES)
    assert code == 1 and not report["ok"] and time.monotonic() - started < 45
    tests = by_name(report)
    every = ("cpu:0", "cpu:1", "cpu:2")
    failed = {name: test["failure"] for name, test in tests.items() if not test["ok"]}
    assert failed == {
        ("all_reduce", *every): "hang",
        ("reduce_scatter", *every): "error",
        ("all_gather", *every): "wrong",
        ("copy", "cpu:0", "cpu:1"): "wrong",
        ("permute", "cpu:2", "cpu:0"): "died",
    }
    assert len(tests) == 19 and "5 failed (all_reduce, reduce_scatter, all_gather, copy, permute)" in report["verdict"]
    hang = tests["all_reduce", *every]
    assert hang["text"].startswith("no answer within 6 s") and any("NPROC=6" in r for r in hang["remedies"])
    assert tests["reduce_scatter", *every]["text"] == "RuntimeError: no such collective"
    died = tests["permute", "cpu:2", "cpu:0"]["text"]
    assert "ended by SIGSEGV" in died and "Check failed: the link is gone" in died
    lie = tests["copy", "cpu:0", "cpu:1"]
    word = (17 * 2654435761 + 1) % 2**32  # device 0 in the first run
    assert lie["text"] == f"at index 17 expected {word}, found {word ^ 1} (1 of 1024 words wrong)"
    assert (lie["from"], lie["at"], lie["index"]) == ("cpu:0", "cpu:1", 17)
    lie = tests["all_gather", *every]
    word = (5 * 2654435761 + 40503 + 1) % 2**32  # word 5 of device 1
    assert (lie["from"], lie["at"], lie["expected"], lie["found"]) == ("cpu:1", "cpu:2", word, word ^ 1)
    assert lie["text"].startswith("cpu:1 -> cpu:2: at index 347 expected")


@pytest.mark.one_case
@pytest.mark.parametrize("test", ["broadcast", "all_reduce", "reduce_scatter", "all_gather", "copy", "permute"])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_every_wrong_word_is_found_and_so_are_old_ones(devices, monkeypatch, test, n):
    chosen = devices[: 2 if test in ("copy", "permute") else n][::-1]  # not in the order of their ids
    count = 24 * n
    assert measure(test, chosen, count, 2)["seconds"] > 0
    move, first = MOVES[test], []

    def lie(x, mesh):
        result = move(x, mesh)
        at = {s.device: s.data for s in result.addressable_shards}
        at[chosen[1]] = at[chosen[1]].at[(0,) * (result.ndim - 1) + (-1,)].add(np.uint32(2**31))
        return jax.make_array_from_single_device_arrays(result.shape, result.sharding, list(at.values()))

    monkeypatch.setitem(MOVES, test, lie)
    wrong = measure(test, chosen, count, 2)
    assert wrong["failure"] == "wrong" and wrong["at"] == 1 and wrong["wrong_words"] == 1
    assert wrong["index"] == wrong["words"] - 1 and (wrong["found"] - wrong["expected"]) % 2**32 == 2**31
    assert wrong["from"] == (None if "reduce" in test else len(chosen) - 1 if test == "all_gather" else 0)

    def old(x, mesh):  # a link that moves nothing, over memory where the right numbers were
        first.append(move(x, mesh))
        return first[0]

    monkeypatch.setitem(MOVES, test, old)
    assert measure(test, chosen, count, 2)["wrong_words"] > 1


def test_the_first_of_several_wrong_words_is_named():
    found, expected = np.array([1, 9, 3, 8], np.uint32), np.array([1, 2, 3, 4], np.uint32)
    wrong = {"index": 1, "expected": 2, "found": 9, "wrong_words": 2, "words": 4}
    assert first_wrong(found, expected) == wrong
    assert first_wrong(expected, expected) is None
    assert "(3,) words instead of (4,)" in first_wrong(found[:3], expected)["text"]


def test_a_device_that_computes_wrong_is_found(devices, monkeypatch):
    assert compute(devices[1], 100) == {}
    true = jax.numpy.matmul
    monkeypatch.setattr(jax.numpy, "matmul", lambda a, b: true(a, b).at[3, 4].add(1))
    wrong = compute(devices[1], 100)
    assert (wrong["failure"], wrong["index"], wrong["found"] - wrong["expected"]) == ("wrong", 3 * 256 + 4, 1)
    monkeypatch.setattr("jdp._tools.doctor.worker._shifted", lambda x, seed: x)
    assert compute(devices[1], 100)["wrong_words"] == 100


def test_bandwidths_are_those_of_nccl_tests(doctor, fake):
    fake(3, "gpu")
    code, report = doctor("--json")
    assert code == 0
    tests = by_name(report)
    every = ("gpu:0", "gpu:1", "gpu:2")  # 3 GB in 1.5 s; a link carries 4/3 of it in a sum, 2/3 in its halves
    assert {
        t: tests[t, *every]["busbw_gb_per_s"] for t in ("broadcast", "all_reduce", "reduce_scatter", "all_gather")
    } == {
        "broadcast": pytest.approx(2.0),
        "all_reduce": pytest.approx(8 / 3),
        "reduce_scatter": pytest.approx(4 / 3),
        "all_gather": pytest.approx(4 / 3),
    }
    links = report["links"]["tests"]
    assert all(t["algbw_gb_per_s"] == pytest.approx(2.0) and t["latency_us"] == pytest.approx(20) for t in links)
    assert tests["copy", "gpu:2", "gpu:0"]["busbw_gb_per_s"] == pytest.approx(2.0)


@pytest.mark.full
def test_nccl_p2p_disable_is_tried_once_for_each_kind_and_copies_have_other_remedies(doctor, fake, monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    fake(
        3,
        "gpu",
        """
                if test == "all_reduce" and os.environ.get("NCCL_P2P_DISABLE") != "1":
                    time.sleep(600)
                if test == "all_gather":
                    os._exit(7)
                if test in ("copy", "permute"):
                    return {"failure": "wrong", "at": 1, "from": 0, "index": 0, "expected": 5, "found": 0,
                            "wrong_words": 9, "words": 9}
    """.strip(),
    )
    started = time.monotonic()
    code, report = doctor("--json", "--timeout", "1")
    assert code == 1 and time.monotonic() - started < 8
    tests = by_name(report)
    every = ("gpu:0", "gpu:1", "gpu:2")
    hang, died = tests["all_reduce", *every], tests["all_gather", *every]
    assert hang["failure"] == "hang" and hang["cured_by_nccl_p2p_disable"] is True
    assert hang["remedies"][0].startswith("NCCL_P2P_DISABLE=1") and "iommu=pt" in hang["remedies"][0]
    assert died["text"] == "the process ended with code 7" and died["cured_by_nccl_p2p_disable"] is False
    copies = [t for t in report["links"]["tests"] if t["test"] == "copy"]
    assert {t["failure"] for t in copies} == {"wrong"} and len(copies) == 6  # a lie costs no deadline: all are tried
    assert not any("NCCL" in r for t in copies for r in t["remedies"])
    permutes = [t for t in report["links"]["tests"] if t["test"] == "permute"]
    assert [t.get("cured_by_nccl_p2p_disable") for t in permutes] == [False] + 5 * [None]
    _, text = doctor("--timeout", "1")
    assert "tried: with NCCL_P2P_DISABLE=1, all_reduce works." in text
    assert "tried: with NCCL_P2P_DISABLE=1, all_gather fails as well." in text
    assert text.count("copy gpu:") == 4 and "copy: 2 more, marked in the table above" in text


def test_a_kind_of_test_that_hangs_costs_two_deadlines_at_most(doctor, fake):
    fake(3, answer="if test == 'permute': time.sleep(600)")
    code, report = doctor("--json", "--timeout", "0.7")
    permutes = [t for t in report["links"]["tests"] if t["test"] == "permute"]
    assert code == 1 and [t["ok"] for t in permutes] == [False, False, None, None, None, None]
    assert permutes[2]["text"] == "the rest of permute was left out after 2 failures"
    assert "2 failed (permute), 4 left out" in report["verdict"]


@pytest.mark.full
def test_jax_that_does_not_start_is_named(doctor, fake, worker, tmp_path):
    fake(start="time.sleep(600)")
    code, report = doctor("--json", "--timeout", "0.7")
    assert code == 1 and report["devices"] == [] and report["links"]["why"] == "not tested: JAX did not start"
    assert report["start"]["failure"] == "hang" and report["start"]["text"] == "jax.devices(): no answer within 1.4 s"
    assert "1 failed (start)" in report["verdict"]
    worker("time.sleep(600)")
    _, text = doctor("--timeout", "0.4")
    assert "start HANGS: importing jax and jdp: no answer within 0.8 s" in text and "JAX_PLATFORMS=cpu" in text
    worker("print('Unknown flag in XLA_FLAGS: --xla_nonsense', flush=True); os.abort()")
    _, text = doctor()
    assert "ended by SIGABRT" in text and "Unknown flag in XLA_FLAGS: --xla_nonsense" in text
    # it starts once, and not again after a test has died
    once = tmp_path / "once"
    again = f"os.path.exists({str(once)!r}) and os._exit(3); open({str(once)!r}, 'w').close()"
    fake(start=again, answer="os._exit(4)")
    code, report = doctor("--json")
    first, *rest = report["computes"] + report["links"]["tests"]
    assert code == 1 and first["failure"] == "died" and len(rest) == 9
    assert {(t["ok"], t["text"]) for t in rest} == {
        (None, "the rest was left out: JAX does not start again, jax.devices(): the process ended with code 3")
    }


@pytest.mark.full
def test_a_backend_that_fails_says_so(doctor, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu_of_old")
    code, report = doctor("--json")
    assert code == 1 and report["start"]["failure"] == "error"
    assert "jax.devices(): RuntimeError" in report["start"]["text"] and "tpu_of_old" in report["start"]["text"]


@pytest.mark.full
def test_a_failure_without_words_says_where(doctor, worker):
    worker("""
        from jdp._tools.doctor import worker
        def start(spec):
            assert spec == "another"
        worker.start = start
        worker.serve(REPLY)
    """)
    code, text = doctor("--no-links")
    flat = " ".join(text.split())
    assert code == 1 and "start ERROR: jax.devices(): AssertionError at " in flat
    assert 'assert spec == "another"' in flat and "JAX_PLATFORMS may name a platform" in flat


def test_a_reader_that_has_seen_enough_is_no_error(fake):
    fake()
    command = watch.command(7, 1)[:2]
    code = f"import sys; from jdp._tools.doctor import cli, watch as w; first = {command!r}; "
    code += "w.command = lambda reply, seconds: [*first, str(reply)]; "
    code += "sys.exit(cli.main([]))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        run.stdout.close()
        assert run.stderr.read() == b"" and run.wait(60) == 0


@pytest.mark.full
def test_nothing_is_left_behind_also_what_the_worker_started(doctor, fake, tmp_path):
    pids = tmp_path / "pids"
    start = "import subprocess; child = subprocess.Popen(['sleep', '600'], pass_fds=[REPLY]); "
    start += f"print(os.getpid(), child.pid, file=open({str(pids)!r}, 'a'), flush=True)"
    fake(start=start, answer="if test == 'broadcast': time.sleep(600)\n                if test == 'copy': os._exit(1)")
    code, _ = doctor("--timeout", "0.7")
    started = [int(pid) for pid in pids.read_text().split()]
    assert code == 1 and len(started) == 2 * 4  # first, after the hang, and after both crashes
    assert all(is_gone(pid) for pid in started)


HANGS = """
    import ctypes
    from jdp._tools.doctor import worker
    def broadcast(x, mesh):
        print(os.getpid(), file=open(sys.argv[0] + ".pid", "w"), flush=True)
        {hang}
    worker.MOVES["broadcast"] = broadcast
    worker.serve(REPLY)
"""


@pytest.mark.full
def test_the_worker_ends_when_the_parent_is_killed(worker, tmp_path):
    script = worker(HANGS.format(hang="time.sleep(600)"))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from jdp._tools.doctor import cli, watch as w; "
    code += f"w.command = lambda reply, seconds: [sys.executable, {str(script)!r}, str(reply)]; cli.main([])"
    environ = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.DEVNULL) as parent:
        try:
            pid = tmp_path / "worker.py.pid"
            end = time.monotonic() + 60
            while not (pid.exists() and pid.read_text().strip()):
                assert time.monotonic() < end and parent.poll() is None
                time.sleep(0.05)
        finally:
            parent.kill()
    assert is_gone(int(pid.read_text()), within=3)


@pytest.mark.full
def test_the_kernel_ends_a_worker_that_no_one_watches_and_whose_python_is_stuck(worker, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    worker(HANGS.format(hang="ctypes.PyDLL(None).sleep(600)"))  # it holds the lock of the interpreter
    with contextlib.closing(watch.Worker(os.environ, 30)) as stuck:
        assert stuck.ask(None, 30)["ready"] and len(stuck.ask({"test": "start", "devices": None}, 30)["devices"]) == 2
        request = {"test": "broadcast", "devices": [0, 1], "words": 8, "alarm": 1}
        stuck._process.stdin.write(json.dumps(request).encode() + b"\n")
        stuck._process.stdin.flush()
        assert stuck._process.wait(10) == -signal.SIGALRM


def test_ctrl_c_ends_the_worker_too(fake, monkeypatch, tmp_path, capsys):
    pid = tmp_path / "pid"
    fake(start=f"open({str(pid)!r}, 'w').write(str(os.getpid()))", answer="os.kill(os.getppid(), 2); time.sleep(600)")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # behind a `&` it would be ignored
    try:
        assert main(["doctor"]) == 130 and "jdp doctor: interrupted" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGINT, before)
    assert is_gone(int(pid.read_text()))


REPORTS = {
    "well": {"n": 8},
    "ring": {"n": 10},
    "ill": {"n": 4, "answer": "if test in ('copy', 'all_reduce') and 2 in devices: os._exit(1)"},
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", REPORTS)
def test_the_report_fits_the_terminal(doctor, fake, monkeypatch, kind):
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))]:
        monkeypatch.delenv(name)  # conftest's, which the report would tell of
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=[red] --xla_b=2")  # no markup
    fake(**REPORTS[kind])
    code, report = doctor("--json")
    assert code == (kind == "ill")
    for columns, a_terminal in ((80, False), (80, True), (40, True), (200, True)):
        out = io.StringIO()
        out.isatty = lambda a_terminal=a_terminal: a_terminal
        monkeypatch.setenv("COLUMNS", "33" if not a_terminal else str(columns))  # of someone else's terminal
        monkeypatch.setenv("TERM", "dumb")
        show(report, out)
        text = out.getvalue()
        long = [line for line in text.splitlines() if len(line) > min(columns, 120)]
        assert [line for line in long if " " in line.strip()] == [], text  # only flags, which are there to be copied
        flat = " ".join(text.split())
        for word in (
            "Machine",
            "Devices",
            "Links",
            "Verdict",
            "cpu:3",
            "--xla_a=[red] --xla_b=2",
            "1.75",
            "20 to 20 us",
        ):
            assert word.replace("1.75", "2") in flat, (word, text)
        if kind == "ill":
            assert "copy cpu:0 -> cpu:2 DIES: the process ended with code 1" in flat
            assert "all_reduce over 4 devices DIES" in flat and "out" in flat and "FAILED: 4 devices" in flat
        if kind == "ring":
            assert "20 of 90 pairs: a ring, and 10 others drawn by chance" in flat and "cpu:9 -> cpu:0" in flat


@pytest.mark.parametrize("n", [9, 16, 64])
def test_many_devices_are_tested_in_a_ring_and_sampled_pairs(n):
    pairs, said = examine.pairs(n)
    assert len(set(pairs)) == len(pairs) == 2 * n and all(a != b for a, b in pairs)
    assert {(i, (i + 1) % n) for i in range(n)} < set(pairs) and str(n * (n - 1)) in said
    assert pairs == examine.pairs(n)[0]


@pytest.mark.parametrize(
    "arguments", [["--timeout", "0"], ["--timeout", "soon"], ["--mebibytes", "-1"], ["--what"], ["x"]]
)
def test_arguments_that_make_no_sense_are_refused(capsys, arguments):
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("usage: jdp doctor") and arguments[-1] in printed.err


def test_help_says_what_the_exit_code_means(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "0 all is well, 1 something failed, 2 usage" in " ".join(capsys.readouterr().out.split())


def test_devices_are_chosen_by_count_name_and_index(devices):
    assert choose(None) == tuple(devices)
    assert choose("3") == tuple(devices[:3])
    assert choose("cpu:2, cpu:0") == (devices[2], devices[0])
    assert choose("1,cpu:3") == (devices[1], devices[3])
    for spec in ("0", "9", "cpu:8", "gpu:0", "cpu:1,cpu:1", ","):
        with pytest.raises(ValueError, match=r"^jdp\.doctor: .*; .*\. "):
            choose(spec)


@pytest.mark.full
def test_devices_that_are_not_there_are_a_matter_of_usage(capsys, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    assert cli.main(["--json", "--devices", "cpu:0,cpu:7"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "jdp.doctor: devices[1] 'cpu:7' is unknown" in printed.err


def said(devices=(), n=0, versions=None, gpus=(), environ=None, cores=2, **facts):
    facts |= {"cores": cores, "versions": versions or {"jax": "0.10.2", "jaxlib": "0.10.2"}, "gpus": list(gpus)}
    chosen = [{"platform": devices or "cpu"} for _ in range(n)]
    return [(note["level"], note["text"]) for note in advice.notes(facts, chosen, environ or {})]


CARD = {"index": "0", "driver_version": "580.65", "compute_cap": "9.0"}


def test_the_traps_of_a_machine_are_told():
    assert (
        said(n=1) == []
        and said(n=8, cores=16) == []
        and said(n=8, cores=15) != []
        and said(n=8, environ={"NPROC": "16"}) == []
    )
    ((level, text),) = said(n=8)
    assert level == "note" and "jdp.virtual_cpu_devices(8)" in text and "NPROC=16" in text and "2 threads" in text
    assert "PJRT" not in text and said(n=8, environ={"NPROC": "16", "PJRT_NPROC": "4"}) != []
    ((level, text),) = said(n=1, gpus=[CARD, CARD])
    assert level == "problem" and 'pip install -e ".[cuda13]" in a checkout' in text
    assert "[cuda12]" in said(n=1, gpus=[CARD, CARD | {"compute_cap": "7.0"}])[0][1]
    assert said(n=1, gpus=[CARD], environ={"JAX_PLATFORMS": "cpu"})[0][0] == "note"
    same = dict.fromkeys(("jax", "jaxlib", "jax-cuda12-plugin"), "0.10.2")
    assert "did not start" in said(n=1, gpus=[CARD], versions=same)[0][1] and said("gpu", 1, same, [CARD]) == []
    ((_, text),) = said("gpu", 1, same | {"jax-cuda12-plugin": "0.10.1"}, [CARD])
    assert "jax-cuda12-plugin is 0.10.1 and jaxlib is 0.10.2" in text
    ((_, text),) = said(n=1, environ={"https_proxy": "http://proxy:1", "no_proxy": "localhost"})
    assert "https_proxy is set" in text and "127.0.0.1" in text
    assert said(n=1, environ={"HTTP_PROXY": "http://proxy:1", "NO_PROXY": "127.0.0.1,localhost"}) == []
    assert "costs bandwidth" in said("gpu", 1, same, [CARD], {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"})[0][1]


def test_several_gpus_of_one_process_are_told_of():
    ((level, text),) = [note for note in said("gpu", 4, gpus=[CARD] * 4) if "one process" in note[1]]
    assert level == "note" and "4 GPUs without NVLink" in text and text.endswith("jdp launch -n 4 train.py.")
    for ours in (said("gpu", 1, gpus=[CARD]), said("gpu", 4, gpus=[CARD] * 4, nvlink=True), said("cpu", 4, cores=8)):
        assert "one process" not in str(ours)


@pytest.mark.parametrize("address, is_told", [("127.0.1.1", True), ("10.0.0.5", False), (None, False)])
def test_a_hostname_that_others_cannot_reach_is_told_of(address, is_told, monkeypatch):
    def lookup(name):
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(socket, "gethostbyname", lookup)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    facts = machine.facts({})
    notes = said(n=1, hostname=facts["hostname"], address=facts["address"])
    assert is_told == bool(notes) and all("10.0.0.5 box" in text and "refused" in text for _, text in notes)
    assert said("gpu", 1, hostname=facts["hostname"], address=facts["address"]) == []


@pytest.mark.parametrize("links, is_there", [("NV12", True), ("PHB", False)])
def test_nvlink_is_read_from_nvidia_smi(tmp_path, monkeypatch, links, is_there):
    card = "0, X, 580.65, 9.0, 80000, 1"
    smi(tmp_path, monkeypatch, f"""
        if [ "$1" = topo ]; then printf '     GPU0 GPU1\nGPU0  X   {links}\nLegend: NV# = NVLinks\n'
        else echo '{card}'; echo '{card}'; fi
    """)  # fmt: skip
    assert machine.facts({})["nvlink"] == is_there


@pytest.mark.full
def test_the_imbalance_of_devices_is_told(doctor, worker):
    worker("""
        from unittest import mock
        from jdp._tools.doctor import worker
        with mock.patch("jdp._core.devices.memory_bytes", lambda d: 40 if d.id == 1 else 80):
            worker.serve(REPLY)
    """)
    code, report = doctor("--json", "--no-links")
    assert code == 0 and report["links"]["why"] == "not tested: --no-links" and len(report["computes"]) == 3
    assert any("has 40" in note["text"] and "has 80 (memory)" in note["text"] for note in report["notes"])


def smi(tmp_path, monkeypatch, script):
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return machine.nvidia_smi(seconds=0.5)


def test_nvidia_smi_is_read_and_may_hang_or_fail(tmp_path, monkeypatch):
    found = smi(tmp_path, monkeypatch, "echo '0, NVIDIA H200, 580.65, 9.0, 143771, 12'\n")
    (card,) = found["gpus"]
    assert card["name"] == "NVIDIA H200" and card["memory.total"] == "143771" and card["driver_version"] == "580.65"
    started = time.monotonic()
    found = smi(tmp_path, monkeypatch, "exec sleep 600\n")
    assert found == {"gpus": [], "gpus_error": "nvidia-smi gave no answer within 0.5 s"}
    assert time.monotonic() - started < 3
    found = smi(tmp_path, monkeypatch, "echo no devices were found; exit 6\n")
    assert found == {"gpus": [], "gpus_error": "nvidia-smi fails: no devices were found"}


def test_gpus_that_jax_does_not_use_are_a_problem_and_the_exit_code_tells(doctor, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # nobody asks for CPUs
    monkeypatch.setattr(machine, "nvidia_smi", lambda: {"gpus": [CARD]})
    code, report = doctor("--json", "--no-links")
    assert all(test["ok"] for test in [report["start"], *report["computes"]])  # no test failed
    assert code == 1 and not report["ok"] and "1 problem" in report["verdict"]


def test_the_password_of_a_proxy_is_not_shown():
    facts = machine.facts({"https_proxy": "http://me:secret@proxy:3128", "HOME": "/home/me", "NCCL_DEBUG": "INFO"})
    assert facts["settings"] == {"https_proxy": "http://***@proxy:3128", "NCCL_DEBUG": "INFO"}


def deterministic(answer):
    """A fake worker's answer: the same bits, or others on four devices."""
    digest = "'a' if len(devices) < 4 or %r else 'b'" % (answer == "same")
    return f'if test == "deterministic": return {{"digest": {digest}}}'


@pytest.mark.parametrize("answer", ["same", "other"])
def test_deterministic_training_is_compared(fake, capsys, answer):
    fake(5, answer=deterministic(answer))
    code = cli.main(["--no-links", "--deterministic"])
    said = " ".join(capsys.readouterr().out.split())
    assert code == (answer == "other")
    assert ("the bits are others than on 1 device" in said) == (answer == "other")
    assert "SHA-256 after 20 steps" in said


@pytest.mark.full
def test_deterministic_training_ends_with_the_same_bits():
    from jdp._tools.doctor.deterministic import train

    devices = jax.devices()
    assert train(devices[:1], 2) == train(devices[2:4], 2)
