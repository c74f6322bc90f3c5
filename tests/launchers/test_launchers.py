"""Jobs that Open MPI, MPICH and torchrun start for real: each is one job of two processes, and ends as a job does.

What is not installed is skipped; `.ci/run` installs what a Debian machine has. Each job trains for a few steps, and its
losses are those of numpy on the rows of both processes.
"""

import contextlib
import os
import pathlib
import re
import signal
import socket
import sys

import pytest
from laws import free_port
from started import BOUND, GPT, LONG, STEPS, WORKER, check_one_job, check_saved, check_went_on, said

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for what is left behind"),
]


def mpi(version):
    """The command that starts two processes with this MPI, or a skip."""
    beside = str(pathlib.Path(sys.prefix) / "bin" / "mpirun")
    for name in (beside, "mpirun.openmpi", "mpiexec.hydra", "mpirun", "mpiexec"):
        if re.search(version, said(name, "--version")):
            return [name, "-n", "2", *(["--oversubscribe"] if "Open MPI" in version else [])]
    pytest.skip(f"no launcher here says {version!r} of itself; .ci/run installs one where it can")


OPEN_MPI_4, OPEN_MPI_5, MPICH = r"\(Open MPI\) 4", r"\(Open MPI\) 5", r"HYDRA"


@pytest.mark.parametrize("version", [OPEN_MPI_4, OPEN_MPI_5, MPICH], ids=["open-mpi-4", "open-mpi-5", "mpich"])
def test_mpi(job, version):
    """Without an argument, and with a script between the launcher and Python."""
    check_one_job(job, job.start(*mpi(version), "sh", "-c", '"$@"; exit $?', "sh", *WORKER, job.folder, STEPS).ends())


def test_mpi_on_two_hosts_is_an_error_without_an_address(job):
    """Never two jobs of one: both processes name the variable that is missing, and with it they are one job."""
    head = [mpi(MPICH)[0], "-launcher", "fork", "-host", f"{socket.gethostname()},localhost", "-n", "2"]
    assert job.start(*head, *WORKER, job.folder, STEPS).ends(30) != 0
    says = "by PMI_SIZE=2, PMI_RANK=., and coordinator_address cannot be found .JAX_COORDINATOR_ADDRESS not set.; .*"
    assert 1 <= len(re.findall(says + "num_processes=1 to run alone", job.log())) <= 2 and not job.notes(), job
    there = f"127.0.0.1:{free_port()}"
    check_one_job(job, job.start(*head, *WORKER, job.folder, STEPS, JAX_COORDINATOR_ADDRESS=there).ends())


def test_mpirun_ends_the_others_where_one_is_killed(job):
    job.start(*mpi(OPEN_MPI_4), *WORKER, job.folder, LONG, job.folder / "run", 0.1)
    os.kill(job.trains()[1]["pid"], signal.SIGKILL)
    assert job.ends(30) != 0


def test_mpirun_goes_on_with_fewer_to_the_same_bits(job, alone):
    """A script calls mpirun again, for one process, where one of two was killed: as on docs/clusters.md."""
    name, _, _, *more = mpi(OPEN_MPI_4)
    lines = [" ".join([name, "-n", n, *more, *GPT]) for n in "21"]
    job.start("sh", "-c", " || ".join(lines))
    job.killed("OMPI_COMM_WORLD_RANK=1")
    assert job.ends(2 * BOUND) == 0, job
    check_went_on(job, alone)


def test_sigterm_to_mpirun(job):
    """Open MPI 4 waits so many seconds before it passes SIGTERM on, and as many again before it kills. By itself: 1."""
    head = [*mpi(OPEN_MPI_4), "--mca", "odls_base_sigkill_timeout", "6"]
    job.start(*head, *WORKER, job.folder, LONG, job.folder / "run", 0.1).trains()
    job.process.terminate()
    job.ends(60)
    check_saved(job)


def test_sigterm_to_one_process(job):
    """All save, and a new job goes on. The only way for Open MPI 5, whose mpirun kills at once."""
    train = [*mpi(OPEN_MPI_5), *WORKER, job.folder]
    job.start(*train, LONG, job.folder / "run", 0.1)
    os.kill(job.trains()[1]["pid"], signal.SIGTERM)
    job.ends(60)
    last = check_saved(job)
    check_one_job(job, job.start(*train, last + 2, job.folder / "run").ends(), last + 2, last)


def test_mpi4py(job):
    """JAX's detection by mpi4py, which jdp's own would make needless on one machine."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed", exc_type=ImportError)
    for version in (OPEN_MPI_5, OPEN_MPI_4, MPICH):
        with contextlib.suppress(pytest.skip.Exception):
            command = mpi(version)
            ranks = said(*command, sys.executable, "-c", "from mpi4py import MPI; print('size', MPI.COMM_WORLD.size)")
            if ranks.count("size 2") == 2:
                break
    else:
        pytest.skip("mpi4py finds the processes of no launcher that is installed")
    check_one_job(job, job.start(*command, *WORKER, job.folder, STEPS, BY_MPI4PY="1").ends())


def test_torchrun_starts_the_processes_again(job):
    pytest.importorskip("torch")
    head = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    head += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    steps = 30
    job.start(*head, *WORKER[1:], job.folder, steps, job.folder / "run", 0.2)
    os.kill(job.trains()[1]["pid"], signal.SIGKILL)
    code = job.ends()
    check_one_job(job, code, steps, max(note["began"] for note in job.notes()))
    assert job.notes()[0]["began"] != job.notes()[1]["began"]
