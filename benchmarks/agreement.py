"""What the processes' agreement leaves behind, and what it costs process 0. Run: python benchmarks/agreement.py

    keys     a job of 2 processes trains for 20,000 steps with dp.prefetch; the keys of jdp in the coordination service
             are counted as it goes on
    process 0    it keeps the coordination service for 4, 16 and 64 processes. It is real, and so is its watch; the
             others are clients of the service in one more process, and each tells where it is every 2 s, and asks for
             the others every second (or as often as the watch of so many processes does). The figure is process 0's
             CPU time for a second of the job, with no step in it.

What a batch itself costs is in processes.py: the gather is one of JAX's collectives, and process 0 does no more for it
than any other process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def train(out: str, steps: int) -> None:
    """The job whose keys are counted."""
    import jdp

    jdp.distributed.initialize(timeout=120, start_timeout=120, quiet=True)
    import itertools

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jdp._processes.coordination import under

    dp = jdp.DataParallel(lambda v, x: x * v["params"])
    step = dp.train_step(lambda v, x: jnp.mean((x * v["params"] - 1) ** 2), optax.sgd(1e-3))
    state = step.init({"params": np.ones(4, np.float32)})
    marks = {max(1, steps // 100), steps // 10, steps}
    found = {}
    batches = itertools.repeat(np.ones((4, 4), np.float32), steps)
    for number, batch in enumerate(dp.prefetch(batches), 1):
        state, _ = step(state, batch)
        if number in marks:
            jax.block_until_ready(state)
            found[number] = len(under("jdp/"))
    if jax.process_index() == 0:
        Path(out).write_text(json.dumps(found))


def service(processes: int, seconds: float) -> None:
    """Process 0, whose CPU time is printed."""
    import jdp

    address = f"localhost:{_free_port()}"
    code = [sys.executable, __file__, "--others", address, str(processes), str(seconds + 20)]
    others = subprocess.Popen(code)
    try:
        jdp.distributed.initialize(address, processes, 0, timeout=None, start_timeout=120, quiet=True)
        time.sleep(5)  # all are there
        cpu, began = time.process_time(), time.monotonic()
        time.sleep(seconds)
        print((time.process_time() - cpu) / (time.monotonic() - began) * 1e3, flush=True)
    finally:
        others.kill()
    os._exit(0)  # the others are none that JAX could wait for


def pretend(address: str, processes: int, seconds: float) -> None:
    """The other processes, as process 0 sees them."""
    from jax._src.lib import _jax  # of a benchmark, which simulates what JAX has no public way to simulate

    from jdp._processes.watch import _BEAT, _FEW, _FOLDER, Place

    pause = max(_BEAT / 2, processes / _FEW)
    end = time.monotonic() + seconds

    def one(number: int) -> None:
        client = _jax.get_distributed_runtime_client(address, number, init_timeout=120, use_compression=True)
        client.connect()
        beat = 0
        while time.monotonic() < end:
            if beat % max(1, round(_BEAT / pause)) == 0:
                place = Place(beat, "a machine", 0, "train_step.loss", 0.1, False, {"jdp/all": beat})
                client.key_value_set(f"{_FOLDER}{number}", json.dumps(place), True)
            client.key_value_dir_get(_FOLDER)
            beat += 1
            time.sleep(pause)

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(1, processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", nargs=2, metavar=("OUT", "STEPS"), help=argparse.SUPPRESS)
    parser.add_argument("--service", nargs=2, metavar=("PROCESSES", "SECONDS"), help=argparse.SUPPRESS)
    parser.add_argument("--others", nargs=3, metavar=("ADDRESS", "PROCESSES", "SECONDS"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=20_000, help="whose keys are counted (20,000)")
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 16, 64], help="of process 0 (4 16 64)")
    parser.add_argument("--seconds", type=float, default=20, help="for each of these (20)")
    options = parser.parse_args()
    if options.train:
        return train(options.train[0], int(options.train[1]))
    if options.service:
        return service(int(options.service[0]), float(options.service[1]))
    if options.others:
        return pretend(options.others[0], int(options.others[1]), float(options.others[2]))
    for processes in options.processes:
        command = [sys.executable, __file__, "--service", str(processes), str(options.seconds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"{processes} processes: process 0 spends {float(done.stdout):.2f} ms a second", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "keys.json")
        launch = [sys.executable, "-m", "jdp", "launch", "-n", "2", "--devices-per-process", "1", __file__]
        subprocess.run([*launch, "--train", str(out), str(options.steps)], check=True)
        for steps, keys in json.loads(out.read_text()).items():
            print(f"after {steps} steps: {keys} keys of jdp's in the coordination service")


if __name__ == "__main__":
    main()
