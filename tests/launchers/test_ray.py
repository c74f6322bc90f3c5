"""Ray Train's workers on CPUs, for which Ray starts no job of JAX: `initialize()` makes them one."""

import sys

import pytest
from started import HERE, ROOT, Job, check_one_job

pytest.importorskip("ray.train", reason="Ray is not installed: ray[train] brings 1.3 GB")
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for what is left behind"),
]

STEPS = 8
SCRIPT = """
import sys
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

def loop(config):
    from launchers_worker import main
    main(config["folder"], 8, config["folder"] + "/run", fails=(1, 3))

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    JaxTrainer(
        loop, train_loop_config={"folder": sys.argv[1]}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1] + "/ray", failure_config=FailureConfig(max_failures=1)),
    ).fit()
"""


@pytest.mark.timeout(400)
def test_an_exception_reaches_ray_which_starts_the_workers_again(job: Job):
    """Worker 1 raises at step 3 of the first attempt, in the thread in which Ray runs the loop."""
    script = job.folder / "script.py"
    script.write_text(SCRIPT)
    job.start(sys.executable, script, job.folder, PYTHONPATH=f"{ROOT}:{HERE}", RAY_TRAIN_V2_ENABLED="1")
    code = job.ends(300)
    last = max(note["began"] for note in job.notes())
    assert 0 < last <= 3 and "ValueError: it fails here" in job.log(), job
    check_one_job(job, code, STEPS, last)
