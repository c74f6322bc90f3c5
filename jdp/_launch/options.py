"""The options of `jdp launch`, checked before anything starts, and the environment that they make for each process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from .protocol import is_taken

_ABOUT = """\
Run a script as N processes of one JAX job, as torchrun does for torch.

  jdp launch -n 4 train.py --epochs 10
  jdp launch -n 4 --max-restarts 3 -m my.package.train
  jdp launch -n 2 --devices-per-process 4 train.py     on CPUs, to try it

In the script, jdp.distributed.initialize() finds what the launcher has set."""
_MORE = """\
output
  Each line of a process comes out behind its rank: [2] loss 0.31

at the beginning
  A line says what is started. What JAX compiles is kept in ~/.cache/jdp (at
  most about 4 GiB), or in --compilation-cache DIR, so that a restarted job
  compiles nothing again. JAX_COMPILATION_CACHE_DIR, if set, is used instead.
  On several machines nothing is kept, unless you name a folder that all of
  them see.

when a process fails
  The others get SIGTERM and, after --grace, SIGKILL. With restarts left, all
  start again after a pause (0.1 s, doubled each time, at most 5 s), and the
  script goes on from its last checkpoint. Without, the
  launcher names the rank that failed first, repeats its last lines and exits
  with its code (128 + the number of the signal, if one ended it). A process
  that ends with 0 while others go on has not failed.

a process that cannot be started again
  With --min-processes M, one that was the first to fail in two attempts
  running, each time within 60 s of its start, is left out: its device may be
  gone. The next attempt, a restart as any other, has a process less, down to
  M, with ranks from 0 again; the GPUs of the one left out stay idle. The
  script goes on from its last checkpoint, and has to take its share of the
  data by jax.process_index() and jax.process_count(), which are new then.
  A job with jdp.DataParallel(..., replicas=8) wants a number of devices that
  divides 8: with --replicas 8 four processes go on as two.
  Where each process had given Checkpointer.save other data than the others,
  restore gives the list of them all.

Ctrl-C and SIGTERM
  are handed on, and the processes have --preemption-grace to save and end.
  No restart follows. After SIGTERM the code is 0 if all ended with 0, else
  143; after Ctrl-C it is 130. A second Ctrl-C kills at once.

at the end
  No process is left behind, even after kill -9 of the launcher. What a script
  has started itself is killed too, unless it has moved to another session.

several machines: on each one, with its own R
  jdp launch -n 4 --nnodes 2 --node-rank R --coordinator HOST:PORT train.py
  HOST is the machine of node rank 0, and PORT is free there. The launchers do
  not talk to each other: a failure on one machine reaches the others when
  their processes fail for lack of it, and then each launcher restarts its
  own. So give all the same --max-restarts. A machine whose launcher has ended
  does not come back: the others fail until their restarts are used up.

environment of each process
  JAX_COORDINATOR_ADDRESS, JDP_NUM_PROCESSES, JDP_PROCESS_ID (the rank),
  JDP_LOCAL_PROCESS_ID, JDP_ATTEMPT (0, then 1 after the first restart),
  JDP_COMPILATION_CACHE, PYTHONUNBUFFERED=1; and JAX_LOCAL_DEVICE_IDS where
  several processes share the GPUs of a machine, unless it is set already."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run, how often, and how long to wait; `processes` is per node, the times are seconds."""

    command: tuple[str, ...]
    processes: int
    nodes: int = 1
    node: int | None = None
    coordinator: str | None = None
    cpu_devices: int | None = None
    max_restarts: int = 0
    min_processes: int | None = None
    replicas: int | None = None
    compilation_cache: str | None = None
    grace: float = 3.0
    preemption_grace: float = 30.0


def parse(argv: list[str]) -> Job:
    """Returns the job that the command line asks for; prints what is wrong with it and exits with 2 otherwise."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    script, args, module = (given.pop(name) for name in ("script", "args", "module"))
    if script is None:
        n = given["processes"] or 4
        parser.error(
            f"the script is missing; all processes run it. Pass it, as in: jdp launch -n {n} train.py --epochs 10"
        )
    if given["processes"] is None:
        parser.error(f"-n is missing; it is the number of processes. Pass it, as in: jdp launch -n 4 {script}")
    # On GPUs all processes tune a program's kernels together, and one that had it in its own machine's folder would be
    # waited for: so several machines have one that all see, or none.
    given.setdefault("compilation_cache", _default_folder() if given["nodes"] == 1 else None)
    path = script if module or not script.startswith("-") else os.path.join(os.curdir, script)  # no option of Python's
    job = Job((sys.executable, *["-m"] * module, path, *args), **given)
    try:
        _check_numbers(job)
        _check_least(job)
        _check_nodes(job)
        _check_script(script, module)
    except ValueError as error:
        parser.error(str(error))
    return job


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jdp launch",
        usage="jdp launch -n N [options] [-m] script [args ...]",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # Each is called as the field of `Job` that it sets.
    add = parser.add_argument
    text = "processes on this machine"
    add("-n", "--nproc-per-node", dest="processes", type=int, metavar="N", help=text)
    add("--max-restarts", type=int, default=0, metavar="K", help="after a failure start all again, K times (0)")
    text = "leave out one that cannot be started again, down to M (none)"
    add("--min-processes", type=int, metavar="M", help=text)
    text = "leave out so many that the devices of the others divide R, as jdp.DataParallel(..., replicas=R) wants"
    add("--replicas", type=int, metavar="R", help=text)
    text = "where compiled programs are kept (~/.cache/jdp); none for nowhere"
    add("--compilation-cache", type=_folder, default=argparse.SUPPRESS, metavar="DIR", help=text)
    text = "run on the CPU, as K devices in each process"
    add("--devices-per-process", dest="cpu_devices", type=int, metavar="K", help=text)
    add("--grace", type=float, default=3.0, metavar="S", help="seconds from SIGTERM to SIGKILL after a failure (3)")
    text = "seconds to save and end after Ctrl-C or SIGTERM (30)"
    add("--preemption-grace", type=float, default=30.0, metavar="S", help=text)
    add("--nnodes", dest="nodes", type=int, default=1, metavar="N", help="machines (1)")
    add("--node-rank", dest="node", type=int, metavar="R", help="which of them this is, 0 to N-1")
    add("--coordinator", metavar="HOST:PORT", help="where rank 0 listens (one machine: a free port is found)")
    add("-m", "--module", action="store_true", help="script is the name of a module, as in python -m")
    # Not required by argparse, which would say "script, args" where both are missing.
    add("script", help="what to run: a file, or a module with -m").required = False
    add("args", nargs=argparse.REMAINDER, help="its arguments; the launcher's own come before it").required = False
    return parser


def _folder(text: str) -> str | None:
    if not text:
        raise argparse.ArgumentTypeError("'' is no folder; jdp keeps programs in one. Pass its path, or none.")
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no folder; jdp keeps programs in one. For cloud storage set JAX_COMPILATION_CACHE_DIR."
        )
    return None if text == "none" else os.path.abspath(text)


def _default_folder() -> str | None:
    """Returns the folder for programs, if none is named; None if there is no home directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    path = os.path.join(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "jdp")
    return path if os.path.isabs(path) else None


def _check_numbers(job: Job) -> None:
    for option, number, least, rule in (
        ("-n", job.processes, 1, "a machine runs 1 process or more. Pass -n 1 or more."),
        ("--max-restarts", job.max_restarts, 0, "it is a number of restarts. Pass 0 or more."),
        ("--devices-per-process", job.cpu_devices, 1, "a process has 1 or more. Pass 1 or more."),
        ("--grace", job.grace, 0, "it is a number of seconds. Pass 0 to 1e8."),
        ("--preemption-grace", job.preemption_grace, 0, "it is a number of seconds. Pass 0 to 1e8."),
        ("--min-processes", job.min_processes, 1, "a job has 1 process or more. Pass 1 or more."),
        ("--replicas", job.replicas, 1, "a batch has one chunk for each, 1 or more. Pass 1 or more."),
        ("--nnodes", job.nodes, 1, "a job has 1 machine or more. Pass 1 or more."),
    ):
        most = 1e8 if isinstance(number, float) else math.inf  # Python cannot wait for 1e10 seconds
        if number is not None and not least <= number <= most:
            raise ValueError(f"{option} is {number}; {rule}")


def _check_least(job: Job) -> None:
    least, devices = job.min_processes, job.processes * (job.cpu_devices or 1)
    if job.replicas is not None and (least is None or job.replicas % devices):
        have = f"there are {devices} devices or more" if least is not None else "--min-processes is missing"
        raise ValueError(
            f"--replicas is {job.replicas} and {have}; it says with how many processes a job goes on that has lost "
            f"one. Pass --min-processes, and a multiple of the number of devices."
        )
    if least is None:
        return
    if least > job.processes:
        raise ValueError(f"--min-processes is {least} with -n {job.processes}; a job never grows. Pass -n or less.")
    if job.max_restarts < 2:
        raise ValueError(
            f"--min-processes is {least} with --max-restarts {job.max_restarts}; a process is left out in a restart, "
            "after it has failed twice. Pass --max-restarts 2 or more."
        )
    if job.nodes > 1:
        raise ValueError(
            f"--min-processes is {least} with --nnodes {job.nodes}; the launchers do not talk to each other, and none "
            "knows how many processes the others have left. Leave it out."
        )


def _check_nodes(job: Job) -> None:
    nodes, node, coordinator = job.nodes, job.node, job.coordinator
    if nodes > 1 and node is None:
        raise ValueError(
            f"--nnodes is {nodes} and --node-rank is missing; each machine has its own, 0 to {nodes - 1}. Pass it."
        )
    if node is not None and not 0 <= node < nodes:
        raise ValueError(f"--node-rank is {node} with --nnodes {nodes}; it is 0 to {nodes - 1}. Pass one of them.")
    if node is not None and coordinator is None:
        raise ValueError(
            f"--node-rank is {node} and --coordinator is missing; the machines meet there. "
            "Pass --coordinator HOST:PORT, with the host of node rank 0 and a port that is free there."
        )
    host, _, port = (coordinator or "localhost:1").rpartition(":")
    is_host = host and (":" not in host or host.startswith("[") and host.endswith("]"))
    if not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator is {coordinator!r}; it is a host and a port. Pass it as 10.0.0.1:29500.")


def refuse_taken_port(job: Job, env: Mapping[str, str]) -> None:
    """Raises a `ValueError` if rank 0 runs here and could not listen: the others would end the job that does."""
    if job.coordinator is None or job.node or env.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return
    port, until = int(job.coordinator.rpartition(":")[2]), time.monotonic() + 2
    while is_taken(port) and time.monotonic() < until:  # an earlier job may be ending
        time.sleep(0.1)
    if is_taken(port):
        raise ValueError(
            f"--coordinator is {job.coordinator}, and port {port} is in use; rank 0 listens there. End what has it (an "
            f"earlier job?), or pass all launchers another port."
        )


def _check_script(script: str, module: bool) -> None:
    if not module and not os.path.exists(script):
        raise ValueError(
            f"there is no file {script!r} in {os.getcwd()}; a script is a file. Pass its path, or a module with -m."
        )
    if module:
        sys.path.insert(0, os.getcwd())  # `python -m` looks there first, but a console script such as `jdp` does not
        try:
            found = importlib.util.find_spec(script.partition(".")[0])  # the parent only: looking deeper imports it
        finally:
            sys.path.remove(os.getcwd())
        if found is None:
            raise ValueError(
                f"there is no module {script!r}; -m takes one that Python finds from {os.getcwd()}. Check the name."
            )


_CPU_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def environments(
    job: Job, attempt: int, gpus: int, base: Mapping[str, str], places: Sequence[int] | None = None
) -> list[dict[str, str]]:
    """Returns one environment for each process of this node, in the order of their ranks; `base` is what they share.

    `places`: those of the `job.processes` places that have a process, and the GPUs that are theirs; all, if not said.
    """
    places = range(job.processes) if places is None else places
    shared = dict(base)
    shared["JAX_COORDINATOR_ADDRESS"] = job.coordinator or f"127.0.0.1:{_free_port()}"
    shared["JDP_NUM_PROCESSES"] = str(job.nodes * len(places))
    shared["JDP_ATTEMPT"] = str(attempt)
    shared["PYTHONUNBUFFERED"] = "1"
    shared.pop("JDP_COMPILATION_CACHE", None)
    if job.compilation_cache is not None:
        shared["JDP_COMPILATION_CACHE"] = job.compilation_cache
    if job.cpu_devices is not None:
        _set_cpu_devices(shared, job.cpu_devices)
    share = 0 if base.get("JAX_LOCAL_DEVICE_IDS") else gpus // job.processes
    every = []
    for local, place in enumerate(places):
        rank = (job.node or 0) * len(places) + local
        own = {"JDP_PROCESS_ID": str(rank), "JDP_LOCAL_PROCESS_ID": str(local)}
        if share:
            own["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(place * share, (place + 1) * share)))
        every.append(shared | own)
    return every


def described(job: Job, gpus: int, env: Mapping[str, str]) -> str:
    """Returns what is started, in words; `env` is that of the first process."""
    count, nodes = job.processes, job.nodes
    script = " ".join(job.command[1:3] if job.command[1] == "-m" else job.command[1:2])
    said = f"{count} process{'es' * (count > 1)} of {script}"
    if nodes > 1:
        said += f" on this machine, node {job.node} of {nodes}"
    for devices, kind in ((job.cpu_devices, "CPU device"), (gpus // count, "GPU")):
        if devices:
            said += f", {devices} {kind}{'s' * (devices > 1)} each"
    if count * nodes > 1:
        said += f", meeting at {env['JAX_COORDINATOR_ADDRESS']}"
    kept = env.get("JAX_COMPILATION_CACHE_DIR") or env.get("JDP_COMPILATION_CACHE")
    return f"{said}; compiled programs {f'in {kept}' if kept else 'are not kept'}"


def _set_cpu_devices(env: dict[str, str], devices: int) -> None:
    env["JAX_PLATFORMS"] = "cpu"
    env["JAX_NUM_CPU_DEVICES"] = str(devices)
    if _CPU_DEVICES_FLAG in env.get("XLA_FLAGS", ""):  # the older way; JAX refuses two answers
        words = env["XLA_FLAGS"].split()
        env["XLA_FLAGS"] = " ".join(word for word in words if not word.startswith(_CPU_DEVICES_FLAG))
    # Two threads for each device, else a plain loop of steps with collectives deadlocks on few cores;
    # jdp.virtual_cpu_devices does the same within a process. PJRT_NPROC would win over NPROC.
    threads = env.pop("PJRT_NPROC", "") or env.get("NPROC", "")
    env["NPROC"] = str(max(2 * devices, int(threads) if threads.isdecimal() else 0))


def gpus_to_divide(job: Job, env: Mapping[str, str]) -> int:
    """Returns the number of GPUs to divide evenly among the processes of this node; 0 if there are none to divide."""
    platforms = env.get("JAX_PLATFORMS", "")
    gpu_wanted = not platforms or any(name in platforms for name in ("cuda", "gpu"))
    if job.processes == 1 or job.cpu_devices is not None or env.get("JAX_LOCAL_DEVICE_IDS") or not gpu_wanted:
        return 0
    gpus = _count_gpus(env)
    if gpus % job.processes:
        raise ValueError(
            f"{gpus} GPUs and {job.processes} processes; each process gets the same number of GPUs. Pass a -n that "
            f"divides {gpus}, hide GPUs with CUDA_VISIBLE_DEVICES, set JAX_LOCAL_DEVICE_IDS yourself, or pass "
            "--devices-per-process to run on the CPU."
        )
    return gpus


def _count_gpus(env: Mapping[str, str]) -> int:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA stops at the first that is no device: "", "-1", "NoDevFiles".
        return next((i for i, name in enumerate(names) if not re.match(r"\d+$|GPU-|MIG-", name)), len(names))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, env=dict(env))
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _free_port() -> int:
    # None of those that the system gives to connections: one of these may have it before rank 0 listens there.
    for port in random.SystemRandom().sample(range(15_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("jdp launch: no port between 15000 and 32000 is free. Pass --coordinator HOST:PORT.")
