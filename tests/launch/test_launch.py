"""`jdp launch`: every way in which a job can end, with real processes, and nothing left behind."""

import contextlib
import fcntl
import importlib
import os
import pty
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import tomllib
import types
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from jdp._launch import output, workers
from jdp._launch.cli import Places, _pause_after, _report
from jdp._launch.options import Job, described, environments, gpus_to_divide, parse
from jdp._launch.protocol import FOR_ANOTHER

ROOT = Path(__file__).parents[2]
# The commands use nothing but the standard library: run without the package's __init__, which takes
# seconds to import JAX and Flax, they start in a tenth of a second.
# And as at a terminal: who runs the tests with nohup, or behind a `&`, has them ignore signals from their start on.
RUNNER = """
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
package = types.ModuleType("jdp")
package.__path__ = [sys.argv.pop(1)]
sys.modules["jdp"] = package
from jdp.__main__ import main
sys.exit(main(["launch", *sys.argv[1:]]))
"""
# what the scripts of the tests share
HEAD = """
import os, signal, subprocess, sys, time
rank, attempt = int(os.environ["JDP_PROCESS_ID"]), int(os.environ["JDP_ATTEMPT"])
def ready():
    with open(".tmp" + str(rank), "w") as f: f.write(str(os.getpid()))
    os.rename(f.name, f"ready-{rank}-{attempt}")
def until(*names, seconds=20):
    end = time.monotonic() + seconds
    while not all(os.path.exists(name) for name in names):
        if time.monotonic() > end: sys.exit(99)
        time.sleep(0.005)
def until_ended(other):
    until(f"ready-{other}-{attempt}")
    path = f"/proc/{open(f'ready-{other}-{attempt}').read()}/stat"
    try:
        while open(path).read().rpartition(")")[2].split()[0] != "Z": pass
    except OSError: pass  # its launcher has reaped it
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory and a mark on all processes of a test; none of them may be left at its end."""
    mark = f"JDP_TEST_MARK={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    end = time.monotonic() + 3
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.01)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}, "processes are left behind"


def marked(mark):
    """The processes that run with a mark in their environment, and what they are."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes().split(b"\0") and int(path.name) != os.getpid():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def start(*args, script=None, **kwargs):
    """Starts the launcher, in a process group of its own, as a shell does."""
    if script is not None:
        Path("script.py").write_text(HEAD + textwrap.dedent(script))
        args = (*args, "script.py")
    command = [sys.executable, "-c", RUNNER, str(ROOT / "jdp"), *args]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, process_group=0, **(pipes | kwargs))


def ended(launcher, seconds=20, first=True):
    """The exit code of the launcher, its stdout, and its stderr without the first line, if that is not yet read."""
    try:
        out, err = launcher.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        launcher.kill()
        out, err = launcher.communicate()
        pytest.fail(f"the launcher runs after {seconds} s:\n{out.decode()}\n{err.decode()}")
    err = err.decode(errors="replace")
    if first and launcher.returncode != 2:
        line, _, err = err.partition("\n")
        assert re.match(r"jdp launch: \d+ process(es)? of ", line), line
    return launcher.returncode, out.decode(errors="replace"), err


def launch(*args, script=None, seconds=20):
    return ended(start(*args, script=script), seconds)


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
    return value


def pids(n, attempt=0):
    """The workers' process ids, once all are ready."""
    paths = [Path(f"ready-{rank}-{attempt}") for rank in range(n)]
    return [int(wait_for(lambda path=path: path.exists() and path.read_text())) for path in paths]


def is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # killed; whoever has inherited it has not looked yet


pytestmark = [LINUX, pytest.mark.usefixtures("place")]


# The environment and the arguments of the processes


def test_each_process_knows_its_place_and_gets_its_arguments():
    script = """
    import json
    names = "JAX_COORDINATOR_ADDRESS JDP_NUM_PROCESSES JDP_LOCAL_PROCESS_ID PYTHONUNBUFFERED".split()
    print(json.dumps([os.environ[name] for name in names] + sys.argv[1:] + [rank, attempt, sys.stdin.read()]))
    """
    Path("script.py").write_text(HEAD + textwrap.dedent(script))
    never, held_open = os.pipe()  # the launcher's stdin, which is not the processes' own
    code, out, err = ended(start("-n", "2", "script.py", "-n", "7", "--", "--grace=x", "a b", stdin=never))
    os.close(never), os.close(held_open)
    assert (code, err) == (0, "")
    address = re.search(r'"(127\.0\.0\.1:\d+)"', out)[1]
    tail = '"-n", "7", "--", "--grace=x", "a b"'
    assert sorted(out.splitlines()) == [f'[{i}] ["{address}", "2", "{i}", "1", {tail}, {i}, 0, ""]' for i in range(2)]
    with socket.socket() as probe:  # it is free
        probe.bind(("127.0.0.1", int(address.partition(":")[2])))


def test_a_script_with_the_name_of_an_option_is_a_script():
    Path("-x.py").write_text("import sys; print(sys.argv)")
    assert launch("-n", "1", "--", "-x.py", "-y")[:2] == (0, "[0] ['./-x.py', '-y']\n")


def test_python_m_jdp_launches_a_module(place):
    package = place / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "work.py").write_text("import os, sys; print(os.environ['JDP_PROCESS_ID'], __name__, sys.argv[1:])")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jdp", "launch", "-n", "2", "-m", "pkg.work", "--x"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and re.fullmatch(r"jdp launch: 2 processes of -m pkg\.work, .*\n", done.stderr)
    assert sorted(done.stdout.splitlines()) == [f"[{i}] {i} __main__ ['--x']" for i in range(2)]


def test_the_console_script_is_the_same_function(monkeypatch):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["jdp"].partition(":")
    run = getattr(importlib.import_module(module), function)
    for args, code in ((["--version"], 0), (["--help"], 0), ([], 2), (["lunch"], 2)):
        monkeypatch.setattr(sys, "argv", ["jdp", *args])
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == code


def job(**kwargs):
    return Job(**({"command": ("python",), "processes": 2} | kwargs))


def test_cpu_devices_get_two_threads_each_and_no_second_answer():
    base = {
        "XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=9 --b",
        "PJRT_NPROC": "3",
        "JAX_PLATFORMS": "cuda",
    }
    envs = environments(job(cpu_devices=4), 0, 0, base)
    for env in envs:
        assert env["XLA_FLAGS"] == "--a=1 --b" and "PJRT_NPROC" not in env
        assert (env["JAX_PLATFORMS"], env["JAX_NUM_CPU_DEVICES"], env["NPROC"]) == ("cpu", "4", "8")
    (env, _) = environments(job(cpu_devices=4), 0, 0, {"NPROC": "32", "XLA_FLAGS": "--c"})
    assert env["NPROC"] == "32" and env["XLA_FLAGS"] == "--c"
    (env, _) = environments(job(), 0, 0, base)
    assert env["XLA_FLAGS"] == base["XLA_FLAGS"] and env["JAX_PLATFORMS"] == "cuda" and "NPROC" not in env


def test_gpus_are_divided_evenly(place, monkeypatch):
    def gpus(processes=2, **env):
        return gpus_to_divide(job(processes=processes), env)

    assert gpus(CUDA_VISIBLE_DEVICES="4,5,6,7") == 4
    assert gpus(CUDA_VISIBLE_DEVICES="4,5,-1,7") == 2  # CUDA stops at the -1
    assert gpus(CUDA_VISIBLE_DEVICES="") == 0
    assert gpus(CUDA_VISIBLE_DEVICES="NoDevFiles") == 0  # of Slurm, where a job has no GPU
    assert gpus(CUDA_VISIBLE_DEVICES="GPU-7a,MIG-b, 3,4", JAX_LOCAL_DEVICE_IDS="") == 4
    assert gpus(CUDA_VISIBLE_DEVICES="0,1,2", JAX_PLATFORMS="cpu") == 0
    assert gpus(CUDA_VISIBLE_DEVICES="0,1,2", JAX_LOCAL_DEVICE_IDS="0") == 0
    assert gpus(CUDA_VISIBLE_DEVICES="0,1,2", processes=1) == 0
    with pytest.raises(ValueError, match=r"3 GPUs and 2 processes; each process gets the same number of GPUs\."):
        gpus(CUDA_VISIBLE_DEVICES="0,1,2")
    with pytest.raises(ValueError, match="1 GPUs and 2 processes"):
        gpus(CUDA_VISIBLE_DEVICES="0")
    ids = [e.get("JAX_LOCAL_DEVICE_IDS") for e in environments(job(), 0, 4, {})]
    assert ids == ["0,1", "2,3"]
    user = {"JAX_LOCAL_DEVICE_IDS": "7"}
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in environments(job(), 0, 4, user)] == ["7", "7"]
    smi = place / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: a)'\necho '  MIG 1g.5gb Device 0: (UUID: b)'\necho 'GPU 1: X'\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    assert gpus(PATH=os.environ["PATH"]) == 2


def test_what_is_started_is_said_first(monkeypatch, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    launcher = start("-n", "2", "--devices-per-process", "3", script="print(os.environ['JDP_COMPILATION_CACHE'])")
    code, out, err = ended(launcher, first=False)
    want = r"jdp launch: 2 processes of script\.py, 3 CPU devices each, meeting at 127\.0\.0\.1:\d+; compiled programs"
    assert code == 0 and re.fullmatch(rf"{want} in {place}/jdp\n", err)
    assert sorted(out.splitlines()) == [f"[{i}] {place}/jdp" for i in range(2)]


@pytest.mark.parametrize(
    "args, env, words",
    [
        ("-n 1 script.py", {"XDG_CACHE_HOME": "/c"}, "1 process of script.py; compiled programs in /c/jdp"),
        ("-n 1 script.py", {"HOME": "/h"}, "in /h/.cache/jdp"),
        ("-n 1 script.py", {"HOME": "~"}, "are not kept"),
        ("-n 1 --compilation-cache none script.py", {}, "1 process of script.py; compiled programs are not kept"),
        ("-n 1 --compilation-cache /d script.py", {}, "in /d"),
        ("-n 1 script.py", {"JAX_COMPILATION_CACHE_DIR": "/own"}, "in /own"),
        ("-n 2 script.py", {"CUDA_VISIBLE_DEVICES": "0,1"}, "2 processes of script.py, 1 GPU each, meeting at 127."),
        (
            "-n 2 --nnodes 2 --node-rank 1 --coordinator h:1 script.py", {},
            "2 processes of script.py on this machine, node 1 of 2, meeting at h:1; compiled programs are not kept",
        ),
    ],
)  # fmt: skip
def test_what_is_started_in_words(args, env, words, monkeypatch):
    Path("script.py").write_text("")
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    job = parse(args.split())
    gpus = gpus_to_divide(job, os.environ)
    said = described(job, gpus, environments(job, 0, gpus, os.environ)[0])
    assert words in said and (said.startswith(words) or words.startswith(("in", "are")))


# The output


@pytest.mark.full
def test_lines_come_out_whole_in_order_and_behind_their_rank():
    script = """
    for i in range(3000):
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"{stream.name} {i} "); stream.write("x" * (i % 400)); stream.write("\\n")
    os.write(1, b"bad \\xff byte\\r\\n"); os.write(1, b"no newline")
    """
    launcher = start("-n", "3", script=script)
    out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 0
    err = err.partition(b"\n")[2]  # the launcher's own
    for text, name in ((out, b"<stdout>"), (err, b"<stderr>")):
        lines = text.split(b"\n")
        assert lines.pop() == b""
        for rank in range(3):
            want = [b"%s %d %s" % (name, i, b"x" * (i % 400)) for i in range(3000)]
            want += [b"bad \xff byte", b"no newline"] if text is out else []
            assert [line[4:] for line in lines if line.startswith(b"[%d] " % rank)] == want
        assert all(re.match(rb"\[[012]\] ", line) for line in lines)


def test_lines_do_not_depend_on_how_the_bytes_come_in_pieces():
    text = b"one\n\ntwo\r\nbar 1\rbar 2\r\rbar 3\r\nlast\r"
    want = [b"> one\n", b"> \n", b"> two\n", b"> bar 1\r", b"> bar 2\r", b"> bar 3\n", b"> last\n"]
    for size in range(1, len(text) + 1):
        lines = output.Lines(b"> ")
        pieces = [piece for i in range(0, len(text), size) for piece in lines.feed(text[i : i + size])]
        assert pieces + lines.end() == want and lines.end() == []
        assert list(lines.tail) == [line for line in want if line.endswith(b"\n")]


def test_a_line_that_never_ends_does_not_fill_the_memory():
    lines = output.Lines(b"")
    pieces = [piece for _ in range(40) for piece in lines.feed(b"x" * (1 << 16))]
    assert sum(piece.count(b"x") for piece in pieces) >= 1 << 21 and len(pieces) == 2


def test_a_progress_bar_on_a_terminal_is_drawn_over_itself():
    script = """
    if rank == 0:
        for i in range(3):
            print(f"\\rbar {i} of a long line", end="", flush=True)
        ready()
        until("ready-1-0"); time.sleep(0.2)
        print(flush=True)
    else:
        until("ready-0-0"); time.sleep(0.1)  # the bar is on the screen
        print("short")
        ready()
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    launcher = start("-n", "2", script=script, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # what Linux says at the end of a terminal
        while data := os.read(ours, 4096):
            text += data
    os.close(ours)
    assert launcher.wait(timeout=10) == 0
    screen = ""  # what a terminal makes of it, as far as the text uses it
    for part in re.split(rb"(\r\n|\r|\x1b\[K)", text):
        if part == b"\r\n":
            screen, column = screen + "\n", 0
        elif part == b"\r":
            column = 0
        elif part == b"\x1b[K":
            screen = screen[: len(screen) - len(screen.split("\n")[-1]) + column]
        else:
            head, _, line = screen.rpartition("\n")
            line = line[:column] + part.decode() + line[column + len(part) :] if head or line else part.decode()
            screen, column = (head + "\n" if "\n" in screen else "") + line, len(part)
    assert sorted(screen.split("\n")[1:]) == ["", "[0] bar 2 of a long line", "[1] short"]


def test_when_nobody_reads_the_output_the_job_ends():
    script = """
    while True: print("again"); time.sleep(0.001)
    """
    launcher = start("-n", "2", script=script)
    with launcher.stdout, launcher.stderr:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(timeout=20) == 128 + signal.SIGPIPE
        assert b"the output cannot be written any more" in launcher.stderr.read()


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_on_a_full_disk_the_job_goes_on(place):
    script = """
    for i in range(100): print("again")
    open(f"done-{rank}", "w")
    """
    with open("/dev/full", "wb") as full:
        launcher = start("-n", "2", script=script, stdout=full)
        with launcher.stderr:
            text = launcher.stderr.read().decode()
    assert launcher.wait(timeout=20) == 0 and os.path.exists("done-0") and os.path.exists("done-1")
    assert text.count("stdout cannot be written ([Errno 28] No space left on device)") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_no_reason_to_end(closed, place):
    lines = "import os, sys", 'print("out")', 'print("err", file=sys.stderr)', 'open(os.environ["JDP_PROCESS_ID"], "w")'
    Path("script.py").write_text("\n".join(lines))
    words = [sys.executable, "-c", RUNNER, str(ROOT / "jdp"), "-n", "2", "script.py"]
    run = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and os.path.exists("0") and os.path.exists("1"), run.stderr
    assert sorted(run.stdout.split("\n")) == ([""] if ">&-" in closed.split() else ["", "[0] out", "[1] out"])


@pytest.mark.full
def test_a_long_line_is_searched_once():
    """A line of 4 MB takes about as long as as many short ones; searched anew with each piece it took 70 times that."""

    def seconds(text):
        lines, began = output.Lines(b""), time.thread_time()
        for i in range(0, len(text), 1 << 12):
            lines.feed(text[i : i + (1 << 12)])
        return time.thread_time() - began

    short, long = (b"x" * (size - 1) + b"\n" for size in (100, 1_000_000))
    assert min(seconds(long * 4) for _ in range(3)) < 20 * min(seconds(short * 40_000) for _ in range(3))


# How a job ends


def test_all_end_well_although_one_ends_early_and_leaves_a_child():
    script = """
    if rank == 0:
        subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print("early", end="")
        ready()
    else:
        until("ready-0-0"); time.sleep(0.4); print("done")
    """
    began = time.monotonic()
    assert launch("-n", "2", script=script) == (0, "[0] early\n[1] done\n", "")
    assert time.monotonic() - began < 10


def test_an_exception_is_the_last_thing_to_be_read():
    script = """
    ready(); until("ready-0-0", "ready-1-0", "ready-2-0")
    if rank == 1:
        print("noise before", file=sys.stderr)
        try: {}["key"]
        except KeyError as e: raise ValueError("the culprit's own words") from e
    until("never")
    """
    code, _, err = launch("-n", "3", script=script)
    assert code == 1
    report = re.search(
        r"jdp launch: rank 1 failed with exit code 1 after \d+\.\d s, before any other.*\Z", err, re.DOTALL
    )[0]
    lines = report.splitlines()
    assert lines[0].endswith("Its last lines on stderr:")
    assert lines[1] == "[1] Traceback (most recent call last):"
    assert any("KeyError: 'key'" in line for line in lines) and "noise" not in report
    assert lines[-1] == "[1] ValueError: the culprit's own words"
    assert err.count("the culprit's own words\n") == 2  # when it came, and in the report


def test_who_ended_with_code_0_long_before_is_named():
    """The others may have waited for it; one that ended just before has done its part."""
    said = []
    printer = types.SimpleNamespace(say=lambda text, lines=(): said.append(text))
    process = types.SimpleNamespace()
    culprit = workers.Worker(0, process, started=0.0, ended=62.0, code=-6)
    early = workers.Worker(1, process, started=0.0, ended=1.5, code=0)
    late = workers.Worker(2, process, started=0.0, ended=61.0, code=0)
    _report(culprit, [culprit, early, late], [], printer)
    assert said[0] == "rank 1 ended with exit code 0 after 1.5 s"
    assert said[1].startswith("rank 0 was ended by SIGABRT after 62.0 s") and len(said) == 2


@pytest.mark.full
def test_the_first_to_fail_is_named_although_others_fail_milliseconds_later():
    script = """
    ready(); until(*[f"ready-{i}-0" for i in range(4)])
    if rank == 2:
        sys.stderr.write("first\\n"); time.sleep(0.1); os._exit(7)
    until_ended(2); time.sleep(0.001 + 0.001 * rank); os._exit(8)
    """
    code, _, err = launch("-n", "4", script=script)
    assert code == 7 and err.endswith("Its last lines on stderr:\n[2] first\n")


def test_who_ends_for_anothers_sake_is_not_to_blame_although_it_ends_first():
    """Process 0, through which the others hear of its failure, ends after them."""
    script = f"""
    if not rank: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as JAX does
    ready(); until(*[f"ready-{{i}}-0" for i in range(3)])
    if rank: os._exit({FOR_ANOTHER})
    sys.stderr.write("the cause\\nW1 preemption_notifier.cc:90] SIGTERM caught\\n"); until_ended(1); time.sleep(0.2)
    os._exit(7)
    """
    code, _, err = launch("-n", "3", script=script)
    assert code == 7 and err.endswith("Its last lines on stderr:\n[0] the cause\n")
    alone = launch("-n", "1", script=f"os._exit({FOR_ANOTHER})")
    assert alone[0] == FOR_ANOTHER and "rank 0 failed" in alone[2]


def test_whom_jax_aborts_after_process_0_is_not_to_blame():
    """It stops the processes that cannot hear of each other any more; no code of theirs runs then."""
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ready(); until(*[f"ready-{i}-0" for i in range(2)])
    if rank: until_ended(0); os.abort()
    """
    code, _, err = launch("-n", "2", script=script)
    assert code == 134 and "before any other" not in err
    assert "jdp launch: rank 0 ended with exit code 0 after" in err
    assert "jdp launch: rank 1 was ended by SIGABRT (JAX aborts it, because rank 0 ended first) after" in err


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_ends_are_noted_with_their_codes_in_their_order(kernel, monkeypatch):
    if kernel == "old":
        monkeypatch.delattr(os, "pidfd_open")
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.exit(int(sys.stdin.read() or 0))"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(6)]
    seen = []
    threads = workers.watch(processes, lambda i, code: seen.append((i, code)))
    assert len(threads) == {"new": 1, "old": 6}[kernel]
    for count, i in enumerate((3, 0, 5, 1, 4)):
        processes[i].stdin.write(b"%d" % i)
        processes[i].stdin.close()
        wait_for(lambda count=count: len(seen) > count)
    processes[2].kill()
    for thread in threads:
        thread.join(timeout=10)
    assert seen == [(3, 3), (0, 0), (5, 5), (1, 1), (4, 4), (2, -9)]
    assert [Path(f"/proc/{p.pid}/stat").read_text().split()[2] for p in processes] == ["Z"] * 6  # none can be mistaken
    for process in processes:
        process.communicate()


def test_ends_that_came_while_nobody_looked_are_in_their_order():
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(8)]
    seen, looking = [], threading.Event()

    def ended(i, code):
        looking.wait()
        seen.append(i)

    (thread,) = workers.watch(processes, ended)
    order = [4, 1, 7, 0, 6, 2, 5, 3]
    for i in order:
        processes[i].kill()
        wait_for(lambda i=i: is_gone(processes[i].pid))
    looking.set()
    thread.join(timeout=10)
    assert seen == order
    for process in processes:
        process.wait()


def test_a_killed_rank_is_named():
    launcher = start("-n", "3", script="ready(); until('never')")
    os.kill(pids(3)[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, err = ended(launcher)
    assert time.monotonic() - began < 3
    assert code == 128 + signal.SIGKILL
    assert re.search(
        r"jdp launch: rank 1 was ended by SIGKILL after \d+\.\d s, before any other\. It wrote nothing", err
    )


def test_a_killed_rank_is_named_although_its_neighbour_ended_before_it():
    # a large process takes a while to be cleared away, after its connections are closed
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready(); until("ready-0-0", "ready-1-0")
    if rank == 0: sys.exit("Connection closed by peer")
    until_ended(0); time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)
    """
    code, _, err = launch("-n", "2", script=script)
    assert code == 128 + signal.SIGKILL and "jdp launch: rank 1 was ended by SIGKILL" in err


@pytest.mark.one_case
@pytest.mark.parametrize(
    "deaf", ["signal.signal(signal.SIGTERM, signal.SIG_IGN)", "ready(); os.kill(os.getpid(), signal.SIGSTOP)"]
)
def test_a_worker_that_does_not_hear_sigterm_is_killed_after_the_grace(deaf):
    script = f"""
    if rank == 0:
        {deaf}
    ready()
    until("ready-0-0", "ready-1-0")
    if rank == 1: open("down", "w"); sys.exit(5)
    until("never")
    """
    launcher = start("-n", "2", "--grace", "0.7", script=script)
    wait_for(Path("down").exists)
    began = time.monotonic()
    code, _, err = ended(launcher)
    assert 0.6 < time.monotonic() - began < 3
    assert code == 5 and "rank 1 failed with exit code 5" in err


@pytest.mark.full
def test_sigterm_after_a_failure_does_not_prolong_the_end():
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready(); until("ready-0-0", "ready-1-0")
    if rank == 1: open("down", "w"); sys.exit(5)
    until("never")
    """
    launcher = start("-n", "2", "--grace", "0.7", "--max-restarts", "3", script=script)
    wait_for(Path("down").exists)
    time.sleep(0.2)
    launcher.terminate()
    code, _, err = ended(launcher, seconds=4)
    assert code == 143 and "rank 1 failed with exit code 5" in err and "start again" not in err


def test_a_worker_has_the_grace_to_end_by_itself():
    script = """
    def stop(*_): time.sleep(0.5); print("said goodbye"); sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    ready(); until("ready-0-0", "ready-1-0")
    if rank == 1: sys.exit(5)
    until("never")
    """
    code, out, _ = launch("-n", "2", script=script)
    assert (code, out) == (5, "[0] said goodbye\n")


@pytest.mark.full
def test_a_child_that_moves_to_a_session_of_its_own_does_not_hold_the_launcher():
    script = """
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)  # it keeps the pipes open
    open("child", "w").write(str(child.pid))
    """
    launcher = start("-n", "1", script=script)
    child = int(wait_for(lambda: Path("child").exists() and Path("child").read_text()))
    began = time.monotonic()
    try:
        assert ended(launcher)[0] == 0 and time.monotonic() - began < 20
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("deaf", [False, True])
def test_what_a_process_that_fails_has_left_in_shared_memory_is_deleted(deaf):
    """Python's resource tracker, a child of each process, does that when its parent is gone."""
    script = f"""
    from multiprocessing import shared_memory
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(shared_memory.SharedMemory(create=True, size=9).name)
        ready()
        if {deaf}: until("never")
        os._exit(3)
    until("ready-0-0")
    os._exit(3)
    """
    code, out, _ = launch("-n", "2", "--grace", "0.2", script=script)
    assert code == 3
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(out.removeprefix("[0] ").strip())


@pytest.mark.full
def test_a_child_that_goes_on_writing_does_not_hold_the_launcher():
    script = "subprocess.Popen(['sh', '-c', 'while sleep 0.01; do echo again; done']); ready()"
    launcher = start("-n", "1", script=script)
    pids(1)
    began = time.monotonic()
    assert ended(launcher)[0] == 0 and time.monotonic() - began < 20


def test_nothing_is_left_when_only_some_processes_can_be_started():
    Path("script.py").write_text("import time; time.sleep(60)")
    command = [sys.executable, "-c", RUNNER, str(ROOT / "jdp"), "-n", "20", "script.py"]
    limited = ["sh", "-c", 'ulimit -n 25; exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"jdp launch: 20 .*\njdp launch: error: .* be started: .*Too many open files\n", done.stderr)


# Restarts


@pytest.mark.full
def test_all_restart_until_it_works():
    script = """
    print("attempt", attempt, os.environ["JAX_COORDINATOR_ADDRESS"].split(":")[1])
    ready()
    if attempt < 2:
        until(f"ready-0-{attempt}", f"ready-1-{attempt}")
        if rank == attempt: os._exit(3)
        until("never")
    """
    code, out, err = launch("-n", "2", "--max-restarts", "3", script=script)
    assert code == 0
    seen = sorted(re.fullmatch(r"\[(\d)\] attempt (\d) \d+", line).groups() for line in out.splitlines())
    assert seen == [(rank, attempt) for rank in "01" for attempt in "012"]
    for attempt, line in enumerate(err.splitlines()):
        said = rf"jdp launch: rank {attempt} failed with exit code 3 after \d+\.\d s; all 2 processes start again "
        assert re.fullmatch(said + rf"\(restart {attempt + 1} of 3\)", line)
    assert len(err.splitlines()) == 2


@pytest.mark.full
def test_the_pause_before_a_restart_grows():
    pauses = [_pause_after(attempt) for attempt in range(2000)]
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0] and set(pauses[6:]) == {5.0}
    code, out, _ = launch("-n", "1", "--max-restarts", "3", script="print(time.time()); sys.exit(attempt < 3)")
    times = [float(line[4:]) for line in out.splitlines()]
    assert code == 0 and all(b - a > 0.1 * 2**i for i, (a, b) in enumerate(zip(times, times[1:], strict=False)))


def test_a_worker_that_always_fails_ends_the_job_after_the_limit():
    code, out, err = launch("-n", "2", "--max-restarts", "2", script="print(attempt); raise SystemExit('never again')")
    assert code == 1
    assert {line[4:] for line in out.splitlines()} == {"0", "1", "2"}
    assert err.count("start again") == 2 and re.search(r"before any other\. Its last .*\n\[.\] never again\n\Z", err)


NO_DEVICE = """
gpus = os.environ["JAX_LOCAL_DEVICE_IDS"]
print(attempt, os.environ["JDP_NUM_PROCESSES"], gpus)
if gpus == "1": sys.exit(7)  # its device is gone
ready(); until(*[f"ready-{i}-{attempt}" for i in range(int(os.environ["JDP_NUM_PROCESSES"]))])
"""


def test_who_cannot_be_started_again_is_left_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    code, out, err = launch("-n", "3", "--max-restarts", "3", "--min-processes", "2", script=NO_DEVICE)
    assert code == 0
    assert sorted(line for line in out.splitlines() if line[4] == "2") == ["[0] 2 2 0", "[1] 2 2 2"]
    first, second = err.splitlines()
    assert re.fullmatch(r"jdp launch: rank 1 .* 7 after .* s; all 3 processes start again \(restart 1 of 3\)", first)
    then = r"for the second time running, and is left out; 2 of 3 go on \(restart 2 of 3\)"
    assert re.fullmatch(rf"jdp launch: rank 1 .* 7 after .* s, {then}", second)


@pytest.mark.full
def test_no_more_are_left_out_than_may_be(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    code, out, err = launch("-n", "3", "--max-restarts", "3", "--min-processes", "3", script=NO_DEVICE)
    assert code == 7 and err.count("all 3 processes start again") == 3 and "left out" not in err
    assert "[1] 3 3 1" in out.splitlines()  # another, which is ended meanwhile, may be the last that is read


def failed(rank, after=1.0, code=1, aborted=False):
    return workers.Worker(rank, None, 0.0, after, code, aborted)


@pytest.mark.parametrize(
    "ends, left",
    [
        ([(1,), (1,)], [0, 2, 3]),
        ([(1,), (2,), (1,), (2,)], [0, 1, 2, 3]),  # never twice running
        ([(1, 61.0), (1,)], [0, 1, 2, 3]),  # it worked for a while
        ([(1,), (1, 61.0), (1,)], [0, 1, 2, 3]),
        ([(1,), (1, 1.0, FOR_ANOTHER)], [0, 1, 2, 3]),
        ([(1, 1.0, -15), (1, 1.0, -15)], [0, 1, 2, 3]),
        ([(1, 1.0, -6, True), (1, 1.0, -6, True)], [0, 1, 2, 3]),
        ([(1,), (1,), (1,), (1,)], [0, 3]),  # ranks are counted anew: the second is that of place 2
        ([(1,)] * 5 + [(0,)] * 5, [0, 3]),  # no fewer than 2
    ],
)
def test_who_is_left_out(ends, left):
    places = Places(job(processes=4, min_processes=2))
    for end in ends:
        places.blame(failed(*end))
    assert places.left == left


@pytest.mark.parametrize(
    ("devices", "replicas", "left"),
    [(1, 8, [4, 2, 2, 1]), (1, 12, [4, 3, 2, 1]), (2, 8, [4, 2, 2, 1]), (None, None, [4, 3, 2, 1])],
)
def test_as_many_are_left_as_divide_the_replicas(devices, replicas, left):
    """A place that works is a spare one, until it is needed."""
    places = Places(job(processes=4, min_processes=1, replicas=replicas, cpu_devices=devices))
    found = [len(places.left)]
    for _ in range(3):
        for _ in range(2):
            places.blame(failed(0))
        found.append(len(places.left))
    assert found == left


def test_without_min_processes_nobody_is_left_out():
    places = Places(job(processes=2, nodes=2, node=1, coordinator="h:1"))
    assert not any(places.blame(failed(3)) for _ in range(4)) and places.left == [0, 1]


# Signals to the launcher


SAVES = """
def save(number, frame):
    print("caught", signal.Signals(number).name, flush=True); time.sleep(0.3)
    print("saved" if child.poll() is None else "lost its child"); sys.exit(0)
signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # a data loader
ready()
until("never")
"""


@pytest.mark.one_case
@pytest.mark.parametrize("number, want", [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_signal_is_handed_on_once_and_the_workers_may_save(number, want):
    launcher = start("-n", "2", "--max-restarts", "2", script=SAVES)
    pids(2)
    os.killpg(launcher.pid, number)  # what a terminal does: the whole group gets it
    code, out, err = ended(launcher)
    caught = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    assert code == want
    assert sorted(out.splitlines()) == [f"[{i}] {text}" for i in range(2) for text in (f"caught {caught}", "saved")]
    assert len(err.splitlines()) == 1
    assert err.startswith(f"jdp launch: {number.name} is handed on to the processes, which have 30 s to save and end; ")


def test_workers_that_do_not_handle_sigterm_end_by_it_without_a_restart():
    launcher = start("-n", "2", "--max-restarts", "2", script="ready(); until('never')")
    pids(2)
    launcher.terminate()
    code, _, err = ended(launcher)
    assert code == 143 and len(err.splitlines()) == 1


def test_who_fails_to_save_is_named():
    script = """
    def save(*_): raise OSError("disk full")
    signal.signal(signal.SIGTERM, save if rank else lambda *_: sys.exit(0))
    ready()
    until("never")
    """
    launcher = start("-n", "2", "--max-restarts", "2", script=script)
    pids(2)
    launcher.terminate()
    code, _, err = ended(launcher)
    assert (
        code == 143 and "jdp launch: rank 1 failed with exit code 1" in err and err.endswith("[1] OSError: disk full\n")
    )


DEAF = """
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
ready(); until("never")
"""


def test_who_does_not_end_within_the_preemption_grace_is_killed():
    launcher = start("-n", "2", "--preemption-grace", "0.5", script=DEAF)
    pids(2)
    began = time.monotonic()
    launcher.terminate()
    code, _, err = ended(launcher)
    assert 0.4 < time.monotonic() - began < 3
    assert code == 143 and "jdp launch: ranks 0, 1 did not end in time; killed" in err


def test_a_second_ctrl_c_kills_at_once():
    launcher = start("-n", "2", script=DEAF)
    pids(2)
    assert b"2 processes of" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    assert b"SIGINT is handed on" in launcher.stderr.readline()
    time.sleep(0.2)
    assert launcher.poll() is None
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert ended(launcher, first=False)[0] == 130 and time.monotonic() - began < 2


LOUD = """
signal.signal(signal.SIGTERM, lambda *_: (print("saves"), open(f"saved-{rank}", "w"), sys.exit(0)))
ready()
while True: print("x" * 1000); os.utime(f"ready-{rank}-0")
"""


def stand_still():
    """Waits until no worker gets a line out any more."""
    paths, before = [Path(f"ready-{rank}-0") for rank in range(2)], None
    wait_for(lambda: all(path.exists() for path in paths))
    while before != (before := [path.stat().st_mtime_ns for path in paths]):
        time.sleep(1)


@pytest.mark.full
@pytest.mark.parametrize(("number", "want"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_job_whose_output_nobody_reads(number, want):
    """As in a pager, or after Ctrl-S; with SIGTERM the processes save."""
    launcher = start("-n", "2", script=LOUD, stderr=subprocess.STDOUT)
    stand_still()
    launcher.send_signal(number)
    assert launcher.wait(timeout=20) == want
    assert sorted(str(path) for path in Path().glob("saved-*")) == ["saved-0", "saved-1"] * (number == signal.SIGTERM)
    launcher.communicate()


@pytest.mark.full
def test_a_second_ctrl_c_kills_at_once_although_nobody_reads():
    script = LOUD.replace(LOUD.splitlines()[1], DEAF.splitlines()[1])
    launcher = start("-n", "2", script=script, stderr=subprocess.STDOUT)
    stand_still()
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)  # else the two may come as one
    assert launcher.wait(timeout=20) == 130
    launcher.communicate()


@pytest.mark.full
def test_what_is_read_late_is_whole():
    launcher = start("-n", "1", script="for i in range(3000): print(i, 'x' * 1000)")
    time.sleep(2)
    assert launcher.poll() is None
    code, out, _ = ended(launcher)
    assert code == 0 and [line.split()[1] for line in out.splitlines()] == [*map(str, range(3000))]


@pytest.mark.full
def test_the_error_of_a_rank_is_shown_though_the_output_is_read_late():
    script = """
        import os, sys, time
        if os.environ["JDP_PROCESS_ID"] == "0":
            for i in range(10_000): sys.stdout.write("x" * 999 + "\\n")
        else:
            time.sleep(2)
            raise ValueError("the own error")
    """
    launcher = start("-n", "2", script=script)
    time.sleep(12)
    code, _, err = ended(launcher)
    assert code == 1 and "ValueError: the own error" in err and "It wrote nothing" not in err


def test_a_launcher_whose_parent_ignored_sigchld_knows_how_its_processes_end():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which it inherits
    launcher = start("-n", "1", script="raise SystemExit(7)")
    signal.signal(signal.SIGCHLD, before)
    assert ended(launcher)[0] == 7


@pytest.mark.full
def test_a_launcher_that_only_waits_for_a_reader_can_be_ended():
    launcher = start("-n", "1", script="print('x' * 200_000); ready()")
    (pid,) = pids(1)
    wait_for(lambda: is_gone(pid))
    time.sleep(1)
    assert launcher.poll() is None
    launcher.terminate()
    assert launcher.wait(timeout=20) == 0
    launcher.communicate()


def test_nothing_is_left_of_a_launcher_that_is_killed():
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(f"child-{rank}", "w").write(str(child.pid))
    ready()
    until("never")
    """
    launcher = start("-n", "2", script=script)
    processes = pids(2) + [int(Path(f"child-{rank}").read_text()) for rank in range(2)]
    assert not any(is_gone(pid) for pid in processes)
    began = time.monotonic()
    launcher.kill()
    wait_for(lambda: all(is_gone(pid) for pid in processes), seconds=3)
    print(f"all gone after {time.monotonic() - began:.3f} s")
    ended(launcher)


def test_workers_end_even_if_the_guard_is_killed_too():
    launcher = start("-n", "2", script="ready(); until('never')")
    processes = pids(2)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (guard,) = {int(child) for child in children} - set(processes)
    os.kill(guard, signal.SIGKILL)
    launcher.kill()
    wait_for(lambda: all(is_gone(pid) for pid in processes), seconds=3)
    ended(launcher)


# Several machines


@pytest.mark.full
def test_two_nodes_form_one_job_and_restart_together():
    # the workers fail when another one is down, as those of jax.distributed do
    script = """
    print(rank, os.environ["JDP_LOCAL_PROCESS_ID"], os.environ["JDP_NUM_PROCESSES"], attempt,
          os.environ["JAX_COORDINATOR_ADDRESS"])
    ready()
    until(*[f"ready-{i}-{attempt}" for i in range(4)])
    if attempt == 0:
        if rank == 3: sys.exit(4)
        until_ended(3); sys.exit(6)
    """
    common = ("-n", "2", "--nnodes", "2", "--coordinator", "127.0.0.1:29501", "--max-restarts", "1", "--grace", "0.2")
    launchers = [start(*common, "--node-rank", str(node), script=script) for node in range(2)]
    for node, launcher in enumerate(launchers):
        code, out, err = ended(launcher)
        assert code == 0
        want = [
            f"[{rank}] {rank} {rank % 2} 4 {attempt} 127.0.0.1:29501"
            for rank in (2 * node, 2 * node + 1)
            for attempt in range(2)
        ]
        assert sorted(out.splitlines()) == want
        assert err.count("restart 1 of 1") == 1 and len(err.splitlines()) == 1
        assert ("rank 3 failed with exit code 4" in err) == (node == 1)


@pytest.mark.full
def test_a_node_waits_before_a_restart_until_the_others_have_ended():
    script = """
    print(time.time())
    sys.exit(3 if attempt == 0 else 0)
    """
    common = ("-n", "1", "--nnodes", "2", "--node-rank", "0", "--coordinator", "h:1", "--max-restarts", "1")
    code, out, _ = launch(*common, "--grace", "0.3", script=script)
    first, second = (float(line[4:]) for line in out.splitlines())
    assert code == 0 and second - first > 1.2


# Usage


@pytest.mark.parametrize(
    "args, match",
    [
        ("script.py", r"-n is missing; it is the number of .*, as in: jdp launch -n 4 script\.py"),
        ("", r"the script is missing; .*\. Pass it, as in: jdp launch -n 4 train\.py --epochs 10"),
        ("-n 2", r"the script is missing; .*\. Pass it, as in: jdp launch -n 2 train\.py --epochs 10"),
        ("-n 2 --compilation-cache= script.py", "'' is no folder; jdp keeps programs in one. Pass its path, or none"),
        ("-n 0 script.py", r"-n is 0; a machine runs 1 process or more\. Pass -n 1 or more\."),
        ("-n two script.py", "invalid int value: 'two'"),
        ("-n 2 --max-restarts -1 script.py", "--max-restarts is -1; "),
        ("-n 2 --grace -1 script.py", "--grace is -1.0; "),
        ("-n 2 --preemption-grace nan script.py", "--preemption-grace is nan; "),
        ("-n 2 --devices-per-process 0 script.py", "--devices-per-process is 0; "),
        ("-n 2 missing.py", r"there is no file 'missing.py' in /.*; a script is a file\. Pass its path"),
        ("-n 2 -m missing_module.part", r"there is no module 'missing_module.part'; .* Check the name\."),
        ("-n 2 --nnodes 0 script.py", "--nnodes is 0; "),
        ("-n 2 --nnodes 2 script.py", "--nnodes is 2 and --node-rank is missing; each machine has its own, 0 to 1"),
        ("-n 2 --nnodes 2 --node-rank 1 script.py", "--node-rank is 1 and --coordinator is missing; "),
        (
            "-n 2 --nnodes 2 --node-rank 2 --coordinator h:1 script.py",
            r"--node-rank is 2 with --nnodes 2; it is 0 to 1\.",
        ),
        ("-n 2 --coordinator host script.py", "--coordinator is 'host'; it is a host and a port"),
        ("-n 2 --coordinator host:0 script.py", "--coordinator is 'host:0'; "),
        ("-n 2 --max-restart 1 script.py", "arguments"),
        ("-n 2 --compilation-cache gs://b script.py", "'gs://b' is no folder"),
        ("-n 2 --min-processes 0 script.py", "--min-processes is 0; a job has 1 process or more"),
        ("-n 2 --min-processes 3 --max-restarts 2 script.py", r"--min-processes is 3 with -n 2; a job never grows\."),
        ("-n 3 --min-processes 1 --replicas 8 script.py", "--replicas is 8 and there are 3 devices or more"),
        ("-n 4 --replicas 8 script.py", "--replicas is 8 and --min-processes is missing"),
        ("-n 4 --replicas 0 script.py", "--replicas is 0; a batch has one chunk for each"),
        ("-n 2 --min-processes 1 --max-restarts 1 script.py", "--min-processes is 1 with --max-restarts 1; .* Pass"),
        (
            "-n 2 --min-processes 1 --max-restarts 2 --nnodes 2 --node-rank 0 --coordinator h:1 script.py",
            "--min-processes is 1 with --nnodes 2; the launchers do not talk to each other",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(args, match, capsys):
    Path("script.py").write_text("")
    with pytest.raises(SystemExit) as info:
        parse(args.split())
    assert info.value.code == 2 and re.search(match, capsys.readouterr().err)


def test_a_port_that_another_job_has_is_a_usage_error():
    """The processes other than the first would come to the other job, and JAX would end it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        code, out, err = launch("-n", "2", "--coordinator", where, script="print('started')")
    assert (code, out) == (2, "") and err.startswith(f"jdp launch: error: --coordinator is {where}, and port ")


def test_gpus_that_cannot_be_divided_are_a_usage_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    code, out, err = launch("-n", "2", script="print('started')")
    assert (code, out) == (2, "") and err.startswith("jdp launch: error: 3 GPUs and 2 processes; ")


def test_the_help_fits_a_terminal_and_names_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as info:
        parse(["--help"])
    text = capsys.readouterr().out
    assert info.value.code == 0
    options = "-n --max-restarts --devices-per-process --grace --preemption-grace --nnodes --node-rank --coordinator -m"
    options += " --min-processes --replicas --compilation-cache"
    assert all(option in text for option in options.split())
    assert max(len(line) for line in text.splitlines()) <= 80
