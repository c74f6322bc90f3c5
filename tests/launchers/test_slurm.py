"""A Slurm of two nodes on this machine: jobs by srun and sbatch, scancel, requeue, a task that is killed.

It is the real one (`slurm-wlm`), as root, with a configuration of its own and without munge. Its nodes have names that
only their own processes resolve, so that JAX finds the first node by its name, as on a cluster.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid

import pytest
from laws import free_port
from started import BOUND, GPT, LONG, STEPS, WORKER, Job, check_one_job, check_saved, check_went_on, environment

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="Slurm is Linux's"),
    pytest.mark.skipif(not (shutil.which("slurmctld") and shutil.which("slurmd")), reason="slurm-wlm is not installed"),
    pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="Slurm's daemons need root"),
]

CONFIGURATION = """
    ClusterName=jdp
    SlurmctldHost={host}(127.0.0.1)
    SlurmctldPort={port}
    SlurmctldPidFile={folder}/ctld.pid
    SlurmdPidFile={folder}/%n.pid
    SlurmdSpoolDir={folder}/spool-%n
    StateSaveLocation={folder}/state
    AuthType=auth/none
    CredType=cred/none
    AuthInfo=cred_expire=5
    FirstJobId={first}
    SlurmUser=root
    ProctrackType=proctrack/linuxproc
    TaskPlugin=task/none
    MpiDefault=none
    JobRequeue=1
    KillWait=30
    NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node_1} CPUs=1
    NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node_2} CPUs=1
    PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'  # for the processes below this one alone


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment by which Slurm's commands find it."""
    folder, mark = tmp_path_factory.mktemp("slurm"), str(uuid.uuid4())
    port = free_port()
    said = CONFIGURATION.format(
        folder=folder, host=socket.gethostname(), port=port, node_1=port + 1, node_2=free_port(), first=port
    )
    (folder / "slurm.conf").write_text(textwrap.dedent(said))
    with open("/etc/hosts") as hosts:
        (folder / "hosts").write_text(hosts.read() + "\n127.0.0.1 n1 n2\n")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    environ = environment(mark, SLURM_CONF=str(folder / "slurm.conf"))
    nodes = [["unshare", "--mount", "sh", "-c", HOSTS, folder / "hosts", "slurmd", "-D", "-N", n] for n in ("n1", "n2")]
    if subprocess.run([*nodes[0][:6], "true"], env=environ, capture_output=True).returncode:
        pytest.skip("a mount namespace, in which the nodes' names resolve, cannot be made here")
    with (folder / "log").open("w") as log:
        run = lambda command: subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=folder)  # noqa: E731
        daemons = [run(["slurmctld", "-D", "-c"]), *map(run, nodes)]
    stopped = Job(folder, mark)
    try:
        until = time.monotonic() + 30
        while "idle" not in (state := asked(environ, "sinfo", "-h", "-o", "%T")) or len(state.split()) > 1:
            if time.monotonic() > until:
                pytest.skip(f"Slurm's daemons do not come up here: {(folder / 'log').read_text()[-1000:]}")
            time.sleep(0.2)
        yield {"SLURM_CONF": environ["SLURM_CONF"]}
    finally:
        stopped.stop()
        for daemon in daemons:
            daemon.wait(10)


def asked(environ, *command):
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    return run.stdout.strip()


def command_of(job, slurm):
    """Runs one of Slurm's commands."""
    return lambda *command: asked(environment(job.mark, **slurm), *map(str, command))


SRUN = ["srun", "--nodes=2", "--ntasks=2"]


@pytest.fixture
def run(job, slurm):
    """`run(*command)`: the job, started on both nodes. What it leaves in the queue is taken out of it."""
    try:
        yield lambda *command: job.start(*command, **slurm)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command_of(job, slurm)("scancel", "--user=root")


def test_srun(job, run):
    check_one_job(job, run(*SRUN, *WORKER, job.folder, STEPS).ends())


def test_a_task_is_killed(job, run):
    run(*SRUN, *WORKER, job.folder, LONG, job.folder / "run", 0.1)
    os.kill(job.trains()[1]["pid"], signal.SIGKILL)
    assert job.ends(40) != 0


def test_scancel_saves(job, run, slurm):
    """Slurm sends SIGTERM, and SIGKILL after KillWait seconds, 30 by itself."""
    run(*SRUN, *WORKER, job.folder, LONG, job.folder / "run", 0.1)
    job.trains()
    command_of(job, slurm)("scancel", "--user=root")
    job.ends(45)
    check_saved(job)


def test_requeue_goes_on(job, slurm):
    """The same job, started once more by Slurm, goes on from the step at which it was stopped."""
    steps, command = 40, command_of(job, slurm)
    script, train = job.folder / "train.sh", [*WORKER, job.folder, steps, job.folder / "run", 0.1]
    script.write_text(f"#!/bin/sh\nexec srun {' '.join(map(str, train))}")
    number = command("sbatch", "--parsable", "--requeue", "--nodes=2", "--ntasks=2", "--open-mode=append",
                     f"--output={job.folder / 'log'}", script)  # fmt: skip
    try:
        job.until(lambda: len([note for note in job.notes() if len(note["losses"]) >= 2]) == 2, "training")
        command("scontrol", "requeue", number)
        job.until(lambda: "COMPLETED" in command("scontrol", "show", "job", number), "completed")
    finally:
        command("scancel", number)
    last = max(note["began"] for note in job.notes())
    assert last > 0, job
    check_one_job(job, steps=steps, began=last)


def test_a_job_goes_on_with_fewer_tasks_to_the_same_bits(job, slurm, alone):
    """Its script calls srun again, for one task, where one of two was killed: as on docs/clusters.md."""
    command, script = command_of(job, slurm), job.folder / "train.sh"
    lines = [f"srun --nodes={n} --ntasks={n} {' '.join(GPT)}" for n in (2, 1)]
    script.write_text(f"#!/bin/sh\n{' || '.join(lines)}")
    number = command("sbatch", "--parsable", "--no-kill", "--nodes=2", "--ntasks=2", f"--chdir={job.folder}",
                     f"--output={job.folder / 'log'}", script)  # fmt: skip
    try:
        job.killed("SLURM_PROCID=1")
        job.until(lambda: "COMPLETED" in command("scontrol", "show", "job", number), "completed", 2 * BOUND)
    finally:
        command("scancel", number)
    check_went_on(job, alone)
