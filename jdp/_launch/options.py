"""The options of `jdp launch`, checked before anything starts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Iterator

_ABOUT = """\
Run a script as N processes of one JAX job, as torchrun does for torch.

  jdp launch -n 4 train.py --epochs 10
  jdp launch -n 4 --max-restarts 3 -m my.package.train
  jdp launch -n 2 --devices-per-process 4 train.py     on CPUs, to try it

In the script, jdp.distributed.initialize() finds what the launcher has set."""
_MORE = """\
output
  Each line of a process comes out behind its rank: [2] loss 0.31

when a process fails
  The others get SIGTERM and, after --grace, SIGKILL. With restarts left, all
  start again, and the script goes on from its last checkpoint. Without, the
  launcher names the rank that failed first, repeats its last lines and exits
  with its code (128 + the number of the signal, if one ended it). A process
  that ends with 0 while others go on has not failed.

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
  PYTHONUNBUFFERED=1; and JAX_LOCAL_DEVICE_IDS where several processes share
  the GPUs of a machine, unless it is set already."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run, how often, and how long to wait; `processes` is per node, the times are seconds."""

    command: tuple[str, ...]
    processes: int
    nodes: int = 1
    node: int = 0
    coordinator: str | None = None
    cpu_devices: int | None = None
    max_restarts: int = 0
    grace: float = 3.0
    preemption_grace: float = 30.0


def parse(argv: list[str]) -> Job:
    """The job that the command line asks for; prints what is wrong with it and exits with 2 otherwise."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        _check(given)
    except ValueError as error:
        parser.error(str(error))
    module = ["-m"] if given.module else []
    return Job(
        command=(sys.executable, *module, given.script, *given.args),
        processes=given.n,
        nodes=given.nnodes,
        node=given.node_rank or 0,
        coordinator=given.coordinator,
        cpu_devices=given.devices_per_process,
        max_restarts=given.max_restarts,
        grace=given.grace,
        preemption_grace=given.preemption_grace,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jdp launch",
        usage="jdp launch -n N [options] [-m] script [args ...]",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--nproc-per-node", dest="n", type=int, required=True, metavar="N", help="processes on this machine")
    add("--max-restarts", type=int, default=0, metavar="K", help="after a failure start all again, K times (0)")
    add("--devices-per-process", type=int, metavar="K", help="run on the CPU, as K devices in each process")
    add("--grace", type=float, default=3.0, metavar="S", help="seconds from SIGTERM to SIGKILL after a failure (3)")
    text = "seconds to save and end after Ctrl-C or SIGTERM (30)"
    add("--preemption-grace", type=float, default=30.0, metavar="S", help=text)
    add("--nnodes", type=int, default=1, metavar="N", help="machines (1)")
    add("--node-rank", type=int, metavar="R", help="which of them this is, 0 to N-1")
    add("--coordinator", metavar="HOST:PORT", help="where rank 0 listens (one machine: a free port is found)")
    add("-m", "--module", action="store_true", help="script is the name of a module, as in python -m")
    add("script", help="what to run: a file, or a module with -m")
    add("args", nargs=argparse.REMAINDER, help="its arguments; the launcher's own come before the script")
    return parser


def _check(given: argparse.Namespace) -> None:
    if given.n < 1:
        raise ValueError(f"-n is {given.n}; a machine runs 1 process or more. Pass -n 1 or more.")
    if given.max_restarts < 0:
        raise ValueError(f"--max-restarts is {given.max_restarts}; it is a number of restarts. Pass 0 or more.")
    if given.devices_per_process is not None and given.devices_per_process < 1:
        raise ValueError(
            f"--devices-per-process is {given.devices_per_process}; a process has 1 or more. Pass 1 or more."
        )
    for name, seconds in (("--grace", given.grace), ("--preemption-grace", given.preemption_grace)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} is {seconds}; it is a number of seconds. Pass 0 or more.")
    _check_nodes(given.nnodes, given.node_rank, given.coordinator)
    _check_script(given.script, given.module)


def _check_nodes(nodes: int, node: int | None, coordinator: str | None) -> None:
    if nodes < 1:
        raise ValueError(f"--nnodes is {nodes}; a job has 1 machine or more. Pass 1 or more.")
    if nodes > 1 and node is None:
        raise ValueError(
            f"--nnodes is {nodes} and --node-rank is missing; each machine has its own, 0 to {nodes - 1}. Pass it."
        )
    if node is not None and not 0 <= node < nodes:
        raise ValueError(f"--node-rank is {node} with --nnodes {nodes}; it is 0 to {nodes - 1}. Pass one of them.")
    if coordinator is None:
        if node is not None:
            raise ValueError(
                f"--node-rank is {node} and --coordinator is missing; the machines meet there. "
                "Pass --coordinator HOST:PORT, with the host of node rank 0 and a port that is free there."
            )
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator is {coordinator!r}; it is a host and a port. Pass it as 10.0.0.1:29500.")


def _check_script(script: str, module: bool) -> None:
    if not module and not os.path.exists(script):
        raise ValueError(
            f"there is no file {script!r} in {os.getcwd()}; a script is a file. Pass its path, or a module with -m."
        )
    if module:
        with _working_directory_importable():
            found = importlib.util.find_spec(script.partition(".")[0])  # the parent only: looking deeper imports it
        if found is None:
            raise ValueError(
                f"there is no module {script!r}; -m takes one that Python finds from {os.getcwd()}. Check the name."
            )


@contextlib.contextmanager
def _working_directory_importable() -> Iterator[None]:
    # `python -m` looks there first, but a console script such as `jdp` does not
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())
