"""What the tests of launchers share."""

import uuid

import pytest
from started import Job


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path, str(uuid.uuid4()))
    try:
        yield job
    finally:
        job.stop()
