"""What the tests of launchers share."""

import uuid

import pytest
from started import BOUND, GPT, Job


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """`GPT` in one process, which nobody disturbs."""
    job = Job(tmp_path_factory.mktemp("alone"), str(uuid.uuid4()))
    try:
        assert job.start(*GPT).ends(2 * BOUND) == 0, job
        return job
    finally:
        job.stop()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path, str(uuid.uuid4()))
    try:
        yield job
    finally:
        job.stop()
