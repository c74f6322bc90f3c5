"""Two machines as two network namespaces: `jdp launch --nnodes 2`, with a hostname as Debian has it."""

import shutil
import subprocess
import sys
import uuid

import pytest
from laws import free_port
from started import STEPS, WORKER, check_one_job, environment

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("unshare")), reason="iproute2 is not installed"),
]

# In a namespace of hostnames and of mounts, too: the machine is called `debian`, and resolves as there.
DEBIAN = 'mount --bind "$0" /etc/hosts && hostname debian && exec "$@"'


@pytest.fixture
def machines(tmp_path):
    """The commands that run another one on each of two machines, at 10.77.0.1 and 10.77.0.2."""
    names = [f"jdp{uuid.uuid4().hex[:6]}{side}" for side in "ab"]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 debian\n")
    enter = lambda name: ["ip", "netns", "exec", name]  # noqa: E731
    steps = [["ip", "netns", "add", name] for name in names]
    ends = [[name, "netns", name] for name in names]
    steps.append(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
    for number, name in enumerate(names, 1):
        steps.append([*enter(name), "ip", "address", "add", f"10.77.0.{number}/24", "dev", name])
        steps += [[*enter(name), "ip", "link", "set", device, "up"] for device in (name, "lo")]
    commands = [[*enter(name), "unshare", "--mount", "--uts", "sh", "-c", DEBIAN, str(hosts)] for name in names]
    steps += [[*command, "true"] for command in commands]
    try:
        for step in steps:
            made = subprocess.run(step, capture_output=True, text=True, timeout=20)
            if made.returncode:
                pytest.skip(f"namespaces cannot be made here: {' '.join(step)}: {made.stderr.strip()}")
        yield commands
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def test_two_machines_whose_hostname_is_127_0_1_1(job, machines):
    """Gloo would listen there; jdp has it take the interface that leads to the other machine."""
    launch = [sys.executable, "-m", "jdp", "launch", "-n", "1", "--nnodes", "2", "--coordinator"]
    launch.append(f"10.77.0.1:{free_port()}")
    nodes = [[*machine, *launch, "--node-rank", rank, *WORKER[1:], job.folder, STEPS]
             for rank, machine in enumerate(machines)]  # fmt: skip
    with (job.folder / "log").open("a") as log:
        second = subprocess.Popen(list(map(str, nodes[1])), env=environment(job.mark), stdout=log, stderr=log)
    code = job.start(*nodes[0]).ends()
    check_one_job(job, code or second.wait(20))
