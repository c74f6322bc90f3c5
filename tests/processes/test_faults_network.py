"""Two machines, as two network namespaces of this one, and the cable between them."""

import contextlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
import uuid

import pytest

from jdp._launch.protocol import WAITED

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

ROOT = pathlib.Path(__file__).parents[2]
WORKER = ROOT / "tests" / "processes" / "faults_worker.py"


class Machines:
    """`start` runs a case of faults_worker.py, one process on each machine; `cut` and `mend` are for the cable."""

    def __init__(self, folder):
        self.folder, self.logs, self.launchers = folder, [], []
        self.names = [f"jdp{os.getpid() % 10000}{end}" for end in "ab"]
        for i, name in enumerate(self.names):
            ip("netns", "add", name)
            hosts = pathlib.Path("/etc/netns") / name / "hosts"  # what `ip netns exec` shows as /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {platform.node()}\n")
        one, other = (["cable", "netns", name] for name in self.names)
        ip("link", "add", *one, "type", "veth", "peer", "name", *other)
        for i, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")

    def start(self, case):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "JDP_FAULTS_MARK": str(uuid.uuid4())}
        for name in ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "JDP_ATTEMPT"):
            environ.pop(name, None)
        for i, name in enumerate(self.names):
            head = [sys.executable, "-m", "jdp", "launch", "-n", "1", "--devices-per-process", "2", "--nnodes", "2"]
            where = ["--node-rank", str(i), "--coordinator", "10.77.0.1:15500"]
            self.logs.append(self.folder / f"launcher{i}.log")
            with self.logs[-1].open("w") as log:
                script = [str(WORKER), str(self.folder), case, "0"]
                command = ["ip", "netns", "exec", name, *head, *where, *script]
                self.launchers.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=ROOT))

    def notes(self, what):
        found = [
            json.loads(line)
            for path in self.folder.glob("notes-*")
            for line in path.read_text().splitlines(True)
            if line.endswith("\n")
        ]
        return [note for note in found if note["what"] == what]

    def wait(self, what, count, seconds=240):
        end = time.monotonic() + seconds
        while len(self.notes(what)) < count:
            assert time.monotonic() < end and None in [p.poll() for p in self.launchers], str(self)
            time.sleep(0.05)

    def cut(self):
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def mend(self):
        ip("-n", self.names[0], "link", "set", "cable", "up")

    def end(self, seconds):
        """The codes of both launchers, and what each has printed."""
        until = time.monotonic() + seconds
        codes = [p.wait(timeout=max(0.1, until - time.monotonic())) for p in self.launchers]
        return codes, [log.read_text() for log in self.logs]

    def close(self):
        for p in self.launchers:
            p.kill()
            p.wait()
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def __str__(self):
        return "\n".join(log.read_text()[-3000:] for log in self.logs)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def machines(tmp_path):
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (Debian's iproute2) to make two networks with")
    try:
        made = Machines(tmp_path)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    yield made
    made.close()


SAID = "the network to another machine is cut", "the network to its machine is cut"


def test_cuts_of_3_and_12_seconds_are_survived_and_the_longer_one_is_named(machines):
    machines.start("network")
    machines.wait("step", 20)
    for seconds in (3, 12):
        machines.cut()
        time.sleep(seconds)
        machines.mend()
        steps = len(machines.notes("step"))
        assert not any(said in log.read_text() for said, log in zip(SAID, machines.logs, strict=True)) or seconds > 3
        machines.wait("step", steps + 20)
    codes, printed = machines.end(240)
    assert codes == [0, 0] and len(machines.notes("end")) == 2, str(machines)
    assert all(text.count(said) == 1 for said, text in zip(SAID, printed, strict=True)), str(machines)


def test_a_cut_for_good_is_named_on_both_machines(machines):
    machines.start("network_for_ever")
    machines.wait("step", 20)
    machines.cut()
    began = time.monotonic()
    codes, printed = machines.end(40)
    assert time.monotonic() - began < 30
    for said, text in zip(SAID, printed, strict=True):
        assert "s for it, and process" in text or "s for the others, and process" in text or "waits there" in text
        assert said in text and "gave up, for it waited in vain for another" in text, str(machines)
        assert "before any other" not in text, str(machines)
    assert codes == [WAITED, WAITED]
