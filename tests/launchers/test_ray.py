"""Ray Train's workers on CPUs: `initialize()` makes them one job, and `Checkpointer(ray=True)` tells Ray, and goes on.

`make test-ray` runs it, in an environment of its own.
"""

import importlib.util
import json
import re
import sys

import numpy as np
import pytest
from started import HERE, ROOT, Job, check_one_job, losses

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for what is left behind"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="there is no ray[train], which has 1.3 GB"),
    pytest.mark.timeout(600),
]

STEPS = 8
SCRIPT = """
import functools, json, os, signal, sys, threading, time
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

def loop(config):
    import jdp
    from launchers_worker import main
    saver = functools.partial(jdp.Checkpointer, every=config.pop("every", 1), ray=True)
    kill = {} if config.pop("raises", False) else {"fail": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    main(**config, checkpoints="kept", saver=saver, **kill)

def fit(name, workers=2, failures=0, **config):
    result = JaxTrainer(
        loop, train_loop_config={"folder": FOLDER, **config}, scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=FOLDER + "/ray", failure_config=FailureConfig(max_failures=failures)
        ),
    ).fit()
    told = [int(os.path.basename(checkpoint.path)) for checkpoint, _ in result.best_checkpoints]
    print("RESULT", json.dumps([name, result.checkpoint.path, result.metrics, told]), flush=True)

if __name__ == "__main__":
    FOLDER = sys.argv[1]
"""


def run(job: Job, script, seconds=400, **environ):
    """What the script prints as results, when it has ended well."""
    path = job.folder / "script.py"
    path.write_text(SCRIPT + script)
    job.start(sys.executable, path, job.folder, PYTHONPATH=f"{ROOT}:{HERE}", **environ)
    code = job.ends(seconds)
    assert code == 0, job
    return [json.loads(line) for line in re.findall(r"^RESULT (.*)$", job.log(), re.M)]


def curves(job: Job):
    """The losses of the workers of rank 0 and 1, by when they noted them: what one began with, and what it has."""
    notes = sorted(job.folder.glob("rank-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [json.loads(path.read_text()) for path in notes]


def test_a_killed_worker_and_the_curve_is_that_of_an_undisturbed_run(job: Job):
    """Worker 1 is killed before step 6 of the first attempt, and then a run of the same name has nothing left to do."""
    found = run(
        job,
        """
    ray.init(num_cpus=2, include_dashboard=False)
    fit("whole", steps=8, every=2)
    fit("killed", failures=1, steps=8, every=2, fails=(1, 5))
    fit("killed", steps=8, every=2)
""",
    )
    for name, path, metrics, told in found:
        assert path == f"{job.folder}/ray/{name}/kept/8" and metrics == {"step": 8} and told[-1] == 8, job
    assert [name for name, *_ in found] == ["whole", "killed", "killed"]
    assert found[0][3] == [2, 4, 6, 8]
    notes = curves(job)
    began = [note["began"] for note in notes[::2]]
    assert began == [note["began"] for note in notes[1::2]], job
    assert began in ([0, 0, 4, 8], [0, 0, 2, 8]), job  # the save of step 4 may have been running still
    whole, before, after = (notes[i]["losses"] for i in (0, 2, 4))
    assert whole[: began[2]] + after == whole and before[:5] == whole[:5] and len(whole) == STEPS  # to the last bit
    np.testing.assert_allclose(whole, losses(STEPS), rtol=1e-4)
    assert len({note["pid"] for note in notes}) == len(notes) == 8  # Ray starts no process again


def test_an_exception_reaches_ray_which_starts_the_workers_again(job: Job):
    """Worker 1 raises at step 3 of the first attempt, in the thread in which Ray runs the loop."""
    run(
        job,
        """
    ray.init(num_cpus=2, include_dashboard=False)
    fit("raises", failures=1, steps=8, fails=(1, 3), raises=True)
""",
    )
    assert "ValueError: it fails here" in job.log()
    check_one_job(job, 0, STEPS, max(note["began"] for note in job.notes()))


def test_a_node_is_drained_and_the_run_goes_on_with_one_worker(job: Job):
    """Nothing would be saved before the last step, but for Ray's notice that one of two nodes will be taken away."""
    found = run(
        job,
        """
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)

    def take_away():
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason
        import pathlib
        while len(notes := [*pathlib.Path(FOLDER).glob("rank-*.json")]) < 2 or not all(
            len(json.loads(note.read_text())["losses"]) > 2 for note in notes
        ):
            time.sleep(0.2)
        end = int(1000 * (time.time() + 30))
        gcs = GcsClient(address=cluster.address)
        gcs.drain_node(node.node_id, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "spot", end)
        time.sleep(12)
        cluster.remove_node(node, allow_graceful=False)

    threading.Thread(target=take_away, daemon=True).start()
    fit("drained", workers=(1, 2), steps=60, every=60, seconds=0.5, replicas=8)
    fit("alone", workers=1, steps=60, every=60, replicas=8)
    ray.shutdown()
    cluster.shutdown()
""",
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="15",  # Ray asks for two once more before it hears that one is gone
    )
    assert found[0][2] == {"step": 60}, job
    saved = int(re.search(r"jdp: SIGTERM: saved step (\d+) in .*; going on until Ray ends the workers", job.log())[1])
    first, _, after, alone = curves(job)
    assert (first["n"], after["n"], after["began"]) == (2, 1, saved) and found[0][3] == [saved, 60], job
    assert first["losses"][:saved] + after["losses"] == alone["losses"]  # to the last bit
    np.testing.assert_allclose(alone["losses"], losses(60), rtol=1e-3)
